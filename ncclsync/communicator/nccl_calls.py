"""Call NCCL over the GPUs of this process: begin a call, wait for it in slices, end it.

Statuses become exceptions here, with advice where there is any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ncclsync.communicator import native
from ncclsync.communicator.native import ffi, lib
from ncclsync.errors import NcclError, NcclUnavailableError

_FAILURE = ffi.typeof("ncs_failure*")

# Words of NCCL and CUDA, and what helps.
_ADVICE = (
    (
        "driver version is insufficient",
        "The NVIDIA driver is missing, or older than this NCCL needs: install a newer driver, or an older "
        "nvidia-nccl-cu12",
    ),
    (
        "out of memory",
        "NCCL needs some hundred MB on each GPU: leave them to it (nvidia-smi shows who holds memory; "
        "tf.config.experimental.set_memory_growth keeps TensorFlow from taking all), or let it take less by "
        "NCCL_BUFFSIZE or NCCL_MAX_CTAS",
    ),
    ("invalid device", "CUDA counts from 0 the GPUs that CUDA_VISIBLE_DEVICES leaves"),
    ("Duplicate GPU", "Each rank needs a GPU of its own: let the processes see or name different ones"),
    (
        "peer",
        "These GPUs have no direct path to each other: set NCCL_P2P_DISABLE=1, so that NCCL goes through host memory",
    ),
)

CALLS = {
    lib.NCS_ALL_REDUCE: "ncclAllReduce",
    lib.NCS_BROADCAST: "ncclBroadcast",
    lib.NCS_ALL_TO_ALL: "ncclSend",
    lib.NCS_REDUCE_SCATTER: "ncclReduceScatter",
    lib.NCS_ALL_GATHER: "ncclAllGather",
}


def unique_id(library: native.NcclLibrary) -> bytes:
    """Return the id by which ranks in several processes find each other. Raises NcclError."""
    made = ffi.new("char[]", lib.NCS_UNIQUE_ID_BYTES)
    native.call(lib.ncs_nccl_get_unique_id, [library.handle], made)
    return bytes(ffi.buffer(made))


def create(
    library: native.NcclLibrary,
    joined_by: bytes | None,
    world_size: int,
    ranks: Sequence[int],
    devices: Sequence[int],
    max_ctas: int = 0,
) -> Any:
    """Begin to join CUDA devices; see ``ncs_nccl_create``. `wait` ends it, `destroy` or `abort` frees the handle.

    `joined_by` is the unique id that all processes were given; None if this is the only one. With `max_ctas` NCCL takes
    at most so many channels. Raises NcclUnavailableError if there is no driver, or no CUDA runtime, NcclError for
    anything else that failed.
    """
    failure, handle = ffi.new(_FAILURE), ffi.new("ncs_nccl_comm**")
    found = ffi.NULL if joined_by is None else ffi.from_buffer("char[]", joined_by)
    numbers, ordinals = ffi.new("int[]", list(ranks)), ffi.new("int[]", list(devices))
    own = ffi.new("ncs_ranks*", (found, world_size, len(devices), numbers, ordinals, max_ctas))
    runtimes, driver = native.cuda_paths()
    tried: list[str] = []
    call = ""
    for path in runtimes:
        status = lib.ncs_nccl_create(library.handle, path.encode(), driver.encode(), own, failure, handle)
        if status == 0:
            return handle[0]
        call = native.name_of_call(failure)
        if call not in ("dlopen", "dlsym"):
            break
        tried.append(f"{path} ({native.words(failure)})")
    try:
        native.check_failure(status, failure)
    except NcclError as error:
        if call in ("dlopen", "dlsym"):
            raise NcclUnavailableError(native.missing_runtime(tried)) from error
        if call == "dlopen of the driver":
            raise NcclUnavailableError(
                f"Expected the NVIDIA driver's libcuda. Received: {error.last_error}. Install the driver, in a "
                'container start it with --gpus all, or train on the CPU by devices=["CPU:0", "CPU:0"].'
            ) from error
        raise_explained(error, devices)


def raise_explained(error: NcclError, devices: Sequence[int]) -> NoReturn:
    """Raise an error of creation with advice; as NcclUnavailableError if there is no GPU or driver."""
    words = error.last_error
    if error.status == native.UNHANDLED_CUDA_ERROR and ("driver" in words or "invalid device" in words):
        raise NcclUnavailableError(
            f"Expected usable GPUs {list(devices)}. Received: {error}. NCCL needs an NVIDIA driver and these "
            f"GPUs; without them use CpuCommunicator.{_remedy(words)}"
        ) from error
    if not _remedy(words):
        raise error
    raise advised(error) from error


def advised(error: NcclError) -> NcclError:
    """Return the error with advice, where there is any."""
    words = error.last_error
    text = f"{words}.{_remedy(words)}".rstrip(".")
    return type(error)(error.status, error.call, text, error.status_name, error.during)


def _remedy(words: str) -> str:
    return next((f" {remedy}." for symptom, remedy in _ADVICE if symptom in words), "")


def taken(comm: Any, size: int) -> list[int]:
    """Return [size] how many bytes NCCL has taken of each GPU; see ``ncs_nccl_get_taken``. Raises NcclError."""
    found = ffi.new("int64_t[]", size)
    native.call(lib.ncs_nccl_get_taken, [comm], found)
    return list(found)


def wait(comm: Any, own_work: bool, slice_s: float) -> bool:
    """Wait for the current call, or the GPUs' own work, for so many seconds; return whether it has ended.

    The first call for the GPUs' own work begins to follow it. Raises NcclError.
    """
    failure = ffi.new(_FAILURE)
    status = (lib.ncs_nccl_wait_for_devices if own_work else lib.ncs_nccl_wait)(comm, slice_s, failure)
    if status != native.IN_PROGRESS:
        native.check_failure(status, failure)
    return status != native.IN_PROGRESS


def find_devices(comm: Any, addresses: Sequence[int]) -> list[int]:
    """Return where memory at these addresses lies, see ``ncs_nccl_find_devices``. Raises NcclError."""
    found = ffi.new("int[]", len(addresses))
    native.call(lib.ncs_nccl_find_devices, [comm, addresses, len(addresses)], found)
    return list(found)


def launch_group(comm: Any, ranks: Sequence[Sequence[tuple[Any, ...]]], name: Callable[[int], str]) -> None:
    """Begin to run a group, whose buffers are not checked; see ``ncs_nccl_launch_group``. `wait` ends it.

    Raises NcclError, which names the collective, if one's call failed.

    Args:
        comm: the communicator's handle.
        ranks: for each rank of this process, the fields of an ``ncs_buffer`` for each collective.
        name: names the i-th collective.
    """
    failure, buffers = ffi.new(_FAILURE), [ffi.new("ncs_buffer[]", rank) for rank in ranks]
    status = lib.ncs_nccl_launch_group(comm, ffi.new("ncs_buffer*[]", buffers), len(ranks[0]), failure)
    try:
        native.check_failure(status, failure)
    except NcclError as error:
        if failure.index < 0:
            raise
        raise error.within(name(failure.index)) from None


def progress(comm: Any, size: int) -> list[int]:
    """Return how far each of this process' `size` ranks has come in the current call; see ``ncs_nccl_get_progress``."""
    states = ffi.new("int[]", size)
    native.check(lib.ncs_nccl_get_progress(comm, states), "ncs_nccl_get_progress")
    return list(states)


def scratch(comm: Any, index: int, size_bytes: int) -> Any:
    """Return memory on the index-th device, which the communicator frees; 0 bytes: frees it now. Raises NcclError."""
    pointer = ffi.new("void**")
    native.call(lib.ncs_nccl_scratch, [comm, index, size_bytes], pointer)
    return pointer[0]


def copy(comm: Any, index: int, to: Any, source: Any, size_bytes: int) -> None:
    """Copy to or from the index-th device's memory. Blocks. Raises NcclError."""
    native.call(lib.ncs_nccl_copy, [comm, index, to, source, size_bytes])
