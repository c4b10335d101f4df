"""N towers train like one device: ways of feeding, options of compile and fit, sizes of batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

X, Y = data()
WEIGHTS = np.linspace(0.1, 2.0, len(X)).astype("float32")


class Sequence(keras.utils.PyDataset):
    """Batches of 16, the last one of 13."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(16 * index, 16 * index + 16)
        return X[rows], Y[rows]


def dataset(batch_size=20, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size, drop_remainder=drop_remainder)


def generator():
    for begin in range(0, len(X), 13):
        yield X[begin : begin + 13], Y[begin : begin + 13]


def unknown_cardinality():
    return dataset(19).filter(lambda x, y: True)


def fit(model, *arguments, **options):
    """Fit two epochs; return what can be compared."""
    options = {"epochs": 2, "verbose": 0, "shuffle": False, **options}
    history = model.fit(*arguments, **options).history
    return [history, model.get_weights(), [np.asarray(v) for v in model.optimizer.variables]]


FEEDS = {
    "numpy_last_batch_of_one_row": lambda m: fit(m, X, Y, batch_size=20),
    "every_batch_smaller_than_towers": lambda m: fit(m, X[:7], Y[:7], batch_size=2),
    "batch_size_1": lambda m: fit(m, X[:5], Y[:5], batch_size=1),
    "first_batch_odd": lambda m: fit(m, X[:13], Y[:13], batch_size=13),
    "sample_weight": lambda m: fit(m, X, Y, batch_size=16, sample_weight=WEIGHTS),
    "class_weight": lambda m: fit(
        m, X, Y, batch_size=16, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0, 4: 3.0}
    ),
    "validation_split": lambda m: fit(m, X, Y, batch_size=16, validation_split=0.3),
    "tf_data": lambda m: fit(m, dataset()),
    "tf_data_static_shapes": lambda m: fit(m, dataset(12, drop_remainder=True)),
    "py_dataset": lambda m: fit(m, Sequence()),
    "steps_per_epoch": lambda m: fit(m, dataset(8).repeat(), steps_per_epoch=5),
    "train_on_batch": lambda m: [
        [m.train_on_batch(X[i : i + k], Y[i : i + k]) for i, k in ((0, 10), (10, 3), (13, 1), (14, 40))],
        m.get_weights(),
    ],
    "test_on_batch": lambda m: [m.test_on_batch(X[:k], Y[:k], sample_weight=WEIGHTS[:k]) for k in (1, 3, 10)],
    "predict_on_batch": lambda m: [m.predict_on_batch(X[:k]) for k in (1, 3, 10)],
    "predict": lambda m: [m.predict(X[:k], batch_size=6, verbose=0) for k in (1, 6, 17)],
    "evaluate": lambda m: [m.evaluate(X[:k], Y[:k], batch_size=6, verbose=0) for k in (1, 6, 17)],
}


@pytest.mark.parametrize("name", FEEDS)
def test_feeding(name):
    """Whatever feeds the batches, and however many rows they have."""
    model = on_towers(mlp, 4)
    assert_close(FEEDS[name](model), FEEDS[name](mlp()), what=name)
    assert_towers_agree(model)


@pytest.mark.parametrize("feed", [generator, unknown_cardinality])
def test_feeding_until_the_end(feed):
    """A source of unknown length. Keras' own step counts one iteration too many there: it adds to
    `optimizer.iterations` while the batch cannot be had. So the reference is a source of known length.
    """
    batch_size = 13 if feed is generator else 19
    model = on_towers(mlp, 4)
    assert_close(fit(model, feed(), epochs=1), fit(mlp(), X, Y, batch_size=batch_size, epochs=1))
    assert_towers_agree(model)


COMPILED = {
    "steps_per_execution": dict(steps_per_execution=3),
    "jit_compile": dict(jit_compile=True),
    "jit_compile_off": dict(jit_compile=False),
    "run_eagerly": dict(run_eagerly=True),
    "weighted_metrics": dict(weighted_metrics=["accuracy"]),
    "no_metrics": dict(metrics=None),
    "several_metrics": dict(
        metrics=["accuracy", "sparse_top_k_categorical_accuracy", "sparse_categorical_crossentropy"]
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile_option(name):
    """Options of `compile` mean on towers what they mean on one device."""

    def factory():
        return mlp(**COMPILED[name])

    def run(model):
        fitted = fit(model, X, Y, batch_size=17, sample_weight=WEIGHTS, epochs=2)
        return [fitted, model.evaluate(X, Y, verbose=0, batch_size=20), model.predict(X, verbose=0)]

    model = on_towers(factory, 3)
    assert_close(run(model), run(factory()), what=name)
    assert_towers_agree(model)


def test_steps_per_execution_leaves_no_batch_behind():
    """A number of batches that is no multiple of steps_per_execution trains on every batch once."""

    def run(model):
        return fit(model, unknown_cardinality(), epochs=2)

    def factory():
        return mlp(steps_per_execution=3)

    model = on_towers(factory, 2)
    assert_close(run(model), fit(mlp(), X, Y, batch_size=19))
    assert int(model.optimizer.iterations.numpy()) == 2 * 4


def test_compile_again():
    """Compiling again, before the first fit and after it, takes effect on all towers."""

    def run(model):
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        first = fit(model, X, Y, batch_size=20)
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
        )
        return [first, fit(model, X, Y, batch_size=20)]

    model = on_towers(mlp, 3)
    assert_close(run(model), run(mlp()))
    assert_towers_agree(model)


def test_uncompiled_model_is_compiled_after_the_decorator():
    """A factory may leave compiling to its caller."""

    def factory():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(5, activation="softmax")])

    def run(model):
        model.compile("adam", "sparse_categorical_crossentropy")
        return fit(model, X, Y, batch_size=20)

    model = on_towers(factory, 2)
    assert_close(run(model), run(factory()))


def test_small_buckets():
    """The bucket size changes how gradients travel, not what arrives."""
    model = on_towers(mlp, 3, bucket_bytes=100)
    assert_close(fit(model, X, Y, batch_size=20), fit(mlp(), X, Y, batch_size=20))


def test_update_by_hand():
    """A step that writes weights without an optimizer takes the mean over the batch all the same."""

    class ByHand(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for weight, gradient in zip(
                self.trainable_weights, tape.gradient(loss, self.trainable_weights), strict=True
            ):
                weight.assign_sub(0.1 * gradient)
            return {"loss": loss}

    def factory():
        keras.utils.set_random_seed(1)
        model = ByHand([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def run(model):
        return [
            model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False).history,
            model.get_weights(),
        ]

    model = on_towers(factory, 4)
    assert_close(run(model), run(factory()))
    assert_towers_agree(model)
