"""What NCCL takes of GPUs beside TensorFlow, and which driver it needs."""

import pathlib
import subprocess
import sys

import pytest
from virtual_host import PATH

pytestmark = [pytest.mark.usefixtures("virtual_gpus"), pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "communicators.py"


def on_gpus(*arguments, **environment):
    """Run the script with these options on virtual GPUs; return the lines that it prints."""
    command = [sys.executable, str(PATH), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment or None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("options", [[], ["--xla"]])
def test_models_in_a_row(options):
    """Communicators, streams, threads and pieces of memory are as after the first; events but for TensorFlow's own."""
    first, last = on_gpus("--gpus", 2, "--ahead", "--delay-us", 50, *options, SCRIPT, "row")
    pairs = [(int(one), int(other)) for one, other in zip(first.split()[1:], last.split()[1:], strict=True)]
    assert all(one == other for one, other in pairs[:-1]) and pairs[-1][1] - pairs[-1][0] < 5, (first, last)


def test_beside_tensorflow():
    """TensorFlow was first, and has left 225 MiB: a tree and a ring, 192 MiB, fit, paths of all pairs would not."""
    whole = ["--gpus", 4, "--memory", 400, "--whole"]
    found = on_gpus(*whole, "--nccl", "32,2048", SCRIPT, "once")
    assert found == ["communicators 4 taken 192", "192 MiB of each GPU"]
    # The tree fits, which the preflight takes; the ring does not, which the first step would take.
    (failed,) = on_gpus(*whole, "--nccl", "32,3000", SCRIPT, "once")
    assert failed.startswith("NcclError ncclCommGetAsyncError returned") and "out of memory" in failed
    assert "NCCL needs some hundred MB on each GPU" in failed and "during the first nccl" in failed


@pytest.mark.parametrize(("kib", "nccl", "tensorflow"), [(2048, 128, 345), (4400, 275, 311), (4800, 300, 280)])
def test_before_tensorflow(kib, nccl, tensorflow):
    """TensorFlow asks for all that was free, but for 255 MiB, of 600; where NCCL has more, for 10% less each time."""
    whole = ["--gpus", 4, "--memory", 600, "--whole", "--nccl", f"32,{kib}"]
    assert on_gpus(*whole, SCRIPT, "before") == [f"NCCL has {nccl}, TensorFlow {tensorflow}"]


def test_drivers(monkeypatch):
    """Before R555 exchanges need TensorFlow's streams; one tower needs neither NCCL nor a driver of some version."""
    old = ["--driver", 12020, "--nccl", "16,1024"]
    assert on_gpus("--gpus", 2, *old, SCRIPT, "once")[0] == "communicators 2 taken 48"
    monkeypatch.setenv("NCCLSYNC_GPU_EVENTS", "context")
    (failed,) = on_gpus("--gpus", 2, *old, SCRIPT, "once")
    assert failed.startswith("NcclUnavailableError Expected TensorFlow's streams to be known, or a driver of CUDA 12.5")
    assert on_gpus("--gpus", 1, *old, SCRIPT, "once")[0] == "communicators 0 taken 0"
