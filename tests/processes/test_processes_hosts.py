"""mpirun on two hosts, with names and addresses of their own: CPU towers train as on one, and a lost host is named."""

import json
import re
import subprocess
import sys
import time

import pytest
from processes import LAUNCHERS, ROOT, SCRIPTS, environment

pytestmark = pytest.mark.slow


@pytest.fixture
def on_both(hosts):
    """A function that starts a Python program by mpirun, a process on each host, and returns a Popen."""
    started = []

    def start(*command):
        options = ["--prtemca", "plm_ssh_agent", str(hosts.agent), "-H", "left,right", "-N", "1"]
        line = hosts.on(0, *LAUNCHERS["mpirun"](2, *options), sys.executable, *command)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env=environment(), **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_bits_of_one_process(on_both):
    """Two processes of two towers, on two hosts, as one of four."""
    program = ROOT / "examples" / "several_hosts.py"
    printed, errors = on_both(program, 2).communicate(timeout=280)
    alone = subprocess.run(
        [sys.executable, program, "4"], env=environment(), capture_output=True, text=True, timeout=60
    )
    (found,), (expected,) = (re.findall("4 towers: .*", text) for text in (printed, alone.stdout))
    assert found == expected, errors


def test_doctor_names_both(on_both):
    """Each process with its host."""
    printed, errors = on_both(SCRIPTS / "tools.py", "{}", "doctor", "--json").communicate(timeout=280)
    report = json.loads(printed)
    assert report["summary"].endswith("2 processes on 2 hosts."), errors
    assert [one["host"] for one in report["processes"]] == ["left", "right"]
    assert report["joint_all_reduce"]["ok"]


def test_pulled_cable(on_both, hosts):
    """The other host's process is named within 30 s."""
    process = on_both(SCRIPTS / "faults.py", "cut")
    while "trains" not in (line := process.stdout.readline()):
        assert line
    time.sleep(5)
    hosts.pull_cable()
    began = time.monotonic()
    while "ProcessError" not in (line := process.stdout.readline()):
        assert line
    assert re.search(r"\[0\] ProcessError after \d+ s: .*nothing for 10 s from process 1 on right", line)
    assert time.monotonic() - began < 30
