"""Models from a seeded grammar: what users combine of layers, losses, optimizers, dtypes and steps."""

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, optimizers

ROWS = 11

OPTIMIZERS = (
    lambda: optimizers.SGD(0.1),
    lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    lambda: optimizers.SGD(0.1, clipnorm=0.5),
    lambda: optimizers.Adam(0.01),
    lambda: optimizers.Adam(0.01, amsgrad=True, global_clipnorm=1.0),
    lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.01, 10), clipvalue=0.1),
    lambda: optimizers.AdamW(0.01, weight_decay=0.01),
    lambda: optimizers.Adam(0.01, use_ema=True),
    lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    lambda: optimizers.RMSprop(0.01, centered=True),
    lambda: optimizers.Adagrad(0.01),
    lambda: optimizers.Adadelta(0.01),
    lambda: optimizers.Adamax(0.01),
    lambda: optimizers.Nadam(0.01),
    lambda: optimizers.Ftrl(0.01),
    lambda: optimizers.Lion(0.01),
    lambda: optimizers.Adafactor(0.01),
    lambda: optimizers.Lamb(0.01),
    lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
)
POLICIES = ("float32", "float32", "float32", "mixed_float16", "mixed_bfloat16", "float64")


def _vectors(draw: random.Random) -> tuple[Any, Any]:
    inputs = features = keras.Input((12,))
    # Keras adds losses up in its default dtype alone.
    adds = keras.config.dtype_policy().variable_dtype == "float32"
    for _ in range(draw.randint(1, 3)):
        regularizer = draw.choice([None, "l2", "l1"]) if adds else None
        activation = draw.choice(["relu", "tanh", "gelu", "selu", "softplus", "swish", "leaky_relu"])
        features = layers.Dense(draw.choice([6, 8]), activation=activation, kernel_regularizer=regularizer)(features)
        normal = [_same, layers.BatchNormalization, layers.LayerNormalization, _dropout, _noise]
        make = draw.choice([*normal, _activity, _residual] if adds else normal)
        features = make()(features)
    return inputs, features


def _images(draw: random.Random) -> tuple[Any, Any]:
    inputs = features = keras.Input((8, 8, 2))
    for _ in range(draw.randint(1, 2)):
        make = draw.choice([layers.Conv2D, layers.DepthwiseConv2D, layers.SeparableConv2D, layers.Conv2DTranspose])
        sized = (3,) if make is layers.DepthwiseConv2D else (4, 3)
        features = make(*sized, padding="same", use_bias=draw.random() < 0.7)(features)
        features = draw.choice([_same, layers.BatchNormalization, _group_norm, _spatial_dropout])()(features)
        features = layers.Activation(draw.choice(["relu", "tanh"]))(features)
        features = draw.choice([_same, layers.MaxPooling2D, _average_pool, layers.UpSampling2D])()(features)
    return inputs, draw.choice([layers.Flatten, layers.GlobalAveragePooling2D, layers.GlobalMaxPooling2D])()(features)


def _tokens(draw: random.Random) -> tuple[Any, Any]:
    inputs = keras.Input((6,), dtype="int32")
    features = layers.Embedding(20, 8, mask_zero=draw.random() < 0.4)(inputs)
    kind = draw.choice(["pool", "gru", "lstm", "attention", "positions"])
    if kind == "gru":
        return inputs, layers.GRU(6)(features)
    if kind == "lstm":
        return inputs, layers.Bidirectional(layers.LSTM(4))(features)
    if kind == "positions":
        features = features + layers.Embedding(6, 8)(keras.ops.arange(6))
    if kind in ("attention", "positions"):
        normal = layers.LayerNormalization()(features)
        features = features + layers.MultiHeadAttention(2, 4, dropout=draw.choice([0.0, 0.1]))(normal, normal)
    return inputs, layers.GlobalAveragePooling1D()(features)


def _series(draw: random.Random) -> tuple[Any, Any]:
    inputs = features = keras.Input((7, 3))
    kind = draw.choice(["conv", "rnn", "time", "attention"])
    if kind == "conv":
        features = layers.Conv1D(5, 3, activation="relu", padding="causal", dilation_rate=2)(features)
        return inputs, layers.GlobalMaxPooling1D()(features)
    if kind == "rnn":
        return inputs, layers.SimpleRNN(5, unroll=True)(features)
    if kind == "time":
        return inputs, layers.Flatten()(layers.TimeDistributed(layers.Dense(3, activation="tanh"))(features))
    return inputs, layers.Flatten()(layers.Attention()([features, features]))


def _same() -> layers.Layer:
    return layers.Identity()


def _dropout() -> layers.Layer:
    return layers.Dropout(0.3, seed=3)


def _noise() -> layers.Layer:
    return layers.GaussianNoise(0.1, seed=4)


def _spatial_dropout() -> layers.Layer:
    return layers.SpatialDropout2D(0.2, seed=5)


def _average_pool() -> layers.Layer:
    return layers.AveragePooling2D(2)


def _group_norm() -> layers.Layer:
    return layers.GroupNormalization(2)


def _activity() -> layers.Layer:
    return layers.ActivityRegularization(l2=0.01, dtype="float32")


class Residual(layers.Layer):
    """A block of a user's own, with state that counts samples, and a loss."""

    def build(self, shape):
        """Make its weights."""
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, inputs):
        """Scale, and count."""
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
        self.add_loss(
            0.01 * keras.ops.sum(keras.ops.square(keras.ops.mean(keras.ops.cast(inputs, self.variable_dtype), axis=0)))
        )
        return inputs + self.scale * keras.ops.tanh(inputs)


def _residual() -> layers.Layer:
    return Residual()


def _summed(true, predicted):
    return keras.ops.sum(keras.ops.square(keras.ops.cast(true, predicted.dtype) - predicted))


def _contrastive(true, predicted):
    """Compares the samples of a batch with each other."""
    normal = keras.ops.normalize(predicted, axis=-1)
    near = normal @ keras.ops.transpose(normal) - keras.ops.eye(keras.ops.shape(predicted)[0], dtype=predicted.dtype)
    return keras.ops.mean(keras.ops.logsumexp(near, axis=-1)) + 0.1 * keras.ops.mean(keras.ops.abs(predicted - true))


def _ratio(true, predicted):
    weight = keras.ops.cast(true > 0, predicted.dtype) + 0.1
    errors = keras.ops.abs(predicted - keras.ops.cast(true, predicted.dtype))
    return keras.ops.sum(weight * errors) / keras.ops.sum(weight)


class Penalised(keras.Model):
    """A step of its own: a gradient penalty, and gradients clipped by hand."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data[:2]
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted) + 0.01 * tf.reduce_mean(tf.square(tf.cast(predicted, tf.float32)))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        gradients = [tf.convert_to_tensor(one) for one in gradients]
        gradients, norm = tf.clip_by_global_norm(gradients, 5.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": norm}


class ByHand(keras.Model):
    """Descends without an optimizer."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * tf.cast(tf.convert_to_tensor(gradient), variable.dtype))
        return {"loss": loss}


def generate(seed: int) -> tuple[keras.Model, tuple]:
    """Return a compiled model and a batch (x, y) or (x, y, sample_weight)."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    kind = draw.choice([_vectors, _images, _tokens, _series])
    policy = draw.choice(POLICIES)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        inputs, features = kind(draw)
        task = draw.choice(["classes", "classes", "numbers", "numbers", "yes"])
        width = {"classes": 4, "numbers": 3, "yes": 1}[task]
        outputs = layers.Dense(width, dtype="float64" if policy == "float64" else "float32")(features)
        model_type = draw.choice([keras.Model, keras.Model, keras.Model, Penalised, ByHand])
        model = model_type(inputs, outputs)
        loss, metric = {
            "classes": (
                losses.SparseCategoricalCrossentropy(from_logits=True),
                ["accuracy"] if policy == "float64" else ["accuracy", metrics.SparseTopKCategoricalAccuracy(2)],
            ),
            "numbers": (
                draw.choice(
                    ["mse", "mae", "huber", "log_cosh", losses.CosineSimilarity(), _summed, _contrastive, _ratio]
                ),
                draw.choice([["mae"], [metrics.RootMeanSquaredError(), metrics.R2Score()], []]),
            ),
            "yes": (
                losses.BinaryCrossentropy(from_logits=True),
                [metrics.AUC(from_logits=True), metrics.Precision(thresholds=0.0)],
            ),
        }[task]
        plain = callable(loss) and not isinstance(loss, losses.Loss)
        optimizer = draw.choice(OPTIMIZERS)()
        if model_type is Penalised and optimizer.gradient_accumulation_steps:
            optimizer = optimizers.Adam(0.01)
        model.compile(optimizer, loss=loss, metrics=[] if plain else metric, jit_compile=False)
    finally:
        keras.config.set_dtype_policy(before)
    dtype = "float64" if policy == "float64" else "float32"
    x = (
        rng.integers(0, 20, (ROWS, 6))
        if kind is _tokens
        else rng.standard_normal((ROWS, *inputs.shape[1:])).astype(dtype)
    )
    y = {
        "classes": lambda: rng.integers(0, 4, (ROWS, 1)),
        "numbers": lambda: rng.standard_normal((ROWS, 3)).astype(dtype),
        "yes": lambda: rng.integers(0, 2, (ROWS, 1)).astype(dtype),
    }[task]()
    weighted = not plain and draw.random() < 0.3
    return model, (x, y, rng.random(ROWS).astype(dtype)) if weighted else (x, y)
