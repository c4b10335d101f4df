"""Tell exchanges which stream TensorFlow computes on, on each GPU.

A collective then waits for that stream alone, and the stream for the collective; copies of the next batch run beside
both on another stream. Without it an exchange waits for all of the GPU's streams, by CUDA's driver alone, and XLA
compiles no step: it may record a command buffer meanwhile, and CUDA then takes no event of all streams.
"""

import functools
import logging

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import cpp

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_GPU_EVENTS"


@functools.cache
def missing() -> str:
    """Return why exchanges do not know TensorFlow's streams in this process, or ""; decided once, and logged.

    NCCLSYNC_GPU_EVENTS in the environment is "stream", or "context", with which they are not looked for; anything else
    is an NcclSyncError.
    """

    def find() -> None:
        native.find_gpu_streams(cpp.load("gpu_stream", tf_compat.GPU_STREAM_SOURCE, "ncclsync_gpu_stream"))

    reason = cpp.reason_not(VARIABLE, "stream", "context", find)
    if reason:
        logger.info("Exchanges wait for all streams of their GPUs, including those of copies: %s", reason)
    else:
        logger.info("Exchanges wait for the stream that TensorFlow computes on, on each GPU")
    return reason
