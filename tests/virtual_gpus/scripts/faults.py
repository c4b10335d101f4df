"""A collective fails while the host is ahead: who is told, in which words, and what may be relied upon.

Prints "FAULT is well" for each of its arguments; run by test_injected_faults.py.
"""

import ctypes
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import keras
import numpy as np
import tensorflow as tf

from ncclsync import Health, NcclError, NcclSyncError, NcclTimeoutError, Towers, nccl_parallel

LIBRARY = ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"])
X = np.random.default_rng(0).normal(size=(61, 12)).astype("float32")
Y = np.random.default_rng(1).integers(0, 5, 61)
FAULTS = {
    "stuck": ("stuck:1:2", NcclTimeoutError, "rank 1 (GPU 1) not arrived"),
    "slow": ("slow:1:2=100000", NcclTimeoutError, "rank 1 (GPU 1), rank 2 (GPU 2) arrived, waiting"),
    "async": ("async:2:2=6", NcclError, "ncclRemoteError"),
    "call": ("ncclAllReduce:5=5", NcclError, "ncclInvalidUsage"),
    "record": ("cuCtxRecordEvent:5", NcclError, "told to fail"),
    "wait": ("cuCtxWaitEvent:5", None, "told to fail"),  # a delivery: the step's own error
}


def fail(instructions):
    LIBRARY.standin_fail(instructions.encode())


def build(kind=keras.Sequential, metrics=("accuracy",)):
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((12,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics) or None)
    return model


def fit(model, **options):
    return model.fit(X, Y, batch_size=20, shuffle=False, verbose=0, **options).history


def raised(call, *kinds):
    """Return what a call raises, which must be one of `kinds`."""
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"expected {kinds}")


def state(model):
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def check_fault(name):
    """`fit` raises it, and nobody reads or saves what rests on it; a checkpoint makes all good again."""
    instructions, kind, words = FAULTS[name]
    folder = pathlib.Path(tempfile.mkdtemp())
    model = nccl_parallel(towers=3, health=Health(timeout_s=1.0))(build)()
    fit(model, epochs=1)
    model.save_weights(folder / "good.weights.h5")
    good = state(model)
    fail(instructions)
    error = raised(lambda: fit(model, epochs=2), kind or Exception)
    assert words in str(error), error
    fail("")
    if model.towers.session.failures.lost:
        raised(model.get_weights, NcclSyncError)
        raised(lambda: model.save(folder / "bad.keras"), NcclSyncError)
        raised(lambda: fit(model), NcclSyncError)
        raised(model.towers.divergence, NcclSyncError)
    model.load_weights(folder / "good.weights.h5")
    for variable, value in zip([*model.weights, *model.optimizer.variables], good, strict=True):
        variable.assign(value)
    alone = build()
    fit(alone, epochs=1)
    one, other = fit(model, epochs=1), fit(alone, epochs=1)
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-4)
    for a, b in zip(state(model), state(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert model.towers.divergence() == 0.0
    model.towers.close()


def check_keeps_weights():
    """With an emergency checkpoint a step waits before each of its writes: all is as before it, and saved."""
    scattered = {"shard_optimizer": True}  # which writes its state before the weights are gathered
    for options, instructions in (({}, "stuck:1"), (scattered, "stuck:1"), (scattered, "slow:1:1=300,ncclAllGather=5")):
        path = pathlib.Path(tempfile.mkdtemp(), "emergency.weights.h5")
        model = nccl_parallel(towers=3, health=Health(timeout_s=0.5, emergency_checkpoint=path), **options)(build)()
        fit(model, epochs=1)
        good = state(model)
        fail(instructions)
        raised(lambda model=model: fit(model, epochs=1), NcclError)
        fail("")
        for a, b in zip(state(model), good, strict=True):
            np.testing.assert_array_equal(a, b)
        saved = build()
        saved.load_weights(path)
        for a, b in zip(saved.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        fit(model, epochs=1)
        assert model.towers.divergence() == 0.0
        model.towers.close()


def check_own_loop():
    """`Towers.run` returns before the failure; a read of its result raises it, of a weight, or the next call."""
    with tf.device("/GPU:0"):
        weight = tf.Variable(tf.ones([4]))
    reads_of = {"the next call": None, "a weight": lambda _: weight.numpy(), "its result": lambda mean: mean.numpy()}
    for whose, read in reads_of.items():
        with Towers(2, health=Health(timeout_s=0.5)) as towers:

            def step(batch, towers=towers):
                from ncclsync import ops

                (mean,) = ops.all_reduce([tf.reduce_mean(batch, 0)])
                weight.assign_add(mean)
                return mean

            good = towers.run(step, X[:8, :4])
            weight.numpy()
            fail("slow:1:1=100000" if whose == "its result" else "async:1=6")
            results = []

            def go_on(towers=towers, step=step, read=read, results=results):
                for _ in range(1 if read else 100):
                    results.append(towers.run(step, X[:8, :4]))
                if read:
                    read(results[0])

            error = raised(go_on, NcclError)
            fail("")
            if whose == "its result":
                assert "rank 1 (GPU 1) arrived, waiting" in str(error), error
                for use in (results[0].numpy, results[0].__str__, lambda: tf.get_static_value(results[0])):  # noqa: B023
                    assert raised(use, NcclError) is error
                # Whoever swallows that is told again.
                assert raised(lambda towers=towers, step=step: towers.run(step, X[:8, :4]), NcclError) is error
            else:
                assert "ncclRemoteError" in str(error), (whose, error)
            np.testing.assert_allclose(good, X[:8, :4].mean(0), rtol=1e-5)
            if towers.session.failures.lost:
                raised(weight.numpy, NcclSyncError)
            weight.assign(tf.ones([4]))
            towers.run(step, X[:8, :4])
            np.testing.assert_allclose(weight.numpy(), 1 + X[:8, :4].mean(0), rtol=1e-5)


def check_comparison():
    """`divergence` raises what its broadcast does, in the same words, not TensorFlow's."""
    for instructions, kind, words in (FAULTS["stuck"], FAULTS["call"]):
        model = nccl_parallel(towers=3, health=Health(timeout_s=0.5))(build)()
        fit(model, epochs=1)
        model.towers.divergence()
        fail(instructions.replace("AllReduce:5", "Broadcast:1").replace("stuck:1:2", "stuck:1"))
        error = raised(model.towers.divergence, kind)
        assert words in str(error) and "Expected an open" not in str(error), error
        fail("")
        model.towers.close()


def check_ctrl_c():
    """Ctrl-C while a step waits for a number of a collective that hangs: what the step has written is lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    with tf.device("/GPU:0"):
        weight, after = tf.Variable(tf.ones([4])), tf.Variable(tf.ones([4]))
    with Towers(2, health=Health(timeout_s=60.0)) as towers:

        def step(batch):
            from ncclsync import ops

            (mean,) = ops.all_reduce([tf.reduce_mean(batch, 0)])
            weight.assign_add(mean)
            factor = tf.cond(tf.reduce_sum(mean) > 1e9, lambda: tf.zeros([]), lambda: tf.ones([]))  # the host's choice
            after.assign_add(ops.all_reduce([factor * mean])[0])

        towers.run(step, X[:8, :4])
        np.testing.assert_allclose(weight.numpy(), 1 + X[:8, :4].mean(0), rtol=1e-5)
        fail("slow:1:1=100000")
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        raised(lambda: [towers.run(step, X[:8, :4]), time.sleep(9)], KeyboardInterrupt)
        fail("")
        raised(weight.numpy, NcclSyncError)
        raised(lambda: towers.run(step, X[:8, :4]), NcclSyncError)
        for variable in (weight, after):
            variable.assign(tf.ones([4]))
        towers.run(step, X[:8, :4])
        np.testing.assert_allclose(weight.numpy(), 1 + X[:8, :4].mean(0), rtol=1e-5)


class OwnLogs(keras.Sequential):
    """Updates no metric: after the last step Keras reads nothing that a step has written, or its logs alone."""

    has_logs = True

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*batch, self(batch[0], training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"mine": loss} if self.has_logs else {}


def press_ctrl_c_in_a_collective(communicator):
    """Press it soon after the next group of collectives was launched."""
    launched = communicator.groups()[0]

    def press():
        while communicator.groups()[0] == launched:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def callbacks_of(name):
    return [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: float(logs[name]))]


def check_logs():
    """Keras takes any exception for a log that is no number: `fit` raises a failure, and Ctrl-C at once, all the same.

    A callback of the user's has Keras read the logs in the thread of `fit`, without it another thread reads them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = nccl_parallel(towers=2, health=Health(timeout_s=60.0))(build)()
    callbacks = callbacks_of("loss")
    fit(model, callbacks=callbacks)
    weights = model.get_weights()
    for late_ms in (700, 100000):  # the collective ends by itself, or never
        fail(f"slow:1:1={late_ms}")
        began = time.monotonic()
        press_ctrl_c_in_a_collective(model.towers.communicator)
        raised(lambda: fit(model, callbacks=callbacks, epochs=10_000), KeyboardInterrupt)
        assert time.monotonic() - began < 40  # less than all epochs, and than `timeout_s`, on a loaded machine, too
        fail("")
        if late_ms == 700:
            assert model.towers.divergence() == 0.0
        else:
            raised(model.get_weights, NcclSyncError)
    model.set_weights(weights)
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape))
    fit(model, callbacks=callbacks)
    assert model.towers.divergence() == 0.0
    model.towers.close()

    for OwnLogs.has_logs, callbacks in ((True, callbacks_of("mine")), (True, []), (False, [])):
        model = nccl_parallel(towers=2, health=Health(timeout_s=0.5))(lambda: build(OwnLogs, ()))()
        one_step = {"steps_per_epoch": 1, "callbacks": callbacks}
        fit(model, **one_step)
        weights = model.get_weights()
        fail("slow:1:1=100000")
        raised(lambda model=model, one_step=one_step: fit(model, **one_step), NcclTimeoutError)
        fail("")
        model.set_weights(weights)
        for variable in model.optimizer.variables:
            variable.assign(np.zeros(variable.shape))
        fit(model, **one_step)  # told once
        assert model.towers.divergence() == 0.0
        model.towers.close()


OTHERS = {
    "logs": check_logs,
    "ctrl-c": check_ctrl_c,
    "keeps weights": check_keeps_weights,
    "own loop": check_own_loop,
    "comparison": check_comparison,
}
for asked in sys.argv[1:]:
    OTHERS.get(asked, lambda: check_fault(asked))()  # noqa: B023
    print(asked, "is well", flush=True)
