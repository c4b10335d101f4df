"""Other launchers than Open MPI's mpirun: what they start for real, what they end, and start again."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from processes import LAUNCHERS, ROOT, SCRIPTS, environment, free_port, strangers, variables_of
from virtual_host import PATH

PROGRAM = ROOT / "examples" / "several_hosts.py"
ALONE = "import ncclsync; ncclsync.Towers(1, health=ncclsync.Health(timeout_s=3))"

pytestmark = pytest.mark.slow


def run(*command, **more):
    """What subprocess.run returns."""
    words = list(map(str, command))
    return subprocess.run(words, env=environment(**more), capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def alone():
    """What one process prints of four towers."""
    return re.findall("4 towers: .*", run(sys.executable, PROGRAM, 4).stdout)


@pytest.mark.parametrize("launcher", ["RANK", "TF_CONFIG", "RANK in srun -n1", *LAUNCHERS, "torchrun in srun -n1"])
def test_cpu_towers(launcher, alone):
    """They have the bits of one process, whoever starts theirs; also within a step of one task."""
    command = [sys.executable, PROGRAM, 2]
    if launcher in LAUNCHERS:
        printed = run(*LAUNCHERS[launcher](2), *command).stdout
    elif launcher == "torchrun in srun -n1":
        printed = run(*LAUNCHERS["srun"](1), *LAUNCHERS["torchrun"](2), *command).stdout
    else:
        step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
        name, port = launcher.split()[0], free_port()
        with ThreadPoolExecutor(2) as pool:
            each = [variables_of(name, rank, port) | (step if "srun" in launcher else {}) for rank in range(2)]
            printed = "".join(done.stdout for done in pool.map(lambda more: run(*command, **more), each))
    assert re.findall("4 towers: .*", printed) == alone != []


def test_strangers_during_a_whole_run(alone, tmp_path):
    """Garbage, slow clients, scans and pickles from before the processes join until they have ended: the same bits."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool, strangers(port, tmp_path / "ran") as connections:
        each = [variables_of("RANK", rank, port) for rank in range(2)]
        done = [*pool.map(lambda more: run(sys.executable, PROGRAM, 2, **more), each)]
    assert re.findall("4 towers: .*", "".join(one.stdout for one in done)) == alone, done
    assert len(connections) > 300 and not [*tmp_path.iterdir()]
    assert not any(one.returncode or "Traceback" in one.stderr for one in done), done


def test_process_that_has_no_other():
    """As where variables are left over: an error names who has not come, and says what to unset."""
    done = run(sys.executable, "-c", ALONE, **variables_of("RANK", 0, free_port()))
    assert "process 1 not arrived" in done.stderr and done.returncode, done.stderr
    assert "unset RANK, WORLD_SIZE, or write processes=False" in done.stderr


def workers_of(started):
    """The processes of the script that a launcher has started."""
    found = psutil.Process(started.pid).children(recursive=True)
    return [one for one in found if str(PATH) in one.cmdline()[:3]]


def test_torchrun_starts_killed_process_again(virtual_gpus, tmp_path):
    """All of them: they go on at the very sample, and end with the numbers of a run that nothing has ended."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed, tmp_path / "standin"):
        folder.mkdir()
    program = SCRIPTS / "interrupted.py"
    torchrun = LAUNCHERS["torchrun"](2, "--standalone", "--max-restarts=1")
    command = [*torchrun, sys.executable, virtual_gpus, "--gpus", 4, program, killed, 2, 0.1, 2]
    log = (tmp_path / "log").open("w+")
    variables = environment(STANDIN_FOLDER=str(tmp_path / "standin"))
    started = subprocess.Popen(list(map(str, command)), env=variables, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 170
        while not (killed / "backup" / "latest.weights.h5").exists():
            assert started.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.1)
        time.sleep(0.5)
        workers_of(started)[1].kill()
        assert started.wait(280) == 0, (tmp_path / "log").read_text()
    finally:
        for one in workers_of(started) if started.poll() is None else ():
            one.kill()
        started.kill()
        started.wait()
    assert "exitcode: -9" in (tmp_path / "log").read_text()
    alone = run(sys.executable, virtual_gpus, "--gpus", 4, program, whole, 4, 0, 2)
    expected = dict(np.load(whole / "end.0.npz"))
    for rank in range(2):
        found = dict(np.load(killed / f"end.{rank}.npz"))
        assert found.keys() == expected.keys(), alone.stderr
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6)
