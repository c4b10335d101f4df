"""Rules for sparse and ragged tensors.

How many of their values a tower has, its data say; they lie in the order of its rows. So these values are a unit of
their own, as samples are: the ops of `OF_ANY_UNIT` count by it, with their rules for samples. Integers that number a
tower's own rows, and row splits (`Kind.PLACES`, `Kind.INDICES`, `PIECE`), have rules in `NUMBERED`.
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
from ncclsync.semantics.placements import PIECE, REPLICATE, SAMPLES, SUM, Detail, Kind, Placement, rows, shard
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


def numbered(placed: Placement) -> Placement | None:
    """Return how integers that number a tower's rows are placed once they number the batch's; None for others."""
    return shard(placed.axis, 1, placed.each, placed.unit) if placed.kind in (Kind.PLACES, Kind.INDICES) else None


def _places(like: Placement, by: Placement, detail: Detail | None = Detail.OWN, kind: Kind = Kind.PLACES) -> Placement:
    """Return the placement of numbers of the same things as `like`, one for each of the rows that are placed `by`."""
    return dataclasses.replace(by, kind=kind, detail=detail, counts=like.counts)


def _numbers_of(placed: Placement) -> int:
    """Return how many elements per sample these integers number; 0 if that is open."""
    return max(placed.counts[0], 0) * placed.counts[1]


@_numbered("BroadcastTo Cast ExpandDims Identity Reshape Squeeze Tile Transpose")
def _moved_numbers(call: Call) -> Sequence[Placement] | None:
    """Place numbers that an op moves, and does not change: they go where rows go."""
    placed, kind = call.inputs[0], call.op.type
    if placed.kind is Kind.PIECE:
        splits, unit = call.op.outputs[0].name, call.placer.row_splits.get(call.op.inputs[0].name)
        if unit is not None and not call.placer.within:
            call.placer.row_splits[splits] = unit
        return [placed] if kind in ("Cast", "Identity") else None
    before = numbered(placed)
    if before is None or call.op.outputs[0].dtype not in (tf.int32, tf.int64) or placed.detail is Detail.MAP:
        return None
    if kind in ("Cast", "Identity"):
        return [placed]
    squeezed = kind == "Squeeze" and lengths_of(call.op.inputs[0])[1:] == [1]
    if placed.kind is Kind.INDICES and not squeezed and not _keeps_vectors(call):
        return None
    call.inputs[0], call.unit = before, before.unit
    made = RULES[kind](call)
    call.inputs[0], call.unit = placed, SAMPLES
    if made is None or made[0].kind is not Kind.SHARD or made[0].blocks != 1:
        return None
    detail, of_rows = placed.detail, placed.detail in (None, Detail.ROW) and made[0].each == before.each > 0
    kept = of_rows or detail is Detail.LOOSE or (kind == "Squeeze" and detail is Detail.EVERY)
    as_before = Kind.PLACES if squeezed else placed.kind
    return [_places(placed, made[0].of_unit(before.unit), detail if kept else Detail.OWN, as_before)]


def _keeps_vectors(call: Call) -> bool:
    """Return whether an op moves vectors of indices, and changes none: they lie along the last axis, or turn to it."""
    before, after = lengths_of(call.op.inputs[0]), lengths_of(call.op.outputs[0])
    if call.op.type == "Transpose":
        return call.inputs[0].axis == 1 and len(before) == 2 and np.array_equal(call.constant(1), [1, 0])
    same = bool(before and after) and before[-1] == after[-1] is not None
    return call.op.type in ("ExpandDims", "Reshape", "Tile") and same and not call.inputs[0].axis


@_numbered("AddV2 Mul SelectV2")
def _computed_numbers(call: Call) -> Sequence[Placement] | None:
    """Place arithmetic on the numbers of rows that gives numbers of elements of the tower's rows."""
    kind, one, two = call.op.type, call.inputs[0], call.inputs[1]
    if call.op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    loose = (None, Detail.ROW, Detail.OWN, Detail.LOOSE) if kind == "AddV2" else (None, Detail.ROW)
    if kind == "AddV2" and Kind.INDICES in (one.kind, two.kind):
        at = 0 if one.kind is Kind.INDICES else 1
        plain = call.inputs[at].detail is Detail.OWN and not call.inputs[at].axis
        return _numbers_with(call, at) if plain and _begin_with_zeros(call, call.op.inputs[1 - at]) else None
    numbers = next((one for one in call.inputs if one.kind is Kind.PLACES and one.detail in loose), None)
    if numbers is None:
        return None
    if kind == "SelectV2":  # `range(rows) if rows > 1 else 0`, of `tf.vectorized_map`
        zero = call.constant(2)
        clear = numbers == two and zero is not None and not np.any(zero)
        return [two] if clear and one.whole and _is_of_several(call, numbers.counts[0]) else None
    other = 0 if numbers is two else 1
    made = _numbers_with(call, 1 - other)
    if kind == "Mul" and numbers.detail is None:
        factor, (count, width) = call.constant(other), numbers.counts
        if made is not None and np.ndim(factor) == 1 and factor[0] == 1 and len(factor) > 1 and not factor[1:].any():
            return [dataclasses.replace(made[0], kind=Kind.INDICES, detail=Detail.OWN)]
        if _is_one(call.op.inputs[other]):
            return made
        fits = factor is not None and np.size(factor) == 1 and int(np.ravel(factor)[0]) > 0
        return [dataclasses.replace(numbers, counts=(count, width * int(np.ravel(factor)[0])))] if fits else None
    if kind == "AddV2" and made is not None:
        lowest, highest = bounds(call, call.op.inputs[other])
        inside = lowest is not None and highest is not None and 0 <= lowest <= highest < numbers.counts[1]
        inside |= numbers is two and _gathers_by_row(call, numbers.counts[1])
        exact = inside and numbers.detail is None
        return [dataclasses.replace(made[0], detail=Detail.ROW if exact else Detail.LOOSE)]
    return None


def _numbers_with(call: Call, at: int) -> list[Placement] | None:
    """Place numbers of rows that meet others, or whole ones, element by element: they go where rows go."""
    numbers, other = call.inputs[at], call.inputs[1 - at]
    by = numbered(numbers)
    if by is None or other.kind not in (Kind.SHARD, Kind.REPLICATE):
        return None
    call.inputs[at], call.unit = by, by.unit
    whole = other.whole
    made = RULES["AddV2"](call) if whole or other == shard(other.axis, other.blocks, other.each, by.unit) else None
    fits = made is not None and made[0].blocks == 1 and call.inputs[at] == by and call.inputs[1 - at].whole == whole
    call.inputs[at], call.unit = numbers, SAMPLES
    return [_places(numbers, made[0].of_unit(by.unit), numbers.detail, numbers.kind)] if fits and made else None


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


@_numbered("StridedSlice")
def _sliced_numbers(call: Call) -> Sequence[Placement] | None:
    """Place columns of a sparse tensor's indices; or what row splits say of each row."""
    placed, (begin, end, strides) = call.inputs[0], (call.constant(i) for i in (1, 2, 3))
    if begin is None or end is None or strides is None or np.any(strides != 1):
        return None
    spec = slice_spec(call)
    if placed.detail is Detail.SHAPE:
        return [rows(placed.counts)] if spec == ["one"] and begin[0] == 0 else None
    if placed.kind is Kind.PIECE and placed.detail is Detail.LENGTH:
        return [placed] if spec == ["one"] or (begin[0] == 0 and spec == ["all"]) else None
    if placed == PIECE and call.op.inputs[0].name in call.placer.row_splits:
        if begin[0] == 1 and call.op.get_attr("end_mask") and spec == ["some"]:
            return [dataclasses.replace(PIECE, detail=Detail.ENDS)]
        begins = (call.op.get_attr("begin_mask") or begin[0] == 0) and end[0] == -1 and spec == ["some"]
        return [dataclasses.replace(PIECE, detail=Detail.BEGINS)] if begins else None
    kept = placed.kind is Kind.PLACES or (spec is not None and spec[-1] == "all" and not placed.axis)
    if kept and spec is not None and {*spec} <= {"all", "new"} and (placed.kind is Kind.PLACES or "new" in spec):
        axis = [i for i, one in enumerate(spec) if one == "all"][placed.axis]
        return None if placed.detail is Detail.MAP else [placed.at(axis)]
    if placed.kind is not Kind.INDICES or placed.axis or spec is None or len(spec) != 2 or spec[0] != "all":
        return None
    by = shard(0, 1, placed.each, placed.unit)
    if spec[1] == "one" and begin[1] == 0:
        return [_places(placed, by, placed.detail)]
    return [by] if spec[1] in ("one", "some") and begin[1] > 0 else None


@_numbered("Shape Size")
def _shape_of_numbers(call: Call) -> Sequence[Placement] | None:
    (placed,), rank, whole = call.inputs, rank_of(call, 0), call.op.type == "Shape"
    if placed == PIECE and whole and call.op.inputs[0].name in call.placer.row_splits:
        return [dataclasses.replace(placed, detail=Detail.LENGTH)]
    by = numbered(placed)
    if by is None or rank is None or (rank != 1 and not whole):
        return None
    return [rows(tuple((by.each or -1) if axis == by.axis else 0 for axis in range(rank))).of_unit(by.unit)]


@_numbered("Sub")
def _less_numbers(call: Call) -> Sequence[Placement] | None:
    """Place the lengths of a ragged tensor's rows; or how many rows there are: one less than splits."""
    one, other = call.inputs
    if (one.detail, other.detail) == (Detail.ENDS, Detail.BEGINS):
        same = call.op.inputs[0].op.inputs[0] is call.op.inputs[1].op.inputs[0]
        return [shard()] if one.kind is other.kind is Kind.PIECE and same else None
    return [rows((1,))] if one == dataclasses.replace(PIECE, detail=Detail.LENGTH) and call.constant(1) == 1 else None


@_numbered("ZerosLike GreaterEqual Maximum")
def _clipped_numbers(call: Call) -> Sequence[Placement] | None:
    """Place the checks of a sum over segments' gradient: none of the tower's numbers is negative."""
    placed, by = call.inputs[0], numbered(call.inputs[0])
    if by is None or placed.kind is not Kind.PLACES or placed.detail not in (Detail.OWN, Detail.EVERY, Detail.LOOSE):
        return None
    if call.op.type == "ZerosLike":
        return [by]
    zero = call.op.inputs[1].op.type == "ZerosLike" or np.array_equal(call.constant(1), 0)
    zero = zero and rank_of(call, 1) in (0, rank_of(call, 0))
    if not zero or not _stay(call, 0):
        return None
    return [by if call.op.type == "GreaterEqual" else placed]


@_numbered("Pack", "ConcatV2")
def _packed_numbers(call: Call) -> Sequence[Placement] | None:
    """Place the indices that a step makes of rows and columns."""
    packs, rank, made = call.op.type == "Pack", rank_of(call, 0), lengths_of(call.op.outputs[0])
    ends = call.inputs[1] if len(call.inputs) > 1 else REPLICATE
    if ends.kind is Kind.PIECE and ends.detail is Detail.ENDS and not packs and len(call.inputs) == 3:
        if ends.unit and np.array_equal(call.constant(0), [0]):
            call.placer.row_splits[call.op.outputs[0].name] = ends.unit
            return [PIECE]
        return None
    first, *others = call.inputs if packs else call.inputs[:-1]
    by, axis = numbered(first), call.op.get_attr("axis") if packs else call.constant(len(call.inputs) - 1)
    if packs and by is not None and axis == 0 and rank == 1 and first.kind is Kind.PLACES:  # columns, to be turned
        plain = all(one.kind is Kind.SHARD and same_rows(one, by) for one in others) and first.counts[0] > 0
        own = first.detail if first.detail is Detail.LOOSE else Detail.OWN
        return [_places(first, by.at(1), own, Kind.INDICES)] if plain else None
    if by is None or first.axis or not made or axis is None or (packs and first.kind is Kind.INDICES):
        return None
    plain = all(one.kind is Kind.SHARD and same_rows(one, by) and not one.axis for one in others)
    columns = first.kind is Kind.INDICES or packs or lengths_of(call.op.inputs[0])[-1] == 1
    last = int(axis) % len(made) == len(made) - 1 > 0 and columns
    if not plain or not others or first.counts[0] < 1 or not last:
        return None
    every = first.detail is Detail.EVERY or (first.detail is None and first.counts[1] == 1)
    every = every and first.kind is Kind.PLACES
    inside = Detail.EVERY if every and rank == 2 - packs else Detail.OWN
    return [_places(first, by, Detail.LOOSE if first.detail is Detail.LOOSE else inside, Kind.INDICES)]


@_numbered("GatherV2")
def _gather_numbered(call: Call) -> Sequence[Placement] | None:
    """Place what each number takes from a row of the tower, as the gradient of a sum over segments does."""
    params, indices, _ = call.inputs
    by, of, axis = numbered(indices), counted(numbered(params) or params), call.constant(2)
    if (
        by is None
        or axis is None
        or call.op.get_attr("batch_dims")
        or by.axis
        or not _stay(call, 1, of.axis == 0 and params.kind is Kind.SHARD)
    ):
        return None
    along = of.kind is Kind.SHARD and rank_of(call, 0) is not None and of.axis == int(axis) % rank_of(call, 0)
    if not along or of.unit or of.blocks > 1 or indices.kind is not Kind.PLACES or params.detail is Detail.MAP:
        return None
    known = of.each == _numbers_of(indices) > 0
    if not known and not (by.unit and of.each == 0 and _is_as_long(call)):
        return None
    by = by.at(of.axis)  # the first of the axes of indices takes its place
    return [by if params.kind is Kind.SHARD else _places(params, by, kind=params.kind)]


def _stay(call: Call, index: int, can_look: bool = True) -> bool:
    """Return whether numbers name the tower's own rows, or the step can look whether they do: then it is told to."""
    if call.inputs[index].detail is not Detail.LOOSE:
        return True
    call.loose = index
    return can_look and call.placer.looks and not call.inputs[index].unit


@_numbered("GatherNd")
def _gather_nd_numbered(call: Call) -> Sequence[Placement] | None:
    by = _rows_named(call, 1)
    return [by] if by is not None and _has_rows(*call.inputs) and _stay(call, 1) else None


@_numbered("ScatterNd TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate")
def _scatter_numbered(call: Call) -> Sequence[Placement] | None:
    """Place rows of which elements are set, or added up, that name the tower's own rows first."""
    made = call.op.type == "ScatterNd"
    indices, updates, rowed = call.inputs if made else (*call.inputs[1:], call.inputs[0])
    by = _rows_named(call, 0 if made else 1)
    if by is None or not _has_rows(rowed, indices) or not _stay(call, 0 if made else 1, made):
        return None
    plain = updates.kind is Kind.SHARD and not updates.axis and same_rows(updates, by)
    return [shard(0, 1, _numbers_of(indices))] if plain else None


@_numbered("CropAndResize CropAndResizeGradBoxes CropAndResizeGradImage")
def _crop_numbered(call: Call) -> Sequence[Placement] | None:
    """Place crops, of which each names an image among the tower's own."""
    given = {argument.name: placed for argument, placed in zip(call.op.op_def.input_arg, call.inputs, strict=True)}
    numbers, rowed = given.pop("box_ind"), given.pop("image", None) or given.pop("image_size")
    by, size = numbered(numbers), given.pop("crop_size", REPLICATE)
    if by is None or numbers.kind is not Kind.PLACES or numbers.detail in (Detail.MAP, Detail.LOOSE) or not size.whole:
        return None
    plain = all(one.kind is Kind.SHARD and not one.axis and same_rows(one, by) for one in given.values())
    if not plain or not _has_rows(rowed, numbers):
        return None
    return [shard(0, 1, _numbers_of(numbers)) if call.op.type.endswith("Image") else by]


def _rows_named(call: Call, index: int) -> Placement | None:
    """Return how vectors of indices are placed that name one of the tower's rows first; None: this input has others."""
    placed, lengths = call.inputs[index], lengths_of(call.op.inputs[index])
    by = numbered(placed)
    alone = placed.kind is Kind.INDICES or (bool(lengths) and lengths[1:] == [1] and placed.detail is not Detail.MAP)
    return None if by is None or by.axis or not alone else by


def _has_rows(placed: Placement, numbers: Placement) -> bool:
    """Return whether a tensor, or a shape, has as many rows for each sample as numbers of them number."""
    of = placed if placed.kind is Kind.SHARD else counted_by(placed)
    return of.kind is Kind.SHARD and not (of.axis or of.unit) and of.blocks < 2 and of.each == _numbers_of(numbers) > 0


@rule_for("Where")
def _where(call: Call) -> Sequence[Placement] | None:
    """Place the indices of true elements, which number the tower's rows."""
    placed, rank = call.inputs[0], rank_of(call, 0)
    if placed.kind is not Kind.SHARD or placed.axis or placed.blocks != 1 or rank is None or call.placer.within:
        return None
    unit = _unit_of(call.op.outputs[0], call.placer.row_splits)
    if unit is None:
        mask, limit = _mask_of(call.op.inputs[0]), _columns_of(call.op.outputs[0])
        if limit is not None:  # the same lengths have other true elements up to another limit
            known = tf.get_static_value(limit)
            known = limit.name if known is None else int(known)
            mask = mask if call.placer.limits.setdefault(mask, known) == known else call.op.inputs[0].name
        unit = call.placer.masks.setdefault(mask, call.op.outputs[0].name)
    return [Placement(Kind.INDICES, detail=Detail.OWN, counts=(placed.each, 1), unit=unit)]


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
    return call.axes.rows(tile.outputs[0], 0) == call.axes.rows(mask.inputs[1], 0) > 0


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
    """Place results whose segments are the tower's rows; `Partition` adds rows that no number names at the end."""
    gathered, counted_by_last = call.op.type.startswith("Sparse"), call.op.type in SORTED_SEGMENTS
    data, ids = call.inputs[gathered : gathered + 2]  # or, of a whole table, which rows of it
    by, count = numbered(ids), _numbers_of(ids) if ids.kind is Kind.PLACES else 0
    if by is None or by.axis or not count or ids.detail is Detail.MAP:
        return None
    if not _stay(call, 1 + gathered, call.op.type in SEGMENTS):
        return None
    plain = data.kind is Kind.SHARD and same_rows(data, by) and not data.axis and (not gathered or call.inputs[0].whole)
    # As many as the batch has rows, as is known of each number's occurring, or of what its result has met.
    every = counted_by_last and (ids.detail is Detail.EVERY or call.axes.rows(call.op.outputs[0], 0) == count)
    ends = every or (not counted_by_last and call.inputs[-1] == rows((count,)))
    return [shard(0, 1, count)] if plain and ends else None


@_numbered("SparseSegmentMeanGrad SparseSegmentSqrtNGrad SparseSegmentSumGrad")
def _segments_back(call: Call) -> Sequence[Placement] | None:
    """Place a table's gradient, of whose rows the tower's have taken some."""
    gradient, taken, ids, height = call.inputs
    by, count = numbered(ids), _numbers_of(ids) if ids.kind is Kind.PLACES else 0
    plain = by is not None and not by.axis and taken.kind is Kind.SHARD and same_rows(taken, by) and height.whole
    own = count and gradient == shard() and gradient.each == count and ids.detail in (None, Detail.OWN, Detail.EVERY)
    return [SUM] if plain and own else None


def _sparse_rows(call: Call, indices: int, values: int, shape: int) -> Placement | None:
    """Return the placement of a sparse tensor's rows, by the inputs that have its parts; None: not by samples."""
    placed = call.inputs[indices]
    count = _numbers_of(placed) if placed.kind is Kind.INDICES and not placed.axis else 0
    fits = count and call.inputs[values] == shard(0, 1, 1, placed.unit) and placed.detail in (Detail.OWN, Detail.EVERY)
    of = call.inputs[shape]
    return shard(0, 1, count) if fits and only_one(of) == 0 and of == rows((count, *of.counts[1:])) else None


@_numbered("SparseTensorDenseMatMul")
def _sparse_product(call: Call) -> Sequence[Placement] | None:
    placed, other = _sparse_rows(call, 0, 1, 2), call.inputs[3]
    if placed is None or other.kind not in (Kind.SHARD, Kind.REPLICATE, Kind.PARTIAL):
        return None
    if not call.op.get_attr("adjoint_a"):
        call.require(3, REPLICATE)
        return [placed]
    here = placed.at(int(call.op.get_attr("adjoint_b")))
    if other.kind is not Kind.SHARD or other.axis != here.axis or not same_rows(other, here):
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
    if placed is None or not call.inputs[3].whole or call.placer.within:
        return None
    filled = shard(unit=call.op.outputs[1].name)
    return [
        _places(indices, filled, Detail.EVERY, Kind.INDICES),
        filled,
        placed,
        Placement(Kind.PLACES, detail=Detail.MAP, counts=(0, 0), unit=indices.unit),
    ]


@_numbered("SparseFillEmptyRowsGrad")
def _sparse_fill_back(call: Call) -> Sequence[Placement] | None:
    moved, gradient = call.inputs
    filled = shard(unit=call.op.inputs[0].op.outputs[1].name)
    return [shard(unit=moved.unit), SUM] if moved.detail is Detail.MAP and gradient == filled else None


@_numbered("RaggedTensorToTensor")
def _ragged_to_dense(call: Call) -> Sequence[Placement] | None:
    """Place a padded ragged tensor; `Partition` sees to it that all towers pad up to the batch's longest row."""
    values, default, *pieces = call.inputs[1:]
    lengths = call.constant(0)
    known = not call.placer.within and default.whole and _are_rows_of(call, 3, pieces, values)
    open_ = lengths is not None and np.ravel(lengths)[0] == -1 and call.op.outputs[0].shape.rank is not None
    return [shard()] if known and open_ else None


def _are_rows_of(call: Call, index: int, pieces: Sequence[Placement], values: Placement) -> bool:
    """Return whether inputs from `index` on say which values a tower's rows have: their splits, or each value's row."""
    if values != shard(unit=values.unit) or not values.unit:
        return False
    if list(pieces) == [PIECE]:
        return call.placer.row_splits.get(call.op.inputs[index].name) == values.unit
    count, ids = pieces if len(pieces) == 2 else (REPLICATE, REPLICATE)
    known = ids.kind is Kind.PLACES and ids.detail not in (Detail.MAP, Detail.LOOSE) and ids.unit == values.unit
    return known and count == rows((1,)) and ids.counts == (1, 1)


_SPLITTING = "StringSplit StringSplitV2"


@_numbered("SetSize")
def _set_size(call: Call) -> Sequence[Placement] | None:
    placed = call.inputs[0]
    own = placed.kind is Kind.INDICES and placed.detail is Detail.OWN and call.inputs[1] == shard(unit=placed.unit)
    return [shard(0, 1, _numbers_of(placed))] if own and call.inputs[2].detail is Detail.SHAPE else None


@rule_for(_SPLITTING, "DenseToDenseSetOperation")
def _split_texts(call: Call) -> Sequence[Placement] | None:
    """Place the pieces of each row's text, or what two sets of each row have, as a sparse tensor."""
    placed, *others = call.inputs
    if placed != shard() or not placed.each or call.placer.within:
        return None
    if call.op.type == "DenseToDenseSetOperation":
        if not same_rows(*call.inputs) or others[0] != shard() or rank_of(call, 0) != 2:
            return None
    elif not all(one.whole for one in others):
        return None
    unit, counts = call.op.outputs[1].name, (placed.each, 1)
    shape = dataclasses.replace(PIECE, detail=Detail.SHAPE, counts=counts[:1])
    return [Placement(Kind.INDICES, detail=Detail.OWN, counts=counts, unit=unit), shard(unit=unit), shape]


@rule_for("UnicodeDecode UnicodeDecodeWithOffsets")
def _split_characters(call: Call) -> Sequence[Placement] | None:
    """Place the characters of each row's text as a ragged tensor."""
    if call.inputs[0] != shard() or call.inputs[0].each != 1 or call.placer.within:
        return None
    return _ragged(call)


@_numbered("StringNGrams")
def _grams(call: Call) -> Sequence[Placement] | None:
    values, splits = call.inputs
    return _ragged(call, 1)[::-1] if _are_rows_of(call, 1, [splits], values) else None


def _ragged(call: Call, at: int = 0) -> list[Placement]:
    """Return the placements of row splits, the result `at`, and of the others, which have the values."""
    splits = call.op.outputs[at].name
    call.placer.row_splits[splits] = splits
    return [PIECE] + [shard(unit=splits)] * (len(call.op.outputs) - 1)


@_numbered("DenseBincount")
def _row_lengths(call: Call) -> Sequence[Placement] | None:
    """Place how many values each row has."""
    ids, size, _ = call.inputs
    plain = ids.kind is Kind.PLACES and not ids.axis and rank_of(call, 0) == 1
    plain = plain and ids.detail not in (Detail.MAP, Detail.LOOSE)
    if not plain or size != rows((_numbers_of(ids),)) or lengths_of(call.op.inputs[2]) != [0]:
        return None
    call.placer.row_lengths[call.op.outputs[0].name] = ids.unit
    return [shard(0, 1, _numbers_of(ids))]


@rule_for("Cumsum")
def _row_ends(call: Call) -> Sequence[Placement] | None:
    """Place where ragged rows end, the sums of their lengths: each tower needs those of its own."""
    (made,), lengths = call.op.outputs, call.op.inputs[0]
    splits = [one for one in made.consumers() if one.type == "ConcatV2" and len(one.inputs) == 3]
    ends = call.inputs[0] == shard() and call.inputs[0].each == 1 and rank_of(call, 0) == 1 and made.dtype.is_integer
    ends = ends and not (call.placer.within or call.op.get_attr("exclusive") or call.op.get_attr("reverse"))
    if not ends or not splits or len(splits) < len(made.consumers()):
        return _cumulated(call)
    unit = call.placer.row_lengths.get(lengths.name) or call.placer.masks.setdefault(_mask_of(lengths), made.name)
    return [dataclasses.replace(PIECE, detail=Detail.ENDS, unit=unit)]


@_numbered("RaggedBincount UnicodeEncode")
def _of_ragged(call: Call) -> Sequence[Placement] | None:
    at = int(call.op.type == "UnicodeEncode")  # of the splits; values are beside them, sizes and weights behind
    splits, values = call.inputs[at], call.inputs[1 - at]
    plain = _are_rows_of(call, at, [splits], values) and all(one.whole for one in call.inputs[2:3])
    return [shard()] if plain and all(one.whole or one == values for one in call.inputs[3:]) else None


@rule_for("SparseCross SparseCrossHashed SparseCrossV2")
def _sparse_cross(call: Call) -> Sequence[Placement] | None:
    """Place the crosses of dense columns, of which each row has as many."""
    count = len(call.op.get_attr("dense_types"))
    widths = [lengths_of(tensor) for tensor in call.op.inputs[:count]]
    if call.op.get_attr("N") or not all(one.whole for one in call.inputs[count:]) or not count:
        return None
    if any(one != shard() for one in call.inputs[:count]) or any(not w or len(w) != 2 or None in w[1:] for w in widths):
        return None
    each = call.inputs[0].each
    made = shard(0, 1, each * math.prod(one[1] for one in widths))
    indices = Placement(Kind.INDICES, detail=Detail.EVERY, counts=(each, 1), each=made.each)
    return [indices, made, rows((each, 0))] if each else None
