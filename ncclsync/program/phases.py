"""Divide the segments of a step whose towers compute several shards each into work per shard and work per tower.

A *phase* is a part of a segment. It runs for each shard, on the shard's rows, random numbers and part of a metric; or
once for a tower, on what is the same for all shards, as every write of a weight is. Per-shard values reach
once-per-tower ops only through exchanges, so an op's inputs determine its phase.

The phases of a segment alternate: once, shards, once, … Most segments have one phase of either sort, and one of the two
is empty: what shards need of a tower's is computed in their phase.
"""

from collections.abc import Iterator

from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.program.graph import StepGraph
from ncclsync.program.schedule import Schedule, ancestors, dependencies
from ncclsync.semantics.placing import REPEATABLE
from ncclsync.sharding.roles import Role


def divide(graph: StepGraph, scheduled: Schedule) -> Schedule:
    """Return a schedule whose segments, of which one may become several, run for each shard or once for a tower.

    Raises:
        NcclSyncError: an op writes both what towers share and what belongs to a shard, or a loop or branch writes what
            towers share and gives what belongs to a shard.
    """
    kinds = _Kinds(graph)
    parts = [_Part(graph, scheduled, kinds, number) for number in range(scheduled.count)]
    numbers: dict[tuple[int, int], int] = {}
    for number, part in enumerate(parts):
        for phase in sorted(part.used()) or [0]:
            numbers[number, phase] = len(numbers)
    return Schedule(
        {name: numbers[number, parts[number].phase[name]] for name, number in scheduled.segments.items()},
        {result: numbers[number, parts[number].sends] for result, number in scheduled.sent.items()},
        {result: numbers[number, parts[number].receives[result]] for result, number in scheduled.received.items()},
        len(numbers),
        min(number for (part, _), number in numbers.items() if part == scheduled.last_meeting),
        tuple(phase % 2 == 0 for _, phase in numbers),
    )


class _Kinds:
    """Say which ops are for each shard, which must run once, and which may be in either phase."""

    def __init__(self, graph: StepGraph) -> None:
        self.shards: set[OpName] = set()
        self.once: set[OpName] = set()
        # If an exchange has a condition, its result is the shard's own where the condition is False.
        own = {result for result, exchange in graph.exchanges.items() if exchange.when or exchange.collective.differs}
        self.own = frozenset(own)
        for op in graph.ops:
            if op.name in graph.traced.placeholders:
                continue
            roles = {graph.traced.role[handle] for handle in graph.writes[op.name]}
            inputs, results = graph.inputs[op.name], {output.name for output in op.outputs}
            if Role.SAME in roles and graph.functions.runs(op) and not graph.differing.isdisjoint(results):
                raise NcclSyncError(
                    "Expected a step with shards= in which no loop or branch both writes a weight and gives rows. "
                    f"Received: {op.type}, at {user_line(op.traceback)}. Write the weight in a branch of its own"
                )
            if Role.SAME in roles:
                if len(roles) > 1:
                    raise NcclSyncError(
                        "Expected a step with shards= in which no op writes both a weight and what belongs to a shard, "
                        "as metrics, random state and accumulated gradients do. "
                        f"Received: {op.type}, at {user_line(op.traceback)}. Write them in ops of their own"
                    )
                self.once.add(op.name)
                continue
            rests_on_own = not own.isdisjoint(inputs)
            if rests_on_own or not graph.differing.isdisjoint(results.union(inputs)):
                self.shards.add(op.name)
                own.update(results if rests_on_own else ())
            elif graph.functions.hides_state(op, REPEATABLE):
                self.once.add(op.name)


class _Part:
    """Divide one segment.

    Attributes:
        phase: by name of an op of the segment; even: once.
        sends: the phase that sends.
        receives: by name of an exchange's result that arrives with this segment: the phase that gets it.
    """

    def __init__(self, graph: StepGraph, scheduled: Schedule, kinds: _Kinds, number: int) -> None:
        self._graph, self._kinds = graph, kinds
        self._here = {name for name, of in scheduled.segments.items() if of == number}
        self._sent = [e for result, e in graph.exchanges.items() if scheduled.sent[result] == number]
        self._arrives = {result for result, of in scheduled.received.items() if of == number}
        final = number == scheduled.count - 1
        # The ops that shards compute, and all that these wait for.
        computed = [name for name in self._here if name in kinds.shards]
        needed = ancestors(graph, computed + [name for name in self._roots_sent() if name in self._here], self._here)
        # Ops that shards need, and for which ops outside the shards' work wait.
        self._awaited = {
            parent for name in needed - kinds.shards for parent, _ in dependencies(graph, name) if parent in needed
        }
        self.phase: dict[OpName, int] = {}
        for op in graph.ops:
            if op.name in needed:
                self.phase[op.name] = self._earliest(op.name)
        self.sends = max([1, *(self.phase.get(name, 0) for name in self._roots_sent())])
        self.sends += self.sends % 2 == 0
        own = self._arrives & kinds.own
        shards = any(phase % 2 for phase in self.phase.values()) or self._sent or own
        top = max([*self.phase.values(), *([self.sends] if self._sent else []), 1 if shards else 0])
        last = top + top % 2
        for op in graph.ops:
            if op.name in self._here and op.name not in needed:
                # A weight is written when all else is done.
                self.phase[op.name] = last if final else self._earliest(op.name)
                self.phase[op.name] += self.phase[op.name] % 2
        used_in: dict[TensorName, list[int]] = {result: [] for result in self._arrives}
        for op, phase in self.phase.items():
            for name in self._arrives.intersection(graph.inputs[op]):
                used_in[name].append(phase)
        for exchange in self._sent:
            for name in self._arrives.intersection([exchange.source, exchange.when or ""]):
                used_in[name].append(self.sends)
        # In the phase that uses it first, or once before the shards do.
        self.receives = {result: min(used_in[result], default=last) // 2 * 2 for result in self._arrives}
        self.receives.update(dict.fromkeys(own, 1))

    def used(self) -> set[int]:
        """Return the phases that there are."""
        return {*self.phase.values(), *self.receives.values(), *([self.sends] if self._sent else [])}

    def _roots_sent(self) -> Iterator[OpName]:
        for exchange in self._sent:
            for name in (exchange.source, exchange.when):
                if name is not None:
                    yield op_name(name)

    def _earliest(self, name: OpName) -> int:
        before = [self.phase[parent] for parent, _ in dependencies(self._graph, name) if parent in self.phase]
        before += [1 for one in self._graph.inputs[name] if one in self._arrives and one in self._kinds.own]
        phase = max(before, default=0)
        if name in self._kinds.shards:
            return phase + (phase % 2 == 0)
        if name in self._kinds.once:
            return phase + phase % 2
        if self._graph.by_name[name].type == "ReadVariableOp" and name not in self._awaited:
            return max(phase, 1)  # so that its value is not held from one phase to the next
        return phase
