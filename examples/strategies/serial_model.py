"""The serial model is kept: its parameters are broadcast to towers, and it alone is saved.

System: `make_parallel` and `ModelMGPU` of A. Volkov (https://github.com/avolkov1/keras_experiments,
keras_exp/multigpu).
Idea: kuza55's towers, plus what a user of them lacked. The serial model stays at hand: the parallel one
passes every attribute with "save" or "load" in its name on to it. Batches are sliced on the parameter
device, so that a GPU gets its slice only. Parameters go from the first tower to the others by a broadcast
(NCCL's, in a variant).
Here: each tower is a replica that gets the serial model's weights before every step; one loss over all
outputs; the gradients are added up on the parameter device. Moving averages come back from the first tower.

What it got wrong:
- The last slice gets the rest of an indivisible batch; the source itself worries that its gradient may be an
  outlier. Under one loss it is none.
- The broadcast runs once, on variables that all towers share, where it changes nothing. The optimizers that
  synchronise gradients are off unless `syncopt=True`, and needless under one loss.
- Passing on by name: `__getattribute__` catches every attribute with "load" or "save" in it, and no other. A
  callback that reads `model.layers` or `get_weights` meets the parallel model.
- `contrib.nccl` and StagingArea did not work, and were taken out again (tensorflow#17908).
- `BatchNormalization` normalises by the tower's slice.
"""

from typing import ClassVar

import keras
import tensorflow as tf

from strategies.strategy import SERVER, TrainingStrategy, batch_signature, shards_with_rest, tower_devices
from strategies.task import make_loss, make_optimizer


class Strategy(TrainingStrategy):
    """A serial model on the CPU, a replica of it on every tower."""

    SYSTEM = "Serial model, broadcast (avolkov1)"
    THROUGH = "the CPU, which holds the serial model"
    FORMULA = "2·N·P + N·S + S + 2·O: weights and averages out, gradients in, averages back; outputs both ways"
    WHY: ClassVar = {
        "batch norm": "each slice is normalised by itself; the moving averages are the first tower's",
        "synchronized": "the towers are no replicas that Keras knows of: synchronized=True does nothing",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self._devices = tower_devices(towers)
        with tf.device(SERVER):
            self.model = build()
            self._optimizer = make_optimizer()
            self._optimizer.build(self.model.trainable_variables)
        self._replicas = []
        for device in self._devices:
            with tf.device(device):
                self._replicas.append(keras.models.clone_model(self.model))
        self.step = tf.function(self._step, input_signature=batch_signature(self.model))

    def _step(self, x, y):
        for device, replica in zip(self._devices, self._replicas, strict=True):
            with tf.device(device):
                self._copy(self.model.weights, replica.weights)
        with tf.device(SERVER):
            slices = shards_with_rest(x, len(self._devices))
        with tf.GradientTape() as tape:
            outputs = []
            for device, replica, part in zip(self._devices, self._replicas, slices, strict=True):
                with tf.device(device):
                    outputs.append(replica(part, training=True))
            with tf.device(SERVER):
                loss = make_loss()(y, tf.concat(outputs, 0))
        variables = [[v.value for v in replica.trainable_variables] for replica in self._replicas]
        gradients = tape.gradient(loss, variables)  # [N][V]
        with tf.device(SERVER):
            sums = [tf.add_n(of_towers) for of_towers in zip(*gradients, strict=True)]
            self._optimizer.apply(sums, self.model.trainable_variables)
            self._copy(self._replicas[0].non_trainable_variables, self.model.non_trainable_variables)

    @staticmethod
    def _copy(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            target.assign(source)

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        broadcast = towers * (sizes.parameters + sizes.statistics)
        return broadcast + towers * sizes.parameters + sizes.statistics + 2 * sizes.outputs
