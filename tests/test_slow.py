"""Which tests a run leaves out: those marked slow, and it says so."""

import os
import pathlib
import re
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


TABLE = """
import pytest

@pytest.mark.slow(but=2)
@pytest.mark.parametrize("n", range(40))
def test_rows(n): pass

@pytest.mark.slow
def test_alone(): pass
"""


def pytest_in(folder, *options, **environment):
    """Run pytest there, in a process of its own, with what our conftest adds."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow(but=0): as in the tests\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "workers"])
@pytest.mark.parametrize("everything", [False, True], ids=["default", "all"])
def test_slow_tests_are_left_out_and_told(tmp_path, everything, workers):
    """Two rows of six stay, the first and the fourth; --all runs everything, in workers too."""
    run = range(6) if everything else (0, 3)
    (tmp_path / "test_file.py").write_text(FILE.replace("RUN", str([*run])))
    done = pytest_in(tmp_path, *workers, *["--all"] * everything)
    assert done.returncode == 0, done.stdout
    assert f"{8 if everything else 3} passed" in done.stdout
    told = "5 tests marked slow were left out; pytest --all runs them too"
    assert (told in done.stdout) == (not everything)
    assert f"tests: {'all' if everything else 'those not marked slow'}" in done.stdout


def test_parts_are_all_of_it(tmp_path):
    """Four of a table and two of others leave out other slow tests each; what every run has is in each."""
    for folder in ("parity", "towers"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(TABLE)
    passed = []
    for part in range(4):
        done = pytest_in(tmp_path, "--all", NCCLSYNC_PART=str(part))
        passed.append(int(re.search(r"(\d+) passed", done.stdout)[1]))
    slow, others = 38 + 1, 2
    assert sum(passed) == (slow + 4 * others) + (2 * slow + 4 * others) and max(passed) < 45


def test_a_failure_is_named_at_once(tmp_path):
    """Also where the run is cut off after it, without a summary."""
    (tmp_path / "test_file.py").write_text(
        "import os\ndef test_fails(): assert 1 == 2, 'why'\ndef test_cut_off(): os._exit(7)\n"
    )
    done = pytest_in(tmp_path)
    assert done.returncode == 7
    assert "FAILED test_file.py::test_fails (call): AssertionError: why" in done.stdout
