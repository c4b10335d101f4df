"""Partition a traced step: place every tensor, and insert a collective wherever an op needs a tensor placed otherwise.

The trace means the program of one device on the whole batch. `Partition` walks it once, in the order in which
it is computed: each op's rule (`rules.py`, asked by `placing.py`) says how its results are placed. An op
without a rule gets the batch's values: its inputs are gathered or reduced, and every tower computes alike.
It puts ordinary ops into the same graph (a tower's rows of a whole tensor, the batch's count of rows, …);
collectives become `Exchange`s.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, CollectiveKind, Purpose
from ncclsync.program.cost import Costs
from ncclsync.program.graph import StepGraph, op_name
from ncclsync.program.program import Exchange, Results
from ncclsync.program.roofline import Size, product
from ncclsync.program.trace import Mark
from ncclsync.semantics import rules, uneven
from ncclsync.semantics.axes import BATCHES, Axes, Items, Rows, given_rows
from ncclsync.semantics.functions import BRANCHES, LOOPS, Functions
from ncclsync.semantics.placements import LOCAL, MEAN, PIECE, REPLICATE, SEEDED, SUM, Kind, Placement
from ncclsync.semantics.placing import PRINTS, REPEATABLE, Placer, Refused, is_zero, serves
from ncclsync.semantics.roles import Role
from ncclsync.semantics.rules import Call
from ncclsync.semantics.unordered import ADDS_SLICES, UNORDERED, added_up

logger = logging.getLogger("ncclsync")

# TensorFlow refuses them of a tensor of open shape, as that of gathered rows is where the trace's is not.
_OF_KNOWN_SHAPES = frozenset({"MatrixDiagV2", "MatrixDiagV3"})
GATHER, FOLLOW = Collective(CollectiveKind.ALL_GATHER), Collective(CollectiveKind.BROADCAST)
ADD_UP = Collective(CollectiveKind.ALL_REDUCE, "sum")

# Placed as what cannot be exchanged: computed again, of whole inputs.
_RECOMPUTED = frozenset({Kind.AXES, Kind.PENDING, Kind.PIECE, Kind.PLACES, Kind.INDICES})

_ADDING = frozenset({"ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd", "ResourceScatterNdSub"})


class Unshared(Exception):
    """Variables cannot be held in parts: all towers must hold the same value."""

    def __init__(self, handles: set[str]) -> None:
        """Name the variables' handles."""
        super().__init__(sorted(handles))
        self.handles = handles


class Partition(Placer):
    """Walk over one traced step; afterwards the graph holds its exchanges, and its ops in their order."""

    def __init__(self, graph: StepGraph, results: Results, exact: bool = False) -> None:
        """Prepare.

        Args:
            graph: the step; is changed.
            results: how the towers' results are combined.
            exact: whether what a choice makes local is to be the batch's.
        """
        functions = Functions(graph.functions, graph.tf_graph)
        rowed = [name for name, placed in graph.argument_placements.items() if placed == rules.shard()]
        known = {name: given_rows(graph.tf_graph.get_tensor_by_name(name)) for name in rowed}
        known |= {
            handle: Items(tuple((each * batch.rows, *variable.shape[1:]) for batch in BATCHES))
            for handle, variable, each in graph.opened
        }
        known |= {name: tuple((batch.rows + 1,) for batch in BATCHES) for name in graph.row_splits}
        super().__init__(functions, Axes(functions, known))
        graph.constant, graph.lengths = self.axes.constant, self.axes.lengths
        self.row_splits = graph.row_splits
        self._extents: dict[str, tuple[tf.Tensor, tf.Tensor, tf.Tensor]] = {}
        self.graph = graph
        self.share, self._site = graph.share, graph.site
        self._on_gpus = "GPU" in graph.home_device and not tf_compat.is_op_determinism_enabled()
        self._results = results
        self._exact = exact
        self.placed: dict[str, tuple[tf.Tensor, Placement]] = {}  # by the traced tensor's name
        self.warned: list[str] = []
        self.normalized: list[str] = []
        self._converted: dict[tuple[str, Placement, Placement], tf.Tensor] = {}
        self._rows_of: dict[str, Placement] = {}  # of PARTIAL tensors that have as many rows as the batch, once whole
        self._local: dict[str, tf.Tensor] = {}
        self._altered: set[str] = set()  # traced tensors that rest on what was made whole on the way
        self._exchanged: dict[tuple[str, Collective, str | None], tf.Tensor] = {}
        # Lengths that are fixed, of so many rows for each sample.
        self.declared = {(int(variable.shape[0]), each) for _, variable, each in graph.opened}
        self._order: list[tf.Operation] = []
        self._appended: set[str] = set()
        self._differs = graph.differing
        self._sums: set[str] = set()  # reads of metric state that were reduced
        self._seen = len(graph.tf_graph.get_operations())
        self._line_of: dict[str, str] = {}
        self.costs = Costs(self.functions, self.axes)
        marked = [name for name, mark in graph.marks.items() if mark.purpose == Purpose.SLICES and name in graph.inputs]
        # They put the slices of a weight that is used several times one after the other, to be gathered.
        self._joins_slices = {op_name(tensor) for name in marked for tensor in graph.inputs[name]} & {
            op.name for op in graph.ops if op.type == "ConcatV2"
        }

    def run(self) -> None:
        """Place the step.

        Raises:
            Unshared: variables are to be the same on all towers; begin anew with them so.
        """
        for op in list(self.graph.ops):
            self._step(op)
        self._settle_results()
        self._fold_metrics()
        self.graph.ops = self._order
        self.graph.by_name = {op.name: op for op in self._order}
        self.graph.freeze()

    # One op.

    def _step(self, op: tf.Operation) -> None:
        graph = self.graph
        names = graph.inputs[op.name]
        if op.name in graph.placeholders:
            self._argument(op)
            self._append(op)
            return
        tensors, placements = [], []
        for name in names:
            tensor, placed = self.placed[name]
            tensors.append(tensor)
            placements.append(placed)
        call = Call(op, tensors, placements, self)
        if op.name in graph.marks:
            self._mark(op, graph.marks[op.name], call)
            return
        if op.name in graph.passing:
            for output, tensor, placed, name in zip(op.outputs, tensors, placements, names, strict=True):
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
        if op.type in _OF_KNOWN_SHAPES and op.inputs[0].shape.rank and call.inputs[0].kind is not Kind.LOCAL:
            shape = op.inputs[0].shape.as_list()
            if call.inputs[0].kind is Kind.SHARD:
                shape[call.inputs[0].axis] = None
            with self._building():
                call.tensors[0] = tf.ensure_shape(call.tensors[0], shape)
        if op.type == "RaggedTensorToTensor" and made[0].kind is Kind.SHARD:
            call.tensors[0] = self._padded_shape(call.tensors[0], call.tensors[3], op)
        altered = any(one is not other for one, other in zip(call.tensors, call.given[0], strict=True))
        rest = altered or any(name in self._altered for name in names)
        indices, slices = ADDS_SLICES.get(op.type, (0, 0))
        if slices != indices and call.tensors[slices].shape.rank != 0 and self._is_unordered(call):
            with self._building():
                added = added_up(call.tensors[indices], call.tensors[slices])
            call.tensors[indices], call.tensors[slices] = added
        graph.inputs[op.name] = [tensor.name for tensor in call.tensors]
        self._append(op)
        if op.name in self._joins_slices and all(placed.whole for placed in made):
            self.costs.leave_out(op)
        else:
            self.costs.add(op, call.given[1], (*call.inputs, *made))
        for output, placed in zip(op.outputs, made, strict=True):
            if output.name in self.placed:  # what all towers have from tower 0
                continue
            tensor, after = output, self._rows_again(op, call.given[1], output)
            if placed.kind is Kind.PARTIAL:
                if op.type in rules.ELEMENTWISE:
                    after = next((self._rows_of[name] for name in names if name in self._rows_of), None)
                if after is not None and not after.unit:
                    self._rows_of[output.name] = after
            elif placed.whole and after is not None:
                tensor, placed = self._rows_of_tower(output, after, op), after
                self._converted[tensor.name, after, REPLICATE] = output
            self._put(output, tensor, placed)
            if rest and placed.kind is not Kind.SHARD:
                self._altered.add(output.name)

    def _rows_again(self, op: tf.Operation, given: list[Placement], output: tf.Tensor) -> Placement | None:
        """Return the placement by rows of a result that all towers have; see `rules.rows_again`."""
        if not self.is_function(op) or output.dtype in (tf.resource, tf.variant):
            return rules.rows_again(op, given, output.value_index)
        lengths = self.axes.lengths(output) if any(one.kind is Kind.SHARD for one in given) else None
        rowed = [(axis, length.each) for axis, length in enumerate(lengths or ()) if isinstance(length, Rows)]
        return rules.shard(rowed[0][0], 1, rowed[0][1]) if rowed and rowed[0][1] else None

    def _made(self, call: Call) -> list[Placement]:
        op, graph = call.op, self.graph
        if graph.writes[op.name] and not self.is_function(op):
            return self._write(call)
        if op.type in ("ReadVariableOp", "VariableShape", "VarIsInitializedOp"):
            return [call.inputs[0] if op.type == "ReadVariableOp" else REPLICATE]
        if op.type == "Assert":
            self._assert(call)
            return []
        # TensorFlow does not tell of a generator's variable that such a draw alone takes: there is one for all towers.
        taken = [
            name for name, tensor in zip(graph.inputs[op.name], op.inputs, strict=True) if tensor.dtype == tf.resource
        ]
        unheld = op.type in rules.DRAWS and not graph.role.keys() >= set(taken)
        hidden = unheld or self._hides(op, REPEATABLE | rules.DRAWS)
        if hidden or op.type in PRINTS:
            return self._hidden(call)
        if op.type == "RngReadAndSkip":
            for i in (1, 2):
                call.require(i, REPLICATE)
            return [call.inputs[0] if call.inputs[0].kind is Kind.LOCAL else REPLICATE]
        unseen = op.type not in rules.SEEDED_DRAWS and self._hides(op, REPEATABLE)
        if unseen and all(placed.whole for placed in call.inputs):
            return self.alike(call)
        made = self.place(call)
        unordered = UNORDERED.union(ADDS_SLICES) if self.is_function(op) else UNORDERED
        if self._is_unordered(call) and not unordered.isdisjoint(self.functions.op_types(op)):
            return self.alike(call)
        return made

    def _is_unordered(self, call: Call) -> bool:
        """Return whether towers compute an op's floats alike, on GPUs, whose kernels may add them up in no order."""
        floats = any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in call.tensors)
        return self._on_gpus and floats and all(placed.whole for placed in call.inputs)

    def _hides(self, op: tf.Operation, repeatable: frozenset[str]) -> bool:
        """Return whether an op, or a function that it calls, has a state that no variable holds."""
        return tf_compat.is_stateful(op) and self.functions.hides_state(op, repeatable)

    def _argument(self, op: tf.Operation) -> None:
        graph, output = self.graph, op.outputs[0]
        placed = graph.argument_placements.get(output.name)
        if placed is None:
            role = graph.role.get(output.name, Role.SAME)
            placed = {Role.SAME: REPLICATE, Role.SUM: SUM, Role.SEED: SEEDED}.get(role, LOCAL)
        self._put(output, output, placed)
        known = placed.kind is Kind.SHARD and output.shape[0] is not None and not placed.unit
        if known:  # what is traced for so many rows computes on the whole batch
            self.costs.have_rows(op)
            self._append(op)
            self._put(output, self.convert(output, placed, REPLICATE, op), REPLICATE)

    def _put(self, output: tf.Tensor, tensor: tf.Tensor, placed: Placement) -> None:
        self.placed[output.name] = tensor, placed
        if placed.kind is Kind.SHARD and tensor.shape.rank and tensor.shape[placed.axis] is not None:
            self.graph.open_axes[tensor.name] = placed.axis  # the traced length is the batch's
        if not placed.whole:
            self._differs.add(tensor.name)

    def variables_of_rows(self) -> tuple[tuple[tf.Variable, int], ...]:
        """Return variables whose number of rows the trace has taken for the batch's; and how many for each sample."""
        return tuple(
            (variable, self.fixed[variable.shape[0]])
            for _, variable in self.graph.variables
            if variable.shape.rank and variable.shape[0] in self.fixed and not (variable.trainable or self.graph.opened)
        )

    def _append(self, op: tf.Operation) -> None:
        """Compute an op next, unless it was computed before."""
        if op.name in self._appended:
            return
        self._appended.add(op.name)
        self._order.append(op)
        if any(name in self._differs for name in self.graph.inputs[op.name]):
            self.graph.local.add(op.name)

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """Take over the ops that are made meanwhile, to be computed before the op that is being placed."""
        graph = self.graph
        with graph.tf_graph.as_default(), tf.name_scope("ncclsync_partition/"), tf.device(None):
            yield
        made = graph.tf_graph.get_operations()[self._seen :]
        self._seen += len(made)
        for op in made:
            graph.take_in(op, [tensor.name for tensor in op.inputs])
            self._append(op)
            if op.name in graph.local:
                self._differs.update(output.name for output in op.outputs)

    def exchange(
        self, tensor: tf.Tensor, collective: Collective, op: tf.Operation, when: str | None = None
    ) -> tf.Tensor:
        """Exchange a tensor with its counterparts on the other towers; return the tensor that stands for the result.

        Args:
            tensor: each tower's.
            collective: what happens to it.
            op: for which it does.
            when: see `Exchange`.
        """
        graph, key = self.graph, (tensor.name, collective, when)
        if key in self._exchanged:
            return self._exchanged[key]
        if op.name not in self._line_of:
            mark = graph.marks.get(op.name)
            self._line_of[op.name] = user_line(op.traceback) if mark is None else mark.line
        shape = collective.shape(graph.spec(tensor.name).shape)
        with graph.tf_graph.as_default(), tf.name_scope(""):
            result = tf.compat.v1.placeholder(tensor.dtype, shape, name=f".exchange_{len(graph.exchanges)}")
        self._seen += 1
        line = self._line_of[op.name]
        graph.exchanges[result.name] = Exchange(tensor.name, result.name, collective, shape, tensor.dtype, when, line)
        if collective.differs:
            self._differs.add(result.name)
        return self._exchanged.setdefault(key, result)

    # Conversions.

    def convert(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> tf.Tensor:
        """Return a tensor placed otherwise; see `Placer`."""
        if serves(before, after):
            return tensor
        key = (tensor.name, before, after)
        if key not in self._converted:
            self._converted[key] = self._convert(tensor, before, after, op)
        return self._converted[key]

    def _convert(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> tf.Tensor:
        if after.whole:
            return self._made_whole(tensor, before, op)
        if after == MEAN and before == LOCAL:
            return tensor
        if after == SUM and before in (MEAN, LOCAL) and tensor.dtype.is_floating:
            with self._building():
                return tensor * tf.cast(self.share.fraction, tensor.dtype)
        if before.kind in (Kind.PLACES, Kind.INDICES) and after.kind is Kind.SHARD:
            each, width = before.counts
            if each > 0:
                with self._building():
                    first = tf.cast(self.share.begin * (each * width), tensor.dtype)
                    if before.kind is Kind.PLACES:
                        return tensor + first
                    return tensor + first * tf.one_hot(0, tf.shape(tensor)[1], dtype=tensor.dtype)
        if not before.whole:
            tensor = self.convert(tensor, before, REPLICATE, op)
        if after.kind is Kind.COUNTS:
            counts = np.reshape(after.counts, tensor.shape if tensor.shape.is_fully_defined() else [-1])
            with self._building():
                return tf.where(np.equal(counts, 0), tensor, counts * tf.cast(self.share.rows, tensor.dtype))
        if after.kind is Kind.SHARD:
            return self._rows_of_tower(tensor, rules.counted(after), op)
        if after == SUM:
            if tensor.name not in self.graph.exchanges and is_zero(tensor):
                return tensor
            with self._building():
                return tf.where(tf.equal(self.share.tower, 0), tensor, tf.zeros_like(tensor))
        raise NcclSyncError(f"Expected a tensor that can be placed as {after}. Received: {before}, {tensor.name}")

    def _made_whole(self, tensor: tf.Tensor, before: Placement, op: tf.Operation) -> tf.Tensor:
        if before.kind is Kind.ITEMS:
            return self._anew(tensor)
        if tensor.dtype in (tf.resource, tf.variant):
            raise Refused(f"needs {tensor.name}, of dtype {tensor.dtype.name}, which cannot be sent")
        if before.kind is Kind.SHARD:
            if not self.spares(tensor, before):
                return self._gathered(tensor, before, op)
            self.costs.repeat(tensor.op)
            return self._anew(tensor)
        if before.kind is Kind.PARTIAL:
            boolean = tensor.dtype == tf.bool
            if boolean:
                with self._building():
                    tensor = tf.cast(tensor, tf.int32)
            if tensor.op.type == "ReadVariableOp":
                self._sums.add(tensor.op.name)
            reduced = self.exchange(tensor, Collective(CollectiveKind.ALL_REDUCE, before.op), op)
            if (size := self.costs.roofline.size_bytes(tensor)).power and op.name not in self.graph.marks:
                self.costs.receive(op, size, CollectiveKind.ALL_REDUCE)
            if not boolean:
                return reduced
            with self._building():
                return tf.cast(reduced, tf.bool)
        if before.kind is Kind.COUNTS:
            counts = np.reshape(before.counts, tensor.shape if tensor.shape.is_fully_defined() else [-1])
            if before.unit and np.any(counts < 0):  # a tower may have none of the unit
                summed = self.exchange(tensor, ADD_UP, op)
                with self._building():
                    return tf.where(np.equal(counts, 0), tensor, summed)
            _, *extent = self._extent(before.unit, op)
            with self._building():
                rows, total = (tf.cast(one, tensor.dtype) for one in extent)
                each = tf.constant(counts, tensor.dtype)
                counted = each * total
                if np.any(counts < 0):
                    counted = tf.where(each > 0, each, tensor // rows) * total
                return counted if np.all(counts) else tf.where(tf.equal(each, 0), tensor, counted)
        if before.kind is Kind.LOCAL:
            if tensor.dtype.is_floating and before.op == "mean":
                return self.exchange(tensor, Collective(CollectiveKind.ALL_REDUCE, "mean"), op)
            return self._followed(tensor, op)
        numbers = uneven.numbered(before)
        if numbers is not None and before.op in ("own", "every") and before.counts[0] > 0:
            return self.convert(self.convert(tensor, before, numbers, op), numbers, REPLICATE, op)
        if before == PIECE and tensor.name in self.graph.argument_placements:
            return self._whole_splits(tensor, op)
        if before.kind in _RECOMPUTED:  # such as a cast of the rows' places
            return self._anew(tensor)
        raise Refused(f"needs the whole of {tensor.name}, which is placed as {before}")

    def _followed(self, tensor: tf.Tensor, op: tf.Operation) -> tf.Tensor:
        """Give all towers the tensor of tower 0."""
        if tensor.dtype.name in native.DTYPES and tensor.shape.is_fully_defined():
            return self.exchange(tensor, FOLLOW, op)
        with self._building():
            first = tf.equal(self.share.tower, 0)
            flat, shape = tf.reshape(tensor, [-1]), tf.shape(tensor)
            flat = flat[: tf.where(first, tf.size(flat), 0)]
            shape = shape[: tf.where(first, tf.size(shape), 0)]
        return self._received_whole(flat, shape, tensor, op)

    def _received_whole(self, flat: tf.Tensor, shape: tf.Tensor, like: tf.Tensor, op: tf.Operation) -> tf.Tensor:
        """Return what tower 0 sends, of any dtype and shape; the others add no elements to it."""
        for one in (flat, shape):
            one.set_shape([None])
        values, lengths = self.exchange(flat, GATHER, op), self.exchange(shape, GATHER, op)
        with self._building():
            return tf.ensure_shape(tf.reshape(values, lengths), like.shape)

    def _anew(self, tensor: tf.Tensor) -> tf.Tensor:
        """Compute a tensor again from whole inputs, since lists of tensors and axes cannot be sent."""
        op = tensor.op
        if tf_compat.written_handles(op) or self.functions.hides_state(op, REPEATABLE):
            raise NcclSyncError(
                "Expected a loop that can be run again for the whole batch. Received: "
                f"{op.type}, which writes a variable, at {user_line(op.traceback)}. Write it outside the loop"
            )
        given = [self.placed[name] for name in self.graph.traced_inputs[op.name]]
        inputs = [self.convert(one, placed, REPLICATE, op) for one, placed in given]
        with self._building():
            return tf_compat.copied_op(op, inputs).outputs[tensor.value_index]

    def reduced(self, tensor: tf.Tensor) -> Placement:
        """See `Placer`."""
        return self._rows_of.get(tensor.name, REPLICATE)

    def spares(self, tensor: tf.Tensor, placed: Placement, depth: int = 8) -> bool:
        """Return whether every tower can compute all of a tensor, element by element, of what it has whole.

        Args:
            tensor, placed: see `Placer`.
            depth: of how many ops, one behind the other, at most.
        """
        if placed.whole or (placed.kind is not Kind.LOCAL and (tensor.name, placed, REPLICATE) in self._converted):
            return True
        op, given = tensor.op, self.graph.traced_inputs.get(tensor.op.name)
        if not depth or given is None or op.type not in rules.ELEMENTWISE | rules.MOVING:
            return placed.kind is Kind.COUNTS and not placed.unit
        return all(self.spares(*self.placed[name], depth - 1) for name in given)

    def _gathered(self, tensor: tf.Tensor, before: Placement, op: tf.Operation) -> tf.Tensor:
        """Gather all towers' rows, in the order of the batch."""
        moved = tensor
        turned = before.axis or before.blocks > 1
        if turned:
            with self._building():
                rank = tf.rank(tensor) if tensor.shape.rank is None else tensor.shape.rank
                order = tf.concat([[before.axis], tf.range(before.axis), tf.range(before.axis + 1, rank)], 0)
                moved = tf.transpose(tensor, order)  # [blocks * rows, ...]
                rest = tf.shape(moved)[1:]
                if before.blocks > 1:
                    moved = tf.reshape(moved, tf.concat([[before.blocks, -1], rest], 0))
                    moved = _swapped(moved, rank)  # [rows, blocks, ...]
        whole = self.exchange(moved, GATHER, op)
        if op.name not in self.graph.marks and op.name not in self._joins_slices:
            lengths = self.costs.roofline.lengths(tensor)
            others = lengths[: before.axis] + lengths[before.axis + 1 :]
            rows = Size(max(before.each, 1) * max(before.blocks, 1) * max(tensor.dtype.size, 1), 1)
            self.costs.receive(op, product([rows, *others]), CollectiveKind.ALL_GATHER)
        if not turned:
            return whole
        with self._building():
            if before.blocks > 1:
                whole = tf.reshape(_swapped(whole, rank), tf.concat([[-1], rest], 0))
            whole = tf.transpose(whole, tf.math.invert_permutation(order))
            if tensor.shape.rank is None:
                return whole
            shape = tensor.shape.as_list()
            shape[before.axis] = None
            return tf.ensure_shape(whole, shape)

    def _extent(self, unit: str, op: tf.Operation) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the first of the tower's samples, or of another unit, in the batch; how many it has, and the batch.

        Args:
            unit: see `Placement`.
            op: for which it is asked.
        """
        if not unit:
            return self.share.begin, self.share.rows, self.share.total
        if unit not in self._extents:
            named = self.graph.tf_graph.get_tensor_by_name(unit)
            with self._building():
                ends = self.graph.argument_placements.get(unit) == PIECE
                count = tf.cast(named[-1], tf.int32) if ends else tf.shape(named)[0]
                own = tf.stack([self.share.begin, count])[None]
            every = self.exchange(own, GATHER, op)
            with self._building():
                before = tf.where(every[:, 0] < self.share.begin, every[:, 1], 0)
                self._extents[unit] = tf.reduce_sum(before), count, tf.reduce_sum(every[:, 1])
        return self._extents[unit]

    def _rows_of_tower(self, tensor: tf.Tensor, after: Placement, op: tf.Operation) -> tf.Tensor:
        """Take a tower's rows of a tensor that all have, for `op`. One row that is broadcast stays."""
        known = tensor.shape[after.axis]
        first, count, total = self._extent(after.unit, op)
        with self._building():
            length, total = tf.shape(tensor)[after.axis], tf.maximum(total, 1)
            each = length // (total * after.blocks)
            if known is None or after.unit:
                broadcast = tf.equal(length, 1)
                if after.unit:  # of which there may be one in all, and none on a tower
                    broadcast = tf.logical_and(broadcast, total * after.blocks > 1)
                begin = tf.where(broadcast, 0, first * each)
                size = tf.where(broadcast, 1, count * each)
            else:
                self.declared.add((known, after.blocks * max(after.each, 1)))
                begin, size = first * each, count * each
            if after.blocks > 1 or self.graph.jit_compile:  # a slice XLA compiles anew for each first row
                blocks = after.blocks if known is not None and not after.unit else tf.where(broadcast, 1, after.blocks)
                starts = tf.range(blocks) * (length // after.blocks) + begin
                places = tf.reshape(starts[:, None] + tf.range(size)[None], [-1])
                return tf.gather(tensor, places, axis=after.axis)
            rank = tensor.shape.rank
            at = tf.one_hot(after.axis, rank, dtype=tf.int32)
            rows = tf.slice(tensor, at * begin, at * (size + 1) - 1)
            lengths = tensor.shape.as_list()
            lengths[after.axis] = None
            return tf.ensure_shape(rows, lengths)

    def _whole_splits(self, splits: tf.Tensor, op: tf.Operation) -> tf.Tensor:
        """Return the row splits of the ragged tensor of all rows."""
        with self._building():
            lengths = splits[1:] - splits[:-1]
        lengths = self.exchange(lengths, GATHER, op)
        with self._building():
            return tf.concat([tf.zeros([1], lengths.dtype), tf.cumsum(lengths)], 0)

    # Ops that are made whole.

    def whole(self, call: Call) -> list[Placement]:
        """Let every tower compute the same; see `Placer`."""
        handles = {
            self.graph.inputs[call.op.name][i]
            for i, tensor in enumerate(call.tensors)
            if tensor.dtype == tf.resource and not call.inputs[i].whole
        }
        if handles:
            raise Unshared(handles)
        for i in range(len(call.inputs)):
            call.require(i, REPLICATE)
        logger.debug("%s %s is made whole: %s", call.op.type, call.op.name, ", ".join(map(str, call.given[1])))
        if call.op.type not in rules.DRAWS and self._hides(call.op, REPEATABLE):
            self._follow(call)
        return [REPLICATE] * len(call.op.outputs)

    def alike(self, call: Call) -> list[Placement]:
        """Give all towers the results of tower 0; see `Placer`."""
        for i, placed in enumerate(call.inputs):
            if placed.kind is not Kind.LOCAL:
                call.require(i, REPLICATE)
        self._follow(call)
        return [REPLICATE] * len(call.op.outputs)

    def _follow(self, call: Call) -> None:
        """Give all towers what tower 0 computes: `call.op` is appended, and its results are placed."""
        op = call.op
        self.graph.inputs[op.name] = [tensor.name for tensor in call.tensors]
        self._append(op)
        self._differs.update(output.name for output in op.outputs)
        for output in op.outputs:
            if output.dtype in (tf.resource, tf.variant):
                self._put(output, output, REPLICATE)
                continue
            self._put(output, self._followed(output, op), REPLICATE)
        if op.type not in rules.DRAWS:
            self._follow_writes(op)

    def _follow_writes(self, op: tf.Operation) -> None:
        """Give all towers what an op, or a dataset that it iterates, has written to tower 0's variables."""
        graph, sources = self.graph, [op]
        for one in sources:
            sources += [t.op for t in one.inputs if t.dtype == tf.variant and t.op not in sources]
        handles = sorted({handle for one in sources for handle in graph.writes.get(one.name, ())})
        is_dataset = any(output.dtype == tf.variant for output in op.outputs) and not self.is_function(op)
        if not handles or is_dataset:  # which writes when it is iterated
            return
        with self._building():
            reads = [
                tf.raw_ops.ReadVariableOp(
                    resource=graph.tf_graph.get_tensor_by_name(handle), dtype=graph.variable_of[handle].dtype
                )
                for handle in handles
            ]
        self._differs.update(read.name for read in reads)
        values = [self._followed(read, op) for read in reads]
        with self._building():
            writes = [
                tf.raw_ops.AssignVariableOp(resource=graph.tf_graph.get_tensor_by_name(handle), value=value)
                for handle, value in zip(handles, values, strict=True)
            ]
            done = tf.group(*writes)
        for write, handle in zip(writes, handles, strict=True):
            graph.writes[write.name] = {handle}
        graph.must_run.add(done.name)
        names = {one.name for one in sources}
        for one in sources:
            graph.stands_for(one.name, done.name, but_not_to=names)
        for read in reads:
            graph.controls[read.op.name] = [op.name]

    def _hidden(self, call: Call) -> list[Placement]:
        """Run what changes something outside the step on tower 0 alone: Python, an iterator, a summary, a printed line.

        The other towers receive its results, of any shape. So it is with a loop or a branch that writes no variable.
        """
        op, graph = call.op, self.graph
        for i in range(len(call.inputs)):
            self._require_whole(call, i)
        if graph.jit_compile and any(
            tensor.dtype == tf.resource and tensor.name not in graph.variable_of for tensor in call.tensors
        ):  # of such, within a branch, XLA would not say which op it does not compile
            self._follow(call)
            return [REPLICATE] * len(op.outputs)
        outputs = [output for output in op.outputs if output.dtype not in (tf.resource, tf.variant)]
        others = [output for output in op.outputs if output.dtype in (tf.resource, tf.variant)]
        lazy = any(tensor.dtype == tf.variant for tensor in call.tensors)  # a dataset, which it iterates
        # A loop gives back the handles that it has been given.
        if (others and op.type not in LOOPS) or graph.writes[op.name] or lazy:
            # It writes variables, or may, which every tower must: all run it, and what it does besides it does N
            # times.
            self.warned.append(
                f"{op.type}, at {user_line(op.traceback)}, does something that no variable holds (it runs "
                "Python, or prints, or draws without a seed): every tower does it, with the batch's values, "
                "and tower 0's results, and what it writes to variables, are taken"
            )
            self._follow(call)
            return [REPLICATE] * len(op.outputs)

        def run():
            made = tf_compat.copied_op(op, [tf.identity(tensor) for tensor in call.tensors])
            if not outputs:
                with tf.control_dependencies([made]):
                    return [tf.constant(0)]
            given = [made.outputs[output.value_index] for output in outputs]
            return [part for one in given for part in (tf.reshape(one, [-1]), tf.shape(one))]

        def receive():
            if not outputs:
                return [tf.constant(0)]
            return [part for one in outputs for part in (tf.zeros([0], one.dtype), tf.zeros([0], tf.int32))]

        before = len(self._order)
        with self._building():
            sent = tf.cond(tf.equal(self.share.tower, 0), run, receive)
            # By a result, since TensorFlow prunes what a branch does and none needs.
            done = tf.identity(sent[0])
        definitions = graph.tf_graph.as_graph_def().library.function
        graph.functions.update((definition.signature.name, definition) for definition in definitions)
        for made in self._order[before:]:
            if made.type in BRANCHES:
                graph.controls[made.name] += graph.controls[op.name]
        graph.must_run.add(done.op.name)
        graph.stands_for(op.name, done.op.name)
        self._appended.add(op.name)  # it is run there
        for output in others:
            self._put(output, call.tensors[output.value_index], REPLICATE)
        for output, flat, shape in zip(outputs, sent[::2], sent[1::2], strict=False):
            self._put(output, self._received_whole(flat, shape, output, op), REPLICATE)
        return [REPLICATE] * len(op.outputs)

    def _require_whole(self, call: Call, index: int) -> None:
        try:
            call.require(index, REPLICATE)
        except Refused:
            raise Unshared({self.graph.inputs[call.op.name][index]}) from None

    def _assert(self, call: Call) -> None:
        """Let each tower run an assertion about its own rows."""
        placed = call.inputs[0]
        if placed.kind is Kind.PARTIAL and placed != rules.EVERY:
            call.require(0, REPLICATE)
        for i, one in enumerate(call.inputs):
            if one.kind in _RECOMPUTED:
                call.require(i, REPLICATE)

    def _write(self, call: Call) -> list[Placement]:
        graph, op = self.graph, call.op
        handles = {handle: graph.role[handle] for handle in graph.writes[op.name]}
        roles = set(handles.values())
        plain = op.type.startswith("Assign")
        if roles <= {Role.PARTIAL, Role.PARTITION, Role.SEED}:
            for i, placed in enumerate(call.inputs):
                if placed.kind in _RECOMPUTED | {Kind.SHARD, Kind.COUNTS}:
                    call.require(i, REPLICATE)
        elif roles == {Role.SUM} and plain:
            call.require(1, SUM)
        elif roles == {Role.SUM} and op.type in _ADDING:
            indices, updates = call.inputs[1:3]
            fits = indices.kind is updates.kind is Kind.SHARD and indices.axis == updates.axis == 0
            if not fits or not rules.same_rows(indices, updates):
                call.require(1, REPLICATE)
                call.require(2, SUM)
        elif roles == {Role.SAME}:
            for i, tensor in enumerate(call.tensors):
                if tensor.dtype != tf.resource:
                    call.require(i, REPLICATE)
        else:
            raise Unshared({handle for handle, role in handles.items() if role is not Role.SAME})
        return [REPLICATE] * len(op.outputs)

    # Marks.

    def _padded_shape(self, shape: tf.Tensor, splits: tf.Tensor, op: tf.Operation) -> tf.Tensor:
        """Return the shape of a padded ragged tensor, whose rows are as long as the batch's longest if that is open."""
        with self._building():
            own = tf.reduce_max(splits[1:] - splits[:-1])
        longest = self.exchange(own, Collective(CollectiveKind.ALL_REDUCE, "max"), op)
        with self._building():
            shape = tf.broadcast_to(shape, [op.outputs[0].shape.rank])  # all lengths are open if it is a scalar
            second = tf.logical_and(shape < 0, tf.equal(tf.range(tf.size(shape)), 1))
            return tf.where(second, tf.cast(longest, shape.dtype), shape)

    def _mark(self, op: tf.Operation, mark: Mark, call: Call) -> None:
        count = len(op.outputs) - mark.conditional
        pairs = list(zip(call.tensors, call.inputs, strict=True))
        names = self.graph.inputs[op.name]
        if mark.purpose == Purpose.SLICES:
            self.costs.leave_out(op)
            for output, tensor in zip(op.outputs, self._slices(op, mark, call), strict=True):
                self._put(output, tensor, REPLICATE)
            return
        if mark.purpose == Purpose.SLICES_PART:
            for output, tensor in zip(op.outputs, self._slices_part(op, call), strict=True):
                self._put(output, tensor, LOCAL)
            return
        when = None
        if mark.conditional:
            condition, placed = pairs.pop()
            when = self.convert(condition, placed, REPLICATE, op).name
        for i, (tensor, placed) in enumerate(pairs[:count]):
            result, after = self._meet(op, mark, names[i], tensor, placed, when)
            # From here on its placement no longer depends on how it was computed.
            self._put(op.outputs[i], result, after)

    def _meet(
        self, op: tf.Operation, mark: Mark, name: str, tensor: tf.Tensor, placed: Placement, when: str | None
    ) -> tuple[tf.Tensor, Placement]:
        if mark.by_choice and mark.purpose == Purpose.LOCAL and not mark.of and placed.kind is Kind.SHARD:
            self.normalized.append(mark.line)
        if mark.by_choice and self._exact:
            return tensor, placed
        if mark.purpose == Purpose.WHOLE:
            return self.convert(tensor, placed, REPLICATE, op), REPLICATE
        if mark.purpose == Purpose.LOCAL:
            return (tensor if placed.kind is not Kind.PENDING else self._anew(tensor)), LOCAL
        if mark.purpose == Purpose.PARTS:
            return self.convert(tensor, placed, SUM, op), LOCAL
        if mark.purpose == Purpose.ADDENDS:
            if placed.kind in (Kind.SHARD, Kind.LOCAL) or placed == SUM:
                return tensor, LOCAL
            tensor = self.convert(tensor, placed, MEAN if placed.kind is Kind.PARTIAL else REPLICATE, op)
            with self._building():
                return tensor * tf.cast(self.share.fraction, tensor.dtype), LOCAL
        if mark.purpose == Purpose.ROWS:
            _, taken = self.placed[self.graph.traced_inputs[mark.of][0]]
            return tensor, taken if taken.kind is Kind.SHARD else SUM
        if mark.purpose == Purpose.OWN_ROW:
            whole = self.convert(tensor, placed, REPLICATE, op)
            with self._building():
                at = tf.minimum(self.share.tower, tf.shape(whole)[0] - 1)
                return whole[at : at + 1], LOCAL
        collective = mark.collective
        reduces, how = collective.kind == CollectiveKind.ALL_REDUCE, collective.op
        if collective.kind == CollectiveKind.ALL_GATHER and placed.kind is Kind.SHARD:
            return self.convert(tensor, placed, REPLICATE, op), REPLICATE
        if placed.kind is Kind.PARTIAL and reduces and how in ("mean", placed.op):
            return self.convert(tensor, placed, REPLICATE, op), REPLICATE  # what its parts add up to
        local = self._local_value(name)
        settled = collective.kind == CollectiveKind.BROADCAST or (reduces and how in ("mean", "max", "min"))
        if settled and placed.whole and local is tensor:
            return tensor, REPLICATE
        result = self.exchange(local, collective, op, when)
        return result, LOCAL if collective.differs else REPLICATE

    def _local_value(self, name: str) -> tf.Tensor:
        """Return what a tower computes of its shard alone: the input of a collective that the step calls."""
        tensor, placed = self.placed[name]
        if placed.kind is Kind.SHARD or name not in self._altered:
            return tensor
        if name in self._local:
            return self._local[name]
        op = self.graph.tf_graph.get_tensor_by_name(name).op
        kept = (
            not op.inputs or op.name in self.graph.marks or op.name in self.graph.passing or tf_compat.is_stateful(op)
        )
        if kept:
            return tensor
        inputs = [self._local_value(one) for one in self.graph.traced_inputs[op.name]]
        with self._building():
            made = tf_compat.copied_op(op, inputs)
        for output, one in zip(op.outputs, made.outputs, strict=True):
            self._local[output.name] = one
            self._differs.add(one.name)
        return self._local[name]

    def _slices_part(self, op: tf.Operation, call: Call) -> list[tf.Tensor]:
        """Return a tower's part of a sparse gradient: the slices of its rows, or its parts of all slices."""
        (values, indices), (of_values, of_indices) = call.tensors, call.inputs
        if of_values.kind is of_indices.kind is Kind.SHARD and rules.same_rows(of_values, of_indices):
            return [values, indices]
        return [self.convert(values, of_values, SUM, op), self.convert(indices, of_indices, REPLICATE, op)]

    def _slices(self, op: tf.Operation, mark: Mark, call: Call) -> list[tf.Tensor]:
        """Return the slices that one device would have, or their dense sum if that moves fewer bytes."""
        values, indices = call.inputs
        by_rows = values.kind is indices.kind is Kind.SHARD
        if not by_rows or not mark.rows_add_up or not call.tensors[0].shape[1:].is_fully_defined():
            return [self.convert(t, placed, REPLICATE, op) for t, placed in zip(call.tensors, call.inputs, strict=True)]
        slices, places = call.tensors
        width = slices.shape[1:].num_elements() * slices.dtype.size  # bytes of a row
        with self._building():
            count = tf.shape(slices)[0]
            counted = tf.cast(count, tf.int64)
        total = self.exchange(counted, ADD_UP, op)
        height = int(mark.height)
        # By a gather a tower receives what all others have: (N - 1) / N of all slices, values and indices. An
        # all-reduce moves 2 (N - 1) / N of the dense tensor. One of the two exchanges is then of nothing.
        with self._building():
            dense = 2 * height * width < total * (width + places.dtype.size)
            kept = tf.where(dense, 0, count)
            rest = tf.where(dense, height, 0)
            few, where = slices[:kept], places[:kept]
            summed = tf.math.unsorted_segment_sum(slices[kept:], places[kept:], rest)
        few, where = self.exchange(few, GATHER, op), self.exchange(where, GATHER, op)
        summed = self.exchange(summed, ADD_UP, op)
        with self._building():
            every = tf.cast(tf.range(rest), places.dtype)
            return [tf.concat([few, summed], 0), tf.concat([where, every], 0)]

    # Results.

    def _settle_results(self) -> None:
        graph = self.graph
        for result in graph.results:
            tensor, placed = self.placed[result.name]
            if self._results is Results.EACH:
                graph.outputs.append((self._local_value(result.name).name, "first"))
                continue
            if placed == rules.shard():
                graph.outputs.append((tensor.name, "concat"))
                continue
            whole = self.convert(tensor, placed, REPLICATE, result.op)
            graph.outputs.append((whole.name, "first"))

    def _fold_metrics(self) -> None:
        """Add up metric state at the end of a step: the first tower of a process keeps the sum, the others zero."""
        graph = self.graph
        users: dict[str, list[tf.Operation]] = {name: [] for name, _ in graph.variables if graph.role[name] is Role.SUM}
        for op in self._order:
            for name in users.keys() & set(graph.inputs[op.name]):
                users[name].append(op)
        for name, ops in users.items():
            writers = [op for op in ops if name in graph.writes[op.name]]
            if not writers:
                continue
            resource, last = graph.tf_graph.get_tensor_by_name(name), writers[-1]
            # What the step itself reads after its last write, and adds up, serves as well.
            reads = (op for op in ops if op.name in self._sums and last.name in graph.controls[op.name])
            read = next(reads, None)
            if read is None:
                with self._building():
                    read = tf.raw_ops.ReadVariableOp(resource=resource, dtype=graph.variable_of[name].dtype).op
                graph.controls[read.name] = [op.name for op in writers]
            total = self.exchange(read.outputs[0], ADD_UP, last)
            before = len(self._order)
            with self._building():
                kept = tf.where(self._site.is_first, total, tf.zeros_like(total))
                write = tf.raw_ops.AssignVariableOp(resource=resource, value=kept)
            graph.folds.update(op.name for op in self._order[before:])
            graph.writes[write.name] = {name}
            graph.controls[write.name] = [op.name for op in (*ops, read)]
            graph.must_run.add(write.name)


def _swapped(tensor: tf.Tensor, rank: Any) -> tf.Tensor:
    """Swap the first two axes of a tensor that has one axis more than `rank`."""
    return tf.transpose(tensor, tf.concat([[1, 0], tf.range(2, rank + 1)], 0))


def partition(graph: StepGraph, results: Results, exact: bool = False) -> Partition:
    """Place a step; see `Partition`."""
    placing = Partition(graph, results, exact)
    placing.run()
    return placing
