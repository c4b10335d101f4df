"""Import the user's model factory, named on the command line, build its model, make data for it."""

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from ncclsync.tools.arguments import add_options, number, option

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class UsageError(Exception):
    """Report an error that the user can correct in the command; shown without a traceback."""


def load(name: str) -> Any:
    """Import the function `module:function`, as a program in the current directory would, or `file.py:function`.

    A file is loaded by its path, even if a module has its name; its folder comes first in `sys.path`, so that it finds
    its neighbours.

    Raises:
        UsageError: there is no such module, file or function.
        Exception: the module's own error while it is imported.
    """
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        raise UsageError(f"Expected module:function or file.py:function. Received: {name}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors; read when TensorFlow is imported
    found: Any = _load_file(home) if home.endswith(".py") else _import_module(home)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [one for one, value in vars(found).items() if callable(value)]
            near = difflib.get_close_matches(part, names, 1)
            write = f". Write {name.removesuffix(part)}{near[0]}" if near else ""
            raise UsageError(f"Expected {home} to have {attribute}. Received: none of that name there{write}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"Expected {name} to be a function. Received: {found!r}")
    with contextlib.suppress(ValueError):  # what C defines may not tell its arguments
        signature = inspect.signature(found)
        if any(one.default is one.empty and one.kind not in _ANY_NUMBER for one in signature.parameters.values()):
            raise UsageError(
                f"Expected {name} to need no arguments. Received: {attribute}{signature}. Give them defaults, or name "
                "a function that calls it with these"
            )
    return found


def _import_module(name: str) -> types.ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the user's module imports something that is missing
        raise UsageError(f"Expected an importable module. Received: {name} ({error})") from error


def _load_file(path: str) -> types.ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"Expected a file {path}. Received: none there")
    path = os.path.realpath(path)
    # Pickles and data classes look for their module by name: it needs a name of its own.
    name = f"ncclsync_loaded_{path}".replace(".", "_")
    if name not in sys.modules:
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # of a file that ends in .py
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def add_model_arguments(parser: argparse.ArgumentParser, batch_size: str) -> None:
    """Add the arguments of `model_and_data`; `batch_size` is the help of `--batch-size`."""
    parser.add_argument("factory", help="module:function or file.py:function that returns a compiled model")
    size, open_size = number("--batch-size", 1, None, batch_size), number("--open-size", 1, 32, "of open dimensions")
    data = "module:function or file.py:function that returns arrays x, (x, y) or (x, y, sample_weight); default: random"
    add_options(parser, size, option("--data", data, metavar="NAME"), number("--seed", 0, 0), open_size)


def model_and_data(given: argparse.Namespace, factory: Callable, default: int, batches: int) -> tuple[Any, Any, int]:
    """Build the model of a factory, and data for it, random unless `--data` names some; imports TensorFlow.

    Args:
        given: arguments of `add_model_arguments`.
        factory: undecorated.
        default: the batch size of a model that declares none.
        batches: the number of batches to make.

    Returns:
        The model, `(x, y)` or `(x,)` or what `--data` returns, and the batch size.

    Raises:
        UsageError: the factory returns no compiled model, or the model's input shapes are not known.
    """
    import keras

    from ncclsync.training.random_data import fixed_batch_size, random_data

    keras.utils.set_random_seed(given.seed)
    model = factory()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UsageError(f"Expected {given.factory} to return a compiled keras.Model. Received: {model!r}")
    size = given.batch_size or fixed_batch_size(model) or default
    if given.data:
        return model, load(given.data)(), size
    try:
        data = random_data(model, batches * size, batch_size=size, seed=given.seed, open_size=given.open_size)
    except ValueError as error:
        raise UsageError(f"{error}, or name a function that returns data: --data file.py:function") from error
    return model, data, size
