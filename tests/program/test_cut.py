"""Where a traced step is cut: into how many segments, what lies in which, and that it is traced once."""

import collections
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import gan, program_of, step_of, two_parts
from parity import assert_close, data, mlp, on_towers

import ncclsync
from ncclsync.sharding.roles import Role, role_of
from ncclsync.towers.exchange import together

X, Y = data(rows=24)


def trained(factory, towers=3, **arguments):
    model = on_towers(factory, towers, **arguments)
    if factory is gan:
        model.fit(tf.data.Dataset.from_tensors((X, X[:, :4])), verbose=0)
    else:
        model.train_on_batch(X, Y)
    return model


def joins(program):
    """[segments] how many calls join the towers after a segment."""
    return [len(together(segment.outgoing)) for segment in program.segments]


def exchanges(segment):
    return [exchange for bucket in segment.outgoing for exchange in bucket.exchanges]


def writes(program):
    """[segments] the variables that a segment writes and that must be the same on all towers."""
    variables = dict(program.variables)
    found = []
    for segment in program.segments:
        graph = segment.function.graph
        names = dict(zip((tensor.op.name for tensor in graph.inputs), segment.sources, strict=False))
        targets = [op.inputs[0].op.name for op in graph.get_operations() if op.type.startswith("Assign")]
        written = [variables[names[target]] for target in targets if names.get(target) in variables]
        found.append([variable for variable in written if role_of(variable) is Role.SAME])
    return found


def test_plain_step_is_two_segments(as_on_gpus):
    """Forward, backward and the metrics' updates before the one collective; the optimizer after it. All four
    gradients, and the state of the metrics, travel in one bucket; the updates are not exchanged again.
    """
    program = program_of(trained(mlp))
    assert joins(program) == [1, 0]
    sums = exchanges(program.segments[0])
    assert all(e.collective.op == "sum" for e in sums)
    assert sorted(e.shape.num_elements() for e in sums if e.shape.rank) == [5, 16, 5 * 16, 12 * 16]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("factory", [gan, two_parts])
def test_two_optimizers_are_three_segments(factory, as_on_gpus):
    """One collective for each optimizer, whose updates the next segment uses; what the step returns travels
    with the gradients, not after them.
    """
    assert joins(program_of(trained(factory))) == [1, 1, 0]


def test_what_is_added_up_is_joined_together():
    """On the host too, gradients and metric state are one call: all of them are sums of the towers' parts."""
    program = program_of(trained(mlp))
    assert joins(program) == [1, 0]


def test_weights_are_written_in_the_last_segment():
    """No tower writes a weight before all towers are through with all that can fail; so nothing is kept to
    undo a step.
    """
    program = program_of(trained(mlp))
    *early, late = writes(program)
    assert early == [[]]
    assert len({id(variable) for variable in late}) == 4 * 3 + 1  # weights, two Adam slots each, iterations
    assert program.rollback == ()


def test_custom_step_that_returns_its_loss_needs_no_rollback():
    """What Keras' guide teaches: one optimizer, the loss as it is in the logs. One collective as well."""

    class Custom(keras.Sequential):
        def train_step(self, batch):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    def factory():
        model = Custom([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    program = program_of(trained(factory))
    assert [count > 0 for count in joins(program)] == [True, False] and program.rollback == ()


@pytest.mark.slow
def test_early_writes_are_undone():
    """A GAN's first update comes before the last segment: what it writes is kept; the last cannot fail."""
    program = program_of(trained(gan))
    early = {id(variable) for segment in writes(program)[:-1] for variable in segment}
    variables = dict(program.variables)
    assert early and {id(variables[name]) for name, _ in program.rollback} == early


@pytest.mark.parametrize(
    "of", [tf.linalg.cholesky, lambda m: tf.cond(m[0, 0] < 9.0, lambda: tf.linalg.cholesky(m), lambda: m)]
)
def test_what_fails_within_the_last_segment_is_undone(of):
    """By the numbers that it is given, or deep within a branch: what was written before is as it was."""
    written = tf.Variable(tf.zeros([2, 2]))

    def step(x):
        total = tf.reduce_sum(x) * tf.eye(2)
        written.assign_add(total)
        return tf.reduce_sum(of(total))

    with ncclsync.Towers(3) as towers:
        towers.run(step, np.ones([5, 1], "float32"))
        (program,) = (one for made in towers._steps.values() for one in made.programs.kept.values())
        assert [dict(program.variables)[name] is written for name, _ in program.rollback] == [True]


def test_rows_of_an_earlier_read_may_rest_on_a_later_one():
    """What is read before a sparse update is gathered by indices that are read after it."""

    def variable_and_step():
        table = tf.Variable(tf.reshape(tf.range(10.0), [5, 2]))

        def step(x):
            early = tf.convert_to_tensor(table)
            table.scatter_sub(tf.IndexedSlices(tf.ones([2, 2]), [1, 3]))
            later = tf.cast(tf.reduce_sum(tf.convert_to_tensor(table)), tf.int32)
            return tf.gather(early, [later % 5, (later + 1) % 5]), tf.reduce_sum(x)

        return table, step

    (table, step), (alone, plain) = variable_and_step(), variable_and_step()
    x = np.arange(8, dtype="float32").reshape(4, 2) % 5
    with ncclsync.Towers(2) as towers:
        for _ in range(2):
            assert_close(towers.run(step, x), tf.function(plain)(tf.constant(x)))
    assert_close(table, alone)


def test_evaluation_writes_no_weight():
    """A test step reads weights, and folds the metrics."""
    model = on_towers(mlp, 3)
    model.test_on_batch(X, Y)
    (program,) = model.test_function.__self__.step.programs.kept.values()
    assert writes(program) == [[]] * len(program.segments) and program.rollback == ()
    assert len(program.segments) == 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name, momentum", [("Adam", {}), ("SGD", {}), ("SGD", {"momentum": 0.9})])
def test_a_table_of_which_rows_are_read_does_not_travel(name, momentum):
    """Its sparse gradient does: as many rows as there are slices, or as the table has if those are fewer."""

    def factory():
        body = [keras.layers.Embedding(1000, 8), keras.layers.Flatten(), keras.layers.Dense(5)]
        model = keras.Sequential([keras.Input((12,), dtype="int32"), *body])
        optimizer = getattr(keras.optimizers, name)(**momentum)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    model = on_towers(factory, 3)
    model.train_on_batch(np.abs(X).astype("int32"), Y)
    shapes = [e.shape.as_list() for segment in program_of(model).segments for e in exchanges(segment)]
    assert [None, 8] in shapes and [1000, 8] not in shapes


def test_metric_reads_are_global_and_state_is_folded_into_tower_0():
    """A metric's result is computed from the towers' sum; its state is in tower 0 alone afterwards."""
    model = trained(mlp)
    sums = [e for e in exchanges(program_of(model).segments[0]) if e.shape.rank == 0]
    # Loss and accuracy have two variables each; one sum serves both the result and the state.
    assert len(sums) == 4
    states = [v for _, v in program_of(model).variables if role_of(v) is Role.SUM]
    assert len(states) == 4
    for variable in states:
        values = [copy.numpy() for copy in model.towers.replicas.of(variable)]
        assert values[1:] == [0.0, 0.0] and values[0] != 0.0
    assert {float(v.numpy()) for v in states if "count" in v.name} == {24.0}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("towers", [2, 5])
def test_python_of_a_step_runs_once(towers, monkeypatch):
    """However many towers and batches: a step is traced as Keras does it, for a size, and for all other sizes."""
    calls = []
    step = keras.Model.train_step

    def counting(self, batch):
        calls.append(batch)
        return step(self, batch)

    monkeypatch.setattr(keras.Model, "train_step", counting)
    model = on_towers(mlp, towers)
    for rows in (24, 7, 1, 10):
        model.train_on_batch(X[:rows], Y[:rows])
    assert len(calls) == 2


def test_towers_share_their_segments():
    """Each segment is one function, called once per tower: a step's size does not grow with the towers."""
    model = trained(mlp, towers=5)
    (function,) = (found.graph for found in step_of(model)._functions.values())
    nodes = function.graph.as_graph_def().node
    called = collections.Counter(node.attr["f"].func.name for node in nodes if "f" in node.attr)
    for segment in program_of(model).segments:
        name = segment.function.name
        assert called[name if isinstance(name, str) else name.decode()] == 5


@pytest.mark.parametrize("how", ["unknown", "known", "eager"])
def test_results_of_one_row_per_sample(how):
    """A step that returns something of each sample returns it of all samples, in order, as one device does:
    whether the number of rows is known, and divides evenly, or not.
    """

    class PerSample(keras.Sequential):
        def train_step(self, batch):
            return {"each": tf.reduce_sum(batch[0], axis=1)}

    def factory():
        model = PerSample([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd", run_eagerly=how == "eager")
        return model

    model = on_towers(factory, 3)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24, drop_remainder=how == "known")
    model.make_train_function()
    result = model.train_function(iter(batches))["each"]
    assert_close(result, np.sum(X, axis=1))


def table_and_head():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(50, 4)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(5)(keras.layers.Flatten()(rows)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_rows_of_a_table_are_not_taken_from_a_copy():
    """An embedding's rows come from the variable itself: no op reads the table, and rows that are not there
    are an error as on one device.
    """
    words = np.random.default_rng(0).integers(50, size=(24, 3))
    model, alone = on_towers(table_and_head, 3), table_and_head()
    for one in (model, alone):
        one.fit(words, Y, batch_size=10, verbose=0, shuffle=False)
    assert_close(model.get_weights(), alone.get_weights())
    ops = [op for segment in program_of(model).segments for op in segment.function.graph.get_operations()]
    (taken,) = (op.inputs[0] for op in ops if op.type == "ResourceGather")
    assert not [op for op in ops if op.type == "ReadVariableOp" and op.inputs[0] is taken]
    words[3, 1] = 50
    with pytest.raises(tf.errors.InvalidArgumentError, match="50 is not in"):
        model.fit(words, Y, batch_size=10, verbose=0, shuffle=False)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_segments_on_gpus_meet_in_the_step(shares_memory):
    """They have ops of the host's; CPU towers have none, and two of them may stand on one device."""
    model = on_towers(mlp, 2)
    session = model.towers.session
    session.target = dataclasses.replace(session.target, shares_memory=shares_memory, passes=())
    model.train_on_batch(X, Y)
    functions = [segment.function.function_def for segment in program_of(model).segments]
    assert {function.attr["shared_rendezvous"].b for function in functions} == {not shares_memory}


def normalised():
    """A model whose gradients divide by fixed lengths."""
    inputs = keras.Input([12])
    x = keras.layers.LayerNormalization()(keras.layers.Dense(16)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(5)(keras.layers.RMSNormalization()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_numbers_of_fixed_lengths_are_constants():
    """No tower counts how many elements a mean's gradient is divided by, nor runs any op for nothing."""
    model, alone = trained(normalised, 2), normalised()
    for segment in program_of(model).segments:
        graph = segment.function.graph
        ops = [op for op in graph.get_operations() if op.type not in ("Placeholder", "Const", "NoOp")]
        assert not {"Prod", "FloorDiv", "Size"} & {op.type for op in ops if "normalization" in op.name}
        ends = {tensor.op.name for tensor in graph.outputs} | {op.name for op in graph.control_outputs}
        used = {tensor.op.name for op in ops for tensor in op.inputs} | {
            c.name for op in ops for c in op.control_inputs
        }
        assert not [op.name for op in ops if op.name not in used | ends]
    model.set_weights(alone.get_weights())
    for rows in (7, 1, 24):
        assert_close(model.train_on_batch(X[:rows], Y[:rows]), alone.train_on_batch(X[:rows], Y[:rows]))
