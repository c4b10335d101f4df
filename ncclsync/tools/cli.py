"""Run the command line: `python -m ncclsync verify`, `bench`, `doctor`, `plan`, `run`.

TensorFlow is imported to do the work.
"""

import argparse
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from ncclsync.errors import NcclSyncError
from ncclsync.tools.arguments import at_least
from ncclsync.tools.factories import UsageError, load, model_and_data

# Exit codes; argparse ends with 2 as well.
SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2
HEALTHY, ILL = 0, 1

_WIDTH = 110  # columns of doctor's screen where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; None: `sys.argv`.

    Raises:
        SystemExit: the arguments are not understood (code 2), or help was asked for (0).
    """
    parser = argparse.ArgumentParser(prog="python -m ncclsync", description="Train Keras models on towers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = ("verify", "bench", "doctor", "plan", "run")
    words = sys.argv[1:] if arguments is None else arguments
    # Import only the named command: a supervisor runs for days, small and without libraries' threads.
    for name in words[:1] if words and words[0] in names else names:
        own = {"verify": _add_verify, "doctor": _add_doctor}.get(name)
        (own or getattr(importlib.import_module(f"ncclsync.tools.{name}.commands"), f"add_{name}"))(commands)
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except UsageError as error:
        print(f"{parser.prog} {given.command}: {error}", file=sys.stderr)
    except Exception:  # of any kind: a command runs the user's code
        # Not left to Python, whose exit code is 1: a script would take it for an answer.
        traceback.print_exc()
    return NOT_COMPARED


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="train a model on one device and on N towers, with random data, and compare",
        description="Train a model on one device and on N towers, with random data, and compare after every "
        "step. Exit code 0: equal; 1: different; 2: nothing was compared.",
    )
    parser.set_defaults(run=_verify)
    parser.add_argument("factory", help="module:function or file.py:function that returns a compiled model")
    parser.add_argument("--towers", type=at_least(2), default=4, metavar="N", help="default %(default)s")
    parser.add_argument("--devices", metavar="GPU:0,GPU:1", help="just these instead")
    parser.add_argument("--backend", choices=("nccl", "cpu"), help="default: follows the devices")
    parser.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--batch-size", type=at_least(1), metavar="N", help="default 33, or the model's own")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative; default: by dtype")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--open-size", type=at_least(1), default=32, metavar="N", help="of open dimensions, default %(default)s"
    )
    parser.add_argument("--exact", action="store_true", help="exact=True, as in nccl_parallel")


def _verify(given: argparse.Namespace) -> int:
    from rich.console import Console

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors; read when TensorFlow is imported
    factory = load(given.factory)
    from ncclsync.tools.verify.verification import verify

    options: dict[str, Any] = {
        "devices": given.devices.split(",") if given.devices else None,
        "backend": given.backend,
        "exact": given.exact,
    }
    options = {name: value for name, value in options.items() if value}
    data, batch_size = model_and_data(
        factory,
        given.factory,
        batch_size=given.batch_size,
        default=33,
        batches=given.steps,
        seed=given.seed,
        open_size=given.open_size,
    )[1:]
    report = verify(
        factory,
        data,
        given.towers,
        given.steps,
        batch_size=batch_size,
        tolerance=given.tolerance,
        seed=given.seed,
        **options,
    )
    console = Console()
    console.print(report if console.is_terminal else str(report), markup=False, highlight=False, soft_wrap=True)
    return SAME if report.ok else DIFFERENT


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out whether training would run on this machine, and what to mend",
        description="Examine this machine: versions, GPUs and their links, the backend, an all-reduce whose "
        "result is known, environment variables. By a launcher, all processes together: process 0 shows each, and what "
        "differs between them. Exit code 0: healthy; 1: training would fail; 2: doctor itself failed.",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--timeout", type=at_least(1), default=60, metavar="S", help="seconds per check, default %(default)s"
    )


def _examine(timeout_s: float) -> Any:
    """Return doctor's report; None in all processes of a launcher but the first."""
    from ncclsync.tools.doctor.examination import examine

    try:
        from ncclsync.communicator.processes import find_process

        process = find_process()
    except (ImportError, NcclSyncError):  # without the compiled part, or refused as in training: the report says so
        return examine(timeout_s)
    # TF_CONFIG describes a cluster to each process: each prints for itself.
    if process is None or process.launcher == "TF_CONFIG":
        return examine(timeout_s)
    from ncclsync.tools.doctor.processes import examine_all

    return examine_all(process, timeout_s)


def _doctor(given: argparse.Namespace) -> int:
    report = _examine(given.timeout)
    if report is None:  # process 0 has it
        return HEALTHY
    if given.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        from rich.console import Console

        from ncclsync.tools.doctor.screen import render

        console = Console()
        if console.is_terminal:
            console.print(render(report))
        else:
            plain = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
            with plain.capture() as captured:
                plain.print(render(report))
            print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return HEALTHY if report.healthy else ILL
