"""Bring the tensors of a traced step to other placements: by ops that are put into its graph, and by exchanges.

`partition.py` asks, op by op. The ops are ordinary ones: a tower's rows of a whole tensor, the batch's count of rows, …
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName
from ncclsync.compat.source_lines import own_place, user_line
from ncclsync.costs.cost import Costs
from ncclsync.costs.roofline import Size, product
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, CollectiveKind
from ncclsync.program.builder import ADD_UP, FOLLOW, GATHER, StepBuilder
from ncclsync.program.graph import opened
from ncclsync.semantics import rules
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.placements import (
    LOCAL,
    MEAN,
    REPLICATE,
    SPLITS,
    SUM,
    Counts,
    Indices,
    ListOf,
    Local,
    Numbers,
    OneOf,
    Partial,
    Piece,
    Placement,
    Recomputed,
    Shard,
    Which,
)
from ncclsync.semantics.placing import REPEATABLE, Found, Refused, serves
from ncclsync.semantics.scope import Lengths


class Unshared(Found):
    """Variables cannot be held in parts: all towers must hold the same value."""

    def __init__(self, handles: set[TensorName]) -> None:
        """Name the variables' handles."""
        super().__init__(sorted(handles))
        self.handles = handles


class Conversions:
    """Know where a step's tensors are, and bring them to other placements, as a `Conversion` does.

    Attributes:
        graph: into which ops and exchanges are put.
        share: the tower's, of the batch.
        axes, lengths: what is known of lengths.
        costs: of the step.
        placed: by the traced tensor's name: what stands for it on a tower, and how that is placed.
        converted: by a tensor, its placement and another one: the tensor that has its values in the other placement.
        learned: by name of a result: shapes that count rows, as another op has shown, where the trace knows nothing.
        rows_of: by the name of a Partial tensor that, once reduced, has the batch's rows: the placement of those rows.
    """

    def __init__(
        self, graph: StepBuilder, axes: Axes, lengths: Lengths, costs: Costs, learned: Mapping[TensorName, Any]
    ) -> None:
        """Begin with a step of which nothing is placed."""
        self.graph, self.axes, self.lengths, self.costs = graph, axes, lengths, costs
        self.share, self.learned = graph.traced.trace.share, dict(learned)
        self.placed: dict[TensorName, tuple[tf.Tensor, Placement]] = {}
        self.converted: dict[tuple[TensorName, Placement, Placement], tf.Tensor] = {}
        self.rows_of: dict[TensorName, Shard] = {}
        self._copies: dict[OpName, tf.Operation] = {}  # of ops, that take whole inputs
        self._extents: dict[TensorName, tuple[tf.Tensor, tf.Tensor, tf.Tensor]] = {}

    def put(self, output: tf.Tensor, tensor: tf.Tensor, placed: Placement) -> None:
        """Let a tensor, placed so, stand for one of the trace on a tower."""
        self.placed[output.name] = tensor, placed
        self.graph.learn(tensor, placed)

    def convert(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> tf.Tensor:
        """Return a tensor placed otherwise, for `op`."""
        if serves(before, after):
            return tensor
        if before.whole and isinstance(after, Shard) and op.type in rules.OF_EQUAL_ROWS:
            self._learn_rows(tensor, after, op)
        key = (tensor.name, before, after)
        if key not in self.converted:
            with self.graph.building():
                self.converted[key] = self._convert(tensor, before, after, op)
        return self.converted[key]

    def _learn_rows(self, tensor: tf.Tensor, after: Shard, op: tf.Operation) -> None:
        """Learn that a length of which nothing is known counts rows, since it meets rows: for the next try."""
        each = after.rows
        for given, name in zip(op.inputs, self.graph.traced.inputs[op.name], strict=False):
            unknown = self.axes.unknown(given, after.axis) if self.placed[name][0] is tensor else None
            if unknown is None or not each or after.unit:
                continue
            results = (made for one in self.graph.traced.ops for made in one.outputs)
            states = ((made.name, self.axes.with_rows(made, unknown, each)) for made in results)
            self.learned.update(itertools.islice((one for one in states if one[1] is not None), 1))

    def reduced(self, tensor: tf.Tensor) -> Placement:
        """Return how a PARTIAL tensor is placed where it is added up."""
        return self.rows_of.get(tensor.name, REPLICATE)

    def spares(self, tensor: tf.Tensor, placed: Placement, depth: int = 8) -> bool:
        """Return whether each tower can compute all of a tensor, of whole ones, by up to `depth` element-wise ops."""
        if placed.whole or (not isinstance(placed, Local) and (tensor.name, placed, REPLICATE) in self.converted):
            return True
        op, given = tensor.op, self.graph.traced.inputs.get(tensor.op.name)
        if not depth or given is None or op.type not in rules.ELEMENTWISE | rules.MOVING | rules.FILLING:
            return isinstance(placed, Counts) and not placed.unit
        return all(self.spares(*self.placed[name], depth - 1) for name in given)

    # The methods that follow make ops, which `building` takes over.

    def _convert(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> tf.Tensor:
        if after.whole:
            return self._made_whole(tensor, before, op)
        if after == MEAN and before == LOCAL:
            return tensor
        if after == SUM and before in (MEAN, LOCAL) and tensor.dtype.is_floating:
            return self.share.of_mean(tensor)
        if isinstance(before, Numbers) and isinstance(after, Shard) and before.count:
            first = tf.cast(self.share.begin * before.count, tensor.dtype)
            if isinstance(before, Indices):
                at_first = tf.one_hot(0, tf.shape(tensor)[0 if before.axis else -1], dtype=tensor.dtype)
                first *= at_first[:, None] if before.axis else at_first
            return tensor + first
        if not before.whole:
            tensor = self.convert(tensor, before, REPLICATE, op)
        if isinstance(after, Counts):
            counts = _counts_of(tensor, after)
            own = tf.constant(counts, tensor.dtype) * tf.cast(self.share.rows, tensor.dtype)
            return tf.where(self._as_counted(counts), tensor, own)
        if isinstance(after, Shard):
            return self.rows_of_tower(tensor, rules.counted(after), op)
        if after == SUM:
            if tensor.name not in self.graph.exchanges and rules.is_zero(tensor):
                return tensor
            return self.share.of_whole(tensor)
        raise NcclSyncError(f"Expected a tensor that can be placed as {after}. Received: {before}, {tensor.name}")

    def _made_whole(self, tensor: tf.Tensor, before: Placement, op: tf.Operation) -> tf.Tensor:
        if isinstance(before, (ListOf, OneOf)) or (tensor.dtype == tf.variant and not tf_compat.is_stateful(tensor.op)):
            return self.anew(tensor)
        if tensor.dtype in (tf.resource, tf.variant):
            raise Refused(f"needs {tensor.name}, of dtype {tensor.dtype.name}, which cannot be sent")
        if isinstance(before, (Shard, Partial)) and self.spares(tensor, before):
            if isinstance(before, Shard):  # of parts, as of gradients that their norm scales, it is instead
                self.costs.alike.append(tensor.op)  # besides what each does for its own rows
            return self.anew(tensor)
        if isinstance(before, Shard):
            return self._gathered(tensor, before, op)
        if isinstance(before, Partial):
            if before == SUM and tensor.dtype == tf.float32 and self._add_halves(tensor, op):
                return self.anew(tensor)
            if self.costs.tells_of(op) and (size := self.costs.roofline.size_bytes(tensor)).power:
                self.costs.receive(op, size, CollectiveKind.ALL_REDUCE)
            return self.graph.exchange(tensor, Collective(CollectiveKind.ALL_REDUCE, before.op), op)
        if isinstance(before, Counts):
            return self._total_counts(tensor, before, op)
        if isinstance(before, Local):
            if tensor.dtype.is_floating and before == LOCAL:
                return self.graph.exchange(tensor, Collective(CollectiveKind.ALL_REDUCE, "mean"), op)
            return self.followed(tensor, op)
        if isinstance(before, Numbers) and before.which in (Which.OWN, Which.EVERY) and before.count:
            return self.convert(self.convert(tensor, before, before.by, op), before.by, REPLICATE, op)
        if before == SPLITS:  # the row splits of all rows
            lengths = self.graph.exchange(tensor[1:] - tensor[:-1], GATHER, op)
            return tf.concat([tf.zeros([1], lengths.dtype), tf.cumsum(lengths)], 0)
        if isinstance(before, Recomputed):  # such as a cast of the rows' places
            return self.anew(tensor)
        raise Refused(f"needs the whole of {tensor.name}, which is placed as {before}")

    def _add_halves(self, tensor: tf.Tensor, op: tf.Operation) -> bool:
        """Add up, for `op`, the parts in float16 that a float32 tensor is computed of, element by element.

        One device rounds their sum to float16, which may be infinite: a loss scale goes by that.
        """
        given = self.graph.traced.inputs.get(tensor.op.name)
        if given is None or tensor.op.type not in rules.ELEMENTWISE | rules.MOVING:
            return False
        parts = [(one, placed) for one, placed in map(self.placed.__getitem__, given) if isinstance(placed, Partial)]
        if len(parts) != 1 or parts[0][1] != SUM:
            return False
        (part, placed), *_ = parts
        if part.dtype != tf.float16:
            return self._add_halves(part, op)
        added = self.convert(tf.cast(part, tf.float32), SUM, REPLICATE, op)
        self.converted.setdefault((part.name, placed, REPLICATE), tf.cast(added, tf.float16))
        return True

    def _total_counts(self, tensor: tf.Tensor, before: Counts, op: tf.Operation) -> tf.Tensor:
        """Return the batch's counts of rows."""
        counts = _counts_of(tensor, before)
        if before.unit and None in before.counts:  # a tower may have none of the unit
            return tf.where(counts == 0, tensor, self.graph.exchange(tensor, ADD_UP, op))
        rows, total = (tf.cast(one, tensor.dtype) for one in self.extent(before.unit, op)[1:])
        each = tf.constant(np.nan_to_num(counts), tensor.dtype)
        counted = each * total
        if None in before.counts:
            counted = tf.where(each > 0, each, tensor // rows) * total
        return (
            counted
            if np.all(counts) and not self.lengths.stretched
            else tf.where(self._as_counted(counts), tensor, counted)
        )

    def _as_counted(self, counts: np.ndarray) -> Any:
        """Return which elements of a tower's counts are the batch's: all, if it has one row, which each tower has."""
        return tf.logical_or(counts == 0, tf.equal(self.share.total, 1)) if self.lengths.stretched else counts == 0

    def followed(self, tensor: tf.Tensor, op: tf.Operation) -> tf.Tensor:
        """Give all towers the tensor of tower 0."""
        if tensor.dtype.name in native.DTYPES and tensor.shape.is_fully_defined():
            return self.graph.exchange(tensor, FOLLOW, op)
        first = tf.equal(self.share.tower, 0)
        flat, shape = tf.reshape(tensor, [-1]), tf.shape(tensor)
        flat, shape = (one[: tf.where(first, tf.size(one), 0)] for one in (flat, shape))
        return self.received_whole(flat, shape, tensor, op)

    def received_whole(self, flat: tf.Tensor, shape: tf.Tensor, like: tf.Tensor, op: tf.Operation) -> tf.Tensor:
        """Return what tower 0 sends, of any dtype and shape; the others add no elements to it."""
        for one in (flat, shape):
            one.set_shape([None])
        values, lengths = self.graph.exchange(flat, GATHER, op), self.graph.exchange(shape, GATHER, op)
        return tf.ensure_shape(tf.reshape(values, lengths), like.shape)

    def anew(self, tensor: tf.Tensor) -> tf.Tensor:
        """Compute a tensor again from whole inputs, since lists of tensors and axes cannot be sent; each op once.

        A loop may give a list for each tensor that its gradient takes.
        """
        op = tensor.op
        if op.name in self._copies:
            return self._copies[op.name].outputs[tensor.value_index]
        if tf_compat.written_handles(op) or self.graph.functions.hides_state(op, REPEATABLE):
            raise NcclSyncError(
                "Expected a loop that can be run again for the whole batch. Received: "
                f"{op.type}, which writes a variable, at {user_line(op.traceback)}. Write it outside the loop"
            )
        given = [self.placed[name] for name in self.graph.traced.inputs[op.name]]
        inputs = [self.convert(one, placed, REPLICATE, op) for one, placed in given]
        self._copies[op.name] = tf_compat.copied_op(op, inputs)
        return self._copies[op.name].outputs[tensor.value_index]

    def first_rows(self, tensor: tf.Tensor, before: Shard, count: int, op: tf.Operation) -> tf.Tensor:
        """Gather the first `count` rows of each tower: those of the batch's first sample, and behind them others."""
        own = (*[slice(None)] * before.axis, slice(count))
        return self._gathered(tensor[own], before, op, Size(count * max(tensor.dtype.size, 1)))

    def _gathered(self, tensor: tf.Tensor, before: Shard, op: tf.Operation, rows: Size | None = None) -> tf.Tensor:
        """Gather all towers' rows, in the order of the batch; `rows`: their bytes, if each held one element."""
        moved = tensor
        turned = before.axis or before.blocks > 1
        if turned:
            rank = tf.rank(tensor) if tensor.shape.rank is None else tensor.shape.rank
            order = tf.concat([[before.axis], tf.range(before.axis), tf.range(before.axis + 1, rank)], 0)
            moved = tf.transpose(tensor, order)  # [blocks * rows, ...]
            rest = tf.shape(moved)[1:]
            if before.blocks > 1:
                moved = tf.reshape(moved, tf.concat([[before.blocks, -1], rest], 0))
                moved = _swapped(moved, rank)  # [rows, blocks, ...]
        whole = self.graph.exchange(moved, GATHER, op)
        if self.costs.tells_of(op):
            lengths = self.costs.roofline.lengths(tensor)
            others = lengths[: before.axis] + lengths[before.axis + 1 :]
            rows = rows or Size((before.rows or before.blocks) * max(tensor.dtype.size, 1), 1)
            self.costs.receive(op, product([rows, *others]), CollectiveKind.ALL_GATHER)
        if not turned:
            return whole
        if before.blocks > 1:
            whole = tf.reshape(_swapped(whole, rank), tf.concat([[-1], rest], 0))
        whole = tf.transpose(whole, tf.math.invert_permutation(order))
        return whole if tensor.shape.rank is None else tf.ensure_shape(whole, opened(tensor.shape, before.axis))

    def extent(self, unit: TensorName, op: tf.Operation) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the first of the tower's samples, or of another unit, in the batch; how many it has, and the batch."""
        if not unit:
            return self.share.begin, self.share.rows, self.share.total
        if unit not in self._extents:
            named = self.graph.traced.tensor(unit)
            placed = (
                self.graph.traced.argument_placements.get(unit) or self.placed[unit][1]
            )  # the step may not need splits
            ends = isinstance(placed, Piece)
            count = tf.cast(tf.reduce_sum(named[-1:]), tf.int32) if ends else tf.shape(named)[0]
            every = self.graph.exchange(tf.stack([self.share.begin, count])[None], GATHER, op)
            before = tf.where(every[:, 0] < self.share.begin, every[:, 1], 0)
            self._extents[unit] = tf.reduce_sum(before), count, tf.reduce_sum(every[:, 1])
        return self._extents[unit]

    def rows_of_tower(self, tensor: tf.Tensor, after: Shard, op: tf.Operation) -> tf.Tensor:
        """Take a tower's rows of a tensor that all have, for `op`. One row that is broadcast stays."""
        known = tensor.shape[after.axis]
        first, count, total = self.extent(after.unit, op)
        length, total = tf.shape(tensor)[after.axis], tf.maximum(total, 1)
        each = length // (total * after.blocks)
        begin, size, broadcast = first * each, count * each, None
        if known is None or after.unit:
            broadcast = tf.equal(length, 1)
            if after.unit:  # a batch may have one of them, and a tower none
                broadcast = tf.logical_and(broadcast, total * after.blocks > 1)
            begin, size = tf.where(broadcast, 0, begin), tf.where(broadcast, 1, size)
            # If its rows are not the batch's, ask for more than there are: the slice fails, or the op that takes them.
            said = tf.where(total > 1, after.each, each) if after.each and not after.unit else each
            fits = tf.logical_or(broadcast, tf.equal(length, said * total * after.blocks))
            size = tf.where(fits, size, length + count + 2)
        else:
            what = (
                f"a tensor of that length, at {own_place(op)[0]} (or shapes do not fit there, as labels [rows] beside "
                f"outputs [rows, {known}]),"
            )
            self.lengths.declared.setdefault((known, after.rows or after.blocks), what)
        # A slice takes up to 8 axes; XLA compiles it anew for each first row.
        if after.blocks > 1 or self.graph.traced.trace.jit_compile or tensor.shape.rank > 8:
            blocks = after.blocks if broadcast is None or after.blocks == 1 else tf.where(broadcast, 1, after.blocks)
            starts = tf.range(blocks) * (length // after.blocks) + begin
            places = tf.reshape(starts[:, None] + tf.range(size)[None], [-1])
            return tf.gather(tensor, places, axis=after.axis)
        at = tf.one_hot(after.axis, tensor.shape.rank, dtype=tf.int32)
        rows = tf.slice(tensor, at * begin, at * (size + 1) - 1)
        return tf.ensure_shape(rows, opened(tensor.shape, after.axis))


def _counts_of(tensor: tf.Tensor, placed: Counts) -> np.ndarray:
    """Return how many rows for each sample a tensor's elements count, in its shape; NaN where that is not known."""
    counts = np.array(placed.counts, float)
    return counts.reshape(tensor.shape.as_list()) if tensor.shape.is_fully_defined() else counts


def _swapped(tensor: tf.Tensor, rank: int | tf.Tensor) -> tf.Tensor:
    """Swap the first two axes of a tensor that has one axis more than `rank`."""
    return tf.transpose(tensor, tf.concat([[1, 0], tf.range(2, rank + 1)], 0))
