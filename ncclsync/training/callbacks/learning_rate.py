"""Multiply a compiled model's learning rate by a factor, in the graph of each step.

The optimizer keeps the reference rate, for schedules, callbacks and files: nothing of the factor is ever
written into a variable of Keras'. It is multiplied where a step uses the rate. Neighbours: `large_batch.py`,
which says what the factor is to be; `compat.keras_optimizers`, which knows Keras' methods.
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
from ncclsync.errors import NcclSyncError
from ncclsync.semantics.shards import count_rows
from ncclsync.towers.step import leaves_of, python_step

_RATE, _VARIABLES = "_ncclsync_rate", "_ncclsync_rate_variables"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Hold what is traced into a step; see `LargeBatch`, whose arguments these are."""

    reference_batch_size: int
    rule: str
    momentum_correction: bool
    exclude_from_weight_decay: bool
    batch_size: int | None

    def scale(self, batch_size: Any) -> Any:
        """Return k, by which the reference rate is multiplied for batches of this size, a float32 scalar."""
        ratio = tf.cast(batch_size, tf.float32) / self.reference_batch_size
        return ratio if self.rule == "linear" else tf.sqrt(ratio)


class ScaledRate:
    """Scale the rate of a model's optimizer, as long as it is `active`.

    With k for the batch size and W updates of warm-up, update t has the reference rate times
    k - (k - 1) * (W - t) / W, then k; for k < 1 there is no warm-up. t is the optimizer's own count, which
    files hold.

    Attributes:
        rule: what is traced.
        active: a bool variable.
        effective: a float32 variable, the rate of the last update; NaN before the first.
        always: whether steps beside those of a `fit` are scaled too.
    """

    def __init__(self, model: keras.Model, rule: Rule) -> None:
        """Put it in place; the first step that is traced from now on has it.

        Args:
            model: compiled, with one optimizer.
            rule: what to trace.
        """
        self.rule = rule
        self.always = False
        self._model = model
        self._optimizer = keras_optimizers.innermost(model.optimizer)
        self._open = 0  # steps of the model's own that are being traced
        self._known = False
        self.active = _variable(False, "active")
        self.effective = _variable(float("nan"), "effective")
        self._largest = _variable(0.0, "batch_size")
        self._warmup = _variable(tf.constant(0, tf.int64), "warmup_updates")
        self._skipped = _variable(tf.constant(0, tf.int64), "skipped_updates")  # of the warm-up
        # The reference rate that the velocities have been made with.
        self._previous = _variable(self._reference(), "previous_rate")
        keras_optimizers.wrap_update(self._optimizer, self._wrap)
        outer = model.optimizer
        vars(outer)["save_own_variables"] = self._settled_before(outer.save_own_variables)
        vars(outer)["load_own_variables"] = self._told_after(outer.load_own_variables)

    @property
    def variables(self) -> list[tf.Variable]:
        """Return its own variables; no file holds them."""
        return [self.active, self.effective, self._largest, self._warmup, self._skipped, self._previous]

    @property
    def known(self) -> bool:
        """Return whether the length of the warm-up is known."""
        return self._known

    def is_for(self, optimizer: keras.Optimizer) -> bool:
        """Return whether it scales this optimizer's rate."""
        return keras_optimizers.innermost(optimizer) is self._optimizer

    def begin(self, warmup_epochs: float, steps_per_epoch: int, epoch: int = 0) -> None:
        """Set the warm-up; one that has ended before does not come again, nor does a part of one.

        Args:
            warmup_epochs: how long it is.
            steps_per_epoch: batches.
            epoch: how many epochs were trained before, if that is known.
        """
        made, length = int(self._updates()), int(self._warmup.numpy())
        updates = round(warmup_epochs * steps_per_epoch / self._batches_per_update())
        done = made + int(self._skipped.numpy())
        ended = done >= length if self._known else epoch >= warmup_epochs
        if made == 0:
            done = 0
        elif ended:
            done = max(updates, made)
        elif self._known:
            done = done * updates // length
        self._skipped.assign(done - made)
        self._warmup.assign(updates)
        self._largest.assign(0.0)
        self.active.assign(True)
        self._known = True

    def run(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Run the model's own step on a batch, or a tower's shard of it, having recorded how large it is."""
        if self.rule.batch_size is None:
            self._largest.assign(tf.maximum(self._largest, tf.cast(_batch_rows(data), tf.float32)))
        self._open += 1
        try:
            return step(data)
        finally:
            self._open -= 1

    def factor(self) -> tf.Tensor:
        """Return what the reference rate of the next update is multiplied by, a float32 scalar."""
        batch_size = self._largest if self.rule.batch_size is None else self.rule.batch_size
        k = self.rule.scale(tf.cast(batch_size, tf.float32) * self._batches_per_update())
        left = self._warmup - tf.minimum(self._updates() + self._skipped, self._warmup)
        part = tf.cast(left, tf.float32) / tf.cast(tf.maximum(self._warmup, 1), tf.float32)
        return tf.where(self.active, k - (k - tf.minimum(k, 1.0)) * part, 1.0)

    def settle(self) -> None:
        """Let the velocities be those of the rate that the optimizer has now, as the next update would."""
        if not self._corrects() or keras_optimizers.schedule_of(self._optimizer) is not None:
            return
        reference = self._reference()
        if float(reference) != float(self._previous.numpy()):
            self._correct(reference, self._previous)
            self._previous.assign(reference)

    def _wrap(self, apply: Callable) -> Callable:
        def scaled_apply(gradients, variables):
            if self.always and not self._open and not (self._known and self.rule.batch_size):
                raise NcclSyncError(
                    "Expected LargeBatch to have batch_size, and steps_per_epoch or warmup_epochs=0, for a "
                    "step that is not the model's own. Received: "
                    f"batch_size={self.rule.batch_size}, length of the warm-up known: {self._known}"
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
            # Velocities are kept at the reference rate r, so that those in a file are right for the rate
            # that it holds; the factor f multiplies what they change. With v = f * u, the corrected
            # v' = m * (f'r' / fr) * v - f'r' * g is u' = m * (r' / r) * u - r' * g: f corrects itself.
            self._correct(reference, self._previous_rate())
            self._previous.assign(reference)
            with keras_optimizers.increments_scaled(self._optimizer, variables, factor):
                update(gradients, variables, reference)

        return scaled_update

    def _correct(self, reference: tf.Tensor, previous: tf.Tensor) -> None:
        """Multiply velocities by r'/r. Of a rate of zero none are left, and there is nothing to divide."""
        ratio = tf.where(self.active, tf.math.divide_no_nan(reference, previous), 1.0)
        for velocity in keras_optimizers.velocities(self._optimizer):
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

    def _corrects(self) -> bool:
        return self.rule.momentum_correction and keras_optimizers.has_velocities(self._optimizer)

    def _previous_rate(self) -> tf.Tensor:
        schedule = keras_optimizers.schedule_of(self._optimizer)
        if schedule is None:
            return self._previous
        # By its count, which a file holds; a variable of ours it would not hold.
        last = keras_optimizers.batches_applied(self._optimizer) - self._batches_per_update()
        return tf.cast(schedule(tf.maximum(last, 0)), tf.float32)

    def _reference(self) -> tf.Tensor:
        return tf.cast(self._optimizer.learning_rate, tf.float32)

    def _updates(self) -> tf.Tensor:
        return tf.cast(self._optimizer.iterations, tf.int64)

    def _batches_per_update(self) -> int:
        return self._optimizer.gradient_accumulation_steps or 1

    def _settled_before(self, save: Callable) -> Callable:
        @functools.wraps(save)
        def save_settled(store):
            self.settle()
            save(store)

        return save_settled

    def _told_after(self, load: Callable) -> Callable:
        @functools.wraps(load)
        def load_and_tell(store):
            load(store)
            self._previous.assign(self._reference())

        return load_and_tell


def scaled_rate_of(model: keras.Model) -> ScaledRate | None:
    """Return what scales the rate of a model's optimizer, if something does."""
    rate = vars(model).get(_RATE)
    return rate if rate is not None and rate.is_for(model.optimizer) else None


def scale_rate(model: keras.Model, rule: Rule) -> ScaledRate:
    """Let the rate of a model's optimizer be scaled by this rule; once, however often it is asked for.

    Raises:
        ValueError: the model is not compiled, or it has more optimizers than one.
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
        model.make_train_function(force=True)  # what was traced before does not have it
    return rate


def _variable(value: Any, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=False, name=f"large_batch/{name}")


def _batch_rows(data: Any) -> tf.Tensor:
    """Return the rows of the batch, of which towers have a shard each."""
    context = ops.current_context()
    if context is None:
        return count_rows(next(leaf for leaf in leaves_of(data) if leaf.shape.rank != 0))
    return tf.identity(context.share.total)


def _not_decayed(model: keras.Model) -> Sequence[keras.Variable]:
    found = []
    for layer in keras_compat.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            found += [variable for variable in (layer.gamma, layer.beta) if variable is not None]
    return found + [variable for variable in model.trainable_variables if variable.name == "bias"]
