"""Put into the functions of loops, branches and calls what brings a tensor to another placement without an exchange.

A tower's share of the batch tells its count of rows from that of all rows, and its part of a mean or of a whole tensor.
A function that needs that takes the share as its last argument; `semantics/placing.py` says where (`Change`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.ops.collectives import Share
from ncclsync.semantics.functions import LOOPS, Functions
from ncclsync.semantics.placements import MEAN, Counts
from ncclsync.semantics.placing import Body, Change

_SHARE, _LENGTH, _INT32 = "ncclsync_share", 5, tf.int32.as_datatype_enum


def vector_of(share: Share) -> tf.Tensor:
    """Return a share as functions take it: int32 [5]."""
    samples = tf.where(share.fraction > 0, share.rows, 0)
    return tf.stack([samples, share.tower, share.rows, share.begin, share.total])


def _brought(vector: tf.Tensor, tensor: tf.Tensor, change: Change) -> tf.Tensor:
    """Return a tensor in the placement of a change, of the share of this vector."""
    samples, *rest = tf.unstack(vector, _LENGTH)
    share = Share(tf.cast(samples, tf.float64) / tf.cast(rest[-1], tf.float64), *rest)
    if not isinstance(change.before, Counts):
        return share.of_mean(tensor) if change.before == MEAN else share.of_whole(tensor)
    # Of a tower's rows: a multiple of them.
    of_all = tensor // tf.cast(share.rows, tensor.dtype) * tf.cast(share.total, tensor.dtype)
    counts = np.array([one != 0 for one in change.before.counts])
    return tf.where(np.reshape(counts, tensor.shape) if tensor.shape.is_fully_defined() else counts, of_all, tensor)


def takes_share(bodies: Sequence[Body]) -> bool:
    """Return whether any of these functions, or what they run, takes the share."""
    return any(body.changes or takes_share(body.bodies) for body in bodies)


class Changer:
    """Make the functions of a step that take the share."""

    def __init__(self, functions: Functions) -> None:
        """Add functions to these."""
        self._functions = functions

    def changed(self, node: Any, bodies: Sequence[Body]) -> Any:
        """Return the NodeDef of a loop, a branch or a call with functions that take the share as their last argument.

        Args:
            node: the NodeDef.
            bodies: its functions.
        """
        made = type(node).FromString(node.SerializeToString())
        body_of = {body.name: body for body in bodies}
        is_loop = node.op in LOOPS
        for key, attribute in made.attr.items():
            for called in (attribute.func, *attribute.list.func):
                if called.name in self._functions.definitions:
                    called.name = self._with_share(called.name, body_of.get(called.name), is_loop and key == "body")
        if node.op in self._functions.definitions:
            made.op = self._with_share(node.op, body_of.get(node.op), False)
        elif is_loop:
            made.attr["T"].list.type.append(_INT32)
            if made.attr["output_shapes"].list.shape:
                made.attr["output_shapes"].list.shape.add().dim.add(size=_LENGTH)
        else:
            made.attr["Tin"].list.type.append(_INT32)
        return made

    def _with_share(self, name: str, body: Body | None, gives: bool) -> str:
        """Make a function that takes the share, and `gives` it on as its last result; return its name."""
        definition = self._functions.definitions[name]
        function = type(definition).FromString(definition.SerializeToString())
        function.signature.name = f"{name}_{_SHARE}_{len(self._functions.definitions)}"
        function.signature.input_arg.add(name=_SHARE, type=_INT32)
        if body is not None:
            self._change(function, body)
        if gives:
            node = function.node_def.add(name=f"{_SHARE}_given", op="Identity", input=[_SHARE])
            node.attr["T"].type = _INT32
            function.signature.output_arg.add(name=f"{_SHARE}_out", type=_INT32)
            function.ret[f"{_SHARE}_out"] = f"{node.name}:output:0"
        return self._add(function)

    def _change(self, function: Any, body: Body) -> None:
        """Let the ops of a function that takes the share have their inputs, and what they run, changed, in place."""
        nodes = {node.name: node for node in function.node_def}
        for change in body.changes:
            if change.op is None:
                tensor, result = body.graph.outputs[change.index], function.signature.output_arg[change.index].name
                function.ret[result] = self._call(function, function.ret[result], tensor, change)
            else:
                node, tensor = nodes[change.op], body.graph.get_operation_by_name(change.op).inputs[change.index]
                node.input[change.index] = self._call(function, node.input[change.index], tensor, change)
        for op in dict.fromkeys(ran.op.name for ran in body.bodies):
            bodies = [ran for ran in body.bodies if ran.op.name == op]
            if takes_share(bodies):
                changed = self.changed(nodes[op], bodies)
                data = [one for one in changed.input if not one.startswith("^")]
                changed.input[:] = [*data, _SHARE, *changed.input[len(data) :]]
                nodes[op].CopyFrom(changed)

    def _call(self, function: Any, given: str, tensor: tf.Tensor, change: Change) -> str:
        """Add a call to a function that brings what stands for a tensor to another placement; return its result."""
        specs = [tf.TensorSpec([_LENGTH], tf.int32), tf.TensorSpec(tensor.shape, tensor.dtype)]
        traced = tf.function(lambda vector, given: _brought(vector, given, change), autograph=False)
        definition = traced.get_concrete_function(*specs).function_def
        called = type(definition).FromString(definition.SerializeToString())
        called.signature.name = f"{function.signature.name}_{len(self._functions.definitions)}"
        call = function.node_def.add(name=f"{_SHARE}_{len(function.node_def)}", op="PartitionedCall")
        call.input.extend([_SHARE, given])
        call.attr["Tin"].list.type.extend([_INT32, tensor.dtype.as_datatype_enum])
        call.attr["Tout"].list.type.append(tensor.dtype.as_datatype_enum)
        call.attr["f"].func.name = self._add(called)
        return f"{call.name}:output:0"

    def _add(self, function: Any) -> str:
        name = str(function.signature.name)
        self._functions.definitions[name] = function
        self._functions.made.append(name)
        return name
