"""Tell the names of tensors from those of ops, as TensorFlow writes both; no other module parses one."""

from typing import NewType

# Of a tensor of a traced graph, such as `dense/MatMul:0`, or of an exchange's result.
TensorName = NewType("TensorName", str)
# Of an op of such a graph, such as `dense/MatMul`.
OpName = NewType("OpName", str)


def op_name(tensor: TensorName) -> OpName:
    """Return the name of the op that a tensor comes from."""
    return OpName(tensor.split(":")[0])


def result_name(op: OpName, number: int = 0) -> TensorName:
    """Return the name of an op's result of that number."""
    return TensorName(f"{op}:{number}")
