"""Train with audits, and print what they find: `audited.py [EPOCHS [SHARDS]]`."""

import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync

tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 8, 8, 3)).astype("float32"), RNG.integers(0, 5, 60)
layers = keras.layers


def build():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization()])
    for layer in (layers.Dropout(0.2), layers.Flatten(), layers.Dense(5, name="head")):
        model.add(layer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


EPOCHS, SHARDS = [*map(int, sys.argv[1:]), *[2, 0][len(sys.argv) - 1 :]]
model = ncclsync.nccl_parallel(exact=("batch_norm",), health=ncclsync.Health(audit_every=3), shards=SHARDS or None)(
    build
)()
try:
    model.fit(X, Y, batch_size=20, epochs=EPOCHS, verbose=0)
except ncclsync.AuditError as error:
    print("found", error.step, error.culprits, error.pairs, error)
else:
    print("healthy", model.towers.watch.steps)
