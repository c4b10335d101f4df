"""When a step is traced anew: at the moments at which Keras traces it, and for shapes that Keras would relax."""

import dataclasses
import logging
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close

import ncclsync
from ncclsync import nccl_parallel
from ncclsync.towers import programs

X = np.random.default_rng(1).normal(size=(24, 6, 4)).astype("float32")
Y = X.mean((1, 2), keepdims=True)[:, 0]


class Told(keras.Model):
    """A model whose trace depends on Python's state of all kinds, and which counts the traces of its steps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(1))
        self.traces = []
        self._scale = 1.0  # a private name
        self.shift = np.zeros(4, "float32")  # an array

    def call(self, x):
        """Average over the steps of a sequence, of any length."""
        return self.dense(tf.reduce_mean(x, 1) * self._scale + self.shift)

    def train_step(self, data):
        """Count."""
        self.traces.append("train")
        return super().train_step(data)

    def test_step(self, data):
        """Count."""
        self.traces.append("test")
        return super().test_step(data)

    def predict_step(self, data):
        """Count."""
        self.traces.append("predict")
        return super().predict_step(data)


def told(towers, **arguments):
    """The model on so many towers, compiled; on one device for 0 towers."""

    def build():
        model = Told()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), keras.losses.Huber(0.1), jit_compile=False, **arguments)
        return model

    return nccl_parallel(towers=towers)(build)() if towers else build()


def lengths(model):
    """Sequences of ever other lengths, by every call there is."""
    for steps in (6, 5, 4, 3, 2):
        yield model.train_on_batch(X[:8, :steps], Y[:8])
        yield model.test_on_batch(X[:8, :steps], Y[:8])
        yield model.predict_on_batch(X[:8, :steps])
    yield model.evaluate(X[:, :1], Y, batch_size=8, verbose=0)
    yield model.predict(X[:, :1], batch_size=8, verbose=0)


def rows(model):
    """Batches of other numbers of rows."""
    for size in (8, 6, 12, 7, 8):
        yield model.fit(X, Y, batch_size=size, shuffle=False, verbose=0).history["loss"]
        yield model.train_on_batch(X[:size], Y[:size])
        yield model.predict(X, batch_size=size, verbose=0)


def kinds(model):
    """Sample weights that come and go, other dtypes and structures, functions that are made anew."""
    weights = np.arange(8, dtype="float32")
    for dtype in ("float32", "float64", "float32"):
        yield model.train_on_batch(X[:8].astype(dtype), Y[:8])
        yield model.train_on_batch(X[:8], Y[:8], sample_weight=weights)
    model.make_train_function(force=True)
    yield model.train_on_batch(X[:8], Y[:8])
    model.compile("sgd", "mse", jit_compile=False)
    yield model.train_on_batch(X[:6], Y[:6])


def given_lists(model):
    """`predict` takes as many batches at once as a call has steps; the last call has fewer."""
    for size in (4, 5, 4, 6, 7):
        yield model.predict(X, batch_size=size, verbose=0)
        yield model.fit(X, Y, batch_size=size, shuffle=False, verbose=0).history["loss"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("calls", "arguments"),
    [(lengths, {}), (rows, {}), (kinds, {}), (given_lists, {"steps_per_execution": 3})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_towers_trace_when_keras_traces(calls, arguments):
    """Call by call, and with its numbers; Python's state of the trace changes before each call."""
    found = {}
    for towers in (0, 3):
        model, found[towers] = told(towers, **arguments), []
        for i, result in enumerate(calls(model)):
            # predict traces its step once for each batch of a list, on one device; alike batches share it on towers.
            found[towers].append((result, sorted(set(model.traces)), len([t for t in model.traces if t != "predict"])))
            model.traces = []
            model._scale, model.shift = 1 + i % 3 / 10, np.full(4, i % 4 / 10, "float32")
            model.optimizer.momentum, model.optimizer.clipvalue = 0.1 * (1 + i % 5), 0.01 * (i % 3) or None
    assert_close([one[0] for one in found[3]], [one[0] for one in found[0]])
    assert [one[1:] for one in found[3]] == [one[1:] for one in found[0]]


def test_a_function_is_traced_for_two_lengths_and_any_rows():
    """`Towers.run` relaxes lengths as Keras does; a loop over a length in Python needs a trace for each."""
    calls, variable = [], tf.Variable(1.0)

    def lengths_of(tensors):
        return [one.shape.as_list() for one in tensors]

    def step(x):
        calls.append(x)  # its lengths are asked for later: a step that asks is told
        return tf.reduce_sum(variable * x, 1)

    def looping(x):
        calls.append(x)  # its lengths are asked for later: a step that asks is told
        return sum(x[:, i] * variable for i in range(x.shape[1]))

    with ncclsync.Towers(2) as towers:
        for function, traced in ((step, [[None, 6], [None, None]]), (looping, [[None, 6], [None, None], [None, 5]])):
            calls.clear()
            for length, count in ((6, 8), (6, 5), (5, 8), (5, 7), (6, 1)):
                x = X[:count, :length, 0]
                assert_close(towers.run(function, x).numpy(), x.sum(1))
            assert [one for one in lengths_of(calls) if one != [None, None]] == traced[:1] + traced[2:]
            if function is step:
                for length in (4, 3, 2):
                    towers.run(step, X[:8, :length, 0])
                assert [one for one in lengths_of(calls) if one != [None, None]] == traced[:1] + traced[2:]


def test_programs_are_kept_within_a_bound(monkeypatch):
    """Those used last: of a step that each length is traced for, and of functions that are made anew each time."""
    monkeypatch.setattr(programs, "MOST_KEPT", 3)
    monkeypatch.setattr("ncclsync.towers.step.MOST_KEPT", 3)
    monkeypatch.setattr("ncclsync.training.loop.MOST_KEPT", 3)
    calls = []

    def looping(x):
        calls.append(x.shape[1])
        return sum(x[:, i] for i in range(x.shape[1]))

    with ncclsync.Towers(2) as towers:
        for length in (6, 5, 6, 4, 6, 3, 6, 2, 6, 5):
            towers.run(looping, X[:4, :length, 0])
        assert [one for one in calls if one] == [6, 5, 4, 3, 2, 5], "what is used again and again is kept"
        (kept,) = towers._steps.values()
        assert len(kept.programs.kept) == len(kept._functions) == 3
        for i in range(5):
            towers.run(lambda x, i=i: x + i, X[:4, :, 0])
        assert len(towers._steps) == 3


def test_a_step_may_be_no_key_of_a_dictionary():
    """As a dataclass with `__call__`, which compares by value: the same object is traced once."""
    calls = []

    @dataclasses.dataclass
    class Step:
        factor: float

        def __call__(self, x):
            calls.append(x)
            return x * self.factor

    step = Step(2.0)
    with ncclsync.Towers(2) as towers:
        for _ in range(3):
            assert_close(towers.run(step, X[:4]).numpy(), X[:4] * 2)
        assert_close(towers.run(Step(3.0), X[:4]).numpy(), X[:4] * 3)
    assert len(calls) == 2


def test_batches_of_other_ranks():
    """Plain Keras traces tensors of no known rank, which many a layer refuses; towers train each rank as it is."""

    def doubled(x):
        return x * 2

    with ncclsync.Towers(2) as towers:
        for shape in ([5, 3], [5, 3, 2], [6, 3, 2], [4, 1], [5]):
            x = np.arange(np.prod(shape), dtype="float32").reshape(shape)
            assert float(np.sum(towers.run(doubled, x))) == 2 * x.sum()


class Counting(keras.layers.Layer):
    """Counts its traces, and uses the number."""

    count = 0

    def call(self, x):
        """Scale by the number."""
        self.count += 1
        return x * self.count


class Drawing(keras.layers.Layer):
    """Draws while it is traced."""

    def call(self, x):
        """Scale by a number that Python draws, once for all steps."""
        return x * np.random.uniform(0.5, 1.5) * random.uniform(0.5, 1.5)


class CountingUpdates(keras.optimizers.Adam):
    """Counts how often it is built, and the updates that are traced, and uses the numbers."""

    count = built_times = 0

    def build(self, variables):
        """Count."""
        self.built_times += 1
        super().build(variables)

    def update_step(self, gradient, variable, learning_rate):
        """Scale by the number."""
        self.count += 1
        super().update_step(gradient * self.count * self.built_times, variable, learning_rate)


class CountingRows(Counting):
    """Has another program where it does not know the number of rows."""

    def call(self, x):
        """Scale by the number, and by the rows."""
        return super().call(x) / (x.shape[0] or 1)


@pytest.mark.parametrize("layer", [Counting, CountingRows, Drawing])
def test_a_trace_leaves_python_as_keras_does(layer):
    """Keras traces a step that creates variables twice. One trace is enough, unless Python's state changes by it."""

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([6, 4]), keras.layers.Flatten(), layer(), keras.layers.Dense(1)])
        model.compile(CountingUpdates(0.1), "mse", jit_compile=False)
        return model

    def left(model):
        yield model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
        yield model.evaluate(X, Y, verbose=0)
        yield [model.optimizer.count, getattr(model.layers[1], "count", 0), np.random.uniform(), random.uniform(0, 1)]

    assert_close(list(left(nccl_parallel(towers=3)(build)())), list(left(build())))


class OfFunctions(keras.Model):
    """A model of which TensorFlow keeps a function's trace."""

    def __init__(self):
        super().__init__()
        self.norm, self.last, self.factor = keras.layers.BatchNormalization(), keras.layers.Dense(1), 1.0

    @tf.function
    def scaled(self, x, training):
        """Normalise, and scale."""
        return self.norm(x, training=training) * self.factor

    def call(self, x, training=False):
        """Call the function, and a layer."""
        return self.last(self.scaled(x, training))


@pytest.mark.parametrize("change", ["factor", "trainable", ""])
def test_a_function_whose_trace_one_device_keeps(change, caplog):
    """A warning names it if its Python does something else now; else none comes, and numbers are equal."""

    def build():
        keras.utils.set_random_seed(1)
        model = OfFunctions()
        model.build([None, *X.shape[1:]])  # else Keras keeps a trace without the layer's variables
        model.compile("sgd", "mse")
        return model

    def trained(model):
        found = [
            model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history["loss"],
            model.evaluate(X, Y, verbose=0),
        ]
        if change == "factor":
            model.factor = 2.0
        elif change:
            model.norm.trainable = False
        model.compile("sgd", "mse")
        found.append(model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history["loss"])
        return [*found, model.train_on_batch(X[:3], Y[:3]), model.predict(X, verbose=0)]

    with caplog.at_level(logging.WARNING, "ncclsync"):
        found = trained(nccl_parallel(towers=2, exact=True)(build)())
    told = [one.getMessage() for one in caplog.records if "One device keeps" in one.getMessage()]
    assert len(told) == bool(change) and all(f"scaled, at {__file__}:" in one for one in told)
    if not change:
        assert_close(found, trained(build()))


class OfLooks(OfFunctions):
    """A model that its first batch builds: Keras looks at its shapes, and the function keeps that trace."""

    def __init__(self, training):
        super().__init__()
        self.hidden, self.training = keras.layers.Dense(4), training

    @tf.function
    def scaled(self, x, training=False):
        """Compute a layer without weights as yet, and normalise."""
        return self.norm(self.hidden(x), training=training)

    def call(self, x, training=False):
        """Call the function, and a layer."""
        x = keras.ops.reshape(x, [-1, 24])
        return self.last(self.scaled(x, training) if self.training else self.scaled(x))


@pytest.mark.parametrize(
    ("first", "training", "stale"),
    [("", True, True), ("", False, True), ("one", True, False), ("batch", False, True), ("batch", True, False)],
)
@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_a_function_that_keras_has_looked_at(first, training, stale, way, caplog):
    """One device does not train what a first batch builds within it; a warning tells, just where one device does not.

    A call before, on one row, or in another mode, is another trace.
    """

    def build():
        keras.utils.set_random_seed(1)
        model = OfLooks(training)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        if first:
            model(X[: 1 if first == "one" else 8])
        return model

    def trained(model):
        if way == "fit":
            model.fit(X[:16], Y[:16], batch_size=8, verbose=0, shuffle=False)
        for _ in range(2):
            model.train_on_batch(X[:8], Y[:8])
        return model.get_weights()

    with caplog.at_level(logging.WARNING, "ncclsync"):
        found = trained(nccl_parallel(towers=2, exact=True)(build)())
    told = [one.getMessage() for one in caplog.records if "One device keeps" in one.getMessage()]
    assert len(told) == stale and all(f"scaled, at {__file__}:" in one for one in told), told
    expected = trained(build())
    differs = max(abs(one - other).max() for one, other in zip(found, expected, strict=True))
    assert (differs > 1e-3) == stale, differs


class TakingFirst(keras.Model):
    """A model whose step takes its variables before a function of the step may create them."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, x):
        """Call a layer."""
        return self.last(keras.ops.reshape(x, [-1, 24]))

    def train_step(self, data):
        """Return the loss."""
        x, y = data
        variables = self.trainable_variables

        @tf.function
        def mean(x, y):
            return keras.ops.mean((self(x) - y) ** 2)

        with tf.GradientTape() as tape:
            loss = mean(x, y)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient / 10)
        return {"loss": loss}


class LayersTakingFirst(keras.Sequential):
    """A sequence of layers with such a step."""

    train_step = TakingFirst.train_step


@pytest.mark.parametrize("kind", ["model", "layers"])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_function_that_creates_what_the_step_took_before(is_built, kind, caplog):
    """One device traces such a step once, without its variables."""

    def build():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Flatten(), keras.layers.Dense(1)]
        model = TakingFirst() if kind == "model" else LayersTakingFirst(layers)
        if is_built:
            model(X[:1])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    def trained(model):
        history = model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, epochs=2)
        return [history.history["loss"], *model.get_weights()]

    with caplog.at_level(logging.WARNING, "ncclsync"):
        found = trained(nccl_parallel(towers=2, exact=True)(build)())
    told = [one.getMessage() for one in caplog.records if "traces the step once" in one.getMessage()]
    assert len(told) == (not is_built) and all(f"mean, at {__file__}:" in one for one in told), told
    differs = max(np.abs(np.subtract(*both)).max() for both in zip(found, trained(build()), strict=True))
    assert (differs > 1e-3) == (not is_built), differs


class Anchored(keras.optimizers.SGD):
    """Writes, where it is built, variables of its own, or weights."""

    def __init__(self, anchored=True, **options):
        super().__init__(**options)
        self.anchored = anchored

    def build(self, variables):
        """Start the anchors where the weights are, or halve the weights."""
        super().build(variables)
        self.anchors = [self.add_variable_from_reference(one, "anchor") for one in variables if self.anchored]
        for one, other in zip(self.anchors or variables, variables, strict=True):
            one.assign(other if self.anchored else other / 2)

    def update_step(self, gradient, variable, learning_rate):
        """Draw a weight to its anchor."""
        if self.anchored:
            gradient += variable - self.anchors[self._get_variable_index(variable)]
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
@pytest.mark.parametrize("anchored", [True, False])
def test_what_an_optimizers_build_writes(anchored, way, caplog):
    """Keras loses it if the build creates variables, since the step is traced again, and else does it in each step.

    So it is lost where the build has created what it writes; a warning tells of others.
    """

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(Anchored(anchored, learning_rate=0.1), "mse", jit_compile=False)
        return model

    def trained(model):
        if way == "fit":
            yield model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
        else:
            yield from (model.train_on_batch(X[:8], Y[:8]) for _ in range(3))
        yield from (model.get_weights(), [one.numpy() for one in model.optimizer.variables])

    with caplog.at_level(logging.WARNING, "ncclsync"):
        found = list(trained(nccl_parallel(towers=3)(build)()))
    told = [one.getMessage() for one in caplog.records if "`build` of Anchored changes" in one.getMessage()]
    assert len(told) == (not anchored), told
    if anchored:
        assert_close(found, list(trained(build())))


def test_evaluation_builds_no_optimizer():
    """One device builds it at the first update, of what is trainable then."""

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.add(keras.layers.Dense(1))
        model.layers[1].trainable = False
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    def left(model):
        before = model.evaluate(X, Y, verbose=0)
        known = len(model.optimizer.variables)
        model.layers[1].trainable = True
        return before, known, model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history["loss"], model.weights

    assert_close(left(nccl_parallel(towers=3)(build)()), left(build()))
