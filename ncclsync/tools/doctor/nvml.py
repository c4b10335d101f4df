"""Read GPUs and their links from the driver, by NVML. Only this module uses pynvml (nvidia-ml-py).

A query that the driver, the GPU or nvidia-ml-py does not know returns None, and never raises.
"""

import importlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ncclsync.tools.doctor.facts import Driver, Gpu, Link

_MOST_NVLINKS = 36  # if pynvml does not tell; a GPU answers for its own

# nvmlGpuTopologyLevel_t, by nvidia-smi's names. A board with two GPUs (0) has its own switch.
_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

# nvmlGpuP2PCapsIndex_t. Not pynvml's constants: its NVML_P2P_CAPS_INDEX_READ is the tuple (0,).
_P2P_READ, _P2P_WRITE = 0, 1
# nvmlGpuP2PStatus_t
_P2P_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "disabled in the driver's settings",
    5: "not supported",
}

_COMPUTE_PROHIBITED = 2
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


def read_driver() -> Driver:
    """Ask NVML for the driver, its GPUs and their links. May hang if a GPU does."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError as error:
        return Driver(error="NotInstalled", detail=str(error))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(error=_name(error), detail=str(error))
    nvml = _Nvml(pynvml)
    try:
        return _read(nvml)
    finally:
        nvml.ask("nvmlShutdown")


class _Nvml:
    """Wrap pynvml; unknown queries return None."""

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml

    def ask(self, query: str, *arguments: Any) -> Any:
        function = getattr(self.pynvml, query, None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self.pynvml.NVMLError:
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _read(nvml: _Nvml) -> Driver:
    cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2") or nvml.ask("nvmlSystemGetCudaDriverVersion")
    handles: dict[int, Any] = {}
    gpus = []
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        try:
            handles[index] = nvml.pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_read_gpu(nvml, index, handles[index]))
        except nvml.pynvml.NVMLError as error:
            gpus.append(Gpu(index, error=_name(error)))
    return Driver(
        version=nvml.ask("nvmlSystemGetDriverVersion"),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        gpus=tuple(gpus),
        links=tuple(_read_links(nvml, handles)),
    )


def _read_gpu(nvml: _Nvml, index: int, handle: Any) -> Gpu:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    mode = nvml.ask("nvmlDeviceGetComputeMode", handle)
    return Gpu(
        index=index,
        name=nvml.ask("nvmlDeviceGetName", handle),
        uuid=nvml.ask("nvmlDeviceGetUUID", handle),
        pci_bus_id=_bus_id(nvml.ask("nvmlDeviceGetPciInfo", handle)),
        memory_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        compute_capability=".".join(map(str, capability)) if capability else None,
        mig=bool(mig[0]) if mig else None,
        prohibited=mode == _COMPUTE_PROHIBITED if mode is not None else None,
    )


def _read_links(nvml: _Nvml, handles: dict[int, Any]) -> Iterator[Link]:
    """Yield the link of each pair of GPUs, with its active NVLinks, direct or by NVSwitches."""
    at = {_bus_id(nvml.ask("nvmlDeviceGetPciInfo", handle)): index for index, handle in handles.items()}
    at.pop(None, None)
    direct: Counter[tuple[int, int]] = Counter()
    switched: Counter[int] = Counter()
    for index, handle in handles.items():
        for link in range(getattr(nvml.pynvml, "NVML_NVLINK_MAX_LINKS", _MOST_NVLINKS)):
            if nvml.ask("nvmlDeviceGetNvLinkState", handle, link) != 1:
                continue
            other = at.get(_bus_id(nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)))
            if other is not None:
                direct[index, other] += 1
            elif nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH:
                switched[index] += 1
    for a, b in itertools.combinations(handles, 2):
        # A direct link was counted at both ends.
        nvlinks = max(direct[a, b], direct[b, a]) or min(switched[a], switched[b])
        ends = handles[a], handles[b]
        path = _PATHS.get(nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *ends))
        asked = itertools.product((ends, ends[::-1]), (_P2P_READ, _P2P_WRITE))
        statuses = [nvml.ask("nvmlDeviceGetP2PStatus", *pair, kind) for pair, kind in asked]
        worst = max((status for status in statuses if status is not None), default=None)
        access = None if worst is None else _P2P_STATUS.get(worst, "unknown")
        yield Link((a, b), f"NV{nvlinks}" if nvlinks else path, nvlinks, access)


def _bus_id(pci: Any) -> str | None:
    """Return a GPU's place on the PCI bus, "00000000:3b:00.0": some queries shorten the domain."""
    text = getattr(pci, "busId", None)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if not text or text.count(":") != 2:
        return None
    domain, _, rest = text.partition(":")
    return f"{domain:0>8}:{rest}".lower()


def _name(error: Exception) -> str:
    """Return NVML's name of an error, such as "DriverNotLoaded"."""
    return type(error).__name__.removeprefix("NVMLError").lstrip("_") or "Unknown"
