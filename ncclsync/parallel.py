"""Decorate a model factory by `@nccl_parallel`: its model trains on towers."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import keras
import tensorflow as tf

from ncclsync.communicator.timeouts import DEFAULT_TIMEOUT_S
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import other_libraries
from ncclsync.errors import NcclSyncError
from ncclsync.ops.buckets import DEFAULT_BUCKET_BYTES
from ncclsync.towers.options import TowerOptions, takes
from ncclsync.training.callbacks.large_batch import LargeBatch, follow
from ncclsync.training.keras_model import attach
from ncclsync.training.loop import Towers, towers_of
from ncclsync.training.processes import keep_in_step

Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(TowerOptions):
    """Declare the further options of a model.

    Attributes:
        sync_batch_norm: set `synchronized=True` on every `BatchNormalization` of the model, so that it
            normalises by the whole batch's mean and variance instead of each shard's; two more exchanges
            per layer.
        emergency_checkpoint: a file to save the model to (".keras"), or its weights (".weights.h5"), whenever
            a collective has failed, before the error is raised.
        recipe: a `LargeBatch`, which every `fit` of the model then follows, and `train_on_batch` too.
    """

    sync_batch_norm: bool = False
    emergency_checkpoint: str | os.PathLike[str] | None = None
    recipe: LargeBatch | None = None

    def __post_init__(self) -> None:
        """Check the options; make a file's path absolute now.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        super().__post_init__()
        if self.recipe is not None and not isinstance(self.recipe, LargeBatch):
            raise TypeError(f"Expected recipe to be a LargeBatch. Received: {self.recipe!r}")
        path = self.emergency_checkpoint
        if path is None:
            return
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Expected emergency_checkpoint to be a path. Received: {path!r}")
        if not os.fspath(path).endswith((".weights.h5", ".keras")):
            raise ValueError(
                "Expected emergency_checkpoint to end in .weights.h5 (weights) or .keras (the whole model). "
                f"Received: {path!r}"
            )
        object.__setattr__(self, "emergency_checkpoint", pathlib.Path(path).absolute())


@overload
def nccl_parallel(factory: Factory) -> Factory: ...


@overload
def nccl_parallel(
    *,
    towers: int | None = None,
    devices: Sequence[str] | None = None,
    backend: str | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    shards: int | None = None,
    shards_at_once: int = 1,
    shares: Sequence[int] | str | None = None,
    batch_invariant_random: bool = False,
    compression: str | None = None,
    shard_optimizer: bool = False,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    preflight: bool = True,
    check_every: int | None = None,
    audit_every: int | None = None,
    on_divergence: str = "raise",
    on_nonfinite: str | None = None,
    on_oom: str | None = None,
    check_first_step: bool = False,
    processes: bool = True,
    sync_batch_norm: bool = False,
    emergency_checkpoint: str | os.PathLike[str] | None = None,
    recipe: LargeBatch | None = None,
) -> Callable[[Factory], Factory]: ...


@takes(ModelOptions)
def nccl_parallel(factory=None, **options):
    """Decorate a model factory: the model it returns trains on several GPUs as on one.

    Each GPU holds a full replica of the model, a tower. A batch is split among the towers, their gradients
    are all-reduced, and every tower makes the same update. The batch size is the global one, as in Keras.

    Args:
        factory: any callable that returns a `keras.Model`; its arguments pass through.
        {options}

    Returns:
        The factory, decorated. It calls the original once and returns that very model, of the same class,
        with `model.towers`, a `Towers`; of a model that has an attribute of that name,
        `ncclsync.towers_of(model)` alone.

    Raises:
        TypeError, ValueError: bad arguments, here or when the factory is called; a factory that returns
            something else than a Keras model, or one made under `tf.distribute`, or with an optimizer that
            Horovod wraps.
        NcclSyncError: Keras runs on another backend than TensorFlow; or what a launcher of several processes has
            set contradicts itself.
        NcclUnavailableError: NCCL was chosen and cannot be used.
    """
    if keras.backend.backend() != "tensorflow":
        raise NcclSyncError(
            "Expected Keras to run on the TensorFlow backend. "
            f"Received: {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    chosen = ModelOptions.of("nccl_parallel", options)
    return functools.partial(_decorate, chosen) if factory is None else _decorate(chosen, factory)


def _decorate(options: ModelOptions, factory: Any) -> Any:
    if isinstance(factory, keras.Model) or not callable(factory):
        raise TypeError(
            f"Expected a function that returns a keras.Model. Received: {factory!r}. Of a model that is "
            "there already, as multi_gpu_model takes it: nccl_parallel(lambda: model)()"
        )

    @functools.wraps(factory)
    def build(*args, **kwargs):
        other_libraries.check_outside_strategy()
        replicas = Towers(**{field.name: getattr(options, field.name) for field in dataclasses.fields(TowerOptions)})
        try:
            with tf.device(f"/{replicas.devices[0]}"):
                model = factory(*args, **kwargs)
            _check_model(model)
        except BaseException:
            replicas.close()
            raise
        attach(model, replicas, options.sync_batch_norm, options.emergency_checkpoint)
        if replicas.meets_processes:
            keep_in_step(model, replicas)
        if options.recipe is not None:
            follow(model, options.recipe)
        return model

    # Options that `verify` and `plan` take over: they choose other towers.
    build.nccl_parallel_options = {  # type: ignore[attr-defined]
        name: getattr(options, name) for name in ("bucket_bytes", "sync_batch_norm", "batch_invariant_random")
    }
    return build


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected the factory to return a keras.Model. Received: {model!r} of type {type(model).__name__}"
        )
    for owner in (model, getattr(model, "optimizer", None)):
        strategy = keras_compat.strategy_of(owner)
        if strategy is not None:
            raise ValueError(
                "Expected a model made and compiled outside tf.distribute. "
                f"Received: one made under {type(strategy).__name__}. {other_libraries.OTHER_WAY}"
            )
    other_libraries.check_not_horovods(getattr(model, "optimizer", None))
    towers = towers_of(model)
    if towers is not None and not towers.closed:
        raise ValueError(f"Expected the factory to make a new model. Received: one that has {towers} already")
