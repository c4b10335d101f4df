"""Train on all GPUs with backups; when it is started first, a GPU fails in the midst. Run by test_lost_gpu.py.

    lost.py HOW [SHARDS]

HOW: "lost", whatever is asked of the GPU fails from then on; or "hang", a collective does not end, this once.
SHARDS: of each batch; the weights are then compared with those of a run on one GPU, bit for bit, and there is dropout.
"""

import contextlib
import ctypes
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync

FAILED = pathlib.Path("failed")
HOW, SHARDS = sys.argv[1], [int(one) for one in sys.argv[2:]]
X = np.random.default_rng(0).normal(size=(61, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 61)


def build():
    keras.utils.set_random_seed(1)
    dropout = [keras.layers.Dropout(0.3, seed=2)] if SHARDS else []
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), *dropout, keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Fail(keras.callbacks.Callback):
    """Has GPU 1, as it is numbered without CUDA_VISIBLE_DEVICES, fail in the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 12 and not FAILED.exists():
            FAILED.touch()
            if HOW == "lost":
                pathlib.Path(os.environ["STANDIN_LOST"]).write_text("1")
            else:
                ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"]).standin_fail(b"stuck:1")


options = {"shards": SHARDS[0]} if SHARDS else {}
model = ncclsync.nccl_parallel(health=ncclsync.Health(timeout_s=3), **options)(build)()
print("towers", len(model.towers.devices), flush=True)
data = ncclsync.Shuffled(X, Y, batch_size=8, seed=3)
backup = ncclsync.BackupAndRestore("backup", save_freq=2, data=data)
model.fit(data, epochs=3, verbose=0, callbacks=[backup, Fail()])
model.towers.close()  # which joins the GPUs: another must not, beside it
with contextlib.nullcontext() if SHARDS else tf.device("/CPU:0"):
    alone = ncclsync.nccl_parallel(towers=1, **options)(build)() if SHARDS else build()
    alone.fit(ncclsync.Shuffled(X, Y, batch_size=8, seed=3), epochs=3, verbose=0)
apart = max(np.max(np.abs(a - b)) for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))
most = 0 if SHARDS else 1e-4
print("steps", int(model.optimizer.iterations), "equal" if apart <= most else f"apart by {apart}", flush=True)
