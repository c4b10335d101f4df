"""The strategies of examples/strategies each train, end, and differ from one device by what their files say.

TensorFlow runs in a process of its own, all strategies in the same one: `python tests/test_strategies.py
FOLDER` trains a tiny model by each and tells what came of it. What needs no TensorFlow is tested here.
"""

import dataclasses
import importlib
import json
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import compare_strategies  # noqa: E402 - by the line above
from strategies import NAMES, comparison, load, parameter_server, table  # noqa: E402
from strategies.conditions import EQUAL  # noqa: E402

# Conditions that are tried, each with a new model and, of some strategies, new processes; "batch norm" comes
# first. A second MirroredStrategy in the process would fail, whatever it is asked.
TRIED = {
    "one_device": ("batch norm", "plain", "last batch"),
    "round_robin": ("batch norm",),
    "ring_processes": ("batch norm",),
    "mirrored": ("batch norm",),
    "replicated_towers": ("batch norm", "plain", "last batch"),
}
TRIED_ELSE = ("batch norm", "last batch")
STEPS, BATCH_SIZE, TOWERS = 3, 16, 2


def tiny_model(shape, normalisation):
    """As `task.build_model`, quicker to trace."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(6, use_bias=False)]
    if normalisation != "none":
        layers.append(keras.layers.BatchNormalization(synchronized=normalisation == "synchronized"))
    return keras.Sequential([*layers, keras.layers.ReLU(), keras.layers.Dense(10)])


def train_all(folder):
    """Train by every strategy; write what came of it to results.json. The main function of the process."""
    import keras
    import psutil
    from strategies import session, task
    from strategies.wrapped_optimizer import Strategy as Wrapped

    session.build_model = importlib.import_module("test_strategies").tiny_model  # other processes import it
    results, reference = {}, {}
    for name in NAMES:
        own = pathlib.Path(folder, name)
        own.mkdir()
        trained = session.Session(name, TOWERS, "digits", BATCH_SIZE, STEPS)
        session.make_cpus = lambda towers: None  # once in a process
        figures = trained.start(str(own))
        found = {"batch norm": {"start": figures.pop("start")} | trained.first_round(str(own))}
        figures |= trained.round() | trained.finish(str(own))
        for condition in TRIED.get(name, TRIED_ELSE)[1:]:
            found[condition] = trained.condition(condition, str(own))
        reference = reference or found
        if name == "one_device":
            dropped = trained.condition("last batch", str(own), last_rows=4)["weights"]
        results[name] = dataclasses.asdict(comparison.compare(name, figures, found, reference, dropped))
        alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
        commands = [" ".join(one.cmdline()) for one in alive]
        results[name]["left"] = [command for command in commands if "resource_tracker" not in command]

    x, _, y, _ = task.load_data("digits")
    start, weights = (comparison.read_weights(reference["plain"][file]) for file in ("start", "weights"))
    summing = Wrapped(lambda: tiny_model(x.shape[1:], "none"), TOWERS, reduce="sum")
    rows = slice(STEPS * BATCH_SIZE)
    summing.train(x[rows], y[rows], BATCH_SIZE)
    results["sum"] = comparison.distance(summing.model.get_weights(), weights, start)

    os.environ["KERAS_HOME"] = folder
    results["cifar10"] = [list(part.shape) for part in task.load_data("cifar10")]
    results["cifar10"] += [float(task.load_data("cifar10")[0][0, 0, 1, 2])]

    import learning_curves

    def build_model():
        model = tiny_model((8, 8, 1), "none")
        model.compile(task.make_optimizer(), task.make_loss(), metrics=["accuracy"])
        return model

    learning_curves.build_model = build_model
    sys.argv = ["", "--towers", "1", "2", "--epochs", "1", "--plot", str(pathlib.Path(folder, "curves.png"))]
    learning_curves.main()
    keras.backend.clear_session()
    pathlib.Path(folder, "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(made_once):
    """What `train_all` has found."""
    folder = made_once("strategies", train_all_in_a_process)
    found = json.loads((folder / "results.json").read_text())
    printed = (folder / "printed.txt").read_text()
    return found | {"printed": printed, "curves": (folder / "curves.png").read_bytes()}


def train_all_in_a_process(folder):
    """Leave what `train_all` has found and printed in a folder."""
    batches = folder / "datasets" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    images = np.zeros((2, 3, 32, 32), "uint8")
    images[0, 2, 0, 1] = 255  # blue, first line, second column
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (batches / name).write_bytes(pickle.dumps({b"data": images.reshape(2, -1), b"labels": [3, 4]}))
    paths = [
        str(EXAMPLES),
        str(EXAMPLES.parent),
        str(EXAMPLES.parent / "tests" / "support"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Open MPI spawns processes for root, too.
        | dict.fromkeys(["PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"], "1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "printed.txt").write_text(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_strategy_differs_by_what_it_tells(results, name):
    """It trains from the same start; its weights are one device's unless its file gives a cause; it ends."""
    row = results[name]
    assert set(row["distances"]) >= set(TRIED.get(name, TRIED_ELSE))
    for condition, distance in row["distances"].items():
        assert (distance > EQUAL) == (condition in row["why"]), f"{condition}: {distance}"
    assert row["saves_plain"] == (name != "shared_layers")
    assert row["accuracy"] > 0.1
    assert row["memory_bytes"] > 100e6 * (2 if name in ("round_robin", "ring_processes") else 1)
    assert row["left"] == [], "processes were left behind"


@pytest.mark.slow
def test_ring_of_processes_is_replicated_towers(results):
    """What differs is who sends what to whom: with even batches both schemes give the same weights."""
    ring, towers = (results[name]["distances"]["batch norm"] for name in ("ring_processes", "replicated_towers"))
    assert ring == pytest.approx(towers, abs=EQUAL)


@pytest.mark.slow
def test_left_over_rows_are_dropped_or_not(results):
    """Equal parts leave the fifth row of the last batch out; that is told from other weights."""
    drops = {name for name in NAMES if results[name]["drops"]}
    assert drops == {"cpu_parameter_server", "wrapped_optimizer"}


@pytest.mark.slow
def test_published_sum_is_not_the_mean(results):
    """Adding up the towers' gradients, as the published wrapper does, leads far from one device."""
    assert results["sum"] > 0.3


@pytest.mark.slow
def test_cifar10_is_read_where_it_is_on_disk(results):
    """Five files and one, rows of planes to images with channels last, values up to 1."""
    assert results["cifar10"] == [[10, 32, 32, 3], [2, 32, 32, 3], [10], [2], 1.0]


@pytest.mark.slow
def test_learning_curves_lie_on_one_another(results):
    """Two towers are as close to one as the control is; the curves are drawn."""
    lines = dict(line.split(": ", 1) for line in results["printed"].splitlines() if "apart" in line)
    assert set(lines) == {"1 tower", "2 towers", "control"}
    for line in lines.values():
        apart = [float(part.split()[0]) for part in line.split("apart ")[1:]]
        assert max(apart) < 1e-4
    assert results["curves"].startswith(b"\x89PNG")


def in_threads(functions):
    """Run functions at once; return their results."""
    found = [None] * len(functions)

    def run(place):
        found[place] = functions[place]()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [0, 1, 7, 300_000])
def test_ring_adds_up_and_broadcasts(ranks, elements):
    """Every rank ends with the sum, of vectors shorter than the ring or longer than a socket's buffer."""
    from strategies.ring import Ring

    links = [multiprocessing.Pipe() for _ in range(ranks)]
    vectors = [np.arange(elements, dtype="float32") * (rank + 1) for rank in range(ranks)]
    expected = sum(vectors[1:], vectors[0].copy())

    def member(rank):
        ring = Ring(rank, ranks, links[rank - 1][1], links[rank][0])
        ring.all_reduce(vectors[rank])
        given = np.full(3, rank, "float32")
        ring.broadcast(given)
        return given.tolist()

    assert in_threads([lambda rank=rank: member(rank) for rank in range(ranks)]) == [[0.0] * 3] * ranks
    for vector in vectors:
        np.testing.assert_array_equal(vector, expected)


def test_parameter_server_applies_each_push_at_once():
    """Two workers' gradients make two updates with momentum; what is not trained is the last writer's."""
    (one, server_one), (two, server_two) = multiprocessing.Pipe(), multiprocessing.Pipe()
    values = [np.float32([1.0, 2.0]), np.float32([5.0])]

    def serve():
        parameter_server.serve([server_one, server_two], values, [True, False], 0.5, 0.9)
        return "ended"

    def work():
        for connection, written in ((one, 6.0), (two, 7.0)):
            connection.send(("push", [np.float32([1.0, -1.0]), np.float32([written])]))
            connection.send(("pull",))
            pulled = connection.recv()
        one.close(), two.close()
        return [value.tolist() for value in pulled]

    ended, pulled = in_threads([serve, work])
    assert ended == "ended"  # nobody is connected
    # v = -0.5, then 0.9 · -0.5 - 0.5 = -0.95; 1 - 0.5 - 0.95 and 2 + 0.5 + 0.95
    np.testing.assert_allclose(pulled[0], [-0.45, 3.45], rtol=1e-6)
    assert pulled[1] == [7.0]


class FakeSide:
    """A `Side` that answers at once. One device ends 10 from its start, the others by `OFF` from there."""

    OFF = {"exact": 0.0, "dropping": 1.0, "raising": 0.0}  # noqa: RUF012 - never written

    def __init__(self, name):
        self.name, self.last_rows = name, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, do, folder=None, name="batch norm", last_rows=None):
        """Answer as `Session` does."""
        end = 10.0 + self.OFF.get(self.name, 0.0) - (1.0 if last_rows == 4 else 0.0)
        if name == "last batch" and self.name == "dropping":
            end = 9.0
        files = {}
        for file, value in (("start", 0.0), ("weights", end)):
            files[file] = str(pathlib.Path(folder or ".", f"{name} {last_rows} {file}.npz"))
            if folder:
                np.savez(files[file], np.float32([value]))
        if do == "start":
            return {"first_step_s": 1.0, "start": files["start"]}
        if do == "first_round":
            return {"weights": files["weights"]}
        if do == "round":
            return {"step_s": 0.01}
        if do == "condition":
            raised = name == "last batch" and self.name == "raising"
            return {"raised": "ValueError: no"} if raised else files
        texts = {"system": self.name, "through": "air", "formula": "0", "why": {"plain": "it is off"}}
        sizes = {"accuracy": 0.5, "memory_bytes": 2**20, "moved_bytes": 1024, "saves_plain": False}
        return texts | sizes


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """The rows of `measure` over fake processes."""
    monkeypatch.setattr(compare_strategies, "open_side", lambda name, options: FakeSide(name))
    options = type("Options", (), {"towers": 2, "steps": 1, "rounds": 3})
    names = ["one_device", "exact", "dropping", "raising"]
    return compare_strategies.measure(names, options, str(tmp_path))


def test_measure_tells_outcomes_apart(rows):
    """The distance is in units of one device's way; a last batch is exact, loses rows, or raises."""
    assert [row.last_batch() for row in rows] == ["exact", "exact", "drops the rest", "raises ValueError"]
    assert [row.distances["plain"] for row in rows] == pytest.approx([0, 0, 0.1, 0])
    assert rows[3].distances["last batch"] is None
    assert dataclasses.replace(rows[2], drops=False).last_batch() == "other weights"


def test_table_shows_and_draws_every_row(rows, tmp_path, capsys):
    """All columns of all rows, and the causes; the picture is small."""
    table.show(rows, 2)
    printed = capsys.readouterr().out
    for text in ("dropping", "50.0%", "0.1", "drops the rest", "10.00 ms", "1 KiB", "air", "it is off"):
        assert text in printed
    table.plot(rows, tmp_path / "table.png", 2)
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "table.png").stat().st_size < 100_000


def test_another_start_is_an_error(rows, tmp_path):
    """Distances from another start would tell nothing."""
    files = {key: str(tmp_path / f"{key}.npz") for key in ("start", "weights")}
    other = {"start": str(tmp_path / "other.npz"), "weights": files["weights"]}
    for file, value in ((files["start"], 0), (files["weights"], 1), (other["start"], 2)):
        np.savez(file, np.float32([value]))
    with pytest.raises(ValueError, match="Expected the same start"):
        comparison.compare("exact", {}, {"plain": other}, {"plain": files}, None)


@pytest.mark.slow
def test_worker_tells_what_is_missing(monkeypatch, tmp_path):
    """A real process, by its command line: data that is not there is an error of one line."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["", "--data", "cifar10", "--only", "one_device"])
    with pytest.raises(SystemExit, match=r"Expected CIFAR-10's batches in .*Received: no such folder"):
        compare_strategies.main()


@pytest.mark.parametrize("arguments", [["--only", "horovod"], ["--towers", "1"], ["--towers", "5"], ["--rounds", "1"]])
def test_bad_options_are_refused(monkeypatch, capsys, arguments):
    """Before any process is started."""
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit):
        compare_strategies.main()
    assert "Expected" in capsys.readouterr().err


def test_unknown_strategy_is_refused():
    """By name, with all names."""
    with pytest.raises(ValueError, match=r"Expected one of one_device, .* Received: 'horovod'"):
        load("horovod")


if __name__ == "__main__":
    train_all(sys.argv[1])
