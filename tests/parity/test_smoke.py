"""Four kinds of model on 2 and 3 towers, in seconds: the least that every run of the tests shows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan
from parity import Case, check, choose_as_on_gpus, data, fit, mlp

X, Y = data()
TOKENS = np.random.default_rng(1).integers(1, 30, (61, 6))
NOISE = np.random.default_rng(7).standard_normal((61, 4)).astype("float32")


def cnn_with_batch_norm():
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Reshape((3, 4, 1)),
            keras.layers.Conv2D(4, 2, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def embedding():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int64"),
            keras.layers.Embedding(30, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(5),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# Batches of 20, 20, 20 and 1 row.
CASES = {
    "mlp": Case(mlp, fit(X, Y, epochs=2, validation_data=(X, Y))),
    "cnn_with_batch_norm": Case(
        cnn_with_batch_norm, fit(X, Y, epochs=2, validation_data=(X, Y)), options={"exact": ("batch_norm",)}
    ),
    "embedding": Case(embedding, fit(TOKENS, Y, epochs=2)),
    "gan": Case(
        gan, fit(tf.data.Dataset.from_tensor_slices((X, NOISE)).batch(20), batch_size=None, epochs=2, shuffle=None)
    ),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_smoke(name, towers):
    """Weights, optimizer state, losses and metrics are one device's; all towers agree."""
    check(CASES[name], towers)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_smoke_by_xla(name, monkeypatch):
    """The same where XLA compiles, as Keras has it by default on GPUs; `NCCLSYNC_JIT=1` does so for all tables."""
    choose_as_on_gpus(monkeypatch)
    assert mlp().jit_compile
    check(CASES[name], 2)
