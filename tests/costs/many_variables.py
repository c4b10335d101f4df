"""Time a step of a model with many weights of one number, on 4 CPU towers and on one device, in turns.

    .venv/bin/python tests/costs/many_variables.py [WEIGHTS] [ROUNDS]

Prints the seconds and the seconds of cores of a first step and of a step, an op on one thread on both sides, and the
median of their ratios. Not a test: the host must have nothing else to do.
"""

import functools
import operator
import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from ncclsync import nccl_parallel

STEPS = 20


class Scales(keras.layers.Layer):
    """Multiplies by weights of one number each."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def build(self, shape):
        self.scales = [self.add_weight(shape=(), initializer="ones") for _ in range(self.count)]

    def call(self, x):
        return functools.reduce(operator.mul, self.scales, x)


def timed(run):
    """Seconds, and seconds of cores."""
    began, of_cores = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - of_cores


def main(count=1000, rounds=15):
    tf.config.threading.set_intra_op_parallelism_threads(1)

    def factory():
        model = keras.Sequential([keras.Input((8,)), Scales(count), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
        return model

    models = {"one device": factory(), "4 towers": nccl_parallel(towers=4)(factory)()}
    data = tf.data.Dataset.from_tensors((tf.ones([64, 8]), tf.ones([64, 1]))).repeat()
    for name, model in models.items():
        seconds = timed(lambda model=model: model.fit(data, steps_per_epoch=1, verbose=0))
        print(name, "first step: {:.1f} s, {:.1f} s of cores".format(*seconds), flush=True)
    steps = [functools.partial(model.train_function, iter(data)) for model in models.values()]
    found = [[timed(lambda step=step: [step() for _ in range(STEPS)]) for step in steps] for _ in range(rounds)]
    for i, name in enumerate(models):
        seconds = 1e3 / STEPS * np.median([one[i] for one in found], axis=0)
        print(name, "a step: {:.1f} ms, {:.1f} ms of cores".format(*seconds))
    for i, what in enumerate(("seconds", "seconds of cores")):
        print(f"4 towers ÷ one device, {what}: {statistics.median(four[i] / one[i] for one, four in found):.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
