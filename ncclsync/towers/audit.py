"""Find a GPU that computes wrong numbers: others compute its shard once more, and what they send is compared.

A wrong number that a tower computes enters the sum of gradients, and all towers then hold the same wrong weights: who
compares weights sees nothing. Here towers compute, besides their own shard, those of their neighbours, up to the last
exchange of the step. What they read and write on their way, but for weights that nobody writes before, are copies of
their own, so that nothing of the step is different.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.errors import AuditError
from ncclsync.program.program import Exchange, Program, Segment
from ncclsync.semantics.roles import Role, role_of
from ncclsync.towers.state import TowerState

_MOST_COMPUTED = 3  # times, each shard: of two that differ nobody knows which is right
_EQUAL = -1


@dataclasses.dataclass(frozen=True)
class _Place:
    """Say who computes a shard again: tower `tower` that of tower `shard`."""

    shard: int
    tower: int


class Audit:
    """Hold what a program's audited steps need between them: copies of variables, and what was found."""

    def __init__(self, program: Program, towers: TowerState) -> None:
        """Make the copies.

        Args:
            program: whose variables have copies on the towers.
            towers: two at least in this process, each with a shard.
        """
        count = len(towers.devices)
        self._program, self._towers = program, towers
        self._segments = program.segments[:-1]
        self._times = min(_MOST_COMPUTED, count)
        self.places = [_Place(shard, (shard + i) % count) for shard in range(count) for i in range(1, self._times)]
        self._pairs = list(itertools.combinations(range(self._times), 2))
        used = {name for segment in self._segments for name in segment.sources}
        written = {name for segment in self._segments for name in segment.written}
        self._copied = [
            (name, towers.copies(variable))
            for name, variable in program.variables
            if name in written or (name in used and role_of(variable, towers.batch_invariant_random) is not Role.SAME)
        ]
        self._kept = [{name: self._copy(each, place) for name, each in self._copied} for place in self.places]
        exchanges = [list(_sent(segment)) for segment in self._segments]
        self._sent = [one for each in exchanges for one in each]
        with tf.device("/CPU:0"):
            # By tensor that is sent, shard and pair of those who compute it: the first element that differs.
            shape = [len(self._sent), count, len(self._pairs)]
            self._found = tf.Variable(tf.fill(shape, tf.constant(_EQUAL, tf.int64)), trainable=False)

    def _copy(self, each: Sequence[tf.Variable], place: _Place) -> tf.Variable:
        with tf.device(each[place.tower].device):
            like = each[place.shard]  # whose value a step takes: to read it here would add up towers' parts
            return tf.Variable(tf.zeros(like.shape, like.dtype), trainable=False)

    def begin(self, values: Sequence[Mapping[str, tf.Tensor]]) -> "Repeats":
        """Begin an audited step in its graph.

        Args:
            values: [n] by name in the program, each tower's tensors and handles.
        """
        again: list[dict[str, tf.Tensor]] = []
        begun = []
        copied = dict(self._copied)
        for place, kept in zip(self.places, self._kept, strict=True):
            handles = {name: values[place.tower][name] for name, _ in self._program.variables}
            again.append({**values[place.shard], **handles, **{name: one.handle for name, one in kept.items()}})
            for name, variable in kept.items():
                source = copied[name][place.shard]
                with tf.device(source.device):
                    value = tf.raw_ops.ReadVariableOp(resource=source.handle, dtype=source.dtype)
                with tf.device(variable.device):
                    begun.append(tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value))
        return Repeats(self, again, [op for op in begun if op is not None])

    def compare(self, sent: Sequence[Sequence[Sequence[tf.Tensor]]]) -> tf.Tensor:
        """Compare, in a graph, what a shard's computations send: [n][times] lists of K tensors; [K, n, pairs]."""
        rows = []
        for column in zip(*(zip(*times, strict=True) for times in sent), strict=True):  # [n] of [times] tensors
            rows.append([[first_difference(times[a], times[b]) for a, b in self._pairs] for times in column])
        return tf.stack([tf.stack([tf.stack(pairs) for pairs in row]) for row in rows])

    def keep(self, found: Sequence[tf.Tensor]) -> tf.Operation:
        """Keep what one step's comparisons have found, in its graph, besides that of steps before in the same call."""
        found = tf.concat(found, 0)
        before = tf.raw_ops.ReadVariableOp(resource=self._found.handle, dtype=tf.int64)
        return tf.raw_ops.AssignVariableOp(resource=self._found.handle, value=tf.maximum(before, found))

    def check(self, step: int) -> None:
        """Raise what the steps of the last call have found, and forget it.

        Args:
            step: how many training steps have been made, for the message.

        Raises:
            AuditError: computations of a shard differ.
        """
        found = self._found.numpy()
        if (found == _EQUAL).all():
            return
        self._found.assign(np.full_like(found, _EQUAL))
        culprits: set[int] = set()
        pairs: set[tuple[int, int]] = set()
        names: dict[str, None] = {}
        ranks = self._towers.places.ranks
        for k, shard in np.argwhere((found != _EQUAL).any(axis=2)):
            by = [ranks[(shard + i) % len(ranks)] for i in range(self._times)]
            differ = [pair for pair, first in zip(self._pairs, found[k, shard], strict=True) if first != _EQUAL]
            pairs.update((min(by[a], by[b]), max(by[a], by[b])) for a, b in differ)
            if self._times == _MOST_COMPUTED and len(differ) == 2:  # the third pair is equal
                culprits.update(by[one] for one in set(differ[0]) & set(differ[1]))
            names.update(dict.fromkeys(self._name(self._sent[k], int(found[k, shard].max()))))
        devices = {rank: self._towers.devices[i] for i, rank in enumerate(ranks)}
        raise AuditError(step, sorted(pairs), sorted(culprits), list(names), devices)

    def _name(self, exchanges: Sequence[Exchange], element: int) -> list[str]:
        """Return what messages call an element of what is sent."""
        end = 0
        for exchange in exchanges:
            end += exchange.shape.num_elements() or 0
            if len(exchanges) == 1 or element < end:
                break
        handles = dict(self._program.variables)
        variables = [handles[name] for name, result in self._program.updates if result == exchange.result]
        words = ["the gradient of" if variable.trainable else "the update of" for variable in variables]
        names = map(" ".join, zip(words, self._towers.names_of(variables), strict=True))
        return list(names) or [f"what {exchange.line} sends"]


class Repeats:
    """Compute shards again in the graph of one step.

    Attributes:
        begun: ops that the step waits for before it begins.
    """

    def __init__(self, audit: Audit, values: list[dict[str, tf.Tensor]], begun: list[tf.Operation]) -> None:
        self._audit, self._values, self.begun = audit, values, begun
        self._found: list[tf.Tensor] = []

    def compute(
        self, segment: Segment, arguments: Sequence[Sequence[Any]], sent: Sequence[Sequence[tf.Tensor]], towers: Any
    ) -> None:
        """Compute a segment again, and compare.

        Args:
            segment: of the program, not the last.
            arguments: [n] what each tower's call has got, after its sources.
            sent: [n] what it sends, flat.
            towers: [n] (device, ops to wait for, list of ops that is told what to wait for).
        """
        each = [[tensors] for tensors in sent]
        for place, values in zip(self._audit.places, self._values, strict=True):
            device, before, ends = towers[place.tower]
            sources = [values[name] for name in segment.sources]
            # One call of a function after another on a device: on GPUs they meet the host under the same names.
            with tf.device(f"/{device}"), tf.control_dependencies([*before, *ends]):
                outcome = segment.function(*sources, *arguments[place.shard])
            values.update(zip(segment.fetches, outcome, strict=False))
            each[place.shard].append(outcome[len(segment.fetches) : -1])
            ends.append(outcome[-1])
        if sent[0]:
            self._found.append(self._audit.compare(each))

    def end(self) -> list[tf.Operation]:
        """Return ops behind which what was found is kept."""
        return [self._audit.keep(self._found)] if self._found else []


def _sent(segment: Segment) -> Iterator[Sequence[Exchange]]:
    """Yield the exchanges of each tensor that a segment sends."""
    for bucket in segment.outgoing:
        if bucket.packed:
            yield bucket.exchanges
        else:
            yield from ([exchange] for exchange in bucket.exchanges)


def _bits(value: tf.Tensor) -> tf.Tensor:
    """Return the bytes of each element of a vector: [elements, bytes]."""
    bits = tf.bitcast(value, tf.uint8)
    return tf.reshape(bits, [tf.size(value), value.dtype.size])


def first_difference(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the first element whose bits differ, in the order of memory; -1 if none does. In the host's memory."""
    with tf.device("/CPU:0"):
        one, other = tf.reshape(one, [-1]), tf.reshape(other, [-1])
        both = tf.minimum(tf.size(one), tf.size(other))  # rows that are sent may be as many as were computed
        is_longer = tf.size(one) != tf.size(other)
        one, other = one[:both], other[:both]
        if one.dtype == tf.string or one.dtype == tf.bool:
            differ = tf.not_equal(one, other)
        else:
            differ = tf.reduce_any(tf.not_equal(_bits(one), _bits(other)), axis=1)
        places = tf.cast(tf.where(differ)[:, 0], tf.int64)
        last = tf.where(is_longer, tf.cast(both, tf.int64), tf.constant(_EQUAL, tf.int64))
        return tf.concat([places, [last]], 0)[0]
