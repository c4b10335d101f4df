"""Call the C library; this module alone imports the cffi extension.

Owns the tables of dtypes and operations, ``check()``, through which every status passes, the process-wide worker pool,
and the search for libnccl and libcudart.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fractions
import importlib.util
import itertools
import os
import pathlib
import struct
import threading
import weakref
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ncclsync.errors import NcclError, NcclSyncError, NcclUnavailableError, install

try:
    from ncclsync._native import ffi, lib
except ImportError as error:
    raise NcclSyncError(
        "Expected the compiled extension ncclsync._native. Received: "
        f"{error}. Install ncclsync by pip, which needs a C compiler: {install()}"
    ) from error


def _check_sources(folder: pathlib.Path) -> None:
    """Refuse an extension that was compiled of other sources than a clone has, as after a `git pull`."""
    found = 0
    for file in sorted(folder.rglob("*.[ch]")):
        found = zlib.crc32(file.read_bytes(), found)
    if getattr(lib, "NCS_SOURCES", None) != found:
        raise NcclSyncError(
            "Expected the compiled extension ncclsync._native to be of the C sources beside it. Received: one of "
            f"others, as after a `git pull`. Compile it anew: {install()}"
        )


_CLONED = pathlib.Path(__file__).parents[2] / "csrc"
if (_CLONED / "ncclsync.h").is_file():
    _check_sources(_CLONED)


def _enumerated(enum: str, prefix: str) -> dict[str, int]:
    """Return the values of a C enum by their names without a prefix."""
    return {name.removeprefix(prefix): value for value, name in sorted(ffi.typeof(enum).elements.items())}


_STATUSES = _enumerated("ncclResult_t", "")
STATUS_NAMES: dict[int, str] = {value: name for name, value in _STATUSES.items()}
DTYPES: dict[str, int] = {name.lower(): value for name, value in _enumerated("ncclDataType_t", "nccl").items()}
DTYPE_SIZES: dict[int, int] = {value: lib.ncs_size_of(value) for value in DTYPES.values()}
DTYPE_NAMES: dict[int, str] = {value: name for name, value in DTYPES.items()}
OPS: dict[str, int] = {name.lower(): value for name, value in _enumerated("ncclRedOp_t", "nccl").items()}

# Operations of fused arithmetic, and how many inputs and operations together one expression may have.
ARITHMETIC: dict[str, int] = _enumerated("ncs_arithmetic", "NCS_")
MOST_REGISTERS: int = lib.NCS_MOST_REGISTERS

UNHANDLED_CUDA_ERROR = _STATUSES["ncclUnhandledCudaError"]
INVALID_USAGE = _STATUSES["ncclInvalidUsage"]
INVALID_ARGUMENT = _STATUSES["ncclInvalidArgument"]
IN_PROGRESS = _STATUSES["ncclInProgress"]
TIMEOUT = _STATUSES["ncclTimeout"]


def check(status: int, call: str, last_error: str = "") -> None:
    """Raise NcclError unless a call's status is success; `last_error`: the library's own words."""
    if status != 0:
        raise NcclError(status, call, last_error, STATUS_NAMES.get(status, "unknown status"))


def check_failure(status: int, failure: Any) -> None:
    """Raise NcclError, as an ``ncs_failure`` describes the call, unless its status is success."""
    if status != 0:
        check(status, name_of_call(failure) or "malloc", words(failure))


def call(function: Any, inputs: Sequence[Any], *outputs: Any) -> None:
    """Call a function of the C library that takes an ``ncs_failure`` between inputs and outputs. Raises NcclError."""
    failure = ffi.new("ncs_failure*")
    check_failure(function(*inputs, failure, *outputs), failure)


def name_of_call(failure: Any) -> str:
    """Return the call that an ``ncs_failure`` is of; "" if there is none."""
    return ffi.string(failure.call).decode()


def words(failure: Any) -> str:
    """Return the message of an ``ncs_failure``."""
    return ffi.string(failure.message).decode(errors="replace")


# Shared: N communicators with a pool each would have N × cores threads.
_process_pool: Any = None
_process_pool_lock = threading.Lock()


def process_pool() -> Any:
    """Return the ``ncs_pool`` that all communicators of this process share: one thread per core of its share.

    Its threads live as long as the process. Raises NcclError if they cannot be started.
    """
    global _process_pool
    with _process_pool_lock:
        if _process_pool is None:
            handle = ffi.new("ncs_pool**")
            check(lib.ncs_pool_create(usable_cores(), lib.NCS_INSTRUCTION_SET_BEST, handle), "ncs_pool_create")
            _process_pool = handle[0]
        return _process_pool


def usable_cores() -> int:
    """Return how many cores this process may use; its share of them, where others are known to use them, too."""
    return _share or len(os.sched_getaffinity(0))


_share = 0  # of the cores


def share_cores(of_each: Sequence[Collection[int]]) -> None:
    """Let this process use its share of its cores; to be called before `process_pool`.

    `of_each` has the cores that each process on this host may use, this one's among them.
    """
    global _share
    users = collections.Counter(itertools.chain.from_iterable(of_each))
    _share = max(1, int(sum(fractions.Fraction(1, users[core]) for core in os.sched_getaffinity(0))))


def _forget_process_pool() -> None:
    """Drop the pool in a forked child: its workers were not copied, its locks may be held for ever."""
    global _process_pool, _process_pool_lock
    _process_pool = None
    _process_pool_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_process_pool)


def register_tensorflow(path: str) -> None:
    """Register the ops of ``csrc/tf`` with TensorFlow's library at ``path``; see ``ncs_tf_register``."""
    call(lib.ncs_tf_register, [path.encode(), process_pool()])


def find_gpu_streams(find: Any) -> None:
    """Let the ops find TensorFlow's streams by a function of ``ctypes``; see ``ncs_tf_find_streams``."""
    lib.ncs_tf_find_streams(ffi.cast("void*(*)(void*)", ctypes.cast(find, ctypes.c_void_p).value))


_TIMESTAMP = struct.Struct("=qqii")  # an ncs_timestamp, whose fields leave no gap


@ffi.def_extern()
def ncs_hear_span(context: Any, span: int, ends: int, value: int) -> None:
    """Pass a timestamp on to the listener; C calls it on the thread that records."""
    ffi.from_handle(context)(span, bool(ends), value)


class Timestamps:
    """Hold what began and ended when, as C records it; see ``ncs_meter``. Its memory goes with the object."""

    def __init__(self) -> None:
        """Begin with none."""
        handle = ffi.new("ncs_meter**")
        check(lib.ncs_meter_create(handle), "ncs_meter_create")
        self.handle = ffi.gc(handle[0], lib.ncs_meter_destroy)
        self._heard: Any = ffi.NULL
        self._heard_before: Any = ffi.NULL

    @property
    def address(self) -> int:
        """Return where C finds it, for an attribute of an op."""
        return int(ffi.cast("intptr_t", self.handle))

    def record(self, span: int, ends: bool, value: int = 0) -> None:
        """Record that a span begins or ends, now."""
        check(lib.ncs_meter_record(self.handle, span, ends, value), "ncs_meter_record")

    def listen(self, hear: Any) -> None:
        """Let ``hear(span, ends, value)`` be called at each timestamp, on its thread; None: no function."""
        self._heard_before = self._heard  # which a thread that records may still be calling
        self._heard = ffi.NULL if hear is None else ffi.new_handle(hear)
        listener = ffi.NULL if hear is None else lib.ncs_hear_span
        lib.ncs_meter_listen(self.handle, listener, self._heard)

    def take(self) -> list[tuple[int, int, int, int]]:
        """Return what was recorded since the last call, in order: (time in ns, value, span, 1 if it ended).

        Times are those of ``time.monotonic_ns()``.
        """
        found: list[tuple[int, int, int, int]] = []
        timestamps = ffi.new("ncs_timestamp[256]")
        while True:
            taken = lib.ncs_meter_take(self.handle, len(timestamps), timestamps)
            found += _TIMESTAMP.iter_unpack(ffi.buffer(timestamps, taken * _TIMESTAMP.size))
            if taken < len(timestamps):
                return found


class Held:
    """Hold what a step has left in tower 0's variables; see ``ncs_held``. TensorFlow frees it with the object."""

    def __init__(self) -> None:
        """Begin with none."""
        handle = ffi.new("ncs_held**")
        check(lib.ncs_held_create(handle), "ncs_held_create")
        self._handle = handle[0]
        # Not at the process' end, where TensorFlow's devices may be gone.
        weakref.finalize(self, lib.ncs_held_destroy, self._handle).atexit = False

    @property
    def address(self) -> int:
        """Return where C finds it, for an attribute of an op."""
        return int(ffi.cast("intptr_t", self._handle))

    def add(self) -> int:
        """Add a variable, whose value is not known; return its number."""
        index = ffi.new("int*")
        check(lib.ncs_held_add(self._handle, index), "ncs_held_add")
        return index[0]

    def forget(self, index: int) -> None:
        """Let go of a variable's value: it is not known from now on."""
        lib.ncs_held_forget(self._handle, index)

    def knows(self, index: int) -> bool:
        """Return whether a variable's value is held, or is that of a step under way."""
        return bool(lib.ncs_held_knows(self._handle, index))

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """Let steps begin in the body although variables have other values."""
        lib.ncs_held_tolerate(self._handle, 1)
        try:
            yield
        finally:
            lib.ncs_held_tolerate(self._handle, 0)

    def take_disturbed(self) -> bool:
        """Return, once, whether others have written a variable while a step ran."""
        return bool(lib.ncs_held_take_disturbed(self._handle))


def _candidates(variable: str, package: str, file: str) -> list[str]:
    """Return what to give to ``dlopen``, in order of preference. A variable that is set decides alone."""
    chosen = os.environ.get(variable)
    if chosen:
        return [chosen]
    found = []
    root = importlib.util.find_spec("nvidia")  # a namespace package: importing it runs nothing
    for folder in (root.submodule_search_locations or []) if root else []:
        wheels_file = pathlib.Path(folder, package, "lib", file)
        if wheels_file.is_file():
            found.append(str(wheels_file))
    return [*found, file]


def _places(variable: str, package: str, file: str, tried: list[str]) -> str:
    """Return a sentence that names the places where a library was looked for."""
    if os.environ.get(variable):
        return f"Tried only {variable}, which is set: {'; '.join(tried)}."
    return (
        f"Tried the file nvidia/{package}/lib/{file} of an installed wheel, then the loader's "
        f"path; {variable} is not set. In detail: {'; '.join(tried)}."
    )


_NCCL = ("NCCLSYNC_NCCL_LIBRARY", "nccl", "libnccl.so.2")
_CUDART = ("NCCLSYNC_CUDART_LIBRARY", "cuda_runtime", "libcudart.so.12")  # first: TensorFlow's
_CUDART_13 = ("NCCLSYNC_CUDART_LIBRARY", "cu13", "libcudart.so.13")
_DRIVER = ("NCCLSYNC_CUDA_DRIVER_LIBRARY", "", "libcuda.so.1")  # comes with the driver, never with a wheel


def cuda_paths() -> tuple[list[str], str]:
    """Return what to give to ``dlopen`` for CUDA's runtime, in order of preference, and for the driver."""
    return [*dict.fromkeys(_candidates(*_CUDART) + _candidates(*_CUDART_13))], _candidates(*_DRIVER)[-1]


def missing_runtime(tried: list[str]) -> str:
    """Return a sentence that CUDA's runtime was not found, where it was looked for, and what to do."""
    return (
        f"Expected CUDA's runtime {_CUDART[2]} or {_CUDART_13[2]}. Received: none. {_places(*_CUDART, tried)} "
        f"Install it: {install('cuda')}"
    )


class NcclLibrary:
    """Hold a loaded libnccl. NCCL itself is never unloaded: it leaves threads."""

    def __init__(self) -> None:
        """Load the first libnccl that can be loaded; see `_candidates`.

        Raises NcclUnavailableError, which names all that were tried, if none is there, or none that is new enough.
        """
        failure, handle, version = ffi.new("ncs_failure*"), ffi.new("ncs_nccl**"), ffi.new("int*")
        tried = []
        for path in _candidates(*_NCCL):
            if lib.ncs_nccl_open(path.encode(), failure, handle, version) == 0:
                self.path, self._version = path, version[0]
                self.handle = handle[0]  # never freed: a communicator may be aborted after its object is gone
                return
            tried.append(f"{path} ({words(failure)})")
        raise NcclUnavailableError(
            f"Expected NCCL's library {_NCCL[2]}. Received: none that can be used. {_places(*_NCCL, tried)} "
            "Install it by 'pip install nvidia-nccl-cu12'."
        )

    def version(self) -> tuple[int, int, int]:
        """Return NCCL's version, e.g. ``(2, 32, 3)``. Needs no GPU."""
        return self._version // 10000, self._version % 10000 // 100, self._version % 100


def nccl_version() -> tuple[int, int, int]:
    """Return the version of the NCCL that would be used. Needs neither GPU nor driver.

    Raises NcclUnavailableError if there is no libnccl.
    """
    return NcclLibrary().version()
