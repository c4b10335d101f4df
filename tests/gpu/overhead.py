"""What ncclsync adds to an all-reduce: beside the same calls made straight from C (overhead.c).

Of ncclsync there are two ways: a collective of Python, which is waited for, and, from C, the launcher, by which a group
is only enqueued between a stream's work and what it is given later. All put all ranks on GPU 0 and are timed in turn,
some repetitions at a time, so that what disturbs the machine disturbs all. Compared are medians of whole groups: from
the call to its end on all ranks.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import isolated
import numpy as np
from device_memory import is_standin, open_memory

from ncclsync.communicator import NcclCommunicator, native

ROOT = pathlib.Path(__file__).parent.parent.parent
SIZES = (2**10, 2**20, 25 * 2**20, 256 * 2**20)
ROUNDS = 7
LIMIT = 1.05  # of the launcher's median by that of plain C


def repetitions(size_bytes: int) -> int:
    """Return how many all-reduces make a round: fewer of large ones."""
    return max(5, min(200, 2**26 // size_bytes))


class InC:
    """The program in C: built, and running for as long as this is open."""

    def __init__(self, folder: pathlib.Path, ranks: int, way: str) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        if compiler is None:
            raise FileNotFoundError("Expected a C compiler. Received: neither CC nor cc nor gcc")
        program = folder / f"overhead-{way}"
        csrc = ROOT / "csrc"
        sources = [pathlib.Path(__file__).with_suffix(".c"), *sorted(csrc.glob("nccl/*.c")), csrc / "ncclsync.c"]
        flags = ["-O2", "-std=c99", "-Wall", "-Wextra", "-fno-strict-aliasing", f"-I{csrc}"]
        subprocess.run([compiler, *flags, *sources, "-o", program, "-ldl", "-lpthread"], check=True)
        runtimes, driver = native.cuda_paths()
        # NCCL's own words would go to where the times are expected.
        variables = {k: v for k, v in os.environ.items() if k != "NCCL_DEBUG"}
        self._process = subprocess.Popen(
            [program, native.NcclLibrary().path, _first_that_loads(runtimes), driver, str(ranks), way],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def times_us(self, size_bytes: int, warmups: int, count: int) -> list[float]:
        """Return how long each of some all-reduces took."""
        self._process.stdin.write(f"{size_bytes} {warmups} {count}\n")
        self._process.stdin.flush()
        times = [float(word) for word in self._process.stdout.readline().split()]
        if len(times) != count:
            raise RuntimeError(f"Expected {count} times of overhead.c. Received: {len(times)}; see its error")
        return times

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()


def _first_that_loads(paths: list[str]) -> str:
    import ctypes

    for path in paths:
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return path
    raise OSError(native.missing_runtime(paths))


def times_us(comm: NcclCommunicator, size_bytes: int, warmups: int, count: int) -> list[float]:
    """Return how long each of some all-reduces by ncclsync took; their result is checked."""
    elements = size_bytes // 4
    times = []
    with open_memory() as memory:
        sends = [memory.put(np.full(elements, rank + 1, np.float32)) for rank in range(comm.size)]
        recvs = [memory.put(np.zeros(elements, np.float32)) for _ in range(comm.size)]
        pointers = [[(placed.pointer, elements, "float32") for placed in side] for side in (sends, recvs)]
        for i in range(warmups + count):
            began = time.perf_counter()
            comm.all_reduce(*pointers)
            if i >= warmups:
                times.append(1e6 * (time.perf_counter() - began))
        for recv in recvs:
            np.testing.assert_array_equal(recv.get(), comm.size * (comm.size + 1) / 2)
    return times


def compare(ranks: int, sizes: list[int], rounds: int) -> dict:
    """Time all, in turn, and return what is to be told: see the keys."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        InC(pathlib.Path(folder), ranks, "plain") as plain,
        InC(pathlib.Path(folder), ranks, "launcher") as launcher,
        NcclCommunicator([0] * ranks, timeout_s=60.0) as comm,
    ):
        for size_bytes in sizes:
            print(f"{size_bytes} bytes ...", file=sys.stderr, flush=True)  # if it hangs: where
            count = repetitions(size_bytes)
            times: dict[str, list[float]] = {"ncclsync": [], "launcher": [], "c": []}
            for i in range(rounds):
                warmups = 5 if i == 0 else 2
                times["ncclsync"] += times_us(comm, size_bytes, warmups, count)
                times["launcher"] += launcher.times_us(size_bytes, warmups, count)
                times["c"] += plain.times_us(size_bytes, warmups, count)
            rows.append(_row(size_bytes, times, ranks))
    return {
        "ranks": ranks,
        "gpu": _gpu(),
        "nccl": ".".join(map(str, native.nccl_version())),
        "nccl_variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")},
        "rounds": rounds,
        "launcher_limit": LIMIT,
        "rows": rows,
    }


def _row(size_bytes: int, times_us: dict[str, list[float]], ranks: int) -> dict:
    row = {"bytes": size_bytes, "n": len(times_us["c"])}
    for name, times in times_us.items():
        median = statistics.median(times)
        tenths = statistics.quantiles(times, n=10)
        row[name] = {
            "median_us": median,
            "tenth_us": tenths[0],
            "ninetieth_us": tenths[-1],
            "algbw_gb_per_s": size_bytes / median / 1e3,
            "busbw_gb_per_s": size_bytes / median / 1e3 * 2 * (ranks - 1) / ranks,
        }
    row["overhead_us"] = row["ncclsync"]["median_us"] - row["c"]["median_us"]
    row["ratio"] = row["ncclsync"]["median_us"] / row["c"]["median_us"]
    row["launcher_overhead_us"] = row["launcher"]["median_us"] - row["c"]["median_us"]
    row["launcher_ratio"] = row["launcher"]["median_us"] / row["c"]["median_us"]
    return row


def _gpu() -> str:
    """Return what nvidia-smi calls the GPU, and its driver."""
    if is_standin():
        return "none, but the stand-in: these are no GPU's figures"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: no nvidia-smi"
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


HEADER = """\
|    size | ncclsync µs | launcher µs |        C µs | ncclsync / C | launcher / C | launcher busbw GB/s | C busbw GB/s |
|--------:|------------:|------------:|------------:|-------------:|-------------:|--------------------:|-------------:|"""


def _size(row: dict) -> str:
    size = row["bytes"]
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def _line(row: dict) -> str:
    ours, launcher, plain = row["ncclsync"], row["launcher"], row["c"]
    return (
        f"| {_size(row):>7} | {ours['median_us']:11.1f} | {launcher['median_us']:11.1f} | {plain['median_us']:11.1f} "
        f"| {row['ratio']:12.2f} | {row['launcher_ratio']:12.2f} "
        f"| {launcher['busbw_gb_per_s']:19.2f} | {plain['busbw_gb_per_s']:12.2f} |"
    )


def table(told: dict) -> str:
    """Return the comparison as text."""
    title = f"{told['ranks']} ranks on one GPU ({told['gpu']}), NCCL {told['nccl']}, medians of all-reduces"
    above = [_size(row) for row in told["rows"] if row["launcher_ratio"] > told["launcher_limit"]]
    where = f"at {', '.join(above)}" if above else "nowhere"
    verdict = f"The launcher takes more than {told['launcher_limit']} times as long as C: {where}"
    return "\n".join([title, "", HEADER, *(_line(row) for row in told["rows"]), "", verdict])


def main() -> None:
    """Compare, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="in bytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which it is given up")
    arguments = parser.parse_args()
    isolated.limit(arguments.limit)
    for name, value in isolated.SHARED_GPU.items():
        os.environ.setdefault(name, value)
    told = compare(arguments.ranks, arguments.sizes, arguments.rounds)
    print(table(told))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
