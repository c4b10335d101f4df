"""Names and methods that a user's model has of its own: they stay, and are used on towers."""

import logging

import keras
import numpy as np
import pytest
from parity import assert_close, data

import ncclsync
from ncclsync import nccl_parallel, towers_of

X, Y = data(20)


class TwoTowers(keras.Model):
    """A retrieval model, which calls its two halves towers."""

    def __init__(self):
        super().__init__()
        self.towers = [keras.layers.Dense(3), keras.layers.Dense(3)]
        self.head = keras.layers.Dense(Y.shape[-1] if Y.ndim > 1 else 1)

    def call(self, x):
        """Join both."""
        return self.head(keras.ops.concatenate([tower(x) for tower in self.towers], -1))


class TowersAsProperty(TwoTowers):
    """The same by a property, which has no setter."""

    def __init__(self):
        keras.Model.__init__(self)
        self.halves = [keras.layers.Dense(3), keras.layers.Dense(3)]
        self.head = keras.layers.Dense(1)

    towers = property(lambda self: tuple(self.halves))


def built(kind, **options):
    """A compiled model of a class; on two towers, unless `options` are None."""

    def build():
        keras.utils.set_random_seed(1)
        model = kind()
        model.compile("sgd", "mse")
        return model

    return build() if options.get("towers") == 0 else nccl_parallel(**{"towers": 2, **options})(build)()


@pytest.mark.parametrize("kind", [TwoTowers, TowersAsProperty])
def test_a_models_own_towers_stay(kind, caplog):
    """A model that calls its halves towers trains as on one device; `towers_of` returns the Towers."""
    x, y = X, np.ones((20, 1), "float32")
    with caplog.at_level(logging.WARNING, "ncclsync"):
        model = built(kind)
    assert [len(model.towers), *map(type, model.towers)] == [2, keras.layers.Dense, keras.layers.Dense]
    towers = towers_of(model)
    assert isinstance(towers, ncclsync.Towers) and len(towers) == 2
    assert "ncclsync.towers_of(model) returns the Towers" in caplog.text
    timeline = ncclsync.NoiseScale()
    fitted = model.fit(x, y, batch_size=10, shuffle=False, verbose=0, callbacks=[timeline])
    alone = built(kind, towers=0)
    assert_close(fitted.history["loss"], alone.fit(x, y, batch_size=10, shuffle=False, verbose=0).history["loss"])
    assert_close(model.get_weights(), alone.get_weights())
    assert towers.divergence() == 0.0
    with pytest.raises(ValueError, match="has <Towers 2"):
        nccl_parallel(towers=2)(lambda: model)()


def test_towers_of_a_plain_model():
    """There are none."""
    assert towers_of(keras.Sequential()) is None
