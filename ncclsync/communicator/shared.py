"""Share NCCL's communicators among all that train on the same GPUs in this process.

A communicator takes hundreds of megabytes of each GPU, and two of them on one GPU may wait for each other for ever. So
there is one for each set of GPUs and options. In one process the last user's `leave` closes it. If the last user is
only gone, it is kept for the next one for `KEPT_S`, until somebody asks for another communicator or the process ends:
the garbage collector never waits for a GPU. That of several processes stays until the process ends.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ncclsync.communicator.nccl import NcclCommunicator
from ncclsync.communicator.peers import Peers
from ncclsync.errors import NcclSyncError

logger = logging.getLogger("ncclsync")

KEPT_S = 30.0  # after its last user is gone: a notebook's cell that runs again, or the next fold, takes it over
_EXIT_WAIT_S = 5.0  # how long the end of the process waits for each GPU's own work

_lock = threading.RLock()  # held while GPUs are joined: who asks for the same ones waits for these
_open: dict[tuple[Any, ...], NcclCommunicator] = {}
_waiting: list[int] = []  # processes of which a thread waits for communicators that nobody takes over: a fork has none


def share(user: Any, devices: Sequence[int], *, peers: Peers | None, on_host: bool, **options: Any) -> NcclCommunicator:
    """Return the communicator of these GPUs, joined now or before; `user` uses it until it `leave`s, or is gone.

    Collective with several processes, which ask for the same ones in the same order. Raises as `NcclCommunicator`.

    Args:
        user: is told of failures; see `Communicator.users`.
        devices, peers, options: of `NcclCommunicator`.
        on_host: of `NcclCommunicator.launcher`.
    """
    # A forked child has none: what its parent has is of no use to it.
    key = (os.getpid(), tuple(devices), None if peers is None else id(peers), on_host, *sorted(options.items()))
    with _lock:
        close_unused(but=key)
        communicator = _open.get(key)
        if communicator is None:
            communicator = NcclCommunicator(devices, peers=peers, **options)
            communicator.launcher(on_host=on_host)
            _open[key] = communicator
        communicator.reopen()
        communicator.users.add(user)
        weakref.finalize(user, _user_is_gone).atexit = False
        return communicator


def _user_is_gone() -> None:
    """Close, later, in another thread, what nobody uses then. For the garbage collector: takes no lock."""
    if (process := os.getpid()) not in _waiting:
        _waiting.append(process)
        with contextlib.suppress(RuntimeError):  # Python starts no thread any more: `_end` closes all
            _thread.start_new_thread(_close_later, ())


def _close_later() -> None:
    time.sleep(KEPT_S)
    _waiting.clear()
    close_unused()


def leave(user: Any, communicator: Any) -> None:
    """Let a user no longer use a communicator; close it if that was the last one of one process. Idempotent.

    Blocks while it closes. That of several processes stays; see `close_unused`.
    """
    with _lock:
        communicator.users.discard(user)
        found = [key for key, one in _open.items() if one is communicator]
        if not found:
            communicator.close()
        elif not communicator.users and communicator.peers is None:
            del _open[found[0]]
            communicator.close()


def close_unused(but: tuple[Any, ...] | None = None) -> None:
    """Close the communicators that nobody uses any more, except that of a key.

    Those of several processes stay: which user is gone depends on the garbage collector of each process, and the end is
    collective.
    """
    with _lock:
        for key in [key for key, one in _open.items() if key != but and not one.users and one.peers is None]:
            communicator = _open.pop(key)
            if key[0] != os.getpid():
                continue
            try:
                communicator.close()
            except NcclSyncError:  # who asks for other GPUs has not caused it
                logger.exception("A communicator that nobody uses any more has not ended well")


def _end() -> None:
    """Close all with the process, which frees what does not end at once."""
    for communicator in _open.values():
        communicator.users.clear()
        communicator.timeout_s = min(communicator.timeout_s or _EXIT_WAIT_S, _EXIT_WAIT_S)
    with contextlib.suppress(RuntimeError):  # Python starts no thread any more, such as that of an abort
        close_unused()


atexit.register(_end)
