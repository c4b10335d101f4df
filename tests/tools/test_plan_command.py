"""`python -m ncclsync plan`: what it measures and reads from a program, what it says, what it refuses."""

import json
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from ncclsync.costs.links import CLUSTERS
from ncclsync.tools.bench.turns import Spread
from ncclsync.tools.cli import main
from ncclsync.tools.plan.measurement import traced_traffic, work_before
from ncclsync.tools.plan.prediction import Message, Stage
from ncclsync.tools.plan.results import Found, result_of

README = pathlib.Path(__file__).parents[2] / "ncclsync" / "tools" / "README.md"

FACTORIES = """
import keras
from ncclsync import nccl_parallel
def build():
    inputs = keras.Input((8,))
    # A list of inputs, which tf.data would take for one tensor.
    model = keras.Model([inputs], keras.layers.Dense(4)(keras.layers.Dense(16)(inputs)))
    model.compile("sgd", "mse")
    return model
def eager():
    model = build()
    model.compile("sgd", "mse", run_eagerly=True)
    return model
@nccl_parallel(bucket_bytes=1 << 20)
def several():
    hidden = [keras.layers.Dense(width, activation="relu") for width in (256, 256, 512, 512, 1024)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    return model
number = 3
"""


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """The command, run in a folder with factories: (exit code, output, errors)."""
    (tmp_path / "planned_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "planned_models", raising=False)

    def run(*arguments):
        try:
            code = main(["plan", *arguments])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.slow
def test_a_model_is_measured_and_predicted(planned, tmp_path):
    """A row for one GPU and for each number of them; the gradients' bytes; all of it as JSON too."""
    arguments = ["--gpus", "2,64", "--link", "pcie", "--batch-size", "8", "--rounds", "2", "--json", "out.json"]
    code, out, err = planned("planned_models:build", *arguments)
    assert (code, "Traceback" in err) == (0, False), err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["benchmark"] == "plan" and [row["side"] for row in found["rows"]] == ["1", "2", "64"]
    one, two, many = found["rows"]
    assert set(one["more"]["measured_s"]) == {"2", "4", "8"}
    assert one["value"]["median"] == pytest.approx(one["more"]["fixed_s"] + 8 * one["more"]["per_sample_s"], rel=1e-9)
    gradients = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert gradients < two["more"]["exchanged_bytes"] < gradients + 32  # and what the loss adds up
    assert two["more"]["buckets"] == len(one["more"]["stages"][0]["messages"]) == 1
    assert two["more"]["sequential_s"] > one["value"]["median"]
    # Under load compute is slow beside the links, and nearly all of a short exchange is overlapped.
    assert 1 < two["more"]["speedup"] < 2.001 < many["more"]["speedup"] < 64.001
    assert "measured here on CPU:0, taken as it is (--compute-speedup 1)" in out
    assert "hosts of 8 GPUs by 28 GB/s and 2.5 µs, each host by 24 GB/s and 4 µs" in out
    assert "Between hosts, in a step: 1 all-reduce of " in out
    assert "64 GPUs are 8 hosts: " in out and " leave each, and as many enter it" in out and "2 GPUs are" not in out
    assert "How, by NCCL, hierarchically: the GPUs of a host are a chain, at whose end it is a node of two " in out
    assert (two["more"]["crossing_bytes"], many["more"]["crossing_bytes"] > gradients) == (0, True)
    assert "Between hosts ncclsync waits for its GPUs" in out


def test_a_step_time_is_taken_instead(planned, tmp_path):
    """Nothing is measured; a fast GPU on a slow link is told that it is better alone, and why."""
    arguments = ["--gpus", "2,8", "--link", "0.01,50", "--step-ms", "8:0.02,16:0.04", "--json", "out.json"]
    code, out, _ = planned("planned_models:build", *arguments)
    assert code == 0
    assert "8 GPUs: one GPU is the better choice: for the same 256 samples it takes 0.64 ms" in out
    assert "Latency-bound" in out and "as said by --step-ms" in out
    more = json.loads((tmp_path / "out.json").read_text())["rows"][0]["more"]
    assert more["per_sample_s"] == pytest.approx(2.5e-6) and more["fixed_s"] == pytest.approx(0, abs=1e-12)


def test_overlap_of_a_traced_program(planned, tmp_path):
    """What back-propagation hides of five buckets, each sent when its work is done; all of it comes from the trace."""
    arguments = ["--gpus", "2,8,64", "--link", "pcie", "--step-ms", "32:1", "--json", "out.json"]
    code, _, err = planned("planned_models:several", *arguments)
    assert code == 0, err
    _, *several = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["more"]["buckets"] for row in several} == {5}
    assert [row["more"]["overlapped"] for row in several] == pytest.approx([0.79, 0.53, 0.50], abs=0.01)


@pytest.mark.slow
def test_the_example_of_the_page(planned):
    """ResNet-50's table is the page's."""
    page = README.read_text()
    (command,) = re.findall(r"^python -m ncclsync plan (.*resnet50 --link pcie --step-ms 16:5.*)$", page, re.MULTILINE)
    lines = [line.split() for line in re.findall(r"^ +(?:1|8|64|1024)  .*GPUs$|^ +1  .*4000$", page, re.MULTILINE)]
    code, out, err = planned(*command.split())
    assert code == 0, err
    assert len(lines) == 4 and all(line in [one.split() for one in out.splitlines()] for line in lines)


def test_the_command_of_the_page_for_two_gpus(planned):
    """Of one host, so that no link between hosts is needed."""
    page = pathlib.Path(__file__).parents[2] / "examples" / "two_gpus.md"
    (command,) = re.findall(r"^python -m ncclsync plan \S+ (.*)$", page.read_text(), re.MULTILINE)
    code, out, err = planned("planned_models:build", *command.split())
    assert code == 0, err
    assert "hosts" not in out.replace("hosts of 2 GPUs", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["planned_models:number"], "Expected planned_models:number to be a function. Received: 3"),
        (["planned_models:eager"], "Received: one with run_eagerly=True"),
        (["planned_models:build", "--link", "token"], "Expected nvlink, pcie, ib, GB/s,µs, such as 370,1.9"),
        (["planned_models:build", "--link", "0,5"], "Expected nvlink, pcie, ib, GB/s,µs, such as 370,1.9"),
        (["planned_models:build", "--link", "9,nan"], "Expected nvlink, pcie, ib, GB/s,µs, such as 370,1.9"),
        (["planned_models:build", "--link", "ib", "--between", "9,9"], "Received: --link ib, one GPU per host"),
        (["planned_models:build", "--link", "9,9", "--between", "9,9"], "Expected --gpus-per-host, for a --link in"),
        (
            ["planned_models:build", "--link", "9,9", "--gpus-per-host", "4"],
            "Expected --between, the link between hosts",
        ),
        (["planned_models:build", "--between", "9"], "Expected GB/s,µs"),
        (["planned_models:build", "--gpus", "1"], "expected a whole number from 2, received '1'"),
        (["planned_models:build", "--gpus", "none"], "expected a whole number from 2, received 'none'"),
        (["planned_models:build", "--step-ms", "8:0"], "expected a number above 0, received '0'"),
        (["planned_models:build", "--step-ms", "8:2,8:3"], "expected each batch size once, received '8:2,8:3'"),
        (["planned_models:build", "--compute-speedup", "-1"], "expected a number above 0, received '-1'"),
        (["planned_models:build", "--compute-speedup", "2", "--step-ms", "1"], "not allowed with"),
        ([], "the following arguments are required: factory"),
    ],
)
def test_command_line_that_is_not_understood(planned, arguments, message):
    """Exit code 2, with one sentence."""
    code, out, err = planned(*arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err


@pytest.mark.slow
def test_traffic_of_a_traced_program():
    """Small buckets, last layer first; a synchronised normalisation's own stages; rows of an embedding."""

    def build():
        inputs = keras.Input((4,), dtype="int32")
        features = keras.layers.Embedding(1000, 8)(inputs)
        features = keras.layers.BatchNormalization()(keras.layers.Flatten()(features))
        features = keras.layers.Dense(16, activation="relu", use_bias=False)(features)
        model = keras.Model(inputs, keras.layers.Dense(4)(features))
        model.compile("adam", "mse")
        return model

    data = np.zeros((6, 4), "int32"), np.zeros((6, 4), "float32")
    stages, conditional = traced_traffic(build, {"bucket_bytes": 300, "exact": ("batch_norm",)}, data, 6)
    assert not conditional and len(stages) == 4  # to the moments, to their gradients, to the gradients, the update
    assert sum(stage.share for stage in stages) == pytest.approx(1)
    messages = [message for stage in stages for message in stage.messages]
    sizes = [message.size_bytes for message in messages if message.kind == "all_reduce"]
    assert 4 * 32 * 16 in sizes and any(4 * 16 * 4 <= size <= 300 for size in sizes)
    gathered = sum(message.bytes_per_sample for message in messages if message.kind == "all_gather")
    assert gathered == 4 * (8 * 4 + 4)  # four rows of eight floats, and their numbers
    for stage in stages:
        ready = [message.ready for message in stage.messages]
        assert ready == sorted(ready) and all(0 < one <= 1 for one in ready)
    assert stages[-1].messages == ()


def test_work_follows_the_arithmetic():
    """A product of 2·n·m·k operations beside what it moves; of a chain, what each part and those before it take."""

    @tf.function(input_signature=[tf.TensorSpec([256, 256]), tf.TensorSpec([256, 512])])
    def chain(x, y):
        first = tf.matmul(x, x)  # 2 · 256³ / 16 = 2,097,152
        return first, tf.matmul(first, y)  # twice of it

    graph = chain.get_concrete_function().graph
    outputs = [tensor.op.inputs[0] for tensor in graph.outputs]
    one = 2 * 256**3 / 16
    assert work_before(outputs, graph) == ([one, 3 * one], 3 * one)
    assert work_before([], tf.Graph()) == ([], 0)


@pytest.mark.parametrize(("strides", "made"), [(1, 16 * 16), (2, 8 * 8)])
def test_work_of_convolutions(strides, made):
    """Forward and both gradients: as many operations each, by the image that is made."""

    @tf.function(input_signature=[tf.TensorSpec([8, 16, 16, 64]), tf.TensorSpec([3, 3, 64, 128])])
    def step(image, kernel):
        with tf.GradientTape() as tape:
            tape.watch([image, kernel])
            result = tf.nn.conv2d(image, kernel, strides, "SAME")
        return tape.gradient(result, [image, kernel], output_gradients=result)

    graph = step.get_concrete_function().graph
    products = [op for op in graph.get_operations() if "Conv" in op.type]
    assert len(products) == 3
    for op in products:
        _, work = work_before([op.outputs[0]], graph)
        assert work >= 3 * 2 * 8 * made * 9 * 64 * 128 / 16


def test_what_is_said_of_a_prediction():
    """What only overlap makes worth it, rows that are gathered, buckets of certain steps, one batch size."""
    stages = (Stage(1.0, (Message("all_reduce", 0.0, 25e6), Message("all_gather", 0.1, 0, 100.0))),)
    found = Found(32, {32: Spread.of([2e-3])}, "as said", stages, True)
    result = result_of("m:f", "pcie", [8], CLUSTERS["pcie"], found)
    notes = "\n".join(result.notes)
    assert result.rows[1].more["efficiency"] > 0.5 and result.rows[1].more["one_gpu_because"] == ""
    assert "taken as proportional" in notes and "Some buckets gather rows" in notes
    assert "Some buckets travel in certain steps only" in notes
    slower = Found(32, {32: Spread.of([1.5e-3])}, "as said", stages, False)
    assert "8 GPUs: only with overlap" in "\n".join(result_of("m:f", "pcie", [8], CLUSTERS["pcie"], slower).notes)
