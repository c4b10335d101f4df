"""Train with large batches by a recipe: `LargeBatch`, a callback or `nccl_parallel(recipe=...)`."""

import functools
from typing import Any

import keras

from ncclsync.compat import keras as keras_compat
from ncclsync.errors import NcclSyncError
from ncclsync.training.arguments import check_whole, named_arguments
from ncclsync.training.callbacks.learning_rate import Rule, ScaledRate, scale_rate, scaled_rate_of

LOG_KEY = "effective_learning_rate"


class LargeBatch(keras.callbacks.Callback):
    """Scale the learning rate with the batch size, with a gradual warm-up and momentum correction.

    The optimizer keeps the reference rate, which is right for batches of `reference_batch_size`. You compile with it,
    and schedules, `ReduceLROnPlateau` and files see it. Each update uses k times this rate, with
    k = batch size / `reference_batch_size`, or its square root; batches whose gradients the optimizer accumulates count
    as one. In the first `warmup_epochs` the factor grows linearly from 1 to k; a k below 1 holds from the start. The
    batch size is that of all towers together.

    Files are Keras' own and unscaled (without momentum correction velocities are scaled). A run that is saved and
    loaded goes on as without the stop, bit for bit, and continues the warm-up, by the optimizer's `iterations`. Without
    this recipe it goes on at the reference rate. A warm-up that has ended is not repeated when the batch size changes;
    a new process knows of it if it goes on counting epochs, by `BackupAndRestore` or `fit(initial_epoch=...)`.
    Compiling the model again begins anew.

    The model must have one optimizer, that of `compile`. As a callback the recipe holds for its `fit` (after a `fit`
    that an exception has ended, until the end of the next). As `nccl_parallel(recipe=...)` it holds for every step of
    the model: `train_on_batch` before the first `fit` then needs `steps_per_epoch` or `warmup_epochs=0`, and your own
    loop, such as `Towers.run`, needs `batch_size`, too.

    After each epoch the logs hold, as "effective_learning_rate", the rate of the last update.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
    arXiv:1706.02677, sections 2.1 (the linear rule), 2.2 (gradual warm-up), 3, remark 2 (momentum correction)
    and 5.1 (weight decay).
    """

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
                of other optimizers do not contain it, and are not changed.
            exclude_from_weight_decay: whether the optimizer's own `weight_decay` leaves out gamma and beta of every
                `BatchNormalization`, and all biases, in addition to the variables that you have excluded. A layer's
                regularizer is a part of the loss, and stays.
            batch_size: samples of a batch. None: those of the largest batch of this `fit` so far.
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
        if isinstance(warmup_epochs, bool) or not isinstance(warmup_epochs, (int, float)):
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
        self.traced = Rule(reference_batch_size, rule, momentum_correction, exclude_from_weight_decay, batch_size)
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
        scale_rate(self.model, self.traced)
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin, after all callbacks' `on_train_begin`, in which one may have loaded the optimizer's state."""
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

    def _rate(self) -> ScaledRate:
        return scale_rate(self.model, self.traced)

    def _steps(self) -> int | None:
        """Return the batches of an epoch; 0 without a warm-up; None if not known."""
        if self.warmup_epochs == 0:
            return 0
        return self.steps_per_epoch or self.params.get("steps")


def leave(model: keras.Model) -> None:
    """Let a model no longer follow a recipe that it was built with, before its towers were closed."""
    rate = scaled_rate_of(model)
    if rate is not None:
        rate.always = False
        rate.active.assign(False)


def follow(model: keras.Model, recipe: LargeBatch) -> None:
    """Let every step of a model, compiled by its first step, follow a recipe in `fit` and `train_on_batch`."""
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
    rate = scale_rate(model, recipe.traced)
    rate.always = True
    if not rate.known and (recipe.steps_per_epoch or recipe.warmup_epochs == 0):
        rate.begin(recipe.warmup_epochs, recipe.steps_per_epoch or 0)
    return rate
