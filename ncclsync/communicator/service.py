"""Store keys and values for several processes, in process 0, and know which processes are silent.

Each other process has two connections to process 0. The first carries its requests. On the second, C threads of both
sides send beats, which go on while a call keeps Python from running. Only process 0 listens, at the address that the
launcher names. `messages` encodes and seals everything that is sent.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from ncclsync.communicator import messages, native
from ncclsync.communicator.messages import MOST_BYTES, SEAL_BYTES, MessageError, Seal
from ncclsync.errors import NcclSyncError

_logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_LISTEN"
_MAGIC = b"ncclsync"
_IDENT_BYTES = 16
_LENGTH = struct.Struct("<Q")
_MOST_HELLO = 256  # bytes of the first message of a connection
_MOST_PUT = 1 << 36
_MOST_STRANGERS = 256  # connections whose first message has not come yet
_HELLO_S = 10.0
_BEAT_S = 1.0
_RETRY_S = 0.2
_REQUESTS, _BEATS = "requests", "beats"


class _Connection:
    """Send and receive sealed values, in order."""

    def __init__(self, raw: socket.socket, seal: Seal, about: str, *, is_server: bool) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.raw, self._seal = raw, seal
        sides = ("server", "client") if is_server else ("client", "server")
        self._sends, self._receives = (f"{about} {side}" for side in sides)
        self._sent = self._received = 0

    def send(self, value: Any) -> None:
        data = messages.written(value)
        self._sent += 1
        about = f"{self._sends} {self._sent}"
        head = self._seal.sealed(f"{about} head", _LENGTH.pack(len(data)))
        self.raw.sendall(head + self._seal.sealed(about, data))

    def receive(self, most_bytes: Callable[[], int]) -> Any:
        self._received += 1
        about = f"{self._receives} {self._received}"
        head = self._seal.opened(f"{about} head", read_exactly(self.raw, SEAL_BYTES + _LENGTH.size))
        (length,) = _LENGTH.unpack(head)
        if length > most_bytes():
            raise MessageError(f"Expected at most {most_bytes()} bytes. Received: {length}")
        return messages.read(self._seal.opened(about, read_exactly(self.raw, SEAL_BYTES + length)), length)


def read_exactly(raw: socket.socket, count: int) -> bytearray:
    """Return so many bytes. Raises OSError: the connection has ended."""
    data, begin = bytearray(count), 0
    while begin < count:
        received = raw.recv_into(memoryview(data)[begin:])
        if received == 0:
            raise ConnectionResetError("the connection has ended")
        begin += received
    return data


class _Store:
    """Store values, and call back those who wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}
        self._waiting: dict[str, list[Callable[[Any], None]]] = {}

    def put(self, key: str, value: Any) -> bool:
        with self._lock:
            if key in self._values:
                return False
            self._values[key] = value
            waiting = self._waiting.pop(key, ())
        for give in waiting:
            give(value)
        return True

    def get(self, key: str, give: Callable[[Any], None]) -> None:
        with self._lock:
            if key not in self._values:
                self._waiting.setdefault(key, []).append(give)
                return
            value = self._values[key]
        give(value)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)


class _Pulse:
    """Send beats on connections, and measure how long the other sides have been silent.

    Time in which a call kept this process' Python from running is not counted: it could not hear them.
    """

    def __init__(self, size: int) -> None:
        self._beat = native.Beat(_BEAT_S)
        self._selector = selectors.DefaultSelector()
        self._awake = 0.0  # seconds
        self._heard = [0.0] * size
        self._begun = [False] * size
        threading.Thread(target=self._listen, name="ncclsync pulse", daemon=True).start()

    def add(self, rank: int, raw: socket.socket, says: bytes, hears: bytes) -> None:
        """Beat by `says` on a connection to a process, which says `hears`."""
        raw.setblocking(False)
        self._heard[rank], self._begun[rank] = self._awake, True
        self._selector.register(raw, selectors.EVENT_READ, (rank, hears, bytearray()))
        self._beat.add(raw.fileno(), says)

    def silence(self) -> list[float]:
        """Return [size] for how many seconds each process was silent; 0 before it has come."""
        return [self._awake - heard if begun else 0.0 for heard, begun in zip(self._heard, self._begun, strict=True)]

    def _listen(self) -> None:
        last = time.monotonic()
        while True:
            for key, _ in self._selector.select(_BEAT_S / 4) if self._selector.get_map() else ():
                self._hear(key.fileobj, *key.data)
            if not self._selector.get_map():
                time.sleep(_BEAT_S / 4)
            now = time.monotonic()
            self._awake += min(now - last, _BEAT_S / 2)
            last = now

    def _hear(self, raw: Any, rank: int, hears: bytes, rest: bytearray) -> None:
        try:
            rest += raw.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            rest.clear()
        if not rest:  # the connection has ended: the process is silent from now on
            self._selector.unregister(raw)
            return
        while len(rest) >= len(hears):
            if rest[: len(hears)] != hears:
                self._selector.unregister(raw)
                return
            del rest[: len(hears)]
            self._heard[rank] = self._awake


class KeyService:
    """Join processes by keys and values that process 0 holds.

    Its threads last as long as the process.
    """

    def __init__(self, address: str, rank: int, size: int, *, join_s: float, on_one_host: bool = False) -> None:
        """Listen, or reach process 0.

        Raises NcclSyncError if process 0 is not reached or refuses this one; in process 0, if it cannot listen there.

        Args:
            address: "host:port", where process 0 listens.
            rank: this process' number.
            size: how many there are.
            join_s: how long to wait for process 0.
            on_one_host: whether all processes are on one host.
        """
        self._size, self._rank, self.address = size, rank, address
        self._pulse = _Pulse(size)
        host, _, port = address.rpartition(":")
        where = host.strip("[]"), int(port)
        if rank == 0:
            self._store = _Store()
            self._offer = messages.new_offer()
            self._seal = Seal(self._offer)
            self._joined: set[tuple[int, str]] = set()
            self._has_warned = False
            self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
            self._listener = _listen(*where, on_one_host)
            threading.Thread(target=self._accept, name="ncclsync service", daemon=True).start()
            return
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, tuple[int, queue.SimpleQueue[Any]]] = {}  # most bytes, and where they go
        self._lost = ""
        until = time.monotonic() + join_s
        self._requests = self._connect(*where, _REQUESTS, until, join_s)
        beats = self._connect(*where, _BEATS, until, join_s)
        says, hears = (self._seal.sealed(f"beat {one}", b"") for one in (rank, f"to {rank}"))
        self._pulse.add(0, beats.raw, says, hears)
        threading.Thread(target=self._receive, name="ncclsync service", daemon=True).start()

    def put(self, key: str, value: Any) -> bool:
        """Give all processes a value, as `messages.written` takes it; return False if the key has one already.

        Raises NcclSyncError if process 0 is not reached.
        """
        return bool(self._ask(("put", key, messages.written(value)), 3600, MOST_BYTES))

    def get(self, key: str, wait_s: float, most_bytes: int = MOST_BYTES) -> Any:
        """Return a key's value as soon as there is one; None if there is none for so many seconds.

        Raises NcclSyncError if process 0 is not reached, MessageError if the value has more than `most_bytes`.
        """
        data = self._ask(("get", key, most_bytes), wait_s, most_bytes)
        if isinstance(data, int):
            raise MessageError(f"Expected {key} of at most {most_bytes} bytes. Received: {data}")
        return None if data is None else messages.read(data, most_bytes)

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._ask(("delete", key, None), 3600, MOST_BYTES)

    def silence(self) -> list[float]:
        """Return [size] for how many seconds each process was silent: process 0 knows of all, the others of it."""
        return self._pulse.silence()

    # ---- Process 0 ----

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
            hello = connection.receive(lambda: _MOST_HELLO)
            if not (isinstance(hello, tuple) and list(map(type, hello)) == [int, int, str]):
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
                _logger.warning("A connection to process 0 is refused, and perhaps more: %s", error)
            raw.close()
            return
        finally:
            self._strangers.release()
        if kind == _BEATS:
            self._pulse.add(rank, raw, *(self._seal.sealed(f"beat {one}", b"") for one in (f"to {rank}", rank)))
        else:
            self._serve(connection)

    def _refused(self, rank: int, size: int, kind: str) -> str:
        if size != self._size or not 0 < rank < size or kind not in (_REQUESTS, _BEATS):
            return f"Expected one of {self._size} processes. Received: process {rank} of {size}"
        if (rank, kind) in self._joined:
            return (
                f"Expected each process once. Received: another process {rank} of {size}. A child process, such as a "
                "worker that imports the training script, is to write processes=False"
            )
        self._joined.add((rank, kind))
        return ""

    def _serve(self, connection: _Connection) -> None:
        """Answer requests. Runs in a thread; answers are sent by a second one, since a reader may have stopped."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while (one := answers.get()) is not None:
                    connection.send(one)

        def reply(number: int, found: Any) -> None:
            answers.put((number, found))

        threading.Thread(target=answer, name="ncclsync service", daemon=True).start()
        try:
            while True:
                number, (what, key, given) = connection.receive(lambda: _MOST_PUT)
                self._answer(what, key, given, functools.partial(reply, number))
        except (OSError, NcclSyncError, TypeError, ValueError) as error:
            if not isinstance(error, OSError):
                _logger.warning("A process is served no longer: %s", error)
            answers.put(None)
            connection.raw.close()

    def _answer(self, what: str, key: str, given: Any, give: Callable[[Any], None]) -> None:
        """Do what a process asks of the store, and give it the answer, perhaps later."""
        if what == "put":
            give(self._store.put(key, given))
        elif what == "get":
            self._store.get(key, lambda found: give(found if len(found) <= given else len(found)))
        else:
            self._store.delete(key)
            give(True)

    # ---- The others ----

    def _connect(self, host: str, port: int, kind: str, until: float, join_s: float) -> _Connection:
        while True:
            try:
                raw = socket.create_connection((host, port), timeout=max(1.0, min(_HELLO_S, until - time.monotonic())))
                try:
                    return self._introduced(raw, kind)
                except BaseException:
                    raw.close()
                    raise
            except OSError as error:
                if time.monotonic() >= until:
                    raise NcclSyncError(
                        f"Expected {self._size} processes to meet at {self.address}, within {join_s:g} s. Received: "
                        f"process 0 is not reached there ({error}). Check that it was started, that its host is "
                        "reached by that name, and that no other program has the port"
                    ) from None
                time.sleep(_RETRY_S)

    def _introduced(self, raw: socket.socket, kind: str) -> _Connection:
        greeting = read_exactly(raw, len(_MAGIC) + messages.OFFER_BYTES + _IDENT_BYTES)
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise OSError("another program answers")
        offer, ident = greeting[len(_MAGIC) : -_IDENT_BYTES], greeting[-_IDENT_BYTES:]
        self._seal = Seal(bytes(offer))
        connection = _Connection(raw, self._seal, ident.hex(), is_server=False)
        connection.send((self._rank, self._size, kind))
        try:
            refused = connection.receive(lambda: MOST_BYTES)
        except ConnectionResetError:
            raise MessageError(
                f"Expected process 0 at {self.address} to take this process. Received: an end of the connection. Give "
                f"all processes the same {messages.VARIABLE}"
            ) from None
        if refused:
            raise MessageError(refused)
        raw.settimeout(None)
        return connection

    def _ask(self, request: tuple[str, str, Any], wait_s: float, most_bytes: int) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._rank == 0:
            self._answer(*request, answer.put)
        else:
            with self._lock:
                self._check_reached()
                self._number += 1
                self._answers[self._number] = most_bytes, answer
                try:
                    self._requests.send((self._number, request))
                except OSError as error:
                    self._lost = str(error)
                    self._check_reached()
        try:
            found = answer.get(timeout=wait_s)
        except queue.Empty:
            return None
        if found is self:  # the connection has ended
            self._check_reached()
        return found

    def _check_reached(self) -> None:
        if self._lost:
            raise NcclSyncError(f"Expected process 0 to be reached at {self.address}. Received: {self._lost}")

    def _receive(self) -> None:
        """Hand out answers. Runs in a thread."""
        try:
            while True:
                number, found = self._requests.receive(self._most)
                with self._lock:
                    _, answer = self._answers.pop(number)
                answer.put(found)
        except (OSError, NcclSyncError, TypeError, ValueError, KeyError) as error:
            self._lost = str(error) or type(error).__name__
            self._requests.raw.close()
            with self._lock:
                for _, answer in self._answers.values():
                    answer.put(self)

    def _most(self) -> int:
        with self._lock:
            return max((most for most, _ in self._answers.values()), default=0) + 2 * MOST_BYTES


def _listen(host: str, port: int, on_one_host: bool) -> socket.socket:
    """Return a socket that listens at an address. Raises NcclSyncError: it is not this host's, or the port is taken."""
    chosen = os.environ.get(VARIABLE) or _bound(host, on_one_host)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(chosen, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        raise NcclSyncError(
            f"Expected process 0 to listen at {chosen}, port {port}. Received: {error}. Name an address of its host, "
            f"and a free port; where the others reach it by another address than its own, set {VARIABLE} to its own"
        ) from None
    return listener


def _bound(host: str, on_one_host: bool) -> str:
    """Return the address to listen at; where this host resolves its own name to a loopback address, its network's."""
    if on_one_host or host == "localhost" or _is_number(host):
        return host
    with contextlib.suppress(OSError):
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(
                    ("192.0.2.1", 9)
                )  # sends nothing: an address reserved for documentation, by the usual route
                own = str(probe.getsockname()[0])
            _logger.warning(
                "%s is %s on its own host: process 0 listens at %s. Set %s if the others use another network",
                host,
                " and ".join(sorted(found)),
                own,
                VARIABLE,
            )
            return own
    return host


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
