"""Let what a segment assigns to a variable be memory of its own, where towers share a host's memory.

TensorFlow lets a variable hold the very tensor that is assigned to it. Where towers share a memory, on the
CPU, one constant, or one result of an exchange, would become the memory of all towers' variables.
Source: tensorflow/core/kernels/resource_variable_ops.cc, AssignVariableOp.
"""

from typing import Any

import tensorflow as tf

from ncclsync.semantics.functions import change_functions, is_compiled

_SUFFIX = "_own_memory"

# The dtypes for which TensorFlow has a kernel that copies.
_COPIED = {
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool, tf.string),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
}


def own_memory(definition: tf.compat.v1.GraphDef) -> list[Any]:
    """Copy, in place, each value right before it is assigned, in functions too, except XLA's; return new functions."""
    _copy_before_writes(definition.node, output="")
    return change_functions(
        definition,
        _SUFFIX,
        lambda function: any(node.op == "AssignVariableOp" for node in function.node_def),
        lambda function: _copy_before_writes(function.node_def, output=":y:0"),
        but=is_compiled,
    )


def own_copy(value: tf.Tensor) -> tf.Tensor:
    """Return a copy that shares no memory with `value`; itself where TensorFlow has no kernel for its dtype."""
    return tf.raw_ops.DeepCopy(x=value) if value.dtype in _COPIED else value


def _copy_before_writes(nodes: Any, output: str) -> None:
    """Insert a copy for each write among a graph's or a function's nodes; `output` follows a node's name."""
    for write in [node for node in nodes if node.op == "AssignVariableOp"]:
        if tf.as_dtype(write.attr["dtype"].type) in _COPIED:
            copied = nodes.add(name=f"{write.name}{_SUFFIX}", op="DeepCopy", device=write.device)
            copied.input.append(write.input[1])
            copied.attr["T"].CopyFrom(write.attr["dtype"])
            write.input[1] = f"{copied.name}{output}"
