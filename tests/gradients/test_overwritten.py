"""Variables that take their gradient as their new value, as the scales of float8 do."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree

import ncclsync

X = np.random.default_rng(0).normal(size=(11, 6)).astype("float32")
Y = np.arange(11) % 3


class Top(keras.layers.Layer):
    """Keep the largest magnitude of the batch, and the sum of all, as gradients."""

    def build(self, shape):
        self.top, self.sum = (self.add_weight(shape=(), initializer="zeros", name=name) for name in ("top", "sum"))
        for weight in (self.top, self.sum):
            weight.overwrite_with_gradient, weight.autocast = True, False

    def call(self, x):
        @tf.custom_gradient
        def same(x, top, total):
            return x, lambda upstream: (upstream, tf.reduce_max(tf.abs(x)), tf.reduce_sum(x))

        return same(x, tf.convert_to_tensor(self.top), tf.convert_to_tensor(self.sum))


def model_of(optimizer, layer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layer(), keras.layers.Dense(3)])
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def float8():
    return keras.layers.Dense(8, dtype="float8_from_float32")


def sgd(**arguments):
    return lambda: keras.optimizers.SGD(0.1, **arguments)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layer", [Top, float8])
@pytest.mark.parametrize(
    "optimizer, options",
    [
        pytest.param(sgd(), {}, id="plain"),
        pytest.param(sgd(momentum=0.9, clipnorm=1.0), {}, id="clipped"),
        pytest.param(sgd(momentum=0.9), {"shard_optimizer": True}, id="sharded"),
        pytest.param(sgd(gradient_accumulation_steps=2), {}, id="accumulated"),
        pytest.param(scaled, {}, id="scaled"),
        pytest.param(sgd(), {"shards": 5}, id="shards"),
        pytest.param(sgd(), {"compression": "bfloat16"}, id="compressed"),
    ],
)
def test_as_on_one_device(layer, optimizer, options):
    """Their gradients are the batch's whatever happens to other gradients."""
    tolerance = 1e-2 if "compression" in options or layer is float8 else 1e-4
    states = []
    for towers in (0, 3):
        build = lambda: model_of(optimizer, layer)  # noqa: E731
        model = ncclsync.nccl_parallel(towers=towers, **options)(build)() if towers else build()
        losses = [float(model.train_on_batch(X[i:], Y[i:])) for i in range(4)]
        states.append([losses, [w.numpy() for w in model.weights]])
        if towers:
            assert_towers_agree(model)
    assert_close(states[1], states[0], tolerance)
    if layer is Top and "compression" in options:
        np.testing.assert_allclose([model.layers[0].top, model.layers[0].sum], [np.abs(X[3:]).max(), X[3:].sum()], 1e-5)
