"""Train the digits on one GPU and on all of them, and print how fast each was.

The page is two_gpus.md. Needs scikit-learn; CPU towers stand in where there is no GPU.
"""

import time

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import ncclsync

images, y = load_digits(return_X_y=True)
x = images.reshape(-1, 8, 8, 1).astype("float32") / 16


def build_model():
    """Return a small CNN, compiled."""
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def samples_per_second(towers):
    """Train on so many towers; the first epoch, which builds the graph, is not timed."""
    keras.utils.set_random_seed(0)
    model = ncclsync.nccl_parallel(towers=towers)(build_model)()
    model.fit(x, y, batch_size=256, epochs=1, verbose=0)
    start = time.perf_counter()
    model.fit(x, y, batch_size=256, epochs=3, verbose=0)
    seconds = time.perf_counter() - start
    with model.towers as open_towers:
        assert open_towers.divergence() == 0.0
    return 3 * len(x) / seconds


if __name__ == "__main__":
    for towers in sorted({len(tf.config.list_physical_devices("GPU")) or 2, 1}, reverse=True):
        print(f"{towers} tower(s): {samples_per_second(towers):,.0f} samples per second")
