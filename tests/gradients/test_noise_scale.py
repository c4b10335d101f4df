"""`NoiseScale`: the gradient noise scale, from the towers' own gradients and the one they add up to."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data, mlp, on_towers, state

from ncclsync import Health, NcclSyncError, NoiseScale
from ncclsync.sharding.shards import shard_sizes

X, Y = data(rows=61)


class Notes(keras.callbacks.Callback):
    """Keeps the logs of each batch, of the last position in the list of callbacks."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))


def fit(model, x=X, y=Y, batch_size=20, epochs=1, decay=0.0):
    """Return the logs of each batch, and of the epochs."""
    notes = Notes()
    options = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=[NoiseScale(decay), notes], **options)
    return notes.batches, history.history


def moments(model, x, y, towers, loss):
    """Both moments by the formulas of the paper, with each tower weighted by its samples, in NumPy."""

    def gradient(rows):
        with tf.GradientTape() as tape:
            value = loss(y[rows], model(x[rows], training=True))
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(value, model.trainable_weights)]
        return np.concatenate([np.ravel(g) for g in gradients]).astype(np.float64)

    batch = len(x)
    sizes = [size for size in shard_sizes(batch, towers) if size]
    ends = np.cumsum(sizes)
    own = [gradient(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    whole = sum(size / batch * g for size, g in zip(sizes, own, strict=True))
    small = sum(size / batch * np.sum(g**2) for size, g in zip(sizes, own, strict=True))
    # E small = |true|^2 + tr * mean(1 / n_i) and E big = |true|^2 + tr / B, solved.
    inverse = sum(size / batch / size for size in sizes)
    big = np.sum(whole**2)
    trace = (small - big) / (inverse - 1 / batch)
    return trace, big - trace / batch


def embedding():
    """A model with sparse gradients whose rows repeat."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def scaled():
    return mlp(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "factory, towers, rows, backend",
    [(mlp, 4, 3, ""), (mlp, 3, 5, "as on GPUs"), (embedding, 2, 20, ""), (scaled, 2, 9, "")],
)
def test_formula(factory, towers, rows, backend, request):
    """Of one batch, in uneven shards and with idle towers: the paper's formulas, to float tolerance."""
    if backend:
        request.getfixturevalue("as_on_gpus")
    x = np.abs(X * 10).astype("int32")[:, :4] % 7 if factory is embedding else X
    model, alone = on_towers(factory, towers), factory()
    batches, history = fit(model, x[:rows], Y[:rows], rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trace, square = moments(alone, x[:rows], Y[:rows], towers, loss)
    measured = model.towers.watch.noise._averages.numpy()
    np.testing.assert_allclose(measured, [trace, square, 1], rtol=2e-5, atol=1e-6)
    ratio = trace / square if square > 0 else np.nan
    told = [batches[0]["noise_scale"], *history["noise_scale"]]
    np.testing.assert_allclose(told, [ratio, ratio], rtol=1e-3)
    suggested = history["suggested_batch_size"][0]
    if square > 0:
        assert suggested % towers == 0 and abs(suggested - max(ratio, towers)) <= towers / 2
    else:
        assert np.isnan(suggested)


class Point(keras.Model):
    """Learns where its targets are; a sample's gradient is a multiple of its distance to the weights."""

    def __init__(self, start):
        super().__init__()
        self.place = self.add_weight(shape=start.shape, initializer=lambda *_, **__: start)

    def call(self, x):
        return x + self.place


@pytest.mark.parametrize("batch_size", [3, 4])
def test_known_noise(batch_size):
    """Targets with variance 1 in each of 4 dimensions, at a distance of 2: the scale is 4 / 4, within 12%.

    With 400 steps on three towers, in shards of equal and of unequal size, the standard error is 4%.
    """
    rng = np.random.default_rng(1)
    y = rng.standard_normal([400 * batch_size, 4]).astype("float32")

    def factory():
        model = Point(np.ones(4, "float32"))
        model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=40)
        return model

    batches, history = fit(on_towers(factory, 3), np.zeros_like(y), y, batch_size, decay=0.9999)
    assert abs(history["noise_scale"][0] - 1.0) < 0.12
    assert history["suggested_batch_size"] == [3]
    assert len(batches) == 10


class Recomputed(keras.layers.Dense):
    """Computes its output again for the gradient, which is one within a gradient."""

    def call(self, inputs):
        return tf.recompute_grad(super().call)(inputs)


class TwoTapes(keras.Model):
    """Takes the gradients of its layers by a tape each, as a GAN might."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Recomputed(16, activation="relu"), keras.layers.Dense(5)
        self(np.zeros([1, 12], "float32"))

    def call(self, x):
        return self.two(self.one(x))

    def train_step(self, batch):
        x, y = batch
        gradients = []
        for layer in (self.one, self.two):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients += tape.gradient(loss, layer.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_all_tapes_of_a_step_are_one_vector():
    """Two gradients of parts of a model count as one of all of it, each once; a step with NaN is left out."""

    def factory():
        keras.utils.set_random_seed(1)
        model = TwoTapes()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x = X.copy()
    x[25] = np.nan
    model = on_towers(factory, 2, health=Health(on_nonfinite="skip"))
    fit(model, x[:40], Y[:40])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected = [*moments(factory(), X[:20], Y[:20], 2, loss), 1]
    np.testing.assert_allclose(model.towers.watch.noise._averages.numpy(), expected, rtol=2e-5)


@pytest.mark.slow
def test_nothing_in_the_graph_when_off():
    """With the callback one exchange more, of three numbers; without, before or after it, no node more."""

    def programs(model):
        return list(model.train_function.__self__.step.programs.kept.values())

    def nodes(program):
        graphs = [segment.function.graph.as_graph_def() for segment in program.segments]
        return [sorted(node.op for node in graph.node) for graph in graphs]

    def exchanged(program):
        return [e for segment in program.segments for bucket in segment.outgoing for e in bucket.exchanges]

    model, other = on_towers(mlp, 2), on_towers(mlp, 2)
    fit(model)
    options = {"batch_size": 20, "shuffle": False, "verbose": 0}
    assert "noise_scale" not in model.fit(X, Y, **options).history
    other.fit(X, Y, epochs=2, **options)
    (never,), (on, off) = programs(other), programs(model)
    assert nodes(off) == nodes(never)
    assert on.noise is not None and off.noise is None and off.outputs == never.outputs
    more = [e.shape.as_list() for e in exchanged(on)]
    for exchange in exchanged(off):
        more.remove(exchange.shape.as_list())
    assert more == [[3]]
    assert_close(state(model), state(other))


@pytest.mark.parametrize("towers", [1, 3, None])
def test_nothing_to_tell(towers, caplog):
    """One tower, one of several that has the only sample, or none at all: no keys, and one warning."""
    model = mlp() if towers is None else on_towers(mlp, towers)
    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        if towers == 3:
            _, logs = fit(model, X[:1], Y[:1], epochs=2)
        else:
            logs = {}
            callback = NoiseScale()
            callback.set_model(model)
            callback.on_train_begin()
            callback.on_train_batch_end(0, logs)
            for epoch in range(2):
                callback.on_epoch_end(epoch, logs)
            callback.on_train_end()
    assert not {"noise_scale", "suggested_batch_size"} & {*logs}
    assert [r.getMessage()[:28] for r in caplog.records].count("NoiseScale has no estimate. ") == 1


def test_refused():
    """A weight that is none, and a step that is not traced."""
    for decay in (1, -0.1, True, "0.9"):
        with pytest.raises(ValueError, match=f"decay to be a number from 0 to below 1. Received: {decay!r}"):
            NoiseScale(decay)
    with pytest.raises(NcclSyncError, match="run_eagerly=True"):
        fit(on_towers(lambda: mlp(run_eagerly=True), 2))
