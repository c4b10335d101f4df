"""Decide in which segment of a step each op lies, and after which one each exchange is sent.

Every op gets a *level*, one more than any exchange before it, and a level is a segment. Where the gradients
of one level fill several buckets that travel while the towers compute, it becomes several segments: as many
as there are buckets, each ending where a bucket is complete. The towers go on with the next one meanwhile,
and get what was exchanged in the segment after the last. The last level, which writes the weights, then becomes
a segment for each of these buckets: so a bucket, and the old values of the variables that it updates, take
memory only until its own variables are written.
Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.2.3, which does this by hooks as gradients come; here the traced graph gives their order.
"""

import bisect
import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence

from ncclsync.compat.names import OpName, TensorName, op_name, result_name
from ncclsync.ops import CollectiveKind
from ncclsync.ops.buckets import fill_buckets
from ncclsync.program.graph import StepGraph
from ncclsync.program.program import Exchange
from ncclsync.semantics.placing import REPEATABLE
from ncclsync.sharding.roles import Role

# The first bucket is small, so that something travels soon. Source: PyTorch's DistributedDataParallel.
_FIRST_BUCKET_BYTES = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Say in which segment each op and exchange is.

    Attributes:
        segments: by name of an op: the number of its segment.
        sent: by name of an exchange's result: the segment that ends with what it sends.
        received: by the same: the segment that is given the result.
        count: number of segments.
        last_meeting: see `Program`.
        once: [count] whether a segment runs once for each tower, not for each of its shards; empty where every
            tower has one shard. See `phases.py`.
    """

    segments: dict[OpName, int]
    sent: dict[TensorName, int]
    received: dict[TensorName, int]
    count: int
    last_meeting: int
    once: tuple[bool, ...] = ()


def schedule(graph: StepGraph, bucket_bytes: int | None) -> Schedule:
    """Schedule a step.

    Args:
        graph: the step, with its exchanges.
        bucket_bytes: the size of the buckets that travel while the towers compute; None: nothing does.
    """
    levels = _assign_levels(graph)
    leaving = {result: _available(graph, levels, result) - 1 for result in graph.exchanges}
    count = 1 + max([*levels.values(), *(level + 1 for level in leaving.values()), 0])
    of_level: dict[int, list[TensorName]] = collections.defaultdict(list)
    for result, level in leaving.items():
        of_level[level].append(result)
    parts: dict[OpName | TensorName, int] = {}  # also of exchanges' results; a level's last part where nothing stands
    begins = [0]  # of levels, and the end
    for level in range(count):
        inside = {name for name, own in levels.items() if own == level}
        buckets = _overlapping(graph, levels, level, of_level[level], bucket_bytes)
        for part, bucket in reversed(list(enumerate(buckets))):  # the earliest decides on shared ancestors
            sources = [graph.origin(result)[0] for result in bucket]
            parts.update(dict.fromkeys([*bucket, *ancestors(graph, sources, inside)], part))
        begins.append(begins[level] + max(len(buckets), 1))

    def segment(name: OpName | TensorName, level: int) -> int:
        return begins[level] + parts[name] if name in parts else begins[level + 1] - 1

    last_meeting = begins[-2]
    segments = {name: segment(name, level) for name, level in levels.items()}
    sent = {result: segment(result, level) for result, level in leaving.items()}
    received = {result: begins[level + 1] for result, level in leaving.items()}
    if bucket_bytes is not None:
        _divide_last(graph, segments, sent, received, last_meeting)
    return Schedule(segments, sent, received, 1 + max([*segments.values(), last_meeting]), last_meeting)


def _divide_last(
    graph: StepGraph,
    segments: dict[OpName, int],
    sent: dict[TensorName, int],
    received: dict[TensorName, int],
    last: int,
) -> None:
    """Divide the last segment into one for each earlier segment whose buckets it gets, as far as ops need no others.

    What rests on several comes with the latest of them, what rests on none where it is used first. Segments that write
    nothing are joined with the next.
    """
    arriving = [result for result, number in received.items() if number == last]
    order = {number: i for i, number in enumerate(sorted({sent[result] for result in arriving}))}
    own = [op.name for op in graph.ops if segments.get(op.name) == last]
    # A part of XLA's that cannot be compiled would leave what earlier parts have written.
    if len(order) < 2 or any(graph.functions.hides_state(graph.by_name[name], REPEATABLE) for name in own):
        return
    parts: dict[OpName, int] = {}
    waits: dict[OpName, list[OpName]] = {}  # for each op, the ops of the segment that wait for it
    for name in own:
        taken = {tensor for one in (name, *graph.controls[name]) for tensor in graph.inputs.get(one, ())}
        found = [order[sent[tensor]] for tensor in taken.intersection(arriving)]
        for parent, hops in dependencies(graph, name):
            if hops == 0 and segments.get(parent) == last:
                waits.setdefault(parent, []).append(name)
                found += [parts[parent]] if parent in parts else []
        if found:
            parts[name] = max(found)
    for name in reversed(own):
        if name not in parts:
            parts[name] = min((parts[one] for one in waits.get(name, ())), default=len(order) - 1)
    writing = sorted({part for name, part in parts.items() if graph.writes[name] & graph.traced.kept})
    place = {part: bisect.bisect_left(writing[:-1], part) for part in range(len(order))}
    segments.update((name, last + place[part]) for name, part in parts.items())
    for result in arriving:
        used = [segments[name] for name in own if result in graph.inputs[name]]
        received[result] = min(used, default=last + place[order[sent[result]]])


def _overlapping(
    graph: StepGraph, levels: dict[OpName, int], level: int, results: Sequence[TensorName], bucket_bytes: int | None
) -> list[list[TensorName]]:
    """Put the exchanges of a level that can travel early into buckets, in the order in which they are done.

    None where all of them fit one bucket.
    """
    if bucket_bytes is None:
        return []
    early = [result for result in results if _travels_early(graph, levels, level, graph.exchanges[result])]
    sizes = {result: graph.spec(result).shape.num_elements() * graph.spec(result).dtype.size for result in early}
    if sum(sizes.values()) <= bucket_bytes:
        return []
    depths: dict[OpName, int] = {}  # how many ops run one after another, up to each
    for op in graph.ops:
        parents = [depths.get(parent, 0) for parent, _ in dependencies(graph, op.name)]
        depths[op.name] = 1 + max(parents, default=0)
    early.sort(key=lambda result: depths[graph.origin(result)[0]], reverse=True)
    first_bytes = min(_FIRST_BUCKET_BYTES, bucket_bytes)
    filled = fill_buckets([sizes[result] for result in early], [None] * len(early), bucket_bytes, first_bytes)
    return [[early[index] for index in bucket] for bucket in filled]


def _travels_early(graph: StepGraph, levels: dict[OpName, int], level: int, exchange: Exchange) -> bool:
    """Return whether an exchange is a sum of known size of a tensor that its level computes."""
    return (
        exchange.collective.kind == CollectiveKind.ALL_REDUCE
        and exchange.dtype.is_floating
        and exchange.when is None
        and exchange.shape.is_fully_defined()
        and exchange.source not in graph.exchanges
        and levels.get(op_name(exchange.source)) == level
    )


def ancestors(graph: StepGraph, names: Iterable[OpName], inside: Collection[OpName]) -> set[OpName]:
    """Return these ops and all that they wait for `inside` a part of the step."""
    found: set[OpName] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += [parent for parent, _ in dependencies(graph, name) if parent in inside]
    return found


def live_ops(graph: StepGraph) -> set[OpName]:
    """Return the ops that a tower runs; in place of others copies or constants were put in."""
    sent = [name for one in graph.exchanges.values() for name in (one.source, one.when) if name]
    ends = [graph.origin(name)[0] for name in (*sent, *(name for name, _ in graph.outputs))]
    return ancestors(graph, [*graph.must_run, *graph.folds, *ends], graph.inputs)


def _assign_levels(graph: StepGraph) -> dict[OpName, int]:
    """Give each live op a level: one more than any exchange before it.

    First as early as can be. Then every write to a variable that must be the same on all towers moves as
    late as can be, into the last segment if nothing needs it before: that segment starts when all towers
    have finished all others, so that a tower's error leaves every weight as it was.
    """
    floors: dict[OpName, int] = collections.defaultdict(int)
    live = live_ops(graph)
    levels = _earliest(graph, live, floors)
    last = max([*levels.values(), *(_available(graph, levels, result) for result in graph.exchanges), 0])
    late = [name for name in levels if graph.writes[name] & graph.traced.kept]
    if late:
        last = max(last, 1)
    late += graph.folds & levels.keys()
    latest = _latest(graph, levels, last)
    # A variable is read where its value is used: held meanwhile, the value would have to be copied before the
    # variable can be written in place.
    reads = [name for name in levels if graph.by_name[name].type == "ReadVariableOp"]
    late += [name for name in reads if graph.traced.role[graph.inputs[name][0]] is Role.SAME]
    for name in late:
        floors[name] = latest[name]
    return _earliest(graph, live, floors)


def _earliest(graph: StepGraph, live: Collection[OpName], floors: dict[OpName, int]) -> dict[OpName, int]:
    levels: dict[OpName, int] = {}
    for op in graph.ops:
        name = op.name
        if name not in live or name in graph.traced.placeholders or name in graph.traced.passing:
            continue
        if graph.is_constant(result_name(name)):
            continue
        level = floors[name]
        for parent, hops in dependencies(graph, name):
            level = max(level, levels.get(parent, 0) + hops)
        levels[name] = level
    return levels


def _latest(graph: StepGraph, levels: dict[OpName, int], last: int) -> dict[OpName, int]:
    latest = dict.fromkeys(levels, last)
    bounds = [(name, last) for name, _ in graph.outputs]
    # The layout must have conditions when it joins the towers.
    bounds += [(e.when, _available(graph, levels, result) - 1) for result, e in graph.exchanges.items() if e.when]
    for name, bound in bounds:
        origin, hops = graph.origin(name)
        if origin in latest:
            latest[origin] = min(latest[origin], bound - hops)
    for op in reversed(graph.ops):
        if op.name in levels:
            for parent, hops in dependencies(graph, op.name):
                if parent in latest:
                    latest[parent] = min(latest[parent], latest[op.name] - hops)
    return latest


def dependencies(graph: StepGraph, name: OpName) -> Iterable[tuple[OpName, int]]:
    """Yield (op, exchanges between) for all that op `name` waits for; for a passing op, its inputs."""
    for tensor in graph.inputs[name]:
        yield graph.origin(tensor)
    for control in graph.controls[name]:
        if control in graph.traced.passing:
            for tensor in graph.inputs[control]:
                origin, hops = graph.origin(tensor)
                yield origin, hops + (control in graph.traced.trace.marks)
        else:
            yield control, 0


def _available(graph: StepGraph, levels: dict[OpName, int], name: TensorName) -> int:
    """Return the first level that can use tensor `name`."""
    origin, hops = graph.origin(name)
    return levels.get(origin, 0) + hops
