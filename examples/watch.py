"""Watch a run: whether the towers agree, where a NaN comes from, what a step does and how long it takes.

The page is watch.md. Needs scikit-learn, for its digits.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import ncclsync

x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16


@ncclsync.nccl_parallel(towers=3, exact=True, health=ncclsync.Health(check_every=2, on_nonfinite="raise"))
def build_model():
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


model = build_model()
model.fit(x, y, batch_size=64, epochs=2, callbacks=[ncclsync.NoiseScale()])
print(f"divergence {model.towers.divergence()}")

print(model.towers.explain(64))

model.fit(x, y, batch_size=64, callbacks=[ncclsync.Throughput(), ncclsync.Timeline("trace.json")])

spoiled = x[:60].copy()
spoiled[33, 0] = np.nan
try:
    model.fit(spoiled, y[:60], batch_size=20, shuffle=False)
except ncclsync.NonFiniteError as error:
    print(error)
