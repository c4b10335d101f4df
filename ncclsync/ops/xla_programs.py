"""Let towers share what XLA compiles: one compilation of a program for any number of equal GPUs.

TensorFlow keeps a compiler, with all that it has compiled, for each device, and XLA runs a program on any device of the
kind that it was compiled for. So the other devices are given the first one's compiler, before they have one.
"""

import ctypes
import functools
import logging
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import cpp

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_XLA_PROGRAMS"

# What the function in C++ returns.
_SHARED, _OTHER_KIND = 0, 2
_WORDS = {
    1: "TensorFlow lists no such device",
    _OTHER_KIND: "it is of another kind",
    3: "TensorFlow keeps no compiler by the known name",
    4: "it had compiled something before",
}


@functools.cache
def share_programs(devices: tuple[str, ...]) -> bool:
    """Let these devices, such as "GPU:0", share what XLA compiles, as far as they are of a kind; return whether all do.

    Decided once, and logged. NCCLSYNC_XLA_PROGRAMS in the environment is "shared", or "own", with which each compiles
    for itself; anything else is an NcclSyncError.
    """
    devices = tuple(dict.fromkeys(devices))  # CPU towers are on one
    if len(devices) < 2:
        return True

    def join() -> str:
        call = cpp.load("xla_programs", tf_compat.XLA_PROGRAMS_SOURCE, "ncclsync_share_compiler")
        call.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
        with tf.init_scope():
            reasons = [_join(call, devices[:i], device) for i, device in enumerate(devices)]
        return "; ".join(filter(None, reasons))

    reason = cpp.reason_not(VARIABLE, "shared", "own", join)
    if reason:
        logger.info("XLA compiles for each device by itself: %s", reason)
    else:
        logger.info("XLA compiles once for %s", ", ".join(devices))
    return not reason


def _join(call: Any, before: tuple[str, ...], device: str) -> str | None:
    """Give a device the compiler of the first device of its kind; return why not, or None.

    The first device of a kind is the one whose compiler the next ones are to have, which makes it compile.
    """
    status = _SHARED
    for first in before:
        with tf.device(f"/{first}"):
            _compiles()
        names = (f"/job:localhost/replica:0/task:0/device:{name}".encode() for name in (first, device))
        status = call(tf_compat.context_address(), *names)
        if status != _OTHER_KIND:
            break
    return f"{device}: {_WORDS[status]}" if status else None


@tf.function(jit_compile=True)
def _compiles() -> tf.Tensor:
    """Make a device have a compiler."""
    return tf.zeros([])
