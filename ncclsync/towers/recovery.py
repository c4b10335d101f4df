"""Keep a step's batch, to run it again if it fails, and old values, to undo its writes.

`laying_out.py` and `step.py` call this while they build the step's graph, and after a failure.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops.spans import delay
from ncclsync.program.own_memory import own_copy
from ncclsync.program.program import Program
from ncclsync.sharding.roles import Role, role_of
from ncclsync.sharding.shards import components_of, packed
from ncclsync.towers.layout import is_cpu
from ncclsync.towers.state import TowerState


class KeptBatch:
    """Keep the batch of the current step, without a copy, to run it again in more shards, or to find an error.

    When one tower fails, TensorFlow cancels the others, and may report the cancellation instead. The same step, run
    outside a graph, tower by tower, raises the error itself.
    """

    def __init__(self, specs: Any) -> None:
        """Prepare for batches of these `tf.TypeSpec`s."""
        self._specs = specs
        self._given: list[tf.Tensor] | None = None  # see `keep_components`
        with tf.device("/CPU:0"):
            self._leaves = [
                tf.Variable(tf.zeros([0], leaf.dtype), shape=tf.TensorShape(None), trainable=False)
                if leaf.dtype != tf.string
                else tf.Variable([""], shape=tf.TensorShape(None), trainable=False)
                for leaf in components_of(specs)
            ]

    def keep(self, batch: Any) -> Any:
        """Keep a batch, in the graph of the step; return it for the step to use."""
        kept = [variable.assign(leaf) for variable, leaf in zip(self._leaves, components_of(batch), strict=True)]
        with tf.device("/CPU:0"):  # where the leaves are: without a device, TensorFlow would send them to a GPU
            return delay(batch, _ops(kept))

    def keep_components(self, components: list[tf.Tensor]) -> None:
        """Keep a batch that exists before the step begins, by its components, in the host's memory."""
        self._given = components

    def batch(self) -> Any:
        """Return the last batch kept."""
        with tf.device("/CPU:0"):  # else TensorFlow copies it to a GPU, which may be full
            components = self._given or [variable.read_value() for variable in self._leaves]
            return packed(self._specs, components)


class Rollback:
    """Undo a step that failed on one tower after it had written weights.

    The saved values share memory with tower 0's variables until a step writes those.
    """

    undone = False  # whether the last call of `restore` has undone a step

    def __init__(
        self, program: Program, towers: TowerState, report: Callable[[np.ndarray, np.ndarray], None] | None = None
    ) -> None:
        """Prepare for a program on towers.

        If the program has the result `finite`, and a value of it is False, `report` is called with these values and the
        shards' samples, before the step is undone; its error fails the step.
        """
        variables, replicas = dict(program.variables), towers.replicas
        self._report = report
        # (variable, its value before the step, the copies that get it where a gradient is not finite)
        self._saved: list[tuple[tf.Variable, tf.Variable, list[tf.Variable]]] = []
        with tf.device(f"/{towers.layout.devices[0]}"):
            for name, undone in program.rollback:
                copies = replicas.of(variables[name])
                # One value restores equal copies.
                groups = [copies] if replicas.role_of(variables[name]) is Role.SAME else [[one] for one in copies]
                self._saved += [(group[0], replicas.saved(group[0]), group if undone else []) for group in groups]
            # The first tower of each process holds a metric's sum; within a step tower 0 alone does.
            others = not towers.layout.is_chief
            self._sums = [one for _, one in program.variables if others and role_of(one) is Role.SUM]
            self._saved += [(variable, replicas.saved(variable), []) for variable in self._sums]
            # True while a step is under way. Without saved values it is needed if the step may run again; or if its
            # graph takes the batch: the end of that iterator comes before this is True, the end of another one after.
            needed = self._saved or towers.options.on_oom is not None or not towers.layout.on_gpus
            self._begun = tf.Variable(False, trainable=False) if needed else None

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun and not ended, as far as that is recorded."""
        return self._begun is not None and bool(self._begun.numpy())

    def begin(self) -> list[tf.Operation]:
        """Save, in the graph of the step; return the ops that the step must wait for."""
        if self._begun is None:
            return []
        reads = [
            tf.raw_ops.ReadVariableOp(resource=tf_compat.handle_of(one), dtype=one.dtype) for one, _, _ in self._saved
        ]
        saves = [saved.assign(value) for (_, saved, _), value in zip(self._saved, reads, strict=True)]
        with tf.control_dependencies(_ops(saves)):
            begun = _ops([self._begun.assign(True)])
        with tf.control_dependencies(begun):
            emptied = [
                tf.raw_ops.AssignVariableOp(
                    resource=tf_compat.handle_of(variable), value=tf.zeros(variable.shape, variable.dtype)
                )
                for variable in self._sums
            ]
        return [*begun, *(emptied if not tf.executing_eagerly() else [])]

    def end(self, done: tf.Operation, finite: tf.Tensor | None, sizes: Sequence[tf.Tensor]) -> tf.Operation:
        """Record, in its graph, that the step which `done` ends is complete; undo it first if not all is `finite`.

        That is the value of `program.finite`, or None; `sizes` are the samples of each shard.
        """
        if finite is not None:
            with tf.control_dependencies([done]):
                undo = functools.partial(self._undo, finite, sizes)
                done = tf.cond(tf.reduce_all(finite), lambda: tf.constant(0.0), undo)
        if self._begun is None:
            return done
        with tf.control_dependencies([done]):
            return tf.group(self._begun.assign(False))

    def forget(self) -> None:
        """Forget whether a step was undone: the next begins."""
        self.undone = False

    def restore(self) -> None:
        """Undo a step that failed under way; do nothing if it failed before it began."""
        self.undone = self.under_way
        if self._begun is not None and self.undone:
            for variable, saved, _ in self._saved:
                variable.assign(saved)
            self._begun.assign(False)

    def _undo(self, finite: tf.Tensor, sizes: Sequence[tf.Tensor]) -> tf.Tensor:
        """Give every tower, in a branch of the step's graph, the values from before the step."""
        with tf.device("/CPU:0"):
            reported = tf.numpy_function(self._report, [finite, tf.stack(sizes)], [])
        writes = []
        with tf.control_dependencies([] if tf.executing_eagerly() else [reported]):
            for _, saved, copies in self._saved:
                for copy in copies:
                    with tf.device(copy.device):
                        value = saved.read_value()
                        value = own_copy(value) if is_cpu(copy.device) else value
                        writes.append(tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(copy), value=value))
        with tf.control_dependencies([] if tf.executing_eagerly() else writes):
            return tf.constant(0.0)


def _ops(assigned: Sequence[Any]) -> list[tf.Operation]:
    """Return the ops to wait for; none outside a graph, where everything has happened already."""
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]
