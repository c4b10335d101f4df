"""Processes that are to join: those that cannot end with an error that says why."""

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def said(done, rank):
    """What a process has printed, in one line."""
    return " ".join(line for line in done.stdout.split("\n") if line.startswith(f"[{rank}]")) or done.stderr


def test_other_secrets(mpirun):
    """Whoever has another secret than the rest is no process of the job."""
    done = mpirun(2, "joining.py", "secrets", timeout_s=120)
    for rank in range(2):
        words = r"MessageError after \d+ s: .*the digest of this job's secret.*the same NCCLSYNC_SECRET"
        assert re.search(words, said(done, rank)), done.stdout + done.stderr
