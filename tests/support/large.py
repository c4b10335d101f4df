"""Make arrays that are larger than memory: one piece of memory, many times in a row."""

import ctypes
import mmap
import os

import numpy as np

_PIECE = 1 << 24
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_FIXED = mmap.MAP_SHARED | 0x10


def aliased(count: int) -> np.ndarray:
    """Return so many bytes, of which byte i and byte i + 2^24 are the same one. They are never freed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    whole = -(-count // _PIECE) * _PIECE
    fd = os.memfd_create("aliased")
    os.ftruncate(fd, _PIECE)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    begin = libc.mmap(None, whole, access, _RESERVED, -1, 0)
    for offset in range(0, whole, _PIECE):
        assert libc.mmap(begin + offset, _PIECE, access, _FIXED, fd, 0) == begin + offset
    os.close(fd)
    return np.frombuffer((ctypes.c_uint8 * count).from_address(begin), np.uint8)
