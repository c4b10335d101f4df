"""Python that asks a step's tensors for their number of rows, which one device knows, is told on towers, too."""

import logging
import runpy

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data, on_towers

import ncclsync
from ncclsync.program.trace import Refusals
from ncclsync.training.keras_model import step_of

X, _ = data(rows=26, features=6)


def unpacked(x, _):
    rows, width = x.shape
    del rows
    return 2 * tf.reshape(x, [-1, width])


def whichever_is_known(x, _):
    rows = x.shape[0] or tf.shape(x)[0]
    return tf.reshape(x, [rows, 2, 3])[:, 0] / tf.cast(rows, x.dtype) + tf.zeros([rows, 3])


def by_list(x, _):
    known, shape = x.shape.as_list(), tf.shape(x)
    return 3 * tf.reshape(x, [shape[axis] if length is None else length for axis, length in enumerate(known)])


def branching(x, _):
    rows = x.shape[0] or tf.shape(x)[0]
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: 2.0 * tf.reshape(x, [rows, 6]), lambda: x)


def halved(x, _):
    half = (x.shape[0] or tf.shape(x)[0]) // 2
    return x[:, :3] + tf.cast(half, x.dtype)


def counted(x, seen):
    seen.assign_add(x.shape[0] or tf.shape(x)[0])
    return x


def steps_of_rows(x, _):
    x = tf.reshape(x, [keras.ops.shape(x)[0], 2, 3])
    return tf.tensordot(x, tf.ones([3, 4]), 1)[:, 1] + keras.ops.mean(keras.ops.diagonal(x, axis1=0, axis2=1))


def drawn(x, seen):
    seen.seeds = getattr(seen, "seeds", None) or keras.random.SeedGenerator(1)
    return x + 0 * tf.cast(keras.random.randint((keras.ops.shape(x)[0], 6), 0, 3, seed=seen.seeds), x.dtype)


def another_factor(x, _):
    return x * (1 + (x.shape[0] or 1) / 10)


def another_op(x, _):
    rows, _ = x.shape
    return tf.sin(x) if rows else x


def another_count(x, seen):
    seen.assign_add(x.get_shape()[0] or 1)
    return x


def centred_if_known(x, _):
    if x.shape[0] is None:
        return x
    return x - tf.reduce_mean(x, 0)


def by_all_lengths(x, _):
    return x / (x.shape.num_elements() or 1) if x.shape.is_fully_defined() else x


def by_kind_of_number(x, _):
    return 2 * x if isinstance(keras.ops.shape(x)[0], int) else x


def in_a_branch(x, _):
    rows = x.shape[0]
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: x * (2.0 if rows else 1.0), lambda: x)


def of_an_array(x, _):
    return x * tf.ones(x.shape) if x.shape.is_fully_defined() else 2 * x


def by_its_dims(x, _):
    return x / (x.shape.dims[0].value or 1)


def by_comparison(x, _):
    return x if x.shape in [(8, 6), (10, 6)] else 3 * x


def by_a_slice(x, _):
    return x if x.shape[:1] == [None] else 3 * x


def another_variable(x, seen):
    chosen = seen.two[0 if x.shape[0] else 1]
    return x * chosen


def another_choice(x, _):
    return tf.nn.leaky_relu(x, 0.1 if x.shape[0] else 0.9)


def another_end(x, _):
    return tf.while_loop(lambda i, _: i < (x.shape[0] or 3) // 3, lambda i, y: (i + 1, 1.1 * y), [0, x])[1]


def as_many_steps(x, _):
    rows = x.shape[0] or tf.shape(x)[0]
    return tf.while_loop(lambda i, _: i < rows // 3, lambda i, y: (i + 1, 1.1 * y), [0, x])[1]


def in_parts(x, _):
    return tf.concat([part - tf.reduce_mean(part, 0) for part in keras.ops.array_split(x, 3)], 0)


def a_part(x, _):
    return x + tf.reduce_mean(keras.ops.array_split(x, 2)[-1])


def warped(x, _):
    return keras.ops.image.elastic_transform(x[:, :, None, None], seed=3)[..., 0, 0]


def in_another_order(x, _):
    return tf.subtract(*((x, 2 * x) if x.shape[0] else (2 * x, x)))


def another_output(x, _):
    return tf.split(x * tf.range(6.0), 2, -1)[0 if x.shape[0] else 1]


def another_array(x, _):
    return x * tf.constant(np.arange(6.0, dtype="float32") if x.shape[0] else np.ones(6, "float32"))


def another_seed(x, _):
    return x + tf.random.stateless_uniform([6], [x.shape[0] or 1, 3])


def by_its_text(x, _):
    return x * len(f"{x.shape}")


def folded(x, _):
    known = tf.get_static_value(tf.shape(x))
    return x if known is None else x * (1 + known[0] / 10)


def within_python(x, _):
    rows = x.shape[0]
    factor = tf.numpy_function(lambda: np.float32(2 if rows else 1), [], tf.float32)
    return x * tf.ensure_shape(factor, [])


def of_another_axis(x, _):
    return x * (tf.transpose(x).shape[1] or 1)


def handed_on(x, _):
    return tf.ones(x.shape) * x + tf.zeros([x.shape[0], 1])


def numbered(x, _):
    return tf.one_hot(tf.range(x.shape[0]) % 3, 6) * x


def tiled(x, _):
    return x * tf.tile([[1.0, 2, 3, 4, 5, 6]], [x.shape[0], 1])


def reshaped(x, _):
    return 2 * tf.reshape(tf.reshape(x, [x.shape[0], 3, -1]), [x.shape[0], -1])[:, ::-1]


def a_loop_of_pythons(x, _):
    return tf.stack([2 * x[row] for row in range(x.shape[0])])


def divided_by(x, _):
    return x * tf.reduce_sum(x) / x.shape[0]


def a_diagonal(x, _):
    return tf.nn.softmax(tf.matmul(x, x, transpose_b=True) - 5 * tf.eye(x.shape[0])) @ x


# What TensorFlow tells Python by itself.
def by_a_spec(x, _):
    return x * (tf.TensorSpec.from_tensor(x).shape[0] or 1)


def by_its_words(x, _):
    return x * len(repr(x).partition("shape=")[2].partition(")")[0])


def handed_to_keras(x, _):
    return x / (keras.layers.Dense(2).compute_output_shape(x.shape)[0] or 1)


def of_a_keras_tensor(x, _):
    return x / (keras.KerasTensor(x.shape).shape[0] or 1)


def reshaped_or_not(x, _):
    try:
        return x * tf.cast(tf.reshape(tf.range(tf.size(x)), x.shape), x.dtype)
    except ValueError:
        return x * 0.5


def filled_or_not(x, _):
    try:
        return x * keras.ops.full(x.shape, 3.0)
    except (TypeError, ValueError):
        return x * 0.5


def unstacked_or_not(x, _):
    try:
        return tf.stack([one / (1.0 + i) for i, one in enumerate(tf.unstack(x))])
    except ValueError:
        return x * 0.5


def added_or_not(x, _):
    """Open rows pass what one device's trace refuses."""
    try:
        return x + tf.ones([9, 6])
    except ValueError:
        return x * 0.5


def checked_or_not(x, _):
    """What is refused is used by nothing."""
    try:
        tf.ensure_shape(x, [9, 6])
        return x * 2.0
    except ValueError:
        return x * 0.5


def unstacked(x, _):
    return tf.stack(tf.unstack(x)) * 2


def of_no_open_gradient(x, _):
    """TensorFlow's own gradient raises a NotImplementedError where the number of rows is open."""
    return x + tf.reduce_sum(tf.abs(tf.linalg.qr(x)[1]))


TOLD = (unpacked, whichever_is_known, by_list, branching, halved, counted, steps_of_rows, drawn, as_many_steps)
TOLD += (another_factor, another_op, another_count, centred_if_known, by_all_lengths, by_kind_of_number)
TOLD += (in_a_branch, of_an_array, by_its_dims, by_comparison, by_a_slice, another_variable, another_choice)
TOLD += (
    another_end,
    in_parts,
    a_part,
    warped,
    in_another_order,
    another_output,
    another_array,
    another_seed,
    by_its_text,
)
TOLD += (within_python, of_another_axis, handed_on, a_loop_of_pythons, divided_by, a_diagonal)
TOLD += (by_its_words, handed_to_keras, of_a_keras_tensor, reshaped_or_not, filled_or_not)
WHOLE = (by_a_spec, unstacked, unstacked_or_not, folded, added_or_not, checked_or_not)
NEEDING = (
    handed_on,
    a_loop_of_pythons,
    divided_by,
    a_diagonal,
    added_or_not,
    checked_or_not,
    unstacked,
    numbered,
    tiled,
    reshaped,
)  # which Keras' symbolic call lacks


class Asking(keras.layers.Layer):
    """A layer that knows its number of rows as far as Python does."""

    def __init__(self, call):
        super().__init__()
        self.asks = call
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.seen.two = [tf.Variable(one, trainable=False) for one in (1.0, 2.0)]

    def call(self, x):
        return self.asks(x, self.seen)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype) if self.asks in NEEDING else super().compute_output_spec(x)


def with_asking(call, *before):
    def build():
        keras.utils.set_random_seed(1)
        made = [keras.layers.Dense(units) for units in before]
        model = keras.Sequential([keras.Input([6]), *made, Asking(call), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    return build


def by_batches(model):
    """Two of one size, which Keras knows; it leaves the size open from the next one on."""
    sizes = (10, 10) if model.layers[0].asks in NEEDING else (10, 10, 7)
    return [model.train_on_batch(X[:n], X[:n, :1]) for n in sizes]


def by_dataset(model):
    batches = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8, drop_remainder=True)
    return model.fit(batches, verbose=0).history["loss"]


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("train", [by_batches, by_dataset])
@pytest.mark.parametrize("call", [*WHOLE, *TOLD])
def test_what_one_device_knows(call, train, caplog):
    """One device's numbers; the line is named if Python goes by what it cannot be told."""
    alone, model = with_asking(call)(), on_towers(with_asking(call), 3)
    with caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close(train(model), train(alone))
    assert_close([w.numpy() for w in model.weights], [w.numpy() for w in alone.weights])
    told = [one.getMessage() for one in caplog.records if "a fixed number of rows" in one.getMessage()]
    assert len(told) == (call in WHOLE)
    assert all(f"{__file__}:" in one for one in told)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    "call",
    [
        *(another_factor, by_list, of_no_open_gradient, by_its_text, by_a_spec, numbered, halved, in_a_branch),
        *(by_its_words, handed_to_keras, reshaped_or_not, unstacked_or_not, added_or_not, checked_or_not),
    ],
)
def test_loops_of_ones_own(call, caplog):
    """A step of `Towers.run` is told each batch's number of rows, and is traced for each."""
    weight, seen = tf.Variable(tf.ones([6, 1])), tf.Variable(0)
    seen.two = [tf.Variable(one, trainable=False) for one in (1.0, 2.0)]

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.cast(call(tf.matmul(x, weight * tf.eye(6)), seen), tf.float32)
            loss = tf.reduce_mean(y) + tf.reduce_max(tf.square(y))
        (gradient,) = tape.gradient(loss, [weight])
        weight.assign_sub(0.01 * gradient)
        return loss

    def trained(run):
        weight.assign(tf.ones([6, 1]))
        seen.assign(0)
        vars(seen).pop("seeds", None)
        return [run(tf.constant(X[:n, :6])) for n in (8, 5, 8, 3)], weight.numpy(), seen.numpy()

    alone = trained(tf.function(step))
    with ncclsync.Towers(3) as towers, caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close(trained(lambda x: towers.run(step, x)), alone)
        (made,) = towers._steps.values()
    assert len(made.programs.kept) == 3
    assert any("a fixed number of rows" in one.getMessage() for one in caplog.records) == (
        call in (*WHOLE, of_no_open_gradient)
    )


def test_shapes_are_asked_once_for_each_number_of_rows(monkeypatch):
    """And not for lengths that TensorFlow would relax."""
    asked, line = [], Refusals.line
    monkeypatch.setattr(Refusals, "line", lambda self, specs: asked.append(specs) or line(self, specs))
    with ncclsync.Towers(2) as towers:
        for shape in [(8, 4), (7, 4), (8, 4), (7, 4), *((8, 5 + k) for k in range(6))]:
            towers.run(tf.reduce_sum, tf.ones(shape))
    assert [[length for length in one.shape] for one in asked] == [[8, 4], [7, 4]]


def test_ops_that_look_through_a_variables_handle(caplog):
    """Of an argument that is a handle TensorFlow takes the handle's shape, which is a number's, for the variable's."""
    table = tf.Variable(np.arange(24.0).reshape(4, 6))

    def step(at):
        scores = tf.gather_nd(table, tf.stack([at[:, :-1], at[:, 1:]], -1)) + tf.gather_nd(table, at[:, :1])[..., :1]
        return tf.reduce_mean(scores + table.sparse_read(at[:, 0])[:, :1])

    batches = [tf.constant(np.arange(3 * n).reshape(n, 3) % 4, tf.int32) for n in (8, 5)]
    with ncclsync.Towers(3) as towers, caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close([towers.run(step, at) for at in batches], [tf.function(step)(at) for at in batches])
    assert not any("cannot be divided" in one.getMessage() for one in caplog.records)


def test_errors_that_some_batches_make(caplog):
    """A later batch is refused what an earlier one was not; if nothing handles it, the error is one device's."""

    def step(x):
        try:
            tf.ensure_shape(x, [8, 6])
        except ValueError:
            return tf.reduce_sum(x)
        return tf.reduce_sum(x**2)

    batches = [tf.constant(X[:n, :6]) for n in (8, 5, 8, 3)]
    with ncclsync.Towers(3) as towers, caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close([towers.run(step, x) for x in batches], [tf.function(step)(x) for x in batches])
        assert any("ensure_shape" in one.getMessage() for one in caplog.records)
        with pytest.raises(ValueError, match="Dimensions must be equal, but are 5 and 9"):
            towers.run(lambda x: x + tf.ones([9, 6]), batches[1])


def test_a_scan_over_rows():
    """With its gradient: while nobody knows the rows, Keras branches for as many as there can be, without end."""
    if keras.__version__.startswith("3.10."):
        pytest.skip("Keras 3.10's associative_scan recurs without end on one device: pip install 'keras>=3.12'")
    weight = tf.Variable(tf.ones([6, 4]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(keras.ops.associative_scan(tf.add, x @ weight)))
        return loss, tape.gradient(loss, weight)

    alone = tf.function(step)(X[:9])
    with ncclsync.Towers(2) as towers:
        assert_close(towers.run(step, X[:9]), alone)


class Noisy(keras.layers.Layer):
    """Draws by its number of rows, so that the shape of what follows has a literal number of them."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


def attending_to_itself(x):
    return keras.layers.MultiHeadAttention(2, 3)(x, x)


AFTER_NOISE = {
    "normalised": lambda: keras.layers.BatchNormalization(),
    "attention": lambda: attending_to_itself,
    "recurrent": lambda: keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True, dropout=0.2, seed=1)),
}


@pytest.mark.parametrize("name", AFTER_NOISE)
def test_what_follows_a_literal_number_of_rows(name):
    """Each tower takes its own rows of it, also where it normalises them by itself first."""

    def build():
        keras.utils.set_random_seed(1)
        given = keras.Input([3, 2])
        made = AFTER_NOISE[name]()(Noisy()(keras.layers.Dense(4)(given)))
        model = keras.Model(given, keras.layers.Dense(1)(keras.layers.Flatten()(made)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    alone, model = build(), on_towers(build, 3, exact=True)
    x = X[:7].reshape(7, 3, 2)
    assert_close(*[[one.train_on_batch(x, X[:7, :1]) for _ in range(3)] for one in (model, alone)])
    assert_close(model.get_weights(), alone.get_weights())


def test_a_loop_that_asks_for_ever_other_rows(caplog):
    """Its line is named once."""
    with ncclsync.Towers(2) as towers, caplog.at_level(logging.WARNING, "ncclsync"):
        for n in range(3, 14):
            assert_close(towers.run(by_a_number, X[:n]), X[:n] / n)
    told = [one.getMessage() for one in caplog.records if "for each further shape" in one.getMessage()]
    assert len(told) == 1 and f"{__file__}:" in told[0] and "tf.shape(x)" in told[0]


def by_a_number(x):
    return x / (x.shape[0] or 1)


class OwnFunctions(keras.Model):
    """A model whose step calls functions; the latter, which keeps its traces, is reached only where rows are known."""

    @tf.function
    def scaled(self, x):
        """Scale by the number of rows, if it is known."""
        return x * (x.shape[0] or 1) if tf.reduce_sum(x) > -1e9 else x

    @tf.function(jit_compile=True)
    def shifted(self, x):
        """Shift by the number of rows, if it is known."""
        return x + (x.shape[0] or 1)

    def loss_of(self, data):
        """Call both."""
        y_pred = self.scaled(self(data[0]))
        y_pred = y_pred if y_pred.shape[0] is None else self.shifted(y_pred)
        return tf.reduce_mean((y_pred / 10 - data[1]) ** 2)

    def train_step(self, data):
        """Train on the loss."""
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        """Return the loss."""
        return {"loss": self.loss_of(data)}


def test_functions_of_ones_own_keep_no_trace_of_what_is_told(caplog):
    """A step of open rows, before and after, calls them as on one device."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input([6])
        model = OwnFunctions(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.001))
        return model

    alone, model = build(), on_towers(build, 3)
    with caplog.at_level(logging.WARNING, "ncclsync"):
        for _ in range(2):
            assert_close(by_dataset(model), by_dataset(alone))
            assert_close(model.evaluate(X, X[:, :1], verbose=0), alone.evaluate(X, X[:, :1], verbose=0))
            assert_close(model.shifted(X[:4]), alone.shifted(X[:4]))
    assert caplog.text.count("a fixed number of rows") == 1  # what XLA compiles by itself is not told
    opened = tf.function(model.shifted, input_signature=[tf.TensorSpec([None, 1])])
    with tf.device("/CPU:0"):
        assert_close(opened(X[:5, :1]), X[:5, :1] + 1)


@pytest.mark.parametrize("names", [{"__name__": "__main__"}, {}, {"__file__": __file__}], ids=["typed", "text", "ours"])
def test_lines_of_no_file(names):
    """A function that is typed in, or comes of a text, is told as well."""
    exec(compile("def scaled(x, _):\n    return x / (x.shape[0] or 1)\n", "<stdin>", "exec"), names := dict(names))
    alone, model = with_asking(names["scaled"])(), on_towers(with_asking(names["scaled"]), 3)
    assert_close(by_dataset(model), by_dataset(alone))


@pytest.mark.parametrize("call", [divided_by, another_factor, another_op, by_its_text, handed_on, numbered, tiled])
def test_what_is_told_is_by_rows(call):
    """Each tower has its own rows alone, forward and backward."""
    model = on_towers(with_asking(call, 6), 3)
    by_dataset(model)
    (program,) = step_of(model).programs.kept.values()
    assert program.work.wholes == () and program.work.alike == ()


def test_what_an_installed_package_asks(tmp_path):
    """Its line is told like the user's."""
    (tmp_path / "site-packages").mkdir()
    file = tmp_path / "site-packages" / "installed.py"
    file.write_text("def scaled(x, _):\n    return x / (x.shape[0] or 1)\n")
    scaled = runpy.run_path(str(file))["scaled"]
    alone, model = with_asking(scaled)(), on_towers(with_asking(scaled), 3)
    assert_close(by_dataset(model), by_dataset(alone))


class TwoLosses(keras.Model):
    """A model whose gradients have two addends each, and whose step asks for the number of rows."""

    def train_step(self, data):
        """Train on the mean and on the largest errors."""
        (x, y), rows = data, keras.ops.shape(data[0])[0]
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
            loss = tf.reduce_sum(errors) / tf.cast(rows, errors.dtype) + tf.reduce_mean(tf.math.top_k(errors, 3)[0])
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Dividing(TwoLosses):
    """A model whose step has no trace without the number of rows."""

    def train_step(self, data):
        """Train on a sum that Python's number divides."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(data[0], training=True) - data[1]) ** 2) / data[0].shape[0]
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_step_that_creates_variables_where_it_is_told(caplog):
    """TensorFlow traces it twice; the optimizer's variables are made when one device's trace is."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input([6])
        model = Dividing(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.Adam(0.01))
        return model

    alone, model = build(), on_towers(build, 3)
    with caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close(by_dataset(model), by_dataset(alone))
    assert "a fixed number of rows" not in caplog.text


def test_a_step_that_asks_keras(caplog):
    """What `keras.ops.shape` returns is what one device has; the step is divided."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input([6])
        model = TwoLosses(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd")
        return model

    alone, model = build(), on_towers(build, 3)
    with caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close(by_dataset(model), by_dataset(alone))
    assert "a fixed number of rows" not in caplog.text


class Built(keras.layers.Layer):
    """A layer that goes by the shape of its first input, with a weight or without, and asks for the number of rows."""

    counts = True  # whether it goes by how often Python has run; `Towers.run` knows of no model whose state this is

    def __init__(self, weighs, asks):
        super().__init__()
        self.weighs, self.asks, self.calls = weighs, asks, 0

    def build(self, shape):
        """Note the number of rows, if it is known, and the width."""
        self.rows, self.width = shape[0] or 1, shape[-1]
        self.scale = self.add_weight([shape[-1]], initializer="ones") if self.weighs else 1.0

    def call(self, x):
        """Scale by all that."""
        self.calls += self.counts
        asked = (x.shape[0] or 1) if self.asks else 1
        return x * self.scale * (self.rows + asked / self.width + self.calls) / 10


class Unbuilt(keras.Model):
    """A model whose first batch builds it."""

    def __init__(self, weighs, asks):
        super().__init__()
        self.first, self.second = Built(weighs, asks), Built(weighs, False)
        self.last = keras.layers.Dense(1)

    def call(self, x):
        """Call the layers."""
        return self.last(self.second(self.first(x)))


def trained(model):
    return [model.train_on_batch(X[:rows], X[:rows, :1]) for rows in (8, 8, 7)]


def predicted(model):
    return [model.predict_on_batch(X[:8]), model.predict(X, batch_size=8, verbose=0)]


def run(model):
    model.first.counts = model.second.counts = False
    towers = getattr(model, "towers", None)
    step = tf.function(model) if towers is None else lambda x: towers.run(model, x)
    return [step(X[:rows]) for rows in (8, 8, 7)]


OPENED = {"signature": {"input_signature": [tf.TensorSpec([None, 6])]}, "relaxed": {"reduce_retracing": True}, "": {}}


@pytest.mark.parametrize("within", [False, True], ids=["", "within"])
@pytest.mark.parametrize("options", OPENED.values(), ids=OPENED)
def test_what_a_function_of_ones_own_opens(options, within, caplog):
    """Its Python does not know a length that its signature has open, or that TensorFlow has relaxed."""

    def build():
        function = tf.function(lambda x: tf.reduce_sum(x) * (x.shape[0] or 99), **options)
        return (lambda x: 2 * function(x)) if within else function

    batches = [tf.constant(X[:rows], tf.float32) for rows in (8, 7, 2, 8)]
    alone, step = tf.function(build()) if within else build(), build()
    with ncclsync.Towers(3) as towers, caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close([towers.run(step, x) for x in batches], [alone(x) for x in batches])
    assert "fixed number" not in caplog.text and "One device keeps" not in caplog.text


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("call", [trained, predicted, run])
@pytest.mark.parametrize("asks", [False, True], ids=["", "asks"])
@pytest.mark.parametrize("weighs", [True, False], ids=["weighs", ""])
def test_layers_that_the_first_batch_builds(weighs, asks, call, caplog):
    """They are built of the shape that one device gives them, and what they note is kept where a trace begins again."""

    def build():
        keras.utils.set_random_seed(1)
        model = Unbuilt(weighs, asks)
        model.compile("sgd", "mse")
        return model

    alone, model = build(), on_towers(build, 3)
    with caplog.at_level(logging.WARNING, "ncclsync"):
        assert_close(call(model), call(alone))
    assert [one.rows for one in (model.first, model.second)] == [8, 8] and "fixed number" not in caplog.text
