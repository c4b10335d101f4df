"""Train on all virtual GPUs what the argument says; print what NCCL and CUDA then have."""

import gc
import sys

import keras
import numpy as np
import tensorflow as tf
from counters import counted, left_mib

import ncclsync

X, Y = np.ones([8, 64], "float32"), np.ones([8, 1], "float32")
KINDS = ("comm", "stream", "thread", "memory", "event")


@ncclsync.nccl_parallel
def build():
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(2048), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def trained():
    model = build()
    model.train_on_batch(X, Y)
    model.towers.divergence()  # waits for the GPUs
    gc.collect()
    return model


def in_a_row():
    """Each is dropped when the next one is there, or before."""
    model = trained()
    first = counted(*KINDS)
    for i in range(5):
        if i % 2:
            del model
            gc.collect()
        model = trained()
    print("first", *first)
    print("last", *counted(*KINDS))


def once():
    model = trained()
    print(f"communicators {counted('comm')[0]} taken {model.towers.communicator.taken_bytes >> 20}")
    print(str(model.towers.explain(len(X))).partition("NCCL takes ")[2].partition(".")[0])


def before():
    """NCCL takes memory when TensorFlow has seen how much is free, and has not taken it as yet."""
    tf.config.list_logical_devices()
    towers = ncclsync.Towers(4)
    with_nccl = left_mib()
    with tf.device("GPU:0"):
        tf.ones([4])
    print(f"NCCL has {towers.communicator.taken_bytes >> 20}, TensorFlow {with_nccl - left_mib()}")


try:
    {"before": before, "row": in_a_row, "once": once}[sys.argv[1]]()
except (ncclsync.NcclSyncError, tf.errors.OpError) as error:
    print(type(error).__name__, str(error).replace("\n", " "))
