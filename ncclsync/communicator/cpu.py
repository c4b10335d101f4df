"""Join N ranks in host memory by the C library's own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ncclsync.communicator import native
from ncclsync.communicator.base import (
    AllGather,
    AllReduce,
    AnyCollective,
    Broadcast,
    Communicator,
    ReduceScatter,
    read_buffers,
)
from ncclsync.communicator.buffers import HOST, Buffers
from ncclsync.communicator.native import lib


class CpuCommunicator(Communicator):
    """Join N ranks in host memory. Any number of threads may use it at the same time.

    Results are bitwise the same whatever the number of cores and threads: ranks are combined in order;
    float16 and bfloat16 accumulate in float32 and are rounded once. ``recvs`` that are to hold the same may
    all be one array, which is then written once. Worker threads, one per usable core, are shared by all
    communicators of the process.
    """

    memory = HOST

    def __init__(self, size: int) -> None:
        """Make `size` ranks. Raises ValueError for a bad number."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Expected size to be a number of ranks, at least 1. Received: {size!r}")
        self.size = self.world_size = size
        self.ranks = range(size)

    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run the collectives one after another: there is no launch to be saved."""
        runs = [read_buffers(collective, HOST, self.size) for collective in collectives]
        single = len(runs) == 1 and isinstance(collectives[0], AllReduce | Broadcast)
        if not single:  # a single call of C's is checked there, before it writes
            for collective, (reads, writes) in zip(collectives, runs, strict=True):
                _check(collective, reads, writes)
        pool = native.process_pool()
        for collective, (reads, writes) in zip(collectives, runs, strict=True):
            status = _run(pool, collective, reads, writes)
            if status != 0:
                _check(collective, reads, writes)  # C has written nothing: find out which buffer it was
                native.check(status, "ncs_cpu_all_reduce or ncs_cpu_broadcast")


def _run(pool: Any, collective: AnyCollective, reads: Buffers, writes: Buffers) -> int:
    """Return the worst status of the calls that make up a collective."""
    pointers, n, dtype = writes.pointers, len(writes.pointers), reads.dtype
    if isinstance(collective, Broadcast):
        return lib.ncs_cpu_broadcast(pool, pointers, n, writes.count, dtype, collective.root)
    if isinstance(collective, AllGather):
        count = reads.count
        # A set: what stands for several ranks is written once.
        copies = ([reads.pointers[r], *set(writes.block(r, count))] for r in range(n))
        return max(lib.ncs_cpu_broadcast(pool, copy, len(copy), count, dtype, 0) for copy in copies)
    count, op = writes.count, native.OPS[collective.op]
    if isinstance(collective, AllReduce):
        return lib.ncs_cpu_all_reduce(pool, reads.pointers, pointers, n, count, dtype, op)
    parts = ((reads.block(r, count), [recv] * n) for r, recv in enumerate(pointers))
    return max(lib.ncs_cpu_all_reduce(pool, *part, n, count, dtype, op) for part in parts)


def _check(collective: AnyCollective, reads: Buffers, writes: Buffers) -> None:
    """Raise ValueError for a buffer that begins within an element, or overlaps one that is written."""
    for buffers in (reads, writes):
        buffers.check_aligned()
    writes.check_apart(reads)
    # Ranks that receive the same may receive it into one buffer.
    writes.check_apart(writes, may_be_same=not isinstance(collective, ReduceScatter))
