"""Cut a traced step into segments at its collectives.

Three passes over the graph. It is *partitioned*: every tensor is placed, and exchanges are put wherever an op
needs what a tower has not got (`partition.py`). Every op is *scheduled*: it gets the number of its segment
(`schedule.py`). Each *segment* becomes a function (`segment.py`), which also packs what it sends and unpacks
what it receives. Before that, a target's passes may make the program cheaper.
"""

import dataclasses
import itertools
from typing import Any

from ncclsync.compat.source_lines import user_line
from ncclsync.ops import Collective, CollectiveKind
from ncclsync.ops.buckets import fill_buckets
from ncclsync.ops.spans import Meter
from ncclsync.program.crossing import Forms, find_uncrossable
from ncclsync.program.graph import StepGraph, op_name
from ncclsync.program.partition import Partition, Unshared, partition
from ncclsync.program.phases import divide
from ncclsync.program.program import Bucket, Exchange, Program, Results, Segment, Target
from ncclsync.program.schedule import Schedule, schedule
from ncclsync.program.segment import SegmentPlan, compile_segment
from ncclsync.program.trace import Trace
from ncclsync.program.updates import find_updates
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placing import is_unrepeatable
from ncclsync.semantics.roles import Role, declare_role

SUM = Collective(CollectiveKind.ALL_REDUCE, "sum")


def cut(
    trace: Trace,
    target: Target,
    results: Results,
    *,
    undone: bool = False,
    traceless: bool = False,
    meter: Meter | None = None,
) -> Program:
    """Cut `trace` into a program of segments.

    Args:
        trace: a step, traced for one tower.
        target: where it is to run.
        results: how the towers' results are combined. If they differ and are to become one: results as long
            as the shard by concatenation, other floats by the mean over the samples, integers by the sum.
        undone: whether a step may have to be undone after all its writes.
        traceless: whether a step that fails may run again: nothing may be left of it, metrics and random state
            included.
        meter: see `compile_segment`.
    """
    graph, placed = place(trace, target.home_device, results, target.same_seeds, many_shards=target.many_shards)
    # Gradients that travelled while others are computed would keep all shards' activations.
    scheduled = schedule(graph, None if target.many_shards else target.bucket_bytes)
    if target.many_shards:
        scheduled = divide(graph, scheduled)
    warnings = dict.fromkeys(placed.warned)
    forms = Forms(graph, trace.jit_compile)
    segments = _plan_segments(graph, scheduled, target, forms, trace.jit_compile)
    jit_compile = trace.jit_compile
    if jit_compile and (uncrossable := next(find_uncrossable(graph, segments), None)):
        warnings[
            "XLA does not compile this step, since towers meet in the middle of it, and XLA cannot give on "
            f"{uncrossable}. compile(jit_compile=False) says so from the start"
        ] = None
        jit_compile, forms = False, Forms(graph, jit_compile=False)
        segments = _plan_segments(graph, scheduled, target, forms, jit_compile=False)
    program = Program(
        segments=segments,
        arguments=graph.arguments,
        captures=graph.captures,
        variables=tuple(graph.variables),
        outputs=tuple(graph.outputs),
        structure=graph.structure,
        results=results,
        warnings=tuple(warnings),
        draws=tuple(dict.fromkeys(placed.draws)),
        normalized=tuple(dict.fromkeys(placed.normalized)),
        declared=tuple(sorted({length // each for length, each in placed.declared})),
        fixed=placed.variables_of_rows(),
        work=placed.costs.step_work(),
        rollback=_rollback(graph, scheduled, undone, traceless),
        updates=tuple(find_updates(graph).items()),
        jit_compile=jit_compile,
    )
    for improve in target.passes:
        program = improve(program)
    crossing = {name: forms.of(name) for segment in segments for name in segment.sources}
    segments = tuple(compile_segment(segment, crossing, _asked_outside(graph), meter) for segment in program.segments)
    return dataclasses.replace(program, segments=segments)


def place(
    trace: Trace,
    home_device: str,
    results: Results,
    same_seeds: bool,
    *,
    many_shards: bool = False,
    exact: bool = False,
) -> tuple[StepGraph, Partition]:
    """Partition a trace; see `cut` and `Partition`."""
    while True:
        graph = StepGraph(trace, home_device, same_seeds)
        if many_shards:  # what the partition computes of them alone is a shard's, too
            graph.differing.update(name for name, placed in graph.argument_placements.items() if not placed.whole)
        try:
            return graph, partition(graph, trace.share, results, exact)
        except Unshared as found:
            for handle in found.handles:
                declare_role(graph.variable_of[handle], Role.SAME)


def _rollback(graph: StepGraph, scheduled: Schedule, undone: bool, traceless: bool) -> tuple[tuple[str, bool], ...]:
    """Return `Program.rollback`; see `cut`."""
    last, segments = scheduled.count - 1, scheduled.segments
    written = {(handle, n) for name, n in segments.items() for handle in graph.writes[name] & graph.kept}
    # Ops that compute on one tower's data, beside the writes, may fail there after some of these are done.
    types = {name: graph.by_name[name].type for name, number in segments.items() if number == last}
    raising = ("Assert", "CheckNumerics", "CheckNumericsV2")
    exposed = any(
        kind in raising or "PyFunc" in kind or (name in graph.local and not kind.startswith("Assign"))
        for name, kind in types.items()
    )
    restored = {handle for handle, number in written if undone or exposed or number < last}
    every = restored.union((fold.handle for fold in graph.folds), *(graph.writes[name] for name in segments))
    return tuple((handle, undone and handle in restored) for handle in sorted(every if traceless else restored))


def _plan_segments(
    graph: StepGraph, scheduled: Schedule, target: Target, forms: Forms, jit_compile: bool
) -> tuple[Segment, ...]:
    segment_of, outputs = scheduled.segments, _asked_outside(graph)
    plans = [SegmentPlan(graph, jit_compile, target.shares_memory) for _ in range(scheduled.count)]
    for op in graph.ops:
        if op.name in segment_of:
            plans[segment_of[op.name]].ops.append(op.name)
    for plan in plans if jit_compile else ():
        plan.ops[:0] = forms.made_where_used(plan.ops)
    for result, exchange in graph.exchanges.items():
        plans[scheduled.sent[result]].sent.append(exchange)
    for fold in graph.folds:
        if fold.source is not None:
            plans[scheduled.sent[fold.result]].fold_reads.append(fold)
        plans[scheduled.folds if scheduled.once else -1].fold_writes.append(fold)
    outgoing = [_fill_buckets(plan.sent, target.bucket_bytes, scheduled) for plan in plans]
    incoming: list[list[Bucket]] = [[] for _ in plans]
    for bucket in itertools.chain(*outgoing):
        first = min(scheduled.received[exchange.result] for exchange in bucket.exchanges)
        incoming[first].append(bucket)

    # Which tensors cross from one segment to a later one.
    uses: list[set[str]] = []
    for plan in plans:
        used = {name for op in plan.ops for name in graph.inputs[op] if not graph.is_constant(name)}
        used |= {exchange.source for exchange in plan.sent if not graph.is_constant(exchange.source)}
        used |= {fold.handle for fold in (*plan.fold_reads, *plan.fold_writes)}
        used |= {fold.result for fold in plan.fold_writes}
        own = set(plan.ops)
        uses.append({name for name in used if not name.startswith("@fold_") and op_name(name) not in own})
    inputs = {*graph.arguments, *(name for name, _ in graph.captures), *(name for name, _ in graph.variables)}
    functions = Functions(graph.functions, graph.tf_graph)
    segments = []
    for number, plan in enumerate(plans):
        made = {exchange.result for bucket in incoming[number] for exchange in bucket.exchanges}
        later, own = {*outputs, *itertools.chain(*uses[number + 1 :])}, set(plan.ops)
        made |= {name for name in later - inputs if op_name(name) in own}
        constants = {n for n in outputs if graph.is_constant(n)} if number == 0 else set()
        sources, fetches = sorted(uses[number] - made), sorted((made & later) | constants)
        once = bool(scheduled.once) and scheduled.once[number]
        parts = tuple(sources), tuple(incoming[number]), tuple(fetches), outgoing[number]
        segments.append(Segment(*parts, plan, once=once, unrepeatable=_unrepeatable(plan, functions)))
    return tuple(segments)


def _asked_outside(graph: StepGraph) -> list[str]:
    """Return the names of the tensors that the layout takes from the segments, beside the buckets."""
    conditions = {exchange.when for exchange in graph.exchanges.values()}
    return [*(name for name, _ in graph.outputs), *sorted(name for name in conditions if name)]


def _unrepeatable(plan: SegmentPlan, functions: Functions) -> str:
    """Return `Segment.unrepeatable`."""
    ops = (plan.graph.by_name[name] for name in plan.ops)
    return next((f"{op.type}, at {user_line(op.traceback)}" for op in ops if is_unrepeatable(op, functions)), "")


def _fill_buckets(exchanges: list[Exchange], bucket_bytes: int, scheduled: Schedule) -> tuple[Bucket, ...]:
    """Group the exchanges after a segment into buckets; with phases, those of one receiver."""
    kinds: list[Any] = []
    sizes = []
    for index, exchange in enumerate(exchanges):
        # Of unknown size it travels alone.
        packed = exchange.shape.is_fully_defined() and not exchange.collective.changes_rows
        receiver = scheduled.received[exchange.result] if scheduled.once else None
        kinds.append((_wire(exchange.collective), exchange.dtype, exchange.when, None if packed else index, receiver))
        sizes.append(exchange.shape.num_elements() * exchange.dtype.size if packed else 0)
    return tuple(
        Bucket(kinds[indices[0]][0], tuple(exchanges[i] for i in indices), kinds[indices[0]][3] is None)
        for indices in fill_buckets(sizes, kinds, bucket_bytes)
    )


def _wire(collective: Collective) -> Collective:
    """Return the communicator's collective: a mean is weighted before, and is a sum on the wire."""
    if collective.kind == CollectiveKind.ALL_REDUCE and collective.op == "mean":
        return SUM
    return collective
