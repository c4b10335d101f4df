"""Know which variables rest on collectives that have not ended, and let nobody use those that have failed.

A step on GPUs returns before its collectives have ended. One that fails is aborted, so that the GPUs' streams go on:
what they then compute is not to be relied upon. From then on the variables that such a step has written are *lost*: to
read one is an error, until all of it is written again.
"""

from collections.abc import Callable

from ncclsync.communicator import Communicator
from ncclsync.errors import NcclSyncError


class InFlight:
    """Track the steps of some towers whose collectives are under way."""

    def __init__(self, communicator: Communicator) -> None:
        """Begin with none."""
        self._communicator = communicator
        self._steps: list[tuple[int, frozenset[int]]] = []  # the number of the last group, what was written
        self._told: BaseException | None = None  # the failure that was raised last
        self._lost: set[int] = set()

    @property
    def active(self) -> bool:
        """Return whether steps return before their collectives have ended."""
        return self._communicator.enqueues

    def add(self, written: frozenset[int]) -> None:
        """Add a step that has been enqueued; `written` are the ids of the variables that it writes."""
        if self.active:
            launched, ended = self._communicator.groups()
            self._steps = [step for step in self._steps if step[0] > ended]
            if launched > ended:
                self._steps.append((launched, written))

    def check(self) -> None:
        """Raise what has failed, once; wait for nothing."""
        failure = self._communicator.failure
        if failure is not None and failure is not self._told:
            self.tell()
            raise failure

    def settle(self) -> None:
        """Wait until all collectives have ended.

        Raises:
            NcclError, NcclSyncError: one has failed, which had not been raised.
        """
        if self._steps:
            self._communicator.wait()
            self.check()
            self._steps.clear()

    def tell(self, written: frozenset[int] = frozenset()) -> BaseException | None:
        """Return the communicator's failure, which is about to be raised; what rests on it is lost.

        Args:
            written: ids of the variables that a step writes which has failed with it, half-way.
        """
        failure = self._communicator.failure
        if failure is not None and failure is not self._told:
            self._told = failure
            first = self._communicator.failed_group
            if self._communicator.was_delivered:
                self._lost.update(written)
            self._lost.update(*(written for group, written in self._steps if group >= first))
            self._steps.clear()
        return failure

    def before_read(self, key: int) -> None:
        """Let a variable be read: wait for what it may rest on.

        Raises:
            NcclError, NcclSyncError: a collective has failed, or the variable is lost.
        """
        if any(key in written for _, written in self._steps):
            self.settle()
        if key in self._lost:
            self.raise_lost(lambda: "a variable")

    def before_write(self, key: int) -> None:
        """Let all of a variable be written: it rests on no step before, and is lost no more."""
        self._steps = [(group, written - {key}) for group, written in self._steps]
        self._lost.discard(key)

    def raise_lost(self, names: Callable[[], str]) -> None:
        """Raise NcclSyncError if variables are lost.

        Args:
            names: of the lost ones, for the message.
        """
        if self._lost:
            raise NcclSyncError(
                f"Expected variables that are whole. Received: {names()} that a step wrote after a collective had "
                f"failed ({self._told}). Load the weights and the optimizer's state of a checkpoint, or build the "
                "model again. With emergency_checkpoint=..., a step waits for its collectives before it writes."
            )

    @property
    def lost(self) -> frozenset[int]:
        """Return the ids of the variables that are lost."""
        return frozenset(self._lost)

    def forget(self, key: int) -> None:
        """Forget a variable that was deleted."""
        self._lost.discard(key)
