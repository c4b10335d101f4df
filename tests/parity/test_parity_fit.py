"""N towers train like one device: options of compile, steps per execution, updates by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

X, Y = data()
WEIGHTS = np.linspace(0.1, 2.0, len(X)).astype("float32")


def unknown_cardinality():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(19).filter(lambda x, y: True)


def fit(model, *arguments, **options):
    """Fit two epochs; return what can be compared."""
    options = {"epochs": 2, "verbose": 0, "shuffle": False, **options}
    history = model.fit(*arguments, **options).history
    return [history, model.get_weights(), [np.asarray(v) for v in model.optimizer.variables]]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_steps_per_execution_leaves_no_batch_behind():
    """A number of batches that is no multiple of steps_per_execution trains on every batch once."""

    def run(model):
        return fit(model, unknown_cardinality(), epochs=2)

    def factory():
        return mlp(steps_per_execution=3)

    model = on_towers(factory, 2)
    assert_close(run(model), fit(mlp(), X, Y, batch_size=19))
    assert int(model.optimizer.iterations.numpy()) == 2 * 4


@pytest.mark.slow
def test_compile_again():
    """Compiling again, before the first fit and after it, takes effect on all towers."""

    def run(model):
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        first = fit(model, X, Y, batch_size=20)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
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


@pytest.mark.slow
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
        return [model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False).history, model.get_weights()]

    model = on_towers(factory, 4)
    assert_close(run(model), run(factory()))
    assert_towers_agree(model)


@pytest.mark.slow
def test_where_tensorflow_runs_functions_eagerly():
    """`tf.config.run_functions_eagerly` is for one's own functions: towers run their graphs."""
    weights = []
    for eagerly in (False, True):
        tf.config.run_functions_eagerly(eagerly)
        try:
            keras.utils.set_random_seed(1)
            model = on_towers(mlp, 3)
            model.fit(*data(), batch_size=16, verbose=0, shuffle=False)
        finally:
            tf.config.run_functions_eagerly(False)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)
