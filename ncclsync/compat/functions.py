"""Trace a `tf.function` that a step calls as a part of the step, by what TensorFlow's own cache of it would show.

Private API of TensorFlow: `Function._reduce_retracing`.
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
# By function, and by the types of what it is given: a digest of the ops that its Python has made.
_MADE: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
_CREATING = frozenset({"VarHandleOp", "VarIsInitializedOp"})
# Attributes that differ between two traces of the same Python.
_PASSING = frozenset({"_class", "seed", "seed2", "shared_name", "config_proto", "_gradient_op_type"})


class _Comparing(threading.local):
    """Hold where this thread notes the functions of which one device would keep another trace; None: nowhere."""

    found: dict[str, None] | None = None


_COMPARING = _Comparing()


@contextlib.contextmanager
def stale_functions() -> Iterator[dict[str, None]]:
    """Note, by name and line, inlined functions whose Python makes other ops than before for the same types.

    One device keeps the trace that it has made before. Ops that loops and branches run are not compared.
    """
    before, _COMPARING.found = _COMPARING.found, {}
    try:
        yield _COMPARING.found
    finally:
        _COMPARING.found = before


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
        results = convert(*args, **kwargs)
        if _COMPARING.found is not None and not any(isinstance(leaf, np.ndarray) for leaf in leaves):
            types = repr([(leaf.dtype, leaf.shape) if i in tensors else leaf for i, leaf in enumerate(leaves)])
            digest = _digest(graph, begin, [leaves[i] for i in tensors])
            if digest and _MADE.setdefault(function, {}).setdefault(types, digest) != digest:
                code = inspect.unwrap(function.python_function).__code__
                _COMPARING.found[f"{function.__name__}, at {code.co_filename}:{code.co_firstlineno}"] = None
        return results

    return called


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


def _digest(graph: Any, begin: int, given: Sequence[tf.Tensor]) -> str:
    """Return a digest of the ops that a graph has got since a version; "" if they create variables."""
    names = {placeholder.name: f"captured {id(outside)}" for outside, placeholder in getattr(graph, "captures", ())}
    names |= {tensor.name: f"given {i}" for i, tensor in enumerate(given)}
    ops = graph.get_operations()[begin:]
    if any(op.type in _CREATING for op in ops):
        return ""
    digest = hashlib.sha256()
    for number, op in enumerate(ops):
        node = op.node_def
        kept = {name: one for name, one in node.attr.items() if name not in _PASSING and not one.HasField("func")}
        attributes = [(name, one.SerializeToString(deterministic=True)) for name, one in sorted(kept.items())]
        digest.update(repr((op.type, [names.get(one.name, "") for one in op.inputs], attributes)).encode())
        for output in op.outputs:
            names.setdefault(output.name, f"made {number}.{output.value_index}")
    return digest.hexdigest()
