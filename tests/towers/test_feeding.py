"""Feeding ahead of the step: no batch is lost, trained twice or trained early, whatever ends or fails.

The towers stand on CPU devices, and are fed as those on GPUs are.
"""

import gc
import json
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_towers_agree, data, mlp, on_towers

from ncclsync import BackupAndRestore, Health, NonFiniteError, Shuffled, Throughput, Timeline
from ncclsync.towers import feeding, step

X, Y = data(61)


@pytest.fixture
def fed(monkeypatch):
    """Feed CPU towers too."""
    monkeypatch.setattr(step, "OnIterator", step.OnFed)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["not fed", "fed"])
def either(request, monkeypatch):
    """Feed CPU towers too, and not: what holds for one must hold for the other."""
    if request.param:
        monkeypatch.setattr(step, "OnIterator", step.OnFed)


class Teller(keras.Model):
    """Tell each batch's mean, and count the steps in a weight."""

    def __init__(self, **options):
        super().__init__()
        self.steps = self.add_weight(shape=(), initializer="zeros", name="steps")
        self.built = True
        self.compile(**options)

    def train_step(self, batch):
        """Train on nothing."""
        x = batch[0] if isinstance(batch, tuple) else batch
        self.steps.assign_add(1.0)
        return {"mean": tf.reduce_mean(x)}


def teller(**options):
    """On two towers."""
    return on_towers(lambda: Teller(**options), 2)


def batches(count, size=4):
    """Batch i has the number i in each of its rows."""
    rows = np.repeat(np.arange(count, dtype=np.float32), size)[:, None]
    return tf.data.Dataset.from_tensor_slices(rows).batch(size)


class Told(keras.callbacks.Callback):
    """Keep what the steps told, and stop if told to."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.means, self._stop_after = [], stop_after

    def on_train_batch_end(self, batch, logs=None):
        """Keep it."""
        self.means.append(float(logs["mean"]))
        if len(self.means) == self._stop_after:
            self.model.stop_training = True


def told(model, dataset, stop_after=None, **options):
    """What the steps of a `fit` tell."""
    callback = Told(stop_after)
    model.fit(dataset, verbose=0, callbacks=[callback], **options)
    return callback.means


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_training_is_the_same(fed, monkeypatch, steps_per_execution):
    """`fit` and `evaluate`, with a last batch that is smaller."""

    def run():
        model = on_towers(mlp, 3)
        model.compile("adam", model.loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
        history = model.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        result = model.evaluate(X, Y, batch_size=20, verbose=0)
        assert_towers_agree(model)
        return history, result, model.get_weights()

    with_feeder = run()
    monkeypatch.undo()
    np.testing.assert_equal(with_feeder, run())


@pytest.mark.slow
def test_kinds_of_batches(either):
    """Ragged and sparse tensors, strings, integers, None from a generator, one row for two towers."""
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]])
    sparse = tf.sparse.from_dense(np.eye(4, dtype=np.float32))
    structure = {"r": ragged, "s": sparse, "t": tf.constant(["a", "b", "c", "d"]), "i": tf.range(4)}

    class Model(Teller):
        def train_step(self, batch):
            x = batch[0] if isinstance(batch, tuple) else batch
            total = tf.reduce_sum(x["r"].to_tensor()) + tf.sparse.reduce_sum(x["s"])
            letters = tf.reduce_sum(tf.strings.length(x["t"]))
            return {"mean": total + tf.cast(letters + tf.reduce_sum(x["i"]), tf.float32)}

    model = on_towers(lambda: Model(), 2)
    assert told(model, tf.data.Dataset.from_tensor_slices(structure).batch(3)) == [15.0, 9.0]

    def pairs():
        for i in range(3):
            yield np.full([2, 1], i, np.float32), None

    assert told(teller(), pairs()) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3])
def test_end_of_data(either, steps_per_execution):
    """Of known and of unknown length: each batch is trained once in each epoch."""
    model = teller(steps_per_execution=steps_per_execution)
    last = {1: [0, 1, 2, 3, 4], 2: [1, 3, 4], 3: [2, 4]}[steps_per_execution]
    assert told(model, batches(5), epochs=2) == last * 2
    assert told(model, batches(5).filter(lambda _: True), epochs=2) == last * 2
    assert float(model.steps) == 20


def test_iterator_that_goes_on_in_the_next_epoch(either):
    """What was fetched ahead is trained then; data that end are begun anew."""
    assert told(teller(), batches(6), steps_per_epoch=2, epochs=3) == [0, 1, 2, 3, 4, 5]
    assert told(teller(), batches(10).repeat(), steps_per_epoch=4, epochs=3) == [*range(10), 0, 1]


def test_stopping(either):
    """Nothing that was fetched ahead is trained; a later `fit` begins anew."""
    model = teller()
    assert told(model, batches(6), stop_after=2) == [0, 1]
    assert told(model, batches(6), stop_after=3) == [0, 1, 2]
    assert float(model.steps) == 5


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_error_in_the_data(either, steps_per_execution):
    """It is raised by the step that would have had the batch; those before it are trained."""

    def failing(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 3.0, "the data break here")]):
            return tf.identity(x)

    model, callback = teller(steps_per_execution=steps_per_execution), Told()
    with pytest.raises(tf.errors.InvalidArgumentError, match="the data break here"):
        model.fit(batches(6).map(failing), verbose=0, callbacks=[callback])
    assert callback.means == {1: [0, 1, 2], 2: [1]}[steps_per_execution]
    assert float(model.steps) == 3
    assert told(model, batches(2)) == {1: [0, 1], 2: [1]}[steps_per_execution]


def test_other_numbers_of_rows(either):
    """Inputs and targets of different lengths, which only splitting finds: as on one device, where they do not meet."""

    def pairs():
        for i in range(4):
            yield np.full([4, 1], i, np.float32), np.zeros([4 if i < 2 else 3, 1], np.float32)

    spec = (tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1]))
    model, callback = teller(), Told()
    model.fit(tf.data.Dataset.from_generator(pairs, output_signature=spec), verbose=0, callbacks=[callback])
    assert callback.means == [0, 1, 2, 3] and float(model.steps) == 4


def test_iterator_of_ones_own(either):
    """After an error it goes on, as it does for who asks it itself."""

    def failing(x):
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, 1.0)]):
            return tf.identity(x)

    model = teller()
    model.make_train_function()
    iterator = iter(batches(4).map(failing))
    assert float(model.train_function(iterator)["mean"]) == 0
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.train_function(iterator)
    assert [float(model.train_function(iterator)["mean"]) for _ in range(2)] == [2, 3]
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError):
            model.train_function(iterator)


def test_step_that_fails(either):
    """The rows that are named are those of the batch that was trained, not of one fetched ahead."""
    x = X.copy()
    x[45] = np.nan
    model = on_towers(mlp, 2, health=Health(on_nonfinite="raise"))
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, Y, batch_size=10, shuffle=False, verbose=0)
    with np.load(caught.value.file) as file:
        rows = next(array for array in file.values() if array.shape[1:] == X.shape[1:])
    np.testing.assert_array_equal(rows, x[45:50])


def shuffled(rows=24, batch_size=4):
    """Data that know where they stand."""
    return Shuffled(np.arange(rows, dtype=np.float32)[:, None], batch_size=batch_size, seed=3)


def noting(data, places):
    """A callback that notes where the data stand after each step."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: places.append(tuple(data.position)))


@pytest.mark.slow
def test_place_in_the_data(either):
    """It is that of the batches that were trained: after each, when training stops, and at the end of a pass."""
    data, places = shuffled(), []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: places.append(tuple(data.position))
    )
    model = teller()
    model.fit(data, epochs=2, verbose=0, callbacks=[callback])
    expected = [(0, 4), (0, 8), (0, 12), (0, 16), (0, 20), (1, 0), (1, 4), (1, 8), (1, 12), (1, 16), (1, 20), (2, 0)]
    assert places == expected
    # Four of six batches: the others were fetched, and the pass is not at its end.
    stopped = told(model, data, stop_after=4)
    assert (tuple(data.position), tuple(data.upcoming)) == ((2, 16), (2, 0))
    assert told(model, data)[:4] == stopped
    assert tuple(data.upcoming) == (3, 0)


@pytest.mark.slow
def test_passes_that_follow_each_other(either):
    """`repeat`: a later pass is begun ahead while the earlier one is trained."""
    data, places = shuffled(rows=8), []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: places.append(tuple(data.position))
    )
    teller().fit(data.repeat(3), verbose=0, callbacks=[callback])
    assert places == [(0, 4), (1, 0), (1, 4), (2, 0), (2, 4), (3, 0)]
    # Whoever iterates after that finds the place where it is.
    assert len(list(data)) == 2 and tuple(data.position) == (4, 0)


@pytest.mark.slow
def test_resuming(either, tmp_path):
    """A run that fails is resumed at the sample after its newest backup, and ends as one that did not."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    def run(folder, *callbacks):
        data = Shuffled(X, Y, batch_size=10, seed=3)
        model = on_towers(mlp, 2)
        backup = BackupAndRestore(folder, save_freq=1, data=data)
        model.fit(data, epochs=2, verbose=0, callbacks=[backup, *callbacks])
        return model.get_weights()

    expected = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", Fail())
    for one, other in zip(run(tmp_path / "broken"), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_are_fed_ahead(fed):
    """While a step runs, the next two batches are fetched, and no more."""
    fetched, ahead = [], []

    def numbers():
        for i in range(8):
            fetched.append(i)
            yield np.full([4, 1], i, np.float32)

    spec = tf.TensorSpec([4, 1])
    dataset = tf.data.Dataset.from_generator(numbers, output_signature=spec)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False

    def look(batch, logs):
        until = time.monotonic() + 5
        while len(fetched) < min(batch + 1 + feeding.AHEAD, 8) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        ahead.append(len(fetched) - batch - 1)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    teller().fit(dataset.with_options(options), verbose=0, callbacks=[callback])
    assert ahead == [2, 2, 2, 2, 2, 2, 1, 0]


def feeder_threads():
    return [thread for thread in threading.enumerate() if thread.name == "ncclsync feeder"]


@pytest.mark.slow
def test_nothing_stays_behind(fed):
    """A feeder's thread, and what it has fetched, end with the iterator; also one that waits for data for ever."""
    go_on = threading.Event()

    def numbers():
        for i in range(100):
            if i == 3:
                go_on.wait(60)
            yield np.full([4, 1], i, np.float32)

    model = teller()
    told(model, batches(5), stop_after=2)
    dataset = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([4, 1]))
    assert told(model, dataset, steps_per_epoch=2) == [0, 1]  # returns
    go_on.set()
    gc.collect()
    until = time.monotonic() + 10
    while feeder_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not feeder_threads()
    assert not len(model.towers.session.feeders)


@pytest.mark.slow
def test_timeline(fed, tmp_path):
    """Every step has its spans once; those of feeding lie in the step in which they end."""
    file = tmp_path / "trace.json"
    timeline, throughput = Timeline(file, steps=(1, 6)), Throughput()
    on_towers(mlp, 2).fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0, callbacks=[timeline, throughput])
    events = [one for one in json.loads(file.read_text())["traceEvents"] if one["ph"] == "X"]
    for name in ("step", "wait_for_data", "tower_0/segment_1", "tower_1/apply"):
        assert sorted(one["args"]["step"] for one in events if one["name"] == name) == [1, 2, 3, 4, 5, 6], name
    shards = [one for one in events if one["name"] == "tower_1/shard"]
    assert len(shards) >= 6
    assert all(one["dur"] >= 0 for one in events)


def test_a_batch_that_does_not_fit_beside_a_step_is_brought_again():
    """By the step that it is for, which gets what was fetched."""

    class Staging:
        total = 2

        def __init__(self):
            self.tried = []

        def fetch(self, handle):
            return [len(self.tried)]

        def bring(self, components):
            self.tried.append(components[0])
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    iterator, staging = iter(batches(4)), Staging()
    feeder = feeding.Feeder(iterator)
    number, parts = feeder.take(staging)
    assert parts is None and staging.tried.count(number[0]) == 1
