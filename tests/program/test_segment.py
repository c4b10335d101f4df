"""`segment` by hand: small steps, cut by a schedule, whose segments are compiled and called one by one."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat.names import op_name
from ncclsync.program.crossing import Form
from ncclsync.program.cut import Traceless, cut, place
from ncclsync.program.program import Bucket, Results, Target
from ncclsync.program.schedule import schedule
from ncclsync.program.segment import Rewrite, SegmentPlan, compile_segment, same_device
from ncclsync.program.trace import Site, trace
from ncclsync.sharding.roles import Role, role_of

ROWS = tf.TensorSpec([None, 3], tf.float32)
X = np.arange(6, dtype="float32").reshape(2, 3)


def placed(step):
    return place(trace(step, ROWS), "/CPU:0", Results.COMBINED, False).graph


def planned(graph, number, fetches=(), rewrites=()):
    """One segment of a step, with all that it is given and sends."""
    scheduled = schedule(graph, None)
    names = [op.name for op in graph.ops if scheduled.segments.get(op.name) == number]
    sent, received = (
        tuple(e for e in graph.exchanges.values() if of[e.result] == number)
        for of in (scheduled.sent, scheduled.received)
    )
    outside = {name for op in names for name in graph.inputs[op]}
    made = {output.name for op in names for output in graph.by_name[op].outputs}
    given = {exchange.result for exchange in received}
    sources = sorted(name for name in outside - made - given if not graph.is_constant(name))
    packing = [tensor.name for tensor in (graph.traced.trace.share.fraction, graph.traced.trace.site.has_samples)]
    incoming, outgoing = ((Bucket(each[0].collective, each, packed=True),) if each else () for each in (received, sent))
    return SegmentPlan(
        graph, names, (*sources, *packing), incoming, tuple(fetches), outgoing, shares_memory=True, rewrites=rewrites
    )


def compiled(plan):
    forms = {name: Form((name,), (plan.graph.spec(name),)) for name in plan.sources}
    return compile_segment(plan, forms, plan.fetches)


@pytest.fixture
def weight():
    return tf.Variable([[1.0], [2.0], [3.0]])


@pytest.fixture
def graph(weight):
    def step(x):
        total = ops.all_reduce(tf.reduce_sum(tf.abs(x) @ weight), "sum")
        weight.assign_add(total * tf.ones([3, 1]))

    return placed(step)


def values(graph, variable, fraction=1.0, is_first=True):
    """What a tower gives: its rows, its own copy of the only variable, its share, and where it is."""
    share = graph.traced.trace.share._replace(fraction=tf.constant(fraction, tf.float64))
    site = Site(tf.constant(int(fraction > 0)), tf.constant(is_first), tf.constant(0))
    given = [tf.constant(X), *share, *site]
    return {**dict(zip(graph.traced.arguments, given, strict=True)), handle_in(graph): variable.handle}


def handle_in(graph):
    (name,) = graph.traced.variable_of
    return name


def test_a_segment_sends_what_its_tower_computes(graph, weight):
    """Of the tower's rows and its own copy of the variable; nothing by a tower without samples."""
    plan = planned(graph, 0)
    (exchange,) = plan.outgoing[0].exchanges
    assert plan.needed == {exchange.source} and len(plan.needed_ops) == 1
    made = compiled(plan)
    assert made.takes_rows and not made.written and made.hold is None
    copy = tf.Variable(weight * 2)
    for variable, expected in ((weight, X @ weight), (copy, X @ copy)):
        outcome = made.run(values(graph, variable), [])
        np.testing.assert_array_equal(outcome.sent, [[[np.sum(expected)]]])
        assert outcome.token.dtype == tf.float32
    np.testing.assert_array_equal(made.run(values(graph, weight, fraction=0.0), []).sent, [[[0.0]]])


def test_a_segment_writes_what_it_is_given(graph, weight):
    """With what was received, into the copy whose handle its tower gives: not into the one of the trace."""
    made = compiled(planned(graph, 1))
    assert made.written == (handle_in(graph),)
    copy = tf.Variable(weight * 2)
    outcome = made.run(values(graph, copy), [[tf.constant([10.0])]])
    assert outcome.token.shape == [] and outcome.sent == []
    np.testing.assert_array_equal(copy, weight * 2 + 10)
    np.testing.assert_array_equal(weight, [[1], [2], [3]])


def test_a_segment_gives_on_what_is_asked_for(graph, weight):
    """Under the name of the trace, before what it sends."""
    (name,) = (op.outputs[0].name for op in graph.ops if op.type == "Abs")
    made = compiled(planned(graph, 0, fetches=[name]))
    assert made.fetches == (name,)
    np.testing.assert_array_equal(made.run(values(graph, weight), []).fetched[name], abs(X))


def test_a_segment_of_a_gpu_adds_up_in_order(weight):
    """The sums of two that stand for one of three are no ops of the step, and nothing that the host knows."""

    def step(x):
        return ops.all_reduce(tf.reduce_sum(tf.add_n([tf.abs(x) @ weight, x @ weight, tf.square(x) @ weight])), "sum")

    graph = placed(step)
    made = compiled(dataclasses.replace(planned(graph, 0), shares_memory=False))
    expected = np.sum([abs(X) @ weight, X @ weight, X**2 @ weight])
    np.testing.assert_array_equal(made.run(values(graph, weight), []).sent, [[[expected]]])


def test_rewritten_ops_are_replaced(graph, weight):
    """By a node that has the name of one of them."""
    (member,) = (op for op in graph.ops if op.type == "Abs")
    node = tf.compat.v1.NodeDef(name=member.name, op="Neg", input=graph.inputs[member.name])
    node.attr["T"].type = tf.float32.as_datatype_enum
    rewrite = Rewrite(frozenset([member.name]), tuple(graph.inputs[member.name]), node)
    made = compiled(planned(graph, 0, rewrites=(rewrite,)))
    np.testing.assert_array_equal(made.run(values(graph, weight), []).sent, [[[np.sum(-X @ weight)]]])


def test_the_callers_device_decides():
    """What the trace placed on tower 0's device goes where the segment is called; all else stays."""

    def step(x):
        with tf.device("/CPU:0"):
            here = tf.abs(x)
        with tf.device("/CPU:1"):
            return tf.exp(here)

    graph = placed(step)
    names = {op.type: op.outputs[0].name for op in graph.ops}
    made = compiled(planned(graph, 0, fetches=[names["Exp"]]))
    devices = {op.type: op.device for op in made.function.graph.get_operations()}
    assert not devices["Abs"] and same_device(devices["Exp"], "/CPU:1")


def test_same_device_has_the_same_kind_and_number():
    """However much of its name is written."""
    assert same_device("/job:localhost/replica:0/task:0/device:GPU:1", "GPU:1")
    assert not same_device("GPU:0", "GPU:1") and not same_device("CPU:0", "GPU:0")


def test_metric_state_is_sent_and_then_kept_by_the_first():
    """The sum as it is after the step's write; afterwards the first tower has all of it, the others zero."""
    count = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def step(x):
        count.assign_add(tf.reduce_sum(x))

    graph = placed(step)
    sent = compiled(planned(graph, 0)).run(values(graph, count), []).sent
    np.testing.assert_array_equal(sent, [[[1 + np.sum(X)]]])
    np.testing.assert_array_equal(count, 1 + np.sum(X))
    made = compiled(planned(graph, 1))
    for is_first, expected in ((True, 7.0), (False, 0.0)):
        made.run(values(graph, count, is_first=is_first), [[tf.constant([7.0])]])
        np.testing.assert_array_equal(count, expected)


def test_who_places_a_step_declares_no_role():
    """What it needs alike on all towers is so in its graph; who runs it declares that for all other steps."""
    state = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.SUM)

    def step(x):
        state.scatter_update(tf.IndexedSlices(tf.reduce_sum(x)[None], [0]))

    assert [*placed(step).traced.role.values()] == [Role.SAME] and role_of(state) is Role.SUM
    cut(trace(step, ROWS), Target("/CPU:0", 1), Results.COMBINED, undone=False, traceless=Traceless.WEIGHTS, meter=None)
    assert role_of(state) is Role.SAME


def test_a_placed_step_does_not_change(graph):
    """Passes read one description; one that is to have other inputs is another, which leaves this as it was."""
    name = graph.ops[-1].name
    for frozen in (graph, graph.traced):
        with pytest.raises(AttributeError, match="cannot assign to field 'ops'"):
            frozen.ops = ()
        with pytest.raises(TypeError):
            frozen.inputs[name] = []
    for collection in (graph.ops, graph.exchanges, graph.differing, graph.traced.ops, graph.traced.role):
        assert not hasattr(collection, "update") and not hasattr(collection, "append")
    other = graph.rewired({name: ["x:0"]}, {})
    assert other.inputs[name] == ["x:0"] and graph.inputs[name] != ["x:0"] and other.ops is graph.ops


def test_equal_shapes_are_asked_of_one_tensor():
    """In any batch, on a tower; a tensor of other lengths, another dtype, other rows or all rows is asked itself."""

    def step(x):
        whole = ops.all_gather(tf.abs(x))
        asked = {
            "one": tf.sin(x),
            "same": tf.cos(x) @ tf.ones([3, 3]),
            "wide": tf.tan(x) @ tf.ones([3, 5]),
            "turned": tf.transpose(tf.sinh(x)),
            "other dtype": tf.cast(x, tf.int64),
            "all rows": tf.cosh(whole),
            "twice": tf.concat([x, tf.sin(x)], 0),
            "of numbers": tf.boolean_mask(x, x[:, 0] > 0),
            "last": tf.square(x) - tf.reduce_mean(x, -1, keepdims=True),
        }
        return {name: tf.shape(tensor) + tf.cast(x[0, 0], tf.int32) for name, tensor in asked.items()}

    graph = placed(step)
    asking = [op.name for op in graph.ops if op.type == "Shape" and graph.traced.tensor(graph.inputs[op.name][0]).shape]
    once = graph.measured_once([op.name for op in graph.ops])
    changed = {
        graph.inputs[name][0]: once.inputs[name][0] for name in asking if graph.inputs[name] != once.inputs[name]
    }
    assert len(set(changed.values())) == 1
    assert {graph.by_name[op_name(name)].type for name in changed} == {"MatMul", "Sub", "Placeholder"}
    assert {graph.by_name[op_name(name)].type for name in changed.values()} == {"Sin"}
