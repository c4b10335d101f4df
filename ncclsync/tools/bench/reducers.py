"""Time all-reduces for `bench all-reduce`; each class runs the libraries of one process.

Input and result are known in closed form and exact in every dtype, so that results are checked by element. TensorFlow
is imported by the classes that use it. `bench.ranks` has libraries with a process per rank.
"""

import abc
import concurrent.futures
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclsync.communicator import Communicator, CpuCommunicator, NcclCommunicator, empty_aligned
from ncclsync.tools.bench.turns import BenchError

_CHAINED = 100  # all-reduces in one call of a graph, so that the call's overhead is small
_WORTH_A_CHAIN = 20  # all-reduces in a turn, from which on they are chained
_FEW_BYTES = 4 * 1024 * 1024  # below, handing a copy to threads costs more than it saves


def pattern(rank: int, count: int, dtype: str) -> np.ndarray:
    """Return a rank's input, [count]: whole numbers below 16, so that sums of many ranks are exact."""
    return ((np.arange(count) * (rank + 1) + rank) % 16).astype(dtype)


def count_wrong(results: Sequence[np.ndarray], ranks: int) -> int:
    """Return how many elements of the results, an array of [count] for each rank, differ from the patterns' sum."""
    count, dtype = results[0].size, results[0].dtype.name
    expected = sum((pattern(rank, count, dtype) for rank in range(1, ranks)), pattern(0, count, dtype))
    return sum(int(np.count_nonzero(result.reshape(-1) != expected)) for result in results)


class Reducer(abc.ABC):
    """Run some libraries' all-reduces over the same input. `towers` ranks; `prepare` comes first.

    Attributes:
        libraries: their names.
    """

    libraries: tuple[str, ...]

    def __init__(self, towers: int) -> None:
        """Prepare for so many ranks."""
        self.towers = towers

    @abc.abstractmethod
    def prepare(self, count: int, dtype: str) -> None:
        """Make the input, `count` elements per rank; free earlier buffers."""

    @abc.abstractmethod
    def run(self, library: str, iterations: int) -> float:
        """All-reduce so many times; return the seconds that took."""

    @abc.abstractmethod
    def wrong(self, library: str) -> int:
        """All-reduce the pattern once; return how many elements of all ranks' results are wrong."""

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve a request of the driver; return the answer."""
        if request["do"] == "prepare":
            self.prepare(request["count"], request["dtype"])
            return {"libraries": self.libraries}
        if request["do"] == "run":
            return {"seconds": self.run(request["library"], request["iterations"])}
        return {"wrong": self.wrong(request["library"])}


def timed(function: Callable[[], Any], iterations: int) -> float:
    """Return how many seconds so many calls take."""
    began = time.perf_counter()
    for _ in range(iterations):
        function()
    return time.perf_counter() - began


class HostReducer(Reducer):
    """Reduce in this process' memory: by ncclsync, and a copy of the same bytes."""

    libraries = ("ncclsync", "memcpy")

    def __init__(self, towers: int, communicator: Communicator | None = None) -> None:
        """Prepare for so many ranks; `communicator` instead of a new `CpuCommunicator` is for tests."""
        super().__init__(towers)
        self._communicator = communicator or CpuCommunicator(towers)
        self._cores = len(os.sched_getaffinity(0))
        self._threads = concurrent.futures.ThreadPoolExecutor(self._cores)
        self._sends: list[np.ndarray] = []
        self._recvs: list[np.ndarray] = []

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        self._sends, self._recvs = [], []
        for rank in range(self.towers):
            for buffers in (self._sends, self._recvs):
                buffers.append(empty_aligned(count, dtype))
                buffers[-1][:] = pattern(rank, count, dtype)

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`."""
        return timed(self._copy if library == "memcpy" else self._all_reduce, iterations)

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`; of a copy, elements that differ from their source."""
        for recv in self._recvs:
            recv[:] = 99
        self.run(library, 1)
        if library == "memcpy":
            pairs = zip(self._sends, self._recvs, strict=True)
            return sum(int(np.count_nonzero(send != recv)) for send, recv in pairs)
        return count_wrong(self._recvs, self.towers)

    def _all_reduce(self) -> None:
        self._communicator.all_reduce(self._sends, self._recvs)

    def _copy(self) -> None:
        """Copy all ranks' bytes, on all cores: an all-reduce reads and writes as many."""
        pairs = zip(self._sends, self._recvs, strict=True)
        if self._sends[0].nbytes * self.towers < _FEW_BYTES:
            for send, recv in pairs:
                np.copyto(recv, send)
            return
        parts = [
            (part_to, part_from)
            for send, recv in pairs
            for part_to, part_from in zip(
                np.array_split(recv, self._cores), np.array_split(send, self._cores), strict=True
            )
        ]
        list(self._threads.map(np.copyto, *zip(*parts, strict=True)))


class NcclReducer(Reducer):
    """Reduce in the memory of N GPUs, by NCCL. TensorFlow, always installed, allocates the buffers."""

    libraries = ("ncclsync",)

    def __init__(self, towers: int) -> None:
        """Join the first N GPUs.

        Raises:
            BenchError: TensorFlow sees fewer.
            NcclUnavailableError: NCCL cannot be used.
        """
        super().__init__(towers)
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) < towers:
            raise BenchError(f"Expected {towers} GPUs that TensorFlow sees. Received: {len(gpus)}")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        self._communicator = NcclCommunicator(list(range(towers)))
        self._sends: list[Any] = []
        self._recvs: list[Any] = []

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        import tensorflow as tf

        self._sends, self._recvs = [], []
        for rank in range(self.towers):
            with tf.device(f"/GPU:{rank}"):
                self._sends.append(tf.identity(tf.constant(pattern(rank, count, dtype))))
                self._recvs.append(tf.fill([count], tf.cast(99, dtype)))

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; a collective has happened when it returns."""
        return timed(lambda: self._communicator.all_reduce(self._sends, self._recvs), iterations)

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`."""
        self.run(library, 1)
        return count_wrong([recv.numpy() for recv in self._recvs], self.towers)


class TensorFlowReducer(Reducer):
    """Reduce in a graph: by ncclsync's op and by TensorFlow's own `CollectiveReduceV2`.

    `CollectiveReduceV2` needs N logical CPUs, and gives each its result; each call of its graph is timed. ncclsync's op
    works on one CPU, where all towers get the same result, many times in each call of its graph.
    """

    libraries = ("ncclsync op", "tf collective")

    def __init__(self, towers: int) -> None:
        """Divide the CPU into N logical ones: once per process."""
        super().__init__(towers)
        import tensorflow as tf

        from ncclsync.ops import host_ops

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * towers)

        def collective(instance, *tensors):
            results = []
            for rank, tensor in enumerate(tensors):
                with tf.device(f"/CPU:{rank}"):
                    result = tf.raw_ops.CollectiveReduceV2(
                        input=tensor,
                        group_size=towers,
                        group_key=1,
                        instance_key=instance,  # one for each shape
                        ordering_token=[],
                        merge_op="Add",
                        final_op="Id",
                        timeout_seconds=60,
                    )
                    results.append(result)
            return results

        instances = itertools.count(1)

        # Not by tf.function: its automatic control dependencies let one rank's op wait for another's.
        def wrap(dtype):
            bound = functools.partial(collective, next(instances))
            return tf.compat.v1.wrap_function(bound, [tf.TensorSpec([None], dtype)] * towers)

        def own(*tensors):
            return host_ops.all_reduce([[one] for one in tensors], [tf.ones([], tf.float64)] * towers, "sum") * towers

        def chain(*tensors):
            for _ in range(_CHAINED):
                tensors = own(*tensors)
            return tensors[0]

        self._wrap, self._own, self._chain = wrap, *(tf.function(one, autograph=False) for one in (own, chain))
        self._inputs: list[Any] = []
        self._on_one: list[Any] = []

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        import tensorflow as tf

        self._inputs, self._on_one = [], []
        self._collective = self._wrap(dtype)
        for rank in range(self.towers):
            with tf.device(f"/CPU:{rank}"):
                self._inputs.append(tf.identity(tf.constant(pattern(rank, count, dtype))))
        with tf.device("/CPU:0"):
            self._on_one = [tf.identity(tensor) for tensor in self._inputs]

    def _reduce(self, library: str) -> list[Any]:
        return self._collective(*self._inputs) if library == "tf collective" else self._own(*self._on_one)

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`."""
        if library == "tf collective" or iterations < _WORTH_A_CHAIN:
            return timed(lambda: self._reduce(library), iterations)
        calls = -(-iterations // _CHAINED)
        return timed(lambda: self._chain(*self._on_one), calls) * iterations / (calls * _CHAINED)

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`."""
        return count_wrong([tensor.numpy() for tensor in self._reduce(library)], self.towers)
