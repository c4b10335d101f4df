"""TensorFlow's own shapes are compared with those that placements say: for each program, of batches of two sizes."""

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close

import ncclsync
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.program import shapes
from ncclsync.program.conversion import Conversions
from ncclsync.program.trace import Refusals
from ncclsync.semantics import rules

X = np.random.default_rng(0).normal(size=(7, 4, 3)).astype("float32")


@pytest.fixture
def hidden(monkeypatch):
    """As users have it."""
    monkeypatch.delenv("NCCLSYNC_FAULTS")


def step(x):
    """Return sums that rest on where the rows are."""
    turned = tf.transpose(tf.tanh(x), [1, 0, 2])  # [4, rows, 3]
    return tf.reduce_sum(turned, 1), tf.reduce_max(turned, [1, 2]), x - tf.reduce_mean(turned, [0, 1])


def stays(call):
    """A wrong rule: an op moves no rows."""
    return [call.inputs[0]] * len(call.op.outputs)


def test_a_wrong_rule(hidden, monkeypatch, caplog):
    """The op is made whole, and its line named."""
    monkeypatch.setitem(rules.RULES, "Transpose", stays)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), step(X))
    assert f"computes that op whole: Transpose, at {__file__}" in caplog.text and "ShapeMismatch" in caplog.text
    assert "the whole batch" not in caplog.text


def test_a_wrong_op_is_put_in(hidden, monkeypatch, caplog):
    """If it does not help that the op is made whole, the step is."""
    monkeypatch.setattr(Conversions, "rows_of_tower", lambda self, tensor, *_: tf.identity(tensor))
    step = lambda x: x * tf.cumsum(x, 0) + tf.sort(x, 0)  # noqa: E731
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), step(X))
    assert "ShapeMismatch" in caplog.text and "report this line" in caplog.text


def through(body):
    """Return a step whose loop, branches, and loop with branches in it run `body`."""
    looped = lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, body(a)), (0, x))[1]  # noqa: E731
    branched = lambda n, x: tf.cond(n > 0, lambda: body(x), lambda: x)  # noqa: E731
    nested = lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, branched(i, a)), (0, x))[1]  # noqa: E731
    return lambda x: (looped(x), branched(tf.reduce_sum(x), x), nested(x))


def test_a_wrong_rule_within_functions(hidden, monkeypatch, caplog):
    """Loops and branches are made whole, and their lines named; as long as the rule is right they are not."""
    turned = through(lambda a: tf.transpose(tf.transpose(tf.tanh(a), [1, 0, 2]) * 2, [1, 0, 2]))
    longer = through(lambda a: tf.ones([tf.shape(a)[0] * 4, 3])[: tf.shape(a)[0], None] * a)
    for step in (turned, longer):
        with ncclsync.Towers(3) as towers:
            assert_close(towers.run(step, X), step(tf.constant(X)))
    assert "whole" not in caplog.text
    monkeypatch.setitem(rules.RULES, "Transpose", stays)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(turned, X), turned(tf.constant(X)))
    told = [line for line in caplog.text.splitlines() if "ShapeMismatch" in line]
    assert [line.count(" whole: ") for line in told] == [1, 1, 1]
    assert sum(f"While, at {__file__}" in line for line in told) == 2  # of both loops, and one branch


def test_own_tests_hear_of_it(monkeypatch):
    """So that all tables of programs tell of each mismatch: an error."""
    monkeypatch.setitem(rules.RULES, "Transpose", stays)
    with ncclsync.Towers(3) as towers, pytest.raises(shapes.ShapeMismatch, match="840 of 2520 rows"):
        towers.run(step, X)


def test_one_row_is_not_broadcast(monkeypatch):
    """Where one device refuses other numbers of rows, towers of one row each do, too."""
    for other in (
        lambda x: tf.tile(tf.ones([2, 4, 3]), [tf.shape(x)[0], 1, 1]),
        lambda x: tf.zeros([2 * tf.shape(x)[0], 4, 3]),
        lambda x: tf.concat([x, x], 0),
        lambda x: tf.tile(tf.ones([2, 4, 3]), [tf.cast(tf.reduce_sum(x) * 0, tf.int32) + 3, 1, 1]),
    ):
        # What its shapes show is refused while it is traced.
        with ncclsync.Towers(3) as towers, pytest.raises((tf.errors.OpError, ValueError)):
            towers.run(lambda x, other=other: tf.reduce_sum(x * other(x)), X[:3])
    monkeypatch.setattr(rules, "as_many_rows", lambda *_: True)
    monkeypatch.setattr(Refusals, "line", lambda *_: None)
    with ncclsync.Towers(3) as towers:  # as it was, and nobody has seen it
        towers.run(lambda x: tf.reduce_sum(x * tf.zeros([2 * tf.shape(x)[0], 4, 3])), X[:3])


def test_what_one_device_refuses_is_no_fault():
    """A step that takes batches of some sizes alone is compared for these."""

    def pairs(x):
        first, second = tf.split(x, 2)
        return first * second

    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(pairs, X[:6]), pairs(X[:6]))


def test_batches_of_one_size():
    """A step that fixes the number of rows, by Python or by a variable, is compared for that number."""
    state = tf.Variable(X[:6] + 1, trainable=False)

    def by_python(x):
        return tf.stack([x[i] * i for i in range(x.shape[0])]) - x

    def by_variable(x):
        return (x + state) / tf.reduce_sum(x * state)

    for step in (by_python, by_variable):
        with ncclsync.Towers(3) as towers:
            assert_close(towers.run(step, X[:6]), step(tf.constant(X[:6])))


def test_comparing_fails(hidden, monkeypatch, caplog):
    """A step runs, and a warning asks to report it."""
    monkeypatch.delattr(tf_compat, "infer_shapes")
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), step(X))
    assert "not compared" in caplog.text and "AttributeError" in caplog.text


def test_most_shapes_are_compared(monkeypatch):
    """Nearly all that a tower computes of its rows has a shape to compare."""
    counts = []

    def infer(definition):
        compared = sum("_output_shapes" in node.attr for node in definition.node)
        counts.extend([(len(definition.node), compared)] * (compared > 0))  # else of the trace alone

    monkeypatch.setattr(tf_compat, "infer_shapes", infer)
    with ncclsync.Towers(3) as towers:
        towers.run(step, X)
    assert len(counts) == len(shapes._SIZES)
    assert all(compared >= 5 for _, compared in counts)


def test_lengths_that_nobody_knows():
    """Of two such lengths `==` makes one number for TensorFlow's shape function; they are equal when the step runs."""

    def step(x):
        half = tf.shape(x)[0] // 2
        return tf.reduce_sum(tf.cast(x[0 : 2 * half : 2] == x[1 : 2 * half : 2], x.dtype) + x[:half])

    x = np.round(X)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, x), step(tf.constant(x)))
