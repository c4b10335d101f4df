"""Run Keras on towers: the functions that `fit`, `evaluate`, `predict` and the `_on_batch` methods call.

A model keeps its class and its loops. Only its `make_train_function`, `make_test_function` and `make_predict_function`
are replaced, on the object: the functions that they make run the model's step on all towers.
"""

import contextlib
import functools
import logging
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.communicator.timeouts import interruptible
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import keras_optimizers, other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError, shown
from ncclsync.ops.device_ops import default_device
from ncclsync.ops.spans import NoBatchLeft
from ncclsync.program.updates import done_without_batch
from ncclsync.sharding.exactness import Inexact, find_inexact
from ncclsync.sharding.shards import fixed_specs, grouped, rows_of, without_optionals
from ncclsync.towers.explanation import Explanation, explain_program
from ncclsync.towers.programs import Programs, Results, Source
from ncclsync.towers.retracing import Retracing, Version
from ncclsync.towers.session import ModelSide
from ncclsync.towers.step import TowerStep
from ncclsync.towers.step_function import to_tensor
from ncclsync.training.files import replacing
from ncclsync.training.loop import Towers, give_towers, warn_of_own_name
from ncclsync.training.random_data import check_targets, fixed_batch_size, random_data

_BATCH_SIZE = 32  # Keras' own

logger = logging.getLogger("ncclsync")


def attach(model: keras.Model, towers: Towers) -> None:
    """Let a model, of any class, train, evaluate and predict on towers. Tower 0 is the model itself."""
    keras_compat.restore_methods(model)  # it may have had towers, now closed
    model.train_function = model.test_function = model.predict_function = None
    give_towers(model, towers)
    path = towers.options.health.emergency_checkpoint
    # By a weak reference: a save must not keep the model alive.
    save = None if path is None else functools.partial(_save, weakref.ref(model), pathlib.Path(path))
    paths, explain = functools.partial(keras_compat.paths_of, model), functools.partial(_explain, model, towers)
    towers.session.serve(ModelSide(lambda: model.weights, paths, save, explain))
    # Track writes from here on, before the first step; also on one tower: other towers may share its weights.
    for variable in model.weights:
        towers.replicas.of(tf_compat.backend_variable(variable))
    if is_plain(towers):
        return  # Keras' own functions train
    makers = {f"make_{kind}_function": maker(model, towers, kind) for kind in ("train", "test", "predict")}
    settled = _settled(towers, model.get_metrics_result)
    keras_compat.replace_methods(model, {**makers, "get_metrics_result": settled})
    keras_compat.convert_logs_by(_convert_logs)


def is_plain(towers: Towers) -> bool:
    """Return whether Keras' own functions train: on one tower, on Keras' default device, without options."""
    options = towers.options
    plain = options.health.on_nonfinite is None and options.on_oom is None and towers.layout.divided is None
    return plain and len(towers) == 1 and towers.devices[0] == default_device()


def _convert_logs(convert: Callable[[Any], Any], logs: Any) -> Any:
    """Convert logs as Keras does, which takes any exception for a value that is no number: lose none.

    Keras also calls it in a thread beside `fit`, which has no Ctrl-C, and which a failure is not to end: `fit` raises
    it at the next step, or `_settled`.
    """
    if not logs or threading.current_thread() is not threading.main_thread():
        return convert(logs)
    with interruptible():
        # Of dicts within, Keras calls this again; any other value may be of a type that is not to be taken apart.
        return convert({name: _read_log(value) for name, value in logs.items()})


def _read_log(value: Any) -> Any:
    """Return a log with its failure raised, if its step has failed; a number where it is one, which Keras may take."""
    numbers = tf_compat.numbers_of(value, is_raised=True)
    return value if numbers is None or np.ndim(numbers) else numbers


def _settled(towers: Towers, result: Callable[[], Any]) -> Callable[[], Any]:
    """Return a `get_metrics_result` that raises what has failed, since Keras calls it after the last step."""

    @functools.wraps(result)
    def settled() -> Any:
        if tf.executing_eagerly():
            towers.session.failures.settle()
        return result()

    return settled


def maker(model: keras.Model, towers: Towers, kind: str) -> Callable[..., Any]:
    """Return the replacement of a model's `make_{kind}_function`; `kind` is "train", "test" or "predict".

    If the model's class overrides the method, the override is called, and its `super().make_{kind}_function()` makes
    the towers' function.
    """
    name, attribute = f"make_{kind}_function", f"{kind}_function"
    own = getattr(model, name)

    def make(force=False):
        warn_of_own_name(model, towers)  # set since then
        if getattr(model, attribute) is None or force:
            step = ModelStep(model, towers, f"{kind}_step")
            setattr(model, attribute, step.run_each if kind == "predict" else step.run)
        return getattr(model, attribute)

    if name not in vars(model) and getattr(type(model), name) is getattr(keras.Model, name):
        return make  # no class overrides it
    known: Any = None  # the last function that the override made

    @functools.wraps(own)
    def make_theirs(*args, **kwargs):
        nonlocal known
        with keras_compat.base_method_replaced(model, name, make) as reached:
            function = own(*args, **kwargs)
        made = getattr(model, attribute)
        if not reached and (known is None or made is not known):
            setattr(model, attribute, None)
            raise NcclSyncError(
                f"Expected {type(model).__name__}.{name} to call super().{name}(), whose function runs steps on all "
                "towers. Received: a function of its own, which would run on one device. Let it wrap super()'s "
                f"function; or override {kind}_step instead, which may do anything with a batch"
            )
        known = made
        return function

    return make_theirs


def step_of(model: keras.Model) -> TowerStep | None:
    """Return the step that a model's `train_function` runs; None if the function is Keras' or an override's."""
    owner = getattr(model.train_function, "__self__", None)
    return owner.step if isinstance(owner, ModelStep) else None


def _explain(model: keras.Model, towers: Towers, batch: Any) -> Explanation:
    """Explain a step on `batch`; see `Towers.explain`."""
    if not model.compiled or model.optimizer is None:
        raise NcclSyncError(f"Expected a compiled model, with an optimizer. Received: {model!r}")
    model.make_train_function()
    step = step_of(model) or ModelStep(model, towers, "train_step").step  # one tower runs Keras' own function
    if isinstance(batch, int) and (isinstance(batch, bool) or batch < 1):
        raise ValueError(f"Expected a batch of at least one row. Received: {batch}")
    of_last = batch is None or (isinstance(batch, int) and not getattr(model, "inputs", None))
    if of_last and (last := step.last()) is not None:
        program, ran = last
        return explain_program(program, towers, batch or rows_of(ran), of_last=batch is None)
    rows, plain, unseen = None, is_plain(towers), batch is None and not fixed_batch_size(model)
    if batch is None:
        batch = fixed_batch_size(model) or _BATCH_SIZE
    if isinstance(batch, int):
        rows = batch
        made = rows if fixed_batch_size(model) else min(rows, _BATCH_SIZE)
        try:
            batch = random_data(model, made, batch_size=made)
        except ValueError as error:
            raise ValueError(f"{error}, or give a batch: explain((x[:{rows}], y[:{rows}]))") from error
    if not isinstance(batch, (tuple, list)):
        size = batch if isinstance(batch, str) and batch.isdecimal() else 64
        write = f"Write explain({size}), with a batch size, or explain((x, y))"
        raise TypeError(f"Expected a batch size, or a batch (x, y). Received: {shown(batch)}. {write}")
    if not 1 <= len(batch) <= 3:
        raise ValueError(f"Expected a batch (x,), (x, y) or (x, y, sample_weight). Received: {len(batch)} elements")
    check_targets(model, keras.utils.unpack_x_y_sample_weight(tuple(batch))[1])
    batch = grouped(tf.nest.map_structure(to_tensor, keras.tree.lists_to_tuples(tuple(batch))))
    rows = None if plain and unseen else rows or rows_of(batch)  # Keras' own function has run, with what it was given
    return explain_program(step.programs.of(fixed_specs(batch)), towers, rows, plain=plain)


def _save(borrowed: "weakref.ref[keras.Model]", path: pathlib.Path) -> None:
    """Save a model, or its weights, as the suffix says; an older file stays until the new file is complete."""
    model = borrowed()
    if model is None:
        return
    with replacing(path) as part:
        if path.name.endswith(".weights.h5"):
            model.save_weights(part, overwrite=True)
        else:
            model.save(part, overwrite=True)
    logger.warning("Saved tower 0 to %s, since a collective has failed", path)


class _StepOfModel:
    """A step of a Keras model, to be traced; see `Traceable`."""

    def __init__(self, model: keras.Model, towers: Towers, name: str) -> None:
        # As Keras, which reads all this when it makes a function; a predict_step it looks up when it traces.
        self.run_eagerly, self.jit_compile = model.run_eagerly, bool(model.jit_compile)
        self._step = None if name == "predict_step" else getattr(model, name)
        self.model, self._towers, self._name = model, towers, name
        self._twice = self._failed = False  # whether the last trace is the first of two; whether it has failed

    @property
    def function(self) -> Callable[[Any], Any]:
        """Return the model's method."""
        return self._step or self.model.predict_step

    def source(self, specs: Any) -> Source:
        """See `Traceable`; the variables that the step needs are built first."""
        self._twice = _build_state(self.model, self._name, specs, self._towers.session.warn_once) or (
            self._failed and self._twice
        )
        self._failed = False
        return Source(self.function, Results.COMBINED, self.jit_compile, twice=self._twice, returning=self._name)

    def find_inexact(self) -> Sequence[Inexact]:
        """See `Traceable`."""
        return find_inexact(self.model, self._towers.options.exact_batch_norm, self._towers.options.exact_random)

    def forget_failed(self) -> None:
        """See `Traceable`."""
        self._failed = True
        keras_compat.forget_failed_builds(self.model)


class ModelStep:
    """Run a step of a Keras model on all towers, for Keras."""

    def __init__(
        self, model: keras.Model, towers: Towers, name: str, programs: Callable[..., Programs] = Programs
    ) -> None:
        """Prepare; nothing is traced before the first batch.

        `name` is that of the model's method: "train_step", "test_step" or "predict_step".
        """
        self._traced = _StepOfModel(model, towers, name)
        retracing = Retracing(lambda: model.steps_per_execution, keeps_each=self._traced.jit_compile)
        self.step = TowerStep(programs(towers, self._traced, trains=name == "train_step"), retracing)
        self._model, self._towers = model, towers
        self._ran = False  # whether a call has had a batch since an epoch ended

    def run(self, iterator: Any) -> Any:
        """Run `steps_per_execution` steps on batches of `iterator`; return the last one's logs.

        Args:
            iterator: a `tf.data.Iterator`, or any Python iterator over batches.

        Raises:
            StopIteration: no batch is left in a Python iterator.
            NcclSyncError: an iterator within the step has ended.
            Exception: see `TowerStep.run_on_iterator`.
        """
        if isinstance(iterator, tf.data.Iterator) and not self._traced.run_eagerly:
            try:
                with _ending_no_epoch():
                    logs = self.step.run_on_iterator(iterator)
            except NoBatchLeft:
                if self._ran:  # else there was no batch at all
                    self._warn_of_keras_count(iterator)
                self._ran = False
                raise
            except tf.errors.OpError as error:
                if "IteratorGetNext" in str(error):  # raised by the data
                    self._warn_of_keras_count(iterator, error)
                raise
            self._ran = True
            return logs
        other_libraries.check_outside_strategy()  # within which Keras divides the data
        other_libraries.check_undistributed(iterator)
        logs = None
        for _, batch in zip(range(self._model.steps_per_execution), iterator, strict=False):
            logs = self._run_batch(self._taken(batch))
        if logs is None:
            raise StopIteration
        return logs

    def _warn_of_keras_count(self, iterator: tf.data.Iterator, error: tf.errors.OpError | None = None) -> None:
        """Warn of what Keras' step does where it finds no batch, or gets an error, and towers' does not."""
        model = self._model
        program = next(reversed(self.step.programs.kept.values()), None)
        if program is None or self._traced.jit_compile or model.steps_per_execution > 1:
            return
        leaves = tf.nest.flatten(iterator.element_spec, expand_composites=True)
        known_rows = all(leaf.shape.rank and leaf.shape[0] is not None for leaf in leaves)
        written, lines = done_without_batch(program, known_rows)
        if not (written or lines):
            return
        names = [*lines, *self._towers.session.names_of(written)]
        changed = f"Keras' step changes {', '.join(names[:3])}{' and others' * (len(names) > 3)}"
        if error is None:
            self._towers.session.warn_once(
                "Towers and plain Keras differ from the first epoch's end on: the length of the data is not known "
                f"beforehand, and {changed} also where it finds no batch. Towers do not, nor does Keras if the length "
                "is known. Remedy: steps_per_epoch=, or "
                "dataset.apply(tf.data.experimental.assert_cardinality(batches))",
                about="a step without a batch",
            )
        else:
            self._towers.session.warn_once(
                "Towers and plain Keras differ from here on, if training goes on: the data have raised "
                f"{type(error).__name__}, and {changed} also where it gets no batch. Towers' step does nothing without "
                "one: the model is as it was before",
                about="an error of the data",
            )

    def run_each(self, batches: Sequence[Any]) -> Any:
        """Run one step on each batch; return the concatenated results."""
        batches = [self._taken(batch) for batch in batches]
        versions: list[Version | None] = [None] * len(batches)
        if not self._traced.run_eagerly:
            versions = [*self.step.retracing.of_batches([fixed_specs(batch) for batch in batches])]
        results = [self._run_batch(batch, version) for batch, version in zip(batches, versions, strict=True)]
        if len(results) == 1:
            return results[0]
        return tf.nest.map_structure(_concat, *results)

    def _taken(self, batch: Any) -> Any:
        """Return a batch that Keras gives, as the step takes it."""
        other_libraries.check_outside_strategy()
        return without_optionals(tf.nest.map_structure(to_tensor, batch))

    def _run_batch(self, batch: Any, version: Version | None = None) -> Any:
        """Run a step on a batch that the step takes."""
        if not self._traced.run_eagerly:
            with _ending_no_epoch():
                results = self.step.run_on_batch(batch, version)
            self._towers.session.failures.settle()  # Keras reads them at once
            return results
        health, on_oom = self._towers.options.health, self._towers.options.on_oom
        given = {"on_nonfinite": health.on_nonfinite, "audit_every": health.audit_every, "on_oom": on_oom}
        for name, value in given.items():
            if value is not None:
                raise NcclSyncError(
                    f"Expected a step that is traced, where {name} is given. Received: run_eagerly=True"
                )
        with _ending_no_epoch(), self.step.guarded(None):
            results = self._run_in_python(batch)
        self.step.count(1)
        return results

    def _run_in_python(self, batch: Any) -> Any:
        """Run the step on tower 0, line by line, as one device does; all towers get its writes."""
        variables = keras_compat.variables_of(self._model)
        before = [variable.value() for variable in variables]
        try:
            with tf.device(f"/{self._towers.layout.devices[0]}"):
                return self._traced.function(batch)
        except BaseException:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            raise


@contextlib.contextmanager
def _ending_no_epoch() -> Iterator[None]:
    """Keep Keras from taking an error of a step for the end of its data.

    Raises:
        NcclSyncError: a step has raised such an error.
    """
    try:
        yield
    except NoBatchLeft:
        raise
    except (StopIteration, tf.errors.OutOfRangeError) as error:
        raise NcclSyncError(
            f"Expected the data alone to end an epoch. Received: {type(error).__name__} within a step, as of an "
            "iterator of the step's own that has ended. The step is undone; plain Keras would end the epoch there, and "
            "keep the step's writes. Let such an iterator's dataset repeat, or shorten the data"
        ) from error


def _build_state(model: keras.Model, name: str, specs: Any, warn: Callable[[str], None]) -> bool:
    """Create what Keras would create while it traces, so that one trace is enough; return whether anything was.

    Keras traces again if it has created variables. What is done here stands for its first trace: the user's Python,
    such as a loss, runs as often. Only for Keras' own steps: the variables of another step are not known ahead.
    """
    stock = getattr(type(model), name) is getattr(keras.Model, name)
    plain = all(leaf is None or isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(specs))
    if not (stock and plain and model.compiled and name != "predict_step" and keras_compat.is_all_built(model)):
        return False
    known, optimizer = len(keras_compat.variables_of(model)), model.optimizer
    builds = name == "train_step" and optimizer is not None and not optimizer.built
    if builds and not keras_optimizers.applies_as_keras(optimizer):
        return False
    try:
        changed = keras_optimizers.build_ahead(optimizer, model.trainable_variables) if builds else []
        if changed:
            warn(
                f"Towers and Keras differ: `build` of {type(optimizer).__name__} changes {', '.join(changed[:3])}. "
                "Keras builds the optimizer while it traces the first step: then this is lost, or done again in each "
                "step. Towers do it once. Build it before: model.optimizer.build(model.trainable_variables)"
            )
        if len(keras_compat.variables_of(model)) > known or keras_compat.makes_metrics(model):
            keras_compat.build_symbolically(model, specs, trains=False)
    except Exception as error:  # of any kind: the trace raises it as Keras does, or does without
        logger.debug("Nothing is created before the trace: %s: %s", type(error).__name__, error)
    return len(keras_compat.variables_of(model)) > known


def _concat(*pieces: Any) -> Any:
    if isinstance(pieces[0], tf.SparseTensor):
        return tf.sparse.concat(0, pieces)
    return tf.concat(pieces, axis=0) if pieces[0].shape.rank else tf.stack(pieces)
