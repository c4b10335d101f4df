"""Keep what a step needs if it fails: its batch, to run it again, and old values, to undo its writes.

Called by `laying_out.py` and `step.py` while the graph of the step is built, and when it has failed.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.errors import NonFiniteError
from ncclsync.program.own_memory import own_copy
from ncclsync.program.program import Program
from ncclsync.semantics.roles import Role, role_of
from ncclsync.semantics.shards import packed, rows_of
from ncclsync.towers.layout import is_cpu
from ncclsync.towers.state import TowerState


class Rollback:
    """Undo a step that failed on one tower after it had written weights; keep its batch for who runs it again.

    That is, in more shards; or to find an error: when one tower fails, TensorFlow cancels the others, and may report
    the cancellation instead. The same step, run outside a graph, tower by tower, raises the error itself.

    The saved values share memory with tower 0's variables until a step writes those.

    Attributes:
        components: of the last step's batch, in the host's memory.
        undone: whether `restore` has undone a step that was under way when it was last called.
    """

    def __init__(self, program: Program, towers: TowerState, specs: Any = None) -> None:
        """Prepare for a program that is run on these towers, on batches of these `tf.TypeSpec`s."""
        self.components: Sequence[tf.Tensor] = ()
        self.undone = False
        self._program, self._towers, self._specs = program, towers, specs
        variables = dict(program.variables)
        # (variable, its value before the step, the copies that get it where a gradient is not finite)
        self._saved: list[tuple[tf.Variable, tf.Variable, list[tf.Variable]]] = []
        with tf.device(f"/{towers.layout.devices[0]}"):
            for name, undone in program.rollback:
                copies = towers.replicas.of(variables[name])
                # One value restores equal copies.
                groups = (
                    [copies] if towers.replicas.role_of(variables[name]) is Role.SAME else [[one] for one in copies]
                )
                self._saved += [(group[0], _saved(group[0]), group if undone else []) for group in groups]
            # Each process' first tower holds the sum that a metric's state is, and in a step tower 0 alone.
            others = not towers.layout.is_chief
            self._sums = [one for _, one in program.variables if others and role_of(one) is Role.SUM]
            self._saved += [(variable, _saved(variable), []) for variable in self._sums]
            # True while a step is under way; needed also for one that writes nothing, if it may run again.
            needed = self._saved or towers.options.on_oom is not None
            self._begun = tf.Variable(False, trainable=False) if needed else None

    def batch(self) -> Any:
        """Return the batch of the last step."""
        with tf.device("/CPU:0"):  # else TensorFlow copies it to a GPU, which may be full
            return packed(self._specs, self.components)

    def begin(self) -> list[tf.Operation]:
        """Save, in the graph of the step; the step must wait for what is returned."""
        if self._begun is None:
            return []
        saves = [saved.assign(variable.read_value()) for variable, saved, _ in self._saved]
        with tf.control_dependencies(_ops(saves)):
            begun = _ops([self._begun.assign(True)])
        with tf.control_dependencies(begun):
            emptied = [
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros(variable.shape, variable.dtype))
                for variable in self._sums
            ]
        return [*begun, *(emptied if not tf.executing_eagerly() else [])]

    def end(self, done: tf.Operation, finite: tf.Tensor | None, sizes: Sequence[tf.Tensor]) -> tf.Operation:
        """Record, in its graph, that the step which `done` ends is complete; undo it first if not all is `finite`.

        That is the value of `program.finite`, if the program has it; `sizes` are the samples of each shard.
        """
        if finite is not None:
            with tf.control_dependencies([done]):
                undo = functools.partial(self._undo, finite, sizes)
                done = tf.cond(tf.reduce_all(finite), lambda: tf.constant(0.0), undo)
        if self._begun is None:
            return done
        with tf.control_dependencies([done]):
            return tf.group(self._begun.assign(False))

    def restore(self) -> None:
        """Undo a step that failed on its way; do nothing if it failed before it began."""
        self.undone = self._begun is not None and bool(self._begun.numpy())
        if self._begun is not None and self.undone:
            for variable, saved, _ in self._saved:
                variable.assign(saved)
            self._begun.assign(False)

    def _undo(self, finite: tf.Tensor, sizes: Sequence[tf.Tensor]) -> tf.Tensor:
        """Give every tower, in a branch of the step's graph, the values from before the step."""
        borrowed = weakref.ref(self)  # TensorFlow keeps every py op's function for good

        def report(finite: np.ndarray, sizes: np.ndarray) -> None:
            rollback = borrowed()
            assert rollback is not None  # the step that calls it is its own
            rollback._report(finite, sizes)

        with tf.device("/CPU:0"):
            reported = tf.numpy_function(report, [finite, tf.stack(sizes)], [])
        writes = []
        with tf.control_dependencies([] if tf.executing_eagerly() else [reported]):
            for _, saved, copies in self._saved:
                for copy in copies:
                    with tf.device(copy.device):
                        value = saved.read_value()
                        value = own_copy(value) if is_cpu(copy.device) else value
                        writes.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
        with tf.control_dependencies([] if tf.executing_eagerly() else writes):
            return tf.constant(0.0)

    def _report(self, finite: np.ndarray, sizes: np.ndarray) -> None:
        """Report gradients that are not finite; called by the graph of a step, whose batch is kept."""
        batch, layout, total = self.batch(), self._towers.layout, int(sizes.sum())
        if rows_of(batch) != total:  # it has this process' rows alone: copies stand in the others' places
            rows = tf.range(total) - int(sizes[: layout.own_shards[0]].sum())
            rows = tf.clip_by_value(rows, 0, (rows_of(batch) or 1) - 1)
            batch = tf.nest.map_structure(lambda one: tf.gather(one, rows), batch)
        try:
            self._towers.watch.on_nonfinite.report(finite, sizes, self._program.gradients, batch, layout.owners)
        except NonFiniteError as error:  # TensorFlow wraps it
            self._towers.session.in_flight.put(error)
            raise


def _saved(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(variable.value(), trainable=False)


def _ops(assigned: Sequence[Any]) -> list[tf.Operation]:
    """Return the ops to wait for; none outside a graph, where everything has happened already."""
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]
