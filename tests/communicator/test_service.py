"""The service by which processes meet: values, notices and data, for who has the job's key; who is silent."""

import contextlib
import ctypes
import json
import os
import pathlib
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
from processes import bothered, free_port

zmq = pytest.importorskip("zmq", reason="pip install -e '.[hosts]'")

from ncclsync.communicator import introductions, messages, native, service, timeouts  # noqa: E402
from ncclsync.communicator.introductions import Introduction, Told  # noqa: E402
from ncclsync.communicator.messages import MessageError  # noqa: E402
from ncclsync.communicator.peers import Peers, shortened  # noqa: E402
from ncclsync.communicator.processes import find_process  # noqa: E402
from ncclsync.communicator.service import Service  # noqa: E402
from ncclsync.errors import NcclSyncError, NcclTimeoutError, ProcessError  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def all_cores(monkeypatch):
    """Processes that join share the host's cores: here they are none."""
    monkeypatch.setattr(native, "_share", 0)


@pytest.fixture
def told():
    """What process 0 has told, once it has: [Told]."""
    return []


@pytest.fixture
def made(told):
    """A function that makes the service of a process, all of them in this process."""
    by = Introduction(told.append, lambda: told[-1] if told else None, "nothing was told")
    services = []

    def make(rank, size, by=by, join_s=20):
        services.append(Service(rank, size, by, join_s=join_s))
        return services[-1]

    yield make
    for one in reversed(services):
        one.close()


def given(services, number):
    """What each process receives of values that name their processes."""
    awaited = [one.give(number, messages.written((rank, b"\x00", None))) for rank, one in enumerate(services)]
    assert all(one.wait(10) for one in awaited)
    return [[messages.read(value) for value in one.value] for one in awaited]


def test_values_and_notices(made):
    """All receive what each gives, once all have; each hears what one tells, also who joins later, in one order."""
    services = [made(rank, 3) for rank in range(2)]
    services[1].tell("first", 5)
    services[0].tell("second", 5)
    early = [one.give(7, messages.written(rank)) for rank, one in enumerate(services)]
    assert not any(one.wait(0.1) for one in early)
    assert services[0].who(7, 5) == services[1].who(7, 5) == [0, 1] and services[1].who(8, 5) == []
    services.append(made(2, 3))
    assert [one.notices.get(timeout=5) for one in services for _ in range(2)] == ["first", "second"] * 3
    last = services[2].give(7, messages.written(2))
    assert all(one.wait(10) and list(map(messages.read, one.value)) == [0, 1, 2] for one in (*early, last))
    assert given(services, 8) == [[[rank, b"\x00", None] for rank in range(3)]] * 3


def test_a_value_before_a_notice(made):
    """Whoever hears that a process has failed or ended has what all had given before, and its data."""
    services = [made(rank, 3) for rank in range(3)]
    for number in range(1, 50):
        awaited = [one.give(number, messages.written(number)) for one in services]
        assert awaited[1].wait(10)
        services[1].send(2, memoryview(b"data"))
        services[1].tell(number, 5)
        for one, of in zip(services, awaited, strict=True):
            assert one.notices.get(timeout=10) == number and of.wait(0)
        assert bytes(services[2].inbox[1].get_nowait()) == b"data"


def test_values_that_are_left(made):
    """Those of a number that some have left, as after a failure, take no part in what follows."""
    services = [made(rank, 2) for rank in range(2)]
    left = services[0].give(1, messages.written("left"))
    assert given(services, 1 << 32) == [[[rank, b"\x00", None] for rank in range(2)]] * 2
    assert services[1].who(1, 5) == [] and not left.wait(0)


@pytest.mark.parametrize("local", [True, False])
def test_large_values_and_data(made, monkeypatch, local):
    """Of more than a frame, within a host and between two: from each to each, in order."""
    if not local:
        monkeypatch.setattr(service, "_is_reached", lambda path: False)
    services = [made(rank, 3) for rank in range(3)]
    numbers = np.arange(3 << 18, dtype=np.float64)  # 6 MiB
    awaited = [one.give(1, messages.written(numbers)) for one in services]
    assert all(one.wait(10) for one in awaited)
    for value in awaited[2].value:
        np.testing.assert_array_equal(messages.read(value), numbers)
    for source, target in ((0, 1), (1, 0), (1, 2), (2, 1)):
        services[source].send(target, memoryview(numbers).cast("B"))
        pieces = [services[target].inbox[source].get(timeout=10) for _ in range(2)]
        assert b"".join(pieces) == numbers.tobytes()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "name"])
def test_each_address_leads_to_process_0(made, told, host, monkeypatch):
    """It listens at all interfaces of IPv4 and IPv6; of a name with several addresses some may lead nowhere."""
    usual = socket.getaddrinfo
    both = [*usual("127.0.0.9", 1, type=socket.SOCK_STREAM), *usual("127.0.0.1", 1, type=socket.SOCK_STREAM)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda h, *a, **k: both if h == "name" else usual(h, *a, **k))
    first = made(0, 2)
    if ":" in host and not pathlib.Path("/proc/net/if_inet6").exists():
        pytest.skip("a host without IPv6")
    # Nobody listens at the other one.
    place = Told([host], told[0].port, told[0].key)
    assert given([first, made(1, 2, Introduction(print, lambda: place, ""))], 1)


def test_own_addresses():
    """All of them; none that leads nowhere without the name of an interface; loopback last."""
    found = introductions.own_addresses()
    assert "127.0.0.1" in found and not any(one.startswith("fe80") for one in found)
    networks = [one for one in found if one not in ("127.0.0.1", "::1")]
    assert found[: len(networks)] == networks
    done = subprocess.run(["hostname", "-I"], capture_output=True, text=True)
    assert done.returncode or set(done.stdout.split()) <= set(found)


def listening(pid=None):
    """The addresses and ports of a process, of this one, at which it listens."""
    psutil = pytest.importorskip("psutil")
    found = psutil.Process(pid).net_connections("tcp")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_one_port(made, told):
    """Is all that a job opens, and process 0 has it; its Unix socket is gone when all have joined."""
    before = listening()
    services = [made(0, 2)]
    folder = pathlib.Path(services[0]._side._folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    services.append(made(1, 2))
    assert {port for _, port in listening() - before} == {told[0].port}
    assert given(services, 1) and not folder.exists()


def test_a_forked_child_keeps_no_port(made, told):
    """Also if it outlives its parent."""
    made(0, 2)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        for pid, is_held in ((os.getpid(), True), (child, False)):
            assert (told[0].port in {port for _, port in listening(pid)}) == is_held
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


def test_strangers(made, told, monkeypatch, tmp_path):
    """Whatever 400 of them send, or if nothing, before processes join and after: they are not heard."""
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    first, rng, kept = made(0, 2), random.Random(0), []
    for _ in range(23):
        kept += bothered(told[0].port, rng, tmp_path / "ran")
    began = time.monotonic()
    services = [first, made(1, 2)]
    for _ in range(22):
        kept += bothered(told[0].port, rng, tmp_path / "ran")
    for number in range(1, 50):
        assert given(services, number)
    assert len(kept) > 400 and time.monotonic() - began < 20
    for one in kept:
        one.close()
    assert not failed and not [*tmp_path.iterdir()] and services[1].silence()[0] < 2


def test_a_stranger_who_knows_the_protocol(made, told):
    """But not the key: is not heard, joining or later; nor by older versions of it, nor without keys."""
    first = made(0, 2)
    stranger = Introduction(print, lambda: Told(["127.0.0.1"], told[0].port, "another key"), "")
    with pytest.raises(NcclTimeoutError, match=r"process 0 not arrived.* give all its processes the same NCCLSYNC_SEC"):
        made(1, 2, stranger, join_s=1)
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(f"tcp://127.0.0.1:{told[0].port}")
    plain.send_multipart([b"hello", messages.written((1, 2, "stranger", True))])
    assert not plain.poll(500)
    plain.close()
    context.term()
    assert given([first, made(1, 2)], 1)


def test_other_secret(made, monkeypatch):
    """Is told which variable to set."""
    monkeypatch.setenv("NCCLSYNC_SECRET", "the secret of process 0")
    made(0, 2)
    monkeypatch.setenv("NCCLSYNC_SECRET", "the secret of process 1")
    with pytest.raises(NcclTimeoutError, match="give all its processes the same NCCLSYNC_SECRET"):
        made(1, 2, join_s=1)
    monkeypatch.setenv("NCCLSYNC_SECRET", "short")
    with pytest.raises(NcclSyncError, match=r"at least 16 characters. Received: 5"):
        introductions.secret()


def test_another_secret_of_a_process_that_has_gone(made, monkeypatch):
    """Who gave up first is remembered: what is said is not that nobody answers."""
    monkeypatch.setenv("NCCLSYNC_SECRET", "the secret of process 0")
    first, found_at = made(0, 2), service._found_at

    def found_once(host, port):
        if threading.current_thread() is threading.main_thread():
            raise OSError("asked when it is over")
        try:
            return found_at(host, port)
        finally:
            first.close()

    monkeypatch.setattr(service, "_found_at", found_once)
    monkeypatch.setattr(service, "_LOOK_AFTER_S", 0)
    monkeypatch.setenv("NCCLSYNC_SECRET", "the secret of process 1")
    with pytest.raises(NcclTimeoutError, match="give all its processes the same NCCLSYNC_SECRET"):
        made(1, 2, join_s=3)


def test_a_process_that_is_there_already(made):
    """A second process of a number is refused, as is a number that there is not; also what was started again."""
    services = [made(0, 2), made(1, 2)]
    with pytest.raises(MessageError, match=r"each process once.*another process 1 of 2.*processes=False"):
        made(1, 2)
    with pytest.raises(MessageError, match=r"one of 2 processes. Received: process 2 of 3"):
        made(2, 3)
    assert given(services, 1)
    services[1].close()
    with pytest.raises(MessageError, match=r"process 1 of 2, started again, which cannot take.* Start all of them"):
        made(1, 2)


def test_two_jobs_on_one_port(made, told, tmp_path):
    """The second cannot listen; its other processes find the first job's process, and are not heard by it."""
    services = [made(0, 2), made(1, 2)]
    with pytest.raises(NcclSyncError, match=rf"to listen at port {told[0].port}.* give each job a port of its own"):
        made(0, 2, Introduction(print, lambda: None, "", told[0].port))
    other = Told(["127.0.0.1"], told[0].port, "the key of another job")
    with pytest.raises(NcclTimeoutError, match="not to this job"):
        made(1, 2, Introduction(print, lambda: other, ""), join_s=0.5)
    assert given(services, 1)


def test_process_0_that_does_not_come(made, caplog, monkeypatch):
    """Is said after a while, and raised in time: what nobody has told, what has no address, what does not answer."""
    port = free_port()
    monkeypatch.setattr(timeouts, "LATE_S", 0.3)
    for found, words in (
        (None, "nothing was told"),
        (Told(["no-such-host.invalid"], port, "key"), "no-such-host.invalid has no address"),
        (Told(["127.0.0.1"], port, "key"), rf"127.0.0.1:{port} does not answer \(.*refused"),
    ):
        caplog.clear()
        by = Introduction(print, lambda found=found: found, "nothing was told", if_left_over="Or unset RANK")
        with pytest.raises(NcclTimeoutError, match=rf"process 0 not arrived. Each has to make towers.*{words}"):
            made(1, 2, by, join_s=1)
        said = rf"has been pending for 0 s: process 0 not arrived.*{words}.*\. Or unset RANK; it is given up after 1 s"
        assert len(re.findall(said, caplog.text)) == 1, caplog.text


@pytest.mark.parametrize(
    "said, words", [(b"HTTP/1.1 400\r\n", "at {} is another program"), (b"", r"{} does not answer \(it closes")]
)
def test_another_program_has_the_port(made, said, words):
    """The others hear something else, or nothing, as of a proxy, and say so."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer():
            with_all = []
            while True:
                with contextlib.suppress(OSError):  # they do not stay
                    with_all.append(other.accept()[0])
                    with_all[-1].sendall(said * 9)
                    if not said:
                        with_all[-1].close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(NcclTimeoutError, match=words.format(f"127.0.0.1:{port}")):
            made(1, 2, Introduction(print, lambda: Told(["127.0.0.1"], port, "key"), ""), join_s=1)


def test_a_name_that_resolves_late(made, told, monkeypatch):
    """As in a cluster whose names come with its processes; and what was told anew is looked at."""
    first, usual, asked = made(0, 2), socket.getaddrinfo, []
    old, new = Told(["gone"], 9, "old"), Told(["late"], told[0].port, told[0].key)

    def resolve(name, *rest, **more):
        asked.append(name)
        if name == "late" and asked.count("late") < 3:
            raise socket.gaierror("Name or service not known")
        return usual("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert given([first, made(1, 2, Introduction(print, lambda: new if "gone" in asked else old, ""))], 1)


def test_processes_that_do_not_come(made):
    """Each process that has come names those that have not, and not itself."""
    errors = [None] * 4

    def join(rank):
        try:
            Peers(made(rank, 4), rank, 4, timeout_s=2)
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


CHILD = """
import ctypes, json, sys, time
from ncclsync.communicator.introductions import Introduction, Told
from ncclsync.communicator.service import Service

told = Told(*json.loads(sys.argv[1]))
service = Service(1, 2, Introduction(print, lambda: told, ""), join_s=20)
service.tell("here", 20)
while service.notices.get(timeout=60) != "go on":
    pass
ctypes.PyDLL(None).sleep(int(sys.argv[2]))  # no other thread runs Python
service.tell(service.silence()[0], 20)
time.sleep(60)
"""


@pytest.fixture
def child(made, told):
    """A process 1 in a process of its own; with the service of process 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = []

    def start(seconds):
        first = made(0, 2)
        command = [sys.executable, "-c", CHILD, json.dumps(told[0]), str(seconds)]
        started.append(subprocess.Popen(command, env=environment))
        assert first.notices.get(timeout=30) == "here"
        return first, started[0]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_process_that_keeps_python_from_running_is_alive(child):
    """As in one long call: threads that need no Python answer for it."""
    first, _ = child(6)
    first.tell("go on", 0)
    assert first.notices.get(timeout=5) == "go on"
    most = 0.0
    while first.notices.empty():
        most = max(most, first.silence()[1])
        time.sleep(0.1)
    assert most < 2.5 and first.notices.get() < 2.5
    ctypes.PyDLL(None).sleep(6)  # and the same in process 0
    assert first.silence()[1] < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_is_silent(child, way):
    """Seconds are counted; one that goes on is alive again."""
    first, process = child(0)
    assert first.silence()[1] < 2.5
    process.send_signal(way)
    until = time.monotonic() + 12
    while first.silence()[1] < 3:
        assert time.monotonic() < until
        time.sleep(0.1)
    if way == signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
        until = time.monotonic() + 5
        while first.silence()[1] > 0:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.mark.slow
def test_an_answer_that_comes_late(told, made, tmp_path):
    """Process 0 is stopped for 15 s while another joins: it joins then, and is not taken for a second one."""
    code = """
import json, pathlib, sys
from ncclsync.communicator import messages
from ncclsync.communicator.introductions import Introduction
from ncclsync.communicator.service import Service
place = pathlib.Path(sys.argv[1])
tell = lambda told: place.with_suffix(".new").write_text(json.dumps(told)) and place.with_suffix(".new").replace(place)
service = Service(0, 2, Introduction(tell, print, ""), join_s=20)
service.give(1, messages.written(0)).wait(50)
service.close()
"""
    place = tmp_path / "told"
    process = subprocess.Popen([sys.executable, "-c", code, place], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        while not place.exists():
            time.sleep(0.05)
        told.append(Told(*json.loads(place.read_text())))
        process.send_signal(signal.SIGSTOP)
        threading.Timer(15, process.send_signal, (signal.SIGCONT,)).start()
        awaited = made(1, 2, join_s=40).give(1, messages.written(1))
        assert awaited.wait(10) and [messages.read(one) for one in awaited.value] == [0, 1]
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_ends_are_quick(made):
    """Whoever ends first, or both at once: nobody waits for one that has ended; an exchange is read to its end."""
    for order in ((0, 1), (1, 0), (0,)):
        with ThreadPoolExecutor(2) as pool:
            services = [made(rank, 2) for rank in range(2)]
            both = [one.result() for one in [pool.submit(Peers, s, i, 2, 20) for i, s in enumerate(services)]]
            received = pool.submit(both[1].exchange, "b", "the end of fit", 30)
            assert both[0].exchange("a", "the end of fit", 30) == ["a", "b"]
            began = time.monotonic()
            if order == (0,):
                both[0].end("has ended")
                assert received.result() == ["a", "b"]
                with pytest.raises(ProcessError, match=r"process 0 .* has ended"):
                    both[1].exchange("b", "another", 30)
                both[1].end("has ended")
            else:
                assert received.result() == ["a", "b"]
                ends = [pool.submit(both[rank].end, "has ended") for rank in order]
                assert [one.result(10) for one in ends] == [None, None]
            assert time.monotonic() - began < 0.5


class Cable:
    """Lead connections to process 0 by way of another port; `cut` the newest of them, or `change` a bit."""

    def __init__(self, told):
        self.pairs, self._told, self._changes = [], told, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._lead, daemon=True).start()

    def _lead(self):
        while True:
            pair = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._told[0].port))
            self.pairs.append(pair)
            for one, other in (pair, pair[::-1]):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if self._changes and one is self.pairs[-1][0]:
                    self._changes = False
                    data = data[:-1] + bytes([data[-1] ^ 1])
                other.sendall(data)
        self._close((one, other))

    def _close(self, pair):
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self):
        self._close(self.pairs[-1])

    def change(self):
        self._changes = True


@pytest.mark.parametrize("way", ["cut", "change"])
def test_a_connection_that_is_cut_or_changed_is_heard_on_both_sides(made, told, monkeypatch, way):
    """The one that carries values, between two hosts; the pulse by itself would go on. No changed one is taken."""
    monkeypatch.setattr(service, "_is_reached", lambda path: False)
    first, cable = made(0, 2), Cable(told)
    by_cable = Introduction(told.append, lambda: Told(["127.0.0.1"], cable.port, told[0].key), "")
    second = made(1, 2, by_cable)
    assert given([first, second], 1)
    getattr(cable, way)()
    awaited = [one.give(2, messages.written("a value")) for one in (first, second)]
    ends = time.monotonic() + 20
    while min(first.silence()[1], second.silence()[0]) < 3:
        assert time.monotonic() < ends, (first.silence(), second.silence())
        time.sleep(0.1)
    assert not any(one.wait(0) for one in awaited)
    assert "its connection has ended" in second.lost[1]


def test_process_0_may_end_once_it_has_given_its_part(made):
    """An exchange that process 0 has left is read to its end by the others, who then hear that it has ended."""
    services = made(0, 2), made(1, 2)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(lambda rank: Peers(services[rank], rank, 2, 20), range(2))
        received = pool.submit(other.exchange, "b", "the end of fit", 30)
        assert first.exchange("a", "the end of fit", 30) == ["a", "b"]
        first.end("has ended")
        assert received.result(10) == ["a", "b"]
        with pytest.raises(ProcessError, match=r"process 0 .* has ended"):
            other.exchange("b", "another", 30)
        other.end("has ended")


def test_a_service_that_fails_ends_the_waiting(made, monkeypatch, caplog):
    """By any error of its thread: the process itself hears of it, and the others take it for silent."""
    services = made(0, 2), made(1, 2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: Peers(services[rank], rank, 2, 20), range(2))
        monkeypatch.setattr(services[0]._side, "_write", lambda *_: [][1])
        waiting = pool.submit(first.exchange, "a value", "the end of fit", 30)
        with pytest.raises(ProcessError, match=r"process 1 on .* is not reached any more: IndexError in process 0"):
            waiting.result(20)
        ends = time.monotonic() + 20
        while services[1].silence()[0] < 3:
            assert time.monotonic() < ends
            time.sleep(0.1)
    second.service.close()
    assert "What joins this process with the others has failed" in caplog.text


@pytest.mark.parametrize("name", ["gpu..cluster", "x" * 64])
def test_a_name_that_is_none(name):
    """It is said at once."""
    by = Introduction(print, lambda: Told([name], 29500, "a key"), "")
    with pytest.raises(NcclSyncError, match=r"Expected to find process 0. Received: Unicode"):
        Service(1, 2, by, join_s=20)


def test_a_key_file_that_another_user_has_made(tmp_path, monkeypatch):
    """Is not written to: in a folder that others may write they could read it."""
    usual, path = pathlib.Path.unlink, tmp_path / "told"

    def raced(draft, missing_ok=False):
        usual(draft, missing_ok=missing_ok)
        draft.touch(0o666)

    monkeypatch.setattr(pathlib.Path, "unlink", raced)
    with pytest.raises(NcclSyncError, match=r"Expected to write a file .* Received: .*File exists"):
        introductions._by_files([path]).tell(Told(["host"], 29500, "a key"))
    assert not path.exists()


def test_a_key_file_is_its_users(tmp_path, monkeypatch):
    """Others neither read it, nor are read in its place."""
    path, told = tmp_path / "told", Told(["host"], 29500, "a key")
    by = introductions._by_files([path])
    by.tell(told)
    assert path.stat().st_mode & 0o777 == 0o600 and by.find() == told
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert by.find() is None


def test_a_key_that_follows_from_the_port_is_warned_of(monkeypatch, caplog):
    """Once, by process 0, where the user has set no secret."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    for rank, secret, told in (("0", "", 1), ("1", "", 0), ("0", "of sixteen letters", 0)):
        caplog.clear()
        monkeypatch.setattr(os, "environ", {"RANK": rank, introductions.VARIABLE: secret, **variables})
        introductions.introduction(find_process())
        assert caplog.text.count("not strangers out") == caplog.text.count(introductions.VARIABLE) == told


def test_a_host_is_more_than_its_name():
    """Two hosts of one name are two; who comes late is told of after ten seconds."""
    assert introductions.machine() not in ("", socket.gethostname())
    assert introductions.here().startswith(introductions.machine())
    assert timeouts.LATE_S == 10


def test_a_frame_has_a_bound():
    """What is larger is not received, of who knows the key, either; the next message is."""
    context = zmq.Context()
    receiver, sender = service._socket(context, zmq.ROUTER, "a key"), service._socket(context, zmq.DEALER, "a key")
    sender.connect(f"tcp://127.0.0.1:{receiver.bind_to_random_port('tcp://127.0.0.1')}")
    sender.send(bytes(2 * service._CHUNK + 1))
    assert not receiver.poll(500)
    sender.send(b"small")
    assert receiver.poll(10_000) and receiver.recv_multipart()[1] == b"small"
    assert receiver.tcp_keepalive == 1 and receiver.tcp_maxrt == service._CUT_MS
    context.destroy()


def test_a_launcher_within_a_launcher(monkeypatch):
    """Each process' key follows from its own launcher: those around it may tell some processes alone."""
    keys = []
    for variables in ({}, {"SLURM_STEP_ID": "0"}):
        monkeypatch.setattr(os, "environ", {
            "OMPI_COMM_WORLD_RANK": str(len(keys)), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500", "PMIX_NAMESPACE": "7.1",
            "SLURM_JOB_ID": "7", **variables,
        })  # fmt: skip
        keys.append(introductions.introduction(find_process()).key)
    assert keys[0] == keys[1] and "7.1" in keys[0]


def test_words_that_are_no_text():
    """A file name that is no UTF-8 is told."""
    assert shortened("no b\udcff.npy") == "no b?.npy"


def test_a_store_is_asked_again(tmp_path):
    """Where nobody answers: it may have told of a process 0 that was started before."""
    path = tmp_path / "told"
    path.write_text('[["old"], 1, "a key"]')
    by = introductions._by_child([f"print(open({str(path)!r}).read())"], "the store", "", again_s=0.2)
    ends = time.monotonic() + 20
    for host in ("old", "new"):
        while (found := by.find()) is None or found.addresses != [host]:
            assert time.monotonic() < ends
            time.sleep(0.05)
        path.write_text('[["new"], 1, "a key"]')
    by.forget()


def test_variables_set_by_hand_in_slurm_jobs(monkeypatch):
    """Two jobs at one port have other keys."""
    keys = []
    for job in ("7", "8"):
        monkeypatch.setattr(os, "environ", {
            "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500", "SLURM_JOB_ID": job,
        })  # fmt: skip
        keys.append(introductions.introduction(find_process()).key)
    assert keys[0] != keys[1]
