"""The page for those who come from another library: what is left of each program runs, and right.

And what is refused of what such programs bring along, each by its message.

`python tests/training/test_coming_from.py` runs the programs of MirroredStrategy on three replicas, in a process of
its own.
"""

import ast
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data, mlp, on_towers

import ncclsync
from ncclsync import NcclSyncError, Towers, nccl_parallel
from ncclsync.compat import other_libraries
from ncclsync.towers import placement, session
from ncclsync.towers.placement import Choice

PAGE = pathlib.Path(__file__).parents[2] / "examples" / "coming_from.md"
X, Y = data()


def programs():
    """By the name of the library: (program before, program after) of each block of its section."""
    found = {}
    for text in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name = text.partition("\n")[0].removeprefix("keras.utils.")
        for block in re.findall(r"^```diff\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            lines = block.splitlines()
            assert all(line[:1] in ("-", "+", " ") for line in lines)
            before, after = ("\n".join(line[1:] for line in lines if line[0] in kept) for kept in ("- ", "+ "))
            found.setdefault(name, []).append((before, after))
    return found


PROGRAMS = programs()


def build_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])


def weights_after(program):
    """Run a program on 192 samples; return the names that it leaves behind, and its model's weights."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((192, 8)).astype("float32"), rng.standard_normal((192, 1)).astype("float32")
    names = {
        "build_model": build_model,
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)),
        **{module.__name__: module for module in (keras, ncclsync)},
        "tf": tf,
    }
    exec(compile(program, PAGE.name, "exec"), names)
    return names, names["model"].get_weights()


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_each_library_has_its_programs():
    """Two of MirroredStrategy (fit, a loop), one of each other; all are Python."""
    counts = {name: len(blocks) for name, blocks in PROGRAMS.items()}
    assert counts.pop("MirroredStrategy") == 2 and len(counts) == 8 and {*counts.values()} == {1}
    for before, after in itertools.chain(*PROGRAMS.values()):
        assert before != after and ast.parse(before) and ast.parse(after)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_after(name, monkeypatch, tmp_path):
    """It trains on several towers, to the weights of the same program on one device."""
    monkeypatch.chdir(tmp_path)

    def place(count):
        names = ("CPU:0",) * count
        monkeypatch.setattr(session, "choose_devices", lambda *_: Choice(names, "cpu", ""))

    for _, after in PROGRAMS[name]:
        place(3)
        names, found = weights_after(after)
        used = names["towers"] if "towers" in names else names["model"].towers
        assert len(used) == 3 and used.divergence() == 0.0
        used.close()
        place(1)
        assert_same(found, weights_after(after)[1])
    if "model.keras" in after:
        assert_same(keras.saving.load_model(tmp_path / "model.keras").get_weights(), found)


@pytest.mark.slow
def test_programs_before():
    """MirroredStrategy's own loop, on three replicas, gives the weights of the program after it; see `compare`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


def horovods(base, *arguments):
    """An object of a class such as Horovod makes: that of what it wraps by name, its own by module."""
    made = type(base.__name__, (base,), {"__module__": "horovod._keras"})
    return made(*arguments)


def with_horovods_optimizer():
    model = mlp()
    model.compile(horovods(keras.optimizers.SGD, 0.1), "mse")
    return model


@pytest.fixture(scope="module")
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0"])


@pytest.mark.parametrize("eagerly", [False, True])
def test_called_in_a_scope(strategy, eagerly):
    """Training, evaluation and prediction of a model on towers, and a step of one's own."""
    model = on_towers(mlp, 2)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=eagerly)
    before = model.get_weights()
    words = r"Expected to be called outside any tf.distribute scope. Received: .*MirroredStrategy"
    with strategy.scope(), Towers(2) as others:
        for call in (
            lambda: model.fit(X, Y, verbose=0),
            lambda: model.evaluate(X, Y, verbose=0),
            lambda: model.predict(X, verbose=0),
            lambda: others.run(lambda x: x, X),
        ):
            with pytest.raises(ValueError, match=words):
                call()
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_optimizer_of_horovods():
    """In the factory; compiled later, also within a loss scale; and nothing is trained."""
    words = r"Expected a keras.optimizers.Optimizer as it is.* by hvd.DistributedOptimizer \(horovod._keras"
    with pytest.raises(TypeError, match=words):
        on_towers(with_horovods_optimizer, 1)
    model = on_towers(mlp, 2)
    before = model.get_weights()
    optimizer = keras.optimizers.LossScaleOptimizer(horovods(keras.optimizers.SGD, 0.1))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(TypeError, match=words):
        model.fit(X, Y, verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_tape_of_horovods():
    """In a step on towers; and a tape of TensorFlow's own is taken."""
    variable = tf.Variable(1.0)

    def step(make_tape, x):
        with make_tape() as tape:
            loss = tf.reduce_mean(x * variable)
        return tape.gradient(loss, variable)

    x = tf.constant([1.0, 2.0, 6.0])
    with Towers(2) as pair:
        with pytest.raises(TypeError, match=r"Expected a tf.GradientTape as it is.*hvd.DistributedGradientTape"):
            pair.run(lambda x: step(lambda: horovods(tf.GradientTape), x), x)
        assert float(pair.run(lambda x: step(tf.GradientTape, x), x)) == 3.0


@pytest.mark.parametrize("name", other_libraries.PROCESS_COUNTS)
def test_several_processes(monkeypatch, name):
    """Each would take all devices; one process is taken, and by horovodrun devices by name."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(NcclSyncError, match=rf"Expected .*{name}=4\. .*processes=False"):
        Towers(2)
    with Towers(2, processes=False) as apart:
        assert len(apart) == 2
    if name == "HOROVOD_SIZE":
        with Towers(["CPU:0", "CPU:0"]) as named:
            assert len(named) == 2
    monkeypatch.setenv(name, "1")
    Towers(2).close()


@pytest.mark.slow
def test_batch_size_of_one_process():
    """A stateful RNN has a state for each sample of the global batch; a process' share of it does not fit."""

    def build():
        model = keras.Sequential([keras.Input((3, 2), batch_size=4), keras.layers.SimpleRNN(2, stateful=True)])
        model.compile("sgd", "mse")
        return model

    model = on_towers(build, 2)
    x, y = np.ones((8, 3, 2), "float32"), np.ones((8, 2), "float32")
    before = model.get_weights()
    with pytest.raises(
        ValueError, match=r"Expected batch size: 4\n- Received batch size: 8"
    ):  # one device knows the rows
        model.train_on_batch(x, y)
    with pytest.raises(NcclSyncError) as caught:
        model.train_on_batch(x[:2], y[:2])
    words = "Expected a batch of 4 rows: the variable "
    assert str(caught.value).startswith(words) and " fixes them in this step. batch_size" in str(caught.value)
    assert "a script for Horovod gives those of one process. Received: 2\n\n" in str(caught.value)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    model.train_on_batch(x[:4], y[:4])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: nccl_parallel(mlp()), TypeError, r"Received: <Sequential .*as multi_gpu_model takes it: nccl_"),
        (lambda: nccl_parallel(towers=[0, 1]), TypeError, r"Received: \[0, 1\] .*To choose devices, use devices="),
        (lambda: nccl_parallel(devices=4), TypeError, r"Received: 4. .*hvd.size\(\).*multi_gpu_model, write towers=4"),
        (lambda: Towers([0, 1]), ValueError, r"'CPU:0'\]. Received: 0, as a number; multi_gpu_model and tensorpack"),
        (lambda: placement._first_devices(3, ["GPU:0"]), ValueError, r"1. Received: towers=3. .*hvd.size\(\) counts"),
    ],
    ids=["model", "gpus", "number of devices", "numbers of devices", "all hosts"],
)
def test_familiar_argument(call, error, message):
    """What another library would have taken, and what stands for it here."""
    with pytest.raises(error, match=message):
        call()


def compare():
    """Compare the loop before and after, and see a batch refused that a strategy has split: a main function."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    devices = [f"CPU:{i}" for i in range(3)]
    tf.distribute.MirroredStrategy = functools.partial(tf.distribute.MirroredStrategy, devices)
    _, (before, after) = PROGRAMS["MirroredStrategy"]
    names, found = weights_after(before)
    assert names["strategy"].num_replicas_in_sync == 3
    assert_same(found, weights_after(after.replace("Towers()", "Towers(3)"))[1])
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    split = names["strategy"].experimental_distribute_dataset(rows)
    words = r"Expected the global batch, .* Received: (PerReplica|DistributedIterator) of tf.distribute. Pass the"
    with pytest.raises(TypeError, match=words):
        on_towers(mlp, 2).fit(split, verbose=0)
    with Towers(2) as towers, pytest.raises(TypeError, match=words):
        towers.run(lambda batch: batch[0], next(iter(split)))


if __name__ == "__main__":
    compare()
