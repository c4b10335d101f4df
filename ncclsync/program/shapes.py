"""Compare the shapes that TensorFlow infers for a tower's part of a step with those that placements say.

Where a rule is wrong, or what is put in, a tower's number of rows meets the batch's. TensorFlow's own shape functions
know nothing of placements. They are asked once for all that a tower computes, for batches of two sizes. Left out is
what has the same shapes as on one device: what all towers compute alike, and element-wise ops of one input. The results
of loops and branches are taken to be as they are placed; the functions that they run are asked for by themselves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.ops import CollectiveKind
from ncclsync.program.graph import StepGraph
from ncclsync.program.partition import Fault, PlacedStep
from ncclsync.program.program import Exchange
from ncclsync.program.schedule import live_ops
from ncclsync.semantics import rules
from ncclsync.semantics.axes import Axes, Rows
from ncclsync.semantics.functions import in_order
from ncclsync.semantics.placements import REPLICATE, Counts, Partial, Placement, Replicate, Shard
from ncclsync.semantics.placing import Body

# A tower's rows, and on how many towers: many rows, which ops may divide; and one row, which may be broadcast.
_SIZES = ((840, 3), (1, 2))
_LARGE = 1024  # elements of a constant of which the shape alone is taken


class ShapeMismatch(Exception):
    """A tower's tensor has another shape than its placement says."""


def find_mismatch(placed: PlacedStep) -> Fault | None:
    """Return the fault of the first op of which a tower's tensors have other shapes than their placements say."""
    sizes: Iterable[tuple[int, int]] = _SIZES
    graph, traced = placed.graph, placed.graph.traced
    given = ((traced.tensor(name), one) for name, one in traced.argument_placements.items())
    totals = {tensor.shape[0] for tensor, one in given if isinstance(one, Shard) and not one.unit} - {None}
    lengths = placed.conversions.lengths
    totals |= {length // each for length, each in lengths.declared} | {lengths.batch} - {None}
    if totals:  # the only batches that the step takes
        total = max(totals)
        sizes = [(total // n, n) for n in range(2, total + 1) if total % n == 0][:1]
    scopes = [
        _step_of(placed),
        *(
            _body_of(graph, body, ran.op)
            for ran in placed.placer.bodies
            if ran.op.name in graph.local
            for body in ran.every()
        ),
    ]
    for (rows, towers), scope in itertools.product(sizes, scopes):
        fault = _Tower(scope, rows, towers).fault()
        # What TensorFlow refuses in the trace, too, one device refuses.
        if fault is not None and _Tower(scope.as_traced(), rows * towers, 1).fault() is None:
            return fault
    return None


def _may_count(tensor: tf.Tensor) -> bool:
    """Return whether a tensor's numbers may say a shape."""
    return tensor.dtype in (tf.int32, tf.int64) and (tensor.shape.rank or 0) < 2


def _is_as_long(op: tf.Operation) -> bool:
    """Return whether the input can stand for the result: same shape and dtype, and no number that may say a length."""
    one, other = op.inputs[0], op.outputs[0]
    return one.dtype == other.dtype and other.shape.rank != 0 and not _may_count(other)  # a number may say a length


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Describe what a tower computes at one level: the step, or a function that the step runs.

    Attributes:
        graph: the step.
        axes: of the graph.
        tensor: finds a tensor of the graph by its name.
        ops: that a tower computes; asked: those of which the shapes are asked.
        traced: the ops as they were traced.
        inputs: of the ops, by their names; nodes: NodeDefs.
        stands: by name of a tensor that towers have apart: the traced tensor that it stands for, and how it is placed.
        within: the op of the step that runs the function; None: this is the step.
    """

    graph: StepGraph
    axes: Axes
    tensor: Callable[[TensorName], tf.Tensor]
    ops: Sequence[tf.Operation]
    asked: Collection[OpName]
    traced: Sequence[tf.Operation]
    inputs: Mapping[OpName, Sequence[TensorName]]
    nodes: Mapping[OpName, Any]
    stands: Mapping[TensorName, tuple[TensorName, Placement]]
    within: tf.Operation | None = None

    def as_traced(self) -> "_Scope":
        """Return the same as one device computes it."""
        inputs = self.graph.traced.inputs if self.within is None else self.inputs
        asked = {op.name for op in self.traced}
        return dataclasses.replace(self, ops=self.traced, asked=asked, inputs=inputs, stands={})

    def is_traced(self, name: OpName) -> bool:
        """Return whether an op is one of the trace's; others were put in."""
        return self.within is not None or name in self.graph.traced.nodes


def _step_of(placed: PlacedStep) -> _Scope:
    graph, traced = placed.graph, placed.graph.traced
    stands = {name: (name, placement) for name, placement in traced.argument_placements.items()}
    for name, (tensor, placement) in placed.conversions.placed.items():
        stands.setdefault(tensor.name, (name, placement))
    for (name, _, after), tensor in placed.conversions.converted.items():
        if name in stands:
            stands.setdefault(tensor.name, (stands[name][0], after))
    needed = live_ops(graph) - traced.placeholders
    # That take what towers have apart, or were put in.
    asked = {op.name for op in graph.ops if op.name in graph.local or op.name not in traced.nodes}
    asked = needed & (asked | {op.name for op in graph.ops if all(map(_may_count, op.outputs))})
    before = [op for op in traced.ops if op.name not in traced.placeholders]
    return _Scope(graph, graph.axes, traced.tensor, graph.ops, asked, before, graph.inputs, graph.nodes, stands)


def _body_of(graph: StepGraph, body: Body, within: tf.Operation) -> _Scope:
    ops = [op for op in in_order(body.graph.get_operations()) if op.type != "Placeholder"]
    stands = {name: (name, placement) for name, placement in body.placements.items() if not placement.whole}
    inputs = {op.name: [tensor.name for tensor in op.inputs] for op in ops}
    nodes = {op.name: op.node_def for op in ops}
    find = body.graph.get_tensor_by_name
    return _Scope(graph, body.axes, find, ops, inputs.keys(), ops, inputs, nodes, stands, within)


class _Tower:
    """Infer the shapes of what one of several towers computes."""

    def __init__(self, scope: _Scope, rows: int, towers: int) -> None:
        self._scope, self._step, self._rows, self._towers = scope, scope.graph, rows, towers
        self._graph = tf.compat.v1.GraphDef(versions=self._step.traced.definition.versions)
        self._sources: dict[TensorName, str] = {}  # the output of a node that stands for a tensor

    def fault(self) -> Fault | None:
        """Compare all shapes; see `find_mismatch`."""
        try:
            for op in self._scope.ops:
                if op.name in self._scope.asked:
                    self._add(op)
            tf_compat.infer_shapes(self._graph)
        except tf.errors.OpError as error:
            name = tf_compat.node_named(error)
            words = f"{error.message}, for {self._rows} of {self._rows * self._towers} rows"
            return Fault(self._scope.within or self._asking(name), ShapeMismatch(words))
        return None

    def _asking(self, name: OpName) -> tf.Operation:
        """Return the op of the trace for which this one was put in, or itself."""
        ops, traced = self._step.ops, self._step.traced
        at = next((i for i, op in enumerate(ops) if op.name == name), 0)
        return next((op for op in ops[at:] if op.name in traced.nodes and op.name not in traced.placeholders), ops[-1])

    def _add(self, op: tf.Operation) -> None:
        """Ask for the shapes of an op's results."""
        if not op.outputs or op.type == "Const" or tf_compat.calls_functions(op) or self._step.functions.runs(op):
            return
        names = self._scope.inputs[op.name]
        pairs = zip(op.inputs, names, strict=True)
        if any(one.dtype == tf.variant and name not in self._sources for one, name in pairs):
            return  # what is within is known by the op alone that has made it
        inputs = [self._source(name) for name in names]
        if self._scope.is_traced(op.name) and op.type in rules.UNARY and _is_as_long(op):
            self._sources[op.outputs[0].name] = inputs[0]
            return
        node = self._node(op.name)
        node.input[:] = inputs
        # A gradient of one row is summed over the rows, too, as if that row had been broadcast; a reshape follows.
        may_lose_rows = self._rows == 1 and any(one.op.type == "BroadcastGradientArgs" for one in op.inputs)
        known = self._towers > 1 and not may_lose_rows
        shapes = [self._lengths(output.name) if known else None for output in op.outputs]
        if shapes.count(None) < len(shapes):  # which TensorFlow compares
            node.attr["_output_shapes"].list.shape.extend(tf.TensorShape(one).as_proto() for one in shapes)
        self._sources.update((output.name, output.name) for output in op.outputs)

    def _node(self, name: OpName) -> Any:
        node = self._graph.node.add()
        node.CopyFrom(self._scope.nodes[name])
        node.device, node.input[:] = "", []
        node.attr.pop("_class", None)
        return node

    def _source(self, name: TensorName) -> str:
        if name not in self._sources:
            exchange = None if self._scope.within else self._step.exchanges.get(name)
            self._sources[name] = self._given(name) if exchange is None else self._exchanged(exchange)
        return self._sources[name]

    def _given(self, name: TensorName) -> str:
        """Stand for a tensor for whose shape TensorFlow is not asked."""
        traced, tensor = self._step.traced, self._scope.tensor(name)
        if tensor.op.type == "Const" and (tensor.shape.num_elements() or 0) <= _LARGE:
            return f"{self._node(tensor.op.name).name}:0"
        if self._scope.within is not None:
            is_given = tensor.op.type == "Placeholder" and _may_count(tensor)
            numbers = self._numbers(tensor) if is_given else None
            return self._unknown(tensor.dtype, self._lengths(name)) if numbers is None else self._constant(numbers)
        share = traced.trace.share
        counted = {share.rows.name: self._rows, share.total.name: self._rows * self._towers}
        if name in counted:
            return self._constant(np.int32(counted[name]))
        if name not in traced.variable_of:
            return self._unknown(tensor.dtype, self._lengths(name))
        node, variable = self._new("VarHandleOp"), traced.variable_of[name]
        node.attr["dtype"].type = variable.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
        return f"{node.name}:0"

    def _numbers(self, tensor: tf.Tensor) -> Any:
        """Return the numbers that a function is given, of which some may count rows; None: not known."""
        found = self._scope.axes.elements(tensor)
        _, placed = self._scope.stands.get(tensor.name, (None, REPLICATE))
        counts = placed.counts if isinstance(placed, Counts) else (0,) * len(found)
        if not found or not all(isinstance(one, int) or (one and one.each) for one in found):
            return None
        rows = (self._rows if count else self._rows * self._towers for count in counts)
        numbers: Any = [one.each * n if isinstance(one, Rows) else one for one, n in zip(found, rows, strict=True)]
        return np.reshape(numbers, tensor.shape).astype(tensor.dtype.as_numpy_dtype)

    def _new(self, op_type: str) -> Any:
        return self._graph.node.add(name=f"{self._step.traced.free_prefix}_{len(self._graph.node)}", op=op_type)

    def _unknown(self, dtype: tf.DType, shape: Any) -> str:
        node = self._new("Placeholder")
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        return f"{node.name}:0"

    def _constant(self, value: Any) -> str:
        node, dtype = self._new("Const"), tf.as_dtype(value.dtype)
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return f"{node.name}:0"

    def _exchanged(self, exchange: Exchange) -> str:
        """Stand for an exchange whose towers send as many rows each."""
        source, kind, dtype = self._source(exchange.source), exchange.collective.kind, exchange.dtype
        of_one_shape = kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST)
        if of_one_shape and (exchange.shape.rank or 0) > 1:
            return source
        inputs = []
        if of_one_shape:  # its numbers, which may say a shape, are others
            inputs = [self._unknown(tf.bool, []), source, source]
        elif kind == CollectiveKind.ALL_GATHER and exchange.when is None:
            inputs = [source] * self._towers + [self._constant(np.int32(0))]
        if not inputs:
            return self._unknown(dtype, exchange.shape)
        node = self._graph.node.add(name=op_name(exchange.result), op="SelectV2" if of_one_shape else "ConcatV2")
        node.input[:] = inputs
        node.attr["T"].type = dtype.as_datatype_enum
        if not of_one_shape:
            node.attr["N"].i, node.attr["Tidx"].type = self._towers, tf.int32.as_datatype_enum
        return f"{node.name}:0"

    def _lengths(self, name: TensorName) -> list[int | None] | None:
        """Return a tower's shape of a tensor, as far as it is known by what it stands for and by its placement."""
        stands, placement = self._scope.stands.get(name, (name, REPLICATE))
        if name not in self._scope.stands and not self._scope.is_traced(op_name(name)):  # it was put in
            return None
        lengths = self._scope.axes.lengths(self._scope.tensor(stands), asks=False)
        if lengths is None or not isinstance(placement, (Replicate, Partial, Shard, Counts)):
            return None
        total = self._rows * self._towers
        shape = [one.each * total or None if isinstance(one, Rows) else one for one in lengths]
        if 0 in shape:  # a result that was not asked for, as of SVD
            return None
        if isinstance(placement, Shard):
            count = shape[placement.axis]
            own = (placement.rows or 0) * self._rows or (count and count * self._rows // total)
            shape[placement.axis] = None if placement.unit or count == 1 else own  # one row is broadcast
        return shape
