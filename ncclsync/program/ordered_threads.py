"""Let a segment on the CPU add up in one order where the threads of TensorFlow's kernels add as they come.

So they do with many slices for a variable, as those of an embedding's gradient, and with the weights of a histogram:
what towers compute alike would differ in the last bits, and so would a run that is repeated. Other kernels for the same
keep an order. Where there is none, all towers take tower 0's result (`semantics/unordered.py`).
Source: tensorflow/core/kernels/scatter_functor.h, ScatterFunctorBase; bincount_op.cc, BincountFunctor.
"""

import functools
from typing import Any

import tensorflow as tf

from ncclsync.semantics.functions import change_functions, is_compiled

_SUFFIX = "_ordered_threads"

# By op: the attributes that tell the dtype of what is added, and of the places where.
_TYPES = {
    "ResourceScatterAdd": ("dtype", "Tindices"),
    "ResourceScatterSub": ("dtype", "Tindices"),
    "DenseBincount": ("T", "Tidx"),
}


def order_threads(definition: tf.compat.v1.GraphDef) -> list[Any]:
    """Let functions take the place of such ops, in functions too, except XLA's; return new functions."""
    new: dict[str, Any] = {}

    def order(nodes: Any) -> None:
        for node in filter(_is_open, nodes):
            function = _ordered(node)
            new[function.signature.name] = function

    order(definition.node)
    changed = change_functions(
        definition,
        _SUFFIX,
        lambda function: any(map(_is_open, function.node_def)),
        lambda function: order(function.node_def),
        but=is_compiled,
    )
    definition.library.function.extend(new.values())
    return [*changed, *new.values()]


def _is_open(node: Any) -> bool:
    """Return whether a node adds up in an order that is open, and matters."""
    only_seen = "binary_output" in node.attr and node.attr["binary_output"].b
    if node.op not in _TYPES or only_seen:
        return False
    dtype = tf.as_dtype(node.attr[_TYPES[node.op][0]].type)
    return dtype.is_floating or dtype.is_complex


def _ordered(node: Any) -> Any:
    """Let a node call a function in the place of its op; return the function."""
    function = _function(node.op, *(tf.as_dtype(node.attr[name].type) for name in _TYPES[node.op]))
    node.op = "PartitionedCall" if function.signature.output_arg else "StatefulPartitionedCall"
    node.attr.clear()
    node.attr["Tin"].list.type.extend(argument.type for argument in function.signature.input_arg)
    node.attr["Tout"].list.type.extend(argument.type for argument in function.signature.output_arg)
    node.attr["f"].func.name = function.signature.name
    return function


@functools.cache
def _function(op_type: str, dtype: tf.DType, indices: tf.DType) -> Any:
    def scatter(variable, places, slices):
        """By the op for places of several axes, which adds one slice after another; one number may be all slices."""
        slice_shape = tf.raw_ops.VariableShape(input=variable)[1:]
        slices = tf.broadcast_to(slices, tf.concat([tf.shape(places), slice_shape], 0))
        slices = tf.reshape(slices, tf.concat([[tf.size(places)], slice_shape], 0))
        add = getattr(tf.raw_ops, op_type.replace("Scatter", "ScatterNd"))
        add(ref=variable, indices=tf.reshape(places, [-1, 1]), updates=slices)

    body, first = (_counted, indices) if op_type == "DenseBincount" else (scatter, tf.resource)
    specs = [tf.TensorSpec(None, dtype) for dtype in (first, indices, dtype)]
    return tf.function(body, input_signature=specs, autograph=False).get_concrete_function().function_def


def _counted(values: tf.Tensor, size: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Count a vector, or a number, as one row of a matrix, which one thread does."""
    shape = tf.shape(values)
    rows = tf.concat([[1, 1], shape], 0)[-2:]
    of_weights = tf.where(tf.size(weights) > 0, rows, 0)
    counts = tf.raw_ops.DenseBincount(
        input=tf.reshape(values, rows), size=size, weights=tf.reshape(weights, of_weights), binary_output=False
    )
    return tf.reshape(counts, tf.concat([shape[: tf.rank(values) // 2], tf.shape(counts)[1:]], 0))
