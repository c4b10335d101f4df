"""N ranks owned by this process, and the collectives that join them.

``CpuCommunicator`` works on host memory by the C library's own all-reduce, ``NcclCommunicator`` on
GPUs by NCCL; both take the same calls. A collective has happened when it returns, or it raises.
How a buffer is read is in ``buffers``; nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ncclsync import native
from ncclsync.buffers import HOST, Buffers
from ncclsync.buffers import empty_aligned as empty_aligned
from ncclsync.collectives import Communicator as Communicator
from ncclsync.nccl_communicator import NcclCommunicator as NcclCommunicator


class CpuCommunicator(Communicator):
    """N ranks in host memory. Any number of threads may use it at the same time.

    Results are bitwise the same whatever the number of cores and threads: ranks are combined in
    order; float16 and bfloat16 accumulate in float32 and are rounded once. ``recvs`` may all be one
    array, which is then written once. It owns nothing but a share in the process-wide worker pool.
    """

    memory = HOST

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

    def _all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: int, label: str) -> None:
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

    def _broadcast(self, buffers: Sequence[Any], root: int, label: str) -> None:
        ranks = Buffers(buffers, "buffers", HOST, writable=True)
        pool = self._pool or native.process_pool()
        status = native.cpu_broadcast(pool, ranks.pointers, ranks.count, ranks.dtype, root)
        if status != 0:
            ranks.check_aligned()
            ranks.check_apart(ranks)
            native.check(status, "ncs_cpu_broadcast")
