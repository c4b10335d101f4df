"""One test per function of `compat.coordination`, against the installed TensorFlow: what broke."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
JOIN = """
import os, signal, sys, threading, time
import tensorflow as tf
from ncclsync.compat.coordination import CoordinationService
from ncclsync.errors import NcclSyncError

rank, address = int(sys.argv[1]), sys.argv[2]
before = [tf.constant(1.0).device, *(device.name for device in tf.config.list_logical_devices())]
service = CoordinationService(address, rank, 2, join_s=60, heartbeat_s=3)
ticks = []

def tick():
    while True:
        ticks.append(None)
        time.sleep(0.01)

threading.Thread(target=tick, daemon=True).start()
"""

pytestmark = pytest.mark.timeout(120)


def environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture
def joined():
    """A function that runs code in two processes that have joined; returns what each prints, and its exit status."""
    processes = []

    def run(code):
        address = free_address()
        for rank in range(2):
            command = [sys.executable, "-c", JOIN + code, str(rank), address]
            processes.append(subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True))
        return [(process.communicate(timeout=100)[0].split("\n")[:-1], process.returncode) for process in processes]

    yield run
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_keys_and_values(joined):
    """A key has one value for all, and whoever waits for it lets others run; the program's own context stays as it is.

    A thread that still waits does not keep the process from ending.
    """
    code = """
assert service.put(f"from/{rank}", f"value {rank}")
print([service.get(f"from/{i}", 30) for i in range(2)], service.put(f"from/{rank}", "another"))
n = len(ticks)
print(service.get("nothing", 1), len(ticks) - n > 50)
print(before == [tf.constant(1.0).device, *(device.name for device in tf.config.list_logical_devices())])
service.get("from/0", 30), service.put(f"read/{rank}", ""), service.get(f"read/{1 - rank}", 30)
service.delete(f"from/{rank}")
print(service.put(f"from/{rank}", "again"))
service.put(f"done/{rank}", ""), service.get(f"done/{1 - rank}", 30)
threading.Thread(target=service.get, args=("nothing", 3600), daemon=True).start()
time.sleep(0.1)
"""
    lines = ["['value 0', 'value 1'] False", "None True", "True", "True"]
    assert joined(code) == [(lines, 0), (lines, 0)]


@pytest.mark.slow
def test_dead_process_is_not_alive(joined):
    """Process 0 hears of it within seconds, and goes on; keys still work."""
    code = """
print(service.alive(), flush=True)
service.put(f"here/{rank}", ""), service.get(f"here/{1 - rank}", 30)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
while all(service.alive()) and time.monotonic() - began < 30:
    time.sleep(0.1)
print(service.alive(), time.monotonic() - began < 15, service.put("late", "x"), service.get("late", 5))
"""
    (first, status), (_, other) = joined(code)
    assert (first, status, other) == (["[True, True]", "[True, False] True True x"], 0, -signal.SIGKILL)


@pytest.mark.slow
def test_dead_process_0_is_an_error(joined):
    """For the others, who go on."""
    code = """
service.put(f"here/{rank}", ""), service.get(f"here/{1 - rank}", 30)
if rank == 0:
    time.sleep(1)  # until the other has read
    os.kill(os.getpid(), signal.SIGKILL)
for call in (lambda: service.get("here/0", 5), lambda: service.put("late", "x"), service.alive):
    try:
        while True:
            call()
            time.sleep(0.1)
    except NcclSyncError as error:
        print("an error", bool(str(error)))
"""
    (_, status), (other, goes_on) = joined(code)
    assert (status, other, goes_on) == (-signal.SIGKILL, ["an error True"] * 3, 0)


@pytest.mark.slow
def test_sigterm_still_ends_a_process(joined):
    """TensorFlow would take it for a notice of preemption."""
    code = """
service.put(f"here/{rank}", ""), service.get(f"here/{1 - rank}", 30)
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
time.sleep(3)
"""
    assert joined(code) == [([], 0), ([], -signal.SIGTERM)]


@pytest.mark.slow
def test_process_that_does_not_come():
    """An error that says where they were to meet."""
    address = free_address()
    alone = (
        "from ncclsync.compat.coordination import CoordinationService as Service\n"
        f"try:\n    Service({address!r}, 0, 2, join_s=2, heartbeat_s=3)\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", alone]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert f"NcclSyncError Expected 2 processes to meet at {address}, within 2 s. Received: " in done.stdout
