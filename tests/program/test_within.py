"""What a loop, a branch or a called function needs of all rows, and can have without an exchange, is put into it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from inner_losses import INNER_LOSSES, TIME, WIDTH
from parity import assert_close, on_towers, state
from thorough import some

ROWS = [7, 22, 2, 1, 5]
X = np.random.default_rng(0).random((max(ROWS), TIME, WIDTH)).astype("float32")


class Model(keras.Model):
    """Trains by a loss that a loop, a branch or a call makes."""

    def __init__(self, name):
        super().__init__()
        self.dense = keras.layers.Dense(WIDTH)
        self.weight = self.add_weight(shape=(WIDTH, WIDTH), initializer="identity", name="square")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count", trainable=False)
        self.loss_of = INNER_LOSSES[name]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, weight = data[0], keras.ops.convert_to_tensor(self.weight)
        self.count.assign(self.count + 1)
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.dense(x), x, tf.identity(weight), keras.ops.convert_to_tensor(self.count) % 2 > 0)
        gradients = tape.gradient(loss, self.trainable_variables, unconnected_gradients="zero")
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def build(name, jit_compile):
    keras.utils.set_random_seed(1)
    model = Model(name)
    model.build((None, TIME, WIDTH))
    model.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
    return model


def train(model, sizes):
    losses = [model.train_on_batch(X[:rows], X[:rows]) for rows in sizes]
    return {"losses": losses, **state(model)}


def compare(name, jit_compile, towers, sizes=ROWS, **options):
    single = train(build(name, jit_compile), sizes)
    model = on_towers(lambda: build(name, jit_compile), towers, **options)
    assert_close(train(model, sizes), single, 1e-5)
    return model


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", INNER_LOSSES)
def test_inner_losses(name):
    """The mean of all rows, and its gradient, for batches of 7, 22, 2, 1 and 5 rows; no tower gets another's rows."""
    model = compare(name, False, some(3, 5))
    assert "computes that op whole" not in str(model.towers.explain((X, X)))


BY_XLA = [name for name in INNER_LOSSES if name != "branch_in_a_loop"]  # that XLA refuses on one device


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", some(["either", "of_keras", "settled"], BY_XLA))
def test_inner_losses_by_xla(name):
    """By XLA, which compiles a program for each tower's number of rows: one, too; one device's XLA refuses that."""
    compare(name, True, 2, sizes=[7, 22, 2])


@pytest.mark.parametrize("name", some(["of_keras"], INNER_LOSSES))
def test_inner_losses_of_shards(name):
    """Each shard has its own number of rows, also those of one tower."""
    compare(name, False, 2, shards=5)
