"""A fault of ncclsync's own costs time, no numbers: an op is made whole, or the step; a warning names the line."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from parity import assert_close, assert_towers_agree, on_towers

import ncclsync
from ncclsync.program import cut
from ncclsync.program.conversion import Conversions
from ncclsync.semantics import axes, rules
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.placing import Refused

X = np.random.default_rng(0).normal(size=(7, 4, 3)).astype("float32")
Y = np.arange(7) % 3


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    """As users have it."""
    monkeypatch.delenv("NCCLSYNC_FAULTS")


def fails(*_, **__):
    raise IndexError("tuple index out of range")


def step(x):
    """Return what rules of many families have placed, in a loop, too."""
    w = tf.ones([3, 2])
    first = tf.nn.softmax(tf.tanh(tf.reshape(x, [-1, 3]) @ w))  # [rows * 4, 2]
    rows = tf.transpose(tf.reshape(first, [tf.shape(x)[0], 4, 2]), [0, 2, 1])
    pairs = tf.einsum("bij,bjk->bik", rows, x)
    top, places = tf.math.top_k(pairs[:, 0])
    picked = tf.gather(pairs, tf.argmax(top, 0) % 2, axis=1)
    end = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.concat([y[:, 1:], y[:, :1] * 2], 1)), [0, rows])[1]
    return (
        tf.reduce_mean(picked, 0),
        tf.cast(tf.reduce_max(places), tf.float32),
        tf.reduce_sum(end) / tf.reduce_sum(top),
    )


def test_all_rules(monkeypatch, caplog):
    """The ops are whole, and each line is named."""
    for table in (rules.RULES, rules.LINEAR, rules.NUMBERED):
        for kind in [*table]:
            monkeypatch.setitem(table, kind, fails)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), step(X))
    assert "Reshape, at " in caplog.text and "report this line" in caplog.text and "the whole batch" not in caplog.text


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", ["TopKV2", "Tanh", "MatMul", "Reshape", "Transpose", "Einsum", "ConcatV2", "Sum"])
def test_a_rule(kind, monkeypatch, caplog):
    """So is one op, wherever it is: its function is whole where it has one."""
    monkeypatch.setitem(rules.RULES, kind, fails)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), step(X))
    assert f"{kind}, at {__file__}" in caplog.text


def model():
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input((4, 3)),
            layers.Masking(),
            layers.GRU(4, dropout=0.3, seed=1),
            layers.BatchNormalization(),
            layers.Dropout(0.4, seed=2),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(clipnorm=1.0), loss, weighted_metrics=["accuracy"])
    return made


def trained(made):
    weights = np.linspace(0, 1, 7).astype("float32")
    logs = [made.train_on_batch(X[:rows], Y[:rows], weights[:rows], return_dict=True) for rows in (7, 2)]
    return logs, made.get_weights(), made.predict(X, verbose=0), made.evaluate(X, Y, sample_weight=weights, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, place",
    [
        ({"exact": True}, (Axes, "_inferred")),
        ({"exact": True}, (Axes, "learn")),
        ({"exact": True}, (cut, "schedule")),
        ({"exact": True, "shard_optimizer": True}, (cut, "schedule")),
        ({"shards": 3}, (cut, "schedule")),
    ],
)
def test_steps(options, place, monkeypatch, caplog):
    """The step is whole if whatever it needs cannot be had otherwise."""
    owner, name = place
    monkeypatch.setattr(owner, name, fails_once(getattr(owner, name)) if owner is cut else fails)
    made = on_towers(model, 3, **options)
    found = trained(made)
    assert_towers_agree(made)
    if "exact" in options:
        assert_close(found, trained(model()))
    assert "IndexError: tuple index out of range" in caplog.text and "report this line" in caplog.text


def test_composite_inputs(monkeypatch, caplog):
    """Sparse and ragged batches, too, are computed whole."""
    monkeypatch.setattr(cut, "schedule", fails_once(cut.schedule))
    sparse = tf.sparse.from_dense(np.where(X[:, :, 0] > 0, X[:, :, 0], 0))
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(12.0), [3, 0, 1, 2, 0, 5, 1])

    def both(batch):
        product = tf.sparse.sparse_dense_matmul(batch[0], tf.ones([4, 2]))
        return product * tf.reduce_sum(batch[1], 1)[:, None], tf.reduce_max(product)

    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(both, (sparse, ragged)), both((sparse, ragged)))
    assert "the whole batch" in caplog.text


def test_a_tensor_that_cannot_be_sent(monkeypatch, caplog):
    """The whole batch is computed, and the op's line is named."""
    made_whole, refused = Conversions._made_whole, []

    def refusing(self, *given):
        if refused:
            return made_whole(self, *given)
        refused.append(given)
        raise Refused("needs rows, which cannot be sent")

    monkeypatch.setattr(Conversions, "_made_whole", refusing)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(tf.math.cumsum, X), tf.math.cumsum(X))
    assert "every tower computes the whole batch: Cumsum, at " in caplog.text and "Move it out" in caplog.text


def test_shapes_that_a_fault_has_refined(monkeypatch, caplog):
    """The whole batch is computed by a new trace, of which nothing is refined."""
    monkeypatch.setattr(axes, "_may_lose_axes", lambda *_: False)

    def norm(x):
        return tf.norm(x[:, 0], ord=2, axis=[0, 1])

    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(norm, X), norm(X))
    assert "the whole batch" in caplog.text and "report this line" in caplog.text


def fails_once(function):
    calls = []

    def failing(*given):
        calls.append(given)
        return fails() if len(calls) == 1 else function(*given)

    return failing


def test_what_would_be_too_large(monkeypatch, caplog):
    """A step of which towers would run many times as many ops is named, and every tower computes the whole batch."""
    monkeypatch.setattr(cut, "_MOST_FOLD", 0)
    monkeypatch.setattr(cut, "_MOST_MORE", 20)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), step(X))
    assert f"While, at {__file__}" in caplog.text and "the whole batch" in caplog.text


def test_no_way_out(monkeypatch):
    """If not even the whole batch can be computed, an error says so, and what to do."""
    monkeypatch.setattr(cut, "schedule", fails)
    with ncclsync.Towers(2) as towers, pytest.raises(ncclsync.NcclSyncError, match=r"IndexError.*report this line"):
        towers.run(tf.tanh, X)


def test_own_tests_hear_of_faults(monkeypatch):
    """In them a fault is raised."""
    monkeypatch.setenv("NCCLSYNC_FAULTS", "raise")
    monkeypatch.setitem(rules.RULES, "Tanh", fails)
    with ncclsync.Towers(2) as towers, pytest.raises(IndexError, match="tuple index"):
        towers.run(tf.tanh, X)
