"""List, op by op, which placements an op takes, and which it gives.

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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat.source_lines import user_line
from ncclsync.semantics.axes import Axes, Rows, passed_on
from ncclsync.semantics.placements import (
    COUNTER,
    EACH,
    KEPT,
    LOCAL,
    MEAN,
    REPLICATE,
    SAMPLES,
    SUM,
    Counts,
    EachRow,
    ListOf,
    Local,
    Partial,
    Placement,
    Places,
    Replicate,
    Shard,
    SummedAxes,
    Which,
    has_samples,
    only,
    rows,
)
from ncclsync.semantics.scope import Scope


@dataclasses.dataclass
class Call:
    """An op that is being placed.

    Attributes:
        op: as it was traced.
        tensors, inputs: what the op will get, and its placements; a rule changes them by `require`.
        scope: where the op stands.
        given: the tensors and their placements as they came.
        local: indices of LOCAL inputs, which count as whole meanwhile.
        loose: the index of the input that may number other towers' rows: the step has to look.
        unit: of the rows of its inputs, and so of its results, whatever a rule says; see `Placement`.
    """

    op: tf.Operation
    tensors: list[tf.Tensor]
    inputs: list[Placement]
    scope: Scope

    def __post_init__(self) -> None:
        self.given = list(self.tensors), list(self.inputs)
        self.local: set[int] = set()
        self.unit = SAMPLES
        self.loose: int | None = None

    @property
    def axes(self) -> Axes:
        """Return what is known of the lengths of the op's inputs and outputs."""
        return self.scope.axes

    def require(self, index: int, placement: Placement) -> None:
        """Give the op input `index` with that placement."""
        if self.inputs[index] == placement or (index in self.local and not isinstance(placement, Partial)):
            return
        before = self.given[1][index] if index in self.local else self.inputs[index]
        self.local.discard(index)
        self.tensors[index] = self.scope.conversion.convert(self.tensors[index], before, placement, self.op)
        self.inputs[index] = placement

    def make_whole(self, classes: type[Placement] | tuple[type[Placement], ...], but: Any = ()) -> None:
        """Give the op the batch's values of all inputs that are placed so, `but` those that are placed so."""
        for i, placed in enumerate(self.inputs):
            if isinstance(placed, classes) and not isinstance(placed, but):
                self.require(i, REPLICATE)

    def constant(self, index: int) -> Any:
        """Return the value of input `index` if it is known now."""
        return self.axes.constant(self.op.inputs[index])

    def spares(self, index: int) -> bool:
        """Return whether every tower can compute all of input `index` itself, so that no rows are gathered."""
        return self.scope.conversion.spares(self.tensors[index], self.inputs[index])

    def count_local_as_whole(self) -> None:
        """Let LOCAL inputs count as whole from now on."""
        self.local = {i for i, placed in enumerate(self.inputs) if isinstance(placed, Local)}
        for i in self.local:
            self.inputs[i] = REPLICATE

    def begin_anew(self) -> None:
        """Take back what was required."""
        self.tensors, self.inputs, self.unit = list(self.given[0]), list(self.given[1]), SAMPLES
        self.loose = None
        self.local.clear()


def names(text: str) -> frozenset[str]:
    """Return the words of a text, op types."""
    return frozenset(text.split())


_Placed = TypeVar("_Placed", bound=Placement)
Rule = Callable[[Call], Sequence[Placement] | None]
RULES: dict[str, Rule] = {}
LINEAR: dict[str, Rule] = {}
NUMBERED: dict[str, Rule] = {}  # for integers that number the tower's own rows; see `uneven.py`
TAKING_COUNTS: set[str] = set()  # ops whose rules look at counts of rows


def rule_for(*types: str, table: dict[str, Rule] = RULES, counting: bool = False) -> Callable[[Rule], Rule]:
    """Enter the decorated rule in a table for these types, words of texts; `counting`: in `TAKING_COUNTS`, too.

    One of `RULES` is asked if the ranks of all inputs are known, unless it is for `OF_ANY_RANK`.
    """

    def add(rule: Rule) -> Rule:
        table.update(dict.fromkeys(names(" ".join(types)), rule))
        TAKING_COUNTS.update(names(" ".join(types)) if counting else ())
        return rule

    return add


_linear = functools.partial(rule_for, table=LINEAR)


def lengths_of(tensor: tf.Tensor) -> Any:
    """Return the lengths of a traced tensor's axes, None where open; None if its rank is."""
    return None if tensor.shape.rank is None else tensor.shape.as_list()


def is_zero(tensor: tf.Tensor) -> bool:
    """Return whether a tensor has zeros alone, as far as the op shows that makes it."""
    op = passed_on(tensor).op
    if op.type in ("Fill", "BroadcastTo", "Reshape"):
        return is_zero(op.inputs[op.type == "Fill"])
    if op.type != "Const":
        return op.type == "ZerosLike"
    value = tf.get_static_value(op.outputs[0])
    return value is not None and value.dtype.kind in "fiuc" and not np.any(value)


def rank_of(call: Call, index: int) -> Any:
    """Return an input's rank; None if it is open."""
    return call.op.inputs[index].shape.rank


def _all(call: Call, placement: Placement) -> list[Placement]:
    return [placement] * len(call.op.outputs)


def as_many_rows(one: Shard, other: Shard) -> bool:
    """Return whether two shards have as many rows, as far as that is known."""
    return one.rows == other.rows or None in (one.rows, other.rows)


def same_rows(one: Shard, other: Shard) -> bool:
    """Return whether two shards have as many rows, of one unit and in the same order, along their axes."""
    ordered = one.alike or other.alike or one.blocks == other.blocks
    return one.unit == other.unit and ordered and as_many_rows(one, other)


def together(one: Shard, other: Shard) -> Shard | None:
    """Return the placement of a tensor with the rows of both, along the first's axis; None if these rows differ."""
    if not same_rows(one, other):
        return None
    chosen = other if one.alike else one
    return chosen.at(one.axis)


def counted(placed: _Placed) -> _Placed:
    """Return the placement of rows in their order for rows that are all alike; other placements as they are."""
    return dataclasses.replace(placed, alike=False) if isinstance(placed, Shard) and placed.alike else placed


# The letters of a tensor's axes, from the first; of another tensor's they are `_OTHERS`.
_AXES, _OTHERS = "abcdefghijklm", "nopqrstuvwxyz"


def _by_letters(
    call: Call, given: Sequence[str | None], made: Sequence[str | None], reduced: Placement | None = None
) -> list[Placement] | None:
    """Place an op by what its axes are, as Shardy's sharding rules do: it computes each row along them by itself.

    Source: `OpShardingRuleAttr`, https://openxla.org/shardy/sdy_dialect.

    Args:
        given: for each input a letter for each axis, the same where inputs have the same rows. Rows may not lie along
            "-", nor along further axes. An input of `""` must be whole. "#" and letters: it is the shape of what has
            these axes, and counts the rows. None: it is taken as it is placed.
        made: the same for each result, in which "-" is an axis of its own. None: a result that is whole.
        reduced: how a result is placed that has no axis for the rows. None: there is no such result.
    """
    chosen, placed = "", Shard()  # as yet no input has rows
    rowed = [
        counted_by(one) if letters and letters[0] == "#" else one
        for letters, one in zip(given, call.inputs, strict=True)
    ]
    for i, (letters, one) in enumerate(zip(given, rowed, strict=True)):
        if not letters or not isinstance(one, Shard):
            continue
        letter = letters.lstrip("#")[one.axis : one.axis + 1]
        if letter in ("", "-") or chosen not in ("", letter):
            continue
        if chosen:
            one = together(placed, one) or (placed if call.spares(i) else one)
        chosen, placed = letter, one
    for letters, output in zip(made, call.op.outputs, strict=True):
        adds_up = reduced is not None and output.dtype.name in (*native.DTYPES, "bool")
        adds_up |= reduced == SUM and output.dtype.is_complex  # which travel as pairs of numbers
        if not chosen or (letters is not None and chosen not in letters and not adds_up):
            return None
    for i, letters in enumerate(given):
        if letters is None:
            continue
        one, axis, lengths = rowed[i], letters.lstrip("#").find(chosen), lengths_of(call.op.inputs[i])
        if letters.startswith("#"):
            if not isinstance(one, Shard) or one.axis != axis or not same_rows(one, placed):
                return None
        elif isinstance(one, ListOf):  # which cannot be sent
            return None
        elif not isinstance(one, Shard) or one.axis != axis:
            call.require(i, REPLICATE)  # of f[:, None] - f[None] one is whole, the other by rows
            if axis >= 0 and (lengths is None or lengths[axis] != 1):  # else it is broadcast
                placed = counted(placed)  # whose rows are not alike
                call.require(i, placed.at(axis))
        elif not same_rows(one, placed):
            # One device refuses other numbers of rows; a tower with one row would broadcast it.
            if not call.spares(i) or not as_many_rows(one, placed):
                return None
            call.require(i, placed.at(axis))
    others = [REPLICATE if letters is None or reduced is None else reduced for letters in made]
    return [
        placed.at(letters.index(chosen)) if letters and chosen in letters else other
        for letters, other in zip(made, others, strict=True)
    ]


def only_one(placed: Placement) -> Any:
    """Return the index of the only element of counts that counts rows; None if there are others, or none."""
    found = [i for i, count in enumerate(placed.counts) if count != 0] if isinstance(placed, Counts) else []
    return found[0] if len(found) == 1 else None


def counted_by(shape: Placement) -> Placement:
    """Return the placement, by rows all alike, of a tensor of this shape; the shape's own if it counts no rows."""
    if not isinstance(shape, Counts):
        return REPLICATE
    axis = only_one(shape)
    return shape if axis is None else Shard(axis, 1, shape.counts[axis], True, unit=shape.unit)


# Element by element: each row of the result comes from the same row of each operand.

UNARY = names("""
    Abs Acos Acosh Angle AsString Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1
    BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bucketize Cast Ceil CheckNumerics CheckNumericsV2
    ComplexAbs Conj Cos Cosh DataFormatDimMap Dawsn DecodeBase64 DecodeCompressed DecodeJSONExample Digamma Elu
    EncodeBase64 Erf Erfc Erfinv Exp Expint Expm1 FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin Identity Imag Inv
    Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PlaceholderWithDefault
    PopulationCount PreventGradient Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot
    Softplus Softsign Spence Sqrt Square StaticRegexFullMatch StaticRegexReplace StopGradient StringLength StringLower
    StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Tan Tanh
    UnicodeScript UnicodeTranscode ZerosLike
""")
BROADCASTING = names("""
    Add AddV2 ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex Div DivNoNan Equal
    FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel FloorDiv FloorMod
    Greater GreaterEqual Igamma IgammaGradA Igammac LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod
    Mul MulNoNan NextAfter NotEqual Polygamma Pow RandomGammaGrad RealDiv RightShift SelectV2 SquaredDifference
    StringJoin Sub Substr TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
""")
# Of operands of one shape: an activation's gradient, a sum.
ALIKE = names("""
    AddN EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad
    SoftsignGrad SqrtGrad TanhGrad Select
""")


ELEMENTWISE = UNARY | BROADCASTING | ALIKE
# Their operands have equal numbers of rows, or the op fails; none is broadcast.
OF_EQUAL_ROWS = (ALIKE - {"Select"}) | names("ConcatV2 InTopKV2 Pack SparseSoftmaxCrossEntropyWithLogits")
# These keep rows that are all alike so. In a list they may meet others: a loop's state begins alike.
KEEPING_ALIKE = ELEMENTWISE | names("Sum TensorListPushBack TensorListSetItem")
MOVING = names("ExpandDims Reshape Squeeze Transpose")  # elements, of which each stays as it is
FILLING = names("BroadcastTo Fill")
# Of all other ops the inputs' ranks must be known.
OF_ANY_RANK = UNARY | names("""
    Bitcast CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 EnsureShape L2Loss OptionalGetValue OptionalHasValue
    Rank Reshape Shape ShapeN Size TensorListElementShape TensorListFromTensor TensorListGetItem TensorListLength
    TensorListPopBack TensorListPushBack TensorListSetItem TensorListStack
""")


@rule_for(*UNARY)
def _unary(call: Call) -> Sequence[Placement] | None:
    return _all(call, call.inputs[0])


@rule_for(*BROADCASTING, *ALIKE)
def _broadcast(call: Call) -> Sequence[Placement] | None:
    if only(call.inputs, ListOf):  # lists that are added up, element by element
        both: Placement | None = call.inputs[0]
        for other in call.inputs[1:]:
            both = both and either(both, other)
        return None if both is None else [both]
    if isinstance(call.inputs[0], SummedAxes):  # counted from the first one, in either way
        return call.inputs[:1] if call.op.type in ("AddV2", "FloorMod") and call.inputs[1].whole else None
    ranks = [rank_of(call, i) for i in range(len(call.inputs))]
    if call.op.type == "Select" and len(set(ranks)) > 1:
        return None
    rank = max(ranks)
    return _by_letters(call, [_AXES[rank - one : rank] for one in ranks], [_AXES[:rank]])


# Linear in what is partial: the sum of the towers' results is the result of their sum, if it is finite: where
# one device has an infinity, such as 1 / 0, towers may have a NaN, of 0 / 0. Gradients of a tower's own
# moments pass here too, and must stay that tower's.


_PASSING = names("Identity StopGradient PreventGradient Snapshot PlaceholderWithDefault")
# The input that an op is linear in if all others are whole; of an activation's gradient what flows back.
_LINEAR_IN = dict.fromkeys(_PASSING | MOVING | names("Neg Conj Real Imag Cast Sum Mean"), 0)
_LINEAR_IN |= dict.fromkeys(names("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad"), 0)
_LINEAR_IN |= dict.fromkeys(names("RsqrtGrad SqrtGrad InvGrad ReciprocalGrad TanhGrad SigmoidGrad"), 1)


@_linear(*_LINEAR_IN)
def _in_one_input(call: Call) -> Sequence[Placement] | None:
    kind, at = call.op.type, _LINEAR_IN[call.op.type]
    placed, before, after = call.inputs[at], call.op.inputs[at].dtype, call.op.outputs[0].dtype
    if not isinstance(placed, Partial) or any(not one.whole for i, one in enumerate(call.inputs) if i != at):
        return None
    if kind in _PASSING | MOVING:
        return [placed]
    # Not integers: their sums wrap, each tower's by itself, and their mean is cut off.
    widens = before == after or (before.is_floating and after.is_floating and before.size < after.size)
    fits = widens if kind == "Cast" else kind != "Mean" or before.is_floating
    return [placed] if fits and placed.op in ("sum", "mean") else None


@_linear("ConcatV2", "Pack")
def _joined_partial(call: Call) -> Sequence[Placement] | None:
    parts = call.inputs[: -1 if call.op.type == "ConcatV2" else None]
    return [parts[0]] if isinstance(parts[0], Partial) and len(set(parts)) == 1 else None


# Of a loop's or a branch's weights, as of `h @ tf.tanh(w)`: there parts cannot be added up, and if an op needed their
# sum, all of the loop would be computed alike. Elsewhere one sum is exchanged, not each of its slices or products. The
# inputs in each of which an op is linear, if all others are whole.
PRODUCTS = names("BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul SparseMatMul")
LINEAR_WITHIN: dict[str, tuple[int, ...]] = dict.fromkeys(
    names("""
    AvgPool AvgPool3D BiasAddGrad BroadcastTo Cumsum DepthToSpace FFT FFT2D FFT3D Gather GatherNd GatherV2 IFFT IFFT2D
    IFFT3D IRFFT IRFFT2D MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
    MatrixDiagV3 MirrorPad MirrorPadGrad Pad RFFT RFFT2D ReverseV2 Roll SegmentSum Slice SpaceToDepth SplitV
    StridedSlice Tile Unpack UnsortedSegmentSum
    """),
    (0,),
)
LINEAR_WITHIN |= dict.fromkeys(PRODUCTS | names("Conv2D Conv3D DepthwiseConv2dNative"), (0, 1))
LINEAR_WITHIN |= dict.fromkeys(
    names("AvgPoolGrad BandedTriangularSolve MatrixSolve MatrixTriangularSolve ScatterNd Split"), (1,)
)
_CONVOLUTIONS = ("Conv2DBackprop{}", "Conv3DBackprop{}V2", "DepthwiseConv2dNativeBackprop{}")
LINEAR_WITHIN |= dict.fromkeys([name.format("Input") for name in _CONVOLUTIONS], (1, 2))
LINEAR_WITHIN |= dict.fromkeys([name.format("Filter") for name in _CONVOLUTIONS], (0, 2))
LINEAR_WITHIN |= {"StridedSliceGrad": (4,)}


@_linear(*LINEAR_WITHIN)
def _in_a_function(call: Call) -> Sequence[Placement] | None:
    kind, parts = call.op.type, [i for i, placed in enumerate(call.inputs) if not placed.whole]
    if not call.scope.within or len(parts) != 1 or parts[0] not in LINEAR_WITHIN[kind]:
        return None
    # What a diagonal is padded with would be added once for each tower.
    pads = kind.startswith("MatrixDiag") and kind[-2:] in ("V2", "V3") and not is_zero(call.op.inputs[-1])
    placed = call.inputs[parts[0]]
    return _all(call, placed) if not pads and _is_linear_in(call, placed) else None


def _is_linear_in(call: Call, placed: Placement) -> bool:
    """Return whether a linear op of parts placed so makes parts placed so: addends of a sum, or of a mean of floats."""
    return placed == SUM or (placed == MEAN and all(tensor.dtype.is_floating for tensor in call.op.outputs))


@_linear("Complex", "Select", "SelectV2")
def _of_parts_alone(call: Call) -> Sequence[Placement] | None:
    """Place what is linear in several inputs at once, of which others than parts are zero."""
    first = 0 if call.op.type == "Complex" else 1  # a condition comes before
    operands = list(zip(call.op.inputs, call.inputs, strict=True))[first:]
    parts = {placed for _, placed in operands if not placed.whole}
    fits = all(one.whole for one in call.inputs[:first]) and all(p in parts or is_zero(one) for one, p in operands)
    return [*parts] if call.scope.within and fits and len(parts) == 1 and _is_linear_in(call, *parts) else None


@_linear("Add", "AddV2", "Sub", "AddN")
def _add_partial(call: Call) -> Sequence[Placement] | None:
    shape = lengths_of(call.op.outputs[0])
    if not only(call.inputs, Partial, Replicate) or shape is None or None in shape:
        return None
    ops = {p.op for p in call.inputs if isinstance(p, Partial)}
    # A whole operand may be added to a mean on every tower, and to a sum on one.
    for i, placed in enumerate(call.inputs):
        if isinstance(placed, Partial) and lengths_of(call.op.inputs[i]) != shape and not call.scope.within:
            return None
    if ops == {"mean"}:
        return [MEAN]
    if not ops <= {"sum", "mean"}:
        return None
    parts = [i for i, placed in enumerate(call.inputs) if isinstance(placed, Partial)]
    state = any(passed_on(call.op.inputs[i], "Cast").op.type == "ReadVariableOp" for i in parts)
    for i in range(len(call.inputs)):
        # Each tower's part of a gradient has its part of a regularisation; a count stays one, on tower 0.
        if shape and not state and not call.scope.lenient and call.op.outputs[0].dtype.is_floating:
            call.require(i, MEAN if call.inputs[i].whole else call.inputs[i])
        call.require(i, SUM)
    return [SUM]


@_linear("Mul", "RealDiv", "Div", "MulNoNan", "DivNoNan")
def _scale_partial(call: Call) -> Sequence[Placement] | None:
    divides = call.op.type in ("RealDiv", "Div", "DivNoNan")
    at = 0 if isinstance(call.inputs[0], Partial) else 1
    placed, other = call.inputs[at], call.inputs[1 - at]
    if (at == 1 and divides) or not isinstance(placed, Partial) or not other.whole:
        return None
    shape = lengths_of(call.op.inputs[at])
    dtype = call.op.outputs[0].dtype
    if not (placed in (SUM, MEAN) if dtype.is_floating else dtype.is_complex and placed == SUM):
        return None
    # Only if the product is no larger: the smallest of the tensors that could be exchanged is exchanged.
    as_large = shape is not None and shape == lengths_of(call.op.outputs[0])
    return [placed] if as_large or call.scope.within else None


def either(one: Placement, two: Placement) -> Placement | None:
    """Return the placement of a tensor, or a list, that is placed as one or the other; None: nothing covers both."""
    if one == two:
        return one
    if isinstance(one, Shard) and isinstance(two, Shard) and one.axis == two.axis:
        return together(one, two)
    if isinstance(one, ListOf) and isinstance(two, ListOf):
        if None in (one.of, two.of):  # an empty list; what it lacks is taken for zeros
            return one if two.of is None else two
        of = one.of and two.of and either(one.of, two.of)
        return ListOf(of, one.shape) if of else None
    return None


# Reductions: over the rows they leave a part of the batch's result, over other axes rows.

EVERY, ANY = Partial("min"), Partial("max")  # of bools
_REDUCED = {"Sum": SUM, "Mean": MEAN, "Max": Partial("max"), "Min": Partial("min"), "Prod": Partial("prod")}
_REDUCED |= {"All": EVERY, "Any": ANY}


@rule_for(*_REDUCED, "EuclideanNorm ReduceJoin")
def _reduce(call: Call) -> Sequence[Placement] | None:
    placed, summed = call.inputs
    rank = rank_of(call, 0)
    if not isinstance(placed, Shard):
        return None
    if isinstance(summed, SummedAxes) and call.op.type == "Sum":
        if placed.axis != summed.axis:
            return None
        return [SUM if summed.of.whole else placed] if call.op.get_attr("keep_dims") else None
    over, dtype = call.constant(1), call.op.inputs[0].dtype
    # Of a single value all axes of length 1 count as broadcast, which no batch that is looked at has shown.
    if over is None or (call.unit and call.op.inputs[1].op.type == "BroadcastGradientArgs"):
        return None
    call.inputs[0] = counted(placed)
    along = {int(axis) % rank for axis in np.ravel(over)}
    made = "".join("-" * call.op.get_attr("keep_dims") if axis in along else _AXES[axis] for axis in range(rank))
    reduced = None if call.op.type == "Mean" and not dtype.is_floating else _REDUCED.get(call.op.type)
    if reduced == MEAN and call.unit:  # towers have any shares of them: `adjusting.py` weighs their means
        reduced = None if call.scope.within else SUM
    return _by_letters(call, [_AXES[:rank], None], [made], reduced)


@rule_for("BiasAdd BiasAddV1 BiasAddGrad")
def _bias_add(call: Call) -> Sequence[Placement] | None:
    rank = rank_of(call, 0)
    first = call.op.type != "BiasAddV1" and call.op.get_attr("data_format") == b"NCHW"
    channel = _AXES[1 if first else rank - 1]
    if call.op.type == "BiasAddGrad":
        return _by_letters(call, [_AXES[:rank]], [channel], SUM)
    return _by_letters(call, [_AXES[:rank], channel], [_AXES[:rank]])


# Along some axes alone: which input, or attribute, has these, and whether the result has them still, or more.
_ALONG: dict[str, tuple[int | str, str]] = dict.fromkeys(names("ArgMax ArgMin"), (1, "less"))
_ALONG |= dict.fromkeys(names("Cumsum Cumprod CumulativeLogsumexp Reverse ReverseV2"), (1, "same"))
_ALONG |= {"Roll": (2, "same"), "Unpack": ("axis", "less"), "Squeeze": ("squeeze_dims", "less")}
_ALONG |= {
    "ApproxTopK": ("reduction_dimension", "same"),
    "ExpandDims": (1, "more"),
    "OneHot": ("axis", "more"),
    "Pack": ("axis", "more"),
}


@rule_for(*_ALONG)
def _along_axes(call: Call) -> Sequence[Placement] | None:
    source, change = _ALONG[call.op.type]
    rank = rank_of(call, 0)
    over = call.constant(source) if isinstance(source, int) else call.op.get_attr(source)
    if over is None:
        return None
    over = np.flatnonzero(over) if call.op.type == "Reverse" else np.ravel(over)
    along = {int(axis) % (rank + (change == "more")) for axis in over}
    if not along and change == "less":
        return None
    letters = _AXES[:rank]
    if change == "more":
        (axis,) = along
        given, made = letters, f"{letters[:axis]}-{letters[axis:]}"
    else:
        given = "".join("-" if axis in along else letter for axis, letter in enumerate(letters))
        made = given if change == "same" else given.replace("-", "")
    others = given if call.op.type == "Pack" else ""
    return _by_letters(call, [given] + [others] * (len(call.inputs) - 1), [made] * len(call.op.outputs))


@rule_for("L2Loss Bitcast")
def _of_any_shape(call: Call) -> Sequence[Placement] | None:
    sizes = [tensor.dtype.size for tensor in (*call.op.inputs, *call.op.outputs)]
    if not isinstance(call.inputs[0], Shard) or sizes[0] != sizes[1]:
        return None
    return [SUM if call.op.type == "L2Loss" else call.inputs[0]]


# Products: what is contracted over the rows is a part of a sum.


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
    operands, result = equation.split("->")
    letters, ranks = operands.split(","), [rank_of(call, i) for i in range(len(call.inputs))]
    dots = [rank - (len(names) - 3) if "..." in names else 0 for names, rank in zip(letters, ranks, strict=True)]
    spare = "".join([c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation][: max(dots)])
    given = [names.replace("...", spare[len(spare) - own :]) for names, own in zip(letters, dots, strict=True)]
    result = result.replace("...", spare)
    if any(names.count(letter) > 1 for names in (*given, result) for letter in names):
        return None
    return _by_letters(call, given, [result], SUM)


# Convolutions, pooling and images: the samples lie along the first axis, and filters are whole; recurrent networks;
# vectors or matrices, each by itself.

# Where each input, and each result, has the samples, as `_by_letters` has it: b, along the first axis, -b, along the
# second one; #b is the shape of what has them; ..., along any axis before the last ones, a - for each. Others are w,
# whole; +, a sum over the samples; *, a kernel's own, of no known order. The last ones stand for all further ones.
# Source for GPUs' own recurrent networks: TensorFlow's documentation of CudnnRNNV3.
_LETTERS = """
    b w -> b: AvgPool AvgPool3D Conv Conv2D Conv3D DecodeCSV DepthToSpace DepthwiseConv2dNative Dequantize Dilation2D
    b w -> b: ExtractImagePatches ExtractVolumePatches Fingerprint LRN MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax
    b w -> b: Mfcc NearestNeighbors ParseExample ParseExampleV2 QuantizeAndDequantizeV2 QuantizeAndDequantizeV3
    b w -> b: QuantizeAndDequantizeV4 RegexFullMatch RegexReplace ResizeArea ResizeBicubic ResizeBilinear
    b w -> b: ResizeNearestNeighbor ResizeNearestNeighborGrad ScaleAndTranslate SpaceToDepth
    b b w -> b: CombinedNonMaxSuppression DrawBoundingBoxes DrawBoundingBoxesV2 GRUBlockCell ImageProjectiveTransformV2
    b b w -> b: ImageProjectiveTransformV3 InTopK InTopKV2 LowerBound UpperBound ResizeBicubicGrad ResizeBilinearGrad
    b b w -> b: ScaleAndTranslateGrad SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
    b b b w -> b: FractionalMaxPoolGrad GenerateBoundingBoxProposals LRNGrad LSTMBlockCell MaxPool3DGrad
    b b b w -> b: MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradV2 MaxPoolGradGradV2 MaxPoolGradWithArgmax
    b b b w -> b: MaxPoolGradGradWithArgmax
    b b w -> b +: FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient QuantizeAndDequantizeV4Grad
    b w -> +: HistogramFixedWidth
    b w b -> b: Dilation2DBackpropInput ExtractGlimpse ExtractGlimpseV2
    b w b -> +: Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter Dilation2DBackpropFilter
    #b b w -> b: AvgPool3DGrad AvgPoolGrad FractionalAvgPoolGrad
    #b w b -> b: Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
    b w -> b w: FractionalAvgPool FractionalMaxPool FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 QuantizeV2
    b w -> b w: QuantizedAvgPool QuantizedBiasAdd QuantizedConv2D QuantizedMatMul QuantizedMaxPool QuantizedRelu
    b w -> b w: QuantizedRelu6 QuantizedResizeBilinear
    -b w -> b: AudioSpectrogram
    b w -> -b: UnravelIndex
    b b w w w w b -> b: GRUBlockCellGrad
    w -b b b w -> -b: BlockLSTM BlockLSTMV2
    w -b b b w w w w w -b -> -b b b +: BlockLSTMGrad BlockLSTMGradV2
    -b -b -b w -> -b -b -b *: CudnnRNN CudnnRNNV2
    -b -b -b w b -> -b -b -b *: CudnnRNNV3
    -b -b -b w -b -b -b -b -b -b * -> -b -b -b +: CudnnRNNBackprop CudnnRNNBackpropV2
    -b -b -b w b -b -b -b -b -b -b * -> -b -b -b +: CudnnRNNBackpropV3
    ...- w -> ...: FFT HSVToRGB IFFT IRFFT IsotonicRegression LogSoftmax MatrixDiag NthElement RFFT RGBToHSV Softmax
    ...- w -> ...: TopK TopKV2
    ...-- w -> ...: Cholesky Eig FFT2D IFFT2D IRFFT2D LogMatrixDeterminant Lu MatrixBandPart MatrixDeterminant
    ...-- w -> ...: MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixExponential MatrixInverse MatrixLogarithm
    ...-- w -> ...: MatrixSquareRoot Qr RFFT2D SelfAdjointEigV2 Svd
    ...--- w -> ...: AdjustContrastv2 AdjustHue AdjustSaturation FFT3D IFFT3D IRFFT3D RFFT3D
    ...- ...- -> ...: Cross
    ...-- ...-- w -> ...: BandedTriangularSolve CholeskyGrad MatrixSolve MatrixSolveLs MatrixTriangularSolve
    ...-- ...-- w -> ...: TridiagonalSolve
    ...-- ...-- -> ...: TridiagonalMatMul
    ...-- ... w -> ...: MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
    ... w -> ...--: MatrixDiagV2 MatrixDiagV3
    ... w -> ...-: DecodePaddedRaw
"""
_TABLE = [line.split(": ") for line in _LETTERS.split("\n    ")[1:]]
_OF_SAMPLES = {kind: letters for letters, kinds in _TABLE for kind in kinds.split()}
TAKING_COUNTS.update(kind for kind, letters in _OF_SAMPLES.items() if "#" in letters)


@rule_for(*_OF_SAMPLES)
def _by_samples(call: Call) -> Sequence[Placement] | None:
    if not _keeps_samples(call):
        return None
    op, table = call.op, _OF_SAMPLES[call.op.type]
    if op.type in ("CudnnRNNV3", "CudnnRNNBackpropV3") and not op.get_attr("time_major"):
        table = table.replace("-b", "b")
    given, made = (letters.split() + letters.split()[-1:] * 9 for letters in table.split(" -> "))
    before = {  # as many axes as "..." stands for
        tensor.shape.rank and tensor.shape.rank - letters.count("-")
        for letters, tensor in (*zip(given, op.inputs, strict=False), *zip(made, op.outputs, strict=False))
        if letters.startswith("...-")
    }
    if None in before or len(before) > 1:
        return None
    given, made = ([one.replace("...", _AXES[: max(before, default=0)]) for one in side] for side in (given, made))
    taken: list[str | None] = []
    for i, (letters, one) in enumerate(zip(given, call.inputs, strict=False)):
        if letters == "*" and one != KEPT:
            return None
        whole = letters == "w" or rank_of(call, i) == 0  # without a cell's state, input_c is a scalar
        taken.append(None if letters == "*" else "" if whole else letters)
    results = [
        None if letters in "w*" or (output.shape.rank == 0 and letters != "+") else letters
        for letters, output in zip(made, op.outputs, strict=False)
    ]
    placed = _by_letters(call, taken, results, SUM)
    return placed and [KEPT if letters == "*" else one for letters, one in zip(made, placed, strict=False)]


# What an attribute has to be, where an op of `_LETTERS` has it, lest samples meet, or numbers be drawn.
_KEEPING = {"deterministic": True, "include_batch_in_index": False, "noise": b"zero"}
_KEEPING |= {"range_given": True, "transpose_a": False}


def _keeps_samples(call: Call) -> bool:
    """Return whether an op of `_LETTERS` has samples along that axis, and does not mix them."""
    op, attributes = call.op, {one.name for one in call.op.op_def.attr}
    if any(name in attributes and op.get_attr(name) != value for name, value in _KEEPING.items()):
        return False
    if "axis" in attributes:  # numbers in few bits have ranges of their own along it
        return op.get_attr("axis") != 0
    if "Pool" in op.type and not op.type.startswith("Fractional"):  # which TensorFlow has of each image alone
        inputs = [argument.name for argument in op.op_def.input_arg]
        sizes = [
            call.constant(inputs.index(name)) if name in inputs else op.get_attr(name) for name in ("ksize", "strides")
        ]
        return all(one is not None and one[0] == 1 for one in sizes)
    if op.type.startswith("ParseExample"):  # else it has others' numbers, is as long as the longest, or has names, too
        fixed = all(tf.TensorShape(one).is_fully_defined() for one in op.get_attr("dense_shapes"))
        ragged = op.type.endswith("V2") and op.get_attr("ragged_value_types")
        sparse = op.get_attr("Nsparse" if op.type == "ParseExample" else "num_sparse")
        return fixed and not ragged and not sparse and lengths_of(op.inputs[1]) == [0]
    if op.type.startswith("FusedBatchNorm"):
        return not op.get_attr("is_training")
    if op.type == "SoftmaxCrossEntropyWithLogits":
        # Of one row beside open ones TensorFlow infers a result of one row, and computes with that.
        return all(shape is not None and shape[0] != 1 for shape in map(lengths_of, op.inputs))
    return True


@rule_for("SpaceToBatch SpaceToBatchND BatchToSpace BatchToSpaceND")
def _space_to_batch(call: Call) -> Sequence[Placement] | None:
    """Place the batch of a dilated convolution: all samples for one offset, then for the next."""
    placed, plain = call.inputs[0], not call.op.type.endswith("ND")
    sizes = [call.op.get_attr("block_size")] * 2 if plain else call.constant(1)
    if not isinstance(placed, Shard) or placed.axis or sizes is None or not all(p.whole for p in call.inputs[1:]):
        return None
    count = int(np.prod(sizes))
    if call.op.type.startswith("Space"):
        return [Shard(0, placed.blocks * count, placed.each)]
    return [Shard(0, placed.blocks // count, placed.each)] if placed.blocks % count == 0 else None


@rule_for("ReverseSequence")
def _reverse_sequence(call: Call) -> Sequence[Placement] | None:
    rank, rows_along, turned = rank_of(call, 0), call.op.get_attr("batch_dim"), call.op.get_attr("seq_dim")
    letters = _AXES[:rank].replace(_AXES[turned], "-")
    return _by_letters(call, [letters, _AXES[rows_along]], [letters])


# Shapes and counts.


@rule_for("Shape", "ShapeN")
def _shape_of(call: Call) -> Sequence[Placement] | None:
    placed: list[Placement] = []
    for one, tensor in zip(call.inputs, call.op.inputs, strict=True):
        if isinstance(one, Shard) and tensor.shape.rank is not None:
            count = one.rows or call.axes.rows(tensor, one.axis)
            placed.append(rows(tuple(count if axis == one.axis else 0 for axis in range(tensor.shape.rank))))
        elif isinstance(one, SummedAxes):  # a tower with one row counts that, too
            placed.append(LOCAL)
        elif isinstance(one, (Replicate, Partial)):
            placed.append(REPLICATE)
        else:
            return None
    return placed


@rule_for("Size")
def _size_of(call: Call) -> Sequence[Placement] | None:
    (one,), shape = call.inputs, lengths_of(call.op.inputs[0])
    if not isinstance(one, Shard):
        return [REPLICATE] if isinstance(one, Partial) and shape is not None else None
    if shape is None:
        return None
    others = [length for axis, length in enumerate(shape) if axis != one.axis]
    return [rows((None if None in others or one.rows is None else one.rows * math.prod(others),))]


@rule_for("Rank")
def _rank_of(call: Call) -> Sequence[Placement] | None:
    return [REPLICATE]


LINEAR.update({"Shape": _shape_of, "ShapeN": _shape_of, "Size": _size_of, "Rank": _rank_of})

# Arithmetic on counts of rows. No rule says what it gives: `Placer` has it computed for several numbers of rows, and
# sees which results grow as these do. Left out is what cuts off, or compares: a tower may have any number of rows.

COUNTING = names("""
    Add AddV2 BroadcastArgs Cast ConcatOffset ConcatV2 Cumprod Cumsum DynamicStitch ExpandDims FloorDiv GatherV2
    Identity Mul Pack Prod Reshape ReverseV2 Slice Split SplitV Squeeze StopGradient StridedSlice Sub Sum Tile
    Transpose Unpack
""")
# Where all that is compared counts rows: so many first inputs.
COMPARING = {"Max": 1, "Min": 1, "Maximum": 2, "Minimum": 2}


@rule_for("StridedSlice", counting=True)
def _strided_slice(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    blocks = _blocks_of_slice(call, placed.axis, placed.each, placed.rows) if isinstance(placed, Shard) else 0
    for i in (1, 2) if not blocks else ():
        call.require(i, REPLICATE)
    spec = slice_spec(call)
    if spec is None:
        return None
    operand, result = _letters_of_slice(spec)
    made = _by_letters(call, [operand, None, None, ""], [result])
    if made and blocks and isinstance(made[0], Shard):
        return [dataclasses.replace(made[0], blocks=blocks)]
    return made


def _blocks_of_slice(call: Call, axis: int, each: int | None, total: int | None) -> int:
    """Return how many blocks of rows a slice takes whose bounds count rows; 0 for any other slice.

    Args:
        axis, each, total: of the operand: where the rows are, how many for each sample a block has, and all blocks.
    """
    spec, bounds = slice_spec(call), call.inputs[1:3]
    if spec is None or spec.count("rows") != 1 or sum(one != "new" for one in spec[: spec.index("rows")]) != axis:
        return 0
    places = {only_one(one) for one in bounds if isinstance(one, Counts)}
    if len(places) != 1 or None in places:
        return 0
    (place,) = places
    begin, end = (one.counts[place] if isinstance(one, Counts) else 0 for one in bounds)
    begin, end = (
        default if call.op.get_attr(mask) & (1 << place) else bound
        for mask, default, bound in (("begin_mask", 0, begin), ("end_mask", total, end))
    )
    if not each or total is None or begin is None or end is None:
        return 0
    fits = 0 <= begin < end <= total and begin % each == end % each == total % each == 0
    return (end - begin) // each if fits else 0


def slice_spec(call: Call) -> list[Any] | None:
    """Say of each axis of the operand, and of each new one: "all", "rows" (by their count), "some", "one", "new"."""
    strides = call.constant(3)
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
            from_first, to_last = bits["begin"] & bit or _constant_element(call, 1, i) == 0, bits["end"] & bit
            from_rows, to_rows = (isinstance(one, Counts) and one.counts[i] != 0 for one in call.inputs[1:3])
            by_rows = (from_rows or to_rows) and (from_first or from_rows) and (to_last or to_rows)
            spec.append("some" if not plain else "rows" if by_rows else "all" if from_first and to_last else "some")
    spec += ["all"] * (rank - sum(one != "new" for one in spec))
    return spec


def rows_of_first(call: Call, placed: Shard) -> int:
    """Return how many of the first sample's rows an op takes of its first input; 0 if it may take other rows."""
    op = call.op
    if op.type != "StridedSlice" or placed.unit or placed.blocks != 1:
        return 0
    bit, strides = 1 << placed.axis, call.constant(3)
    moved = (op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")) & (2 * bit - 1)  # bits are other axes then
    if moved or strides is None or len(strides) <= placed.axis:
        return 0
    begin, end = (_constant_element(call, i, placed.axis) for i in (1, 2))
    if begin is not None and op.get_attr("shrink_axis_mask") & bit:  # beside which TensorFlow looks at no other mask
        end = begin + 1
    elif op.get_attr("end_mask") & bit:
        return 0
    elif op.get_attr("begin_mask") & bit:
        begin = 0
    if begin is None or end is None or strides[placed.axis] < 1:
        return 0
    return end if 0 <= begin < end <= (placed.each or 0) else 0


def _letters_of_slice(spec: list[Any]) -> tuple[str, str]:
    """Return the letters of the axes of a slice's operand, and of its result."""
    letters = iter(_AXES)
    named = [(one, next(letters) if one in ("all", "rows") else "-") for one in spec]
    operand, result = ("".join(c for one, c in named if one != without) for without in ("new", "one"))
    return operand, result


@rule_for("StridedSliceGrad", counting=True)
def _strided_slice_back(call: Call) -> Sequence[Placement] | None:
    *_, placed = call.inputs
    spec = slice_spec(call)
    if isinstance(placed, Shard) and spec is not None:
        operand, result = _letters_of_slice(spec)
        if result[placed.axis] != "-":  # all of an axis is taken
            _count_literal(call, 0, operand.index(result[placed.axis]), placed.each)
    of, blocks = counted_by(call.inputs[0]), 0
    if isinstance(of, Shard) and isinstance(placed, Shard):
        blocks = _blocks_of_slice(call, of.axis, placed.each, of.each)
    for i in (1, 2) if not blocks else ():
        call.require(i, REPLICATE)
    spec = slice_spec(call)  # of what is known by now
    if spec is None:
        return None
    operand, result = _letters_of_slice(spec)
    if blocks and isinstance(of, Shard) and isinstance(placed, Shard) and of.each and placed.each:
        fits = blocks == placed.blocks and result.find(operand[of.axis]) == placed.axis and call.inputs[3].whole
        return [Shard(of.axis, of.each // placed.each, placed.each)] if fits else None
    return _by_letters(call, [f"#{operand}", "", "", "", result], [operand])


@rule_for("Concat ConcatV2")
def _concat(call: Call) -> Sequence[Placement] | None:
    at = len(call.inputs) - 1 if call.op.type == "ConcatV2" else 0
    indices = [i for i in range(len(call.inputs)) if i != at]
    axis, rank = call.constant(at), rank_of(call, indices[0])
    if axis is None:
        return None
    axis = int(axis) % rank
    parts = [one for one in map(call.inputs.__getitem__, indices) if isinstance(one, Shard) and one.axis == axis]
    if len(parts) == len(indices):
        # One batch after another: blocks of as many rows each.
        like = parts[0].each and len({one.each for one in parts}) == 1
        return [Shard(axis, sum(one.blocks for one in parts), parts[0].each)] if like else None
    letters = _AXES[:rank].replace(_AXES[axis], "-")
    return _by_letters(call, [letters if i in indices else None for i in range(len(call.inputs))], [letters])


@rule_for("Slice", counting=True)
def _slice(call: Call) -> Sequence[Placement] | None:
    placed, begin, size = call.inputs
    if not isinstance(placed, Shard):
        return None
    axis, each = placed.axis, placed.each
    from_first = begin.whole and _constant_element(call, 1, axis) == 0
    if not isinstance(size, Counts):
        return [placed] if from_first and size.whole and _constant_element(call, 2, axis) == -1 else None
    count = size.counts[axis]
    if only_one(size) != axis or not each or not count or count % each:
        return None
    if count == placed.rows:  # all of them, so that it begins with the first
        return [placed] if begin.whole else None
    first = begin.counts[axis] if isinstance(begin, Counts) and only_one(begin) == axis else None
    by_blocks = first is not None and first % each == 0
    return [Shard(axis, count // each, each)] if from_first or by_blocks else None


def _constant_element(call: Call, index: int, element: int) -> int | None:
    """Return an element of an input that is a vector, if no batch changes it."""
    elements = call.axes.elements(call.op.inputs[index])
    return found if elements and isinstance(found := elements[element], int) else None


def _count_rows(call: Call, index: int) -> None:
    """Let an input that is a shape count the tower's rows, where the trace has the batch's; else the op would fail.

    The trace has the batch's of a state, of which all towers have all rows.
    """
    if call.unit or not call.inputs[index].whole:
        return
    lengths = call.axes.elements(call.op.inputs[index])
    counts = tuple(length.each if isinstance(length, Rows) else 0 for length in lengths)
    if any(counts) and Rows(0) not in lengths:
        call.require(index, rows(counts))


@rule_for("BroadcastGradientArgs", counting=True)
def _broadcast_axes(call: Call) -> Sequence[Placement] | None:
    """Say of each operand whether a gradient's rows are its own, or are added up since it has none."""
    if not only(call.inputs, Counts, Replicate):
        return None
    for i in range(len(call.inputs)):
        _count_rows(call, i)
    lengths = [(lengths_of(tensor) or [None])[0] for tensor in call.op.inputs]
    operands = list(map(counted_by, call.inputs))
    if None in lengths or not only(operands, Shard, Replicate):
        return None
    places = {one.axis - n for one, n in zip(operands, lengths, strict=True) if isinstance(one, Shard)}
    if len(places) != 1:
        return None
    (place,) = places
    # Of a literal length it is known what it numbers where the other operand's shape counts some for each sample.
    eaches = {one.each for one in operands if isinstance(one, Shard)}
    each = eaches.pop() if len(eaches) == 1 else None
    for i, (one, length) in enumerate(zip(operands, lengths, strict=True)):
        # It must be known whether it was broadcast along the rows.
        if one.whole and length + place >= 0 and _constant_element(call, i, length + place) != 1:
            if not _count_literal(call, i, length + place, each):
                return None
            operands[i] = counted_by(call.inputs[i])
    return [SummedAxes(operand, max(lengths) + place) for operand in operands]


def _count_literal(call: Call, index: int, axis: int, each: int | None) -> bool:
    """Take a literal length of a shape for the rows that it numbers, `each` for a sample; return whether it does.

    A number of rows that Python was told stands in the trace as any other number.
    """
    shape = call.constant(index) if call.inputs[index].whole and axis >= 0 else None
    if not each or shape is None or shape[axis] != each * (call.scope.lengths.batch or 0):
        return False
    call.require(index, rows(tuple(each * (at == axis) for at in range(len(shape)))))
    return True


@rule_for("DynamicStitch", counting=True)
def _kept_shape(call: Call) -> Sequence[Placement] | None:
    """Place a gradient's shape, with ones for the axes over which it is summed."""
    if len(call.inputs) != 4 or not isinstance(call.inputs[1], SummedAxes) or not call.inputs[0].whole:
        return None
    summed, shape = call.inputs[1], call.inputs[2]
    call.local.clear()  # the ones
    return [REPLICATE if summed.of.whole else shape] if only_one(shape) == summed.axis else None


@rule_for("Reshape", counting=True)
def _reshape(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if not isinstance(placed, Shard):
        return None
    made = _reshaped(call, placed)
    if made is None:
        _count_rows(call, 1)  # not at once: in [-1, rows] the rows are all that each row meets
        made = _reshaped(call, placed) or _reshaped_literally(call, placed)
    return made


def _reshaped_literally(call: Call, placed: Shard) -> Sequence[Placement] | None:
    """Place a reshape to a literal shape, which fits batches of one number of rows alone."""
    before, after = call.axes.lengths(call.op.inputs[0]), call.constant(1)
    inner = _product(before[1:]) if before and has_samples(placed) and call.inputs[1].whole else None
    if call.scope.within or not inner or not placed.each or after is None or not after.size:
        return None
    rest = inner * placed.each * (call.scope.lengths.batch or 0)
    if np.count_nonzero(after == -1) == 1 and rest and after[0] > 0:  # which is as long as the rest
        after = np.where(after == -1, rest // -np.prod(after), after)
    if (after < 1).any():
        return None
    count, left = divmod(math.prod(after.tolist()), inner * placed.each)
    if left or count < 2 or after[0] % count:
        return None
    each = int(after[0]) // count
    what = f"a reshape to that length, at {user_line(call.op.traceback)}"
    call.scope.lengths.declared.setdefault((int(after[0]), each), what)
    call.require(1, rows((each, *[0] * (after.size - 1))))
    return [Shard(0, 1, each)]


def _reshaped(call: Call, placed: Shard) -> Sequence[Placement] | None:
    shape = call.inputs[1]
    before, after = call.axes.lengths(call.op.inputs[0]), call.axes.lengths(call.op.outputs[0])
    if before is None or after is None:
        return None
    elements = call.axes.elements(call.op.inputs[1])
    axis = only_one(shape) if isinstance(shape, Counts) else elements.index(-1) if -1 in elements else None
    if axis is None:
        return None
    outer, ahead, length = _product(before[: placed.axis]), _product(after[:axis]), after[axis]
    if call.unit:
        length = _reshaped_length(placed, shape, axis, before, after)
    if outer is None or not ahead or not isinstance(length, Rows):
        return None
    blocks, left = divmod(outer * placed.blocks, ahead)
    if left or blocks == 0 or length.each % blocks or (blocks > 1 and not length.each):
        return None
    return [Shard(axis, blocks, length.each // blocks or None)]


def _reshaped_length(placed: Shard, shape: Placement, axis: int, before: Any, after: Any) -> Rows | None:
    """Return how many rows for each of another unit than samples, which `Axes` knows nothing of, an axis is to have."""
    if isinstance(shape, Counts):
        return Rows(shape.counts[axis] or 0)
    inner = _product([*before[: placed.axis], *before[placed.axis + 1 :], placed.rows])
    others = _product([*after[:axis], *after[axis + 1 :]])
    return None if not inner or not others or inner % others else Rows(inner // others)


def _product(lengths: Sequence[Any]) -> int | None:
    return math.prod(lengths) if all(isinstance(one, int) for one in lengths) else None


@rule_for("Transpose", "ConjugateTranspose")
def _transpose(call: Call) -> Sequence[Placement] | None:
    order = call.constant(1)
    return None if order is None else _by_letters(call, [_AXES[: len(order)], None], ["".join(_AXES[i] for i in order)])


@rule_for("Split", "SplitV")
def _split(call: Call) -> Sequence[Placement] | None:
    given, along = (1, 0) if call.op.type == "Split" else (0, 2)
    placed, axis, rank, count = call.inputs[given], call.constant(along), rank_of(call, given), len(call.op.outputs)
    if axis is None or not isinstance(placed, Shard):
        return None
    if int(axis) % rank == placed.axis:
        if call.op.type == "SplitV" or placed.blocks % count:
            return None
        placed = Shard(placed.axis, placed.blocks // count, placed.each)
    return _all(call, placed)


@rule_for("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(call: Call) -> Sequence[Placement] | None:
    rank, widths = rank_of(call, 0), call.axes.values(call.op.inputs[1])
    if widths is None:
        return None
    letters = [c if not any(one[axis].any() for one in widths) else "-" for axis, c in enumerate(_AXES[:rank])]
    return _by_letters(call, ["".join(letters)] + [""] * (len(call.inputs) - 1), ["".join(letters)])


@rule_for("Fill", "Empty", "BroadcastTo", counting=True)
def _broadcast_to(call: Call) -> Sequence[Placement] | None:
    rank, fills = call.op.outputs[0].shape.rank, call.op.type != "BroadcastTo"
    before = 0 if fills else rank_of(call, 0)
    if rank is None:
        return None
    given = [_AXES[rank - before : rank], f"#{_AXES[:rank]}"]
    return _by_letters(call, given[:: -1 if fills else 1][: len(call.inputs)], [_AXES[:rank]])


@rule_for("Tile", counting=True)
def _tile(call: Call) -> Sequence[Placement] | None:
    placed, times = call.inputs
    before = lengths_of(call.op.inputs[0])
    if isinstance(times, Counts):
        made = counted_by(times)
        fits = isinstance(made, Shard) and placed.whole and before is not None and before[made.axis] == 1
        return [made] if fits else None
    if not isinstance(placed, Shard):
        return None
    count = _constant_element(call, 1, placed.axis)
    return [Shard(placed.axis, placed.blocks * count, placed.each)] if count and (count == 1 or placed.each) else None


@rule_for("Gather GatherV2")
def _gather(call: Call) -> Sequence[Placement] | None:
    axis, skipped = (0, 0) if call.op.type == "Gather" else (call.constant(2), call.op.get_attr("batch_dims"))
    ranks = rank_of(call, 0), rank_of(call, 1)
    if axis is None:
        return None
    axis = int(axis) % max(ranks[0], 1)
    skipped += ranks[1] if skipped < 0 else 0
    before, after, each = _AXES[:axis], _AXES[axis + 1 : ranks[0]], _OTHERS[: ranks[1] - skipped]
    given = [f"{before}-{after}", before[:skipped] + each, ""][: len(call.inputs)]
    return _by_letters(call, given, [before + each + after])


@rule_for("GatherNd LookupTableFind LookupTableFindV2 ResourceGather ResourceGatherNd")
def _found(call: Call) -> Sequence[Placement] | None:
    """Place what each row takes from a table, by its indices."""
    kind, rank, made = call.op.type, rank_of(call, 1), call.op.outputs[0].shape.rank
    if kind == "ResourceGather" and call.op.get_attr("batch_dims"):
        return None
    # The values of a table may be vectors.
    letters = _AXES[: 1 if kind.startswith("Lookup") and rank != made else rank - kind.endswith("Nd")]
    depth = _depth(call, 1) if kind == "GatherNd" else None
    rest = "" if depth is None else _OTHERS[: rank_of(call, 0) - depth]
    return _by_letters(call, ["-" * (depth or 0) + rest, letters, ""][: len(call.inputs)], [letters + rest])


@rule_for("ScatterNd", counting=True)
def _scattered(call: Call) -> Sequence[Placement] | None:
    """Place what is put at the same indices of each row, or a part of what each row puts at indices of its own."""
    letters, depth, updates = _AXES[: rank_of(call, 0) - 1], _depth(call, 0), call.inputs[1]
    if depth is None or not isinstance(updates, Shard) or updates.axis < len(letters):
        return _by_letters(call, [letters, letters, ""], ["-"], SUM)
    rest = _OTHERS[: rank_of(call, 1) - len(letters)]
    made = "-" * depth + rest
    return _by_letters(call, ["", "-" * len(letters) + rest, f"#{made}"], [made])


def _depth(call: Call, index: int) -> int | None:
    """Return how many elements vectors of indices have, each of which names an element, or what lies behind it."""
    lengths = lengths_of(call.op.inputs[index])
    return lengths[-1] if lengths else None


@rule_for("Range", counting=True)
def _range(call: Call) -> Sequence[Placement] | None:
    begin, end, step = call.inputs
    width, plain = call.constant(2), call.constant(0) == 0 and begin.whole and step.whole
    if not isinstance(end, Counts) or not plain or width is None or width < 1 or (end.counts[0] or 1) % width:
        return None
    each = end.counts[0] and end.counts[0] // int(width)
    return [Places(each, int(width), Which.FIRST, each=each)]


@rule_for("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate", "TensorScatterMax", "TensorScatterMin")
def _tensor_scatter(call: Call) -> Sequence[Placement] | None:
    """Place a tensor in which elements change, at the same indices of each row."""
    depth, rank = _depth(call, 1), rank_of(call, 1)
    if not call.inputs[1].whole or depth is None:
        return None
    letters = _AXES[: rank_of(call, 0) - depth]
    given = ["-" * depth + letters, "", "-" * (rank - 1) + letters]  # updates have an axis for each of indices
    return _by_letters(call, given, given[:1])


SEGMENTS = {"UnsortedSegmentSum": SUM, "UnsortedSegmentProd": Partial("prod")}
SEGMENTS |= {"UnsortedSegmentMax": Partial("max"), "UnsortedSegmentMin": Partial("min")}


@rule_for(*SEGMENTS, counting=True)
def _segments(call: Call) -> Sequence[Placement] | None:
    ranks = rank_of(call, 0), rank_of(call, 1)
    letters, further = _AXES[: ranks[1]], _AXES[ranks[1] : ranks[0]]
    return _by_letters(call, [letters + further, letters, ""], ["-" + further], SEGMENTS[call.op.type])


@rule_for("Bincount", "DenseBincount")
def _bincount(call: Call) -> Sequence[Placement] | None:
    dense, rank = call.op.type == "DenseBincount", rank_of(call, 0)
    if rank != 1 and not (rank == 2 and dense):
        return None
    weights = "" if lengths_of(call.op.inputs[2]) == [0] else "a"
    reduced = Partial("max") if dense and call.op.get_attr("binary_output") else SUM
    return _by_letters(call, ["a", "", weights], ["a" if rank == 2 else "-"], reduced)


@rule_for("EnsureShape")
def _ensure_shape(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    expected = tf.TensorShape(call.op.get_attr("shape"))
    open_rows = expected.rank is None or (isinstance(placed, Shard) and expected[placed.axis] is None)
    return [placed] if open_rows else None


# Random numbers, each tower's own for its rows, where towers' seeds differ; see `partition`.

DRAWS = names("""
    StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt
    StatelessRandomUniformFullInt StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 RandomUniform RandomStandardNormal TruncatedNormal
    RandomUniformInt StatefulUniform StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniformInt
    StatefulUniformFullInt StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomBinomial
    StatelessRandomPoisson StatelessParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2
    StatefulRandomBinomial Multinomial StatelessMultinomial
""")

# As many numbers for each parameter as the shape says, its axes before the parameters'; others broadcast.
_DRAWN_APART = names("RandomGamma RandomPoisson RandomPoissonV2")


@rule_for(*DRAWS)
def _draw(call: Call) -> Sequence[Placement] | None:
    """Place numbers drawn for as many rows as the shape counts, with parameters that have these rows."""
    rank, apart = call.op.outputs[0].shape.rank, call.op.type in _DRAWN_APART
    if rank is None:
        return None
    given: list[str | None] = []
    for argument, tensor in zip(call.op.op_def.input_arg, call.op.inputs, strict=True):
        before = 0 if apart else tensor.shape.rank
        if argument.name in ("seed", "key", "counter", "alg", "algorithm", "resource"):
            given.append(None)
        elif argument.name == "shape":
            given.append(f"#{_AXES[:rank]}")
        elif before is None:
            return None
        elif argument.name == "logits":
            given.append("a-")
        elif argument.name == "num_samples":
            given.append("")
        else:
            given.append(_AXES[rank - before : rank])
    made = _by_letters(call, given, ["a-" if "a-" in given else _AXES[:rank]])
    return made and [counted(made[0])]


# From a state or a seed that the trace has; the others' state is hidden by TensorFlow.
SEEDED_DRAWS = frozenset(name for name in DRAWS if name.startswith("State"))

# Of these an input gives the shape: where it counts rows, and all towers compute alike, a tower goes on with its own.
BACK_TO_ROWS = DRAWS.union(SEGMENTS) | names("""
    BroadcastTo Fill ImageProjectiveTransformV2 ImageProjectiveTransformV3 Reshape ScatterNd SparseToDense
    StridedSliceGrad TopKV2
""")


def shape_input(op: tf.Operation) -> int | None:
    """Return the index of the input that gives the shape, or a length, of an op's result; None if none does."""
    sizes = {"shape", "dims", "num_segments", "k"} | ({"output_shape"} if op.type == "SparseToDense" else set())
    return next((i for i, argument in enumerate(op.op_def.input_arg) if argument.name in sizes), None)


# Their results, or those of that index, have the shape of their first input.
SAME_SHAPE = names("""
    Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll StatelessShuffle Softmax LogSoftmax IsotonicRegression FFT IFFT
    FFT2D IFFT2D FFT3D IFFT3D Cholesky CholeskyGrad MatrixInverse MatrixSquareRoot MatrixLogarithm MatrixExponential
    MatrixBandPart MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 Unique:1 UniqueWithCounts:1
""")


# Lists of tensors, of which loops are made, and optional ones, of which branches are: an element has the rows
# where the tensors have them.


@rule_for("TensorListFromTensor")
def _list_from(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if not isinstance(placed, Shard) or (placed.axis == 0 and placed.blocks != 1):
        return None
    # A list of rows is for a loop over them.
    return [ListOf(placed.at(placed.axis - 1) if placed.axis else EachRow(placed.each))]


@rule_for("TensorListStack", counting=True)
def _list_stack(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if not isinstance(placed, ListOf) or placed.by_row:
        return None
    of = placed.of or REPLICATE
    if not _shapes_item(call, 1, of):
        return None
    if isinstance(of, Shard):
        return [of.at(of.axis + 1)]
    if isinstance(of, EachRow):
        return [Shard(0, 1, of.each)]
    return [of] if isinstance(of, (Partial, Replicate)) else None


@rule_for("TensorListReserve", "EmptyTensorList", counting=True)
def _list_begin(call: Call) -> Sequence[Placement] | None:
    shape, length = call.inputs
    if not isinstance(shape, (Counts, Replicate)):
        return None
    if isinstance(length, Counts) and call.op.type == "TensorListReserve":  # one for each row
        return [ListOf(EachRow(length.counts[0]))]
    call.require(1, REPLICATE)
    known = call.constant(0)
    return [ListOf(None, () if known is None else tuple(None if n < 0 else int(n) for n in np.ravel(known)))]


def _shapes_item(call: Call, index: int, of: Placement) -> bool:
    """Return whether input `index`, the shape of a list's items, is that of a tower's rows or open."""
    shape = call.inputs[index]
    if not isinstance(of, Shard):
        return shape.whole
    if isinstance(shape, Counts):
        return only_one(shape) == of.axis
    known = call.constant(index)
    return known is not None and (known.ndim == 0 or known[of.axis] == -1)


@rule_for("TensorListGetItem", "TensorListPopBack", counting=True)
def _list_get(call: Call) -> Sequence[Placement] | None:
    placed, pops = call.inputs[0], call.op.type == "TensorListPopBack"
    of = isinstance(placed, ListOf) and (placed.of or REPLICATE)
    if not of or not _shapes_item(call, 1 if pops else 2, of):
        return None
    if pops:
        return [placed, of]
    if (of == EACH) != (call.inputs[1] == COUNTER):
        return None
    if of != EACH:
        call.require(1, REPLICATE)
    return [of]


@_linear("TensorListSetItem TensorListPushBack")  # within a function, where parts cannot be added up
@rule_for("TensorListSetItem", "TensorListPushBack", counting=True)
def _list_set(call: Call) -> Sequence[Placement] | None:
    at = 2 if call.op.type == "TensorListSetItem" else 1
    placed, item = call.inputs[0], call.inputs[at]
    if not isinstance(placed, ListOf) or (isinstance(item, Partial) and not call.scope.within):
        return None
    if call.scope.row_by_row and at == 1:
        made = ListOf(item, by_row=True)
        return [made] if placed.of is None or placed == made else None
    if call.scope.row_by_row:
        return [ListOf(EACH)] if placed.of in (None, EACH) and call.inputs[1] == COUNTER else None
    if at == 2 and not call.inputs[1].whole:
        return None
    if isinstance(item, Shard) and item.axis < len(placed.shape) and placed.shape[item.axis] is not None:
        return None  # it takes tensors of so many rows alone
    if placed.of is not None and placed.of.whole and call.scope.lenient:
        return [ListOf(item)]
    if both := either(placed, ListOf(item)):
        return [both]
    of = placed.of or REPLICATE
    if not only((item, of), Shard, Partial, Replicate):
        return None
    if item.whole and isinstance(of, Shard) and not call.axes.rows(call.op.inputs[at], of.axis):
        return None  # it takes tensors of any number of rows
    call.require(at, of)
    return [placed]


@rule_for("TensorListResize")
def _list_resize(call: Call) -> Sequence[Placement] | None:
    placed, size = call.inputs
    return [placed] if isinstance(placed, ListOf) and placed.of != EACH and size.whole else None


@rule_for("TensorListLength", "TensorListElementShape", counting=True)
def _list_length(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if not isinstance(placed, ListOf):
        return None
    if call.op.type == "TensorListLength" and isinstance(placed.of, EachRow):
        return [rows((placed.of.each,))]
    # An element's shape is asked for to make another list alone, which has the rows that this one has.
    return [REPLICATE]


@rule_for("OptionalGetValue", "OptionalHasValue")
def _optional(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if not isinstance(placed, ListOf) or len(call.op.outputs) > 1:
        return None
    return [REPLICATE if call.op.type == "OptionalHasValue" else placed.of or REPLICATE]
