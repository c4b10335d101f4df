"""The way of a batch from `fit` to the graph of a step: who calls whom."""

import pathlib
import traceback

import pytest
import tensorflow as tf
from parity import data, mlp, on_towers
from tensorflow.python.eager import context as eager_context

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


def test_segments_alone_are_optimised(monkeypatch):
    """TensorFlow's optimiser sees what a tower computes, not the graph that calls it: that would slow a first step."""
    called = []
    run = step_function.OnGiven.run

    def watched(function, batches):
        graph = function.graph

        def calling(*given):
            called.append((graph.graph, eager_context.context().function_call_options.as_attrs()["config_proto"]))
            return graph(*given)

        vars(function)["graph"] = calling
        try:
            return run(function, batches)
        finally:
            vars(function)["graph"] = graph

    def is_optimised(config):
        return not tf.compat.v1.ConfigProto.FromString(config).graph_options.rewrite_options.optimizers

    monkeypatch.setattr(step_function.OnGiven, "run", watched)
    on_towers(mlp, 2).train_on_batch(X, Y)
    ((graph, config),) = called
    calls = [op.get_attr("config_proto") for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    assert not is_optimised(config) and len(calls) >= 4 and all(map(is_optimised, calls))
    assert is_optimised(eager_context.context().function_call_options.as_attrs()["config_proto"])
