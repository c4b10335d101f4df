"""Infer what each axis of each tensor of a traced step is: a constant, a number of rows for each sample, or open.

TensorFlow's shape inference is asked for batches of several sizes (`BATCHES`). A length that stays is a constant; one
that grows as the batch does counts rows; any other is open. So the arithmetic on shapes needs no rules: small integers
are computed by TensorFlow's own kernels, for each of these batches. No op of the step runs.

A few batches prove nothing: 16 divides the rows of neither 1 nor 840. So each op is asked for further batches, with
inputs on the straight line through those of two cases (`Kernels`). Results that leave the line through the results of
these two cases are not known. Each op is judged by its own inputs, so a known result has passed at every op before it.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName
from ncclsync.semantics.functions import BRANCHES, CALLS, LOOPS, Functions, in_order

SMALL = 64  # elements of a tensor of integers whose values are followed


class Batch(NamedTuple):
    """Describe a batch for which lengths are inferred.

    Attributes:
        rows: its samples.
        open: the length of each axis that the trace leaves open and that has no rows.
    """

    rows: int
    open: int


# One row finds out lengths that only large batches have, as that of `x[:64]`; 840 rows can be divided by 2 to 8.
# Another length of open axes tells what depends on them; the last batch has other lengths of unknown axes.
BATCHES = (Batch(1, 13), Batch(840, 13), Batch(1, 24), Batch(1, 13))

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]  # one for each of BATCHES
Values = tuple[np.ndarray, ...]


class Rows(NamedTuple):
    """Say that a length counts rows: so many for each sample; 0 where that is open."""

    each: int


@dataclasses.dataclass(frozen=True)
class Items:
    """Describe what a list, an optional tensor or a variable holds.

    Attributes:
        of: the shapes, or, of a list of lists, what these hold; None: nothing as yet.
        values: if all that it holds are the same small integers.
        ways: what each branch has kept, of what branches keep for their gradients.
    """

    of: "Shapes | Items | None"
    values: Values | None = dataclasses.field(default=None, compare=False)
    ways: "tuple[Items, ...]" = dataclasses.field(default=(), compare=False)


State = Shapes | Items | None  # of a tensor; None: not known

Length = int | Rows | None


def length_of(lengths: Sequence[int]) -> Length:
    """Return what a length, for each of BATCHES, is: a constant, `Rows`, or None: open."""
    one, many, *opened = map(int, lengths)
    is_open = any(other != one for other in opened)
    if one == many and not is_open:
        return one
    if one <= 0 or many != one * BATCHES[1].rows:
        return None
    return Rows(0 if is_open else one)


class Axes:
    """Infer the shapes, and the values of small integers, of one graph, as they are asked for."""

    def __init__(
        self,
        functions: Functions,
        given: Mapping[TensorName, State],
        values: Mapping[TensorName, Values | None] | None = None,
        kernels: "Kernels | None" = None,
    ) -> None:
        """Know the arguments: by tensor's name, and the values of small integers; `kernels` of the calling graph."""
        self._functions = functions
        self._states: dict[TensorName, State] = dict(given)
        self._values: dict[TensorName, Values | None] = dict(values or {})
        self._bodies: dict[tuple[OpName, str], tuple[Any, Axes]] = {}
        self._kernels = kernels or Kernels()

    def lengths(self, tensor: tf.Tensor, *, asks: bool = True) -> tuple[Length, ...] | None:
        """Return what each axis is; None if the rank is not known. Without `asks` nothing new is inferred."""
        if tensor.shape.is_fully_defined():
            return tuple(tensor.shape.as_list())
        if not asks and tensor.name not in self._states:
            return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
        shapes = self._shapes(tensor)
        return None if shapes is None else tuple(map(length_of, zip(*shapes, strict=True)))

    def rows(self, tensor: tf.Tensor, axis: int) -> int | None:
        """Return how many rows for each sample an axis has; None if that is open, or if it has none."""
        length = (self.lengths(tensor) or {axis: None})[axis]
        return length.each or None if isinstance(length, Rows) else None

    def values(self, tensor: tf.Tensor) -> Values | None:
        """Return the values of a small tensor of integers for each of BATCHES; None if they are not known."""
        if tensor.name not in self._values:
            self._settle(tensor.op)
        return self._values[tensor.name]

    def constant(self, tensor: tf.Tensor) -> Any:
        """Return the value of a small tensor of integers that no batch changes; None if there is none."""
        if tensor.op.type == "Const":
            return _value_of(tensor)
        values = self.values(tensor)
        return values[0] if values is not None and _equal(values, (values[0],) * len(values)) else None

    def elements(self, tensor: tf.Tensor) -> tuple[Length, ...]:
        """Return what each number of a small tensor of integers is; () if that is not known."""
        if tensor.op.type == "Pack" and tensor.shape.rank == 1:
            each = [self.elements(one) for one in tensor.op.inputs]
            return tuple(one[0] if one else None for one in each)
        return tuple(map(length_of, zip(*map(np.ravel, self.values(tensor) or ()), strict=True)))

    def learn(self, tensor: tf.Tensor, axis: int, each: int, *, sure: bool = False) -> None:
        """Know that an axis has so many rows for each sample, where it is open.

        If that is `sure`, and the other lengths are constants, it spares the inference.
        """
        lengths = tensor.shape.as_list()
        if lengths[axis] is not None:
            return
        is_plain = None not in lengths[:axis] + lengths[axis + 1 :]
        shapes = None if sure and is_plain and tensor.name not in self._states else self._shapes(tensor)
        if shapes is not None and length_of([shape[axis] for shape in shapes]) is not None:
            return
        if shapes is None and is_plain:
            shapes = (tuple(lengths),) * len(BATCHES)
        if shapes is not None:
            self._states[tensor.name] = tuple(
                (*shape[:axis], each * batch.rows, *shape[axis + 1 :])
                for batch, shape in zip(BATCHES, shapes, strict=True)
            )

    def refine(self, tensor: tf.Tensor) -> None:
        """Set the constants among a tensor's lengths that the trace leaves open."""
        if tensor.dtype not in (tf.variant, tf.resource) and (lengths := self.lengths(tensor)) is not None:
            tensor.set_shape([one if isinstance(one, int) else None for one in lengths])

    def body(self, op: tf.Operation, name: str) -> "tuple[Any, Axes]":
        """Return a function that a loop, a branch or a call runs, as a graph, and the axes in it."""
        if (op.name, name) not in self._bodies:
            self._settle(op)
        if (op.name, name) not in self._bodies:  # all of whose results have known shapes
            self._inferred(op)
        if (op.name, name) not in self._bodies:  # which does not run: the condition of the branch is a constant
            states = [self._state(tensor) for tensor in op.inputs[op.type in BRANCHES :]]
            # What is kept for its gradient is known of the branch that runs.
            self._entered(op, name, [None if isinstance(state, Items) else state for state in states])
        graph, axes = self._bodies[op.name, name]
        for tensor in graph.inputs:
            axes.refine(tensor)
        return graph, axes

    # Shapes.

    def _shapes(self, tensor: tf.Tensor) -> Shapes | None:
        state = self._state(tensor)
        return None if isinstance(state, Items) else state

    def _state(self, tensor: tf.Tensor) -> State:
        if tensor.name not in self._states:
            if _is_defined(tensor):
                return (tuple(tensor.shape.as_list()),) * len(BATCHES)
            self._settle(tensor.op)
        return self._states[tensor.name]

    def _settle(self, op: tf.Operation) -> None:
        """Infer what is known of an op's results. Not by recursion: hundreds of ops may lead to it."""
        for one in in_order([op], self._needed):
            if not all(_is_defined(output) or output.name in self._states for output in one.outputs):
                for output, state in zip(one.outputs, self._inferred(one), strict=True):
                    self._states.setdefault(output.name, state)
            for output, values in zip(one.outputs, self._computed(one), strict=True):
                self._values.setdefault(output.name, values)

    def _needed(self, op: tf.Operation) -> list[tf.Operation]:
        return [
            tensor.op
            for tensor in op.inputs
            if (tensor.name not in self._states and not _is_defined(tensor))
            or (tensor.name not in self._values and self._is_small(tensor))
        ]

    def _inferred(self, op: tf.Operation) -> list[State]:
        """Infer the shapes of an op's results."""
        if op.type in LOOPS:
            return self._loop(op)
        if self._functions.runs(op):
            return self._called(op)
        if any(tensor.dtype in (tf.variant, tf.resource) for tensor in (*op.inputs, *op.outputs)):
            return self._of_items(op)
        states = [self._shapes(tensor) for tensor in op.inputs]
        if not op.inputs or tf_compat.calls_functions(op) or _may_lose_axes(op, states[0]):
            return [_traced(output) for output in op.outputs]
        cases = [list(map(self._known, op.inputs, states, [which] * len(states))) for which in range(len(BATCHES))]
        # Open lengths may have to be equal here, and then are: they are asked for once more as unknown, shapes first.
        for known in (lambda: cases, lambda: _without_open(cases, tuple), lambda: _without_open(cases)):
            try:
                found = self._kernels.shapes(op, known())
            except IMPOSSIBLE:
                continue
            made = [
                self._kernels.with_unknown(shapes)
                if None not in shapes and len(set(map(len, shapes))) == 1
                else self._set(output)
                for output, shapes in zip(op.outputs, zip(*found, strict=True), strict=True)
            ]
            return self._as_many_segments(op, made) if op.type in SORTED_SEGMENTS else made
        return [_traced(output) for output in op.outputs]

    def _as_many_segments(self, op: tf.Operation, made: list[State]) -> list[State]:
        """Return the shapes of as many segments as another op gives for the same ids."""
        ids = op.inputs[SORTED_SEGMENTS[op.type]]
        others = [one.outputs[0].name for one in ids.consumers() if one.type in SORTED_SEGMENTS]
        known = next((self._states[name] for name in others if isinstance(self._states.get(name), tuple)), None)
        if not isinstance(known, tuple) or not isinstance(made[0], tuple) or not made[0][0]:
            return made
        return [tuple((one[0], *shape[1:]) for one, shape in zip(known, made[0], strict=True))]

    def _set(self, output: tf.Tensor) -> State:
        """Return the shapes of a result of which the trace alone knows some, as by `set_shape` after Python."""
        return (
            None if output.shape.rank is None else self._kernels.with_unknown([output.shape.as_list()] * len(BATCHES))
        )

    def unknown(self, tensor: tf.Tensor, axis: int) -> Sequence[int] | None:
        """Return the numbers that stand for an axis' length if nothing is known of it, on all axes that are as long."""
        shapes = None if tensor.shape.is_fully_defined() else self._shapes(tensor)
        lengths = [] if shapes is None else [shape[axis] for shape in shapes]
        return lengths if lengths and lengths[0] not in (1, BATCHES[0].open) and length_of(lengths) is None else None

    def with_rows(self, tensor: tf.Tensor, lengths: Sequence[int], each: int) -> Shapes | None:
        """Return a tensor's shapes with so many rows for each sample where a length is unknown so; None: none is."""
        shapes = None if tensor.dtype in (tf.variant, tf.resource) else self._shapes(tensor)
        axes = [*map(list, zip(*(shapes or ()), strict=True))]
        if list(lengths) not in axes:
            return None
        of_rows = [each * batch.rows for batch in BATCHES]
        return tuple(zip(*(of_rows if one == list(lengths) else one for one in axes), strict=True))

    def _known(self, tensor: tf.Tensor, shapes: Shapes | None, which: int) -> "_Given":
        """Return what inference may know of a tensor: its values, perhaps some of these, or its shape."""
        values = self.values(tensor) if tensor.dtype.is_integer else None
        if values is not None:
            return values[which]
        if tensor.dtype.is_integer and tensor.op.type == "Pack" and tensor.shape.rank == 1:
            return [None if one is None else int(one[which]) for one in map(self.values, tensor.op.inputs)]
        return shapes[which] if shapes is not None else None

    # Functions.

    def _entered(
        self, op: tf.Operation, name: str, states: Sequence[State], known: Callable[[Any, int], bool] = lambda *_: True
    ) -> "tuple[Any, Axes]":
        """Enter a function with arguments of these states; and of their values, where `known(graph, i)`."""
        inputs = op.inputs[len(op.inputs) - len(states) :]
        graph = self._functions.graph(name, inputs)
        values = {
            given.name: self.values(tensor) if self._is_small(tensor) and known(graph, i) else None
            for i, (given, tensor) in enumerate(zip(graph.inputs, inputs, strict=True))
        }
        child = Axes(
            self._functions,
            {t.name: state for t, state in zip(graph.inputs, states, strict=True)},
            values,
            self._kernels,
        )
        self._bodies[op.name, name] = graph, child
        return graph, child

    def _loop(self, op: tf.Operation) -> list[State]:
        states = [self._state(tensor) for tensor in op.inputs]
        body = op.get_attr("body").name

        def stays(graph: Any, which: int) -> bool:
            return passed_on(graph.outputs[which]) is graph.inputs[which]

        invariant = [stays(self._functions.graph(body, op.inputs), i) for i in range(len(states))]
        while True:
            graph, child = self._entered(op, body, states, stays)
            ends = [child._state(tensor) for tensor in graph.outputs]
            joined = [_joined(one, two) for one, two in zip(states, ends, strict=True)]
            if joined == states and [_held(one) for one in joined] == [_held(one) for one in states]:
                self._entered(op, op.get_attr("cond").name, states, lambda _, which: invariant[which])
                return joined
            states = joined

    def _called(self, op: tf.Operation) -> list[State]:
        inputs = op.inputs[op.type in BRANCHES :]
        states = [self._state(tensor) for tensor in inputs]
        chosen = self.constant(op.inputs[0]) if op.type in BRANCHES else None
        every = self._functions.called_by(op)
        names = every if chosen is None else self._functions.taken_by(op, chosen)
        if op.type not in BRANCHES:
            graph, child = self._entered(op, names[0], states)
            return [child._state(tensor) for tensor in graph.outputs]
        taken = {name: [_in_branch(one, i, len(every)) for one in states] for i, name in enumerate(every)}
        entered = [self._entered(op, name, taken[name]) for name in names]
        ways = zip(
            *([(tensor, child._state(tensor)) for tensor in graph.outputs] for graph, child in entered), strict=True
        )
        results = zip(ways, op.outputs, strict=True)
        return [_of_branches(one, names == every and are_kept(output, [t for t, _ in one])) for one, output in results]

    # Lists of tensors, of which loops are made; optional ones, of which branches are; and variables.

    def _of_items(self, op: tf.Operation) -> list[State]:
        """Return what is known of the results of an op that takes or gives a list, an optional tensor or a variable."""
        inputs, kind = list(op.inputs), op.type
        held = [one for one in map(self._state, inputs) if isinstance(one, Items)]
        if kind in ("OptionalNone", "EmptyTensorList"):
            return [Items(None)]
        if kind == "TensorListReserve":
            known = self.values(inputs[0])
            fits = known is not None and known[0].ndim == 1 and all((one >= 0).all() for one in known)
            return [Items(tuple(tuple(map(int, one)) for one in known or ()) if fits else None)]
        if kind in _PUTTING_IN:
            tensor = inputs[_PUTTING_IN[kind]]
            item = self._state(tensor)
            if item is None or (kind == "OptionalFromValue" and len(inputs) > 1):
                return [None]
            if kind == "TensorListFromTensor" and isinstance(item, tuple):
                return [Items(tuple(shape[1:] for shape in item))]
            # Some elements of a reserved list may not be set.
            made = Items(item, self.values(tensor) if self._is_small(tensor) and kind != "TensorListSetItem" else None)
            return [made if kind == "OptionalFromValue" else _joined(held[0], made) if held else None]
        if kind == "TensorListResize" and held:
            return [Items(held[0].of)]  # some elements may not be set
        if kind in ("Identity", "ZerosLike", "AddN", "StopGradient") and len(held) == len(inputs):
            return [functools.reduce(_joined, map(self._state, inputs))]
        if not held or held[0].of is None:
            return [_traced(output) for output in op.outputs]
        of = held[0].of
        if kind == "TensorListPopBack":
            return [held[0], of]
        if kind == "TensorListElementShape" and isinstance(of, tuple):
            return [((len(of[0]),),) * len(BATCHES)]
        if kind in ("TensorListGetItem", "OptionalGetValue", "ReadVariableOp") and len(op.outputs) == 1:
            return [of]
        if kind in ("TensorListStack", "TensorListGather") and isinstance(of, tuple):
            traced = _traced(op.outputs[0])
            first = [shape[0] for shape in traced] if isinstance(traced, tuple) else [batch.open for batch in BATCHES]
            return [tuple((count, *shape) for count, shape in zip(first, of, strict=True))]
        return [_traced(output) for output in op.outputs]

    # Values.

    def _computed(self, op: tf.Operation) -> list[Values | None]:
        unknown: list[Values | None] = [None] * len(op.outputs)
        if op.type == "Const":
            value = _value_of(op.outputs[0])
            return [None if value is None else (value,) * len(BATCHES)]
        if op.type in MEASURES:
            shapes = [self._shapes(tensor) for tensor in op.inputs]
            dtype = op.outputs[0].dtype.as_numpy_dtype
            measured = MEASURES[op.type]
            return [None if one is None else tuple(np.asarray(measured(s), dtype) for s in one) for one in shapes]
        if op.type in _TAKING_OUT and isinstance(held := self._state(op.inputs[0]), Items):
            if op.type == "TensorListElementShape":
                dtype = op.outputs[0].dtype.as_numpy_dtype
                of = held.of if isinstance(held.of, tuple) else ((),) * len(BATCHES)
                return [None if held.of is None else tuple(np.array(shape, dtype) for shape in of)]
            return [*unknown[1:], held.values]
        if op.type == "BroadcastGradientArgs" and all(map(self._is_small, op.inputs)):
            one, other = (self._values[tensor.name] for tensor in op.inputs)
            return unknown if one is None or other is None else _summed_axes(one, other)
        chosen = self.constant(op.inputs[0]) if op.type in BRANCHES else None
        if op.type in CALLS or chosen is not None:
            name = self._functions.called_by(op)[0] if chosen is None else self._functions.taken_by(op, chosen)[0]
            if (op.name, name) not in self._bodies:
                self._entered(op, name, [self._state(tensor) for tensor in op.inputs[op.type in BRANCHES :]])
            graph, child = self._bodies[op.name, name]
            return [child.values(tensor) if child._is_small(tensor) else None for tensor in graph.outputs]
        small = op.inputs and all(map(self._is_small, (*op.inputs, *op.outputs)))
        if not small or tf_compat.is_stateful(op) or tf_compat.calls_functions(op):
            return unknown
        given = [self._values[tensor.name] for tensor in op.inputs]
        return unknown if any(one is None for one in given) else self.computed(op, given) or unknown

    def _is_small(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor has few numbers, as shapes and results of arithmetic on them have."""
        shape = tensor.shape
        if shape.rank is None and isinstance(state := self._states.get(tensor.name), tuple):
            shape = tf.TensorShape(state[0])
        numbers = tensor.dtype.is_integer or tensor.dtype.is_floating or tensor.dtype == tf.bool
        known = shape.rank is not None and (shape.rank < 2 or (shape.rank == 2 and shape.is_fully_defined()))
        return numbers and known and math.prod(length or 0 for length in shape.as_list()) <= SMALL

    def computed(self, op: tf.Operation, given: Sequence[Any]) -> Any:
        """Run an op of small integers for its inputs' values, [inputs][cases]; return those of its outputs, or None."""
        try:
            cases = self._kernels.values(op, list(zip(*given, strict=True)))
        except IMPOSSIBLE:
            return None
        known = all(value is not None for results in cases for value in results)
        return list(zip(*cases, strict=True)) if known else None


# Of an input: its values; a vector's, of which some are known; its shape; None: nothing.
_Given = np.ndarray | np.generic | list[int | None] | Shape | None


class Kernels:
    """Ask TensorFlow for an op's shapes and small values: once for each type, attributes and inputs.

    A straight line goes through the first case and each other case; the op is asked at further points of these lines.
    """

    def __init__(self) -> None:
        self._scratch = tf.Graph()
        self._found: dict[Any, list[Any]] = {}
        self._ops: dict[tf.Operation, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        # Small ones: 12 times one, by 840 rows and by many features, is to be an int32.
        self._primes = (n for n in itertools.count(101, 2) if all(n % d for d in range(3, math.isqrt(n) + 1, 2)))
        self._inputs: dict[Any, tf.Tensor] = {}

    def shapes(self, op: tf.Operation, cases: Sequence[Sequence[_Given]]) -> list[list[Any]]:
        """Return the shapes of an op's results, [cases][outputs], as far as TensorFlow infers them.

        A length is None, open, if it does not grow with those of the inputs, as that of `x[:1000]`.

        Args:
            op: whose type and attributes are taken.
            cases: [cases][inputs].

        Raises:
            ValueError, tf.errors.OpError: there is no such op of such inputs.
        """
        return self._kept(self._straight_shapes, op, cases)

    def values(self, op: tf.Operation, cases: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray | None]]:
        """Return the results of an op; None for those that another batch might decide otherwise. See `shapes`."""
        return self._kept(self._straight_values, op, cases)

    def _kept(self, ask: Callable[..., list[list[Any]]], op: tf.Operation, cases: Any) -> list[list[Any]]:
        key = ask.__name__, *self._described(op)[1], *(tuple(map(_hashable, given)) for given in cases)
        if key not in self._found:
            self._found[key] = ask(op, cases)
        return self._found[key]

    def _straight_shapes(self, op: tf.Operation, cases: Sequence[Sequence[_Given]]) -> list[list[Any]]:
        found = self._once(_shape_of, op, cases)
        for which, step, there in self._elsewhere(_shape_of, op, cases):
            for i, shapes in enumerate(zip(found[0], found[which], there, strict=True)):
                if None in (*shapes, *(results[i] for results in found)) or len(set(map(len, shapes))) > 1:
                    continue
                open_axes = set()
                for axis, (one, other, met) in enumerate(zip(*shapes, strict=True)):
                    expected = None if None in (one, other) else one + (other - one) * step
                    if step == _LEAST and met is None:
                        continue  # without elements TensorFlow cannot tell what -1 stands for in a shape
                    if met != expected if step or one == other else met is None:
                        open_axes.add(axis)
                for results in found:
                    results[i] = tuple(None if axis in open_axes else n for axis, n in enumerate(results[i]))
        return found

    def _straight_values(self, op: tf.Operation, cases: Sequence[Sequence[Any]]) -> list[list[Any]]:
        found = self._once(_few_of, op, cases)
        undecided = op.type in _COMPARING and not _is_decided(cases)
        if undecided or (op.type in _SPIKING and len({tuple(map(_hashable, one)) for one in cases}) > 1):
            return [[None] * len(results) for results in found]
        for which, step, there in self._elsewhere(_few_of, op, cases):
            for i, (one, other, met) in enumerate(zip(found[0], found[which], there, strict=True)):
                if one is None or other is None:
                    continue
                with contextlib.suppress(OverflowError):
                    line = _on_line(one, other, step)
                    is_off = line is _NOWHERE or met is None or line.shape != met.shape
                    is_same = np.isclose if op.outputs[i].dtype.is_floating else np.equal
                    if is_off or np.any(~is_same(line, met) & (bool(step) | (one == other))):
                        for results in found:
                            results[i] = None
        return found

    def with_unknown(self, shapes: Sequence[Sequence[int | None]]) -> Shapes:
        """Return shapes, for each of BATCHES, in which each unknown length is a multiple of a prime of its own.

        So it is hardly mistaken for another length. Like an open length it is equal on all towers. `_STEPS` lead from
        it to 0, which a mask may leave, and to lengths that have that prime alone as a common divisor. Of two such
        lengths the longer one is the shorter one in the last of BATCHES.
        """
        filled = []
        for lengths in zip(*shapes, strict=True):
            if None in lengths:
                prime = next(self._primes)
                lengths = 12 * prime, 12 * prime, 23 * prime, 12 * abs(50_000 - prime)
            filled.append(lengths)
        return tuple(zip(*filled, strict=True)) if filled else ((),) * len(BATCHES)

    def _elsewhere(
        self, find: Callable[[tf.Tensor], Any], op: tf.Operation, cases: Sequence[Sequence[_Given]]
    ) -> Iterator[tuple[int, Fraction | int, list[Any]]]:
        """Ask what an op gives for further batches: a claim about all batches must not rest on a few of them.

        Its inputs there lie on the straight line from those of the first case to those of another.

        Yields:
            The other case's number; how many steps along the line; [outputs] what the op gives there, None where it
            cannot be asked. With 0 steps one of several open numbers alone is the other case's, or each unknown length
            is 1: what the results of both cases have in common has to stay, the rest has to be known. A reshape, which
            needs all of the numbers, is not asked so.
        """
        first, *others = ([_hashable(one) for one in given] for given in cases)
        for which, other in enumerate(others, 1):
            if other == first:
                continue
            steps = _STEPS[find is _few_of][min(which, 3) - 1]
            is_asked = not steps
            for step in steps:
                with contextlib.suppress(*IMPOSSIBLE):
                    inputs = [_on_line(one, other, step) for one, other in zip(cases[0], cases[which], strict=True)]
                    if any(one is _NOWHERE for one in inputs):
                        continue
                    there = self._once(find, op, [inputs])[0]
                    is_asked = True
                    yield which, step, there
            if not is_asked:
                yield which, 1, [None] * len(op.outputs)
            further: Iterable[list[Any]] = ()
            if which == _OPENED and op.type != "Reshape":
                further = _apart(cases[0], cases[which])
            elif which > _OPENED and find is _shape_of:
                further = [_of_one(cases[0], cases[which])]
            for inputs in further:
                with contextlib.suppress(*IMPOSSIBLE):
                    yield which, 0, self._once(find, op, [inputs])[0]

    def _once(
        self, find: Callable[[tf.Tensor], Any], op: tf.Operation, cases: Sequence[Sequence[_Given]]
    ) -> list[list[Any]]:
        attributes, known = self._described(op)
        found = []
        for given in cases:
            key = find, *known, *map(_hashable, given)
            if key not in self._found:
                self._found[key] = list(map(find, self._made(op, given, attributes)))
            found.append(list(self._found[key]))
        return found

    def _described(self, op: tf.Operation) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return an op's attributes, and a key of its type and these."""
        if op not in self._ops:
            attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
            if "incompatible_shape_error" in attributes:  # else Equal makes one number of lengths that are not known
                attributes["incompatible_shape_error"].b = True
            known = tuple(sorted((name, value.SerializeToString()) for name, value in attributes.items()))
            self._ops[op] = attributes, (op.type, known)
        return self._ops[op]

    def _made(self, op: tf.Operation, given: Sequence[_Given], attributes: Any) -> Sequence[tf.Tensor]:
        for argument, one in zip(op.op_def.input_arg, given, strict=False):  # an argument may be a list of inputs
            if argument.name in _EACH_AXIS and isinstance(one, tuple) and one and (one[0] or 0) > _MOST_AXES:
                raise ValueError(f"{op.type} of {one[0]} axes")
        inputs = [self._input(tensor.dtype, one) for tensor, one in zip(op.inputs, given, strict=True)]
        dtypes = [output.dtype for output in op.outputs]
        return tf_compat.new_op(op.type, inputs, dtypes, attributes, self._scratch).outputs

    def _input(self, dtype: tf.DType, given: _Given) -> tf.Tensor:
        key = dtype, _hashable(given)
        if key not in self._inputs:
            if given is None or isinstance(given, tuple):
                self._inputs[key] = tf_compat.new_placeholder(dtype, given, self._scratch)
            elif isinstance(given, list):  # as TensorFlow's inference takes it for a shape
                each = [self._input(dtype, () if n is None else np.asarray(n, dtype.as_numpy_dtype)) for n in given]
                with self._scratch.as_default():
                    self._inputs[key] = tf.stack(each)
            else:
                with self._scratch.as_default():
                    self._inputs[key] = tf.constant(given, dtype)
        return self._inputs[key]


# TensorFlow's names for inputs with a number for each axis of a result. Its inference takes memory for any number of
# axes, of which its tensors have at most so many. A length of which nothing is known is a large prime's multiple.
_EACH_AXIS = frozenset({"begin", "dims", "multiples", "output_shape", "paddings", "perm", "shape", "size"})
_MOST_AXES = 254
# There is no op of such inputs, or its numbers exceed their dtype.
IMPOSSIBLE = ValueError, OverflowError, tf.errors.OpError
# Ops with as many results as the last number of their ids says, and the input that has these.
SORTED_SEGMENTS = dict.fromkeys(("SegmentMax", "SegmentMean", "SegmentMin", "SegmentProd", "SegmentSum"), 1)
SORTED_SEGMENTS |= dict.fromkeys(("SparseSegmentMean", "SparseSegmentSqrtN", "SparseSegmentSum"), 2)
# The number of the case in which what is open is longer.
_OPENED = 2
# How many steps along the line an op is asked again: for shapes, and for values; each by the number of the other case,
# the last for all further cases. With BATCHES these are 99,842 rows, open lengths of 1 and 275,013, and unknown ones of
# 0; for values also 2 and 2,518 rows, and a length of 14.
_LEAST = Fraction(-12, 11)
_STEPS = (((119,), (_LEAST, 25_000), ()), ((Fraction(1, 839), 3, 119), (_LEAST, Fraction(1, 11), 25_000), (119,)))
_COMPARING = frozenset({"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"})
# Results of these for some numbers say nothing of the numbers in between.
_SPIKING = frozenset({"BitwiseAnd", "BitwiseOr", "BitwiseXor", "ListDiff", "OneHot", "Unique"})
_NOWHERE = object()


def _on_line(one: Any, other: Any, step: Fraction | int) -> Any:
    """Return what lies so many steps from one to another of two shapes, or of two arrays; _NOWHERE if nothing does."""
    if one is None or other is None:
        return None if one is other else _NOWHERE
    if isinstance(one, tuple | list):
        if len(one) != len(other):
            return _NOWHERE
        lengths = [None if a is None or b is None else a + (b - a) * step for a, b in zip(one, other, strict=True)]
        if any(n is not None and (n < 0 or n != int(n)) for n in lengths):
            return _NOWHERE
        return type(one)(None if n is None else int(n) for n in lengths)
    one, other = np.asarray(one), np.asarray(other)
    if np.array_equal(one, other):
        return one
    if one.shape != other.shape or one.dtype == bool:
        return _NOWHERE
    if one.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return (one + (other - one) * float(step)).astype(one.dtype)
    apart = (other.astype(np.int64) - one) * Fraction(step).numerator
    there = one + apart // Fraction(step).denominator
    if (apart % Fraction(step).denominator).any():
        return _NOWHERE
    if (there.astype(one.dtype) != there).any():
        raise OverflowError
    return there.astype(one.dtype)


def _is_decided(cases: Sequence[Sequence[np.ndarray]]) -> bool:
    """Return whether any other batch decides a comparison as these do: nothing open is compared, and no sign changes.

    What is compared grows in a straight line with the rows, and so does the difference.
    """
    if any(not np.array_equal(*both) for both in zip(cases[0], cases[_OPENED], strict=True)):
        return False
    with np.errstate(invalid="ignore"):  # of two infinities, which decide nothing
        few, *more = (np.subtract(*case, dtype=np.float64) for case in cases)
        return all(np.all((few * many >= 0) & (abs(many) >= abs(few))) for many in more)


def _apart(few: Sequence[Any], opened: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield inputs in which one of several open lengths alone is longer, if some of them are given as numbers.

    In each case all open lengths are equal. So what seems to be the same for all, as H - W, may depend on them.
    """
    moved: list[tuple[int, Any]] = []
    for i, (one, longer) in enumerate(zip(few, opened, strict=True)):
        if one is None or isinstance(one, list) or np.shape(one) != np.shape(longer):
            continue
        differ = np.not_equal(one, longer)
        for place in np.eye(differ.size, dtype=bool)[differ.ravel()]:
            alone = np.where(place.reshape(differ.shape), longer, one)
            moved.append((i, tuple(alone.tolist()) if isinstance(one, tuple) else alone))
    if len(moved) > 1 and not all(isinstance(alone, tuple) for _, alone in moved):
        for i, alone in moved:
            yield [*few[:i], alone, *few[i + 1 :]]


def _of_one(few: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Return inputs in whose shapes each unknown length, which is another one in the other case, is 1."""

    def shape_of(one: Any, there: Any) -> Any:
        if not isinstance(one, tuple) or not isinstance(there, tuple) or len(one) != len(there):
            return one
        return tuple(a if a == b else 1 for a, b in zip(one, there, strict=True))

    return list(map(shape_of, few, other))


def _without_open(cases: Sequence[Sequence[_Given]], kinds: Any = (tuple, list)) -> list[list[_Given]]:
    """Return the inputs for all cases with None for each open length, in shapes and, as lists, in vectors."""
    columns = []
    for each in zip(*cases, strict=True):
        lengths: Any = [one.tolist() if isinstance(one, np.ndarray) and one.ndim == 1 else one for one in each]
        if all(isinstance(one, kinds) and len(one) == len(lengths[0]) for one in lengths):
            known = [None not in n and length_of(n) not in (None, Rows(0)) for n in zip(*lengths, strict=True)]
            kind = type(each[0]) if isinstance(each[0], tuple) else list
            lengths = [kind(n if k else None for n, k in zip(one, known, strict=True)) for one in lengths]
        else:
            lengths = list(each)
        columns.append(lengths)
    return [list(one) for one in zip(*columns, strict=True)]


def _summed_axes(*shapes: Values) -> list[Values | None]:
    """Return the axes over which the gradient of each of two operands is summed, as `BroadcastGradientArgs` does.

    Left out are axes of which both have one element: a sum over these has the same elements, and keeps the axes.
    """
    rank = max(len(shape[0]) for shape in shapes)
    lengths = np.array([[(*[0] * (rank - len(one)), *one) for one in shape] for shape in shapes])  # 0: it has none
    found: list[Values | None] = []
    for own, other in (lengths, lengths[::-1]):
        summed = (own == 0) | ((own == 1) & (other > 1))
        sure = ((own <= 1).all(0) | ~summed.any(0)).all()
        axes = np.flatnonzero(summed.any(0)).astype(shapes[0][0].dtype)
        found.append((axes,) * len(BATCHES) if sure else None)
    return found


def _few_of(tensor: tf.Tensor) -> np.ndarray | None:
    """Return the numbers of a small tensor; a vector whose length the trace leaves open may be of any size."""
    return tf_compat.folded(tensor) if (tensor.shape.num_elements() or 0) <= SMALL**2 else None


def _shape_of(tensor: tf.Tensor) -> Shape | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def _hashable(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return type(given), *map(_hashable, given)
    return (given.shape, given.tobytes()) if isinstance(given, (np.ndarray, np.generic)) else given


MEASURES: dict[str, Callable[[Shape], Any]] = {"Shape": np.array, "ShapeN": np.array, "Size": np.prod, "Rank": len}
_PUTTING_IN = {"TensorListFromTensor": 0, "OptionalFromValue": 0, "TensorListPushBack": 1, "TensorListSetItem": 2}
_TAKING_OUT = frozenset({"TensorListPopBack", "TensorListGetItem", "OptionalGetValue", "TensorListElementShape"})


def _held(state: State) -> Any:
    known = isinstance(state, Items) and state.values
    return known and [value.tolist() for value in known]


def passed_on(tensor: tf.Tensor, *also: str) -> tf.Tensor:
    """Return the tensor that identities have passed on as this one; `also`: other types of ops to look through."""
    while tensor.op.type in ("Identity", "StopGradient", *also):
        tensor = tensor.op.inputs[0]
    return tensor


def are_kept(output: tf.Tensor, ways: Iterable[tf.Tensor]) -> bool:
    """Return whether a result, given by the branches as these tensors, is what each keeps for its own gradient.

    These have no order: branches share a result by chance. They are optional tensors, which nothing else takes: what a
    user's branches give TensorFlow passes on by an `Identity`. Source: tensorflow/python/ops/cond_v2.py.
    """
    optional = all(tensor.op.type in ("OptionalFromValue", "OptionalNone") for tensor in map(passed_on, ways))
    return optional and all(op.type != "Identity" for op in output.consumers())


def given_by(ways: Sequence[tuple[tf.Tensor, Any]]) -> Sequence[tuple[tf.Tensor, Any]]:
    """Return the branches that give a result, of (the result, what is known of it) of each.

    Where XLA compiles, other branches have an op in its place whose results are not used.
    """
    return [way for way in ways if passed_on(way[0]).op.type != "FakeParam"] or ways


def _is_defined(tensor: tf.Tensor) -> bool:
    return tensor.shape.is_fully_defined() and tensor.dtype not in (tf.variant, tf.resource)


def _value_of(tensor: tf.Tensor) -> Any:
    return None if tensor.dtype in (tf.variant, tf.string) else np.asarray(tf.get_static_value(tensor))


def _equal(one: Values, two: Values) -> bool:
    return all(map(np.array_equal, one, two))


def _may_lose_axes(op: tf.Operation, shapes: Shapes | None) -> bool:
    """Return whether an op takes out all axes of length 1, and a length that nobody knows may be 1."""
    if op.type != "Squeeze" or op.get_attr("squeeze_dims") or shapes is None:
        return False
    return any(length_of(lengths) is None for lengths in zip(*shapes, strict=True))


def _traced(tensor: tf.Tensor) -> State:
    """Return the shapes that the trace knows; what it leaves open has none of the batch's rows."""
    if tensor.dtype == tf.resource:
        spec = tf_compat.spec_behind(tensor)
        if spec is None or not spec.shape.is_fully_defined():
            return None
        return Items((tuple(spec.shape.as_list()),) * len(BATCHES))
    if tensor.shape.rank is None or tensor.dtype == tf.variant:
        return None
    return tuple(tuple(batch.open if n is None else n for n in tensor.shape.as_list()) for batch in BATCHES)


def given_rows(tensor: tf.Tensor) -> State:
    """Return the shapes of an argument that has the batch's rows along its first axis."""
    traced = _traced(tensor)
    if traced is None or isinstance(traced, Items) or tensor.shape[0] is not None:
        return traced
    return tuple((batch.rows, *shape[1:]) for batch, shape in zip(BATCHES, traced, strict=True))


def _in_branch(state: State, index: int, count: int) -> State:
    """Return what one of so many branches knows of an input, which may be what the same branch has kept for it."""
    return state.ways[index] if isinstance(state, Items) and len(state.ways) == count else state


def _of_branches(given: Sequence[tuple[tf.Tensor, State]], is_each: bool) -> State:
    """Return what is known of a result that branches give as these tensors, of these states."""
    joined = functools.reduce(_joined, [state for _, state in given_by(given)])
    ways = tuple(state for _, state in given if isinstance(state, Items))
    if not is_each or len(ways) != len(given):
        return joined
    return dataclasses.replace(joined if isinstance(joined, Items) else Items(None), ways=ways)


def _joined(one: State, two: State) -> State:
    """Return what is known of a tensor that is one or the other."""
    if isinstance(one, Items) and isinstance(two, Items):
        for held, other in ((one, two), (two, one)):
            if other.of is None and not other.ways:
                return held
        of, ways = _joined(one.of, two.of), one.ways if one.ways == two.ways else ()
        same = one.values is not None and two.values is not None and _equal(one.values, two.values)
        return Items(of, one.values if same else None, ways) if of is not None or ways else None
    if one is None or two is None or isinstance(one, Items) or isinstance(two, Items) or len(one[0]) != len(two[0]):
        return None
    lengths = [
        a if a == b else tuple(batch.open for batch in BATCHES)
        for a, b in zip(zip(*one, strict=True), zip(*two, strict=True), strict=True)
    ]
    return tuple(zip(*lengths, strict=True)) if lengths else one
