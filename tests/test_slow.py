"""Which tests a run leaves out: those marked slow, and it says so."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent

FILE = """
import pytest

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow(but=2)
@pytest.mark.parametrize("n", range(6))
def test_rows(n): assert n in RUN

def test_quick(): pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "workers"])
@pytest.mark.parametrize("everything", [False, True], ids=["default", "all"])
def test_slow_tests_are_left_out_and_told(tmp_path, everything, workers):
    """Two rows of six stay, the first and the fourth; --all runs everything, in workers too."""
    run = range(6) if everything else (0, 3)
    (tmp_path / "test_file.py").write_text(FILE.replace("RUN", str([*run])))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow(but=0): as in the tests\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", *workers, *["--all"] * everything],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert f"{8 if everything else 3} passed" in done.stdout
    told = "5 tests marked slow were left out; pytest --all runs them too"
    assert (told in done.stdout) == (not everything)
    assert f"tests: {'all' if everything else 'those not marked slow'}" in done.stdout
