"""Find out whether a launcher has started this process as one of several.

Open MPI's mpirun, Slurm's srun, torchrun and what sets the same variables, and TF_CONFIG give each process its number
and how many there are. The first of them that names several processes, in this order, counts. Others must agree with
it, except for launchers that have started each other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from ncclsync.errors import NcclSyncError

# By launcher: the variables of the number, the count, and the number and the count on this host.
_VARIABLES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}
_PMI = ("PMI_RANK", "PMI_SIZE")  # of MPICH, Intel MPI and others; srun sets them, too
_JOINED = "NCCLSYNC_JOINED"  # which process has joined, and which job
# What processes of one job share, and others do not, by their launcher. One around it may tell some of them alone.
OF_A_RUN = {
    "Open MPI": ("PMIX_NAMESPACE",),
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
}
_OF_ALL = ("MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")
_APART = (
    "For processes that are to train apart from each other, or where such variables are left over, as in a shell or a "
    "notebook, unset them, or write processes=False"
)
_WITHIN = "TORCHELASTIC_RUN_ID"  # torchrun itself sets it, for what it starts


@dataclasses.dataclass(frozen=True)
class Process:
    """Describe one of several processes.

    Attributes:
        launcher: "Open MPI", "Slurm", "torchrun" or "TF_CONFIG".
        rank: its number.
        size: how many there are.
        local_rank: its number on this host.
        local_size: how many there are on this host; None if the launcher does not say.
        address: "host:port", where process 0 can be reached; None if the launcher does not say.
        reason: the variables that say so.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None
    address: str | None
    reason: str

    @property
    def if_left_over(self) -> str:
        """Return what to do if the other processes were not started, for messages."""
        names = ", ".join(_VARIABLES.get(self.launcher, ("TF_CONFIG",))[:2])
        return f"Where {self.launcher} has not started this process, unset {names}, or write processes=False"


def find_process(environment: Mapping[str, str] | None = None) -> Process | None:
    """Return what a launcher gives this process, by `environment` or its own; None if it is the only one.

    Raises NcclSyncError if variables are half set, or contradict each other.
    """
    given = os.environ if environment is None else environment
    several: list[Process] = []
    half_set: NcclSyncError | None = None
    for launcher in (*_VARIABLES, "TF_CONFIG"):
        if not _is_set(launcher, given):
            continue
        try:
            process = _of_tf_config(given["TF_CONFIG"]) if launcher == "TF_CONFIG" else _numbered(launcher, given)
        except NcclSyncError as error:
            half_set = half_set or error
        else:
            several += [process] if process.size > 1 else []  # one process hides no others
    if several:
        return _chosen(several, given)
    if half_set is not None:
        raise half_set
    if given.get("PMI_SIZE", "1") != "1":
        _raise("Open MPI's mpirun, srun or torchrun: no other MPI's processes are joined", _PMI, given)
    return None


def claim() -> None:
    """Join as the process that the launcher has started, and let no child of it do so: it has the variables, too.

    Raises NcclSyncError in such a child.
    """
    names = [name for launcher, own in _VARIABLES.items() for name in (*OF_A_RUN[launcher], own[0])]
    job = " ".join(f"{name}={os.environ[name]}" for name in (*names, *_OF_ALL) if name in os.environ)
    if not job:
        return
    own = str(os.getpid())
    pid, _, before = os.environ.get(_JOINED, "").partition(" ")
    if before == job and pid != own:
        raise NcclSyncError(
            f"Expected process {pid}, which has joined the others ({job}), to be the only one of its number. "
            f"Received: process {own}, which it has started. Write processes=False in a helper script; keep a "
            "worker that imports the training script from building the model, by if __name__ == '__main__'"
        )
    os.environ[_JOINED] = f"{own} {job}"


def _is_set(launcher: str, given: Mapping[str, str]) -> bool:
    if launcher == "TF_CONFIG":
        return bool(given.get("TF_CONFIG"))
    names = _VARIABLES[launcher][:2]
    # sbatch sets SLURM_PROCID in the batch script as well, of which there is one; srun alone sets the step's.
    return (all if launcher == "Slurm" else any)(name in given for name in names)


def _chosen(several: Sequence[Process], given: Mapping[str, str]) -> Process:
    """Return the process as the launcher sees it that has started it last."""
    by_name = {process.launcher: process for process in several}
    if "torchrun" in by_name and _WITHIN in given:  # whatever has started torchrun has other numbers
        return by_name["torchrun"]
    chosen = several[0]
    for other in several[1:]:
        if chosen.launcher == "Open MPI" and other.launcher == "Slurm":  # whose srun has started mpirun's daemons
            continue
        if (other.rank, other.size) != (chosen.rank, chosen.size):
            raise NcclSyncError(
                f"Expected one number for this process. Received: {chosen.rank} of {chosen.size} from "
                f"{chosen.launcher} ({chosen.reason}), and {other.rank} of {other.size} from {other.launcher} "
                f"({other.reason}). Unset the variables of that which has not started it. {_APART}"
            )
    return chosen


def _numbered(launcher: str, given: Mapping[str, str]) -> Process:
    names = _VARIABLES[launcher]
    rank, size = (_number(launcher, name, given) for name in names[:2])
    local_rank = _number(launcher, names[2], given, 0 if launcher == "torchrun" else None)
    local_size = _local_size(launcher, given)
    if not 0 <= rank < size or not 0 <= local_rank < (local_size or size):
        _raise(f"a rank below the number of processes from {launcher}", names, given)
    address = None
    if "MASTER_ADDR" in given or "MASTER_PORT" in given or launcher == "torchrun":
        port = _number(launcher, "MASTER_PORT", given)
        if not given.get("MASTER_ADDR") or not 0 < port < 1 << 16:
            _raise("MASTER_ADDR and MASTER_PORT, where process 0 is reached,", ("MASTER_ADDR", "MASTER_PORT"), given)
        address = f"{given['MASTER_ADDR']}:{port}"
    elif launcher == "Slurm":
        address = _address_of_step(given)
    return Process(launcher, rank, size, local_rank, local_size, address, _words(names, given))


def _local_size(launcher: str, given: Mapping[str, str]) -> int | None:
    """Return how many processes there are on this host, None if the launcher does not say."""
    name = _VARIABLES[launcher][3]
    if launcher == "Slurm":
        parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in given.get(name, "").split(",")]  # "8(x2),1"
        counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
        node = given.get("SLURM_NODEID", "")
        return counts[int(node)] if node.isdecimal() and int(node) < len(counts) and all(parts) else None
    if given.get(name):
        return _number(launcher, name, given)
    # Jobs of one process on each host may leave it out.
    return 1 if launcher == "torchrun" and "LOCAL_RANK" not in given else None


def _address_of_step(given: Mapping[str, str]) -> str | None:
    """Return the first host of a step of Slurm's, and a port that depends on job and step."""
    # "gpu[07-09,12],cpu1": up to the first comma outside of brackets, and the first number within each.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", given.get("SLURM_STEP_NODELIST", ""))
    job, step = given.get("SLURM_JOB_ID", ""), given.get("SLURM_STEP_ID", "")
    if not (first and job.isdecimal() and step.isdecimal()):
        return None
    host = re.sub(r"\[(\d*)[^\]]*\]", r"\1", first[0])
    return f"{host}:{20000 + (16 * int(job) + int(step)) % 12000}"


def _number(launcher: str, name: str, given: Mapping[str, str], default: int | None = None) -> int:
    text = given.get(name, "")
    if not text.isdecimal() and (text or default is None):
        expected = f"{name} to be a number, since {launcher} sets others of its variables"
        _raise(expected, [name, *_VARIABLES[launcher]], given)
    return int(text) if text else int(default or 0)


def _of_tf_config(text: str) -> Process:
    expected = (
        'TF_CONFIG to be JSON such as {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    )
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        workers = [(kind, i) for kind in ("chief", "worker") for i in range(len(cluster.get(kind, ())))]
        addresses = [str(cluster[kind][i]) for kind, i in workers]
        rank = workers.index((task["type"], int(task["index"])))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NcclSyncError(f"Expected {expected}. Received: {text} ({error}). {_APART}") from None
    hosts = [address.rpartition(":")[0] for address in addresses]
    here = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    reason = f"TF_CONFIG names {len(workers)} workers"
    return Process("TF_CONFIG", rank, len(workers), here.index(rank), len(here), addresses[0], reason)


def _raise(expected: str, names: Iterable[str], given: Mapping[str, str]) -> None:
    raise NcclSyncError(f"Expected {expected}. Received: {_words(names, given)}. {_APART}")


def _words(names: Iterable[str], given: Mapping[str, str]) -> str:
    unique = dict.fromkeys(names)
    return ", ".join(f"{name}={given[name]}" if name in given else f"{name} not set" for name in unique)
