"""Find chains of element-wise ops in a segment, to be run as one op in one pass over memory.

A normalisation, forward and backward, or an optimizer's update, is a dozen element-wise ops on arrays, and each op
waits for memory. An op whose result only ops of one chain take joins that chain: a chain has one result, and no
two wait for each other. Results are the same bit for bit. Each chain is a `Rewrite` of a segment.

The numbers of rows are known when a step runs only: the op broadcasts, or fails, as TensorFlow's ops do.
"""

import collections
from collections.abc import Collection, Sequence

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name, result_name
from ncclsync.ops.host_ops import set_attribute
from ncclsync.program.graph import StepGraph
from ncclsync.program.segment import Rewrite

# The op that runs a chain, and its operations by TensorFlow's names.
FUSED = "NcclsyncArithmetic"
# Without "Maximum" and "Minimum": TensorFlow's choice between 0.0 and -0.0 depends on their place in the array.
ARITHMETIC = {
    "Add": native.ARITHMETIC["ADD"],
    "AddV2": native.ARITHMETIC["ADD"],
    "Sub": native.ARITHMETIC["SUBTRACT"],
    "Mul": native.ARITHMETIC["MULTIPLY"],
    "RealDiv": native.ARITHMETIC["DIVIDE"],
    "SquaredDifference": native.ARITHMETIC["SQUARED_DIFFERENCE"],
    "AddN": native.ARITHMETIC["ADD_ALIKE"],
    "ReluGrad": native.ARITHMETIC["RELU_GRADIENT"],
    "BroadcastTo": native.ARITHMETIC["LIKE"],
    "Square": native.ARITHMETIC["SQUARE"],
    "Sqrt": native.ARITHMETIC["SQRT"],
    "Neg": native.ARITHMETIC["NEGATE"],
    "Relu": native.ARITHMETIC["RELU"],
}

_ALIKE = {"AddN", "ReluGrad"}  # their operands have one shape

# TensorFlow adds this many tensors, or fewer, from left to right.
_MOST_ADDED = 8

# TensorFlow fuses the former with a preceding op that multiplies matrices.
_JOINED = {"Add", "AddV2", "Relu"}
_MULTIPLYING = {"BatchMatMulV2", "BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul"}

_SLOW = {"SquaredDifference"}  # worth a chain of one op


def untie(graph: StepGraph, ops: Sequence[OpName]) -> StepGraph:
    """Return the step without dependencies that would separate ops that can be a chain.

    A gradient's constants no longer wait for the value that it is the gradient of. An op that asks for a tensor's shape
    alone takes that of an operand, if the trace knows that it is the same.
    """
    inside = set(ops)
    inputs: dict[OpName, list[TensorName]] = {}
    controls: dict[OpName, list[OpName]] = {}
    for name in ops:
        if graph.by_name[name].type == "Const":
            run = [graph.by_name[one] for one in graph.controls[name] if one in graph.by_name]
            controls[name] = [op.name for op in run if tf_compat.is_stateful(op)]
        elif graph.by_name[name].type == "Shape":
            tensor = graph.inputs[name][0]
            while op_name(tensor) in inside and (alike := _one_of_its_shape(graph, op_name(tensor))) is not None:
                tensor = alike
            inputs[name] = [tensor]
    return graph.rewired(inputs, controls)


def find_chains(graph: StepGraph, ops: Sequence[OpName], needed: Collection[OpName], alone: bool) -> list[Rewrite]:
    """Find the chains of a segment.

    Args:
        graph, ops, needed: the step, and the names of the segment's ops, inputs before consumers, and of those whose
            results are needed outside the segment.
        alone: whether a chain runs on one thread.
    """
    consumers: dict[OpName, set[OpName]] = collections.defaultdict(set)
    for name in ops:
        for before in (*map(op_name, graph.inputs[name]), *graph.controls[name]):
            consumers[before].add(name)
    inside = set(ops)
    last: dict[OpName, OpName] = {}  # by member: the last of its chain
    found: dict[OpName, list[OpName]] = {}
    registers: collections.Counter[OpName] = collections.Counter()
    for name in reversed(ops):
        if (operands := _operands(graph, name, inside)) is None:
            continue
        own = 2 * len(operands)  # at most
        ends = {last.get(consumer) for consumer in consumers[name]}
        end = ends.pop() if len(ends) == 1 and name not in needed else None
        if end is None or _lengths(graph, end) != _lengths(graph, name) or registers[end] + own > native.MOST_REGISTERS:
            end = name
        if end != name or graph.by_name[name].type != "BroadcastTo":
            last[name] = end
            found.setdefault(end, []).insert(0, name)
            registers[end] += own
    worth = [each for each in found.values() if len(each) > 1 or graph.by_name[each[0]].type in _SLOW]
    return [_chain_of(graph, members, inside, alone) for members in worth]


def _lengths(graph: StepGraph, name: OpName) -> list[int | None]:
    return graph.spec(result_name(name)).shape.as_list()


def _one_of_its_shape(graph: StepGraph, name: OpName) -> TensorName | None:
    """Return an operand that has the shape of an op's result, whatever the number of rows; None if none is known to."""
    op = graph.by_name[name]
    operands = _operands(graph, name)
    if operands is None:
        return None
    whole = [operand for operand in operands if graph.spec(operand).shape.as_list() == _lengths(graph, name)]
    return whole[0] if len(whole) == 1 or op.type in _ALIKE else None


def _operands(graph: StepGraph, name: OpName, inside: Collection[OpName] = ()) -> list[TensorName] | None:
    """Return the operands of an op that can be a member: arrays of its shape, or what repeats in each row of it.

    None for others. An array has any number of rows, or a shape that is known.

    The shape that `BroadcastTo` takes is that of an array: it is a member if an op `inside` tells that shape.
    """
    op, operands = graph.by_name[name], list(graph.inputs[name])
    if op.type not in ARITHMETIC or len(operands) > _MOST_ADDED or (op.type == "AddN" and len(operands) < 2):
        return None
    if op.type == "BroadcastTo":
        asked = graph.producer(operands.pop())
        if asked is None or asked.type != "Shape" or asked.name not in inside:
            return None
        operands += graph.inputs[asked.name]
    specs = [graph.spec(each) for each in (result_name(name), *operands)]
    result, *shapes = (spec.shape for spec in specs)
    if any(spec.dtype != tf.float32 for spec in specs) or result.rank is None:
        return None
    if (
        not result[1:].is_fully_defined()
        or 0 in result[1:].as_list()
        or (result.rank < 2 and not result.is_fully_defined())
    ):
        return None
    makers = (graph.producer(operand) for operand in operands if op.type in _JOINED)
    if any(one is not None and one.type in _MULTIPLYING for one in makers):
        return None
    whole = [shape.as_list() == result.as_list() for shape in shapes]
    needed = {"AddN": all, "ReluGrad": all, "BroadcastTo": lambda each: each[-1]}.get(op.type, any)
    fits = all(one or _repeats(shape, result) for one, shape in zip(whole, shapes, strict=True))
    return operands if fits and needed(whole) else None


def _repeats(shape: tf.TensorShape, rows: tf.TensorShape) -> bool:
    """Return whether an array of such rows takes all elements of a smaller one, one after the other, in each row."""
    if not shape.is_fully_defined():
        return False
    lengths = shape.as_list()
    while lengths and lengths[0] == 1:
        lengths.pop(0)
    return len(lengths) < rows.rank and lengths == rows.as_list()[rows.rank - len(lengths) :]


def _chain_of(graph: StepGraph, members: Sequence[OpName], inside: Collection[OpName], alone: bool) -> Rewrite:
    """Return the node that runs a chain; its result has the last member's name and shape."""
    made = {result_name(name) for name in members}
    operands = {name: _operands(graph, name, inside) or [] for name in members}
    lengths = _lengths(graph, members[-1])
    taken = dict.fromkeys(each for name in members for each in operands[name] if each not in made)
    # First those with rows, as many as the result's or a single one; each of the others repeats in each row.
    whole = [name for name in taken if graph.spec(name).shape.as_list() == lengths]
    inputs = [*whole, *(name for name in taken if name not in whole)]
    registers = {name: i for i, name in enumerate(inputs)}
    code: list[int] = []  # see `ncs_expression` in C
    for name in members:
        first, *others = (registers[operand] for operand in operands[name])
        for other in others or [first]:
            code += [ARITHMETIC[graph.by_name[name].type], first, other]
            first = len(inputs) + len(code) // 3 - 1
        registers[result_name(name)] = first
    controls = {control for member in members for control in graph.controls[member]}
    waits = [f"^{control}" for control in sorted(controls & set(inside) - set(members))]
    node = tf.compat.v1.NodeDef(name=members[-1], op=FUSED, input=[*inputs, *waits])
    attributes = {"code": code, "alone": int(alone), "n_values": len(inputs), "n_whole": len(whole)}
    for attribute, value in attributes.items():
        set_attribute(node, attribute, value)
    # By which TensorFlow knows the shape of an op that infers none.
    node.attr["_output_shapes"].list.shape.append(graph.spec(result_name(members[-1])).shape.as_proto())
    return Rewrite(tuple(members), tuple(inputs), node)
