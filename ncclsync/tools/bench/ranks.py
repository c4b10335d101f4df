"""Run libraries that all-reduce between processes, one per rank, for `bench all-reduce` to compare with."""

import abc
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

from ncclsync.tools.bench.reducers import Reducer, count_wrong, pattern


class RankReducer(Reducer):
    """Run one rank of N processes. Rank 0 is driven; it has the others do the same."""

    rank: int

    @abc.abstractmethod
    def share(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Give rank 0's request to all ranks. Idle ranks use no core, which another side works on."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    @abc.abstractmethod
    def reduce(self) -> np.ndarray:
        """All-reduce the input once; return this rank's result, [count]."""

    @abc.abstractmethod
    def total(self, number: int) -> int:
        """Return the sum of all ranks' numbers."""

    def run(self, library: str, iterations: int) -> float:
        """See `Reducer.run`; returns when the last rank has its result."""
        self.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            self.reduce()
        self.barrier()
        return time.perf_counter() - began

    def wrong(self, library: str) -> int:
        """See `Reducer.wrong`."""
        self.prepare(self._count, self._dtype)
        return self.total(count_wrong([self.reduce()], self.towers))

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        self._count, self._dtype = count, dtype
        self._send = pattern(self.rank, count, dtype)

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """See `Reducer.serve`; serves on all ranks."""
        self.share(request)
        return super().serve(request)

    def follow(self) -> None:
        """Serve what rank 0 is asked for, until this process is ended."""
        while True:
            super().serve(self.share(None))


class GlooReducer(RankReducer):
    """Run PyTorch's gloo, in place. Rank 0 starts the others, which end with it."""

    libraries = ("gloo",)

    def __init__(self, towers: int, rank: int = 0, port: int = 0) -> None:
        """Join; `rank` and `port` are given to the ranks that rank 0 starts."""
        super().__init__(towers)
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self.rank = rank
        self._torch = torch
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            code = "import sys; from ncclsync.tools.bench.ranks import GlooReducer as G; G({}, {}, {}).follow()"
            for other in range(1, towers):
                command = [sys.executable, "-c", code.format(towers, other, port)]
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=towers
        )

    def share(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """See `RankReducer.share`; a rank whose rank 0 has ended ends with an error."""
        box: list[Any] = [request]
        self._torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """See `RankReducer.barrier`."""
        self._torch.distributed.barrier()

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        super().prepare(count, dtype)
        self._tensor = self._torch.from_numpy(self._send)

    def reduce(self) -> np.ndarray:
        """See `RankReducer.reduce`."""
        self._torch.distributed.all_reduce(self._tensor)
        return self._send

    def total(self, number: int) -> int:
        """See `RankReducer.total`."""
        box = self._torch.tensor([number])
        self._torch.distributed.all_reduce(box)
        return int(box[0])


class MpiReducer(RankReducer):
    """Run MPI by mpi4py, started by mpirun."""

    libraries = ("mpi",)

    def __init__(self, towers: int) -> None:
        """Join."""
        super().__init__(towers)
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()

    def share(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """See `RankReducer.share`. MPI waits by looking again and again, so this sleeps between two looks."""
        if request is not None:
            for other in range(1, self.towers):
                self._world.send(request, dest=other)
            return request
        while not self._world.iprobe(source=0):
            time.sleep(0.001)
        return self._world.recv(source=0)

    def barrier(self) -> None:
        """See `RankReducer.barrier`."""
        self._world.Barrier()

    def prepare(self, count: int, dtype: str) -> None:
        """See `Reducer.prepare`."""
        super().prepare(count, dtype)
        self._recv = np.full_like(self._send, 99)

    def reduce(self) -> np.ndarray:
        """See `RankReducer.reduce`."""
        self._world.Allreduce(self._send, self._recv)
        return self._recv

    def total(self, number: int) -> int:
        """See `RankReducer.total`."""
        return self._world.allreduce(number)
