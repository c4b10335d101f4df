"""Check arguments and arrays; bind the arguments of `fit` and other methods that take callbacks, overridden or not."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.errors import shown

_REST, _NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def named_arguments(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a method's arguments by name; as given, positional ones apart, if it is an override with `*args`.

    Raises:
        TypeError: the method takes no callbacks.
    """
    signature = inspect.signature(method)
    rest = {one.kind: one.name for one in signature.parameters.values()}
    if not takes(method, "callbacks"):
        raise TypeError(
            "Expected a method that takes callbacks, where a recipe or several processes add some. Received: "
            f"{getattr(method, '__qualname__', method)}{signature}. Let it take **kwargs, and pass them to super()'s"
        )
    if _REST in rest:
        return args, dict(kwargs)
    named = signature.bind_partial(*args, **kwargs).arguments
    others = named.pop(rest[_NAMED], {}) if _NAMED in rest else {}
    return (), {**named, **others}


def takes(method: Callable[..., Any], name: str) -> bool:
    """Return whether a method takes an argument of that name."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(one.kind is _NAMED for one in parameters.values())


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError unless an argument is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"Expected {name} to be a whole number. Received: {shown(value)}")
    if value < least:
        raise ValueError(f"Expected {name} to be at least {least}. Received: {value}")


def count_samples(arrays: Any) -> int:
    """Return the number of samples of the arrays of a nested structure, whose Nones are left out.

    Raises:
        ValueError: there are no arrays, no samples, or arrays of different numbers of samples.
    """
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(arrays) if leaf is not None]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) != 1 or not shapes[0][0]:
        raise ValueError(f"Expected arrays of the same number of samples, at least one. Received: shapes {shapes}")
    return int(shapes[0][0])
