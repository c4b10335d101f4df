"""Join the ranks of several processes in host memory: MPI carries bytes, the C library adds them up in rank order.

Each process owns one part of a buffer. It receives that part from all ranks, adds the parts up in the order of the
ranks, and sends the sum to all: bit for bit what `CpuCommunicator` computes for as many ranks in one process. A small
buffer is sent whole to every process, and each adds it up: the same bits, with one message less to wait for.

Before a collective all processes tell each other what they are about to do; the first messages of data travel along,
and are used only when all have agreed. So a process that does something else, has failed or has ended is an error in
all processes, which names it. A thread hears that the others are alive.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import itertools
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from ncclsync.communicator import messages, native, timeouts
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
from ncclsync.communicator.messages import MOST_BYTES, MessageError, Seal
from ncclsync.communicator.native import ffi, lib
from ncclsync.communicator.peers import MOST_TEXT, SILENCE_S, Doing, Peers, end_with_process, shortened
from ncclsync.communicator.processes import Process, claim
from ncclsync.errors import NcclSyncError, NcclUnavailableError, ProcessError

_logger = logging.getLogger("ncclsync")

# Open MPI makes a folder on each host for a job's processes there.
_FOLDER, _RANK, _HERE = "PMIX_SERVER_TMPDIR", "OMPI_COMM_WORLD_RANK", "ncclsync.here."
_BEAT_S = 1.0
_END_S = 60.0  # that an ended process waits for the others to hear of it
_LEAVE_S = 8.0  # that an ended process gives the others to end as well, if a process is silent
_LEFT = -1  # stands for the number of collectives of a process that ends
_PIECE_BYTES = 1 << 30  # MPI counts bytes by an int
_SMALL = 1 << 18  # bytes of all ranks; up to here each process adds up the whole buffer
_BYTES = ffi.typeof("char*")

# The next act of a process: run a collective, report that something of its own has failed, or end.
_RUN, _FAILED, _ENDED = range(3)
# With `Peers.generation`, the number of pieces that follow, and the bytes of the largest.
_HEADER = struct.Struct(f"<q16s{MOST_TEXT}sqqq")
_HEADERS, _DATA, _SUMS = range(3)  # kinds of messages; messages of one kind arrive in the order in which they were sent
_LENGTH = struct.Struct("<q")  # of a value, in bytes
_HELLO_BYTES = 2048  # a name and a set of cores

# [size] what is sent to each process; the entry of this process is not used.
Messages: TypeAlias = list[list[np.ndarray]]
# A collective as a generator: it yields what it sends; when all processes have agreed, requests for what it receives;
# when these have ended, requests for the rest. When the generator ends, the collective is complete.
Stages: TypeAlias = Iterator[Any]
# A growing number, collectives begun, `Peers.files` (two numbers), failures, whether it has ended, words.
_BEAT = struct.Struct(f"<qqqqqq{MOST_TEXT}s")


class MpiPeers(Peers):
    """Know the processes of an `mpirun`, agree with them on each collective, and hear whether they are alive.

    A Python process has one such object; see `peers`.

    Attributes:
        others: the numbers of all processes but this one.
    """

    def __init__(self, timeout_s: float | None) -> None:
        """Join the others; see `peers`. Collective."""
        self._mpi = MPI = _mpi(timeout_s)
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        offer = bytearray(messages.new_offer())
        self._finish(MPI.COMM_WORLD.Ibcast([offer, MPI.BYTE]), timeout_s)
        self._seal = Seal(bytes(offer))
        self._sealed = collections.Counter[tuple[int, str]]()  # messages to a process, or from it, of a kind
        found = self._say_hello(timeout_s)
        self.hosts = [host for host, _ in found]
        native.share_cores([cores for host, cores in found if host == self.hosts[self.rank]])
        self.comm, self._beats = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
        self.lock = threading.RLock()
        self.others = [i for i in range(self.size) if i != self.rank]
        self._awake_s = 0.0  # seconds in which this process was able to hear the others
        self._heard = [
            (0.0, 0)
        ] * self.size  # when each was last heard, in `_awake_s`, and how many collectives it had begun
        self._ticks = [0] * self.size
        self._reporting = (0, 0, b"")  # failures, whether this process has ended, words
        self._stranded: list[Any] = []  # requests, whose memory MPI may still use after a failure
        self._awaited: dict[int, tuple[str, bytearray, list[Any]]] = {}  # the next header of each process, see `agree`
        self._stop, self._now, self._has_news = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._listen, name="ncclsync processes", daemon=True)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()

    def _finish(self, request: Any, timeout_s: float | None) -> None:
        """Wait for a collective request of the joining."""
        _wait_to_join(lambda slice_s: timeouts.poll(request.Test, slice_s), timeout_s)

    def _say_hello(self, timeout_s: float | None) -> list[tuple[str, set[int]]]:
        """Return [size] the name of each process' host, and the numbers of the cores that it may use. Collective."""
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        own = self._seal.sealed(f"hello of {self.rank}", messages.written((socket.gethostname(), f"{cores:x}")))
        received = bytearray(self.size * _HELLO_BYTES)
        sent = _LENGTH.pack(len(own)) + own.ljust(_HELLO_BYTES - _LENGTH.size, bytes(1))
        gathered = self._mpi.COMM_WORLD.Iallgather([sent, self._mpi.BYTE], [received, self._mpi.BYTE])
        self._finish(gathered, timeout_s)
        found = []
        for i in range(self.size):
            hello = received[i * _HELLO_BYTES : (i + 1) * _HELLO_BYTES]
            end = _LENGTH.size + _LENGTH.unpack_from(hello)[0]
            host, text = messages.read(self._seal.opened(f"hello of {i}", hello[_LENGTH.size : end]))
            found.append((host, {core for core in range(4 * len(text)) if int(text, 16) >> core & 1}))
        return found

    def _seal_for(self, to: int, kind: str, data: bytes) -> bytes:
        """Return the next sealed message of a kind to a process."""
        self._sealed[to, kind] += 1
        return self._seal.sealed(f"{kind} {self._sealed[to, kind]} of process {self.rank} to {to}", data)

    def _number_from(self, source: int, kind: str) -> str:
        """Return the `about` of the next sealed message of a kind from a process; messages arrive in order."""
        self._sealed[source, f"from {kind}"] += 1
        return f"{kind} {self._sealed[source, f'from {kind}']} of process {source} to {self.rank}"

    def agree(
        self,
        text: str,
        what: bytes = b"",
        timeout_s: float | None = None,
        kind: int = _RUN,
        *,
        data: Messages | None = None,
        heeds: bool = False,
    ) -> list[Any]:
        """Tell the others what is done next, and check that they do the same. Collective; holds `lock`.

        Args:
            text: what it is, for messages.
            what: must be equal in all processes.
            timeout_s: see `timeouts.wait`.
            kind: one of the numbers above.
            data: is sent at once; its receivers take it when all have agreed.
            heeds: see `wait`.

        Returns:
            Requests that end when `data` has been received.

        Raises:
            ProcessError: another process fails, ends, or does something else.
            NcclTimeoutError, NcclSyncError: as `timeouts.wait`.
        """
        # A process that ends meets the others whatever it has heard, unless a call that all had entered has failed.
        if self.failure is not None and not (kind == _ENDED and self.by_notice):
            raise self.failure
        self.begun += 1
        digest = hashlib.blake2b(what + f"{text}\n{self.batch}".encode(), digest_size=16).digest()
        if self.size == 1:
            return []
        given = {i: data[i] if data else [] for i in self.others}
        own = kind, digest, shortened("\n".join(map(str, self.doing(text)))).encode(), self.generation
        sent = []
        for i, sends in given.items():
            pieces = [len(piece) for message in sends for piece in _pieces(message)]
            header = self._seal_for(i, "header", _HEADER.pack(*own, len(pieces), max(pieces, default=0)))
            sent += self.send(header, i, _HEADERS)
            sent += [one for message in sends for one in self.send(message, i)]
        headers: list[tuple[Any, ...]] = [(*own, 0, 0)] * self.size
        late = self.others
        while late:
            found = self._headers_of(late, sent, text, timeout_s, heeds=heeds)
            for i, its in found.items():
                headers[i] = its
            # A process that had not heard of a failure has sent what belongs to the time before.
            late = [i for i, (kind, _, _, generation, *_) in found.items() if generation < own[3] and kind != _ENDED]
            if late:
                self.wait([*sent, *self._dropped(late, headers)], text, timeout_s)
        if all(header[:2] == headers[0][:2] for header in headers):
            return sent
        # The data is received and dropped, and each process waits until its own was taken: all stay in step.
        self.wait([*sent, *self._dropped(self.others, headers)], text, timeout_s)
        each = [_doing(words) for _, _, words, *_ in headers]
        said = [f"{self.name(i)}: {one.text}" for i, one in enumerate(each)]
        failed = [one for one, header in zip(said, headers, strict=True) if header[0] == _FAILED]
        if failed and all(header[0] != _ENDED for header in headers):
            # All processes learn of it here: they may go on together.
            self.raised = ProcessError(f"Expected all processes to make this step. Received: {'; '.join(failed)}")
            raise self.raised
        self.lost = {i for i, header in enumerate(headers) if header[0] == _ENDED}
        ended = [said[i] for i in sorted(self.lost)]
        self.fail(f"Expected all processes to go on. Received: {'; '.join(ended)}" if ended else self.difference(each))

    def _headers_of(
        self, others: Sequence[int], sent: list[Any], text: str, timeout_s: float | None, *, heeds: bool
    ) -> dict[int, tuple]:
        """Return the next header of each process; see `agree`. Whoever heeds a failure leaves them to the next call."""
        for i in others:
            if i not in self._awaited:
                header = bytearray(messages.SEAL_BYTES + _HEADER.size)
                self._awaited[i] = self._number_from(i, "header"), header, self.receive(header, i, _HEADERS)
        waited = [one for i in others for one in self._awaited[i][2]]
        self._stranded = [waited, sent]
        self.wait(waited, text, timeout_s, heeds=heeds)
        found = {i: _HEADER.unpack(self._opened(*self._awaited[i][:2])) for i in others}
        while heeds and any(header[3] > self.generation for header in found.values()):
            time.sleep(1e-3)  # news of a failure is on its way
            self.check(text)
        for i in others:
            del self._awaited[i]
        return found

    def _dropped(self, others: Sequence[int], headers: Sequence[tuple]) -> list[Any]:
        """Return requests of what processes have sent along with their headers, which nobody takes."""
        sizes = [(i, most) for i in others for count, most in [headers[i][4:]] for _ in range(count)]
        return [one for i, most in sizes for one in self.receive(bytearray(most), i)]

    def send(self, message: Any, to: int, kind: int = _DATA) -> list[Any]:
        """Return requests that send a message; its bytes must not change until they have ended."""
        return [self.comm.Isend([piece, self._mpi.BYTE], to, kind) for piece in _pieces(message)]

    def receive(self, message: Any, source: int, kind: int = _DATA) -> list[Any]:
        """Return requests that receive the next message of a kind; a message of one piece may be shorter."""
        return [self.comm.Irecv([piece, self._mpi.BYTE], source, kind) for piece in _pieces(message)]

    def wait(self, requests: list[Any], what: str, timeout_s: float | None, *, heeds: bool = False) -> None:
        """Wait for requests of mpi4py's. Raises as `timeouts.wait`, and ProcessError if another process is silent.

        Args:
            requests: what to wait for.
            what: it is, for messages.
            timeout_s: see `timeouts.wait`.
            heeds: whether another process' report of a failure ends the wait.
        """

        def poll(slice_s: float) -> bool:
            if timeouts.poll(lambda: self._mpi.Request.Testall(requests), slice_s):
                return True
            self.check_silence(what)
            if heeds and self.failures != self.reported:
                self.check(what)
            return False

        try:
            timeouts.wait(poll, call="MPI", what=lambda: what, timeout_s=timeout_s, arrived=self._missing)
        except NcclSyncError as error:
            if self.failure is None:
                self.failure = ProcessError(str(error))
            raise

    def exchange(
        self, value: Any, text: str, timeout_s: float | None = None, *, heeds: bool = True, most_bytes: int = MOST_BYTES
    ) -> list[Any]:
        """Return [size] what each process gives; see `Peers.exchange`."""
        own = messages.written(value)
        with self.lock:
            sent = self.agree(text, timeout_s=timeout_s, heeds=heeds)
            lengths = self._swap(sent, _LENGTH.pack(len(own)), [_LENGTH.size] * self.size, text, timeout_s)
            sizes = [_LENGTH.unpack(length)[0] for length in lengths]
            for i, size in enumerate(sizes):
                if not 0 <= size <= most_bytes:
                    self.fail(f"Expected at most {most_bytes} bytes of {text} from {self.name(i)}. Received: {size}")
            return [messages.read(found, most_bytes) for found in self._swap([], own, sizes, text, timeout_s)]

    def _swap(
        self, begun: list[Any], own: bytes, sizes: Sequence[int], text: str, timeout_s: float | None
    ) -> list[bytes]:
        """Send `own` to all processes, and return [size] their messages, of `sizes` bytes; see `wait`."""
        found = [bytearray(messages.SEAL_BYTES + size) for size in sizes]
        requests = [
            *begun,
            *(one for i in self.others for one in self.receive(found[i], i)),
            *(one for i in self.others for one in self.send(self._seal_for(i, "value", own), i)),
        ]
        self._stranded = requests
        self.wait(requests, text, timeout_s)
        received = [own] * self.size
        for i in self.others:
            received[i] = self._opened(self._number_from(i, "value"), found[i])
        return received

    def _opened(self, about: str, message: bytearray) -> bytes:
        """Return the data of a sealed message. Another seal ends the agreement for good, by a ProcessError."""
        try:
            return self._seal.opened(about, message)
        except MessageError as error:
            self.fail(str(error))

    def report_failure(self, words: str, timeout_s: float | None) -> None:
        """Tell the others, at their next collective, that something has failed in this process."""
        with self.lock, contextlib.suppress(NcclSyncError):
            self.agree(words, timeout_s=timeout_s, kind=_FAILED)
        self.raised = None

    def _end(self, words: str) -> None:
        """Tell the others that this process ends, and wait until they have heard of it."""
        self._report(words, True)
        with self.lock:
            with contextlib.suppress(NcclSyncError):
                self.agree(words, timeout_s=_END_S, kind=_ENDED)
            silent = self._silent()
            if silent:  # an abort of MPI ends the others too: give them time to save
                self.begun = _LEFT
                end = time.monotonic() + _LEAVE_S
                while time.monotonic() < end and not self._have_others_left():
                    time.sleep(_BEAT_S / 4)
            self._stop.set()
            if self._thread.ident is not None:
                self._thread.join(5 * _BEAT_S)
            if silent:
                sys.stdout.flush()
                sys.stderr.flush()
                self._mpi.COMM_WORLD.Abort(1)  # else MPI would wait for them

    def _report(self, words: str, ended: bool) -> None:
        self._reporting = self.failures[self.rank], int(ended), shortened(words).encode()
        self._has_news = True
        self._now.set()

    def _listen_now(self) -> None:
        self._now.set()

    def _has_passed(self, begun: int) -> bool:
        return self._heard[0][1] > begun or self._thread.ident is None

    def _missing(self) -> str:
        late = [self.name(i) for i, (_, begun) in enumerate(self._heard) if i != self.rank and begun < self.begun]
        return f"{', '.join(late)} not arrived" if late else "all processes have arrived"

    def _silent(self) -> list[int]:
        if self._thread.ident is None:
            return []
        return [i for i, (at, _) in enumerate(self._heard) if i != self.rank and self._awake_s - at > SILENCE_S]

    def _have_others_left(self) -> bool:
        silent = {*self._silent(), self.rank}
        return all(begun == _LEFT for i, (_, begun) in enumerate(self._heard) if i not in silent)

    def _listen(self) -> None:
        """Hear that the others are alive, and have C tell them of this process. Runs in a thread."""
        byte, status, received = self._mpi.BYTE, self._mpi.Status(), bytearray(messages.SEAL_BYTES + _BEAT.size)
        beat, calls = native.Beat(_BEAT_S), self._calls()
        last, ticks = time.monotonic(), 0
        while not self._stop.is_set():
            self._now.wait(_BEAT_S / 4)
            self._now.clear()
            tells_now, self._has_news, ticks = self._has_news, False, ticks + 1
            while self._beats.Iprobe(source=self._mpi.ANY_SOURCE, status=status):
                self._beats.Recv([received, byte], source=status.Get_source())
                self._hear_beat(status.Get_source(), received)
            state = _BEAT.pack(ticks, self.begun, *self.files[self.rank], *self._reporting)
            for other in self.others:
                message = self._seal.sealed(f"beat of {self.rank} to {other}", state)
                beat.tell(calls, other, message, tells_now or ticks == 1)
            # While a call keeps Python from running, beats of the others wait unread.
            now = time.monotonic()
            self._awake_s += min(now - last, _BEAT_S / 2)
            last = now
        beat.close()

    def _calls(self) -> Any:
        """Return what a beat needs of MPI: the addresses of two functions, two handles and their size."""
        mpi, library = self._mpi, ctypes.CDLL(self._mpi.__file__)
        calls = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (library.MPI_Isend, library.MPI_Test))
        pointers = [ffi.cast("void*", call) for call in calls]
        # The handle of a communicator is a number of 32 bits (MPICH) or a pointer (Open MPI).
        is_number = self._beats.handle >> 32 in (0, 0xFFFFFFFF)
        return ffi.new("ncs_mpi*", [*pointers, self._beats.handle, mpi.BYTE.handle, 4 if is_number else 8])

    def _hear_beat(self, source: int, beat: bytearray) -> None:
        try:
            data = self._seal.opened(f"beat of {source} to {self.rank}", beat)
        except MessageError as error:
            _logger.warning("A beat is ignored: %s", error)
            return
        tick, begun, *files, failures, ended, text = _BEAT.unpack(data)
        if tick < self._ticks[source]:  # an old beat was sent again
            return
        self._ticks[source] = tick
        words = text.rstrip(bytes(1)).decode(errors="replace")
        self._heard[source] = self._awake_s, begun
        self.hear(source, failures, "" if ended else words, words if ended else "", files)


def _pieces(message: Any) -> list[memoryview]:
    """Return a message in pieces that MPI takes, at least one."""
    view = memoryview(message)
    return [view[begin : begin + _PIECE_BYTES] for begin in range(0, max(1, len(view)), _PIECE_BYTES)]


_peers: MpiPeers | None = None


def check_joins(process: Process, timeout_s: float | None = timeouts.DEFAULT_TIMEOUT_S) -> None:
    """Raise NcclUnavailableError unless MPI joins the processes that a launcher has started; else as `peers`."""
    claim()
    mpi = _mpi(timeout_s)
    world, library = mpi.COMM_WORLD, mpi.Get_library_version().partition(",")[0]
    if (world.Get_rank(), world.Get_size()) != (process.rank, process.size):
        raise NcclUnavailableError(
            f"Expected MPI to join the {process.size} processes that {process.launcher} has started "
            f"({process.reason}), since they are to have CPU towers. Received: process {world.Get_rank()} of "
            f"{world.Get_size()}, by {library}. {process.if_left_over}. Start them by: {process.by_mpi}"
        )


def _mpi(timeout_s: float | None) -> Any:
    """Return mpi4py's MPI, initialized: all processes wait for each other there."""
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # has no effect if mpi4py was imported before
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NcclUnavailableError(
            "Expected mpi4py, by which processes of CPU towers are joined. "
            f"Received: {error}. Install it by: pip install 'ncclsync[hosts]'"
        ) from None
    _come()
    if not MPI.Is_initialized():
        # By ctypes, which releases the GIL; mpi4py's own call does not.
        initialize, provided = ctypes.CDLL(MPI.__file__).MPI_Init_thread, ctypes.c_int()
        arguments = None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(provided)
        task = timeouts.Aside(lambda: initialize(*arguments), "ncclsync MPI")
        _wait_to_join(task.wait, timeout_s)
    return MPI


def _come() -> None:
    """Leave a sign, for the processes on this host, that this one has come; a timeout names those without one."""
    folder, rank = os.environ.get(_FOLDER, ""), os.environ.get(_RANK, "")
    if os.path.isdir(folder) and rank.isdecimal():
        with contextlib.suppress(OSError), open(os.path.join(folder, f"{_HERE}{rank}"), "w"):
            pass


def _not_come() -> str:
    """Return which processes have not come, as far as this host knows."""
    size, local = (os.environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    try:
        names = os.listdir(os.environ.get(_FOLDER, ""))
        count, of_host = int(size), int(local)
    except (OSError, ValueError):
        return "not all of them have come"
    here = {int(name.removeprefix(_HERE)) for name in names if name.startswith(_HERE)}
    late = [f"process {rank}" for rank in range(count) if rank not in here]
    if count == of_host or len(late) == 1:
        return f"{' and '.join(late)} {'has' if len(late) == 1 else 'have'} not come"
    if len(here) == of_host:
        return f"of {', '.join(late)}, which are on other hosts, not all have come"
    return f"of {', '.join(late)}, {of_host - len(here)} on {socket.gethostname()} and perhaps others have not come"


def _wait_to_join(wait: Callable[[float], bool], timeout_s: float | None) -> None:
    """Wait for a step of the joining; `wait(slice_s)` returns whether it has ended."""
    timeouts.wait(
        wait,
        call="MPI_Init",
        what=lambda: "the joining of processes",
        timeout_s=timeout_s,
        arrived=lambda: f"{_not_come()}. Each has to make towers, and to do so in time",
    )


def peers(timeout_s: float | None = timeouts.DEFAULT_TIMEOUT_S) -> MpiPeers:
    """Return this process' `MpiPeers`. The first call joins the others, for so many seconds at most, and is collective.

    Raises NcclUnavailableError if mpi4py cannot be used; NcclTimeoutError if not all have come in time; NcclSyncError
    in a child of the process that has joined.
    """
    global _peers
    claim()
    if _peers is None:
        _peers = MpiPeers(timeout_s)
        end_with_process(_peers.end)  # runs before mpi4py's own exit handler, which was registered earlier
    return _peers


class MpiCommunicator(Communicator):
    """Join ranks of several processes in host memory. Ranks are numbered process by process.

    A process runs the collectives of all its communicators one after another, in the same order in all processes.
    """

    memory = HOST
    waits = compares_batches = True
    peers: MpiPeers

    def __init__(self, size: int, *, timeout_s: float | None = timeouts.DEFAULT_TIMEOUT_S) -> None:
        """Join the ranks of all processes. Collective.

        Raises TypeError or ValueError for bad arguments; NcclUnavailableError if mpi4py cannot be used; ProcessError or
        NcclTimeoutError if the others cannot be joined.

        Args:
            size: number of ranks of this process.
            timeout_s: None for no limit. A process that says nothing for 15 s is an error in any case.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Expected size to be a number of ranks, at least 1. Received: {size!r}")
        timeouts.check_timeout(timeout_s)
        self.peers, self.timeout_s = peers(timeout_s), timeout_s
        sizes = self.peers.exchange(size, "the joining of ranks", timeout_s)
        begins = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._ranges = [range(*pair) for pair in itertools.pairwise(begins)]  # of ranks, by process
        self.size, self.world_size, self.ranks = size, sum(sizes), self._ranges[self.peers.rank]
        self._stranded: list[Any] = []  # memory that MPI may still write to after a failure

    @property
    def failure(self) -> BaseException | None:  # type: ignore[override]
        """Return the error that has ended the agreement of the processes."""
        return self.peers.failure

    def exchange(self, value: Any, what: str, most_bytes: int = MOST_BYTES) -> list[Any]:
        """Return what each process gives; see `Communicator.exchange`."""
        if self.closed:
            self.raise_closed()
        return self.peers.exchange(value, what, most_bytes=most_bytes)

    @property
    def leads(self) -> bool:
        """Return whether this process writes files; see `Communicator.leads`."""
        return self.peers.lost.issuperset(range(self.peers.rank))

    def take_error(self) -> ProcessError | None:
        """Return the error that another process has caused, once; see `Communicator.take_error`."""
        error, self.peers.raised = self.peers.raised, None
        return error

    def _tell(self, words: str) -> None:
        if not self.closed:
            self.peers.report_failure(words, self.timeout_s)

    def reopen(self) -> None:
        """Do nothing, or raise the failure: processes cannot be joined again."""
        if self.peers.failure is not None:
            raise self.peers.failure

    def raise_closed(self) -> NoReturn:
        """Raise the failure, if there is one."""
        self.reopen()
        super().raise_closed()

    def _run_group(self, collectives: Sequence[AnyCollective]) -> None:
        """Run collectives side by side: all send their data at once, and each its sum as soon as it is made."""
        runs = [read_buffers(collective, HOST, self.world_size) for collective in collectives]
        what = [_described(collective, writes) for collective, (_, writes) in zip(collectives, runs, strict=True)]
        text = what[0] if len(what) == 1 else f"{what[0]}, and {len(what) - 1} more"
        with self.peers.lock:
            stages = [self._stages(collective, *run) for collective, run in zip(collectives, runs, strict=True)]
            each = [next(one) for one in stages]
            data = [[message for messages in each for message in messages[i]] for i in range(self.peers.size)]
            kept = [collectives, runs, stages]
            try:
                sent = self.peers.agree(text, repr(what).encode(), self.timeout_s, data=data)
                arriving = [next(one) for one in stages]
                kept += [sent, arriving]
                for one, requests, label in zip(stages, arriving, what, strict=True):
                    self.peers.wait(requests, label, self.timeout_s)
                    sent += next(one)
                self.peers.wait(sent, text, self.timeout_s)
            except BaseException:
                self._stranded += kept
                raise
            for one in stages:
                next(one, None)

    def _stages(self, collective: AnyCollective, reads: Buffers, writes: Buffers) -> Stages:
        if isinstance(collective, Broadcast):
            return self._broadcast(writes, collective.root)
        sends = [_view(pointer, reads) for pointer in reads.pointers]
        if isinstance(collective, AllGather):
            return self._all_gather(sends, writes)
        if isinstance(collective, ReduceScatter):
            return self._reduce_scatter(sends, writes, native.OPS[collective.op])
        return self._all_reduce(sends, writes, native.OPS[collective.op])

    def _broadcast(self, writes: Buffers, root: int) -> Stages:
        source = next(i for i, ranks in enumerate(self._ranges) if root in ranks)
        is_here = source == self.peers.rank
        own = root - self.ranks[0] if is_here else 0
        buffer = _view(writes.pointers[own], writes)
        yield [[buffer] if is_here else [] for _ in self._ranges]
        yield [] if is_here else self.peers.receive(buffer, source)
        yield []
        _copy(buffer, [pointer for i, pointer in enumerate(writes.pointers) if i != own], writes)

    def _all_gather(self, sends: list[np.ndarray], writes: Buffers) -> Stages:
        gathered = _view(writes.pointers[0], writes)
        sends = _apart(sends, gathered)
        yield [sends for _ in self._ranges]
        blocks = gathered.reshape(self.world_size, sends[0].size)
        places = [(i, rank) for i in self.peers.others for rank in self._ranges[i]]
        requests = [one for i, rank in places for one in self.peers.receive(blocks[rank], i)]
        blocks[self.ranks] = sends
        yield requests
        yield []
        _copy(gathered, writes.pointers[1:], writes)

    def _all_reduce(self, sends: list[np.ndarray], writes: Buffers, op: int) -> Stages:
        width, total = _width(writes), _view(writes.pointers[0], writes)
        sends = _apart(sends, total)
        if self.world_size * total.size <= _SMALL:
            parts = [slice(0, total.size)] * self.peers.size
        else:
            ends = [width * (writes.count * (i + 1) // self.peers.size) for i in range(self.peers.size)]
            parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        own = parts[self.peers.rank]
        yield [[send[part] for send in sends] for part in parts]
        received, requests = self._receive_all([send[own] for send in sends])
        yield requests
        _add_up(received, total[own], writes.dtype, op)
        if own.stop - own.start == total.size:
            yield []
        else:
            summed = [one for i in self.peers.others for one in self.peers.receive(total[parts[i]], i, _SUMS)]
            yield summed + [one for i in self.peers.others for one in self.peers.send(total[own], i, _SUMS)]
        _copy(total, writes.pointers[1:], writes)

    def _reduce_scatter(self, sends: list[np.ndarray], writes: Buffers, op: int) -> Stages:
        block = writes.count * _width(writes)
        parts = [slice(ranks.start * block, ranks.stop * block) for ranks in self._ranges]
        yield [[send[part] for send in sends] for part in parts]
        # A copy of its own part: a rank may receive its block in place.
        received, requests = self._receive_all([send[parts[self.peers.rank]].copy() for send in sends])
        yield requests
        for i, pointer in enumerate(writes.pointers):
            blocks = [each[i * block : (i + 1) * block] for each in received]
            _add_up(blocks, _view(pointer, writes), writes.dtype, op)
        yield []

    def _receive_all(self, own: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[Any]]:
        """Return [world_size] buffers, one for each rank (of this process `own`), and requests for the others."""
        received: list[np.ndarray] = []
        requests: list[Any] = []
        for i, ranks in enumerate(self._ranges):
            if i == self.peers.rank:
                received += own
                continue
            buffers = [empty_aligned(own[0].size, np.uint8) for _ in ranks]
            received += buffers
            requests += [one for buffer in buffers for one in self.peers.receive(buffer, i)]
        return received, requests


def _add_up(sends: Sequence[np.ndarray], into: np.ndarray, dtype: int, op: int) -> None:
    """Reduce the ranks' buffers, in the order of the ranks."""
    if not into.size:
        return
    pointers = [ffi.from_buffer("char*", send) for send in sends]
    target = ffi.from_buffer("char*", into, require_writable=True)
    count = into.size // native.DTYPE_SIZES[dtype]
    handle, n = native.process_pool().handle, len(sends)
    status = lib.ncs_cpu_all_reduce(handle, pointers, [target] * n, n, count, dtype, op)
    native.check(status, "ncs_cpu_all_reduce")


def _apart(sends: list[np.ndarray], written: np.ndarray) -> list[np.ndarray]:
    """Copy the buffers that the collective writes while they may still be in flight."""
    return [send.copy() if np.shares_memory(send, written) else send for send in sends]


def _doing(words: bytes) -> Doing:
    """Return the `Doing` that `MpiPeers.agree` has encoded."""
    place, number, batch, text = words.rstrip(bytes(1)).decode(errors="replace").split("\n", 3)
    return Doing(place, int(number), batch, text)


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
