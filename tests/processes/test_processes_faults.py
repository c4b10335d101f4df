"""One of several processes fails, ends, stops, or does something else: the others end with an error that says so."""

import re
import subprocess
import sys
import time

import pytest
from processes import SCRIPTS, environment, free_port

WORDS = {
    "raises": (r"ValueError after \d+ s: told to fail", r"process 1 on \S+: ValueError: told to fail"),
    "ends": (None, r"process 1 on \S+ has ended"),
    "callback": ("the callback Random to decide the same", "the callback Random to decide the same"),
    "rate": ("the callback RandomRate to decide .* learning rate 0.005 in process 1", "the callback RandomRate"),
    "between": (
        "process 0 on [^ ]+ is in `fit`, at epoch 1, batch 3; process 1 on [^ ]+ is in `fit`, at epoch 1, the end of "
        "epoch 1; StopBetween has set stop_training. Let all processes make the same calls",
    )
    * 2,
    "data": ("other rows in process 1 on [^ ]+ than in process 0 on [^ ]+, in `fit`, at epoch 1, batch 1. Seed what",)
    * 2,
    "skips": ("other rows in process 1 on [^ ]+ than in process 0 on [^ ]+, in `fit`, at epoch 2, batch 2. Seed",) * 2,
    "seeds": ("other rows in process 1 than in process 0, in batch 1. Seed what shuffles",) * 2,
    "rows": ("8 rows in process 0 on [^ ]+ and 11 in process 1 on [^ ]+, in `fit`, at epoch 1, batch 3. Seed",) * 2,
    "read alone": ("process 0 on [^ ]+ is at divergence; process 1 on [^ ]+ is in `fit`",) * 2,
    "evaluates": ("process 0 on [^ ]+ is in `evaluate`; process 1 on [^ ]+ is in `fit`. Let all processes make",) * 2,
    "model": (r"at broadcast \(\S+\) of 48 .* at broadcast \(\S+\) of 78 .*Let all build the same model",) * 2,
}


def lines_of(printed, rank):
    """What a process has printed, in one line."""
    return " ".join(line for line in printed.split("\n") if line.startswith(f"[{rank}]"))


def since_signal(done):
    """Seconds since a process has sent itself one, which mpirun has survived."""
    return time.time() - float(re.search(r"a signal at (\S+)", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.parametrize("way", WORDS)
def test_error_that_names_it(mpirun, way):
    """Nobody hangs, and each process raises why."""
    printed = mpirun(2, "faults.py", way).stdout
    last, first = WORDS[way]
    assert re.search(first, lines_of(printed, 0)), printed
    assert last is None or re.search(last, lines_of(printed, 1)), printed


@pytest.mark.slow
def test_failed_step_in_one_process(mpirun):
    """It raises its own error, the others that it has; then all go on together, equal."""
    done = mpirun(2, "faults.py", "label")
    first, last = (lines_of(done.stdout, rank) for rank in (0, 1))
    assert "InvalidArgumentError" in last, done.stdout + done.stderr
    assert "ProcessError" in first and "process 1 on" in first, done.stdout
    assert re.search("goes on (.*)", first)[1] == re.search("goes on (.*)", last)[1]


@pytest.mark.slow
def test_step_that_fails_at_its_end_in_one_process(mpirun):
    """After the last exchange: it is undone in all, which train on from before it; the message is about it."""
    done = mpirun(2, "faults.py", "late")
    first, last = (lines_of(done.stdout, rank) for rank in (0, 1))
    assert re.search(r"nothing \[0\] \w+Error.*nothing \[0\] nothing", first), done.stdout + done.stderr
    said = r"nothing \[1\] ProcessError after \d+ s: .*process 0 on [^ ]+: \w+Error.*nothing \[1\] nothing"
    assert re.search(said, last), done.stdout
    assert re.search("goes on (.*)", first)[1] == re.search("goes on (.*)", last)[1]


@pytest.mark.slow
def test_callback_that_raises(mpirun):
    """In one process: the others hear of it, in a step or at the end of an epoch; then all may go on, equal."""
    done = mpirun(2, "faults.py", "pruned")
    first, last = (lines_of(done.stdout, rank) for rank in (0, 1))
    said = "ProcessError .*process 1 on [^ ]+: ValueError: pruned in process 1.*"
    assert re.search(said * 2 + "ValueError .*pruned in process 0.*goes on", first), done.stdout + done.stderr
    assert last.count("ValueError after") == 3
    assert re.search("goes on (.*)", first)[1] == re.search("goes on (.*)", last)[1]


@pytest.mark.slow
def test_error_before_a_step(mpirun):
    """Of what is given to `Towers.run` and `train_on_batch` in one process: the others hear of it, and all go on."""
    done = mpirun(2, "faults.py", "before a step")
    assert done.returncode == 0, done.stdout + done.stderr
    said = ["ValueError.*unsupported type", "ValueError.*whose first axis", "TypeError.*a function"]
    said.append(said[0])
    assert re.search(".*".join(said), lines_of(done.stdout, 1)), done.stdout
    said = [f"ProcessError.*process 1 on [^ ]+: {words}" for words in said]
    assert re.search(".*".join(said), lines_of(done.stdout, 0)), done.stdout


@pytest.mark.slow
def test_callbacks_of_one_process(mpirun, tmp_path):
    """What only writes may be in process 0 alone; others are named before training, and all go on."""
    done = mpirun(2, "faults.py", "writers", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = ("fit.*Random in process 0", "fit.*CSVLogger in process 1", "evaluate.*Random in process 1")
    words = [f"same callbacks for {one} alone" for one in alone]
    words += [
        "EarlyStopping, Random in process 0, Random, EarlyStopping in process 1",
        "ModelCheckpoint in process 0 alone",
    ]
    for rank in (0, 1):
        assert re.search("ProcessError.*" + ".*".join(words), lines_of(done.stdout, rank)), done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"1.keras", "2.keras", "3.keras", "log.csv", "board"}


@pytest.mark.slow
def test_busy_process(mpirun):
    """A process that is alive is waited for, however long one call keeps Python from running there, or everywhere."""
    done = mpirun(2, "faults.py", "busy")
    assert sorted(done.stdout.split("\n")) == ["", *sorted(["[0] nothing", "[1] nothing"] * 2)], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0


@pytest.mark.slow
def test_stopped_process(mpirun):
    """A process that a signal has stopped is named within 30 s, and all end."""
    done = mpirun(2, "faults.py", "stopped")
    words = r"ProcessError after \d+ s: .*nothing for 10 s from process 1 on \S+, which is stopped, killed or cut off"
    assert re.search(words, lines_of(done.stdout, 0)), done.stdout + done.stderr
    assert done.returncode != 0
    assert since_signal(done) < 45


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.4, 1.1])
def test_killed_process(mpirun, seconds):
    """By kill -9, at any moment: mpirun ends the others, and says which."""
    done = mpirun(2, "faults.py", "killed", seconds)
    assert re.search(r"process rank 1 .*exited on\s+signal 9", done.stderr, re.DOTALL), done.stderr
    assert since_signal(done) < 30


@pytest.mark.slow
def test_killed_process_without_a_launcher():
    """Nobody ends the other: it names the one that is gone within 30 s."""
    port, started = str(free_port()), []
    for rank in range(2):
        own = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
        variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in own.items()}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        command = [sys.executable, SCRIPTS / "faults.py", "killed", "0.5"]
        started.append(subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True))
    assert started[1].wait(200) == -9
    began = time.monotonic()
    _, errors = started[0].communicate(timeout=60)
    assert re.search(r"ProcessError: .*nothing for 10 s from process 1 on \S+, which is stopped, killed", errors), (
        errors
    )
    assert time.monotonic() - began < 30
