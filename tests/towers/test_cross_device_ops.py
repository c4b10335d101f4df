"""CrossDeviceOps under MirroredStrategy: training and reductions as TensorFlow's own, by our communicator.

Replicas stand on logical CPUs, of which a process can make some only before it uses any: `python
tests/towers/test_cross_device_ops.py FILE` runs all checks in a process of its own, with a single thread for
TensorFlow's ops, on which whatever waits for another op would wait for ever.
"""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import traceback
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ncclsync
from ncclsync import nccl_parallel
from ncclsync.communicator import NcclCommunicator
from ncclsync.communicator.buffers import CUDA, HOST
from ncclsync.ops import host_ops
from ncclsync.towers import cross_device_ops
from ncclsync.towers.placement import Placement

REPLICAS = 3
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
CHECKS = {}
ROUTES = ("host", "py", "nccl")  # ops of our own; Python ops; NCCL, which the stand-in is, by Python ops


def check(*routes):
    """Run a function, of a strategy with CrossDeviceOps, by each of these routes."""

    def entered(function):
        CHECKS.update({f"{function.__name__}-{route}": (function, route) for route in routes})
        return function

    return entered


@contextlib.contextmanager
def by(route, replicas=REPLICAS, **options):
    """A strategy whose CrossDeviceOps takes a route, and what it reduced: the tensors of each call."""
    reduced = []
    module, name = (host_ops, "all_reduce") if route == "host" else (cross_device_ops, "group_exchange")
    reduce = getattr(module, name)

    def noted(tensors, *args):
        reduced.append(tensors)
        return reduce(tensors, *args)

    def on_nccl(_towers, devices, _backend):
        return Placement(tuple(name.partition("device:")[2] for name in devices), "nccl", "")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, name, noted))
        if route == "py":
            stack.enter_context(mock.patch.object(host_ops, "available", lambda: False))
        if route == "nccl":
            stack.enter_context(mock.patch.object(cross_device_ops, "choose_placement", on_nccl))
            stack.enter_context(mock.patch.object(NcclCommunicator, "memory", {**CUDA, **HOST}))
        ours = stack.enter_context(ncclsync.CrossDeviceOps(**options))
        yield mirrored(ours, replicas), reduced


def mirrored(ops, replicas):
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)], cross_device_ops=ops)


def each(strategy, *values):
    """Per-replica tensors, on the replicas' devices; of each value the rows are the replicas'."""

    def own(*rows):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return [tf.identity(row[replica]) for row in rows]

    return strategy.run(own, args=values)


def trained(strategy):
    """What a fit under a strategy ends with: sparse and dense gradients, normalisation, metrics."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids, numbers = keras.Input((3,), dtype="int32"), keras.Input((4,))
        embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 2)(ids))
        hidden = keras.layers.Dense(5)(keras.layers.Concatenate()([embedded, numbers]))
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        model = keras.Model([ids, numbers], keras.layers.Dense(2)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 7, (36, 3)), rng.standard_normal((36, 4)).astype("float32")]
    y = rng.standard_normal((36, 2)).astype("float32")
    history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
    return [*history.values(), *model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]


@functools.cache
def expected_of(train, replicas):
    """The same by TensorFlow's simplest reduction."""
    return train(mirrored(tf.distribute.ReductionToOneDevice(), replicas))


@check("host", "nccl")
def fit_as_by_reduction_to_one_device(route):
    with by(route, replicas=2, bucket_bytes=64) as (strategy, reduced):
        found = trained(strategy)
    sizes = [len(call[0]) if route == "host" else len(call) for call in reduced]
    # Six dense gradients, of 200, 20, 20, 20, 40 and 8 bytes; normalisation has calls of its own.
    assert max(sizes) == (6 if route == "host" else 3), sizes
    for one, other in zip(found, expected_of(trained, 2), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def looped(strategy):
    """What a loop of one's own ends with, whose optimizer is applied in replica context."""
    with strategy.scope():
        kernel = tf.Variable(np.ones((4, 2), "float32"))
        bias = tf.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([kernel, bias])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel + bias - 1) ** 2) / REPLICAS
        optimizer.apply_gradients(zip(tape.gradient(loss, [kernel, bias]), [kernel, bias], strict=True))
        return loss

    rows = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(6))
    losses = []
    run = tf.function(lambda x: strategy.reduce(SUM, strategy.run(step, args=(x,)), axis=None))
    for batch in batches:
        losses.append(run(batch))
    # Without tf.function every step is eager, and its gradients are met as eager tensors.
    losses.append(strategy.reduce(SUM, strategy.run(step, args=(batch,)), axis=None))
    return [*losses, kernel.numpy(), bias.numpy()]


@check(*ROUTES)
def own_loop_as_by_reduction_to_one_device(route):
    with by(route) as (strategy, reduced):
        found = looped(strategy)
    assert len(reduced) == 2  # traced once in the function, once for eager tensors
    for one, other in zip(found, expected_of(looped, REPLICAS), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@check(*ROUTES)
def sums_and_means_of_every_dtype(route):
    """Replica r has (r + 1) * row, so that the sum is 6 * row."""
    dtypes = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64)
    rows = [np.outer(np.arange(1, REPLICAS + 1), np.arange(n)) for n, _ in enumerate(dtypes, 1)]
    with by(route, bucket_bytes=16) as (strategy, reduced):
        own = each(strategy, *(tf.cast(row, dtype) for row, dtype in zip(rows, dtypes, strict=True)))
        for op, total in ((SUM, 6), (MEAN, 2)):

            def join(*values, op=op):
                return tf.distribute.get_replica_context().all_reduce(op, values)

            eager = strategy.run(join, args=own)
            traced = tf.function(lambda *v: strategy.run(join, args=v))
            for found in (eager, traced(*own)):
                for n, result in enumerate(found, 1):
                    for one in strategy.experimental_local_results(result):
                        np.testing.assert_array_equal(tf.cast(one, tf.float64), total * np.arange(n))
    # Three graphs: of the functions of both operations, and of the sums of eager tensors.
    assert len(reduced) == 3 * (len(dtypes) if route == "host" else 1)


@check("host", "nccl")
def lengths_that_are_not_known(route):
    """In a function that is traced for any length, tensors are reduced unpacked; one is of no rows."""
    with by(route) as (strategy, reduced):

        @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([2])])
        def total(row, pair):
            def join():
                replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
                return tf.distribute.get_replica_context().all_reduce(SUM, [row + replica, pair * replica])

            return [value.values for value in strategy.run(join)]

        for rows in (0, 3):
            found, pairs = total(tf.ones([rows]), tf.ones([2]))
            for one, pair in zip(found, pairs, strict=True):
                np.testing.assert_array_equal(one, [6.0] * rows)
                np.testing.assert_array_equal(pair, [3.0, 3.0])
    assert len(reduced) == 1


@check("host", "nccl")
def reductions_that_are_no_all_reduce(route):
    """To one device, of slices, of int32, of dtypes that no communicator has, gathers, a single replica."""
    rows = np.arange(6.0, dtype="float32").reshape(REPLICAS, 2)
    with by(route) as (strategy, reduced), strategy.scope():
        ours = strategy.extended._cross_device_ops
        (own,) = each(strategy, rows)
        first = strategy.extended.worker_devices[0]
        np.testing.assert_array_equal(ours.reduce(SUM, own, destinations=first), [6.0, 9.0])
        np.testing.assert_array_equal(strategy.reduce(MEAN, own, axis=None), [2.0, 3.0])
        np.testing.assert_array_equal(strategy.gather(own, axis=0), rows.ravel())

        def join(row):
            context = tf.distribute.get_replica_context()
            slices = tf.IndexedSlices(row[None], context.replica_id_in_sync_group[None], tf.constant([4, 2]))
            return (
                tf.convert_to_tensor(context.all_reduce(SUM, slices)),
                context.all_reduce(SUM, tf.cast(row, tf.int32)),
            )

        dense, whole = strategy.run(tf.function(join), args=(own,))
        for found, count in zip(strategy.experimental_local_results(dense), range(REPLICAS), strict=True):
            np.testing.assert_array_equal(found[:REPLICAS], rows, err_msg=str(count))
        np.testing.assert_array_equal(whole.values[0], [6, 9])
        assert reduced == []
        odd = each(strategy, rows.astype("complex64"), rows.astype("complex64"))
        with mock.patch.object(cross_device_ops, "_logger") as logger:
            found = ours.batch_reduce(SUM, [(odd[0], odd[0]), (own, own), (odd[1], odd[1])])
        assert logger.warning.call_count == 1 and "complex64" in logger.warning.call_args.args
        for value in found:
            for one in value.values:
                np.testing.assert_array_equal(one, [6.0, 9.0])
        assert len(reduced) == 1
        mean = ours.reduce(MEAN, own, destinations=own)
        assert [one.device for one in mean.values] == list(strategy.extended.worker_devices)
        np.testing.assert_array_equal(mean.values[2], [2.0, 3.0])
    with ncclsync.CrossDeviceOps() as alone:
        strategy = mirrored(alone, replicas=1)
        (total,) = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(SUM, [tf.constant([1.0, 2.0])]))
        np.testing.assert_array_equal(total, [1.0, 2.0])


@check("host", "nccl")
def errors(route):
    """Each before anything is reduced."""

    def total(row):
        return tf.distribute.get_replica_context().all_reduce(SUM, row)

    with by(route) as (strategy, reduced):
        (own,) = each(strategy, np.ones((REPLICAS, 2), "float32"))
        strategy.run(total, args=(own,))
        again = mirrored(strategy.extended._cross_device_ops, replicas=2)
        with pytest.raises(ValueError, match=r"Expected a CrossDeviceOps for each MirroredStrategy.*CPU:2, for"):
            again.run(total, args=(each(again, np.ones((2, 2), "float32"))[0],))
        count = len(reduced)

        def odd():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return total(tf.ones([2 if replica else 3]))

        with pytest.raises(ValueError, match=r"one shape and dtype on all replicas.*\(3,\) float32, \(2,\) fl"):
            strategy.run(odd)
        strategy.extended._cross_device_ops.close()
        with pytest.raises(ncclsync.NcclSyncError, match=r"Expected an open CrossDeviceOps. Received: one th"):
            strategy.run(total, args=(own,))
        assert len(reduced) == count


@check("host")
def batches_that_a_strategy_has_split(route):
    """What `experimental_distribute_dataset` makes is refused by towers."""
    strategy = mirrored(tf.distribute.ReductionToOneDevice(), REPLICAS)
    x = np.ones((12, 3), "float32")
    split = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x)).batch(6))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    nccl_parallel(towers=2)(lambda: model)()
    words = r"Expected the global batch, .* Received: PerReplica of tf.distribute. Pass the tf.data.Dataset"
    with pytest.raises(TypeError, match=words):
        model.fit(split, verbose=0)
    with ncclsync.Towers(2) as towers, pytest.raises(TypeError, match=words):
        towers.run(lambda batch: batch[0], next(iter(split)))


@check("host")
def programs_of_the_readme(route):
    """Those for MirroredStrategy: before and after, and with CrossDeviceOps, the weights are the same."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "training"))
    from test_coming_from import PROGRAMS, assert_same, weights_after

    (fit, _), (loop, loop_on_towers), (_, fit_by_ours) = PROGRAMS["MirroredStrategy"]
    plain = functools.partial(tf.distribute.MirroredStrategy, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with mock.patch.object(tf.distribute, "MirroredStrategy", plain):
        before = [weights_after(program) for program in (fit, loop)]
    after = [weights_after(program) for program in (fit_by_ours, loop_on_towers)]
    for (names, one), (_, other) in zip(before, after, strict=True):
        assert names["strategy"].num_replicas_in_sync == REPLICAS
        assert_same(one, other)
    assert after[0][0]["strategy"].num_replicas_in_sync == REPLICAS


@pytest.fixture(scope="module")
def outcomes(built_standin, made_once):
    """By name, what came of each check: nothing, or a traceback."""

    def run(folder):
        done = subprocess.run(
            [sys.executable, __file__, str(folder / "outcomes.json")],
            env={**os.environ, **built_standin.environment},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return json.loads((made_once("outcomes", run) / "outcomes.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_under_mirrored_strategy(outcomes, name):
    """The check of this name, in the module's own process."""
    assert outcomes[name] == "", outcomes[name]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(backend="ring"), r"Expected backend to be one of \('nccl', 'cpu'\) or None. Received: 'ring'"),
        (dict(bucket_bytes=0), r"Expected bucket_bytes to be a positive int. Received: 0"),
        (dict(timeout_s=0), r"Expected timeout_s to be"),
    ],
)
def test_bad_argument(arguments, message):
    """Refused when it is written, not at the first reduction."""
    with pytest.raises(ValueError, match=message):
        ncclsync.CrossDeviceOps(**arguments)


def run_checks(file):
    """Run all of `CHECKS`; write what came of them. The main function of the process."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    outcomes = dict.fromkeys(CHECKS, "")
    for name, (function, route) in CHECKS.items():
        try:
            function(route)
        except BaseException:  # pytest's "did not raise" is no Exception
            outcomes[name] = traceback.format_exc()
    pathlib.Path(file).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    run_checks(sys.argv[1])
