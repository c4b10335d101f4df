"""Join the towers where they meet: after a segment, in the graph of a step.

On devices that only enqueue, the towers wait for each other at a launch after each segment, which takes all that they
send. A tower receives a tensor where a segment takes it, after the work that overlaps with the exchange. Elsewhere the
towers' tensors are joined at once, and the next segment waits for all of them.

A tower may compute several shards. If their number was given, one tree adds them up, on any number of towers, for equal
bits: a tower adds up its own shards' part of the tree (`ops/tree.py`), and all towers compute the rest alike. If a step
was split for lack of memory, a tower adds each shard to the sum of its earlier shards, so that one sum takes memory.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ncclsync.communicator import AllGather, AllReduce, AnyCollective, Broadcast, ReduceScatter, native
from ncclsync.compat.names import TensorName
from ncclsync.ops import CollectiveKind, device_ops
from ncclsync.ops.group_ops import Turns, agree, gather_rows, group_exchange
from ncclsync.ops.spans import COMMUNICATION, Begun, Meter, begin, delay
from ncclsync.ops.tree import Node, nodes_within, reduce_nodes, reduce_tree
from ncclsync.program.program import Bucket, Sent
from ncclsync.sharding.shards import Shards, digest_of_rows
from ncclsync.towers.layout import Layout
from ncclsync.towers.state import TowerState

# For each of this process' n towers, the ops and tensors that it waits for: [n] lists.
After = list[list[Any]]

_COMBINE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": tf.add,
    "prod": tf.multiply,
    "max": tf.maximum,
    "min": tf.minimum,
}


class _Call(NamedTuple):
    """The buckets that one call joins after a segment."""

    number: int  # of the segment, from 1
    indices: Sequence[int]  # [B] of the buckets, among all that the segment sends
    buckets: Sequence[Bucket]  # [B]
    given: Sequence[Sequence[Sequence[tf.Tensor]]]  # [s][B] lists of tensors, what each shard sends
    labels: Sequence[str]  # [B] what the buckets are called in messages
    done: After  # [n] the ops of the segment

    @property
    def columns(self) -> list[list[tf.Tensor]]:
        """Return [B][s] what each shard sends: a bucket without a `join` is one tensor."""
        return [[tensors[0] for tensors in column] for column in zip(*self.given, strict=True)]

    @property
    def collectives(self) -> list[AnyCollective]:
        """Return the communicator's collectives for such buckets, without buckets for which it has none."""
        made = map(_collective, self.buckets, self.labels)
        return [one for one in made if one is not None]


class Exchanges:
    """The exchanges of one laid out step: what was sent, until a segment takes it."""

    def __init__(self, towers: TowerState, shards: Shards, meter: Meter | None, *, keeps_sent: bool) -> None:
        """Begin a step on the parts of a batch; the meter records when calls begin and end.

        `keeps_sent`: whether others look at what was sent after it has been joined.
        """
        self._towers, self._shards, self._meter = towers, shards, meter
        self._layout, self._divided = towers.layout, towers.layout.divided is not None
        self._reuses = not keeps_sent and not self._divided
        # Outside a graph everything has happened, and nothing is enqueued.
        self._enqueues = towers.session.launches and not tf.executing_eagerly() and len(towers) > 1
        self.recorded: list[tf.Operation] = []  # timestamps that nothing of the step waits for
        self.turns = Turns([shards.shares[0].total, *shards.whole], _described)  # the order in which processes meet
        self._called: list[Any] = []  # the exchanges so far
        self._agreed = 0  # how many of them all processes have launched
        # [s] by a bucket's result: its tensors; or (tower, launch that brings it, column of that launch).
        self._received: list[dict[TensorName, Any]] = [{} for _ in towers.layout.own_shards]

    def meet(self, done: After, anywhere: Sequence[Any] = ()) -> After:
        """Return what each tower has to wait for, so that it goes on after `done` of all towers and after `anywhere`.

        `done`: ops of each tower. `anywhere`: ops of the host.
        """
        if self._enqueues:
            launched = self._launch([], [], done, anywhere)
            return [[launched.passed(tower)] for tower in range(len(done))]
        every = [*anywhere, *(one for each in done for one in each)]
        return [[tf.group(*every)] if every else []] * len(self._layout.devices)

    def join(
        self,
        number: int,
        buckets: Sequence[Bucket],
        sent: Sequence[Sent],
        done: After,
        conditions: Mapping[TensorName, tf.Tensor],
    ) -> After:
        """Join the towers' buckets, [B], after a segment; return [n] what each tower waits for before it goes on.

        `sent`: [s] what each shard sends; `done`: [n] the segment's ops; `conditions`: tower 0's, for `Bucket.when`.
        """
        if not buckets:
            return self.meet(done)
        rows = [[*row] for row in sent]  # [s][B]
        after = None
        for indices in together(buckets) if self._layout.shards > 1 else []:
            given = [[row[i] for i in indices] for row in rows]
            labels = [f"bucket {i + 1} of {len(buckets)}" for i in indices]
            call = _Call(number, indices, [buckets[i] for i in indices], given, labels, done)
            sums = all(bucket.wire.kind == CollectiveKind.ALL_REDUCE for bucket in call.buckets)
            if self._enqueues and _is_one_group(call.buckets[0]) and (sums or not self._divided):
                after = self._enqueue(call)
                continue
            when = call.buckets[0].when
            if when:
                branches = [functools.partial(self._in_branch, call, joins=joins) for joins in (True, False)]
                joined, last = tf.cond(conditions[when], *branches)
                self.turns.last = last or tf.nest.flatten(joined)[:1]  # tensors of a branch's graph are of no use here
            else:
                joined = self._run(call)
            for row, tensors in zip(rows, joined, strict=True):
                for i, received in zip(indices, tensors, strict=True):
                    row[i] = received
        for received, row in zip(self._received, rows, strict=True):
            for bucket, tensors in zip(buckets, row, strict=True):
                received.setdefault(bucket.result, tensors)
        return self.meet(done) if after is None else after

    def take(self, place: int, buckets: Sequence[Bucket], after: Sequence[Any], *, waits: bool) -> Sent:
        """Return what the shard in this place receives of these buckets, on its device; see `Launched.deliver`."""
        tensors = []
        for bucket in buckets:
            received = self._received[place].pop(bucket.result)
            if isinstance(received, tuple):
                tower, launched, column = received
                received = [launched.deliver(tower, after, waits=waits)[column]]
                if self._divided and not self._layout.adds_up:
                    received = [_total_of_gathered(received[0], bucket.wire.op, self._layout, tower)]
            tensors.append(received)
        return tensors

    def wait_for_all(self, after: After, *, waits: bool) -> After:
        """Return what each tower waits for until all that was exchanged is there, before it writes the first weight.

        A failed exchange then leaves all weights as they were. On devices that only enqueue, where the host `waits` for
        no exchange, towers go on once all is launched.
        """
        waited = [[*each] for each in after]
        groups: list[dict[str, device_ops.Launched]] = [{} for _ in after]
        for tower, received in zip(self._layout.tower_places, self._received, strict=True):
            for tensors in received.values():
                if not isinstance(tensors, tuple):
                    waited[tower] += tensors
                elif waits:
                    waited[tower] += tensors[1].deliver(tower, after[tower], waits=True)
                else:
                    groups[tower][tensors[1].token.name] = tensors[1]
        for tower, launched in enumerate(groups):
            waited[tower] += [group.passed(tower) for group in launched.values()]
        return waited

    def _enqueue(self, call: _Call) -> After:
        """Launch buckets as a group; return what each tower waits for."""
        columns, collectives = call.columns, call.collectives
        if self._layout.adds_up:
            columns = [_sums_of_towers(column, self._layout) for column in columns]
        elif self._divided:
            ops = [bucket.wire.op for bucket in call.buckets]
            columns = [_stacked_nodes(column, op, self._layout) for column, op in zip(columns, ops, strict=True)]
            collectives = [AllGather((), (), label) for label in call.labels]
        span = self._begin(call)
        in_place = [self._layout.adds_up or (self._reuses and bucket.owns_memory) for bucket in call.buckets]
        launched = self._launch(columns, collectives, call.done, in_place=in_place)
        if span.ops:  # only then is there anything to wait for
            with tf.control_dependencies(span.ops):
                self.recorded += span.end([launched.ended()])
        for tower, received in zip(self._layout.tower_places, self._received, strict=True):
            received.update({bucket.result: (tower, launched, column) for column, bucket in enumerate(call.buckets)})
        return [[launched.arrived(tower)] for tower in range(len(call.done))]

    def agree(self, after: After, *, ends: bool = False) -> After:
        """Return the ops that each tower waits for before it writes: all processes have launched the exchanges.

        Otherwise an error in one process, which then launches nothing more, would cost the others their weights. The
        hosts meet, and wait for no GPU. They compare a digest of all exchanges, so that a process whose graph has other
        exchanges, or another order, is an error.

        Processes of CPU towers meet when the step `ends`: an error in one of them then undoes it in all.
        """
        count = len(self._called)
        is_due = count != self._agreed if self._enqueues else ends
        if tf.executing_eagerly() or not self._layout.meets_processes or not is_due:
            return after
        self._agreed = count
        digest = hashlib.blake2b(repr(self._called).encode(), digest_size=4).hexdigest()
        text = f"a step ({count} exchange{'s' * (count > 1)}, program {digest})"
        with tf.control_dependencies([] if self._enqueues else [one for each in after for one in each]):
            return self.meet(after, [agree(self._towers.communicator, text, self.turns).op])

    def _launch(
        self,
        columns: Sequence[Sequence[tf.Tensor]],
        collectives: Sequence[AnyCollective],
        done: After,
        anywhere: Sequence[Any] = (),
        *,
        in_place: Sequence[bool] | None = None,
    ) -> device_ops.Launched:
        before = [*self.turns.last, *anywhere]
        to = self._towers.communicator, collectives, self._layout.devices
        launched = device_ops.launch(columns, *to, done, before, in_place=in_place)
        self.turns.last = [launched.token]
        return launched

    def _run(self, call: _Call) -> list[list[list[tf.Tensor]]]:
        """Join buckets at once; return [s][B] lists of tensors, what each shard receives."""
        span = self._begin(call)
        call = call._replace(given=delay(call.given, span.ops))
        join, root, count = call.buckets[0].join, call.buckets[0].wire.root, self._layout.shards
        if root >= count:
            what = "shards" if self._divided else "towers"
            raise ValueError(f"Expected root to be below the number of {what}, {count}. Received: {root}")
        if join is not None:
            joined = join(call.buckets, call.given, [share.fraction for share in self._shards.shares])
        else:
            joined = [[[tensor] for tensor in row] for row in zip(*self._joined(call), strict=True)]
        return delay(joined, span.end(tf.nest.flatten(joined)))

    def _joined(self, call: _Call) -> list[list[tf.Tensor]]:
        """Join the columns of a call: the communicator's as a group, or one bucket of any kind."""
        columns, collectives, communicator = call.columns, call.collectives, self._towers.communicator
        if self._divided or not (collectives or self._layout.meets_processes):
            pairs = zip(call.buckets, columns, strict=True)
            return [_join_shard_tensors(bucket, column, self._layout) for bucket, column in pairs]
        # The communicator joins bucket after bucket.
        travelling = [tensor for row in self._received for tensors in row.values() for tensor in tensors]
        with tf.control_dependencies([] if self._enqueues else travelling):
            if not collectives:
                return [gather_rows(columns[0], communicator, call.labels[0], self.turns)]
            return group_exchange(columns, communicator, collectives, self.turns)

    def _in_branch(self, call: _Call, *, joins: bool) -> tuple[Any, list[tf.Tensor]]:
        """Return what `_run` returns, or else what was sent; and the last turn, if it is a token."""
        joined = self._run(call) if joins else call.given
        with tf.device("/CPU:0"):
            last = self.turns.last if joins else [tf.zeros([], tf.int64)]
        return joined, last if self._enqueues else []

    def _begin(self, call: _Call) -> Begun:
        called = [f"{call.number}.{i + 1}" for i in call.indices]
        for bucket in call.buckets:
            specs = [(spec.dtype.name, str(spec.shape)) for spec in bucket.specs]
            self._called.append((bucket.wire, bool(bucket.when), specs))
        sizes = [one.size_bytes(len(self._towers)) for bucket in call.buckets for one in bucket.exchanges]
        wire = call.buckets[0].wire
        details: dict[str, Any] = {"bucket": ", ".join(called), "tensors": len(sizes)}
        if None not in sizes:  # else it is known only when it runs
            details["bytes"] = sum(sizes)
        kind = "gather" if wire.concatenates else wire.kind.replace("_", "-")
        name = called[0] if len(called) == 1 else f"{called[0]}-{called[-1]}"
        after = [one for each in call.done for one in each]
        return begin(self._meter, COMMUNICATION, f"{kind}/{name}", after, **details)


def _described(rows: np.ndarray, *whole: np.ndarray) -> str:
    """Return what processes compare of a batch: its number of rows, and a digest, unless each reads its own rows."""
    return f"{rows} {digest_of_rows(whole).hex() if whole else ''}"


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
        elif _is_one_group(bucket):
            key = "one group"
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _is_one_group(bucket: Bucket) -> bool:
    """Return whether a bucket goes into the unconditional group."""
    alone = bucket.join is not None or bucket.when is not None or bucket.wire.kind == CollectiveKind.BROADCAST
    return not alone and _collective(bucket, "") is not None


def _collective(bucket: Bucket, label: str) -> AnyCollective | None:
    """Return the communicator's collective for a bucket of one tensor; None if it has none for these rows."""
    wire, exchange = bucket.wire, bucket.exchanges[0]
    if wire.kind == CollectiveKind.BROADCAST:
        return Broadcast((), wire.root, label)
    if not wire.concatenates:
        kind = ReduceScatter if wire.kind == CollectiveKind.REDUCE_SCATTER else AllReduce
        return kind((), (), wire.op, label)
    # It gathers equally many rows of each tower: one, of a known size.
    same = wire.kind == CollectiveKind.STACK and wire.empty_too and exchange.shape[1:].is_fully_defined()
    return AllGather((), (), label) if same and exchange.dtype.name in native.DTYPES else None


def add_up(buckets: Sequence[Bucket], total: Sent, given: Sent) -> Sent:
    """Add the tensors `given` by a tower's next shard to the `total` so far; those that are not reduced replace it."""
    return [
        list(map(_COMBINE[bucket.wire.op], before, new)) if _adds_up(bucket) else new
        for bucket, before, new in zip(buckets, total, given, strict=True)
    ]


def _adds_up(bucket: Bucket) -> bool:
    """Return whether a tower may add up its shards' tensors of a bucket, before the towers meet."""
    return not bucket.wire.concatenates and bucket.wire.kind != CollectiveKind.BROADCAST and bucket.when is None


def _sums_of_towers(values: Sequence[tf.Tensor], layout: Layout) -> list[tf.Tensor]:
    """Return [n] the total of each tower's shards, given [s] the results of `add_up`."""
    return [values[own[-1]] for own in layout.places]


def _nodes_of_towers(values: Sequence[tf.Tensor], op: str, layout: Layout) -> list[dict[Node, tf.Tensor]]:
    """Reduce each tower's shards, given [s] values, as far as the tree does; return [n] the nodes of each."""
    nodes = []
    for device, own in zip(layout.devices, layout.places, strict=True):
        with tf.device(f"/{device}"):
            nodes.append(reduce_nodes(_COMBINE[op], len(values), own[0], [values[shard] for shard in own]))
    return nodes


def _stacked_nodes(values: Sequence[tf.Tensor], op: str, layout: Layout) -> list[tf.Tensor]:
    """Return [n] tensors [m, ...]: the results of `_nodes_of_towers`, with zeros up to m nodes each."""
    each = [list(nodes.values()) for nodes in _nodes_of_towers(values, op, layout)]
    most = max(map(len, each))
    stacked = []
    for device, nodes in zip(layout.devices, each, strict=True):
        with tf.device(f"/{device}"):
            stacked.append(tf.stack(nodes + [tf.zeros_like(nodes[0])] * (most - len(nodes))))
    return stacked


def _total_of_gathered(gathered: tf.Tensor, op: str, layout: Layout, tower: int) -> tf.Tensor:
    """Reduce, on a tower's device, the results of `_stacked_nodes`, gathered: [n * m, ...]."""
    shards = layout.shards
    each = [nodes_within(shards, own[0], own[-1] + 1) for own in layout.places]
    most = max(map(len, each))
    with tf.device(f"/{layout.devices[tower]}"):
        values = {node: gathered[most * place + i] for place, nodes in enumerate(each) for i, node in enumerate(nodes)}
        return reduce_tree(_COMBINE[op], shards, values)


def _join_shard_tensors(bucket: Bucket, values: Sequence[tf.Tensor], layout: Layout) -> list[tf.Tensor]:
    """Join one tensor of each shard, [s] in, [s] out, by TensorFlow's ops, once for all towers of a device.

    All towers are in this process.
    """
    wire, shards = bucket.wire, len(values)
    if wire.kind == CollectiveKind.BROADCAST:
        return [values[wire.root]] * shards
    nodes: dict[Node, tf.Tensor] = {}
    leaves = shards
    if layout.adds_up and _adds_up(bucket):
        leaves = len(layout.devices)
        nodes = {Node(0, tower): value for tower, value in enumerate(_sums_of_towers(values, layout))}
    elif not wire.concatenates:
        for of_tower in _nodes_of_towers(values, wire.op, layout):
            nodes |= of_tower
    received: dict[str, tf.Tensor] = {}
    for device in layout.devices:
        if device not in received:
            with tf.device(f"/{device}"):
                if wire.concatenates:
                    received[device] = tf.concat(values, 0)
                else:
                    received[device] = reduce_tree(_COMBINE[wire.op], leaves, nodes)
    return [received[device] for device in layout.shard_devices]
