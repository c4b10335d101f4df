"""Find a GPU that computes wrong numbers: other GPUs compute its shards once more, and the sent tensors are compared.

A wrong number that a tower computes enters the sum of gradients, and all towers then hold the same wrong weights:
comparing weights finds nothing. Here towers also compute their neighbours' shards, up to the last exchange of the step.
These repeats read and write copies of their own, except weights that nothing has written before. So the step's results
are unchanged.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import TensorName
from ncclsync.errors import AuditError
from ncclsync.ops.comparing import EQUAL, first_difference
from ncclsync.program.program import Exchange, Outcome, Program, Segment, Sent
from ncclsync.sharding.roles import Role
from ncclsync.towers.state import TowerState

_MOST_COMPUTED = 3  # times that a shard is computed: of two results that differ, nobody knows which is wrong


class SegmentCall(NamedTuple):
    """Hold what one call of a segment has received and what it sends."""

    incoming: Sent
    sent: Sent


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """A repeated computation: tower `tower` computes the shard in place `shard`, which is tower `owner`'s."""

    shard: int
    owner: int
    tower: int


class Audit:
    """Compute shards again in the graph of a step; between steps, hold copies of variables, and what was found."""

    def __init__(self, program: Program, towers: TowerState) -> None:
        """Make copies of the program's variables; of `towers`, two at least are in this process."""
        count, owned = len(towers.layout.devices), towers.layout.places
        self._program, self._towers = program, towers
        self._segments = program.segments[: program.last_meeting]
        self._times = min(_MOST_COMPUTED, count)
        self.repeats = [
            _Repeat(shard, owner, (owner + i) % count)
            for owner, own in enumerate(owned)
            for shard in own
            for i in range(1, self._times)
        ]
        self._owners = towers.layout.tower_places
        self._first = [own[0] for own in owned]  # [n] a place in `values` with the tower's handles
        self._pairs = list(itertools.combinations(range(self._times), 2))
        self._left_out = self._find_left_out()
        computed = [one for number, one in enumerate(self._segments, start=1) if number not in self._left_out]
        used = {name for segment in computed for name in segment.sources}
        written = {name for segment in computed for name in segment.written}
        # (source, copy), by the source's id and the tower: what a tower's shards share, their repeats share, too.
        self._copies: dict[tuple[int, int], tuple[tf.Variable, tf.Variable]] = {}
        self._kept: list[dict[TensorName, tf.Variable]] = [{} for _ in self.repeats]  # their copies, by name
        for name, variable in program.variables:
            shared = towers.replicas.role_of(variable) is Role.SAME
            if name in written or (name in used and not shared):
                each = towers.replicas.of_shards(variable)
                for repeat, kept in zip(self.repeats, self._kept, strict=True):
                    device = each[self._first[repeat.tower]].device
                    kept[name] = self._copy(each[repeat.shard], device, repeat.tower)
        self._sent = [one for segment in computed for one in _sent(segment)]
        with tf.device("/CPU:0"):
            # The first element that differs, by sent tensor, shard, and pair of computations.
            shape = [len(self._sent), len(self._owners), len(self._pairs)]
            self._found = tf.Variable(tf.fill(shape, tf.constant(EQUAL, tf.int64)), trainable=False)

    def _find_left_out(self) -> set[int]:
        """Return the numbers, from 1, of segments that must not run again, or that read what these write; warn once.

        Repeats take the results of these segments as they are.
        """
        found: set[int] = set()
        written: set[TensorName] = set()
        for number, segment in enumerate(self._segments, start=1):
            if segment.unrepeatable or written.intersection(segment.sources):
                found.add(number)
                written.update(segment.written)
        if found:
            lines = dict.fromkeys(segment.unrepeatable for segment in self._segments if segment.unrepeatable)
            sent = [len(list(_sent(segment))) for segment in self._segments]
            left = sum(count for number, count in enumerate(sent, start=1) if number not in found)
            self._towers.session.warn_once(
                "audit_every leaves out what is computed together with an op that must run once: "
                f"{' and '.join([*lines][:3])}. Of the {sum(sent)} tensors that a tower sends, {left} are audited. "
                "Move that op out of the step, and all are"
            )
        return found

    def _copy(self, source: tf.Variable, device: str, tower: int) -> tf.Variable:
        key = id(source), tower
        if key not in self._copies:
            (value,) = tf_compat.read_variables([source])  # untracked: another read would add up towers' parts
            with tf.device(device):  # `begin` copies the value
                copy = tf.Variable(tf.zeros_like(value), trainable=False, shape=source.shape)
            self._copies[key] = source, copy
        return self._copies[key][1]

    def begin(self, values: Sequence[Mapping[TensorName, tf.Tensor]]) -> list[tf.Operation]:
        """Begin an audited step in its graph; return the ops that it waits for.

        Args:
            values: [s] by name in the program, each shard's tensors and handles.
        """
        self._originals = values
        self._again: list[dict[TensorName, tf.Tensor]] = []  # [repeats] by name, too
        self._differences: list[tf.Tensor] = []
        begun = []
        for repeat, kept in zip(self.repeats, self._kept, strict=True):
            handles = {name: values[self._first[repeat.tower]][name] for name, _ in self._program.variables}
            self._again.append(
                {**values[repeat.shard], **handles, **{name: tf_compat.handle_of(one) for name, one in kept.items()}}
            )
        for source, copy in self._copies.values():
            with tf.device(source.device):
                value = tf.raw_ops.ReadVariableOp(resource=tf_compat.handle_of(source), dtype=source.dtype)
            with tf.device(copy.device):
                begun.append(tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(copy), value=value))
        return [op for op in begun if op is not None]

    def compute(self, number: int, segment: Segment, calls: Sequence[SegmentCall], towers: Sequence[Any]) -> None:
        """Compute a segment again, and compare.

        Args:
            number: of the segment, from 1.
            segment: of the program, not the last.
            calls: [s] of it, or [n] if it runs once.
            towers: [n] (device, ops to wait for, list to which this segment's ops are added).
        """
        if number in self._left_out:
            for repeat, values in zip(self.repeats, self._again, strict=True):
                values.update({name: self._originals[repeat.shard][name] for name in segment.fetches})
            return
        each = [[call.sent] for call in calls]
        outcomes: dict[tuple[int, int], Outcome] = {}
        for repeat, values in zip(self.repeats, self._again, strict=True):
            call = repeat.owner if segment.once else repeat.shard
            if (call, repeat.tower) not in outcomes:
                device, before, ends = towers[repeat.tower]
                # One call of a function after another on a device: on GPUs they meet the host under the same names.
                with tf.device(f"/{device}"), tf.control_dependencies([*before, *ends]):
                    outcome = outcomes[call, repeat.tower] = segment.run(values, calls[call].incoming)
                each[call].append(outcome.sent)
                ends.append(outcome.token)
            values.update(outcomes[call, repeat.tower].fetched)
        if segment.outgoing:
            self._differences.append(self._compared([[list(itertools.chain(*sent)) for sent in one] for one in each]))

    def end(self) -> list[tf.Operation]:
        """Return the ops that keep what was found, in this step and in the steps before it of the same call."""
        if not self._differences:
            return []
        found = tf.concat(self._differences, 0)
        before = tf.raw_ops.ReadVariableOp(resource=tf_compat.handle_of(self._found), dtype=tf.int64)
        return [tf.raw_ops.AssignVariableOp(resource=tf_compat.handle_of(self._found), value=tf.maximum(before, found))]

    def _compared(self, sent: Sequence[Sequence[Sequence[tf.Tensor]]]) -> tf.Tensor:
        """Compare, in a graph, what a shard's computations send: given [s][times] lists of K tensors, [K, s, pairs].

        Of a segment that runs once for a tower's shards, [n][times] lists are given.
        """
        rows = []
        for column in zip(*(zip(*times, strict=True) for times in sent), strict=True):  # [s] of [times] tensors
            rows.append([[first_difference(times[a], times[b]) for a, b in self._pairs] for times in column])
        found = tf.stack([tf.stack([tf.stack(pairs) for pairs in row]) for row in rows])
        return found if len(sent) == len(self._owners) else tf.gather(found, self._owners, axis=1)

    def check(self, step: int) -> None:
        """Raise an AuditError if a shard's computations differ in the last call, which ended with `step`."""
        found = self._found.numpy()
        if (found == EQUAL).all():
            return
        self._found.assign(np.full_like(found, EQUAL))
        culprits: set[int] = set()
        pairs: set[tuple[int, int]] = set()
        names: dict[str, None] = {}
        ranks = self._towers.layout.ranks
        for k, shard in np.argwhere((found != EQUAL).any(axis=2)):
            by = [ranks[(self._owners[shard] + i) % len(ranks)] for i in range(self._times)]
            differ = [pair for pair, first in zip(self._pairs, found[k, shard], strict=True) if first != EQUAL]
            pairs.update((min(by[a], by[b]), max(by[a], by[b])) for a, b in differ)
            if self._times == _MOST_COMPUTED and len(differ) == 2:  # the third pair is equal
                culprits.update(by[one] for one in set(differ[0]) & set(differ[1]))
            names.update(dict.fromkeys(self._name(self._sent[k], int(found[k, shard].max()))))
        devices = {rank: self._towers.layout.devices[i] for i, rank in enumerate(ranks)}
        raise AuditError(step, tuple(sorted(pairs)), tuple(sorted(culprits)), tuple(names), devices)

    def _name(self, exchanges: Sequence[Exchange], element: int) -> list[str]:
        """Return the name of a sent element in messages."""
        end = 0
        for exchange in exchanges:
            end += exchange.shape.num_elements() or 0
            if len(exchanges) == 1 or element < end:
                break
        handles = dict(self._program.variables)
        variables = [handles[name] for name, result in self._program.updates if result == exchange.result]
        words = ["the gradient of" if variable.trainable else "the update of" for variable in variables]
        names = map(" ".join, zip(words, self._towers.session.names_of(variables), strict=True))
        return list(names) or [f"what {exchange.line} sends"]


def _sent(segment: Segment) -> Iterator[Sequence[Exchange]]:
    """Yield the exchanges of each tensor that a segment sends."""
    for bucket in segment.outgoing:
        yield from [bucket.exchanges] if bucket.packed else ([exchange] for exchange in bucket.exchanges)
