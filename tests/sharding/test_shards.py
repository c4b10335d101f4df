"""One batch into shards: the arithmetic, and the slicing of anything that a batch can hold."""

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.sharding.shards import Shards, open_specs, shard_batch, shard_sizes


@pytest.mark.parametrize("towers", range(1, 9))
def test_shard_sizes(towers):
    """They add up, differ by one at most, and the first towers get more."""
    for rows in range(40):
        sizes = shard_sizes(rows, towers)
        assert len(sizes) == towers and sum(sizes) == rows
        assert list(sizes) == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert shard_sizes(10, 4) == (3, 3, 2, 2)


def everything(rows):
    """A batch of all that a batch can hold; the values tell the row that they come from."""
    number = tf.range(rows, dtype=tf.float32)
    ragged = tf.RaggedTensor.from_row_lengths(
        tf.repeat(number, 1 + tf.range(rows) % 3), row_lengths=1 + tf.range(rows) % 3
    )
    wide = tf.range(rows, dtype=tf.int64)
    sparse = tf.SparseTensor(tf.stack([wide, wide % 3], 1), number, tf.stack([tf.cast(rows, tf.int64), 3]))
    return {
        "dense": (number, tf.stack([number, -number], 1)),
        "text": tf.strings.as_string(tf.cast(number, tf.int32)),
        "ragged": [ragged],
        "sparse": sparse,
        "none": None,
        "scalar": tf.constant(7.0),
    }


def dense(leaf):
    """Any leaf as an array; absent elements are -99."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(tf.sparse.reorder(leaf), -99.0).numpy()
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_tensor(-99.0, shape=[None, 3]).numpy()
    return leaf.numpy()


def assert_shards(shards, whole, rows, towers, weights=None):
    """Each tower holds its rows, in order; one without any holds the first row and a size of 0."""
    sizes = shard_sizes(rows, towers, weights)
    assert [int(size) for size in shards.sizes] == list(sizes)
    assert np.sum([share.fraction for share in shards.shares]) == pytest.approx(1.0, abs=1e-15)
    ends = np.cumsum(sizes)
    for i, batch in enumerate(shards.batches):
        share = shards.shares[i]
        np.testing.assert_allclose(share.fraction, sizes[i] / rows, rtol=1e-15)
        assert int(share.total) == rows
        assert int(share.begin) == (sum(sizes[:i]) if sizes[i] else 0)
        assert batch["none"] is None and float(batch["scalar"]) == 7.0
        rows_of_tower = slice(ends[i] - sizes[i], ends[i]) if sizes[i] else slice(0, 1)
        for key in ("dense", "text", "ragged", "sparse"):
            for one, other in zip(tf.nest.flatten(batch[key]), tf.nest.flatten(whole[key]), strict=True):
                np.testing.assert_array_equal(dense(one), dense(other)[rows_of_tower], err_msg=f"{key} {i}")


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("towers", range(1, 9))
def test_shards_of_a_batch_of_unknown_length(towers):
    """One graph serves every number of rows from 1 to 9; every kind of leaf keeps its kind."""
    specs = open_specs(everything(4))
    del specs["none"]  # which a signature cannot name

    @tf.function(input_signature=[specs])
    def split(batch):
        shards = shard_batch({**batch, "none": None}, towers)
        return shards.batches, shards.sizes, shards.shares

    for rows in range(1, 10):
        batch = everything(rows)
        del batch["none"]
        shards = Shards(*split(batch))
        assert isinstance(shards.batches[0]["dense"], tuple)
        assert isinstance(shards.batches[-1]["sparse"], tf.SparseTensor)
        assert_shards(shards, everything(rows), rows, towers)


@pytest.mark.parametrize("weights", [(3, 1), (1, 2, 5), (10, 1, 10), (1,)])
def test_shards_by_weights(weights):
    """The same: one graph for every number of rows, and for every weights. Any tower but the first may have no row."""
    specs = open_specs(everything(4))
    del specs["none"]
    towers = len(weights)

    @tf.function(input_signature=[specs, tf.TensorSpec([towers], tf.int32)])
    def split(batch, given):
        shards = shard_batch({**batch, "none": None}, towers, weights=given)
        return shards.batches, shards.sizes, shards.shares

    for rows in range(1, 10):
        batch = everything(rows)
        del batch["none"]
        for given in (weights, weights[::-1]):
            shards = Shards(*split(batch, tf.constant(given)))
            assert_shards(shards, everything(rows), rows, towers, given)
    empty = shard_batch(tf.zeros([0, 2]), towers, weights=tf.constant(weights))
    assert [float(share.fraction) for share in empty.shares] == [1.0] + [0.0] * (towers - 1)
    assert [batch.shape for batch in empty.batches] == [(0, 2)] * towers


def test_sizes_by_weights():
    """They add up, are within one row of what the weights say, and the first has a row; beyond int32 as well."""
    assert shard_sizes(10, 2, (3, 1)) == (8, 2)
    assert shard_sizes(2, 3, (10, 1, 10)) == (1, 1, 0)
    for weights in ((1, 1), (3, 1), (1, 2, 5), (1, 10**6), (7,)):
        for rows in (0, 1, 2, 5, 64, 2**31 - 1):
            sizes = shard_sizes(rows, len(weights), weights)
            assert sum(sizes) == rows and min(sizes) >= 0 and (sizes[0] or not rows)
            exact = [rows * weight / sum(weights) for weight in weights]
            assert all(abs(size - one) < 1 + 1e-6 for size, one in zip(sizes, exact, strict=True))
    weights = (10**6, 10**6 - 1)
    shards = shard_batch(tf.zeros([2**30 + 1, 0]), 2, weights=tf.constant(weights))
    assert tuple(map(int, shards.sizes)) == shard_sizes(2**30 + 1, 2, weights)


@pytest.mark.parametrize("rows, towers", [(9, 4), (8, 4), (2, 4), (1, 8), (3, 3), (5, 1)])
def test_shards_of_a_batch_of_known_length(rows, towers):
    """The same where the shapes are known; if it divides, the shards' shapes are known too."""
    assert_shards(shard_batch(everything(rows), towers), everything(rows), rows, towers)

    @tf.function(input_signature=[tf.TensorSpec([rows, 2])])
    def shape(x):
        shapes = [batch.shape[0] for batch in shard_batch(x, towers).batches]
        assert shapes == [rows // towers] * towers or rows % towers
        return tf.constant(0)

    shape(tf.zeros([rows, 2]))


def test_rows_that_differ():
    """Known while the graph is built: a ValueError with the shapes; else an error of the run, for each kind
    of leaf.
    """
    x, y = tf.zeros([4, 2]), tf.zeros([3])
    with pytest.raises(ValueError, match=r"same number of rows. Received: \(4, 2\) of \[0\], \(3,\) of \[1\]. Towers"):
        shard_batch((x, y), 2)
    for short in (y, tf.RaggedTensor.from_row_lengths(y, [1, 1, 1]), tf.sparse.from_dense(y[:, None] + 1)):
        split = tf.function(lambda b: shard_batch(b, 2).sizes, input_signature=[open_specs((x, short))])
        with pytest.raises(tf.errors.InvalidArgumentError, match="the same number of rows"):
            split((x, short))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("towers", [1, 3])
def test_no_rows(towers, known):
    """Of a batch without rows every tower gets none, and tower 0's results are the batch's."""
    batch = {"dense": tf.zeros([0, 2]), "text": tf.constant([], tf.string), "scalar": tf.constant(7.0)}
    batch["ragged"] = tf.RaggedTensor.from_row_lengths(tf.zeros([0]), tf.zeros([0], tf.int64))
    batch["sparse"] = tf.sparse.from_dense(tf.zeros([0, 3]))
    specs = tf.nest.map_structure(tf.type_spec_from_value, batch) if known else open_specs(batch)

    @tf.function(input_signature=[specs])
    def split(given):
        shards = shard_batch(given, towers)
        return shards.batches, shards.sizes, shards.shares

    shards = Shards(*split(batch))
    assert [int(size) for size in shards.sizes] == [0] * towers
    assert [float(share.fraction) for share in shards.shares] == [1.0] + [0.0] * (towers - 1)
    assert all(int(share.begin) == int(share.total) == 0 for share in shards.shares)
    for shard in shards.batches:
        assert float(shard.pop("scalar")) == 7.0
        assert isinstance(shard["ragged"], tf.RaggedTensor) and isinstance(shard["sparse"], tf.SparseTensor)
        for leaf in shard.values():
            assert dense(leaf).shape[0] == 0


def test_nothing_with_rows():
    """Scalars and None alone cannot be split."""
    with pytest.raises(ValueError, match="Expected a batch with at least one tensor whose first axis"):
        shard_batch({"a": tf.constant(1.0), "b": None}, 2)


def test_unknown_rank():
    """Whether a tensor has rows must be known."""

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def split(x):
        return shard_batch(x, 2).batches

    with pytest.raises(ValueError, match=r"to have a known rank. Received"):
        split(tf.zeros([3]))


def test_specs():
    """A batch's specs with the number of rows left open; scalars and None stay."""
    batch = {"x": tf.TensorSpec([8, 2]), "y": tf.TensorSpec([], tf.int32), "z": None}
    assert open_specs(batch) == {"x": tf.TensorSpec([None, 2]), "y": tf.TensorSpec([], tf.int32), "z": None}
    ragged = open_specs(tf.RaggedTensorSpec([8, None], tf.float32))
    assert isinstance(ragged, tf.RaggedTensorSpec) and ragged.shape.as_list() == [None, None]
    sparse = open_specs(tf.SparseTensorSpec([8, 3], tf.float32))
    assert isinstance(sparse, tf.SparseTensorSpec) and sparse.shape.as_list() == [None, 3]


def test_every_number_of_rows_on_every_number_of_towers():
    """The shards in order, without stand-ins, are the batch; 0 rows in sum never occur."""
    for rows in range(1, 10):
        for towers in range(1, 9):
            x = tf.reshape(tf.range(rows * 3), [rows, 3])
            shards = shard_batch(x, towers)
            kept = [b[:n] for b, n in zip(shards.batches, shards.sizes, strict=True)]
            np.testing.assert_array_equal(tf.concat(kept, 0), x)
            assert all(len(b) >= 1 for b in shards.batches)
