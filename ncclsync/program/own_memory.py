"""Let what a segment assigns to a variable be memory of its own, where towers share a host's memory.

TensorFlow lets a variable hold the very tensor that is assigned to it. Where towers share a memory, on the
CPU, one constant, or one result of an exchange, would become the memory of all towers' variables.
Source: tensorflow/core/kernels/resource_variable_ops.cc, AssignVariableOp.
"""

from typing import Any

import tensorflow as tf

_SUFFIX = "_own_memory"

# Of what TensorFlow has a kernel that copies.
_COPIED = {
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool, tf.string),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
}


def own_memory(definition: tf.compat.v1.GraphDef) -> list[Any]:
    """Copy, in place, each value right before it is assigned, in functions too, but for those of XLA's.

    Returns:
        The FunctionDefs that were added for that, which TensorFlow has not met yet.
    """
    _copy_before_writes(definition.node, output="")
    functions = {function.signature.name: function for function in definition.library.function}
    writing = any(node.op == "AssignVariableOp" for f in functions.values() for node in f.node_def)
    added: dict[str, Any] = {}  # by the name of the function as it was traced
    queue = list(definition.node) if writing else []
    while queue:
        node = queue.pop()
        for attribute in node.attr.values():
            for called in (attribute.func, *attribute.list.func):
                function = functions.get(called.name)
                if function is None or function.attr["_XlaMustCompile"].b:
                    continue
                if called.name not in added:
                    copied = added[called.name] = definition.library.function.add()
                    copied.CopyFrom(function)
                    copied.signature.name += _SUFFIX
                    _copy_before_writes(copied.node_def, output=":y:0")
                    queue += copied.node_def
                called.name += _SUFFIX
    return list(added.values())


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
