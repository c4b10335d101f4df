"""What a model is given: None for an optional input; data whose length nobody knows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, on_towers, state

import ncclsync
from ncclsync import Towers, nccl_parallel, verify

X, _ = data(rows=26, features=5)
MORE, _ = data(rows=26, features=3, seed=1)
Y, _ = data(rows=26, features=1, seed=2)


class MaybeBoth(keras.layers.Layer):
    """Projects one input, or two and adds them up."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(4), keras.layers.Dense(4)

    def build(self, one_shape, other_shape=None):
        self.one.build((None, 5))
        self.other.build((None, 3))

    def call(self, one, other=None):
        return self.one(one) if other is None else self.one(one) + self.other(other)

    def compute_output_shape(self, one_shape, other_shape=None):
        return one_shape[0], 4


def optional(steps=1, eagerly=False, named=False):
    """A functional model whose second input may be None; its inputs a list, or a dictionary."""
    keras.utils.set_random_seed(1)
    one, other = keras.Input((5,), name="one"), keras.Input((3,), name="other", optional=True)
    outputs = keras.layers.Dense(1)(MaybeBoth()(one, other))
    model = keras.Model({"one": one, "other": other} if named else [one, other], outputs)
    options = {"steps_per_execution": steps, "run_eagerly": eagerly, "metrics": ["mae"]}
    model.compile(keras.optimizers.SGD(0.02), "mse", **options)
    return model


def inputs(other, named=False, at=slice(None)):
    pair = (X[at], None if other is None else other[at])
    return dict(zip(("one", "other"), pair, strict=True)) if named else pair


def generator(other, named=False):
    for begin in range(0, 26, 4):
        at = slice(begin, begin + 4)
        yield inputs(other, named, at), Y[at]


def every_call(model, named, other=None):
    """All that Keras trains, evaluates and predicts by, on arrays, `tf.data` and a generator."""
    x = inputs(other, named)
    options = {"batch_size": 4, "verbose": 0}
    slices = tf.data.Dataset.from_tensor_slices((x, Y)).batch(4)
    return {
        "fit": model.fit(x, Y, shuffle=False, validation_data=(x, Y), **options).history,
        "fit weighted": model.fit(x, Y, sample_weight=np.arange(26.0) / 26.0, shuffle=False, **options).history,
        "fit tf.data": model.fit(slices, verbose=0).history,
        "fit generator": model.fit(generator(other, named), verbose=0).history,
        "train_on_batch": model.train_on_batch(x, Y),
        "evaluate": model.evaluate(x, Y, **options),
        "evaluate generator": model.evaluate(generator(other, named), verbose=0),
        "test_on_batch": model.test_on_batch(x, Y),
        "predict": model.predict(x, **options),
        "predict tf.data": model.predict(slices, verbose=0),
        "predict_on_batch": model.predict_on_batch(x),
        "weights": model.get_weights(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps, eagerly, named, towers", [(1, False, True, 3), (3, False, False, 2), (1, True, False, 2)]
)
def test_none_as_an_input(steps, eagerly, named, towers):
    """By every way into a model; the same numbers as on one device. With the input given, too."""
    alone = optional(steps, eagerly, named)
    model = on_towers(lambda: optional(steps, eagerly, named), towers)
    for other in (None, MORE) if steps == 1 and not eagerly else (None,):
        assert_close(every_call(model, named, other), every_call(alone, named, other))
    assert_towers_agree(model)


@pytest.mark.slow
def test_none_beside_callbacks_and_verify(tmp_path):
    """`Timeline`, `on_nonfinite`, `Shuffled`, `explain` and `verify` take it as any other batch."""
    model = on_towers(optional, 2, health=ncclsync.Health(on_nonfinite="raise"))
    watching = [ncclsync.Throughput(), ncclsync.Timeline(tmp_path / "trace.json")]
    pairs = ncclsync.Shuffled(inputs(None), Y, batch_size=8, seed=1)
    assert [[x[1] for x, _ in pairs], pairs.rows] == [[None] * 4, 26]
    model.fit(pairs, verbose=0, callbacks=watching)
    assert (tmp_path / "trace.json").exists() and model.towers.divergence() == 0.0
    assert model.towers.explain((inputs(None), Y)).shards[1].begin == 13
    bad = (np.full_like(X, np.nan), None)
    with pytest.raises(ncclsync.NonFiniteError, match="tower 0, rows 0 to 3, for"):
        model.fit(bad, Y, batch_size=8, verbose=0)
    assert verify(optional, (inputs(None), Y), towers=2, steps=2).ok


def test_none_in_a_step_of_ones_own():
    """`Towers.run` hands it on; another structure is another trace."""
    with Towers(3) as towers:

        def step(batch):
            return batch["x"] * (2.0 if batch["scale"] is None else batch["scale"])

        for scale in (None, np.float32(3.0), None):
            doubled = towers.run(step, {"x": X, "scale": scale})
            np.testing.assert_array_equal(doubled, X * (scale or np.float32(2.0)))


class Told(keras.callbacks.Callback):
    """What callbacks are told, and `iterations` at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.calls, self.iterations = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch", epoch, self.params["steps"]))
        self.iterations.append(int(self.model.optimizer.iterations))


def batches(length):
    """Seven batches, of a length that is known or not, or from a generator."""
    if length == "generator":
        return ((X[at : at + 4], Y[at : at + 4]) for at in range(0, 26, 4))
    known = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    unknown = known.filter(lambda x, y: True)
    return unknown if length == "unknown" else unknown.apply(tf.data.experimental.assert_cardinality(7))


def regression(steps=1, optimizer=None, **options):
    """With Adam, whose updates depend on `iterations`, or another optimizer."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.Adam(0.02)
    model.compile(optimizer, "mse", steps_per_execution=steps, metrics=["mae"], **options)
    return model


class Counting(keras.Sequential):
    """Counts its training steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def train_step(self, data):
        self.count.assign_add(1.0)
        return super().train_step(data)


def counting_regression(optimizer):
    model = Counting([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


class InsertingIntoATable(Counting):
    """Counts in a table, and in Python."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        self.called = []

    def train_step(self, data):
        """Count."""
        key = tf.constant([1], tf.int64)
        self.table.insert(key, self.table.lookup(key) + 1)
        tf.numpy_function(lambda: self.called.append(1), [], [])
        return keras.Sequential.train_step(self, data)


def inserting_regression(optimizer):
    model = InsertingIntoATable([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def drawing_regression(optimizer):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def decayed(optimizer):
    return regression(optimizer=keras.optimizers.get({"class_name": optimizer, "config": {"weight_decay": 0.1}}))


def regression_of_sevens(optimizer):
    return regression(optimizer=optimizer)


def fitted(model, length, **options):
    told = Told()
    epochs = 1 if length == "generator" else 3
    history = model.fit(batches(length), epochs=epochs, verbose=0, callbacks=[told], **options).history
    return told, {"history": history, "evaluate": model.evaluate(batches(length), verbose=0), **state(model)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "length, steps, options",
    [("unknown", 1, {}), ("unknown", 3, {}), ("unknown", 1, {"steps_per_epoch": 9}), ("generator", 1, {})],
)
def test_data_of_unknown_length(length, steps, options):
    """Epochs, steps and what callbacks are told are Keras'; weights, optimizer and `iterations` those of one
    device that knows the length. Keras itself counts the step that finds no batch, unless XLA compiles it,
    or a call makes several steps.
    """
    model = on_towers(lambda: regression(steps), 2)
    told, results = fitted(model, length, **options)
    keras_told, _ = fitted(regression(steps), length, **options)
    assert told.calls == keras_told.calls
    expected, right = fitted(regression(steps), "known")
    if length == "unknown":
        assert_close(results, right)
    assert told.iterations == expected.iterations[: len(told.iterations)]
    surplus = [one - other for one, other in zip(keras_told.iterations, told.iterations, strict=True)]
    # Keras' step fails while it counts: TensorFlow does not promise which of the two comes first.
    most = range(1, 4) if steps == 1 else (0, 0, 0)
    assert all(0 <= one <= limit for one, limit in zip(surplus, most, strict=False))
    assert_towers_agree(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_of_unknown_length_are_warned_of(caplog):
    """Once, since Keras differs, if only in `iterations`, which callbacks may read; not where the length is known."""

    def warned(length, optimizer, make=regression):
        caplog.clear()
        model = nccl_parallel(towers=2)(lambda: make(optimizer=optimizer))()
        data = batches(length)
        if make is regression_of_sevens:
            data = data.unbatch().batch(7, drop_remainder=True)
        model.fit(data, epochs=2, verbose=0)
        assert model.evaluate(data, verbose=0) is not None
        return [r.getMessage() for r in caplog.records if "assert_cardinality" in r.getMessage()]

    assert warned("known", "adam") == []
    for optimizer, make, written in [
        ("adam", regression, "iteration"),
        ("sgd", regression, "iteration"),
        ("sgd", decayed, "kernel"),
        ("sgd", counting_regression, "count"),
        ("sgd", drawing_regression, "seed_gen"),
        ("sgd", regression_of_sevens, "loss/count"),  # of rows, of whose number Keras knows
        ("sgd", inserting_regression, "the state of LookupTableInsertV2, at "),
        ("sgd", inserting_regression, "the state of PyFunc, at "),
    ]:
        (told,) = warned("unknown", optimizer, make)
        assert written in told


def test_data_that_raise_are_warned_of(caplog):
    """Keras has counted the step that got no batch, and goes on; towers have not."""

    def reads(fails_at):
        for i in range(4):
            if i == fails_at:
                raise OSError("a disk")
            yield X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]

    spec = (tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1]))
    data = [tf.data.Dataset.from_generator(lambda at=at: reads(at), output_signature=spec) for at in (2, 9)]
    counted = []
    for build in (regression, nccl_parallel(towers=2)(regression)):
        model = build()
        with pytest.raises(tf.errors.UnknownError):
            model.fit(data[0], steps_per_epoch=4, verbose=0)
        counted.append(int(model.optimizer.iterations))
    (told,) = (one.getMessage() for one in caplog.records if "the data have raised" in one.getMessage())
    assert "UnknownError" in told and "/iteration also" in told and counted == [3, 2]
    caplog.clear()
    model.fit(data[1], steps_per_epoch=4, verbose=0)
    assert "the data have raised" not in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_keras_counts_no_step_without_a_batch_by_xla():
    """Nor eagerly: where Keras does not count one, towers and Keras agree on data of unknown length."""
    for options in ({"jit_compile": True}, {"run_eagerly": True}):
        told, _ = fitted(regression(**options), "unknown")
        assert told.iterations == [7, 14, 21]


class Halves(keras.layers.Layer):
    """Swap the halves of a batch, by Python's own number of its rows."""

    def call(self, x):
        half = x.shape[0] // 2
        return tf.concat([x[half:], x[:half]], 0)


class InAModel(keras.Model):
    """The same in a model, which Keras builds and wraps what it raises."""

    def __init__(self):
        super().__init__()
        self.inner = [keras.layers.Dense(3), Halves(), keras.layers.Dense(1)]

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


FIXED = np.linspace(-1, 1, 48, dtype="float32").reshape(12, 4)
ENTRIES = {
    "fit": lambda model: model.fit(
        tf.data.Dataset.from_tensor_slices((FIXED, FIXED)).batch(6, drop_remainder=True), verbose=0
    ).history["loss"],
    "train_on_batch": lambda model: [model.train_on_batch(FIXED[:n], FIXED[:n]) for n in (6, 6)],
    "predict_on_batch": lambda model: [model.predict_on_batch(FIXED[:n]) for n in (6, 6)],
    "predict": lambda model: model.predict(FIXED, batch_size=6, verbose=0),
    "run": lambda model: np.asarray(getattr(model, "towers_run", lambda step, x: step(x))(model, FIXED)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("kind", "entry"), [(InAModel, name) for name in ENTRIES] + [(keras.Sequential, "fit")])
def test_python_that_reads_the_number_of_rows(kind, entry, caplog):
    """Every entry computes what one device does, by each tower's own rows: all are told the number."""

    def build():
        keras.utils.set_random_seed(1)
        given = () if kind is InAModel else ([keras.layers.Dense(3), Halves(), keras.layers.Dense(1)],)
        model = kind(*given)
        model.compile("sgd", "mse")
        return model

    with Towers(2) as towers:
        if entry == "run":
            model = build()
            model.towers_run = towers.run
        else:
            model = nccl_parallel(towers=2)(build)()
        found = ENTRIES[entry](model)
    assert_close([found, model.get_weights()], [ENTRIES[entry](alone := build()), alone.get_weights()])
    assert "a fixed number of rows" not in caplog.text


def test_len_of_a_tensor_in_a_step_of_ones_own():
    """As `tf.function` gives it, for any batch; what autograph cannot mend is raised as it is."""

    def step(x):
        total = 0.0
        for row in range(len(x)):
            total += x[row, 0]
        return total / tf.cast(len(x), tf.float32)

    with Towers(2) as towers:
        for rows in (6, 5):
            assert_close(towers.run(step, X[:rows]), X[:rows, 0].mean())
        with pytest.raises(TypeError, match=r"^unsupported operand"):
            towers.run(lambda x: x + "a" / 3, X)


def test_what_placing_raises_is_no_want_of_rows(monkeypatch, caplog):
    """A ValueError of the placing of a step is raised, by whatever entry, and no line of the user's is blamed."""
    calls = []

    def refuse(*_, **__):
        calls.append(1)
        raise ValueError("no placement")

    monkeypatch.setattr("ncclsync.towers.programs.cut", refuse)
    model = on_towers(regression, 2)
    with Towers(2) as towers:
        entries = (lambda: towers.run(lambda x: 2 * x, X), lambda: model.fit(X, Y, verbose=0), lambda: model.predict(X))
        for run in entries:
            with pytest.raises(ValueError, match=r"^no placement$"):
                run()
    assert len(calls) == len(entries) and "fixed number of rows" not in caplog.text


@pytest.mark.parametrize("kind", ["dataset", "iterator", "generator", "Shuffled"])
def test_a_dataset_in_place_of_a_batch(kind):
    """One sentence refuses it, before anything is traced."""
    batches = tf.data.Dataset.from_tensor_slices(X).batch(4)
    given = {
        "dataset": batches,
        "iterator": iter(batches),
        "generator": (batch for batch in batches),
        "Shuffled": ncclsync.Shuffled(X, batch_size=4, seed=1),
    }
    with Towers(2) as towers, pytest.raises(TypeError, match=r"of one batch. Received: .* `for batch in dataset"):
        towers.run(lambda x: x, given[kind])


def test_towers_entered_again():
    """As users of `strategy.scope()` do, in each epoch: refused where the second `with` begins."""
    with Towers(2) as towers:
        towers.run(lambda x: x, X)
    with pytest.raises(ncclsync.NcclSyncError, match="all epochs within one `with`, or make new Towers"), towers:
        pass


class TwoSets(keras.Model):
    """A prediction for each row of one tensor, and the mean of another one, with rows of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(inputs[0]) + tf.reduce_mean(inputs[1])


def test_an_epoch_ends_within_a_call_after_uneven_tensors():
    """The last batch of a call that is to make four steps has tensors of unequal rows: its logs are the epoch's."""
    rng = np.random.default_rng(0)
    given = [[rng.normal(size=shape).astype("float32") for shape in ((8, 3), (rows, 2))] for rows in (8, 12)]

    def generate():
        for one in given:
            yield tuple(one), np.ones((8, 1), "float32")

    spec, found = tf.TensorSpec, []
    inputs = (spec([None, 3], tf.float32), spec([None, 2], tf.float32))

    def build():
        model = TwoSets()
        model.compile("sgd", "mse", steps_per_execution=4, jit_compile=False)
        return model

    for model in (build(), on_towers(build, 2)):
        batches = tf.data.Dataset.from_generator(generate, output_signature=(inputs, spec([None, 1], tf.float32)))
        found.append(model.fit(batches, verbose=0).history["loss"])
        assert int(model.optimizer.iterations) == 2
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("value", [True, "a text", 2, 0.5])
def test_a_value_of_pythons_in_a_batch_of_a_loop_is_warned_of(value, caplog):
    """It reaches the step as a tensor, in which Python's own questions find no such value."""
    with Towers(2) as towers:
        for _ in range(2):
            towers.run(lambda batch: tf.reduce_sum(batch[0]), (np.ones((4, 2)), value))
    assert caplog.text.count("reach the step as tensors") == 1
