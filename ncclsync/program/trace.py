"""Trace a step once, as the program of one device, with marks where it calls a collective."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.functions import compare_traces
from ncclsync.compat.names import OpName
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Context, Mark, Share, running_in
from ncclsync.program.plain import inline_calls, keep_axes
from ncclsync.semantics.placing import told_fault
from ncclsync.sharding.shards import components_of

Opened = Sequence[tuple[tf.Variable, int]]
_LARGE_BYTES = 4096  # of a constant that stands for its shape alone


class Site(NamedTuple):
    """Hold what a shard's segments are told of where they run; scalars.

    Attributes:
        has_samples: 1 or 0, int32, in the host's memory: whether the shard has any.
        is_first: whether the shard is the first of its process, which keeps sums of metrics.
        rank: the tower's number, int32.
    """

    has_samples: Any
    is_first: Any
    rank: Any


@dataclasses.dataclass(frozen=True)
class Trace:
    """Hold a step as `tf.function` traced it: the program of one device on the whole batch.

    Attributes:
        function: the ConcreteFunction, of the batch, a tower's `Share` of it, and a `Site`.
        batch, share, site: these, of the graph's tensors.
        marks: by name of the marking op.
        jit_compile: whether XLA compiles it.
        opened: see `trace`.
        rows: how many every batch has for which this is the program; None: any.
        faults: of ncclsync's own, for which the graph is not as plain as it could be, in words.
    """

    function: Any
    batch: Any
    share: Share
    site: Site
    marks: dict[OpName, Mark]
    jit_compile: bool
    opened: Opened = ()
    rows: int | None = None
    faults: tuple[str, ...] = ()

    @functools.cached_property
    def definition(self) -> tf.compat.v1.GraphDef:
        """Return its graph's, to be read; the graph changes no more."""
        definition: tf.compat.v1.GraphDef = self.function.graph.as_graph_def()
        return definition


def error_of_start_value(error: Exception, graph: tf.Graph) -> NcclSyncError:
    """Return what to say of a variable that a step would create by its batch, given TensorFlow's error."""
    op = tf_compat.not_lifted(error, graph)
    told = NcclSyncError(
        "Expected a variable that a step creates to begin with a value that needs no batch. Received: "
        f"{op.type if op else 'an op'} of the batch, at {user_line(op.traceback if op else ())}. Create the variable "
        "before training: of the rows of a first batch, or of zeros that the first step replaces"
    )
    told.__cause__ = error
    return told


def trace(step: Callable[[Any], Any], batch_specs: Any, *, jit_compile: bool = False, opened: Opened = ()) -> Trace:
    """Trace `step(batch)` for one tower.

    Args:
        step: any function of a batch; its collectives become marks.
        batch_specs: the batch's structure with a `tf.TypeSpec` (or None) in place of each tensor.
        jit_compile: whether XLA compiles it. TensorFlow then writes other gradients of loops and branches.
        opened: (variable, its rows per sample of the batch): the trace leaves its number of rows open.

    Returns:
        The trace: a valid program of one tower, in which a mark changes nothing.

    Raises:
        NcclSyncError: for a collective where the step cannot be cut, and for a variable that the step would create by
            its batch; the message names the line.
        Exception: whatever the step raises while it is traced.
    """
    # Each graph, its context and arguments: tf.function traces again when a step created variables; the last counts.
    traces: list[tuple[tf.Graph, Context, Any]] = []
    failures: list[BaseException] = []
    created: list[None] = []

    def made_by_itself(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        # Its start value waits for nothing of the step: TensorFlow computes it before the step.
        created.append(None)
        with tf.control_dependencies(None):
            return next_creator(**kwargs)

    def traced(batch, share, site):
        if failures:
            return None
        context = Context(share)
        traces.append((tf.compat.v1.get_default_graph(), context, (batch, share, site)))
        with running_in(context), tf.variable_creator_scope(made_by_itself):
            try:
                return step(batch)
            except (Exception, tf_compat.TraceEnded) as error:  # of any kind: it is the step's own
                # Raised when tf.function has initialised the variables that were created, such as an optimizer's:
                # their owners do not create them again, if the step is traced otherwise, or by a later call.
                failures.append(error)
                return None

    number = tf.TensorSpec([], tf.int32)
    share, site = Share(tf.TensorSpec([], tf.float64), *[number] * 4), Site(number, tf.TensorSpec([], tf.bool), number)
    made = tf.function(traced, autograph=False, jit_compile=jit_compile or None)
    try:
        with tf_compat.open_branches(), tf_compat.open_rows(variable for variable, _ in opened):
            function = made.get_concrete_function(batch_specs, share, site)
    except tf_compat.UnliftableError as error:
        failures.append(error_of_start_value(error, traces[0][0]))
    finally:
        for graph, *_ in traces:
            tf_compat.forget_custom_gradients(graph)
        if failures:
            raise failures.pop()
    if len(traces) > 1:
        compare_traces(traces[0][0], traces[-1][0], len(created))
    faults = []
    try:
        inline_calls(function.graph)
        keep_axes(function.graph)
    except Exception as fault:  # of any kind: of a TensorFlow that is not known yet
        faults.append(f"Exact, but more is computed alike: {told_fault(fault, None)}")
    _, context, (batch, share, site) = traces[-1]
    result = Trace(function, batch, share, site, context.marks, jit_compile, opened, faults=tuple(faults))
    for _, context, _ in traces:  # TensorFlow keeps the functions of custom gradients for good, and they keep theirs
        vars(context).clear()
    return result


class Refusals:
    """Say what of a trace TensorFlow would refuse if a batch's lengths were known.

    One device's trace raises an error there, which Python may handle, and go another way. The functions of loops and
    branches are not asked.
    """

    def __init__(self, traced: Trace) -> None:
        """Take what the shapes of a trace follow from."""
        graph: tf.Graph = traced.function.graph
        self._batch = [tensor.op.name for tensor in components_of(traced.batch)]
        ops = graph.get_operations()
        self._graph = weakref.ref(graph)
        self._definition = tf.compat.v1.GraphDef(versions=traced.definition.versions)
        hiding = {kind for kind, op in {op.type: op for op in ops}.items() if _hides_shapes(op)}
        # Of others TensorFlow infers them: with open lengths it takes some for what they are not, as of a softmax's
        # cross entropy that broadcasts its labels.
        shapes = {op.name: [one.shape.as_proto() for one in op.outputs] for op in ops if op.type in hiding}
        arguments = [op.outputs[0] for op in ops if op.type == "Placeholder"]
        handles = {one.op.name: one for one in arguments if one.dtype == tf.resource}
        for node in traced.definition.node:
            held = tf_compat.spec_behind(handles[node.name]) if node.name in handles else None
            if held is not None:  # an argument has no shape, and some ops take that of the handle for the variable's
                made = self._definition.node.add(name=node.name, op="VarHandleOp")
                made.attr["dtype"].type = held.dtype.as_datatype_enum
                made.attr["shape"].shape.CopyFrom(held.shape.as_proto())
                continue
            if node.op == "Const" and node.ByteSize() > _LARGE_BYTES:  # its numbers say no shape
                value = node.attr["value"].tensor
                made = self._definition.node.add(name=node.name, op="Placeholder")
                made.attr["dtype"].type = value.dtype
                made.attr["shape"].shape.CopyFrom(value.tensor_shape)
                continue
            made = self._definition.node.add()
            made.CopyFrom(node)
            made.device = ""
            if node.name in shapes:
                made.attr["_output_shapes"].list.shape.extend(shapes[node.name])

    def line(self, specs: Any) -> str | None:
        """Return the line, if it is still known, of an op that is refused for a batch of these specs; None: none is."""
        shapes = {name: spec.shape.as_proto() for name, spec in zip(self._batch, components_of(specs), strict=True)}
        for node in self._definition.node:
            if node.name in shapes:
                node.attr["shape"].shape.CopyFrom(shapes[node.name])
        try:
            tf_compat.infer_shapes(self._definition)
        except tf.errors.OpError as error:
            # A traceback is TensorFlow's memory, and ends with the graph.
            graph, name = self._graph(), tf_compat.node_named(error)
            known = graph is not None and next((op for op in graph.get_operations() if op.name == name), None)
            return user_line(known.traceback) if known else "an op that does not fit each number of rows"
        return None


def _hides_shapes(op: tf.Operation) -> bool:
    """Return whether shapes of an op's results do not follow from its inputs: it runs functions, or looks within."""
    return tf_compat.calls_functions(op) or any(tensor.dtype in (tf.resource, tf.variant) for tensor in op.inputs)
