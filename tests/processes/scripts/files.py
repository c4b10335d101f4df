"""Train, save and load by programs on towers of one process, or of several, each in a folder of its own.

    files.py OUT TOWERS NAME...

TOWERS are those of each process, such as 2,1,1. Process r works in OUT/r/NAME, and writes its numbers to OUT/r.npz.
"""

import functools
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import ncclsync
from ncclsync import nccl_parallel

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
OUT = pathlib.Path(sys.argv[1]).absolute()
layers, callbacks = keras.layers, keras.callbacks
ROWS, BATCH = 61, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.integers(0, 3, ROWS)
VALIDATION = RNG.normal(size=(21, 6)).astype("float32"), RNG.integers(0, 3, 21)


def mlp(optimizer=None, dropout=0.0):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dropout(dropout), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


def on_towers(towers, factory=mlp, **options):
    keras.utils.set_random_seed(1)
    return nccl_parallel(towers=towers, **options)(factory)()


def state_of(model, name):
    """All numbers of a model, as Python sees them now."""
    found = {f"{name} weight {i}": value.numpy() for i, value in enumerate(model.weights)}
    return found | {f"{name} optimizer {i}": value.numpy() for i, value in enumerate(model.optimizer.variables)}


def of_history(history, name):
    return {f"{name} history {key}": np.array(values) for key, values in history.history.items()}


def fit(model, **options):
    return model.fit(X, Y, **{"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False, **options})


def saving(towers):
    """Save in three ways, read back at once, and in the factory of another model."""
    model = on_towers(towers)
    fit(model)
    saves = [
        (model.save, "model.keras"),
        (model.save_weights, "model.weights.h5"),
        (functools.partial(model.export, verbose=False), "exported"),
        (functools.partial(keras.saving.save_model, model), "function.keras"),
        (functools.partial(keras.saving.save_model, model), "function.h5"),
    ]
    for save, name in saves:
        if RANK == 0:
            time.sleep(0.3)
        save(name)
        assert (OUT / "0" / "saving" / name).exists()
    if model.towers.is_chief:
        keras.saving.save_model(model, "alone.keras")  # nobody waits for it
    keras.saving.save_model(keras.Sequential([keras.Input((1,)), layers.Dense(1)]), OUT / f"own{RANK}.keras")
    found = state_of(model, "saved")
    fit(model)
    model.load_weights("model.weights.h5")
    found |= state_of(model, "loaded")
    # Each process reads what process 0 has just written.
    other = on_towers(towers, lambda: keras.models.load_model(OUT / "0" / "saving" / "model.keras"))
    found |= state_of(other, "of a file")
    fit(other, epochs=1)
    found |= state_of(other, "trained on")
    new = on_towers(towers, lambda: mlp(keras.optimizers.Adam(0.5)))
    new.optimizer.build(new.trainable_variables)
    new.load_weights("model.weights.h5")  # before any step
    return found | state_of(new, "before steps")


class See(callbacks.Callback):
    """Keep what a callback is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen += [batch, *logs.values()]

    def on_epoch_end(self, epoch, logs=None):
        self.seen += [epoch, *logs.values()]


def watching(towers):
    """All callbacks that write or decide, with a progress bar."""
    model, see = on_towers(towers), See()
    stop = callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True, verbose=1)
    history = fit(
        model,
        epochs=9,
        verbose=2,
        validation_data=VALIDATION,
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        callbacks=[
            callbacks.CSVLogger("log.csv"),
            callbacks.ModelCheckpoint("best/{epoch}.keras", monitor="val_accuracy", save_best_only=True, verbose=1),
            [callbacks.ReduceLROnPlateau("val_loss", 0.3, patience=1, verbose=1)],
            callbacks.TensorBoard("board", histogram_freq=1),
            stop,
            ncclsync.Timeline("trace.json", steps=(2, 5)),
            callbacks.BackupAndRestore("kept", delete_checkpoint=False),
            see,
        ],
    )
    found = {"seen": np.array(see.seen), "stopped": np.array(stop.stopped_epoch), **of_history(history, "watching")}
    found["evaluate"] = np.array(model.evaluate(*VALIDATION, batch_size=8, verbose=1))
    found["predict"] = model.predict(X, batch_size=8, verbose=1)
    return found | state_of(model, "watching")


def own_list(towers):
    """A `CallbackList` that the program has made."""
    model, see = on_towers(towers), See()
    given = [callbacks.CSVLogger("log.csv"), callbacks.ModelCheckpoint("last.keras"), see]
    history = fit(model, callbacks=callbacks.CallbackList(given, add_history=True, model=model, epochs=2, steps=4))
    return of_history(history, "own list") | state_of(model, "own list") | {"seen": np.array(see.seen)}


def batches(towers):
    """The methods of one batch, steps_per_epoch, and fit called again."""
    model, found = on_towers(towers), {}
    for i, rows in enumerate((16, 7, 2)):
        found[f"train {i}"] = np.array(model.train_on_batch(X[:rows], Y[:rows], class_weight={0: 2.0, 1: 1.0, 2: 1.0}))
        found[f"test {i}"] = np.array(model.test_on_batch(X[:rows], Y[:rows]))
        found[f"predict {i}"] = model.predict_on_batch(X[:rows])
    found |= of_history(fit(model, steps_per_epoch=3, epochs=1), "first")
    found |= of_history(fit(model, epochs=3, initial_epoch=1, validation_split=0.25), "second")
    return found | state_of(model, "batches")


def accumulating(towers):
    """Save between two updates, of gradients that each tower holds a part of, and go on from there."""

    def factory():
        return mlp(keras.optimizers.Adam(0.02, gradient_accumulation_steps=3, use_ema=True))

    model = on_towers(towers, factory, compression="bfloat16")
    saves = callbacks.ModelCheckpoint("every.weights.h5", save_weights_only=True, save_freq=2)
    fit(model, callbacks=[saves, callbacks.TensorBoard("board", histogram_freq=1), callbacks.SwapEMAWeights()])
    model.save("between.keras")
    model.save_weights("between.weights.h5")
    found = state_of(model, "between")
    fit(model, epochs=1)
    found |= state_of(model, "went on")
    model.load_weights("between.weights.h5")
    return found | state_of(model, "went back")


def dividing(towers):
    """Save and load an optimizer's state of which each tower holds a part."""
    model = on_towers(towers, shard_optimizer=True)
    fit(model, callbacks=[callbacks.ModelCheckpoint("every.keras", save_freq=3), callbacks.BackupAndRestore("backup")])
    model.save("between.keras")
    found = state_of(model, "between")
    fit(model, epochs=1)
    found |= state_of(model, "went on")
    model.load_weights("between.keras")
    found |= state_of(model, "went back")
    fit(model, epochs=1)
    return found | state_of(model, "went on again")


def damaged(towers):
    """A backup that cannot be read, of which there is one before it."""
    found = {}
    for name in ("keras", "ncclsync"):
        for epochs in (3, 4):
            data = ncclsync.Shuffled(X, Y, batch_size=BATCH, seed=3)
            options = {"double_checkpoint": True, "delete_checkpoint": False}
            if name == "keras":
                backup = callbacks.BackupAndRestore(name, **options)
                data.seek(epochs - 3)
            else:
                backup = ncclsync.BackupAndRestore(name, data=data, **options)
            model = on_towers(towers)
            model.fit(data, epochs=epochs, verbose=0, callbacks=[backup])
            found |= state_of(model, f"{name} {epochs}")
            if RANK == 0:
                latest = pathlib.Path(name, "latest.weights.h5")
                latest.write_bytes(latest.read_bytes()[:-1000])
    return found


def two_models(towers):
    """Two models take turns, with one callback for both."""
    both, found = [on_towers(towers), on_towers(towers, lambda: mlp(keras.optimizers.SGD(0.1)))], {}
    backup = callbacks.BackupAndRestore("taken turns")
    for turn in range(2):
        for i, model in enumerate(both):
            found |= of_history(fit(model, callbacks=[backup]), f"{i} {turn}")
    both[0].save("first.keras")
    both[0].towers.close()
    fit(both[1], callbacks=[backup])
    return found | state_of(both[0], "first") | state_of(both[1], "second")


class Stop(callbacks.Callback):
    """Ends `fit` behind a batch, in all processes."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and int(self.model.optimizer.iterations) > 4:
            raise KeyboardInterrupt


def resuming(towers):
    """A run that ends on its way, goes on in another model, and comes to where it had come alone."""
    found = {}
    for name in ("keras", "ncclsync", "whole"):
        data = ncclsync.Shuffled(X, Y, batch_size=BATCH, seed=3)
        for ends in (True, False):
            if name == "keras":
                backup = callbacks.BackupAndRestore("of keras")
            else:
                data = ncclsync.Shuffled(X, Y, batch_size=BATCH, seed=3)
                backup = ncclsync.BackupAndRestore("of ncclsync", save_freq=2, data=data)
            model = on_towers(towers, lambda: mlp(dropout=0.3))
            given = [] if name == "whole" else [backup, *[Stop()] * ends]
            try:
                model.fit(data, epochs=3, verbose=0, callbacks=given)
            except KeyboardInterrupt:
                assert name != "whole"
        found |= state_of(model, name)
    return found


def loading(towers):
    """Samples that are loaded one by one, each in the process that trains on it alone."""
    loads = []

    def load(index, label):
        row = tf.numpy_function(lambda one: loads.append(int(one)) or X[one], [index], tf.float32)
        return tf.ensure_shape(row, [6]), label

    model, held = on_towers(towers), np.arange(20)
    options = {"batch_size": BATCH, "seed": 3, "load": load}
    data = ncclsync.Shuffled(np.arange(ROWS), Y, **options)
    validation = ncclsync.Shuffled(held, Y[held], **options)
    first = model.fit(data, verbose=0, validation_data=validation)  # Keras looks at a batch, to build metrics
    found = of_history(first, "first") | {"evaluate": np.array(model.evaluate(validation, verbose=0))}
    loads.clear()
    found |= of_history(model.fit(data, epochs=2, verbose=0, class_weight={0: 1.0, 1: 2.0, 2: 0.5}), "second")
    each = model.towers.communicator.exchange(loads, "what was loaded")
    return found | state_of(model, "loading") | {"loads": np.bincount(np.concatenate(each).astype(int), minlength=ROWS)}


ALL = (loading, own_list, saving, watching, batches, accumulating, dividing, two_models, resuming, damaged)
PROGRAMS = {one.__name__: one for one in ALL}

if __name__ == "__main__":
    towers, names = [int(number) for number in sys.argv[2].split(",")], sys.argv[3:]
    numbers = {}
    for program in names or PROGRAMS:
        folder = OUT / str(RANK) / program
        folder.mkdir(parents=True)
        os.chdir(folder)
        began = time.monotonic()
        for key, value in PROGRAMS[program](towers[RANK] if len(towers) > 1 else towers[0]).items():
            numbers[f"{program}: {key}"] = value
        print(f"[{RANK}] {program} took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    np.savez(OUT / f"{RANK}.npz", **numbers)
