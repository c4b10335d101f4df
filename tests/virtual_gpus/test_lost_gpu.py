"""A GPU that fails in the midst of training: `python -m ncclsync run` goes on, without it if it is lost."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from virtual_host import PATH, run

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "lost.py"
GPU = "GPU-00000000-0000-0000-0000-00000000000"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
@pytest.mark.parametrize("how, shards, left", [("lost", [], (2, 0)), ("lost", ["6"], (2, 0)), ("hang", [], (2, 1, 0))])
def test_goes_on_after_a_failure(virtual_gpus, tmp_path, how, shards, left):
    """A lost GPU is left out by its UUID; training goes on at the backup, and the weights are one device's.

    With shards they are so to the bit.
    """
    folder = run.build()
    libraries = {"NCCL": "libnccl.so", "CUDART": "libcudart.so", "CUDA_DRIVER": "libcudart.so"}
    environ = {f"NCCLSYNC_{name}_LIBRARY": str(folder / file) for name, file in libraries.items()}
    environ |= {"CUDA_VISIBLE_DEVICES": "2,1,0", "STANDIN_LOST": str(tmp_path / "lost")}
    command = ["-m", "ncclsync", "run", "--report", "report", str(PATH), "--gpus", "3", str(SCRIPT), how, *shards]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n") == ["towers 3", f"towers {len(left)}", "steps 24 equal", ""]
    first, second = map(json.loads, (tmp_path / "report").read_text().splitlines())
    assert first["gpus"] == [f"{GPU}{number}" for number in (2, 1, 0)]
    assert second["gpus"] == [f"{GPU}{number}" for number in left]
    assert [*first["left_out"]] == ([f"{GPU}1"] if how == "lost" else [])
    assert first["then"] == ("started again on 2 of 3 GPUs" if how == "lost" else "started again")
    assert first["device_error"] or first["signal"] == "SIGABRT", first
    assert how == "lost" or first["error"].startswith("NcclTimeoutError"), first
    assert [*first["progress"].values()] == [[1, 32]]
