"""Introduce the processes of a job to each other, by the channel that their launcher has already.

Process 0 tells where it listens, and a key that was made for this run; the others find what it has told. There is a
function for each launcher. Where a launcher has no channel, as with variables set by hand, all processes know the
place beforehand, and the key follows from what they share.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import importlib.util
import ipaddress
import json
import logging
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ncclsync.communicator.processes import OF_A_RUN, Process
from ncclsync.errors import NcclSyncError, install

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_SECRET"
_LEAST_SECRET = 16  # characters
_AGAIN_S = 10.0  # until a launcher's channel is asked again, if nobody answers where it has said
_SIOCGIFCONF = 0x8912  # linux/sockios.h
_ADDRESSES = 64  # of IPv4, at most
_PMIX = "PMIX_SERVER_TMPDIR"  # Open MPI makes it on each host for a job's processes there
# They read what process 0 tells, and print it in all.
_BY_MPI = "import sys; from mpi4py import MPI; print(MPI.COMM_WORLD.bcast(sys.stdin.read()), end='')"
_BY_STORE = """
import datetime, sys
from torch.distributed import TCPStore
host, port, name = sys.argv[1:]
store, told = TCPStore(host, int(port), None, False, datetime.timedelta(days=9)), sys.stdin.read()
store.set(name, told) if told else print(store.get(name).decode(), end="")
"""


class Told(NamedTuple):
    """Say where process 0 listens.

    Attributes:
        addresses: names or addresses of its host; it is reached by one of them, at least.
        port: its port.
        key: what the job's processes know, and others not: as far as the launcher's channel keeps it.
    """

    addresses: list[str]
    port: int
    key: str


class Introduction(NamedTuple):
    """Introduce processes to each other.

    Attributes:
        tell: tells the others, in process 0.
        find: returns what process 0 has told; None if it has not yet. May be asked again and again. Raises
            NcclSyncError if it never will.
        waits_for: what is missing as long as it returns None, for messages.
        port: at which process 0 is to listen; 0: any.
        key: what all know already; "": process 0 makes it.
        forget: removes what was told, when all have joined, or this process has given up.
        if_left_over: what to do if the other processes were not started, for messages.
    """

    tell: Callable[[Told], None]
    find: Callable[[], Told | None]
    waits_for: str
    port: int = 0
    key: str = ""
    forget: Callable[[], None] = lambda: None
    if_left_over: str = ""


def introduction(process: Process) -> Introduction:
    """Return how the processes of this one's launcher are introduced. Raises NcclSyncError if they cannot be."""
    named = [os.environ.get(name, "") for name in OF_A_RUN.get(process.launcher, ())]
    run, is_named = ".".join(filter(None, named)), "MASTER_ADDR" in os.environ
    if process.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _by_store(process, run)
    if process.launcher == "Slurm" and not is_named and (process.address is None or not secret()):
        return _by_files([folder / f".ncclsync.{run}" for folder in (pathlib.Path.home(), pathlib.Path.cwd())])
    if process.address is not None:
        return _as_known(process, run or os.environ.get("SLURM_JOB_ID", ""))  # of variables set by hand in such a job
    if process.local_size == process.size and _PMIX in os.environ:
        return _by_files([pathlib.Path(os.environ[_PMIX], f"ncclsync.{run}")])
    return _by_mpi(process)


def secret() -> str:
    """Return the user's secret for the job, which is added to the key; "" if not set. Raises if it is too short."""
    given = os.environ.get(VARIABLE, "")
    if given and len(given) < _LEAST_SECRET:
        raise NcclSyncError(
            f"Expected {VARIABLE} to have at least {_LEAST_SECRET} characters. Received: {len(given)}. Set it for all "
            f"processes by such as: export {VARIABLE}=$(openssl rand -hex 32)"
        )
    return given


def _as_known(process: Process, run: str) -> Introduction:
    """Introduce where all know the place: by RANK, MASTER_ADDR and their like, or TF_CONFIG."""
    host, _, port = str(process.address).rpartition(":")
    # Not the address: a master may call itself localhost.
    shared = f"{run} {port} {process.size} {os.environ.get('TF_CONFIG', '') and process.address}"
    if process.rank == 0 and not secret():
        logger.warning(
            "The key of the processes' connections follows from their port and number: it keeps jobs apart, but for "
            "two that give the same, and not strangers out. In a network that others use, set for all: export "
            "NCCLSYNC_SECRET=$(openssl rand -hex 32)"
        )
    told = Told([host.strip("[]")], int(port), shared)
    return Introduction(lambda told: None, lambda: told, "", told.port, shared)


def _by_files(paths: Sequence[pathlib.Path]) -> Introduction:
    """Introduce by a file that the user alone can read: by mpirun in its folder, by srun in a folder of the user's."""

    written: list[pathlib.Path] = []

    def tell(told: Told) -> None:
        errors = []
        for path in paths:
            try:
                draft = path.with_name(f"{path.name}.new")
                draft.unlink(missing_ok=True)
                draft.touch(0o600, exist_ok=False)  # nobody else's
                draft.write_text(json.dumps(told))
                draft.replace(path)
                written.append(path)
            except OSError as error:
                errors.append(str(error))
        if not written:
            raise NcclSyncError(
                f"Expected to write a file by which the other processes find this one. Received: {'; '.join(errors)}. "
                f"Set {VARIABLE} for all, or let all see a folder"
            )

    def find() -> Told | None:
        for path in paths:
            with contextlib.suppress(OSError, ValueError), path.open() as file:  # else it is not written yet
                if os.fstat(file.fileno()).st_uid == os.geteuid():
                    return Told(*json.load(file))
        return None

    def forget() -> None:
        for path in written:
            path.unlink(missing_ok=True)

    return Introduction(
        tell, find, f"no file {' or '.join(map(str, paths))} of process 0's is seen here", forget=forget
    )


def _by_store(process: Process, run: str) -> Introduction:
    """Introduce by torchrun's own store, of which a child asks: PyTorch is not to be in this process."""
    host, _, port = str(process.address).rpartition(":")
    remedy = "Install torch in this Python, too, or start the processes by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    # It may still have what an earlier process 0 has told: workers start again under the same count of restarts.
    return _by_child([_BY_STORE, host, port, f"ncclsync.{run}"], "torchrun's store", remedy, again_s=_AGAIN_S)


def _by_mpi(process: Process) -> Introduction:
    """Introduce by a broadcast of MPI, in a child; in this process where MPI runs here: it takes no second one."""
    remedy = (
        f"Install mpi4py by: {install('hosts')}; or name a host and a free port of it by: mpirun -x MASTER_ADDR=host "
        "-x MASTER_PORT=29500"
    )
    if process.launcher != "Open MPI" or importlib.util.find_spec("mpi4py") is None:
        raise NcclSyncError(
            f"Expected a way by which {process.size} processes find process 0. Received: none, from "
            f"{process.launcher} ({process.reason}). {remedy}"
        )
    if "mpi4py.MPI" in sys.modules:
        send = sys.modules["mpi4py.MPI"].COMM_WORLD.bcast
        return Introduction(send, functools.cache(lambda: Told(*send(None))), "")
    return _by_child([_BY_MPI], "mpirun's MPI", remedy)


def _by_child(command: Sequence[str], what: str, remedy: str, again_s: float = math.inf) -> Introduction:
    """Introduce by a child that reads what process 0 tells, and prints it in the others.

    If `again_s` seconds later process 0 is not reached, another child asks.
    """
    child: subprocess.Popen[str] | None = None
    found: Told | None = None
    began = -math.inf

    def start(told: str) -> None:
        nonlocal child
        child = subprocess.Popen([sys.executable, "-c", *command], stdin=-1, stdout=-1, text=True)
        with contextlib.suppress(OSError):  # it has ended
            print(told, end="", file=child.stdin)
            assert child.stdin is not None
            child.stdin.close()

    def find() -> Told | None:
        nonlocal began, found
        if child is None or (found is not None and child.poll() is not None and time.monotonic() - began > again_s):
            began = time.monotonic()
            start("")
        assert child is not None and child.stdout is not None
        if child.poll() is not None and not child.stdout.closed:
            with child.stdout as printed:
                try:
                    found = Told(*json.load(printed))
                except ValueError:
                    words = f"Expected {what} to tell where process 0 is. Received: nothing. {remedy}"
                    raise NcclSyncError(words) from None
        return found

    def forget() -> None:
        if child is not None:
            child.kill()

    waits_for = f"{what} has not told where process 0 is"
    return Introduction(lambda told: start(json.dumps(told)), find, waits_for, forget=forget)


def machine() -> str:
    """Return what names this machine, unlike all others; two hosts may have one name."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def here() -> str:
    """Return what names this host: the machine, and which of its networks the process is in, as in a container."""
    return f"{machine()} {os.stat('/proc/self/ns/net').st_ino}"


def own_addresses() -> list[str]:
    """Return this host's addresses, those of networks first."""
    place = array.array("B", bytes(40 * _ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        asked = struct.pack("iL", len(place), place.buffer_info()[0])
        filled, _ = struct.unpack("iL", fcntl.ioctl(any_one, _SIOCGIFCONF, asked))
    found = [socket.inet_ntoa(place[begin + 20 : begin + 24].tobytes()) for begin in range(0, filled, 40)]
    with contextlib.suppress(OSError):  # no IPv6
        for line in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    hosts = [one for one in dict.fromkeys(found) if not ipaddress.ip_address(one).is_link_local]
    return sorted(hosts, key=lambda one: ipaddress.ip_address(one).is_loopback)


def listen(port: int) -> socket.socket:
    """Return a socket that listens at all interfaces, of IPv6, too, at a port; 0: any. Raises NcclSyncError."""
    try:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=512)  # a host without IPv6
    except OSError as error:
        raise NcclSyncError(
            f"Expected process 0 to listen at port {port}. Received: {error}. Another job, or another program, has the "
            "port: give each job a port of its own"
        ) from None
