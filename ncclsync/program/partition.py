"""Partition a traced step: place every tensor, and insert a collective wherever an op needs a tensor placed otherwise.

The trace means the program of one device on the whole batch. `Partition` walks it once, in the order in which
it is computed: each op's rule (`rules.py`, asked by `placing.py`) says how its results are placed. An op
without a rule gets the batch's values: its inputs are gathered or reduced, and every tower computes alike.
It puts ordinary ops into the same graph (a tower's rows of a whole tensor, the batch's count of rows, …);
collectives become `Exchange`s.
"""

import dataclasses
import logging
import types
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, CollectiveKind, Mark, Purpose
from ncclsync.program.conversion import ADD_UP, GATHER, Conversions
from ncclsync.program.graph import StepGraph, TracedGraph, opened, read_only
from ncclsync.program.program import Results
from ncclsync.semantics import rules
from ncclsync.semantics.axes import SORTED_SEGMENTS, Rows
from ncclsync.semantics.functions import BRANCHES, LOOPS
from ncclsync.semantics.placements import (
    LOCAL,
    MEAN,
    REPLICATE,
    SEEDED,
    SUM,
    Counts,
    Local,
    Numbers,
    Partial,
    Placement,
    Places,
    Recomputed,
    Shard,
    has,
)
from ncclsync.semantics.placing import COMPUTED_WHOLE, PRINTS, REPEATABLE, Found, Refused, local_of
from ncclsync.semantics.rules import Call
from ncclsync.semantics.unordered import ADDS_SLICES, UNORDERED, UNORDERED_ON_CPU, added_up
from ncclsync.sharding.roles import Role

logger = logging.getLogger("ncclsync")

# TensorFlow refuses them of a tensor of open shape, as that of gathered rows is where the trace's is not.
_OF_KNOWN_SHAPES = frozenset({"MatrixDiagV2", "MatrixDiagV3"})

_ADDING = frozenset({"ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd", "ResourceScatterNdSub"})


class Fault(Exception):
    """Placing an op fails by a fault of ncclsync's own."""

    def __init__(self, op: tf.Operation, cause: Exception) -> None:
        """Name the op, and what was raised."""
        super().__init__(f"{op.type}, at {user_line(op.traceback)}: {type(cause).__name__}: {cause}")
        self.op, self.cause = op, cause


class Unshared(Found):
    """Variables cannot be held in parts: all towers must hold the same value."""

    def __init__(self, handles: set[TensorName]) -> None:
        """Name the variables' handles."""
        super().__init__(sorted(handles))
        self.handles = handles


class Partition(Conversions):
    """Walk over one traced step.

    Attributes:
        graph: the step with what was put in, once it has run.
        warned: what a user should know of the step on towers, in words.
        normalized: lines that normalise by a tower's rows alone.
    """

    def __init__(
        self,
        traced: TracedGraph,
        results: Results,
        exact: bool = False,
        many_shards: bool = False,
        undivided: bool = False,
        learned: Mapping[TensorName, Any] = types.MappingProxyType({}),
        faulty: Mapping[OpName, str] = types.MappingProxyType({}),
    ) -> None:
        """Take a step.

        Args:
            traced: the step.
            results: how the towers' results become those of the step.
            exact: whether marks `by_choice` change nothing.
            many_shards: see `Target`.
            undivided: whether every tower computes the whole batch: no op's rule is asked.
            learned: see `Conversions`.
            faulty: ops that are not divided, and the fault for which they are not, in words.
        """
        super().__init__(traced, learned)
        self._faulty = faulty
        self.functions.faults += [*traced.trace.faults, *map(COMPUTED_WHOLE.format, faulty.values())]
        self._results, self._exact, self.undivided = results, exact, undivided
        self.differing.update(n for n, one in traced.argument_placements.items() if many_shards and not one.whole)
        self._on_gpus = "GPU" in traced.home_device and not tf_compat.is_op_determinism_enabled()
        self._unordered = UNORDERED if self._on_gpus else UNORDERED_ON_CPU
        # Resources beside variables that the step may change, such as a lookup table. All towers share them. TensorFlow
        # takes a look into a table for a write.
        changing = (op for op in traced.ops if self.functions.hides_state(op, REPEATABLE | rules.DRAWS))
        self._changed = set[TensorName]().union(*map(tf_compat.written_handles, changing)) - traced.role.keys()
        self.warned: list[str] = []
        self.normalized: list[str] = []
        self._exact_marks: set[OpName] = set()  # by choice, that change nothing
        self._local: dict[TensorName, tf.Tensor] = {}
        self._altered: set[TensorName] = set()  # traced tensors computed from tensors that were made whole on the way

    def run(self) -> "Partition":
        """Place the step; return itself.

        Raises:
            Unshared: variables are to be the same on all towers; begin anew with them so.
            Fault: an op cannot be placed.
        """
        for op in self.traced.ops:
            try:
                self._step(op)
            except (Found, NcclSyncError):
                raise
            except Exception as fault:  # of any kind
                raise Fault(op, fault) from fault
        self.warned += self.functions.faults
        with self.building():
            self._settle_results()
        self._fold_metrics()
        parts = read_only(vars(self))
        self.graph = StepGraph(**{field.name: parts[field.name] for field in dataclasses.fields(StepGraph)})
        return self

    # One op.

    def _step(self, op: tf.Operation) -> None:
        names = self.inputs[op.name]
        if op.name in self.traced.placeholders:
            self._argument(op)
            self.append(op)
            return
        given = [self.placed[name] for name in names]
        for tensor, name in zip(op.inputs, names, strict=False):
            if tensor.name != name:  # of merged ops one was placed, and refined
                tensor.set_shape(self.traced.tensor(name).shape)
        call = Call(op, [tensor for tensor, _ in given], [placed for _, placed in given], self)
        if op.name in self.marks:
            with self.building():
                self._mark(op, self.marks[op.name], call)
            return
        if op.name in self.traced.passing:
            for output, tensor, placed, name in zip(op.outputs, call.tensors, call.inputs, names, strict=True):
                output.set_shape(op.inputs[output.value_index].shape)  # which has been refined
                self._put(output, tensor, placed)
                if name in self._altered:
                    self._altered.add(output.name)
            return
        try:
            made = self._made(call)
        except Refused as reason:
            raise NcclSyncError(
                f"Expected a step whose tensors can be brought together. Received: {op.type}, at "
                f"{user_line(op.traceback)}, which {reason}. Move it out of the step, and report this line"
            ) from reason
        self._shape_inputs(call, made)
        with self.building():
            looked = self._look(call)
        altered = any(one is not other for one, other in zip(call.tensors, call.given[0], strict=True))
        rest = altered or any(name in self._altered for name in names)
        indices, slices = ADDS_SLICES.get(op.type, (0, 0))
        adds = self._on_gpus and slices != indices and call.tensors[slices].shape.rank != 0
        if adds and self._computes_alike(call):
            with self.building():
                added = added_up(call.tensors[indices], call.tensors[slices])
            call.tensors[indices], call.tensors[slices] = added
        self.inputs[op.name] = [tensor.name for tensor in call.tensors]
        self.append(op)
        if op.name in self.joins_slices and all(placed.whole for placed in made):
            self.costs.leave_out(op)
        elif not self.undivided:
            self.costs.add(op, call.given[1], (*call.inputs, *made))
        for output, placed in zip(op.outputs, made, strict=True):
            tensor, placed = self.placed.get(output.name, (output, placed))  # all towers may have it from tower 0
            if looked is not None:
                with self.building():
                    tensor = self._own_segments(call, *looked)
            if op.type in SORTED_SEGMENTS and isinstance(placed, Shard):
                with self.building():
                    tensor = self._with_last_rows(tensor, placed, op)
            if op.type == "Mean" and placed == SUM and isinstance(rows := call.inputs[0], Shard) and rows.unit:
                with self.building():
                    tensor = self._weighted(tensor, rows, call)
            again = not self.undivided and (placed.whole or isinstance(placed, Partial))
            after = self._rows_again(op, call.given[1], output) if again else None
            if isinstance(placed, Partial):
                if op.type in rules.ELEMENTWISE:
                    after = next((self.rows_of[name] for name in names if name in self.rows_of), None)
                if after is not None and not after.unit:
                    self.rows_of[output.name] = after
            elif after is not None:
                with self.building():
                    tensor, whole, placed = self.rows_of_tower(tensor, after, op), tensor, after
                self.converted[tensor.name, after, REPLICATE] = whole
            self._put(output, tensor, placed)
            if rest and not isinstance(placed, Shard):
                self._altered.add(output.name)

    def _shape_inputs(self, call: Call, made: list[Placement]) -> None:
        """Let an op's inputs have the shape that it insists on."""
        op = call.op
        if op.type in _OF_KNOWN_SHAPES and op.inputs[0].shape.rank and not isinstance(call.inputs[0], Local):
            placed, shape = call.inputs[0], op.inputs[0].shape
            shape = opened(shape, placed.axis) if isinstance(placed, Shard) else shape
            with self.building():
                call.tensors[0] = tf.ensure_shape(call.tensors[0], shape)
        if op.type == "RaggedTensorToTensor" and isinstance(made[0], Shard):
            lengths = np.ravel(call.constant(0))
            if len(lengths) > 1 and lengths[1] >= 0:
                return
            # Its rows are as long as the batch's longest if that is open.
            with self.building():
                shape, *pieces = call.tensors[0], *call.tensors[3:]
                maximum = Collective(CollectiveKind.ALL_REDUCE, "max")
                if len(pieces) > 1:  # how many rows, and which row each value is in
                    ones = tf.ones_like(pieces[1])
                    every = tf.math.unsorted_segment_sum(ones, pieces[1], tf.cast(pieces[0], pieces[1].dtype))
                else:
                    every = pieces[0][1:] - pieces[0][:-1]
                longest = self.exchange(tf.reduce_max(every), maximum, op)
                shape = tf.broadcast_to(shape, [op.outputs[0].shape.rank])  # all lengths are open if it is a scalar
                second = tf.logical_and(shape < 0, tf.equal(tf.range(tf.size(shape)), 1))
                call.tensors[0] = tf.where(second, tf.cast(longest, shape.dtype), shape)

    def _look(self, call: Call) -> tuple[tf.Tensor, int] | None:
        """Look whether numbers that are not known to stay among a tower's rows do so; let the op take all rows if not.

        Returns:
            Whether they do, and how many there are for each sample, for an op whose result has these rows; else None.
        """
        op, at = call.op, call.loose
        placed = None if at is None else call.inputs[at]
        if at is None or not isinstance(placed, Numbers) or placed.count is None:
            return None
        numbers = call.tensors[at]
        first, own = (tf.cast(one * placed.count, numbers.dtype) for one in (self.share.begin, self.share.rows))
        if op.type in ("GreaterEqual", "Maximum"):
            call.tensors[1] -= first  # as the tower numbers
            return None
        of_rows = numbers if isinstance(placed, Places) else numbers[..., 0]
        stay = tf.reduce_all(tf.logical_and(of_rows >= 0, of_rows < own))
        every = self.exchange(tf.cast(stay, tf.int32), Collective(CollectiveKind.ALL_REDUCE, "min"), op)
        stays, none = tf.equal(every, 1), tf.zeros_like(first)
        at_first = 1 if isinstance(placed, Places) else tf.one_hot(0, tf.shape(numbers)[-1], dtype=numbers.dtype)
        call.tensors[at] = numbers + tf.where(stays, none, first) * at_first
        counts = rules.shape_input(op)
        if counts is None:
            table = call.tensors[0]
            others = self.exchange(table[: tf.where(stays, none, own)], GATHER, op)
            call.tensors[0] = tf.concat([table[: tf.where(stays, own, none)], others], 0)
            return None
        total = self.convert(call.tensors[counts], call.inputs[counts], REPLICATE, op)
        call.tensors[counts] = tf.where(stays, call.tensors[counts], total)
        return stays, placed.count

    def _with_last_rows(self, made: tf.Tensor, placed: Shard, op: tf.Operation) -> tf.Tensor:
        """Return sums over segments with what TensorFlow gives of an empty one, for a tower's last rows."""
        own, shape = self.share.rows * placed.each, tf.shape(made)
        rest = tf.concat([tf.maximum(own - shape[:1], 0), shape[1:]], 0)
        return tf.concat([made, tf.fill(rest, tf.cast(op.type == "SegmentProd", made.dtype))], 0)[:own]

    def _weighted(self, mean: tf.Tensor, rows: Shard, call: Call) -> tf.Tensor:
        """Return a tower's part of a mean of rows of which it has any number, or none."""
        own, total = tf.shape(call.tensors[0])[rows.axis], self.extent(call.unit, call.op)[2]
        part = tf.cast(own, mean.dtype) / tf.cast(total, mean.dtype)  # not a number if all have none, as on one device
        return tf.where(own > 0, mean, tf.zeros_like(mean)) * part

    def _own_segments(self, call: Call, stays: tf.Tensor, per_row: int) -> tf.Tensor:
        """Return a tower's rows of what `_look` has let an op add up for them, or, unless they stay, for all rows."""
        (made,) = call.op.outputs
        first, own, every = (one * per_row for one in (self.share.begin, self.share.rows, self.share.total))
        reduced = rules.SEGMENTS.get(call.op.type, SUM)
        sent = made[: tf.where(stays, 0, every)]
        whole = self.exchange(sent, Collective(CollectiveKind.ALL_REDUCE, reduced.op), call.op)
        return tf.concat([made[: tf.where(stays, own, 0)], whole[first : first + tf.where(stays, 0, own)]], 0)

    def _rows_again(self, op: tf.Operation, given: list[Placement], output: tf.Tensor) -> Shard | None:
        """Return the placement by rows of a result that all towers have; None: it is not known to have rows."""
        rank = output.shape.rank
        if rules.SAME_SHAPE & {op.type, f"{op.type}:{output.value_index}"} and isinstance(given[0], Shard):
            return rules.counted(given[0])
        if output.dtype in (tf.resource, tf.variant) or not rank:
            return None
        at = rules.shape_input(op) if op.type in rules.BACK_TO_ROWS else None
        shape = None if at is None else given[at]
        if isinstance(shape, Counts):
            axis = [one != 0 for one in shape.counts].index(True)  # of [rows, rows], of all pairs, the first
            along = rank - 1 if op.type == "TopKV2" else axis
            return Shard(along, 1, shape.counts[axis], unit=shape.unit)
        if all(one.whole for one in given) and output.name not in self.learned:
            return None
        lengths = self.axes.lengths(output)
        found = [(axis, one.each) for axis, one in enumerate(lengths or ()) if isinstance(one, Rows) and one.each]
        for axis, each in found[:1]:
            rowed = (one for one in given if isinstance(one, Shard))
            like = (one for one in rowed if one == Shard(axis, one.blocks) and one.rows == each)
            return next(like, Shard(axis, 1, each))
        return None

    def _made(self, call: Call) -> list[Placement]:
        op = call.op
        if self.writes[op.name] and not self.functions.runs(op):
            made = self._write(call)
            return [call.inputs[0]] if op.type == "RngReadAndSkip" else made  # a part of the state, placed alike
        if op.type in ("ReadVariableOp", "VariableShape", "VarIsInitializedOp"):
            return [call.inputs[0] if op.type == "ReadVariableOp" else REPLICATE]
        if op.type == "Assert":
            self._assert(call)
            return []
        # TensorFlow does not list a generator's variable that only such a draw takes: all towers share that one.
        inputs = zip(self.inputs[op.name], op.inputs, strict=True)
        unheld = {name for name, tensor in inputs if tensor.dtype == tf.resource} - self.traced.role.keys()
        draws_alike = op.type in rules.DRAWS and unheld
        if draws_alike or op.type in PRINTS or self.functions.hides_state(op, REPEATABLE | rules.DRAWS):
            return self._hidden(call)
        finds = op.type.startswith("LookupTable") or self.functions.runs(op)
        if finds and not self._changed.isdisjoint(self.inputs[op.name]):
            return self.alike(call)  # another tower would not know whether tower 0 has changed it yet
        unseen = op.type not in rules.SEEDED_DRAWS and self.functions.hides_state(op, REPEATABLE)
        if unseen and all(placed.whole for placed in call.inputs):
            return self.alike(call)
        whole = self.undivided or op.name in self._faulty
        made = self._undivided_at(call) if whole else self.place(call)
        adds = self._on_gpus and self.functions.runs(op)
        unordered = self._unordered.union(ADDS_SLICES if adds else ())
        if self._computes_alike(call) and not unordered.isdisjoint(self.functions.op_types(op)):
            return self.alike(call)
        return made

    def _computes_alike(self, call: Call) -> bool:
        """Return whether towers compute an op's floats alike: then kernels must not add them up in no order."""
        floats = any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in call.tensors)
        return floats and all(placed.whole for placed in call.inputs)

    def _argument(self, op: tf.Operation) -> None:
        traced, output = self.traced, op.outputs[0]
        placed = traced.argument_placements.get(output.name)
        if placed is None:
            role = traced.role.get(output.name, Role.SAME)
            placed = {Role.SAME: REPLICATE, Role.SUM: SUM, Role.SEED: SEEDED}.get(role, LOCAL)
        self._put(output, output, placed)
        known = isinstance(placed, Shard) and output.shape[0] is not None and not placed.unit
        given = output.name in traced.argument_placements and not isinstance(placed, Local)
        # An argument that is traced with its number of rows: all towers take the whole batch.
        if known or (self.undivided and given):
            self.costs.have_rows(op)
            self.append(op)
            self._put(output, self.convert(output, placed, REPLICATE, op), REPLICATE)

    def _put(self, output: tf.Tensor, tensor: tf.Tensor, placed: Placement) -> None:
        self.placed[output.name] = tensor, placed
        if isinstance(placed, Shard) and tensor.shape.rank and tensor.shape[placed.axis] is not None:
            self.open_axes[tensor.name] = placed.axis  # the traced length is the batch's
        if isinstance(placed, Shard) and not placed.unit:
            self.by_rows[tensor.name] = placed
        if not placed.whole:
            self.differing.add(tensor.name)

    def variables_of_rows(self) -> tuple[tuple[tf.Variable, int], ...]:
        """Return variables whose number of rows the trace has taken for the batch's; and how many for each sample."""
        return tuple(
            (one, self.fixed[one.shape[0]])
            for one in self.traced.variable_of.values()
            if one.shape.rank and one.shape[0] in self.fixed and not (one.trainable or self.traced.opened)
        )

    # Ops that are made whole.

    def _undivided_at(self, call: Call) -> list[Placement]:
        """Place an op of which every tower computes all: without its rule, and without its lengths."""
        if all(placed.whole for placed in call.inputs):
            return [REPLICATE] * len(call.op.outputs)
        if not has(call.inputs, Local):
            return self.whole(call)
        if call.op.type in rules.DRAWS or self.functions.runs(call.op):
            return self.alike(call)
        call.make_whole(Placement, but=Local)
        return [local_of(call.given[1])] * len(call.op.outputs)

    def whole(self, call: Call) -> list[Placement]:
        """Let every tower compute the same; see `Placer`."""
        handles = {
            self.inputs[call.op.name][i]
            for i, tensor in enumerate(call.tensors)
            if tensor.dtype == tf.resource and not call.inputs[i].whole
        }
        if handles:
            raise Unshared(handles)
        rows = call.inputs[0]
        if isinstance(rows, Shard) and (first := rules.rows_of_first(call, rows)) and not call.spares(0):
            with self.building():
                call.tensors[0] = self.first_rows(call.tensors[0], rows, first, call.op)
            call.inputs[0] = REPLICATE
        call.make_whole(Placement)
        logger.debug("%s %s is made whole: %s", call.op.type, call.op.name, ", ".join(map(str, call.given[1])))
        if call.op.type not in rules.DRAWS and self.functions.hides_state(call.op, REPEATABLE):
            return self._follow(call)
        return [REPLICATE] * len(call.op.outputs)

    def alike(self, call: Call) -> list[Placement]:
        """Give all towers the results of tower 0; see `Placer`."""
        call.make_whole(Placement, but=Local)
        return self._follow(call)

    def _follow(self, call: Call) -> list[Placement]:
        """Give all towers what tower 0 computes: `call.op` is appended, and its results are placed."""
        op = call.op
        self.inputs[op.name] = [tensor.name for tensor in call.tensors]
        self.append(op)
        self.differing.update(output.name for output in op.outputs)
        with self.building():
            for output in op.outputs:
                sent = output.dtype not in (tf.resource, tf.variant)
                self._put(output, self.followed(output, op) if sent else output, REPLICATE)
        if op.type not in rules.DRAWS:
            self._follow_writes(op)
        return [REPLICATE] * len(op.outputs)

    def _follow_writes(self, op: tf.Operation) -> None:
        """Give all towers what an op, or a dataset that it iterates, has written to tower 0's variables."""
        sources = [op]
        for one in sources:
            sources += [t.op for t in one.inputs if t.dtype == tf.variant and t.op not in sources]
        handles = sorted({handle for one in sources for handle in self.writes.get(one.name, ())})
        is_dataset = any(output.dtype == tf.variant for output in op.outputs) and not self.functions.runs(op)
        if not handles or is_dataset:  # which writes when it is iterated
            return
        with self.building():
            reads = [self._read(handle) for handle in handles]
            self.differing.update(read.name for read in reads)
            writes = [self._assigned(one, self.followed(read, op)) for one, read in zip(handles, reads, strict=True)]
            done = tf.group(*writes)
        for write, handle in zip(writes, handles, strict=True):
            self.writes[write.name] = {handle}
        self.must_run.add(done.name)
        names = {one.name for one in sources}
        for one in sources:
            self._stands_for(one.name, done.name, but_not_to=names)
        for read in reads:
            self.controls[read.op.name] = [op.name]

    def _stands_for(self, op: OpName, other: OpName, but_not_to: Collection[OpName] = ()) -> None:
        """Redirect control dependencies from an op to its replacement, except those of `but_not_to`."""
        for name, controls in self.controls.items():
            if op in controls and name not in but_not_to:
                self.controls[name] = [other if control == op else control for control in controls]

    def _read(self, handle: TensorName) -> tf.Tensor:
        dtype = self.traced.variable_of[handle].dtype
        return tf.raw_ops.ReadVariableOp(resource=self.traced.tensor(handle), dtype=dtype)

    def _assigned(self, handle: TensorName, value: tf.Tensor) -> tf.Operation:
        return tf.raw_ops.AssignVariableOp(resource=self.traced.tensor(handle), value=value)

    def _hidden(self, call: Call) -> list[Placement]:
        """Run an op that changes something outside the step, on tower 0 alone: Python, an iterator, a summary, a print.

        The other towers receive its results, of any shape. A loop or a branch with such an op runs on tower 0 alone if
        it writes no variable.
        """
        op, traced = call.op, self.traced
        for i, name in enumerate(self.inputs[op.name]):
            try:
                call.require(i, REPLICATE)
            except Refused:
                raise Unshared({name}) from None
        unheld = {tensor.name for tensor in call.tensors if tensor.dtype == tf.resource} - traced.variable_of.keys()
        if unheld and traced.trace.jit_compile:  # in a branch, XLA would not say which of such ops it does not compile
            return self._follow(call)
        outputs = [output for output in op.outputs if output.dtype not in (tf.resource, tf.variant)]
        others = [output for output in op.outputs if output.dtype in (tf.resource, tf.variant)]
        lazy = any(tensor.dtype == tf.variant for tensor in call.tensors)  # a dataset, which it iterates
        # A loop gives back the handles that it has been given.
        if (others and op.type not in LOOPS) or self.writes[op.name] or lazy:
            # It writes variables, or may, and every tower must write its own: all run it, and so its effects happen N
            # times.
            self.warned.append(
                f"{op.type}, at {user_line(op.traceback)}, does something that no variable holds (it runs "
                "Python, or prints, or draws without a seed): every tower does it, with the batch's values, "
                "and tower 0's results, and what it writes to variables, are taken"
            )
            return self._follow(call)

        def run():
            made = tf_compat.copied_op(op, [tf.identity(tensor) for tensor in call.tensors])
            given = [made.outputs[output.value_index] for output in outputs]
            with tf.control_dependencies([made]):
                done = tf.constant(0)
            return [done, *(part for one in given for part in (tf.reshape(one, [-1]), tf.shape(one)))]

        def receive():
            nothing = (part for one in outputs for part in (tf.zeros([0], one.dtype), tf.zeros([0], tf.int32)))
            return [tf.constant(0), *nothing]

        before = len(self.ops)
        with self.building():
            done, *sent = tf.cond(tf.equal(self.share.tower, 0), run, receive)
            # By a result: TensorFlow prunes an op of a branch that no result needs.
            done = tf.identity(done)
        for made in self.ops[before:]:
            if made.type in BRANCHES:
                self.stood_for[made.name] = op
                self.controls[made.name] = [*self.controls[made.name], *self.controls[op.name]]
        self.must_run.add(done.op.name)
        self._stands_for(op.name, done.op.name)
        self.by_name[op.name] = op  # it is run there
        for output in others:
            self._put(output, call.tensors[output.value_index], REPLICATE)
        with self.building():
            for output, flat, shape in zip(outputs, sent[::2], sent[1::2], strict=True):
                self._put(output, self.received_whole(flat, shape, output, op), REPLICATE)
        return [REPLICATE] * len(op.outputs)

    def _assert(self, call: Call) -> None:
        """Let each tower run an assertion about its own rows."""
        placed = call.inputs[0]
        if isinstance(placed, Partial) and placed != rules.EVERY:
            call.require(0, REPLICATE)
        call.make_whole(Recomputed)

    def _write(self, call: Call) -> list[Placement]:
        op = call.op
        handles = {handle: self.traced.role[handle] for handle in self.writes[op.name]}
        roles = set(handles.values())
        plain = op.type.startswith("Assign")
        if roles <= {Role.PARTIAL, Role.PARTITION, Role.SEED}:
            call.make_whole((Recomputed, Shard, Counts))
        elif roles == {Role.SUM} and plain:
            call.require(1, SUM)
        elif roles == {Role.SUM} and op.type in _ADDING:
            indices, updates = call.inputs[1:3]
            by_rows = isinstance(indices, Shard) and isinstance(updates, Shard) and rules.same_rows(indices, updates)
            if not by_rows or any(isinstance(one, Shard) and one.axis for one in (indices, updates)):
                call.require(1, REPLICATE)
                call.require(2, SUM)
        elif roles == {Role.SAME}:
            for i, tensor in enumerate(call.tensors):
                if tensor.dtype != tf.resource:
                    call.require(i, REPLICATE)
        else:
            raise Unshared({handle for handle, role in handles.items() if role is not Role.SAME})
        return [REPLICATE] * len(op.outputs)

    # Marks and results, whose ops `building` takes over.

    def _mark(self, op: tf.Operation, mark: Mark, call: Call) -> None:
        names, when = self.inputs[op.name], None
        found: list[tuple[tf.Tensor, Placement]]
        if mark.purpose == Purpose.SLICES:
            self.costs.leave_out(op)
            found = [(tensor, REPLICATE) for tensor in self._slices(op, mark, call)]
        elif mark.purpose == Purpose.SLICES_PART:
            found = [(tensor, LOCAL) for tensor in self._slices_part(op, call)]
        elif mark.by_choice and self._is_exact_at(mark, call.inputs[-1]):
            self._exact_marks.add(op.name)
            found = list(zip(call.tensors, call.inputs, strict=True))
        else:
            count = len(op.outputs) - mark.conditional
            if mark.conditional:
                when = self.convert(call.tensors[-1], call.inputs[-1], REPLICATE, op).name
            if mark.purpose == Purpose.LOCAL:
                self._take_rows(call, mark)
            given = list(zip(names, call.tensors, call.inputs, strict=True))[:count]
            found = [self._meet(op, mark, *one, when) for one in given]
        # From here on its placement no longer depends on how it was computed.
        for output, (tensor, placed) in zip(op.outputs, found, strict=False):
            self._put(output, tensor, placed)

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

    def _meet(
        self,
        op: tf.Operation,
        mark: Mark,
        name: TensorName,
        tensor: tf.Tensor,
        placed: Placement,
        when: TensorName | None,
    ) -> tuple[tf.Tensor, Placement]:
        if mark.purpose == Purpose.WHOLE:
            return self.convert(tensor, placed, REPLICATE, op), REPLICATE
        if mark.purpose == Purpose.LOCAL:
            return tensor, LOCAL
        if mark.purpose == Purpose.PARTS:
            return self.convert(tensor, placed, SUM, op), LOCAL
        if mark.purpose == Purpose.ADDENDS:
            if isinstance(placed, (Shard, Local)) or placed == SUM:
                return tensor, LOCAL
            tensor = self.convert(tensor, placed, MEAN if isinstance(placed, Partial) else REPLICATE, op)
            return tensor * tf.cast(self.share.fraction, tensor.dtype), LOCAL
        if mark.purpose == Purpose.ROWS:
            _, taken = self.placed[self.traced.inputs[mark.of][0]]
            return tensor, taken if isinstance(taken, Shard) else SUM
        if mark.purpose == Purpose.OWN_ROW:
            whole = self.convert(tensor, placed, REPLICATE, op)
            at = tf.minimum(self.share.tower, tf.shape(whole)[0] - 1)
            return whole[at : at + 1], LOCAL
        collective = mark.collective
        reduces, how = collective.kind == CollectiveKind.ALL_REDUCE, collective.op
        if collective.kind == CollectiveKind.ALL_GATHER and isinstance(placed, Shard):
            return self.convert(tensor, placed, REPLICATE, op), REPLICATE
        if isinstance(placed, Partial) and reduces and how in ("mean", placed.op):
            return self.convert(tensor, placed, REPLICATE, op), REPLICATE  # the reduction of its parts
        local = self._local_value(name)
        settled = collective.kind == CollectiveKind.BROADCAST or (reduces and how in ("mean", "max", "min"))
        if settled and placed.whole and local is tensor:
            return tensor, REPLICATE
        result = self.exchange(local, collective, op, when)
        return result, LOCAL if collective.differs else REPLICATE

    def _local_value(self, name: TensorName) -> tf.Tensor:
        """Return what a tower computes of its shard alone: the input of a collective that the step calls."""
        tensor, placed = self.placed[name]
        if isinstance(placed, Shard) or name not in self._altered:
            return tensor
        if name in self._local:
            return self._local[name]
        op = self.traced.tensor(name).op
        if not op.inputs or op.name in self.traced.passing or tf_compat.is_stateful(op):
            return tensor
        made = tf_compat.copied_op(op, [self._local_value(one) for one in self.traced.inputs[op.name]])
        for output, one in zip(op.outputs, made.outputs, strict=True):
            self._local[output.name] = one
            self.differing.add(one.name)
        return self._local[name]

    def _slices_part(self, op: tf.Operation, call: Call) -> list[tf.Tensor]:
        """Return a tower's part of a sparse gradient: the slices of its rows, or its parts of all slices."""
        (values, indices), (of_values, of_indices) = call.tensors, call.inputs
        if isinstance(of_values, Shard) and isinstance(of_indices, Shard) and rules.same_rows(of_values, of_indices):
            return [values, indices]
        return [self.convert(values, of_values, SUM, op), self.convert(indices, of_indices, REPLICATE, op)]

    def _slices(self, op: tf.Operation, mark: Mark, call: Call) -> list[tf.Tensor]:
        """Return the slices that one device would have, or their dense sum if that moves fewer bytes."""
        values, indices = call.inputs
        by_rows = isinstance(values, Shard) and isinstance(indices, Shard)
        if not by_rows or not mark.height or not call.tensors[0].shape[1:].is_fully_defined():
            return [self.convert(t, placed, REPLICATE, op) for t, placed in zip(call.tensors, call.inputs, strict=True)]
        slices, places = call.tensors
        width = slices.shape[1:].num_elements() * slices.dtype.size  # bytes of a row
        count, height = tf.shape(slices)[0], mark.height
        total = self.exchange(tf.cast(count, tf.int64), ADD_UP, op)
        # By a gather a tower receives what all others have: (N - 1) / N of all slices, values and indices. An
        # all-reduce moves 2 (N - 1) / N of the dense tensor. One of the two exchanges is then of nothing.
        dense = 2 * height * width < total * (width + places.dtype.size)
        kept = tf.where(dense, 0, count)
        rest = tf.where(dense, height, 0)
        few, where = (self.exchange(one[:kept], GATHER, op) for one in (slices, places))
        summed = self.exchange(tf.math.unsorted_segment_sum(slices[kept:], places[kept:], rest), ADD_UP, op)
        every = tf.cast(tf.range(rest), places.dtype)
        return [tf.concat([few, summed], 0), tf.concat([where, every], 0)]

    def _settle_results(self) -> None:
        for result in self.traced.results:
            tensor, placed = self.placed[result.name]
            if self._results is Results.EACH:
                tensor = self._local_value(result.name)
            elif placed != Shard():
                tensor = self.convert(tensor, placed, REPLICATE, result.op)
            joins = self._results is Results.COMBINED and placed == Shard()
            self.outputs.append((tensor.name, joins))

    def _fold_metrics(self) -> None:
        """Add up metric state at the end of a step: the first tower of a process keeps the sum, the others zero."""
        users: dict[TensorName, list[tf.Operation]] = {n: [] for n, r in self.traced.role.items() if r is Role.SUM}
        for op in self.ops:
            for name in users.keys() & set(self.inputs[op.name]):
                users[name].append(op)
        for name, ops in users.items():
            writers = [op for op in ops if name in self.writes[op.name]]
            if not writers:
                continue
            last = writers[-1]
            # A read of the step's own after the last write, which is added up, serves as well.
            reads = (op for op in ops if op.name in self.reduced_reads and last.name in self.controls[op.name])
            read = next(reads, None)
            if read is None:
                with self.building():
                    read = self._read(name).op
                self.controls[read.name] = [op.name for op in writers]
            total = self.exchange(read.outputs[0], ADD_UP, last)
            before = len(self.ops)
            with self.building():
                kept = tf.where(self.traced.trace.site.is_first, total, tf.zeros_like(total))
                write = self._assigned(name, kept)
            self.folds.update(op.name for op in self.ops[before:])
            self.writes[write.name] = {name}
            self.controls[write.name] = [op.name for op in (*ops, read)]
            self.must_run.add(write.name)
