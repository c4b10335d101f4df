"""N towers train like one device: steps and layers that are not the usual ones, a table of each."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from parity import Case, check, data, fit, mlp, on_towers, spread, state

from ncclsync import ops

X, Y = data()
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, 20, (len(X), 7))
SERIES = RNG.standard_normal((len(X), 8, 3)).astype("float32")
IMAGES = RNG.standard_normal((len(X), 6, 6, 2)).astype("float32")
VOLUMES = RNG.standard_normal((len(X), 4, 4, 4, 2)).astype("float32")
FILMS = RNG.standard_normal((len(X), 3, 4, 4, 2)).astype("float32")
LETTERS = np.array(list("abcde"), dtype=object)[Y]
SENTENCES = [" ".join(row) for row in RNG.choice(["red", "green", "blue", "sea", "sky"], (len(X), 4))]
FIELDS = {
    "letter": tf.constant(LETTERS[:, None]),
    "number": IDS[:, :1] * 10,
    "sentence": tf.constant(np.array(SENTENCES, dtype=object)[:, None]),
    "height": X[:, :1],
}


def logits_loss(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def sgd():
    return optimizers.SGD(0.05, momentum=0.9)


def sequential(*body, inputs=(12,), dtype=None, cls=keras.Sequential, **compile_arguments):
    """A factory of a Sequential model with 5 logits behind `body`."""
    compile_arguments.setdefault("optimizer", "adam")
    compile_arguments.setdefault("loss", logits_loss())

    def factory():
        keras.utils.set_random_seed(1)
        model = cls([keras.Input(inputs, dtype=dtype), *(make() for make in body), layers.Dense(5)])
        optimizer = compile_arguments["optimizer"]
        optimizer = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(**{**compile_arguments, "optimizer": optimizer})
        return model

    return factory


def functional(body, inputs, **input_arguments):
    """A factory of a model with 5 logits behind `body(input)`."""

    def factory():
        keras.utils.set_random_seed(1)
        entry = keras.Input(inputs, **input_arguments)
        model = keras.Model(entry, layers.Dense(5)(body(entry)))
        model.compile(sgd(), logits_loss(), metrics=["accuracy"])
        return model

    return factory


def all_ways(x, y):
    """A `run`: fit, evaluate, predict, and the variables that are no layer's."""

    def run(model):
        return [
            fit(x, y, epochs=3)(model),
            model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True),
            model.predict(x, batch_size=20, verbose=0),
            [variable.numpy() for variable in getattr(model, "own", [])],
        ]

    return run


def dense():
    return layers.Dense(16, activation="relu")


class CustomStep(keras.Sequential):
    """A train_step with a loss of its own, spelled out."""

    def loss_of(self, x, y):
        return self.compute_loss(x, y, self(x, training=True))

    def processed(self, gradients):
        return gradients

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = self.processed(tape.gradient(loss, self.trainable_weights))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients), "rows": tf.shape(x)[0]}


class GradientPenalty(CustomStep):
    """Second derivatives."""

    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x, training=True)
        penalty = tf.reduce_sum(tf.square(tape.gradient(outputs, x)), axis=1)
        return self.compute_loss(x, y, outputs) + tf.reduce_mean(penalty)


class ControlFlow(CustomStep):
    """A loop and a branch in the forward pass; the branch is chosen by a weight, as by a warm-up."""

    def loss_of(self, x, y):
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, 0.9 * h), (tf.constant(0), x))
        warm = self.optimizer.iterations.value % 2 == 0
        h = tf.cond(warm, lambda: h + 1.0, lambda: self.layers[0](h)[:, :12] - h)
        return self.compute_loss(x, y, self(h, training=True))


class GradientInALoop(CustomStep):
    """Sums the gradients of three noisy passes in a loop, and applies them behind it."""

    def train_step(self, batch):
        x, y = batch

        def body(i, total):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x + 0.1 * tf.cast(i, x.dtype), training=True))
            new = tape.gradient(loss, self.trainable_weights)
            return i + 1, [a + b for a, b in zip(total, new, strict=True)]

        start = [tf.zeros_like(weight) for weight in self.trainable_weights]
        _, gradients = tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), start))
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"norm": tf.linalg.global_norm(ops.all_reduce(gradients))}


class ReducedByHand(CustomStep):
    """Clips the global gradient, which it asks for."""

    def processed(self, gradients):
        return tf.clip_by_global_norm(ops.all_reduce(gradients), 0.1)[0]


class GraphStep(CustomStep):
    @tf.function
    def train_step(self, batch):
        x, y = batch
        if tf.shape(x)[0] > 0:  # needs autograph
            x = x + 1.0
        return CustomStep.train_step(self, (x, y))


class OwnLoops(keras.Sequential):
    """Every step and every part of one, of the user's own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * tf.reduce_mean(tf.square(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "largest": tf.reduce_mean(tf.reduce_max(y_pred, -1)), "rows": tf.shape(y)[0]}

    def test_step(self, batch):
        x, y = batch
        outputs = [self(x + shift, training=False) for shift in (0.0, 0.1)]
        mean = tf.add_n(outputs) / 2.0
        return {"loss": self.compute_loss(x, y, mean, training=False), "mean": tf.reduce_mean(mean, 0)}

    def predict_step(self, batch):
        x = batch[0] if isinstance(batch, tuple) else batch
        scores = self(x, training=False)
        return {"classes": tf.argmax(scores, -1), "scores": scores, "places": [x[:, 0], x[:, 1:3]]}


class ThreeOptimizers(keras.Sequential):
    """Each layer has its own, one after another, each sees what the one before has done."""

    def compile(self, **arguments):
        super().compile(**arguments)
        self.others = [optimizers.SGD(0.1, momentum=0.9), optimizers.RMSprop(0.01)]

    def train_step(self, batch):
        x, y = batch
        losses = {}
        for i, optimizer in enumerate([self.optimizer, *self.others]):
            with tf.GradientTape() as tape:
                losses[f"loss_{i}"] = self.compute_loss(x, y, self(x, training=True))
            weights = self.layers[i].trainable_weights
            optimizer.apply(tape.gradient(losses[f"loss_{i}"], weights), weights)
        return losses


class OneTapeTwoOptimizers(keras.Sequential):
    """As wide-and-deep models train: one gradient, shared out among two optimizers."""

    def compile(self, **arguments):
        super().compile(**arguments)
        self.other = optimizers.SGD(0.1, global_clipnorm=0.1)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients[:2], self.trainable_weights[:2])
        self.other.apply(gradients[2:], self.trainable_weights[2:])
        return {"loss": loss}


class ScalarTracker(keras.Sequential):
    """Tracks a batch's loss as tutorials do: without a weight."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


class Counting(keras.Sequential):
    """Has variables of its own, that are no layer's: they count steps and rows, and average the inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = [tf.Variable(0), tf.Variable(0), tf.Variable(0.0)]

    def train_step(self, batch):
        self.own[0].assign_add(1)
        self.own[1].assign_add(tf.shape(batch[0])[0])
        self.own[2].assign(0.9 * self.own[2] + 0.1 * tf.reduce_mean(batch[0]))
        return super().train_step(batch)


class OwnWeight(keras.Sequential):
    """A `tf.Variable` that Keras does not know, trained by hand beside the optimizer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = [tf.Variable([1.0] * 5, name="scale")]

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training) * self.own[0]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        *gradients, own = tape.gradient(loss, [*self.trainable_weights, *self.own])
        self.optimizer.apply(gradients, self.trainable_weights)
        self.own[0].assign_sub(0.1 * own)
        return {"loss": loss}


class OwnTable(keras.Model):
    """A lookup table of TensorFlow's, not of a layer's."""

    def __init__(self):
        super().__init__()
        entries = tf.lookup.KeyValueTensorInitializer(list("abcde"), tf.range(5, dtype=tf.int64))
        self.table = tf.lookup.StaticHashTable(entries, -1)
        self.last = layers.Dense(5)

    def call(self, inputs):
        return self.last(tf.one_hot(self.table.lookup(inputs[:, 0]), 5))


def own_table():
    keras.utils.set_random_seed(1)
    model = OwnTable()
    model.compile(sgd(), logits_loss(), metrics=["accuracy"])
    return model


class Stateful(layers.Layer):
    """State of a layer's own: steps, an average, and a maximum, for which it asks all towers."""

    def build(self, input_shape):
        def add(name, dtype="float32"):
            return self.add_weight(shape=(), initializer="zeros", dtype=dtype, trainable=False, name=name)

        self.steps, self.average, self.largest = add("steps", "int32"), add("average"), add("largest")

    def call(self, inputs, training=False):
        if training:
            self.steps.assign_add(1)
            self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(inputs))
            largest = ops.all_reduce(tf.reduce_max(inputs), op="max")
            self.largest.assign(tf.maximum(self.largest, largest))
        return inputs - self.average + 0.1 * self.largest


class CountsRows(layers.Layer):
    """Counts rows as a layer does, by a Keras variable."""

    def build(self, input_shape):
        self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def counted(self, inputs):
        return tf.shape(inputs)[0]

    def call(self, inputs, training=False):
        if training:
            self.rows.assign_add(self.counted(inputs))
        return inputs


class CountsAllRows(CountsRows):
    """Asks all towers."""

    def counted(self, inputs):
        return ops.all_reduce(tf.shape(inputs)[0], op="sum")


class Experts(layers.Layer):
    """Sends each row to one of three experts; an auxiliary loss keeps their load even."""

    def build(self, input_shape):
        self.gate = layers.Dense(3, activation="softmax")
        self.experts = [layers.Dense(8, activation="tanh") for _ in range(3)]
        for part in (self.gate, *self.experts):
            part.build(input_shape)

    def call(self, inputs):
        shares = self.gate(inputs)
        chosen = tf.one_hot(tf.argmax(shares, -1), 3)
        self.add_loss(0.1 * tf.reduce_mean(tf.reduce_sum(shares**2, -1)))
        found = 0.0
        for i, expert in enumerate(self.experts):
            mine = chosen[:, i, None]
            found += tf.cond(  # not at all, where no row of a tower asks for it
                tf.reduce_any(mine > 0),
                lambda expert=expert, mine=mine: expert(inputs) * mine,
                lambda mine=mine: tf.zeros_like(mine) * tf.zeros([8]),
            )
        return found * tf.reduce_max(shares, -1, keepdims=True)


def stateful(recurrent):
    """A recurrent layer that keeps one state per row of the batch, of 20 rows, from batch to batch."""

    def factory():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input(batch_shape=(20, 7, 4)), recurrent(), layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
        return model

    return factory


def states_kept(model):
    """Two epochs of three batches, the states' reset, and predictions that depend on their order."""
    x, y = data(60, 28)
    x = x.reshape(60, 7, 4)
    fitted = fit(x, y, epochs=2)(model)
    states = [np.asarray(v) for v in model.non_trainable_variables]
    predicted = model.predict(x, batch_size=20, verbose=0)
    model.layers[0].reset_state()
    return [fitted, states, predicted, model.evaluate(x, y, batch_size=20, verbose=0)]


def states_kept_without_reset(model):
    """As `states_kept`, of a layer that has no reset."""
    x, y = data(60, 28)
    x = x.reshape(60, 7, 4)
    fitted = fit(x, y, epochs=2)(model)
    states = [np.asarray(v) for v in model.non_trainable_variables]
    return [fitted, states, model.predict(x, batch_size=20, verbose=0)]


class Memory(layers.Layer):
    """Keeps what it has seen of each of 20 rows, in a variable of a user's own, and takes it to other shapes."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(20, *shape[1:]), initializer="zeros", trainable=False)

    def call(self, x):
        found = keras.ops.reshape(self.seen * 0.9 + x, (-1, 14, 2))
        self.seen.assign(keras.ops.reshape(found, (-1, 7, 4)) * 0.5)
        return keras.ops.mean(keras.ops.reshape(found, (-1, 7, 4)), 1)


class Counted(Memory):
    """Needs the number of rows while it is traced, which it has by its state alone."""

    def call(self, x):
        known = self.seen * 1.0 + x
        return super().call(keras.ops.reshape(known, (int(known.shape[0]), 7, 4)))


class ListOutputs(keras.Model):
    """Subclassed, returns a list, in which one output has no loss."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(5), layers.Dense(3), layers.Dense(2)]

    def call(self, inputs):
        return [part(inputs) for part in self.parts]


def list_outputs():
    keras.utils.set_random_seed(1)
    model = ListOutputs()
    model.compile(sgd(), [logits_loss(), "mse", None], loss_weights=[1.0, 0.5, 0.0])
    return model


def nested_models():
    """A Sequential and a functional model in a functional one, which shares the former."""
    keras.utils.set_random_seed(1)
    inner = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(8)], name="inner")
    entry = keras.Input((8,))
    block = keras.Model(entry, [layers.Dense(8)(entry), entry], name="block")
    inputs = {"left": keras.Input((12,), name="left"), "right": keras.Input((12,), name="right")}
    first, second = block(layers.Add()([inner(inputs["left"]), inner(inputs["right"])]))
    model = keras.Model(inputs, {"label": layers.Dense(5)(first), "value": layers.Dense(2)(second)})
    model.compile(sgd(), {"label": logits_loss(), "value": "mae"}, metrics={"label": ["accuracy"]})
    return model


def fields():
    """Every layer that looks up, hashes, cuts into words, or bins."""
    keras.utils.set_random_seed(1)
    inputs = {
        "letter": keras.Input((1,), dtype="string", name="letter"),
        "number": keras.Input((1,), dtype="int64", name="number"),
        "sentence": keras.Input((1,), dtype="string", name="sentence"),
        "height": keras.Input((1,), name="height"),
    }
    words = layers.TextVectorization(output_sequence_length=4)
    words.adapt(SENTENCES)
    weights = layers.TextVectorization(output_mode="tf_idf")
    weights.adapt(SENTENCES)
    numbers = layers.IntegerLookup(output_mode="multi_hot", num_oov_indices=1)
    numbers.adapt(IDS[:, :1] * 10)
    bins = layers.Discretization(num_bins=4, epsilon=0.01)
    bins.adapt(X[:, :1])
    hashed = layers.Hashing(num_bins=6)(inputs["letter"])
    crossed = layers.HashedCrossing(num_bins=7)((inputs["letter"], inputs["number"]))
    parts = [
        layers.StringLookup(vocabulary=list("abcd"), output_mode="one_hot")(inputs["letter"]),
        layers.CategoryEncoding(6, output_mode="one_hot")(hashed),
        layers.CategoryEncoding(7, output_mode="one_hot")(crossed),
        numbers(inputs["number"]),
        layers.CategoryEncoding(4, output_mode="one_hot")(bins(inputs["height"])),
        layers.Flatten()(layers.Embedding(10, 3)(words(inputs["sentence"]))),
        layers.Flatten()(weights(inputs["sentence"])),
    ]
    model = keras.Model(inputs, layers.Dense(5)(layers.Concatenate()(parts)))
    model.compile(sgd(), logits_loss(), metrics=["accuracy"])
    return model


def through(x, *made):
    for layer in made:
        x = layer(x)
    return layers.Flatten()(x)


def conv_1d(x):
    return through(
        x,
        layers.Conv1D(4, 3, padding="causal", activation="relu"),
        layers.SeparableConv1D(4, 2, depth_multiplier=2),
        layers.UpSampling1D(2),
        layers.DepthwiseConv1D(3, activation="tanh"),
        layers.MaxPooling1D(2),
        layers.ZeroPadding1D(1),
        layers.Conv1DTranspose(3, 2, strides=2),
        layers.AveragePooling1D(2, padding="same"),
        layers.Cropping1D(1),
        layers.AdaptiveAveragePooling1D(3),
    )


def conv_2d(x):
    x = layers.SeparableConv2D(4, 2, padding="same")(layers.Conv2D(4, 2, dilation_rate=2)(x))
    x = layers.Add()([layers.DepthwiseConv2D(3, padding="same")(x), layers.Conv2D(4, 1, groups=2)(x)])
    x = layers.Average()([layers.MaxPooling2D(2)(x), layers.AveragePooling2D(2)(x)])
    x = layers.Conv2DTranspose(3, 3, strides=2, activation="relu")(layers.UpSampling2D(2)(x))
    x = layers.Cropping2D(1)(layers.ZeroPadding2D(2)(layers.AdaptiveMaxPooling2D(3)(x)))
    return layers.Concatenate()([layers.GlobalMaxPooling2D()(x), layers.GlobalAveragePooling2D()(x)])


def conv_3d(x):
    return through(
        x,
        layers.Conv3D(3, 2, activation="relu"),
        layers.UpSampling3D(2),
        layers.MaxPooling3D(2),
        layers.Conv3DTranspose(2, 2),
        layers.AveragePooling3D(2),
        layers.ZeroPadding3D(1),
    )


def conv_lstm(x):
    x = layers.ConvLSTM2D(3, 2, return_sequences=True)(x)
    x = layers.Reshape((3, 3, 9))(x)
    return layers.GlobalMaxPooling1D()(layers.ConvLSTM1D(3, 2)(x))


def signal(x):
    """What prepares sound and images, inside the model."""
    image = layers.CenterCrop(2, 2)(layers.Resizing(4, 4)(layers.Rescaling(0.5, 1.0)(x)))
    sound = layers.Reshape((72, 1))(x)
    sound = layers.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16, trainable=False)(sound)
    x = layers.Concatenate()([layers.Flatten()(image), layers.Flatten()(sound)])
    return layers.LayerNormalization()(x)


def attention(x):
    x = x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.Dense(8)(x)
    x = x + layers.GroupQueryAttention(4, 4, 2)(x, x)
    x = layers.Attention(use_scale=True)([x, x]) + layers.AdditiveAttention()([x, x])
    return layers.LayerNormalization()(layers.GlobalAveragePooling1D()(x))


def recurrent(x):
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True), merge_mode="sum")(x)
    x = layers.TimeDistributed(layers.Dense(4, activation="tanh"))(x)
    x = layers.GRU(4, return_sequences=True, reset_after=False)(x)
    x = layers.SimpleRNN(3, return_sequences=True, go_backwards=True)(x)
    x = layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)], return_sequences=True)(x)
    return layers.Bidirectional(layers.GRU(3))(x)


def dense_kinds(x):
    x = layers.PReLU()(layers.EinsumDense("ab,bc->ac", output_shape=8, bias_axes="c")(x))
    a, b = layers.LeakyReLU()(layers.Dense(8)(x)), layers.ELU()(layers.Dense(8)(x))
    x = layers.Concatenate()([layers.Maximum()([a, b]), layers.Multiply()([a, b]), layers.Subtract()([a, b])])
    x = layers.Lambda(lambda t: tf.sin(t) * 2.0)(layers.ActivityRegularization(l2=0.01)(x))
    x = layers.Softmax()(layers.Permute((2, 1))(layers.RepeatVector(2)(x)))
    return layers.Flatten()(layers.Dot(axes=1)([x, x]))


def tied(x):
    """Weights used twice."""
    table = layers.ReversibleEmbedding(20, 6)
    return table(layers.GlobalAveragePooling1D()(table(x)), reverse=True)


STEPS = {
    "gradient_penalty": Case(sequential(dense, cls=GradientPenalty), fit(X, Y)),
    "gradient_penalty_of_the_batchs_moments": Case(
        sequential(dense, lambda: layers.BatchNormalization(synchronized=True), cls=GradientPenalty), fit(X, Y)
    ),
    "control_flow": Case(sequential(dense, cls=ControlFlow), fit(X, Y)),
    "gradient_in_a_loop": Case(sequential(dense, cls=GradientInALoop), fit(X, Y)),
    "reduced_by_hand": Case(sequential(dense, cls=ReducedByHand), fit(X, Y)),
    "step_is_a_tf_function": Case(sequential(dense, cls=GraphStep), fit(X, Y)),
    "own_loops": Case(sequential(dense, cls=OwnLoops, metrics=["accuracy"]), all_ways(X, Y)),
    "own_loops_eagerly": Case(sequential(dense, cls=OwnLoops, run_eagerly=True), all_ways(X, Y)),
    "three_optimizers": Case(sequential(dense, dense, cls=ThreeOptimizers), fit(X, Y)),
    "one_tape_two_optimizers": Case(sequential(dense, cls=OneTapeTwoOptimizers), fit(X, Y)),
    "scalar_tracker": Case(sequential(dense, cls=ScalarTracker), fit(X, Y)),
    "own_variables": Case(sequential(dense, cls=Counting), all_ways(X, Y)),
    "own_weight": Case(sequential(dense, cls=OwnWeight, optimizer=sgd), all_ways(X, Y)),
    "own_table": Case(own_table, fit(FIELDS["letter"], Y)),
    "regularised": Case(
        sequential(lambda: layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2")), fit(X, Y)
    ),
    "constraint": Case(sequential(lambda: layers.Dense(8, kernel_constraint="max_norm"), optimizer="sgd"), fit(X, Y)),
    "frozen": Case(sequential(lambda: layers.Dense(8, trainable=False)), fit(X, Y)),
}

MODELS = {
    "fields": Case(fields, all_ways(FIELDS, Y)),
    "nested": Case(nested_models, all_ways({"left": X, "right": X[::-1].copy()}, {"label": Y, "value": X[:, :2]})),
    "list_outputs": Case(list_outputs, all_ways(X, [Y, X[:, :3], X[:, :2]])),
    "layer_with_state": Case(sequential(dense, Stateful, optimizer=sgd), all_ways(X, Y)),
    "layer_counts_rows": Case(sequential(dense, CountsRows, optimizer=sgd), fit(X, Y, epochs=2)),
    "layer_counts_all_rows": Case(sequential(dense, CountsAllRows, optimizer=sgd), fit(X, Y, epochs=2)),
    "experts": Case(sequential(Experts, optimizer=sgd), all_ways(X, Y)),
    "sparse_gradients": Case(
        sequential(lambda: layers.Embedding(20, 4), layers.Flatten, inputs=(7,), dtype="int32"), fit(IDS, Y)
    ),
    "sparse_gradients_eagerly": Case(
        sequential(lambda: layers.Embedding(20, 4), layers.Flatten, inputs=(7,), dtype="int32", run_eagerly=True),
        fit(IDS, Y, epochs=2),
    ),
    "tied_embedding": Case(functional(tied, (7,), dtype="int32"), fit(IDS, Y)),
    "stateful_lstm": Case(stateful(lambda: layers.LSTM(4, stateful=True)), states_kept),
    "stateful_lstm_unrolled": Case(stateful(lambda: layers.LSTM(4, stateful=True, unroll=True)), states_kept),
    "stateful_rnn_of_sequences": Case(
        stateful(lambda: keras.Sequential([layers.SimpleRNN(4, stateful=True, return_sequences=True), Memory()])),
        states_kept_without_reset,
    ),
    "state_that_says_the_rows": Case(stateful(Counted), states_kept_without_reset),
    "stateful_bidirectional_gru": Case(
        stateful(lambda: layers.Bidirectional(layers.GRU(3, stateful=True))), states_kept
    ),
    "masked_lstm": Case(
        sequential(lambda: layers.Embedding(20, 4, mask_zero=True), lambda: layers.LSTM(6), inputs=(7,), dtype="int32"),
        fit(np.where(np.arange(7) < 1 + np.arange(len(X))[:, None] % 6, IDS, 0), Y),
    ),
    "sparse_input": Case(
        functional(lambda x: dense()(x), (12,), sparse=True), fit(tf.sparse.from_dense(X * (X > 0)), Y)
    ),
    "conv_1d": Case(functional(conv_1d, (8, 3)), fit(SERIES, Y)),
    "conv_2d": Case(functional(conv_2d, (6, 6, 2)), fit(IMAGES, Y)),
    "conv_3d": Case(functional(conv_3d, (4, 4, 4, 2)), fit(VOLUMES, Y)),
    "conv_lstm": Case(functional(conv_lstm, (3, 4, 4, 2)), fit(FILMS, Y, epochs=3)),
    "signal": Case(functional(signal, (6, 6, 2)), fit(IMAGES, Y)),
    "attention": Case(
        functional(attention, (8, 8)), fit(np.tile(SERIES, (1, 1, 3))[:, :, :8], Y, epochs=3), tolerance=3e-5
    ),
    "recurrent": Case(functional(recurrent, (8, 3)), fit(SERIES, Y, epochs=3)),
    "recurrent_unrolled": Case(
        functional(lambda x: layers.GRU(3, unroll=True)(layers.LSTM(3, return_sequences=True, unroll=True)(x)), (3, 8)),
        fit(SERIES.reshape(len(X), 3, 8), Y, epochs=3),
    ),
    "dense_kinds": Case(functional(dense_kinds, (12,)), fit(X, Y)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name, towers", spread(STEPS))
def test_step(name, towers):
    """Steps of the user's own, and what they use."""
    check(STEPS[name], towers)


@pytest.mark.slow
@pytest.mark.parametrize("name, towers", spread(MODELS, towers=(3, 4, 2)))
def test_model(name, towers):
    """Models of many kinds of layers, inputs and outputs."""
    check(MODELS[name], towers)


def test_towers_draw_different_numbers_reproducibly():
    """Dropout masks differ between towers; the same seed and N give the same run, to the bit."""

    class Masks(keras.Sequential):
        def train_step(self, batch):
            return {"masks": self(tf.ones_like(batch[0]), training=True)}

    def factory():
        keras.utils.set_random_seed(5)
        model = Masks([keras.Input((64,)), layers.Dropout(0.5, seed=7)])
        model.compile()
        return model

    runs = []
    for _ in range(2):
        model = on_towers(factory, 4)
        runs.append(model.train_on_batch(np.ones((4, 64), "float32"), return_dict=True)["masks"])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert len(np.unique(np.asarray(runs[0]), axis=0)) == 4


def test_mlp_in_float64_is_exact_to_1e_12():
    """What is left between N towers and one device is rounding."""

    def factory():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((12,), dtype="float64")
        hidden = layers.Dense(16, "tanh", dtype="float64")(inputs)
        model = keras.Model(inputs, layers.Dense(5, dtype="float64")(hidden))
        model.compile("adam", logits_loss(dtype="float64"))
        return model

    def run(model):
        model.fit(X.astype("float64"), Y, batch_size=20, epochs=3, shuffle=False, verbose=0)
        return state(model)["weights"]

    check(Case(factory, run, tolerance=1e-12), 4)


@pytest.mark.slow
def test_mlp_after_100_steps():
    """Rounding does not grow into a difference."""
    check(Case(mlp, lambda model: fit(X, Y, batch_size=13, epochs=20)(model)["weights"], tolerance=1e-4), 3)
