"""Data sets of different batch sizes in one step: each tower has its rows of each, and the numbers are one device's."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, fit, on_towers, state

import ncclsync
from ncclsync import NcclSyncError, Towers
from ncclsync.sharding.shards import Grouped, grouped, is_marked, rows_of, ungrouped, units_of
from ncclsync.training.keras_model import step_of

X, LABELS = data(rows=26, features=5)
MORE, _ = data(rows=26 * 7, features=5, seed=1)


class FixMatch(keras.Model):
    """Learns of labelled samples, and of seven times as many others where it is sure of them; apart or in one call."""

    def __init__(self, joined):
        super().__init__()
        self.joined = joined
        self.inner = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(5)])

    def call(self, x):
        return self.inner(x)

    def train_step(self, batch):
        (x, y), more, *_ = batch
        with tf.GradientTape() as tape:
            if self.joined:
                sizes = [tf.shape(x)[0], tf.shape(more)[0]]
                logits, others = tf.split(self(tf.concat([x, more], 0)), sizes)
            else:
                logits, others = self(x), self(more)
            guess = tf.stop_gradient(tf.nn.softmax(others))
            losses = keras.losses.categorical_crossentropy(tf.one_hot(tf.argmax(guess, -1), 5), others, True)
            sure = tf.cast(tf.reduce_max(guess, -1) > 0.3, tf.float32)
            loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_mean(loss) + 0.5 * tf.reduce_mean(sure * losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "sure": tf.reduce_sum(sure), "rows": tf.shape(more)[0]}


def build(joined=False):
    keras.utils.set_random_seed(1)
    model = FixMatch(joined)
    model(X[:1])
    model.compile(keras.optimizers.Adam(0.01))
    return model


def both(ratio=7, drop=True):
    pairs = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(5, drop_remainder=drop)
    return tf.data.Dataset.zip(pairs, tf.data.Dataset.from_tensor_slices(MORE).batch(5 * ratio, drop_remainder=drop))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("joined", "towers"), [(False, 3), (True, 2)])
def test_labelled_and_unlabelled(joined, towers):
    """In fit and train_on_batch; the rows of each are on their towers alone where no op joins them."""
    model, alone = on_towers(lambda: build(joined), towers), build(joined)
    for one in (model, alone):
        one.history_of = [fit(both(), batch_size=None, shuffle=None, epochs=2)(one)["history"]]
        one.history_of += [one.train_on_batch((X[:n], LABELS[:n]), MORE[: k * n]) for n, k in ((4, 7), (1, 7), (6, 2))]
    assert_close([model.history_of, state(model)], [alone.history_of, state(alone)])
    assert_towers_agree(model)
    assert bool(model.towers.explain().wholes) == joined


SIZES = ((4, 9), (1, 9), (6, 2), (3, 26), (5, 1), (4, 4), (5, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("joined", "towers", "options"),
    [
        (False, 2, {}),
        (False, 5, {}),
        (True, 3, {}),
        (False, 2, {"shares": [3, 1]}),
        (False, 2, {"shards": 3}),
        (False, 3, {"health": ncclsync.Health(on_nonfinite="raise")}),
    ],
    ids=str,
)
def test_any_sizes(joined, towers, options):
    """Sizes that are no multiples, or equal by chance; data of open sizes, whose last batches have other ratios."""
    model, alone = on_towers(lambda: build(joined), towers, **options), build(joined)
    for one in (model, alone):
        one.history_of = [one.train_on_batch((X[:n], LABELS[:n]), MORE[:k]) for n, k in SIZES]
        one.history_of += [fit(both(3, drop=False), batch_size=None, shuffle=None, epochs=2)(one)["history"]]
    assert_close([model.history_of, state(model)], [alone.history_of, state(alone)])
    assert_towers_agree(model)


class Normalised(keras.Model):
    """Two parts of a batch, each convolved and normalised by itself, in every step; several steps for each call."""

    def __init__(self):
        super().__init__()
        layers = keras.layers
        first = [layers.Reshape([5, 1]), layers.Conv1D(4, 2), layers.BatchNormalization(), layers.Dropout(0.3, seed=1)]
        self.inner = keras.Sequential([*first, layers.Flatten(), layers.Dense(5)])

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def losses_of(self, data, training):
        (x, y), more, *_ = data
        first = keras.losses.sparse_categorical_crossentropy(y, self(x, training=training), from_logits=True)
        weight = tf.cast(tf.shape(more)[0], tf.float32) / tf.cast(tf.shape(x)[0], tf.float32)
        return tf.reduce_mean(first), weight * tf.reduce_mean(self(more, training=training) ** 2)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            first, second = self.losses_of(data, True)
            loss = first + second
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"first": first, "second": second}

    def test_step(self, data):
        return dict(zip(("first", "second"), self.losses_of(data, False), strict=True))

    def predict_step(self, data):
        return [self(part) for part in (data[0][0], data[1])]


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 3, 5])
def test_parts_in_every_step(towers):
    """Normalisation, one device's draws, `fit`, `evaluate` and `predict`, with data of known and of open sizes."""

    def train(make):
        def built():
            keras.utils.set_random_seed(1)
            model = Normalised()
            model(X[:1])
            model.compile(keras.optimizers.SGD(0.05), steps_per_execution=2)
            return model

        model, found = make(built), []
        for drop in (True, False):
            pairs = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(7, drop_remainder=drop)
            more = tf.data.Dataset.from_tensor_slices(MORE[:50]).batch(15, drop_remainder=drop)
            sets = tf.data.Dataset.zip(pairs, more)
            found += [model.fit(sets, verbose=0, epochs=2).history, model.evaluate(sets, verbose=0, return_dict=True)]
            found.append(model.predict(sets, verbose=0))
        return [found, state(model)]

    assert_close(train(lambda built: on_towers(built, towers, exact=True)), train(lambda built: built()))


def test_a_value_for_the_whole_batch(caplog):
    """It is a batch of one sample: exact, on one tower, with a warning that says what to write instead."""
    value = np.float32([[1, 2, 3, 4, 5]])

    def step(batch):
        x, value = batch
        return tf.reduce_mean(x * value), x * value, tf.reduce_sum(x, 0) / tf.cast(tf.shape(x)[0], tf.float32)

    def step_by_rows(batch):
        x, value = batch
        return step((x, value[:1]))

    expected = [np.mean(X * value), X * value, np.mean(X, 0)]
    with Towers(3) as towers:
        assert_close(towers.run(step_by_rows, (X, np.repeat(value, len(X), 0))), expected)
        assert "have nothing to do" not in caplog.text
        assert_close(towers.run(step, (X, value)), expected)
    assert "2 of 3 towers have nothing to do" in caplog.text and "as tf.repeat does" in caplog.text


OPS = {
    "broadcast": lambda x, more: (x * more, tf.reduce_sum(x * more), tf.reduce_mean(x * more)),
    "select": lambda x, more: tf.where(x > 0, x, more),
    "broadcast_to": lambda x, more: tf.broadcast_to(x, tf.shape(more)),
    "stack": lambda x, more: tf.stack([x, more]),
    "products": lambda x, more: tf.nn.softmax(tf.matmul(x, more, transpose_b=True)),
    "concat": lambda x, more: tf.concat([x, more, x], 0),
    "as many": lambda x, more: more[: tf.shape(x)[0]] * x,
    "tiles": lambda x, more: tf.tile(x, [tf.shape(more)[0] // tf.shape(x)[0], 1]) * more,
    "groups": lambda x, more: tf.reduce_sum(tf.reshape(more, [tf.shape(x)[0], -1, 5]), 1) * x,
    "statistics": lambda x, more: (tf.math.reduce_std(more, 0), tf.reduce_max(x, 0), tf.cumsum(more), tf.sort(more, 0)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OPS)
def test_ops_of_both(name):
    """One device's result, or a failure as there: a tower's rows alone may fit where the batch's do not.

    With sizes that are multiples, and others.
    """

    def outcome(run):
        try:
            return [np.asarray(one) for one in tf.nest.flatten(run())]
        except (ValueError, tf.errors.InvalidArgumentError, NcclSyncError):
            return "refused"

    for (n, k), count in (((1, 10), 2), ((2, 20), 2), ((6, 42), 4), ((4, 9), 3)):
        batch = X[:n], MORE[:k]
        expected = outcome(lambda batch=batch: tf.function(OPS[name])(*map(tf.constant, batch)))
        with Towers(count) as towers:
            found = outcome(lambda batch=batch, towers=towers: towers.run(lambda pair: OPS[name](*pair), batch))
        if "refused" in (expected, found):
            assert expected == found == "refused", (n, k)
        else:
            assert_close(found, expected)


def test_refused_with_both_names():
    """Sizes of tensors that are not dense: before anything runs, with the leaves and what to write."""
    ragged = tf.RaggedTensor.from_tensor(X[:9])
    with (
        Towers(2) as towers,
        pytest.raises(ValueError, match=r"\(9, 5\) of \['u'\]\[0\], \(4, 5\) of \['x'\]. .* tf.repeat"),
    ):
        towers.run(lambda batch: batch["x"], {"x": X[:4], "u": (ragged,)})
    model = on_towers(build, 2)
    before = model.get_weights()
    pairs = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(5)
    sets = tf.data.Dataset.zip(pairs, tf.data.Dataset.from_tensor_slices(MORE).ragged_batch(9))
    sets = sets.map(lambda pair, more: (pair, tf.RaggedTensor.from_tensor(more)))
    with pytest.raises((NcclSyncError, ValueError), match=r"^Expected .* 5 5 9 rows, of \[0\]\[0\], \[0\]\[1\], \[1\]"):
        model.fit(sets, verbose=0)
    assert_close(model.get_weights(), before)


def test_grouped_and_ungrouped():
    """Contiguous rows for each sample; of tensors and of specs, and back."""
    batch = {"x": tf.range(3), "u": (tf.reshape(tf.range(24), [6, 4]), None), "s": tf.constant(1.0)}
    made = grouped(batch)
    assert isinstance(made["u"][0], Grouped) and made["x"] is batch["x"] and is_marked(made, Grouped)
    np.testing.assert_array_equal(made["u"][0].rows, np.arange(24).reshape(3, 2, 4))
    assert grouped(made) is made and not is_marked(batch) and ungrouped(batch) is batch
    tf.nest.map_structure(np.testing.assert_array_equal, ungrouped(made)["u"][0], batch["u"][0])
    assert grouped([tf.TensorSpec([2, 3]), tf.TensorSpec([8])])[1].rows.shape == [2, 4]
    assert ungrouped(Grouped(tf.TensorSpec([None, 4, 3]))).shape.as_list() == [None, 3]
    apart = {"a": tf.range(4), "b": None, "c": [tf.range(6), tf.range(4), tf.range(0)], "s": tf.constant(1)}
    made = grouped(apart)
    assert units_of(made) == [2, 0, 0, 2, 1, 0] and rows_of(made) == 6 and not is_marked(made, Grouped)
    tf.nest.map_structure(np.testing.assert_array_equal, ungrouped(made)["c"], apart["c"])
    ragged = tf.ragged.constant([[1], [2]])
    unchanged = [tf.TensorSpec([None]), tf.TensorSpec([4])], [tf.zeros(4), ragged], [tf.zeros(i) for i in range(12)]
    assert all(grouped(one) is one for one in unchanged)


class OfPoints(keras.Model):
    """Learns of the mean over the points that each of a batch's few graphs has."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)

    def call(self, inputs):
        points, graphs = inputs
        return self.last(tf.math.segment_mean(self.first(points), graphs))


@pytest.mark.parametrize("graphs", [1, 2])
def test_ever_other_ratios_take_few_programs(graphs, caplog):
    """After as many traces as Keras has, all ratios of rows share one program; the numbers stay one device's."""
    caplog.set_level(logging.INFO, "ncclsync")

    def build():
        keras.utils.set_random_seed(1)
        model = OfPoints()
        model.compile("adam", "mse")
        return model

    def batches():
        for k in range(1, 9):
            points, whose = np.random.default_rng(k).normal(size=(k * graphs, 4)), np.repeat(np.arange(graphs), k)
            yield (points, whose), np.ones([graphs, 1]) * k

    numbers = tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)
    sets = tf.data.Dataset.from_generator(batches, output_signature=(numbers, tf.TensorSpec([None, 1])))
    sets = sets.apply(tf.data.experimental.assert_cardinality(8))  # else one device counts a step beyond the end
    alone, model = build(), on_towers(build, 2)
    assert_close(model.fit(sets, verbose=0).history, alone.fit(sets, verbose=0).history)
    assert_close(state(model), state(alone))
    # Of one row for each graph; of two ratios; of all others; and of the iterator, which shows no sizes.
    assert len(step_of(model).programs.kept) <= 5
    assert sum("ratios of rows" in one.getMessage() for one in caplog.records) == 1


def test_ever_other_ratios_in_a_loop():
    """As in `fit`; each tower's results are those of the rows that it has."""

    def step(batch):
        return tf.reduce_sum(batch[0]) * tf.reduce_sum(batch[1])

    batches = [(tf.ones([2 * k, 3]), tf.ones([2, 1]) * k) for k in range(1, 7)]
    with Towers(2) as towers:
        assert_close([towers.run(step, one) for one in batches], [step(one) for one in batches])
        assert None not in towers.run(step, batches[-1], per_tower=True)
        assert len(next(iter(towers._steps.values())).programs.kept) <= 4
