"""Wrap the interfaces that Keras does not promise to keep, except those of its optimizers."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.models import cloning
from keras.src.models.functional import Functional
from keras.src.ops import numpy as keras_numpy
from keras.src.saving import saving_lib
from keras.src.utils import naming, python_utils

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.functions import functions_untraced

try:
    from keras.src.backend.tensorflow.ops import nn as keras_nn
except ImportError:  # before Keras 3.16
    from keras.src.backend.tensorflow import nn as keras_nn


_REPLACED = "_ncclsync_replaced"  # an attribute of models: the methods of their own that were replaced


@contextlib.contextmanager
def names_from_start() -> Iterator[None]:
    """Let Keras number the names of what is made meanwhile as in a new process; go on afterwards as before."""
    counted = global_state.get_global_attribute("object_name_uids")
    naming.reset_uids()
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", counted)


def nn_functions() -> ModuleType:
    """Return the module whose `_compute_moments_sync` computes `keras.ops.moments(synchronized=True)`."""
    return keras_nn


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Return the axes that a built layer takes its moments over."""
    return layer._reduction_axes


def is_keras_own(function: Callable[..., Any]) -> bool:
    """Return whether a function is Keras', and no user's override."""
    return function.__module__.partition(".")[0] == "keras"


def variables_of(model: keras.Model) -> list[tf.Variable]:
    """Return all variables that are reachable from a model: its layers', metrics', optimizers' and its own."""
    found: dict[int, tf.Variable] = {}
    owners = [model, *model._flatten_layers(include_self=False)]
    values = [value for owner in owners for member in vars(owner).values() for value in _contents(member)]
    for value in [*model.variables, *model.metrics, *values]:
        states = value.variables if isinstance(value, (keras.Optimizer, keras.Metric)) else [value]
        for state in states:
            if isinstance(state, (keras.Variable, tf.Variable)):
                variable = tf_compat.backend_variable(state)
                found[id(variable)] = variable
    return list(found.values())


def paths_of(model: keras.Model) -> dict[int, str]:
    """Return, by the id of the `tf.Variable`, the Keras paths of a model's and its optimizer's variables.

    Keras' path of a metric's state does not name the metric; these paths do.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    named = [(variable, variable.path) for variable in variables]
    named += [(state, f"{metric.name}/{state.name}") for metric in metrics_of(model) for state in metric.variables]
    return {id(tf_compat.backend_variable(variable)): name for variable, name in named}


_WRITERS = ((saving_lib, "save_model"), (saving_lib, "save_weights_only"), (legacy_h5_format, "save_model_to_hdf5"))
_CONVERTERS = ((python_utils, "pythonify_logs"), (keras_trainer, "pythonify_logs"))  # where it is imported, too
_COPIERS = (
    (saving_lib, "_load_model_from_fileobj"),  # also of what pickle and copy.deepcopy write
    (legacy_h5_format, "load_model_from_hdf5"),
    (cloning, "_clone_sequential_model"),
    (cloning, "_clone_functional_model"),
    (keras.Model, "from_config"),
    (keras.Sequential, "from_config"),
)


def write_models_by(replacement: Callable[..., Any]) -> None:
    """Let `replacement(write, model, ...)` stand for each `write` of Keras' that writes a model's file."""
    replace_for_good(_WRITERS, replacement)


def convert_logs_by(replacement: Callable[..., Any]) -> None:
    """Let `replacement(convert, logs)` stand for Keras' function that makes logs Python's numbers.

    Keras' own takes any exception, also a KeyboardInterrupt, for a value that is no number.
    """
    replace_for_good(_CONVERTERS, replacement)


def copy_models_by(replacement: Callable[..., Any]) -> None:
    """Let `replacement(make, ...)` stand for each function of Keras' that loads, unpickles or clones a model."""
    replace_for_good(_COPIERS, replacement)


def train_models_by(replacement: Callable[..., Any]) -> None:
    """Let `replacement(make, model, ...)` stand for Keras' own `make_train_function` of all models."""
    replace_for_good([(keras_trainer.TensorFlowTrainer, "make_train_function")], replacement)


def replace_for_good(functions: Sequence[tuple[ModuleType | type, str]], replacement: Callable[..., Any]) -> None:
    """Replace functions for the rest of the process; a second call with the same replacement changes nothing."""
    for module, name in functions:
        found: Any = inspect.getattr_static(module, name, None)
        own = getattr(found, "__func__", found)  # of a class method
        if own is not None and getattr(own, "replacement", None) is not replacement:
            function: Any = tf_compat.wrapped(own, replacement)
            function.replacement = replacement
            setattr(module, name, function if own is found else classmethod(function))


def replace_methods(model: keras.Model, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Let a model have these methods in place of its own, until `restore_methods`."""
    members = vars(model)
    replaced = members.setdefault(_REPLACED, {})
    for name, method in methods.items():
        own, ours = replaced.get(name, (None, None))
        replaced[name] = own if members.get(name) is ours else members.get(name), method
        members[name] = method


def restore_methods(model: keras.Model) -> None:
    """Give a model back its own methods, except those that the user has replaced meanwhile."""
    members = vars(model)
    for name, (own, method) in members.pop(_REPLACED, {}).items():
        if members.get(name) is method:
            if own is None:  # its class has the method
                del members[name]
            else:
                members[name] = own


@contextlib.contextmanager
def base_method_replaced(model: keras.Model, name: str, method: Callable[..., Any]) -> Iterator[list[bool]]:
    """Let `super()` in an override of Keras' method find `method` on this model, for a while.

    Yields:
        A list that is empty until `method` is called.
    """
    reached: list[bool] = []

    def replacing(base, self, *args, **kwargs):
        if self is not model:
            return base(self, *args, **kwargs)
        reached.append(True)
        return method(*args, **kwargs)

    with tf_compat.methods_wrapped(keras.Model.__mro__, name, replacing):
        yield reached


def layers_of(owner: keras.Layer) -> list[keras.Layer]:
    """Return all layers within a layer or model, at any depth, including layers in lists and dictionaries."""
    return owner._flatten_layers(include_self=False)


def layers_fed_by(model: keras.Model, tensor: Any) -> list[keras.Layer]:
    """Return the layers of a functional model that are called on a tensor of its, also within models that are."""
    found = []
    for layer in model._flatten_layers(include_self=False, recursive=False):
        places = [i for call in layer._inbound_nodes for i, one in enumerate(call.input_tensors) if one is tensor]
        graph = getattr(layer, "_functional", layer)
        within = isinstance(graph, Functional)
        found += [fed for i in places for fed in (layers_fed_by(graph, graph.inputs[i]) if within else [layer])]
    return found


def calls_at_end(layer: keras.Layer) -> list[Any]:
    """Return the calls whose results are a functional model's outputs; [] for any other layer.

    A call, Keras' `Node`, is one of a layer or of an operation such as `+`: it has `operation`, and `parent_nodes`, the
    calls whose results it takes, in order.
    """
    # A Sequential contains a functional model.
    graph = getattr(layer, "_functional", layer)
    if not isinstance(graph, Functional):
        return []
    histories = [tensor._keras_history for tensor in graph.outputs]
    return [history.operation._inbound_nodes[history.node_index] for history in histories]


def adds(call: Any) -> bool:
    """Return whether a call adds up its inputs: `keras.layers.Add`, or `+`."""
    return isinstance(call.operation, (keras.layers.Add, keras_numpy.Add))


def seed_generators_of(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """Return the seed generators that a layer itself owns, not those of the layers within it."""
    return list(layer._seed_generators)


def is_all_built(model: keras.Model) -> bool:
    """Return whether all layers are built: else a call may create variables that the optimizer is to know."""
    return all(layer.built for layer in [model, *model._flatten_layers(include_self=False)])


def makes_metrics(model: keras.Model) -> bool:
    """Return whether Keras will make metrics of functions and names that were given to `compile`."""
    given = [
        one
        for metric in model.metrics
        if hasattr(metric, "_user_metrics") and not metric.built
        for one in keras.tree.flatten([metric._user_metrics, metric._user_weighted_metrics])
    ]
    return not all(one is None or isinstance(one, keras.Metric) for one in given)


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Return a model's metrics; before those given to `compile` are built, the Metric objects among them."""
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
    """Yield the objects in an attribute, also inside lists, tuples and dictionaries."""
    if isinstance(member, dict):
        member = list(member.values())
    if isinstance(member, (list, tuple)):
        for item in member:
            yield from _contents(item)
    else:
        yield member


def strategy_of(owner: Any) -> tf.distribute.Strategy | None:
    """Return the `tf.distribute` strategy under which a Keras model or optimizer was created; None without one."""
    for name in ("_distribute_strategy", "_distribution_strategy"):
        strategy = getattr(owner, name, None)
        # Keras records TensorFlow's default strategy, which stands for "none", on each optimizer.
        if strategy is not None and type(strategy).__name__ != "_DefaultDistributionStrategy":
            return strategy
    return None


def build_symbolically(model: keras.Model, batch: Any, *, trains: bool = True) -> None:
    """Create a model's and its metrics' variables from a batch's shapes alone; and its optimizer's, if it `trains`."""
    outputs = _known_outputs(model)
    known = outputs is not None and all(spec.shape[:1] == [None] for spec in tf.nest.flatten(batch) if spec is not None)
    with functions_untraced():  # the traces would lack what a look at shapes does not write
        type(model)._symbolic_build(_Standing(model, outputs if known else None, trains), data_batch=batch)


class _Standing:
    """Stand for a model: without an optimizer unless it trains, which is built of what is trainable at that moment.

    If its outputs' shapes are known, Keras need not trace its layers to find them.
    """

    def __init__(self, model: keras.Model, outputs: Any, trains: bool) -> None:
        self._model, self._outputs = model, outputs
        self.optimizer = model.optimizer if trains else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs) if self._outputs is None else self._outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _known_outputs(model: keras.Model) -> Any:
    """Return the `KerasTensor`s of a functional model, each of any number of rows and no other open axis, or None."""
    functional, kind = model._functional if isinstance(model, keras.Sequential) else model, type(model)
    stock = kind.__call__ is keras.Layer.__call__ and kind.call in (Functional.call, keras.Sequential.call)
    if not stock or "call" in vars(model) or not isinstance(functional, Functional):
        return None
    if not all(map(_is_stock, model._flatten_layers(include_self=False))):  # a user's Python is to run, as in a trace
        return None
    plain = not any(one.sparse or getattr(one, "ragged", False) for one in functional.outputs)  # no `ragged` in 3.10
    rows = all(one.shape[:1] == (None,) and None not in one.shape[1:] for one in functional.outputs)
    return functional.output if plain and rows else None


def _is_stock(layer: keras.Layer) -> bool:
    """Return whether a layer, and what it calls, such as an activation, is Keras' own."""
    called = (one for one in vars(layer).values() if callable(one))
    return all(str(getattr(one, "__module__", "")).partition(".")[0] == "keras" for one in (type(layer), *called))


def forget_failed_builds(model: keras.Model) -> None:
    """Let `Sequential`s of a model whose build has failed for an input's shape be built again."""
    for layer in [model, *model._flatten_layers(include_self=False)]:
        if isinstance(layer, keras.Sequential) and not layer.built and layer._functional is None:
            layer._layers = [one for one in layer._layers if not isinstance(one, keras.layers.InputLayer)]


class BackupMethods(keras.callbacks.BackupAndRestore):
    """Name the two private methods by which Keras' callback writes and reads a backup."""

    def write_backup(self) -> None:
        """Write a backup."""
        super()._save_model()

    def read_backup(self) -> None:
        """Read a backup into the model."""
        super()._load_model()

    def _save_model(self) -> None:
        self.write_backup()

    def _load_model(self) -> None:
        self.read_backup()


def backup_methods(write: Callable[[], None], read: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """Return members that make a `BackupAndRestore`, Keras' or ours, write and read backups by these functions."""
    return {"_save_model": write, "_load_model": read}


def backup_files(callback: keras.callbacks.BackupAndRestore) -> tuple[str, str, str]:
    """Return the paths of a backup's weights, of the previous backup's weights, and of Keras' metadata."""
    return callback._weights_path, callback._prev_weights_path, callback._training_metadata_path


def first_epoch(model: keras.Model) -> int | None:
    """Return the epoch at which a `fit` begins after restoring a backup; None if it has restored none."""
    return model._initial_epoch


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Let `fit` begin at an epoch, as after restoring a backup; None: at its own `initial_epoch`."""
    model._initial_epoch = epoch
