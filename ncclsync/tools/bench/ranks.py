"""Run libraries that all-reduce between processes, one rank in each: ncclsync's own, and others."""

import json
import os
import time
from typing import Any

import numpy as np

from ncclsync.communicator import MpiCommunicator
from ncclsync.communicator.messages import MOST_BYTES
from ncclsync.tools.bench.reducers import BufferReducer, Reducer, pattern, reduce_by_tensorflow
from ncclsync.tools.bench.turns import Requests


class Ranks:
    """Have all processes of mpirun work on what process 0 is asked, and join their answers."""

    def __init__(self) -> None:
        """Join the others."""
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def share(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Give rank 0's request to all; sleep between two looks, where MPI itself would spin."""
        if request is not None:
            for other in range(1, self.size):
                self._send(request, other)
            return request
        while not self._world.Iprobe(source=0):
            time.sleep(0.001)
        return self._receive(0)

    def join(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return in process 0 the longest time, and the sums of the cores' work and of wrong elements."""
        if self.rank > 0:
            self._send(values, 0)
            return values
        each = [values, *(self._receive(other) for other in range(1, self.size))]
        found = {name: [one[name] for one in each] for name in values}
        return {name: sum(all_) if name in ("cpu_seconds", "wrong") else max(all_) for name, all_ in found.items()}

    def _send(self, values: dict[str, Any], to: int) -> None:
        """Send values as JSON: MPI's own objects are pickled."""
        self._world.Send([json.dumps(values).encode(), self._mpi.BYTE], dest=to)

    def _receive(self, source: int) -> dict[str, Any]:
        status = self._mpi.Status()
        self._world.Probe(source=source, status=status)
        received = bytearray(min(status.Get_count(self._mpi.BYTE), MOST_BYTES))
        self._world.Recv([received, self._mpi.BYTE], source=source)
        values: dict[str, Any] = json.loads(received)
        return values


class RankRequests:
    """Share a driver's requests, which process 0 receives, with all processes of mpirun; see `turns.Requests`."""

    def __init__(self, requests: Requests) -> None:
        """Join the others."""
        self._requests, self._ranks = requests, Ranks()

    def next(self) -> dict[str, Any]:
        """Return the next request."""
        return self._ranks.share(self._requests.next() if self._ranks.rank == 0 else None)

    def answer(self, **values: Any) -> None:
        """Answer the last request, for all; see `Ranks.join`."""
        joined = self._ranks.join(values)
        if self._ranks.rank == 0:
            self._requests.answer(**joined)


class MpiReducer(BufferReducer):
    """Run a rank of mpirun's processes: MPI's own all-reduce and, if asked, ncclsync's, and a copy."""

    def __init__(self, towers: int, beside: bool = False) -> None:
        """Join the others. Collective.

        Args:
            towers: number of ranks.
            beside: whether to run ncclsync and a copy on the same buffers.
        """
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        super().__init__(towers, [self._world.Get_rank()], MpiCommunicator(1) if beside else None, 1)
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
        self.libraries = {"tf grpc": lambda: [self._reduce(self._send)]}

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
                return reduce_by_tensorflow(tensor, self.towers, instance, 10_000, "ring")

        return tf.function(reduce, input_signature=[tf.TensorSpec(shape, dtype)], autograph=False)

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        self._reduce = self._graph([count], dtype)
        self._send = self._on_device(pattern(self._rank, count, dtype))

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; the ranks meet before."""
        self._meet(self._one).numpy()
        return super().run(library, iterations)
