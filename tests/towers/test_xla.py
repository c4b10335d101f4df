"""Towers whose steps XLA compiles, as on GPUs: what goes from one segment to another, and what failures leave."""

import os
import re
import subprocess
import sys
import tempfile
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import Adam
from models import program_of
from parity import assert_close, assert_towers_agree, on_towers, state

from ncclsync import Health
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.program.crossing import Forms
from ncclsync.program.program import Segment
from ncclsync.program.segment import holding

RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 20, (22, 6))
IDS[::3, 4:] = 0
SERIES = RNG.standard_normal((22, 6, 3)).astype("float32")
TARGETS = RNG.standard_normal((22, 4)).astype("float32")


def of_the_batch(targets, outputs):
    """A loss whose gradient needs the batch's mean: towers meet between forward and backward."""
    return tf.square(tf.reduce_mean(outputs - targets)) + tf.reduce_mean(tf.square(outputs))


class Function(layers.Layer):
    """A layer that calls a function of its input and a weight."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return self.function(inputs, self.scale)


def stops_early(x, scale):
    """A loop that may make nine iterations, and makes as many as its numbers say."""

    def body(i, y):
        return i + 1, scale * tf.sin(y) * 0.9

    def goes_on(i, y):
        return tf.reduce_max(tf.abs(y)) > 0.5

    return tf.while_loop(goes_on, body, (0, x), maximum_iterations=9)[1]


def scanned(x, scale):
    return tf.transpose(tf.scan(lambda y, one: scale * tf.tanh(y + one), tf.transpose(x, [1, 0, 2])), [1, 0, 2])


def in_a_loop(x, scale):
    """A loop in a loop: for its gradient each iteration keeps a list."""

    def repeated(function, times, start):
        body = (lambda i, _: i < times), (lambda i, y: (i + 1, function(y)))
        return tf.while_loop(*body, (0, start), maximum_iterations=times)[1]

    return repeated(lambda y: repeated(lambda z: scale * tf.sin(z), 2, y), 3, x)


def branches(x, scale):
    """A branch whose gradient needs what it computes of the rows, if it is taken."""
    return tf.cond(scale > 0.97, lambda: scale * tf.sin(x), lambda: tf.exp(x * scale) - tf.square(x))


def masks(x, scale):
    """As many numbers of the batch as are positive, of which all get the mean."""
    return x * scale + tf.reduce_sum(tf.square(tf.boolean_mask(tf.sin(x * scale), x > 0.0))) / 100


def sorts(x, scale):
    """The batch's rows in the order of their numbers, which all towers compute; each goes on with its own."""
    return x * scale + tf.sort(tf.sin(x * scale), axis=0)


def sets_diagonals(x, scale):
    """A small matrix of each row: the gradient finds the diagonal's shape in branches, and XLA has to know it."""
    squares = tf.linalg.set_diag(tf.matmul(x * scale, x, transpose_a=True), tf.exp(x[:, 0] * scale))
    return x * scale + tf.reduce_mean(squares, axis=1)[:, None]


def finds_none(x, scale):
    """Rows that a mask leaves, of which there is none, beside others of the batch."""
    few = tf.boolean_mask(x[:, 0] * scale, x[:, 0, 0] > 99.0)
    return x * scale + tf.reduce_sum(tf.matmul(few, few, transpose_b=True))


def multiplies(x, scale):
    """A product of all rows: its gradient moves axes by numbers that rest on constants alone, and XLA has to know."""
    return x * scale + tf.reduce_prod(tf.sin(x * scale), axis=0) + tf.reduce_prod(tf.cos(x * scale) ** 0.01)


def finds_unique(x, scale):
    """Numbers of the batch, each once."""
    whole, places = tf.unique(tf.cast(tf.reshape(2.0 * x, [-1]), tf.int32))
    again = tf.reshape(tf.cast(tf.gather(whole, places), tf.float32), tf.shape(x))
    return x * scale + again / tf.cast(tf.size(whole), tf.float32)


def fills_an_array(x, scale):
    """An array of two places, of which all rows are asked for when one is filled."""
    array = tf.TensorArray(tf.float32, 2, element_shape=[None, 6, 3]).write(0, tf.sin(scale * x))
    return tf.reduce_sum(array.write(1, tf.sort(x * scale, axis=0)).stack(), axis=0)


def pushes(x, scale):
    """A list that another element is appended to when all rows have been asked for."""
    lists, element = tf.raw_ops, {"element_dtype": tf.float32, "element_shape": tf.constant([-1, 6, 3])}
    handle = lists.EmptyTensorList(max_num_elements=4, **element)
    handle = lists.TensorListPushBack(input_handle=handle, tensor=tf.sin(x * scale))
    handle = lists.TensorListPushBack(input_handle=handle, tensor=tf.sort(x * scale, axis=0))
    handle, last = lists.TensorListPopBack(input_handle=handle, **element)
    _, first = lists.TensorListPopBack(input_handle=handle, **element)
    return tf.ensure_shape(first * last, x.shape)


def model_of(*body, inputs=(6, 3), dtype=None):
    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input(inputs, dtype=dtype), *(make() for make in body), layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.05), of_the_batch, jit_compile=True)
        return model

    return build


def fit(model, x, epochs=3):
    history = model.fit(x, TARGETS, batch_size=8, epochs=epochs, verbose=0, shuffle=False).history["loss"]
    return {"loss": history, **state(model)}


class Fails(keras.Sequential):
    """Needs more memory than there is, 128 TiB, for a batch of 8 rows, where it updates its weights."""

    def train_step(self, data):
        logs = super().train_step(data)
        rows, kernel = tf.shape(data[0])[0], self.trainable_variables[0]
        numbers = tf.reshape(tf.range(tf.cast(rows, tf.float32) ** 15), [rows] * 15)
        largest = tf.reduce_max(tf.sort(tf.reduce_mean(kernel) * numbers))
        kernel.assign_add(tf.fill(kernel.shape, 1e-8 * largest))
        return logs


def fails_to_write(variable):
    """Run a segment that updates a variable and needs 128 TiB, as `Segment.run` runs it on a tower."""

    @tf.function(jit_compile=True)
    def function(rows, held):
        numbers = tf.reshape(tf.range(tf.cast(tf.shape(rows)[0], tf.float32) ** 15), [8] * 15)
        variable.assign_add(tf.fill(variable.shape, tf.reduce_max(tf.sort(tf.reduce_mean(variable) * numbers))))

    segment = Segment((), (), (), (), function, written=("v",), hold=holding([tf.float32]))
    with pytest.raises(tf.errors.ResourceExhaustedError):
        tf.function(lambda: segment.run({"v": variable.handle}, [[tf.zeros([8])]]))()


def test_held_variables_take_one_op_and_their_handles():
    """What a step's graph has for the variables that a program writes: an op, and an input and an output for each."""
    variables = {f"v{i}": tf.Variable(tf.zeros([])) for i in range(100)}
    hold = holding([tf.float32] * 100)
    segment = Segment((), (), (), (), lambda *given: given, written=tuple(variables), hold=hold)

    @tf.function
    def step(x):
        with tf.control_dependencies([tf.identity(x)]):
            return segment.run({name: variable.handle for name, variable in variables.items()}, [])

    ops = step.get_concrete_function(tf.zeros([])).graph.get_operations()
    (call,) = [op for op in ops if any(tensor.dtype == tf.resource for tensor in op.inputs)]
    assert (len(call.inputs), len(call.control_inputs), len(call.outputs)) == (100, 1, 100)


def test_cheap_values_are_computed_again(monkeypatch):
    """A fifth fewer bytes of rows cross to later segments, and no number changes."""

    def trained():
        build = model_of(layers.Flatten, *[partial(layers.Dense, 48, "gelu")] * 4)
        model = on_towers(build, 2, bucket_bytes=8192)
        model.fit(SERIES, TARGETS, batch_size=22, epochs=2, verbose=0, shuffle=False)
        before, crossing = set(), 0
        program = program_of(model)
        for segment in program.segments:
            for name, tensor in zip(segment.sources, segment.function.inputs, strict=False):
                lengths = [11 if one is None else one for one in tensor.shape.as_list()]
                rows = None in tensor.shape.as_list()  # weights cross as they were read
                crossing += tensor.dtype.size * int(np.prod(lengths)) * (name in before and rows)
            before.update(segment.fetches)
        assert program.jit_compile and len(program.segments) > 3
        return state(model), crossing

    found, crossing = trained()
    monkeypatch.setattr(Forms, "recomputed", lambda *_: [])
    expected, more = trained()
    assert crossing < 0.8 * more
    assert_close(found, expected)


def attending():
    keras.utils.set_random_seed(1)
    words = keras.Input((6, 3))
    x = layers.Dense(8, "gelu")(words)
    for _ in range(2):
        x = x + layers.MultiHeadAttention(2, 4)(layers.LayerNormalization()(x), x)
    model = keras.Model(words, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.SGD(0.05), of_the_batch, jit_compile=True)
    return model


@pytest.mark.parametrize("towers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_small_integers_do_not_cross(towers):
    """Such as shapes: on a GPU they would cross by the host's memory, and the host would wait for it at each cut.

    Each segment computes them of a tower's number of rows, which is another one in the last batch.
    """
    model = on_towers(attending, towers, bucket_bytes=256)
    found = fit(model, SERIES)
    before, crossing = set(), []
    program = program_of(model)
    for segment in program.segments:
        for name, tensor in zip(segment.sources, segment.function.inputs, strict=False):
            crossing += [name] if name in before and tensor.dtype == tf.int32 else []
        before.update(segment.fetches)
    assert program.jit_compile and len(program.segments) > 5 and len(before) > 20
    assert crossing == []
    assert_close(found, fit(attending(), SERIES))


def failing():
    keras.utils.set_random_seed(1)
    model = Fails([keras.Input((6, 3)), layers.Flatten(), layers.Dense(100, "tanh"), layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=True)
    return model


def fit_rows(model, rows):
    model.fit(SERIES[:8], TARGETS[:8], batch_size=rows, verbose=0, shuffle=False)


MODELS = {
    "small": (model_of(layers.Flatten), SERIES),
    "masked": (
        model_of(
            lambda: layers.Embedding(20, 5, mask_zero=True),
            lambda: layers.GRU(4, use_cudnn=False),
            inputs=(6,),
            dtype="int32",
        ),
        IDS,
    ),
    "stops_early": (model_of(lambda: Function(stops_early), layers.Flatten), SERIES),
    "scanned": (model_of(lambda: layers.Dense(3), lambda: Function(scanned), layers.Flatten), SERIES),
    "branches": (model_of(lambda: Function(branches), layers.Flatten), SERIES),
    "masks": (model_of(lambda: Function(masks), layers.Flatten), SERIES),
    "fills_an_array": (model_of(lambda: Function(fills_an_array), layers.Flatten), SERIES),
    "sorts": (model_of(lambda: Function(sorts), layers.Flatten), SERIES),
    "multiplies": (model_of(lambda: Function(multiplies), layers.Flatten), SERIES),
    "finds_unique": (model_of(lambda: Function(finds_unique), layers.Flatten), SERIES),
}


CROSSING = [
    ("stops_early", 2),
    ("masked", 4),
    ("scanned", 3),
    ("branches", 2),
    ("masks", 2),
    ("finds_unique", 3),
    ("fills_an_array", 2),
    ("sorts", 3),
    ("multiplies", 3),
]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), CROSSING)
def test_tensors_cross_segments(name, towers, caplog):
    """Towers meet between a loop, a branch or a mask and its gradient, and train as one device does by XLA."""
    build, x = MODELS[name]
    model = on_towers(build, towers)
    found = fit(model, x)
    assert model.jit_compile
    assert_close(found, fit(build(), x))
    assert_towers_agree(model)
    assert "XLA" not in caplog.text
    model.towers.close()


def test_shapes_that_branches_say(caplog):
    """For a batch whose rows are known: for others one device's XLA refuses it."""
    build = model_of(lambda: Function(sets_diagonals), layers.Flatten)
    model, alone = on_towers(build, 3), build()
    for one in (model, alone):
        one.train_on_batch(SERIES[:8], TARGETS[:8])
    assert_close(model.get_weights(), alone.get_weights())
    assert program_of(model).jit_compile and "XLA" not in caplog.text


def test_what_xla_refuses_in_parts(caplog):
    """If it knows bounds alone of some lengths, the batch runs again without XLA, as one device runs it with XLA."""
    build = model_of(lambda: Function(finds_none), layers.Flatten)
    model = on_towers(build, 2)
    assert_close(fit(model, SERIES), fit(build(), SERIES))
    assert_towers_agree(model)
    assert caplog.text.count("XLA does not compile a part of this step") == 1
    assert not program_of(model).jit_compile


COUNTED = """
import sys
import tensorflow as tf
from ncclsync import nccl_parallel
from test_xla import MODELS, RNG
name, towers, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
one = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one] * towers)
model = nccl_parallel(devices=[f"CPU:{i}" for i in range(towers)])(MODELS[name][0])()
x, y = RNG.standard_normal((rows, 6, 3)), RNG.standard_normal((rows, 4))
model.fit(x, y, batch_size=8, verbose=0)
print(model.towers.explain((x[:8], y[:8])).compiled)
"""


def count(*arguments, **environment):
    """Train in a process of its own; return how many compilations it took, and what `explain` says about these."""
    environment = os.environ | {"TF_CPP_VMODULE": "device_compiler=1", "TF_CPP_MIN_LOG_LEVEL": "0"} | environment
    command = [sys.executable, "-c", COUNTED, *map(str, arguments)]
    here = os.path.dirname(__file__)
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr.count("Compilation of XLA executable"), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 8])
def test_compilations_do_not_depend_on_the_number_of_towers(towers):
    """A step's programs are compiled once, after one that makes a device have a compiler; a last batch adds its sizes.

    One device compiles its one program for a last batch of 5 rows, too; towers what takes rows for up to two numbers.
    """
    found, told = count("small", towers, 21)
    programs, by_rows = map(int, re.search(r"as (\d+) programs, (\d+) of these anew", told).groups())
    assert f": {programs} compilations on any number of devices" in told
    # A tower without a row computes one of another's.
    sizes = {max(1, 5 // towers), -(-5 // towers)} - {8 // towers}
    assert found == 1 + programs + by_rows * len(sizes)
    assert f"A smaller last batch of a fit takes up to {2 * by_rows} more." in told
    if towers == 2:
        own, told = count("small", towers, 16, NCCLSYNC_XLA_PROGRAMS="own")
        assert own == programs * towers and "each device compiles what it runs" in told


@pytest.mark.slow
def test_rows_taken_of_the_batch_are_compiled_once():
    """Of what all towers have, a sorted batch, each takes its own rows: by one program, wherever these begin."""
    found, told = count("sorts", 4, 16)
    assert found == 1 + int(re.findall(r"as (\d+) programs", told)[0])


@pytest.mark.slow
def test_a_masks_rows_are_compiled_once():
    """Each of ten batches has another number of them; XLA compiles each segment once."""
    found, told = count("masks", 2, 80)
    assert found == 1 + int(re.findall(r"as (\d+) programs", told)[0])


def looks_up(x, scale):
    with tf.init_scope():
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4]), -1)
    return x * scale + tf.cast(table.lookup(tf.cast(x, tf.int32)), tf.float32)


def takes_from_an_iterator(x, scale):
    with tf.init_scope():
        numbers = iter(tf.data.Dataset.range(1000))
    return x * scale + tf.cast(next(numbers), tf.float32)


def summarises(x, scale):
    with tf.init_scope():
        writer = tf.summary.create_file_writer(tempfile.mkdtemp())
    with writer.as_default(step=1):
        tf.summary.scalar("mean", tf.reduce_mean(x))
    return x * scale


def prints(x, scale):
    tf.print(tf.reduce_mean(x))
    return x * scale


def runs_python(x, scale):
    return x * scale + tf.ensure_shape(tf.py_function(lambda value: 2 * value, [x], tf.float32), x.shape)


def has_words(x, scale):
    return x * scale + tf.strings.to_number(tf.strings.as_string(x))


def has_ragged_rows(x, scale):
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1, 3]), tf.fill([tf.shape(x)[0]], 6))
    return scale * tf.map_fn(tf.sin, ragged).to_tensor(shape=[None, 6, 3])


REFUSED = [looks_up, takes_from_an_iterator, summarises, prints, runs_python, has_words, has_ragged_rows]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("function", REFUSED)
def test_what_xla_refuses_it_refuses_on_towers(function):
    """Tables, iterators, files, Python, strings and ragged rows: XLA names the op that it does not compile."""
    build = model_of(lambda: Function(function), layers.Flatten)
    told = []
    towers = on_towers(build, 2)
    for model in (build(), towers):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            fit(model, SERIES)
        told.append(re.findall(r"No registered '\w+'", str(raised.value))[0])
    assert told[0] == told[1]
    towers.towers.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("function", "what"), [(in_a_loop, "list of lists"), (pushes, "has not filled")])
def test_what_cannot_cross_is_told(function, what, caplog):
    """A step that would have to give on a list of lists, or one to append to, runs without XLA, and says so first."""
    build = model_of(lambda: Function(function), layers.Flatten)
    model = on_towers(build, 2)
    found = fit(model, SERIES)
    assert_close(found, fit(build(), SERIES))
    (said,) = [one.message for one in caplog.records if "XLA does not compile this step" in one.message]
    assert what in said and "test_xla.py" in said and "function" in said
    model.towers.close()


# By name: options of towers, an optimizer, and arguments of `compile`. `on_oom` with XLA: tests/virtual_gpus.
OPTIONS = {
    "nonfinite": ({"health": Health(on_nonfinite="skip")}, Adam, {}),
    "checks": ({"health": Health(check_every=1)}, Adam, {}),
    "audits": ({"health": Health(audit_every=2)}, Adam, {}),
    "on_oom": ({"on_oom": "split"}, Adam, {}),
    "shards": ({"shards": 8}, Adam, {}),
    "shares": ({"shares": [3, 1]}, Adam, {}),
    "measured_shares": ({"shares": "auto"}, Adam, {}),
    "sharded_optimizer": ({"shard_optimizer": True}, partial(Adam, global_clipnorm=0.1), {}),
    "compression": ({"compression": "bfloat16"}, Adam, {}),
    "small_buckets": ({"bucket_bytes": 64}, Adam, {}),
    "exact": ({"exact": True}, Adam, {}),
    "several_steps": ({}, Adam, {"steps_per_execution": 3}),
    "scaled_loss": ({}, lambda rate: keras.optimizers.LossScaleOptimizer(Adam(rate)), {}),
    "accumulation": ({}, partial(Adam, gradient_accumulation_steps=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, monkeypatch):
    """Every option gives with XLA what it gives without: one device's numbers, or what rounding leaves of them."""
    options, optimizer, arguments = OPTIONS[name]
    if name == "audits":  # which take deterministic ops: with these Keras has XLA compile nothing, `Towers.run` does
        monkeypatch.setattr(tf_compat, "is_op_determinism_enabled", lambda: True)

    def build():
        keras.utils.set_random_seed(1)
        random = [layers.BatchNormalization(), layers.Dropout(0.3, seed=1)] if name == "exact" else []
        model = keras.Sequential([keras.Input((6, 3)), layers.Flatten(), *random, layers.Dense(16, "tanh")])
        model.add(layers.Dense(4))
        model.compile(optimizer(0.01), "mse", metrics=["mae"], jit_compile=True, **arguments)
        return model

    model = on_towers(build, 2, **options)
    found = fit(model, SERIES)
    assert model.jit_compile
    assert_close(found, fit(build(), SERIES), 0.1 if name == "compression" else 3e-5)
    assert_towers_agree(model)
    model.towers.close()


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_failed_program_changes_nothing(times, request):
    """Variables that a program was to update when it failed are as before on all towers, whatever is made then."""
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0":
        # TensorFlow's allocator for oneDNN waits 10 s for memory, each time, and a process chooses it as it starts.
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--all", request.node.nodeid]
        environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}
        root = request.config.rootpath
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout[-4000:]
        return
    written = tf.Variable(tf.ones([100, 18]))
    written.scatter_nd_add(tf.zeros([1, 2], tf.int32), [0.0])  # from then on who reads it has a copy of its memory
    fails_to_write(written)
    made = [tf.Variable(tf.fill(written.shape, 7.0)) for _ in range(5)]
    assert np.all(written == 1.0)
    model = on_towers(failing, 2)
    fit_rows(model, 2)
    before = state(model)
    for _ in range(times):
        with pytest.raises(tf.errors.ResourceExhaustedError):
            fit_rows(model, 8)
        # Would be given what TensorFlow had freed.
        made += [tf.Variable(tf.fill(variable.shape, 7.0)) for variable in model.trainable_variables * 3]
        assert_close(state(model), before, 0)
        assert_towers_agree(model)
    fit_rows(model, 2)
    one = failing()
    fit_rows(one, 2)
    fit_rows(one, 2)
    assert_close(state(model), state(one))
    assert all(np.all(variable == 7.0) for variable in made)
    model.towers.close()
