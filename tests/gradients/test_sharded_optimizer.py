"""`@nccl_parallel(shard_optimizer=True)`: the same numbers, 1/N of the state, whole for who looks."""

import functools
import re

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, on_towers, state

import ncclsync
from ncclsync import NcclSyncError
from ncclsync.compat import keras_optimizers
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.gradients.partitions import Place
from ncclsync.gradients.sharded_optimizer import find_coupling

X, Y = data(rows=61)
mlp = functools.partial(parity.mlp, metrics=None)  # quicker to trace; sharding has no part in metrics
SPARSE_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

OPTIMIZERS = {
    "adamw": lambda: decaying(),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, clipnorm=0.1),
    "nadam": lambda: keras.optimizers.Nadam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), loss_scale_factor=4.0
    ),
    "average": lambda: keras.optimizers.Lion(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
}


def decaying():
    """An optimizer that decays all weights but the biases, and looks at all gradients before it updates."""
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5, amsgrad=True)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def fit(model, x=X, y=Y, **arguments):
    arguments = {"batch_size": 20, "epochs": 2, "verbose": 0, "shuffle": False, **arguments}
    return model.fit(x, y, **arguments).history


def sharding_of(model):
    (sharded,) = model.towers.replicas.sharding._sharded.values()
    return sharded


def elements(variable):
    """How many elements lie in a variable's memory just now."""
    return int(tf.size(tf.raw_ops.ReadVariableOp(resource=tf_compat.handle_of(variable), dtype=variable.dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_numbers(name):
    """Weights, optimizer state and logs are those of whole state, to the bit; the last batch has one row."""
    whole, divided = (on_towers(lambda: mlp(OPTIMIZERS[name]()), 3, shard_optimizer=s) for s in (False, True))
    expected, found = fit(whole), fit(divided)
    assert sharding_of(divided).groups
    assert found == expected
    for one, other in zip(state(divided).values(), state(whole).values(), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert_towers_agree(divided)


def test_same_as_one_device():
    """More towers than some weights have elements, weights of odd sizes, several flat variables."""
    alone, model = parity.mlp(), on_towers(parity.mlp, 8, shard_optimizer=True, bucket_bytes=400)
    assert_close(fit(model), fit(alone))
    assert_close(state(model), state(alone))
    assert len(sharding_of(model).groups) > 1


@pytest.mark.parametrize("elements", [0, 1, 2, 5, 7, 8, 9, 24])
@pytest.mark.parametrize("towers", [2, 3, 8])
def test_place(elements, towers):
    """Rows, parts and the whole agree, for any number of elements and towers."""
    length = -(-elements // towers)
    place = Place(3, length, elements, towers)
    tensor = tf.reshape(tf.range(elements), [1, elements])
    rows = place.rows(tensor)
    assert rows.shape == (towers, length) and place.end == 3 + length
    for tower in range(towers):
        np.testing.assert_array_equal(rows[tower], place.part(tensor, tower))
    np.testing.assert_array_equal(place.whole(rows, tensor.shape), tensor)


class Nothing(keras.layers.Layer):
    """Weights of no elements, as of a table that has no rows yet."""

    def build(self, _):
        self.table = self.add_weight(shape=[0, 5])
        self.vector = self.add_weight(shape=[0])

    def call(self, x):
        return x + tf.reduce_sum(self.table, 0)[:1] + tf.reduce_sum(self.vector)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
@pytest.mark.parametrize("ops", ["of the host", "as_on_gpus"])
def test_weights_without_elements(alone, ops, request):
    """Nothing is divided of them, and the others' numbers are those of one device; so are checkpoints."""
    if ops == "as_on_gpus":
        request.getfixturevalue("as_on_gpus")

    def build():
        keras.utils.set_random_seed(1)
        layers = [Nothing()] if alone else [keras.layers.Dense(7), Nothing(), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((12,)), *layers])
        model.compile(keras.optimizers.AdamW(0.01), SPARSE_LOSS)
        return model

    model, plain = on_towers(build, 3, shard_optimizer=True), build()
    assert_close(fit(model), fit(plain))
    assert_close(state(model), state(plain))
    assert sharding_of(model).groups
    assert_towers_agree(model)


@pytest.mark.slow
def test_state_is_divided():
    """While towers train each holds the N-th part, and the optimizer's own variables hold nothing."""
    model = on_towers(mlp, 4, shard_optimizer=True)
    fit(model)
    slots = [v.value for v in model.optimizer.variables if len(v.shape)]
    sizes = [int(np.prod(w.shape)) for w in model.weights]
    assert [elements(slot) for slot in slots] == [0] * 8
    sharded = sharding_of(model)
    flats = [variable.value for variable in sharded.twin.variables if len(variable.shape)]
    held = {elements(copy) for flat in flats for copy in model.towers.replicas.of(flat)}
    assert len(flats) == 2 and held == {sum(-(-size // 4) for size in sizes)}
    told = str(model.towers.explain())
    assert "each tower has its part" in told and "what each tower has updated" in told
    read = slots[0].numpy()
    assert read.shape == (12, 16) and np.abs(read).max() > 0
    assert elements(slots[0]) == 12 * 16
    fit(model, epochs=1)
    assert [elements(slot) for slot in slots] == [0] * 8


@pytest.mark.slow
def test_saved_and_loaded(tmp_path):
    """A file saved on the way loads without towers, with all state, and goes on on another number of them."""
    whole = mlp()
    fit(whole)
    model = on_towers(mlp, 3, shard_optimizer=True)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert_close(state(plain), state(model), 0)
    loaded = on_towers(lambda: keras.models.load_model(tmp_path / "model.keras"), 2, shard_optimizer=True)
    fit(loaded, epochs=1)
    fit(model, epochs=1)
    for one in (loaded, model):
        assert_close(state(one), state(whole))


@pytest.mark.slow
def test_python_writes_and_close():
    """What Python writes into optimizer variables counts from the next step; `close` leaves them whole."""
    models = [on_towers(mlp, 3, shard_optimizer=divided) for divided in (False, True)]
    for model in models:
        fit(model, epochs=1)
        for variable in model.optimizer.variables[2:4]:
            variable.assign(tf.zeros_like(variable) + 0.5)
        model.optimizer.variables[2].value.assign_add(tf.ones_like(model.optimizer.variables[2]))
        fit(model, epochs=1)
    whole, divided = models
    divided.towers.close()
    for one, other in zip(divided.optimizer.variables, whole.optimizer.variables, strict=True):
        assert elements(one.value) == np.prod(one.shape, dtype=int)
        np.testing.assert_array_equal(one, other)


def embedding(optimizer):
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Embedding(11, 6), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer, SPARSE_LOSS)
    return model


WORDS = np.random.default_rng(3).integers(0, 11, (61, 4))


@pytest.mark.slow
@pytest.mark.parametrize("averages", [{}, {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}])
def test_sparse_gradients(averages):
    """State of a weight with sparse gradients stays whole on every tower; that of the others is divided."""
    build = lambda: embedding(keras.optimizers.Adam(0.01, **averages))  # noqa: E731
    alone, model = build(), on_towers(build, 3, shard_optimizer=True)
    assert_close(fit(model, WORDS), fit(alone, WORDS))
    assert_close(state(model), state(alone))
    (group,) = sharding_of(model).groups
    assert [weight for weight, _ in group.pairs] == model.layers[-1].trainable_weights


class TrainsTheFirst(keras.Sequential):
    """Updates its first layer alone."""

    def train_step(self, data):
        x, y = data
        weights = self.layers[0].trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("averages", [{"ema_overwrite_frequency": 3}, {}])
def test_weights_without_a_gradient_are_averaged(averages):
    """As Keras averages all that an optimizer is built for: else `fit` ends with averages of 0 in these weights."""

    def build():
        keras.utils.set_random_seed(2)
        model = TrainsTheFirst([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.5, **averages), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    x = np.random.default_rng(3).random((16, 4)).astype("float32")
    alone, model = build(), on_towers(build, 3, shard_optimizer=True)
    for one in (alone, model):
        one.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_close(state(model), state(alone))
    assert np.abs(model.layers[1].kernel.numpy()).sum() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"jit_compile": True, "steps_per_execution": 3}, {"run_eagerly": True}])
def test_ways_to_run(arguments):
    """XLA, several steps per call, and no graph at all, in the middle of a run."""
    alone, model = mlp(), on_towers(mlp, 3, shard_optimizer=True)
    for one in (alone, model):
        fit(one, epochs=1)
        one.compile(one.optimizer, SPARSE_LOSS, **arguments)
        fit(one, epochs=1)
    assert_close(state(model), state(alone))


@pytest.mark.slow
def test_two_optimizers():
    """Two optimizers of one step, one after the other, each divided by itself."""

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = (keras.layers.Dense(7, name="first"), keras.layers.Dense(5, name="second"))
            self.other = keras.optimizers.SGD(0.1, momentum=0.9)

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, batch):
            for layer, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=batch[1], y_pred=self(batch[0]))
                optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
            return {"loss": loss}

    def build():
        keras.utils.set_random_seed(5)
        model = Two()
        model.build((None, 12))
        model.compile(keras.optimizers.Adam(0.01), SPARSE_LOSS)
        return model

    alone, model = build(), on_towers(build, 3, shard_optimizer=True)
    assert_close(fit(model), fit(alone))
    assert_close(state(model), state(alone))
    assert_close([np.asarray(v) for v in model.other.variables], [np.asarray(v) for v in alone.other.variables])
    assert len(model.towers.replicas.sharding._sharded) == 2


class Damped(keras.optimizers.SGD):
    """Has a field that its config lacks."""

    def __init__(self, learning_rate=0.1, damp=1.0, **arguments):
        super().__init__(learning_rate, **arguments)
        self.damp = damp

    def update_step(self, gradient, variable, learning_rate):
        """See Keras."""
        super().update_step(gradient * self.damp, variable, learning_rate)


def test_fields_are_seen_when_a_step_is_traced():
    """What is changed in an optimizer before a new trace is seen by it, as on one device."""
    found = []
    for towers in (1, 2):
        model = on_towers(lambda: mlp(Damped(damp=0.5)), towers, shard_optimizer=True)
        model.train_on_batch(X[:8], Y[:8])
        model.optimizer.damp, model.optimizer.weight_decay = 0.25, 0.3
        model.make_train_function(force=True)
        model.train_on_batch(X[:8], Y[:8])
        found.append(state(model))
    assert_close(*found)


@pytest.mark.slow
def test_failed_step_changes_nothing():
    """A label that one tower cannot use: weights and state are as before, and training goes on."""
    model, alone = on_towers(mlp, 3, shard_optimizer=True), mlp()
    bad = Y.copy()
    bad[33] = 17
    with pytest.raises(tf.errors.InvalidArgumentError, match="17"):
        fit(model, y=bad, epochs=1)
    fit(alone, X[:20], Y[:20], epochs=1)
    assert_close(state(model), state(alone))
    fit(model, X[20:], Y[20:])
    fit(alone, X[20:], Y[20:])
    assert_close(state(model), state(alone))


@pytest.mark.slow
def test_skipped_step_changes_nothing():
    """With on_nonfinite="skip" the parts are undone on the tower that holds them."""
    x = X.copy()
    x[33] = np.nan
    model, alone = on_towers(mlp, 3, shard_optimizer=True, health=ncclsync.Health(on_nonfinite="skip")), mlp()
    fit(model, x[:40], Y[:40], epochs=1)
    fit(alone, X[:20], Y[:20], epochs=1)
    assert_close(state(model), state(alone))


class Branching(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient - tf.reduce_mean(gradient), variable, learning_rate)


class Checking(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(tf.debugging.check_numerics(gradient, "a gradient"), variable, learning_rate)


REFUSED = {
    "Lamb": (keras.optimizers.Lamb, "Lamb: its update computes Sum"),
    "Adafactor": (keras.optimizers.Adafactor, "Adafactor: of its state "),
    "Muon": (keras.optimizers.Muon, "is expected. Compile with another optimizer, or leave shard_optimizer out"),
    "custom": (lambda: Branching(0.1), "Branching: its update computes Mean"),
    "checking": (lambda: Checking(0.1), "Checking: its update computes CheckNumerics"),
    "accumulating": (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
    "scaling": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "within a branch"),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """What cannot be divided is told before anything has changed, and by name."""
    if name == "Muon" and keras.__version__.startswith("3.10."):
        pytest.skip("Keras 3.10's Muon trains no model on TensorFlow, on one device neither: it asks for variable.path")
    build, message = REFUSED[name]
    model = on_towers(lambda: mlp(build()), 2, shard_optimizer=True)
    before = model.get_weights()
    with pytest.raises((ValueError, NcclSyncError), match=re.escape(message)):
        fit(model)
    assert_close(model.get_weights(), before, 0)
    assert int(model.optimizer.iterations) == 0


def test_refused_with_large_batch():
    """A recipe corrects velocities where the optimizer keeps them."""
    model = on_towers(mlp, 2, shard_optimizer=True, recipe=ncclsync.LargeBatch(10))
    with pytest.raises(ValueError, match=r"shard_optimizer or LargeBatch\. Received: both, for Adam"):
        fit(model)


def test_refused_with_sparse_gradients():
    """Nadam keeps one scalar for all weights, which would be updated twice."""
    model = on_towers(lambda: embedding(keras.optimizers.Nadam(0.01)), 2, shard_optimizer=True)
    with pytest.raises(ValueError, match=r"dense gradients for Nadam, which keeps \['_u_product'\]"):
        fit(model, WORDS)


def test_argument():
    """Anything but a bool is refused; one tower divides nothing."""
    with pytest.raises(TypeError, match=r"Expected shard_optimizer to be a bool\. Received: 1"):
        ncclsync.nccl_parallel(towers=2, shard_optimizer=1)
    model = on_towers(mlp, 1, shard_optimizer=True)
    fit(model, epochs=1)
    assert model.towers.replicas.sharding is None


@pytest.mark.parametrize("optimizer", [keras.optimizers.Ftrl, keras.optimizers.Adadelta, keras.optimizers.Adamax])
def test_element_wise(optimizer):
    """Keras' optimizers that are not named above."""
    assert find_coupling(optimizer(), [(rank, "float32") for rank in (0, 1, 2, 4)]) is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_an_update_is_traced_in_the_weights_dtype(dtype):
    """An optimizer of the user's own may have constants of it. Of an unknown shape nothing is known to be alike."""

    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient * tf.constant(2, dtype), variable, learning_rate)

    class Centred(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            centred = tf.numpy_function(lambda given: given - given.mean(), [gradient], dtype)
            super().update_step(tf.ensure_shape(centred, gradient.shape), variable, learning_rate)

    assert find_coupling(Own(), [(1, dtype), (2, dtype)]) is None
    assert "PyFunc" in (find_coupling(Centred(), [(2, dtype)]) or "")


def test_a_function_cannot_read_what_is_divided():
    """A tf.function would find an empty variable: it is told so."""
    model = on_towers(mlp, 2, shard_optimizer=True)
    fit(model)
    slot = model.optimizer.variables[2]

    @tf.function
    def read():
        return slot.value + 1.0

    with pytest.raises(NcclSyncError, match=r"Expected .*momentum.* to be read and written outside"):
        read()


@pytest.mark.slow
def test_beside_check_numerics():
    """Checks that TensorFlow adds to every op are no part of an update: the numbers are those without."""
    expected = on_towers(lambda: mlp(decaying()), 2)
    fit(expected, epochs=1)
    tf.debugging.enable_check_numerics()
    try:
        model = on_towers(lambda: mlp(decaying()), 2, shard_optimizer=True)
        fit(model, epochs=1)
        assert_close(model.get_weights(), expected.get_weights())
        model.layers[0].kernel.assign(tf.fill(model.layers[0].kernel.shape, np.float32("nan")))
        with pytest.raises(tf.errors.InvalidArgumentError, match="had NaN"):
            fit(model, epochs=1)
    finally:
        tf.debugging.disable_check_numerics()


def of_its_own(kind):
    """An optimizer with an update that a part of a weight does not have."""

    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            factors = {
                "rank": 2.0 if len(variable.shape) == 2 else 0.5,
                "fan-in": 1 / np.sqrt(variable.shape[0]),
                "name": 0.1 if "kernel" in variable.name else 1.0,
                "place": 1.0 + self._get_variable_index(variable),
                "attribute": getattr(self, "factors", {"by": 1.0})["by"],
                "none": 3.0,
            }
            super().update_step(gradient * factors[kind], variable, learning_rate)

    optimizer = keras.optimizers.SGD(0.05, momentum=0.9) if kind == "method" else Own(0.05, momentum=0.9)
    optimizer.factors = {"by": 0.5}
    if kind == "method":
        update = optimizer.update_step
        optimizer.update_step = lambda gradient, *others: update(gradient * 0.5, *others)
    return optimizer


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", ["rank", "fan-in", "name", "place", "attribute", "method"])
def test_updates_that_a_part_does_not_have_are_refused(kind):
    """An optimizer of the user's own is compared with its twin: op by op, for each weight."""
    model = on_towers(lambda: mlp(of_its_own(kind)), 2, shard_optimizer=True)
    with pytest.raises(ValueError, match=f"Received: {'SGD' if kind == 'method' else 'Own'}, whose update of "):
        fit(model, epochs=1)


def test_optimizers_of_ones_own():
    """One that updates all alike is divided; Keras' own are not compared."""
    alone, model = mlp(of_its_own("none")), on_towers(lambda: mlp(of_its_own("none")), 2, shard_optimizer=True)
    for one in (alone, model):
        fit(one, epochs=1)
    assert_close(state(model), state(alone))
    for make in OPTIMIZERS.values():
        optimizer = make()
        twin = keras_optimizers.twin_of(optimizer)
        for one in (optimizer, twin):
            one.build([keras.Variable(np.ones([2, 3]))])
        assert keras_optimizers.is_as_keras_made_it(optimizer, twin), optimizer


class ClippingByItsNorm(keras.optimizers.SGD):
    """Adaptive gradient clipping, by a method of Keras' own."""

    def _clip_gradients(self, grads):
        return [one / (1.0 + keras.ops.norm(keras.ops.reshape(one, [-1]))) for one in grads]


def test_an_optimizer_that_touches_gradients_gets_whole_ones():
    """Whatever method of Keras' it overrides, or holds; else each tower would clip its part alone."""
    alone, model = mlp(ClippingByItsNorm(0.1)), on_towers(lambda: mlp(ClippingByItsNorm(0.1)), 2, shard_optimizer=True)
    for one in (alone, model):
        fit(one, epochs=1)
    assert_close(state(model), state(alone))
    held = keras.optimizers.SGD(0.1)
    assert keras_optimizers.applies_untouched(held)
    held._clip_gradients = lambda grads: grads
    assert not keras_optimizers.applies_untouched(held)
    assert keras_optimizers.applies_untouched(Damped(0.1))
