"""What all strategies train: data, model, optimizer and loss, the same in every process."""

import os
import pathlib
import pickle

import keras
import numpy as np
from digits import load_data as load_digits

LEARNING_RATE = 0.05
MOMENTUM = 0.9
NORMALISATIONS = ("none", "batch", "synchronized")
CIFAR = pathlib.Path("datasets", "cifar-10-batches-py")  # of keras.datasets.cifar10, below Keras' home


def load_data(name):
    """Return (x, x_test, y, y_test): float32 images in [0, 1] and int64 labels 0–9; always the same order.

    Raises:
        FileNotFoundError: CIFAR-10 is asked for and is not on disk. Nothing is downloaded.
        ValueError: no such data.
    """
    if name == "digits":
        return load_digits()
    if name != "cifar10":
        raise ValueError(f"Expected digits or cifar10. Received: {name!r}")
    folder = pathlib.Path(os.environ.get("KERAS_HOME", pathlib.Path.home() / ".keras")) / CIFAR
    if not folder.is_dir():
        raise FileNotFoundError(f"Expected CIFAR-10's batches in {folder}. Received: no such folder")
    x, y = _read_cifar([folder / f"data_batch_{number}" for number in range(1, 6)])
    x_test, y_test = _read_cifar([folder / "test_batch"])
    return x, x_test, y, y_test


def _read_cifar(files):
    batches = [pickle.loads(file.read_bytes(), encoding="bytes") for file in files]
    images = np.concatenate([batch[b"data"] for batch in batches])  # [rows, 3 · 32 · 32] uint8
    labels = np.concatenate([np.asarray(batch[b"labels"]) for batch in batches])
    return images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype("float32") / 255, labels


def build_model(shape, normalisation="batch"):
    """Return a small CNN that gives logits; not compiled, its weights always the same.

    Args:
        shape: of an image.
        normalisation: one of `NORMALISATIONS`: no layer, `BatchNormalization`, or the same with
            `synchronized=True`.
    """
    keras.utils.set_random_seed(0)
    layers = [keras.Input(shape)]
    for filters in (16, 32):
        # A bias before a normalisation has no effect and a gradient of rounding errors alone.
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", use_bias=normalisation == "none"))
        if normalisation != "none":
            layers.append(keras.layers.BatchNormalization(synchronized=normalisation == "synchronized"))
        layers += [keras.layers.ReLU(), keras.layers.MaxPooling2D()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def make_optimizer():
    """Return a new SGD with momentum: unlike Adam's, its steps tell a sum of gradients from their mean."""
    return keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)


def make_loss():
    """Return the loss: the mean over the samples that it is given."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model):
    """Compile a model with this task's optimizer and loss; return it."""
    model.compile(optimizer=make_optimizer(), loss=make_loss())
    return model
