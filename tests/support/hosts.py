"""Hosts as doctor finds them: a healthy one with GPUs, one without, and what differs from them in a fact."""

import dataclasses

from ncclsync.tools.doctor.facts import (
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
    Variable,
)
from ncclsync.tools.doctor.problems import find_problems

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


def failed(kind, host=GPUS, **changes):
    """The host on which the all-reduce fails."""
    return changed(host, "all_reduce", ok=False, kind=kind, error="why", **changes)


def check_row(host, expected, text, remedy):
    """Just one problem, "severity code", with these words; the verdict follows from its severity."""
    (problem,) = find_problems(host)
    assert f"{problem.severity} {problem.code}" == expected
    assert text in problem.text
    assert remedy in problem.remedy
    report = Report(host, (), (problem,))
    assert report.healthy == (problem.severity == "warning")
    verdict = "Training would run, with 1 warning" if report.healthy else "Training would fail: 1 error"
    assert report.summary.startswith(verdict)
