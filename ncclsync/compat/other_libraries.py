"""Refuse parts of programs for MirroredStrategy, Horovod, multi_gpu_model or tensorpack that cannot work here.

The errors use that library's words. None of these libraries is imported.
"""

import os
from typing import Any

import tensorflow as tf

from ncclsync.errors import NcclSyncError

# Variables with the number of processes, set by horovodrun and by MPICH's and Intel's mpirun; they do not tell enough
# to join.
PROCESS_COUNTS = ("HOROVOD_SIZE", "PMI_SIZE")

OTHER_WAY = "ncclsync places the replicas itself: leave the strategy out."


def check_outside_strategy() -> None:
    """Raise ValueError in a `strategy.scope()` or `strategy.run` of `tf.distribute`."""
    if tf.distribute.has_strategy():
        raise ValueError(
            "Expected to be called outside any tf.distribute scope. "
            f"Received: a call under {type(tf.distribute.get_strategy()).__name__}. {OTHER_WAY}"
        )


def check_undistributed(given: Any) -> None:
    """Raise TypeError for a part of a batch, or an iterator, that `tf.distribute` splits among replicas."""
    if isinstance(given, (tf.distribute.DistributedValues, tf.distribute.DistributedIterator)):
        raise TypeError(
            "Expected the global batch, as tensors or arrays, which is split among the towers here. "
            f"Received: {type(given).__name__} of tf.distribute. Pass the tf.data.Dataset that went into "
            "experimental_distribute_dataset."
        )


def check_not_horovods(wrapped: Any) -> None:
    """Raise TypeError for an optimizer or a tape of Keras' or TensorFlow's that Horovod has wrapped."""
    # Such a class derives from the wrapped class and has its name; only its module differs.
    # Source: horovod/_keras/__init__.py, create_distributed_optimizer.
    if any(cls.__module__.partition(".")[0] == "horovod" for cls in type(wrapped).__mro__):
        taken, given = "a keras.optimizers.Optimizer", "hvd.DistributedOptimizer"
        if isinstance(wrapped, tf.GradientTape):
            taken, given = "a tf.GradientTape", "hvd.DistributedGradientTape"
        raise TypeError(
            f"Expected {taken} as it is, since ncclsync all-reduces the gradients. Received: one wrapped by "
            f"{given} ({type(wrapped).__module__}), which would reduce them a second time. Its learning rate "
            "is that of one device with the global batch size."
        )


def check_one_process() -> None:
    """Raise NcclSyncError in a process of horovodrun, or of an mpirun whose processes cannot be joined.

    Each such process would take the same devices, and train alone.
    """
    for name in PROCESS_COUNTS:
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise NcclSyncError(
                "Expected one process, which drives all GPUs of the host, or several that Open MPI's mpirun, srun or "
                f"torchrun have started. Received: {name}={count}. For processes that are to train apart from each "
                "other, write processes=False, and name the devices of each, as in devices=['GPU:0']."
            )
