"""Meet the marks that a step has where it calls a collective: convert their tensors, or exchange them."""

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName
from ncclsync.ops import CollectiveKind, Mark, Purpose
from ncclsync.program.builder import ADD_UP, GATHER
from ncclsync.program.conversion import Conversions
from ncclsync.semantics import rules
from ncclsync.semantics.placements import LOCAL, MEAN, REPLICATE, SUM, Local, Partial, Placement, Shard
from ncclsync.semantics.rules import Call


class Marks:
    """Meet a step's marks; know what a tower computes of its shard alone, which some of them take.

    Attributes:
        altered: traced tensors computed from tensors that were made whole on the way.
        normalized: lines that normalise by a tower's rows alone.
    """

    def __init__(self, conversions: Conversions, exact: bool) -> None:
        """Meet none yet; `exact`: whether marks `by_choice` change nothing."""
        self._conversions, self._graph, self._exact = conversions, conversions.graph, exact
        self._exact_marks: set[OpName] = set()  # by choice, that change nothing
        self._local: dict[TensorName, tf.Tensor] = {}
        self.altered: set[TensorName] = set()
        self.normalized: list[str] = []

    def meet(self, call: Call) -> None:
        """Meet a mark, and put what stands for its results, within `building`."""
        op, mark, when = call.op, self._graph.traced.trace.marks[call.op.name], None
        found: list[tuple[tf.Tensor, Placement]]
        if mark.purpose == Purpose.SLICES:
            self._conversions.costs.leave_out(op)
            found = [(tensor, REPLICATE) for tensor in self._slices(op, mark, call)]
        elif mark.purpose == Purpose.SLICES_PART:
            found = [(tensor, LOCAL) for tensor in self._slices_part(op, call)]
        elif mark.by_choice and self._is_exact_at(mark, call.inputs[-1]):
            self._exact_marks.add(op.name)
            found = list(zip(call.tensors, call.inputs, strict=True))
        else:
            count = len(op.outputs) - mark.conditional
            if mark.conditional:
                when = self._conversions.convert(call.tensors[-1], call.inputs[-1], REPLICATE, op).name
            if mark.purpose == Purpose.LOCAL:
                self._take_rows(call, mark)
            found = [self._result(call, i, when) for i in range(count)]
        # From here on its placement no longer depends on how it was computed.
        for output, (tensor, placed) in zip(op.outputs, found, strict=False):
            self._conversions.put(output, tensor, placed)

    def _is_exact_at(self, mark: Mark, placed: Placement) -> bool:
        """Return whether a mark by choice changes nothing: of a whole tensor every tower computes the batch's value."""
        if mark.of:
            return mark.of in self._exact_marks
        return self._exact or not isinstance(placed, (Shard, Local))

    def _take_rows(self, call: Call, mark: Mark) -> None:
        """Give a mark's tensors the rows that the last one has; whole ones if that has none."""
        last = call.inputs[-1]
        if isinstance(last, Shard) and mark.by_choice and not mark.of:
            self.normalized.append(mark.line)
        for i in range(len(call.inputs) if not isinstance(last, Local) else 0):
            call.require(i, last if isinstance(last, Shard) else REPLICATE)

    def _result(self, call: Call, i: int, when: TensorName | None) -> tuple[tf.Tensor, Placement]:
        """Return what stands for a mark's result, and how it is placed."""
        op, mark = call.op, self._graph.traced.trace.marks[call.op.name]
        tensor, placed = call.tensors[i], call.inputs[i]
        match mark.purpose:
            case Purpose.WHOLE:
                return self._conversions.convert(tensor, placed, REPLICATE, op), REPLICATE
            case Purpose.LOCAL:
                return tensor, LOCAL
            case Purpose.PARTS:
                return self._conversions.convert(tensor, placed, SUM, op), LOCAL
            case Purpose.ADDENDS:
                if isinstance(placed, (Shard, Local)) or placed == SUM:
                    return tensor, LOCAL
                tensor = self._conversions.convert(
                    tensor, placed, MEAN if isinstance(placed, Partial) else REPLICATE, op
                )
                return tensor * tf.cast(self._conversions.share.fraction, tensor.dtype), LOCAL
            case Purpose.ROWS:
                _, taken = self._conversions.placed[self._graph.traced.inputs[mark.of][0]]
                return tensor, taken if isinstance(taken, Shard) else SUM
            case Purpose.OWN_ROW:
                whole = self._conversions.convert(tensor, placed, REPLICATE, op)
                first = tf.minimum(self._conversions.share.tower, tf.shape(whole)[0] - 1)
                return whole[first : first + 1], LOCAL
        collective = mark.collective
        reduces, how = collective.kind == CollectiveKind.ALL_REDUCE, collective.op
        if collective.kind == CollectiveKind.ALL_GATHER and isinstance(placed, Shard):
            return self._conversions.convert(tensor, placed, REPLICATE, op), REPLICATE
        if isinstance(placed, Partial) and reduces and how in ("mean", placed.op):
            return self._conversions.convert(tensor, placed, REPLICATE, op), REPLICATE  # the reduction of its parts
        local = self.local_value(self._graph.inputs[op.name][i])
        settled = collective.kind == CollectiveKind.BROADCAST or (reduces and how in ("mean", "max", "min"))
        if settled and placed.whole and local is tensor:
            return tensor, REPLICATE
        result = self._graph.exchange(local, collective, op, when)
        return result, LOCAL if collective.differs else REPLICATE

    def local_value(self, name: TensorName) -> tf.Tensor:
        """Return what a tower computes of its shard alone: the input of a collective that the step calls."""
        tensor, placed = self._conversions.placed[name]
        if isinstance(placed, Shard) or name not in self.altered:
            return tensor
        if name in self._local:
            return self._local[name]
        op = self._graph.traced.tensor(name).op
        if not op.inputs or op.name in self._graph.traced.passing or tf_compat.is_stateful(op):
            return tensor
        made = tf_compat.copied_op(op, [self.local_value(one) for one in self._graph.traced.inputs[op.name]])
        self._local.update((output.name, one) for output, one in zip(op.outputs, made.outputs, strict=True))
        self._graph.differ(made.outputs)
        return self._local[name]

    def _slices_part(self, op: tf.Operation, call: Call) -> list[tf.Tensor]:
        """Return a tower's part of a sparse gradient: the slices of its rows, or its parts of all slices."""
        (values, indices), (of_values, of_indices) = call.tensors, call.inputs
        if isinstance(of_values, Shard) and isinstance(of_indices, Shard) and rules.same_rows(of_values, of_indices):
            return [values, indices]
        return [
            self._conversions.convert(values, of_values, SUM, op),
            self._conversions.convert(indices, of_indices, REPLICATE, op),
        ]

    def _slices(self, op: tf.Operation, mark: Mark, call: Call) -> list[tf.Tensor]:
        """Return the slices that one device would have, or their dense sum if that moves fewer bytes."""
        values, indices = call.inputs
        by_rows = isinstance(values, Shard) and isinstance(indices, Shard)
        if not by_rows or not mark.height or not call.tensors[0].shape[1:].is_fully_defined():
            return [
                self._conversions.convert(t, placed, REPLICATE, op)
                for t, placed in zip(call.tensors, call.inputs, strict=True)
            ]
        slices, places = call.tensors
        width = slices.shape[1:].num_elements() * slices.dtype.size  # bytes of a row
        count, height = tf.shape(slices)[0], mark.height
        total = self._graph.exchange(tf.cast(count, tf.int64), ADD_UP, op)
        # By a gather a tower receives what all others have: (N - 1) / N of all slices, values and indices. An
        # all-reduce moves 2 (N - 1) / N of the dense tensor. One of the two exchanges is then of nothing.
        dense = 2 * height * width < total * (width + places.dtype.size)
        kept = tf.where(dense, 0, count)
        rest = tf.where(dense, height, 0)
        few, where = (self._graph.exchange(one[:kept], GATHER, op) for one in (slices, places))
        summed = self._graph.exchange(tf.math.unsorted_segment_sum(slices[kept:], places[kept:], rest), ADD_UP, op)
        every = tf.cast(tf.range(rest), places.dtype)
        return [tf.concat([few, summed], 0), tf.concat([where, every], 0)]
