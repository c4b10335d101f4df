"""Element-wise ops of forward and backward that run as one: which they are, and what they compute. No bit changes."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import program_of
from parity import data, on_towers

import ncclsync
from ncclsync.communicator import native
from ncclsync.host_passes import passes
from ncclsync.host_passes.chains import ARITHMETIC, FUSED
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


@pytest.fixture
def nodes(monkeypatch):
    """The ops that run chains."""
    found = []
    find = segment._graph_def

    def listing(*arguments):
        made = find(*arguments)
        found.extend(node for node in made[0].node if node.op == FUSED)
        return made

    monkeypatch.setattr(segment, "_graph_def", listing)
    return found


def without_chains(monkeypatch):
    monkeypatch.setattr(passes, "find_chains", lambda *_: [])
    monkeypatch.setattr(passes, "untie", lambda graph, _: graph)


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


def run_both_ways(monkeypatch, step, batch):
    """Run a step on towers with chains, then without; return the result, which has the same bits."""
    results = []
    for prepare in (lambda _: None, without_chains):
        prepare(monkeypatch)
        with ncclsync.Towers(2) as towers:
            results.append(towers.run(step, batch))
    assert_same_bits(*results)
    return results[0]


def operands(rows):
    """A batch of [rows, 5, 6], and what broadcasts to it, of special values."""
    dtype = np.float32
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
        for name in random.permutation(2 * sorted(ARITHMETIC)):
            first, second = whole[-1], whole[random.integers(len(whole))]
            if name == "AddN":
                value = tf.raw_ops.AddN(inputs=[first, second, batch])
            elif name == "BroadcastTo":
                value = tf.broadcast_to(rows[random.integers(len(rows))], tf.shape(first)) * second
            elif name == "ReluGrad":
                value = tf.raw_ops.ReluGrad(gradients=first, features=second)
            elif name == "Relu":
                value = tf.raw_ops.Relu(features=first + 0.0)  # of -0.0 it depends on the place in the array
            elif name in ("Square", "Sqrt", "Neg"):
                value = getattr(tf.raw_ops, name)(x=first)
            else:
                pair = [first, [*rows, *arrays, second][random.integers(len(rows) + len(arrays) + 1)]]
                random.shuffle(pair)
                value = getattr(tf.raw_ops, name)(x=pair[0], y=pair[1])
            whole.append(value)
        return [whole[i] for i in (5, 11, 17, -1)]

    return step


@pytest.mark.parametrize("rows", [1, 300])
def test_random_expressions(chains, rows):
    """All that broadcasts, of special values too, has TensorFlow's own bits; on a tower without rows too."""
    batch, *others = operands(rows)
    with ncclsync.Towers(2) as towers:
        for seed in range(2):
            step = random_step(seed, others)
            wanted = step(tf.constant(batch))
            assert_same_bits(towers.run(step, tf.constant(batch)), wanted)
    assert sum(len(chain.members) for chain in chains) > 20
    n_whole = [chain.node.attr["n_whole"].i for chain in chains]
    assert {*n_whole} >= {1, 2} and any(n < len(c.inputs) for n, c in zip(n_whole, chains, strict=True))


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_that_nobody_knows_before(chains, rows):
    """Of two arrays one may have a single row, and which of the two is known when the step runs only."""
    table, count = tf.Variable(np.arange(24, dtype="float32").reshape(8, 3) + 0.1), tf.Variable(rows)

    def step(batch):
        some = tf.gather(table, tf.range(count))
        return {"whole": tf.add_n([batch * some, batch]) * batch, "sum": tf.reduce_sum(some * some + some)}

    batch = tf.constant(np.arange(24, dtype="float32").reshape(8, 3) / 7)
    with ncclsync.Towers(2) as towers:
        result, alone = towers.run(step, batch), step(batch)
        assert_same_bits(result["whole"], alone["whole"])
        np.testing.assert_allclose(result["sum"], alone["sum"], rtol=1e-6)
        assert chains and max(len(chain.members) for chain in chains) == 3, chains
        count.assign(3)
        # One device fails where they meet the batch's rows; a tower where it would take its own of them.
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"Incompatible shapes|Expected size\[0\] in \[0, 3\]"):
            towers.run(step, batch)


def test_long_chains(chains):
    """More ops than an expression can have are several expressions."""
    factors = tf.constant(np.linspace(0.5, 2, 6), tf.float32)

    def step(batch):
        value = batch
        for i in range(120):
            value = value * factors if i % 3 else value + batch
        return value

    batch = tf.constant(np.random.default_rng(0).normal(size=(6, 6)), tf.float32)
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert len(chains) > 2 and sum(len(chain.members) for chain in chains) == 120


def test_order_that_is_asked_for(chains, nodes):
    """A chain waits for what a member waits for; what waits for a member keeps it out of the chain."""

    def step(batch):
        doubled, axis = batch * 2.0, tf.constant(1)
        with tf.control_dependencies([doubled]):
            total = tf.raw_ops.Cumsum(x=batch, axis=axis)
        with tf.control_dependencies([total]):
            value = batch + doubled
        return tf.square(value) * batch, total

    batch = tf.reshape(tf.range(12.0), [4, 3])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [chain.members for chain in chains] == [("add", "Square", "mul_1")]
    assert "^Cumsum" in nodes[0].input


def test_chains_that_would_wait_for_each_other(chains):
    """Two chains of one shape do not each have a member that waits for one of the other."""

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
    assert [len(chain.members) for chain in chains] == [2, 2, 2, 2]


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
def test_threads(monkeypatch, nodes, cores, alone):
    """A chain takes threads that no other tower needs only."""
    monkeypatch.setattr(native, "usable_cores", lambda: cores)
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
    assert [chain.members for chain in chains] == [("mul", "add")]


def test_rows_through_reshapes(chains):
    """Arrays that are as long in the trace are one chain, whatever their rows come from."""
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
    assert [chain.members for chain in chains] == [("mul_1", "add_1"), ("mul", "sub")]


def test_a_result_that_is_the_same_in_each_block(chains):
    """What is computed of a row alone is written to all rows where all rows are asked for."""
    row = tf.constant([1.0, 2.0])

    def step(batch):
        spread = tf.broadcast_to(row, tf.shape(batch)) * row
        return tf.cumsum(spread, 1), spread * batch

    batch = tf.reshape(tf.range(4000.0), [2000, 2])
    with ncclsync.Towers(2) as towers:
        assert_same_bits(towers.run(step, batch), step(batch))
    assert [chain.members for chain in chains] == [("BroadcastTo", "mul")]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_of_what_broadcasts(monkeypatch, chains, rows):
    """A gradient, too, is that of TensorFlow's own ops; of one row too."""
    batch, *others = [tf.constant(np.nan_to_num(v, posinf=2, neginf=3)) for v in operands(2 * rows)]
    batch, others = tf.clip_by_value(batch, -3, 3), [tf.clip_by_value(other, -3, 3) for other in others]

    def step(batch):
        sources = [batch, *map(tf.identity, others)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            value = batch
            for other in sources[1:]:
                value = (value + other) * other - tf.square(value) * 0.1
        return tape.gradient(value, sources)

    run_both_ways(monkeypatch, step, batch)
    assert sum(len(chain.members) for chain in chains) > 20


def test_a_penalty_through_batch_normalization(monkeypatch):
    """A constant of its gradient waits for an op of the trace that no tower runs."""
    layer = LAYERS.BatchNormalization(synchronized=False)
    layer.build((None, 3))
    weight = tf.Variable(tf.linspace([0.1, 0.2, 0.3], [0.3, 0.1, 0.5], 3))

    def step(batch):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(batch)
                total = tf.reduce_sum(tf.tanh(layer(batch @ weight, training=True)))
            penalty = tf.reduce_mean(inner.gradient(total, batch) ** 2)
        return tape.gradient(penalty, weight)

    result = run_both_ways(monkeypatch, step, tf.random.stateless_normal([6, 3], [1, 2]))
    assert np.abs(result).max() > 1e-3


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
    """A whole step's weights and state are the same with chains and without; few ops are left."""
    states, left = [], []
    for without in (None, without_chains):
        if without is not None:
            without(monkeypatch)
        model = trained(factory)
        states.append([v.numpy() for v in (*model.variables, *model.optimizer.variables)])
        ops = program_of(model).segments[0].function.graph.get_operations()
        arrays = [op for op in ops if op.outputs and (op.outputs[0].shape.rank or 0) > 2]
        left.append(collections.Counter(op.type for op in arrays if op.type in ARITHMETIC))
    assert_same_bits(*states)
    assert (4 if factory is normalised else 1.4) * left[0].total() < left[1].total(), left
    assert sum(len(chain.members) for chain in chains) > 20
