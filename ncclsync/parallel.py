"""`@nccl_parallel`: from a model factory to a model that trains on towers."""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import keras
import tensorflow as tf

from ncclsync.communicator.timeouts import DEFAULT_TIMEOUT_S, check_timeout
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import other_libraries
from ncclsync.errors import NcclSyncError
from ncclsync.gradients.compression import check_compression
from ncclsync.gradients.nonfinite import OnNonFinite
from ncclsync.ops.buckets import DEFAULT_BUCKET_BYTES
from ncclsync.towers.drift import Sentinel
from ncclsync.towers.placement import check_arguments
from ncclsync.training.callbacks.large_batch import LargeBatch, follow
from ncclsync.training.keras_model import attach
from ncclsync.training.loop import Towers

Factory = TypeVar("Factory", bound=Callable[..., Any])


@overload
def nccl_parallel(factory: Factory) -> Factory: ...


@overload
def nccl_parallel(
    *,
    towers: int | None = None,
    devices: Sequence[str] | None = None,
    backend: str | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    sync_batch_norm: bool = False,
    batch_invariant_random: bool = False,
    compression: str | None = None,
    shard_optimizer: bool = False,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    preflight: bool = True,
    emergency_checkpoint: str | os.PathLike[str] | None = None,
    check_every: int | None = None,
    on_divergence: str = "raise",
    on_nonfinite: str | None = None,
    check_first_step: bool = False,
    recipe: LargeBatch | None = None,
) -> Callable[[Factory], Factory]: ...


def nccl_parallel(
    factory=None,
    *,
    towers=None,
    devices=None,
    backend=None,
    bucket_bytes=DEFAULT_BUCKET_BYTES,
    sync_batch_norm=False,
    batch_invariant_random=False,
    compression=None,
    shard_optimizer=False,
    timeout_s=DEFAULT_TIMEOUT_S,
    preflight=True,
    emergency_checkpoint=None,
    check_every=None,
    on_divergence="raise",
    on_nonfinite=None,
    check_first_step=False,
    recipe=None,
):
    """Decorate a model factory: the model it returns trains on several GPUs as on one.

    Each GPU holds a full replica of the model, a tower. A batch is split among the towers, their gradients
    are all-reduced, and every tower makes the same update. The batch size is the global one, as in Keras.

    Args:
        factory: any callable that returns a `keras.Model`; its arguments pass through.
        towers: the first so many GPUs, or so many CPU towers where the host has no GPU. None: every
            visible GPU; one CPU tower where there is none. As many CPU towers as there are cores, or more,
            let TensorFlow run an op on one thread (`tf.config.threading`), for the whole process, unless you
            have chosen how many, or TensorFlow runs already; a warning tells the latter.
        devices: just these instead, such as `["GPU:0", "GPU:2"]`.
        backend: "nccl" or "cpu"; None follows the devices. The choice is logged once, at INFO.
        bucket_bytes: gradients are all-reduced in buckets of up to this many bytes.
        sync_batch_norm: set `synchronized=True` on every `BatchNormalization` of the model, so that it
            normalises by the whole batch's mean and variance instead of each shard's; two more exchanges
            per layer.
        batch_invariant_random: let random layers and `keras.random` draw the numbers that one device would
            draw for these very samples, so that training with dropout does not depend on the number of
            towers. Each tower then draws for the whole batch. What cannot be had, such as a shuffle of the
            batch or `tf.random.normal`, is an error that names it. If False, each tower draws numbers of
            its own: reproducible for a given seed and number of towers.
        compression: "bfloat16": dense float32 gradients travel as bfloat16, half the bytes. What rounding
            takes from a tower's gradient is added to its next one, so that training is close to that of one
            device, though not equal.
        shard_optimizer: let each of N towers keep and update the N-th part of the optimizer's state, and send
            the others the weights that it has updated: 1/N of the optimizer's memory and work, and the same
            numbers. While towers train, the optimizer's own variables take no memory; who reads one, or
            saves the model, finds it whole. For optimizers that update each element of a weight by itself, as
            SGD and Adam do; others are an error. State of weights with sparse gradients stays whole on every
            tower.
        timeout_s: how long a collective of NCCL's may take, and before it its GPUs' own work, in seconds
            each. After 60 s a warning names what is pending; after `timeout_s` the step fails with a
            `NcclTimeoutError` that names the collective and the towers that are missing. None: no limit.
            Tower 0 keeps its weights, and the next `fit` joins the GPUs anew.
        preflight: whether known numbers are sent over each pair of GPUs' path before the first collective,
            so that a host that corrupts them is an error.
        emergency_checkpoint: a file to save the model to (".keras"), or its weights (".weights.h5"), whenever
            a collective has failed, before the error is raised.
        check_every: after every so many training steps, a fold of the bits of each variable that must be the
            same on all towers is computed where it lies, and compared. Any single flipped bit is found. A
            `DivergenceError` names variables, towers and the step. None: never.
        on_divergence: "raise" that error; or "repair": log it as a warning and send tower 0's values to all,
            unless it is tower 0 that differs from most others.
        on_nonfinite: what happens if a tower's own gradient, as a tape gives it and before it is reduced,
            holds a NaN or an infinity. "raise": a `NonFiniteError` names the tower, the variables and the
            rows of the batch that it had, and a file with these rows. "skip": a warning with the same
            words. Either way no weight, moving average or optimizer state of any tower changes, nor
            `iterations`; metrics count the batch, and a loss that is NaN shows in the epoch's. It takes the
            memory of one more copy of weights and optimizer state. A `LossScaleOptimizer` skips such steps
            itself, and nothing is done about those. None: Keras' behaviour.
        check_first_step: whether the first training step is run once more, op by op on a few rows of its
            batch, as one device does and as towers do, and gradients, weights and results are compared. A
            difference beyond rounding is a warning that names variables and the line. Nothing else changes.
            What runs Python, or draws from a state that TensorFlow hides, is not checked: a warning says so.
            `verify` always checks.
        recipe: a `LargeBatch`, which every `fit` of the model then follows, and `train_on_batch` too.

    Returns:
        The factory, decorated. It calls the original once and returns that very model, of the same class,
        with `model.towers`, a `Towers`.

    Raises:
        TypeError, ValueError: bad arguments, here or when the factory is called; a factory that returns
            something else than a Keras model, or one made under `tf.distribute`, or with an optimizer that
            Horovod wraps.
        NcclSyncError: Keras runs on another backend than TensorFlow; or horovodrun or mpirun have started
            several processes, and no devices are named.
        NcclUnavailableError: NCCL was chosen and cannot be used.
    """
    if keras.backend.backend() != "tensorflow":
        raise NcclSyncError(
            "Expected Keras to run on the TensorFlow backend. "
            f"Received: {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    check_arguments(towers, devices, backend, bucket_bytes)
    check_timeout(timeout_s)
    check_compression(compression)
    Sentinel(check_every, on_divergence)
    OnNonFinite(on_nonfinite)
    checkpoint = _checked_path(emergency_checkpoint)
    if recipe is not None and not isinstance(recipe, LargeBatch):
        raise TypeError(f"Expected recipe to be a LargeBatch. Received: {recipe!r}")
    flags = {
        "sync_batch_norm": sync_batch_norm,
        "batch_invariant_random": batch_invariant_random,
        "preflight": preflight,
        "shard_optimizer": shard_optimizer,
        "check_first_step": check_first_step,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"Expected {name} to be a bool. Received: {value!r}")
    if factory is None:
        return functools.partial(
            nccl_parallel,
            towers=towers,
            devices=devices,
            backend=backend,
            bucket_bytes=bucket_bytes,
            compression=compression,
            timeout_s=timeout_s,
            emergency_checkpoint=emergency_checkpoint,
            check_every=check_every,
            on_divergence=on_divergence,
            on_nonfinite=on_nonfinite,
            recipe=recipe,
            **flags,
        )
    if isinstance(factory, keras.Model) or not callable(factory):
        raise TypeError(
            f"Expected a function that returns a keras.Model. Received: {factory!r}. Of a model that is "
            "there already, as multi_gpu_model takes it: nccl_parallel(lambda: model)()"
        )

    @functools.wraps(factory)
    def build(*args, **kwargs):
        other_libraries.check_outside_strategy()
        replicas = Towers(
            towers,
            devices=devices,
            backend=backend,
            bucket_bytes=bucket_bytes,
            batch_invariant_random=batch_invariant_random,
            compression=compression,
            shard_optimizer=shard_optimizer,
            timeout_s=timeout_s,
            preflight=preflight,
            check_every=check_every,
            on_divergence=on_divergence,
            on_nonfinite=on_nonfinite,
            check_first_step=check_first_step,
        )
        try:
            with tf.device(f"/{replicas.devices[0]}"):
                model = factory(*args, **kwargs)
            _check_model(model)
        except BaseException:
            replicas.close()
            raise
        attach(model, replicas, sync_batch_norm, checkpoint)
        if recipe is not None:
            follow(model, recipe)
        return model

    # For `verify`, which builds the model on one device as well.
    build.nccl_parallel_options = {  # type: ignore[attr-defined]
        "bucket_bytes": bucket_bytes,
        "sync_batch_norm": sync_batch_norm,
        "batch_invariant_random": batch_invariant_random,
    }
    return build


def _checked_path(path: Any) -> pathlib.Path | None:
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Expected emergency_checkpoint to be a path. Received: {path!r}")
    if not os.fspath(path).endswith((".weights.h5", ".keras")):
        raise ValueError(
            "Expected emergency_checkpoint to end in .weights.h5 (weights) or .keras (the whole model). "
            f"Received: {path!r}"
        )
    return pathlib.Path(path).absolute()


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Expected the factory to return a keras.Model. "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    for owner in (model, getattr(model, "optimizer", None)):
        strategy = keras_compat.strategy_of(owner)
        if strategy is not None:
            raise ValueError(
                "Expected a model made and compiled outside tf.distribute. "
                f"Received: one made under {type(strategy).__name__}. {other_libraries.OTHER_WAY}"
            )
    other_libraries.check_not_horovods(getattr(model, "optimizer", None))
    towers = getattr(model, "towers", None)
    if isinstance(towers, Towers) and not towers.closed:
        raise ValueError(f"Expected the factory to make a new model. Received: one that has {towers} already")
