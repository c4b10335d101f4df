"""Train batches whose activations do not fit the GPUs' memory, with on_oom="split", and compare with one CPU.

With the argument "row": batches of which not even one row fits. With "sums": how much a divided step takes, in sets of
gradients. With "update": how much a step takes beyond what lies there, in sets of weights, on one GPU without towers
and on two with them. With "fed": batches that are fed ahead, in several
epochs, with validation, and with the options that the other arguments say.
"""

import logging
import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync

ROWS = 2048
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 32)).astype("float32"), RNG.integers(0, 5, ROWS)
layers = keras.layers
warned = []


class Keep(logging.Handler):
    """Keep what is warned of."""

    def emit(self, record):
        warned.append(record.getMessage())


def build(steps_per_execution=1):
    keras.utils.set_random_seed(1)
    wide = [layers.Dense(4096, activation="tanh"), layers.Dense(16), layers.Dense(4096, activation="tanh")]
    model = keras.Sequential([keras.Input((32,)), *wide, layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def trained(model, batch_size=ROWS, callbacks=(), **options):
    history = model.fit(X, Y, batch_size, epochs=3, shuffle=False, verbose=0, callbacks=[*callbacks], **options).history
    losses = [np.array(values) for name, values in history.items() if name.endswith("loss")]
    return [*losses, *model.get_weights()]


def fed(audit_every=None, steps_per_execution=1, watched=False):
    """Return a model that was trained on batches that are fed ahead, and numbers of it and of one CPU."""
    if audit_every is not None:
        tf.config.experimental.enable_op_determinism()
    decorated = ncclsync.nccl_parallel(on_oom="split", health=ncclsync.Health(audit_every=audit_every))(build)
    options = {"batch_size": 600, "validation_data": (X, Y), "validation_batch_size": 900}
    model = decorated(steps_per_execution)
    found = trained(model, callbacks=[ncclsync.Throughput()] if watched else [], **options)
    with tf.device("CPU:0"):
        return model, found, trained(build(steps_per_execution), **options)


def build_for_long_rows():
    keras.utils.set_random_seed(1)
    # A product, since XLA makes one loop of all else, which takes no memory.
    long = [layers.RepeatVector(400_000), layers.Dense(32, activation="tanh"), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((32,)), layers.Dense(32), *long, layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train_long_rows():
    """Print what is raised, and whether a weight has changed."""
    model = ncclsync.nccl_parallel(on_oom="split")(build_for_long_rows)()
    before = model.get_weights()
    for rows in (8, 1):
        try:
            model.train_on_batch(X[:rows], Y[:rows])
        except tf.errors.ResourceExhaustedError:
            same = all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
            print(rows, "rows: exhausted", "same" if same else "changed", "divergence", model.towers.divergence())


def measure_sums(splits=4):
    """Print what a step that was split takes on GPU 1 at most beyond weights and rows, in sets of gradients."""

    def build():
        model = keras.Sequential([keras.Input((32,)), *(layers.Dense(1024, "tanh") for _ in range(6)), layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = ncclsync.nccl_parallel(on_oom="split")(build)()
    for _ in range(splits):
        model.towers.split_further(ROWS)
    model.train_on_batch(X[:256], Y[:256])
    before = used("GPU:1")
    tf.config.experimental.reset_memory_stats("GPU:1")
    model.train_on_batch(X[:256], Y[:256])
    taken = tf.config.experimental.get_memory_info("GPU:1")["peak"] - before
    print("shards", model.towers.layout.shards, "sets", round(taken / 4 / model.count_params(), 2))
    large, before, held = RNG.normal(size=(400_000, 32)).astype("float32"), used("GPU:0"), []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: held.append(used("GPU:0") - before))
    model.fit(large, np.zeros(len(large)), batch_size=256, steps_per_epoch=2, epochs=2, verbose=0, callbacks=[watch])
    print("arrays", "kept" if max(held) > large.nbytes / 2 else "freed")


def measure_updates():
    """Print what a step takes at most on each GPU beyond weights and optimizer, in sets of weights."""

    def build():
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(1024, "tanh") for _ in range(17)]
        model = keras.Sequential([keras.Input((32,)), *hidden, layers.Dense(5)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    taken = []
    for make in (build, ncclsync.nccl_parallel(bucket_bytes=8 << 20)(build)):
        model = make()
        for _ in range(2):
            model.train_on_batch(X[:64], Y[:64])
        for device in ("GPU:0", "GPU:1") if taken else ("GPU:0",):
            before = used(device)
            tf.config.experimental.reset_memory_stats(device)
            model.train_on_batch(X[:64], Y[:64])
            peak = tf.config.experimental.get_memory_info(device)["peak"]
            taken.append((peak - before) / 4 / model.count_params())
        del model
    print("sets", *(round(sets, 2) for sets in taken))


def used(device):
    """Return how many bytes of a device's memory are taken."""
    return tf.config.experimental.get_memory_info(device)["current"]


logging.getLogger("ncclsync").addHandler(Keep(level=logging.WARNING))
if "row" in sys.argv:
    train_long_rows()
    sys.exit()
if "sums" in sys.argv:
    measure_sums()
    sys.exit()
if "update" in sys.argv:
    measure_updates()
    sys.exit()
if "fed" in sys.argv:
    model, found, expected = fed(**{name: int(value) for name, _, value in (a.partition("=") for a in sys.argv[2:])})
else:
    model = ncclsync.nccl_parallel(on_oom="split")(build)()
    found = trained(model)
    with tf.device("CPU:0"):
        expected = trained(build())
apart = max(np.abs(one - other).max() / np.abs(other).max() for one, other in zip(found, expected, strict=True))
said = [words for words in warned if "does not fit the memory" in words]
shards = len(model.towers.explain().shards)
print(
    "shards",
    shards,
    "warnings",
    len(said),
    "apart" if apart > 1e-4 else "equal",
    "divergence",
    model.towers.divergence(),
)
