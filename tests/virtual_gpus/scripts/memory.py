"""Train batches whose activations do not fit the GPUs' memory, with on_oom="split", and compare with one CPU.

With the argument "row": batches of which not even one row fits.
"""

import logging
import sys

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


def build_for_long_rows():
    keras.utils.set_random_seed(1)
    # A product, since XLA makes one loop of all else, which takes no memory.
    long = [layers.RepeatVector(400_000), layers.Dense(32, activation="tanh"), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((32,)), layers.Dense(32), *long, layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train_long_rows():
    """Print what is raised, and whether a weight has changed."""
    model = ncclsync.nccl_parallel(on_oom="split")(build_for_long_rows)()
    before = model.get_weights()
    for rows in (8, 1):
        try:
            model.train_on_batch(X[:rows], Y[:rows])
        except tf.errors.ResourceExhaustedError:
            same = all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
            print(rows, "rows: exhausted", "same" if same else "changed", "divergence", model.towers.divergence())


logging.getLogger("ncclsync").addHandler(Keep(level=logging.WARNING))
if "row" in sys.argv:
    train_long_rows()
    sys.exit()
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
