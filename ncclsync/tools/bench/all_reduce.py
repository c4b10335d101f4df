"""Run `bench all-reduce`: ncclsync, a copy of the same bytes and other libraries, in turns, checked.

Columns are those of nccl-tests: algbw = size / time, busbw = algbw · 2(n−1)/n, which does not depend on the
number of ranks n where the bus is the limit.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import argparse
import contextlib
import functools
import glob
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ncclsync.communicator.processes import Process, find_process
from ncclsync.errors import NcclSyncError
from ncclsync.tools.bench.reducers import MpiReducer
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
from ncclsync.tools.processes import join, mpi_versions

PEERS = ("mpi", "tensorflow")
NUMBERS_OF_TOWERS = (2, 4, 8)
# Variables by which a child would take itself for a process of mpirun's.
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "SLURM_")
_GRPC = "tf grpc"
_TURN_S = 0.05  # of one side: small collectives run by the hundred
_MOST_ITERATIONS = 2000


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
    with ProcessSide(process, grpc="tensorflow" in given.against) as side:
        if process.rank > 0:
            side.follow()
            return None
        rows: list[Row] = []
        for size in given.sizes:
            rows += _time_case(given, process.size, size, [side], show)
    notes = [f"{side.description}: one tower of each."]
    if side.left_out:
        notes.append(f"Left out: {side.left_out}")
    return Result("all-reduce", "s", tuple(rows), tuple(notes))


class ProcessSide:
    """Have all processes do the same work: process 0 asks as by `turns.Side`, the others `follow`. A context manager.

    Attributes:
        name: for messages.
        description: of the processes, in words.
        left_out: why TensorFlow's collectives are not among the libraries; "" if they are.
    """

    name = "ncclsync"

    def __init__(self, process: Process, grpc: bool) -> None:
        """Join the other processes, and start TensorFlow's own collectives if `grpc`. Collective.

        Raises:
            BenchError: they cannot be joined.
        """
        try:
            self._peers = join(process)
            self._reducer, self._ranks = MpiReducer(process.size, beside=True), Ranks()
        except NcclSyncError as error:
            raise BenchError(str(error)) from error
        hosts = len(set(self._peers.hosts))
        self.description = f"{process.size} processes on {hosts} host{'s' * (hosts != 1)}, {mpi_versions()['MPI']}"
        self._stack = contextlib.ExitStack()
        self._child: Side | None = None
        self.left_out = self._start_grpc() if grpc else ""

    def _start_grpc(self) -> str:
        """Start the children; return why they cannot run, the same in all processes."""
        name = "127.0.0.1" if len(set(self._peers.hosts)) == 1 else socket.gethostname()
        with socket.create_server(("", 0)) as free:
            address = f"{name}:{free.getsockname()[1]}"
        addresses = self._peers.exchange(address, "addresses for gRPC")
        arguments = {"towers": self._peers.size, "rank": self._peers.rank, "addresses": addresses}
        child = self._stack.enter_context(Side(_GRPC, "reducers.GrpcReducer", arguments, drop=_LAUNCHERS))
        error = ""
        try:
            child.ask("prepare", count=1, dtype="float32")
        except BenchError as raised:
            error = str(raised)
        errors = self._peers.exchange(error, "the start of gRPC")
        if not any(errors):
            self._child = child
        return next(filter(None, errors), "")

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Let all processes work, in process 0; see `Side.ask` and `Ranks.join`."""
        return self._ranks.join(self._serve(self._ranks.share({"do": do, **details})))

    def follow(self) -> None:
        """Serve process 0's requests until it ends."""
        while (request := self._ranks.share(None))["do"] != "end":
            self._ranks.join(self._serve(request))

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Work in this process; return its answer."""
        if request.get("library") == _GRPC:
            assert self._child is not None
            return self._child.ask(**request)
        answer = self._reducer.serve(request)
        if request["do"] == "prepare" and self._child is not None:
            answer["libraries"] += self._child.ask(**request)["libraries"]
        return answer

    def __enter__(self) -> "ProcessSide":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the others end, and end the children."""
        if self._peers.rank == 0:
            self._ranks.share({"do": "end"})
        self._stack.close()


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
        yield functools.partial(Side, "ncclsync", "reducers.NcclReducer", arguments)
        return
    yield functools.partial(Side, "ncclsync", "reducers.HostReducer", arguments)
    if "tensorflow" in given.against:
        yield functools.partial(Side, "tensorflow", "reducers.TensorFlowReducer", arguments)
    if "mpi" in given.against and not missing_mpi():
        yield functools.partial(Side, "mpi", "reducers.MpiReducer", arguments, *launched(towers))


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
