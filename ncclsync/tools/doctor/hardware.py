"""Find problems of a host's GPUs, their driver and their links, with remedies."""

from collections.abc import Callable, Iterator

from ncclsync.compat.host_gpus import VISIBLE, left_by
from ncclsync.tools.doctor.facts import Gpu, Host, Problem

SHM_BYTES = 512 << 20  # NCCL's buffers between GPUs without direct transfers; containers start with 64 MiB
_BUSY = 0.5  # of a GPU's memory, used by other processes


def visible_gpus(host: Host) -> tuple[Gpu, ...]:
    """Return the driver's GPUs that CUDA_VISIBLE_DEVICES leaves; see `left_by`."""
    gpus = host.driver.gpus
    divided = [i for i, gpu in enumerate(gpus) if gpu.mig]
    return tuple(gpus[i] for i in left_by(host.variable(VISIBLE), [gpu.uuid for gpu in gpus], divided))


def _driver(host: Host) -> Iterator[Problem]:
    error, detail = host.driver.error, host.driver.detail
    seen = bool(host.present or host.kernel_driver or host.frameworks.gpus)
    container = "In a container: start it with --gpus all (NVIDIA Container Toolkit)."
    if error == "NotInstalled":
        if seen:
            yield Problem(
                "nvml-not-installed",
                "There are NVIDIA GPUs, but nvidia-ml-py is not installed: memory and links are unknown.",
                "pip install nvidia-ml-py",
            )
    elif error in ("LibraryNotFound", "DriverNotLoaded") and not host.frameworks.gpus:
        if seen or error == "DriverNotLoaded":
            gpus = f"{host.present} NVIDIA GPU(s) are" if host.present else "NVIDIA software is"
            yield Problem(
                "driver-missing",
                f"{gpus} there, but no driver answers ({error}: {detail}). Training runs on the CPU.",
                f"Install the NVIDIA driver, or load it (sudo modprobe nvidia). {container}",
            )
    elif error == "LibRmVersionMismatch":
        yield Problem(
            "driver-mismatch",
            "The driver's libraries and its kernel module differ in version: no program can use a GPU.",
            "Restart the machine: the driver was updated while it was loaded.",
        )
    elif error is not None and error != "NoAnswer":  # "NoAnswer" is shown as a trouble
        yield Problem("nvml-error", f"NVML does not answer: {error} ({detail}).", f"Run nvidia-smi. {container}")


def _unseen(host: Host) -> Iterator[Problem]:
    """Find GPUs that the driver has and TensorFlow has not."""
    found, visible = host.frameworks, len(visible_gpus(host))
    everyone = len(host.driver.gpus)
    if not everyone or found.cuda_build is None or any(one.question == "frameworks" for one in host.troubles):
        return  # there are no GPUs, or TensorFlow did not answer
    hidden = host.variable("CUDA_VISIBLE_DEVICES")
    if not visible and hidden is not None:
        yield Problem(
            "gpus-hidden",
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides all {everyone} GPU(s). Training runs on the CPU.",
            f"Unset CUDA_VISIBLE_DEVICES, or name GPUs by number: {','.join(map(str, range(everyone)))}.",
        )
        return
    if len(found.gpus) >= visible or any(gpu.mig for gpu in host.driver.gpus):
        return
    text = f"TensorFlow sees {len(found.gpus)} of {visible} GPU(s)"
    slow = "" if found.gpus else " Training runs on the CPU."
    install = "pip install 'ncclsync[cuda]', which brings tensorflow[and-cuda]"
    if not found.cuda_build:
        text = f"{text}: it was built without CUDA.{slow}"
        remedy = f"pip uninstall tensorflow-cpu; {install}"
    elif host.libraries.missing:
        text = f"{text}: these libraries are not found: {', '.join(host.libraries.missing)}.{slow}"
        remedy = f"{install} (the CUDA libraries)."
    else:
        logged = f" It says: {found.log[-1]}" if found.log else ""
        text = f"{text}.{slow}{logged}"
        remedy = "Compare the driver and the GPUs (nvidia-smi) with what TensorFlow was built for."
    yield Problem("gpus-unseen", text, remedy)


def _each_gpu(host: Host) -> Iterator[Problem]:
    built_for = host.frameworks.build_capabilities
    newest = max((_pair(one) for one in built_for), default=None)
    oldest = min((_pair(one) for one in built_for), default=None)
    for gpu in visible_gpus(host):
        name = f"GPU {gpu.index}"
        if gpu.error:
            yield Problem(
                "gpu-lost",
                f"{name} does not answer ({gpu.error}).",
                "Look into dmesg for Xid errors; restart the machine; leave it out by CUDA_VISIBLE_DEVICES.",
                host.severity,
            )
            continue
        if gpu.mig:
            yield Problem(
                "mig",
                f"{name} is in MIG mode: a process sees one of its instances, and NCCL joins none of them.",
                f"sudo nvidia-smi -i {gpu.index} -mig 0, to train on whole GPUs.",
            )
        if gpu.prohibited:
            yield Problem(
                "gpu-prohibited",
                f"{name} is in compute mode Prohibited.",
                f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
                host.severity,
            )
        if gpu.memory_bytes and (gpu.used_bytes or 0) > _BUSY * gpu.memory_bytes:
            yield Problem(
                "gpu-busy",
                f"{name} has {(gpu.used_bytes or 0) / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB "
                "in use by other processes.",
                "End them (nvidia-smi lists them), or leave the GPU out by CUDA_VISIBLE_DEVICES.",
            )
        if not gpu.compute_capability or newest is None or oldest is None:
            continue
        capability = _pair(gpu.compute_capability)
        if capability < oldest:
            yield Problem(
                "gpu-too-old",
                f"{name} has compute capability {gpu.compute_capability}; TensorFlow has code from "
                f"{'.'.join(map(str, oldest))} on.",
                "Leave it out by CUDA_VISIBLE_DEVICES, or build TensorFlow for it.",
                host.severity,
            )
        elif capability[0] > newest[0]:
            yield Problem(
                "gpu-newer-than-tensorflow",
                f"{name} has compute capability {gpu.compute_capability}; TensorFlow has code up to "
                f"{'.'.join(map(str, newest))}, and compiles the rest at its first start, for many minutes.",
                "Use a newer TensorFlow; keep the cache of compiled kernels (CUDA_CACHE_MAXSIZE=4294967296).",
            )


def _unequal(host: Host) -> Iterator[Problem]:
    kinds = {(gpu.name, gpu.memory_bytes) for gpu in visible_gpus(host) if not gpu.error}
    if len(kinds) > 1:
        listed = ", ".join(
            f"{name or 'unknown'} ({(memory or 0) / 2**30:.0f} GiB)" for name, memory in sorted(kinds, key=str)
        )
        yield Problem(
            "gpus-unequal",
            f"The GPUs are not alike: {listed}. By default batches are split evenly, and all wait for the slowest.",
            'Give the faster ones more rows by shares="auto", or choose equal ones by CUDA_VISIBLE_DEVICES, with '
            "CUDA_DEVICE_ORDER=PCI_BUS_ID.",
        )


def _links(host: Host) -> Iterator[Problem]:
    visible = {gpu.index for gpu in visible_gpus(host)}
    without = [link for link in host.driver.links if link.p2p not in ("ok", None) and visible.issuperset(link.gpus)]
    if without:
        pairs = ", ".join(f"{a}-{b}" for a, b in (link.gpus for link in without[:6]))
        more = f" and {len(without) - 6} more" if len(without) > 6 else ""
        reasons = "; ".join(dict.fromkeys(str(link.p2p) for link in without))
        yield Problem(
            "no-p2p",
            f"No peer-to-peer access between GPUs {pairs}{more}: {reasons}. "
            "All-reduce goes through the host's memory, several times slower.",
            "Where the GPUs can do it (nvidia-smi topo -p2p r): turn off ACS and the IOMMU in the firmware, "
            "or choose GPUs under one PCIe switch by CUDA_VISIBLE_DEVICES.",
        )


def _shared_memory(host: Host) -> Iterator[Problem]:
    if len(visible_gpus(host)) < 2 and len(host.choice.devices) < 2:
        return  # nothing goes through it
    size, free = host.shm_bytes, host.shm_free_bytes
    if size is None or free is None:
        text = "There is no /dev/shm."
    elif min(size, free) < SHM_BYTES:
        text = f"/dev/shm has {size >> 20} MiB, {free >> 20} MiB of it free."
    else:
        return
    yield Problem(
        "shm-small",
        f"{text} NCCL's buffers between GPUs without peer-to-peer access are there, and must fit.",
        "In a container: start it with --shm-size=1g. Else: sudo mount -o remount,size=1g /dev/shm, "
        "and remove what fills it.",
    )


def _pair(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


RULES: tuple[Callable[[Host], Iterator[Problem]], ...] = (_driver, _unseen, _each_gpu, _unequal, _links, _shared_memory)
