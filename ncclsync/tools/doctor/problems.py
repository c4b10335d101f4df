"""Find problems of a host, given the facts, with remedies. Each rule is a small generator over `Host`."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ncclsync.errors import install
from ncclsync.tools.doctor.environment import EFFECTS
from ncclsync.tools.doctor.facts import ERROR, WARNING, Host, Problem

SHM_BYTES = 512 << 20  # NCCL's buffers between GPUs without direct transfers; containers start with 64 MiB

_BUSY = 0.5  # of a GPU's memory, used by other processes
_EXTENSION = "ncclsync._native"
_OLDEST_DRIVER = "12.5"  # by the CUDA that it serves: NCS_OLDEST_DRIVER in csrc/ncclsync.h
_INSTALL_GPU = f"{install('cuda')}, which brings tensorflow[and-cuda]"

_TRUE = ("1", "true", "yes", "on")

# Values of variables that may slow training or break it, in small letters; None: any. See `EFFECTS`.
_HARMFUL: dict[str, Sequence[str] | None] = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING"), _TRUE),
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO")),
    **dict.fromkeys(("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"), ("1", "2")),
    **{"NCCL_P2P_LEVEL": ("loc", "0"), "NCCL_DEBUG": ("info", "trace", "abort"), "CUDA_DEVICE_MAX_CONNECTIONS": ("1",)},
}


def find_problems(host: Host) -> list[Problem]:
    """Return the problems, errors first, otherwise in the order of the rules."""
    return by_severity([problem for rule in _RULES for problem in rule(host)])


def by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems with the errors first, otherwise in their order."""
    return sorted(problems, key=lambda problem: problem.severity != ERROR)


def _frameworks(host: Host) -> Iterator[Problem]:
    found, asked = host.frameworks, host.variable("KERAS_BACKEND")
    other_backend = (found.keras_backend or asked) not in ("tensorflow", None)
    # The oldest versions are those of pyproject.toml.
    for name, version, error, oldest in (
        ("TensorFlow", found.tensorflow, found.tensorflow_error, "2.20"),
        ("Keras", found.keras, found.keras_error, "3.10"),
    ):
        package, by_tensorflow = name.lower(), name == "Keras" and found.tensorflow_error and "tensorflow" in error
        install = f"pip install '{package}>={oldest}'"
        if f"No module named '{package}'" in error:
            remedy = _INSTALL_GPU if name == "TensorFlow" and host.gpu_count else install
            yield Problem(f"{package}-missing", f"{name} is not installed in this Python.", remedy, ERROR)
        elif name == "Keras" and other_backend:
            text = f"Expected Keras to run on the TensorFlow backend. Received: {found.keras_backend or asked!r}"
            text += f"; importing Keras ends in {error}" if error else ""
            where = "KERAS_BACKEND" if asked else '"backend" in ~/.keras/keras.json'
            yield Problem("keras-backend", text, f"Set {where} to tensorflow.", ERROR)
        elif error and not by_tensorflow:
            remedy = install.replace("install", "install --force-reinstall")
            yield Problem(f"{package}-broken", f"{name} cannot be imported: {error}", remedy, ERROR)
        elif version and _below(version, oldest):
            severity = WARNING if name == "Keras" and not _below(version, "3") else ERROR
            text = f"Expected {name} {oldest} or newer. Received: {version}"
            yield Problem(f"{package}-old", text, install.replace("install", "install --upgrade"), severity)


def _ncclsync(host: Host) -> Iterator[Problem]:
    error, unloaded = host.frameworks.ncclsync_error, host.libraries.nccl.error or ""
    if _EXTENSION in error or _EXTENSION in unloaded:
        text = f"The compiled part of ncclsync cannot be loaded: {error or unloaded}"
        remedy = "Install ncclsync again by pip; without a wheel for this machine that takes a C compiler."
        yield Problem("extension-missing", text, remedy, ERROR)
    elif error and host.frameworks.keras_backend in ("tensorflow", None) and not host.frameworks.keras_error:
        text = f"ncclsync does not work with this TensorFlow and Keras: {error}"
        yield Problem("ncclsync-broken", text, "Install the versions that the README names as tested.", ERROR)
    if host.frameworks.refused:
        yield apart(host.frameworks.refused)


def apart(words: str) -> Problem:
    """Return the problem that this process cannot be joined with others; the message's last sentence is the remedy."""
    words, _, remedy = words.rpartition(". ")
    return Problem("processes-apart", f"The processes cannot be joined: {words}.", f"{remedy.rstrip('.')}.", ERROR)


def _troubles(host: Host) -> Iterator[Problem]:
    remedies = {
        "driver": "Look whether nvidia-smi answers, and into dmesg for Xid errors; restart the machine.",
        "libraries": "Look which library it is by LD_DEBUG=files, and install it again.",
        "frameworks": "Run python -c 'import tensorflow, keras' to see more; "
        "pip install --force-reinstall 'tensorflow>=2.20'",
    }
    for one in host.troubles:
        severity = ERROR if one.question == "frameworks" else host.severity
        is_flag = one.stage == "compiling by XLA"
        remedy = "Correct XLA_FLAGS, or unset it." if is_flag else remedies[one.question]
        words = f": {one.words}" if one.words else ""
        text = f"Expected an answer when {one.stage}. Received: {one.how}{words}"
        yield Problem(f"{one.question}-unanswered", text, remedy, severity)


def _nccl(host: Host) -> Iterator[Problem]:
    nccl, chosen = host.libraries.nccl, host.variable("NCCLSYNC_NCCL_LIBRARY")
    needed, asked_for = host.uses_gpus, host.frameworks.build_nccl
    unset = "Unset NCCLSYNC_NCCL_LIBRARY"
    if nccl.error:
        if _EXTENSION in nccl.error or not (needed or host.gpu_count or chosen):
            return
        why = "used, it is too old or broken" if "undefined symbol" in nccl.error else "loaded"
        what = "NCCLSYNC_NCCL_LIBRARY names no usable NCCL" if chosen else f"NCCL cannot be {why}"
        file = f"{unset}, or set it to the file of a libnccl.so.2."
        remedy = file if chosen else "pip install --upgrade nvidia-nccl-cu12"
        code = "nccl-old" if "or newer. Received: NCCL" in nccl.error else "nccl-unusable"
        yield Problem(code, f"{what}: {nccl.error}", remedy, host.severity)
    elif host.libraries.is_other_nccl:
        if needed or chosen:
            text = f"Expected NCCL. Received: {nccl.path}, another library with its calls, version {nccl.version}."
            yield Problem("nccl-other", text, f"{unset}." if chosen else "pip install nvidia-nccl-cu12")
    elif nccl.version and asked_for and _below(nccl.version, asked_for):
        text = f"NCCL {nccl.version} from {nccl.path} is older than {asked_for}, "
        text += "the oldest that this TensorFlow's package asks for."
        newer = f"{unset}, or set it to a newer libnccl.so.2."
        remedy = newer if chosen else "pip install --upgrade nvidia-nccl-cu12"
        yield Problem("nccl-older-than-tensorflow", text, remedy)


def _nccl_twice(host: Host) -> Iterator[Problem]:
    copies, packages = [copy for copy in host.libraries.nccl_copies if copy.cuda], host.libraries.nccl_packages
    if len(copies) > 1:
        listed = "; ".join(f"{copy.version or 'of unknown version'} in {copy.path}" for copy in copies)
        text = f"NCCL is there {len(copies)} times: {listed}. ncclsync takes "
        text += f"{host.libraries.nccl.path or 'none of them'}; TensorFlow or another library may load another one "
        text += "into the same process."
        remedy = "Remove all but one, or set NCCLSYNC_NCCL_LIBRARY to the one that TensorFlow loads."
        yield Problem("nccl-twice", text, remedy)
    if len(packages) > 1:
        text = f"These packages write the same file, nvidia/nccl/lib/libnccl.so.2: {', '.join(packages)}. "
        text += "The one installed last has won."
        remedy = "Uninstall them all, then pip install --force-reinstall nvidia-nccl-cu12."
        yield Problem("nccl-packages", text, remedy)


def _cuda(host: Host) -> Iterator[Problem]:
    """Find a driver that is too old: it serves programs of its own CUDA major version and of older ones.

    And a missing runtime. Source: CUDA compatibility, https://docs.nvidia.com/deploy/cuda-compatibility/
    """
    serves, is_old = host.served_cuda, _has_old_driver(host)
    driver = f"driver {host.driver.version or host.kernel_driver or 'of unknown version'}"
    if is_old:
        text = f"Expected a driver that serves CUDA {_OLDEST_DRIVER} or newer. Received: {driver}, which serves CUDA "
        remedy = 'Update it to R555 or newer, or train on the CPU by devices=["CPU:0", "CPU:0"].'
        yield Problem("driver-old", f"{text}up to {serves}", remedy, host.severity)
    for library, built_with in (("NCCL", host.libraries.nccl.cuda), ("TensorFlow", host.frameworks.build_cuda)):
        minor = ".".join((built_with or "").split(".")[:2])
        if serves is None or not minor or not _below(serves, minor):
            continue
        code = f"driver-older-than-{library.lower()}"
        text = f"The {driver} serves CUDA up to {serves}, and {library} was built with CUDA {built_with}."
        remedy = f"Update the driver to one that serves CUDA {built_with}"
        if _below(serves, minor.split(".")[0]):
            text += " It fails with 'CUDA driver version is insufficient for CUDA runtime version'."
            remedy += f", or install {library} for CUDA {serves.split('.')[0]}" if library == "NCCL" else ""
            yield Problem(code, text, f"{remedy}.", host.severity)
        elif library == "NCCL" and not is_old:
            text += " The same major version: it runs, but not on GPUs newer than the driver."
            yield Problem(code, text, f"{remedy} if anything fails.")
    chosen, error = host.variable("NCCLSYNC_CUDART_LIBRARY"), host.libraries.cuda_runtime.error
    if error and (chosen or host.uses_gpus):
        remedy = "Unset NCCLSYNC_CUDART_LIBRARY." if chosen else "pip install nvidia-cuda-runtime-cu12"
        text = f"CUDA's runtime cannot be loaded: {error}"
        yield Problem("cuda-runtime-unusable", text, remedy, host.severity)


def _all_reduce(host: Host) -> Iterator[Problem]:
    found, libraries = host.all_reduce, host.libraries
    if found is None or found.ok:
        return
    by_nccl = found.backend == "nccl"
    unloaded = libraries.nccl.error or libraries.cuda_runtime.error or _has_old_driver(host)
    if found.kind == "raised" and unloaded and (by_nccl or _EXTENSION in found.error):
        return  # shown already
    log = f" NCCL: {found.log[-1]}" if found.log and found.kind != "wrong" else ""
    text = f"The known-answer all-reduce of {found.ranks} ranks by the {found.backend} backend {found.failure}: "
    peers = "Try NCCL_P2P_DISABLE=1: if that helps, turn off the IOMMU or ACS in the firmware, "
    peers += "which break direct transfers between GPUs."
    why = "Run it with NCCL_DEBUG=INFO to see why."
    remedy = {"wrong": peers, "hang": f"{peers} {why}"}.get(found.kind, why)
    if not by_nccl:
        remedy = "Install ncclsync again by pip, and check the machine's memory."
    yield Problem(f"all-reduce-{found.kind}", f"{text}{found.error.rstrip('.')}.{log}", remedy, ERROR)


def _has_old_driver(host: Host) -> bool:
    return host.served_cuda is not None and _below(host.served_cuda, _OLDEST_DRIVER)


def _driver(host: Host) -> Iterator[Problem]:
    error, detail = host.driver.error, host.driver.detail
    seen = bool(host.present or host.kernel_driver or host.frameworks.gpus)
    container = "In a container: start it with --gpus all (NVIDIA Container Toolkit)."
    if error == "NotInstalled":
        if seen:
            text = "There are NVIDIA GPUs, but nvidia-ml-py is not installed: memory and links are unknown."
            yield Problem("nvml-not-installed", text, "pip install nvidia-ml-py")
    elif error in ("LibraryNotFound", "DriverNotLoaded") and not host.frameworks.gpus:
        if seen or error == "DriverNotLoaded":
            gpus = f"{host.present} NVIDIA GPU(s) are" if host.present else "NVIDIA software is"
            text = f"{gpus} there, but no driver answers ({error}: {detail}). Training runs on the CPU."
            remedy = f"Install the NVIDIA driver, or load it (sudo modprobe nvidia). {container}"
            yield Problem("driver-missing", text, remedy)
    elif error == "LibRmVersionMismatch":
        text = "The driver's libraries and its kernel module differ in version: no program can use a GPU."
        yield Problem("driver-mismatch", text, "Restart the machine: the driver was updated while it was loaded.")
    elif error is not None and error != "NoAnswer":  # "NoAnswer" is shown as a trouble
        yield Problem("nvml-error", f"NVML does not answer: {error} ({detail}).", f"Run nvidia-smi. {container}")


def _unseen(host: Host) -> Iterator[Problem]:
    """Find GPUs that the driver has and TensorFlow has not."""
    found, visible, everyone = host.frameworks, len(host.visible_gpus), len(host.driver.gpus)
    if not everyone or found.cuda_build is None or any(one.question == "frameworks" for one in host.troubles):
        return  # there are no GPUs, or TensorFlow did not answer
    hidden = host.variable("CUDA_VISIBLE_DEVICES")
    if not visible and hidden is not None:
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all {everyone} GPU(s). Training runs on the CPU."
        numbers = ",".join(map(str, range(everyone)))
        yield Problem("gpus-hidden", text, f"Unset CUDA_VISIBLE_DEVICES, or name GPUs by number: {numbers}.")
        return
    if len(found.gpus) >= visible or any(gpu.mig for gpu in host.driver.gpus):
        return
    if not found.cuda_build:
        why, remedy = ": it was built without CUDA.", f"pip uninstall tensorflow-cpu; {_INSTALL_GPU}"
    elif host.libraries.missing:
        why = f": these libraries are not found: {', '.join(host.libraries.missing)}."
        remedy = f"{_INSTALL_GPU} (the CUDA libraries)."
    else:
        why, remedy = ".", "Compare the driver and the GPUs (nvidia-smi) with what TensorFlow was built for."
    slow = "" if found.gpus else " Training runs on the CPU."
    said = f" It says: {found.log[-1]}" if found.log and why == "." else ""
    yield Problem("gpus-unseen", f"TensorFlow sees {len(found.gpus)} of {visible} GPU(s){why}{slow}{said}", remedy)


def _each_gpu(host: Host) -> Iterator[Problem]:
    built_for, leave = sorted(host.frameworks.build_capabilities, key=_numbers), "leave it out by CUDA_VISIBLE_DEVICES"
    for gpu in host.visible_gpus:
        name = f"GPU {gpu.index}"
        if gpu.error:
            remedy = f"Look into dmesg for Xid errors; restart the machine; {leave}."
            yield Problem("gpu-lost", f"{name} does not answer ({gpu.error}).", remedy, host.severity)
            continue
        if gpu.mig:
            text = f"{name} is in MIG mode: a process sees one of its instances, and NCCL joins none of them."
            yield Problem("mig", text, f"sudo nvidia-smi -i {gpu.index} -mig 0, to train on whole GPUs.")
        if gpu.prohibited:
            text = f"{name} is in compute mode Prohibited."
            yield Problem("gpu-prohibited", text, f"sudo nvidia-smi -i {gpu.index} -c DEFAULT", host.severity)
        used, memory = gpu.used_bytes or 0, gpu.memory_bytes or 0
        if memory and used > _BUSY * memory:
            text = f"{name} has {used / 2**30:.1f} of {memory / 2**30:.1f} GiB in use by other processes."
            yield Problem("gpu-busy", text, f"End them (nvidia-smi lists them), or {leave}.")
        capability = gpu.compute_capability
        if not capability or not built_for:
            continue
        text = f"{name} has compute capability {capability}; TensorFlow has code"
        if _below(capability, built_for[0]):
            remedy = "Leave it out by CUDA_VISIBLE_DEVICES, or build TensorFlow for it."
            yield Problem("gpu-too-old", f"{text} from {built_for[0]} on.", remedy, host.severity)
        elif _numbers(capability)[0] > _numbers(built_for[-1])[0]:
            text += f" up to {built_for[-1]}, and compiles the rest at its first start, for many minutes."
            remedy = "Use a newer TensorFlow; keep the cache of compiled kernels (CUDA_CACHE_MAXSIZE=4294967296)."
            yield Problem("gpu-newer-than-tensorflow", text, remedy)


def _all_gpus(host: Host) -> Iterator[Problem]:
    """Find GPUs that are not alike, slow links between them, and too little of /dev/shm."""
    kinds = sorted({(gpu.name, gpu.memory_bytes) for gpu in host.visible_gpus if not gpu.error}, key=str)
    if len(kinds) > 1:
        listed = ", ".join(f"{name or 'unknown'} ({(memory or 0) / 2**30:.0f} GiB)" for name, memory in kinds)
        text = f"The GPUs are not alike: {listed}. By default batches are split evenly, and all wait for the slowest."
        remedy = 'Give the faster ones more rows by shares="auto", or choose equal ones by CUDA_VISIBLE_DEVICES, with '
        yield Problem("gpus-unequal", text, f"{remedy}CUDA_DEVICE_ORDER=PCI_BUS_ID.")
    visible = {gpu.index for gpu in host.visible_gpus}
    without = [link for link in host.driver.links if link.p2p not in ("ok", None) and visible.issuperset(link.gpus)]
    if without:
        pairs = ", ".join(f"{a}-{b}" for a, b in (link.gpus for link in without[:6]))
        more = f" and {len(without) - 6} more" if len(without) > 6 else ""
        reasons = "; ".join(dict.fromkeys(str(link.p2p) for link in without))
        text = f"No peer-to-peer access between GPUs {pairs}{more}: {reasons}. "
        text += "All-reduce goes through the host's memory, several times slower."
        remedy = "Where the GPUs can do it (nvidia-smi topo -p2p r): turn off ACS and the IOMMU in the firmware, or "
        yield Problem("no-p2p", text, f"{remedy}choose GPUs under one PCIe switch by CUDA_VISIBLE_DEVICES.")
    size, free = host.shm_bytes, host.shm_free_bytes
    text = "There is no /dev/shm."
    if size is not None and free is not None:
        text = f"/dev/shm has {size >> 20} MiB, {free >> 20} MiB of it free."
    # Between fewer GPUs nothing goes through it.
    if max(len(visible), len(host.choice.devices)) > 1 and min(size or 0, free or 0) < SHM_BYTES:
        remedy = "In a container: start it with --shm-size=1g. Else: sudo mount -o remount,size=1g /dev/shm, "
        text += " NCCL's buffers between GPUs without peer-to-peer access are there, and must fit."
        yield Problem("shm-small", text, f"{remedy}and remove what fills it.")


def _variables_of_gpus(host: Host) -> Iterator[Problem]:
    if not host.may_use_gpus:
        return
    for name, values in _HARMFUL.items():
        value = host.variable(name)
        if value and (values is None or value.lower() in values):
            yield _of_variable(host, name, f"{name}={value} may slow training or break it. {name}: {EFFECTS[name]}.")
    asked = host.frameworks.nvls_variable
    if asked is not None:
        text = f"{asked} asks for NVLS, whose sums differ from call to call, although op determinism is on."
        yield _of_variable(host, asked.partition("=")[0], text, ": NVLS is then kept out", "-nvls")
    value = host.variable("NCCL_SOCKET_IFNAME")
    if value:  # ranks meet by an interface even within a host
        names, exact = value.lstrip("^=").split(","), value.lstrip("^").startswith("=")
        named = {one for one in host.interfaces for name in names if (one == name if exact else one.startswith(name))}
        if not (set(host.interfaces) - named if value.startswith("^") else named):
            text = f"NCCL_SOCKET_IFNAME={value} leaves no network interface of {', '.join(host.interfaces)}."
            yield _of_variable(host, "NCCL_SOCKET_IFNAME", text, ", or name one", severity=host.severity)


def _variables(host: Host) -> Iterator[Problem]:
    for name in ("NCCL_TOPO_FILE", "NCCL_CONF_FILE", "NCCL_GRAPH_FILE"):
        value = host.variable(name)
        if value and not os.path.isfile(value):
            yield _of_variable(host, name, f"{name} names a file that is not there: {value}.", ", or correct it")
    if (host.variable("TF_USE_LEGACY_KERAS") or "").lower() in _TRUE:
        text = "TF_USE_LEGACY_KERAS makes tf.keras Keras 2, whose models nccl_parallel refuses."
        yield _of_variable(host, "TF_USE_LEGACY_KERAS", text, ", or build models with keras instead of tf.keras")
    try:
        cluster = json.loads(host.variable("TF_CONFIG") or "{}").get("cluster", {})
        workers = sum(len(addresses) for addresses in cluster.values())
    except (ValueError, AttributeError, TypeError):
        workers = 0
    if workers > 1:
        text = f"TF_CONFIG describes {workers} tasks; towers wait for all of them."
        remedy = "Start all tasks. To train in this process alone: Unset TF_CONFIG, or write processes=False."
        yield Problem("variable-TF_CONFIG", text, remedy)
    value = host.variable("TF_XLA_FLAGS") or ""
    if re.search(r"tf_xla_auto_jit=(?!(0|-1)\b)", value):
        text = f"TF_XLA_FLAGS={value} lets XLA compile parts of any graph, with roundings of its own."
        yield _of_variable(host, "TF_XLA_FLAGS", text, "; compile(jit_compile=True) decides for a model")


def _of_variable(
    host: Host, name: str, text: str, instead: str = "", suffix: str = "", severity: str = WARNING
) -> Problem:
    """Return the problem of a variable; the remedy is to unset it, and goes on with `instead`."""
    source = next((one.source for one in host.variables if one.name == name), "environment")
    unset = f"Unset {name}" if source == "environment" else f"Remove {name} from {source}"
    return Problem(f"variable-{name}{suffix}", text, f"{unset}{instead}.", severity)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers: (2, 20, 0) of "2.20.0-rc1"."""
    found = re.match(r"\d*(\.\d+)*", version)
    return tuple(int(number) for number in (found[0] if found else "").split(".") if number)


def _below(version: str, least: str) -> bool:
    wanted = _numbers(least)
    return _numbers(version)[: len(wanted)] < wanted


_RULES: tuple[Callable[[Host], Iterator[Problem]], ...] = (
    *(_frameworks, _ncclsync, _troubles, _nccl, _nccl_twice, _cuda, _all_reduce),
    *(_driver, _unseen, _each_gpu, _all_gpus, _variables_of_gpus, _variables),
)
