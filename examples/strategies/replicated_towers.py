"""Replicated towers: every device holds the model, the gradients are all-reduced, each applies them itself.

System: `SyncMultiGPUTrainerReplicated` of tensorpack (https://github.com/tensorpack/tensorpack,
tensorpack/graph_builder/training.py), after tf_cnn_benchmarks' `--variable_update=replicated`.
Idea: no parameter device. Each tower has variables and optimizer slots of its own; after one all-reduce the
same mean is on every device, and N equal updates keep the towers equal. Variables are synchronised from
tower 0 once, after their initialisation.
Here: the all-reduce is its textbook form, in the graph: each tower adds up its share of all gradients, then
takes the others' shares. tensorpack calls NCCL, or takes the mean on one device where that is not to be had.

What it got wrong:
- Each tower takes a batch of its own from the queue, and the mean gives each the same weight: towers with
  different numbers of samples give a mean of means.
- Moving averages are the towers' own and drift apart; tower 0's are saved. Batches are normalised by tower.
- Where NCCL cannot be used (a gradient that is not a float) the mean is taken on one device instead, with no
  more than a line in the log.
- Towers are told apart by the prefix of their variables' names; a name that the prefix occurs in twice is
  left out of the synchronisation, with a warning.
"""

from typing import ClassVar

import tensorflow as tf

from strategies.strategy import (
    TrainingStrategy,
    batch_signature,
    flatten,
    shard_gradients,
    shards_with_rest,
    tower_devices,
    unflatten,
)
from strategies.task import make_optimizer


def all_reduce_mean(vectors, devices):
    """Return the mean of some vectors on each of their devices: a reduce-scatter, then an all-gather.

    Args:
        vectors: [N] tensors [elements], on `devices`.
        devices: [N] names.
    """
    towers, elements = len(vectors), int(vectors[0].shape[0])
    bounds = [elements * tower // towers for tower in range(towers + 1)]
    means = []
    for tower, device in enumerate(devices):
        with tf.device(device):
            share = [vector[bounds[tower] : bounds[tower + 1]] for vector in vectors]
            means.append(tf.add_n(share) / towers)
    gathered = []
    for device in devices:
        with tf.device(device):
            gathered.append(tf.concat(means, 0))
    return gathered


class Strategy(TrainingStrategy):
    """N models, N optimizers, one graph."""

    SYSTEM = "Replicated towers (tensorpack)"
    THROUGH = "peer to peer"
    FORMULA = "2·(N − 1)·P: each tower sends, and receives, 2·(N − 1)/N·P"
    WHY: ClassVar = {
        "batch norm": "each tower normalises by its own part; the moving averages are tower 0's",
        "synchronized": "the towers are no replicas that Keras knows of: synchronized=True does nothing",
        "last batch": "a mean of means: towers count the same, whatever their numbers of samples",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self._devices = tower_devices(towers)
        self._towers = []  # [N] (model, optimizer)
        for device in self._devices:
            with tf.device(device):
                model, optimizer = build(), make_optimizer()
                optimizer.build(model.trainable_variables)
            self._towers.append((model, optimizer))
        self.model = self._towers[0][0]
        for model, _ in self._towers[1:]:
            model.set_weights(self.model.get_weights())
        self.step = tf.function(self._step, input_signature=batch_signature(self.model))

    def _step(self, x, y):
        towers = len(self._devices)
        parts = zip(shards_with_rest(x, towers), shards_with_rest(y, towers), strict=True)
        vectors = []
        for device, (model, _), part in zip(self._devices, self._towers, parts, strict=True):
            with tf.device(device):
                vectors.append(flatten(shard_gradients(model, *part)))
        means = all_reduce_mean(vectors, self._devices)
        for device, (model, optimizer), mean in zip(self._devices, self._towers, means, strict=True):
            with tf.device(device):
                variables = model.trainable_variables
                optimizer.apply(unflatten(mean, variables), variables)

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * (towers - 1) * sizes.parameters
