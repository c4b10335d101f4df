"""Draw a training run's learning rate and gradient noise scale: `plot_history`."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ncclsync.training.callbacks.large_batch import LOG_KEY

_INK = "#7d8590"  # readable on white and on black
_COLOURS = ("#2a9d76", "#5470c6")

# By panel: the keys of the logs, with their names in the legend.
_PANELS = {
    "learning rate": {LOG_KEY: "effective", "learning_rate": "reference"},
    "samples": {"noise_scale": "noise scale", "suggested_batch_size": "suggested batch size"},
}


def plot_history(
    history: keras.callbacks.History | Mapping[str, Sequence[float]], file: str | os.PathLike[str]
) -> None:
    """Draw the learning rate by epoch and, if the logs have them, the noise scale and the suggested batch size.

    Args:
        history: the result of `fit`, or its `history`. Drawn are "effective_learning_rate" (logged by `LargeBatch`) and
            "learning_rate" (the reference rate, logged by Keras' callbacks), and, on a logarithmic scale in samples,
            "noise_scale" and "suggested_batch_size".
        file: the picture; the suffix decides the format, such as ".png" or ".svg".

    Raises:
        TypeError: `history` is no history.
        ValueError: it has none of these keys.
        ImportError: matplotlib is not installed.
    """
    logs = history.history if isinstance(history, keras.callbacks.History) else history
    if not isinstance(logs, Mapping):
        raise TypeError(f"Expected what fit returns, or its history. Received: {history!r}")
    panels = {
        panel: {label: logs[key] for key, label in labels.items() if key in logs} for panel, labels in _PANELS.items()
    }
    drawn = {panel: lines for panel, lines in panels.items() if lines}
    if not drawn:
        keys = [key for labels in _PANELS.values() for key in labels]
        raise ValueError(f"Expected logs with at least one of {keys}. Received: {sorted(logs)}")

    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, whose backend is the user's choice

    file = pathlib.Path(file)
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {"font.size": 9, "svg.hashsalt": "ncclsync", **dict.fromkeys(ink, _INK)}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4 * len(drawn), 3))
        for axis, (panel, lines) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
            for (label, values), colour in zip(lines.items(), _COLOURS, strict=False):
                axis.plot(range(1, len(values) + 1), values, "o-", ms=3, color=colour, label=label)
            axis.set(xlabel="epoch", ylabel=panel)
            if panel == "samples":
                axis.set_yscale("log")
            axis.legend(frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        dateless: Any = {"metadata": {"Date": None}} if file.suffix == ".svg" else {"dpi": 150}
        figure.savefig(file, transparent=True, **dateless)
