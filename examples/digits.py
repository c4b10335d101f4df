"""Train a small CNN on handwritten digits, on several towers.

What it shows: the one line that puts a model on towers (`nccl_parallel`); that the rest is plain Keras,
batches that cannot be split evenly included; that all towers end with the same weights; and that the saved
file is an ordinary Keras file. Exits with an error unless all of that holds and the test accuracy is 98%.

    python examples/digits.py --towers 4
"""

import argparse
import pathlib
import tempfile
import time

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ncclsync import nccl_parallel

EPOCHS = 40  # by default; fewer may learn less
REQUIRED_ACCURACY = 0.98


def load_data():
    """Return (x, x_test, y, y_test): 1,437 and 360 images of 8×8 pixels; always the same split."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return train_test_split(images, labels, test_size=0.2, random_state=2, stratify=labels)


def build_model():
    """Return a compiled CNN. Nothing in it knows of towers."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.RandomRotation(0.03, fill_mode="constant"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(model, x, y, epochs):
    """Fit the model; return the samples per second, without the first epoch: it builds the graph."""
    ends = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
    model.fit(x, y, batch_size=64, epochs=epochs, callbacks=[clock])
    return len(x) * (epochs - 1) / (ends[-1] - ends[0])


def predicts_the_same(model, path, x):
    """Save the model, load it with Keras alone, and return whether both predict the same."""
    model.save(path)
    reloaded = keras.models.load_model(path)
    return np.allclose(reloaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def main():
    """Train, check and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--towers", type=int, help="default: every GPU, or one CPU tower")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="at least 2; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and dropout")
    parser.add_argument("--save", type=pathlib.Path, help="where to keep the model, such as digits.keras")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first one is not timed")

    keras.utils.set_random_seed(options.seed)
    x, x_test, y, y_test = load_data()
    # The decorator @nccl_parallel, applied by hand: the number of towers is known only now.
    model = nccl_parallel(towers=options.towers)(build_model)()
    with model.towers as towers, tempfile.TemporaryDirectory() as folder:
        speed = train(model, x, y, options.epochs)
        _, accuracy = model.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0)
        divergence = towers.divergence()
        path = options.save or pathlib.Path(folder, "digits.keras")
        same = predicts_the_same(model, path, x_test)

        print(f"towers:        {len(towers)} on {', '.join(towers.devices)}")
        print(f"backend:       {towers.backend}")
        print(f"speed:         {speed:,.0f} samples per second, without the first epoch")
        print(f"test accuracy: {accuracy:.4f} on {len(x_test)} digits never trained on")
        print(f"divergence:    {divergence} between the towers' weights")
        print(f"reloaded:      predicts {'the same' if same else 'SOMETHING ELSE'}")

    learned = accuracy >= REQUIRED_ACCURACY or options.epochs < EPOCHS
    if not learned or divergence != 0.0 or not same:
        raise SystemExit("Not as it should be: see above.")


if __name__ == "__main__":
    main()
