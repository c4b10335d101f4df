"""`Towers.run`: a user's own loop, without `fit`, gives one device's numbers."""

import contextlib
import functools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, data

import ncclsync
from ncclsync import ops

X, Y = data()
BATCHES = [slice(0, 20), slice(20, 31), slice(31, 61), slice(5, 6)]  # 20, 11, 30 and 1 rows


class Loop:
    """A model, an optimizer and a metric of which no `compile` knows, and a step that uses them."""

    def __init__(self):
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(5)])
        self.optimizer = keras.optimizers.Adam(0.01)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.traced = 0

    def step(self, batch):
        self.traced += 1
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self.model(x, training=True)
            loss = self.loss(y, outputs)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(y, outputs)
        return {
            "loss": loss,
            "norm": norm,
            "outputs": outputs,
            "rows": tf.shape(x)[0],
            "largest": ops.all_reduce(tf.reduce_max(x), "max"),
            "accuracy": self.accuracy.result(),
            "nothing": None,
        }


def batches():
    return [(tf.constant(X[rows]), tf.constant(Y[rows])) for rows in BATCHES]


@pytest.fixture(scope="module")
def alone():
    """Every step's results and the final weights on one device."""
    loop = Loop()
    return [loop.step(batch) for batch in batches()], loop.model.get_weights()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_loop_on_towers(count, alone):
    """Results of every step, and the weights, for batches that divide evenly and others; traced once."""
    loop = Loop()
    with ncclsync.Towers(count) as towers:
        results = [towers.run(loop.step, batch) for batch in batches()]
        assert towers.divergence() == 0.0
    assert [result.pop("nothing") for result in results] == [None] * 4
    expected = [{key: value for key, value in result.items() if key != "nothing"} for result in alone[0]]
    assert_close(results, expected)
    assert_close(loop.model.get_weights(), alone[1])
    # Once, and once more for the variables that the first trace creates, as any tf.function.
    assert loop.traced == 2


def test_the_values_of_each_tower():
    """Uncombined results, in the order of the towers, of their own shards; None where there was no sample."""

    def step(batch):
        return (tf.reduce_sum(batch["x"]), tf.shape(batch["x"])[0], ops.all_reduce(tf.shape(batch["x"])[0], "sum"))

    with ncclsync.Towers(["CPU:0"] * 4) as towers:
        for rows, sizes in ((10, [3, 3, 2, 2]), (2, [1, 1, 0, 0])):
            results = towers.run(step, {"x": X[:rows], "scalar": 2.0}, per_tower=True)
            assert [0 if result is None else int(result[1]) for result in results] == sizes
            for result, shard in zip(results, np.split(X[:rows], np.cumsum(sizes)[:-1]), strict=True):
                if result is not None:
                    np.testing.assert_allclose(result[0], shard.sum(), rtol=1e-5)
                    assert int(result[2]) == rows


def test_plain_variables_and_a_function_of_tensorflow():
    """No Keras at all, in a step that is a `tf.function`: the variable takes the mean over the batch."""
    weight = tf.Variable([0.0, 0.0])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, weight) - 1.0))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    x = tf.constant(X[:7, :2])
    expected = [step(x).numpy() for _ in range(3)], weight.numpy()
    weight.assign([0.0, 0.0])
    with ncclsync.Towers(3) as towers:
        assert_close([towers.run(step, x).numpy() for _ in range(3)], expected[0])
    assert_close(weight.numpy(), expected[1])


def test_an_error_on_one_tower_leaves_everything_as_it_was():
    """It is raised as itself; the variables keep their values, and the loop can go on."""
    weight = tf.Variable(1.0)

    def step(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 50.0, "too large")]):
            weight.assign_add(tf.reduce_mean(x))
        return weight.value()

    good, bad = tf.constant([1.0, 2.0, 3.0, 4.0]), tf.constant([1.0, 2.0, 3.0, 99.0])
    with ncclsync.Towers(4) as towers:
        towers.run(step, good)
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            towers.run(step, bad)
        assert (weight.numpy(), towers.divergence()) == (3.5, 0.0)
        assert float(towers.run(step, good)) == 6.0


def test_new_functions_for_each_step_are_told_of(caplog):
    """Each of them is traced anew, which is slow; one warning says so."""
    with ncclsync.Towers(2) as towers:
        for _ in range(9):
            towers.run(lambda x: tf.reduce_sum(x), X[:4])
    assert [record.message for record in caplog.records if "same function object" in record.message] != []
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize(
    "step, batch, error, message",
    [
        (None, X, TypeError, r"Expected a function of a batch. Received: None"),
        (tf.reduce_sum, 3.0, ValueError, r"Expected a batch with at least one tensor whose first axis"),
        (tf.reduce_sum, None, ValueError, r"Expected a batch with at least one tensor whose first axis"),
        (
            tf.reduce_sum,
            X[:9].tolist(),
            ValueError,
            r"Received: list of 9: list of 12: EagerTensor of shape.{,300}\. Of a list np.asarray makes such a tensor$",
        ),
        (lambda b: b[0], (X[:3], tf.sparse.from_dense(X[:4])), ValueError, r"the same number of rows"),
    ],
)
def test_bad_argument(step, batch, error, message):
    """Refused before anything runs."""
    with ncclsync.Towers(2) as towers, pytest.raises(error, match=message):
        towers.run(step, batch)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_batch_without_rows(count):
    """As on one device: the mean of nothing is NaN, its sum 0; rows are none; updates are what they are."""
    weight, alone = tf.Variable(2.0), tf.Variable(2.0)

    def step(batch, weight=weight):
        x, ragged, sparse = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_add(tf.math.multiply_no_nan(tape.gradient(loss, weight), 0.0) + 1.0)
        rows = tf.shape(x)[0]
        return {"mean": loss, "rows": x * 2.0, "count": rows, "ragged": ragged + 1.0, "sparse": sparse}

    def batch(rows):
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(2.0 * rows), [2] * rows)
        return tf.ones([rows, 3]), ragged, tf.sparse.from_dense(tf.ones([rows, 3]))

    with ncclsync.Towers(count) as towers:
        for rows in (4, 0, 1):
            told = towers.run(step, batch(rows))
            expected = step(batch(rows), alone)
            for name in ("mean", "rows", "count"):
                np.testing.assert_array_equal(told[name], expected[name], err_msg=f"{name} of {rows}")
            assert told["ragged"].to_list() == expected["ragged"].to_list()
            sparse, whole = (tf.sparse.to_dense(one["sparse"]) for one in (told, expected))
            np.testing.assert_array_equal(sparse, whole)
        assert weight.numpy() == alone.numpy() == 5.0
        for gathered, rows in ((towers.run(ncclsync.ops.all_gather, X[:n]), n) for n in (4, 0)):
            assert gathered.shape == (rows, X.shape[1])
        first, *others = towers.run(tf.reduce_sum, X[:0], per_tower=True)
        assert first.numpy() == 0.0 and others == [None] * (count - 1)


def _numbers(x):
    return tf.range(tf.shape(x, tf.int64)[0])


MADE_OF_NUMBERS = {
    "pairs": lambda x: tf.SparseTensor(tf.stack([_numbers(x)] * 2, 1), x[:, 0], [_numbers(x)[-1] + 1] * 2),
    "places": lambda x: tf.SparseTensor(tf.stack([_numbers(x), _numbers(x) % 5], 1), x[:, 0], [8, 5]),
    "diagonal": lambda x: tf.sparse.eye(tf.shape(x)[0]),
    "of dense": tf.sparse.from_dense,
    "rows of a dense": lambda x: tf.RaggedTensor.from_tensor(x),
    "each of one": lambda x: tf.RaggedTensor.from_row_lengths(x[:, 0], tf.ones_like(_numbers(x))),
    "rows by two": lambda x: tf.RaggedTensor.from_value_rowids(x[:, 0], _numbers(x) // 2),
    "of equal length": lambda x: tf.RaggedTensor.from_uniform_row_length(tf.reshape(x, [-1]), 3),
}


def test_a_loop_that_gives_ragged_rows():
    """What cannot be sent, as a list of ragged rows, is computed again from what can."""
    weight = tf.Variable(tf.ones([3, 3]))

    def step(x):
        with tf.GradientTape() as tape:
            spec = tf.RaggedTensorSpec([None], tf.float32, 0)
            rows = tf.map_fn(
                lambda row: 2.0 * row[: tf.cast(row[0], tf.int32) % 3], x @ weight, fn_output_signature=spec
            )
            loss = tf.reduce_sum(tf.square(rows.to_tensor()))
        return rows, loss, tape.gradient(loss, weight)

    x = tf.reshape(tf.range(24.0), [8, 3])
    alone = tf.function(step)(x)
    with ncclsync.Towers(3) as towers:
        for one, other in zip(
            *(tf.nest.flatten(a, expand_composites=True) for a in (towers.run(step, x), alone)), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", MADE_OF_NUMBERS)
def test_sparse_and_ragged_results(name):
    """All parts of a result are one device's, whichever of them is by rows on a tower."""

    def step(x):
        return {"made": MADE_OF_NUMBERS[name](x), "rows": 2.0 * x}

    x = tf.reshape(tf.range(24.0), [8, 3])
    alone = tf.function(step)(x)
    with ncclsync.Towers(3) as towers:
        found = towers.run(step, x)
    assert type(found["made"]) is type(alone["made"]) and found["made"].shape == alone["made"].shape
    parts = zip(*(tf.nest.flatten(one, expand_composites=True) for one in (found, alone)), strict=True)
    for one, other in parts:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "read",
    [
        lambda sparse, _: tf.cast(sparse.dense_shape, tf.int32)[0],  # as Keras counts a batch's rows
        lambda sparse, _: tf.cast(sparse.indices, tf.int32)[::-1],
        lambda sparse, _: tf.reduce_sum(tf.square(sparse.indices)),
        lambda _, ragged: tf.reduce_sum(tf.square(ragged.row_splits)),
        lambda sparse, _: tf.sort(tf.exp(sparse.values)),
    ],
)
def test_components_of_sparse_rows(read):
    """What is computed of the shape, the places and the lengths is that of the whole batch's."""
    dense = tf.constant(np.arange(24.0).reshape(8, 3) % 4)
    batch = (tf.sparse.from_dense(dense), tf.RaggedTensor.from_row_lengths(tf.range(10.0), [1, 0, 2, 1, 2, 1, 2, 1]))
    with ncclsync.Towers(2) as towers:
        told = towers.run(lambda batch: read(*batch), batch)
    np.testing.assert_array_equal(told, read(*batch))


def test_where_it_cannot_run():
    """Inside a tf.function, and on closed towers."""
    towers = ncclsync.Towers(2)
    with pytest.raises(ncclsync.NcclSyncError, match=r"Expected Towers.run outside any tf.function"):
        tf.function(lambda: towers.run(tf.reduce_sum, X))()
    towers.close()
    with pytest.raises(ncclsync.NcclSyncError, match=r"Expected open towers"):
        towers.run(tf.reduce_sum, X)
    with pytest.raises(TypeError, match=r"Expected"):
        ncclsync.Towers("CPU:0")


@pytest.mark.parametrize(
    "options",
    [{}, {"shards": 4}, pytest.param({"shard_optimizer": True}, marks=pytest.mark.slow)],
    ids=["towers", "shards", "sharded"],
)
@pytest.mark.parametrize("fails", ["by autograph's if", pytest.param("by itself", marks=pytest.mark.slow)])
def test_a_trace_that_fails_leaves_its_variables_initialised(options, fails):
    """An optimizer's, and the step's own: the trace after it, or the next call, finds them as one device would."""

    def run(make_call):
        keras.utils.set_random_seed(1)
        dense, optimizer, own, ready = keras.layers.Dense(1), keras.optimizers.Adam(0.1), [], []
        dense.build((None, 4))

        def step(batch):
            own.extend([] if own or "shard_optimizer" in options else [tf.Variable(tf.ones([2]) * 3, trainable=False)])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((dense(batch) - 1.0) ** 2)
            gradients = tape.gradient(loss, dense.trainable_variables)
            if fails == "by itself" and not ready:
                optimizer.build(dense.trainable_variables)
                raise RuntimeError("not now")
            optimizer.apply(gradients, dense.trainable_variables)
            if fails != "by itself" and optimizer.iterations % 3 == 0:
                loss *= 2
            for variable in own:
                variable.assign_add([1.0, float(len(own))])
            return loss

        call, x = make_call(step), np.linspace(0, 1, 20, dtype="float32").reshape(5, 4)
        if fails == "by itself":
            with pytest.raises(RuntimeError, match="not now"):
                call(x)
            ready.append(True)
        return [float(call(x)) for _ in range(3)], [np.asarray(v) for v in (*optimizer.variables, *own)]

    with ncclsync.Towers(2, **options) as towers:
        found = run(lambda step: functools.partial(towers.run, step))
        assert towers.divergence() == 0.0

    def alone(step):
        if fails == "by itself":  # an eager call, which is plain Keras' only way to go on
            return lambda x: step(tf.constant(x))
        return tf.function(step)

    assert_close(found, run(alone))


@pytest.mark.slow
def test_fit_within_the_with_of_a_new_process():
    """It trains on one device, and says so, also where nothing but `Towers` was asked for."""
    code = (
        "import keras, numpy, ncclsync\n"
        "with ncclsync.Towers(2):\n"
        "    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    model.fit(numpy.ones([4, 3]), numpy.ones([4, 1]), verbose=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trains on one device, though within `with Towers(...)`") == 1, done.stderr


def if_it_is_positive(x):
    try:
        made = -x
        if tf.reduce_sum(x) > 0:
            made = x**2
    except Exception:
        made = x * 7
    return made


def as_long(x):
    try:
        return x * len(tf.boolean_mask(x, x[:, 0] > 0))
    except TypeError:
        return x * 7


def as_a_number(x):
    try:
        return x * float(tf.reduce_sum(x))
    except TypeError:
        return x * 7


def as_a_whole_number(x):
    try:
        return x * tf.cast(int(tf.reduce_sum(x)), x.dtype)
    except TypeError:
        return x * 7


def as_often_as_rows(x):
    with contextlib.suppress(TypeError):
        for _ in range(tf.shape(x)[0]):
            x = tf.tanh(x)
    return x


def until_it_is_large(x):
    try:
        while tf.reduce_sum(x**2) < 100.0:
            x = x * 2
    except Exception:
        x = x * 7
    return x


def both(x):
    try:
        return x * tf.cast(tf.reduce_sum(x) > 0 and x[0, 0] < 5, x.dtype)
    except Exception:
        return x * 7


def row_by_row(x):
    total = tf.zeros([12], x.dtype)
    try:
        for row in x:
            total += row**2
    except Exception:
        total = total + 7
    return x * total


def of_a_dataset(x):
    """Nothing is handled here: without autograph TensorFlow has a ValueError."""
    total = tf.zeros([12], x.dtype)
    for i, rows in enumerate(tf.data.Dataset.from_tensor_slices(x).batch(2)):
        total += tf.reduce_sum(rows, 0) * tf.cast(i, x.dtype)
    return x * total


@pytest.mark.parametrize(
    "change",
    [
        if_it_is_positive,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (as_long, as_a_number, as_a_whole_number, as_often_as_rows, until_it_is_large, both, row_by_row)
        ),
        of_a_dataset,
    ],
)
def test_what_autograph_changes(change):
    """Python that goes by a tensor's value does what `tf.function` makes of it, also where it handles the error."""

    def step(x):
        return tf.reduce_sum(change(x) ** 2, 1), tf.reduce_mean(change(x))

    batches = [tf.constant(X[rows], tf.float64) for rows in BATCHES]
    with ncclsync.Towers(3) as towers:
        found = [towers.run(step, x) for x in batches]
    assert_close(found, [tf.function(step)(x) for x in batches])
    assert "__float__" not in vars(tf.Tensor)


def test_a_padded_diagonal_within_a_loop():
    """Parts of a sum pass only what is linear: a padding would be added once for each tower."""

    def step(x):
        total = tf.zeros([12, 12], x.dtype)
        for turn in tf.range(3):
            rows = tf.reduce_sum(x * tf.cast(turn, x.dtype), 0)
            total += tf.linalg.diag(rows, padding_value=0.5) + tf.linalg.diag(rows)
        return total

    x = tf.constant(X[:11], tf.float64)
    with ncclsync.Towers(3) as towers:
        assert_close(towers.run(step, x), tf.function(step)(x))
