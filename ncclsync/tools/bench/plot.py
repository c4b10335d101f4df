"""Draw a benchmark's result as a picture, by matplotlib."""

import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from ncclsync.tools.bench.results import Result, Row, size_text
from ncclsync.training.callbacks.figure import COLOURS, INK, save_figure


def plot(result: Result, file: pathlib.Path) -> None:
    """Draw a result; the file's suffix decides the format.

    `bench all-reduce`: bus bandwidth by size, one panel for each number of towers. Other benchmarks: a bar for each
    side of each case, whiskers at the quartiles.

    Raises:
        ImportError: matplotlib is not installed.
    """
    draw = _bandwidths if result.benchmark == "all-reduce" else _bars
    save_figure(functools.partial(draw, result=result), file)


def _bandwidths(plt: Any, result: Result) -> Any:
    towers = list(dict.fromkeys(row.case["towers"] for row in result.rows))
    figure, axes = plt.subplots(1, len(towers), sharey=True, squeeze=False, figsize=(3 * len(towers) + 1, 3.4))
    sides = _sides(result.rows, without=("memcpy",))
    for axis, count in zip(axes[0], towers, strict=True):
        for side, colour in sides.items():
            rows = [row for row in result.rows if row.side == side and row.case["towers"] == count]
            sizes = [row.case["size_bytes"] for row in rows]
            axis.plot(sizes, [row.more["busbw_gb_s"] for row in rows], "o-", ms=3, color=colour, label=side)
        axis.set(xscale="log", yscale="log", xticks=sizes, title=f"{count} towers")
        axis.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
        axis.minorticks_off()
    axes[0][0].set_ylabel("bus bandwidth, GB/s")
    _finish(figure, axes[0][0], len(sides))
    return figure


def _bars(plt: Any, result: Result) -> Any:
    """Draw one panel per model, since steps of different models have no common scale."""
    models = list(dict.fromkeys(_model(row) for row in result.rows))
    sides = _sides(result.rows)
    figure, axes = plt.subplots(1, len(models), squeeze=False, figsize=(2.2 * len(models) + 1.5, 3.4))
    for axis, model in zip(axes[0], models, strict=True):
        rows = [row for row in result.rows if _model(row) == model]
        scale, unit = (1.0, "s") if max(row.value.median for row in rows) >= 1 else (1e3, "ms")
        if result.unit == "B":
            scale, unit = 2.0**-20, "peak memory, MiB"
        cases = list(dict.fromkeys(row.case["towers"] for row in rows))
        width = 0.8 / len(sides)
        for place, (side, colour) in enumerate(sides.items()):
            mine = [row for row in rows if row.side == side]
            at = [cases.index(row.case["towers"]) + (place - (len(sides) - 1) / 2) * width for row in mine]
            medians = [row.value.median * scale for row in mine]
            quartiles = [[abs(getattr(row.value, q) - row.value.median) * scale for row in mine] for q in ("q1", "q3")]
            axis.bar(at, medians, width * 0.9, color=colour, label=side)
            axis.errorbar(at, medians, quartiles, fmt="none", ecolor=INK, capsize=2, lw=1)
        axis.set(title=model, ylabel=unit, xlabel="towers")
        axis.set_xticks(range(len(cases)), [str(case) for case in cases])
    _finish(figure, axes[0][0], len(sides))
    return figure


def _model(row: Row) -> str:
    return row.case.get("model", "")


def _sides(rows: Sequence[Row], without: Sequence[str] = ()) -> dict[str, str]:
    """Return the colour of each side."""
    names = [name for name in dict.fromkeys(row.side for row in rows) if name not in without]
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def _finish(figure: Any, axis: Any, count: int) -> None:
    columns = max(1, int(figure.get_figwidth() / 1.5))
    lines = math.ceil(count / columns)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, (0.05 + 0.22 * lines) / figure.get_figheight(), 1, 1))
