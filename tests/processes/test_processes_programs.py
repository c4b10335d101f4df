"""Several processes train as one with as many towers: the same bits."""

import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, SCRIPTS, environment
from thorough import some

PROGRAMS = ("convolutional", "embedding", "accumulating", "whole random", "own loop", "dataset")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that runs programs on four towers of one process, and returns the numbers; once each."""
    folder, known = tmp_path_factory.mktemp("alone"), {}

    def run(names):
        if names not in known:
            out = folder / str(len(known))
            command = [sys.executable, SCRIPTS / "programs.py", out, "4", *names]
            subprocess.run(list(map(str, command)), env=environment(), check=True, capture_output=True, timeout=600)
            known[names] = dict(np.load(f"{out}.0.npz"))
        return known[names]

    return run


@pytest.mark.parametrize(
    "towers, names",
    [
        ("2,2", ("own loop",)),
        pytest.param("3,1", PROGRAMS, marks=pytest.mark.slow),
        pytest.param("2,1,1", some(("convolutional",), PROGRAMS), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_equal_to_one_process(mpirun, alone, tmp_path, towers, names):
    """Weights, optimizer, history, metrics and predictions, in each process, are those of one, bit for bit."""
    count = len(towers.split(","))
    done = mpirun(count, "programs.py", tmp_path / "several", towers, *names, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = alone(names)
    for rank in range(count):
        found = dict(np.load(tmp_path / f"several.{rank}.npz"))
        assert found.keys() == expected.keys()
        differing = [name for name, value in expected.items() if value.tobytes() != found[name].tobytes()]
        assert not differing, (rank, differing)


@pytest.mark.slow
def test_example(mpirun):
    """The page's program prints the same line as two processes of one tower, and as one of two."""
    program = ROOT / "examples" / "several_hosts.py"
    command = [sys.executable, str(program), "2"]
    alone = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True, timeout=300)
    done = mpirun(2, program, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().split("\n")
    assert lines[-1] == alone.stdout.strip().split("\n")[-1]
    assert lines[-1].startswith("2 towers: accuracy")
    assert sum(line.startswith("Epoch 5/5") for line in lines) == 1  # process 0 alone prints
