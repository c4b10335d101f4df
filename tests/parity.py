"""Shared by the parity tests: small models, data, and the comparison of N towers with one device."""

import keras
import numpy as np

from ncclsync import nccl_parallel

TOWERS = (1, 2, 3, 4, 8)


def data(rows=61, features=12, classes=5, seed=0):
    """Float inputs of shape [rows, features] and int labels of shape [rows]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, features)).astype("float32"), rng.integers(0, classes, rows)


def mlp(optimizer=None, **compile_arguments):
    """A built Sequential classifier: 12 features, 5 classes, logits."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)]
    )
    compile_arguments.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    compile_arguments.setdefault("metrics", ["accuracy"])
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **compile_arguments)
    return model


def on_towers(factory, towers, **arguments):
    """Build a factory's model on CPU towers."""
    return nccl_parallel(towers=towers, **arguments)(factory)()


def assert_close(actual, expected, tolerance=1e-5, what=""):
    """Compare nested results to a tolerance relative to the largest magnitude of each array."""
    for i, (one, other) in enumerate(zip(flat(actual), flat(expected), strict=True)):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape, f"{what}[{i}]: {one.shape} is not {other.shape}"
        scale = max(1.0, np.max(np.abs(other), initial=0.0))
        np.testing.assert_allclose(one, other, atol=tolerance * scale, rtol=tolerance, err_msg=f"{what}[{i}]")


def flat(structure):
    """The leaves of a nested result, dictionaries by key."""
    return keras.tree.flatten(structure)


def assert_towers_agree(model):
    """Every tower holds what tower 0 holds, to the bit."""
    assert model.towers.divergence() == 0.0
    for tower in range(len(model.towers)):
        for one, other in zip(model.towers.get_weights(tower), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
