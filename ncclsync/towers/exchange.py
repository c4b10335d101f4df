"""Join the towers' tensors where they meet: buckets after a segment, in the graph of a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import AllGather, AllReduce, ReduceScatter, native
from ncclsync.ops import Collective
from ncclsync.ops.group_ops import Joining, group_all_reduce, group_broadcast, group_exchange
from ncclsync.ops.spans import Begun, hold
from ncclsync.program.program import Bucket
from ncclsync.semantics.shards import Shards
from ncclsync.towers.state import TowerState


def join(
    buckets: Sequence[Bucket],
    sent: Sequence[Sequence[tf.Tensor]],
    shards: Shards,
    conditions: Mapping[str, tf.Tensor],
    towers: TowerState,
    travelling: Sequence[tf.Tensor],
    begin_call: Callable[[Sequence[Bucket], Sequence[int]], Begun],
) -> list[list[list[tf.Tensor]]]:
    """Join the towers' buckets.

    Args:
        buckets: [B] that they send.
        sent: [N] what each tower sends, as many tensors as the buckets' `specs`.
        shards: the towers' parts of the batch.
        conditions: tower 0's values, for `Bucket.when`.
        towers: N towers.
        travelling: what other calls join meanwhile: the communicator joins bucket after bucket.
        begin_call: lets the span of a call begin, by the indices of the buckets that it joins.

    Returns:
        [N][B] the tensors of each bucket that each tower receives.
    """
    rows = [_by_bucket(buckets, row) for row in sent]  # [N][B]
    if len(towers) == 1:
        return rows
    fractions = [share.fraction for share in shards.shares]
    labels = [f"bucket {i + 1} of {len(buckets)}" for i in range(len(buckets))]
    for indices in together(buckets):
        chosen = [buckets[i] for i in indices]
        given = [[row[i] for i in indices] for row in rows]

        def call(chosen=chosen, given=given, indices=indices):
            span = begin_call(buckets, indices)
            held = hold(given, span.ops)
            if chosen[0].join is not None:
                joined = chosen[0].join(chosen, held, fractions)
            else:
                with tf.control_dependencies(travelling):
                    joined = _join(chosen, held, towers, [labels[i] for i in indices])
            return hold(joined, span.end(tf.nest.flatten(joined)))

        when = chosen[0].when
        joined = tf.cond(conditions[when], call, lambda given=given: given) if when else call()
        for row, tensors in zip(rows, joined, strict=True):
            for i, received in zip(indices, tensors, strict=True):
                row[i] = received
    return rows


def together(buckets: Sequence[Bucket]) -> list[list[int]]:
    """Return the indices of the buckets that one call joins.

    All buckets without a condition that the communicator can take are one group. A call that joins tensors
    without the communicator takes those of one wire, dtype and condition.
    """
    groups: dict[Any, list[int]] = {}
    for i, bucket in enumerate(buckets):
        key: Any = i
        if bucket.join is not None:
            key = bucket.wire, bucket.exchanges[0].dtype, bucket.when
        elif bucket.when is None and _is_grouped(bucket):
            key = "one group"
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _by_bucket(buckets: Sequence[Bucket], tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    left = iter(tensors)
    return [[next(left) for _ in bucket.specs] for bucket in buckets]


def _is_grouped(bucket: Bucket) -> bool:
    """Return whether a collective of the communicator does what the bucket's wire says."""
    if bucket.wire.kind in ("all_reduce", "reduce_scatter"):
        return True
    # Rows are gathered so where all towers are known to send as many: one of each, and of one size.
    exchange = bucket.exchanges[0]
    same = bucket.wire.kind == "stack" and bucket.wire.empty_too and exchange.shape[1:].is_fully_defined()
    return same and exchange.dtype.name in native.DTYPES


def _join(
    buckets: Sequence[Bucket], sent: Sequence[Sequence[Sequence[tf.Tensor]]], towers: TowerState, labels: Sequence[str]
) -> list[list[list[tf.Tensor]]]:
    """Join buckets of one tensor by the communicator: all of them grouped, or one of any kind."""
    columns = [[tensors[0] for tensors in column] for column in zip(*sent, strict=True)]  # [B][N]
    if _is_grouped(buckets[0]):
        pairs = zip(buckets, labels, strict=True)
        collectives = [_collective(bucket.wire, label) for bucket, label in pairs]
        columns = group_exchange(columns, towers.communicator, collectives)
    else:
        columns = [_join_one(buckets[0].wire, columns[0], towers, labels[0])]
    return [[[tensor] for tensor in row] for row in zip(*columns, strict=True)]


def _collective(wire: Collective, label: str) -> Joining:
    """Return the communicator's collective for a bucket that is grouped."""
    if wire.kind == "stack":
        return AllGather((), (), label)
    kind = ReduceScatter if wire.kind == "reduce_scatter" else AllReduce
    return kind((), (), wire.op, label)


def _join_one(wire: Collective, tensors: Sequence[tf.Tensor], towers: TowerState, label: str) -> list[tf.Tensor]:
    """Join one bucket that is sent, gathered, or reduced to one tower; [N] in, [N] out."""
    count = len(towers)
    if wire.root >= count:
        raise ValueError(f"Expected root to be below the number of towers, {count}. Received: {wire.root}")
    if wire.kind == "broadcast":
        return group_broadcast(tensors, towers.communicator, wire.root, label)
    if wire.concatenates:
        return _gather(tensors, towers)
    return group_all_reduce(tensors, towers.communicator, wire.op, label)


def _gather(tensors: Sequence[tf.Tensor], towers: TowerState) -> list[tf.Tensor]:
    """Concatenate the towers' rows, once for all towers of one device."""
    gathered: dict[str, tf.Tensor] = {}
    for device in towers.devices:
        if device not in gathered:
            with tf.device(f"/{device}"):
                gathered[device] = tf.concat(tensors, axis=0)
    return [gathered[device] for device in towers.devices]
