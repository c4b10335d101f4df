"""Declare the collectives of all communicators, and refuse bad arguments."""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ncclsync.communicator import native
from ncclsync.communicator.buffers import Buffers
from ncclsync.communicator.peers import Peers
from ncclsync.errors import NcclSyncError, ProcessError, causes_of


class AllReduce(NamedTuple):
    """Hold an all-reduce of a group: the arguments of ``Communicator.all_reduce``."""

    sends: Sequence[Any]
    recvs: Sequence[Any]
    op: str = "sum"
    label: str = ""


class Broadcast(NamedTuple):
    """Hold a broadcast of a group: the arguments of ``Communicator.broadcast``."""

    buffers: Sequence[Any]
    root: int = 0
    label: str = ""


class ReduceScatter(NamedTuple):
    """Hold a reduce-scatter of a group: the arguments of ``Communicator.reduce_scatter``."""

    sends: Sequence[Any]
    recvs: Sequence[Any]
    op: str = "sum"
    label: str = ""


class AllGather(NamedTuple):
    """Hold an all-gather of a group: the arguments of ``Communicator.all_gather``."""

    sends: Sequence[Any]
    recvs: Sequence[Any]
    label: str = ""


AnyCollective: TypeAlias = AllReduce | Broadcast | ReduceScatter | AllGather

NAMES = {AllReduce: "all-reduce", Broadcast: "broadcast", ReduceScatter: "reduce-scatter", AllGather: "all-gather"}
_TOLD = "_ncclsync_told"  # an attribute of errors that the other processes know of
_COLLECTIVES = "AllReduce, Broadcast, ReduceScatter or AllGather"


def read_buffers(collective: AnyCollective, memory: Mapping[int, str], world_size: int) -> tuple[Buffers, Buffers]:
    """Return the buffers that a collective reads, and those that it writes; a broadcast's are the same.

    Raises TypeError or ValueError, as `Buffers` does, and if counts and dtypes do not fit each other. `memory` has the
    DLPack device types that the buffers may lie on.
    """
    if isinstance(collective, Broadcast):
        buffers = Buffers(collective.buffers, "buffers", memory, writable=True)
        return buffers, buffers
    reads = Buffers(collective.sends, "sends", memory, writable=False)
    writes = Buffers(collective.recvs, "recvs", memory, writable=True)
    if isinstance(collective, ReduceScatter):
        reads.check_like(writes, world_size)
    else:
        writes.check_like(reads, world_size if isinstance(collective, AllGather) else 1)
    return reads, writes


class Communicator(contextlib.AbstractContextManager):
    """Join N ranks of this process, with those of others if there are several. Its creator closes it, best as a context
    manager.

    A buffer is a NumPy array (bfloat16 by ml_dtypes), an object with ``__dlpack__`` or a tuple
    ``(pointer, count, dtype)``; contiguous. All ranks' buffers have the same count and dtype; their
    shapes do not matter; forms may be mixed. A rank's buffer lies on that rank's GPU. Where a buffer is
    ``world_size`` blocks, one after the other, block r is that of rank r of all processes.

    Attributes:
        size: number of ranks of this process.
        ranks: [size] their numbers among the ranks of all processes.
        world_size: number of ranks in all processes.
        timeout_s: how long a collective may take; None for no limit.
        failure: the failed collective's error that ended it; None if none did.
    """

    size: int
    ranks: Sequence[int]
    world_size: int
    timeout_s: float | None = None
    failure: BaseException | None = None
    memory: Mapping[int, str]  # the DLPack device types that its buffers may lie on
    repeatable: bool = True  # whether sums have equal bits in every call and every run
    peers: Peers | None = None  # the other processes, if there are any
    compares_batches = False  # whether the processes compare the batches that `Peers.on_batch` names
    enqueues: bool = False  # whether ops launch collectives on it and the host does not wait for their ends
    failed_group: int = 0  # the first launched group that the last failure has ended, from 1
    was_delivered: bool = False  # whether an op may have computed with the failed groups' results
    agreed: float = math.inf  # the last group that all processes are known to have launched
    taken_bytes = 0  # the most memory of one of this process' GPUs that NCCL has taken
    _closed = False  # by `close`

    @functools.cached_property
    def users(self) -> weakref.WeakSet[Any]:
        """Return who uses it, and is told of failures: as `Failures` of `towers`, by `keep` and `put`."""
        return weakref.WeakSet()

    def find_failure(self) -> BaseException | None:
        """Return `failure`, after a look at the groups that ops have launched."""
        return self.failure

    @abc.abstractmethod
    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run at least one collective; lengths, operations and roots of the arguments are checked."""

    def close(self) -> None:
        """End the communicator. Idempotent; any later collective raises NcclSyncError."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Return whether the communicator has ended: by ``close`` or by a failed collective."""
        return self._closed or self.find_failure() is not None

    def all_reduce(self, sends: Sequence[Any], recvs: Sequence[Any], op: str = "sum", *, label: str = "") -> None:
        """Reduce over all ranks; every rank receives the result. Collective; blocks until done.

        Args:
            sends: one buffer per rank.
            recvs: one writable buffer per rank. ``recvs[r]`` may be ``sends[r]`` (in place).
            op: "sum", "prod", "max", "min" or "avg".
            label: its name in messages, such as "bucket 2 of 5".

        Raises:
            TypeError, ValueError: a bad argument; nothing was written.
            NcclError: the collective failed; a NcclTimeoutError if it did not end. The communicator is
                then aborted.
            NcclSyncError: the communicator is closed.
        """
        self.run_group([AllReduce(sends, recvs, op, label)])

    def broadcast(self, buffers: Sequence[Any], root: int = 0, *, label: str = "") -> None:
        """Copy the root's buffer into every other rank's. Collective; blocks until done. Raises as ``all_reduce``.

        Args:
            buffers: one writable buffer per rank.
            root: the rank to copy from, of this process or of another.
            label: as for ``all_reduce``.
        """
        self.run_group([Broadcast(buffers, root, label)])

    def reduce_scatter(self, sends: Sequence[Any], recvs: Sequence[Any], op: str = "sum", *, label: str = "") -> None:
        """Reduce over all ranks; each receives its block of the result. Collective; blocks, raises as ``all_reduce``.

        Args:
            sends: one buffer per rank: ``world_size`` blocks.
            recvs: one writable buffer per rank: one block, ``1 / world_size`` of the elements of a send. It
                may be the rank's own block of what the rank sends (in place).
            op, label: as for ``all_reduce``. On the host a rank receives its block of that result, to the bit.
        """
        self.run_group([ReduceScatter(sends, recvs, op, label)])

    def all_gather(self, sends: Sequence[Any], recvs: Sequence[Any], *, label: str = "") -> None:
        """Give every rank the buffers of all ranks, in their order. Collective; blocks and raises as ``all_reduce``.

        Args:
            sends: one buffer per rank: one block.
            recvs: one writable buffer per rank: ``world_size`` blocks, ``world_size`` times the elements of
                a send. The rank's own block of it may be what the rank sends (in place).
            label: as for ``all_reduce``.
        """
        self.run_group([AllGather(sends, recvs, label)])

    def run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run collectives of any dtypes, sizes and operations as one; blocks until all are done.

        They happen at once or in any order: what one of them writes no other may read or write. NCCL
        runs them as one group, which costs one launch and one wait. Raises as ``all_reduce``; an error ends all.

        Args:
            collectives: ``AllReduce``, ``Broadcast``, ``ReduceScatter`` and ``AllGather`` in any mix; of
                several processes, all give the same ones in the same order.
        """
        if self.closed:
            self.raise_closed()
        if isinstance(collectives, AnyCollective) or not isinstance(collectives, Iterable):
            raise TypeError(
                f"Expected collectives to be a list of {_COLLECTIVES}. Received: {type(collectives).__name__}"
            )
        collectives = list(collectives)  # an iterator would be used up by the checks
        for collective in collectives:
            self._check(collective)
        if collectives:
            self._run_group(collectives)

    def _check(self, collective: AnyCollective) -> None:
        if not isinstance(collective, AnyCollective):
            raise TypeError(f"Expected each collective to be {_COLLECTIVES}. Received: {collective!r}")
        if not isinstance(collective.label, str):
            raise TypeError(f"Expected label to be a str. Received: {collective.label!r}")
        if isinstance(collective, Broadcast):
            given = {"buffers": collective.buffers}
        else:
            given = {"sends": collective.sends, "recvs": collective.recvs}
            op = getattr(collective, "op", "sum")
            if not isinstance(op, str) or op not in native.OPS:
                raise ValueError(f"Expected op to be one of {', '.join(native.OPS)}. Received: {op!r}")
        for what, buffers in given.items():
            # An array will do: its rows are the buffers.
            ordered = hasattr(buffers, "__len__") and hasattr(buffers, "__getitem__")
            if not ordered or isinstance(buffers, (str, bytes, Mapping)):
                kind = type(buffers).__name__
                raise TypeError(f"Expected {what} to be a list of buffers, one per rank. Received: {kind}")
        lengths = [len(buffers) for buffers in given.values()]
        if lengths != [self.size] * len(lengths):
            expected = f"Expected {' and '.join(given)} to hold {self.size} buffers, one per rank"
            raise ValueError(f"{expected}. Received: {' and '.join(map(str, lengths))}")
        if isinstance(collective, Broadcast):
            root = collective.root
            if isinstance(root, bool) or not hasattr(root, "__index__"):
                raise TypeError(f"Expected root to be the number of a rank. Received: {root!r}")
            if not 0 <= root < self.world_size:
                raise ValueError(f"Expected root to be a rank, 0 to {self.world_size - 1}. Received: {root}")

    def groups(self) -> tuple[int, int]:
        """Return how many groups were launched, and how many of them are known to have ended well."""
        return 0, 0

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return [processes] the value that each process gives, as `messages.written` takes it. Collective.

        `what` is its name in messages. Raises ProcessError or NcclTimeoutError if another process does something else,
        or nothing.
        """
        return [value] if self.peers is None else self.peers.exchange(value, what, self.timeout_s)

    def agree(self, value: Any, what: str) -> list[Any]:
        """Return what each process gives, when each has launched what this one has; see `exchange`. Collective."""
        return self.exchange(value, what)

    @property
    def process(self) -> int:
        """Return this process' number."""
        return 0 if self.peers is None else self.peers.rank

    def report_failure(self, error: BaseException) -> None:
        """Tell the other processes, at their next collective, that something has failed in this one; once for an error.

        Errors that another process has caused are not reported.
        """
        known = any(isinstance(cause, ProcessError) or _TOLD in vars(cause) for cause in causes_of(error))
        if self.peers is not None and not known:
            self.mark_told(error)
            self._tell(self.peers, f"{type(error).__name__}: {error}")

    @staticmethod
    def mark_told(error: BaseException) -> None:
        """Remember that the other processes know of an error, so that `report_failure` does not report it again."""
        vars(error)[_TOLD] = True

    def _tell(self, peers: Peers, words: str) -> None:
        """Have the other processes' next collective raise an error with these words."""
        peers.report(words)

    def interrupt(self) -> None:
        """Let a collective that waits end soon, after Ctrl-C. Nothing to do where none waits."""
        return

    def wait(self) -> None:
        """Wait until all launched groups have ended. Raises the failure of one that has failed, now or before."""
        return

    def reopen(self) -> None:
        """Join the ranks again after a failed collective; nothing to do where none can fail."""
        return

    def raise_closed(self) -> NoReturn:
        """Raise what a collective on a communicator that has ended raises; what has ended the processes' agreement."""
        if self.peers is not None and self.peers.failure is not None:
            raise self.peers.failure
        raise NcclSyncError(
            f"Expected an open {type(self).__name__}. Received: one that is closed, or that a "
            "failed collective has aborted"
        )

    def __exit__(self, *_: object) -> None:
        self.close()
