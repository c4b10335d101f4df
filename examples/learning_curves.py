"""Draw the learning curves of digits.py's model on 1, 2, 4 and 8 towers: they lie on one another.

The model draws random numbers (dropout, rotations), and 64 samples make no even batch at the end of an
epoch; so it takes `exact=True` for N towers to train as one device does. On one tower
ncclsync is plain Keras. What differs is rounding, which training makes larger from step to step. How much
larger, a control tells: one tower again, on images that are brighter by one unit in the last place.

    python examples/learning_curves.py --plot examples/learning_curves.png
"""

import argparse
import pathlib

import keras
import numpy as np
from digits import build_model, load_data

from ncclsync import nccl_parallel

CURVES = {"loss": "training loss", "val_accuracy": "test accuracy"}


def train(towers, epochs, brighter=0.0):
    """Return the history of a training from the same start, by the names of its logs: [epochs] each."""
    x, x_test, y, y_test = load_data()
    x *= np.float32(1 + brighter)
    keras.utils.set_random_seed(0)
    model = nccl_parallel(towers=towers, exact=True)(build_model)()
    with model.towers:
        # The towers divide the test data too, so that its accuracy is of the whole.
        arguments = {"validation_data": (x_test, y_test), "verbose": 0}
        return model.fit(x, y, batch_size=64, epochs=epochs, **arguments).history


def plot(histories, file):
    """Draw the curves by number of towers, each narrower than the one that it lies on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = ("#e9a23b", "#2a9d76", "#5470c6", "#b5446e")
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#7d8590")
    with plt.rc_context({"font.size": 9, "axes.edgecolor": "#7d8590", **ink}):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3))
        for axis, (log, title) in zip(axes, CURVES.items(), strict=True):
            for place, (towers, history) in enumerate(histories.items()):
                epochs = range(1, len(history[log]) + 1)
                colour, width = colours[place % len(colours)], 8.0 / 2**place
                axis.plot(epochs, history[log], color=colour, lw=max(width, 0.8), label=count(towers))
            axis.set(title=title, xlabel="epoch")
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_yscale("log")
        axes[1].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(file, dpi=110, transparent=True)
        plt.close(figure)


def count(towers):
    """Return a number of towers in words."""
    return "1 tower" if towers == 1 else f"{towers} towers"


def tell(name, history, reference):
    """Print where a history ends, and how far it is from another one: after an epoch, and at most."""
    parts = []
    for log, title in CURVES.items():
        gaps = np.abs(np.subtract(history[log], reference[log]))
        parts.append(f"{title} {history[log][-1]:.4f} (apart {gaps[0]:.0e} in epoch 1, {max(gaps):.0e} at most)")
    print(f"{name}: {', '.join(parts)}", flush=True)


def main():
    """Train, print how far the curves are apart, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = [1, 2, 4, 8]
    parser.add_argument("--towers", type=int, nargs="+", default=numbers, help="default: 1 2 4 8")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw, such as learning_curves.png")
    options = parser.parse_args()

    histories = {towers: train(towers, options.epochs) for towers in dict.fromkeys(options.towers)}
    first = next(iter(histories))
    control = train(first, options.epochs, brighter=np.finfo("float32").eps)
    for towers, history in histories.items():
        tell(count(towers), history, histories[first])
    tell("control", control, histories[first])
    if options.plot:
        plot(histories, options.plot)


if __name__ == "__main__":
    main()
