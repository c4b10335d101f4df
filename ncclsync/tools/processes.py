"""Join the processes that a launcher has started for a command."""

import sys

from ncclsync.communicator.joining import peers_of
from ncclsync.communicator.peers import Peers
from ncclsync.communicator.processes import Process, find_process
from ncclsync.communicator.timeouts import DEFAULT_TIMEOUT_S


def join() -> Peers:
    """Return the peers of this process, one of several that a launcher has started. Collective when first called.

    Raises:
        NcclSyncError: they cannot be joined.
    """
    process = find_process()
    assert process is not None
    return peers_of(process, DEFAULT_TIMEOUT_S)


def tell_of(error: Exception, process: Process, name: str) -> None:
    """Print why a command cannot join its processes: once on each host."""
    if process.local_rank == 0:
        print(f"{name}: process {process.rank}: {error}", file=sys.stderr, flush=True)
