"""Fold the small integers that shapes and axes are computed by, while a step is placed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def folded(tensor: tf.Tensor, constant: Callable[[tf.Tensor], Any]) -> Any:
    """Fold what shapes and axes are computed by; of small integers alone."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return None
    value = tf.get_static_value(tensor)
    if value is not None:
        return np.asarray(value)
    op = tensor.op
    if op.type == "Slice" and op.inputs[0].op.type == "Shape":
        return _slice_of_shape(op, constant)
    numbers: dict[str, Any] = {"AddV2": np.add, "Add": np.add, "Sub": np.subtract, "Mul": np.multiply}
    numbers |= {"FloorMod": np.mod, "FloorDiv": np.floor_divide, "Neg": np.negative}
    numbers |= {"Maximum": np.maximum, "Minimum": np.minimum}
    others = {"Range", "Cast", "Identity", "Reshape", "Prod", "Pack", "ConcatV2", "GatherV2", "ExpandDims"}
    others.add("InvertPermutation")
    if not tensor.dtype.is_integer or op.type not in {*numbers, *others}:
        return None
    given = []
    for one in op.inputs:
        try:
            value = constant(one)
        except RecursionError:  # hundreds of ops lead to it
            return None
        if value is None:
            return None
        given.append(value)
    if op.type in numbers:
        return np.asarray(numbers[op.type](*given))
    if op.type == "Range":
        return np.arange(*[int(one) for one in given])
    if op.type in ("Cast", "Identity"):
        return np.asarray(given[0]).astype(tensor.dtype.as_numpy_dtype)
    if op.type == "Reshape":
        return np.reshape(given[0], given[1])
    if op.type == "Prod":
        return np.asarray(np.prod(given[0], axis=tuple(np.ravel(given[1])), keepdims=op.get_attr("keep_dims")))
    if op.type == "Pack":
        return np.stack(given, axis=op.get_attr("axis"))
    if op.type == "ConcatV2":
        return np.concatenate(given[:-1], axis=int(given[-1]))
    if op.type == "GatherV2" and not op.get_attr("batch_dims"):
        return np.take(given[0], given[1], axis=int(given[2]))
    if op.type == "InvertPermutation":
        return np.argsort(given[0])
    if op.type == "ExpandDims":
        return np.expand_dims(given[0], int(np.ravel(given[1])[0]))
    return None


def _slice_of_shape(op: tf.Operation, constant: Callable[[tf.Tensor], Any]) -> Any:
    """Fold some lengths of a tensor, where others, such as its rows, are open."""
    shape, begin, size = op.inputs[0].op.inputs[0].shape, constant(op.inputs[1]), constant(op.inputs[2])
    if shape.rank is None or begin is None or size is None:
        return None
    (begin,), (size,) = begin, size
    lengths = shape.as_list()[begin:][: None if size < 0 else size]
    return None if None in lengths else np.asarray(lengths, op.outputs[0].dtype.as_numpy_dtype)
