"""Check, before the first real collective, that GPUs receive what other GPUs sent.

Some hosts corrupt what GPUs send each other directly, without any error: all training on them would be wrong.
An all-reduce goes over the paths that NCCL has chosen for it; a message from each rank to each other, over
every pair's. Both are small: what costs is that NCCL opens each pair's path, some milliseconds and megabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclsync.communicator import native, nccl_calls
from ncclsync.communicator.native import ffi, lib
from ncclsync.errors import NcclPreflightError, NcclTimeoutError

COUNT = 4096  # elements per message: enough for each of NCCL's channels to carry some

_INT32 = native.DTYPES["int32"]

_CAUSES = (
    "Usual causes: PCIe access control (ACS) or an IOMMU that redirects what GPUs send each other directly "
    "(P2P), or a broken link. Turn ACS off in the BIOS and set iommu=pt for the kernel, or set "
    "NCCL_P2P_DISABLE=1, so that NCCL goes through host memory; NCCL_DEBUG=INFO shows the paths it chooses"
)


def check_paths(comm: Any, ranks: Sequence[int], world_size: int, run: Callable[..., None]) -> None:
    """Send known numbers between all ranks and compare what this process' ranks receive. Collective.

    Raises NcclPreflightError, which names the pair, if a rank received something else; NcclTimeoutError if nothing
    came; and whatever `run(what, call, begin)` raises, which begins a task after the GPUs' own work, and waits for its
    end. The handle `comm` holds the device memory that is used, also after a failure.
    """
    size_bytes = world_size * COUNT * 4
    memory = [nccl_calls.scratch(comm, i, 2 * size_bytes) for i in range(len(ranks))]
    sends = [ffi.cast("char*", block) for block in memory]
    recvs = [block + size_bytes for block in sends]

    def exchange(kind, what, sent):
        during = f"the preflight's {what}"
        group = [[(kind, native.OPS["sum"], 0, *pair, COUNT, _INT32)] for pair in zip(sends, recvs, strict=True)]
        for i, numbers in enumerate(sent):
            nccl_calls.copy(comm, i, sends[i], ffi.from_buffer(numbers), numbers.nbytes)
        try:
            begin = functools.partial(nccl_calls.launch_group, comm, group, lambda _: during)
            run(lambda: during, nccl_calls.CALLS[kind], begin)
        except NcclTimeoutError as error:
            if error.during != during:  # the GPUs' own work before it has not ended
                raise
            words = f"{error.last_error}. {_CAUSES}"
            raise NcclTimeoutError(error.status, error.call, words, error.status_name, during) from None
        received = [np.empty_like(numbers) for numbers in sent]
        for i, numbers in enumerate(received):
            nccl_calls.copy(comm, i, ffi.from_buffer(numbers), recvs[i], numbers.nbytes)
        return received

    sums = exchange(lib.NCS_ALL_REDUCE, "all-reduce", [_numbers(r, 0) for r in ranks])
    expected = np.sum([_numbers(r, 0) for r in range(world_size)], axis=0, dtype=np.int32)
    blocks = [np.stack([_numbers(r, p) for p in range(world_size)]) for r in ranks]
    received = exchange(lib.NCS_ALL_TO_ALL, "message from each rank to each other", blocks)
    for i in range(len(ranks)):
        nccl_calls.scratch(comm, i, 0)

    pairs = [
        f"from rank {sender} to rank {rank}"
        for rank, block in zip(ranks, received, strict=True)
        for sender in range(world_size)
        if not np.array_equal(block[sender], _numbers(sender, rank))
    ]
    wrong = [f"a wrong sum on rank {r}" for r, s in zip(ranks, sums, strict=True) if (s != expected).any()]
    if pairs or wrong:
        words = ", ".join([f"other numbers {pair}" for pair in pairs] or wrong)
        raise NcclPreflightError(0, "ncclSend" if pairs else "ncclAllReduce", f"{words}. {_CAUSES}")


def _numbers(sender: int, receiver: int) -> np.ndarray:
    """Return numbers that differ for each pair: [COUNT], int32."""
    return np.arange(COUNT, dtype=np.int32) * 31 + (sender * 7919 + receiver * 104729) % 65521
