"""The comparison's rows as a table on the terminal, and as a picture."""

import sys

from ncclsync.tools.bench.results import significant, size_text
from strategies.conditions import EQUAL

_INK = "#7d8590"  # is read on white and on black
_GOOD, _BAD, _BAR = "#2a9d76", "#e9a23b", "#5470c6"
HEADS = {  # of the columns, and how far to the right each begins in the picture
    "strategy": 0,
    "accuracy": 24,
    "distance:\nplain": 30.5,
    "Batch-\nNorm": 36.5,
    "synchro-\nnized": 41.5,
    "indivisible\nlast batch": 47.5,
    "saves\nplain": 56,
    "step": 60.5,
    "first\nstep": 67.5,
    "memory": 74.5,
    "moved": 81.5,
    "through": 88.5,
}


def show(rows, towers):
    """Print the table, then the causes of all differences."""
    import rich.box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, title=f"{towers} CPU towers")
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("strategy", "through") else "right")
    for row in rows:
        table.add_row(*cells(row).values())
    console.print(table, markup=False, highlight=False)
    for row in rows:
        causes = [f"{condition}: {cause}" for condition, cause in row.why.items() if condition in row.distances]
        if causes:
            console.print(f"{row.system}\n    " + "\n    ".join(causes), markup=False, highlight=False)


def cells(row):
    """Return a row's texts by `HEADS`."""
    distances = [distance_text(row, condition) for condition in ("plain", "batch norm", "synchronized")]
    texts = [
        row.system,
        f"{row.accuracy:.1%}",
        *distances,
        row.last_batch(),
        "yes" if row.saves_plain else "no",
        f"{significant(row.step_s * 1e3)} ms",
        f"{row.first_step_s:.1f} s",
        size_text(row.memory_bytes),
        size_text(row.moved_bytes),
        row.through,
    ]
    return dict(zip(HEADS, texts, strict=True))


def distance_text(row, condition):
    """Return a distance with one digit, or that there is none."""
    distance = row.distances[condition]
    if distance is None:
        return "raises"
    return f"{distance:.0e}" if 0 < distance < 0.01 else f"{distance:.2g}"


def plot(rows, file, towers):
    """Draw the table: bars behind what is measured, green what is as on one device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 8, "text.color": _INK}):
        figure, axis = plt.subplots(figsize=(13, 0.9 + 0.28 * len(rows)))
        axis.set(xlim=(0, 107), ylim=(len(rows) - 0.4, -1.7))
        axis.axis("off")
        for head, left in HEADS.items():
            axis.text(left, -0.7, head, va="bottom", fontweight="bold")
        for head, values in _bars(rows).items():
            for place, value in enumerate(values):
                axis.barh(place, 6.2 * value / max(values), 0.72, HEADS[head] - 0.3, color=_BAR, alpha=0.35)
        for place, row in enumerate(rows):
            good = _as_on_one_device(row)
            for head, text in cells(row).items():
                colour = {None: _INK, True: _GOOD, False: _BAD}[good.get(head)]
                axis.text(HEADS[head], place, text, va="center", color=colour)
        axis.set_title(f"{towers} CPU towers; distance from one device, in units of its own way", fontsize=9)
        figure.tight_layout(pad=0.4)
        figure.savefig(file, transparent=True, dpi=88, pil_kwargs={"optimize": True})
        plt.close(figure)


def _bars(rows):
    return {
        "step": [row.step_s for row in rows],
        "first\nstep": [row.first_step_s for row in rows],
        "memory": [row.memory_bytes for row in rows],
        "moved": [row.moved_bytes for row in rows],
    }


def _as_on_one_device(row):
    equal = {name: value is not None and value <= EQUAL for name, value in row.distances.items()}
    return {
        "distance:\nplain": equal["plain"],
        "Batch-\nNorm": equal["batch norm"],
        "synchro-\nnized": equal["synchronized"],
        "indivisible\nlast batch": equal["last batch"],
        "saves\nplain": row.saves_plain,
    }
