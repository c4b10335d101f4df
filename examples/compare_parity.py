"""Run the parity tests' tables on towers and under tf.distribute.MirroredStrategy, side by side.

Every row of the tables in tests/parity builds, trains and reads a model. Here every row of the small tables
does, and every third of the large ones (`--all`: all). Each runs three times, each time in a
process of its own, so that no run meets what an earlier one has left behind:

    one device          plain Keras: what the other two must reproduce
    ncclsync            towers on the CPU, by `nccl_parallel`
    MirroredStrategy    as many replicas on logical CPUs; built, compiled and trained in `strategy.scope()`

Data, global batches, seeds and calls are the same. MirroredStrategy raises where the first batch cannot be
shared evenly, and miscounts the last one, whatever the row is about; many tables have such batches on
purpose. So a row of arrays that it fails is run again with even batches, on one device too: `batch_size` is
rounded up to a multiple of the replicas, and the last rows that fill no batch are left out. What is compared
is what a user reads: weights, optimizer variables, history, logs, predictions, files. Outcomes:

    equal               every array is one device's, by `assert_close` of the tests: to the row's tolerance,
                        1e-5 of an array's largest magnitude unless its table says otherwise
    wrong               it ran without an error, and some number (or shape) is not one device's
    exception           it raised, the process died, or there was no end within --limit seconds
    not applicable      the row is about an interface that MirroredStrategy has no counterpart for. The rule:
                        the row calls `ncclsync.ops` itself, or it passes options to `nccl_parallel` (such as
                        `exact`) without which ncclsync is not equal either. Rows that are equal
                        without their options are run under MirroredStrategy.
    not run             it does not run on one device either: a package it needs is missing

    python examples/compare_parity.py --only losses,optimizers --details
    python examples/compare_parity.py --json parity.json --plot examples/parity.svg
"""

import argparse
import collections
import concurrent.futures
import datetime
import functools
import importlib.metadata
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import platform
import sys
import time

from parity_runs import PRELOADED, Outcome, find_rows, first_line, isolated

COLUMNS = ("ncclsync", "MirroredStrategy", "MirroredStrategy, even batches")
KINDS = ("equal", "wrong", "exception", "not applicable", "not run")
COLOURS = {"equal": "#2a9d76", "wrong": "#e9a23b", "exception": "#b5446e", "not applicable": "#8b949e40"}


def judge(outcome, reference, tolerance):
    """Compare a result with one device's by the tests' own `assert_close`."""
    from parity import assert_close

    if outcome.kind != "result":
        return outcome
    try:
        assert_close(outcome.value, reference.value, tolerance)
    except (AssertionError, ValueError, TypeError) as error:
        difference, where = largest_difference(outcome.value, reference.value)
        return Outcome("wrong", where or first_line(str(error)), difference)
    return Outcome("equal", "", largest_difference(outcome.value, reference.value)[0])


def largest_difference(actual, expected):
    """Return the largest relative difference, and the name of its array; (None, "") for other structures."""
    import keras
    import numpy as np

    paths = [path for path, _ in keras.tree.flatten_with_path(expected)]
    pairs = list(zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=False))
    found = (0.0, "")
    for path, (one, other) in zip(paths, pairs, strict=False):
        name = ".".join(map(str, path))
        if one.shape != other.shape:
            return None, f"{name}: shape {one.shape} is not {other.shape}"
        if other.size == 0 or other.dtype.kind in "OSU":
            continue
        one, other = one.astype("float64"), other.astype("float64")
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(one - other)) / max(1.0, np.nanmax(np.abs(other), initial=0.0))
        found = max(found, (float(np.max(np.nan_to_num(gap, nan=np.inf))), name))
    return found


def compare(row, options):
    """Return what became of a row, by column."""
    tolerance = row.case().tolerance
    reference = isolated(row, "one device", options)
    if reference.kind != "result":
        return dict.fromkeys(COLUMNS, Outcome("not run", reference.detail))
    towers = judge(isolated(row, "ncclsync", options), reference, tolerance)
    if reason := no_counterpart(row, reference, options):
        mirrored = even = Outcome("not applicable", reason)
    else:
        mirrored = even = judge(isolated(row, "MirroredStrategy", options), reference, tolerance)
        if mirrored.kind != "equal" and reference.uneven:
            even = isolated(row, "MirroredStrategy", options, even=True)
            if even.kind == "result":
                even = judge(even, isolated(row, "one device", options, even=True), tolerance)
    return dict(zip(COLUMNS, (towers, mirrored, even), strict=True))


def no_counterpart(row, reference, options):
    """Return why MirroredStrategy has nothing that the row is about; "" where it has."""
    case = row.case()
    if reference.calls_ops:
        return "calls ncclsync.ops"
    if not case.options:
        return ""
    plain = judge(isolated(row, "ncclsync", options, with_options=False), reference, case.tolerance)
    return "" if plain.kind == "equal" else f"is about {', '.join(case.options)}"


def compare_all(rows, options):
    """Compare the rows, some at a time; tell the progress; return their outcomes as dictionaries."""
    found, slots = [], options.workers or os.cpu_count()
    with concurrent.futures.ThreadPoolExecutor(slots) as pool:
        pending = {pool.submit(compare, row, options): row for row in rows}
        for done in concurrent.futures.as_completed(pending):
            row = pending[done]
            outcomes = {column: as_dict(outcome) for column, outcome in done.result().items()}
            found.append({"subject": row.subject, "row": row.title, **outcomes})
            kinds = " | ".join(outcome["outcome"] for outcome in outcomes.values())
            print(f"{len(found)}/{len(rows)} {row.subject} {row.title}: {kinds}", file=sys.stderr, flush=True)
    places = {(row.subject, row.title): place for place, row in enumerate(rows)}
    return sorted(found, key=lambda one: places[one["subject"], one["row"]])


def as_dict(outcome):
    """What the JSON tells of an outcome."""
    return {"outcome": outcome.kind, "detail": outcome.detail, "difference": outcome.difference}


def count(results, column, subject=None):
    """Return how many rows, of one subject or of all, had which outcome."""
    of_subject = [one for one in results if subject in (None, one["subject"])]
    return collections.Counter(one[column]["outcome"] for one in of_subject)


def show(results, details):
    """Print the table of subjects, and with `details` every row that is not equal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption="equal / wrong numbers / exception (or no end)")
    table.add_column("subject")
    table.add_column("rows", justify="right")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("not applicable", justify="right")
    subjects = list(dict.fromkeys(one["subject"] for one in results))
    for subject in [*subjects, None]:
        counts = [count(results, column, subject) for column in COLUMNS]
        cells = [" / ".join(str(counted[kind]) for kind in KINDS[:3]) for counted in counts]
        numbers = [str(sum(counts[0].values())), *cells, str(counts[1]["not applicable"])]
        table.add_row(subject or "all", *numbers, style="bold" if subject is None else None)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for one in results if details else ():
        console.print(f"{one['subject']} {one['row']}", style="bold", markup=False, highlight=False)
        for column in COLUMNS:
            outcome = one[column]
            gap = "" if outcome["difference"] is None else f", largest difference {outcome['difference']:.1e}"
            detail = f": {outcome['detail']}" if outcome["detail"] else ""
            console.print(f"    {column}: {outcome['outcome']}{gap}{detail}", markup=False, highlight=False)


def plot(results, file):
    """Draw, for every subject, the shares of the outcomes as a bar; a column of bars for each library."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink = "#7d8590"  # is read on white and on black
    plt.rcParams.update({"font.size": 9, "text.color": ink, "ytick.color": ink, "svg.hashsalt": "ncclsync"})
    subjects = list(dict.fromkeys(one["subject"] for one in results))
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(9, 0.8 + 0.27 * len(subjects)))
    for axis, column in zip(axes, COLUMNS, strict=True):
        counts = [count(results, column, subject) for subject in subjects]
        draw_bars(axis, counts)
        axis.set_title(column.replace(", ", ",\n"), loc="left", fontsize=10, fontweight="bold")
    axes[0].set_yticks(range(len(subjects)), subjects)
    axes[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in COLOURS]
    labels = ["equal to one device", "wrong numbers", "exception or no end", "not applicable"]
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, handlelength=1, handleheight=1)
    figure.tight_layout(rect=(0, 0.28 / figure.get_figheight(), 1, 1), w_pad=1.5)
    dateless = {"metadata": {"Date": None}} if file.suffix == ".svg" else {"dpi": 150}
    figure.savefig(file, transparent=True, **dateless)


def draw_bars(axis, counts):
    """Draw a stacked bar of full length for each `Counter`, the numbers in it."""
    for place, counted in enumerate(counts):
        total, left = sum(counted[kind] for kind in COLOURS), 0.0
        for kind, colour in COLOURS.items():
            width = counted[kind] / max(total, 1)
            axis.barh(place, width, 0.72, left, color=colour)
            if width > 0.06:
                ink = {"wrong": "#241a00", "not applicable": None}.get(kind, "white")
                axis.text(
                    left + width / 2, place, counted[kind], ha="center", va="center_baseline", fontsize=8, color=ink
                )
            left += width
    axis.set(xlim=(0, 1), xticks=[])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def main():
    """Compare, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    listed = functools.partial(str.split, sep=",")
    parser.add_argument("--only", type=listed, help="subjects, such as losses,optimizers")
    parser.add_argument(
        "--rows", type=listed, help="patterns of names, such as 'clip*,ema'; default: every third of a large table"
    )
    parser.add_argument("--all", action="store_true", help="all rows, of the large tables too")
    parser.add_argument("--towers", type=int, default=2, help="and replicas; default: %(default)s")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a run; default: %(default)s")
    parser.add_argument("--workers", type=int, help="rows at a time; default: one per core")
    parser.add_argument("--details", action="store_true", help="list every row")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all outcomes")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw them, such as examples/parity.svg")
    options = parser.parse_args()

    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", TF_NUM_INTRAOP_THREADS="1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()  # imports TensorFlow while this process does
    rows = find_rows(options.only, options.rows, options.all)
    if not rows:
        raise SystemExit(f"Expected --rows to match a row. Received: {options.rows!r}")
    began = time.perf_counter()
    results = compare_all(rows, options)
    seconds = time.perf_counter() - began

    versions = {name: importlib.metadata.version(name) for name in ("ncclsync", "tensorflow", "keras")}
    about = {**versions, "python": platform.python_version(), "towers": options.towers}
    about |= {"date": datetime.date.today().isoformat(), "seconds": round(seconds)}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    show(results, options.details)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rows": results}, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
