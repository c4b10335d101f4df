"""Find which tensors of a segment have the same shape, though their number of rows is not known.

The first dimension of most tensors is the batch's, `None` in the trace; the others are known. Element-wise ops run as
one only if their tensors have equally many rows. A few types of ops are known to keep or to multiply rows. The rows of
any other op's result count as different from all others, so that less is fused.
"""

import collections
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.host_passes.arithmetic import COMPUTED
from ncclsync.program.graph import StepGraph, op_name

_ONCE = Fraction(1)
_PASSING = {"Identity", "PreventGradient", "StopGradient"}
# The result has the first operand's rows.
_KEEPING = _PASSING | {
    *("Abs", "Cast", "Elu", "Erf", "Erfc", "Exp", "LeakyRelu", "Log", "Log1p", "LogSoftmax", "Neg"),
    *("Relu", "Relu6", "Rsqrt", "RsqrtGrad", "Selu", "Sigmoid", "SigmoidGrad", "Sign", "Softmax", "Softplus"),
    *("OnesLike", "Sqrt", "SqrtGrad", "Square", "Tanh", "TanhGrad", "ZerosLike"),
    *("AvgPool", "BiasAdd", "Conv2D", "DepthwiseConv2dNative", "MaxPool", "MaxPoolGrad"),
}
_OF_ONE_SHAPE = {"AddN", "ReluGrad"}  # their kernels refuse operands of different shapes
_BROADCASTING = {
    *("Add", "AddV2", "DivNoNan", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "Maximum"),
    *("Minimum", "Mul", "NotEqual", "Pow", "RealDiv", "SelectV2", "SquaredDifference", "Sub"),
}
# TensorFlow fuses these with the following op, if no other op takes their result.
MULTIPLYING = {"BatchMatMulV2", "BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul"}
_REDUCING = {"Max", "Mean", "Min", "Prod", "Sum"}


class Shapes:
    """Find out the shapes of a segment's tensors, as far as the ops tell.

    Attributes:
        passed: by name of a tensor that equals another tensor: that tensor's name.
    """

    def __init__(self, graph: StepGraph, ops: Sequence[str]):
        """Take ops, inputs before consumers."""
        self._graph = graph
        self._specs: dict[str, tf.TensorSpec] = {}
        # By name of a tensor: a tensor (None: a single row), and by how much to multiply its rows.
        self._alike: dict[str | None, tuple[str | None, Fraction]] = {}
        self.passed: dict[str, str] = {}
        self._summed: dict[str, str] = {}  # by name of a sum over axes of size 1: the addend
        for name in ops:
            self._look_at(name)
        self._keys: dict[str, tuple[Any, ...] | None] = {}  # they change no more

    def spec(self, name: str) -> tf.TensorSpec:
        """Return the shape that the trace knows, and the dtype."""
        if name not in self._specs:
            self._specs[name] = self._graph.spec(name)
        return self._specs[name]

    def key(self, name: str) -> tuple[Any, ...] | None:
        """Return a key that tensors of one shape share; None if too little of the shape is known."""
        if name not in self._keys:
            self._keys[name] = self._key(name)
        return self._keys[name]

    def _key(self, name: str) -> tuple[Any, ...] | None:
        shape = self.spec(name).shape
        if not shape.rank:
            return None if shape.rank is None else ()
        return (self._rows(name), *shape[1:]) if shape[1:].is_fully_defined() else None

    def source(self, name: str) -> str:
        """Return the tensor that `name` equals by `passed`, or `name`."""
        while name in self.passed:
            name = self.passed[name]
        return name

    def reduced_axes(self, name: str) -> set[int] | None:
        """Return the axes that an op reduces over; None if they are not known."""
        op, values = self._graph.by_name[name], self._graph.inputs[name][0]
        rank = self._rank(values)
        if op.type == "BiasAddGrad":
            return set(range(rank - 1)) if rank and op.get_attr("data_format") == b"NHWC" else None
        axes = self._graph.inputs[name][1]
        return {axis % rank for axis in self._numbers(axes)} if rank and self._graph.is_constant(axes) else None

    def _rank(self, name: str) -> int:
        return self.spec(name).shape.rank or 0

    def _order(self, name: str) -> list[int] | None:
        """Return a permutation of axes, or an inverse permutation if it keeps the first axis; None if not known."""
        producer = self._graph.producer(name)
        if producer is not None and producer.type == "InvertPermutation":
            order = self._order(self._graph.inputs[producer.name][0])
            return order if order and order[0] == 0 else None
        value = None if producer is None else tf.get_static_value(producer.outputs[0])
        return None if value is None else [int(axis) for axis in value]

    def _numbers(self, constant: str) -> list[int]:
        value = tf.get_static_value(self._graph.by_name[op_name(constant)].outputs[0])
        return [int(number) for number in value.ravel()]

    def _rows(self, name: str) -> Any:
        """Return the number of rows; if it is not known, a tensor and by how much to multiply its rows."""
        shape = self.spec(name).shape
        known = shape.rank is not None and shape[0] is not None
        root, times = (None, Fraction(shape[0])) if known else (name, _ONCE)
        while root in self._alike:
            root, more = self._alike[root]
            times *= more
        if name in self._alike:
            self._alike[name] = root, times
        return int(times) if root is None and times.denominator == 1 else (root, times)

    def _unite(self, one: str, other: str, times: Fraction = _ONCE) -> None:
        """Record that `other` has `times` as many rows as `one`."""
        (root, first), (other_root, second) = (
            rows if isinstance(rows, tuple) else (None, Fraction(rows)) for rows in (self._rows(one), self._rows(other))
        )
        if other_root not in (None, root):
            self._alike[other_root] = (root, first * times / second)
        elif root is not None and other_root is None and first * times != 0:
            self._alike[root] = (None, second / (first * times))

    def _look_at(self, name: str) -> None:
        graph, op, inputs = self._graph, self._graph.by_name[name], self._graph.inputs[name]
        result = f"{name}:0"
        if op.type in _PASSING and op.outputs[0].dtype.is_floating and not graph.controls[name]:
            self.passed[result] = inputs[0]
        if op.type in _REDUCING:
            self._look_at_reduction(name)
        elif op.type == "Reshape" and self._is_same_reshaped(values := self._reshaped(inputs[0]), result):
            if not graph.controls[name]:
                self.passed[result] = values
            self._unite(values, result)
        elif op.type in ("BroadcastTo", "Reshape"):
            like = self._shape_of(inputs[1])
            before, after = (self.spec(tensor).shape for tensor in (inputs[0], result))
            if like is not None and self.spec(like).shape.rank and after.rank:
                self._unite(like, result)
            elif op.type == "BroadcastTo" or not before.rank or not after.rank:
                return
            elif before[1:].is_fully_defined() and after[1:].is_fully_defined():
                elements = before[1:].num_elements(), after[1:].num_elements()
                if 0 not in elements:
                    self._unite(inputs[0], result, Fraction(*elements))
        elif not op.outputs or not self.spec(result).shape.rank:
            return
        elif op.type in _OF_ONE_SHAPE:
            for operand in inputs:
                self._unite(operand, result)
        elif op.type in _KEEPING:
            self._unite(inputs[0], result)
        elif op.type == "MatMul":
            if not op.get_attr("transpose_a"):
                self._unite(inputs[0], result)
                self._look_at_factor(inputs[0], self.spec(inputs[1]).shape[int(op.get_attr("transpose_b"))])
        elif op.type == "Transpose":
            order = self._order(inputs[1])
            if order and order[0] == 0:
                self._unite(inputs[0], result)
        elif op.type == "BatchMatMulV2":
            if self.spec(inputs[0]).shape.rank == self.spec(result).shape.rank > self._rank(inputs[1]) > 1:
                self._unite(inputs[0], result)
        elif op.type == "Einsum":
            operands, _, letters = op.get_attr("equation").decode().replace(" ", "").partition("->")
            for operand, axes in zip(inputs, operands.split(","), strict=True):
                if "." not in operands and axes[:1] == letters[:1] != "":
                    self._unite(operand, result)
        elif op.type == "GatherV2":
            on_rows = self._graph.is_constant(inputs[2]) and self._numbers(inputs[2]) == [0]
            if on_rows and op.get_attr("batch_dims") == 0 and self._rank(inputs[1]) > 0:
                self._unite(inputs[1], result)
        elif op.type in _BROADCASTING:
            rank = self.spec(result).shape.rank
            shapes = {operand: self.spec(operand).shape for operand in inputs}
            full = [o for o, shape in shapes.items() if shape.rank is None or (shape.rank == rank and shape[0] != 1)]
            if len({self._rows(operand) for operand in full}) == 1:
                self._unite(full[0], result)

    def _look_at_factor(self, name: str, columns: int | None) -> None:
        """Record a reshaped matrix's rows, given the number of its columns, which its own shape leaves open."""
        if self._graph.producer_type(name) == "Reshape" and self.spec(name).shape[1] is None and columns:
            source = self._graph.inputs[op_name(name)][0]
            row = self.spec(source).shape[1:]
            if row.is_fully_defined() and row.num_elements() > 0:
                self._unite(source, name, Fraction(row.num_elements(), columns))

    def _look_at_reduction(self, name: str) -> None:
        graph, (values, axes) = self._graph, self._graph.inputs[name]
        if graph.producer_type(axes) == "BroadcastGradientArgs":
            one, other = map(self._shape_of, graph.inputs[op_name(axes)])
            if one is not None and other is not None and self._key(one) == self._key(other) is not None:
                self._summed[f"{name}:0"] = self.source(values)
        elif self.spec(values).shape.rank and self.spec(f"{name}:0").shape.rank:
            reduced = self.reduced_axes(name)
            if reduced is not None and 0 not in reduced:
                self._unite(values, f"{name}:0")

    def _shape_of(self, name: str) -> str | None:
        """Return the tensor whose shape `name` is; None if `name` is no shape."""
        is_shape = self._graph.producer_type(name) == "Shape"
        return self._graph.inputs[op_name(name)][0] if is_shape else None

    def _reshaped(self, name: str) -> str:
        """Return the tensor that has the same values as `name`, perhaps in another shape."""
        return self._summed.get(self.source(name), self.source(name))

    def _is_same_reshaped(self, name: str, result: str) -> bool:
        """Return whether a reshape keeps all dimensions but the first; the first then stays, too."""
        before, after = (self.spec(tensor).shape for tensor in (name, result))
        return (
            bool(before.rank)
            and before.rank == after.rank
            and before[1:].is_fully_defined()
            and before[1:].as_list() == after[1:].as_list()
            and before[1:].num_elements() > 0
        )


def simplify(
    graph: StepGraph, shapes: Shapes, ops: Sequence[str], needed: Collection[str]
) -> tuple[StepGraph, list[str]]:
    """Leave out ops of a segment that only pass on their input.

    These would separate ops that can be fused. An op that takes a tensor's shape gets the shape of an equal-shaped
    tensor, so that a tensor is needed only by ops that compute with it.

    Args:
        graph, shapes: the step, and the shapes of the segment's tensors.
        ops: names of the segment's ops, inputs before consumers.
        needed: names of ops that are used outside the segment, as results or as dependencies.

    Returns:
        The step with other inputs for some ops, and the remaining ops.
    """
    inputs = {name: [shapes.source(operand) for operand in graph.inputs[name]] for name in ops}
    controls: dict[str, list[str]] = {}
    computing = [n for n in ops if graph.by_name[n].type != "Shape" and f"{n}:0" not in shapes.passed]
    users = collections.Counter(operand for name in computing for operand in set(inputs[name]))
    first: dict[Any, str] = {}  # of a shape and dtype
    first_written: dict[Any, str] = {}  # the same, of tensors that are written whatever is fused
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
