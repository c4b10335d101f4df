"""The examples run as a user runs them, and hold what they promise."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    """Run an example in a Python of its own, from another folder than the source tree."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.timeout(300)
def test_digits_reaches_its_accuracy_on_two_towers(tmp_path):
    """It learns, the towers stay together, and the file it saves predicts the same."""
    done = run_example("digits.py", "--towers", "2", "--save", "digits.keras", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = dict(re.findall(r"^([a-z ]+): +(.*)$", done.stdout, flags=re.MULTILINE))
    assert results["towers"].startswith("2 on ")
    assert float(results["test accuracy"].split()[0]) >= 0.98
    assert float(results["divergence"].split()[0]) == 0.0
    assert results["reloaded"] == "predicts the same"
    assert (tmp_path / "digits.keras").stat().st_size > 0


@pytest.mark.timeout(300)
def test_digits_fails_below_its_accuracy(tmp_path):
    """Two epochs are too few: the example says so by its exit status."""
    done = run_example("digits.py", "--towers", "2", "--epochs", "2", cwd=tmp_path)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Not as it should be" in done.stderr
