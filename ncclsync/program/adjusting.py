"""Adjust what an op takes and gives, beyond placements: by ops that are put right before it, and right after it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ncclsync.ops import Collective, CollectiveKind
from ncclsync.program.builder import GATHER
from ncclsync.program.conversion import Conversions
from ncclsync.program.graph import opened
from ncclsync.semantics import rules
from ncclsync.semantics.axes import SORTED_SEGMENTS
from ncclsync.semantics.placements import REPLICATE, SUM, Local, Numbers, Placement, Places, Shard
from ncclsync.semantics.rules import Call


class Stay(NamedTuple):
    """Hold what a look has found of the numbers of segments."""

    every: tf.Tensor  # whether all stay among their tower's rows; a bool scalar
    per_row: int  # how many segments there are for each sample


def adjust_inputs(call: Call, made: list[Placement], conversions: Conversions) -> Stay | None:
    """Adjust an op's inputs, given how its results are placed; return what `adjust_result` is to know."""
    if (shape_it := _SHAPED.get(call.op.type)) is not None:
        with conversions.graph.building():
            shape_it(call, made, conversions)
    if call.loose is None:
        return None
    with conversions.graph.building():
        return _look(call, call.loose, conversions)


def adjust_result(
    call: Call, tensor: tf.Tensor, placed: Placement, stay: Stay | None, conversions: Conversions
) -> tf.Tensor:
    """Return a tower's result, within `building`."""
    kind, rows = call.op.type, call.inputs[0] if call.inputs else None
    if stay is not None:
        tensor = _own_segments(call, stay, conversions)
    if kind in SORTED_SEGMENTS and isinstance(placed, Shard):
        return _with_last_rows(tensor, placed, call.op, conversions)
    if kind == "Mean" and placed == SUM and isinstance(rows, Shard) and rows.unit:
        return _weighted(tensor, call, conversions)
    return tensor


def _of_known_shape(call: Call, made: list[Placement], conversions: Conversions) -> None:
    """Let an input have the trace's shape: that of gathered rows is open, which TensorFlow refuses."""
    placed, shape = call.inputs[0], call.op.inputs[0].shape
    if shape.rank and not isinstance(placed, Local):
        shape = opened(shape, placed.axis) if isinstance(placed, Shard) else shape
        call.tensors[0] = tf.ensure_shape(call.tensors[0], shape)


def _as_long_as_longest(call: Call, made: list[Placement], conversions: Conversions) -> None:
    """Let a padded ragged tensor's rows be as long as the batch's longest if that length is open."""
    lengths = np.ravel(call.constant(0))
    if not isinstance(made[0], Shard) or (len(lengths) > 1 and lengths[1] >= 0):
        return
    shape, *pieces = call.tensors[0], *call.tensors[3:]
    if len(pieces) > 1:  # how many rows, and which row each value is in
        ones = tf.ones_like(pieces[1])
        every = tf.math.unsorted_segment_sum(ones, pieces[1], tf.cast(pieces[0], pieces[1].dtype))
    else:
        every = pieces[0][1:] - pieces[0][:-1]
    longest = conversions.graph.exchange(tf.reduce_max(every), Collective(CollectiveKind.ALL_REDUCE, "max"), call.op)
    shape = tf.broadcast_to(shape, [call.op.outputs[0].shape.rank])  # all lengths are open if it is a scalar
    second = tf.logical_and(shape < 0, tf.equal(tf.range(tf.size(shape)), 1))
    call.tensors[0] = tf.where(second, tf.cast(longest, shape.dtype), shape)


# By types of ops that insist on a shape.
_SHAPED: dict[str, Callable[[Call, list[Placement], Conversions], None]] = {
    "MatrixDiagV2": _of_known_shape,
    "MatrixDiagV3": _of_known_shape,
    "RaggedTensorToTensor": _as_long_as_longest,
}


def _look(call: Call, loose: int, conversions: Conversions) -> Stay | None:
    """Look whether numbers that are not known to stay among a tower's rows do so; let the op take all rows if not.

    Returns:
        What is found, for an op whose result has these rows; else None.
    """
    op, numbers, placed = call.op, call.tensors[loose], call.inputs[loose]
    if not isinstance(placed, Numbers) or placed.count is None:
        return None
    per_row = placed.count
    first, own = (tf.cast(one * per_row, numbers.dtype) for one in (conversions.share.begin, conversions.share.rows))
    if op.type in ("GreaterEqual", "Maximum"):
        call.tensors[1] -= first  # as the tower numbers
        return None
    of_rows = numbers if isinstance(placed, Places) else numbers[..., 0]
    stay = tf.reduce_all(tf.logical_and(of_rows >= 0, of_rows < own))
    every = conversions.graph.exchange(tf.cast(stay, tf.int32), Collective(CollectiveKind.ALL_REDUCE, "min"), op)
    stays, none = tf.equal(every, 1), tf.zeros_like(first)
    at_first = 1 if isinstance(placed, Places) else tf.one_hot(0, tf.shape(numbers)[-1], dtype=numbers.dtype)
    call.tensors[loose] = numbers + tf.where(stays, none, first) * at_first
    counts = rules.shape_input(op)
    if counts is None:
        table = call.tensors[0]
        others = conversions.graph.exchange(table[: tf.where(stays, none, own)], GATHER, op)
        call.tensors[0] = tf.concat([table[: tf.where(stays, own, none)], others], 0)
        return None
    total = conversions.convert(call.tensors[counts], call.inputs[counts], REPLICATE, op)
    call.tensors[counts] = tf.where(stays, call.tensors[counts], total)
    return Stay(stays, per_row)


def _own_segments(call: Call, stay: Stay, conversions: Conversions) -> tf.Tensor:
    """Return a tower's rows of what `_look` has let an op add up for them, or, unless they stay, for all rows."""
    (made,), (stays, per_row) = call.op.outputs, stay
    first, own, every = (
        one * per_row for one in (conversions.share.begin, conversions.share.rows, conversions.share.total)
    )
    reduced = rules.SEGMENTS.get(call.op.type, SUM)
    sent = made[: tf.where(stays, 0, every)]
    whole = conversions.graph.exchange(sent, Collective(CollectiveKind.ALL_REDUCE, reduced.op), call.op)
    return tf.concat([made[: tf.where(stays, own, 0)], whole[first : first + tf.where(stays, 0, own)]], 0)


def _with_last_rows(made: tf.Tensor, placed: Shard, op: tf.Operation, conversions: Conversions) -> tf.Tensor:
    """Return sums over segments with what TensorFlow gives of an empty one, for a tower's last rows."""
    own, shape = conversions.share.rows * placed.each, tf.shape(made)
    rest = tf.concat([tf.maximum(own - shape[:1], 0), shape[1:]], 0)
    return tf.concat([made, tf.fill(rest, tf.cast(op.type == "SegmentProd", made.dtype))], 0)[:own]


def _weighted(mean: tf.Tensor, call: Call, conversions: Conversions) -> tf.Tensor:
    """Return a tower's part of a mean over units of which it has any number, or none; each has equally many rows."""
    _, own, total = conversions.extent(call.unit, call.op)
    part = tf.cast(own, mean.dtype) / tf.cast(total, mean.dtype)  # not a number if all have none, as on one device
    return tf.where(own > 0, mean, tf.zeros_like(mean)) * part
