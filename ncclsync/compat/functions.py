"""Trace a `tf.function` that a step calls as a part of the step, by what TensorFlow's own cache of it would show.

Private API of TensorFlow: `Function._reduce_retracing`, `Function._function_cache`.
"""

import contextlib
import functools
import hashlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat

# By function, and by what else than tensors it is given: a function whose traces TensorFlow relaxes as it would those.
_RELAXING: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
# By function, by the types of what it is given, and by the rows of one device's trace: a digest of the ops that its
# Python has made.
_MADE: weakref.WeakKeyDictionary[Any, dict[str, dict[int | None, str]]] = weakref.WeakKeyDictionary()
# By trace that TensorFlow has kept: the rows of one device's trace, where the trace was made within a step's.
_ROWS: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
_CREATING = frozenset({"VarHandleOp", "VarIsInitializedOp"})
FUNCTION = type(tf.function(lambda: None))
# Attributes that differ between two traces of the same Python.
_PASSING = frozenset({"_class", "seed", "seed2", "shared_name", "config_proto", "_gradient_op_type"})

_CHANGED = (
    "which was made before; towers take what its Python does now, and that is something else. Pass what has changed as "
    "an argument, or make a new tf.function"
)
_CREATED = (
    "which creates the variables of the step: it traces the step once, before they are there, and the step does not "
    "write what it writes on towers, where it is traced again. Build the model first"
)
_BUILT = (
    "which was made outside of a step and uses other variables than its Python does now, as where Keras had a look at "
    "a model that it built by a first batch: one device does not train what was built then. Call the model on one row "
    "before it is trained, or give its layers a `build`"
)


class _Comparing(threading.local):
    """Hold where this thread notes the functions of which one device would keep another trace; None: nowhere.

    Attributes:
        rows: how many one device's trace has where this one leaves their number open; None: any.
        digests: whether a function should make the ops that it has made before.
        created: for each variable that an inlined function has created, that function.
    """

    found: dict[str, str] | None = None
    rows: int | None = None
    digests: bool = True
    created: list[str] | None = None


_COMPARING = _Comparing()


@contextlib.contextmanager
def stale_functions(rows: int | None = None) -> Iterator[dict[str, str]]:
    """Note inlined functions of which one device keeps another trace, by name and line: how it differs, in words.

    Of traces that steps have made, ops are compared, but for those that loops and branches run; of traces that were
    made outside, of as many `rows`, the variables that are read and written.
    """
    before = vars(_COMPARING).copy()
    vars(_COMPARING).update(found={}, rows=rows, created=[])
    try:
        yield vars(_COMPARING)["found"]
    finally:
        vars(_COMPARING).clear()
        vars(_COMPARING).update(before)


@contextlib.contextmanager
def digests_aside() -> Iterator[None]:
    """Let functions make other ops than before: of numbers that are one batch's."""
    before, _COMPARING.digests = _COMPARING.digests, False
    try:
        yield
    finally:
        _COMPARING.digests = before


@contextlib.contextmanager
def traces_noted(function: Any) -> Iterator[None]:
    """Note for how many rows a function is traced that a step calls as it is, as where Keras looks at shapes."""
    before = _traces(function)
    yield
    if _COMPARING.found is not None:
        _ROWS.update((one, _COMPARING.rows) for one in _traces(function) if one not in before)


def functions_untraced() -> contextlib.AbstractContextManager[None]:
    """Run the Python of each `tf.function` that is called, so that none keeps a trace of it."""

    def untraced(call: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return inlined(self)(*args, **kwargs)

    return tf_compat.methods_wrapped([FUNCTION], "__call__", untraced)


def inlined(function: Any) -> Callable:
    """Return the Python of a `tf.function`, to be called as a part of a trace, as the function would trace it.

    Where its signature, or `reduce_retracing`, opens lengths that are known of the tensors it is given, its Python does
    not know them.
    """
    convert = tf_compat.autograph_converted(function.python_function)

    @functools.wraps(convert)
    def called(*args, **kwargs):
        leaves = tf.nest.flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
        for i, shape in zip(tensors, _shapes_traced(function, leaves, tensors), strict=False):
            if leaves[i].shape.as_list() != shape.as_list():
                leaves[i] = tf.compat.v1.placeholder_with_default(leaves[i], shape)
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
        graph = tf.compat.v1.get_default_graph()
        begin = graph.version
        with tf.variable_creator_scope(functools.partial(_noting, function)):
            results = convert(*args, **kwargs)
        if _COMPARING.found is not None and not any(isinstance(leaf, np.ndarray) for leaf in leaves):
            types = repr([(leaf.dtype, leaf.shape) if i in tensors else leaf for i, leaf in enumerate(leaves)])
            ops = graph.get_operations()[begin:]
            if why := _differs(
                function, types, ops, graph, [leaves[i] for i in tensors], _kept(function, args, kwargs)
            ):
                _COMPARING.found[_told(function)] = why
        return results

    return called


def compare_traces(first: Any, second: Any, created: int) -> None:
    """Note the functions that have created all variables for which TensorFlow traces a step twice, if that matters.

    One device traces the step once: TensorFlow traces those functions twice, by themselves. `created`: how many
    variables were created in all, where the graph `first` was traced. It may not write what the graph `second` writes.
    """
    found, by = _COMPARING.found, _COMPARING.created
    if found is not None and by and len(by) == created and _written(first) != _written(second):
        found.update(dict.fromkeys(by, _CREATED))


def _noting(function: Any, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    """Create a variable, and note the function that does."""
    if _COMPARING.created is not None:
        _COMPARING.created.append(_told(function))
    return next_creator(**kwargs)


def _told(function: Any) -> str:
    """Return the name of a function, and its line if it has one: a layer has none, nor another object."""
    python = function.python_function
    python = inspect.unwrap(getattr(python, "func", python))
    code = getattr(python, "__code__", None)
    name = getattr(python, "__name__", type(python).__name__)
    return name if code is None else f"{name}, at {code.co_filename}:{code.co_firstlineno}"


def _written(graph: Any) -> set[int]:
    """Return the ids of the handles that a graph has captured and writes, other than with a variable's first value."""
    captured = {placeholder.name: id(outside) for outside, placeholder in graph.captures}
    asked = {output.name for op in graph.get_operations() if op.type in _CREATING for output in op.outputs}
    others = (op for op in graph.get_operations() if not (op.inputs and op.inputs[0].name in asked))
    written = {name for op in others if op.type not in _CREATING for name in tf_compat.written_handles(op)}
    return {captured[name] for name in written if name in captured}


def _shapes_traced(function: Any, leaves: Sequence[Any], tensors: Sequence[int]) -> list[tf.TensorShape]:
    """Return the shapes of a function's arguments for which it would be traced; none where its own are these."""
    known = all(leaves[i].shape.is_fully_defined() for i in tensors)  # the trace may be of a tower's rows, else
    if function.input_signature is not None:
        specs = tf.nest.flatten(function.input_signature)
        return [spec.shape for spec in specs] if known and len(specs) == len(tensors) == len(leaves) else []
    if not (known and tensors and function._reduce_retracing):
        return []
    others = repr([leaf for i, leaf in enumerate(leaves) if i not in tensors])
    kept = _RELAXING.setdefault(function, {})
    if others not in kept:
        kept[others] = tf.function(lambda tensors: None, autograph=False, reduce_retracing=True)
    with tf.init_scope():  # where no device or graph makes other traces
        concrete = kept[others].get_concrete_function([tf.TensorSpec.from_tensor(leaves[i]) for i in tensors])
    return [spec.shape for spec in concrete.structured_input_signature[0][0]]


def _differs(function: Any, types: str, ops: Any, graph: Any, given: Sequence[tf.Tensor], kept: Any) -> str:
    """Return how the ops that a function's Python has made differ from those of the trace that one device keeps."""
    if any(op.type in _CREATING for op in ops):
        return ""
    digest = _digest(graph, ops, given)
    if _COMPARING.digests and digest:
        made = _MADE.setdefault(function, {}).setdefault(types, {})
        if made.setdefault(_COMPARING.rows, made.get(None, digest)) != digest:
            return _CHANGED
    others = [] if kept is None else kept.graph.get_operations()
    return _BUILT if others and _used(others) != _used(ops) else ""


def _kept(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the trace of a function that TensorFlow has kept and would run for these arguments, or None."""
    traces = _traces(function)
    if not traces:
        return None
    try:
        bound = inspect.signature(function.python_function).bind(*args, **kwargs)
    except ValueError:  # Python does not know the arguments of a function of C's
        return None
    bound.apply_defaults()
    leaves = tf.nest.flatten((bound.args, bound.kwargs))
    found = []
    for concrete in traces:
        specs, rows = tf.nest.flatten(concrete.structured_input_signature), _ROWS.get(concrete)
        if len(specs) == len(leaves) and all(_takes(*both, rows) for both in zip(specs, leaves, strict=True)):
            found.append((sum(str(getattr(one, "shape", "")).count("None") for one in specs), concrete))
    return min(found, key=lambda one: one[0])[1] if found else None


def _traces(function: Any) -> list[Any]:
    """Return the traces that TensorFlow has kept of a function."""
    return [] if function._function_cache is None else list(function._function_cache.values())


def _takes(spec: Any, leaf: Any, rows: int | None) -> bool:
    """Return whether a trace for this spec, or value of Python's, is one for an argument.

    `rows`: how many an open number of the spec stands for; None: any.
    """
    if isinstance(spec, tf.TypeSpec):
        if not tf.is_tensor(leaf) or not spec.is_compatible_with(leaf):
            return False
        if not (isinstance(leaf, tf.Tensor) and spec.shape.rank):
            return True
        known, given = spec.shape[0] or rows, leaf.shape[0] or _COMPARING.rows
        return known in (None, given)
    return spec is leaf or (type(spec) is type(leaf) and isinstance(leaf, (bool, int, float, str)) and spec == leaf)


def _used(ops: Sequence[tf.Operation]) -> tuple[int, int]:
    """Return how many variables, and other resources, ops take, and how many of them they write."""
    made = {op.name for op in ops if op.type != "Placeholder"}
    taken = {one.name for op in ops for one in op.inputs if one.dtype == tf.resource and one.op.name not in made}
    return len(taken), len(taken & {name for op in ops for name in tf_compat.written_handles(op)})


def _digest(graph: Any, ops: Sequence[tf.Operation], given: Sequence[tf.Tensor]) -> str:
    """Return a digest of ops that a graph has got; "" if they use variables that this trace has created."""
    names = {placeholder.name: f"captured {id(outside)}" for outside, placeholder in getattr(graph, "captures", ())}
    names |= {tensor.name: f"given {i}" for i, tensor in enumerate(given)}
    digest = hashlib.sha256()
    for number, op in enumerate(op for op in ops if op.type != "Placeholder"):
        if any(one.dtype == tf.resource and one.name not in names for one in op.inputs):
            return ""
        node = op.node_def
        kept = {name: one for name, one in node.attr.items() if name not in _PASSING and not one.HasField("func")}
        attributes = [(name, one.SerializeToString(deterministic=True)) for name, one in sorted(kept.items())]
        digest.update(repr((op.type, [names.get(one.name, "") for one in op.inputs], attributes)).encode())
        for output in op.outputs:
            names.setdefault(output.name, f"made {number}.{output.value_index}")
    return digest.hexdigest()
