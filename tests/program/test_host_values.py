"""What the host knows stays there, where towers are GPUs; counted on virtual GPUs by tests/virtual_gpus."""

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.program.host_values import ENTERING, enter


def extremes(dtype):
    if dtype == tf.bool:
        return [False, True]
    numbers = [0, 1, 7, dtype.min, dtype.max]
    if dtype.is_floating:
        numbers += [-0.0, np.nan, np.inf, -np.inf, 1 / 3, -1e-4]
    return [*numbers, *([] if dtype.is_unsigned else [-1, -5])]


@pytest.mark.parametrize("dtype", ENTERING, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_numbers_enter_with_all_their_bits(dtype, shape):
    """Whatever the number is; floats that are none of the numbers, too."""
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(dtype, shape, "number")
    definition = graph.as_graph_def()
    name = enter(definition, "entered", "number:0", dtype, shape)

    @tf.function(input_signature=[tf.TensorSpec(shape, dtype)])
    def entered(number):
        (result,) = tf.graph_util.import_graph_def(definition, {"number:0": number}, [name], name="")
        return result

    for number in extremes(dtype):
        # An array: TensorFlow keeps Python's numbers, and would take -0.0 for 0.0 in every later test.
        sent = tf.fill(shape, tf.constant(np.array(number, dtype.as_numpy_dtype)))
        received = entered(sent)
        assert (received.dtype, received.shape) == (dtype, shape)
        assert received.numpy().tobytes() == sent.numpy().tobytes(), number
