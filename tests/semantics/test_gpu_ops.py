"""The rules of ops that GPUs alone have, by a stand-in for their kernels: a loop with the documented layout."""

import types

import numpy as np
import pytest
import tensorflow as tf

from ncclsync import NcclSyncError
from ncclsync.semantics import rules
from ncclsync.semantics.draws import check_draws
from ncclsync.semantics.placements import KEPT, REPLICATE, SUM, Shard

TIME, ROWS, FEATURES, UNITS = 4, 7, 3, 2
SIZES = 3, 2, 2
RNG = np.random.default_rng(0)


def lstm(time_major, x, h, c, params, lengths):
    """One layer as cuDNN has it: gates i, f, c, o, two biases each, and zeros behind a row's last step."""
    if not time_major:
        x, h, c = (tf.transpose(one, [1, 0, 2]) for one in (x, h, c))
    count = 4 * UNITS
    kernel, recurrent, biases = tf.split(params, [count * FEATURES, count * UNITS, 2 * count])
    kernel, recurrent = tf.reshape(kernel, [count, FEATURES]), tf.reshape(recurrent, [count, UNITS])
    state, cell, outputs = h[0], c[0], []
    for t in range(TIME):
        gates = x[t] @ tf.transpose(kernel) + state @ tf.transpose(recurrent) + biases[:count] + biases[count:]
        i, f, new, o = tf.split(gates, 4, axis=1)
        goes_on = (t < lengths)[:, None]
        cell = tf.where(goes_on, tf.sigmoid(f) * cell + tf.sigmoid(i) * tf.tanh(new), cell)
        state = tf.where(goes_on, tf.sigmoid(o) * tf.tanh(cell), state)
        outputs.append(tf.where(goes_on, state, 0.0))
    results = tf.stack(outputs), state[None], cell[None]
    return results if time_major else tuple(tf.transpose(one, [1, 0, 2]) for one in results)


def lstm_back(time_major, x, h, c, params, lengths, *others):
    """The gradients that `CudnnRNNBackpropV3` returns; the last three of `others` are those of the results."""
    with tf.GradientTape() as tape:
        tape.watch([x, h, c, params])
        results = lstm(time_major, x, h, c, params, lengths)
    return tape.gradient(results, [x, h, c, params], others[-3:])


def operands(time_major):
    """Those of `lstm_back`: the arguments and results of a call, and gradients of the results."""
    width = 4 * UNITS * (FEATURES + UNITS + 2)
    shapes = (TIME, ROWS, FEATURES), (1, ROWS, UNITS), (1, ROWS, UNITS)
    turned = (lambda one: one) if time_major else (lambda one: np.swapaxes(one, 0, 1))
    given = [tf.constant(turned(RNG.normal(size=shape))) for shape in shapes] + [tf.constant(RNG.normal(size=width))]
    given.append(tf.constant(RNG.integers(1, TIME + 1, ROWS), tf.int32))
    results = lstm(time_major, *given)
    return [*given, *results, *(tf.constant(RNG.normal(size=one.shape)) for one in results)]


def ops_of(time_major):
    """`CudnnRNNV3`, and its gradient, as the trace has them."""
    with tf.Graph().as_default():
        given = [tf.compat.v1.placeholder(one.dtype, [None] * one.shape.rank) for one in operands(time_major)]
        arguments = {"time_major": time_major, "rnn_mode": "lstm"}
        names = ["input", "input_h", "input_c", "params", "sequence_lengths"]
        forward = tf.raw_ops.CudnnRNNV3(**dict(zip(names, given, strict=False)), **arguments)
        tf.gradients(forward[:3], given[:4], given[8:])
        kinds = {op.type: op for op in given[0].graph.get_operations()}
    return kinds["CudnnRNNV3"], kinds["CudnnRNNBackpropV3"]


def rule_of(op, placed):
    """Ask the rule of an op; return how it takes its inputs, and how its results are placed."""
    call = types.SimpleNamespace(op=op, inputs=list(placed))
    call.require = call.inputs.__setitem__
    return call.inputs, rules.RULES[op.type](call)


def joined(parts, placed):
    return sum(parts) if placed == SUM else np.concatenate(parts, placed.axis)


@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
def test_rows_of_cudnns_lstm(time_major, which):
    """A tower's call with its rows, and what the rule says of the results: one device's."""
    op, run, given = ops_of(time_major)[which], (lstm, lstm_back)[which], operands(time_major)
    given = given if which else given[:5]
    spare = [KEPT] * (len(op.inputs) - len(given))
    rows = Shard(1 if time_major else 0)
    taken, made = rule_of(op, [rows, *[REPLICATE] * (len(given) - 1), *spare])
    assert [i for i, one in enumerate(taken) if one == REPLICATE] == [3]  # the weights
    parts = []
    for begin, size in zip(np.cumsum([0, *SIZES]), SIZES, strict=False):
        places = np.arange(begin, begin + size)
        own = [
            one if p == REPLICATE else tf.gather(one, places, axis=p.axis) for one, p in zip(given, taken, strict=False)
        ]
        parts.append(run(time_major, *own))
    for expected, part, placed in zip(run(time_major, *given), zip(*parts, strict=True), made, strict=False):
        np.testing.assert_allclose(joined(part, placed), expected, rtol=1e-10, atol=1e-12)
    assert made[3] == (SUM if which else KEPT)


def test_rows_of_cudnns_gru():
    """Without a state of the cell the op has a scalar in its place; and rows along time are none of its rule."""
    with tf.Graph().as_default():
        x, h = tf.compat.v1.placeholder(tf.float32, [None, 4, 3]), tf.compat.v1.placeholder(tf.float32, [None, 1, 2])
        lengths = tf.compat.v1.placeholder(tf.int32, [None])
        made = tf.raw_ops.CudnnRNNV3(
            input=x, input_h=h, input_c=0.0, params=[1.0], sequence_lengths=lengths, rnn_mode="gru", time_major=False
        )
    taken, placed = rule_of(made[0].op, [Shard(0), *[REPLICATE] * 4])
    assert taken == [Shard(0), Shard(0), REPLICATE, REPLICATE, Shard(0)]
    assert placed == [Shard(0), Shard(0), REPLICATE, KEPT, KEPT]
    assert rule_of(made[0].op, [Shard(1), *[REPLICATE] * 4])[1] is None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cudnns_rnn_draws_only_what_it_drops(dropout):
    """With `exact=True` and the like it is refused for its hidden state only if it drops."""

    @tf.function
    def step(x):
        state = tf.zeros([tf.shape(x)[0], 1, UNITS])
        weights, lengths = tf.zeros([4 * UNITS * (FEATURES + UNITS + 2)]), tf.fill([tf.shape(x)[0]], TIME)
        arguments = {"rnn_mode": "lstm", "time_major": False, "dropout": dropout}
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.raw_ops.CudnnRNNV3(
                input=x, input_h=state, input_c=state, params=weights, sequence_lengths=lengths, **arguments
            )
        return tape.gradient(out[0], x)

    graph = step.get_concrete_function(tf.TensorSpec([None, TIME, FEATURES])).graph
    if not dropout:
        check_draws(graph, graph.as_graph_def(), refuses=True)
    else:
        with pytest.raises(NcclSyncError, match=r"Received: CudnnRNNV3"):
            check_draws(graph, graph.as_graph_def(), refuses=True)
