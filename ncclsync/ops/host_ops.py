"""Serve TensorFlow ops with kernels in C over host memory: collectives and timestamps.

`csrc/tf/ops.c` registers them, and those of `device_ops`, by TensorFlow's C API.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclError, NcclSyncError


@functools.cache
def register() -> None:
    """Register ncclsync's ops with TensorFlow; once per process. Raises NcclSyncError if it does not take them."""
    library = next(flag.partition(":")[2] for flag in tf.sysconfig.get_link_flags() if flag.startswith("-l:"))
    try:
        native.register_tensorflow(os.path.join(tf.sysconfig.get_lib(), library))
    except NcclError as error:
        raise NcclSyncError(
            "Expected a TensorFlow that takes ncclsync's ops, as 2.20 and 2.21 do. "
            f"Received: {tf.__version__}, where {error}"
        ) from error


def all_reduce(tensors: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor], op: str) -> list[tf.Tensor]:
    """Reduce tensors of all towers, in a graph. When it runs: InvalidArgumentError if sizes differ, or none takes part.

    Args:
        tensors: [N][V] tensors of one dtype, and of one shape for each index.
        weights: [N] float64 scalars that the towers' tensors are multiplied by; 0 leaves a tower out. Weights other
            than 0 and 1 are for sums of floats only.
        op: "sum", "prod", "max" or "min".

    Returns:
        [V] tensors, for all towers.
    """
    flat = [tensor for row in tensors for tensor in row]
    dtype, count = flat[0].dtype, len(tensors[0])
    attributes = {"T": dtype, "dtype": dtype_code(dtype), "op": native.OPS[op]}
    attributes |= {"ranks": len(tensors), "tensors": count, "sent": len(flat)}

    def created(*given):
        return create("NcclsyncAllReduce", given, [dtype] * count, attributes).outputs

    run = tf.function(created, autograph=False) if tf.executing_eagerly() else created
    results = list(run(*weights, *flat))
    for result, tensor in zip(results, tensors[0], strict=True):
        result.set_shape(tensor.shape)
    return results


def dtype_code(dtype: tf.DType) -> int:
    """Return NCCL's number of a dtype, -1 if it has none."""
    return native.DTYPES.get(dtype.name, -1)


def create(
    op: str,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    attributes: Mapping[str, Any],
    device: str = "/CPU:0",
) -> Any:
    """Add an op of ncclsync's, with outputs of these dtypes, to the graph that is being built. Raises as `register`.

    A stateful op waits for its inputs alone, and runs even if its results are not used, in a `tf.function` too. Outside
    a graph it runs at once; then it has no outputs, and None is returned.
    """
    register()
    if tf.executing_eagerly():
        with tf.device(device):
            return tf_compat.run_without_results(op, inputs, attributes)
    node = tf.compat.v1.NodeDef()
    for name, value in attributes.items():
        set_attribute(node, name, value)
    with tf.device(device):
        made = tf_compat.new_op(op, inputs, dtypes, node.attr)
    if tf_compat.is_stateful(made):
        tf_compat.run_independently(made)
    return made


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Set an attribute of a NodeDef to a dtype, an int or a list of these."""
    if isinstance(value, list) and any(isinstance(one, tf.DType) for one in value):
        node.attr[name].list.type.extend(one.as_datatype_enum for one in value)
    elif isinstance(value, tf.DType):
        node.attr[name].type = value.as_datatype_enum
    elif isinstance(value, int):
        node.attr[name].i = value
    else:
        node.attr[name].list.SetInParent()  # also if the list is empty
        node.attr[name].list.i.extend(value)
