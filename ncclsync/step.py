"""One step on all towers: traced once per shape of shard, laid out as one graph, run, and mended if it fails.

What the step is, a subclass says: a method of a Keras model (`trainer.py`), or a function (`loop.py`).
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ncclsync import private
from ncclsync.layout import KeptBatch, Rollback, lay_out
from ncclsync.program import Program
from ncclsync.shard import Shards, open_specs, shard_batch, shard_specs
from ncclsync.towers import TowerState


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What one graph function runs, and what it needs if that fails."""

    program: Program
    rollback: Rollback
    kept: KeptBatch


class TowerStep(abc.ABC):
    """A step on towers.

    Attributes:
        steps_per_execution: how many steps one call of the graph makes on batches of an iterator.
    """

    steps_per_execution = 1

    def __init__(self, towers: TowerState) -> None:
        """Prepare; nothing is traced before the first batch."""
        self._towers = towers
        self._programs: dict[str, Program] = {}  # by the specs of a shard
        self._graphs: dict[str, tuple[Callable, _Plan]] = {}  # by the specs of a batch, and what feeds it

    @abc.abstractmethod
    def make_program(self, specs: Any) -> Program:
        """Trace the step for shards of these specs, and cut it."""

    def run_on_iterator(self, iterator: tf.data.Iterator) -> Any:
        """Run `steps_per_execution` steps, or as many as there are batches for; return the last results.

        Raises:
            OutOfRangeError: no batch is left.
            NcclSyncError: the towers are closed.
            Exception: whatever a step raises on any tower. All towers' weights are then equal, and are
                those from before that step or from after it.
        """
        graph, plan = self._graph_of(iterator.element_spec, iterated=True)
        return self.guarded(functools.partial(graph, iterator), plan)

    def run_on_batch(self, batch: Any) -> Any:
        """Run one step on a batch of tensors; return its results. Raises what `run_on_iterator` does."""
        # The number of rows is left open: a last, smaller batch is not a reason to trace again.
        graph, plan = self._graph_of(open_specs(batch), iterated=False)
        return self.guarded(functools.partial(graph, *leaves_of(batch)), plan)

    def _graph_of(self, batch_specs: Any, iterated: bool) -> "tuple[Callable, _Plan]":
        """Return the graph function for batches of these specs, having made its program before.

        Before, since a step that is traced while another function is being traced records no gradients.
        """
        key = f"{batch_specs!r} {iterated}"
        if key not in self._graphs:
            specs = without_optionals(batch_specs)
            shard = shard_specs(specs, len(self._towers))
            if repr(shard) not in self._programs:
                self._programs[repr(shard)] = self.make_program(shard)
            program = self._programs[repr(shard)]
            for _, variable in program.variables:
                self._towers.copies(variable)
            plan = _Plan(program, Rollback(program, self._towers), KeptBatch(specs))
            if iterated:
                graph = tf.function(functools.partial(self._steps_on_iterator, plan), autograph=False)
            else:
                on_leaves = functools.partial(_spread, functools.partial(self._on_towers, plan), specs)
                graph = tf.function(on_leaves, input_signature=leaves_of(specs), autograph=False)
            self._graphs[key] = graph, plan
        return self._graphs[key]

    def guarded(self, run: Callable[[], Any], plan: "_Plan | None") -> Any:
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
        steps = self.steps_per_execution
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
            with tf.control_dependencies(leaves_of(logs)):
                done = done + 1
            # A batch that no step of this call will use stays in the iterator.
            return done, fetch_if_needed(done), tf.nest.flatten(logs)

        with tf.control_dependencies(leaves_of(logs)):
            done = tf.constant(1)
        _, _, flat = tf.while_loop(
            lambda done, batch, _: batch.has_value(), body, (done, fetch_if_needed(done), flat)
        )
        return tf.nest.pack_sequence_as(logs, flat)

    def _on_towers(self, plan: "_Plan", batch: Any) -> Any:
        """In a graph: one step on all towers."""
        batch = plan.kept.keep(without_optionals(batch))
        return lay_out(plan.program, self._towers, self._shards(batch), plan.rollback)

    def _shards(self, batch: Any) -> Shards:
        return shard_batch(batch, len(self._towers))


def python_step(step: Callable) -> Callable:
    """Return the Python function behind a step that its author decorated with `tf.function`."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return private.autograph_converted(step.python_function)
    return step


def without_optionals(batch: Any) -> Any:
    """Return a batch, or its specs, with None where it holds a `tf.experimental.Optional`, as Keras does."""
    missing = (tf.experimental.Optional, tf.OptionalSpec)
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, batch)


def to_tensor(leaf: Any) -> Any:
    """Return a leaf of a batch as a tensor; None stays None."""
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional):
        return leaf
    return tf.convert_to_tensor(leaf)


def leaves_of(structure: Any) -> list[Any]:
    """Return the leaves of a nested structure that are not None."""
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _spread(function: Callable, like: Any, *leaves: Any) -> Any:
    """Call `function` on a structure such as `like` with these leaves in place of those that are not None."""
    given = iter(leaves)
    return function(tf.nest.map_structure(lambda leaf: None if leaf is None else next(given), like))
