"""Train programs on towers of one process, or of several, and write all numbers that come of it.

    programs.py OUT TOWERS NAME...

TOWERS are those of each process, such as 2,1,1. Process r writes OUT.r.npz.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync
from ncclsync import nccl_parallel, ops

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
layers = keras.layers
ROWS = 61
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
WORDS = RNG.integers(0, 40, (ROWS, 6))
LABELS = RNG.integers(0, 5, ROWS)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def convolutional():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()])
    model.add(layers.Flatten())
    model.add(layers.Dense(5))
    model.compile(keras.optimizers.Adam(0.01), CROSS_ENTROPY, metrics=["accuracy"])
    return model


def embedding():
    model = keras.Sequential([keras.Input((6,)), layers.Embedding(40, 4), layers.GRU(5), layers.Dropout(0.3)])
    model.add(layers.Dense(5))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CROSS_ENTROPY, metrics=["accuracy"], steps_per_execution=2)
    return model


def accumulating():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(5)])
    optimizer = keras.optimizers.AdamW(0.01, gradient_accumulation_steps=3, use_ema=True, clipnorm=1.0)
    model.compile(optimizer, CROSS_ENTROPY, metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)])
    return model


def numbers_of(model, x, **options):
    """Fit, evaluate, predict, and train on one batch; return all numbers."""
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=5)
    history = model.fit(
        x, LABELS, batch_size=16, epochs=3, validation_split=0.2, verbose=0, callbacks=[schedule, stop], **options
    ).history
    found = {f"history {name}": np.array(values) for name, values in history.items()}
    found["evaluate"] = np.array(model.evaluate(x, LABELS, batch_size=16, verbose=0))
    found["predict"] = model.predict(x, batch_size=16, verbose=0)
    weights = RNG.random(7).astype("float32")
    found["train_on_batch"] = np.array(model.train_on_batch(x[:7], LABELS[:7], sample_weight=weights))
    found["two rows"] = np.array(model.train_on_batch(x[:2], LABELS[:2]))
    assert model.towers.divergence() == 0.0
    for name, values in (("weight", model.weights), ("optimizer", model.optimizer.variables)):
        found.update({f"{name} {i}": value.numpy() for i, value in enumerate(values)})
    return found


def model_program(factory, x, **options):
    def run(towers):
        keras.utils.set_random_seed(1)
        model = nccl_parallel(towers=towers, **options)(factory)()
        with model.towers:
            return numbers_of(model, x)

    return run


def own_loop(towers):
    """A step that returns rows of several dtypes, a mean and a sum, with a metric, explicit collectives and float64."""
    x = RNG.normal(size=(30, 3))
    weight = tf.Variable(tf.ones([3, 2], tf.float64))
    metric = keras.metrics.Mean()
    found = {}
    with ncclsync.Towers(towers) as joined:

        @tf.function
        def step(batch):
            with tf.GradientTape() as tape:
                predicted = tf.sin(batch @ weight)
                loss = tf.reduce_mean(predicted**2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            metric.update_state(loss)
            (most,) = ops.all_reduce([tf.reduce_max(batch)], op="max")
            sent = [ops.broadcast(tf.reduce_sum(batch, 0), root) for root in (0, 3)]  # of either process
            others = tf.cast(predicted * 100, tf.int16), tf.complex(predicted, -predicted)  # dtypes that NCCL lacks
            return predicted, loss, most, predicted > 0.1, *others, *sent

        for i, rows in enumerate((10, 7, 1, 12)):
            results = joined.run(step, x[:rows])
            found.update({f"{i} {j}": result.numpy() for j, result in enumerate(results)})
        each = joined.run(step, x[:2], per_tower=True)
        assert [one is not None for one in each] == [i in joined.layout.ranks and i < 2 for i in range(len(joined))]
        assert joined.divergence() == 0.0
    return {**found, "weight": weight.numpy(), "metric": metric.result().numpy()}


def dataset(towers):
    """A pipeline that shuffles by a seed, of a subclassed model with its own train_step."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.total = layers.Dense(5), keras.metrics.Mean(name="total")

        def call(self, x):
            return self.dense(tf.reshape(x, [-1, 192]))

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = CROSS_ENTROPY(y, self(x, training=True)) + 0.01 * tf.reduce_sum(self.dense.kernel**2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.total.update_state(loss)
            return {"total": self.total.result(), "rows": tf.shape(x)[0]}

    keras.utils.set_random_seed(2)
    model = nccl_parallel(towers=towers)(lambda: Model())()
    model.compile(keras.optimizers.RMSprop(0.01))
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(61, seed=3).batch(13)
    with model.towers:
        history = model.fit(data, epochs=3, verbose=0).history
        return {"total": np.array(history["total"]), **{str(i): w for i, w in enumerate(model.get_weights())}}


PROGRAMS = {
    "convolutional": model_program(convolutional, IMAGES, exact=("batch_norm",)),
    "embedding": model_program(embedding, WORDS),
    "accumulating": model_program(
        accumulating, IMAGES, compression="bfloat16", health=ncclsync.Health(on_nonfinite="skip")
    ),
    "whole random": model_program(embedding, WORDS, exact=("random",), health=ncclsync.Health(check_every=2)),
    "own loop": own_loop,
    "dataset": dataset,
}

if __name__ == "__main__":
    out, towers, *names = sys.argv[1:]
    each = [int(number) for number in towers.split(",")]
    numbers = {}
    for name in names or PROGRAMS:
        for key, value in PROGRAMS[name](each[RANK] if len(each) > 1 else each[0]).items():
            numbers[f"{name}: {key}"] = value
    np.savez(f"{out}.{RANK}.npz", **numbers)
