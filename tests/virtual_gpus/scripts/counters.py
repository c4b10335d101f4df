"""What the stand-in libcudart has counted in this process; the names are in tests/support/csrc/standin.h."""

import ctypes
import os

_library = ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"])
_library.standin_total.restype = ctypes.c_longlong


def counted(*names):
    """Return how many of each there are, or were since the start."""
    return [_library.standin_total(name.encode()) for name in names]


def left_mib():
    """Return how many MiB of GPU 0 nobody has taken."""
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert _library.cudaSetDevice(0) == 0
    assert _library.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(total)) == 0
    return left.value >> 20
