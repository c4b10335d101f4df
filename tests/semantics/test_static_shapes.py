"""Lengths that TensorFlow leaves open, and what they spare."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ncclsync import nccl_parallel
from ncclsync.semantics.static_shapes import tighten


@pytest.mark.parametrize("shape", [(None, 3), (None, 7, 3), (None, None, 3)])
def test_a_softmax_cross_entropy_has_its_width(shape):
    """Its logits and labels are reshaped to what is computed of a shape with open lengths."""

    @tf.function(input_signature=[tf.TensorSpec(shape), tf.TensorSpec(shape)], autograph=False)
    def loss(labels, logits):
        return tf.nn.softmax_cross_entropy_with_logits(labels, logits)

    graph = loss.get_concrete_function().graph
    (op,) = (op for op in graph.get_operations() if op.type == "SoftmaxCrossEntropyWithLogits")
    assert op.outputs[1].shape.as_list() == [None, None]
    tighten(graph)
    assert [one.shape.as_list() for one in (*op.inputs, op.outputs[1])] == [[None, 3]] * 3


def test_what_is_not_known_stays_open():
    """A width that comes from the data, and one that two open lengths make."""

    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([], tf.int32)], autograph=False)
    def reshaped(tensor, width):
        return tf.reshape(tensor, [-1, width]), tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[1:]], 0))

    graph = reshaped.get_concrete_function().graph
    before = [[output.shape.as_list() for output in op.outputs] for op in graph.get_operations()]
    tighten(graph)
    assert [[output.shape.as_list() for output in op.outputs] for op in graph.get_operations()] == before


@pytest.mark.slow
def test_a_shape_that_many_ops_compute():
    """Stays open where hundreds of integers lead to it, and costs no error."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    def reshaped(tensor):
        count = tf.shape(tensor)[0] * 0
        for _ in range(600):
            count = count + tf.shape(tensor)[1]
        return tf.reshape(tf.ones([8]), tf.stack([1 + 0 * count, -1]))

    tighten(reshaped.get_concrete_function().graph)


def test_shapes_follow_through_any_op():
    """Axes and paddings are known where they are constants; large constants are not looked at."""

    @tf.function(input_signature=[tf.TensorSpec([None, 6])], autograph=False)
    def step(tensor):
        last = tf.slice(tf.shape(tensor), [1], [1])
        flat = tf.reshape(tensor, tf.concat([[-1], last], 0)) + tf.ones([6])
        padded = tf.pad(flat, [[0, 0], [1, 2]]) * tf.constant(np.ones([1, 9], "float32"))
        return tf.concat([padded, padded], 1), tf.transpose(padded), tf.argmax(padded, 1)

    graph = step.get_concrete_function().graph
    tighten(graph)
    shapes = {op.type: op.outputs[0].shape.as_list() for op in graph.get_operations() if op.outputs}
    assert shapes["Pad"] == [None, 9] and shapes["Transpose"] == [9, None] and shapes["ArgMax"] == [None]
    assert [None, 18] in [op.outputs[0].shape.as_list() for op in graph.get_operations() if op.type == "ConcatV2"]


def test_one_hot_labels_are_not_gathered():
    """A step with Keras' categorical cross-entropy needs no tower to have another's rows."""

    @nccl_parallel(towers=3)
    def build():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "softmax")])
        model.compile("sgd", "categorical_crossentropy")
        return model

    model = build()
    model.fit(np.ones([8, 5], "float32"), np.eye(4, dtype="float32").repeat(2, 0), verbose=0)
    assert "gather" not in str(model.towers.explain())
