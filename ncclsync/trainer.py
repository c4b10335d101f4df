"""Keras on towers: the functions that `fit`, `evaluate`, `predict` and the `_on_batch` methods call.

A model keeps its class and its loops. Only what makes its train, test and predict functions is replaced,
on the one object, by functions that run the model's own step on all towers.
"""

import dataclasses
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
from ncclsync.layout import KeptBatch, Rollback, lay_out
from ncclsync.program import Program, trace
from ncclsync.shard import Shards, open_specs, shard_batch, shard_specs
from ncclsync.towers import Towers
from ncclsync.whole_batch import synchronize_batch_norm, whole_batch_hooks


def attach(model: keras.Model, towers: Towers, sync_batch_norm: bool = False) -> None:
    """Let a model train, evaluate and predict on towers. Tower 0 is the model itself.

    Args:
        model: of any class.
        towers: where to.
        sync_batch_norm: whether every `BatchNormalization` becomes a synchronized one.
    """
    model.towers = towers
    towers.order_weights_by(lambda: model.weights)
    if len(towers) == 1 and towers.devices[0] == default_device():
        return  # plain Keras: nothing to add, and not a microsecond

    def make_train_function(force=False):
        if model.train_function is None or force:
            model.train_function = StepFunction(model, towers, "train_step", sync_batch_norm).run
        return model.train_function

    def make_test_function(force=False):
        if model.test_function is None or force:
            model.test_function = StepFunction(model, towers, "test_step", sync_batch_norm).run
        return model.test_function

    def make_predict_function(force=False):
        if model.predict_function is None or force:
            model.predict_function = StepFunction(model, towers, "predict_step", sync_batch_norm).run_each
        return model.predict_function

    if sync_batch_norm:
        synchronize_batch_norm(model)
    # From here on, and not from the first step: a write must find somebody watching.
    for variable in model.weights:
        towers.copies(private.backend_variable(variable))
    model.make_train_function = make_train_function
    model.make_test_function = make_test_function
    model.make_predict_function = make_predict_function
    model.train_function = model.test_function = model.predict_function = None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What one graph function runs, and what it needs if that fails."""

    program: Program
    rollback: Rollback
    kept: KeptBatch


class StepFunction:
    """One of a model's steps, on all towers."""

    def __init__(self, model: keras.Model, towers: Towers, name: str, sync_batch_norm: bool) -> None:
        """Prepare; nothing is traced before the first batch.

        Args:
            model: tower 0.
            towers: where the step runs.
            name: "train_step", "test_step" or "predict_step": the method of the model.
            sync_batch_norm: see `attach`; here for layers that are made only when the model is built.
        """
        self._model = model
        self._towers = towers
        self._name = name
        self._sync_batch_norm = sync_batch_norm
        self._programs: dict[str, Program] = {}  # by the specs of a shard
        self._graphs: dict[str, tuple[Callable, _Plan]] = {}  # by the specs of a batch, and what feeds it

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
            graph, plan = self._graph_of(iterator.element_spec, iterated=True)
            return self._guarded(functools.partial(graph, iterator), plan)
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
        batch = _without_optionals(tf.nest.map_structure(_to_tensor, batch))
        if self._model.run_eagerly:
            eagerly = functools.partial(run_eagerly, self._model, self._name, batch, len(self._towers))
            with step_hooks(), whole_batch_hooks():
                return self._guarded(eagerly, None)
        # The number of rows is left open: a last, smaller batch is not a reason to trace again.
        graph, plan = self._graph_of(open_specs(batch), iterated=False)
        return self._guarded(functools.partial(graph, *_leaves(batch)), plan)

    def _graph_of(self, batch_specs: Any, iterated: bool) -> "tuple[Callable, _Plan]":
        """Return the graph function for batches of these specs, having made its program before.

        Before, since a step that is traced while another function is being traced records no gradients.
        """
        key = f"{batch_specs!r} {iterated}"
        if key not in self._graphs:
            specs = _without_optionals(batch_specs)
            shard = shard_specs(specs, len(self._towers))
            if repr(shard) not in self._programs:
                self._programs[repr(shard)] = self._make_program(shard)
            program = self._programs[repr(shard)]
            for _, variable in program.variables:
                self._towers.copies(variable)
            plan = _Plan(program, Rollback(program, self._towers), KeptBatch(specs))
            if iterated:
                graph = tf.function(functools.partial(self._steps_on_iterator, plan), autograph=False)
            else:
                on_leaves = functools.partial(_spread, functools.partial(self._on_towers, plan), specs)
                graph = tf.function(on_leaves, input_signature=_leaves(specs), autograph=False)
            self._graphs[key] = graph, plan
        return self._graphs[key]

    def _guarded(self, run: Callable[[], Any], plan: "_Plan | None") -> Any:
        """Bring tower 0's state to all towers, run a step, and mend the towers if it fails."""
        self._towers.sync()
        try:
            return run()
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException as error:
            self._mend(plan)
            if plan is not None and isinstance(error, tf.errors.CancelledError):
                self._raise_what_cancelled(plan)
            raise

    def _mend(self, plan: "_Plan | None") -> None:
        """After a failed step: undo what it wrote on its way, and let all towers start anew from tower 0."""
        if plan is not None:
            plan.rollback.restore()
        self._towers.distrust()

    def _raise_what_cancelled(self, plan: "_Plan") -> None:
        """Run the batch of a cancelled step again, outside a graph: one tower after another."""
        self._towers.sync()
        try:
            lay_out(plan.program, self._towers, self._shards(plan.kept.batch()), plan.rollback)
        except BaseException:
            self._mend(plan)
            raise

    def _steps_on_iterator(self, plan: "_Plan", iterator: tf.data.Iterator) -> Any:
        """In a graph: run `steps_per_execution` steps, or as many as there are batches for."""
        logs = self._on_towers(plan, iterator.get_next())
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
            logs = self._on_towers(plan, batch.get_value())
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

    def _on_towers(self, plan: "_Plan", batch: Any) -> Any:
        """In a graph: one step on all towers."""
        batch = plan.kept.keep(_without_optionals(batch))
        return lay_out(plan.program, self._towers, self._shards(batch), plan.rollback)

    def _shards(self, batch: Any) -> Shards:
        return shard_batch(batch, len(self._towers))

    def _make_program(self, specs: Any) -> Program:
        model = self._model
        _build_state(model, self._name, specs)
        if self._sync_batch_norm:
            synchronize_batch_norm(model)
        step = _python_step(getattr(model, self._name))
        with step_hooks(), whole_batch_hooks(), tf.device(f"/{self._towers.devices[0]}"):
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
