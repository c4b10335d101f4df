"""Every use of an interface that Keras does not promise to keep; see `private.py`."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as keras_state
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import random as keras_random
from keras.src.losses import loss as keras_loss
from keras.src.models import functional as keras_functional
from keras.src.ops import numpy as keras_numpy
from keras.src.random import seed_generator as keras_seeds
from tensorflow.python.ops import (
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from ncclsync import private


def accumulates(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer itself accumulates gradients over several batches."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def update_is_due(optimizer: keras.Optimizer) -> tf.Tensor:
    """Return, as a bool scalar, whether the next `apply` of an accumulating optimizer makes an update."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def built_for(optimizer: keras.Optimizer, variables: Sequence[Any] | None) -> list[Any]:
    """Return the variables that `optimizer.apply` updates, having built it for them as `apply` does."""
    if variables is None:
        return list(optimizer._trainable_variables)
    variables = list(variables)
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)
        optimizer.built = True
    return variables


def accumulators(optimizer: keras.Optimizer, variables: Sequence[Any]) -> list[tf.Variable]:
    """Return what an accumulating optimizer accumulates the gradients of each variable in."""
    return [
        private.backend_variable(optimizer._accumulated_gradients[optimizer._get_variable_index(variable)])
        for variable in variables
    ]


@contextlib.contextmanager
def accumulators_emptied(optimizer: keras.Optimizer) -> Iterator[None]:
    """Let `apply` read zeros from an optimizer's accumulators, and leave writing them to the caller."""
    zeros = [tf.zeros(a.shape, a.dtype) for a in optimizer._accumulated_gradients]
    replaced = {
        "_accumulated_gradients": zeros,
        "_backend_increment_gradient_accumulators": lambda *_: None,
        "_backend_reset_gradient_accumulators": lambda *_: None,
    }
    with _members_replaced(optimizer, replaced):
        yield


@contextlib.contextmanager
def _members_replaced(owner: Any, replaced: dict[str, Any]) -> Iterator[None]:
    """Let an object have these members for a while, past what its class does when a member is set."""
    before = {name: vars(owner)[name] for name in replaced if name in vars(owner)}
    vars(owner).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(owner)[name]
        vars(owner).update(before)


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer that makes the updates, of which others may be wrappers."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def has_wrapped_update(optimizer: keras.Optimizer) -> bool:
    """Return whether `wrap_update` was called."""
    return "_backend_apply_gradients" in vars(optimizer)


def wrap_update(optimizer: keras.Optimizer, wrap: Callable[[Callable], Callable]) -> None:
    """Replace what `apply` of this optimizer does once gradients are whole, by `wrap` of it, for good.

    It takes gradients and variables, and makes the update with weight decay and clipping, or accumulates.
    """
    vars(optimizer)["_backend_apply_gradients"] = wrap(optimizer._backend_apply_gradients)


@contextlib.contextmanager
def update_replaced(
    optimizer: keras.Optimizer, rate: tf.Tensor, replace: Callable[[Callable], Callable]
) -> Iterator[None]:
    """Let an optimizer read `rate` as its learning rate, and make its updates by `replace(update)`.

    `update` takes gradients, variables and the learning rate; it is called where an update is due.
    """
    replaced = {
        "_get_current_learning_rate": lambda: rate,
        "_backend_update_step": replace(optimizer._backend_update_step),
    }
    with _members_replaced(optimizer, replaced):
        yield


@contextlib.contextmanager
def increments_scaled(
    optimizer: keras.Optimizer, variables: Sequence[Any], factor: tf.Tensor
) -> Iterator[None]:
    """Let what an optimizer adds to these variables, or subtracts, be `factor` times as much."""
    scaled = {id(private.backend_variable(variable)) for variable in variables}

    def scaling(assign: Callable) -> Callable:
        def scaled_assign(variable, value):
            if id(private.backend_variable(variable)) in scaled:
                value = keras.ops.multiply(value, tf.cast(factor, variable.dtype))
            assign(variable, value)

        return scaled_assign

    replaced = {name: scaling(getattr(optimizer, name)) for name in ("assign_add", "assign_sub")}
    with _members_replaced(optimizer, replaced):
        yield


def has_velocities(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer sums up, in slots, increments that have been multiplied by the rate."""
    updates = (keras.optimizers.SGD.update_step, keras.optimizers.RMSprop.update_step)
    return type(optimizer).update_step in updates and optimizer.momentum > 0


def velocities(optimizer: keras.Optimizer) -> list[tf.Variable]:
    """Return those slots; none before the optimizer is built."""
    slots = "momentums" if isinstance(optimizer, keras.optimizers.SGD) else "_momentums"
    found = getattr(optimizer, slots, []) if has_velocities(optimizer) else []
    return [private.backend_variable(slot) for slot in found if slot is not None]


def schedule_of(optimizer: keras.Optimizer) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Return what tells an optimizer's rate by the number of batches, if that is what it has."""
    schedule = optimizer._learning_rate
    return schedule if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) else None


def batches_applied(optimizer: keras.Optimizer) -> tf.Tensor:
    """Return the count that schedules get: of batches, also where several make an update."""
    return tf.convert_to_tensor(optimizer._iterations)


def exclude_from_weight_decay(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Exclude variables from weight decay, beside those that are excluded by name or by themselves."""
    excluded = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
    excluded.update(optimizer._var_key(variable) for variable in variables)
    vars(optimizer)["_exclude_from_weight_decay"] = excluded
    vars(optimizer)["_exclude_from_weight_decay_cache"] = {}


def loss_functions() -> ModuleType:
    """Return the module whose functions `apply_mask` and `reduce_values` every `keras.Loss` calls."""
    return keras_loss


def nn_functions() -> ModuleType:
    """Return the module whose `_compute_moments_sync` computes `keras.ops.moments(synchronized=True)`."""
    return keras_nn


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Return the axes that a built layer takes its moments over."""
    return layer._reduction_axes


def stateless_draws() -> dict[str, tuple[ModuleType, tuple[str, ...]]]:
    """Return, by name, all functions through which TensorFlow and Keras draw from a given seed.

    With the module that they are called through, and the names of those parameters, beside `shape`, that may
    hold one row per row drawn.
    """
    v1, v2 = gen_stateless_random_ops, gen_stateless_random_ops_v2
    return {
        "stateless_random_uniform_v2": (v2, ()),
        "stateless_random_uniform_int_v2": (v2, ()),
        "stateless_random_uniform_full_int_v2": (v2, ()),
        "stateless_random_normal_v2": (v2, ()),
        "stateless_truncated_normal_v2": (v2, ()),
        "stateless_random_gamma_v3": (v2, ("alpha",)),
        "stateless_random_binomial": (v1, ("counts", "probs")),
        "stateless_random_poisson": (v1, ("lam",)),
        "stateless_multinomial": (v1, ("logits",)),
    }


def shuffles() -> dict[str, ModuleType]:
    """Return, by name, the functions that permute the first axis (or `axis`) of a tensor by a given seed."""
    return {"shuffle": keras_random, "stateless_shuffle": gen_stateless_random_ops_v2}


def generator_state(generator: Any) -> tf.Variable:
    """Return the variable of a `keras.random.SeedGenerator` or a `tf.random.Generator`."""
    return private.backend_variable(generator.state)


def global_generator() -> keras.random.SeedGenerator | None:
    """Return what `keras.random` draws from without a seed, if there is one; Keras keeps it per thread."""
    return keras_state.get_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Set it for this thread."""
    keras_state.set_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR, generator)


@contextlib.contextmanager
def states_replaced(layer: keras.layers.RNN, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Put `replace(state)` in place of each state that a stateful RNN layer assigns to in `call`."""
    states = layer.states
    vars(layer)["states"] = keras.tree.map_structure(replace, states)
    try:
        yield
    finally:
        vars(layer)["states"] = states


def wrapped_function(loss: keras.losses.Loss) -> tuple[Callable | None, dict[str, Any]]:
    """Return the function that a loss calls, as most of Keras' do, and what it passes on; None if none."""
    return getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})


def mask_of(tensor: Any) -> Any:
    """Return the mask that Keras attached to a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def variables_of(model: keras.Model) -> list[tf.Variable]:
    """Return all variables that can be found from a model: layers', metrics', optimizers', its own."""
    found: dict[int, tf.Variable] = {}
    owners = [model, *model._flatten_layers(include_self=False)]
    values = [value for owner in owners for member in vars(owner).values() for value in _contents(member)]
    for value in [*model.variables, *model.metrics, *values]:
        states = value.variables if isinstance(value, (keras.Optimizer, keras.Metric)) else [value]
        for state in states:
            if isinstance(state, (keras.Variable, tf.Variable)):
                variable = private.backend_variable(state)
                found[id(variable)] = variable
    return list(found.values())


def paths_of(model: keras.Model) -> dict[int, str]:
    """Return, by the id of the `tf.Variable`, the Keras paths of a model's and its optimizer's variables.

    To those of a metric's state Keras gives no path that names the metric; here they have one.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    named = [(variable, variable.path) for variable in variables]
    named += [
        (state, f"{metric.name}/{state.name}") for metric in metrics_of(model) for state in metric.variables
    ]
    return {id(private.backend_variable(variable)): name for variable, name in named}


def layers_of(owner: keras.Layer) -> list[keras.Layer]:
    """Return all layers within a layer or model, at any depth, those in lists and dictionaries too."""
    return owner._flatten_layers(include_self=False)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer, or of an operation such as `+`, in a functional model."""

    layer: Any
    index: int

    def inputs(self) -> "list[Call]":
        """Return the calls whose results it gets, in order."""
        return _calls_behind(self.layer._inbound_nodes[self.index].input_tensors)

    @property
    def adds(self) -> bool:
        """Whether it adds up its inputs: `keras.layers.Add`, or `+`."""
        return isinstance(self.layer, (keras.layers.Add, keras_numpy.Add))


def calls_at_end(layer: keras.Layer) -> list[Call]:
    """Return the calls whose results are the outputs of a functional model; none of any other layer."""
    # A Sequential is functional as well, within.
    graph = getattr(layer, "_functional", layer)
    return _calls_behind(graph.outputs) if isinstance(graph, keras_functional.Functional) else []


def _calls_behind(tensors: Sequence[Any]) -> list[Call]:
    histories = [tensor._keras_history for tensor in tensors]
    return [Call(history.operation, history.node_index) for history in histories]


def seed_generators_of(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """Return the seed generators that a layer itself owns, without those of the layers within it."""
    return list(layer._seed_generators)


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Return a model's metrics; of those given to `compile`, before they are built, the Metric objects."""
    found: list[keras.Metric] = []
    for metric in model.metrics:
        if hasattr(metric, "_user_metrics"):
            given = [metric._user_metrics, metric._user_weighted_metrics]
            metrics = metric.metrics if metric.built else keras.tree.flatten(given)
            found.extend(one for one in metrics if isinstance(one, keras.Metric))
        else:
            found.append(metric)
    return found


def _contents(member: Any) -> Iterator[Any]:
    """Yield what an attribute holds, inside lists, tuples and dictionaries too."""
    if isinstance(member, dict):
        member = list(member.values())
    if isinstance(member, (list, tuple)):
        for item in member:
            yield from _contents(item)
    else:
        yield member


def strategy_of(owner: Any) -> tf.distribute.Strategy | None:
    """Return the `tf.distribute` strategy that a Keras model or optimizer was created under, if any."""
    for name in ("_distribute_strategy", "_distribution_strategy"):
        strategy = getattr(owner, name, None)
        # Keras records TensorFlow's default strategy, which stands for "none", on each optimizer.
        if strategy is not None and type(strategy).__name__ != "_DefaultDistributionStrategy":
            return strategy
    return None


def build_symbolically(model: keras.Model, batch: Any) -> None:
    """Create a model's, its metrics' and its optimizer's variables from a batch's shapes alone."""
    model._symbolic_build(data_batch=batch)


def updates_wrapped(wrap: Callable[[Callable], Callable]) -> contextlib.AbstractContextManager[None]:
    """Replace what an optimizer does between unscaling gradients and applying constraints, for a while.

    That is `_backend_apply_gradients(grads, variables)`: it clips, decays, updates and averages.
    """
    return private.methods_wrapped(private.loaded_classes(keras.Optimizer), "_backend_apply_gradients", wrap)


def apply_gradients(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Do what `updates_wrapped` is about: all of an update but unscaling, constraints and counting."""
    optimizer._backend_apply_gradients(list(gradients), list(variables))


def applies_untouched(optimizer: keras.Optimizer) -> bool:
    """Return whether gradients reach `updates_wrapped` as `apply` got them, and are not clipped there."""
    touches = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor", "gradient_accumulation_steps")
    plain = type(optimizer).apply.__module__.startswith("keras.src.optimizers.base_optimizer")
    return plain and not any(getattr(optimizer, name) for name in touches)


def clipped(optimizer: keras.Optimizer, gradients: Sequence[Any]) -> list[Any]:
    """Return gradients as an optimizer clips them."""
    return list(optimizer._clip_gradients(list(gradients)))


@contextlib.contextmanager
def unclipped(optimizer: keras.Optimizer) -> Iterator[None]:
    """Let an optimizer take gradients as they are, for a while."""
    vars(optimizer)["_clip_gradients"] = lambda gradients: gradients
    try:
        yield
    finally:
        del vars(optimizer)["_clip_gradients"]


def decays(optimizer: keras.Optimizer, variable: Any) -> bool:
    """Return whether an optimizer decays a weight by itself, beside its update."""
    value = private.backend_variable(variable)
    return optimizer.weight_decay is not None and optimizer._use_weight_decay(value)


def weights_of(optimizer: keras.Optimizer) -> list[Any]:
    """Return the variables that a built optimizer updates."""
    return list(optimizer._trainable_variables)


def slots_of(optimizer: keras.Optimizer) -> dict[str, list[Any]]:
    """Return what a built optimizer keeps for each weight: by attribute, lists in the order of the weights.

    Keras' own keep it so; an entry may be None.
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
    """Return the variables that an optimizer keeps for all weights together, by attribute."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, keras.Variable)}


def twin_of(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return a new, unbuilt optimizer that does what another does, but for clipping, at its learning rate."""
    twin = type(optimizer).from_config(optimizer.get_config())
    twin._iterations, twin._learning_rate = optimizer._iterations, optimizer._learning_rate
    twin._clip_gradients = lambda gradients: gradients
    return twin


def backup_files(callback: keras.callbacks.BackupAndRestore) -> tuple[str, str, str]:
    """Return where a backup's weights are, those of the backup before it, and what Keras notes beside them.

    Keras' callback calls its methods `_save_model` and `_load_model` to write and to read these.
    """
    return callback._weights_path, callback._prev_weights_path, callback._training_metadata_path
