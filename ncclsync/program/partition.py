"""Partition a traced step: place every tensor, and insert a collective wherever an op needs a tensor placed otherwise.

The trace means the program of one device on the whole batch. `Partition` walks it once, in the order in which
it is computed. For each op a `Placer` asks the rule (`rules.py`) how its results are placed; to what its inputs must be
brought for that, `Conversions` brings them; a `StepBuilder` takes the op, the ops that this has put in, and exchanges.
An op without a rule gets the batch's values: its inputs are gathered or reduced, and every tower computes alike.
"""

import dataclasses
import logging
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.compat.source_lines import user_line
from ncclsync.costs.cost import Costs
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Purpose
from ncclsync.program.adjusting import adjust_inputs, adjust_result
from ncclsync.program.builder import ADD_UP, StepBuilder
from ncclsync.program.conversion import Conversions, Unshared
from ncclsync.program.graph import StepGraph, TracedGraph
from ncclsync.program.marks import Marks
from ncclsync.program.program import Results
from ncclsync.program.tower_zero import TowerZero
from ncclsync.program.within import Changer, takes_share, vector_of
from ncclsync.semantics import rules
from ncclsync.semantics.axes import BATCHES, Axes, Items, Rows, given_rows
from ncclsync.semantics.placements import (
    LOCAL,
    REPLICATE,
    SEEDED,
    SUM,
    Counts,
    Local,
    Partial,
    Placement,
    Recomputed,
    Shard,
    has,
)
from ncclsync.semantics.placing import (
    COMPUTED_WHOLE,
    PRINTS,
    REPEATABLE,
    Found,
    Instead,
    Made,
    Placer,
    Refused,
    local_of,
)
from ncclsync.semantics.rules import Call
from ncclsync.semantics.scope import Lengths, Scope
from ncclsync.semantics.unordered import ADDS_SLICES, UNORDERED, UNORDERED_IF_FROZEN, UNORDERED_ON_CPU, added_up
from ncclsync.sharding.roles import Role
from ncclsync.sharding.shards import components_of

logger = logging.getLogger("ncclsync")

_ADDING = frozenset({"ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd", "ResourceScatterNdSub"})

# How a variable's handle is placed; of another role it is LOCAL.
_HANDLES: dict[Role, Placement] = {Role.SAME: REPLICATE, Role.SUM: SUM, Role.SEED: SEEDED}


class Fault(Exception):
    """Placing an op fails by a fault of ncclsync's own."""

    def __init__(self, op: tf.Operation, cause: Exception) -> None:
        """Name the op, and what was raised."""
        super().__init__(f"{op.type}, at {user_line(op.traceback)}: {type(cause).__name__}: {cause}")
        self.op, self.cause = op, cause


class Undividable(Exception):
    """Say why a step cannot be divided among towers; each can compute the whole batch."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PlacedStep:
    """Hold a step that is partitioned.

    Attributes:
        graph: the step with what was put in.
        conversions: know how tensors are placed, what stands for them, and what is known of their lengths and costs.
        placer: knows the functions that were placed by rows, and what is drawn.
        warned: what a user should know of the step on towers, in words.
        normalized: lines that normalise by a tower's rows alone.
    """

    graph: StepGraph
    conversions: Conversions
    placer: Placer
    warned: list[str]
    normalized: Sequence[str]

    def variables_of_rows(self) -> tuple[tuple[tf.Variable, int], ...]:
        """Return variables whose number of rows the trace has taken for the batch's; and how many for each sample."""
        traced, fixed = self.graph.traced, self.conversions.lengths.fixed
        return tuple(
            (one, fixed[one.shape[0]])
            for one in traced.variable_of.values()
            if one.shape.rank and one.shape[0] in fixed and not (one.trainable or traced.opened)
        )


class Partition:
    """Walk over one traced step."""

    def __init__(
        self,
        traced: TracedGraph,
        exact: bool = False,
        many_shards: bool = False,
        undivided: bool = False,
        learned: Mapping[TensorName, Any] = types.MappingProxyType({}),
        faulty: Mapping[OpName, str] = types.MappingProxyType({}),
    ) -> None:
        """Take a step.

        Args:
            traced: the step.
            exact: whether marks `by_choice` change nothing.
            many_shards: see `Target`.
            undivided: whether every tower computes the whole batch: no op's rule is asked.
            learned: see `Conversions`.
            faulty: ops that are not divided, and the fault for which they are not, in words.
        """
        arguments = traced.argument_placements.items()
        self._graph = StepBuilder(traced, (name for name, one in arguments if many_shards and not one.whole))
        functions = self._functions = self._graph.functions
        functions.faults += [*traced.trace.faults, *map(COMPUTED_WHOLE.format, faulty.values())]
        axes = Axes(functions, {**_known_shapes(traced), **learned})
        declared = {(int(v.shape[0]), each): f"the variable {v.name!r}" for _, v, each in traced.opened}
        lengths = Lengths(declared=declared, batch=traced.trace.rows, stretched=bool(traced.opened))
        costs = Costs(functions, axes, _joining_slices(traced), traced.trace.marks, told=not undivided)
        self._conversions = Conversions(self._graph, axes, lengths, costs, learned)
        looks = not traced.trace.jit_compile  # XLA compiles a program for each number of rows
        scope = self._scope = Scope(functions, axes, self._conversions, lengths, looks=looks)
        scope.units.row_splits.update((name, name) for name in traced.row_splits)
        self._placer = Placer(scope)
        self._tower_zero = TowerZero(self._conversions)
        self._marks = Marks(self._conversions, exact)
        self._undivided, self._faulty = undivided, faulty
        self._share: tf.Tensor | None = None  # as functions take it
        self._numbers: dict[tuple[float, tf.DType], tf.Tensor] = {}  # constants, by value and dtype
        self._on_gpus = "GPU" in traced.home_device and not tf_compat.is_op_determinism_enabled()
        # Resources beside variables that the step may change, such as a lookup table. All towers share them. TensorFlow
        # takes a look into a table for a write.
        changing = (op for op in traced.ops if functions.hides_state(op, REPEATABLE | rules.DRAWS))
        self._changed = set[TensorName]().union(*map(tf_compat.written_handles, changing)) - traced.role.keys()

    def run(self, results: Results) -> PlacedStep:
        """Place the step, whose towers' results become those of the step so.

        Raises:
            Unshared: variables are to be the same on all towers; begin anew with them so.
            Fault: an op cannot be placed.
        """
        for op in self._graph.traced.ops:
            try:
                self._step(op)
            except (Found, NcclSyncError, Undividable):
                raise
            except Exception as fault:  # of any kind
                raise Fault(op, fault) from fault
        traced = self._graph.traced
        leaves = tf.nest.flatten(traced.trace.function.structured_outputs)
        parts = [isinstance(leaf, tf.Tensor | tf.IndexedSlices) for leaf in leaves for _ in components_of(leaf)]
        with self._graph.building():
            outputs = [self._output(*one, results) for one in zip(traced.results, parts, strict=True)]
        folds, scope = _fold_metrics(self._graph), self._scope
        graph = self._graph.finished(scope.axes, scope.lengths.stretched, folds, outputs)
        warned = [*self._tower_zero.warned, *self._functions.faults]
        return PlacedStep(graph, self._conversions, self._placer, warned, self._marks.normalized)

    def _output(self, result: tf.Tensor, by_rows: bool, results: Results) -> tuple[TensorName, bool]:
        """Return what stands for a result of the step, and whether the towers' rows make one device's.

        `by_rows`: whether they may. Parts of a sparse or ragged tensor belong together: all are to be one device's.
        """
        tensor, placed = self._conversions.placed[result.name]
        by_rows = by_rows and results is Results.COMBINED and placed == Shard()
        if results is Results.EACH:
            tensor = self._marks.local_value(result.name)
        elif not by_rows:
            tensor = self._conversions.convert(tensor, placed, REPLICATE, result.op)
        return tensor.name, by_rows

    # One op.

    def _step(self, op: tf.Operation) -> None:
        """Place an op: how it takes its inputs, and what stands for its results on a tower."""
        traced = self._graph.traced
        if op.name in traced.placeholders:
            self._take_argument(op)
            return
        call = self._call(op)
        if op.name in traced.trace.marks:
            with self._graph.building():
                self._marks.meet(call)
        elif op.name in traced.passing:
            self._pass(call)
        else:
            self._compute(call, self._place(call))

    def _take_argument(self, op: tf.Operation) -> None:
        traced, output = self._graph.traced, op.outputs[0]
        given = traced.argument_placements.get(output.name)
        placed = _HANDLES.get(traced.role.get(output.name, Role.SAME), LOCAL) if given is None else given
        self._conversions.put(output, output, placed)
        self._graph.append(op)
        known = isinstance(placed, Shard) and output.shape[0] is not None and not placed.unit
        # An argument that is traced with its number of rows: all towers take the whole batch.
        if known or (self._undivided and given is not None and not isinstance(placed, Local)):
            self._conversions.costs.have_rows(op)
            self._conversions.put(output, self._conversions.convert(output, placed, REPLICATE, op), REPLICATE)

    def _call(self, op: tf.Operation) -> Call:
        names = self._graph.inputs[op.name]
        for tensor, name in zip(op.inputs, names, strict=False):
            if tensor.name != name:  # of merged ops one was placed, and refined
                tensor.set_shape(self._graph.traced.tensor(name).shape)
        given = [self._conversions.placed[name] for name in names]
        return Call(op, [tensor for tensor, _ in given], [placed for _, placed in given], self._scope)

    def _pass(self, call: Call) -> None:
        """Let the inputs of an op that no segment computes stand for its results."""
        op, names = call.op, self._graph.inputs[call.op.name]
        for output, tensor, placed, name in zip(op.outputs, call.tensors, call.inputs, names, strict=True):
            output.set_shape(op.inputs[output.value_index].shape)  # which has been refined
            self._conversions.put(output, tensor, placed)
            if name in self._marks.altered:
                self._marks.altered.add(output.name)

    def _compute(self, call: Call, made: list[Placement]) -> None:
        """Let towers compute an op, and put what stands for its results, which are placed so."""
        op, conversions, altered = call.op, self._conversions, self._marks.altered
        stay = adjust_inputs(call, made, conversions)
        self._fold_numbers(call, made)
        alters = any(one is not other for one, other in zip(call.tensors, call.given[0], strict=True))
        alters = alters or not altered.isdisjoint(self._graph.traced.inputs[op.name])
        self._order_slices(call)
        self._give_share(call)
        self._graph.append(op, call.tensors)
        conversions.costs.add(op, call.given[1], call.inputs, made)
        with self._graph.building():
            for output, result in zip(op.outputs, made, strict=True):
                # All towers may have it from tower 0.
                tensor, placed = conversions.placed.get(output.name, (output, result))
                tensor = adjust_result(call, tensor, placed, stay, conversions)
                tensor, placed = self._with_rows(call, output, tensor, placed)
                conversions.put(output, tensor, placed)
                if alters and not isinstance(placed, Shard):
                    altered.add(output.name)

    def _fold_numbers(self, call: Call, made: list[Placement]) -> None:
        """Give an op on rows constants in place of numbers that follow from fixed lengths.

        Such as the divisor of a mean's gradient, which takes ten small ops, and on a GPU a copy from the host. A batch
        without rows may have another number; then these rows, which alone get the constant, are none.
        """
        if call.op.type not in rules.ELEMENTWISE or not isinstance(made[0], Shard):
            return
        for i, (tensor, placed) in enumerate(zip(call.op.inputs, call.inputs, strict=True)):
            casts = tensor.op.type == "Cast" and tensor.dtype.is_floating and tensor.op.inputs[0].dtype.is_integer
            number = call.constant(i) if casts and tensor.shape.rank == 0 and placed.whole else None
            if number is None:
                continue
            if (known := (number.item(), tensor.dtype)) not in self._numbers:
                with self._graph.building():
                    self._numbers[known] = tf.constant(number, tensor.dtype)
            call.tensors[i] = self._numbers[known]

    def _give_share(self, call: Call) -> None:
        """Give functions of which each tower runs its own part the tower's share, if they need it."""
        bodies = [body for body in self._placer.bodies if body.op is call.op]
        if takes_share(bodies):
            if self._share is None:
                with self._graph.building():
                    self._share = vector_of(self._conversions.share)
            name = call.op.name
            self._graph.nodes[name] = Changer(self._functions).changed(self._graph.nodes[name], bodies)
            call.tensors.append(self._share)

    def _order_slices(self, call: Call) -> None:
        """Let a GPU add up in one order the slices that it adds to what all towers have."""
        indices, slices = ADDS_SLICES.get(call.op.type, (0, 0)) if self._on_gpus else (0, 0)
        if slices != indices and call.tensors[slices].shape.rank != 0 and _computes_alike(call):
            with self._graph.building():
                added = added_up(call.tensors[indices], call.tensors[slices])
            call.tensors[indices], call.tensors[slices] = added

    def _with_rows(
        self, call: Call, output: tf.Tensor, tensor: tf.Tensor, placed: Placement
    ) -> tuple[tf.Tensor, Placement]:
        """Return a tower's rows of a result that all towers have, if it is known to have rows; else the result."""
        if self._undivided or not (placed.whole or isinstance(placed, Partial)):
            return tensor, placed
        conversions, rows = self._conversions, self._rows_again(call.op, call.given[1], output)
        if isinstance(placed, Partial):
            if call.op.type in rules.ELEMENTWISE:
                names = self._graph.traced.inputs[call.op.name]
                rows = next((conversions.rows_of[name] for name in names if name in conversions.rows_of), None)
            if rows is not None and not rows.unit:
                conversions.rows_of[output.name] = rows
        elif rows is not None:
            own = conversions.rows_of_tower(tensor, rows, call.op)
            conversions.converted[own.name, rows, REPLICATE] = tensor
            return own, rows
        return tensor, placed

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
        if all(one.whole for one in given) and output.name not in self._conversions.learned:
            return None
        lengths = self._scope.axes.lengths(output)
        found = [(axis, one.each) for axis, one in enumerate(lengths or ()) if isinstance(one, Rows) and one.each]
        for axis, each in found[:1]:
            rowed = (one for one in given if isinstance(one, Shard))
            like = (one for one in rowed if one == Shard(axis, one.blocks) and one.rows == each)
            return next(like, Shard(axis, 1, each))
        return None

    # How an op is placed.

    def _place(self, call: Call) -> list[Placement]:
        """Choose how an op's results are placed, and bring its inputs to what that takes."""
        op = call.op
        try:
            made = self._by_kind(call)
            if isinstance(made, list):
                return made
            call.make_whole(Placement, but=Local)
        except Refused as reason:
            words = f"{op.type}, at {user_line(op.traceback)}, {reason}. Move it out of the step"
            raise Undividable(words) from reason
        self._tower_zero.follow(call)
        return [REPLICATE] * len(op.outputs)

    def _by_kind(self, call: Call) -> list[Placement] | Literal[Instead.ALIKE]:
        op = call.op
        if self._graph.writes[op.name] and not self._functions.runs(op):
            return self._write(call)
        if op.type == "ReadVariableOp":
            return [call.inputs[0]]
        if op.type in ("VariableShape", "VarIsInitializedOp"):
            return [REPLICATE]
        if op.type == "Assert":
            return self._assert(call)
        if self._is_hidden(op):
            return self._tower_zero.hide(call)
        if self._is_tower_zeros(call):
            return Instead.ALIKE
        is_whole = self._undivided or op.name in self._faulty
        made = self._without_rule(call) if is_whole else self._placer.place(call)
        if made is Instead.WHOLE:
            made = self._make_whole(call)
        return Instead.ALIKE if self._adds_in_no_order(call) else made

    def _is_hidden(self, op: tf.Operation) -> bool:
        """Return whether an op does something that no variable holds."""
        if op.type in PRINTS or self._functions.hides_state(op, REPEATABLE | rules.DRAWS):
            return True
        # TensorFlow does not list a generator's variable that only such a draw takes: all towers share that one.
        inputs = zip(self._graph.inputs[op.name], op.inputs, strict=True)
        handles = (name for name, tensor in inputs if tensor.dtype == tf.resource)
        return op.type in rules.DRAWS and any(name not in self._graph.traced.role for name in handles)

    def _is_tower_zeros(self, call: Call) -> bool:
        """Return whether the result of an op of whole tensors depends on what the step itself does on tower 0 alone."""
        op = call.op
        finds = op.type.startswith("LookupTable") or self._functions.runs(op)
        if finds and not self._changed.isdisjoint(self._graph.inputs[op.name]):
            return True  # another tower would not know whether tower 0 has changed it yet
        unseen = op.type not in rules.SEEDED_DRAWS and self._functions.hides_state(op, REPEATABLE)
        return unseen and all(placed.whole for placed in call.inputs)

    def _adds_in_no_order(self, call: Call) -> bool:
        """Return whether towers compute an op's floats alike, and add them up in no order."""
        if not _computes_alike(call):
            return False
        kinds = {*self._functions.op_types(call.op)}
        if not self._on_gpus:
            return not kinds.isdisjoint(UNORDERED_ON_CPU)
        is_frozen = call.op.type in UNORDERED_IF_FROZEN and not call.op.get_attr("is_training")
        adds_slices = self._functions.runs(call.op) and not kinds.isdisjoint(ADDS_SLICES)
        return is_frozen or adds_slices or not kinds.isdisjoint(UNORDERED)

    def _without_rule(self, call: Call) -> Made:
        """Place an op of which every tower computes all: without its rule, and without its lengths."""
        if all(placed.whole for placed in call.inputs):
            return [REPLICATE] * len(call.op.outputs)
        if not has(call.inputs, Local):
            return Instead.WHOLE
        if call.op.type in rules.DRAWS or self._functions.runs(call.op):
            return Instead.ALIKE
        call.make_whole(Placement, but=Local)
        return [local_of(call.given[1])] * len(call.op.outputs)

    def _make_whole(self, call: Call) -> list[Placement] | Literal[Instead.ALIKE]:
        """Let every tower compute the same."""
        handles = {
            self._graph.inputs[call.op.name][i]
            for i, tensor in enumerate(call.tensors)
            if tensor.dtype == tf.resource and not call.inputs[i].whole
        }
        if handles:
            raise Unshared(handles)
        rows = call.inputs[0]
        if isinstance(rows, Shard) and (first := rules.rows_of_first(call, rows)) and not call.spares(0):
            with self._graph.building():
                call.tensors[0] = self._conversions.first_rows(call.tensors[0], rows, first, call.op)
            call.inputs[0] = REPLICATE
        call.make_whole(Placement)
        logger.debug("%s %s is made whole: %s", call.op.type, call.op.name, ", ".join(map(str, call.given[1])))
        if call.op.type not in rules.DRAWS and self._functions.hides_state(call.op, REPEATABLE):
            return Instead.ALIKE
        return [REPLICATE] * len(call.op.outputs)

    def _assert(self, call: Call) -> list[Placement]:
        """Let each tower run an assertion about its own rows."""
        placed = call.inputs[0]
        if isinstance(placed, Partial) and placed != rules.EVERY:
            call.require(0, REPLICATE)
        call.make_whole(Recomputed)
        return []

    def _write(self, call: Call) -> list[Placement]:
        """Write each tower's own of a variable that towers hold in parts, else the batch's value."""
        op = call.op
        handles = {handle: self._graph.traced.role[handle] for handle in self._graph.writes[op.name]}
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
        if op.type == "RngReadAndSkip":
            return [call.inputs[0]]  # a part of the state, placed alike
        return [REPLICATE] * len(op.outputs)


def _computes_alike(call: Call) -> bool:
    """Return whether towers compute an op's floats alike: then kernels must not add them up in no order."""
    floats = any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in call.tensors)
    return floats and all(placed.whole for placed in call.inputs)


def _known_shapes(traced: TracedGraph) -> dict[TensorName, Any]:
    """Return the shapes for `Axes` of arguments, row splits, and variables whose rows are left open."""
    rowed = [name for name, placed in traced.argument_placements.items() if placed == Shard()]
    return {
        **{name: given_rows(traced.tensor(name)) for name in rowed},
        **{
            handle: Items(tuple((each * batch.rows, *variable.shape[1:]) for batch in BATCHES))
            for handle, variable, each in traced.opened
        },
        **{name: tuple((batch.rows + 1,) for batch in BATCHES) for name in traced.row_splits},
    }


def _joining_slices(traced: TracedGraph) -> set[OpName]:
    """Return the ops that put the slices of a weight that is used several times one after the other."""
    marks = traced.trace.marks.items()
    marked = [name for name, mark in marks if mark.purpose == Purpose.SLICES and name in traced.inputs]
    joined = {op_name(tensor) for name in marked for tensor in traced.inputs[name]}
    return joined & {op.name for op in traced.ops if op.type == "ConcatV2"}


def _fold_metrics(graph: StepBuilder) -> list[OpName]:
    """Add up metric state at the end of a step: the first tower of a process keeps the sum, the others zero.

    Returns:
        The ops that write it.
    """
    traced, folds = graph.traced, list[OpName]()
    users: dict[TensorName, list[tf.Operation]] = {n: [] for n, r in traced.role.items() if r is Role.SUM}
    for op in graph.ops:
        for name in users.keys() & set(graph.inputs[op.name]):
            users[name].append(op)
    for name, ops in users.items():
        writers = [op for op in ops if name in graph.writes[op.name]]
        if not writers:
            continue
        last = writers[-1]
        # A read of the step's own after the last write, which is added up, serves as well.
        reads = (op for op in ops if op.type == "ReadVariableOp" and graph.is_added_up(op.outputs[0]))
        read = next((op for op in reads if last.name in graph.controls[op.name]), None)
        if read is None:
            read = graph.read(name, after=writers).op
        total = graph.exchange(read.outputs[0], ADD_UP, last)
        before = len(graph.ops)
        with graph.building():
            kept = tf.where(traced.trace.site.is_first, total, tf.zeros_like(total))
        graph.require(graph.assign(name, kept, after=[*ops, read]).name)
        folds += [op.name for op in graph.ops[before:]]
    return folds
