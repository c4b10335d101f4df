"""One process per tower, gradients by a ring all-reduce, the start by a broadcast.

System: Horovod (A. Sergeev, M. Del Balso 2018, https://arxiv.org/abs/1802.05799;
https://github.com/horovod/horovod), whose ring is Patarasuk's and Yuan's (2009) by way of Baidu.
Idea: each GPU has a process that runs the script unchanged. `DistributedOptimizer` averages the gradients
over all ranks before they are applied; a hook broadcasts rank 0's variables at the start. A ring moves 2·(N
− 1)/N times the model through each link, however many ranks there are.
Here: plain processes, joined in a ring by local sockets. Horovod 0.28, the last release, does not build with
TensorFlow 2.16 and newer (horovod#4290), which Keras 3 needs. With mpi4py the same scheme runs on MPI:
`MpiRing`, chosen if it is installed and `mpirun` is found.

What it got wrong:
- Every rank counts the same: ranks with different numbers of samples give a mean of means. With different
  numbers of batches they stall, or end with an error (horovod#507, #1060; `join` came for that).
- Normalisation and moving averages are each rank's own; rank 0's are saved (horovod#49).
- A rank has a batch of its own: the user scales the learning rate by N, cuts the data, and writes files on
  rank 0 only. Metrics are one rank's unless a callback averages them.
- N processes hold N interpreters and N copies of TensorFlow.
"""

import multiprocessing
from typing import ClassVar

from strategies.strategy import TrainingStrategy

LIMIT_S = 120.0  # for a message of another rank
_SPAWN = multiprocessing.get_context("spawn")  # TensorFlow's threads do not survive a fork


class Ring:
    """All-reduce and broadcast of float32 vectors among ranks, each with a process of its own."""

    def __init__(self, rank, ranks, predecessor, successor):
        """Join the neighbours, connections of which each serves one direction."""
        self.rank, self.ranks, self._predecessor, self._successor = rank, ranks, predecessor, successor

    def all_reduce(self, vector):
        """Add up all ranks' vectors, in place: N − 1 steps that add, N − 1 that hand the sums on."""
        import numpy as np

        chunks = np.array_split(vector, self.ranks)
        for step in range(self.ranks - 1):
            chunks[(self.rank - step - 1) % self.ranks] += self._exchange(
                chunks[(self.rank - step) % self.ranks]
            )
        for step in range(self.ranks - 1):
            chunks[(self.rank - step) % self.ranks][:] = self._exchange(
                chunks[(self.rank - step + 1) % self.ranks]
            )

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
        import numpy as np

        if not self._predecessor.poll(LIMIT_S):
            raise TimeoutError(f"Expected a message of another rank in {LIMIT_S:.0f} s. Received: none")
        return np.frombuffer(self._predecessor.recv_bytes(), "float32")


class Rank:
    """A rank's model and optimizer."""

    def __init__(self, build, ring):
        """Build them, and take rank 0's weights."""
        import numpy as np
        import tensorflow as tf

        from strategies.strategy import batch_signature, flatten, shard_gradients, unflatten
        from strategies.task import make_optimizer

        self.model, self._ring, optimizer = build(), ring, make_optimizer()
        variables = self.model.trainable_variables
        optimizer.build(variables)
        whole = np.concatenate([weight.ravel() for weight in self.model.get_weights()])
        ring.broadcast(whole)
        self.model.set_weights([part.numpy() for part in unflatten(whole, self.model.weights)])

        @tf.function(input_signature=batch_signature(self.model))
        def gradient(x, y):
            return flatten(shard_gradients(self.model, x, y))

        @tf.function
        def apply(mean):
            optimizer.apply(unflatten(mean, variables), variables)

        self._gradient, self._apply = gradient, apply

    def train(self, x, y, batch_size):
        """Train on this rank's part of every batch."""
        import numpy as np

        for begin in range(0, len(x), batch_size):
            batch = x[begin : begin + batch_size], y[begin : begin + batch_size]
            mine = [np.array_split(rows, self._ring.ranks)[self._ring.rank] for rows in batch]
            gradient = np.array(self._gradient(*mine))  # a copy: what TensorFlow returns is not to be written
            self._ring.all_reduce(gradient)
            self._apply(gradient / np.float32(self._ring.ranks))


def follow(control, build, rank, ranks, predecessor, successor):
    """Train when rank 0 says so, until it has ended. A rank's main function."""
    follower = Rank(build, Ring(rank, ranks, predecessor, successor))
    while True:
        try:
            follower.train(*control.recv())
        except EOFError:
            return


class Strategy(TrainingStrategy):
    """Rank 0, and whoever starts the others."""

    SYSTEM = "Process per tower, ring (Horovod)"
    THROUGH = "local sockets, rank to rank"
    FORMULA = "2·(N − 1)·P: each rank sends, and receives, 2·(N − 1)/N·P"
    WHY: ClassVar = {
        "batch norm": "each rank normalises by its own part; the moving averages are rank 0's",
        "synchronized": "the ranks know nothing of each other: synchronized=True does nothing",
        "last batch": "a mean of means: ranks with 2 and with 3 samples have the same weight",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        links = [_SPAWN.Pipe() for _ in range(towers)]  # link i leads from rank i to its successor
        self._processes, self._controls, theirs = [], [], []
        for rank in range(1, towers):
            control, other = _SPAWN.Pipe()
            ends = other, links[rank - 1][1], links[rank][0]
            arguments = (other, build, rank, towers, *ends[1:])
            self._processes.append(_SPAWN.Process(target=follow, args=arguments, daemon=True))
            self._processes[-1].start()
            self._controls.append(control)
            theirs += ends
        for connection in theirs:
            connection.close()  # theirs alone, so that they meet its end when we close ours
        self._ends = links[-1][1], links[0][0]
        self._leader = Rank(build, Ring(0, towers, *self._ends))
        self.model = self._leader.model

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * (towers - 1) * sizes.parameters

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`."""
        for control in self._controls:
            control.send((x, y, batch_size))
        self._leader.train(x, y, batch_size)

    def processes(self):
        """As `TrainingStrategy.processes`."""
        return [process.pid for process in self._processes]

    def close(self):
        """End the other ranks: they end when nobody is connected."""
        for connection in [*self._controls, *self._ends]:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
