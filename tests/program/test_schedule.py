"""A step that goes on after its update: in which segments its writes lie."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import program_of
from parity import assert_close, data, on_towers, state

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import all_reduce

X, Y = data(rows=24)


class Reading(keras.Sequential):
    """Reads what it has just updated, for its own rows."""

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss, "after": tf.reduce_mean(tf.square(self(x)))}


class Writing(Reading):
    """Writes, after the update, what differs between towers, and by a scatter what does not."""

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
    """Computes with all towers' rows after the update, and writes what comes out."""

    def train_step(self, batch):
        logs = super().train_step(batch)
        largest = all_reduce(tf.reduce_max(self(batch[0]), axis=0), "max")
        self.layers[-1].bias.assign_sub(0.1 * largest)
        return logs


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("cls", [Reading, Writing, Together])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_what_follows_the_update(cls, optimizer):
    """A step that goes on after its update sees the new weights, on one device's rows and on towers'."""

    def factory():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)]
        model = cls(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    model, alone = on_towers(factory, 3), factory()
    told = [[one.train_on_batch(X[:rows], Y[:rows], return_dict=True) for rows in (24, 7, 2)] for one in (model, alone)]
    assert_close(*told)
    assert_close(state(model), state(alone))
    assert model.towers.divergence() == 0.0


def test_a_table_needs_no_rollback():
    """Rows that a scatter writes are written after all that can fail, though each tower writes its own."""

    def factory():
        keras.utils.set_random_seed(3)
        rows = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(50, 4), keras.layers.Flatten()]
        model = keras.Sequential([*rows, keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = on_towers(factory, 3)
    model.train_on_batch(np.arange(24 * 3).reshape(24, 3) % 50, Y)
    assert program_of(model).rollback == ()
