"""One variable of tower 0 and its copies on the other towers: how they relate, and who has written.

`TowerState` owns them and sends values; what a role means is in `variables`.
"""

import functools
import weakref
from collections.abc import Callable

import tensorflow as tf

from ncclsync import private
from ncclsync.errors import NcclSyncError
from ncclsync.ops import current_context
from ncclsync.variables import Role


class Replicas:
    """One variable of tower 0, its copies on the other towers, and a watch on what Python writes to it.

    The watch replaces the variable's own methods, on this one object, so that it costs nothing between
    writes and a step need not compare anything.

    Attributes:
        role: how the copies relate.
        copies: [N - 1] those of the other towers.
        written_by_graph: whether somebody's graph may write the variable without telling.
    """

    def __init__(
        self, variable: tf.Variable, role: Role, copies: list[tf.Variable], pending: set[int]
    ) -> None:
        """Watch a variable.

        Args:
            variable: tower 0's, which is not kept alive.
            role: how the copies relate.
            copies: [N - 1] those of the other towers.
            pending: its id is added when Python has written what the copies have not got.
        """
        self._variable = weakref.ref(variable)
        self.role = role
        self.copies = copies
        self.written_by_graph = False
        self._pending = pending
        private.watch_writes(variable, self._watched)
        if role is Role.PARTIAL:
            private.watch_reads(variable, self._note_read)
        self._key = id(variable)

    def take_role(self, role: Role) -> None:
        """Let the copies relate otherwise from the next step on, as a trace has shown that they are used."""
        self.gather_parts()
        self.role = role
        if role is Role.PARTIAL:
            for copy in self.copies:
                copy.assign(tf.zeros_like(copy))
            private.watch_reads(self.variable, self._note_read)
        else:
            self._pending.add(self._key)

    @property
    def variable(self) -> tf.Variable:
        """Tower 0's variable, which this object must not keep alive."""
        variable = self._variable()
        if variable is None:
            raise NcclSyncError("Expected a variable in use. Received: one that was deleted.")
        return variable

    def unwatch(self) -> None:
        """Give the variable its own methods back."""
        private.unwatch(self.variable)

    def gather_parts(self) -> None:
        """Add up in tower 0's variable what the towers hold parts of, so that it holds the whole."""
        if self.role is not Role.PARTIAL:
            return
        for copy in self.copies:
            part = copy.value()
            with tf.device(self.variable.device):
                tf.raw_ops.AssignAddVariableOp(resource=self.variable.handle, value=tf.identity(part))
            copy.assign(tf.zeros_like(part))

    def _note_read(self) -> None:
        """Before Python reads or writes tower 0's variable."""
        if tf.executing_eagerly() and current_context() is None:
            self.gather_parts()

    def _watched(self, write: Callable) -> Callable:
        @functools.wraps(write)
        def watched(*args, **kwargs):
            self._note_read()
            result = write(*args, **kwargs)
            self._note_write()
            return result

        return watched

    def _note_write(self) -> None:
        if tf.executing_eagerly():
            # Metric state stays zero on the other towers, whatever tower 0 starts from; so do gathered parts.
            # A partition is each tower's own.
            if self.role not in (Role.SUM, Role.PARTIAL, Role.PARTITION):
                self._pending.add(self._key)
        elif current_context() is None:
            # Somebody's tf.function, which will write again without telling.
            self.written_by_graph = True
            self._pending.add(self._key)
