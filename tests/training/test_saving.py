"""Files of a model on towers are a plain model's: they load where ncclsync cannot be imported."""

import json
import os
import pickle
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
from parity import assert_close, assert_towers_agree, data, mlp, on_towers

TOWERS = 3
X, Y = data(24)

# Loads every file in the folder it is given, and keeps what each predicts.
LOADER = """
import importlib.util, pathlib, sys
folder = pathlib.Path(sys.argv[1])
try:
    import ncclsync
except ImportError as error:
    assert "not here" in str(error)
else:
    raise AssertionError("ncclsync was imported")
import keras, numpy as np, tensorflow as tf
x = np.load(folder / "x.npy")
predicted = {}
for path in sorted(folder.glob("*.keras")):
    model = keras.models.load_model(path)
    assert not hasattr(model, "towers")
    predicted[path.name] = model.predict(x, verbose=0)
    assert int(model.optimizer.iterations.numpy()) > 0
rebuilt = keras.models.model_from_json((folder / "architecture.json").read_text())
for path in sorted(folder.glob("*.weights.h5")):
    rebuilt.load_weights(path, skip_mismatch=False)
    predicted[path.name] = rebuilt.predict(x, verbose=0)
exported = tf.saved_model.load(folder / "exported")
predicted["exported"] = exported.serve(x).numpy()
layer = keras.layers.TFSMLayer(str(folder / "exported"), call_endpoint="serving_default")
predicted["exported_as_layer"] = next(iter(layer(x).values())).numpy()
assert "ncclsync" not in sys.modules
np.savez(folder / "predicted.npz", **predicted)
"""


def fit(model, epochs=1, **options):
    return model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, **options).history


def rounds(model):
    """Train, and return all that can be compared."""
    return [fit(model), model.get_weights(), model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)]


@pytest.fixture(scope="module")
def folder(made_once):
    """Every kind of file, written after training on towers, and what each predicts in a process without."""
    return made_once("files", write_files)


def write_files(folder):
    """Fill the folder, and read it again where `import ncclsync` fails."""
    model = on_towers(mlp, TOWERS)
    fit(model)
    fit(
        model,
        callbacks=[
            keras.callbacks.ModelCheckpoint(folder / "checkpoint.keras"),
            keras.callbacks.ModelCheckpoint(folder / "checkpoint.weights.h5", save_weights_only=True),
        ],
    )
    model.save(folder / "saved.keras")
    model.save_weights(folder / "saved.weights.h5")
    model.export(folder / "exported", verbose=False)
    (folder / "architecture.json").write_text(model.to_json())
    np.save(folder / "x.npy", X)
    np.save(folder / "expected.npy", model.predict(X, verbose=0))
    assert_close(fit(model), fit(keras.models.load_model(folder / "saved.keras")), what="training goes on")
    assert_towers_agree(model)

    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "ncclsync.py").write_text("raise ImportError('ncclsync is not here')\n")
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(blocked)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["saved.keras", "saved.weights.h5", "exported", "exported_as_layer", "checkpoint.keras", "checkpoint.weights.h5"],
)
def test_file_predicts_the_same_without_ncclsync(folder, name):
    """Loaded in a process where `import ncclsync` fails, the model predicts what it did on towers."""
    predicted = np.load(folder / "predicted.npz")[name]
    np.testing.assert_allclose(predicted, np.load(folder / "expected.npy"), atol=1e-6, rtol=1e-6)


def contents(path):
    """The shape, dtype and attributes of everything in an HDF5 file, by its path."""
    found = {}

    def visit(name, item):
        attributes = {key: str(value) for key, value in item.attrs.items()}
        found[name] = (getattr(item, "shape", None), str(getattr(item, "dtype", None)), attributes)

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def without_object_ids(config):
    """A part of a model's configuration without addresses in memory."""
    return {key: value for key, value in config.items() if key != "shared_object_id"}


@pytest.mark.slow
def test_files_have_a_plain_models_structure(tmp_path):
    """The same names, shapes and configuration in `.keras` and `.weights.h5` as without ncclsync."""
    for name in ("towers", "plain"):
        keras.utils.clear_session()  # layers are named anew
        model = on_towers(mlp, TOWERS) if name == "towers" else mlp()
        fit(model)
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
    assert contents(tmp_path / "towers.weights.h5") == contents(tmp_path / "plain.weights.h5")
    assert any("optimizer" in path for path in contents(tmp_path / "plain.weights.h5"))
    members = {}
    for name in ("towers", "plain"):
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as archive:
            config = json.loads(archive.read("config.json"), object_hook=without_object_ids)
            members[name] = sorted(archive.namelist()), config
            archive.extract("model.weights.h5", tmp_path / name)
    assert members["towers"] == members["plain"]
    assert contents(tmp_path / "towers/model.weights.h5") == contents(tmp_path / "plain/model.weights.h5")


@pytest.mark.slow
@pytest.mark.parametrize("trained_before", [False, True])
def test_plain_models_weights_load_into_towers(tmp_path, trained_before):
    """A plain model's weights reach all towers, and its optimizer state does where Keras loads that, which is
    into an optimizer that has trained; training goes on as in a plain model that loads the file."""
    plain = mlp()
    fit(plain, epochs=2)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model, alone = on_towers(mlp, TOWERS), mlp()
    for each in (model, alone):
        if trained_before:
            fit(each)
        each.load_weights(tmp_path / "plain.weights.h5")
    for tower in range(TOWERS):
        assert_close(model.towers.get_weights(tower), plain.get_weights(), tolerance=0.0)
    assert_close(rounds(model), rounds(alone))
    assert_towers_agree(model)


@pytest.mark.slow
def test_saved_model_trains_on_towers_again(folder):
    """A file of a model on towers, loaded in a factory: training goes on as on one device."""

    def factory():
        return keras.models.load_model(folder / "saved.keras")

    model = on_towers(factory, TOWERS)
    assert_close(rounds(model), rounds(factory()))
    assert_towers_agree(model)


def test_pickle_is_a_plain_model():
    """A model takes its weights and optimizer state along when it is pickled, and not its towers."""
    model = on_towers(mlp, TOWERS)
    fit(model)
    plain = pickle.loads(pickle.dumps(model))
    assert not hasattr(plain, "towers")
    assert type(plain) is type(model)
    assert_close(plain.get_weights(), model.get_weights(), tolerance=0.0)
    assert_close([fit(plain), plain.get_weights()], [fit(model), model.get_weights()])
    assert_towers_agree(model)
