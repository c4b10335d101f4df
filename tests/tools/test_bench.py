"""`python -m ncclsync bench`: the commands run, a wrong result is counted, and the JSON keeps its schema.

Nothing here depends on how long anything takes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from ncclsync import Health, nccl_parallel
from ncclsync.communicator import CpuCommunicator
from ncclsync.tools.bench import all_reduce, commands, fit, on_gpus, training
from ncclsync.tools.bench.all_reduce import HostReducer, NcclReducer, pattern
from ncclsync.tools.bench.fit import StepParts
from ncclsync.tools.bench.models import MODELS, rows_of
from ncclsync.tools.bench.results import SCHEMA, Result, Row, size_text, time_text
from ncclsync.tools.bench.turns import BenchError, Side, Spread, missing_mpi, ratio, take_turns
from ncclsync.tools.cli import main

VIRTUAL_GPUS = pathlib.Path(__file__).parents[1] / "virtual_gpus" / "run.py"
SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "bench.sh"
SPREAD = {"median", "q1", "q3", "samples"}


class WrongCommunicator(CpuCommunicator):
    """Reduces, but for three elements of the last rank's result."""

    def all_reduce(self, sends, recvs, *arguments):
        super().all_reduce(sends, recvs, *arguments)
        recvs[-1][2:5] += 1


class IdleCommunicator(CpuCommunicator):
    """A collective that returns without having happened."""

    def all_reduce(self, sends, recvs, *arguments):
        pass


@pytest.mark.parametrize(
    ("communicator", "wrong"), [(CpuCommunicator, 0), (WrongCommunicator, 3), (IdleCommunicator, 300)]
)
def test_wrong_elements_are_counted(communicator, wrong):
    """A planted wrong sum is counted by element, also after correct ones have filled the results."""
    reducer = HostReducer(communicator(3))
    for library in reducer.libraries:
        assert reducer.ask("seconds", library=library, count=100, steps=2)["seconds"] > 0
    assert reducer.ask("wrong", library="ncclsync", count=100) == {"wrong": wrong}
    assert reducer.wrong("memcpy", 100) == 0
    reducer.close()


def test_pattern_is_exact():
    """Ranks have inputs of their own, whose sum is not rounded."""
    inputs = [pattern(rank, 50) for rank in range(8)]
    assert len({one.tobytes() for one in inputs}) == 8
    assert {one.dtype.name for one in inputs} == {"float32"}
    np.testing.assert_array_equal(sum(inputs), sum(one.astype("int64") for one in inputs))


def test_memcpy_on_threads():
    """Where there are enough bytes the copy is shared among threads, and is complete."""
    reducer = HostReducer(CpuCommunicator(2))
    assert reducer.wrong("memcpy", 1 << 20) == 0
    reducer.close()


def test_nccl_needs_gpus():
    """Told before anything is timed."""
    with pytest.raises(BenchError, match=r"Expected 64 GPUs that TensorFlow sees. Received: \d+"):
        NcclReducer(64)


def test_missing_peers_are_told(monkeypatch):
    """A peer that is not installed leaves one line."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = argparse.Namespace(against=["mpi"], towers=[2], sizes=[4], rounds=1)
    found = all_reduce.bench_all_reduce(given)
    assert [row.side for row in found.rows] == ["ncclsync", "memcpy"]
    (note,) = found.notes
    assert note.startswith("mpi is left out") and "mpi4py" in note and "\n" not in note


def test_spread_and_ratio():
    """Quartiles; ratios are those of the same round."""
    assert Spread.of([1.0]) == Spread(1.0, 1.0, 1.0, 1)
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == Spread(3.0, 2.5, 3.5, 3)


def test_turns_are_taken_round_by_round():
    """Each round calls each timer once and begins with another one; measurements keep their round."""
    called = []

    def timer(name):
        return lambda: called.append(name) or len(called)

    found = take_turns({name: timer(name) for name in "abc"}, 3, lambda text: None)
    assert "".join(called) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_texts():
    """One unit for a time and its quartiles."""
    assert time_text(Spread(0.00231, 0.00228, 0.0024, 5)) == "2.31 ms (2.28–2.40)"
    assert [size_text(size) for size in (4, 4096, 25 << 20)] == ["4 B", "4 KiB", "25 MiB"]


def test_names_are_those_of_the_models():
    """The command line, which knows them without TensorFlow, has no others."""
    assert tuple(MODELS) == training.MODEL_NAMES


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", MODELS)
def test_models_fit_their_data(name):
    """Every model takes its data, whole batches of them, and tells as many classes as there are."""
    count = training.BATCH_SIZES[name]
    x, y = MODELS[name].data(2 * count)
    assert len(y) == 2 * count and {one.shape[0] for one in tf.nest.flatten(x)} == {2 * count}
    model = MODELS[name].build()
    rows = tf.nest.flatten(rows_of(x, 3, 5))
    assert [one.shape for one in model.inputs] == [(None, *row.shape[1:]) for row in rows]
    assert [one.dtype for one in model.inputs] == [row.dtype for row in rows] and {row.shape[0] for row in rows} == {2}
    of_labels = y.shape[1:] if y.dtype == "float32" else (*y.shape[1:], y.max() + 1)
    assert model.output_shape == (None, *of_labels)
    assert np.all(np.isfinite(model.evaluate(x, y, batch_size=count, steps=1, verbose=0)))


def test_parts_of_a_step_leave_out_what_they_say():
    """The whole keeps towers together; without exchanges they part; without the update nothing changes."""

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    rng = np.random.default_rng(0)
    batch = tf.constant(rng.random((4, 3), "float32")), tf.constant(rng.random((4, 2), "float32"))
    model = nccl_parallel(towers=2, health=Health(check_every=100))(build)()
    with model.towers:
        parts = StepParts(model, batch)
        start = model.get_weights()
        assert parts.seconds("compute", 2) > 0
        program, _ = parts._variants["compute"].step.last()
        assert not program.segments[-1].written
        np.testing.assert_array_equal(np.concatenate([w.ravel() for w in start]), flat(model))
        assert parts.seconds("whole", 2) > 0
        assert model.towers.divergence() == 0.0
        assert not np.array_equal(np.concatenate([w.ravel() for w in start]), flat(model))
        assert parts.seconds("local", 2) > 0
        assert model.towers.divergence() > 0.0


def test_time_between_epochs_is_no_steps(monkeypatch):
    """Three steps of a second each, with an epoch's end of a minute between, take a second each."""
    now, answers = [0.0], []
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 2 * now[0])
    asked = iter([{"do": "fit", "steps": 3}, {"do": "fit", "steps": 1}, {"do": "fit", "steps": 1}])
    requests = types.SimpleNamespace(next=lambda: next(asked), answer=lambda **told: answers.append(told))
    monkeypatch.setattr(fit, "time", clock)
    model = keras.Sequential()
    model.compile(jit_compile=True)
    turns = fit._Turns(requests, model, None)
    turns.on_train_begin()
    for ends in (False, True, True, False):
        turns.on_train_batch_begin(0)
        now[0] += 1
        turns.on_train_batch_end(0)
        if ends:
            turns.on_epoch_end(0)
            now[0] += 60
    assert answers == [{"seconds": 1.0, "cpu_seconds": 2.0, "xla": True}] * 2


def flat(model):
    """All weights in one array."""
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.slow
def test_a_failed_process_is_told():
    """Its error is the driver's; so is its death."""
    with (
        Side("a name", "all_reduce.serve_mpi", {"unknown": 1}) as side,
        pytest.raises(BenchError, match="a name: TypeError"),
    ):
        side.ask("prepare")
    with Side("a name", "fit.unknown", {}) as side, pytest.raises(BenchError, match="a name: AttributeError"):
        side.ask("prepare")
    dead = pytest.raises(BenchError, match="a name: the process ended with code 1")
    with Side("a name", "all_reduce.serve_mpi", {}, launcher=["false"]) as side, dead:
        side.ask("prepare")


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (3, 1)])
def test_exit_code_tells_of_wrong_elements(monkeypatch, capsys, wrong, code):
    """A script that measures learns that what it measured is wrong."""
    case = {"towers": 2, "size_bytes": 16, "count": 4, "dtype": "float32"}
    row = Row(case, "ncclsync", Spread.of([1.0]), {}, {"wrong": wrong})
    result = Result("all-reduce", "s", (row,), ("A note.",))
    monkeypatch.setattr(all_reduce, "bench_all_reduce", lambda given: result)
    assert main(["bench", "all-reduce"]) == code
    out = capsys.readouterr().out
    assert "A note." in out and re.search(rf"float32 +ncclsync +1.00 s .* {wrong}$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("all-reduce --sizes 4furlongs", "expected a size such as 4KiB or 25MiB, received '4furlongs'"),
        ("all-reduce --towers 1", "expected a whole number from 2, received '1'"),
        ("start --towers none", "expected a whole number from 1, received 'none'"),
        ("step --against nobody", "expected one of mirrored, single, shard, sharded, processes, received 'nobody'"),
        ("feed --data none", "expected one of numpy, tf.data, generator, received 'none'"),  # it would measure nothing
        ("step --model gpt", f"expected one of {', '.join(training.MODEL_NAMES)}, received 'gpt'"),
        ("", "the following arguments are required: BENCHMARK"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    """Told in one line, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    """Told before anything is measured; one that can be is left as it is until then."""
    measured, file = [], tmp_path / "it.json"

    def measure(given):
        measured.append(file.exists())
        return Result("all-reduce", "s", ())

    monkeypatch.setattr(all_reduce, "bench_all_reduce", measure)
    for wrong in (tmp_path, tmp_path / "none" / "it.json"):
        assert main(["bench", "all-reduce", "--json", str(wrong)]) == 2
        assert f"Expected a file that can be written for --json. Received: {wrong} (" in capsys.readouterr().err
    assert not measured
    assert main(["bench", "all-reduce", "--json", str(file)]) == 0
    assert measured == [False] and file.exists()


def test_help_needs_no_tensorflow():
    """The command line answers before TensorFlow is imported, and explains its columns."""
    code = (
        "import sys\nfrom ncclsync.tools.cli import main\n"
        "try:\n    main(['bench', 'step', '--help'])\nexcept SystemExit as end:\n    print(end.code)\n"
        "print(sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout.endswith("0\n[]\n"), done.stdout + done.stderr
    assert "communicate: what the exchanges between towers add" in " ".join(done.stdout.split())


def test_commands_of_the_example_are_understood():
    """Every command of examples/bench.sh parses; it runs all benchmarks."""
    parser = argparse.ArgumentParser()
    commands.add_bench(parser.add_subparsers())
    lines = [line for line in SCRIPT.read_text().splitlines() if line.startswith("python -m ncclsync")]
    named = [parser.parse_args(shlex.split(line)[3:]).benchmark for line in lines]
    assert sorted(named) == ["all-reduce", "feed", "memory", "start", "step"]


def run_bench(tmp_path, *arguments, gpus=()):
    """Run a benchmark as a user does; return its JSON, checked for what all of them have, and its table.

    gpus: options of virtual GPUs, if it runs on such.
    """
    python = [sys.executable, VIRTUAL_GPUS, *gpus] if gpus else [sys.executable]
    command = ["-m", "ncclsync", "bench", *arguments, "--json", "it.json"]
    done = subprocess.run([*python, *command], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    if gpus and "virtual GPUs need a C++ compiler" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 1 of 1: " in done.stderr
    found = json.loads((tmp_path / "it.json").read_text())
    keys = {"schema", "benchmark", "command", "date", "machine", "unit", "rows", "notes"}
    assert set(found) == keys and found["schema"] == SCHEMA == "ncclsync.tools.bench/1"
    assert found["command"] == ["python", "-m", "ncclsync", *command[2:]]
    assert {"processor", "cores", "memory_bytes", "versions", "load_1_min"} <= set(found["machine"])
    for row in found["rows"]:
        assert set(row) == {"case", "side", "value", "ratios", "more"}
        assert set(row["value"]) == SPREAD and row["value"]["median"] > 0
        assert all(set(spread) == SPREAD for spread in row["ratios"].values())
    return found, done.stdout


@pytest.mark.slow
def test_all_reduce(tmp_path):
    """All libraries that are always there: right results, bandwidths by nccl-tests' formulas."""
    arguments = ("--towers", "3", "--sizes", "4B,4KiB", "--rounds", "1", "--against", "none")
    found, table = run_bench(tmp_path, "all-reduce", *arguments)
    assert [row["side"] for row in found["rows"]] == ["ncclsync", "memcpy"] * 2
    for row in found["rows"]:
        assert row["more"]["wrong"] == 0
        if row["side"] != "memcpy":
            towers, size, seconds = row["case"]["towers"], row["case"]["size_bytes"], row["value"]["median"]
            assert row["more"]["algbw_gb_s"] == pytest.approx(size / seconds / 1e9)
            assert row["more"]["busbw_gb_s"] == pytest.approx(size / seconds / 1e9 * 2 * (towers - 1) / towers)
        assert set(row["ratios"]) == {"memcpy", "ncclsync"} - {row["side"]}
    assert all(word in table for word in ("algbw", "busbw", "#wrong", "4 KiB"))


@pytest.mark.slow
def test_exchange(tmp_path):
    """On virtual GPUs: exchanges and none at all, with right results; a tower's part of the host's time."""
    arguments = ("exchange", "--towers", "2", "--rounds", "1")
    found, table = run_bench(tmp_path, *arguments, gpus=["--gpus", "2"])
    assert [row["side"] for row in found["rows"]] == ["ops", "empty graph"]
    assert all(row["more"]["wrong"] == 0 and row["case"]["towers"] == 2 for row in found["rows"])
    assert all(set(row["ratios"]) == {"ops", "empty graph"} - {row["side"]} for row in found["rows"])
    assert "host time of an exchange" in table


def test_exchange_counts_for_all_processes(monkeypatch):
    """Process 0, which shows the result and ends with its exit code, has the wrong elements of the others, too."""
    peers = types.SimpleNamespace(exchange=lambda own, what, timeout_s: [own, {"wrong": 3}])
    communicator = types.SimpleNamespace(ranks=[0], peers=peers)
    towers = types.SimpleNamespace(communicator=communicator, devices=["CPU:0"])
    right = tf.ones([1024])
    monkeypatch.setattr(on_gpus, "check_gpus", lambda towers: 1)
    monkeypatch.setattr(on_gpus, "Towers", lambda here: contextlib.nullcontext(towers))
    monkeypatch.setattr(on_gpus.group_ops, "group_exchange", lambda *_: [[right]])
    result = on_gpus.bench_exchange(argparse.Namespace(towers=[2], rounds=1))
    assert [row.more["wrong"] for row in result.rows] == [3, 3]


def test_exchange_needs_gpus(capsys):
    """Told in one line, with what to do about it."""
    assert main(["bench", "exchange", "--towers", "64"]) == 2
    errors = capsys.readouterr().err
    assert "Expected 64 GPUs that TensorFlow sees. Received: " in errors and "tests/virtual_gpus/run.py" in errors


@pytest.mark.slow
@pytest.mark.parametrize("xla", [(), ("--xla",)])
def test_overlap(tmp_path, xla):
    """On virtual GPUs: five buckets; no time is below what kernels and link take; the host runs ahead."""
    gpus = ["--gpus", "2", "--ahead", "--kernel-ms", "4", "--link", "0.1,0"]
    found, table = run_bench(tmp_path, "overlap", "--towers", "2", "--link", "0.1,0", "--rounds", "1", *xla, gpus=gpus)
    (row,) = found["rows"]
    more = row["more"]
    assert len(more["bucket_bytes"]) == 5
    assert sum(more["bucket_bytes"]) == 4 * (11 * 256**2 + 128 * 256 + 4 * 128**2 + 2)
    assert min(more["without_s"]["median"], more["ended_s"]["median"], row["value"]["median"]) > 4e-3 * (16 + 31)
    assert more["exchange_s"]["median"] > sum(more["bucket_bytes"]) / 0.1e9
    assert more["called_s"]["median"] < more["ended_s"]["median"] / 2
    assert more["predicted_s"] > more["without_s"]["median"]
    assert "hidden" in table


@pytest.mark.slow
def test_step(tmp_path):
    """Two libraries take turns inside fit; the parts of ncclsync's step add up to it."""
    found, table = run_bench(
        tmp_path,
        *("step", "--model", "mlp", "--towers", "2", "--rounds", "1"),
        *("--against", "mirrored,shard", "--watched", "--shards", "2x"),
    )
    rows = {row["side"]: row for row in found["rows"]}
    for name in ("2 shards a tower", "watched"):
        other = rows.pop(name)
        assert set(other["ratios"]) == {"ncclsync"} and name in table
    assert list(rows) == ["ncclsync", "mirrored", "shard"]
    for side, row in rows.items():
        assert row["case"] == {"model": "mlp", "towers": 2, "batch_size": 256}
        samples = 128 if side == "shard" else 256
        assert row["more"]["samples_per_s"] == pytest.approx(samples / row["value"]["median"])
        assert 0 < row["more"]["cpu_s"]["median"] < (os.cpu_count() + 1) * row["value"]["median"]
    ours = rows["ncclsync"]
    assert set(ours["ratios"]) == {"mirrored", "shard"}
    parts = [ours["more"][f"{part}_s"]["median"] for part in ("compute", "communicate", "apply", "feed")]
    assert sum(parts) == pytest.approx(ours["value"]["median"])
    assert "communicate" in table


@pytest.mark.slow
def test_step_by_cpu_time(tmp_path):
    """Seconds of cores beside one device's, of a sparse batch."""
    found, table = run_bench(tmp_path, "step", "--cpu", "--model", "sparse", "--towers", "2", "--rounds", "1")
    ours, single = found["rows"]
    assert (ours["side"], single["side"]) == ("ncclsync", "single") and "cpu of single" in table
    medians = [row["more"]["cpu_s"]["median"] for row in (ours, single)]
    assert ours["more"]["cpu_of_single"]["median"] == pytest.approx(medians[0] / medians[1])


def test_sides_by_cpu_time(monkeypatch):
    """An op is on one thread on both sides, and both train on one batch that is in memory."""
    started = []

    class Told:
        def __init__(self, name, kind, arguments, launcher=(), environment=None):
            started.append((arguments["library"], arguments["feed"], arguments["batch_size"], environment))
            self.seconds, self.cpu_seconds = {"ncclsync": (2.0, 5.0), "single": (4.0, 4.0)}[arguments["library"]]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ask(self, do, steps):
            assert do == "fit"  # no variants
            return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "xla": True}

    monkeypatch.setattr(training, "Side", Told)
    asked = {"model": ["mlp"], "towers": 4, "against": ["mirrored"], "split": True}
    asked |= {"watched": False, "shards": [], "xla": False}
    found = training.bench_step(argparse.Namespace(**asked, rounds=1, cpu=True))
    one_thread = {"TF_NUM_INTRAOP_THREADS": "1"}
    many = training._MANY_ROWS["mlp"]  # of which the arithmetic outweighs what each tower does whatever the batch
    assert started == [("ncclsync", "constant", many, one_thread), ("single", "constant", many, one_thread)]
    assert found.rows[0].case["batch_size"] == many
    assert found.rows[0].more["cpu_of_single"] == Spread.of([1.25])
    assert found.notes == ("mlp: XLA compiles the steps of ncclsync, single.",)
    started.clear()
    training.bench_step(argparse.Namespace(**{**asked, "against": ["single"], "split": False}, rounds=1, cpu=False))
    assert started == [(side, "tf.data", training.BATCH_SIZES["mlp"], None) for side in ("ncclsync", "single")]


def test_towers_that_processes_cannot_share(capsys, monkeypatch):
    """Said in one line, before anything is started."""
    monkeypatch.setattr(training, "Side", None)
    assert main(["bench", "step", "--towers", "3", "--against", "processes"]) == 2
    assert "Expected towers that 2 processes can share. Received: --towers 3" in capsys.readouterr().err


@pytest.mark.slow
def test_step_of_processes(tmp_path):
    """The same towers as two processes, in turns with one; the time is the later one's, of cores the sum."""
    pytest.importorskip("mpi4py", reason="pip install -e '.[hosts]'")
    if missing_mpi():
        pytest.skip(missing_mpi())
    arguments = ("step", "--model", "mlp", "--towers", "2", "--rounds", "1", "--against", "processes", "--no-split")
    found, table = run_bench(tmp_path, *arguments)
    ours, several = found["rows"]
    assert (ours["side"], several["side"]) == ("ncclsync", "processes")
    assert several["ratios"]["ncclsync"]["median"] == pytest.approx(1 / ours["ratios"]["processes"]["median"])
    assert several["more"]["cpu_s"]["median"] > 0 and "÷ ncclsync" in " ".join(table.split())


@pytest.mark.slow
def test_start(tmp_path):
    """A fresh process for each number of towers; beside one tower."""
    found, _ = run_bench(
        tmp_path, *("start", "--model", "mlp", "--towers", "1,2", "--rounds", "1", "--against", "none")
    )
    assert [row["case"]["towers"] for row in found["rows"]] == [1, 2]
    assert all(0 < row["more"]["build_seconds"]["median"] < row["value"]["median"] for row in found["rows"])
    assert set(found["rows"][1]["ratios"]) == {"one tower"}


@pytest.mark.slow
def test_start_ends_with_the_step():
    """Not with `fit`, which may wait for TensorFlow's thread that tunes datasets. By XLA if that is asked for."""

    class Ended(Exception):
        pass

    class Asked:
        def next(self):
            return {"do": "go"}

        def answer(self, **values):
            self.values = values

        def end(self):
            raise Ended

    asked = Asked()
    with pytest.raises(Ended):
        fit.first_step(asked, "ncclsync", "mlp", 2, 256, xla=True)
    assert asked.values["xla"] and 0 < asked.values["build_seconds"] < asked.values["seconds"]


@pytest.mark.slow
def test_feed(tmp_path):
    """The kinds of data that are asked for, beside the ceiling."""
    arguments = ("feed", "--towers", "2", "--rounds", "1", "--data", "generator", "--against", "single")
    found, _ = run_bench(tmp_path, *arguments)
    rows = found["rows"]
    assert [row["side"] for row in rows] == ["constant", "generator", "single, constant", "single, generator"]
    for i, row in enumerate(rows):
        ceiling = rows[i // 2 * 2]["value"]["median"]
        assert row["more"]["of_ceiling"]["median"] == pytest.approx(ceiling / row["value"]["median"])


@pytest.mark.slow
def test_memory(tmp_path):
    """Peaks, and what one more tower needs: its weights and its optimizer state."""
    found, _ = run_bench(
        tmp_path, *("memory", "--model", "mlp", "--towers", "1,2", "--rounds", "1", "--against", "none")
    )
    assert found["unit"] == "B"
    one, two = found["rows"]
    weights = 784 * 256 + 256 + 2 * (256 * 256 + 256) + 2570
    assert 12 * weights < one["more"]["state_bytes"]["median"] < 12 * weights + 100  # Adam: two more each
    needed = one["value"]["median"] + two["more"]["state_bytes"]["median"]
    assert two["more"]["of_needed"]["median"] == pytest.approx(two["value"]["median"] / needed)


def tell_peaks(monkeypatch, peak_of):
    """Have `bench memory` measure what `peak_of(arguments)` says, in place of processes."""

    class Told:
        def __init__(self, name, kind, arguments):
            self.peak = peak_of(arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ask(self, do):
            return {"bytes": self.peak, "imported_bytes": 1, "state_bytes": 10, "xla": False}

    monkeypatch.setattr(training, "Side", Told)


def test_memory_beyond_activations(monkeypatch):
    """What 4 towers take beyond one tower's peak and three copies, by what the rows of one tower take."""
    peaks = {("ncclsync", 1, 64): 100, ("ncclsync", 4, 64): 136, ("ncclsync", 1, 1): 60, ("ncclsync", 4, 4): 91}

    tell_peaks(monkeypatch, lambda of: peaks[of["library"], of["towers"], of["rows"]])
    asked = {"model": ["language"], "towers": [1, 4], "against": [], "shards": [], "batch_size": None, "rounds": 1}
    given = argparse.Namespace(**asked, benchmark="memory", activations=True)
    rows = {(row.side, row.case["towers"]): row for row in training.bench_memory(given).rows}
    assert rows["ncclsync", 4].more["beyond"] == Spread.of([(136 - 100 - 3 * 10) / (100 - 60)])
    assert [key for key, row in rows.items() if "beyond" in row.more] == [("ncclsync", 4)]


def test_share_of_the_rows(monkeypatch):
    """What shards leave of what the rows take: both peaks less that of one row for each tower."""
    peaks = {(None, 64 * 128): 300, (16, 64 * 128): 150, (None, 2): 100}

    tell_peaks(monkeypatch, lambda of: peaks[of.get("shards"), of["rows"]])
    asked = {"model": ["cnn"], "towers": [2], "against": [], "shards": [8], "batch_size": None, "rounds": 1}
    given = argparse.Namespace(**asked, benchmark="memory", activations=False)
    rows = {row.side: row.more for row in training.bench_memory(given).rows}
    assert rows["8 shards a tower"]["of_rows"] == Spread.of([(150 - 100) / (300 - 100)])
    assert [side for side, more in rows.items() if "of_rows" in more] == ["8 shards a tower"]


@pytest.mark.slow
def test_memory_of_shards(tmp_path):
    """What the rows take is the peak less that of one row; shards one after another take less of it."""
    options = ["--model", "cnn", "--towers", "1", "--rounds", "1", "--against", "none"]
    found, printed = run_bench(tmp_path, "memory", *options, "--shards", "8x")
    whole, shards, one_row = found["rows"]
    assert [row["side"] for row in found["rows"]] == ["ncclsync", "8 shards a tower", "one row a tower"]
    peaks = [row["value"]["median"] for row in (whole, shards, one_row)]
    of_rows = shards["more"]["of_rows"]["median"]
    assert of_rows == pytest.approx((peaks[1] - peaks[2]) / (peaks[0] - peaks[2]))
    assert of_rows < 0.6
    assert "of rows" in printed
