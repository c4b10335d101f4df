"""What an axis counts, from shape inference for batches of several sizes; and loops that take a batch's rows apart."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close

import ncclsync
from ncclsync.semantics.axes import Axes, Kernels, Rows, given_rows, length_of
from ncclsync.semantics.functions import LOOPS, Functions

ROWS, TOWERS = 7, 3
X = np.random.default_rng(0).normal(size=(ROWS, 4, 3))


def axes_of(function, *specs):
    """Return the axes of a function's graph, whose arguments with an open first axis have rows, and the graph."""
    graph = tf.function(function, input_signature=specs, autograph=False).get_concrete_function().graph
    functions = Functions(graph.as_graph_def().library.function, graph)
    return Axes(functions, {t.name: given_rows(t) for t in graph.inputs if t.shape.rank}), graph


def results_of(function, *specs):
    axes, graph = axes_of(function, *specs)
    return [axes.lengths(tensor) for tensor in graph.outputs]


@pytest.mark.parametrize(
    "lengths", [(1, 840, 1), (3, 2520, 3), (13, 10920, 17), (5, 5, 5), (1, 64, 1), (0, 839, 0), (1, 840**2, 1)]
)
def test_a_length_is_a_constant_or_counts_rows_or_is_open(lengths):
    """For batches of 1 and of 840 rows: proportional to them, or the same, or neither."""
    expected = {(1, 840, 1): Rows(1), (3, 2520, 3): Rows(3), (13, 10920, 17): Rows(0), (5, 5, 5): 5}
    assert length_of(lengths) == expected.get(lengths)


@pytest.mark.parametrize("shape", [(None, 3), (None, 7, 3), (None, None, 3)])
def test_a_softmax_cross_entropy_has_its_width(shape):
    """Its logits and labels are reshaped to what is computed of a shape with open lengths."""
    spec = tf.TensorSpec(shape)
    axes, graph = axes_of(tf.nn.softmax_cross_entropy_with_logits, spec, spec)
    (op,) = (op for op in graph.get_operations() if op.type == "SoftmaxCrossEntropyWithLogits")
    rows = Rows({(None, 3): 1, (None, 7, 3): 7}.get(shape, 0))
    assert [axes.lengths(one) for one in (*op.inputs, op.outputs[1])] == [(rows, 3)] * 3
    axes.refine(op.outputs[1])
    assert op.outputs[1].shape.as_list() == [None, 3]


def test_lengths_that_only_large_batches_have_are_open():
    """`x[:64]` has 64 rows, or fewer; half a batch has no number of rows for each sample; x and one row more."""
    found = results_of(
        lambda x: (x[:64], x[: tf.shape(x)[0] // 2], tf.concat([x, x[:1]], 0), tf.concat([x, x], 0)),
        tf.TensorSpec([None, 3]),
    )
    assert found == [(None, 3), (None, 3), (None, 3), (Rows(2), 3)]


def test_lengths_that_have_to_be_equal():
    """Of a table there are as many rows as there are steps, if it has so many; the shape that is asked for is known."""

    def embedded(x):
        length = tf.shape(x)[1]
        return tf.reshape(x + tf.ones([512, 3])[:length], [tf.shape(x)[0] * length, 3])

    assert results_of(embedded, tf.TensorSpec([None, None, 3])) == [(Rows(0), 3)]


def test_a_shape_of_lengths_that_are_not_known_and_of_one_to_infer():
    """As group normalisation has it, of images that are made smaller; of nothing it cannot be inferred."""

    def grouped(x):
        small = tf.nn.max_pool2d(x, 2, 2, "SAME")
        return tf.reshape(small, [-1, tf.shape(small)[1], tf.shape(small)[2], 2, 2])

    assert results_of(grouped, tf.TensorSpec([None, None, None, 4])) == [(Rows(1), None, None, 2, 2)]


def test_many_numbers_of_a_length_that_is_not_known():
    """How many there are of 840 rows is an int32."""

    def flat(x):
        strided = tf.nn.max_pool1d(x, 3, 2, "VALID")
        return tf.reshape(strided, [tf.size(strided)])

    assert results_of(flat, tf.TensorSpec([None, None, 512])) == [(Rows(0),)]


def test_a_shape_that_many_ops_compute():
    """It costs no error of Python's that hundreds of integers lead to it."""

    def reshaped(tensor):
        count = tf.shape(tensor)[0] * 0
        for _ in range(600):
            count = count + tf.shape(tensor)[1]
        return tf.reshape(tf.ones([2400]), tf.stack([count, -1]))

    assert results_of(reshaped, tf.TensorSpec([None, 4])) == [(2400, 1)]


def test_the_body_of_a_loop_and_of_its_gradient_has_rows():
    """State that begins as zeros, lists' elements, and shapes that a forward loop has put into lists."""
    layer = keras.layers.LSTM(5)
    layer.build((None, 4, 3))

    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, layer.trainable_variables)

    axes, graph = axes_of(gradient, tf.TensorSpec([None, 4, 3]))
    loops = [op for op in graph.get_operations() if op.type in LOOPS]
    assert len(loops) == 2
    for loop in loops:
        body, within = axes.body(loop, loop.get_attr("body").name)
        floats = [t for op in body.get_operations() for t in op.outputs if t.dtype == tf.float32]
        lengths = [within.lengths(tensor) for tensor in floats]
        assert len(lengths) > 10 and (Rows(1), 5) in lengths
        assert all(one is not None and None not in one for one in lengths), lengths


def alone(x):
    return tf.map_fn(lambda one: tf.tanh(one @ tf.ones([3, 2], x.dtype)), x, fn_output_signature=x.dtype)


def by_number(x):
    """Each row times its number in the batch."""
    numbers = tf.cast(tf.range(tf.shape(x)[0]), x.dtype)
    return tf.map_fn(lambda one: one[0] * one[1], (x, numbers), fn_output_signature=x.dtype)


def over_rows_before(x):
    return tf.scan(lambda before, one: before * 0.5 + one, x)


def of_the_next_row(x):
    """Each row with the next, taken by index from the whole batch."""
    last = tf.shape(x)[0] - 1
    each = tf.range(tf.shape(x)[0])
    return tf.map_fn(lambda i: x[i] + x[tf.minimum(i + 1, last)], each, fn_output_signature=x.dtype)


def how_many_before(x):
    """A loop whose state does not know of rows, but counts them."""
    body = lambda i, v: (i + 1, v * 1.5)  # noqa: E731
    return x * tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, (0, tf.ones([], x.dtype)))[1]


def backwards(x):
    rows = tf.TensorArray(x.dtype, tf.shape(x)[0]).unstack(x)
    made = tf.TensorArray(x.dtype, tf.shape(x)[0])
    last = tf.shape(x)[0] - 1
    return tf.while_loop(lambda i, _: i <= last, lambda i, out: (i + 1, out.write(i, rows.read(last - i))), (0, made))[
        1
    ].stack()


def all_but_the_last(x):
    rows = tf.TensorArray(x.dtype, tf.shape(x)[0]).unstack(x)
    made = tf.TensorArray(x.dtype, tf.shape(x)[0], element_shape=[4, 3]).unstack(tf.zeros_like(x))
    last = tf.shape(x)[0] - 1
    return tf.while_loop(lambda i, _: i < last, lambda i, out: (i + 1, out.write(i, rows.read(i + 1))), (0, made))[
        1
    ].stack()


def vectorized(x):
    return tf.vectorized_map(lambda one: tf.tanh(one) * tf.reduce_sum(one), x)


def within_rows(x):
    places = tf.argsort(x[:, :, 0], axis=1)
    return tf.gather(x, places, batch_dims=1) * 2.0


def drawn(x):
    """What is computed of random numbers alone, then beside the rows."""
    noise = tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype)
    first = tf.random.stateless_uniform(tf.shape(x)[:1], [3, 4], dtype=x.dtype)[0]
    return tf.tanh(noise @ tf.ones([3, 3], x.dtype)) + first + x


def numbered(x):
    numbers = tf.range(tf.shape(x)[0])
    every = tf.reduce_sum(tf.one_hot(3 * numbers + 1, tf.shape(x)[0], dtype=x.dtype)) + tf.cast(numbers[-1], x.dtype)
    return tf.cast(numbers, x.dtype)[:, None, None] * x + every


def scaled_numbers(x):
    """Every second row, twice."""
    halves = tf.cast(tf.range(tf.shape(x)[0]), tf.float64) * 1.5
    return tf.gather(x, tf.minimum(tf.cast(halves, tf.int32), tf.shape(x)[0] - 1))


def sorted_rows(x):
    return tf.sort(x, axis=0) * x[:, :1]


def summed_so_far(x):
    return tf.tanh(tf.cumsum(x, axis=0))


def shuffled(x):
    keys = 2 * tf.random.stateless_uniform(tf.shape(x)[:1], [1, 2]) + 1
    return tf.gather(x, tf.argsort(keys)) @ tf.ones([3, 3], x.dtype)


def nested(x):
    def outer(_, state):
        return keras.ops.fori_loop(0, 3, lambda _, h: tf.tanh(h) @ tf.ones([3, 3], x.dtype), state)

    return keras.ops.fori_loop(0, 2, outer, x)


def interleaved(x):
    """Branches of which the lengths over time tell which is taken: the other is of no such batch."""
    return keras.ops.associative_scan(lambda one, other: one * other, x, axis=1)


def alignments(x):
    """Scans by hand, whose matrices are scattered for each row."""
    labels, few = tf.cast(x[:, :2, 0] > 0, tf.int32) + 1, tf.ones_like(x[:, 0, 0], tf.int32)
    loss = tf.nn.ctc_loss(labels, tf.cast(x, tf.float32), 2 * few, 4 * few, logits_time_major=False, blank_index=0)
    return tf.cast(loss, x.dtype)[:, None, None]


# Results of all rows go back to rows: which ops need rows of all, gathered or added up, forward and backward.
BACK_TO_ROWS = {
    drawn: set(),
    numbered: set(),
    scaled_numbers: {"GatherV2", "Mul"},
    sorted_rows: {"TopKV2"},
    summed_so_far: {"Cumsum"},
    shuffled: {"GatherV2", "Mul"},
    nested: set(),
    interleaved: set(),
    alignments: set(),
}
LOOPS_OVER_ROWS = (alone, by_number, over_rows_before, of_the_next_row, how_many_before, backwards, all_but_the_last)


def test_an_axis_that_nobody_knows_may_be_squeezed():
    """A spectral norm: TensorFlow squeezes the places where a permutation has a number, of which there is one."""
    weight = tf.Variable(np.linspace(0.5, 1.5, 12).reshape(3, 4))

    def step(x):
        with tf.GradientTape() as tape:
            norm = tf.norm(x[:, 0] @ weight, ord=2, axis=[0, 1])
        return norm, tape.gradient(norm, weight)

    expected = tf.function(step)(tf.constant(X))
    with ncclsync.Towers(TOWERS) as towers:
        for one, other in zip(towers.run(step, X), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "function", [*LOOPS_OVER_ROWS, vectorized, within_rows, *BACK_TO_ROWS], ids=lambda one: one.__name__
)
def test_rows_that_are_taken_apart(function):
    """Forward and backward as on one device, whether the rows meet each other or not."""
    if function is interleaved and keras.__version__.startswith("3.10."):
        pytest.skip("Keras 3.10's associative_scan recurs without end on one device, in a float64 trace")
    weight = tf.Variable(np.linspace(0.5, 1.5, 3))

    def step(x):
        with tf.GradientTape() as tape:
            made = function(x * weight)
            loss = tf.reduce_sum(made**2 * x[:, :1, :1])
        return made, tape.gradient(loss, weight)

    step = tf.autograph.experimental.do_not_convert(step)
    expected = tf.function(step, autograph=False)(tf.constant(X))
    with ncclsync.Towers(TOWERS) as towers:
        found = towers.run(step, X)
        gathered = {whole.op for whole in towers.explain().wholes}
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 if function is alignments else 1e-10, atol=1e-12)
    if function not in LOOPS_OVER_ROWS or function is alone:
        assert gathered == BACK_TO_ROWS.get(function, set())


def _hardest(x):
    """The mean of the largest losses, of at most 1000 rows."""
    losses = tf.reduce_sum(x**2, 1)
    largest, at = tf.math.top_k(losses, tf.minimum(tf.size(losses), 1000))
    return tf.reduce_mean(largest), tf.gather(losses, at[:3])


def _capped(x):
    """Sums over at most 1000 segments, a scatter, draws and a reshape of as many."""
    rows = tf.shape(x)[0]
    most = tf.minimum(rows, 1000)
    numbers = tf.range(rows) % most
    drawn = tf.random.stateless_uniform([most], (1, 2), maxval=rows, dtype=tf.int32)
    scattered = tf.scatter_nd(numbers[:, None], x, [most, 4])
    shaped = tf.reshape(x[: most * (rows // most)], [most, -1])
    sums = tf.math.unsorted_segment_sum(x, numbers, most)
    return tf.reduce_sum(sums**2), tf.reduce_sum(scattered**2), drawn[:5], tf.reduce_sum(tf.reduce_sum(shaped, 1) ** 2)


def _decided(x):
    """What a batch of more than 1000 rows decides."""
    rows = tf.shape(x)[0]
    kept = tf.sort(x[:, 0])[: tf.where(rows < 1000, rows, 1000)]
    return tf.reduce_sum(kept), tf.cond(rows > 1000, lambda: tf.reduce_sum(x**2), lambda: tf.reduce_sum(x))


def _counted(x):
    """The number of rows that a mask leaves, as a value and as a limit, not as a shape."""
    kept = tf.boolean_mask(x, x[:, 0] > 0)
    left = tf.shape(kept)[0]
    drawn = tf.random.stateless_uniform([5], (1, 2), maxval=left, dtype=tf.int32)
    filled = tf.cast(tf.fill([7], left), tf.float32)
    each = tf.random.stateless_uniform([tf.shape(x)[0]], (3, 4), maxval=left, dtype=tf.int32)
    return (
        tf.reduce_sum(tf.gather(kept, drawn)),
        tf.reduce_sum(filled),
        tf.reduce_sum(tf.gather(kept, each)[:, 1] * x[:, 1]),
    )


def _divided(x):
    """Quotients, remainders and chunks of the rows, which batches of few sizes do not show."""
    rows = tf.shape(x)[0]
    centred = tf.cond(tf.equal(rows % 16, 0), lambda: x - tf.reduce_mean(x, 0), lambda: 2 * x)
    chunks = tf.shape(tf.range(0, rows, 512))[0]
    counts = tf.cast(tf.stack([rows // 1000, tf.bitwise.right_shift(rows, 10), chunks, (rows + 1) // 7]), x.dtype)
    asked = [tf.equal(rows, 32), tf.not_equal(rows * 3, 96), tf.equal(tf.bitwise.bitwise_and(rows, 32), 0)]
    other = [tf.cond(one, lambda: x - tf.reduce_mean(x, 0), lambda: 2 * x) for one in asked]
    sums = tf.stack([tf.reduce_sum(one**2) for one in (centred, *other)])
    return sums, counts, counts * tf.reduce_sum(x), tf.reduce_sum(x[: 3 * (rows // 4)])


def _as_long(x):
    """Lengths that are equal for some numbers of rows, and not for others."""
    lengths = [tf.shape(one)[0] for one in (x[::16], x[:64], tf.sort(x, 0)[:1024], x)]
    return tf.stack(lengths), tf.reduce_sum(tf.exp(x[::16])), tf.reduce_sum(tf.exp(x[:64]))


def _masked(x):
    """The first rows that a mask leaves, perhaps none, and what their number decides."""
    few, none = tf.boolean_mask(x, x[:, 0] > 0)[:64], tf.boolean_mask(x, x[:, 0] > 9)
    many = tf.shape(few)[0] >= 50
    return (
        tf.reduce_sum(tf.tanh(few * x[0] + x[1]) * x[0]),
        tf.cond(tf.equal(tf.size(none), 0), lambda: 1.0, lambda: tf.reduce_sum(none)),
        tf.cond(many, lambda: tf.reduce_sum(tf.exp(few)), lambda: 3.0),
        tf.reduce_sum(tf.math.top_k(few[:, 1], tf.minimum(tf.shape(few)[0], 10))[0]),
    )


def _left(x):
    """What the rows decide that a mask leaves, perhaps none, or two slices; and single numbers of rows."""
    rows, kept, none = tf.shape(x)[0], tf.boolean_mask(x, x[:, 0] > 0), tf.boolean_mask(x, x[:, 0] > 9)
    left, most, few = tf.shape(kept)[0], tf.shape(x[:64])[0], tf.shape(x[:10])[0]
    zeros = [left % 2, left % 3, left % 1009, left - 2 * (left // 2), tf.minimum(tf.shape(none)[0], 1)]
    zeros += [tf.sign(tf.size(none)), tf.shape(none[:1])[0]]
    asked = [tf.equal(one, 0) for one in zeros] + [tf.maximum(most - few, 0) > 0, tf.minimum(most, few) < most]
    asked += [tf.equal(tf.bitwise.bitwise_and(rows, 32), 32), tf.equal(tf.bitwise.bitwise_and(few, 8), 8)]
    asked += [tf.reduce_sum(tf.one_hot(rows - 20, 64)) > 0]
    made = [tf.cond(one, lambda: x - tf.reduce_mean(x, 0), lambda: 2 * x) for one in asked]
    return tf.reduce_sum(tf.stack(made) ** 2, [1, 2])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("many", [(7, 30, 32, 900, 2048), (2048, 7)], ids=["longer", "shorter"])
@pytest.mark.parametrize("step", [_hardest, _capped, _decided, _counted, _divided, _as_long, _masked, _left])
def test_another_batch_than_was_asked_about(step, many):
    """A length that counts rows up to some number of them does not count rows; nor does a count that is no length."""
    alone = tf.function(step, input_signature=[tf.TensorSpec([None, 4])])
    with ncclsync.Towers(2) as towers:
        for rows in many:
            batch = tf.constant(np.random.default_rng(0).normal(size=(rows, 4)).astype("float32"))
            found, expected = ([one.numpy() for one in call(batch)] for call in (partial(towers.run, step), alone))
            assert_close(found, expected, 1e-5, f"{rows} rows:")


class _Asking(keras.layers.Layer):
    """A layer that does other things with long sequences than with short ones."""

    def call(self, x):
        """Center by the batch, or not; count frames."""
        length = tf.shape(x)[1]
        pooled = tf.repeat(tf.nn.max_pool1d(x, 2, 2, "SAME"), 2, axis=1)
        asked = [tf.equal(length % 2, 0), length > 10, length // 20 > 0, tf.equal(length % 8, 0), tf.equal(length, 40)]
        asked += [length > 512, tf.shape(pooled)[1] > length, length > tf.shape(x[:, :30])[1]]
        made = [tf.cond(one, lambda: x - tf.reduce_mean(x, 0), lambda: 2 * x) for one in asked]
        frames = tf.reshape(tf.nn.max_pool1d(x, 20, 20, "SAME"), [-1, 4])
        rest = [x[:, length // 2 * 2 :], x[:, length // 4 * 4 :], pooled[:, length:], x[:, :30]]
        asked = tf.equal(tf.shape(x[:, :2])[1], 1)
        rest += [tf.cond(asked, lambda: x - tf.reduce_mean(x, 0), lambda: 3 * x)]
        sums = tf.add_n([tf.reduce_sum(one**2, [1, 2]) for one in (tf.add_n(made), *rest)])
        # Of the batch's means: as many steps as there are if their number is odd, or if they are few.
        means, first = tf.cumsum(tf.reduce_mean(x, 0)), tf.cumsum(tf.reduce_mean(x[:, :30], 0))
        steps = tf.shape(means)[0]
        parts = means[1:], means[: steps // 2 * 2], means[: tf.minimum(steps, tf.shape(first)[0])], means
        parts = [tf.tanh(one * (2 + i)) for i, one in enumerate(parts)]
        ends = tf.add_n([tf.reduce_sum(tf.fill(tf.shape(one), 2.0) * one) for one in parts])
        return sums[:, None] + ends + tf.reduce_mean(tf.math.top_k(frames[:, 0], 9)[0])


def test_lengths_over_time_that_a_condition_asks_for():
    """What an open length decides is not known before a batch comes."""

    def build():
        model = keras.Sequential([keras.Input((None, 4)), _Asking()])
        model.compile(loss="mse")
        return model

    check_lengths(build, [((length,), ()) for length in (1, 6, 9, 40, 600)], (4, 1))


def check_lengths(build, shapes, last):
    """A model evaluates batches of x and y of these shapes as on one device, by the program for the first one.

    Args:
        build: makes the model.
        shapes: [batches], (shape of x, shape of y) of one row, without the last axis.
        last: the lengths of both last axes.
    """
    specs = tuple(tf.TensorSpec([None, *[None] * len(one), end]) for one, end in zip(shapes[0], last, strict=True))
    alone, model = build(), ncclsync.nccl_parallel(towers=2)(build)()
    for of_x, of_y in shapes:
        x = np.random.default_rng(0).normal(size=(10, *of_x, last[0])).astype("float32")
        pair = x, np.ones((10, *of_y, last[1]), "float32")
        batches = tf.data.Dataset.from_generator(lambda pair=pair: [pair], output_signature=specs)
        expected = alone.evaluate(batches, verbose=0)
        assert model.evaluate(batches, verbose=0) == pytest.approx(expected, rel=1e-5), of_x
    model.towers.close()


class _Comparing(keras.layers.Layer):
    """A layer that does other things with high images than with wide ones."""

    def call(self, x):
        """Center by the batch, or not."""
        size = tf.shape(x)[1:3]
        height, width = size[0], size[1]
        asked = [height - width > 0, abs(width - height) > 3, tf.equal(height // width, 1), tf.argmax(size) > 0]
        asked += [tf.reduce_max(size) - tf.reduce_min(size) > 1, height / width > 1.2, width / height > 1.2]
        asked += [(size - size[::-1])[0] > 2, tf.equal(width % height, 0), tf.shape(x[:, width:])[1] > 3]
        return tf.add_n([tf.cond(one, lambda: x - tf.reduce_mean(x, 0), lambda: 2 * x) for one in asked])


def test_lengths_of_two_axes_that_a_condition_asks_for():
    """Open lengths that are equal where they are inferred may differ: H - W is not 0."""

    def build():
        model = keras.Sequential([keras.Input((None, None, 2)), _Comparing()])
        model.compile(loss="mse")
        return model

    check_lengths(build, [(size, size) for size in ((9, 4), (4, 9), (5, 5))], (2, 2))


_OF_A_SHAPE = {
    "Reshape": tf.reshape,
    "BroadcastTo": tf.broadcast_to,
    "RandomUniform": lambda _, shape: tf.random.uniform(shape),
    "Slice": lambda x, shape: tf.slice(x, tf.zeros_like(shape), shape),
    "Tile": tf.tile,
    "Transpose": tf.transpose,
    "Pad": lambda x, shape: tf.pad(x, tf.stack([shape, shape], 1)),
}


@pytest.mark.parametrize("kind", _OF_A_SHAPE)
def test_a_shape_has_few_axes(kind):
    """Of one whose length is not known TensorFlow's inference takes a prime of axes, and gigabytes: no such op is."""
    with tf.Graph().as_default():
        made = _OF_A_SHAPE[kind](tf.compat.v1.placeholder(tf.float32), tf.compat.v1.placeholder(tf.int32, [None]))
        (op,) = (op for op in made.graph.get_operations() if op.type == kind)
    shapes = [(8527,) if tensor.dtype == tf.int32 else None for tensor in op.inputs]
    if kind == "Pad":
        shapes[1] = (8527, 2)
    with pytest.raises(ValueError, match=f"{kind} of 8527 axes"):
        Kernels().shapes(op, [shapes])
