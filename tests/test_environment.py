"""Tests pass whatever the user's environment says that TensorFlow, CUDA and NCCL read."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent

# A stand-in in this process, threads, towers, and virtual GPUs.
SAMPLE = (
    "communicator/test_nccl_devices.py::test_part_of_a_piece_of_memory",
    "towers/test_threads.py::test_an_op_runs_on_one_thread_where_towers_fill_the_cores",
    "training/test_loop.py::test_a_trace_that_fails_leaves_its_variables_initialised",
    "virtual_gpus/test_virtual_host.py::test_module_and_arguments",
)
SETTINGS = {
    "hidden": {"CUDA_VISIBLE_DEVICES": ""},
    "others": {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_NUM_INTRAOP_THREADS": "3",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION",
        "NCCL_ALGO": "Tree",
        "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}',
    },
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variables", SETTINGS.values(), ids=SETTINGS)
def test_a_sample_passes(variables):
    """In a process of its own, which has these variables."""
    command = [sys.executable, "-m", "pytest", "-q", "--all", *SAMPLE]
    done = subprocess.run(command, cwd=TESTS, env=os.environ | variables, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_virtual_gpus_where_real_ones_are_hidden(tmp_path):
    """By hand, too, as README says it: `run.py` is no test."""
    script = "import tensorflow as tf, ncclsync; print(ncclsync.Towers(), len(tf.config.list_physical_devices('GPU')))"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, TESTS / "virtual_gpus" / "run.py", "--gpus", "2", tmp_path / "script.py"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert "<Towers 2 on GPU:0, GPU:1, backend nccl> 2" in done.stdout, done.stderr
