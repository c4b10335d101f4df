"""Train a model on N towers and on one device, side by side, compare them, and find why they differ.

Before the first step the towers get one device's state; then both get the same batches, one step at a time, each an
epoch of `fit`: a `train_step` is given what `fit` gives it.
"""

import collections
import contextlib
import dataclasses
import gc
import inspect
import itertools
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import remedied, shorter, shown
from ncclsync.parallel import ModelOptions, Undecorated, nccl_parallel
from ncclsync.sharding.exactness import Inexact
from ncclsync.sharding.roles import Role, role_of
from ncclsync.sharding.shards import rows_of
from ncclsync.tools.bench import turns
from ncclsync.tools.factories import UsageError
from ncclsync.tools.verify.batches import Batch, take_batches
from ncclsync.tools.verify.check import Unchecked, first_difference
from ncclsync.tools.verify.report import ROUNDING, Difference, Report, measure
from ncclsync.training.arguments import check_whole
from ncclsync.training.loop import Towers, towers_of
from ncclsync.training.random_data import check_targets, fixed_batch_size

# About 80 units in the last place for float32. For float64 more, since Keras computes some numbers in its default
# dtype, float32. For half precision 10 units: each gradient is itself a sum that was rounded to so few digits.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
_LAST_BIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_NUDGES = 3  # so many times one device begins with other last bits before a difference is no rounding


@remedied("Write verify(build_model, (x, y), towers=4)")
def verify(
    build_model: Callable[[], keras.Model],
    data: Any,
    towers: int = 4,
    steps: int = 5,
    *,
    batch_size: int = 32,
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Train a model on one device and on N towers from the same start, and compare after every step.

    Where they differ, both steps are run op by op on a few rows, and the first tensor that differs is named.

    Args:
        build_model: the factory, without arguments, that returns a compiled model. If it, or a factory that it calls,
            is decorated, that is undone, except for the decorator's `bucket_bytes` and `exact`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)` of arrays, a `tf.data.Dataset`, or an iterable over batches, such
            as a generator or a `keras.utils.PyDataset`. Data that ends too soon begins again.
        towers: their number; `devices=` overrides it.
        steps: of training. After the last step, a batch is evaluated and predicted.
        batch_size: of arrays; if the towers divide it evenly, the last step gets one sample less.
        tolerance: of a difference, relative to the largest magnitude in the same array. None: by the least precise
            dtype that Keras and the model compute in: float64 1e-12, float32 1e-5, float16 1e-2, bfloat16 8e-2.
        seed: for `keras.utils.set_random_seed` before each build and, incremented, before each step. Afterwards
            Python's and NumPy's generators are restored; TensorFlow's and Keras' seeds, which cannot be read, are not.
        options: further arguments of `nccl_parallel`; and `progress=False`, to keep from standard error what is under
            way.

    Returns:
        A `Report`; print it. A failing `assert verify(...).ok` shows it.

    Raises:
        TypeError, ValueError: bad arguments; a factory that does not return a new compiled model each time; data
            without a batch.
        Exception: a step's error on one device or on the towers. The towers are then closed, too.
    """
    if np.ndim(towers):
        words = "Expected all data in one argument: write verify(build_model, (x, y))"
        raise TypeError(f"{words}. Received: {shown(towers)} as a third")
    say = turns.progress if options.pop("progress", True) else lambda text: None
    known = [*inspect.signature(verify).parameters][:-1]
    devices = ModelOptions.of("verify", options, known).devices
    count = towers if devices is None else len(devices)
    _check_arguments(build_model, count, steps, batch_size, tolerance)
    say(f"building the model on {count} towers")
    factory = build_model if isinstance(build_model, Undecorated) else Undecorated(build_model)
    if devices is None:
        options["towers"] = towers
    states = random.getstate(), np.random.get_state()
    tf.get_logger().addFilter(_is_no_retracing)
    try:
        model, made = _on_towers(factory, seed, options)
        made.watch.keep_traces()
        try:
            one_size = fixed_batch_size(model) is not None
            batches = take_batches(data, steps, batch_size=batch_size, towers=count, one_size=one_size)
            with tf.device(f"/{made.devices[0]}"):
                run = _Run(factory, batches, seed, tolerance)
                run.say = say
                return run.report(model, made)
        finally:
            say("")
            made.close()
    finally:
        tf.get_logger().removeFilter(_is_no_retracing)
        random.setstate(states[0])
        np.random.set_state(states[1])
        gc.collect()  # frees Keras' models, which are reference cycles


class _SameModel(UsageError, ValueError):
    """Say, by the command in a line, that a factory does not make its model."""


class _Run:
    """Run one device: beside the towers, and again to find why they differ."""

    say: Callable[[str], None]

    def __init__(self, factory: Callable, batches: Sequence[Batch], seed: int, tolerance: float | None) -> None:
        self._factory = factory
        self._batches = batches
        self._seed = seed
        self._reference = _build(factory, seed)
        check_targets(self._reference, batches[0][1])
        self._dtype = _least_precise(self._reference)
        self._is_asked = tolerance is not None
        self._tolerance = TOLERANCES[self._dtype] if tolerance is None else tolerance
        self._refused: dict[str, Inexact] = {}  # what one device cannot do either

    def report(self, model: keras.Model, towers: Towers) -> Report:
        """Train `model` beside one device, and find reasons for differences."""
        if model is self._reference:
            words = f"Expected the factory to make a new model each time. Received: {shown(model)} twice"
            raise _SameModel(f"{words}. Make and compile it within the function")
        found = self._compare(self._reference, model, f"one device and {len(towers)} towers")
        reasons = [*_nan_of(found), *self._equal_rows(), *self._refused.values()]
        if not all(one.ok for one in found):
            own = [*towers.session.inexact, *self._of_one_device()]
            self.say("They differ. Looking for the line, op by op")
            faults = [*_false_step(towers, self._batches[0])]
            if not own and not faults:
                found, own = self._without_rounding(found)
            reasons += own + faults
        ok = all(one.ok for one in found)
        sizes = tuple(rows_of(batch) or 0 for batch in self._batches)
        return Report(ok, self._tolerance, tuple(towers.devices), sizes, tuple(found), tuple(reasons))

    def _of_one_device(self) -> Iterator[Inexact]:
        """Find reasons by running one device again."""
        first = next((one for one in self._again() if not one.ok), None)
        if first is not None:
            reason = f"differs from itself when run twice, first in {first.kind} {first.name} at step {first.step}: "
            reason += "it draws random numbers that no seed of its own determines, or depends on something outside"
            remedy = "a keras.random.SeedGenerator in each layer that draws, as seed= of what keras.random draws"
            yield Inexact("the model on one device", reason, remedy)
        if bits := {"float16": 11, "bfloat16": 8}.get(self._dtype):
            reason = f"has {bits} significant bits: sums in another order differ early, and more with every step"
            yield Inexact(f"dtype {self._dtype}", reason, "verify in float32; the same code is exact in every dtype")

    def _without_rounding(self, found: list[Difference]) -> tuple[list[Difference], list[Inexact]]:
        """Let differences count as equal that one device has from itself, if its weights begin with another last bit.

        An array may differ up to ten times as much as it does there, in any step. With the user's own tolerance none
        counts as equal; that they are so large is a reason all the same.
        """
        largest = collections.defaultdict[int, float](float)  # by the array's place in a step
        for number in range(1, _NUDGES + 1):
            nudged = self._again(nudged=number)
            steps = itertools.groupby(nudged, lambda one: one.step)
            places = [place for _, each in steps for place, _ in enumerate(each)]
            for place, one in zip(places, nudged, strict=True):
                largest[place] = max(largest[place], one.relative)
            if all(one.ok or one.relative <= 10 * largest[at] for one, at in zip(found, places, strict=True)):
                break
        else:
            return found, []
        reason = "one device differs from itself by as much when its weights begin with another last bit: this model "
        reason += f"amplifies rounding, to {max(largest.values()):.2g} within these steps"
        remedy = "none is needed. A bias before a normalization has a gradient of 0 but for rounding: use_bias=False"
        if self._is_asked:
            remedy = f"dtype float64, or tolerance={10 * max(largest.values()):.0e} if that is small enough for you"
        else:
            found = [dataclasses.replace(one, ok=True) for one in found]
        return found, [Inexact(ROUNDING, reason, remedy)]

    def _again(self, *, nudged: int = 0) -> list[Difference]:
        what = "they differ. Checking how much one device differs from itself" + ", by other last bits" * bool(nudged)
        return self._compare(_build(self._factory, self._seed), _build(self._factory, self._seed), what, nudged=nudged)

    def _compare(self, one: keras.Model, other: keras.Model, what: str, *, nudged: int = 0) -> list[Difference]:
        """Train both models, from the state of `one`; return every difference, under `other`'s names.

        If `nudged`, each weight of `other` begins with another last bit, of its dtype: for each number another draw.

        Raises:
            ValueError: the models have different variables.
        """
        found = []

        def add(step: int, kind: str, name: str, actual: Any, expected: Any) -> None:
            found.append(measure(step, kind, name, actual, expected, self._tolerance))

        for model in (one, other):
            self._create_state(model)
        _copy_state(one, other)
        paths = keras_compat.paths_of(other)
        signs = np.random.default_rng([self._seed, nudged])
        for weight in other.trainable_weights if nudged else ():
            change = _LAST_BIT[keras.backend.standardize_dtype(weight.dtype)] * signs.choice([-1, 1], weight.shape)
            weight.assign(weight * tf.cast(1 + change, weight.dtype))
        for step, batch in enumerate(self._batches, start=1):
            so_far = "traced first"
            if step > 1:
                so_far = "equal so far" if all(one.ok for one in found) else "different so far: looked into at the end"
            self.say(f"{what}: step {step} of {len(self._batches)}, {so_far}")
            expected = _train(one, batch, step, self._seed)
            actual = _train(other, batch, step, self._seed)
            for kind, right, variable in _paired(one, other):
                add(step, kind, paths.get(id(variable), variable.name), variable.numpy(), right.numpy())
            for name, value, right in _beside(actual, expected):
                add(step, "log", name, value, right)
        self.say(f"{what}: evaluating and predicting a batch")
        for end in self._end(one, other):
            add(len(self._batches), *end)
        return found

    def _tried(self, what: str, run: Callable[[], Any]) -> Any:
        """Return what one device returns; None if it raises an error, which the report tells."""
        try:
            return run()
        except Exception as error:  # of whatever kind: it is the user's method, and towers need not do better
            reason = f"is not compared, since one device cannot do it: {type(error).__name__}: "
            remedy = "none is needed to train; to compare it, let it work on one device"
            self._refused[what] = Inexact(what, reason + shorter(" ".join(str(error).split())).rstrip("."), remedy)
        return None

    def _create_state(self, model: keras.Model) -> None:
        """Create the variables of a model that has none before its first call, and its optimizer's."""
        if not all(layer.built for layer in (model, *keras_compat.layers_of(model))):
            # Otherwise its train_step will create all variables, from the same seed.
            if not _defines(model, "call"):
                return
            if self._tried("calling the model", lambda: (model(self._batches[0][0], training=False),)) is None:
                return
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _end(self, one: keras.Model, other: keras.Model) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield (kind, name, of `other`, of `one`) for the results of evaluating and predicting a batch."""
        batch = self._batches[-1]

        def evaluated(model: keras.Model) -> dict[str, Any]:
            return _logs(model.evaluate(_as_data(batch), verbose=0, return_dict=True))

        expected = self._tried("evaluate", lambda: evaluated(one))
        for name, value, right in () if expected is None else _beside(evaluated(other), expected):
            yield "evaluate", name, value, right
        outputs = self._tried("predict", lambda: one.predict_on_batch(batch[0])) if _predicts(one) else None
        if outputs is None:
            return
        both = [keras.tree.flatten(some) for some in (outputs, other.predict_on_batch(batch[0]))]
        for i, (value, output) in enumerate(zip(*both, strict=True)):
            yield "predict", f"output {i}", output, value

    def _equal_rows(self) -> Iterator[Inexact]:
        """Report a batch whose rows the model cannot tell apart: a tower with the wrong rows would compute the same."""
        model, x = self._reference, self._batches[0][0]
        predicts = _predicts(model) and "predict" not in self._refused
        given = keras.tree.flatten(model.predict_on_batch(x) if predicts else x)
        leaves = [np.asarray(one) for one in given if isinstance(one, (np.ndarray, tf.Tensor)) and len(one.shape)]
        if leaves and all(len(one) > 1 and _are_equal(one) for one in leaves):
            reason = "all rows of a batch give the same prediction, so that equal results show little: a tower with "
            reason += "other rows would compute the same"
            yield Inexact("the data", reason, "verify with your own: ncclsync.verify(build_model, (x, y)), or --data")


def _is_no_retracing(record: logging.LogRecord) -> bool:
    """Leave out TensorFlow's advice about functions that are traced often: each model here has its own."""
    return "triggered tf.function retracing" not in record.getMessage()


def _build(factory: Callable, seed: int) -> keras.Model:
    """Seed Keras, and call a factory.

    Raises:
        TypeError: it returns no model.
        ValueError: the model is not compiled, or has no optimizer.
    """
    keras.utils.set_random_seed(seed)
    with keras_compat.names_from_start():
        model = factory()
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected the factory to return a keras.Model each time. Received: {shown(model)}")
    if not model.compiled or model.optimizer is None:
        words = f"Expected the factory to return a compiled model, with an optimizer. Received: {shown(model)}"
        raise ValueError(f"{words}; call its compile() in the factory")
    return model


def _on_towers(factory: Undecorated, seed: int, options: dict[str, Any]) -> tuple[keras.Model, Towers]:
    """Build a model on towers, with the options of its decorator beside the given ones."""
    known = {**factory.options}
    model = _build(nccl_parallel(**{**known, **options})(factory), seed)
    made = towers_of(model)
    assert made is not None
    if known == factory.options:
        return model, made
    made.close()  # a decorator within the factory has other options, which are known by now
    return _on_towers(factory, seed, options)


def _least_precise(model: keras.Model) -> str:
    """Return the least precise dtype of a model's computations and weights, and of Keras for its losses."""
    dtypes = {keras.config.floatx()}
    dtypes |= {layer.compute_dtype for layer in (model, *keras_compat.layers_of(model))}
    dtypes |= {keras.backend.standardize_dtype(weight.dtype) for weight in model.trainable_variables}
    return [dtype for dtype in TOLERANCES if dtype in dtypes][-1]


def _check_arguments(factory: Any, towers: int, steps: int, batch_size: int, tolerance: float | None) -> None:
    if not callable(factory) or isinstance(factory, keras.Model):
        words = "Expected a function that returns a compiled keras.Model, a new one in each call"
        write = "Write verify(build_model, (x, y)), where build_model makes, compiles and returns it"
        raise TypeError(f"{words}. Received: {shown(factory)}. {write}")
    for name, value, least in (("towers", towers, 2), ("steps", steps, 1), ("batch_size", batch_size, 1)):
        check_whole(name, value, least)
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < float("inf")):
        raise ValueError(f"Expected tolerance to be None or a number from 0. Received: {shown(tolerance)}")


def _predicts(model: keras.Model) -> bool:
    """Return whether a model predicts anything; one with nothing but its own steps does not."""
    return _defines(model, "call") or _defines(model, "predict_step")


def _defines(model: keras.Model, method: str) -> bool:
    """Return whether the model overrides a method of `keras.Model`'s."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _paired(one: keras.Model, other: keras.Model) -> list[tuple[str, tf.Variable, tf.Variable]]:
    """Return (kind, of `one`, of `other`) for the variables that must be equal, causes before effects.

    Random state and metrics' sums are left out, by their role on one device: it may be another on towers.
    """
    weights, slots = (
        {id(tf_compat.backend_variable(v)) for v in some} for some in (one.weights, one.optimizer.variables)
    )
    found = []
    for right, variable in zip(keras_compat.variables_of(one), keras_compat.variables_of(other), strict=True):
        if id(right) in weights:
            rank, kind = 1, "weight"
        elif id(right) in slots:
            rank, kind = (2 if right.shape.rank else 0), "optimizer"
        else:
            rank, kind = 3, "state"
        if role_of(right) is Role.SAME:
            found.append((rank, (kind, right, variable)))
    return [pair for _, pair in sorted(found, key=lambda one: one[0])]


def _copy_state(one: keras.Model, other: keras.Model) -> None:
    sources, targets = keras_compat.variables_of(one), keras_compat.variables_of(other)
    if [(one.shape, one.dtype) for one in sources] != [(one.shape, one.dtype) for one in targets]:
        words = f"Received: models with {len(sources)} and {len(targets)} variables, or with different shapes"
        raise ValueError(f"Expected a factory that builds the same model each time. {words}")
    for source, target in zip(sources, targets, strict=True):
        target.assign(source)


def _train(model: keras.Model, batch: Batch, step: int, seed: int) -> dict[str, Any]:
    """Run one step, an epoch; return the logs."""
    keras.utils.set_random_seed(seed + step)
    history = model.fit(_as_data(batch), epochs=1, verbose=0, shuffle=False).history
    return _logs({name: values[-1] for name, values in history.items()})


def _as_data(batch: Batch) -> tf.data.Dataset:
    """Return data of one batch, of which a step is given what `fit` and `evaluate` give."""
    return tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*batch)))


def _logs(logs: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): np.asarray(leaf) for path, leaf in keras.tree.flatten_with_path(logs)}


def _beside(actual: dict[str, Any], expected: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, what is expected) of logs; what is missing is NaN.

    Keras numbers the metrics of a process that have no names of their own: "auc" of one model is "auc_1" of the next.
    """

    def by_stem(logs: dict[str, Any]) -> dict[tuple[str, int], tuple[str, Any]]:
        parts = {name: _NUMBERED.fullmatch(name) for name in logs}
        stems = {name: (found[1], int(found[2] or 0)) if found else (name, 0) for name, found in parts.items()}
        each = itertools.groupby(sorted(logs, key=stems.__getitem__), lambda name: stems[name][0])
        return {(stem, i): (name, logs[name]) for stem, names in each for i, name in enumerate(names)}

    found = by_stem(actual)
    for key, (name, right) in by_stem(expected).items():
        yield *found.get(key, (name, np.nan)), right


def _nan_of(found: Sequence[Difference]) -> Iterator[Inexact]:
    """Name the first NaN, on towers or on one device."""
    for one in [one for one in found if one.nan][:1]:
        reason = f"holds a NaN from step {one.step} on; NaNs are equal to each other, whatever led to them"
        remedy = "a smaller learning rate, or other data: compare where the numbers are finite"
        yield Inexact(f"{one.kind} {one.name}", reason, remedy)


def _are_equal(rows: np.ndarray) -> bool:
    """Return whether all rows are equal but for rounding."""
    if rows.dtype.kind == "f":
        return not rows.size or bool(np.max(np.abs(rows - rows[:1])) <= 1e-5 * np.max(np.abs(rows)))
    return bool(np.all(rows == rows[:1]))


def _false_step(towers: Towers, batch: Batch) -> Iterator[Inexact]:
    """Report the first tensor of a training step that towers and one device compute differently."""
    for trace in towers.watch.traces or ():
        with contextlib.suppress(Unchecked):
            line = first_difference(trace, towers.devices[0], batch, towers.layout.shards)
            if line:
                reason = "is not partitioned into what one device computes: a fault of ncclsync's"
                remedy = "report this line, with what Towers.explain() prints"
                yield Inexact(f"the step, from {line} on", reason, remedy)
                return
