"""What a step loses is told, with its line, bytes and share. `tests/costs` has a table of programs."""

import importlib
import logging
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data, on_towers

import ncclsync
from ncclsync.towers import step

HERE = pathlib.Path(__file__).name
X, _ = data(rows=30)


def contrastive(width, rows_alone=False):
    """A step whose loss compares all rows of the batch with each other; or each row with itself."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(width)])
    optimizer = keras.optimizers.SGD(0.01)

    def training(x):
        with tf.GradientTape() as tape:
            features = model(x, training=True)
            if rows_alone:
                loss = tf.reduce_mean(tf.reduce_sum(features * features, 1))
            else:
                loss = tf.reduce_mean(tf.matmul(features, features, transpose_b=True) ** 2)  # all pairs
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return training


def warnings_of(training, batch, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ncclsync"), ncclsync.Towers(3) as towers:
        towers.run(training, batch)
        explained = towers.explain()
    messages = [record.getMessage() for record in caplog.records]
    return [one for one in messages if one.startswith("Exact, but")], explained


def factorised(x, weight):
    """The factor of a matrix of rows by rows: all towers need all of it."""
    features = tf.matmul(x, weight)
    products = tf.matmul(features, features, transpose_b=True)
    return tf.linalg.cholesky(products + 100.0 * tf.eye(tf.shape(x)[0]))  # the factor


def with_factor():
    weight = tf.Variable(tf.ones([12, 16]))

    def training(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(factorised(x, weight))
        weight.assign_sub(0.001 * tape.gradient(loss, weight))
        return loss

    return training


def test_rows_that_reach_all_towers_are_listed(caplog):
    """By line, with the bytes of the batch's rows: 30 rows of 4 floats are gathered, and their gradient is reduced."""
    told, explained = warnings_of(contrastive(4), X, caplog)
    (whole,) = explained.wholes
    assert (whole.op, whole.size_bytes) == ("MatMul", 2 * 30 * 4 * 4)
    assert f"{HERE}:" in whole.line and "# all pairs" in whole.line
    assert "rows of all for" in str(explained) and "960" in str(explained)
    assert any(cut.what.endswith("all-gather: the rows of all towers") for cut in explained.cuts)
    assert told == []


def test_nothing_is_gathered_for_rows_by_themselves(caplog):
    """No row of the table, and no warning: that each tower starts all ops on one device's cores is explained."""
    told, explained = warnings_of(contrastive(4, rows_alone=True), X, caplog)
    assert explained.wholes == () and told == []
    assert "rows of all for" not in str(explained)
    price = r"These towers share one device's cores, .* 1\.\d times .* they lose \d\d% by starting ops on each tower"
    assert re.match(price, explained.price) and explained.price in " ".join(str(explained).split())


def test_weights_that_each_tower_updates(caplog):
    """Many weights beside few rows: no warning, and a way out."""
    told, explained = warnings_of(contrastive(20_000, rows_alone=True), X[:6], caplog)
    assert told == [] and "% by updating all weights on each tower" in explained.price
    assert "shard_optimizer=True" in explained.price


def test_much_that_is_received(caplog):
    """Rows of a wide contrastive loss: one line for the loss and its gradient, bytes, a share, a way out."""
    (message,) = warnings_of(contrastive(512), np.tile(X, (34, 1)), caplog)[0]
    assert re.match(r"Exact, but an estimated \d+% of a step's time on 3 (GPUs|CPU towers) is lost", message)
    line = re.search(rf"at \S*{HERE}:\d+ \(loss = .*# all pairs\): MatMul, ([\d,]+) bytes .* \((\d+\.\d)%\)", message)
    assert line is not None and message.count(f"{HERE}:") == 1
    assert line[1] == f"{2 * 1020 * 512 * 4:,}"  # gathered once, and reduced once
    assert float(line[2]) > 5 and "Instead, compare each row with fewer others" in message


@pytest.mark.slow
def test_much_that_is_computed_alike(caplog):
    """The factor of a matrix of rows by rows, and its gradient; of few rows it is no warning."""
    (message,) = warnings_of(with_factor(), np.tile(X, (40, 1)), caplog)[0]
    assert re.search(r"# the factor\): Cholesky, [\d,]+ bytes .*, every tower computes it for all rows", message)
    assert "tape.gradient" not in message and "Instead, factorise a matrix of features by features" in message
    assert warnings_of(with_factor(), X, caplog)[0] == []


class Ranked(keras.layers.Layer):
    def call(self, inputs):
        return keras.ops.sort(inputs, axis=0)  # of all rows


def trained(layer, caplog, kind=keras.Model, loss="mse", metrics=None):
    """What training by `fit` warns of."""

    def build():
        inputs = keras.Input((12,))
        outputs = keras.layers.Dense(1)(layer(keras.layers.Dense(8)(inputs)))
        model = kind(inputs, outputs)
        model.compile("sgd", loss, metrics=metrics)
        return model

    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        on_towers(build, 2).fit(X, np.ones((len(X), 1)), batch_size=len(X), verbose=0)
    return [message for record in caplog.records if (message := record.getMessage()).startswith("Exact, but")]


@pytest.mark.slow
def test_a_layer_of_the_users_own_has_a_line(caplog, monkeypatch):
    """Of its `call`, not of `fit`."""
    monkeypatch.setattr(step, "MOST_LOST", 0.0)
    (message,) = trained(Ranked(), caplog)
    assert "# of all rows): " in message and ".fit(" not in message and "keras" not in message.split("(return")[0]
    assert "Instead, sort, rank or add up along another axis than the batch's" in message


def test_a_layer_of_keras_is_named(caplog, monkeypatch):
    """No line of the user's own made its ops: neither `fit`'s nor Keras' line is named."""
    monkeypatch.setattr(step, "MOST_LOST", 0.0)
    (message,) = trained(lambda inputs: keras.ops.sort(inputs, axis=0), caplog)
    assert "at the layer functional" in message and "/sort" in message and ".py" not in message


def ranked_loss(y, prediction):
    ranked = tf.sort(prediction, axis=0)  # in the loss
    return tf.reduce_mean((ranked - y) ** 2)


def ranked_metric(y, prediction):
    return tf.reduce_mean(tf.sort(prediction, axis=0)[:1] - y)  # in the metric


class Ranking(keras.metrics.Mean):
    def update_state(self, y, prediction, sample_weight=None):
        super().update_state(tf.sort(prediction, axis=0)[:1])  # in the metric's class


class OwnStep(keras.Model):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.sort(self(x), axis=0) - y) ** 2)  # in the step
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


LAMBDA = keras.layers.Lambda(lambda x: tf.sort(x, axis=0))  # in the lambda


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "where, parts",
    [
        ("loss", {"loss": ranked_loss}),
        ("metric", {"metrics": [ranked_metric]}),
        ("metric's class", {"metrics": [Ranking()]}),
        ("step", {"kind": OwnStep}),
        ("lambda", {"layer": LAMBDA}),
    ],
)
def test_each_part_of_the_users_own_has_a_line(caplog, monkeypatch, where, parts):
    """And the gradient that of what it is the gradient of."""
    monkeypatch.setattr(step, "MOST_LOST", 0.0)
    (message,) = trained(parts.pop("layer", lambda x: x), caplog, **parts)
    assert f"# in the {where}): " in message and ".fit(" not in message and message.count(".py") == 1, message


def test_a_line_of_an_installed_library_is_not_named(caplog, monkeypatch, tmp_path):
    """But the line of the step that calls it."""
    monkeypatch.setattr(step, "MOST_LOST", 0.0)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "ranks_of_rows.py").write_text(
        "import tensorflow as tf\ndef ranked(x):\n    return tf.sort(x, axis=0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    ranked = importlib.import_module("ranks_of_rows").ranked
    weight = tf.Variable(tf.ones([12, 16]))

    def training(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(ranked(tf.matmul(x, weight)) ** 2)  # by the library
        weight.assign_sub(0.001 * tape.gradient(loss, weight))
        return loss

    (message,) = warnings_of(training, X, caplog)[0]
    assert "# by the library): " in message and "ranks_of_rows" not in message


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
