"""What a collective accepts as a buffer, turned into addresses.

Owns the reading and checking of NumPy arrays, DLPack objects and ``(pointer, count, dtype)``
tuples; knows nothing of communicators. Nothing is copied and nothing is written here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ncclsync.native import DTYPE_SIZES, DTYPES, ffi

# DLPack's device types (dlpack.h, DLDeviceType): plain memory, and memory of the other kind that
# this kind of processor may use directly.
HOST = {1: "kDLCPU", 3: "kDLCUDAHost"}
CUDA = {2: "kDLCUDA", 13: "kDLCUDAManaged"}

# DLPack's (type code, bits) of what NCCL knows.
_DLPACK_CODES = {
    (code, bits): DTYPES[f"{kind}{bits}"]
    for code, kind, widths in (
        (0, "int", (8, 32, 64)),
        (1, "uint", (8, 32, 64)),
        (2, "float", (16, 32, 64)),
        (4, "bfloat", (16,)),
    )
    for bits in widths
}
_NUMPY_CODES = {np.dtype(name): code for name, code in DTYPES.items() if name != "bfloat16"}
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def empty_aligned(shape: int | Sequence[int], dtype: Any) -> np.ndarray:
    """Return an uninitialised array whose data begin at a multiple of 64 bytes.

    TensorFlow takes such an array without a copy, and vector instructions like it.

    Args:
        shape: number of elements, or the shape.
        dtype: anything that ``np.dtype`` takes.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape) if isinstance(shape, Sequence) else shape
    raw = np.empty(count * dtype.itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + count * dtype.itemsize].view(dtype).reshape(shape)


def read_buffers(
    buffers: Sequence[Any], what: str, devices: dict[int, str], writable: bool
) -> tuple[list[int], int, int, list[Any]]:
    """Turn one buffer per rank into addresses.

    Args:
        buffers: per rank a NumPy array, an object with ``__dlpack__`` or a tuple
            ``(pointer, count, dtype)``. The same object may stand for several ranks.
        what: the argument's name, for messages.
        devices: DLPack device types to accept, ``HOST`` or ``CUDA``. A tuple does not tell where
            it points to: that is the caller's word.
        writable: refuse read-only buffers. DLPack's own form has no such mark.

    Returns:
        The ranks' addresses; the count and the dtype code that all ranks share; what must stay
        referenced while the addresses are in use.

    Raises:
        TypeError: not a buffer, or of a dtype NCCL does not know.
        ValueError: not contiguous, not aligned, read-only, on another device, unlike rank 0.
    """
    addresses: list[int] = []
    keep: list[Any] = []
    last: Any = None
    address = count = dtype = first_count = first_dtype = -1
    for rank, buffer in enumerate(buffers):
        if buffer is last and rank > 0:  # one array for all ranks: read once
            addresses.append(address)
            continue
        if isinstance(buffer, np.ndarray):
            address, count, dtype = _read_numpy(buffer, what, rank, devices, writable)
        elif isinstance(buffer, tuple):
            address, count, dtype = _read_tuple(buffer, what, rank)
        elif hasattr(buffer, "__dlpack__"):
            address, count, dtype, capsule = _read_dlpack(buffer, what, rank, devices)
            keep.append(capsule)
        else:
            raise TypeError(
                f"Expected {what}[{rank}] to be a NumPy array, an object with __dlpack__ or a "
                f"tuple (pointer, count, dtype). Received: {type(buffer).__name__}"
            )
        if address % DTYPE_SIZES[dtype]:
            raise ValueError(
                f"Expected {what}[{rank}] to begin at a multiple of {DTYPE_SIZES[dtype]} bytes. "
                f"Received: address {address:#x}"
            )
        if rank == 0:
            first_count, first_dtype = count, dtype
        elif count != first_count or dtype != first_dtype:
            raise ValueError(
                f"Expected {what}[{rank}] to be like {what}[0], {first_count} × "
                f"{_DTYPE_NAMES[first_dtype]}. Received: {count} × {_DTYPE_NAMES[dtype]}"
            )
        addresses.append(address)
        last = buffer
    return addresses, first_count, first_dtype, keep


def check_alike(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Raise ValueError unless sends and recvs have the same ``(count, dtype)``."""
    if first != second:
        raise ValueError(
            f"Expected recvs[0] to be like sends[0], {first[0]} × {_DTYPE_NAMES[first[1]]}. "
            f"Received: {second[0]} × {_DTYPE_NAMES[second[1]]}"
        )


def check_overlaps(
    written: tuple[str, list[int]], read: tuple[str, list[int]], size_bytes: int
) -> None:
    """Raise ValueError if a buffer to be written overlaps another one partly.

    Args:
        written: name and addresses of the buffers to be written.
        read: name and addresses of those to be read.
        size_bytes: length of every buffer.
    """
    for rank, address in enumerate(written[1]):
        for name, others in (read, written):
            for other_rank, other in enumerate(others):
                if 0 < abs(address - other) < size_bytes:
                    raise ValueError(
                        f"Expected {written[0]}[{rank}] to be apart from {name}[{other_rank}], or "
                        f"the same. Received: {size_bytes} bytes each, "
                        f"{abs(address - other)} bytes apart"
                    )


def _read_numpy(
    array: np.ndarray, what: str, rank: int, devices: dict[int, str], writable: bool
) -> tuple[int, int, int]:
    if devices is not HOST:
        raise ValueError(
            f"Expected {what}[{rank}] in device memory ({', '.join(devices.values())}). "
            "Received: a NumPy array, which is in host memory"
        )
    dtype = _NUMPY_CODES.get(array.dtype)
    if dtype is None:
        dtype = _dtype_code(array.dtype, what, rank)
    flags = array.flags
    if not flags.c_contiguous:
        raise ValueError(
            f"Expected {what}[{rank}] to be contiguous (C order). "
            f"Received: shape {array.shape}, strides {array.strides}"
        )
    if writable and not flags.writeable:
        raise ValueError(
            f"Expected {what}[{rank}] to be writable. Received: a read-only NumPy array"
        )
    return array.__array_interface__["data"][0], array.size, dtype


def _read_tuple(buffer: tuple, what: str, rank: int) -> tuple[int, int, int]:
    try:
        pointer, count, dtype = buffer
        pointer, count = int(pointer), int(count)
    except (TypeError, ValueError):
        raise TypeError(
            f"Expected {what}[{rank}] to be a tuple (pointer, count, dtype). Received: {buffer!r}"
        ) from None
    if count < 0 or pointer < 0 or (pointer == 0 and count > 0):
        raise ValueError(
            f"Expected {what}[{rank}] to have a pointer and a count. Received: {buffer!r}"
        )
    return pointer, count, _dtype_code(dtype, what, rank)


def _dtype_code(dtype: Any, what: str, rank: int) -> int:
    """Return NCCL's code of a dtype given as NumPy's or by name."""
    name = dtype
    if not isinstance(dtype, str):
        try:
            dtype = np.dtype(dtype)
        except TypeError:
            name = repr(dtype)
        else:
            name = dtype.name if dtype.isnative else str(dtype)
    if name not in DTYPES:
        raise TypeError(
            f"Expected {what}[{rank}] of a dtype that NCCL has ({', '.join(DTYPES)}). "
            f"Received: {name}"
        )
    return DTYPES[name]


def _read_dlpack(
    buffer: Any, what: str, rank: int, devices: dict[int, str]
) -> tuple[int, int, int, Any]:
    device_type = int(buffer.__dlpack_device__()[0])
    if device_type not in devices:
        raise ValueError(
            f"Expected {what}[{rank}] in memory of type {' or '.join(devices.values())}. "
            f"Received: DLPack device type {device_type}"
        )
    # Not renamed to "used_dltensor": the capsule still owns the tensor and frees it in the end.
    capsule = buffer.__dlpack__()
    tensor = ffi.cast("ncs_dlpack_tensor*", _capsule_pointer(capsule, b"dltensor"))
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    dtype = _DLPACK_CODES.get((tensor.dtype.code, tensor.dtype.bits))
    if dtype is None or tensor.dtype.lanes != 1:
        raise TypeError(
            f"Expected {what}[{rank}] of a dtype that NCCL has ({', '.join(DTYPES)}). Received: "
            f"DLPack type code {tensor.dtype.code}, {tensor.dtype.bits} bits, "
            f"{tensor.dtype.lanes} lanes"
        )
    if tensor.strides != ffi.NULL:
        strides = [tensor.strides[i] for i in range(tensor.ndim)]
        dense = [math.prod(shape[i + 1 :]) for i in range(tensor.ndim)]
        if any(n > 1 and s != d for n, s, d in zip(shape, strides, dense, strict=True)):
            raise ValueError(
                f"Expected {what}[{rank}] to be contiguous (C order). "
                f"Received: shape {shape}, strides {strides} in elements"
            )
    address = int(ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset
    return address, math.prod(shape), dtype, capsule
