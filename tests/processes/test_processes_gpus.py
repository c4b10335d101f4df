"""Processes with two virtual GPUs each train as one process with four; one that fails ends the other by an error."""

import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import LAUNCHERS, SCRIPTS, environment, free_port, variables_of

# By the way: what the message says of the process that fails.
WORDS = {
    "raises": "process {} on {}(?: has ended)?: ValueError: told to fail",
    "caught": "process {} on {}(?: has ended, after|:) ValueError: told to fail",
    "ends": "process {} on {} has ended",
    "killed": "nothing for 10 s from process {} on {}, which is stopped, killed or cut off",
    "cut": "nothing for 10 s from process {} on {}, which is stopped, killed or cut off",
    "stopped": "nothing for 10 s from process {} on {}, which is stopped, killed or cut off",
}

# Shows a process of mpirun the two GPUs of its number.
OWN_GPUS = [
    "sh",
    "-c",
    'export CUDA_VISIBLE_DEVICES=$((2 * OMPI_COMM_WORLD_RANK)),$((2 * OMPI_COMM_WORLD_RANK + 1)); exec "$@"',
    "sh",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def several(virtual_gpus, tmp_path):
    """A function that starts two processes by a launcher, and returns for each a Popen that prints into a file."""
    started = []

    def command(gpus, *arguments):
        return list(
            map(
                str,
                [sys.executable, virtual_gpus, "--gpus", gpus, SCRIPTS / "gpus.py", tmp_path / "out", 2, *arguments],
            )
        )

    def run(launcher, *arguments, hosts=None, own=False):
        (tmp_path / "standin").mkdir()
        common = environment(STANDIN_FOLDER=str(tmp_path / "standin"))
        if launcher in LAUNCHERS:
            # Both see all GPUs of the host, and take two each; or each sees two GPUs of its own.
            line = [*LAUNCHERS[launcher](2), *(OWN_GPUS if own else ()), *command(2 if own else 4, *arguments)]
            started.append(_started(line, common, tmp_path / "log"))
            return started
        port = free_port()
        for rank in range(2):  # as on two hosts
            variables = {**common, **variables_of(launcher, rank, port, "left" if hosts else "localhost")}
            line = command(2, *arguments)
            line = hosts.on(rank, *line) if hosts else line
            started.append(_started(line, variables, tmp_path / f"log{rank}"))
        return started

    yield run
    for process in started:
        process.kill()
        process.wait()


def _started(command, variables, log):
    process = subprocess.Popen(command, env=variables, stdout=log.open("w"), stderr=subprocess.STDOUT)
    process.log = log
    return process


def said(process):
    """What a process, or those of mpirun, have printed."""
    return process.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def alone(virtual_gpus, made_once):
    """The numbers of one process on four virtual GPUs."""

    def train(folder):
        command = [sys.executable, virtual_gpus, "--gpus", "4", SCRIPTS / "gpus.py", folder / "out", "4"]
        subprocess.run(list(map(str, command)), env=environment(), check=True, capture_output=True, timeout=280)

    return dict(np.load(made_once("one-process-on-gpus", train) / "out.0.npz"))


@pytest.mark.parametrize("launcher", ["RANK", "TF_CONFIG", *LAUNCHERS])
def test_close_to_one_process(several, alone, tmp_path, launcher):
    """Losses, weights and results are equal in both processes; no name of a device has a job."""
    check_equal(several(launcher), alone, tmp_path)


def test_close_to_one_process_with_gpus_of_its_own(several, alone, tmp_path):
    """As `srun --gpus-per-task=2` gives them to each: the UUIDs tell, and each takes both that it sees."""
    check_equal(several("mpirun", own=True), alone, tmp_path)


def check_equal(processes, alone, tmp_path):
    """Both processes have ended well, with the same numbers, which are close to those of one."""
    for process in processes:
        assert process.wait(280) == 0, said(process)
        assert "job:worker" not in said(process)
    one, other = (dict(np.load(tmp_path / f"out.{rank}.npz")) for rank in range(2))
    assert one.keys() == other.keys() == alone.keys()
    for name, expected in alone.items():
        assert one[name].tobytes() == other[name].tobytes(), name
        np.testing.assert_allclose(one[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_close_to_one_process_from_two_hosts(several, hosts, alone, tmp_path):
    """The same from one host to the other."""
    check_equal(several("RANK", hosts=hosts), alone, tmp_path)


@pytest.mark.parametrize("way", ["raises", "killed", "first ends", "first stopped"])
def test_failing_process_ends_the_other(several, way):
    """Within 30 s, by an error that names rank, host and reason."""
    processes = several("RANK", way)
    fails = 0 if way.startswith("first") else 1
    other = processes[1 - fails]
    other.wait(280)
    check_told(said(other), way, fails)
    if "stopped" in way:
        processes[fails].send_signal(signal.SIGKILL)
    status = processes[fails].wait(280)
    assert status == {"raises": 1, "ends": 0}.get(way.split()[-1], -signal.SIGKILL)


@pytest.mark.parametrize("way", ["raises", "caught", "stopped"])
def test_failing_process_of_mpirun_ends_the_other(several, way):
    """The same under mpirun, which starts both."""
    (mpirun,) = several("mpirun", way)
    wait_for(lambda: "[0] " in said(mpirun) or mpirun.poll() is not None)
    text = said(mpirun)
    if way == "raises" and "[0] " not in text:
        # mpirun has ended the other before it could say why, and names the process, which has printed its error.
        assert re.search(r"\[\S+@1,1\]\s+Exit code:\s+1\s", text) and "ValueError: told to fail" in text, text
    else:
        check_told(text, way, 1)
    if way != "stopped":  # else mpirun waits until it is killed
        mpirun.wait(280)


def test_killed_process_of_mpirun(several):
    """By kill -9: mpirun ends the other at once, and says which."""
    (mpirun,) = several("mpirun", "killed")
    wait_for(lambda: "signal 9" in said(mpirun) or mpirun.poll() is not None)
    mpirun.wait(280)
    assert re.search(r"process rank 1 .*on node \S+ exited on\s+signal 9", said(mpirun), re.DOTALL), said(mpirun)


@pytest.mark.parametrize("way", ["killed", "cut"])
def test_failing_host_ends_the_other(several, hosts, way):
    """A process on it that is killed, or its cable, which is pulled: each names the other, and its host."""
    processes = several("RANK", way, hosts=hosts)
    if way == "cut":
        for rank, process in enumerate(processes):
            wait_for(lambda p=process, r=rank: f"[{r}] trains" in said(p) or p.poll() is not None)
        time.sleep(2)
        hosts.pull_cable()
    for rank in (0, 1) if way == "cut" else (0,):
        processes[rank].wait(280)
        check_told(said(processes[rank]), way, 1 - rank, ("left", "right")[1 - rank])


@pytest.mark.parametrize("launcher", ["RANK", "TF_CONFIG"])
def test_end_of_a_process_that_cannot_join(several, launcher):
    """Is that of any program which an exception ends: no signal, and nothing but its traceback."""
    process, other = several(launcher, "late")
    other.kill()
    assert process.wait(280) == 1, said(process)
    assert re.search(r"NcclTimeoutError.*process 1", said(process)) and "bad_function_call" not in said(process)


def wait_for(condition):
    """Wait until something holds."""
    end = time.monotonic() + 250
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.2)


def check_told(text, way, fails, host=None):
    """The process that does not fail has printed an error, which came in time."""
    words = WORDS[way.split()[-1]].format(fails, re.escape(host or socket.gethostname()))
    found = re.search(rf"\[{1 - fails}\] ProcessError after (\d+) s: Expected .*. Received: {words}", text)
    assert found and int(found[1]) <= 30, text


@pytest.mark.parametrize("launcher", ["RANK", "mpirun"])
@pytest.mark.parametrize("way", ["label", "pruned", "sent", "other label"])
def test_both_go_on_after_an_error_in_one(several, way, launcher):
    """A step, or a callback, that fails in one process is an error in both, which then train on, joined anew."""
    errors, sums = 0, []
    for process in several(launcher, way):
        assert process.wait(280) == 0, said(process)
        errors += said(process).count("Error after")
        sums.append(re.findall(r"goes on (.*)", said(process)))
    assert errors == {"label": 2, "pruned": 4, "sent": 2, "other label": 6}[way]
    one, other = sums if launcher == "RANK" else (sorted(sums[0])[::2], sorted(sums[0])[1::2])
    assert one and one == other


def test_step_that_fails_at_its_end_in_one_process(virtual_gpus, tmp_path):
    """It is undone in both, metrics and random state included, which a process writes before the weights' exchange."""
    (tmp_path / "standin").mkdir()
    program = [sys.executable, virtual_gpus, "--gpus", 4, SCRIPTS / "faults.py", "late"]
    command = [*LAUNCHERS["mpirun"](2), *map(str, program)]
    variables = environment(STANDIN_FOLDER=str(tmp_path / "standin"))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    sums = re.findall(r"goes on (.*)", done.stdout)
    assert done.returncode == 0 and len(sums) == 2 and sums[0] == sums[1], done.stdout + done.stderr
    assert len(re.findall(r"\[[01]\] \w+Error after", done.stdout)) >= 2, done.stdout


def test_end_of_a_process_between_steps_is_saved(several, tmp_path):
    """Tower 0 is saved in the other one, as after a failed collective."""
    process, _ = several("RANK", "saved")
    assert process.wait(280) == 0, said(process)
    assert "ProcessError" in said(process)
    assert (tmp_path / "out.weights.h5").exists()


@pytest.mark.parametrize("way", ["interrupted", "interrupted early"])
def test_ctrl_c_in_one_process(several, way):
    """Is a KeyboardInterrupt there, while its step is traced or waits for the other one, which is told."""
    process, other = several("RANK", way)
    other.wait(280)
    assert "[0] KeyboardInterrupt" in said(process), said(process)
    assert re.search(r"ProcessError.*KeyboardInterrupt", said(other)), said(other)


def test_host_runs_ahead(several, monkeypatch):
    """The call of a step returns while its exchanges wait for the GPUs, where a product takes 0.4 s."""
    monkeypatch.setenv("VIRTUAL_AHEAD", "True")
    monkeypatch.setenv("VIRTUAL_KERNEL_MS", "400")
    sums = set()
    for process in several("RANK", "ahead"):
        assert process.wait(280) == 0, said(process)
        # The first step is checked, and the batches of the first two are compared; they are waited for.
        *_, (pending, weight) = re.findall(r"under way: (\d+) of \d+, weight (.*)", said(process))
        assert int(pending) > 0
        sums.add(weight)
    assert len(sums) == 1


@pytest.mark.parametrize("way", ["other program", "divergence"])
def test_processes_that_do_different_things(several, way):
    """Steps that exchange other tensors, and one process alone elsewhere: told, before weights are written."""
    words = [rf"a step \(\d exchanges?, program {'[0-9a-f]' * 8}\)"] * 2
    words = [words[0], "divergence"] if way == "divergence" else words
    said_by = [f"process {i} on {re.escape(socket.gethostname())} is at {one}" for i, one in enumerate(words)]
    for process in several("RANK", way):
        process.wait(280)
        found = f"Expected all processes to do the same. Received: {'; '.join(said_by)}"
        assert re.search(rf"ProcessError after \d+ s: {found}", said(process)), said(process)
