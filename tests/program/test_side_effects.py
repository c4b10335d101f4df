"""What a step does beside its results, once; and what follows from it, which is tower 0's."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close

import ncclsync
from ncclsync import nccl_parallel

X = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")


class Effects:
    """One thing of each kind that a step can do to what no variable holds; `seen` tells what was done."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.calls = []
        self.queue = tf.queue.FIFOQueue(99, [tf.float32], shapes=[[]])
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        self.writer = tf.summary.create_file_writer(str(folder))

    def act(self, x):
        total = tf.reduce_sum(x)
        tf.print("total", tf.shape(x)[0], output_stream=f"file://{self.folder / 'printed'}")
        tf.py_function(lambda v: self.calls.append(round(float(v), 3)), [total], [])
        tf.numpy_function(lambda v: (self.calls.append("numpy"), v)[1], [total], tf.float32)  # of no use
        self.queue.enqueue(total)
        keys = tf.cast(tf.range(tf.shape(x)[0]), tf.int64)
        self.table.insert(keys, self.table.lookup(keys) + 1)
        tf.io.write_file(str(self.folder / "written"), tf.strings.as_string(tf.shape(x)[0]))
        with self.writer.as_default(step=tf.constant(0, tf.int64)):
            tf.summary.scalar("total", total)

    def seen(self):
        self.writer.flush()
        events = [one for path in self.folder.glob("events*") for one in tf.compat.v1.train.summary_iterator(str(path))]
        keys, values = self.table.export()
        return {
            "printed": (self.folder / "printed").read_text(),
            "calls": sorted(map(str, self.calls)),
            "queue": int(self.queue.size()),
            "table": dict(zip(keys.numpy().tolist(), values.numpy().tolist(), strict=True)),
            "written": (self.folder / "written").read_text(),
            "summaries": sum(len(event.summary.value) for event in events),
        }


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 3])
def test_effects_of_a_custom_step_happen_once(tmp_path, towers):
    def seen(run, folder):
        folder.mkdir()
        effects = Effects(folder)

        def step(x):
            effects.act(x)
            return tf.reduce_max(x)

        for _ in range(2):
            run(step, tf.constant(X))
        return effects.seen()

    alone = seen(lambda step, x: tf.function(step)(x), tmp_path / "one")
    with ncclsync.Towers(towers) as on_towers:
        found = seen(on_towers.run, tmp_path / "many")
    assert found == alone
    assert found["queue"] == 2 and len(found["calls"]) == 4 and found["summaries"] == 2


@pytest.mark.slow
def test_effects_of_a_train_step_happen_once(tmp_path):
    found = []
    for name, decorate in (("one", lambda make: make), ("many", nccl_parallel(towers=3))):
        (tmp_path / name).mkdir()
        effects = Effects(tmp_path / name)

        class Acting(keras.Model):
            def train_step(self, data, effects=effects):
                effects.act(data[0])
                return super().train_step(data)

        def build(made=Acting):
            inputs = keras.Input((4,))
            model = made(inputs, keras.layers.Dense(1)(inputs))
            model.compile("sgd", "mse")
            return model

        model = decorate(build)()
        model.fit(X, X[:, :1], batch_size=3, verbose=0, shuffle=False)
        found.append(effects.seen())
        if name == "many":
            model.towers.close()
    assert found[1] == found[0] and found[0]["queue"] == 3


# Variables that are written by what only tower 0 can tell.


def regression():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)

    def update(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    return model, optimizer, update


@pytest.mark.slow
def test_updates_within_a_loop_over_a_dataset():
    found = []
    for towers in (None, 3):
        model, optimizer, update = regression()
        count = tf.Variable(0)

        @tf.function
        def step(x, update=update, count=count):
            total = tf.constant(0.0)
            for part in tf.data.Dataset.from_tensor_slices(x).batch(3):
                total += update(part)
                count.assign_add(1)
            return total, tf.cast(count, tf.float32) * tf.reduce_sum(x)

        if towers is None:
            results = [step(tf.constant(X)) for _ in range(3)]
        else:
            with ncclsync.Towers(towers) as on_towers:
                results = [on_towers.run(step, X) for _ in range(3)]
                assert on_towers.divergence() == 0.0
        found.append((results, model.get_weights(), [v.numpy() for v in optimizer.variables], int(count)))
    assert_close(found[1], found[0], 1e-5, "a dataset within the step")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["loop", "branch", "branch without a result"])
def test_updates_by_numbers_that_no_seed_tells(kind):
    """What one device would have drawn is not known; but all towers must have drawn the same."""
    model, optimizer, update = regression()

    @tf.function
    def step(x):
        total = tf.constant(0.0)
        if kind == "loop":
            for _ in tf.range(3):
                total += update(x + tf.random.normal(tf.shape(x)))
        elif kind == "branch without a result":

            def act():
                update(x * tf.random.uniform([]))

            tf.cond(tf.reduce_sum(x) < 1e9, act, lambda: None)
        elif tf.random.uniform([]) < 2.0:
            total += update(x * tf.random.uniform([]))
        return total, model(x)

    with ncclsync.Towers(3) as towers:
        for _ in range(3):
            _, predicted = towers.run(step, X)
            assert towers.divergence() == 0.0
    assert_close(predicted, model(X), 1e-5, "what the towers predict")
    assert int(optimizer.iterations) == (9 if kind == "loop" else 3)


# Steps as users write them.


def test_python_conditions_and_loops_on_tensors():
    def step(x):
        total = tf.reduce_sum(x)
        for k in tf.range(3):
            total += tf.cast(k, tf.float32)
        if total > 0:
            total += 100.0
        return total

    with ncclsync.Towers(2) as towers:
        assert_close(towers.run(step, X), step(tf.constant(X)), 1e-5, "python's if and for")


def test_slices_are_a_result():
    table = keras.layers.Embedding(7, 3)
    table.build()
    places = tf.constant([[1, 2], [3, 1], [0, 0]])

    def step(i):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(i) ** 2)
        (gradient,) = tape.gradient(loss, table.trainable_variables)
        return gradient, tf.IndexedSlices(tf.ones([3, 2]), i[:, 0])

    with ncclsync.Towers(2) as towers:
        found = towers.run(step, places)
    for one, expected in zip(found, step(places), strict=True):
        assert isinstance(one, tf.IndexedSlices)
        dense = [tf.math.unsorted_segment_sum(s.values, s.indices, 7) for s in (one, expected)]
        assert_close(*dense, 1e-6, "slices")


@pytest.mark.slow
def test_a_costly_line_is_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr("ncclsync.towers.step.MOST_LOST", 0.0)

    def build():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.ops.sort(inputs, 0)))
        model.compile("sgd", "mse")
        return model

    model = nccl_parallel(towers=3)(build)()
    model.train_on_batch(X, X[:, :2])
    model.train_on_batch(X[:5], X[:5, :2])
    model.fit(X, X[:, :2], batch_size=3, verbose=0)
    assert len([one for one in caplog.records if "Exact, but" in one.getMessage()]) == 1
    model.towers.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("how", ["branch", "callable", "loop"])
def test_effects_within_a_loop_or_a_branch_happen_once(tmp_path, how, caplog):
    """`tf.summary` under `record_if`, and Python in a loop: as often as on one device, with its results; no warning."""
    steps = tf.Variable(0, dtype=tf.int64)
    calls = []

    def count(v):
        calls.append(float(v))
        return v + 1.0

    def step(x):
        steps.assign_add(1)
        total = tf.reduce_sum(x)
        if how == "loop":
            for _ in tf.range(2):
                tf.summary.scalar("total", total, step=steps)
                total = tf.ensure_shape(tf.numpy_function(count, [total], tf.float32), [])
            return total
        due = tf.equal(steps % 2, 0)
        with tf.summary.record_if((lambda: due) if how == "callable" else due):
            tf.summary.scalar("total", total, step=steps)
            tf.summary.histogram("rows", x, step=steps)
        return total

    def seen(run, folder):
        steps.assign(0)
        calls.clear()
        with tf.summary.create_file_writer(str(folder)).as_default() as writer:
            results = [run(x) for x in (X, X[:5], X, X)]
            writer.flush()
        events = [one for path in folder.glob("events*") for one in tf.compat.v1.train.summary_iterator(str(path))]
        return results, [(event.step, value.tag) for event in events for value in event.summary.value], list(calls)

    alone = seen(tf.function(step), tmp_path / "one")
    with ncclsync.Towers(3) as towers:
        found = seen(lambda x: towers.run(step, x), tmp_path / "many")
    assert found[1] == alone[1] and len(alone[1]) == (8 if how == "loop" else 4)
    assert_close(found[::2], alone[::2], 1e-6, "results, and what Python was called with")
    assert "every tower does it" not in caplog.text and "summary_v2.py" not in caplog.text
