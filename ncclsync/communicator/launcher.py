"""Launch groups of collectives without a host thread that waits for a GPU.

TensorFlow ops use a launcher by its address; this module knows neither the ops nor TensorFlow. The C library
(``csrc/nccl/launcher.c``) polls the launched groups; this module reads their failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ncclsync.communicator import native
from ncclsync.communicator.native import ffi, lib


class Launcher:
    """Launch groups on a communicator, one after another, and know whether they have ended.

    Attributes:
        address: of the C object, for an input of an op; valid as long as the process lives.
    """

    def __init__(self, size: int, timeout_s: float | None) -> None:
        """Make a closed launcher for so many ranks.

        `timeout_s` is the limit for a group, and for the GPUs' own work before it; None for none.
        """
        if size > lib.NCS_MOST_RANKS:
            raise ValueError(f"Expected at most {lib.NCS_MOST_RANKS} ranks in a process. Received: {size}")
        handle = ffi.new("ncs_launcher**")
        native.check(lib.ncs_launcher_create(size, timeout_s or 0.0, handle), "ncs_launcher_create")
        self._handle = handle[0]
        self.address = int(ffi.cast("intptr_t", self._handle))

    def know(self, comm: Any) -> None:
        """Learn the GPUs from the first communicator's handle."""
        lib.ncs_launcher_know(self._handle, comm)

    def synchronize(self) -> None:
        """Block until the GPUs' own work has ended. Raises NcclError."""
        native.call(lib.ncs_launcher_synchronize, [self._handle])

    def open(self, comm: Any) -> None:
        """Launch on the communicator of this handle from now on."""
        lib.ncs_launcher_open(self._handle, comm)

    def close(self, status: int = native.INVALID_USAGE) -> None:
        """Launch nothing any more; groups under way count as failed with `status`. Idempotent."""
        lib.ncs_launcher_close(self._handle, status)

    @contextlib.contextmanager
    def reserved(self) -> Iterator[bool]:
        """Hold launches back while the caller uses the communicator; yield whether it is open."""
        is_open = lib.ncs_launcher_reserve(self._handle) != ffi.NULL
        try:
            yield is_open
        finally:
            if is_open:
                lib.ncs_launcher_release(self._handle)

    def count(self, collectives: int) -> int:
        """Count collectives that the caller runs itself; return the number of the first."""
        return lib.ncs_launcher_count(self._handle, collectives)

    def groups(self) -> tuple[int, int]:
        """Return how many groups were launched, and how many of them are known to have ended well."""
        launched, ended = ffi.new("int64_t*"), ffi.new("int64_t*")
        lib.ncs_launcher_get_groups(self._handle, launched, ended)
        return launched[0], ended[0]

    def wait(self, slice_s: float) -> bool:
        """Wait for so many seconds until all groups have ended, well or not; return whether they have."""
        return lib.ncs_launcher_wait(self._handle, slice_s) != native.IN_PROGRESS

    def wait_for_abort(self, slice_s: float) -> bool:
        """Wait for so many seconds until the abort after a failure has ended; return whether it has."""
        return lib.ncs_launcher_wait_for_abort(self._handle, slice_s) != native.IN_PROGRESS

    def interrupt(self) -> None:
        """Give up the groups under way unless one of them ends within a second."""
        lib.ncs_launcher_interrupt(self._handle)

    def failure(self) -> Any:
        """Return the ``ncs_launch_failure`` since the launcher was opened, None if there is none."""
        reported = lib.ncs_launcher_get_failure(self._handle)
        return reported if reported.status else None

    def pending(self) -> Any:
        """Return the same of the first group that has not ended, None if all have. `waited_s` counts from its stage."""
        reported = lib.ncs_launcher_get_pending(self._handle)
        return reported if reported.status else None
