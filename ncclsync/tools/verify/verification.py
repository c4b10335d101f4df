"""Train a model on N towers and on one device, side by side, and compare them.

The towers get the state of the one device before the first step; then both get the same batches, one step at a time,
through the model's own train function. `exactness` needs no step.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat import keras as keras_compat
from ncclsync.parallel import nccl_parallel
from ncclsync.semantics.exactness import Inexact, find_inexact
from ncclsync.tools.verify.batches import Batch, reversed_rows, rows_of, take_batches
from ncclsync.tools.verify.comparison import compare
from ncclsync.tools.verify.diagnosis import disagreement, false_step, missing_digits, own_code, rounding, seen_nan
from ncclsync.tools.verify.report import Difference, Report
from ncclsync.training.arguments import check_whole
from ncclsync.training.loop import Towers, towers_of
from ncclsync.training.random_data import check_targets, fixed_batch_size

# About 80 units in the last place for float32, more for float64, whose rounding is mixed with that of float32
# where Keras computes in its default dtype. Half precision: 10 units, since each gradient is itself a sum
# that was rounded to so few digits.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}


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
        build_model: the factory, without arguments, that returns a compiled model. If it is decorated, the original is
            called, with the decorator's `bucket_bytes` and `exact`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)` of arrays, a `tf.data.Dataset`, or an iterable over batches, such
            as a generator or a `keras.utils.PyDataset`. Data that ends too soon begins again.
        towers: their number; `devices=` overrides it.
        steps: of training. After the last step, a batch is evaluated and predicted.
        batch_size: of arrays; if the towers divide it evenly, the last step gets one sample less.
        tolerance: of a difference, relative to the largest magnitude in the same array. None: by the least precise
            dtype that Keras and the model compute in: float64 1e-12, float32 1e-5, float16 1e-2, bfloat16 8e-2.
        seed: for `keras.utils.set_random_seed` before each build and, incremented, before each step. Afterwards
            Python's and NumPy's generators are as before; TensorFlow's and Keras' seeds, which cannot be read, are not.
        options: further arguments of `nccl_parallel`.

    Returns:
        A `Report`; print it. A failing `assert verify(...).ok` shows it.

    Raises:
        TypeError, ValueError: bad arguments; a factory that does not return a new compiled model each time; data
            without a batch.
        Exception: a step's error on one device or on the towers. The towers are then closed, too.
    """
    factory = undecorated(build_model)
    options = {**getattr(build_model, "nccl_parallel_options", {}), **options}
    devices = options.get("devices")
    count = towers if devices is None else len(devices)
    _check_arguments(factory, count, steps, batch_size, tolerance)
    on_towers = nccl_parallel(**({"towers": towers} if devices is None else {}), **options)(factory)
    states = random.getstate(), np.random.get_state()
    try:
        model = _build(on_towers, seed)
        made = towers_of(model)
        assert made is not None
        made.watch.traces = []
        try:
            one_size = fixed_batch_size(model) is not None
            batches = take_batches(data, steps, batch_size=batch_size, towers=count, one_size=one_size)
            with tf.device(f"/{made.devices[0]}"):
                run = _Run(factory, batches, seed, tolerance)
                return run.report(model, made)
        finally:
            made.close()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        gc.collect()  # frees Keras' models, which are reference cycles


class _Run:
    """Run one device: beside the towers, and again to find why they differ."""

    def __init__(self, factory: Callable, batches: Sequence[Batch], seed: int, tolerance: float | None) -> None:
        self._factory = factory
        self._batches = batches
        self._seed = seed
        self._reference = _build(factory, seed)
        check_targets(self._reference, batches[0][1])
        self._dtype = _least_precise(self._reference)
        self._tolerance = TOLERANCES[self._dtype] if tolerance is None else tolerance

    def report(self, model: keras.Model, towers: Towers) -> Report:
        """Train `model` beside one device, and find reasons for differences."""
        if model is self._reference:
            raise ValueError(f"Expected the factory to make a new model each time. Received: {model!r} twice")
        found = self._compare(self._reference, model)
        reasons = [*seen_nan(found)]
        ok = all(one.ok for one in found)
        if not ok:
            reasons += false_step(towers, self._batches[0])
            reasons += find_inexact(model, towers.options.exact_batch_norm, towers.options.exact_random)
            reasons += self._reasons(model, found, known=bool(reasons))
        sizes = tuple(map(rows_of, self._batches))
        return Report(ok, self._tolerance, tuple(towers.devices), sizes, tuple(found), tuple(reasons))

    def _reasons(self, model: keras.Model, found: list[Difference], known: bool) -> Iterator[Inexact]:
        """Find reasons by running one device again; without any, name suspects."""
        alone = list(disagreement(self._compare(*self._two())))
        yield from alone
        yield from missing_digits(self._dtype)
        if known or alone:
            return
        # The same sums in another order: the effect of rounding alone.
        reordered = self._compare(*self._two(), beside=[reversed_rows(batch) for batch in self._batches])
        rounded = list(rounding(reordered, found, limit=100 * TOLERANCES[self._dtype]))
        yield from rounded
        if not rounded:
            yield from own_code(model, found)

    def _two(self) -> tuple[keras.Model, keras.Model]:
        return _build(self._factory, self._seed), _build(self._factory, self._seed)

    def _compare(self, one: keras.Model, other: keras.Model, **arguments: Any) -> list[Difference]:
        tolerance, seed = self._tolerance, self._seed
        return list(compare(one, other, self._batches, tolerance=tolerance, seed=seed, **arguments))


def _build(factory: Callable, seed: int) -> keras.Model:
    """Call a factory after seeding Keras.

    Raises:
        TypeError, ValueError: it returns no compiled model with an optimizer.
    """
    keras.utils.set_random_seed(seed)
    model = factory()
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected the factory to return a keras.Model. Received: {model!r} of type {type(model).__name__}"
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "Expected the factory to return a compiled model, with an optimizer. "
            f"Received: {model!r}; call its compile() in the factory"
        )
    return model


def _least_precise(model: keras.Model) -> str:
    """Return the least precise dtype of a model's computations and weights, and of Keras for its losses."""
    dtypes = {keras.config.floatx()}
    dtypes |= {layer.compute_dtype for layer in (model, *keras_compat.layers_of(model))}
    dtypes |= {keras.backend.standardize_dtype(weight.dtype) for weight in model.trainable_variables}
    return [dtype for dtype in TOLERANCES if dtype in dtypes][-1]


def undecorated(build_model: Any) -> Any:
    """Return the function that `nccl_parallel` decorates; any other function itself."""
    while getattr(build_model, "__globals__", {}).get("__name__") == nccl_parallel.__module__:
        build_model = build_model.__wrapped__
    return build_model


def _check_arguments(factory: Any, towers: int, steps: int, batch_size: int, tolerance: float | None) -> None:
    if not callable(factory):
        raise TypeError(f"Expected a function that returns a compiled keras.Model. Received: {factory!r}")
    for name, value, least in (("towers", towers, 2), ("steps", steps, 1), ("batch_size", batch_size, 1)):
        check_whole(name, value, least)
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < float("inf")):
        raise ValueError(f"Expected tolerance to be None or a number from 0. Received: {tolerance!r}")
