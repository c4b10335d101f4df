"""Train on GPUs that differ in speed, with even shards and with `shares="auto"`: prints ms of a step, and the shares.

    python tests/virtual_gpus/run.py --gpus 2 --ahead --element-ns 100,200 tests/virtual_gpus/scripts/shares.py 30

The argument says how many steps are timed, by the median.
"""

import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from ncclsync import nccl_parallel

STEPS, ROWS = int(sys.argv[1]), 240
X = np.random.default_rng(0).normal(size=(ROWS, 256)).astype("float32")
Y = np.random.default_rng(1).integers(0, 10, ROWS)


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Clock(keras.callbacks.Callback):
    """Take the time of each step, the GPUs' work included."""

    def on_train_begin(self, logs=None):
        self.begins = []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(time.monotonic())

    def on_train_batch_end(self, batch, logs=None):
        np.asarray(self.model.trainable_variables[0])  # when the step has ended

    def step_ms(self):
        return 1e3 * statistics.median(np.diff(self.begins))


weights = []
for shares in (None, "auto"):
    model = nccl_parallel(shares=shares)(build)()
    data = tf.data.Dataset.from_tensors((X, Y)).repeat()
    model.fit(data, steps_per_epoch=25, verbose=0)  # measured, and settled
    clock = Clock()
    model.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
    print(shares, f"{clock.step_ms():.1f}", model.towers.layout.shares, model.towers.divergence() == 0.0)
    weights.append(model.get_weights())
    model.towers.close()
apart = max(np.max(np.abs(one - other)) for one, other in zip(*weights, strict=True))
print("equal" if apart < 1e-4 else f"apart by {apart}")
