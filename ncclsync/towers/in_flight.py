"""Track variables that depend on collectives under way, and refuse their use if a collective has failed.

A step on GPUs returns before its collectives have ended. A collective that fails is aborted, so that the GPUs' streams
go on, with wrong numbers. The variables that such a step has written are then *lost*: to read a lost variable is an
error, until all of it is written again. To read a result of such a step is an error, too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ncclsync.communicator import Communicator
from ncclsync.communicator.timeouts import interruptible
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError


@dataclasses.dataclass
class _Step:
    """A step that was enqueued."""

    last: int  # the number of its last group
    written: frozenset[int]  # the ids of the variables that it writes, unless they were written again since
    failure: BaseException | None = None  # what has ended its collectives, once that was raised


class InFlight:
    """Track the steps of some towers whose collectives are under way."""

    def __init__(self) -> None:
        """Begin without steps; `communicator` is to be set, which calls `keep`."""
        self.communicator: Communicator
        self._steps: list[_Step] = []
        self._reported: BaseException | None = None  # the failure that was raised last
        self._kept: BaseException | None = None  # one to be raised, though the GPUs are joined again
        self._raised: Exception | None = None  # by Python within a step
        self.lost: set[int] = set()  # the ids of the variables that are lost

    def add(self, written: frozenset[int], results: Any = None) -> None:
        """Add a step, to which all launched since the last step belongs; it writes the variables of these ids.

        If one of its collectives fails, so does a read of these variables, or of a tensor of `results`.
        """
        launched, ended = self.communicator.groups()
        self._steps = [step for step in self._steps if step.last > ended]
        if launched > ended or self._kept is not None:  # kept: the failure came while the step was enqueued
            step = _Step(launched, written, self._kept)
            if self._kept is None:
                self._steps.append(step)
            else:
                self.lost.update(written)
            for leaf in tf.nest.flatten(results, expand_composites=True):
                if tf.is_tensor(leaf):
                    tf_compat.read_by(leaf, functools.partial(self._read, step))

    def _read(self, step: _Step, numbers: Callable[[], Any], *, is_raised: bool = False) -> Any:
        """Read a step's result; Ctrl-C ends it. Raise the step's failure.

        Unless the failure `is_raised` to the user, it is not reported: the reader may swallow it.
        """
        try:
            with interruptible(self.communicator.interrupt):
                read = numbers()
        except KeyboardInterrupt:
            self.report()
            raise
        failure, current = step.failure, self.communicator.failure
        if failure is None and current is not None and step.last >= self.communicator.failed_group:
            failure = current
        if failure is None:
            return read
        if is_raised:
            self.report()
        raise failure

    def put(self, error: Exception) -> None:
        """Keep an error that Python raises in the graph of a step: TensorFlow raises its own error in its place."""
        self._raised = error

    def take(self) -> Exception | None:
        """Return, once, the error that Python or another process has raised in the failed step; None if neither has."""
        raised, self._raised = self._raised, None
        return raised or self.communicator.take_error()

    def check(self) -> None:
        """Raise what has failed, once; wait for nothing."""
        failure = self._kept or self.communicator.failure
        if failure is not None and failure is not self._reported:
            self.report()
            raise failure

    def keep(self, failure: BaseException | None) -> None:
        """Keep a failure, to raise it once: another model on the same GPUs is about to join them again."""
        if failure is not None and failure is not self._reported:
            self._kept = self.report()
            self._reported = None

    def settle(self) -> None:
        """Wait until all collectives have ended.

        Raises:
            NcclError, NcclSyncError: one has failed, which had not been raised.
        """
        if self._steps:
            try:
                self.communicator.wait()
            except BaseException:
                self.report()
                raise
            self.check()
            self._steps.clear()

    def report(self) -> BaseException | None:
        """Return the communicator's failure, which is about to be raised; the variables that depend on it are lost."""
        failure, self._kept = self._kept or self.communicator.failure, None
        if failure is not None:
            self._reported = failure
            first = self.communicator.failed_group
            # A step that has received no sums writes nothing, nor does a step that not all processes have launched.
            rests = self.communicator.was_delivered and first <= self.communicator.agreed
            for step in self._steps:
                if step.last >= first:
                    step.failure = failure
                    self.lost.update(step.written if rests else ())
            self._steps.clear()
        return failure

    def before_read(self, key: int) -> None:
        """Wait for the collectives that a variable may depend on, before it is read.

        Raises:
            NcclError, NcclSyncError: a collective has failed, or the variable is lost.
        """
        if any(key in step.written for step in self._steps):
            self.settle()
        if key in self.lost:
            self.raise_lost(lambda: "a variable")

    def before_write(self, key: int) -> None:
        """Record that all of a variable is written: it no longer depends on earlier steps, nor is it lost."""
        for step in self._steps:
            step.written -= {key}
        self.lost.discard(key)

    def raise_lost(self, names: Callable[[], str]) -> None:
        """Raise NcclSyncError, with the `names` of the lost variables, if any are lost."""
        if self.lost:
            raise NcclSyncError(
                f"Expected variables that are whole. Received: {names()} that a step wrote after a collective had "
                f"failed ({self._kept or self._reported}). Load the weights and the optimizer's state of a "
                "checkpoint, or build the model again. With Health(emergency_checkpoint=...), a step waits for its "
                "collectives before it writes."
            )
