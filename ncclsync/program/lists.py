"""Let lists of tensors go from one segment that XLA compiles to another: as tensors, for XLA gives and takes no list.

Such lists are TensorArrays, and what a loop keeps of each iteration for its gradient. XLA knows their elements' shape,
and as many of them as there may be. Here alone is known what crosses the border in a list's place.
"""

from collections.abc import Iterator, Sequence

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.program.graph import StepGraph, op_name
from ncclsync.program.program import Segment

_ANY_SHAPE = -1


def list_element(graph: StepGraph, name: str) -> tf.TensorSpec | None:
    """Return what the elements of a list are, of variants where it holds lists; None if `name` is no list."""
    if name in graph.exchanges or name in graph.variable_of:
        return None
    return tf_compat.list_element(graph.tf_graph.get_tensor_by_name(name))


def stacked_spec(element: tf.TensorSpec) -> tf.TensorSpec:
    """Describe the tensor that `stack` makes of a list."""
    return tf.TensorSpec(tf.TensorShape([None]).concatenate(element.shape), element.dtype)


def stack(handle: tf.Tensor, element: tf.TensorSpec) -> tf.Tensor:
    """Return a list as a tensor, in a graph that XLA compiles: [places, *element], the last element in the last place.

    XLA's lists have a fixed number of places, and no op says how many are taken, which a loop may find out only as it
    runs. So the last element is overwritten by two things that differ, and is where the results do.
    """
    lists, numbers = tf.raw_ops, {"element_dtype": element.dtype, "element_shape": tf.constant(_ANY_SHAPE)}
    tensor = lists.TensorListStack(input_handle=handle, **numbers)
    before, last = lists.TensorListPopBack(input_handle=handle, **numbers)
    places = tf.shape(tensor)[0]
    firsts = []
    for mark in (tf.zeros_like(last), tf.ones_like(last)):
        marked = lists.TensorListPushBack(input_handle=before, tensor=mark)
        marked = lists.TensorListStack(input_handle=marked, **numbers)
        firsts.append(tf.reshape(marked, [places, -1])[:, :1])
    differs = tf.reduce_any(tf.not_equal(*firsts), axis=1)
    return tf.roll(tensor, places - 1 - tf.argmax(differs, output_type=tf.int32), axis=0)


def unstack(tensor: tf.Tensor, element: tf.TensorSpec) -> tf.Tensor:
    """Return the list that `stack` was given, for who reads it, or takes elements from its end."""
    shape = tf.constant(_declared(element.shape), tf.int32)
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=shape)


def made_where_used(graph: StepGraph, ops: Sequence[str]) -> list[str]:
    """Return the ops that make the empty lists which a segment's ops fill: XLA knows nothing of these to give on."""
    found: list[str] = []
    queue = list(ops)
    while queue:
        for name in graph.inputs[queue.pop()]:
            if op_name(name) not in (*ops, *found) and _is_empty(graph, name):
                found.append(op_name(name))
                queue.append(op_name(name))
    return found[::-1]


def _is_empty(graph: StepGraph, name: str) -> bool:
    op = graph.by_name.get(op_name(name))
    while op is not None and op.type == "Identity":
        op = graph.by_name.get(op_name(graph.inputs[op.name][0]))
    return op is not None and op.type in ("EmptyTensorList", "TensorListReserve")


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


def _declared(shape: tf.TensorShape) -> int | list[int]:
    return _ANY_SHAPE if shape.rank is None else [_ANY_SHAPE if n is None else n for n in shape.as_list()]


def find_uncrossable(graph: StepGraph, segments: Sequence[Segment]) -> Iterator[str]:
    """Yield, in words, what would have to go from one of these segments to another, and cannot if XLA compiles them."""
    for segment in segments:
        for name in segment.sources:
            element = list_element(graph, name)
            if op_name(name) in graph.placeholders or graph.spec(name).dtype != tf.variant:
                continue
            op = graph.by_name[op_name(name)]
            if element is None or element.dtype == tf.variant:  # of such lists a graph may know nothing
                yield f"the list of lists that {op.name} keeps, at {user_line(op.traceback)}"
            elif any(_pushes(graph, user, name) for user in segment.plan.ops):
                yield f"the list that {op.name} has not filled, at {user_line(op.traceback)}"


def _pushes(graph: StepGraph, user: str, name: str) -> bool:
    """Return whether an op, or a function that it calls, appends to a list: then its length has to be known."""
    node, places = graph.nodes[user], [i for i, one in enumerate(graph.inputs[user]) if one == name]
    if node.op.startswith("TensorListPush"):
        return bool(places)
    for attribute in node.attr.values():
        called = graph.functions.get(attribute.func.name)
        if called is not None:
            given = {called.signature.input_arg[i].name for i in places if i < len(called.signature.input_arg)}
            pushes = (one for one in called.node_def if one.op.startswith("TensorListPush"))
            if any(given.intersection(one.input) for one in pushes):
                return True
    return False
