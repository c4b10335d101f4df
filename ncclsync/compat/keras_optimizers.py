"""Wrap the interfaces of Keras' optimizers that Keras does not promise to keep."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat


def accumulates(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer itself accumulates gradients over several batches."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def update_by(replacement: Callable[..., Any]) -> None:
    """Let `replacement(apply, optimizer, ...)` stand for `apply` of all Keras' optimizers, for good."""
    owner = next(cls for cls in keras.Optimizer.__mro__ if "apply" in vars(cls))
    keras_compat.replace_for_good([(owner, "apply")], replacement)


def is_first_update(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer has counted no update yet; outside a graph."""
    return not optimizer.built or not int(optimizer._iterations)


def update_is_due(optimizer: keras.Optimizer) -> tf.Tensor:
    """Return, as a bool scalar, whether the next `apply` of an accumulating optimizer updates."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def built_for(optimizer: keras.Optimizer, variables: Sequence[Any] | None) -> list[Any]:
    """Build an optimizer for variables as `apply` does; return the variables that `apply` updates."""
    if variables is None:
        return list(optimizer._trainable_variables)
    variables = list(variables)
    if not optimizer.built:
        # With which the variables' paths begin, but for those that `apply` of a `MultiOptimizer` builds.
        scoped = not isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ()))
        with keras.name_scope(optimizer.name, caller=optimizer) if scoped else contextlib.nullcontext():
            optimizer.build(variables)
        optimizer.built = True
    return variables


def accumulators(optimizer: keras.Optimizer, variables: Sequence[Any] | None = None) -> list[tf.Variable]:
    """Return the variables in which an accumulating optimizer accumulates each variable's gradients; None: all's.

    Raises:
        ValueError: Keras' own, for a variable that the optimizer was not built for.
    """
    optimizer._check_variables_are_known(variables or ())
    made = optimizer._accumulated_gradients
    chosen = made if variables is None else [made[optimizer._get_variable_index(variable)] for variable in variables]
    return [tf_compat.backend_variable(accumulator) for accumulator in chosen]


def overwritten(optimizer: keras.Optimizer, variables: Sequence[Any] | None) -> set[int]:
    """Return the indices of variables, of None those of an optimizer, whose gradient `apply` takes as their new value.

    So it is with the scales of float8.
    """
    variables = optimizer._trainable_variables if variables is None else variables
    return {i for i, variable in enumerate(variables) if getattr(variable, "overwrite_with_gradient", False)}


def accumulators_emptied(optimizer: keras.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Let `apply` read zeros from an optimizer's accumulators of sums, and leave writing them to the caller."""
    kept, found = overwritten(optimizer, None), enumerate(optimizer._accumulated_gradients)
    return tf_compat.members_replaced(
        optimizer,
        _accumulated_gradients=[one if i in kept else tf.zeros(one.shape, one.dtype) for i, one in found],
        _backend_increment_gradient_accumulators=lambda *_: None,
        _backend_reset_gradient_accumulators=lambda *_: None,
    )


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer that makes the updates, inside any wrappers."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def schedule_of(optimizer: keras.Optimizer) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Return the schedule of an optimizer's rate by the number of batches; None without one."""
    schedule = optimizer._learning_rate
    return schedule if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) else None


def batches_applied(optimizer: keras.Optimizer) -> tf.Tensor:
    """Return the count that schedules get: of batches, also if several batches make an update."""
    return tf.convert_to_tensor(optimizer._iterations)


def updates_wrapped(replacement: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let `replacement` stand for an optimizer's work between unscaling gradients and applying constraints.

    That is `_backend_apply_gradients(grads, variables)`: it clips, decays, updates and averages. See `methods_wrapped`.
    """
    return tf_compat.methods_wrapped(tf_compat.loaded_classes(keras.Optimizer), "_backend_apply_gradients", replacement)


def has_wrapped_update(optimizer: keras.Optimizer) -> bool:
    """Return whether `wrap_update` was called."""
    return "_backend_apply_gradients" in vars(optimizer)


def wrap_update(optimizer: keras.Optimizer, wrap: Callable[[Callable], Callable]) -> None:
    """Replace, for good, the work of this optimizer's `apply` on whole gradients by `wrap` of it.

    It takes gradients and variables, and makes the update with weight decay and clipping, or accumulates.
    """
    vars(optimizer)["_backend_apply_gradients"] = wrap(optimizer._backend_apply_gradients)


def apply_gradients(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Update like the method that `updates_wrapped` replaces: without unscaling, constraints and counting."""
    optimizer._backend_apply_gradients(list(gradients), list(variables))


# What a user's own optimizer may define without touching gradients before its update.
_OF_UPDATES = frozenset({"build", "from_config", "get_config", "update_step"})


def applies_untouched(optimizer: keras.Optimizer) -> bool:
    """Return whether gradients reach `updates_wrapped` as `apply` got them, and are not clipped there."""
    touches = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor", "gradient_accumulation_steps")
    if any(getattr(optimizer, name) for name in touches):
        return False
    base, own = keras.Optimizer.__mro__, {name for name, one in vars(optimizer).items() if inspect.isroutine(one)}
    for cls in type(optimizer).__mro__:
        if cls not in base and cls.__module__.partition(".")[0] != "keras":
            own |= {name for name in vars(cls) if not name.startswith("__")} - _OF_UPDATES
    # Keras calls these, be they public or not.
    return type(optimizer).apply.__module__.startswith("keras.src.optimizers.base_optimizer") and not any(
        name in vars(one) for name in own for one in base
    )


def clipped(optimizer: keras.Optimizer, gradients: Sequence[Any]) -> list[Any]:
    """Return gradients as an optimizer clips them."""
    return list(optimizer._clip_gradients(list(gradients)))


def averaged_beside(optimizer: keras.Optimizer, variables: Sequence[Any]) -> list[Any]:
    """Return the variables that an optimizer averages where it updates these: all others, though without a gradient."""
    given = {id(tf_compat.backend_variable(one)) for one in variables}
    known = optimizer._trainable_variables if optimizer.use_ema else ()
    return [one for one in known if id(tf_compat.backend_variable(one)) not in given]


def updating_some(optimizer: keras.Optimizer, variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer clip nothing, and average these variables alone, for a while."""
    members: dict[str, Any] = {"_clip_gradients": lambda gradients: gradients}
    if optimizer.use_ema:  # Keras averages all variables in each update
        some = [optimizer._get_variable_index(variable) for variable in variables]
        for name in ("_trainable_variables", "_model_variables_moving_average"):
            members[name] = [getattr(optimizer, name)[i] for i in some]
    return tf_compat.members_replaced(optimizer, **members)


def update_replaced(
    optimizer: keras.Optimizer, rate: tf.Tensor, replace: Callable[[Callable], Callable]
) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer read `rate` as its learning rate, and make its updates by `replace(update)`.

    `update` takes gradients, variables and the learning rate; it is called when an update is due.
    """
    update = replace(optimizer._backend_update_step)
    return tf_compat.members_replaced(optimizer, _get_current_learning_rate=lambda: rate, _backend_update_step=update)


def increments_scaled(
    optimizer: keras.Optimizer, variables: Sequence[Any], factor: tf.Tensor
) -> contextlib.AbstractContextManager[None]:
    """Multiply the optimizer's `assign_add`/`assign_sub` on these variables by `factor`."""
    scaled = {id(tf_compat.backend_variable(variable)) for variable in variables}

    def scaling(assign: Callable) -> Callable:
        def scaled_assign(variable, value):
            if id(tf_compat.backend_variable(variable)) in scaled:
                value = keras.ops.multiply(value, tf.cast(factor, variable.dtype))
            assign(variable, value)

        return scaled_assign

    return tf_compat.members_replaced(
        optimizer, assign_add=scaling(optimizer.assign_add), assign_sub=scaling(optimizer.assign_sub)
    )


def has_velocities(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer's slots sum up increments that contain the rate."""
    updates = (keras.optimizers.SGD.update_step, keras.optimizers.RMSprop.update_step)
    return type(optimizer).update_step in updates and optimizer.momentum > 0


def velocities(optimizer: keras.Optimizer) -> list[tf.Variable]:
    """Return these slots; [] before the optimizer is built."""
    slots = "momentums" if isinstance(optimizer, keras.optimizers.SGD) else "_momentums"
    found = getattr(optimizer, slots, []) if has_velocities(optimizer) else []
    return [tf_compat.backend_variable(slot) for slot in found if slot is not None]


def decays(optimizer: keras.Optimizer, variable: Any) -> bool:
    """Return whether an optimizer decays a weight, apart from its update, where it has a `weight_decay`."""
    return optimizer._use_weight_decay(tf_compat.backend_variable(variable))


def exclude_from_weight_decay(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Exclude variables from weight decay, in addition to earlier exclusions."""
    keys = {optimizer._var_key(variable) for variable in variables}
    own = vars(optimizer)
    own["_exclude_from_weight_decay"] = keys | own.get("_exclude_from_weight_decay", set())
    own["_exclude_from_weight_decay_cache"] = {}
    # A built optimizer of Keras 3.16 goes by this.
    own.get("_weight_decay_by_var_key", {}).update(dict.fromkeys(keys, False))


def slots_of(optimizer: keras.Optimizer) -> dict[str, list[Any]]:
    """Return a built optimizer's slots: by attribute, lists in the order of the weights.

    Keras' own optimizers keep them so; an entry may be None.
    """
    count = len(optimizer._trainable_variables)
    return {
        name: list(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, (list, tuple))
        and len(value) == count
        and name not in ("_variables", "_trainable_variables")
        and any(isinstance(one, keras.Variable) for one in value)
        and all(one is None or isinstance(one, keras.Variable) for one in value)
    }


def scalars_of(optimizer: keras.Optimizer) -> dict[str, keras.Variable]:
    """Return an optimizer's variables for all weights together, by attribute."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, keras.Variable)}


# What `exclude_from_weight_decay` sets: a twin has weights apart that are excluded.
_OF_EXCLUSIONS = (
    *("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "_exclude_from_weight_decay_cache"),
    "_weight_decay_by_var_key",
)


def applies_as_keras(optimizer: keras.Optimizer) -> bool:
    """Return whether `apply` is Keras' own: then the optimizer is built by the time it updates."""
    own = vars(optimizer).keys() & {"apply", "apply_gradients"}
    makers = (getattr(type(optimizer), name).__module__ for name in ("apply", "apply_gradients"))
    return not own and all(name.partition(".")[0] == "keras" for name in makers)


def build_ahead(optimizer: keras.Optimizer, variables: Sequence[Any]) -> list[str]:
    """Build an optimizer before its step is traced; return the names of variables that it has changed.

    Keras builds it while it traces, and traces again if variables were created: what `build` writes is lost. So it is
    here, of the variables that are created; what others get is kept, and their names are returned.
    """
    with tf_compat.eager_writes() as written:
        built_for(optimizer, variables)
    for handle, first in written.values():
        if first is not None:
            tf.raw_ops.AssignVariableOp(resource=handle, value=first)
    others = [handle for handle, first in written.values() if first is None]
    return [one.name for one in tf_compat.variables_behind(others)]


def is_as_keras_made_it(optimizer: keras.Optimizer, twin: keras.Optimizer) -> bool:
    """Return whether an optimizer is of a class of Keras', and has no attributes or methods that its twin has not."""
    of_keras = not any(
        type(one).__module__.partition(".")[0] != "keras" or any(map(inspect.isroutine, vars(one).values()))
        for one in (optimizer, innermost(optimizer))
    )
    return of_keras and vars(optimizer).keys() <= {*vars(twin), *_OF_EXCLUSIONS}


def twin_of(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return a new, unbuilt optimizer that updates like another one, without clipping, at its learning rate.

    Raises:
        ValueError: its configuration does not make it again.
    """
    try:
        twin = type(optimizer).from_config(optimizer.get_config())
    except Exception as error:  # of any kind: it is the user's code
        raise ValueError(
            "Expected, with shard_optimizer, an optimizer that from_config(get_config()) makes again. Received: "
            f"{type(optimizer).__name__}, for which that fails: {error}"
        ) from error
    twin._iterations, twin._learning_rate = optimizer._iterations, optimizer._learning_rate
    twin._clip_gradients = lambda gradients: gradients
    follow(twin, optimizer)
    return twin


def follow(twin: keras.Optimizer, optimizer: keras.Optimizer) -> bool:
    """Give a twin the plain values that its optimizer holds now, as `momentum`; return whether any is another one."""
    plain = (bool, int, float, str, type(None), np.ndarray, np.generic, tf.Tensor)
    found = {name: one for name, one in vars(optimizer).items() if isinstance(one, plain)}
    changed = {n: one for n, one in found.items() if n not in ("built", "_lock") and vars(twin).get(n, ...) is not one}
    vars(twin).update(changed)
    return bool(changed)
