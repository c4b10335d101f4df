"""Start programs as several processes, by Open MPI's mpirun from the registry's wheel; and make two hosts of one."""

import contextlib
import pathlib
import subprocess
import sys

import pytest
from processes import LAUNCHERS, SCRIPTS, environment
from two_hosts import two_hosts


@pytest.fixture(scope="session")
def mpirun():
    """Return a function that starts so many processes of a script, and returns what subprocess.run does."""
    LAUNCHERS["mpirun"](2)  # or skip

    def run(count: int, script: str | pathlib.Path, *arguments: object, timeout_s: float = 280, **more: str):
        command = [*LAUNCHERS["mpirun"](count), sys.executable, str(SCRIPTS / script), *map(str, arguments)]
        return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=timeout_s)

    return run


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, joined by a cable; see `two_hosts`."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts(tmp_path))
        except OSError as error:
            pytest.skip(f"no namespaces of Linux for two hosts: {error}")
        yield found
