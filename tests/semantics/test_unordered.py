"""What towers compute alike has the same bits, though kernels add in no order, as many do on GPUs."""

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.ops import CollectiveKind
from ncclsync.program.cut import place
from ncclsync.program.program import Results
from ncclsync.program.trace import trace
from ncclsync.semantics.unordered import ADDS_SLICES, added_up

RNG = np.random.default_rng(0)
ROWS = tf.TensorSpec([None, 3], tf.float32)


@pytest.mark.parametrize("shape, width", [((40,), (3,)), ((5, 8), (2, 2)), ((0,), (3,)), ((1,), ()), ((65,), ())])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_slices_add_up_in_any_order(shape, width, jit_compile):
    """Their sums are those of the given slices, and in whatever order they are added, the same to the bit."""
    indices, slices = RNG.integers(-1, 6, shape), RNG.normal(size=(*shape, *width)).astype("float32")
    given = tf.constant(indices, tf.int32), tf.constant(slices)
    at, added = (one.numpy() for one in tf.function(added_up, jit_compile=jit_compile)(*given))
    sums = []
    for _ in range(6):
        sums.append(np.zeros((6, *width), "float32"))
        for i in RNG.permutation(len(at)):
            if at[i] >= 0:
                sums[-1][at[i]] += added[i]
        np.testing.assert_array_equal(sums[0], sums[-1])
    expected = tf.math.unsorted_segment_sum(slices.astype("float64"), indices, 6)
    np.testing.assert_allclose(sums[0], expected, rtol=1e-5, atol=1e-6)


def whole(x):
    """Of all rows: what all towers have after an all-reduce."""
    return tf.exp(tf.matmul(x, x, transpose_a=True))


def segments(x):
    return tf.math.unsorted_segment_sum(whole(x), [1, 0, 1], 2)


def scattered(x):
    return tf.scatter_nd([[1], [0], [1]], whole(x), [3, 3])


def looped(x):
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, tf.math.unsorted_segment_sum(y, [1, 0, 1], 3)), [0, whole(x)]
    )[1]


def ops_of(step, device):
    graph = place(trace(step, ROWS), device, Results.COMBINED, False).graph
    sent = [one.source for one in graph.exchanges.values() if one.collective.kind is CollectiveKind.BROADCAST]
    return graph, sent


def added(graph):
    return [op for op in graph.ops if op.type in ADDS_SLICES and "SelectV2" in graph.inputs[op.name][0]]


@pytest.mark.parametrize("device, changed", [("GPU:0", 1), ("CPU:0", 0)])
def test_what_all_compute_alike_has_one_order(device, changed):
    """On GPUs: slices are added up before the kernel adds them, or all towers take tower 0's result."""
    graph, sent = ops_of(segments, device)
    assert len(added(graph)) == changed and not sent
    for step, kind in ((scattered, "ScatterNd"), (looped, "while")):
        graph, sent = ops_of(step, device)
        assert any(kind in name for name in sent) == bool(changed), sent


def test_on_the_cpu_tower_0_gives_what_threads_add_in_no_order():
    """Also in a loop."""

    def counted(x):
        values = tf.reshape(whole(x), [-1])
        return tf.raw_ops.Bincount(arr=tf.cast(values, tf.int32), size=4, weights=values)

    def in_a_loop(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y + counted(x)), [0, tf.zeros([4])])[1]

    for step, kind in ((counted, "Bincount"), (in_a_loop, "while")):
        _, sent = ops_of(step, "CPU:0")
        assert any(kind in name for name in sent), sent


@pytest.mark.parametrize("device", ["GPU:0", "CPU:0"])
def test_what_towers_sum_of_their_rows_stays(device):
    """The all-reduce after it gives all the same."""
    graph, sent = ops_of(lambda x: tf.math.unsorted_segment_sum(x, tf.range(tf.shape(x)[0]) % 2, 2), device)
    assert not added(graph) and not sent
    assert any(one.collective.kind is CollectiveKind.ALL_REDUCE for one in graph.exchanges.values())


def test_deterministic_kernels_keep_an_order(monkeypatch):
    """With op determinism nothing is added."""
    monkeypatch.setattr("ncclsync.compat.tensorflow.is_op_determinism_enabled", lambda: True)
    graph, sent = ops_of(segments, "GPU:0")
    assert not added(graph) and not sent
