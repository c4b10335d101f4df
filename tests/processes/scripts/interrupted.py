"""Train with backups, slowly, to the end, and write the weights: a run that the test kills and starts again.

    interrupted.py OUT TOWERS PAUSE [EPOCHS]

TOWERS are each process'; PAUSE are seconds between batches.
"""

import pathlib
import sys
import time

import keras
import numpy as np

import ncclsync
from ncclsync.communicator.processes import find_process

OUT, TOWERS, PAUSE = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
EPOCHS = int(sys.argv[4]) if len(sys.argv) > 4 else 60
PROCESS = find_process()
RANK = 0 if PROCESS is None else PROCESS.rank
X = np.random.default_rng(0).normal(size=(61, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 61)


@ncclsync.nccl_parallel(towers=TOWERS)
def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Pause(keras.callbacks.Callback):
    """Makes a run last."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(PAUSE)


model = build()
data = ncclsync.Shuffled(X, Y, batch_size=8, seed=3)
backup = ncclsync.BackupAndRestore(OUT / "backup", save_freq=1, data=data)
last = keras.callbacks.ModelCheckpoint(str(OUT / "last.keras"), save_freq=3)
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[backup, last, Pause()])
values = [*model.weights, *model.optimizer.variables]
np.savez(OUT / f"end.{RANK}.npz", **{str(i): value.numpy() for i, value in enumerate(values)})
