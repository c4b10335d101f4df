"""Train with large batches by a recipe: `LargeBatch`, a callback or `nccl_parallel(recipe=...)`."""

import functools
from typing import Any

import keras

from ncclsync.errors import NcclSyncError
from ncclsync.training.arguments import named_arguments
from ncclsync.training.callbacks.learning_rate import Rule, ScaledRate, scale_rate

LOG_KEY = "effective_learning_rate"


class LargeBatch(keras.callbacks.Callback):
    """Scale the learning rate with the batch size, with a gradual warm-up and momentum correction.

    The optimizer keeps the reference rate, which is right for batches of `reference_batch_size`: it is what
    you compile with, and what schedules, `ReduceLROnPlateau` and files see. Each update uses k times that,
    with k = batch size / `reference_batch_size`, or the root of it; batches whose gradients the optimizer
    accumulates count as one. In the first `warmup_epochs` the factor grows by the same amount with each
    update, from 1 to k; a k below 1 holds from the start. The batch size is that of all towers together.

    Files are Keras' own, and nothing in them is scaled (velocities are, without momentum correction): saved
    and loaded, training goes on bit for bit as without the stop, with the warm-up where it was, by the
    optimizer's `iterations`. Without this recipe it goes on at the reference rate. A warm-up that has ended
    does not come again when the batch size changes; in a new process that is known if epochs are counted on,
    by `BackupAndRestore` or `fit(initial_epoch=...)`. A model that is compiled anew begins anew.

    The model has one optimizer, that of `compile`. As a callback the recipe holds for that `fit` (after one
    that an exception has ended, until the end of the next). Given to `nccl_parallel(recipe=...)` it holds for
    every step of the model: `train_on_batch` before the first `fit` then needs `steps_per_epoch` or
    `warmup_epochs=0`, and a loop of your own, such as `Towers.run`, `batch_size` too.

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
            reference_batch_size: samples, of the batches that the compiled learning rate is right for.
            warmup_epochs: how many epochs the warm-up takes; 0: none.
            rule: "linear": k is the ratio of the batch sizes; "sqrt": its root.
            momentum_correction: whether the velocity of `SGD` and `RMSprop` is multiplied by the ratio of the
                new rate and the old one whenever the rate changes, be it by the warm-up, a schedule or a
                callback. Their velocity contains the rate; the moments of other optimizers do not, and
                nothing is done about those.
            exclude_from_weight_decay: whether the optimizer's own `weight_decay` leaves alone gamma and beta
                of every `BatchNormalization`, and all biases, from then on, beside what you have excluded. A
                layer's regularizer is a part of the loss, and stays as it is.
            batch_size: samples of a batch. None: those of the largest batch that this `fit` has met so far.
            steps_per_epoch: batches of an epoch, for the length of the warm-up. None: what Keras knows of
                the data of `fit`.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        super().__init__()
        _check_count("reference_batch_size", reference_batch_size)
        for name, count in {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch}.items():
            if count is not None:
                _check_count(name, count)
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
        """Put the scaling into the step that is yet to be traced.

        Raises:
            ValueError: there is a warm-up, and Keras does not know how many batches an epoch has; or the
                model has not one optimizer.
        """
        if self._steps() is None:
            raise ValueError(
                "Expected data of a known number of batches, for a warm-up in epochs. Received: neither fit "
                "nor the data give it. Give steps_per_epoch= to fit or to LargeBatch, or warmup_epochs=0."
            )
        scale_rate(self.model, self.traced)
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin, once all callbacks have: one of them may have loaded the optimizer's state."""
        if self._begins:
            self._begins = False
            self._rate().begin(self.warmup_epochs, self._steps() or 0, epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the rate of the last update into the logs."""
        if logs is not None:
            logs[LOG_KEY] = float(self._rate().effective.numpy())

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the model's other steps alone, unless they are to have the recipe too."""
        rate = self._rate()
        rate.active.assign(rate.always)

    def _rate(self) -> ScaledRate:
        return scale_rate(self.model, self.traced)

    def _steps(self) -> int | None:
        """Return the batches of an epoch, 0 where nobody needs to know, or None."""
        if self.warmup_epochs == 0:
            return 0
        return self.steps_per_epoch or self.params.get("steps")


def follow(model: keras.Model, recipe: LargeBatch) -> None:
    """Let every step of a model follow a recipe: `fit` gets it as a callback, `train_on_batch` as well.

    Args:
        model: of any class; compiled by the time of its first step.
        recipe: what to follow.
    """
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

    model.fit, model.train_on_batch = fit_by_recipe, train_on_batch_by_recipe
    if getattr(model, "optimizer", None) is not None:
        _follow_always(model, recipe)


def _follow_always(model: keras.Model, recipe: LargeBatch) -> ScaledRate:
    rate = scale_rate(model, recipe.traced)
    rate.always = True
    if not rate.known and (recipe.steps_per_epoch or recipe.warmup_epochs == 0):
        rate.begin(recipe.warmup_epochs, recipe.steps_per_epoch or 0)
    return rate


def _check_count(name: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"Expected {name} to be an int. Received: {count!r}")
    if count < 1:
        raise ValueError(f"Expected {name} of at least 1. Received: {count}")
