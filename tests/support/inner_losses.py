"""Losses of which a loop, a branch or a called function makes a part: means of rows, and their gradients, within it.

Each takes a dense layer's features and its inputs, both [rows, 6, 8], a weight [8, 8], and whether the step is even.
"""

import keras
import tensorflow as tf
from keras import ops

TIME, WIDTH = 6, 8
mse = keras.losses.MeanSquaredError()


def over_time(h, x, weight, even):
    """A loop over time, whose mean losses are added up."""

    def body(t, state, loss):
        state = tf.tanh(state @ weight + tf.gather(h, t, axis=1))
        return t + 1, state, loss + tf.reduce_mean((state - tf.gather(x, t, axis=1)) ** 2)

    return tf.while_loop(lambda t, *_: t < TIME, body, (0, h[:, 0], 0.0), maximum_iterations=TIME)[2]


def of_keras(h, x, weight, even):
    """The same with a loss of Keras', a mean, and a penalty of the weight: a sum, a mean and a whole number."""

    def body(t, state, loss):
        state = tf.tanh(state @ weight + tf.gather(h, t, axis=1))
        target = tf.gather(x, t, axis=1)
        added = mse(target, state) + 0.01 * tf.reduce_sum(weight**2) + 0.1 * tf.reduce_mean(state)
        return t + 1, state, loss + added

    return tf.while_loop(lambda t, *_: t < TIME, body, (0, h[:, 0], 0.0), maximum_iterations=TIME)[2]


def nested(h, x, weight, even):
    """Loops in a loop, whose loss is weighed by the number of rows."""

    def inner(_, state, loss, target):
        state = tf.tanh(state @ weight)
        weight_of_rows = tf.cast(tf.shape(state)[0], tf.float32) / 100.0
        return _ + 1, state, loss + ops.mean((state - target) ** 2) * weight_of_rows, target

    def body(t, state, loss):
        given = (0, state + tf.gather(h, t, axis=1), loss, tf.gather(x, t, axis=1))
        state, loss = tf.while_loop(lambda i, *_: i < 2, inner, given, maximum_iterations=2)[1:3]
        return t + 1, state, loss

    return tf.while_loop(lambda t, *_: t < TIME, body, (0, h[:, 0], 0.0), maximum_iterations=TIME)[2]


def by_time(h, x, weight, even):
    """A map over time."""
    return tf.reduce_mean(tf.map_fn(lambda one: ops.mean((one @ weight) ** 2), tf.transpose(h, (1, 0, 2))))


def either(h, x, weight, even):
    """Branches that keep other things for their gradients: rows, and a sum of weights."""
    return tf.cond(even, lambda: mse(x, h @ weight) + 0.1 * tf.reduce_sum(weight**2), lambda: mse(x, h))


def chosen(h, x, weight, even):
    """Branches in a branch: a mean, a sum by a divisor and a whole number."""
    rows = tf.cast(tf.shape(h)[0], tf.float32)
    some = tf.reduce_mean(weight) > 0.15
    cases = [
        (even, lambda: tf.reduce_mean((h @ weight) ** 2)),
        (some, lambda: tf.reduce_sum(h**2) / rows / 100.0 + 0.1),
    ]
    return tf.case(cases, default=lambda: mse(x, h) + tf.reduce_mean(weight**2))


def branch_in_a_loop(h, x, weight, even):
    """A loop whose turns differ."""

    def body(t, state, loss):
        added = tf.cond(
            t % 2 > 0, lambda: tf.reduce_mean(state**2), lambda: mse(x[:, 0], state) + 0.1 * tf.reduce_sum(weight**2)
        )
        return t + 1, tf.tanh(state @ weight), 0.9 * loss + added

    return tf.while_loop(lambda t, *_: t < TIME, body, (0, h[:, 0], 0.5), maximum_iterations=TIME)[2]


def by_the_loss(h, x, weight, even):
    """A branch that a loss chooses."""
    loss = tf.reduce_mean(h**2)
    return tf.cond(loss > 0.3, lambda: tf.reduce_mean((h @ weight) ** 2) + loss, lambda: loss)


def never(h, x, weight, even):
    """A branch that never runs, as the trace itself knows, and keeps other things for its gradient: rows of a loop."""

    def taken():
        return tf.reduce_mean(h**2) * tf.reduce_mean(weight) + mse(x, h @ weight)

    return tf.cond(tf.shape(x)[1] < 2, lambda: over_time(h, x, weight, even), taken)


def settled(h, x, weight, even):
    """Some steps down a gradient of a mean, of each row's own: what they end with is the target."""

    def body(i, state):
        with tf.GradientTape() as tape:
            tape.watch(state)
            error = tf.reduce_mean((state @ weight - x[:, 0]) ** 2)
        return i + 1, state - 0.5 * tape.gradient(error, state)

    target = tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros_like(x[:, 0])), maximum_iterations=3)[1]
    return tf.reduce_mean((h[:, 0] - tf.stop_gradient(target)) ** 2) + tf.reduce_mean(weight**2)


@tf.function
def _called(h, x, weight):
    return tf.reduce_mean((h @ weight) ** 2) + mse(x, h)


def called(h, x, weight, even):
    """A function of the user's own."""
    return _called(h, x, weight)


@tf.function(jit_compile=True)
def _compiled(h, weight):
    return tf.reduce_mean((h @ weight) ** 2)


def compiled(h, x, weight, even):
    """A function of the user's own that XLA compiles: its shapes are computed in it."""
    return _compiled(h, weight)


INNER_LOSSES = {
    one.__name__: one
    for one in (
        *(over_time, of_keras, nested, by_time, either, chosen, branch_in_a_loop, by_the_loss, never, settled),
        *(called, compiled),
    )
}
