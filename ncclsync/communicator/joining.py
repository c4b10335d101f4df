"""Join the processes that a launcher has started, by a service of process 0's."""

import ctypes
import functools
import math
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from ncclsync.communicator import messages, timeouts
from ncclsync.communicator.messages import MessageError
from ncclsync.communicator.peers import Peers, end_with_process
from ncclsync.communicator.processes import Process, claim
from ncclsync.communicator.service import Service
from ncclsync.errors import NcclSyncError, NcclTimeoutError, NcclUnavailableError, install

_LEAVE_S = 8.0  # that an ended process gives the others to end as well, if mpirun is to end a silent one
_FOLDER = "PMIX_SERVER_TMPDIR"  # Open MPI makes it on each host for a job's processes there
_BROADCAST = "import sys; from mpi4py import MPI; print(MPI.COMM_WORLD.bcast(sys.stdin.read()), end='')"

_services: dict[Process, Service] = {}
_peers: dict[Process, Peers] = {}


def peers_of(process: Process, timeout_s: float | None) -> Peers:
    """Return what this process knows of the others; joins them when it is first called, which is collective.

    Args:
        process: this one.
        timeout_s: how long to wait for the others; None for no limit.

    Raises NcclSyncError if they cannot be joined.
    """
    claim()
    if process not in _peers:
        try:
            if process not in _services:  # kept if the others do not come in time, and it is tried again
                _services[process] = _service(process, timeout_s)
            found = Peers(_services[process], process.rank, process.size, timeout_s)
        except (MessageError, NcclUnavailableError):
            raise
        except NcclTimeoutError as error:
            words = f"{error.last_error}. {process.if_left_over}"
            raise NcclTimeoutError(error.status, error.call, words, error.status_name, error.during) from error
        except NcclSyncError as error:
            raise NcclSyncError(f"{str(error).rstrip('.')}. {process.if_left_over}") from error

        def end(words: str) -> None:
            found.end(words)
            if process.launcher == "Open MPI" and found.silent():
                _let_mpirun_end(found)

        end_with_process(end)
        _peers[process] = found
    return _peers[process]


def _service(process: Process, timeout_s: float | None) -> Service:
    """Reach process 0 at the address that the launcher names; by mpirun, at one that process 0 chooses."""
    alone = process.local_size == process.size

    def joined(address: str) -> Service:
        return Service(address, process.rank, process.size, join_s=timeout_s or math.inf, on_one_host=alone)

    if process.address is not None:
        return joined(process.address)
    if process.launcher != "Open MPI":
        raise NcclSyncError(
            "Expected MASTER_ADDR and MASTER_PORT, a host and a free port of it where process 0 is reached by the "
            f"others. Received: none of them, from {process.launcher} ({process.reason})"
        )
    service, told = None, ""
    if process.rank == 0:
        # What tells the others the address keeps a secret as well.
        os.environ.setdefault(messages.VARIABLE, secrets.token_hex(32))
        service = joined("127.0.0.1:0" if alone else f"{socket.gethostname()}:0")
        told = f"{service.address} {os.environ[messages.VARIABLE]}"
    if alone and _FOLDER in os.environ:
        path = pathlib.Path(os.environ[_FOLDER], f"ncclsync.{os.environ.get('PMIX_NAMESPACE', '')}")
        told = _told_by_file(path, told, timeout_s)
    else:
        told = _told_by_mpi(told, process, timeout_s)
    address, _, secret = told.partition(" ")  # a secret of the user's may have spaces
    os.environ.setdefault(messages.VARIABLE, secret)
    return service or joined(address)


def _told_by_file(path: pathlib.Path, told: str, timeout_s: float | None) -> str:
    """Return what process 0 tells, `told` there, by a file in a folder that the job's processes on a host share."""
    if told:
        written = path.with_name(f"{path.name}.new")
        written.touch(0o600)
        written.write_text(told)
        written.replace(path)
        return told
    _wait_to_join(lambda slice_s: timeouts.poll(path.exists, slice_s), "process 0 not arrived", timeout_s)
    return path.read_text()


def _told_by_mpi(told: str, process: Process, timeout_s: float | None) -> str:
    """Return what process 0 tells, `told` there, by MPI: in a child, for which this process need not wait."""
    if "mpi4py.MPI" in sys.modules:  # the program's own: MPI takes no second process in its place
        return sys.modules["mpi4py.MPI"].COMM_WORLD.bcast(told)
    child = subprocess.Popen([sys.executable, "-c", _BROADCAST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(told.encode())
        child.stdin.close()
        has_ended = functools.partial(timeouts.poll, lambda: child.poll() is not None)
        _wait_to_join(has_ended, "not all have come", timeout_s)
        found = child.stdout.read().decode()
    finally:
        child.kill()
    if not found:
        raise NcclUnavailableError(
            f"Expected mpi4py, or MASTER_ADDR and MASTER_PORT, to tell {process.size} processes on several hosts where "
            f"process 0 is. Received: neither. Install it: {install('hosts')}; or name a host and a free "
            "port of it by: mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500"
        )
    return found


def _wait_to_join(wait: Callable[[float], bool], late: str, timeout_s: float | None) -> None:
    timeouts.wait(
        wait,
        call="join",
        what=lambda: "the joining of processes",
        timeout_s=timeout_s,
        arrived=lambda: f"{late}. Each has to make towers, and to do so in time",
    )


def _let_mpirun_end(peers: Peers) -> None:
    """End this process by an error, since mpirun would wait for a silent one; others get time to save."""
    until = time.monotonic() + _LEAVE_S
    while time.monotonic() < until and len(peers.gone()) < peers.size - 1:
        time.sleep(0.25)
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).quick_exit(1)
