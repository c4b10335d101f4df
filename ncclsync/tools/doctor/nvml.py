"""Read GPUs and their links from the driver, by NVML. Only this module uses pynvml (nvidia-ml-py).

A query that the driver, the GPU or nvidia-ml-py does not know returns None, and never raises.
"""

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
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


Ask = Callable[..., Any]  # takes the name of a query of NVML's and its arguments; returns the answer, or None


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

    def ask(query: str, *arguments: Any) -> Any:
        try:
            answer = getattr(pynvml, query, lambda *_: None)(*arguments)
        except pynvml.NVMLError:
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    try:
        cuda = ask("nvmlSystemGetCudaDriverVersion_v2") or ask("nvmlSystemGetCudaDriverVersion")
        handles: dict[int, Any] = {}
        gpus = []
        for index in range(ask("nvmlDeviceGetCount") or 0):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_read_gpu(ask, index, handles[index]))
            except pynvml.NVMLError as error:
                gpus.append(Gpu(index, error=_name(error)))
        return Driver(
            version=ask("nvmlSystemGetDriverVersion"),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            gpus=tuple(gpus),
            links=tuple(_read_links(ask, handles, getattr(pynvml, "NVML_NVLINK_MAX_LINKS", _MOST_NVLINKS))),
        )
    finally:
        ask("nvmlShutdown")


def _read_gpu(ask: Ask, index: int, handle: Any) -> Gpu:
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    mode = ask("nvmlDeviceGetComputeMode", handle)
    return Gpu(
        index=index,
        name=ask("nvmlDeviceGetName", handle),
        uuid=ask("nvmlDeviceGetUUID", handle),
        pci_bus_id=_bus_id(ask("nvmlDeviceGetPciInfo", handle)),
        memory_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        compute_capability=".".join(map(str, capability)) if capability else None,
        mig=bool(mig[0]) if mig else None,
        prohibited=mode == _COMPUTE_PROHIBITED if mode is not None else None,
    )


def _read_links(ask: Ask, handles: dict[int, Any], most: int) -> Iterator[Link]:
    """Yield the link of each pair of GPUs, with its active NVLinks, direct or by NVSwitches; a GPU has up to `most`."""
    at = {_bus_id(ask("nvmlDeviceGetPciInfo", handle)): index for index, handle in handles.items()}
    at.pop(None, None)
    direct: Counter[tuple[int, int]] = Counter()
    switched: Counter[int] = Counter()
    for index, handle in handles.items():
        for link in range(most):
            if ask("nvmlDeviceGetNvLinkState", handle, link) != 1:
                continue
            other = at.get(_bus_id(ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)))
            if other is not None:
                direct[index, other] += 1
            elif ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _SWITCH:
                switched[index] += 1
    for a, b in itertools.combinations(handles, 2):
        # A direct link was counted at both ends.
        nvlinks = max(direct[a, b], direct[b, a]) or min(switched[a], switched[b])
        ends = handles[a], handles[b]
        path = _PATHS.get(ask("nvmlDeviceGetTopologyCommonAncestor", *ends))
        asked = itertools.product((ends, ends[::-1]), (_P2P_READ, _P2P_WRITE))
        statuses = [ask("nvmlDeviceGetP2PStatus", *pair, kind) for pair, kind in asked]
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
