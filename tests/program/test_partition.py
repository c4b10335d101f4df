"""Small steps whose placements are easily taken for others, on towers and on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, on_towers

import ncclsync

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 4))
SERIES = RNG.normal(size=(7, 3, 2))


def rows(x):
    return tf.shape(x)[0]


def padded(series):
    return tf.pad(series, [[0, 0], [0, 20], [0, 0]], constant_values=1.0)


def numbered(x):
    """Two blocks of rows, whole: 0, 1, …, 0, 1, …"""
    return tf.cast(tf.range(2 * rows(x)) % rows(x), x.dtype)


def listed(dtype, size, *items, shape=()):
    array = tf.TensorArray(dtype, size=size, element_shape=shape)
    for i, item in enumerate(items):
        array = array.write(i, item)
    return array


def by_columns(t):
    return tf.transpose(t, [1, 0, 2])


def stacked(t):
    return tf.stack([t[:, :, 0], t[:, :, 1]])


def places(x, columns=2):
    return tf.cast(tf.abs(x[:, :columns]) * 10.0, tf.int32) % 4


def marked(value):
    """Numbers for what is not finite: of which kind it is counts."""
    value = tf.where(tf.math.is_nan(value), tf.cast(1e3, value.dtype), value)
    return tf.where(tf.math.is_inf(value), tf.sign(value) * tf.cast(2e3, value.dtype), value)


def ramp(x, dtype):
    """Of each row a number, as many below zero as above, whose sum is 0."""
    return tf.cast(2 * tf.range(rows(x)) - rows(x) + 1, dtype) + tf.cast(x[:, 0] * 0.0, dtype)


def one_row(x):
    return tf.boolean_mask(tf.range(1.0, 5.0, dtype=x.dtype), [True, False, False, False])[:, None]


def grown(x, begin, times):
    return tf.while_loop(
        lambda k, s: k < times,
        lambda k, s: (k + 1, s + x),
        [0, begin],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 4])],
    )[1]


STEPS = {
    # Bounds of a slice that count rows.
    "slice_to_rows": lambda x, t: tf.reduce_sum(padded(t)[:, : rows(t)] + 1.0),
    "slice_from_rows": lambda x, t: tf.reduce_sum(padded(t)[:, rows(t) :] ** 2),
    "slice_at_rows": lambda x, t: padded(t)[:, rows(t)],
    "slice_of_each_row": lambda x, t: padded(t)[:, : rows(t)],
    "slice_in_a_branch": lambda x, t: tf.cond(
        rows(t) > 1, lambda: tf.reduce_sum(padded(t)[:, : rows(t)]), lambda: tf.constant(0.0, t.dtype)
    ),
    # Rows that are all alike, until others join them.
    "alike_times_whole": lambda x, t: tf.reduce_mean(
        tf.reduce_sum(tf.concat([x, x**2], 0), 1) * (tf.ones([2 * rows(x)], x.dtype) * numbered(x))
    ),
    "alike_plus_whole": lambda x, t: (tf.zeros([2 * rows(x)], x.dtype) + numbered(x))[:, None] * tf.concat([x, -x], 0),
    "alike_where_whole": lambda x, t: (
        tf.where(tf.ones([2 * rows(x)], tf.bool), numbered(x), 0.0) * tf.reduce_max(tf.concat([x, -x], 0), 1)
    ),
    "alike_beside_whole": lambda x, t: tf.concat(
        [tf.ones([2 * rows(x), 1], x.dtype), numbered(x)[:, None], tf.concat([x, -x], 0)], 1
    ),
    "alike_places": lambda x, t: (
        tf.gather(tf.range(100.0), tf.zeros([2 * rows(x)], tf.int32) + tf.range(2 * rows(x)))
        * tf.cast(tf.concat([x, -x], 0)[:, 0], tf.float32)
    ),
    "alike_unknown_width": lambda x, t: tf.reshape(
        tf.broadcast_to(tf.range(3.0)[None], [rows(x) * rows(x) // rows(x), 3]), [-1]
    ),
    # Lists of counts, by counts, and of a counted size.
    "list_of_counts": lambda x, t: listed(tf.int32, 2, rows(x), rows(x)).stack(),
    "list_of_other_counts": lambda x, t: listed(tf.int32, 2, rows(x), rows(x) * 2).stack(),
    "list_at_a_count": lambda x, t: (
        tf.TensorArray(tf.float64, size=9).unstack(tf.range(9.0, dtype=tf.float64)).read(rows(x))
    ),
    "list_of_counted_size": lambda x, t: tf.reduce_sum(tf.ones_like(listed(tf.float64, rows(x) + 1, 1.0, 2.0).stack())),
    "list_of_means": lambda x, t: listed(tf.float64, 2, tf.reduce_mean(x), tf.reduce_max(x)).stack(),
    # A sum of integers that wraps.
    "wrapping_sum": lambda x, t: tf.cast(tf.reduce_sum(tf.cast(tf.abs(x) * 60.0, tf.uint8)), tf.float32),
    # Every row with every other, by broadcasting.
    "outer_matmul": lambda x, t: tf.matmul(t[None, :], tf.transpose(t, [0, 2, 1])[:, None]),
    "outer_matmul_transposed": lambda x, t: tf.matmul(t[:, None], t[None], transpose_b=True),
    "outer_einsum": lambda x, t: tf.einsum("...ij,...kj->...ik", t[None, :], t[:, None]),
    # Blocks of rows in other blocks; rows from the end of a slice.
    "thirds": lambda x, t: tf.reshape(stacked(t), [3 * rows(t), 2]),
    "two_of_thirds": lambda x, t: tf.reduce_sum(
        tf.slice(tf.reshape(stacked(t), [3 * rows(t), 2]), [0, 0], [2 * rows(t), 2]), 1
    ),
    "thirds_of_size": lambda x, t: tf.reshape(stacked(t), [tf.size(t) // 2, 2]),
    "ellipsis_backwards": lambda x, t: tf.add_n([by_columns(t)[..., ::-1, :], by_columns(t)]) ** 2,
    "ellipsis_and_new_axis": lambda x, t: tf.stack([by_columns(t)[..., None, 1:, :][:, 0], by_columns(t)[:, 1:]]),
    "gather_from_the_end": lambda x, t: tf.gather(tf.sort(x, 0), places(x), axis=1, batch_dims=-1),
    "gather_whole_places": lambda x, t: tf.gather(x, tf.sort(places(x), 0), axis=1, batch_dims=-1),
    "one_open_row": lambda x, t: tf.concat([x, -x], 0) * one_row(x),
    # A part that would overflow in the other half.
    "half_of_brain_sum": lambda x, t: marked(tf.cast(tf.reduce_sum(65536 * ramp(x, tf.bfloat16)), tf.float16)),
    "count_that_wraps": lambda x, t: tf.cast(tf.cast(rows(x), tf.int64) * 3000000000, tf.int32),
    # Loops whose state begins as one row, or never changes; lists whose items have rows.
    "grown": lambda x, t: grown(x, tf.ones([1, 4], x.dtype), 2),
    "never_grown": lambda x, t: grown(x, tf.ones([1, 4], x.dtype), 0),
    "never_grown_open": lambda x, t: grown(x, one_row(x) * tf.ones([4], x.dtype), 0),
    "list_of_columns": lambda x, t: tf.TensorArray(tf.float64, 3).unstack(by_columns(t)).read(1),
    "list_of_rows": lambda x, t: tf.TensorArray(tf.float64, rows(t)).unstack(t).read(1),
    "list_without_shape": lambda x, t: (
        tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, x[:, 0]).write(1, x[:, 1]).stack()
    ),
    # Gradients of which one op is made for two: what is known of the one's shape is of the other's.
    "largest_and_smallest": lambda x, t: tf.reduce_max(x, 0) + tf.reduce_min(x, 0),
    "shapes_of_one_device": lambda x, t: tf.cumsum(
        tf.linalg.diag_part(tf.repeat(tf.nn.moments(t, [1, 0], keepdims=True)[1], 1, axis=-1)), axis=-1
    ),
    "diagonals_of_open_shape": lambda x, t: tf.linalg.diag_part(
        tf.reverse(tf.broadcast_to(t, [2, rows(t), 3, 2]), [-2])
    ),
    "diagonals_of_rolled": lambda x, t: tf.linalg.diag_part(tf.roll(tf.reshape(tf.sort(t, 0), tf.shape(t)), 1, -1)),
    "sorted_without_rank": lambda x, t: tf.reduce_sum(
        tf.sort(tf.reshape(tf.raw_ops.PlaceholderWithDefault(input=x, shape=tf.TensorShape(None)), [-1]))
    ),
    # Matrices of which some have rows, or rows within.
    "diagonals": lambda x, t: tf.linalg.diag(t, k=(-1, 1), num_rows=2, num_cols=2),
    "diagonals_of_rows": lambda x, t: tf.linalg.diag(x, k=(1 - rows(x), 0), num_rows=9, num_cols=4),
    "diagonal_of_rows": lambda x, t: tf.linalg.diag(t[:, 0, 0]),
    "triangular_solve": lambda x, t: tf.linalg.triangular_solve(
        tf.ones([1, 2, 2], x.dtype), tf.transpose(t, [0, 2, 1])
    ),
    "triangular_solve_of_one": lambda x, t: tf.linalg.triangular_solve(
        tf.eye(2, dtype=x.dtype) + tf.matmul(t, t, transpose_a=True), tf.ones([1, 2, 1], x.dtype)
    ),
    "solve_of_vectors": lambda x, t: tf.linalg.solve(tf.eye(4, dtype=x.dtype) * 3.0 + 0.1, tf.transpose(x)),
    "batch_of_one_axis": lambda x, t: tf.matmul(x, tf.ones([1, 4, 2], x.dtype)),
}


def more(x, count=5):
    """Rows of which the trace does not know how many there are."""
    return tf.boolean_mask(tf.reshape(tf.range(4.0 * count, dtype=x.dtype), [count, 4]), [True] * count)


# Of a batch of one row, which other lengths are broadcast with.
STRETCHED = {
    "mean": lambda x, t: tf.reduce_mean((x - more(x)) ** 2),
    "shape": lambda x, t: tf.cast(rows(x * more(x)), x.dtype) * tf.reduce_sum(x),
    "size": lambda x, t: tf.reduce_sum(x * more(x)) / tf.cast(tf.size(x * more(x)), x.dtype),
    "constant": lambda x, t: tf.math.reduce_std(x - tf.eye(4, dtype=x.dtype)[:3]),
    "repeated": lambda x, t: tf.reduce_mean(x * tf.repeat(x, 5, 0)),
    "gathered": lambda x, t: tf.gather(x * more(x), [4, 0]),
    "largest": lambda x, t: tf.math.top_k(tf.reduce_sum(x * more(x), 1), 2)[0],
    "beside_rows": lambda x, t: tf.reduce_mean(tf.concat([x * more(x) * x, x, more(x)], 0) ** 2),
    "branch": lambda x, t: tf.reduce_mean(tf.cond(tf.reduce_sum(x) > -99.0, lambda: x * more(x), lambda: x) ** 2),
    "loop": lambda x, t: tf.reduce_mean(grown(x, more(x), 2) ** 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("towers, size", [(3, 7), (4, 2)])
def test_steps(towers, size):
    check(STEPS, towers, size)


@pytest.mark.slow
def test_one_row_is_broadcast():
    check(STRETCHED, 2, 1)


def check(steps, towers, size):
    """Values of all of them, and the gradients of those that have one with respect to x and the series."""

    def step(batch):
        results = {}
        for name, function in steps.items():
            with tf.GradientTape() as tape:
                tape.watch(batch)
                value = function(*batch)
                total = tf.reduce_sum(tf.sin(value)) if value.dtype.is_floating else None
            results[name] = {"value": value}
            if total is not None:
                gradients = tape.gradient(total, batch, unconnected_gradients="zero")
                results[name]["gradients"] = [tf.reduce_sum(one, 0) for one in gradients]
        return results

    batch = tf.constant(X[:size]), tf.constant(SERIES[:size])
    alone = tf.function(step, autograph=False)(batch)
    with ncclsync.Towers(towers) as on_towers:
        found = on_towers.run(step, batch)
    for name in steps:
        assert_close(found[name], alone[name], 1e-6 if "float32" in str(alone[name]["value"].dtype) else 1e-10, name)


# What only tower 0 can tell.

HIDDEN = {
    "string": lambda: tf.strings.as_string(tf.random.uniform([3])),
    "complex64": lambda: tf.cast(tf.random.uniform([2, 3]), tf.complex64),
    "uint16": lambda: tf.cast(tf.random.uniform([3]) * 60000, tf.uint16),
    "bool": lambda: tf.random.uniform([9]) > 0.5,
    "some": lambda: tf.boolean_mask(tf.range(40.0), tf.random.uniform([40]) > 0.5),
    "none": lambda: tf.boolean_mask(tf.range(4.0), tf.random.uniform([4]) > 1.5),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_numbers_are_tower_0s_of_any_dtype_and_shape(name):
    def step(batch):
        drawn = tf.cond(tf.reduce_sum(batch) > 0, HIDDEN[name], HIDDEN[name])
        text = tf.strings.reduce_join(tf.strings.as_string(tf.reshape(drawn, [-1])), separator=" ")
        if name == "string":
            text = tf.strings.reduce_join(drawn, separator=" ")
        return tf.fill([tf.shape(batch)[0]], text), tf.zeros_like(batch[:, 0])

    with ncclsync.Towers(3) as towers:
        texts, _ = towers.run(step, tf.ones([7, 2]))
    assert len(texts) == 7 and len(set(texts.numpy())) == 1, texts


def test_a_list_of_own_seeds():
    """Towers draw with seeds of their own that a list has held: what they write of it is equal all the same."""
    generator, written = keras.random.SeedGenerator(3), tf.Variable(tf.zeros([3]))

    def step(x):
        seeds = listed(tf.int64, 2, tf.cast(generator.next(), tf.int64), tf.zeros([2], tf.int64), shape=[2])
        written.assign_add(tf.random.stateless_uniform([3], seeds.read(0)))
        return tf.reduce_sum(x)

    with ncclsync.Towers(3) as towers:
        for _ in range(2):
            towers.run(step, X)
        assert towers.divergence() == 0.0


def test_a_loop_is_computed_again_once():
    """For all its lists that its gradient takes of the whole batch."""
    weight = tf.Variable(RNG.normal(size=(4, 4)))

    def step(x):
        def turn(i, y):
            y = tf.tanh(y @ weight) * tf.gather(tf.sigmoid(y), tf.argsort(y), batch_dims=1)
            return i + 1, tf.where(y > tf.reduce_mean(y, 1, keepdims=True), tf.sin(y) * y, tf.cos(y))

        def loss():
            return tf.reduce_sum(tf.while_loop(lambda i, _: i < 3, turn, [0, x], maximum_iterations=3)[1] ** 2)

        with tf.GradientTape() as tape:
            value = loss()
        # As an op that takes all rows would: the gradient is that of the whole batch.
        return value, tape.gradient(value, weight)

    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, X), tf.function(step)(tf.constant(X)))
        (program,) = (one for made in towers._steps.values() for one in made.programs.kept.values())
    graphs = [segment.function.graph for segment in program.segments]
    assert sum(op.type in ("While", "StatelessWhile") for graph in graphs for op in graph.get_operations()) <= 3


def test_a_length_that_fixes_the_rows_is_named():
    """By its own line, not as a state that the step does not have."""

    class OfFour(keras.layers.Layer):
        def call(self, x):
            return x * tf.ones([4, 1], x.dtype)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    words = rf"Expected a batch of 4 rows: a tensor of that length, at {__file__}:\d+ \(return x \* tf.ones"

    def build():
        model = keras.Sequential([keras.Input((4,)), OfFour()])
        model.compile("sgd", "mse")
        return model

    batches = tf.data.Dataset.from_tensor_slices((X, X)).batch(3)  # one device does not know how many rows, either
    with pytest.raises(ncclsync.NcclSyncError, match=words):
        on_towers(build, 2).evaluate(batches, verbose=0)
    with ncclsync.Towers(2) as towers, pytest.raises(ValueError, match="Dimensions must be equal, but are 7 and 4"):
        towers.run(lambda x: x * tf.ones([4, 1], x.dtype), X)
