"""The net below the rules: a false rule is caught, a right one is not, and nothing is left changed."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from generated_models import generate
from thorough import some

import ncclsync
from ncclsync import nccl_parallel
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.gradients.hooks import step_hooks
from ncclsync.program import cut
from ncclsync.program.conversion import Conversions
from ncclsync.program.marks import Marks
from ncclsync.program.trace import trace
from ncclsync.semantics import rules
from ncclsync.semantics.placements import MEAN, REPLICATE, SUM, Partial, Shard
from ncclsync.sharding.normalization import moments_of_layers
from ncclsync.sharding.roles import DECLARED
from ncclsync.sharding.shards import open_specs
from ncclsync.tools.verify.check import Unchecked, first_difference

MODELS = some(40, 100)


def checked(step, batch, towers=3):
    """What a check finds of a step, without any towers."""
    batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
    with step_hooks(), moments_of_layers(), tf.device("/CPU:0"):
        traced = trace(step, open_specs(batch))
    return first_difference(traced, "CPU:0", batch, towers)


def checked_model(model, batch):
    """The same of a compiled model's training step."""
    keras_compat.build_symbolically(model, open_specs(tf.nest.map_structure(tf.convert_to_tensor, batch)))
    return checked(model.train_step, batch)


# Rules, sabotaged one by one.


def regression(loss, layer=None):
    """A step that descends along a loss of predictions and targets; of (x, y)."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layer or keras.layers.Dense(3, activation="tanh")])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(model(x, training=True), y)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return step, numbers(3)


def numbers(*shape, rows=7):
    """(x, y) of random numbers."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)).astype("float32"), rng.standard_normal((rows, *shape)).astype("float32")


def squared(predicted, y):
    return tf.reduce_mean(tf.square(predicted - y))


def images():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6, 6, 2)), keras.layers.Conv2D(3, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((7, 6, 6, 2)).astype("float32"), rng.standard_normal((7, 2)).astype("float32")
    keras_compat.build_symbolically(model, open_specs(tf.nest.map_structure(tf.convert_to_tensor, batch)))
    return model.train_step, batch


def words():
    keras.utils.set_random_seed(1)
    table = tf.Variable(np.random.default_rng(0).standard_normal((9, 3)), dtype=tf.float32)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([table])

    def step(batch):
        places, y = batch
        with tf.GradientTape() as tape:
            value = squared(tf.gather(table, places), y)
        optimizer.apply([tape.gradient(value, table)], [table])
        return value

    return step, (np.arange(7) % 4, numbers(3)[1])


def seen():
    """A step with state of a user's own, written from the batch."""
    total, largest = tf.Variable(0.0), tf.Variable(0.0)

    def step(batch):
        x, y = batch
        total.assign_add(tf.reduce_sum(x))
        largest.assign(tf.reduce_max(y))
        return tf.reduce_prod(y) + total

    return step, numbers(3)


def running():
    """The same, from sums up to each row."""
    total = tf.Variable(0.0)

    def step(batch):
        x, y = batch
        total.assign_add(tf.reduce_sum(tf.square(tf.cumsum(x, 0))))
        return tf.reduce_mean(y)

    return step, numbers(3)


def of_rule(name, made, table="RULES"):
    """A rule that says so of its results."""

    def sabotage(patch):
        rule = getattr(rules, table).get(name)
        patch.setitem(getattr(rules, table), name, lambda call: made(call, rule))

    return sabotage


def instead(one, other):
    """Results that are placed as `one` are said to be placed as `other`."""
    return lambda call, rule: [other if result == one else result for result in rule(call)]


def said(placement):
    """All results are said to be placed so, whatever the inputs are."""
    return lambda call, rule: [placement] * len(call.op.outputs)


def untouched(call, rule):
    """Results are said to be placed as the first input."""
    return [call.inputs[0]] * len(call.op.outputs)


def reduced_as(name, placement):
    return lambda patch: patch.setitem(rules._REDUCED, name, placement)


def partition_with(name, method, of=Conversions):
    return lambda patch: patch.setattr(of, name, method(getattr(of, name)))


def share_with(**changes):
    """Towers that are told something else of their part of the batch."""

    def sabotage(patch):
        begin = Conversions.__init__

        def wrong(self, *arguments, **options):
            begin(self, *arguments, **options)
            self.share = self.share._replace(**{name: change(self.share) for name, change in changes.items()})

        patch.setattr(Conversions, "__init__", wrong)

    return sabotage


def earlier(share):
    """In the graph of the step: another begin."""
    return share.tower


def kept_by_all(convert):
    """What all hold is counted by each tower, not by the first alone."""

    def wrong(self, tensor, before, after, op):
        return tensor if before.whole and after == SUM else convert(self, tensor, before, after, op)

    return wrong


def not_made_whole(kind):
    def method(made_whole):
        def wrong(self, tensor, before, op):
            return tensor if isinstance(before, kind) else made_whole(self, tensor, before, op)

        return wrong

    return method


def cumulated(predicted, y):
    return tf.reduce_mean(tf.square(tf.cumsum(predicted, 0) - y))


def counted(predicted, y):
    return tf.reduce_sum(tf.square(predicted - y)) / tf.cast(tf.shape(y)[0], tf.float32)


def sized(predicted, y):
    return tf.reduce_sum(tf.square(predicted - y)) / tf.cast(tf.size(y), tf.float32)


def doubled(predicted, y):
    return tf.reduce_mean(tf.square(tf.concat([predicted, 2 * predicted], 0)[1:] - tf.concat([y, y], 0)[1:]))


def noisy():
    """Noise is drawn for the whole batch; each tower has its rows of it."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    batch = numbers(3)
    keras_compat.build_symbolically(model, open_specs(tf.nest.map_structure(tf.convert_to_tensor, batch)))
    return model.train_step, batch


SABOTAGES = {
    "a sum is taken for a mean": (
        reduced_as("Sum", MEAN),
        lambda: regression(lambda p, y: tf.reduce_sum(tf.square(p - y))),
    ),
    "a mean is taken for a sum": (reduced_as("Mean", SUM), lambda: regression(squared)),
    "a maximum is taken for a sum": (reduced_as("Max", SUM), seen),
    "a product is taken for a mean": (reduced_as("Prod", MEAN), seen),
    "a sum in a variable is taken for a mean": (reduced_as("Sum", MEAN), seen),
    "a bias' gradient is not reduced": (of_rule("BiasAddGrad", instead(SUM, REPLICATE)), images),
    "a kernel's gradient is averaged": (of_rule("MatMul", instead(SUM, MEAN)), lambda: regression(squared)),
    "a filter's gradient is not reduced": (of_rule("Conv2DBackpropFilter", instead(SUM, REPLICATE)), images),
    "a partial sum passes through a square": (
        of_rule("Square", untouched, "LINEAR"),
        lambda: regression(lambda p, y: tf.square(tf.reduce_sum(p - y))),
    ),
    "a partial sum passes through a logarithm": (
        of_rule("Log", untouched, "LINEAR"),
        lambda: regression(lambda p, y: tf.math.log(tf.reduce_sum(tf.square(p - y)))),
    ),
    "a number is added to each tower's part": (
        of_rule("AddV2", said(SUM), "LINEAR"),
        lambda: regression(lambda p, y: 0.5 + tf.reduce_sum(tf.square(p - y))),
    ),
    "a cumulated sum starts anew on each tower": (of_rule("Cumsum", untouched), lambda: regression(cumulated)),
    "a softmax over the batch is each tower's": (
        of_rule("Softmax", untouched),
        lambda: regression(lambda p, y: tf.reduce_sum(tf.transpose(tf.nn.softmax(tf.transpose(p))) * y)),
    ),
    "rows are counted by each tower": (of_rule("Size", said(REPLICATE)), lambda: regression(sized)),
    "the batch's rows are counted wrong": (share_with(total=lambda share: share.rows), lambda: regression(counted)),
    "a gather is left out": (partition_with("_made_whole", not_made_whole(Shard)), running),
    "a reduction is left out": (partition_with("_made_whole", not_made_whole(Partial)), lambda: regression(squared)),
    "own rows begin elsewhere": (share_with(begin=earlier), noisy),
    "what all hold is added up": (
        partition_with("_convert", kept_by_all),
        lambda: regression(lambda p, y: 0.5 + tf.reduce_sum(tf.square(p - y))),
    ),
    "slices are each tower's": (
        partition_with("_slices", lambda slices: lambda self, op, mark, call: list(call.tensors), of=Marks),
        words,
    ),
    "own rows are taken for all": (
        of_rule("Abs", said(REPLICATE)),
        lambda: (lambda batch: {"n": tf.size(tf.where(tf.abs(batch[0]) > 0.5))}, numbers(3)),
    ),
    "a large sum is taken for a mean where it is divided": (
        of_rule("RealDiv", said(MEAN), "LINEAR"),
        lambda: (lambda batch: tf.reduce_sum(tf.square(batch[0])) / 35000.0, numbers(3)),
    ),
    "rows of two copies are taken for rows": (of_rule("ConcatV2", said(Shard(0, 1, 2))), lambda: regression(doubled)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", SABOTAGES)
def test_a_false_rule_is_caught(name, monkeypatch):
    sabotage, program = SABOTAGES[name]
    step, batch = program()
    assert checked(step, batch) == ""
    monkeypatch.setattr(cut, "find_mismatch", lambda placed: None)  # which finds some of them before
    sabotage(monkeypatch)
    assert re.search(r"test_check\.py:|at the layer \w", checked(step, batch))


def test_rounding_that_cancels_is_no_fault():
    """Of equal rows nothing but rounding is left by a variance: no tower is blamed for it."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.compile("adam", loss="mse")
    x, y = np.full((33, 4), 0.3, "float32"), np.random.default_rng(1).standard_normal((33, 3)).astype("float32")
    assert checked_model(model, (x, y)) == ""


def test_the_line_is_the_first_that_differs(monkeypatch):
    """Also where later ones differ, too; in a step of a user's own and in Keras'."""
    step, batch = regression(lambda p, y: 0.5 + tf.square(tf.reduce_sum(p - y)))
    SABOTAGES["a partial sum passes through a square"][0](monkeypatch)
    found = checked(step, batch)
    assert found.startswith("Square ") and "test_check.py:" in found


@pytest.mark.slow
def test_verify_names_the_line(monkeypatch):
    SABOTAGES["a kernel's gradient is averaged"][0](monkeypatch)
    report = ncclsync.verify(classifier, classes(), towers=2, steps=2, batch_size=6)
    assert not report.ok
    assert any("MatMul" in str(reason) for reason in report.reasons)


# What is left as it was.


def classes(rows=9):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)).astype("float32"), rng.integers(0, 3, rows)


def classifier(optimizer="adam", *inside, **options):
    """A small classifier."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, activation="relu"), *inside, keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer if isinstance(optimizer, str) else optimizer(), loss, metrics=["accuracy"], **options)
    return model


def embedding():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("rmsprop", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Adversaries(keras.Model):
    """Two networks, two optimizers."""

    def __init__(self):
        super().__init__()
        self.one = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
        self.other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(3)

    def compile(self):
        super().compile()
        self.first, self.second = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
        self.first.build(self.one.trainable_variables)
        self.second.build(self.other.trainable_variables)
        self.mean = keras.metrics.Mean(name="mean")

    def train_step(self, data):
        x, _ = data
        noise = keras.random.normal(tf.shape(x), seed=self.seeds)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.softplus(-self.other(x)) + tf.nn.softplus(self.other(self.one(noise, training=True)))
            )
        self.second.apply(tape.gradient(loss, self.other.trainable_variables), self.other.trainable_variables)
        with tf.GradientTape() as tape:
            fooled = tf.reduce_mean(tf.nn.softplus(-self.other(self.one(noise, training=True))))
        self.first.apply(tape.gradient(fooled, self.one.trainable_variables), self.one.trainable_variables)
        self.mean.update_state(loss)
        return {"loss": loss, "mean": self.mean.result()}


def adversaries():
    keras.utils.set_random_seed(1)
    model = Adversaries()
    model.compile()
    return model


KINDS = {
    "normalised": (lambda: classifier("sgd", keras.layers.BatchNormalization()), {}),
    "synchronised": (lambda: classifier("sgd", keras.layers.BatchNormalization()), {"exact": ("batch_norm",)}),
    "dropout": (lambda: classifier("adam", keras.layers.Dropout(0.5)), {}),
    "invariant": (lambda: classifier("adam", keras.layers.Dropout(0.5)), {"exact": ("random",)}),
    "accumulating": (lambda: classifier(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)), {}),
    "scaled": (lambda: classifier(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())), {}),
    "sharded": (classifier, {"shard_optimizer": True}),
    "compressed": (classifier, {"compression": "bfloat16"}),
    "embedding": (embedding, {}),
    "adversaries": (adversaries, {}),
    "nonfinite": (classifier, {"health": ncclsync.Health(on_nonfinite="raise")}),
    "several steps at once": (lambda: classifier(steps_per_execution=2), {}),
    "compared": (classifier, {"health": ncclsync.Health(check_every=1)}),
}


def everything(model):
    """All that a check might leave changed."""
    towers = model.towers
    held = []
    for replicas in towers.replicas._held.values():
        for copy in (replicas.variable, *replicas.copies):
            read = tf.raw_ops.ReadVariableOp(resource=copy.handle, dtype=copy.dtype)
            held.append(read.numpy().tobytes())
        held.append((replicas.role, getattr(replicas.variable, DECLARED, None)))
    logs = {
        "pending": set(towers.replicas._pending.keys),
        "warned": set(towers.session._warned),
        "communicator": towers.communicator.find_failure(),
    }
    return held, logs, tf.config.experimental.tensor_float_32_execution_enabled(), keras.config.floatx()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", KINDS)
def test_a_check_leaves_no_trace(name, monkeypatch):
    """Steps of every kind pass; weights, roles and flags stay as they are, also if the check fails on the way."""
    build, options = KINDS[name]
    model = nccl_parallel(towers=3, **options)(build)()
    model.towers.watch.keep_traces()
    x, y = classes(20)
    if name == "embedding":
        x = np.abs(x * 10).astype("int32") % 5
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    batch = tf.nest.map_structure(tf.convert_to_tensor, (x[:8], y[:8]))
    before, traces = everything(model), [*model.towers.watch.traces]
    assert traces
    with monkeypatch.context() as failing:
        failing.setattr(tf_compat, "run_op", lambda *_: 1 / 0)
        for one in traces:
            with pytest.raises(ZeroDivisionError):
                first_difference(one, "CPU:0", batch, 3)
    assert everything(model) == before, "the check that failed has changed something"
    for one in traces:
        assert first_difference(one, "CPU:0", batch, 3) == ""
    assert everything(model) == before, "the check has changed something"
    assert model.towers.divergence() == 0.0
    model.towers.close()


# Steps that cannot be checked, or not on a few rows.


def test_python_within_a_step_is_not_run_again():
    def step(batch):
        return tf.reduce_sum(tf.numpy_function(lambda x: pytest.fail("called"), [batch], tf.float32, stateful=True))

    with pytest.raises(Unchecked, match=r"PyFunc.*test_check.py:\d+"):
        checked(step, np.ones((4, 2), "float32"))


def test_a_step_that_declares_its_batch_is_checked_on_all_of_it():
    noise = tf.constant(np.random.default_rng(0).standard_normal((7, 3)), tf.float32)
    step, batch = regression(lambda p, y: squared(p + noise, y))
    assert checked(step, batch) == ""


def test_few_rows_are_repeated():
    step, batch = regression(squared)
    assert checked(step, (batch[0][:2], batch[1][:2])) == ""


# False alarms.


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("seed", range(MODELS))
def test_no_false_alarm(seed):
    model, batch = generate(seed)
    assert checked_model(model, batch) == ""
