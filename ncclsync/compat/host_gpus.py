"""Tell which GPUs a host has, by the kernel's files, and which of them CUDA shows to a process."""

import ctypes
import pathlib
import re
import uuid
from collections.abc import Collection, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"

_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)")


def count_gpus(
    pci: pathlib.Path = pathlib.Path("/sys/bus/pci/devices"), dev: pathlib.Path = pathlib.Path("/dev")
) -> int:
    """Return the number of the kernel's NVIDIA GPUs, on the PCI bus or as devices, with or without a driver."""

    def number(file: pathlib.Path) -> int:
        try:
            return int(file.read_text(), 16)
        except (OSError, ValueError):
            return 0

    devices = pci.iterdir() if pci.is_dir() else ()
    # 0x03: a display controller; NVIDIA's network cards and switches have other classes.
    on_bus = sum(number(one / "vendor") == 0x10DE and number(one / "class") >> 16 == 3 for one in devices)
    return max(on_bus, sum(one.name.removeprefix("nvidia").isdecimal() for one in dev.glob("nvidia[0-9]*")))


def kernel_driver(file: pathlib.Path = pathlib.Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the loaded NVIDIA kernel module, such as "550.54.15"; None if there is none."""
    try:
        words = file.read_text(errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and word.count(".") in (1, 2)), None)


def read_uuids(folder: pathlib.Path = pathlib.Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the UUIDs of the driver's GPUs, in the order of the PCI bus."""
    files = sorted(folder.glob("*/information"))
    return [found[1] for file in files if (found := _UUID.search(file.read_text(errors="replace")))]


def shown_by_cuda(driver: str) -> list[str]:
    """Return the UUIDs of the GPUs that CUDA shows to this process, in its order; [] if it tells none.

    Args:
        driver: what to give to ``dlopen`` for CUDA's driver, which is initialised.
    """
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:  # no driver
        return []
    count, device, found = ctypes.c_int(), ctypes.c_int(), []
    whole, part = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []  # no GPU
    for ordinal in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid(whole, device):
            return []
        name = f"GPU-{uuid.UUID(bytes=bytes(whole))}"
        # For a part of a GPU (MIG) the newer function returns the part's own UUID.
        is_new = hasattr(cuda, "cuDeviceGetUuid_v2") and not cuda.cuDeviceGetUuid_v2(part, device)
        if is_new and bytes(part) != bytes(whole):
            name = f"MIG-{uuid.UUID(bytes=bytes(part))}"
        found.append(name)
    return found


def left_by(value: str | None, uuids: Sequence[str | None], divided: Collection[int] = ()) -> list[int]:
    """Return the numbers of the GPUs that a value of CUDA_VISIBLE_DEVICES leaves.

    As CUDA reads it: numbers, or beginnings of UUIDs, up to the first that names no GPU, or several; a GPU that is
    named twice leaves none. Of instances (MIG) a process has the first alone. CUDA may number different GPUs in another
    order; the number of GPUs is right.

    Args:
        value: of the variable; None: it is not set.
        uuids: of all GPUs; None for an unknown UUID.
        divided: numbers of the GPUs that are divided into instances (MIG).
    """
    if value is None:
        return [*range(len(uuids))]
    found: list[int] = []
    known = [(uuid or "").lower() for uuid in uuids]
    for name in (one.strip().lower() for one in value.split(",")):
        if name.startswith("mig-"):
            of_gpu = name.removeprefix("mig-").partition("/")[0]  # MIG-GPU-<its UUID>/<instance>, by older drivers
            return found or [i for i in sorted(divided) if of_gpu == known[i] or not of_gpu.startswith("gpu-")][:1]
        if value.strip()[:1].isdecimal():
            named = [i for i in range(len(uuids)) if str(i) == name]
        else:
            named = [i for i, uuid in enumerate(known) if name and uuid.startswith(name)]
        if len(named) != 1:
            break
        if named[0] in found:
            return []
        found += named
    return found
