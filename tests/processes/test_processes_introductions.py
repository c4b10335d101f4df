"""Who introduces the processes to each other: launchers and hosts as they are met in clusters."""

import re
import subprocess
import sys

import pytest
from processes import LAUNCHERS, ROOT, SCRIPTS, environment, free_port, variables_of

pytestmark = pytest.mark.slow

SCRIPT = [sys.executable, str(SCRIPTS / "meeting.py")]
# A store as torchrun's: the same calls, by files.
STORE = """
import pathlib, time
class TCPStore:
    def __init__(self, host, port, world_size, is_master, timeout):
        assert (host, port, is_master) == ("left", 29400, False), (host, port)
    def set(self, name, value):
        draft = pathlib.Path({folder!r}, name + ".new")
        draft.write_text(value)
        draft.rename(draft.with_suffix(""))
    def get(self, name):
        while not (path := pathlib.Path({folder!r}, name)).exists():
            time.sleep(0.1)
        return path.read_bytes()
"""


def slurm(rank, home, **more):
    """What srun tells a process of two, each alone on its host."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "left,right"}
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
    return {**step, **own, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "HOME": str(home), **more}


@pytest.fixture
def meeting(request):
    """A function that starts a process for each of some variables, there if hosts are given; returns what they say."""
    started = []

    def meet(each, hosts=None, wait_s=20):
        for rank, variables in enumerate(each):
            command = [*SCRIPT, str(wait_s)]
            line = hosts.on(rank % 2, *command) if hosts else command
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(line, env=environment(**variables), **pipes))
        return [one.communicate(timeout=100)[0] for one in started]

    yield meet
    for one in started:
        one.kill()
        one.wait()


def check_met(said, names="left, right"):
    """All have met all."""
    for rank, words in enumerate(said):
        assert f"[{rank}] met {names}: 3" in words, said


def debian(hosts):
    """Let each host's own name be 127.0.1.1 there, as Debian and Ubuntu do."""
    for i, (table, name) in enumerate(zip(hosts.tables, ("left", "right"), strict=True)):
        other = f"10.77.0.{2 - i} {('right', 'left')[i]}"
        table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{other}\n")


def test_master_that_calls_itself_localhost(hosts, meeting):
    """As Kubeflow does."""
    each = [variables_of("RANK", rank, 29400, "left" if rank else "localhost") for rank in range(2)]
    check_met(meeting(each, hosts))


@pytest.mark.parametrize("by", ["RANK", "TF_CONFIG"])
def test_name_that_is_loopback_on_its_own_host(hosts, meeting, by):
    """Process 0 listens everywhere, without a default route, too."""
    debian(hosts)
    check_met(meeting([variables_of(by, rank, 29400, "left") for rank in range(2)], hosts))


def test_mpirun_where_names_are_loopback(hosts):
    """On both hosts, and on one."""
    debian(hosts)
    for options, names in (
        (["--prtemca", "plm_ssh_agent", str(hosts.agent), "-H", "left,right", "-N", "1"], "left, right"),
        ([], "left, left"),
    ):
        line = hosts.on(0, *LAUNCHERS["mpirun"](2, *options), *SCRIPT, 30)
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=100)
        for rank in range(2):
            assert f"[{rank}] met {names}: 3" in done.stdout, done


def test_name_with_several_addresses(hosts, meeting):
    """Of IPv4 and IPv6, of two networks: some lead nowhere."""
    for table in hosts.tables:
        table.write_text("127.0.0.1 localhost\n10.99.0.1 left\nfd00::1 left\n10.77.0.2 left\n10.77.0.1 left\n")
    check_met(meeting([variables_of("RANK", rank, 29400, "left") for rank in range(2)], hosts))


def test_srun(hosts, meeting, tmp_path):
    """By a file in the user's home, or by a secret that all have; the file is gone when they have met."""
    debian(hosts)
    (tmp_path / ".ncclsync.7.0").write_text('[["10.99.0.1"], 1, "of a run before"]')
    check_met(meeting([slurm(rank, tmp_path) for rank in range(2)], hosts))
    assert not [*tmp_path.glob(".ncclsync*")]


def test_srun_with_a_secret(hosts, meeting, tmp_path):
    """Hosts that share no folder."""
    secret = {"NCCLSYNC_SECRET": "a secret of this job"}
    check_met(meeting([slurm(rank, tmp_path / str(rank), **secret) for rank in range(2)], hosts))


def test_store_of_torchrun(hosts, meeting, tmp_path):
    """Of which a child asks, at its own port: none beside it is taken."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "distributed.py").write_text(STORE.format(folder=str(tmp_path)))
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1"}
    given["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    check_met(meeting([{**variables_of("RANK", rank, 29400, "left"), **given} for rank in range(2)], hosts))
    assert [path.name for path in tmp_path.glob("ncclsync*")] == ["ncclsync.run.1"]


def test_store_without_torch(meeting, tmp_path):
    """Is an error that says what to install."""
    (tmp_path / "torch.py").write_text("raise ImportError('planted')\n")
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for words in meeting([{**variables_of("RANK", rank, free_port()), **given} for rank in range(2)], wait_s=10)[1:]:
        assert re.search(r"\[1\] NcclSyncError after \d+ s: .*torchrun's store.*Install torch in this Python", words), (
            words
        )


def test_without_pyzmq(meeting, tmp_path):
    """Is an error that says what to install."""
    (tmp_path / "zmq.py").write_text("raise ImportError('planted')\n")
    given = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for rank, words in enumerate(meeting([{**variables_of("RANK", i, free_port()), **given} for i in range(2)])):
        said = rf"\[{rank}\] NcclSyncError after \d+ s: Expected pyzmq.*pip install -e '.*\[hosts\]'"
        assert re.search(said, words), words


def test_two_jobs_on_one_port(meeting):
    """The second job's process 0 cannot listen, and its others are not the first job's."""
    port = free_port()
    first = [variables_of("RANK", rank, port) for rank in range(2)]
    second = [{**one, "NCCLSYNC_SECRET": "a secret of the second"} for one in first]
    said = meeting([*first, *second], wait_s=12)
    met = [i for i in (0, 1, 2, 3) if "met" in said[i].replace("meeting", "")]
    assert met in ([0, 1], [2, 3]), said
    refused = [said[i] for i in range(4) if i not in met]
    assert "give each job a port of its own" in refused[0] and "process 0 not arrived" in refused[1], said
