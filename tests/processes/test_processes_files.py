"""Several processes: process 0 writes files and the screen, all see the same, and a killed run goes on bit for bit."""

import contextlib
import csv
import itertools
import json
import os
import random
import subprocess
import sys
import time
import zipfile

import keras
import numpy as np
import psutil
import pytest
from processes import LAUNCHERS, SCRIPTS, environment
from thorough import some

PROGRAMS = (
    "loading",
    "own_list",
    "saving",
    "watching",
    "batches",
    "accumulating",
    "dividing",
    "two_models",
    "resuming",
    "damaged",
)
LIMIT_S = 30  # in which all processes end when one has


def run_alone(script, *arguments, timeout_s=300):
    """Run a script as one process, to its end."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=timeout_s)


KILLS = int(os.environ.get("NCCLSYNC_KILLS", "2"))  # in the test of kills


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that runs programs on so many towers of one process, and returns the numbers; once each."""
    folder, known = tmp_path_factory.mktemp("alone"), {}

    def run(towers, names):
        if (towers, names) not in known:
            out = folder / str(len(known))
            run_alone("files.py", out, towers, *names)
            known[towers, names] = dict(np.load(out / "0.npz"))
        return known[towers, names]

    return run


def shown(text):
    """The lines of a screen that somebody reads, without the times in them."""
    return [line for line in text.splitlines() if line.startswith(("Epoch ", "Restoring")) or "━" in line]


@pytest.mark.parametrize(
    "towers, names",
    [
        pytest.param("1,1", ("watching",), marks=pytest.mark.slow),
        pytest.param("2,1", PROGRAMS, marks=pytest.mark.slow),
        pytest.param("2,1,1", some(("loading", "own_list", "saving"), PROGRAMS), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_process_0_writes_and_all_see_the_same(mpirun, alone, tmp_path, towers, names):
    """Numbers are those of one process, bit for bit; files are whole, and process 0's alone.

    Of two towers only that both processes have the same ones: `test_programs` compares such with one process.
    """
    each = [int(number) for number in towers.split(",")]
    done = mpirun(len(each), "files.py", tmp_path, towers, *names, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = alone(sum(each), names) if sum(each) > 2 else dict(np.load(tmp_path / "0.npz"))
    for rank in range(len(each)):
        found = dict(np.load(tmp_path / f"{rank}.npz"))
        assert found.keys() == expected.keys()
        differing = [name for name, value in expected.items() if value.tobytes() != found[name].tobytes()]
        assert not differing, (rank, differing)
        assert rank == 0 or not [*(tmp_path / str(rank)).glob("*/*")]
    for name in names:
        if check := globals().get(f"check_{name}"):
            check(tmp_path / "0" / name, expected)
    if "watching" in names:
        epochs = len(expected["watching: watching history loss"])
        lines = shown(done.stdout)
        assert [line for line in lines if line.endswith("/9")] == [f"Epoch {i + 1}/9" for i in range(epochs)]
        for words, count in (("reducing learning rate", 3), ("early stopping", 1), ("finished saving", 2)):
            assert sum(words in line for line in lines) == count
        for bar in ("1/3", "1/8"):  # begun by evaluate, and by predict
            assert sum(bar in line for line in lines) == 1


def assert_holds(path, expected, prefix):
    """A file is a model that plain Keras loads, with these numbers."""
    with zipfile.ZipFile(path) as file:
        assert b"ncclsync" not in file.read("config.json")
    model = keras.models.load_model(path)
    for what, values in (("weight", model.weights), ("optimizer", model.optimizer.variables)):
        assert sum(key.startswith(f"{prefix} {what}") for key in expected) == len(values)
        for i, value in enumerate(values):
            np.testing.assert_array_equal(value, expected[f"{prefix} {what} {i}"])
    return model


def check_saving(folder, expected):
    """The three formats, of one moment; what was loaded of them."""
    model = assert_holds(folder / "model.keras", expected, "saving: saved")
    x = np.random.default_rng(1).normal(size=(5, 6)).astype("float32")
    for name in ("function.keras", "function.h5"):
        for one, other in zip(keras.models.load_model(folder / name).weights, model.weights, strict=True):
            np.testing.assert_array_equal(one, other)
    # A model that is on no towers is written by whoever saves it.
    assert keras.models.load_model(folder.parent.parent / "own1.keras").count_params() == 2
    exported = keras.layers.TFSMLayer(folder / "exported", call_endpoint="serve")
    np.testing.assert_allclose(exported(x), model(x), rtol=1e-5)
    for name in ("weight", "optimizer"):
        for other in ("loaded", "of a file", "before steps"):
            for i in itertools.count():
                key = f"saving: saved {name} {i}"
                if key not in expected:
                    break
                if (name, other, i) != ("optimizer", "before steps", 1):
                    np.testing.assert_array_equal(expected[key], expected[key.replace("saved", other)])
    model.load_weights(folder / "model.weights.h5")


def check_watching(folder, expected):
    """One line, event or checkpoint for each time that there was something to write."""
    epochs = len(expected["watching: watching history loss"])
    assert 3 < epochs < 9
    with open(folder / "log.csv") as file:
        rows = [float(row["loss"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(rows, expected["watching: watching history loss"])
    accuracy = expected["watching: watching history val_accuracy"]
    best = {f"{i + 1}.keras" for i in range(epochs) if accuracy[i] > max(accuracy[:i], default=-1)}
    assert {path.name for path in (folder / "best").iterdir()} == best
    for name in best:
        keras.models.load_model(folder / "best" / name)
    for name in ("train", "validation"):
        (events,) = (folder / "board" / name).glob("events.out.tfevents.*.v2")
        assert events.stat().st_size > 1000
    spans = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {one["args"].get("step") for one in spans if one["ph"] == "X"} == {2, 3, 4, 5}
    assert json.loads((folder / "kept" / "training_metadata.json").read_text())["epoch"] == epochs


def check_loading(folder, expected):
    """Each sample was loaded once in each pass, by all processes together."""
    assert expected["loading: loads"].tolist() == [2] * 61


def check_own_list(folder, expected):
    """What it has to write, and what others see."""
    with open(folder / "log.csv") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == pytest.approx(
            expected["own_list: own list history loss"]
        )
    assert_holds(folder / "last.keras", expected, "own_list: own list")


def check_accumulating(folder, expected):
    """Also what towers hold parts of is whole in the file."""
    model = assert_holds(folder / "between.keras", expected, "accumulating: between")
    model.load_weights(folder / "every.weights.h5")


def check_dividing(folder, expected):
    """What each tower holds a part of is whole in the file, and divided again when it was loaded."""
    assert_holds(folder / "between.keras", expected, "dividing: between")
    for key in expected:
        if key.startswith("dividing: went on again"):
            np.testing.assert_array_equal(expected[key], expected[key.replace(" again", "")])


def check_two_models(folder, expected):
    """One of them."""
    assert_holds(folder / "first.keras", expected, "two_models: first")


def check_resuming(folder, expected):
    """A run that was resumed ends as one that was not interrupted, and its backups are gone."""
    for key in expected:
        if key.startswith("resuming: ncclsync"):
            np.testing.assert_array_equal(expected[key], expected[key.replace("ncclsync", "whole")])
    assert not [*folder.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("who, way", [(0, "ends"), (2, "ends"), (2, "stops")])
def test_survivors_save(mpirun, tmp_path, who, way):
    """Whoever is left, and first, writes the emergency checkpoint, and what the program saves."""
    done = mpirun(3, "survivors.py", tmp_path, who, way)
    left = [rank for rank in range(3) if rank != who]
    numbers = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in left]
    model = keras.models.load_model(tmp_path / str(left[0]) / "own.keras")
    for rank in left:
        assert any(line.startswith(f"[{rank}]") and f"process {who} on" in line for line in done.stdout.splitlines())
        assert rank == left[0] or not [*(tmp_path / str(rank)).iterdir()]
    for i in range(2):
        model.load_weights(tmp_path / "emergency.weights.h5") if i else None
        for found in numbers:
            assert len(found) == len(model.get_weights())
            for j, value in enumerate(model.get_weights()):
                assert np.isfinite(value).all()
                np.testing.assert_array_equal(value, found[str(j)])


def processes_of(started):
    """The processes of our script that something has started."""
    with contextlib.suppress(psutil.Error):
        every = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
        return [one for one in every if "interrupted.py" in " ".join(one.cmdline()[:3]) and one.name() != "mpirun"]
    return []


def wait_for(condition):
    """Wait until something holds; return what."""
    end = time.monotonic() + 250
    while not (found := condition()):
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.02)
    return found


def modified(path):
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_any_moment(mpirun, tmp_path):
    """Runs of other process counts, each killed, and one that ends with the weights of a run in one go."""
    whole, killed, times = tmp_path / "whole", tmp_path / "killed", []
    whole.mkdir()
    killed.mkdir()
    run_alone("interrupted.py", whole, 4, 0)
    rng = random.Random(0)
    layouts = itertools.cycle([(2, 2), (4, 1), (1, 4)])  # processes, towers of each
    backup = killed / "backup" / "latest.weights.h5"
    for moment in range(KILLS):
        count, towers = next(layouts)
        command = [sys.executable, SCRIPTS / "interrupted.py", killed, towers, 0.02]
        if count > 1:
            command = [*LAUNCHERS["mpirun"](count), *command]
        before = modified(backup)
        started = subprocess.Popen(list(map(str, command)), env=environment(), stderr=subprocess.PIPE, text=True)
        victims = wait_for(lambda s=started, n=count: (v := processes_of(s)) and len(v) == n and v)
        if moment % 2:
            wait_for(lambda t=before: modified(backup) != t)
            time.sleep(rng.uniform(0, 1.5))  # in a step, in a save, or between
        else:
            time.sleep(rng.uniform(0, 8))  # while it starts
        rank = rng.randrange(count)
        assert started.poll() is None
        victims[rank].kill()
        began = time.monotonic()
        _, errors = started.communicate(timeout=LIMIT_S)
        times.append(time.monotonic() - began)
        assert started.returncode != 0
        assert not [one for one in victims if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if count > 1:
            assert "rank" in errors and "signal 9" in errors.lower(), errors
    done = mpirun(2, "interrupted.py", killed, 2, 0)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = dict(np.load(whole / "end.0.npz"))
    for rank in range(2):
        found = dict(np.load(killed / f"end.{rank}.npz"))
        assert [key for key in expected if expected[key].tobytes() != found[key].tobytes()] == []
    print(f"all ended within {max(times):.1f} s of the kill")
