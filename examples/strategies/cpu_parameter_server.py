"""In-graph towers around a parameter server on the CPU.

System: TensorFlow's CIFAR-10 tutorial, cifar10_multi_gpu_train.py
(https://github.com/tensorflow/models, tutorials/image/cifar10; removed since).
Idea: the variables live on the CPU; every GPU runs a tower of the graph on a batch of its own;
`average_gradients` waits for all towers, takes the mean on the CPU and applies it there, once.
Here: the towers share the global batch in equal parts, where the tutorial dequeues a full batch for each.

What it got wrong:
- A tower's batch has a fixed size, so what does not fill N of them is left out.
- The mean gives each tower the same weight, whatever its number of samples.
- The batch size is per GPU: with N GPUs a step takes N · 128 samples, at the same learning rate.
  The schedule counts steps, but not the N: rates fall N times too late, in epochs.
- The loss it prints, and its summaries, are the last tower's.
- All weights go out to, and all gradients come in from, every GPU: the CPU's link carries 2·N times the
  model.
- A tower that normalises does so by its own part, and all move the same averages. (The tutorial's model uses
  local response normalisation, for which that does not matter.)
"""

from typing import ClassVar

import tensorflow as tf

from strategies.strategy import SERVER, TrainingStrategy, batch_signature, equal_shards, shard_gradients, tower_devices
from strategies.task import make_optimizer


class Strategy(TrainingStrategy):
    """One graph: N towers, one mean, one update."""

    SYSTEM = "CPU parameter server (TF tutorial)"
    THROUGH = "the CPU, which holds the weights"
    FORMULA = "2·N·P: weights out, gradients in"
    WHY: ClassVar = {
        "batch norm": "each part is normalised by itself; moving averages are moved once per tower",
        "synchronized": "the towers are no replicas that Keras knows of: synchronized=True does nothing",
        "last batch": "parts of one size: what is left over is dropped",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self._devices = tower_devices(towers)
        with tf.device(SERVER):
            self.model = build()
            self._optimizer = make_optimizer()
            self._optimizer.build(self.model.trainable_variables)
        self.step = tf.function(self._step, input_signature=batch_signature(self.model))

    def _step(self, x, y):
        parts = zip(equal_shards(x, len(self._devices)), equal_shards(y, len(self._devices)), strict=True)
        gradients = []  # [N][V]
        for device, (tower_x, tower_y) in zip(self._devices, parts, strict=True):
            with tf.device(device):
                gradients.append(shard_gradients(self.model, tower_x, tower_y))
        with tf.device(SERVER):
            means = [tf.add_n(of_towers) / len(self._devices) for of_towers in zip(*gradients, strict=True)]
            self._optimizer.apply(means, self.model.trainable_variables)

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * towers * sizes.parameters
