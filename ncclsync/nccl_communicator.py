"""Ranks on GPUs, joined by NCCL: created, used from one thread at a time, aborted when anything fails.

A collective that does not end is ended by `watchdog`; what is sent over each pair's path at creation is
`preflight`'s matter. Nothing here knows TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ncclsync import native, nccl_calls, watchdog
from ncclsync.buffers import CUDA, Buffers
from ncclsync.collectives import Communicator
from ncclsync.errors import NcclError, NcclSyncError
from ncclsync.nccl_calls import Progress
from ncclsync.preflight import check_paths

_DTYPE_NAMES = {code: name for name, code in native.DTYPES.items()}


class NcclCommunicator(Communicator):
    """N ranks, each on a GPU of its own, joined by NCCL.

    A collective first waits for all work queued on its GPUs, however long that takes, so buffers need not be
    ready when it is called; it has written its results, on a stream of its own, when it returns. Inputs are
    never written. It raises if it has not ended within ``timeout_s``. A failed collective aborts the
    communicator: it never returns quietly without having happened. Threads take turns.

    Attributes:
        size, world_size: the number of ranks here, and in all processes.
        ranks, devices: this process' ranks, and the CUDA ordinal of each.
        timeout_s: how long a collective may take; None for no limit.
        failure: what ended the communicator, if a failure did.
    """

    memory = CUDA

    def __init__(
        self,
        devices: Sequence[int],
        *,
        timeout_s: float | None = watchdog.DEFAULT_TIMEOUT_S,
        preflight: bool = True,
    ) -> None:
        """Join GPUs of this process. Blocks until all ranks are up.

        Args:
            devices: CUDA ordinals; rank r is on ``devices[r]``.
            timeout_s: how long joining them, and then any collective, may take, in seconds, before it is
                given up with a NcclTimeoutError; None for no limit. A warning is logged after 60 s.
            preflight: whether to send known numbers over each pair's path first; see `preflight`.

        Raises:
            TypeError, ValueError: bad arguments.
            NcclUnavailableError: no libnccl, no driver or no such GPU.
            NcclError: NCCL could not join these GPUs, or they do not receive what was sent.
        """
        self._handle: Any = None
        ordinals = _checked_numbers(devices, "devices", "CUDA ordinals")
        self._set_up(None, len(ordinals), range(len(ordinals)), ordinals, timeout_s, preflight)

    @classmethod
    def from_unique_id(
        cls,
        unique_id: bytes,
        world_size: int,
        ranks: Sequence[int],
        devices: Sequence[int],
        *,
        timeout_s: float | None = watchdog.DEFAULT_TIMEOUT_S,
        preflight: bool = True,
    ) -> NcclCommunicator:
        """Join GPUs of several processes. Collective; blocks until the ranks of all processes are up.

        Args:
            unique_id: what ``NcclCommunicator.unique_id()`` has returned in one of the processes.
            world_size: the number of ranks in all processes.
            ranks: this process' ranks; each in exactly one process.
            devices: CUDA ordinals, one for each of `ranks`.
            timeout_s, preflight: as of the class; `preflight` equal in all processes.

        Raises:
            As the class does.
        """
        if not isinstance(unique_id, bytes) or len(unique_id) != nccl_calls.UNIQUE_ID_BYTES:
            raise ValueError(
                f"Expected unique_id to be the {nccl_calls.UNIQUE_ID_BYTES} bytes of "
                f"NcclCommunicator.unique_id(). Received: {unique_id!r}"
            )
        own = _checked_numbers(ranks, "ranks", "ranks of this process")
        ordinals = _checked_numbers(devices, "devices", "CUDA ordinals")
        if isinstance(world_size, bool) or not isinstance(world_size, int) or max(own) >= world_size:
            raise ValueError(f"Expected ranks below world_size. Received: {ranks!r}, {world_size!r}")
        if len(own) != len(ordinals) or len(set(own)) != len(own):
            raise ValueError(
                f"Expected different ranks, each with a device. Received: {ranks!r}, {devices!r}"
            )
        self = cls.__new__(cls)
        self._handle = None
        self._set_up(unique_id, world_size, own, ordinals, timeout_s, preflight)
        return self

    @staticmethod
    def unique_id() -> bytes:
        """Return what ranks in several processes find each other by: made in one, given to all.

        NCCL then listens on a network interface (``NCCL_SOCKET_IFNAME`` chooses it).

        Raises:
            NcclUnavailableError: no libnccl.
            NcclError: NCCL found no interface.
        """
        return nccl_calls.unique_id(native.NcclLibrary())

    def _set_up(
        self,
        joined_by: bytes | None,
        world_size: int,
        ranks: Sequence[int],
        devices: Sequence[int],
        timeout_s: float | None,
        preflight: bool,
    ) -> None:
        watchdog.check_timeout(timeout_s)
        if not isinstance(preflight, bool):
            raise TypeError(f"Expected preflight to be a bool. Received: {preflight!r}")
        self.size, self._world_size = len(ranks), world_size
        self.ranks, self.devices = tuple(ranks), tuple(devices)
        self.timeout_s = timeout_s
        self.failure = None
        self._preflight = preflight
        self._joined_by = joined_by
        self._is_closed = False
        self._count = 0
        self._lock = threading.Lock()  # NCCL: never two threads at once on one communicator
        self._library = native.NcclLibrary()
        self._join()

    @property
    def world_size(self) -> int:
        """Number of ranks in all processes."""
        return self._world_size

    @property
    def closed(self) -> bool:
        """Whether it has ended: by ``close`` or by a failed collective."""
        return self._handle is None

    def reopen(self) -> None:
        """Join the same GPUs again after a failed collective. Blocks. Does nothing to an open communicator.

        Raises:
            NcclSyncError: it was closed, or spans several processes: these have to agree upon a new one.
            NcclUnavailableError, NcclError: as when it was created.
        """
        with self._lock:
            if self._handle is not None:
                return
            if self._is_closed:
                self.raise_closed()
            if self._joined_by is not None:
                raise NcclSyncError(
                    "Expected a communicator of one process. Received: one that was joined by a unique id. "
                    "Join all processes anew, by a new unique id."
                )
            self._join()

    def close(self) -> None:
        """End the communicator, on all ranks. Blocks. Idempotent; collectives then raise NcclSyncError."""
        with self._lock:
            handle, self._handle = self._handle, None
            self._is_closed = True
            if handle is None:
                return

            def begin(handle, slice_s):
                nccl_calls.finalize(handle)
                return nccl_calls.wait(handle, slice_s)

            with self._aborted_on_error(handle):
                self._watch(handle, "the end of a communicator", "ncclCommFinalize", begin)
            nccl_calls.destroy(handle)

    def _join(self) -> None:
        self._check_different()
        handle = nccl_calls.create(self._library, self._joined_by, self._world_size, self.ranks, self.devices)
        what = f"the joining of {self._world_size} ranks, here {self._names(range(self.size))}"
        with self._aborted_on_error(handle):
            try:
                self._watch(handle, what, "ncclCommInitRankConfig", nccl_calls.wait)
                if self._preflight and self._world_size > 1:
                    watch = functools.partial(self._watch, handle)
                    check_paths(handle, self.ranks, self._world_size, watch)
            except NcclError as error:
                nccl_calls.raise_explained(error, self.devices)
        self._handle, self.failure = handle, None

    def _check_different(self) -> None:
        shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if len(set(self.devices)) != len(self.devices) and not shared:
            raise ValueError(
                f"Expected every GPU once. Received: devices={list(self.devices)}. (NCCL 2.30 and newer let "
                "ranks share a GPU, as an experiment, where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.)"
            )

    def _all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: int, label: str) -> None:
        reads = Buffers(sends, "sends", self.memory, writable=False)
        writes = Buffers(recvs, "recvs", self.memory, writable=True)
        writes.check_like(reads)
        self._check_own(writes)
        reads.check_aligned()
        writes.check_apart(reads)
        read_at = reads.addresses()
        for rank, address in enumerate(writes.addresses() if writes.count else []):
            if address in read_at and read_at[rank] != address:
                raise ValueError(
                    f"Expected recvs[{rank}] to be sends[{rank}] or a buffer of its own. "
                    f"Received: the one of sends[{read_at.index(address)}]"
                )

        def begin(handle, slice_s):
            pointers = (reads.pointers, writes.pointers)
            return nccl_calls.all_reduce(handle, *pointers, reads.count, reads.dtype, op, slice_s)

        self._run("all-reduce", "ncclAllReduce", reads, label, begin)

    def _broadcast(self, buffers: Sequence[Any], root: int, label: str) -> None:
        ranks = Buffers(buffers, "buffers", self.memory, writable=True)
        self._check_own(ranks)

        def begin(handle, slice_s):
            return nccl_calls.broadcast(handle, ranks.pointers, ranks.count, ranks.dtype, root, slice_s)

        self._run("broadcast", "ncclBroadcast", ranks, label, begin)

    def _check_own(self, buffers: Buffers) -> None:
        """Raise ValueError unless every rank has a buffer to itself: each is on another GPU."""
        buffers.check_aligned()
        buffers.check_apart(buffers)
        different = len(set(buffers.addresses()))
        if buffers.count and different != self.size:
            raise ValueError(
                f"Expected {buffers.what} to be {self.size} buffers, one on each rank's GPU. "
                f"Received: {different} different ones"
            )

    def _run(
        self, name: str, call: str, buffers: Buffers, label: str, begin: Callable[[Any, float], bool]
    ) -> None:
        with self._lock:
            if self._handle is None:  # closed by another thread meanwhile
                self.raise_closed()
            self._count += 1
            size_bytes = buffers.count * native.DTYPE_SIZES[buffers.dtype]
            kind = f"{size_bytes} bytes ({buffers.count} × {_DTYPE_NAMES[buffers.dtype]})"
            what = f"{name} {self._count}{f' ({label})' if label else ''} of {kind}"
            with self._aborted_on_error(self._handle):
                self._watch(self._handle, what, call, begin)

    def _watch(self, handle: Any, what: str, call: str, begin: Callable[[Any, float], bool]) -> None:
        """Do something and wait for its end; an error tells what it was."""
        try:
            watchdog.wait(
                functools.partial(begin, handle),
                functools.partial(nccl_calls.wait, handle),
                call=call,
                what=what,
                timeout_s=self.timeout_s,
                arrived=functools.partial(self._tell_progress, handle),
            )
        except NcclError as error:
            if error.during:
                raise
            raise NcclError(error.status, error.call, error.last_error, error.status_name, what) from None

    @contextlib.contextmanager
    def _aborted_on_error(self, handle: Any) -> Iterator[None]:
        """Whatever is raised, also by Ctrl-C, ends the communicator: its ranks may be anywhere."""
        try:
            yield
        except BaseException as error:
            self._handle, self.failure = None, error
            try:
                nccl_calls.abort(handle)
            except NcclError as abort_error:
                raise abort_error from error
            raise

    def _tell_progress(self, handle: Any) -> str:
        """Say which ranks have arrived, as far as it is known here."""
        states = nccl_calls.progress(handle, self.size)
        words = []
        for state, verb in (
            (Progress.DONE, "done"),
            (Progress.LAUNCHED, "arrived, waiting for the others"),
            (Progress.ABSENT, "not arrived"),
        ):
            indices = [i for i, reached in enumerate(states) if reached is state]
            if indices:
                words.append(f"{self._names(indices)} {verb}")
        others = sorted(set(range(self._world_size)) - set(self.ranks))
        if others:
            words.append(f"rank {', '.join(map(str, others))} of other processes: not known here")
        return "; ".join(words)

    def _names(self, indices: Sequence[int]) -> str:
        return ", ".join(f"rank {self.ranks[i]} (GPU {self.devices[i]})" for i in indices)

    def __del__(self) -> None:
        # Only a warning: destroying may block, and the collector may run in any thread.
        if getattr(self, "_handle", None) is not None:
            warnings.warn(
                f"an NcclCommunicator on devices {self.devices} was not closed",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


def _checked_numbers(numbers: Sequence[int], what: str, words: str) -> list[int]:
    checked = list(numbers)
    if not checked or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in checked):
        raise ValueError(f"Expected {what} to be {words}, at least one. Received: {numbers!r}")
    return checked
