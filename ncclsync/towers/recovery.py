"""Keep a step's batch, to run it again if it fails, and old values, to undo its writes.

Called by `laying_out.py` and `step.py` while the graph of the step is built, and when it has failed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.program.own_memory import own_copy
from ncclsync.program.program import Program
from ncclsync.semantics.roles import Role, role_of
from ncclsync.semantics.shards import components_of, packed
from ncclsync.towers.feeding import feeds
from ncclsync.towers.state import TowerState


class KeptBatch:
    """Keep the batch of the current step, to be run again if that step fails without saying why.

    It shares the batch's memory. An error on one tower cancels the others, and TensorFlow may report the
    cancellation instead. If the step is run again outside a graph, tower by tower, only the error is left.
    """

    def __init__(self, specs: Any) -> None:
        """Prepare for batches of these `tf.TypeSpec`s."""
        self._specs = specs
        self._held: list[tf.Tensor] | None = None  # the components, where they are not in `_leaves`
        with tf.device("/CPU:0"):
            self._leaves = [
                tf.Variable(tf.zeros([0], leaf.dtype), shape=tf.TensorShape(None), trainable=False)
                if leaf.dtype != tf.string
                else tf.Variable([""], shape=tf.TensorShape(None), trainable=False)
                for leaf in components_of(specs)
            ]

    def keep(self, batch: Any) -> Any:
        """Keep a batch, in the graph of the step; return it for the step to use."""
        leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
        kept = [variable.assign(leaf) for variable, leaf in zip(self._leaves, leaves, strict=True)]
        # Where the leaves are: with no device given, TensorFlow would send them to a GPU.
        with tf.device("/CPU:0"), tf.control_dependencies(_ops(kept)):
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), batch, expand_composites=True
            )

    def hold(self, components: list[tf.Tensor]) -> None:
        """Keep a batch that is there before the step begins: its components, in the host's memory."""
        self._held = components

    def batch(self) -> Any:
        """Return the last batch kept."""
        with tf.device("/CPU:0"):  # else TensorFlow copies it to a GPU, which may be full
            components = [variable.read_value() for variable in self._leaves] if self._held is None else self._held
            return packed(self._specs, components)


class Rollback:
    """Undo a step that failed on one tower after it had written weights.

    The saved values share memory with tower 0's variables until a step writes those.

    Attributes:
        undone: whether `restore` has undone a step that was under way when it was last called.
    """

    undone = False

    def __init__(
        self, program: Program, towers: TowerState, report: Callable[[np.ndarray, np.ndarray], None] | None = None
    ) -> None:
        """Prepare for a program.

        Args:
            program: what is run.
            towers: where.
            report: is called with the values of `program.finite` if one is False, and the shards' samples, before
                the step is undone; what it raises fails the step. Needed if the program has that result.
        """
        variables = dict(program.variables)
        self._report = report
        with tf.device(f"/{towers.layout.devices[0]}"):
            self._saved = [
                (group[0], tf.Variable(group[0].value(), trainable=False), group, undone)
                for name, undone in program.rollback
                for group in _restored(variables[name], towers)
            ]
            # Each process' first tower holds the sum that a metric's state is, and in a step tower 0 alone.
            others = not towers.layout.is_chief
            sums = [variable for _, variable in program.variables if others and role_of(variable) is Role.SUM]
            self._sums = [(variable, tf.Variable(variable.value(), trainable=False)) for variable in sums]
            # Says that a step is under way; also of one that writes nothing, if it may run again, or takes its batch
            # within the graph: its own iterator may end before that, and another one after it.
            needed = self._saved or self._sums or towers.options.on_oom is not None or not feeds(towers.layout.devices)
            self._open = tf.Variable(False, trainable=False) if needed else None

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun that has not ended, as far as that is recorded."""
        return self._open is not None and bool(self._open.numpy())

    def begin(self) -> list[tf.Operation]:
        """Save, in the graph of the step; the step must wait for what is returned."""
        if self._open is None:
            return []
        saves = [saved.assign(variable.read_value()) for variable, saved, *_ in self._saved]
        saves += [saved.assign(variable.read_value()) for variable, saved in self._sums]
        with tf.control_dependencies(_ops(saves)):
            opened = _ops([self._open.assign(True)])
        with tf.control_dependencies(opened):
            emptied = [
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros(variable.shape, variable.dtype))
                for variable, _ in self._sums
            ]
        return [*opened, *(emptied if not tf.executing_eagerly() else [])]

    def end(self, done: tf.Operation, finite: tf.Tensor | None, sizes: Sequence[tf.Tensor]) -> tf.Operation:
        """Record, in the graph of the step, that it is complete, having undone it if not all is `finite`.

        Args:
            done: ends the step.
            finite: the value of `program.finite`, if it has that.
            sizes: the samples of each shard.
        """
        if finite is not None:
            with tf.control_dependencies([done]):
                undo = functools.partial(self._undo, finite, sizes)
                done = tf.cond(tf.reduce_all(finite), lambda: tf.constant(0.0), undo)
        if self._open is None:
            return done
        with tf.control_dependencies([done]):
            return tf.group(self._open.assign(False))

    def restore(self) -> None:
        """Undo a step that failed on its way; do nothing if it failed before it began."""
        self.undone = self.under_way
        if self._open is not None and self.undone:
            for variable, saved, *_ in (*self._saved, *self._sums):
                variable.assign(saved)
            self._open.assign(False)

    def _undo(self, finite: tf.Tensor, sizes: Sequence[tf.Tensor]) -> tf.Tensor:
        """Give every tower, in a branch of the step's graph, the values from before the step."""
        with tf.device("/CPU:0"):
            reported = tf.numpy_function(self._report, [finite, tf.stack(sizes)], [])
        writes = []
        with tf.control_dependencies([] if tf.executing_eagerly() else [reported]):
            for _, saved, group, is_undone in self._saved:
                for copy in group if is_undone else ():
                    with tf.device(copy.device):
                        value = saved.read_value()
                        value = own_copy(value) if "CPU" in copy.device else value
                        writes.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
        with tf.control_dependencies([] if tf.executing_eagerly() else writes):
            return tf.constant(0.0)


def _restored(variable: tf.Variable, towers: TowerState) -> list[list[tf.Variable]]:
    """Return the copies to restore after a failed step, in groups of one value.

    All towers' copies are a group, or each is one where they differ. The first of a group is saved.
    """
    copies = towers.replicas.of(variable)
    differ = towers.replicas.role_of(variable) is not Role.SAME
    return [[copy] for copy in copies] if differ else [copies]


def _ops(assigned: Sequence[Any]) -> list[tf.Operation]:
    """Return the ops to wait for; none outside a graph, where everything has happened already."""
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]
