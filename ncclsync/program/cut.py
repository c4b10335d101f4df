"""Cut a traced step into segments at its collectives.

Three passes over the graph. It is *partitioned*: every tensor is placed, and exchanges are put wherever an op
needs what a tower has not got (`partition.py`). Every op is *scheduled*: it gets the number of its segment
(`schedule.py`). Each *segment* becomes a function (`segment.py`), which also packs what it sends and unpacks
what it receives. Before that, a target's passes may make the program cheaper.
"""

import dataclasses
import enum
import itertools
from collections.abc import Mapping
from typing import Any

from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, CollectiveKind
from ncclsync.ops.buckets import ALIGNED_BYTES, fill_buckets
from ncclsync.ops.spans import Meter
from ncclsync.program.builder import ADD_UP
from ncclsync.program.conversion import Unshared
from ncclsync.program.crossing import Forms, find_uncrossable
from ncclsync.program.graph import StepGraph, TracedGraph
from ncclsync.program.partition import Fault, Partition, PlacedStep, Undividable
from ncclsync.program.phases import divide
from ncclsync.program.program import Bucket, Exchange, Program, Results, Target
from ncclsync.program.schedule import Schedule, schedule
from ncclsync.program.segment import SegmentPlan, compile_segment
from ncclsync.program.shapes import find_mismatch
from ncclsync.program.trace import Trace
from ncclsync.program.updates import find_updates
from ncclsync.semantics import rules
from ncclsync.semantics.placing import is_unrepeatable, told_fault
from ncclsync.sharding.roles import Role, declare_role, role_of

# So many ops a tower runs at most: for each of the trace's, and beside these.
_MOST_FOLD, _MOST_MORE = 16, 5_000

# Ops that are made whole for their shapes, each by a new try, before the step is.
_MOST_FAULTY = 4

# Ops that may fail by the numbers that they are given.
_RAISING = rules.names("""
    Assert CheckNumerics CheckNumericsV2 Cholesky MatrixInverse MatrixLogarithm MatrixSolve MatrixSolveLs
    MatrixSquareRoot MatrixTriangularSolve SelfAdjointEigV2
""")


class Traceless(enum.Enum):
    """Say of what nothing may be left of a step that fails, at any moment of it."""

    WEIGHTS = "weights and slots alone, which wait for the last exchange"
    BESIDE_WEIGHTS = "metrics and random state, too: a process may write these before all agree to write the weights"
    IN_ALL = "all that it writes, whenever it does: it may run again, or another process fails at any moment"


def cut(
    trace: Trace,
    target: Target,
    results: Results,
    *,
    undone: bool,
    traceless: Traceless,
    meter: Meter | None,
    undivided: str = "",
) -> Program:
    """Cut `trace` into a program of segments.

    Args:
        trace: a step, traced for one tower.
        target: where it is to run.
        results: how the towers' results become those of the step.
        undone: whether a step may have to be undone after all its writes.
        traceless: see `Traceless`.
        meter: see `compile_segment`.
        undivided: why every tower computes the whole batch, as the user is told; "" if towers divide it.

    Raises:
        Undividable: the step cannot be divided. Cut a new trace of it `undivided`: in this one shapes may have been
            refined, by a fault of ncclsync's own.
    """
    home, seeds, shards = target.home_device, target.same_seeds, target.many_shards
    try:
        placed = place(trace, home, results, seeds, many_shards=shards, undivided=bool(undivided))
        if not undivided:
            _check_size(placed.graph)
        program = _cut(placed, target, results, undone, traceless, meter)
    except (NcclSyncError, MemoryError):
        raise
    except Exception as fault:  # of any kind
        cause, op = (fault.cause, fault.op) if isinstance(fault, Fault) else (fault, None)
        reason = str(fault) if isinstance(fault, Undividable) else told_fault(cause, op)
        if undivided:
            words = f"Expected a step that towers can run. Received one that they cannot: {reason}"
            raise NcclSyncError(words) from cause
        raise Undividable(reason) from cause
    return dataclasses.replace(program, warnings=(*filter(None, [undivided]), *program.warnings))


def _cut(
    placed: PlacedStep, target: Target, results: Results, undone: bool, traceless: Traceless, meter: Meter | None
) -> Program:
    graph, traced, trace = placed.graph, placed.graph.traced, placed.graph.traced.trace
    for handle, variable in traced.variable_of.items():
        role = traced.role[handle]
        # What this step takes to be the same stays so, even if another step is seen to draw from it.
        may_change = role is Role.SAME and variable.dtype.is_integer and variable.shape.rank == 1
        if may_change or role is not role_of(variable, target.same_seeds):
            declare_role(variable, role)
    # If gradients travelled while others are computed, all shards' activations would have to be kept.
    scheduled = schedule(graph, None if target.many_shards else target.bucket_bytes)
    if target.many_shards:
        scheduled = divide(graph, scheduled)
    warnings = dict.fromkeys(placed.warned)
    forms = Forms(graph, trace.jit_compile)
    plans = _plan_segments(graph, scheduled, target, forms)
    if trace.jit_compile and (uncrossable := next(find_uncrossable(graph, plans), None)):
        warnings[
            "XLA does not compile this step: towers meet in the middle of it, and a program of XLA's cannot pass on "
            f"{uncrossable}. Write compile(jit_compile=False) to say so yourself, without this warning"
        ] = None
        forms = Forms(graph, jit_compile=False)
        plans = _plan_segments(graph, scheduled, target, forms)
    if forms.are_bounded and traceless is Traceless.WEIGHTS:
        traceless = Traceless.BESIDE_WEIGHTS  # XLA may refuse a program for a batch, which then runs again
    for improve in target.passes:
        plans = improve(plans)
    crossing = {name: forms.of(name) for plan in plans for name in plan.sources}
    return Program(
        segments=tuple(compile_segment(plan, crossing, _asked_outside(graph), meter) for plan in plans),
        arguments=traced.arguments,
        captures=traced.captures,
        variables=tuple(traced.variable_of.items()),
        outputs=tuple(graph.outputs),
        structure=trace.function.structured_outputs,
        results=results,
        warnings=tuple(warnings),
        draws=tuple(dict.fromkeys(placed.placer.draws)),
        normalized=tuple(dict.fromkeys(placed.normalized)),
        declared=tuple(
            sorted({n // each: what for (n, each), what in placed.conversions.lengths.declared.items()}.items())
        ),
        fixed=placed.variables_of_rows(),
        work=placed.conversions.costs.step_work(),
        rollback=_rollback(graph, scheduled, undone, traceless),
        updates=tuple(find_updates(graph).items()),
        last_meeting=scheduled.last_meeting,
        jit_compile=forms.jit_compile,
        is_bounded=forms.are_bounded,
    )


def place(
    trace: Trace,
    home_device: str,
    results: Results,
    same_seeds: bool,
    *,
    many_shards: bool = False,
    exact: bool = False,
    undivided: bool = False,
) -> PlacedStep:
    """Partition a trace; see `cut` and `Partition`."""
    shared: set[int] = set()
    learned: Mapping[TensorName, Any] = {}
    faulty: dict[OpName, str] = {}
    while True:
        traced = TracedGraph(trace, home_device, same_seeds, shared)
        try:
            placed = Partition(traced, exact, many_shards, undivided, learned, faulty).run(results)
            if placed.conversions.learned.keys() != learned.keys():
                learned = placed.conversions.learned
                continue
            # Where a variable fixes the rows, the step is traced again, with these left open.
            fault = None if undivided or placed.variables_of_rows() else _mismatch(placed)
            if fault is None:
                return placed
            if fault.op.name in faulty or len(faulty) == _MOST_FAULTY:
                raise fault
            faulty[fault.op.name] = told_fault(fault.cause, fault.op)
        except Unshared as found:
            shared |= {id(traced.variable_of[handle]) for handle in found.handles}


def _mismatch(placed: PlacedStep) -> Fault | None:
    """Return what `find_mismatch` does; if it fails itself, a warning says so, and the step runs."""
    try:
        return find_mismatch(placed)
    except Exception as fault:  # of any kind: of a TensorFlow that is not known yet
        told = told_fault(fault, None, "has towers whose shapes were not compared with one device's")
        placed.warned.append(f"Exact, as far as is known: {told}")
        return None


def _check_size(graph: StepGraph) -> None:
    """Raise a `Fault` if a tower would run many times what one device runs: the memory may end before the first step.

    A partition adds some ops to each of the trace's ops, and some copies of a loop to a loop.
    """
    count, traced = graph.functions.count_nodes, graph.traced
    before, after = count(traced.nodes.values()), count(graph.nodes[op.name] for op in graph.ops)
    if after > _MOST_FOLD * before + _MOST_MORE:
        largest = max(traced.ops, key=lambda op: count([traced.nodes[op.name]]))
        raise Fault(largest, OverflowError(f"{after} ops of {before}"))


def _rollback(
    graph: StepGraph, scheduled: Schedule, undone: bool, traceless: Traceless
) -> tuple[tuple[TensorName, bool], ...]:
    """Return `Program.rollback`; see `cut`."""
    last, segments = scheduled.last_meeting, scheduled.segments
    written = {(handle, n) for name, n in segments.items() for handle in graph.writes[name] & graph.traced.kept}
    # Ops beside the writes that compute on one tower's data may fail on that tower after some writes are done.
    ends = [graph.by_name[name] for name, number in segments.items() if number >= last and name not in graph.folds]
    exposed = any(
        (op.name in graph.local and not op.type.startswith("Assign"))
        or any(kind in _RAISING or "PyFunc" in kind for kind in graph.functions.op_types(op))
        for op in ends
    )
    restored = {handle for handle, number in written if undone or exposed or number < last}
    others = {handle for name in segments for handle in graph.writes[name]} - restored
    if traceless is not Traceless.IN_ALL:
        others = others - graph.traced.kept if traceless is Traceless.BESIDE_WEIGHTS else set()
    return tuple((handle, undone and handle in restored) for handle in sorted(restored | others))


def _plan_segments(graph: StepGraph, scheduled: Schedule, target: Target, forms: Forms) -> list[SegmentPlan]:
    count = scheduled.count
    ops: list[list[OpName]] = [[] for _ in range(count)]
    for op in graph.ops:
        if op.name in scheduled.segments:
            ops[scheduled.segments[op.name]].append(op.name)
    ops = [[*forms.made_where_used(names), *names] for names in ops]
    if not scheduled.once:
        ops = [[*forms.recomputed(names), *names] for names in ops]
    for names in ops if not forms.jit_compile else ():  # XLA compiles a program for each number of rows
        graph = graph.measured_once(names)
    sent: list[list[Exchange]] = [[] for _ in range(count)]
    for result, exchange in graph.exchanges.items():
        sent[scheduled.sent[result]].append(exchange)
    outgoing = [_fill_buckets(exchanges, target.bucket_bytes, scheduled) for exchanges in sent]
    incoming: list[list[Bucket]] = [[] for _ in range(count)]
    for bucket in itertools.chain(*outgoing):
        incoming[min(scheduled.received[exchange.result] for exchange in bucket.exchanges)].append(bucket)

    # Which tensors cross from one segment to a later one.
    uses: list[set[TensorName]] = []
    for names, exchanges in zip(ops, sent, strict=True):
        used = {*(name for op in names for name in graph.inputs[op]), *(exchange.source for exchange in exchanges)}
        own = set(names)
        uses.append({name for name in used if op_name(name) not in own and not graph.is_constant(name)})
    outputs, site, plans = _asked_outside(graph), graph.traced.trace.site, []
    for number, names in enumerate(ops):
        later, own = {*outputs, *itertools.chain(*uses[number + 1 :])}, set(names)
        received = {exchange.result for bucket in incoming[number] for exchange in bucket.exchanges}
        made = received | {name for name in later if op_name(name) in own}
        constants = {n for n in outputs if graph.is_constant(n)} if number == 0 else set()
        packing = [] if forms.jit_compile else [site.rank]
        packing += [site.has_samples, graph.traced.trace.share.fraction] if outgoing[number] else []
        plans.append(
            SegmentPlan(
                graph,
                names,
                sources=tuple(sorted(uses[number].union(tensor.name for tensor in packing) - made)),
                incoming=tuple(incoming[number]),
                fetches=tuple(sorted((made & later) | constants)),
                outgoing=outgoing[number],
                once=bool(scheduled.once) and scheduled.once[number],
                unrepeatable=_unrepeatable(graph, names),
                jit_compile=forms.jit_compile,
                shares_memory=target.shares_memory,
            )
        )
    return plans


def _asked_outside(graph: StepGraph) -> list[TensorName]:
    """Return the names of the tensors that the layout takes from the segments, beside the buckets."""
    conditions = {exchange.when for exchange in graph.exchanges.values()}
    return [*(name for name, _ in graph.outputs), *sorted(name for name in conditions if name)]


def _unrepeatable(graph: StepGraph, names: list[OpName]) -> str:
    """Return `Segment.unrepeatable`."""
    ops = (graph.stood_for.get(name, graph.by_name[name]) for name in names)
    return next((f"{op.type}, at {user_line(op.traceback)}" for op in ops if is_unrepeatable(op, graph.functions)), "")


def _fill_buckets(exchanges: list[Exchange], bucket_bytes: int, scheduled: Schedule) -> tuple[Bucket, ...]:
    """Group the exchanges after a segment into buckets; with phases, those of one receiver."""
    kinds: list[Any] = []
    sizes = []
    for index, exchange in enumerate(exchanges):
        # A tensor of unknown size travels alone.
        packed = exchange.shape.is_fully_defined() and not exchange.collective.changes_rows
        receiver = scheduled.received[exchange.result] if scheduled.once else None
        kinds.append((_wire(exchange.collective), exchange.dtype, exchange.when, None if packed else index, receiver))
        sizes.append(exchange.shape.num_elements() * exchange.dtype.size if packed else 0)
    filled = fill_buckets(sizes, kinds, bucket_bytes)
    return tuple(
        # First what `unpack` takes out without a copy.
        Bucket(kinds[indices[0]][0], tuple(exchanges[i] for i in ordered), kinds[indices[0]][3] is None)
        for indices in filled
        for ordered in [sorted(indices, key=lambda i: sizes[i] % ALIGNED_BYTES != 0)]
    )


def _wire(collective: Collective) -> Collective:
    """Return the communicator's collective: a mean is weighted before, and is a sum on the wire."""
    is_mean = collective.kind == CollectiveKind.ALL_REDUCE and collective.op == "mean"
    return ADD_UP if is_mean else collective
