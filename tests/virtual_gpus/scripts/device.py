"""Devices, copies, kernels, variables and memory: run on two virtual GPUs, of 64 MB."""

import numpy as np
import tensorflow as tf
from counters import counted

assert [d.name for d in tf.config.list_logical_devices("GPU")] == ["/device:GPU:0", "/device:GPU:1"]
with tf.device("/GPU:1"):
    numbers = tf.constant(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    assert numbers.backing_device.endswith("GPU:1")
    before = counted("to_host", "bytes_to_host")
    np.testing.assert_array_equal(tf.matmul(numbers, numbers, transpose_b=True), [[5, 14], [14, 50]])
    assert [now - then for now, then in zip(counted("to_host", "bytes_to_host"), before, strict=True)] == [1, 16]
    variable = tf.Variable(numbers)
    old = variable.read_value()
    variable.assign_add(numbers)
    variable.scatter_nd_update([[0]], [[7.0, 7.0, 7.0]])
    np.testing.assert_array_equal(variable, [[7, 7, 7], [6, 8, 10]])
    np.testing.assert_array_equal(old, numbers)
with tf.device("/GPU:0"):
    np.testing.assert_array_equal(tf.identity(variable) * 2, [[14, 14, 14], [12, 16, 20]])
    np.testing.assert_array_equal(tf.where(numbers > 2.0), [[1, 0], [1, 1], [1, 2]])  # a shape that nobody knows
    inputs, kernel = np.random.normal(size=(2, 5, 6, 3)), np.random.normal(size=(2, 2, 3, 4))
    np.testing.assert_allclose(
        tf.transpose(tf.nn.conv2d(tf.transpose(inputs, [0, 3, 1, 2]), kernel, 2, "SAME", "NCHW"), [0, 2, 3, 1]),
        tf.nn.conv2d(inputs, kernel, 2, "SAME"),
    )
    try:
        tf.zeros([100, 2**20])
    except tf.errors.ResourceExhaustedError:
        print("out of memory")
try:
    tf.function(lambda: tf.matmul(numbers, tf.zeros([4, 4])))()
except (ValueError, tf.errors.InvalidArgumentError):
    print("all is well")
