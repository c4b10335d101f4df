"""Updates of variables that run as one op: which they are, and what they compute, to the last bit."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from parity import data, mlp, on_towers

import ncclsync
from ncclsync.host_passes import fusion, passes
from ncclsync.host_passes.arithmetic import ARITHMETIC

X, Y = data(rows=24)


def updates(monkeypatch, found):
    """Let `found` list the groups of updates that become one op."""

    def listing(*arguments):
        groups = fusion.find_fusions(*arguments)
        found.extend(groups)
        return groups

    monkeypatch.setattr(passes, "find_fusions", listing)


def state_of(model):
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True, clipnorm=1.0),
    "AdamW": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.01, 10)),
    "EMA": lambda: optimizers.Adamax(0.01, use_ema=True, ema_overwrite_frequency=3),
    "Lion": lambda: optimizers.Lion(0.001),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_updates_are_bitwise_those_of_tensorflow(monkeypatch, name):
    """The same weights and optimizer state, to the last bit, whichever way a variable is updated."""
    states, found = [], []
    for fused in (False, True):
        if fused:
            updates(monkeypatch, found)
        else:
            monkeypatch.setattr(passes, "find_fusions", lambda *_: [])
        model = on_towers(lambda: mlp(OPTIMIZERS[name]()), 3)
        model.fit(X, Y, batch_size=5, verbose=0, shuffle=False)
        assert model.towers.divergence() == 0.0
        states.append(state_of(model))
    assert sum(len(update.writes) for group in found for update in group) >= 4
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arithmetic_is_tensorflows(monkeypatch, dtype):
    """Every operation gives TensorFlow's very bits, of zeros, infinities, NaNs, denormals and the rest."""
    found = []
    updates(monkeypatch, found)
    tiny, huge = np.finfo(dtype).tiny, np.finfo(dtype).max
    special = np.array([0, -0.0, 1, -1, 0.1, 3, np.inf, -np.inf, np.nan, tiny, tiny / 4, huge], dtype)
    a, b = (tf.Variable(array.ravel()) for array in np.meshgrid(special, special))
    results = {name: tf.Variable(tf.ones_like(a)) for name in ARITHMETIC}

    def computed(name):
        op = getattr(tf.raw_ops, name)
        *names, _ = inspect.signature(op).parameters
        return op(**dict(zip(names, (a, b), strict=False)))

    def step(batch):
        for name, result in results.items():
            result.assign(computed(name))

    with ncclsync.Towers(2) as towers:
        towers.run(step, tf.ones([4, 1]))
    assert sum(len(group) for group in found) == len(results)
    for name, result in results.items():
        # Of a denormal, which instruction TensorFlow uses tells whether a maximum flushes it.
        values = (result.numpy(), computed(name).numpy())
        np.testing.assert_array_equal(*(np.where(np.abs(v) < tiny, 0, v) for v in values), name)


def run_both_ways(monkeypatch, step, variables):
    """[2] the variables' values after two steps, with and without fused updates; and the groups found."""
    found, values = [], []
    starts = [variable.numpy() for variable in variables]
    for fused in (False, True):
        for variable, start in zip(variables, starts, strict=True):
            variable.assign(start)
        if fused:
            updates(monkeypatch, found)
        else:
            monkeypatch.setattr(passes, "find_fusions", lambda *_: [])
        with ncclsync.Towers(2) as towers:
            for _ in range(2):
                towers.run(step, tf.ones([4, 1]))
        values.append([variable.numpy() for variable in variables])
    return values, found


def test_update_that_waits_for_another(monkeypatch):
    """The second variable's update needs the first one's sum: they cannot be one op."""
    one, other = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

    def step(batch):
        one.assign_add(one * 0.5)
        other.assign_add(other * tf.reduce_sum(one))

    values, found = run_both_ways(monkeypatch, step, [one, other])
    np.testing.assert_array_equal(*values)
    assert [len(group) for group in found] == [1, 1]


def test_variable_written_twice_and_read_between(monkeypatch):
    """Written, read, written again: the value between is what is computed with; who else reads it gets it."""
    one, other, third = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0]), tf.Variable([[0.0, 0.0]])

    def step(batch):
        one.assign_sub(one * 0.25)
        other.assign(one * 3.0)
        one.assign_add(other)
        third.assign(tf.cumsum(one[tf.newaxis], axis=1) + 1.0)

    values, found = run_both_ways(monkeypatch, step, [one, other, third])
    for before, after in zip(*values, strict=True):
        np.testing.assert_array_equal(before, after)
    assert {len(update.writes) for group in found for update in group} == {2, 1}


def test_write_that_somebody_waits_for_is_not_fused_away(monkeypatch):
    """A value between two writes that another kind of op reads: that write happens."""
    one, seen = tf.Variable([1.0, 2.0]), tf.Variable(0.0)

    def step(batch):
        one.assign_add(one * 0.5)
        seen.assign_add(tf.reduce_sum(one))
        one.assign_add(one * 2.0)

    values, _ = run_both_ways(monkeypatch, step, [one, seen])
    for before, after in zip(*values, strict=True):
        np.testing.assert_array_equal(before, after)
    assert values[1][1] > 0
