"""Join the ranks of several processes in host memory: TCP carries bytes, the C library adds them up in rank order.

Each process owns one part of a buffer. It receives that part from all ranks, adds the parts up in the order of the
ranks, and sends the sum to all: bit for bit what `CpuCommunicator` computes for as many ranks in one process. A small
buffer is sent whole to every process, and each adds it up: the same bits, with one message less to wait for.

Before a collective all processes tell each other what they are about to do, by a digest; the first data travel along,
and are used only when all digests are equal. Otherwise `Peers.exchange` tells who does something else, or has failed.
A process that ends, is silent, or is interrupted in a collective ends the agreement for good.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ncclsync.communicator import native, timeouts
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
from ncclsync.communicator.messages import MOST_BYTES
from ncclsync.communicator.native import ffi, lib
from ncclsync.communicator.peers import SAME_MODEL, SILENCE_S, Peers, shortened
from ncclsync.errors import NcclSyncError, ProcessError

_HEADER = struct.Struct("<16sq")  # what a process does next, and how many bytes it sends along
_SMALL = 1 << 18  # bytes of all ranks; up to here each process adds up the whole buffer
_BYTES = ffi.typeof("char*")
_TOLD_S = SILENCE_S + 2  # until the reason is known for which a connection has ended


class Move(NamedTuple):
    """What a collective sends to each process, [size] lists of buffers, and receives from each, in order."""

    sends: Sequence[Sequence[np.ndarray]]
    receives: Sequence[Sequence[np.ndarray]]


class TcpCommunicator(Communicator):
    """Join ranks of several processes in host memory. Ranks are numbered process by process.

    A process runs the collectives of all its communicators one after another, in the same order in all processes.
    """

    memory = HOST
    waits = compares_batches = True
    peers: Peers

    def __init__(self, peers: Peers, size: int, *, timeout_s: float | None = timeouts.DEFAULT_TIMEOUT_S) -> None:
        """Join the ranks of all processes. Collective.

        Raises TypeError or ValueError for bad arguments; ProcessError or NcclTimeoutError if the others cannot be
        joined.

        Args:
            peers: the processes.
            size: number of ranks of this one.
            timeout_s: None for no limit. A process that says nothing for 10 s is an error in any case.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Expected size to be a number of ranks, at least 1. Received: {size!r}")
        timeouts.check_timeout(timeout_s)
        self.peers, self.timeout_s = peers, timeout_s
        self._data = peers.data(timeout_s)
        sizes = self.exchange(size, "the joining of ranks")
        begins = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._ranges = [range(*pair) for pair in itertools.pairwise(begins)]  # of ranks, by process
        self.size, self.world_size, self.ranks = size, sum(sizes), self._ranges[peers.rank]

    @property
    def failure(self) -> BaseException | None:  # type: ignore[override]
        """Return the error that has ended the agreement of the processes."""
        return self.peers.failure

    @property
    def leads(self) -> bool:
        """Return whether this process writes files; see `Communicator.leads`."""
        return self.peers.lost.issuperset(range(self.peers.rank))

    def take_error(self) -> ProcessError | None:
        """Return the error that another process has caused, once; see `Communicator.take_error`."""
        error, self.peers.raised = self.peers.raised, None
        return error

    def exchange(self, value: Any, what: str, most_bytes: int = MOST_BYTES) -> list[Any]:
        """Return what each process gives; see `Communicator.exchange`."""
        if self.closed:
            self.raise_closed()
        with self.peers.in_turn:
            self._meet(what, [])
            return self.peers.exchange(value, what, self.timeout_s, most_bytes=most_bytes)

    def _tell(self, words: str) -> None:
        """Let the others' next collective raise it. Collective."""
        if self.closed:
            return
        try:
            with self.peers.in_turn:
                self._meet(words, [], kind="failed")
                self.peers.exchange(None, shortened(words), self.timeout_s, failed=True)
        except NcclSyncError:  # as in all processes
            self.peers.raised = None

    def reopen(self) -> None:
        """Do nothing, or raise the failure: processes cannot be joined again."""
        if self.peers.failure is not None:
            raise self.peers.failure

    def raise_closed(self) -> NoReturn:
        """Raise the failure, if there is one."""
        self.reopen()
        super().raise_closed()

    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run collectives side by side: all send their data at once, and then their sums."""
        runs = [read_buffers(collective, HOST, self.world_size) for collective in collectives]
        what = [_described(collective, writes) for collective, (_, writes) in zip(collectives, runs, strict=True)]
        text = what[0] if len(what) == 1 else f"{what[0]}, and {len(what) - 1} more"
        stages = [self._stages(collective, *run) for collective, run in zip(collectives, runs, strict=True)]
        with self.peers.in_turn:
            if not self._meet(text, [next(one) for one in stages], kind=repr(what)):
                self._raise_difference(what, text)
            while moves := [move for one in stages if (move := next(one, None)) is not None]:
                transfer = _Transfer(self._data, *self._joined(moves))
                self._wait(transfer, text)

    def _meet(self, text: str, moves: Sequence[Move], kind: str = "") -> bool:
        """Tell all processes what this one does next, and run moves if all do the same; return whether they do.

        What is sent follows at once. Where processes do different things it is dropped, so that they stay in step.
        """
        self.peers.begun += 1
        digest = hashlib.blake2b(f"{kind}\n{text}\n{self.peers.batch}".encode(), digest_size=16).digest()
        sends, receives = self._joined(moves)
        headers = {i: np.empty(_HEADER.size, np.uint8) for i in self._data}
        for buffers in sends.values():
            header = _HEADER.pack(digest, sum(one.size for one in buffers))
            buffers.insert(0, np.frombuffer(header, np.uint8))
        transfer = _Transfer(self._data, sends, {i: [header] for i, header in headers.items()})
        self._wait(transfer, text, sends=False)
        found = {i: _HEADER.unpack(header.data) for i, header in headers.items()}
        is_same = all(one == digest for one, _ in found.values())
        transfer.receive(receives if is_same else {i: [np.empty(n, np.uint8)] for i, (_, n) in found.items()})
        self._wait(transfer, text)
        return is_same

    def _raise_difference(self, what: Sequence[str], text: str) -> NoReturn:
        """Raise what the others do, or that they have failed. Collective."""
        each = self.peers.exchange(tuple(what), text, self.timeout_s)
        i = next(i for i, found in enumerate(each) if found != each[0])
        pair = next(pair for pair in itertools.zip_longest(each[0], each[i]) if pair[0] != pair[1])
        said = [f"{self.peers.name(j)} is at {one}" for j, one in zip((0, i), pair, strict=True)]
        self.peers.fail(f"Expected all processes to do the same. Received: {'; '.join(said)}. {SAME_MODEL}")

    def _joined(self, moves: Sequence[Move]) -> tuple[dict[int, list[np.ndarray]], dict[int, list[np.ndarray]]]:
        """Return what moves send to each other process and receive from it."""
        sends, receives = ({i: [one for move in moves for one in move[way][i]] for i in self._data} for way in (0, 1))
        return sends, receives

    def _wait(self, transfer: _Transfer, text: str, *, sends: bool = True) -> None:
        """Wait for a part of a transfer. An error is the end: processes are no longer in step."""
        peers = self.peers

        def check(what: str) -> None:
            if transfer.lost or peers.silent():  # who has ended may have sent all before
                peers.check_alive(what)
            if transfer.lost and time.monotonic() - transfer.lost_at > _TOLD_S:
                ended = peers.names(transfer.lost)
                peers.fail(f"Expected {what} to end. Received: the end of the connection to {ended}")

        try:
            timeouts.wait(
                functools.partial(transfer.go_on, sends=sends),
                call="transfer",
                what=lambda: text,
                timeout_s=self.timeout_s,
                arrived=lambda: f"{peers.names(transfer.waits_for())} not arrived",
                check=check,
            )
        except BaseException as error:
            if peers.failure is None:
                peers.failure = ProcessError(f"{type(error).__name__}: {error}")
            for connection in self._data.values():  # nobody is to wait for this process
                connection.close()
            raise

    def _stages(self, collective: AnyCollective, reads: Buffers, writes: Buffers) -> Iterator[Move]:
        """Yield what a collective moves; when the generator ends, the collective is complete."""
        if isinstance(collective, Broadcast):
            return self._broadcast(writes, collective.root)
        sends = [_view(pointer, reads) for pointer in reads.pointers]
        if isinstance(collective, AllGather):
            return self._all_gather(sends, writes)
        if isinstance(collective, ReduceScatter):
            return self._reduce_scatter(sends, writes, native.OPS[collective.op])
        return self._all_reduce(sends, writes, native.OPS[collective.op])

    def _broadcast(self, writes: Buffers, root: int) -> Iterator[Move]:
        source = next(i for i, ranks in enumerate(self._ranges) if root in ranks)
        is_here = source == self.peers.rank
        own = root - self.ranks[0] if is_here else 0
        buffer = _view(writes.pointers[own], writes)
        nothing: list[list[np.ndarray]] = [[] for _ in self._ranges]
        given = [[buffer] if i == source else [] for i in range(len(self._ranges))]
        yield Move([[buffer]] * len(self._ranges), nothing) if is_here else Move(nothing, given)
        _copy(buffer, [pointer for i, pointer in enumerate(writes.pointers) if i != own], writes)

    def _all_gather(self, sends: list[np.ndarray], writes: Buffers) -> Iterator[Move]:
        gathered = _view(writes.pointers[0], writes)
        blocks = gathered.reshape(self.world_size, sends[0].size)
        yield Move([sends] * len(self._ranges), [list(blocks[ranks.start : ranks.stop]) for ranks in self._ranges])
        blocks[self.ranks] = sends
        _copy(gathered, writes.pointers[1:], writes)

    def _all_reduce(self, sends: list[np.ndarray], writes: Buffers, op: int) -> Iterator[Move]:
        width, total = _width(writes), _view(writes.pointers[0], writes)
        is_small = self.world_size * total.size <= _SMALL
        ends = [width * (writes.count * (i + 1) // self.peers.size) for i in range(self.peers.size)]
        parts = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
        parts = [slice(0, total.size)] * self.peers.size if is_small else parts
        own = parts[self.peers.rank]
        received = self._received([send[own] for send in sends])
        yield Move([[send[part] for send in sends] for part in parts], received)
        _add_up([one for each in received for one in each], total[own], writes.dtype, op)
        if not is_small:
            yield Move([[total[own]]] * len(parts), [[total[part]] for part in parts])
        _copy(total, writes.pointers[1:], writes)

    def _reduce_scatter(self, sends: list[np.ndarray], writes: Buffers, op: int) -> Iterator[Move]:
        block = writes.count * _width(writes)
        parts = [slice(ranks.start * block, ranks.stop * block) for ranks in self._ranges]
        received = self._received([send[parts[self.peers.rank]] for send in sends])
        yield Move([[send[part] for send in sends] for part in parts], received)
        for i, pointer in enumerate(writes.pointers):
            blocks = [one[i * block : (i + 1) * block] for each in received for one in each]
            _add_up(blocks, _view(pointer, writes), writes.dtype, op)

    def _received(self, own: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Return [processes] buffers for what their ranks send; of this process `own`."""
        size = own[0].size
        return [
            own if i == self.peers.rank else [empty_aligned(size, np.uint8) for _ in ranks]
            for i, ranks in enumerate(self._ranges)
        ]


class _Transfer:
    """Send and receive bytes side by side, so that no two processes wait for each other to read.

    Attributes:
        lost: the processes whose connections have ended too soon; `lost_at` says when.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        sends: Mapping[int, Sequence[np.ndarray]],
        receives: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        self._connections = connections
        # By process, what is left, in order.
        self._sends, self._receives = (
            {i: collections.deque(one.data for one in buffers if one.size) for i, buffers in each.items()}
            for each in (sends, receives)
        )
        self.lost: list[int] = []
        self.lost_at = 0.0

    def receive(self, receives: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Receive more from processes."""
        for i, buffers in receives.items():
            self._receives[i].extend(one.data for one in buffers if one.size and i not in self.lost)

    def waits_for(self) -> list[int]:
        """Return the processes from which something is to come."""
        return [i for i, buffers in self._receives.items() if buffers]

    def go_on(self, slice_s: float, *, sends: bool = True) -> bool:
        """Work for so many seconds; return whether all is received and, if `sends`, all is sent."""
        until = time.monotonic() + slice_s
        while self.waits_for() or (sends and any(self._sends.values())):
            poll, processes = select.poll(), {}
            for i, connection in self._connections.items():
                events = select.POLLOUT * bool(self._sends[i]) | select.POLLIN * bool(self._receives[i])
                if events:
                    poll.register(connection, events)
                    processes[connection.fileno()] = i
            for fd, event in poll.poll(max(0.0, 1e3 * (until - time.monotonic()))):
                self._advance(processes[fd], event)
            if time.monotonic() >= until:
                return False
        if self.lost:
            time.sleep(max(0.0, until - time.monotonic()))
        return not self.lost

    def _advance(self, i: int, event: int) -> None:
        try:
            if event & select.POLLOUT:
                _pass(self._sends[i], self._connections[i].send)
            if event & ~select.POLLOUT:
                _pass(self._receives[i], self._connections[i].recv_into)
        except OSError:
            self._sends[i].clear()
            self._receives[i].clear()
            self.lost, self.lost_at = [*self.lost, i], time.monotonic()


def _pass(buffers: collections.deque[memoryview], way: Callable[[memoryview], int]) -> None:
    """Send or receive a part of the first buffer."""
    if not buffers:
        raise ConnectionResetError  # nothing is left but an error, which was reported
    count = way(buffers[0])
    if count == 0:
        raise ConnectionResetError
    if count < len(buffers[0]):
        buffers[0] = buffers[0][count:]
    else:
        buffers.popleft()


def _add_up(sends: Sequence[np.ndarray], into: np.ndarray, dtype: int, op: int) -> None:
    """Reduce the ranks' buffers, in the order of the ranks."""
    if not into.size:
        return
    pointers = [ffi.from_buffer("char*", send) for send in sends]
    target = ffi.from_buffer("char*", into, require_writable=True)
    count = into.size // native.DTYPE_SIZES[dtype]
    pool, n = native.process_pool(), len(sends)
    status = lib.ncs_cpu_all_reduce(pool, pointers, [target] * n, n, count, dtype, op)
    native.check(status, "ncs_cpu_all_reduce")


def _described(collective: AnyCollective, writes: Buffers) -> str:
    kind = {AllReduce: "all-reduce", Broadcast: "broadcast", ReduceScatter: "reduce-scatter", AllGather: "all-gather"}
    op = getattr(collective, "op", getattr(collective, "root", ""))
    about = f" ({collective.label})" if collective.label else ""
    return f"{kind[type(collective)]}{about} of {writes.count} × {native.DTYPE_NAMES[writes.dtype]}, {op}".rstrip(", ")


def _width(buffers: Buffers) -> int:
    return native.DTYPE_SIZES[buffers.dtype]


def _view(pointer: Any, buffers: Buffers) -> np.ndarray:
    """Return the bytes of a buffer."""
    return np.frombuffer(ffi.buffer(ffi.cast(_BYTES, pointer), buffers.count * _width(buffers)), np.uint8)


def _copy(source: np.ndarray, pointers: Sequence[Any], buffers: Buffers) -> None:
    for pointer in pointers:
        target = _view(pointer, buffers)
        if target.ctypes.data != source.ctypes.data:
            np.copyto(target, source)
