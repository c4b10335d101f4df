"""Find what a variable's new value depends on: an exchange, its gradient's or its own; or not even the batch."""

import collections
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.compat.source_lines import user_line
from ncclsync.ops import CollectiveKind
from ncclsync.program.graph import StepGraph
from ncclsync.program.program import Exchange, Program
from ncclsync.semantics.axes import MEASURES
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placing import REPEATABLE
from ncclsync.semantics.rules import DRAWS
from ncclsync.sharding.roles import Role


def find_updates(graph: StepGraph) -> dict[TensorName, TensorName]:
    """Follow what is written to each variable back to the nearest exchange of a tensor of its shape; return its result.

    An optimizer's slots rest on their weight's gradient too, and so does an average of the weight; the exchange is the
    weight's alone. Where a branch writes several variables, as an accumulating optimizer does, order pairs those of one
    shape.
    """
    writers: dict[TensorName, list[OpName]] = collections.defaultdict(list)
    for op in graph.ops:
        for handle in graph.writes[op.name]:
            writers[handle].append(op.name)
    # Weights first, as a gradient is theirs.
    found: dict[TensorName, TensorName] = {}
    taken: dict[TensorName, list[OpName]] = {}
    for handle, variable in sorted(graph.traced.variable_of.items(), key=lambda pair: not pair[1].trainable):
        if graph.traced.role[handle] in (Role.SAME, Role.SUM, Role.PARTIAL):
            fitting = (one for one in _nearest(graph, writers[handle]) if _fits(graph.exchanges[one], variable))
            nearest = next((one for one in fitting if taken.get(one) != writers[handle]), None)
            if nearest is not None and nearest not in taken:
                found[handle], taken[nearest] = nearest, writers[handle]
    return found


def _fits(exchange: Exchange, variable: tf.Variable) -> bool:
    """Return whether an exchange may be of a variable's gradient: of its shape, or rows of it, as slices are."""
    if exchange.collective.divides:
        return True
    if exchange.dtype.is_floating != variable.dtype.is_floating or variable.shape.rank is None:
        return False
    if exchange.collective.kind == CollectiveKind.ALL_GATHER:
        return variable.shape.rank > 1 and exchange.shape[1:].as_list() == variable.shape[1:].as_list()
    return exchange.shape.is_compatible_with(variable.shape)


def _nearest(graph: StepGraph, writers: list[OpName]) -> list[TensorName]:
    """Return results of exchanges that ops rest on, nearest first; no further than local ops."""
    results: list[TensorName] = []
    queue = collections.deque(writers)
    seen = set(queue)
    while queue:
        child = queue.popleft()
        parents = [op_name(name) for name in graph.inputs[child] if name not in graph.exchanges]
        results += [name for name in graph.inputs[child] if name in graph.exchanges]
        if graph.by_name[child].type == "ReadVariableOp":
            # A slot is read again after its update, and the weight's update computed from that.
            handle = graph.inputs[child][0]
            parents += [name for name in graph.controls[child] if handle in graph.writes.get(name, ())]
        for parent in parents:
            followed = parent not in graph.local or parent in graph.folds
            if parent in graph.inputs and parent not in seen and followed:
                seen.add(parent)
                queue.append(parent)
    return list(dict.fromkeys(results))


def done_without_batch(program: Program, known_rows: bool) -> tuple[list[tf.Variable], list[str]]:
    """Return what one device's step does that waits for nothing of the batch, also if its iterator has none.

    If one device knows how many rows each batch has, it need not wait for their number.

    Returns:
        The variables that ops write; and the lines of ops with another state, as tables', queues', and Python's.
    """
    if program.graph is None:
        return [], []
    ops = program.graph.get_operations()
    waiters: dict[OpName, list[tf.Operation]] = collections.defaultdict(list)
    for op in ops if not known_rows else (one for one in ops if one.type not in MEASURES):
        for parent in {*(tensor.op.name for tensor in op.inputs), *(one.name for one in op.control_inputs)}:
            waiters[parent].append(op)
    given = [program.graph.get_tensor_by_name(name) for name in program.arguments]
    # A number for each tower is of its rows.
    waiting = _followers([one.op.name for one in given if one.shape.rank != 0 or not known_rows], waiters)
    left = [op for op in ops if op.name not in waiting]
    written = {handle for op in left for handle in tf_compat.written_handles(op)}
    functions = Functions(program.graph.as_graph_def().library.function, program.graph)
    others = [op for op in left if functions.hides_state(op, REPEATABLE | DRAWS)]
    lines = dict.fromkeys(f"the state of {op.type}, at {user_line(op.traceback)}" for op in others)
    return [variable for handle, variable in program.variables if handle in written], [*lines]


def _followers(names: Iterable[OpName], following: Mapping[OpName, Sequence[tf.Operation]]) -> set[OpName]:
    """Return the names of ops, and of all that follow them."""
    found, queue = set(), list(names)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += [op.name for op in following.get(name, ())]
    return found
