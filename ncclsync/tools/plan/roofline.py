"""Estimate the share of a graph's compute that must be done before each of its results."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.program.roofline import OPERATIONS_PER_BYTE, Roofline
from ncclsync.semantics.functions import Functions


def shares_before(outputs: Sequence[Any], graph: tf.Graph) -> tuple[list[float], float]:
    """Return the share of a graph's work before each output and all outputs before it, and the whole work.

    Args:
        outputs: tensors of the graph, in the order of their use.
        graph: with static shapes; an unknown dimension counts as 1.

    Returns:
        Shares from 0 to 1, in ascending order; the work, in bytes moved or operations of the same time.
    """
    library = graph.as_graph_def().library
    roofline = Roofline(Functions({one.signature.name: one for one in library.function}, graph))
    work = {}
    for op in graph.get_operations():
        multiplications, moved, _ = roofline.work(op).sum(axis=1).tolist()
        work[op.name] = max(moved, 2 * multiplications / OPERATIONS_PER_BYTE)
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
