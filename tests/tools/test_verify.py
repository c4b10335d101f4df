"""`verify` and its command line: equal models pass; a difference is found, placed and given its reason."""

import importlib
import os
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from keras import layers
from parity import data, mlp

import ncclsync
from ncclsync import nccl_parallel, verify
from ncclsync.tools import cli, factories
from ncclsync.tools.verify import verification
from ncclsync.tools.verify.batches import rows_at, take_batches
from ncclsync.tools.verify.report import Difference, Report, measure
from ncclsync.towers.printed import show
from ncclsync.training.random_data import random_data

X, Y = data(rows=40)


def sequential(*parts, loss="mse", optimizer="sgd", **arguments):
    """A compiled classifier of 12 features and 5 outputs with these layers first."""
    model = keras.Sequential([keras.Input((12,)), *parts, layers.Dense(5)])
    model.compile(optimizer, loss=loss, **arguments)
    return model


TARGETS = np.random.default_rng(1).standard_normal((40, 5)).astype("float32")


def check(build, **arguments):
    """Verify on 3 towers, 3 steps of 12, 12 and 11 rows."""
    return verify(build, (X, TARGETS), towers=3, steps=3, batch_size=12, **arguments)


def reasons(report) -> str:
    """All reasons as text."""
    return " | ".join(map(str, report.reasons))


def test_a_train_step_is_given_what_fit_gives():
    """Two values without sample weights, as in Keras' guide."""

    class Guide(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

        def test_step(self, batch):
            x, y = batch
            return {"loss": self.compute_loss(x, y, self(x, training=False))}

    def build():
        model = Guide([keras.Input((12,)), layers.Dense(5)])
        model.compile("sgd", "mse")
        return model

    assert check(build).ok


def test_what_one_device_cannot_do_is_told():
    """A model whose train_step has its own loss cannot be evaluated, and this one predicts nothing."""

    class Own(keras.Sequential):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(batch[0], training=True) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

        def predict_step(self, batch):
            raise NotImplementedError("only to train")

    def build():
        model = Own([keras.Input((12,)), layers.Dense(5)])
        model.compile("sgd")
        return model

    report = verify(build, (X, TARGETS), towers=2, steps=1, batch_size=5)
    assert report.ok and {one.kind for one in report.differences} == {"weight", "optimizer", "log"}
    assert [one.where for one in report.reasons] == ["evaluate", "predict"]
    assert "evaluate: is not compared, since one device cannot do it: ValueError: No loss to compute" in str(report)
    assert "NotImplementedError: " in report.reasons[1].reason and "only to train" in report.reasons[1].reason


class Batches(keras.utils.PyDataset):
    """Four batches of ten rows."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return X[10 * i : 10 * i + 10], Y[10 * i : 10 * i + 10]


FEEDS = {
    "arrays": (lambda: (X, Y), (16, 16, 8)),
    "weights": (lambda: (X, Y, np.arange(40.0, dtype="float32")), (16, 16, 8)),
    "dataset": (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(15), (15, 15, 10)),
    "generator": (lambda: ((X[:n], Y[:n]) for n in (7, 2, 5)), (7, 2, 5)),
    "list that begins again": (lambda: [(X[:7], Y[:7]), (X[:2], Y[:2])], (7, 2, 7)),
    "PyDataset": (Batches, (10, 10, 10)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEEDS)
def test_equal(name):
    """A plain model is equal on any kind of data, and every variable and log of every step was compared."""
    feed, sizes = FEEDS[name]
    report = verify(mlp, feed(), towers=3, steps=3, batch_size=16)
    assert report.ok, report
    assert report.batch_sizes == sizes
    assert (report.towers, report.steps, report.tolerance, report.first) == (3, 3, 1e-5, None)
    assert report.reasons == ()
    compared = {(one.step, one.kind, one.name.split("/")[-1]) for one in report.differences}
    assert {(2, "weight", "kernel"), (3, "optimizer", "learning_rate"), (1, "log", "accuracy")} <= compared
    assert {(3, "evaluate", "loss"), (3, "predict", "output 0")} <= compared
    assert any(one.absolute > 0 for one in report.differences), "towers add in another order"


@pytest.mark.slow
def test_decorated_and_unseeded_factory():
    """The decorator is taken off, and the start is copied: it need not be the same in each build."""

    @nccl_parallel(towers=2)
    def build():
        model = sequential()
        model.layers[0].kernel.assign(np.random.default_rng().standard_normal((12, 5)))
        return model

    report = check(build, devices=["CPU:0"] * 5)
    assert report.ok, report
    assert report.devices == ("CPU:0",) * 5


@pytest.mark.slow
def test_model_built_by_its_first_batch():
    """A subclassed model without declared inputs, with a step of its own."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(5)

        def call(self, x):
            return self.dense(x)

        def train_step(self, batch):
            x, y = batch[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def build(shape=None):
        model = Own()
        if shape:
            model.build(shape)  # which Keras takes for built, without its layers
        model.compile("adam", loss="mse")
        return model

    assert check(build).ok
    assert check(lambda: build((None, 12))).ok


@pytest.mark.slow
def test_metrics_that_keras_names():
    """Which numbers them from model to model: each is compared with its own."""

    def build():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(1, activation="sigmoid")])
        kinds = keras.metrics.AUC(), keras.metrics.AUC(curve="PR"), keras.metrics.Precision(top_k=None)
        model.compile("sgd", "binary_crossentropy", metrics=list(kinds))
        return model

    for _ in range(4):  # up to auc_9 beside auc_10
        report = verify(build, (X, (TARGETS[:, :1] > 0.5).astype("float32")), 3, 1, progress=False)
        assert report.ok and not report.reasons, report
    logs = [one.name for one in report.differences if one.kind == "log"]
    assert len(logs) == 4 and sum(name.startswith("auc") for name in logs) == 2


@pytest.mark.slow
def test_batch_normalization():
    """Told by name, with what mends it; which it does."""
    plain = check(lambda: sequential(layers.Dense(4), layers.BatchNormalization(name="bn")))
    assert not plain.ok
    assert (plain.first.step, plain.first.kind) == (1, "weight")
    assert "bn'" in reasons(plain) and "exact=True" in reasons(plain)
    assert check(lambda: sequential(layers.BatchNormalization(synchronized=True))).ok


@pytest.mark.slow
def test_dropout():
    """The towers draw other numbers, whatever the seed, unless told to draw those of one device."""

    def build():
        return sequential(layers.Dropout(0.5, name="drop"))

    report = check(build)
    assert not report.ok
    assert "Dropout 'drop'" in reasons(report) and "exact=True" in reasons(report)
    assert check(build, exact=("random",)).ok


@pytest.mark.slow
def test_a_draw_without_a_layer_is_a_reason():
    """The line is named: a loss draws, and a train step may."""

    def noisy(y, outputs):
        return tf.reduce_mean((y - outputs + tf.random.normal(tf.shape(outputs))) ** 2)

    report = check(lambda: sequential(loss=noisy))
    assert not report.ok
    assert "return tf.reduce_mean((y - outputs + tf.random" in reasons(report), report


class FirstRow(keras.metrics.Metric):
    """A metric of the first sample of each batch, of which only one tower has it."""

    def __init__(self, aggregation):
        super().__init__(name="row")
        self.total = self.add_variable((), "zeros", aggregation=aggregation, name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_true[0]))

    def result(self):
        return self.total.value


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["none", "sum"])
def test_metric_of_one_row(aggregation):
    """Equal, whatever its state is declared as."""
    report = check(lambda: sequential(metrics=[FirstRow(aggregation)]))
    assert report.ok, report


@pytest.mark.slow
def test_loss_that_compares_samples():
    """A loss of one's own that pairs samples is equal."""

    def my_pairs(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))))

    report = check(lambda: sequential(loss=my_pairs, optimizer=keras.optimizers.SGD(1e-3)))
    assert report.ok, report


@pytest.mark.slow
def test_state_with_another_role_on_towers():
    """Metric state that is no sum, and gradients that each tower accumulates, are compared by value."""

    def dice(y_true, y_pred):
        return 1 - 2 * keras.ops.sum(y_true * y_pred) / keras.ops.sum(y_true**2 + y_pred**2)

    report = check(lambda: sequential(metrics=[dice], loss=dice))
    assert {"log", "weight"} <= {one.kind for one in report.differences}
    accumulating = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2).get_config()
    report = check(lambda: sequential(optimizer=keras.optimizers.SGD.from_config(accumulating)))
    assert report.ok, report
    assert any("accumulator" in one.name for one in report.differences)


@pytest.mark.slow
def test_one_device_that_differs_from_itself():
    """What no seed decides is told as such."""
    report = check(lambda: sequential(layers.Rescaling(random.SystemRandom().random())))
    assert not report.ok
    assert "the model on one device: differs from itself" in reasons(report)
    assert "rounding" not in reasons(report)


@pytest.mark.slow
def test_rounding():
    """Below rounding nothing is equal; it is told how far one device is from itself."""
    report = check(lambda: sequential(layers.Dense(64)), tolerance=0.0)
    assert not report.ok
    assert [reason.where for reason in report.reasons] == ["rounding"]
    assert "tolerance=" in report.reasons[0].remedy


@pytest.mark.slow
def test_rounding_beside_random_draws():
    """Adam makes steps of a bias whose gradient is nothing but rounding: told as such, also where numbers are drawn."""

    def build():
        parts = layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3)
        return sequential(*parts, optimizer="adam")

    report = check(build, exact=True)
    assert max(one.relative for one in report.differences if one.kind == "weight") > report.tolerance
    assert report.ok and [reason.where for reason in report.reasons] == ["rounding"]
    assert str(report).startswith("Equal but for rounding, which one device amplifies, too: 3 towers")


@pytest.mark.slow
def test_two_losses_of_uneven_batches():
    """Metrics that go on counting over steps count rows as one device's, whose first trace has a number of rows."""

    def build():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in "ab"})
        model.compile("sgd", {"a": "mse", "b": "mae"})
        return model

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(47, width)).astype("float32") for width in (5, 1))
    report = ncclsync.verify(build, (x, {"a": y, "b": -y}), towers=2, steps=2, batch_size=33)
    assert report.ok and report.batch_sizes == (33, 14), report


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 1e-2), ("mixed_bfloat16", 8e-2)])
def test_half_precision(policy, tolerance):
    """Equal to its own tolerance; below, the dtype is a reason."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        report = check(lambda: sequential(layers.Dense(16, activation="relu"), optimizer="adam"))
        assert report.ok, report
        assert report.tolerance == tolerance
        strict = check(lambda: sequential(layers.Dense(16)), tolerance=1e-8)
        assert f"dtype {policy.removeprefix('mixed_')}" in reasons(strict)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.slow
def test_double_precision():
    """Fifteen digits where all of Keras computes in them; where its losses do not, theirs."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        assert check(lambda: sequential(layers.Dense(3))).tolerance == 1e-5
        keras.config.set_floatx("float64")
        report = check(lambda: sequential(layers.Dense(3)))
        assert report.ok, report
        assert report.tolerance == 1e-12
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)


@pytest.mark.slow
def test_nan():
    """Where both have it nothing differs, but it is told."""
    report = verify(lambda: sequential(optimizer=keras.optimizers.SGD(1e30)), (X, TARGETS), towers=2, steps=3)
    assert report.ok
    assert "holds a NaN from step" in reasons(report)
    assert "Worth knowing" in str(report)


@pytest.mark.slow
def test_first_variable_and_step():
    """A learning rate that one of the two changes before step 2 is named, and before what follows from it."""
    built = []

    def build():
        model = sequential(optimizer=keras.optimizers.SGD(0.01, name="sgd"))
        built.append(model)
        if len(built) == 2:  # the one device
            make, calls = model.make_train_function, []

            def make_and_meddle(force=False):
                calls.append(force)
                if len(calls) == 2:
                    model.optimizer.learning_rate.assign(0.02)
                return make(force)

            model.make_train_function = make_and_meddle
        return model

    report = check(build)
    assert (report.first.step, report.first.kind) == (2, "optimizer")
    assert report.first.name.endswith("learning_rate")
    assert report.first.relative == pytest.approx(0.5)
    (rate,) = (one for one in report.largest if one.name.endswith("learning_rate"))
    assert (rate.step, rate.relative) == (2, pytest.approx(0.5))
    weights = [one for one in report.differences if one.kind == "weight" and not one.ok]
    assert {one.step for one in weights} == {2, 3}
    text = str(report)
    assert "step 2, by 0.5" in text
    assert "from step 2" in text and "from step 1" not in text


@pytest.mark.slow
def test_table():
    """The report is its text wherever it is shown: verdict, one row per variable, sentences in at most 110 columns."""
    report = check(lambda: sequential(layers.BatchNormalization(), layers.Dense(7, name="seven")))
    text = str(report)
    assert text == repr(report) == f"{report}"
    assert text.startswith("Different: 3 towers and one device, 3 steps on batches of 12, 12, 11 samples.")
    assert "seven/kernel" in text
    assert "Likely reasons:\n  BatchNormalization 'sequential" in text
    assert "Remedy: @nccl_parallel(exact=True)" in text
    assert max(map(len, text.splitlines())) <= 110
    console = rich.console.Console(width=110)
    with console.capture() as captured:
        console.print(report)
    assert "seven/kernel" in captured.get()


@pytest.mark.slow
def test_long_table_shows_what_differs_most():
    """Twenty rows, and how many there are besides."""
    report = check(lambda: sequential(*[layers.Dense(4) for _ in range(12)]))
    assert len(report.largest) > 20
    assert f"{len(report.largest) - 20} more differ less, 0 of these out of the tolerance." in str(report)
    assert sum("dense" in line or "output" in line for line in str(report).splitlines()) <= 20


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_numbers_are_not_cut(columns, monkeypatch, capsys):
    """Neither in plain text nor on a narrow terminal, however long a name is."""
    one = Difference(1, "optimizer", "the/" * 40 + "end", 1.234e-10, 5.678e-11, ok=False, nan=False)
    report = Report(False, 1e-5, ("CPU:0",) * 2, (8, 8), (one,), ())
    monkeypatch.setenv("COLUMNS", str(columns))
    row = next(line for line in str(report).splitlines() if "1.2e-10" in line)
    assert row.split() == ["optimizer", one.name, "1.2e-10", "5.7e-11", "step", "1", "from", "step", "1"]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(report)
    printed = capsys.readouterr().out
    for text in ("1.2e-10", "5.7e-11", "from step 1", "absolute", "relative", "tolerance", "optimizer"):
        assert text in printed, printed


def test_what_left_the_tolerance_first_is_in_the_table():
    """Also where more than twenty arrays differ more."""
    found = [Difference(1, "weight", "the first", 1e-4, 1e-4, ok=False, nan=False)]
    found += [Difference(2, "weight", f"number {i}", 1.0, 1.0, ok=False, nan=False) for i in range(30)]
    text = str(Report(False, 1e-5, ("CPU:0",) * 2, (8, 8), tuple(found), ()))
    assert text.count("the first") == 2
    assert "11 more differ less, 11 of these out of the tolerance." in text


@pytest.mark.parametrize(
    ("actual", "expected", "absolute", "relative", "ok"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0, True),
        ([1.0, 4.001], [1.0, 4.0], 0.001, 0.00025, True),
        ([1.1, 4.0], [1.0, 4.0], 0.1, 0.025, False),
        ([1e-9], [2e-9], 1e-9, 1e-7, True),
        ([np.nan], [np.nan], 0.0, 0.0, True),
        ([np.nan], [1.0], np.inf, np.inf, False),
        ([np.inf], [np.inf], 0.0, 0.0, True),
        ([100], [101], 1.0, 1 / 101, False),
        ([1, 2], [1, 2, 3], np.inf, np.inf, False),
        (["a"], ["b"], np.inf, np.inf, False),
        (["a"], ["a"], 0.0, 0.0, True),
        ([3 + 4.001j], [3 + 4j], 0.001, 0.0002, True),
        ([3 + 4j], [3 - 4j], 8.0, 1.6, False),
        ([], [], 0.0, 0.0, True),
    ],
)
def test_measure(actual, expected, absolute, relative, ok):
    """One difference, at a tolerance of 1e-3."""
    found = measure(1, "weight", "w", np.array(actual), np.array(expected), 1e-3)
    assert found.absolute == pytest.approx(absolute)
    assert found.relative == pytest.approx(relative)
    assert found.ok is ok
    assert found.nan is bool(np.isnan(actual).any() if np.array(actual).dtype.kind == "f" else False)


def test_measure_of_logs_and_small_floats():
    """A log counts as 1 at least; bfloat16 is a number."""
    assert measure(1, "log", "loss", 2e-6, 1e-6, 1e-5).ok
    assert not measure(1, "weight", "w", 2e-3, 1e-3, 1e-5).ok
    one = tf.constant([1.0], tf.bfloat16).numpy()
    assert measure(1, "weight", "w", one * 2, one, 1e-2).absolute == 1.0


@pytest.mark.parametrize(
    ("rows", "steps", "one_size", "sizes"),
    [
        (100, 3, False, [8, 8, 7]),
        (100, 3, True, [8, 8, 8]),
        (19, 4, False, [8, 8, 3, 8]),
        (20, 4, False, [8, 8, 4, 7]),
        (20, 4, True, [8, 8, 8, 8]),
        (5, 2, False, [5, 5]),
        (4, 2, False, [4, 3]),
        (1, 2, False, [1, 1]),
        (8, 1, False, [8]),
    ],
)
def test_sizes_of_batches(rows, steps, one_size, sizes):
    """Of arrays, for 4 towers: all rows in turn, and once a size that the towers do not divide."""
    batches = take_batches({"a": np.arange(rows)}, steps, batch_size=8, towers=4, one_size=one_size)
    assert [len(x["a"]) for x, _, _ in batches] == sizes
    assert batches[0][0]["a"][0] == 0


def test_rows_at_places():
    """Of dense, ragged and sparse tensors, None left out."""
    dense, ragged = np.array([[1], [2]]), tf.ragged.constant([[1], [2, 3]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    x, y, weights = rows_at(({"d": dense, "s": sparse}, ragged, None), [1, 0])
    assert x["d"].numpy().tolist() == [[2], [1]]
    assert tf.sparse.to_dense(x["s"]).numpy().tolist() == [[2, 0], [0, 1]]
    assert y.to_list() == [[2, 3], [1]]
    assert weights is None


def uncompiled():
    """A model that cannot train."""
    return keras.Sequential([keras.Input((12,)), layers.Dense(1)])


KEPT = uncompiled()
KEPT.compile("sgd", loss="mse")

WRONG = {
    "not callable": (lambda: verify(3, (X, Y)), TypeError, "Expected a function .* Received: 3"),
    "a model": (
        lambda: verify(KEPT, (X, Y)),
        TypeError,
        "a new one in each call. Received: <Sequential .* Write verify",
    ),
    "no model": (lambda: check(lambda: 3), TypeError, "return a keras.Model.* Received: 3"),
    "not compiled": (lambda: check(uncompiled), ValueError, "return a compiled model"),
    "the same model twice": (lambda: check(lambda: KEPT), ValueError, "a new model each time.* Make and compile it"),
    "other models": (
        lambda: check(lambda: sequential(layers.Dense(random.SystemRandom().randrange(10**4) + 1))),
        ValueError,
        "the same model each time",
    ),
    "one tower": (lambda: verify(mlp, (X, Y), towers=1), ValueError, "towers to be at least 2. Received: 1"),
    "one device": (lambda: check(mlp, devices=["CPU:0"]), ValueError, "towers to be at least 2"),
    "half a tower": (lambda: verify(mlp, (X, Y), towers=2.5), TypeError, "towers to be a whole number. Received: 2.5"),
    "no step": (lambda: verify(mlp, (X, Y), steps=0), ValueError, "steps to be at least 1"),
    "no rows": (lambda: verify(mlp, (X, Y), batch_size=0), ValueError, "batch_size to be at least 1"),
    "tolerance": (lambda: verify(mlp, (X, Y), tolerance=-1), ValueError, "tolerance to be None or a number"),
    "option": (lambda: verify(mlp, (X, Y), bucket_bytes=0), ValueError, "bucket_bytes"),
    "no batch": (lambda: verify(mlp, iter([])), ValueError, "at least one batch"),
    "empty arrays": (lambda: verify(mlp, (X[:0], Y[:0])), ValueError, "same number of samples"),
    "unequal arrays": (lambda: verify(mlp, (X, Y[:3])), ValueError, r"same number of samples.*\(40, 12\), \(3,\)"),
    "no arrays": (lambda: verify(mlp, ([1.0, 2.0], 3)), TypeError, "one row per sample"),
    "no data": (lambda: verify(mlp, 3), TypeError, "Expected arrays x"),
    "no targets": (lambda: verify(mlp, X), ValueError, r"Expected data with targets, .* Received: x alone"),
    "no targets in a dataset": (
        lambda: verify(mlp, tf.data.Dataset.from_tensor_slices(X).batch(8), towers=2),
        ValueError,
        r"Expected data with targets, .* since sequential.* was compiled with the loss .* Received: x alone",
    ),
    "four arrays": (lambda: verify(mlp, (X, Y, Y, Y)), ValueError, "Received: a tuple of 4 elements"),
    "towers without number": (lambda: verify(mlp, (X, Y), towers=10**6), ValueError, "at most 256, "),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments(name):
    """Said with what was expected and what came."""
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.slow
def test_nothing_is_left_behind(monkeypatch):
    """Towers are closed after success and failure; Python's and NumPy's generators go on as before."""
    built = []
    monkeypatch.setattr(keras.Sequential, "compile", recording(keras.Sequential.compile, built))
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    assert check(sequential).ok
    assert (random.random(), np.random.random()) == expected
    with pytest.raises(Exception, match="12"):
        verify(sequential, (X[:, :3], TARGETS), towers=2)
    closed = [model.towers.closed for model in built if hasattr(model, "towers")]
    assert closed == [True, True]


def recording(method, calls):
    """A method that notes on whom it was called."""

    def recorded(self, *args, **kwargs):
        calls.append(self)
        return method(self, *args, **kwargs)

    return recorded


def two_outputs():
    """Ids of unknown length, images and words in; a softmax and a sigmoid out."""
    ids, image = (keras.Input((None,), dtype="int32", name="ids"), keras.Input((4, 4, 3), dtype="uint8", name="i"))
    word = keras.Input((1,), dtype="string", name="word")
    features = [
        layers.GlobalAveragePooling1D()(layers.Embedding(50, 4)(ids)),
        layers.Flatten()(layers.Rescaling(1 / 255)(image)),
        layers.Flatten()(layers.Embedding(4, 3)(layers.StringLookup(vocabulary=["one", "the"])(word))),
    ]
    hidden = layers.concatenate(features)
    outputs = [layers.Dense(3, activation="softmax", name="c")(hidden), layers.Dense(1, name="s")(hidden)]
    model = keras.Model({"ids": ids, "i": image, "word": word}, outputs)
    model.compile("sgd", loss={"c": "categorical_crossentropy", "s": keras.losses.BinaryCrossentropy(True)})
    return model


@pytest.mark.slow
def test_random_data():
    """By shapes, dtypes and losses."""
    x, (one_hot, bits) = random_data(two_outputs(), 50, batch_size=7, open_size=9)
    assert x["ids"].shape == (50, 9) and 4 <= x["ids"].max() < 50
    assert x["i"].dtype == "uint8" and x["i"].max() > 200
    assert x["word"].dtype == tf.string
    assert one_hot.shape == (50, 3) and set(one_hot.sum(-1)) == {1.0}
    assert bits.shape == (50, 1) and set(bits.ravel()) == {0.0, 1.0}
    x, y = random_data(mlp(), 50, batch_size=7)
    assert x.shape == (50, 12) and x.dtype == "float32"
    assert y.shape == (50,) and set(y) == set(range(5))
    (x,) = random_data(sequential(loss=None), 50, batch_size=7)
    assert x.shape == (50, 12)
    report = verify(two_outputs, random_data(two_outputs(), 30, batch_size=7), towers=2, steps=2, batch_size=7)
    assert report.ok, report


def words():
    """A text, tags and years within a model of their own, and a level, each looked up."""
    text, tags = keras.Input((), dtype="string", name="text"), keras.Input((2,), dtype="string", name="tags")
    year, level = keras.Input((1,), dtype="int64", name="year"), keras.Input((1,), dtype="int32", name="level")
    inner = keras.Input((1,), dtype="int64")
    known = layers.IntegerLookup(vocabulary=[1990, 2000, 2010], output_mode="one_hot")(inner)
    features = [
        layers.TextVectorization(vocabulary=["red", "green", "sky"], output_mode="multi_hot")(text),
        layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0, output_mode="multi_hot")(tags),
        keras.Model(inner, known)(year),
        layers.CategoryEncoding(4, output_mode="one_hot")(level),
    ]
    inputs = {"text": text, "tags": tags, "year": year, "level": level}
    model = keras.Model(inputs, layers.Dense(1)(layers.concatenate(features)))
    model.compile("sgd", loss="mse")
    return model


def test_random_words_are_known():
    """Each input holds what the layer that it feeds knows, also within a model."""
    x, _ = random_data(words(), 60, batch_size=7)
    drawn = {name: {one for row in np.ravel(part) for one in np.ravel(row)} for name, part in x.items()}
    assert {word for text in drawn["text"] for word in text.decode().split()} == {"red", "green", "sky"}
    assert max(len(text.split()) for text in drawn["text"]) > 3
    assert drawn["tags"] == {b"a", b"b"}
    assert drawn["year"] == {1990, 2000, 2010} and drawn["level"] == {0, 1, 2, 3}


@pytest.mark.slow
def test_models_of_words():
    """Rows differ, and towers are equal to one device; nobody is blamed for rounding."""
    report = verify(words, random_data(words(), 40, batch_size=7), towers=2, steps=2, batch_size=7)
    assert report.ok and not report.reasons, report


def test_rows_that_do_not_differ_are_told():
    """Words that no layer knows: equal results show nothing."""
    x = {"text": ["?"] * 20, "tags": [["a", "b"]] * 20, "year": [[1]] * 20, "level": [[1]] * 20}
    batch = {name: tf.constant(part) for name, part in x.items()}

    def told_of(x):
        return [str(one) for one in verification._Run(words, [(x, tf.zeros([20, 1]), None)], 1, None)._equal_rows()]

    (told,) = told_of(batch)
    assert "all rows of a batch give the same prediction" in told
    assert not told_of({**batch, "level": tf.constant([[1], [2]] * 10)})


@pytest.mark.parametrize(
    ("loss", "shape", "valid"),
    [
        ("sparse_categorical_crossentropy", (6,), lambda y: y.min() >= 0 and y.max() <= 3),
        (keras.losses.CategoricalHinge(), (6, 4), lambda y: (y.sum(-1) == 1).all()),
        (keras.losses.binary_focal_crossentropy, (6, 4), lambda y: set(y.ravel()) <= {0.0, 1.0}),
        ("poisson", (6, 4), lambda y: y.min() > 0),
        (lambda y, p: p, (6, 4), lambda y: y.min() < 0),
    ],
)
def test_random_targets(loss, shape, valid):
    """Of one output of 4 numbers per sample."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(4)])
    model.compile("sgd", loss=loss)
    _, y = random_data(model, 6, batch_size=6)
    assert y.shape == shape
    assert valid(y)


FACTORIES = """
import keras, ncclsync, numpy

def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

class Normalised:
    @staticmethod
    def build():
        layers = [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile("sgd", loss="mse")
        return model

def unknown():
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", loss="mse")
    return model

def of_width(width):
    return build()

def data():
    return numpy.ones((9, 3), "float32"), numpy.arange(18.0).reshape(9, 2)

def decorated_within():
    return ncclsync.nccl_parallel(exact=True)(Normalised.build)()

def kept(made=[]):
    made.append(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="kept"))
    made[0].compile("sgd", "mse")
    return made[0]

def broken():
    raise RuntimeError("no such luck")

number = 3
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["sub/other.py:Normalised.build", "--towers", "2"], 1, "Likely reasons:", ""),
        (["mine:Normalised.build", "--steps", "2", "--exact"], 0, "Equal to 1e-05: 4 towers", "step 2 of 2, equal"),
        (["mine:unknown"], 2, "", "Begin it with keras.Input(shape), or name a function that returns data: --data"),
        (["mine:unknown", "--data", "mine:data", "--steps", "1"], 0, "1 step on a batch of 9 samples", ""),
        (["mine:decorated_within", "--steps", "1"], 0, "Equal to 1e-05: 4 towers", ""),
        (["mine:kept"], 2, "", "a new model each time. Received: <Sequential name=kept, built=True> twice. Make and"),
        (["mine:broken"], 2, "", "RuntimeError: no such luck"),
    ],
)
def test_command_line(tmp_path, monkeypatch, capsys, arguments, code, out, err):
    """Exit code 0 if equal, 1 if not, 2 if nothing was compared, with one sentence or the traceback."""
    write_factories(tmp_path)
    found, printed = run_here(arguments, tmp_path, monkeypatch, capsys)
    assert found == code, printed
    assert out in printed.out
    assert err in printed.err
    if code == 2:
        assert printed.out == ""
        assert ("Traceback" in printed.err) == ("RuntimeError" in err)


class Own(keras.Model):
    """A model whose variables TensorFlow names alike."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(2, name="first"), layers.Dense(2, name="second")

    def call(self, x):
        return self.second(self.first(x))


def test_progress(capsys, monkeypatch):
    """What is under way is said on standard error, unless told otherwise; variables have Keras' names.

    TensorFlow's advice about functions that are traced often is not for a user who verifies.
    """
    logged = []
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")

    def build():
        tf.get_logger().warning("5 out of the last 8 calls triggered tf.function retracing")
        tf.get_logger().warning("another")
        model = Own()
        model.compile("sgd", loss="mse")
        return model

    with monkeypatch.context() as context:
        context.setattr(tf.get_logger(), "callHandlers", lambda record: logged.append(record.getMessage()))
        report = verify(build, (x, y), 2, 1)
    assert set(logged) == {"another"}
    assert "1 step on a batch of 4 samples" in str(report)
    names = [one.name for one in report.differences if one.kind == "weight"]
    assert names == ["own/first/kernel", "own/first/bias", "own/second/kernel", "own/second/bias"]
    printed = capsys.readouterr()
    assert "building the model on 2 towers\n" in printed.err and printed.out == ""
    assert "one device and 2 towers: step 1 of 1, traced first\n" in printed.err
    verify(build, (x, y), 2, 2)
    assert "one device and 2 towers: step 2 of 2, equal so far\n" in capsys.readouterr().err
    verify(build, (x, y), 2, 1, progress=False)
    assert "step 1" not in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_in_a_process(tmp_path):
    """As a user types it: a module of the current folder. Towers that keep its core busy are made in time."""
    write_factories(tmp_path)
    arguments = ("mine:build", "--steps", "2", "--batch-size", "9")
    command = [sys.executable, "-m", "ncclsync", "verify", *arguments]
    core = os.sched_getaffinity(0).pop()
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Make the towers first" not in done.stderr
    assert "2 steps on batches of 9, 9 samples" in done.stdout


NEIGHBOURED = """
import dataclasses, pickle
import neighbour

@dataclasses.dataclass
class Size:
    units: int = 4

def build():
    return neighbour.units(pickle.loads(pickle.dumps(Size(4))).units)
"""


@pytest.mark.parametrize("name", ["json.py", "xml.py", "wave.py", "my-model.py", "v1.2.py", "plain.py", "é.py"])
def test_files_are_loaded_by_path(name, tmp_path, monkeypatch):
    """Whatever module has their name, imported or not; that one stays. Neighbours are found."""
    folder = tmp_path / "a.b"
    folder.mkdir()
    (folder / name).write_text(NEIGHBOURED)
    (folder / "neighbour.py").write_text("def units(number): return number * 10")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    try:
        assert factories.load(f"a.b/{name}:build")() == 40
        assert factories.load(str(folder / name) + ":Size")(3).units == 3
        standard = name.removesuffix(".py")
        if standard in ("json", "xml", "wave"):
            monkeypatch.setattr(sys, "path", sys.path[2:])
            assert "a.b" not in importlib.import_module(standard).__file__
    finally:
        for added in set(sys.modules) - set(before):
            del sys.modules[added]


def test_files_of_one_name(tmp_path, monkeypatch):
    """Each is its own; one that is imported already is that module; a broken one leaves nothing."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    try:
        for folder in ("one", "other"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "twins.py").write_text(f"def build(): return {folder!r}")
        found = [factories.load(f"{tmp_path / folder / 'twins.py'}:build") for folder in ("one", "other", "one")]
        assert [build() for build in found] == ["one", "other", "one"]
        assert found[0] is found[2]
        (tmp_path / "broken.py").write_text("raise RuntimeError('mine')")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mine"):
                factories.load(f"{tmp_path / 'broken.py'}:build")
        assert not any("broken" in name for name in sys.modules)
    finally:
        for added in set(sys.modules) - before:
            del sys.modules[added]


def run_here(arguments, folder, monkeypatch, capsys):
    """Run the command in this process and a folder; return its exit code, and what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    try:
        code = cli.main(["verify", *arguments])
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr()


def write_factories(folder):
    (folder / "sub").mkdir()
    for name in ("mine.py", "sub/other.py"):
        (folder / name).write_text(FACTORIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine:number"], "Expected mine:number to be a function. Received: 3"),
        (["mine:missing"], "Expected mine to have missing"),
        (["mine.py:buld"], "Expected mine.py to have buld. Received: none of that name there. Write mine.py:build"),
        (["nowhere:build"], "Expected an importable module. Received: nowhere"),
        (["nowhere.py:build"], "Expected a file nowhere.py"),
        (["mine"], "Expected module:function or file.py:function. Received: mine"),
        (["mine:build", "--towers", "1"], "expected a whole number from 2, received '1'"),
        (["mine:of_width"], "Expected mine:of_width to need no arguments. Received: of_width(width)"),
        ([], "the following arguments are required: factory"),
    ],
)
def test_command_line_that_is_not_understood(tmp_path, monkeypatch, capsys, arguments, message):
    """Exit code 2, with one sentence."""
    write_factories(tmp_path)
    code, printed = run_here(arguments, tmp_path, monkeypatch, capsys)
    assert (code, printed.out) == (2, "")
    assert message in printed.err and "Traceback" not in printed.err


def test_help_needs_no_tensorflow():
    """The command line answers before TensorFlow is imported."""
    code = (
        "import sys\nfrom ncclsync.tools.cli import main\n"
        "try:\n    main(['verify', '--help'])\nexcept SystemExit as end:\n    print(end.code)\n"
        "print(sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout.endswith("0\n[]\n"), done.stdout + done.stderr


def test_public_name():
    """`ncclsync.verify` is the function, whatever was imported before."""
    assert ncclsync.verify is verification.verify
    assert "verify" in ncclsync.__all__
