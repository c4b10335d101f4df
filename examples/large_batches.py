"""Train with large batches: the learning rate follows the batch size, after a warm-up.

The page is large_batches.md. Needs scikit-learn, for its digits, and matplotlib.
"""

import keras
from sklearn.datasets import load_digits

import ncclsync

x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16


@ncclsync.nccl_parallel(towers=2, recipe=ncclsync.LargeBatch(reference_batch_size=32, warmup_epochs=2))
def build_model():
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(64, activation="relu")(inputs)
    branch = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(64)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden + branch))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    return model


model = build_model()
zeroed = ncclsync.zero_last_gamma(model)  # of a ResNet: each block begins as the identity
history = model.fit(x, y, batch_size=256, epochs=6)
ncclsync.plot_history(history, "rate.png")  # with the noise scale, if the logs have it

print(f"begins as the identity: {[layer.name for layer in zeroed]}")
print(f"learning rate: {float(model.optimizer.learning_rate):.3f}")
print(f"effective:     {history.history['effective_learning_rate'][-1]:.3f}")
