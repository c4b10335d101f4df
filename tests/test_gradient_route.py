"""The way of a gradient, as ncclsync/README.md tells it: each stop is there, and a step takes it."""

import functools
import importlib
import pathlib
import re
import sys

import numpy as np
import pytest
from parity import data, mlp, on_towers

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "ncclsync" / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d) \| (?:(GPU|CPU): )?\[`[^`]+`\]\(([^)]+)\) \| (.+?) \|", re.MULTILINE)
STOPS = [(int(n), kind, file, re.findall(r"`([\w.]+)`", names)) for n, kind, file, names in ROW.findall(PAGE)]


def test_at_most_eight_stops_of_which_two_differ():
    """For each kind of tower the stops are 1 to 8; the last two are its own."""
    for kind in ("GPU", "CPU"):
        assert [number for number, of, _, _ in STOPS if of in ("", kind)] == list(range(1, 9))
    assert {number for number, kind, _, _ in STOPS if kind} == {7, 8}


@pytest.mark.parametrize("stop", STOPS, ids=[file for _, _, file, _ in STOPS])
def test_what_a_stop_names_is_there(stop):
    """The file exists, and defines each function."""
    _, _, file, names = stop
    text = (ROOT / "ncclsync" / file).read_text(encoding="utf-8")
    for name in names:
        *owner, function = name.split(".")
        assert re.search(rf"(?:def|ncclResult_t) {function}\(|\"{function}\"", text), name
        assert all(f"class {one}" in text for one in owner)


def test_a_step_takes_the_route(monkeypatch):
    """While the first step is made, every stop of CPU towers in Python is called."""
    called = set()
    for _, kind, file, names in STOPS:
        if kind == "GPU" or file.endswith(".c"):
            continue
        module = importlib.import_module("ncclsync." + file.removesuffix(".py").replace("/", "."))
        for name in names:
            code = functools.reduce(getattr, name.split("."), module).__code__
            called.add((code.co_filename, code.co_name))
    seen = set()
    sys.setprofile(lambda frame, event, _: seen.add((frame.f_code.co_filename, frame.f_code.co_name)))
    try:
        x, y = data(24)
        on_towers(mlp, 3).train_on_batch(np.asarray(x), y)
    finally:
        sys.setprofile(None)
    assert called - seen == set()
