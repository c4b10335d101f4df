"""Train with large batches by a recipe: `LargeBatch`, a callback or `nccl_parallel(recipe=...)`.

The optimizer keeps the reference rate, for schedules, callbacks and files. The recipe's factor is never written into a
variable of Keras': the graph of each step multiplies the rate where it is used. `compat.keras_optimizers` knows Keras'
methods.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import keras_optimizers
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError, remedied
from ncclsync.sharding.shards import count_rows
from ncclsync.towers.programs import python_step
from ncclsync.training.arguments import check_whole, named_arguments

LOG_KEY = "effective_learning_rate"
_RATE, _VARIABLES = "_ncclsync_rate", "_ncclsync_rate_variables"


class LargeBatch(keras.callbacks.Callback):
    """Scale the learning rate with the batch size, with a gradual warm-up and momentum correction.

    The optimizer keeps the reference rate, which is right for batches of `reference_batch_size`. You compile with it,
    and schedules, `ReduceLROnPlateau` and files see it. Each update uses k times this rate, with
    k = batch size / `reference_batch_size`, or its square root; batches whose gradients the optimizer accumulates count
    as one. In the first `warmup_epochs` the factor grows linearly from 1 to k; a k below 1 holds from the start. The
    batch size is that of all towers together.

    Files are Keras' own and unscaled (without momentum correction velocities are scaled). A run that is saved and
    loaded goes on as without the stop, bit for bit, and continues the warm-up, by the optimizer's `iterations`. Without
    this recipe it goes on at the reference rate. A warm-up that has ended is not repeated when the batch size changes,
    nor in a new process that continues to count epochs, by `BackupAndRestore` or `fit(initial_epoch=...)`. Compiling
    the model again begins anew.

    The model must have one optimizer, that of `compile`. As a callback the recipe holds for its `fit`; after a `fit`
    that an exception has ended it holds until the end of the next `fit`. As `nccl_parallel(recipe=...)` it holds for
    every step of the model: `train_on_batch` before the first `fit` then needs `steps_per_epoch` or `warmup_epochs=0`,
    and your own loop, such as `Towers.run`, needs `batch_size`, too.

    After each epoch the logs hold, as "effective_learning_rate", the rate of the last update.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
    arXiv:1706.02677, sections 2.1 (the linear rule), 2.2 (gradual warm-up), 3, remark 2 (momentum correction)
    and 5.1 (weight decay).
    """

    @remedied("Write LargeBatch(reference_batch_size=256)")
    def __init__(
        self,
        reference_batch_size: int = 256,
        warmup_epochs: float = 5,
        rule: str = "linear",
        momentum_correction: bool = True,
        *,
        exclude_from_weight_decay: bool = False,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Describe the recipe; one object may serve several models.

        Args:
            reference_batch_size: the batch size that the compiled learning rate is right for.
            warmup_epochs: the length of the warm-up; 0: none.
            rule: "linear": k is the ratio of the batch sizes; "sqrt": its square root.
            momentum_correction: whether the velocity of `SGD` and `RMSprop`, which contains the rate, is multiplied by
                the new rate / the old rate whenever the warm-up, a schedule or a callback changes the rate. The moments
                of other optimizers do not contain the rate, and are not changed.
            exclude_from_weight_decay: whether the optimizer's own `weight_decay` leaves out gamma and beta of every
                `BatchNormalization`, and all biases, in addition to the variables that you have excluded. A layer's
                regularizer is a part of the loss, and stays.
            batch_size: samples of a batch. None: as many as the largest batch of this `fit` so far has.
            steps_per_epoch: batches of an epoch, for the length of the warm-up. None: as Keras finds from `fit`'s
                data.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        super().__init__()
        counts = {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch}
        for name, count in {"reference_batch_size": reference_batch_size, **counts}.items():
            if count is not None or name not in counts:
                check_whole(name, count, 1)
        if isinstance(warmup_epochs, bool) or not isinstance(warmup_epochs, (int, float, np.number)):
            raise TypeError(f"Expected warmup_epochs to be a number. Received: {warmup_epochs!r}")
        if not 0 <= warmup_epochs < float("inf"):
            raise ValueError(f"Expected warmup_epochs of at least 0. Received: {warmup_epochs!r}")
        if rule not in ("linear", "sqrt"):
            raise ValueError(f"Expected rule to be 'linear' or 'sqrt'. Received: {rule!r}")
        flags = {"momentum_correction": momentum_correction, "exclude_from_weight_decay": exclude_from_weight_decay}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"Expected {name} to be a bool. Received: {flag!r}")
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.batch_size = batch_size
        self.momentum_correction = momentum_correction
        self.exclude_from_weight_decay = exclude_from_weight_decay
        self.reference_batch_size, self.rule = reference_batch_size, rule
        self.traced = reference_batch_size, rule, batch_size, *flags.values()  # into a step
        self._begins = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Put the scaling into the step, before it is traced.

        Raises:
            ValueError: there is a warm-up and Keras does not know the number of batches of an epoch; or the model has
                no optimizer, or several.
        """
        if self._steps() is None:
            raise ValueError(
                "Expected data of a known number of batches, for a warm-up in epochs. Received: neither fit "
                "nor the data give it. Give steps_per_epoch= to fit or to LargeBatch, or warmup_epochs=0."
            )
        scale_rate(self.model, self)
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the scaling, after all callbacks' `on_train_begin`: one may have loaded the optimizer's state."""
        if self._begins:
            self._begins = False
            self._rate().begin(self.warmup_epochs, self._steps() or 0, epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the rate of the last update into the logs."""
        if logs is not None:
            logs[LOG_KEY] = float(self._rate().effective.numpy())

    def on_train_end(self, logs: Any = None) -> None:
        """Stop scaling, unless all steps of the model follow the recipe."""
        rate = self._rate()
        rate.active.assign(rate.always)

    def _rate(self) -> "ScaledRate":
        return scale_rate(self.model, self)

    def _steps(self) -> int | None:
        """Return the number of batches of an epoch; 0 without a warm-up; None if it is not known."""
        if self.warmup_epochs == 0:
            return 0
        return self.steps_per_epoch or self.params.get("steps")


class ScaledRate:
    """Scale the rate of a model's optimizer, while `active`.

    With k for the batch size and W updates of warm-up, update t takes the reference rate times
    k - (k - 1) * (W - t) / W, and after the warm-up times k; for k < 1 there is no warm-up. t is the optimizer's own
    count, which files hold.
    """

    def __init__(self, model: keras.Model, recipe: LargeBatch) -> None:
        """Wrap the update of a compiled model's optimizer; steps traced from now on are scaled."""
        self.recipe = recipe  # of the traced steps
        self.always = False  # whether steps outside a `fit` are scaled, too
        self.known = False  # whether the length of the warm-up is known
        self._model = model
        self.optimizer = keras_optimizers.innermost(model.optimizer)
        self._open = 0  # steps of the model that are being traced
        self.active = _variable(False, "active")
        self.effective = _variable(float("nan"), "effective")  # the rate of the last update; NaN before the first
        self._largest = _variable(0.0, "batch_size")
        self._warmup = _variable(tf.constant(0, tf.int64), "warmup_updates")
        self._skipped = _variable(tf.constant(0, tf.int64), "skipped_updates")  # of the warm-up
        self._previous = _variable(self._reference(), "previous_rate")  # the reference rate of the velocities
        # Files hold none of these.
        self.variables = [self.active, self.effective, self._largest, self._warmup, self._skipped, self._previous]
        keras_optimizers.wrap_update(self.optimizer, self._wrap)
        outer = model.optimizer
        vars(outer)["save_own_variables"] = tf_compat.wrapped(outer.save_own_variables, self._save_settled)
        vars(outer)["load_own_variables"] = tf_compat.wrapped(outer.load_own_variables, self._load_and_note)

    def begin(self, warmup_epochs: float, steps_per_epoch: int, epoch: int = 0) -> None:
        """Set the warm-up, of which no part is repeated; `epoch`: how many epochs were trained before, if known."""
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
        if self.recipe.batch_size is None:
            self._largest.assign(tf.maximum(self._largest, tf.cast(_batch_rows(data), tf.float32)))
        self._open += 1
        try:
            return step(data)
        finally:
            self._open -= 1

    def factor(self) -> tf.Tensor:
        """Return the factor of the next update's reference rate, a float32 scalar."""
        batch_size = self._largest if self.recipe.batch_size is None else self.recipe.batch_size
        ratio = tf.cast(batch_size, tf.float32) * self._batches_per_update() / self.recipe.reference_batch_size
        k = ratio if self.recipe.rule == "linear" else tf.sqrt(ratio)
        left = self._warmup - tf.minimum(self._updates() + self._skipped, self._warmup)
        part = tf.cast(left, tf.float32) / tf.cast(tf.maximum(self._warmup, 1), tf.float32)
        return tf.where(self.active, k - (k - tf.minimum(k, 1.0)) * part, 1.0)

    def _wrap(self, apply: Callable) -> Callable:
        def scaled_apply(gradients, variables):
            if self.always and not self._open and not (self.known and self.recipe.batch_size):
                raise NcclSyncError(
                    "Expected LargeBatch to have batch_size, and steps_per_epoch or warmup_epochs=0, for a "
                    "step that is not the model's own. Received: "
                    f"batch_size={self.recipe.batch_size}, length of the warm-up known: {self.known}"
                )
            if self.recipe.exclude_from_weight_decay:
                keras_optimizers.exclude_from_weight_decay(self.optimizer, _not_decayed(self._model))
            reference, factor = self._reference(), self.factor()
            replace = functools.partial(self._update, reference, factor)
            with keras_optimizers.update_replaced(self.optimizer, reference * factor, replace):
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
            with keras_optimizers.increments_scaled(self.optimizer, variables, factor):
                update(gradients, variables, reference)

        return scaled_update

    def _correct(self, reference: tf.Tensor, previous: tf.Tensor) -> None:
        """Multiply velocities by r'/r; after a rate of zero they are zero, and the ratio is 0."""
        ratio = tf.where(self.active, tf.math.divide_no_nan(reference, previous), 1.0)
        for velocity in keras_optimizers.velocities(self.optimizer):
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

    def _corrects(self) -> bool:
        return self.recipe.momentum_correction and keras_optimizers.has_velocities(self.optimizer)

    def _previous_rate(self) -> tf.Tensor:
        schedule = keras_optimizers.schedule_of(self.optimizer)
        if schedule is None:
            return self._previous
        # By the optimizer's count, which a file holds; it does not hold `_previous`.
        last = keras_optimizers.batches_applied(self.optimizer) - self._batches_per_update()
        return tf.cast(schedule(tf.maximum(last, 0)), tf.float32)

    def _reference(self) -> tf.Tensor:
        return tf.cast(self.optimizer.learning_rate, tf.float32)

    def _updates(self) -> tf.Tensor:
        return tf.cast(self.optimizer.iterations, tf.int64)

    def _batches_per_update(self) -> int:
        return self.optimizer.gradient_accumulation_steps or 1

    def _save_settled(self, save: Callable, store: Any) -> None:
        """Correct the velocities for the optimizer's current rate, as the next update would, before they are saved."""
        reference = self._reference()
        by_schedule = keras_optimizers.schedule_of(self.optimizer) is not None
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
    return rate if rate is not None and keras_optimizers.innermost(model.optimizer) is rate.optimizer else None


def scale_rate(model: keras.Model, recipe: LargeBatch) -> ScaledRate:
    """Scale the rate of a model's optimizer by this recipe, once for any number of calls.

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
    if rate is not None and rate.recipe.traced == recipe.traced:
        return rate
    if _RATE not in members:
        step = python_step(model.train_step)

        @functools.wraps(step)
        def train_step(data):
            rate = scaled_rate_of(model)
            return step(data) if rate is None else rate.run(step, data)

        members["train_step"] = train_step
    if rate is None:
        rate = ScaledRate(model, recipe)
    rate.recipe = recipe
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


def leave(model: keras.Model) -> None:
    """Let a model no longer follow the recipe of towers that were closed."""
    rate = scaled_rate_of(model)
    if rate is not None:
        rate.always = False
        rate.active.assign(False)


def follow(model: keras.Model, recipe: LargeBatch) -> None:
    """Let every step of a model follow a recipe in `fit` and `train_on_batch`; it may be compiled later."""
    fit, train_on_batch = model.fit, model.train_on_batch

    @functools.wraps(fit)
    def fit_by_recipe(*args, **kwargs):
        args, kwargs = named_arguments(fit, args, kwargs)
        callbacks = kwargs.pop("callbacks", None) or []
        if isinstance(callbacks, keras.callbacks.CallbackList):
            raise TypeError(f"Expected a list of callbacks, where a recipe is given. Received: {callbacks!r}")
        callbacks = keras.tree.flatten(callbacks)
        if any(isinstance(callback, LargeBatch) for callback in callbacks):
            raise ValueError(
                "Expected one LargeBatch. Received: one as a callback, beside that of nccl_parallel(recipe=...)"
            )
        _follow_always(model, recipe)
        return fit(*args, **kwargs, callbacks=[recipe, *callbacks])

    @functools.wraps(train_on_batch)
    def train_on_batch_by_recipe(*args, **kwargs):
        if not _follow_always(model, recipe).known:
            raise NcclSyncError(
                "Expected fit before train_on_batch, or LargeBatch(steps_per_epoch=...), to know how long "
                f"the warm-up is. Received: train_on_batch, with warmup_epochs={recipe.warmup_epochs}"
            )
        return train_on_batch(*args, **kwargs)

    keras_compat.replace_methods(model, {"fit": fit_by_recipe, "train_on_batch": train_on_batch_by_recipe})
    if getattr(model, "optimizer", None) is not None:
        _follow_always(model, recipe)


def _follow_always(model: keras.Model, recipe: LargeBatch) -> ScaledRate:
    rate = scale_rate(model, recipe)
    rate.always = True
    if not rate.known and (recipe.steps_per_epoch or recipe.warmup_epochs == 0):
        rate.begin(recipe.warmup_epochs, recipe.steps_per_epoch or 0)
    return rate
