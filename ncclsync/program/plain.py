"""Write a traced step more plainly, with the same numbers, so that rules say more of it.

What a step calls is put in place of the calls, as TensorFlow does when it runs: so towers can meet within a call. Calls
are functions of your own by `tf.function`, those of forward gradients, and gradients of loops' gradients. Left are
functions that XLA compiles by themselves, and calls within loops and branches.

A gradient that is summed over the axes along which an operand was broadcast keeps these axes, of length 1, until it is
reshaped: so it has rows where they were. Without them even its rank depends on whether a tower has a single row.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import op_name
from ncclsync.semantics.functions import CALLS, Functions, change_functions, in_order, is_compiled

# Where a gradient goes that has been summed: each takes it in any shape with these elements.
_OF_ANY_RANK = frozenset({"Reshape", "Shape", "TensorListPushBack"})


def inline_calls(graph: Any) -> None:
    """Replace the calls that a function's results and side effects rest on, in place."""
    functions = Functions(graph.as_graph_def().library.function, graph)

    def is_plain(op: tf.Operation) -> bool:
        return op.type in CALLS and not any(is_compiled(functions.definitions[n]) for n in functions.called_by(op))

    while calls := [op for op in _needed(graph) if is_plain(op)]:
        waiting = collections.defaultdict(list)
        for op in graph.get_operations():
            for control in op.control_inputs:
                waiting[control.name].append(op)
        for call in calls:
            (name,) = functions.called_by(call)
            _inline(call, functions.graph(name, call.inputs), waiting[call.name])


def _needed(graph: Any) -> list[tf.Operation]:
    return in_order([*graph.control_outputs, *(tensor.op for tensor in graph.outputs)])


def _inline(call: tf.Operation, body: Any, waiting: Iterable[tf.Operation]) -> None:
    """Let a copy of a function's ops stand for its call, for which some ops wait."""
    graph, given = call.graph, {op_name(tensor.name): tensor for tensor in body.inputs}
    definition = body.as_graph_def()
    nodes = [node for node in definition.node if node.name not in given]
    del definition.node[:]
    for node in nodes:
        node.device = ""
        node.attr.pop("_class", None)
        kept = [source for source in node.input if source.removeprefix("^") not in given or source[0] != "^"]
        node.input[:] = kept
    definition.node.extend(nodes)
    known = {one.name: tensor for one, tensor in zip(body.inputs, call.inputs, strict=True)}
    taken = {op_name(source) for node in nodes for source in node.input}
    mapped = {name: tensor for name, tensor in known.items() if op_name(name) in taken}
    with graph.as_default(), tf.device(None):
        names = [node.name for node in nodes]
        made = tf.graph_util.import_graph_def(definition, mapped, names, name=f"{call.name}/called")
    copies = {node.name: op for node, op in zip(nodes, made, strict=True)}
    for op in made:
        tf_compat.set_traceback(op, call)
        if call.control_inputs and (tf_compat.is_stateful(op) or not (op.inputs or op.control_inputs)):
            tf_compat.set_control_inputs(op, {*op.control_inputs, *call.control_inputs})
    results = []
    for one, output in zip(body.outputs, call.outputs, strict=True):
        result = known[one.name] if one.name in known else copies[one.op.name].outputs[one.value_index]
        if output.dtype not in (tf.resource, tf.variant):
            result.set_shape(output.shape)
        results.append(result)
        for consumer in output.consumers():
            for i, tensor in enumerate(consumer.inputs):
                if tensor is output:
                    tf_compat.set_input(consumer, i, result)
    effects = [copies[op.name] for op in body.control_outputs if op.name in copies]
    for op in waiting:
        after = {*op.control_inputs, *effects, *(one.op for one in results)} - {call}
        tf_compat.set_control_inputs(op, after)
    if call in graph.control_outputs:
        graph.control_outputs = [one for one in graph.control_outputs if one is not call] + effects


def keep_axes(graph: Any) -> None:
    """Let sums of gradients over broadcast axes keep these, in a function and in what it runs, in place."""
    definition = graph.as_graph_def()
    before = {node.name: node.SerializeToString() for node in definition.node}
    added = change_functions(
        definition,
        "_kept",
        lambda function: bool(_summing(function.node_def, function.ret.values())),
        lambda function: _keep(_summing(function.node_def, function.ret.values())),
    )
    with graph.as_default():
        library = tf.compat.v1.GraphDef(versions=definition.versions)
        library.library.function.extend(added)
        tf.graph_util.import_graph_def(library, name="")
    tf_compat.add_functions(added, graph)  # a loop within a function is run by names that TensorFlow knows
    needed = {op.name for op in _needed(graph)}
    nodes = [node for node in definition.node if node.name in needed]
    _keep(_summing(nodes, [tensor.name for tensor in graph.outputs]))
    for node in nodes:
        if node.SerializeToString() != before[node.name]:
            tf_compat.set_attributes(graph.get_operation_by_name(node.name), node.attr)


def _summing(nodes: Sequence[Any], returned: Iterable[str]) -> list[Any]:
    """Return the sums, of the nodes of a graph or of a function, whose axes may be kept."""
    types = {node.name: node.op for node in nodes}
    takers = collections.defaultdict(set)
    for node in nodes:
        for i, source in enumerate(node.input):
            if not source.startswith("^"):
                takers[source.partition(":")[0]].add((node.op, i))
    for source in returned:
        takers[source.partition(":")[0]].add(("", 0))
    return [
        node
        for node in nodes
        if node.op == "Sum"
        and types.get(node.input[1].partition(":")[0]) == "BroadcastGradientArgs"
        and not node.attr["keep_dims"].b
        and all(kind in _OF_ANY_RANK and (kind, i) != ("Reshape", 1) for kind, i in takers[node.name])
    ]


def _keep(sums: Iterable[Any]) -> None:
    for node in sums:
        node.attr["keep_dims"].b = True
        node.attr.pop("_output_shapes", None)
