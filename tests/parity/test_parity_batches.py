"""N towers train, evaluate and predict like one device: any source of batches, any number of rows."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import Case, assert_close, check, data, fit, mlp, on_towers, spread, state

import ncclsync

X, Y = data()
WEIGHTS = np.linspace(0.1, 2.0, len(X)).astype("float32")


def model_of_many_dtypes():
    """Beside float32 logits: classes in int32, float16, float64 and bool, each of its own shape."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12,))
    logits = keras.layers.Dense(5)(inputs)
    outputs = {"logits": logits, "class": keras.ops.argmax(logits, axis=-1)}
    outputs["half"] = keras.ops.cast(logits, "float16")[:, None, :2]
    outputs["double"] = keras.ops.cast(logits[:, :1], "float64")
    outputs["positive"] = logits > 0
    return keras.Model(inputs, outputs)


class Batches(keras.utils.PyDataset):
    """The first `rows` rows in batches of `size`."""

    def __init__(self, rows, size):
        super().__init__()
        self.rows, self.size = rows, size

    def __len__(self):
        return -(-self.rows // self.size)

    def __getitem__(self, index):
        rows = slice(self.size * index, min(self.rows, self.size * (index + 1)))
        return X[rows], Y[rows]


def dataset(rows, size, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(size, drop_remainder=drop_remainder)


def generator(rows, size):
    for begin in range(0, rows, size):
        yield X[begin : min(rows, begin + size)], Y[begin : min(rows, begin + size)]


# Rows in all, rows in a batch.
SIZES = {
    "divisible": (48, 24),
    "indivisible": (57, 19),
    "first_batch_odd": (13, 13),
    "last_batch_of_1_row": (41, 20),
    "smaller_than_towers": (6, 2),
    "batch_size_1": (5, 1),
}
SOURCES = {
    "numpy": lambda rows, size: {"x": X[:rows], "y": Y[:rows], "batch_size": size},
    "tf_data": lambda rows, size: {"x": dataset(rows, size)},
    "unknown_cardinality": lambda rows, size: {"x": dataset(rows, size).filter(lambda x, y: True)},
    "generator": lambda rows, size: {"x": generator(rows, size)},
    "py_dataset": lambda rows, size: {"x": Batches(rows, size)},
}
KNOWN_LENGTH = {"unknown_cardinality": "tf_data", "generator": "tf_data"}


def fit_from(source, rows, size, model):
    """Fit one epoch.

    Keras' own step counts one iteration too many where a source's length is unknown: it adds to
    `optimizer.iterations` while the batch cannot be had. So the reference is then a source of known length.
    """
    if not hasattr(model, "towers"):
        source = KNOWN_LENGTH.get(source, source)
    history = model.fit(**SOURCES[source](rows, size), shuffle=False, verbose=0).history
    return {"history": history, **state(model)}


def evaluate_from(source, rows, size, model):
    return model.evaluate(**SOURCES[source](rows, size), verbose=0)


def predict_from(source, rows, size, model):
    given = SOURCES[source](rows, size)
    given.pop("y", None)
    return with_dtypes(model.predict(**given, verbose=0))


def with_dtypes(outputs):
    return [outputs, {name: output.dtype.name for name, output in outputs.items()}]


METHODS = {"fit": (mlp, fit_from), "evaluate": (mlp, evaluate_from), "predict": (model_of_many_dtypes, predict_from)}


def all_sizes(run, source, model):
    """Every size on one model, one after the other: they share what was traced for the first."""
    return {size: run(source, *SIZES[size], model) for size in SIZES}


CASES = {
    f"{method}-{source}": Case(build, functools.partial(all_sizes, run, source))
    for (method, (build, run)), source in itertools.product(METHODS.items(), SOURCES)
}


def on_batches(method, *sizes, **arguments):
    """A `run` that calls a `..._on_batch` method on successive rows, `sizes` at a time."""

    def run(model):
        call, ends = getattr(model, method), np.cumsum(sizes)
        results = []
        for rows in map(slice, ends - sizes, ends):
            of_rows = {name: value[rows] for name, value in arguments.items()}
            results.append(call(X[rows], **of_rows))
        return [results, state(model) if method == "train_on_batch" else model.get_weights()]

    return run


def dtypes_on_batches(model):
    return [with_dtypes(model.predict_on_batch(X[:rows])) for rows in (1, 3, 10)]


CASES |= {
    "train_on_batch": Case(mlp, on_batches("train_on_batch", 10, 3, 1, 40, y=Y)),
    "train_on_batch_weighted": Case(mlp, on_batches("train_on_batch", 3, 20, 1, y=Y, sample_weight=WEIGHTS)),
    "test_on_batch": Case(mlp, on_batches("test_on_batch", 10, 3, 1, 40, y=Y)),
    "test_on_batch_weighted": Case(mlp, on_batches("test_on_batch", 1, 3, 20, y=Y, sample_weight=WEIGHTS)),
    "predict_on_batch": Case(mlp, on_batches("predict_on_batch", 10, 3, 1, 40)),
    "predict_on_batch_dtypes": Case(model_of_many_dtypes, dtypes_on_batches),
    "validation_split": Case(mlp, fit(X, Y, validation_split=0.3, epochs=2)),
    "validation_data": Case(mlp, fit(X[:40], Y[:40], validation_data=(X[40:], Y[40:]), epochs=2)),
    "validation_tf_data": Case(mlp, fit(X, Y, validation_data=dataset(7, 2), epochs=2)),
    "static_shapes": Case(mlp, fit(dataset(61, 12, drop_remainder=True), batch_size=None, epochs=2)),
    "steps_per_epoch": Case(mlp, fit(dataset(61, 8).repeat(), batch_size=None, steps_per_epoch=5, epochs=2)),
    "initial_epoch": Case(mlp, fit(X, Y, initial_epoch=2, epochs=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "towers"), spread(CASES))
def test_batches(name, towers):
    """Same numbers as on one device."""
    check(CASES[name], towers)


def in_sizes(*sizes):
    """Batches of these numbers of rows."""

    def batches():
        ends = np.cumsum(sizes)
        yield from ((X[rows], Y[rows]) for rows in map(slice, ends - sizes, ends))

    signature = tf.TensorSpec([None, 12]), tf.TensorSpec([None], tf.int64)
    found = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return found.apply(tf.data.experimental.assert_cardinality(len(sizes)))


def empty_among_others(model):
    """Batches without rows first, last and in the middle, wherever a model takes batches."""
    history = model.fit(in_sizes(20, 0, 20, 1, 0), epochs=2, shuffle=False, verbose=0).history
    told = model.evaluate(in_sizes(0, 20, 0, 5), verbose=0, return_dict=True)
    rows = model.predict(in_sizes(20, 0, 5).map(lambda x, y: x), verbose=0)
    calls = model.train_on_batch(X[:0], Y[:0]), model.test_on_batch(X[:0], Y[:0])
    return history, told, rows, calls, model.predict_on_batch(X[:0]), state(model)


def normalised():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(5)]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


EMPTY = {
    "graph": Case(mlp, empty_among_others),
    "several_steps_a_call": Case(lambda: mlp(steps_per_execution=2), empty_among_others),
    "eager": Case(lambda: mlp(run_eagerly=True), empty_among_others),
    "divided_optimizer": Case(mlp, empty_among_others, options={"shard_optimizer": True}),
    "accumulating": Case(lambda: mlp(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), empty_among_others),
    "watched": Case(mlp, empty_among_others, options={"health": ncclsync.Health(on_nonfinite="raise")}),
    # Moments of no rows are NaN, also on one device.
    "normalised": Case(normalised, empty_among_others, options={"exact": ("batch_norm",)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "towers"), spread(EMPTY))
def test_batches_without_rows(name, towers):
    """They go by as on one device, as a step that has nothing to train on."""
    case = EMPTY[name]
    model = on_towers(case.build, towers, **case.options)
    assert_close(case.run(model), case.run(case.build()))
    assert model.towers.divergence() == 0.0
    model.towers.close()


@pytest.mark.slow
def test_shuffled_by_keras():
    """The batches are drawn before they are split: the seed alone decides which rows they hold."""
    check(Case(mlp, fit(X, Y, shuffle=True, epochs=2)), 3)


def test_predict_keeps_the_order_of_rows():
    """Row i of the result belongs to row i of the input, also where a tower got no row."""
    inputs = keras.Input((1,))
    model = on_towers(lambda: keras.Model(inputs, keras.layers.Identity()(inputs)), 4)
    rows = np.arange(23, dtype="float32")[:, None]
    np.testing.assert_array_equal(model.predict(rows, batch_size=5, verbose=0), rows)
    model.towers.close()
