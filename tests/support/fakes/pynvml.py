"""A pynvml for machines without a driver: FAKE_NVML names the host that it tells of.

Tests put this folder first on PYTHONPATH. As in the real one, NVML_P2P_CAPS_INDEX_READ is a tuple, which no
query takes.
"""

import os
import types

NVML_NVLINK_MAX_LINKS = 18
NVML_P2P_CAPS_INDEX_READ = (0,)
NVML_P2P_CAPS_INDEX_WRITE = 1
NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
GIB = 1 << 30


class NVMLError(Exception):
    """As the real one, whose subclasses have a number each."""

    value = 999


class NVMLError_NotSupported(NVMLError):
    value = 3


class NVMLError_InvalidArgument(NVMLError):
    value = 2


class NVMLError_DriverNotLoaded(NVMLError):
    value = 9


class NVMLError_LibraryNotFound(NVMLError):
    value = 12


class NVMLError_LibRmVersionMismatch(NVMLError):
    value = 18


class NVMLError_GpuIsLost(NVMLError):
    value = 15


def gpus(count, **changes):
    """GPUs of one kind, without NVLinks, all with peer-to-peer access, under one CPU."""
    gpu = {
        "name": "NVIDIA A100-SXM4-80GB",
        "capability": (8, 0),
        "total": 80 * GIB,
        "used": GIB // 2,
        "mig": 0,
        "mode": 0,
        "links": (),
        "p2p": 0,
        "topology": 40,
        **changes,
    }
    return [dict(gpu) for _ in range(count)]


def nvlink_pairs():
    """Four GPUs; 0-1 and 2-3 have four NVLinks each, the pairs only the way between sockets."""
    hosts = gpus(4, topology=50)
    for index, gpu in enumerate(hosts):
        gpu["links"] = [("gpu", index ^ 1)] * 4 + [None] * 2
    return hosts


UNSUPPORTED = ("MemoryInfo", "CudaComputeCapability", "MigMode", "ComputeMode", "TopologyCommonAncestor", "P2PStatus")

HOSTS = {
    "none": [],
    "one": gpus(1, mig=None),
    "pairs": nvlink_pairs(),
    "switch": gpus(4, links=[("switch", None)] * 12),
    "no p2p": gpus(4, p2p=5, topology=30, name="NVIDIA GeForce RTX 4090", capability=(8, 9)),
    "regkey": gpus(2, p2p=4),
    "mig": gpus(2, mig=1),
    "unsupported": gpus(2, unsupported=UNSUPPORTED),
    "lost": [*gpus(1), *gpus(1, lost=True)],
    "unequal": [*gpus(1), *gpus(1, name="Tesla P100", capability=(5, 2), used=70 * GIB, mode=2)],
}
ERRORS = {
    "no library": NVMLError_LibraryNotFound,
    "not loaded": NVMLError_DriverNotLoaded,
    "mismatch": NVMLError_LibRmVersionMismatch,
}
HOST = os.environ.get("FAKE_NVML", "none")


def nvmlInit():
    if HOST == "hang":
        import time

        time.sleep(600)
    if HOST in ERRORS:
        raise ERRORS[HOST]("told to fail")


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return b"550.54.15" if HOST == "pairs" else "550.54.15"


def nvmlSystemGetCudaDriverVersion_v2():
    return int(os.environ.get("FAKE_CUDA", "12090"))


def nvmlDeviceGetCount():
    return len(HOSTS[HOST])


def nvmlDeviceGetHandleByIndex(index):
    gpu = HOSTS[HOST][index]
    if gpu.get("lost"):
        raise NVMLError_GpuIsLost
    return index


def _gpu(handle, query):
    gpu = HOSTS[HOST][handle]
    if query in gpu.get("unsupported", ()):
        raise NVMLError_NotSupported
    return gpu


def nvmlDeviceGetName(handle):
    return _gpu(handle, "Name")["name"]


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}{handle}aa-bb"


def nvmlDeviceGetMemoryInfo(handle):
    gpu = _gpu(handle, "MemoryInfo")
    return types.SimpleNamespace(total=gpu["total"], used=gpu["used"], free=gpu["total"] - gpu["used"])


def nvmlDeviceGetCudaComputeCapability(handle):
    return _gpu(handle, "CudaComputeCapability")["capability"]


def nvmlDeviceGetMigMode(handle):
    mode = _gpu(handle, "MigMode")["mig"]
    if mode is None:
        raise NVMLError_NotSupported
    return [mode, mode]


def nvmlDeviceGetComputeMode(handle):
    return _gpu(handle, "ComputeMode")["mode"]


def nvmlDeviceGetPciInfo(handle):
    return types.SimpleNamespace(busId=f"00000000:{handle:X}A:00.0".encode())


def nvmlDeviceGetNvLinkState(handle, link):
    links = _gpu(handle, "NvLink")["links"]
    if not links:
        raise NVMLError_NotSupported
    if link >= len(links):
        raise NVMLError_InvalidArgument
    return int(links[link] is not None)


def nvmlDeviceGetNvLinkRemotePciInfo(handle, link):
    kind, other = HOSTS[HOST][handle]["links"][link]
    # A shorter domain than elsewhere, as some drivers have it.
    return types.SimpleNamespace(busId=b"0000:%xa:00.0" % other if kind == "gpu" else b"00000000:C1:00.0")


def nvmlDeviceGetNvLinkRemoteDeviceType(handle, link):
    return {"gpu": 0, "switch": 2}[HOSTS[HOST][handle]["links"][link][0]]


def nvmlDeviceGetTopologyCommonAncestor(one, other):
    return _gpu(one, "TopologyCommonAncestor")["topology"]


def nvmlDeviceGetP2PStatus(one, other, kind):
    if not isinstance(kind, int):
        raise TypeError(f"don't know how to convert {kind!r}")
    return _gpu(one, "P2PStatus")["p2p"]
