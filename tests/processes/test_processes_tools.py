"""`doctor` and `bench all-reduce` under mpirun: process 0 speaks for all."""

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
        assert one["host"] and one["devices"] and one["versions"]["TensorFlow"] and one["versions"]["mpi4py"]
    assert (report["joint_all_reduce"]["ok"], report["joint_all_reduce"]["ranks"]) == (True, 2)
    problems = {one["code"]: one for one in report["problems"]}
    different = problems["processes-NCCL_ALGO"]
    assert "Ring in process 0 on " in different["text"] and "Tree in process 1 on " in different["text"]
    assert "mpirun -x NCCL_ALGO" in different["remedy"]
    assert problems["variable-NCCL_TOPO_FILE"]["text"].startswith("process 1 on ")


@pytest.mark.slow
def test_doctor_without_mpi():
    """By torchrun's variables the processes meet as on GPUs; CPU towers are an error with what starts them."""
    port, started = free_port(), []
    for rank in range(2):
        command = [sys.executable, "-m", "ncclsync", "doctor", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment(**variables_of("RANK", rank, port)), **pipes))
    (printed, errors), (nothing, _) = (one.communicate(timeout=280) for one in started)
    assert nothing == "" and started[0].returncode == 1, errors
    report = json.loads(printed)
    assert [one["rank"] for one in report["processes"]] == [0, 1]
    assert all(one["host"] and one["versions"]["TensorFlow"] for one in report["processes"])
    (problem,) = (one for one in report["problems"] if one["severity"] == "error")
    assert problem["code"] == "processes-without-mpi" and "mpirun -np 2 python" in problem["remedy"]


@pytest.mark.slow
def test_doctor_says_what_processes_lack(mpirun, tmp_path):
    """Without mpi4py process 0 examines itself, and says how all are joined."""
    done = mpirun(2, "tools.py", "{}", "doctor", "--json", **without_mpi4py(tmp_path))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (problem,) = (one for one in report["problems"] if one["code"] == "processes-apart")
    assert "Expected mpi4py" in problem["text"] and "pip install 'ncclsync[hosts]'" in problem["remedy"]
    assert report["processes"] == [] and report["joint_all_reduce"] is None


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
    """It says what is missing."""
    done = mpirun(2, "tools.py", "{}", "bench", "all-reduce", **without_mpi4py(tmp_path))
    assert done.returncode == 2 and done.stderr.count("Expected mpi4py") == 1, done.stderr
    assert "pip install 'ncclsync[hosts]'" in done.stderr
