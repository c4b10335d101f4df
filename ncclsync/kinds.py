"""What each tensor of a traced step is, relative to the samples of the batch.

A value that was computed from a shard stands for the batch's only if one knows how shards add up: a mean by
the mean, a sum or a count by the sum, a maximum by the maximum. `Kinds` tells that from the ops that computed
it; where it cannot tell, or where shards do not add up at all (a ratio of two sums), it says so.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.ops import Share

SAME, ROWS, LINEAR, AFFINE, COUNT, SHAPE = "same", "rows", "linear", "affine", "count", "shape"
MAX, MIN, MIXED, UNKNOWN = "max", "min", "mixed", "unknown"


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a tensor depends on the batch.

    Attributes:
        form: SAME (equal on all towers); ROWS (one entry or more per sample, along the first axis, computed
            from that sample alone); LINEAR (the sum of such entries over the samples); AFFINE (such a sum,
            plus something that is the same on all towers); COUNT (a function of the number of samples);
            SHAPE (a shape whose first element counts samples); MAX, MIN (over the samples); MIXED (samples
            are combined in a way that shards cannot be); UNKNOWN.
        degree: the power of the number of samples that it is multiplied by: a mean is LINEAR with -1.
        origin: of what is MIXED, the op that mixed it.
    """

    form: str
    degree: int = 0
    origin: tf.Operation | None = dataclasses.field(default=None, compare=False)

    @property
    def is_mean(self) -> bool:
        """Whether the batch's value is the mean of the shards', weighted by their samples."""
        return self.form == SAME or (self.form == LINEAR and self.degree == -1)

    @property
    def is_sum(self) -> bool:
        """Whether the batch's value is the sum of the shards'."""
        return (self.form == LINEAR and self.degree == 0) or (self.form == COUNT and self.degree == 1)


_SAME, _UNKNOWN, _SUM, _MEAN = Kind(SAME), Kind(UNKNOWN), Kind(LINEAR), Kind(LINEAR, -1)

_PASSING = frozenset(
    {"Identity", "Cast", "StopGradient", "PreventGradient", "EnsureShape", "CheckNumerics"}
    | {"CheckNumericsV2", "Snapshot", "PlaceholderWithDefault"}
)
_LINEAR_MAPS = frozenset({"Neg"})
_ADD = frozenset({"Add", "AddV2", "Sub", "AddN"})
_MULTIPLY = frozenset({"Mul", "MulNoNan"})
_DIVIDE = frozenset({"RealDiv", "Div", "DivNoNan"})
_REDUCE = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any"})
_EXTREMES = {"Maximum": MAX, "Minimum": MIN}
_RESHAPE = frozenset(["Reshape", "Squeeze", "ExpandDims"])


class Kinds:
    """The kinds of the tensors of one graph, told in the order in which it is built."""

    def __init__(self, graph: Any, batch: Any, share: Share) -> None:
        """Start with what is known.

        Args:
            graph: where the step is traced.
            batch: its argument, one tower's shard.
            share: its other argument.
        """
        self._graph = graph
        self._kinds: dict[str, Kind] = {tensor.name: _UNKNOWN for tensor in share}
        self._kinds[share.fraction.name] = self._kinds[share.rows.name] = Kind(COUNT, 1)
        # What is traced for a known number of rows has it as a constant, which tells nothing.
        self._can_tell = True
        for leaf in tf.nest.flatten(batch):
            for component in [] if leaf is None else tf.nest.flatten(leaf, expand_composites=True):
                rank = component.shape.rank if isinstance(leaf, tf.Tensor) else None
                self._kinds[component.name] = _UNKNOWN if rank is None else Kind(ROWS) if rank else _SAME
                if rank and component.shape[0] is not None:
                    self._can_tell = False
        self._done = 0

    def mark(self, tensors: Iterable[tf.Tensor]) -> None:
        """Note that these tensors are results of a collective: the same on all towers."""
        self._kinds.update((tensor.name, _SAME) for tensor in tensors)

    def of(self, tensor: tf.Tensor) -> Kind:
        """Return the kind of a tensor of the graph; UNKNOWN for one of another graph."""
        if tensor.graph is not self._graph or not self._can_tell:
            return _UNKNOWN
        operations = self._graph.get_operations()
        for op in operations[self._done :]:
            for output in op.outputs:
                if output.name not in self._kinds:
                    self._kinds[output.name] = self._tell(op, output)
        self._done = len(operations)
        return self._kinds[tensor.name]

    def _tell(self, op: tf.Operation, output: tf.Tensor) -> Kind:
        inputs = [self._kinds.get(tensor.name, _UNKNOWN) for tensor in op.inputs]
        if not inputs:
            return _SAME if op.type in ("Const", "Placeholder") else _UNKNOWN
        if op.type == "IdentityN":
            return inputs[output.value_index]
        if op.type == "ReadVariableOp":
            return _SAME
        if op.type in _PASSING:
            return inputs[0]
        mixed = next((kind for kind in inputs if kind.form == MIXED), None)
        if mixed is not None:
            return mixed
        if all(kind.form == SAME for kind in inputs):
            return _UNKNOWN if "Random" in op.type or "Rng" in op.type else _SAME
        if any(kind.form == UNKNOWN for kind in inputs):
            return _UNKNOWN
        return self._combine(op, output, inputs)

    def _combine(self, op: tf.Operation, output: tf.Tensor, inputs: list[Kind]) -> Kind:
        """The kind of a tensor computed from known kinds, at least one of which is not SAME."""
        first = inputs[0]
        if op.type in ("Shape", "Size"):
            counts = first.form == ROWS
            return Kind(SHAPE) if counts and op.type == "Shape" else Kind(COUNT, 1) if counts else _SAME
        if any(kind.form == SHAPE for kind in inputs):
            return self._of_shape(op, output, inputs)
        if op.type in _LINEAR_MAPS or op.type in _RESHAPE:
            kept = first.form != ROWS or op.type in _LINEAR_MAPS or _has_rows(output)
            return first if kept else _UNKNOWN
        if op.type in _ADD:
            return _fold(_added, inputs, op)
        if op.type in _MULTIPLY:
            return _fold(_multiplied, inputs, op)
        if op.type in _DIVIDE:
            return _divided(first, inputs[1], op)
        if op.type in _REDUCE:
            return _reduced(op, first)
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return first if first.form != ROWS or (order is not None and order[0] == 0) else _UNKNOWN
        if op.type == "Pack" and output.dtype.is_integer and {k.form for k in inputs} <= {SAME, COUNT}:
            return Kind(SHAPE)
        if op.type == "Pack" and len(set(inputs)) == 1 and first.form != ROWS:
            return first
        if op.type in _EXTREMES and {kind.form for kind in inputs} <= {SAME, _EXTREMES[op.type]}:
            return Kind(_EXTREMES[op.type])
        if all(kind.form in (SAME, ROWS) and kind.degree == 0 for kind in inputs):
            # Taken to work sample by sample, as all ops do that keep the first axis.
            return Kind(ROWS) if _has_rows(output) else _UNKNOWN
        if any(kind.form in (LINEAR, AFFINE, MAX, MIN) for kind in inputs):
            return Kind(MIXED, origin=op) if _is_elementwise(op) else _UNKNOWN
        return _UNKNOWN

    def _of_shape(self, op: tf.Operation, output: tf.Tensor, inputs: list[Kind]) -> Kind:
        """What is computed from a shape that counts samples: a count, a shape, or a tensor of that shape."""
        if op.type == "StridedSlice" and inputs[0].form == SHAPE:
            if output.shape.rank:
                return Kind(SHAPE)
            index = tf.get_static_value(op.inputs[1])
            return _UNKNOWN if index is None else Kind(COUNT, 1) if int(index[0]) == 0 else _SAME
        if op.type == "Prod":
            return Kind(COUNT, 1)
        if op.type in ("Pack", "ConcatV2") and output.dtype.is_integer and output.shape.rank == 1:
            return Kind(SHAPE)
        values = [kind for kind in inputs if kind.form != SHAPE]
        if all(kind.form in (SAME, ROWS) for kind in values) and _has_rows(output):
            return Kind(ROWS, max((kind.degree for kind in values), default=0))
        return _UNKNOWN


def _fold(combine: Callable, kinds: Sequence[Kind], op: tf.Operation) -> Kind:
    result = kinds[0]
    for kind in kinds[1:]:
        result = combine(result, kind, op)
    return result


def _added(one: Kind, other: Kind, op: tf.Operation) -> Kind:
    if one == other:
        return one
    forms = {one.form, other.form}
    if SAME in forms:
        kind = other if one.form == SAME else one
        if kind.form == COUNT:
            return Kind(AFFINE) if kind.degree == 1 else _UNKNOWN
        if kind.form == LINEAR and kind.degree == 0:
            return Kind(AFFINE)
        return kind  # a mean of what is the same is the same, and so for each row
    if forms == {LINEAR, AFFINE} and one.degree == other.degree:
        return Kind(AFFINE, one.degree)
    if COUNT in forms:
        return _UNKNOWN
    return Kind(MIXED, origin=op)


def _multiplied(one: Kind, other: Kind, op: tf.Operation) -> Kind:
    if one.form == SAME:
        return other
    if other.form == SAME:
        return one
    for kind, factor in ((one, other), (other, one)):
        if factor.form == COUNT and kind.form in (COUNT, LINEAR, ROWS):
            return Kind(kind.form, kind.degree + factor.degree)
    if one.form == other.form == ROWS:
        return Kind(ROWS, one.degree + other.degree)
    return Kind(MIXED, origin=op)


def _divided(one: Kind, other: Kind, op: tf.Operation) -> Kind:
    if other.form == COUNT:
        inverse = Kind(COUNT, -other.degree)
        return inverse if one.form == SAME else _multiplied(one, inverse, op)
    if other.form == SAME:
        return one
    if other.form == ROWS and one.form in (SAME, ROWS):
        return Kind(ROWS, one.degree - other.degree)
    return Kind(MIXED, origin=op)


def _reduced(op: tf.Operation, kind: Kind) -> Kind:
    axes = tf.get_static_value(op.inputs[1])
    if kind.form in (LINEAR, AFFINE, SAME, MIXED):
        return kind if op.type in ("Sum", "Mean") else Kind(MIXED, origin=op)
    if kind.form != ROWS or axes is None:
        return _UNKNOWN
    rank = op.inputs[0].shape.rank
    if rank is None:
        return _UNKNOWN
    if 0 not in {int(axis) % rank for axis in axes.flatten()}:
        return kind if kind.degree == 0 or op.type in ("Sum", "Mean") else _UNKNOWN
    if op.type in ("Sum", "Mean"):
        return Kind(LINEAR, kind.degree - (op.type == "Mean"))
    if op.type in ("Max", "Min") and kind.degree == 0:
        return Kind(MAX if op.type == "Max" else MIN)
    return Kind(MIXED, origin=op)


def _has_rows(tensor: tf.Tensor) -> bool:
    """Whether the first axis of a tensor computed from rows runs over them still: its length is open."""
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _is_elementwise(op: tf.Operation) -> bool:
    shapes = [tensor.shape for tensor in (*op.inputs, *op.outputs)]
    return len(op.outputs) == 1 and all(shape.rank == shapes[-1].rank for shape in shapes)
