"""Explicit averaging by a wrapped optimizer, and batches that are staged one step ahead.

System: `DataParallelOptimizer` and `DataParallelModel` of B. Zámečník at Rossum, and their
`StagingAreaCallback` (https://github.com/rossumai/keras-multi-gpu, 2017; also keras#7515).
Idea: the optimizer gets a list of losses, one per tower; it takes each one's gradients where that loss is,
and their mean on the parameter device. While a step computes, the next batch is copied to the towers: a
`StagingArea` is a buffer for one or two batches on the device.
Here: what was meant. `tf.raw_ops.Stage` is what StagingArea was made of.

What it got wrong:
- The published mean is of no use: `K.mean(K.stack(tower_grads, 0))` has no axis. It never ran: the wrapper's
  `get_updates` calls the inner optimizer's, which calls its own `get_gradients`. There the list of losses
  goes to `tf.gradients`, which adds them up: a step N times too long. `reduce="sum"` does the same here.
- The wrapper's `get_config` and `weights` return nothing. The authors call the model an incomplete sketch,
  and left it when Keras came to distribute gradients by itself.
- Slices are kuza55's: what does not divide is left out of the losses.
- A staged batch is one step old: the last one needs a step that stages nothing.
"""

import itertools
from typing import ClassVar

import tensorflow as tf

from strategies.strategy import SERVER, TrainingStrategy, batch_signature, equal_shards, tower_devices
from strategies.task import make_loss, make_optimizer

_AREAS = itertools.count()  # a staging area is known by its name, in all of the process


class DataParallelOptimizer:
    """An optimizer that takes a list of losses instead of one."""

    def __init__(self, optimizer, devices, reduce="mean"):
        """Wrap an optimizer; `reduce="sum"` does what the published code did."""
        self._optimizer, self._devices, self._divisor = optimizer, devices, len(devices)
        if reduce == "sum":
            self._divisor = 1

    def minimize(self, losses, tape, variables):
        """Update the variables by the towers' losses, which the persistent `tape` has recorded."""
        gradients = []  # [N][V]
        for device, loss in zip(self._devices, losses, strict=True):
            with tf.device(device):
                gradients.append(tape.gradient(loss, [variable.value for variable in variables]))
        with tf.device(SERVER):
            reduced = [tf.add_n(of_towers) / self._divisor for of_towers in zip(*gradients, strict=True)]
            self._optimizer.apply(reduced, variables)


class StagingArea:
    """A buffer on a device for one tower's part of the next batch."""

    def __init__(self, device):
        """Make an empty one."""
        self._device, self._name = device, f"staged_{next(_AREAS)}"

    def put(self, x, y):
        """Copy a part to the device."""
        with tf.device(self._device):
            tf.raw_ops.Stage(values=[x, y], capacity=2, shared_name=self._name)

    def get(self):
        """Take the oldest part out."""
        with tf.device(self._device):
            dtypes = [tf.float32, tf.int64]
            return tf.raw_ops.Unstage(dtypes=dtypes, capacity=2, shared_name=self._name)


class Strategy(TrainingStrategy):
    """One model, N losses, one update; each step stages the next batch."""

    SYSTEM = "Wrapped optimizer, staged batches (Rossum)"
    THROUGH = "the CPU, which holds the weights"
    FORMULA = "2·N·P: weights out, gradients in"
    WHY: ClassVar = {
        "batch norm": "each slice is normalised by itself; moving averages are moved once per tower",
        "synchronized": "the layers know of no other tower: synchronized=True does nothing",
        "last batch": "slices of one size: what is left over is in no loss",
    }

    def __init__(self, build, towers, reduce="mean"):
        """As `TrainingStrategy`; `reduce` is `DataParallelOptimizer`'s."""
        self._devices = tower_devices(towers)
        self._areas = [StagingArea(device) for device in self._devices]
        with tf.device(SERVER):
            self.model = build()
            inner = make_optimizer()
            inner.build(self.model.trainable_variables)
        self._optimizer = DataParallelOptimizer(inner, self._devices, reduce)
        signature = batch_signature(self.model)
        self._stage = tf.function(self._put, input_signature=signature)
        self._step_and_stage = tf.function(self._compute_and_put, input_signature=signature)
        self._last_step = tf.function(self._compute, input_signature=[])

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`, the batches one step ahead of their use."""
        cuts = [slice(begin, begin + batch_size) for begin in range(0, len(x), batch_size)]
        self._stage(x[cuts[0]], y[cuts[0]])
        for cut in cuts[1:]:
            self._step_and_stage(x[cut], y[cut])
        self._last_step()

    def _put(self, x, y):
        towers = len(self._devices)
        parts = zip(equal_shards(x, towers), equal_shards(y, towers), strict=True)
        for area, part in zip(self._areas, parts, strict=True):
            area.put(*part)

    def _compute_and_put(self, x, y):
        # Order of creation is order of effects: a part is taken out before the next one goes in.
        parts = [area.get() for area in self._areas]
        self._put(x, y)
        self._minimize(parts)

    def _compute(self):
        self._minimize([area.get() for area in self._areas])

    def _minimize(self, parts):
        losses = []
        with tf.GradientTape(persistent=True) as tape:
            for device, (x, y) in zip(self._devices, parts, strict=True):
                with tf.device(device):
                    x = tf.ensure_shape(x, self.model.input_shape)
                    losses.append(make_loss()(tf.ensure_shape(y, [None]), self.model(x, training=True)))
        self._optimizer.minimize(losses, tape, self.model.trainable_variables)

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * towers * sizes.parameters
