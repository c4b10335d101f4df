"""Loops, maps and branches, of Keras and of TensorFlow, forward and backward."""

import keras
import numpy as np
import tensorflow as tf
from costs import row, runs
from inner_losses import INNER_LOSSES
from keras import layers, ops

RNG = np.random.default_rng(2)
COUNT, TIME, WIDTH = 22, 6, 8
SERIES = RNG.random((COUNT, TIME, WIDTH)).astype("float32")


def trained(body):
    """A `run`: the mean of what `body(features, weights)` makes of features [rows, time, width], trained."""

    def make():
        dense = layers.Dense(WIDTH)
        dense.build((None, TIME, WIDTH))
        weight = keras.Variable(np.eye(WIDTH, dtype="float32"))
        optimizer = keras.optimizers.SGD(0.1)
        variables = [*dense.trainable_variables, weight]

        def step(x):
            with tf.GradientTape() as tape:
                loss = ops.mean(body(dense(x), ops.convert_to_tensor(weight)) ** 2)
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        return step

    return runs(make, SERIES)


def turned(x):
    return ops.transpose(x, (1, 0, 2))


def scanned(x, weight, **options):
    def cell(state, one):
        state = ops.tanh(ops.matmul(state, weight) + one)
        return state, state

    return ops.scan(cell, ops.zeros_like(x[:, 0]), turned(x), **options)[1]


def counted(x, weight):
    return ops.while_loop(lambda i, _: i < 4, lambda i, h: (i + 1, ops.tanh(ops.matmul(h, weight))), (0, x[:, 0]))[1]


def nested(x, weight):
    def outer(i, state):
        return ops.fori_loop(0, 3, lambda j, h: ops.tanh(ops.matmul(h, weight)), state)

    return ops.fori_loop(0, 2, outer, x[:, 0])


def written(x, weight):
    """A TensorArray by hand, as a decoder has it."""
    array = tf.TensorArray(tf.float32, TIME)
    state = tf.zeros_like(x[:, 0])
    for t in tf.range(TIME):
        state = tf.tanh(tf.matmul(state, weight) + x[:, t])
        array = array.write(t, state)
    return array.stack()


def generated(x, weight):
    """A token after the other, each of all before, as a language model writes."""

    def body(i, tokens):
        after = ops.matmul(ops.mean(tokens, 1), weight)
        here = ops.reshape(ops.arange(TIME) == i, (1, TIME, 1))
        return i + 1, ops.where(here, after[:, None], tokens)

    return ops.while_loop(lambda i, _: i < TIME, body, (1, x))[1]


def branched(x, weight):
    return ops.cond(ops.sum(weight) > 0, lambda: ops.matmul(x, weight), lambda: x)


def of_rows(x, weight):
    """A branch for the whole batch, by a number of the batch."""
    return ops.cond(ops.mean(x) > 0, lambda: ops.matmul(x, weight), lambda: x)


LOOPS = {
    "ops.scan": scanned,
    "ops.scan reverse": lambda x, w: scanned(x, w, reverse=True),
    "ops.scan of a mask": lambda x, w: ops.scan(
        lambda s, one: (ops.where(one[:, :1] > 0, ops.matmul(s, w), s), s), x[:, 0], turned(x)
    )[0],
    "ops.while_loop": counted,
    "ops.fori_loop": lambda x, w: ops.fori_loop(0, 4, lambda i, h: ops.tanh(ops.matmul(h, w)), x),
    "ops.fori_loop, nested": nested,
    "ops.fori_loop by index": lambda x, w: ops.fori_loop(
        0, TIME, lambda i, h: ops.tanh(ops.matmul(h, w) + ops.take(x, i, axis=1)), ops.zeros_like(x[:, 0])
    ),
    "ops.associative_scan": lambda x, w: ops.associative_scan(lambda a, b: a * b, ops.matmul(x, w), axis=1),
    "ops.associative_scan of pairs": lambda x, w: ops.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (ops.sigmoid(x), ops.matmul(x, w)), axis=1
    )[1],
    "ops.map over time": lambda x, w: ops.map(lambda one: ops.tanh(ops.matmul(one, w)), turned(x)),
    "ops.map over rows": lambda x, w: ops.map(lambda one: ops.tanh(ops.matmul(one, w)), x),
    "ops.vectorized_map over rows": lambda x, w: ops.vectorized_map(lambda one: ops.tanh(ops.matmul(one, w)), x),
    "ops.cond": branched,
    "ops.cond by the batch": of_rows,
    "ops.switch": lambda x, w: ops.switch(ops.cast(ops.sum(w), "int32") % 2, [lambda: ops.matmul(x, w), lambda: x]),
    "tf.scan": lambda x, w: tf.scan(lambda s, one: tf.tanh(tf.matmul(s, w) + one), turned(x), tf.zeros_like(x[:, 0])),
    "tf.map_fn over rows": lambda x, w: tf.map_fn(lambda one: tf.tanh(tf.matmul(one, w)), x),
    "tf.foldl": lambda x, w: tf.foldl(lambda s, one: tf.tanh(tf.matmul(s, w) + one), turned(x)),
    "tf.TensorArray": written,
    "writing a sequence": generated,
    "ops.cumsum, cumprod, diff": lambda x, w: (
        ops.cumsum(x, 1)[:, 1:] @ w + ops.cumprod(x, 1)[:, 1:] + ops.diff(x, axis=1)
    ),
}
for name, body in LOOPS.items():
    row(name, trained(body))


def until_settled(x, weight):
    def goes_on(i, h, change):
        return ops.logical_and(i < 20, change > 1e-3)

    def body(i, h, _):
        after = ops.tanh(0.1 * ops.matmul(h, weight))
        return i + 1, after, ops.max(ops.abs(after - h))

    return ops.while_loop(goes_on, body, (0, x[:, 0], ops.ones(())), maximum_iterations=20)[1]


SETTLED = "whether it goes on depends on all rows, and nothing can meet within a loop"
row("ops.while_loop until all rows settle", trained(until_settled), {"While": SETTLED, "StatelessWhile": SETTLED})


def trained_within(loss_of):
    """A `run`: a step whose loss a loop, a branch or a call makes; see `inner_losses`."""

    def make():
        dense = layers.Dense(WIDTH)
        dense.build((None, TIME, WIDTH))
        weight = keras.Variable(np.eye(WIDTH, dtype="float32"))
        even = keras.Variable(1.0, trainable=False)
        optimizer = keras.optimizers.SGD(0.1)
        variables = [*dense.trainable_variables, weight]

        def step(x):
            with tf.GradientTape() as tape:
                loss = loss_of(dense(x), x, tf.identity(weight), ops.convert_to_tensor(even) > 0)
            gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
            optimizer.apply(gradients, variables)
            return loss

        return step

    return runs(make, SERIES)


for name, body in INNER_LOSSES.items():
    row(f"loss within: {name}", trained_within(body))


def adapted(h, x, weight, even):
    """Weights that take steps within the loop, as in MAML: the next step needs all of the one before."""

    def inner(i, fast):
        with tf.GradientTape() as tape:
            tape.watch(fast)
            loss = tf.reduce_mean((h[:, :3] @ fast - x[:, :3]) ** 2)
        return i + 1, fast - 0.1 * tape.gradient(loss, fast)

    fast = tf.while_loop(lambda i, _: i < 2, inner, (0, weight), maximum_iterations=2)[1]
    return tf.reduce_mean((h[:, 3:] @ fast - x[:, 3:]) ** 2)


ADAPTED = "its next turn needs the gradient of all rows, and nothing can meet within a loop"
row("steps within a loop", trained_within(adapted), {"While": ADAPTED, "StatelessWhile": ADAPTED})
