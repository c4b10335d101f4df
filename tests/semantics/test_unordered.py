"""What towers compute alike has the same bits, though kernels add in no order, as many do on GPUs."""

import mmap
import pathlib
import re

import census
import numpy as np
import pytest
import tensorflow as tf

from ncclsync.ops import CollectiveKind
from ncclsync.program.cut import place
from ncclsync.program.program import Results
from ncclsync.program.trace import trace
from ncclsync.semantics.unordered import ADDS_SLICES, UNORDERED, UNORDERED_IF_FROZEN, added_up

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


def test_slices_that_a_mask_leaves_add_up_by_xla():
    """Of their number XLA knows a bound alone."""
    indices, slices, mask = RNG.integers(0, 4, 20), RNG.normal(size=(20, 3)), np.arange(20) % 3 > 0

    @tf.function(jit_compile=True)
    def masked(indices, slices, mask):
        at, added = added_up(tf.boolean_mask(indices, mask), tf.boolean_mask(slices, mask))
        return tf.math.unsorted_segment_sum(added, at, 4)

    expected = tf.math.unsorted_segment_sum(slices[mask], indices[mask], 4)
    np.testing.assert_allclose(masked(*map(tf.constant, (indices, slices, mask))), expected, rtol=1e-12)


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


# What TensorFlow calls ops otherwise, where it says that a GPU's kernel keeps no order; or why that changes nothing.
CALLED = {
    "CropAndResizeBackpropBoxes": "CropAndResizeGradBoxes",
    "CropAndResizeBackpropImage": "CropAndResizeGradImage",
    "DepthwiseConvBackpropFilter": "DepthwiseConv2dNativeBackpropFilter",
    "SparseTensorDenseMatmulOp": "SparseTensorDenseMatMul",
    "fused batch-norm backprop, when training is disabled,": "FusedBatchNormGradV3",
    "sorted segment reduction op": "SegmentSum",
    "unsorted segment reduction op": "UnsortedSegmentProd",
}
OF_NO_STEP = {
    "AdjustContrast": "TensorFlow's Python makes none any more",
    "DebugNumericSummaryV2 when tensor_debug_mode is CONCISE_HEALTH": "of TensorFlow's debugger",
    "DebugNumericSummaryV2 when tensor_debug_mode is FULL_HEALTH": "of TensorFlow's debugger",
    "SVD of matrices with 1 column": "the sign alone",
    "Scatter ops with ref inputs. Consider using resource variables instead if you want to run Scatter when op "
    "determinism is enabled": "of TensorFlow 1's variables",
}
SAYS = (
    rb"Determinism is not yet supported (?:in GPU implementation of|for) ([ -~]+?)\.?\x00",
    rb"[Dd]eterministic GPU implementation of ([ -~]+?) (?:is )?not available",
    rb"A deterministic GPU implementation of ([ -~]+?) is not currently available",
    rb"The GPU implementation of (\w+) that would have been executed is not deterministic",
)


@pytest.mark.slow
def test_what_tensorflow_says_keeps_no_order_is_listed():
    """Its kernels' own errors, with op determinism, name ops. And of each family of ops that add, all are listed."""
    library = pathlib.Path(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        said = {one.decode() for says in SAYS for one in re.findall(says, text)}
    assert len(said) > 15
    known = UNORDERED | UNORDERED_IF_FROZEN
    assert not {CALLED.get(one, one) for one in said} - known - OF_NO_STEP.keys()
    family = re.compile(r"SparseSegment(Sum|Mean|SqrtN)|(Sparse)?SoftmaxCross|MaxPool(3D)?Grad(V2|WithArgmax)?$")
    assert set(filter(family.match, census.with_gradient() | census.without_gradient())) <= known


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
