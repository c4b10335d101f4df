"""Small programs whose rows pass ops that hide them: lists, texts, Python, masks, numbers of rows, maxima.

Each is (makers of layers, batch, loss): `tests/costs` counts what its step needs of other towers' rows, `tests/parity`
trains it in float64 beside one device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

RNG = np.random.default_rng(7)
COUNT, TIME, WIDTH, CLASSES = 22, 6, 8, 3
WORDS = ["red", "green", "blue", "sea", "sky"]


class Program(NamedTuple):
    """Hold a program: what makes its layers, its batch, and its loss of both."""

    makers: tuple[Callable[[], Any], ...]
    batch: tuple[np.ndarray, ...]
    loss: Callable[..., tf.Tensor]

    def make(self) -> Callable[[Any], tf.Tensor]:
        """Return a step that trains, with `parts`, its layers."""
        keras.utils.set_random_seed(3)
        parts, optimizer = [one() for one in self.makers], keras.optimizers.SGD(0.1)

        def step(batch):
            with tf.GradientTape() as tape:
                value = self.loss(batch, *parts)
            variables = [variable for part in parts for variable in part.trainable_variables]
            optimizer.apply(tape.gradient(value, variables), variables)
            return value

        step.parts = parts
        return step


def floats(*shape):
    return RNG.normal(size=(COUNT, *shape))


def integers(high, *shape, low=0):
    return RNG.integers(low, high, (COUNT, *shape)).astype("int32")


def dense(units=WIDTH):
    return lambda: layers.Dense(units, dtype="float64")


def layer(cls, *arguments, **options):
    return lambda: cls(*arguments, dtype="float64", **options)


def words(**options):
    vocabulary = {"vocabulary": WORDS} | ({"idf_weights": np.arange(1.0, 6.0)} if "tf" in str(options) else {})
    return lambda: layers.TextVectorization(**vocabulary, **options)


def mean(x):
    return tf.reduce_mean(tf.square(x))


def entropy(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


FEW_FLOATS = floats(WIDTH) * (RNG.random((COUNT, WIDTH)) < 0.3)
FEW_FLOATS[-1, 0] = -1.0
TEXTS = np.array([[" ".join(RNG.choice(WORDS, RNG.integers(0, 9)))] for _ in range(COUNT)], object)
LABELS, PAIR, SERIES, WIDE = (
    integers(CLASSES),
    (floats(TIME, WIDTH), floats(TIME, WIDTH)),
    floats(TIME, WIDTH),
    floats(WIDTH),
)
COLUMNS = integers(TIME, 4)
CROSSING = integers(2 * TIME, 4)  # some leave their row, and so their tower
CROSSING[-1] %= TIME
BELOW = integers(2 * TIME, TIME, low=-3)
BELOW[-1] %= TIME
DROPPED = integers(TIME, TIME)
DROPPED[3], DROPPED[0] = -1000, -1
EMBEDDED, OF_CLASSES = layer(layers.Embedding, 50, WIDTH), dense(CLASSES)
PROGRAMS: dict[str, Program] = {}


def program(batch, *makers):
    """Enter a loss as a program, by its name."""

    def enter(loss):
        batches = batch if isinstance(batch, tuple) else (batch,)
        PROGRAMS[loss.__name__.replace("_", " ").strip()] = Program(makers, batches, loss)
        return loss

    return enter


# Two batches in one.


@program(PAIR, layer(layers.GRU, WIDTH))
def two_batches_by_GRU(batch, gru):
    one, two = tf.split(gru(tf.concat(batch, 0)), 2)
    return -tf.reduce_mean(tf.math.log_sigmoid(tf.reduce_sum(one - two, -1)))


@program(PAIR, layer(layers.LSTM, WIDTH))
def two_batches_by_LSTM(batch, lstm):
    made = lstm(tf.concat(batch, 0))
    count = tf.shape(made)[0] // 2
    return mean(made[:count] - made[count:])


@program(
    (SERIES, integers(5, TIME)), layer(layers.Embedding, 9, WIDTH), layer(layers.GRU, WIDTH, return_sequences=True)
)
def two_batches_with_a_mask(batch, embedding, gru):
    tokens = tf.concat([batch[1], batch[1] + 1], 0)
    one, two = tf.split(gru(embedding(tokens), mask=tokens > 0), 2)
    return entropy(one, batch[1]) + mean(two)


# Texts.


def of_texts(name, *makers):
    @program((TEXTS, LABELS), *makers, EMBEDDED, OF_CLASSES)
    def loss(batch, texts, embedding, classes):
        return entropy(classes(tf.reduce_mean(embedding(texts(batch[0])), 1)), batch[1])

    PROGRAMS[name] = PROGRAMS.pop("loss")


def of_counts(name, **options):
    @program((TEXTS, LABELS), words(**options), OF_CLASSES)
    def loss(batch, texts, classes):
        return entropy(classes(tf.cast(texts(batch[0]), tf.float64)), batch[1])

    PROGRAMS[name] = PROGRAMS.pop("loss")


of_texts("texts", words(output_mode="int"))
of_texts("texts of a length", words(output_mode="int", output_sequence_length=5))
of_texts("texts by n-grams", words(output_mode="int", ngrams=2, output_sequence_length=6))
of_texts("texts by characters", words(output_mode="int", split="character"))
of_counts("texts multi-hot", output_mode="multi_hot")
of_counts("texts counted", output_mode="count")
of_counts("texts by tf-idf", output_mode="tf_idf")


@program((TEXTS, LABELS), words(output_mode="int", ragged=True), OF_CLASSES)
def texts_ragged(batch, texts, classes):
    values = tf.cast(texts(batch[0]), tf.float64)
    return entropy(classes(tf.reduce_sum(values, 1)[:, None]), batch[1])


@program((TEXTS[:, 0], LABELS), EMBEDDED, OF_CLASSES)
def texts_by_code_points(batch, embedding, classes):
    points = tf.strings.unicode_decode(batch[0], "UTF-8").to_tensor(0)
    return entropy(classes(tf.reduce_sum(embedding(points % 50), 1)), batch[1])


# Ragged tensors that a step makes of rows.

LENGTHS = integers(TIME + 2, low=-1)  # some exceed what there is


@program((SERIES, LENGTHS, LABELS), dense(), OF_CLASSES)
def ragged_by_lengths(batch, first, classes):
    made = tf.RaggedTensor.from_tensor(first(batch[0]), lengths=batch[1])
    return entropy(classes(tf.reduce_sum(tf.exp(made), 1) / (1.0 + tf.reduce_sum(made, 1) ** 2)), batch[2])


@program((SERIES, abs(LENGTHS)), dense())
def lengths_up_to_two_limits(batch, first):
    """Of the same lengths: so many values each, which never meet."""
    made = first(batch[0])
    short = tf.boolean_mask(made[:, :3], tf.sequence_mask(batch[1], 3))
    long = tf.boolean_mask(made, tf.sequence_mask(batch[1], TIME))
    weights = tf.numpy_function(np.abs, [short], tf.float64)
    weights.set_shape([None, WIDTH])
    return mean(long) + mean(short * weights)


@program((integers(4, TIME), LABELS), EMBEDDED, OF_CLASSES)
def ragged_by_padding(batch, embedding, classes):
    made = tf.RaggedTensor.from_tensor(batch[0], padding=0)
    return entropy(classes(tf.reduce_mean(made.with_values(embedding(made.values)), 1)), batch[1])


@program((SERIES, LABELS), dense(), OF_CLASSES)
def ragged_by_a_mask(batch, first, classes):
    made = first(batch[0])
    return entropy(classes(tf.reduce_sum(tf.ragged.boolean_mask(made, made[:, :, 0] > 0), 1)), batch[1])


@program((integers(9, 4), integers(9, 5), FEW_FLOATS, LABELS), dense(), OF_CLASSES)
def sets_of_each_row(batch, first, classes):
    sets = tf.sets.intersection(batch[0], batch[1]), tf.sets.difference(batch[0], batch[1])
    most = tf.sparse.reduce_max(tf.sparse.from_dense(batch[2]), 1)
    found = [tf.cast(one, tf.float64) for one in (*map(tf.sets.size, sets), most)]
    sizes = tf.stack([tf.ensure_shape(one, [None]) for one in found], 1)
    return entropy(classes(first(batch[2]) * tf.reduce_sum(sizes, 1, keepdims=True)), batch[3])


@program((TEXTS, LABELS), EMBEDDED, OF_CLASSES)
def texts_put_together(batch, embedding, classes):
    """Of their characters, and crossed with themselves."""
    characters = tf.strings.unicode_decode(batch[0][:, 0], "UTF-8")
    again = tf.strings.unicode_encode(characters + 1, "UTF-8")[:, None]
    crossed = tf.sparse.to_dense(tf.sparse.cross([batch[0], again]), "")
    hashed = tf.sparse.to_dense(tf.sparse.cross_hashed([batch[0], again], 50))
    ids = tf.concat([tf.strings.to_hash_bucket_fast(crossed, 50), hashed], 1)
    return entropy(classes(tf.reduce_mean(embedding(ids), 1)), batch[1])


# Rows that come back.


@program((WIDE, LABELS), dense(), OF_CLASSES)
def numpy_function(batch, first, classes):
    made = tf.numpy_function(np.tanh, [batch[0]], tf.float64)
    made.set_shape([None, WIDTH])
    return entropy(classes(tf.nn.relu(first(made))), batch[1])


@program((WIDE, LABELS), dense(), OF_CLASSES)
def py_function(batch, first, classes):
    made = tf.ensure_shape(tf.py_function(tf.tanh, [batch[0]], tf.float64), [None, WIDTH])
    return entropy(classes(tf.nn.relu(first(made))), batch[1])


@program((WIDE, LABELS), dense(), OF_CLASSES)
def literal_reshape(batch, first, classes):
    made = tf.reshape(tf.reshape(batch[0], [COUNT, 2, WIDTH // 2]), [COUNT, WIDTH])
    return entropy(classes(tf.nn.relu(first(made))), batch[1])


@program((WIDE, LABELS), dense(), OF_CLASSES)
def mask_and_scatter(batch, first, classes):
    made = first(batch[0])
    mask = made[:, 0] > 0
    part = tf.nn.relu(tf.boolean_mask(made, mask))
    return entropy(classes(tf.scatter_nd(tf.where(mask), part, tf.shape(made, tf.int64))), batch[1])


FEW = integers(50, TIME)
FEW[FEW % 3 == 0] = 0
FEW[-1, 0] = 7  # the last row has some: else one device fails


@program((FEW, SERIES, LABELS), EMBEDDED, OF_CLASSES)
def bags_with_weights(batch, embedding, classes):
    places = tf.where(batch[0] > 0)
    ids, weights = (tf.gather_nd(one, places) for one in (tf.cast(batch[0], tf.int64), batch[1][:, :, 0]))
    shape = tf.shape(batch[0], tf.int64)
    both = (tf.SparseTensor(places, one, shape) for one in (ids, tf.exp(weights)))
    embedding(batch[0])  # makes the table
    made = tf.nn.embedding_lookup_sparse(tf.convert_to_tensor(embedding.embeddings), *both, combiner="mean")
    return entropy(classes(made), batch[2])


@program((SERIES, abs(LENGTHS), integers(CLASSES, TIME)), dense(CLASSES))
def mean_of_a_mask(batch, classes):
    mask = tf.sequence_mask(batch[1], TIME)
    made = classes(tf.boolean_mask(batch[0], mask))
    return entropy(made, tf.boolean_mask(batch[2], mask)) + tf.reduce_mean(tf.math.reduce_variance(made, 0))


# Numbers of rows.


@program(SERIES, dense(12))
def top_k(batch, first):
    return mean(tf.math.top_k(first(batch[0]), 3).values)


@program((SERIES, integers(WIDTH, TIME, 2)), dense())
def gather_with_batch_dims(batch, first):
    return mean(tf.gather(first(batch[0]), batch[1], batch_dims=2))


@program((floats(3, TIME, WIDTH), integers(TIME, 3, 2, 1)), dense())
def gather_nd_with_batch_dims(batch, first):
    return mean(tf.gather_nd(first(batch[0]), batch[1], batch_dims=2))


@program((SERIES, LABELS), dense(), OF_CLASSES)
def pairs_by_gather_nd(batch, first, classes):
    made = first(batch[0])
    products = tf.transpose(made @ tf.transpose(made, [0, 2, 1]), [1, 2, 0])
    pairs = tf.gather_nd(products, np.stack(np.tril_indices(TIME, -1), -1))
    return entropy(classes(tf.transpose(pairs)), batch[1])


@program((SERIES, COLUMNS), dense())
def meshgrid(batch, first):
    made = first(batch[0])
    rows, _ = tf.meshgrid(tf.range(tf.shape(made)[0]), tf.range(4), indexing="ij")
    return mean(tf.gather_nd(made, tf.stack([rows, batch[1]], -1)))


@program((SERIES, COLUMNS), dense())
def rows_times_ones(batch, first):
    made = first(batch[0])
    rows = tf.range(tf.shape(made)[0])[:, None] * tf.ones_like(batch[1])
    return mean(tf.gather_nd(made, tf.stack([rows, batch[1]], -1)))


@program(SERIES, dense())
def rows_in_vectors(batch, first):
    """As CTC's labels, of which each may follow another one."""
    made, columns = first(batch[0]), tf.range(3)
    rows = tf.shape(made)[0]
    places = tf.tile(tf.stack([tf.zeros_like(columns), columns, columns + 1], 1)[None], [rows, 1, 1])
    places += (tf.range(rows)[:, None] * [1, 0, 0])[:, None]
    return mean(tf.scatter_nd(places, made[:, :3, 0], [rows, 4, 5]))


def flat(columns, made):
    return columns + tf.range(tf.shape(made)[0])[:, None] * tf.shape(made)[1]


def gathered(batch, first):
    made = first(batch[0])
    return mean(tf.gather(tf.reshape(made, [-1, WIDTH]), flat(batch[1], made)))


def added(batch, first, segments=tf.math.unsorted_segment_sum):
    made = first(batch[0])
    count = tf.size(made) // WIDTH
    return mean(segments(tf.reshape(made, [-1, WIDTH]), tf.reshape(flat(batch[1], made), [-1]), count))


def greatest(batch, first):
    return tf.tanh(added(batch, first, lambda *of: tf.minimum(tf.math.unsorted_segment_max(*of), 9)) / 100)


PROGRAMS["flat indices"] = Program((dense(),), (SERIES, COLUMNS), gathered)
PROGRAMS["flat indices of other rows"] = Program((dense(),), (SERIES, CROSSING), gathered)
PROGRAMS["flat segments"] = Program((dense(),), (SERIES, integers(TIME, TIME)), added)
PROGRAMS["flat segments of other rows"] = Program((dense(),), (SERIES, BELOW), added)
PROGRAMS["flat segments, some dropped"] = Program((dense(),), (SERIES, DROPPED), added)
PROGRAMS["flat segments' maxima in other rows"] = Program((dense(),), (SERIES, abs(BELOW)), greatest)


@program(SERIES, dense(), dense())
def nearest_points(batch, first, second):
    made = first(batch[0])
    distances = tf.reduce_sum((made[:, :, None] - made[:, None]) ** 2, -1)
    places = tf.math.top_k(-distances, 3).indices + tf.range(tf.shape(made)[0])[:, None, None] * TIME
    near = tf.gather(tf.reshape(made, [-1, WIDTH]), places)
    return mean(tf.reduce_max(second(near - made[:, :, None]), 2))


# Ops that work on each row, and that no layer has.


@program((WIDE, floats(6, 6, 1), LABELS), dense(), OF_CLASSES)
def glimpses_in_few_bits(batch, first, classes):
    made = first(batch[0])
    offsets, pictures = (tf.cast(one, tf.float32) for one in (made[:, :2], batch[1]))
    seen = tf.reshape(tf.image.extract_glimpse(pictures, [2, 2], offsets, noise="zero"), [-1, 4])
    few = tf.quantization.dequantize(*tf.quantization.quantize(seen, -2.0, 2.0, tf.quint8))
    nearest, _ = tf.raw_ops.NearestNeighbors(points=few, centers=tf.eye(4), k=tf.constant(1, tf.int64))
    nearest = tf.ensure_shape(nearest, [None, 1])  # TensorFlow infers no shape of either
    places = tf.ensure_shape(tf.unravel_index(nearest[:, 0], [2, 2]), [2, None])
    places = tf.cast(tf.transpose(places), tf.float64)
    return entropy(classes(made * places[:, :1] + places[:, 1:]), batch[2])


@program((WIDE, LABELS), dense(16), OF_CLASSES)
def pooled_by_fractions(batch, first, classes):
    made = tf.reshape(first(batch[0]), [-1, 4, 4, 1])
    pooled, _, _ = tf.nn.fractional_max_pool(made, [1, 1.4, 1.4, 1], seed=3)
    low, high = (tf.constant(one, tf.float64) for one in (-1, 1))
    few = tf.quantization.quantize_and_dequantize_v2(pooled, low, high, range_given=True)
    return entropy(classes(tf.reshape(few, [-1, 4])), batch[1])


# Loops and branches.


@program(WIDE, dense())
def a_list_that_grows(batch, first):
    state = first(batch[0])
    made = tf.TensorArray(tf.float64, size=0, dynamic_size=True)
    _, _, made = tf.while_loop(
        lambda i, *_: i < 4,
        lambda i, state, made: (i + 1, tf.tanh(state), made.write(i, tf.tanh(state))),
        [tf.constant(0), state, made],
    )
    return mean(tf.transpose(made.stack(), [1, 0, 2]))


@program((WIDE, integers(6)), dense())
def a_loop_up_to_a_maximum(batch, first):
    most = tf.reduce_max(batch[1])
    _, made = tf.while_loop(lambda i, _: i < most, lambda i, x: (i + 1, tf.tanh(x) + 0.1), [0, first(batch[0])])
    return mean(made)


@program((SERIES, WIDE), dense())
def map_fn_within_map_fn(batch, first):
    made = tf.map_fn(lambda row: tf.map_fn(lambda one: tf.tanh(first(one[None])[0]), row), batch[0])
    return mean(tf.reduce_sum(made, 1) - batch[1])


@program(SERIES, dense())
def scan_within_map_fn(batch, first):
    """Each row's state after each of its steps, and how it came about."""
    made = tf.map_fn(lambda row: tf.scan(lambda state, one: tf.tanh(state + one) * state, row), first(batch[0]))
    return mean(made[:, -1]) + mean(tf.reduce_max(made, 1))


@program((WIDE, integers(6)), dense())
def each_row_until_its_end(batch, first):
    def until(given):
        row, count = given
        return tf.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, tf.tanh(x) + 0.1), [0, row])[1]

    return mean(tf.map_fn(until, (first(batch[0]), batch[1]), fn_output_signature=tf.float64))


@program(WIDE, dense())
def a_branch_by_a_maximum(batch, first):
    made = first(batch[0])
    most = tf.reduce_max(tf.abs(made))
    return mean(tf.cond(most > 1, lambda: made / most * tf.tanh(made), lambda: made))


@program(floats(4, 4), dense(16))
def matrix_exponential(batch, first):
    made = tf.reshape(first(tf.reshape(batch[0], [-1, 16])), [-1, 4, 4])
    return mean(tf.linalg.expm(made * 0.3))


# Gradients of gradients, and forward ones; functions that are called.


@program(SERIES, dense(), dense())
def marginals_of_a_chain(batch, first, second):
    scores = first(batch[0])
    with tf.GradientTape() as tape:
        tape.watch(scores)
        after = tf.scan(
            lambda a, one: tf.reduce_logsumexp(a[:, :, None] + 0.1, 1) + one, tf.transpose(scores, [1, 0, 2])
        )
        total = tf.reduce_logsumexp(after[-1], -1)
    return mean(second(tape.gradient(total, scores)))


@program(WIDE, dense(), dense())
def descent_in_a_loop(batch, first, second):
    def body(i, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = tf.reduce_sum(tf.tanh(first(x)), -1)
        return i + 1, x - 0.1 * tape.gradient(energy, x)

    return mean(second(tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0), batch[0]])[1]))


def penalty(batch, network, last):
    """How far each row's slope is from 1, as a Wasserstein critic has it."""
    with tf.GradientTape() as tape:
        tape.watch(batch[0])
        made = last(network(batch[0]))
    slopes = tape.gradient(made, batch[0])
    return mean(tf.sqrt(tf.reduce_sum(slopes**2, [1, 2]) + 1e-6) - 1) + mean(made)


PROGRAMS["penalty of a SimpleRNN"] = Program((layer(layers.SimpleRNN, WIDTH), dense(1)), (SERIES,), penalty)
PROGRAMS["penalty of a GRU"] = Program((layer(layers.GRU, WIDTH), dense(1)), (SERIES,), penalty)
PROGRAMS["penalty of an LSTM"] = Program((layer(layers.LSTM, WIDTH), dense(1)), (SERIES,), penalty)


@program(SERIES, dense(), dense())
def forward_gradient(batch, first, second):
    with tf.autodiff.ForwardAccumulator(batch[0], tf.ones_like(batch[0])) as forward:
        made = tf.nn.gelu(first(batch[0]))
        made = tf.nn.softmax(tf.matmul(made, second(made), transpose_b=True)) @ batch[0]
    return mean(forward.jvp(made))


@program(WIDE, dense(), dense())
def forward_over_reverse(batch, first, second):
    with tf.autodiff.ForwardAccumulator(batch[0], tf.ones_like(batch[0])) as forward:
        with tf.GradientTape() as tape:
            tape.watch(batch[0])
            made = tf.reduce_sum(tf.tanh(second(tf.tanh(first(batch[0])))), -1)
        slope = tape.gradient(made, batch[0])
    return mean(forward.jvp(slope))


@program((WIDE, LABELS), dense(), OF_CLASSES)
def called(batch, first, classes):
    @tf.function
    def loss(x, labels):
        made = first(x)
        made = (made - tf.reduce_mean(made, 0)) * tf.reduce_max(made, 0)
        return entropy(classes(made / (1.0 + tf.abs(made[:, :1]))), labels)

    return loss(*batch)


# Ops without a gradient.


@program((floats(5, 4), floats(5, 3)), dense(3))
def boxes(batch, first):
    scores = tf.nn.sigmoid(first(batch[1]))
    given = tf.cast(tf.abs(batch[0][:, :, None]), tf.float32)
    kept = tf.image.combined_non_max_suppression(given, tf.cast(scores, tf.float32), 3, 5, clip_boxes=False)
    return tf.reduce_mean(scores) * tf.cast(tf.reduce_mean(tf.cast(kept.valid_detections, tf.float32)), tf.float64)


@program((WIDE, floats(3)), dense(5))
def sorted_places(batch, first):
    made = tf.sort(first(batch[0]), -1)
    places = tf.searchsorted(made, batch[1], side="right")
    return mean(tf.gather(tf.pad(made, [[0, 0], [0, 1]]), places, batch_dims=1))


# Weights that each turn of a loop computes anew: there their gradients' parts cannot be added up.


class Weights(layers.Layer):
    """Hold a weight, `of`."""

    def __init__(self, *shape):
        super().__init__(dtype="float64")
        self.of = self.add_weight(shape=shape, initializer=keras.initializers.RandomNormal(stddev=0.5, seed=len(shape)))


def each_turn(*shapes):
    """Enter what makes a matrix of weights as a program: a recurrent network that multiplies its state by it."""

    def enter(change):
        def loss(batch, *parts):
            state = tf.zeros([tf.shape(batch[0])[0], WIDTH], tf.float64)
            for time in tf.range(TIME):
                made = change(*(part.of for part in parts))
                state = tf.ensure_shape(tf.tanh(batch[0][:, time] + state @ made), [None, WIDTH])
            return mean(state)

        loss.__name__ = f"each_turn_{change.__name__}"
        program(SERIES, *(lambda shape=shape: Weights(*shape) for shape in shapes))(loss)
        return change

    return enter


@each_turn((WIDTH, 3), (3, WIDTH))
def similar_nodes(one, other):
    return tf.nn.softmax(tf.nn.relu(one @ other))


@each_turn((20, WIDTH))
def rows_of_a_table(table):
    return tf.gather(table, [1, 5, 7, 2, 0, 3, 9, 11]) + tf.gather_nd(table, [[i] for i in range(WIDTH)])


@each_turn((WIDTH, WIDTH))
def orthogonal(free):
    skew, one = free - tf.transpose(free), tf.eye(WIDTH, dtype=free.dtype)
    return tf.linalg.solve(one + skew, one - skew)


@each_turn((WIDTH, WIDTH), (WIDTH,))
def pruned_and_normalised(free, bias):
    kept = tf.linalg.band_part(tf.where(tf.abs(free) > 0.1, free, tf.zeros_like(free)), -1, 2)
    mean_of, variance = tf.nn.moments(kept, [0])
    return tf.maximum(tf.nn.bias_add((kept - mean_of) * tf.math.rsqrt(variance + 0.1), bias), -0.5)


@each_turn((3, WIDTH, WIDTH), (3,))
def mixed_of_bases(bases, logits):
    return tf.einsum("k,kij->ij", tf.nn.softmax(logits), bases)


@each_turn((WIDTH, WIDTH))
def of_spectral_norm(free):
    right = tf.nn.l2_normalize(tf.reduce_sum(free, 0, keepdims=True))
    left = tf.nn.l2_normalize(right @ tf.transpose(free))
    return free / tf.reduce_sum(left @ free * right)


@each_turn((WIDTH, WIDTH))
def circulant(free):
    spectrum = tf.signal.rfft(free[:1]) * tf.signal.rfft(tf.eye(WIDTH, dtype=free.dtype))
    return tf.signal.irfft(spectrum, [WIDTH]) + tf.cumsum(tf.sort(free, 1))


@each_turn((3, 3, 1, 1))
def convolved(kernel):
    return tf.nn.conv2d(tf.eye(WIDTH, dtype=kernel.dtype)[None, :, :, None], tf.sinh(kernel), 1, "SAME")[0, ..., 0]
