"""`Timeline`: a trace of what towers did when, complete and true; and nothing of it where nobody watches."""

import collections
import dataclasses
import gc
import json
import pathlib
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data, mlp, on_towers
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import ncclsync
from ncclsync import Throughput, Timeline
from ncclsync.communicator import NcclCommunicator
from ncclsync.communicator.buffers import CUDA, HOST
from ncclsync.training import keras_model

X, Y = data()  # 61 rows: batches of 20, 20, 20 and 1
FIRST, LAST = 2, 7


def fit(model, *callbacks, y=Y, **options):
    options = {"batch_size": 20, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    return model.fit(X, y, callbacks=list(callbacks), **options)


def spans_of(path):
    """[steps] {name: spans of the step} of a trace; they are events of the Chrome trace format."""
    steps = collections.defaultdict(lambda: collections.defaultdict(list))
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            steps[event["args"]["step"]][event["name"]].append(event)
    return steps


def end(span):
    return span["ts"] + span["dur"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Three towers, two epochs, an evaluation between, Throughput and TensorBoard beside the Timeline.

    (The model, the trace's path, the profile's.)
    """
    folder = tmp_path_factory.mktemp("timeline")
    model = on_towers(mlp, 3)
    watchers = [Timeline(folder / "trace.json", steps=(FIRST, LAST)), Throughput()]
    profiler = keras.callbacks.TensorBoard(folder / "logs", profile_batch=(4, 5))
    fit(model, *watchers, profiler, validation_data=(X, Y))
    (profile,) = (folder / "logs").rglob("*.xplane.pb")
    return model, folder / "trace.json", profile


def test_every_part_of_every_step(recorded):
    """Each tower's parts, the collectives and the step once per step asked for, each on its row."""
    _, path, _ = recorded
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == ["steps", *(f"tower {i} (CPU:0)" for i in range(3)), "communication"]
    parts = {f"tower_{i}/{part}" for i in range(3) for part in ("shard", "segment_1", "apply")}
    steps = spans_of(path)
    assert sorted(steps) == list(range(FIRST, LAST + 1))
    for spans in steps.values():
        assert set(spans) == {*parts, "all-reduce/1.1", "step", "wait_for_data"}
        for name, (span,) in spans.items():
            row = f"tower {name[6]} (CPU:0)" if name in parts else "steps"
            assert rows[span["tid"]] == ("communication" if name.startswith("all-reduce") else row)
            assert span["dur"] >= 0


def test_order(recorded):
    """Nothing of a tower overlaps; a collective begins behind what feeds it, and the update behind that."""
    _, path, _ = recorded
    last = 0.0
    for _, spans in sorted(spans_of(path).items()):
        one = {name: span for name, (span,) in spans.items()}
        assert last <= one["wait_for_data"]["ts"] and end(one["wait_for_data"]) <= one["step"]["ts"]
        fed = max(end(one[f"tower_{i}/segment_1"]) for i in range(3))
        joined = one["all-reduce/1.1"]
        assert fed <= joined["ts"]
        for i in range(3):
            shard, first, apply = (one[f"tower_{i}/{part}"] for part in ("shard", "segment_1", "apply"))
            assert one["step"]["ts"] <= shard["ts"] and end(shard) <= first["ts"]
            assert end(joined) <= apply["ts"] and end(apply) <= end(one["step"])
        last = end(one["step"])


@pytest.mark.slow
def test_bytes_and_bandwidth(recorded):
    """The bytes are those that `explain` tells, and algbw is they over the span's time."""
    model, path, _ = recorded
    explained = sum(cut.size_bytes for cut in model.towers.explain().cuts)
    for spans in spans_of(path).values():
        joined = spans["all-reduce/1.1"]
        assert sum(span["args"]["bytes"] for span in joined) == explained
        for span in joined:
            rate = span["args"]["bytes"] / 1e9 / (span["dur"] / 1e6)
            assert span["args"]["algbw GB/s"] == pytest.approx(rate, rel=1e-3)


def test_profiler_shows_the_same_spans(recorded):
    """What TensorBoard's profiler recorded holds each of the spans by its name, with a time of its own."""
    _, path, profile = recorded
    space = xplane_pb2.XSpace()
    space.ParseFromString(profile.read_bytes())
    shown = collections.defaultdict(list)
    for plane in space.planes:
        for event in (event for line in plane.lines for event in line.events):
            shown[plane.event_metadata[event.metadata_id].name].append(event.duration_ps / 1e6)
    for name in spans_of(path)[5]:
        assert max(shown[name], default=0) > 0, name


@pytest.mark.slow
def test_no_node_where_nobody_watches(recorded):
    """The graph of the other steps is what it is without a Timeline, node for node."""
    model, _, _ = recorded
    never = on_towers(mlp, 3)
    for trained in (model, never):
        fit(trained, epochs=1)

    def nodes(trained):
        graphs = trained.train_function.__self__.step._functions
        (found,) = [found for found in graphs.values() if found.meter is None]
        definition = found.graph.graph.as_graph_def()
        places = {node.name: str(i) for i, node in enumerate(definition.node)}  # some are named by numbers
        return [
            (node.op, [re.sub(r"[^^:]+", lambda found: places.get(found[0], found[0]), i) for i in node.input])
            for node in definition.node
        ]

    assert nodes(model) == nodes(never)
    assert not any("NcclsyncTimestamp" in op for op, _ in nodes(model))


@pytest.mark.slow
def test_several_steps_per_execution_and_several_fits(tmp_path):
    """Steps are told apart within a call and counted over fits; what one call makes beyond is left out.

    With gradient accumulation, gradients are joined in every second step only: so says the trace.
    """
    timeline = Timeline(tmp_path / "trace.json", steps=(3, 6))
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model = on_towers(lambda: mlp(optimizer, steps_per_execution=3), 2)
    # A device that does not exist, in whose place TensorFlow takes CPU:0: one to be copied to.
    model.towers.session.layout = dataclasses.replace(model.towers.layout, devices=("CPU:0", "CPU:1"))
    fit(model, timeline, epochs=1)
    assert sorted(spans_of(tmp_path / "trace.json")) == [3, 4]
    fit(model, timeline, epochs=1)
    steps = spans_of(tmp_path / "trace.json")
    assert sorted(steps) == [3, 4, 5, 6]
    last = 0.0
    for step in (3, 4, 5, 6):
        assert "tower_0/copy_to_device" not in steps[step]
        shard, copy, segment = (steps[step][f"tower_1/{part}"][0] for part in ("shard", "copy_to_device", "segment_1"))
        assert end(shard) <= copy["ts"] and end(copy) <= segment["ts"]
        assert all(last <= span["ts"] for (span, *_) in steps[step].values())
        (whole,) = steps[step]["step"]
        last = end(whole)
    sizes = [
        sum(s["args"]["bytes"] for name, (s,) in steps[step].items() if name.startswith("all-reduce"))
        for step in (3, 4, 5, 6)
    ]
    assert sizes[0] == sizes[2] < sizes[1] == sizes[3]


@pytest.fixture(params=["nccl", "as_on_gpus"])
def packing(request, monkeypatch):
    """Towers that pack what they send: joined by the stand-in NCCL, or on the CPU without host passes."""
    if request.param == "as_on_gpus":
        request.getfixturevalue("as_on_gpus")
        return {}
    request.getfixturevalue("standin")
    monkeypatch.setattr(NcclCommunicator, "memory", {**CUDA, **HOST})
    return {"backend": "nccl"}


@pytest.mark.slow(but=1)
def test_pack_and_unpack(packing, tmp_path):
    """Each within its tower's segment; and a step that nobody watches has no timestamps in its segments."""
    model = on_towers(mlp, 2, **packing)
    fit(model, Timeline(tmp_path / "trace.json", steps=(1, 4 if packing else 3)), epochs=1)
    for spans in spans_of(tmp_path / "trace.json").values():
        for i in range(2):
            for part, outer in (("pack", "segment_1"), ("unpack", "apply")):
                (inner,), (whole,) = spans[f"tower_{i}/{part}"], spans[f"tower_{i}/{outer}"]
                assert whole["ts"] <= inner["ts"] and end(inner) <= end(whole)
                assert inner["tid"] == whole["tid"]
    metered = {
        key.program.watched: any(
            op.type == "NcclsyncTimestamp"
            for segment in found.program.segments
            for op in segment.function.graph.get_operations()
        )
        for key, found in model.train_function.__self__.step._functions.items()
    }
    assert metered == ({True: True} if packing else {True: True, False: False})
    model.towers.close()


@pytest.mark.slow
def test_one_tower(tmp_path):
    """It is watched as well; what plain Keras runs is in its place again behind the last step."""
    model, plain = on_towers(mlp, 1), mlp()
    fit(plain)
    fit(model, Timeline(tmp_path / "trace.json", steps=(1, 3)))
    assert set(spans_of(tmp_path / "trace.json")[3]) == {
        *(f"tower_0/{part}" for part in ("shard", "segment_1", "apply")),
        "step",
        "wait_for_data",
    }
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert not hasattr(model.train_function, "__self__")


class Wrapping(keras.Sequential):
    """Wraps what Keras makes, as its guide on own training loops allows."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            made = self.train_function
            self.train_function = lambda iterator: made(iterator)
        return self.train_function


def wrapping():
    model = Wrapping([keras.Input((12,)), keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("build", [mlp, wrapping])
def test_two_watchers_of_one_tower(tmp_path, build):
    """Both see the steps, and leave plain Keras' function where it was, also if the model's class has wrapped it."""
    model = on_towers(build, 1)
    fit(model)
    before = model.train_function
    throughput = Throughput()
    history = fit(model, throughput, Timeline(tmp_path / "trace.json"))
    assert model.train_function is before
    assert "samples_per_second" in history.history and (tmp_path / "trace.json").exists()


class Stopping(keras.callbacks.Callback):
    """Ends `fit` by an error of its own, between two steps."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            raise RuntimeError("mine")


@pytest.mark.slow
def test_failing_fit_leaves_what_there_is(tmp_path):
    """The steps before it, and what had ended of it; the next fit is not watched."""
    bad = Y.copy()
    bad[25] = 99
    model, timeline = on_towers(lambda: mlp(metrics=[]), 3), Timeline(tmp_path / "trace.json")
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        fit(model, timeline, y=bad)
    steps = spans_of(tmp_path / "trace.json")
    assert len(steps[1]["step"]) == 1 and "tower_0/apply" in steps[1]
    assert len(steps[2]["wait_for_data"]) == 1 and "tower_0/apply" not in steps[2]
    fit(model, epochs=1)
    assert [key.program.watched for key in model.train_function.__self__.step._functions] == [True, False]

    # Of an error elsewhere `fit` tells no callback: the trace is written with the end of the Timeline itself.
    timeline = Timeline(tmp_path / "other.json")
    with pytest.raises(RuntimeError, match="mine"):
        fit(model, Stopping(), timeline)
    del timeline
    gc.collect()
    assert sorted(spans_of(tmp_path / "other.json")) == [1, 2]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((5,), TypeError, "Expected path to be a path. Received: 5"),
        (("t.json", (0, 3)), ValueError, r"Expected steps to be \(first, last\), from 1 on. Received: \(0, 3\)"),
        (("t.json", (3, 2)), ValueError, r"Received: \(3, 2\)"),
        (("t.json", 5), ValueError, "Received: 5"),
    ],
)
def test_bad_arguments(arguments, error, message):
    """They are told when the callback is made."""
    with pytest.raises(error, match=message):
        Timeline(*arguments)


def test_refusals_before_training(tmp_path):
    """A file that cannot be written, a model without towers or with closed ones, a step without a graph."""
    model, alone = on_towers(mlp, 2), mlp()
    eager = on_towers(lambda: mlp(run_eagerly=True), 2)
    closed = on_towers(mlp, 2)
    closed.towers.close()
    good = tmp_path / "trace.json"
    for trained, callback, message in (
        (model, Timeline(tmp_path / "none" / "trace.json"), "file that can be written for Timeline. Received"),
        (model, Timeline(tmp_path), "is a folder"),
        (alone, Timeline(good), "model of an @nccl_parallel factory for Timeline. Received: <Sequential"),
        (alone, Throughput(), "model of an @nccl_parallel factory for Throughput"),
        (eager, Timeline(good), "a step that is traced for Timeline. Received: run_eagerly=True"),
        (closed, Timeline(good), "towers that were closed"),
    ):
        before = trained.get_weights()
        with pytest.raises((ValueError, ncclsync.NcclSyncError), match=message):
            fit(trained, callback)
        for one, other in zip(before, trained.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    assert not good.exists()


@pytest.mark.slow
def test_a_trace_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    """A disk that is full by then is logged; training goes on, and the next call tries again."""
    file = tmp_path / "trace.json"
    file.write_text("older")
    model, alone = on_towers(mlp, 2), mlp()
    timeline = Timeline(file, steps=(1, 2))
    write = pathlib.Path.write_text

    def full(path, *arguments, **options):
        write(path, "half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level("ERROR", logger="ncclsync"):
        patched.setattr(pathlib.Path, "write_text", full)
        fit(model, timeline)
        fit(alone)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    told = [record for record in caplog.records if record.name == "ncclsync"]
    assert told and all(str(file) in record.getMessage() for record in told)
    assert "No space left" in told[0].exc_text
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "older"
    fit(model, timeline, epochs=1)
    assert sorted(spans_of(file)) == [1, 2]


def test_flushed_before_it_takes_the_name(tmp_path, disk_events):
    """The trace and what is saved when a collective has failed: the file first, then the folder's names."""
    model = on_towers(mlp, 2)
    fit(model, Timeline(tmp_path / "trace.json", steps=(1, 1)), epochs=1)
    names = ["trace.json", "model.keras", "model.weights.h5"]
    for name in names[1:]:
        keras_model._save(weakref.ref(model), tmp_path / name)
    assert disk_events == [
        event
        for name in names
        for event in (("fsync", f"part-{name}"), ("replace", f"part-{name}"), ("fsync", tmp_path.name))
    ]
    for name in names:
        assert (tmp_path / name).stat().st_size
