"""`@nccl_parallel(on_nonfinite=...)`: a gradient with a NaN or an infinity is named, and its step undone."""

import functools
import logging
import os
import pickle
import re
import stat
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

from ncclsync import Health, NcclSyncError, NonFiniteError, Towers
from ncclsync.gradients import nonfinite


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    """Where rows are saved."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


X, Y = data(rows=60)
BAD = X.copy()
BAD[33] = np.nan  # row 13 of the second batch of 20: of 3 towers the middle one's


def normalised(**arguments):
    """A classifier whose moving averages the forward pass writes."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((12,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, **arguments)
    return model


def fit(model, x=X, first=0, last=60):
    return model.fit(x[first:last], Y[first:last], batch_size=20, shuffle=False, verbose=0).history


def state(model):
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


def test_raise_names_and_saves():
    """Tower, variables and rows, with the rows in a file; all towers are as before the step."""
    model, alone = on_towers(mlp, 3, health=Health(on_nonfinite="raise")), mlp()
    with pytest.raises(NonFiniteError, match=r"tower 1, rows 7 to 13, for sequential.*/kernel") as caught:
        fit(model, BAD)
    error = caught.value
    assert list(error.towers) == [1]
    begin, end, names = error.towers[1]
    assert (begin, end) == (7, 14)
    assert model.layers[0].kernel.path in names
    assert str(error).endswith(f"These rows are saved in {error.file}")
    with np.load(error.file) as saved:
        np.testing.assert_array_equal(saved["indices"], np.arange(7, 14))
        np.testing.assert_array_equal(saved["0"], BAD[27:34])
        np.testing.assert_array_equal(saved["1"], Y[27:34])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.towers, again.file) == (str(error), error.towers, error.file)
    fit(alone, last=20)
    assert_close(state(model), state(alone))
    fit(model, first=40)
    fit(alone, first=40)
    assert_close(state(model), state(alone))
    assert_towers_agree(model)


def full(*_, **__):
    raise OSError(28, "No space left on device")


def no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    return "FileNotFoundError"


def others_folder(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"ncclsync-nonfinite-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    return "PermissionError: .* is another user's"


def full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(np, "savez", full)
    return "OSError: .*No space left on device"


def no_memory(monkeypatch, tmp_path):
    def dense(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    monkeypatch.setattr(nonfinite, "_rows_of", dense)
    return "ResourceExhaustedError: .*OOM"


@pytest.mark.parametrize("trouble", [no_folder, others_folder, full_disk, no_memory])
def test_why_rows_are_not_saved(trouble, monkeypatch, tmp_path, caplog):
    """Told by the error and by the warning; no file is left half."""
    why = trouble(monkeypatch, tmp_path)
    batch, flags = (tf.constant(X[:2]),), np.array([[False], [True]])
    with pytest.raises(NonFiniteError, match=rf"tower 0, rows 0 to 0, .* not saved: {why}") as caught:
        nonfinite.OnNonFinite("raise").report(flags, [1, 1], ["w"], batch, range(2), range(2))
    assert caught.value.file is None
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.file) == (str(caught.value), None)
    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        nonfinite.OnNonFinite("skip").report(flags, [1, 1], ["w"], batch, range(2), range(2))
    assert re.search(rf"not saved: {why}.* The step was skipped", caplog.records[-1].getMessage())
    assert not list(tmp_path.rglob("*.npz"))


def test_own_rows_are_saved():
    """Of several processes that read their own rows each saves these, of any kind of leaf."""
    batch = {"sparse": tf.sparse.from_dense(X[2:5]), "none": None, "weight": tf.constant(2.0), "x": tf.constant(X[2:5])}
    report = functools.partial(nonfinite.OnNonFinite("raise").report, sizes=np.array([2, 2, 1]), names=["w"])
    flags = np.array([[False], [True], [False]])
    with pytest.raises(NonFiniteError, match=r"tower 0, rows 0 to 1, .* tower 2, rows 4 to 4") as caught:
        report(flags, batch=batch, owners=range(3), own=range(2, 5))
    with np.load(caught.value.file) as saved:
        assert saved["indices"].tolist() == [4] and saved["weight"] == 2.0
        np.testing.assert_array_equal(saved["x"], X[4:5])
        np.testing.assert_array_equal(saved["sparse"], X[4:5])
    with pytest.raises(NonFiniteError, match="are not saved: another process reads them, and saves them"):
        report(flags[::-1] | [[False], [True], [True]], batch=batch, owners=range(3), own=range(2, 5))


@pytest.mark.slow
def test_steps_are_undone_where_rows_cannot_be_saved(monkeypatch, tmp_path):
    """ "raise" raises its own error, "skip" skips, as where there is a file."""
    no_folder(monkeypatch, tmp_path)
    model, alone = on_towers(mlp, 3, health=Health(on_nonfinite="raise")), mlp()
    with pytest.raises(NonFiniteError, match=r"tower 1, rows 7 to 13, .* not saved: FileNotFoundError"):
        fit(model, BAD)
    skipping = on_towers(mlp, 3, health=Health(on_nonfinite="skip"))
    fit(skipping, BAD)
    fit(alone, last=20)
    assert_close(state(model), state(alone))
    fit(alone, first=40)
    assert_close(state(skipping), state(alone))


def test_files_are_bounded(monkeypatch, tmp_path):
    """One folder, the user's own, for all runs: so many files of each, the newest of all; others' stay."""
    monkeypatch.setattr(nonfinite, "MOST_FILES", 3)
    monkeypatch.setattr(nonfinite, "MOST_KEPT", 5)
    batch = (tf.constant(X[:2]),)
    flags = np.array([[False], [True]])

    def files_of_a_run():
        found, run = [], nonfinite.OnNonFinite("raise")
        for _ in range(4):
            with pytest.raises(NonFiniteError) as caught:
                run.report(flags, [1, 1], ["w"], batch, range(2), range(2))
            found.append(caught.value.file)
        assert "not saved: this run has saved 3 files already" in str(caught.value)
        return found[:3]

    first = files_of_a_run()
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "mine.txt").touch()
    for file in first:
        os.rename(file, folder / f"19700101-{os.path.basename(file)}")
    second = files_of_a_run()
    assert [*tmp_path.iterdir()] == [folder]
    left = {file.name for file in folder.iterdir()}
    assert len(left) == 6 and left > {"mine.txt", *map(os.path.basename, second)}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_skip_is_as_if_the_batch_had_not_been(steps, caplog):
    """Weights, moving averages, slots and `iterations`: one device's without the batch; one warning."""
    model = on_towers(lambda: normalised(steps_per_execution=steps), 3, health=Health(on_nonfinite="skip"))
    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        fit(model, BAD)
    found = [record.getMessage() for record in caplog.records if "finite" in record.getMessage()]
    # Normalised by the whole batch, every row is NaN, and so is every tower's gradient.
    assert len(found) == 1
    assert "tower 0, rows 0 to 6, for sequential" in found[0] and "tower 2, rows 14 to 19" in found[0]
    assert found[0].endswith("The step was skipped: no tower's weights or optimizer state have changed")
    alone = normalised()
    fit(alone, last=20)
    fit(alone, first=40)
    assert_close(state(model), state(alone))
    assert_towers_agree(model)


@pytest.mark.slow
def test_accumulated_gradients_are_undone():
    """What each tower has accumulated is its own from before the step."""

    def factory():
        return mlp(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

    model, alone = on_towers(factory, 2, health=Health(on_nonfinite="skip")), factory()
    fit(model, BAD)
    fit(alone, last=20)
    fit(alone, first=40)
    assert_close(state(model), state(alone))


def test_variables_of_any_dtype_are_undone():
    """Also one of a dtype that TensorFlow's kernels do not copy."""
    dtype = tf.dtypes.experimental.float8_e4m3fn
    small = tf.Variable(tf.cast([1.0, 1.0], dtype))
    weight = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(batch * weight)
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])
        small.assign(tf.cast([2.0, 2.0], dtype))
        return loss

    bad = np.ones((4, 2), "float32")
    bad[3, 0] = np.nan
    with Towers(2, health=Health(on_nonfinite="skip")) as towers:
        towers.run(step, bad)
        np.testing.assert_array_equal(tf.cast(small, tf.float32), [1.0, 1.0])
        towers.run(step, np.ones((4, 2), "float32"))
        np.testing.assert_array_equal(tf.cast(small, tf.float32), [2.0, 2.0])


@pytest.mark.slow
def test_towers_without_samples_are_finite():
    """Idle towers compute on a copy of a row that is not theirs: only the row's own tower is named."""
    x = X[:2].copy()
    x[0] = np.inf
    model = on_towers(mlp, 4, health=Health(on_nonfinite="raise"))
    with pytest.raises(NonFiniteError) as caught:
        model.train_on_batch(x, Y[:2])
    assert {tower: rows[:2] for tower, rows in caught.value.towers.items()} == {0: (0, 1)}


@pytest.mark.slow
def test_loss_scaling_is_left_alone(caplog):
    """A LossScaleOptimizer skips the update and lowers its scale, as on one device; a warning tells so."""

    def factory():
        return mlp(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0))

    model, alone = on_towers(factory, 2, health=Health(on_nonfinite="raise")), factory()
    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        fit(model, BAD)
    fit(alone, BAD)
    assert_close(state(model), state(alone))
    assert float(model.optimizer.dynamic_scale.numpy()) == 4.0
    assert [r for r in caplog.records if "LossScaleOptimizer skips the updates" in r.getMessage()]


@pytest.mark.slow
def test_one_tower_and_a_loop():
    """One tower watches too, and so does a loop of one's own, of which a variable's own name is reported."""
    model = on_towers(mlp, 1, health=Health(on_nonfinite="raise"))
    with pytest.raises(NonFiniteError, match="tower 0, rows 0 to 19"):
        fit(model, BAD)
    weight = tf.Variable([1.0, 2.0], name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_sub(tape.gradient(loss, weight))

    with Towers(2, health=Health(on_nonfinite="raise")) as towers:
        with pytest.raises(NonFiniteError, match="tower 1, rows 2 to 2, for weight:0"):
            towers.run(step, tf.constant([[1.0, 1.0], [1.0, 1.0], [1.0, np.nan]]))
        assert weight.numpy().tolist() == [1.0, 2.0]


def test_refused():
    """An unknown mode, and a step that is not traced."""
    with pytest.raises(ValueError, match=r"on_nonfinite to be None or one of .*'skip'.*\. Received: 'stop'"):
        on_towers(mlp, 2, health=Health(on_nonfinite="stop"))
    with pytest.raises(NcclSyncError, match="run_eagerly=True"):
        fit(on_towers(lambda: mlp(run_eagerly=True), 2, health=Health(on_nonfinite="raise")))
