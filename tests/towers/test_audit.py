"""`audit_every=`: a tower that computes wrong numbers is found, and nothing else is different."""

import dataclasses
import json
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan, out_of_memory_above
from parity import data, mlp, on_towers, state
from thorough import paired, some

from ncclsync import AuditError, Health, NcclSyncError, Throughput, Timeline, nccl_parallel
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops.comparing import first_difference
from ncclsync.towers import session, step_function
from ncclsync.towers.audit import Audit

X, Y = data(43)
layers = keras.layers


@pytest.fixture
def deterministic(monkeypatch):
    """As after `enable_op_determinism`, which lasts as long as the process: the CPU's kernels of these models are."""
    monkeypatch.setattr(tf_compat, "is_op_determinism_enabled", lambda: True)


def normalised():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3)])
    model.add(layers.Dense(5))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=1.0), loss, metrics=["accuracy"])
    return model


def accumulating():
    return mlp(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), metrics=["accuracy"])


KINDS = {
    "normalised": (normalised, {}),
    "synchronised": (normalised, {"exact": ("batch_norm",)}),
    "drawn as by one device": (normalised, {"exact": ("random",)}),
    "accumulating": (accumulating, {}),
    "sharded": (mlp, {"shard_optimizer": True}),
    "compressed": (mlp, {"compression": "bfloat16"}),
    "undone": (mlp, {"health": Health(on_nonfinite="skip")}),
    "gan": (gan, {}),
    "shards": (normalised, {"shards": 7}),
    "shards, synchronised": (normalised, {"shards": 6, "exact": ("batch_norm",)}),
    "shards, accumulating": (accumulating, {"shards": 5}),
    "shards, gan": (gan, {"shards": 6}),
    "unequal shares": (normalised, {"shares": [3, 2, 1, 1, 1]}),
}


def fit(model, **options):
    y = Y if model.loss is not None else data(43, features=4)[0]
    return model.fit(X, y, **{"batch_size": 10, "epochs": 2, "verbose": 0, "shuffle": False, **options}).history


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "towers"), paired([*KINDS], [3, 2, 5]))
def test_nothing_else_is_different(deterministic, kind, towers):
    """Every other step audited: the bits of weights, optimizer, history and metrics, and no alarm."""
    build, options = KINDS[kind]
    if "shares" in options:
        options = {"shares": options["shares"][:towers]}
    found = []
    for every in (2, None):
        health = dataclasses.replace(options.get("health", Health()), audit_every=every)
        model = on_towers(build, towers, **{**options, "health": health})
        found.append((fit(model), state(model)))
        assert model.towers.divergence() == 0.0
        model.towers.close()
    assert [leaf.tobytes() for leaf in leaves_of(found[0])] == [leaf.tobytes() for leaf in leaves_of(found[1])]


class Once(keras.Model):
    """A step with something that must happen once: Python that counts its calls."""

    def __init__(self, how):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((12,)), layers.Dense(8), layers.Dropout(0.3), layers.Dense(5)])
        self.built, self.how, self.calls = True, how, 0
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def called(self, x):
        self.calls += 1
        return np.float32(1 if self.calls <= 3 else 3)

    def python(self, x):
        return tf.ensure_shape(tf.numpy_function(self.called, [x], tf.float32), [])

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, batch):
        x, y = batch
        if self.how == "input":
            x *= self.python(x)
        elif self.how == "branch":
            x *= tf.cond(tf.reduce_sum(x) > 1e9, lambda: 1.0, lambda: self.python(x))
        elif self.how == "table":
            y = tf.ensure_shape(y, [None])
            seen = tf.ensure_shape(self.table.lookup(y), [None])
            with tf.control_dependencies([self.table.insert(y, seen + 1.0)]):
                x = tf.ensure_shape(x * (1 + 0.1 * seen[:, None]), [None, 12])
        logs = super().train_step((x, y))
        if self.how == "loss":
            logs["called"] = self.python(logs["loss"])
        return logs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "towers", "options"),
    [
        ("input", 2, {}),
        ("input", 3, {"shards": 5}),
        ("branch", 2, {}),
        ("loss", 3, {}),
        ("table", 2, {}),
        ("table", 2, {"shards": 5}),
    ],
)
def test_python_runs_once_in_an_audited_step(deterministic, caplog, how, towers, options):
    """And queues, tables and prints; the rest of the step is audited, and a warning says so."""
    found = []
    for every in (2, None):

        def build():
            keras.utils.set_random_seed(1)
            model = Once(how)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
            return model

        model = on_towers(build, towers, health=Health(audit_every=every), **options)
        found.append((fit(model), state(model), model.calls))
        model.towers.close()
    assert [leaf.tobytes() for leaf in leaves_of(found[0])] == [leaf.tobytes() for leaf in leaves_of(found[1])]
    said = [one.message for one in caplog.records if "audit_every leaves out" in one.message]
    assert len(said) == 1 and "are audited" in said[0] and "test_audit.py:" in said[0]


def leaves_of(structure):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(structure) if leaf is not None]


class Wrong:
    """A segment's function that flips a bit of what some calls of one graph send."""

    def __init__(self, segment, wrong, element):
        self._segment, self._wrong, self._element, self._calls = segment, wrong, element, 0

    def __getattr__(self, name):
        return getattr(self._segment.function, name)

    def __call__(self, *arguments):
        outcome = self._segment.function(*arguments)
        sent = [list(each) for each in outcome.sent]
        if self._calls in self._wrong and sent:
            # The largest of what it sends: gradients.
            sizes = {(b, e): one.shape.num_elements() or 0 for b, each in enumerate(sent) for e, one in enumerate(each)}
            b, e = max(sizes, key=sizes.get)
            sent[b][e] = flipped(sent[b][e], self._element)
        self._calls += 1
        return outcome._replace(sent=sent)


def flipped(value, element):
    bits = tf.reshape(tf.bitcast(value, tf.int32), [-1])
    at = tf.one_hot(element % tf.size(bits), tf.size(bits), dtype=tf.int32)
    return tf.reshape(tf.bitcast(tf.bitwise.bitwise_xor(bits, at), tf.float32), tf.shape(value))


@pytest.fixture
def break_calls(deterministic, monkeypatch):
    """A function that lets some of the calls of each segment but the last be wrong, as towers are numbered."""
    lay_out = step_function.lay_out

    def break_them(is_wrong, element=0):
        def wrongly(program, towers, batch, rollback, meter=None, audit=None):
            by = [(tower, shard) for tower, own in enumerate(towers.layout.places) for shard in own]
            by += [] if audit is None else [(one.tower, one.shard) for one in audit.repeats]
            calls = {call for call, (tower, shard) in enumerate(by) if is_wrong(tower, shard)}
            *audited, last = program.segments
            changed = [
                one if one.once else dataclasses.replace(one, function=Wrong(one, calls, element)) for one in audited
            ]
            program = dataclasses.replace(program, segments=(*changed, last))
            return lay_out(program, towers, batch, rollback, meter, audit)

        monkeypatch.setattr(step_function, "lay_out", wrongly)

    return break_them


def caught(towers, *, shards=None, **options):
    model = on_towers(mlp, towers, health=Health(audit_every=3), shards=shards)
    if options:
        model.compile(model.optimizer, model.loss, **options)
    with pytest.raises(AuditError) as found:
        fit(model)
    model.towers.close()
    return found.value


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1, 0])
@pytest.mark.parametrize("towers", [3, 2, 4])
def test_a_wrong_tower_is_named(break_calls, towers, wrong):
    """Of three it is the one that differs from both others; of two the pair is named."""
    break_calls(lambda tower, shard: tower == wrong)
    error = caught(towers)
    assert error.step == 3
    assert error.culprits == ((wrong,) if towers > 2 else ())
    others = {(wrong - 2) % towers, (wrong - 1) % towers, (wrong + 1) % towers, (wrong + 2) % towers} - {wrong}
    assert set(error.pairs) == {(min(one, wrong), max(one, wrong)) for one in others}
    assert all(name.startswith("the gradient of ") for name in error.names)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.pairs) == (str(error), error.pairs)
    who = f"tower {wrong} (CPU:0), which differs" if towers > 2 else "towers 0 and 1 (CPU:0, CPU:0)"
    assert who in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 3])
def test_one_wrong_computation_is_found(break_calls, towers):
    """Also one that the tower makes once: of its own shard, or of another's."""
    for shard in range(towers):
        break_calls(lambda tower, of, shard=shard: tower == 1 and of == shard)
        error = caught(towers, steps_per_execution=2)
        assert error.culprits == ((1,) if towers == 3 else ())
        assert error.step == 4  # the call of two steps that has the third


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1, 6])
@pytest.mark.parametrize("towers", [3, 2])
def test_one_wrong_shard_of_several_is_found(break_calls, towers, wrong):
    """Whichever of a tower's shards it is; who computes it by error is named."""
    owner = wrong * towers // 7
    break_calls(lambda tower, shard: tower == owner and shard == wrong)
    error = caught(towers, shards=7)
    assert error.culprits == ((owner,) if towers == 3 else ())
    assert {tower for pair in error.pairs for tower in pair} == set(range(towers))


@pytest.mark.slow
def test_an_audited_step_that_does_not_fit(deterministic):
    """Is divided like any other, and audited then."""
    seen = []

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), out_of_memory_above(3), layers.Dense(5)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    for every in (1, None):
        model = on_towers(build, 2, health=Health(audit_every=every), on_oom="split")
        seen.append((fit(model), state(model)))
        assert model.towers.layout.shards == 4
        model.towers.close()
    assert [leaf.tobytes() for leaf in leaves_of(seen[0])] == [leaf.tobytes() for leaf in leaves_of(seen[1])]


@pytest.mark.slow
@pytest.mark.parametrize("callback", [None, Throughput])
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_every_audit_is_made(deterministic, monkeypatch, callback, length):
    """Also where each epoch ends with a call that finds no batch, and where a callback watches every step."""
    steps, check = [], Audit.check
    monkeypatch.setattr(Audit, "check", lambda audit, step: steps.append(step) or check(audit, step))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    dataset = dataset.filter(lambda *_: True) if length == "unknown" else dataset
    model = on_towers(mlp, 2, health=Health(audit_every=6))
    model.fit(dataset, epochs=6, verbose=0, callbacks=[callback()] if callback else [])
    assert steps == [6, 12, 18, 24, 30]
    model.towers.close()


@pytest.mark.slow
def test_callbacks_count_audited_steps(deterministic, tmp_path):
    """`Timeline` numbers every step, and `Throughput` has the rows of each whose time it counts."""
    throughput, sums = Throughput(), []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: sums.append(throughput._sums[False]["samples"]))
    model = on_towers(mlp, 2, health=Health(audit_every=3))
    callbacks = [Timeline(tmp_path / "trace.json"), throughput, note]
    model.fit(X[:40], Y[:40], batch_size=10, epochs=3, verbose=0, callbacks=callbacks)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sorted(event["args"]["step"] for event in events if event["name"] == "step") == [*range(1, 13)]
    assert sums == [20, 40, 40]  # but for the two calls that traced
    model.towers.close()


def test_rows_of_another_number_differ():
    """A step may send as many rows as it has computed: where one has more, the first of these differs."""
    for one, other, first in (([1.0], [1.0, 1.0], 1), ([1.0], [], 0), ([1.0, 2.0], [1.0, 2.0], -1), ([], [], -1)):
        values = [tf.constant(value, tf.float32) for value in (one, other)]
        assert int(first_difference(*values)) == first
    assert int(first_difference(tf.constant([[0.0, -0.0]]), tf.constant([[0.0, 0.0]]))) == 1
    assert int(first_difference(tf.constant([True, False]), tf.constant([True, True]))) == 1


def test_devices_of_other_models(deterministic, monkeypatch):
    """May round otherwise: no false alarm blames one."""
    monkeypatch.setattr(session, "device_models", lambda devices: ["NVIDIA A100", "NVIDIA H100"])
    with pytest.raises(ValueError, match=r"Expected devices of one model .*Received: NVIDIA A100, NVIDIA H100"):
        on_towers(mlp, 2, health=Health(audit_every=5))


@pytest.mark.slow
def test_the_variable_is_named(break_calls):
    """By the place of the bit in what travels."""
    names = []
    for element in (0, -1):
        break_calls(lambda tower, shard: tower == 1, element)
        names.append(caught(2).names)
    assert len(names[0]) == len(names[1]) == 1
    assert names[0] != names[1]


@pytest.mark.slow
def test_no_false_alarm(deterministic):
    """Over 300 audited steps, or 10,000."""
    steps = some(300, 10_000)
    model = on_towers(normalised, 3, exact=("batch_norm",), health=Health(audit_every=1))
    fit(model, epochs=steps // 5)
    assert model.towers.watch.steps == steps
    model.towers.close()


@pytest.mark.parametrize(
    ("health", "error", "words"),
    [
        ({"audit_every": 0}, ValueError, "Expected audit_every to be at least 1"),
        ({"audit_every": True}, TypeError, "Expected audit_every to be a number of steps"),
    ],
)
def test_a_wrong_option_is_an_error(health, error, words):
    """Before anything is created."""
    with pytest.raises(error, match=words):
        nccl_parallel(health=Health(**health))


def test_ops_must_be_deterministic():
    """Else towers may differ, and nothing is wrong."""
    with pytest.raises(ValueError, match=r"Call tf\.config\.experimental\.enable_op_determinism\(\) first"):
        on_towers(mlp, 2, health=Health(audit_every=5))


def test_eager_steps_are_refused(deterministic):
    """No graph is there to run again."""
    model = on_towers(lambda: mlp(run_eagerly=True), 2, health=Health(audit_every=5))
    with pytest.raises(NcclSyncError, match=r"where audit_every is given\. Received: run_eagerly=True"):
        fit(model)
    model.towers.close()


def test_one_tower_audits_nobody(deterministic):
    """An error says that it takes two; and hidden random numbers, which no tower draws again, are one."""
    with pytest.raises(ValueError, match="Expected two towers in each process"):
        on_towers(mlp, 1, health=Health(audit_every=5))

    class Noisy(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    def noisy():
        model = keras.Sequential([keras.Input((12,)), Noisy(), layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = on_towers(noisy, 2, health=Health(audit_every=5))
    with pytest.raises(Exception, match=r"RandomStandardNormal, whose state TensorFlow hides"):
        fit(model)
    model.towers.close()
