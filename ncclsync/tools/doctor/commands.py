"""Parse the arguments of `python -m ncclsync doctor` and run it."""

import argparse
import json
from typing import Any

from ncclsync.errors import NcclSyncError
from ncclsync.tools.arguments import add_options, number, switch

HEALTHY, ILL = 0, 1  # exit codes; `cli` ends with 2 where doctor itself failed


def add_doctor(commands: Any) -> None:
    """Add `doctor` to a parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="find out whether training would run on this machine, and what to mend",
        description="Examine this machine: versions, GPUs and their links, the backend, an all-reduce whose "
        "result is known, environment variables. By a launcher, all processes together: process 0 shows each, and what "
        "differs between them. Exit code 0: healthy; 1: training would fail; 2: doctor itself failed.",
    )
    parser.set_defaults(run=_doctor)
    as_json = switch("--json", "print everything as one JSON object")
    add_options(parser, as_json, number("--timeout", 1, 60, "seconds per check"))


def _doctor(given: argparse.Namespace) -> int:
    report = _examine(given.timeout)
    if report is None:  # process 0 has it
        return HEALTHY
    if given.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        from ncclsync.tools.doctor.screen import render
        from ncclsync.towers.printed import show

        show(render(report))
    return HEALTHY if report.healthy else ILL


def _examine(timeout_s: float) -> Any:
    """Return doctor's report; None in all processes of a launcher but process 0."""
    try:
        from ncclsync.communicator.processes import find_process

        process = find_process()
    except (ImportError, NcclSyncError):  # the compiled part is missing, or a launcher is refused: the report says so
        process = None
    # A process of TF_CONFIG's cluster is examined by itself, and prints its own report.
    if process is None or process.launcher == "TF_CONFIG":
        from ncclsync.tools.doctor.examination import examine

        return examine(timeout_s)
    from ncclsync.tools.doctor.processes import examine_all

    return examine_all(process, timeout_s)
