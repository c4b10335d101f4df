"""Build a step's graph: the ops of its trace, what is put in between, and exchanges, in the order of computation.

It decides nothing: `partition.py` and `conversion.py` do.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import MappingProxyType

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName
from ncclsync.compat.source_lines import KERAS_STEP, own_place, user_line
from ncclsync.ops import Collective, CollectiveKind
from ncclsync.ops.carriers import carried, delivered
from ncclsync.program.graph import StepGraph, TracedGraph, opened
from ncclsync.program.program import Exchange
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placements import Counts, Placement, Shard

GATHER, FOLLOW = Collective(CollectiveKind.ALL_GATHER), Collective(CollectiveKind.BROADCAST)
ADD_UP = Collective(CollectiveKind.ALL_REDUCE, "sum")


class StepBuilder:
    """Build a `StepGraph`, whose fields the attributes become; others read them, and change them by the methods."""

    def __init__(self, traced: TracedGraph, differing: Iterable[TensorName] = ()) -> None:
        """Begin with a trace, of which no op is computed yet; the arguments `differing` do between shards."""
        self.traced = traced
        self.functions = Functions(traced.definition.library.function, traced.tf_graph)
        self.nodes, self.writes, self.must_run = dict(traced.nodes), dict(traced.writes), set(traced.must_run)
        self.inputs: dict[OpName, Sequence[TensorName]] = dict(traced.inputs)
        self.controls: dict[OpName, Sequence[OpName]] = dict(traced.controls)
        self.ops: list[tf.Operation] = []
        self.by_name: dict[OpName, tf.Operation] = {}
        self.stood_for: dict[OpName, tf.Operation] = {}
        self.open_axes: dict[TensorName, int] = {}
        self.by_rows: dict[TensorName, Shard] = {}
        self.counting: dict[TensorName, Counts] = {}
        self.local: set[OpName] = set()
        self.differing = set(differing)
        self.exchanges: dict[TensorName, Exchange] = {}
        self._exchanged: dict[tuple[TensorName, Collective, TensorName | None], tf.Tensor] = {}
        self._seen, self._version = len(traced.tf_graph.get_operations()), traced.tf_graph.version

    def append(self, op: tf.Operation, tensors: Sequence[tf.Tensor] | None = None) -> None:
        """Compute an op next, unless it was computed before; of `tensors`, if given, in place of its inputs."""
        if tensors is not None:
            self.inputs[op.name] = [tensor.name for tensor in tensors]
        if op.name in self.by_name:
            return
        self.ops.append(op)
        self.by_name[op.name] = op
        if not self.differing.isdisjoint(self.inputs[op.name]):
            self.local.add(op.name)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Take over the ops that are made meanwhile, to be computed before the op that is being placed."""
        with self.traced.tf_graph.as_default(), tf.name_scope("ncclsync_partition/"), tf.device(None):
            yield
        if self.traced.tf_graph.version == self._version:  # nothing was made
            return
        made = self.traced.tf_graph.get_operations()[self._seen :]
        self._seen, self._version = self._seen + len(made), self.traced.tf_graph.version
        made = [op for op in made if not op.outputs or op.outputs[0].name not in self.exchanges]
        if any(map(tf_compat.calls_functions, made)):
            definitions = self.traced.tf_graph.as_graph_def().library.function
            self.functions.definitions.update((definition.signature.name, definition) for definition in definitions)
        for op in made:
            self.nodes[op.name], self.writes[op.name] = op.node_def, set()
            self.controls[op.name] = [control.name for control in op.control_inputs]
            self.append(op, op.inputs)
            if op.name in self.local:
                self.differ(op.outputs)

    def exchange(
        self, tensor: tf.Tensor, collective: Collective, op: tf.Operation, when: TensorName | None = None
    ) -> tf.Tensor:
        """Exchange a tensor with its counterparts, for `op`; return what stands for the result; see `Exchange`."""
        key = (tensor.name, collective, when)
        if key in self._exchanged:
            return self._exchanged[key]
        sent, wire = tensor, collective
        if tensor.dtype.name not in native.DTYPES and not collective.concatenates:  # rows are, as they are
            if tensor.dtype == tf.bool and collective.op == "sum":
                wire = dataclasses.replace(collective, op="max")  # whether any is True
            with self.building():
                sent = carried(tensor)
        axis = self.open_axes.get(sent.name)
        shape = collective.shape(sent.shape if axis is None else opened(sent.shape, axis))
        with self.traced.tf_graph.as_default(), tf.name_scope(""):
            result = tf.compat.v1.placeholder(sent.dtype, shape, name=f".exchange_{len(self.exchanges)}")
        mark = self.traced.trace.marks.get(op.name)
        line = place = user_line(op.traceback) if mark is None else mark.line
        if line == KERAS_STEP:
            asks = op.graph.get_operation_by_name(mark.of) if mark is not None and mark.of else op
            place = f"{KERAS_STEP}, {own_place(asks)[0]}"
        self.exchanges[result.name] = Exchange(sent.name, result.name, wire, shape, sent.dtype, when, line, place)
        if collective.differs:
            self.differ([result])
        if sent is not tensor:
            with self.building():
                result = delivered(result, tensor.dtype)
        return self._exchanged.setdefault(key, result)

    def is_added_up(self, tensor: tf.Tensor) -> bool:
        """Return whether the towers' parts of a tensor are added up somewhere in the step."""
        return (tensor.name, ADD_UP, None) in self._exchanged

    def differ(self, tensors: Iterable[tf.Tensor]) -> None:
        """Know that tensors may differ between towers."""
        self.differing.update(tensor.name for tensor in tensors)

    def learn(self, tensor: tf.Tensor, placed: Placement) -> None:
        """Learn how a tensor is placed that stands for one of the trace's."""
        if isinstance(placed, Shard) and tensor.shape.rank and tensor.shape[placed.axis] is not None:
            self.open_axes[tensor.name] = placed.axis  # the traced length is the batch's
        if isinstance(placed, Shard) and not placed.unit:
            self.by_rows[tensor.name] = placed
        if isinstance(placed, Counts) and not placed.unit:
            self.counting[tensor.name] = placed
        if not placed.whole:
            self.differ([tensor])

    def read(self, handle: TensorName, after: Iterable[tf.Operation]) -> tf.Tensor:
        """Read a variable after some ops."""
        with self.building():
            dtype = self.traced.variable_of[handle].dtype
            read = tf.raw_ops.ReadVariableOp(resource=self.traced.tensor(handle), dtype=dtype)
        self.controls[read.op.name] = [op.name for op in after]
        return read

    def assign(self, handle: TensorName, value: tf.Tensor, after: Iterable[tf.Operation] = ()) -> tf.Operation:
        """Assign a variable after some ops."""
        with self.building():
            write = tf.raw_ops.AssignVariableOp(resource=self.traced.tensor(handle), value=value)
        self.writes[write.name] = {handle}
        self.controls[write.name] = [op.name for op in after]
        return write

    def require(self, op: OpName) -> None:
        """Let an op run though no other takes its results."""
        self.must_run.add(op)

    def replace(self, op: OpName, other: OpName, but_not_to: Collection[OpName] = ()) -> None:
        """Redirect control dependencies from an op to its replacement, which runs, except those of `but_not_to`."""
        self.require(other)
        for name, controls in self.controls.items():
            if op in controls and name not in but_not_to:
                self.controls[name] = [other if control == op else control for control in controls]

    def runs_elsewhere(self, op: tf.Operation, made: Iterable[tf.Operation]) -> None:
        """Let branches that were `made` stand for an op: it is run there, after what it waits for."""
        for branch in made:
            self.stood_for[branch.name] = op
            self.controls[branch.name] = [*self.controls[branch.name], *self.controls[op.name]]
        self.by_name[op.name] = op

    def finished(
        self, axes: Axes, stretched: bool, folds: Collection[OpName], outputs: Sequence[tuple[TensorName, bool]]
    ) -> StepGraph:
        """Return the graph."""
        return StepGraph(
            traced=self.traced,
            functions=self.functions,
            axes=axes,
            nodes=MappingProxyType(self.nodes),
            inputs=MappingProxyType(self.inputs),
            controls=MappingProxyType(self.controls),
            writes=MappingProxyType(self.writes),
            must_run=frozenset(self.must_run),
            ops=tuple(self.ops),
            by_name=MappingProxyType(self.by_name),
            stood_for=MappingProxyType(self.stood_for),
            open_axes=MappingProxyType(self.open_axes),
            by_rows=MappingProxyType(self.by_rows),
            counting=MappingProxyType(self.counting),
            stretched=stretched,
            local=frozenset(self.local),
            differing=frozenset(self.differing),
            exchanges=MappingProxyType(self.exchanges),
            folds=frozenset(folds),
            outputs=tuple(outputs),
        )
