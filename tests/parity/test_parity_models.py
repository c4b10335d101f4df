"""N towers train, evaluate and predict like one device: kinds of models."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan
from parity import TOWERS, assert_close, assert_towers_agree, data, mlp, on_towers
from thorough import some

import ncclsync

X, Y = data()


def cnn():
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Reshape((3, 4, 1)),
            keras.layers.Conv2D(4, 2, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2, padding="same"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def two_in_two_out():
    keras.utils.set_random_seed(3)
    left, right = keras.Input((12,), name="left"), keras.Input((12,), name="right")
    shared = keras.layers.Dense(8, activation="tanh")
    joined = keras.layers.Concatenate()([shared(left), shared(right)])
    outputs = {
        "label": keras.layers.Dense(5, activation="softmax", name="label")(joined),
        "value": keras.layers.Dense(1, name="value")(joined),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        "adam",
        loss={"label": "sparse_categorical_crossentropy", "value": "mse"},
        loss_weights={"label": 1.0, "value": 0.3},
        metrics={"label": ["accuracy"], "value": ["mae"]},
    )
    return model


class Residual(keras.Model):
    """Subclassed, unbuilt until it sees data."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(12, activation="relu")
        self.norm = keras.layers.LayerNormalization()
        self.last = keras.layers.Dense(5)

    def call(self, inputs, training=False):
        return self.last(self.norm(inputs + self.first(inputs)))


def subclassed():
    keras.utils.set_random_seed(4)
    model = Residual()
    model.compile("rmsprop", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


CASES = {
    "mlp": (mlp, X, Y),
    "cnn": (cnn, X, Y),
    "two_in_two_out": (two_in_two_out, {"left": X, "right": X[::-1].copy()}, {"label": Y, "value": X[:, :1]}),
    "subclassed": (subclassed, X, Y),
}


def train(model, x, y):
    """Everything that a user reads off a model, with batches that do not divide evenly."""
    history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "optimizer": [np.asarray(v) for v in model.optimizer.variables],
        "evaluate": model.evaluate(x, y, batch_size=23, verbose=0),
        "predict": model.predict(x, batch_size=9, verbose=0),
    }


@pytest.fixture(scope="module")
def alone():
    """What one device gives, computed once per model."""
    return {name: train(factory(), x, y) for name, (factory, x, y) in CASES.items()}


ALL = [(name, towers) for name in CASES for towers in TOWERS]
# The first model on any number of towers, the others on one, and on two other numbers in turn.
SAMPLE = [(name, towers) for i, (name, towers) in enumerate(ALL) if name == "mlp" or towers == 1 or i % 2]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), some(SAMPLE, ALL))
def test_trains_like_one_device(name, towers, alone):
    """Weights, optimizer state, losses, metrics and predictions are one device's; all towers agree."""
    factory, x, y = CASES[name]
    model = on_towers(factory, towers)
    result = train(model, x, y)
    for key, expected in alone[name].items():
        if towers == 1 and not model.towers.layout.divided:
            for one, other in zip(keras.tree.flatten(result[key]), keras.tree.flatten(expected), strict=True):
                np.testing.assert_array_equal(one, other)
        assert_close(result[key], expected, what=key)
    assert_towers_agree(model)


@pytest.fixture(scope="module")
def gan_alone():
    return train_gan(gan())


def train_gan(model):
    noise = np.random.default_rng(7).standard_normal((len(X), 4)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((X, noise)).batch(20)
    history = model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    return {"weights": model.get_weights(), "history": history.history}


@pytest.mark.slow
@pytest.mark.parametrize("towers", some((4, 8), TOWERS[1:]))  # on 2 and 3: `test_smoke`
def test_custom_train_step_with_two_optimizers(towers, gan_alone):
    """A GAN is three segments; the discriminator's update is seen by the generator's step."""
    model = on_towers(gan, towers)
    result = train_gan(model)
    assert_close(result["weights"], gan_alone["weights"], what="weights")
    assert_close(result["history"], gan_alone["history"], what="history")
    assert_towers_agree(model)


@pytest.mark.slow
def test_what_only_xla_computes():
    """Keras has XLA compile a grouped Conv3D, for which TensorFlow has no kernel on the CPU."""

    def build_model():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Conv3D(4, 2, groups=2)])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    x = np.random.default_rng(0).random((4, 3, 3, 3, 4)).astype("float32")
    plain, parallel = build_model(), ncclsync.nccl_parallel(towers=2)(build_model)()
    for model in (plain, parallel):
        model.fit(x, np.ones((4, 2, 2, 2, 4), "float32"), verbose=0)
    for one, other in zip(plain.get_weights(), parallel.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
