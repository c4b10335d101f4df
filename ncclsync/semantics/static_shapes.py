"""Know more lengths of a traced step's tensors than TensorFlow infers, as rules need them.

TensorFlow does not fold a slice of a shape of which some lengths are open. So what it reshapes to `[-1, width]`, as the
softmax's cross-entropy does, has an open width from there on.
"""

from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.semantics.constants import folded

_SMALL = 64  # elements


def tighten(graph: tf.Graph) -> None:
    """Set, in place, lengths that follow from what a graph's tensors are reshaped to."""
    constants: dict[int, Any] = {}

    def constant(tensor: tf.Tensor) -> Any:
        if id(tensor) not in constants:
            constants[id(tensor)] = folded(tensor, constant)
        return constants[id(tensor)]

    tightened: set[int] = set()
    scratch = tf.Graph()
    for op in graph.get_operations():
        if op.type == "Reshape":
            value = constant(op.inputs[1])
            shapes = [None if value is None else [None if length < 0 else int(length) for length in value]]
        elif tightened & {id(tensor) for tensor in op.inputs}:
            shapes = _inferred(op, scratch)
        else:
            continue
        for output, shape in zip(op.outputs, shapes, strict=True):
            before = output.shape.as_list() if output.shape.rank is not None else None
            output.set_shape(shape)
            if output.shape.rank is not None and output.shape.as_list() != before:
                tightened.add(id(output))


def _inferred(op: tf.Operation, scratch: tf.Graph) -> list[Any]:
    """Return the shapes of an op's results as TensorFlow infers them from its inputs' shapes of now."""
    kinds = {tensor.dtype for tensor in (*op.inputs, *op.outputs)}
    if kinds & {tf.resource, tf.variant} or tf_compat.calls_functions(op):
        return [None] * len(op.outputs)
    attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    with scratch.as_default():
        given = [_stand_in(tensor) for tensor in op.inputs]
        copied = scratch.create_op(op.type, given, [output.dtype for output in op.outputs], attrs=attributes)
    return [output.shape for output in copied.outputs]


def _stand_in(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor of the same shape; of the same value if it may be axes or lengths."""
    if tensor.op.type == "Const" and tensor.dtype.is_integer and tensor.shape.num_elements() <= _SMALL:
        return tf.constant(tf.get_static_value(tensor))
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
