"""Run libraries that all-reduce between processes, one rank in each: ncclsync's own, and others."""

import json
import os
import time
from typing import Any

import numpy as np

from ncclsync.communicator import MpiCommunicator, empty_aligned
from ncclsync.communicator.messages import MOST_BYTES
from ncclsync.tools.bench.reducers import Reducer, count_wrong, pattern, timed
from ncclsync.tools.bench.turns import Requests


class RankRequests:
    """Share a driver's requests, which process 0 receives, with all processes of mpirun; see `turns.Requests`."""

    def __init__(self, requests: Requests) -> None:
        """Join the others."""
        from mpi4py import MPI

        self._requests, self._world = requests, MPI.COMM_WORLD

    def next(self) -> dict[str, Any]:
        """Return the next request."""
        return share(self._world, self._requests.next() if self._world.Get_rank() == 0 else None)

    def answer(self, **values: float) -> None:
        """Answer the last request: the longest time, and the sum of the cores' work in all processes."""
        each = [values]
        if self._world.Get_rank() > 0:
            send(self._world, values, 0)
        else:
            each += [receive(self._world, other) for other in range(1, self._world.Get_size())]
            found = {name: [one[name] for one in each] for name in values}
            self._requests.answer(**{name: sum(all_) if "cpu" in name else max(all_) for name, all_ in found.items()})


def share(world: Any, request: dict[str, Any] | None) -> dict[str, Any]:
    """Give rank 0's request to all ranks of MPI; sleep between two looks, where MPI itself would spin."""
    if request is not None:
        for other in range(1, world.Get_size()):
            send(world, request, other)
        return request
    while not world.Iprobe(source=0):
        time.sleep(0.001)
    return receive(world, 0)


def send(world: Any, values: dict[str, Any], to: int) -> None:
    """Send values to a rank of MPI, as JSON: MPI's own objects are pickled."""
    world.Send([json.dumps(values).encode(), _mpi().BYTE], dest=to)


def receive(world: Any, source: int) -> dict[str, Any]:
    """Return the next values that a rank of MPI has sent."""
    status = _mpi().Status()
    world.Probe(source=source, status=status)
    received = bytearray(min(status.Get_count(_mpi().BYTE), MOST_BYTES))
    world.Recv([received, _mpi().BYTE], source=source)
    values: dict[str, Any] = json.loads(received)
    return values


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


class MpiReducer(Reducer):
    """Run a rank of mpirun's processes; the driver asks rank 0, and all ranks do the same.

    ncclsync, MPI's own all-reduce and a copy work on the same buffers.
    """

    libraries: tuple[str, ...] = ("mpi",)

    def __init__(self, towers: int, libraries: tuple[str, ...] = ("mpi",)) -> None:
        """Join the others. Collective.

        Args:
            towers: number of ranks.
            libraries: of "ncclsync", "memcpy" and "mpi".
        """
        super().__init__(towers)
        self.libraries, self._world = libraries, _mpi().COMM_WORLD
        self.rank = self._world.Get_rank()
        self._communicator = MpiCommunicator(1) if "ncclsync" in libraries else None

    def share(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Give rank 0's request to all ranks; see the function `share`."""
        return share(self._world, request)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._world.Barrier()

    def total(self, number: int) -> int:
        """Return the sum of all ranks' numbers."""
        total = np.zeros(1, np.int64)
        self._world.Allreduce(np.array([number]), total)
        return int(total[0])

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        self._send, self._recv = empty_aligned(count, dtype), empty_aligned(count, dtype)
        self._send[:], self._recv[:] = pattern(self.rank, count, dtype), 99

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; returns when the last rank has its result."""
        self.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            self._reduce(library)
        self.barrier()
        return time.perf_counter() - began

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`; of a copy, elements that differ from their source."""
        self._recv[:] = 99
        self._reduce(library)
        if library == "memcpy":
            return self.total(int(np.count_nonzero(self._recv != self._send)))
        return self.total(count_wrong([self._recv], self.towers))

    def _reduce(self, library: str) -> None:
        if library == "mpi":
            self._world.Allreduce(self._send, self._recv)
        elif library == "memcpy":
            np.copyto(self._recv, self._send)
        elif self._communicator is not None:
            self._communicator.all_reduce([self._send], [self._recv])

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """See `Reducer.serve`; serves on all ranks."""
        self.share(request)
        return super().serve(request)

    def follow(self) -> None:
        """Serve rank 0's requests until this process is ended."""
        while True:
            super().serve(self.share(None))


class GrpcReducer(Reducer):
    """Run a rank of TensorFlow's own collectives between processes, `CollectiveReduceV2` over gRPC.

    Each rank has its own driver; all ranks must get the same request at the same time.
    """

    libraries = ("tf grpc",)

    def __init__(self, towers: int, rank: int, addresses: list[str]) -> None:
        """Join; returns when all ranks have joined.

        Args:
            towers: number of ranks.
            rank: of this process.
            addresses: [towers] "host:port", where each is reached.
        """
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
        self._one = self._on_device(np.ones(1, "float32"))

    def _on_device(self, array: np.ndarray) -> Any:
        with self._tf.device(self._device):
            return self._tf.identity(self._tf.constant(array))

    def _graph(self, shape: list[int], dtype: str) -> Any:
        """Return a function of a rank's tensor that returns the sum, [count]."""
        tf = self._tf
        self._instance += 1
        instance = self._instance

        def reduce(tensor):
            with tf.device(self._device):
                return tf.raw_ops.CollectiveReduceV2(
                    input=tensor,
                    group_size=self.towers,
                    group_key=10_000,
                    instance_key=instance,  # one for each shape
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Id",
                    communication_hint="ring",
                    timeout_seconds=60,
                )

        return tf.function(reduce, input_signature=[tf.TensorSpec(shape, dtype)], autograph=False)

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        self._reduce = self._graph([count], dtype)
        self._send = self._on_device(pattern(self._rank, count, dtype))

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; the ranks meet before."""
        self._meet(self._one).numpy()
        return timed(lambda: self._reduce(self._send).numpy(), iterations)

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`; of this rank's result."""
        return count_wrong([self._reduce(self._send).numpy()], self.towers)
