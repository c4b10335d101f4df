"""Processes that are to join: those that cannot end with an error that says why."""

import re

import pytest

pytestmark = pytest.mark.slow


def said(done, rank):
    """What a process has printed, in one line."""
    return " ".join(line for line in done.stdout.split("\n") if line.startswith(f"[{rank}]")) or done.stderr


def test_child_of_a_process(mpirun):
    """Is refused by words, unless it trains apart; the processes themselves go on."""
    done = mpirun(2, "joining.py", "child")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        words = (
            r"NcclSyncError after .* s: Expected process \d+, which has joined the others .*, to be the only one of its"
        )
        assert re.search(words + r" number.*processes=False.*apart 1.*towers 2, divergence 0.0", said(done, rank)), done


@pytest.mark.parametrize(("way", "other"), [("late", 1), ("late first", 0)])
def test_process_that_does_not_come(mpirun, way, other):
    """Is named by the other one, when its time is up."""
    done = mpirun(2, "joining.py", way)
    words = (
        rf"\[{1 - other}\] NcclTimeoutError .*: Expected the joining of processes to end. Received: .*: "
        rf"process {other} not arrived. Each has to make towers"
    )
    assert re.search(words, done.stdout), done.stdout + done.stderr


def test_other_secrets(mpirun):
    """Whoever has another secret than the rest is no process of the job."""
    done = mpirun(2, "joining.py", "secrets")
    words = (
        r"NcclTimeoutError after \d+ s: .*process 0 not arrived.*a process that does not answer, or not to this job: "
        "give all its processes the same NCCLSYNC_SECRET"
    )
    assert re.search(words, said(done, 1)), done.stdout + done.stderr
    assert re.search(r"NcclTimeoutError after \d+ s: .*process 1 not arrived", said(done, 0)), done.stdout + done.stderr
