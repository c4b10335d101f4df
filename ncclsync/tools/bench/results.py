"""Show a benchmark's result as data, as a table and as JSON. This module does not measure."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import rich.box
from rich.table import Table

from ncclsync.tools.bench.turns import Spread, ratio
from ncclsync.tools.doctor.libraries import installed
from ncclsync.tools.factories import UsageError
from ncclsync.tools.plan.prediction import GOOD_EFFICIENCY
from ncclsync.towers import printed

SCHEMA = "ncclsync.tools.bench/1"  # a removed or changed key increases it, an added key does not

# By benchmark, the columns of its tables: names of a row's `case` and `more`, and "÷" and the other side of `ratios`.
_TABLES = {
    "all-reduce": [
        "towers, size_bytes, count, dtype, side, value_s, algbw_gb_s, busbw_gb_s, wrong, ÷ memcpy, ÷ mpi, ÷ ncclsync"
    ],
    "exchange": ["towers, side, value_s, wrong"],
    "overlap": ["towers, value_s, without_s, exchange_s, hidden, predicted_s, predicted_ratio", "called_s, ended_s"],
    "step": [
        "model, towers, side, value_s, cpu_s, cpu_of_single, samples_per_s, "
        "÷ ncclsync, ÷ mirrored, ÷ single, ÷ shard, ÷ sharded",
        "model, towers, side, compute_s, communicate_s, apply_s, feed_s",
    ],
    "start": ["model, towers, side, value_s, build_seconds, cpu_seconds, ÷ mirrored, ÷ one tower"],
    "feed": ["model, towers, side, value_s, samples_per_s, of_ceiling"],
    "memory": ["model, towers, side, value_bytes, imported_bytes, state_bytes, ÷ mirrored, of_needed, of_rows, beyond"],
    "plan": [
        "gpus, exchanged_bytes, buckets, communication_s, algorithms, crossing_bytes, overlapped, value_s, "
        "sequential_s, efficiency, sequential_efficiency, speedup, samples_per_s, good_batch, winning_batch, better"
    ],
}
# The headings of columns whose names do not say what they are; that of `value` is the benchmark's.
_HEADS = {
    "all-reduce": "time",
    "exchange": "host time of an exchange,\nper tower",
    "step": "step",
    "overlap": "step",
    "feed": "step",
    "start": "to the end of\nthe first step",
    "memory": "peak",
    "plan": "step",
    "dtype": "type",
    "algbw_gb_s": "algbw\nGB/s",
    "busbw_gb_s": "busbw\nGB/s",
    "wrong": "#wrong",
    "samples_per_s": "samples/s",
    "gpus": "GPUs",
    "communication_s": "exchange",
    "algorithms": "by",
    "crossing_bytes": "leaves\na host",
    "overlapped": "over-\nlapped",
    "sequential_s": "without\noverlap",
    "efficiency": "effi-\nciency",
    "sequential_efficiency": "without\noverlap",
    "speedup": "speed-up",
    "good_batch": f"{GOOD_EFFICIENCY:.0%} from\nbatch/GPU",
    "winning_batch": "beats one GPU\nfrom batch",
}
# How to show figures whose names do not tell.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "algorithms": " ".join,
    "crossing_bytes": lambda size: size_text(size) if size else "nothing",
    **dict.fromkeys(("overlapped", "efficiency", "sequential_efficiency"), "{:.0%}".format),
    "samples_per_s": lambda rate: significant(float(f"{rate:.3g}")),
    **dict.fromkeys(("good_batch", "winning_batch"), lambda batch: "never" if batch is None else str(batch)),
}
_LEFT = ("model", "side", "algorithms", "better")  # columns that are justified left
_UNIT = re.compile("(?<!_gb)(?<!_per)_(s|seconds|bytes)$")  # ends a name, and is left out of its heading


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold the figures of one side in one case."""

    # The varied parameters, such as `{"towers": 4, "size_bytes": 4096}`; equal for all compared sides
    case: dict[str, Any]
    # "ncclsync", another way to run it, such as "watched", or another library; in `bench feed` the kind of data, after
    # the name of another library; in `plan` the number of GPUs
    side: str
    value: Spread  # seconds, or bytes in `bench memory`
    # `value` over another side's, by its name, in pairs of the same round; above 1: this side needs more
    ratios: dict[str, Spread] = dataclasses.field(default_factory=dict)
    # Further figures, by a name that ends in the unit, if there is one
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """Hold a benchmark's result."""

    benchmark: str  # its name on the command line
    unit: str  # of the rows' values, "s" or "B"
    rows: tuple[Row, ...]  # in the order of the table
    notes: tuple[str, ...] = ()  # parts that were left out, with the reason; and the sides that XLA compiles


def compare(
    case: dict[str, Any], samples: Mapping[str, Iterable[float]], more: Mapping[str, dict[str, Any]]
) -> list[Row]:
    """Return a row of each side of a case, with its ratios to all other sides; `samples` are [rounds] of each."""

    def ratios(side: str) -> dict[str, Spread]:
        return {other: ratio(samples[side], base) for other, base in samples.items() if other != side}

    return [Row(case, side, Spread.of(samples[side]), ratios(side), more[side]) for side in samples]


def machine() -> dict[str, Any]:
    """Return the conditions of the figures: processor, cores, memory, kernel, versions, load."""
    processor = platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    packages = ("ncclsync", "tensorflow", "keras", "numpy", "mpi4py")
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: version for package in packages if (version := installed(package))},
        "load_1_min": os.getloadavg()[0],  # of all processes
    }


def check_json(file: pathlib.Path | None) -> None:
    """Raise UsageError if a result cannot be written to a file; an older file stays as it is."""
    if file is None:
        return
    is_new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"Expected a file that can be written for --json. Received: {file} ({error})") from error
    if is_new:
        file.unlink()


def write_json(result: Result, file: pathlib.Path) -> None:
    """Write a result to a file as JSON. `schema` names the meaning of the keys; a later version may add keys.

    `benchmark`, `command` (words), `date` (UTC), `machine` (see `machine`), `unit` ("s" or "B": of each row's
    `value`), `notes` and `rows`, the fields of `Row`. A spread is an object with
    `median`, `q1`, `q3` and `samples`. A row's `more` holds

        all-reduce  wrong (elements); except for memcpy algbw_gb_s and busbw_gb_s (10⁹ bytes per second); between
                    processes, each process has one of the case's towers
        exchange    wrong (elements)
        overlap     without_s, exchange_s, hidden (a share), called_s and ended_s, spreads: a step without its
                    exchanges, these alone, their hidden share, and when the call of a step has returned and
                    the step ended; bucket_bytes, a list; predicted_s by plan and, over the measured step,
                    predicted_ratio, a spread
        step        samples_per_s; cpu_s, a spread: the work of the host's cores; cpu_of_single, a spread, over plain
                    Keras'; of ncclsync compute_s, communicate_s, apply_s and feed_s, spreads
        start       build_seconds and cpu_seconds, spreads
        feed        samples_per_s; of_ceiling, a spread: the constant batch's time over this one's
        memory      imported_bytes, state_bytes and, if one tower was measured too, of_needed and beyond (the rest, over
                    one tower's activations), spreads; of shards of_rows, a spread: the peak less that of one row for
                    each tower, over the same without shards
        plan        fields of `plan.prediction.Prediction`, and which is better; of side "1" fixed_s and per_sample_s,
                    the measured spreads by batch size, the cluster and the stages of the step

    `command` has the arguments after `python -m ncclsync`.
    """
    about = {"schema": SCHEMA, "command": ["python", "-m", "ncclsync", *sys.argv[1:]], "machine": machine()}
    about["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    file.write_text(json.dumps({**about, **dataclasses.asdict(result)}, indent=1) + "\n", encoding="utf-8")


def show(result: Result, file: pathlib.Path | None) -> None:
    """Print the tables, an empty line between cases, then the notes; write the result to a file, if one is named.

    Columns without any text are left out, and so are rows of a further table with nothing beyond the tables before.
    """
    known: set[str] = set()
    for names in (names.split(", ") for names in _TABLES[result.benchmark]):
        rows = [row for row in result.rows if any(_figure_text(name, row) for name in names if name not in known)]
        known.update(names)
        filled = [name for name in names if any(_figure_text(name, row) for row in rows)]
        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for name in filled:
            own = _HEADS.get(result.benchmark if name.startswith("value_") else name)
            head = own or _UNIT.sub("", name).replace("_", " ")
            table.add_column(head, justify="left" if name in _LEFT else "right", no_wrap=True)
        for row, before in zip(rows, [*rows[:1], *rows], strict=False):
            if row.case != before.case:
                table.add_section()
            table.add_row(*(_figure_text(name, row) for name in filled))
        if rows:
            printed.show(table)
    for note in result.notes:
        print(note)
    if file is not None:
        write_json(result, file)


def _figure_text(name: str, row: Row) -> str:
    """Return the text of a row's figure, by its name, which ends in its unit; "" if the row has none."""
    ratios = {f"÷ {other}": spread for other, spread in row.ratios.items()}
    values = {"side": row.side, "value_s": row.value, "value_bytes": row.value}
    figures, unit = {**row.case, **row.more, **ratios, **values}, _UNIT.search(name)
    if name not in figures:
        return ""
    figure = figures[name]
    if name in _TEXTS:
        return _TEXTS[name](figure)
    if unit is None:
        return spread_text(figure) if isinstance(figure, Spread) else significant(figure)
    if unit[1] == "bytes":
        return size_text(figure.median if isinstance(figure, Spread) else figure)
    return time_text(figure)


def time_text(seconds: float | Spread) -> str:
    """Return a time, such as "2.31 ms"; of a spread as `spread_text` does."""
    spread = seconds if isinstance(seconds, Spread) else Spread.of([seconds])
    units = ((1.0, " s"), (1e3, " ms"))
    return spread_text(spread, *next((one for one in units if abs(spread.median) * one[0] >= 1), (1e6, " µs")))


def spread_text(spread: Spread, scale: float = 1.0, unit: str = "") -> str:
    """Return a median and, of several samples, its quartiles, such as "2.31 ms (2.28–2.40)"."""
    median, q1, q3 = (significant(scale * one) for one in (spread.median, spread.q1, spread.q3))
    return f"{median}{unit}" + (f" ({q1}–{q3})" if spread.samples > 1 else "")


def size_text(size_bytes: float) -> str:
    """Return a size in the largest binary unit that it reaches, such as "25 MiB"."""
    for unit, step in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << step:
            return f"{size_bytes / (1 << step):.4g} {unit}"
    return f"{size_bytes:.0f} B"


def significant(figure: Any) -> str:
    """Return a float in three significant digits, without an exponent, and anything else as it is."""
    if not isinstance(figure, float):
        return str(figure)
    if figure == 0 or abs(figure) >= 100:
        return f"{figure:.0f}"
    return f"{figure:.2f}" if abs(figure) >= 1 else f"{figure:.3g}"
