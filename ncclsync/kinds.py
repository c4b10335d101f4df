"""What each tensor of a traced step is, relative to the samples of the batch.

A value that was computed from a shard stands for the batch's only if one knows how shards add up: a mean by
the mean, a sum or a count by the sum, a maximum by the maximum. `Kinds` tells that from the ops that computed
it. A ratio of two sums is of none of these: there it tells which tensors must meet before (`meetings`); and
where it cannot tell at all, it says so.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync import private
from ncclsync.ops import Collective, Share
from ncclsync.variables import Role, role_of

SAME, ROWS, LINEAR, AFFINE, COUNT, SHAPE = "same", "rows", "linear", "affine", "count", "shape"
GLOBAL, MAX, MIN, MIXED, UNKNOWN = "global", "max", "min", "mixed", "unknown"

MEAN_OF_ALL, SUM_OF_ALL = Collective("all_reduce", "mean"), Collective("all_reduce", "sum")
# Of a sum, each tower gets the share that its samples have: so the gradients of the ratio of two sums combine
# as means do.
SHARE_OF_SUM = Collective("all_reduce", "share")


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a tensor depends on the batch.

    Attributes:
        form: SAME (equal on all towers); ROWS (one entry or more per sample, along the first axis, computed
            from that sample alone); LINEAR (the sum of such entries over the samples); AFFINE (such a sum,
            plus a mean or something that is the same on all towers); COUNT (a function of their number);
            SHAPE (a shape whose first element counts samples); MAX, MIN (over the samples); GLOBAL (computed
            from means of the batch, or from the ratio of two sums: the same on all towers, if these meet
            before: `Kinds.meetings`); UNKNOWN. (MIXED passes between the functions here alone.)
        degree: the power of the number of samples that it is multiplied by: a mean is LINEAR with -1.
        origin: the first op on the way here that combined samples in a way that shards cannot be combined, so
            that the value is not exact; None if there is none.
    """

    form: str
    degree: int = 0
    origin: tf.Operation | None = dataclasses.field(default=None, compare=False)

    @property
    def is_mean(self) -> bool:
        """Whether the batch's value is the mean of the shards', weighted by their samples."""
        return self.form in (SAME, GLOBAL) or (self.form == LINEAR and self.degree == -1)

    @property
    def is_sum(self) -> bool:
        """Whether the batch's value is the sum of the shards'."""
        return (self.form == LINEAR and self.degree == 0) or (self.form == COUNT and self.degree == 1)

    @property
    def collective(self) -> Collective | None:
        """What makes the batch's value of the shards'; None if there is nothing, or who knows."""
        if self.is_sum or self.is_mean:
            return SUM_OF_ALL if self.is_sum else MEAN_OF_ALL
        return Collective("all_reduce", self.form) if self.form in (MAX, MIN) else None


_SAME, _GLOBAL, _UNKNOWN, _MIXED = Kind(SAME), Kind(GLOBAL), Kind(UNKNOWN), Kind(MIXED)
_SUM, _MEAN = Kind(LINEAR), Kind(LINEAR, -1)

_PASSING = frozenset(
    {"Identity", "Cast", "StopGradient", "PreventGradient", "EnsureShape", "CheckNumerics"}
    | {"CheckNumericsV2", "Snapshot", "PlaceholderWithDefault"}
)
_LINEAR_MAPS = frozenset({"Neg"})
_ADD = frozenset({"Add", "AddV2", "Sub", "AddN"})
_MULTIPLY = frozenset({"Mul", "MulNoNan"})
_DIVIDE = frozenset({"RealDiv", "Div", "DivNoNan"})
_REDUCE = frozenset({"Sum", "Mean", "Max", "Min", "Prod"})
_EXTREMES = {"Maximum": MAX, "Minimum": MIN}
_RESHAPE = frozenset(["Reshape", "Squeeze", "ExpandDims"])


class Kinds:
    """The kinds of the tensors of one graph, told in the order in which it is built.

    Attributes:
        meetings: by name, the tensors that meet their counterparts, and how, for a GLOBAL tensor.
        input_meetings: by (name of an op, index), inputs that meet for that op and its gradient alone: those
            that no gradient flows back to, since no variable has a part in them, or since the op has none.
        backward: names of the ops that differentiate.
    """

    def __init__(self, graph: Any, batch: Any, share: Share) -> None:
        """Start with what is known.

        Args:
            graph: where the step is traced.
            batch: its argument, one tower's shard.
            share: its other argument.
        """
        self._graph = graph
        self._known: dict[str, Kind] = {tensor.name: _UNKNOWN for tensor in share}
        self._known[share.fraction.name] = self._known[share.rows.name] = Kind(COUNT, 1)
        # What is traced for a known number of rows has it as a constant, which tells nothing.
        self._can_tell = True
        for leaf in tf.nest.flatten(batch):
            for component in [] if leaf is None else tf.nest.flatten(leaf, expand_composites=True):
                rank = component.shape.rank if isinstance(leaf, tf.Tensor) else None
                self._known[component.name] = _UNKNOWN if rank is None else Kind(ROWS) if rank else _SAME
                if rank and component.shape[0] is not None:
                    self._can_tell = False
        self._variables: dict[str, tf.Variable] = {}  # by name of the handle within the graph
        self.backward: set[str] = set()
        self.start_anew()

    def start_anew(self) -> None:
        """Tell everything again, since the role of a variable has changed."""
        self._kinds = dict(self._known)
        self._learned: set[str] = set()  # names of the tensors that a variable has a part in
        self._done = 0
        self.meetings: dict[str, Collective] = {}
        self.input_meetings: dict[tuple[str, int], Collective] = {}

    def note(self, tensors: Iterable[tf.Tensor], kind: Kind) -> None:
        """Note the kind of tensors whose ops do not tell it."""
        kinds = dict.fromkeys((tensor.name for tensor in tensors), kind)
        self._known.update(kinds)
        self._kinds.update(kinds)

    def of(self, tensor: tf.Tensor) -> Kind:
        """Return the kind of a tensor of the graph; UNKNOWN for one of another graph."""
        if tensor.graph is not self._graph or not self._can_tell:
            return _UNKNOWN
        self.tell()
        return self._kinds[tensor.name]

    def tell(self) -> None:
        """Tell the kinds, and the meetings, of all ops that the graph has by now."""
        operations = self._graph.get_operations()
        for op in operations[self._done :]:
            of_variable = any(tensor.dtype == tf.resource for tensor in op.inputs)
            if of_variable or any(tensor.name in self._learned for tensor in op.inputs):
                self._learned.update(output.name for output in op.outputs)
            for output in op.outputs:
                if output.name not in self._kinds:
                    self._kinds[output.name] = self._tell(op, output)
        self._done = len(operations)

    def _tell(self, op: tf.Operation, output: tf.Tensor) -> Kind:
        inputs = [self._kinds.get(tensor.name, _UNKNOWN) for tensor in op.inputs]
        if not inputs:
            return _SAME if op.type in ("Const", "Placeholder") else _UNKNOWN
        if op.type == "IdentityN":
            return inputs[output.value_index]
        if op.type == "ReadVariableOp":
            variable = self._variable_of(op.inputs[0])
            return _SAME if variable is None or role_of(variable) is Role.SAME else _UNKNOWN
        if op.type in _PASSING:
            return inputs[0]
        kind = self._tell_of(op, output, inputs)
        origin = next((given.origin for given in inputs if given.origin is not None), None)
        if kind.form == MIXED:
            return Kind(ROWS if _has_rows(output) else UNKNOWN, origin=origin or op)
        return dataclasses.replace(kind, origin=origin)

    def _tell_of(self, op: tf.Operation, output: tf.Tensor, inputs: list[Kind]) -> Kind:
        if all(kind.form == SAME for kind in inputs):
            return _UNKNOWN if "Random" in op.type or "Rng" in op.type else _SAME
        if any(kind.form == UNKNOWN for kind in inputs):
            return _UNKNOWN
        if not any(kind.form == GLOBAL for kind in inputs):
            kind = self._combine(op, output, inputs)
            apart = kind.form == MIXED or (kind.form == AFFINE and op.type in _ADD)
            if apart and self._meet_before(op, inputs):
                kind = _SAME if {k.form for k in inputs} == {SAME} else self._combine(op, output, inputs)
            return kind if kind.form != MIXED else self._met(op, inputs)
        # As SAME, but for gradients: those of rows would have to meet on their way back through it.
        if any(kind.form in (ROWS, SHAPE, COUNT) for kind in inputs):
            return _MIXED
        if op.type not in _ADD and any(kind.form == LINEAR for kind in inputs):
            return self._met(op, inputs)
        kind = self._combine(op, output, [_SAME if kind.form == GLOBAL else kind for kind in inputs])
        return _GLOBAL if kind.form in (SAME, UNKNOWN) else kind

    def _meet_before(self, op: tf.Operation, inputs: list[Kind]) -> bool:
        """Let those inputs meet before `op` that no gradient flows back to; return whether there are any."""
        met = False
        differentiable = any(result.dtype.is_floating for result in op.outputs)
        for i, kind in enumerate(inputs):
            differs = kind.form in (LINEAR, COUNT, MAX, MIN)
            learned = differentiable and op.inputs[i].name in self._learned
            if differs and kind.collective is not None and not learned:
                self.input_meetings[op.name, i] = kind.collective
                inputs[i] = _SAME
                met = True
        return met

    def _variable_of(self, handle: tf.Tensor) -> tf.Variable | None:
        if handle.name not in self._variables:
            by_handle = {id(variable.handle): variable for variable in private.variables_read_in(self._graph)}
            for outside, inside in self._graph.captures:
                if id(outside) in by_handle:
                    self._variables[inside.name] = by_handle[id(outside)]
        return self._variables.get(handle.name)

    def _met(self, op: tf.Operation, inputs: list[Kind]) -> Kind:
        """Let what an op mixes meet before it, if it can be made GLOBAL so."""
        reduced = [i for i, kind in enumerate(inputs) if kind.form not in (SAME, GLOBAL)]
        if all(inputs[i] == _MEAN for i in reduced):
            collective = MEAN_OF_ALL
        elif op.type in _DIVIDE and inputs == [_SUM, _SUM]:
            collective = SHARE_OF_SUM
        else:
            return _MIXED
        self.meetings.update((op.inputs[i].name, collective) for i in reduced)
        return _GLOBAL

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
            added = [k for t, k in zip(op.inputs, inputs, strict=True) if k != _SAME or not _is_zero(t)]
            return _fold(_added, added, op)
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
            branches = op.type in ("If", "StatelessIf") and inputs[0].form not in (SAME, ROWS)
            return _MIXED if branches or _is_elementwise(op) else _UNKNOWN
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
    if AFFINE in forms and forms <= {LINEAR, AFFINE} and (one.is_mean or one.is_sum or one.form == AFFINE):
        return Kind(AFFINE)
    if COUNT in forms:
        return _UNKNOWN
    if one.collective is not None and other.collective is not None and not forms & {MAX, MIN}:
        return Kind(AFFINE)  # a mean and a sum
    return _MIXED


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
    return _MIXED


def _divided(one: Kind, other: Kind, op: tf.Operation) -> Kind:
    if other.form == COUNT:
        inverse = Kind(COUNT, -other.degree)
        return inverse if one.form == SAME else _multiplied(one, inverse, op)
    if other.form == SAME:
        return one
    if other.form == ROWS and one.form in (SAME, ROWS):
        return Kind(ROWS, one.degree - other.degree)
    return _MIXED


def _reduced(op: tf.Operation, kind: Kind) -> Kind:
    axes = tf.get_static_value(op.inputs[1])
    if kind.form in (LINEAR, AFFINE, SAME):
        return kind if op.type in ("Sum", "Mean") else _MIXED
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
    return _MIXED


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


def _has_rows(tensor: tf.Tensor) -> bool:
    """Whether the first axis of a tensor computed from rows runs over them still: its length is open."""
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _is_elementwise(op: tf.Operation) -> bool:
    shapes = [tensor.shape for tensor in (*op.inputs, *op.outputs)]
    return len(op.outputs) == 1 and all(shape.rank == shapes[-1].rank for shape in shapes)
