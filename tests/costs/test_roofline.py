"""The time of ops by arithmetic and memory, for any number of rows."""

import numpy as np
import pytest
import tensorflow as tf

from ncclsync.costs.cost import Alike, StepWork, Whole
from ncclsync.costs.links import CLUSTERS
from ncclsync.costs.losses import losses_of
from ncclsync.costs.roofline import CORE, COUNTS, GPU, POWERS, START_S, Roofline, Size, seconds
from ncclsync.semantics.axes import Axes, given_rows
from ncclsync.semantics.functions import Functions


def works(function, shape):
    """{op type: its work}, of a function of a batch's rows."""
    graph = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(shape)).graph
    functions = Functions(graph.as_graph_def().library.function, graph)
    given = graph.inputs[0]
    roofline = Roofline(functions, Axes(functions, {given.name: given_rows(given)}))
    return {op.type: roofline.work(op) for op in graph.get_operations()}


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_products_grow_with_the_rows(rows):
    """Features of rows grow with them, rows by rows with their square."""
    found = works(lambda x: tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True)), [None, 5])
    multiplications, moved, kernels = found["MatMul"] @ float(rows) ** np.arange(POWERS)
    assert (multiplications, moved, kernels) == (rows * 5 * rows, 4 * (2 * rows * 5 + rows * rows), 1)
    assert found["Cholesky"][0] @ float(rows) ** np.arange(POWERS) == rows**3


def test_loops_are_counted_by_their_trips():
    """Of a fixed number, and one for each row."""

    def body(x, trips):
        return tf.while_loop(
            lambda i, _: i < trips,
            lambda i, y: (i + 1, tf.matmul(y, tf.ones([5, 5]))),
            [0, x],
            maximum_iterations=trips,
        )

    fixed = works(lambda x: body(x, 3)[1], [None, 5])["StatelessWhile"]
    assert fixed[0].tolist() == [0, 3 * 25, 0, 0]
    each = works(lambda x: body(x, tf.shape(x)[0])[1], [None, 5])["StatelessWhile"]
    assert each[0].tolist() == [0, 0, 25, 0]


def test_time_is_the_longest_of_three():
    """Arithmetic, memory, launches; what grows with the rows is divided among the towers. A core launches, too."""
    work = np.zeros([3, COUNTS, POWERS])
    work[0, 0, 1] = 1e9
    work[1, 1, 0] = 1e9
    work[:, 2, 0] = 1
    once = [2e9 * 64 / GPU.operations_per_byte / GPU.bytes_per_s, 1e9 / GPU.bytes_per_s, START_S]
    assert seconds(work, 64).sum(axis=0).tolist() == pytest.approx(once)
    assert seconds(work, 64, parts=4).sum(axis=0).tolist() == pytest.approx([once[0] / 4, *once[1:]])
    starts, rest = seconds(work, 64, machine=CORE)
    assert starts.tolist() == [START_S] * 3 and rest[1] == pytest.approx(1e9 / CORE.bytes_per_s)


def test_losses_are_shares_of_the_step():
    """Bytes by the link, and what every tower computes beyond its own rows; gradients travel meanwhile."""
    own, alike = np.zeros([1, COUNTS, POWERS]), np.zeros([COUNTS, POWERS])
    own[0, 1, 1] = alike[1, 1] = 4e6
    whole = Whole("MatMul", "here", "MatMul", Size(1e6, 1))
    rows, towers = 100, 4
    computed, received = 4e8 / GPU.bytes_per_s, 0.75 * 1e8 / CLUSTERS["nvlink"].narrowest(towers)
    step = computed / 4 + computed + received
    found = losses_of(StepWork(own, own[:0], (Alike("there", "Sort", alike),), (whole,)), 0, rows, towers)
    assert found.share == found.needed == pytest.approx((0.75 * computed + received) / step)
    assert {one.place: one.share for one in found.places} == pytest.approx(
        {"there": 0.75 * computed / step, "here": received / step}
    )
    work = StepWork(own, own[:0], (), (whole,))
    assert losses_of(work, int(1e9), rows, towers).share < losses_of(work, 0, rows, towers).share
    assert losses_of(StepWork(own, own[:0], (), ()), 0, rows, towers).share == 0


def test_towers_that_share_cores_start_and_update_each():
    """Each starts all ops, and updates all weights; GPUs do so at once. Slices of sparse gradients have rows."""
    own, same = np.zeros([2, 1, COUNTS, POWERS])
    own[0, 2, 0] = 1000  # kernels
    same[0, 1, 1] = 1e6  # bytes of slices
    rows, towers, work = 100, 4, StepWork(own, same, (), ())
    assert losses_of(work, 0, rows, towers).share == 0
    found = losses_of(work, 0, rows, towers, machine=CORE)
    assert found.needed == 0 and found.same / found.starts == pytest.approx(1e8 / CORE.bytes_per_s / 0.004, rel=0.1)
    assert 0.6 < found.share < 0.75 and "starting ops on each tower" in found.by_cores
