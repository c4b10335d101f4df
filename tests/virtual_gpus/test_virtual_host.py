"""TensorFlow, MirroredStrategy and ncclsync on virtual GPUs; each script in a process of its own, by `run.py`."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from virtual_host import run

HERE = pathlib.Path(__file__).parent
AHEAD = ["--ahead", "--delay-us", "300"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def on_virtual_gpus(virtual_gpus):
    """A function that runs `run.py` with arguments and returns what it printed."""

    def call(*arguments):
        command = [sys.executable, virtual_gpus, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=850)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.mark.slow
@pytest.mark.parametrize("options", [AHEAD, []])
def test_devices_copies_and_kernels(on_virtual_gpus, options):
    """What a GPU has, and no more memory than it is told to have."""
    printed = on_virtual_gpus(*options, "--gpus", "2", "--memory", "64", HERE / "scripts/device.py")
    assert printed.split("\n") == ["out of memory", "all is well", ""]


@pytest.mark.slow
def test_doctor_sees_what_training_sees(on_virtual_gpus):
    """The GPUs of the virtual host, by TensorFlow; NCCL's place is the stand-in's, which is not called NCCL."""
    report = json.loads(on_virtual_gpus("--gpus", "2", "-m", "ncclsync", "doctor", "--json"))
    assert report["backend"]["devices"] == ["GPU:0", "GPU:1"] and report["all_reduce"]["ok"]
    assert "2 GPUs on this machine: towers stand on 2 of them, joined by /" in report["summary"]
    assert {one["code"] for one in report["problems"]} == {"nccl-other", "nvml-error"}


@pytest.mark.slow
def test_host_runs_ahead(on_virtual_gpus):
    """A call returns before its kernels have run, and a buffer that is let go too early is read as another one."""
    options = ["--ahead", "--kernel-ms", "20", "--gpus", "1"]
    assert on_virtual_gpus(*options, HERE / "scripts/ahead.py") == "all is well\n"


@pytest.mark.parametrize("model, xla", [("dense", []), ("dense", ["--xla"]), ("attention", ["--xla"])])
@pytest.mark.slow
def test_steps_run_ahead(on_virtual_gpus, xla, model):
    """The call of a step returns long before its kernels have run: nothing in its graph waits for a GPU.

    Without XLA, one device's call waits for shapes that TensorFlow computes of an attention's gradients.
    """
    printed = on_virtual_gpus("--ahead", "--kernel-ms", "20", "--gpus", "2", *xla, HERE / "scripts/lead.py", model)
    times = [[int(number) for number in line.split()] for line in printed.splitlines()]
    assert len(times) == 3 and all(ended > 200 for _, ended in times), printed
    assert min(called for called, _ in times) < 100, printed


@pytest.mark.parametrize(
    "options, what",
    [
        (AHEAD, ["one", "nccl"]),
        *(
            pytest.param([*way, "--seed", seed], ["one", "recurrent", "mirrored", *by], marks=pytest.mark.slow)
            for seed, way, by in (("1", [], ["nccl"]), ("2", ["--delay-us", "300"], ["nccl"]), ("3", AHEAD, ["nccl"]))
        ),
    ],
)
def test_training(on_virtual_gpus, options, what):
    """One GPU, MirroredStrategy, and towers train as one CPU does."""
    printed = on_virtual_gpus("--gpus", "4", *options, HERE / "scripts/train.py", *what)
    assert printed == "".join(f"{one} is well\n" for one in what)


@pytest.mark.parametrize(
    "options, what",
    [(AHEAD, "towers"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((AHEAD, "ops"), ([], "ops")))],
)
def test_compiled_by_xla(on_virtual_gpus, options, what, tmp_path, monkeypatch):
    """XLA compiles what asks for it, and with `--xla` what Keras would have it compile; for towers only once."""
    log = tmp_path / "compilations"
    monkeypatch.setenv("VIRTUAL_XLA_LOG", str(log))
    printed = on_virtual_gpus("--gpus", "2", "--xla", *options, HERE / "scripts/compiled.py", what)
    assert printed == "all is well\n"
    gpus, compiled = zip(*(line.split(" ", 2)[::2] for line in log.read_text().splitlines()), strict=True)
    assert len(compiled) > 2
    if what == "ops":
        assert {*gpus} == {"0", "1"}
    else:  # the first of the two GPUs to ask for a program has it compiled: either, or always the same
        assert len({*compiled}) == len(compiled)


@pytest.mark.slow
def test_training_by_xla(on_virtual_gpus):
    """One GPU, MirroredStrategy, which Keras has not compile, and towers train as one CPU does without XLA."""
    options = ["--gpus", "2", "--xla", *AHEAD]
    printed = on_virtual_gpus(*options, HERE / "scripts/train.py", "one", "mirrored", "nccl")
    assert printed == "one is well\nmirrored is well\nnccl is well\n"


@pytest.mark.slow
def test_what_xla_loses_by_cuts(on_virtual_gpus, monkeypatch):
    """The script counts programs, and what crosses between them, beside plain Keras; with a bucket for all, two."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent / "support"), prepend=os.pathsep)
    printed = on_virtual_gpus("--gpus", "2", "--xla", HERE / "scripts/cuts.py", "mlp", "8")
    found = re.findall(r"^mlp, cut ([\w ]+): (\d+) programs, ([\d.]+) MB cross", printed, re.MULTILINE)
    counts, crossing = ({side: float(one[i]) for side, *one in found} for i in range(2))
    assert [*counts] == ["not at all", "once", "default"] and counts["default"] > counts["once"] == 2, printed
    assert counts["not at all"] == 1 and crossing["not at all"] == 0 <= crossing["once"], printed


@pytest.mark.slow
def test_programs_of_xla_take_time(on_virtual_gpus):
    """`--kernel-ms`, `--element-ns` and `--wrong` are about a product in a program of XLA's, too."""
    options = ["--gpus", "2", "--xla", "--kernel-ms", "20", "--element-ns", "0,2000000", "--wrong", "1"]
    assert on_virtual_gpus(*options, HERE / "scripts/heavy.py") == "all is well\n"


@pytest.mark.slow
def test_copies_of_a_step(on_virtual_gpus):
    """A step copies its batch to the GPUs, and nothing else, so that the host does not wait for them."""
    printed = on_virtual_gpus("--ahead", "--gpus", "3", HERE / "scripts/copies.py")
    assert printed == "mlp 0 0\nconvolutional 0 0\nattention 0 0\n"


@pytest.mark.slow
def test_copies_lie_beside_computation(on_virtual_gpus, tmp_path):
    """In a timeline: while a tower computes, the rows of a later batch are on their way to it."""
    options = ["--gpus", "2", "--ahead", "--kernel-ms", "10", "--copy-link", "0.085,0"]
    path = tmp_path / "timeline.json"
    on_virtual_gpus(*options, HERE / "scripts/feed.py", path)
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    named = {
        name: [(span["ts"], span["ts"] + span["dur"]) for span in spans if span["name"] == f"tower_0/{name}"]
        for name in ("copy_to_device", "segment_1")
    }
    beside = 0
    for begin, end in named["copy_to_device"]:
        covered = (min(end, e) - max(begin, b) for b, e in named["segment_1"])
        beside += sum(length for length in covered if length > 0) > 0.8 * (end - begin)
    assert len(named["segment_1"]) == 12 and beside >= 7, named


@pytest.mark.slow
def test_shares_of_gpus_that_differ(on_virtual_gpus):
    """They settle at what the GPUs' speeds say, 2 : 1; batches that were fed by other shares train as ever."""
    options = ["--gpus", "2", "--ahead", "--element-ns", "1000,2000"]
    lines = on_virtual_gpus(*options, HERE / "scripts/shares.py", "3").splitlines()
    fast, slow = map(int, re.search(r"\((\d+), (\d+)\) True$", lines[1]).groups())
    assert 1.6 < fast / slow < 2.5 and lines[2] == "equal", lines


@pytest.mark.slow
def test_module_and_arguments(on_virtual_gpus):
    """`-m` runs a module; what follows is its own."""
    assert "usage: python -m ncclsync bench" in on_virtual_gpus("--gpus", "2", "-m", "ncclsync", "bench", "--help")


def test_missing_compiler(tmp_path):
    """Is said, with what to do."""
    command = [sys.executable, HERE / "run.py", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, done.stderr.strip()) == (1, run.MISSING)
