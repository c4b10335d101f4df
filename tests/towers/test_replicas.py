"""A tower is a full replica, on the CPU too: memory of its own, an update of its own."""

import ctypes

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers, state

from ncclsync import DivergenceError, Health, Towers
from ncclsync.compat import tensorflow as tf_compat

X, Y = data(rows=24)


@pytest.fixture(params=["host_passes", "as_on_gpus"])
def program(request):
    """The program as users have it on the CPU, and as GPUs run it."""
    if request.param == "as_on_gpus":
        request.getfixturevalue("as_on_gpus")


def address(variable):
    """Where a variable lies."""
    value = variable.value()
    value = tf.bitcast(value, tf.uint16) if value.dtype == tf.bfloat16 else value  # which NumPy does not know
    return np.from_dlpack(value).ctypes.data


def in_one_place(model):
    """What a model and its optimizer hold of which two towers' copies lie in the same place."""
    found = []
    for keras_variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        variable = tf_compat.backend_variable(keras_variable)
        if variable.dtype != tf.string:
            places = {address(copy) for copy in model.towers.replicas.of(variable)}
            found += [keras_variable.path] if len(places) < len(model.towers) else []
    return found


def normalised(optimizer="adam", **arguments):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((12,)), keras.layers.Dense(16), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.2), keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **arguments)
    return model


class Branches(keras.Sequential):
    """Assigns constants, results of exchanges and what branches and loops compute."""

    def build(self, input_shape):
        super().build(input_shape)
        names = ("constant", "mean", "branch", "branch_constant", "loop")
        self.kept = {n: self.add_weight(shape=(12,), trainable=False, name=n) for n in names}

    def train_step(self, batch):
        logs = super().train_step(batch)
        mean, kept = tf.reduce_mean(batch[0], axis=0), self.kept
        kept["constant"].assign(tf.ones([12]))
        kept["mean"].assign(mean)

        def write():
            kept["branch"].assign(mean)
            kept["branch_constant"].assign(tf.fill([12], 2.0))
            return tf.constant(0)

        tf.cond(tf.reduce_sum(mean) > -1e9, write, lambda: tf.constant(1))

        def write_again(number):
            kept["loop"].assign(mean)
            return number + 1

        tf.while_loop(lambda number: number < 2, write_again, [0])
        return logs


def branches():
    keras.utils.set_random_seed(1)
    model = Branches([keras.Input((12,)), keras.layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


FACTORIES = {
    "adam": normalised,
    "momentum": lambda: normalised(keras.optimizers.SGD(0.1, momentum=0.9)),
    "averages": lambda: normalised(keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)),
    "accumulates": lambda: normalised(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "loss scale": lambda: normalised(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))),
    "branches": branches,
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_every_copy_lies_in_memory_of_its_own(factory, program, tmp_path):
    """From the start, after steps, after a load, and after a step that follows it."""
    model = on_towers(factory, 3)
    model.evaluate(X, Y, verbose=0)
    assert in_one_place(model) == []
    model.fit(X, Y, verbose=0, batch_size=24)
    assert in_one_place(model) == []
    model.fit(X, Y, verbose=0, batch_size=7)
    assert in_one_place(model) == []
    model.save_weights(tmp_path / "w.weights.h5")
    model.load_weights(tmp_path / "w.weights.h5")
    model.towers.broadcast()
    assert in_one_place(model) == []
    model.fit(X, Y, verbose=0, batch_size=24)
    assert in_one_place(model) == []
    assert_towers_agree(model)


DTYPES = ("float16", "bfloat16", "float64", "int8", "int32", "uint16", "bool", "complex64")


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_every_dtype(dtype):
    """Also where the communicator does not know it."""
    variable = tf.Variable(tf.cast(tf.range(5) % 2, dtype))
    with Towers(3) as towers:
        copies = towers.replicas.of(variable)
        assert len({address(copy) for copy in copies}) == 3
        variable.assign(tf.cast(tf.range(1, 6) % 2, dtype))
        towers.broadcast()
        assert len({address(copy) for copy in copies}) == 3
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), variable.numpy())


def flip(variable, bit=12):
    """Flip a bit of a variable's first word, in its memory."""
    word = ctypes.cast(address(variable), ctypes.POINTER(ctypes.c_uint32))
    word[0] ^= 1 << bit


@pytest.mark.slow(but=1)
def test_a_flipped_bit_is_seen(program):
    """`divergence` tells it, `check_every` names the tower, and the next step's weights are others."""
    model, alone = on_towers(mlp, 3), mlp()
    checked = on_towers(mlp, 3, health=Health(check_every=2))
    for one in (model, alone, checked):
        one.train_on_batch(X, Y)
    assert model.towers.divergence() == 0.0
    kernel = tf_compat.backend_variable(model.layers[-1].kernel)
    others = [copy.numpy() for copy in model.towers.replicas.of(kernel)[:2]]
    flip(model.towers.replicas.of(kernel)[2], bit=22)
    for copy, other in zip(model.towers.replicas.of(kernel), others, strict=False):
        np.testing.assert_array_equal(copy.numpy(), other)
    assert model.towers.divergence() > 0.0
    for one in (model, alone):
        one.train_on_batch(X, Y)
    towers = [model.towers.get_weights(tower) for tower in range(3)]
    assert any(np.any(one != other) for one, other in zip(towers[0], towers[2], strict=True))
    with pytest.raises(AssertionError):
        assert_close(state(model), state(alone))
    flip(checked.towers.replicas.of(tf_compat.backend_variable(checked.layers[-1].kernel))[2])
    with pytest.raises(DivergenceError, match="tower 2"):
        checked.train_on_batch(X, Y)


def test_writing_one_towers_copy_leaves_the_others():
    """Whoever writes in place writes a copy of what is shared; the next step starts from tower 0's."""
    model, alone = on_towers(mlp, 3), mlp()
    for one in (model, alone):
        one.fit(X, Y, verbose=0, shuffle=False)
    kernel = model.layers[0].kernel
    before = kernel.numpy()
    _, copy, last = model.towers.replicas.of(tf_compat.backend_variable(kernel))
    copy.assign_add(tf.ones_like(copy))
    np.testing.assert_array_equal(kernel.numpy(), before)
    np.testing.assert_array_equal(last.numpy(), before)
    assert model.towers.divergence() == pytest.approx(1.0)
    for one in (model, alone):
        value = tf_compat.backend_variable(one.layers[0].kernel)
        tf.raw_ops.ResourceScatterAdd(resource=value.handle, indices=[2], updates=tf.ones([1, 16]))
    np.testing.assert_array_equal(last.numpy(), before)
    model.towers.broadcast()
    for one in (model, alone):
        one.fit(X, Y, verbose=0, shuffle=False)
    assert_close(state(model), state(alone))
    assert model.towers.divergence() == 0.0
