"""Rules for sparse and ragged tensors.

How many of their values a tower has, its data say; they lie in the order of its rows. So these values are a unit of
their own, as samples are: the ops of `OF_ANY_UNIT` count by it, with their rules for samples. Integers that number a
tower's own rows, and row splits (`Numbers`, `Piece`), have rules in `NUMBERED`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat.names import TensorName
from ncclsync.semantics.axes import BATCHES, SORTED_SEGMENTS, passed_on
from ncclsync.semantics.placements import (
    REPLICATE,
    SAMPLES,
    SPLITS,
    SUM,
    Counts,
    Indices,
    Numbers,
    Part,
    Partial,
    Piece,
    PiecesShape,
    Placement,
    Places,
    Replicate,
    Shard,
    Splits,
    Which,
    has_samples,
    rows,
)
from ncclsync.semantics.rules import (
    COUNTING,
    ELEMENTWISE,
    MOVING,
    NUMBERED,
    RULES,
    SEGMENTS,
    Call,
    counted,
    counted_by,
    is_zero,
    lengths_of,
    names,
    only_one,
    rank_of,
    rule_for,
    same_rows,
    slice_spec,
)

OF_ANY_UNIT = (
    (ELEMENTWISE - names("Select"))
    | MOVING
    | COUNTING
    | names("""
        All Any ArgMax ArgMin BatchMatMulV2 BiasAdd BiasAddGrad BroadcastGradientArgs BroadcastTo Einsum Fill L2Loss
        LogSoftmax LookupTableFind LookupTableFindV2 MatMul Max Mean Min OneHot Pad Prod Rank ResourceGather Shape Size
        Softmax SparseSoftmaxCrossEntropyWithLogits StridedSliceGrad UnsortedSegmentSum
    """)
)


_numbered = functools.partial(rule_for, table=NUMBERED)
_cumulated = RULES["Cumsum"]


@_numbered("BroadcastTo Cast ExpandDims Identity Reshape Squeeze Tile Transpose")
def _moved_numbers(call: Call) -> Sequence[Placement] | None:
    """Place numbers that an op moves, and does not change: they go where rows go."""
    placed, kind = call.inputs[0], call.op.type
    if isinstance(placed, Piece):
        splits, unit = call.op.outputs[0].name, call.scope.units.row_splits.get(call.op.inputs[0].name)
        if unit is not None and not call.scope.within:
            call.scope.units.row_splits[splits] = unit
        return [placed] if kind in ("Cast", "Identity") else None
    fits = call.op.outputs[0].dtype in (tf.int32, tf.int64)
    if not fits or not isinstance(placed, Numbers) or placed.which is Which.MAP:
        return None
    if kind in ("Cast", "Identity"):
        return [placed]
    squeezed = kind == "Squeeze" and lengths_of(call.op.inputs[0])[1:] == [1]
    if isinstance(placed, Indices) and not squeezed and not _keeps_vectors(call, placed.axis):
        return None
    call.inputs[0], call.unit = placed.by, placed.unit
    made = RULES[kind](call)
    call.inputs[0], call.unit = placed, SAMPLES
    if made is None or not isinstance(made[0], Shard) or made[0].blocks != 1:
        return None
    which, of_rows = placed.which, placed.which in (Which.FIRST, Which.ROW) and made[0].each == placed.each is not None
    kept = of_rows or which is Which.LOOSE or (kind == "Squeeze" and which is Which.EVERY)
    made_as = Places if squeezed else type(placed)
    return [placed.moved(dataclasses.replace(made[0], unit=placed.unit), which if kept else Which.OWN, made_as)]


def _keeps_vectors(call: Call, axis: int) -> bool:
    """Return whether an op moves vectors of indices, and changes none: they lie along the last axis, or turn to it."""
    before, after = lengths_of(call.op.inputs[0]), lengths_of(call.op.outputs[0])
    if call.op.type == "Transpose":
        return axis == 1 and len(before) == 2 and np.array_equal(call.constant(1), [1, 0])
    same = bool(before and after) and before[-1] == after[-1] is not None
    return call.op.type in ("ExpandDims", "Reshape", "Tile") and same and not axis


@_numbered("AddV2 Mul SelectV2")
def _computed_numbers(call: Call) -> Sequence[Placement] | None:
    """Place arithmetic on the numbers of rows that gives numbers of elements of the tower's rows."""
    kind, one, two = call.op.type, call.inputs[0], call.inputs[1]
    if call.op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    taken = (Which.FIRST, Which.ROW, Which.OWN, Which.LOOSE) if kind == "AddV2" else (Which.FIRST, Which.ROW)
    vectors = one if isinstance(one, Indices) else two
    if kind == "AddV2" and isinstance(vectors, Indices):
        at = 0 if vectors is one else 1
        plain = vectors.which is Which.OWN and not vectors.axis
        return _numbers_with(call, at, vectors) if plain and _begin_with_zeros(call, call.op.inputs[1 - at]) else None
    numbers = next((one for one in call.inputs if isinstance(one, Places) and one.which in taken), None)
    if numbers is None:
        return None
    if kind == "SelectV2":  # `range(rows) if rows > 1 else 0`, of `tf.vectorized_map`
        zero = call.constant(2)
        clear = numbers == two and zero is not None and not np.any(zero)
        return [two] if clear and one.whole and _is_of_several(call, numbers.height) else None
    other = 0 if numbers is two else 1
    made = _numbers_with(call, 1 - other, numbers)
    if kind == "Mul" and numbers.which is Which.FIRST:
        factor = call.constant(other)
        if made is not None and np.ndim(factor) == 1 and factor[0] == 1 and len(factor) > 1 and not factor[1:].any():
            return [made[0].moved(made[0].by, Which.OWN, Indices)]
        if _is_one(call.op.inputs[other]):
            return made
        fits = factor is not None and np.size(factor) == 1 and int(np.ravel(factor)[0]) > 0
        return [dataclasses.replace(numbers, width=numbers.width * int(np.ravel(factor)[0]))] if fits else None
    if kind == "AddV2" and made is not None:
        lowest, highest = bounds(call, call.op.inputs[other])
        inside = lowest is not None and highest is not None and 0 <= lowest <= highest < numbers.width
        inside |= numbers is two and _gathers_by_row(call, numbers.width)
        exact = inside and numbers.which is Which.FIRST
        return [dataclasses.replace(made[0], which=Which.ROW if exact else Which.LOOSE)]
    return None


def _numbers_with(call: Call, at: int, numbers: Numbers) -> list[Numbers] | None:
    """Place numbers of rows that meet others, or whole ones, element by element: they go where rows go."""
    by, other = numbers.by, call.inputs[1 - at]
    if not other.whole and not (isinstance(other, Shard) and other.unit == by.unit):
        return None
    call.inputs[at], call.unit = by, by.unit
    (made,) = RULES["AddV2"](call) or (None,)
    stay = call.inputs[at] == by and call.inputs[1 - at].whole == other.whole
    call.inputs[at], call.unit = numbers, SAMPLES
    if not stay or not isinstance(made, Shard) or made.blocks != 1:
        return None
    return [numbers.moved(dataclasses.replace(made, unit=by.unit), numbers.which)]


def _value(op: tf.Operation, index: int) -> Any:
    return tf.get_static_value(op.inputs[index])


def _begin_with_zeros(call: Call, tensor: tf.Tensor) -> bool:
    """Return whether each vector along the last axis begins with a zero, as the ops show that make it."""
    length = (lengths_of(tensor) or [None])[-1]
    while (op := tensor.op).type in ("Cast", "ExpandDims", "Identity", "StridedSlice", "Tile"):
        before, sliced = op.inputs[0], op.type == "StridedSlice"
        some = sliced and (before.shape.num_elements() != tensor.shape.num_elements() or np.any(_value(op, 3) != 1))
        if some or (lengths_of(before) or [None])[-1] != length:
            break
        tensor = before
    if tensor.op.type == "Pack" and tensor.op.get_attr("axis") in (-1, len(tensor.shape) - 1):
        return is_zero(tensor.op.inputs[0])
    known = call.axes.constant(tensor)
    return known is not None and length == known.shape[-1] > 1 and not np.any(known[..., 0])


def _is_one(tensor: tf.Tensor) -> bool:
    """Return whether a tensor has ones alone, as far as the op shows that makes it."""
    op = passed_on(tensor, "Reshape", "ExpandDims", "Cast").op
    value = op.inputs[1] if op.type == "Fill" else tensor
    return op.type == "OnesLike" or bool(np.all(np.equal(tf.get_static_value(value), 1)))


_PICKING = names("""
    Cast ExpandDims GatherNd GatherV2 Identity Reshape ReverseV2 Slice Squeeze StopGradient StridedSlice Tile Transpose
""")
_Bounds = tuple[int | None, int | None]


def bounds(call: Call, tensor: tf.Tensor) -> _Bounds:
    """Return the least and the greatest number that a tensor of integers can have, as its ops show; None: not known."""
    op, kind = tensor.op, tensor.op.type
    if not (tensor.dtype.is_integer or tensor.dtype == tf.bool):
        return None, None
    if tensor.dtype == tf.bool:
        return 0, 1
    if (value := call.axes.constant(tensor) if kind == "Const" else None) is not None and np.size(value):
        return int(np.min(value)), int(np.max(value))
    if kind in _PICKING:
        return bounds(call, op.inputs[0])
    if kind in ("Minimum", "Maximum", "AddV2"):
        (low, high), (other_low, other_high) = (bounds(call, one) for one in op.inputs)
        lows, highs = [n for n in (low, other_low) if n is not None], [n for n in (high, other_high) if n is not None]
        if kind == "AddV2":
            return sum(lows) if len(lows) > 1 else None, sum(highs) if len(highs) > 1 else None
        if kind == "Minimum":
            return min(lows) if len(lows) > 1 else None, min(highs, default=None)
        return max(lows, default=None), max(highs) if len(highs) > 1 else None
    if kind == "FloorMod":
        divisor = call.axes.constant(op.inputs[1])
        return (0, int(np.max(divisor)) - 1) if divisor is not None and np.all(divisor > 0) else (None, None)
    if kind in ("ArgMax", "ArgMin") or (kind in ("TopK", "TopKV2") and tensor.value_index == 1):
        axis = -1 if kind.startswith("Top") else call.axes.constant(op.inputs[1])
        length = None if axis is None else (call.axes.lengths(op.inputs[0]) or {int(axis): None})[int(axis)]
        return 0, length - 1 if isinstance(length, int) else None
    return None, None


def _is_of_several(call: Call, each: int | None) -> bool:
    """Return whether the condition is that there are several numbers of rows: a single number is 0 in any case."""
    condition = call.op.inputs[0].op
    if condition.type != "Greater" or rank_of(call, 0) != 0 or call.axes.constant(condition.inputs[1]) != 1:
        return False
    counts = call.axes.values(condition.inputs[0])
    return counts is not None and [int(one) for one in counts] == [each and each * batch.rows for batch in BATCHES]


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


@_numbered("StridedSlice")
def _sliced_numbers(call: Call) -> Sequence[Placement] | None:
    """Place columns of a sparse tensor's indices; or what row splits say of each row."""
    placed, (begin, end, strides) = call.inputs[0], (call.constant(i) for i in (1, 2, 3))
    if begin is None or end is None or strides is None or np.any(strides != 1):
        return None
    spec = slice_spec(call)
    if isinstance(placed, PiecesShape):
        return [rows((placed.each,))] if spec == ["one"] and begin[0] == 0 else None
    if placed == Splits(Part.LENGTH):
        return [placed] if spec == ["one"] or (begin[0] == 0 and spec == ["all"]) else None
    if placed == SPLITS and call.op.inputs[0].name in call.scope.units.row_splits:
        if begin[0] == 1 and call.op.get_attr("end_mask") and spec == ["some"]:
            return [Splits(Part.ENDS)]
        begins = (call.op.get_attr("begin_mask") or begin[0] == 0) and end[0] == -1 and spec == ["some"]
        return [Splits(Part.BEGINS)] if begins else None
    if not isinstance(placed, Numbers):
        return None
    kept = isinstance(placed, Places) or (spec is not None and spec[-1] == "all" and not placed.axis)
    if kept and spec is not None and {*spec} <= {"all", "new"} and (isinstance(placed, Places) or "new" in spec):
        axis = [i for i, one in enumerate(spec) if one == "all"][placed.axis]
        return None if placed.which is Which.MAP else [dataclasses.replace(placed, axis=axis)]
    if not isinstance(placed, Indices) or placed.axis or spec is None or len(spec) != 2 or spec[0] != "all":
        return None
    if spec[1] == "one" and begin[1] == 0:
        return [placed.moved(placed.by, placed.which, Places)]
    return [placed.by] if spec[1] in ("one", "some") and begin[1] > 0 else None


@_numbered("Shape Size")
def _shape_of_numbers(call: Call) -> Sequence[Placement] | None:
    (placed,), rank, whole = call.inputs, rank_of(call, 0), call.op.type == "Shape"
    if placed == SPLITS and whole and call.op.inputs[0].name in call.scope.units.row_splits:
        return [Splits(Part.LENGTH)]
    if not isinstance(placed, Numbers) or rank is None or (rank != 1 and not whole):
        return None
    return [Counts(tuple(placed.each if axis == placed.axis else 0 for axis in range(rank)), unit=placed.unit)]


@_numbered("Sub")
def _less_numbers(call: Call) -> Sequence[Placement] | None:
    """Place the lengths of a ragged tensor's rows; or how many rows there are: one less than splits."""
    one, other = call.inputs
    if isinstance(one, Splits) and one.part is Part.ENDS and other == Splits(Part.BEGINS):
        same = call.op.inputs[0].op.inputs[0] is call.op.inputs[1].op.inputs[0]
        return [Shard()] if same else None
    return [rows((1,))] if one == Splits(Part.LENGTH) and call.constant(1) == 1 else None


@_numbered("ZerosLike GreaterEqual Maximum")
def _clipped_numbers(call: Call) -> Sequence[Placement] | None:
    """Place the checks of a sum over segments' gradient: none of the tower's numbers is negative."""
    placed = call.inputs[0]
    if not isinstance(placed, Places) or placed.which not in (Which.OWN, Which.EVERY, Which.LOOSE):
        return None
    if call.op.type == "ZerosLike":
        return [placed.by]
    zero = call.op.inputs[1].op.type == "ZerosLike" or np.array_equal(call.constant(1), 0)
    zero = zero and rank_of(call, 1) in (0, rank_of(call, 0))
    if not zero or not _stay(call, 0):
        return None
    return [placed.by if call.op.type == "GreaterEqual" else placed]


@_numbered("Pack", "ConcatV2")
def _packed_numbers(call: Call) -> Sequence[Placement] | None:
    """Place the indices that a step makes of rows and columns."""
    packs, rank, made = call.op.type == "Pack", rank_of(call, 0), lengths_of(call.op.outputs[0])
    ends = call.inputs[1] if len(call.inputs) > 1 else REPLICATE
    if isinstance(ends, Splits) and ends.part is Part.ENDS and not packs and len(call.inputs) == 3:
        if ends.unit and np.array_equal(call.constant(0), [0]):
            call.scope.units.row_splits[call.op.outputs[0].name] = ends.unit
            return [SPLITS]
        return None
    first, *others = call.inputs if packs else call.inputs[:-1]
    axis = call.op.get_attr("axis") if packs else call.constant(len(call.inputs) - 1)
    if not isinstance(first, Numbers):
        return None
    by, own = first.by, first.which if first.which is Which.LOOSE else Which.OWN
    if packs and axis == 0 and rank == 1 and isinstance(first, Places):  # columns, to be turned
        plain = all(isinstance(one, Shard) and same_rows(one, by) for one in others) and first.height
        return [first.moved(by.at(1), own, Indices)] if plain else None
    if first.axis or not made or axis is None or (packs and isinstance(first, Indices)):
        return None
    plain = all(isinstance(one, Shard) and same_rows(one, by) and not one.axis for one in others)
    columns = isinstance(first, Indices) or packs or lengths_of(call.op.inputs[0])[-1] == 1
    last = int(axis) % len(made) == len(made) - 1 > 0 and columns
    if not plain or not others or not first.height or not last:
        return None
    every = first.which is Which.EVERY or (first.which is Which.FIRST and first.width == 1)
    every = every and isinstance(first, Places) and rank == 2 - packs
    return [first.moved(by, Which.EVERY if every else own, Indices)]


@_numbered("GatherV2")
def _gather_numbered(call: Call) -> Sequence[Placement] | None:
    """Place what each number takes from a row of the tower, as the gradient of a sum over segments does."""
    params, indices, _ = call.inputs
    of, axis = counted(params.by if isinstance(params, Numbers) else params), call.constant(2)
    if not isinstance(indices, Places) or indices.axis or axis is None or call.op.get_attr("batch_dims"):
        return None
    if not isinstance(of, Shard) or not _stay(call, 1, of.axis == 0 and isinstance(params, Shard)):
        return None
    along = rank_of(call, 0) is not None and of.axis == int(axis) % rank_of(call, 0)
    if not along or of.unit or of.blocks > 1 or (isinstance(params, Numbers) and params.which is Which.MAP):
        return None
    known = of.each == indices.count is not None
    if not known and not (indices.unit and of.each is None and _is_as_long(call)):
        return None
    by = indices.by.at(of.axis)  # the first of the axes of indices takes its place
    return [params.moved(by) if isinstance(params, Numbers) else by]


def _stay(call: Call, index: int, can_look: bool = True) -> bool:
    """Return whether numbers name the tower's own rows, or the step can look whether they do: then it is told to."""
    placed = call.inputs[index]
    if not isinstance(placed, Numbers) or placed.which is not Which.LOOSE:
        return True
    call.loose = index
    return can_look and call.scope.looks and not placed.unit and placed.count is not None


@_numbered("GatherNd")
def _gather_nd_numbered(call: Call) -> Sequence[Placement] | None:
    indices = _rows_named(call, 1)
    return [indices.by] if indices and _has_rows(call.inputs[0], indices) and _stay(call, 1) else None


@_numbered("ScatterNd TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate")
def _scatter_numbered(call: Call) -> Sequence[Placement] | None:
    """Place rows of which elements are set, or added up, that name the tower's own rows first."""
    made = call.op.type == "ScatterNd"
    _, updates, rowed = call.inputs if made else (*call.inputs[1:], call.inputs[0])
    indices = _rows_named(call, 0 if made else 1)
    if indices is None or not _has_rows(rowed, indices) or not _stay(call, 0 if made else 1, made):
        return None
    plain = isinstance(updates, Shard) and not updates.axis and same_rows(updates, indices.by)
    return [Shard(0, 1, indices.count)] if plain else None


@_numbered("CropAndResize CropAndResizeGradBoxes CropAndResizeGradImage")
def _crop_numbered(call: Call) -> Sequence[Placement] | None:
    """Place crops, of which each names an image among the tower's own."""
    given = {argument.name: placed for argument, placed in zip(call.op.op_def.input_arg, call.inputs, strict=True)}
    numbers, rowed = given.pop("box_ind"), given.pop("image", None) or given.pop("image_size")
    size = given.pop("crop_size", REPLICATE)
    if not isinstance(numbers, Places) or numbers.which in (Which.MAP, Which.LOOSE) or not size.whole:
        return None
    by = numbers.by
    plain = all(isinstance(one, Shard) and not one.axis and same_rows(one, by) for one in given.values())
    if not plain or not _has_rows(rowed, numbers):
        return None
    return [Shard(0, 1, numbers.count) if call.op.type.endswith("Image") else by]


def _rows_named(call: Call, index: int) -> Numbers | None:
    """Return how vectors of indices are placed that name one of the tower's rows first; None: this input has others."""
    placed, lengths = call.inputs[index], lengths_of(call.op.inputs[index])
    if not isinstance(placed, Numbers) or placed.axis:
        return None
    alone = isinstance(placed, Indices) or (bool(lengths) and lengths[1:] == [1] and placed.which is not Which.MAP)
    return placed if alone else None


def _has_rows(placed: Placement, numbers: Numbers) -> bool:
    """Return whether a tensor, or a shape, has as many rows for each sample as numbers of them number."""
    of = placed if isinstance(placed, Shard) else counted_by(placed)
    return isinstance(of, Shard) and not (of.axis or of.unit) and of.blocks < 2 and of.each == numbers.count is not None


@rule_for("Where")
def _where(call: Call) -> Sequence[Placement] | None:
    """Place the indices of true elements, which number the tower's rows."""
    placed, rank = call.inputs[0], rank_of(call, 0)
    if not isinstance(placed, Shard) or placed.axis or placed.blocks != 1 or rank is None or call.scope.within:
        return None
    unit = _unit_of(call.op.outputs[0], call.scope.units.row_splits)
    if unit is None:
        mask, limit = _mask_of(call.op.inputs[0]), _columns_of(call.op.outputs[0])
        if limit is not None:  # the same lengths have other true elements up to another limit
            known = tf.get_static_value(limit)
            known = limit.name if known is None else int(known)
            mask = mask if call.scope.units.limits.setdefault(mask, known) == known else call.op.inputs[0].name
        unit = call.scope.units.masks.setdefault(mask, call.op.outputs[0].name)
    return [Indices(placed.each, 1, unit=unit)]


def _mask_of(tensor: tf.Tensor) -> TensorName:
    """Return a name for masks with these true elements, in any shape and in this order; or with so many in each row."""
    mask = passed_on(tensor, "ExpandDims", "Reshape", "Squeeze", "Cast")
    if mask.op.type == "Sum" and mask.dtype.is_integer and passed_on(mask.op.inputs[0], "Cast").dtype == tf.bool:
        return _mask_of(mask.op.inputs[0])  # how many are true
    column = mask.op.inputs[1] if mask.op.type == "Less" and _columns_of(mask) is not None else mask
    return passed_on(column, "ExpandDims", "Cast").name


_OF_PLACES = ("Squeeze", "Where", "Reshape")  # between a sequence mask and the places of its true elements


def _columns_of(places: tf.Tensor) -> tf.Tensor | None:
    """Return how many columns the sequence mask has whose true elements lie at these places; None: there is none."""
    mask = passed_on(places, *_OF_PLACES).op
    columns = passed_on(mask.inputs[0]).op if mask.type == "Less" and mask.inputs[1].shape.rank == 2 else mask
    from_zero = columns.type == "Range" and [tf.get_static_value(columns.inputs[i]) for i in (0, 2)] == [0, 1]
    return columns.inputs[1] if from_zero and lengths_of(mask.inputs[1])[1] == 1 else None


def _is_as_long(call: Call) -> bool:
    """Return whether a gather takes, from repeated rows, the true elements of a sequence mask of as many columns."""
    tiled, places = call.op.inputs[:2]
    tile, mask = passed_on(tiled, "Reshape").op, passed_on(places, *_OF_PLACES).op
    if tile.type != "Tile" or tiled.shape.rank != 1 or tile.inputs[1].op.type != "Pack":
        return False
    if (lengths_of(tile.inputs[0]) or [None])[1:] != [1] or tile.inputs[1].op.inputs[1] is not _columns_of(places):
        return False
    return call.axes.rows(tile.outputs[0], 0) == call.axes.rows(mask.inputs[1], 0) is not None


def _unit_of(places: tf.Tensor, row_splits: Mapping[TensorName, TensorName]) -> TensorName | None:
    """Return the unit of the row splits whose row lengths the sequence mask of these places shows; None: of none."""
    limit = _columns_of(places)
    if limit is None or limit.op.type != "Maximum" or limit.op.inputs[1].op.type != "Max":
        return None
    longest = limit.op.inputs[1].op.inputs[0]
    column = passed_on(passed_on(places, *_OF_PLACES).op.inputs[1], "Cast").op
    lengths = passed_on(longest, "Cast", "BroadcastTo").op
    if column.type != "ExpandDims" or column.inputs[0] is not longest or lengths.type != "Sub":
        return None
    ends, begins = (tensor.op for tensor in lengths.inputs)
    if {ends.type, begins.type} != {"StridedSlice"} or ends.inputs[0] is not begins.inputs[0]:
        return None
    fits = tf.get_static_value(ends.inputs[1]) == 1 and tf.get_static_value(begins.inputs[2]) == -1
    return row_splits.get(ends.inputs[0].name) if fits else None


_NUMBERED_SEGMENTS = names("""
    SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments SparseSegmentSumWithNumSegments
""")


@_numbered(*SEGMENTS, *SORTED_SEGMENTS, *_NUMBERED_SEGMENTS)
def _segments_numbered(call: Call) -> Sequence[Placement] | None:
    """Place results whose segments are the tower's rows; `adjusting.py` adds rows that no number names at the end."""
    gathered, counted_by_last = call.op.type.startswith("Sparse"), call.op.type in SORTED_SEGMENTS
    data, ids = call.inputs[gathered : gathered + 2]  # or, of a whole table, which rows of it
    if not isinstance(ids, Places) or ids.axis or not ids.count or ids.which is Which.MAP:
        return None
    if not _stay(call, 1 + gathered, call.op.type in SEGMENTS):
        return None
    plain = isinstance(data, Shard) and same_rows(data, ids.by) and not data.axis
    plain = plain and (not gathered or call.inputs[0].whole)
    # As many as the batch has rows, as is known of each number's occurring, or of what its result has met.
    every = counted_by_last and (ids.which is Which.EVERY or call.axes.rows(call.op.outputs[0], 0) == ids.count)
    ends = every or (not counted_by_last and call.inputs[-1] == rows((ids.count,)))
    return [Shard(0, 1, ids.count)] if plain and ends else None


@_numbered("SparseSegmentMeanGrad SparseSegmentSqrtNGrad SparseSegmentSumGrad")
def _segments_back(call: Call) -> Sequence[Placement] | None:
    """Place a table's gradient, of whose rows the tower's have taken some."""
    gradient, taken, ids, height = call.inputs
    if not isinstance(ids, Places) or ids.axis or ids.which not in (Which.FIRST, Which.OWN, Which.EVERY):
        return None
    plain = isinstance(taken, Shard) and same_rows(taken, ids.by) and height.whole
    return [SUM] if plain and has_samples(gradient) and gradient.each == ids.count is not None else None


def _sparse_rows(call: Call, indices: int, values: int, shape: int) -> Shard | None:
    """Return the placement of a sparse tensor's rows, by the inputs that have its parts; None: not by samples."""
    placed, of = call.inputs[indices], call.inputs[shape]
    if not isinstance(placed, Indices) or placed.axis or placed.which not in (Which.OWN, Which.EVERY):
        return None
    plain = placed.count and call.inputs[values] == Shard(unit=placed.unit) and only_one(of) == 0
    fits = plain and isinstance(of, Counts) and of == Counts((placed.count, *of.counts[1:]))
    return Shard(0, 1, placed.count) if fits else None


@_numbered("SparseTensorDenseMatMul")
def _sparse_product(call: Call) -> Sequence[Placement] | None:
    placed, other = _sparse_rows(call, 0, 1, 2), call.inputs[3]
    if placed is None or not isinstance(other, (Shard, Replicate, Partial)):
        return None
    if not call.op.get_attr("adjoint_a"):
        call.require(3, REPLICATE)
        return [placed]
    here = placed.at(int(call.op.get_attr("adjoint_b")))
    if not isinstance(other, Shard) or other.axis != here.axis or not same_rows(other, here):
        return None
    call.require(3, here)
    return [SUM] if call.op.outputs[0].dtype.name in native.DTYPES else None


@_numbered("SparseReduceMax SparseReduceSum")
def _sparse_sum(call: Call) -> Sequence[Placement] | None:
    placed, over, lengths = _sparse_rows(call, 0, 1, 2), call.constant(3), lengths_of(call.op.inputs[0])
    if placed is None or over is None or not lengths or lengths[1] is None:
        return None
    if 0 not in {int(axis) % lengths[1] for axis in np.ravel(over)}:  # over no axes it sums nothing, as the kernel does
        return [placed]
    sums = call.op.type == "SparseReduceSum" and call.op.outputs[0].dtype.name in native.DTYPES
    return [SUM] if sums else None  # a maximum of nothing would be 0


@_numbered("SparseReorder SparseSoftmax SparseToDense")
def _sparse_values(call: Call) -> Sequence[Placement] | None:
    if call.op.type == "SparseToDense":
        placed = _sparse_rows(call, 0, 2, 1)
        return None if placed is None or not call.inputs[3].whole else [placed]
    first = call.op.type == "SparseSoftmax"  # which gives the values alone
    return None if _sparse_rows(call, 0, 1, 2) is None else call.inputs[first:2]


@_numbered("SparseFillEmptyRows")
def _sparse_fill(call: Call) -> Sequence[Placement] | None:
    """Place a sparse tensor with a value in each row, and where the values go that there were."""
    placed, indices = _sparse_rows(call, 0, 1, 2), call.inputs[0]
    if placed is None or not isinstance(indices, Indices) or not call.inputs[3].whole or call.scope.within:
        return None
    filled = Shard(unit=call.op.outputs[1].name)
    return [indices.moved(filled, Which.EVERY), filled, placed, Places(None, 1, Which.MAP, unit=indices.unit)]


@_numbered("SparseFillEmptyRowsGrad")
def _sparse_fill_back(call: Call) -> Sequence[Placement] | None:
    moved, gradient = call.inputs
    filled = Shard(unit=call.op.inputs[0].op.outputs[1].name)
    if not isinstance(moved, Numbers) or moved.which is not Which.MAP or gradient != filled:
        return None
    return [Shard(unit=moved.unit), SUM]


@_numbered("RaggedTensorToTensor")
def _ragged_to_dense(call: Call) -> Sequence[Placement] | None:
    """Place a padded ragged tensor; `adjusting.py` sees to it that all towers pad up to the batch's longest row."""
    values, default, *pieces = call.inputs[1:]
    lengths = call.constant(0)
    known = not call.scope.within and default.whole and _are_rows_of(call, 3, pieces, values)
    open_ = lengths is not None and np.ravel(lengths)[0] == -1 and call.op.outputs[0].shape.rank is not None
    return [Shard()] if known and open_ else None


def _are_rows_of(call: Call, index: int, pieces: Sequence[Placement], values: Placement) -> bool:
    """Return whether inputs from `index` on say which values a tower's rows have: their splits, or each value's row."""
    if not isinstance(values, Shard) or values != Shard(unit=values.unit) or not values.unit:
        return False
    if list(pieces) == [SPLITS]:
        return call.scope.units.row_splits.get(call.op.inputs[index].name) == values.unit
    count, ids = pieces if len(pieces) == 2 else (REPLICATE, REPLICATE)
    if not isinstance(ids, Places) or ids.which in (Which.MAP, Which.LOOSE) or ids.unit != values.unit:
        return False
    return count == rows((1,)) and (ids.height, ids.width) == (1, 1)


_SPLITTING = "StringSplit StringSplitV2"


@_numbered("SetSize")
def _set_size(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    if not isinstance(placed, Indices) or placed.which is not Which.OWN:
        return None
    whole = call.inputs[1] == Shard(unit=placed.unit) and isinstance(call.inputs[2], PiecesShape)
    return [Shard(0, 1, placed.count)] if whole else None


@rule_for(_SPLITTING, "DenseToDenseSetOperation")
def _split_texts(call: Call) -> Sequence[Placement] | None:
    """Place the pieces of each row's text, or what two sets of each row have, as a sparse tensor."""
    placed, *others = call.inputs
    if not has_samples(placed) or not placed.each or call.scope.within:
        return None
    if call.op.type == "DenseToDenseSetOperation":
        if not has_samples(others[0]) or not same_rows(placed, others[0]) or rank_of(call, 0) != 2:
            return None
    elif not all(one.whole for one in others):
        return None
    unit = call.op.outputs[1].name
    return [Indices(placed.each, 1, unit=unit), Shard(unit=unit), PiecesShape(placed.each)]


@rule_for("UnicodeDecode UnicodeDecodeWithOffsets")
def _split_characters(call: Call) -> Sequence[Placement] | None:
    """Place the characters of each row's text as a ragged tensor."""
    (placed, *_) = call.inputs
    return _ragged(call) if has_samples(placed) and placed.each == 1 and not call.scope.within else None


@_numbered("StringNGrams")
def _grams(call: Call) -> Sequence[Placement] | None:
    values, splits = call.inputs
    return _ragged(call, 1)[::-1] if _are_rows_of(call, 1, [splits], values) else None


def _ragged(call: Call, at: int = 0) -> list[Placement]:
    """Return the placements of row splits, the result `at`, and of the others, which have the values."""
    splits = call.op.outputs[at].name
    call.scope.units.row_splits[splits] = splits
    return [SPLITS, *[Shard(unit=splits)] * (len(call.op.outputs) - 1)]


@_numbered("DenseBincount")
def _row_lengths(call: Call) -> Sequence[Placement] | None:
    """Place how many values each row has."""
    ids, size, _ = call.inputs
    if not isinstance(ids, Places) or ids.axis or ids.which in (Which.MAP, Which.LOOSE) or rank_of(call, 0) != 1:
        return None
    if not ids.count or size != rows((ids.count,)) or lengths_of(call.op.inputs[2]) != [0]:
        return None
    call.scope.units.row_lengths[call.op.outputs[0].name] = ids.unit
    return [Shard(0, 1, ids.count)]


@rule_for("Cumsum")
def _row_ends(call: Call) -> Sequence[Placement] | None:
    """Place where ragged rows end, the sums of their lengths: each tower needs those of its own."""
    (made,), lengths, placed = call.op.outputs, call.op.inputs[0], call.inputs[0]
    splits = [one for one in made.consumers() if one.type == "ConcatV2" and len(one.inputs) == 3]
    ends = has_samples(placed) and placed.each == 1 and rank_of(call, 0) == 1 and made.dtype.is_integer
    ends = ends and not (call.scope.within or call.op.get_attr("exclusive") or call.op.get_attr("reverse"))
    if not ends or not splits or len(splits) < len(made.consumers()):
        return _cumulated(call)
    unit = call.scope.units.row_lengths.get(lengths.name) or call.scope.units.masks.setdefault(
        _mask_of(lengths), made.name
    )
    return [Splits(Part.ENDS, unit)]


@_numbered("RaggedBincount UnicodeEncode")
def _of_ragged(call: Call) -> Sequence[Placement] | None:
    at = int(call.op.type == "UnicodeEncode")  # of the splits; values are beside them, sizes and weights behind
    splits, values = call.inputs[at], call.inputs[1 - at]
    plain = _are_rows_of(call, at, [splits], values) and all(one.whole for one in call.inputs[2:3])
    return [Shard()] if plain and all(one.whole or one == values for one in call.inputs[3:]) else None


@rule_for("SparseCross SparseCrossHashed SparseCrossV2")
def _sparse_cross(call: Call) -> Sequence[Placement] | None:
    """Place the crosses of dense columns, of which each row has as many."""
    count = len(call.op.get_attr("dense_types"))
    widths = [lengths_of(tensor) for tensor in call.op.inputs[:count]]
    if call.op.get_attr("N") or not all(one.whole for one in call.inputs[count:]) or not count:
        return None
    if any(one != Shard() for one in call.inputs[:count]) or any(not w or len(w) != 2 or None in w[1:] for w in widths):
        return None
    first = call.inputs[0]
    if not has_samples(first) or not first.each:
        return None
    made = Shard(0, 1, first.each * math.prod(one[1] for one in widths))
    return [Indices(first.each, 1, Which.EVERY, each=made.each), made, rows((first.each, 0))]
