"""Element-wise ops of forward and backward, and sums, that run as one: which they are, and what they compute.

No bit changes but in sums.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import program_of
from parity import data, on_towers

import ncclsync
from ncclsync.communicator import native
from ncclsync.host_passes import chains as chains_module
from ncclsync.host_passes import passes
from ncclsync.host_passes.arithmetic import COMPUTED, FUSED, WHOLE, repeat_of
from ncclsync.ops import host_ops
from ncclsync.program import segment

LAYERS = keras.layers


@pytest.fixture(autouse=True)
def _as_traced():
    """TensorFlow computes what is written: it may not reorder constant factors."""
    host_ops.register()
    before = tf.config.optimizer.get_experimental_options()
    off = ("arithmetic_optimization", "constant_folding", "remapping")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(off, False))
    yield
    tf.config.optimizer.set_experimental_options({name: before.get(name, True) for name in off})


@pytest.fixture
def chains(monkeypatch):
    """The chains that are found."""
    found = []
    find = passes.find_chains

    def listing(*arguments):
        found.extend(find(*arguments))
        return find(*arguments)

    monkeypatch.setattr(passes, "find_chains", listing)
    return found


def without_chains(monkeypatch):
    monkeypatch.setattr(passes, "find_chains", lambda *_: [])
    monkeypatch.setattr(passes, "simplify", lambda graph, _, ops, needed: (graph, list(ops)))


def without_sums(monkeypatch):
    monkeypatch.setattr(chains_module, "_SUMMING", set())


def bits(values):
    """Equal where all bits are; every NaN is the same, and a denormal is zero."""
    if values.dtype.kind != "f":
        return values
    values = np.where(np.abs(values) < np.finfo(values.dtype).tiny, np.copysign(0, values), values)
    values = np.where(np.isnan(values), np.nan, values).astype(values.dtype)
    return values.view("int32" if values.dtype == np.float32 else "int64")


def assert_same_bits(ones, others):
    for one, other in zip(tf.nest.flatten(ones), tf.nest.flatten(others), strict=True):
        np.testing.assert_array_equal(bits(np.asarray(one)), bits(np.asarray(other)))


def operands(dtype, rows):
    """A batch of [rows, 5, 6], and what broadcasts to it, of special values."""
    tiny, huge = np.finfo(dtype).tiny, np.finfo(dtype).max
    special = [0, -0.0, 1, -1, 0.1, 3, np.inf, -np.inf, np.nan, tiny, tiny / 4, huge]
    random = np.random.default_rng(rows)
    shapes = [(rows, 5, 6), (), (6,), (1, 1, 6), (5, 6), (5, 1), (1, 5, 6), (1, 5, 1), (1, 1, 1)]
    return [random.choice(special, shape).astype(dtype) for shape in shapes]


def random_step(seed, others):
    """A step of twenty ops on a batch, which returns some of what they compute."""

    def step(batch):
        random = np.random.default_rng(seed)
        arrays = [batch, tf.cumsum(batch, axis=1)[:, :, :1]]  # a column of each row
        rows = [tf.constant(other) for other in others]
        whole = [batch]
        for name in random.permutation(2 * sorted(COMPUTED)):
            first, second = (whole[i] for i in random.integers(len(whole), size=2))
            if name == "AddN":
                value = tf.raw_ops.AddN(inputs=[first, second, batch])
            elif name == "BroadcastTo":
                value = tf.broadcast_to(rows[random.integers(len(rows))], tf.shape(first)) * second
            elif name == "ReluGrad":
                value = tf.raw_ops.ReluGrad(gradients=first, features=second)
            elif name == "Relu":
                value = tf.raw_ops.Relu(features=first)
            elif name in ("Square", "Sqrt", "Neg"):
                value = getattr(tf.raw_ops, name)(x=first)
            else:
                pair = [first, [*rows, *arrays, second][random.integers(len(rows) + len(arrays) + 1)]]
                random.shuffle(pair)
                value = getattr(tf.raw_ops, name)(x=pair[0], y=pair[1])
            whole.append(value)
        return [whole[i] for i in (5, 11, 17, -1)]

    return step


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [1, 300])
def test_random_expressions(chains, dtype, rows):
    """All that broadcasts, of special values too, has TensorFlow's own bits; on a tower without rows too."""
    batch, *others = operands(dtype, rows)
    with ncclsync.Towers(2) as towers:
        for seed in range(2):
            step = random_step(seed, others)
            wanted = step(tf.constant(batch))
            assert_same_bits(towers.run(step, tf.constant(batch)), wanted)
    assert sum(len(chain.members) for chain in chains) > 20
    assert {repeat for chain in chains for repeat in chain.repeats} >= {WHOLE, 1, 6}


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_that_nobody_knows_before(chains, rows):
    """Of two arrays one may have a single row, and which of the two is known when the step runs only."""
    table, count = tf.Variable(np.arange(24.0).reshape(8, 3) + 0.1), tf.Variable(rows)

    def step(batch):
        some = tf.gather(table, tf.range(count))
        return {"whole": tf.add_n([batch * some, batch]) * batch, "sum": tf.reduce_sum(some * some + some)}

    batch = tf.constant(np.arange(24.0).reshape(8, 3) / 7)
    with ncclsync.Towers(2) as towers:
        result, alone = towers.run(step, batch), step(batch)
        assert_same_bits(result["whole"], alone["whole"])
        np.testing.assert_allclose(result["sum"], alone["sum"])
        assert chains and max(len(chain.members) for chain in chains) == 3, chains
        count.assign(3)
        with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):  # as on one device
            towers.run(step, batch)


def test_long_chains(chains):
    """More ops than an expression can have are several expressions."""
    factors = tf.constant(np.linspace(0.5, 2, 6))

    def step(batch):
        value = batch
        for i in range(120):
            value = value * factors if i % 3 else value + batch
        return value

    batch = tf.constant(np.random.default_rng(0).normal(size=(6, 6)))
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert len(chains) > 2 and sum(len(chain.members) for chain in chains) == 120


def test_order_that_is_asked_for(chains):
    """Who waits for a member of a chain, though it takes no result of it, waits for the chain."""

    def step(batch):
        doubled, axis = batch * 2.0, tf.constant(1)
        with tf.control_dependencies([doubled]):
            total = tf.raw_ops.Cumsum(x=batch, axis=axis)
        value = doubled + batch
        return value * total, tf.cumsum(value, axis=1)

    batch = tf.reshape(tf.range(12.0), [4, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [chain.awaited for chain in chains] == [("mul",)]


def test_chains_that_would_wait_for_each_other(chains):
    """Two chains of one shape would each have a member that waits for one of the other: they are one."""

    def step(batch):
        one, other = tf.abs(batch), tf.sign(batch)
        first, second = one * 2.0 + one, (other + 1.0) * other
        with tf.control_dependencies([first]):
            third = other * second - other
        with tf.control_dependencies([second]):
            fourth = (one + first) * one
        return tf.cumsum(third, axis=1), tf.cumsum(fourth, axis=1)

    batch = tf.reshape(tf.range(12.0), [4, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [len(chain.members) for chain in chains] == [8]


def test_names_that_a_step_has_already(chains):
    """What is put into a segment has names of its own."""

    def step(batch):
        value = tf.tanh(batch, name="ncclsync/chain_0")
        return tf.tanh((value + batch) * batch, name="chain_0")

    batch = tf.reshape(tf.range(12.0), [4, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert len(chains) == 1


def test_shapes_that_an_op_refuses_are_refused():
    """A chain does not broadcast what TensorFlow's own op would not."""
    count = tf.Variable(8)

    def step(batch):
        some = tf.gather(batch, tf.range(count))
        return tf.add_n([batch * 2.0, some]) * 2.0 + batch

    batch = tf.reshape(tf.range(24.0), [8, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
        count.assign(1)
        with pytest.raises(tf.errors.InvalidArgumentError, match="the same size"):
            towers.run(step, batch)


@pytest.mark.parametrize("cores, alone", [(1, 1), (2, 1), (3, 0)])
def test_threads(monkeypatch, cores, alone):
    """A chain takes threads that no other tower needs only."""
    monkeypatch.setattr(native, "usable_cores", lambda: cores)
    nodes = []
    find = segment._graph_def

    def listing(*arguments):
        made = find(*arguments)
        nodes.extend(node for node in made[0].node if node.op == FUSED)
        return made

    monkeypatch.setattr(segment, "_graph_def", listing)
    with ncclsync.Towers(2) as towers:
        towers.run(lambda batch: batch * 2.0 + batch, tf.zeros([4, 3]))
    assert [node.attr["alone"].i for node in nodes] == [alone]


def test_a_shape_costs_no_array(chains):
    """Who asks for a tensor's shape only is told that of an input: the tensor itself is not written."""

    def step(batch):
        doubled = batch * 2.0
        return doubled + batch, tf.fill(tf.shape(doubled), 1.0)

    batch = tf.reshape(tf.range(12.0), [4, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [chain.outputs for chain in chains] == [("add",)]


def test_a_shape_costs_no_array_of_a_product(chains):
    """Nor where the first of that shape is a product of matrices, of which TensorFlow writes any it must."""
    weight = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def step(batch):
        product = tf.matmul(batch, weight)
        squares = tf.math.squared_difference(product, 1.0)
        alone = tf.nn.relu(tf.matmul(batch, weight + 1.0))
        sums = tf.reduce_sum(squares, axis=0), tf.reduce_sum(product, axis=0)
        return *sums, alone, tf.fill(tf.shape(squares), 1.0)

    batch = tf.reshape(tf.range(12.0), [4, 3])
    with ncclsync.Towers(2) as towers:
        for one, other in zip(towers.run(step, batch), step(batch), strict=True):
            np.testing.assert_allclose(one, other)
    assert {output for chain in chains for output in chain.outputs} == set(), chains


def test_rows_through_reshapes(chains):
    """How many rows an array has is known by those that it had before it was reshaped or transposed."""
    table = tf.Variable(tf.ones([3, 3]))

    def step(batch):
        rows = tf.reduce_max(batch, axis=1)
        ones = tf.matmul(table + 1.0, tf.transpose(rows, [1, 0]))
        doubled = tf.abs(rows * 2.0 - rows)
        flat = tf.abs(tf.reshape(batch, [-1, 3]))
        value = tf.reshape(flat, [-1, 2, 3]) * batch + batch
        shapes = tf.fill(tf.shape(flat), 2.0), tf.fill(tf.shape(doubled), 3.0)
        return value, doubled, tf.transpose(ones), *shapes

    batch = tf.reshape(tf.range(24.0), [4, 2, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [len(chain.members) for chain in chains] == [2, 2]


def test_a_result_that_is_the_same_in_each_block(chains):
    """What is computed of a row alone is written to all rows where all rows are asked for."""
    row = tf.constant([1.0, 2.0])

    def step(batch):
        spread = tf.broadcast_to(row, tf.shape(batch)) * row
        return spread, spread * batch

    batch = tf.reshape(tf.range(4000.0), [2000, 2])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [chain.outputs for chain in chains] == [("mul", "mul_1")]


def test_what_is_added_up_only_is_not_written(chains):
    """Nor is what is computed for it."""

    def step(batch):
        return tf.reduce_sum(tf.square(batch - 1.0) * batch, axis=[0, 1])

    batch = tf.reshape(tf.range(24.0), [4, 2, 3])
    with ncclsync.Towers(2) as towers:
        np.testing.assert_allclose(towers.run(step, batch), step(batch), rtol=1e-6)
    assert [(len(chain.members), chain.outputs, len(chain.sums)) for chain in chains] == [(4, (), 1)]


def test_sums_of_nothing(chains):
    """Of no rows the sum is 0, and the mean is not a number, as TensorFlow has it."""

    def step(batch):
        none = tf.boolean_mask(batch, batch[:, 0] > 100)
        return tf.reduce_sum(none * none, axis=0), tf.reduce_mean(none * 2.0, axis=0)

    with ncclsync.Towers(2) as towers:
        total, mean = towers.run(step, tf.reshape(tf.range(24.0), [8, 3]))
    np.testing.assert_array_equal(total, np.zeros(3))
    np.testing.assert_array_equal(mean, np.full(3, np.nan))
    assert sum(len(chain.sums) for chain in chains) == 2


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_of_what_broadcasts(monkeypatch, chains, rows):
    """A gradient is added up over the axes that were repeated; of one row too."""
    batch, *others = [tf.constant(np.nan_to_num(v, posinf=2, neginf=3)) for v in operands("float64", 2 * rows)]
    batch, others = tf.clip_by_value(batch, -3, 3), [tf.clip_by_value(other, -3, 3) for other in others]

    def step(batch):
        sources = [batch, *map(tf.identity, others)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = batch
            for other in sources[1:]:
                value = (value + other) * other - tf.square(value) * 0.1
        return tape.gradient(value, sources)

    results = []
    for without in (None, without_chains):
        if without is not None:
            without(monkeypatch)
        with ncclsync.Towers(2) as towers:
            results.append(towers.run(step, batch))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)
    assert {one.period for chain in chains for one in chain.sums} >= {1, 6, 30}


def normalised():
    inputs = keras.Input((12,))
    features = LAYERS.Reshape((3, 4, 1))(inputs)
    for filters in (3, 8):
        features = LAYERS.Conv2D(filters, 2, padding="same", use_bias=False)(features)
        features = LAYERS.ReLU()(LAYERS.BatchNormalization()(features))
    return classifier(inputs, LAYERS.Flatten()(features))


def transformer():
    inputs = keras.Input((12,))
    features = LAYERS.Dense(8)(LAYERS.Reshape((3, 4))(inputs))
    normal = LAYERS.LayerNormalization()(features)
    features = features + LAYERS.MultiHeadAttention(2, 4)(normal, normal)
    hidden = LAYERS.Dense(16, activation="gelu")(LAYERS.LayerNormalization()(features))
    return classifier(inputs, LAYERS.Flatten()(features + LAYERS.Dense(8)(hidden)))


def classifier(inputs, features):
    model = keras.Model(inputs, LAYERS.Dense(5)(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0), loss, jit_compile=False)
    return model


def trained(factory):
    keras.utils.set_random_seed(3)
    model = on_towers(factory, 3)
    x, y = data(rows=16)
    model.fit(x, y, batch_size=7, verbose=0, shuffle=False)  # the last batch is smaller than the towers' number
    return model


@pytest.mark.slow
@pytest.mark.parametrize("factory", [normalised, transformer])
def test_models(monkeypatch, chains, factory):
    """A whole step's weights and state with chains and without; few ops are left.

    They have the same bits but for sums, which have another order.
    """
    states, left = [], []
    for without in (None, without_sums, without_chains):
        if without is not None:
            without(monkeypatch)
        model = trained(factory)
        states.append([v.numpy() for v in (*model.variables, *model.optimizer.variables)])
        ops = program_of(model).segments[0].function.graph.get_operations()
        arrays = [op for op in ops if op.outputs and (op.outputs[0].shape.rank or 0) > 2]
        left.append(collections.Counter(op.type for op in arrays if op.type in COMPUTED))
    assert_same_bits(*states[1:])
    for one, other in zip(*states[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert 2 * left[1].total() < left[2].total() and left[0].total() <= left[1].total(), left
    assert factory is not normalised or not left[0], left
    assert sum(len(chain.members) for chain in chains) > 20
    assert sum(len(chain.sums) for chain in chains) > 4


def sums_of(shape):
    """By name: what adds up x of [None, *shape] and y, which broadcasts to it."""
    first = list(range(len(shape)))

    def gradient(x, y):
        with tf.GradientTape() as tape:
            tape.watch(y)
            product = x * y
        return tape.gradient(product, y, output_gradients=x)

    return {
        "columns": lambda x, y: tf.reduce_sum(x * y, axis=first),
        "kept": lambda x, y: tf.reduce_mean(x * y, axis=[0, -2], keepdims=True),
        "rows": lambda x, y: tf.reduce_mean(tf.square(x - y), axis=0),
        "all": lambda x, y: tf.reduce_sum(x + y),
        "bias": lambda x, y: tf.raw_ops.BiasAddGrad(out_backprop=x * y),
        "gradient": gradient,
    }


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("float64", 1e-14)])
@pytest.mark.parametrize(
    "rows, shape", [(2, (5, 3)), (300, (7, 10)), (64, (4, 512)), (40, (3, 700)), (3, (1, 2048)), (9000, (2, 1))]
)
def test_sums(chains, dtype, rtol, rows, shape):
    """Sums over the first axes of all towers' rows are as exact as their dtype allows."""
    random = np.random.default_rng(rows)
    x = random.normal(1, 1, (2 * rows, *shape)).astype(dtype)
    y = random.normal(1, 1, (1, 1, shape[-1])).astype(dtype)
    steps = sums_of(shape)
    with ncclsync.Towers(2) as towers:
        found = towers.run(lambda batch: {n: f(batch, tf.constant(y)) for n, f in steps.items()}, tf.constant(x))
    for name, function in steps.items():
        exact = function(tf.constant(x.astype("float64")), tf.constant(y.astype("float64"))).numpy()
        np.testing.assert_allclose(found[name], exact, rtol=0, atol=rtol * np.abs(exact).max(), err_msg=name)
    periods = {one.period for chain in chains for one in chain.sums}
    assert periods >= {shape[-1], 1} and max(periods) <= 2048, chains


@pytest.mark.parametrize(
    "operand, result, repeat",
    [
        ([None, 4, 5], [None, 4, 5], 1),
        ([], [None, 4, 5], 1),
        ([5], [None, 4, 5], 1),
        ([1, 1, 5], [None, 4, 5], 1),
        ([None, 4, 1], [None, 4, 5], 5),
        ([None, 1, 1], [None, 4, 5], 20),
        ([4, 1], [None, 4, 5], 5),
        ([None, 1, 5], [None, 4, 5], None),
        ([None, 5], [None, 4, 5], None),
        ([None, 1, 5], [None, 1, 5], 1),
        ([3, 1], [3, 4], 4),
    ],
)
def test_repeat(operand, result, repeat):
    """How an operand that is smaller than a result is repeated; or that one number does not say it."""
    assert repeat_of(tf.TensorShape(operand), tf.TensorShape(result)) == repeat
