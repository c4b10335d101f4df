"""A GPU whose kernels compute wrong numbers is named by an audit; healthy ones raise no alarm."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "audited.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "arguments", "found"),
    [
        (["--gpus", "3", "--ahead", "--delay-us", "100"], [], "healthy 6"),
        (["--gpus", "3", "--ahead", "--delay-us", "100"], ["2", "7"], "healthy 6"),
        (["--gpus", "3", "--wrong", "1"], [], "found 3 (1,) ((0, 1), (1, 2))"),
        (["--gpus", "2", "--wrong", "1"], [], "found 3 () ((0, 1),)"),
        (["--gpus", "3", "--wrong", "1"], ["2", "7"], "found 3 (1,) ((0, 1), (1, 2))"),
    ],
)
def test_a_wrong_gpu_is_named(virtual_gpus, options, arguments, found):
    """At the first audit; of two GPUs the pair; of one shard per GPU and of several."""
    command = [sys.executable, str(virtual_gpus), *options, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(found), done.stdout
