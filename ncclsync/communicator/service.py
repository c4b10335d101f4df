"""Join several processes by ZeroMQ: process 0 has ROUTERs, each other process a DEALER that is connected to one.

All that processes tell each other goes by process 0: values that are brought together, notices, and the data of CPU
towers. Connections by TCP have keys on both sides (CURVE), which follow from what the job's processes know: they alone
know it if NCCLSYNC_SECRET is set. Within a host all but pulses goes by a Unix socket in a folder of the user's own. A
second DEALER of each process is its pulse: ZeroMQ's threads, which need no Python, close it when the other side is
silent, and connect it again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import math
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq
import zmq.utils.z85

from ncclsync.communicator import messages, timeouts
from ncclsync.communicator.introductions import VARIABLE, Introduction, Told, here, listen, own_addresses, secret
from ncclsync.communicator.messages import MessageError
from ncclsync.errors import NcclSyncError

logger = logging.getLogger("ncclsync")

_CHUNK = 1 << 22  # bytes of a frame
_BEAT_S = 1.0
_PING_MS, _MUTE_MS = 250, 3000  # between what ZeroMQ sends on a pulse; after which it closes a mute one
_CUT_MS = 10_000  # after which TCP gives up a connection that takes nothing
_AGAIN_S = 0.5  # until process 0 is looked for, and greeted, again
_SHOWN = 3  # addresses in a message
_LOOK_AFTER_S = 2  # of a search, when it begins to note who is at these addresses
_LINGER_S = 1.0  # for what is to be sent yet when a process ends
_Address: TypeAlias = "tuple[zmq.Socket, bytes]"  # of a connection, in process 0


class Awaited:
    """Hold what process 0 was asked, once it has come. Waits without a lock: a signal's handler may ask, too."""

    def __init__(self) -> None:
        self.value: Any = None
        self._come: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def bring(self, value: Any) -> None:
        """Let `wait` end."""
        self._come.put(value)

    def wait(self, slice_s: float) -> bool:
        """Wait for so many seconds; return whether it has come."""
        if self.value is None:
            with contextlib.suppress(queue.Empty):
                self.value = self._come.get(timeout=slice_s)
        return self.value is not None


class Service:
    """Join this process with the others by process 0. One thread, which lasts as long as the process, has the sockets.

    Attributes:
        notices: what processes have told all.
        inbox: [size] what each process has sent this one, in order: pieces of bytes.
    """

    def __init__(self, rank: int, size: int, by: Introduction, *, join_s: float | None) -> None:
        """Listen, or reach process 0.

        Raises NcclSyncError if process 0 is not reached or refuses this one; in process 0, if it cannot listen.

        Args:
            rank: this process' number.
            size: how many there are.
            by: what the launcher knows.
            join_s: how long to wait for process 0; None for no limit.
        """
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.inbox: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self.lost = (math.inf, "")  # since when, and why, process 0 is not reached any more
        self._awaited: dict[tuple[str, int], Awaited] = {}
        self._questions = itertools.count()
        self._silent, self._asked = [0.0] * size, time.monotonic()
        self._posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rank = rank
        self._side = _Process0(self, size, by) if rank == 0 else _Other(self, rank, size, by, join_s)
        self._thread = threading.Thread(target=self._run, name="ncclsync service", daemon=True)
        self._thread.start()

    def give(self, number: int, value: bytes) -> Awaited:
        """Give a value; wait for [size] those of all processes.

        Whoever gives one of a number gives none of lower numbers any more.
        """
        awaited = self._expect("given", number)
        self._post("ask", "give", number, value)
        return awaited

    def who(self, number: int, wait_s: float) -> list[int]:
        """Return which processes have given a value of a number that not all have given; [] if process 0 is silent."""
        question = next(self._questions)
        awaited = self._expect("who", question)
        self._post("ask", "who", number, question)
        timeouts.poll(lambda: awaited.wait(0) or self.lost[1], wait_s)
        return awaited.value or []

    def tell(self, notice: Any, wait_s: float) -> None:
        """Give all processes a notice; wait until process 0 has taken it."""
        self._post("ask", "tell", 0, notice)
        self.who(0, wait_s)

    def send(self, rank: int, data: memoryview) -> None:
        """Send bytes to the inbox of another process, without waiting. They may change when this has returned."""
        for begin in range(0, len(data), _CHUNK):
            self._post("send", rank, bytes(data[begin : begin + _CHUNK]))

    def silence(self) -> list[float]:
        """Return [size] for how many seconds each process was silent: process 0 knows of all, the others of it."""
        return list(self._silent)

    def check_reached(self, within_s: float) -> None:
        """Raise NcclSyncError if process 0 was not reached for so many seconds."""
        since, why = self.lost
        if time.monotonic() - since > within_s:
            raise NcclSyncError(f"Expected process 0 to be reached. Received: {why}")

    def close(self) -> None:
        """Close. Process 0 first sends what was posted, for at most a second."""
        self._post("end")
        self._thread.join(2 * _LINGER_S)

    def hear(self, what: str, number: int, value: Any) -> None:
        """Hear process 0, in the thread."""
        if what == "notice":
            self.notices.put(value)
        elif (awaited := self._awaited.pop((what, number), None)) is not None:
            awaited.bring(value)

    def _expect(self, what: str, number: int) -> Awaited:
        return self._awaited.setdefault((what, number), Awaited())

    def _post(self, *request: Any) -> None:
        self._posted.put(request)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # of any kind: nobody is to wait for what this thread does no more
            logger.exception("What joins this process with the others has failed")
            words = f"is not reached any more: {type(error).__name__} in process {self._rank}: {error}"
            self.lost = time.monotonic(), words
            for rank in {*range(len(self._silent))} - {self._rank}:
                self.notices.put({"rank": rank, "ended": words})
            self._side.drop()

    def _serve(self) -> None:
        side, poller, due = self._side, zmq.Poller(), time.monotonic()
        for one in (*side.sockets, self._wake):
            poller.register(one, zmq.POLLIN)
        while True:
            if time.monotonic() >= due:
                self._beat()
                due = time.monotonic() + _BEAT_S
            for ready, _ in poller.poll(max(0, int(1e3 * (due - time.monotonic())))):
                if ready != self._wake:
                    self._take(ready)
                    continue
                os.eventfd_read(self._wake)
                while not self._posted.empty():
                    kind, *request = self._posted.get()
                    if kind == "end":
                        side.close()
                        return
                    (side.ask if kind == "ask" else side.send)(*request)

    def _take(self, ready: zmq.Socket) -> None:
        """Take what has come at a socket; after some messages, others and the beat have their turn."""
        for _ in range(64):
            try:
                frames = [one.buffer for one in ready.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            try:
                self._side.take(ready, frames)
            except (NcclSyncError, TypeError, ValueError, IndexError) as error:
                logger.error("Expected a message of this version of ncclsync. Received: another (%s)", error)

    def _beat(self) -> None:
        """Count who is silent: at most two seconds at once, since in more this process may have been stopped."""
        now = time.monotonic()
        passed_s, self._asked = min(2 * _BEAT_S, now - self._asked), now
        for rank, is_alive in self._side.pulses().items():
            self._silent[rank] = 0.0 if is_alive else self._silent[rank] + passed_s


class _Process0:
    """Listen; bring the processes' values together, and pass on notices and data.

    All hear in one order. A process hears of a notice after all values that were complete before it.
    """

    def __init__(self, service: Service, size: int, by: Introduction) -> None:
        self._service, self._size = service, size
        self._given: dict[int, dict[int, bytes]] = {}  # by number and process; until they are complete
        self._notices: list[Any] = []  # for those who have not joined
        self._owners: dict[int, str] = {}  # what names each process that has joined, unlike another one of its number
        self._members: dict[int, _Address] = {}
        self._ranks: dict[_Address, int] = {}
        self._context = zmq.Context()
        self._listener = listen(by.port)
        os.register_at_fork(after_in_child=self._listener.close)  # a forked worker is not to keep the port
        self._forget = by.forget
        port, key = self._listener.getsockname()[1], by.key or secrets.token_hex(32)
        self._router = _socket(self._context, zmq.ROUTER, key)
        self._router.use_fd = self._listener.fileno()
        self._router.bind(f"tcp://*:{port}")
        self._folder = tempfile.mkdtemp(prefix="ncclsync-")  # of mode 700
        self._path = f"{self._folder}/0"
        self._local = _socket(self._context, zmq.ROUTER)
        try:
            self._local.bind(f"ipc://{self._path}")
        except zmq.ZMQError:  # the path is too long
            self._path = ""
        self.sockets = self._router, self._local
        for one in self.sockets:
            one.router_mandatory = one.router_handover = True
        by.tell(Told(own_addresses(), port, key))
        # What this process itself asks and sends.
        self.ask, self.send = functools.partial(self._hear, 0), functools.partial(self._pass, 0)

    def take(self, ready: zmq.Socket, frames: Sequence[Any]) -> None:
        """Hear another process, or one that would join."""
        ident, kind, *rest = frames
        address = ready, bytes(ident)
        if kind == b"hello":
            self._greet(address, *messages.read(rest[0]))
        elif (rank := self._ranks.get(address)) is None:
            self._write(address, b"lost", b"its connection has ended in between")
        elif kind == b"ask":
            self._hear(rank, *messages.read(b"".join(rest)))
        elif kind == b"data":
            self._pass(rank, int(bytes(rest[0])), rest[1])

    def pulses(self) -> dict[int, bool]:
        """Return which of the processes are connected."""
        return {rank: self._has_pulse(rank) for rank in self._members}

    def close(self) -> None:
        """End; the others hear of it."""
        for address in self._members.values():
            self._write(address, b"lost", b"it has ended")
        self.drop(_LINGER_S)

    def drop(self, within_s: float = 0.0) -> None:
        """Close all; what was posted is sent, for so many seconds."""
        self._remove()
        self._listener.detach()  # ZeroMQ closes it
        _end(self._context, self.sockets, within_s)

    def _hear(self, rank: int, what: str, number: int, value: Any) -> None:
        """Do what a process asks."""
        if what == "give":
            # A process that has come this far has left all before.
            self._given = {n: given for n, given in self._given.items() if n >= number}
            given = self._given.setdefault(number, {})
            given[rank] = value
            if len(given) == self._size:
                del self._given[number]
                self._answer([*range(self._size)], "given", number, [given[i] for i in range(self._size)])
        elif what == "who":
            self._answer([rank], "who", value, sorted(self._given.get(number, ())))
        else:
            if len(self._members) < self._size - 1:
                self._notices.append(value)
            self._answer([0, *self._members], "notice", 0, value)

    def _answer(self, ranks: Sequence[int], what: str, number: int, value: Any) -> None:
        data = messages.written((what, number, value)) if any(ranks) else b""
        for rank in ranks:
            if rank == 0:
                self._service.hear(what, number, value)
            else:
                self._write(self._members[rank], b"hear", *_pieces(data))

    def _pass(self, source: int, to: int, data: Any) -> None:
        if to == 0:
            self._service.inbox[source].put(data)
        elif to in self._members:
            self._write(self._members[to], b"data", b"%d" % source, data)

    def _write(self, address: _Address, *frames: Any) -> bool:
        """Send to a process; return whether it is connected: of an end the others hear by its silence."""
        try:
            address[0].send_multipart([address[1], *frames])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def _greet(self, address: _Address, rank: int, size: int, own: str, joins: bool) -> None:
        """Answer a process that would join."""
        refused = ""
        if size != self._size or not 0 < rank < size:
            refused = f"Expected one of {self._size} processes. Received: process {rank} of {size}"
        elif self._owners.get(rank, own) != own and self._has_pulse(rank):
            refused = (
                f"Expected each process once. Received: another process {rank} of {size}. A child process, such as a "
                "worker that imports the training script, is to write processes=False; two jobs at one port need "
                "ports, or an NCCLSYNC_SECRET each, of their own"
            )
        elif self._owners.get(rank, own) != own:
            refused = (
                f"Expected processes that were started together. Received: process {rank} of {size}, started again, "
                "which cannot take the place of one that has ended. Start all of them again, as torchrun "
                "--max-restarts does: BackupAndRestore goes on at the backup"
            )
        if refused:
            self._write(address, b"refused", refused.encode())
            return
        self._write(address, b"welcome", messages.written((self._path, here())))
        if joins:
            is_new = rank not in self._owners
            self._owners[rank], self._members[rank], self._ranks[address] = own, address, rank
            for notice in self._notices if is_new else ():
                self._answer([rank], "notice", 0, notice)
            if len(self._members) == self._size - 1:
                self._remove()

    def _remove(self) -> None:
        """Remove what lets processes join."""
        self._forget()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _has_pulse(self, rank: int) -> bool:
        """Send a process a pulse; return whether it is connected."""
        return self._write((self._router, f"pulse {self._owners[rank]}".encode()), b"pulse")


class _Other:
    """Reach process 0, and hear it."""

    def __init__(self, service: Service, rank: int, size: int, by: Introduction, join_s: float | None) -> None:
        self._service, self._context, own = service, zmq.Context(), secrets.token_hex(8)
        with _Search(self._context, by, messages.written((rank, size, own, False))) as search:
            search.wait(search.go_on, join_s)
            self._pulse = pulse = _socket(self._context, zmq.DEALER, search.key)
            pulse.routing_id, pulse.immediate = f"pulse {own}".encode(), True
            pulse.heartbeat_ivl, pulse.heartbeat_timeout, pulse.heartbeat_ttl = _PING_MS, _MUTE_MS, _MUTE_MS
            self._reached = search.endpoint
            pulse.connect(self._reached)
            search.wait(lambda slice_s: bool(pulse.poll(int(1e3 * slice_s), zmq.POLLOUT)), join_s)
            time.sleep(2e-3 * _PING_MS)  # only after the first of them process 0 would notice that no more come
            # Within a host by the Unix socket, which needs no keys.
            path, where = search.answer
            key, main = search.key, search.endpoint
            if where == here() and _is_reached(path):
                key, main = "", f"ipc://{path}"
            self._main = _socket(self._context, zmq.DEALER, key)
            self._main.connect(main)
            self._main.send_multipart([b"hello", messages.written((rank, size, own, True))])
            search.wait(lambda slice_s: bool(self._main.poll(int(1e3 * slice_s))), join_s)
            _read_answer(self._main)
        self.sockets = self._main, self._pulse

    def take(self, ready: zmq.Socket, frames: Sequence[Any]) -> None:
        """Hear process 0."""
        kind, *rest = frames
        if kind == b"hear":
            self._service.hear(*messages.read(b"".join(rest)))
        elif kind == b"data":
            self._service.inbox[int(bytes(rest[0]))].put(rest[1])
        elif kind == b"lost" and not self._service.lost[1]:
            self._service.lost = time.monotonic(), bytes(rest[0]).decode()
            self._pulse.disconnect(self._reached)  # both sides take the other one for silent

    def ask(self, *request: Any) -> None:
        """Ask process 0."""
        self._main.send_multipart([b"ask", *_pieces(messages.written(request))])

    def send(self, to: int, data: bytes) -> None:
        """Send data, which process 0 passes on."""
        self._main.send_multipart([b"data", b"%d" % to, data])

    def pulses(self) -> dict[int, bool]:
        """Return whether process 0 is connected; have it say so if it does not know this process any more."""
        self._main.send(b"tick")
        return {0: bool(int(self._pulse.get(zmq.EVENTS)) & zmq.POLLOUT)}

    def drop(self) -> None:
        """Close all, without waiting."""
        _end(self._context, self.sockets, 0)

    close = drop  # what was to be sent has reached process 0 (`Peers.end`), or process 0 is not there


class _Search:
    """Look for process 0 at all of its addresses, until it answers at one.

    Attributes:
        endpoint, key, answer: the address that has answered, the key there, and what it has answered.
    """

    def __init__(self, context: zmq.Context, by: Introduction, hello: bytes) -> None:
        self._context, self._by, self._hello = context, by, hello
        self._poller = zmq.Poller()
        self._probes: dict[tuple[str, str], zmq.Socket] = {}  # by endpoint and key
        self._greeted: dict[zmq.Socket, float] = {}
        self._told: Told | None = None
        self._endpoints: list[str] = []
        self._answered: dict[str, str] = {}  # who has answered there, in words: it may be gone by the time of a message
        self._unknown = ""
        self._error: NcclSyncError | None = None
        self._began = time.monotonic()
        self._stop = threading.Event()

    def __enter__(self) -> _Search:
        threading.Thread(target=self._look, name="ncclsync search", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._by.forget()
        for probe in self._probes.values():
            probe.close(0)

    def _look(self) -> None:
        """Ask the launcher, and for the addresses of names, which may take long, come late, or change. In a thread."""
        try:
            self._look_on()
        except NcclSyncError as error:
            self._error = error
        except Exception as error:  # of any kind: of a launcher's channel, or of a name that is none
            self._error = NcclSyncError(f"Expected to find process 0. Received: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    def _look_on(self) -> None:
        while not self._stop.is_set():
            told = self._by.find()
            hosts, unknown = dict[str, None](), ""
            for name in told.addresses if told else ():
                try:
                    hosts |= {str(one[4][0]): None for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
                except OSError as error:
                    unknown = f"{name} has no address ({error})"
            self._unknown = unknown if told else self._by.waits_for
            if told:
                named = (f"[{host}]" if ":" in host else host for host in hosts)
                self._endpoints, self._told = [f"tcp://{host}:{told.port}" for host in named], told
            if time.monotonic() - self._began > _LOOK_AFTER_S:
                self._found()
            self._stop.wait(_AGAIN_S)

    def go_on(self, slice_s: float) -> bool:
        """Greet process 0 wherever it may be, for so many seconds; return whether it has answered."""
        if self._error is not None:
            raise self._error
        now, key = time.monotonic(), self._told.key if self._told else ""
        for endpoint in self._endpoints if key else ():
            if (endpoint, key) not in self._probes:
                probe = self._probes[endpoint, key] = _socket(self._context, zmq.DEALER, key)
                probe.immediate = True
                probe.connect(endpoint)
                self._poller.register(probe, zmq.POLLIN)
        for probe in self._probes.values():
            if now - self._greeted.get(probe, -math.inf) > 4 * _AGAIN_S:
                with contextlib.suppress(zmq.Again):  # it is not connected yet
                    probe.send_multipart([b"hello", self._hello], zmq.NOBLOCK)
                    self._greeted[probe] = now
        for ready, _ in self._poller.poll(int(1e3 * min(slice_s, 0.05))):
            self.answer = _read_answer(ready)
            self.endpoint, self.key = next(where for where, probe in self._probes.items() if probe is ready)
            return True
        return False

    def wait(self, go_on: Callable[[float], bool], join_s: float | None) -> None:
        """Wait, up to so many seconds from the begin; say after some that process 0 is waited for, and why."""
        timeouts.wait(
            go_on,
            call=timeouts.JOIN,
            what=lambda: "the joining of processes",
            timeout_s=join_s and max(1e-3, join_s - (time.monotonic() - self._began)),
            arrived=lambda: f"process 0 not arrived. Each has to make towers, and to do so in time. {self._words()}",
        )

    def _words(self) -> str:
        """Return what is found where process 0 was looked for."""
        found = [self._unknown] if self._unknown else []
        return ". ".join(filter(None, ["; ".join(found + self._found()), self._by.if_left_over]))

    def _found(self) -> list[str]:
        """Return who is at the first addresses, or was when last somebody answered there, in words."""
        found = []
        for endpoint in self._endpoints[:_SHOWN]:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            try:
                if endpoint not in self._answered:
                    self._answered[endpoint] = _found_at(host, port)
                found.append(self._answered[endpoint])
            except OSError as error:
                found.append(f"{host}:{port} does not answer ({error})")
        return found


def _found_at(host: str, port: str) -> str:
    """Return who answers at an address, in words. Raises OSError if nobody does."""
    with socket.create_connection((host.strip("[]"), int(port)), timeout=1) as raw:
        raw.settimeout(1)
        greeting = raw.recv(1)
    if not greeting:  # as a proxy does as long as there is nobody behind it
        raise ConnectionError("it closes the connection")
    if greeting == b"\xff":  # ZeroMQ's
        return (
            f"at {host}:{port} is a process that does not answer, or not to this job: give all its processes the same "
            f"{VARIABLE}, and each job a port of its own"
        )
    return f"at {host}:{port} is another program"


def _socket(context: zmq.Context, kind: int, key: str = "") -> zmq.Socket:
    """Return a socket, with the pair of keys that follows from `key` and the user's secret; without for ""."""
    made = context.socket(kind)
    made.ipv6, made.linger, made.sndhwm, made.rcvhwm, made.maxmsgsize = True, 0, 0, 0, 2 * _CHUNK
    made.tcp_keepalive, made.tcp_maxrt = 1, _CUT_MS
    if key:
        private = zmq.utils.z85.encode(hashlib.blake2b(f"{key}\n{secret()}".encode(), digest_size=32).digest())
        public = zmq.curve_public(private)
        made.curve_secretkey, made.curve_publickey = private, public
        if kind == zmq.ROUTER:
            made.curve_server = True
        else:
            made.curve_serverkey = public
    return made


def _pieces(data: bytes) -> list[bytes]:
    """Return data as frames of a length that is taken."""
    return [data[begin : begin + _CHUNK] for begin in range(0, len(data), _CHUNK)]


def _read_answer(ready: zmq.Socket) -> Any:
    """Return process 0's answer to a greeting. Raises MessageError if it refuses this process."""
    kind, data = ready.recv_multipart()
    if kind == b"refused":
        raise MessageError(data.decode())
    return messages.read(data)


def _is_reached(path: str) -> bool:
    """Return whether this process may connect with a Unix socket."""
    with socket.socket(socket.AF_UNIX) as raw:
        return bool(path) and raw.connect_ex(path) == 0


def _end(context: zmq.Context, sockets: Sequence[zmq.Socket], within_s: float) -> None:
    """Close sockets once all is sent, or after so many seconds."""
    for one in sockets:
        one.close(int(1e3 * within_s))
    context.term()
