"""`Rollback` and `KeptBatch` by hand: a program of two variables, which the test writes in place of a step."""

import numpy as np
import pytest
import tensorflow as tf

from ncclsync import Towers
from ncclsync.costs.cost import StepWork
from ncclsync.program.program import Program, Results
from ncclsync.sharding.shards import fixed_specs
from ncclsync.towers.recovery import KeptBatch, Rollback


def program(weight, metric):
    """Return a program of no segment, of which a failed step restores both variables, a NaN the weight."""
    empty = dict.fromkeys(("segments", "arguments", "captures", "outputs", "warnings", "draws", "normalized"), ())
    return Program(
        variables=(("w", weight), ("m", metric)),
        structure=None,
        results=Results.COMBINED,
        declared=(),
        fixed=(),
        work=StepWork(np.zeros((0, 0, 0)), np.zeros((0, 0, 0)), (), ()),
        rollback=(("m", False), ("w", True)),
        updates=(),
        last_meeting=0,
        **empty,
    )


@pytest.fixture
def held():
    """Return two towers, the copies of a weight and of a metric's sum, and the program."""
    with Towers(2) as towers:
        weight = tf.Variable([1.0, 2.0])
        metric = tf.Variable(5.0, aggregation=tf.VariableAggregation.SUM)
        yield towers, towers.replicas.of(weight), towers.replicas.of(metric), program(weight, metric)


def values(copies):
    return [copy.numpy().tolist() for copy in copies]


def write(copies, by):
    """Do what a step does that fails on the way."""
    for copy in copies:
        copy.assign_add(tf.fill(copy.shape, by))


def test_a_step_that_began_is_undone(held):
    """Tower 0's values, which the next step sends to all, and values that differ; unless it has not begun, or ended."""
    towers, weights, metrics, made = held
    rollback = Rollback(made, towers)
    write(weights, 1.0)
    assert not rollback.under_way
    rollback.restore()
    assert not rollback.undone and values(weights) == [[2.0, 3.0]] * 2

    rollback.begin()
    assert rollback.under_way
    write(weights, 10.0)
    write(metrics, 7.0)
    assert values(metrics) == [12.0, 7.0]
    rollback.restore()
    assert rollback.undone and not rollback.under_way and values(metrics) == [5.0, 0.0]
    towers.replicas.mark_stale()
    towers.replicas.sync()
    assert values(weights) == [[2.0, 3.0]] * 2

    rollback.begin()
    write(weights, 1.0)
    rollback.end(tf.no_op(), None, [])
    rollback.restore()
    assert not rollback.undone and values(weights) == [[3.0, 4.0]] * 2


@pytest.mark.parametrize("finite", [True, False])
def test_a_step_that_is_not_finite_is_undone_but_for_metrics(held, finite):
    """In its graph, after it was told; then it is complete."""
    towers, weights, metrics, made = held
    told = []
    rollback = Rollback(made, towers, lambda finite, sizes: told.append((finite.tolist(), sizes.tolist())))

    @tf.function
    def step():
        with tf.control_dependencies(rollback.begin()):
            writes = [one.assign_add(tf.fill(one.shape, 1.0)).op for one in (*weights, *metrics)]
        with tf.control_dependencies(writes):
            rollback.end(tf.no_op(), tf.constant([[True, finite]]), [tf.constant(3), tf.constant(2)])

    step()
    assert values(weights) == [[2.0, 3.0] if finite else [1.0, 2.0]] * 2 and values(metrics) == [6.0, 1.0]
    assert told == ([] if finite else [([[True, False]], [3, 2])]) and not rollback.under_way


def test_the_batch_of_a_step_is_kept():
    """Of a graph, which goes on with it; or of what was brought before; Nones and sparse tensors, too."""
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    batch = {"x": tf.constant([[1.0], [2.0]]), "none": None, "sparse": sparse, "text": tf.constant(["a", "b"])}
    kept = KeptBatch(fixed_specs(batch))

    @tf.function
    def step(scale):
        used = kept.keep({**batch, "x": batch["x"] * scale})
        return used["x"]

    for scale in (2.0, 3.0):
        np.testing.assert_array_equal(step(tf.constant(scale)), batch["x"] * scale)
        found = kept.batch()
        np.testing.assert_array_equal(found["x"], batch["x"] * scale)
    assert found["none"] is None and tf.sparse.to_dense(found["sparse"]).numpy().tolist() == [[0, 1], [2, 0]]
    assert found["text"].numpy().tolist() == [b"a", b"b"]
    kept.keep_components([sparse.indices, sparse.values, sparse.dense_shape, batch["text"], batch["x"] + 5.0])
    np.testing.assert_array_equal(kept.batch()["x"], batch["x"] + 5.0)
