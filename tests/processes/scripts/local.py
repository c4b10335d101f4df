"""Train, evaluate and predict on data of which each process reads its part, or one process all batches.

    local.py OUT TOWERS SAMPLES [ALONE]

TOWERS and SAMPLES are those of each process, such as 2,1 and 33,7; ALONE are the towers of one process. Process r
writes OUT/r.npz.
"""

import gc
import os
import sys
import weakref

import keras
import numpy as np
import tensorflow as tf
from telling import told

import ncclsync
from ncclsync import nccl_parallel
from ncclsync.sharding.shards import shard_sizes

OUT, TOWERS, SAMPLES = sys.argv[1], *([int(one) for one in given.split(",")] for given in sys.argv[2:4])
RANK, COUNT = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)), int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(sum(SAMPLES), 6)).astype("float32"), RNG.integers(0, 3, sum(SAMPLES))
BATCH = 16
loads = []


def parts(rows, batch):
    """What each process reads, of each batch: [processes][batches] of indices."""
    ends = np.cumsum(TOWERS)
    sizes = [sum(shard_sizes(batch, ends[-1])[end - count : end]) for end, count in zip(ends, TOWERS, strict=True)]
    begins = np.cumsum([0, *rows])
    return [
        [range(one, end)[i : i + size] for i in range(0, end - one, size)]
        for one, end, size in zip(begins, begins[1:], sizes, strict=False)
    ]


def read(index):
    row = tf.numpy_function(lambda one: loads.append(int(one)) or X[one], [index], tf.float32)
    return tf.ensure_shape(row, [6]), tf.gather(Y, index)


def data(rows, batch=BATCH):
    """The part of this process; in one process the batches of all, concatenated."""
    each = parts(rows, batch)
    if COUNT > 1:
        own = tf.data.Dataset.from_tensor_slices([int(i) for batch in each[RANK] for i in batch])
        return ncclsync.Local(own.map(read), batch_size=batch)
    count = max(map(len, each))
    whole = [[i for one in each for i in (one[number] if number < len(one) else ())] for number in range(count)]
    spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64)
    batches = tf.data.Dataset.from_generator(lambda: ((X[i], Y[i]) for i in whole), output_signature=spec)
    return batches.apply(tf.data.experimental.assert_cardinality(count))


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


towers = TOWERS[RANK] if COUNT > 1 else int(sys.argv[4])
model = nccl_parallel(towers=towers, exact=True, health=ncclsync.Health(timeout_s=60))(build)()
train, held = data(SAMPLES), data([one // 4 for one in SAMPLES], 8)
history = model.fit(train, epochs=3, validation_data=held, verbose=0).history
found = {f"history {key}": np.array(values) for key, values in history.items()}
found["evaluate"], found["predict"] = np.array(model.evaluate(held, verbose=0)), model.predict(train, verbose=0)
# Of other parts than those before: of each set a graph has the sizes of its own batches.
other = data([max(one // 2 - 3 * i * (one != SAMPLES[0]), 1) for i, one in enumerate(SAMPLES)], 8)
found["evaluate other"] = np.array(model.evaluate(other, verbose=0))
found["predict other"] = model.predict(other, verbose=0)
if COUNT > 1:  # what was read is let go
    held_samples = weakref.ref(other._samples)
    del other
    gc.collect()
    assert held_samples() is None, gc.get_referrers(held_samples())
found |= {f"weight {i}": value for i, value in enumerate(model.get_weights())}
assert model.towers.divergence() == 0.0
if COUNT > 1:
    loads.clear()
    model.fit(train, epochs=2, verbose=0)
    print(f"[{RANK}] loads {len(loads)}, {len(set(loads))}", flush=True)
    uncounted = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=train._samples.element_spec)
    told(lambda: model.fit(ncclsync.Local(uncounted, batch_size=BATCH), verbose=0))
    told(lambda: model.fit(ncclsync.Local(train._samples, batch_size=BATCH + RANK), verbose=0))
    told(lambda: model.fit(ncclsync.Local(train._samples.repeat(1 + 9 * RANK), batch_size=BATCH), verbose=0))
    told(lambda: model.fit(train, class_weight={0: 2.0}, verbose=0))
    told(lambda: model.fit(train.prefetch(2), verbose=0))
    endless = ncclsync.Local(train._samples.repeat(), batch_size=BATCH)
    model.fit(endless, steps_per_epoch=3, epochs=2, verbose=0)
    assert model.towers.divergence() == 0.0
np.savez(f"{OUT}/{RANK}.npz", **found)
