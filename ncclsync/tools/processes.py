"""Join the processes that a launcher has started for a command."""

import functools
import sys

from ncclsync.communicator.mpi import Peers, check_joins, peers
from ncclsync.communicator.processes import Process


def join(process: Process) -> Peers:
    """Return the peers of this process, as the launcher reports it; ranks are the launcher's. Collective.

    Raises:
        NcclUnavailableError: mpi4py is missing, or its MPI does not see as many processes as the launcher has started.
    """
    check_joins(process)
    return peers()


def tell_of(error: Exception, process: Process, name: str) -> None:
    """Print why a command cannot join its processes: once on each host."""
    if process.local_rank == 0:
        print(f"{name}: process {process.rank}: {error}", file=sys.stderr, flush=True)


@functools.cache
def mpi_versions() -> dict[str, str]:
    """Return the versions of mpi4py, and of the MPI that it has loaded; mpi4py must be there."""
    import mpi4py
    from mpi4py import MPI

    first = MPI.Get_library_version().partition("\n")[0]
    return {"mpi4py": mpi4py.__version__, "MPI": first.partition(",")[0].rstrip("\0 ")}
