"""Failures of collectives that are only enqueued; each script in a process of its own, by `run.py`."""

import pathlib

import pytest
from test_virtual_host import AHEAD, on_virtual_gpus  # noqa: F401

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "faults.py"
ALL = ["stuck", "slow", "async", "call", "record", "wait", "keeps weights", "own loop"]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "options, what",
    [
        (AHEAD, ["stuck"]),
        *(pytest.param(["--seed", seed, *way], ALL, marks=pytest.mark.slow) for seed, way in (("1", []), ("2", AHEAD))),
    ],
)
def test_faults(on_virtual_gpus, options, what):  # noqa: F811
    """Whoever is first is told, in the words of a collective that is waited for; what rests on it is not read."""
    printed = on_virtual_gpus("--gpus", "3", *options, SCRIPT, *what)
    assert [line for line in printed.split("\n") if "well" in line] == [f"{one} is well" for one in what]
