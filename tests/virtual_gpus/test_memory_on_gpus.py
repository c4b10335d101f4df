"""A batch that does not fit the memory of the GPUs is trained in more shards, where `on_oom="split"` says so."""

import pathlib
import re
import subprocess
import sys

import pytest
from virtual_host import PATH, run

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "memory.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("memory", "shards"), [(2000, "2"), (70, "4|8|16")])
def test_a_batch_that_does_not_fit_is_split(memory, shards):
    """The numbers are one device's; each doubling is warned of. With enough memory there is none."""
    if run.CXX is None or run.COMPILER is None:
        pytest.skip(run.MISSING)
    command = [sys.executable, str(PATH), "--gpus", "2", "--memory", str(memory), str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"shards (\d+) warnings (\d+) equal divergence 0\.0", done.stdout)
    assert found and re.fullmatch(shards, found[1]), done.stdout
    assert 2 ** int(found[2]) == int(found[1]) // 2
