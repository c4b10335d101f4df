"""Replace TensorFlow's kernels for the CPU whose threads add up in no order; called by `ordered_sums.py`.

Threads that come first add first: the slices of an embedding's gradient to a variable, and the weights of a histogram.
What towers compute alike would differ in the last bits, and so would a run that is repeated. Other kernels for these
sums keep an order. Where there is no other, all towers take tower 0's result (`semantics/unordered.py`).
Source: tensorflow/core/kernels/scatter_functor.h, ScatterFunctorBase; bincount_op.cc, BincountFunctor.
"""

import functools
from typing import Any

import tensorflow as tf

# By op: the attributes with the dtypes of what is added, and of the places.
_TYPES = {
    "ResourceScatterAdd": ("dtype", "Tindices"),
    "ResourceScatterSub": ("dtype", "Tindices"),
    "DenseBincount": ("T", "Tidx"),
}


def adds_by_threads(node: Any) -> bool:
    """Return whether the threads of a node's op add up in an order that is open, and matters."""
    only_seen = "binary_output" in node.attr and node.attr["binary_output"].b
    return node.op in _TYPES and not only_seen and rounds(node.attr[_TYPES[node.op][0]])


def rounds(dtype: Any) -> bool:
    """Return whether sums of a dtype, an attribute of a node, depend on their order."""
    return tf.as_dtype(dtype.type).is_floating or tf.as_dtype(dtype.type).is_complex


def call_ordered(node: Any) -> Any:
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
        """Use the op for indices of several axes, which adds one slice after another; `slices` may be one number."""
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
