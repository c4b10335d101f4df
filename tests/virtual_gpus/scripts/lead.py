"""Print when the call of a step returns, and when the GPUs are through, in ms: the host runs ahead of them.

The model is "dense", or "attention": its gradients are computed by shapes.
"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

from ncclsync import nccl_parallel
from ncclsync.compat.tensorflow import sync_devices

layers = keras.layers


@nccl_parallel(bucket_bytes=100_000)
def dense():
    model = keras.Sequential([keras.Input((128,)), *(layers.Dense(128, "tanh") for _ in range(6))])
    model.compile("adam", "mse", metrics=["mae"])
    return model


@nccl_parallel(bucket_bytes=20_000)
def attention():
    words = keras.Input((8, 16))
    x = layers.Dense(32)(words)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 16)(normal, normal)
        x = x + layers.Dense(32)(layers.Dense(64, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(words, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "mse", metrics=["mae"])
    return model


if sys.argv[1] == "dense":
    model, batch = dense(), (np.ones([64, 128], "float32"), np.ones([64, 128], "float32"))
else:
    model, batch = attention(), (np.ones([64, 8, 16], "float32"), np.ones([64, 1], "float32"))
model.make_train_function()
batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
for step in range(5):
    sync_devices()
    begun = time.monotonic()
    model.train_function(batches)
    called = time.monotonic() - begun
    sync_devices()
    if step > 1:  # the first ones trace
        print(f"{1e3 * called:.0f} {1e3 * (time.monotonic() - begun):.0f}", flush=True)
