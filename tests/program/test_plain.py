"""A traced step is written more plainly, with the same numbers."""

import numpy as np
import tensorflow as tf

from ncclsync.compat.source_lines import user_line
from ncclsync.program import plain
from ncclsync.program.trace import trace
from ncclsync.semantics.functions import in_order

BATCH = tf.TensorSpec([None, 3])


def needed(step):
    function = trace(step, BATCH).function
    graph = function.graph
    return in_order([*graph.control_outputs, *(tensor.op for tensor in function.outputs)])


def result(step, x, inlines=True):
    """What a traced step returns for a batch of one tower."""

    def traced(batch):
        return step(batch)

    function = tf.function(traced, autograph=False).get_concrete_function(BATCH)
    if inlines:
        plain.inline_calls(function.graph)
        plain.keep_axes(function.graph)
    graph = function.graph
    definition = tf.compat.v1.wrap_function(
        lambda batch, *captured: tf.graph_util.import_graph_def(
            graph.as_graph_def(),
            {one.name: given for one, given in zip(graph.inputs, (batch, *captured), strict=True)},
            [tensor.name for tensor in graph.outputs],
        ),
        [BATCH, *(tf.TensorSpec(one.shape, one.dtype) for one in function.captured_inputs)],
    )
    return [one.numpy() for one in definition(x, *function.captured_inputs)]


def test_calls_are_put_in_place():
    """Also one within another; its ops come from the line that calls."""

    @tf.function
    def inner(x):
        return tf.tanh(x)

    @tf.function
    def outer(x):
        return inner(x) + 1.0

    def step(batch):
        return tf.reduce_sum(outer(batch))

    ops = needed(step)
    assert not [op.type for op in ops if op.type.endswith("PartitionedCall")]
    (tanh,) = (op for op in ops if op.type == "Tanh")
    assert "return tf.reduce_sum(outer(batch))" in user_line(tanh.traceback)


def test_what_xla_compiles_by_itself_stays():
    """It is one kernel."""
    compiled = tf.function(lambda x: tf.tanh(x), jit_compile=True)
    assert any(op.type.endswith("PartitionedCall") for op in needed(lambda batch: compiled(batch)))


def test_writes_keep_their_order():
    """Of a call, what comes before and after it; a call whose result nobody takes runs once."""
    state = tf.Variable(1.0)

    @tf.function
    def doubled():
        state.assign(state * 2.0)
        return state.read_value()

    @tf.function
    def raised():
        state.assign_add(3.0)

    def step(batch):
        state.assign_add(1.0)
        first = doubled()
        state.assign_add(10.0)
        raised()
        return first, doubled(), state.read_value()

    (name,) = (op.name for op in needed(step) if op.type == "AssignAddVariableOp" and "called" in op.name)
    assert name
    x = tf.zeros([2, 3])
    state.assign(1.0)
    expected = tf.function(step)(x)
    state.assign(1.0)
    assert [float(one) for one in result(step, x)[:3]] == [float(one) for one in expected] == [4.0, 34.0, 34.0]
    assert float(state) == 34.0


def test_sums_keep_axes():
    """Of broadcast operands' gradients, also in a loop: the same numbers, and each sum has the rank of its operand."""
    scale = tf.Variable(2.0)

    def step(batch):
        with tf.GradientTape() as tape:
            factor = batch[:, :1] * scale  # of as many rows, or of one
            _, made = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * factor), [0, batch])
            made = made * factor
        return tape.gradient(made, scale), tf.reduce_sum(made)

    x = tf.constant(np.arange(6.0).reshape(2, 3), tf.float32)
    for one, other in zip(result(step, x), result(step, x, inlines=False), strict=True):
        np.testing.assert_array_equal(one, other)
    ops, found = needed(step), 0
    called = {value.func.name for op in ops for value in op.node_def.attr.values() if value.func.name}
    library = ops[0].graph.as_graph_def().library.function
    for nodes in ([op.node_def for op in ops], *(one.node_def for one in library if one.signature.name in called)):
        types = {node.name: node.op for node in nodes}
        sums = [node for node in nodes if node.op == "Sum"]
        over = [node for node in sums if types.get(node.input[1].partition(":")[0]) == "BroadcastGradientArgs"]
        assert all(node.attr["keep_dims"].b for node in over)
        found += bool(over)
    assert found == 2  # the step, and the gradient's loop
