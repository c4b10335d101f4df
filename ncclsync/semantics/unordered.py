"""Ops whose kernels add up in no order: towers that compute the same would differ in the last bits.

Such a kernel's threads add to one place as they come, on GPUs by atomicAdd, also in algorithms that cuDNN chooses. What
towers sum over their own rows does no harm: the all-reduce after it gives all of them the same bits. What they compute
alike meets no all-reduce, and must have the same bits by itself. Source: what TensorFlow's kernels ask, or say, when
`tf.config.experimental.enable_op_determinism` has been called, under which GPUs' kernels keep an order.
"""

import tensorflow as tf

from ncclsync.semantics.rules import names

# Where these have the indices of slices, and the slices that are added up.
ADDS_SLICES = {"UnsortedSegmentSum": (1, 0), "ResourceScatterAdd": (1, 2), "ResourceScatterSub": (1, 2)}

# All towers take tower 0's results of these.
UNORDERED = names("""
    AdjustContrastv2 BiasAddGrad Bincount Conv2DBackpropFilter Conv2DBackpropInput Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 CropAndResizeGradBoxes CropAndResizeGradImage CTCLossV2 DenseBincount
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Dilation2DBackpropFilter
    Dilation2DBackpropInput FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient MaxPool3DGrad
    MaxPoolGrad MaxPoolGradV2 MaxPoolGradWithArgmax ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad
    ScatterNd SegmentMean SegmentProd SegmentSum SoftmaxCrossEntropyWithLogits SparseSegmentMean SparseSegmentMeanGrad
    SparseSegmentMeanGradV2 SparseSegmentMeanWithNumSegments SparseSegmentSqrtN SparseSegmentSqrtNGrad
    SparseSegmentSqrtNGradV2 SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumGrad
    SparseSegmentSumGradV2 SparseSegmentSumWithNumSegments SparseSoftmaxCrossEntropyWithLogits SparseTensorDenseMatMul
    TensorScatterAdd TensorScatterSub UnsortedSegmentProd
""")

# As those do, if they do not train: the gradients of a layer that is frozen.
UNORDERED_IF_FROZEN = names("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")

# Ops of the CPU, where several threads run one. Only the second keeps an order with op determinism. For other ops
# `program/ordered_threads.py` has kernels that keep an order.
UNORDERED_ON_CPU = names("Bincount CropAndResizeGradImage SparseBincount")


def added_up(indices: tf.Tensor, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return slices whose sums are the same to the bit in whatever order a kernel adds them.

    The slices of an index are added up at the last of them, in the given order by a segmented scan (Hillis and Steele,
    "Data parallel algorithms", 1986: log2 n rounds); the others become zeros.

    Args:
        indices: [...] integers.
        slices: [..., W...] floats.

    Returns:
        [n] the indices, sorted, and [n, W...] the slices.
    """
    width = tf.shape(slices)[tf.rank(indices) :]
    count = tf.size(indices)
    at = tf.range(tf.cast(count, tf.int64))  # GPUs compute int32 on the host
    most = tf.cast(tf.maximum(count, 1), tf.int64)
    keys = tf.sort(tf.cast(tf.reshape(indices, [-1]), tf.int64) * most + at)
    places = tf.math.floordiv(keys, most)
    sums = tf.gather(tf.reshape(slices, tf.concat([[count], width], 0)), tf.math.floormod(keys, most))

    def masked(mask: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        if kept.shape.rank is None:
            mask = tf.reshape(mask, tf.concat([[count], tf.ones_like(width)], 0))
        for _ in range(mask.shape.rank or 1, kept.shape.rank or 1):
            mask = mask[..., None]  # no reshape, whose shape XLA has to know: the count may have a bound alone
        return tf.where(mask, kept, tf.zeros([], kept.dtype))

    def doubled(distance: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        before = at - tf.cast(distance, tf.int64)
        same, before = before >= 0, tf.maximum(before, 0)
        same = tf.logical_and(same, tf.equal(tf.gather(places, before), places))
        return 2 * distance, sums + masked(same, tf.gather(sums, before))

    _, sums = tf.while_loop(lambda distance, _: distance < count, doubled, [tf.constant(1), sums])
    last = tf.concat([tf.not_equal(places[1:], places[:-1]), tf.ones([tf.minimum(count, 1)], tf.bool)], 0)
    return tf.cast(places, indices.dtype), masked(last, sums)
