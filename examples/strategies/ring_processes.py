"""One process per tower, gradients by a ring all-reduce, the start by a broadcast.

System: Horovod (A. Sergeev, M. Del Balso 2018, https://arxiv.org/abs/1802.05799;
https://github.com/horovod/horovod), whose ring is Patarasuk's and Yuan's (2009) by way of Baidu.
Idea: each GPU has a process that runs the script unchanged. `DistributedOptimizer` averages the gradients
over all ranks before they are applied; a hook broadcasts rank 0's variables at the start. A ring moves
2·(N − 1)/N times the model through each link, however many ranks there are.
Here: plain processes, joined in a ring by local sockets; where mpi4py is installed and `mpirun` is found, the
same on MPI. Horovod 0.28, its last release, does not build with the TensorFlow that Keras 3 needs
(horovod#4290).

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

import numpy as np
import tensorflow as tf

from strategies.mpi_rank import MpiGroup
from strategies.ring import Ring
from strategies.strategy import TrainingStrategy, batch_signature, flatten, shard_gradients, unflatten
from strategies.task import make_optimizer

_SPAWN = multiprocessing.get_context("spawn")  # TensorFlow's threads do not survive a fork


class Rank:
    """A rank's model and optimizer."""

    def __init__(self, build, ring):
        """Build them, and take rank 0's weights."""
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
        for begin in range(0, len(x), batch_size):
            batch = x[begin : begin + batch_size], y[begin : begin + batch_size]
            mine = [np.array_split(rows, self._ring.ranks)[self._ring.rank] for rows in batch]
            gradient = np.array(self._gradient(*mine))  # a copy: what TensorFlow returns is not to be written
            self._ring.all_reduce(gradient)
            self._apply(gradient / np.float32(self._ring.ranks))


def follow(control, build, ring):
    """Train when rank 0 says so, until it has ended. A rank's main function."""
    follower = Rank(build, ring)
    while True:
        try:
            follower.train(*control.recv())
        except EOFError:
            return


def follow_by_sockets(control, build, rank, ranks, predecessor, successor):
    """Join the neighbours, then `follow`."""
    follow(control, build, Ring(rank, ranks, predecessor, successor))


class Strategy(TrainingStrategy):
    """Rank 0, and whoever starts the others."""

    SYSTEM = "Process per tower, ring (Horovod)"
    THROUGH = "MPI, rank to rank" if MpiGroup.available() else "local sockets, rank to rank"
    FORMULA = "2·(N − 1)·P: each rank sends, and receives, 2·(N − 1)/N·P"
    WHY: ClassVar = {
        "batch norm": "each rank normalises by its own part; the moving averages are rank 0's",
        "synchronized": "the ranks know nothing of each other: synchronized=True does nothing",
        "last batch": "a mean of means: ranks count the same, whatever their numbers of samples",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self._group = MpiGroup(build, towers) if MpiGroup.available() else SocketGroup(build, towers)
        self._leader = Rank(build, self._group.ring)
        self.model = self._leader.model

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * (towers - 1) * sizes.parameters

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`."""
        self._group.send((x, y, batch_size))
        self._leader.train(x, y, batch_size)

    def processes(self):
        """As `TrainingStrategy.processes`."""
        return self._group.processes()

    def close(self):
        """End the other ranks: they end when rank 0 is gone."""
        self._group.close()


class SocketGroup:
    """Processes of multiprocessing's, joined in a ring. `ring` is rank 0's end."""

    def __init__(self, build, ranks):
        """Start all ranks but the first, which is this process."""
        links = [_SPAWN.Pipe() for _ in range(ranks)]  # link i leads from rank i to its successor
        self._processes, self._controls, theirs = [], [], []
        for rank in range(1, ranks):
            control, other = _SPAWN.Pipe()
            ends = links[rank - 1][1], links[rank][0]
            arguments = (other, build, rank, ranks, *ends)
            self._processes.append(_SPAWN.Process(target=follow_by_sockets, args=arguments, daemon=True))
            self._processes[-1].start()
            self._controls.append(control)
            theirs += [other, *ends]
        for connection in theirs:
            connection.close()  # theirs alone, so that they meet its end when we close ours
        self._ends = links[-1][1], links[0][0]
        self.ring = Ring(0, ranks, *self._ends)

    def send(self, request):
        """Tell all other ranks."""
        for control in self._controls:
            control.send(request)

    def processes(self):
        """Return the ids of the other ranks' processes."""
        return [process.pid for process in self._processes]

    def close(self):
        """End them. Idempotent."""
        for connection in [*self._controls, *self._ends]:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
