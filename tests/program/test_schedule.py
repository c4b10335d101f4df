"""In which segments a step writes: where it goes on after its update, and where its gradients fill several buckets."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import program_of, step_of
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


@pytest.mark.slow(but=1)
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


def deep(optimizer, **compiled):
    keras.utils.set_random_seed(4)
    hidden = [keras.layers.Dense(16, activation="relu") for _ in range(3)]
    hidden.append(keras.layers.Dense(16, use_bias=False))  # normalised away: its gradient would be rounding
    model = keras.Sequential([keras.Input((12,)), *hidden, keras.layers.BatchNormalization(), keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], **compiled)
    return model


BY_BUCKETS = {
    "adam": lambda: keras.optimizers.Adam(epsilon=1e-3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_BUCKETS)
def test_each_bucket_updates_its_own_variables(name, as_on_gpus):
    """A segment for each of several buckets, all after the last exchange; no variable is in two, and no rollback.

    But an average that replaces the weights, every second step here, does so in the last segment.
    """
    model, alone = on_towers(lambda: deep(BY_BUCKETS[name]), 3, bucket_bytes=1200, exact=True), deep(BY_BUCKETS[name])
    told = [[one.train_on_batch(X[:rows], Y[:rows], return_dict=True) for rows in (24, 7, 2)] for one in (model, alone)]
    assert_close(*told)
    assert_close(state(model), state(alone))
    assert model.towers.divergence() == 0.0
    *_, program = step_of(model).programs.kept.values()  # of the second trace, which leaves the number of rows open
    updates = program.segments[program.last_meeting :]
    assert len(updates) > 2 and all(one.incoming and not one.outgoing for one in updates)
    assert all(len(one.incoming) == 1 for one in updates[:-1])  # the last also gets what metrics and moments add up
    trained = {handle for handle, variable in program.variables if variable.trainable}
    written = [handle for one in updates for handle in set(one.written) & trained]
    if name == "averaged":
        written = written[: -len(trained)]
    assert len(set(written)) == len(written) > len(trained) / 2 and program.rollback == ()


@pytest.mark.slow
def test_an_op_that_needs_all_gradients_keeps_the_update_in_one_segment(as_on_gpus):
    """As a norm of all of them does."""

    def factory():
        return deep(lambda: keras.optimizers.Adam(global_clipnorm=0.1, epsilon=1e-3))

    model, alone = on_towers(factory, 3, bucket_bytes=1200, exact=True), factory()
    for one in (model, alone):
        one.train_on_batch(X, Y)
    assert_close(state(model), state(alone))
    program = program_of(model)
    assert len(program.segments) == program.last_meeting + 1
