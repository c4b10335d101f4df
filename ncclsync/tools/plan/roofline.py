"""Estimate which share of a graph's compute must be done before each of its results is there.

By the roofline model: an op takes as long as its arithmetic or its memory traffic does, whichever is longer.
Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", Communications of the ACM 52(4), 2009.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Operations of an accelerator while it moves a byte: 67 · 10¹² float32 operations and 3.35 · 10¹² bytes per
# second of an H100 SXM (its data sheet), 19.5 and 1.56 of an A100: 20 and 12.5.
_OPERATIONS_PER_BYTE = 16

# They move nothing: names for what is in memory already.
_FREE = frozenset({"Const", "Identity", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp", "Reshape", "Shape"})


def shares_before(outputs: Sequence[Any], graph: tf.Graph) -> tuple[list[float], float]:
    """Return the share of a graph's work before each output and all outputs before it, and the whole work.

    Args:
        outputs: tensors of the graph, in the order in which they are wanted.
        graph: with static shapes; what is unknown counts as 1.

    Returns:
        Shares from 0 to 1, which never fall; the work, in bytes moved or operations of the same time.
    """
    work = {op.name: _work(op) for op in graph.get_operations()}
    total = sum(work.values())
    done: set[str] = set()
    shares, spent = [], 0.0
    for output in outputs:
        queue = [output.op]
        while queue:
            op = queue.pop()
            if op.name not in done:
                done.add(op.name)
                spent += work[op.name]
                queue += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        shares.append(min(1.0, spent / total) if total else 1.0)
    return shares, total


def _work(op: Any) -> float:
    if op.type in _FREE:
        return 0.0
    moved = sum(_elements(t) * max(t.dtype.size, 1) for t in (*op.inputs, *op.outputs) if t.dtype != tf.resource)
    return max(moved, _operations(op) / _OPERATIONS_PER_BYTE)


def _operations(op: Any) -> float:
    """Count the operations of a product: 2 for each pair of numbers that are multiplied and added."""
    if op.type in ("MatMul", "BatchMatMulV2", "Einsum") and len(op.inputs) == 2:
        # Each index of a product is in two of its three tensors, but that of a batch, which is in all.
        sizes = [_elements(t) for t in (*op.inputs, op.outputs[0])]
        batch = float(np.prod([n or 1 for n in op.inputs[0].shape[:-2]])) if op.type == "BatchMatMulV2" else 1.0
        return 2 * float(np.sqrt(np.prod(np.array(sizes, dtype="float64") / batch))) * batch
    if "Conv" in op.type and "Pool" not in op.type and len(op.inputs) >= 2:
        return _convolution(op)
    return 0.0


def _convolution(op: Any) -> float:
    """Count a convolution's: every number of the image that it makes meets every number of a filter."""
    if op.type.endswith(("BackpropFilter", "BackpropFilterV2")):
        kernel, made = op.outputs[0], op.inputs[2]
    elif "BackpropInput" in op.type:
        kernel, made = op.inputs[1], op.inputs[2]
    else:
        kernel, made = op.inputs[1], op.outputs[0]
    channels = kernel.shape[-1] if kernel.shape.rank else None
    return 2 * _elements(made) * _elements(kernel) / (channels or 1)


def _elements(tensor: Any) -> float:
    if tensor.shape.rank is None:
        return 1.0
    return float(np.prod([size or 1 for size in tensor.shape], dtype="float64"))
