"""Find which tensors of a step have the same shape, though their number of rows is not known.

The first dimension of most tensors is the batch's, `None` in the trace; the others are known. Element-wise ops run as
one only if their tensors have equally many rows. TensorFlow infers the shapes for `axes.BATCHES`, in which each open
length that no op computes is one of its own (`axes.Kernels`). Where inference leaves a length open, as where operands
may be broadcast or not, that is one more open length, so that less is fused.
"""

import collections
import contextlib
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name, result_name
from ncclsync.host_passes.arithmetic import COMPUTED
from ncclsync.program.graph import StepGraph
from ncclsync.semantics.axes import BATCHES, IMPOSSIBLE, SMALL
from ncclsync.semantics.placements import shard

_PASSING = {"Identity", "PreventGradient", "StopGradient"}
# TensorFlow fuses these with the following op, if no other op takes their result.
MULTIPLYING = {"BatchMatMulV2", "BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul"}

_Cases = tuple[Any, ...]  # of a tensor for each of BATCHES: its values if it is small, or its shape


class Shapes:
    """Find out the shapes of a step's tensors, as far as TensorFlow infers them.

    Attributes:
        passed: of the segment that was entered last, by name of a tensor that equals another one: that one's name.
    """

    def __init__(self, graph: StepGraph):
        """Know the step: its segments are to be entered in their order."""
        self._graph = graph
        self._kernels = graph.axes.kernels
        self._specs: dict[TensorName, tf.TensorSpec] = {}
        self._shapes: dict[TensorName, _Cases] = {}
        self._values: dict[TensorName, _Cases | None] = {}
        self.passed: dict[TensorName, TensorName] = {}
        self._reshaped: dict[TensorName, TensorName] = {}  # likewise: one with the same numbers in the same order

    def enter(self, ops: Sequence[OpName]) -> None:
        """Infer the shapes of a segment's ops, inputs before consumers."""
        self.passed, self._reshaped = {}, {}
        for name in ops:
            self._look_at(self._graph.by_name[name])

    def spec(self, name: TensorName) -> tf.TensorSpec:
        """Return the shape that the trace knows, and the dtype."""
        if name not in self._specs:
            self._specs[name] = self._graph.spec(name)
        return self._specs[name]

    def key(self, name: TensorName) -> tuple[Any, ...] | None:
        """Return a key that tensors of one shape share; None if too little of the shape is known."""
        shape = self.spec(name).shape
        if shape.rank is None or not shape[1:].is_fully_defined():
            return None
        cases = self._cases(name)
        return cases if len(set(cases)) > 1 else cases[0]

    def source(self, name: TensorName) -> TensorName:
        """Return the tensor that `name` equals by `passed`, or `name`."""
        while name in self.passed:
            name = self.passed[name]
        return name

    def reduced_axes(self, name: OpName) -> set[int] | None:
        """Return the axes that an op reduces over; None if they are not known."""
        op, values = self._graph.by_name[name], self._graph.inputs[name][0]
        rank = self.spec(values).shape.rank
        if op.type == "BiasAddGrad":
            return set(range(rank - 1)) if rank and op.get_attr("data_format") == b"NHWC" else None
        axes = self._graph.inputs[name][1]
        if not rank or not self._graph.is_constant(axes):
            return None
        value = tf.get_static_value(self._graph.by_name[op_name(axes)].outputs[0])
        return {int(axis) % rank for axis in value.ravel()}

    def _cases(self, name: TensorName) -> _Cases:
        """Return the shape in all cases; None in place of one whose rank is not known."""
        if name not in self._shapes:
            shape, has_rows = self.spec(name).shape, self._graph.traced.argument_placements.get(name) == shard()
            if shape.rank is None:
                self._shapes[name] = (None,) * len(BATCHES)
            else:
                lengths = shape.as_list()
                rows = has_rows and lengths[:1] == [None]
                cases = [(*[batch.rows] * rows, *lengths[rows:]) for batch in BATCHES]
                self._shapes[name] = self._kernels.with_unknown(cases)
        return self._shapes[name]

    def _values_of(self, name: TensorName) -> _Cases | None:
        """Return the numbers of a small tensor of integers in all cases; None if they are not known."""
        if name not in self._values:
            self._values[name] = None
            op, (shape, dtype) = self._graph.producer(name), (self.spec(name).shape, self.spec(name).dtype)
            small = dtype.is_integer and shape.rank in (0, 1) and (shape.num_elements() or 0) <= SMALL
            if op is not None and small and not tf_compat.is_stateful(op) and not tf_compat.calls_functions(op):
                with contextlib.suppress(*IMPOSSIBLE):
                    self._compute(op, dtype.as_numpy_dtype)
        return self._values[name]

    def _compute(self, op: tf.Operation, dtype: Any) -> None:
        inputs = self._graph.inputs[op.name]
        if op.type == "Const":
            self._values[result_name(op.name)] = (tf.get_static_value(op.outputs[0]),) * len(BATCHES)
        elif op.type in ("Shape", "ShapeN"):
            for i, cases in enumerate(map(self._cases, inputs)):
                known = None not in cases
                self._values[result_name(op.name, i)] = tuple(np.array(one, dtype) for one in cases) if known else None
        elif inputs and None not in (given := [self._values_of(name) for name in inputs]):
            found = self._kernels.values(op, [*zip(*given, strict=True)])
            for i in range(len(op.outputs)):
                cases = tuple(each[i] for each in found)
                self._values[result_name(op.name, i)] = None if any(one is None for one in cases) else cases

    def _look_at(self, op: tf.Operation) -> None:
        inputs, results = self._graph.inputs[op.name], [result_name(op.name, i) for i in range(len(op.outputs))]
        if not inputs or not results:
            return
        if not all(self.spec(name).shape.is_fully_defined() for name in results):
            with contextlib.suppress(*IMPOSSIBLE):
                self._infer(op, inputs, results)
        source, made = self.source(inputs[0]), results[0]
        if not self.spec(made).dtype.is_floating or self._graph.controls[op.name]:
            return
        if op.type in _PASSING:
            self.passed[made] = inputs[0]
        elif op.type in ("Reshape", "Sum") and self._elements(source) == self._elements(made) is not None:
            self._reshaped[made] = source = self._reshaped.get(source, source)
            if self.key(source) == self.key(made) is not None:
                self.passed[made] = source

    def _infer(self, op: tf.Operation, inputs: Sequence[TensorName], results: Sequence[TensorName]) -> None:
        if tf_compat.calls_functions(op):
            return
        given = [self._values_of(name) or self._cases(name) for name in inputs]
        shape = self.spec(results[0]).shape
        if op.type == "Reshape" and shape.rank and shape[1:].is_fully_defined():
            given[1] = (np.array([-1, *shape[1:]], op.inputs[1].dtype.as_numpy_dtype),) * len(BATCHES)
        found = self._kernels.shapes(op, [*zip(*given, strict=True)])
        for i, name in enumerate(results):
            cases = tuple(each[i] for each in found)
            if not any(one is None or None in one for one in cases):
                self._shapes[name] = cases

    def _elements(self, name: TensorName) -> list[int] | None:
        """Return how many elements a tensor has in each case."""
        cases = self._cases(name)
        return None if None in cases else [math.prod(one) for one in cases]


def simplify(
    graph: StepGraph, shapes: Shapes, ops: Sequence[OpName], needed: Collection[OpName]
) -> tuple[StepGraph, list[OpName]]:
    """Leave out ops of a segment that only pass on their input.

    These would separate ops that can be fused. An op that takes a tensor's shape gets the shape of an equal-shaped
    tensor, so that a tensor is needed only by ops that compute with it.

    Args:
        graph, shapes, ops: see `find_chains`.
        needed: names of ops that are used outside the segment, as results or as dependencies.

    Returns:
        The step with other inputs for some ops, and the remaining ops.
    """
    inputs = {name: [shapes.source(operand) for operand in graph.inputs[name]] for name in ops}
    controls: dict[OpName, list[OpName]] = {}
    computing = [n for n in ops if graph.by_name[n].type != "Shape" and result_name(n) not in shapes.passed]
    users = collections.Counter(operand for name in computing for operand in set(inputs[name]))
    first: dict[Any, TensorName] = {}  # of a shape and dtype
    first_written: dict[Any, TensorName] = {}  # the same, of tensors that are written whatever is fused
    for name in ops:
        kinds = [(shapes.key(operand), shapes.spec(operand).dtype) for operand in inputs[name]]
        for operand, kind in zip(inputs[name], kinds, strict=True):
            made_by = graph.producer_type(operand)
            if made_by not in MULTIPLYING or users[operand] > 1:
                (first if made_by in COMPUTED else first_written).setdefault(kind, operand)
        if graph.by_name[name].type == "Shape" and kinds[0][0]:
            inputs[name] = [first_written.get(kinds[0]) or first.get(kinds[0], inputs[name][0])]
        if graph.by_name[name].type == "Const":  # it waits for the value whose gradient it belongs to
            controls[name] = [c for c in graph.controls[name] if tf_compat.is_stateful(graph.by_name[c])]
    view = graph.rewired(inputs, controls)
    wanted = set(needed) | graph.must_run
    left = []
    for name in reversed(ops):
        if name in wanted or tf_compat.is_stateful(graph.by_name[name]) or graph.writes[name]:
            left.append(name)
            wanted.update(map(op_name, view.inputs[name]), view.controls[name])
    return view, left[::-1]
