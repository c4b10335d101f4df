"""Check arguments; bind those of a model's method that takes callbacks, such as `fit`, Keras' or an override."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_REST, _NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def named_arguments(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments, which only the `*args` of an override needs, and arguments by name.

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
        raise TypeError(f"Expected {name} to be a whole number. Received: {value!r}")
    if value < least:
        raise ValueError(f"Expected {name} to be at least {least}. Received: {value}")
