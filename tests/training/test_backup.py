"""`BackupAndRestore`: a run that was killed goes on behind the last sample that the backup has seen."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, on_towers

from ncclsync import BackupAndRestore, NcclSyncError, Shuffled
from ncclsync.training import progress
from ncclsync.training.callbacks import backup

ROWS, EPOCHS = 61, 2
TESTS = pathlib.Path(__file__).parent
RNG = np.random.default_rng(0)
X = np.concatenate([np.arange(ROWS)[:, None], RNG.standard_normal([ROWS, 6])], 1).astype("float32")
Y = RNG.standard_normal([ROWS, 1]).astype("float32")


class Count(keras.layers.Layer):
    """Counts how often each sample, whose number is in the first column, is trained on."""

    def build(self, _):
        self.times = self.add_weight(shape=[ROWS], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            numbers = tf.cast(x[:, 0], tf.int32)
            self.times.assign_add(tf.reduce_sum(tf.one_hot(numbers, ROWS), 0))
        return x[:, 1:]


def build(run_eagerly=False):
    """A model to which the order matters, with dropout."""
    keras.utils.set_random_seed(1)
    layers = [Count(), keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([7]), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=run_eagerly)
    return model


def alone():
    """The same on one device; so few steps are not worth a trace."""
    return build(run_eagerly=True)


class Die(keras.callbacks.Callback):
    """Ends the run behind a batch: by an exception, or as a kill does."""

    def __init__(self, epoch, batch, kill=False):
        super().__init__()
        self.when, self.kill, self.epoch = (epoch, batch), kill, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.when:
            if self.kill:
                os._exit(9)
            raise KeyboardInterrupt


def train(model, folder=None, batch_size=8, die=None, **options):
    """Two epochs of 8 batches, the last of 5 samples, with a backup every 3 batches."""
    source = Shuffled(X, Y, batch_size=batch_size, seed=4)
    callbacks = [] if folder is None else [BackupAndRestore(folder, **{"save_freq": 3, "data": source, **options})]
    model.fit(source, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks + ([die] if die else []))
    return model


def interrupt(model, folder, epoch, batch, **options):
    with pytest.raises(KeyboardInterrupt):
        train(model, folder, die=Die(epoch, batch), **options)


@pytest.fixture(scope="module")
def whole():
    """The weights of runs that nothing interrupts, on one device and on two towers."""
    models = alone(), on_towers(build, 2, exact=("random",))
    return dict(enumerate((train(model).get_weights() for model in models), 1))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a run on two towers has left that was killed behind batch 5 of its second epoch."""
    folder = tmp_path_factory.mktemp("killed")
    code = (
        "import test_backup as t; model = t.on_towers(t.build, 2, exact=True); "
        f"t.train(model, {str(folder)!r}, die=t.Die(1, 5, kill=True))"
    )
    # As many threads for an op as here, where TensorFlow may have started before towers could ask for one:
    # otherwise sums within an op are taken in another order, and are rounded differently.
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    environment = os.environ | {
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "TF_NUM_INTRAOP_THREADS": str(threads),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=280)
    assert done.returncode == 9
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("towers, batch_size", [(2, 8), (3, 8), (1, 11)])
def test_killed_run_goes_on_at_the_sample(killed, whole, towers, batch_size, tmp_path):
    """Each sample once per epoch; the weights of the run that was not killed, on two towers bit for bit."""
    for file in killed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = on_towers(build, towers, exact=("random",))
    steps = model.optimizer.iterations
    train(model, tmp_path, batch_size)
    np.testing.assert_array_equal(model.layers[0].times, np.full(ROWS, EPOCHS))
    # 12 steps and 32 samples of the second epoch were in the backup.
    assert int(steps) == 12 + -(-(ROWS - 32) // batch_size)
    if batch_size == 8:
        assert_close(model.get_weights(), whole[1])
    if (towers, batch_size) == (2, 8):
        assert_same(model.get_weights(), whole[2])
    assert not tmp_path.exists()


def assert_same(arrays, others):
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """What a run on one device has left, behind batch 2 of its first epoch."""
    folder = tmp_path_factory.mktemp("left_behind")
    interrupt(alone(), folder, 0, 3)
    return folder


@pytest.fixture
def folder(left_behind, tmp_path):
    """A copy of it."""
    return pathlib.Path(shutil.copytree(left_behind, tmp_path / "backup"))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("point", ["before the weights", "between the files"])
def test_killed_while_it_saves(point, whole, folder, monkeypatch):
    """Weights and position are of one moment, whichever file was the last to be written."""
    renamed = []

    def replace(part, path):
        renamed.append(path)  # when the backup is restored the metadata; two files of each backup
        # The second backup is the first one of the second epoch.
        if len(renamed) == {"before the weights": 4, "between the files": 5}[point]:
            raise KeyboardInterrupt
        os.rename(part, path)

    with monkeypatch.context() as patched:
        patched.setattr(backup.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            train(alone(), folder)
    assert_same(train(alone(), folder).get_weights(), whole[1])


class Extremes(keras.layers.Layer):
    """Has a weight of each dtype, which holds the least and the most, or an infinity and a NaN."""

    def build(self, _):
        for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "bool"):
            self.add_weight(name=dtype, shape=[2], dtype=dtype, initializer="zeros", trainable=False)
        for dtype in ("int8", "uint8", "int32", "uint32", "int64", "uint64"):
            self.add_weight(name=dtype, shape=[2], dtype=dtype, initializer="zeros", trainable=False)

    def call(self, x):
        return x

    def fill(self):
        for weight in self.weights:
            numbers = np.iinfo(weight.dtype) if "int" in weight.dtype else None
            held = [np.inf, np.nan] if numbers is None else [numbers.min, numbers.max]
            weight.assign(np.array(held, weight.value.dtype.as_numpy_dtype))


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)])
def test_states_at_their_extremes(seed, tmp_path):
    """Random state, and weights of every dtype, are restored bit for bit."""

    def made(seed):
        layers = [Extremes(), keras.layers.Dropout(0.5, seed=seed), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input([7]), *layers])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    saved, restored = made(seed), made(1)
    saved.layers[0].fill()
    saved.layers[1].seed_generator.state.assign([seed, 2**63 - 1])
    saved.optimizer.iterations.assign(2**63 - 1)
    for model in (saved, restored):
        callback = BackupAndRestore(tmp_path)
        callback.set_model(model)
        callback.write_backup() if model is saved else callback.read_backup()
    variables = zip(saved.variables, restored.variables, strict=True)
    for one, other in [*variables, (saved.optimizer.iterations, restored.optimizer.iterations)]:
        assert one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes(), one.path


def corrupt(path, how):
    """Truncate a file, or write `how` in place of what it holds beside the weights, or alter that."""
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
        return
    with h5py.File(path, "a") as file:
        text = file.attrs["ncclsync"]
        del file.attrs["ncclsync"]
        if how != "of another":
            old, alters, new = how.partition(" -> ")
            file.attrs["ncclsync"] = re.sub(old, new, text) if alters else how
            assert file.attrs["ncclsync"] != text


@pytest.mark.parametrize(
    "how",
    [
        *("truncated", "of another", "{", '{"epoch": 1}', "[]", "3", "[" * 100_000),
        *(f'^{{"epoch": [0-9]* -> {{"epoch": {value}' for value in ("1e400", "NaN", "1.5", "-1", "true", '"1"')),
        *(f'^{{"epoch": [0-9]* -> {{"epoch": {value}' for value in (2**32, 10**30, 1)),
        *(f'"data": {{"epoch": [0-9]* -> "data": {{"epoch": {value}' for value in (1, 2**40)),
        *(f'"samples": [0-9]* -> "samples": {value}' for value in ("1e400", "62", "25")),
        *(f'"seeds": .*]] -> "seeds": {value}' for value in ("3", "[3]", "[[1, 1e400]]", "[[1, 4294967296]]")),
        *(f'"seeds": .*]] -> "seeds": {value}' for value in ("[[]]", "[[1]]", "[[1, 2]]", "[]")),
        '"digest": ".* -> "digest": "0"}',
    ],
    ids=lambda how: how[:70],
)
def test_corrupted_backup(how, folder):
    """An error that names the file, before anything is trained."""
    corrupt(folder / "latest.weights.h5", how)
    model = alone()
    before = model.get_weights()
    with pytest.raises(OSError, match=r"Expected a backup of .* in .*latest.weights.h5. Received: "):
        train(model, folder)
    assert_same(model.get_weights(), before)


@pytest.mark.parametrize("double_checkpoint", [pytest.param(False, marks=pytest.mark.slow), True])
def test_flushed_before_it_takes_the_name(double_checkpoint, folder, disk_events):
    """Each file, before it takes the place of the old one, and then the folder: also behind a crash."""
    shutil.rmtree(folder)
    interrupt(alone(), folder, 0, 6, double_checkpoint=double_checkpoint)
    files = [name.removeprefix("part-") for what, name in disk_events if what == "replace"]
    kept = {"latest.weights.h5.bkp"} if double_checkpoint else set()
    assert set(files) == {"latest.weights.h5", "training_metadata.json", *kept}
    assert disk_events == [
        ("fsync", folder.parent.name),  # the new folder's own name
        *(event for name in files for event in replaced(name, folder)),
    ]


def test_supervisor_is_told(folder, tmp_path, monkeypatch):
    """By each backup, when it is there, epoch and samples of what goes on there."""
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "told"))
    interrupt(alone(), folder, 1, 0)
    lines = (tmp_path / "told").read_text().splitlines()
    assert lines == [f"{position} {folder}" for position in ("0 48", "1 8")]
    assert progress.read(tmp_path / "told") == {str(folder): (1, 8)}


def replaced(name, folder):
    return ("fsync", f"part-{name}"), ("replace", f"part-{name}"), ("fsync", folder.name)


def test_the_backup_before_a_corrupted_one(whole, folder):
    """`double_checkpoint`: weights and position of the backup before are restored, both."""
    interrupt(alone(), folder, 0, 3, double_checkpoint=True)  # three batches behind the first backup
    corrupt(folder / "latest.weights.h5", "{")
    assert_same(train(alone(), folder, double_checkpoint=True).get_weights(), whole[1])


def test_other_data_are_refused(folder):
    """Another seed or model, no data, and what fit is given instead of the data: each before it does harm."""
    with pytest.raises(ValueError, match=r"same data, \{'seed': 5, 'rows': 61\}. Received: \{'seed': 4, "):
        other = Shuffled(X, Y, batch_size=8, seed=5)
        alone().fit(other, verbose=0, callbacks=[BackupAndRestore(folder, data=other)])
    with pytest.raises(ValueError, match=r"in the middle of an epoch, after 24 samples. Received: None"):
        train(alone(), folder, data=None, save_freq="epoch")
    model = keras.Sequential([keras.Input([7]), Count(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"same model, with 0 random states. Received: 1 in .*h5"):
        train(model, folder)
    told = Shuffled(X, Y, batch_size=8, seed=4)
    twin = Shuffled(X, Y, batch_size=8, seed=4)
    for wrong in ({"class_weight": {0: 1.0}}, {"steps_per_epoch": 2}):
        with pytest.raises(ValueError, match=r"8 batches an epoch. Received: (None|2). Pass the same data"):
            alone().fit(told, verbose=0, callbacks=[BackupAndRestore(folder / "new", data=told)], **wrong)
    for save_freq in (1, "epoch"):
        callback = BackupAndRestore(folder / "new", save_freq, data=told)
        with pytest.raises(NcclSyncError, match=r"train on the data of .* Received: 0 passes and 0 samples. Pass"):
            alone().fit(twin, verbose=0, callbacks=[callback])
    seen, told = [], Shuffled(X, Y, batch_size=8, seed=4)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    with pytest.raises(NcclSyncError, match=r"Pass the same data to fit as to BackupAndRestore: model.fit\(data"):
        callbacks = [watch, BackupAndRestore(folder / "new", 1000, data=told)]
        alone().fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
    assert seen == [0] and not (folder / "new").exists()
    callback, seen[:] = BackupAndRestore(folder / "new", 1000, data=told), []
    alone().fit(told, verbose=0, callbacks=[callback])
    with pytest.raises(NcclSyncError, match="Pass the same data to fit as to BackupAndRestore"):  # of a second fit, too
        alone().fit(twin, verbose=0, callbacks=[watch, callback])
    assert seen == [0]


def test_bad_arguments():
    """What no backup can be made by."""
    with pytest.raises(ValueError, match=r"Expected data=.* number of batches.*Received: save_freq=5"):
        BackupAndRestore("folder", 5)
    with pytest.raises(ValueError, match=r"save_freq to be 'epoch' or at least 1. Received: 0"):
        BackupAndRestore("folder", 0)
    with pytest.raises(TypeError, match=r"data to be an ncclsync.Shuffled or None. Received: 3"):
        BackupAndRestore("folder", data=3)
    with pytest.raises(TypeError, match=r"Received: ndarray of shape \(5, 3\)$"):
        BackupAndRestore("folder", data=np.zeros((5, 3)))


def test_epochs_without_data(tmp_path):
    """From arrays it is Keras' own: a backup after each epoch."""
    callback = BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        alone().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[callback, Die(1, 2)])
    history = alone().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[callback]).history
    assert len(history["loss"]) == 2


def test_a_wish_to_stop_is_heard_in_a_resumed_epoch(folder):
    """The epoch that is resumed ends early by itself, which ends `fit` only if another callback says so."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    for callbacks, epochs in ([Stop()], 1), ([], 3):
        source = Shuffled(X, Y, batch_size=8, seed=4)
        # With no further backup both resume in the first epoch.
        callbacks.append(BackupAndRestore(folder, 1000, delete_checkpoint=False, data=source))
        history = alone().fit(source, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        assert len(history["loss"]) == epochs


class Unbuilt(keras.Model):
    """A model that has no weights before it sees data."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5)])
        self.outer = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.outer(self.inner(x, training=training))


@pytest.mark.slow
def test_model_without_weights_goes_on(tmp_path):
    """One that is built by its first batch is built from the data's shapes before a backup is restored."""

    def unbuilt():
        keras.utils.set_random_seed(1)
        model = Unbuilt()
        model.compile("adam", "mse")
        return model

    whole = train(on_towers(unbuilt, 2)).get_weights()
    interrupt(on_towers(unbuilt, 2), tmp_path, epoch=1, batch=5)
    assert list(tmp_path.iterdir())
    again = train(on_towers(unbuilt, 2), tmp_path)
    for one, other in zip(again.get_weights(), whole, strict=True):
        np.testing.assert_array_equal(one, other)
