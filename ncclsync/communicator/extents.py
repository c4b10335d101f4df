"""Check where the buffers of a group lie, before any is written.

With bad ones NCCL would hang, give wrong numbers, or write into memory that others read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ncclsync.communicator import native
from ncclsync.communicator.base import AnyCollective, ReduceScatter
from ncclsync.communicator.buffers import Buffers


class Extent(NamedTuple):
    """Hold memory that a collective of a group reads or writes on a rank of this process."""

    begin: int
    end: int
    is_read: bool  # only
    name: str  # such as "recvs[1]"
    rank: int  # its index among those of this process
    number: int  # of the collective, its index in the group
    is_shared: bool  # whether other ranks' buffers may be exactly the same, as in the host's memory


def extents_of(
    runs: Sequence[tuple[AnyCollective, Buffers, Buffers]], ranks: Sequence[int], *, may_share: bool
) -> list[Extent]:
    """Return the memory that a group reads and writes, of `ranks`; none for buffers without elements.

    Memory that is sent and received in place is one written piece; what else is sent lies before and behind it. Raises
    ValueError for a buffer that begins within an element.
    """
    found = []
    for number, (collective, reads, writes) in enumerate(runs):
        is_shared = may_share and not isinstance(collective, ReduceScatter)  # which gives each rank something else
        size = native.DTYPE_SIZES[reads.dtype]
        sent, received = reads.count * size, writes.count * size
        for i, (rank, send, recv) in enumerate(zip(ranks, reads.addresses(), writes.addresses(), strict=True)):
            own = rank * min(sent, received) if sent != received else 0
            pieces = [(recv, recv + received, getattr(collective, "root", None) == rank, writes.what)]
            if sent > received and recv == send + own:
                pieces += [(send, recv, True, reads.what), (recv + received, send + sent, True, reads.what)]
            elif reads is not writes and (sent > received or send != recv + own):
                pieces.append((send, send + sent, True, reads.what))
            for begin, end, is_read, what in pieces:
                if begin < end:
                    found.append(Extent(begin, end, is_read, f"{what}[{i}]", i, number, is_shared))
                    if begin % size:
                        raise ValueError(
                            f"Expected {what}[{i}] to begin at a multiple of {size} bytes. Received: address {begin:#x}"
                        )
    return found


def check_apart(extents: Sequence[Extent], name: Callable[[int], str] | None = None) -> None:
    """Raise ValueError if what is written overlaps anything else. `name` names a collective of a group of several."""
    # In the order of addresses, which reaches farthest: of what is written, for one that is only read; else of all.
    farthest: dict[bool, Extent] = {}
    previous: Extent | None = None
    for one in sorted(extents):
        if previous is not None and one.is_shared and one[:2] == previous[:2]:
            continue
        previous = one
        before = farthest.get(one.is_read)
        if before is not None and one.begin < before.end:
            first, second = sorted((before, one), key=lambda each: (each.name[0] == "s", each.number, each.rank))
            remark = ", or the same" if first.is_shared else ""
            if first.number != second.number:
                remark = f" of collective {second.number + 1} of the group"
            elif first.name[0] != second.name[0]:
                remark = ", or in place"
            raise ValueError(
                f"Expected {first.name} to be apart from {second.name}{remark}. Received: {first.end - first.begin} "
                f"and {second.end - second.begin} bytes, {abs(second.begin - first.begin)} bytes apart"
                f"{'' if name is None else f', in {name(first.number)}'}"
            )
        for is_read in (False,) if one.is_read else (False, True):
            farthest[is_read] = max(farthest.get(is_read, one), one, key=lambda each: each.end)
