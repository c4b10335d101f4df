"""The service by which processes meet: values and notices, at one address, for who knows the secret; who is silent."""

import contextlib
import ctypes
import os
import pathlib
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ncclsync.communicator import messages, native
from ncclsync.communicator.messages import MessageError
from ncclsync.communicator.peers import Peers
from ncclsync.communicator.service import Service
from ncclsync.errors import NcclSyncError, ProcessError

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(60)


def free_port(host="127.0.0.1"):
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


@pytest.fixture(autouse=True)
def all_cores(monkeypatch):
    """Processes that join share the host's cores: here they are none."""
    monkeypatch.setattr(native, "_share", 0)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def joined(address, size):
    """Return [size] services; all in this process."""
    return [Service(address, rank, size, join_s=10) for rank in range(size)]


def given(services, number):
    """What each process receives of values that name their processes."""
    awaited = [one.give(number, messages.written((rank, b"\x00", None))) for rank, one in enumerate(services)]
    assert all(one.wait(10) for one in awaited)
    return [[messages.read(value) for value in one.value] for one in awaited]


def test_values_and_notices(address):
    """All receive what each gives, once all have; each hears what one tells, also who joins later, in one order."""
    services = [Service(address, rank, 3, join_s=10) for rank in range(2)]
    services[1].tell("first", 5)
    services[0].tell("second", 5)
    early = [one.give(7, messages.written(rank)) for rank, one in enumerate(services)]
    assert not any(one.wait(0.1) for one in early)
    assert services[0].who(7, 5) == services[1].who(7, 5) == [0, 1] and services[1].who(8, 5) == []
    services.append(Service(address, 2, 3, join_s=10))
    assert [one.notices.get(timeout=5) for one in services for _ in range(2)] == ["first", "second"] * 3
    last = services[2].give(7, messages.written(2))
    assert all(one.wait(10) and list(map(messages.read, one.value)) == [0, 1, 2] for one in (*early, last))
    assert given(services, 8) == [[[rank, b"\x00", None] for rank in range(3)]] * 3


def test_a_value_before_a_notice(address):
    """Whoever hears that a process has failed or ended has what all had given before."""
    services = joined(address, 3)
    for number in range(1, 50):
        awaited = [one.give(number, messages.written(number)) for one in services]
        assert awaited[1].wait(10)
        services[1].tell(number, 5)
        for one, of in zip(services, awaited, strict=True):
            assert one.notices.get(timeout=10) == number and of.wait(0)


def test_values_that_are_left(address):
    """Those of a number that some have left, as after a failure, take no part in what follows."""
    services = joined(address, 2)
    left = services[0].give(1, messages.written("left"))
    assert given(services, 1 << 32) == [[[rank, b"\x00", None] for rank in range(2)]] * 2
    assert services[1].who(1, 5) == [] and not left.wait(0)


def test_arrays(address):
    """Of some megabytes, too."""
    numbers = np.arange(1 << 19, dtype=np.float64)
    with ThreadPoolExecutor(2) as pool:
        services = joined(address, 2)
        both = [one.result() for one in [pool.submit(Peers, s, rank, 2, 20) for rank, s in enumerate(services)]]
        for one in [pool.submit(one.exchange, numbers, "numbers", 30) for one in both]:
            np.testing.assert_array_equal(one.result(), [numbers] * 2)


def test_listens_at_the_named_address_only(address):
    """Another address of the host is nobody's; and no other process than the first one listens."""
    before = listening()
    services = joined(address, 2)
    assert listening() - before == {("127.0.0.1", int(address.split(":")[1]))}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(address.split(":")[1])), timeout=5)
    assert given(services, 1)


def listening():
    """The addresses and ports of this process at which something listens."""
    psutil = pytest.importorskip("psutil")
    found = psutil.Process().net_connections("tcp")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_address_that_is_no_address_of_the_host(monkeypatch):
    """An error that says what to set; and that is listened at."""
    port = free_port()
    with pytest.raises(NcclSyncError, match=r"listen at 192.0.2.7, port \d+.*set NCCLSYNC_LISTEN to its own"):
        Service(f"192.0.2.7:{port}", 0, 2, join_s=1)
    monkeypatch.setenv("NCCLSYNC_LISTEN", "127.0.0.1")
    first = Service(f"192.0.2.7:{port}", 0, 2, join_s=1)
    assert given([first, Service(f"127.0.0.1:{port}", 1, 2, join_s=5)], 1)


def test_name_that_means_the_host_alone(monkeypatch, caplog):
    """Where the others are elsewhere, process 0 listens at the address of its network; on one host as named."""
    usual = socket.getaddrinfo
    named = {"this-host": "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda h, *a, **k: usual(named.get(h, h), *a, **k))
    for alone in (True, False):
        before = listening()
        try:
            Service(f"this-host:{free_port()}", 0, 2, join_s=1, on_one_host=alone)
        except OSError:
            pytest.skip("no route to a network")
        ((found, _),) = listening() - before
        assert (found == "127.0.1.1") == alone or "listens at 127" in caplog.text
    assert "NCCLSYNC_LISTEN" in caplog.text


def test_strangers(address, monkeypatch):
    """Whatever they send, or if nothing: no thread fails, no code runs, and processes join."""
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    first = Service(address, 0, 2, join_s=10)
    where = ("127.0.0.1", int(address.split(":")[1]))
    rng = random.Random(0)
    silent = socket.create_connection(where)
    for i in range(60):
        with socket.create_connection(where, timeout=5) as stranger:
            greeting = stranger.recv(200)
            assert greeting.startswith(b"ncclsync")
            sent = pickle.dumps(Exploit()) if i % 3 == 0 else rng.randbytes(rng.randrange(1, 300))
            sent = b"\x00" * 16 + (1 << 62).to_bytes(8, "little") if i % 3 == 1 else sent
            stranger.sendall(sent)
            with contextlib.suppress(OSError):  # it may be closed already
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
    assert given([first, Service(address, 1, 2, join_s=10)], 1)
    silent.close()
    assert not failed and not ran


def test_a_client_that_goes_wrong(address, monkeypatch):
    """Of who has joined: bytes that are changed on their way end that connection, and no other."""
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    first, bad, good = joined(address, 3)
    bad._connection.raw.sendall(b"x" * 100)
    until = time.monotonic() + 20
    with pytest.raises(NcclSyncError, match="process 0 to be reached"):
        while time.monotonic() < until:
            bad.check_reached(0)
            time.sleep(0.05)
    good.tell("a", 5)
    assert first.notices.get(timeout=5) == good.notices.get(timeout=5) == "a"
    assert not failed


ran = []


class Exploit:
    """Runs code where somebody unpickles it."""

    def __reduce__(self):
        return ran.append, ("code of a stranger",)


def test_other_secret(address, monkeypatch):
    """Is told which variable to set."""
    monkeypatch.setenv("NCCLSYNC_SECRET", "the secret of process 0")
    Service(address, 0, 2, join_s=10)
    monkeypatch.setenv("NCCLSYNC_SECRET", "the secret of process 1")
    with pytest.raises(MessageError, match=r"process 0 at .* to take this process.*the same NCCLSYNC_SECRET"):
        Service(address, 1, 2, join_s=10)


def test_a_process_that_is_there_already(address):
    """A second process of a number is refused, as is a number that there is not."""
    services = joined(address, 2)
    with pytest.raises(MessageError, match=r"each process once.*another process 1 of 2.*processes=False"):
        Service(address, 1, 2, join_s=10)
    with pytest.raises(MessageError, match=r"one of 2 processes. Received: process 2 of 3"):
        Service(address, 2, 3, join_s=10)
    assert given(services, 1)


def test_process_0_that_does_not_come(address):
    """An error that says where, and for how long it was tried."""
    with pytest.raises(NcclSyncError, match=rf"2 processes to meet at {address}, within 1 s.*process 0 is not reached"):
        Service(address, 1, 2, join_s=1)


def test_processes_that_do_not_come(address):
    """Each process that has come names those that have not."""
    errors = [None] * 4

    def join(rank):
        try:
            Peers(Service(address, rank, 4, join_s=10), rank, 4, timeout_s=2)
        except NcclSyncError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for rank in (0, 2):
        assert "the joining of processes to end" in errors[rank]
        assert re.search("within 2 s: process 1, process 3 not arrived", errors[rank]), errors


def test_another_program_has_the_port(address):
    """An error in process 0, which cannot listen; and in the others, which hear something else."""
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))) as other:
        with pytest.raises(NcclSyncError, match="to listen at"):
            Service(address, 0, 2, join_s=1)
        threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400\r\n" * 9), daemon=True).start()
        with pytest.raises(NcclSyncError, match="process 0 is not reached"):
            Service(address, 1, 2, join_s=2)


CHILD = """
import ctypes, sys, time
from ncclsync.communicator.service import Service

service = Service(sys.argv[1], 1, 2, join_s=20)
service.tell("here", 20)
while service.notices.get(timeout=60) != "go on":
    pass
ctypes.PyDLL(None).sleep(int(sys.argv[2]))  # no other thread runs Python
service.tell(service.silence()[0], 20)
time.sleep(60)
"""


@pytest.fixture
def child(address):
    """A process 1 in a process of its own; with the service of process 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, address]
    started = []

    def start(seconds):
        started.append(subprocess.Popen([*command, str(seconds)], env=environment))
        service = Service(address, 0, 2, join_s=20)
        assert service.notices.get(timeout=30) == "here"
        return service, started[0]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_process_that_keeps_python_from_running_is_alive(child):
    """As in one long call: its beat is heard by the other, and the other's counts when it is through."""
    service, _ = child(5)
    service.tell("go on", 0)
    assert service.notices.get(timeout=5) == "go on"
    most = 0.0
    while service.notices.empty():
        most = max(most, service.silence()[1])
        time.sleep(0.1)
    heard_s = service.notices.get()
    assert most < 2.5 and heard_s < 2.5
    ctypes.PyDLL(None).sleep(4)  # and the same in process 0
    assert service.silence()[1] < 2.5


@pytest.mark.parametrize("way", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_is_silent(child, way):
    """Seconds are counted from its last beat, while somebody asks."""
    service, process = child(0)
    assert service.silence()[1] < 2.5
    process.send_signal(way)
    for _ in range(50):
        time.sleep(0.1)
        silent_s = service.silence()[1]
    assert silent_s > 3
    time.sleep(5)
    assert service.silence()[1] < silent_s + 2.5


def test_process_0_may_end_once_it_has_given_its_part(address):
    """An exchange that process 0 has left is read to its end by the others, whom process 0 waits for."""
    with ThreadPoolExecutor(2) as pool:
        services = [pool.submit(Service, address, rank, 2, join_s=10) for rank in range(2)]
        both = [pool.submit(Peers, one.result(), rank, 2, timeout_s=20) for rank, one in enumerate(services)]
        first, other = (one.result() for one in both)
        received = pool.submit(other.exchange, "b", "the end of fit", 30)
        assert first.exchange("a", "the end of fit", 30) == ["a", "b"]
        began = time.monotonic()
        first.end("has ended")
        assert received.result() == ["a", "b"]
        assert time.monotonic() - began < 4
        with pytest.raises(ProcessError, match=r"process 0 .* has ended"):
            other.exchange("b", "another", 30)
