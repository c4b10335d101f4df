"""N towers train like one device: steps, losses, optimizers and layers that are not the usual ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

from ncclsync import ops

X, Y = data()
IDS = np.random.default_rng(3).integers(0, 20, (len(X), 7))
WORDS = tf.constant(np.array(list("abcde"), dtype=object)[Y][:, None])


def sequential(*body, inputs=(12,), dtype=None, cls=keras.Sequential, **compile_arguments):
    """A factory of a Sequential model with 5 logits behind `body`."""
    compile_arguments.setdefault("optimizer", "adam")
    compile_arguments.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def factory():
        keras.utils.set_random_seed(1)
        model = cls([keras.Input(inputs, dtype=dtype), *(make() for make in body), layers.Dense(5)])
        optimizer = compile_arguments["optimizer"]
        optimizer = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(**{**compile_arguments, "optimizer": optimizer})
        return model

    return factory


class CustomStep(keras.Sequential):
    """A train_step with a loss of its own, spelled out."""

    def loss_of(self, x, y):
        return self.compute_loss(x, y, self(x, training=True))

    def processed(self, gradients):
        return gradients

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = self.processed(tape.gradient(loss, self.trainable_weights))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients), "rows": tf.shape(x)[0]}


class GradientPenalty(CustomStep):
    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x, training=True)
        penalty = tf.reduce_sum(tf.square(tape.gradient(outputs, x)), axis=1)
        return self.compute_loss(x, y, outputs) + tf.reduce_mean(penalty)


class ControlFlow(CustomStep):
    def loss_of(self, x, y):
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, 0.9 * h), (tf.constant(0), x))
        h = tf.cond(tf.shape(x)[0] > 0, lambda: h + 1.0, lambda: h)
        return self.compute_loss(x, y, self(h, training=True))


class ReducedByHand(CustomStep):
    """Clips the global gradient, which it asks for."""

    def processed(self, gradients):
        return tf.clip_by_global_norm(ops.all_reduce(gradients), 0.1)[0]


class GraphStep(CustomStep):
    @tf.function
    def train_step(self, batch):
        x, y = batch
        if tf.shape(x)[0] > 0:  # needs autograph
            x = x + 1.0
        return CustomStep.train_step(self, (x, y))


class ScalarTracker(keras.Sequential):
    """Tracks a batch's loss as tutorials do: without a weight."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


class Counting(keras.Sequential):
    """Has variables of its own, that are no layer's: they count steps and rows, and average the inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = [tf.Variable(0, trainable=False), tf.Variable(0, trainable=False)]
        self.average = tf.Variable(0.0, trainable=False)

    def train_step(self, batch):
        self.counts[0].assign_add(1)
        self.counts[1].assign_add(tf.shape(batch[0])[0])
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(batch[0]))
        return super().train_step(batch)


class MeanMagnitude(keras.metrics.Metric):
    """A user's own metric."""

    def __init__(self, name="magnitude"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.rows = self.add_weight(shape=(), initializer="zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_pred)))
        self.rows.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))

    def result(self):
        return self.total / self.rows


def dense():
    return layers.Dense(16, activation="relu")


def strings():
    keras.utils.set_random_seed(1)
    words = keras.Input((1,), dtype="string")
    codes = layers.StringLookup(vocabulary=list("abcde"), output_mode="one_hot")(words)
    model = keras.Model(words, layers.Dense(5)(codes))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def classifier_metrics():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), layers.Dense(1, activation="sigmoid")])
    metrics = [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.R2Score(), MeanMagnitude()]
    model.compile("adam", "binary_crossentropy", metrics=metrics)
    return model


def embedding():
    return layers.Embedding(20, 4)


def masked_embedding():
    return layers.Embedding(20, 4, mask_zero=True)


CASES = {
    "gradient_penalty": (sequential(dense, cls=GradientPenalty), X, Y),
    "control_flow": (sequential(dense, cls=ControlFlow), X, Y),
    "reduced_by_hand": (sequential(dense, cls=ReducedByHand), X, Y),
    "step_is_a_tf_function": (sequential(dense, cls=GraphStep), X, Y),
    "scalar_tracker": (sequential(dense, cls=ScalarTracker), X, Y),
    "own_variables": (sequential(dense, cls=Counting), X, Y),
    "own_variables_eagerly": (sequential(dense, cls=ReducedByHand, run_eagerly=True), X, Y),
    "strings": (strings, WORDS, Y),
    "classifier_metrics": (classifier_metrics, X, (Y > 2).astype("float32")[:, None]),
    "sparse_gradients": (sequential(embedding, layers.Flatten, inputs=(7,), dtype="int32"), IDS, Y),
    "sparse_gradients_eagerly": (
        sequential(embedding, layers.Flatten, inputs=(7,), dtype="int32", run_eagerly=True),
        IDS,
        Y,
    ),
    "masked_lstm": (
        sequential(masked_embedding, lambda: layers.LSTM(6), inputs=(7,), dtype="int32"),
        np.where(np.arange(7) < 1 + np.arange(len(X))[:, None] % 6, IDS, 0),
        Y,
    ),
    "sum_loss": (
        sequential(
            dense, loss=keras.losses.SparseCategoricalCrossentropy(True, reduction="sum"), optimizer="sgd"
        ),
        X,
        Y,
    ),
    "regularised": (
        sequential(lambda: layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2")),
        X,
        Y,
    ),
    "global_clipnorm": (sequential(dense, optimizer=lambda: optimizers.SGD(1.0, global_clipnorm=0.1)), X, Y),
    "accumulation": (
        sequential(dense, optimizer=lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)),
        X,
        Y,
    ),
    "ema": (
        sequential(dense, optimizer=lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)),
        X,
        Y,
    ),
    "loss_scale": (
        sequential(dense, optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01))),
        X,
        Y,
    ),
    "constraint": (sequential(lambda: layers.Dense(8, kernel_constraint="max_norm"), optimizer="sgd"), X, Y),
    "frozen": (sequential(lambda: layers.Dense(8, trainable=False)), X, Y),
}


def train(model, x, y):
    history = model.fit(x, y, batch_size=20, epochs=3, shuffle=False, verbose=0)
    own = [*getattr(model, "counts", []), *([model.average] if hasattr(model, "average") else [])]
    return [history.history, model.get_weights(), [variable.numpy() for variable in own]]


@pytest.mark.parametrize("name", CASES)
def test_program(name):
    """Three towers give one device's numbers; the last of four batches has a single row."""
    factory, x, y = CASES[name]
    model = on_towers(factory, 3)
    assert_close(train(model, x, y), train(factory(), x, y), what=name)
    assert_towers_agree(model)


def test_moving_statistics_are_means_over_the_batch():
    """Plain BatchNormalization: each shard by its own statistics, the moving mean that of the whole batch."""
    factory = sequential(layers.BatchNormalization, optimizer="sgd")
    model, alone = on_towers(factory, 4), factory()
    for one in (model, alone):
        one.fit(X[:10], Y[:10], batch_size=10, verbose=0, shuffle=False)
    assert_close(model.layers[0].moving_mean.numpy(), alone.layers[0].moving_mean.numpy())
    assert_towers_agree(model)


def test_towers_draw_different_numbers_reproducibly():
    """Dropout masks differ between towers; the same seed and N give the same run, to the bit."""

    class Masks(keras.Sequential):
        def train_step(self, batch):
            return {"masks": self(tf.ones_like(batch[0]), training=True)}

    def factory():
        keras.utils.set_random_seed(5)
        model = Masks([keras.Input((64,)), layers.Dropout(0.5, seed=7)])
        model.compile()
        return model

    runs = []
    for _ in range(2):
        model = on_towers(factory, 4)
        runs.append(model.train_on_batch(np.ones((4, 64), "float32"), return_dict=True)["masks"])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert len(np.unique(np.asarray(runs[0]), axis=0)) == 4


def test_mlp_in_float64_is_exact_to_1e_12():
    """What is left between N towers and one device is rounding."""

    def factory():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((12,), dtype="float64")
        hidden = layers.Dense(16, "tanh", dtype="float64")(inputs)
        model = keras.Model(inputs, layers.Dense(5, dtype="float64")(hidden))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True, dtype="float64"))
        return model

    model = on_towers(factory, 4)
    x = X.astype("float64")
    assert_close(train(model, x, Y)[1], train(factory(), x, Y)[1], tolerance=1e-12)


def test_mlp_after_100_steps():
    """Rounding does not grow into a difference."""
    model, alone = on_towers(mlp, 3), mlp()
    for one in (model, alone):
        one.fit(X, Y, batch_size=13, epochs=20, verbose=0, shuffle=False)
    assert_close(model.get_weights(), alone.get_weights(), tolerance=1e-4)
