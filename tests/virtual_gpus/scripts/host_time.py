"""Print the CPU time of a step for each tower, of 160 variables and many small ops, beside plain Keras on one GPU.

python tests/virtual_gpus/run.py --gpus 8 tests/virtual_gpus/scripts/host_time.py [TOWERS,...] [ROUNDS]
"""

import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from ncclsync import nccl_parallel

BLOCKS, WIDTH, ROWS, STEPS = 40, 8, 16, 20


def build():
    """A residual chain of normalisations and dense layers."""
    x = inputs = keras.Input([WIDTH])
    for _ in range(BLOCKS):
        x = x + keras.layers.Dense(WIDTH, activation="relu")(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse", jit_compile=False)
    return model


def trained(model):
    """Train `STEPS` steps; return the process' CPU time of one, in ms."""
    rows = np.ones([ROWS, WIDTH], "float32")
    before = time.process_time()
    model.fit(tf.data.Dataset.from_tensors((rows, rows)).repeat(), steps_per_epoch=STEPS, verbose=0)
    return (time.process_time() - before) / STEPS * 1e3


counts = [int(count) for count in (sys.argv[1] if len(sys.argv) > 1 else "1,2,4,8").split(",")]
with tf.device("GPU:0"):
    models = {0: build()}
models |= {count: nccl_parallel(towers=count)(build)() for count in counts}
times = {count: [] for count in models}
for _ in range(2 + int(sys.argv[2] if len(sys.argv) > 2 else 5)):  # the first two trace, and warm up
    for count, model in models.items():
        times[count].append(trained(model))
plain = statistics.median(times[0][2:])
print(f"plain Keras: {plain:.1f} ms")
for count in counts:
    each = statistics.median(times[count][2:]) / count
    print(f"{count} towers: {each:.1f} ms for each, {each / plain:.2f} of plain Keras")
