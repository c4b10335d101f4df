"""Train a CNN with dropout in 8 shards on 1, 2, 4 and 8 towers: equal bits; and beside them MirroredStrategy's.

Exits with an error unless losses and weights of all are equal to the last bit.

    python examples/same_bits.py --beside --plot examples/same_bits.png
"""

import argparse
import concurrent.futures
import multiprocessing
import pathlib

import keras
import numpy as np
import tensorflow as tf
from digits import load_data

from ncclsync import nccl_parallel

NUMBERS = (1, 2, 4, 8)
ROWS, BATCH = 1280, 64  # even for MirroredStrategy, which miscounts what is not


def build_model(dropout=0.3):
    """Return a compiled CNN, from the same start each time."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


class Losses(keras.callbacks.Callback):
    """Keep the loss after each batch: the mean of the epoch so far."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"])


def train(model, epochs):
    """Return the losses [batches], and the bits of all weights."""
    x, _, y, _ = load_data()
    losses = Losses()
    model.fit(x[:ROWS], y[:ROWS], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[losses])
    return np.array(losses.seen), b"".join(value.tobytes() for value in model.get_weights())


def on_towers(count, epochs):
    """Train in 8 shards on so many towers."""
    model = nccl_parallel(towers=count, shards=8)(build_model)()
    with model.towers:
        return train(model, epochs)


def mirrored(count, epochs, dropout):
    """Train on so many replicas of MirroredStrategy, which takes one replica of a device."""
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    with tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)]).scope():
        return train(build_model(dropout), epochs)


def apart(function, *arguments):
    """Run a function in a process of its own: TensorFlow keeps the devices that it began with."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def tell(name, runs):
    """Print how far the losses are from those of the first run, and whether the weights have its bits."""
    first, weights = runs[NUMBERS[0]]
    for count, (losses, bits) in runs.items():
        apart = np.abs(losses - first).max()
        print(
            f"{name} on {count}: loss {losses[-1]:.6f}, apart {apart:.1e}, equal weights: {bits == weights}", flush=True
        )


def plot(rows, file):
    """Draw how far each run's losses are from those of one tower or replica."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#7d8590")
    with plt.rc_context({"font.size": 9, "axes.edgecolor": "#7d8590", **ink}):
        figure, axes = plt.subplots(1, len(rows), figsize=(3 * len(rows), 2.6), sharey=True, squeeze=False)
        for axis, (name, runs) in zip(axes[0], rows.items(), strict=True):
            for colour, (count, (losses, _)) in zip(
                ("#e9a23b", "#2a9d76", "#5470c6"), list(runs.items())[1:], strict=True
            ):
                apart = np.abs(losses - runs[NUMBERS[0]][0])
                axis.plot(range(1, len(losses) + 1), apart, color=colour, lw=1, label=f"{count}")
            axis.set(title=name, xlabel="batch")
            axis.set_yscale("symlog", linthresh=1e-8)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].set_ylabel("loss: |N - one|")
        axes[0, 0].legend(frameon=False, title="N")
        figure.tight_layout()
        figure.savefig(file, dpi=100, transparent=True)
        plt.close(figure)


def main():
    """Train, print how far the runs are apart, and draw that."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--beside", action="store_true", help="train by MirroredStrategy, too")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw, such as same_bits.png")
    options = parser.parse_args()
    own = {count: apart(on_towers, count, options.epochs) for count in NUMBERS}
    rows = {"ncclsync, 8 shards": own}
    for dropout in (0.3, 0.0) if options.beside else ():
        name = "MirroredStrategy" + (", no dropout" if not dropout else "")
        rows[name] = {count: apart(mirrored, count, options.epochs, dropout) for count in NUMBERS}
    for name, runs in rows.items():
        tell(name, runs)
    if options.plot:
        plot(rows, options.plot)
    assert all((losses == own[1][0]).all() and bits == own[1][1] for losses, bits in own.values())


if __name__ == "__main__":
    main()
