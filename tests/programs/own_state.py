"""Layers and models that keep variables of their own: statistics, queues, centres, codebooks, averages."""

import keras
import numpy as np
import tensorflow as tf
from harness import fit, program
from keras import layers, ops

RNG = np.random.default_rng(6)
X = RNG.standard_normal((23, 6)) * 2.0 + 1.0
Y = RNG.integers(0, 3, 23)


def logits_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def behind(layer, learning_rate=0.05):
    """A factory of a classifier with a layer in front and a network behind it."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layer(), layers.Dense(5, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(learning_rate), logits_loss(), metrics=["accuracy"])
        return model

    return build, fit(X, Y, predict=X, evaluate=True)


class Statistics(layers.Layer):
    """Holds a count, a mean and another moment of each feature."""

    def build(self, input_shape):
        def add(name, shape, initializer="zeros"):
            return self.add_weight(shape=shape, initializer=initializer, trainable=False, name=name)

        self.count = add("count", ())
        self.mean = add("mean", (input_shape[-1],))
        self.m2 = add("m2", (input_shape[-1],), "ones")


@program("https://github.com/openai/baselines/blob/master/baselines/common/running_mean_std.py", towers=(4, 3))
def welford():
    """Chan's parallel update of count, mean and M2; the call normalises by the updated values."""

    class RunningNormalization(Statistics):
        def call(self, x, training=False):
            if training:
                rows = ops.cast(ops.shape(x)[0], x.dtype)
                batch_mean, batch_var = ops.mean(x, axis=0), ops.var(x, axis=0)
                delta = batch_mean - self.mean
                total = self.count + rows
                self.m2.assign(self.m2 + batch_var * rows + ops.square(delta) * self.count * rows / total)
                self.mean.assign(self.mean + delta * rows / total)
                self.count.assign(total)
            variance = self.m2 / ops.maximum(self.count, 1.0)
            return (x - self.mean) / ops.sqrt(variance + 1e-3)

    return behind(RunningNormalization)


@program("https://github.com/openai/baselines/blob/master/baselines/common/mpi_running_mean_std.py")
def sums_of_powers():
    """Sum, sum of squares and count by `assign_add`; the call reads what it has written."""

    class RunningSums(Statistics):
        def call(self, x, training=False):
            if training:
                self.mean.assign_add(ops.sum(x, axis=0))
                self.m2.assign_add(ops.sum(ops.square(x), axis=0))
                self.count.assign_add(ops.cast(ops.shape(x)[0], x.dtype))
            count = ops.maximum(self.count, 1.0)
            mean = self.mean / count
            return (x - mean) / ops.sqrt(ops.maximum(self.m2 / count - ops.square(mean), 1e-2))

    return behind(RunningSums)


@program("https://keras.io/guides/making_new_layers_and_models_via_subclassing/")
def compute_sum():
    """The guide's `ComputeSum`, behind a Dense on three axes: `assign_add(ops.sum(...))`."""

    class ComputeSum(layers.Layer):
        def build(self, input_shape):
            self.total = self.add_weight(initializer="zeros", shape=(input_shape[-1],), trainable=False, name="total")

        def call(self, inputs):
            self.total.assign_add(ops.sum(inputs, axis=(0, 1)))
            return inputs

    def build():
        model = keras.Sequential(
            [keras.Input((3, 2)), layers.Dense(3), ComputeSum(), layers.Flatten(), layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.05), logits_loss())
        return model

    return build, fit(X.reshape(23, 3, 2), Y)


@program("https://keras.io/guides/making_new_layers_and_models_via_subclassing/")
def simple_running_mean():
    """A moving mean and variance, read before they are written, as by BatchNormalization: exact, no alarm."""

    class RunningMean(Statistics):
        def call(self, x, training=False):
            outputs = (x - self.mean) / ops.sqrt(self.m2 + 1e-3)
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
                self.m2.assign(0.9 * self.m2 + 0.1 * ops.mean(ops.square(x), axis=0))
            return outputs

    return behind(RunningMean)


@program("https://arxiv.org/abs/1702.03275")
def batch_renormalisation():
    """Batch moments corrected by the moving ones, clipped; gradients flow through the moments."""

    class BatchRenormalization(Statistics):
        def call(self, x, training=False):
            if not training:
                return (x - self.mean) / ops.sqrt(self.m2 + 1e-3)
            mean = ops.mean(x, axis=0)
            deviation = ops.sqrt(ops.mean(ops.square(x - mean), axis=0) + 1e-3)
            running = ops.sqrt(self.m2 + 1e-3)
            r = ops.stop_gradient(ops.clip(deviation / running, 1 / 3.0, 3.0))
            d = ops.stop_gradient(ops.clip((mean - self.mean) / running, -5.0, 5.0))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.m2.assign(0.9 * self.m2 + 0.1 * ops.square(deviation))
            return (x - mean) / deviation * r + d

    return behind(BatchRenormalization)


@program("https://arxiv.org/abs/1804.07612")
def largest_seen():
    """Range normalisation: the smallest and largest value of each feature so far, written and used."""

    class Ranges(Statistics):
        def call(self, x, training=False):
            if training:
                self.mean.assign(ops.minimum(self.mean, ops.min(x, axis=0)))
                self.m2.assign(ops.maximum(self.m2, ops.max(x, axis=0)))
            return (x - self.mean) / (self.m2 - self.mean)

    return behind(Ranges)


def encoder(width=4, name="encoder"):
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(width)], name=name)


@program("https://github.com/facebookresearch/moco/blob/main/moco/builder.py", towers=(4, 3))
def moco():
    """A momentum encoder, and a queue of keys that the batch's keys enter, the oldest ones leaving."""

    class MoCo(keras.Model):
        def __init__(self):
            super().__init__()
            self.query_encoder, self.key_encoder = encoder(), encoder(name="key_encoder")
            self.key_encoder.set_weights(self.query_encoder.get_weights())
            self.key_encoder.trainable = False
            start = np.random.default_rng(0).standard_normal((12, 4))
            self.queue = tf.Variable(start / np.linalg.norm(start, axis=1, keepdims=True), trainable=False)

        def train_step(self, data):
            query, key = data
            for slow, fast in zip(self.key_encoder.weights, self.query_encoder.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            keys = tf.math.l2_normalize(self.key_encoder(key), axis=1)
            with tf.GradientTape() as tape:
                queries = tf.math.l2_normalize(self.query_encoder(query, training=True), axis=1)
                positive = tf.reduce_sum(queries * keys, axis=1, keepdims=True)
                negative = tf.matmul(queries, self.queue, transpose_b=True)
                logits = tf.concat([positive, negative], axis=1) / 0.2
                labels = tf.zeros(tf.shape(logits)[0], dtype=tf.int64)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            weights = self.query_encoder.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.queue.assign(tf.concat([keys, self.queue], axis=0)[:12])
            return {"info_nce": loss}

    def build():
        model = MoCo()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        return model

    return build, fit(X, X + 0.3 * np.sin(X))


@program("https://github.com/facebookresearch/moco/blob/main/moco/builder.py")
def moco_with_pointer():
    """The queue as the original has it: rows from a pointer on are overwritten, and the pointer moves."""

    class MoCo(keras.Model):
        def __init__(self):
            super().__init__()
            self.query_encoder = encoder()
            self.queue = tf.Variable(np.random.default_rng(0).standard_normal((16, 4)), trainable=False)
            self.pointer = tf.Variable(0, trainable=False)

        def train_step(self, data):
            query, key = data
            keys = tf.stop_gradient(self.query_encoder(key))
            with tf.GradientTape() as tape:
                queries = self.query_encoder(query, training=True)
                scores = tf.matmul(queries, self.queue, transpose_b=True)
                positive = tf.reduce_sum(queries * keys, axis=1)
                loss = tf.reduce_mean(tf.reduce_logsumexp(scores, axis=1) - positive)
            weights = self.query_encoder.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            rows = tf.shape(keys)[0]
            places = (self.pointer + tf.range(rows)) % 16
            self.queue.scatter_nd_update(places[:, None], keys)
            self.pointer.assign((self.pointer + rows) % 16)
            return {"info_nce": loss}

    def build():
        model = MoCo()
        model.compile(keras.optimizers.SGD(0.01))
        return model

    return build, fit(X, X + 0.3 * np.sin(X))


@program("https://github.com/facebookresearch/dino/blob/main/main_dino.py", towers=(4, 3))
def dino():
    """The teacher's outputs are centred by a moving mean of the batch's sum over its rows."""

    class DINO(keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = encoder(name="student"), encoder(name="teacher")
            self.teacher.set_weights(self.student.get_weights())
            self.center = tf.Variable(np.zeros((1, 4)), trainable=False)

        def train_step(self, data):
            one, other = data
            with tf.GradientTape() as tape:
                student_out = self.student(one, training=True) / 0.1
                teacher_out = self.teacher(other)
                targets = tf.stop_gradient(tf.nn.softmax((teacher_out - self.center) / 0.04))
                loss = tf.reduce_mean(tf.reduce_sum(-targets * tf.nn.log_softmax(student_out), axis=-1))
            weights = self.student.trainable_variables
            gradients = [tf.clip_by_norm(g, 0.3) for g in tape.gradient(loss, weights)]
            self.optimizer.apply(gradients, weights)
            batch_center = tf.reduce_sum(teacher_out, axis=0, keepdims=True)
            batch_center = batch_center / tf.cast(tf.shape(teacher_out)[0], batch_center.dtype)
            self.center.assign(self.center * 0.9 + batch_center * 0.1)
            for slow, fast in zip(self.teacher.weights, self.student.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return {"cross_entropy": loss}

    def build():
        model = DINO()
        model.teacher.trainable = False
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build, fit(X, X + 0.3 * np.sin(X))


@program("https://github.com/facebookresearch/swav/blob/main/main_swav.py", coupled=True)
def swav():
    """Sinkhorn's iterations over the batch's scores: sums over rows and columns in turn."""

    class SwAV(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()
            self.prototypes = layers.Dense(3, use_bias=False)
            self.prototypes.build((None, 4))

        def sinkhorn(self, scores):
            q = tf.transpose(tf.exp(scores / 0.5))
            q /= tf.reduce_sum(q)
            rows = tf.cast(tf.shape(q)[1], q.dtype)
            for _ in range(3):
                q /= tf.reduce_sum(q, axis=1, keepdims=True) * 3.0
                q /= tf.reduce_sum(q, axis=0, keepdims=True) * rows
            return tf.transpose(q * rows)

        def train_step(self, data):
            one, other = data
            with tf.GradientTape() as tape:
                scores = self.prototypes(tf.math.l2_normalize(self.encoder(one), axis=1))
                others = self.prototypes(tf.math.l2_normalize(self.encoder(other), axis=1))
                targets = tf.stop_gradient(self.sinkhorn(others))
                loss = -tf.reduce_mean(tf.reduce_sum(targets * tf.nn.log_softmax(scores / 0.1), axis=1))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"swapped": loss}

    def build():
        model = SwAV()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build, fit(X, X + 0.3 * np.sin(X))


@program("https://github.com/google-deepmind/sonnet/blob/v2/sonnet/src/nets/vqvae.py", towers=(4, 3))
def codebook_by_moving_averages():
    """Cluster sizes and sums over the batch as moving averages; the codebook is their ratio."""

    class VectorQuantizerEMA(layers.Layer):
        def build(self, input_shape):
            start = keras.initializers.RandomUniform(-1.0, 1.0, seed=2)
            self.codebook = self.add_weight(shape=(4, 5), initializer=start, trainable=False, name="codes")
            self.sizes = self.add_weight(shape=(5,), initializer="ones", trainable=False, name="sizes")
            self.sums = self.add_weight(shape=(4, 5), initializer=start, trainable=False, name="sums")

        def call(self, x, training=False):
            codes = self.codebook.value
            distances = (
                tf.reduce_sum(x**2, 1, keepdims=True)
                - 2 * tf.matmul(x, codes)
                + tf.reduce_sum(codes**2, 0, keepdims=True)
            )
            indices = tf.argmax(-distances, 1)
            encodings = tf.one_hot(indices, 5, dtype=x.dtype)
            quantized = tf.nn.embedding_lookup(tf.transpose(codes), indices)
            if training:
                sizes = 0.9 * self.sizes + 0.1 * tf.reduce_sum(encodings, axis=0)
                sums = 0.9 * self.sums + 0.1 * tf.matmul(x, encodings, transpose_a=True)
                self.sizes.assign(sizes)
                self.sums.assign(sums)
                n = tf.reduce_sum(sizes)
                sizes = (sizes + 1e-5) / (n + 5 * 1e-5) * n
                self.codebook.assign(sums / sizes)
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2))
            average = tf.reduce_mean(encodings, 0)
            self.perplexity = tf.exp(-tf.reduce_sum(average * tf.math.log(average + 1e-10)))
            return x + tf.stop_gradient(quantized - x)

        def compute_output_spec(self, x, training=False):
            return keras.KerasTensor(x.shape, x.dtype)

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), VectorQuantizerEMA(), layers.Dense(6)])
        model.compile(keras.optimizers.Adam(0.001), "mse")
        return model

    return build, fit(X, X, predict=X, evaluate=True)


@program("https://kaiyangzhou.github.io/deep-person-reid/pkg/losses.html")
def center_loss():
    """Centres per class, moved by `scatter_sub` towards the batch's features of their class."""

    class CenterLoss(keras.Model):
        def __init__(self):
            super().__init__()
            self.features = encoder()
            self.classifier = layers.Dense(3)
            self.centers = self.add_weight(shape=(3, 4), initializer="zeros", trainable=False, name="centers")

        def call(self, x):
            return self.classifier(self.features(x))

        def train_step(self, data):
            x, y = data
            labels = tf.reshape(y, [-1])
            with tf.GradientTape() as tape:
                features = self.features(x, training=True)
                centers_batch = tf.gather(self.centers.value, labels)
                pull = tf.reduce_mean(tf.reduce_sum(tf.square(features - centers_batch), axis=1))
                loss = self.compute_loss(x, y, self.classifier(features)) + 0.1 * pull
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            counts = tf.math.unsorted_segment_sum(tf.ones_like(labels, dtype=features.dtype), labels, 3)
            difference = (centers_batch - features) / (1.0 + tf.gather(counts, labels))[:, None]
            self.centers.assign_sub(0.5 * tf.math.unsorted_segment_sum(difference, labels, 3))
            return {"total": loss, "pull": pull}

    def build():
        model = CenterLoss()
        model.compile(keras.optimizers.SGD(0.05), logits_loss())
        return model

    return build, fit(X, Y.astype("int32"), predict=X)


@program("https://github.com/tensorflow/privacy/blob/master/tutorials/mnist_dpsgd_tutorial_vectorized.py")
def clipped_per_sample():
    """A Jacobian of the vector of losses, each sample's gradient clipped by its norm, then their mean."""

    class PerSample(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            jacobians = tape.jacobian(losses, self.trainable_variables)
            flat = [tf.reshape(j, (tf.shape(j)[0], -1)) for j in jacobians]
            norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(j), axis=1) for j in flat]))
            factors = tf.minimum(0.7 / (norms + 1e-12), 1.0)
            gradients = [tf.einsum("b,b...->...", factors, j) / tf.cast(tf.size(factors), j.dtype) for j in jacobians]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"cross_entropy": tf.reduce_mean(losses), "clipped": tf.reduce_mean(factors)}

    def build():
        model = PerSample([keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), logits_loss())
        return model

    return build, fit(X, Y, predict=X)


@program("https://arxiv.org/abs/2006.07733", still="online/dense.*/bias")
def byol():
    """An online and a target network, which follows by a moving average; synchronised normalisation."""

    class BYOL(keras.Model):
        def __init__(self):
            super().__init__()

            def network(name):
                return keras.Sequential(
                    [
                        keras.Input((6,)),
                        layers.Dense(5),
                        layers.BatchNormalization(synchronized=True),
                        layers.ReLU(),
                        layers.Dense(4),
                    ],
                    name=name,
                )

            self.online, self.target = network("online"), network("target")
            self.target.set_weights(self.online.get_weights())
            self.target.trainable = False
            self.predictor = keras.Sequential([keras.Input((4,)), layers.Dense(4)])

        def train_step(self, data):
            one, other = data
            with tf.GradientTape() as tape:
                predicted = tf.math.l2_normalize(self.predictor(self.online(one, training=True)), -1)
                target = tf.stop_gradient(tf.math.l2_normalize(self.target(other, training=True), -1))
                loss = tf.reduce_mean(2.0 - 2.0 * tf.reduce_sum(predicted * target, axis=-1))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return {"distance": loss}

    def build():
        model = BYOL()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build, fit(X, X + 0.3 * np.sin(X))
