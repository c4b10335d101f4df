"""Callbacks see and do on N towers what they see and do on one device; a row is named after its class.

`SwapEMAWeights` and `BackupAndRestore` meet every tower's own copies in test_weights.py.
"""

import contextlib
import csv
import functools
import io
import re
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks
from parity import Case, check, data, mlp, on_towers, spread, state

X, Y = data()
BAD = np.where(np.arange(len(X))[:, None] == 45, np.nan, X)  # NaN in the third of four batches
NOT_IN_A_ROW = {
    "Callback": "the base class; UserCallback is one",
    "RemoteMonitor": "sends by HTTP the logs that History and LambdaCallback are shown",
    "OrbaxCheckpoint": "needs orbax-checkpoint, and with it JAX",
}


def jumpy(**optimizer_arguments):
    """A classifier that overfits within a few epochs."""
    return mlp(keras.optimizers.SGD(0.3, momentum=0.9, **optimizer_arguments))


def fit(model, *used, x=X, epochs=6, **options):
    """Fit with validation; return the history."""
    history = model.fit(
        x,
        Y,
        batch_size=20,
        epochs=epochs,
        shuffle=False,
        verbose=options.pop("verbose", 0),
        validation_data=(X[:33], Y[:33]),
        callbacks=list(used),
        **options,
    )
    return history.history


def using(make, *attributes, **options):
    """A `run` with one callback; returns these attributes of it as well."""

    def run(model):
        callback = make()
        history = fit(model, callback, **options)
        return [history, state(model), [getattr(callback, name) for name in attributes]]

    return run


def in_folder(run):
    """Let a run(model, folder) be a run(model)."""

    @functools.wraps(run)
    def runs(model):
        with tempfile.TemporaryDirectory() as folder:
            return run(model, Path(folder))

    return runs


def saved_weights(folder):
    """Every checkpoint's weights, by file name, as a plain model loads them."""

    def load(file):
        if file.suffix == ".keras":
            return keras.models.load_model(file).get_weights()
        model = jumpy()
        model.load_weights(file)
        return model.get_weights()

    return {file.name: load(file) for file in sorted(folder.iterdir())}


def checkpoints(name, **arguments):
    """A `run` that saves by ModelCheckpoint."""

    def run(model, folder):
        fit(model, callbacks.ModelCheckpoint(folder / name, **arguments))
        return saved_weights(folder)

    return in_folder(run)


@in_folder
def logged_to_csv(model, folder):
    """The file of two trainings, the second one appended."""
    fit(model, callbacks.CSVLogger(folder / "log.csv"), epochs=2)
    fit(model, callbacks.CSVLogger(folder / "log.csv", separator=",", append=True), epochs=1)
    header, *lines = csv.reader((folder / "log.csv").open())
    return [header, np.array(lines, "float64")]


class Interruption(Exception):
    """What ends a training in the middle."""


def interrupted(**arguments):
    """A `run` that stops in the middle of the second epoch, and goes on in a new model."""

    def run(model, folder):
        def interrupt(batch, logs):
            if model.optimizer.iterations == 7:
                raise Interruption

        with contextlib.suppress(Interruption):
            stopping = callbacks.LambdaCallback(on_train_batch_end=interrupt)
            fit(model, callbacks.BackupAndRestore(folder, **arguments), stopping)
        again = on_towers(jumpy, len(model.towers)) if hasattr(model, "towers") else jumpy()
        history = fit(again, callbacks.BackupAndRestore(folder, **arguments), epochs=3)
        return [history, state(again)]

    return in_folder(run)


def called_back(model):
    """All that the hooks are given, in order, in fit, evaluate and predict."""
    calls = []

    def note(hook):
        return lambda *given, logs=None: calls.append([hook, *(g for g in (*given, logs) if g is not None)])

    hooks = [name for name in vars(callbacks.Callback) if re.match("on_(train|test|predict|epoch)_", name)]
    given = callbacks.LambdaCallback(**{hook: note(hook) for hook in hooks})
    for hook in hooks:
        setattr(given, hook, note(hook))
    fit(model, given, epochs=2)
    model.evaluate(X, Y, batch_size=20, verbose=0, callbacks=[given])
    model.predict(X, batch_size=20, verbose=0, callbacks=[given])
    return calls


def shown(verbose):
    """A `run`: what the progress bar prints, without the times."""

    def run(model):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            fit(model, epochs=2, verbose=verbose)
            print("Epoch of evaluate")
            model.evaluate(X, Y, batch_size=20, verbose=verbose)
            print("Epoch of predict")
            model.predict(X, batch_size=20, verbose=verbose)
        lines = re.split(r"[\n\r\x08]+", re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue()))
        lines = [line for line in lines if re.match(r"Epoch|4/4|2/2", line)]
        # How often a line is refreshed depends on the time; how it ends does not.
        last = [line for line, after in zip(lines, [*lines[1:], "Epoch"], strict=True) if after[:5] == "Epoch"]
        names = [re.findall(r"Epoch \d/\d|\d/\d|\w+(?=: )", line) for line in last]
        return [names, [[float(value) for value in re.findall(r": (\d+\.\d+)", line)] for line in last]]

    return run


def events(folder):
    """What TensorFlow's event files hold: {(folder, tag, step): scalars, or kinds of data}."""
    found = {}
    for file in sorted(folder.rglob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            if event.HasField("graph_def"):
                found.setdefault(f"{file.parent.name} graph {event.step}", []).append(1)
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                # Not what is made of bytes: the configuration of the model, which names no tower.
                array = array.astype("float64") if array.dtype.kind in "fiu" else len(array.ravel())
                found.setdefault(f"{file.parent.name} {value.tag} {event.step}", []).append(array)
    return found


def written_by_tensorboard(**arguments):
    """A `run`: all scalars, histograms and graphs that the callback writes."""

    def run(model, folder):
        fit(model, callbacks.TensorBoard(folder, **arguments), epochs=2)
        return events(folder)

    return in_folder(run)


class Summarising(keras.Sequential):
    """Writes a summary in its step."""

    def train_step(self, batch):
        logs = super().train_step(batch)
        step = tf.cast(self.optimizer.iterations.value, "int64")
        tf.summary.write("loss", logs["loss"], step=step)
        return logs


def summarising():
    keras.utils.set_random_seed(1)
    model = Summarising([keras.Input((12,)), keras.layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@in_folder
def written_by_the_step(model, folder):
    with tf.summary.create_file_writer(str(folder)).as_default():
        fit(model, epochs=1)
    return {name.split(maxsplit=1)[1]: values for name, values in events(folder).items()}


class UserCallback(callbacks.Callback):
    """Reads weights and logs of every batch, and writes the learning rate and weights in between."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_batch_end(self, batch, logs=None):
        self.read.append([dict(logs), self.model.get_weights()])
        if batch == 1:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate.numpy())
        if batch == 2:
            self.model.layers[0].kernel.assign(0.9 * self.model.layers[0].kernel.value)
        if batch == 3:
            self.model.set_weights([0.99 * array for array in self.model.get_weights()])

    def on_epoch_end(self, epoch, logs=None):
        logs["own"] = self.model.evaluate(X[:7], Y[:7], verbose=0)  # a key that later callbacks see
        if epoch == 2:
            self.model.stop_training = True


def listed(model):
    """Callbacks that come as a list of Keras' own class, called by hand as a loop of one's own does."""
    user = UserCallback()
    made = callbacks.CallbackList([user], add_history=True, model=model, epochs=2, steps=4)
    made.on_train_begin()
    for epoch in range(2):
        made.on_epoch_begin(epoch)
        for batch in range(4):
            rows = slice(20 * batch, 20 * batch + 20)
            made.on_train_batch_begin(batch)
            logs = model.train_on_batch(X[rows], Y[rows], return_dict=True)
            made.on_train_batch_end(batch, logs)
        made.on_epoch_end(epoch, model.get_metrics_result())
    made.on_train_end()
    return [user.read, state(model), model.history.history]


def early(**arguments):
    options = {"patience": 1, "restore_best_weights": True, **arguments}
    return using(lambda: callbacks.EarlyStopping(**options), "stopped_epoch", "best", "best_epoch", epochs=20)


def plateau():
    return callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=0.3, cooldown=1)


CASES = {
    "History": Case(jumpy, using(callbacks.History, "history", "epoch", "params")),
    "CSVLogger": Case(jumpy, logged_to_csv),
    "EarlyStopping": Case(jumpy, early()),
    "EarlyStopping_baseline": Case(jumpy, early(monitor="val_accuracy", mode="max", baseline=0.9, start_from_epoch=2)),
    "ReduceLROnPlateau": Case(jumpy, using(plateau, "best", "wait")),
    "LearningRateScheduler": Case(
        jumpy, using(lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5**epoch))
    ),
    "ModelCheckpoint_best": Case(jumpy, checkpoints("{epoch}.keras", save_best_only=True)),
    "ModelCheckpoint_weights": Case(jumpy, checkpoints("{epoch}-{accuracy:.2f}.weights.h5", save_weights_only=True)),
    "ModelCheckpoint_batches": Case(
        jumpy, checkpoints("{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3)
    ),
    "BackupAndRestore": Case(jumpy, interrupted()),
    "BackupAndRestore_batches": Case(jumpy, interrupted(save_freq=2)),
    "LambdaCallback": Case(jumpy, called_back),
    "ProgbarLogger": Case(jumpy, shown(1)),
    "ProgbarLogger_lines": Case(jumpy, shown(2)),
    "SwapEMAWeights": Case(
        lambda: jumpy(use_ema=True, ema_momentum=0.8), using(lambda: callbacks.SwapEMAWeights(swap_on_epoch=True))
    ),
    "TerminateOnNaN": Case(jumpy, using(callbacks.TerminateOnNaN, x=BAD)),
    "TensorBoard": Case(jumpy, written_by_tensorboard(histogram_freq=1, write_graph=True)),
    "TensorBoard_batches": Case(jumpy, written_by_tensorboard(update_freq=2, write_images=True)),
    "summary_in_the_step": Case(summarising, written_by_the_step),
    "UserCallback": Case(jumpy, using(UserCallback, "read")),
    "CallbackList": Case(jumpy, listed),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, towers", spread(CASES))
def test_callback(name, towers):
    """What a callback is told, what it writes to files, and what it does to the training."""
    check(CASES[name], towers)


def test_every_callback_of_keras_is_in_a_row():
    """A class that Keras adds is missed here."""
    classes = {name for name, cls in vars(callbacks).items() if isinstance(cls, type)}
    assert classes - {name.split("_")[0] for name in CASES} == set(NOT_IN_A_ROW)
