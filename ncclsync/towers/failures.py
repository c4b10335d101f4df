"""Know what has failed on some towers: raise it once, and refuse the use of what rests on it.

A step on GPUs returns before its collectives have ended. A collective that fails is aborted, so that the GPUs' streams
go on, with wrong numbers. The variables that such a step has written are then *lost*: to read a lost variable is an
error, until all of it is written again. To read a result of such a step is an error, too.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ncclsync.communicator import Communicator
from ncclsync.communicator.timeouts import interruptible
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError, ProcessError

logger = logging.getLogger("ncclsync")


@dataclasses.dataclass
class _Step:
    """A step that was enqueued."""

    last: int  # the number of its last group
    written: frozenset[int]  # the ids of the variables that it writes, unless they were written again since
    failure: BaseException | None = None  # what has ended its collectives


class Failures:
    """Be told of what was enqueued (`add`) and of what has failed; be asked what to raise; forget what is mended.

    A failure is what has ended the communicator. It is found when somebody asks, or when the communicator is about to
    forget it (`keep`), and raised once. An error that Python raises in a graph (`put`) is the cause of a step's.
    """

    def __init__(self, connect: Callable[["Failures"], Communicator]) -> None:
        """Begin without steps; `connect` returns the communicator, one of whose `users` its argument becomes."""
        self._steps: list[_Step] = []  # those whose collectives are under way
        self._failure: BaseException | None = None  # the last that was found
        self._is_raised = self._is_saved = True  # whether the user knows of it; whether tower 0 was saved after it
        self._in_graph: Exception | None = None  # raised by Python in the graph of a step
        self._save: Callable[[], None] | None = None
        self.lost: set[int] = set()  # the ids of the variables that are lost
        self.communicator = connect(self)

    def save_by(self, save: Callable[[], None] | None) -> None:
        """Let `save` save tower 0's state when a collective has failed in a step; None: nothing is saved."""
        self._save = save

    def add(self, written: frozenset[int], results: Any = None) -> None:
        """Add a step, to which all launched since the last step belongs; it writes the variables of these ids.

        If one of its collectives fails, so does a read of these variables, or of a tensor of `results`.
        """
        launched, ended = self.communicator.groups()
        self._steps = [step for step in self._steps if step.last > ended]
        # Unless the communicator has it still: the towers were joined again while the step was enqueued.
        kept = None if self._is_raised or self.communicator.find_failure() is self._failure else self._failure
        if launched > ended or kept is not None:
            step = _Step(launched, written, kept)
            if kept is None:
                self._steps.append(step)
            else:
                self.lost.update(written)
            for leaf in tf.nest.flatten(results, expand_composites=True):
                if tf.is_tensor(leaf):
                    tf_compat.read_by(leaf, functools.partial(self._read, step))

    def _read(self, step: _Step, numbers: Callable[[], Any], *, is_raised: bool = False) -> Any:
        """Read a step's result; Ctrl-C ends it. Raise the step's failure.

        Unless it `is_raised` to the user, it counts as not raised: the reader may swallow it.
        """
        try:
            with interruptible(self.communicator.interrupt):
                read = numbers()
        except KeyboardInterrupt:
            self._take()
            raise
        self._find()
        if step.failure is None:
            return read
        if is_raised:
            self._take()
        raise step.failure

    def _find(self) -> BaseException | None:
        """Return what is to be raised, or what has ended the communicator; mark what rests on the latter."""
        current = self.communicator.find_failure()
        if current is not None:
            if self._is_raised and current is not self._failure:
                self._failure, self._is_raised, self._is_saved = current, False, False
            first = self.communicator.failed_group
            # A step that has received no sums writes nothing, nor does a step that not all processes have launched.
            rests = self.communicator.was_delivered and first <= self.communicator.agreed
            for step in self._steps:
                if step.failure is None and step.last >= first:
                    step.failure = current
                    self.lost.update(step.written if rests else ())
        return current if self._is_raised else self._failure

    def _take(self) -> BaseException | None:
        """Return what `_find` finds, which is about to be raised."""
        failure = self._find()
        if failure is not None:
            self._is_raised = True
            self._steps.clear()
        return failure

    def put(self, error: Exception) -> None:
        """Keep an error that Python raises in the graph of a step: TensorFlow raises its own error in its place."""
        self._in_graph = error

    def forget(self) -> None:
        """Forget what Python has raised in a graph outside a step: a step begins."""
        self._in_graph = None

    def keep(self) -> None:
        """Keep a failure, to raise it once: another model on the same GPUs is about to join them again."""
        if self._find() is not None:
            self._steps.clear()

    def check(self) -> None:
        """Raise what has failed, once; wait for nothing."""
        failure = self._find()
        if failure is not None and not self._is_raised:
            self._take()
            raise failure

    def settle(self) -> None:
        """Wait until all collectives have ended.

        Raises:
            NcclError, NcclSyncError: one has failed, which had not been raised.
        """
        if self._steps:
            try:
                self.communicator.wait()
            except BaseException:
                self._take()
                raise
            self.check()
            self._steps.clear()

    def before_read(self, key: int) -> None:
        """Wait for the collectives that a variable may depend on, before it is read.

        Raises:
            NcclError, NcclSyncError: a collective has failed, or the variable is lost.
        """
        if any(key in step.written for step in self._steps):
            self.settle()
        if key in self.lost:
            self.raise_lost(lambda: "a variable")

    def replaced(self, key: int) -> None:
        """Record that all of a variable was written: it no longer depends on earlier steps, nor is it lost."""
        for step in self._steps:
            step.written -= {key}
        self.lost.discard(key)

    def raise_lost(self, names: Callable[[], str]) -> None:
        """Raise NcclSyncError, with the `names` of the lost variables, if any are lost."""
        if self.lost:
            raise NcclSyncError(
                f"Expected variables that are whole. Received: {names()} that a step wrote after a collective had "
                f"failed ({self._failure}). Load the weights and the optimizer's state of a checkpoint, or build the "
                "model again. With Health(emergency_checkpoint=...), a step waits for its collectives before it writes."
            )

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error to raise for a failed step; tell other processes if it is this process' own.

        TensorFlow wraps an error that a collective or Python raises within a graph, or reports an op that was cancelled
        by it. The result is the original error, or an NcclSyncError with ncclsync's sentence about it, or else `error`.
        """
        in_graph, self._in_graph, failure = self._in_graph, None, None
        if not isinstance(error, Exception):  # Ctrl-C, which may have caused both
            in_graph = None
            self._take()
        elif in_graph is None or isinstance(in_graph, ProcessError):
            failure = self._take_and_save()
        if in_graph is not None:
            return in_graph
        if failure is not None and not isinstance(error, NcclSyncError):
            return failure
        self.communicator.report_failure(error)
        if not isinstance(error, tf.errors.OpError) or (sentence := tf_compat.own_sentence(error)) is None:
            return error
        told = NcclSyncError(f"{sentence}\n\nTensorFlow: {error.message}")
        told.__cause__ = error
        return told

    def tell(self, error: BaseException) -> None:
        """Report an error that a call raises to the other processes."""
        if isinstance(error, ProcessError):  # within a step this is done already
            self._take_and_save()
        self.communicator.report_failure(error)

    def _take_and_save(self) -> BaseException | None:
        """Return what `_take` does; save tower 0's state if that was not done after this failure."""
        failure, peers = self._take(), self.communicator.peers
        if failure is not None and not self._is_saved and self._save is not None:
            self._is_saved = True
            if peers is None or peers.leads:
                try:
                    self._save()
                except Exception:  # of any kind: the failure itself must be raised
                    logger.exception("Tower 0 could not be saved after a failed collective")
        return failure
