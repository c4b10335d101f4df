"""Estimate how long an op takes: as its arithmetic or its memory traffic does, whichever is longer.

The counts are monomials of the batch's rows, so that a step that is traced for any batch is counted once. Lengths that
are open otherwise count as 1.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", Communications of the ACM 52(4), 2009.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ncclsync.semantics.axes import Axes, Rows, length_of
from ncclsync.semantics.functions import LOOPS, Functions
from ncclsync.semantics.rules import PRODUCTS, equation_of, names

# They change no number, and copy none.
_FREE = names(
    """
    Const EnsureShape ExpandDims Identity IdentityN NoOp Placeholder PreventGradient Rank ReadVariableOp Reshape Shape
    ShapeN Size Squeeze StopGradient
    """
)
# They read some of their first input.
_PARTS = names("Gather GatherNd GatherV2 ResourceGather ResourceGatherNd Slice StridedSlice")
# They add rows up where indices say.
_SCATTERED = names(
    """
    ResourceScatterAdd ResourceScatterSub ScatterNd SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum
    TensorScatterAdd UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum
    """
)
_SCATTERS = 6  # times what they move
SORTS = names("TopK TopKV2 Unique UniqueV2")
_COMPARISON = 64  # multiplications: what as many take, a comparison of a sort takes
# Of matrices: as many multiplications for an element as a row has elements.
CUBIC = names(
    """
    Cholesky CholeskyGrad Eig LogMatrixDeterminant LU MatrixDeterminant MatrixExponential MatrixInverse
    MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr SelfAdjointEigV2 Svd
    """
)
_SORTED_ROWS = 1024  # a sort of n numbers takes log₂ n passes; a sort of rows counts as one of so many

_STRING = 1024  # bytes: what moving as many takes a core, a string takes it

POWERS = 4  # of rows: 0 to 3
COUNTS = 3  # multiplications, bytes moved, kernels


# Of TensorFlow's executor and a kernel, however few numbers it has.
START_S = 4e-6


class Machine(NamedTuple):
    """Say how fast ops run.

    Attributes:
        bytes_per_s: that are moved.
        operations_per_byte: how many of float32 take as long.
        shared: whether all towers have one device's cores, which start ops, too; else each tower has a GPU of its own,
            which is given ops ahead.
    """

    bytes_per_s: float
    operations_per_byte: float
    shared: bool


# An H100 SXM, by its data sheet: 67 · 10¹² float32 operations and 3.35 · 10¹² bytes per second, 20 for each byte; an
# A100 has 12.5. So between them.
GPU = Machine(3.35e12, 16, shared=False)
# A core of a busy server, by the programs that `tests/costs/measured_losses.py` measures.
CORE = Machine(1.2e10, 10, shared=True)


class Size(NamedTuple):
    """Hold a number that grows with the batch: factor · rowsᵖᵒʷᵉʳ."""

    factor: float
    power: int = 0

    def at(self, rows: float) -> float:
        """Return the number for so many rows."""
        return self.factor * rows**self.power


def product(sizes: Iterable[Size]) -> Size:
    """Multiply; more than the third power of rows is taken for the third."""
    made = list(sizes)
    return Size(math.prod(one.factor for one in made), min(sum(one.power for one in made), POWERS - 1))


def seconds(work: np.ndarray, rows: float, parts: int = 1, machine: Machine = GPU) -> np.ndarray:
    """Return how long ops take: [starting them, else moving and computing], each [ops].

    Args:
        work: [ops, COUNTS, POWERS], by `Roofline.work`.
        rows: of the batch.
        parts: into which what grows with the rows is divided.
        machine: that runs them.
    """
    powers = float(rows) ** np.arange(POWERS)
    powers[1:] /= parts
    multiplications, moved, kernels = (work @ powers).T
    bound = np.maximum(2 * multiplications / machine.operations_per_byte, moved) / machine.bytes_per_s
    starts = kernels * START_S
    return np.stack([starts if machine.shared else np.maximum(starts - bound, 0), bound])


class Roofline:
    """Count the work of ops of one graph."""

    def __init__(self, functions: Functions, axes: Axes) -> None:
        """Count nothing yet; `functions` are those that the graph's ops call."""
        self._functions = functions
        self._axes = axes

    def work(self, op: tf.Operation) -> np.ndarray:
        """Count an op's multiplications, the bytes that it moves, and its kernels: [COUNTS, POWERS].

        Of a loop, those of all its trips, as far as their number is known; of a branch, those of the longer one.
        """
        names = self._functions.called_by(op) if self._functions.runs(op) else []
        bodies = [self._of_function(op, name) for name in names]
        if op.type in LOOPS:
            trips, once = self._trips(op), np.sum(bodies, axis=0)
            work = np.zeros_like(once)
            work[:, trips.power :] = once[:, : POWERS - trips.power] * trips.factor
            work[:, -1] += once[:, POWERS - trips.power :].sum(axis=1) * trips.factor
            return work
        if bodies:
            return max(bodies, key=lambda work: work[1].sum())
        work = np.zeros([COUNTS, POWERS])
        if op.type in _FREE:
            return work
        work[2, 0] = 1
        multiplications = self._multiplications(op)
        work[0, multiplications.power] = multiplications.factor
        tensors = [*op.outputs, *op.outputs] if op.type in _PARTS else [*op.inputs, *op.outputs]
        tensors *= _SCATTERS if op.type in _SCATTERED else 1
        for moved in map(self.size_bytes, tensors):
            work[1, moved.power] += moved.factor
        return work

    def size_bytes(self, tensor: tf.Tensor) -> Size:
        """Return the bytes of a tensor."""
        if tensor.dtype in (tf.resource, tf.variant):
            return Size(0.0)
        return product([*self.lengths(tensor), Size(_STRING if tensor.dtype == tf.string else tensor.dtype.size)])

    def lengths(self, tensor: tf.Tensor) -> list[Size]:
        """Return how long each axis of a tensor is; none where their number is not known."""
        return [
            Size(max(length.each, 1), 1) if isinstance(length, Rows) else Size(1 if length is None else length)
            for length in self._axes.lengths(tensor) or ()
        ]

    def _of_function(self, op: tf.Operation, name: str) -> np.ndarray:
        graph, axes = self._axes.body(op, name)
        inner = Roofline(self._functions, axes)
        return sum(map(inner.work, graph.get_operations()), np.zeros([COUNTS, POWERS]))

    def _trips(self, loop: tf.Operation) -> Size:
        """Return how often a loop runs at most; 1 where that is not known. A gradient's runs as its forward loop."""
        for tensor in loop.inputs[:3]:
            while tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
            if tensor.op.type in LOOPS and tensor.value_index == 0:  # how often it ran
                return self._trips(tensor.op)
        if len(loop.inputs) < 2:
            return Size(1)
        values = self._axes.values(loop.inputs[1])
        length = length_of(values) if values is not None and np.ndim(values[0]) == 0 else None  # type: ignore[arg-type]
        return Size(max(length.each, 1), 1) if isinstance(length, Rows) else Size(max(length or 1, 1))

    def _multiplications(self, op: tf.Operation) -> Size:
        """Count the multiplications of a product, and what a sort or a factorisation takes for an element."""
        kind, inputs = op.type, op.inputs
        if kind in PRODUCTS:
            return self._of_product(op)
        if kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")):
            filters = op.outputs[0] if "Filter" in kind else inputs[1]
            after = inputs[2] if "Backprop" in kind else op.outputs[0]
            channels = self._length(filters, -1).factor
            channels *= self._length(filters, -2).factor if kind.startswith("Depthwise") else 1
            return product([*self.lengths(after), *self.lengths(filters), Size(1 / channels)])
        if kind in SORTS or "FFT" in kind:
            tensor, each = (inputs[0], _COMPARISON) if kind in SORTS else (op.outputs[0], 1)
            passes = max(int(math.log2(max(self._length(tensor, -1).at(_SORTED_ROWS), 1))), 1)
            return product([*self.lengths(tensor), Size(passes * each)])
        if kind in CUBIC:
            return product([*self.lengths(inputs[0]), self._length(inputs[0], -1)])
        if kind.startswith("CudnnRNN"):  # input, h, c, parameters; time first
            return product([self._length(inputs[0], 0), *self.lengths(inputs[3])])
        return Size(0)

    def _of_product(self, op: tf.Operation) -> Size:
        found: dict[str, Size] = {}
        operands = equation_of(op).partition("->")[0].split(",")
        for letters, tensor in zip(operands, op.inputs, strict=True):
            head, dots, tail = letters.partition("...")
            lengths = self.lengths(tensor)
            if len(lengths) < len(head) + len(tail):
                continue
            extra = [f".{len(lengths) - i}" for i in range(len(head), len(lengths) - len(tail))] if dots else []
            for name, length in zip([*head, *extra, *tail], lengths, strict=True):
                found[name] = max(found.get(name, Size(1)), length, key=lambda size: (size.power, size.factor))
        return product(found.values())

    def _length(self, tensor: tf.Tensor, axis: int) -> Size:
        lengths = self.lengths(tensor)
        return lengths[axis] if lengths else Size(1)
