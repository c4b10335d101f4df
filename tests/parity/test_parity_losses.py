"""N towers train like one device: losses, reductions, weights, masks, regularisers."""

import functools
import itertools

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers, losses
from parity import Case, check, data, spread

RNG = np.random.default_rng(5)
# 19 rows are shared evenly by no number of towers, and the last of 4 batches has 1 row.
ROWS, BATCH, TIME, CLASSES = 58, 19, 7, 5
fit = functools.partial(parity.fit, batch_size=BATCH)
X, LABELS = data(ROWS)
VALUES = RNG.uniform(0.5, 2.0, (ROWS, CLASSES)).astype("float32")
ONE_HOT = np.eye(CLASSES, dtype="float32")[LABELS]
SIGNS = np.where(VALUES > 1, 1.0, -1.0).astype("float32")
PROBABILITIES = VALUES / VALUES.sum(axis=1, keepdims=True)
PICTURES = (RNG.random((ROWS, 4, 4, 2)) < 0.3).astype("float32")
WORDS = RNG.integers(1, CLASSES, (ROWS, 3)) * (np.arange(3) < 1 + np.arange(ROWS)[:, None] % 3)
# Weights and lengths grow along each batch, so that no two shards have the same sum.
PLACE = np.arange(ROWS)[:, None] % BATCH
WEIGHTS = (0.01 + PLACE[:, 0] / 10).astype("float32")
STEP_WEIGHTS = (RNG.random((ROWS, TIME)) * (0.01 + PLACE / 10)).astype("float32")
IDS = RNG.integers(1, 20, (ROWS, TIME))
STEP_LABELS = RNG.integers(0, CLASSES, (ROWS, TIME))
UNEVEN = np.where(np.arange(TIME) < 1 + PLACE * TIME // BATCH, IDS, 0)
# The first half of a batch has no valid step: a whole shard on 2 towers and more, the last batch altogether.
HALF_MASKED = np.where(PLACE < 10, 0, UNEVEN)
SERIES = (UNEVEN[..., None] * np.array([0.1, -0.2, 0.05])).astype("float32")
CLASS_WEIGHT = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0, 4: 3.0}
REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")


def sparse_categorical(reduction="sum_over_batch_size"):
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def dense(loss, activation=None, cls=keras.Sequential, body=(), **compile_arguments):
    """A builder of an MLP with 5 outputs, with the layers that `body` makes before the last one."""

    def build():
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(8, activation="tanh"), *(make() for make in body)]
        model = cls([keras.Input((12,)), *hidden, layers.Dense(CLASSES, activation=activation)])
        model.compile(keras.optimizers.SGD(0.02), loss, **compile_arguments)
        return model

    return build


def shaped(loss, shape, activation=None, last=layers.Identity):
    """A builder of an MLP whose outputs have this shape."""

    def build():
        keras.utils.set_random_seed(1)
        units = int(np.prod(shape))
        model = keras.Sequential([keras.Input((12,)), layers.Dense(units, activation), layers.Reshape(shape), last()])
        model.compile(keras.optimizers.SGD(0.02), loss)
        return model

    return build


def timesteps(loss=None, mask=True, **compile_arguments):
    """A builder of a model with 5 logits at every timestep, those of word 0 masked."""

    def build():
        keras.utils.set_random_seed(1)
        words = layers.Embedding(20, 4, mask_zero=mask)
        model = keras.Sequential(
            [keras.Input((TIME,), dtype="int32"), words, layers.Dense(6, "tanh"), layers.Dense(CLASSES)]
        )
        # The losses of all timesteps add up where the reduction is "sum".
        model.compile(keras.optimizers.SGD(0.002), loss or sparse_categorical(), **compile_arguments)
        return model

    return build


def series(layer):
    """A builder of a model of float timesteps, masked where they are zero; `layer` turns 3 features to 4."""

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((TIME, 3)), layers.Masking(0.0), layer(), layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(0.02), sparse_categorical(), metrics=["accuracy"])
        return model

    return build


def three_outputs(reductions, loss_weights, **compile_arguments):
    """A builder of a model with outputs "label", "value" and "step", of losses of these reductions."""

    def build():
        keras.utils.set_random_seed(1)
        words = keras.Input((TIME,), dtype="int32")
        embedded = layers.Embedding(20, 4, mask_zero=True)(words)
        hidden = layers.LSTM(6)(embedded)
        outputs = {
            "label": layers.Dense(CLASSES, name="label")(hidden),
            "value": layers.Dense(CLASSES, name="value")(hidden),
            "step": layers.Dense(CLASSES, name="step")(embedded),
        }
        model = keras.Model(words, outputs)
        loss = {
            "label": sparse_categorical(reductions[0]),
            "value": losses.MeanSquaredError(reductions[1]),
            "step": sparse_categorical(reductions[2]),
        }
        model.compile(keras.optimizers.SGD(0.002), loss, loss_weights=loss_weights, **compile_arguments)
        return model

    return build


class MeanOfUnreduced(keras.Sequential):
    """Reduces a loss per sample by itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(sparse_categorical("none")(y, y_pred)))


class AddsLoss(layers.Layer):
    """Passes its inputs on; `term(inputs, scale)` is added to the loss."""

    def __init__(self, term):
        super().__init__()
        self.term = term
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        self.add_loss(self.term(inputs, self.scale))
        return inputs * self.scale


def adding(term):
    return dense(sparse_categorical(), body=[lambda: AddsLoss(term)])


def regularised(**arguments):
    return dense(sparse_categorical(), body=[lambda: layers.Dense(8, "tanh", **arguments)])


def mean_cubed_error(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3)


def squared_errors(y_true, y_pred):
    return keras.ops.square(y_true - y_pred)


# Not all are means over samples: Circle compares them, Dice and Tversky may be ratios of the batch's sums.
CLASSES_OF_LOSSES = {
    "MeanSquaredError": Case(dense(losses.MeanSquaredError()), fit(X, VALUES)),
    "MeanAbsoluteError": Case(dense(losses.MeanAbsoluteError()), fit(X, VALUES)),
    "MeanAbsolutePercentageError": Case(dense(losses.MeanAbsolutePercentageError()), fit(X, 99 * VALUES)),
    "MeanSquaredLogarithmicError": Case(dense(losses.MeanSquaredLogarithmicError(), "softplus"), fit(X, VALUES)),
    "CosineSimilarity": Case(dense(losses.CosineSimilarity()), fit(X, VALUES)),
    "Huber": Case(dense(losses.Huber(0.7)), fit(X, VALUES)),
    "LogCosh": Case(dense(losses.LogCosh()), fit(X, VALUES)),
    "Poisson": Case(dense(losses.Poisson(), "softplus"), fit(X, VALUES)),
    "KLDivergence": Case(dense(losses.KLDivergence(), "softmax"), fit(X, PROBABILITIES)),
    "Hinge": Case(dense(losses.Hinge()), fit(X, SIGNS)),
    "SquaredHinge": Case(dense(losses.SquaredHinge()), fit(X, SIGNS)),
    "CategoricalHinge": Case(dense(losses.CategoricalHinge()), fit(X, ONE_HOT)),
    "BinaryCrossentropy": Case(dense(losses.BinaryCrossentropy(from_logits=True)), fit(X, ONE_HOT)),
    "BinaryFocalCrossentropy": Case(
        dense(losses.BinaryFocalCrossentropy(apply_class_balancing=True), "sigmoid"), fit(X, ONE_HOT)
    ),
    "CategoricalCrossentropy": Case(
        dense(losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)), fit(X, ONE_HOT)
    ),
    "CategoricalFocalCrossentropy": Case(dense(losses.CategoricalFocalCrossentropy(), "softmax"), fit(X, ONE_HOT)),
    "CategoricalGeneralizedCrossEntropy": Case(
        dense(losses.CategoricalGeneralizedCrossEntropy(), "softmax"), fit(X, LABELS)
    ),
    "SparseCategoricalCrossentropy": Case(dense(losses.SparseCategoricalCrossentropy(), "softmax"), fit(X, LABELS)),
    "Circle": Case(shaped(losses.Circle(gamma=4.0), (CLASSES,), last=layers.UnitNormalization), fit(X, LABELS)),
    "CTC": Case(shaped(losses.CTC(), (6, CLASSES)), fit(X, WORDS)),
    "Dice": Case(shaped(losses.Dice(axis=(1, 2, 3)), (4, 4, 2), "sigmoid"), fit(X, PICTURES)),
    "Dice-whole_batch": Case(shaped(losses.Dice(), (4, 4, 2), "sigmoid"), fit(X, PICTURES)),
    "Tversky-whole_batch": Case(shaped(losses.Tversky(0.3, 0.7), (4, 4, 2), "sigmoid"), fit(X, PICTURES)),
    "Tversky": Case(shaped(losses.Tversky(0.3, 0.7, axis=(1, 2, 3)), (4, 4, 2), "sigmoid"), fit(X, PICTURES)),
}
CASES = {
    **CLASSES_OF_LOSSES,
    "by_name": Case(dense("mae"), fit(X, VALUES)),
    "dice-by_name": Case(shaped("dice", (4, 4, 2), "sigmoid"), fit(X, PICTURES)),
    "tversky-function": Case(shaped(losses.tversky, (4, 4, 2), "sigmoid"), fit(X, PICTURES)),
    "circle-by_name": Case(shaped("circle", (CLASSES,), last=layers.UnitNormalization), fit(X, LABELS)),
    "function": Case(dense(losses.mean_squared_error), fit(X, VALUES)),
    "function_of_elements": Case(dense(squared_errors), fit(X, VALUES)),
    "function_that_reduces": Case(dense(mean_cubed_error), fit(X, VALUES)),
    "ignored_class": Case(
        dense(losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)), fit(X, LABELS)
    ),
    "ignored_class_of_pixels": Case(
        shaped(losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), (TIME, CLASSES)),
        fit(X, np.where(UNEVEN > 0, STEP_LABELS, 0)),
    ),
    "unreduced_in_compile": Case(dense(sparse_categorical("none")), fit(X, LABELS)),
    "unreduced_in_compute_loss": Case(dense(sparse_categorical(), cls=MeanOfUnreduced), fit(X, LABELS)),
    "class_weight": Case(dense(sparse_categorical()), fit(X, LABELS, class_weight=CLASS_WEIGHT)),
    "weighted_metrics": Case(
        dense(
            sparse_categorical(), metrics=["accuracy"], weighted_metrics=["accuracy", "sparse_categorical_crossentropy"]
        ),
        fit(X, LABELS, sample_weight=WEIGHTS),
    ),
    "weights_of_zero": Case(
        dense(sparse_categorical(), weighted_metrics=["accuracy"]),
        fit(X, LABELS, sample_weight=np.where(PLACE[:, 0] < 10, 0.0, WEIGHTS)),
    ),
    **{f"{reduction}-plain": Case(dense(sparse_categorical(reduction)), fit(X, LABELS)) for reduction in REDUCTIONS},
    **{
        f"{reduction}-weights": Case(dense(sparse_categorical(reduction)), fit(X, LABELS, sample_weight=WEIGHTS))
        for reduction in REDUCTIONS
    },
}
MASKS = {
    "plain": (UNEVEN, None),
    "row_weights": (UNEVEN, WEIGHTS[:, None]),
    "step_weights": (UNEVEN, STEP_WEIGHTS),
    "half": (HALF_MASKED, STEP_WEIGHTS),
}
CASES |= {
    f"{reduction}-masked-{mask}": Case(
        timesteps(sparse_categorical(reduction), metrics=["accuracy"], weighted_metrics=["accuracy"]),
        fit(words, STEP_LABELS, sample_weight=weights),
    )
    for reduction, (mask, (words, weights)) in itertools.product(REDUCTIONS, MASKS.items())
}
CASES |= {
    "step_weights": Case(
        timesteps(mask=False, weighted_metrics=["accuracy"]), fit(IDS, STEP_LABELS, sample_weight=STEP_WEIGHTS)
    ),
    "step_weights-mean_with_sample_weight": Case(
        timesteps(sparse_categorical("mean_with_sample_weight"), mask=False),
        fit(IDS, STEP_LABELS, sample_weight=STEP_WEIGHTS),
    ),
    "masked_metrics": Case(
        timesteps(metrics=["accuracy", "sparse_categorical_crossentropy"]),
        fit(UNEVEN, STEP_LABELS, validation_data=(HALF_MASKED, STEP_LABELS)),
    ),
    "masking_layer": Case(series(lambda: layers.Dense(4)), fit(SERIES, STEP_LABELS)),
    "masking_layer_lstm": Case(series(lambda: layers.LSTM(4, return_sequences=True)), fit(SERIES, STEP_LABELS)),
    "masked_mean_squared_error": Case(
        timesteps(losses.MeanSquaredError()), fit(UNEVEN, STEP_LABELS[..., None] + VALUES[:, None])
    ),
    "outputs_of_different_reductions": Case(
        three_outputs(("sum_over_batch_size", "sum", "mean"), {"label": 1.0, "value": 0.1, "step": 2.0}),
        fit(UNEVEN, {"label": LABELS, "value": VALUES, "step": STEP_LABELS}),
    ),
    "outputs_of_different_weights": Case(
        three_outputs(
            ("mean_with_sample_weight", "sum_over_batch_size", "mean_with_sample_weight"),
            {"label": 0.5, "value": 3.0, "step": 1.0},
            weighted_metrics={"label": ["accuracy"], "value": ["mae"], "step": ["accuracy"]},
        ),
        fit(
            UNEVEN,
            {"label": LABELS, "value": VALUES, "step": STEP_LABELS},
            sample_weight={"label": WEIGHTS, "value": 2 - WEIGHTS, "step": STEP_WEIGHTS},
        ),
    ),
    "kernel_l1": Case(regularised(kernel_regularizer=keras.regularizers.L1(0.1)), fit(X, LABELS)),
    "kernel_l2": Case(regularised(kernel_regularizer=keras.regularizers.L2(0.1)), fit(X, LABELS)),
    "kernel_orthogonal": Case(
        regularised(kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1)), fit(X, LABELS)
    ),
    "bias_l1_l2": Case(
        regularised(bias_regularizer=keras.regularizers.L1L2(0.1, 0.1), bias_initializer="ones"), fit(X, LABELS)
    ),
    "activity_l1": Case(regularised(activity_regularizer=keras.regularizers.L1(0.1)), fit(X, LABELS)),
    "activity_l2": Case(regularised(activity_regularizer=keras.regularizers.L2(0.1)), fit(X, LABELS)),
    "regularised_with_summed_loss": Case(
        dense(sparse_categorical("sum"), body=[lambda: layers.Dense(8, kernel_regularizer="l2")]), fit(X, LABELS)
    ),
    "added_mean": Case(adding(lambda x, scale: 0.3 * keras.ops.mean(x * x)), fit(X, LABELS)),
    "added_mean_of_scaled": Case(adding(lambda x, scale: keras.ops.mean((scale * x) ** 2)), fit(X, LABELS)),
    "added_constant": Case(adding(lambda x, scale: keras.ops.convert_to_tensor(0.7)), fit(X, LABELS)),
    "added_of_weight": Case(adding(lambda x, scale: 0.5 * (scale - 2.0) ** 2), fit(X, LABELS)),
    "activity_regularization_layer": Case(
        dense(sparse_categorical(), body=[lambda: layers.ActivityRegularization(l1=0.1, l2=0.1)]), fit(X, LABELS)
    ),
}


def listed(second):
    """A loss over a list of the outputs and of another number of rows."""

    def loss(y, outputs):
        both = tf.TensorArray(tf.float32, 0, dynamic_size=True, infer_shape=False).write(0, outputs)
        return tf.reduce_mean(both.write(1, second(y, outputs)).concat() ** 2)

    return dense(loss)


OTHERS = {
    "rows_and_first_labels": lambda y, outputs: y[:2],
    "rows_and_constants": lambda y, outputs: tf.ones([20, CLASSES]),
    "rows_and_those_of_a_mask": lambda y, outputs: tf.boolean_mask(outputs, y[:, 0] > 1),
    "rows_and_rows": lambda y, outputs: y,
}
CASES |= {f"listed_{name}": Case(listed(second), fit(X, VALUES)) for name, second in OTHERS.items()}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), spread(CASES))
def test_losses(name, towers):
    """Same numbers as on one device."""
    check(CASES[name], towers)


def test_every_loss_class_is_in_the_table():
    """A loss that Keras adds must get a row of its name."""
    known = {*CLASSES_OF_LOSSES, "Loss"}
    exported = {name for name, value in vars(losses).items() if isinstance(value, type)}
    assert exported <= known
