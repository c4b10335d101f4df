"""All-reduce and broadcast among processes: a ring over local sockets, or MPI. Without TensorFlow."""

import numpy as np

LIMIT_S = 120.0  # for a message of another rank


class Ring:
    """All-reduce and broadcast of float32 vectors among ranks, each with a process of its own."""

    def __init__(self, rank, ranks, predecessor, successor):
        """Join the neighbours, connections of which each serves one direction."""
        self.rank, self.ranks, self._predecessor, self._successor = rank, ranks, predecessor, successor

    def all_reduce(self, vector):
        """Add up all ranks' vectors, in place: N − 1 steps that add, N − 1 that hand the sums on."""
        chunks = np.array_split(vector, self.ranks)
        for step in range(self.ranks - 1):
            chunks[(self.rank - step - 1) % self.ranks] += self._exchange(chunks[(self.rank - step) % self.ranks])
        for step in range(self.ranks - 1):
            chunks[(self.rank - step) % self.ranks][:] = self._exchange(chunks[(self.rank - step + 1) % self.ranks])

    def broadcast(self, vector):
        """Give all ranks rank 0's vector, in place: it is handed on around the ring."""
        if self.rank > 0:
            vector[:] = self._receive()
        if self.rank < self.ranks - 1:
            self._successor.send_bytes(vector.tobytes())

    def _exchange(self, chunk):
        """Send to the successor, receive from the predecessor; some rank receives first, so that none
        waits."""
        if self.rank % 2:
            received = self._receive()
            self._successor.send_bytes(chunk.tobytes())
            return received
        self._successor.send_bytes(chunk.tobytes())
        return self._receive()

    def _receive(self):
        if not self._predecessor.poll(LIMIT_S):
            raise TimeoutError(f"Expected a message of another rank in {LIMIT_S:.0f} s. Received: none")
        return np.frombuffer(self._predecessor.recv_bytes(), "float32")


class MpiRing:
    """The same by MPI, among the ranks of a communicator of mpi4py's."""

    def __init__(self, comm):
        """Take a communicator, which must live as long."""
        self.rank, self.ranks, self._comm = comm.Get_rank(), comm.Get_size(), comm

    def all_reduce(self, vector):
        """As `Ring.all_reduce`."""
        from mpi4py import MPI

        self._comm.Allreduce(MPI.IN_PLACE, vector)

    def broadcast(self, vector):
        """As `Ring.broadcast`."""
        self._comm.Bcast(vector)
