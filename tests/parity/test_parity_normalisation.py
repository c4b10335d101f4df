"""N towers normalise like one device where they are asked to, and by a formula where they are not."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from parity import Case, assert_close, assert_towers_agree, check, data, fit, on_towers, spread, state

import ncclsync

X, Y = data()
IMAGES = np.random.default_rng(1).standard_normal((len(X), 4, 4, 3)).astype("float32") * [1.0, 3.0, 0.2] + 1.0
STEPS = np.arange(6) < 1 + np.arange(len(X))[:, None] % 6  # masks of 1 to 6 timesteps, uneven per shard
SERIES = np.random.default_rng(2).standard_normal((len(X), 6, 3)).astype("float32") * STEPS[:, :, None]
BATCHES = (20, 13, 2, 1)  # of rows: uneven, fewer than towers, one
SYNC = functools.partial(layers.BatchNormalization, synchronized=True)
PLAIN = layers.BatchNormalization


class Shown(keras.Sequential):
    """Its step returns the outputs too, before the update."""

    def train_step(self, batch):
        x, y, *_ = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss, "outputs": outputs}


def stack(body, inputs=(12,), policy="float32", **compile_arguments):
    """A factory of a classifier behind the layers that `body` makes."""

    def factory():
        keras.utils.set_random_seed(1)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = Shown([keras.Input(inputs), *body(), layers.Dense(5, dtype="float32")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, **compile_arguments)
        finally:
            keras.config.set_dtype_policy(before)
        return model

    return factory


def steps(x):
    """A `run`: steps on batches of `BATCHES`; outputs, the momentum (which is the gradient), weights."""

    def run(model):
        logs, begin = [], 0
        for rows in BATCHES:
            part = slice(begin, begin := begin + rows)
            logs.append(model.train_on_batch(x[part], Y[part], return_dict=True))
        optimizer = [np.asarray(v) for v in model.optimizer.variables]
        return {
            "logs": logs,
            "weights": model.get_weights(),
            "optimizer": optimizer,
            "predict": model.predict(x[:7], verbose=0),
        }

    return run


def rows(batch_norm, **options):
    """The rows of batch normalisation, for layers of `batch_norm`."""
    bn, relu = batch_norm, functools.partial(layers.Activation, "relu")

    def dense(*body, **arguments):
        return Case(stack(lambda: [make() for make in body], **arguments), steps(X), options=options)

    def images(*body, **arguments):
        return Case(
            stack(lambda: [make() for make in body] + [layers.GlobalAveragePooling2D()], (4, 4, 3)),
            steps(IMAGES),
            options=options,
            **arguments,
        )

    def series(*body):
        return Case(
            stack(lambda: [layers.Masking(), *(make() for make in body), layers.GRU(4)], (6, 3)),
            steps(SERIES),
            options=options,
        )

    d8 = functools.partial(layers.Dense, 8)
    return {
        "inputs": dense(bn),
        "several": dense(d8, bn, relu, d8, functools.partial(bn, momentum=0.5, epsilon=1e-5), relu, d8, bn),
        "images": images(bn, lambda: layers.Conv2D(4, 2, activation="relu"), bn),
        "axis_1": images(functools.partial(bn, axis=1), lambda: layers.Conv2D(4, 2)),
        "no_scale_no_center": dense(
            d8, functools.partial(bn, scale=False), relu, d8, functools.partial(bn, center=False)
        ),
        "regularised": dense(
            d8, functools.partial(bn, gamma_regularizer="l2", beta_regularizer="l1", gamma_constraint="unit_norm")
        ),
        "frozen": dense(d8, functools.partial(bn, trainable=False), relu, d8, bn),
        "mask": series(bn),
        "renorm": dense(d8, functools.partial(bn, renorm=True), relu),
        "renorm_clipped": dense(
            d8,
            functools.partial(
                bn, renorm=True, renorm_clipping={"rmax": 1.5, "rmin": 0.5, "dmax": 0.5}, renorm_momentum=0.8
            ),
        ),
        "renorm_mask": series(functools.partial(bn, renorm=True)),
        "mixed_float16": Case(
            stack(lambda: [d8(), bn(), relu(), d8(), bn()], policy="mixed_float16"), steps(X), 3e-3, options
        ),
        "mixed_bfloat16": Case(stack(lambda: [d8(), bn(), relu()], policy="mixed_bfloat16"), steps(X), 2e-2, options),
        "eagerly": dense(d8, bn, relu, run_eagerly=True),
        "last_batch_of_one_row": Case(stack(lambda: [d8(), bn(), relu()]), fit_quietly(X), options=options),
    }


def fit_quietly(x):
    """`fit` with a last batch of one row, whose logs are arrays, then the layer without training."""

    def run(model):
        return fit(x, Y, epochs=2)(model), model.evaluate(x, Y, verbose=0)

    return run


SYNCHRONISED = rows(SYNC)
# The option sets what SYNC sets by hand: a few rows tell that it does.
BY_OPTION = dict(list(rows(PLAIN, exact=("batch_norm",)).items())[::4])


def adapted(model):
    """Adapts the normalisation of a model that has been made, trains, adapts it to other data, trains on."""
    model.layers[0].adapt(X * 2.0 + 1.0)
    first = fit(X, Y, epochs=1)(model)
    model.layers[0].adapt(X * 3.0 - 1.0)
    return [first, fit(X, Y, epochs=1)(model), model.predict(X[:5], verbose=0)]


def adapted_layer():
    layer = layers.Normalization()
    layer.adapt(X * 2.0 + 1.0)
    return layer


OTHER = {
    "layer_rms_unit": Case(
        stack(
            lambda: [
                layers.LayerNormalization(),
                layers.Dense(8, "relu"),
                layers.RMSNormalization(),
                layers.Dense(8, "relu"),
                layers.LayerNormalization(scale=False, center=False),
                layers.UnitNormalization(),
            ]
        ),
        steps(X),
    ),
    "group": Case(
        stack(
            lambda: [
                layers.Conv2D(4, 2, activation="relu"),
                layers.GroupNormalization(2),
                layers.Conv2D(4, 2, activation="relu"),
                layers.GroupNormalization(-1),
                layers.LayerNormalization(axis=[1, 2]),
                layers.GlobalAveragePooling2D(),
            ],
            (4, 4, 3),
        ),
        steps(IMAGES),
    ),
    "spectral": Case(
        stack(
            lambda: [
                layers.SpectralNormalization(layers.Conv2D(4, 2, activation="relu")),
                layers.Flatten(),
                layers.SpectralNormalization(layers.Dense(8), power_iterations=2),
            ],
            (4, 4, 3),
        ),
        steps(IMAGES),
    ),
    "adapted_before": Case(stack(lambda: [adapted_layer(), layers.Dense(8)]), fit(X, Y, epochs=2)),
    "adapted_after": Case(stack(lambda: [layers.Normalization(), layers.Dense(8)]), adapted),
    "synchronised_in_inference": Case(
        stack(lambda: [SYNC(), layers.Dense(8)]), lambda m: m.evaluate(X, Y, batch_size=20, verbose=0)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, towers", spread(SYNCHRONISED))
def test_synchronized(name, towers):
    """`BatchNormalization(synchronized=True)`: outputs, gradients, weights and moving statistics."""
    check(SYNCHRONISED[name], towers)


@pytest.mark.slow
@pytest.mark.parametrize("name, towers", spread(BY_OPTION, towers=(4, 3, 8, 2)))
def test_synchronized_by_option(name, towers):
    """Layers that do not say so, in a model whose towers do."""
    check(BY_OPTION[name], towers)


def test_exact_is_for_own_steps_too():
    """The moments of the whole batch, and no layer is changed."""

    def norm_and_step():
        layer = layers.BatchNormalization()
        layer.build((None, X.shape[1]))
        return layer, lambda x: layer(x, training=True)

    (alone, plain), (layer, step) = norm_and_step(), norm_and_step()
    with ncclsync.Towers(3, exact=True) as towers:
        np.testing.assert_allclose(towers.run(step, X), plain(X), atol=1e-5)
        assert towers.divergence() == 0.0
    for one, other in zip(layer.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert not layer.synchronized


@pytest.mark.slow
def test_forward_derivatives():
    """A step may ask for forward derivatives, which pass through the moments of the batch."""

    def layer_and_step():
        layer, weights = SYNC(), tf.Variable(X[:12, :3])
        layer.build((None, 3))

        def step(x):
            with tf.GradientTape() as tape:
                with tf.autodiff.ForwardAccumulator(x, tf.cos(x)) as forward:
                    outputs = layer(tf.tanh(x @ weights), training=True)
                derivatives = forward.jvp(outputs)
                loss = tf.reduce_mean(derivatives**4)
            return outputs, derivatives, tape.gradient(loss, weights)

        return layer, step

    (alone, plain), (layer, step) = layer_and_step(), layer_and_step()
    for rows in BATCHES[:3]:
        expected = plain(tf.constant(X[:rows]))
        with ncclsync.Towers(3) as towers:
            for one, other in zip(towers.run(step, X[:rows]), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(layer.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def by_python(x):
    """The same, which every tower has all rows of as far as TensorFlow knows."""
    made = tf.numpy_function(lambda value: value, [x], x.dtype)
    made.set_shape(x.shape)
    return made


# Inputs and masks, of rows [rows, 4] and what is positive of them.
WHOLES = {
    "of no rows": lambda x, _: (tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0] > 0, tf.int32), 2), None),
    "of all rows": lambda x, _: (by_python(x), None),
    "of all rows, and of own rows": lambda x, positive: (by_python(x), positive),
    "of own rows, and of all rows": lambda x, positive: (x, by_python(positive)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", WHOLES)
def test_whole_inputs(name, exact, caplog):
    """Of what every tower has whole the layer's numbers are one device's, or a warning says that they are not."""

    def layer_and_step():
        layer, weights = layers.BatchNormalization(), tf.Variable(X[:12, :4])
        layer.build((None, 4))

        def step(x):
            with tf.GradientTape() as tape:
                inputs, mask = WHOLES[name](rows := x @ weights, x[:, 0] > 0)
                outputs = layer(inputs, training=True, mask=mask)
                loss = tf.reduce_mean(tf.square(outputs) * outputs) + tf.reduce_mean(rows**2)
            return loss, tape.gradient(loss, weights), tf.reduce_sum(outputs**3)

        return layer, step

    (alone, plain), (layer, step) = layer_and_step(), layer_and_step()
    expected = plain(tf.constant(X[:13]))
    with ncclsync.Towers(3, exact=exact) as towers:
        found = towers.run(step, X[:13])
        assert towers.divergence() == 0.0
    if "normalises by each tower's rows" in caplog.text:
        assert not exact and "own rows, and" in name
        return
    assert_close(found, expected, 1e-4)
    assert_close(layer.get_weights(), alone.get_weights())


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("synchronized", [True, False])
def test_forward_derivatives_of_gradients(synchronized):
    """Before the weight that an accumulator follows, the way there has no forward derivatives, but the way back has."""

    def layers_and_step():
        norms = [layers.BatchNormalization(synchronized=synchronized) for _ in range(2)]
        one, two = tf.Variable(X[:12, :4]), tf.Variable(X[12:16, :3])
        for layer, width in zip(norms, (4, 3), strict=True):
            layer.build((None, width))

        def step(x):
            with tf.autodiff.ForwardAccumulator(two, tf.cos(two)) as forward:
                with tf.GradientTape() as tape:
                    outputs = norms[1](tf.tanh(norms[0](x @ one, training=True) @ two), training=True)
                    loss = tf.reduce_mean(outputs**4)
                gradients = tape.gradient(loss, [one, two])
            return [loss, *gradients, *map(forward.jvp, gradients)]

        return norms, step

    (_, plain), (_, step) = layers_and_step(), layers_and_step()
    for rows in (6, 7, 5):
        expected = plain(tf.constant(X[:rows]))
        with ncclsync.Towers(3) as towers:
            for one, other in zip(towers.run(step, X[:rows]), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.max(np.abs(other)))


@pytest.mark.slow
@pytest.mark.parametrize("name, towers", spread(OTHER))
def test_other_normalisation(name, towers):
    """What normalises each sample, a weight, or by what it was adapted to."""
    check(OTHER[name], towers)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("batch, towers", [(10, 4), (9, 4), (2, 4), (1, 3), (61, 8)])
def test_plain_batch_normalisation(batch, towers):
    """Each shard by its own statistics; the moving ones by the mean over the samples; finite in a shard of
    one row, and where towers have none.
    """

    def factory():
        model = Shown([keras.Input((12,)), layers.BatchNormalization(momentum=0.9, epsilon=1e-3)])
        model.compile("sgd", "mse")
        return model

    model = on_towers(factory, towers)
    outputs = model.train_on_batch(X[:batch], X[:batch], return_dict=True)["outputs"]
    sizes = [size for size in model.towers.layout.sizes_of(batch) if size]
    shards = np.split(X[:batch].astype("float64"), np.cumsum(sizes)[:-1])
    means, variances = [s.mean(0) for s in shards], [s.var(0) for s in shards]
    expected = [(s - m) / np.sqrt(v + 1e-3) for s, m, v in zip(shards, means, variances, strict=True)]
    assert_close(outputs, np.concatenate(expected).astype("float32"))
    assert_close(model.layers[0].moving_mean, 0.1 * np.average(means, axis=0, weights=sizes))
    assert_close(model.layers[0].moving_variance, 0.9 + 0.1 * np.average(variances, axis=0, weights=sizes))
    assert_towers_agree(model)
    assert all(np.isfinite(array).all() for array in model.get_weights())


class DoublesVariances(layers.BatchNormalization):
    """Overrides Keras' moments, by Keras' own."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, variance * 2.0


class Centers(layers.BatchNormalization):
    """Overrides Keras' moments, by ops of its own."""

    def _moments(self, inputs, mask):
        mean = tf.reduce_mean(inputs, 0)
        return mean, tf.reduce_mean(tf.abs(inputs - mean), 0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("kind", [DoublesVariances, Centers])
def test_moments_of_ones_own(kind, synchronized):
    """Are asked where the batch's moments are asked for."""

    def build():
        keras.utils.set_random_seed(1)
        parts = [kind(synchronized=synchronized), layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *parts])
        model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(2).random((17, 4)).astype("float32")
    alone, model = build(), on_towers(build, 3, exact=not synchronized)
    for one in (alone, model):
        one.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_close(state(model), state(alone))
