"""Shared layers: one model, called on a slice of the batch under each device's scope.

System: F. Chollet's tutorial "Keras as a simplified interface to TensorFlow" (April 2016,
https://blog.keras.io/keras-as-a-simplified-interface-to-tensorflow-tutorial.html); `make_parallel` of kuza55
(https://github.com/kuza55/keras-extras, utils/multi_gpu.py); `keras.utils.multi_gpu_model` (Keras 2.0.9,
since removed).
Idea: the towers are calls of the same layers, so there is one set of weights; the outputs are concatenated on
the CPU, and one loss over the whole batch gives the mean over all samples. Keras needs no change.
Here: `multi_gpu_model`'s slices. Keras 3 does not record device scopes in a functional model, so a layer
enters the tower's scope each time it is called.

What it got wrong:
- The tutorial gives every replica the whole input and averages their outputs; it trains nothing.
- kuza55's slices leave out what does not divide, while the targets keep it: the loss fails for shape.
  `multi_gpu_model` gives the rest to the last tower.
- `BatchNormalization` is called once per tower: each normalises by its slice, and moves the shared moving
  averages, N times per step.
- Every tower reads every weight from the device that holds it, in each step.
- `save` and `ModelCheckpoint` save the parallel model, slices and all; one must keep the first model to save
  that (keras#8123, #8446, #9548).
"""

from typing import ClassVar

import keras
import tensorflow as tf

from strategies.strategy import SERVER, TrainingStrategy, shards_with_rest, tower_devices
from strategies.task import compiled


class Tower(keras.layers.Layer):
    """Calls a model on one tower's slice of its input, on that tower's device."""

    def __init__(self, shared, tower, towers, **options):
        super().__init__(**options)
        self.shared, self.tower, self.towers = shared, tower, towers

    def call(self, inputs, training=None):
        """Return the outputs for the slice: [rows of it, classes]."""
        with tf.device(tower_devices(self.towers)[self.tower]):
            return self.shared(shards_with_rest(inputs, self.towers)[self.tower], training=training)

    def get_config(self):
        """What a saved file must tell of the layer."""
        own = {"shared": self.shared, "tower": self.tower, "towers": self.towers}
        return {**super().get_config(), **own}


class Strategy(TrainingStrategy):
    """A functional model around the shared one."""

    SYSTEM = "Shared layers (multi_gpu_model)"
    THROUGH = "the CPU, which holds the weights"
    FORMULA = "2·N·P + 2·O: weights out, gradients in; outputs in, their gradients out"
    WHY: ClassVar = {
        "batch norm": "each slice is normalised by itself; moving averages are moved once per tower",
        "synchronized": "the layers know of no other tower: synchronized=True does nothing",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        with tf.device(SERVER):
            self.model = build()
        inputs = keras.Input(self.model.input_shape[1:])
        outputs = [Tower(self.model, tower, towers)(inputs) for tower in range(towers)]
        self.parallel = compiled(keras.Model(inputs, keras.layers.Concatenate(axis=0)(outputs)))

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * towers * sizes.parameters + 2 * sizes.outputs

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`."""
        self.parallel.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    def save(self, path):
        """Save the model that was trained, the parallel one, as `ModelCheckpoint` does."""
        self.parallel.save(path)
