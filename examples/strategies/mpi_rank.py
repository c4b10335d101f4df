"""Ranks that MPI starts: `MpiGroup` is rank 0's view, `python -m strategies.mpi_rank` another rank.

A rank that has nothing to do sleeps: one that waits in MPI keeps a core busy.
"""

import importlib.util
import os
import shutil
import sys
import time

from strategies.ring import MpiRing

_POLL_S = 0.001


class MpiGroup:
    """Processes of MPI's. `ring` is rank 0's end."""

    def __init__(self, build, ranks):
        """Start all ranks but the first, which is this process."""
        from mpi4py import MPI

        self._spawned = MPI.COMM_SELF.Spawn(sys.executable, ["-m", "strategies.mpi_rank"], maxprocs=ranks - 1)
        self._comm = self._spawned.Merge(high=False)
        self._comm.bcast((build, os.getpid()))
        self._processes = self._comm.gather(None)[1:]
        self.ring = MpiRing(self._comm)

    @staticmethod
    def available():
        """Whether mpi4py is installed, and MPI's programs with it."""
        return bool(importlib.util.find_spec("mpi4py") and shutil.which("mpirun"))

    def send(self, request):
        """Tell all other ranks."""
        for rank in range(1, self.ring.ranks):
            self._comm.send(request, rank)

    def processes(self):
        """Return the ids of the other ranks' processes."""
        return self._processes

    def close(self):
        """End them. Idempotent."""
        if self._processes:
            self.send(None)
            self._processes = []
            self._comm.Free()  # Disconnect would not return here, with Open MPI 4
            self._spawned.Disconnect()


class Control:
    """Where another rank hears from rank 0."""

    def __init__(self, comm, leader):
        """Listen to rank 0 of `comm`, the process `leader`."""
        self._comm, self._leader = comm, leader

    def recv(self):
        """Return the next request.

        Raises:
            EOFError: rank 0 has closed the group, or has ended.
        """
        while not self._comm.iprobe(0):
            time.sleep(_POLL_S)
            try:
                os.kill(self._leader, 0)
            except ProcessLookupError:
                raise EOFError from None
        request = self._comm.recv(source=0)
        if request is None:
            raise EOFError
        return request


def main():
    """Join rank 0, and follow it."""
    from mpi4py import MPI

    from strategies.ring_processes import follow

    leaders = MPI.Comm.Get_parent()
    comm = leaders.Merge(high=True)
    build, leader = comm.bcast(None)
    comm.gather(os.getpid())
    follow(Control(comm, leader), build, MpiRing(comm))
    comm.Free()
    leaders.Disconnect()


if __name__ == "__main__":
    main()
