"""Make a function of a segment, which unpacks what it receives, runs its ops, and packs what it sends.

`cut.py` decides what belongs to a segment, `towers/laying_out.py` calls the function on every tower.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.ops.spans import Meter
from ncclsync.program.crossing import Form, close_branches, keep_declared_shapes, take_known_branches
from ncclsync.program.graph import StepGraph
from ncclsync.program.host_values import HostValues
from ncclsync.program.ordered_sums import order_sums
from ncclsync.program.own_memory import own_memory
from ncclsync.program.packing import pack_all, unpack_all
from ncclsync.program.program import Bucket, Outcome, Segment
from ncclsync.program.row_reads import read_rows_only


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """Replace some ops of a segment by one node that computes the same.

    Attributes:
        members: names of the ops that are replaced, inputs before consumers.
        inputs: names of the tensors and handles that the node takes.
        node: it has the name of the member whose result others take.
    """

    members: tuple[OpName, ...]
    inputs: tuple[TensorName, ...]
    node: tf.compat.v1.NodeDef


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """Name what a segment holds, by names of the trace.

    Attributes:
        graph: the graph that names stand for.
        ops: names, inputs before consumers.
        sources, incoming, fetches, outgoing, once, unrepeatable: see `Segment`.
        jit_compile: whether XLA compiles it.
        shares_memory: see `Target`.
        rewrites: what passes have replaced.
    """

    graph: StepGraph
    ops: Sequence[OpName]
    sources: tuple[TensorName, ...]
    incoming: tuple[Bucket, ...]
    fetches: tuple[TensorName, ...]
    outgoing: tuple[Bucket, ...]
    once: bool = False
    unrepeatable: str = ""
    jit_compile: bool = False
    shares_memory: bool = False
    rewrites: Sequence[Rewrite] = ()

    @property
    def needed(self) -> set[TensorName]:
        """Return the names of the segment's tensors that are needed outside it."""
        return {*self.fetches, *(exchange.source for bucket in self.outgoing for exchange in bucket.exchanges)}

    @property
    def needed_ops(self) -> set[OpName]:
        """Return the names of the ops that make them."""
        return set(map(op_name, self.needed))


def compile_segment(
    plan: SegmentPlan, forms: Mapping[TensorName, Form], taken: Collection[TensorName], meter: Meter | None = None
) -> Segment:
    """Make a segment a function that is the same for every tower.

    Args:
        plan: of the segment.
        forms: in which tensors cross from segment to segment, by name.
        taken: the names of the tensors that others than segments take.
        meter: records when packing and unpacking begin and end; not where XLA compiles.
    """
    graph, traced, trace = plan.graph, plan.graph.traced, plan.graph.traced.trace
    if plan.jit_compile:
        meter = None
    definition, outside, added = _graph_def(plan)
    crossing = {name: forms[name] for name in plan.fetches if name in forms and forms[name].is_given}
    fetches = {*plan.fetches}.intersection(taken).union(*(form.names for form in crossing.values()))
    written = sorted({handle for op in plan.ops for handle in graph.writes[op]})
    held = [traced.variable_of[name] for name in written] if plan.jit_compile else []
    signature = [
        [forms[name].specs for name in plan.sources],
        [bucket.specs for bucket in plan.incoming],
        [tf.TensorSpec(variable.shape, variable.dtype) for variable in held],
    ]

    def body(*args):
        sources, received, _ = tf.nest.pack_sequence_as(signature, args)
        values: dict[TensorName, Any] = {
            name: forms[name].take(*each) for name, each in zip(plan.sources, sources, strict=True)
        }
        for name in traced.variable_of.keys() & values:  # else a read has no shape, and some ops ask for it
            tf_compat.describe_handle(values[name], traced.variable_of[name])
        rank = values.get(trace.site.rank.name)
        values.update(unpack_all(plan.incoming, received, meter, rank))
        wanted = sorted(plan.needed - values.keys())
        effects = sorted({node.name for node in definition.node} & graph.must_run)
        imported = tf.graph_util.import_graph_def(
            definition,
            input_map={name: values[name] for name in outside},
            return_elements=[*wanted, *effects],
            name="segment",
        )
        values.update(zip(wanted, imported, strict=False))
        fraction, has_samples = (values.get(one.name) for one in (trace.share.fraction, trace.site.has_samples))
        selects = plan.jit_compile or not plan.shares_memory
        sent, packed = pack_all(plan.outgoing, values, fraction, has_samples, selects, meter, rank)
        with tf.control_dependencies([*imported[len(wanted) :], *packed]):
            token = tf.constant(0.0)
        fetched = {name: values[name] for name in fetches & values.keys()}
        for name, form in crossing.items():
            fetched.update(zip(form.names, form.give(values[name]), strict=True))
        return Outcome(tf.nest.map_structure(tf.identity, fetched), sent, tf.identity(token))

    # On GPUs a segment has ops of the host's, too, and towers have a GPU each: none calls it twice at once.
    meets = not plan.jit_compile and not plan.shares_memory
    function = tf_compat.shared_function(body, tf.nest.flatten(signature), plan.jit_compile, meets_in_caller=meets)
    tf_compat.add_functions(added, function)
    return Segment(
        tuple(each for name in plan.sources for each in forms[name].names),
        plan.incoming,
        tuple(sorted(fetches)),
        plan.outgoing,
        function,
        plan.once,
        plan.unrepeatable,
        tuple(written),
        _sliced(graph, plan.ops),
        holding([variable.dtype for variable in held]) if held else None,
    )


def _sliced(graph: StepGraph, ops: Sequence[OpName]) -> frozenset[TensorName]:
    """Return `Segment.sliced`."""
    whole = ("Assign", "ResourceApply", "Rng")  # begins of types that write all of a variable
    sliced = {n for op in ops if not graph.by_name[op].type.startswith(whole) for n in graph.writes[op]}
    for op in ops:  # before rows are taken of it, a variable gets memory of its own
        handles = graph.traced.variable_of.keys() & {*graph.inputs[op]}
        if handles and any(one.startswith("ResourceGather") for one in graph.functions.op_types(graph.by_name[op])):
            sliced |= handles
    return frozenset(sliced)


def holding(dtypes: Sequence[tf.DType]) -> Any:
    """Return a function that takes the handles of variables of these dtypes, and returns what they hold.

    So a step's graph has one op for each tower, in place of two for each variable.
    """

    def body(*handles):
        held = []
        for handle, dtype in zip(handles, dtypes, strict=True):
            # After a sparse write a variable gives its readers copies, unless it is told to share its memory.
            with tf.control_dependencies([tf.raw_ops.DisableCopyOnRead(resource=handle)]):
                held.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        return held

    return tf_compat.shared_function(body, [tf.TensorSpec([], tf.resource)] * len(dtypes), jit_compile=False)


def _graph_def(plan: SegmentPlan) -> tuple[tf.compat.v1.GraphDef, set[TensorName], list[Any]]:
    """Return the plan's ops, rewritten; the names of the tensors from outside that they take; and new functions."""
    graph, traced, inside = plan.graph, plan.graph.traced, set(plan.ops)
    replaced = {member for rewrite in plan.rewrites for member in rewrite.members}
    left = [name for name in plan.ops if name not in replaced]
    used = {name for op in left for name in graph.inputs[op]}
    used |= {name for rewrite in plan.rewrites for name in rewrite.inputs}
    constants = sorted({op_name(name) for name in {*used, *plan.needed} if graph.is_constant(name)})
    definition = tf.compat.v1.GraphDef(versions=traced.definition.versions)
    for name in [*constants, *left]:
        node = definition.node.add()
        node.CopyFrom(graph.nodes[name])
        # Tower 0's placement means nothing on another tower; the caller's device decides.
        if same_device(node.device, traced.home_device):
            node.device = ""
        node.attr.pop("_class", None)
        del node.input[:]
        node.input.extend([*graph.inputs[name], *(f"^{one}" for one in graph.controls[name] if one in inside)])
    called = graph.functions.reached(definition.node)
    definition.library.function.extend(graph.functions.definitions[name] for name in called)
    definition.library.gradient.extend(one for one in traced.definition.library.gradient if one.function_name in called)
    added = [graph.functions.definitions[name] for name in called if name in graph.functions.made]
    added += close_branches(definition)
    if plan.shares_memory and not plan.jit_compile:
        added += own_memory(definition)
    definition.node.extend(rewrite.node for rewrite in plan.rewrites)
    inside.update(constants)
    outside = {name for name in used if op_name(name) not in inside}
    if plan.jit_compile:
        keep_declared_shapes(graph, definition)
        take_known_branches(graph, definition)
    else:  # XLA makes no copies
        if not plan.shares_memory:
            HostValues(definition, graph, outside).run(plan.needed_ops)
        read_rows_only(definition, graph, plan.needed_ops)
        added += order_sums(definition, on_cpu=plan.shares_memory)
    return definition, outside, added


@functools.cache
def same_device(one: str, other: str) -> bool:
    """Return whether two names are of one device."""
    first, second = (tf.DeviceSpec.from_string(name) for name in (one, other))
    return (first.device_type, first.device_index) == (second.device_type, second.device_index)
