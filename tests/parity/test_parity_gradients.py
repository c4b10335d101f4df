"""N towers train like one device: sparse, missing and clipped gradients, frozen and shared layers, dtypes."""

import functools

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers, optimizers
from parity import Case, check, data, spread, state

# 19 rows are shared evenly by no number of towers, and the last of 4 batches has 1 row.
ROWS, BATCH, TIME, WORDS = 58, 19, 7, 64
X, Y = data(ROWS)
fit = functools.partial(parity.fit, batch_size=BATCH)
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, WORDS, (ROWS, TIME))
REPEATED = IDS % 3  # every shard has the same few words, many times
DISJOINT = np.arange(ROWS)[:, None] % BATCH * 3 + IDS % 3  # no word in two rows of a batch


def compiled(model, optimizer="sgd", **arguments):
    arguments.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizers.SGD(0.1) if optimizer == "sgd" else optimizer, **arguments)
    return model


def dense(*body, optimizer=optimizers.SGD, cls=keras.Sequential, **arguments):
    """A builder of a classifier of 12 features: the layers that `body` makes, and 5 logits in float32."""

    def build():
        keras.utils.set_random_seed(1)
        model = cls([keras.Input((12,)), *(make() for make in body), layers.Dense(5)])
        return compiled(model, optimizer(0.1), **arguments)

    return build


def hidden():
    return layers.Dense(8, "tanh")


def words(optimizer=lambda: optimizers.SGD(0.1), **arguments):
    """A builder of a model with an embedding and a dense layer."""

    def build():
        keras.utils.set_random_seed(1)
        body = [layers.Embedding(WORDS, 4), layers.Flatten(), layers.Dense(5)]
        model = keras.Sequential([keras.Input((TIME,), dtype="int32"), *body])
        return compiled(model, optimizer(), **arguments)

    return build


def wide_and_deep():
    """An embedding beside dense layers."""
    keras.utils.set_random_seed(1)
    ids, features = keras.Input((TIME,), dtype="int32", name="ids"), keras.Input((12,), name="features")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 4)(ids))
    joined = layers.Concatenate()([pooled, hidden()(features)])
    return compiled(keras.Model({"ids": ids, "features": features}, layers.Dense(5)(joined)), optimizers.Adam(0.01))


def one_embedding_for_two_inputs():
    keras.utils.set_random_seed(1)
    left, right = keras.Input((TIME,), dtype="int32"), keras.Input((3,), dtype="int32")
    embedding = layers.Embedding(WORDS, 4)
    joined = layers.Concatenate(axis=1)([embedding(left), embedding(right)])
    return compiled(keras.Model([left, right], layers.Dense(5)(layers.Flatten()(joined))))


class TiedEmbedding(keras.Model):
    """One matrix for input and output: its gradient is sparse and dense."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(WORDS, 4)

    def call(self, inputs):
        mean = keras.ops.mean(self.embedding(inputs), axis=1)
        return keras.ops.matmul(mean, keras.ops.transpose(self.embedding.embeddings))


def tied():
    keras.utils.set_random_seed(1)
    return compiled(TiedEmbedding())


class Unused(layers.Layer):
    """Has a trainable variable that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

    def call(self, inputs):
        return 2.0 * inputs


class SquaredWeight(layers.Layer):
    """Uses one variable in three places."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, inputs):
        return keras.ops.tanh(inputs @ self.kernel @ self.kernel) + inputs @ keras.ops.transpose(self.kernel)


@tf.custom_gradient
def sign_straight_through(x):
    return tf.sign(x), lambda upstream: 0.5 * upstream


@tf.custom_gradient
def recomputed_tanh(x):
    def gradient(upstream):
        return upstream * (1.0 - tf.square(tf.tanh(tf.identity(x))))

    return tf.tanh(x), gradient


class Recomputing(SquaredWeight):
    """Forgets what it computed forwards, and computes it again backwards."""

    def call(self, inputs):
        return tf.recompute_grad(super().call)(inputs)


def shared():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12,))
    layer = layers.Dense(12, "tanh")
    return compiled(keras.Model(inputs, layers.Dense(5)(layer(layer(inputs)) + layer(-inputs))))


class ByHand(keras.Sequential):
    """A train_step with the gradients of the tape in hand. (Of "loss" Keras would report its own metric.)"""

    def processed(self, gradients):
        return gradients

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = self.processed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"batch_loss": loss}


def by_hand(function):
    """A subclass of `ByHand` that changes the list of gradients by this function."""
    return type("Processed", (ByHand,), {"processed": lambda self, gradients: function(gradients)})


class AppliesBareGradients(ByHand):
    """Clips, and calls `apply` itself."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"batch_loss": loss, "norm": norm}


class KeepsGradients(ByHand):
    """Adds up the gradients' norms in a variable of its own, which scales the next ones."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norms = self.add_weight(shape=(), initializer="ones", name="norms")
        self.norms.trainable = False

    def processed(self, gradients):
        self.norms.assign(0.9 * self.norms + 0.1 * tf.linalg.global_norm(gradients))
        return [gradient / self.norms for gradient in gradients]


class TwoTapes(ByHand):
    """Two losses, two gradients of the same variables, the second one projected off the first."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            first = self.compute_loss(x, y, outputs)
            second = tf.reduce_mean(tf.square(outputs))
        variables = self.trainable_variables
        pairs = zip(tape.gradient(first, variables), tape.gradient(second, variables), strict=True)
        gradients = [a + b - a * tf.reduce_sum(a * b) / (tf.reduce_sum(a * a) + 1e-3) for a, b in pairs]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"first": first, "second": second}


def clipped_embedding():
    """The sparse gradient's norm is that of the slices, not that of their sum."""
    keras.utils.set_random_seed(1)
    body = [layers.Embedding(WORDS, 4), layers.Flatten(), layers.Dense(5)]
    cls = by_hand(clipped_by_global_norm)
    return compiled(cls([keras.Input((TIME,), dtype="int32"), *body]))


def thawing(model):
    """Trains with the first layer frozen, then not, then with the last one frozen."""
    results = []
    for trainable in ([False, True], [True, True], [True, False]):
        for layer, value in zip(model.layers, trainable, strict=True):
            layer.trainable = value
        compiled(model, optimizers.Adam(0.01))
        results.append(fit(X, Y, epochs=2)(model))
    return results


def freezing_with_one_optimizer(model):
    """The same optimizer, which has slots for the frozen layer too."""
    first = fit(X, Y, epochs=1)(model)
    model.layers[0].trainable = False
    model.compile(loss=model.loss, optimizer=model.optimizer)
    return [first, fit(X, Y, epochs=1)(model)]


def in_dtypes(hidden_dtype, last="float32", optimizer=lambda: optimizers.SGD(0.1)):
    """A builder of an MLP with a hidden layer of this dtype, or dtype policy."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((12,), dtype="float64" if last == "float64" else None)
        outputs = layers.Dense(5, dtype=last)(layers.Dense(8, "tanh", dtype=hidden_dtype)(inputs))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=last)
        return compiled(keras.Model(inputs, outputs), optimizer(), loss=loss)

    return build


def weights_of_fit(*arguments, **options):
    """As `fit`, without the history: Keras' metrics are float32 in any model."""
    run = fit(*arguments, **options)

    def run_weights(model):
        run(model)
        return state(model)

    return run_weights


def hand_clipped_float64():
    keras.utils.set_random_seed(1)
    cls = by_hand(lambda gradients: tf.clip_by_global_norm(gradients, 0.05)[0])
    body = [layers.Dense(8, "tanh", dtype="float64"), layers.Dense(5, dtype="float64")]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    return compiled(cls([keras.Input((12,), dtype="float64"), *body]), loss=loss)


def clipped_by_global_norm(gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def clipped_by_norm(gradients):
    return [tf.clip_by_norm(gradient, 0.05) for gradient in gradients]


def clipped_by_value(gradients):
    return [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]


def normalised(gradients):
    return [gradient / (tf.norm(gradient) + 1e-3) for gradient in gradients]


def centralised(gradients):
    return [gradient - tf.reduce_mean(gradient, axis=0, keepdims=True) for gradient in gradients]


def squared(gradients):
    return [5.0 * gradient * tf.abs(gradient) for gradient in gradients]


def in_one_vector(gradients):
    flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], axis=0)
    flat = flat * tf.minimum(1.0, 0.1 / tf.norm(flat))
    pieces = tf.split(flat, [gradient.shape.num_elements() for gradient in gradients])
    return [tf.reshape(piece, gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


SPARSE = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
}
CASES = {
    f"sparse-{name}-{kind}": Case(words(make), fit(ids, Y))
    for name, make in SPARSE.items()
    for kind, ids in {"repeated": REPEATED, "disjoint": DISJOINT}.items()
}
# Half floats. The towers' sums over rows are rounded to 11 or 8 bits before they are added up, one device's
# once: an update may differ by about 2^-11 or 2^-8 of its size, and these updates are about 1/4 in all.
HALF, BRAIN = 2.0**-13, 2.0**-10
# Keras computes in float64 where all is float64; what remains is the order of the sum.
DOUBLE = 1e-12
CASES |= {
    "sparse-clipnorm": Case(words(lambda: optimizers.SGD(0.5, clipnorm=0.1)), fit(DISJOINT, Y)),
    "sparse-global_clipnorm": Case(words(lambda: optimizers.SGD(0.5, global_clipnorm=0.1)), fit(REPEATED, Y)),
    "sparse-loss_scale": Case(words(lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01))), fit(IDS, Y)),
    "sparse-eagerly": Case(words(run_eagerly=True), fit(IDS, Y, epochs=1)),
    "sparse-sample_weight": Case(words(), fit(IDS, Y, sample_weight=np.linspace(0.1, 2.0, ROWS))),
    "sparse-tied_to_dense": Case(tied, fit(IDS, Y)),
    "embedding_beside_dense": Case(wide_and_deep, fit({"ids": IDS, "features": X}, Y)),
    "embedding_used_twice": Case(one_embedding_for_two_inputs, fit([IDS, REPEATED[:, :3]], Y)),
    "no_gradient": Case(dense(Unused, hidden), fit(X, Y)),
    "frozen_layer": Case(dense(lambda: layers.Dense(8, trainable=False)), fit(X, Y)),
    "frozen_embedding": Case(
        dense(lambda: layers.Embedding(WORDS, 4, trainable=False), layers.Flatten), fit(np.abs(X), Y)
    ),
    "all_frozen_but_the_last": Case(
        dense(lambda: layers.Dense(8, trainable=False), lambda: layers.BatchNormalization(trainable=False)), fit(X, Y)
    ),
    "trainable_changed": Case(dense(hidden), thawing),
    "trainable_changed-same_optimizer": Case(dense(hidden), freezing_with_one_optimizer),
    "shared_layer": Case(shared, fit(X, Y)),
    "variable_used_thrice": Case(dense(SquaredWeight), fit(X, Y)),
    "custom_gradient": Case(dense(hidden, lambda: layers.Lambda(sign_straight_through)), fit(X, Y)),
    "custom_gradient-recomputing": Case(dense(lambda: layers.Dense(8, recomputed_tanh)), fit(X, Y)),
    "recompute_grad": Case(dense(Recomputing), fit(X, Y)),
    "float64_beside_float32": Case(in_dtypes("float64"), fit(X, Y)),
    "mixed_float16": Case(in_dtypes(keras.DTypePolicy("mixed_float16")), fit(X, Y), HALF),
    "mixed_float16-loss_scale": Case(
        in_dtypes(
            keras.DTypePolicy("mixed_float16"),
            optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0),
        ),
        fit(X, Y),
        HALF,
    ),
    "mixed_bfloat16": Case(in_dtypes(keras.DTypePolicy("mixed_bfloat16")), fit(X, Y), BRAIN),
    "bfloat16_weights": Case(in_dtypes("bfloat16"), fit(X, Y, epochs=1), 2.0**-8),
    "float64": Case(in_dtypes("float64", "float64"), weights_of_fit(X.astype("float64"), Y), DOUBLE),
    "float64-Adam": Case(
        in_dtypes("float64", "float64", lambda: optimizers.Adam(0.01)), weights_of_fit(X.astype("float64"), Y), DOUBLE
    ),
    "float64-clipped_by_hand": Case(hand_clipped_float64, weights_of_fit(X.astype("float64"), Y), DOUBLE),
}
PROCESSED = (clipped_by_global_norm, clipped_by_norm, clipped_by_value, normalised, centralised, squared, in_one_vector)
CASES |= {f"by_hand-{f.__name__}": Case(dense(hidden, cls=by_hand(f)), fit(X, Y)) for f in PROCESSED}
CASES |= {
    "by_hand-untouched": Case(dense(hidden, cls=ByHand), fit(X, Y)),
    "by_hand-apply": Case(dense(hidden, cls=AppliesBareGradients), fit(X, Y)),
    "by_hand-kept": Case(dense(hidden, cls=KeepsGradients), fit(X, Y)),
    "by_hand-two_tapes": Case(dense(hidden, cls=TwoTapes), fit(X, Y)),
    "by_hand-eagerly": Case(dense(hidden, cls=by_hand(clipped_by_global_norm), run_eagerly=True), fit(X, Y, epochs=1)),
    "by_hand-sparse": Case(clipped_embedding, fit(REPEATED, Y)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), spread(CASES))
def test_gradients(name, towers):
    """Same numbers as on one device."""
    check(CASES[name], towers)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("last", ["float32", "mixed_float16"])
@pytest.mark.parametrize("towers", [3, 8])
def test_steps_that_a_loss_scale_skips(towers, last):
    """A sum of float16 is infinite where one device's is, though each tower's part of it is finite."""

    def build():
        keras.utils.set_random_seed(0)
        body = [keras.layers.Dense(5, "tanh", dtype="mixed_float16"), keras.layers.Dense(1, dtype=last)]
        model = keras.Sequential([keras.Input([12]), *body])
        model.compile(optimizers.LossScaleOptimizer(optimizers.Adam(0.01)), "mse")
        return model

    def skipped(model):
        model.fit(X, 10 + 3 * X.sum(1, keepdims=True), batch_size=16, epochs=3, shuffle=False, verbose=0)
        return 12 - int(model.optimizer.inner_optimizer.iterations), float(model.optimizer.dynamic_scale)

    expected = skipped(build())
    assert 0 < expected[0] < 12
    assert skipped(parity.on_towers(build, towers)) == expected
