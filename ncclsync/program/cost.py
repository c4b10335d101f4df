"""Count the arithmetic of a step: what each tower does for its rows, and what every tower does for all rows.

Lengths that are open, as the rows' are, count as 1: what is done for one row, beside what is done for one row.
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from ncclsync.semantics.functions import BRANCHES, CALLS, LOOPS, Functions
from ncclsync.semantics.placements import Kind, Placement
from ncclsync.semantics.rules import names

# They change no number, and copy none.
_FREE = names(
    """
    Const EnsureShape ExpandDims Identity IdentityN NoOp Placeholder PreventGradient Rank Reshape Shape ShapeN Size
    Squeeze StopGradient
    """
)
# They read some of their first input.
_PARTS = names("Gather GatherNd GatherV2 ResourceGather ResourceGatherNd Slice StridedSlice")
_MATMULS = names("BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul SparseMatMul")
_SORTS = names("TopK TopKV2")
# Of matrices: as many multiplications for an element as a row has elements.
_CUBIC = names(
    """
    Cholesky CholeskyGrad Eig LogMatrixDeterminant LU MatrixDeterminant MatrixExponential MatrixInverse
    MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr SelfAdjointEigV2 Svd
    """
)
_OF_ROWS = frozenset({Kind.SHARD, Kind.ITEMS, Kind.PENDING})


class Costs:
    """Sum up a step's arithmetic.

    Attributes:
        by_rows: what a tower does for its rows alone.
        alike: (op, its cost) that every tower does for all rows.
    """

    def __init__(self, functions: Functions) -> None:
        """Count nothing yet.

        Args:
            functions: of the step.
        """
        self._functions = functions
        self._bodies: dict[int, float] = {}  # by the id of a function's graph, which `functions` keeps
        self._rows: set[str] = set()  # tensors that rest on rows that all towers have
        self._slices: set[str] = set()  # on the slices of sparse gradients alone
        self.by_rows = 0.0
        self.alike: list[tuple[tf.Operation, float]] = []

    def have_rows(self, op: tf.Operation) -> None:
        """Know that all towers have all rows of these results."""
        self._rows.update(one.name for one in op.outputs if one.dtype != tf.resource and one.shape.rank != 0)

    def repeat(self, op: tf.Operation) -> None:
        """Count an op that every tower does for all rows, besides what it does for its own."""
        self.alike.append((op, self.of(op)))

    def leave_out(self, op: tf.Operation) -> None:
        """Count nothing that is done with these, the slices of sparse gradients: it is the weights' update."""
        self._slices.update(tensor.name for tensor in op.outputs)

    def add(self, op: tf.Operation, given: Sequence[Placement], placed: Sequence[Placement]) -> None:
        """Count an op: by a tower's rows, or whole.

        Args:
            op: as it was traced.
            given: how its inputs are placed.
            placed: how they are where it takes them, and how its results are.
        """
        if not all(one.whole for one in placed):
            self.by_rows += self.of(op)
            return
        others = [tensor for tensor in op.inputs if tensor.name not in self._slices]
        if len(others) < len(op.inputs) and not any(map(_is_open, others)):
            self.leave_out(op)
            return
        taken = any(one.kind in _OF_ROWS for one in given) or any(tensor.name in self._rows for tensor in op.inputs)
        made = any(one.kind is Kind.ROWS for one in given) and any(map(_is_open, op.outputs))
        if taken or made:
            self.have_rows(op)
            self.alike.append((op, self.of(op)))

    @property
    def share_alike(self) -> float:
        """Return the share of the arithmetic that every tower does for all rows."""
        alike = sum(cost for _, cost in self.alike)
        return alike / (alike + self.by_rows or 1.0)

    def of(self, op: tf.Operation) -> float:
        """Count an op's multiplications, and the elements that it reads and writes."""
        is_function = op.type in LOOPS | BRANCHES | CALLS or self._functions.calls(op.type)
        called = self._functions.called_by(op) if is_function else []
        if op.type in LOOPS:
            return self.trips(op) * sum(self._of_function(name, op.inputs) for name in called)
        if called:  # of a branch: either
            return max(self._of_function(name, op.inputs[op.type in BRANCHES :]) for name in called)
        return 0.0 if op.type in _FREE else float(_multiplications(op) + _moved(op))

    def trips(self, loop: tf.Operation) -> int:
        """Return how often a loop runs at most; 1 where that is not known. A gradient's runs as its forward loop."""
        for tensor in loop.inputs[:3]:
            while tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
            if tensor.op.type in LOOPS and tensor.value_index == 0:  # how often it ran
                return self.trips(tensor.op)
        limit = np.asarray(tf.get_static_value(loop.inputs[1]) if len(loop.inputs) > 1 else None)
        return max(int(limit), 1) if limit.ndim == 0 and limit.dtype.kind == "i" else 1

    def _of_function(self, name: str, inputs: list[tf.Tensor]) -> float:
        graph = self._functions.graph(name, inputs)
        if id(graph) not in self._bodies:
            self._bodies[id(graph)] = sum(self.of(op) for op in graph.get_operations())
        return self._bodies[id(graph)]


def _moved(op: tf.Operation) -> int:
    """Count what an op reads and writes."""
    written = sum(map(_elements, op.outputs))
    if op.type in _PARTS:
        return 2 * written
    return written if _multiplications(op) else written + sum(map(_elements, op.inputs))


def _multiplications(op: tf.Operation) -> int:
    """Count the multiplications of a product, and what a sort or a factorisation takes for an element."""
    kind, inputs = op.type, op.inputs
    if kind in _MATMULS:
        turned = op.get_attr("transpose_a" if kind in ("MatMul", "SparseMatMul") else "adj_x")
        return _elements(op.outputs[0]) * _length(inputs[0], -2 if turned else -1)
    if kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")):
        filters = op.outputs[0] if "Filter" in kind else inputs[1]
        after = inputs[2] if "Backprop" in kind else op.outputs[0]
        channels = _length(filters, -1) * (_length(filters, -2) if kind.startswith("Depthwise") else 1)
        return _elements(after) * _elements(filters) // channels
    if kind == "Einsum":
        return _einsum(op)
    if kind in _SORTS:
        return _elements(inputs[0]) * max(int(math.log2(_length(inputs[0], -1))), 1)
    if "FFT" in kind and inputs[0].shape.rank:
        return _elements(op.outputs[0]) * max(int(math.log2(_length(op.outputs[0], -1))), 1)
    if kind in _CUBIC:
        return _elements(inputs[0]) * _length(inputs[0], -1)
    if kind.startswith("CudnnRNN"):  # input, h, c, parameters; time first
        return _length(inputs[0], 0) * _elements(inputs[3])
    return 0


def _einsum(op: tf.Operation) -> int:
    lengths: dict[str, int] = {}
    operands = op.get_attr("equation").decode().partition("->")[0].split(",")
    for letters, tensor in zip(operands, op.inputs, strict=True):
        head, dots, tail = letters.strip().partition("...")
        rank = tensor.shape.rank
        if rank is None:
            continue
        extra = [f".{rank - i}" for i in range(len(head), rank - len(tail))] if dots else []
        for name, length in zip([*head, *extra, *tail], tensor.shape.as_list(), strict=True):
            lengths[name] = max(lengths.get(name, 1), length or 1)
    return math.prod(lengths.values())


def _is_open(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is None or None in tensor.shape.as_list()


def _length(tensor: tf.Tensor, axis: int) -> int:
    return (tensor.shape[axis] if tensor.shape.rank else None) or 1


def _elements(tensor: tf.Tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant):
        return 0
    return math.prod(length or 1 for length in tensor.shape.as_list()) if tensor.shape.rank else 1
