"""Find chains of element-wise ops in a segment, to be run as one op in one pass over memory.

A normalisation or an activation, forward and backward, is a dozen element-wise ops on arrays of the batch's size, and
each op waits for memory. Neighbouring element-wise ops become one op, with the same results bit for bit. Most values of
a normalisation are only added up over the batch: the same pass adds them up, and never writes the addends. Each chain
is a `Rewrite` of a segment.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat.names import OpName, TensorName, op_name, result_name
from ncclsync.host_passes.arithmetic import COMPUTED, FUSED, MOST_PERIOD, MOST_REGISTERS, WHOLE, Writer, repeat_of
from ncclsync.host_passes.same_shapes import MULTIPLYING, Shapes
from ncclsync.ops.host_ops import set_attribute
from ncclsync.program.graph import StepGraph

_SUMMING = {"BiasAddGrad", "Mean", "Sum"}

# TensorFlow adds this many tensors, or fewer, from left to right.
_MOST_ADDED = 8

# TensorFlow fuses these with a preceding op that multiplies matrices.
_JOINED = {"Add", "AddV2", "Relu"}


@dataclasses.dataclass(frozen=True)
class Sum:
    """Describe an op that adds up an array over its first axes."""

    name: OpName  # of the op
    values: TensorName  # the tensor that it adds up
    period: int  # how many elements the result has
    shape: tuple[int, ...]  # the result's
    is_mean: bool  # whether it divides by their number


@dataclasses.dataclass(frozen=True)
class Chain:
    """Name ops that can run as one."""

    members: tuple[OpName, ...]  # their names
    inputs: tuple[TensorName, ...]  # names of the tensors that it takes; the first has the results' shape
    outputs: tuple[OpName, ...]  # names of the element-wise members whose results other ops take
    sums: tuple[Sum, ...]  # the members that are sums and whose results other ops take
    awaited: tuple[OpName, ...]  # names of further members with control dependents outside the chain
    dtype: tf.DType  # of all tensors
    # For each input, how many neighbouring elements of the result take the same element of it; or `WHOLE`
    repeats: tuple[int, ...]
    code: tuple[int, ...]  # see `Writer.code`


def find_chains(graph: StepGraph, shapes: Shapes, ops: Sequence[OpName], needed: Collection[OpName]) -> list[Chain]:
    """Find the chains of a segment, given its ops, inputs before consumers, and those `needed` outside the segment."""
    consumers: dict[OpName, set[OpName]] = collections.defaultdict(set)
    awaiting: dict[OpName, set[OpName]] = collections.defaultdict(set)
    for name in ops:
        for operand in graph.inputs[name]:
            consumers[op_name(operand)].add(name)
        for control in graph.controls[name]:
            awaiting[control].add(name)
    sums = {name: found for name in ops if (found := _sum_of(graph, shapes, name)) is not None}
    kinds = {name: _kind(graph, shapes, name, name in sums) for name in ops}
    stages = _stages(graph, ops, kinds, sums)
    order = [name for name in stages if kinds.get(name) is not None]
    for name in reversed(order):  # as late as its consumers allow: it may join their chain
        if (
            name not in sums
            and name not in needed
            and not awaiting[name]
            and {kinds.get(c) for c in consumers[name]} == {kinds[name]}
        ):
            stages[name] = min(stages[consumer] for consumer in consumers[name])
    chains = []
    for members in _components(graph, shapes, order, {n: (stages[n], kinds[n]) for n in order}):
        inside = set(members)
        outputs = [n for n in members if n in needed or not consumers[n] <= inside]
        awaited = [n for n in members if n not in outputs and not awaiting[n] <= inside]
        chain = _chain_of(graph, shapes, members, outputs, awaited, sums)
        if chain is not None:
            chains.append(chain)
    return chains


def _operands(graph: StepGraph, name: OpName) -> Sequence[TensorName]:
    """Return the operands that a member computes with."""
    of_one = graph.by_name[name].type in {"BroadcastTo", *_SUMMING}
    return graph.inputs[name][: 1 if of_one else None]


def _sum_of(graph: StepGraph, shapes: Shapes, name: OpName) -> Sum | None:
    """Describe an op that adds up an array over its first axes, apart from axes of size 1; None for other ops."""
    op = graph.by_name[name]
    axes = shapes.reduced_axes(name) if op.type in _SUMMING else None
    if not axes:
        return None
    values, result = graph.inputs[name][0], shapes.spec(result_name(name)).shape
    dims = [(i in axes, dim) for i, dim in enumerate(shapes.spec(values).shape) if dim != 1]
    while dims and dims[0][0]:
        dims.pop(0)
    if any(summed or dim is None for summed, dim in dims) or not result.is_fully_defined():
        return None
    period = math.prod(dim for _, dim in dims)
    return Sum(name, values, period, tuple(result), op.type == "Mean") if period <= MOST_PERIOD else None


def _kind(graph: StepGraph, shapes: Shapes, name: OpName, is_sum: bool) -> Any:
    """Return the dtype and shape that a possible member works on: its result's, or its addends'; None for other ops."""
    op, inputs = graph.by_name[name], _operands(graph, name)
    if op.type not in COMPUTED and not is_sum:
        return None
    whole = inputs[0] if is_sum else result_name(name)
    result, key = shapes.spec(whole), shapes.key(whole)
    operands = [shapes.spec(operand) for operand in inputs]
    if (
        result.dtype not in (tf.float32, tf.float64)
        or key is None
        or 0 in tuple(result.shape)
        or len(inputs) > _MOST_ADDED
    ):
        return None
    if any(repeat_of(operand.shape, result.shape) is None for operand in operands):
        return None
    producers = {graph.producer_type(operand) for operand in inputs}
    return None if op.type in _JOINED and producers & MULTIPLYING else (result.dtype, key)


def _stages(
    graph: StepGraph, ops: Sequence[OpName], kinds: dict[OpName, Any], sums: Collection[OpName]
) -> dict[OpName, int]:
    """Number the ops by stages, in topological order.

    An op never waits for another op of its kind and stage through an op of another kind or stage, nor for a sum.
    """
    stages: dict[OpName, int] = {}
    for name in ops:
        parents = {*map(op_name, graph.inputs[name]), *graph.controls[name]} & stages.keys()
        after = (stages[p] + (kinds[p] is not None and (kinds[p] != kinds[name] or p in sums)) for p in parents)
        stages[name] = max(after, default=0)
    return stages


def _components(
    graph: StepGraph, shapes: Shapes, order: Sequence[OpName], place: dict[OpName, Any]
) -> Iterator[list[OpName]]:
    """Yield groups of ops of one place that share an array, as an input or a result, within an expression's limits.

    Connected ops stay together; otherwise two chains might wait for each other.
    """
    component: dict[OpName, list[OpName]] = {}
    using: dict[Any, OpName] = {}  # by place and tensor
    for name in order:
        component[name] = [name]
        others = [control for control in graph.controls[name] if place.get(control) == place[name]]
        for operand in _operands(graph, name):
            other = op_name(operand)
            if place.get(other) != place[name]:
                whole = shapes.key(operand) == place[name][1][1]
                other = using.setdefault((place[name], operand), name) if whole else name
            others.append(other)
        for other in others:
            if component[other] is not component[name]:
                larger, smaller = component[other], component[name]
                larger += smaller
                component.update(dict.fromkeys(smaller, larger))
    position = {name: i for i, name in enumerate(order)}
    for members in {id(found): found for found in component.values()}.values():
        part: list[OpName] = []
        registers: set[TensorName] = set()
        for name in sorted(members, key=position.__getitem__):
            operands = _operands(graph, name)
            used = {*operands, *(result_name(name, step) for step in range(max(1, len(operands) - 1)))}
            if len(registers | used) > MOST_REGISTERS:
                yield part
                part, registers = [], set()
            part.append(name)
            registers |= used
        yield part


def _chain_of(
    graph: StepGraph,
    shapes: Shapes,
    members: Sequence[OpName],
    results: Sequence[OpName],
    awaited: Sequence[OpName],
    sums: dict[OpName, Sum],
) -> Chain | None:
    """Write ops as an expression; None if there are too few of them, or no input has the results' shape."""
    whole = sums[members[0]].values if members[0] in sums else result_name(members[0])
    result, key = shapes.spec(whole), shapes.key(whole)
    few = len(members) < 2 and (members[0] not in sums or result.shape.rank < 2)
    if few or not results:
        return None
    writer = Writer()
    for name in members:
        values = [writer.value(operand) for operand in _operands(graph, name)]
        if name not in sums:
            writer.keep(result_name(name), writer.compute(graph.by_name[name].type, values))
    outputs, added = [n for n in results if n not in sums], [sums[n] for n in results if n in sums]
    inputs = sorted(writer.inputs, key=lambda name: shapes.key(name) != key)
    if shapes.key(inputs[0]) != key:
        return None
    repeats = [WHOLE if shapes.key(i) == key else repeat_of(shapes.spec(i).shape, result.shape) for i in inputs]
    added_up = [(s.values, s.period, s.is_mean) for s in added]
    code = writer.code(inputs, [result_name(name) for name in outputs], added_up)
    if code is None or None in repeats:
        return None
    names = (tuple(members), tuple(inputs), tuple(outputs), tuple(added), tuple(awaited))
    return Chain(*names, result.dtype, tuple(repeats), code)  # type: ignore[arg-type]


def chain_nodes(
    graph: StepGraph, chain: Chain, ops: Collection[OpName], alone: bool, name: OpName
) -> Iterator[tf.compat.v1.NodeDef]:
    """Yield the nodes that replace a chain; its outputs keep their names.

    Args:
        graph, chain, ops: the step, and a chain and the names of the ops of a segment.
        alone: whether it runs on one thread.
        name: of the op that does the arithmetic.
    """
    controls = {control for member in chain.members for control in graph.controls[member]}
    waits = [f"^{control}" for control in sorted(controls & set(ops) - set(chain.members))]
    fused = tf.compat.v1.NodeDef(name=name, op=FUSED, input=[*chain.inputs, *waits])
    counts = {"outputs": len(chain.outputs), "sums": len(chain.sums), "n_values": len(chain.inputs)}
    attributes = {"T": chain.dtype, "repeats": chain.repeats, "code": chain.code, "alone": int(alone), **counts}
    for attribute, value in {**attributes, "n_results": counts["outputs"] + counts["sums"]}.items():
        set_attribute(fused, attribute, value)
    yield fused
    for i, output in enumerate(chain.outputs):
        shape = graph.spec(result_name(output)).shape
        kind = "EnsureShape" if shape.rank else "Identity"
        node = tf.compat.v1.NodeDef(name=output, op=kind, input=[result_name(name, i)])
        set_attribute(node, "T", chain.dtype)
        if shape.rank:
            node.attr["shape"].shape.CopyFrom(shape.as_proto())
        else:  # TensorFlow runs no identity
            node.attr["_output_shapes"].list.shape.add().CopyFrom(shape.as_proto())
        yield node
    for i, one in enumerate(chain.sums, start=len(chain.outputs)):
        shape = tf.compat.v1.NodeDef(name=f"{name}/shape_{i}", op="Const")
        set_attribute(shape, "dtype", tf.int32)
        shape.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(one.shape, tf.int32, [len(one.shape)]))
        node = tf.compat.v1.NodeDef(name=one.name, op="Reshape", input=[result_name(name, i), shape.name])
        set_attribute(node, "T", chain.dtype)
        yield from (shape, node)
    for member in chain.awaited:
        yield tf.compat.v1.NodeDef(name=member, op="NoOp", input=[f"^{name}"])
