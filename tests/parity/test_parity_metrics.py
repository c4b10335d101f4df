"""N towers measure like one device: every metric of Keras, a user's own, and the ways they are passed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, metrics
from parity import Case, check, data, mlp, spread

from ncclsync import ops

X, Y = data()
ONE_HOT = np.eye(5, dtype="float32")[Y]
BINARY = (Y > 2).astype("float32")[:, None]
LABELS = (X[:, :3] > 0.3).astype("float32")  # several per sample
VALUES = np.abs(X[:, :4])
ROW_WEIGHTS = np.linspace(0.0, 2.0, len(X)).astype("float32")
STEPS = np.arange(6) < 1 + np.arange(len(X))[:, None] % 6  # masks of 1 to 6 timesteps
SERIES = np.random.default_rng(2).standard_normal((len(X), 6, 2)).astype("float32") * STEPS[:, :, None]

BUILT_IN = {
    name: cls for name, cls in vars(metrics).items() if isinstance(cls, type) and issubclass(cls, metrics.Metric)
}
NOT_METRICS = {"Metric": "the base class"}


def dense(units, activation, loss, make_metrics=lambda: None, **compile_arguments):
    """A factory of one Dense layer behind 12 features."""

    def factory():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), layers.Dense(units, activation=activation)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=make_metrics(), **compile_arguments)
        return model

    return factory


def measure(x, y, **options):
    """A `run`: fit with validation, evaluate; all logs, and the metrics' own state."""

    def run(model):
        fitted = model.fit(x, y, batch_size=20, epochs=2, verbose=0, shuffle=False, validation_data=(x, y), **options)
        states = [[np.asarray(v) for v in metric.variables] for metric in model.metrics]
        return {
            "history": fitted.history,
            "state": states,
            "evaluate": model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True),
            "results": model.get_metrics_result(),
        }

    return run


def binary(make, **options):
    """Metrics of a probability."""
    return Case(dense(1, "sigmoid", "binary_crossentropy", make), measure(X, BINARY, **options))


def multi_label(make):
    """Metrics of three labels per sample."""
    return Case(dense(3, "sigmoid", "binary_crossentropy", make), measure(X, LABELS))


def one_hot(make):
    """Metrics of five classes, one-hot."""
    return Case(dense(5, "softmax", "categorical_crossentropy", make), measure(X, ONE_HOT))


def sparse(make, **options):
    """Metrics of five classes, as integers."""
    return Case(dense(5, "softmax", "sparse_categorical_crossentropy", make), measure(X, Y, **options))


def regression(make, **options):
    """Metrics of four positive values."""
    return Case(dense(4, "softplus", "mse", make), measure(X, VALUES, **options))


class MeanMagnitude(metrics.Metric):
    """A user's own metric, with a float and an int."""

    def __init__(self, name="magnitude"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_pred)))
        self.rows.assign_add(tf.shape(y_pred)[0])

    def result(self):
        return self.total / tf.cast(self.rows, "float32")


class Histogram(metrics.Metric):
    """Counts per class, a vector, scattered into place; its result is a dictionary."""

    def __init__(self, name="histogram"):
        super().__init__(name=name)
        self.counts = self.add_weight(shape=(5,), initializer="zeros", dtype="int64", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = tf.cast(tf.argmax(y_pred, -1), "int32")
        self.counts.assign(self.counts + tf.math.bincount(found, minlength=5, dtype="int64"))

    def result(self):
        shares = tf.cast(self.counts, "float32") / tf.cast(tf.reduce_sum(self.counts), "float32")
        return {f"class_{i}": shares[i] for i in range(5)}


class EveryDtype(metrics.Metric):
    """State of the dtypes that no collective takes as they are: flags, short counts, and a complex sum."""

    def __init__(self, name="every_dtype"):
        super().__init__(name=name)
        names = "bool", "int16", "uint16", "complex64", "complex128"
        self.state = {one: self.add_variable((2,), tf.zeros, dtype=one, name=one) for one in names}

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = y_pred[:, :2] - y_true[:, :2]
        large = tf.reduce_any(error > [0.5, 100.0], 0)
        for name, state in self.state.items():
            if name == "bool":
                state.assign(tf.logical_or(state, large))
            elif "int" in name:
                state.assign(state + tf.cast(tf.reduce_sum(tf.cast(error > 0, "int32"), 0) * 5000, name))
            else:
                state.assign(state + tf.cast(tf.complex(tf.reduce_sum(error, 0), tf.reduce_sum(error**2, 0)), name))

    def result(self):
        total = tf.reduce_sum([tf.cast(tf.convert_to_tensor(one), "complex64") for one in self.state.values()])
        return tf.math.real(total) + 2 * tf.math.imag(total)


class LargestError(metrics.Metric):
    """A running maximum: no sum, so that it says so, and asks for the maximum over the towers itself."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", aggregation="none", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, ops.all_reduce(tf.reduce_max(y_pred), op="max")))

    def result(self):
        return self.largest.value


class Nested(metrics.Metric):
    """A metric of metrics."""

    def __init__(self, name="nested"):
        super().__init__(name=name)
        self.parts = [metrics.MeanSquaredError(), metrics.MeanAbsoluteError()]
        self.bias = metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        for part in self.parts:
            part.update_state(y_true, y_pred, sample_weight)
        self.bias.update_state(y_pred - y_true)

    def result(self):
        return self.parts[0].result() - self.parts[1].result() ** 2 + self.bias.result()


class Tracking(keras.Sequential):
    """Trackers of the model's own: of rows in `call`, of a scalar and a sum in `train_step`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.magnitude = metrics.Mean(name="magnitude")
        self.loss_of_batch = metrics.Mean(name="loss_of_batch")
        self.rows_seen = metrics.Sum(name="rows_seen")

    def call(self, inputs, training=None, mask=None):
        outputs = super().call(inputs, training=training)
        self.magnitude.update_state(tf.reduce_mean(tf.abs(outputs), -1))
        return outputs

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.loss_of_batch.update_state(loss)
        self.magnitude.update_state(loss)  # shared: by rows in call, a scalar here
        self.rows_seen.update_state(tf.ones(tf.shape(x)[0]))
        return {"loss": loss, **{m.name: m.result() for m in self.metrics[-3:]}}


def tracking():
    keras.utils.set_random_seed(1)
    model = Tracking([keras.Input((12,)), layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class OwnComputeMetrics(keras.Sequential):
    """Accuracy of rounded classes, which no compiled metric could compute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hits = metrics.Accuracy(name="hits")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.hits.update_state(y, tf.argmax(y_pred, -1), sample_weight)
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "hits": self.hits.result()}


def own_compute_metrics():
    keras.utils.set_random_seed(1)
    model = OwnComputeMetrics([keras.Input((12,)), layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
    return model


def two_outputs(**compile_arguments):
    def factory():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((12,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        label = layers.Dense(5, activation="softmax", name="label")(hidden)
        value = layers.Dense(4, name="value")(hidden)
        model = keras.Model(inputs, {"label": label, "value": value})
        losses = {"label": "sparse_categorical_crossentropy", "value": "mse"}
        arguments = {name: make() for name, make in compile_arguments.items()}
        model.compile("adam", losses, loss_weights={"label": 1.0, "value": 0.3}, **arguments)
        return model

    return factory


def masked_series(make):
    """Metrics of timesteps, of which some are masked, unevenly among the shards."""

    def factory():
        keras.utils.set_random_seed(4)
        model = keras.Sequential(
            [keras.Input((6, 2)), layers.Masking(), layers.GRU(4, return_sequences=True), layers.Dense(1)]
        )
        model.compile("adam", "mse", metrics=make(), weighted_metrics=["mse"])
        return model

    def run(model):
        logs = model.evaluate(SERIES, SERIES[:, :, :1] + 1.0, batch_size=20, verbose=0, return_dict=True)
        return {name: value for name, value in logs.items() if name != "loss"}  # not a metric's matter

    return Case(factory, run)


def accumulating(model):
    """`train_on_batch` accumulates metrics until they are reset, whoever asks for them in between."""
    logs = []
    for begin, rows in ((0, 10), (10, 3), (13, 1), (14, 20)):
        part = slice(begin, begin + rows)
        logs.append(model.train_on_batch(X[part], Y[part], ROW_WEIGHTS[part], return_dict=True))
        logs.append(model.get_metrics_result())
    model.reset_metrics()
    return [logs, model.test_on_batch(X[:5], Y[:5], return_dict=True)]


def rate_metrics(**options):
    return [
        cls(at, num_thresholds=20, **options)
        for cls, at in (
            (metrics.PrecisionAtRecall, 0.6),
            (metrics.RecallAtPrecision, 0.6),
            (metrics.SensitivityAtSpecificity, 0.5),
            (metrics.SpecificityAtSensitivity, 0.5),
        )
    ]


def counts(**options):
    classes = (metrics.TruePositives, metrics.TrueNegatives, metrics.FalsePositives, metrics.FalseNegatives)
    return [cls(**options) for cls in classes]


def two_metrics_of_class_shares():
    return [metrics.Precision(class_id=1, top_k=2), metrics.Recall(class_id=2, top_k=2), Histogram()]


def worst_error(y_true, y_pred):
    """One value per sample."""
    return tf.reduce_max(tf.abs(y_true - y_pred), -1)


def mean_error(y_true, y_pred):
    """One value per batch."""
    return tf.reduce_mean(tf.abs(y_true - y_pred))


PER_OUTPUT = dict(
    metrics=lambda: {"label": ["accuracy", metrics.SparseTopKCategoricalAccuracy(2)], "value": ["mae"]},
    weighted_metrics=lambda: {"label": ["accuracy"], "value": [metrics.RootMeanSquaredError()]},
)
BOTH = {"label": Y, "value": VALUES}

CASES = {
    # Every class of Keras.
    "auc": binary(
        lambda: [
            metrics.AUC(num_thresholds=30),
            metrics.AUC(curve="PR", summation_method="minoring", name="pr"),
            metrics.AUC(thresholds=[0.2, 0.5, 0.7], name="own_thresholds"),
        ]
    ),
    "auc_multi_label": multi_label(
        lambda: [
            metrics.AUC(multi_label=True, num_labels=3),
            metrics.AUC(multi_label=True, num_labels=3, curve="PR", label_weights=[0.2, 0.3, 0.5], name="pr"),
        ]
    ),
    "precision_recall": binary(
        lambda: [metrics.Precision(), metrics.Recall(), metrics.Precision([0.3, 0.6], name="two"), *counts()]
    ),
    "precision_recall_of_a_class": one_hot(two_metrics_of_class_shares),
    "rates": binary(rate_metrics, sample_weight=ROW_WEIGHTS),
    "binary": binary(
        lambda: [
            metrics.BinaryAccuracy(threshold=0.4),
            metrics.BinaryCrossentropy(label_smoothing=0.1),
            metrics.BinaryIoU(target_class_ids=[0, 1], threshold=0.4),
            metrics.Hinge(),
            metrics.SquaredHinge(),
        ]
    ),
    "f_scores": one_hot(
        lambda: [
            metrics.F1Score(name="per_class"),
            metrics.F1Score(average="macro", name="macro"),
            metrics.F1Score(average="weighted", name="weighted"),
            metrics.FBetaScore(average="micro", beta=2.0, threshold=0.3),
        ]
    ),
    "iou_one_hot": one_hot(
        lambda: [metrics.OneHotIoU(5, [0, 3]), metrics.OneHotMeanIoU(5), metrics.CategoricalHinge()]
    ),
    "iou_sparse": sparse(
        lambda: [metrics.IoU(5, [1, 2], sparse_y_pred=False), metrics.MeanIoU(5, sparse_y_pred=False)]
    ),
    "categorical": one_hot(
        lambda: [
            metrics.CategoricalAccuracy(),
            metrics.CategoricalCrossentropy(),
            metrics.TopKCategoricalAccuracy(2),
            metrics.KLDivergence(),
            metrics.Poisson(),
            metrics.CosineSimilarity(),
        ]
    ),
    "sparse_categorical": sparse(
        lambda: [
            metrics.SparseCategoricalAccuracy(),
            metrics.SparseCategoricalCrossentropy(),
            metrics.SparseTopKCategoricalAccuracy(2),
        ],
        sample_weight=ROW_WEIGHTS,
    ),
    "regression": regression(
        lambda: [
            metrics.MeanSquaredError(),
            metrics.MeanAbsoluteError(),
            metrics.MeanAbsolutePercentageError(),
            metrics.MeanSquaredLogarithmicError(),
            metrics.RootMeanSquaredError(),
            metrics.LogCoshError(),
        ]
    ),
    "correlation": regression(
        lambda: [metrics.PearsonCorrelation(), metrics.ConcordanceCorrelation(), metrics.CosineSimilarity()]
    ),
    "r2": regression(
        lambda: [
            metrics.R2Score(),
            metrics.R2Score("variance_weighted_average", name="weighted"),
            metrics.R2Score(None, name="per_output"),
        ],
        sample_weight=np.maximum(ROW_WEIGHTS, 0.1),
    ),
    "mean_of_a_function": regression(lambda: [metrics.MeanMetricWrapper(worst_error), "mae"]),
    # How metrics are passed.
    "function_of_the_user": regression(lambda: [worst_error, mean_error]),
    "class_weight": sparse(lambda: ["accuracy"], class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0, 4: 3.0}),
    "weighted_metrics": Case(
        dense(5, "softmax", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"]),
        measure(X, Y, sample_weight=ROW_WEIGHTS),
    ),
    "per_output": Case(two_outputs(**PER_OUTPUT), measure(X, BOTH)),
    "per_output_weights": Case(
        two_outputs(**PER_OUTPUT),
        measure(X, BOTH, sample_weight={"label": ROW_WEIGHTS, "value": ROW_WEIGHTS[::-1].copy()}),
    ),
    "masked_timesteps": masked_series(lambda: ["mae", metrics.RootMeanSquaredError()]),
    "steps_per_execution": Case(
        dense(5, "softmax", "sparse_categorical_crossentropy", lambda: ["accuracy"], steps_per_execution=3),
        measure(X, Y),
    ),
    "eagerly": Case(
        dense(
            5,
            "softmax",
            "sparse_categorical_crossentropy",
            lambda: ["accuracy", metrics.MeanIoU(5, sparse_y_pred=False), MeanMagnitude(), Histogram()],
            run_eagerly=True,
        ),
        measure(X, Y),
    ),
    "in_float64": regression(lambda: [metrics.MeanSquaredError(dtype="float64"), "mae"]),
    "on_batches": Case(lambda: mlp(weighted_metrics=["accuracy"]), accumulating),
    # A user's own.
    "own_of_other_dtypes": regression(lambda: [MeanMagnitude(), Nested(), EveryDtype()]),
    "own_with_a_dictionary": sparse(lambda: [Histogram()]),
    "own_running_maximum": regression(lambda: [LargestError()]),
    "own_trackers": Case(tracking, measure(X, Y)),
    "own_compute_metrics": Case(own_compute_metrics, measure(X, Y, sample_weight=ROW_WEIGHTS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, towers", spread(CASES))
def test_metric(name, towers):
    """What `fit`, `evaluate` and single batches report, and what the metrics hold."""
    check(CASES[name], towers)


@pytest.mark.slow
def test_every_metric_of_keras_is_in_a_row():
    """A class that Keras adds is missed here, not in somebody's training."""
    found = {"Mean", "Sum", "Accuracy"}  # in Tracking and OwnComputeMetrics
    for case in CASES.values():
        config = str(case.build().get_compile_config())
        found |= {name for name in BUILT_IN if f"'class_name': '{name}'" in config}
    assert set(BUILT_IN) - found == set(NOT_METRICS)
