"""Join the ranks of several processes in host memory: TCP carries what `CpuCommunicator` moves between processes.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ncclsync.communicator import native, timeouts
from ncclsync.communicator.base import NAMES, AnyCollective, read_buffers
from ncclsync.communicator.buffers import HOST, Buffers
from ncclsync.communicator.cpu import CpuCommunicator, Move, check_size
from ncclsync.communicator.peers import SAME_MODEL, SILENCE_S, Peers, shortened
from ncclsync.errors import NcclSyncError, ProcessError

_HEADER = struct.Struct("<16sq")  # what a process does next, and how many bytes it sends along
_TOLD_S = SILENCE_S + 2  # until the reason is known for which a connection has ended


class TcpCommunicator(CpuCommunicator):
    """Join ranks of several processes in host memory. Ranks are numbered process by process.

    A process runs the collectives of all its communicators one after another, in the same order in all processes.
    """

    compares_batches = True
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
        check_size(size)
        timeouts.check_timeout(timeout_s)
        self.peers, self.timeout_s = peers, timeout_s
        self._data = peers.data(timeout_s)
        self.number_ranks(self.exchange(size, "the joining of ranks"))

    @property
    def failure(self) -> BaseException | None:  # type: ignore[override]
        """Return the error that has ended the agreement of the processes."""
        return self.peers.failure

    def take_error(self) -> ProcessError | None:
        """Return the error that another process has caused, once; see `Communicator.take_error`."""
        error, self.peers.raised = self.peers.raised, None
        return error

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return what each process gives; see `Communicator.exchange`."""
        if self.closed:
            self.raise_closed()
        with self.peers.in_turn:
            self._meet(what, [])
            return self.peers.exchange(value, what, self.timeout_s)

    def _tell(self, words: str) -> None:
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

    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run collectives side by side: all send their data at once, and then their sums."""
        runs = [(one, *read_buffers(one, HOST, self.world_size)) for one in collectives]
        self.check_buffers(runs)
        what = [_described(collective, writes) for collective, _, writes in runs]
        text = what[0] if len(what) == 1 else f"{what[0]}, and {len(what) - 1} more"
        stages = [self.stages(*run) for run in runs]
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
            for connection in self._data.values():  # no other process is to wait for this one
                connection.close()
            raise


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


def _described(collective: AnyCollective, writes: Buffers) -> str:
    op = getattr(collective, "op", getattr(collective, "root", ""))
    about = f" ({collective.label})" if collective.label else ""
    return f"{NAMES[type(collective)]}{about} of {writes.count} × {native.DTYPE_NAMES[writes.dtype]}, {op}".rstrip(", ")
