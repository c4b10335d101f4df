"""`Local` without other processes: what it takes, which rows each process gets, and what that costs."""

import statistics
import time

import numpy as np
import pytest
import tensorflow as tf

import ncclsync
from ncclsync.errors import ProcessError
from ncclsync.sharding.shards import shard_batch
from ncclsync.training.local import check_alone


def part(begin, end, batch_size=16):
    """Samples that are numbers, of one process."""
    return ncclsync.Local(tf.data.Dataset.range(begin, end), batch_size=batch_size)


def test_is_a_dataset_of_batches():
    """In one process."""
    batches = list(part(0, 40))
    assert [len(batch) for batch in batches] == [16, 16, 8] and part(0, 40).cardinality() == 3
    with pytest.raises(TypeError, match="dense tensors, a sample each"):
        ncclsync.Local(tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]])), batch_size=2)
    with pytest.raises(TypeError, match=r"from_tensor_slices makes it of arrays. Received: <class 'tuple'>$"):
        ncclsync.Local((np.zeros([9, 4]), np.zeros(9)), batch_size=2)
    with pytest.raises(TypeError, match="batch_size to be a whole number"):
        ncclsync.Local(tf.data.Dataset.range(3), batch_size=2.0)
    with pytest.raises(ValueError, match="at least 1"):
        part(0, 3, 0)


def test_rows_of_each_process():
    """Towers have the rows of the batches of all processes, concatenated; whose part ends earlier has none."""
    parts = [(37, 2, 16), (7, 1, 16)]
    found = []
    for process, (begin, end, ranks) in enumerate([(0, 37, range(2)), (37, 44, range(2, 3))]):
        own = part(begin, end).of_process(process, parts)
        assert own.cardinality() == 4
        rows = []
        for batch in own:
            sizes = own.sizes.numpy()
            shards = shard_batch(batch, 3, ranks, held=tf.constant(sizes))
            held = [one[: sizes[rank]] for one, rank in zip(shards.batches, ranks, strict=True)]
            rows.append(np.concatenate(held).tolist())
            assert int(shards.shares[0].total) == sizes.sum() and all(len(one) for one in shards.batches)
        found.append(rows)
    assert found[0] == [[*range(11)], [*range(11, 22)], [*range(22, 33)], [*range(33, 37)]]
    assert found[1] == [[*range(37, 42)], [42, 43], [], []]


@pytest.mark.parametrize(
    "parts, words",
    [
        (
            [(37, 2, 16), (7, 1, 17)],
            "the same batch_size in all processes.*process 1: 7 samples for 1 towers, batch_size=17",
        ),
        ([(37, 2, 16), (0, 1, 16)], "samples, and rows of each batch, for each of 2 processes"),
        ([(37, 16, 16), (7, 1, 16)], "samples, and rows of each batch, for each of 2 processes"),
        ([(37, 2, 16), (70, 1, 16)], "as many batches in process 0 as in any other: give it the largest part"),
        ([(1 << 62, 2, 16), (70, 1, 16)], "let all end, or none. Received: process 0: samples without an end"),
    ],
)
def test_parts_that_make_no_batches(parts, words):
    """Are refused by words that name them."""
    with pytest.raises(ProcessError, match=words):
        part(0, 37).of_process(0, parts)


def test_graphs_of_one_number_of_towers():
    """Read one variable, so that a new `Local` needs no new graphs."""
    parts = [(37, 2, 16), (7, 1, 16)]
    assert part(0, 37).of_process(0, parts).sizes is part(3, 40).of_process(0, parts).sizes
    assert part(0, 37).of_process(0, parts).sizes is not part(0, 37).of_process(0, parts[:1]).sizes


@pytest.mark.parametrize(
    "made",
    [
        lambda own: own.prefetch(2),
        lambda own: own.map(lambda one: one + 1).batch(2),
        lambda own: tf.data.Dataset.zip((own, own)),
        lambda own: ncclsync.Local(own.unbatch(), batch_size=4),
    ],
)
def test_is_given_alone(made):
    """Not as a part of a dataset, which batches would be of this process alone."""
    check_alone(part(0, 4))
    check_alone([part(0, 4)])
    with pytest.raises(ValueError, match="Give the Local itself to fit, and map, shuffle or prefetch"):
        check_alone(made(part(0, 4)))


@pytest.mark.slow
def test_work_of_half():
    """A pass over half of the JPEGs takes a process at most 0.6 of the CPU seconds of all."""
    noise = np.random.default_rng(0).integers(0, 255, (96, 512, 512, 3), dtype=np.uint8)
    files = [tf.io.encode_jpeg(image).numpy() for image in noise]

    def decoded(data):
        return tf.image.resize(tf.io.decode_jpeg(data, 3), (96, 96))

    whole = tf.data.Dataset.from_tensor_slices(files).map(decoded).batch(32)
    half = tf.data.Dataset.from_tensor_slices(files[::2]).map(decoded)
    half = ncclsync.Local(half, batch_size=32).of_process(0, [(48, 2, 32)] * 2)

    def seconds(data):
        began = time.process_time()
        assert len([*data]) == 3
        return time.process_time() - began

    seconds(whole), seconds(half)
    ratio = statistics.median(seconds(half) / seconds(whole) for _ in range(7))
    print(f"half / whole: {ratio:.2f}")
    assert ratio <= 0.6
