"""Count the copies between host and GPUs that a step makes: prints, for each model, those beside its batch's."""

import itertools

import keras
import numpy as np
from counters import counted

from ncclsync import nccl_parallel

layers = keras.layers
ROWS = 22  # no multiple of the towers' number


def mlp():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model, np.ones([ROWS, 6], "float32"), np.ones([ROWS, 1], "float32")


def convolutional():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()])
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(5))
    model.compile(keras.optimizers.SGD(0.1, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, np.ones([ROWS, 8, 8, 3], "float32"), np.ones([ROWS], "int64")


def attention():
    words = keras.Input((7, 5))
    x = layers.Dense(8)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    model = keras.Model(words, layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.Adam(clipnorm=1.0), "mse")
    return model, np.ones([ROWS, 7, 5], "float32"), np.ones([ROWS, 3], "float32")


for build in (mlp, convolutional, attention):
    _, x, y = build()
    model = nccl_parallel(lambda build=build: build()[0])()
    model.steps_per_execution = 8  # what a call returns is read
    counts = []
    for steps in (8, 8, 24):
        model.fit(x.repeat(steps, 0), y.repeat(steps, 0), batch_size=ROWS, shuffle=False, verbose=0)
        counts.append(counted("to_device", "to_host"))
    short, long = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(counts))
    # Of all towers, but for their rows of two tensors.
    each = [(b - a) / 16 - own for a, b, own in zip(short, long, (2 * len(model.towers), 0), strict=True)]
    print(build.__name__, *(f"{number:.0f}" for number in each))
