"""Give tests `tests/virtual_gpus/run.py` as a module of a name of its own: `tests/gpu` has a `run.py`, too."""

import importlib.util
import pathlib

PATH = pathlib.Path(__file__).parents[1] / "virtual_gpus" / "run.py"

_spec = importlib.util.spec_from_file_location("virtual_gpus_run", PATH)
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)
