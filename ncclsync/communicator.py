"""N ranks owned by this process, and the collectives that join them.

``CpuCommunicator`` works on host memory by the C library's own all-reduce, ``NcclCommunicator`` on
GPUs by NCCL; both take the same calls. A collective has happened when it returns, or it raises.
How a buffer is read is in ``buffers``; nothing here knows TensorFlow.
"""

from __future__ import annotations

import abc
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from ncclsync import native
from ncclsync.buffers import CUDA, HOST, Buffers
from ncclsync.buffers import empty_aligned as empty_aligned
from ncclsync.errors import NcclError, NcclSyncError


class Communicator(abc.ABC):
    """N ranks of this process. Whoever creates it closes it, best as a context manager.

    A buffer is a NumPy array (bfloat16 by ml_dtypes), an object with ``__dlpack__`` or a tuple
    ``(pointer, count, dtype)``; contiguous. All ranks' buffers have the same count and dtype; their
    shapes do not matter. Kinds may be mixed.

    Attributes:
        size: number of ranks.
    """

    size: int

    @abc.abstractmethod
    def _all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: int) -> None:
        """Do it; the arguments' lengths and the operation are checked."""

    @abc.abstractmethod
    def _broadcast(self, buffers: Sequence[Any], root: int) -> None:
        """Do it; the arguments' lengths and the root are checked."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the communicator. Idempotent; any later collective raises NcclSyncError."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether it has ended: by ``close`` or by a failed collective."""

    def all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: str = "sum") -> None:
        """Reduce over all ranks; every rank receives the result. Collective; blocks until done.

        Args:
            sends: one buffer per rank.
            recvs: one writable buffer per rank. ``recvs[r]`` may be ``sends[r]`` (in place).
            op: "sum", "prod", "max", "min" or "avg".

        Raises:
            TypeError, ValueError: a bad argument; nothing was written.
            NcclError: the collective failed.
            NcclSyncError: the communicator is closed.
        """
        if self.closed:
            self._raise_closed()
        code = native.OPS.get(op)
        if code is None:
            raise ValueError(f"Expected op to be one of {', '.join(native.OPS)}. Received: {op!r}")
        if len(sends) != self.size or len(recvs) != self.size:
            self._raise_length("sends and recvs", f"{len(sends)} and {len(recvs)}")
        self._all_reduce(sends, recvs, code)

    def broadcast(self, buffers: Sequence[Any], root: int = 0) -> None:
        """Copy the root's buffer into every other rank's. Collective; blocks until done.

        Args:
            buffers: one writable buffer per rank.
            root: the rank to copy from.

        Raises:
            As ``all_reduce``.
        """
        if self.closed:
            self._raise_closed()
        if len(buffers) != self.size:
            self._raise_length("buffers", str(len(buffers)))
        if not 0 <= root < self.size:
            raise ValueError(f"Expected root to be a rank, 0 to {self.size - 1}. Received: {root}")
        self._broadcast(buffers, root)

    def _raise_closed(self) -> None:
        raise NcclSyncError(
            f"Expected an open {type(self).__name__}. Received: one that is closed, or that a "
            "failed collective has aborted"
        )

    def _raise_length(self, what: str, received: str) -> None:
        raise ValueError(f"Expected {what} to hold {self.size} buffers, one per rank. Received: {received}")

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CpuCommunicator(Communicator):
    """N ranks in host memory. Any number of threads may use it at the same time.

    Results are bitwise the same whatever the number of cores and threads: ranks are combined in
    order; float16 and bfloat16 accumulate in float32 and are rounded once. ``recvs`` may all be one
    array, which is then written once. It owns nothing but a share in the process-wide worker pool.
    """

    def __init__(self, size: int, *, pool: native.Pool | None = None) -> None:
        """Make N ranks.

        Args:
            size: number of ranks.
            pool: worker threads of the caller's own, which must outlive the communicator;
                by default those that all communicators share, one per usable core.
        """
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"Expected size to be a number of ranks, at least 1. Received: {size!r}")
        self.size = size
        self._pool = pool
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """End the communicator. Idempotent; any later collective raises NcclSyncError."""
        self._closed = True

    def _all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: int) -> None:
        reads = Buffers(sends, "sends", HOST, writable=False)
        writes = Buffers(recvs, "recvs", HOST, writable=True)
        writes.check_like(reads)
        status = native.cpu_all_reduce(
            self._pool or native.process_pool(),
            reads.pointers,
            writes.pointers,
            reads.count,
            reads.dtype,
            op,
        )
        if status != 0:  # C has checked, and written nothing: find out which buffer it was
            for buffers in (reads, writes):
                buffers.check_aligned()
                writes.check_apart(buffers)
            native.check(status, "ncs_cpu_all_reduce")

    def _broadcast(self, buffers: Sequence[Any], root: int) -> None:
        ranks = Buffers(buffers, "buffers", HOST, writable=True)
        pool = self._pool or native.process_pool()
        status = native.cpu_broadcast(pool, ranks.pointers, ranks.count, ranks.dtype, root)
        if status != 0:
            ranks.check_aligned()
            ranks.check_apart(ranks)
            native.check(status, "ncs_cpu_broadcast")


class NcclCommunicator(Communicator):
    """N ranks, each on a GPU of its own, joined by NCCL.

    A collective first waits for all work queued on its GPUs, so buffers need not be ready when it
    is called. A failed collective aborts the communicator. Threads take turns.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        """Join GPUs. Blocks until all ranks are up.

        Args:
            devices: CUDA ordinals; rank r is on ``devices[r]``.

        Raises:
            NcclUnavailableError: no libnccl, no driver or no such GPU.
            NcclError: NCCL could not join these GPUs.
        """
        self._handle: Any = None
        ordinals = list(devices)
        if not ordinals or not all(isinstance(d, int) and d >= 0 for d in ordinals):
            raise ValueError(f"Expected devices to be CUDA ordinals, at least one. Received: {devices!r}")
        self.size = len(ordinals)
        self.devices = tuple(ordinals)
        self._lock = threading.Lock()  # NCCL: never two threads at once on one communicator
        self._library = native.NcclLibrary()
        self._handle = native.nccl_create(self._library, ordinals)

    @property
    def closed(self) -> bool:
        """Whether it has ended: by ``close`` or by a failed collective."""
        return self._handle is None

    def close(self) -> None:
        """Destroy the communicator. Blocks. Idempotent; collectives then raise NcclSyncError."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                native.nccl_destroy(handle)

    def _all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: int) -> None:
        reads = Buffers(sends, "sends", CUDA, writable=False)
        writes = Buffers(recvs, "recvs", CUDA, writable=True)
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
        self._run(native.nccl_all_reduce, reads.pointers, writes.pointers, reads.count, reads.dtype, op)

    def _broadcast(self, buffers: Sequence[Any], root: int) -> None:
        ranks = Buffers(buffers, "buffers", CUDA, writable=True)
        self._check_own(ranks)
        self._run(native.nccl_broadcast, ranks.pointers, ranks.count, ranks.dtype, root)

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

    def _run(self, collective: Any, *arguments: Any) -> None:
        with self._lock:
            if self._handle is None:  # closed by another thread meanwhile
                self._raise_closed()
            try:
                collective(self._handle, *arguments)
            except NcclError as error:
                handle, self._handle = self._handle, None
                try:
                    native.nccl_abort(handle)
                except NcclError as abort_error:
                    raise abort_error from error
                raise

    def __del__(self) -> None:
        # Only a warning: destroying may block, and the collector may run in any thread.
        if getattr(self, "_handle", None) is not None:
            warnings.warn(
                f"an NcclCommunicator on devices {self.devices} was not closed",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
