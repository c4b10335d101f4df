"""Find NCCL, CUDA and cuDNN as the loader does. This loads them: call it in a separate process."""

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import pathlib
import re
import subprocess
from collections.abc import Iterable, Sequence

from ncclsync.tools.doctor.facts import Libraries, Library

# Libraries that TensorFlow loads before it uses a GPU, by the folder of NVIDIA's wheel; for CUDA 12.
_LOADS = {
    "cuda_runtime": "libcudart.so.12",
    "cublas": "libcublas.so.12",
    "cudnn": "libcudnn.so.9",
    "cufft": "libcufft.so.11",
    "cusolver": "libcusolver.so.11",
    "cusparse": "libcusparse.so.12",
}

# They write the same libnccl file: that of the package installed last remains.
_NCCL_PACKAGES = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

# Version numbers from which on the minor version has two digits: NCCL 2.9, cuDNN 9.
_TWO_DIGITS_FROM = {"ncclGetVersion": 10000, "cudnnGetVersion": 90000}

_BUILT_WITH = re.compile(rb"NCCL version [0-9.]+\+cuda([0-9]+\.[0-9]+)")


def read_libraries() -> Libraries:
    """Load NCCL, CUDA's runtime and cuDNN, and ask each for its version. Needs neither GPU nor driver."""
    return Libraries(
        nccl=_read_nccl(),
        nccl_copies=tuple(Library(_version(path, "ncclGetVersion"), path, _built_with(path)) for path in nccl_files()),
        nccl_packages=tuple(f"{name} {version}" for name in _NCCL_PACKAGES if (version := installed(name))),
        cuda_runtime=_read(_runtimes(), "cudaRuntimeGetVersion"),
        cudnn=_read([*wheel_files("cudnn", _LOADS["cudnn"]), _LOADS["cudnn"]], "cudnnGetVersion"),
        missing=tuple(file for package, file in _LOADS.items() if not (wheel_files(package, file) or _load(file))),
        driver_cuda=_version(os.environ.get("NCCLSYNC_CUDA_DRIVER_LIBRARY") or "libcuda.so.1", "cuDriverGetVersion"),
    )


def wheel_files(package: str, file: str) -> list[str]:
    """Return a library's files in NVIDIA's wheels, such as nvidia/cudnn/lib/libcudnn.so.9."""
    root = importlib.util.find_spec("nvidia")
    folders = (root.submodule_search_locations or []) if root else []
    return [path for folder in folders if os.path.isfile(path := os.path.join(folder, package, "lib", file))]


def nccl_files(ldconfig: str = "/sbin/ldconfig") -> list[str]:
    """Return every libnccl.so.2 that ncclsync, TensorFlow or the loader may find, each file once."""
    chosen = os.environ.get("NCCLSYNC_NCCL_LIBRARY")
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/local/cuda/lib64"]
    found = [
        *([chosen] if chosen else []),
        *wheel_files("nccl", "libnccl.so.2"),
        *(os.path.join(folder, "libnccl.so.2") for folder in folders if folder),
        *_cached("libnccl.so.2", ldconfig),
    ]
    return list({os.path.realpath(path): path for path in reversed(found) if os.path.isfile(path)}.values())[::-1]


def _cached(file: str, ldconfig: str) -> Iterable[str]:
    """Return a file's paths in the loader's cache."""
    try:
        done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (line.strip().partition(" => ") for line in done.stdout.splitlines())
    return [path for name, _, path in lines if name.split(" ")[0] == file]


def installed(package: str) -> str | None:
    """Return the version of an installed Python package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_nccl() -> Library:
    from ncclsync.errors import NcclSyncError

    try:
        from ncclsync.communicator import native

        library = native.NcclLibrary()
        version = ".".join(map(str, library.version()))
    except NcclSyncError as error:  # also: the C extension is missing
        return Library(error=str(error))
    path = _loaded(library.path)
    return Library(version, path, _built_with(path))


def _runtimes() -> list[str]:
    """Return where ncclsync looks for CUDA's runtime, of 12 or 13, in order of preference."""
    from ncclsync.errors import NcclSyncError

    try:
        from ncclsync.communicator.native import cuda_paths
    except NcclSyncError:  # the C extension is missing
        return [_LOADS["cuda_runtime"]]
    return cuda_paths()[0]


def _read(paths: Sequence[str], function: str) -> Library:
    """Load the first of these libraries that can be loaded, and ask its function for the version."""
    errors = []
    for path in paths:
        try:
            ctypes.CDLL(path)
        except OSError as error:
            errors.append(str(error))
        else:
            return Library(_version(path, function), _loaded(path))
    return Library(error="; ".join(errors))


def _loaded(library: str) -> str:
    """Return the file of a loaded library, given its name or path."""
    lines = pathlib.Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    name = library.partition(".so")[0]
    return library if "/" in library else next((path for path in paths if f"/{name}." in path), library)


def _version(path: str, function: str) -> str | None:
    """Return a library's version, which its function writes to a pointer; only cuDNN's returns it."""
    call, number = getattr(_load(path), function, None), ctypes.c_int(0)
    if call is None:
        return None
    if function == "cudnnGetVersion":
        call.restype = ctypes.c_size_t
        return version_text(function, call())
    failed = call(ctypes.byref(number))
    return None if failed or not number.value else version_text(function, number.value)


def version_text(function: str, number: int) -> str:
    """Return a version, such as "2.32.3", or "12.9" of CUDA, given the number of a library's version function."""
    if function not in _TWO_DIGITS_FROM:
        return f"{number // 1000}.{number % 1000 // 10}"
    thousand = 10000 if number >= _TWO_DIGITS_FROM[function] else 1000
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _load(path: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


def _built_with(path: str) -> str | None:
    """Return the CUDA that a libnccl was built with, from its log message."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _BUILT_WITH.search(content)
            return found[1].decode() if found else None
    except (OSError, ValueError):
        return None
