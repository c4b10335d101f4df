"""Read only the rows that an op takes of a variable, as an embedding's lookup does, not the whole variable.

Keras reads the whole variable and then takes rows of what it read. From a variable's first sparse update on,
TensorFlow copies all of it for each such read, so that a step costs as much as the table is large. Rows that
are taken from a variable have the same effect on its later reads, so a variable that is not updated sparsely is left
alone. Source: tensorflow/core/kernels/training_op_helpers.h, EnsureSparseVariableAccess.
"""

import collections
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from ncclsync.compat.names import OpName, op_name
from ncclsync.program.graph import StepGraph


def read_rows_only(definition: tf.compat.v1.GraphDef, graph: StepGraph, needed: Collection[OpName]) -> None:
    """Replace, in a segment's nodes, reads of variables that only rows are taken of, except by the `needed` nodes."""
    sparse = {handle for op in graph.ops if op.type.startswith("ResourceScatter") for handle in graph.writes[op.name]}
    reads = [node for node in definition.node if node.op == "ReadVariableOp" and node.input[0] in sparse]
    nodes = {node.name: node for node in definition.node}
    consumers: dict[OpName, list[tf.compat.v1.NodeDef]] = collections.defaultdict(list)
    for node in definition.node:
        for name in {op_name(source) for source in node.input if not source.startswith("^")}:
            consumers[name].append(node)
    for read in reads:
        takers = [node for node in consumers[read.name] if _takes_rows(node, read.name, nodes)]
        others = [node for node in consumers[read.name] if node not in takers]
        shape = graph.traced.variable_of[read.input[0]].shape
        stays = read.name in needed or any(node.op != "Shape" for node in others)
        if not takers or stays or not shape.is_fully_defined() or _rests_on(takers, read.name, nodes):
            continue
        for node in takers:
            _take_from_variable(node, read)
        for node in others:
            _become_constant(node, shape)
        # Ops that wait for the read wait for the takers.
        read.op = "NoOp"
        read.attr.clear()
        read.ClearField("input")
        read.input.extend(f"^{node.name}" for node in takers)


def _takes_rows(node: tf.compat.v1.NodeDef, read: OpName, nodes: dict[OpName, tf.compat.v1.NodeDef]) -> bool:
    if node.op != "GatherV2" or node.attr["batch_dims"].i or op_name(node.input[0]) != read:
        return False
    axis = nodes.get(op_name(node.input[2]))
    if axis is None or axis.op != "Const":
        return False
    return not tf.make_ndarray(axis.attr["value"].tensor).any()


def _rests_on(
    takers: Sequence[tf.compat.v1.NodeDef], read: OpName, nodes: Mapping[OpName, tf.compat.v1.NodeDef]
) -> bool:
    """Return whether a taker's indices, or its control inputs, depend on the read. (Those of a later read do.)"""
    ahead, met = [*takers], {node.name for node in takers}
    for node in ahead:
        given = {op_name(source.removeprefix("^")): source for source in node.input}
        if read in given and (node not in takers or f"^{read}" in node.input):
            return True
        ahead += [nodes[name] for name in (given.keys() - met - {read}) & nodes.keys()]
        met |= given.keys()
    return False


def _take_from_variable(node: tf.compat.v1.NodeDef, read: tf.compat.v1.NodeDef) -> None:
    controls = [source for source in (*read.input, *node.input) if source.startswith("^")]
    inputs = [read.input[0], node.input[1], *dict.fromkeys(controls)]
    node.op = "ResourceGather"
    node.ClearField("input")
    node.input.extend(inputs)
    node.attr["dtype"].CopyFrom(node.attr["Tparams"])
    for name in ("Tparams", "Taxis"):
        node.attr.pop(name)


def _become_constant(node: tf.compat.v1.NodeDef, shape: tf.TensorShape) -> None:
    dtype = node.attr["out_type"].type or tf.int32.as_datatype_enum
    node.op = "Const"
    node.ClearField("input")
    node.attr.clear()
    node.attr["dtype"].type = dtype
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(shape.as_list(), tf.as_dtype(dtype)))
