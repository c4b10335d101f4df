"""`ordered_sums`: a step holds no sum of three and more tensors, whose order TensorFlow leaves open."""

import collections
import itertools
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

from ncclsync import nccl_parallel
from ncclsync.program.ordered_sums import order_sums

layers = keras.layers
X = np.random.default_rng(0).standard_normal((21, 7, 4))
Y = np.arange(21) % 5


@pytest.fixture(autouse=True)
def float64():
    """Of which the passes for CPU towers make no chains."""
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")


class Penalised(keras.Model):
    """A penalty on the inputs' gradient through an RNN, which all towers compute alike, of the whole batch."""

    def train_step(self, data):
        x, y = tf.cast(data[0], tf.float64), data[1]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), self(x, training=True))
            slopes = tf.sqrt(tf.reduce_sum(inner.gradient(losses, x) ** 2, [1, 2]) + 1e-9)
            loss = tf.reduce_mean(losses) + 0.1 * tf.reduce_mean(slopes)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def compiled(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def rnn():
    inputs = keras.Input((7, 4))
    stack = [layers.SimpleRNN(4, return_sequences=True), layers.GlobalMaxPooling1D(), layers.Dense(5)]
    return compiled(Penalised(inputs, keras.Sequential(stack)(inputs)))


def attention():
    """Its input is taken by six layers; so six gradients are added."""
    inputs = keras.Input((7, 4))
    mixed = layers.MultiHeadAttention(2, 2)(inputs, inputs) + inputs + layers.Dense(4)(inputs)
    mixed = layers.MultiHeadAttention(2, 2)(mixed, mixed) + mixed + layers.Dense(4)(mixed)
    return compiled(keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(mixed))))


def written_sums():
    """Sums that the model writes: of two, which TensorFlow would join, and of more, also in what a loop calls."""

    @tf.function(experimental_attributes={"_noinline": True})
    def called(x):
        return tf.add_n([x, tf.sin(x), tf.cos(x), tf.tanh(x)]) * (tf.sin(x) + tf.cos(x) + tf.exp(-(x**2)) + tf.tanh(x))

    class Sums(layers.Layer):
        def call(self, x):
            x = tf.map_fn(called, x) + tf.math.accumulate_n([x, 2.0 * x, tf.sin(x)])
            return tf.sin(x) + tf.cos(x) + tf.exp(-(x**2)) + tf.tanh(x)

    return compiled(keras.Sequential([layers.Dense(4), Sums(), layers.Flatten(), layers.Dense(5)]))


def train():
    """Train each model on towers, and with shards; `float64` is the fixture's."""
    keras.config.set_dtype_policy("float64")
    for build in (rnn, attention, written_sums):
        for options in ({"towers": 3}, {"towers": 2, "shards": 8}):
            model = nccl_parallel(build, **options)()
            model.fit(X, Y, batch_size=16, verbose=0)
            model.towers.close()


@pytest.mark.slow
def test_every_sum_that_runs_is_of_two(tmp_path):
    """TensorFlow writes each function's graph when it has optimised it, if it is told to before it starts."""
    asked = {"TF_DUMP_GRAPH_PREFIX": str(tmp_path), "TF_DUMP_GRAPH_NAME_FILTER": "*", "TF_DUMP_GRAPH_GROUPS": "main"}
    subprocess.run([sys.executable, __file__], check=True, env=os.environ | asked)
    sums = collections.Counter()
    for path in tmp_path.glob("*.after_graph_optimization.pbtxt"):
        graph = text_format.Parse(path.read_text(), tf.compat.v1.GraphDef())
        for node in itertools.chain(graph.node, *(function.node_def for function in graph.library.function)):
            if node.op in ("AddN", "AccumulateNV2") and node.attr["T"].type != tf.int32.as_datatype_enum:
                sums["in order" if "ordered_sums" in node.name else "as written", node.attr["N"].i] += 1
    assert {number for _, number in sums} == {2}, sums
    assert sums["in order", 2] > 20 and sums["as written", 2] > 20, sums


@pytest.mark.slow
def test_towers_keep_the_same_bits():
    """Before, two of three towers differed after almost every step."""
    for seed in range(3):
        keras.utils.set_random_seed(seed)
        model = nccl_parallel(rnn, towers=3)()
        model.fit(X, Y, batch_size=7, epochs=2, verbose=0, shuffle=False)
        assert model.towers.divergence() == 0.0
        model.towers.close()


def test_a_sum_keeps_its_order_its_name_and_what_it_waits_for():
    with tf.Graph().as_default() as graph:
        addends = [tf.constant(value, name=f"addend_{i}") for i, value in enumerate([1e8, 1.0, -1e8, 1.0])]
        with tf.control_dependencies([tf.no_op("before")]):
            tf.add_n(addends, name="total")
        tf.add_n([tf.constant(1)] * 4, name="of_integers")
    definition = graph.as_graph_def()
    assert order_sums(definition, on_cpu=False) == []
    assert {node.attr["N"].i for node in definition.node if node.op == "AddN" and node.name != "of_integers"} == {2}
    (total,) = (node for node in definition.node if node.name == "total")
    assert "^before" in total.input
    with tf.Graph().as_default():
        (tensor,) = tf.graph_util.import_graph_def(definition, return_elements=["total:0"], name="")
        with tf.compat.v1.Session() as session:
            assert session.run(tensor) == (np.float32(1e8) + np.float32(1.0) - np.float32(1e8)) + np.float32(1.0)


if __name__ == "__main__":
    train()
