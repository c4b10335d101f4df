"""Convert tensors that go from one XLA-compiled segment to another into dense tensors whose shapes XLA knows.

Two kinds of tensor need another form. A list is a TensorArray, or what a loop keeps of each iteration for its gradient.
XLA's programs neither take nor return lists, but know the shape of the elements and their largest number. A tensor
whose length depends on numbers, as of the rows that a mask leaves, has a bound within a program and its own length
outside: XLA would compile the program that takes it anew for each length. No other module knows what crosses in a
tensor's place.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.compat.source_lines import user_line
from ncclsync.program.graph import StepGraph
from ncclsync.semantics.axes import SMALL
from ncclsync.semantics.functions import BRANCHES, LOOPS, change_functions
from ncclsync.semantics.rules import FILLING, MOVING, names

_ANY_SHAPE = -1
_OPEN = 1000  # an open length, where only more or fewer bytes count

# Ops that XLA computes within other kernels, for less than it takes to read their results from memory.
_CHEAP = names("""
    Add AddN AddV2 BroadcastTo Cast Div Equal ExpandDims Greater GreaterEqual Identity Less LessEqual LogicalAnd
    LogicalNot LogicalOr Maximum Minimum Mul Neg NotEqual OnesLike RealDiv Relu ReluGrad Reshape Select SelectV2 Square
    SquaredDifference Squeeze StopGradient Sub ZerosLike
""")

# Ops whose results XLA gives a bound, and a length that is known only when they have run.
_OF_NUMBERS = frozenset({"Where", "Unique", "UniqueV2", "NonMaxSuppressionV3", "ListDiff"})

# Ops whose first result is the list that they take; of a loop, the result at the list's place.
_PASSING_LISTS = frozenset({"Identity", "TensorListSetItem", "TensorListPushBack", "TensorListPopBack", *LOOPS})


@dataclasses.dataclass(frozen=True)
class Form:
    """Describe the tensors that cross in place of one tensor.

    Attributes:
        names: of these tensors.
        specs: of these tensors.
        give: `give(tensor)` makes them in the segment that has it.
        take: `take(*tensors)` makes the tensor of them in a segment that uses it.
        is_given: whether a segment gives them; else they are arguments of the step.
    """

    names: tuple[TensorName, ...]
    specs: tuple[tf.TensorSpec, ...]
    give: Callable[[Any], Sequence[Any]] = lambda value: [value]
    take: Callable[..., Any] = lambda value: value
    is_given: bool = True


class Forms:
    """Choose the forms in which a step's tensors cross from one segment to another: as they are without XLA."""

    def __init__(self, graph: StepGraph, jit_compile: bool) -> None:
        """Find which tensors' lengths rest on numbers, in a step that is placed."""
        self._graph, self.jit_compile = graph, jit_compile
        self._places = {op.name: place for place, op in enumerate(graph.ops)}
        # Tensors of such lengths, and integers that may be computed of these.
        self._of_numbers: set[TensorName] = set()
        for op in graph.ops if jit_compile else ():
            types = graph.functions.op_types(op)
            if not (self._of_numbers.isdisjoint(graph.inputs[op.name]) and _OF_NUMBERS.isdisjoint(types)):
                self._of_numbers.update(t.name for t in op.outputs if t.dtype.is_integer or self._open_axes(t.name))
            for tensor in op.outputs:  # XLA has to know shapes, also those that the trace leaves to branches
                if tensor.dtype.is_integer and tensor.shape.rank == 1 and tensor.shape[0] is None:
                    tensor.set_shape([len(graph.axes.elements(tensor)) or None])
        self._of_numbers -= {name for name in self._of_numbers if graph.numbers(name) is not None}

    @property
    def are_bounded(self) -> bool:
        """Return whether XLA knows of some lengths no more than their bounds, as of the rows that a mask leaves."""
        return bool(self._of_numbers)

    def of(self, name: TensorName) -> Form:
        """Return the form in which a tensor crosses."""
        graph, spec = self._graph, self._graph.spec(name)
        if not self.jit_compile or name in graph.exchanges or name in graph.traced.variable_of:
            return Form((name,), (spec,))
        if (numbers := self._numbers(name)) is not None:
            rows = {one.name: one for _, one in numbers if one is not None}
            specs = tuple(tf.TensorSpec([], one.dtype) for one in rows.values())

            def counted(*given: Any) -> Any:
                known = dict(zip(rows, given, strict=True))
                each = [n if one is None else n * known[one.name] for n, one in numbers]
                return tf.reshape(tf.cast(tf.stack(each), spec.dtype), spec.shape)

            return Form(tuple(rows), specs, take=counted, is_given=False)
        if (element := list_element(graph, name)) is not None:
            stacked = tf.TensorSpec(tf.TensorShape([None]).concatenate(element.shape), element.dtype)
            pushed = _maker(graph, name) != "TensorListReserve"
            return Form((name,), (stacked,), lambda v: [_stack(v, element, pushed)], lambda v: _unstack(v, element))
        opened = self._open_axes(name) if name in self._of_numbers else []
        axes = opened
        if spec.shape.rank and _may_be_left_out(graph, name):
            axes = [axis for axis, length in enumerate(spec.shape.as_list()) if length is None]
        if not axes:
            return Form((name,), (spec,))
        names = TensorName(f"{name}@padded"), TensorName(f"{name}@lengths")
        specs = (spec, tf.TensorSpec([spec.shape.rank], tf.int32))
        return Form(
            names[: 1 + bool(opened)],
            specs[: 1 + bool(opened)],
            lambda value: [tf_compat.padded(value, axes), tf.shape(value)][: 1 + bool(opened)],
            lambda value, lengths=None: tf_compat.unpadded(value, opened, lengths),
        )

    def _numbers(self, name: TensorName) -> list[tuple[int, tf.Tensor | None]] | None:
        """Return `StepGraph.numbers` of a few integers, as of a shape.

        In one program XLA would know them. From one to another they would cross by the host's memory, which waits.
        """
        if not self._is_small(name) or name in self._of_numbers:
            return None
        return self._graph.numbers(name)

    def _open_axes(self, name: TensorName) -> list[int]:
        """Return the axes of a tensor whose lengths do not follow from the batch's rows."""
        lengths = self._graph.axes.lengths(self._graph.traced.tensor(name)) or ()
        return [axis for axis, length in enumerate(lengths) if length is None]

    def made_where_used(self, ops: Sequence[OpName]) -> list[OpName]:
        """Return the ops of other segments that a segment computes as well, since XLA has to know their results.

        They make the empty lists that the segment's ops fill, and compute shapes that rest on numbers.
        """
        found: list[OpName] = []
        queue, known = list(ops) if self.jit_compile else [], set(ops)
        while queue:
            for name in self._graph.inputs[queue.pop()]:
                op = op_name(name)
                if op not in known and (self._is_shape(name) or self._is_empty(name)):
                    known.add(op)
                    found.append(op)
                    queue.append(op)
        return found[::-1]

    def recomputed(self, ops: Sequence[OpName]) -> list[OpName]:
        """Return the cheap ops of earlier segments that a segment computes again, so that fewer bytes cross to it.

        In one program XLA would do so by itself: it writes to memory only what no other kernel can compute on the way.
        No variable is read again: somebody may have written it meanwhile.
        """
        if not self.jit_compile:
            return []
        inside, found = {*ops}, list[OpName]()
        crossing = {n for op in ops for n in self._graph.inputs[op] if op_name(n) not in inside and self._bytes(n)}
        better = True
        while better:
            groups: dict[frozenset[TensorName], tuple[set[TensorName], list[OpName]]] = {}  # by what crosses instead
            for name in crossing:
                made, given, _ = self._ways(name, crossing - {name})
                members, ways = groups.setdefault(frozenset(given), (set(), []))
                members.add(name)
                ways += made
            better = False
            for instead, (members, ways) in groups.items():
                if sum(map(self._bytes, instead)) < sum(map(self._bytes, members)):
                    crossing, better = (crossing - members).union(instead), True
                    found += ways
        return sorted({*found}, key=lambda one: self._places[one])

    def _ways(
        self, name: TensorName, crossing: Collection[TensorName], depth: int = 8
    ) -> tuple[list[OpName], set[TensorName], float]:
        """Return the ops that compute a tensor anew, what crosses for them besides, and how many bytes that has."""
        op = op_name(name)
        if not depth or op not in self._places or not self._is_cheap(op):
            return [], {name}, math.inf
        made, given, cost = [op], set[TensorName](), 0.0
        for one in self._graph.inputs[op]:
            if one in crossing or not self._bytes(one):
                continue
            ways = self._ways(one, crossing, depth - 1)
            if ways[2] <= self._bytes(one):
                made, given, cost = made + ways[0], given | ways[1], cost + ways[2]
            else:
                given, cost = given | {one}, cost + self._bytes(one)
        return made, given, cost

    def _is_cheap(self, name: OpName) -> bool:
        op, inputs = self._graph.by_name[name], self._graph.inputs[name]
        lists = any(tensor.dtype == tf.variant for tensor in op.outputs)
        known = op.type not in MOVING | FILLING or all(map(self._graph.is_constant, inputs[1:]))  # the new shape
        cheap = op.type in _CHEAP or all(map(self._is_small, (*inputs, *(output.name for output in op.outputs))))
        return cheap and known and not lists and self._of_numbers.isdisjoint(inputs)

    def _is_small(self, name: TensorName) -> bool:
        """Return whether a tensor has a few integers that an op computes, as of a shape."""
        graph, spec = self._graph, self._graph.spec(name)
        if not (spec.dtype.is_integer or spec.dtype.is_bool) or name in graph.exchanges:
            return False
        op = graph.producer(name)
        if op is None or tf_compat.is_stateful(op):
            return False
        few = spec.shape.is_fully_defined() and spec.shape.num_elements() <= SMALL
        return few or op.type == "BroadcastGradientArgs"

    def _bytes(self, name: TensorName) -> int:
        """Return about how many bytes cross if a tensor does; 0: none, since each segment has it."""
        traced = self._graph.traced
        is_argument = name in traced.variable_of or op_name(name) in traced.placeholders
        if is_argument or self._graph.is_constant(name) or self._numbers(name) is not None:
            return 0
        spec = self._graph.spec(name)
        lengths = [_OPEN] * 5 if spec.shape.rank is None else spec.shape.as_list()
        return math.prod(_OPEN if one is None else one for one in lengths) * max(spec.dtype.size, 1)

    def _is_empty(self, name: TensorName) -> bool:
        return _maker(self._graph, name, passed=("Identity",)) in ("EmptyTensorList", "TensorListReserve")

    def _is_shape(self, name: TensorName) -> bool:
        if name not in self._of_numbers:
            return False
        tensor = self._graph.traced.tensor(name)
        small = tensor.shape.is_fully_defined() and tensor.shape.num_elements() <= SMALL
        return small and tensor.dtype.is_integer and not tf_compat.is_stateful(tensor.op)


def _may_be_left_out(graph: StepGraph, name: TensorName) -> bool:
    """Return whether a tensor has no value if its branch is not taken."""
    tensor = graph.traced.tensor(name)
    if tensor.op.type not in BRANCHES:
        return False
    for called in graph.functions.called_by(tensor.op):
        function = graph.functions.definitions[called]
        made = op_name(function.ret[function.signature.output_arg[tensor.value_index].name])
        if any(node.name == made and node.op == "FakeParam" for node in function.node_def):
            return True
    return False


def close_branches(definition: tf.compat.v1.GraphDef) -> list[Any]:
    """Close, in place, what `tf_compat.open_branches` has left open in a graph's functions; return the changed copies.

    One row, where TensorFlow writes none: XLA refuses transposes of rows of which it knows that they are one or none.
    """

    def left_open(function: Any) -> Iterator[Any]:
        for node in function.node_def:
            if node.op == "FakeParam":
                yield from (axis for axis in node.attr["shape"].shape.dim if axis.size < 0)

    def close(function: Any) -> None:
        for axis in left_open(function):
            axis.size = 1

    return change_functions(definition, "_closed", lambda function: any(True for _ in left_open(function)), close)


def list_element(graph: StepGraph, name: TensorName) -> tf.TensorSpec | None:
    """Return the spec of a list's elements, variants if it holds lists; None if `name` is no list."""
    if name in graph.exchanges or name in graph.traced.variable_of:
        return None
    tensor = graph.traced.tensor(name)
    return tf_compat.spec_behind(tensor) if tensor.dtype == tf.variant else None


def _stack(handle: tf.Tensor, element: tf.TensorSpec, pushed: bool) -> tf.Tensor:
    """Return a list as a tensor, in a graph that XLA compiles: [places, *element].

    XLA's lists have a fixed number of places. No op says how many places of a `pushed` list are taken, and a loop may
    find out only as it runs. So the last element is found, and moved to the last place: it is where two lists differ in
    which two different values stand for it.
    """
    lists, numbers = tf.raw_ops, {"element_dtype": element.dtype, "element_shape": tf.constant(_ANY_SHAPE)}
    tensor = lists.TensorListStack(input_handle=handle, **numbers)
    if not pushed:
        return tensor
    before, last = lists.TensorListPopBack(input_handle=handle, **numbers)
    places = tf.shape(tensor)[0]
    firsts = []
    for mark in (tf.zeros_like(last), tf.ones_like(last)):
        marked = lists.TensorListPushBack(input_handle=before, tensor=mark)
        marked = lists.TensorListStack(input_handle=marked, **numbers)
        firsts.append(tf.reshape(marked, [places, -1])[:, :1])
    differs = tf.reduce_any(tf.not_equal(*firsts), axis=1)
    return tf.roll(tensor, places - 1 - tf.argmax(differs, output_type=tf.int32), axis=0)


def _unstack(tensor: tf.Tensor, element: tf.TensorSpec) -> tf.Tensor:
    """Return the list that `_stack` was given: it can be read, and elements can be taken from its end."""
    shape = tf.constant(_declared(element.shape), tf.int32)
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=shape)


def _maker(graph: StepGraph, name: TensorName, *, passed: Collection[str] = _PASSING_LISTS) -> str | None:
    """Return the type of the op that has made a list, behind ops of the types `passed`; None: it is not known."""
    while (op := graph.producer(name)) is not None and op.type in passed:
        name = graph.inputs[op.name][graph.traced.tensor(name).value_index if op.type in LOOPS else 0]
    return None if op is None else op.type


def keep_declared_shapes(graph: StepGraph, definition: tf.compat.v1.GraphDef) -> None:
    """Let a list's elements have the shape that it was traced with, in place: of rows any number, as without XLA.

    XLA would take the shape of the rows that a list has, also for one that is to have the rows of all towers.
    """
    for node in definition.node:
        element = list_element(graph, graph.inputs[node.name][0]) if node.op == "TensorListElementShape" else None
        if element is None:
            continue
        value = tf.make_tensor_proto(_declared(element.shape), tf.as_dtype(node.attr["shape_type"].type))
        node.op, node.input[:] = "Const", [f"^{name}" for name in graph.controls[node.name] if f"^{name}" in node.input]
        node.attr["dtype"].type = value.dtype
        node.attr["value"].tensor.CopyFrom(value)
        node.attr.pop("shape_type")


def take_known_branches(graph: StepGraph, definition: tf.compat.v1.GraphDef) -> None:
    """Call what a branch runs whose choice no batch changes, in place: of both, XLA knows no shape that differs."""
    for node in definition.node:
        op = graph.by_name.get(OpName(node.name)) if node.op in BRANCHES else None
        chosen = None if op is None else graph.axes.constant(graph.traced.tensor(graph.inputs[node.name][0]))
        every = [] if op is None else graph.functions.called_by(op)
        taken = every if op is None else graph.functions.taken_by(op, chosen)
        if chosen is None or len(taken) != 1:
            continue
        if "branches" in node.attr:
            function = node.attr["branches"].list.func[every.index(taken[0])]
        else:
            function = node.attr["then_branch" if chosen else "else_branch"].func
        kept = {name: node.attr[name] for name in ("Tin", "Tout")}
        made = tf.compat.v1.NodeDef(name=node.name, input=node.input[1:], attr=kept)
        made.op = "PartitionedCall" if node.op.startswith("Stateless") else "StatefulPartitionedCall"
        made.attr["f"].func.CopyFrom(function)
        node.CopyFrom(made)


def _declared(shape: tf.TensorShape) -> int | list[int]:
    return _ANY_SHAPE if shape.rank is None else [_ANY_SHAPE if n is None else n for n in shape.as_list()]


def find_uncrossable(graph: StepGraph, plans: Sequence[Any]) -> Iterator[str]:
    """Yield, in words, the tensors that these segments cannot exchange if XLA compiles them."""
    for plan in plans:
        for name in plan.sources:
            element, op = list_element(graph, name), graph.producer(name)
            if op is not None and op.type == "TensorListElementShape":
                of = list_element(graph, graph.inputs[op.name][0])
                if of is None or of.shape.rank is None:  # then XLA has a scalar for it
                    yield f"the shape of a list's tensors, at {user_line(op.traceback)}"
            if op is None or op.name in graph.traced.placeholders or graph.spec(name).dtype != tf.variant:
                continue
            if element is None or element.dtype == tf.variant:  # of such lists a graph may know nothing
                yield f"the list of lists that {op.name} keeps, at {user_line(op.traceback)}"
            elif any(_pushes(graph, user, name) for user in plan.ops):
                yield f"the list that {op.name} has not filled, at {user_line(op.traceback)}"


def _pushes(graph: StepGraph, user: OpName, name: TensorName) -> bool:
    """Return whether an op, or a function that it calls, appends to a list: then its length has to be known."""
    op, places = graph.by_name[user], [i for i, one in enumerate(graph.inputs[user]) if one == name]
    if op.type.startswith("TensorListPush"):
        return bool(places)
    for called in graph.functions.called_by(op):
        arguments = graph.functions.definitions[called].signature.input_arg
        given = {arguments[i].name for i in places if i < len(arguments)}
        pushes = (one for one in graph.functions.definitions[called].node_def if one.op.startswith("TensorListPush"))
        if any(given.intersection(one.input) for one in pushes):
            return True
    return False
