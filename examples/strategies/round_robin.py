"""Parameter servers between graphs: variables dealt out in turn, workers that do not wait for each other.

System: `tf.train.replica_device_setter` (TensorFlow 1, still in tf.compat.v1.train) and the distributed
TensorFlow around it: https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/replica_device_setter
Idea: each worker builds a graph of its own. The setter puts variable i on the task i modulo the number of
parameter servers, everything else on the worker. A worker reads the variables, computes, and sends
gradients; the server applies each as it comes.
Here: plain processes over local sockets, since Keras 3 has left `tf.distribute.ParameterServerStrategy` and
its coordinator behind: two servers, and a worker per tower. The first worker, the chief, is this process. The
workers share each batch.

What it got wrong:
- Nothing waits: a gradient is applied to weights that others have changed since it was computed (staleness),
  and no two runs are alike.
- N workers make N updates where one device makes one, each at the full learning rate, of a part of the
  samples.
- A pull meets variables before and after a push: there is no moment at which they belong together.
- Round robin counts variables, not bytes: the server with the largest one is the bottleneck
  (`GreedyLoadBalancingStrategy` came later).
- What is not trained, such as moving averages, is the last writer's.
"""

import multiprocessing
from typing import ClassVar

import numpy as np
import tensorflow as tf

from strategies import parameter_server
from strategies.strategy import TrainingStrategy, batch_signature, shard_gradients
from strategies.task import LEARNING_RATE, MOMENTUM

SERVERS = 2
LIMIT_S = 120.0  # for an answer of another process
_SPAWN = multiprocessing.get_context("spawn")  # TensorFlow's threads do not survive a fork


def receive(connection):
    """Return the next message.

    Raises:
        EOFError: the other process has ended.
        TimeoutError: nothing came in `LIMIT_S` seconds.
    """
    if not connection.poll(LIMIT_S):
        raise TimeoutError(f"Expected a message of another process in {LIMIT_S:.0f} s. Received: none")
    return connection.recv()


class Worker:
    """One worker's graph. `servers` are connections to the tasks that hold the variables."""

    def __init__(self, model, rank, workers, servers):
        self.model, self._rank, self._workers, self._servers = model, rank, workers, servers
        gradients = lambda x, y: shard_gradients(model, x, y)  # noqa: E731 - the graph's only line
        self._gradients = tf.function(gradients, input_signature=batch_signature(model))

    def pull(self):
        """Read all variables."""
        for server in self._servers:
            server.send(("pull",))
        variables = self.model.weights
        for task, server in enumerate(self._servers):
            for variable, value in zip(variables[task::SERVERS], receive(server), strict=True):
                variable.assign(value)

    def train(self, x, y, batch_size):
        """Train on this worker's part of every batch, without a look at the others."""
        for begin in range(0, len(x), batch_size):
            batch = x[begin : begin + batch_size], y[begin : begin + batch_size]
            mine = [np.array_split(rows, self._workers)[self._rank] for rows in batch]
            self.pull()
            gradients = iter(self._gradients(*mine))
            trainable = {id(variable) for variable in self.model.trainable_variables}
            pushed = [
                (next(gradients) if id(variable) in trainable else variable.value).numpy()
                for variable in self.model.weights
            ]
            for task, server in enumerate(self._servers):
                server.send(("push", pushed[task::SERVERS]))
        self.pull()  # answered after this worker's pushes: they have all been applied


def work(control, build, rank, workers, servers):
    """Train when the chief says so, until it has ended. A worker process' main function."""
    worker = Worker(build(), rank, workers, servers)
    while True:
        try:
            worker.train(*control.recv())
        except EOFError:
            return
        control.send("trained")


class Strategy(TrainingStrategy):
    """The chief: the first worker, and whoever starts the others."""

    SYSTEM = "Asynchronous parameter servers (TF 1)"
    THROUGH = "local sockets to 2 server processes"
    FORMULA = "2·N·(P + S): every worker pulls and pushes all"
    WHY: ClassVar = {
        "plain": "no update waits: N per step, each of a part of the samples at full rate, on stale weights",
        "batch norm": "no update waits; each part is normalised by itself; averages are the last writer's",
        "synchronized": "as with BatchNormalization alone",
        "last batch": "no update waits, in the last batch as in all",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self.model = build()
        trainable = {id(variable) for variable in self.model.trainable_variables}
        learns = [id(variable) in trainable for variable in self.model.weights]
        values = self.model.get_weights()
        mine, others = [], [[] for _ in range(towers - 1)]
        self._processes, given = [], []
        for task in range(SERVERS):
            pairs = [_SPAWN.Pipe() for _ in range(towers)]
            theirs = [theirs for _, theirs in pairs]
            dealt = values[task::SERVERS], learns[task::SERVERS]
            self._start(parameter_server.serve, theirs, *dealt, LEARNING_RATE, MOMENTUM)
            mine.append(pairs[0][0])
            for connections, (ours, _) in zip(others, pairs[1:], strict=True):
                connections.append(ours)
            given += theirs
        self._controls = []
        for rank, servers in enumerate(others, 1):
            control, theirs = _SPAWN.Pipe()
            self._start(work, theirs, build, rank, towers, servers)
            self._controls.append(control)
            given += [theirs, *servers]
        for connection in given:
            connection.close()  # theirs alone, so that they meet its end when we close ours
        self._servers = mine
        self._chief = Worker(self.model, 0, towers, mine)

    def _start(self, function, *arguments):
        self._processes.append(_SPAWN.Process(target=function, args=arguments, daemon=True))
        self._processes[-1].start()

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * towers * (sizes.parameters + sizes.statistics)

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`; returns when all workers have trained."""
        for control in self._controls:
            control.send((x, y, batch_size))
        self._chief.train(x, y, batch_size)
        for control in self._controls:
            receive(control)
        self._chief.pull()

    def processes(self):
        """As `TrainingStrategy.processes`."""
        return [process.pid for process in self._processes]

    def close(self):
        """End the workers and the servers: they end when nobody is connected."""
        for connection in [*self._controls, *self._servers]:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
