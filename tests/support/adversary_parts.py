"""The parts of the programs of `adversary.py`: data, layers, steps, losses, optimizers, and what happens in turn.

A part is a function of a `World`, in which a program runs, and of arguments that are drawn. What a failed program
prints is made of the source of its parts, so that each stands by itself.
"""

import contextlib
import dataclasses
import tempfile
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

import ncclsync
from ncclsync.sharding.shards import fixed_specs, open_specs

WIDTH = 5  # of the features between layers
CLASSES = 3
PARTS = {}  # a kind ("body", "act", ...) to its parts: name to (function, the values of each argument)


def part(kind, /, **choices):
    """Declare a part of a kind: each argument is drawn of its choices."""

    def declare(function):
        PARTS.setdefault(kind, {})[function.__name__] = (function, choices)
        return function

    return declare


Part = tuple[str, dict[str, Any]]  # a name in `PARTS[kind]`, and its arguments


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: its parts, as `repr` prints them."""

    seed: int
    head: Part = ("vectors", {})
    body: tuple[Part, ...] = ()
    step: Part = ("keras_step", {})
    loss: Part = ("cross_entropy", {})
    optimizer: Part = ("sgd", {"momentum": 0.0, "accumulate": None, "clip": {}})
    metrics: tuple[str, ...] = ()
    compiled: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    acts: tuple[Part, ...] = ()
    jit: Any = False

    def parts(self):
        """(kind, name) of all parts."""
        yield "head", self.head[0]
        yield from (("body", name) for name, _ in self.body)
        yield from (("step", self.step[0]), ("loss", self.loss[0]), ("optimizer", self.optimizer[0]))
        yield from (("act", name) for name, _ in self.acts)


class World:
    """What the parts of a program share: the model, variables that are no weights, and what has been found.

    Attributes:
        model: on towers, or plain.
        own: variables, generators and tables of parts, by name; made before the model.
        dials: plain values that layers read when they are traced.
        found: (label, value) of all that must be equal.
        plain: False once what is found depends on the moment at which a thread ran.
        eagerly: whether steps are not traced.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.model = self.step = self.data = self.beside = None
        self.own, self.early, self.dials, self.found, self.errors = {}, {}, {"global": 1.0}, [], []
        self.plain, self.eagerly = True, False

    def keep(self, label, value):
        """Note a value that must be equal."""
        self.found.append((label, keras.tree.map_structure(np.asarray, value)))

    def variable(self, name, shape=(), value=1.0, dtype=None):
        """A variable that is no weight, made once."""
        if name not in self.own:
            self.own[name] = tf.Variable(tf.fill(shape, tf.cast(value, dtype or keras.config.floatx())))
        return self.own[name]

    def generator(self):
        """A random generator of the program's own."""
        return self.own.setdefault("generator", tf.random.Generator.from_seed(7))

    def batch(self, rows, length=4):
        """Inputs and labels."""
        return self.data(rows, length), self.rng.integers(0, CLASSES, rows)

    def training_batch(self, rows, length=4):
        """The same, for a step that may take further rows beside them."""
        x, y = self.batch(rows, length)
        return ((x, self.data(self.beside(rows), length)), y) if self.beside else (x, y)

    def target(self, name):
        """The tf.Variable that a write is about; None if the program has none of this sort."""
        model, optimizer = self.model, self.model.optimizer
        floats = [v for v in model.non_trainable_variables if "float" in v.dtype]
        found = {
            "weight": lambda: model.trainable_variables[0],
            "bias": lambda: model.trainable_variables[-1],
            "state": lambda: floats[0],
            "seed": lambda: next(v for v in model.non_trainable_variables if v.dtype == "uint32"),
            "rate": lambda: optimizer.learning_rate,
            "iterations": lambda: optimizer.iterations,
            "slot": lambda: optimizer.variables[-1],
            "metric": lambda: model.metrics[0].variables[0],
            "own": lambda: self.own["scale"],
        }[name]
        try:
            variable = found()
        except (IndexError, KeyError, StopIteration):
            return None
        value = variable.value if isinstance(variable, keras.Variable) else variable
        return value if isinstance(value, tf.Variable) else None


class Fn(layers.Layer):
    """A layer of a function that keeps the shape."""

    traced = 0  # how many times any has been called

    def __init__(self, f):
        super().__init__()
        self.f = f

    def call(self, x):
        """Call it."""
        Fn.traced += 1
        y = self.f(x)
        y.set_shape(x.shape)
        return y

    def compute_output_shape(self, shape):
        """Keep it."""
        return shape


def run(program: Program, towers: int = 0, eagerly: bool = False) -> World:
    """Run a program on towers, or, for 0, on one device, also without tracing its steps; return what it leaves.

    Raises:
        AssertionError: towers hold other numbers than each other.
        Exception: that of the program.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(program.seed)
    w = World(program.seed)
    w.eagerly = eagerly

    def made(kind, chosen, *arguments):
        return PARTS[kind][chosen[0]][0](w, *arguments, **chosen[1])

    def build():
        inputs, x = made("head", program.head)
        for each in program.body:
            x = made("body", each, x)
        model = w.model = made("step", program.step)(inputs, keras.layers.Dense(CLASSES)(x))
        loss, optimizer = made("loss", program.loss), made("optimizer", program.optimizer)
        updates_metrics = program.step[0] == "keras_step" and program.loss[0] == "cross_entropy"
        metrics = (list(program.metrics) if updates_metrics else []) or None

        how = {"run_eagerly": True} if eagerly else {"jit_compile": program.jit}

        def compile_model():
            model.compile(optimizer, loss, metrics=metrics, **how, **dict(program.compiled))

        w.compile = compile_model
        compile_model()
        optimizer.build(model.trainable_variables)
        _trace_early(w, program)
        return model

    asked = dict(program.options)
    if "health" in asked:
        asked["health"] = ncclsync.Health(**asked["health"])
    if "shares" in asked:
        asked["shares"] = asked["shares"][:towers]
    w.model = ncclsync.nccl_parallel(towers=towers, **asked)(build)() if towers else build()
    try:
        for name, arguments in program.acts:
            PARTS["act"][name][0](w, **arguments)
        if not program.acts:
            train(w, rows=8, length=4, times=1)
        w.keep("weights", {f"{i} {v.path}": v for i, v in enumerate(w.model.variables)})
        w.keep("optimizer", {f"{i} {v.path}": v for i, v in enumerate(w.model.optimizer.variables)})
        own = {key: value for key, value in w.own.items() if isinstance(value, tf.Variable)}
        if "generator" in w.own:
            own["generator"] = w.own["generator"].state
        w.keep("own", own)
        if towers:
            _assert_towers_agree(w.model)
    finally:
        if towers:
            w.model.towers.close()
    return w


def _trace_early(w: World, program: Program) -> None:
    """Functions that write variables, and draw, traced before there are towers."""
    uses = [(arguments.get("how"), arguments.get("target")) for _, arguments in program.acts]
    for target in {target for how, target in uses if how in ("early", "early_map")} - {None}:
        if w.target(target) is not None:

            def write(*row, target=target):
                write_variable(w, target, "late_inline")
                return row or None

            w.early[target] = tf.function(write)
            w.early[target].get_concrete_function()
            w.early[f"dataset of {target}"] = tf.data.Dataset.range(1).map(write)
    if (generator := w.own.get("generator")) is not None and ("early", None) in uses:
        w.early["draw"] = tf.function(lambda: generator.normal([2]))
        w.early["draw"].get_concrete_function()


def _assert_towers_agree(model: keras.Model) -> None:
    apart = model.towers.divergence()
    assert apart == 0.0, f"towers are {apart:.2g} apart"
    for tower in range(len(model.towers)):
        for one, other in zip(model.towers.get_weights(tower), model.get_weights(), strict=True):
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), f"tower {tower} has other weights"


# Data and first layer.


@part("head")
def vectors(w):
    """Rows of numbers."""
    w.data = lambda rows, _: w.rng.normal(size=(rows, 4))
    inputs = keras.Input((4,))
    return inputs, layers.Dense(WIDTH, activation="tanh")(inputs)


@part("head", cell=("pool", "gru", "lstm", "both", "attention"), masked=(True, False))
def tokens(w, cell, masked):
    """Sequences of numbers of words, of any length."""
    w.data = lambda rows, length: w.rng.integers(0 if length > 1 else 1, 20, (rows, length))
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(20, WIDTH, mask_zero=masked)(inputs)
    if cell == "attention":
        x = x + layers.MultiHeadAttention(2, 3)(x, x)
    last = {
        "gru": lambda: layers.GRU(WIDTH),
        "lstm": lambda: layers.LSTM(WIDTH),
        "both": lambda: layers.Bidirectional(layers.SimpleRNN(WIDTH), merge_mode="sum"),
    }.get(cell, layers.GlobalAveragePooling1D)
    return inputs, last()(x)


@part("head", cell=("conv", "rnn", "attention", "time"))
def series(w, cell):
    """Series of vectors of any length, padded by zeros."""

    def data(rows, length):
        values = w.rng.normal(size=(rows, length, 3))
        return values * (np.arange(length) <= w.rng.integers(0, length, rows)[:, None])[..., None]

    w.data = data
    inputs = keras.Input((None, 3))
    x = layers.Masking()(inputs)
    if cell == "conv":
        return inputs, layers.GlobalMaxPooling1D()(layers.Conv1D(WIDTH, 2, padding="causal")(inputs))
    if cell == "rnn":
        return inputs, layers.SimpleRNN(WIDTH)(x)
    if cell == "time":
        return inputs, layers.GlobalAveragePooling1D()(layers.TimeDistributed(layers.Dense(WIDTH))(x))
    x = layers.Dense(WIDTH)(x)
    return inputs, layers.GlobalAveragePooling1D()(layers.Attention()([x, x]))


@part("head", normal=(True, False), pool=("max", "mean"))
def images(w, normal, pool):
    """Small images."""
    w.data = lambda rows, _: w.rng.normal(size=(rows, 5, 5, 2))
    inputs = keras.Input((5, 5, 2))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    x = layers.Activation("relu")(layers.GroupNormalization(2)(x) if normal else x)
    x = layers.MaxPooling2D()(x) if pool == "max" else layers.AveragePooling2D(2)(x)
    return inputs, layers.Dense(WIDTH)(layers.Flatten()(x))


@part("head")
def texts(w):
    """Sentences, which the model splits."""
    words = np.array(["red", "green", "sea", "sky", "unknown"])
    w.data = lambda rows, length: tf.constant([" ".join(words[w.rng.integers(0, 5, length)]) for _ in range(rows)])
    inputs = keras.Input((), dtype="string")
    x = layers.TextVectorization(vocabulary=list(words[:4]), output_sequence_length=4)(inputs)
    return inputs, layers.GlobalAveragePooling1D()(layers.Embedding(7, WIDTH)(x))


@part("head")
def sparse(w):
    """Sparse rows."""
    w.data = lambda rows, _: tf.sparse.from_dense(
        np.where(w.rng.random((rows, 6)) < 0.6, w.rng.normal(size=(rows, 6)), 0.0)
    )
    inputs = keras.Input((6,), sparse=True)
    return inputs, layers.Dense(WIDTH, activation="tanh")(inputs)


@part("head", how=("mean", "dense", "max"))
def ragged(w, how):
    """Lists of numbers of words, of unequal lengths."""

    def data(rows, length):
        return tf.ragged.constant(
            [list(w.rng.integers(1, 9, 1 + w.rng.integers(0, length))) for _ in range(rows)], dtype=tf.int32
        )

    class Words(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(9, WIDTH), initializer="uniform")

        def call(self, rows):
            if how == "dense":
                return tf.reduce_sum(tf.gather(self.table, rows.to_tensor()), axis=1)
            found = tf.RaggedTensor.from_row_splits(tf.gather(self.table, rows.values), rows.row_splits)
            return tf.reduce_max(found, axis=1) if how == "max" else tf.reduce_mean(found, axis=1)

        def compute_output_shape(self, shape):
            return shape[0], WIDTH

    w.data = data
    inputs = keras.Input((None,), dtype="int32", ragged=True)
    return inputs, Words()(inputs)


@part("head")
def two_inputs(w):
    """A dictionary of two arrays."""
    w.data = lambda rows, _: {"a": w.rng.normal(size=(rows, 3)), "b": w.rng.integers(0, 6, (rows, 1))}
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((1,), dtype="int32", name="b")}
    word = layers.Flatten()(layers.Embedding(6, WIDTH)(inputs["b"]))
    return inputs, layers.Dense(WIDTH)(inputs["a"]) + word


# Layers, [rows, WIDTH] to the same.


@part("body", activation=("relu", "tanh", "gelu", "softmax"), regularizer=(None, "l2"))
def dense(w, x, activation, regularizer):
    """A layer."""
    return layers.Dense(WIDTH, activation=activation, kernel_regularizer=regularizer)(x)


@part("body", synchronized=(True, False, False))
def batch_norm(w, x, synchronized):
    """It may have the moments of a tower or of the batch."""
    return layers.BatchNormalization(synchronized=synchronized, momentum=0.8)(x)


@part("body", make=("LayerNormalization", "UnitNormalization", "RMSNormalization"))
def normal(w, x, make):
    """A normalisation of each row."""
    return getattr(layers, make)()(x)


@part("body", make=("Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout"))
def dropout(w, x, make):
    """A random layer, of Keras' seeds."""
    return getattr(layers, make)(0.3, seed=3)(x)


@part("body")
def keras_draws(w, x):
    """`keras.random` by a seed generator of the layer."""

    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(4)

        def call(self, x):
            return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seed_generator)

    return Noise()(x)


@part("body")
def generator_noise(w, x):
    """`tf.random.Generator` for each number."""
    generator = w.generator()
    return Fn(lambda x: x + 0.1 * generator.normal(tf.shape(x), dtype=x.dtype))(x)


@part("body")
def coin(w, x):
    """`tf.random.Generator`: a number for the batch."""
    generator = w.generator()
    return Fn(lambda x: x * (1.0 + 0.5 * tf.cast(generator.uniform(()) < 0.5, x.dtype)))(x)


@part("body")
def own_scale(w, x):
    """A factor that is no weight."""
    scale = w.variable("scale", (WIDTH,))
    return Fn(lambda x: x * scale)(x)


@part("body", name=("StateVariance", "seed_generator_state_a", "state", "count"), written=(True, False))
def named(w, x, name, written):
    """A weight whose name looks like another thing's."""

    class Named(layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(WIDTH,), initializer="ones", name=name, trainable=not written)

        def call(self, x, training=False):
            if training and written:
                self.v.assign(0.9 * self.v + 0.1 * ops.mean(ops.abs(x), axis=0))
            return x * self.v

    return Named()(x)


@part("body", kind=("int64", "uint32"))
def counter(w, x, kind):
    """A counter with the dtype and shape of a random state, which the layer reads."""

    class Counter(layers.Layer):
        def build(self, shape):
            size = 3 if kind == "int64" else 2
            self.n = self.add_weight(shape=(size,), initializer="zeros", dtype=kind, name="counter", trainable=False)

        def call(self, x, training=False):
            if training:
                self.n.assign_add(ops.cast([ops.shape(x)[0], 1, 2][: self.n.shape[0]], kind))
            return x * (1.0 + 0.01 * ops.cast(self.n[1], x.dtype) / (1.0 + ops.cast(self.n[0], x.dtype)))

    return Counter()(x)


@part("body")
def running_mean(w, x):
    """A statistic that is written, then read."""

    class Running(layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=(WIDTH,), initializer="zeros", trainable=False, name="mean")

        def call(self, x, training=False):
            if training:
                self.mean.assign(0.7 * self.mean + 0.3 * ops.mean(x, axis=0))
            return x - self.mean

    return Running()(x)


@part("body", how=("numpy_function", "py_function", "boolean_mask", "literal", "strings", "ragged", "where"))
def whole(w, x, how):
    """Rows that a tower cannot have by itself: what follows gets the batch's."""

    def f(x):
        if how in ("numpy_function", "py_function"):
            function = tf.numpy_function if how == "numpy_function" else tf.py_function
            y = function(lambda v: v * 1.5, [x], x.dtype)
            y.set_shape(x.shape)
            return y + 0.1 * tf.reduce_mean(x)
        if how == "boolean_mask":
            kept = tf.where(x[:, 0] > 0)
            return tf.scatter_nd(kept, tf.gather_nd(x, kept), tf.shape(x, tf.int64))
        if how == "literal":
            return tf.reshape(tf.reshape(x, [-1]), [-1, WIDTH])
        if how == "strings":
            y = tf.strings.to_number(tf.strings.as_string(tf.round(x * 8.0)), tf.float64) / 8.0
            return y + 0.1 * tf.reduce_mean(x)
        if how == "ragged":
            lengths = tf.cast(x[:, 0] > 0, tf.int64) + WIDTH - 1
            return tf.RaggedTensor.from_tensor(x, lengths).to_tensor(shape=[None, WIDTH])
        return tf.tensor_scatter_nd_update(x, tf.where(x > 1.0), x[x > 1.0] * 0.5)

    return Fn(f)(x)


@part("body", how=("mean", "max", "sort", "cumsum", "softmax", "argsort", "pairs", "unique", "top", "reverse", "roll"))
def across(w, x, how):
    """An op that compares rows."""

    def f(x):
        return {
            "mean": lambda: x - tf.reduce_mean(x, 0),
            "max": lambda: x / (1.0 + tf.reduce_max(tf.abs(x), 0)),
            "sort": lambda: x + 0.1 * tf.sort(x, axis=0),
            "cumsum": lambda: x + 0.1 * tf.cumsum(x, 0),
            "softmax": lambda: x + tf.nn.softmax(x, 0),
            "argsort": lambda: x + 0.1 * tf.gather(x, tf.argsort(x[:, 1])),
            "pairs": lambda: x + 0.1 * tf.nn.softmax(x @ tf.transpose(x)) @ x,
            "unique": lambda: x + 0.1 * tf.cast(tf.size(tf.unique(tf.cast(x[:, 0] * 3.0, tf.int32)).y), x.dtype),
            "top": lambda: x + tf.reduce_mean(tf.math.top_k(x[:, 0], 1).values),
            "reverse": lambda: x + 0.1 * tf.reverse(x, [0]),
            "roll": lambda: x + 0.1 * tf.roll(x, 1, 0),
        }[how]()

    return Fn(f)(x)


@part("body", how=("top", "sort", "cumprod", "argmax", "einsum", "one_hot", "gather", "segment", "fft", "pad"))
def along(w, x, how):
    """An op that works on each row by itself."""

    def f(x):
        near = tf.argmax(x, -1)
        return {
            "top": lambda: x + tf.reduce_sum(tf.math.top_k(x, 2).values, -1, keepdims=True),
            "sort": lambda: x + tf.sort(x, axis=-1),
            "cumprod": lambda: tf.math.cumprod(tf.tanh(x), -1),
            "argmax": lambda: x * (1.0 + tf.cast(near, x.dtype)[:, None]),
            "einsum": lambda: x + 0.1 * tf.einsum("bi,bj->bi", x, x),
            "one_hot": lambda: x + tf.one_hot(near, WIDTH, dtype=x.dtype),
            "gather": lambda: x + tf.gather(x, near, batch_dims=1)[:, None],
            "segment": lambda: x + tf.math.unsorted_segment_mean(x, near, WIDTH)[0],
            "fft": lambda: x + tf.math.real(tf.signal.fft(tf.cast(x, tf.complex128))) * 0.1,
            "pad": lambda: tf.pad(x, [[0, 0], [1, 0]])[:, :WIDTH],
        }[how]()

    return Fn(f)(x)


@part("body", how=("while", "map_fn", "array", "scan", "cond", "case", "cond_writes", "rows", "dynamic", "beam"))
def flow(w, x, how):
    """A loop or a branch."""
    scale = w.variable("scale", (WIDTH,)) if how == "cond_writes" else None

    def f(x):
        if how == "while":
            return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + 0.1 * tf.tanh(y)), [0, x])[1]
        if how == "map_fn":
            return tf.map_fn(lambda row: row * tf.reduce_max(row), x)
        if how in ("array", "dynamic"):
            array = tf.TensorArray(x.dtype, 0 if how == "dynamic" else 2, dynamic_size=how == "dynamic")
            write_row = lambda i, a: (i + 1, a.write(i, x * tf.cast(i, x.dtype)))  # noqa: E731
            return x + tf.reduce_sum(tf.while_loop(lambda i, _: i < 2, write_row, [0, array])[1].stack(), 0)
        if how == "scan":
            return x + 0.1 * tf.transpose(tf.scan(lambda a, b: a * 0.5 + b, tf.transpose(x)))
        if how == "cond":
            return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x - tf.reduce_mean(x))
        if how == "case":
            return tf.switch_case(tf.cast(tf.shape(x)[0] % 2, tf.int32), [lambda: x, lambda: tf.tanh(x)])
        if how == "rows":
            return tf.where(tf.reduce_any(x > 0.5, -1, keepdims=True), x * 2.0, x)

        if how == "beam":

            def extend(i, y):
                best = tf.math.top_k(tf.reshape(y, [-1, 2 * WIDTH]), 2).values
                return i + 1, y * 0.9 + 0.1 * tf.reshape(best, [-1, 1])

            y = tf.while_loop(lambda i, _: i < 2, extend, [0, tf.repeat(x, 2, axis=0)])[1]
            return x + tf.reshape(y, [-1, 2, WIDTH])[:, 0]

        def write():
            scale.assign(scale * 0.9 + 0.05)
            return x * 2.0

        return tf.cond(tf.reduce_mean(x) > 0, write, lambda: x) * scale

    return Fn(f)(x)


@part("body", find=("before", "after", "both"))
def table(w, x, find):
    """A lookup table that the step reads and writes."""
    if "table" not in w.own:
        w.own["table"] = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.25)
    made = w.own["table"]

    def f(x):
        keys = tf.cast(tf.argmax(x, -1), tf.int64)
        result = x
        if find != "after":
            result = result + made.lookup(keys)[:, None]
        with tf.control_dependencies([result]):
            put = made.insert(keys, made.lookup(keys) + 0.1)
        with tf.control_dependencies([put]):
            return result + 0.5 * made.lookup(keys)[:, None] if find != "before" else tf.identity(result)

    return Fn(f)(x)


@part("body")
def static_table(w, x):
    """A lookup table that is only read."""
    values = tf.linspace(tf.constant(0.0, tf.float64), 1.0, WIDTH)
    filled = tf.lookup.KeyValueTensorInitializer(tf.range(WIDTH, dtype=tf.int64), values)
    made = w.own.setdefault("static", tf.lookup.StaticHashTable(filled, 0.0))
    return Fn(lambda x: x + made.lookup(tf.argmax(x, -1))[:, None])(x)


@part("body", function=("py_function", "numpy_function"))
def python_writes(w, x, function):
    """Python of the step writes a variable that the step reads afterwards."""
    scale = w.variable("scale", (WIDTH,))

    def write(value):
        scale.assign_add(tf.ones([WIDTH], scale.dtype) * 0.1)
        return np.asarray(value)

    def f(x):
        y = getattr(tf, function)(write, [tf.reduce_mean(x)], x.dtype)
        with tf.control_dependencies([y]):
            return x * tf.identity(scale.read_value())

    return Fn(f)(x)


@part("body")
def queue(w, x):
    """A variable of open shape that grows by the batch's rows, and is read."""
    if "queue" not in w.own:
        w.own["queue"] = tf.Variable(tf.zeros([1, WIDTH], tf.float64), shape=[None, WIDTH], trainable=False)
    kept = w.own["queue"]

    def f(x):
        kept.assign(tf.concat([kept.read_value(), tf.stop_gradient(x)], 0)[-12:])
        return x - tf.reduce_mean(kept.read_value(), 0)

    return Fn(f)(x)


@part("body")
def overwritten(w, x):
    """A variable whose gradient is its next value, as of float8."""

    class Top(layers.Layer):
        def build(self, shape):
            self.top = self.add_weight(shape=(), initializer="ones", name="top")
            self.top.overwrite_with_gradient = True
            self.top.autocast = False

        def call(self, x):
            @tf.custom_gradient
            def f(x, top):
                return x / (1.0 + top), lambda d: (d, tf.reduce_max(tf.abs(x)) * tf.ones_like(top))

            return f(x, ops.convert_to_tensor(self.top))

    return Top()(x)


@part("body")
def attributes(w, x):
    """A layer that reads Python's values when it is traced: private, an array, an object's member, a global."""

    class Dialled(layers.Layer):
        def __init__(self):
            super().__init__()
            self._factor, self.shift, self.dials = 1.0, np.zeros(WIDTH), w.dials

        def call(self, x):
            return x * self._factor * w.dials["global"] + self.shift

        def compute_output_shape(self, shape):
            return shape

    w.own.setdefault("dialled", Dialled())
    return w.own["dialled"](x)


@part("body", how=("activity", "square", "rows"))
def extra_loss(w, x, how):
    """A loss that a layer adds."""

    class Adds(layers.Layer):
        def call(self, x):
            if how == "activity":
                self.add_loss(0.01 * ops.sum(ops.abs(x)))
            elif how == "square":
                self.add_loss(0.1 * ops.sum(ops.square(ops.mean(x, axis=0))))
            else:
                self.add_loss(0.1 * ops.mean(ops.abs(x)) * ops.cast(ops.shape(x)[0], x.dtype) ** 0.5)
            return x

    return Adds()(x)


@part("body")
def asserted(w, x):
    """An assertion that holds."""

    def f(x):
        holds = tf.debugging.assert_greater(tf.reduce_sum(tf.abs(x)), tf.constant(-1.0, x.dtype))
        with tf.control_dependencies([holds]):
            return tf.identity(x)

    return Fn(f)(x)


def _sequence(layer):
    return lambda x: layer(layers.Reshape((WIDTH, 1))(x))


def _image(layer):
    return lambda x: layer(layers.Reshape((WIDTH, 2, 1))(layers.Dense(2 * WIDTH)(x)))


def _volume(layer):
    return lambda x: layer(layers.Reshape((2, 2, WIDTH, 1))(layers.Dense(4 * WIDTH)(x)))


def _pair(layer):
    return lambda x: layer([x, layers.Dense(WIDTH)(x)])


# Layers of Keras' that no other part has, as they take vectors, sequences, images or two tensors.
KERAS_LAYERS = {
    "gru": lambda: _sequence(layers.GRU(3, return_sequences=True, recurrent_dropout=0.2, dropout=0.2, seed=1)),
    "lstm": lambda: _sequence(layers.LSTM(3, go_backwards=True, unroll=True)),
    "stacked": lambda: _sequence(layers.RNN(layers.StackedRNNCells([layers.GRUCell(2), layers.LSTMCell(3)]))),
    "bidirectional": lambda: _sequence(layers.Bidirectional(layers.GRU(2, return_sequences=True))),
    "ConvLSTM1D": lambda: lambda x: layers.ConvLSTM1D(2, 2)(layers.Reshape((2, WIDTH, 1))(layers.Dense(2 * WIDTH)(x))),
    "time": lambda: _sequence(layers.TimeDistributed(layers.BatchNormalization())),
    "Conv1D": lambda: _sequence(layers.Conv1D(4, 3, dilation_rate=2, padding="causal")),
    "SeparableConv1D": lambda: _sequence(layers.SeparableConv1D(2, 3, depth_multiplier=2)),
    "Conv1DTranspose": lambda: _sequence(layers.Conv1DTranspose(2, 3, strides=2)),
    "DepthwiseConv1D": lambda: _sequence(layers.DepthwiseConv1D(2, depth_multiplier=2)),
    "pool": lambda: _sequence(layers.AveragePooling1D(2, padding="same")),
    "up": lambda: _sequence(layers.UpSampling1D(2)),
    "pad": lambda: _sequence(layers.ZeroPadding1D((1, 2))),
    "crop": lambda: _sequence(layers.Cropping1D((1, 1))),
    "dropout_1d": lambda: _sequence(layers.SpatialDropout1D(0.4, seed=1)),
    "attention": lambda: (
        lambda x: layers.MultiHeadAttention(2, 2, dropout=0.1, seed=1)(
            *[layers.Reshape((WIDTH, 1))(x)] * 2, use_causal_mask=True
        )
    ),
    "grouped": lambda: lambda x: layers.GroupQueryAttention(2, 4, 2)(*[layers.Reshape((WIDTH, 1))(x)] * 2),
    "additive": lambda: lambda x: layers.AdditiveAttention()([layers.Reshape((WIDTH, 1))(x)] * 2),
    "Conv2D": lambda: _image(layers.Conv2D(4, 2, strides=2, padding="same")),
    "Conv2DTranspose": lambda: _image(layers.Conv2DTranspose(2, 2, strides=2, use_bias=False)),
    "DepthwiseConv2D": lambda: _image(layers.DepthwiseConv2D(2, depth_multiplier=3)),
    "SeparableConv2D": lambda: _image(layers.SeparableConv2D(2, 2)),
    "global_max": lambda: _image(layers.GlobalMaxPooling2D()),
    "up_2d": lambda: _image(layers.UpSampling2D(2, interpolation="bilinear")),
    "dropout_2d": lambda: _image(layers.SpatialDropout2D(0.4, seed=1)),
    "norm_2d": lambda: _image(layers.BatchNormalization(axis=1, synchronized=True)),
    "resize": lambda: _image(layers.Resizing(3, 3)),
    "flip": lambda: _image(layers.RandomFlip(seed=1)),
    "crop_2d": lambda: _image(layers.CenterCrop(2, 2)),
    "Conv3D": lambda: _volume(layers.Conv3D(2, 2)),
    "pool_3d": lambda: _volume(layers.GlobalAveragePooling3D()),
    "EinsumDense": lambda: layers.EinsumDense("ab,bc->ac", 4, bias_axes="c"),
    "dot": lambda: _pair(layers.Dot(1, normalize=True)),
    "multiply": lambda: _pair(layers.Multiply()),
    "maximum": lambda: _pair(layers.Maximum()),
    "concatenate": lambda: _pair(layers.Concatenate(0)),
    "prelu": lambda: layers.PReLU(),
    "softmax": lambda: layers.Softmax(),
    "permute": lambda: lambda x: layers.Permute((2, 1))(layers.RepeatVector(3)(x)),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(4)),
    "lora": lambda: lambda x: _lora(layers.Dense(4), x),
    "discretized": lambda: lambda x: layers.Embedding(5, 3)(layers.Discretization([-0.5, 0.0, 0.5, 1.0])(x)),
    "hashed": lambda: (
        lambda x: layers.Embedding(4, 3)(layers.Hashing(4)(layers.Discretization([-0.5, 0.0, 0.5, 1.0])(x)))
    ),
    "category": lambda: lambda x: layers.CategoryEncoding(5, "multi_hot")(layers.Discretization([-0.5, 0.0, 0.5])(x)),
    "normalization": lambda: layers.Normalization(mean=0.1, variance=2.0),
    "scaled": lambda: layers.Rescaling(0.5, 0.1),
    "activity": lambda: layers.ActivityRegularization(0.01, 0.02),
    "group_norm": lambda: _image(layers.GroupNormalization(1, axis=-1)),
    "noise": lambda: layers.GaussianNoise(0.1, seed=2),
    "constraint": lambda: layers.Dense(4, activation="selu", kernel_constraint="max_norm"),
}


def _lora(layer, x):
    y = layer(x)
    layer.enable_lora(2)
    return y


@part("body", name=tuple(KERAS_LAYERS))
def keras_layer(w, x, name):
    """A layer of Keras'."""
    y = KERAS_LAYERS[name]()(x)
    if name == "concatenate":
        y = Fn(lambda y: y)(y)
        return x + 0.1 * layers.Dense(WIDTH)(keras.ops.mean(y, axis=0, keepdims=True))
    return layers.Dense(WIDTH)(layers.Flatten()(y))


@part("body", op=tuple(range(400)))
def census_op(w, x, op):
    """An op of the op table, of the features and of constants, among the examples of rows of numbers."""
    from op_table import EXAMPLES

    fitting = [
        one
        for one in EXAMPLES
        if one.inputs
        and one.inputs[0].kind == "f8"
        and one.inputs[0].shape[:1] == ("n",)
        and all(isinstance(length, int) for each in one.inputs for length in each.shape[1:])
        and not any(str(length) in "2n3n" for each in one.inputs[1:] for length in each.shape[:1] if length != "n")
        and all("n" not in map(str, each.shape) or each.kind == "f8" for each in one.inputs)
        and not one.sized
    ]
    example = fitting[op % len(fitting)]

    def f(x):
        columns = []
        for i, each in enumerate(example.inputs):
            if each.shape[:1] != ("n",):
                columns.append(tf.constant(each.value(6, i)))
                continue
            size = int(np.prod(each.shape[1:], dtype=int))
            row = tf.tile(x, [1, size // WIDTH + 1])[:, :size] * (1.0 + 0.1 * i)
            columns.append(tf.reshape(row, [-1, *each.shape[1:]]))
        result = example.call(*columns)
        total = tf.zeros([], x.dtype)
        for leaf in tf.nest.flatten(result):
            if isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_integer):
                number = tf.cast(leaf, x.dtype)
                total += tf.reduce_mean(tf.where(tf.math.is_finite(number), number, 0.0))
        return x + 0.1 * tf.tanh(total)

    return Fn(f)(x)


# Steps of the model.


@part("step")
def keras_step(w):
    """Keras' own."""
    return keras.Model


@part("step")
def penalised(w):
    """A gradient penalty and gradients clipped by hand."""

    class Penalised(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self.trainable_variables)]
            gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss, "norm": norm}

    return Penalised


@part("step")
def noisy_gradients(w):
    """Noise of a generator on each gradient, as for privacy."""
    generator = w.generator()

    class Private(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self.trainable_variables)]
            noisy = [g + 0.01 * generator.normal(tf.shape(g), dtype=g.dtype) for g in gradients]
            self.optimizer.apply_gradients(zip(noisy, self.trainable_variables, strict=True))
            return {"loss": loss}

    return Private


@part("step")
def by_hand(w):
    """Descends without an optimizer, and keeps an average of its weights."""
    average = w.variable("average", (), 0.0)

    class ByHand(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for v, g in zip(self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True):
                v.assign_sub(0.1 * tf.convert_to_tensor(g))
            average.assign(0.9 * average + 0.1 * tf.cast(loss, average.dtype))
            return {"loss": loss, "average": average.read_value()}

    return ByHand


@part("step")
def conditional(w):
    """Updates only if the loss is large."""

    class Conditional(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [tf.convert_to_tensor(g) for g in gradients]

            def update():
                for v, g in zip(self.trainable_variables, gradients, strict=True):
                    v.assign_sub(0.1 * g)
                return 1.0

            done = tf.cond(loss > 0.9, update, lambda: 0.0)
            return {"loss": loss, "done": done}

    return Conditional


def two_weights(model):
    """The first layers' variables, and the last layer's."""
    last = model.layers[-1].trainable_variables
    return [v for v in model.trainable_variables if all(v is not other for other in last)], last


def descend(tape, loss, variables, rate=0.1):
    """A step of gradient descent by hand."""
    for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
        if g is not None:
            v.assign_sub(rate * tf.convert_to_tensor(g))


@part("step")
def two_optimizers(w):
    """The last layer by an optimizer of its own, twice for each step of the others."""

    class Two(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.second = keras.optimizers.Adam(0.02)
            self.second.build(two_weights(self)[1])

        def train_step(self, data):
            x, y = data[:2]
            first, last = two_weights(self)
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True))
                self.second.apply(tape.gradient(loss, last), last)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            descend(tape, loss, first)
            return {"loss": loss}

    return Two


@part("step")
def adversarial(w):
    """A critic that tells true rows from made ones, and what fools it; each has its own tape."""

    class Adversarial(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.critic = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])
            self.critic.build((None, CLASSES))
            self.second = keras.optimizers.RMSprop(0.02)
            self.second.build(self.critic.trainable_variables)

        def train_step(self, data):
            x, y = data[:2]
            true = one_hot(y, tf.zeros([], tf.float64))
            with tf.GradientTape(persistent=True) as tape:
                made = self(x, training=True)
                of_true, of_made = self.critic(true), self.critic(made)
                critic_loss = tf.reduce_mean(tf.nn.softplus(-of_true)) + tf.reduce_mean(tf.nn.softplus(of_made))
                loss = tf.reduce_mean(tf.nn.softplus(-of_made)) + self.compute_loss(x, y, made)
            own = [v for v in self.trainable_variables if all(v is not c for c in self.critic.trainable_variables)]
            gradients = tape.gradient(critic_loss, self.critic.trainable_variables)
            self.second.apply(gradients, self.critic.trainable_variables)
            descend(tape, loss, own)
            return {"loss": loss, "critic": critic_loss, "fooled": tf.reduce_mean(tf.cast(of_made > 0, tf.float64))}

    return Adversarial


@part("step", drop=(0.0, 0.3))
def contrastive(w, drop):
    """Two views of each row, noisy by a seed of the steps, against all others of the batch."""

    class Contrastive(keras.Model):
        def train_step(self, data):
            x = data[0]
            seed = tf.stack([tf.cast(self.optimizer.iterations, tf.int32), 3])
            with tf.GradientTape() as tape:
                views = [self(x, training=True) for _ in range(2)]
                noise = tf.random.stateless_uniform(tf.shape(views[0]), seed, dtype=views[0].dtype)
                views[1] = tf.where(noise < drop, tf.zeros_like(noise), views[1])
                a, b = (tf.math.l2_normalize(each + 0.01, -1) for each in views)
                rows = tf.shape(a)[0]
                logits = tf.concat([a, b], 0) @ tf.transpose(tf.concat([a, b], 0)) * 5.0
                logits -= 1e9 * tf.eye(2 * rows, dtype=logits.dtype)
                wanted = tf.concat([tf.range(rows, 2 * rows), tf.range(rows)], 0)
                loss = tf.reduce_mean(losses.sparse_categorical_crossentropy(wanted, logits, from_logits=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    return Contrastive


@part("step", confident=(0.3, 0.4))
def teacher(w, confident):
    """A teacher, the average of the weights, says the labels where it is sure of them."""

    class Student(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.average = [tf.Variable(v, trainable=False) for v in self.trainable_variables]

        def train_step(self, data):
            x, y = data[:2]
            said, _ = self.stateless_call(self.average, self.non_trainable_variables, x, training=False)
            said = tf.nn.softmax(said)
            sure = tf.reduce_max(said, -1) > confident
            with tf.GradientTape() as tape:
                found = self(x, training=True)
                each = losses.sparse_categorical_crossentropy(tf.argmax(said, -1), found, from_logits=True)
                masked = tf.boolean_mask(each, sure)
                loss = tf.math.divide_no_nan(tf.reduce_sum(masked), tf.cast(tf.size(masked), masked.dtype))
                loss += self.compute_loss(x, y, found)
            descend(tape, loss, self.trainable_variables)
            for average, v in zip(self.average, self.trainable_variables, strict=True):
                average.assign(0.9 * average + 0.1 * tf.convert_to_tensor(v))
            return {"loss": loss, "sure": tf.reduce_sum(tf.cast(sure, tf.float64))}

    return Student


@part("step", second_order=(True, False))
def meta(w, second_order):
    """Descends on the even rows, and learns from the odd rows' loss there."""

    class Meta(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_mean(
                        losses.sparse_categorical_crossentropy(y, self(x, training=False), from_logits=True)
                        * tf.cast(tf.range(tf.shape(y)[0]) % 2 == 0, tf.float64)
                    )
                gradients = inner.gradient(loss, self.trainable_variables)
                gradients = [tf.convert_to_tensor(g) for g in gradients]
                if not second_order:
                    gradients = [tf.stop_gradient(g) for g in gradients]
                fast = [v - 0.3 * g for v, g in zip(self.trainable_variables, gradients, strict=True)]
                found, _ = self.stateless_call(fast, self.non_trainable_variables, x, training=False)
                each = losses.sparse_categorical_crossentropy(y, found, from_logits=True)
                wanted = tf.reduce_sum(each[1::2]) / tf.cast(tf.maximum(tf.shape(each)[0] // 2, 1), each.dtype)
            descend(outer, wanted, self.trainable_variables)
            return {"loss": loss, "after": wanted}

    return Meta


@part("step", radius=(0.05,))
def sharpness(w, radius):
    """SAM: climbs within the step, takes the gradient there, goes back, descends."""

    class Sharpness(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
            steps = [radius * g / (tf.linalg.global_norm(gradients) + 1e-9) for g in gradients]
            for v, e in zip(variables, steps, strict=True):
                v.assign_add(e)
            with tf.GradientTape() as tape:
                there = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(there, variables)
            for v, e in zip(variables, steps, strict=True):
                v.assign_sub(e)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss, "there": there}

    return Sharpness


@part("step", period=(2, 3))
def lookahead(w, period):
    """Slow weights, which are met after some steps, in a branch."""

    class Lookahead(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.slow = [tf.Variable(v, trainable=False) for v in self.trainable_variables]
            self.count = tf.Variable(0, trainable=False)

        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))

            def meet():
                for slow, v in zip(self.slow, self.trainable_variables, strict=True):
                    slow.assign_add(0.5 * (tf.convert_to_tensor(v) - slow))
                    v.assign(slow.read_value())
                return 1.0

            met = tf.cond(tf.equal(self.count.assign_add(1) % period, 0), meet, lambda: 0.0)
            return {"loss": loss, "met": met}

    return Lookahead


@part("step")
def bank(w):
    """A bank of the last outputs, written at a pointer that goes round, and compared with."""

    class Bank(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.bank = tf.Variable(tf.ones([10, CLASSES], tf.float64), trainable=False)
            self.pointer = tf.Variable(0, trainable=False)

        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                found = self(x, training=True)
                near = found @ tf.transpose(self.bank)
                loss = self.compute_loss(x, y, found) + 0.1 * tf.reduce_mean(tf.reduce_logsumexp(near, -1))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            rows = tf.minimum(tf.shape(found)[0], 10)
            where = (self.pointer + tf.range(rows)) % 10
            self.bank.assign(tf.tensor_scatter_nd_update(self.bank, where[:, None], found[:rows]))
            self.pointer.assign((self.pointer + rows) % 10)
            return {"loss": loss, "pointer": tf.identity(self.pointer)}

    return Bank


@part("step")
def unlabelled(w):
    """Rows without labels beside those with labels, of another number."""
    w.beside = lambda rows: 2 * rows + 1

    class Unlabelled(keras.Model):
        def train_step(self, data):
            (x, other), y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                said = tf.nn.softmax(self(other, training=True))
                loss += 0.1 * tf.reduce_mean(tf.reduce_sum(said * said, -1))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    return Unlabelled


@part("step", shuffle=("generator", "stateless"))
def mixed(w, shuffle):
    """Mixup within the step: with rows of another order, by a number drawn for the batch."""
    generator = w.generator() if shuffle == "generator" else None

    class Mixed(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            seed = tf.stack([tf.cast(self.optimizer.iterations, tf.int32), 5])
            if generator is not None:
                part, order = generator.uniform((), dtype=tf.float64), generator.uniform([tf.shape(y)[0]])
            else:
                part = tf.random.stateless_uniform((), seed, dtype=tf.float64)
                order = tf.random.stateless_uniform([tf.shape(y)[0]], seed)
            order = tf.argsort(order, stable=True)
            with tf.GradientTape() as tape:
                found = self(keras.tree.map_structure(lambda a: mix(a, order, part), x), training=True)
                one = losses.sparse_categorical_crossentropy(y, found, from_logits=True)
                other = losses.sparse_categorical_crossentropy(tf.gather(y, order), found, from_logits=True)
                loss = tf.reduce_mean(part * one + (1.0 - part) * other)
            descend(tape, loss, self.trainable_variables)
            return {"loss": loss, "part": part}

    def mix(a, order, part):
        return part * tf.cast(a, part.dtype) + (1.0 - part) * tf.cast(tf.gather(a, order), part.dtype)

    return Mixed


@part("step")
def input_penalty(w):
    """A penalty on the gradient of the outputs by the inputs."""

    class InputPenalty(keras.Model):
        def train_step(self, data):
            x, y = tf.convert_to_tensor(data[0]), data[1]
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    found = self(x, training=True)
                by_x = inner.gradient(found, x)
                norm = tf.sqrt(tf.reduce_sum(tf.square(by_x), list(range(1, len(by_x.shape)))) + 1e-6)
                loss = self.compute_loss(x, y, found) + 0.1 * tf.reduce_mean(tf.square(norm - 1.0))
            descend(outer, loss, self.trainable_variables)
            return {"loss": loss, "norm": tf.reduce_max(norm)}

    return InputPenalty


@part("step", how=("compute_loss", "compute_metrics", "test_step", "jacobian"))
def overridden(w, how):
    """Methods of Keras' that a model overrides."""

    class Overridden(keras.Model):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.seen = keras.metrics.Mean(name="seen")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            if how == "compute_loss":
                self.seen.update_state(ops.max(y_pred, axis=-1))
                loss += 0.1 * ops.mean(ops.logsumexp(y_pred, axis=0))
            if how == "jacobian":
                loss += 0.01 * ops.mean(ops.square(ops.max(y_pred, axis=0) - ops.min(y_pred, axis=0)))
            return loss

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            if how == "compute_metrics":
                self.seen.update_state(ops.std(y_pred))
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "seen": self.seen.result()}

        def test_step(self, data):
            if how != "test_step":
                return super().test_step(data)
            x, y = data[:2]
            found = self(x, training=False)
            return {"most": tf.reduce_max(found), "loss": self.compute_loss(x, y, found)}

    return Overridden


# Losses.


@part("loss")
def cross_entropy(w):
    """Of logits."""
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def one_hot(true, predicted):
    """Classes as vectors."""
    return ops.one_hot(ops.reshape(true, (-1,)), CLASSES, dtype=predicted.dtype)


@part("loss", name=("mse", "mae", "huber", "log_cosh", "cosine_similarity"))
def of_numbers(w, name):
    """A loss of numbers, the classes as one-hot vectors."""
    made = losses.get(name)
    return lambda true, predicted: made(one_hot(true, predicted), predicted)


@part("loss", delta=(0.1, 1.0))
def dialled_huber(w, delta):
    """A loss with a field that may be changed."""

    class Huber(losses.Loss):
        def __init__(self):
            super().__init__()
            self.delta = delta

        def call(self, true, predicted):
            wanted = one_hot(true, predicted)
            return losses.huber(wanted, predicted, delta=self.delta)

    w.own["huber"] = Huber()
    return w.own["huber"]


@part("loss", how=("sum", "contrastive", "ratio"))
def coupled(w, how):
    """A loss that is no mean over rows."""

    def loss(true, predicted):
        wanted = one_hot(true, predicted)
        errors = ops.abs(wanted - predicted)
        if how == "sum":
            return 0.05 * ops.sum(ops.square(errors))
        if how == "ratio":
            weight = wanted + 0.1
            return ops.sum(weight * errors) / ops.sum(weight * (1.0 + ops.abs(predicted)))
        near = predicted @ ops.transpose(predicted)
        return ops.mean(ops.logsumexp(near, axis=-1)) * 0.1 + ops.mean(errors)

    return loss


# Optimizers.


@part("optimizer", momentum=(0.0, 0.9), accumulate=(None, None, 2), clip=({}, {"clipnorm": 0.5}))
def sgd(w, momentum, accumulate, clip):
    """With and without momentum."""
    return keras.optimizers.SGD(0.1, momentum=momentum, gradient_accumulation_steps=accumulate, **clip)


@part("optimizer", clip=({}, {"clipvalue": 0.1}), accumulate=(None, None, 3), ema=(False, False, True))
def adam(w, clip, accumulate, ema):
    """The usual one."""
    if ema:
        clip = {**clip, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate, **clip)


@part("optimizer", name=("AdamW", "RMSprop", "Adagrad", "Nadam", "Lion", "Adafactor", "Ftrl", "Lamb", "Adamax"))
def other(w, name):
    """Another of Keras'."""
    return getattr(keras.optimizers, name)(0.01)


@part("optimizer")
def scheduled(w):
    """A learning rate that follows the steps."""
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5))


@part("optimizer")
def scaled(w):
    """A loss that is scaled."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2)


# What happens, one after another.

ROWS = (8, 8, 8, 6, 7, 1, 2, 11)
LENGTHS = (4, 4, 3, 5, 7, 1)


@part("act", rows=ROWS, length=LENGTHS, times=(1, 2))
def train(w, rows, length, times):
    """`train_on_batch`."""
    for _ in range(times):
        w.keep("train", w.model.train_on_batch(*w.training_batch(rows, length), return_dict=True))


@part("act", how=("train", "test", "predict"))
def lengths(w, how):
    """Batches of ever other lengths: after the third no step is traced anew."""
    for length in (3, 4, 5, 6, 7):
        x, y = w.batch(6, length)
        before = Fn.traced
        if how == "predict":
            w.model.predict_on_batch(x)
        else:
            (w.model.train_on_batch if how == "train" else w.model.test_on_batch)(x, y)
        if length > 5:
            w.keep("traced anew", Fn.traced - before)


@part(
    "act",
    rows=(8, 11, 13, 16),
    batch=(8, 5, 3, 16),
    length=LENGTHS,
    epochs=(1, 2),
    source=("arrays", "arrays", "dataset", "generator", "repeat"),
    weighted=(False, False, True),
    callback=(None, None, None, "write", "epoch", "rate", "stop"),
    how=("assign", "raw_sub", "late", "thread"),
)
def fit(w, rows, batch, length, epochs, source, weighted, callback, how):
    """`fit`, with a callback that may write."""
    x, y = w.batch(rows, length)
    weights = w.rng.random(rows) if weighted else None
    options = {"epochs": epochs, "verbose": 0, "shuffle": False}
    rows_of_all = tf.data.Dataset.from_tensor_slices((x, y) if weights is None else (x, y, weights)).batch(batch)
    if source == "arrays":
        options.update(x=x, y=y, sample_weight=weights, batch_size=batch)
    elif source == "generator":
        parts = list(rows_of_all)
        options.update(x=(one for _ in range(epochs) for one in parts), steps_per_epoch=len(parts))
    elif source == "repeat":
        options.update(x=rows_of_all.repeat(), steps_per_epoch=2)
    else:
        options.update(x=rows_of_all)

    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, number, logs=None):
            if callback == "write":
                write_variable(w, "weight", how)
            if callback == "stop" and number == 1:
                self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            if callback == "epoch":
                write_variable(w, "weight", how)
            if callback == "rate" and hasattr(self.model.optimizer.learning_rate, "value"):
                self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.5)

    w.keep("fit", w.model.fit(**options, callbacks=[Writes()] if callback else None).history)


@part("act", rows=ROWS, batch=(3, 8, 5), length=LENGTHS)
def evaluate(w, rows, batch, length):
    """`evaluate` in batches."""
    x, y = w.batch(rows, length)
    rows_of_all = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    w.keep("evaluate", w.model.evaluate(rows_of_all, verbose=0, return_dict=True))


@part("act", rows=ROWS, batch=(3, 8, 5), length=LENGTHS)
def predict(w, rows, batch, length):
    """`predict` in batches."""
    x, _ = w.batch(rows, length)
    w.keep("predict", w.model.predict(tf.data.Dataset.from_tensor_slices(x).batch(batch), verbose=0))


@part("act", rows=ROWS, length=LENGTHS, train=(False, True))
def on_batch(w, rows, length, train):
    """`test_on_batch` and `predict_on_batch`."""
    x, y = w.batch(rows, length)
    w.keep("test_on_batch", w.model.test_on_batch(x, y, return_dict=True))
    w.keep("predict_on_batch", w.model.predict_on_batch(x))


@part("act", rows=ROWS, length=LENGTHS)
def own_loop(w, rows, length):
    """`Towers.run` of a step of the user's; on one device a `tf.function`, traced for any number of rows, too."""
    if w.step is None:
        model = w.model

        def step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                each = losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
                loss = tf.reduce_mean(each)
            gradients = tape.gradient(loss, model.trainable_variables)
            for v, g in zip(model.trainable_variables, gradients, strict=True):
                if g is not None:
                    v.assign_sub(0.05 * tf.convert_to_tensor(g))
            return loss

        towers = getattr(model, "towers", None)
        traced = tf.function(step, reduce_retracing=True)

        def run_traced(batch):
            traced.get_concrete_function(open_specs(fixed_specs(batch)))
            return traced(batch)

        on_one_device = step if w.eagerly else run_traced
        w.step = on_one_device if towers is None else lambda batch: towers.run(step, batch)
    batch = w.batch(rows, length)
    w.keep("own_loop", w.step(keras.tree.map_structure(as_tensor, batch)))


def as_tensor(one):
    """A tensor, sparse and ragged ones as they are."""
    return one if isinstance(one, (tf.SparseTensor, tf.RaggedTensor)) else tf.convert_to_tensor(one)


HOWS = (
    "assign", "assign_add", "numpy", "raw_assign", "raw_sub", "raw_scatter", "raw_apply", "slice", "early", "late",
    "map", "early_map", "thread", "python", "restore", "strategy",
)  # fmt: skip


def write_variable(w, target, how):
    """Write a variable in one of many ways: times 0.9 plus 0.02, or plus 3 if it counts."""
    v = w.target(target)
    if v is None:
        return
    floating = v.dtype.is_floating

    def changed(value):
        return value * 0.9 + tf.cast(0.02, value.dtype) if floating else value + tf.cast(3, value.dtype)

    value = tf.identity(v.read_value())
    wanted = changed(value)
    if how in ("assign", "late_inline"):
        v.assign(wanted)
    elif how == "assign_add":
        v.assign_add(wanted - value)
    elif how == "numpy":
        v.assign(wanted.numpy())
    elif how == "raw_assign":
        tf.raw_ops.AssignVariableOp(resource=v.handle, value=wanted)
    elif how == "raw_sub":
        tf.raw_ops.AssignSubVariableOp(resource=v.handle, value=value - wanted)
    elif how == "raw_scatter" and value.shape.rank:
        tf.raw_ops.ResourceScatterUpdate(resource=v.handle, indices=[0], updates=wanted[:1])
    elif how == "raw_apply" and floating:
        tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=tf.ones([], v.dtype), delta=value - wanted)
    elif how == "slice" and value.shape.rank:
        tf.raw_ops.ResourceStridedSliceAssign(ref=v.handle, begin=[0], end=[1], strides=[1], value=wanted[:1])
    elif how == "early" and target in w.early:
        w.early[target]()
    elif how == "early_map" and target in w.early:
        list(w.early[f"dataset of {target}"])
    elif how == "map":

        def add(one):
            v.assign(changed(v.read_value()))
            return one

        list(tf.data.Dataset.range(1).map(add))
    elif how == "thread":
        thread = threading.Thread(target=lambda: v.assign(wanted))
        thread.start()
        thread.join()
    elif how == "python":
        tf.function(lambda: tf.numpy_function(lambda: v.assign(wanted).numpy(), [], v.dtype))()
    elif how == "restore":
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = tf.train.Checkpoint(v=v)
            path = checkpoint.write(f"{folder}/c")
            v.assign(wanted)
            checkpoint.read(path)
            v.assign_add(wanted - value)
    else:
        tf.function(lambda: v.assign(changed(v.read_value())))()


@part("act", target=("weight", "bias", "state", "seed", "rate", "iterations", "slot", "metric", "own", "own"), how=HOWS)
def write(w, target, how):
    """A write between steps."""
    write_variable(w, target, how)


@part("act", how=("normal", "skip", "make_seeds", "split", "reset", "map", "early"))
def draw(w, how):
    """A generator that is also used between steps."""
    generator = w.own.get("generator")
    if generator is None:
        return
    if how == "skip":
        generator.skip(3)
    elif how == "reset":
        generator.reset_from_seed(11)
    elif how == "map":
        w.keep("drawn", list(tf.data.Dataset.range(2).map(lambda _: generator.normal([2]))))
    elif how == "split":
        w.keep("drawn", generator.split(1)[0].normal([2]))
    elif how == "early":
        w.keep("drawn", w.early["draw"]())
    else:
        w.keep("drawn", generator.normal([2]) if how == "normal" else generator.make_seeds(1))


@part("act", what=("factor", "shift", "global", "delta", "clipvalue", "momentum", "trainable", "compile"))
def change(w, what):
    """A change of Python's values, which Keras sees when it traces anew."""
    dialled = w.own.get("dialled")
    if what == "factor" and dialled is not None:
        dialled._factor = dialled._factor * 1.5
    elif what == "shift" and dialled is not None:
        dialled.shift = dialled.shift + 0.3
    elif what == "global":
        w.dials["global"] *= 0.7
    elif what == "delta" and "huber" in w.own:
        w.own["huber"].delta *= 0.3
    elif what == "clipvalue":
        w.model.optimizer.clipvalue = 0.01
    elif what == "momentum" and getattr(w.model.optimizer, "momentum", 0.0):
        w.model.optimizer.momentum = 0.5
    elif what == "trainable":
        w.model.layers[-1].trainable = not w.model.layers[-1].trainable
        w.compile()
    elif what == "compile":
        w.compile()


@part("act", how=("weights", "model", "set_weights", "get"))
def files(w, how):
    """Saves and loads."""
    with tempfile.TemporaryDirectory() as folder:
        if how == "weights":
            w.model.save_weights(f"{folder}/a.weights.h5")
            write_variable(w, "weight", "assign")
            w.model.load_weights(f"{folder}/a.weights.h5")
        elif how == "set_weights":
            w.model.set_weights([one * 0.95 if one.dtype.kind == "f" else one for one in w.model.get_weights()])
        else:
            w.keep("weights", w.model.get_weights())


@part("act", what=("find", "insert", "clear"))
def use_table(w, what):
    """Uses the step's table between steps."""
    made = w.own.get("table")
    if made is None:
        return
    keys = tf.range(WIDTH, dtype=tf.int64)
    if what == "insert":
        made.insert(keys[:2], tf.constant([0.9, -0.4], tf.float64))
    elif what == "clear":
        made.remove(keys[1:3])
    w.keep("table", made.lookup(keys))


@part("act", rows=(6,), what=("loss", "raise"))
def fails(w, rows, what):
    """A step that fails in its data, and is caught; the state goes on from where it was."""
    before = [np.asarray(v) for v in [*w.model.variables, *w.model.optimizer.variables]]
    with contextlib.suppress(Exception):
        w.model.train_on_batch(np.zeros((rows, 77)), np.zeros(rows))
        raise AssertionError("a batch of a wrong shape trains")
    for v, value in zip([*w.model.variables, *w.model.optimizer.variables], before, strict=True):
        if what == "raise":
            v.assign(value)


@part("act", rows=(8, 7), what=("rate", "predict", "reset", "weight", "evaluate"))
def race(w, rows, what):
    """A thread works beside `fit`: nothing fails, and the towers stay equal. The numbers depend on the moment."""
    w.plain = False
    x, y = w.batch(rows, 4)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            try:
                if what == "rate" and hasattr(w.model.optimizer.learning_rate, "assign"):
                    w.model.optimizer.learning_rate.assign(0.01)
                elif what == "predict":
                    w.model.predict(x, verbose=0)
                elif what == "reset":
                    for metric in w.model.metrics:
                        metric.reset_state()
                elif what == "evaluate":
                    w.model.evaluate(x, y, verbose=0)
                else:
                    write_variable(w, "weight", "assign")
            except Exception as error:  # of any type: told by the comparison
                w.errors.append(f"{what} beside fit: {type(error).__name__}: {error}")
                return
            stop.wait(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    writes = lambda batch, logs=None: write_variable(w, "bias", "assign")  # noqa: E731
    rewrite = keras.callbacks.LambdaCallback(on_train_batch_end=writes)
    try:
        w.model.fit(x, y, batch_size=rows // 2, epochs=25, shuffle=False, verbose=0, callbacks=[rewrite])
    finally:
        stop.set()
        thread.join()
