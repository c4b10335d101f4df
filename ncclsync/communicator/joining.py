"""Join the processes that a launcher has started, by a service of process 0's."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import TYPE_CHECKING

from ncclsync.communicator.introductions import introduction
from ncclsync.communicator.messages import MessageError
from ncclsync.communicator.peers import Peers, end_with_process
from ncclsync.communicator.processes import Process, claim
from ncclsync.errors import NcclSyncError, NcclTimeoutError, install

if TYPE_CHECKING:
    from ncclsync.communicator.service import Service

_LEAVE_S = 8.0  # how long a process that ends waits for the others to end, before it makes mpirun kill a silent one

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
            found = Peers(_services[process], process.rank, process.size, timeout_s, process.if_left_over)
        except MessageError:
            raise
        except NcclTimeoutError as error:
            words = f"{error.last_error.removesuffix(process.if_left_over).rstrip('. ')}. {process.if_left_over}"
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
    try:
        from ncclsync.communicator.service import Service
    except ImportError as error:
        raise NcclSyncError(
            f"Expected pyzmq, by which {process.size} processes are joined. Received: none ({error}). Install it on "
            f"all hosts: {install('hosts')}"
        ) from None
    by = introduction(process)._replace(if_left_over=process.if_left_over)
    return Service(process.rank, process.size, by, join_s=timeout_s)


def _let_mpirun_end(peers: Peers) -> None:
    """End this process by an error, since mpirun would wait for a silent one; others get time to save."""
    until = time.monotonic() + _LEAVE_S
    while time.monotonic() < until and len(peers.gone()) < peers.size - 1:
        time.sleep(0.25)
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).quick_exit(1)
