"""Serve TensorFlow ops over host memory whose kernels are our own C: collectives and timestamps.

They take the place of py ops where all towers are on the CPU. `csrc/tf/ops.c`
registers them by TensorFlow's C API when they are first asked for; where that cannot be done, py ops do
everything: those of `group_ops` and of `spans`.
"""

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.errors import NcclError

logger = logging.getLogger("ncclsync")


@functools.cache
def available() -> bool:
    """Return whether the ops can be used with this TensorFlow; decided once, and logged if not."""
    library = next(flag.partition(":")[2] for flag in tf.sysconfig.get_link_flags() if flag.startswith("-l:"))
    try:
        native.register_tensorflow(os.path.join(tf.sysconfig.get_lib(), library))
    except NcclError as error:
        logger.warning("Towers use Python ops for their collectives: %s", error)
        return False
    return True


def all_reduce(tensors: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor], op: str) -> list[tf.Tensor]:
    """Reduce tensors of all towers, in a graph.

    Args:
        tensors: [N][V] tensors of one dtype; those of the same index have the same shape.
        weights: [N] float64 scalars that the towers' tensors are multiplied by, 0 for a tower that takes no
            part. Others than 0 and 1 for the sum of floats.
        op: "sum", "prod", "max" or "min".

    Returns:
        [V] tensors, for all towers.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, if sizes differ, or no tower takes part.
    """
    results = _collective("NcclsyncAllReduce", tensors, weights, op=native.OPS[op])
    for result, tensor in zip(results, tensors[0], strict=True):
        result.set_shape(tensor.shape)
    return results


def all_gather(tensors: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Concatenate tensors of all towers along their first axis, in a graph.

    Args:
        tensors: [N][V] tensors of one dtype; those of the same index differ in their number of rows at most.

    Returns:
        [V] tensors, for all towers.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, if rows differ in size.
    """
    results = _collective("NcclsyncAllGather", tensors)
    for result, column in zip(results, zip(*tensors, strict=True), strict=True):
        if column[0].shape.rank is not None:
            rows = [tensor.shape[0] for tensor in column]
            result.set_shape([None if None in rows else sum(rows), *column[0].shape[1:]])
    return results


def _collective(
    name: str, tensors: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor] = (), **attributes: Any
) -> list[tf.Tensor]:
    flat = [tensor for row in tensors for tensor in row]
    count = len(tensors[0])
    attributes |= {"T": flat[0].dtype, "ranks": len(tensors), "tensors": count, "sent": len(flat)}
    return _call(name, [*weights, *flat], attributes, count)


def record_timestamp(
    into: native.Timestamps, span: int, ends: bool, tokens: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
) -> tf.Operation:
    """Record, in a graph, when an op runs: after its inputs, and after the control dependencies in force.

    Args:
        into: must live as long as the graph.
        span: its number.
        ends: whether it ends here, else it begins.
        tokens: float32 scalars; what lies on a GPU is copied to the host before.
        values: at most one int64 scalar, to be recorded as well.
    """
    attributes = {
        "meter": into.address,
        "span": span,
        "ends": int(ends),
        "n_tokens": len(tokens),
        "n_values": len(values),
    }
    node = tf.compat.v1.NodeDef()
    for name, value in attributes.items():
        set_attribute(node, name, value)
    with tf.device("/CPU:0"):
        graph = tf.compat.v1.get_default_graph()
        return graph.create_op("NcclsyncTimestamp", [*tokens, *values], [], attrs=dict(node.attr))


def _call(op: str, inputs: Sequence[tf.Tensor], attributes: dict[str, Any], count: int) -> list[tf.Tensor]:
    definition = tf.compat.v1.GraphDef()
    names = [f"input_{i}" for i in range(len(inputs))]
    node = definition.node.add(name="op", op=op, input=names)
    for name, value in attributes.items():
        set_attribute(node, name, value)

    def imported(*given):
        graph = tf.compat.v1.get_default_graph()
        # An identity captures what is from outside the graph, such as that of a branch.
        tensors = [t if getattr(t, "graph", None) is graph else tf.identity(t) for t in given]
        for name, tensor in zip(names, tensors, strict=True):
            placeholder = definition.node.add(name=name, op="Placeholder")
            placeholder.attr["dtype"].type = tensor.dtype.as_datatype_enum
        return tf.graph_util.import_graph_def(
            definition,
            input_map=dict(zip(names, tensors, strict=True)),
            return_elements=[f"op:{i}" for i in range(count)],
            name=op,
        )

    with tf.device("/CPU:0"):
        run = tf.function(imported, autograph=False) if tf.executing_eagerly() else imported
        return list(run(*inputs))


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Set an attribute of a NodeDef to a dtype, an int or a list of these."""
    if isinstance(value, list) and any(isinstance(one, tf.DType) for one in value):
        node.attr[name].list.type.extend(one.as_datatype_enum for one in value)
    elif isinstance(value, tf.DType):
        node.attr[name].type = value.as_datatype_enum
    elif isinstance(value, int):
        node.attr[name].i = value
    else:
        node.attr[name].list.SetInParent()  # an empty list is one, too
        node.attr[name].list.i.extend(value)
