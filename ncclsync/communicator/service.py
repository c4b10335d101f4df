"""Join several processes by process 0: it brings their values together, passes notices on, and knows who is silent.

Each other process has two connections to process 0. The first carries what it gives and asks, and what it hears. On the
second, C threads of both sides send beats, which go on while a call keeps Python from running. `messages` encodes and
seals what is sent. Process 0 listens at the address that the launcher names.

CPU towers need a connection between each two processes, for data; then the others listen, too.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import logging
import math
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ncclsync.communicator import messages, native, timeouts
from ncclsync.communicator.messages import SEAL_BYTES, MessageError, Seal
from ncclsync.errors import NcclSyncError

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_LISTEN"
_MAGIC = b"ncclsync"
_IDENT_BYTES = 16
_LENGTH = struct.Struct("<Q")
_MOST_HELLO = 256  # bytes of the first message of a connection
_MOST = 1 << 36
_MOST_STRANGERS = 256  # connections whose first message has not come yet
_HELLO_S = 10.0
_BEAT_S = 1.0
_RETRY_S = 0.2
_REQUESTS, _BEATS, _DATA = "requests", "beats", "data"


class _Connection:
    """Send and receive sealed values, in order."""

    def __init__(self, raw: socket.socket, seal: Seal, about: str, *, is_server: bool) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.raw, self._seal = raw, seal
        sides = ("server", "client") if is_server else ("client", "server")
        self._sends, self._receives = (f"{about} {side}" for side in sides)
        self._sent = self._received = 0
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, value: Any) -> None:
        data = messages.written(value)
        self._sent += 1
        about = f"{self._sends} {self._sent}"
        head = self._seal.sealed(f"{about} head", _LENGTH.pack(len(data)))
        self.raw.sendall(head + self._seal.sealed(about, data))

    def receive(self, most_bytes: int = _MOST) -> Any:
        self._received += 1
        about = f"{self._receives} {self._received}"
        head = self._seal.opened(f"{about} head", read_exactly(self.raw, SEAL_BYTES + _LENGTH.size))
        (length,) = _LENGTH.unpack(head)
        if length > most_bytes:
            raise MessageError(f"Expected at most {most_bytes} bytes. Received: {length}")
        return messages.read(self._seal.opened(about, read_exactly(self.raw, SEAL_BYTES + length)))

    def post(self, *values: Any) -> None:
        """Send a tuple once `start` was called, without waiting: the reader may have stopped."""
        self._waiting.put(values)

    def start(self, hear: Callable[..., None], lose: Callable[[Exception], None]) -> None:
        """Pass on what comes, in a thread, to `hear`; and why no more comes to `lose`. Send in a second thread."""

        def send() -> None:
            with contextlib.suppress(OSError):
                while (values := self._waiting.get()) is not None:
                    self.send(values)

        def receive() -> None:
            try:
                while True:
                    hear(*self.receive())
            except (OSError, NcclSyncError, TypeError, ValueError) as error:
                self._waiting.put(None)
                self.raw.close()
                lose(error)

        for task in (send, receive):
            threading.Thread(target=task, name="ncclsync service", daemon=True).start()


def read_exactly(raw: socket.socket, count: int) -> bytearray:
    """Return so many bytes. Raises OSError: the connection has ended."""
    data, begin = bytearray(count), 0
    while begin < count:
        received = raw.recv_into(memoryview(data)[begin:])
        if received == 0:
            raise ConnectionResetError("the connection has ended")
        begin += received
    return data


class _Hub:
    """Bring the processes' values together, and pass on notices: process 0's part.

    All hear in one order. A process hears of a notice after all values that were complete before it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._given: dict[int, dict[int, bytes]] = {}  # by number and process; until they are complete
        self._notices: list[Any] = []  # for those who have not joined
        self._members: dict[int, Callable[..., None]] = {}

    def join(self, rank: int, send: Callable[..., None]) -> None:
        """Let a process hear by `send` from now on, which does not wait, and of all earlier notices."""
        with self._lock:
            self._members[rank] = send
            for notice in self._notices:
                send("notice", 0, notice)

    def hear(self, rank: int, what: str, number: int, value: Any) -> None:
        """Do what a process asks."""
        with self._lock:
            if what == "give":
                self._take(rank, number, value)
            elif what == "who":
                self._members[rank]("who", value, sorted(self._given.get(number, ())))
            else:
                if len(self._members) < self._size:
                    self._notices.append(value)
                for send in self._members.values():
                    send("notice", 0, value)

    def _take(self, rank: int, number: int, value: bytes) -> None:
        # A process that has come this far has left all before.
        self._given = {n: given for n, given in self._given.items() if n >= number}
        given = self._given.setdefault(number, {})
        given[rank] = value
        if len(given) == self._size:
            del self._given[number]
            each = [given[i] for i in range(self._size)]
            for send in self._members.values():
                send("given", number, each)


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


class _Door:
    """Listen, and admit the job's processes: who knows its secret. Its threads last as long as the process."""

    def __init__(
        self, listener: socket.socket, offer: bytes, size: int, admit: Mapping[str, Callable[[int, _Connection], None]]
    ) -> None:
        """Open it.

        Args:
            listener: already listens.
            offer: process 0's, see `messages.Seal`.
            size: how many processes there are.
            admit: by kind of connection, what is called with the process' number and the connection.
        """
        self._listener, self._offer, self._size, self._admit = listener, offer, size, admit
        self._seal = Seal(offer)
        self._joined: set[tuple[int, str]] = set()
        self._has_warned = False
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="ncclsync service", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                time.sleep(_RETRY_S)
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(raw,), name="ncclsync service", daemon=True).start()
            else:
                raw.close()

    def _greet(self, raw: socket.socket) -> None:
        """Admit a process if it knows the job's secret. Runs in a thread."""
        try:
            raw.settimeout(_HELLO_S)
            ident = secrets.token_bytes(_IDENT_BYTES)
            raw.sendall(_MAGIC + self._offer + ident)
            connection = _Connection(raw, self._seal, ident.hex(), is_server=True)
            hello = connection.receive(_MOST_HELLO)
            if not (isinstance(hello, list) and list(map(type, hello)) == [int, int, str]):
                raise MessageError(f"Expected a number, a count and a word. Received: {hello!r}")
            rank, size, kind = hello
            refused = self._refused(rank, size, kind)
            connection.send(refused)
            if refused:
                raise MessageError(refused)
            raw.settimeout(None)
        except (OSError, MessageError) as error:
            if isinstance(error, MessageError) and not self._has_warned:
                self._has_warned = True
                logger.warning("A connection is refused, and perhaps more: %s", error)
            raw.close()
            return
        finally:
            self._strangers.release()
        self._admit[kind](rank, connection)

    def _refused(self, rank: int, size: int, kind: str) -> str:
        if size != self._size or not 0 < rank < size or kind not in self._admit:
            return f"Expected one of {self._size} processes. Received: process {rank} of {size}"
        if (rank, kind) in self._joined:
            return (
                f"Expected each process once. Received: another process {rank} of {size}. A child process, such as a "
                "worker that imports the training script, is to write processes=False"
            )
        self._joined.add((rank, kind))
        return ""


class Service:
    """Join this process with the others by process 0. Its threads last as long as the process.

    Attributes:
        address: "host:port", where process 0 listens.
        notices: what processes have told all.
    """

    def __init__(self, address: str, rank: int, size: int, *, join_s: float, on_one_host: bool = False) -> None:
        """Listen, or reach process 0.

        Raises NcclSyncError if process 0 is not reached or refuses this one; in process 0, if it cannot listen there.

        Args:
            address: "host:port", where process 0 listens; port 0: any that is free.
            rank: this process' number.
            size: how many there are.
            join_s: how long to wait for process 0; infinity for no limit.
            on_one_host: whether all processes are on one host.
        """
        self._size, self._rank = size, rank
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lost = (math.inf, "")  # since when, and why, process 0 is not reached any more
        self._awaited: dict[tuple[str, int], Awaited] = {}
        self._questions = itertools.count()
        self._data: dict[int, socket.socket] = {}
        self._beats: dict[int, socket.socket] = {}
        self._silent, self._asked, self._lock = [0.0] * size, time.monotonic(), threading.RLock()
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if rank == 0:
            self._hub = _Hub(size)
            self._hub.join(0, self._hear)
            self._ask: Callable[..., None] = functools.partial(self._hub.hear, 0)
            self._offer = messages.new_offer()
            listener = _listen(host, int(port), on_one_host)
            self.address = f"{host}:{listener.getsockname()[1]}"
            admit = {_REQUESTS: self._serve, _BEATS: self._beat, _DATA: self._add_data}
            _Door(listener, self._offer, size, admit)
            return
        self.address = address
        where, self._offer = (host, int(port)), b""
        until = time.monotonic() + join_s
        self._connection = self._connect(0, where, _REQUESTS, until, join_s)
        self._beat(0, self._connect(0, where, _BEATS, until, join_s))
        self._ask = self._connection.post
        self._connection.start(self._hear, self._lose)

    def give(self, number: int, value: bytes) -> Awaited:
        """Give a value; wait for [size] those of all processes.

        Whoever gives one of a number gives none of lower numbers any more.
        """
        awaited = self._expect("given", number)
        self._ask("give", number, value)
        return awaited

    def who(self, number: int, wait_s: float) -> list[int]:
        """Return which processes have given a value of a number that not all have given; [] if process 0 is silent."""
        question = next(self._questions)
        awaited = self._expect("who", question)
        self._ask("who", number, question)
        return awaited.value if awaited.wait(wait_s) else []

    def tell(self, notice: Any, wait_s: float) -> None:
        """Give all processes a notice; wait until process 0 has taken it."""
        self._ask("tell", 0, notice)
        self.who(0, 0 if self._lost[1] else wait_s)

    def silence(self) -> list[float]:
        """Return [size] for how many seconds each process was silent: process 0 knows of all, the others of it.

        To be asked at least every two seconds: more time is not counted, in which this process may have been stopped.
        """
        with self._lock:
            passed_s, self._asked = min(2.0, time.monotonic() - self._asked), time.monotonic()
            for rank, raw in list(self._beats.items()):
                self._silent[rank] += passed_s
                with contextlib.suppress(OSError):  # no more has come
                    while raw.recv(1 << 12, socket.MSG_DONTWAIT):
                        self._silent[rank] = 0.0
            return list(self._silent)

    def check_reached(self, within_s: float) -> None:
        """Raise NcclSyncError if process 0 was not reached for so many seconds."""
        since, why = self._lost
        if time.monotonic() - since > within_s:
            raise NcclSyncError(f"Expected process 0 to be reached at {self.address}. Received: {why}")

    def connect(self, exchange: Callable[[Any], list[Any]], timeout_s: float | None) -> dict[int, socket.socket]:
        """Return a connection to each other process, for data, which does not block. Collective, once.

        `exchange` returns [size] what all processes give. Raises NcclSyncError if one is not reached.
        """
        where = None  # process 0 listens already
        if self._rank > 0:
            raw = self._connection.raw
            listener = socket.create_server((raw.getsockname()[0], 0), family=raw.family, backlog=128)
            _Door(listener, self._offer, self._size, {_DATA: self._add_data})
            where = raw.getsockname()[0], listener.getsockname()[1]
        addresses = exchange(where)
        join_s = timeout_s or math.inf
        until = time.monotonic() + join_s
        for other, address in enumerate(addresses[: self._rank]):
            # Each process reaches those of lower numbers.
            address = address or self._connection.raw.getpeername()[:2]
            self._add_data(other, self._connect(other, address, _DATA, until, join_s))
        timeouts.wait(
            lambda slice_s: timeouts.poll(lambda: len(self._data) == self._size - 1, slice_s),
            call="connect",
            what=lambda: "the joining of host memory",
            timeout_s=timeout_s,
            arrived=lambda: f"{len(self._data)} of {self._size - 1} processes are connected",
        )
        return self._data

    def _add_data(self, rank: int, connection: _Connection) -> None:
        connection.raw.setblocking(False)
        self._data[rank] = connection.raw

    def _beat(self, rank: int, connection: _Connection) -> None:
        native.beat(connection.raw.fileno(), b".", _BEAT_S)
        self._beats[rank] = connection.raw

    def _serve(self, rank: int, connection: _Connection) -> None:
        """Answer a process' requests, in process 0."""

        def lose(error: Exception) -> None:
            if not isinstance(error, OSError):
                logger.warning("A process is served no longer: %s", error)

        self._hub.join(rank, connection.post)
        connection.start(functools.partial(self._hub.hear, rank), lose)

    def _expect(self, what: str, number: int) -> Awaited:
        return self._awaited.setdefault((what, number), Awaited())

    def _hear(self, what: str, number: int, value: Any) -> None:
        """Hear process 0."""
        if what == "notice":
            self.notices.put(value)
            return
        awaited = self._awaited.pop((what, number), None)
        if awaited is not None:
            awaited.bring(value)

    def _lose(self, error: Exception) -> None:
        self._lost = time.monotonic(), str(error) or type(error).__name__

    def _connect(self, other: int, where: tuple[str, int], kind: str, until: float, join_s: float) -> _Connection:
        while True:
            try:
                raw = socket.create_connection(where, timeout=max(1.0, min(_HELLO_S, until - time.monotonic())))
                try:
                    return self._introduced(raw, kind)
                except BaseException:
                    raw.close()
                    raise
            except OSError as error:
                if time.monotonic() >= until:
                    raise NcclSyncError(
                        f"Expected {self._size} processes to meet at {where[0]}:{where[1]}, within {join_s:g} s. "
                        f"Received: process {other} is not reached there ({error}). Check that it was started, that "
                        "its host is reached by that name, and that no other program has the port"
                    ) from None
                time.sleep(_RETRY_S)

    def _introduced(self, raw: socket.socket, kind: str) -> _Connection:
        greeting = read_exactly(raw, len(_MAGIC) + messages.OFFER_BYTES + _IDENT_BYTES)
        offer, ident = bytes(greeting[len(_MAGIC) : -_IDENT_BYTES]), greeting[-_IDENT_BYTES:]
        if greeting[: len(_MAGIC)] != _MAGIC or self._offer not in (b"", offer):
            raise OSError("another program answers")
        connection = _Connection(raw, Seal(offer), ident.hex(), is_server=False)
        connection.send((self._rank, self._size, kind))
        try:
            refused = connection.receive()
        except ConnectionResetError:
            raise MessageError(
                f"Expected process 0 at {self.address} to take this process. Received: an end of the connection. Give "
                f"all processes the same {messages.VARIABLE}"
            ) from None
        if refused:
            raise MessageError(refused)
        self._offer = offer
        raw.settimeout(None)
        return connection


def _listen(host: str, port: int, on_one_host: bool) -> socket.socket:
    """Return a socket that listens at an address. Raises NcclSyncError: it is not this host's, or the port is taken."""
    chosen = os.environ.get(VARIABLE) or _bound(host, on_one_host)
    try:
        family, _, _, _, where = socket.getaddrinfo(chosen, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(where, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise NcclSyncError(
            f"Expected process 0 to listen at {chosen}, port {port}. Received: {error}. Name an address of its host, "
            f"and a free port; where the others reach it by another address than its own, set {VARIABLE} to its own"
        ) from None


def _bound(host: str, on_one_host: bool) -> str:
    """Return the address to listen at; where this host resolves its own name to a loopback address, its network's."""
    if on_one_host or host == "localhost":
        return host
    with contextlib.suppress(OSError):
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        loops = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
        if loops and host not in found:  # a name
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                # Sends nothing: an address reserved for documentation, by the usual route.
                probe.connect(("192.0.2.1", 9))
                own = str(probe.getsockname()[0])
            words = "%s is %s on its own host: process 0 listens at %s. Set %s if the others use another network"
            logger.warning(words, host, " and ".join(sorted(found)), own, VARIABLE)
            return own
    return host
