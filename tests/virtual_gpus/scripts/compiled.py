"""By XLA, as the arguments say: ops on each virtual GPU beside the CPU, or a model on towers beside no XLA."""

import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync
from ncclsync.ops import xla_programs

GPUS = [device.name for device in tf.config.list_logical_devices("GPU")]
rng = np.random.default_rng(0)
inputs = rng.normal(size=(64, 12)).astype("float32")
labels = rng.integers(0, 5, 64)
indices = rng.integers(0, 6, 11)


def several(x):
    """Elementwise ops, sums, a sort, a gather, a loop, a factorization, and results that are one tensor."""
    x = x[:6, :8]
    _, looped = tf.while_loop(lambda i, _: i < 7, lambda i, y: (i + 1, tf.sin(y) + 0.1 * y), (0, x))
    rows = tf.gather(x, indices)
    square = tf.matmul(x, x, transpose_b=True) + 10.0 * tf.eye(6)
    chosen = tf.where(x > 0, tf.exp(-x), x), tf.cast(10 * x, tf.int32), tf.argmax(x, 1), tf.sort(x, 1)
    sums = tf.math.unsorted_segment_sum(rows, indices, 6), tf.reduce_max(x, 0), tf.nn.softmax(x)
    return *chosen, *sums, looped, tf.linalg.cholesky(square), x, x, tf.shape(x)


def convolved(x):
    """A convolution, pooling and their gradients."""
    images, kernel = tf.reshape(x, [4, 8, 8, 3]), tf.reshape(x[:9], [3, 3, 3, 4])
    with tf.GradientTape() as tape:
        tape.watch((images, kernel))
        out = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(images, kernel, 2, "SAME")), 2, 2, "VALID")
        loss = tf.reduce_sum(out * out)
    return out, *tape.gradient(loss, (images, kernel))


def updated(x):
    """Variables that a program updates while what was read of them is held."""
    sums, changed, other = tf.Variable(tf.zeros_like(x)), tf.Variable(x), tf.Variable(tf.ones_like(x))

    @tf.function(jit_compile=True)
    def step(factor):
        sums.assign_add(changed * factor)
        changed.assign(tf.sin(changed) + factor)
        return tf.reduce_sum(sums) + tf.reduce_sum(other), changed.read_value()

    found = []
    for i in range(12):
        found.append(changed.read_value())  # the next step may not write it
        found += step(tf.constant(0.1 * i))
        if i % 5 == 4:
            other.assign(other * 0.5)  # by a kernel, between programs
    return [*found, sums.read_value(), changed.read_value()]


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "gelu"), keras.layers.LayerNormalization(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((12,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def trained(model):
    history = model.fit(inputs, labels, batch_size=16, epochs=3, verbose=0, shuffle=False)
    return [history.history["loss"], *model.get_weights(), *model.evaluate(inputs, labels, verbose=0)]


for what in {"ops": (several, convolved, updated), "towers": ()}[sys.argv[1]]:
    call = what if what is updated else tf.function(what, jit_compile=True)
    with tf.device("/CPU:0"):
        expected = [tensor.numpy() for tensor in call(tf.constant(inputs))]
    for gpu in GPUS:
        with tf.device(gpu):
            found = call(tf.constant(inputs))
            assert all(gpu in tensor.device for tensor in found if tensor.dtype.is_floating)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=what.__name__)
if sys.argv[1] == "towers":
    with tf.device("/CPU:0"):
        model = build()
        model.jit_compile = False
        expected = trained(model)
    model = ncclsync.nccl_parallel()(build)()
    assert model.jit_compile and len(model.towers) == len(GPUS)
    for one, other in zip(trained(model), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert model.towers.divergence() == 0
    assert not xla_programs.share_programs(("GPU:0", "CPU:0"))  # of which neither runs the other's programs
print("all is well")
