"""Place an op: ask its rule which placements its results have, and convert its inputs to those that the rule takes.

A `Placer` serves the step (`partition.py`), or, in a `FunctionPlacer`, a function that a loop, a branch or a call runs.
"""

import dataclasses
import enum
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.semantics import rules, uneven
from ncclsync.semantics.axes import BATCHES, Axes, Rows, are_kept, given_by, passed_on
from ncclsync.semantics.functions import BRANCHES, LOOPS, Functions, in_order
from ncclsync.semantics.placements import (
    COUNTER,
    EACH,
    LOCAL,
    MEAN,
    REPLICATE,
    SAMPLES,
    SEEDED,
    SUM,
    Counts,
    EachRow,
    Kept,
    ListOf,
    Local,
    Numbers,
    OneOf,
    Partial,
    Piece,
    Placement,
    Replicate,
    Rowed,
    Shard,
    SummedAxes,
    has,
    only,
    rows,
)
from ncclsync.semantics.rules import Call
from ncclsync.semantics.scope import Conversion, Lengths, Scope

logger = logging.getLogger("ncclsync")


@dataclasses.dataclass(frozen=True)
class Change:
    """Bring a tensor of a function to another placement, by the tower's share of the batch alone.

    Attributes:
        op: the op that takes it as its input `index`; None: it is the function's result of that index.
        before, after: the placements.
    """

    op: OpName | None
    index: int
    before: Placement
    after: Placement


@dataclasses.dataclass(frozen=True)
class Body:
    """Describe a function of which each tower runs its own part.

    Attributes:
        op: the loop, the branch or the call that runs it.
        name: the function's.
        graph: the function.
        axes: of the graph.
        placements: by name of its tensors.
        changes: what has to be put into it.
        bodies: of its own ops.
    """

    op: tf.Operation
    name: str
    graph: Any
    axes: Axes
    placements: Mapping[TensorName, Placement]
    changes: Sequence[Change]
    bodies: Sequence["Body"]

    def every(self) -> "Iterator[Body]":
        """Yield this function, and all that it runs, directly or not."""
        yield self
        for body in self.bodies:
            yield from body.every()


# Stateful ops whose results are equal on all towers if their inputs are.
REPEATABLE = rules.names("""
    Assert Case If LookupTableExportV2 LookupTableFind LookupTableFindV2 LookupTableSizeV2 NoOp PartitionedCall Print
    PrintV2 ReadVariableOp ResourceGather ResourceGatherNd StatefulPartitionedCall VarHandleOp VarIsInitializedOp
    VariableShape While Empty EnsureShape TensorListPopBack StringFormat RngReadAndSkip
""")
PRINTS = frozenset({"Print", "PrintV2"})
COMPUTED_WHOLE = "Exact, but every tower computes that op whole: {}"


def is_unrepeatable(op: tf.Operation, functions: Functions) -> bool:
    """Return whether an op must run once: it prints, or has a state that no variable holds, as Python and queues do."""
    return functions.hides_state(op, REPEATABLE) or any(one in PRINTS for one in functions.op_types(op))


class Found(Exception):
    """What placing finds of a step: no fault of ncclsync's own."""


class Refused(Found):
    """A function cannot be run by each tower for its own rows."""


def told_fault(fault: Exception, op: tf.Operation | None, what: str = "could not be divided among towers") -> str:
    """Say that ncclsync could not divide an op, or any of a step, by a fault of its own; or what else it could not do.

    Raises:
        Exception: the fault, if NCCLSYNC_FAULTS in the environment is "raise", as in ncclsync's own tests.
    """
    if os.environ.get("NCCLSYNC_FAULTS") == "raise":
        raise fault
    logger.debug("ncclsync %s", what, exc_info=fault)
    where = "the step" if op is None else f"{op.type}, at {user_line(op.traceback)},"
    return f"{where} {what}, by a fault of ncclsync's own ({type(fault).__name__}: {fault}). Please report this line"


class Instead(enum.Enum):
    """Say what becomes of an op that towers cannot compute by their rows."""

    WHOLE = "whole"  # every tower computes it, on the batch's values
    ALIKE = "alike"  # tower 0 computes it, on the batch's values, and all towers take its results


# How the results of an op are placed, or what becomes of it.
Made = list[Placement] | Instead


class Placer:
    """Place ops one by one.

    Attributes:
        scope: where the ops stand.
        draws: the user's lines that draw numbers which are each tower's own.
        bodies: the functions that ops run which were placed by rows.
    """

    def __init__(self, scope: Scope, row_by_row: "RowByRow | None" = None) -> None:
        """Begin; `row_by_row` places what a loop over rows does with its row."""
        self.scope = scope
        self.draws: list[str] = []
        self.bodies: list[Body] = []
        self._row_by_row = row_by_row

    def place(self, call: Call) -> Made:
        """Choose how the results of an op are placed, and convert its inputs as that requires.

        If that fails by a fault of ncclsync's own, the op is to be made whole, as it is if its rule says nothing.
        """
        ran = len(self.bodies)
        try:
            made = self._place(call)
        except (Found, NcclSyncError):
            raise
        except Exception as fault:  # of any kind: of the rules', of the inference of shapes, or of their conversions
            self.scope.functions.faults.append(COMPUTED_WHOLE.format(told_fault(fault, call.op)))
            made = Instead.WHOLE
        if isinstance(made, Instead):
            call.begin_anew()
            del self.bodies[ran:]
        return made

    def _place(self, call: Call) -> Made:
        axes = self.scope.axes
        for output in call.op.outputs:
            if output.shape.rank is None:
                axes.refine(output)
        made = self._by_kind(call)
        results: list[Placement] = made if isinstance(made, list) else [REPLICATE] * len(call.op.outputs)
        for i, (output, placed) in enumerate(zip(call.op.outputs, results, strict=True)):
            lengths = output.shape.as_list() if output.shape.rank is not None else []
            if isinstance(placed, Shard):
                results[i] = self._with_rows(output, placed, call)
                del lengths[placed.axis : placed.axis + 1]
            if None in lengths:
                axes.refine(output)
        return made

    def _with_rows(self, output: tf.Tensor, placed: Shard, call: Call) -> Shard:
        """Return the placement with the number of rows for each sample, if it is known."""
        if placed.unit:
            return placed
        axes, lengths = self.scope.axes, self.scope.lengths
        sure = not lengths.stretched and _keeps_rows(call, output, placed.axis)
        if not (placed.each and sure):
            count = axes.rows(output, placed.axis)
            if not placed.each and count and count % placed.blocks == 0:
                placed = dataclasses.replace(placed, each=count // placed.blocks)
            lengths.stretched |= placed.rows not in (None, count)
        if placed.rows and output.shape.rank and output.shape[placed.axis] is not None:
            lengths.fixed[output.shape[placed.axis]] = placed.rows
        if placed.rows and output.shape.rank:
            axes.learn(output, placed.axis, placed.rows, sure=sure)
        return placed

    def _by_kind(self, call: Call) -> Made:
        op = call.op
        if op.type in rules.DRAWS:
            return self._draw(call)
        begins = op.type in ("TensorListReserve", "EmptyTensorList") and only(call.inputs, Replicate, Counts)
        if begins and not any(isinstance(placed, Counts) and placed.unit for placed in call.inputs):
            listed = rules.RULES[op.type](call)
            return Instead.WHOLE if listed is None else list(listed)
        if self._row_by_row is not None and has(call.inputs, Local, ListOf):
            return self._row_by_row.place(call)
        if op.type in ("OptionalNone", "OptionalFromValue") and len(op.inputs) < 2:
            return [ListOf(call.inputs[0] if call.inputs else None)]
        if only(call.inputs, Replicate):
            return [REPLICATE] * len(op.outputs)
        if self.scope.functions.runs(op):
            return self._function(call)
        if has(call.inputs, Local):
            if only(call.inputs, Local, Replicate, Counts):
                if SEEDED in call.inputs:
                    # A tower's count of rows belongs to its rows, not to its random numbers.
                    call.make_whole(Counts)
                return [local_of(call.inputs)] * len(op.outputs)
            call.count_local_as_whole()
        made = self._by_rule(call)
        # A list does not tell that some of its items are a tower's own.
        if made is None or (call.local and has(made, ListOf)):
            return Instead.WHOLE
        alike = [placed for placed in call.given[1] if isinstance(placed, Shard)]
        divided = [placed for placed in call.inputs if isinstance(placed, (Shard, Piece, Numbers))]
        # If every sharded input has identical rows, so has the result, unless an ordinary sharded input was mixed in.
        if alike and len(alike) == len(divided) and not call.local and all(one.alike for one in alike):
            each = alike[0].each
            made = [
                dataclasses.replace(p, alike=True)
                if isinstance(p, Shard) and p == Shard(p.axis) and p.each == each is not None
                else p
                for p in made
            ]
        if call.local:
            local = local_of(call.given[1])
            made = [local if placed.whole else placed for placed in made]
        return list(made)

    def _by_rule(self, call: Call) -> Sequence[Placement] | None:
        kind = call.op.type
        if has(call.inputs, Piece, Numbers):
            made = rules.NUMBERED[kind](call) if kind in rules.NUMBERED else None
            if made is not None:
                return made
            call.loose = None  # numbers of the batch's own rows are nothing to look at
            if has(call.inputs, Piece):
                return None
            for i, placed in enumerate(call.inputs):  # numbers of a tower's own rows become those of the batch's
                if isinstance(placed, Numbers):
                    call.require(i, placed.by)
        units = {placed.unit for placed in call.inputs if isinstance(placed, Rowed)}
        if len(units) > 1 or (units - {SAMPLES} and kind not in uneven.OF_ANY_UNIT):
            return None
        call.unit = units.pop() if units else SAMPLES
        made = self._of_one_unit(call)
        if made is None or not call.unit:
            return made
        return [dataclasses.replace(one, unit=call.unit) if isinstance(one, Rowed) else one for one in made]

    def _of_one_unit(self, call: Call) -> Sequence[Placement] | None:
        """Ask the rule of an op that takes rows of samples, or of another unit."""
        kind = call.op.type
        if has(call.inputs, Partial):
            for output in call.op.outputs:
                call.axes.refine(output)
            made = rules.LINEAR[kind](call) if kind in rules.LINEAR else None
            if made is not None:
                return made
            for i, placed in enumerate(call.inputs):
                if isinstance(placed, Partial):
                    call.require(i, self.scope.conversion.reduced(call.tensors[i]))
        if has(call.inputs, Counts):
            compared = call.inputs[: rules.COMPARING.get(kind, 0)]
            every = compared and all(isinstance(placed, Counts) and 0 not in placed.counts for placed in compared)
            counts = kind in rules.COUNTING or every
            made = self._counted(call) if counts else None
            if made is not None:
                return made
            if kind not in rules.TAKING_COUNTS:
                call.make_whole(Counts)
        if all(placed.whole for placed in call.inputs):
            return [REPLICATE] * len(call.op.outputs)
        if kind not in rules.KEEPING_ALIKE:
            call.inputs[:] = map(rules.counted, call.inputs)
        known = all(tensor.shape.rank is not None or tensor.dtype == tf.resource for tensor in call.op.inputs)
        rule = rules.RULES.get(kind) if known or kind in rules.OF_ANY_RANK else None
        return None if rule is None else rule(call)

    def _counted(self, call: Call) -> list[Placement] | None:
        """Place arithmetic on counts of rows: compute it for several towers, `_TOWERS`, and compare."""
        fits = all(output.dtype in (tf.int32, tf.int64) for output in call.op.outputs)
        if not fits or not only(call.inputs, Counts, Replicate):
            return None
        given = []
        for tensor, placed in zip(call.op.inputs, call.inputs, strict=True):
            values = call.axes.values(tensor)
            if values is None and not (tensor.shape.is_fully_defined() and tensor.dtype.is_integer):
                return None
            if values is None:
                values = tuple(np.full(tensor.shape, batch.open, tensor.dtype.as_numpy_dtype) for batch in BATCHES)
            given.append([_of_tower(values, placed, *tower) for tower in _TOWERS])
        found = call.axes.computed(call.op, given)
        if found is None or any(len({np.shape(value) for value in case}) > 1 for case in found):
            return None
        counts = list(map(_counts_of, found))
        return None if None in counts else [rows(one) for one in counts if one is not None]

    def _draw(self, call: Call) -> Made:
        """Place random numbers: of one seed, whole and alike; else each tower's own for its rows."""
        seeded = call.op.type in rules.SEEDED_DRAWS
        if seeded and not has(call.inputs, Local):
            return Instead.WHOLE
        call.count_local_as_whole()
        made = rules.RULES[call.op.type](call)
        if made is None:
            return Instead.ALIKE
        if seeded:  # `draws.check_draws` reports draws from a state that TensorFlow hides
            self.draws.append(user_line(call.op.traceback))
        return list(made)

    def _function(self, call: Call) -> Made:
        """Place a loop, a branch or a call: by each tower's rows if all ops in it have rules, else whole."""
        if has(call.inputs, SummedAxes, Kept):
            return Instead.WHOLE
        drawn, ran = len(self.draws), len(self.bodies)
        parts = [
            i for i, p in enumerate(call.inputs) if isinstance(p, Partial) and call.tensors[i].dtype != tf.resource
        ]
        try:
            try:
                made = self._function_by_rows(call)
            except Refused:  # a part, such as of a maximum, is often one number: once it is whole, rows may stay rows
                del self.draws[drawn:], self.bodies[ran:]
                call.begin_anew()
                for i in parts:
                    call.require(i, self.scope.conversion.reduced(call.tensors[i]))
                if not parts:
                    raise
                made = self._function_by_rows(call)
            self.draws[drawn:] = [user_line(call.op.traceback)] * (len(self.draws) > drawn)
            return made
        except Refused as reason:
            del self.draws[drawn:], self.bodies[ran:]
            logger.debug("%s %s is made whole: %s", call.op.type, call.op.name, reason)
            call.begin_anew()
            handles = any(
                isinstance(p, Local) and t.dtype == tf.resource for p, t in zip(call.inputs, call.tensors, strict=True)
            )
            if has(call.inputs, Local) and only(call.inputs, Local, Replicate, Counts) and not handles:
                return [local_of(call.inputs)] * len(call.op.outputs)
            return Instead.WHOLE

    def _function_by_rows(self, call: Call) -> list[Placement]:
        op = call.op
        if op.type in LOOPS:
            placed, after = self._loop(call)
            for i, one in enumerate(placed):
                if one == COUNTER:
                    continue
                given = call.inputs[i]
                if not isinstance(one, ListOf):
                    shape = call.axes.lengths(op.inputs[i])
                    unknown = isinstance(one, Shard) and (shape is None or shape[one.axis] in (None, 1, Rows(0)))
                    if unknown and given.whole:  # it has to be known to have all rows
                        raise Refused(f"a loop's variable that becomes {one} begins with {shape}")
                    call.require(i, one)
                elif _of_zeros(call, i) and one.of in (SUM, REPLICATE):
                    call.inputs[i] = one
                elif given != one and isinstance(given, ListOf) and given.of is not None:
                    raise Refused(f"a list begins as {given.of} and becomes {one.of}")
            return after
        if op.type in BRANCHES:
            if isinstance(call.inputs[0], Local):
                raise Refused("the condition of the branch is local to each tower")
            call.require(0, REPLICATE)
            named, taken = self.scope.functions.called_by(op), self.scope.functions.taken_by(op, call.constant(0))
            by_name = {n: [_in_branch(one, i, len(named)) for one in call.inputs[1:]] for i, n in enumerate(named)}
            ways = [self._body(op, name, by_name[name]) for name in taken]
            tensors = [*zip(*(way.graph.outputs for way in ways), strict=True)]
            made = zip(*(way.made for way in ways), strict=True)
            kept = [taken == named and are_kept(*one) for one in zip(op.outputs, tensors, strict=True)]
            placed = [_any_of(*one) for one in zip(made, tensors, kept, strict=True)]
            for way in ways:
                way.bring_results(placed)
            return placed
        (name,) = self.scope.functions.called_by(op)
        return self._body(op, name, call.inputs).made

    def _loop(self, call: Call) -> tuple[list[Placement], list[Placement]]:
        """Place a loop's variables, while it runs and afterwards, so that their begins and the body's results agree."""
        op, placed = call.op, list(call.inputs)
        body, condition = op.get_attr("body").name, op.get_attr("cond").name
        each = {one.of.each for one in placed if isinstance(one, ListOf) and isinstance(one.of, EachRow)}
        if each:
            return self._loop_over_rows(call, body, condition, each)
        # Lists of weights' gradients that begin as zeros: what the body adds a part to has parts, others are whole.
        zeros = [i for i in range(len(placed)) if _of_zeros(call, i)]
        placed = [_listed(REPLICATE, p) if i in zeros else p for i, p in enumerate(placed)]
        for _ in range(8):
            # A state that is whole when the loop begins may have to be divided: the body shows it.
            tried = self._body(op, body, placed, lenient=True)
            if summed := tried.added_to().intersection(zeros):
                placed = [_listed(SUM, p) if i in summed else p for i, p in enumerate(placed)]
                continue
            results = zip(placed, tried.made, tried.graph.outputs, strict=True)
            joined = [(_is_floating([t]) and _summed((one, two))) or _joined(one, two) for one, two, t in results]
            if joined == placed:
                if self._body(op, condition, placed).made != [REPLICATE]:
                    raise Refused("whether the loop goes on depends on rows")
                self._body(op, body, placed).bring_results(placed)
                return placed, placed
            placed = joined
        raise Refused("the loop's variables are placed anew each time")

    def _loop_over_rows(
        self, call: Call, body: str, condition: str, each: set[int | None]
    ) -> tuple[list[Placement], list[Placement]]:
        """Place a loop that takes one of a tower's rows after the other, as `tf.map_fn` does, and its gradient."""
        op = call.op
        graph, _ = call.axes.body(op, body)
        stays = [passed_on(tensor) is given for tensor, given in zip(graph.outputs, graph.inputs, strict=True)]
        if self.scope.row_by_row or len(each) > 1 or each == {None}:
            raise Refused("it is not known to be a loop over rows")
        placed = [
            COUNTER if p.whole and not stays[i] and np.array_equal(call.constant(i), 0) else p
            for i, p in enumerate(call.inputs)
        ]
        made: list[Placement] = []
        for lenient in (True, True, True, False):
            made = self._body(op, body, placed, lenient, row_by_row=True).made
            placed = [_joined(one, two) for one, two in zip(placed, made, strict=True)]
        goes_on = self._body(op, condition, placed, row_by_row=True).made
        counts = {one.counts for one in placed if isinstance(one, Counts)}
        if goes_on != [LOCAL] or counts != {(one,) for one in each}:
            raise Refused("the loop does not end with the last row")
        carried = [p for p, s in zip(placed, stays, strict=True) if not s]
        if made != placed or any(p.whole or (isinstance(p, Local) and p != COUNTER) for p in carried):
            raise Refused("one row's results rest on the row before")
        return placed, [rows((*each,)) if p == COUNTER else p for p in placed]

    def _body(
        self, op: tf.Operation, name: str, placed: Sequence[Placement], lenient: bool = False, row_by_row: bool = False
    ) -> "FunctionPlacer":
        """Place a function that an op runs, with inputs that are placed so."""
        graph, axes = self.scope.axes.body(op, name)
        body = FunctionPlacer(graph, axes, self.scope, lenient=lenient, row_by_row=row_by_row)
        body.place(placed)
        if not body.scope.lenient:
            self.bodies.append(Body(op, name, graph, axes, body.placements, body.changes, body.placer.bodies))
        self.draws += body.placer.draws
        self.scope.lengths.stretched |= body.scope.lengths.stretched
        return body


# By numbers of BATCHES: the tower's rows, and the whole batch. A count of the batch's rows is no count of the tower's.
_TOWERS = ((0, 0), (1, 0), (2, 2), (0, 1), (1, 1))


def _keeps_rows(call: Call, output: tf.Tensor, axis: int) -> bool:
    """Return whether only sharded inputs decide how many rows an op gives: no other input reaches up to the axis."""
    rank = output.shape.rank
    return (
        rank is not None
        and call.op.type in rules.ELEMENTWISE
        and all(
            (isinstance(placed, Shard) and not placed.unit)
            or (tensor.shape.rank is not None and tensor.shape.rank + axis < rank)
            for tensor, placed in zip(*call.given, strict=True)
        )
    )


def _of_tower(values: Sequence[np.ndarray], placed: Placement, own: int, batch: int) -> np.ndarray:
    """Return the integers of a tower that has the rows of `BATCHES[own]`, of the batch `BATCHES[batch]`."""
    whole = values[batch]
    if not isinstance(placed, Counts):
        return whole
    rows, opened = BATCHES[own]
    counts = np.reshape([opened if one is None else one for one in placed.counts], whole.shape)
    return np.where(counts == 0, whole, counts * rows).astype(whole.dtype)


def _counts_of(values: Sequence[np.ndarray]) -> tuple[int | None, ...] | None:
    """Return how many rows of each sample numbers count, given for `_TOWERS`, as `Counts` has it; None: no count."""
    counts: list[int | None] = []
    for one, many, opened, *others in zip(*map(np.ravel, values), strict=True):
        if one == many and others[0] == others[1]:
            counts.append(0)
        elif one <= 0 or many != one * BATCHES[1].rows or [one, many] != others:
            return None
        else:
            counts.append(int(one) if one == opened else None)
    return tuple(counts)


def _of_zeros(call: Call, index: int) -> bool:
    """Return whether an input is a list of zeros: parts of zeros, and whole."""
    placed = call.inputs[index]
    return isinstance(placed, ListOf) and placed.of in (SUM, REPLICATE) and rules.is_zero(call.op.inputs[index])


def _listed(of: Placement, before: Placement) -> Placement:
    """Return the placement of a list of such tensors."""
    return ListOf(of, before.shape if isinstance(before, ListOf) else ())


def _is_new(tensor: tf.Tensor, placed: Placement) -> bool:
    """Return whether a tensor is a list that has just been made, and is empty."""
    new = passed_on(tensor).op.type in ("EmptyTensorList", "TensorListReserve")
    return new and isinstance(placed, ListOf) and placed.of is None


def _joined(begin: Placement, made: Placement) -> Placement:
    """Return the placement of a loop variable that begins so, and that the body makes so."""
    if isinstance(begin, ListOf) and isinstance(made, ListOf) and begin.of is not None and begin.of.whole:
        return made
    if begin.whole and isinstance(made, (Shard, Partial, Local, ListOf)):
        return made
    if both := rules.either(begin, made):
        return both
    if isinstance(begin, Local) and made.whole:
        return begin
    raise Refused(f"a loop's variable begins as {begin} and becomes {made}")


def serves(before: Placement, after: Placement) -> bool:
    """Return whether a tensor of one placement is, as it stands, also of the other."""
    if isinstance(before, Shard) and isinstance(after, Shard):
        return before.axis == after.axis and rules.same_rows(before, after)
    return before == after or (before.whole and after == MEAN) or isinstance(after, Local)


def local_of(inputs: Sequence[Placement]) -> Placement:
    """Return how the results of LOCAL inputs are placed."""
    return SEEDED if SEEDED in inputs else LOCAL


def _in_branch(placed: Placement, index: int, count: int) -> Placement:
    """Return how an input is placed in one of so many branches: what that branch has kept for it, as it has it."""
    return placed.ways[index] if isinstance(placed, OneOf) and len(placed.ways) == count else placed


def _any_of(ways: Sequence[Placement], tensors: Sequence[tf.Tensor], is_each: bool) -> Placement:
    """Return the placement of a result that the branches of an op give as these tensors, placed these ways.

    `is_each`: whether each branch takes its own of it.
    """
    if is_each and only(ways, ListOf) and len(set(ways)) > 1:
        return OneOf(tuple(ways))
    given = given_by([*zip(tensors, ways, strict=True)])
    if _is_floating(tensors) and (summed := _summed([one for _, one in given])):
        return summed
    if SUM in ways:  # where a branch has no gradient it gives zeros
        given = [(tensor, SUM if one.whole and rules.is_zero(tensor) else one) for tensor, one in given]
    return functools.reduce(_either, [one for _, one in given])


def _either(one: Placement, two: Placement) -> Placement:
    """Return the placement of the result of two branches."""
    if both := rules.either(one, two):
        return both
    if only((one, two), Local, Replicate):
        return local_of((one, two))
    raise Refused(f"branches give {one} and {two}")


class RowByRow:
    """Place what a loop over a tower's rows computes of its row."""

    def __init__(self, graph: Any, scope: Scope) -> None:
        """Take the function that is placed, the loop's body or its condition."""
        self._scope = scope
        self._pops = self._counts = False
        pairs = zip(graph.inputs, graph.outputs, strict=False)
        # Inputs that the function changes.
        self._carried = {given.name for given, made in pairs if passed_on(made) is not given}

    def place(self, call: Call) -> list[Placement]:
        """Place an op of a loop over a tower's rows: what it computes of one row, and of whole tensors, is that row's.

        An op is refused if it takes anything else, or takes the row's number other than to find the row in a list.
        """
        op = call.op
        # A list that a row begins is that row's.
        inputs = [EACH if _is_new(t, p) else p for t, p in zip(op.inputs, call.inputs, strict=True)]
        numbers = {passed_on(t).op.type for t, one in zip(op.inputs, inputs, strict=True) if one == COUNTER}
        if op.type != "Identity" and not numbers <= {"Placeholder", "TensorListPopBack"}:
            raise Refused(f"{op.type} {op.name} computes with the number of another row")
        if has(inputs, ListOf) and op.type in rules.RULES:
            made = rules.RULES[op.type](call)
            self._pops |= op.type == "TensorListPopBack"
            self._counts |= "Placeholder" in numbers and op.type != "TensorListPushBack"
            if made is None or (self._pops and self._counts):  # a gradient takes the last row first
                raise Refused(f"{op.type} {op.name} mixes rows")
            return list(made)
        if COUNTER in inputs:
            if op.type == "Identity":
                return [COUNTER]
            if op.type in ("Add", "AddV2") and inputs[0] == COUNTER and np.array_equal(call.constant(1), 1):
                return [COUNTER]
            if op.type == "Less" and inputs[0] == COUNTER and isinstance(inputs[1], Counts):
                return [LOCAL]
            raise Refused(f"{op.type} {op.name} computes with the number of a row")
        sums = [
            SUM if one.whole and passed_on(t).name in self._carried else one
            for t, one in zip(op.inputs, inputs, strict=True)
        ]
        adds = op.type in ("Add", "AddV2", "AddN") and SUM in (sums if self._scope.lenient else inputs)
        adds = adds and set(sums) <= {SUM, EACH}
        if adds and op.outputs[0].dtype.is_floating and all(one.shape == op.outputs[0].shape for one in op.inputs):
            return [SUM]
        runs = self._scope.functions.runs(op)
        if runs and SEEDED in inputs and not rules.DRAWS.isdisjoint(self._scope.functions.op_types(op)):
            raise Refused(f"{op.type} {op.name} draws for each row the same numbers")
        reads = runs and not tf_compat.written_handles(op)  # as a loop within the loop
        handles = not reads and any(tensor.dtype == tf.resource for tensor in op.inputs)
        if not only(inputs, Local, Replicate) or handles:
            raise Refused(f"{op.type} {op.name} takes {', '.join(map(str, inputs))} in a loop over rows")
        result = EACH if EACH in inputs else LOCAL
        return [REPLICATE if output.dtype == tf.resource else result for output in op.outputs]


class WithinFunction(Conversion):
    """Bring inputs of a function's ops to other placements, where that takes no exchange: it cannot be put in."""

    def __init__(self, lenient: bool, row_by_row: bool) -> None:
        """Begin; see `Scope`."""
        self._lenient, self._row_by_row = lenient, row_by_row
        self.added_to: set[TensorName] = set()  # lists of whole items to which parts are added

    def convert(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> tf.Tensor:
        """Return the tensor, which serves as it is, or by a `Change`."""
        if self._lenient and before.whole and after == SUM and tensor.op.type == "TensorListPopBack":
            self.added_to.add(passed_on(tensor.op.inputs[0]).name)
        if (self._lenient and before.whole) or self.serves(tensor, before, after) or self.brings(before, after, op):
            return tensor
        raise Refused(f"{op.type} {op.name} needs {after} of {before}")

    def serves(self, tensor: tf.Tensor, before: Placement, after: Placement) -> bool:
        """Return whether a tensor serves as it is."""
        return serves(before, after) or (before in (REPLICATE, MEAN) and after == SUM and rules.is_zero(tensor))

    def brings(self, before: Placement, after: Placement, op: tf.Operation) -> bool:
        """Return whether the share alone brings an input of `op` to another placement: the number of all rows, a part.

        A number of rows is brought where it becomes a divisor or a factor; elsewhere it may be a length.
        """
        if self._row_by_row:
            return False
        if isinstance(before, Counts):
            return after.whole and not before.unit and op.type == "Cast" and op.outputs[0].dtype.is_floating
        return after == SUM and before in (REPLICATE, MEAN) and op.type in rules.LINEAR and _is_floating(op.outputs)


def _is_floating(tensors: Sequence[tf.Tensor]) -> bool:
    return all(tensor.dtype.is_floating for tensor in tensors)


def _summed(ways: Sequence[Placement]) -> Placement | None:
    """Return the placement of a number that may be placed in several of the ways in which sums and means are; or None.

    Each tower's part of it is made in the functions that give it.
    """
    if (MEAN not in ways and SUM not in ways) or not {*ways} <= {SUM, MEAN, REPLICATE}:
        return None
    return SUM if SUM in ways else MEAN


class FunctionPlacer:
    """Place a function's tensors. No exchange can be put in between: an op that would need one is refused.

    Attributes:
        graph: the function.
        scope: its own.
        placer: of its ops.
        placements: by name of its tensors.
        made: how its results are placed.
        changes: what has to be put into it.
    """

    def __init__(self, graph: Any, axes: Axes, outer: Scope, *, lenient: bool, row_by_row: bool) -> None:
        """Take a function that is run in the scope `outer`; see `Scope`."""
        lenient, row_by_row = lenient or outer.lenient, row_by_row or outer.row_by_row
        self.graph, self._conversion = graph, WithinFunction(lenient, row_by_row)
        lengths = Lengths(outer.lengths.fixed)
        self.scope = Scope(
            outer.functions, axes, self._conversion, lengths, within=True, lenient=lenient, row_by_row=row_by_row
        )
        self.placer = Placer(self.scope, RowByRow(graph, self.scope) if row_by_row else None)
        self.placements: dict[TensorName, Placement] = {}
        self.made: list[Placement] = []
        self.changes: list[Change] = []

    def added_to(self) -> set[int]:
        """Return which inputs are lists of whole items to which parts are added."""
        return {i for i, tensor in enumerate(self.graph.inputs) if tensor.name in self._conversion.added_to}

    def place(self, inputs: Sequence[Placement]) -> None:
        """Place its tensors, given its inputs' placements; raise `Refused` if an op needs other inputs."""
        placed = self.placements = {t.name: one for t, one in zip(self.graph.inputs, inputs, strict=True)}
        writes = {t.name for t in self.graph.inputs if t.dtype == tf.resource}
        for op in in_order(self.graph.get_operations()):
            if op.type != "Placeholder":
                call = Call(op, list(op.inputs), [placed[t.name] for t in op.inputs], self.scope)
                placed.update((t.name, one) for t, one in zip(op.outputs, self._place(call, writes), strict=True))
                given = enumerate(zip(*call.given, call.inputs, strict=True))
                changes = [Change(op.name, i, b, a) for i, (t, b, a) in given if self._is_changed(t, b, a, op)]
                self.changes += changes
        self.made = [placed[t.name] for t in self.graph.outputs]

    def bring_results(self, placed: Sequence[Placement]) -> None:
        """Let the function's results be placed so: what it adds up is the tower's part."""
        for i, (tensor, before, after) in enumerate(zip(self.graph.outputs, self.made, placed, strict=True)):
            stands = self._conversion.serves(tensor, before, after) or passed_on(tensor).op.type == "FakeParam"
            if after == SUM and before in (REPLICATE, MEAN) and not stands:
                if self.scope.row_by_row:
                    raise Refused(f"a row's {tensor.name} is placed as {before}")
                self.changes.append(Change(None, i, before, after))

    def _is_changed(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> bool:
        return not self._conversion.serves(tensor, before, after) and self._conversion.brings(before, after, op)

    def _place(self, call: Call, writes: set[TensorName]) -> list[Placement]:
        op, functions = call.op, self.scope.functions
        if op.type == "IdentityN":
            return call.inputs
        if op.type == "ReadVariableOp":
            self.scope.axes.refine(op.outputs[0])
            return call.inputs
        if tf_compat.written_handles(op) & writes and not functions.runs(op):
            return self._write(call)
        if op.type == "Assert":
            if not (call.inputs[0].whole or isinstance(call.inputs[0], Local) or call.inputs[0] == rules.EVERY):
                raise Refused("an assertion is about rows")
            return []
        if functions.hides_state(op, REPEATABLE | rules.DRAWS):
            raise Refused(f"{op.type} has a state of its own")
        made = self.placer.place(call)
        if made is Instead.ALIKE:
            raise Refused(f"{op.type} draws numbers that tower 0 would have to send")
        if made is not Instead.WHOLE:
            return made
        if all(placed.whole for placed in call.inputs):
            return [REPLICATE] * len(op.outputs)
        raise Refused(f"{op.type} {op.name} has no rule for {', '.join(map(str, call.inputs))}")

    def _write(self, call: Call) -> list[Placement]:
        handle, values = call.inputs[0], call.inputs[1:]
        if self.scope.row_by_row:
            raise Refused(f"{call.op.type} writes a variable for each row")
        if isinstance(handle, Local) or all(one.whole for one in call.inputs):
            return [REPLICATE] * len(call.op.outputs)
        if handle == SUM and call.op.type.startswith("Assign") and values[0] == SUM:
            return [REPLICATE] * len(call.op.outputs)
        raise Refused(f"{call.op.type} writes {', '.join(map(str, values))} to what is {handle}")
