"""Find the exchange that a variable's new value depends on: its gradient's, or that of the value itself."""

import collections

from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.program.graph import StepGraph
from ncclsync.semantics.roles import Role


def find_updates(graph: StepGraph) -> dict[TensorName, TensorName]:
    """Follow what is written to each variable back to the nearest exchange of a tensor of its shape; return its result.

    An optimizer's slots rest on their weight's gradient too; the exchange is the weight's alone. Where a
    branch writes several variables, as an accumulating optimizer does, order pairs those of one shape.
    """
    writers: dict[TensorName, list[OpName]] = collections.defaultdict(list)
    for op in graph.ops:
        for handle in graph.writes[op.name]:
            writers[handle].append(op.name)
    # Weights first, as a gradient is theirs.
    found: dict[TensorName, TensorName] = {}
    taken: set[TensorName] = set()
    for handle, variable in sorted(graph.traced.variable_of.items(), key=lambda pair: not pair[1].trainable):
        if graph.traced.role[handle] in (Role.SAME, Role.SUM, Role.PARTIAL):
            for result in _nearest(graph, writers[handle]):
                exchange = graph.exchanges[result]
                fits = exchange.shape.is_compatible_with(variable.shape) or exchange.collective.divides
                if result not in taken and fits:
                    found[handle] = result
                    taken.add(result)
                    break
    return found


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
