"""Make a function of a segment, which unpacks what it receives, runs its ops, and packs what it sends.

`cut.py` decides what belongs to a segment, `towers/laying_out.py` calls the function on every tower.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops.spans import Meter
from ncclsync.program.crossing import Form, close_branches, keep_declared_shapes
from ncclsync.program.graph import Fold, StepGraph, op_name
from ncclsync.program.host_values import keep_on_host
from ncclsync.program.own_memory import own_copy, own_memory
from ncclsync.program.packing import pack_all, unpack_all
from ncclsync.program.program import Exchange, Segment
from ncclsync.program.row_reads import read_rows_only


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """Replace some ops of a segment by nodes that compute the same.

    Attributes:
        members: names of the ops that are replaced.
        inputs: names of the tensors and handles that the nodes take.
        nodes: `nodes(prefix, named)` yields the nodes. `prefix` is free for names of theirs; `named` gives
            what the segment calls a tensor.
    """

    members: frozenset[str]
    inputs: tuple[str, ...]
    nodes: Callable[[str, Callable[[str], str]], Iterable[tf.compat.v1.NodeDef]]


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """Name what a segment holds, by names of the trace.

    Attributes:
        graph: the graph that names stand for.
        jit_compile: whether XLA compiles it.
        shares_memory: see `Target`.
        ops: inputs before consumers.
        sent: the exchanges that it sends.
        fold_reads, fold_writes: see `Fold`.
        rewrites: what passes have replaced.
    """

    graph: StepGraph
    jit_compile: bool = False
    shares_memory: bool = False
    ops: list[str] = dataclasses.field(default_factory=list)
    sent: list[Exchange] = dataclasses.field(default_factory=list)
    fold_reads: list[Fold] = dataclasses.field(default_factory=list)
    fold_writes: list[Fold] = dataclasses.field(default_factory=list)
    rewrites: tuple[Rewrite, ...] = ()


def asked_for(segment: Segment) -> set[str]:
    """Return the names of the tensors that others need of a segment."""
    return {*segment.fetches, *(exchange.source for exchange in segment.plan.sent)}


def needed_ops(segment: Segment) -> set[str]:
    """Return the names of the ops whose own results, or which themselves, others need of a segment."""
    written = (fold.writers for fold in segment.plan.fold_reads)
    return {op_name(name) for name in asked_for(segment)}.union(*written)


def compile_segment(
    segment: Segment, forms: Mapping[str, Form], taken: Collection[str], meter: Meter | None = None
) -> Segment:
    """Make a segment a function that is the same for every tower.

    Args:
        segment: has a plan, and no function.
        forms: in which tensors cross from segment to segment, by name.
        taken: the names of the tensors that others than segments take.
        meter: records when packing and unpacking begin and end; not where XLA compiles.
    """
    plan: SegmentPlan = segment.plan
    graph, tensors = plan.graph, asked_for(segment)
    if plan.jit_compile or not any(bucket.packed for bucket in (*segment.incoming, *segment.outgoing)):
        meter = None
    definition, outside, added = _graph_def(plan, tensors)
    if plan.jit_compile:
        keep_declared_shapes(graph, definition)
    else:  # XLA makes no copies
        if not plan.shares_memory:
            keep_on_host(definition, graph, outside, needed_ops(segment))
        read_rows_only(definition, sparse_reads(graph, plan.ops), needed_ops(segment))
    specs = [bucket.specs for bucket in segment.incoming]
    # By names under which they are given on: of what tensor, and which of what its form makes of that.
    given_on: dict[str, tuple[str, int | None]] = {name: (name, None) for name in segment.fetches if name in taken}
    for name in segment.fetches:
        given_on.update((each, (name, i)) for i, each in enumerate(forms[name].names if name in forms else ()))
    written = {handle for op in plan.ops for handle in graph.writes[op]} | {fold.handle for fold in plan.fold_writes}
    held = {name: graph.variable_of[name] for name in sorted(written)} if plan.jit_compile else {}

    def body(*args):
        given = iter(args)
        values = {name: forms[name].take(*(next(given) for _ in forms[name].names)) for name in segment.sources}
        received = [[next(given) for _ in each] for each in specs]
        fraction, has_samples, is_first, *others = given
        tower = [] if meter is None else others
        for name in segment.sources:
            if name in graph.variable_of:  # else what is read from it has no shape, which some ops ask for
                tf_compat.describe_handle(values[name], graph.variable_of[name])
        values.update(unpack_all(segment.incoming, received, meter, *tower))
        wanted = sorted(name for name in tensors if name not in values and not name.startswith("@fold_"))
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
        _read_folds(plan, values, written)
        side_effects += _write_folds(plan, values, is_first, side_effects)
        outgoing, packed = pack_all(segment.outgoing, values, fraction, has_samples, plan.shares_memory, meter, *tower)
        with tf.control_dependencies([*side_effects, *packed]):
            token = tf.constant(0.0)
        sent = [tensor for bucket in outgoing for tensor in bucket]
        made = {name: forms[name].give(values[name]) for name in segment.fetches if name in forms}
        fetched = [values[name] if i is None else made[name][i] for name, i in given_on.values()]
        return [*map(tf.identity, fetched), *sent, tf.identity(token)]

    signature = [spec for name in segment.sources for spec in forms[name].specs]
    signature += [spec for each in specs for spec in each]
    signature += [tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)]
    signature += [] if meter is None else [tf.TensorSpec([], tf.int32)]
    signature += [tf.TensorSpec(variable.shape, variable.dtype) for variable in held.values()]
    # On GPUs a segment has ops of the host's, too, and towers have a GPU each: none calls it twice at once.
    meets = not plan.jit_compile and not plan.shares_memory
    function = tf_compat.shared_function(body, signature, plan.jit_compile, meets_in_caller=meets)
    tf_compat.add_functions(added, function)
    sources = tuple(each for name in segment.sources for each in forms[name].names)
    return dataclasses.replace(
        segment,
        sources=sources,
        fetches=tuple(given_on),
        plan=None,
        function=function,
        metered=meter is not None,
        held=tuple(held),
        hold=holding([variable.dtype for variable in held.values()]) if held else None,
    )


def holding(dtypes: Sequence[tf.DType]) -> Any:
    """Return a function that takes the handles of variables of these dtypes, and returns what they hold.

    So a step's graph has one op for each tower, in place of two for each variable.
    """

    def body(*handles):
        held = []
        for handle, dtype in zip(handles, dtypes, strict=True):
            # A variable that was written at places gives copies of its memory to who reads it, unless told to share.
            with tf.control_dependencies([tf.raw_ops.DisableCopyOnRead(resource=handle)]):
                held.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        return held

    return tf_compat.shared_function(body, [tf.TensorSpec([], tf.resource)] * len(dtypes), jit_compile=False)


def _read_folds(plan: SegmentPlan, values: dict[str, tf.Tensor], written: dict[str, Any]) -> None:
    """Read, in a segment, what variables hold after their last write, to be combined over the towers."""
    for fold in plan.fold_reads:
        with tf.control_dependencies([written[name] for name in fold.writers if name in written]):
            exchange = next(e for e in plan.sent if e.result == fold.result)
            value = tf.raw_ops.ReadVariableOp(resource=values[fold.handle], dtype=exchange.dtype)
            values[exchange.source] = tf.ensure_shape(value, exchange.shape)


def _write_folds(
    plan: SegmentPlan, values: dict[str, tf.Tensor], is_first: tf.Tensor, after: Sequence[Any]
) -> list[tf.Operation]:
    """Write, in a segment, what was combined over the towers."""
    writes = []
    with tf.control_dependencies(after):
        for fold in plan.fold_writes:
            value = values[fold.result]
            kept = tf.where(is_first, value, tf.zeros_like(value))
            if plan.shares_memory and not plan.jit_compile:
                kept = own_copy(kept)
            writes.append(tf.raw_ops.AssignVariableOp(resource=values[fold.handle], value=kept))
    return writes


def _graph_def(plan: SegmentPlan, tensors: Collection[str]) -> tuple[tf.compat.v1.GraphDef, dict[str, str], list[Any]]:
    """Return the plan's ops; for tensors from outside, names to map them in by; and new functions."""
    graph, inside = plan.graph, set(plan.ops)
    prefix = "ncclsync"
    while any(name.startswith(prefix) for name in graph.nodes):
        prefix += "_"
    replaced = {member for rewrite in plan.rewrites for member in rewrite.members}
    left = [name for name in plan.ops if name not in replaced]
    used = {name for op in left for name in graph.inputs[op]}
    used |= {name for rewrite in plan.rewrites for name in rewrite.inputs}
    outside: dict[str, str] = {}
    for name in sorted(used):
        if name in graph.exchanges or (op_name(name) not in inside and not graph.is_constant(name)):
            outside[name] = f"{prefix}/outside_{len(outside)}"
    constants = sorted({op_name(name) for name in {*used, *tensors} if graph.is_constant(name)})
    definition = tf.compat.v1.GraphDef()
    definition.versions.CopyFrom(graph.versions)
    for name in [*constants, *left]:
        node = definition.node.add()
        node.CopyFrom(graph.nodes[name])
        # Tower 0's placement means nothing on another tower; the caller's device decides.
        if same_device(node.device, graph.home_device):
            node.device = ""
        node.attr.pop("_class", None)
        del node.input[:]
        for source in graph.inputs[name]:
            node.input.append(outside.get(source, source))
        node.input.extend(f"^{control}" for control in graph.controls[name] if control in inside)
    _add_functions(graph, definition)
    added = close_branches(definition)
    if plan.shares_memory and not plan.jit_compile:
        added += own_memory(definition)
    for i, rewrite in enumerate(plan.rewrites):
        definition.node.extend(rewrite.nodes(f"{prefix}/rewritten_{i}", lambda name: outside.get(name, name)))
    return definition, outside, added


def sparse_reads(graph: StepGraph, ops: Sequence[str]) -> dict[str, tf.TensorShape]:
    """Return the reads among `ops` of variables that the step updates sparsely, and these' shapes."""
    sparse = {handle for op in graph.ops if op.type.startswith("ResourceScatter") for handle in graph.writes[op.name]}
    reads = [name for name in ops if graph.by_name[name].type == "ReadVariableOp"]
    return {name: graph.variable_of[graph.inputs[name][0]].shape for name in reads if graph.inputs[name][0] in sparse}


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
def same_device(one: str, other: str) -> bool:
    """Return whether two names are of one device."""
    first, second = (tf.DeviceSpec.from_string(name) for name in (one, other))
    return (first.device_type, first.device_index) == (second.device_type, second.device_index)
