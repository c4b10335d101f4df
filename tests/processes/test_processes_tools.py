"""`doctor` and `bench all-reduce` in several processes: process 0 speaks for all."""

import json
import os
import subprocess
import sys

import pytest
from processes import ROOT, environment, free_port, variables_of


def without_mpi4py(folder):
    """Variables with which mpi4py cannot be imported."""
    (folder / "mpi4py.py").write_text("raise ImportError('planted')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_doctor_examines_all_processes(mpirun):
    """Each with host, devices and versions; what differs; an all-reduce over all of them. Once, by process 0."""
    variables = {0: {"NCCL_ALGO": "Ring"}, 1: {"NCCL_ALGO": "Tree", "NCCL_TOPO_FILE": "/none"}}
    done = mpirun(2, "tools.py", json.dumps(variables), "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"].endswith("2 processes on 1 host.")
    assert [one["rank"] for one in report["processes"]] == [0, 1]
    for one in report["processes"]:
        assert one["host"] and one["devices"] and one["versions"]["TensorFlow"]
    assert (report["joint_all_reduce"]["ok"], report["joint_all_reduce"]["ranks"]) == (True, 2)
    problems = {one["code"]: one for one in report["problems"]}
    different = problems["processes-NCCL_ALGO"]
    assert "Ring in process 0 on " in different["text"] and "Tree in process 1 on " in different["text"]
    assert "mpirun -x NCCL_ALGO" in different["remedy"]
    assert problems["variable-NCCL_TOPO_FILE"]["text"].startswith("process 1 on ")


def examine(count, *options):
    """What is printed and said by so many of two processes that have torchrun's variables, with the status of 0."""
    port, started = free_port(), []
    for rank in range(count):
        command = [sys.executable, "-m", "ncclsync", "doctor", "--json", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment(**variables_of("RANK", rank, port)), **pipes))
    return [one.communicate(timeout=280) for one in started], started[0].returncode


@pytest.mark.slow
def test_doctor_by_torchrun():
    """By torchrun's variables the processes meet as well, and add up."""
    ((printed, errors), (nothing, _)), status = examine(2)
    assert nothing == "" and status == 0, errors
    report = json.loads(printed)
    assert [one["rank"] for one in report["processes"]] == [0, 1]
    assert all(one["host"] and one["versions"]["TensorFlow"] for one in report["processes"])
    assert (report["joint_all_reduce"]["ok"], report["joint_all_reduce"]["ranks"]) == (True, 2)


@pytest.mark.slow
def test_doctor_says_which_process_lacks():
    """Process 0 examines itself, and names the one that has not come."""
    ((printed, errors),), status = examine(1, "--timeout", "15")
    assert status == 1, errors
    report = json.loads(printed)
    (problem,) = (one for one in report["problems"] if one["code"] == "processes-apart")
    assert "process 1 not arrived" in problem["text"], problem
    assert report["processes"] == [] and report["joint_all_reduce"] is None


@pytest.mark.slow
def test_bench_between_processes(mpirun, tmp_path):
    """ncclsync, a copy and MPI's own all-reduce, in turns, right; the ratios to MPI; one table."""
    arguments = ["--sizes", "4B,1MiB", "--rounds", "2", "--against", "mpi", "--json", tmp_path / "out.json"]
    done = mpirun(2, "tools.py", "{}", "bench", "all-reduce", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 processes on 1 host, Open MPI") == 1
    found = json.loads((tmp_path / "out.json").read_text())
    for size in (4, 1 << 20):
        rows = {row["side"]: row for row in found["rows"] if row["case"]["size_bytes"] == size}
        assert list(rows) == ["ncclsync", "memcpy", "mpi"]
        assert {row["more"]["wrong"] for row in rows.values()} == {0}
        assert rows["ncclsync"]["ratios"]["mpi"]["median"] > 0
        assert rows["ncclsync"]["case"]["towers"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("all-reduce --towers 2", "Expected no --towers by Open MPI"),
        ("step", "Expected one process: it starts others by itself. Received: 2, by Open MPI"),
    ],
)
def test_bench_refuses(mpirun, arguments, words):
    """What cannot be measured between processes, once, without a traceback."""
    done = mpirun(2, "tools.py", "{}", "bench", *arguments.split())
    assert done.returncode == 2 and done.stderr.count(words) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_bench_without_mpi4py(mpirun, tmp_path):
    """Processes of one host meet without MPI, which `all-reduce` alone compares with."""
    arguments = ["--sizes", "4B", "--rounds", "1", "--against", "none"]
    done = mpirun(2, "tools.py", "{}", "bench", "all-reduce", *arguments, **without_mpi4py(tmp_path))
    assert done.returncode == 0 and "2 processes on 1 host, Open MPI" in done.stdout, done.stderr
