"""Let tensors of a dtype that NCCL lacks travel as one that it has."""

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.errors import NcclSyncError

_CARRIERS = {
    tf.bool: tf.uint8,
    tf.int16: tf.int32,  # which wraps around alike, once it is cast back
    tf.uint16: tf.int32,
    tf.complex64: tf.float32,  # twice as many along a last axis
    tf.complex128: tf.float64,
}


def carried(tensor: tf.Tensor) -> tf.Tensor:
    """Return what travels for a tensor: itself, if NCCL has its dtype. Raises NcclSyncError if it holds no numbers."""
    dtype = tensor.dtype
    if dtype.name in native.DTYPES:
        return tensor
    if dtype not in _CARRIERS:
        raise NcclSyncError(
            f"Expected numbers where towers need each other's. Received: {dtype.name}. "
            "Look words up in the input pipeline, before the step"
        )
    if dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tf.cast(tensor, _CARRIERS[dtype])


def delivered(received: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return a tensor of this dtype from one that `carried` has made; the inverse of `carried`."""
    if dtype.is_complex:
        return tf.complex(received[..., 0], received[..., 1])
    return tf.cast(received, dtype)
