"""Some steps of a model in several buckets, on all GPUs and on the CPU: prints "equal", or what differs.

An argument is an option that is turned on, such as `shard_optimizer`.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from ncclsync import Health, nccl_parallel

X = np.random.default_rng(0).normal(size=(64, 24)).astype("float32")
Y = np.random.default_rng(1).integers(0, 5, 64)


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((24,)), *(keras.layers.Dense(48, "tanh") for _ in range(3))])
    model.add(keras.layers.Dense(5))
    model.compile(keras.optimizers.SGD(0.5, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


with tf.device("/CPU:0"):
    alone = build()
    alone.fit(X, Y, batch_size=16, epochs=4, verbose=0, shuffle=False)
model = nccl_parallel(bucket_bytes=6000, health=Health(timeout_s=20), **dict.fromkeys(sys.argv[1:], True))(build)()
model.fit(X, Y, batch_size=16, epochs=4, verbose=0, shuffle=False)
apart = max(np.max(np.abs(a - b)) for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))
print("equal" if apart < 1e-4 else f"apart by {apart}", model.towers.divergence() == 0.0)
