"""Group tensors into buckets: fewer, larger messages for the collectives.

`fill_buckets` decides (pure Python, no TensorFlow); `pack` and `unpack` carry it out inside a graph.
This module knows neither towers nor collectives.
"""

from collections.abc import Hashable, Sequence

import tensorflow as tf

# The size that PyTorch's DistributedDataParallel uses (`bucket_cap_mb`): large enough to reach the link's
# bandwidth, small enough to start before back-propagation ends. Source: Li et al., "PyTorch Distributed:
# Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024

# TensorFlow shares memory between a tensor and a slice of it that begins and ends at multiples of this many bytes.
# Source: IsDim0SliceAligned in tensorflow/core/framework/tensor.h, EIGEN_MAX_ALIGN_BYTES.
ALIGNED_BYTES = 64


def fill_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int, first_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Assign tensors to buckets, last created first; return [B] tuples of their indices.

    Back-propagation yields the gradients of the last layers first, so that a bucket that is filled in
    reverse order of creation is complete early.

    Args:
        sizes_bytes: [N] size of each tensor, in bytes.
        kinds: [N] tensors share a bucket only if their kinds are equal (dtype and operation, say).
        bucket_bytes: the most that a bucket holds, positive; a larger tensor gets a bucket of its own.
        first_bytes: the most that the first bucket of each kind holds; None: `bucket_bytes`.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, tuple[list[int], int]] = {}
    limits = dict.fromkeys(kinds, bucket_bytes if first_bytes is None else first_bytes)
    for index in reversed(range(len(sizes_bytes))):
        kind, size = kinds[index], sizes_bytes[index]
        bucket, filled = open_bucket.get(kind, ([], 0))
        if bucket and filled + size > limits[kind]:
            bucket, filled = [], 0
            limits[kind] = bucket_bytes
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        open_bucket[kind] = (bucket, filled + size)
    return tuple(tuple(bucket) for bucket in buckets)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate tensors of one dtype and any shapes into one bucket, a tensor of shape [elements]."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def unpack(bucket: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Split a bucket into tensors of the given static shapes; the inverse of `pack`.

    The first tensors, as far as each has a multiple of `ALIGNED_BYTES`, share the bucket's memory; others are copies.
    """
    sizes = [shape.num_elements() for shape in shapes]
    parts, begin = [], 0
    if len(sizes) == 1:
        parts = [bucket]
    while len(parts) < len(sizes) and sizes[len(parts)] * bucket.dtype.size % ALIGNED_BYTES == 0:
        size = sizes[len(parts)]
        parts.append(tf.slice(bucket, [begin], [size]))
        begin += size
    if len(parts) < len(sizes):
        parts += tf.split(bucket[begin:], sizes[len(parts) :])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
