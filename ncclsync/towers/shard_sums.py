"""Join what shards give where towers compute several of them.

If the number of shards was given, bits belong to it, and there is one tree, whatever tower has which shard: a tower
adds up its own shards' part of the tree (`ops/tree.py`), and all towers compute the rest of it alike. If a step was
split for lack of memory, a tower adds each shard to the sum of those before it, so that one sum takes memory.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from ncclsync.ops import CollectiveKind
from ncclsync.ops.tree import Node, nodes_within, reduce_nodes, reduce_tree
from ncclsync.program.program import Bucket, Sent
from ncclsync.towers.layout import Layout

_COMBINE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": tf.add,
    "prod": tf.multiply,
    "max": tf.maximum,
    "min": tf.minimum,
}


def add_up(buckets: Sequence[Bucket], total: Sent, given: Sent) -> Sent:
    """Return what a tower's shards give together: the `total` of some, and what the next one has `given`.

    What is not reduced is of the next shard.
    """
    return [
        list(map(_COMBINE[bucket.wire.op], before, new)) if _adds_up(bucket) else new
        for bucket, before, new in zip(buckets, total, given, strict=True)
    ]


def _adds_up(bucket: Bucket) -> bool:
    """Return whether a tower may add up what its shards give for a bucket, before the towers meet."""
    return not bucket.wire.concatenates and bucket.wire.kind != CollectiveKind.BROADCAST and bucket.when is None


def sums_of_towers(values: Sequence[tf.Tensor], layout: Layout) -> list[tf.Tensor]:
    """Return [n] what each tower has of all of its shards, of [s] what `add_up` has returned."""
    return [values[own[-1]] for own in layout.places]


def nodes_of_towers(values: Sequence[tf.Tensor], op: str, layout: Layout) -> list[tf.Tensor]:
    """Reduce each tower's shards as far as the tree does; return [n] tensors [m, ...] of as many nodes each."""
    shards, owned = len(values), layout.places
    most = max(len(nodes_within(shards, own[0], own[-1] + 1)) for own in owned)
    stacked = []
    for device, own in zip(layout.devices, owned, strict=True):
        with tf.device(f"/{device}"):
            nodes = list(reduce_nodes(_COMBINE[op], shards, own[0], [values[shard] for shard in own]).values())
            nodes += [tf.zeros_like(nodes[0])] * (most - len(nodes))
            stacked.append(tf.stack(nodes))
    return stacked


def total_of_gathered(gathered: tf.Tensor, op: str, layout: Layout, tower: int) -> tf.Tensor:
    """Return, on a tower's device, the reduction of what `nodes_of_towers` has made, gathered: [n * m, ...]."""
    shards = layout.shards
    each = [nodes_within(shards, own[0], own[-1] + 1) for own in layout.places]
    most = max(map(len, each))
    with tf.device(f"/{layout.devices[tower]}"):
        values = {node: gathered[most * place + i] for place, nodes in enumerate(each) for i, node in enumerate(nodes)}
        return reduce_tree(_COMBINE[op], shards, values)


def join_shard_tensors(bucket: Bucket, values: Sequence[tf.Tensor], layout: Layout) -> list[tf.Tensor]:
    """Join one tensor of each shard, [s] in, [s] out, by TensorFlow's ops, which copy between devices where they must.

    It is computed once for all towers of one device; all towers are in this process.
    """
    wire, shards = bucket.wire, len(values)
    if wire.kind == CollectiveKind.BROADCAST:
        return [values[wire.root]] * shards
    nodes: dict[Node, tf.Tensor] = {}
    leaves = shards
    if layout.adds_up and _adds_up(bucket):
        leaves, combine = len(layout.devices), _COMBINE[wire.op]
        nodes = {Node(0, tower): value for tower, value in enumerate(sums_of_towers(values, layout))}
    elif not wire.concatenates:
        combine = _COMBINE[wire.op]
        for device, own in zip(layout.devices, layout.places, strict=True):
            with tf.device(f"/{device}"):
                nodes |= reduce_nodes(combine, shards, own[0], [values[shard] for shard in own])
    received: dict[str, tf.Tensor] = {}
    for device in layout.devices:
        if device not in received:
            with tf.device(f"/{device}"):
                received[device] = tf.concat(values, 0) if wire.concatenates else reduce_tree(combine, leaves, nodes)
    results = [received[device] for device in layout.shard_devices]
    if wire.kind != CollectiveKind.REDUCE_SCATTER:
        return results
    return [tf.split(result, shards)[shard] for shard, result in enumerate(results)]
