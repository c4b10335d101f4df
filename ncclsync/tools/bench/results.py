"""Show a benchmark's result as data, as a table and as JSON. This module does not measure."""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ncclsync.tools.bench.turns import Spread
from ncclsync.tools.doctor.libraries import installed

SCHEMA = "ncclsync.tools.bench/1"  # a removed or changed key increases it, an added key does not

_PACKAGES = ("ncclsync", "tensorflow", "keras", "numpy", "mpi4py")


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold the figures of one side in one case."""

    # The varied parameters, such as `{"towers": 4, "size_bytes": 4096}`; equal for all sides that are compared
    case: dict[str, Any]
    # "ncclsync", or a library that it is compared with; in `bench feed` the kind of data, after the name of another
    # library
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


@dataclasses.dataclass(frozen=True)
class Column:
    """Describe a column: a heading of one or two lines, and the text of a row, which may be ""."""

    head: str
    text: Callable[[Row], str]
    justify: Literal["left", "right"] = "right"


Tables = Sequence[Sequence[Column]]


def machine() -> dict[str, Any]:
    """Return the conditions of the figures: processor, cores, memory, kernel, versions, load."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: version for package in _PACKAGES if (version := installed(package))},
        "load_1_min": os.getloadavg()[0],  # of all processes
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(named, platform.machine())
    except OSError:
        return platform.machine()


def as_json(result: Result, command: Sequence[str]) -> dict[str, Any]:
    """Return a result as JSON. `schema` names the meaning of the keys; a later version may add keys.

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
        step        samples_per_s; cpu_s, a spread: the work of the host's cores; of ncclsync compute_s,
                    communicate_s, apply_s and feed_s, spreads
        start       build_seconds, a spread
        feed        samples_per_s; of_ceiling, a spread: the constant batch's time over this one's
        memory      imported_bytes, state_bytes and, if one tower was measured too, of_needed, spreads; of shards
                    of_rows, a spread: the peak less that of one row for each tower, over the same without shards
        plan        fields of `plan.prediction.Prediction`; of side "1" fixed_s and per_sample_s, the
                    measured spreads by batch size, the cluster and the stages of the step

    Args:
        result: of a benchmark.
        command: the arguments after `python -m ncclsync`.
    """
    return {
        "schema": SCHEMA,
        "benchmark": result.benchmark,
        "command": ["python", "-m", "ncclsync", *command],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "unit": result.unit,
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "notes": list(result.notes),
    }


def write_json(result: Result, command: Sequence[str], file: pathlib.Path) -> None:
    """Write a result to a file; see `as_json`."""
    file.write_text(json.dumps(as_json(result, command), indent=1) + "\n", encoding="utf-8")


def show(result: Result, tables: Tables) -> None:
    """Print the tables that have a row, an empty line between cases, then the notes.

    The first table has all rows; further ones have those for which their last column is not empty.
    """
    import rich.box
    from rich.console import Console
    from rich.table import Table

    # Lines are folded for a terminal only.
    console = Console(width=None if sys.stdout.isatty() else 200)
    for columns in tables:
        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column.head, justify=column.justify, no_wrap=True)
        before: Any = None
        for row in result.rows:
            texts = [column.text(row) for column in columns]
            if columns is not tables[0] and not texts[-1]:
                continue
            if before not in (None, row.case):
                table.add_section()
            before = row.case
            table.add_row(*texts)
        if table.row_count:
            console.print(table, markup=False, highlight=False)
    for note in result.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def more(name: str, text: Callable[[Any], str] = str) -> Callable[[Row], str]:
    """Return the text of a column: one of the further figures; "" if a row has none."""
    return lambda row: text(row.more[name]) if name in row.more else ""


def ratio_to(other: str) -> Callable[[Row], str]:
    """Return the text of a column: the ratio to another side."""
    return lambda row: ratio_text(row.ratios[other]) if other in row.ratios else ""


def median_text(seconds: float) -> str:
    """Return a time, such as "2.31 ms"."""
    scale, unit = _scale(seconds)
    return f"{significant(seconds * scale)} {unit}"


def time_text(spread: Spread) -> str:
    """Return a median time and its quartiles with one unit, such as "2.31 ms (2.28–2.40)"."""
    scale, _ = _scale(spread.median)
    return f"{median_text(spread.median)} ({significant(spread.q1 * scale)}–{significant(spread.q3 * scale)})"


def _scale(seconds: float) -> tuple[float, str]:
    return next(((s, unit) for s, unit in ((1.0, "s"), (1e3, "ms")) if abs(seconds) * s >= 1), (1e6, "µs"))


def ratio_text(spread: Spread) -> str:
    """Return a median ratio and its quartiles, such as "0.35 (0.34–0.37)"."""
    return f"{significant(spread.median)} ({significant(spread.q1)}–{significant(spread.q3)})"


def size_text(size_bytes: float) -> str:
    """Return a size in the largest binary unit that it reaches, such as "25 MiB"."""
    for unit, step in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << step:
            return f"{size_bytes / (1 << step):.4g} {unit}"
    return f"{size_bytes:.0f} B"


def significant(number: float) -> str:
    """Return three significant digits, without an exponent."""
    if number == 0 or abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.2f}" if abs(number) >= 1 else f"{number:.3g}"


# Columns of several benchmarks.
TOWERS = Column("towers", lambda row: str(row.case["towers"]))
STEP = Column("step", lambda row: time_text(row.value))


def of_model(side: str) -> list[Column]:
    """Return the columns that name a model, a number of towers and a side, which is called so."""
    return [Column("model", lambda row: row.case["model"], "left"), TOWERS, Column(side, lambda row: row.side, "left")]


PARTS = ("compute", "communicate", "apply", "feed")  # of a step
_COMPARED = ("ncclsync", "mirrored", "single", "shard", "sharded")

# By benchmark.
TABLES: dict[str, Tables] = {
    "all-reduce": [
        [
            TOWERS,
            Column("size", lambda row: size_text(row.case["size_bytes"])),
            Column("count", lambda row: str(row.case["count"])),
            Column("type", lambda row: row.case["dtype"]),
            Column("library", lambda row: row.side, "left"),
            Column("time", lambda row: time_text(row.value)),
            Column("algbw\nGB/s", more("algbw_gb_s", significant)),
            Column("busbw\nGB/s", more("busbw_gb_s", significant)),
            Column("#wrong", more("wrong")),
            *(Column(f"time ÷\n{whose}'s", ratio_to(whose.lower())) for whose in ("memcpy", "MPI", "ncclsync")),
        ]
    ],
    "exchange": [
        [
            TOWERS,
            Column("by", lambda row: row.side, "left"),
            Column("host time of an exchange,\nper tower", lambda row: time_text(row.value)),
            Column("#wrong", more("wrong")),
        ]
    ],
    "overlap": [
        [
            TOWERS,
            STEP,
            Column("without\nexchanges", more("without_s", time_text)),
            Column("exchanges\nalone", more("exchange_s", time_text)),
            Column("hidden", more("hidden", lambda share: f"{share.median:.0%}")),
            Column("step\nby plan", more("predicted_s", median_text)),
            Column("÷\nmeasured", more("predicted_ratio", ratio_text)),
        ],
        [
            Column("the call of a step\nreturns after", more("called_s", time_text)),
            Column("the step has ended\nafter", more("ended_s", time_text)),
        ],
    ],
    "step": [
        [
            *of_model("library"),
            STEP,
            Column("CPU time\nof a step", more("cpu_s", time_text)),
            Column("CPU time ÷\none device's", more("cpu_of_single", ratio_text)),
            Column("samples/s", more("samples_per_s", significant)),
            *(Column(f"time ÷\n{side}'s", ratio_to(side)) for side in _COMPARED),
        ],
        [
            *of_model("library"),
            Column("time ÷\nwithout shards=", lambda row: ratio_to("ncclsync")(row) * row.side.endswith("a tower")),
        ],
        [*of_model("library"), *(Column(part, more(f"{part}_s", time_text)) for part in PARTS)],
        [*of_model("library"), Column("watched step ÷\nstep", more("watched", ratio_text))],
    ],
    "feed": [
        [
            *of_model("feed"),
            STEP,
            Column("samples/s", more("samples_per_s", significant)),
            Column("of the\nceiling", more("of_ceiling", ratio_text)),
        ]
    ],
    "start": [
        [
            *of_model("library"),
            Column("to the end of\nthe first step", lambda row: time_text(row.value)),
            Column("of that\nthe factory", more("build_seconds", time_text)),
            Column("CPU time", more("cpu_seconds", time_text)),
            Column("time ÷\nmirrored's", ratio_to("mirrored")),
            Column("time ÷ own\nwith 1 tower", ratio_to("one tower")),
        ]
    ],
    "memory": [
        [
            *of_model("library"),
            Column("peak", lambda row: size_text(row.value.median)),
            Column("before the\nmodel", lambda row: size_text(row.more["imported_bytes"].median)),
            Column("weights and\noptimizer", lambda row: size_text(row.more["state_bytes"].median)),
            Column("peak ÷\nmirrored's", ratio_to("mirrored")),
            Column("peak ÷\nneeded", more("of_needed", ratio_text)),
        ],
        [*of_model("library"), Column("of what the rows take\nwithout shards=", more("of_rows", ratio_text))],
        [*of_model("library"), Column("beyond needed ÷\nactivations", more("beyond", ratio_text))],
    ],
}
