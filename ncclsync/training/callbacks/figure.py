"""Draw pictures by matplotlib, in a style that is readable on white and on black."""

import pathlib
from collections.abc import Callable
from typing import Any

INK = "#7d8590"
COLOURS = ("#2a9d76", "#5470c6", "#e9a23b", "#b5446e", "#7a5fb5", "#8b949e", "#3ba5b5", "#a0522d")


def save_figure(draw: Callable[[Any], Any], file: pathlib.Path) -> None:
    """Write the figure that `draw(matplotlib.pyplot)` returns; the file's suffix decides the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {"font.size": 9, "svg.hashsalt": "ncclsync", **dict.fromkeys(ink, INK)}
    with plt.rc_context(style):
        figure = draw(plt)
        dateless = {"metadata": {"Date": None}} if file.suffix == ".svg" else {"dpi": 150}
        figure.savefig(file, transparent=True, **dateless)
        plt.close(figure)
