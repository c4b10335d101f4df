"""What `doctor` makes of several processes: of which problems, and what differs between them."""

import dataclasses
import io

import pytest
from rich.console import Console

from ncclsync.communicator import messages
from ncclsync.tools.doctor.facts import ERROR, WARNING, AllReduce, Host, Problem, ProcessFacts, Report, from_json
from ncclsync.tools.doctor.processes import differences, judged, merged, must_be_alike
from ncclsync.tools.doctor.screen import render

VERSIONS = {"ncclsync": "0.1.0", "TensorFlow": "2.21.0", "NCCL": "2.27.5", "CUDA": None}


def process(rank, host="a", backend="cpu", problems=(), settings=(), **versions):
    """A process as it describes itself."""
    devices = (f"{'GPU' if backend == 'nccl' else 'CPU'}:0",)
    return ProcessFacts(rank, host, backend, devices, VERSIONS | versions, dict(settings), tuple(problems))


def test_what_is_alike_is_no_problem():
    """Nor is what no process has."""
    assert list(differences([process(0), process(1, "b")])) == []


@pytest.mark.parametrize(
    ("backend", "versions", "severity", "remedy"),
    [
        ("cpu", {"TensorFlow": "2.20.0"}, ERROR, "pip install 'tensorflow==2.21.0'"),
        ("cpu", {"ncclsync": "0.0.9"}, ERROR, "Install ncclsync 0.1.0 on all hosts, from the same clone: "),
        ("cpu", {"NCCL": "2.26.2"}, WARNING, "nvidia-nccl-cu12==2.27.5"),
        ("nccl", {"NCCL": "2.26.2"}, ERROR, "nvidia-nccl-cu12==2.27.5"),
        ("nccl", {"CUDA": "12.5"}, WARNING, "Install CUDA 12.5 on all hosts."),
    ],
)
def test_versions_differ(backend, versions, severity, remedy):
    """Each version with who has it; an error where the processes could not train together."""
    (found,) = differences([process(0, backend=backend), process(1, "b", backend=backend, **versions)])
    ((name, version),) = versions.items()
    assert (found.severity, found.code) == (severity, f"processes-{name}")
    assert f"{VERSIONS[name] or 'none'} in process 0 on a; {version} in process 1 on b" in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(("backend", "severity"), [("cpu", WARNING), ("nccl", ERROR)])
def test_nccl_settings_differ(backend, severity):
    """Ranks of NCCL that choose differently may wait for each other forever."""
    some = [process(rank, f"h{rank}", backend, settings={"NCCL_ALGO": "Ring"}) for rank in range(5)]
    (found,) = differences([*some, process(5, "h5", backend)])
    assert found.severity == severity
    assert "Ring in process 0 on h0, process 1 on h1, process 2 on h2 and 2 more; not set in process 5" in found.text
    assert "mpirun -x NCCL_ALGO" in found.remedy


def test_processes_tell_each_other_plain_data():
    """What is written is read as it was."""
    problems = [Problem("this", "That is wrong.", "Mend it.")]
    told = process(1, "b", "nccl", problems, {"NCCL_ALGO": "Ring"}, Keras="3.15.1")
    assert from_json(ProcessFacts, messages.read(messages.written(dataclasses.asdict(told)))) == told


def test_another_version_of_ncclsync_is_understood():
    """One that says less, or more: its version is what differs, and what mends it is said."""
    problem = {"severity": ERROR, "text": "That is wrong."}
    less = {"rank": 1, "host": "b", "versions": {"ncclsync": "0.0.9"}, "problems": [problem]}
    more = {**dataclasses.asdict(process(2, "c")), "power_w": 3, "problems": [{"text": "This.", "who": 1}]}
    everyone = [process(0), from_json(ProcessFacts, less), from_json(ProcessFacts, more)]
    found = {one.code: one for one in differences(everyone)}
    assert "0.0.9 in process 1 on b" in found["processes-ncclsync"].text
    assert "Install ncclsync 0.1.0" in found["processes-ncclsync"].remedy
    assert [one.text for one in merged(everyone)] == ["process 1 on b: That is wrong.", "process 2 on c: This."]
    console = Console(file=io.StringIO(), width=110)
    host = Host("3.11.7", "python", "0.1.0", "ncclsync")
    console.print(render(judged(Report(host, (), ()), [], everyone)))
    assert "0.0.9" in console.file.getvalue()


def test_what_may_differ():
    """Names of a host's own interfaces and files, and what is printed."""
    alike = ("NCCL_ALGO", "NCCL_IB_DISABLE", "NCCLSYNC_GPU_EVENTS", "XLA_FLAGS", "TF_DETERMINISTIC_OPS")
    assert all(map(must_be_alike, alike))
    assert not any(map(must_be_alike, ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "TF_GPU_THREAD_MODE")))
    assert not any(map(must_be_alike, ("NCCLSYNC_JOINED", "NCCLSYNC_PROGRESS")))  # each process has its own


def test_backends_differ():
    """A process that sees no GPU cannot train with those that do; one without a backend has a problem of its own."""
    (found,) = differences([process(0, backend="nccl"), process(1, "b"), process(2, "c", None)])
    assert (found.severity, found.code) == (ERROR, "processes-backend")
    assert "nccl in process 0 on a; cpu in process 1 on b." in found.text
    assert list(differences([process(0, backend="nccl"), process(1, "b", None)])) == []


def test_problems_are_told_once():
    """What all have as it is, what some have with their names."""
    all_have, one_has = (Problem(name, f"{name} is wrong.", "Mend it.") for name in ("this", "that"))
    found = list(merged([process(0, problems=[all_have]), process(1, "b", problems=[all_have, one_has])]))
    assert [one.text for one in found] == ["this is wrong.", "process 1 on b: that is wrong."]


@pytest.mark.parametrize(("backend", "way", "remedy"), [("cpu", "TCP", "MASTER_ADDR"), ("nccl", "NCCL", "NCCL_SOCKET")])
def test_a_wrong_sum_is_an_error(backend, way, remedy):
    """On the screen too, with all processes."""
    host = Host("3.11.7", "python", "0.1.0", "ncclsync")
    report = Report(host, (), ())
    joint = AllReduce(backend, 2, 8, error="process 1 on b: Expected 3. Received: 4", kind="wrong")
    found = judged(report, [], [process(0), process(1, "b")], joint)
    assert not found.healthy and "2 processes on 2 hosts." in found.summary
    (problem,) = found.problems
    assert problem.code == "joint-all-reduce-wrong" and "process 1 on b: Expected 3" in problem.text
    assert remedy in problem.remedy
    console = Console(file=io.StringIO(), width=110)
    console.print(render(found))
    text = " ".join(console.file.getvalue().split())
    assert f"over all 2 processes, by {way}, 2 ranks × 8 numbers: wrong numbers" in text
    assert "1 b CPU:0 ncclsync 0.1.0, TensorFlow 2.21.0, NCCL 2.27.5" in text
    assert len(found.as_dict()["processes"]) == 2
