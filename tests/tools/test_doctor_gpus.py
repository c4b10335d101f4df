"""What doctor calls a problem with GPUs, links and variables, and how it reads what is around a process."""

import dataclasses

import pytest
from hosts import CPU, GIB, GPUS, changed, check_row, given, gpu, links, unseen, with_gpus

from ncclsync.compat import host_gpus
from ncclsync.tools.doctor import environment
from ncclsync.tools.doctor.facts import Gpu
from ncclsync.tools.doctor.problems import find_problems

ROWS = {
    # as in test_doctor_rules.py
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
    "NVML's other errors": (changed(CPU, "driver", error="Unknown"), "warning nvml-error", "Unknown", "nvidia-smi"),
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
        "[cuda]",
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
    "NVLS against determinism": (
        given(changed(GPUS, "frameworks", nvls_variable="NCCL_NVLS_ENABLE=1"), NCCL_NVLS_ENABLE="1"),
        "warning variable-NCCL_NVLS_ENABLE-nvls",
        "NCCL_NVLS_ENABLE=1 asks for NVLS",
        "Unset NCCL_NVLS_ENABLE: NVLS is then kept out",
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
    "legacy Keras": (given(CPU, TF_USE_LEGACY_KERAS="1"), "warning variable-TF_USE_LEGACY_KERAS", "Keras 2", "Unset"),
    "cluster": (
        given(CPU, TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}}'),
        "warning variable-TF_CONFIG",
        "2 tasks",
        "Unset TF_CONFIG",
    ),
    "automatic XLA": (
        given(CPU, TF_XLA_FLAGS="--tf_xla_auto_jit=2 --tf_xla_max_cluster_size=0"),
        "warning variable-TF_XLA_FLAGS",
        "--tf_xla_auto_jit=2",
        "jit_compile",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_problem_is_found(case):
    """Just this problem, of this severity, with its remedy; the exit status follows."""
    check_row(*ROWS[case])


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
        ("0,0", []),
        ("1,GPU-1", [1]),
        ("GPU-1,gpu-1AA", []),
        ("GPU-", []),
        ("2,GPU-,1", [2]),
    ],
)
def test_visible_gpus(value, left):
    """As CUDA reads the variable: up to the first name that it does not know."""
    host = GPUS if value is None else given(GPUS, CUDA_VISIBLE_DEVICES=value)
    assert [gpu.index for gpu in host.visible_gpus] == left


def test_visible_instances():
    """A process has the first alone; older drivers name its GPU."""
    uuids = ["GPU-0aa", "GPU-1aa", "GPU-2aa"]
    for value, left in (("MIG-5f,MIG-6f", [1]), ("MIG-GPU-2aa/1/0", [2]), ("MIG-GPU-0aa/1/0", []), ("0,MIG-5f", [0])):
        assert host_gpus.left_by(value, uuids, divided=[2, 1]) == left


def test_variables(tmp_path, monkeypatch):
    """Those that matter, sorted, before NCCL's files, which the environment overrides; no one's secrets."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".nccl.conf"
    file.write_text("# NCCL_PROTO=LL\nNCCL_ALGO=Ring\nNCCL_DEBUG=INFO\n\nnonsense\n")
    environ = {
        "TF_XLA_FLAGS": "2",
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "",
        "NCCL_NEW": "1",
        "TF_VAR_password": "x",
        "HOME": "/",
    }
    found = environment.read_variables(environ)
    assert "NCCL_ALGO" not in {one.name for one in environment.read_variables({**environ, "NCCL_CONF_FILE": "/none"})}
    assert [(one.name, one.value) for one in found] == [
        ("NCCL_DEBUG", ""),
        ("NCCL_NEW", "1"),
        ("TF_XLA_FLAGS", "2"),
        ("NCCL_ALGO", "Ring"),
    ]
    assert found[3].source == str(file) and found[0].source == "environment"
    assert "XLA" in found[2].effect
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
    assert host_gpus.count_gpus(tmp_path, tmp_path / "dev") == 2
    assert host_gpus.count_gpus(tmp_path / "none", tmp_path / "dev") == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert host_gpus.count_gpus(tmp_path, tmp_path / "dev") == 3


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
    assert host_gpus.kernel_driver(file) == version
