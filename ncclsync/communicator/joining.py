"""Join the processes that a launcher has started: by MPI, or by a service of process 0's."""

from ncclsync.communicator import mpi
from ncclsync.communicator.messages import MessageError
from ncclsync.communicator.peers import Peers, ServicePeers, end_with_process
from ncclsync.communicator.processes import Process, claim
from ncclsync.communicator.service import KeyService
from ncclsync.errors import NcclSyncError

_FOR_EVER_S = 7 * 86400.0

_peers: dict[Process, Peers] = {}


def peers_of(process: Process, timeout_s: float | None) -> Peers:
    """Return what this process knows of the others; joins them when it is first called, which is collective.

    Args:
        process: this one.
        timeout_s: how long to wait for the others; None for no limit.

    Raises NcclSyncError if they cannot be joined.
    """
    if process.launcher == "Open MPI":
        return mpi.peers(timeout_s)
    if process.address is None:
        raise NcclSyncError(
            "Expected MASTER_ADDR and MASTER_PORT, a host and a free port of it where process 0 is reached by the "
            f"others. Received: none of them, from {process.launcher} ({process.reason})"
        )
    claim()
    if process not in _peers:
        rank, size, alone = process.rank, process.size, process.local_size == process.size
        try:
            service = KeyService(process.address, rank, size, join_s=timeout_s or _FOR_EVER_S, on_one_host=alone)
            found = ServicePeers(service, rank, size, timeout_s)
        except MessageError:
            raise
        except NcclSyncError as error:
            raise NcclSyncError(f"{str(error).rstrip('.')}. {process.if_left_over}") from error
        end_with_process(found.end)
        _peers[process] = found
    return _peers[process]
