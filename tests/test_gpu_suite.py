"""tests/gpu anywhere: it passes against the stand-in, is skipped without a GPU, and needs pytest alone."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from ncclsync.communicator import native

ROOT = pathlib.Path(__file__).parent.parent
SUITE = ROOT / "tests" / "gpu"


@pytest.fixture
def load(monkeypatch):
    """A function that imports a module of tests/gpu."""
    monkeypatch.syspath_prepend(str(SUITE))
    return importlib.import_module


def run(*command, **environment):
    """Run Python; return its exit code and what it prints."""
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
    )
    return process.returncode, process.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_passes_against_the_standin(built_standin, tmp_path):
    """By the command for a GPU machine: all tests, none skipped, and the comparison with plain C."""
    command = [SUITE / "run.py", "--out", tmp_path, "--sizes", "1024", "--rounds", "2"]
    code, printed = run(*command, STANDIN_FOLDER=str(tmp_path), **built_standin.environment)
    summary = (tmp_path / "summary.txt").read_text()
    assert code == 0, printed
    n_tests = int(summary.partition(" ")[0])
    assert n_tests >= 37 and summary.startswith(f"{n_tests} passed, 0 failed, 0 skipped\n"), printed
    for ranks in (2, 3):
        told = json.loads((tmp_path / f"overhead-{ranks}.json").read_text())
        assert (told["ranks"], [row["bytes"] for row in told["rows"]]) == (ranks, [1024])
        assert f"{ranks} ranks on one GPU (none, but the stand-in" in summary
        assert "|   1 KiB |" in summary and "The launcher takes more than 1.05 times as long as C: " in summary


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifteen_minutes_against_the_standin(built_standin, tmp_path):
    """Each part that needs no real GPU is done, and tells what it has found; the memory is that of NCCL's formula."""
    variables = {"STANDIN_FOLDER": str(tmp_path), "STANDIN_NCCL": "16,1024", "STANDIN_MEMORY_MB": "600"}
    run(SUITE / "run.py", "--out", tmp_path, "--minutes", "3", **variables, **built_standin.environment)
    summary = (tmp_path / "summary.txt").read_text()
    parts = dict(one.split("\n", 1) for one in re.split(r"^== (?=\w)", summary, flags=re.MULTILINE)[1:])
    ctas = [f"matmuls {n}: done" for n in (1, 2, 4, 8, 16, 32)]
    assert [*parts][:-1] == [
        *("memory: done", "little_memory: done", "overhead: done", *ctas),
        *("second_thread: done", "pool_memory: done"),
    ], summary
    lines = parts["memory: done"].strip().splitlines()
    assert lines[:3] == [
        "joined without preflight, MiB taken: 0",
        "after an all-reduce of 16384 bytes, MiB taken: 64",  # two ranks, a tree's two neighbours, 16 channels
        f"after an all-reduce of {25 * 2**20} bytes, MiB taken: 96",
    ]
    assert {line.partition(", ")[2] for line in lines if "dropped" in line} == {"MiB taken: 96"}
    assert lines[-1] == "all closed, MiB taken: 0"
    assert "out of memory" not in parts["little_memory: done"] and "all-reduce after it: done" in summary
    assert "groups, frees, ms of the slowest group: 1000" in parts["second_thread: done"]


@pytest.mark.parametrize(
    "environment, reason",
    [
        ({"NCCLSYNC_CUDART_LIBRARY": "/nowhere/libcudart.so"}, "/nowhere/libcudart.so: cannot open"),
        ({"NCCLSYNC_NCCL_LIBRARY": "/nowhere/libnccl.so"}, "Expected NCCL's library libnccl.so.2"),
        ({"STANDIN_FAIL": "cudaGetDeviceCount:0=35"}, "35: CUDA driver version is insufficient"),
        ({"STANDIN_VERSION": "22907"}, "ranks that share a GPU need NCCL 2.30 or newer; this is 2.29.7"),
    ],
    ids=["no CUDA", "no NCCL", "no driver", "an old NCCL"],
)
def test_skipped_without_a_gpu(built_standin, tmp_path, environment, reason):
    """With a reason that is printed and names the GPU; without TensorFlow, Keras and pytest's plugins."""
    for name in ("tensorflow", "keras", "cupy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    plugins = [word for name in ("timeout", "xdist", "cacheprovider") for word in ("-p", f"no:{name}")]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**built_standin.environment, "PYTHONPATH": path, **environment}
    code, printed = run("-m", "pytest", "tests/gpu", *plugins, **environment)
    assert code == 0, printed
    skipped = [line for line in printed.splitlines() if line.startswith("SKIPPED")]
    assert skipped and all("needs a GPU. Received: " in line and reason in line for line in skipped), printed
    assert " skipped in " in printed and "passed" not in printed
    assert "GPU tests: skipped: " in printed


@pytest.mark.slow
def test_a_failure_is_not_overlooked(built_standin, tmp_path):
    """An NCCL that gives wrong numbers fails the tests, and the command with them."""
    path = os.pathsep.join([str(SUITE), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, printed = run(
        *["-m", "pytest", "tests/gpu", "-k", "broadcast or preflight or blocks", "-p", "no:cacheprovider"],
        **{**built_standin.environment, "PYTHONPATH": path, "STANDIN_FAIL": "corrupt:0:1"},
    )
    assert code == 1 and "6 failed" in printed, printed


def test_wheels_in_pieces(load, tmp_path):
    """They become whole; a piece that is missing is named."""
    prepare = load("run")
    whole, joined = bytes(range(100)), tmp_path / "joined"
    for i, name in enumerate(("part00", "part01", "part2", "part10")[:3]):
        (tmp_path / f"one-1.0-py3-none-any.whl.{name}").write_bytes(whole[40 * i : 40 * (i + 1)])
    assert [path.read_bytes() for path in prepare.join_pieces(tmp_path, joined)] == [whole]
    assert prepare.projects(joined) == {"one"}
    (tmp_path / "two_x-1.0-py3-none-any.whl.part01").write_bytes(whole)
    with pytest.raises(prepare.CannotRun, match=r"all pieces of two_x-1\.0-py3-none-any\.whl.*numbered \[0\]"):
        prepare.join_pieces(tmp_path, joined)


def test_missing_wheels_are_named(tmp_path):
    """All of them, before anything is made."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    for name in ("cffi-2.1.1-cp311-cp311-linux_x86_64", "ml_dtypes-0.6.0-py3-none-any"):
        (wheels / f"{name}.whl").touch()
    code, printed = run(SUITE / "run.py", "--wheels", wheels, "--out", out)
    assert code == 2
    assert "Expected wheels of cffi>=1.17, numpy" in printed
    assert "Received: none of numpy, pytest>=8, setuptools>=77, nvidia-nccl-cu12>=2.30" in printed
    assert not (out / "venv").exists()


FAKES = {
    "cupy": """
import types
import numpy as np

class Array:
    def __init__(self, array):
        self.array, self.data = array, types.SimpleNamespace(ptr=array.ctypes.data)
    def view(self, dtype):
        return Array(self.array.view(dtype))
    def get(self):
        return self.array.copy()

def asarray(array):
    return Array(array.copy())

def getDeviceCount():
    return 1

cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=getDeviceCount))
""",
    "torch": """
import types
import numpy as np

float16 = float32 = float64 = bfloat16 = int8 = int32 = int64 = uint8 = "a dtype"
cuda = types.SimpleNamespace(device_count=lambda: 2)

class Tensor:
    def __init__(self, array):
        self.array = array
    def to(self, device, copy):
        return Tensor(self.array.copy())
    def data_ptr(self):
        return self.array.ctypes.data
    def view(self, dtype):
        return Tensor(self.array)
    def cpu(self):
        return self
    def numpy(self):
        return self.array.copy()

from_numpy = Tensor
""",
}


@pytest.mark.parametrize(
    "fakes, name, reason, in_tuples",
    [
        (["cupy", "torch"], "CuPy", "CuPy sees 1 GPU(s)", {"bfloat16"}),
        (["torch"], "PyTorch", "no CuPy (ModuleNotFoundError: ", {"uint32", "uint64"}),
        ([], "CUDA's runtime", "no PyTorch (ModuleNotFoundError: ", set(native.DTYPES)),
    ],
    ids=["CuPy", "PyTorch", "neither"],
)
def test_choice_of_memory(load, standin, monkeypatch, tmp_path, fakes, name, reason, in_tuples):
    """CuPy, else PyTorch, else CUDA's runtime; what a library has no dtype for is passed as numbers."""
    memory = load("device_memory")
    monkeypatch.delenv(memory.CHOICE, raising=False)
    for module in FAKES:
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(
            FAKES[module] if module in fakes else f"raise ModuleNotFoundError('no {module}')"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert memory.choose() == ("CUDA's runtime", "NCCLSYNC_CUDART_LIBRARY names the one to use")
    with monkeypatch.context() as unset:
        unset.delenv("NCCLSYNC_CUDART_LIBRARY")
        chosen, why = memory.choose()
    assert chosen == name and reason in why
    monkeypatch.setenv(memory.CHOICE, chosen)
    with memory.open_memory() as opened:
        for dtype in native.DTYPES:
            array = np.arange(5).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            placed = opened.put(array)
            np.testing.assert_array_equal(placed.get(), array)
            assert placed.get().dtype == array.dtype
            assert placed.pointer != array.ctypes.data
            assert isinstance(placed.buffer, tuple) == (dtype in in_tuples), dtype
            assert not isinstance(placed.buffer, tuple) or placed.buffer == (placed.pointer, 5, dtype)
    for module in FAKES:
        sys.modules.pop(module, None)
