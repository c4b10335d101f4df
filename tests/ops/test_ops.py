"""The collectives: outside a step, inside one on unequal shards, their gradients, and how many there are."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers, watch_exchanges

import ncclsync
from ncclsync import ops
from ncclsync.communicator import AllGather, AllReduce, Broadcast, CpuCommunicator, ReduceScatter, native
from ncclsync.ops import group_ops

TOWERS = 4
ROWS = 64 - 6  # 15, 15, 14, 14
SIZES = [15, 15, 14, 14]
X, Y = data(ROWS)
X[:, -1] = np.repeat(np.arange(TOWERS), SIZES)  # the last feature tells which tower a row goes to
SHARDS = np.split(X, np.cumsum(SIZES)[:-1])
FLOATS = ("float16", "bfloat16", "float32", "float64")
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-12}


# Outside a step on towers


def test_alone_a_collective_is_the_identity():
    """One tower: the tensors themselves, of every dtype, in their structure; None stays None."""
    given = {"a": [tf.constant([1, 2]), None], "b": (tf.constant(2.5, tf.bfloat16), np.float64(3.0))}
    for result in (ops.all_reduce(given, op="sum"), ops.broadcast(given), ops.all_reduce(given, op="max")):
        assert result["a"][1] is None
        assert (result["b"][0].dtype, result["b"][1].dtype) == (tf.bfloat16, tf.float64)
        np.testing.assert_array_equal(result["a"][0], [1, 2])
        assert float(result["b"][0]) == 2.5 and float(result["b"][1]) == 3.0
    assert ops.all_reduce(None) is None and ops.all_reduce([]) == []


def test_alone_in_a_function_and_under_a_tape():
    """The identity holds in a graph, and its gradient is one."""

    @tf.function
    def square(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ops.all_reduce(x, "sum") ** 2 + ops.broadcast(x)
        return tape.gradient(y, x)

    assert float(square(tf.constant(3.0))) == 7.0


def test_indexed_slices_become_dense():
    """Rows that occur twice add up."""
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([2, 0, 2]), tf.constant([3, 1]))
    np.testing.assert_array_equal(ops.all_reduce([slices], "sum")[0], [[2.0], [0.0], [5.0]])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("slices, dense", [(1, False), (24, False), (25, True), (90, True)])
def test_rule_for_sparse_gradients(slices, dense, as_on_gpus, monkeypatch):
    """Gathered or added up, whichever moves fewer bytes: 5 * `slices` of 12 + 4, or 2 * 80 rows of 12."""
    indices = np.random.default_rng(slices).integers(0, 80, (5 * slices, 1)).astype("int32")

    def run(towers):
        keras.utils.set_random_seed(1)
        table = keras.layers.Embedding(80, 3)
        table.build()
        optimizer = keras.optimizers.SGD(0.1)

        def step(batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(table(batch)))
            optimizer.apply(tape.gradient(loss, table.trainable_variables), table.trainable_variables)

        step(indices) if towers is None else towers.run(step, indices)
        return table.embeddings.numpy()

    joined = joined_by(monkeypatch)
    with ncclsync.Towers(5) as towers:
        found = run(towers)
    sizes = [array.size for kind, array in joined if kind is AllReduce]
    assert (80 * 3 in sizes) == dense, sizes
    np.testing.assert_allclose(found, run(None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda x: ops.all_reduce(x, op="avg"),
            ValueError,
            r"Expected op to be one of \('mean'.*op='avg'. Write op=\"mean\"$",
        ),
        (lambda x: ops.all_reduce(x, "maximum"), ValueError, r"op='maximum'. Write op=\"max\"$"),
        (lambda x: ops.all_reduce(x, op=None), ValueError, r"Expected op to be one of .*op=None"),
        (lambda x: ops.broadcast(x, root=-1), ValueError, r"Expected root to be the index .*root=-1"),
        (lambda x: ops.broadcast(x, root=True), ValueError, r"Expected root to be the index .*root=True"),
        (lambda x: ops.broadcast(x, root=0.0), ValueError, r"Expected root to be the index .*root=0.0"),
        (lambda x: ops.all_reduce(tf.cast(x, tf.int32)), TypeError, r"floating dtype for op='mean'.*int32"),
        (lambda x: ops.all_reduce(x > 0, "max"), TypeError, r"Expected one of the dtypes \[.*Received: bool"),
        (lambda x: ops.broadcast(tf.as_string(x)), TypeError, r"Expected one of the dtypes .*: string"),
        (
            lambda x: ops.all_reduce(tf.cast(x, tf.complex64), "sum"),
            TypeError,
            r"Expected one of the dtypes .*: complex64",
        ),
    ],
)
def test_bad_argument(call, error, message):
    """Refused by its message, also where a collective would change nothing."""
    with pytest.raises(error, match=message):
        call(tf.constant([1.0, 2.0]))


# Inside a step on towers


class Step(keras.Model):
    """A model whose train_step is `function(model, x)`, a dictionary; returns each tower's: [N, ...]."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.kernel = self.add_weight(shape=(12,), initializer="ones")
        self.built = True

    def train_step(self, batch):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        place = tf.one_hot(tf.cast(x[0, -1], tf.int32), TOWERS, dtype=tf.float64)
        return {
            name: ops.all_reduce(tf.tensordot(place, tf.cast(value, tf.float64), axes=0), "sum")
            for name, value in self.function(self, x).items()
        }


def run(function):
    """What `function(model, x)` returns on each of four towers: {name: [N, ...]}."""

    def factory():
        model = Step(function)
        model.compile("sgd")
        return model

    return on_towers(factory, TOWERS).train_on_batch(X, return_dict=True)


def on_every_tower(value):
    return np.stack([value] * TOWERS)


def test_reductions_of_every_dtype():
    """sum, prod, max and min, and of floats the mean by samples: closed forms over unequal shards."""
    cases = [(d, op) for d in native.DTYPES for op in ops.REDUCE_OPS if op != "mean" or d in FLOATS]

    def function(model, x):
        excess = tf.cast(tf.shape(x)[0] - 13, tf.float32)  # 2 or 1
        results = [ops.all_reduce([tf.cast(tf.stack([excess, 2.0]), dtype)], op)[0] for dtype, op in cases]
        return {"all": tf.stack([tf.cast(result, tf.float64) for result in results])}

    results = run(function)["all"]  # [N, cases, 2]
    mean = np.dot([2, 2, 1, 1], SIZES) / ROWS
    expected = {"sum": [6, 8], "prod": [4, 16], "max": [2, 2], "min": [1, 2], "mean": [mean, 2]}
    for i, (dtype, op) in enumerate(cases):
        assert_close(results[:, i], on_every_tower(expected[op]), TOLERANCE.get(dtype, 0.0), what=f"{dtype} {op}")


def test_scalars_structures_and_none():
    """A nested structure of mixed dtypes, scalars among them, comes back as it was given."""

    def function(model, x):
        given = {"a": (tf.reduce_sum(x), None), "b": [tf.shape(x)[0], x[0]]}
        result = ops.all_reduce(given, "sum")
        assert result["a"][1] is None and isinstance(result["a"], tuple) and isinstance(result["b"], list)
        return {"sum": result["a"][0], "rows": result["b"][0], "first": result["b"][1]}

    results = run(function)
    assert_close(results["sum"], on_every_tower(X.sum(dtype=np.float64)))
    assert_close(results["rows"], on_every_tower(ROWS))
    assert_close(results["first"], on_every_tower(sum(shard[0] for shard in SHARDS)))


def test_broadcast_from_the_third_tower():
    """Every tower gets tower 2's."""
    results = run(lambda model, x: {"first": ops.broadcast(x[0], root=2)})
    assert_close(results["first"], on_every_tower(SHARDS[2][0]))


def test_broadcast_from_a_tower_that_is_not_there():
    """The error names both numbers."""
    with pytest.raises(ValueError, match=r"Expected root to be below the number of towers, 4. Received: 4"):
        run(lambda model, x: {"first": ops.broadcast(x[0], root=4)})


COLLECTIVES = {
    "mean": lambda rows: tf.square(ops.all_reduce(tf.reduce_mean(rows, 0))),
    "sum": lambda rows: tf.square(ops.all_reduce(tf.reduce_sum(rows, 0), "sum")),
    "max": lambda rows: tf.square(ops.all_reduce(tf.reduce_max(rows, 0), "max")),
    "rows": lambda rows: tf.matmul(ops.all_gather(rows), ops.all_gather(rows), transpose_b=True),
    "rows twice": lambda rows: tf.cumsum(ops.all_gather(tf.repeat(rows, 2, axis=0))) ** 2,
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradient_through_a_collective(name):
    """It is one device's, to which a collective is nothing: with respect to variables and to the rows."""
    kernel = tf.Variable(np.linspace(0.5, 1.5, 12).astype("float32"))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(COLLECTIVES[name](x * kernel))
        return tape.gradient(loss, [kernel, x])

    with ncclsync.Towers(TOWERS) as towers:
        assert_close(towers.run(step, tf.constant(X)), step(tf.constant(X)))


def test_all_gather():
    """Every tower gets the batch: all rows in order, of any dtype, however many of them each tower has."""

    def function(model, x):
        rows = ops.all_gather({"x": x, "text": tf.as_string(x), "twice": tf.repeat(x, 2, axis=0)})
        return {**rows, "text": tf.strings.to_number(rows["text"])}

    results = run(function)
    whole = np.concatenate(SHARDS)
    assert_close(results["x"], on_every_tower(whole))
    assert_close(results["twice"], on_every_tower(np.repeat(whole, 2, axis=0)))
    assert_close(results["text"], on_every_tower(whole))


def test_all_gather_of_a_scalar_is_an_error():
    """It has no rows."""
    with pytest.raises(ValueError, match=r"Expected tensors whose first axis runs over the samples"):
        run(lambda model, x: {"all": ops.all_gather(x[0, 0])})


def test_shapes_that_differ_are_an_error():
    """Towers that bring tensors of different shapes get an error, no hang and no wrong sum."""
    with pytest.raises(ncclsync.NcclSyncError, match=r"^Expected the towers' tensors to be of one size"):
        run(lambda model, x: {"sum": tf.reduce_sum(ops.all_reduce(x, "sum"))})


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rows", [64, 61])
def test_synchronised_normalisation(rows):
    """A normalisation by the whole batch's mean and variance, forward and backward, equals one device's."""
    x, y = data(rows)

    class Norm(keras.layers.Layer):
        def call(self, inputs):
            mean, square = ops.all_reduce([tf.reduce_mean(inputs, 0), tf.reduce_mean(inputs * inputs, 0)], op="mean")
            return (inputs - mean) * tf.math.rsqrt(square - mean * mean + 1e-3)

    def factory():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8), Norm(), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((12,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
        return model

    def train(model):
        losses = model.fit(x, y, batch_size=rows, epochs=5, verbose=0, shuffle=False).history
        return [losses, model.get_weights()]

    model = on_towers(factory, 4)
    assert_close(train(model), train(factory()))
    assert_towers_agree(model)


# The group collectives in a graph


def unique(dtype, tower, shape=(3, 2)):
    return tf.cast(tf.reshape(tf.range(6), shape) % 4 + tower, dtype)


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_group_collectives_of_every_dtype(dtype):
    """Closed forms in a graph; out come tensors of the shape and dtype that went in."""
    with CpuCommunicator(3) as communicator:

        @tf.function
        def joined():
            tensors = [unique(dtype, i) for i in range(3)]
            both = [ReduceScatter((), (), "max"), AllGather((), ())]
            return (
                group_ops.group_exchange([tensors], communicator, [AllReduce((), ())])[0],
                group_ops.group_exchange([tensors], communicator, [Broadcast((), 1)])[0],
                *group_ops.group_exchange([tensors, tensors], communicator, both),
            )

        reduced, copied, scattered, gathered = joined()
    base = np.arange(6).reshape(3, 2) % 4
    whole = np.concatenate([base, base + 1, base + 2])
    results = [(3 * base + 3, base + 1, base[[tower]] + 2, whole) for tower in range(3)]
    for row, expected in zip(zip(reduced, copied, scattered, gathered, strict=True), results, strict=True):
        for one, other in zip(row, expected, strict=True):
            assert one.dtype.name == dtype
            np.testing.assert_array_equal(tf.cast(one, tf.float64), other)


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_group_collectives_outside_a_graph(towers):
    """As inside one; a step that failed is run again so."""
    tensors = [unique("float32", i) for i in range(towers)]
    kinds = [AllReduce((), ()), ReduceScatter((), ()), AllGather((), ())]
    rows = [[tf.tile(tensor[:1], [towers, 1]) for tensor in tensors], tensors]
    with CpuCommunicator(towers) as communicator:
        copied = group_ops.group_exchange([tensors], communicator, [Broadcast((), towers - 1)])[0]
        reduced, scattered, gathered = group_ops.group_exchange([tensors, *rows], communicator, kinds)
    for i in range(towers):
        np.testing.assert_array_equal(copied[i], tensors[-1])
        np.testing.assert_array_equal(reduced[i], sum(tensors))
        np.testing.assert_array_equal(scattered[i], sum(tensors)[:1])
        np.testing.assert_array_equal(gathered[i], tf.concat(tensors, 0))


# How many


def joined_by(patch):
    """A list that gets the kind and tower 0's tensor of each collective of steps, while they run."""
    joined = []
    watch_exchanges(patch, lambda collectives, arrays: joined.extend(zip(map(type, collectives), arrays, strict=True)))
    return joined


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_one_collective_per_step(metrics, as_on_gpus, monkeypatch):
    """A step of a model with four variables makes one all-reduce: gradients and metrics in one bucket."""
    joined = joined_by(monkeypatch)
    model = on_towers(lambda: mlp(metrics=metrics), 4)
    model.train_on_batch(X, Y)
    joined.clear()
    model.train_on_batch(X, Y)
    assert [(kind, array.dtype.name) for kind, array in joined] == [(AllReduce, "float32")]


def test_small_buckets_make_more_collectives(as_on_gpus, monkeypatch):
    """`bucket_bytes` bounds what travels at once: four gradients and four scalars of metrics, each alone."""
    joined = joined_by(monkeypatch)
    model = on_towers(mlp, 4, bucket_bytes=1)
    model.train_on_batch(X, Y)
    joined.clear()
    model.train_on_batch(X, Y)
    assert len(joined) == 4 + 4


@pytest.mark.slow
def test_divided_optimizer_by_collectives(as_on_gpus, monkeypatch):
    """Each tower is given its part of each gradient, and the parts of the weights: as on one device."""
    joined = joined_by(monkeypatch)
    model, alone = on_towers(lambda: mlp(metrics=None), 3, shard_optimizer=True), mlp(metrics=None)
    for one in (model, alone):
        one.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False)
    steps, kinds = 2 * -(-len(X) // 20), collections.Counter(kind for kind, _ in joined)
    assert (kinds[ReduceScatter], kinds[AllGather]) == (4 * steps, 4 * steps)
    assert_close(model.get_weights(), alone.get_weights())
    assert_towers_agree(model)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("steps, expected", [(None, 8), (4, 2)])
def test_accumulating_optimizer_all_reduces_once_per_update(monkeypatch, as_on_gpus, steps, expected):
    """Eight batches, four to an update: the gradients travel twice, not eight times; and tower 0's
    accumulators read as one device's in between.
    """
    joined = joined_by(monkeypatch)

    def factory():
        return mlp(keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps))

    model, alone = on_towers(factory, TOWERS), factory()
    for one in (model, alone):
        one.fit(X[:48], Y[:48], batch_size=6, verbose=0, shuffle=False)
    assert len([array for kind, array in joined if kind is AllReduce and array.size >= 12 * 16]) == expected
    for one in (model, alone):
        one.train_on_batch(X[48:], Y[48:])
    assert_close([v.numpy() for v in model.optimizer.variables], [v.numpy() for v in alone.optimizer.variables])
    assert_close(model.get_weights(), alone.get_weights())
