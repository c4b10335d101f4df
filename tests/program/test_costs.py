"""What a step gathers is told, with its line and bytes. `tests/costs` has a table of programs."""

import logging
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data, on_towers

import ncclsync

HERE = pathlib.Path(__file__).name
X, _ = data(rows=30)


def contrastive(width, rows_alone=False):
    """A step whose loss compares all rows of the batch with each other; or each row with itself."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(width)])
    optimizer = keras.optimizers.SGD(0.01)

    def step(x):
        with tf.GradientTape() as tape:
            features = model(x, training=True)
            if rows_alone:
                loss = tf.reduce_mean(tf.reduce_sum(features * features, 1))
            else:
                loss = tf.reduce_mean(tf.matmul(features, features, transpose_b=True) ** 2)  # all pairs
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return step


def warnings_of(step, batch, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ncclsync"), ncclsync.Towers(3) as towers:
        towers.run(step, batch)
        explained = towers.explain()
    messages = [record.getMessage() for record in caplog.records]
    return [one for one in messages if one.startswith("Exact, but")], explained


def test_rows_that_are_gathered_are_listed(caplog):
    """By line, with the bytes of the batch's rows: 30 rows of 4 floats, beside gradients of 13 * 4."""
    told, explained = warnings_of(contrastive(4), X, caplog)
    (whole,) = explained.wholes
    assert (whole.op, whole.size_bytes) == ("MatMul", 30 * 4 * 4)
    assert f"{HERE}:" in whole.line and "# all pairs" in whole.line
    assert "gathered for" in str(explained) and "480" in str(explained)
    assert any(cut.what.endswith("all-gather: the rows of all towers") for cut in explained.cuts)
    (message,) = told
    assert "480 bytes" in message and "208 of the gradients" in message and "# all pairs" in message


def test_few_rows_beside_many_weights(caplog):
    """What moves fewer bytes than the gradients do is listed, without a warning of its bytes."""
    told, explained = warnings_of(contrastive(4), X[:6], caplog)
    assert explained.wholes[0].size_bytes == 6 * 4 * 4
    assert not [one for one in told if "bytes" in one]


def test_nothing_is_gathered_for_rows_by_themselves(caplog):
    """No row of the table, and not a word."""
    told, explained = warnings_of(contrastive(4, rows_alone=True), X, caplog)
    assert explained.wholes == () and told == []
    assert "gathered for" not in str(explained)


def test_much_that_is_computed_alike(caplog):
    """Sorted over the batch, and then many ops on that: all towers do them for all rows."""
    weight = tf.Variable(tf.ones([12, 64]))

    def step(x):
        with tf.GradientTape() as tape:
            ranked = tf.sort(tf.matmul(x, weight), axis=0)
            for _ in range(6):
                ranked = tf.cumsum(tf.sort(ranked, axis=0), axis=0) / 10.0
            loss = tf.reduce_mean(ranked)
        weight.assign_sub(0.001 * tape.gradient(loss, weight))
        return loss

    (message,) = warnings_of(step, X[:4], caplog)[0]
    assert "computed alike on all towers" in message and f"{HERE}:" in message


@pytest.mark.slow
def test_an_application_reduces_its_gradients():
    """A model of keras.applications: gradients, metrics and moving averages, and no rows."""

    def build():
        model = keras.applications.ResNet50V2(weights=None, input_shape=(32, 32, 3), classes=10)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    model = on_towers(build, 2)
    explained = model.towers.explain(8)
    assert explained.wholes == ()
    assert not [cut.what for cut in explained.cuts if "gather" in cut.what]
    trained = [row for row in explained.variables if row.bucket and row.role == "same"]
    assert len(trained) >= len(model.trainable_variables)
    reduced = sum(cut.size_bytes for cut in explained.cuts if cut.what.startswith("gradients"))
    assert reduced == sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
