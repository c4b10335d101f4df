"""The user's model factory, named on the command line: import it, build its model, make data for it."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any


class UsageError(Exception):
    """What the user can set right in the command; told without a traceback."""


def load(name: str) -> Callable:
    """Import `module:function` or `file.py:function`, as if from a program in the current directory.

    Raises:
        UsageError: there is no such module, file or function.
        Exception: what the module raises while it is imported.
    """
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        raise UsageError(f"Expected module:function or file.py:function. Received: {name}")
    if home.endswith(".py"):
        if not os.path.isfile(home):
            raise UsageError(f"Expected a file {home}. Received: none there")
        sys.path.insert(0, os.path.dirname(os.path.abspath(home)))
        home = os.path.basename(home).removesuffix(".py")
    else:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise  # something that the user's module imports
        raise UsageError(f"Expected an importable module. Received: {home} ({error})") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"Expected {home} to have {attribute}. Received: {found!r} without {part}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"Expected {name} to be a function. Received: {found!r}")
    return found


def model_and_data(
    factory: Callable,
    name: str,
    *,
    batch_size: int | None,
    default: int,
    batches: int,
    seed: int,
    open_size: int,
) -> tuple[Any, tuple[Any, ...], int]:
    """Build the model of a factory, undecorated, and random data for it; imports TensorFlow.

    Args:
        factory: what `load` returned.
        name: of the factory, for messages.
        batch_size: None: the model's own, or `default`.
        default: for a model that declares none.
        batches: how many to make.
        seed, open_size: see `random_data`.

    Returns:
        The model, `(x, y)` or `(x,)`, and the batch size.

    Raises:
        UsageError: it returns no compiled model, or one whose input shapes are not known.
    """
    import keras

    from ncclsync.random_data import fixed_batch_size, random_data
    from ncclsync.verification import undecorated

    keras.utils.set_random_seed(seed)
    model = undecorated(factory)()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UsageError(f"Expected {name} to return a compiled keras.Model. Received: {model!r}")
    size = batch_size or fixed_batch_size(model) or default
    try:
        data = random_data(model, batches * size, batch_size=size, seed=seed, open_size=open_size)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return model, data, size
