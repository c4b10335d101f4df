"""Run `bench all-reduce`: ncclsync, a copy of the same bytes and MPI, in turns, checked.

Columns are those of nccl-tests: algbw = size / time, busbw = algbw · 2(n−1)/n, which does not depend on the
number of ranks n if the bus is the limit.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

A reducer runs the libraries of its process. Input and result have a closed form and are exact, so that every element is
checked. TensorFlow is imported by the class that uses it.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import glob
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ncclsync.communicator import Communicator, CpuCommunicator, NcclCommunicator, TcpCommunicator, empty_aligned
from ncclsync.communicator.processes import Process, find_process
from ncclsync.compat.host_gpus import VISIBLE
from ncclsync.tools.bench.results import Result, Row, compare, size_text
from ncclsync.tools.bench.turns import (
    BenchError,
    Ranks,
    Requests,
    Side,
    Spread,
    about,
    fill_turns,
    joined,
    launched,
    missing_mpi,
    progress,
)
from ncclsync.tools.processes import join

_TURN_S = 0.05  # of one side: small collectives run by the hundred
_FEW_BYTES = 4 * 1024 * 1024  # below, handing a copy to threads costs more than it saves
_ITEM_BYTES = 4  # float32

Ask = Callable[..., dict[str, Any]]  # `HostReducer.ask`, perhaps of other processes


def bench_all_reduce(given: argparse.Namespace) -> Result:
    """Time every number of towers and every size; under a launcher, between its processes, with one tower each.

    If MPI cannot be run, a note says so.
    """
    process = find_process()
    if process is not None:
        return _between_processes(given, process)
    by_nccl = bool(glob.glob("/dev/nvidia[0-9]*")) and os.environ.get(VISIBLE) != ""
    why = "it works on host memory, and ncclsync on that of GPUs" if by_nccl else missing_mpi()
    rows, notes = [], [f"mpi is left out: {why}."] if given.against and why else []
    for towers in given.towers or (2, 4, 8):
        with contextlib.ExitStack() as stack:
            progress(f"{towers} towers: starting")
            reducer = NcclReducer(towers) if by_nccl else HostReducer(CpuCommunicator(towers))
            stack.callback(reducer.close)
            sides: dict[str, Ask] = dict.fromkeys(reducer.libraries, reducer.ask)
            if given.against and not why:
                side = stack.enter_context(Side("mpi", "all_reduce.serve_mpi", {}, launched(towers)))
                try:
                    side.ask("seconds", library="mpi", count=1, steps=1)
                    sides["mpi"] = side.ask
                except BenchError as error:
                    notes.append(f"Left out with {towers} towers: {error}")
            for size in given.sizes:
                rows += _time_case(towers, size, sides, given.rounds)
    return Result("all-reduce", "s", tuple(rows), tuple(notes))


def _between_processes(given: argparse.Namespace, process: Process) -> Result:
    """Do the same in all processes, all of which get the joined figures. Collective."""
    if given.towers:
        raise BenchError(
            f"Expected no --towers by {process.launcher}: each of the {process.size} processes has one. "
            f"Received: --towers {given.towers}"
        )
    why = missing_mpi() if process.launcher == "Open MPI" else f"{process.launcher} has started the processes"
    reducer, peers = RankReducer(with_mpi=bool(given.against) and not why), join()

    def ask(do: str, **details: Any) -> dict[str, Any]:
        return joined(peers, reducer.ask(do, **details))

    sides = dict.fromkeys(reducer.libraries, ask)
    rows: list[Row] = []
    for size in given.sizes:
        rows += _time_case(process.size, size, sides, given.rounds, shown=process.rank == 0)
    hosts = len(set(peers.hosts))
    notes = [f"{process.size} processes on {hosts} host{'s' * (hosts != 1)}, {process.launcher}: one tower of each."]
    notes += [f"mpi is left out: {why}."] if given.against and why else []
    return Result("all-reduce", "s", tuple(rows), tuple(notes))


def _time_case(towers: int, size: int, sides: Mapping[str, Ask], rounds: int, shown: bool = True) -> list[Row]:
    """Time the sides on buffers of `size` bytes."""
    show = about(f"{towers} towers, {size_text(size)}") if shown else lambda text: None
    count = max(1, size // _ITEM_BYTES)
    asks = {library: functools.partial(ask, "seconds", library=library, count=count) for library, ask in sides.items()}
    answers = fill_turns(asks, _TURN_S, rounds, show)
    seconds = {library: found["seconds"] for library, found in answers.items()}
    actual = count * _ITEM_BYTES
    case = {"towers": towers, "size_bytes": actual, "count": count, "dtype": "float32"}
    more = {library: ask("wrong", library=library, count=count) for library, ask in sides.items()}
    for library, ask in sides.items():
        ask("wrong", library=library, count=1)  # frees the memory for the next process
        if library != "memcpy":  # a copy reduces nothing
            algbw = actual / Spread.of(seconds[library]).median / 1e9
            more[library] |= {"algbw_gb_s": algbw, "busbw_gb_s": algbw * 2 * (towers - 1) / towers}
    return compare(case, seconds, more)


def pattern(rank: int, count: int) -> np.ndarray:
    """Return a rank's input, float32 [count]: whole numbers below 16, so that sums of many ranks are exact."""
    return ((np.arange(count) * (rank + 1) + rank) % 16).astype("float32")


class HostReducer:
    """Reduce inputs of a communicator's ranks in host memory, and copy the same bytes."""

    def __init__(self, communicator: Communicator, cores: int | None = None) -> None:
        """Take over a communicator; a copy uses so many cores, by default all."""
        # By name, a function that reduces once, or copies.
        self.libraries: dict[str, Callable[[], Any]] = {
            "ncclsync": lambda: communicator.all_reduce(self._sends, self._recvs),
            "memcpy": self._copy,
        }
        self._communicator, self._cores = communicator, cores or len(os.sched_getaffinity(0))
        self._threads = concurrent.futures.ThreadPoolExecutor(self._cores)
        self._count = 0
        self._sends: list[Any] = []  # a buffer [count] for each rank of this process
        self._recvs: list[Any] = []

    def make(self, rank: int, array: np.ndarray) -> Any:
        """Return a buffer of a rank with the array's elements."""
        made = empty_aligned(array.size, array.dtype.name)
        made[:] = array
        return made

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Return the result of a method, "seconds" or "wrong", by its name."""
        return {do: getattr(self, do)(**details)}

    def seconds(self, library: str, count: int, steps: int) -> float:
        """All-reduce `count` elements so many times; return the mean seconds."""
        self._hold(count)
        began = time.perf_counter()
        for _ in range(steps):
            self.libraries[library]()
        return (time.perf_counter() - began) / steps

    def wrong(self, library: str, count: int) -> int:
        """All-reduce, or copy, the pattern once; return the number of wrong elements in this process' results."""
        self._hold(count)
        stale = np.full(count, 99, "float32")
        self._recvs = [self.make(rank, stale) for rank in self._communicator.ranks]
        self.seconds(library, count, 1)
        expected = self._sends
        if library != "memcpy":
            total = sum((pattern(rank, count) for rank in range(self._communicator.world_size)), np.float32(0))
            expected = [total] * len(self._recvs)
        pairs = zip(self._recvs, expected, strict=True)
        return sum(int(np.count_nonzero(np.asarray(result) != right)) for result, right in pairs)

    def close(self) -> None:
        """Close the communicator."""
        self._threads.shutdown()
        self._communicator.close()

    def _hold(self, count: int) -> None:
        """Make buffers of `count` elements, unless they have that size."""
        if count != self._count:
            self._sends, self._recvs = [], []  # free them before new ones are made
            self._sends, self._recvs = (
                [self.make(rank, pattern(rank, count)) for rank in self._communicator.ranks] for _ in range(2)
            )
            self._count = count

    def _copy(self) -> None:
        """Copy all ranks' bytes, as many as an all-reduce reads and writes."""
        if self._cores == 1 or self._sends[0].nbytes * len(self._sends) < _FEW_BYTES:
            for send, recv in zip(self._sends, self._recvs, strict=True):
                np.copyto(recv, send)
            return
        to, source = (
            [part for buffer in buffers for part in np.array_split(buffer, self._cores)]
            for buffers in (self._recvs, self._sends)
        )
        list(self._threads.map(np.copyto, to, source))


class NcclReducer(HostReducer):
    """Reduce in the memory of N GPUs, by NCCL; TensorFlow allocates the buffers."""

    def __init__(self, towers: int) -> None:
        """Join the first N GPUs.

        Raises:
            BenchError: TensorFlow sees fewer GPUs.
            NcclUnavailableError: NCCL cannot be used.
        """
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) < towers:
            raise BenchError(f"Expected {towers} GPUs that TensorFlow sees. Received: {len(gpus)}")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        super().__init__(NcclCommunicator(list(range(towers))))
        del self.libraries["memcpy"]

    def make(self, rank: int, array: np.ndarray) -> Any:
        """See `HostReducer.make`."""
        import tensorflow as tf

        with tf.device(f"/GPU:{rank}"):
            return tf.identity(tf.constant(array))


class RankReducer(HostReducer):
    """Run a rank of several processes: ncclsync, a copy and, under mpirun, MPI's own all-reduce. Collective."""

    def __init__(self, with_mpi: bool) -> None:
        if with_mpi:
            from mpi4py import MPI  # before the processes are joined: see `joining`
        super().__init__(TcpCommunicator(join(), 1), cores=1)
        if with_mpi:
            self.libraries["mpi"] = lambda: MPI.COMM_WORLD.Allreduce(self._sends[0], self._recvs[0])

    def seconds(self, library: str, count: int, steps: int) -> float:
        """See `HostReducer.seconds`; all begin together."""
        self._hold(count)
        one = np.zeros(1, np.float32)
        self._communicator.all_reduce([one], [one])
        return super().seconds(library, count, steps)


def serve_mpi(requests: Requests) -> None:
    """Reduce in each of mpirun's processes, at the driver's requests; see `HostReducer.ask`."""
    reducer, ranks = RankReducer(with_mpi=True), Ranks(requests)
    while True:
        ranks.answer(**reducer.ask(**ranks.next()))
