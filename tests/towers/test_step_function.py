"""The way of a batch from `fit` to the graph of a step: who calls whom."""

import pathlib
import traceback

import pytest
import tensorflow as tf
from parity import data, mlp, on_towers

import ncclsync
from ncclsync.towers import step_function

X, Y = data(rows=8)
HERE = pathlib.Path(ncclsync.__file__).parent


@pytest.mark.parametrize(
    "method, kind, before",
    [
        ("fit", "OnIterator", ["run", "run_on_iterator", "_run"]),
        ("train_on_batch", "OnGiven", ["run", "_run_batch", "run_on_batch", "_run"]),
    ],
)
def test_the_way_of_a_batch(method, kind, before, monkeypatch):
    """Is a few calls that have names, as a page says; of the same the graph is made."""
    found = {}

    def watched(owner, name):
        function = getattr(owner, name)

        def called(*arguments):
            calls = [one for one in traceback.extract_stack() if HERE in pathlib.Path(one.filename).parents]
            found.setdefault(name, [one.name for one in calls])
            return function(*arguments)

        monkeypatch.setattr(owner, name, called)

    if kind == "OnIterator" and tf.config.list_logical_devices("GPU"):
        kind = "OnFed"
    watched(getattr(step_function, kind), "run")
    watched(step_function, "lay_out")
    model = on_towers(mlp, 2)
    getattr(model, method)(X, Y)
    assert found["run"] == before
    assert found["lay_out"] == [*before, "graph", "_body"]
    for way in (found["lay_out"], [*found["run"], "run", "_body"]):
        assert len(way) <= (5 if method == "fit" else 6), "the calls from Keras to `lay_out`"
