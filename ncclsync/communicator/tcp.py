"""Join the ranks of several processes in host memory: ZeroMQ carries what `CpuCommunicator` moves between processes.

Before a collective all processes tell each other what they are about to do, by a digest; the first data travel along,
and are used only when all digests are equal. Otherwise `Peers.exchange` tells who does something else, or has failed.
A process that ends, is silent, or is interrupted in a collective ends the agreement for good.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import queue
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ncclsync.communicator import native, timeouts
from ncclsync.communicator.base import NAMES, AnyCollective, read_buffers
from ncclsync.communicator.buffers import HOST, Buffers
from ncclsync.communicator.cpu import CpuCommunicator, Move, check_size
from ncclsync.communicator.peers import SAME_MODEL, Peers, shortened
from ncclsync.errors import NcclSyncError

_HEADER = struct.Struct("<16sq")  # what a process does next, and how many bytes it sends along


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
        self.number_ranks(self.exchange(size, "the joining of ranks"))

    @property
    def failure(self) -> BaseException | None:  # type: ignore[override]
        """Return the error that has ended the agreement of the processes."""
        return self.peers.failure

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return what each process gives; see `Communicator.exchange`."""
        if self.closed:
            self.raise_closed()
        with self.peers.in_turn:
            self._meet(what, [])
            return self.peers.exchange(value, what, self.timeout_s)

    def agree(self, value: Any, what: str) -> list[Any]:
        """Return what each process gives, when each has come this far; see `Communicator.agree`."""
        if value or self.closed:
            return self.exchange(value, what)
        with self.peers.in_turn:
            if not self._meet(what, []):  # another process has failed, or is elsewhere
                return self.peers.exchange(value, what, self.timeout_s)
        return [value] * self.peers.size

    def _tell(self, peers: Peers, words: str) -> None:
        if self.closed:
            return
        with contextlib.suppress(NcclSyncError), peers.in_turn:  # raised as in all processes
            self._meet("the report of a failure", [], kind=f"failed: {words}")
            peers.exchange(None, shortened(words), self.timeout_s, failed=True)

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
                sends, receives = self._joined(moves)
                self._send(sends)
                self._receive(receives, text)

    def _meet(self, text: str, moves: Sequence[Move], kind: str = "") -> bool:
        """Tell all processes what this one does next, and run moves if all do the same; return whether they do.

        What is sent follows at once. Where processes do different things it is dropped, so that they stay in step.
        """
        self.peers.begun += 1
        digest = hashlib.blake2b(f"{kind}\n{text}\n{self.peers.batch}".encode(), digest_size=16).digest()
        sends, receives = self._joined(moves)
        for buffers in sends.values():
            header = _HEADER.pack(digest, sum(one.size for one in buffers))
            buffers.insert(0, np.frombuffer(header, np.uint8))
        self._send(sends)
        headers = {i: np.empty(_HEADER.size, np.uint8) for i in receives}
        self._receive({i: [header] for i, header in headers.items()}, text)
        found = {i: _HEADER.unpack(header.data) for i, header in headers.items()}
        is_same = all(one == digest for one, _ in found.values())
        self._receive(receives if is_same else {i: [np.empty(n, np.uint8)] for i, (_, n) in found.items()}, text)
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
        others = [i for i in range(self.peers.size) if i != self.peers.rank]
        sends, receives = ({i: [one for move in moves for one in move[way][i]] for i in others} for way in (0, 1))
        return sends, receives

    def _send(self, sends: Mapping[int, Sequence[np.ndarray]]) -> None:
        for i, buffers in sends.items():
            for one in buffers:
                self.peers.service.send(i, one.data)

    def _receive(self, receives: Mapping[int, Sequence[np.ndarray]], text: str) -> None:
        """Receive bytes from processes. An error is the end: processes are no longer in step."""
        peers, waiting = self.peers, {i: [one.data for one in each if one.size] for i, each in receives.items()}

        def go_on(slice_s: float) -> bool:
            until = time.monotonic() + slice_s
            for i, buffers in waiting.items():
                while buffers:
                    try:
                        piece = peers.service.inbox[i].get(timeout=max(0.0, until - time.monotonic()))
                    except queue.Empty:
                        return False
                    buffers[0][: len(piece)] = piece
                    buffers[0] = buffers[0][len(piece) :]
                    if not buffers[0]:
                        buffers.pop(0)
            return True

        def late() -> list[int]:
            return [i for i, buffers in waiting.items() if buffers and peers.service.inbox[i].empty()]

        def check(what: str) -> None:
            out = peers.gone().keys() | peers.given_up
            out &= {*late()}  # afterwards: who has ended has sent all before
            if peers.silent() or out:
                peers.check_alive(what)  # a more telling reason
            for i in out & peers.given_up.keys():
                peers.fail(f"Expected {what} to end. Received: {peers.name(i)} has given it up: {peers.given_up[i]}")

        try:
            timeouts.wait(
                go_on,
                call="transfer",
                what=lambda: text,
                timeout_s=self.timeout_s,
                arrived=lambda: f"{peers.names(late())} not arrived",
                check=check,
            )
        except BaseException as error:
            peers.give_up(error)  # no other process is to wait for this one
            raise


def _described(collective: AnyCollective, writes: Buffers) -> str:
    op = getattr(collective, "op", getattr(collective, "root", ""))
    about = f" ({collective.label})" if collective.label else ""
    return f"{NAMES[type(collective)]}{about} of {writes.count} × {native.DTYPE_NAMES[writes.dtype]}, {op}".rstrip(", ")
