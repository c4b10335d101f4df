"""Pack what a segment sends into buckets, and unpack what it receives; in the graph of the segment."""

from collections.abc import Sequence

import tensorflow as tf

from ncclsync.compat.names import TensorName
from ncclsync.ops import CollectiveKind
from ncclsync.ops.buckets import pack, unpack
from ncclsync.ops.spans import Meter, begin, delay
from ncclsync.program.program import Bucket


def unpack_all(
    buckets: Sequence[Bucket],
    received: Sequence[list[tf.Tensor]],
    meter: Meter | None = None,
    tower: tf.Tensor | None = None,
) -> dict[TensorName, tf.Tensor]:
    """Return what a tower has received, [B], by the names of the exchanges' results; `meter` records it for `tower`."""
    packed = any(bucket.packed for bucket in buckets)
    tensors = [tensor for each in received for tensor in each]
    span = begin(meter if packed else None, tower, "unpack", tensors)
    values: dict[TensorName, tf.Tensor] = {}
    for bucket, each in zip(buckets, delay(list(received), span.ops), strict=True):
        parts = unpack(each[0], [e.shape for e in bucket.exchanges]) if bucket.packed else each
        values.update(zip((exchange.result for exchange in bucket.exchanges), parts, strict=True))
    return delay(values, span.end(list(values.values())))


def pack_all(
    buckets: Sequence[Bucket],
    values: dict[TensorName, tf.Tensor],
    fraction: tf.Tensor,
    has_samples: tf.Tensor,
    selects: bool = True,
    meter: Meter | None = None,
    tower: tf.Tensor | None = None,
) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
    """Return what a tower sends, and what else is to be waited for.

    Args:
        buckets: [B] in order.
        values: by name; the exchanges' sources among them.
        fraction: the tower's share of the samples, float64; 0 for a tower without.
        has_samples: 1 if that is not 0, else 0; int32, in the host's memory, as the lengths of slices are.
        selects: whether to select what is sent; else slices of all or nothing are packed. On GPUs a select is a kernel
            for each bucket, and XLA wants to know lengths; on the CPU it is a second copy of the bucket.
        meter, tower: see `unpack_all`.
    """
    packed = any(bucket.packed for bucket in buckets)
    sources = {exchange.source: values[exchange.source] for b in buckets for exchange in b.exchanges}
    span = begin(meter if packed else None, tower, "pack", list(sources.values()))
    sources = delay(sources, span.ops)
    outgoing = [_send(bucket, sources, fraction, has_samples, selects) for bucket in buckets]
    return outgoing, span.end([tensor for each in outgoing for tensor in each])


def _send(
    bucket: Bucket, values: dict[TensorName, tf.Tensor], fraction: tf.Tensor, has_samples: tf.Tensor, selects: bool
) -> list[tf.Tensor]:
    """Pack what a tower contributes; a tower without samples contributes what changes nothing."""
    wire, tensors = bucket.wire, [values[exchange.source] for exchange in bucket.exchanges]
    if bucket.join is not None and not wire.concatenates:
        return tensors
    for i, exchange in enumerate(bucket.exchanges):
        if exchange.collective.kind == CollectiveKind.ALL_REDUCE and exchange.collective.op == "mean":
            tensors[i] = tensors[i] * tf.cast(fraction, tensors[i].dtype)
    if wire.concatenates and not wire.empty_too:
        tensors = [tensor[: tf.shape(tensor)[0] * has_samples] for tensor in tensors]
    elif wire.kind != CollectiveKind.BROADCAST and not wire.empty_too:
        # Not a product: what a tower computed on a stand-in row may be NaN.
        neutral = _neutral(wire.op, tensors[0].dtype)
        is_long = bucket.packed and (bucket.specs[0].shape[0] or 0) > tf.int32.max
        if selects and bucket.packed and not is_long:
            tensors = [pack(tensors)]  # one select for all
        if selects or not bucket.packed or is_long:
            tensors = [tf.where(fraction > 0, tensor, neutral) for tensor in tensors]
        else:
            flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
            sizes = [tf.size(tensor) for tensor in flat]  # a shape that the trace has lost may be another
            own = [tensor[: size * has_samples] for tensor, size in zip(flat, sizes, strict=True)]
            tensors = [*own, tf.fill([tf.add_n(sizes) * (1 - has_samples)], neutral)]
    if not bucket.packed:
        return tensors
    sent = pack(tensors)
    sent.set_shape(bucket.specs[0].shape)
    return [sent]


def _neutral(op: str, dtype: tf.DType) -> tf.Tensor:
    if op == "sum":
        return tf.zeros([], dtype)
    if op == "prod":
        return tf.ones([], dtype)
    extreme = dtype.min if op == "max" else dtype.max
    if dtype.is_floating:
        extreme = float("-inf") if op == "max" else float("inf")
    return tf.constant(extreme, dtype)
