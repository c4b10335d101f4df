"""Read and check the buffers of a collective: NumPy arrays, DLPack objects and ``(pointer, count, dtype)`` tuples.

They become pointers; nothing is copied or written here.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ncclsync.communicator.native import DTYPE_NAMES, DTYPE_SIZES, DTYPES, ffi

# DLPack's device types (dlpack.h, DLDeviceType): plain memory, and memory of the other kind that
# this kind of processor may use directly.
HOST = {1: "kDLCPU", 3: "kDLCUDAHost"}
CUDA = {2: "kDLCUDA", 13: "kDLCUDAManaged"}

_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}  # by type code: DLDataTypeCode
_NUMPY_CODES = {np.dtype(name): code for name, code in DTYPES.items() if name != "bfloat16"}
_BYTES, _POINTER, _BYTE_POINTER = ffi.typeof("char[]"), ffi.typeof("void*"), ffi.typeof("char*")
_TENSOR = ffi.typeof("ncs_dlpack_tensor*")
_ADDRESSES = 2 ** (8 * ffi.sizeof("void*"))

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def empty_aligned(shape: int | Sequence[int], dtype: Any) -> np.ndarray:
    """Return an uninitialised array whose data, if any, begin at a multiple of 64 bytes.

    TensorFlow takes such an array without a copy, and vector instructions like it.
    """
    size_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(size_bytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size_bytes].view(dtype).reshape(shape)


class Buffers:
    """Hold one buffer per rank, read and checked; keeps alive what it points into.

    Attributes:
        what: the argument's name, for messages.
        pointers: per rank, as cffi takes them.
        count: elements of each.
        dtype: NCCL's code.
    """

    __slots__ = ("_alive", "count", "dtype", "pointers", "what")

    def __init__(self, buffers: Sequence[Any], what: str, devices: Mapping[int, str], writable: bool) -> None:
        """Read one buffer per rank; the same object may stand for several ranks.

        Args:
            buffers: see `Communicator`.
            what: the argument's name, for messages.
            devices: DLPack device types to accept, ``HOST`` or ``CUDA``. A tuple does not say
                where it points to: for GPUs CUDA is asked, later, on which one it is.
            writable: refuse read-only buffers. DLPack's own form has no such mark.

        Raises:
            TypeError: not a buffer, or of a dtype NCCL does not know.
            ValueError: not contiguous, read-only, on another device, or unlike rank 0.
        """
        self.what = what
        self.pointers: list[Any] = []
        self._alive: list[Any] = []
        last: Any = None
        pointer: Any = None
        count = dtype = self.count = self.dtype = -1
        for rank, buffer in enumerate(buffers):
            if buffer is last and rank > 0:  # one array for all ranks: read once
                self.pointers.append(pointer)
                continue
            name = f"{what}[{rank}]"
            if isinstance(buffer, np.ndarray):
                pointer, count, dtype = _read_numpy(buffer, name, devices, writable)
            elif isinstance(buffer, tuple):
                pointer, count, dtype = _read_tuple(buffer, name)
            elif hasattr(buffer, "__dlpack__"):
                pointer, count, dtype, capsule = _read_dlpack(buffer, name, devices)
                self._alive.append(capsule)
            else:
                raise TypeError(
                    f"Expected {name} to be a NumPy array, an object with __dlpack__ or a "
                    f"tuple (pointer, count, dtype). Received: {type(buffer).__name__}"
                )
            if rank == 0:
                self.count, self.dtype = count, dtype
            elif count != self.count or dtype != self.dtype:
                raise ValueError(
                    f"Expected {name} to be like {what}[0], {self.count} × "
                    f"{DTYPE_NAMES[self.dtype]}. Received: {count} × {DTYPE_NAMES[dtype]}"
                )
            self.pointers.append(pointer)
            last = buffer

    def check_like(self, other: Buffers, blocks: int = 1) -> None:
        """Raise ValueError unless each of these is so many blocks of the other's count and dtype."""
        if self.count != blocks * other.count or self.dtype != other.dtype:
            like = f"like {other.what}[0]" if blocks == 1 else f"{blocks} blocks like {other.what}[0]"
            raise ValueError(
                f"Expected {self.what}[0] to be {like}, {blocks * other.count} × "
                f"{DTYPE_NAMES[other.dtype]}. Received: {self.count} × {DTYPE_NAMES[self.dtype]}"
            )

    def addresses(self) -> list[int]:
        """Return the pointers as numbers."""
        return [int(ffi.cast("uintptr_t", pointer)) for pointer in self.pointers]


def _read_numpy(array: np.ndarray, name: str, devices: Mapping[int, str], writable: bool) -> tuple[Any, int, int]:
    if devices is not HOST:
        raise ValueError(
            f"Expected {name} in memory of type {' or '.join(devices.values())}. "
            "Received: a NumPy array, which is in host memory"
        )
    dtype = _NUMPY_CODES.get(array.dtype)
    if dtype is None:
        dtype = _dtype_code(array.dtype, name)
    try:
        return ffi.from_buffer(_BYTES, array, writable), array.size, dtype
    except ValueError as error:
        raise ValueError(
            f"Expected {name} to be contiguous (C order){' and writable' * writable}. "
            f"Received: shape {array.shape}, strides {array.strides} ({error})"
        ) from None


def _read_tuple(buffer: tuple, name: str) -> tuple[Any, int, int]:
    try:
        pointer, count, dtype = buffer
        if isinstance(pointer, bool) or isinstance(count, bool):
            raise TypeError
        pointer, count = operator.index(pointer), operator.index(count)
    except (TypeError, ValueError):
        raise TypeError(f"Expected {name} to be a tuple (pointer, count, dtype). Received: {buffer!r}") from None
    if count < 0 or pointer < 0 or (pointer == 0 and count > 0):
        raise ValueError(f"Expected {name} to have a pointer and a count. Received: {buffer!r}")
    code = _dtype_code(dtype, name)
    # A number cast to a pointer loses all bits above.
    if pointer + count * DTYPE_SIZES[code] > _ADDRESSES:
        bits = _ADDRESSES.bit_length() - 1
        raise ValueError(f"Expected {name} to begin and to end below address 2^{bits}. Received: {buffer!r}")
    return ffi.cast(_POINTER, pointer), count, code


def _dtype_code(dtype: Any, name: str) -> int:
    """Return NCCL's code of a dtype given as NumPy's or by its name, of the buffer that is called `name`."""
    found = dtype
    if dtype is None:  # NumPy would take it for float64
        found = "None"
    elif not isinstance(dtype, str):
        try:
            dtype = np.dtype(dtype)
        except (TypeError, ValueError):
            found = repr(dtype)
        else:
            found = dtype.name if dtype.isnative else str(dtype)
    if found not in DTYPES:
        raise TypeError(f"Expected {name} of a dtype that NCCL has ({', '.join(DTYPES)}). Received: {found}")
    return DTYPES[found]


def _read_dlpack(buffer: Any, name: str, devices: Mapping[int, str]) -> tuple[Any, int, int, Any]:
    # Asked for a string's memory, TensorFlow ends the process.
    dtype_name = getattr(getattr(buffer, "dtype", None), "name", None)
    if isinstance(dtype_name, str):
        _dtype_code(dtype_name, name)
    try:
        device_type = int(buffer.__dlpack_device__()[0])
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        _raise_unshared(buffer, name, error)
    if device_type not in devices:
        raise ValueError(
            f"Expected {name} in memory of type {' or '.join(devices.values())}. "
            f"Received: DLPack device type {device_type}"
        )
    # Not renamed to "used_dltensor": the capsule still owns the tensor and frees it in the end.
    try:
        capsule = buffer.__dlpack__()
        tensor = ffi.cast(_TENSOR, _capsule_pointer(capsule, b"dltensor"))
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        _raise_unshared(buffer, name, error)
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    dtype = DTYPES.get(f"{_DLPACK_KINDS.get(tensor.dtype.code)}{tensor.dtype.bits}")
    if dtype is None or tensor.dtype.lanes != 1:
        raise TypeError(
            f"Expected {name} of a dtype that NCCL has ({', '.join(DTYPES)}). Received: "
            f"DLPack type code {tensor.dtype.code}, {tensor.dtype.bits} bits, "
            f"{tensor.dtype.lanes} lanes"
        )
    if tensor.strides != ffi.NULL:
        strides = [tensor.strides[i] for i in range(tensor.ndim)]
        dense = 1
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            if length > 1 and stride != dense:
                raise ValueError(
                    f"Expected {name} to be contiguous (C order). "
                    f"Received: shape {shape}, strides {strides} in elements"
                )
            dense *= length
    pointer = ffi.cast(_BYTE_POINTER, tensor.data) + tensor.byte_offset
    return pointer, math.prod(shape), dtype, capsule


def _raise_unshared(buffer: Any, name: str, error: Exception) -> NoReturn:
    raise TypeError(
        f"Expected {name} to give its memory by __dlpack_device__ and __dlpack__. "
        f"Received: {type(buffer).__name__} ({error})"
    ) from error
