"""Name the user's line that an op comes from."""

import linecache
import os
import pathlib
import traceback as stack
from typing import Any

import keras
import tensorflow as tf

_UNKNOWN = "a line that could not be found"
_OWN = str(pathlib.Path(__file__).parent.parent)
_PLUGINS = os.path.join(os.path.dirname(os.path.dirname(tf.__file__)), "tensorboard")  # writes what tf.summary is given


def user_line(traceback: Any = None) -> str:
    """Name the innermost line of a stack that belongs to none of the libraries.

    Args:
        traceback: of an op; None: of the caller.
    """
    libraries = (os.path.dirname(tf.__file__), os.path.dirname(keras.__file__), _OWN, _PLUGINS)
    if traceback is None:
        # An op's own, in a graph: there TensorFlow maps what autograph has generated back to its source.
        traceback = stack.extract_stack() if tf.executing_eagerly() else tf.no_op().traceback
    for frame in reversed(traceback):
        written = "__autograph_generated_file" not in frame.filename
        if written and not frame.filename.startswith(libraries) and os.path.exists(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno).strip()
            return f"{frame.filename}:{frame.lineno} ({line})"
    return _UNKNOWN


def innermost(error: BaseException) -> tuple[str, BaseException]:
    """Return the user's line that an error comes from, and the error that others wrap, such as Keras' do."""
    line = _UNKNOWN
    wraps: BaseException | None = error
    while wraps is not None:
        error, found = wraps, user_line(stack.extract_tb(wraps.__traceback__))
        line = line if found == _UNKNOWN else found
        wraps = error.__cause__ or error.__context__
    return line, error
