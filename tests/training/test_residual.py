"""`zero_last_gamma`: the blocks it finds, by the structure of the model."""

import keras
import numpy as np
import pytest

from ncclsync import zero_last_gamma

layers = keras.layers


def branch(x, count, name, end=None):
    """`count` convolutions with their normalisation, and what ends the branch."""
    for i in range(count):
        x = layers.Conv2D(4, 3, padding="same")(x)
        x = layers.BatchNormalization(name=f"{name}_{i}")(x)
    return x if end is None else end(x)


def model_of(*joins):
    """A functional model in which each join is a function of what the one before it gives."""
    x = inputs = keras.Input((8, 8, 4))
    for join in joins:
        x = layers.ReLU()(join(x))
    return keras.Model(inputs, x)


def names(model):
    return [layer.name for layer in zero_last_gamma(model)]


def test_blocks_are_the_identity():
    """An identity, a projection that is normalised too, `+`, and dropout behind the normalisation."""
    model = model_of(
        lambda x: layers.Add()([branch(x, 2, "a"), x]),
        lambda x: layers.Add()([branch(x, 1, "projection"), branch(x, 2, "b")]),
        lambda x: x + branch(x, 2, "c"),
        lambda x: layers.Add()([x, branch(x, 1, "d", layers.Dropout(0.5))]),
    )
    assert names(model) == ["a_1", "b_1", "c_1", "d_0"]
    gammas = {layer.name: layer.gamma.numpy().max() for layer in model.layers if hasattr(layer, "gamma")}
    zeros = {name for name, gamma in gammas.items() if gamma == 0}
    assert zeros == {"a_1", "b_1", "c_1", "d_0"} and set(gammas.values()) == {0.0, 1.0}
    alone = model_of(lambda x: layers.Add()([branch(x, 2, "a"), x]))
    zero_last_gamma(alone)
    x = np.abs(np.random.default_rng(0).normal(size=(2, 8, 8, 4))).astype("float32")
    np.testing.assert_array_equal(alone(x, training=True), x)


@pytest.mark.parametrize(
    "join",
    [
        lambda x: layers.Add()([branch(x, 2, "a", layers.ReLU()), x]),  # gamma would get no gradient
        lambda x: layers.Add()([branch(x, 2, "a"), branch(x, 2, "b")]),  # no shortcut
        lambda x: layers.Add()([branch(x, 2, "a", layers.Conv2D(4, 1)), branch(x, 1, "b")]),
        lambda x: branch(x, 2, "a"),
    ],
)
def test_what_is_no_block(join):
    """None is found, and nothing is changed."""
    model = model_of(join)
    with pytest.raises(ValueError, match=r"Expected a functional model with residual blocks.*Received: 'functional"):
        zero_last_gamma(model)
    assert all(np.all(layer.gamma.numpy() == 1) for layer in model.layers if hasattr(layer, "gamma"))


def test_models_within_a_model():
    """A Sequential and a functional model inside; no Keras model is an error."""
    inner = model_of(lambda x: layers.Add()([branch(x, 2, "a"), x]))
    assert names(keras.Sequential([keras.Input((8, 8, 4)), inner, layers.Flatten()])) == ["a_1"]
    with pytest.raises(TypeError, match=r"Expected a keras.Model. Received: 3"):
        zero_last_gamma(3)


def test_resnet50():
    """The last normalisation of all 16 blocks of Keras' ResNet50, 4 of which have a projection."""
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=2)
    blocks = [(stage, block) for stage, count in ((2, 3), (3, 4), (4, 6), (5, 3)) for block in range(1, count + 1)]
    assert names(model) == [f"conv{stage}_block{block}_3_bn" for stage, block in blocks]
