"""Hold a variable of tower 0 with its copies on the other towers: how they relate, and who has written.

`replicas.py` has those of all variables and sends values; `semantics/roles.py` says what a role means.
"""

from collections.abc import Callable

import tensorflow as tf

from ncclsync.errors import NcclSyncError
from ncclsync.ops import current_context
from ncclsync.semantics.holders import Holder
from ncclsync.semantics.roles import Role
from ncclsync.towers.session import Session


class Copies(Holder):
    """Hold one variable of tower 0 and its copies on the other towers; know when they are stale."""

    def __init__(
        self,
        variable: tf.Variable,
        role: Role,
        copies: list[tf.Variable],
        pending: set[int],
        shared: set[int],
        session: Session,
        forget: Callable[[], None],
    ) -> None:
        """Track tower 0's variable, which is not kept alive; `forget` is called when it is deleted."""
        super().__init__(variable, forget)
        self._session = session
        self._key = id(variable)
        self.role = role  # how the copies relate
        self.copies = copies  # [N - 1] those of the other towers
        self._pending = pending  # the variable's id is added when the copies are stale
        self._shared = shared  # the variable's id is added when other towers hold copies of it too
        self._is_whole = False  # what this process' first tower holds, of parts
        self.track()
        if role is Role.PARTIAL:
            self.track_reads()
        elif session.communicator.enqueues:
            self.hear_reads()

    def take_role(self, role: Role) -> None:
        """Give the copies another role from the next step on, since a trace uses them so."""
        self.gather_parts()
        self.role = role
        if role is Role.PARTIAL:
            for copy in self.copies:
                copy.assign(tf.zeros_like(copy))
            self.track_reads()
        else:
            self._pending.add(self._key)

    @property
    def variable(self) -> tf.Variable:
        """Return tower 0's variable, which this object must not keep alive."""
        variable = self.held
        if variable is None:
            raise NcclSyncError("Expected a variable in use. Received: one that was deleted.")
        return variable

    def gather_parts(self) -> None:
        """Add up the towers' parts in tower 0's variable, so that it holds the whole.

        Where there are several processes, each one's first tower then holds it, until `keep_part`.
        """
        if self.role is not Role.PARTIAL or self._is_whole:
            return
        if self._session.layout.meets_processes:
            # Nobody hears of these reads.
            both = (self.variable, *self.copies)
            parts = [tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=one.dtype) for one in both]
            total = self._session.total(parts, self.variable.name)
            self._is_whole = True
            self._pending.add(self._key)
            tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=total)
        else:
            for part in [copy.value() for copy in self.copies]:
                with tf.device(self.variable.device):
                    tf.raw_ops.AssignAddVariableOp(resource=self.variable.handle, value=tf.identity(part))
        for copy in self.copies:
            copy.assign(tf.zeros_like(copy))

    def keep_part(self, is_root: bool) -> None:
        """Let the first tower of this process hold its part again, before a step: nothing, unless it is tower 0."""
        if self._is_whole:
            self._is_whole = False
            if not is_root:
                value = tf.zeros(self.variable.shape, self.variable.dtype)
                tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=value)

    def before_access(self, replaces: bool = False) -> None:
        """Let tower 0's variable hold the whole before Python reads or writes it."""
        if tf.executing_eagerly() and current_context() is None:
            in_flight = self._session.in_flight
            (in_flight.before_write if replaces else in_flight.before_read)(self._key)
            self.gather_parts()

    def mark_stale(self) -> None:
        """Send the variable before the next step."""
        # Metric state stays zero on the other towers, whatever tower 0 starts from. A partition
        # differs from tower to tower.
        if self.role not in (Role.SUM, Role.PARTITION):
            self._pending.add(self._key)

    def mark_shared(self) -> None:
        """Mark the others' copies as stale, from now on, when a step writes the variable."""
        self._shared.add(self._key)
