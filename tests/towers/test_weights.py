"""What Python writes into tower 0's weights and optimizer reaches every tower before the next step.

Every test compares with the same operations on plain Keras, after a step that follows the write: a tower
that still held an old value would have computed another gradient, or made another update.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

from ncclsync.compat import tensorflow as tf_compat

TOWERS = 3
X, Y = data(26)  # steps of 8, 8, 8 and 2 rows: in the last one, a tower has no sample
WRITES = {}  # name: what a test does to a trained model


def writes(function):
    WRITES[function.__name__] = function
    return function


def fit(model, epochs=1, **options):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options).history


def state(model):
    return [model.get_weights(), [np.asarray(v) for v in model.optimizer.variables]]


def assert_copies_equal(model):
    """Every tower's own copy equals tower 0's variable; unlike `divergence`, without a sync before."""
    for variable in [*model.weights, *model.optimizer.variables]:
        copies = model.towers.replicas.of(tf_compat.backend_variable(variable))
        assert len(copies) == TOWERS
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy(), err_msg=variable.path)


def run(model, write, tmp_path):
    """Train, write, train, write; return all that plain Keras must give too."""
    results = [fit(model)]
    for fit_again in (True, False):
        write(model, tmp_path)
        if fit_again:
            results += [fit(model), state(model)]
            # What `fit` itself writes at its end (averages) goes out with the next step.
            if hasattr(model, "towers") and not model.optimizer.use_ema:
                assert_copies_equal(model)
    if hasattr(model, "towers"):
        assert_towers_agree(model)
        assert_copies_equal(model)
    return [*results, state(model)]


def shifted(weights):
    """Other weights of the same shapes."""
    return [0.5 * w[::-1] + 0.1 for w in weights]


@pytest.fixture(scope="module")
def pair():
    """A model on towers and a plain one, which the tests below share: each is traced once."""
    models = [on_towers(mlp, TOWERS), mlp()]
    for model in models:
        fit(model)
    return models


@pytest.fixture
def fresh_pair(pair):
    """The shared models, both as they were when the factory made them."""
    start = mlp()
    for model in pair:
        model.stop_training = False
        model.set_weights(start.get_weights())
        for variable in model.optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        model.optimizer.learning_rate = 0.01
        fit(model)
    return pair


@writes
def load_weights(model, tmp_path):
    """A `.weights.h5` file of another training: weights and optimizer state."""
    path = tmp_path / "other.weights.h5"
    if not path.exists():
        other = mlp()
        fit(other, epochs=2)
        other.save_weights(path)
    model.load_weights(path)


@writes
def set_weights(model, tmp_path):
    model.set_weights(shifted(model.get_weights()))


@writes
def layer_set_weights(model, tmp_path):
    model.layers[0].set_weights(shifted(model.layers[0].get_weights()))


@writes
def set_learning_rate(model, tmp_path):
    model.optimizer.learning_rate = 0.1


@writes
def learning_rate_scheduler(model, tmp_path):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 3.0 * rate if epoch else 0.002)
    fit(model, epochs=3, callbacks=[schedule])


@writes
def reduce_lr_on_plateau(model, tmp_path):
    before = float(model.optimizer.learning_rate)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=100.0)
    fit(model, epochs=3, callbacks=[plateau])
    assert float(model.optimizer.learning_rate) < 0.2 * before


@writes
def early_stopping_restores(model, tmp_path):
    """Stops after the second epoch, with the weights of the first, of which the loss is taken as best."""
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    fit(model, epochs=5, callbacks=[stopping])
    assert stopping.stopped_epoch == 1
    for one, other in zip(model.get_weights(), stopping.best_weights, strict=True):
        np.testing.assert_array_equal(one, other)


@writes
def model_checkpoint(model, tmp_path):
    """Saved in the middle of an epoch, and loaded after it."""
    path = str(tmp_path / "middle.weights.h5")
    before = int(model.optimizer.iterations.numpy())
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=3)])
    model.load_weights(path)
    assert int(model.optimizer.iterations.numpy()) == before + 3


@writes
def keras_variable_assign(model, tmp_path):
    kernel, bias = model.layers[0].kernel, model.layers[1].bias
    kernel.assign(-0.5 * kernel)
    bias.assign_add(keras.ops.ones_like(bias))
    model.layers[0].bias.assign_sub(0.1 * keras.ops.ones_like(model.layers[0].bias))


@writes
def tf_variable_assign(model, tmp_path):
    """The `tf.Variable` inside, whole and in part, and an optimizer's slot."""
    kernel = model.layers[0].kernel.value
    kernel.assign(0.5 * kernel)
    kernel.assign_add(tf.fill(kernel.shape, 0.05))
    kernel.assign_sub(tf.fill(kernel.shape, 0.01))
    model.layers[1].kernel.value.scatter_nd_update([[0, 0], [3, 1]], [0.7, -0.7])
    kernel[2, 3:5].assign([0.25, -0.25])
    slot = model.optimizer.variables[-1]
    slot.assign(keras.ops.ones_like(slot))


@writes
def in_the_middle_of_an_epoch(model, tmp_path):
    """A callback that clips weights after every batch."""

    def clip(batch, logs):
        for weight in model.trainable_weights:
            weight.assign(keras.ops.clip(weight, -0.1, 0.1))

    fit(model, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=clip)])


@writes
def tf_checkpoint(model, tmp_path):
    """`tf.train.Checkpoint.restore` of variables, which writes without `assign`."""
    weights = [w.value for w in model.trainable_weights]
    checkpoint = tf.train.Checkpoint(weights=weights)
    path = checkpoint.write(str(tmp_path / f"checkpoint{int(model.optimizer.iterations.numpy())}"))
    fit(model)
    checkpoint.read(path).assert_consumed()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", WRITES)
def test_write_reaches_all_towers(name, fresh_pair, tmp_path):
    """However Python writes: the next step on all towers starts from what it wrote."""
    for folder in ("towers", "alone"):
        (tmp_path / folder).mkdir()
    actual = run(fresh_pair[0], WRITES[name], tmp_path / "towers")
    assert_close(actual, run(fresh_pair[1], WRITES[name], tmp_path / "alone"), what=name)


def run_both(factory, write, tmp_path):
    """The same as `test_write_reaches_all_towers`, with models of the test's own."""
    model = on_towers(factory, TOWERS)
    assert_close(run(model, write, tmp_path), run(factory(), write, tmp_path), what="state")


def assigner(model):
    @tf.function
    def shrink():
        for weight in model.trainable_weights:
            weight.assign(0.5 * weight)

    return shrink


def test_function_of_the_user_assigns(tmp_path):
    """A `tf.function` that assigns a weight is seen at every call, not only when it is traced."""
    functions = {}

    def write(model, _):
        functions.setdefault(id(model), assigner(model))()

    run_both(mlp, write, tmp_path)


def test_function_traced_before_the_first_step_assigns(tmp_path):
    """The same where the function is traced before the first step, when no tower has a copy of the weight."""
    pair = [on_towers(mlp, TOWERS), mlp()]
    results = []
    for model in pair:
        shrink = assigner(model)
        shrink()
        results.append(run(model, lambda *_, shrink=shrink: shrink(), tmp_path))
    assert_close(*results)


@pytest.mark.slow
def test_swap_ema_weights(tmp_path):
    """SwapEMAWeights, and the averages that Keras writes into the weights at the end of `fit`."""

    def factory():
        return mlp(keras.optimizers.SGD(0.3, momentum=0.5, use_ema=True, ema_momentum=0.8))

    def write(model, _):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        fit(model, epochs=2, callbacks=[swap], validation_data=(X, Y))
        swap = keras.callbacks.SwapEMAWeights()
        swap.set_model(model)
        model.evaluate(X, Y, verbose=0, callbacks=[swap])

    run_both(factory, write, tmp_path)


def test_full_model_is_loaded_in_the_factory(tmp_path):
    """`load_model` of a trained model: weights and optimizer state are on all towers at the first step."""
    trained = mlp()
    fit(trained, epochs=2)
    trained.save(tmp_path / "full.keras")

    def factory():
        return keras.models.load_model(tmp_path / "full.keras")

    model = on_towers(factory, TOWERS)
    assert model.towers.divergence() == 0.0
    for tower in range(TOWERS):
        assert_close(model.towers.get_weights(tower), trained.get_weights(), tolerance=0.0)
    assert_close([fit(model), state(model)], [fit(trained), state(trained)])
    assert_copies_equal(model)


class Interruption(Exception):
    """What ends a training in the middle."""


@pytest.mark.slow
def test_backup_and_restore(tmp_path):
    """A training that is interrupted and resumed in a new model ends like one that was not."""

    def interrupt(epoch, logs):
        if epoch == 1:
            raise Interruption

    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq="epoch")
    callbacks = [backup, keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)]
    with pytest.raises(Interruption):
        fit(on_towers(mlp, TOWERS), epochs=3, callbacks=callbacks)
    resumed, alone = on_towers(mlp, TOWERS), mlp()
    history = fit(resumed, epochs=3, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")])
    assert len(history["loss"]) == 2
    fit(alone, epochs=3)
    assert_close(state(resumed), state(alone))
    assert_copies_equal(resumed)
    assert_towers_agree(resumed)


class OwnState(keras.optimizers.SGD):
    """Makes a variable of its own, beside those that `add_variable` makes."""

    def build(self, variables):
        super().build(variables)
        self.extra = keras.Variable(1.0, name="extra")


def tree_after_a_step(model):
    model.train_on_batch(X[:8], Y[:8])
    return keras.tree.map_structure(np.shape, model.get_state_tree())


OPTIMIZERS = {
    "Nadam": keras.optimizers.Nadam,
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "accumulating": lambda: keras.optimizers.AdamW(gradient_accumulation_steps=2, use_ema=True),
    "own": OwnState,
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS["several"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Nadam(), {"hidden/.*": keras.optimizers.Adam()})
    )


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "deferred"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_has_one_devices_paths(name, is_built):
    """A state tree of one device fits the model on towers, and the reverse: Keras skips paths that it does not know."""

    def build():
        keras.utils.clear_session()
        layers = [keras.layers.Dense(4, name="hidden"), keras.layers.BatchNormalization(name="norm")]
        layers += [keras.layers.Dense(5, name="out")]
        model = keras.Sequential([*([keras.Input((12,), name="given")] if is_built else []), *layers], name="model")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[name](), loss, metrics=["accuracy"])
        return model

    assert tree_after_a_step(on_towers(build, 2)) == tree_after_a_step(build())
