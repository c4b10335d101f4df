"""Check, before the first real collective, that GPUs receive what other GPUs sent.

Some hosts corrupt what GPUs send each other directly, without any error: all training on them would be wrong.
An all-reduce goes over the paths that NCCL has chosen for it; a message from each rank to each other, over
every pair's. Both are small. NCCL connects every pair by each of its channels, 12 MiB each, for the communicator's
life: by a communicator of one channel these are 84 MiB on eight GPUs, otherwise up to 2.7 GB.
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


class Preflight:
    """Send known numbers over a new communicator. Collective.

    Each method raises NcclPreflightError if a rank received something else; NcclTimeoutError if nothing came; and
    whatever `run(what, call, begin)` raises, which begins a task after the GPUs' own work, and waits for its end.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], world_size: int, run: Callable[..., None]) -> None:
        """Take over a handle, which holds the device memory that is used, also after a failure."""
        self._comm, self._ranks, self._world_size, self._run = comm, ranks, world_size, run

    def pairs(self, library: native.NcclLibrary, joined_by: bytes | None) -> bytes | None:
        """Check a message from each rank to each other; return what the same ranks can be joined by again.

        `joined_by` is what they were joined by, which serves once.
        """
        blocks = [np.stack([_numbers(r, p) for p in range(self._world_size)]) for r in self._ranks]
        received = self._exchange(lib.NCS_ALL_TO_ALL, "message from each rank to each other", blocks, COUNT)
        wrong = [
            f"other numbers from rank {sender} to rank {rank}"
            for rank, block in zip(self._ranks, received, strict=True)
            for sender in range(self._world_size)
            if not np.array_equal(block[sender], _numbers(sender, rank))
        ]
        self._raise_of(wrong, "ncclSend")
        if joined_by is None:
            return None
        made = nccl_calls.unique_id(library) if 0 in self._ranks else bytes(lib.NCS_UNIQUE_ID_BYTES)
        told = [np.frombuffer(made, np.int32)] * len(self._ranks)
        return self._exchange(lib.NCS_BROADCAST, "broadcast", told, len(told[0]))[0].tobytes()

    def sums(self) -> None:
        """Check an all-reduce, which goes over the paths that NCCL has chosen for it."""
        received = self._exchange(lib.NCS_ALL_REDUCE, "all-reduce", [_numbers(r, 0) for r in self._ranks], COUNT)
        expected = np.sum([_numbers(r, 0) for r in range(self._world_size)], axis=0, dtype=np.int32)
        wrong = [
            f"a wrong sum on rank {r}" for r, s in zip(self._ranks, received, strict=True) if (s != expected).any()
        ]
        self._raise_of(wrong, "ncclAllReduce")

    def _exchange(self, kind: int, what: str, sent: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Run one collective on arrays of each rank, of as many bytes as it receives; return what it receives."""
        comm, during, size_bytes = self._comm, f"the preflight's {what}", sent[0].nbytes
        sends = [ffi.cast("char*", nccl_calls.scratch(comm, i, 2 * size_bytes)) for i in range(len(sent))]
        recvs = [block + size_bytes for block in sends]
        group = [[(kind, native.OPS["sum"], 0, *pair, count, _INT32)] for pair in zip(sends, recvs, strict=True)]
        for i, numbers in enumerate(sent):
            # A broadcast's root sends what lies where the others receive.
            to = recvs[i] if kind == lib.NCS_BROADCAST else sends[i]
            nccl_calls.copy(comm, i, to, ffi.from_buffer(numbers), numbers.nbytes)
        try:
            begin = functools.partial(nccl_calls.launch_group, comm, group, lambda _: during)
            self._run(lambda: during, nccl_calls.CALLS[kind], begin)
        except NcclTimeoutError as error:
            if error.during != during:  # the GPUs' own work before it has not ended
                raise
            words = f"{error.last_error}. {_CAUSES}"
            raise NcclTimeoutError(error.status, error.call, words, error.status_name, during) from None
        received = [np.empty_like(numbers) for numbers in sent]
        for i, numbers in enumerate(received):
            nccl_calls.copy(comm, i, ffi.from_buffer(numbers), recvs[i], numbers.nbytes)
            nccl_calls.scratch(comm, i, 0)
        return received

    def _raise_of(self, wrong: Sequence[str], call: str) -> None:
        if wrong:
            raise NcclPreflightError(0, call, f"{', '.join(wrong)}. {_CAUSES}")


def _numbers(sender: int, receiver: int) -> np.ndarray:
    """Return numbers that differ for each pair: [COUNT], int32."""
    return np.arange(COUNT, dtype=np.int32) * 31 + (sender * 7919 + receiver * 104729) % 65521
