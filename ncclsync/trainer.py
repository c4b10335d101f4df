"""Keras on towers: the functions that `fit`, `evaluate`, `predict` and the `_on_batch` methods call.

A model keeps its class and its loops. Only what makes its train, test and predict functions is replaced,
on the one object, by functions that run the model's own step on all towers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import private
from ncclsync.cut import cut
from ncclsync.devices import default_device
from ncclsync.eager import run_eagerly
from ncclsync.hooks import step_hooks
from ncclsync.layout import Rollback, lay_out
from ncclsync.program import Program, trace
from ncclsync.shard import open_specs, shard_batch, shard_specs
from ncclsync.towers import Towers


def attach(model: keras.Model, towers: Towers) -> None:
    """Let a model train, evaluate and predict on towers. Tower 0 is the model itself."""
    model.towers = towers
    towers.order_weights_by(lambda: model.weights)
    if len(towers) == 1 and towers.devices[0] == default_device():
        return  # plain Keras: nothing to add, and not a microsecond

    def make_train_function(force=False):
        if model.train_function is None or force:
            model.train_function = StepFunction(model, towers, "train_step").run
        return model.train_function

    def make_test_function(force=False):
        if model.test_function is None or force:
            model.test_function = StepFunction(model, towers, "test_step").run
        return model.test_function

    def make_predict_function(force=False):
        if model.predict_function is None or force:
            model.predict_function = StepFunction(model, towers, "predict_step").run_each
        return model.predict_function

    # From here on, and not from the first step: a write must find somebody watching.
    for variable in model.weights:
        towers.copies(private.backend_variable(variable))
    model.make_train_function = make_train_function
    model.make_test_function = make_test_function
    model.make_predict_function = make_predict_function
    model.train_function = model.test_function = model.predict_function = None


class StepFunction:
    """One of a model's steps, on all towers."""

    def __init__(self, model: keras.Model, towers: Towers, name: str) -> None:
        """Prepare; nothing is traced before the first batch.

        Args:
            model: tower 0.
            towers: where the step runs.
            name: "train_step", "test_step" or "predict_step": the method of the model.
        """
        self._model = model
        self._towers = towers
        self._name = name
        self._programs: dict[str, tuple[Program, Rollback]] = {}  # by the specs of a shard
        self._functions: dict[str, Callable] = {}  # by the specs of a batch, and whether it is iterated

    def run(self, iterator: Any) -> Any:
        """Run `steps_per_execution` steps on batches of `iterator`; return the last one's logs.

        Args:
            iterator: a `tf.data.Iterator`, or any Python iterator over batches.

        Raises:
            StopIteration, OutOfRangeError: no batch is left.
            NcclSyncError: the towers are closed.
            Exception: whatever a step raises on any tower. All towers' weights are then equal, and are
                those from before that step or from after it.
        """
        if isinstance(iterator, tf.data.Iterator) and not self._model.run_eagerly:
            function = self._function("iterator", self._steps_on_iterator, iterator.element_spec)
            return self._guarded(function, iterator)
        logs = None
        for _, batch in zip(range(self._model.steps_per_execution), iterator, strict=False):
            logs = self._run_batch(batch)
        if logs is None:
            raise StopIteration
        return logs

    def run_each(self, batches: Sequence[Any]) -> Any:
        """Run one step on each batch; return the results of all, concatenated."""
        results = [self._run_batch(batch) for batch in batches]
        if len(results) == 1:
            return results[0]
        return tf.nest.map_structure(_concat, *results)

    def _run_batch(self, batch: Any) -> Any:
        batch = tf.nest.map_structure(_to_tensor, batch)
        if self._model.run_eagerly:
            with step_hooks():
                return self._guarded(
                    run_eagerly, self._model, self._name, _without_optionals(batch), len(self._towers)
                )
        # The number of rows is left open: a last, smaller batch is not a reason to trace again.
        batch = _without_optionals(batch)
        function = self._function(
            "batch", functools.partial(_spread, self._on_towers, batch), open_specs(batch)
        )
        return self._guarded(function, *_leaves(batch))

    def _function(self, kind: str, function: Callable, batch_specs: Any) -> Callable:
        """Return the graph function for batches of these specs, having made its program before.

        Before, since a step that is traced while another function is being traced records no gradients.
        """
        key = f"{kind} {batch_specs!r}"
        if key not in self._functions:
            specs = shard_specs(_without_optionals(batch_specs), len(self._towers))
            if repr(specs) not in self._programs:
                program = self._make_program(specs)
                for _, variable in program.variables:
                    self._towers.copies(variable)
                self._programs[repr(specs)] = program, Rollback(program, self._towers)
            signature = None if kind == "iterator" else _leaves(batch_specs)
            self._functions[key] = tf.function(function, input_signature=signature, autograph=False)
        return self._functions[key]

    def _guarded(self, function: Callable, *arguments: Any) -> Any:
        """Bring tower 0's state to all towers, run a step, and mend the towers if it fails."""
        self._towers.sync()
        try:
            return function(*arguments)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            for _, rollback in self._programs.values():
                rollback.restore()
            self._towers.distrust()
            raise

    def _steps_on_iterator(self, iterator: tf.data.Iterator) -> Any:
        """In a graph: run `steps_per_execution` steps, or as many as there are batches for."""
        logs = self._on_towers(iterator.get_next())
        steps = self._model.steps_per_execution
        if steps == 1:
            return logs
        flat = tf.nest.flatten(logs)

        def fetch_if_needed(done):
            return tf.cond(
                done < steps,
                iterator.get_next_as_optional,
                lambda: tf.experimental.Optional.empty(iterator.element_spec),
            )

        def body(done, batch, _):
            logs = self._on_towers(batch.get_value())
            with tf.control_dependencies(_leaves(logs)):
                done = done + 1
            # A batch that no step of this call will use stays in the iterator.
            return done, fetch_if_needed(done), tf.nest.flatten(logs)

        with tf.control_dependencies(_leaves(logs)):
            done = tf.constant(1)
        _, _, flat = tf.while_loop(
            lambda done, batch, _: batch.has_value(), body, (done, fetch_if_needed(done), flat)
        )
        return tf.nest.pack_sequence_as(logs, flat)

    def _on_towers(self, batch: Any) -> Any:
        """In a graph: one step on all towers."""
        batch = _without_optionals(batch)
        program, rollback = self._programs[repr(shard_specs(batch, len(self._towers)))]
        return lay_out(program, self._towers, shard_batch(batch, len(self._towers)), rollback)

    def _make_program(self, specs: Any) -> Program:
        model = self._model
        _build_state(model, self._name, specs)
        step = _python_step(getattr(model, self._name))
        with step_hooks(), tf.device(f"/{self._towers.devices[0]}"):
            traced = trace(step, specs)
        return cut(
            traced,
            home_device=self._towers.devices[0],
            bucket_bytes=self._towers.bucket_bytes,
            concat_outputs=self._name == "predict_step",
            jit_compile=bool(model.jit_compile),
        )


def _build_state(model: keras.Model, name: str, specs: Any) -> None:
    """Create what Keras would create while it traces, so that one trace is enough.

    Only for Keras' own steps: what another step needs, nobody knows before it is traced.
    """
    stock = getattr(type(model), name) is getattr(keras.Model, name)
    plain = all(leaf is None or isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(specs))
    if stock and plain and model.built and model.compiled and name != "predict_step":
        private.build_symbolically(model, specs)


def _python_step(step: Callable) -> Callable:
    """Return the Python function behind a step that its author decorated with `tf.function`."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return private.autograph_converted(step.python_function)
    return step


def _without_optionals(batch: Any) -> Any:
    """Return a batch, or its specs, with None where it holds a `tf.experimental.Optional`, as Keras does."""
    missing = (tf.experimental.Optional, tf.OptionalSpec)
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, batch)


def _to_tensor(leaf: Any) -> Any:
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional):
        return leaf
    return tf.convert_to_tensor(leaf)


def _leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _spread(function: Callable, like: Any, *leaves: Any) -> Any:
    """Call `function` on a structure such as `like` with these leaves in place of those that are not None."""
    given = iter(leaves)
    return function(tf.nest.map_structure(lambda leaf: None if leaf is None else next(given), like))


def _concat(*pieces: Any) -> Any:
    if isinstance(pieces[0], tf.SparseTensor):
        return tf.sparse.concat(0, pieces)
    return tf.concat(pieces, axis=0) if pieces[0].shape.rank else tf.stack(pieces)
