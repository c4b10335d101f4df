"""Which launcher has started this process, as one of how many."""

import json

import pytest

from ncclsync import NcclSyncError
from ncclsync.communicator.processes import find_process

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
# As srun 22.05 sets them in the tasks of a step.
STEP = {**SLURM, "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_STEP_TASKS_PER_NODE": "1(x3),2", "SLURM_JOB_ID": "12"}
STEP = {**STEP, "SLURM_STEP_NUM_TASKS": "5", "SLURM_NODEID": "3", "SLURM_STEP_ID": "1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
CLUSTER = {"chief": ["a:1"], "worker": ["a:2", "b:1"]}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        (OPEN_MPI, ("Open MPI", 3, 4, 1, 2, None)),
        ({**OPEN_MPI, **TORCHRUN}, ("Open MPI", 3, 4, 1, 2, "host:29500")),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        (SLURM, ("Slurm", 1, 2, 0, None, None)),
        (STEP, ("Slurm", 1, 5, 0, 2, "gpu07:20193")),
        ({**STEP, "SLURM_STEP_NODELIST": "a,b[1-2]", "SLURM_NODEID": "0"}, ("Slurm", 1, 5, 0, 1, "a:20193")),
        ({**STEP, "MASTER_ADDR": "h", "MASTER_PORT": "29500"}, ("Slurm", 1, 5, 0, 2, "h:29500")),
        ({**STEP, "SLURM_NODEID": "4"}, ("Slurm", 1, 5, 0, None, "gpu07:20193")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # in the batch script
        (TORCHRUN, ("torchrun", 1, 2, 1, None, "host:29500")),
        # A job that starts one on each host may leave out their numbers there.
        (
            {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"},
            ("torchrun", 1, 2, 0, 1, "host:29500"),
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, ("torchrun", 1, 2, 1, 2, "host:29500")),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("torchrun", 1, 2, 1, None, "host:29501"),  # its own store has the port
        ),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, None),
        (TF_CONFIG, ("TF_CONFIG", 1, 3, 1, 2, "a:1")),
        ({"TF_CONFIG": ""}, None),
    ],
)
def test_launchers(variables, expected):
    """Open MPI, Slurm, torchrun, TF_CONFIG, in this order; one process is none of several."""
    process = find_process(variables)
    if expected is None:
        assert process is None
        return
    found = (*(process.launcher, process.rank, process.size, process.local_rank, process.local_size), process.address)
    assert found == expected
    assert any(name in process.reason for name in variables)


@pytest.mark.parametrize(
    "variables, named",
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4, OMPI_COMM_WORLD_SIZE=4"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK not set, OMPI_COMM_WORLD_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE=x"),
        ({"RANK": "0"}, "WORLD_SIZE not set"),
        ({**TORCHRUN, "MASTER_PORT": "no"}, "MASTER_PORT=no"),
        ({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}, "MASTER_PORT not set"),
        ({**TORCHRUN, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID="),
        ({"TF_CONFIG": "{"}, "TF_CONFIG to be JSON"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}})}, "TF_CONFIG"),
    ],
)
def test_half_set(variables, named):
    """An error names the variables, and how to train apart."""
    with pytest.raises(NcclSyncError) as caught:
        find_process(variables)
    assert named in str(caught.value) and "processes=False" in str(caught.value)
