"""The examples run as a user runs them, and hold what they promise."""

import json
import pathlib
import re
import shutil
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


def test_compare_parity_tells_equal_from_wrong_from_exception(tmp_path):
    """Three rows: one that MirroredStrategy gets right with even batches, one wrong, one not at all."""
    rows = {
        "evaluate-numpy": ("exception", "equal"),
        "tf#33929_clipped_before_sum": ("wrong", "wrong"),
        "keras#17429_accumulation": ("exception", "exception"),
    }
    chosen = ("--only", "batches,peers", "--rows", ",".join(rows))
    files = ("--json", "parity.json", "--plot", "parity.svg")
    done = run_example("compare_parity.py", *chosen, *files, "--details", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {one["row"]: one for one in json.loads((tmp_path / "parity.json").read_text())["rows"]}
    columns = ("MirroredStrategy", "MirroredStrategy, even batches")
    assert {name: tuple(one[c]["outcome"] for c in columns) for name, one in found.items()} == rows
    assert {one["ncclsync"]["outcome"] for one in found.values()} == {"equal"}
    assert found["tf#33929_clipped_before_sum"]["MirroredStrategy"]["difference"] > 0.5
    assert "merge_call" in found["keras#17429_accumulation"]["MirroredStrategy"]["detail"]
    assert (tmp_path / "parity.svg").read_text().startswith("<?xml")


def test_compare_parity_needs_the_tables(tmp_path):
    """Copied out of a clone it says what is missing."""
    for name in ("compare_parity.py", "parity_runs.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    command = [sys.executable, str(tmp_path / "compare_parity.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.match(r"Expected the tables in .*tests\. Run this from a clone", done.stderr)
