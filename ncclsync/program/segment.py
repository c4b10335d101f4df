"""Build one segment: a function of the ops of one level, which packs what it sends.

Neighbours: `cut.py` decides what belongs to a segment, `layout.py` calls it on every tower.
"""

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.host_passes.chains import Chain, chain_nodes, find_chains
from ncclsync.host_passes.fusion import Update, find_fusions, fused_nodes
from ncclsync.host_passes.same_shapes import Shapes, simplify
from ncclsync.ops.buckets import pack, unpack
from ncclsync.ops.spans import Meter, begin, hold
from ncclsync.program.graph import Fold, StepGraph, op_name
from ncclsync.program.program import Bucket, Exchange, Segment
from ncclsync.program.row_reads import read_rows_only


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """What one segment holds, by names of the trace; the fields of `Segment`, and its ops and folds."""

    ops: list[str] = dataclasses.field(default_factory=list)
    sent: list[Exchange] = dataclasses.field(default_factory=list)
    fold_reads: list[Fold] = dataclasses.field(default_factory=list)
    fold_writes: list[Fold] = dataclasses.field(default_factory=list)
    sources: tuple[str, ...] = ()
    incoming: tuple[Bucket, ...] = ()
    fetches: tuple[str, ...] = ()
    outgoing: tuple[Bucket, ...] = ()
    for_all: tuple[str, ...] = ()


def build_segment(
    graph: StepGraph,
    plan: SegmentPlan,
    jit_compile: bool,
    fuses: bool,
    crowded: bool,
    meter: Meter | None = None,
) -> Segment:
    """Turn a plan into a function that is the same for every tower.

    Args:
        graph: the graph that the plan names parts of.
        plan: what to build.
        jit_compile: whether XLA compiles it.
        fuses: whether element-wise ops are fused; see `fusion.py` and `chains.py`.
        crowded: whether other towers keep all other cores busy.
        meter: notes when packing and unpacking begin and end; not where XLA compiles.
    """
    if jit_compile or not any(bucket.packed for bucket in (*plan.incoming, *plan.outgoing)):
        meter = None
    asked_for = {*plan.fetches, *(exchange.source for exchange in plan.sent)}
    needed = {op_name(name) for name in asked_for}.union(*(fold.writers for fold in plan.fold_reads))
    fusions: list[list[Update]] = []
    chains: list[Chain] = []
    if fuses:
        shapes = Shapes(graph, plan.ops)
        graph, ops = simplify(graph, shapes, plan.ops, needed)
        plan = dataclasses.replace(plan, ops=ops)
        fusions = find_fusions(graph, ops, needed)
        taken = [{member for update in group for member in update.members} for group in fusions]
        chains = find_chains(graph, shapes, ops, needed, taken)
    definition, outside = _graph_def(graph, plan, fusions, chains, crowded and not plan.for_all)
    if not jit_compile:  # XLA makes no copies
        read_rows_only(definition, _sparse_reads(graph, plan.ops), needed)

    def body(*args):
        count = len(plan.sources), len(plan.sources) + len(plan.incoming)
        fraction, is_root, *tower = args[count[1] :]
        values = dict(zip(plan.sources, args, strict=False))
        for name in plan.sources:
            if name in graph.variable_of:  # else what is read from it has no shape, which some ops ask for
                tf_compat.describe_handle(values[name], graph.variable_of[name])
        values.update(_unpack_all(plan.incoming, args[count[0] : count[1]], fraction, meter, *tower))
        wanted = sorted(name for name in asked_for if name not in values and not name.startswith("@fold_"))
        writers = sorted({name for fold in plan.fold_reads for name in fold.writers} & set(plan.ops))
        effects = sorted({node.name for node in definition.node} & graph.must_run)
        imported = tf.graph_util.import_graph_def(
            definition,
            input_map={f"{placeholder}:0": values[name] for name, placeholder in outside.items()},
            return_elements=[*wanted, *writers, *effects],
            name="segment",
        )
        values.update(zip(wanted, imported, strict=False))
        written = dict(zip(writers, imported[len(wanted) :], strict=False))
        side_effects = list(imported[len(wanted) + len(writers) :])
        for fold in plan.fold_reads:
            with tf.control_dependencies([written[name] for name in fold.writers if name in written]):
                exchange = next(e for e in plan.sent if e.result == fold.result)
                value = tf.raw_ops.ReadVariableOp(resource=values[fold.handle], dtype=exchange.dtype)
                values[exchange.source] = tf.ensure_shape(value, exchange.shape)
        with tf.control_dependencies(side_effects):
            for fold in plan.fold_writes:
                value = values[fold.result]
                kept = tf.where(is_root, value, tf.zeros_like(value)) if fold.root_only else value
                side_effects.append(tf.raw_ops.AssignVariableOp(resource=values[fold.handle], value=kept))
        outgoing, packed = _pack_all(plan.outgoing, values, fraction, meter, *tower)
        with tf.control_dependencies([*side_effects, *packed]):
            token = tf.constant(0.0)
        return [*(tf.identity(values[name]) for name in plan.fetches), *outgoing, tf.identity(token)]

    signature = [graph.spec(name) for name in plan.sources]
    signature += [_bucket_spec(bucket) for bucket in plan.incoming]
    signature += [tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.bool)]
    signature += [] if meter is None else [tf.TensorSpec([], tf.int32)]
    function = tf_compat.shared_function(body, signature, jit_compile)
    return Segment(
        function,
        plan.sources,
        plan.incoming,
        plan.fetches,
        plan.outgoing,
        metered=meter is not None,
        for_all=plan.for_all,
    )


def _graph_def(
    graph: StepGraph,
    plan: SegmentPlan,
    fusions: list[list[Update]],
    chains: list[Chain],
    alone: bool,
) -> tuple[tf.compat.v1.GraphDef, dict[str, str]]:
    """Return the plan's ops as a GraphDef, and, for the tensors from outside, names to map them in by."""
    own = set(plan.ops)
    prefix = "ncclsync"
    while any(name.startswith(prefix) for name in graph.nodes):
        prefix += "_"
    replaced = {member for group in fusions for update in group for member in update.members}
    replaced |= {member for chain in chains for member in chain.members}
    left = [name for name in plan.ops if name not in replaced]
    used = {name for op in left for name in graph.inputs[op]}
    used |= {name for group in fusions for update in group for name in update.inputs}
    used |= {graph.inputs[write][0] for group in fusions for update in group for write in update.writes}
    used |= {name for chain in chains for name in chain.inputs}
    outside: dict[str, str] = {}
    for name in sorted(used):
        if name in graph.exchanges or (op_name(name) not in own and not graph.is_constant(name)):
            outside[name] = f"{prefix}/outside_{len(outside)}"
    used |= {*plan.fetches, *(exchange.source for exchange in plan.sent)}
    constants = sorted({op_name(name) for name in used if graph.is_constant(name)})
    definition = tf.compat.v1.GraphDef()
    definition.versions.CopyFrom(graph.versions)
    for name in [*constants, *left]:
        node = definition.node.add()
        node.CopyFrom(graph.nodes[name])
        # Tower 0's placement means nothing on another tower; the caller's device decides.
        if _same_device(node.device, graph.home_device):
            node.device = ""
        node.attr.pop("_class", None)
        del node.input[:]
        for source in graph.inputs[name]:
            node.input.append(outside.get(source, source))
        node.input.extend(f"^{control}" for control in graph.controls[name] if control in own)
    for i, group in enumerate(fusions):
        definition.node.extend(
            fused_nodes(graph, group, f"{prefix}/fused_{i}", own, lambda n: outside.get(n, n))
        )
    for i, chain in enumerate(chains):
        definition.node.extend(
            chain_nodes(graph, chain, f"{prefix}/chain_{i}", own, lambda n: outside.get(n, n), alone)
        )
    _add_functions(graph, definition)
    return definition, outside


def _sparse_reads(graph: StepGraph, ops: Sequence[str]) -> dict[str, tf.TensorShape]:
    """The reads among `ops` of variables that the step updates sparsely, and these variables' shapes."""
    sparse = {
        handle
        for op in graph.ops
        if op.type.startswith("ResourceScatter")
        for handle in graph.writes[op.name]
    }
    reads = [name for name in ops if graph.by_name[name].type == "ReadVariableOp"]
    return {
        name: graph.variable_of[graph.inputs[name][0]].shape
        for name in reads
        if graph.inputs[name][0] in sparse
    }


def _add_functions(graph: StepGraph, definition: tf.compat.v1.GraphDef) -> None:
    """Copy the functions that a segment's nodes call, directly or not, into its library."""
    added: set[str] = set()
    queue = list(definition.node)
    while queue:
        node = queue.pop()
        called = [node.op]
        for attribute in node.attr.values():
            called += [attribute.func.name, *(function.name for function in attribute.list.func)]
        for name in called:
            if name in graph.functions and name not in added:
                added.add(name)
                definition.library.function.add().CopyFrom(graph.functions[name])
                queue.extend(graph.functions[name].node_def)
    for gradient in graph.gradients:
        if gradient.function_name in added:
            definition.library.gradient.add().CopyFrom(gradient)


@functools.cache
def _same_device(one: str, other: str) -> bool:
    first, second = (tf.DeviceSpec.from_string(name) for name in (one, other))
    return (first.device_type, first.device_index) == (second.device_type, second.device_index)


def _bucket_spec(bucket: Bucket) -> tf.TensorSpec:
    first = bucket.exchanges[0]
    if not bucket.packed:
        return tf.TensorSpec(first.shape, first.dtype)
    return tf.TensorSpec([sum(e.shape.num_elements() for e in bucket.exchanges)], first.dtype)


def _unpack_all(
    buckets: Sequence[Bucket],
    tensors: Sequence[tf.Tensor],
    fraction: tf.Tensor,
    meter: Meter | None,
    tower: tf.Tensor | None = None,
) -> dict[str, tf.Tensor]:
    packed = any(bucket.packed for bucket in buckets)
    span = begin(meter if packed else None, tower, "unpack", tensors)
    values: dict[str, tf.Tensor] = {}
    for bucket, tensor in zip(buckets, hold(list(tensors), span.ops), strict=True):
        values.update(_receive(bucket, tensor, fraction))
    return hold(values, span.end(list(values.values())))


def _pack_all(
    buckets: Sequence[Bucket],
    values: dict[str, tf.Tensor],
    fraction: tf.Tensor,
    meter: Meter | None,
    tower: tf.Tensor | None = None,
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Return what the tower sends, and what else is to be waited for."""
    packed = any(bucket.packed for bucket in buckets)
    sources = {exchange.source: values[exchange.source] for b in buckets for exchange in b.exchanges}
    span = begin(meter if packed else None, tower, "pack", list(sources.values()))
    sources = hold(sources, span.ops)
    outgoing = [_send(bucket, sources, fraction) for bucket in buckets]
    # What a tower without samples sends waits for nothing that is packed.
    return outgoing, span.end([*outgoing, *sources.values()])


def _receive(bucket: Bucket, tensor: tf.Tensor, fraction: tf.Tensor) -> dict[str, tf.Tensor]:
    parts = [tensor]
    if bucket.packed:
        parts = unpack(tensor, [exchange.shape for exchange in bucket.exchanges])
    received = {}
    for exchange, part in zip(bucket.exchanges, parts, strict=True):
        received[exchange.result] = part
    return received


def _send(bucket: Bucket, values: dict[str, tf.Tensor], fraction: tf.Tensor) -> tf.Tensor:
    """Pack what a tower contributes; a tower without samples contributes what changes nothing."""
    if bucket.on_host and not bucket.wire.concatenates:
        return values[bucket.exchanges[0].source]
    tensors = []
    for exchange in bucket.exchanges:
        tensor = values[exchange.source]
        if exchange.collective.kind == "all_reduce" and exchange.collective.op == "mean":
            tensor = tensor * tf.cast(fraction, tensor.dtype)
        tensors.append(tensor)
    packed = pack(tensors) if bucket.packed else tensors[0]
    if bucket.wire.kind == "broadcast" or bucket.wire.empty_too:
        return packed
    if bucket.wire.concatenates:
        rows = tf.shape(packed)[0]
        return packed[: tf.where(fraction > 0, rows, 0)]
    neutral = _neutral(bucket.wire.op, packed.dtype)
    # A select, not a product: what a tower computed on a stand-in row may be NaN.
    return tf.cond(fraction > 0, lambda: tf.identity(packed), lambda: tf.fill(tf.shape(packed), neutral))


def _neutral(op: str, dtype: tf.DType) -> tf.Tensor:
    if op == "sum":
        return tf.zeros([], dtype)
    if op == "prod":
        return tf.ones([], dtype)
    extreme = dtype.min if op == "max" else dtype.max
    if dtype.is_floating:
        extreme = float("-inf") if op == "max" else float("inf")
    return tf.constant(extreme, dtype)
