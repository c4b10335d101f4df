"""`shares=`: towers with unequal parts of a batch train as one device; "auto" measures which."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan
from parity import Case, assert_close, assert_towers_agree, check, data, fit, mlp, on_towers, state

from ncclsync import Health, NonFiniteError, Timeline, Towers, nccl_parallel
from ncclsync.ops.spans import Measured, MeasuredStep, Span, TimedSpan
from ncclsync.sharding.shards import shard_sizes
from ncclsync.towers import shares as module
from ncclsync.towers.shares import MOST_CALLS, Shares, tower_times

X, Y = data()
layers = keras.layers
DEVICES = {count: ["CPU:0"] * count for count in (2, 3)}


def everything(model):
    """Train, the last batch of one row, and evaluate and predict, the last batches of some."""
    return {
        **fit(X, Y)(model),
        "evaluated": model.evaluate(X, Y, batch_size=17, verbose=0),
        "predicted": model.predict(X, batch_size=18, verbose=0),
    }


def test_trains_as_one_device():
    """A batch of one row leaves all towers but the first without."""
    check(Case(mlp, fit(X, Y, epochs=2), options={"shares": [1, 2, 5]}), 3)


def normalised():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((12,)), layers.Reshape((3, 4, 1)), layers.Conv2D(4, 2, use_bias=False)])
    for layer in (layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(5)):
        model.add(layer)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def embedding():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((12,), dtype="int32"), layers.Embedding(30, 6), layers.Flatten()])
    model.add(layers.Dropout(0.3, seed=4))
    model.add(layers.Dense(5))
    model.compile("adagrad", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


TOKENS = np.abs(X * 10).astype("int32") % 30
NOISE = np.random.default_rng(7).standard_normal((len(X), 4)).astype("float32")
CASES = {
    "mlp": Case(mlp, everything),
    "normalised": Case(normalised, everything, 1e-4, {"exact": ("batch_norm",)}),
    "embedding_dropout": Case(embedding, fit(TOKENS, Y), options={"exact": ("random",)}),
    "gan": Case(gan, fit(X, NOISE, epochs=2)),
    "sharded_optimizer": Case(mlp, everything, options={"shard_optimizer": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("given", [[3, 1], [1, 2, 5], [10, 1, 10]])
@pytest.mark.parametrize("name", CASES)
def test_models_train_as_one_device(name, given):
    """What needs the batch in its order, several exchanges a step, parts of weights."""
    case = CASES[name]
    check(Case(case.build, case.run, case.tolerance, {**case.options, "shares": given}), len(given))


def test_explained():
    """The rows of each tower, and what they share by."""
    model = on_towers(mlp, 3, shares=[1, 2, 5])
    explained = model.towers.explain(16)
    assert [(one.begin, one.end) for one in explained.shards] == [(0, 2), (2, 6), (6, 16)]
    assert "share each batch 1 : 2 : 5." in str(explained) and model.towers.layout.shares == (1, 2, 5)
    model.towers.close()


def test_results_of_each_tower():
    """Of its rows, in the order of the batch; None of one without."""
    with Towers(3, shares=[10, 1, 10]) as towers:
        rows = towers.run(times_two, np.arange(3), per_tower=True)
        assert [None if one is None else one.numpy().tolist() for one in rows] == [[0, 2], None, [4]]


def times_two(batch):
    return 2 * batch


@pytest.mark.slow
def test_rows_of_a_gradient_that_is_not_finite():
    """They are named by the shares that the batch was split by, also after a tower without rows."""
    x = X[:3].copy()
    x[2] = np.nan
    model = on_towers(mlp, 3, shares=[10, 1, 10], health=Health(on_nonfinite="raise"))
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, Y[:3], batch_size=3, verbose=0)
    assert {tower: found[:2] for tower, found in caught.value.towers.items()} == {2: (2, 3)}
    model.towers.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shares": "fast"}, TypeError, "Expected shares to be a list of ints, 'auto' or None. Received: 'fast'"),
        ({"shares": 3}, TypeError, "Expected shares to be a list of ints"),
        ({"shares": np.array([3, 0.5])}, TypeError, "Expected shares to be a list of ints"),
        ({"shares": [1, 0.5]}, TypeError, "Expected shares to be a list of ints"),
        ({"shares": [1, True]}, TypeError, "Expected shares to be a list of ints"),
        ({"shares": []}, ValueError, "Expected each of shares to be from 1 to 1000000"),
        ({"shares": [1, 0]}, ValueError, r"Expected each of shares .* Received: shares=\[1, 0\]"),
        ({"shares": [1, -2]}, ValueError, "Expected each of shares to be from 1"),
        ({"shares": [1, 2], "shards": 4}, ValueError, "Expected shares or shards, not both"),
        ({"shares": "auto", "on_oom": "split"}, ValueError, "Expected shares or on_oom, not both"),
    ],
)
def test_what_is_no_share_is_an_error(options, error, words):
    """Before anything is created."""
    with pytest.raises(error, match=words):
        nccl_parallel(**options)


def test_a_share_for_each_tower():
    """Known only when the devices are."""
    words = r"each of 3 towers.*Received: shares=\[1, 2\]. Write shares=\[1, 2, 1\], or towers=2"
    with pytest.raises(ValueError, match=words):
        nccl_parallel(towers=3, shares=[1, 2])(mlp)()


def test_one_tower_measures_nothing():
    """It has all rows."""
    with Towers(1, shares="auto") as towers:
        assert towers.layout.shares is None and towers.session.shares is None


def measured_step(times, samples=64, parts=(1.0,)):
    """What is recorded of a step in which towers compute so long, in ms: in these parts of it, and then an update.

    On GPUs: what follows the first part is enqueued at once, and all towers wait for each other after each part.
    """
    spans, now = [], 0.0
    for number, part in enumerate(parts, start=1):
        details = {"meets": number > 1}
        for tower, time in enumerate(times):
            span = Span(tower, f"segment_{number}", details)
            spans.append(TimedSpan(span, 0, int(1e6 * (now + part * time))))
        now += part * max(times)
    spans += [TimedSpan(Span(tower, "apply", {"meets": True}), 0, int(1e6 * (now + 9))) for tower in range(len(times))]
    return MeasuredStep(True, samples, tuple(spans))


def measured(*steps, traced=False):
    """A call of these steps."""
    return Measured(traced, False, tuple(steps))


@pytest.mark.parametrize("parts", [(1.0,), (0.25, 0.75)])
def test_times_of_towers(parts):
    """Without the update, and without waiting for others."""
    assert tower_times(measured_step([4.0, 8.0, 6.0], parts=parts), 3) == [4e6, 8e6, 6e6]


def test_times_of_parts_that_overlap():
    """Gradients travel meanwhile: no tower waits between such parts. On the CPU it does, and that counts for nobody."""

    def step(*begins):
        spans = [
            TimedSpan(Span(tower, f"segment_{number}", {"meets": number == 3}), begin, end)
            for number, ends in enumerate([(10, 20), (30, 60), (99, 99)], start=1)
            for tower, (begin, end) in enumerate(zip(begins[number - 1], ends, strict=True))
        ]
        return MeasuredStep(True, 8, tuple(spans))

    assert tower_times(step((0, 0), (0, 0), (0, 0)), 2) == [30, 60]
    assert tower_times(step((0, 0), (20, 20), (60, 60)), 2) == [20, 60]


def settle(speeds, overhead_ms=0.0, samples=64, parts=(1.0,)):
    """Let towers of these speeds, in rows a ms, be measured until they settle; return the shares, and the calls."""
    shares, calls, split = Shares("auto", DEVICES[len(speeds)]), 0, []
    while not shares.settled:
        split.append(shares.weights)  # as batches are that are fed ahead
        sizes = shard_sizes(samples, len(speeds), split[max(0, calls - 2)])
        times = [overhead_ms + rows / speed for rows, speed in zip(sizes, speeds, strict=True)]
        shares.measure(measured(measured_step(times, samples, parts), traced=calls == 0))
        calls += 1
    assert tuple(shares.variable.numpy()) == shares.weights
    return np.array(shares.weights) / sum(shares.weights), calls


@pytest.mark.parametrize("parts", [(1.0,), (0.3, 0.7)])
@pytest.mark.parametrize("overhead_ms", [0.0, 40.0])
@pytest.mark.parametrize("speeds", [(2.0, 1.0), (1.0, 4.0, 2.0)])
def test_settles_at_the_speeds(speeds, overhead_ms, parts):
    """Also where much of a step takes as long for any rows; in 20 calls."""
    found, calls = settle(speeds, overhead_ms, 4000, parts)
    assert calls <= MOST_CALLS
    np.testing.assert_allclose(found, np.array(speeds) / sum(speeds), rtol=0.05)


@pytest.mark.parametrize(("speeds", "samples"), [((1.0, 1.04), 4000), ((5.0, 1.0), 1), ((1.0, 1.3), 2)])
def test_settles_at_even_shares(speeds, samples):
    """Where others gain nothing, and where a tower has no rows to be measured by."""
    found, calls = settle(speeds, samples=samples)
    assert found.tolist() == [0.5, 0.5] and calls <= MOST_CALLS


def test_small_and_failed_steps_do_not_count():
    """Steps of the most rows do; what was measured of fewer is forgotten."""
    shares = Shares("auto", DEVICES[2])
    failed = MeasuredStep(False, 0, ())
    for _ in range(2):
        shares.measure(measured(failed, measured_step([9.0, 1.0], 8)))
    for _ in range(3):
        shares.measure(measured(measured_step([9.0, 1.0], 8), measured_step([1.0, 1.0], 64)))
    assert shares.settled and shares.weights == (1, 1)


@pytest.fixture
def modelled(monkeypatch):
    """Let tower i take i + 1 ms for each of its rows; returns the model's holder."""
    models = []

    def times(step, towers):
        sizes = shard_sizes(step.samples, towers, models[0].towers.layout.shares)
        return [int(1e6) * rows * tower for tower, rows in enumerate(sizes, start=1)]

    monkeypatch.setattr(module, "tower_times", times)
    return models


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_auto_trains_as_one_device(modelled, steps, caplog):
    """While it changes the shares and when they stay, which is said once, and in another `fit`."""

    def build():
        model = mlp()
        model.compile("adam", model.loss, metrics=["accuracy"], steps_per_execution=steps)
        return model

    def run(model):
        stop = keras.callbacks.EarlyStopping("loss", patience=50)
        first = fit(X, Y, epochs=6, callbacks=[stop])(model)
        return first, everything(model) if steps > 1 else []

    model = on_towers(build, 2, shares="auto")
    modelled.append(model)
    with caplog.at_level(logging.INFO, logger="ncclsync"):
        found = run(model)
    assert_close(found, run(build()))
    assert_towers_agree(model)
    one, other = model.towers.layout.shares
    assert 1.6 < one / other < 2.5 and model.towers.session.shares.settled
    told = [record.getMessage() for record in caplog.records if "shares=" in record.getMessage()]
    assert told == [f"shares='auto': from now on as shares={[one, other]}, by the times of CPU:0, CPU:0"]
    model.towers.close()


@pytest.mark.slow
def test_auto_by_true_times(tmp_path):
    """Whatever they are; beside somebody else who watches, by `Towers.run`, and with the optimizer divided."""
    model, alone = on_towers(mlp, 3, shares="auto", shard_optimizer=True), mlp()
    model.fit(X, Y, batch_size=20, epochs=8, shuffle=False, verbose=0, callbacks=[Timeline(tmp_path / "a.json")])
    alone.fit(X, Y, batch_size=20, epochs=8, shuffle=False, verbose=0)
    assert_close(state(model), state(alone))
    assert model.towers.session.shares.settled
    model.towers.close()
    with Towers(2, shares="auto") as towers:
        for _ in range(MOST_CALLS):
            rows = towers.run(times_two, tf.range(9), per_tower=True)
            assert tf.concat([one for one in rows if one is not None], 0).numpy().tolist() == list(range(0, 18, 2))
        assert towers.session.shares.settled
