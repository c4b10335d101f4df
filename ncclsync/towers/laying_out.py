"""Lay a program out on every tower: the body of the one graph that is a step.

Called while a graph is built; or outside a graph, to run the same parts one after another. `program.py` says what is
laid out, `state.py` where, `exchange.py` how towers meet.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import TensorName
from ncclsync.ops import held
from ncclsync.ops.group_ops import gather_rows
from ncclsync.ops.spans import STEP, STEPS, Meter, begin
from ncclsync.program.program import Program, Results, Segment, Sent
from ncclsync.program.trace import Site
from ncclsync.sharding.shards import Shards, components_of
from ncclsync.towers.audit import Audit, SegmentCall
from ncclsync.towers.exchange import After, Exchanges, add_up
from ncclsync.towers.feeding import split_batch
from ncclsync.towers.recovery import Rollback
from ncclsync.towers.state import TowerState


@tf_compat.calling_segments()
def lay_out(
    program: Program,
    towers: TowerState,
    batch: Any,
    rollback: Rollback,
    meter: Meter | None = None,
    audit: Audit | None = None,
) -> Any:
    """Run `program` on all towers, in the graph that is being built if there is one.

    Args:
        program: a traced step, cut.
        towers: n of them are this process', with s shards; copies of the program's variables are made as needed.
        batch: to be split; or its `Shards`, on the towers' devices.
        rollback: made for the same program.
        meter: records when the parts of a watched step begin and end.
        audit: of an audited step.

    Returns:
        The step's results, combined as the program says. They depend on every side effect of every tower.
    """
    if isinstance(batch, Shards):
        step, shards = begin(meter, STEPS, STEP), batch
    else:
        step = begin(meter, STEPS, STEP, components_of(batch))
        shards = split_batch(batch, towers.layout, meter, step.ops)
        if towers.communicator.compares_batches:
            shards = dataclasses.replace(shards, whole=components_of(batch))
    run = _Run(program, towers, shards, meter, audit)
    after = [[*step.ops, *each] for each in run.begin(rollback)]
    for number, segment in enumerate(program.segments, start=1):
        sent, done = run.compute(number, segment, after)
        if program.last_meeting < number < len(program.segments):
            after = done
        else:  # wait for this segment on every tower, so that an error anywhere stops all towers
            after = run.exchanges.join(number, segment.outgoing, sent, done, run.values[0])
    done = run.leave(run.apply(rollback, run.exchanges.agree(after, ends=True)))
    recorded = run.recorded
    ends = [*recorded, *step.end([done, *recorded], samples=shards.shares[0].total)]
    with tf.control_dependencies([done, *ends]):
        return run.results()


class _Run:
    """Hold the state that the parts of one laid out step share."""

    def __init__(
        self, program: Program, towers: TowerState, shards: Shards, meter: Meter | None, audit: Audit | None
    ) -> None:
        self._program, self._towers, self._shards, self._meter = program, towers, shards, meter
        self.exchanges = Exchanges(towers, shards, meter, keeps_sent=audit is not None)
        with tf.device("/CPU:0"):
            # From sizes, which lie in the host's memory, as fractions may not. A batch without rows is tower 0's.
            samples = [shards.sizes[0] + tf.cast(shards.shares[0].total == 0, tf.int32), *shards.sizes[1:]]
            has_samples = [tf.minimum(count, 1) for count in samples]
        handles = {name: towers.replicas.of_shards(variable) for name, variable in program.variables}
        self.values: list[dict[TensorName, tf.Tensor]] = []  # [s] each shard's tensors and handles, by name
        layout = towers.layout
        for i, (shard, tower) in enumerate(zip(layout.own_shards, layout.tower_places, strict=True)):
            with tf.device(f"/{layout.devices[tower]}"):
                site = Site(has_samples[shard], tf.constant(i == 0), tf.constant(layout.ranks[tower]))
            arguments = [*components_of(shards.batches[i]), *shards.shares[shard], *site]
            values = dict(zip(program.arguments, arguments, strict=True)) | dict(program.captures)
            self.values.append(values | {name: tf_compat.handle_of(copies[i]) for name, copies in handles.items()})
        self._audit = audit
        by_name, segments = dict(program.variables), program.segments
        self._sliced = {id(by_name[name]) for segment in segments for name in segment.sliced}
        self._let_go = self._sliced | {id(by_name[name]) for segment in segments for name in segment.written}

    @property
    def recorded(self) -> list[tf.Operation]:
        """Return ops that nothing of the step waits for: timestamps, and those by which an audit keeps its findings."""
        kept = [] if self._audit is None else self._audit.end()
        return [*self.exchanges.recorded, *kept]

    def begin(self, rollback: Rollback) -> After:
        """Check the batch and save the state for a rollback; return what every tower waits for."""
        checks = _checked_rows(self._program, self._shards)
        # An iterator without a batch ends the graph before anything has begun. Then the saved state says that the step
        # is under way, with this batch.
        found, elsewhere = self._compare(components_of(self._shards.batches[0]), begins=True)
        checks += elsewhere
        with tf.control_dependencies([*components_of(self._shards.batches[0]), *found]):
            saved = [*rollback.begin(), *found]
        if self._audit is not None:
            with tf.control_dependencies(saved):  # they empty the sums that another process than 0 holds
                saved = [*saved, *self._audit.begin(self.values)]
        others: After = [[] for _ in self._towers.layout.devices[1:]]
        if not checks and not saved:
            return [[], *others]
        return self.exchanges.meet([saved, *others], checks)

    def compute(self, number: int, segment: Segment, after: After) -> tuple[list[Sent], After]:
        """Run a segment, of this number from 1, on every tower; `after`: [n] what each waits for.

        Returns:
            [s] what each shard sends; if a tower adds up its shards, the sum up to this shard. And [n] the ops and
            tensors by which the segment ends on each tower.
        """
        # With `emergency_checkpoint` the host waits for the sums before every write. A step may write several times: a
        # sharded optimizer first its state, then the weights; a GAN once for each optimizer.
        waits = self._towers.session.model.save is not None and bool(segment.written)
        if self._towers.layout.meets_processes and segment.written:
            after = self.exchanges.agree(after)
        if number == self._program.last_meeting + 1:
            after = self.exchanges.wait_for_all(after, waits=waits)
        sent: list[Sent] = []
        calls: list[SegmentCall] = []
        done: After = []
        layout = self._towers.layout
        for rank, device, own, waited in zip(layout.ranks, layout.devices, layout.places, after, strict=True):
            ends: list[Any] = []
            tokens: list[Any] = []
            for place in own[:1] if segment.once else own:
                # One after another: of earlier shards only the results take memory meanwhile.
                before = [*waited, *tokens]
                incoming = self.exchanges.take(place, segment.incoming, before, waits=waits)
                given = itertools.chain(*incoming) if number > 1 else components_of(self._shards.batches[place])
                met: dict[str, Any] = {}
                if number <= self._program.last_meeting + 1:
                    met["meets"] = bool(segment.incoming)
                span = begin(self._meter, rank, segment_name(self._program, number), [*before, *given], **met)
                with tf.device(f"/{device}"), tf.control_dependencies([*before, *span.ops]):
                    outcome = segment.run(self.values[place], incoming)
                for one in own if segment.once else [place]:
                    self.values[one].update(outcome.fetched)
                calls.append(SegmentCall(incoming, outcome.sent))
                tokens, sends = [outcome.token], outcome.sent
                if layout.adds_up:
                    with tf.device(f"/{device}"):
                        sends = sends if place == own[0] else add_up(segment.outgoing, sent[-1], sends)
                    tokens += itertools.chain(*sends)  # the next shard waits for the sum
                sent.append(sends)
                ends += [*span.end(tokens=[outcome.token]), outcome.token]
            done.append(ends)
        if self._audit is not None and number <= self._program.last_meeting:
            self._audit.compute(number, segment, calls, list(zip(layout.devices, after, done, strict=True)))
        return sent, done

    def apply(self, rollback: Rollback, after: After) -> tf.Operation:
        """Let the step be complete, or undone if a gradient is not finite."""
        values, ended = self.values[0], list(after[0])
        if self._program.noise is not None:
            ended.append(self._towers.watch.noise.update(values[self._program.noise]))
        finite = None if self._program.finite is None else values[self._program.finite]
        with tf.device(f"/{self._towers.layout.devices[0]}"):
            return rollback.end(tf.group(*ended), finite, self._shards.sizes)

    def leave(self, done: tf.Operation) -> tf.Operation:
        """Hold what the step has left in tower 0's variables; see `Replicas.left`."""
        if not self._let_go:
            return done
        found, elsewhere = self._compare([done], begins=False)
        return tf.group(done, *found, *elsewhere)

    def _compare(self, after: Sequence[Any], *, begins: bool) -> tuple[list[tf.Operation], list[tf.Operation]]:
        """Compare tower 0's variables with what is held of them, after ops on its device; see `held.compare`.

        Returns:
            The ops on tower 0's device; and those elsewhere: between devices only the host's ops wait for each other.
        """
        ops: tuple[list[tf.Operation], list[tf.Operation]] = [], []
        if tf.executing_eagerly():
            return ops
        replicas, home = self._towers.replicas, self._towers.layout.devices[0]
        for device, pairs in replicas.watched([one for _, one in self._program.variables]).items():
            variables, slots = zip(*pairs, strict=True)
            writes = [id(variable) in self._let_go for variable in variables]
            is_home = device.endswith(home) or not self._towers.layout.on_gpus
            waits = after if is_home else [] if begins else self.exchanges.turns.last or after
            with tf.control_dependencies(waits):
                # A variable of which slices were written or read gives its readers copies, unless it is told otherwise.
                sliced = () if begins else [one for one in variables if id(one) in self._sliced]
                shares = [tf.raw_ops.DisableCopyOnRead(resource=tf_compat.handle_of(one)) for one in sliced]
            with tf.control_dependencies([*waits, *shares]):
                made = held.compare(replicas.left, variables, slots, writes, begins=begins)
            ops[not is_home].append(made)
        return ops

    def results(self) -> Any:
        """Return the results of the step, as `Program.outputs` and `Program.results` say."""
        program, outputs = self._program, iter(self._program.outputs)
        each: list[list[Any]] = []  # [results][s]
        combined: list[Any] = []  # [results]
        for leaf in tf.nest.flatten(program.structure):
            parts = [next(outputs) for _ in components_of(leaf)]
            if not parts:
                each.append([None] * len(self.values))
                combined.append(None)
                continue
            columns = [[tf.identity(tower[name]) for tower in self.values] for name, _ in parts]
            joins = [by_rows for _, by_rows in parts]
            joined = [self._joined(*one) for one in zip(columns, joins, strict=True)]
            *made, whole = (
                tf.nest.pack_sequence_as(leaf, one, expand_composites=True)
                for one in (*zip(*columns, strict=True), joined)
            )
            each.append(made)
            combined.append(whole)
        if program.results is Results.EACH:
            shards = range(len(self.values))
            return [tf.nest.pack_sequence_as(program.structure, [one[i] for one in each]) for i in shards]
        return tf.nest.pack_sequence_as(program.structure, combined)

    def _joined(self, pieces: Sequence[tf.Tensor], by_rows: bool) -> tf.Tensor:
        """Return one device's result, or a part of it, given [s] results of this process' shards."""
        layout = self._towers.layout
        if not by_rows or layout.shards == 1:
            return pieces[0]
        sizes = [self._shards.sizes[shard] for shard in layout.own_shards]
        if len(pieces) == layout.shards:
            return _concat_rows(pieces, sizes)
        kept = []
        for device, piece, size in zip(layout.devices, pieces, sizes, strict=True):
            with tf.device(f"/{device}"):
                kept.append(_concat_rows([piece], [size]))
        return gather_rows(kept, self._towers.communicator, "results", self.exchanges.turns)[0]


def _checked_rows(program: Program, shards: Shards) -> list[Any]:
    """Check that the batch has as many rows as each state or constant of the step that is divided like the batch."""
    total = shards.shares[0].total
    if len(shards.shares) == 1:
        return []
    with tf.device("/CPU:0"):
        checks = [
            tf.debugging.Assert(
                tf.logical_or(tf.equal(total, rows), tf.equal(total, 1)),  # one row is broadcast
                [
                    f"{tf_compat.OWN_WORDS}Expected a batch of {rows} rows: {what} fixes them in this step. "
                    "batch_size counts the rows of all towers together, as in MirroredStrategy's fit; a script for "
                    "Horovod gives those of one process. Received:",
                    total,
                ],
            )
            for rows, what in program.declared
        ]
    return [check for check in checks if check is not None]


def segment_name(program: Program, number: int) -> str:
    """Return a segment's name in a timeline; "apply" for the last ones, which write the weights."""
    part = number - program.last_meeting
    if number == 1 or part < 1:
        return f"segment_{number}"
    return "apply" if part == 1 else f"apply_{part}"


def _concat_rows(pieces: Sequence[tf.Tensor], sizes: Sequence[Any]) -> tf.Tensor:
    """Concatenate the towers' results of one row per sample, without the result of a stand-in row.

    Args:
        pieces: [N] tensors.
        sizes: [N] samples of each tower; where it is 0, the piece is left out.
    """
    kept = []
    for piece, size in zip(pieces, sizes, strict=True):
        rows = tf.shape(piece)[0]
        kept.append(piece[: tf.where(size > 0, rows, tf.zeros_like(rows))])
    return tf.concat(kept, 0)
