"""Multiply a compiled model's learning rate by a factor, in the graph of each step.

The optimizer keeps the reference rate, for schedules, callbacks and files: the factor is never written into a variable
of Keras', but multiplied where a step uses the rate. Neighbours: `large_batch.py` chooses the factor;
`compat.keras_optimizers` knows Keras' methods.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import keras_optimizers
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError
from ncclsync.semantics.shards import count_rows
from ncclsync.towers.traced_step import python_step

_RATE, _VARIABLES = "_ncclsync_rate", "_ncclsync_rate_variables"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Hold the arguments of `LargeBatch` that are traced into a step."""

    reference_batch_size: int
    rule: str
    momentum_correction: bool
    exclude_from_weight_decay: bool
    batch_size: int | None

    def scale(self, batch_size: Any) -> Any:
        """Return k, the factor of the reference rate for batches of this size, a float32 scalar."""
        ratio = tf.cast(batch_size, tf.float32) / self.reference_batch_size
        return ratio if self.rule == "linear" else tf.sqrt(ratio)


class ScaledRate:
    """Scale the rate of a model's optimizer, while `active`.

    With k for the batch size and W updates of warm-up, update t takes the reference rate times
    k - (k - 1) * (W - t) / W, and after the warm-up times k; for k < 1 there is no warm-up. t is the optimizer's own
    count, which files hold.

    Attributes:
        rule: the traced arguments.
        active: a bool variable.
        effective: a float32 variable, the rate of the last update; NaN before the first.
        always: whether steps outside a `fit` are scaled, too.
        known: whether the length of the warm-up is known.
        variables: all of its variables, which files do not hold.
    """

    def __init__(self, model: keras.Model, rule: Rule) -> None:
        """Wrap the update of a compiled model's optimizer; steps traced from now on are scaled."""
        self.rule = rule
        self.always = False
        self.known = False
        self._model = model
        self._optimizer = keras_optimizers.innermost(model.optimizer)
        self._open = 0  # steps of the model that are being traced
        self.active = _variable(False, "active")
        self.effective = _variable(float("nan"), "effective")
        self._largest = _variable(0.0, "batch_size")
        self._warmup = _variable(tf.constant(0, tf.int64), "warmup_updates")
        self._skipped = _variable(tf.constant(0, tf.int64), "skipped_updates")  # of the warm-up
        # The reference rate of the velocities.
        self._previous = _variable(self._reference(), "previous_rate")
        self.variables = [self.active, self.effective, self._largest, self._warmup, self._skipped, self._previous]
        keras_optimizers.wrap_update(self._optimizer, self._wrap)
        outer = model.optimizer
        vars(outer)["save_own_variables"] = tf_compat.wrapped(outer.save_own_variables, self._save_settled)
        vars(outer)["load_own_variables"] = tf_compat.wrapped(outer.load_own_variables, self._load_and_note)

    def is_for(self, optimizer: keras.Optimizer) -> bool:
        """Return whether it scales this optimizer's rate."""
        return keras_optimizers.innermost(optimizer) is self._optimizer

    def begin(self, warmup_epochs: float, steps_per_epoch: int, epoch: int = 0) -> None:
        """Set the warm-up; a warm-up that has ended, or a part of it, is not repeated.

        `epoch` is the number of epochs trained before, as far as known.
        """
        made, length = int(self._updates()), int(self._warmup.numpy())
        updates = round(warmup_epochs * steps_per_epoch / self._batches_per_update())
        done = made + int(self._skipped.numpy())
        ended = done >= length if self.known else epoch >= warmup_epochs
        if made == 0:
            done = 0
        elif ended:
            done = max(updates, made)
        elif self.known:
            done = done * updates // length
        self._skipped.assign(done - made)
        self._warmup.assign(updates)
        self._largest.assign(0.0)
        self.active.assign(True)
        self.known = True

    def run(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Record the batch size, then run the model's step on the batch, or on a tower's shard of it."""
        if self.rule.batch_size is None:
            self._largest.assign(tf.maximum(self._largest, tf.cast(_batch_rows(data), tf.float32)))
        self._open += 1
        try:
            return step(data)
        finally:
            self._open -= 1

    def factor(self) -> tf.Tensor:
        """Return the factor of the next update's reference rate, a float32 scalar."""
        batch_size = self._largest if self.rule.batch_size is None else self.rule.batch_size
        k = self.rule.scale(tf.cast(batch_size, tf.float32) * self._batches_per_update())
        left = self._warmup - tf.minimum(self._updates() + self._skipped, self._warmup)
        part = tf.cast(left, tf.float32) / tf.cast(tf.maximum(self._warmup, 1), tf.float32)
        return tf.where(self.active, k - (k - tf.minimum(k, 1.0)) * part, 1.0)

    def _wrap(self, apply: Callable) -> Callable:
        def scaled_apply(gradients, variables):
            if self.always and not self._open and not (self.known and self.rule.batch_size):
                raise NcclSyncError(
                    "Expected LargeBatch to have batch_size, and steps_per_epoch or warmup_epochs=0, for a "
                    "step that is not the model's own. Received: "
                    f"batch_size={self.rule.batch_size}, length of the warm-up known: {self.known}"
                )
            if self.rule.exclude_from_weight_decay:
                keras_optimizers.exclude_from_weight_decay(self._optimizer, _not_decayed(self._model))
            reference, factor = self._reference(), self.factor()
            replace = functools.partial(self._update, reference, factor)
            with keras_optimizers.update_replaced(self._optimizer, reference * factor, replace):
                return apply(gradients, variables)

        return scaled_apply

    def _update(self, reference: tf.Tensor, factor: tf.Tensor, update: Callable) -> Callable:
        def scaled_update(gradients, variables, rate):
            self.effective.assign(rate)
            if not self._corrects():
                update(gradients, variables, rate)
                return
            # Velocities are kept at the reference rate r, so that in a file they fit the file's rate; the factor f
            # multiplies the change of the weights. With v = f * u, the corrected
            # v' = m * (f'r' / fr) * v - f'r' * g is u' = m * (r' / r) * u - r' * g: f corrects itself.
            self._correct(reference, self._previous_rate())
            self._previous.assign(reference)
            with keras_optimizers.increments_scaled(self._optimizer, variables, factor):
                update(gradients, variables, reference)

        return scaled_update

    def _correct(self, reference: tf.Tensor, previous: tf.Tensor) -> None:
        """Multiply velocities by r'/r. A rate of zero has left zeros, and the ratio is 0."""
        ratio = tf.where(self.active, tf.math.divide_no_nan(reference, previous), 1.0)
        for velocity in keras_optimizers.velocities(self._optimizer):
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

    def _corrects(self) -> bool:
        return self.rule.momentum_correction and keras_optimizers.has_velocities(self._optimizer)

    def _previous_rate(self) -> tf.Tensor:
        schedule = keras_optimizers.schedule_of(self._optimizer)
        if schedule is None:
            return self._previous
        # By the optimizer's count, which a file holds, unlike a variable of ours.
        last = keras_optimizers.batches_applied(self._optimizer) - self._batches_per_update()
        return tf.cast(schedule(tf.maximum(last, 0)), tf.float32)

    def _reference(self) -> tf.Tensor:
        return tf.cast(self._optimizer.learning_rate, tf.float32)

    def _updates(self) -> tf.Tensor:
        return tf.cast(self._optimizer.iterations, tf.int64)

    def _batches_per_update(self) -> int:
        return self._optimizer.gradient_accumulation_steps or 1

    def _save_settled(self, save: Callable, store: Any) -> None:
        """Correct the velocities for the optimizer's current rate, as the next update would, before they are saved."""
        reference = self._reference()
        by_schedule = keras_optimizers.schedule_of(self._optimizer) is not None
        if self._corrects() and not by_schedule and float(reference) != float(self._previous.numpy()):
            self._correct(reference, self._previous)
            self._previous.assign(reference)
        save(store)

    def _load_and_note(self, load: Callable, store: Any) -> None:
        load(store)
        self._previous.assign(self._reference())


def scaled_rate_of(model: keras.Model) -> ScaledRate | None:
    """Return the `ScaledRate` of a model's optimizer; None if it has none."""
    rate = vars(model).get(_RATE)
    return rate if rate is not None and rate.is_for(model.optimizer) else None


def scale_rate(model: keras.Model, rule: Rule) -> ScaledRate:
    """Scale the rate of a model's optimizer by this rule; further calls do not scale it again.

    Raises:
        ValueError: the model is not compiled, or has several optimizers.
    """
    members = vars(model)
    owned = {
        id(keras_optimizers.innermost(one)): one
        for one in (getattr(model, "optimizer", None), *members.values())
        if isinstance(one, keras.Optimizer)
    }
    if getattr(model, "optimizer", None) is None or len(owned) > 1 or hasattr(model.optimizer, "optimizers"):
        raise ValueError(
            "Expected a model compiled with one optimizer, and no other. "
            f"Received: {[one.name for one in owned.values()]}"
        )
    rate = scaled_rate_of(model)
    if rate is not None and rate.rule == rule:
        return rate
    if _RATE not in members:
        step = python_step(model.train_step)

        @functools.wraps(step)
        def train_step(data):
            rate = scaled_rate_of(model)
            return step(data) if rate is None else rate.run(step, data)

        members["train_step"] = train_step
    if rate is None:
        rate = ScaledRate(model, rule)
    rate.rule = rule
    # Past Keras' bookkeeping: these are no part of the model's files.
    members[_RATE], members[_VARIABLES] = rate, rate.variables
    if model.train_function is not None:
        model.make_train_function(force=True)  # older traces do not scale
    return rate


def _variable(value: Any, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=False, name=f"large_batch/{name}")


def _batch_rows(data: Any) -> tf.Tensor:
    """Return the rows of the whole batch."""
    context = ops.current_context()
    if context is None:
        return count_rows(next(leaf for leaf in tf.nest.flatten(data) if leaf is not None and leaf.shape.rank != 0))
    return tf.identity(context.share.total)


def _not_decayed(model: keras.Model) -> Sequence[keras.Variable]:
    found = []
    for layer in keras_compat.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            found += [variable for variable in (layer.gamma, layer.beta) if variable is not None]
    return found + [variable for variable in model.trainable_variables if variable.name == "bias"]
