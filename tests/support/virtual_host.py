"""Give tests `tests/virtual_gpus/run.py` as a module of a name of its own: `tests/gpu` has a `run.py`, too.

And tests that may themselves run there: how they start a process.
"""

import importlib.util
import os
import pathlib
import shlex
import sys

PATH = pathlib.Path(__file__).parents[1] / "virtual_gpus" / "run.py"

_spec = importlib.util.spec_from_file_location("virtual_gpus_run", PATH)
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)


def command(script):
    """Return the command that runs a script as this process is run: on virtual GPUs, if it is on such."""
    return [sys.executable, *shlex.split(os.environ.get("VIRTUAL_COMMAND", "")), str(script)]
