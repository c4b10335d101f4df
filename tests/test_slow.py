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


ORDER = """
import pathlib, pytest, time

@pytest.mark.parametrize("n", range(60))
def test_rows(n):
    with open(pathlib.Path(__file__).parent / "ran", "a") as ran: ran.write(f"{n} ")
    time.sleep(PAUSE)
"""


LONG = """
import pathlib, pytest

@pytest.mark.timeout(900)
def test_long():
    with open(pathlib.Path(__file__).parent / "ran", "a") as ran: ran.write("long ")
"""


def test_what_a_run_of_some_minutes_leaves_out_is_drawn_by_lot(tmp_path):
    """Groups of 20 come in another order each time, and each group in its own; a test of a long limit comes first."""
    orders = set()
    (tmp_path / "test_long.py").write_text(LONG)
    for _ in range(9):
        (tmp_path / "test_file.py").write_text(ORDER.replace("PAUSE", "0"))
        assert "61 passed" in pytest_in(tmp_path, "--minutes", "5").stdout
        first, *ran = (tmp_path / "ran").read_text().split()
        assert first == "long"
        (tmp_path / "ran").unlink()
        groups = [[int(n) for n in ran[i : i + 20]] for i in (0, 20, 40)]
        assert sorted(groups) == [[*range(i, i + 20)] for i in (0, 20, 40)]
        orders.add(tuple(ran))
        if len(orders) > 1:
            break
    assert len(orders) > 1  # by chance alone it fails once in 6 ** 8 runs


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "workers"])
def test_no_test_starts_after_the_minutes(tmp_path, workers):
    """The tests that ran and those without time are all of them; the file of the latter is named with their number."""
    (tmp_path / "test_file.py").write_text(ORDER.replace("PAUSE", "0.1"))
    done = pytest_in(tmp_path, *workers, "--minutes", "0.02", "-ra")
    assert done.returncode == 0, done.stdout
    passed, skipped = (int(re.search(rf"(\d+) {word}", done.stdout)[1]) for word in ("passed", "skipped"))
    assert passed + skipped == 60 and 0 < skipped < 60
    assert f"no time was left for {skipped} tests" in done.stdout and f"{skipped} test_file.py" in done.stdout


def test_a_failure_is_named_at_once(tmp_path):
    """Also where the run is cut off after it, without a summary."""
    (tmp_path / "test_file.py").write_text(
        "import os\ndef test_fails(): assert 1 == 2, 'why'\ndef test_cut_off(): os._exit(7)\n"
    )
    done = pytest_in(tmp_path)
    assert done.returncode == 7
    assert "FAILED test_file.py::test_fails (call): AssertionError: why" in done.stdout
