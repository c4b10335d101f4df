"""Random numbers whose parameters have rows, or count them: the towers' own, and one device's."""

import costs
import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close

import ncclsync

ROWS = 21
X = np.arange(1.0, ROWS + 1, dtype="float32")[:, None] * np.ones((1, 2), "float32")


def rows(x):
    return tf.shape(x)[0]


def numbers(x):
    return tf.range(1.0, tf.cast(rows(x), tf.float32) + 1)


random = tf.random
# What is drawn of a batch with a seed and a generator; and what each number is to be near, by far.
DRAWS = {
    "gamma_of_one": (lambda x, seed, g: random.stateless_gamma([rows(x), 1], seed, [1e4]), np.full((ROWS, 1), 1e4)),
    "gamma_of_rows": (lambda x, seed, g: random.stateless_gamma([rows(x)], seed, 1e4 * x[:, 0]), 1e4 * X[:, 0]),
    "gamma_of_whole_rows": (
        lambda x, seed, g: random.stateless_gamma([rows(x)], seed, 1e4 * numbers(x)),
        1e4 * X[:, 0],
    ),
    "gamma_of_two_batches": (
        lambda x, seed, g: random.stateless_gamma([2 * rows(x)], seed, tf.concat([1e4 * x[:, 0], 1e6 * x[:, 0]], 0)),
        np.concatenate([1e4 * X[:, 0], 1e6 * X[:, 0]]),
    ),
    "gamma_of_columns": (
        lambda x, seed, g: random.stateless_gamma([rows(x), 2], seed, [1e4, 1e6]),
        np.tile([1e4, 1e6], (ROWS, 1)),
    ),
    "gamma_before": (lambda x, seed, g: random.gamma([rows(x)], [1e4, 1e6]), np.tile([1e4, 1e6], (ROWS, 1))),
    "gamma_behind": (lambda x, seed, g: random.gamma([3], 1e4 * x[:, 0]), np.tile(1e4 * X[:, 0], (3, 1))),
    "poisson": (lambda x, seed, g: random.stateless_poisson([rows(x)], seed, 1e4 * numbers(x)), 1e4 * X[:, 0]),
    "binomial": (
        lambda x, seed, g: random.stateless_binomial([rows(x)], seed, 1e4, numbers(x) / (2 * ROWS)),
        1e4 * X[:, 0] / (2 * ROWS),
    ),
    "binomial_of_generator": (lambda x, seed, g: g.binomial([rows(x)], 1e4 * numbers(x), 0.9), 9e3 * X[:, 0]),
    "binomial_beside_rows": (
        lambda x, seed, g: tf.cast(g.binomial([rows(x)], 1e4 * numbers(x), 0.9), tf.float32) + 0.0 * x[:, 0],
        9e3 * X[:, 0],
    ),
    "truncated": (
        lambda x, seed, g: random.stateless_parameterized_truncated_normal(
            [rows(x)], seed, 1e4 * numbers(x), 1.0, 0.0, 1e9
        ),
        1e4 * X[:, 0],
    ),
    "categorical": (
        lambda x, seed, g: random.categorical(1e9 * tf.one_hot(tf.cast(x[:, 0], tf.int32), 30), 1),
        X[:, :1],
    ),
    "normal_of_generator": (lambda x, seed, g: g.normal([rows(x)], 1e4 * numbers(x)), 1e4 * X[:, 0]),
}


def drawn(draw, invariant, one_device=True):
    """Run a draw on three towers, and on one device."""
    seed, generator = keras.random.SeedGenerator(3), random.Generator.from_seed(1)
    start = seed.state.numpy()

    def step(x):
        return draw(x, seed.next(), generator)

    alone = tf.function(step, autograph=False)(tf.constant(X)) if one_device else None
    seed.state.assign(start)
    generator.reset_from_seed(1)
    with ncclsync.Towers(3, exact=(("random",) if invariant else ())) as towers:
        return towers.run(step, tf.constant(X)), alone


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_parameters_go_with_their_rows(name, invariant):
    draw, expected = DRAWS[name]
    if invariant and name in ("gamma_before", "gamma_behind", "categorical"):
        with pytest.raises(ncclsync.NcclSyncError, match="TensorFlow hides"):
            drawn(draw, True, one_device=False)
        return
    found, alone = drawn(draw, invariant)
    assert found.shape == expected.shape and np.all(np.abs(found / expected - 1) < 0.2), found
    if invariant:
        assert_close(found, alone, 0.0, name)


COUNTED = {
    "seed": lambda x, seed, g: random.stateless_uniform([rows(x), 40], seed, 0, rows(x), tf.int32),
    "generator": lambda x, seed, g: g.uniform([rows(x), 40], 0, rows(x), tf.int32),
    "hidden": lambda x, seed, g: random.uniform([rows(x), 40], 0, rows(x), tf.int32),
    "of no rows": lambda x, seed, g: (
        tf.zeros_like(x[:, :1], tf.int32) + random.stateless_uniform([400], seed, 0, rows(x), tf.int32)
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_places_in_the_batch_are_of_all_rows(name):
    """As samples to compare with are drawn: a tower's own count of rows would never reach the others'."""
    places, _ = drawn(COUNTED[name], False)
    for number, own in enumerate(np.split(places.numpy(), 3)):
        assert own.min() <= 1 and own.max() >= ROWS - 2, (number, own.min(), own.max())


@pytest.mark.parametrize("invariant", [False, True])
def test_a_count_in_a_seed_is_of_all_rows(invariant):
    """Beside a seed, which each tower has of its own, a count is of the batch; the seed is tower 0's."""

    def counted(x, seed, g):
        numbers = tf.stack([tf.cast(seed[0], tf.int32), rows(x)])
        return tf.fill([rows(x)], numbers[1]), tf.fill([rows(x)], numbers[0])

    (counts, seeds), alone = drawn(counted, invariant)
    assert set(counts.numpy()) == {ROWS} and len(set(seeds.numpy())) == 1
    assert_close(seeds, alone[1], 0.0, "the seed of tower 0")


@pytest.mark.slow
def test_one_number_is_one():
    def draw(x, seed, g):
        return x[:, 0] * 0 + tf.cast(random.stateless_uniform([], seed, 0, rows(x), tf.int32), x.dtype)

    found, alone = drawn(draw, False)
    assert len(set(found.numpy())) == 1
    assert_close(drawn(draw, True)[0], alone, 0.0, "one number")


def noise(x):
    return random.stateless_normal(tf.shape(x), [1, 2])


# Loops and branches that draw one stream for all rows: they are computed whole.
WHOLE = {
    "StatelessWhile": lambda x, w: tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x @ w + noise(x))), (0, x)
    )[1],
    "StatelessIf": lambda x, w: tf.cond(w[0, 0] > 0, lambda: x + noise(x), lambda: x),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", WHOLE)
def test_what_follows_a_draw_in_a_loop_or_a_branch_is_by_rows(name):
    """One device's numbers; and the loop or the branch alone, with its gradient, is computed alike on all towers."""
    w = tf.Variable(np.eye(2, dtype="float32") * 0.5 + 0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.exp(WHOLE[name](x / ROWS, w.value()) @ w))
        return tf.convert_to_tensor(tape.gradient(loss, w))

    alone = tf.function(step)(tf.constant(X))
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, tf.constant(X)), alone, 1e-6, name)
    cost = costs.cost_of(costs.runs(lambda: step, tf.constant(X)))
    alike = {op for op, _, share in cost.alike if share > 0.001}
    assert name in alike and alike <= {name, name.removeprefix("Stateless")}, cost


WITHIN = {
    "loop": lambda draw, row: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + draw()), [0, row])[1],
    "branch": lambda draw, row: tf.cond(row[0] > 0, lambda: row + draw(), lambda: row),
}


@pytest.mark.parametrize("name", WITHIN)
def test_rows_that_draw_the_same_numbers(name):
    """Of one seed, in a loop or a branch within a loop over rows: towers draw the same ones, too."""
    seeds = keras.random.SeedGenerator(3)

    def step(x):
        seed = tf.cast(seeds.next(), tf.int32)
        return tf.map_fn(lambda row: WITHIN[name](lambda: random.stateless_uniform([2], seed), row), x)

    with ncclsync.Towers(3) as towers:
        drawn = towers.run(step, tf.constant(X)) - X
    np.testing.assert_allclose(drawn, np.tile(drawn[:1], (ROWS, 1)), rtol=1e-4)


def test_sampled_candidates_that_are_given_are_no_draw():
    """A sampled softmax looks for the labels among its candidates by an op with seeds, which draws nothing."""
    weights, biases = tf.Variable(np.ones((9, 2), "float32")), tf.Variable(np.zeros(9, "float32"))
    labels = np.arange(ROWS)[:, None] % 9

    @tf.autograph.experimental.do_not_convert
    def step(batch):
        x, y = batch
        sampled = tf.constant([1, 4, 7], tf.int64), tf.fill([tf.shape(y)[0], 1], 0.3), tf.fill([3], 0.3)
        return tf.reduce_mean(tf.nn.sampled_softmax_loss(weights, biases, y, x, 3, 9, sampled_values=sampled))

    expected = step((X, labels))
    with ncclsync.Towers(2, exact=True) as towers:
        assert_close([towers.run(step, (X, labels)).numpy()], [expected.numpy()], 1e-5)


PICTURES = np.ones((6, 5, 5, 1), "float32")
HIDDEN = {
    "noise": lambda x: tf.image.extract_glimpse(x, [9, 9], x[:, 0, :2, 0]),
    "regions": lambda x: tf.nn.fractional_avg_pool(x, [1, 1.4, 1.4, 1])[0],
}
NOT_HIDDEN = {
    "no noise": lambda x: tf.image.extract_glimpse(x, [9, 9], x[:, 0, :2, 0], noise="zero"),
    "regions of a seed": lambda x: tf.nn.fractional_avg_pool(x, [1, 1.4, 1.4, 1], seed=2)[0],
}


@pytest.mark.parametrize("name", [*HIDDEN, *NOT_HIDDEN])
def test_ops_that_draw_and_have_no_state(name):
    """By their attributes: of such numbers TensorFlow hides where they come from, unless a seed gives them."""
    with ncclsync.Towers(2, exact=True) as towers:
        if name in NOT_HIDDEN:
            assert_close([towers.run(NOT_HIDDEN[name], PICTURES).numpy()], [NOT_HIDDEN[name](PICTURES).numpy()], 1e-6)
            return
        with pytest.raises(ncclsync.NcclSyncError, match="TensorFlow hides"):
            towers.run(HIDDEN[name], PICTURES)
