"""Decorate a model factory by `@nccl_parallel`, so that its model trains on towers."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import keras
import tensorflow as tf

from ncclsync.compat import keras as keras_compat
from ncclsync.compat import keras_optimizers, other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError, remedied, shown
from ncclsync.ops import current_context
from ncclsync.ops.buckets import DEFAULT_BUCKET_BYTES
from ncclsync.sharding.holders import holders_of
from ncclsync.towers.options import Health, TowerOptions, takes
from ncclsync.towers.replicas import Copies
from ncclsync.training.callbacks.large_batch import LargeBatch, follow, leave
from ncclsync.training.keras_model import attach
from ncclsync.training.loop import Towers as Towers
from ncclsync.training.loop import idle_towers, towers_of
from ncclsync.training.processes import keep_in_step

logger = logging.getLogger("ncclsync")

# The options of decorators that are undone here and now; see `undecorated`.
_UNDONE: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("undone", default=None)
# The towers to be, within a decorated factory.
_MAKING: contextvars.ContextVar[Towers | None] = contextvars.ContextVar("making", default=None)

_COPIED = "_ncclsync_copied"  # an attribute of models that were loaded or copied, until they are trained
_ONE_DEVICE = "training on one device"  # what a warning is about, once for all of these
_WITHIN_WITH = (
    "trains on one device, though within `with Towers(...)`: these train what they are given to run, as "
    "towers.run(step, batch). For fit, decorate the factory: model = nccl_parallel(towers=2)(build_model)()"
)

Arguments = ParamSpec("Arguments")
Model = TypeVar("Model", bound=keras.Model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(TowerOptions):
    """Declare the further options of a model.

    Attributes:
        recipe: a `LargeBatch`, which the model's `fit` and `train_on_batch` then follow.
    """

    recipe: LargeBatch | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        super().__post_init__()
        if self.recipe is not None and not isinstance(self.recipe, LargeBatch):
            raise TypeError(
                f"Expected recipe to be a LargeBatch. Received: {self.recipe!r}. Write recipe=ncclsync.LargeBatch()"
            )


@overload
def nccl_parallel(factory: Callable[Arguments, Model]) -> Callable[Arguments, Model]: ...


@overload
def nccl_parallel(
    *,
    towers: int | None = None,
    devices: Sequence[str] | None = None,
    backend: str | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    shards: int | None = None,
    shares: Sequence[int] | str | None = None,
    exact: bool | Sequence[str] = False,
    compression: str | None = None,
    shard_optimizer: bool = False,
    on_oom: str | None = None,
    processes: bool = True,
    health: Health = Health(),
    recipe: LargeBatch | None = None,
) -> Callable[[Callable[Arguments, Model]], Callable[Arguments, Model]]: ...


@remedied("Write nccl_parallel(towers=4)(build_model)")
@takes(ModelOptions)
def nccl_parallel(factory=None, **options):
    """Decorate a model factory: the model that it returns trains on several GPUs as on one.

    Each GPU holds a full replica of the model, a tower. A batch is split among the towers, their gradients
    are all-reduced, and every tower makes the same update. The batch size is the global one, as in Keras.

    Args:
        factory: any callable that returns a `keras.Model`; its arguments pass through.
        {options}

    Returns:
        The decorated factory. It calls the original once and returns the model itself, with `model.towers`, a
        `Towers`. A model with its own attribute of that name keeps it; `ncclsync.towers_of(model)` returns the
        `Towers` of any model. Type checkers know `model.towers` after `assert isinstance(model, ncclsync.HasTowers)`.

    Raises:
        TypeError, ValueError: bad arguments, here or when the factory is called; the factory returns no Keras model,
            or a model made under `tf.distribute` or with an optimizer that Horovod wraps.
        NcclSyncError: Keras runs on another backend than TensorFlow; or the variables of a launcher of several
            processes contradict each other.
        NcclUnavailableError: NCCL was chosen and cannot be used.
    """
    if keras.backend.backend() != "tensorflow":
        raise NcclSyncError(
            "Expected Keras to run on the TensorFlow backend. "
            f"Received: {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    chosen = ModelOptions.of("nccl_parallel", options)
    return _Decorator(_decorate, chosen) if factory is None else _decorate(chosen, factory)


class _Decorator(functools.partial):
    """Decorate a factory; refuse to be a context, by a TypeError."""

    def __enter__(self) -> None:
        raise TypeError(
            "Expected nccl_parallel(...) to decorate a function. Received: a `with`. Write "
            "model = nccl_parallel(...)(build_model)(), where build_model makes, compiles and returns the model"
        )

    def __exit__(self, *_: object) -> None:
        pass


def _decorate(options: ModelOptions, factory: Any) -> Any:
    instead = ""
    if isinstance(factory, keras.Model):
        instead = "Of a model that is there already, as multi_gpu_model takes it: nccl_parallel(lambda: model)()"
    elif isinstance(factory, type) and issubclass(factory, keras.Model):
        instead = "Decorate a function that makes a model of the class, compiles and returns it"
    elif hasattr(factory, "nccl_parallel_options"):
        instead = "It is decorated already: decorate it once, with all options"
    elif isinstance(factory, (str, list, tuple)):
        instead = f"Write nccl_parallel(devices={[factory] if isinstance(factory, str) else factory!r})"
    elif isinstance(factory, tf.types.experimental.PolymorphicFunction):
        instead = "Leave out @tf.function: plain Python makes a model, and TensorFlow compiles its steps"
    elif not callable(factory):
        instead = f"Write nccl_parallel(towers={factory!r})" if hasattr(factory, "__index__") else "Decorate a function"
    if instead:
        raise TypeError(f"Expected a function that returns a keras.Model. Received: {factory!r}. {instead}")

    def build(*args, **kwargs):
        undone = _UNDONE.get()
        if undone is not None:
            undone.update(decorated.nccl_parallel_options)
            return factory(*args, **kwargs)
        other_libraries.check_outside_strategy()
        if not tf.executing_eagerly():
            raise NcclSyncError(
                "Expected a call of the decorated factory outside any tf.function. Received: a call inside one. Leave "
                "out @tf.function above @nccl_parallel: plain Python makes a model, and TensorFlow compiles its steps"
            )
        towers = Towers.of(options)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(towers.close)
            with tf.device(f"/{towers.devices[0]}"), _set(_MAKING, towers):
                model = factory(*args, **kwargs)
            _check_model(model, towers)
            if_it_fails.callback(keras_compat.restore_methods, model)
            attach(model, towers)
            leave(model)
            if towers.layout.meets_processes:
                keep_in_step(model, towers)
            if options.recipe is not None:
                follow(model, options.recipe)
            if_it_fails.pop_all()
        return model

    # `verify` and `plan` take over these options, and choose other towers.
    decorated: Any = functools.wraps(factory)(build)
    decorated.nccl_parallel_options = {"bucket_bytes": options.bucket_bytes, "exact": options.exact}
    for name in ("fit", "evaluate", "predict"):
        setattr(decorated, name, functools.partial(_raise_of_factory, name))
    return decorated


def _raise_of_factory(name: str, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        f"Expected {name} of a model. Received: {name} of the decorated factory. Call that first: "
        f"model = build_model(); model.{name}(...)"
    )


class Undecorated:
    """Call a factory without arguments and without `nccl_parallel`, on the factory itself or on what it calls."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        # The decorator's `nccl_parallel_options`; of a decorator within, once the factory was called.
        self.options: dict[str, Any] = {**getattr(factory, "nccl_parallel_options", {})}

    def __call__(self) -> Any:
        """Return what the factory returns: a model that trains on one device."""
        with _set(_UNDONE, self.options):
            return self._factory()


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Let a variable have a value meanwhile."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def _instead_of_returned(returned: Any) -> str:
    """Return what to write in a factory that returns no model."""
    if inspect.iscoroutine(returned):
        return "Write def, not async def"
    models = [one for one in keras.tree.flatten(returned) if isinstance(one, keras.Model)]
    if len(models) > 1:
        return "Of several models, as a GAN's, make one keras.Model with a train_step that trains them"
    if models:
        return "End it with `return model`, the model alone"
    if returned is None or isinstance(returned, (keras.Layer, str)):
        return "End it with `return model`"
    return "Decorate the function that makes the model, not its train_step or a function that trains it"


def _check_model(model: Any, opened: Towers) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Expected the factory to return a keras.Model, to be trained on towers. "
            f"Received: {shown(model)} of type {type(model).__name__}. {_instead_of_returned(model)}"
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
    if towers is None or towers.session.closed:
        return
    if towers.session.number > opened.session.number:
        why = "another decorated factory, called by this one, has put it there. Decorate one of the two"
    else:
        why = "an earlier call has put it there. Make a new model in each call, or first "
        why += "end its earlier towers: model.towers.close()"
    raise ValueError(f"Expected the factory to return a new model. Received: one that has {towers} already: {why}")


def _warn_of_training(make: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Make a model's train function by Keras' own; warn if it trains on one device where towers may be expected."""
    if towers_of(model) is None:
        making, idle = _MAKING.get(), idle_towers()
        parts = [(layer, towers_of(layer)) for layer in keras_compat.layers_of(model)]
        part, of_part = next(((one, its) for one, its in parts if its is not None and not its.closed), (None, None))
        if making is not None:
            making.session.warn_once(
                "A model is trained within the decorated factory, on one device. Let the factory make, load and "
                "compile it, and train what the factory returns: model = build_model(); model.fit(...)"
            )
        elif part is not None and of_part is not None and len(of_part) > 1:
            of_part.session.warn_once(
                f"{model.name} trains on one device, though it contains {part.name}, which has towers: only what a "
                "decorated factory returns trains on them. Decorate the function that makes and compiles the whole "
                "model, and no other; a part's own decorator is left out by build_part.__wrapped__()",
                about=_ONE_DEVICE,
            )
        elif idle is not None:
            idle.session.warn_once(f"{model.name} {_WITHIN_WITH}", about=_ONE_DEVICE)
        elif vars(model).pop(_COPIED, False):
            logger.warning(
                "A model that was loaded, copied or made of a configuration trains on one device. To train it on "
                "towers, return it from a decorated factory: "
                "nccl_parallel(towers=2)(lambda: keras.models.load_model(path))(), or "
                "nccl_parallel(towers=2)(lambda: model)()"
            )
    return make(model, *args, **kwargs)


def _warn_of_updates(
    apply: Callable[..., Any], optimizer: keras.Optimizer, grads: Any, trainable_variables: Any = None, **kwargs: Any
) -> Any:
    """Update variables; warn if that is on one device, where towers may be expected.

    Not of an optimizer's first update outside a graph, which may be one of zeros, to create its state.
    """
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if current_context() is None and not (tf.executing_eagerly() and keras_optimizers.is_first_update(optimizer)):
        variables = trainable_variables or keras_optimizers.built_for(optimizer, None)
        holders = [one for variable in variables for one in holders_of(tf_compat.backend_variable(variable))]
        session = next((one.session for one in holders if isinstance(one, Copies) and one.is_between_steps), None)
        idle = idle_towers()
        if session is not None:
            session.warn_once(
                f"Weights of a model on towers are trained on one device, outside its steps, at {user_line()}. Let "
                "model.fit or train_on_batch train it, with a train_step of your own if need be; or give the towers "
                "your step, a function that computes gradients and applies them: model.towers.run(step, batch). "
                "Another model with these weights needs a decorated factory of its own",
                about=_ONE_DEVICE,
            )
        elif idle is not None and not holders:
            idle.session.warn_once(f"The optimizer at {user_line()} {_WITHIN_WITH}", about=_ONE_DEVICE)
    return apply(optimizer, grads, trainable_variables, **kwargs)


def _mark_copies(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a model by a function of Keras' that loads or copies one; remember that."""
    model = make(*args, **kwargs)
    if _UNDONE.get() is None and isinstance(model, keras.Model):
        vars(model)[_COPIED] = True
    return model


keras_compat.copy_models_by(_mark_copies)
keras_compat.train_models_by(_warn_of_training)
keras_optimizers.update_by(_warn_of_updates)
