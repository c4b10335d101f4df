"""What CPU towers compute once for all, and what stays each tower's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data, mlp, on_towers, state

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import all_reduce

X, Y = data(rows=24)


def addresses(model, variable):
    """Where each tower's copy of a Keras variable lies."""
    copies = model.towers.copies(tf_compat.backend_variable(variable))
    return [np.from_dlpack(copy.value()).ctypes.data for copy in copies]


@pytest.mark.parametrize("options, places", [({}, 1), ({"check_every": 100}, 3)])
def test_copies_of_a_weight(options, places):
    """Weights, slots and moving statistics lie once in memory, from the start and behind each step; with
    `check_every` the weights lie there once for each tower.
    """

    def factory():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((12,)), keras.layers.Dense(16), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(5)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = on_towers(factory, 3, **options)
    model.evaluate(X, Y, verbose=0)
    assert {len(set(addresses(model, weight))) for weight in model.weights} == {places}
    model.fit(X, Y, verbose=0, batch_size=7)
    variables = [*model.weights, *model.optimizer.variables] if places == 1 else model.trainable_weights
    assert {len(set(addresses(model, variable))) for variable in variables} == {places}


def test_writing_one_towers_copy_leaves_the_others():
    """Whoever writes in place writes a copy of what is shared; the next step starts from tower 0's."""
    model, alone = on_towers(mlp, 3), mlp()
    for one in (model, alone):
        one.fit(X, Y, verbose=0, shuffle=False)
    kernel = model.layers[0].kernel
    before = kernel.numpy()
    _, copy, last = model.towers.copies(tf_compat.backend_variable(kernel))
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


class Reading(keras.Sequential):
    """Reads what it has just updated, for its own rows."""

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss, "after": tf.reduce_mean(tf.square(self(x)))}


class Writing(Reading):
    """Writes, behind the update, what differs between towers, and by a scatter what does not."""

    def build(self, input_shape):
        super().build(input_shape)
        self.seen = self.add_weight(shape=(12,), trainable=False, initializer="zeros")

    def train_step(self, batch):
        logs = super().train_step(batch)
        self.seen.assign(0.5 * self.seen + tf.reduce_mean(batch[0], axis=0))
        bias = tf_compat.backend_variable(self.layers[-1].bias)
        bias.scatter_sub(tf.IndexedSlices(tf.constant([0.25]), tf.constant([3])))
        return logs


class Together(Reading):
    """Computes with all towers' rows behind the update, and writes what comes out."""

    def train_step(self, batch):
        logs = super().train_step(batch)
        largest = all_reduce(tf.reduce_max(self(batch[0]), axis=0), "max")
        self.layers[-1].bias.assign_sub(0.1 * largest)
        return logs


@pytest.mark.parametrize("cls", [Reading, Writing, Together])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_what_follows_the_update(cls, optimizer):
    """A step that goes on behind its update sees the new weights, on one device's rows and on towers'."""

    def factory():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)]
        model = cls(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    model, alone = on_towers(factory, 3), factory()
    told = [
        [one.train_on_batch(X[:rows], Y[:rows], return_dict=True) for rows in (24, 7, 2)]
        for one in (model, alone)
    ]
    assert_close(*told)
    assert_close(state(model), state(alone))
    assert model.towers.divergence() == 0.0


def test_a_table_needs_no_rollback():
    """Rows that a scatter writes are written behind all that can fail, though each tower writes its own."""

    def factory():
        keras.utils.set_random_seed(3)
        rows = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(50, 4), keras.layers.Flatten()]
        model = keras.Sequential([*rows, keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = on_towers(factory, 3)
    model.train_on_batch(np.arange(24 * 3).reshape(24, 3) % 50, Y)
    (program,) = model.train_function.__self__._programs.values()
    variables = dict(program.variables)
    assert program.rollback == ()
    shapes = {tuple(variables[name].shape) for name in program.segments[-1].for_all}
    assert shapes == {(12, 5), (5,), ()}  # of the other weights, and of the optimizer's iterations
