"""Choose the devices that towers stand on, and the backend that joins them; once, before all else."""

import dataclasses
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import Communicator, CpuCommunicator, TcpCommunicator, native, shared
from ncclsync.communicator.joining import peers_of
from ncclsync.communicator.processes import Process, find_process
from ncclsync.compat import host_gpus, other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclUnavailableError, install
from ncclsync.ops import host_ops
from ncclsync.program.program import Target
from ncclsync.towers.layout import Layout, is_cpu
from ncclsync.towers.options import TowerOptions

logger = logging.getLogger("ncclsync")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Name one device per tower, and the backend that joins them."""

    devices: tuple[str, ...]  # such as ("GPU:0", "GPU:1"), TensorFlow's logical devices; a CPU may occur several times
    backend: str  # "nccl" or "cpu"
    reason: str  # why these and this, as it is logged


def own_process(devices: Sequence[str] | None) -> Process | None:
    """Return this process' place among several; None: it trains by itself.

    Raises:
        NcclSyncError: a launcher's variables contradict each other, or its processes cannot be joined.
    """
    process = find_process()
    if process is None and devices is None:  # a process with named devices may have been started beside others
        other_libraries.check_one_process()
    return process


def exchange_gpus(process: Process, timeout_s: float | None) -> list[list[str]]:
    """Return for each process the UUIDs of TensorFlow's GPUs, in their order; [] if CUDA does not tell them.

    Joins the processes. Collective; raises NcclSyncError.
    """
    ordinals = [int(gpu.name.rpartition(":")[2]) for gpu in _physical_gpus()]  # as CUDA numbers them
    known = host_gpus.shown_by_cuda(native.cuda_paths()[1]) if ordinals else []
    own = [known[i] for i in ordinals] if max(ordinals, default=0) < len(known) else []
    return peers_of(process, timeout_s).exchange(own, "the GPUs that each process sees", timeout_s)


_TRIED = 4  # towers on the CPU are enough to try
_NO_GPU = (
    "Expected a GPU for backend='nccl'. Received: none that TensorFlow sees, so that towers stand on the CPU. "
    "Leave backend= out to train on them; `python -m ncclsync doctor` tells whether there is a GPU"
)


def choose_devices(
    towers: int | None,
    devices: Sequence[str] | None,
    backend: str | None,
    process: Process | None = None,
    seen: Sequence[Sequence[str]] = (),
) -> Choice:
    """Choose devices and backend; log the choice once, at INFO, with the reason.

    Args:
        towers, devices, backend: see `TowerOptions`, which has checked them.
        process: this process, if several are joined.
        seen: [size] the UUIDs of the GPUs that each of them sees; empty if they have not told each other.

    Raises:
        ValueError: they name a device that is not there, or a GPU twice; or the host has GPUs, but fewer than towers;
            or processes see some GPUs together and others apart.
    """
    gpus = [_short_name(device.name) for device in tf.config.list_logical_devices("GPU")]
    if devices is not None:
        chosen, reason = _named_devices(devices), "as named"
    else:
        chosen, reason = _first_devices(towers, gpus if process is None else _own_gpus(gpus, towers, process, seen))
    kinds = {device.split(":")[0] for device in chosen}
    if backend is None:
        backend = "nccl" if kinds == {"GPU"} and (len(chosen) > 1 or process is not None) else "cpu"
        why = f"the towers stand on {' and '.join(sorted(kinds))} devices"
        why = why if len(chosen) > 1 or process is not None else "one tower meets no other"
    else:
        why = "asked for"
        if backend == "nccl" and not gpus and towers is None and devices is None:
            raise NcclUnavailableError(_NO_GPU)
        if backend == "nccl" and devices is not None and kinds != {"GPU"}:
            raise ValueError(f"Expected only GPU devices for backend='nccl'. Received: devices={list(devices)}")
    words = f"{len(chosen)} tower(s) on {', '.join(chosen)} ({reason}); backend {backend} ({why})"
    if process is not None:
        words += f"; process {process.rank} of {process.size}, by {process.launcher} ({process.reason})"
    logger.info("%s", words)
    if devices is None and not gpus and (cause := _why_no_gpu()):
        logger.warning("%s. Towers stand on the CPU; `python -m ncclsync doctor` tells more", cause)
    return Choice(tuple(chosen), backend, words)


def announce(choice: Choice, process: Process | None) -> None:
    """Say on standard error which towers have opened, unless logging says so, or was told to say less."""
    if logger.isEnabledFor(logging.INFO) or logger.level or (process is not None and process.rank > 0):
        return
    count, kinds = len(choice.devices), [kind for kind in device_models(choice.devices) if kind != "CPU"]
    words = f"{count} tower{'s' * (count > 1)} on {', '.join(dict.fromkeys(choice.devices))}"
    words += f" ({', '.join(dict.fromkeys(kinds))})" * bool(kinds)
    if count > 1 or process is not None:
        words += f", by NCCL {'.'.join(map(str, native.nccl_version()[:2]))}" if choice.backend == "nccl" else ", by C"
    if process is not None:
        words += f", in process 0 of {process.size}"
    if choice.backend == "cpu" and count > max(_TRIED, 2 * (cores := native.usable_cores())):
        words += f". They take turns on {cores} core{'s' * (cores > 1)}: 2 to {_TRIED} towers show as much, and sooner"
    _say(f"ncclsync: {words}")


@functools.lru_cache(maxsize=1)
def _say(words: str) -> None:
    """Print a line, unless it was the last: folds and notebooks make towers again and again."""
    print(words, file=sys.stderr)


def share_cores(towers: int | None, devices: Sequence[str] | None, process: Process | None = None) -> None:
    """Let TensorFlow run an op on one thread if these towers will stand on the CPU and keep all cores busy.

    Call it before `choose_devices`, which starts TensorFlow.
    """
    if devices is not None:
        on_cpu = sum(is_cpu(str(name)) for name in devices)
    else:
        on_cpu = 0 if tf.config.get_visible_devices("GPU") else towers or 1
    on_cpu *= 1 if process is None else process.local_size or process.size
    if on_cpu > 1 and on_cpu >= native.usable_cores():
        _run_ops_on_one_thread()


@functools.cache
def _run_ops_on_one_thread() -> None:
    """Run an op on one thread, unless the user has chosen a number or TensorFlow runs; once per process.

    By default an op divides its work among all cores. With as many towers as cores, each part then waits until the
    tower that computes on its core is interrupted. torchrun sets OMP_NUM_THREADS=1 for the same reason.
    """
    if tf.config.threading.get_intra_op_parallelism_threads() or os.environ.get("TF_NUM_INTRAOP_THREADS"):
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        logger.info("TensorFlow runs an op on one thread, since towers keep all cores of the host busy")
    except RuntimeError:
        logger.warning(
            "Towers keep all cores of the host busy, and TensorFlow, which has started before them, divides "
            "each op among all cores: steps take up to 50% longer. Make the towers first, before any tensor or "
            "dataset, or set TF_NUM_INTRAOP_THREADS=1. If the process ends in a segmentation fault, set it, too: some "
            "convolutions of TensorFlow's (1x1, with strides) write beyond their memory if they have several threads."
        )


def device_models(devices: Sequence[str]) -> list[str]:
    """Return [n] the model of each device, by its driver; if that tells none, its kind, such as "GPU"."""
    gpus, found = _physical_gpus(), []
    for device in devices:
        kind, _, number = device.partition(":")
        details = tf.config.experimental.get_device_details(gpus[int(number)]) if kind == "GPU" else {}
        found.append(details.get("device_name", kind))
    return found


def connect(
    choice: Choice, user: Any, process: Process | None = None, *, timeout_s: float | None, preflight: bool
) -> Communicator:
    """Return the communicator that joins the chosen towers; collective with several processes.

    GPUs' is shared by all towers of this process on these GPUs: the `user` is one of its `users`, until `shared.leave`.
    Its sums are repeatable if TensorFlow's op determinism is on.

    Raises:
        NcclUnavailableError, NcclError: if NCCL was chosen and cannot be used.
        NcclSyncError: the processes cannot be joined, or TensorFlow does not take ncclsync's ops.
    """
    host_ops.register()
    if choice.backend == "nccl" and (process is not None or len(choice.devices) > 1):
        known = [int(gpu.name.rpartition(":")[2]) for gpu in _physical_gpus()]  # as CUDA numbers them
        ordinals = [
            index if is_cpu(device) else known[int(device.split(":")[1])] for index, device in enumerate(choice.devices)
        ]
        try:
            return shared.share(
                user,
                ordinals,
                peers=None if process is None else peers_of(process, timeout_s),
                on_host=any(map(is_cpu, choice.devices)),
                timeout_s=timeout_s,
                preflight=preflight,
                repeatable=tf_compat.is_op_determinism_enabled(),
            )
        except NcclUnavailableError as error:
            if not all(map(is_cpu, choice.devices)):
                raise
            raise NcclUnavailableError(_NO_GPU) from error
    if process is None:
        return CpuCommunicator(len(choice.devices))
    joined = TcpCommunicator(peers_of(process, timeout_s), len(choice.devices), timeout_s=timeout_s)
    joined.users.add(user)
    return joined


def make_target(layout: Layout, backend: str, options: TowerOptions) -> Target:
    """Return what programs for these towers are cut for; with `shards=` it is the same for any number of towers."""
    # TensorFlow's ops can join the tensors of towers that are all of this process.
    joins = layout.divided is None and not layout.meets_processes
    on_host = backend == "cpu" and not layout.on_gpus
    return Target(
        home_device=layout.devices[0],
        # Where memory is short, buckets take no memory for packed copies.
        bucket_bytes=1 if layout.adds_up else options.bucket_bytes,
        same_seeds=options.exact_random,
        many_shards=layout.divided is not None,
        shares_memory=any(map(is_cpu, layout.devices)),
        passes=host_passes(layout.divided or len(layout.devices), joins=joins) if on_host else (),
    )


def host_passes(towers: int, *, joins: bool) -> tuple[Callable[[Any], Any], ...]:
    """Return the passes that make a program cheaper for towers that share the host's memory."""
    if importlib.util.find_spec("ncclsync.host_passes") is None:
        return ()
    improve = importlib.import_module("ncclsync.host_passes").improve
    return (functools.partial(improve, crowded=towers >= native.usable_cores(), joins=joins),)


def _physical_gpus() -> list[tf.config.PhysicalDevice]:
    """Return the GPU of each logical GPU: TensorFlow may see only some GPUs, or divide a GPU into several."""
    gpus = []
    for gpu in tf.config.get_visible_devices("GPU"):
        gpus += [gpu] * len(tf.config.get_logical_device_configuration(gpu) or [None])
    return gpus


def keep_quiet(process: Process | None) -> Callable[[], None]:
    """Let a process other than 0 log errors alone, until what this returns is called."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    if process is not None and process.rank > 0:
        logger.addFilter(is_error)
    return functools.partial(logger.removeFilter, is_error)


def _why_no_gpu() -> str:
    """Return why TensorFlow sees none of the host's GPUs; "" if there are none, or the user has hidden them."""
    count, value = host_gpus.count_gpus(), os.environ.get(host_gpus.VISIBLE)
    if not count or value in ("", "-1") or tf.config.list_physical_devices("GPU"):
        return ""
    left = host_gpus.left_by(value, host_gpus.read_uuids() or [None] * count)
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        cause = f"it was built without CUDA: {install('cuda')}"
    elif host_gpus.kernel_driver() is None:
        cause = "no driver is loaded, or this is a container that was not started with --gpus all"
    elif value is not None and (not left or any(map(str.isspace, value))):
        cause = f"{host_gpus.VISIBLE}={value!r} names none that CUDA knows: write numbers, such as 0,1, or unset it"
    else:
        cause = f"it does not find its CUDA libraries, or the driver does not serve them: {install('cuda')}"
    return f"TensorFlow sees none of the {count} NVIDIA GPU(s) of this host: {cause}"


def _hiding() -> str:
    """Return, for an error, the variable that hides some of the host's GPUs; "" if none is set."""
    for name in (host_gpus.VISIBLE, "NVIDIA_VISIBLE_DEVICES"):
        if os.environ.get(name) not in (None, "", "all"):
            return f" {name}={os.environ[name]!r} hides all others."
    return ""


def _own_gpus(gpus: list[str], towers: int | None, process: Process, seen: Sequence[Sequence[str]]) -> list[str]:
    """Return this process' part of the GPUs that it sees: all, unless other processes of the host see the same."""
    own_uuids = seen[process.rank] if seen else ()
    if process.local_size == 1 or (len(gpus) <= 1 and not own_uuids):
        return gpus
    place, count = process.local_rank, towers or 1
    if own_uuids:
        mates = [i for i, one in enumerate(seen) if not set(one).isdisjoint(own_uuids)]
        if len(mates) == 1:
            return gpus
        if any(set(seen[i]) != set(own_uuids) for i in mates):
            told = "; ".join(f"process {i} sees {', '.join(seen[i])}" for i in mates)
            raise ValueError(
                f"Expected the processes of a host to see the same GPUs, or each GPUs of its own. Received: {told}. "
                f"Set {host_gpus.VISIBLE} alike in all, or in none, or name devices="
            )
        place = mates.index(process.rank)
        gpus = [gpus[own_uuids.index(one)] for one in seen[mates[0]]]  # in one order in all
    own = gpus[place * count : (place + 1) * count]
    if len(own) < count:
        raise ValueError(
            f"Expected a GPU for each tower of each process on this host. Received: {len(gpus)} GPUs, for process "
            f"{place} on this host with {count} tower(s).{_hiding()} Start fewer processes, or name "
            "devices=."
        )
    return own


def _first_devices(towers: int | None, gpus: list[str]) -> tuple[list[str], str]:
    if towers is None:
        return (gpus, "every visible GPU") if gpus else (["CPU:0"], "no GPU is visible")
    if not gpus:
        return ["CPU:0"] * towers, "no GPU is visible"
    if towers > len(gpus):
        raise ValueError(
            f"Expected at most as many towers as there are GPUs, {len(gpus)}. Received: towers={towers}.{_hiding()} "
            "They are the GPUs of this host; hvd.size() counts those of all hosts."
        )
    return gpus[:towers], "the first GPUs"


def _named_devices(devices: Sequence[Any]) -> list[str]:
    known = [_short_name(device.name) for device in tf.config.list_logical_devices()]
    chosen = []
    for name in devices:
        try:
            short = _short_name(name)
        except (ValueError, AttributeError, TypeError):
            short = None
        if short not in known:
            named = ", as a number; multi_gpu_model and tensorpack take such" if isinstance(name, int) else ""
            named = ", as PyTorch names it" if str(name).lower().startswith("cuda") else named
            words = _instead_of_device(name, known, len(devices))
            raise ValueError(f"Expected each device to be one of {known}. Received: {name!r}{named}{words}")
        if short.startswith("GPU") and short in chosen:
            raise ValueError(f"Expected every GPU once. Received: devices={list(devices)}")
        chosen.append(short)
    return chosen


def _instead_of_device(name: Any, known: Sequence[str], count: int) -> str:
    """Return what to write in place of the name of a device that is not there; it begins with a full stop."""
    on_cpu = "CPU" in str(name).upper()
    if not any(one.startswith("GPU") for one in known):
        why = "" if on_cpu else " TensorFlow sees no GPU: `python -m ncclsync doctor` tells why."
        return f".{why} For towers on the CPU write towers={count}"
    if on_cpu:
        return ". Write 'CPU:0', once for each tower on it"
    number = re.fullmatch(r"(?:.*(?:cuda|gpu)\D*)?(\d+)", str(name).lower())
    wanted = f"GPU:{number[1]}" if number else ""
    return f". Write {wanted!r}" if wanted in known else f".{_hiding()}" if wanted else ""


def _short_name(name: str) -> str:
    spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
    if spec.device_type is None:
        raise ValueError(name)
    return f"{spec.device_type.upper()}:{spec.device_index or 0}"
