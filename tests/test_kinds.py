"""What tensors of a step are, relative to the samples, and that towers treat them so."""

import keras
import pytest
import tensorflow as tf
from keras import layers, optimizers
from parity import Case, check, data, fit, mlp, on_towers, spread

from ncclsync import ops
from ncclsync.hooks import step_hooks
from ncclsync.kinds import AFFINE, COUNT, GLOBAL, LINEAR, MAX, MIN, ROWS, SAME, UNKNOWN, Kind
from ncclsync.program import trace
from ncclsync.whole_batch import whole_batch_hooks

X, Y = data(58)
WEIGHT = tf.Variable(tf.ones([12, 5]))
MEAN, SUM = Kind(LINEAR, -1), Kind(LINEAR)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def outputs(x):
    return tf.matmul(x, WEIGHT)


def regularisation():
    return tf.reduce_sum(WEIGHT**2)


KINDS = {
    "keras loss": (lambda x, y: CROSS_ENTROPY(y, outputs(x)), MEAN),
    "keras loss with reduction sum, as hooked": (
        lambda x, y: keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")(y, outputs(x)),
        MEAN,
    ),
    "mean of squares": (lambda x, y: tf.reduce_mean(outputs(x) ** 2), MEAN),
    "sum of squares": (lambda x, y: tf.reduce_sum(outputs(x) ** 2), SUM),
    "sum over a fixed batch size": (lambda x, y: tf.reduce_sum(outputs(x)) / 32, SUM),
    "sum over the shard's rows": (
        lambda x, y: tf.reduce_sum(outputs(x)) / tf.cast(tf.shape(x)[0], tf.float32),
        MEAN,
    ),
    "mean and regularisation": (lambda x, y: tf.reduce_mean(outputs(x)) + regularisation(), MEAN),
    "sum and regularisation": (lambda x, y: tf.reduce_sum(outputs(x)) + regularisation(), Kind(AFFINE)),
    "sum and mean": (lambda x, y: tf.reduce_sum(outputs(x)) + tf.reduce_mean(outputs(x)), Kind(AFFINE)),
    "regularisation": (lambda x, y: regularisation(), Kind(SAME)),
    "per sample": (lambda x, y: tf.reduce_sum(outputs(x), axis=1), Kind(ROWS)),
    "accuracy": (lambda x, y: tf.reduce_mean(tf.cast(tf.argmax(outputs(x), -1) == y, tf.float32)), MEAN),
    "flattened": (lambda x, y: tf.reduce_mean(tf.reshape(outputs(x), [-1])), MEAN),
    "rows": (lambda x, y: tf.shape(x)[0], Kind(COUNT, 1)),
    "rows by keras": (lambda x, y: keras.ops.cast(keras.ops.shape(x)[0], "float32"), Kind(COUNT, 1)),
    "largest": (lambda x, y: tf.reduce_max(outputs(x)), Kind(MAX)),
    "smallest": (lambda x, y: tf.minimum(tf.reduce_min(x), 3.0), Kind(MIN)),
    "root of a mean": (lambda x, y: tf.sqrt(tf.reduce_mean(outputs(x) ** 2)), Kind(GLOBAL)),
    "ratio of sums": (lambda x, y: tf.reduce_sum(outputs(x)) / tf.reduce_sum(outputs(x) ** 2), Kind(GLOBAL)),
    "ratio to a sum of data": (lambda x, y: tf.reduce_sum(outputs(x)) / tf.reduce_sum(x), SUM),
    "sum over valid entries": (
        lambda x, y: tf.reduce_sum(outputs(x)) / tf.maximum(tf.reduce_sum(x), 1.0),
        SUM,
    ),
    "reduced already": (lambda x, y: ops.all_reduce(tf.reduce_mean(x)) ** 2, Kind(SAME)),
    "all rows": (lambda x, y: tf.reduce_sum(ops.all_gather(x) ** 2), Kind(SAME)),
    "adding zero": (lambda x, y: 0.0 + tf.reduce_sum(outputs(x)), SUM),
    "metric state": (lambda x, y: METRIC.total.value + 1.0, Kind(UNKNOWN)),
}
METRIC = keras.metrics.Mean()


def told(function, rows=None):
    """The kind of what `function(x, y)` returns, in the trace of a step."""
    kinds = []

    def step(batch):
        kinds.append(ops.current_context().kind_of(tf.convert_to_tensor(function(*batch))))
        return 0.0

    with step_hooks(), whole_batch_hooks():
        trace(step, (tf.TensorSpec([rows, 12]), tf.TensorSpec([rows], tf.int64)))
    return kinds[-1]


@pytest.mark.parametrize("name", KINDS)
def test_kind(name):
    """It is told from the ops; nothing of these is inexact."""
    function, expected = KINDS[name]
    kind = told(function)
    assert (kind, kind.origin) == (expected, None)


def test_a_known_number_of_rows_tells_nothing():
    """It would stand as a constant in the trace: a mean divided by it looks like a sum."""
    assert told(lambda x, y: tf.reduce_sum(x) / x.shape[0], rows=4) == Kind(UNKNOWN)


def test_what_does_not_add_up_names_the_op():
    """A difference to the shard's own mean, which the model has a part in."""
    kind = told(lambda x, y: tf.reduce_mean((outputs(x) - tf.reduce_mean(outputs(x), 0)) ** 2))
    assert kind == MEAN and kind.origin.type == "Sub"


# On towers


class Custom(keras.Sequential):
    """A step with a loss of its own, returned; variables and a metric that count and compare."""

    def __init__(self, parts, loss):
        super().__init__(parts)
        self.own_loss = loss
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.rows = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32", name="rows"
        )
        self.top = self.add_weight(shape=(), initializer="zeros", trainable=False, name="top")
        self.total = tf.Variable(0.0, trainable=False)
        self.extremes = Extremes()

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.own_loss(self, x, y, outputs)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.seen.assign_add(tf.cast(tf.shape(x)[0], "float32"))
        self.rows.assign_add(tf.shape(x)[0])
        self.top.assign(tf.maximum(self.top, tf.reduce_max(x)))
        self.total.assign_add(tf.reduce_sum(outputs))
        self.extremes.update_state(outputs)
        return {
            "value": loss,
            "largest": tf.reduce_max(outputs),
            "smallest": tf.reduce_min(outputs),
            "sum": tf.reduce_sum(outputs),
            "rmse": tf.sqrt(tf.reduce_mean(outputs**2)),
            "norm": tf.linalg.global_norm(gradients),
            **self.extremes.result(),
        }


class Extremes(keras.metrics.Metric):
    """State that is no sum over the samples: a maximum, and a number of batches."""

    def __init__(self):
        super().__init__(name="extremes")
        self.highest = self.add_weight(shape=(), initializer="zeros", name="highest")
        self.batches = self.add_weight(shape=(), initializer="zeros", name="batches")

    def update_state(self, values, sample_weight=None):
        self.highest.assign(tf.maximum(self.highest, tf.reduce_max(values)))
        self.batches.assign_add(1.0)

    def result(self):
        return {"highest": self.highest.value + 0.0, "batches": self.batches.value + 0.0}


def losses(y, outputs):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)


LOSSES = {
    "sum": lambda m, x, y, p: tf.reduce_sum(losses(y, p)),
    "per_sample": lambda m, x, y, p: losses(y, p),
    "over_a_fixed_batch_size": lambda m, x, y, p: tf.nn.compute_average_loss(
        losses(y, p), global_batch_size=20
    ),
    "sum_and_regularisation": lambda m, x, y, p: (
        tf.reduce_sum(losses(y, p)) + 0.3 * tf.reduce_sum(m.trainable_weights[0] ** 2)
    ),
    "root": lambda m, x, y, p: tf.sqrt(tf.reduce_mean(losses(y, p))),
    "product_of_means": lambda m, x, y, p: tf.reduce_mean(losses(y, p)) ** 2 * tf.reduce_mean(p),
    "weighted_mean": lambda m, x, y, p: (
        tf.reduce_sum(losses(y, p) * x[:, 0] ** 2) / tf.reduce_sum(x[:, 0] ** 2)
    ),
    "masked_mean": lambda m, x, y, p: (
        tf.reduce_sum(tf.where(x[:, 0] > 0, losses(y, p), 0.0))
        / tf.maximum(tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.float32)), 1.0)
    ),
    "learned_weights": lambda m, x, y, p: tf.math.divide_no_nan(
        tf.reduce_sum(losses(y, p) * tf.sigmoid(p[:, 0])), tf.reduce_sum(tf.sigmoid(p[:, 0]))
    ),
    "several_terms": lambda m, x, y, p: (
        0.1 * tf.reduce_sum(m.trainable_weights[0] ** 2)
        + tf.reduce_mean(p**2)
        + tf.reduce_sum(losses(y, p) * x[:, 0] ** 2) / (tf.reduce_sum(x[:, 0] ** 2) + 1e-6)
    ),
    "scaled_by_a_statistic_of_the_data": lambda m, x, y, p: tf.reduce_mean(
        losses(y, p) * tf.reduce_sum((x - tf.reduce_mean(x, 0)) ** 2, 1)
    ),
    "condition_on_the_batch": lambda m, x, y, p: tf.reduce_mean(
        losses(y, tf.cond(tf.reduce_max(p) > 1.2, lambda: 0.5 * p, lambda: 1.0 * p))
    ),
    "gathered": lambda m, x, y, p: tf.reduce_mean(
        tf.nn.softmax(tf.matmul(p, ops.all_gather(p), transpose_b=True))
    ),
}


def custom(loss, **compile_arguments):
    def factory():
        keras.utils.set_random_seed(1)
        parts = [keras.Input((12,)), layers.Dense(8, activation="relu"), layers.Dense(5)]
        model = Custom(parts, loss)
        model.compile(optimizers.SGD(0.01), **compile_arguments)
        return model

    return factory


def everything(model):
    return [fit(X, Y, batch_size=19, epochs=2)(model), model.total.numpy()]


CASES = {name: Case(custom(loss), everything) for name, loss in LOSSES.items()}


def test_what_a_collective_of_the_step_is_given_is_each_towers_own():
    """Nothing meets on the way to it: here the largest shard, not the batch, has 5 rows and 2 more."""

    class Asking(keras.Sequential):
        def train_step(self, batch):
            return {"largest": ops.all_reduce(tf.shape(batch[0])[0] + 2, "max")}

    def factory():
        model = Asking([keras.Input((12,)), layers.Dense(5)])
        model.compile()
        return model

    assert on_towers(factory, 4).train_on_batch(X[:17], Y[:17], return_dict=True)["largest"] == 7


@pytest.mark.parametrize("name, towers", spread(CASES))
def test_a_loss_of_ones_own(name, towers, caplog):
    """Exact, with its gradients, results, variables and metric state; and nothing is warned of."""
    check(CASES[name], towers)
    assert not [record.message for record in caplog.records if "exact" in record.message]


def test_what_is_not_exact_is_named_once_with_its_line(caplog):
    """A loss by the shard's own mean: the warning names the op and the line; training goes on."""
    model = on_towers(custom(lambda m, x, y, p: tf.reduce_mean((p - tf.reduce_mean(p, 0)) ** 2)), 2)
    model.fit(X, Y, batch_size=19, epochs=2, verbose=0)
    warned = [record.message for record in caplog.records if "differentiated is not exact" in record.message]
    assert len(warned) == 1 and "Sub, at " in warned[0] and "test_kinds.py" in warned[0]


def test_a_layer_that_is_not_exact_is_warned_of(caplog):
    """Plain BatchNormalization, with the remedy, once; not where it is synchronised."""

    def factory():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), layers.BatchNormalization(), layers.Dense(5)])
        model.compile("sgd", CROSS_ENTROPY)
        return model

    for options, count in (({}, 1), ({"sync_batch_norm": True}, 0)):
        caplog.clear()
        model = on_towers(factory, 2, **options)
        model.fit(X, Y, batch_size=19, epochs=2, verbose=0)
        model.evaluate(X, Y, verbose=0)
        warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == count, warned
        assert all("BatchNormalization" in text and "sync_batch_norm=True" in text for text in warned)


def test_what_eager_steps_settle_late_is_told(caplog):
    """A variable that a step gives each tower's own value, where no graph shows how it adds up."""
    model = on_towers(custom(LOSSES["root"], run_eagerly=True), 2)
    model.fit(X[:7], Y[:7], epochs=2, verbose=0)
    warned = [record.message for record in caplog.records if record.message.startswith("run_eagerly")]
    assert len(warned) == len(set(warned)) and any("rows" in text for text in warned)
    assert model.towers.divergence() == 0.0


def test_no_warning_for_an_exact_model(caplog):
    """No false alarm."""
    model = on_towers(mlp, 3)
    model.fit(X, Y, batch_size=19, verbose=0)
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]
