"""Find the arithmetic by which a segment updates its variables, to be run as one op in one pass over memory.

An optimizer's update is a dozen element-wise ops for each variable, and each op reads and writes arrays that do not fit
a cache. One op in C runs them block by block, for many variables in one call, with the same results bit for bit. This
module finds such updates; each group is a `Rewrite` of a segment.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.host_passes.arithmetic import ARITHMETIC, WHOLE, Expression, Writer
from ncclsync.ops.host_ops import set_attribute
from ncclsync.program.graph import StepGraph, in_order, op_name

# The most elements of all variables of a call, and of one variable. A call holds the new values beside the old ones
# until it ends. TensorFlow updates larger variables in place, op by op, which is faster where several towers do it at
# once: a step of bench's mlp (weights of 65,536 elements and more) takes 0.85 of the time.
_MOST_TOGETHER = 1 << 20
_MOST_ALONE = 1 << 15

_WRITES = {"AssignVariableOp": None, "AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}


@dataclasses.dataclass(frozen=True)
class Update:
    """Describe how some variables of one shape, which depend on each other, are updated.

    Attributes:
        members: names of the ops that it replaces.
        inputs: names of the tensors that it takes; a handle's name stands for the variable's old value. The first input
            has the variables' shape, the others that shape or a scalar's.
        writes: names of the last op that writes each variable.
        elements: of one variable.
        dtype: of all tensors.
        expression: the computation.
    """

    members: tuple[str, ...]
    inputs: tuple[str, ...]
    writes: tuple[str, ...]
    elements: int
    dtype: tf.DType
    expression: Expression


def find_fusions(graph: StepGraph, ops: Sequence[str], needed: Collection[str]) -> list[list[Update]]:
    """Find updates among the ops of one segment; return lists of updates that can run as one op.

    Args:
        graph: the step.
        ops: names of the segment's ops, inputs before consumers.
        needed: names of ops that are used outside the segment, as results or as dependencies.
    """
    consumers = _consumers(graph, ops)
    components = _components(graph, _members(graph, ops, needed, consumers))
    position = {name: i for i, name in enumerate(ops)}
    updates = []
    for members in components:
        update = _update_of(graph, sorted(members, key=position.__getitem__), consumers)
        if update is not None:
            updates.append(update)
    return _grouped(graph, ops, updates)


def _consumers(graph: StepGraph, ops: Sequence[str]) -> dict[str, set[str]]:
    consumers: dict[str, set[str]] = {name: set() for name in ops}
    for name in ops:
        for parent in (*map(op_name, graph.inputs[name]), *graph.controls[name]):
            if parent in consumers:
                consumers[parent].add(name)
    return consumers


def _members(graph: StepGraph, ops: Sequence[str], needed: Collection[str], consumers: dict[str, set[str]]) -> set[str]:
    """Return the writes of arrays of floats, and the ops that compute for them alone."""
    writers: dict[str, set[str]] = collections.defaultdict(set)  # by handle
    for name in ops:
        for handle in graph.writes[name]:
            writers[handle].add(name)
    apart = {handle for handle, names in writers.items() if not all(_fits(graph, n, needed) for n in names)}
    members: set[str] = set()
    for name in reversed(ops):
        op = graph.by_name[name]
        if op.type in _WRITES:
            fits = graph.inputs[name][0] in writers and graph.inputs[name][0] not in apart
        elif op.type == "ReadVariableOp":
            fits = graph.inputs[name][0] in writers and graph.inputs[name][0] not in apart
            fits = fits and name not in needed and consumers[name] <= members
        else:
            fits = op.type in ARITHMETIC and name not in needed and bool(consumers[name])
            fits = fits and consumers[name] <= members and _is_elementwise(graph, name)
        if fits:
            members.add(name)
    return members


def _fits(graph: StepGraph, name: str, needed: Collection[str]) -> bool:
    """Return whether a write is of a whole array of floats."""
    if graph.by_name[name].type not in _WRITES or name in needed:
        return False
    handle, value = graph.inputs[name]
    variable, spec = graph.variable_of[handle], graph.spec(value)
    return (
        variable.dtype in (tf.float32, tf.float64)
        and bool(variable.shape.rank)
        and variable.shape.is_fully_defined()
        and variable.shape.num_elements() <= _MOST_ALONE
        and spec.shape == variable.shape
        and spec.dtype == variable.dtype
    )


def _is_elementwise(graph: StepGraph, name: str) -> bool:
    """Return whether the operands are arrays of the result's shape, or scalars."""
    result = graph.spec(f"{name}:0")
    operands = [graph.spec(operand) for operand in graph.inputs[name]]
    return (
        bool(result.shape.rank)
        and result.shape.is_fully_defined()
        and all(o.dtype == result.dtype and o.shape in (result.shape, tf.TensorShape([])) for o in operands)
    )


def _components(graph: StepGraph, members: set[str]) -> list[set[str]]:
    """Split members into sets that share no tensor and no variable."""
    touching: dict[str, set[str]] = collections.defaultdict(set)  # by name of an op, or of a handle
    for name in members:
        for operand in graph.inputs[name]:
            if op_name(operand) in members or operand in graph.variable_of:
                touching[operand].add(name)
                if op_name(operand) in members:
                    touching[operand].add(op_name(operand))
    components: dict[str, set[str]] = {name: {name} for name in members}
    for names in touching.values():
        joined = set().union(*(components[name] for name in names))
        components.update(dict.fromkeys(joined, joined))
    return list({id(component): component for component in components.values()}.values())


def _update_of(graph: StepGraph, members: Sequence[str], consumers: dict[str, set[str]]) -> Update | None:
    """Write the ops of one component as an update; None if they cannot be one."""
    inside = set(members)
    writer = Writer()
    last_write: dict[str, str] = {}
    for name in members:
        op = graph.by_name[name]
        if op.type == "ReadVariableOp":
            writer.keep(f"{name}:0", writer.value(graph.inputs[name][0]))
        elif op.type in _WRITES:
            handle, source = graph.inputs[name]
            if handle in last_write and not consumers[last_write[handle]] <= inside:
                return None  # an op waits for a write that will not happen
            operation = _WRITES[op.type]
            value = writer.value(source)
            if operation is not None:
                value = writer.compute(operation, (writer.value(handle), value))
            writer.keep(handle, value)
            last_write[handle] = name
        else:
            values = [writer.value(tensor) for tensor in graph.inputs[name]]
            writer.keep(f"{name}:0", writer.compute(op.type, values))
    shapes = {graph.variable_of[handle].shape for handle in last_write}
    if len(shapes) != 1:
        return None
    shape = shapes.pop()
    arrays = [name for name in writer.inputs if _shape(graph, name) == shape]
    scalars = [name for name in writer.inputs if _shape(graph, name) != shape]
    inputs = [*arrays, *scalars]
    repeats = [WHOLE] * len(arrays) + [1] * len(scalars)
    expression = writer.expression(inputs, repeats, list(last_write)) if arrays else None
    if expression is None:
        return None
    dtype = graph.variable_of[next(iter(last_write))].dtype
    names = (tuple(members), tuple(inputs), tuple(last_write.values()))
    return Update(*names, shape.num_elements(), dtype, expression)


def _shape(graph: StepGraph, name: str) -> tf.TensorShape:
    variable = graph.variable_of.get(name)
    return graph.spec(name).shape if variable is None else variable.shape


def _grouped(graph: StepGraph, ops: Sequence[str], updates: list[Update]) -> list[list[Update]]:
    """Group updates with equal expressions, unless an update waits for another of its group."""
    unit = {name: name for name in ops}
    for i, update in enumerate(updates):
        unit.update(dict.fromkeys(update.members, f"@update_{i}"))
    stages = _stages(graph, ops, unit)
    groups: list[list[Update]] = []
    open_group: dict[Any, tuple[list[Update], int]] = {}
    for i, update in enumerate(updates):
        stage = stages.get(f"@update_{i}")
        if stage is None:
            continue
        key = stage, update.dtype, update.expression
        group, elements = open_group.get(key, ([], 0))
        if not group or elements + update.elements > _MOST_TOGETHER:
            group, elements = [], 0
            groups.append(group)
        group.append(update)
        open_group[key] = group, elements + update.elements
    return groups


def _stages(graph: StepGraph, ops: Sequence[str], unit: dict[str, str]) -> dict[str, int]:
    """Number the units, which are ops and updates, by stages: the largest number of updates on a path to each.

    Two updates of one stage do not wait for each other. Units on a dependency cycle, and their dependents, are omitted.
    """
    stages: dict[str, int] = {}
    for one, parents in in_order(graph, ops, unit):
        stages[one] = max((stages[p] + p.startswith("@") for p in parents), default=0)
    return stages


def fused_nodes(
    graph: StepGraph, group: Sequence[Update], ops: Collection[str], name: str, named: Callable[[str], str]
) -> Iterator[tf.compat.v1.NodeDef]:
    """Yield the nodes that replace a group of updates.

    Args:
        graph: the step.
        group: updates of one dtype, by one expression.
        ops: names of the segment's ops.
        name: of the op that does the arithmetic, and the prefix of further new ops.
        named: returns the segment's name of a tensor or handle, given the step's.
    """
    dtype = group[0].dtype
    replaced = {member for update in group for member in update.members}
    controls = sorted({c for member in replaced for c in graph.controls[member]} & set(ops) - replaced)
    waits = [f"^{control}" for control in controls]
    values: list[str] = []
    for update in group:
        for source in update.inputs:
            if source in graph.variable_of:
                read = tf.compat.v1.NodeDef(name=f"{name}/read_{len(values)}", op="ReadVariableOp")
                read.input.extend([named(source), *waits])
                set_attribute(read, "dtype", dtype)
                yield read
                source = f"{read.name}:0"
            values.append(named(source))
    yield group[0].expression.node(name, dtype, values, waits)
    for i, write in enumerate(write for update in group for write in update.writes):
        node = tf.compat.v1.NodeDef(name=write, op="AssignVariableOp")
        node.input.extend([named(graph.inputs[write][0]), f"{name}:{i}"])
        set_attribute(node, "dtype", dtype)
        yield node
