"""Graphs: batches of them, merged graphs, message passing by segment sums."""

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(8)
NODES, FEATURES = 5, 3
FEATURE = RNG.standard_normal((23, NODES, FEATURES))
ADJACENCY = (RNG.random((23, NODES, NODES)) < 0.5).astype("float64")
LABELS = RNG.integers(0, 2, 23).astype("float64")
COUNTS = RNG.integers(1, NODES + 1, 23).astype("int32")
# One graph of 12 nodes, of which a batch holds some nodes' numbers.
EDGES = RNG.integers(0, 12, (2, 30))
NODE_FEATURES = RNG.standard_normal((12, 4))
INDICES = RNG.integers(0, 12, 23)
CLASSES = RNG.integers(0, 3, 12)


@program("https://keras.io/examples/graph/gnn_citations/", options={"exact": ("random",)}, towers=(4, 3))
def node_classification():
    """Every step works on the whole graph, and looks up the batch's nodes in the result."""

    class GraphConvLayer(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.ffn_prepare = keras.Sequential([layers.Dense(units, activation="gelu")])
            self.update_fn = keras.Sequential([layers.Dense(units, activation="gelu")])

        def call(self, inputs):
            node_representations, edges, edge_weights = inputs
            node_indices, neighbour_indices = edges[0], edges[1]
            neighbours = ops.take(node_representations, neighbour_indices, axis=0)
            messages = self.ffn_prepare(neighbours) * edge_weights[:, None]
            aggregated = tf.math.unsorted_segment_mean(messages, node_indices, num_segments=12)
            return tf.nn.l2_normalize(self.update_fn(tf.concat([node_representations, aggregated], axis=1)), axis=-1)

    class GNNNodeClassifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.node_features = tf.constant(NODE_FEATURES)
            self.edges = tf.constant(EDGES)
            self.edge_weights = tf.ones(30, dtype="float64") / 30.0
            self.preprocess = keras.Sequential([layers.Dense(4, activation="gelu"), layers.Dropout(0.2)])
            self.conv1 = GraphConvLayer(4)
            self.compute_logits = layers.Dense(3)

        def call(self, input_node_indices, training=False):
            x = self.preprocess(self.node_features, training=training)
            x = self.conv1((x, self.edges, self.edge_weights)) + x
            return self.compute_logits(tf.gather(x, input_node_indices))

    def build():
        model = GNNNodeClassifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
        return model

    return build, fit(INDICES, CLASSES[INDICES], predict=INDICES)


@program("https://keras.io/examples/graph/gat_node_classification/")
def graph_attention():
    """Attention over a node's edges: exponentials by their segment sums; a gather of the batch's nodes."""

    class GraphAttention(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units

        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(4, self.units), name="kernel")
            self.kernel_attention = self.add_weight(shape=(self.units * 2, 1), name="kernel_attention")

        def call(self, node_states):
            edges = tf.transpose(tf.constant(EDGES))
            transformed = tf.matmul(node_states, self.kernel.value)
            expanded = tf.reshape(tf.gather(transformed, edges), (tf.shape(edges)[0], -1))
            scores = tf.nn.leaky_relu(tf.matmul(expanded, self.kernel_attention.value))
            scores = tf.math.exp(tf.clip_by_value(tf.squeeze(scores, -1), -2, 2))
            sums = tf.math.unsorted_segment_sum(scores, edges[:, 0], 12)
            normalised = scores / tf.gather(sums, edges[:, 0])
            neighbours = tf.gather(transformed, edges[:, 1])
            return tf.math.unsorted_segment_sum(neighbours * normalised[:, None], edges[:, 0], 12)

    class GraphAttentionNetwork(keras.Model):
        def __init__(self):
            super().__init__()
            self.preprocess = layers.Dense(4, activation="relu")
            self.attention = GraphAttention(4)
            self.output_layer = layers.Dense(3)

        def call(self, indices):
            x = self.preprocess(tf.constant(NODE_FEATURES))
            return tf.gather(self.output_layer(self.attention(x) + x), indices)

        def train_step(self, data):
            indices, labels = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=labels, y_pred=self(indices))
            grads = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            return {"total": loss}

    def build():
        model = GraphAttentionNetwork()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        return model

    return build, fit(INDICES, CLASSES[INDICES], predict=INDICES)


@program("https://keras.io/examples/generative/wgan-graphs/")
def relational_graph_convolution():
    """Dense batches of adjacencies and features; graphs are read out by a sum over their nodes."""

    class GraphConvolution(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units

        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(input_shape[1][-1], self.units), name="W")
            self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="b")

        def call(self, inputs):
            adjacency, features = inputs
            x = ops.matmul(ops.matmul(adjacency, features), self.kernel) + self.bias
            return ops.relu(x)

    def build():
        adjacency, features = keras.Input((NODES, NODES)), keras.Input((NODES, FEATURES))
        x = GraphConvolution(4)([adjacency, features])
        x = GraphConvolution(3)([adjacency, x])
        x = ops.sum(x, axis=1)
        model = keras.Model([adjacency, features], layers.Dense(1)(x))
        model.compile(keras.optimizers.Adam(0.001), keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    return build, fit([ADJACENCY, FEATURE], LABELS, predict=[ADJACENCY, FEATURE])


@program("https://keras.io/examples/graph/mpnn-molecular-graphs/", towers=(4, 3))
def message_passing():
    """Messages by the edges' kernels, a GRU cell that updates nodes, of an unbuilt subclassed model."""

    class MessagePassing(keras.Model):
        def __init__(self, units=3, steps=2):
            super().__init__()
            self.units, self.steps = units, steps
            self.edge_network = layers.Dense(units * units)
            self.update_step = layers.GRUCell(units)
            self.readout = layers.Dense(1)

        def call(self, inputs):
            adjacency, features = inputs["bonds"], inputs["atoms"]
            kernels = self.edge_network(adjacency[..., None])
            kernels = ops.reshape(kernels, (-1, NODES, NODES, self.units, self.units))
            nodes = features
            for _ in range(self.steps):
                messages = ops.sum(ops.einsum("bijuv,bjv->bijuv", kernels, nodes), axis=(2, 4))
                flat = ops.reshape(messages, (-1, self.units))
                nodes, _ = self.update_step(flat, ops.reshape(nodes, (-1, self.units)))
                nodes = ops.reshape(nodes, (-1, NODES, self.units))
            return self.readout(ops.mean(nodes, axis=1))

    def build():
        model = MessagePassing()
        model.compile(keras.optimizers.Adam(0.001), keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    x = {"atoms": FEATURE, "bonds": ADJACENCY}
    return build, fit(x, LABELS[:, None], predict=x)


@program("https://keras.io/examples/graph/mpnn-molecular-graphs/", towers=(4, 3))
def merged_graphs():
    """Graphs of a batch merged into one within the step: `boolean_mask`, `repeat`, segment means."""

    class Merged(keras.Model):
        def __init__(self):
            super().__init__()
            self.message = layers.Dense(4, activation="relu")
            self.message.build((None, FEATURES))
            self.readout = layers.Dense(1)
            self.readout.build((None, 4))

        def train_step(self, data):
            (features, counts), labels = data
            mask = tf.sequence_mask(counts, NODES)
            nodes = tf.boolean_mask(features, mask)
            graphs = tf.repeat(tf.range(tf.shape(counts)[0]), counts)
            with tf.GradientTape() as tape:
                messages = self.message(nodes)
                pooled = tf.math.segment_mean(messages, graphs)
                loss = self.compute_loss(y=labels, y_pred=self.readout(pooled))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"total": loss, "nodes": tf.shape(nodes)[0]}

    def build():
        model = Merged()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    return build, fit((FEATURE, COUNTS), LABELS[:, None])


@program("https://www.tensorflow.org/text/guide/word_embeddings", towers=(4, 3))
def skip_gram():
    """Word2vec with the batch's other words as negatives; Adagrad's sparse slices of repeated words."""

    class Word2Vec(keras.Model):
        def __init__(self):
            super().__init__()
            self.target_embedding = layers.Embedding(12, 3)
            self.context_embedding = layers.Embedding(12, 3)

        def call(self, pair):
            target, context = pair
            word_emb = self.target_embedding(target)
            context_emb = self.context_embedding(context)
            return ops.einsum("be,bce->bc", word_emb, context_emb)

    def build():
        model = Word2Vec()
        model.compile(
            keras.optimizers.Adagrad(0.01), keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
        )
        return model

    pairs = (INDICES, np.stack([np.roll(INDICES, shift) for shift in range(3)], axis=1))
    return build, fit(pairs, np.eye(3)[np.zeros(23, dtype=int)], predict=pairs)
