"""Run `bench all-reduce`: ncclsync, a copy of the same bytes and other libraries, in turns, checked.

Columns are those of nccl-tests: algbw = size / time, busbw = algbw · 2(n−1)/n, which does not depend on the
number of ranks n where the bus is the limit.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

Each reducer runs the libraries of one process. Input and result are known in closed form and exact in every dtype, so
that results are checked by element. TensorFlow is imported by the class that uses it.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import glob
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ncclsync.communicator import Communicator, CpuCommunicator, NcclCommunicator, TcpCommunicator, empty_aligned
from ncclsync.communicator.processes import Process, find_process
from ncclsync.errors import NcclSyncError
from ncclsync.tools.bench.results import Result, Row, size_text
from ncclsync.tools.bench.turns import (
    BenchError,
    Ranks,
    Side,
    Spread,
    about,
    filling,
    launched,
    missing_mpi,
    ratio,
    take_turns,
)
from ncclsync.tools.processes import join

PEERS = ("mpi",)
NUMBERS_OF_TOWERS = (2, 4, 8)
_TURN_S = 0.05  # of one side: small collectives run by the hundred
_MOST_ITERATIONS = 2000
_FEW_BYTES = 4 * 1024 * 1024  # below, handing a copy to threads costs more than it saves


def bench_all_reduce(given: argparse.Namespace, show: Callable[[str], None]) -> Result | None:
    """Time every number of towers and every size; under a launcher, between its processes, with one tower each.

    A peer that cannot be run only leaves a note. Returns None in all processes of a launcher but the first.
    """
    process = find_process()
    if process is not None:
        return _between_processes(given, show, process)
    given.backend = given.backend or ("nccl" if glob.glob("/dev/nvidia[0-9]*") else "cpu")
    rows, notes = [], dict.fromkeys(missing(given))
    for towers in given.towers or NUMBERS_OF_TOWERS:
        with contextlib.ExitStack() as stack:
            sides = []
            for start in _starts(given, towers):
                side = stack.enter_context(start())
                show(f"{towers} towers: starting {side.name}")
                try:
                    for library in side.ask("prepare", count=1, dtype=given.dtype)["libraries"]:
                        side.ask("run", library=library, iterations=1)
                    sides.append(side)
                except BenchError as error:
                    if side.name == "ncclsync":
                        raise
                    notes[f"Left out with {towers} towers: {error}"] = None
            for size in given.sizes:
                rows += _time_case(given, towers, size, sides, show)
    return Result("all-reduce", "s", tuple(rows), tuple(notes))


def _between_processes(given: argparse.Namespace, show: Callable[[str], None], process: Process) -> Result | None:
    if given.towers or given.backend == "nccl":
        raise BenchError(
            f"Expected neither --towers nor --backend nccl by {process.launcher}: each of the {process.size} processes "
            f"has one tower, in host memory. Received: --towers {given.towers}, --backend {given.backend}"
        )
    with_mpi = "mpi" in given.against and not missing_mpi() and process.launcher == "Open MPI"
    with ProcessSide(process, with_mpi=with_mpi) as side:
        if process.rank > 0:
            side.follow()
            return None
        rows: list[Row] = []
        for size in given.sizes:
            rows += _time_case(given, process.size, size, [side], show)
    return Result("all-reduce", "s", tuple(rows), (f"{side.description}: one tower of each.", *missing(given)))


class ProcessSide:
    """Have all processes do the same work: process 0 asks as by `turns.Side`, the others `follow`. A context manager.

    Attributes:
        name: for messages.
        description: of the processes, in words.
    """

    name = "ncclsync"

    def __init__(self, process: Process, *, with_mpi: bool) -> None:
        """Join the other processes; `with_mpi`: MPI's all-reduce runs, too. Collective.

        Raises:
            BenchError: they cannot be joined.
        """
        try:
            self._peers = join()
            self._reducer, self._ranks = RankReducer(process.size, with_mpi), Ranks()
        except NcclSyncError as error:
            raise BenchError(str(error)) from error
        hosts = len(set(self._peers.hosts))
        self.description = f"{process.size} processes on {hosts} host{'s' * (hosts != 1)}, {process.launcher}"

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Let all processes work, in process 0; see `Side.ask` and `Ranks.join`."""
        return self._ranks.join(self._reducer.serve(self._ranks.share({"do": do, **details})))

    def follow(self) -> None:
        """Serve process 0's requests until it ends."""
        while (request := self._ranks.share(None))["do"] != "end":
            self._ranks.join(self._reducer.serve(request))

    def __enter__(self) -> "ProcessSide":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the others end."""
        if self._peers.rank == 0:
            self._ranks.share({"do": "end"})


def missing(given: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each peer that was asked for and is not here."""
    for peer in given.against:
        if given.backend == "nccl":
            yield f"{peer} is left out: it works on host memory, and ncclsync on that of GPUs."
        elif peer == "mpi" and missing_mpi():
            yield f"mpi is left out: {missing_mpi()}."


def _starts(given: argparse.Namespace, towers: int) -> Iterator[Callable[[], Side]]:
    """Yield functions that start the processes, ncclsync's own first."""
    arguments = {"towers": towers}
    if given.backend == "nccl":
        yield functools.partial(Side, "ncclsync", "all_reduce.NcclReducer", arguments)
        return
    yield functools.partial(Side, "ncclsync", "all_reduce.HostReducer", arguments)
    if "mpi" in given.against and not missing_mpi():
        yield functools.partial(Side, "mpi", "all_reduce.MpiReducer", arguments, *launched(towers))


def _time_case(
    given: argparse.Namespace, towers: int, size: int, sides: Sequence[Side | ProcessSide], show: Callable[[str], None]
) -> list[Row]:
    show = about(f"{towers} towers, {size_text(size)}", show)
    item_bytes = np.dtype(given.dtype).itemsize
    count = max(1, size // item_bytes)
    timers: dict[str, Callable[[], float]] = {}
    owners: dict[str, Side | ProcessSide] = {}
    for side in sides:
        for library in side.ask("prepare", count=count, dtype=given.dtype)["libraries"]:
            if library in PEERS and library not in given.against:
                continue
            show(f"warming up {library}")
            owners[library] = side
            timers[library] = _timer(side, library)
    seconds = take_turns(timers, given.rounds, show)
    wrong = {library: side.ask("wrong", library=library)["wrong"] for library, side in owners.items()}
    for side in sides:
        side.ask("prepare", count=1, dtype=given.dtype)  # frees the memory for the next process
    actual = count * item_bytes
    case = {"towers": towers, "size_bytes": actual, "count": count, "dtype": given.dtype}
    rows = []
    for library, samples in seconds.items():
        spread = Spread.of(samples)
        beside: list[str] = [other for other in ("memcpy", "mpi", "ncclsync") if other in seconds and other != library]
        ratios = {other: ratio(samples, seconds[other]) for other in beside}
        figures: dict[str, float] = {"wrong": wrong[library]}
        if library != "memcpy":  # a copy reduces nothing
            algbw = actual / spread.median / 1e9
            figures |= {"algbw_gb_s": algbw, "busbw_gb_s": algbw * 2 * (towers - 1) / towers}
        rows.append(Row(case, library, spread, ratios, figures))
    return rows


def _timer(side: Side | ProcessSide, library: str) -> Callable[[], float]:
    """Return a timer of a collective, by as many as fill a turn; two come first, to warm up and to be timed."""

    def seconds(iterations: int) -> float:
        return side.ask("run", library=library, iterations=iterations)["seconds"] / iterations

    seconds(1)
    return functools.partial(seconds, filling(_TURN_S, seconds(1), _MOST_ITERATIONS))


def pattern(rank: int, count: int, dtype: str) -> np.ndarray:
    """Return a rank's input, [count]: whole numbers below 16, so that sums of many ranks are exact."""
    return ((np.arange(count) * (rank + 1) + rank) % 16).astype(dtype)


def count_wrong(results: Sequence[np.ndarray], ranks: int) -> int:
    """Return how many elements of the results, an array of [count] for each rank, differ from the patterns' sum."""
    count, dtype = results[0].size, results[0].dtype.name
    expected = sum((pattern(rank, count, dtype) for rank in range(1, ranks)), pattern(0, count, dtype))
    return sum(int(np.count_nonzero(result.reshape(-1) != expected)) for result in results)


class HostReducer:
    """Reduce `towers` ranks' inputs in host memory, a buffer for each rank of this process, and copy the same bytes.

    Attributes:
        libraries: by name, a function that reduces once, or copies; `prepare` comes first.
    """

    def __init__(
        self,
        towers: int,
        communicator: Communicator | None = None,
        ranks: Sequence[int] | None = None,
        cores: int | None = None,
    ) -> None:
        """Prepare for the buffers of these ranks of `towers` in all processes; a copy uses so many cores.

        By default there is one process, which has all ranks and all cores, and a new `CpuCommunicator`.
        """
        self.towers = towers
        reduce = (communicator or CpuCommunicator(towers)).all_reduce
        self.libraries: dict[str, Callable[[], Any]] = {
            "ncclsync": lambda: reduce(self.sends, self.recvs),
            "memcpy": self._copy,
        }
        self._ranks, self._cores = ranks or range(towers), cores or len(os.sched_getaffinity(0))
        self._threads = concurrent.futures.ThreadPoolExecutor(self._cores)
        self.sends: list[Any] = []
        self.recvs: list[Any] = []

    def make(self, rank: int, array: np.ndarray) -> Any:
        """Return a buffer of a rank with the array's elements."""
        made = empty_aligned(array.size, array.dtype.name)
        made[:] = array
        return made

    def prepare(self, count: int, dtype: str) -> None:
        """Make the input, `count` elements per rank; free earlier buffers."""
        self.sends, self.recvs = [], []
        for rank in self._ranks:
            self.sends.append(self.make(rank, pattern(rank, count, dtype)))
            self.recvs.append(self.make(rank, pattern(rank, count, dtype)))

    def run(self, library: str, iterations: int) -> float:
        """All-reduce so many times; return the seconds that took."""
        began = time.perf_counter()
        for _ in range(iterations):
            self.libraries[library]()
        return time.perf_counter() - began

    def wrong(self, library: str) -> int:
        """All-reduce the pattern once; return how many elements of this process' results are wrong.

        Of a copy, those that differ from their source.
        """
        for i, rank in enumerate(self._ranks):
            self.recvs[i] = self.make(rank, np.full_like(np.asarray(self.sends[i]), 99))
        self.run(library, 1)
        results = [np.asarray(recv) for recv in self.recvs]
        if library == "memcpy":
            return sum(int(np.count_nonzero(result != send)) for result, send in zip(results, self.sends, strict=True))
        return count_wrong(results, self.towers)

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve a request of the driver; return the answer."""
        if request["do"] == "prepare":
            self.prepare(request["count"], request["dtype"])
            return {"libraries": [*self.libraries]}
        if request["do"] == "run":
            return {"seconds": self.run(request["library"], request["iterations"])}
        return {"wrong": self.wrong(request["library"])}

    def _copy(self) -> None:
        """Copy all ranks' bytes: an all-reduce reads and writes as many."""
        if self._cores == 1 or self.sends[0].nbytes * len(self.sends) < _FEW_BYTES:
            for send, recv in zip(self.sends, self.recvs, strict=True):
                np.copyto(recv, send)
            return
        to, source = (
            [part for buffer in buffers for part in np.array_split(buffer, self._cores)]
            for buffers in (self.recvs, self.sends)
        )
        list(self._threads.map(np.copyto, to, source))


class NcclReducer(HostReducer):
    """Reduce in the memory of N GPUs, by NCCL. TensorFlow, always installed, allocates the buffers."""

    def __init__(self, towers: int) -> None:
        """Join the first N GPUs.

        Raises:
            BenchError: TensorFlow sees fewer.
            NcclUnavailableError: NCCL cannot be used.
        """
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) < towers:
            raise BenchError(f"Expected {towers} GPUs that TensorFlow sees. Received: {len(gpus)}")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        super().__init__(towers, NcclCommunicator(list(range(towers))), cores=1)
        del self.libraries["memcpy"]

    def make(self, rank: int, array: np.ndarray) -> Any:
        """See `HostReducer.make`."""
        import tensorflow as tf

        with tf.device(f"/GPU:{rank}"):
            return tf.identity(tf.constant(array))


class RankReducer(HostReducer):
    """Run a rank of several processes: ncclsync's all-reduce, a copy and, under mpirun, MPI's own all-reduce."""

    def __init__(self, towers: int, with_mpi: bool) -> None:
        """Join the others. Collective."""
        peers = join()
        self._communicator = TcpCommunicator(peers, 1)
        super().__init__(towers, self._communicator, [peers.rank], 1)
        if with_mpi:
            from mpi4py import MPI

            self.libraries["mpi"] = lambda: MPI.COMM_WORLD.Allreduce(self.sends[0], self.recvs[0])

    def run(self, library: str, iterations: int) -> float:
        """See `HostReducer.run`; all begin together."""
        one = np.zeros(1, np.float32)
        self._communicator.all_reduce([one], [one])
        return super().run(library, iterations)


class MpiReducer(RankReducer):
    """Run MPI's all-reduce alone."""

    def __init__(self, towers: int) -> None:
        """Join the others. Collective."""
        super().__init__(towers, with_mpi=True)
        self.libraries = {"mpi": self.libraries["mpi"]}
