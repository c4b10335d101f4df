"""With `exact` N towers draw what one device draws; without, they are reproducible."""

import functools
import hashlib
import inspect
import logging
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import Case, check, compiles_by_xla, data, fit, on_towers, spread

import ncclsync

INVARIANT = {"exact": ("random",)}
X, Y = data()
RNG = np.random.default_rng(3)
SEQUENCES = RNG.standard_normal((31, 6, 12)).astype("float32")
VOLUMES = RNG.standard_normal((31, 4, 3, 2, 2)).astype("float32")
IMAGES = RNG.uniform(0, 255, (15, 12, 12, 3)).astype("float32")


def classifier(layers, shape=(12,), **compile_arguments):
    """A compiled model of these layers and a last one for five classes; `layers()` makes them."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(shape), *layers(), keras.layers.Flatten(), keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compile_arguments)
    return model


def trained(x, *layers, shape=None, fit_options=None, tolerance=1e-5, **compile_arguments):
    """A row: `layers` are functions that make one layer each."""
    build = functools.partial(
        classifier, lambda: [make() for make in layers], shape or x.shape[1:], **compile_arguments
    )
    options = {"epochs": 2, "batch_size": 10, **(fit_options or {})}
    return Case(build, fit(x, Y[: len(x)], **options), tolerance, options=INVARIANT)


IN_ROWS = {"Attention", "GroupQueryAttention", "MultiHeadAttention"}  # and more, by `layer`


def layer(name, **arguments):
    """What makes a layer of Keras of that name."""
    IN_ROWS.add(name)
    return functools.partial(getattr(keras.layers, name), **arguments)


Dense = layer("Dense", units=16, activation="relu")


class Folded(keras.layers.Layer):
    """Dropout on the timesteps of all samples as rows: [rows * time, features]."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x, training=False):
        rows = keras.ops.reshape(x, (-1, x.shape[-1]))
        return tf.reshape(self.dropout(rows, training=training), tf.shape(x))


class Attention(keras.layers.Layer):
    """Three kinds, one behind the other. (Adam would move a bias of keys, without gradient, by rounding.)"""

    def __init__(self):
        super().__init__()
        self.heads = keras.layers.MultiHeadAttention(2, 4, dropout=0.3, use_bias=False)
        self.groups = keras.layers.GroupQueryAttention(
            head_dim=4, num_query_heads=4, num_key_value_heads=2, dropout=0.3, use_bias=False
        )
        self.plain = keras.layers.Attention(dropout=0.3)

    def call(self, x, training=False):
        x = self.heads(x, x, training=training)
        x = self.groups(x, x, training=training)
        return self.plain([x, x], training=training)


class Draws(keras.layers.Layer):
    """Adds what `draw(rows)` returns, of shape [rows, 1]; `rows` is a scalar tensor."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x):
        return x + keras.ops.cast(self.draw(tf.shape(x)[0], x, self.seeds), "float32")


def predict_samples(model):
    return [model.predict(X, batch_size=size, verbose=0) for size in (20, 61, 2)]


def on_samples(draw):
    """A row that predicts, in batches of three sizes, what a draw adds to the samples."""

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((12,)), Draws(draw)])

    return Case(build, predict_samples, options=INVARIANT)


def all_on_samples(draws):
    """The same of several draws, one beside the other."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((12,))
        return keras.Model(inputs, {name: Draws(draw)(inputs) for name, draw in draws.items()})

    return Case(build, predict_samples, options=INVARIANT)


def positive(x):
    """A parameter of a distribution per sample."""
    return tf.abs(x[:, :1]) + 0.5


class Gan(keras.Model):
    """A step of its own, with noise that no sample of the batch gives the shape of."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(12)])
        self.critic = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        self.optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)]

    def train_step(self, batch):
        rows = tf.shape(batch)[0]
        noise = keras.random.normal((rows, 4))  # from Keras' global generator
        weights = tf.random.stateless_uniform(
            [rows, 1], tf.stack([5, tf.cast(self.optimizers[0].iterations, tf.int32)])
        )
        parts = [self.critic, self.generator]
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise)
            mixed = weights * batch + (1 - weights) * fake
            critic_loss = tf.reduce_mean(self.critic(mixed) ** 2 + self.critic(fake) - self.critic(batch))
            losses = [critic_loss, -tf.reduce_mean(self.critic(fake))]
        for part, optimizer, loss in zip(parts, self.optimizers, losses, strict=True):
            weights = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"critic": losses[0], "generator": losses[1]}


def gan():
    keras.utils.set_random_seed(1)
    model = Gan()
    model.compile()
    return model


def dropout_model(**compile_arguments):
    return classifier(lambda: [Dense(), keras.layers.Dropout(0.5)], **compile_arguments)


class Generators(keras.layers.Layer):
    """Draws from Keras' global generator, and from TensorFlow's in a `tf.function` called before."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)
        self.off = tf.Variable(False)

    @tf.function
    def drawn(self, x):
        if self.off:
            return x
        rows = tf.shape(x)[0]
        x += self.generator.normal([rows, 1])
        x += tf.cast(self.generator.uniform([1, 16], maxval=9, dtype=tf.int32), tf.float32)
        return x * keras.random.uniform((rows, 1), seed=3)

    def call(self, x):
        return self.drawn(x) + keras.random.normal((tf.shape(x)[0], 16))


def classifier_of_open_length():
    """Dropout on [rows, time, 12], on [rows * time, 12] and on [1, time, 1]: only the features are known."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None, 12))
    x = keras.layers.Dropout(0.3)(inputs)
    x = Folded()(x)
    x = keras.layers.Dropout(0.3, noise_shape=(1, None, 1))(x)
    x = keras.layers.LSTM(4, dropout=0.3)(x)
    model = keras.Model(inputs, keras.layers.Dense(5)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def sequences():
    for length, rows in ((6, 10), (4, 7), (5, 1)):
        yield SEQUENCES[:rows, :length], Y[:rows]


OPEN = tf.data.Dataset.from_generator(
    sequences, output_signature=(tf.TensorSpec([None, None, 12]), tf.TensorSpec([None], tf.int64))
).apply(tf.data.experimental.assert_cardinality(3))


def evaluate_and_predict(model):
    """Nothing is drawn where nothing is trained, and the seeds stay where they were."""
    results = [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)]
    return [results, [np.asarray(variable) for variable in model.variables]]


class InTraining(keras.layers.Layer):
    """Another layer as it is in training; `predict` would say otherwise."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x, training=True)


def transformed(names, arguments):
    """A model that returns what each image layer of these names makes of its input, in training."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12, 12, 3))
    outputs = {}
    for name in names:
        outputs[name] = InTraining(getattr(keras.layers, name)(seed=3, **arguments[name]))(inputs)
    return keras.Model(inputs, outputs)


def predict_images(model):
    results = [model.predict(IMAGES, batch_size=size, verbose=0) for size in (7, 15, 2)]
    first, second = results[0], results[1]
    assert not [name for name in first if np.array_equal(first[name], second[name])], "nothing was drawn"
    return results


# Every image layer of Keras that draws, and what it is made with.
IMAGE_LAYERS = {
    "RandomBrightness": {"factor": 0.3},
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomColorJitter": {
        "value_range": (0, 255),
        "brightness_factor": 0.3,
        "contrast_factor": 0.3,
        "saturation_factor": 0.3,
        "hue_factor": 0.3,
    },
    "RandomContrast": {"factor": 0.3},
    "RandomCrop": {"height": 8, "width": 9},
    "RandomErasing": {"factor": 1.0, "value_range": (0, 255)},
    "RandomFlip": {},
    "RandomGaussianBlur": {"factor": 1.0, "value_range": (0, 255)},
    "RandomGrayscale": {"factor": 0.5},
    "RandomHue": {"factor": 0.3, "value_range": (0, 255)},
    "RandomInvert": {"factor": 0.5, "value_range": (0, 255)},
    "RandomPerspective": {"factor": 1.0},
    "RandomPosterization": {"factor": 4, "value_range": (0, 255)},
    "RandomRotation": {"factor": 0.2},
    "RandomSaturation": {"factor": 0.5, "value_range": (0, 255)},
    "RandomSharpness": {"factor": 0.5, "value_range": (0, 255)},
    "RandomShear": {"x_factor": 0.3, "y_factor": 0.3},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomZoom": {"height_factor": 0.3, "width_factor": 0.3},
    "Solarization": {"addition_factor": (0.0, 0.2), "threshold_factor": (0.3, 0.8)},
}
GROUPS = [list(IMAGE_LAYERS)[k::6] for k in range(6)]

CASES = {
    "dropout": trained(X, Dense, layer("Dropout", rate=0.5)),
    "dropout_called_twice": trained(X, Dense, Folded, layer("Dropout", rate=0.3, noise_shape=(1, 16))),
    "dropout_fewer_rows_than_towers": trained(X[:12], Dense, layer("Dropout", rate=0.5), fit_options={"batch_size": 3}),
    "dropout_compiled_by_xla": Case(
        functools.partial(dropout_model, jit_compile=True), fit(X, Y, epochs=2), options=INVARIANT
    ),
    "dropout_run_eagerly": Case(
        functools.partial(dropout_model, run_eagerly=True), fit(X, Y, epochs=1), options=INVARIANT
    ),
    "dropout_steps_per_execution": Case(
        functools.partial(dropout_model, steps_per_execution=2), fit(X, Y, epochs=2), options=INVARIANT
    ),
    "dropout_in_validation": Case(
        dropout_model, fit(X, Y, epochs=2, validation_data=(X[:7], Y[:7])), options=INVARIANT
    ),
    "noise": trained(
        X,
        Dense,
        layer("GaussianNoise", stddev=0.3),
        layer("GaussianDropout", rate=0.3),
        layer("AlphaDropout", rate=0.2),
        layer("AlphaDropout", rate=0.2, noise_shape=(None, 1)),
        tolerance=2e-5,  # 1.3e-5 by XLA on 8 towers, 1e-16 in float64
    ),
    "sequences": trained(
        SEQUENCES,
        Folded,
        layer("SpatialDropout1D", rate=0.3),
        lambda: keras.layers.TimeDistributed(keras.layers.Dropout(0.3)),
        layer("Dropout", rate=0.3, noise_shape=(None, 1, 12)),
        layer("Dropout", rate=0.3, noise_shape=(1, 6, 1)),
        layer("ActivityRegularization", l2=0.001),
    ),
    "spatial_dropout": trained(
        VOLUMES,
        layer("SpatialDropout3D", rate=0.3),
        lambda: keras.layers.Reshape((4, 6, 2)),
        layer("SpatialDropout2D", rate=0.3),
    ),
    "lstm_and_gru": trained(
        SEQUENCES,
        layer("LSTM", units=4, dropout=0.3, recurrent_dropout=0.3, return_sequences=True),
        layer("GRU", units=4, dropout=0.3, recurrent_dropout=0.3, reset_after=False, return_sequences=True),
        layer("SimpleRNN", units=3, dropout=0.3, recurrent_dropout=0.2),
    ),
    "conv_lstm": trained(VOLUMES, layer("ConvLSTM2D", filters=2, kernel_size=2, dropout=0.3, recurrent_dropout=0.3)),
    "attention": trained(SEQUENCES, Attention),
    "generators_and_functions": Case(
        functools.partial(classifier, lambda: [Dense(), Generators()]), fit(X, Y, epochs=2), options=INVARIANT
    ),
    "generators_run_eagerly": Case(
        functools.partial(classifier, lambda: [Dense(), Generators()], run_eagerly=True),
        fit(X, Y, epochs=1),
        options=INVARIANT,
    ),
    "sequences_of_open_length": Case(
        functools.partial(classifier_of_open_length), fit(OPEN, batch_size=None, epochs=2), options=INVARIANT
    ),
    "gan": Case(gan, fit(X, batch_size=20, epochs=2), options=INVARIANT),
    "evaluate_and_predict": Case(dropout_model, evaluate_and_predict, options=INVARIANT),
    **{
        f"images_{i}": Case(functools.partial(transformed, names, IMAGE_LAYERS), predict_images, 1e-4, INVARIANT)
        for i, names in enumerate(GROUPS)
    },
}


def drawn_in_a_loop(shape, seed):
    """Not by `tf.map_fn`: after an error within, TensorFlow can open no scope of a strategy any more."""
    start = tf.constant(0), tf.zeros(shape)
    draw = lambda i, _: (i + 1, keras.random.uniform(shape, seed=seed))  # noqa: E731
    open_shapes = tf.TensorShape([]), tf.TensorShape([None] * len(shape))
    return tf.while_loop(lambda i, _: i < 2, draw, start, shape_invariants=open_shapes)[1]


# Of every distribution: numbers per sample, and with a parameter per sample.
DRAWS = {
    "normal": lambda n, x, seed: keras.random.normal((n, 12), seed=seed),
    "uniform": lambda n, x, seed: keras.random.uniform((n, 1), -1.0, 2.0, seed=seed),
    "uniform_without_seed": lambda n, x, seed: keras.random.uniform((n, 1)),
    "uniform_of_a_fixed_seed": lambda n, x, seed: keras.random.uniform((n, 12), seed=11),
    "uniform_for_all": lambda n, x, seed: keras.random.uniform((1, 12), seed=seed),
    "uniform_scalar": lambda n, x, seed: keras.random.uniform((), seed=seed),
    "uniform_twice_the_rows": lambda n, x, seed: tf.reshape(keras.random.uniform((2 * n, 6), seed=seed), [-1, 12]),
    "truncated_normal": lambda n, x, seed: keras.random.truncated_normal((n, 12), seed=seed),
    "randint": lambda n, x, seed: keras.random.randint((n, 12), 0, 100, seed=seed),
    "full_int": lambda n, x, seed: tf.random.stateless_uniform([n, 1], [1, 2], None, None, tf.int32) % 97,
    "dropout": lambda n, x, seed: keras.random.dropout(x, 0.5, seed=seed),
    "gamma": lambda n, x, seed: keras.random.gamma((n, 12), 0.7, seed=seed),
    "gamma_per_sample": lambda n, x, seed: tf.random.stateless_gamma([n, 12], [1, 2], abs(x) + 0.5),
    "beta": lambda n, x, seed: keras.random.beta((n, 1), 0.4, 0.6, seed=seed),
    "beta_per_sample": lambda n, x, seed: keras.random.beta((n, 1), positive(x), 0.6, seed=seed),
    "binomial": lambda n, x, seed: keras.random.binomial((n, 12), 20.0, 0.3, seed=seed),
    "binomial_per_sample": lambda n, x, seed: keras.random.binomial((n, 1), 30.0 * positive(x), 0.3, seed=seed),
    "poisson": lambda n, x, seed: tf.random.stateless_poisson([n, 12], [1, 2], 3.0),
    "poisson_per_sample": lambda n, x, seed: tf.random.stateless_poisson([n, 12], [1, 2], 20.0 * abs(x)),
    "categorical": lambda n, x, seed: keras.random.categorical(x, 1, seed=seed),
    "categorical_samples": lambda n, x, seed: keras.random.categorical(x, 12, seed=seed),
    "in_a_loop": lambda n, x, seed: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, total: (i + 1, total + tf.random.stateless_normal([n, 1], [1, i])),
        (0, tf.zeros([n, 1])),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 1])),
    )[1],
    "keras_shuffle": lambda n, x, seed: keras.random.shuffle(x, seed=seed),
    "stateless_shuffle": lambda n, x, seed: tf.random.experimental.stateless_shuffle(x, seed=[1, 2]),
    "raw_op": lambda n, x, seed: tf.raw_ops.StatelessRandomUniform(shape=[n, 1], seed=[1, 2]),
    "samples_last": lambda n, x, seed: tf.transpose(keras.random.uniform((12, n), seed=seed)),
    "samples_twice": lambda n, x, seed: tf.reduce_sum(keras.random.uniform((n, n), seed=seed), 1)[:, None],
    "samples_last_in_a_loop": lambda n, x, seed: drawn_in_a_loop((12, n), seed=4)[:1, :1],
    "one_row_more": lambda n, x, seed: x[:1, :1] + keras.random.uniform((n + 1, 1), seed=seed)[:1],
    "two_copies": lambda n, x, seed: tf.add_n(
        tf.split(tf.concat([x, 2.0 * x], 0) + keras.random.normal((2 * n, 12), seed=seed), 2)
    ),
}
ROWS_OF_DRAWS = {f"draw_{name}": on_samples(draw) for name, draw in DRAWS.items()}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), spread(CASES))
def test_towers_draw_what_one_device_draws(name, towers):
    """Outputs, weights, optimizer, losses and the state of the generators, for the same seed."""
    check(CASES[name], towers)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "towers"), [*enumerate((3, 2, 4, 8))])
def test_every_draw_is_one_devices(which, towers):
    """A quarter of the draws in one program; those that the cost table asks for one by one are `ROWS_OF_DRAWS`."""
    names = [*DRAWS]
    if compiles_by_xla():  # of constants alone TensorFlow draws before XLA compiles, which draws otherwise, or cannot
        names = [name for name in names if name not in ("raw_op", "poisson")]
    check(all_on_samples({name: DRAWS[name] for name in names[which::4]}), towers)


# Layers that draw, and cannot be in a row.
NOT_IN_ROWS = {
    "AugMix": "chooses by Python's `random` while it is traced, on one device anew for each number of rows",
    "RandAugment": "its Equalization, which draws nothing, takes images together; its other layers are here",
    "RandomElasticTransform": "draws per sample where the rows are known, else once for all, as on towers",
    "CutMix": "below, since it mixes the samples of a batch",
    "MixUp": "below, since it mixes the samples of a batch",
    "LSTMCell": "in LSTM",
    "GRUCell": "in GRU",
    "SimpleRNNCell": "in SimpleRNN",
    "ConvLSTM1D": "as ConvLSTM2D",
    "ConvLSTM3D": "as ConvLSTM2D",
    "JaxLayer": "draws in JAX",
}


def test_every_layer_that_draws_is_in_a_row():
    """By introspection: a layer of Keras that takes a seed, and every augmentation."""
    takes_seed = {
        name
        for name, cls in vars(keras.layers).items()
        if inspect.isclass(cls) and "seed" in inspect.signature(cls.__init__).parameters
    }
    assert {"Dropout", "RandomFlip", "LSTM"} <= takes_seed
    assert takes_seed == (IN_ROWS & takes_seed) | set(IMAGE_LAYERS) | set(NOT_IN_ROWS)


REFUSED = {
    "stateful": (lambda n, x, seed: tf.random.normal([n, 12]), "RandomStandardNormal"),
    "stateful_op": (lambda n, x, seed: tf.raw_ops.RandomUniform(shape=[n, 1], dtype=tf.float32), "RandomUniform"),
    "tf_image": (lambda n, x, seed: tf.image.random_brightness(x[:, :, None, None], 0.5)[:, :, 0, 0], "RandomUniform"),
    "sample_of_candidates": (
        lambda n, x, seed: tf.random.log_uniform_candidate_sampler(
            tf.zeros([1, 1], tf.int64), 1, 1, True, 40
        ).sampled_expected_count[0],
        "LogUniformCandidateSampler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused(name):
    """While the step is traced, by the name of the op and the line in this file."""
    draw, op = REFUSED[name]
    model = on_towers(on_samples(draw).build, 2, **INVARIANT)
    message = f"(?s){op}, whose state.*test_parity_randomness.py:"
    with pytest.raises(ncclsync.NcclSyncError, match=message):
        model.predict(X, verbose=0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_layers_that_mix_samples(name):
    """Their partners are the samples of other towers."""
    build = functools.partial(transformed, [name], {name: {}})
    check(Case(build, predict_images, 1e-4, INVARIANT), 3)


@pytest.mark.slow
def test_shuffles_and_draws_that_do_not_depend_on_the_samples():
    """All towers draw the same."""
    case = on_samples(lambda n, x, seed: keras.random.shuffle(tf.range(12.0), seed=seed))
    check(case, 3)
    check(on_samples(lambda n, x, seed: keras.random.shuffle(x, axis=1, seed=seed)), 2)


def test_a_bad_argument():
    """It is a bool, or some of its words."""
    with pytest.raises(ValueError, match="Expected exact to be a bool"):
        ncclsync.nccl_parallel(exact=1)


class DrawsOnly(keras.layers.Layer):
    """Returns random numbers per sample, from every source that has a seed."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(7)
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        shape = tf.shape(x)
        own, unseeded = keras.random.normal(shape, seed=self.seeds), keras.random.normal(shape)
        return tf.stack([own, unseeded, self.generator.normal(shape)], axis=1)


def draws_only():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), DrawsOnly()])


def test_towers_draw_different_numbers_by_default():
    """From a generator of the model's, Keras' global one, and one of TensorFlow's; the same in each run."""
    runs = []
    for _ in range(2):
        model = on_towers(draws_only, 3)
        runs.append([model.predict(np.zeros((9, 4)), batch_size=9, verbose=0) for _ in range(3)])
    np.testing.assert_array_equal(runs[0], runs[1])
    numbers = np.asarray(runs[0])  # [steps, rows, sources, 4]
    assert len(np.unique(numbers)) == numbers.size


def default_run():
    """What a fit with dropout on three towers ends with, as bytes."""
    model = on_towers(lambda: classifier(lambda: [Dense(), Generators(), layer("Dropout", rate=0.5)()]), 3)
    history = model.fit(X, Y, batch_size=20, epochs=2, verbose=0).history
    return b"".join(np.asarray(leaf).tobytes() for leaf in [*model.get_weights(), history["loss"]])


@pytest.mark.slow
def test_default_runs_are_reproducible():
    """For a seed and a number of towers, bit for bit: in this process, and in another."""
    if compiles_by_xla():
        pytest.skip("XLA does not compile what this model draws, on one device neither")
    here = default_run()
    assert default_run() == here
    code = (
        "from ncclsync.towers import placement; placement.host_passes = lambda *_, **__: ()\n"  # as conftest
        "import test_parity_randomness as t, hashlib; print(hashlib.sha256(t.default_run()).hexdigest())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True
    )
    assert there.returncode == 0, there.stderr
    assert there.stdout.split()[-1] == hashlib.sha256(here).hexdigest()


def test_a_draw_from_hidden_state_is_told_once(caplog):
    """By default it is no error; what it draws on towers is not reproducible, as the log says."""
    case = on_samples(lambda n, x, seed: tf.random.normal([n, 1]) + tf.random.uniform([n, 1]))
    model = ncclsync.nccl_parallel(towers=2)(case.build)()
    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        model.predict(X, batch_size=20, verbose=0)
        model.predict(X, batch_size=20, verbose=0)
    (told,) = [one.getMessage() for one in caplog.records if "a state that TensorFlow hides" in one.getMessage()]
    assert "RandomStandardNormal, at" in told and "test_parity_randomness.py:" in told
