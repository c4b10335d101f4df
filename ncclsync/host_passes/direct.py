"""Exchange tensors without packing them: in the host's memory a copy would gain nothing."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.ops import CollectiveKind, host_ops
from ncclsync.program.program import Bucket


def unpacked(bucket: Bucket) -> Bucket:
    """Return the bucket, joined unpacked by the C op; unchanged if the op does not know its dtype or wire."""
    if bucket.wire.kind == CollectiveKind.BROADCAST or bucket.exchanges[0].dtype.name not in native.DTYPES:
        return bucket
    return dataclasses.replace(bucket, packed=False, join=join)


def join(
    buckets: Sequence[Bucket], tensors: Sequence[Sequence[Sequence[tf.Tensor]]], fractions: Sequence[tf.Tensor]
) -> list[list[list[tf.Tensor]]]:
    """Join the towers' tensors, in a graph; see `Bucket.join`.

    Args:
        buckets: [B] of one wire and dtype, of E exchanges each.
        tensors: [N][B][E] the towers' tensors.
        fractions: [N] float64 scalars, each tower's share of the samples.

    Returns:
        [N][B][E] the towers' results; towers share a tensor where their results are equal.
    """
    wire = buckets[0].wire
    rows = [[tensor for each in row for tensor in each] for row in tensors]
    received: list[list[Any]] = [list(row) for row in rows]
    places = collections.defaultdict(list)  # of exchanges with equal weights
    for place, exchange in enumerate(exchange for bucket in buckets for exchange in bucket.exchanges):
        places[exchange.collective.op == "mean"].append(place)
    for is_mean, chosen in places.items():
        given = [[row[place] for place in chosen] for row in rows]
        if wire.concatenates:
            joined = [tf.concat(column, 0) for column in zip(*given, strict=True)]
        else:
            weights = list(fractions)
            if not is_mean:
                weights = [tf.ones_like(f) if wire.empty_too else tf.sign(f) for f in fractions]
            joined = host_ops.all_reduce(given, weights, wire.op)
        for tower, row in enumerate(received):
            for place, tensor in zip(chosen, joined, strict=True):
                row[place] = tensor[tower : tower + 1] if wire.kind == CollectiveKind.REDUCE_SCATTER else tensor
    left = [iter(row) for row in received]
    return [[[next(one) for _ in bucket.exchanges] for bucket in buckets] for one in left]
