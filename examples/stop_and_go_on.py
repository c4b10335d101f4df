"""Stop a run and go on: start this again after it was killed, and it goes on at the sample.

The page is stop_and_go_on.md. Needs scikit-learn, for its digits.
"""

import keras
from sklearn.datasets import load_digits

import ncclsync

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16


@ncclsync.nccl_parallel(towers=2, exact=True)
def build_model():
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


model = build_model()
data = ncclsync.Shuffled(x, y, batch_size=32, seed=1)
model.fit(data, epochs=5, callbacks=[ncclsync.BackupAndRestore("backup", save_freq=100, data=data)])
model.save_weights("digits.weights.h5")
