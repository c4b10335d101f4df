"""The drift sentinel: `@nccl_parallel(check_every=...)` finds a tower that holds what no other does."""

import logging
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_towers_agree, data, mlp, on_towers

from ncclsync import DivergenceError, Health, Towers
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops.comparing import checksum, distance
from ncclsync.towers.watch import outliers

X, Y = data(rows=60)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "complex128", "bool")


def flip(variable, element, bit):
    """Flip one bit of a variable, past whatever watches its methods."""
    words = variable.numpy().reshape(-1).view(f"uint{8 * variable.dtype.size}")
    words[element] ^= words.dtype.type(1 << bit)
    value = words.view(variable.dtype.as_numpy_dtype).reshape(variable.shape)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.constant(value, variable.dtype))


class Flip(keras.callbacks.Callback):
    """A bit of one tower's kernel turns, after one step."""

    def __init__(self, tower, step, bit=0):
        super().__init__()
        self.tower, self.step, self.bit, self.steps = tower, step, bit, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += self.model.steps_per_execution
        if self.steps == self.step:
            kernel = tf_compat.backend_variable(self.model.layers[0].kernel)
            flip(self.model.towers.replicas.of(kernel)[self.tower], 7, self.bit)


def fit(model, callbacks=()):
    model.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    """Any flipped bit of any element changes the checksum; the same bits, NaNs too, give the same."""
    dtype = tf.dtypes.as_dtype(dtype)
    raw = np.random.default_rng(0).bytes(7 * dtype.size)
    if dtype == tf.bool:
        raw = bytes(byte & 1 for byte in raw)
    if dtype.is_floating:
        raw = np.array([np.nan], dtype.as_numpy_dtype).tobytes() + raw[dtype.size :]

    def checksum_of(data):
        return int(checksum(tf.constant(np.frombuffer(data, dtype.as_numpy_dtype))))

    expected = checksum_of(raw)
    assert checksum_of(bytes(raw)) == expected
    bits = range(0, 8 * len(raw), 8) if dtype == tf.bool else range(8 * len(raw))
    for bit in bits:
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert checksum_of(bytes(changed)) != expected, bit


def test_order_counts():
    """Two elements that have changed places are not the same, nor are any two equal flips of a low bit."""
    assert int(checksum(tf.constant([1.0, 2.0, 3.0, 4.0]))) != int(checksum(tf.constant([3.0, 4.0, 1.0, 2.0])))
    assert int(checksum(tf.constant([8, 9], tf.int64))) != int(checksum(tf.constant([9, 8], tf.int64)))
    assert int(checksum(tf.constant(["a", "b"]))) != int(checksum(tf.constant(["a", "c"])))
    assert int(checksum(tf.zeros([0]))) == 0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    "dtype, one, other, expected",
    [
        ("float64", [1.0, 2.0, -3.0], [1.0, 2.5, -3.125], 0.5),
        ("float32", [NAN, INF, -INF], [NAN, INF, -INF], 0.0),
        ("float32", [NAN, 1.0], [2.0, 1.0], INF),
        ("float16", [INF], [1.0], INF),
        ("bfloat16", [256.0], [254.0], 2.0),
        ("complex64", [3 + 4j, 1j], [0j, 1j], 5.0),
        ("complex128", [complex(NAN, 1.0)], [complex(NAN, 1.0)], 0.0),
        ("int64", [7, -1], [4, -1], 3.0),
        ("uint8", [0, 1], [255, 1], 255.0),
        ("bool", [True, False], [True, True], 1.0),
        ("string", ["a", "b"], ["a", "b"], 0.0),
        ("string", ["a", "b"], ["a", "c"], INF),
        ("float32", [], [], 0.0),
    ],
)
def test_distance(dtype, one, other, expected, in_graph):
    """Of every dtype, in a graph and outside, and whichever comes first."""
    measured = tf.function(distance) if in_graph else distance
    shape = [1] * 9 + [-1]  # of as many axes as TensorFlow's ops refuse that take two shapes
    one, other = (tf.reshape(tf.constant(values, dtype), shape) for values in (one, other))
    assert float(measured(one, other)) == float(measured(other, one)) == expected


@pytest.mark.parametrize(
    "checksums, expected",
    [((1, 1, 1), ()), ((1, 2, 1), (1,)), ((2, 1, 1), (0,)), ((1, 2), (1,)), ((1, 2, 3), (1, 2)), ((5,), ())],
)
def test_outliers(checksums, expected):
    """Those that differ from most; where none are most, from tower 0."""
    assert outliers(checksums) == expected


def test_flipped_bit_is_named():
    """The lowest bit of one weight on one tower: the error names it, and heals nothing."""
    model = on_towers(mlp, 3, health=Health(check_every=2))
    with pytest.raises(DivergenceError, match=r"after step 4, .*: sequential.*/kernel on tower 2") as caught:
        fit(model, [Flip(2, 3)])
    error = caught.value
    assert error.step == 4
    assert set(error.variables.values()) == {(2,)}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step, again.variables) == (str(error), error.step, error.variables)
    assert model.towers.divergence() > 0.0
    model.towers.broadcast()
    fit(model)
    assert_towers_agree(model)


@pytest.mark.slow
def test_repair_is_logged(caplog):
    """`on_divergence="repair"`: tower 0's values everywhere, and the same words as a warning, once."""
    with caplog.at_level(logging.WARNING, logger="ncclsync"):
        model = on_towers(mlp, 3, health=Health(check_every=1, on_divergence="repair"))
        fit(model, [Flip(1, 1)])
    told = [r.getMessage() for r in caplog.records if "after step" in r.getMessage()]
    assert len(told) == 1
    assert "after step 2, others than the rest: sequential" in told[0]
    assert "kernel on tower 1" in told[0] and "tower 0's values were sent to all" in told[0]
    assert_towers_agree(model)
    # Where it is tower 0 that differs from most, its values repair nothing.
    with pytest.raises(DivergenceError, match="kernel on tower 0"):
        fit(model, [Flip(1, 1), Flip(2, 1)])


@pytest.mark.slow
def test_healthy_towers_and_what_python_writes():
    """Nothing is found in health, for all that seeds differ; nor is what Python has written into tower 0."""

    def factory():
        model = mlp()
        model.add(keras.layers.Dropout(0.5))
        return model

    model = on_towers(factory, 2, health=Health(check_every=1))
    fit(model)
    model.layers[0].kernel.assign(model.layers[0].kernel * np.nan)
    fit(model)


@pytest.mark.slow
def test_steps_are_counted_as_they_run():
    """With `steps_per_execution`, where the last call makes fewer, and `train_on_batch`; not `evaluate`."""
    model = on_towers(lambda: mlp(steps_per_execution=2), 2, health=Health(check_every=8))
    fit(model)  # 2 epochs of 3 steps
    model.evaluate(X, Y, batch_size=20, verbose=0)
    model.train_on_batch(X, Y)
    flip(model.towers.replicas.of(tf_compat.backend_variable(model.optimizer.iterations))[1], 0, 3)
    with pytest.raises(DivergenceError, match=r"after step 9, .*: .*iteration on tower 1"):
        fit(model)


def test_towers_run():
    """Steps of a loop of one's own count; a variable that is no Keras model's has its own name."""
    weight = tf.Variable(1.0, name="weight")
    with Towers(2, health=Health(check_every=2)) as towers:

        def step(x):
            weight.assign_add(tf.reduce_mean(x))

        towers.run(step, tf.ones([4]))
        flip(towers.replicas.of(weight)[1], 0, 0)
        with pytest.raises(DivergenceError, match=r"after step 2, .*: weight:0 on tower 1"):
            towers.run(step, tf.ones([4]))


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"check_every": 0}, r"check_every to be at least 1\. Received: 0"),
        ({"check_every": True}, r"check_every to be a number of steps\. Received: True"),
        ({"on_divergence": "heal"}, r"on_divergence to be one of .*'repair'.*\. Received: 'heal'"),
    ],
)
def test_bad_arguments(arguments, error):
    """Refused where the decorator is applied."""
    with pytest.raises((TypeError, ValueError), match=error):
        on_towers(None, 2, health=Health(**arguments))
