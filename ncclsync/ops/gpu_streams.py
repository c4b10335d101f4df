"""Tell exchanges which stream TensorFlow computes on, on each GPU.

A collective then waits for that stream alone, and the stream for the collective; copies of the next batch run beside
both on another stream. Without it an exchange waits for all of the GPU's streams, by CUDA's driver alone.
"""

import functools
import logging

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import cpp

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_GPU_EVENTS"


@functools.cache
def find() -> bool:
    """Return whether exchanges know TensorFlow's streams in this process; decided once, and logged.

    NCCLSYNC_GPU_EVENTS=context in the environment says that they need not.

    Raises:
        NcclSyncError: NCCLSYNC_GPU_EVENTS is neither "stream" nor "context".
    """
    reason = f"{VARIABLE}=context"
    if cpp.choice(VARIABLE, "stream", "context") == "stream":
        try:
            cpp.load("gpu_stream", tf_compat.GPU_STREAM_SOURCE, native.find_gpu_streams)
            logger.info("Exchanges wait for the stream that TensorFlow computes on, on each GPU")
            return True
        except cpp.ERRORS as error:
            reason = cpp.reason_of(error)
    logger.info("Exchanges wait for all streams of their GPUs, including those of copies: %s", reason)
    return False
