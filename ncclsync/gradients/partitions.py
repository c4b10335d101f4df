"""Divide a tensor, or an optimizer's variable, among the towers.

An optimizer's own variables are empty while towers train; a read or a write makes the variable whole.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError
from ncclsync.ops import current_context, held
from ncclsync.sharding.holders import Holder


class Place(NamedTuple):
    """Hold where a weight lies in a partition."""

    begin: int  # index in every tower's partition
    length: int  # elements that each tower holds: the N-th part, rounded up; zeros follow the weight's last element
    elements: int  # of the whole weight
    towers: int  # N

    @property
    def end(self) -> int:
        """Return the index after the weight's part."""
        return self.begin + self.length

    def rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the towers' parts of a tensor of the weight's shape: [N, length]."""
        return tf.reshape(self._filled(tensor), [self.towers, self.length])

    def part(self, tensor: tf.Tensor, tower: Any) -> tf.Tensor:
        """Return a tower's part of a tensor of the weight's shape: [length]."""
        return tf.slice(self._filled(tensor), [tower * self.length], [self.length])

    def whole(self, rows: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
        """Return the weight, given the towers' parts, [N, length]; the inverse of `rows`."""
        flat = tf.reshape(rows, [-1])
        return tf.reshape(flat[: self.elements] if self._zeros else flat, shape)

    @property
    def _zeros(self) -> int:
        return self.towers * self.length - self.elements

    def _filled(self, tensor: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(tensor, [-1])
        return tf.concat([flat, tf.zeros([self._zeros], flat.dtype)], 0) if self._zeros else flat


class Processes(NamedTuple):
    """Say which towers are this process', and how it gets the parts of the others."""

    ranks: Sequence[int]  # [n] the numbers of this process' towers
    # Returns all towers' rows, [N, length], given this process', [n, length], and a name for messages. None: all towers
    # are this process'.
    gather: Callable[[tf.Tensor, str], tf.Tensor] | None


def not_in_a_function(variable: tf.Variable) -> NcclSyncError:
    """Return the error of a graph that uses an optimizer's variable, which is empty when it runs."""
    return NcclSyncError(
        f"Expected {variable.name}, which shard_optimizer divides among the towers, to be read and written outside of "
        "steps and of any tf.function. Received: one that does so, or a step on other towers, which need "
        "shard_optimizer=True as well. Read and write it between steps, as a callback does"
    )


class PartitionedSlot(Holder):
    """Hold an optimizer's own variable, whose parts the towers hold.

    The variable takes memory only from a read or a write until the next step.
    """

    def __init__(
        self,
        variable: tf.Variable,
        place: Place,
        partitions: Sequence[tf.Variable],
        processes: Processes,
        left: native.Held,
    ) -> None:
        """Take over an optimizer's variable, with its value; it is not kept alive.

        `place` is that of its weight in `partitions`, [n] variables of this process' towers. `left` holds what the
        variable has been given here.
        """
        super().__init__(variable)
        self._place, self.partitions, self._processes = place, partitions, processes
        self._left, self.slot = left, left.add()
        self._is_whole = self._is_written = True
        self._is_new = True  # no step has run
        self.track(reads=True, keeps=True)

    def divide(self) -> None:
        """Send a written value to the towers, before a step, and free the whole variable."""
        variable = self.held
        if variable is None or not self._is_whole:
            return
        if self._is_written or self.was_written():
            value = variable.value()
            for tower, partition in zip(self._processes.ranks, self.partitions, strict=True):
                with tf.device(partition.device):
                    part = self._place.part(tf.identity(value), tower)
                    before, after = partition[: self._place.begin], partition[self._place.end :]
                    # Not into a slice: TensorFlow would then copy the variable at every read.
                    partition.assign(tf.concat([before, part, after], 0))
        with tf.device(variable.device):
            tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(variable), value=tf.zeros([0], variable.dtype))
        held.compare(self._left, [variable], [self.slot], [True], begins=False)
        self._is_whole = self._is_written = self._is_new = False
        self.mark_others_stale()  # they read it before their next step, which makes it whole

    def make_whole(self) -> None:
        """Let the optimizer's variable hold the whole of the towers' parts. Collective, with several processes."""
        variable = self.held
        if variable is None:
            return
        if not tf.executing_eagerly():  # though it may be whole now: the function runs when it is empty again
            if self._is_new and current_context() is None:
                return  # TensorFlow initialises what was created while the step was traced
            raise not_in_a_function(variable)
        if self._is_whole:
            return
        if self.was_written():
            self.mark_stale()
            return
        with tf.device(variable.device):
            parts = [tf.identity(partition.value()) for partition in self.partitions]
            rows = tf.stack([part[self._place.begin : self._place.end] for part in parts])
            if self._processes.gather is not None:
                rows = self._processes.gather(rows, variable.name)
            whole = self._place.whole(rows, variable.shape)
            tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(variable), value=whole)
        held.compare(self._left, [variable], [self.slot], [True], begins=False)
        self._is_whole = True

    def was_written(self) -> bool:
        """Return whether others have written the variable, by whatever op, since it was divided or made whole."""
        held.let_go_of_written(self._left, [self.held], [self.slot])
        return not self._left.knows(self.slot)

    def release(self) -> None:
        """Give the variable back, whole."""
        variable = self.held
        if variable is None:
            return
        self.make_whole()
        self.untrack()
        self._left.forget(self.slot)

    def before_access(self, replaces: bool = False) -> None:
        """Let the variable hold the whole, before Python reads or writes it."""
        self.make_whole()

    def mark_stale(self, replaced: bool = False) -> None:
        """Let the next step take the variable's value: other towers that divide it make it whole by then."""
        self._is_whole = self._is_written = True
        self._left.forget(self.slot)  # so that what is written next takes no memory beside it

    def mark_shared(self) -> None:
        """Do nothing: `divide` marks the other holders stale each time."""
