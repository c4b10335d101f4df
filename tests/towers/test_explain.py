"""`model.towers.explain()`: what towers do with a step, before it is trained and after."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import data, mlp, on_towers

from ncclsync import NcclSyncError, Towers, nccl_parallel, ops
from ncclsync.towers.explanation import CutRow, Explanation, VariableRow

X, Y = data(rows=20)
PARTS = "all-reduce: sum of the towers' parts"
HERE = pathlib.Path(__file__).name


class Mine(keras.Sequential):
    """A step of one's own, whose lines are to be named."""

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        largest = ops.all_reduce(tf.reduce_max(x), op="max")  # the maximum
        self.optimizer.apply(gradients, self.trainable_variables)  # the update
        return {"loss": loss, "largest": largest}


def mine():
    """Two layers of one shape, an Embedding's sparse gradient, moving averages, dropout."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Embedding(7, 4, name="table"),
        keras.layers.Dense(4, name="one"),
        keras.layers.Dense(4, name="two"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(5, name="last"),
    ]
    model = Mine([keras.Input((3,), dtype="int32"), *layers])
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "sparse_categorical_crossentropy")
    return model


def rows_of(explanation):
    return {row.name.split("/", 1)[1]: row for row in explanation.variables}


class Taught(keras.Model):
    """An average of the weights, a weight whose gradient all towers compute alike, and a queue of rows."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (
            keras.Sequential([keras.Input([12]), keras.layers.Dense(5, name=f"{name}_last")], name=name)
            for name in ("student", "teacher")
        )
        self.scale = self.add_weight(shape=[1], initializer="ones", name="scale")
        self.queue = self.add_weight(shape=[20, 5], trainable=False, name="queue")

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.student(x))
            loss = self.scale[0] * tf.reduce_mean(tf.math.top_k(losses, 3).values)
        weights = [*self.student.trainable_weights, self.scale]
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
        self.optimizer.apply(gradients, weights)
        for one, other in zip(self.teacher.weights, self.student.weights, strict=True):
            one.assign(0.9 * one + 0.1 * other)
        self.queue.assign(self.student(x))
        return {"loss": loss, "norm": norm}


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_an_exchange_is_of_the_variable_of_its_shape_that_rests_on_it_next(optimizer):
    """Not of slots, averages or other weights that rest on it through a norm of the gradients."""

    def make():
        model = Taught()
        model.compile(optimizer(0.1))
        return model

    found = on_towers(make, 3).towers.explain((X, Y))
    exchanged = {row.name.split("/", 1)[1]: row.rule for row in found.variables if row.bucket}
    rows = "all-gather: the rows of all towers"
    assert exchanged == {"student_last/kernel": PARTS, "student_last/bias": PARTS, "queue": rows}


def test_keras_own_exchanges_name_a_layer_or_a_line():
    """Those of no variable, such as statistics and a norm; an op that no layer's name tells is Keras' line."""

    def make():
        layers = [keras.layers.Dense(3, name="one"), keras.layers.BatchNormalization(name="norm")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse", metrics=[keras.metrics.AUC()])
        return model

    found = nccl_parallel(towers=2, exact=True)(make)().towers.explain(4)
    lines = {cut.line for cut in found.cuts if "other" in cut.what}
    assert any("Keras' own step, the layer" in line and "norm" in line for line in lines)
    assert any(re.search(r"Keras' own step, keras/src/metrics/\S+py:\d+ \(", line) for line in lines), lines
    assert not any("could not" in line for line in lines), lines


def test_names_are_not_broken():
    """Nor is any other word; long texts are, at spaces."""
    row = VariableRow("adam/" + "a_long_name_" * 7, 4, "same", "a rule in several words " * 5, None)
    cut = CutRow(
        1, "other; all-gather: the rows of all towers", 1, 8, f"/{'a_folder/' * 20}file.py:1 (a line " + "of words)" * 9
    )
    words = str(Explanation(1, (row,), (cut,), ())).split()
    assert {*row.name.split(), *row.rule.split(), *cut.what.split(), *cut.line.split()} <= {*words}
    assert max(len(line) for line in str(Explanation(1, (row,), (), ())).splitlines()) < 200


def test_sizes_that_no_shape_tells_are_not_zero():
    """Of a tensor whose length depends on numbers."""
    assert "?" in str(Explanation(1, (), (CutRow(1, "other", 1, None, "a line"),), ()))


def test_variables_and_lines_of_a_step():
    """Before the first step: how each variable is exchanged, and the user's lines that cut the step."""
    model = on_towers(mine, 3)
    before = model.get_weights()
    found = model.towers.explain(8)
    rows = rows_of(found)
    assert rows["table/embeddings"].rule == "all-gather: the rows of all towers"
    assert rows["one/kernel"].rule == rows["two/kernel"].rule == rows["last/bias"].rule == PARTS
    assert rows["norm/moving_mean"].rule == "all-reduce: mean over the samples"
    assert rows["one/kernel"].size_bytes == 64
    assert rows["one/kernel"].bucket[0] == rows["table/embeddings"].bucket[0] == 1
    moments = [row for name, row in rows.items() if name.endswith(("_momentum", "_velocity"))]
    assert len(moments) == 18
    for row in (*moments, rows["iteration"]):
        assert (row.role, row.bucket) == ("same", None)
    assert [row.role for name, row in rows.items() if "seed" in name] == ["seed"]
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    for comment, what in (("# the update", f"gradients; {PARTS}"), ("# the maximum", "other; all-reduce: max")):
        number = next(i for i, line in enumerate(lines, start=1) if line.endswith(comment))
        cuts = [cut for cut in found.cuts if cut.what == what]
        assert len(cuts) == 1
        assert f"{HERE}:{number} (" in cuts[0].line
    assert [(shard.begin, shard.end) for shard in found.shards] == [(0, 3), (3, 6), (6, 8)]
    assert "table/embeddings" in str(found) and "The step has" in repr(found)
    assert {cut.line for cut in found.cuts if "metrics" in cut.what} <= {"Keras' own step"}
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_after_a_fit(monkeypatch):
    """The program that ran, with its last batch: nothing is traced again. Each gradient is one weight's."""
    model = on_towers(mlp, 3)
    model.fit(X, Y, batch_size=13, verbose=0)
    monkeypatch.setattr("ncclsync.towers.programs.trace", None)
    found = model.towers.explain()
    assert [shard.end - shard.begin for shard in found.shards] == [3, 2, 2]
    rows = rows_of(found)
    assert [rows[f"{layer.name}/kernel"].rule for layer in model.layers] == [PARTS] * 2
    states = [row for row in found.variables if row.role == "sum"]
    assert {row.name for row in states} == {"loss/total", "loss/count", "accuracy/total", "accuracy/count"}
    assert all(row.rule == PARTS and row.bucket for row in states)
    gradients = [cut for cut in found.cuts if cut.what.startswith("gradients")]
    assert [cut.tensors for cut in gradients] == [4]
    assert gradients[0].size_bytes == 4 * (12 * 16 + 16 + 16 * 5 + 5)


def test_buckets_of_gpus(as_on_gpus):
    """Where gradients travel in buckets, small ones share one, and each has its own if it is full."""
    for bucket_bytes, buckets in ((1 << 20, 1), (64, 4)):
        rows = rows_of(on_towers(mlp, 2, bucket_bytes=bucket_bytes).towers.explain((X, Y)))
        assert len({row.bucket for row in rows.values() if row.rule == PARTS and row.role == "same"}) == buckets


@pytest.mark.parametrize(("rows", "sizes"), [(8, "4: 2"), (7, "4 and 3: 3")])
def test_what_xla_compiles(rows, sizes):
    """Programs, and which of these for each number of rows; nothing where it compiles none."""
    model = on_towers(lambda: mlp(jit_compile=True), 2)
    told = model.towers.explain((X[:rows], Y[:rows])).compiled
    assert (
        f"as 2 programs, 1 of these anew for each number of rows that a tower gets, of this batch {sizes} comp" in told
    )
    model.towers.close()
    assert not on_towers(mlp, 2).towers.explain((X, Y)).compiled


@pytest.mark.parametrize(
    "change",
    [
        lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0],
        lambda gradients: [tf.clip_by_norm(one, 0.1) for one in gradients],
        lambda gradients: [one / tf.linalg.global_norm(gradients) for one in gradients],
    ],
    ids=["by global norm", "by norm", "normalised"],
)
def test_gradients_scaled_by_their_norm_are_sent_once(change):
    """They are whole for the norm, and stay so: not scaled as parts, and added up again."""

    class Scaled(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = change(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def build():
        model = Scaled([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    model = on_towers(build, 2)
    found = model.towers.explain(8)
    weights = sum(weight.numpy().nbytes for weight in model.trainable_weights)
    assert sum(one.size_bytes for one in found.cuts) == weights + 4  # and the loss
    assert found.segments == 2


def test_one_tower_and_a_loop():
    """One tower exchanges nothing; a loop's step is explained once it has run."""
    found = on_towers(mlp, 1).towers.explain(4)
    assert {row.bucket for row in found.variables} == {None}
    assert [(shard.begin, shard.end) for shard in found.shards] == [(0, 4)]
    assert (found.segments, found.cuts, found.wholes) == (1, (), ()) and "Keras' own step" in found.order
    weight = tf.Variable([1.0, 2.0], name="weight")
    with Towers(2) as towers:
        with pytest.raises(NcclSyncError, match=r"a step that Towers\.run has run"):
            towers.explain()
        towers.run(lambda x: weight.assign_add(tf.reduce_mean(x, 0)), tf.ones([5, 2]))
        found = towers.explain()
    assert [(row.name, row.rule) for row in found.variables] == [("weight:0", "all-reduce: mean over the samples")]
    assert [shard.end for shard in found.shards] == [3, 5]


def test_one_tower_makes_no_batch_up(caplog):
    """Keras' own step has run: its rows are not known. Nor does that tower normalise, or draw, otherwise."""
    model = on_towers(mine, 1)
    model.train_on_batch(np.zeros([7, 3], "int32"), np.zeros([7], "int32"))
    assert model.towers.explain().shards == () and "as under MirroredStrategy" not in caplog.text
    assert [one.end for one in model.towers.explain(9).shards] == [9]


def test_the_step_that_ran_last():
    """Not the one that was made last, nor one that cannot be traced."""
    weight = tf.Variable([1.0, 2.0], name="weight")

    def add(x):
        return weight.assign_add(tf.cast(tf.reduce_mean(x, 0), tf.float32))

    def fail(_):
        raise ValueError("never traced")

    with Towers(2) as towers:
        towers.run(add, tf.ones([5, 2]))
        towers.run(lambda x: tf.reduce_sum(x), tf.ones([8, 2]))
        towers.run(add, tf.ones([4, 2]))
        with pytest.raises(ValueError, match="never traced"):
            towers.run(fail, tf.ones([8, 2]))
        found = towers.explain()
        assert [row.name for row in found.variables] == ["weight:0"] and [one.end for one in found.shards] == [2, 4]
        towers.run(add, np.ones([6, 2], np.float64))  # of another dtype: another program
        towers.run(add, tf.ones([7, 2]))
        assert [one.end for one in towers.explain().shards] == [4, 7]


@pytest.mark.parametrize(
    "batch, error",
    [
        (0, "at least one row. Received: 0"),
        ("x", r"a batch size, or a batch .* 'x'. Write explain\(64\), with"),
        ("16", r"'16'. Write explain\(16\), with"),
        ((X,), "data with targets, .* since sequential.* was compiled with the loss .* Received: x alone"),
        ([X], "data with targets, .* Received: x alone"),
        ((X, None), "data with targets, .* Received: x alone"),
        ((), r"a batch \(x,\), \(x, y\) or \(x, y, sample_weight\). Received: 0 elements"),
        ((X, Y, Y, Y), "Received: 4 elements"),
    ],
)
def test_bad_batch(batch, error):
    """Refused by what it is."""
    with pytest.raises((TypeError, ValueError), match=error):
        on_towers(mlp, 2).towers.explain(batch)


@pytest.mark.slow
def test_a_batch_that_no_memory_holds():
    """Only its size counts."""
    assert [shard.end for shard in on_towers(mlp, 2).towers.explain(10**12).shards] == [5 * 10**11, 10**12]


def test_batch_of_inputs_alone():
    """Of a model whose own loss asks for no targets."""

    class Encoder(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.square(y_pred))

    def build():
        inputs = keras.Input((12,))
        model = Encoder(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", loss="mse")
        return model

    assert on_towers(build, 2).towers.explain((X,)).shards[-1].end == len(X)


def test_a_batch_size_for_a_model_without_inputs():
    """After a step its shapes are those of that step's batch."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    def build():
        model = Model()
        model.compile("sgd", "mse")
        return model

    model = on_towers(build, 2)
    with pytest.raises(ValueError, match="give a batch"):
        model.towers.explain(31)
    model.fit(np.ones((8, 2)), np.ones((8, 3)), batch_size=4, verbose=0)
    assert [one.end for one in model.towers.explain(31).shards] == [16, 31]
    assert [one.end for one in model.towers.explain().shards] == [2, 4]


def test_the_state_stays_as_it_was():
    """Though an LSTM's dropout draws where it predicts, and outputs are predicted to make targets up."""
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2, dropout=0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    nccl_parallel(towers=2)(lambda: model)()
    before = [one.numpy() for one in model.variables]
    explained = model.towers.explain()
    for one, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(one, value, err_msg=one.path)
    assert "last batch" not in str(explained)
    model.fit(np.ones([7, 4, 3]), np.ones([7, 1]), batch_size=4, verbose=0)
    assert "The last batch, of 3 rows, is shown." in str(model.towers.explain())
