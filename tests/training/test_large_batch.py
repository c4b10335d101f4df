"""`LargeBatch` against the formulas of Goyal et al. 2017 (arXiv:1706.02677), worked out in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, on_towers
from test_saving import contents

from ncclsync import LargeBatch, NcclSyncError, nccl_parallel, plot_history

optimizers = keras.optimizers
X, Y = data(60)
KEY = "effective_learning_rate"
ETA = 0.02


class Lower(keras.callbacks.Callback):
    """As ReduceLROnPlateau does: at the end of the second epoch, a tenth."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.1 * float(self.model.optimizer.learning_rate.numpy())


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def momentum(rate=ETA, **options):
    return optimizers.SGD(rate, momentum=0.9, **options)


def line(optimizer, **arguments):
    """A linear model without a bias, and the mean of squared differences."""
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign(np.linspace(-1.0, 1.0, 12)[:, None])
    model.compile(optimizer, "mse", **arguments)
    return model


def fit(model, *callbacks, epochs=4, batch_size=20, **options):
    options = {"shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, batch_size=batch_size, epochs=epochs, callbacks=[*callbacks], **options).history


def rates(model, recipe, epochs, **options):
    """The effective rate of each batch of 60 rows."""
    return fit(model, recipe, epochs=epochs, batch_size=60, **options)[KEY]


def gradient(w, rows):
    """Of the mean over these rows, in float64."""
    x, y = X[rows].astype(float), Y[rows].astype(float)[:, None]
    return 2 / len(x) * x.T @ (x @ w - y)


def warmed_up(k, updates, count):
    """The factor of each update: from 1 to k by a constant amount (section 2.2), then k (section 2.1)."""
    return np.minimum(1 + (k - 1) * np.arange(count) / updates, k)


@pytest.mark.parametrize(
    ("rule", "reference", "accumulated", "k"),
    [("linear", 15, 1, 4), ("sqrt", 15, 1, 2), ("linear", 30, 2, 4), ("linear", 120, 1, 0.5)],
)
def test_rates_of_the_updates(rule, reference, accumulated, k):
    """The factor by the paper's formula; two accumulated batches are one large one; no warm-up down."""
    optimizer = momentum(gradient_accumulation_steps=accumulated if accumulated > 1 else None)
    seen = rates(line(optimizer), LargeBatch(reference, 4 * accumulated, rule), 6 * accumulated)
    expected = ETA * (warmed_up(k, 4, 6) if k > 1 else np.full(6, k))
    np.testing.assert_allclose(seen[accumulated - 1 :: accumulated], expected, rtol=1e-6)


def by_hand(nesterov, correction):
    """Momentum with the rate absorbed by v (equation 10), and v corrected by the ratio of the rates."""
    w, v, previous = np.linspace(-1.0, 1.0, 12)[:, None], 0.0, 1.0
    reference = np.where(np.arange(12) < 6, ETA, 0.1 * ETA)  # `Lower`, behind 2 epochs of 3 updates
    for t, rate in enumerate(reference * warmed_up(4, 8, 12)):
        g = gradient(w, slice(t % 3 * 20, t % 3 * 20 + 20))
        v = 0.9 * (rate / previous if correction else 1.0) * v + rate * g
        w = w - (0.9 * v + rate * g if nesterov else v)
        previous = rate
    return w, -v / 4  # Keras' velocity, at the reference rate


@pytest.mark.parametrize(("towers", "nesterov"), [(0, True), (3, False)])
def test_momentum_correction(towers, nesterov):
    """12 updates, each at another rate, are those by hand: on one device, and on 7, 7 and 6 rows."""
    model = line(momentum(nesterov=nesterov))
    if towers:
        model = on_towers(lambda: line(momentum(nesterov=nesterov)), towers)
    fit(model, LargeBatch(5, 8 / 3), Lower())
    w, v = by_hand(nesterov, True)
    assert np.max(np.abs(w - by_hand(nesterov, False)[0])) > 1e-2  # it can be told
    assert_close([model.get_weights()[0], model.optimizer.momentums[0].numpy()], [w, v], 1e-5)
    if towers:
        assert_towers_agree(model)
        model.towers.close()


def test_without_momentum_correction():
    """Keras' own update with the effective rates."""
    model = line(momentum())
    fit(model, LargeBatch(5, 8 / 3, momentum_correction=False), Lower())
    assert_close(model.get_weights()[0], by_hand(False, False)[0], 1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
        lambda: optimizers.AdamW(0.01),
        lambda: optimizers.LossScaleOptimizer(momentum(), initial_scale=8.0),
    ],
)
def test_other_optimizers(optimizer):
    """RMSprop's velocity is corrected, Adam's moments contain no rate, and a wrapped SGD is an SGD."""
    model = line(optimizer())
    fit(model, LargeBatch(5, 8 / 3), epochs=2)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    w = np.linspace(-1.0, 1.0, 12)[:, None]
    v = m = s = a = np.zeros_like(w)
    previous = 1.0
    for t, rate in enumerate(float(inner.learning_rate.numpy()) * warmed_up(4, 8, 6)):
        g = gradient(w, slice(t % 3 * 20, t % 3 * 20 + 20))
        if isinstance(inner, optimizers.RMSprop):
            s, a = 0.9 * s + 0.1 * g**2, 0.9 * a + 0.1 * g
            v = 0.9 * rate / previous * v + rate * g / np.sqrt(s - a**2 + 1e-7)
            w = w - v
        elif isinstance(inner, optimizers.SGD):
            v = 0.9 * rate / previous * v + rate * g
            w = w - v
        else:
            m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
            corrected = rate * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
            w = w * (1 - 0.004 * rate) - corrected * m / (np.sqrt(s) + 1e-7)
        previous = rate
    assert_close(model.get_weights()[0], w, 3e-5)


def test_a_rate_of_zero():
    """Neither division by it nor a velocity that outlives it: the weights rest, then move again."""
    model, kernels = line(momentum()), []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch == 1 else ETA)
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kernels.append(model.get_weights()[0]))
    fit(model, LargeBatch(20, 0), schedule, keep, epochs=3)
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.isfinite(kernels[2]).all() and np.any(kernels[2] != kernels[1])


def test_loss_is_divided_by_the_rows_of_the_batch():
    """Remark 3: by kn, not by each tower's n: the gradient of 7, 7 and 6 rows is that of the 20."""
    model = on_towers(lambda: line(optimizers.SGD(1.0)), 3)
    before = model.get_weights()[0]
    model.train_on_batch(X[:20], Y[:20])
    moved = before - model.get_weights()[0]
    shards = [gradient(before, slice(*ends)) for ends in ((0, 7), (7, 14), (14, 20))]
    assert_close(moved, gradient(before, slice(0, 20)), 1e-6)
    assert np.max(np.abs(moved - np.mean(shards, 0))) > 1e-2
    model.towers.close()


def test_callbacks_and_schedules_on_top():
    """They read and write the reference rate, and are logged as before; the factor comes on top."""
    model = line(momentum())
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    logs = fit(model, plateau, LargeBatch(20, 2), batch_size=60)
    reference = ETA * np.array([1, 0.5, 0.25, 0.125])
    np.testing.assert_allclose(logs[KEY], ETA * np.array([1, 2, 1.5, 0.75]), rtol=1e-6)
    np.testing.assert_allclose(logs["learning_rate"], [ETA, *reference[:-1]], rtol=1e-6)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(reference[-1])
    cosine = optimizers.schedules.CosineDecay(ETA, 4)
    expected = [float(cosine(step)) * factor for step, factor in enumerate((1, 2, 3, 3))]
    np.testing.assert_allclose(rates(line(momentum(cosine)), LargeBatch(20, 2), 4), expected, rtol=1e-6)


CONTINUED = {
    "SGD": (lambda: momentum(nesterov=True), "load_model", 0),
    "schedule": (lambda: momentum(optimizers.schedules.CosineDecay(ETA, 12)), "BackupAndRestore", 0),
    "wrapped": (lambda: optimizers.LossScaleOptimizer(momentum(gradient_accumulation_steps=2)), "BackupAndRestore", 0),
    "towers": (momentum, "load_model", 3),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", CONTINUED)
def test_continued_in_the_middle_of_the_warm_up(name, tmp_path):
    """Saved and loaded behind a change of the rate: bit for bit the run that was never stopped."""
    optimizer, way, towers = CONTINUED[name]

    def build():
        return line(optimizer())

    lower = [] if name == "schedule" else [Lower()]

    def made(factory):
        if towers:
            return nccl_parallel(towers=towers, recipe=LargeBatch(5, 3))(factory)()
        return factory()

    def run(model, *callbacks, **options):
        recipe = [] if towers else [LargeBatch(5, 3)]
        return fit(model, *lower, *recipe, *callbacks, **options)[KEY]

    whole, checkpoints = made(build), keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    if way == "load_model":
        expected = run(whole, checkpoints)
        continued = made(lambda: keras.models.load_model(tmp_path / "2.keras"))
        seen = run(continued, initial_epoch=2)
    else:
        expected, continued = run(whole), made(build)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        with pytest.raises(InterruptedError):
            run(made(build), backup, Interrupt())
        seen = run(continued, backup)
    assert seen == expected[2:]
    np.testing.assert_array_equal(continued.get_weights()[0], whole.get_weights()[0])
    for model in (whole, continued) if towers else ():
        model.towers.close()


@pytest.mark.slow
def test_files_are_plain(tmp_path):
    """What a file holds, and what the optimizer is made from again, are those of a model without a recipe."""
    configs = {}
    for name in ("scaled", "plain"):
        keras.utils.clear_session()
        model = line(momentum())
        if name == "scaled":
            fit(model, LargeBatch(5, 0), epochs=1)
        model.optimizer.build(model.trainable_variables)
        model.save_weights(tmp_path / f"{name}.weights.h5")
        configs[name] = model.get_compile_config()
    assert contents(tmp_path / "scaled.weights.h5") == contents(tmp_path / "plain.weights.h5")
    assert configs["scaled"] == configs["plain"]


@pytest.mark.slow
def test_never_twice_and_one_warm_up(tmp_path):
    """Neither a second fit, nor a new object, another batch size or a file scales or warms up again."""
    model = line(momentum())
    assert rates(model, LargeBatch(15, 3), 2) == pytest.approx([ETA, 2 * ETA])
    assert rates(model, LargeBatch(15, 3), 2) == pytest.approx([3 * ETA, 4 * ETA])
    model.save(tmp_path / "model.keras")
    assert fit(model, LargeBatch(5, 3), epochs=1, batch_size=10)[KEY] == pytest.approx([2 * ETA])
    loaded = keras.models.load_model(tmp_path / "model.keras")
    logs = fit(loaded, LargeBatch(5, 3), epochs=4, initial_epoch=3, batch_size=10)
    assert logs[KEY] == pytest.approx([2 * ETA])
    model.compile(momentum(), "mse")  # begins anew, whatever the epochs' numbers
    assert rates(model, LargeBatch(15, 3), 9, initial_epoch=7) == pytest.approx([ETA, 2 * ETA])
    # Half a warm-up is still half of one when its length changes.
    assert fit(model, LargeBatch(15, 6), epochs=1, batch_size=60)[KEY] == pytest.approx([3 * ETA])


def moved(model, train):
    """What `train` subtracts from the weights of a `line`, over the gradient of all rows."""
    before = model.get_weights()[0]
    train()
    return (before - model.get_weights()[0]) / gradient(before, slice(None))


@pytest.mark.slow
def test_a_callback_holds_for_its_fit():
    """Without it the model has the reference rate, and nothing is corrected; nor do earlier traces matter."""
    model = line(optimizers.SGD(ETA))
    for callbacks, k in (([], 1), ([LargeBatch(15, 0)], 4), ([], 1)):
        rate = moved(model, lambda callbacks=callbacks: fit(model, *callbacks, epochs=1, batch_size=60))
        np.testing.assert_allclose(rate, k * ETA, rtol=1e-3)
    models = [line(momentum()), line(momentum())]
    fit(models[0], LargeBatch(60, 0), epochs=1, batch_size=60)
    fit(models[1], epochs=1, batch_size=60)
    for model in models:
        fit(model, Lower(), epochs=4)
    assert_close(models[0].get_weights(), models[1].get_weights())


def test_weight_decay():
    """Of the effective rate; gamma, beta and biases are left alone on request, and what the user excluded."""
    layers = [keras.layers.Dense(3, name="one"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((12,)), *layers])
    model.compile(optimizers.SGD(ETA, weight_decay=0.5), lambda y, p: 0.0 * p)
    model.optimizer.exclude_from_weight_decay(var_list=[layers[0].kernel])
    for variable in model.trainable_variables:
        variable.assign(tf.ones_like(variable))
    fit(model, LargeBatch(15, 2, exclude_from_weight_decay=True), batch_size=60)
    for variable in model.trainable_variables:
        decayed = np.prod(1 - 0.5 * ETA * np.array([1, 2.5, 4, 4])) if variable is layers[2].kernel else 1.0
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, decayed), rtol=1e-6)


@pytest.mark.slow
def test_as_a_recipe():
    """Every fit has it, and `train_on_batch` and a loop of one's own do, or are refused."""
    recipe = LargeBatch(15, 2)
    model = nccl_parallel(towers=2, recipe=recipe)(lambda: line(optimizers.SGD(ETA)))()
    model.towers.explain(60)
    with pytest.raises(NcclSyncError, match=r"Expected fit before train_on_batch, .*warmup_epochs=2"):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match=r"Expected one LargeBatch. Received: one as a callback, beside"):
        fit(model, LargeBatch())
    with pytest.raises(TypeError, match=r"Expected a list of callbacks, where a recipe is given"):
        model.fit(X, Y, callbacks=keras.callbacks.CallbackList([]))
    assert fit(model, epochs=3, batch_size=60)[KEY] == pytest.approx([ETA, 2.5 * ETA, 4 * ETA])

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch[0]) - tf.cast(batch[1], tf.float32)[:, None]))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    np.testing.assert_allclose(moved(model, lambda: model.train_on_batch(X, Y)), 4 * ETA, rtol=1e-3)
    with pytest.raises(NcclSyncError, match=r"Expected LargeBatch to have batch_size, .*batch_size=None"):
        model.towers.run(step, (X, Y))
    model.towers.close()
    told = LargeBatch(15, 2, batch_size=60, steps_per_epoch=1)
    model = nccl_parallel(towers=2, recipe=told)(lambda: line(optimizers.SGD(ETA)))()
    np.testing.assert_allclose(moved(model, lambda: model.towers.run(step, (X, Y))), ETA, rtol=1e-3)
    np.testing.assert_allclose(moved(model, lambda: model.train_on_batch(X, Y)), 2.5 * ETA, rtol=1e-3)
    model.towers.close()


@pytest.mark.slow
def test_steps_in_one_graph_and_eagerly():
    """Several steps per execution, XLA and eager towers make the same updates."""
    ends = []
    for arguments in ({}, {"steps_per_execution": 2, "jit_compile": True}, {"run_eagerly": True}):
        model = on_towers(lambda arguments=arguments: line(momentum(), **arguments), 2)
        fit(model, LargeBatch(5, 1), epochs=1)
        model.optimizer.learning_rate = 0.1 * ETA
        fit(model, LargeBatch(5, 1), epochs=1, batch_size=60)
        ends.append(model.get_weights())
        assert_towers_agree(model)
        model.towers.close()
    for end in ends[1:]:
        assert_close(end, ends[0])


def endless():
    while True:
        yield X[:20], Y[:20]


@pytest.mark.slow
def test_data_of_unknown_length():
    """The size of the batch is found in the step; the length of an epoch is asked for."""
    model = line(momentum())
    arguments = {"epochs": 1, "verbose": 0}
    finite = tf.data.Dataset.from_generator(
        lambda: iter([(X[:20], Y[:20]), (X[20:30], Y[20:30])]),
        output_signature=(tf.TensorSpec((None, 12)), tf.TensorSpec((None,))),
    )
    with pytest.raises(ValueError, match=r"Expected data of a known number of batches.*steps_per_epoch="):
        model.fit(finite, callbacks=[LargeBatch(5, 1)], **arguments)
    logs = model.fit(finite, callbacks=[LargeBatch(5, 2, steps_per_epoch=2)], **arguments).history
    assert logs[KEY] == pytest.approx([ETA * 1.75])
    model = line(momentum())
    logs = model.fit(endless(), steps_per_epoch=2, callbacks=[LargeBatch(5, 2)], **arguments).history
    assert logs[KEY] == pytest.approx([ETA * 1.75])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reference_batch_size": 0}, ValueError, "Expected reference_batch_size to be at least 1. Received: 0"),
        ({"batch_size": 2.0}, TypeError, "Expected batch_size to be a whole number. Received: 2.0"),
        ({"warmup_epochs": -1}, ValueError, "Expected warmup_epochs of at least 0. Received: -1"),
        ({"warmup_epochs": "5"}, TypeError, "Expected warmup_epochs to be a number. Received: '5'"),
        ({"rule": "cubic"}, ValueError, "Expected rule to be 'linear' or 'sqrt'. Received: 'cubic'"),
        ({"momentum_correction": 1}, TypeError, "Expected momentum_correction to be a bool. Received: 1"),
    ],
)
def test_bad_arguments(arguments, error, message):
    """Refused where they are given."""
    with pytest.raises(error, match=message):
        LargeBatch(**arguments)


def test_what_cannot_have_a_recipe():
    """Several optimizers, of which Keras or a step of one's own knows, none, and what is no recipe."""
    message = r"Expected a model compiled with one optimizer, and no other. Received: \[{}\]"
    several = optimizers.MultiOptimizer(lambda variable: optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=message.format("'multi_optimizer.*'")):
        fit(line(several), LargeBatch(5, 1))
    model = line(optimizers.LossScaleOptimizer(optimizers.SGD(0.1, name="mine")))
    model.same, model.second = model.optimizer.inner_optimizer, optimizers.Adam(name="second")
    with pytest.raises(ValueError, match=message.format("'mine', 'second'")):
        fit(model, LargeBatch(5, 1))
    with pytest.raises(TypeError, match=r"Expected recipe to be a LargeBatch. Received: 'large'"):
        nccl_parallel(recipe="large")


def test_plot_history(tmp_path):
    """A picture of what the logs have; no picture of nothing. A notebook's pictures are shown as before."""
    import matplotlib

    matplotlib.use("svg")
    history = keras.callbacks.History()
    history.history = {KEY: [0.1, 0.2], "loss": [1.0, 0.5]}
    plot_history(history, tmp_path / "rate.png")
    plot_history({KEY: [0.1, 0.2], "noise_scale": [10.0, 20.0], "suggested_batch_size": [8, 16]}, tmp_path / "both.png")
    assert matplotlib.get_backend() == "svg"
    from matplotlib import image

    alone, both = (image.imread(tmp_path / f"{name}.png") for name in ("rate", "both"))
    assert both.shape[1] > 1.9 * alone.shape[1] and alone[..., 3].any()
    with pytest.raises(ValueError, match=r"Expected logs with at least one of .*Received: \['loss'\]"):
        plot_history({"loss": [1.0]}, tmp_path / "none.png")
    with pytest.raises(TypeError, match=r"Expected what fit returns, or its history. Received: 3"):
        plot_history(3, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
