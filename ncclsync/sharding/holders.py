"""Tell all holders of a variable's copies or parts in the process when one of them writes it.

A variable may belong to several models, each on towers of its own: a GAN's discriminator trains by itself and
as part of another model. `replicas` and `partitions` are the holders; a variable has one tracker for all.
"""

import abc
import functools
import weakref
from collections.abc import Callable

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat

_TRACKER = "_ncclsync_tracker"  # an attribute of a variable


def holders_of(variable: tf.Variable) -> "list[Holder]":
    """Return who holds copies or parts of a variable."""
    tracker = getattr(variable, _TRACKER, None)
    return [] if tracker is None else tracker.holders()


class Holder(abc.ABC):
    """Hold what some towers have of one variable, beside the variable itself."""

    def __init__(self, variable: tf.Variable, forget: Callable[[], None] | None = None) -> None:
        """Track nothing yet. The variable is not kept alive; `forget` is called when it is deleted."""
        self._variable = weakref.ref(variable, lambda _: forget() if forget is not None else None)

    @property
    def held(self) -> tf.Variable | None:
        """Return the variable; None once it was deleted."""
        return self._variable()

    @abc.abstractmethod
    def before_access(self, replaces: bool = False) -> None:
        """Let the variable hold its whole value, before Python reads or writes it.

        Args:
            replaces: whether all of it is about to be written, and none of it is read.
        """

    @abc.abstractmethod
    def mark_stale(self, replaced: bool = False) -> None:
        """Take the variable's value before the next step: Python or another holder's step wrote it.

        Args:
            replaced: whether all of it was written, and none of it was read.
        """

    @abc.abstractmethod
    def mark_shared(self) -> None:
        """Prepare for another holder of the variable whose steps also write it."""

    def track(self, reads: bool = False, keeps: bool = False) -> None:
        """Track writes of the variable from now on.

        Args:
            reads: whether to track reads as well.
            keeps: whether the variable keeps it alive, since it holds values that the variable does not.
        """
        tracker = self._tracker()
        tracker.add(self, (lambda: self) if keeps else weakref.ref(self))
        if reads:
            tracker.track_reads(self.held)

    def untrack(self) -> None:
        """Stop tracking. Others go on; if there are none, the variable gets its own methods back."""
        variable = self.held
        if variable is not None and self._tracker().remove(self):
            tf_compat.untrack(variable)
            setattr(variable, _TRACKER, None)

    def mark_others_stale(self) -> bool:
        """Mark other holders stale: these towers wrote the variable. Return whether there are any."""
        others = [holder for holder in self._tracker().holders() if holder is not self]
        for holder in others:
            holder.mark_stale()
        return bool(others)

    def _tracker(self) -> "_Tracker":
        variable = self.held
        tracker = getattr(variable, _TRACKER, None)
        if tracker is None:
            tracker = _Tracker(variable)
            setattr(variable, _TRACKER, tracker)
        return tracker


class _Tracker:
    """Keep the holders of one variable, and mark them stale when it is written.

    The tracker replaces the variable's own methods, on this one object, so that it costs nothing between
    writes and a step need not compare anything.
    """

    def __init__(self, variable: tf.Variable) -> None:
        self._holders: list[Callable[[], Holder | None]] = []
        self._reads = False
        tf_compat.track_writes(variable, self._tracked)

    def add(self, holder: Holder, borrowed: Callable[[], Holder | None]) -> None:
        """Add a holder, or replace how it is borrowed."""
        others = [one for one in self._holders if one() not in (None, holder)]
        self._holders = [*others, borrowed]
        if others:
            for one in self.holders():
                one.mark_shared()

    def remove(self, holder: Holder) -> bool:
        """Remove a holder; return whether none is left."""
        self._holders = [one for one in self._holders if one() not in (None, holder)]
        return not self._holders

    def holders(self) -> list[Holder]:
        """Return the holders that still exist; towers may be gone without having been closed."""
        return [holder for one in self._holders if (holder := one()) is not None]

    def track_reads(self, variable: tf.Variable) -> None:
        """Let holders hear of reads; idempotent."""
        if not self._reads:
            self._reads = True
            tf_compat.track_reads(variable, self._before_access)

    def _before_access(self, replaces: bool = False) -> None:
        for holder in self.holders():
            holder.before_access(replaces)

    def _tracked(self, write: Callable) -> Callable:
        @functools.wraps(write)
        def tracked(*args, **kwargs):
            replaces = write.__name__ in tf_compat.REPLACING_WRITERS
            self._before_access(replaces)
            result = write(*args, **kwargs)
            for holder in self.holders() if tf.executing_eagerly() else ():
                holder.mark_stale(replaces)
            return result

        return tracked
