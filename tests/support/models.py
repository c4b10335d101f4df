"""Models whose steps are cut more than once, a layer that does not fit, and the program that a model's step became."""

import keras
import tensorflow as tf

from ncclsync.ops import current_context


class Gan(keras.Model):
    """Two networks, two optimizers, a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(12)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
        )
        self.built = True
        self.seen = keras.metrics.Mean(name="d_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, batch):
        real, noise = batch
        with tf.GradientTape() as tape:
            scores = self.discriminator(tf.concat([self.generator(noise), real], 0))
            rows = tf.shape(real)[0]
            d_loss = self.loss_fn(tf.concat([tf.ones([rows, 1]), tf.zeros([rows, 1])], 0), scores)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            scores = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros([rows, 1]), scores)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.seen.update_state(d_loss, sample_weight=rows)
        return {"d_loss": self.seen.result(), "g_loss": g_loss}


def gan():
    keras.utils.set_random_seed(5)
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    return model


class TwoParts(keras.Model):
    """Like a GAN: the second half of a step needs the first half's update, and it is there that it fails."""

    def __init__(self):
        super().__init__()
        self.code = keras.Sequential([keras.Input((12,)), keras.layers.Dense(12)])
        self.label = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
        self.built = True

    def compile(self, **arguments):
        super().compile(**arguments)
        self.first, self.second = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            code_loss = tf.reduce_mean((self.code(x) - x) ** 2)
        weights = self.code.trainable_weights
        self.first.apply(tape.gradient(code_loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.label(self.code(x))))
        weights = self.label.trainable_weights
        self.second.apply(tape.gradient(loss, weights), weights)
        return {"code_loss": code_loss, "loss": loss}


def two_parts(**arguments):
    keras.utils.set_random_seed(2)
    model = TwoParts()
    model.compile(**arguments)
    return model


def step_of(model):
    """The StepFunction behind `model.train_function`."""
    return model.train_function.__self__.step


def program_of(model):
    (program,) = step_of(model).programs.kept.values()
    return program


def out_of_memory_above(rows):
    """A layer that does not fit the memory with more rows than these."""

    def exhausted():
        raise MemoryError("OOM when allocating tensor")  # which TensorFlow makes a ResourceExhaustedError

    class Large(keras.layers.Layer):
        def call(self, x):
            context = current_context()
            own = tf.shape(x)[0] if context is None else context.share.rows
            more = tf.cond(own > rows, lambda: tf.numpy_function(exhausted, [], tf.float32), lambda: 0.0)
            return x + tf.ensure_shape(more, [])

    return Large()
