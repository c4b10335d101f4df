"""Name the user's line that an op comes from."""

import collections
import contextlib
import linecache
import os
import pathlib
import traceback as stack
from collections.abc import Iterator, Mapping, Sequence
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
_RUNNING = frozenset({"Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"})  # functions
_LOOPS = frozenset({"StatelessWhile", "While"})
_COMPARING = frozenset({"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"})
# Ops that TensorFlow makes, or leaves out, where it knows a length.
_OF_LENGTHS = frozenset(
    {"BroadcastTo", "Cast", "Fill", "Identity", "OnesLike", "Reshape", "Shape", "Squeeze", "Tile", "ZerosLike"}
)

# Frames of libraries between a line and what it calls.
_CALLING = (
    *("traceback_utils.py", "dispatch.py", "layers/layer.py", "data_layer.py", "ops/operation.py", "ops/function.py"),
    *("models/functional.py", "models/sequential.py", "models/model.py"),
)


def is_library(filename: str) -> bool:
    """Return whether a file is TensorFlow's, Keras' or ncclsync's, or of no module, as what they generate."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<")


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
        if "site-packages" not in name and not name.startswith(_PYTHON):
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


def first_difference(opened: tf.Graph, known: tf.Graph) -> str:
    """Return the line whose ops compute otherwise in a trace that knows a length; "" if there is none.

    It is the user's, or that of an installed package which is neither TensorFlow nor Keras. Ops are compared by the
    line and by what it calls of a library. A library may do more where a length is open (look at it while the step
    runs, transpose by nothing); most ops are then the same number. Where that changes, or ops are missing, the line
    does something else. Not told are gradients, and what TensorFlow makes of a length that it knows: integers, shapes,
    and their casts to numbers.
    """
    found, others = _computed(opened), _computed(known)
    for line, called in sorted(found.keys() | others.keys()):
        (numbers, kinds), (other_numbers, other_kinds) = found[line, called], others[line, called]
        more = kinds - other_kinds
        alike = other_kinds.keys() - more.keys()
        if other_kinds - kinds or (more and (not other_kinds or 2 * len(alike) < len(other_kinds))):
            return line
        if not more and numbers - other_numbers:
            return line
    return ""


def _computed(graph: tf.Graph) -> dict[tuple[str, str], tuple[collections.Counter[str], collections.Counter[str]]]:
    """Return, for each line outside TensorFlow and Keras and what it calls there, its constants and its ops' types.

    Ops count that compute floats or write; integers where the line itself writes a variable.
    """
    count = collections.Counter[str]
    found = collections.defaultdict[tuple[str, str], Any](lambda: (count(), count()))
    integers = collections.defaultdict[tuple[str, str], Any](count)
    library = {one.signature.name: one for one in graph.as_graph_def().library.function}
    captured = {internal.name: id(given) for given, internal in graph.captures if internal.dtype == tf.resource}
    for op in graph.get_operations():
        floats = any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in op.outputs)
        number = op.type == "Const" and op.outputs[0].shape.rank == 0
        number = number and any(user.type not in _OF_LENGTHS for user in op.outputs[0].consumers())
        counts = floats or number or op.type.startswith("Assign") or op.type in _RUNNING
        if not counts or op.type in _OF_LENGTHS or _is_of_tape(op):
            continue
        place = _call_at(op)
        if place is None:
            continue
        numbers, kinds = found[place]
        if op.type != "Const":
            kinds[_kind_of(op, captured)] += 1
        if number:
            bounds = any(user.type in _RUNNING for user in op.outputs[0].consumers())  # a loop
            (numbers if floats or bounds else integers[place])[repr(tf.get_static_value(op.outputs[0]))] += 1
        if op.type in _LOOPS:
            numbers.update(_ends(library[op.node_def.attr["cond"].func.name].node_def))
        for node in _within(op.node_def, library):  # of branches and loops
            dtype = tf.as_dtype(node.attr["dtype" if node.op == "Const" else "T"].type or tf.variant)
            if node.op == "Const" and dtype.is_floating and not node.attr["value"].tensor.tensor_shape.dim:
                numbers[repr(tf.make_ndarray(node.attr["value"].tensor))] += 1
            elif node.op not in _OF_LENGTHS | {"Const"} and dtype.is_floating:
                kinds[node.op] += 1
    # What a library writes by itself, as the state of a seed, is no concern of the line's.
    writing = {line for line, called in found if "assign" in called.rpartition(":")[2]}
    for place in [one for one in integers if one[0] in writing]:
        found[place][0].update(integers[place])
    return found


def _kind_of(op: tf.Operation, captured: Mapping[str, int]) -> str:
    """Return an op's type, with its choices (of words, flags, factors and sizes of windows) and variables."""
    found: list[Any] = [captured[tensor.name] for tensor in op.inputs if tensor.name in captured]
    for name, value in sorted(op.node_def.attr.items()):
        which = value.WhichOneof("value")
        chosen = which in ("b", "f", "s") or (which == "list" and value.list.i)
        if (chosen and name[0] != "_") or (which == "type" and tf.as_dtype(value.type).is_floating):
            found.append(f"{name}={value}")
    return f"{op.type} {found}"


def _is_of_tape(op: tf.Operation) -> bool:
    """Return whether an op is of a gradient: sums of gradients have no names of theirs."""
    of_tape = op.name.startswith(_OF_TAPES)
    return of_tape or (op.type == "AddN" and any(_is_of_tape(one.op) for one in op.inputs))


def _call_at(op: tf.Operation) -> tuple[str, str] | None:
    """Return the line outside TensorFlow and Keras that an op comes from, and what it calls there; None: no line."""
    called = ""
    for frame in reversed(_forward_of(op).traceback):
        name = frame.filename
        if name == _TRACE:
            break
        if "__autograph_generated_file" in name or name.endswith(_CALLING):
            continue
        # An installed package's line is as good as the user's; Python's own run what they are given.
        if is_library(name) or (name.startswith(_PYTHON) and "site-packages" not in name):
            called = f"{name}:{frame.name}"
        elif os.path.exists(name):
            return _text_of(frame), called
    return None


def _within(node: Any, library: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the nodes of the functions that a node runs, and of those that they run."""
    for attribute in node.attr.values():
        for name in [attribute.func.name, *(one.name for one in attribute.list.func)]:
            for inner in library[name].node_def if name in library else ():
                yield inner
                yield from _within(inner, library)


def _ends(nodes: Sequence[Any]) -> Iterator[str]:
    """Yield the constants that a loop's condition compares something with."""
    by_name = {node.name: node for node in nodes}
    compared = {name.partition(":")[0] for node in nodes if node.op in _COMPARING for name in node.input}
    for node in (by_name[name] for name in compared if name in by_name and by_name[name].op == "Const"):
        yield repr(tf.make_ndarray(node.attr["value"].tensor))


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
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} ({line})"


def innermost(error: BaseException) -> tuple[str, BaseException]:
    """Return the user's line that an error comes from, and the innermost error, which Keras' errors may wrap."""
    causes = [*causes_of(error)]
    lines = [user_line(stack.extract_tb(cause.__traceback__)) for cause in causes]
    return next((line for line in reversed(lines) if line != _UNKNOWN), _UNKNOWN), causes[-1]
