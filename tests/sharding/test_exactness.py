"""What a model's objects tell of why it cannot train on towers exactly as on one device, and no more."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from ncclsync.sharding.exactness import Inexact, find_inexact


def compiled(*parts, loss="mse", **arguments):
    """A compiled Sequential of these layers, built if they begin with an Input."""
    model = keras.Sequential(parts)
    model.compile("sgd", loss=loss, **arguments)
    return model


def sole(model, **arguments) -> Inexact:
    """The only finding."""
    (found,) = find_inexact(model, **arguments)
    return found


class Held(keras.layers.Layer):
    """A layer that holds others in a list and a dictionary, and does nothing."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = [{"one": layer} for layer in inner]

    def call(self, x):
        return x


class Total(keras.metrics.Metric):
    """A metric whose state is declared with any aggregation."""

    def __init__(self, aggregation, dtype="float32"):
        super().__init__(name="grand")
        self.total = self.add_variable((), "zeros", dtype=dtype, aggregation=aggregation, name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.sum(y_pred), self.total.dtype))

    def result(self):
        return self.total


def attention(**arguments):
    """A model of self-attention, whose dropout is a layer made when it is built."""
    x = keras.Input((5, 3))
    model = keras.Model(x, layers.MultiHeadAttention(1, 2, **arguments)(x, x))
    model.compile("sgd", loss="mse")
    return model


INPUT = keras.layers.InputLayer((4,))
IMAGE = keras.layers.InputLayer((8, 8, 3))
SERIES = keras.layers.InputLayer((5, 3))

FOUND = {
    "batch normalisation": (lambda: compiled(INPUT, layers.BatchNormalization(name="bn")), "/bn'", "exact=True"),
    "in a nested model": (
        lambda: compiled(INPUT, keras.Sequential([INPUT, layers.BatchNormalization(name="bn")])),
        "bn'",
        "synchronized=True",
    ),
    "in lists and dictionaries": (lambda: compiled(INPUT, Held(layers.Dropout(0.5, name="d"))), "'d'", "exact=True"),
    "in a wrapper": (lambda: compiled(SERIES, layers.TimeDistributed(layers.Dropout(0.5))), "Dropout", "exact=True"),
    "dropout": (lambda: compiled(INPUT, layers.Dropout(0.1, seed=1)), "Dropout 'dropout", "exact=True"),
    "frozen dropout, which draws all the same": (
        lambda: compiled(INPUT, layers.Dense(2), layers.Dropout(0.1, trainable=False)),
        "Dropout",
        "exact=True",
    ),
    "noise": (lambda: compiled(INPUT, layers.GaussianNoise(0.1)), "GaussianNoise", "exact=True"),
    "augmentation": (lambda: compiled(IMAGE, layers.RandomFlip()), "RandomFlip", "exact=True"),
    "augmentation made of others": (lambda: compiled(IMAGE, layers.RandAugment()), "RandAugment", "exact=True"),
    "dropout of a recurrent layer": (lambda: compiled(SERIES, layers.LSTM(2, dropout=0.2)), "LSTMCell", "exact=True"),
    "its recurrent dropout": (lambda: compiled(SERIES, layers.GRU(2, recurrent_dropout=0.2)), "GRUCell", "exact=True"),
    "dropout of attention": (lambda: attention(dropout=0.1), "Dropout", "exact=True"),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    """Each is found, alone, by name, with its remedy."""
    build, where, remedy = FOUND[name]
    finding = sole(build())
    assert where in finding.where
    assert remedy in finding.remedy
    assert str(finding) == f"{finding.where}: {finding.reason}. Remedy: {finding.remedy}"


def frozen():
    """A model that is frozen as a whole."""
    model = compiled(INPUT, layers.BatchNormalization(), layers.Dropout(0.5))
    model.trainable = False
    return model


EXACT = {
    "dense": lambda: compiled(INPUT, layers.Dense(3), metrics=["mae", keras.metrics.AUC()]),
    "frozen batch normalisation": lambda: compiled(INPUT, layers.BatchNormalization(trainable=False), layers.Dense(1)),
    "synchronised": lambda: compiled(INPUT, layers.BatchNormalization(synchronized=True)),
    "other normalisations": lambda: compiled(INPUT, layers.LayerNormalization(), layers.GroupNormalization(2)),
    "rate 0": lambda: compiled(SERIES, layers.Dropout(0.0), layers.GaussianNoise(0.0), layers.LSTM(2)),
    "attention without dropout": attention,
    "not compiled": lambda: keras.Sequential([INPUT, layers.BatchNormalization(), layers.Dropout(0.5)]),
    "frozen as a whole": frozen,
    "losses that are given the whole batch": lambda: compiled(
        INPUT, loss=[keras.losses.Circle(), "dice", keras.losses.tversky]
    ),
    "losses by output, one of them none": lambda: compiled(INPUT, loss=[keras.losses.Huber(), None]),
    "a metric that is a sum": lambda: compiled(INPUT, layers.Dense(1), metrics=[Total("sum")]),
    "a metric whose sum only the trace tells": lambda: compiled(INPUT, layers.Dense(1), metrics=[Total("none")]),
    "a metric that counts": lambda: compiled(INPUT, layers.Dense(1), metrics=[Total("none", "int32")]),
    "a metric with a variable of TensorFlow's": lambda: compiled(
        INPUT, layers.Dense(1), metrics=[keras.metrics.SparseTopKCategoricalAccuracy()]
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_no_false_alarm(name):
    """What trains exactly, or not at all, is not reported."""
    assert find_inexact(EXACT[name]()) == ()


def test_exact_random():
    """Random layers are exact then, those too that mix samples with each other."""
    for layer, inputs in ((layers.Dropout(0.5), INPUT), (layers.MixUp(), IMAGE), (layers.CutMix(), IMAGE)):
        assert find_inexact(compiled(inputs, layer), exact_random=True) == ()


def test_many_layers_are_one_finding():
    """Layers of one class with one cause are named together, the first three by name."""
    parts = [layers.BatchNormalization(name=f"bn{i}") for i in range(5)]
    finding = sole(compiled(INPUT, *parts))
    assert finding.where.startswith("BatchNormalization '")
    assert finding.where.endswith("bn2' and 2 more")
    assert len(find_inexact(compiled(INPUT, *parts, layers.Dropout(0.5)))) == 2


def test_nothing_is_created():
    """An unbuilt model stays unbuilt, and a built one keeps its variables."""
    model = compiled(layers.BatchNormalization(), layers.Dense(1))
    assert len(find_inexact(model)) == 1
    assert not model.built
    with tf.Graph().as_default():
        assert len(find_inexact(model)) == 1
