"""Hold a variable of tower 0 with its copies on the other towers: how they relate, and who has written.

`TowerState` owns them and sends values; `semantics/roles.py` says what a role means.
"""

from collections.abc import Callable

import tensorflow as tf

from ncclsync.errors import NcclSyncError
from ncclsync.ops import current_context
from ncclsync.semantics.holders import Holder
from ncclsync.semantics.roles import Role
from ncclsync.towers.in_flight import InFlight


class Replicas(Holder):
    """Hold one variable of tower 0 and its copies on the other towers; know when they are stale.

    Attributes:
        role: how the copies relate.
        copies: [N - 1] those of the other towers.
    """

    def __init__(
        self,
        variable: tf.Variable,
        role: Role,
        copies: list[tf.Variable],
        pending: set[int],
        shared: set[int],
        in_flight: InFlight,
        forget: Callable[[], None],
    ) -> None:
        """Track a variable.

        Args:
            variable: tower 0's, which is not kept alive.
            role: how the copies relate.
            copies: [N - 1] those of the other towers.
            pending: its id is added when the copies are stale.
            shared: its id is added when other towers hold copies of the variable too.
            in_flight: knows whether it rests on a collective that has not ended.
            forget: is called when it is deleted.
        """
        super().__init__(variable, forget)
        self._in_flight = in_flight
        self._key = id(variable)
        self.role = role
        self.copies = copies
        self._pending = pending
        self._shared = shared
        self.track()
        if role is Role.PARTIAL:
            self.track_reads()
        elif in_flight.active:
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
        """Add up the towers' parts in tower 0's variable, so that it holds the whole."""
        if self.role is not Role.PARTIAL:
            return
        for copy in self.copies:
            part = copy.value()
            with tf.device(self.variable.device):
                tf.raw_ops.AssignAddVariableOp(resource=self.variable.handle, value=tf.identity(part))
            copy.assign(tf.zeros_like(part))

    def before_access(self, replaces: bool = False) -> None:
        """Let tower 0's variable hold the whole before Python reads or writes it."""
        if tf.executing_eagerly() and current_context() is None:
            if replaces:
                self._in_flight.before_write(self._key)
            else:
                self._in_flight.before_read(self._key)
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
