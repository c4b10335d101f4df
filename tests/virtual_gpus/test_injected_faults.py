"""Failures of collectives that are only enqueued; each script in a process of its own, by `run.py`."""

import pathlib

import pytest
from test_virtual_host import AHEAD, on_virtual_gpus  # noqa: F401
from thorough import some

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "faults.py"
ALL = ["stuck", "slow", "async", "call", "keeps weights", "own loop", "ctrl-c", "logs", "comparison"]
SOME = some(["slow", "own loop", "ctrl-c", "logs", "comparison"], ALL)
# Of calls that no plug-in for TensorFlow makes, only ncclsync.
BY_CONTEXTS = ["record", "wait"]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "events, options, what",
    [
        pytest.param("stream", AHEAD, ["stuck"], marks=pytest.mark.slow),
        pytest.param("stream", ["--seed", "1"], ALL, marks=pytest.mark.slow),
        pytest.param("context", ["--seed", "2", *AHEAD], SOME + BY_CONTEXTS, marks=pytest.mark.slow),
    ],
)
def test_faults(on_virtual_gpus, monkeypatch, events, options, what):  # noqa: F811
    """Whoever is first is told, in the words of a collective that is waited for; what rests on it is not read."""
    monkeypatch.setenv("NCCLSYNC_GPU_EVENTS", events)
    printed = on_virtual_gpus("--gpus", "3", *options, SCRIPT, *what)
    assert [line for line in printed.split("\n") if "well" in line] == [f"{one} is well" for one in what]
