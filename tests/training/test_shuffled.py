"""`Shuffled`: one order per pass, from the seed alone, divided among the towers."""

import copy
import pickle
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data, mlp, on_towers, state

from ncclsync import Shuffled, Towers
from ncclsync.sharding.shards import shard_sizes
from ncclsync.towers.feeding import CountingDataset
from ncclsync.towers.layout import Layout

X, Y = data(rows=61)


def source(rows=10, batch_size=4, seed=3):
    return Shuffled(np.arange(rows), batch_size=batch_size, seed=seed)


def rows_of(batches):
    return [batch[0].numpy().tolist() for batch in batches]


def all_rows(batches):
    return [row for batch in rows_of(batches) for row in batch]


def test_order_depends_on_seed_and_epoch_alone():
    """A permutation, another for each pass and seed, in any batches; the first one is pinned for ever."""
    orders = {(seed, epoch): tuple(source(50, seed=seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert orders[1, 1] == tuple(source(50, batch_size=7, seed=1).order(1))
    # Bits that NumPy promises to keep; another order would not resume what an earlier version began.
    assert source().order(0).tolist() == [3, 2, 9, 0, 8, 7, 1, 4, 5, 6]


def test_batches_are_the_order_cut():
    """Nested arrays row by row, all of them, the last batch smaller; each iteration is the next pass."""
    numbers = np.arange(10, dtype="float32")
    one = Shuffled({"a": numbers, "b": [numbers, -numbers]}, 2 * numbers, numbers, batch_size=4, seed=3)
    assert len(one) == 3
    for epoch in range(2):
        batches = list(one)
        assert [len(weights) for _, _, weights in batches] == [4, 4, 2]
        expected = numbers[one.order(epoch)]
        for pick in (lambda x: x["a"], lambda x: x["b"][0], lambda x: -x["b"][1]):
            np.testing.assert_array_equal(np.concatenate([pick(x) for x, _, _ in batches]), expected)
        np.testing.assert_array_equal(np.concatenate([y for _, y, _ in batches]), 2 * expected)
        assert one.position == one.upcoming == (epoch + 1, 0)


def test_methods_of_a_dataset_stay():
    """Only `cardinality` is known better; `take` once was the name of another method."""
    own = {name for kind in (Shuffled, CountingDataset) for name in vars(kind) if name[0] != "_"}
    assert {name for name in own if hasattr(tf.data.Dataset, name)} == {"cardinality"}
    data = source(10, batch_size=4)
    assert [len(x) for (x,) in data.take(2)] == [4, 4]
    assert data.position == (0, 8)


def as_given(*parts):
    """What `load` gets."""
    return parts


def loading(read, rows=11, batch_size=5):
    """Indices, of which each is noted in `read` when it is loaded; and arrays that are what is loaded."""

    def load(index, weight):
        noted = tf.numpy_function(lambda one: read.append(int(one)) or one, [index], tf.int64)
        return {"a": tf.ensure_shape(noted, []) * 10}, weight

    numbers = np.arange(rows)
    options = {"batch_size": batch_size, "seed": 3}
    return Shuffled(numbers, -numbers, **options, load=load), Shuffled({"a": 10 * numbers}, -numbers, **options)


def test_loaded_samples_are_batched():
    """In the order, each once a pass; from any place; a copy loads, too."""
    read = []
    one, expected = loading(read)
    for place in ((0, 0), (1, 0), (2, 3)):
        read.clear()
        one.seek(*place)
        expected.seek(*place)
        for (x, y), (other_x, other_y) in zip(one, expected, strict=True):
            np.testing.assert_array_equal(x["a"], other_x["a"])
            np.testing.assert_array_equal(y, other_y)
        assert sorted(read) == sorted(one.order(place[0])[place[1] :])
        assert one.position == expected.position
    (batch,) = Shuffled(np.arange(4), batch_size=4, seed=0, load=tf.square)
    assert sorted(batch[0].numpy()) == [0, 1, 4, 9]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("towers, batch_size", [(4, 5), (4, 8), (3, 11), (4, 2), (2, 1)])
def test_rows_of_some_towers(loads, towers, batch_size):
    """Each tower's rows are those of the whole batch, and no row is read for two; the place is the source's."""
    read = []
    whole, plain = loading(read, batch_size=batch_size)
    batches = list(plain)
    stand_ins = 0
    for first, last in [(0, 1), (1, towers - 1), (towers - 1, towers)]:
        if first == last:
            continue
        source = whole if loads else plain
        source.seek(0)
        for (x, y), (given_x, given_y) in zip(
            source.of_process(Layout(("CPU:0",) * (last - first), range(first, last), towers)), batches, strict=True
        ):
            assert len(y) == len(x["a"]) == len(given_y)
            sizes = shard_sizes(len(given_y), towers)
            own = slice(sum(sizes[:first]), sum(sizes[:last]))
            stand_ins += own.start == own.stop
            np.testing.assert_array_equal(x["a"][own], given_x["a"][own])
            np.testing.assert_array_equal(y[own], given_y[own])
        assert source.position == (1, 0)
    if loads:
        assert len(read) == 11 + stand_ins
        assert set(read) == set(range(11))


def test_position_is_what_was_handed_out():
    """To the sample, whatever is prefetched; a pass that was left begins again; `seek` goes anywhere."""
    one = source()
    iterator = iter(one)
    for handed_out in range(0, 10, 4):
        time.sleep(0.02)  # for whoever reads ahead
        assert (one.position, one.upcoming) == ((0, handed_out), (0, 0))
        if handed_out < 8:
            next(iterator)
    assert all_rows(one) == one.order(0).tolist()
    one.seek(5, 3)
    assert one.position == one.upcoming == (5, 3)
    assert rows_of(one) == [one.order(5)[3:7].tolist(), one.order(5)[7:].tolist()]
    assert one.position == (6, 0)
    one.seek(2, 10)
    assert one.position == (3, 0)
    assert all_rows(one) == one.order(3).tolist()


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_towers_divide_the_order(towers):
    """What the towers see, one behind the other, is the order; batches of any size."""
    one = source(rows=11, batch_size=5)

    def rows(batch):
        return tf.identity(batch[0])

    with Towers(towers) as state_of_towers:
        seen = [state_of_towers.run(rows, batch, per_tower=True) for batch in one]
    parts = [part.numpy() for step in seen for part in step if part is not None]
    np.testing.assert_array_equal(np.concatenate(parts), one.order(0))
    assert [sum(part is not None for part in step) for step in seen] == [towers, towers, 1]


@pytest.mark.slow
def test_fit_trains_in_that_order():
    """As one device on the arrays in the order of each pass; a second fit goes on with the next pass."""
    model, alone = on_towers(mlp, 3), mlp()
    shuffled = Shuffled(X, Y, batch_size=20, seed=7)
    for epochs in (2, 1):
        model.fit(shuffled, epochs=epochs, shuffle=False, verbose=0)
    for epoch in range(3):
        order = shuffled.order(epoch)
        alone.fit(X[order], Y[order], batch_size=20, shuffle=False, verbose=0)
    assert_close(state(model), state(alone))


def test_several_epochs_of_fit_in_one_pass():
    """`steps_per_epoch`, `steps_per_execution` and validation do not lose or repeat a sample."""
    seen = []

    class Notes(keras.Model):
        def call(self, x):
            return tf.cast(x[:, None], tf.float32)

        def train_step(self, batch):
            tf.numpy_function(lambda x: seen.extend(x.tolist()), [batch[0]], [])
            return {"loss": tf.constant(0.0)}

    model = Notes()
    model.compile("sgd", "mse", steps_per_execution=2)
    one = source(rows=15)
    model.fit(one, epochs=4, steps_per_epoch=2, shuffle=False, verbose=0, validation_data=(X[:2, 0], Y[:2]))
    assert seen == [*one.order(0), *one.order(1)]


@pytest.mark.parametrize(
    "arguments, options, error",
    [
        ([np.zeros(3)], {"batch_size": 0}, "batch_size to be at least 1. Received: 0"),
        ([np.zeros(3)], {"batch_size": 2.0}, "batch_size to be a whole number. Received: 2.0"),
        ([np.zeros(3)], {"seed": -1}, "seed to be at least 0. Received: -1"),
        ([np.zeros(3)], {"seed": None}, "seed to be a whole number. Received: None"),
        ([np.zeros(3), np.zeros(4)], {}, r"same number of samples.*Received: shapes \[\(3,\), \(4,\)\]"),
        ([np.zeros(3)], {"load": "x"}, "load to be a function of a sample. Received: 'x'"),
        ([np.zeros([0, 2])], {}, "at least one. Received"),
        ([np.zeros(3), np.float32(1)], {}, "same number of samples"),
        ([np.zeros(3), None, np.zeros(3)], {}, "y where sample_weight is given. Received: y=None"),
    ],
)
def test_refused(arguments, options, error):
    """What is no such data."""
    with pytest.raises((TypeError, ValueError), match=error):
        Shuffled(*arguments, **{"batch_size": 2, "seed": 0, **options})


def test_no_such_place():
    """A refused `seek` leaves the data where they were."""
    one = source()
    for place in ((-1, 0), (0, 11)):
        with pytest.raises(ValueError, match=f"0 to 10 samples. Received: {place[0]} and {place[1]}"):
            one.seek(*place)
    assert one.upcoming == (0, 0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "duplicate",
    [lambda data: pickle.loads(pickle.dumps(data)), copy.deepcopy, copy.copy],
    ids=["pickle", "deepcopy", "copy"],
)
@pytest.mark.parametrize("load", [None, as_given])
def test_duplicates_stand_where_it_stands(duplicate, load):
    """Also in the middle of a pass; then each goes on by itself."""
    numbers = np.arange(10, dtype="float32")
    words = np.array([str(number) for number in range(10)])
    arrays = {"a": numbers, "b": [words], "c": None}, numbers, numbers / 2
    data = Shuffled(*arrays, batch_size=4, seed=3, load=load)
    list(data)
    iterator = iter(data)
    next(iterator)
    twin = duplicate(data)
    assert (twin.batch_size, twin.seed, twin.rows) == (4, 3, 10) and type(twin) is Shuffled
    assert twin.position == data.position == (1, 4) and twin.upcoming == data.upcoming == (1, 0)
    twin.seek(*twin.position)
    rest, expected = list(twin), list(iterator)
    for one, other in zip(rest, expected, strict=True):
        for left, right in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            np.testing.assert_array_equal(left, right)
    assert twin.position == (2, 0) and data.position == (2, 0)
    list(twin)
    assert twin.position == (3, 0) and data.position == (2, 0)
