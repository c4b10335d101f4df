"""Run the command line: `python -m ncclsync verify`, `bench`, `doctor`, `plan`, `run`.

TensorFlow is imported to do the work.
"""

import argparse
import importlib
import pathlib
import sys
import traceback
from collections.abc import Sequence

from ncclsync.tools.factories import UsageError

FAILED = 2  # exit code, as argparse's

_COMMANDS = ("verify", "bench", "doctor", "plan", "run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; None: `sys.argv`.

    Raises:
        SystemExit: the arguments are not understood (code 2), or help was asked for (0).
    """
    name = pathlib.Path(sys.argv[0]).name  # of the installed command, or of the module
    program = name if name == "ncclsync" else "python -m ncclsync"
    parser = argparse.ArgumentParser(prog=program, description="Train Keras models on towers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if arguments is None else arguments
    # Import only the named command: a supervisor runs for days, small and without libraries' threads.
    for name in words[:1] if words and words[0] in _COMMANDS else _COMMANDS:
        getattr(importlib.import_module(f"ncclsync.tools.{name}.commands"), f"add_{name}")(commands)
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except UsageError as error:
        print(f"{parser.prog} {given.command}: {error}", file=sys.stderr)
    except Exception:  # of any kind: a command runs the user's code
        # Not left to Python, whose exit code is 1: a script would take it for an answer.
        traceback.print_exc()
    return FAILED
