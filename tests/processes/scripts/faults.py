"""Fail in one of two processes, in the way that the argument names; print what each process comes to know."""

import ctypes
import functools
import os
import random
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from telling import told

from ncclsync import Health, Shuffled, nccl_parallel

WAY = sys.argv[1]
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
LAST = int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1
X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 5, 64)


def build(width=8):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(5)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Late(keras.Sequential):
    """Fails after its update, if a row says so: in process 0 alone, which runs what is Python."""

    def train_step(self, data):
        results = super().train_step(data)
        checked = tf.numpy_function(self.check, [data[0], self(data[0], training=True)], tf.float32)
        return {name: value + checked for name, value in results.items()}

    @staticmethod
    def check(x, _):
        if (x[:, 0] > 50).any():
            raise ValueError("late")
        return np.float32(0)


def build_late():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = Late([keras.Input((6,)), *layers, keras.layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class At(keras.callbacks.Callback):
    """Call something after a batch, in the last process."""

    def __init__(self, batch, call):
        super().__init__()
        self.batch, self.call, self.seen = batch, call, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if RANK == LAST and self.seen == self.batch:
            self.call()


class Raises(keras.callbacks.Callback):
    """Raise in the last process, or in all, behind a batch or at the end of an epoch."""

    def __init__(self, where, everywhere=False):
        super().__init__()
        self.where, self.everywhere = where, everywhere

    def on_train_batch_end(self, batch, logs=None):
        if self.where == "batch" and batch == 1:
            self.fail()

    def on_epoch_end(self, epoch, logs=None):
        if self.where == "epoch":
            self.fail()

    def fail(self):
        if RANK == LAST or self.everywhere:
            raise ValueError(f"pruned in process {RANK}")


class Random(keras.callbacks.Callback):
    """Stop after an epoch, if a random number says so."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = random.Random(RANK).random() < 0.5 or RANK == LAST


class RandomRate(keras.callbacks.Callback):
    """Set another learning rate in each process."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.01 / (RANK + 1)


class StopBetween(keras.callbacks.Callback):
    """Stop within an epoch, in the last process."""

    def on_train_batch_end(self, batch, logs=None):
        if RANK == LAST and batch == 1:
            self.model.stop_training = True


def send(signal_number):
    """Send this process a signal, and say when."""
    print(f"[{RANK}] a signal at {time.time()}", flush=True)
    os.kill(os.getpid(), signal_number)


def raise_error():
    raise ValueError("told to fail")


def fit(model, **options):
    options = {"epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(options.pop("x", X), options.pop("y", Y), batch_size=16, **options)


model = nccl_parallel(towers=2, health=Health(timeout_s=60))(build)()
if WAY != "late":
    fit(model, epochs=1)
if WAY == "raises":
    error = told(lambda: fit(model, callbacks=[At(2, raise_error)]))
    raise error
if WAY == "ends":
    if RANK == LAST:
        sys.exit(0)
    told(lambda: fit(model))
    for variable in model.weights:
        assert np.isfinite(variable.numpy()).all()
if WAY == "callback":
    told(lambda: fit(model, callbacks=[Random()]))
if WAY == "rate":
    told(lambda: fit(model, callbacks=[keras.callbacks.EarlyStopping("loss"), RandomRate()]))
if WAY == "between":
    told(lambda: fit(model, callbacks=[StopBetween(), keras.callbacks.EarlyStopping("loss")]))
if WAY == "data":
    told(lambda: fit(model, x=X if RANK == 0 else X[::-1]))
if WAY == "skips":  # the fifth batch of an endless stream
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()
    if RANK == LAST:
        batches = batches.take(4).concatenate(batches.skip(5))
    told(lambda: model.fit(batches, steps_per_epoch=3, epochs=4, verbose=0))
    fit(model, epochs=1)  # all go on together
    assert model.towers.divergence() == 0.0
if WAY == "evaluates":
    told(lambda: fit(model) if RANK else model.evaluate(X, Y, verbose=0))
if WAY == "model":
    width = 8 if RANK == 0 else 13
    told(nccl_parallel(towers=2, health=Health(timeout_s=60))(lambda: build(width)))
if WAY == "seeds":
    told(lambda: model.fit(Shuffled(X, Y, batch_size=16, seed=RANK), verbose=0))
if WAY == "rows":
    told(lambda: fit(model, x=X[: 40 + 3 * RANK], y=Y[: 40 + 3 * RANK]))
if WAY == "label":
    bad = Y.copy()
    bad[31] = 99  # the last row of the second batch: the last tower's
    told(lambda: fit(model, y=bad, epochs=1))
    again = build()
    fit(model, epochs=1)  # all go on together
    assert model.towers.divergence() == 0.0
    print(f"[{RANK}] goes on", float(sum(np.abs(w).sum() for w in model.get_weights())), flush=True)
if WAY == "late":
    bad = X.copy()
    bad[31, 0] = 99  # the last row of the second batch: the last tower's
    late = nccl_parallel(towers=2, health=Health(timeout_s=60))(build_late)()
    late.train_on_batch(X[:16], Y[:16])
    for i in range(0, 64, 16):
        before = [variable.numpy() for variable in late.variables]
        failed = told(lambda i=i: late.train_on_batch(bad[i : i + 16], Y[i : i + 16]))  # all catch it, and go on
        same = [np.array_equal(one, other.numpy()) for one, other in zip(before, late.variables, strict=True)]
        assert all(same) == bool(failed), [one.path for one in late.variables]
        assert not failed or not any(late.get_metrics_result().values())  # as `train_on_batch` begins
    assert late.towers.divergence() == 0.0
    print(f"[{RANK}] goes on", float(sum(np.abs(w).sum() for w in late.get_weights())), flush=True)
if WAY == "pruned":
    for where, everywhere in (("batch", False), ("epoch", False), ("batch", True)):
        told(lambda where=where, everywhere=everywhere: fit(model, callbacks=[Raises(where, everywhere)]))
        fit(model, epochs=1)  # all go on together
        assert model.towers.divergence() == 0.0
    print(f"[{RANK}] goes on", float(sum(np.abs(w).sum() for w in model.get_weights())), flush=True)
if WAY == "before a step":  # a batch, or a function, that no step can take
    run, step = model.towers.run, tf.reduce_sum
    wrong = [(step, object()), (step, 1.0), (1, X)]
    for one in wrong:
        told(functools.partial(run, *(one if RANK == LAST else (step, X))))
        run(step, X)  # all go on together
    told(lambda: model.train_on_batch(object() if RANK == LAST else X, Y))
    fit(model, epochs=1)
    assert model.towers.divergence() == 0.0
if WAY == "writers":
    os.chdir(sys.argv[2])
    callbacks = keras.callbacks
    chief = [callbacks.ModelCheckpoint("{epoch}.keras"), callbacks.CSVLogger("log.csv"), callbacks.TensorBoard("board")]
    both = [callbacks.EarlyStopping("loss", patience=5)]
    for rest in ([], both):
        fit(model, callbacks=[*chief * (RANK == 0), *rest])
    told(lambda: fit(model, callbacks=[*both, *[Random()] * (RANK == 0)]))
    told(lambda: fit(model, callbacks=[*both, *[callbacks.CSVLogger("other.csv")] * (RANK == LAST)]))
    told(lambda: model.evaluate(X, Y, verbose=0, callbacks=[Random()] * (RANK == LAST)))
    told(lambda: fit(model, callbacks=[Random(), *both] if RANK else [*both, Random()]))
    divided = nccl_parallel(towers=2, shard_optimizer=True)(build)()
    told(lambda: fit(divided, callbacks=chief[: 1 - RANK]))
    fit(model, epochs=1)
    assert model.towers.divergence() == 0.0
if WAY == "stopped":
    if RANK == LAST:
        # Woken after a while, so that the test leaves nothing behind.
        os.system(f"(sleep 60; kill -9 {os.getpid()}) > /dev/null 2>&1 &")
    told(lambda: fit(model, callbacks=[At(2, lambda: send(signal.SIGSTOP))]))
if WAY == "busy":
    # One call that keeps Python from running, as a sort of many integers or a long json.loads.
    hold = functools.partial(ctypes.PyDLL(None).sleep, 20)
    told(lambda: fit(model, epochs=1, callbacks=[At(2, hold)]))
    hold()  # and all at once
    told(lambda: fit(model, epochs=1))
if WAY == "killed":
    seconds = float(sys.argv[2])
    if RANK == LAST:
        threading.Timer(seconds, send, [signal.SIGKILL]).start()
    while True:
        fit(model)
if WAY == "cut":
    print(f"[{RANK}] trains", flush=True)
    told(lambda: fit(model, epochs=100_000))
if WAY == "read alone":
    if RANK == 0:
        told(lambda: model.towers.divergence())
    else:
        told(lambda: fit(model))
