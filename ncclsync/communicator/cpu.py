"""Join ranks in host memory: the C library adds up and copies; also what it moves between several processes.

Each of several processes owns one part of a buffer. It receives that part from all ranks, adds the parts up in the
order of the ranks, and sends the sum to all. A small buffer is sent whole to every process, and each adds it up: the
same bits as in one process, with one message less to wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

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
from ncclsync.communicator.buffers import HOST, Buffers, empty_aligned
from ncclsync.communicator.extents import check_apart, extents_of
from ncclsync.communicator.native import ffi, lib

_SMALL = 1 << 18  # bytes of all ranks; up to here each process adds up the whole buffer
_BYTES, _PLACES = ffi.typeof("char*"), ffi.typeof("void*[]")


class Move(NamedTuple):
    """What a collective sends to each process, [size] lists of buffers, and receives from each, in order."""

    sends: Sequence[Sequence[np.ndarray]]
    receives: Sequence[Sequence[np.ndarray]]


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
        check_size(size)
        self.number_ranks([size])

    def number_ranks(self, sizes: Sequence[int]) -> None:
        """Number the ranks, of which each process has so many."""
        begins = itertools.accumulate(sizes, initial=0)
        self._ranges = [range(*pair) for pair in itertools.pairwise(begins)]  # of ranks, by process
        self.ranks, self.world_size = self._ranges[self.process], sum(sizes)
        self.size = len(self.ranks)

    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run the collectives one after another: there is no launch to be saved, and nothing to be moved."""
        runs = [(one, *read_buffers(one, HOST, self.world_size)) for one in collectives]
        self.check_buffers(runs)
        for run in runs:
            for _ in self.stages(*run):
                pass

    def check_buffers(self, runs: Sequence[tuple[AnyCollective, Buffers, Buffers]]) -> None:
        """Raise ValueError if a buffer of a collective begins within an element, or overlaps one that is written."""
        for run in runs:
            check_apart(extents_of([run], self.ranks, may_share=True))

    def stages(self, collective: AnyCollective, reads: Buffers, writes: Buffers) -> Iterator[Move]:
        """Yield what a collective moves; when the generator ends, the collective is complete."""
        if isinstance(collective, Broadcast):
            return self._broadcast(writes, collective.root)
        if len(self._ranges) == 1 and isinstance(collective, AllReduce):
            _add_up(reads.pointers, writes.pointers, writes.count, writes.dtype, native.OPS[collective.op])
            return iter(())
        sends = [_view(pointer, reads) for pointer in reads.pointers]
        if isinstance(collective, AllGather):
            return self._all_gather(sends, writes)
        if isinstance(collective, ReduceScatter):
            return self._reduce_scatter(sends, writes, native.OPS[collective.op])
        return self._all_reduce(sends, writes, native.OPS[collective.op])

    def _broadcast(self, writes: Buffers, root: int) -> Iterator[Move]:
        source = next(i for i, ranks in enumerate(self._ranges) if root in ranks)
        is_here = source == self.process
        buffer = _view(writes.pointers[root - self.ranks[0] if is_here else 0], writes)
        nothing: list[list[np.ndarray]] = [[] for _ in self._ranges]
        given = [[buffer] if i == source else [] for i in range(len(self._ranges))]
        yield Move([[buffer]] * len(self._ranges), nothing) if is_here else Move(nothing, given)
        _copy(buffer, writes.pointers)

    def _all_gather(self, sends: list[np.ndarray], writes: Buffers) -> Iterator[Move]:
        gathered = _view(writes.pointers[0], writes)
        blocks = gathered.reshape(self.world_size, sends[0].size)
        yield Move([sends] * len(self._ranges), [list(blocks[ranks.start : ranks.stop]) for ranks in self._ranges])
        for rank, send in zip(self.ranks, sends, strict=True):
            blocks[rank] = send
        _copy(gathered, writes.pointers)

    def _all_reduce(self, sends: list[np.ndarray], writes: Buffers, op: int) -> Iterator[Move]:
        processes, width, total = len(self._ranges), _width(writes), _view(writes.pointers[0], writes)
        if self.world_size * total.size <= _SMALL:
            received = self._received(sends)
            yield Move([sends] * processes, received)
            _add_up(_pointers(received), writes.pointers, writes.count, writes.dtype, op)
            return
        ends = [width * (writes.count * (i + 1) // processes) for i in range(processes)]
        parts = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
        own = parts[self.process]
        received = self._received([send[own] for send in sends])
        yield Move([[send[part] for send in sends] for part in parts], received)
        _add_up(_pointers(received), _pointers([[total[own]]]), total[own].size // width, writes.dtype, op)
        yield Move([[total[own]]] * processes, [[total[part]] for part in parts])
        _copy(total, writes.pointers)

    def _reduce_scatter(self, sends: list[np.ndarray], writes: Buffers, op: int) -> Iterator[Move]:
        block = writes.count * _width(writes)
        parts = [slice(ranks.start * block, ranks.stop * block) for ranks in self._ranges]
        received = self._received([send[parts[self.process]] for send in sends])
        yield Move([[send[part] for send in sends] for part in parts], received)
        for i, pointer in enumerate(writes.pointers):
            blocks = [[one[i * block : (i + 1) * block] for one in each] for each in received]
            _add_up(_pointers(blocks), [pointer], writes.count, writes.dtype, op)

    def _received(self, own: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Return [processes] buffers for what their ranks send; of this process `own`."""
        size = own[0].size
        return [
            own if i == self.process else [empty_aligned(size, np.uint8) for _ in ranks]
            for i, ranks in enumerate(self._ranges)
        ]


def check_size(size: Any) -> None:
    """Raise ValueError unless it is a number of ranks."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"Expected size to be a number of ranks, at least 1. Received: {size!r}")


def _add_up(sends: Sequence[Any], recvs: Sequence[Any], count: int, dtype: int, op: int) -> None:
    """Reduce the buffers of all ranks, in their order, into other places, into each once."""
    places, pool = [*dict.fromkeys(recvs)], native.process_pool()
    sent, received = ffi.new(_PLACES, sends), ffi.new(_PLACES, places)
    tensor = ffi.new("ncs_reduced*", (sent, received, len(places), count))
    status = lib.ncs_cpu_reduce(pool, tensor, 1, ffi.NULL, len(sends), dtype, op)
    native.check(status, "ncs_cpu_reduce")


def _copy(source: np.ndarray, pointers: Sequence[Any]) -> None:
    """Copy bytes to other places, to each once; one may be the source itself."""
    _add_up(_pointers([[source]]), pointers, source.size, native.DTYPES["uint8"], native.OPS["sum"])


def _width(buffers: Buffers) -> int:
    return native.DTYPE_SIZES[buffers.dtype]


def _view(pointer: Any, buffers: Buffers) -> np.ndarray:
    return np.frombuffer(ffi.buffer(ffi.cast(_BYTES, pointer), buffers.count * _width(buffers)), np.uint8)


def _pointers(views: Sequence[Sequence[np.ndarray]]) -> list[Any]:
    """Return where bytes are, of [processes] one piece for each of their ranks."""
    return [ffi.from_buffer(_BYTES, view) for each in views for view in each]
