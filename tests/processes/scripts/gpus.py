"""Train on virtual GPUs of one process, or of several, and write losses and weights; or fail as the arguments say.

    gpus.py OUT TOWERS [WAY]

Process r writes OUT.r.npz. The last process fails.
"""

import logging
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from telling import told

import ncclsync
from ncclsync import nccl_parallel
from ncclsync.communicator.processes import find_process

logging.basicConfig(level=logging.INFO, format="%(message)s")
OUT, TOWERS, WAY = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or [""])[0]
PROCESS = find_process()
RANK, LAST = (0, 0) if PROCESS is None else (PROCESS.rank, PROCESS.size - 1)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(61, 8, 8, 3)).astype("float32")
LABELS = RNG.integers(0, 5, 61)
FAILS = (0 if WAY.startswith("first") else LAST) == RANK


class At(keras.callbacks.Callback):
    """Call something after the third batch, in the process that fails."""

    def __init__(self, call):
        super().__init__()
        self.call, self.seen = call, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if FAILS and self.seen == 3:
            self.call()


def contrast(y_true, y_pred):
    """A loss that needs the rows of all towers."""
    rows = tf.math.l2_normalize(y_pred, 1)
    own = tf.range(tf.shape(rows)[0])
    return keras.losses.sparse_categorical_crossentropy(own, rows @ tf.transpose(rows), from_logits=True)


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()])
    model.add(layers.Flatten())
    model.add(layers.Dense(5))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def own_loop():
    """A step that returns rows and a mean, with a variable that is made on the CPU."""
    x = np.random.default_rng(1).normal(size=(30, 3)).astype("float32")
    weight, found = tf.Variable(tf.ones([3, 2])), {}
    with ncclsync.Towers(TOWERS) as towers:

        @tf.function
        def step(batch):
            with tf.GradientTape() as tape:
                predicted = tf.sin(batch @ weight)
                loss = tf.reduce_mean(predicted**2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return predicted, loss, predicted > 0.1

        for i, rows in enumerate((10, 7, 1, 12)):
            for j, result in enumerate(towers.run(step, x[:rows])):
                found[f"own loop {i} {j}"] = result.numpy()
        assert towers.divergence() == 0.0
    return {**found, "own loop weight": weight.numpy()}


def small_step(weight):
    """A step whose gradient travels, and the mean that it returns; in process 1 another mean, if so told."""

    def step(batch):
        with tf.GradientTape() as tape:
            predicted = batch @ weight
            loss = tf.reduce_mean(predicted**2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return (loss, tf.reduce_mean(predicted)) if WAY == "other program" and FAILS else loss

    return step


def run_small_steps():
    """Say how many exchanges are under way when the call of a step has returned."""
    weight, batch = tf.Variable(tf.ones([3, 2])), np.ones([8, 3], "float32")
    with ncclsync.Towers(TOWERS) as towers:
        step = small_step(weight)
        for _ in range(3):
            towers.run(step, batch)
            launched, ended = towers.communicator.groups()
            print(f"[{RANK}] under way: {launched - ended} of {launched}, weight", weight.numpy().sum(), flush=True)


def own_part():
    """Whole batches and a rest that process 0 has alone, read by each process in part."""
    if PROCESS is None:
        return tf.data.Dataset.from_tensor_slices((IMAGES[:51], LABELS[:51])).batch(16)
    own = [i for i in range(51) if (i % 16 // 8 if i < 48 else 0) == RANK]
    return ncclsync.Local(tf.data.Dataset.from_tensor_slices((IMAGES[own], LABELS[own])), batch_size=16)


def train():
    model = nccl_parallel(towers=TOWERS, exact=("batch_norm",), health=ncclsync.Health(timeout_s=60, check_every=2))(
        build
    )()
    options = {"batch_size": 16, "verbose": 2, "shuffle": False}
    found = {"loss": model.fit(IMAGES, LABELS, epochs=2, validation_split=0.2, **options).history["loss"]}
    found["evaluate"] = model.evaluate(IMAGES, LABELS, batch_size=16, verbose=0)
    found["predict"] = model.predict(IMAGES, batch_size=16, verbose=0)
    assert model.towers.divergence() == 0.0
    found.update({f"weight {i}": value for i, value in enumerate(model.get_weights())})
    for name in ("one", "other"):
        if RANK == 0:
            time.sleep(0.5)
        model.save(f"{OUT}.{name}.keras")  # each process reads what process 0 has just written
        loaded = keras.models.load_model(f"{OUT}.{name}.keras").get_weights()
        found.update({f"{name} loaded {i}": value for i, value in enumerate(loaded)})
    found["local"] = model.fit(own_part(), verbose=0).history["loss"]
    keras.utils.set_random_seed(1)
    other = nccl_parallel(towers=TOWERS)(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)]))()
    other.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), contrast)  # it exchanges every other time
    found["others' rows"] = other.fit(IMAGES[:, 0, 0], LABELS, **options).history["loss"]
    found.update({f"others' rows, weight {i}": value for i, value in enumerate(other.get_weights())})
    print(model.towers, model.towers.explain())
    np.savez(f"{OUT}.{RANK}.npz", **found, **own_loop())
    print([device.name for device in tf.config.list_logical_devices()], tf.constant(1.0).device)


def fail():
    if WAY == "ahead":
        return run_small_steps()
    if WAY == "divergence":
        with ncclsync.Towers(TOWERS) as towers:
            step, batch = small_step(tf.Variable(tf.ones([3, 2]))), np.ones([8, 3], "float32")
            towers.run(step, batch)
            told(towers.divergence if FAILS else lambda: towers.run(step, batch))
        return None
    if WAY == "other program":
        return told(run_small_steps)
    if WAY == "late":
        if FAILS:
            time.sleep(100)  # the test kills it
        ncclsync.Towers(TOWERS, health=ncclsync.Health(timeout_s=5))
    model = nccl_parallel(towers=TOWERS, health=ncclsync.Health(timeout_s=60))(build)()
    options = {"batch_size": 16, "verbose": 0, "shuffle": False}
    model.fit(IMAGES, LABELS, **options)
    way = WAY.removeprefix("first ")
    if way in ("raises", "caught"):

        def call():
            raise ValueError("told to fail")

        error = told(lambda: model.fit(IMAGES, LABELS, epochs=2, callbacks=[At(call)], **options))
        if way == "raises":
            raise error
    if way == "ends":
        call = sys.exit if FAILS else lambda: model.fit(IMAGES, LABELS, epochs=2, **options)
        told(call)
    if way == "killed":
        told(lambda: model.fit(IMAGES, LABELS, epochs=2, callbacks=[At(lambda: os.kill(os.getpid(), 9))], **options))
    if way == "stopped":
        pid = os.getpid()
        if FAILS:  # killed after a while, so that the test leaves nothing behind
            os.system(f"(sleep 50; kill -9 {pid}) > /dev/null 2>&1 &")
        stop = At(lambda: os.kill(pid, signal.SIGSTOP))
        told(lambda: model.fit(IMAGES, LABELS, epochs=2, callbacks=[stop], **options))
    if way == "cut":
        print(f"[{RANK}] trains", flush=True)
        told(lambda: model.fit(IMAGES, LABELS, epochs=100_000, **options))
    if way in ("pruned", "other label"):  # the other one waits in an exchange of the processes, or in a step

        class Pruned(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if FAILS:
                    raise ValueError("pruned")

        for callback in (Pruned(), At(lambda: [][0])):
            told(lambda callback=callback: model.fit(IMAGES, LABELS, epochs=2, callbacks=[callback], **options))
            model.fit(IMAGES, LABELS, **options)
        assert model.towers.divergence() == 0.0
        print(f"[{RANK}] goes on", float(sum(np.abs(w).sum() for w in model.get_weights())), flush=True)
    if way == "sent":  # what Python has written, while the other one fails
        weight = model.weights[0]
        expected = weight.numpy() + 1
        weight.assign(expected)
        if FAILS:
            time.sleep(1)
        told((lambda: model.towers.run(lambda batch: batch, 3.0)) if FAILS else model.towers.divergence)
        np.testing.assert_array_equal(weight, expected)
        model.fit(IMAGES, LABELS, **options)
        assert model.towers.divergence() == 0.0
        print(f"[{RANK}] goes on", float(sum(np.abs(w).sum() for w in model.get_weights())), flush=True)
    if way == "saved":

        def wait():  # as a slow callback does
            if FAILS:
                sys.exit()
            while not model.towers.communicator.peers.have_ended():
                time.sleep(0.05)

        health = ncclsync.Health(emergency_checkpoint=f"{OUT}.weights.h5")
        model = nccl_parallel(towers=TOWERS, health=health)(build)()
        called = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch == 2 and wait())
        told(lambda: model.fit(IMAGES, LABELS, callbacks=[called], **options))
    if way.startswith("interrupted"):
        if FAILS:
            time.sleep(8)
        else:
            os.system(f"(sleep {0.3 if way.endswith('early') else 2}; kill -INT {os.getpid()}) > /dev/null 2>&1 &")
        try:
            told(lambda: model.train_on_batch(IMAGES[:16], LABELS[:16]))
        except KeyboardInterrupt:
            print(f"[{RANK}] KeyboardInterrupt", flush=True)
        time.sleep(0 if FAILS else 40)  # there while the other one, on a busy machine, looks
    if way in ("label", "other label"):
        other = nccl_parallel(towers=TOWERS, health=ncclsync.Health(timeout_s=60))(build)()
        other.compile("sgd", checked_loss)
        labels = LABELS.copy()
        labels[31 if way == "label" else 16] = 99  # of the second batch: the last tower's, or tower 0's
        told(lambda: other.fit(IMAGES, labels, **options))
        other.fit(IMAGES, LABELS, **options)
        assert other.towers.divergence() == 0.0
        print(f"[{RANK}] goes on", float(sum(np.abs(w).sum() for w in other.get_weights())), flush=True)


def checked_loss(y_true, y_pred):
    """The cross entropy, which a GPU computes of a label that is none, too."""
    with tf.control_dependencies([tf.debugging.assert_less(y_true, tf.cast(5, y_true.dtype), "no such label")]):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


fail() if WAY else train()
