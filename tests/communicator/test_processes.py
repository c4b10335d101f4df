"""Which launcher has started this process, as one of how many; and how it waits for files of process 0."""

import json
import queue
import threading
import time

import pytest

from ncclsync import NcclSyncError, NcclTimeoutError
from ncclsync.communicator import native
from ncclsync.communicator.peers import Doing, Peers
from ncclsync.communicator.processes import find_process
from ncclsync.errors import ProcessError

service = pytest.importorskip("ncclsync.communicator.service")

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


ONE_BY_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
ONE_BY_MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        (OPEN_MPI, ("Open MPI", 3, 4, 1, 2, None)),
        ({**OPEN_MPI, **TORCHRUN, "RANK": "3", "WORLD_SIZE": "4"}, ("Open MPI", 3, 4, 1, 2, "host:29500")),
        # A launcher of one process hides no other; nor do variables that are half set.
        ({**ONE_BY_SRUN, **TORCHRUN}, ("torchrun", 1, 2, 1, None, "host:29500")),
        ({**ONE_BY_MPIRUN, **STEP}, ("Slurm", 1, 5, 0, 2, "gpu07:20193")),
        ({**ONE_BY_MPIRUN, **TF_CONFIG}, ("TF_CONFIG", 1, 3, 1, 2, "a:1")),
        ({**OPEN_MPI, "RANK": "7"}, ("Open MPI", 3, 4, 1, 2, None)),
        # mpirun's daemons are a step of Slurm's, and torchrun is a task of one.
        ({**OPEN_MPI, **STEP}, ("Open MPI", 3, 4, 1, 2, None)),
        ({**STEP, **TORCHRUN, "TORCHELASTIC_RUN_ID": "1"}, ("torchrun", 1, 2, 1, None, "host:29500")),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "5"}, ("Slurm", 1, 5, 0, 2, "gpu07:20193")),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        (SLURM, ("Slurm", 1, 2, 0, None, None)),
        (STEP, ("Slurm", 1, 5, 0, 2, "gpu07:20193")),
        ({**STEP, "SLURM_STEP_NODELIST": "a,b[1-2]", "SLURM_NODEID": "0"}, ("Slurm", 1, 5, 0, 1, "a:20193")),
        ({**STEP, "SLURM_STEP_NODELIST": "r[1-2]n[03,5]x,b"}, ("Slurm", 1, 5, 0, 2, "r1n03x:20193")),
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
            ("torchrun", 1, 2, 1, None, "host:29500"),  # its own store has the port
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
        ({**ONE_BY_SRUN, "RANK": "0"}, "WORLD_SIZE not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1, PMI_SIZE=2"),
        ({**OPEN_MPI, **TORCHRUN}, "3 of 4 from Open MPI (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4"),
        ({**OPEN_MPI, **TORCHRUN}, "1 of 2 from torchrun (RANK=1, WORLD_SIZE=2"),
        ({**STEP, **TORCHRUN}, "1 of 5 from Slurm (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=5"),
        ({**TORCHRUN, **TF_CONFIG}, "1 of 3 from TF_CONFIG (TF_CONFIG names 3 workers)"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}})}, "TF_CONFIG"),
    ],
)
def test_half_set(variables, named):
    """An error names the variables, of both launchers where they disagree, and how to train apart."""
    with pytest.raises(NcclSyncError) as caught:
        find_process(variables)
    assert named in str(caught.value) and "unset them, or write processes=False" in str(caught.value)


@pytest.fixture(autouse=True)
def all_cores(monkeypatch):
    """Processes that join share the host's cores: here they are none."""
    monkeypatch.setattr(native, "_share", 0)


class Hub:
    """What process 1 of 2 knows of process 0, which gives what it gives, and has given those of `numbers` already."""

    def __init__(self):
        self.notices, self.said, self.numbers = queue.SimpleQueue(), [], ()
        self.inbox = [queue.SimpleQueue() for _ in range(2)]

    def give(self, number, value):
        awaited = service.Awaited()
        awaited.bring([value, value])
        return awaited

    def who(self, number, wait_s):
        return [0] if number in self.numbers else []

    def close(self):
        pass

    def tell(self, notice, wait_s):
        self.said += [notice["ended"]] if "ended" in notice else []

    def silence(self):
        return [0.0, 0.0]


def others():
    """Process 1 of 2, to which the test tells what it hears, after it has joined."""
    return Peers(Hub(), 1, 2, 5)


def test_files_are_waited_for_one_by_one():
    """Until process 0 has written as many since the processes met, or has gone on; not longer if it then ends."""
    peers = others()
    waiting = [threading.Thread(target=peers.wait_for_file, args=(60,)) for _ in range(2)]
    for number, thread in enumerate(waiting, start=1):
        thread.start()
        peers.hear(files=(0, 9))  # before they met
        peers.hear(files=(1, number - 1))
        thread.join(0.05)
        assert thread.is_alive()
        peers.hear(files=(1, number))
        thread.join(60)
        assert not thread.is_alive()
    peers.hear(files=(1, 4))
    peers.hear(files=(0, 1))  # late
    for _ in range(2):  # written before
        peers.wait_for_file(60)
    peers.service.numbers = (2,)
    peers.wait_for_file(60)  # process 0 does not write it
    peers.exchange(None, "", 60)
    peers.hear(files=(2, 1), ended="has ended")
    peers.wait_for_file(60)
    with pytest.raises(ProcessError, match=r"process 0 .*has ended"):
        peers.wait_for_file(60)
    peers.wait_for_file(60)  # nobody writes it any more


def test_who_has_not_joined_is_soon_said(monkeypatch, caplog):
    """Once, before the limit, with what to do where the variables of a job are left over."""
    hub, process = Hub(), find_process(TORCHRUN)
    monkeypatch.setattr(hub, "give", lambda number, value: service.Awaited())
    monkeypatch.setattr(hub, "check_reached", lambda silence_s: None, raising=False)
    monkeypatch.setattr(hub, "numbers", ())
    monkeypatch.setattr("ncclsync.communicator.timeouts.LATE_S", 0.1)
    with pytest.raises(NcclTimeoutError):
        Peers(hub, 1, 2, 0.5, process.if_left_over)
    (said,) = [one.getMessage() for one in caplog.records]
    assert "process 0 not arrived" in said and "it is given up after 0.5 s" in said
    assert "Where torchrun has not started this process, unset RANK, WORLD_SIZE, or write processes=False" in said


def test_news_reach_who_joins_the_others_at_last(monkeypatch):
    """An attempt before took notices with it."""
    hub, late = Hub(), service.Awaited()
    with monkeypatch.context() as patched, pytest.raises(NcclTimeoutError):
        patched.setattr(hub, "give", lambda number, value: late)
        patched.setattr(hub, "check_reached", lambda silence_s: None, raising=False)
        Peers(hub, 1, 2, 0.1)
    peers = Peers(hub, 1, 2, 5)
    heard = []
    monkeypatch.setattr(peers, "hear", lambda **notice: heard.append(notice))
    for rank in range(50):
        hub.notices.put({"rank": rank})
        time.sleep(0.001)
    deadline = time.monotonic() + 5
    while len(heard) < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(notice["rank"] for notice in heard) == [*range(50)]


def test_a_file_that_does_not_come():
    """The message claims no more than that: what processes have joined goes on."""
    with pytest.raises(NcclTimeoutError, match=r"has not within 0\.1 s: process 0 on \S+ has not written it$"):
        others().wait_for_file(0.1)


def test_a_file_that_nobody_writes():
    """Ends the wait in time."""
    with pytest.raises(NcclTimeoutError, match=r"a file that process 0 writes.*process 0 .*has not written it"):
        others().wait_for_file(0.05)


def test_processes_that_fail_together():
    """Raise what is their own alone; a failure after they have met again is one for the other, too."""
    peers = others()
    peers.report("ValueError: pruned")
    peers.hear(failures=1, words="ValueError: pruned")
    peers.check("the next step")
    peers.exchange(None, "", 60)
    peers.hear(failures=2, words="ValueError: other")
    with pytest.raises(ProcessError, match=r"process 0 .*: ValueError: other"):
        peers.check("the next step")
    peers.check("the next step")


def test_an_end_right_after_a_failure_says_both():
    """The others may hear of both at once; once they have met, the failure is known, and not said again."""
    peers = others()
    peers.end("has ended")
    peers.report("ValueError: pruned")
    peers.end("has ended")
    peers.end("has ended: ValueError: pruned")  # nobody has caught it
    peers.exchange(None, "", 60)
    peers.end("has ended")
    first, *said, last = peers.service.said
    assert said == ["has ended, after ValueError: pruned", "has ended: ValueError: pruned"]
    assert first == last == "has ended"


def test_a_variable_written_in_one_process_is_named():
    """And not the collective that was to send it."""
    sends = "broadcast (dense/kernel:0) of 20 × float32, 0"
    steps, writes = Doing("`fit`, at epoch 2", 1, "4 abc", "a step"), Doing("`fit`, at epoch 2", 0, "", sends)
    peers = others()
    peers.hosts = ["", ""]
    assert peers.difference([steps, writes]) == (
        "Expected all processes to write variables alike. Received: dense/kernel, written in process 1 (in `fit`, at "
        "epoch 2), not in process 0. Write it in all, as load_weights does"
    )
    other = writes._replace(text=sends.replace("20", "40"))
    assert "Let all build the same model" in peers.difference([writes, other])
