"""Name the user's line that an op comes from."""

import contextlib
import linecache
import os
import pathlib
import traceback as stack
from typing import Any

import keras
import tensorflow as tf

from ncclsync.errors import causes_of

_UNKNOWN = "a line that could not be found"
KERAS_STEP = "Keras' own step"
_OWN = str(pathlib.Path(__file__).parent.parent)
_PLUGINS = os.path.join(os.path.dirname(os.path.dirname(tf.__file__)), "tensorboard")  # writes what tf.summary is given
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
# With a separator at the end: keras_hub is not Keras.
_LIBRARIES = tuple(
    os.path.join(one, "") for one in (os.path.dirname(tf.__file__), os.path.dirname(keras.__file__), _OWN, _PLUGINS)
)
_SITE = os.path.join(os.path.dirname(os.path.dirname(keras.__file__)), "")
_TRACE = os.path.join(_OWN, "program", "trace.py")  # calls a step
_OF_TAPES = "gradient_tape/"
_SOURCES = frozenset({"Const", "Placeholder", "ReadVariableOp"})


def is_library(filename: str) -> bool:
    """Return whether a file is TensorFlow's, Keras' or ncclsync's, or of no module, as what they generate."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<")


def is_pythons(filename: str) -> bool:
    """Return whether a file is of Python's own library."""
    return filename.startswith(_PYTHON) and "site-packages" not in filename


def user_line(traceback: Any = None) -> str:
    """Name the innermost line of a stack that is not a library's; if there is none, that of another installed package.

    Of a step, lines that run it, such as `fit`'s, do not count.

    Args:
        traceback: of an op; None: of the caller.
    """
    if traceback is None:
        # An op's own, in a graph: there TensorFlow maps what autograph has generated back to its source.
        traceback = stack.extract_stack() if tf.executing_eagerly() else tf.no_op().traceback
    installed = None
    for frame in reversed(traceback):
        name = frame.filename
        if name == _TRACE:
            return _text_of(installed) if installed else KERAS_STEP
        if "__autograph_generated_file" in name or name.startswith(_LIBRARIES) or not os.path.exists(name):
            continue
        if "site-packages" not in name and not is_pythons(name):
            return _text_of(frame)
        installed = installed or frame
    return _text_of(installed) if installed else _UNKNOWN


def own_place(op: tf.Operation) -> tuple[str, str]:
    """Name the user's line from which an op of a step's trace comes; without it, the layer or loss, or Keras' line.

    Lines that run the step, such as `fit`'s, do not count, nor do installed libraries. A gradient's line is that of the
    op whose gradient it is.

    Args:
        op: of a graph that `program.trace` has made.

    Returns:
        The place, and the type of the op there: for a gradient, of the op whose gradient it is.
    """
    op = _forward_of(op)
    for frame in reversed(op.traceback):
        name = frame.filename
        if name == _TRACE:
            break
        if "__autograph_generated_file" in name or "site-packages" in name or name.startswith(_LIBRARIES):
            continue
        if os.path.exists(name):
            return _text_of(frame), op.type
    scopes = op.name.removeprefix(_OF_TAPES).split("/")[:-1]
    if not scopes:
        lines = (_text_of(one).removeprefix(_SITE) for one in reversed(op.traceback) if _is_keras(one))
        return next(lines, _UNKNOWN), op.type
    kinds = {"compile_loss": "the loss", "compile_metrics": "the metric"}
    place = f"{kinds[scopes[0]]} {scopes[-1]}" if scopes[0] in kinds else f"the layer {'/'.join(scopes)}"
    return place, op.type


def _is_keras(frame: stack.FrameSummary) -> bool:
    """Return whether a line is of Keras' layers, metrics or optimizers, not of what each of these calls."""
    within = frame.filename.removeprefix(_LIBRARIES[1])
    called = within.startswith(("src/backend/", "src/ops/", "src/utils/")) and not within.endswith("/trainer.py")
    return within != frame.filename and not called


def calls_of(graph: tf.Graph, name: str) -> str | None:
    """Return the user's and Keras' calls that made an op of a step, as Python prints them; None if they are unknown.

    Args:
        graph: that `program.trace` has made.
        name: of the op.
    """
    try:
        op = _forward_of(graph.get_operation_by_name(name))
    except (KeyError, ValueError):
        return None
    hidden = (os.path.dirname(tf.__file__), _OWN, "__autograph")
    return "".join(stack.format_list([one for one in op.traceback if not one.filename.startswith(hidden)])).rstrip()


def _forward_of(op: tf.Operation) -> tf.Operation:
    """Return the op whose gradient a tape's op is, or an op of that name scope; for other ops, the op itself."""
    while op.type == "AddN" and all(one.op.name.startswith(_OF_TAPES) for one in op.inputs):
        op = op.inputs[0].op
    if not op.name.startswith(_OF_TAPES):
        return op
    scope = os.path.dirname(op.name.removeprefix(_OF_TAPES))
    with contextlib.suppress(KeyError, ValueError):  # none of that name, or no name
        return op.graph.get_operation_by_name(scope)
    queue, met, found = [op], {op.name}, []
    for one in queue:
        for near in (tensor.op for tensor in one.inputs):
            if near.name.startswith(_OF_TAPES) and near.name not in met:
                met.add(near.name)
                queue.append(near)
            elif not near.name.startswith(_OF_TAPES) and near.type not in _SOURCES:
                found.append(near)
    return next((one for one in found if os.path.dirname(one.name) == scope), found[0] if found else op)


def _text_of(frame: stack.FrameSummary) -> str:
    return line_text(frame.filename, frame.lineno or 0)


def line_text(filename: str, number: int) -> str:
    """Name a line by its file and number, and show it."""
    return f"{filename}:{number} ({linecache.getline(filename, number).strip()})"


def innermost(error: BaseException) -> tuple[str, BaseException]:
    """Return the user's line that an error comes from, and the innermost error, which Keras' errors may wrap."""
    causes = [*causes_of(error)]
    lines = [user_line(stack.extract_tb(cause.__traceback__)) for cause in causes]
    return next((line for line in reversed(lines) if line != _UNKNOWN), _UNKNOWN), causes[-1]
