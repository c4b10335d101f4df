"""Every use of an interface that TensorFlow and Keras do not promise to keep.

Nothing else in the package touches such an interface. `tests/test_private.py` has one test for each
function here, so that an upgrade that breaks an assumption is told by that assumption's name.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as keras_state
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import random as keras_random
from keras.src.losses import loss as keras_loss
from keras.src.random import seed_generator as keras_seeds
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.eager.polymorphic_function import attributes as function_attributes
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import (
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

# Every method by which Python writes a tf.Variable; the last one is how a checkpoint does.
VARIABLE_WRITERS = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    "_restore_from_tensors",
)


def written_handles(op: tf.Operation) -> set[str]:
    """Return the names of the resource inputs that `op` may write to, by TensorFlow's own bookkeeping."""
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return {tensor.name for tensor in writes}


def variables_read_in(graph: Any) -> list[tf.Variable]:
    """Return the variables that a FuncGraph has read, while it is traced as well as afterwards."""
    return [*graph.variables, *graph._watched_variables]


def is_stateful(op: tf.Operation) -> bool:
    """Return whether TensorFlow declares `op` stateful: a variable's op, a random draw, an assertion."""
    return op.op_def.is_stateful


def is_seed(variable: tf.Variable) -> bool:
    """Return whether `variable` is random state, by the names that both libraries give it.

    Of a `keras.random.SeedGenerator` ([seed, counter]), or of a `tf.random.Generator` ([*counter, key]).
    """
    return variable.name.split("/")[-1].startswith(("seed_generator_state", "StateVar"))


def backend_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a `keras.Variable`, whatever autocast scope is open."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def loaded_classes(base: type) -> list[type]:
    """Return `base`, what it derives from, and all loaded classes that derive from it."""
    classes: list[type] = []
    queue: list[type] = [*base.__mro__]
    while queue:
        cls = queue.pop()
        if cls not in classes and cls is not object:
            classes.append(cls)
            queue.extend(cls.__subclasses__() if issubclass(cls, base) else ())
    return classes


_wrap_lock = threading.RLock()


@contextlib.contextmanager
def methods_wrapped(
    classes: Sequence[type | ModuleType], name: str, wrap: Callable[[Callable], Callable]
) -> Iterator[None]:
    """Replace method `name` of those `classes` (or modules) that define it by `wrap(method)`, for a while.

    Of classes, since a step may use objects that nobody can enumerate. One thread at a time.
    """
    with _wrap_lock:
        wrapped = [(cls, cls.__dict__[name]) for cls in classes if name in cls.__dict__]
        for cls, method in wrapped:
            setattr(cls, name, wrap(method))
        try:
            yield
        finally:
            for cls, method in wrapped:
                setattr(cls, name, method)


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
        backend_variable(optimizer._accumulated_gradients[optimizer._get_variable_index(variable)])
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
    before = {name: vars(optimizer)[name] for name in replaced if name in vars(optimizer)}
    vars(optimizer).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(optimizer)[name]
        vars(optimizer).update(before)


def set_partial(variable: tf.Variable) -> None:
    """Note that each tower's copy of a variable is a part, and the sum is what one device would hold."""
    variable._ncclsync_partial = True


def is_partial(variable: tf.Variable) -> bool:
    """Return whether `set_partial` was called."""
    return getattr(variable, "_ncclsync_partial", False)


def set_shared(variable: tf.Variable) -> None:
    """Note that all towers hold the same in a variable, whatever aggregation it declares."""
    variable._ncclsync_shared = True


def is_shared(variable: tf.Variable) -> bool:
    """Return whether `set_shared` was called."""
    return getattr(variable, "_ncclsync_shared", False)


def watch_reads(variable: tf.Variable, before: Callable[[], None]) -> None:
    """Call `before` whenever a variable's value is read, however that is done."""
    read = variable._read_variable_op

    @functools.wraps(read)
    def watched(*args, **kwargs):
        before()
        return read(*args, **kwargs)

    variable._read_variable_op = watched


def unwatch_reads(variable: tf.Variable) -> None:
    """Undo `watch_reads`."""
    vars(variable).pop("_read_variable_op", None)


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


def stateful_draws() -> dict[str, ModuleType]:
    """Return, by name, the functions that draw from a state of TensorFlow's own: `tf.random.normal`, ..."""
    found = {}
    for module in (gen_random_ops, gen_stateful_random_ops):
        for name in vars(module):
            drawn = name.startswith(("random_", "stateful_", "truncated_", "parameterized_", "multinomial"))
            if drawn and callable(getattr(module, name)) and "eager_fallback" not in name:
                found[name] = module
    del found["random_gamma_grad"]
    return found


def generator_state(generator: Any) -> tf.Variable:
    """Return the variable of a `keras.random.SeedGenerator` or a `tf.random.Generator`."""
    return backend_variable(generator.state)


def global_generator() -> keras.random.SeedGenerator | None:
    """Return what `keras.random` draws from without a seed, if there is one; Keras keeps it per thread."""
    return keras_state.get_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR)


def set_global_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Set it for this thread."""
    keras_state.set_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR, generator)


def function_class() -> type:
    """Return the class of what `tf.function` returns."""
    return type(tf.function(lambda: None))


@contextlib.contextmanager
def states_replaced(layer: keras.layers.RNN, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Put `replace(state)` in place of each state that a stateful RNN layer assigns to in `call`."""
    states = layer.states
    vars(layer)["states"] = keras.tree.map_structure(replace, states)
    try:
        yield
    finally:
        vars(layer)["states"] = states


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
                variable = backend_variable(state)
                found[id(variable)] = variable
    return list(found.values())


def layers_of(owner: keras.Layer) -> list[keras.Layer]:
    """Return all layers within a layer or model, at any depth, those in lists and dictionaries too."""
    return owner._flatten_layers(include_self=False)


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


def shared_function(body: Callable, signature: Sequence[tf.TensorSpec], jit_compile: bool) -> Any:
    """Return `body` as a ConcreteFunction that TensorFlow optimises once, for all of its callers.

    If it inlined the function, or made it special for the constants that one caller passes and the results
    that it uses, then each caller's would be optimised anew, and be rounded differently: towers would drift
    apart by the last bit. `tf.function` does not offer "_nospecialize", which TensorFlow's optimiser reads.
    Source: tensorflow/core/grappler/optimizers/function_optimizer.cc.

    Args:
        body: a function of tensors.
        signature: their specs.
        jit_compile: whether XLA compiles it.
    """

    def allow(known: Any) -> Any:
        return known | {"_nospecialize"}

    with contextlib.ExitStack() as stack:
        for name in [name for name in vars(function_attributes) if name.endswith("_ALLOWLIST")]:
            stack.enter_context(methods_wrapped([function_attributes], name, allow))
        return tf.function(
            body,
            input_signature=signature,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes={"_noinline": True, "_nospecialize": True},
        ).get_concrete_function()


def autograph_converted(function: Callable) -> Callable:
    """Return `function` as `tf.function` would trace it: through autograph, if there is source to convert.

    Also where autograph is off, as it is in all that Keras calls.
    """

    @functools.wraps(function)
    def called(*args, **kwargs):
        with autograph_context.ControlStatusCtx(status=autograph_context.Status.ENABLED):
            context = tf.__internal__.autograph.control_status_ctx()
            return tf.__internal__.autograph.tf_convert(function, context, user_requested=True)(
                *args, **kwargs
            )

    return called


def is_jit_compiled(function: Callable) -> bool:
    """Return whether `function` is a `tf.function` that asks for XLA."""
    return bool(getattr(function, "_jit_compile", False))


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
