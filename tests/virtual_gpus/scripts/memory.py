"""Train batches whose activations do not fit the GPUs' memory, with on_oom="split", and compare with one CPU."""

import logging

import keras
import numpy as np
import tensorflow as tf

import ncclsync

ROWS = 2048
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 32)).astype("float32"), RNG.integers(0, 5, ROWS)
layers = keras.layers
warned = []


class Keep(logging.Handler):
    """Keep what is warned of."""

    def emit(self, record):
        warned.append(record.getMessage())


def build():
    keras.utils.set_random_seed(1)
    wide = [layers.Dense(4096, activation="tanh"), layers.Dense(16), layers.Dense(4096, activation="tanh")]
    model = keras.Sequential([keras.Input((32,)), *wide, layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def trained(model):
    losses = model.fit(X, Y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0).history["loss"]
    return [np.array(losses), *model.get_weights()]


logging.getLogger("ncclsync").addHandler(Keep(level=logging.WARNING))
model = ncclsync.nccl_parallel(on_oom="split")(build)()
found = trained(model)
with tf.device("CPU:0"):
    expected = trained(build())
apart = max(np.abs(one - other).max() / np.abs(other).max() for one, other in zip(found, expected, strict=True))
said = [words for words in warned if "does not fit the memory" in words]
shards = len(model.towers.explain().shards)
print(
    "shards",
    shards,
    "warnings",
    len(said),
    "apart" if apart > 1e-4 else "equal",
    "divergence",
    model.towers.divergence(),
)
