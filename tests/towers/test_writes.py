"""Whoever writes a variable, by whatever op, at whatever moment: the next step has the value on all towers."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree

import ncclsync
from ncclsync.communicator import buffers, native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.towers.replicas import Replicas

RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 5)).astype("float32")
Y = np.arange(11) % 3
raw = tf.raw_ops


class Scaled(keras.layers.Layer):
    """Scale by a variable that is no weight, and by a frozen one."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def build(self, shape):
        self.frozen = self.add_weight(shape=(5,), initializer="ones", trainable=False, name="frozen")

    def call(self, x):
        return x * self.scale * self.frozen


def model_of(scale, accumulate=None, **compiled):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), Scaled(scale), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate), loss, **compiled)
    return model


class Run:
    """A model on so many towers (0: one device), and its variables, to be written."""

    def __init__(self, towers, compiled=None, accumulate=None, **options):
        self.scale = tf.Variable(tf.ones([5]), trainable=False)
        build = lambda: model_of(self.scale, accumulate, **(compiled or {}))  # noqa: E731
        self.model = ncclsync.nccl_parallel(towers=towers, **options)(build)() if towers else build()
        _, scaled, dense, _ = [None, *self.model.layers]
        backend = tf_compat.backend_variable
        self.kernel, self.frozen = backend(dense.kernel), backend(scaled.frozen)
        self.rate = backend(self.model.optimizer.learning_rate)

    def step(self):
        return float(self.model.train_on_batch(X, Y))

    @property
    def slot(self):
        """Adam's momentum of `kernel`."""
        found = (one for one in self.model.optimizer.variables if one.path.endswith("kernel_momentum"))
        return tf_compat.backend_variable(next(found))

    @property
    def state(self):
        return [*self.model.get_weights(), self.scale.numpy()]


def early(run):
    """A `tf.function` that is traced before the first step."""

    @tf.function
    def write():
        run.scale.assign(run.scale * 1.1)
        run.kernel.scatter_update(tf.IndexedSlices(tf.ones([1, 4]), [1]))

    write.get_concrete_function()
    return write


def compiled(run):
    @tf.function(jit_compile=True)
    def write():
        run.kernel.assign_sub(0.1 * run.kernel)

    write.get_concrete_function()
    return write


WRITES = {
    "assign": lambda run: raw.AssignVariableOp(resource=run.scale.handle, value=run.scale * 1.5),
    "sub": lambda run: raw.AssignSubVariableOp(resource=run.kernel.handle, value=run.kernel * 0.5),
    "scatter": lambda run: raw.ResourceScatterUpdate(resource=run.kernel.handle, indices=[2], updates=tf.ones([1, 4])),
    "scatter again": lambda run: raw.ResourceScatterAdd(resource=run.frozen.handle, indices=[2], updates=[0.5]),
    "slice": lambda run: raw.ResourceStridedSliceAssign(
        ref=run.frozen.handle, begin=[1], end=[2], strides=[1], value=[3.0]
    ),
    "nd": lambda run: raw.ResourceScatterNdUpdate(ref=run.kernel.handle, indices=[[0, 1]], updates=[0.25]),
    "apply": lambda run: raw.ResourceApplyGradientDescent(var=run.kernel.handle, alpha=0.1, delta=tf.ones([5, 4])),
    "sparse apply": lambda run: raw.ResourceSparseApplyAdagrad(
        var=run.kernel.handle, accum=run.other.handle, lr=0.1, grad=tf.ones([1, 4]), indices=[3]
    ),
    "rate": lambda run: raw.AssignVariableOp(resource=run.rate.handle, value=0.05),
    "method": lambda run: run.kernel.assign_add(tf.ones([5, 4]) * 0.1),
    "slot": lambda run: raw.AssignVariableOp(resource=run.slot.handle, value=tf.fill([5, 4], 0.2)),
    "slot that was read": lambda run: raw.ResourceScatterUpdate(
        resource=run.slot.handle, indices=[1], updates=run.slot.read_value()[2:3]
    ),
    "early": lambda run: run.early(),
    "xla": lambda run: run.compiled(),
    "while it is read": lambda run: run.kept.append(
        (run.kernel.value(), run.kernel.assign_sub(run.kernel.value() * 0.1))
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "towers, options",
    [(2, {}), (3, {"exact": True}), (2, {"shard_optimizer": True}), (2, {"shards": 5}), (2, {"on_oom": "split"})],
)
def test_writes_between_steps(towers, options):
    """By raw ops, functions of an earlier trace, XLA: seen by the next step, which then is one device's."""
    runs = [Run(0), Run(towers, **options)]
    for run in runs:
        run.early, run.compiled, run.kept = early(run), compiled(run), []
        run.other = tf.Variable(tf.ones([5, 4]))
    for name, write in WRITES.items():
        for run in runs:
            write(run)
        one_device, on_towers = ([run.step(), *run.state] for run in runs)
        for found, expected in zip(on_towers, one_device, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert_towers_agree(runs[1].model)


def test_parts_that_are_written(caplog):
    """Of a sum whose parts towers hold: a write of tower 0's is an assignment, and told once; no function reads it."""
    runs = [Run(0, accumulate=3), Run(3, accumulate=3)]
    for run in runs:
        run.step()
        sums = [tf_compat.backend_variable(one) for one in run.model.optimizer._accumulated_gradients]
        handles, _ = [one.handle for one in sums], run.step()
        for one, handle in zip(sums, handles, strict=True):  # nobody hears of a handle that was kept
            raw.AssignVariableOp(resource=handle, value=tf.ones(one.shape))
        run.step()
        sums[0].assign_add(sums[0])
        run.step()
        run.step()
    assert_close(runs[1].state, runs[0].state)
    assert caplog.text.count("of which each tower holds a part, was written") == 1
    first = runs[0].model.optimizer._accumulated_gradients[0]
    assert_close(sums[0].numpy(), first.numpy())
    with pytest.raises(ncclsync.NcclSyncError, match="Call it without"):
        tf.function(lambda: sums[0] + 1.0)()


READS = {
    "operator": lambda v: v * 2.0,
    "norm": lambda v: keras.ops.norm(v),
    "shape": lambda v: tf.shape(v),
    "gather": lambda v: tf.gather(v, [1]),
    "gather_nd": lambda v: tf.gather_nd(v, [[1]]),
    "raw": lambda v: raw.ReadVariableOp(resource=v.handle, dtype=v.dtype),
    "assignment": lambda v: v.assign(tf.multiply(v, 0.5)).numpy(),
    "raw addition": lambda v: (raw.AssignAddVariableOp(resource=v.handle, value=tf.ones(v.shape)), v.numpy())[1],
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("options", [{"shard_optimizer": True}, {"accumulate": 3}])
def test_reads_of_what_is_divided(options, caplog):
    """By whatever op, eager ones without a method of the variable's among them: the whole is read."""
    runs = [Run(0, **{"accumulate": options["accumulate"]} if "accumulate" in options else {}), Run(3, **options)]
    for name, read in READS.items():
        found = []
        for run in runs:
            run.step()
            divided = getattr(run.model.optimizer, "_accumulated_gradients", None)
            found.append(read(tf_compat.backend_variable(divided[0]) if divided else run.slot))
        np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5, err_msg=name)
    assert_close(runs[1].step(), runs[0].step())
    assert_close(runs[1].state, runs[0].state)
    assert "holds a part" not in caplog.text
    variable = tf_compat.backend_variable(divided[0]) if divided else runs[1].slot
    for is_whole in (True, False):  # a function runs when the state is divided again
        with pytest.raises(ncclsync.NcclSyncError, match="outside of"):
            tf.function(lambda: variable + 1.0)()
        if is_whole:
            runs[1].step()


class UsesItsMomentum(keras.Sequential):
    """Reads or writes the first weight's momentum, before or after the update."""

    when, use = "", staticmethod(lambda v: None)

    def train_step(self, data):
        found, momentum = {}, self.optimizer.variables[2].value
        if self.when == "before":
            found = {"used": tf.reduce_sum(self.use(momentum))}
        logs = super().train_step(data)
        if self.when == "after":
            found = {"used": tf.reduce_sum(self.use(momentum))}
        return {**logs, **found}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "use",
    [
        lambda v: v.value(),
        lambda v: tf.multiply(v, 2.0),
        lambda v: v.assign(v * 0.5),
        lambda v: tf.cond(tf.reduce_sum(v) > 0.0, lambda: v * 1.0, lambda: v * 2.0),
        lambda v: tf.function(lambda: v * 2.0)(),
    ],
)
def test_a_step_that_uses_divided_state_is_refused(when, use):
    """It would read and write what tower 0's variable holds of it. What is used before is found by the update."""
    model = UsesItsMomentum([keras.Input((4,)), keras.layers.Dense(1)])
    model.when, model.use = when, use
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    ncclsync.nccl_parallel(towers=2, shard_optimizer=True)(lambda: model)()
    for _ in range(2):
        with pytest.raises(ncclsync.NcclSyncError, match="which shard_optimizer divides"):
            model.fit(np.ones([4, 4]), np.ones([4, 1]), verbose=0)


def test_writes_before_evaluate_predict_and_a_comparison():
    """Not only training steps look; nor do they send anything if nobody wrote."""
    runs = [Run(0), Run(3)]
    for call in (lambda m: m.predict(X, verbose=0), lambda m: m.evaluate(X, Y, verbose=0)):
        for run in runs:
            raw.AssignSubVariableOp(resource=run.kernel.handle, value=run.kernel * 0.5)
        assert_close(*[call(run.model) for run in reversed(runs)])
        assert_towers_agree(runs[1].model)
    towers = runs[1].model.towers
    raw.AssignSubVariableOp(resource=runs[1].kernel.handle, value=runs[1].kernel * 0.5)
    assert towers.divergence() == 0.0
    for copy in towers.replicas.of(runs[1].kernel):
        np.testing.assert_array_equal(copy, runs[1].kernel)


def counted(run, rows=4):
    """Batches; their dataset's map writes two variables for each batch, and does not run ahead."""

    def write(*row):
        run.scale.assign_add(tf.ones([5]) * 0.1)
        raw.AssignAddVariableOp(resource=run.frozen.handle, value=tf.ones([5]) * 0.1)
        return row

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows).map(write).with_options(options)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("options, compile_options", [({}, {}), ({"exact": True}, {"steps_per_execution": 2})])
def test_a_dataset_that_writes(options, compile_options):
    """Before single steps; and in `fit`, where the step itself takes the batch (one device may read before)."""
    runs = [Run(0, compile_options), Run(3, compile_options, **options)]
    for run in runs:
        for batch in counted(run):
            run.model.train_on_batch(*batch)
    assert_close(runs[1].state, runs[0].state)
    run.model.fit(counted(run), epochs=2, verbose=0)
    assert_towers_agree(run.model)
    np.testing.assert_allclose(run.scale, np.full(5, 1.9), rtol=1e-5)


def test_towers_run():
    """A loop of one's own, and a function that writes between its steps, traced before."""
    states = []
    for towers in (0, 2):
        weight, factor = tf.Variable(tf.ones([5])), tf.Variable(2.0)
        write = tf.function(lambda factor=factor: factor.assign(factor * 0.5))
        write.get_concrete_function()

        def step(x, weight=weight, factor=factor):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(x * weight * factor, 1) ** 2)
            weight.assign_sub(0.01 * tape.gradient(loss, weight))
            return loss

        opened = ncclsync.Towers(towers) if towers else None
        losses = []
        for _ in range(3):
            losses.append(opened.run(step, X) if opened else step(X))
            write()
            raw.AssignSubVariableOp(resource=weight.handle, value=0.1 * weight)
        states.append([*losses, weight.numpy()])
        if opened:
            opened.close()
    assert_close(*states)


def test_steps_that_know_handles_alone():
    """Raw ops read and write variables of which the step's graph knows no more than handles: as on one device."""
    states = []
    for towers in (0, 3):
        count, total, weight = (tf.Variable(tf.zeros(shape)) for shape in ([], [5], [5]))
        slots = [tf.Variable(tf.zeros([5])) for _ in range(2)]

        def step(x, count=count, total=total, weight=weight, slots=slots):
            raw.AssignAddVariableOp(resource=count.handle, value=1.0)
            before = raw.ReadVariableOp(resource=total.handle, dtype=tf.float32)
            raw.AssignVariableOp(resource=total.handle, value=0.5 * before + tf.reduce_sum(x, 0))
            rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "beta1_power": 0.9, "beta2_power": 0.99, "epsilon": 1e-7}
            handles = {"var": weight.handle, "m": slots[0].handle, "v": slots[1].handle}
            raw.ResourceApplyAdam(grad=tf.reduce_mean(x, 0), **handles, **rates)
            return tf.reduce_max(x)

        if towers:
            with ncclsync.Towers(towers) as opened:
                losses = [opened.run(step, X) for _ in range(3)]
                assert opened.divergence() == 0
        else:
            losses = [tf.function(step)(tf.constant(X)) for _ in range(3)]
        states.append([*losses, *(one.numpy() for one in (count, total, weight, *slots))])
    assert_close(*states)


def test_two_models_that_share_a_variable():
    """A raw write is seen by both."""
    runs = [Run(0), Run(0)], [Run(2), Run(2)]
    for pair in runs:
        pair[1].model.layers[0].scale = pair[0].scale
        for _ in range(2):
            pair[0].step(), pair[1].step()
            raw.AssignAddVariableOp(resource=pair[0].scale.handle, value=tf.ones([5]))
    for one, other in zip(*runs, strict=True):
        assert_close(other.model.get_weights(), one.model.get_weights())
        assert_towers_agree(other.model)


def address(variable):
    """Return where a variable lies; on a GPU its memory there."""
    (pointer,) = buffers.Buffers([variable.value()], "value", buffers.HOST | buffers.CUDA, writable=False).pointers
    return int(native.ffi.cast("uintptr_t", pointer))


def test_what_is_held_is_not_copied():
    """A step updates its variables where they lie, also those of which it writes slices, and refuses no step."""

    def build():
        embedding = keras.layers.Embedding(50, 8)
        layers = [keras.Input((4,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(3)]
        made = keras.Sequential(layers)
        # A program of XLA's gives a variable another buffer.
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return made

    model = ncclsync.nccl_parallel(towers=2)(build)()
    words = RNG.integers(0, 50, (12, 4)).astype("int32")
    weights = [tf_compat.backend_variable(one) for one in model.trainable_variables]
    model.train_on_batch(words, np.arange(12) % 3)
    before = [address(one) for one in weights]
    for _ in range(3):
        model.train_on_batch(words, np.arange(12) % 3)
    assert [address(one) for one in weights] == before


def test_nothing_is_sent_if_nobody_writes(monkeypatch):
    """No step finds a write that was its own; a write of one variable sends this one."""
    sent = []
    send = Replicas._send
    monkeypatch.setattr(Replicas, "_send", lambda self, keys: (sent.append(len(keys)), send(self, keys))[1])
    run = Run(2, {"metrics": ["accuracy"]})
    for _ in range(2):
        run.model.fit(X, Y, batch_size=4, verbose=0)
        run.model.evaluate(X, Y, verbose=0)
        run.model.predict(X, verbose=0)
    assert sent == []
    raw.AssignAddVariableOp(resource=run.frozen.handle, value=tf.ones([5]))
    run.model.fit(X, Y, batch_size=4, verbose=0)
    assert sent == [1]


class LooksUp(keras.layers.Layer):
    """Take rows of a variable, in a loop too: before that TensorFlow gives it memory of its own, if it is shared."""

    def __init__(self, table, other):
        super().__init__()
        self.table, self.other = table, other

    def call(self, x):
        rows = tf.nn.embedding_lookup(self.table, tf.cast(tf.abs(x), tf.int32))
        first = lambda i, y: (i + 1, y + tf.gather(self.other, [i])[:, :1])  # noqa: E731
        return rows + tf.while_loop(lambda i, _: i < 2, first, (0, x))[1][..., None]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("trainable", [False, True])
def test_rows_that_are_looked_up(trainable, monkeypatch):
    """They are no write, in a step that writes the variable and in one that does not; a write is seen."""
    sent, refused = [], []
    send, changed = Replicas._send, Replicas.send_changed
    monkeypatch.setattr(Replicas, "_send", lambda self, keys: (sent.append(len(keys)), send(self, keys))[1])
    monkeypatch.setattr(Replicas, "send_changed", lambda self: (refused.append(1), changed(self))[1])
    table, other = (tf.Variable(tf.ones([9, 4]), trainable=trainable) for _ in range(2))

    def build():
        layers = [keras.Input((5,)), LooksUp(table, other), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return model

    model = ncclsync.nccl_parallel(towers=2)(build)()
    for _ in range(2):
        model.train_on_batch(X, Y)
        model.predict(X, verbose=0)
        model.predict(X, verbose=0)
    assert not sent and not refused
    raw.AssignAddVariableOp(resource=table.handle, value=tf.ones([9, 4]))
    model.predict(X, verbose=0)
    assert sent == [1] and refused
    assert_towers_agree(model)


def test_somebody_who_writes_all_the_time():
    """A thread that writes by raw ops holds up no step, and the towers agree when it ends."""
    run, stop = Run(2), threading.Event()

    def write():
        while not stop.is_set():
            raw.AssignVariableOp(resource=run.rate.handle, value=RNG.uniform(0.01, 0.1))

    thread = threading.Thread(target=write)
    run.step()
    thread.start()
    for _ in range(20):
        run.step()
    stop.set()
    thread.join()
    run.step()
    assert_towers_agree(run.model)


class Midway(keras.layers.Layer):
    """Call a Python function within each step, in a thread of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        def run(given):
            thread = threading.Thread(target=self.function)
            thread.start()
            thread.join()
            return given

        return tf.ensure_shape(tf.py_function(run, [x], x.dtype), x.shape)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["rate", "kernel", "frozen", "frozen raw", "reset"])
def test_a_thread_that_writes_while_a_step_runs(name, caplog):
    """Nobody waits. Before the next step, tower 0's values are on all towers, as one device could have left them."""
    writes = []

    def write():
        if not writes:
            return
        writes.clear()
        if name == "frozen raw":
            raw.AssignVariableOp(resource=backend(model.layers[1].frozen).handle, value=tf.ones([5]) * 2.0)
        elif name == "reset":
            model.reset_metrics()
        elif name == "rate":
            model.optimizer.learning_rate.assign(0.5)
        else:
            (model.layers[1].frozen if name == "frozen" else model.layers[2].kernel).assign_add(tf.ones([5]) * 0.5)

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((5,)), Midway(write), Scaled(1.0), keras.layers.Dense(5), keras.layers.Dense(3)]
        made = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"], jit_compile=False)  # it runs Python
        return made

    backend = tf_compat.backend_variable
    model = ncclsync.nccl_parallel(towers=3)(build)()
    model.train_on_batch(X, Y)
    assert "wrote a variable while a step ran" not in caplog.text
    writes.append(1)
    model.train_on_batch(X, Y)
    assert not writes
    warned = re.search(r"at \S*test_writes.py:\d+.* wrote a variable while a step ran", caplog.text)
    assert bool(warned) == (name != "reset")  # whose sums are each tower's own
    model.train_on_batch(X, Y)
    assert_towers_agree(model)
    rate = backend(model.optimizer.learning_rate)
    assert {float(copy) for copy in model.towers.replicas.of(rate)} == {0.5 if name == "rate" else float(rate)}
    for weight in [*model.weights, *model.optimizer.variables]:
        for copy in model.towers.replicas.of(backend(weight)):
            np.testing.assert_array_equal(copy, weight, err_msg=weight.path)


@pytest.mark.slow
def test_predict_and_evaluate_beside_fit():
    """No thread reads a copy that another one empties to send it; all go on, and the towers agree."""
    run, failed, stop = Run(3), [], threading.Event()
    run.model.fit(X, Y, verbose=0)
    run.model.predict(X, verbose=0), run.model.evaluate(X, Y, verbose=0)

    def use():
        try:
            while not stop.is_set():
                run.model.predict(X, verbose=0)
                run.model.test_on_batch(X, Y)
        except Exception as error:
            failed.append(error)

    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for weight in run.model.weights:
                weight.assign(weight * 0.999)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    run.model.fit(X, Y, batch_size=2, epochs=8, verbose=0, callbacks=[Writes()])
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    run.step()
    assert_towers_agree(run.model)


def test_a_generator_that_predicts():
    """A step that waits for a batch, which waits for `predict` on the same towers, does not wait for itself."""
    run = Run(2)

    def batches():
        for _ in range(6):
            run.kernel.assign(run.kernel * 0.9)
            run.model.predict_on_batch(X)
            yield X, Y

    run.model.predict_on_batch(X)
    specs = tf.TensorSpec((11, 5)), tf.TensorSpec((11,), tf.int64)
    run.model.fit(tf.data.Dataset.from_generator(batches, output_signature=specs), verbose=0)
    run.step()
    assert_towers_agree(run.model)


class Counts(keras.layers.Layer):
    """Look up how often a sample's number was seen in earlier batches, in a table, and count it; in a loop, too."""

    def __init__(self, in_a_loop=False):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
        self.in_a_loop = in_a_loop

    def call(self, x):
        keys = tf.cast(tf.round(x[:, 0]), tf.int64)

        def look(found):
            return tf.ensure_shape(found + self.table.lookup(keys), found.shape)

        found = zeros = tf.zeros_like(x[:, 0])
        if self.in_a_loop:
            _, found = tf.while_loop(lambda i, _: i < 2, lambda i, found: (i + 1, look(found)), (0, found))
        else:
            found = look(found)
        self.table.insert(keys, found + 1.0)
        return x * found[:, None] + look(zeros)[:, None]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("towers", [2, 5])
def test_a_table_that_a_step_reads_and_writes(towers, in_a_loop):
    """What a tower finds in it, before and after the step's own insert, is what one device finds."""
    results = []
    for count in (0, towers):

        def build():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((5,)), Counts(in_a_loop), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
            return model

        model = ncclsync.nccl_parallel(towers=count)(build)() if count else build()
        losses = [float(model.train_on_batch(X, Y)) for _ in range(4)]
        exported = dict(zip(*map(np.ndarray.tolist, map(np.asarray, model.layers[0].table.export())), strict=True))
        results.append([losses, model.get_weights(), sorted(exported.items())])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("towers", [2, 3])
def test_a_variable_of_open_shape(towers):
    """A queue that grows; a step that fails leaves it, on all towers, with its shape."""
    queue = tf.Variable(tf.zeros([0, 5]), shape=tf.TensorShape([None, 5]), trainable=False)
    weight = tf.Variable(tf.ones([5]))

    def step(batch):
        x, bad = batch
        queue.assign(tf.concat([queue, x], 0)[-30:])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(queue * weight, 1) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        with tf.control_dependencies([tf.debugging.assert_less(bad, 1.0)]):
            return tf.identity(loss)

    good = X, np.zeros(11, "float32")
    expected = [float(step(good)) for _ in range(4)]
    queue.assign(tf.zeros([0, 5])), weight.assign(tf.ones([5]))
    with ncclsync.Towers(towers) as opened:
        found = [float(opened.run(step, good)) for _ in range(2)]
        before = queue.numpy(), weight.numpy()
        with pytest.raises(tf.errors.InvalidArgumentError):
            opened.run(step, (X, np.ones(11, "float32")))
        np.testing.assert_array_equal(queue, before[0]), np.testing.assert_array_equal(weight, before[1])
        found += [float(opened.run(step, good)) for _ in range(2)]
        raw.AssignVariableOp(resource=queue.handle, value=tf.zeros([3, 5]))
        opened.run(step, good)
        assert {tuple(copy.value().shape) for copy in opened.replicas.of(queue)} == {(14, 5)}
        assert opened.divergence() == 0.0
    assert_close(found, expected)
