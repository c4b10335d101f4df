"""A GPU's memory for the tests: by CuPy, else by PyTorch, else by CUDA's runtime itself.

The last one also serves the stand-in of tests/support/csrc, whose memory is the host's. Whether there is a
GPU at all is decided here too.
"""

import ctypes
import functools
import importlib
import os

import numpy as np

from ncclsync.communicator import native
from ncclsync.errors import NcclUnavailableError

CHOICE = "NCCLSYNC_GPU_TEST_MEMORY"  # tells the processes of one run what was chosen
_TO_WHERE_THE_POINTERS_TELL = 4  # cudaMemcpyDefault


def open_runtime() -> ctypes.CDLL:
    """Load the libcudart that ncclsync would use. Raises OSError."""
    tried = []
    for path in native.cuda_paths()[0]:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
    raise OSError("; ".join(tried))


def check(runtime: ctypes.CDLL, call: str, *arguments: object) -> None:
    """Make a call of CUDA's runtime. Raises OSError with CUDA's own words."""
    error = getattr(runtime, call)(*arguments)
    if error:
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise OSError(f"{call} returned {error}: {runtime.cudaGetErrorString(error).decode()}")


def count_gpus() -> int:
    """Return how many GPUs CUDA sees. Raises OSError."""
    count = ctypes.c_int()
    check(open_runtime(), "cudaGetDeviceCount", ctypes.byref(count))
    return count.value


@functools.cache
def missing() -> str:
    """Say what these tests need and this machine lacks; "" if nothing."""
    try:
        count = count_gpus()
        version = native.nccl_version()
    except (OSError, NcclUnavailableError) as error:
        return f"no GPU that CUDA and NCCL could use: {error}"
    if count < 1:
        return "no GPU: cudaGetDeviceCount tells of 0"
    if version < (2, 30, 0):
        return f"ranks that share a GPU need NCCL 2.30 or newer; this is {'.'.join(map(str, version))}"
    return ""


def is_standin() -> bool:
    """Return whether the GPU is the one of tests/support/csrc."""
    return hasattr(open_runtime(), "standin_fail")


class RuntimeMemory:
    """Memory by cudaMalloc; passed on as (pointer, count, dtype)."""

    def __init__(self) -> None:
        self._runtime = open_runtime()
        self._pointers: list[ctypes.c_void_p] = []

    def put(self, array: np.ndarray, device: int = 0) -> "Placed":
        """Copy an array to a GPU."""
        pointer = ctypes.c_void_p()
        check(self._runtime, "cudaSetDevice", device)
        check(self._runtime, "cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 1)))
        self._pointers.append(pointer)
        self._copy(pointer, array.ctypes.data, array.nbytes)

        def get() -> np.ndarray:
            result = np.empty_like(array)
            self._copy(result.ctypes.data, pointer, array.nbytes)
            return result

        return Placed((pointer.value, array.size, array.dtype.name), pointer.value, get)

    def _copy(self, to, source, size_bytes: int) -> None:
        to, source = (p if isinstance(p, ctypes.c_void_p) else ctypes.c_void_p(p) for p in (to, source))
        size = ctypes.c_size_t(size_bytes)
        check(self._runtime, "cudaMemcpy", to, source, size, _TO_WHERE_THE_POINTERS_TELL)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        while self._pointers:
            check(self._runtime, "cudaFree", self._pointers.pop())


class CupyMemory:
    """Memory of CuPy's arrays; passed on by DLPack, but bfloat16, which CuPy lacks."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")

    def put(self, array: np.ndarray) -> "Placed":
        """Copy an array to the GPU."""
        raw = self._cupy.asarray(array.reshape(-1).view(np.uint8))
        pointer, name = raw.data.ptr, array.dtype.name
        buffer = (pointer, array.size, name) if name == "bfloat16" else raw.view(array.dtype)
        return Placed(buffer, pointer, lambda: raw.get().view(array.dtype))

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TorchMemory:
    """Memory of PyTorch's tensors; passed on by DLPack, but the dtypes that an older PyTorch lacks."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")

    def put(self, array: np.ndarray) -> "Placed":
        """Copy an array to the GPU."""
        raw = self._torch.from_numpy(array.reshape(-1).view(np.uint8)).to("cuda:0", copy=True)
        pointer, name = raw.data_ptr(), array.dtype.name
        dtype = getattr(self._torch, name, None)
        buffer = (pointer, array.size, name) if dtype is None else raw.view(dtype)
        return Placed(buffer, pointer, lambda: raw.cpu().numpy().view(array.dtype))

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Placed:
    """An array on the GPU.

    Attributes:
        buffer: what ncclsync takes.
        pointer: where it lies.
    """

    def __init__(self, buffer, pointer: int, get) -> None:
        self.buffer, self.pointer, self._get = buffer, pointer, get

    def get(self) -> np.ndarray:
        """Copy it back."""
        return self._get()


_KINDS = {"CuPy": CupyMemory, "PyTorch": TorchMemory, "CUDA's runtime": RuntimeMemory}


def _count_cupy() -> int:
    return importlib.import_module("cupy").cuda.runtime.getDeviceCount()


def _count_torch() -> int:
    return importlib.import_module("torch").cuda.device_count()


def choose() -> tuple[str, str]:
    """Return the name of the kind of memory to use, and the reason."""
    if os.environ.get("NCCLSYNC_CUDART_LIBRARY"):
        return "CUDA's runtime", "NCCLSYNC_CUDART_LIBRARY names the one to use"
    reasons = []
    for name, count in (("CuPy", _count_cupy), ("PyTorch", _count_torch)):
        try:
            n = count()
        except Exception as error:  # a CuPy without a driver, for one, raises what is its own
            reasons.append(f"no {name} ({type(error).__name__}: {error})")
            continue
        if n > 0:
            return name, "; ".join([*reasons, f"{name} sees {n} GPU(s)"])
        reasons.append(f"{name} sees no GPU")
    return "CUDA's runtime", "; ".join(reasons)


def open_memory():
    """Return the memory that was chosen for this run; use it as a context manager."""
    name = os.environ.get(CHOICE) or choose()[0]
    return _KINDS[name]()
