"""Run `bench all-reduce`: ncclsync, a copy of the same bytes and other libraries, in turns, checked.

Columns are those of nccl-tests: algbw = size / time, busbw = algbw · 2(n−1)/n, which does not depend on the
number of ranks n where the bus is the limit.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

Each `Reducer` runs the libraries of one process. Input and result are known in closed form and exact in every dtype, so
that results are checked by element. TensorFlow is imported by the classes that use it.
"""

import abc
import argparse
import concurrent.futures
import contextlib
import functools
import glob
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ncclsync.communicator import Communicator, CpuCommunicator, MpiCommunicator, NcclCommunicator, empty_aligned
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
from ncclsync.tools.processes import join, mpi_versions

PEERS = ("mpi", "tensorflow")
NUMBERS_OF_TOWERS = (2, 4, 8)
# Variables by which a child would take itself for a process of mpirun's.
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "SLURM_")
_GRPC = "tf grpc"
_TURN_S = 0.05  # of one side: small collectives run by the hundred
_MOST_ITERATIONS = 2000
_CHAINED = 100  # all-reduces in one call of a graph, so that the call's overhead is small
_WORTH_A_CHAIN = 20  # all-reduces in a turn, from which on they are chained
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
        child = self._stack.enter_context(Side(_GRPC, "all_reduce.GrpcReducer", arguments, drop=_LAUNCHERS))
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
        yield functools.partial(Side, "ncclsync", "all_reduce.NcclReducer", arguments)
        return
    yield functools.partial(Side, "ncclsync", "all_reduce.HostReducer", arguments)
    if "tensorflow" in given.against:
        yield functools.partial(Side, "tensorflow", "all_reduce.TensorFlowReducer", arguments)
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


class Reducer(abc.ABC):
    """Run some libraries' all-reduces over the same input of `towers` ranks; `prepare` comes first.

    Attributes:
        libraries: by name, a function that reduces once.
    """

    libraries: dict[str, Callable[[], Any]]

    def __init__(self, towers: int) -> None:
        """Prepare for so many ranks."""
        self.towers = towers

    @abc.abstractmethod
    def prepare(self, count: int, dtype: str) -> None:
        """Make the input, `count` elements per rank; free earlier buffers."""

    def run(self, library: str, iterations: int) -> float:
        """All-reduce so many times; return the seconds that took."""
        began = time.perf_counter()
        for _ in range(iterations):
            self.libraries[library]()
        return time.perf_counter() - began

    def wrong(self, library: str) -> int:
        """All-reduce the pattern once; return how many elements of this process' results are wrong."""
        return count_wrong([tensor.numpy() for tensor in self.libraries[library]()], self.towers)

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve a request of the driver; return the answer."""
        if request["do"] == "prepare":
            self.prepare(request["count"], request["dtype"])
            return {"libraries": [*self.libraries]}
        if request["do"] == "run":
            return {"seconds": self.run(request["library"], request["iterations"])}
        return {"wrong": self.wrong(request["library"])}


class HostReducer(Reducer):
    """Reduce from buffers to buffers, one of each for every rank here, in host memory, and copy the same bytes."""

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
        super().__init__(towers)
        reduce = (communicator or CpuCommunicator(towers)).all_reduce
        self.libraries = {"ncclsync": lambda: reduce(self.sends, self.recvs), "memcpy": self._copy}
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
        """See `Reducer.prepare`."""
        self.sends, self.recvs = [], []
        for rank in self._ranks:
            self.sends.append(self.make(rank, pattern(rank, count, dtype)))
            self.recvs.append(self.make(rank, pattern(rank, count, dtype)))

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`; of a copy, elements that differ from their source."""
        for i, rank in enumerate(self._ranks):
            self.recvs[i] = self.make(rank, np.full_like(np.asarray(self.sends[i]), 99))
        self.run(library, 1)
        results = [np.asarray(recv) for recv in self.recvs]
        if library == "memcpy":
            return sum(int(np.count_nonzero(result != send)) for result, send in zip(results, self.sends, strict=True))
        return count_wrong(results, self.towers)

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
        return placed(f"/GPU:{rank}", array)


def placed(device: str, array: np.ndarray) -> Any:
    """Return a tensor on a device, such as "/GPU:0"."""
    import tensorflow as tf

    with tf.device(device):
        return tf.identity(tf.constant(array))


def reduce_by_tensorflow(tensor: Any, towers: int, instance: int, group: int = 1, hint: str = "auto") -> Any:
    """Return a rank's result of TensorFlow's own all-reduce; `instance` is another one for each shape."""
    import tensorflow as tf

    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=towers,
        group_key=group,
        instance_key=instance,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        communication_hint=hint,
        timeout_seconds=60,
    )


class TensorFlowReducer(Reducer):
    """Reduce in a graph: by ncclsync's op and by TensorFlow's own `CollectiveReduceV2`.

    `CollectiveReduceV2` needs N logical CPUs, and gives each its result; each call of its graph is timed. ncclsync's op
    works on one CPU, where all towers get the same result, many times in each call of its graph.
    """

    OWN, TENSORFLOW = NAMES = ("ncclsync op", "tf collective")

    def __init__(self, towers: int) -> None:
        """Divide the CPU into N logical ones: once per process."""
        super().__init__(towers)
        import tensorflow as tf

        from ncclsync.ops import host_ops

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * towers)

        def own(*tensors):
            return host_ops.all_reduce([[one] for one in tensors], [tf.ones([], tf.float64)] * towers, "sum") * towers

        def chain(*tensors):
            for _ in range(_CHAINED):
                tensors = own(*tensors)
            return tensors[0]

        own_graph, self._chain = (tf.function(one, autograph=False) for one in (own, chain))
        self._instances = itertools.count(1)
        self.libraries = {
            self.OWN: lambda: own_graph(*self._on_one),
            self.TENSORFLOW: lambda: self._collective(*self._inputs),
        }

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        import tensorflow as tf

        instance = next(self._instances)

        def collective(*tensors):
            results = []
            for rank, tensor in enumerate(tensors):
                with tf.device(f"/CPU:{rank}"):
                    results.append(reduce_by_tensorflow(tensor, self.towers, instance))
            return results

        # Not by tf.function: its automatic control dependencies let one rank's op wait for another's.
        self._collective = tf.compat.v1.wrap_function(collective, [tf.TensorSpec([None], dtype)] * self.towers)
        arrays = [pattern(rank, count, dtype) for rank in range(self.towers)]
        self._inputs = [placed(f"/CPU:{rank}", array) for rank, array in enumerate(arrays)]
        self._on_one = [placed("/CPU:0", array) for array in arrays]

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`."""
        if library == self.TENSORFLOW or iterations < _WORTH_A_CHAIN:
            return super().run(library, iterations)
        calls = -(-iterations // _CHAINED)
        began = time.perf_counter()
        for _ in range(calls):
            self._chain(*self._on_one)
        return (time.perf_counter() - began) * iterations / (calls * _CHAINED)


class MpiReducer(HostReducer):
    """Run a rank of mpirun's processes: MPI's own all-reduce and, if asked, ncclsync's, and a copy."""

    def __init__(self, towers: int, beside: bool = False) -> None:
        """Join the others; `beside`: also run ncclsync and a copy on the same buffers. Collective."""
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        super().__init__(towers, MpiCommunicator(1), [self._world.Get_rank()], 1)
        by_mpi = {"mpi": lambda: self._world.Allreduce(self.sends[0], self.recvs[0])}
        self.libraries = {**self.libraries, **by_mpi} if beside else by_mpi

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; returns when the last rank has its result."""
        self._world.Barrier()
        began = time.perf_counter()
        super().run(library, iterations)
        self._world.Barrier()
        return time.perf_counter() - began


class GrpcReducer(Reducer):
    """Run a rank of TensorFlow's own collectives between processes, `CollectiveReduceV2` over gRPC.

    Each rank has its own driver; all ranks must get the same request at the same time.
    """

    def __init__(self, towers: int, rank: int, addresses: list[str]) -> None:
        """Join as this rank; returns when all have joined. `addresses`: [towers] "host:port", where each is reached."""
        super().__init__(towers)
        self._rank = rank
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        ring = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self._tf = tf
        # It starts the server and waits for the other ranks.
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
        self._device = f"/job:worker/task:{rank}/device:CPU:0"
        self._instance = 10_000  # above the strategy's own keys
        self._meet = self._graph([1], "float32")
        self._one = placed(self._device, np.ones(1, "float32"))
        self.libraries = {_GRPC: lambda: [self._reduce(self._send)]}

    def _graph(self, shape: list[int], dtype: str) -> Any:
        """Return a function of a rank's tensor that returns the sum, [count]."""
        tf = self._tf
        self._instance += 1
        instance = self._instance

        def reduce(tensor):
            with tf.device(self._device):
                return reduce_by_tensorflow(tensor, self.towers, instance, 10_000, "ring")

        return tf.function(reduce, input_signature=[tf.TensorSpec(shape, dtype)], autograph=False)

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        self._reduce = self._graph([count], dtype)
        self._send = placed(self._device, pattern(self._rank, count, dtype))

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; the ranks meet before."""
        self._meet(self._one).numpy()
        return super().run(library, iterations)
