"""Print when the call of a step returns, and when the GPUs are through, in ms: the host runs ahead of them."""

import time

import keras
import numpy as np
import tensorflow as tf

from ncclsync import nccl_parallel
from ncclsync.compat.tensorflow import sync_devices


@nccl_parallel(bucket_bytes=100_000)
def build():
    model = keras.Sequential([keras.Input((128,)), *(keras.layers.Dense(128, "tanh") for _ in range(6))])
    model.compile("adam", "mse", metrics=["mae"])
    return model


model, rows = build(), np.ones([64, 128], "float32")
model.make_train_function()
batches = iter(tf.data.Dataset.from_tensors((rows, rows)).repeat())
for step in range(5):
    sync_devices()
    begun = time.monotonic()
    model.train_function(batches)
    called = time.monotonic() - begun
    sync_devices()
    if step > 1:  # the first ones trace
        print(f"{1e3 * called:.0f} {1e3 * (time.monotonic() - begun):.0f}", flush=True)
