"""Print the CPU time of a step for each tower, of 160 variables and many small ops, beside other libraries.

    python tests/virtual_gpus/run.py --gpus 8 tests/virtual_gpus/scripts/host_time.py [TOWERS,...] [ROUNDS] [mirrored]

Beside plain Keras on one GPU; with "mirrored" beside MirroredStrategy on as many GPUs, too. Medians of turns, of all
CPU time and of what is not the system's: of more virtual GPUs than cores, the system changes threads more often.
"""

import os
import sys

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
    """Train `STEPS` steps; return the process' CPU time of one, in ms, and what of it is the user's."""
    rows = np.ones([ROWS, WIDTH], "float32")
    before = os.times()
    model.fit(tf.data.Dataset.from_tensors((rows, rows)).repeat(), steps_per_epoch=STEPS, verbose=0)
    user, system = ((now - then) / STEPS * 1e3 for now, then in zip(os.times()[:2], before[:2], strict=True))
    return np.array([user + system, user])


def mirrored(count):
    """Build under MirroredStrategy on so many GPUs; its collectives by NCCL are CUDA's."""
    gpus = [f"GPU:{i}" for i in range(count)]
    with tf.distribute.MirroredStrategy(gpus, cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()).scope():
        return build()


counts = [int(count) for count in (sys.argv[1] if len(sys.argv) > 1 else "1,2,4,8").split(",")]
with tf.device("GPU:0"):
    models = {("plain Keras", 1): build()}
models |= {("ncclsync", count): nccl_parallel(towers=count)(build)() for count in counts}
if "mirrored" in sys.argv[3:]:
    models |= {("MirroredStrategy", count): mirrored(count) for count in counts}
times = {side: [] for side in models}
for _ in range(2 + int(sys.argv[2] if len(sys.argv) > 2 else 5)):  # the first two trace, and warm up
    for side, model in models.items():
        times[side].append(trained(model))
plain = times["plain Keras", 1]
for (name, count), taken in times.items():
    each = [np.divide(one, count) for one in taken]
    of_plain, user = np.median([one / other for one, other in zip(each[2:], plain[2:], strict=True)], axis=0)
    milliseconds = np.median(each[2:], axis=0)[0]
    print(f"{name}, {count}: {milliseconds:.1f} ms for each, {of_plain:.2f} of plain, user time {user:.2f}", flush=True)
