"""What doctor calls a problem with software: one host per row, differing from a healthy one in one fact."""

import dataclasses

import pytest
from hosts import CPU, GPUS, broken, changed, check_row, failed, given, links

from ncclsync.tools.doctor.facts import Choice, Library, Report, Trouble
from ncclsync.tools.doctor.problems import find_problems

NOT_THERE = Library(error="Expected NCCL's library libnccl.so.2. Received: none.")
NO_EXTENSION = "NcclSyncError: Expected the compiled extension ncclsync._native. Received: none"

ROWS = {
    # case: host, the one problem's severity and code, words of its text, words of its remedy
    "TensorFlow missing": (
        broken(CPU, tensorflow=None, tensorflow_error="ModuleNotFoundError: No module named 'tensorflow'"),
        "error tensorflow-missing",
        "not installed",
        "pip install 'tensorflow>=2.20'",
    ),
    "TensorFlow missing on a GPU host": (
        broken(GPUS, tensorflow_error="ModuleNotFoundError: No module named 'tensorflow'", cuda_build=None),
        "error tensorflow-missing",
        "not installed",
        "[cuda]",
    ),
    "TensorFlow broken": (
        broken(CPU, tensorflow_error="ImportError: libfoo.so"),
        "error tensorflow-broken",
        "libfoo.so",
        "--force-reinstall",
    ),
    "TensorFlow old": (
        changed(CPU, "frameworks", tensorflow="2.19.1"),
        "error tensorflow-old",
        "Received: 2.19.1",
        "--upgrade",
    ),
    "Keras missing": (
        broken(CPU, keras=None, keras_error="ModuleNotFoundError: No module named 'keras'"),
        "error keras-missing",
        "Keras is not installed",
        "pip install 'keras>=3.10'",
    ),
    "Keras broken": (
        broken(CPU, keras=None, keras_backend=None, keras_error="ImportError: boom"),
        "error keras-broken",
        "boom",
        "--force-reinstall",
    ),
    "Keras on jax": (
        broken(CPU, keras_backend="jax", ncclsync_error="NcclSyncError: jax"),
        "error keras-backend",
        "Received: 'jax'",
        "keras.json",
    ),
    "Keras on jax, which is missing": (
        given(
            broken(CPU, keras_backend=None, keras_error="ModuleNotFoundError: No module named 'jax'"),
            KERAS_BACKEND="jax",
        ),
        "error keras-backend",
        "No module named 'jax'",
        "Set KERAS_BACKEND to tensorflow",
    ),
    "Keras 2": (changed(CPU, "frameworks", keras="2.15.0"), "error keras-old", "Received: 2.15.0", "--upgrade"),
    "Keras old": (changed(CPU, "frameworks", keras="3.9.2"), "warning keras-old", "Received: 3.9.2", "--upgrade"),
    "extension missing": (
        changed(broken(CPU, ncclsync_error=NO_EXTENSION), "libraries", nccl=Library(error=NO_EXTENSION)),
        "error extension-missing",
        "compiled part",
        "C compiler",
    ),
    "ncclsync broken": (
        broken(CPU, ncclsync_error="ImportError: cannot import name 'x'"),
        "error ncclsync-broken",
        "cannot import name 'x'",
        "versions",
    ),
    "Keras on jax by its file, which is missing": (
        broken(CPU, keras_backend="jax", keras_error="ModuleNotFoundError: No module named 'jax'"),
        "error keras-backend",
        "No module named 'jax'",
        "~/.keras/keras.json",
    ),
    "import hangs": (
        dataclasses.replace(
            broken(CPU, tensorflow=None, cuda_build=None),
            troubles=(Trouble("frameworks", "importing TensorFlow", "no answer within 60 s", ""),),
        ),
        "error frameworks-unanswered",
        "no answer within 60 s",
        "import tensorflow",
    ),
    "unknown XLA flag": (
        dataclasses.replace(
            CPU, troubles=(Trouble("frameworks", "compiling by XLA", "killed by SIGABRT", "Unknown flag"),)
        ),
        "error frameworks-unanswered",
        "Unknown flag",
        "XLA_FLAGS",
    ),
    "NVML hangs": (
        dataclasses.replace(
            changed(CPU, "driver", error="NoAnswer"),
            troubles=(Trouble("driver", "asking the driver by NVML", "no answer within 60 s", ""),),
        ),
        "warning driver-unanswered",
        "asking the driver by NVML",
        "nvidia-smi",
    ),
    "no NCCL": (
        changed(failed("raised"), "libraries", nccl=NOT_THERE, nccl_copies=()),
        "error nccl-unusable",
        "libnccl.so.2",
        "pip install --upgrade nvidia-nccl-cu12",
    ),
    "NCCLSYNC_NCCL_LIBRARY wrong": (
        given(changed(GPUS, "libraries", nccl=NOT_THERE), NCCLSYNC_NCCL_LIBRARY="/nowhere"),
        "error nccl-unusable",
        "NCCLSYNC_NCCL_LIBRARY names no usable NCCL",
        "Unset NCCLSYNC_NCCL_LIBRARY",
    ),
    "NCCLSYNC_NCCL_LIBRARY wrong without GPU": (
        given(changed(CPU, "libraries", nccl=NOT_THERE), NCCLSYNC_NCCL_LIBRARY="/nowhere"),
        "warning nccl-unusable",
        "NCCLSYNC_NCCL_LIBRARY",
        "Unset",
    ),
    "NCCL without a function": (
        changed(GPUS, "libraries", nccl=Library(error="undefined symbol: ncclGetLastError")),
        "error nccl-unusable",
        "too old",
        "--upgrade nvidia-nccl-cu12",
    ),
    "NCCL too old": (
        changed(GPUS, "libraries", nccl=Library(error="Expected NCCL 2.14 or newer. Received: NCCL 2.4.8")),
        "error nccl-old",
        "Received: NCCL 2.4.8",
        "--upgrade nvidia-nccl-cu12",
    ),
    "NCCL older than TensorFlow's": (
        changed(GPUS, "libraries", nccl=Library("2.21.5", "/old.so", "12.9")),
        "warning nccl-older-than-tensorflow",
        "2.21.5",
        "--upgrade nvidia-nccl-cu12",
    ),
    "another library as NCCL": (
        changed(GPUS, "libraries", nccl=Library("2.32.3", "/other.so"), nccl_copies=(Library("2.32.3", "/other.so"),)),
        "warning nccl-other",
        "Expected NCCL. Received: /other.so, another library",
        "pip install nvidia-nccl-cu12",
    ),
    "a process of a launcher that joins none": (
        changed(CPU, "frameworks", refused="Expected one process. Received: PMI_SIZE=2. Write processes=False."),
        "error processes-apart",
        "The processes cannot be joined: Expected one process. Received: PMI_SIZE=2.",
        "Write processes=False.",
    ),
    "NCCL twice": (
        changed(GPUS, "libraries", nccl_copies=(GPUS.libraries.nccl, Library("2.18.3", "/b.so", "12.1"))),
        "warning nccl-twice",
        "2.18.3 in /b.so",
        "NCCLSYNC_NCCL_LIBRARY",
    ),
    "two packages of NCCL": (
        changed(GPUS, "libraries", nccl_packages=("nvidia-nccl-cu12 2.32.3", "nvidia-nccl-cu13 2.30.0")),
        "warning nccl-packages",
        "nvidia-nccl-cu13 2.30.0",
        "Uninstall",
    ),
    "driver a major version behind NCCL": (
        changed(changed(GPUS, "driver", cuda="12.9"), "libraries", nccl=Library("2.32.3", "/a.so", "13.0")),
        "error driver-older-than-nccl",
        "serves CUDA up to 12.9, and NCCL was built with CUDA 13.0",
        "Update the driver",
    ),
    "driver a minor version behind NCCL": (
        changed(GPUS, "driver", cuda="12.5"),
        "warning driver-older-than-nccl",
        "NCCL was built with CUDA 12.9",
        "Update the driver",
    ),
    "driver before CUDA 12.5": (
        changed(failed("raised"), "driver", version="550.54", cuda="12.4"),
        "error driver-old",
        "Expected a driver that serves CUDA 12.5 or newer. Received: driver 550.54, which serves CUDA up to 12.4",
        'R555 or newer, or train on the CPU by devices=["CPU:0", "CPU:0"]',
    ),
    "driver before CUDA 12.5 whose GPUs are not used": (
        dataclasses.replace(changed(GPUS, "driver", cuda="12.4"), choice=CPU.choice, all_reduce=CPU.all_reduce),
        "warning driver-old",
        "CUDA up to 12.4",
        "R555",
    ),
    "driver's CUDA by libcuda": (
        changed(changed(GPUS, "driver", cuda=None), "libraries", driver_cuda="12.8"),
        "warning driver-older-than-nccl",
        "serves CUDA up to 12.8",
        "Update the driver",
    ),
    "no CUDA runtime": (
        changed(failed("raised"), "libraries", cuda_runtime=Library(error="cannot open")),
        "error cuda-runtime-unusable",
        "cannot open",
        "nvidia-cuda-runtime-cu12",
    ),
    "wrong numbers": (failed("wrong"), "error all-reduce-wrong", "wrong numbers: why", "NCCL_P2P_DISABLE"),
    "hang": (failed("hang"), "error all-reduce-hang", "hangs: why", "NCCL_DEBUG=INFO"),
    "crash": (failed("crash"), "error all-reduce-crash", "ends its process: why", "NCCL_DEBUG=INFO"),
    "NCCL fails": (failed("raised", log=("NCCL WARN x",)), "error all-reduce-raised", "NCCL WARN x", "NCCL_DEBUG=INFO"),
    "wrong numbers on the CPU": (failed("wrong", CPU), "error all-reduce-wrong", "the cpu backend", "again"),
}


@pytest.mark.parametrize("case", ROWS)
def test_problem_is_found(case):
    """Just this problem, of this severity, with its remedy; the exit status follows."""
    check_row(*ROWS[case])


FINE = {
    "GPUs": GPUS,
    "no GPU": CPU,
    "no GPU, no NCCL": changed(CPU, "libraries", nccl=NOT_THERE, nccl_copies=()),
    "no GPU, NVML without a driver": changed(CPU, "driver", error="LibraryNotFound"),
    "no GPU, small /dev/shm": dataclasses.replace(CPU, shm_bytes=1, shm_free_bytes=1),
    "some GPUs chosen": given(
        dataclasses.replace(changed(GPUS, "frameworks", gpus=("GPU:0",)), choice=Choice("nccl", ("GPU:0",), "")),
        CUDA_VISIBLE_DEVICES="2",
    ),
    "harmless variables": given(
        GPUS,
        NCCL_DEBUG="WARN",
        NCCL_P2P_DISABLE="0",
        NCCL_P2P_LEVEL="NVL",
        NCCL_SOCKET_IFNAME="^docker,ib",
        TF_CONFIG='{"cluster": {"worker": ["a:1"]}}',
        TF_XLA_FLAGS="--tf_xla_auto_jit=-1 --tf_xla_min_cluster_size=2",
        XLA_FLAGS="--xla_dump_to=/tmp/x",
    ),
    "NCCL's variables without GPU": given(CPU, NCCL_P2P_DISABLE="1", NCCL_SOCKET_IFNAME="ib"),
    "a newer libcuda than the driver's": changed(changed(GPUS, "driver", cuda="12.2"), "libraries", driver_cuda="12.9"),
    "access not known": changed(GPUS, "driver", links=links(None)),
    "TensorFlow's CUDA newer by a minor version": changed(
        changed(GPUS, "frameworks", build_cuda="12.9.2"), "libraries", nccl=Library("2.32.3", "/nccl.so", "12.9")
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_nothing_is_found(case):
    """A healthy host has no problem."""
    assert find_problems(FINE[case]) == []
    assert Report(FINE[case], (), ()).summary.startswith("Healthy.")


def test_processes_apart_hide_nothing():
    """What training would fail at next, on its GPUs, is an error as well."""
    refused = "Expected one process. Received: PMI_SIZE=2. Write processes=False"
    host = dataclasses.replace(changed(failed("raised"), "frameworks", refused=refused), choice=Choice())
    found = find_problems(changed(host, "libraries", nccl=NOT_THERE, nccl_copies=()))
    assert [(one.severity, one.code) for one in found] == [("error", "processes-apart"), ("error", "nccl-unusable")]


def test_several_problems():
    """Errors come first, and the summary counts both kinds."""
    host = given(failed("hang"), NCCL_ALGO="Ring", TF_USE_LEGACY_KERAS="1")
    found = tuple(find_problems(host))
    assert [problem.severity for problem in found] == ["error", "warning", "warning"]
    assert Report(host, (), found).summary == "Training would fail: 1 error, 2 warnings. 4 GPUs on this machine."
