"""Train by a loop of your own: `Towers.run` runs a step function on every tower.

The page is own_loop.md. Needs scikit-learn, for its digits.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import ncclsync

# Towers first; then model, optimizer and dataset.
towers = ncclsync.Towers(2)  # or Towers(["GPU:0", "GPU:2"]); without a number: every visible GPU

x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices((x.astype("float32") / 16, y)).shuffle(len(x), seed=1).batch(100)
model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(0.005)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)  # of the whole batch, on every tower
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss, "largest": tf.reduce_max(x)}


with towers:
    for _ in range(5):
        for batch in dataset:
            logs = towers.run(step, batch)  # one device's; per_tower=True: a list of each tower's
        print(f"loss {float(logs['loss']):.4f}")
    print(f"divergence {towers.divergence()}")
