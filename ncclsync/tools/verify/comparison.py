"""Train two models side by side, from the first one's start, and compare their variables and logs after each step."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.semantics.roles import Role, role_of
from ncclsync.tools.verify.batches import Batch
from ncclsync.tools.verify.report import Difference, measure
from ncclsync.towers.step_function import to_tensor


def compare(
    one: keras.Model,
    other: keras.Model,
    batches: Sequence[Batch],
    *,
    beside: Sequence[Batch] | None = None,
    tolerance: float,
    seed: int,
) -> Iterator[Difference]:
    """Train both models; yield every difference, step by step, named as `other` names it.

    Args:
        one: the reference. Its state is copied to `other` first.
        other: the model under test, of the same factory.
        batches: one per step, for both.
        beside: batches for `other` instead; then nothing is evaluated and predicted at the end.
        tolerance: see `report.Difference`.
        seed: `keras.utils.set_random_seed` is called with seed + step before each model's step.

    Raises:
        ValueError: the models have different variables.
    """
    for model in (one, other):
        _create_state(model, batches[0])
    _copy_state(one, other)
    for step, (batch, others) in enumerate(zip(batches, beside or batches, strict=True), start=1):
        expected = _train(one, batch, step, seed)
        actual = _train(other, others, step, seed)
        for kind, right, variable in _paired(one, other):
            name = variable.name.removesuffix(":0")
            yield measure(step, kind, name, variable.numpy(), right.numpy(), tolerance)
        for name, value in expected.items():
            yield measure(step, "log", name, actual.get(name, np.nan), value, tolerance)
    if beside is None:
        for kind, name, actual_value, value in _end(one, other, batches[-1]):
            yield measure(len(batches), kind, name, actual_value, value, tolerance)


def _end(one: keras.Model, other: keras.Model, batch: Batch) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (kind, name, of `other`, of `one`) for the results of evaluating and predicting a batch."""
    expected, actual = (_logs(model.test_on_batch(*batch, return_dict=True)) for model in (one, other))
    for name, value in expected.items():
        yield "evaluate", name, actual.get(name, np.nan), value
    if not (_defines(one, "call") or _defines(one, "predict_step")):
        return  # a model with nothing but its own steps predicts nothing
    outputs = keras.tree.flatten(one.predict_on_batch(batch[0]))
    others = keras.tree.flatten(other.predict_on_batch(batch[0]))
    for i, (value, output) in enumerate(zip(outputs, others, strict=True)):
        yield "predict", f"output {i}", output, value


def _defines(model: keras.Model, method: str) -> bool:
    """Return whether the model overrides a method of `keras.Model`'s."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _paired(one: keras.Model, other: keras.Model) -> Iterator[tuple[str, tf.Variable, tf.Variable]]:
    """Yield (kind, of `one`, of `other`) for the variables that must be equal, causes before effects.

    Random state and metrics' sums are left out, by their role in `one`: on towers a variable may have another role.
    """
    weights = {id(tf_compat.backend_variable(v)) for v in one.weights}
    slots = {id(tf_compat.backend_variable(v)) for v in one.optimizer.variables}
    ranked = []
    for right, variable in zip(keras_compat.variables_of(one), keras_compat.variables_of(other), strict=True):
        if role_of(right) is Role.SAME:
            kind = "weight" if id(right) in weights else "optimizer" if id(right) in slots else "state"
            scalar = kind == "optimizer" and right.shape.rank == 0
            rank = 0 if scalar else 1 + ("weight", "optimizer", "state").index(kind)
            ranked.append((rank, (kind, right, variable)))
    for _, pair in sorted(ranked, key=lambda entry: entry[0]):
        yield pair


def _create_state(model: keras.Model, batch: Batch) -> None:
    """Create the variables of a model that has none before its first call, and its optimizer's."""
    if not model.built:
        if not _defines(model, "call"):
            return  # nothing but a train_step: it will create all from the same seed
        model(keras.tree.map_structure(to_tensor, batch[0]), training=False)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _copy_state(one: keras.Model, other: keras.Model) -> None:
    sources, targets = keras_compat.variables_of(one), keras_compat.variables_of(other)
    for source, target in zip(sources, targets, strict=False):
        if source.shape != target.shape or source.dtype != target.dtype:
            break
        target.assign(source)
    else:
        if len(sources) == len(targets):
            return
    raise ValueError(
        "Expected a factory that builds the same model each time. "
        f"Received: models with {len(sources)} and {len(targets)} variables, or with different shapes"
    )


def _train(model: keras.Model, batch: Batch, step: int, seed: int) -> dict[str, Any]:
    """Run one step; return the logs. Metrics go on counting from step to step, as in an epoch."""
    keras.utils.set_random_seed(seed + step)
    if step == 1:
        return _logs(model.train_on_batch(*batch, return_dict=True))  # it creates missing variables
    model.make_train_function()
    return _logs(model.train_function(iter([batch])))


def _logs(logs: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): np.asarray(leaf) for path, leaf in keras.tree.flatten_with_path(logs)}
