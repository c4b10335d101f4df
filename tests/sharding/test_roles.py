"""Which variables are random state: those from which a generator draws, whatever they are called."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close

import ncclsync
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.sharding.roles import Role, role_of

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.arange(11) % 3


class Apply(keras.layers.Layer):
    """Any function of the input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def train(towers, make, between=lambda: None, **options):
    """Three batches on so many towers (0: one device); losses and weights. `make` gives a first layer."""

    def factory():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), make(), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = ncclsync.nccl_parallel(towers=towers, **options)(factory)() if towers else factory()
    losses = []
    for _ in range(3):
        losses.append(float(model.train_on_batch(X, Y)))
        between()
    if towers:
        assert model.towers.divergence() == 0.0
    return [losses, *model.get_weights()], model


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["StateVar", "StateVariance", "seed_generator_state", "seed_generator_state_1"])
def test_a_weight_named_like_random_state(name):
    """It is a weight."""

    class Named(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(5,), initializer="ones", name=name)
            self.pair = self.add_weight(shape=(2,), dtype="int64", initializer="ones", trainable=False, name=name)

        def call(self, x):
            return x * self.scale * tf.cast(self.pair[1], tf.float32)

    (expected, _), (found, model) = train(0, Named), train(2, Named)
    assert_close(found, expected)
    assert role_of(tf_compat.backend_variable(model.layers[0].pair)) is Role.SAME


def owned():
    return keras.layers.Dropout(0.5, seed=4)


def in_a_closure():
    generator = keras.random.SeedGenerator(4, name="of_mine")
    return Apply(lambda x: x + keras.random.normal(tf.shape(x), seed=generator))


def of_tensorflow():
    generator = tf.random.Generator.from_seed(4)
    return Apply(lambda x: x + generator.normal(tf.shape(x)))


def of_a_given_variable():
    state = tf.Variable([7, 8, 9], dtype=tf.int64, name="mine")
    generator = tf.random.Generator(state=state, alg="philox")
    return Apply(lambda x: x + generator.uniform(tf.shape(x)))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("make", [owned, in_a_closure, of_tensorflow, of_a_given_variable])
def test_draws_of_rows(make, caplog):
    """Each tower draws its own, which a warning tells, and towers agree; with exact=True they draw one device's."""
    train(2, make)
    assert "draws other random numbers on each tower" in caplog.text and "exact=True draws one device" in caplog.text
    (expected, _), (found, _) = train(0, make), train(3, make, exact=True)
    assert_close(found, expected)


def noise_on_weights():
    generator = tf.random.Generator.from_seed(4)

    class Noisy(keras.layers.Dense):
        def call(self, x):
            return tf.matmul(x, self.kernel + generator.normal(self.kernel.shape))

    return Noisy(5, use_bias=False)


def coin_for_each_batch():
    generator = tf.random.Generator.from_seed(4)
    return Apply(lambda x: tf.where(generator.uniform([]) < 0.5, x, 2.0 * x))


def own_seed_without_generator():
    state = tf.Variable([4, 0], dtype=tf.int64)

    def draw(x):
        state.assign_add([0, 1])
        return x + tf.random.stateless_normal(tf.shape(x), state)

    return Apply(draw)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("make", [noise_on_weights, coin_for_each_batch, own_seed_without_generator])
@pytest.mark.parametrize("options", [{}, {"exact": True}])
def test_draws_that_are_exact_by_default(make, options, caplog):
    """What does not belong to rows, and what is drawn of the user's own seed, is one device's."""
    (expected, _), (found, _) = train(0, make), train(3, make, **options)
    assert_close(found, expected)
    assert "draws random numbers" not in caplog.text


def test_draws_of_a_step_that_does_not_train(caplog):
    """A prediction that draws, as where dropout is always on, is told, too; with exact=True it draws one device's."""

    def build():
        return keras.Sequential([keras.Input((5,)), in_a_closure()])

    plain, found = build(), []
    for exact in (True, False):
        model = ncclsync.nccl_parallel(towers=3, exact=exact)(build)()
        found.append(model.predict_on_batch(X))
    assert_close(found[0], plain.predict_on_batch(X))
    assert np.any(found[0] != found[1])
    assert caplog.text.count("Evaluation or prediction draws other random numbers on each tower") == 1
