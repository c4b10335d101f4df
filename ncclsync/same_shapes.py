"""Find which tensors of a segment have the same shape, though the number of their rows is not known.

The first dimension of most tensors is the batch's, `None` in the trace; all others are known. What runs many
element-wise ops as one has to know that no two of them differ in their rows. Few kinds of ops tell: the rows
of what any other computes are taken as unlike all others, and less is fused.
"""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from ncclsync import private
from ncclsync.step_graph import StepGraph, op_name

_PASSING = {"Identity", "PreventGradient", "StopGradient"}
# The result has the first operand's rows.
_KEEPING = _PASSING | {
    *(
        "Abs",
        "Cast",
        "Elu",
        "Erf",
        "Erfc",
        "Exp",
        "LeakyRelu",
        "Log",
        "Log1p",
        "LogSoftmax",
        "Neg",
        "OnesLike",
    ),
    *("Relu", "Relu6", "Rsqrt", "RsqrtGrad", "Selu", "Sigmoid", "SigmoidGrad", "Sign", "Softmax", "Softplus"),
    *("Sqrt", "SqrtGrad", "Square", "Tanh", "TanhGrad", "ZerosLike"),
    *("AvgPool", "BiasAdd", "Conv2D", "DepthwiseConv2dNative", "MaxPool", "MaxPoolGrad"),
}
_OF_ONE_SHAPE = {"AddN", "ReluGrad"}  # their kernels refuse others
_BROADCASTING = {
    *(
        "Add",
        "AddV2",
        "DivNoNan",
        "Equal",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "Maximum",
        "Minimum",
    ),
    *("Mul", "NotEqual", "Pow", "RealDiv", "SelectV2", "SquaredDifference", "Sub"),
}
# TensorFlow makes one op of one of these and of what is behind it, if nobody else asks for its result.
MULTIPLYING = {"BatchMatMulV2", "BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul"}
_REDUCING = {"Max", "Mean", "Min", "Prod", "Sum"}


class Shapes:
    """What is known of the shapes of a segment's tensors.

    Attributes:
        passed: by name of a tensor that is nothing but another tensor: the name of the latter.
    """

    def __init__(self, graph: StepGraph, ops: Sequence[str]):
        """Look at ops, inputs before consumers."""
        self._graph = graph
        self._specs: dict[str, tf.TensorSpec] = {}
        self._alike: dict[Any, Any] = {}  # by name of a tensor: another one of as many rows, or their number
        self.passed: dict[str, str] = {}
        self._summed: dict[str, str] = {}  # what is summed over axes of size 1 at most: of what
        for name in ops:
            self._look_at(name)

    def spec(self, name: str) -> tf.TensorSpec:
        """Return the shape as far as it is known by itself, and the dtype."""
        if name not in self._specs:
            self._specs[name] = self._graph.spec(name)
        return self._specs[name]

    def key(self, name: str) -> tuple[Any, ...] | None:
        """Return what tensors of one shape have in common; None if too little of it is known."""
        shape = self.spec(name).shape
        if not shape.rank:
            return None if shape.rank is None else ()
        return (self._rows(name), *shape[1:]) if shape[1:].is_fully_defined() else None

    def source(self, name: str) -> str:
        """Return the tensor that `name` is another name for, or itself."""
        while name in self.passed:
            name = self.passed[name]
        return name

    def reduced_axes(self, name: str) -> set[int] | None:
        """Return the axes that an op reduces over, but for some of size 1 perhaps; None if they are not known."""
        op, whole = self._graph.by_name[name], self.spec(self._graph.inputs[name][0]).shape
        if op.type == "BiasAddGrad":
            known = whole.rank and op.get_attr("data_format") == b"NHWC"
            return set(range(whole.rank - 1)) if known else None
        axes = self._graph.inputs[name][1]
        producer = self._graph.by_name.get(op_name(axes))
        if producer is None or not whole.rank:
            return None
        if producer.type == "Const":
            numbers = tf.get_static_value(producer.outputs[0])
            return None if numbers is None else {int(number) % whole.rank for number in numbers.ravel()}
        if producer.type != "BroadcastGradientArgs":
            return None
        dims = self._dims(self._graph.inputs[producer.name][int(axes.split(":")[1])])
        if dims is None or None in dims:
            return None
        dims = [1] * (whole.rank - len(dims)) + dims
        return {i for i, (own, full) in enumerate(zip(dims, whole, strict=True)) if own == 1 != full}

    def _dims(self, name: str) -> list[int | None] | None:
        """What is known of the elements of a shape."""
        like = self._shape_of(name)
        if like is not None:
            shape = self.spec(like).shape
            return None if shape.rank is None else shape.as_list()
        producer = self._graph.by_name.get(op_name(name))
        value = None if producer is None or producer.type != "Const" else tf.get_static_value(producer.outputs[0])
        return None if value is None else [int(dim) for dim in value]

    def _rows(self, name: str) -> Any:
        shape = self.spec(name).shape
        rows = name if shape.rank is None or shape[0] is None else shape[0]
        while rows in self._alike:
            rows = self._alike[rows]
        return rows

    def _unite(self, one: str, other: str) -> None:
        first, second = self._rows(one), self._rows(other)
        if first != second and not isinstance(second, int):
            self._alike[second] = first
        elif first != second and not isinstance(first, int):
            self._alike[first] = second

    def _look_at(self, name: str) -> None:
        graph, op, inputs = self._graph, self._graph.by_name[name], self._graph.inputs[name]
        result = f"{name}:0"
        if op.type in _PASSING and op.outputs[0].dtype.is_floating and not graph.controls[name]:
            self.passed[result] = inputs[0]
        if op.type in _REDUCING:
            self._look_at_reduction(name)
        elif op.type == "Reshape" and self._is_same_reshaped(values := self._reshaped(inputs[0]), result):
            self.passed[result] = values
            self._unite(values, result)
        elif op.type in ("BroadcastTo", "Reshape"):
            like = self._shape_of(inputs[1])
            if like is not None and self.spec(like).shape.rank and self.spec(result).shape.rank:
                self._unite(like, result)
        elif not op.outputs or not self.spec(result).shape.rank:
            return
        elif op.type in _OF_ONE_SHAPE:
            for operand in inputs:
                self._unite(operand, result)
        elif op.type in _KEEPING or (op.type == "MatMul" and not op.get_attr("transpose_a")):
            self._unite(inputs[0], result)
        elif op.type in _BROADCASTING:
            rank = self.spec(result).shape.rank
            shapes = {operand: self.spec(operand).shape for operand in inputs}
            full = [
                o
                for o, shape in shapes.items()
                if shape.rank is None or (shape.rank == rank and shape[0] != 1)
            ]
            if len({self._rows(operand) for operand in full}) == 1:
                self._unite(full[0], result)

    def _look_at_reduction(self, name: str) -> None:
        graph, (values, axes) = self._graph, self._graph.inputs[name]
        producer = graph.by_name.get(op_name(axes))
        if producer is None:
            return
        if producer.type == "BroadcastGradientArgs":
            one, other = map(self._shape_of, graph.inputs[producer.name])
            if one is not None and other is not None and self.key(one) == self.key(other) is not None:
                self._summed[f"{name}:0"] = self.source(values)
        elif producer.type == "Const" and self.spec(values).shape.rank and self.spec(f"{name}:0").shape.rank:
            if 0 not in (self.reduced_axes(name) or {0}):
                self._unite(values, f"{name}:0")

    def _shape_of(self, name: str) -> str | None:
        """The tensor whose shape `name` is, if it is one's."""
        producer = self._graph.by_name.get(op_name(name))
        return (
            self._graph.inputs[producer.name][0]
            if producer is not None and producer.type == "Shape"
            else None
        )

    def _reshaped(self, name: str) -> str:
        """The tensor that `name` has the values of, in another shape at most."""
        return self._summed.get(self.source(name), self.source(name))

    def _is_same_reshaped(self, name: str, result: str) -> bool:
        """Whether all dimensions but the first stay, and so, as the number of elements does, it too."""
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
    """Leave out ops of a segment that pass on what they are given.

    They would keep apart what can be fused. Who asks for a shape is told that of another tensor of the same
    shape, so that nobody but those who compute with a tensor wants it.

    Args:
        graph: the step.
        shapes: of the segment's tensors.
        ops: names of the segment's ops, inputs before consumers.
        needed: names of ops whose own results, or which themselves, are asked for outside the segment.

    Returns:
        The same step with other inputs for some of the ops, and the ops that are left.
    """
    view = copy.copy(graph)
    view.inputs, view.controls = dict(graph.inputs), dict(graph.controls)
    first: dict[Any, str] = {}  # of a shape and dtype
    for name in ops:
        inputs = view.inputs[name] = [shapes.source(operand) for operand in graph.inputs[name]]
        kinds = [(shapes.key(operand), shapes.spec(operand).dtype) for operand in inputs]
        for operand, kind in zip(inputs, kinds, strict=True):
            if graph.producer_type(operand) not in MULTIPLYING:
                first.setdefault(kind, operand)
        if graph.by_name[name].type == "Shape" and kinds[0][0]:
            view.inputs[name] = [first.get(kinds[0], inputs[0])]
        if graph.by_name[name].type == "Const":  # a gradient's wait for what computes it
            view.controls[name] = [c for c in graph.controls[name] if private.is_stateful(graph.by_name[c])]
    wanted = set(needed) | graph.must_run
    left = []
    for name in reversed(ops):
        if name in wanted or private.is_stateful(graph.by_name[name]) or graph.writes[name]:
            left.append(name)
            wanted.update(map(op_name, view.inputs[name]), view.controls[name])
    return view, left[::-1]
