"""Launch groups of collectives; a host thread waits for one only if it asks to.

TensorFlow ops use a launcher by its address; this module knows neither the ops nor TensorFlow. The C library
(``csrc/nccl/launcher.c``) polls the launched groups; this module reads their failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ncclsync.communicator import native, timeouts
from ncclsync.communicator.native import ffi, lib
from ncclsync.communicator.nccl_calls import Progress, is_done

_FAILURE, _LAUNCH_FAILURE = ffi.typeof("ncs_failure*"), ffi.typeof("ncs_launch_failure*")
_LAUNCHER, _ARRIVAL, _LAUNCHED = (ffi.typeof(f"ncs_{name}**") for name in ("launcher", "arrival", "launched"))
_COLLECTIVES, _ROWS, _BUFFERS = (ffi.typeof(name) for name in ("ncs_collective[]", "ncs_buffer[]", "ncs_buffers*"))

OWN_WORK, LAUNCHING, RUNNING = lib.NCS_OWN_WORK, lib.NCS_LAUNCHING, lib.NCS_RUNNING


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Hold an ``ncs_collective``; `sends` and `recvs` are [N] pointers."""

    kind: int
    sends: Sequence[Any]
    recvs: Sequence[Any]
    count: int
    dtype: int
    op: int = 0
    root: int = 0


@dataclasses.dataclass(frozen=True)
class LaunchFailure:
    """Describe a failed group; see ``ncs_launch_failure``.

    Attributes:
        status: NCCL's; `native.TIMEOUT` if the group did not end in time, `native.IN_PROGRESS` if it was cancelled.
        call: the call that failed; "" if none did.
        words: the call's own.
        index: of the collective whose call it was; -1 if it was none's.
        stage: what the group was waiting for: OWN_WORK, LAUNCHING or RUNNING.
        waited_s: for how many seconds.
        group: the number of the first group that has failed, from 1.
        label: as given at its launch.
        first: the number of its first collective, from 1.
        collectives: (kind, elements, NCCL's number of the dtype) of each; if there are many, of the first, and of the
            last one.
        count: the number of its collectives.
        was_delivered: whether an op may have computed with the failed group's results.
        progress: [N] how far each rank had come; ABSENT if the GPU's own work before the group had not ended.
    """

    status: int
    call: str
    words: str
    index: int
    stage: int
    waited_s: float
    group: int
    label: int
    first: int
    collectives: tuple[tuple[int, int, int], ...]
    count: int
    was_delivered: bool
    progress: tuple[Progress, ...]


class Launcher:
    """Launch groups on a communicator, one after another, and know whether they have ended.

    Attributes:
        address: of the C object, for an input of an op; valid as long as the process lives.
        blocks: whether the host waits for groups: buffers are in host memory, or the driver cannot let a GPU wait
            for them. Known once the launcher is open.
    """

    def __init__(self, size: int) -> None:
        """Make a closed launcher for so many ranks."""
        if size > lib.NCS_MOST_RANKS:
            raise ValueError(f"Expected at most {lib.NCS_MOST_RANKS} ranks in a process. Received: {size}")
        handle = ffi.new(_LAUNCHER)
        native.check(lib.ncs_launcher_create(size, handle), "ncs_launcher_create")
        self._size, self._handle = size, handle[0]
        self.address = int(ffi.cast("intptr_t", self._handle))
        self.blocks = True

    def open(self, comm: Any) -> None:
        """Launch on the communicator of this handle from now on."""
        blocks = ffi.new("int*")
        native.check(lib.ncs_launcher_open(self._handle, comm, blocks), "ncs_launcher_open")
        self.blocks = bool(blocks[0])

    def block(self) -> None:
        """Wait for each group from now on: buffers are in host memory."""
        native.check(lib.ncs_launcher_block(self._handle), "ncs_launcher_block")
        self.blocks = True

    def close(self) -> bool:
        """Launch nothing any more; return whether there was a communicator that had not failed. Idempotent."""
        was_open = ffi.new("int*")
        native.check(lib.ncs_launcher_close(self._handle, was_open), "ncs_launcher_close")
        return bool(was_open[0])

    def abort(self, status: int = native.INVALID_USAGE, comm: Any = ffi.NULL) -> None:
        """Close it, and have its communicator aborted, unless it has failed; or another one, of this handle.

        Args:
            status: with which groups under way fail.
            comm: a communicator that the launcher does not have.
        """
        native.check(lib.ncs_launcher_abort(self._handle, status, comm), "ncs_launcher_abort")

    def set_timeout(self, timeout_s: float | None) -> None:
        """Limit what a group may take, and the GPUs' own work before it; None: without a limit."""
        native.check(lib.ncs_launcher_set_timeout(self._handle, timeout_s or 0.0), "ncs_launcher_set_timeout")

    def run(self, collectives: Sequence[Collective], label: int) -> tuple[int, Any]:
        """Launch a group after all work of its GPUs, and wait for its end; Ctrl-C aborts the communicator.

        Args:
            collectives: at least one, over memory that the caller keeps until then.
            label: names the group in failures. The collectives of a negative one are not counted.

        Returns:
            The status: 0 if the group has ended well; and the ``ncs_failure`` of a call that failed at once.
        """
        failure, arrivals, launched = ffi.new(_FAILURE, {"index": -1}), [], ffi.new(_LAUNCHED)
        size, arrival = len(collectives), ffi.new(_ARRIVAL)
        try:
            for rank in range(self._size):
                rows = ffi.new(_ROWS, [(one.sends[rank], one.recvs[rank], one.count, one.dtype) for one in collectives])
                buffers = ffi.new(_BUFFERS, (rows, size))
                status = lib.ncs_arrive(self._handle, rank, ffi.NULL, buffers, failure, arrival)
                if status != 0:
                    return status, failure
                arrivals.append(arrival[0])
            kinds = ffi.new(_COLLECTIVES, [{"kind": one.kind, "op": one.op, "root": one.root} for one in collectives])
            status = lib.ncs_launch(self._handle, label, arrivals, kinds, size, failure, launched)
            if status == 0:
                while (status := lib.ncs_launched_wait(launched[0], timeouts.SLICE_S)) == native.IN_PROGRESS:
                    pass
        except BaseException:
            self.abort()
            raise
        finally:
            for one in arrivals:
                lib.ncs_arrival_release(one)
            lib.ncs_launched_release(launched[0])
        return status, failure

    def groups(self) -> tuple[int, int]:
        """Return how many groups were launched, and how many of them are known to have ended well."""
        return self._counts()[:2]

    def count(self) -> int:
        """Return how many collectives were launched."""
        return self._counts()[2]

    def _counts(self) -> tuple[int, int, int]:
        counts = [ffi.new("int64_t*") for _ in range(3)]
        native.check(lib.ncs_launcher_get_groups(self._handle, *counts), "ncs_launcher_get_groups")
        launched, ended, collectives = (count[0] for count in counts)
        return launched, ended, collectives

    def wait(self, slice_s: float) -> bool:
        """Wait for so many seconds until all groups have ended, well or not; return whether they have."""
        return lib.ncs_launcher_wait(self._handle, slice_s) != native.IN_PROGRESS

    def wait_for_abort(self, slice_s: float) -> bool:
        """Wait for so many seconds until an abort has ended; return whether it has. Raises its NcclError, once."""
        failure = ffi.new(_FAILURE)
        return is_done(lib.ncs_launcher_wait_for_abort(self._handle, slice_s, failure), failure)

    def interrupt(self) -> None:
        """Give up the groups under way unless one of them ends within a second."""
        lib.ncs_launcher_interrupt(self._handle)

    def failure(self) -> LaunchFailure | None:
        """Return the failure since the launcher was opened, None if there is none."""
        return self._read(lib.ncs_launcher_get_failure, "ncs_launcher_get_failure")

    def pending(self) -> LaunchFailure | None:
        """Return the first group that has not ended, None if all have. `waited_s` counts from its stage."""
        return self._read(lib.ncs_launcher_get_pending, "ncs_launcher_get_pending")

    def _read(self, get: Any, name: str) -> LaunchFailure | None:
        reported = ffi.new(_LAUNCH_FAILURE)
        native.check(get(self._handle, reported), name)
        if reported.status == 0:
            return None
        named = reported.collectives[0 : min(reported.n_collectives, lib.NCS_MOST_NAMED)]
        return LaunchFailure(
            status=reported.status,
            call=ffi.string(reported.failure.call).decode(),
            words=native.words(reported.failure),
            index=reported.failure.index,
            stage=reported.stage,
            waited_s=reported.waited_s,
            group=reported.group,
            label=reported.label,
            first=reported.first,
            collectives=tuple((one.kind, one.count, one.dtype) for one in named),
            count=reported.n_collectives,
            was_delivered=bool(reported.was_delivered),
            progress=tuple(Progress(reported.progress[r]) for r in range(self._size)),
        )


def alive() -> dict[str, int]:
    """Return the process' numbers of arrivals, launched groups and events; for tests."""
    counts = [ffi.new("int64_t*") for _ in range(3)]
    native.check(lib.ncs_launcher_alive(*counts), "ncs_launcher_alive")
    return dict(zip(("arrivals", "groups", "events"), (count[0] for count in counts), strict=True))
