"""Cut a traced step into segments at its collectives.

Three passes over the graph. *Exchanges* are found: at the marks of the step, and wherever towers would
otherwise drift apart (see `_find_exchanges`). Every op gets a *level*, one more than any exchange before
it. Each level becomes one *segment*, which also packs what it sends and unpacks what it receives.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ncclsync import private
from ncclsync.bucket import plan_buckets
from ncclsync.ops import Collective
from ncclsync.program import Bucket, Exchange, Program, Trace
from ncclsync.segment import Fold, SegmentPlan, build_segment, is_packed
from ncclsync.variables import Role, role_of

SUM, MEAN, FOLLOW = Collective("all_reduce", "sum"), Collective("all_reduce", "mean"), Collective("broadcast")

# Stateful ops whose results are equal on all towers if their inputs are.
_REPEATABLE = frozenset(
    "ReadVariableOp ResourceGather ResourceGatherNd VarIsInitializedOp VariableShape VarHandleOp Assert "
    "Print PrintV2 PartitionedCall StatefulPartitionedCall If While Case LookupTableFindV2 LookupTableSizeV2 "
    "LookupTableExportV2 NoOp".split()
)


def cut(
    trace: Trace, home_device: str, bucket_bytes: int, concat_outputs: bool, jit_compile: bool
) -> Program:
    """Cut `trace` into a program of segments.

    Args:
        trace: a step, traced for one tower.
        home_device: tower 0's device, where the trace placed what must run on every tower's own.
        bucket_bytes: see `bucket.plan_buckets`.
        concat_outputs: whether each result holds one row per sample (a prediction), so that the towers'
            results are concatenated. If not, results that differ between towers are combined: floats by
            the mean over the samples, integers by the sum, tensors of unknown length by concatenation.
        jit_compile: whether XLA compiles the segments.
    """
    graph = _Graph(trace, home_device)
    _find_exchanges(graph, trace, concat_outputs)
    levels = _assign_levels(graph)
    segments = _build_segments(graph, levels, bucket_bytes, jit_compile)
    return Program(
        segments=segments,
        arguments=graph.arguments,
        captures=graph.captures,
        variables=tuple(graph.variables),
        outputs=tuple(graph.outputs),
        structure=graph.structure,
        rollback=_rollback(graph, levels),
    )


class _Graph:
    """The traced graph by names: who computes what, and what is put between them.

    `inputs[op]` are tensor names, in which an exchange's result may replace what the trace had.
    """

    def __init__(self, trace: Trace, home_device: str):
        function = trace.function
        self.home_device = home_device
        definition = function.graph.as_graph_def()
        self.versions = definition.versions
        self.nodes = {node.name: node for node in definition.node}
        self.functions = {f.signature.name: f for f in definition.library.function}
        self.gradients = list(definition.library.gradient)
        self.tf_graph = function.graph
        flat_inputs = [tensor.name for tensor in function.inputs]
        captured = function.captured_inputs
        count = len(flat_inputs) - len(captured)
        self.arguments = tuple(flat_inputs[:count])
        by_handle = {id(variable.handle): variable for variable in function.variables}
        self.variables: list[tuple[str, tf.Variable]] = []
        captures = []
        for name, tensor in zip(flat_inputs[count:], captured, strict=True):
            if id(tensor) in by_handle:
                self.variables.append((name, by_handle[id(tensor)]))
            else:
                captures.append((name, tensor))
        self.captures = tuple(captures)
        self.role = {name: role_of(variable) for name, variable in self.variables}
        self.placeholders = {_op_name(name) for name in flat_inputs}
        self.must_run = {op.name for op in self.tf_graph.control_outputs}
        self.ops = self._live_ops(function, trace)
        self.inputs = {op.name: [tensor.name for tensor in op.inputs] for op in self.ops}
        self.controls = {op.name: [control.name for control in op.control_inputs] for op in self.ops}
        self.writes = {op.name: private.written_handles(op) & set(self.role) for op in self.ops}
        self.marks = trace.marks
        self.exchanges: dict[str, Exchange] = {}  # by name of the result
        self.folds: list[Fold] = []
        self.structure = function.graph.structured_outputs
        self.outputs: list[tuple[str, str]] = []
        self.by_name = {op.name: op for op in self.ops}

    def _live_ops(self, function: Any, trace: Trace) -> list[tf.Operation]:
        """What the outputs and side effects need, inputs before consumers."""
        order: list[tf.Operation] = []
        done: set[str] = set()
        roots = [*function.graph.control_outputs, *(tensor.op for tensor in function.outputs)]
        # Creation order is not topological: automatic control dependencies are added later. Walking the
        # roots in creation order keeps as much of it as there can be.
        created = {op.name: i for i, op in enumerate(function.graph.get_operations())}
        for root in sorted(roots, key=lambda op: created[op.name]):
            stack = [(root, _parents(root))]
            while stack:
                op, parents = stack[-1]
                if op.name in done:
                    stack.pop()
                    continue
                for parent in parents:
                    if parent.name not in done:
                        stack.append((parent, _parents(parent)))
                        break
                else:
                    done.add(op.name)
                    order.append(op)
                    stack.pop()
        return order

    def spec(self, name: str) -> tf.TensorSpec:
        """Shape and dtype of a tensor of the trace, or of an exchange's result."""
        if name in self.exchanges:
            return tf.TensorSpec(self.exchanges[name].shape, self.exchanges[name].dtype)
        tensor = self.tf_graph.get_tensor_by_name(name)
        return tf.TensorSpec([] if tensor.dtype == tf.resource else tensor.shape, tensor.dtype)

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is a constant, which each segment that uses it gets a copy of."""
        op = self.by_name.get(_op_name(name))
        return op is not None and op.type == "Const" and not op.control_inputs

    def exchange(self, source: str, collective: Collective) -> str:
        """Put an exchange behind the tensor `source`; return the result's name."""
        spec = self.spec(source)
        result = f"@exchange_{len(self.exchanges)}:0"
        shape = spec.shape
        if collective.kind == "all_gather":
            shape = tf.TensorShape([None, *shape[1:]])
        self.exchanges[result] = Exchange(source, result, collective, shape, spec.dtype)
        return result

    def origin(self, name: str) -> tuple[str, int]:
        """The op that a tensor comes from, and how many exchanges lie between."""
        hops = 0
        while name in self.exchanges:
            name, hops = self.exchanges[name].source, hops + 1
        return _op_name(name), hops


def _find_exchanges(graph: _Graph, trace: Trace, concat_outputs: bool) -> None:
    """Find every tensor that must meet its counterparts, by following what can differ between towers.

    What differs: the batch, random state, the state of metrics, and all that is computed from them. What
    does not: variables, constants, and whatever comes out of an exchange. So an exchange is put
    - at each mark, unless all towers hold the same value already (then mean, max, min change nothing);
    - before a differing value is written to a variable that must be the same on all towers: a moving
      average takes the mean over the batch, and so does a hand-written weight update;
    - behind each read of a metric's state that is not part of its own update: the result is global;
    - behind differing results of the step.
    Writes that cannot be intercepted (inside a branch, or a scatter) are folded at the end of the step, and
    so is metric state.
    """
    differs: set[str] = set()  # tensor names
    drifting: set[str] = set()  # handles of variables that differ until the end of the step
    result_reads = _result_reads(graph)
    renamed: dict[str, str] = {}

    for op in graph.ops:
        inputs = graph.inputs[op.name] = [renamed.get(name, name) for name in graph.inputs[op.name]]
        outputs = [tensor.name for tensor in op.outputs]
        if op.name in graph.placeholders:
            differs.update(name for name in outputs if name in graph.arguments)
            continue
        if op.name in graph.marks:
            collective = graph.marks[op.name].collective
            repeatable = collective.op in ("mean", "max", "min") and collective.kind == "all_reduce"
            for source, output in zip(inputs, outputs, strict=True):
                settled = source not in differs and (repeatable or collective.kind == "broadcast")
                renamed[output] = source if settled else graph.exchange(source, collective)
                if collective.kind == "reduce":
                    differs.add(renamed[output])
            continue
        handles = [name for name in inputs if name in graph.role]
        local = any(graph.role[name] is not Role.SAME or name in drifting for name in handles)
        value_differs = any(name in differs for name in inputs)
        for handle in graph.writes[op.name]:
            if graph.role[handle] is not Role.SAME or not (value_differs or local or _is_random(op)):
                continue
            settling = _settling(op, graph.spec(inputs[1]) if len(inputs) == 2 else None)
            if settling is None:
                drifting.add(handle)
            else:
                inputs[1] = graph.exchange(inputs[1], settling)
                value_differs = False
        if op.name in result_reads:
            renamed[outputs[0]] = graph.exchange(outputs[0], SUM)
        elif local or value_differs or _is_random(op):
            differs.update(outputs)

    _find_folds(graph, drifting)
    for tensor in trace.function.outputs:
        name = renamed.get(tensor.name, tensor.name)
        # The function's outputs are identities of what the step returned.
        graph.outputs.append(_settle_output(graph, name, name in differs, concat_outputs))


def _settle_output(graph: _Graph, name: str, differs: bool, concat: bool) -> tuple[str, str]:
    tensor = graph.spec(name)
    if differs and tensor.shape.rank and (concat or tensor.shape[0] is None):
        return name, "concat"
    if not differs or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return name, "first"
    return graph.exchange(name, MEAN if tensor.dtype.is_floating else SUM), "first"


def _settling(op: tf.Operation, value: tf.TensorSpec | None) -> Collective | None:
    """How a differing value that `op` writes becomes the same on all towers; None if it cannot be reached."""
    if value is None or not op.type.startswith("Assign"):
        return None
    if value.dtype.is_floating:
        return MEAN
    if not value.dtype.is_integer:
        return None
    # A counter of samples adds up; any other integer has no mean, so that tower 0 decides.
    return SUM if op.type in ("AssignAddVariableOp", "AssignSubVariableOp") else FOLLOW


def _is_random(op: tf.Operation) -> bool:
    return private.is_stateful(op) and op.type not in _REPEATABLE and not op.type.startswith("Assign")


def _result_reads(graph: _Graph) -> set[str]:
    """Names of the reads of metric state, without those that feed an update of the same state."""
    reads = {
        op.name: graph.inputs[op.name][0]
        for op in graph.ops
        if op.type == "ReadVariableOp" and graph.role.get(graph.inputs[op.name][0]) is Role.SUM
    }
    updates: set[str] = set()
    for op in graph.ops:
        states = {handle for handle in graph.writes[op.name] if graph.role[handle] is Role.SUM}
        if states:
            ancestors = _ancestors(graph, op.name)
            updates.update(name for name, handle in reads.items() if handle in states and name in ancestors)
    return set(reads) - updates


def _ancestors(graph: _Graph, name: str) -> set[str]:
    found: set[str] = set()
    queue = [name]
    while queue:
        for parent in map(_op_name, graph.inputs[queue.pop()]):
            if parent not in found:
                found.add(parent)
                queue.append(parent)
    return found


def _find_folds(graph: _Graph, drifting: set[str]) -> None:
    """Plan what brings metric state and drifting variables together at the end of the step."""
    variables = dict(graph.variables)
    writers = collections.defaultdict(list)
    for op in graph.ops:
        for handle in graph.writes[op.name]:
            writers[handle].append(op.name)
    for handle, names in writers.items():
        role, variable = graph.role[handle], variables[handle]
        if role is Role.SUM or handle in drifting:
            collective = SUM if role is Role.SUM else _fold_collective(variable.dtype)
            source = f"@fold_{len(graph.folds)}:0"
            result = f"@folded_{len(graph.folds)}:0"
            graph.exchanges[result] = Exchange(source, result, collective, variable.shape, variable.dtype)
            graph.folds.append(Fold(handle, source, result, tuple(names), role is Role.SUM))


def _fold_collective(dtype: tf.DType) -> Collective:
    return MEAN if dtype.is_floating else FOLLOW


def _assign_levels(graph: _Graph) -> dict[str, int]:
    """Give each live op the number of its segment.

    First as early as can be. Then every write to a variable that must be the same on all towers moves as
    late as can be, into the last segment if nothing needs it before: that segment starts when all towers
    have finished all others, so that a tower's error leaves every weight as it was.
    """
    floors: dict[str, int] = collections.defaultdict(int)
    levels = _earliest(graph, floors)
    last = max(
        [levels[name] for name in levels]
        + [_available(graph, levels, result) for result in graph.exchanges]
        + [0]
    )
    weight_writes = [name for name in levels if any(graph.role[h] is Role.SAME for h in graph.writes[name])]
    if weight_writes:
        last = max(last, 1)
    latest = _latest(graph, levels, last)
    for name in weight_writes:
        floors[name] = latest[name]
    return _earliest(graph, floors)


def _earliest(graph: _Graph, floors: dict[str, int]) -> dict[str, int]:
    levels: dict[str, int] = {}
    for op in graph.ops:
        name = op.name
        if name in graph.placeholders or name in graph.marks or graph.is_constant(f"{name}:0"):
            continue
        level = floors[name]
        for parent, hops in _dependencies(graph, name):
            level = max(level, levels.get(parent, 0) + hops)
        levels[name] = level
    return levels


def _latest(graph: _Graph, levels: dict[str, int], last: int) -> dict[str, int]:
    latest = dict.fromkeys(levels, last)
    for fold in graph.folds:
        for name in fold.writers:
            latest[name] = min(latest[name], last - 1)
    for name, _ in graph.outputs:
        origin, hops = graph.origin(name)
        if origin in latest:
            latest[origin] = min(latest[origin], last - hops)
    for op in reversed(graph.ops):
        if op.name in levels:
            for parent, hops in _dependencies(graph, op.name):
                if parent in latest:
                    latest[parent] = min(latest[parent], latest[op.name] - hops)
    return latest


def _dependencies(graph: _Graph, name: str) -> Iterable[tuple[str, int]]:
    """(op, exchanges between) for all that op `name` waits for; a mark stands for what it is fed by."""
    for tensor in graph.inputs[name]:
        yield graph.origin(tensor)
    for control in graph.controls[name]:
        if control in graph.marks:
            for tensor in graph.inputs[control]:
                origin, hops = graph.origin(tensor)
                yield origin, hops + 1
        else:
            yield control, 0


def _available(graph: _Graph, levels: dict[str, int], name: str) -> int:
    """The first segment that can use tensor `name`."""
    for fold in graph.folds:
        if name == fold.source:
            return max(levels[writer] for writer in fold.writers)
        if name == fold.result:
            return _available(graph, levels, fold.source) + 1
    origin, hops = graph.origin(name)
    return levels.get(origin, 0) + hops


def _rollback(graph: _Graph, levels: dict[str, int]) -> tuple[str, ...]:
    last = max(levels.values(), default=0)
    written = {
        (handle, levels[name])
        for name in levels
        for handle in graph.writes[name]
        if graph.role[handle] is Role.SAME
    }
    early = any(level < last for _, level in written)
    return tuple(sorted({handle for handle, _ in written})) if early else ()


def _build_segments(
    graph: _Graph, levels: dict[str, int], bucket_bytes: int, jit_compile: bool
) -> tuple[Any, ...]:
    outputs = [name for name, _ in graph.outputs]
    available = {result: _available(graph, levels, result) for result in graph.exchanges}
    count = 1 + max([*levels.values(), *available.values(), 0])
    plans = [SegmentPlan() for _ in range(count)]
    for op in graph.ops:
        if op.name in levels:
            plans[levels[op.name]].ops.append(op.name)
    for result, exchange in graph.exchanges.items():
        plans[available[result] - 1].sent.append(exchange)
    for fold in graph.folds:
        plans[available[fold.result] - 1].fold_reads.append(fold)
        plans[-1].fold_writes.append(fold)
    buckets: list[tuple[Bucket, ...]] = [_plan_wire(plan.sent, bucket_bytes) for plan in plans]

    # Which tensors cross from one segment to a later one.
    uses: list[set[str]] = []
    for plan in plans:
        used = {name for op in plan.ops for name in graph.inputs[op] if not graph.is_constant(name)}
        used |= {exchange.source for exchange in plan.sent if not graph.is_constant(exchange.source)}
        used |= {fold.handle for fold in (*plan.fold_reads, *plan.fold_writes)}
        used |= {fold.result for fold in plan.fold_writes}
        uses.append({name for name in used if not name.startswith("@fold_")})
    inputs = {*graph.arguments, *(name for name, _ in graph.captures), *(name for name, _ in graph.variables)}
    segments = []
    for level, plan in enumerate(plans):
        received = {e.result for bucket in (buckets[level - 1] if level else ()) for e in bucket.exchanges}
        made = set(received)
        for name in {*outputs, *(n for later in uses[level:] for n in later)} - inputs:
            if name not in graph.exchanges and levels.get(_op_name(name)) == level:
                made.add(name)
        later = {*outputs, *(name for later in uses[level + 1 :] for name in later)}
        constants = {n for n in outputs if graph.is_constant(n)} if level == 0 else set()
        plan = dataclasses.replace(
            plan,
            sources=tuple(sorted(uses[level] - made)),
            incoming=buckets[level - 1] if level else (),
            outgoing=buckets[level],
            fetches=tuple(sorted((made & later) | constants)),
        )
        segments.append(build_segment(graph, plan, jit_compile))
    return tuple(segments)


def _plan_wire(exchanges: list[Exchange], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group the exchanges between two segments into buckets."""
    kinds: list[Any] = []
    sizes = []
    for index, exchange in enumerate(exchanges):
        known = is_packed(exchange)
        kinds.append((_wire(exchange.collective), exchange.dtype, None if known else index))
        sizes.append(exchange.shape.num_elements() * exchange.dtype.size if known else 0)
    return tuple(
        Bucket(_wire(exchanges[indices[0]].collective), tuple(exchanges[i] for i in indices))
        for indices in plan_buckets(sizes, kinds, bucket_bytes)
    )


def _wire(collective: Collective) -> Collective:
    """What the communicator does: a mean arrives weighted, so that it and a sum share a bucket."""
    if collective.kind == "all_reduce" and collective.op == "mean":
        return SUM
    return collective


def _parents(op: tf.Operation) -> Iterator[tf.Operation]:
    return iter([*(tensor.op for tensor in op.inputs), *op.control_inputs])


def _op_name(tensor_name: str) -> str:
    return tensor_name.split(":")[0]
