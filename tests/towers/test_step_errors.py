"""An error in one tower's step surfaces as itself, leaves all towers equal, and the model trains on."""

import _thread
import collections.abc
import os
import signal
import subprocess
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import two_parts
from parity import assert_close, assert_towers_agree, data, mlp, on_towers
from virtual_host import command

from ncclsync import NcclSyncError, Towers, ops
from ncclsync.communicator.timeouts import held_back
from ncclsync.compat import keras as keras_compat
from ncclsync.ops import host_ops
from ncclsync.towers.failures import Failures
from ncclsync.towers.recovery import Rollback

X, Y = data(rows=60)
BAD = Y.copy()
BAD[39] = 99  # the last row of the second batch of 20: the last tower's alone
SECONDS = 30  # a generous "within seconds" for a busy machine, tracing included


def norm():
    """A classifier with BatchNormalization, whose moving statistics a step writes too."""
    return linear(keras.layers.BatchNormalization())


def linear(*layers):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(5)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class CheckedAfterwards(keras.Sequential):
    """A step that fails between two writes which need no collective between them: an average of the weights
    follows the optimizer's update, unless a check of the new weights fails.
    """

    def __init__(self, layers):
        super().__init__(layers)
        self.average = self.add_weight(shape=(12, 5), initializer="zeros", trainable=False)

    def train_step(self, batch):
        logs = super().train_step(batch)
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        after = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x)))
        with tf.control_dependencies([after]):
            self.average.assign(0.9 * self.average + 0.1 * self.layers[0].kernel)
        return {**logs, "after": after}


def checked_afterwards():
    keras.utils.set_random_seed(3)
    model = CheckedAfterwards([keras.Input((12,)), keras.layers.Dense(5)])
    # A loss that looks at no label, so that only the check fails.
    model.compile(keras.optimizers.Adam(0.01), lambda y, p: tf.reduce_mean(p**2, -1))
    return model


def dataset(labels, first=0, last=60):
    return tf.data.Dataset.from_tensor_slices((X[first:last], labels[first:last])).batch(20)


def state(model):
    """What must be equal on all towers, as each tower holds it: [N] lists of arrays."""
    variables = [v for v in keras_compat.variables_of(model) if v.aggregation != tf.VariableAggregation.SUM]
    model.towers.replicas.sync()
    copies = [model.towers.replicas.of(variable) for variable in variables]
    return [[column[i].numpy() for column in copies] for i in range(len(model.towers))]


def assert_state(model, expected):
    """All towers hold `expected`, to the bit."""
    for tower in state(model):
        for one, other in zip(tower, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert_towers_agree(model)


def fit(model, *arguments):
    return model.fit(*arguments, epochs=1, verbose=0, shuffle=False).history


class Remember(keras.callbacks.Callback):
    """Keeps tower 0's state as it is after every batch."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(state(self.model)[0])


STEPS = {
    "mlp": mlp,
    "batch_normalization": norm,
    "two_optimizers": two_parts,
    "checked_afterwards": checked_afterwards,
    "run_eagerly": lambda: mlp(run_eagerly=True),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "name, row",
    # Row 39 is the last tower's, row 20 the first's, which then has made a part of its writes.
    [*((name, 39) for name in STEPS), ("two_optimizers", 20), ("checked_afterwards", 20)],
)
def test_fit_with_a_bad_label(name, row):
    """A label out of range in one tower's shard: that error, the state from before that very step, and the
    numbers of one device that never saw the batch from there on.
    """
    labels = Y.copy()
    labels[row] = 99
    model = on_towers(STEPS[name], 4)
    fit(model, dataset(Y, last=20))
    remember = Remember()
    start = time.monotonic()
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99") as caught:
        model.fit(dataset(labels), epochs=1, verbose=0, callbacks=[remember])
    # An error of Python's own has its lines in its traceback.
    assert name == "run_eagerly" or f'File "{__file__}", line ' in str(caught.value)
    assert "unavailable" not in str(caught.value)
    assert time.monotonic() - start < SECONDS
    assert len(remember.states) == 1
    assert_state(model, remember.states[0])
    after = fit(model, dataset(Y, first=20))

    # Without synchronisation each tower normalises by its own shard, so that one device is no reference.
    alone = STEPS[name]() if name != "batch_normalization" else on_towers(norm, 4)
    fit(alone, dataset(Y, last=20))
    fit(alone, dataset(Y, last=20))
    expected = fit(alone, dataset(Y, first=20))
    assert_close(model.get_weights(), alone.get_weights(), what="weights")
    assert_close(after, expected, what="logs")
    assert_towers_agree(model)


@pytest.mark.slow
def test_on_batch_with_a_bad_label():
    """`train_on_batch` and `test_on_batch` fail alike; neither changes a weight."""
    model, alone = on_towers(mlp, 4), mlp()
    model.train_on_batch(X[:20], Y[:20])
    before = state(model)[0]
    for call in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99"):
            call(X[20:40], BAD[20:40])
        assert_state(model, before)
    alone.train_on_batch(X[:20], Y[:20])
    model.reset_metrics()  # before Keras 3.12 they go on from batch to batch
    alone.reset_metrics()
    assert_close(model.train_on_batch(X[40:], Y[40:]), alone.train_on_batch(X[40:], Y[40:]))
    assert_close(model.get_weights(), alone.get_weights())


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("factory", [mlp, two_parts])
def test_error_is_named_whichever_tower_fails_first(factory):
    """The error itself, every time: not that other towers were cancelled on its account."""
    model = on_towers(factory, 8)
    model.train_on_batch(X[:16], Y[:16])
    before = state(model)[0]
    for attempt in range(48):
        labels = Y[:16].copy()
        labels[2 * (attempt % 8)] = 99
        with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99"):
            model.train_on_batch(X[:16], labels)
    assert_state(model, before)


def test_error_behind_a_cancelled_op_names_the_line(monkeypatch):
    """TensorFlow may report only that another tower was cancelled: the step is run again, op by op, to find why."""
    model = on_towers(checked_afterwards, 2)
    model.train_on_batch(X[:4], Y[:4])
    cause_of, errors = Failures.cause_of, [tf.errors.CancelledError(None, None, "cancelled")]
    monkeypatch.setattr(Failures, "cause_of", lambda self, error: errors.pop() if errors else cause_of(self, error))
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99") as caught:
        model.train_on_batch(X[:4], np.array([0, 0, 0, 99]))
    assert f'File "{__file__}", line ' in str(caught.value) and not errors


def test_evaluate_with_a_bad_label():
    """`evaluate` fails, and the next one is right: it starts from fresh metrics on all towers."""
    model = on_towers(mlp, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99"):
        model.evaluate(X, BAD, batch_size=20, verbose=0)
    assert_close(model.evaluate(X, Y, batch_size=20, verbose=0), mlp().evaluate(X, Y, batch_size=20, verbose=0))
    assert_towers_agree(model)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("factory", [mlp, two_parts])
def test_steps_per_execution_with_a_bad_label(factory):
    """Of three steps in one execution the second fails: the first one stays, the second leaves no trace."""
    model, alone = on_towers(lambda: factory(steps_per_execution=3), 4), factory()
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 99"):
        fit(model, dataset(BAD))
    fit(alone, dataset(Y, last=20))
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)
    fit(model, dataset(Y))
    fit(alone, dataset(Y))
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


@pytest.mark.slow
def test_error_while_tracing():
    """What the user's own Python raises in a step surfaces unchanged, and the model stays usable."""

    class Raising(keras.Sequential):
        fails = True

        def train_step(self, batch):
            if self.fails:
                raise LookupError("mine")
            return super().train_step(batch)

    def factory():
        keras.utils.set_random_seed(1)
        model = Raising([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model, alone = on_towers(factory, 3), factory()
    for _ in range(2):
        with pytest.raises(LookupError, match="mine"):
            fit(model, dataset(Y))
    model.fails = alone.fails = False
    assert_close(fit(model, dataset(Y)), fit(alone, dataset(Y)))
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


@pytest.mark.slow
@pytest.mark.parametrize("factory, steps", [(mlp, 1), (two_parts, 3)])
def test_error_of_the_data(factory, steps):
    """A generator that raises at its third batch: that error, and the two steps before stay."""

    def broken():
        yield X[:20], Y[:20]
        yield X[20:40], Y[20:40]
        raise RuntimeError("no third batch")

    signature = (tf.TensorSpec([None, 12]), tf.TensorSpec([None], tf.int64))
    model, alone = on_towers(lambda: factory(steps_per_execution=steps), 4), factory()
    with pytest.raises(tf.errors.OpError, match="no third batch"):
        fit(model, tf.data.Dataset.from_generator(broken, output_signature=signature))
    fit(alone, dataset(Y, last=40))
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


class EndsWithin(keras.Sequential):
    """A step that has written weights when it takes from an iterator of its own, which is shorter than the data."""

    def build(self, shape):
        super().build(shape)
        self.own = iter(tf.data.Dataset.range(2))

    def taken(self, after):
        if self.run_eagerly:
            return next(self.own)
        with tf.control_dependencies([after]):
            return self.own.get_next()

    def train_step(self, batch):
        logs = super().train_step(batch)
        return {**logs, "own": self.taken(self.layers[0].kernel + 0.0)}

    def test_step(self, batch):
        return {**super().test_step(batch), "own": self.taken(batch[0])}

    def predict_step(self, batch):
        return super().predict_step(batch) + tf.cast(self.taken(batch[0]), tf.float32)


def ends_within(**options):
    keras.utils.set_random_seed(1)
    model = EndsWithin([keras.Input((12,)), keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, **options)
    return model


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}, {"on_oom": "split"}])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_of_the_step_s_own_that_end(options, method):
    """Are an error, and no end of the epoch: the third step leaves no trace on any tower, and those before stay."""
    decorated = {name: options[name] for name in ("on_oom",) if name in options}
    compiled = {name: value for name, value in options.items() if name not in decorated}
    model, alone = on_towers(lambda: ends_within(**compiled), 3, **decorated), ends_within(run_eagerly=True)
    for _ in range(2):  # the second finds nothing at all
        with pytest.raises(NcclSyncError, match=r"Received: (OutOfRangeError|StopIteration) within a step"):
            getattr(model, method)(dataset(Y), verbose=0)
    if method == "fit":
        alone.fit(dataset(Y, last=40), verbose=0)
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


def test_data_of_a_function_s_own_that_end():
    """`Towers.run` raises what the step has raised, as one device does; nothing is left of the step."""
    weight = tf.Variable(tf.zeros([12]))

    def ends(_):
        raise StopIteration

    def step(x):
        weight.assign_add(ops.all_reduce(tf.reduce_sum(x, 0)))
        with tf.control_dependencies([weight.read_value()]):
            return tf.py_function(ends, [x], tf.float32)

    with Towers(3) as towers:
        with pytest.raises(tf.errors.OutOfRangeError):
            towers.run(step, X[:20])
        towers.replicas.sync()
        assert all(not copy.numpy().any() for copy in towers.replicas.of(weight))


@pytest.mark.parametrize("rows", [20, 2])
def test_nan_is_not_hidden(rows):
    """NaN in one sample makes the loss NaN and every weight of every tower; also where towers stand idle."""
    model = on_towers(linear, 4)
    x = X[:rows].copy()
    x[-1] = np.nan
    assert np.isnan(model.train_on_batch(x, Y[:rows]))
    for tower in range(4):
        assert all(np.isnan(array).all() for array in model.towers.get_weights(tower))
    assert model.towers.divergence() == 0.0


def in_cond(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: ops.all_reduce(x), lambda: x)  # cond


def in_while(x):
    return tf.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, ops.all_reduce(t)), (0, x))[1]  # while


@pytest.mark.parametrize("call", [in_cond, in_while])
def test_collective_where_a_step_cannot_be_cut(call):
    """A collective inside a branch or a loop: the error names the file and the line."""

    class Nested(keras.Sequential):
        def train_step(self, batch):
            return {"x": tf.reduce_sum(call(tf.reduce_sum(batch[0], 0)))}

    def factory():
        model = Nested([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd")
        return model

    line = call.__code__.co_firstlineno + 1
    with pytest.raises(NcclSyncError, match=rf"at the top level of a step.*test_step_errors\.py:{line} \("):
        on_towers(factory, 2).train_on_batch(X, Y)


class AccumulatesByHand(keras.Sequential):
    """Applies the gradients of each two batches at once."""

    def build(self, shape):
        super().build(shape)
        self.gradients = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(self.gradients, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient / 2.0)

        def apply():
            self.optimizer.apply_gradients(zip(self.gradients, self.trainable_variables, strict=True))
            for total in self.gradients:
                total.assign(tf.zeros_like(total))
            return 0

        tf.cond(tf.equal(self.steps.assign_add(1) % 2, 0), apply, lambda: 0)
        return {"loss": loss}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [2, 3])
def test_gradients_accumulated_by_hand(towers):
    """An optimizer in a branch makes one device's updates."""

    def by_hand():
        keras.utils.set_random_seed(1)
        model = AccumulatesByHand([keras.Input((12,)), keras.layers.Dense(5)])
        model.steps = tf.Variable(0, trainable=False)
        model.compile(keras.optimizers.Adam(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    alone, model = by_hand(), on_towers(by_hand, towers)
    for one in (alone, model):
        one.fit(X[:50], Y[:50], batch_size=20, epochs=3, shuffle=False, verbose=0)
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


@pytest.mark.slow
def test_keyboard_interrupt_in_a_callback():
    """Interrupted between two steps, a model trains on from there."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model, alone = on_towers(mlp, 4), mlp()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=20, shuffle=False, verbose=0, callbacks=[Interrupt()])
    alone.train_on_batch(X[:20], Y[:20])
    assert_close(fit(model, dataset(Y)), fit(alone, dataset(Y)))
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


class Swallowing(keras.layers.Layer):
    """Is interrupted while it is traced, and loses that, as a bare `except` of Keras' or TensorFlow's may."""

    interrupts = 1

    def call(self, x):
        try:
            if self.interrupts and not isinstance(x, keras.KerasTensor):
                Swallowing.interrupts -= 1
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
        except:  # noqa: E722
            pass
        return x


def test_ctrl_c_that_is_lost_while_a_step_is_traced():
    """It is raised once the trace has ended; no tower has changed, and the next step trains."""
    Swallowing.interrupts = 0
    model, alone = on_towers(lambda: linear(Swallowing()), 2), linear(Swallowing())
    Swallowing.interrupts = 1
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.train_on_batch(X[:20], Y[:20])
    finally:
        signal.signal(signal.SIGINT, before)
    assert Swallowing.interrupts == 0
    for one in (model, alone):
        one.train_on_batch(X[:20], Y[:20])
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


def test_ctrl_c_while_a_failed_step_is_undone():
    """It is raised once that has ended, also if that ends by an error."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught, held_back():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("undone in part")
        assert isinstance(caught.value.__context__, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_beside_an_error_of_the_step():
    """It is what is raised, whatever TensorFlow makes of both; no tower has changed."""

    def fail(total):
        signal.raise_signal(signal.SIGINT)
        raise ValueError(total)

    def step(x):
        return tf.numpy_function(fail, [tf.reduce_sum(x)], tf.float32)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Towers(2) as towers, pytest.raises(KeyboardInterrupt):
            towers.run(step, X[:20])
    finally:
        signal.signal(signal.SIGINT, handler)


class Interrupted(keras.callbacks.Callback):
    """Presses Ctrl-C once, where it is lost: in a destructor, or while Keras makes a log a number."""

    def __init__(self, where):
        super().__init__()
        self.where, self.presses, self.batches = where, 1, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        waits = self.where == "before a wait" and self.presses
        if self.where != "log":
            Ending(self)
        time.sleep(240 if waits else 0.01)  # a loaded machine may stand still for a minute

    def press(self):
        if self.presses:
            self.presses -= 1
            signal.raise_signal(signal.SIGINT)


class Ending:
    def __init__(self, of):
        self.of = of

    def __del__(self):
        self.of.press()


class Log(float):
    """A number that takes its time to be one."""

    def __new__(cls, of):
        self = super().__new__(cls, 1.0)
        self.of = of
        return self

    def __float__(self):
        self.of.press()
        return 1.0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("where", ["destructor", "destructor of a slow machine", "before a wait", "log"])
def test_ctrl_c_that_is_lost_between_steps(where, monkeypatch):
    """It ends `fit` within some batches, once, also a long wait of Python's; the towers are equal, and train on."""
    if "slow" in where:  # the main thread gets no further while another one wants to press again

        def start(*arguments, own=_thread.start_new_thread):
            own(*arguments)
            time.sleep(0.3)

        monkeypatch.setattr(_thread, "start_new_thread", start)
    model, pressing = on_towers(mlp, 2), Interrupted(where)
    if where == "log":
        own = model.make_train_function()
        model.train_function = lambda iterator: {**own(iterator), "slow": Log(pressing)}
    handler, began = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, batch_size=1, verbose=0, callbacks=[pressing])
        assert not pressing.presses and pressing.batches < 50 and time.monotonic() - began < 200
        model.fit(X, Y, batch_size=20, verbose=0, callbacks=[pressing])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert_towers_agree(model)


class Table(collections.abc.Mapping):
    """A mapping that is not made of pairs."""

    def __init__(self, key, value):
        self.held = {key: value}

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


@pytest.mark.slow
def test_logs_of_any_type():
    """What is no number is logged as it is, of a model on towers and, from then on, of any other."""
    table, models = Table("a", 1.0), [on_towers(mlp, 2), mlp()]
    for model in models:
        model.make_train_function()
        own = model.train_function
        model.train_function = lambda iterator, own=own: {**own(iterator), "table": table, "of": {"more": tf.ones([])}}
        seen = []
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs))
        model.fit(X, Y, batch_size=20, verbose=0, callbacks=[callback])
        assert [logs["table"] for logs in seen] == [table] * 3 and {logs["more"] for logs in seen} == {1.0}


def test_ctrl_c_while_a_failed_step_is_mended(monkeypatch):
    """It is raised once the step is undone: all towers hold what they held before, and the next step trains."""
    model = on_towers(checked_afterwards, 4)
    model.train_on_batch(X[:20], Y[:20])
    before, restore, bad = state(model)[0], Rollback.restore, np.where(np.arange(60) == 20, 99, Y)  # tower 0 fails
    monkeypatch.setattr(Rollback, "restore", lambda self: (signal.raise_signal(signal.SIGINT), restore(self)))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.train_on_batch(X[20:40], bad[20:40])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
        monkeypatch.undo()
    assert_state(model, before)
    model.train_on_batch(X[20:40], Y[20:40])
    assert_towers_agree(model)


@pytest.mark.slow
def test_ctrl_c_ends_fit_within_seconds(tmp_path):
    """SIGINT in the middle of `fit` ends the process with a KeyboardInterrupt, no hang, no crash."""
    script = tmp_path / "training.py"
    script.write_text(
        "import keras, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores\n"
        "from parity import data, mlp, on_towers\n"
        "x, y = data(4000)\n"
        "model = on_towers(mlp, 4)\n"
        "model.train_on_batch(x[:20], y[:20])\n"
        "print('training', flush=True)\n"
        "model.fit(x, y, batch_size=20, epochs=1000, verbose=0)\n"
    )
    process = subprocess.Popen(
        command(script),
        cwd=os.path.dirname(__file__),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "training\n"
        time.sleep(3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT), errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors


class Failing(keras.layers.Layer):
    """Fails while it runs, by an op of ncclsync's in C or by Python in the graph, where a batch has 13 rows."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x):
        more = tf.cast(tf.equal(tf.shape(x)[0], 13), tf.int32)
        if self.way == "C":
            sums = host_ops.all_reduce([[tf.zeros([1])], [tf.zeros([1 + more])]], [tf.ones([], tf.float64)] * 2, "sum")
        else:
            sums = [tf.numpy_function(self.complain, [more], tf.float32)]
        return x + tf.reshape(sums[0], [1])

    def complain(self, more):
        if more:
            raise NcclSyncError("Expected no unlucky number. Received: 13")
        return np.zeros([1], np.float32)


ENTRIES = {
    "fit": lambda model, x, y: model.fit(x, y, batch_size=13, verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(x, y, batch_size=13, verbose=0),
    "predict": lambda model, x, y: model.predict(x, batch_size=13, verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("way", "words"), [("C", "Expected the towers' tensors"), ("Python", "Expected no unlucky")])
def test_our_sentence_comes_first(way, words):
    """By whatever entry a graph runs: ours is raised, TensorFlow's text is below it, and the model trains on."""
    model = on_towers(lambda: linear(Failing(way)), 2)
    for run in ENTRIES.values():
        with pytest.raises(NcclSyncError) as caught:
            run(model, X[:13], Y[:13])
        first, *below = str(caught.value).splitlines()
        assert first.startswith(words) and "Received: " in first and "\n\nTensorFlow: " in str(caught.value), first
        assert any("{{node" in line for line in below)
    fit(model, dataset(Y, last=20))
    assert_towers_agree(model)
    layer = Failing(way)
    with Towers(2) as towers, pytest.raises(NcclSyncError, match=f"^{words}"):
        towers.run(lambda x: layer(x), X[:13])


class Centred(keras.Sequential):
    """Creates a variable in its first step, of that step's batch."""

    mean = None

    def train_step(self, batch):
        x, y = batch
        if self.mean is None:
            self.mean = tf.Variable(tf.reduce_mean(x, 0), trainable=False)
        return super().train_step((x - self.mean, y))


@pytest.mark.parametrize("way", ["fit", "run"])
def test_a_variable_that_begins_with_a_batchs_value_is_refused(way):
    """Towers' variables are there before a batch is; the error names the line and says what to write."""
    words = r"begin with a value that needs no batch. Received: Mean of the batch, at \S*test_step_errors.py:\d+ "
    if way == "fit":

        def build():
            model = Centred([keras.Input((12,)), keras.layers.Dense(5)])
            model.compile("sgd", "mse")
            return model

        with pytest.raises(NcclSyncError, match=words + r"\(self.mean = tf.Variable"):
            on_towers(build, 2).fit(X, np.eye(5)[Y], batch_size=20, verbose=0)
        return
    made = []

    def step(x):
        made[:] = made or [tf.Variable(tf.reduce_mean(x, 0))]
        return made[0]

    with Towers(2) as towers, pytest.raises(NcclSyncError, match=words + r"\(made\[:\] = made or"):
        towers.run(step, tf.constant(X))
