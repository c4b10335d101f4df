"""`ordered_threads`: with several threads for an op of the CPU, towers and repeated runs keep the same bits."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from ncclsync import Towers, nccl_parallel
from ncclsync.program.ordered_sums import order_sums

layers = keras.layers
ROWS = 256
X = np.random.default_rng(0).integers(0, 30, (2 * ROWS, 64)).astype("int32")
Y = np.arange(2 * ROWS) % 5


class Learned(keras.Model):
    """Beside a layer a tensor of no rows: its crops' gradient and its histogram are what all towers compute alike."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)
        self.image = self.add_weight(shape=(1, 128, 128, 4), initializer="normal", name="image")
        self.sums = self.add_weight(shape=(50,), initializer="zeros", trainable=False, name="sums")

    def call(self, x):
        return self.dense(tf.cast(x, tf.float32))

    def train_step(self, data):
        corners = tf.linspace([0.0, 0.0, 0.5, 0.5], [0.5, 0.4, 1.0, 0.9], 200)
        with tf.GradientTape() as tape:
            crops = tf.image.crop_and_resize(self.image, corners, tf.zeros([200], tf.int32), [14, 14])
            loss = tf.reduce_mean(self(data[0]) ** 2) + tf.reduce_mean(tf.sin(crops))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        pixels = tf.reshape(tf.convert_to_tensor(self.image), [-1])
        bins = tf.cast(tf.math.floormod(pixels * 1e4, 50.0), tf.int32)
        self.sums.assign(tf.ensure_shape(tf.math.bincount(bins, pixels, minlength=50, maxlength=50), [50]))
        return {"loss": loss}


def learned():
    model = Learned()
    model.compile("sgd", jit_compile=False)
    return model


def words():
    """Of many words few come, each often: so many slices are added to each of a few rows."""
    stack = [layers.Embedding(40000, 64), layers.GlobalAveragePooling1D(), layers.Dense(5)]
    model = keras.Sequential([keras.Input((64,), dtype="int32"), *stack])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def train():
    """Before, each of these towers differed, and each run."""
    for build in (words, learned):
        runs = set()
        for _ in range(3):
            keras.utils.set_random_seed(0)
            model = nccl_parallel(build, towers=2)()
            model.fit(X, Y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False)
            assert model.towers.divergence() == 0.0, build
            runs.add(model.layers[0].get_weights()[0].tobytes())
            model.towers.close()
        assert len(runs) == 1, build


@pytest.mark.slow
def test_towers_and_runs_keep_the_same_bits():
    """TensorFlow takes the number of threads before it starts."""
    subprocess.run([sys.executable, __file__], check=True, env=os.environ | {"TF_NUM_INTRAOP_THREADS": "4"})


WRITES = {
    "of one axis": ((6,), [1, 0, 1], np.array([1.5, 2.0, 4.0])),
    "of two": ((6, 2), [1, 0, 1], np.arange(6.0).reshape(3, 2)),
    "of places of two axes": ((6, 2), [[1, 0], [1, 5]], np.arange(8.0).reshape(2, 2, 2)),
    "one number for all": ((6, 2), [1, 0, 1], np.array(3.0)),
    "one place": ((6, 2), 4, np.array([1.0, 2.0])),
    "none": ((6, 2), np.zeros(0, "int64"), np.zeros((0, 2))),
    "of integers": ((6,), [1, 0, 1], np.array([1, 2, 4])),
}
COUNTS = {
    "with weights": ([1, 0, 1, 7], np.array([1.0, 2.0, 4.0, 8.0])),
    "without": ([1, 0, 1], np.zeros(0)),
    "of rows": ([[1, 0, 1], [2, 7, 2]], np.arange(6.0).reshape(2, 3)),
    "of rows without": ([[1, 0, 1], [2, 7, 2]], np.zeros(0)),
    "of nothing": (np.zeros(0, "int32"), np.zeros(0)),
    "of a number": (1, np.array(2.0)),
    "of integers": ([1, 0, 1], np.array([1, 2, 4])),
}


@pytest.mark.parametrize("in_branch", [False, True])
def test_results_are_those_of_the_ops_themselves(in_branch):
    """In a step, and in a branch of it."""
    variables = {name: tf.Variable(tf.zeros(shape, added.dtype)) for name, (shape, _, added) in WRITES.items()}

    def work():
        for name, (_, places, added) in WRITES.items():
            variables[name].scatter_add(tf.IndexedSlices(tf.constant(added), tf.constant(places)))
            variables[name].scatter_sub(tf.IndexedSlices(tf.constant(3 * added), tf.constant(places)))
        counts = [tf.raw_ops.DenseBincount(input=one, size=3, weights=weights) for one, weights in COUNTS.values()]
        seen = tf.raw_ops.DenseBincount(input=[1, 1], size=3, weights=[2.0, 3.0], binary_output=True)
        return [*counts, seen]

    def step(x):
        if not in_branch:
            return work(), tf.reduce_sum(x)
        return tf.cond(tf.reduce_sum(x) > 0, work, lambda: [0 * one for one in work()]), tf.reduce_sum(x)

    expected = work()
    sums = [variable.numpy() for variable in variables.values()]
    for variable in variables.values():
        variable.assign(tf.zeros_like(variable))
    with Towers(2) as towers:
        counts, _ = towers.run(step, tf.ones([4]))
        assert towers.divergence() == 0.0
    for one, other in zip([*variables.values(), *counts], [*sums, *expected], strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_such_ops_are_changed():
    """Sums of integers, and what is only seen or not, are the same in any order."""
    with tf.Graph().as_default() as graph:
        for dtype in (tf.int64, tf.float32):
            handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=[3])
            tf.raw_ops.ResourceScatterAdd(resource=handle, indices=[1], updates=tf.ones([1], dtype), name=dtype.name)
            for binary in (False, True):
                weights = tf.ones([1], dtype)
                tf.raw_ops.DenseBincount(
                    input=[1], size=3, weights=weights, binary_output=binary, name=f"{binary}_{dtype.name}"
                )
    definition = graph.as_graph_def()
    before = {node.name: node.op for node in definition.node}
    added = order_sums(definition, on_cpu=True)
    changed = {node.name: node.op for node in definition.node if node.op != before[node.name]}
    assert changed == {"float32": "StatefulPartitionedCall", "False_float32": "PartitionedCall"}
    assert len(added) == len(definition.library.function) == 2


if __name__ == "__main__":
    train()
