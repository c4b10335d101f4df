"""Parse the arguments of `python -m ncclsync run` and run it. TensorFlow is not imported here."""

import argparse
import pathlib
from typing import Any

from ncclsync.errors import NcclSyncError
from ncclsync.tools.arguments import add_options, file, number
from ncclsync.tools.factories import UsageError

_DESCRIPTION = """\
Run a script, and start it again if it dies: by a GPU's error, by the time limit of a
collective that hangs, or by a signal such as SIGKILL, SIGSEGV or SIGABRT. It is started
again on the GPUs that are still healthy, and goes on at its newest backup by itself:

    data = ncclsync.Shuffled(x, y, batch_size=256, seed=1)
    model.fit(data, epochs=5, callbacks=[ncclsync.BackupAndRestore("backup", save_freq=100, data=data)])

An error of the script's own ends it as ever, and so do Ctrl-C and SIGTERM, which are
passed on to it; the second one kills it."""

_EPILOG = """\
Write towers=None, the default, in a script that is to go on with fewer GPUs.
Exit code: the script's; 128 + N if signal N has ended it; 2 if it was never started."""


def add_run(commands: Any) -> None:
    """Add `run` to a parser's subcommands."""
    parser = commands.add_parser(
        "run",
        help="run a script, and start it again where its GPU or its process has died",
        usage="python -m ncclsync run [--restarts N] [--report FILE] SCRIPT.py [ARGUMENT ...]\n"
        "       python -m ncclsync run [--restarts N] [--report FILE] -m MODULE [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    given_up = "give up after N restarts in a row without a newer backup"
    report = file("--report", "write what happened to this file as well, a line of JSON for each start")
    add_options(parser, number("--restarts", 0, 3, given_up), report)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", metavar="SCRIPT.py", help="what to run, by the same Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its own arguments")


def _run(given: argparse.Namespace) -> int:
    from ncclsync.tools.run.supervisor import Signals, supervise

    with Signals() as signals:
        _refuse_what_cannot_be(given)
        return supervise(given, signals)


def _refuse_what_cannot_be(given: argparse.Namespace) -> None:
    """Raise UsageError if the command cannot run the script; make the report's file."""
    from ncclsync.communicator.processes import find_process  # with NumPy, which starts threads

    try:
        process = find_process()
    except NcclSyncError as error:
        raise UsageError(str(error)) from None
    if process is not None:
        raise UsageError(
            f"Expected to run one process. Received: {process.size} processes of {process.launcher} "
            f"({process.reason}). Where one of several dies all must be started again, which is the launcher's to do, "
            "such as by torchrun --max-restarts or sbatch --requeue; BackupAndRestore goes on at the backup there too"
        )
    if not given.module and not pathlib.Path(given.script).exists():
        raise UsageError(f"Expected a script's file, or -m and a module. Received: {given.script}, which is not there")
    if given.report is not None:
        try:
            given.report.write_text("")
        except OSError as error:
            raise UsageError(f"Expected a file that can be written as the report. Received: {error}") from None
