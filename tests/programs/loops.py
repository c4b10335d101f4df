"""Training loops without `fit`: a step function, run on towers by `Towers.run`."""

import keras
import numpy as np
import tensorflow as tf
from harness import Loop, a_loop, loop, program
from keras import layers

RNG = np.random.default_rng(9)
X = RNG.standard_normal((23, 4))
Y = RNG.integers(0, 3, 23)
SIZES = (slice(0, 10), slice(10, 20), slice(20, 23))
PAIRS = [(tf.constant(X[rows]), tf.constant(Y[rows])) for rows in SIZES]
INPUTS = [x for x, _ in PAIRS]


def network(outputs=3, name="network"):
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(outputs)], name=name)


@program("https://keras.io/guides/writing_a_custom_training_loop_in_tensorflow/", towers=(4, 3))
def training_loop_from_scratch():
    """The guide's step: a loss, its gradient, a metric that is updated, losses of layers."""

    @a_loop
    def build():
        model = network()
        optimizer = keras.optimizers.SGD(0.1)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        train_acc_metric = keras.metrics.SparseCategoricalAccuracy()

        def train_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss_value = loss_fn(y, logits) + sum(model.losses)
            grads = tape.gradient(loss_value, model.trainable_weights)
            optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
            train_acc_metric.update_state(y, logits)
            return {"loss": loss_value, "accuracy": train_acc_metric.result()}

        return Loop(train_step, (model,), (optimizer,))

    return build, loop(PAIRS)


@program("https://www.tensorflow.org/api_docs/python/tf/numpy_function", towers=(4, 3))
def rows_of_numpy():
    """Rows that NumPy computes have no static shape; they are rows all the same."""

    @a_loop
    def build():
        model = network()

        def step(x):
            outputs = model(x)
            rows = tf.numpy_function(lambda a: np.arange(len(a)) * 0.0 + a[:, 0], [x], tf.float64)
            margins = tf.numpy_function(lambda a: np.sort(a, axis=1)[:, ::-1], [outputs], tf.float64)
            return {"rows": rows, "margins": margins, "mean": tf.reduce_mean(outputs)}

        return Loop(step)

    return build, loop(INPUTS)


@program("https://www.tensorflow.org/api_docs/python/tf/sparse/reduce_sum", towers=(4, 3))
def rows_of_sparse_sums():
    """Sums of a sparse batch's rows, whose shape TensorFlow does not know."""

    @a_loop
    def build():
        def step(x):
            sparse = tf.sparse.from_dense(tf.nn.relu(x))
            return {"rows": tf.sparse.reduce_sum(sparse, axis=1), "all": tf.sparse.reduce_sum(sparse)}

        return Loop(step)

    return build, loop(INPUTS)


# What one device tells of the whole batch's order, each by itself.
OF_THE_ORDER = {
    "sort": lambda x: tf.sort(x[:, 0]),
    "cumsum": lambda x: tf.cumsum(x, axis=0),
    "argsort": lambda x: tf.argsort(tf.argsort(x[:, 0])),
    "reverse": lambda x: tf.reverse(x, axis=[0]),
    "roll": lambda x: tf.roll(x[:, 0], shift=1, axis=0),
    "top_k": lambda x: tf.math.top_k(x[:, 0], k=3).values,
    "argmax": lambda x: tf.argmax(x, axis=0),
    "scan": lambda x: tf.scan(lambda total, row: 0.5 * total + row, x[:, 0]),
    "row_of": lambda x: {"first": x[0], "last": x[-1], "middle": x[tf.shape(x)[0] // 2]},
    "median": lambda x: tf.reduce_mean(tf.sort(x[:, 0])[1:-1]),
    "every_second": lambda x: x[::2],
    "unique": lambda x: tf.unique(tf.cast(x[:, 0] > 0.0, tf.int32)).y,
    "histogram": lambda x: tf.histogram_fixed_width(x, [-2.0, 2.0], nbins=4),
    "numbered": lambda x: tf.range(tf.shape(x)[0]),
    "differences": lambda x: x[1:] - x[:-1],
    "distances": lambda x: tf.norm(x[:, None] - x[None], axis=-1),
    "segments": lambda x: tf.math.unsorted_segment_max(x, tf.cast(x[:, 0] > 0.0, tf.int32), 2),
    "padded": lambda x: tf.pad(x, [[1, 2], [0, 0]]),
    "transposed": lambda x: tf.matmul(x, x, transpose_a=True),
    "covariance": lambda x: tf.matmul(x - tf.reduce_mean(x, 0), x - tf.reduce_mean(x, 0), transpose_a=True),
    "product": lambda x: tf.reduce_prod(x, axis=0),
    "any": lambda x: {"any": tf.reduce_any(x > 1.5, axis=0), "all": tf.reduce_all(x > -1.0, axis=0)},
    "deviation": lambda x: tf.math.reduce_std(x, axis=0),
    "logsumexp": lambda x: tf.reduce_logsumexp(x, axis=0),
}


def _order_by(name):
    def make():
        """One op over the batch's rows, as the result of a step."""

        @a_loop
        def build():
            return Loop(OF_THE_ORDER[name])

        return build, loop(INPUTS)

    return make


for _name in OF_THE_ORDER:
    program("https://www.tensorflow.org/api_docs/python/tf/sort", name=f"batch_{_name}")(_order_by(_name))


@program("https://www.tensorflow.org/tutorials/reinforcement_learning/actor_critic", towers=(4, 3))
def actor_critic():
    """Returns standardised over the batch, a policy's loss that is a sum, a Huber loss that is one too."""

    @a_loop
    def build():
        model = network(4)
        optimizer = keras.optimizers.Adam(0.001)
        huber_loss = keras.losses.Huber(reduction="sum")

        def step(batch):
            x, actions = batch
            with tf.GradientTape() as tape:
                outputs = model(x)
                action_probs, values = tf.nn.softmax(outputs[:, :3]), outputs[:, 3:]
                returns = tf.cumsum(tf.abs(x[:, 0]), reverse=True)
                mean, deviation = tf.math.reduce_mean(returns), tf.math.reduce_std(returns)
                returns = ((returns - mean) / (deviation + 1e-7))[:, None]
                chosen = tf.gather(action_probs, actions, axis=1, batch_dims=1)[:, None]
                advantage = returns - values
                actor_loss = -tf.math.reduce_sum(tf.math.log(chosen) * advantage)
                loss = actor_loss + huber_loss(values, returns)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return {"loss": loss, "return": mean}

        return Loop(step, (model,), (optimizer,))

    return build, loop(PAIRS)


@program("https://keras.io/examples/rl/ppo_cartpole/", towers=(4, 3))
def proximal_policy():
    """Advantages standardised over the batch, a clipped ratio, a mean of minima, and the divergence."""

    @a_loop
    def build():
        actor, optimizer = network(), keras.optimizers.Adam(0.001)

        def logprobabilities(logits, a):
            return tf.reduce_sum(tf.one_hot(a, 3, dtype=logits.dtype) * tf.nn.log_softmax(logits), axis=1)

        def train_policy(batch):
            observations, actions = batch
            advantages = tf.sin(observations[:, 1])
            advantages = (advantages - tf.reduce_mean(advantages)) / tf.math.reduce_std(advantages)
            old = tf.cos(observations[:, 2]) - 1.5
            with tf.GradientTape() as tape:
                ratio = tf.exp(logprobabilities(actor(observations), actions) - old)
                min_advantage = tf.where(advantages > 0, 1.2 * advantages, 0.8 * advantages)
                policy_loss = -tf.reduce_mean(tf.minimum(ratio * advantages, min_advantage))
            grads = tape.gradient(policy_loss, actor.trainable_variables)
            optimizer.apply_gradients(zip(grads, actor.trainable_variables, strict=True))
            kl = tf.reduce_sum(old - logprobabilities(actor(observations), actions))
            return {"policy_loss": policy_loss, "kl": kl}

        return Loop(train_policy, (actor,), (optimizer,))

    return build, loop(PAIRS)


@program("https://keras.io/examples/rl/deep_q_network_breakout/")
def deep_q_network():
    """Q-values of the actions taken by a one-hot product, targets of a network that follows by assignment."""

    @a_loop
    def build():
        model, target = network(), network(name="target")
        target.set_weights(model.get_weights())
        target.trainable = False
        optimizer = keras.optimizers.Adam(0.001, clipnorm=1.0)
        loss_function = keras.losses.Huber()

        def step(batch):
            states, actions = batch
            updated = tf.cos(states[:, 0]) + 0.9 * tf.reduce_max(target(states + 0.1), axis=1)
            masks = tf.one_hot(actions, 3, dtype=states.dtype)
            with tf.GradientTape() as tape:
                q_action = tf.reduce_sum(tf.multiply(model(states), masks), axis=1)
                loss = loss_function(updated, q_action)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            for slow, fast in zip(target.variables, model.variables, strict=True):
                slow.assign(0.05 * fast + 0.95 * slow)
            return {"loss": loss, "errors": tf.abs(updated - q_action)}

        return Loop(step, (model, target), (optimizer,))

    return build, loop(PAIRS)


@program("https://www.tensorflow.org/tutorials/customization/custom_training_walkthrough")
def summed_loop():
    """A loss that is a sum of squares, divided by a constant, and gradients clipped by their global norm."""

    @a_loop
    def build():
        model = network(1)
        optimizer = keras.optimizers.SGD(0.05)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.nn.l2_loss(model(x)[:, 0] - tf.sin(x[:, 0])) / 10.0
            gradients = tape.gradient(loss, model.trainable_variables)
            clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
            optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))
            return {"loss": loss, "norm": norm}

        return Loop(step, (model,), (optimizer,))

    return build, loop(INPUTS)


@program("https://github.com/maziarraissi/PINNs", towers=(4, 3), still="dense.*/bias")
def physics_informed():
    """A PINN: derivatives of the network with respect to its inputs, their mean square, and a boundary's."""

    @a_loop
    def build():
        model = network(1)
        optimizer = keras.optimizers.Adam(0.001)

        def step(x):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as second:
                    second.watch(x)
                    with tf.GradientTape() as first:
                        first.watch(x)
                        u = model(x)
                    du = first.gradient(u, x)
                    slope = du[:, 1]
                ddu = second.gradient(slope, x)[:, 1]
                residual = du[:, 0] - 0.1 * ddu
                boundary = model(tf.constant(np.eye(4)))
                loss = tf.reduce_mean(tf.square(residual)) + tf.reduce_mean(tf.square(boundary - 1.0))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return {"loss": loss}

        return Loop(step, (model,), (optimizer,))

    return build, loop(INPUTS)
