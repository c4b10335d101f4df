"""List, op by op, which placements it takes, and which it gives.

One table, `RULES`, from an op's type to its rule, and each family's reason beside it. A rule looks at a
`Call`, may ask for other placements of its inputs, and returns those of its outputs; or None: then all inputs
are made whole, and every tower computes alike. A rule may be missing; it must not be wrong
(`tests/semantics/test_op_types.py` runs all of them).

Before a rule is asked, partial inputs are made whole, unless the op is in `LINEAR`; counts of rows are,
unless it is in `TAKING_COUNTS`. LOCAL inputs count as whole meanwhile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.semantics.axes import BATCHES, Axes, Rows, length_of, passed_on
from ncclsync.semantics.placements import (
    COUNTER,
    EACH,
    MEAN,
    REPLICATE,
    SUM,
    Kind,
    Placement,
    axes,
    items,
    partial,
    pending,
    rows,
    shard,
)


@dataclasses.dataclass
class Call:
    """An op that is being placed.

    Attributes:
        op: as it was traced.
        tensors: what the op will get.
        inputs: their placements; a rule changes them by `require`.
        placer: the `placing.Placer` that asks.
        given: the tensors and their placements as they came.
        local: indices of LOCAL inputs, which count as whole meanwhile.
        lenient: whether what is whole may be taken for rows: a loop's body is looked at to see what begins
            it.
        row_by_row: whether it is in a loop over a tower's rows.
        within: whether it is in a function, where nothing can be put before it.
        row_splits: names of the row splits of ragged arguments whose values lie in rows, not in rows of rows.
        axes: what is known of the lengths of the op's inputs and outputs.
        unit: of the rows of its inputs, which are placed as those of samples while its rule is asked; see `Placement`.
    """

    op: tf.Operation
    tensors: list[tf.Tensor]
    inputs: list[Placement]
    placer: Any

    def __post_init__(self) -> None:
        self.given = list(self.tensors), list(self.inputs)
        self.local: set[int] = set()
        self.lenient, self.row_by_row, self.within = self.placer.lenient, self.placer.row_by_row, self.placer.within
        self.row_splits: Collection[str] = self.placer.row_splits
        self.axes: Axes = self.placer.axes
        self.unit = ""

    def require(self, index: int, placement: Placement) -> None:
        """Give the op input `index` with that placement."""
        if self.inputs[index] == placement or (index in self.local and placement.kind is not Kind.PARTIAL):
            return
        before = self.given[1][index] if index in self.local else self.inputs[index]
        self.local.discard(index)
        before, after = (one.of_unit(self.unit) if self.unit else one for one in (before, placement))
        self.tensors[index] = self.placer.convert(self.tensors[index], before, after, self.op)
        self.inputs[index] = placement

    def constant(self, index: int) -> Any:
        """Return the value of input `index` if it is known now."""
        return self.axes.constant(self.op.inputs[index])

    def spares(self, index: int) -> bool:
        """Return whether input `index` can be placed otherwise and no rows are gathered: every tower knows all."""
        placed = self.inputs[index].of_unit(self.unit) if self.unit else self.inputs[index]
        return self.placer.spares(self.tensors[index], placed)

    def begin_anew(self) -> None:
        """Take back what was required."""
        self.tensors, self.inputs, self.unit = list(self.given[0]), list(self.given[1]), ""
        self.local.clear()


def names(text: str) -> frozenset[str]:
    """Return the words of a text, op types."""
    return frozenset(text.split())


Rule = Callable[[Call], Sequence[Placement] | None]
RULES: dict[str, Rule] = {}
LINEAR: dict[str, Rule] = {}
NUMBERED: dict[str, Rule] = {}  # for what numbers the tower's own rows; see `uneven.py`
TAKING_COUNTS: set[str] = set()  # ops whose rules look at counts of rows


def rule_for(*types: str, table: dict[str, Rule] = RULES, counting: bool = False) -> Callable[[Rule], Rule]:
    """Enter the decorated rule in a table for these types, words of texts; `counting`: in `TAKING_COUNTS`, too."""

    def add(rule: Rule) -> Rule:
        table.update(dict.fromkeys(names(" ".join(types)), rule))
        TAKING_COUNTS.update(names(" ".join(types)) if counting else ())
        return rule

    return add


_linear = functools.partial(rule_for, table=LINEAR)


def lengths_of(tensor: tf.Tensor) -> Any:
    """Return the lengths of a traced tensor's axes, None where open; None if its rank is."""
    return None if tensor.shape.rank is None else tensor.shape.as_list()


def rank_of(call: Call, index: int) -> Any:
    """Return an input's rank; None if it is open."""
    return call.op.inputs[index].shape.rank


def _all(call: Call, placement: Placement) -> list[Placement]:
    return [placement] * len(call.op.outputs)


def same_rows(one: Placement, other: Placement) -> bool:
    """Return whether two shards have as many rows, of one unit and in the same order, along their axes."""
    counts = {placed.each * max(placed.blocks, 1) for placed in (one, other)} - {0}
    return (
        one.unit == other.unit and len(counts) < 2 and (one.blocks == other.blocks or 0 in (one.blocks, other.blocks))
    )


def together(one: Placement, other: Placement) -> Placement | None:
    """Return the placement of what has the rows of both, along the first's axis; None if they differ."""
    if not same_rows(one, other):
        return None
    chosen = one if one.blocks else other
    return chosen.at(one.axis)


def counted(placed: Placement) -> Placement:
    """Return the placement of rows that are all alike as that of one block of them."""
    return dataclasses.replace(placed, blocks=1) if placed.kind is Kind.SHARD and not placed.blocks else placed


# Element by element: each row of the result comes from the same row of each operand.

UNARY = names(
    """
    Abs Acos Acosh Angle AsString Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1
    BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bucketize Cast
    Ceil CheckNumerics CheckNumericsV2 ComplexAbs Conj Cos Cosh Dawsn DecodeBase64 Digamma Elu EncodeBase64
    Erf Erfc Erfinv Exp
    Expint Expm1 FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin Identity Imag Inv Invert IsFinite
    IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PlaceholderWithDefault
    PopulationCount PreventGradient Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid
    Sign Sin Sinh Snapshot Softplus Softsign Spence Sqrt Square StaticRegexFullMatch StaticRegexReplace
    StopGradient StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Tan Tanh ZerosLike
    """
)
BROADCASTING = names(
    """
    Add AddV2 ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex Div
    DivNoNan Equal FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars
    FakeQuantWithMinMaxVarsPerChannel FloorDiv FloorMod Greater GreaterEqual Igamma
    IgammaGradA Igammac LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan
    NextAfter NotEqual Polygamma Pow RandomGammaGrad RealDiv RightShift SelectV2 SquaredDifference StringJoin Sub
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
    """
)
# Of operands of one shape: an activation's gradient, a sum.
ALIKE = names(
    """
    AddN EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad TanhGrad Select
    """
)


# These keep rows that are all alike so.
ELEMENTWISE = UNARY | BROADCASTING | ALIKE
MOVING = names("ExpandDims Reshape Squeeze Transpose")  # elements, of which each stays as it is


@rule_for(*UNARY)
def _unary(call: Call) -> Sequence[Placement] | None:
    if call.inputs[0].kind in (Kind.PLACES, Kind.INDICES) and call.op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    return _all(call, call.inputs[0])


@rule_for(*BROADCASTING, *ALIKE)
def _broadcast(call: Call) -> Sequence[Placement] | None:
    if all(placed.kind is Kind.ITEMS for placed in call.inputs):  # lists that are added up, element by element
        both: Placement | None = call.inputs[0]
        for other in call.inputs[1:]:
            both = both and either(both, other)
        return None if both is None else [both]
    if any(placed.kind is Kind.PLACES for placed in call.inputs):
        return _numbers(call)
    if any(placed.kind is Kind.INDICES for placed in call.inputs):
        return None
    ranks = [rank_of(call, i) for i in range(len(call.inputs))]
    if None in ranks or (call.op.type == "Select" and len(set(ranks)) > 1):
        return None
    placed = _aligned(call, ranks)
    return None if placed is None else [placed]


def _numbers(call: Call) -> Sequence[Placement] | None:
    """Place what is computed of the numbers of rows: what numbers elements of the tower's rows."""
    kind, one, two = call.op.type, call.inputs[0], call.inputs[-1 if len(call.inputs) < 2 else 1]
    if call.op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    numbers = next(placed for placed in call.inputs if placed.kind is Kind.PLACES)
    if numbers.op not in ("sum", "row"):
        return None
    if kind == "SelectV2":  # `range(rows) if rows > 1 else 0`, of `tf.vectorized_map`
        zero = call.constant(2)
        clear = numbers == two and zero is not None and not np.any(zero)
        return [two] if clear and one.whole and _is_of_several(call, numbers.counts[0]) else None
    if kind == "Mul" and numbers.op == "sum":
        factor = call.constant(0 if numbers is two else 1)
        count, width = numbers.counts
        fits = factor is not None and np.size(factor) == 1 and int(np.ravel(factor)[0]) > 0
        return [dataclasses.replace(numbers, counts=(count, width * int(np.ravel(factor)[0])))] if fits else None
    if kind == "AddV2" and numbers.op == "sum" and numbers is two:  # a gather by row goes back so
        ranks = rank_of(call, 0), rank_of(call, 1)
        aligned = None not in ranks and one.axis - ranks[0] == two.axis - ranks[1]
        if one == shard(one.axis) and one.each == two.counts[0] and aligned and _gathers_by_row(call, two.counts[1]):
            return [dataclasses.replace(two, axis=one.axis, op="row")]
    return None


def _is_of_several(call: Call, each: int) -> bool:
    """Return whether the condition is that there are several numbers of rows: a single number is 0 in any case."""
    condition = call.op.inputs[0].op
    if condition.type != "Greater" or rank_of(call, 0) != 0 or call.axes.constant(condition.inputs[1]) != 1:
        return False
    counts = call.axes.values(condition.inputs[0])
    return counts is not None and [int(one) for one in counts] == [each * batch.rows for batch in BATCHES]


def _gathers_by_row(call: Call, width: int) -> bool:
    """Return whether a gather has taken the first input within each row, of that width: so no index leaves its row."""
    indices = call.op.inputs[0]

    def takes(op: tf.Operation) -> bool:
        if op.type != "GatherV2" or not op.get_attr("batch_dims") or op.inputs[1] is not indices:
            return False
        lengths, axis = call.axes.lengths(op.inputs[0]), call.axes.constant(op.inputs[2])
        return lengths is not None and axis is not None and lengths[int(axis)] == width

    while not any(map(takes, indices.consumers())):
        if indices.op.type not in ("Cast", "Identity"):
            return False
        indices = indices.op.inputs[0]
    return True


def _aligned(call: Call, ranks: Sequence[int]) -> Placement | None:
    """Bring operands together that are broadcast against each other along their last axes.

    Returns:
        The placement of the result, along its axes; None: it has no rows.
    """
    rank, chosen = max(ranks), None
    for i, placed in enumerate(call.inputs):
        if placed.kind is not Kind.SHARD:
            continue
        here = placed.at(placed.axis + rank - ranks[i])
        if chosen is None:
            chosen = here
        elif here.axis != chosen.axis:
            call.require(i, REPLICATE)  # f[:, None] - f[None]: one of them whole, the other by rows
        else:
            chosen = together(chosen, here) or (chosen if call.spares(i) else here)
            for j, other in enumerate(call.inputs):  # rows in another order
                if other.kind is Kind.SHARD and not same_rows(other, chosen):
                    if other.axis + rank - ranks[j] != chosen.axis or not call.spares(j):
                        return None
                    call.require(j, chosen.at(other.axis))
    if chosen is None:
        return None
    axes_there = [chosen.axis - (rank - one) for one in ranks]
    divided = [
        (i, axis)
        for i, axis in enumerate(axes_there)
        if call.inputs[i].whole and axis >= 0 and lengths_of(call.op.inputs[i])[axis] != 1
    ]
    if divided:  # whose rows are not alike
        chosen = counted(chosen)
    for i, axis in divided:
        call.require(i, chosen.at(axis))
    return chosen


# Linear in what is partial: the sum of the towers' results is the result of their sum, if it is finite: where
# one device has an infinity, such as 1 / 0, towers may have a NaN, of 0 / 0. Gradients of a tower's own
# moments pass here too, and must stay that tower's.


_PASSING = names("Identity StopGradient PreventGradient Snapshot PlaceholderWithDefault")
_PICKING = names("StridedSlice StridedSliceGrad Slice Pad Split SplitV Unpack ReverseV2 Tile")
# The input that an op is linear in if all others are whole; of an activation's gradient what flows back.
_LINEAR_IN = dict.fromkeys(_PASSING | MOVING | _PICKING | names("Neg Conj Real Imag Cast Sum Mean"), 0)
_LINEAR_IN |= dict.fromkeys(names("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad"), 0)
_LINEAR_IN |= dict.fromkeys(names("RsqrtGrad SqrtGrad InvGrad ReciprocalGrad TanhGrad SigmoidGrad Split"), 1)
_LINEAR_IN |= {"StridedSliceGrad": 4}


@_linear(*_LINEAR_IN)
def _in_one_input(call: Call) -> Sequence[Placement] | None:
    kind, at = call.op.type, _LINEAR_IN[call.op.type]
    placed, before, after = call.inputs[at], call.op.inputs[at].dtype, call.op.outputs[0].dtype
    if placed.kind is not Kind.PARTIAL or any(not one.whole for i, one in enumerate(call.inputs) if i != at):
        return None
    if kind in _PASSING | MOVING:
        return [placed]
    if kind in _PICKING:  # within a function alone: elsewhere one sum is exchanged, not each of its slices
        return _all(call, placed) if call.within and placed == SUM else None
    # Not integers: their sums wrap, each tower's by itself, and their mean is cut off.
    widens = before == after or (before.is_floating and after.is_floating and before.size < after.size)
    fits = widens if kind == "Cast" else kind != "Mean" or before.is_floating
    return [placed] if fits and placed.op in ("sum", "mean") else None


@_linear("ConcatV2", "Pack")
def _joined_partial(call: Call) -> Sequence[Placement] | None:
    parts = call.inputs[: -1 if call.op.type == "ConcatV2" else None]
    return [parts[0]] if parts[0].kind is Kind.PARTIAL and len(set(parts)) == 1 else None


@_linear("Add", "AddV2", "Sub", "AddN")
def _add_partial(call: Call) -> Sequence[Placement] | None:
    shape = lengths_of(call.op.outputs[0])
    if any(p.kind not in (Kind.PARTIAL, Kind.REPLICATE) for p in call.inputs) or shape is None or None in shape:
        return None
    ops = {p.op for p in call.inputs if p.kind is Kind.PARTIAL}
    # A whole operand may be added to a mean on every tower, and to a sum on one.
    for i, placed in enumerate(call.inputs):
        if placed.kind is Kind.PARTIAL and lengths_of(call.op.inputs[i]) != shape:
            return None
    if ops == {"mean"}:
        return [MEAN]
    if not ops <= {"sum", "mean"}:
        return None
    parts = [i for i, placed in enumerate(call.inputs) if placed.kind is Kind.PARTIAL]
    state = any(passed_on(call.op.inputs[i], "Cast").op.type == "ReadVariableOp" for i in parts)
    for i in range(len(call.inputs)):
        # Each tower's part of a gradient has its part of a regularisation; a count stays one, on tower 0.
        if shape and not state and not call.lenient and call.op.outputs[0].dtype.is_floating:
            call.require(i, MEAN if call.inputs[i].whole else call.inputs[i])
        call.require(i, SUM)
    return [SUM]


@_linear("Mul", "RealDiv", "Div", "MulNoNan", "DivNoNan")
def _scale_partial(call: Call) -> Sequence[Placement] | None:
    one, other = call.inputs
    divides = call.op.type in ("RealDiv", "Div", "DivNoNan")
    at = 0 if one.kind is Kind.PARTIAL else 1
    if (at == 1 and divides) or (other if at == 0 else one).kind is not Kind.REPLICATE:
        return None
    shape = lengths_of(call.op.inputs[at])
    if not call.op.outputs[0].dtype.is_floating or call.inputs[at].op not in ("sum", "mean"):
        return None
    # Only where that makes it no larger: what is exchanged is the smallest of what could be.
    return [call.inputs[at]] if shape is not None and shape == lengths_of(call.op.outputs[0]) else None


def either(one: Placement, two: Placement) -> Placement | None:
    """Return the placement of a tensor, or a list, that is placed as one or the other; None: nothing covers both."""
    if one == two:
        return one
    if one.kind is two.kind is Kind.SHARD and one.axis == two.axis:
        return together(one, two)
    if one.kind is two.kind is Kind.ITEMS:
        if None in (one.of, two.of):  # an empty list; what it lacks is taken for zeros
            return one if two.of is None else two
        of = one.of and two.of and either(one.of, two.of)
        return items(of, one.counts) if of else None
    return None


# Reductions: over the rows they leave a part of the batch's result, over other axes rows.

EVERY, ANY = partial("min"), partial("max")  # of bools
_REDUCED = {"Sum": SUM, "Mean": MEAN, "Max": partial("max"), "Min": partial("min"), "Prod": partial("prod")}
_REDUCED |= {"All": EVERY, "Any": ANY}


@rule_for(*_REDUCED, "EuclideanNorm")
def _reduce(call: Call) -> Sequence[Placement] | None:
    placed, summed = call.inputs
    rank = rank_of(call, 0)
    if placed.kind is not Kind.SHARD:
        return None
    if summed.kind is Kind.AXES and call.op.type == "Sum":
        if placed.axis != summed.axis:
            return None
        operand = summed.of or REPLICATE
        kept = operand.kind is Kind.SHARD
        return [pending(placed.at(operand.axis))] if kept else [SUM]
    placed, over = counted(placed), call.constant(1)
    # Of a single value all axes of length 1 count as broadcast, which no batch that is looked at has shown.
    if rank is None or over is None or (call.unit and call.op.inputs[1].op.type == "BroadcastGradientArgs"):
        return None
    over = {int(axis) % rank for axis in np.ravel(over)}
    keeps = call.op.get_attr("keep_dims")
    if placed.axis not in over:
        return [placed.at(placed.axis - (0 if keeps else sum(a < placed.axis for a in over)))]
    dtype = call.op.inputs[0].dtype
    if dtype.name not in (*native.DTYPES, "bool") or (call.op.type == "Mean" and not dtype.is_floating):
        return None
    return [_REDUCED[call.op.type]] if call.op.type in _REDUCED else None


@rule_for("BiasAdd BiasAddV1 BiasAddGrad")
def _bias_add(call: Call) -> Sequence[Placement] | None:
    rank, placed = rank_of(call, 0), call.inputs[0]
    first = call.op.type != "BiasAddV1" and call.op.get_attr("data_format") == b"NCHW"
    if rank is None or placed.kind is not Kind.SHARD or placed.axis == (1 if first else rank - 1):
        return None
    if call.op.type == "BiasAddGrad":
        return [SUM]
    return [placed] if call.inputs[1].whole else None


# Along some axes alone: which input, or attribute, has these, and whether the result has them still, or more.
_ALONG: dict[str, tuple[int | str, str]] = dict.fromkeys(names("ArgMax ArgMin"), (1, "less"))
_ALONG |= dict.fromkeys(names("Cumsum Cumprod CumulativeLogsumexp Reverse ReverseV2"), (1, "same"))
_ALONG |= {"Roll": (2, "same"), "Unpack": ("axis", "less"), "Squeeze": ("squeeze_dims", "less")}
_ALONG |= {"ExpandDims": (1, "more"), "OneHot": ("axis", "more")}


@rule_for(*_ALONG)
def _along_axes(call: Call) -> Sequence[Placement] | None:
    source, change = _ALONG[call.op.type]
    placed, rank = call.inputs[0], rank_of(call, 0)
    over = call.constant(source) if isinstance(source, int) else call.op.get_attr(source)
    if rank is None or over is None or placed.kind is not Kind.SHARD or any(not p.whole for p in call.inputs[1:]):
        return None
    over = np.flatnonzero(over) if call.op.type == "Reverse" else np.ravel(over)
    along = {int(axis) % (rank + (change == "more")) for axis in over}
    if change == "more":
        return [placed.at(placed.axis + (axis <= placed.axis)) for axis in along]
    if placed.axis in along or not (along or change == "same"):
        return None
    return _all(call, placed.at(placed.axis - (sum(axis < placed.axis for axis in along) if change == "less" else 0)))


@rule_for("L2Loss Bitcast")
def _of_any_shape(call: Call) -> Sequence[Placement] | None:
    sizes = [tensor.dtype.size for tensor in (*call.op.inputs, *call.op.outputs)]
    if call.inputs[0].kind is not Kind.SHARD or sizes[0] != sizes[1]:
        return None
    return [SUM if call.op.type == "L2Loss" else call.inputs[0]]


# Each by itself: matrices, or vectors along the last axis, of which the rows are many.

_LAST = dict.fromkeys(names("Softmax LogSoftmax TopK TopKV2 NthElement IsotonicRegression FFT IFFT RFFT IRFFT"), 1)
_LAST |= dict.fromkeys(
    names(
        """
        Cholesky CholeskyGrad MatrixDeterminant LogMatrixDeterminant MatrixInverse MatrixSolve
        MatrixTriangularSolve MatrixSquareRoot Eig SelfAdjointEigV2 Svd Qr Lu MatrixBandPart MatrixDiagPart
        MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
        FFT2D IFFT2D RFFT2D IRFFT2D BandedTriangularSolve MatrixLogarithm
        MatrixExponential TridiagonalSolve
        """
    ),
    2,
)
_LAST |= {"FFT3D": 3, "IFFT3D": 3, "MatrixDiag": 1}
# How many leading inputs have rows; others are parameters that must be whole. Those of `_UNLIKE` are of other ranks.
_UNLIKE = names("TridiagonalSolve MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3")
_MATRICES = names("MatrixSolve MatrixTriangularSolve CholeskyGrad BandedTriangularSolve") | _UNLIKE


@rule_for(*_LAST)
def _each_by_itself(call: Call) -> Sequence[Placement] | None:
    count = 2 if call.op.type in _MATRICES else 1
    placed = [p for p in call.inputs[:count] if p.kind is Kind.SHARD]
    if not placed or any(not p.whole for p in call.inputs[count:]):
        return None
    ranks = [rank_of(call, i) for i in range(count)]
    last = _LAST[call.op.type]
    if (
        call.op.type in ("MatrixDiagV2", "MatrixDiagV3")
        and np.size(call.constant(1)) == 1
        and call.constant(1) is not None
    ):
        last = 1  # one diagonal, not several
    if None in ranks or any(p.axis != placed[0].axis or not same_rows(p, placed[0]) for p in placed):
        return None
    if call.op.type in _UNLIKE:
        if len(placed) < count or placed[0].axis != 0 or ranks[0] < _LAST[call.op.type] + 1:
            return None
        return _all(call, placed[0])
    if len(set(ranks)) > 1 or placed[0].axis >= ranks[0] - last:
        return None
    for i in range(count):
        # One matrix for all rows stays; what is not broadcast has no length of 1 beside rows.
        if call.inputs[i].kind is Kind.SHARD or lengths_of(call.op.inputs[i])[placed[0].axis] != 1:
            call.require(i, placed[0])
    return _all(call, placed[0])


# Products: what is contracted over the rows is a part of a sum.


def _contract(call: Call, letters: Sequence[str], result: str) -> Sequence[Placement] | None:
    """Place the result of a sum of products whose operands' and result's axes have these names."""
    chosen: tuple[str, Placement] | None = None
    for i, names in enumerate(letters):
        placed = call.inputs[i]
        if placed.kind is not Kind.SHARD:
            continue
        name = names[placed.axis]
        if chosen is None:
            chosen = name, placed
        elif name == chosen[0]:
            both = together(chosen[1], placed)
            if both is None:
                return None
            chosen = name, both
        else:
            call.require(i, REPLICATE)
    if chosen is None:
        return None
    name, placed = chosen
    if name not in result and call.op.outputs[0].dtype.name not in native.DTYPES:
        return None
    for i, names in enumerate(letters):
        if name in names and call.inputs[i].kind is Kind.REPLICATE:
            if lengths_of(call.op.inputs[i])[names.index(name)] == 1:
                continue  # is broadcast, whatever the others have there
            call.require(i, placed.at(names.index(name)))
    return [placed.at(result.index(name)) if name in result else SUM]


PRODUCTS = names("BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul SparseMatMul")


def equation_of(op: tf.Operation) -> str:
    """Return a product as `Einsum` has it."""
    if op.type == "Einsum":
        return op.get_attr("equation").decode().replace(" ", "")
    dots, flags = ("...", ("adj_x", "adj_y")) if op.type.startswith("Batch") else ("", ("transpose_a", "transpose_b"))
    one, other = map(op.get_attr, flags)
    return f"{dots}{'km' if one else 'mk'},{dots}{'nk' if other else 'kn'}->{dots}mn"


@rule_for(*PRODUCTS)
def _product_of(call: Call) -> Sequence[Placement] | None:
    equation = equation_of(call.op)
    given, result = equation.split("->")
    letters, ranks = given.split(","), [rank_of(call, i) for i in range(len(call.inputs))]
    if None in ranks:
        return None
    dots = [rank - (len(names) - 3) if "..." in names else 0 for names, rank in zip(letters, ranks, strict=True)]
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation][: max(dots)]
    for i, names in enumerate(letters):
        shape, begin = lengths_of(call.op.inputs[i]), names.find("...")
        # One of length 1 is broadcast, whatever the others have there.
        own = [
            str(i) if shape[begin + j] == 1 and call.inputs[i].kind is not Kind.SHARD else c
            for j, c in enumerate(spare[len(spare) - dots[i] :])
        ]
        letters[i] = names.replace("...", "".join(own))
    result = result.replace("...", "".join(spare))
    if any(letter.isalpha() and names.count(letter) > 1 for names in (*letters, result) for letter in names):
        return None
    return _contract(call, letters, result)


# Convolutions, pooling and images: the samples lie along the first axis, and filters are whole.


def _joint(call: Call, indices: Sequence[int], axis: int | None = None) -> Placement | None:
    """Bring inputs to the same rows, along the same axis, or this one; return their placement; None: they differ."""
    shards = [call.inputs[i] for i in indices if call.inputs[i].kind is Kind.SHARD]
    if not shards or any(one.axis != shards[0].axis or not same_rows(one, shards[0]) for one in shards):
        return None
    if axis not in (None, shards[0].axis):
        return None
    for i in indices:
        call.require(i, shards[0])
    return shards[0]


# What each input is, and each result; the last letter stands for all further ones: "r", it has rows; "w", it is whole;
# "s", it is the shape of what has rows; "+", it is a sum over the rows.
_SAMPLES_FIRST = {
    "r w -> r": """
        AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D Conv Conv2D Conv3D DepthToSpace
        DepthwiseConv2dNative Dilation2D ExtractImagePatches ExtractVolumePatches HSVToRGB LRN MaxPool MaxPool3D
        MaxPoolV2 RGBToHSV RegexFullMatch RegexReplace ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor
        ResizeNearestNeighborGrad ScaleAndTranslate SpaceToDepth
        """,
    "r r w -> r": """
        DrawBoundingBoxes DrawBoundingBoxesV2 InTopKV2 ResizeBicubicGrad ResizeBilinearGrad ScaleAndTranslateGrad
        SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
        """,
    "r r r w -> r": "LRNGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradV2",
    "r w r -> r": "Dilation2DBackpropInput",
    "r w r -> +": """
        Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter Dilation2DBackpropFilter
        """,
    "s r -> r": "AvgPool3DGrad AvgPoolGrad",
    "s w r -> r": "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
    "r w -> r w": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
}
_OF_SAMPLES = {kind: letters for letters, kinds in _SAMPLES_FIRST.items() for kind in kinds.split()}
TAKING_COUNTS.update(kind for kind, letters in _OF_SAMPLES.items() if "s" in letters)


@rule_for(*_OF_SAMPLES)
def _by_samples(call: Call) -> Sequence[Placement] | None:
    given, made = (
        letters.split() + letters.split()[-1:] * max(len(call.inputs), len(call.op.outputs))
        for letters in _OF_SAMPLES[call.op.type].split(" -> ")
    )
    by = {letter: [i for i in range(len(call.inputs)) if given[i] == letter] for letter in "rws"}
    if not _keeps_samples(call) or not all(_sizes(call, i) for i in by["s"]):
        return None
    placed = _joint(call, by["r"], 0)
    if placed is None:
        return None
    for i in by["w"]:
        call.require(i, REPLICATE)
    results = {"r": placed, "w": REPLICATE, "+": SUM}
    return [results[letter] for letter, _ in zip(made, call.op.outputs, strict=False)]


def _keeps_samples(call: Call) -> bool:
    """Return whether an op of `_SAMPLES_FIRST` has samples along the first axis, and does not mix them."""
    op, rank = call.op, rank_of(call, 0)
    if "Pool" in op.type:
        inputs = [argument.name for argument in op.op_def.input_arg]
        sizes = [
            call.constant(inputs.index(name)) if name in inputs else op.get_attr(name) for name in ("ksize", "strides")
        ]
        return all(one is not None and one[0] == 1 for one in sizes)
    if op.type.startswith("FusedBatchNorm"):
        return not op.get_attr("is_training")
    if op.type == "SoftmaxCrossEntropyWithLogits":
        # Of one row beside open ones TensorFlow infers a result of one row, and computes with that.
        return all(shape is not None and shape[0] != 1 for shape in map(lengths_of, op.inputs))
    return rank == 4 if op.type.startswith("Adjust") else "HSV" not in op.type or (rank or 0) > 1


@rule_for("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _projections(call: Call) -> Sequence[Placement] | None:
    transforms = lengths_of(call.op.inputs[1])
    if transforms is None or call.inputs[0].kind is not Kind.SHARD:
        return None
    one = transforms[0] == 1 and call.inputs[1].whole
    if not one and transforms[0] is None and call.inputs[1].whole:
        return None
    by_rows, whole = ([0], [1, 2]) if one else ([0, 1], [2])
    placed = _joint(call, by_rows, 0)
    if placed is None:
        return None
    for i in (*whole, *range(3, len(call.inputs))):
        call.require(i, REPLICATE)
    return [placed]


@rule_for("SpaceToBatch SpaceToBatchND BatchToSpace BatchToSpaceND")
def _space_to_batch(call: Call) -> Sequence[Placement] | None:
    """Place what a dilated convolution makes: all samples for one offset, then for the next."""
    placed, plain = call.inputs[0], not call.op.type.endswith("ND")
    sizes = [call.op.get_attr("block_size")] * 2 if plain else call.constant(1)
    if placed.kind is not Kind.SHARD or placed.axis or sizes is None or not all(p.whole for p in call.inputs[1:]):
        return None
    count = int(np.prod(sizes))
    if call.op.type.startswith("Space"):
        return [shard(0, placed.blocks * count, placed.each)]
    return [shard(0, placed.blocks // count, placed.each)] if placed.blocks % count == 0 else None


def _sizes(call: Call, index: int) -> bool:
    """Return whether input `index` is the shape of a tensor that has the rows along its first axis."""
    placed = call.inputs[index]
    return placed.kind is Kind.COUNTS and bool(placed.counts[0]) and not any(placed.counts[1:])


# GPUs' own recurrent networks, by the letters of their axes: b has the rows, p is added up over them, and * is a
# kernel's own, of no known order. Source: TensorFlow's documentation of CudnnRNNV3.
_BACK_OF_RNN = "tbu lbu lbu tbu lbu lbu"
_LETTERS = {
    "CudnnRNN": "tbf lbu lbu p -> tbu lbu lbu *",
    "CudnnRNNV2": "tbf lbu lbu p -> tbu lbu lbu * *",
    "CudnnRNNV3": "tbf lbu lbu p b -> tbu lbu lbu * *",
    "CudnnRNNBackprop": f"tbf lbu lbu p {_BACK_OF_RNN} * -> tbf lbu lbu p",
    "CudnnRNNBackpropV2": f"tbf lbu lbu p {_BACK_OF_RNN} * * -> tbf lbu lbu p",
    "CudnnRNNBackpropV3": f"tbf lbu lbu p b {_BACK_OF_RNN} * * -> tbf lbu lbu p",
}


def letters_of(op: tf.Operation) -> tuple[list[str], list[str]]:
    """Return the letters of the axes of an op's inputs and results, as `_LETTERS` has them."""
    table = _LETTERS[op.type]
    if op.type.endswith("V3") and not op.get_attr("time_major"):
        table = table.replace("tb", "bt").replace("lb", "bl")
    given, made = table.split(" -> ")
    return given.split(), made.split()


@rule_for(*_LETTERS)
def _by_letters(call: Call) -> Sequence[Placement] | None:
    given, made = letters_of(call.op)
    placed = next((one for one in call.inputs if one.kind is Kind.SHARD), None)
    if placed is None:
        return None
    for i, (letters, one) in enumerate(zip(given, call.inputs, strict=True)):
        if letters == "*":
            if one != pending(None):
                return None
        elif "b" in letters and rank_of(call, i) == len(letters):  # without a cell's state, input_c is a scalar
            here = placed.at(letters.index("b"))
            if one.kind is Kind.SHARD and (one.axis != here.axis or not same_rows(one, here)):
                return None
            call.require(i, here)
        else:
            call.require(i, REPLICATE)
    ways = {"*": pending(None), "p": SUM}
    return [
        ways[letters] if letters in ways else placed.at(letters.index("b")) if output.shape.rank else REPLICATE
        for letters, output in zip(made, call.op.outputs, strict=True)
    ]


@rule_for("ReverseSequence")
def _reverse_sequence(call: Call) -> Sequence[Placement] | None:
    placed, lengths = call.inputs
    rows_along, turned = call.op.get_attr("batch_dim"), call.op.get_attr("seq_dim")
    if placed.kind is not Kind.SHARD and lengths.kind is Kind.SHARD:
        placed = lengths.at(rows_along)
    if placed.axis == turned or (lengths.kind is Kind.SHARD and not same_rows(placed, lengths)):
        return None
    call.require(0, placed)
    call.require(1, placed.at(0) if placed.axis == rows_along else REPLICATE)
    return [placed]


# Shapes and counts.


@rule_for("Shape", "ShapeN")
def _shape_of(call: Call) -> Sequence[Placement] | None:
    placed = []
    for one, tensor in zip(call.inputs, call.op.inputs, strict=True):
        if one.kind is Kind.SHARD and tensor.shape.rank is not None:
            count = one.each * one.blocks or call.axes.rows(tensor, one.axis) or -1
            placed.append(rows(tuple(count if axis == one.axis else 0 for axis in range(tensor.shape.rank))))
        elif one.kind in (Kind.REPLICATE, Kind.PARTIAL):
            placed.append(REPLICATE)
        elif one.kind is Kind.PLACES and tensor.shape.rank == 1 and one.op == "sum":
            placed.append(rows(one.counts[:1]))
        else:
            return None
    return placed


@rule_for("Size")
def _size_of(call: Call) -> Sequence[Placement] | None:
    (one,), shape = call.inputs, lengths_of(call.op.inputs[0])
    if one.kind is Kind.PLACES:
        return [rows(one.counts[:1])] if one.op == "sum" else None
    if one.kind is not Kind.SHARD:
        return [REPLICATE] if one.kind is Kind.PARTIAL and shape is not None else None
    if shape is None:
        return None
    others = [length for axis, length in enumerate(shape) if axis != one.axis]
    return [rows((-1 if None in others or not one.each else one.each * one.blocks * math.prod(others),))]


@rule_for("Rank")
def _rank_of(call: Call) -> Sequence[Placement] | None:
    return [REPLICATE]


LINEAR.update({"Shape": _shape_of, "ShapeN": _shape_of, "Size": _size_of, "Rank": _rank_of})

# Arithmetic on counts of rows. No rule says what it gives: `Placer` has it computed for several numbers of rows, and
# sees which results grow as these do. Left out is what cuts off, or compares: a tower may have any number of rows.

COUNTING = names(
    """
    Add AddV2 BroadcastArgs Cast ConcatOffset ConcatV2 Cumprod Cumsum DynamicStitch ExpandDims FloorDiv GatherV2
    Identity Mul Pack Prod Reshape ReverseV2 Slice Split SplitV Squeeze StopGradient StridedSlice Sub Sum Tile Transpose
    Unpack
    """
)
# Where all that is compared counts rows: so many first inputs.
COMPARING = {"Max": 1, "Min": 1, "Maximum": 2, "Minimum": 2}
TAKING_PLACES = names("AddV2 Cast GatherV2 Identity Mul Reshape SelectV2 Shape Size UnsortedSegmentSum")


@rule_for("StridedSlice", counting=True)
def _strided_slice(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    for i in (1, 3):
        if call.inputs[i].kind is Kind.COUNTS:
            call.require(i, REPLICATE)
    if placed.kind is not Kind.SHARD:
        return None
    spec = slice_spec(call)
    if call.inputs[2].kind is Kind.COUNTS and (spec is None or not _ends_with_rows(spec, call.inputs[2], placed)):
        call.require(2, REPLICATE)
        spec = slice_spec(call)
    if spec is None:
        return None
    kept = _sliced_axis(spec, placed.axis)
    return None if kept is None else [placed.at(kept)]


def _ends_with_rows(spec: list[Any], ends: Placement, placed: Placement) -> bool:
    """Return whether a slice's only end that counts rows is as many as the tower's, along their own axis."""
    index = only_one(ends.counts)
    if index is None or ends.counts[index] != placed.each * placed.blocks or spec.count("rows") != 1:
        return False
    return sum(one != "new" for one in spec[: spec.index("rows")]) == placed.axis


def slice_spec(call: Call) -> list[Any] | None:
    """Say of each axis of the operand, and of each new one: "all", "rows" (to a count), "some", "one", "new"."""
    begin, _, strides = (call.constant(1 + i) for i in range(3))
    back = call.op.type == "StridedSliceGrad"  # whose first input is the operand's shape
    rank = call.op.inputs[0].shape[0] if back else rank_of(call, 0)
    length = call.op.inputs[1].shape[0]
    if length is None or rank is None:
        return None
    bits = {name: call.op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    spec: list[Any] = []
    for i in range(length):
        bit = 1 << i
        if bits["ellipsis"] & bit:
            later = sum(not bits["new_axis"] & (1 << j) for j in range(i + 1, length))
            spec += ["all"] * (rank - sum(one != "new" for one in spec) - later)
        elif bits["new_axis"] & bit:
            spec.append("new")
        elif bits["shrink_axis"] & bit:
            spec.append("one")
        else:
            plain = strides is not None and strides[i] == 1
            from_first = bits["begin"] & bit or (begin is not None and begin[i] == 0)
            to_rows = not back and call.inputs[2].kind is Kind.COUNTS and call.inputs[2].counts[i]
            to_last = "all" if bits["end"] & bit else "rows" if to_rows else "some"
            spec.append(to_last if plain and from_first else "some")
    spec += ["all"] * (rank - sum(one != "new" for one in spec))
    return spec


def _sliced_axis(spec: list[Any], axis: int) -> Any:
    """Return where an axis of the operand ends up; None: it is not there as a whole."""
    place = seen = 0
    for one in spec:
        if one == "new":
            place += 1
            continue
        if seen == axis:
            return place if one in ("all", "rows") else None
        seen += 1
        place += one != "one"
    return None


@rule_for("StridedSliceGrad", counting=True)
def _strided_slice_back(call: Call) -> Sequence[Placement] | None:
    shape, placed = call.inputs[0], call.inputs[4]
    if shape.kind is not Kind.COUNTS or placed.kind is not Kind.SHARD or any(not p.whole for p in call.inputs[1:4]):
        return None
    axis = only_one(shape.counts)
    spec = None if axis is None else slice_spec(call)
    if spec is None or _sliced_axis(spec, axis) != placed.axis:
        return None
    return [placed.at(axis)]


def only_one(counts: Sequence[int]) -> Any:
    """Return the index of the only element that counts rows; None if there are others, or none."""
    found = [i for i, count in enumerate(counts) if count]
    return found[0] if len(found) == 1 else None


@rule_for("Pack")
def _pack(call: Call) -> Sequence[Placement] | None:
    if any(one.kind not in (Kind.SHARD, Kind.REPLICATE) for one in call.inputs):
        return None
    placed, rank = _joint(call, range(len(call.inputs))), call.op.outputs[0].shape.rank
    return (
        None
        if placed is None or rank is None
        else [placed.at(placed.axis + (call.op.get_attr("axis") % rank <= placed.axis))]
    )


@rule_for("Concat ConcatV2")
def _concat(call: Call) -> Sequence[Placement] | None:
    at = len(call.inputs) - 1 if call.op.type == "ConcatV2" else 0
    indices = [i for i in range(len(call.inputs)) if i != at]
    parts, axis, rank = [call.inputs[i] for i in indices], call.constant(at), rank_of(call, indices[0])
    shards = [one for one in parts if one.kind is Kind.SHARD]
    if axis is None or rank is None or not shards or any(one.kind not in (Kind.SHARD, Kind.REPLICATE) for one in parts):
        return None
    if any(one.axis == int(axis) % rank for one in shards):
        # One batch after another: blocks of as many rows each.
        like = all(
            one.kind is Kind.SHARD and one.axis == shards[0].axis and one.each == shards[0].each for one in parts
        )
        blocks = sum(one.blocks for one in shards)
        return [shard(shards[0].axis, blocks, shards[0].each)] if like and shards[0].each else None
    placed = _joint(call, indices)
    return None if placed is None else [placed]


@rule_for("Slice", counting=True)
def _slice(call: Call) -> Sequence[Placement] | None:
    placed, begin, size = call.inputs
    if placed.kind is not Kind.SHARD:
        return None
    axis = placed.axis
    if size.kind is Kind.COUNTS:
        count = size.counts[axis]
        if only_one(size.counts) != axis or not placed.each or count < 1 or count % placed.each:
            return None
        if count == placed.each * placed.blocks:  # all of them, so that it begins with the first
            return [placed] if begin.whole or (begin.kind is Kind.COUNTS and not any(begin.counts)) else None
        first = begin.counts[axis] if begin.kind is Kind.COUNTS else None
        zero = _constant_element(call, 1, axis) == 0
        if begin.kind is Kind.COUNTS and only_one(begin.counts) != axis:
            return None
        if not zero and (first is None or first < 0 or first % placed.each):
            return None
        return [shard(axis, count // placed.each, placed.each)]
    if begin.kind is Kind.COUNTS or not size.whole:
        return None
    if _constant_element(call, 1, axis) == 0 and _constant_element(call, 2, axis) == -1:
        return [placed]
    return None


def _constant_element(call: Call, index: int, element: int) -> int | None:
    """Return an element of an input that is a vector, if no batch changes it."""
    made = call.op.inputs[index].op
    if made.type == "Pack" and made.outputs[0].shape.rank == 1:
        one = call.axes.constant(made.inputs[element])
        return None if one is None else int(one)
    values = call.axes.values(call.op.inputs[index])
    found = set() if values is None else {int(value[element]) for value in values}
    return found.pop() if len(found) == 1 else None


def _count_rows(call: Call, index: int) -> None:
    """Give an op that would fail otherwise a shape of the tower's rows in place of the batch's, where the trace has it.

    So it has that of a state, which all towers have all rows of.
    """
    values = None if call.unit or not call.inputs[index].whole else call.axes.values(call.op.inputs[index])
    lengths = [] if values is None else [length_of(element) for element in zip(*map(np.ravel, values), strict=True)]
    counts = tuple(length.each if isinstance(length, Rows) else 0 for length in lengths)
    if any(counts) and Rows(0) not in lengths:
        call.require(index, rows(counts))


@rule_for("BroadcastGradientArgs", counting=True)
def _broadcast_axes(call: Call) -> Sequence[Placement] | None:
    """Say of each operand whether a gradient's rows are its own, or are added up since it has none."""
    if any(placed.kind not in (Kind.COUNTS, Kind.REPLICATE) for placed in call.inputs):
        return None
    for i in range(len(call.inputs)):
        _count_rows(call, i)
    lengths = [
        int(tensor.shape[0]) if tensor.shape.rank == 1 and tensor.shape[0] is not None else None
        for tensor in call.op.inputs
    ]
    if None in lengths:
        return None
    found = []
    for placed, length in zip(call.inputs, lengths, strict=True):
        axis = only_one(placed.counts)
        if placed.kind is Kind.COUNTS and axis is None:
            return None
        found.append(None if axis is None else axis - length)
    if len({place for place in found if place is not None}) > 1:
        return None
    place = next(place for place in found if place is not None)
    for i, (placed, length) in enumerate(zip(call.inputs, lengths, strict=True)):
        # It must be known whether it was broadcast along the rows.
        open_ = placed.kind is Kind.REPLICATE and length + place >= 0
        if open_ and _constant_element(call, i, length + place) != 1:
            return None
    operands = [
        REPLICATE if one is None else shard(only_one(placed.counts), 1, 0)
        for placed, one in zip(call.inputs, found, strict=True)
    ]
    rank = max(length for length in lengths if length is not None)
    return [axes(operand, rank + place) for operand in operands]


@rule_for("Reshape", counting=True)
def _reshape(call: Call) -> Sequence[Placement] | None:
    if call.inputs[0].kind in (Kind.SHARD, Kind.PENDING):
        _count_rows(call, 1)
    placed, shape = call.inputs
    if placed.kind is Kind.PENDING:
        fits = shape.kind is Kind.COUNTS and placed.of is not None and only_one(shape.counts) == placed.of.axis
        return [placed.of] if fits and placed.of else None
    before, after = call.axes.lengths(call.op.inputs[0]), call.axes.lengths(call.op.outputs[0])
    if placed.kind not in (Kind.SHARD, Kind.PLACES) or before is None or after is None:
        return None
    axis = only_one(shape.counts) if shape.kind is Kind.COUNTS else _open_element(call, 1)
    if axis is None:
        return None
    if placed.kind is Kind.PLACES:
        if placed.op not in ("sum", "row"):
            return None
        return [placed.at(axis)] if {1} >= {*before[: placed.axis], *after[:axis]} else None
    outer, ahead, length = _product(before[: placed.axis]), _product(after[:axis]), after[axis]
    if call.unit:
        length = _reshaped_length(placed, shape, axis, before, after)
    if outer is None or not ahead or not isinstance(length, Rows):
        return None
    blocks, left = divmod(outer * placed.blocks, ahead)
    if left or blocks == 0 or length.each % blocks or (blocks > 1 and not length.each):
        return None
    return [shard(axis, blocks, length.each // blocks)]


def _reshaped_length(placed: Placement, shape: Placement, axis: int, before: Any, after: Any) -> Rows | None:
    """Return how many rows for each of another unit than samples, which `Axes` knows nothing of, an axis is to have."""
    if shape.kind is Kind.COUNTS:
        return Rows(max(shape.counts[axis], 0))
    inner = _product([*before[: placed.axis], *before[placed.axis + 1 :], placed.each * placed.blocks])
    others = _product([*after[:axis], *after[axis + 1 :]])
    return None if not inner or not others or inner % others else Rows(inner // others)


def _product(lengths: Sequence[Any]) -> int | None:
    return math.prod(lengths) if all(isinstance(one, int) for one in lengths) else None


def _open_element(call: Call, index: int) -> int | None:
    """Return the place of the -1 in an input that is a shape."""
    values = call.axes.values(call.op.inputs[index])
    places = {tuple(np.flatnonzero(np.ravel(value) == -1)) for value in values or ()}
    return int(places.pop()[0]) if len(places) == 1 and all(places) else None


@rule_for("Transpose", "ConjugateTranspose")
def _transpose(call: Call) -> Sequence[Placement] | None:
    placed, order = call.inputs[0], call.constant(1)
    if order is None or placed.kind is not Kind.SHARD:
        return None
    return [placed.at(int(np.flatnonzero(order == placed.axis)[0]))]


@rule_for("Split", "SplitV")
def _split(call: Call) -> Sequence[Placement] | None:
    given, along = (1, 0) if call.op.type == "Split" else (0, 2)
    placed, axis, rank, count = call.inputs[given], call.constant(along), rank_of(call, given), len(call.op.outputs)
    if axis is None or rank is None or placed.kind is not Kind.SHARD:
        return None
    if int(axis) % rank == placed.axis:
        if call.op.type == "SplitV" or placed.blocks % count:
            return None
        placed = shard(placed.axis, placed.blocks // count, placed.each)
    return _all(call, placed)


@rule_for("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(call: Call) -> Sequence[Placement] | None:
    placed, widths = call.inputs[0], call.constant(1)
    if placed.kind is not Kind.SHARD or any(not p.whole for p in call.inputs[1:]):
        return None
    if widths is None:
        known = call.axes.values(call.op.inputs[1])
        return [placed] if known is not None and not any(one[placed.axis].any() for one in known) else None
    return None if widths[placed.axis].any() else [placed]


@rule_for("Fill", "Empty", counting=True)
def _fill(call: Call) -> Sequence[Placement] | None:
    dims = call.inputs[0]
    axis = only_one(dims.counts) if dims.kind is Kind.COUNTS else None
    if axis is None or not all(value.whole for value in call.inputs[1:]):
        return None
    return [shard(axis, 0, max(dims.counts[axis], 0))]


@rule_for("BroadcastTo", counting=True)
def _broadcast_to(call: Call) -> Sequence[Placement] | None:
    placed, shape = call.inputs
    before, rank = lengths_of(call.op.inputs[0]), call.op.outputs[0].shape.rank
    if before is None or rank is None:
        return None
    axis = only_one(shape.counts) if shape.kind is Kind.COUNTS else None
    if axis is None:
        return None
    here = axis - (rank - len(before))
    count = max(shape.counts[axis], 0)
    if placed.kind is Kind.SHARD:
        known = {placed.each * max(placed.blocks, 1), count} - {0}
        return [placed.at(axis)] if placed.axis == here and len(known) < 2 else None
    if placed.kind is not Kind.REPLICATE:
        return None
    if here >= 0 and before[here] != 1:
        return None
    return [shard(axis, 0, count)]


@rule_for("Tile", counting=True)
def _tile(call: Call) -> Sequence[Placement] | None:
    placed, times = call.inputs
    before = lengths_of(call.op.inputs[0])
    if before is None:
        return None
    if times.kind is Kind.COUNTS:
        axis = only_one(times.counts)
        if axis is None or placed.kind is not Kind.REPLICATE or before[axis] != 1:
            return None
        return [shard(axis, 0, max(times.counts[axis], 0))]
    if placed.kind is not Kind.SHARD:
        return None
    count = _constant_element(call, 1, placed.axis)
    return [shard(placed.axis, placed.blocks * count, placed.each)] if count and (count == 1 or placed.each) else None


@rule_for("Gather GatherV2")
def _gather(call: Call) -> Sequence[Placement] | None:
    params, indices = call.inputs[:2]
    axis, skipped = (0, 0) if call.op.type == "Gather" else (call.constant(2), call.op.get_attr("batch_dims"))
    ranks = rank_of(call, 0), rank_of(call, 1)
    if axis is None or None in ranks:
        return None
    axis = int(axis) % max(ranks[0], 1)
    skipped += ranks[1] if skipped < 0 else 0
    if indices.kind is Kind.PLACES:  # each row, in its turn
        every = params == shard(axis) and indices.counts == (params.each, 1) and indices.op == "sum" and not skipped
        every = every and ranks[1] == 1
        return [params] if every and params.axis == axis else None
    if params.kind is Kind.SHARD and params.axis < skipped:
        if indices.kind is Kind.SHARD and (indices.axis != params.axis or not same_rows(indices, params)):
            return None
        call.require(1, params)
        return [params]
    if indices.kind is Kind.SHARD and indices.axis < skipped:
        call.require(0, indices)
        return [indices]
    if indices.kind is Kind.SHARD and params.whole:
        return [indices.at(indices.axis - skipped + axis)]
    if params.kind is Kind.SHARD and indices.whole and params.axis != axis:
        moved = params.axis + (ranks[1] - skipped - 1 if params.axis > axis else 0)
        return [params.at(moved)]
    if params.kind is indices.kind is Kind.SHARD and not skipped and params.axis == axis:  # from any row
        call.require(0, REPLICATE)
        return [indices.at(indices.axis + axis)]
    return None


@rule_for("GatherNd LookupTableFind LookupTableFindV2 ResourceGather ResourceGatherNd")
def _found(call: Call) -> Sequence[Placement] | None:
    """Place what each row takes from a table, by its indices."""
    placed, kind, ranks = call.inputs[1], call.op.type, (rank_of(call, 1), call.op.outputs[0].shape.rank)
    others = [one for i, one in enumerate(call.inputs) if i != 1]
    if None in ranks[:1] or placed.kind is not Kind.SHARD or not all(one.whole for one in others):
        return None
    if kind.endswith("Nd"):
        return [placed] if placed.axis < ranks[0] - 1 else None
    if kind == "ResourceGather":
        return None if call.op.get_attr("batch_dims") else [placed]
    return [placed] if ranks[0] == ranks[1] or placed.axis == 0 else None


@rule_for("Range", counting=True)
def _range(call: Call) -> Sequence[Placement] | None:
    begin, end, step = call.inputs
    if (
        end.kind is not Kind.COUNTS
        or call.constant(0) != 0
        or call.constant(2) != 1
        or not begin.whole
        or not step.whole
    ):
        return None
    return [Placement(Kind.PLACES, counts=(end.counts[0], 1), each=max(end.counts[0], 0))]


@rule_for("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate", "TensorScatterMax", "TensorScatterMin")
def _tensor_scatter(call: Call) -> Sequence[Placement] | None:
    """Place a tensor of which elements change that have the same indices for each row."""
    tensor, indices, updates = call.inputs
    depth, rank = lengths_of(call.op.inputs[1]), rank_of(call, 1)
    if not indices.whole or not depth or depth[-1] is None or rank_of(call, 0) is None:
        return None
    moved = depth[-1] - (rank - 1)  # the axes of the updates begin with those of the indices
    if updates.kind is Kind.SHARD:
        updates = updates.at(updates.axis + moved)
    placed = tensor if tensor.kind is Kind.SHARD else updates
    differ = updates.kind is Kind.SHARD and (updates.axis != placed.axis or not same_rows(updates, placed))
    if placed.kind is not Kind.SHARD or placed.axis < depth[-1] or differ:
        return None
    call.require(0, placed)
    call.require(2, placed.at(placed.axis - moved))
    return [placed]


SEGMENTS = {"UnsortedSegmentSum": "sum", "UnsortedSegmentMax": "max", "UnsortedSegmentMin": "min"}
SEGMENTS |= {"UnsortedSegmentProd": "prod"}


@rule_for(*SEGMENTS, counting=True)
def _segments(call: Call) -> Sequence[Placement] | None:
    data, ids, count = call.inputs
    if ids.kind is Kind.PLACES:  # each row, in its turn
        number, width = ids.counts
        if data != shard(0) or count != rows((number * width,)) or call.op.type != "UnsortedSegmentSum":
            return None
        return [data if ids.op == "sum" else shard(0, 1, number * width)] if ids.op == "row" or width == 1 else None
    call.require(2, REPLICATE)
    if call.op.inputs[0].dtype.name not in native.DTYPES:
        return None
    rank = rank_of(call, 1)
    if rank is None or not any(p.kind is Kind.SHARD for p in (data, ids)):
        return None
    if ids.whole and data.axis >= rank:
        return [data.at(data.axis - rank + 1)]
    if (data if data.kind is Kind.SHARD else ids).axis >= rank or _joint(call, [0, 1]) is None:
        return None
    return [partial(SEGMENTS[call.op.type])]


@rule_for("ScatterNd", counting=True)
def _scatter_nd(call: Call) -> Sequence[Placement] | None:
    rank, name = rank_of(call, 0), call.op.inputs[1].dtype.name
    call.require(2, REPLICATE)
    if rank is None or name not in native.DTYPES or any(one.axis >= rank - 1 for one in call.inputs[:2]):
        return None
    return None if _joint(call, [0, 1]) is None else [SUM]


@rule_for("Bincount", "DenseBincount")
def _bincount(call: Call) -> Sequence[Placement] | None:
    values, size, _ = call.inputs
    if values.kind is not Kind.SHARD or not size.whole or values.axis:
        return None
    empty = lengths_of(call.op.inputs[2]) == [0]
    if not empty:
        call.require(2, values)
    if rank_of(call, 0) == 2:
        return [values] if call.op.type == "DenseBincount" else None
    if rank_of(call, 0) != 1 or call.op.outputs[0].dtype.name not in native.DTYPES:
        return None
    binary = call.op.type == "DenseBincount" and call.op.get_attr("binary_output")
    return [partial("max") if binary else SUM]


@rule_for("EnsureShape")
def _ensure_shape(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    expected = tf.TensorShape(call.op.get_attr("shape"))
    open_rows = expected.rank is None or (placed.kind is Kind.SHARD and expected[placed.axis] is None)
    return [placed] if open_rows else None


# Random numbers, each tower's own for its rows, where towers' seeds differ; see `partition`.

DRAWS = names(
    """
    StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt
    StatelessRandomUniformFullInt StatelessRandomUniformV2 StatelessRandomNormalV2
    StatelessTruncatedNormalV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 RandomUniform
    RandomStandardNormal TruncatedNormal RandomUniformInt StatefulUniform StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniformInt StatefulUniformFullInt StatelessRandomGammaV2
    StatelessRandomGammaV3 StatelessRandomBinomial StatelessRandomPoisson
    StatelessParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2 StatefulRandomBinomial
    """
)

# As many numbers for each parameter as the shape says, its axes before the parameters'; others broadcast.
DRAWN_APART = names("RandomGamma RandomPoisson RandomPoissonV2")

# From a state or a seed that the trace has; the others' state is hidden by TensorFlow.
SEEDED_DRAWS = frozenset(name for name in DRAWS if name.startswith("State"))

# Results that are whole go back to rows where a length is known to be theirs: a tower takes its own.

# The inputs that are the result's shape, or the length of an axis: (input, axis; None: all axes).
_SHAPED: dict[str, tuple[int, int | None]] = dict.fromkeys(DRAWS, (0, None))
_SHAPED |= dict.fromkeys(names("StatefulUniform StatefulStandardNormalV2 StatefulTruncatedNormal"), (2, None))
_SHAPED |= dict.fromkeys(names("StatefulUniformInt StatefulUniformFullInt StatefulRandomBinomial"), (2, None))
_SHAPED |= {"Reshape": (1, None), "BroadcastTo": (1, None), "Fill": (0, None), "ScatterNd": (2, None)}
_SHAPED |= {"StridedSliceGrad": (0, None), "SparseToDense": (1, None), "TopKV2": (1, -1)}
_SHAPED |= dict.fromkeys(SEGMENTS, (2, 0))
# Where the first input has rows along that axis, the results have them along these.
_SAME_ROWS: dict[str, tuple[int, tuple[int | None, ...]]] = dict.fromkeys(names("CTCLoss CTCLossV2"), (1, (0, 1)))
_SAME_ROWS |= dict.fromkeys(names("Unique UniqueWithCounts"), (0, (None, 0)))  # which of them each is
_SAME_ROWS |= dict.fromkeys(
    names(
        """
        StatelessMultinomial ImageProjectiveTransformV2 ImageProjectiveTransformV3 FusedBatchNorm FusedBatchNormV2
        FusedBatchNormV3 FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3
        """
    ),
    (0, (0,)),
)
# Their results have the shape of their first input.
SAME_SHAPE = names(
    """
    Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll StatelessShuffle Softmax LogSoftmax IsotonicRegression FFT IFFT
    FFT2D IFFT2D FFT3D IFFT3D Cholesky CholeskyGrad MatrixInverse MatrixSquareRoot MatrixLogarithm MatrixExponential
    MatrixBandPart MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
    """
)


def rows_again(op: tf.Operation, given: Sequence[Placement], index: int) -> Placement | None:
    """Return the placement by rows of result `index`, which all towers have; None: it is not known to have rows.

    Args:
        op: as it was traced.
        given: how its inputs are placed before they are made whole.
        index: of the result.
    """
    if op.type in SAME_SHAPE and given[0].kind is Kind.SHARD:
        return counted(given[0])
    of_input, of_results = _SAME_ROWS.get(op.type, (0, ()))
    along = of_results[index] if index < len(of_results) else None
    if along is not None and given[0].kind is Kind.SHARD and given[0].axis == of_input:
        return counted(given[0]).at(along)
    at, along = _SHAPED.get(op.type, (0, None))
    shape, rank = given[at] if given else REPLICATE, op.outputs[index].shape.rank
    if op.type not in _SHAPED or shape.kind is not Kind.COUNTS or not rank:
        return None
    axis = next(i for i, count in enumerate(shape.counts) if count)  # of [rows, rows], as of all pairs, the first
    return shard(axis if along is None else along % rank, 1, max(shape.counts[axis], 0), shape.unit)


# Lists of tensors, of which loops are made, and optional ones, of which branches are: an element has the rows
# where the tensors have them.


@rule_for("TensorListFromTensor")
def _list_from(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if placed.kind is not Kind.SHARD or (placed.axis == 0 and placed.blocks != 1):
        return None
    # A list of rows is for a loop over them.
    return [items(placed.at(placed.axis - 1) if placed.axis else dataclasses.replace(EACH, each=placed.each))]


@rule_for("TensorListStack", counting=True)
def _list_stack(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if placed.kind is not Kind.ITEMS:
        return None
    of = placed.of or REPLICATE
    if not _shapes_item(call, 1, of) or placed.op == "row":
        return None
    if of.kind is Kind.SHARD:
        return [of.at(of.axis + 1)]
    if of == EACH:
        return [shard(0, 1, of.each)]
    return [of] if of.kind in (Kind.PARTIAL, Kind.REPLICATE) else None


@rule_for("TensorListReserve", "EmptyTensorList", counting=True)
def _list_begin(call: Call) -> Sequence[Placement] | None:
    shape, length = call.inputs
    if shape.kind not in (Kind.COUNTS, Kind.REPLICATE):
        return None
    if length.kind is Kind.COUNTS and call.op.type == "TensorListReserve":  # one for each row
        return [items(dataclasses.replace(EACH, each=max(length.counts[0], 0)))]
    call.require(1, REPLICATE)
    known = call.constant(0)
    return [items(None, () if known is None else tuple(int(one) for one in np.ravel(known)))]


def _shapes_item(call: Call, index: int, of: Placement) -> bool:
    """Return whether input `index`, the shape of a list's items, is that of a tower's rows or open."""
    shape = call.inputs[index]
    if of.kind is not Kind.SHARD:
        return shape.whole
    if shape.kind is Kind.COUNTS:
        return only_one(shape.counts) == of.axis
    known = call.constant(index)
    return known is not None and (known.ndim == 0 or known[of.axis] == -1)


@rule_for("TensorListGetItem", "TensorListPopBack", counting=True)
def _list_get(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if placed.kind is not Kind.ITEMS or any(
        p.kind not in (Kind.REPLICATE, Kind.COUNTS, Kind.LOCAL) for p in call.inputs[1:]
    ):
        return None
    of = placed.of or REPLICATE
    pops = call.op.type == "TensorListPopBack"
    if not _shapes_item(call, 1 if pops else 2, of):
        return None
    if pops:
        return [placed, of]
    if (of == EACH) != (call.inputs[1] == COUNTER):
        return None
    if of != EACH:
        call.require(1, REPLICATE)
    return [of]


@rule_for("TensorListSetItem", "TensorListPushBack", counting=True)
def _list_set(call: Call) -> Sequence[Placement] | None:
    at = 2 if call.op.type == "TensorListSetItem" else 1
    placed, item = call.inputs[0], call.inputs[at]
    if call.row_by_row and at == 1:
        made = dataclasses.replace(items(item), op="row")
        return [made] if placed.of is None or placed == made else None
    if call.row_by_row:
        return [items(EACH)] if placed.of in (None, EACH) and call.inputs[1] == COUNTER else None
    if placed.kind is not Kind.ITEMS or (at == 2 and not call.inputs[1].whole):
        return None
    if item.kind is Kind.SHARD and item.axis < len(placed.counts) and placed.counts[item.axis] >= 0:
        return None  # it takes tensors of so many rows alone
    if placed.of is not None and placed.of.whole and call.lenient:
        return [items(item)]
    if both := either(placed, items(item)):
        return [both]
    if not {item.kind, placed.of and placed.of.kind} <= {Kind.SHARD, Kind.PARTIAL, Kind.REPLICATE}:
        return None
    call.require(at, placed.of or REPLICATE)
    return [placed]


@rule_for("TensorListLength", "TensorListElementShape", counting=True)
def _list_length(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if placed.kind is not Kind.ITEMS:
        return None
    if call.op.type == "TensorListLength" and placed.of == EACH:
        return [rows((placed.of.each or -1,))]
    # An element's shape is asked for to make another list alone, which has the rows that this one has.
    return [REPLICATE]


@rule_for("OptionalGetValue", "OptionalHasValue")
def _optional(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if placed.kind is not Kind.ITEMS or len(call.op.outputs) > 1:
        return None
    return [REPLICATE if call.op.type == "OptionalHasValue" else placed.of or REPLICATE]
