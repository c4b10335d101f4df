"""What doctor calls a problem: one host per row, differing from a healthy one in one fact."""

import dataclasses

import pytest

from ncclsync import environment
from ncclsync.facts import (
    AllReduce,
    Choice,
    Driver,
    Frameworks,
    Gpu,
    Host,
    Libraries,
    Library,
    Link,
    Report,
    Trouble,
    Variable,
)
from ncclsync.hardware import visible_gpus
from ncclsync.problems import find_problems, summarize

GIB = 1 << 30


def gpu(index, **changes):
    """One of several equal GPUs."""
    facts = {"name": "H100", "uuid": f"GPU-{index}aa", "memory_bytes": 80 * GIB, "used_bytes": GIB}
    return Gpu(index, **{**facts, "compute_capability": "9.0", "mig": False, "prohibited": False, **changes})


def links(p2p="ok"):
    """Between four GPUs."""
    return tuple(Link((a, b), "NV18", 18, p2p) for a in range(4) for b in range(a + 1, 4))


GPUS = Host(
    python="3.11.7",
    python_path="/usr/bin/python3",
    ncclsync="0.1.0",
    ncclsync_path="/ncclsync",
    driver=Driver("570.1", "12.9", tuple(map(gpu, range(4))), links()),
    present=4,
    kernel_driver="570.1",
    libraries=Libraries(
        nccl=Library("2.32.3", "/nccl.so", "12.9"),
        nccl_copies=(Library("2.32.3", "/nccl.so", "12.9"),),
        nccl_packages=("nvidia-nccl-cu12 2.32.3",),
        cuda_runtime=Library("12.9", "/cudart.so"),
        cudnn=Library("9.3.0", "/cudnn.so"),
    ),
    frameworks=Frameworks(
        tensorflow="2.21.0",
        keras="3.15.1",
        keras_backend="tensorflow",
        cuda_build=True,
        build_cuda="12.5.1",
        build_capabilities=("6.0", "9.0"),
        build_nccl="2.27.7",
        gpus=("GPU:0", "GPU:1", "GPU:2", "GPU:3"),
    ),
    choice=Choice("nccl", ("GPU:0", "GPU:1", "GPU:2", "GPU:3"), "every visible GPU"),
    all_reduce=AllReduce("nccl", 4, 100, ok=True, seconds=0.1),
    shm_bytes=GIB,
    shm_free_bytes=GIB,
    cores=16,
    interfaces=("lo", "eth0"),
)
CPU = dataclasses.replace(
    GPUS,
    driver=Driver(error="NotInstalled"),
    present=0,
    kernel_driver=None,
    frameworks=dataclasses.replace(GPUS.frameworks, gpus=()),
    choice=Choice("cpu", ("CPU:0",), "no GPU is visible"),
    all_reduce=AllReduce("cpu", 4, 100, ok=True, seconds=0.1),
)


def changed(host, part, **changes):
    """The host with other facts in one of its parts."""
    return dataclasses.replace(host, **{part: dataclasses.replace(getattr(host, part), **changes)})


def given(host, **variables):
    """The host with these variables set."""
    found = tuple(Variable(name, value, "environment", "") for name, value in variables.items())
    return dataclasses.replace(host, variables=found)


def with_gpus(*gpus):
    """The GPU host with other GPUs."""
    return changed(GPUS, "driver", gpus=gpus)


def unseen(**changes):
    """The GPU host, whose TensorFlow sees no GPU."""
    host = dataclasses.replace(GPUS, choice=CPU.choice, all_reduce=CPU.all_reduce)
    return changed(host, "frameworks", gpus=(), **changes)


def broken(host, **changes):
    """The host without a choice, because of a framework."""
    return dataclasses.replace(changed(host, "frameworks", **changes), choice=Choice(None, (), "none"))


NOT_THERE = Library(error="Expected NCCL's library libnccl.so.2. Received: none.")
NO_EXTENSION = "NcclSyncError: Expected the compiled extension ncclsync._native. Received: none"


def failed(kind, host=GPUS, **changes):
    """The host on which the all-reduce fails."""
    return changed(host, "all_reduce", ok=False, kind=kind, error="why", **changes)


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
        "ncclsync[cuda]",
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
    "Keras 2": (
        changed(CPU, "frameworks", keras="2.15.0"),
        "error keras-old",
        "Received: 2.15.0",
        "--upgrade",
    ),
    "Keras old": (
        changed(CPU, "frameworks", keras="3.9.2"),
        "warning keras-old",
        "Received: 3.9.2",
        "--upgrade",
    ),
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
            CPU,
            troubles=(Trouble("frameworks", "compiling by XLA", "killed by SIGABRT", "Unknown flag"),),
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
        changed(GPUS, "libraries", nccl=Library("2.4.8", "/old.so")),
        "error nccl-old",
        "Received: 2.4.8 from /old.so",
        "--upgrade nvidia-nccl-cu12",
    ),
    "NCCL older than TensorFlow's": (
        changed(GPUS, "libraries", nccl=Library("2.21.5", "/old.so")),
        "warning nccl-older-than-tensorflow",
        "2.21.5",
        "--upgrade nvidia-nccl-cu12",
    ),
    "NCCL twice": (
        changed(GPUS, "libraries", nccl_copies=(Library("2.32.3", "/nccl.so"), Library("2.18.3", "/b.so"))),
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
    "NCCL fails": (
        failed("raised", log=("NCCL WARN x",)),
        "error all-reduce-raised",
        "NCCL WARN x",
        "NCCL_DEBUG=INFO",
    ),
    "wrong numbers on the CPU": (failed("wrong", CPU), "error all-reduce-wrong", "the cpu backend", "again"),
    "no nvidia-ml-py": (
        changed(GPUS, "driver", gpus=(), links=(), error="NotInstalled"),
        "warning nvml-not-installed",
        "not installed",
        "pip install nvidia-ml-py",
    ),
    "no driver for a GPU": (
        dataclasses.replace(changed(CPU, "driver", error="LibraryNotFound"), present=2),
        "warning driver-missing",
        "2 NVIDIA GPU(s) are there",
        "Install the NVIDIA driver",
    ),
    "driver not loaded": (
        changed(CPU, "driver", error="DriverNotLoaded"),
        "warning driver-missing",
        "DriverNotLoaded",
        "modprobe nvidia",
    ),
    "driver half updated": (
        changed(CPU, "driver", error="LibRmVersionMismatch"),
        "warning driver-mismatch",
        "differ in version",
        "Restart",
    ),
    "NVML's other errors": (
        changed(CPU, "driver", error="Unknown"),
        "warning nvml-error",
        "Unknown",
        "nvidia-smi",
    ),
    "hidden GPUs": (
        given(unseen(), CUDA_VISIBLE_DEVICES=""),
        "warning gpus-hidden",
        "CUDA_VISIBLE_DEVICES='' hides all 4",
        "0,1,2,3",
    ),
    "CPU build of TensorFlow": (
        unseen(cuda_build=False),
        "warning gpus-unseen",
        "sees 0 of 4 GPU(s): it was built without CUDA. Training runs on the CPU",
        "tensorflow[and-cuda]",
    ),
    "TensorFlow without its libraries": (
        changed(unseen(), "libraries", missing=("libcudnn.so.9",)),
        "warning gpus-unseen",
        "libcudnn.so.9",
        "ncclsync[cuda]",
    ),
    "TensorFlow sees none, and says why": (
        unseen(log=("E0000 cuInit failed",)),
        "warning gpus-unseen",
        "cuInit failed",
        "Compare",
    ),
    "TensorFlow sees some": (
        changed(GPUS, "frameworks", gpus=("GPU:0",)),
        "warning gpus-unseen",
        "sees 1 of 4",
        "Compare",
    ),
    "lost GPU": (
        with_gpus(gpu(0), gpu(1), gpu(2), Gpu(3, error="GpuIsLost")),
        "error gpu-lost",
        "GPU 3 does not answer",
        "dmesg",
    ),
    "MIG": (with_gpus(gpu(0, mig=True)), "warning mig", "GPU 0 is in MIG mode", "nvidia-smi -i 0 -mig 0"),
    "prohibited": (with_gpus(gpu(0, prohibited=True)), "error gpu-prohibited", "Prohibited", "-c DEFAULT"),
    "busy": (with_gpus(gpu(0, used_bytes=70 * GIB)), "warning gpu-busy", "70.0 of 80.0 GiB", "nvidia-smi"),
    "too old a GPU": (
        with_gpus(gpu(0, compute_capability="5.2")),
        "error gpu-too-old",
        "TensorFlow has code from 6.0",
        "CUDA_VISIBLE_DEVICES",
    ),
    "too new a GPU": (
        with_gpus(gpu(0, compute_capability="12.0")),
        "warning gpu-newer-than-tensorflow",
        "TensorFlow has code up to 9.0",
        "newer TensorFlow",
    ),
    "unequal GPUs": (
        with_gpus(gpu(0), gpu(1), gpu(2), gpu(3, name="A100")),
        "warning gpus-unequal",
        "A100 (80 GiB), H100 (80 GiB)",
        "CUDA_DEVICE_ORDER",
    ),
    "no peer-to-peer access": (
        changed(GPUS, "driver", links=links("not supported")),
        "warning no-p2p",
        "between GPUs 0-1, 0-2, 0-3, 1-2, 1-3, 2-3: not supported",
        "ACS",
    ),
    "small /dev/shm": (
        dataclasses.replace(GPUS, shm_bytes=64 << 20, shm_free_bytes=64 << 20),
        "warning shm-small",
        "/dev/shm has 64 MiB",
        "--shm-size=1g",
    ),
    "full /dev/shm": (
        dataclasses.replace(GPUS, shm_bytes=8 * GIB, shm_free_bytes=1 << 20),
        "warning shm-small",
        "1 MiB of it free",
        "remove what fills it",
    ),
    "no /dev/shm": (
        dataclasses.replace(GPUS, shm_bytes=None, shm_free_bytes=None),
        "warning shm-small",
        "no /dev/shm",
        "--shm-size=1g",
    ),
    "wrong interface": (
        given(GPUS, NCCL_SOCKET_IFNAME="ib"),
        "error variable-NCCL_SOCKET_IFNAME",
        "leaves no network interface of lo, eth0",
        "Unset",
    ),
    "every interface excluded": (
        given(GPUS, NCCL_SOCKET_IFNAME="^lo,eth"),
        "error variable-NCCL_SOCKET_IFNAME",
        "leaves no network interface",
        "Unset",
    ),
    "file that is not there": (
        given(GPUS, NCCL_TOPO_FILE="/nowhere.xml"),
        "warning variable-NCCL_TOPO_FILE",
        "/nowhere.xml",
        "Unset",
    ),
    **{
        f"{name}={value}": (
            given(GPUS, **{name: value}),
            f"warning variable-{name}",
            f"{name}={value} ",
            f"Unset {name}",
        )
        for name, value in (
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_P2P_LEVEL", "LOC"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_ALGO", "Tree"),
            ("NCCL_PROTO", "LL128"),
            ("NCCL_MAX_CTAS", "1"),
            ("NCCL_DEBUG", "TRACE"),
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        )
    },
    "one OpenMP thread": (
        given(CPU, OMP_NUM_THREADS="1"),
        "warning variable-OMP_NUM_THREADS",
        "one of 16",
        "=16",
    ),
    "too many OpenMP threads": (
        given(CPU, OMP_NUM_THREADS="99"),
        "warning variable-OMP_NUM_THREADS",
        "more than the 16 cores",
        "=16",
    ),
    "no OpenMP number": (
        given(CPU, OMP_NUM_THREADS="all"),
        "warning variable-OMP_NUM_THREADS",
        "Received: 'all'",
        "=16",
    ),
    "legacy Keras": (
        given(CPU, TF_USE_LEGACY_KERAS="1"),
        "warning variable-TF_USE_LEGACY_KERAS",
        "Keras 2",
        "Unset",
    ),
    "cluster": (
        given(CPU, TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}}'),
        "warning variable-TF_CONFIG",
        "2 tasks",
        "Unset TF_CONFIG",
    ),
    "automatic XLA": (
        given(CPU, TF_XLA_FLAGS="--tf_xla_auto_jit=2"),
        "warning variable-TF_XLA_FLAGS",
        "--tf_xla_auto_jit=2",
        "jit_compile",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_problem_is_found(case):
    """Just this problem, of this severity, with its remedy; the exit status follows."""
    host, expected, text, remedy = ROWS[case]
    (problem,) = find_problems(host)
    assert f"{problem.severity} {problem.code}" == expected
    assert text in problem.text
    assert remedy in problem.remedy
    report = Report(host, (), (problem,), summarize(host, (problem,)))
    assert report.healthy == (problem.severity == "warning")
    assert report.summary.startswith(
        "Training would run, with 1" if report.healthy else "Training would fail: 1"
    )


FINE = {
    "GPUs": GPUS,
    "no GPU": CPU,
    "no GPU, no NCCL": changed(CPU, "libraries", nccl=NOT_THERE, nccl_copies=()),
    "no GPU, NVML without a driver": changed(CPU, "driver", error="LibraryNotFound"),
    "no GPU, small /dev/shm": dataclasses.replace(CPU, shm_bytes=1, shm_free_bytes=1),
    "some GPUs chosen": given(
        dataclasses.replace(
            changed(GPUS, "frameworks", gpus=("GPU:0",)), choice=Choice("nccl", ("GPU:0",), "")
        ),
        CUDA_VISIBLE_DEVICES="2",
    ),
    "harmless variables": given(
        GPUS,
        NCCL_DEBUG="WARN",
        NCCL_P2P_DISABLE="0",
        NCCL_P2P_LEVEL="NVL",
        NCCL_SOCKET_IFNAME="^docker,ib",
        OMP_NUM_THREADS="8,2",
        TF_CONFIG='{"cluster": {"worker": ["a:1"]}}',
        TF_XLA_FLAGS="--tf_xla_auto_jit=0",
        XLA_FLAGS="--xla_dump_to=/tmp/x",
    ),
    "NCCL's variables without GPU": given(CPU, NCCL_P2P_DISABLE="1", NCCL_SOCKET_IFNAME="ib"),
    "access not known": changed(GPUS, "driver", links=links(None)),
    "TensorFlow's CUDA newer by a minor version": changed(
        changed(GPUS, "frameworks", build_cuda="12.9.2"),
        "libraries",
        nccl=Library("2.32.3", "/nccl.so", "12.9"),
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_nothing_is_found(case):
    """A healthy host has no problem."""
    assert find_problems(FINE[case]) == []
    assert summarize(FINE[case], ()).startswith("Healthy.")


def test_several_problems():
    """Errors come first, and the summary counts both kinds."""
    host = given(failed("hang"), NCCL_ALGO="Ring", OMP_NUM_THREADS="1")
    found = tuple(find_problems(host))
    assert [problem.severity for problem in found] == ["error", "warning", "warning"]
    assert summarize(host, found) == "Training would fail: 1 error, 2 warnings. 4 GPUs on this machine."


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("3, 0", [3, 0]),
        ("1,7,2", [1]),
        ("GPU-2a,gpu-0aa", [2, 0]),
        ("MIG-5f", []),
    ],
)
def test_visible_gpus(value, left):
    """As CUDA reads the variable: up to the first name that it does not know."""
    host = GPUS if value is None else given(GPUS, CUDA_VISIBLE_DEVICES=value)
    assert [gpu.index for gpu in visible_gpus(host)] == left


def test_variables(tmp_path):
    """Those that matter, sorted, before NCCL's files, which the environment overrides; no one's secrets."""
    file = tmp_path / "nccl.conf"
    file.write_text("# NCCL_PROTO=LL\nNCCL_ALGO=Ring\nNCCL_DEBUG=INFO\n\nnonsense\n")
    environ = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "", "NCCL_NEW": "1", "TF_VAR_password": "x", "HOME": "/"}
    found = environment.read_variables(environ, (tmp_path / "none", file))
    assert [(one.name, one.value) for one in found] == [
        ("NCCL_DEBUG", ""),
        ("NCCL_NEW", "1"),
        ("OMP_NUM_THREADS", "2"),
        ("NCCL_ALGO", "Ring"),
    ]
    assert found[3].source == str(file) and found[0].source == "environment"
    assert "OpenMP" in found[2].effect
    (problem,) = find_problems(dataclasses.replace(GPUS, variables=found[3:]))
    assert problem.remedy == f"Remove NCCL_ALGO from {file}."


def test_devices_of_the_kernel(tmp_path):
    """NVIDIA's display controllers count; other classes and vendors do not."""
    for name, vendor, kind in (
        ("a", "0x10de", "0x030200"),
        ("b", "0x10de", "0x030000"),
        ("c", "0x10de", "0x068000"),
        ("d", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert environment.count_gpus(tmp_path) == 2
    assert environment.count_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: gcc 12.3.0",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build", "560.35.03"),
        (None, None),
    ],
)
def test_version_of_the_kernel_module(tmp_path, text, version):
    """As the kernel module writes it."""
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert environment.kernel_driver(file) == version


def test_shared_memory():
    """In bytes; None where there is none."""
    size, free = environment.shared_memory("/")
    assert size > free > 0
    assert environment.shared_memory("/no/such/folder") == (None, None)
