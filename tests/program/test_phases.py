"""`phases` by hand: small steps, of which it is said what each shard computes and what runs once for a tower."""

import pytest
import tensorflow as tf

from ncclsync import NcclSyncError, ops
from ncclsync.program.cut import place
from ncclsync.program.phases import divide
from ncclsync.program.program import Results
from ncclsync.program.schedule import schedule
from ncclsync.program.trace import trace
from ncclsync.sharding.roles import Role, declare_role

ROWS = tf.TensorSpec([None, 3], tf.float32)


@pytest.fixture
def weight():
    return tf.Variable([[1.0], [2.0], [3.0]])


def phases(step):
    """Return, of each segment of a step on several shards, whether it runs once, and the types of its ops."""
    graph = place(trace(step, ROWS), "/CPU:0", Results.COMBINED, False, many_shards=True).graph
    divided = divide(graph, schedule(graph, None))
    found = [(once, set()) for once in divided.once]
    assert len(found) == divided.count
    for name, number in divided.segments.items():
        found[number][1].add(graph.by_name[name].type)
    return found, divided, graph


def test_shards_compute_and_a_tower_writes(weight):
    """What has rows is a shard's; what is the same for all, with the write, runs once, after their sum."""

    def step(x):
        weight.assign_sub(tf.exp(ops.all_reduce(tf.reduce_sum(x @ weight, 0, keepdims=True), "sum")) * tf.ones([3, 1]))

    found, divided, _ = phases(step)
    assert [once for once, _ in found] == [False, True]
    assert {"MatMul", "Sum"} <= found[0][1] and {"Exp", "AssignSubVariableOp"} <= found[1][1]
    assert set(divided.sent.values()) == {0} and set(divided.received.values()) == {1}


def test_what_shards_need_comes_before_them(weight):
    """A write that they wait for is made once, before; they compute the rest of what they need with them."""
    count = tf.Variable(0.0)

    def step(x):
        number = count.assign_add(1.0)
        total = ops.all_reduce(tf.reduce_sum(tf.tanh(x * tf.sqrt(number))), "sum")
        weight.assign(total * weight)

    found, divided, _ = phases(step)
    assert [once for once, _ in found] == [True, False, True]
    assert "AssignAddVariableOp" in found[0][1] and {"Tanh", "Sum"} <= found[1][1] and "AssignVariableOp" in found[2][1]
    assert "AssignVariableOp" not in found[0][1] | found[1][1]
    assert set(divided.sent.values()) == {1} and set(divided.received.values()) == {2}


def test_phases_alternate(weight):
    """A write between what shards compute before and after it runs once in between."""
    count = tf.Variable(1.0)

    def step(x):
        before = tf.reduce_sum(tf.tanh(x * count))
        with tf.control_dependencies([before]):
            number = count.assign_add(1.0)
        weight.assign(weight * ops.all_reduce(before + tf.reduce_sum(tf.cosh(x * number)), "sum"))

    found, divided, _ = phases(step)
    asked = ("Tanh", "AssignAddVariableOp", "Cosh")
    tanh, write, cosh = (next(i for i, (_, types) in enumerate(found) if one in types) for one in asked)
    assert tanh < write < cosh and [found[i][0] for i in (tanh, write, cosh)] == [False, True, False]
    assert set(divided.sent.values()) == {cosh}


def test_weights_are_written_when_all_else_is_done(weight):
    """Also after what shards compute of the exchange's result."""

    def step(x):
        total = ops.all_reduce(tf.reduce_sum(x), "sum")
        weight.assign(weight * total)
        return tf.sinh(x * total)

    found, *_ = phases(step)
    assert found[-1][0] and "AssignVariableOp" in found[-1][1]
    assert any("Sinh" in types and not once for once, types in found[:-1])


def test_metrics_are_each_shards(weight):
    """A sum that belongs to a shard is added to by each; the weight is written once."""
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def step(x):
        total.assign_add(tf.reduce_sum(x))
        weight.assign(weight * ops.all_reduce(tf.reduce_max(x), "max"))

    found, divided, graph = phases(step)
    shards, tower = (set().union(*(types for once, types in found if once is kind)) for kind in (False, True))
    assert "AssignAddVariableOp" in shards and "AssignVariableOp" in tower and "AssignAddVariableOp" not in tower
    assert graph.folds and not any(
        divided.once[divided.segments[name]] for name in graph.folds & divided.segments.keys()
    )


def test_no_op_writes_for_a_shard_and_for_all(weight):
    """It could run neither once nor for each shard."""
    accumulated = tf.Variable(0.0)
    declare_role(accumulated, Role.PARTIAL)

    def step(x):
        def both():
            accumulated.assign_add(1.0)
            weight.assign(2.0 * weight)
            return 0.0

        tf.cond(weight[0, 0] > 0.0, both, lambda: 0.0)
        return tf.reduce_sum(x)

    with pytest.raises(NcclSyncError, match=r"no op writes both a weight and .* Received: If, at .*test_phases.py:\d+"):
        phases(step)
