"""`shards=`: as many shards whatever the number of towers, and then the same bits."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan, out_of_memory_above, step_of
from parity import assert_close, assert_towers_agree, bits, data, mlp, on_towers, state
from thorough import paired, some

import ncclsync
from ncclsync import BackupAndRestore, Health, NcclSyncError, NonFiniteError, Throughput, Towers, nccl_parallel
from ncclsync.communicator import NcclCommunicator
from ncclsync.communicator.buffers import CUDA, HOST
from ncclsync.towers import step as step_module

ROWS, BATCH = 43, 20  # the last batch has 3 rows, fewer than there are shards
X, Y = data(ROWS)
layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Run:
    """A model, its data, and what must be the same to the bit for every number of towers.

    Attributes:
        make: makes the compiled model.
        data: of rows.
        options: of `nccl_parallel`.
        exact: whether it is one device's, too, to rounding.
    """

    make: Callable[[], keras.Model]
    data: tuple[Any, ...] = (X, Y)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    exact: bool = True

    def build(self):
        keras.utils.set_random_seed(3)
        return self.make()


def made(*stack, optimizer=None, **arguments):
    model = keras.Sequential(list(stack))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **{"metrics": ["accuracy"], **arguments})
    return model


def mean(x):
    return tf.reduce_mean(x)


def cnn():
    return made(
        keras.Input((8, 8, 3)),
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(5),
    )


def augmented():
    return made(
        keras.Input((8, 8, 3)),
        layers.RandomFlip(seed=1),
        layers.RandomRotation(0.2, seed=2),
        layers.Conv2D(4, 3),
        layers.Flatten(),
        layers.Dropout(0.3, seed=3),
        layers.Dense(5),
    )


def words():
    return made(keras.Input((7,), dtype="int32"), layers.Embedding(30, 6), layers.GRU(5), layers.Dense(5))


class Custom(keras.Model):
    """A step of its own, with a variable of its own."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((12,)), layers.Dense(8, "tanh"), layers.Dense(5)])
        self.built = True
        self.norm = self.add_weight(shape=(), initializer="zeros", trainable=False, name="norm")

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            logits = self.inner(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(losses) + 0.01 * tf.math.reduce_variance(logits)
        weights = self.inner.trainable_weights
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.5)
        self.optimizer.apply(gradients, weights)
        self.norm.assign(0.9 * self.norm + 0.1 * tf.reduce_max(tf.abs(x)))
        return {"loss": loss, "norm": self.norm, "largest": tf.reduce_max(logits)}

    def call(self, x):
        return self.inner(x)


def custom():
    model = Custom()
    model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    return model


def adamw(**arguments):
    return lambda: mlp(keras.optimizers.AdamW(0.01, **arguments))


def images(rows=ROWS):
    rng = np.random.default_rng(1)
    return rng.standard_normal((rows, 8, 8, 3)).astype("float32"), rng.integers(0, 5, rows)


def tokens():
    rng = np.random.default_rng(2)
    return rng.integers(0, 30, (ROWS, 7)).astype("int32"), rng.integers(0, 5, ROWS)


RUNS = {
    "mlp": Run(mlp),
    "cnn": Run(cnn, images(), exact=False),
    "cnn, synchronized": Run(cnn, images(), {"exact": ("batch_norm",)}),
    "dropout and augmentation": Run(augmented, images(), exact=False),
    "dropout and augmentation, invariant": Run(augmented, images(), {"exact": ("random",)}),
    "embedding and gru": Run(words, tokens()),
    "adamw, clipnorm": Run(adamw(clipnorm=0.1)),
    "adamw, global clipnorm": Run(adamw(global_clipnorm=0.1)),
    "adamw, accumulation": Run(adamw(gradient_accumulation_steps=2)),
    "adamw, ema": Run(adamw(use_ema=True, ema_overwrite_frequency=2)),
    "compression": Run(mlp, options={"compression": "bfloat16"}, exact=False),
    "on_nonfinite": Run(mlp, options={"health": Health(on_nonfinite="skip")}),
    "checked": Run(mlp, options={"health": Health(check_every=1)}),
    "custom step": Run(custom),
    "sample weights": Run(mlp, (X, Y, np.linspace(0, 1, ROWS, dtype="float32"))),
    "gan": Run(gan, (X, data(ROWS, features=4)[0])),
}


def trained(model, run):
    """What `fit`, `evaluate` and `predict` give, and what they leave."""
    x, y, *weights = run.data
    options = {"batch_size": BATCH, "verbose": 0}
    weighted = {"sample_weight": weights[0]} if weights else {}
    found = {"history": model.fit(x, y, epochs=2, shuffle=False, **weighted, **options).history, **state(model)}
    if model.loss is not None:
        found["evaluated"] = model.evaluate(x, y, **weighted, **options)
        found["predicted"] = model.predict(x, **options)
    return found


def assert_same_bits(run, shards, towers):
    first = None
    for count in towers:
        model = on_towers(run.build, count, shards=shards, **run.options)
        found = trained(model, run)
        assert_towers_agree(model)
        model.towers.close()
        first = first or found
        assert bits(found) == bits(first), f"{count} towers differ from {towers[0]}"
    if run.exact:
        assert_close(first, trained(run.build(), run))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "towers"), paired([*RUNS], some([(1, 2), (1, 4), (1, 8)], [(1, 2, 4, 8)])))
def test_any_number_of_towers_trains_to_the_same_bits(name, towers):
    """Weights, optimizer, history, metrics and predictions; and to those of one device."""
    assert_same_bits(RUNS[name], 8, towers)


@pytest.fixture
def nccl(standin, monkeypatch):
    """The stand-in, to whose communicators TensorFlow's tensors in host memory may be given."""
    monkeypatch.setattr(NcclCommunicator, "memory", {**CUDA, **HOST})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    paired(["mlp", "cnn, synchronized", "adamw, accumulation", "embedding and gru", "compression"], [4, 5]),
)
def test_by_nccl(nccl, name, shards):
    """Sums are gathered and added up in the tree: the bits of one tower, which has nobody to meet."""
    run = RUNS[name]
    found = []
    for towers in (1, 2, 3):
        model = on_towers(run.build, towers, backend="nccl", shards=shards, **run.options)
        found.append(bits(trained(model, run)))
        assert_towers_agree(model)
        model.towers.close()
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_shards_are_computed_one_after_another():
    """Each call of a segment waits for the one before."""
    model = on_towers(mlp, 1, shards=4)
    model.train_on_batch(X[:8], Y[:8])
    (function,) = (found.graph for found in step_of(model)._functions.values())

    @functools.cache
    def calls_before(op):
        """How many calls of each function follow each other, up to an op."""
        found = collections.Counter()
        for parent in {*op.control_inputs, *(tensor.op for tensor in op.inputs)}:
            found |= calls_before(parent)
        if op.type.endswith("PartitionedCall"):
            found[op.get_attr("f").name] += 1
        return found

    ops = function.graph.get_operations()
    calls = collections.Counter(op.get_attr("f").name for op in ops if op.type.endswith("PartitionedCall"))
    of_shards = [name for name, count in calls.items() if count == 4]
    assert of_shards
    assert [max(calls_before(op)[name] for op in ops) for name in of_shards] == [4] * len(of_shards)
    model.towers.close()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [3, 5, 6, 7])
def test_shards_that_the_towers_do_not_divide(shards):
    """Some towers then have one shard more than others; the tree is the same."""
    assert_same_bits(RUNS["adamw, accumulation"], shards, (1, 2, 3))


@pytest.mark.slow
def test_a_loop_of_ones_own():
    """`Towers.run`: results, rows, and what each shard has of them."""
    first = None
    for count in (1, 2, 4):
        keras.utils.set_random_seed(1)
        model = mlp()
        with Towers(count, shards=4) as towers:

            def step(batch, model=model):
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = model.loss(y, model(x, training=True))
                weights = model.trainable_weights
                model.optimizer.apply(tape.gradient(loss, weights), weights)
                return loss, model(x)

            found = [towers.run(step, (X[i : i + 10], Y[i : i + 10])) for i in (0, 10, 20)]
            each = towers.run(step, (X[:10], Y[:10]), per_tower=True)
            assert [None if one is None else len(one[1]) for one in each] == [3, 3, 2, 2]
            found = [found, each, state(model)]
        first = first or found
        assert bits(found) == bits(first)


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_divided(caplog):
    """It leaves no trace: dropout, metrics and weights are what they would have been."""

    def build(rows=2**30):
        keras.utils.set_random_seed(1)
        return made(keras.Input((12,)), layers.Dense(8), out_of_memory_above(rows), layers.Dense(5))

    run = Run(build)
    model = on_towers(lambda: build(rows=3), 2, on_oom="split")
    found = trained(model, run)
    assert_close(found, trained(build(), run))
    assert_towers_agree(model)
    said = [record.message for record in caplog.records if "from now on" in record.message]
    assert len(said) == 2  # 10 rows of each tower, 5, 3
    assert "8 shards, up to 4 of them on each tower, one after another" in said[1]
    assert "It has 8 shards: a tower computes 4 of them, one after another" in str(model.towers.explain())
    model.towers.close()


@pytest.mark.slow
def test_any_step_that_does_not_fit_is_divided():
    """Also one that writes no variable, and one of which each shard's results are asked for."""

    def build():
        keras.utils.set_random_seed(1)
        return made(keras.Input((12,)), out_of_memory_above(6), layers.Dense(5))

    expected = build().predict(X, batch_size=6, verbose=0)
    for method in ("predict", "predict_on_batch", "evaluate"):
        model = on_towers(build, 2, on_oom="split")
        if method == "predict":
            assert_close(model.predict(X, batch_size=24, verbose=0), expected)
        elif method == "predict_on_batch":
            assert_close(model.predict_on_batch(X[:24]), expected[:24])
        else:
            model.evaluate(X, Y, batch_size=24, verbose=0)
        assert model.towers.layout.shards == 4, method
        model.towers.close()
    large, count = out_of_memory_above(6), tf.Variable(0.0)

    def step(rows):
        count.assign_add(1.0)
        return large(rows)

    with Towers(2, on_oom="split") as towers:
        each = [towers.run(step, np.arange(24.0, dtype="float32"), per_tower=True) for _ in range(2)]
    assert [[part.numpy().tolist() for part in parts] for parts in each] == [np.arange(24.0).reshape(4, 6).tolist()] * 2
    assert float(count) == 2.0


@pytest.mark.slow
def test_a_validation_batch_that_does_not_fit_is_divided():
    """Though random state of the training step, of fewer shards, is not used by it."""

    def build(rows=2**30):
        keras.utils.set_random_seed(1)
        stack = [layers.Dropout(0.2, seed=1), out_of_memory_above(rows), layers.Dense(5)]
        return made(keras.Input((12,)), *stack, optimizer=keras.optimizers.SGD(0.1))

    model = on_towers(lambda: build(6), 2, on_oom="split")
    model.fit(X, Y, batch_size=8, validation_data=(X, Y), validation_batch_size=40, epochs=2, verbose=0)
    assert model.towers.layout.shards == 8
    found = model.evaluate(X, Y, batch_size=40, verbose=0)
    assert_towers_agree(model)
    plain = build()
    plain.set_weights(model.get_weights())
    assert_close(found, plain.evaluate(X, Y, batch_size=40, verbose=0))
    model.towers.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {}, {"watched": True}])
def test_one_of_many_batches_that_does_not_fit_is_divided(monkeypatch, is_fed, options):
    """Batches that were fed ahead, divided into fewer shards, are divided anew; a call makes its steps one by one."""
    if is_fed:
        monkeypatch.setattr(step_module, "OnIterator", step_module.OnFed)
    compiled = {name: value for name, value in options.items() if name != "watched"}

    def build(rows=2**30):
        keras.utils.set_random_seed(1)
        return made(keras.Input((12,)), layers.Dense(8), out_of_memory_above(rows), layers.Dense(5), **compiled)

    model, alone = on_towers(lambda: build(rows=4), 2, on_oom="split"), build()
    fit = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0}
    fit |= {"validation_data": (X, Y), "validation_batch_size": 30}
    found = model.fit(X, Y, callbacks=[Throughput()] if "watched" in options else [], **fit).history
    expected = alone.fit(X, Y, **fit).history
    assert model.towers.layout.shards == 8
    assert_close({name: found[name] for name in expected}, expected)
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)
    model.towers.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "shards", "batch", "words"),
    [(0, None, 4, "each shard has one row"), (3, 4, 20, "the bits belong to shards=4. Choose more shards")],
)
def test_what_cannot_be_divided_further_is_the_error(caplog, rows, shards, batch, words):
    """A warning says why; weights are what they were."""

    def build():
        return made(keras.Input((12,)), out_of_memory_above(rows), layers.Dense(5))

    model = on_towers(build, 2, shards=shards, on_oom="split")
    before = model.get_weights()
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(X[:batch], Y[:batch], batch_size=batch, verbose=0)
    assert words in caplog.records[-1].message
    assert bits(model.get_weights()) == bits(before)
    model.towers.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("options", [{"on_oom": "split"}, {"shards": 4}])
def test_a_skipped_step_counts_in_metrics(options):
    """Also where a step is undone as a whole if it does not fit the memory."""
    x = X[:8].copy()
    x[5] = np.nan
    model, plain = (on_towers(mlp, 2, health=Health(on_nonfinite="skip"), **more) for more in (options, {}))
    before = model.get_weights()
    history, expected = (one.fit(x, Y[:8], batch_size=8, verbose=0).history for one in (model, plain))
    assert_close(history, expected)
    assert bits(model.get_weights()) == bits(before)
    model.towers.close()


def test_explain_tells_of_shards():
    """How many, on which tower, and whether they are kept while others are computed."""
    model = on_towers(mlp, 2, shards=4)
    explained = model.towers.explain(10)
    assert [(one.tower, one.begin, one.end) for one in explained.shards] == [
        (0, 0, 3),
        (0, 3, 6),
        (1, 6, 8),
        (1, 8, 10),
    ]
    assert (
        "a tower computes 2 of them, one after another, and keeps of each only its addends of the sums"
        in explained.order
    )
    model.towers.close()
    model = on_towers(cnn, 2, shards=4, exact=("batch_norm",))
    assert "since they meet in between" in model.towers.explain(10).order
    model.towers.close()


@pytest.mark.slow
def test_a_step_is_explained_as_it_will_run_after_a_split():
    """Also one that was traced before another step did not fit: its program, and its last batch, in more shards."""
    model = on_towers(mlp, 2, on_oom="split")
    model.train_on_batch(X[:10], Y[:10])
    before = model.towers.explain()
    assert len(before.shards) == 2 and "shard" not in str(before.order)
    assert model.towers.split_further(10)
    for found in (model.towers.explain(), model.towers.explain(), model.towers.explain(10)):
        assert [one.end for one in found.shards] == [3, 6, 8, 10]
        assert "a tower computes 2 of them, one after another" in found.order
        assert found.segments == len(step_of(model).last()[0].segments)
    program, batch = step_of(model).last()
    assert program.segments[-1].once and len(batch[0]) == 10
    count = len(step_of(model).programs.kept)
    model.train_on_batch(X[:10], Y[:10])
    assert len(step_of(model).programs.kept) == count - 1, "the program of two shards is kept"
    model.towers.close()
    with Towers(2, on_oom="split") as towers:
        towers.run(mean, X[:10])
        assert towers.split_further(10) and len(towers.explain().shards) == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shards": "4"}, TypeError, "Expected shards to be an int"),
        ({"shards": True}, TypeError, "Expected shards to be an int"),
        ({"shards": 0}, ValueError, "Expected shards to be from 1 to 256"),
        ({"towers": 4, "shards": 3}, ValueError, "Expected at least a shard for each of 4 towers"),
        ({"shards": 4, "shard_optimizer": True}, ValueError, "Expected shards or shard_optimizer, not both"),
        ({"on_oom": "split", "shard_optimizer": True}, ValueError, "Expected on_oom or shard_optimizer, not both"),
        ({"on_oom": "wait"}, ValueError, "Expected on_oom to be None or 'split'"),
    ],
)
def test_what_does_not_fit_together_is_an_error(options, error, words):
    """Before anything is created."""
    with pytest.raises(error, match=words):
        nccl_parallel(**options)


@pytest.mark.parametrize("options", [{"shards": 4}, {"on_oom": "split"}])
def test_random_numbers_from_hidden_state_are_refused(options):
    """They belong to no shard, and cannot be drawn again."""

    class Noisy(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    model = on_towers(lambda: made(keras.Input((12,)), Noisy(), layers.Dense(5)), 2, **options)
    with pytest.raises(Exception, match=r"RandomStandardNormal, whose state TensorFlow hides"):
        model.fit(X, Y, verbose=0)
    model.towers.close()


def test_what_cannot_run_again_is_warned_of(caplog):
    """Python within a step, where on_oom may run it twice; a step that is not traced is refused."""

    class Logged(layers.Layer):
        def call(self, x):
            return x + tf.ensure_shape(tf.numpy_function(lambda: np.float32(0), [], tf.float32), [])

    model = on_towers(lambda: made(keras.Input((12,)), Logged(), layers.Dense(5)), 2, on_oom="split")
    model.train_on_batch(X[:8], Y[:8])
    (said,) = {one.message for one in caplog.records if "on_oom cannot undo" in one.message}
    assert re.search(r"undo (Eager)?PyFunc, at .*test_many_shards.py:\d+ \(return x \+ tf.ensure_shape", said), said
    model.compile("sgd", model.loss, run_eagerly=True)
    with pytest.raises(NcclSyncError, match="Expected a step that is traced, where on_oom is given"):
        model.train_on_batch(X[:8], Y[:8])
    model.towers.close()


def test_a_gradient_that_is_not_finite_is_of_a_tower():
    """And of the rows of its shards that have such."""
    x = X[:16].copy()
    x[[5, 12, 15]] = np.nan
    model = on_towers(mlp, 2, shards=8, health=Health(on_nonfinite="raise"))
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, Y[:16], batch_size=16, verbose=0)
    assert {tower: found[:2] for tower, found in caught.value.towers.items()} == {0: (4, 6), 1: (12, 16)}
    model.towers.close()


@pytest.mark.slow
def test_a_run_goes_on_with_other_towers(tmp_path):
    """Begun on eight towers and stopped, it ends on two with the bits of one that trained to the end."""

    def build():
        return made(keras.Input((12,)), layers.Dense(8), layers.Dropout(0.3, seed=3), layers.Dense(5))

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    def fit(towers, *callbacks):
        model = on_towers(Run(build).build, towers, shards=8)
        try:
            model.fit(X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        finally:
            found = bits(state(model))
            model.towers.close()
        return found

    with pytest.raises(KeyboardInterrupt):
        fit(8, BackupAndRestore(tmp_path / "backup"), Stop())
    assert fit(2, BackupAndRestore(tmp_path / "backup")) == fit(1)


def test_a_branch_that_writes_and_gives_rows():
    """It would have to run once and for each shard: it is refused, with its line."""
    scale = tf.Variable(1.0, trainable=False)

    def write(x):
        scale.assign(scale * 0.5)
        return x * 2.0

    def step(x):
        return tf.cond(tf.reduce_mean(x) > -100.0, lambda: write(x), lambda: x) * scale

    x = np.arange(7.0, dtype="float32")[:, None]
    refused = pytest.raises(ncclsync.NcclSyncError, match="Write the weight in a branch of its own")
    with ncclsync.Towers(2, shards=6) as towers, refused:
        towers.run(step, x)
    assert scale.numpy() == 1.0
