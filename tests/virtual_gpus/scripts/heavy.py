"""A product by XLA takes as long as is said, and is wrong on GPU 1: run with two GPUs."""

import time

import numpy as np
import tensorflow as tf

multiply = tf.function(tf.matmul, jit_compile=True)
found, seconds = [], []
for gpu in ("/GPU:0", "/GPU:1"):
    with tf.device(gpu):
        matrix = tf.reshape(tf.range(16.0), [4, 4])
        multiply(matrix, matrix)
        begin = time.perf_counter()
        found.append(multiply(matrix, matrix).numpy())
        seconds.append(time.perf_counter() - begin)
right = np.arange(16.0).reshape(4, 4) @ np.arange(16.0).reshape(4, 4)
np.testing.assert_array_equal(found[0], right)
assert (found[1] != right).sum() == 1, found[1]
assert seconds[0] >= 0.02 and seconds[1] >= 32 * 0.002, seconds
print("all is well")
