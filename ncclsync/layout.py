"""Lay a program out on every tower: the body of the one graph that is a step.

Reads as the data flow: shard, segment, all-reduce, segment, …, results. Called while a graph is built, or
outside one to run the same parts one after another. `program.py` says what is laid out, `towers.py` on what.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync import host_ops, native
from ncclsync.communicator import AllGather, AllReduce, ReduceScatter
from ncclsync.group_ops import Joining, group_all_reduce, group_broadcast, group_exchange
from ncclsync.ops import Collective
from ncclsync.program import Bucket, Program, Results, Segment
from ncclsync.shard import Shards
from ncclsync.towers import TowerState
from ncclsync.variables import Role, role_of


class KeptBatch:
    """The batch of the step that runs, to be run again if that step fails without saying why.

    It shares the batch's memory. Why: an error on one tower cancels the others, and TensorFlow may report
    the cancellation instead of the error. Run again outside a graph, tower by tower, there is but the error.
    """

    def __init__(self, specs: Any) -> None:
        """Prepare for batches of these `tf.TypeSpec`s."""
        self._specs = specs
        with tf.device("/CPU:0"):
            self._leaves = [
                tf.Variable(tf.zeros([0], leaf.dtype), shape=tf.TensorShape(None), trainable=False)
                if leaf.dtype != tf.string
                else tf.Variable([""], shape=tf.TensorShape(None), trainable=False)
                for leaf in _components(specs)
            ]

    def keep(self, batch: Any) -> Any:
        """Keep a batch, in the graph of the step; return it for the step to use."""
        leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
        kept = [variable.assign(leaf) for variable, leaf in zip(self._leaves, leaves, strict=True)]
        with tf.control_dependencies(_ops(kept)):
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), batch, expand_composites=True
            )

    def batch(self) -> Any:
        """Return the last batch kept."""
        leaves = iter([variable.read_value() for variable in self._leaves])
        return tf.nest.map_structure(
            lambda spec: (
                None
                if spec is None
                else tf.nest.pack_sequence_as(
                    spec, [next(leaves) for _ in _components(spec)], expand_composites=True
                )
            ),
            self._specs,
        )


def _components(specs: Any) -> list[tf.TensorSpec]:
    return [spec for spec in tf.nest.flatten(specs, expand_composites=True) if spec is not None]


class Rollback:
    """What a step that writes weights on its way needs, so that an error on one tower undoes all of it.

    The saved values share memory with tower 0's variables until a step writes those.
    """

    def __init__(
        self, program: Program, towers: TowerState, tell: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """Prepare for a program.

        Args:
            program: what is run.
            towers: where.
            tell: is called with the values of `program.finite` if one is False, before the step is undone;
                what it raises fails the step. Needed if the program tells that.
        """
        variables = dict(program.variables)
        self._tell = tell
        with tf.device(f"/{towers.devices[0]}"):
            self._saved = [
                (group[0], tf.Variable(group[0].value(), trainable=False), group)
                for name in program.rollback
                for group in _restored(variables[name], towers)
            ]
            self._open = tf.Variable(False, trainable=False) if self._saved else None

    def begin(self) -> list[tf.Operation]:
        """Save, in the graph of the step; the step must wait for what is returned."""
        if self._open is None:
            return []
        saves = [saved.assign(variable.read_value()) for variable, saved, _ in self._saved]
        with tf.control_dependencies(_ops(saves)):
            return _ops([self._open.assign(True)])

    def end(self, done: tf.Operation, finite: tf.Tensor | None) -> tf.Operation:
        """Note, in the graph of the step, that it is complete, having undone it if not all is `finite`."""
        if finite is not None:
            with tf.control_dependencies([done]):
                done = tf.cond(
                    tf.reduce_all(finite), lambda: tf.constant(0.0), functools.partial(self._undo, finite)
                )
        if self._open is None:
            return done
        with tf.control_dependencies([done]):
            return tf.group(self._open.assign(False))

    def restore(self) -> None:
        """Undo a step that failed on its way; do nothing if it failed before it began."""
        if self._open is not None and self._open.numpy():
            for variable, saved, _ in self._saved:
                variable.assign(saved)
            self._open.assign(False)

    def _undo(self, finite: tf.Tensor) -> tf.Tensor:
        """In a branch of the graph of a step: give every tower what it had before the step."""
        with tf.device("/CPU:0"):
            told = tf.numpy_function(self._tell, [finite], [])
        writes = []
        with tf.control_dependencies([] if tf.executing_eagerly() else [told]):
            for _, saved, group in self._saved:
                for copy in group:
                    with tf.device(copy.device):
                        writes.append(
                            tf.raw_ops.AssignVariableOp(resource=copy.handle, value=saved.read_value())
                        )
        with tf.control_dependencies([] if tf.executing_eagerly() else writes):
            return tf.constant(0.0)


def _restored(variable: tf.Variable, towers: TowerState) -> list[list[tf.Variable]]:
    """What a failed step must be undone in, by what has one value: all towers', or each that holds its own.

    The first of a group is what is saved.
    """
    copies = towers.copies(variable)
    own = role_of(variable) in (Role.PARTIAL, Role.PARTITION)
    return [[copy] for copy in copies] if own else [copies]


def _ops(assigned: Sequence[Any]) -> list[tf.Operation]:
    """The ops to wait for; none outside a graph, where everything has happened already."""
    return [] if tf.executing_eagerly() else [variable.op for variable in assigned]


def lay_out(program: Program, towers: TowerState, shards: Shards, rollback: Rollback) -> Any:
    """Run `program` on all towers, in the graph that is being built if there is one.

    Args:
        program: a traced step, cut.
        towers: N towers; copies of the program's variables are made as needed.
        shards: the batch, split into N.
        rollback: made for the same program.

    Returns:
        The step's results as one tower's would be: its structure, tensors combined as the program says.
        They depend on every side effect of every tower.
    """
    count = len(towers)
    values = [_inputs(program, towers, shards, i) for i in range(count)]  # [N] {name: tensor}
    received: list[list[tf.Tensor]] = [[] for _ in range(count)]  # [N][B]
    before: list[Any] = rollback.begin()
    for segment in program.segments:
        sent, tokens = [], []
        for i, device in enumerate(towers.devices):
            with tf.device(f"/{device}"), tf.control_dependencies(before):
                outcome = _run_segment(segment, values[i], received[i], shards.shares[i].fraction, i)
            values[i].update(zip(segment.fetches, outcome, strict=False))
            sent.append(outcome[len(segment.fetches) : -1])
            tokens.append(outcome[-1])
        # Every tower's next segment waits for all of this one: an error anywhere stops all of them.
        before = [tf.group(*tokens)]
        received = _exchange(segment.outgoing, sent, values, shards, towers)
    finite = None if program.finite is None else values[0][program.finite]
    with tf.control_dependencies([rollback.end(before[0], finite)]):
        return _results(program, values, shards)


def _inputs(program: Program, towers: TowerState, shards: Shards, tower: int) -> dict[str, tf.Tensor]:
    leaves = tf.nest.flatten(shards.batches[tower], expand_composites=True)
    arguments = [leaf for leaf in leaves if leaf is not None] + [*shards.shares[tower]]
    values = dict(zip(program.arguments, arguments, strict=True))
    values.update(program.captures)
    values.update((name, towers.copies(variable)[tower].handle) for name, variable in program.variables)
    return values


def _run_segment(
    segment: Segment,
    values: dict[str, tf.Tensor],
    received: Sequence[tf.Tensor],
    fraction: tf.Tensor,
    tower: int,
) -> list[tf.Tensor]:
    sources = [values[name] for name in segment.sources]
    return segment.function(*sources, *received, fraction, tf.constant(tower == 0))


def _exchange(
    buckets: tuple[Bucket, ...],
    sent: list[list[tf.Tensor]],
    values: list[dict[str, tf.Tensor]],
    shards: Shards,
    towers: TowerState,
) -> list[list[tf.Tensor]]:
    """Join the towers' buckets; [N][B] in, [N][B] out. `values` are by tower, for conditions and weights."""
    count = len(towers)
    if count == 1:
        return sent
    received: list[list[Any]] = [[None] * len(buckets) for _ in range(count)]
    labels = [f"bucket {i + 1} of {len(buckets)}" for i in range(len(buckets))]
    for indices in together(buckets):
        chosen = [buckets[i] for i in indices]
        given = [[row[i] for i in indices] for row in sent]
        if chosen[0].on_host:
            weights = _weights(chosen[0], values, shards)
            join = functools.partial(_join_on_host, given, weights, chosen[0].wire)
        else:
            join = functools.partial(_join, chosen, given, towers, [labels[i] for i in indices])
        when = chosen[0].when
        joined = tf.cond(values[0][when], join, lambda g=given: g) if when else join()
        for row, tensors in zip(received, joined, strict=True):
            for i, tensor in zip(indices, tensors, strict=True):
                row[i] = tensor
    return received


def together(buckets: tuple[Bucket, ...]) -> list[list[int]]:
    """Return the indices of the buckets that one call joins.

    By the host's op all of one kind and weight; by the communicator all that its collectives can take, in one
    group, but for those with a condition.
    """
    joined: dict[Any, list[int]] = {}
    for i, bucket in enumerate(buckets):
        first = bucket.exchanges[0]
        key: Any = i
        if bucket.on_host:
            key = (bucket.wire, first.collective, first.dtype, first.when, first.scale)
        elif _is_grouped(bucket) and bucket.when is None:
            key = "one group"
        joined.setdefault(key, []).append(i)
    return list(joined.values())


def _is_grouped(bucket: Bucket) -> bool:
    """Whether a collective of the communicator's does what the bucket's wire says."""
    if bucket.wire.kind in ("all_reduce", "reduce_scatter"):
        return True
    # Rows are gathered so where all towers are known to send as many: one of each, and of one size.
    exchange = bucket.exchanges[0]
    same = bucket.wire.kind == "stack" and bucket.wire.empty_too and exchange.shape[1:].is_fully_defined()
    return same and exchange.dtype.name in native.DTYPES


def _weights(bucket: Bucket, values: list[dict[str, tf.Tensor]], shards: Shards) -> list[tf.Tensor]:
    """What each tower's tensors are multiplied by, [N] float64 scalars."""
    exchange = bucket.exchanges[0]
    if exchange.collective.op == "mean":
        return [share.fraction for share in shards.shares]
    if bucket.wire.empty_too:
        return [tf.ones([], tf.float64)] * len(values)
    present = [tf.sign(share.fraction) for share in shards.shares]
    if exchange.scale is None:
        return present
    scales = [tf.cast(tower[exchange.scale], tf.float64) for tower in values]
    return [one * scale for one, scale in zip(present, scales, strict=True)]


def _join_on_host(
    tensors: list[list[tf.Tensor]], weights: Sequence[tf.Tensor], wire: Collective
) -> list[list[tf.Tensor]]:
    if wire.concatenates:
        return [host_ops.all_gather(tensors)] * len(tensors)
    reduced = host_ops.all_reduce(tensors, weights, wire.op)
    return [_own(wire, reduced, tower) for tower in range(len(tensors))]


def _own(wire: Collective, reduced: list[tf.Tensor], tower: int) -> list[tf.Tensor]:
    """What a tower gets of tensors that are reduced."""
    scattered = wire.kind == "reduce_scatter"
    return [tensor[tower : tower + 1] for tensor in reduced] if scattered else reduced


def _join(
    buckets: Sequence[Bucket], sent: list[list[tf.Tensor]], towers: TowerState, labels: Sequence[str]
) -> list[list[tf.Tensor]]:
    """Join buckets that are all grouped, or one of any kind; [N][B] in, [N][B] out."""
    columns = [list(column) for column in zip(*sent, strict=True)]  # [B][N]
    if _is_grouped(buckets[0]):
        collectives = [_collective(bucket.wire, label) for bucket, label in zip(buckets, labels, strict=True)]
        columns = group_exchange(columns, towers.communicator, collectives)
    else:
        columns = [_join_one(buckets[0].wire, columns[0], towers, labels[0])]
    return [list(row) for row in zip(*columns, strict=True)]


def _collective(wire: Collective, label: str) -> Joining:
    """What the communicator does to a bucket that is grouped."""
    if wire.kind == "stack":
        return AllGather((), (), label)
    kind = ReduceScatter if wire.kind == "reduce_scatter" else AllReduce
    return kind((), (), wire.op, label)


def _join_one(
    wire: Collective, tensors: Sequence[tf.Tensor], towers: TowerState, label: str
) -> list[tf.Tensor]:
    """Join one bucket that is sent, gathered, or reduced to one tower; [N] in, [N] out."""
    count = len(towers)
    if wire.root >= count:
        raise ValueError(f"Expected root to be below the number of towers, {count}. Received: {wire.root}")
    if wire.kind == "broadcast":
        return group_broadcast(tensors, towers.communicator, wire.root, label)
    if wire.concatenates:
        return _gather(tensors, towers)
    reduced = group_all_reduce(tensors, towers.communicator, wire.op, label)
    if wire.kind == "reduce":
        reduced = [t if i == wire.root else tf.zeros_like(t) for i, t in enumerate(reduced)]
    return reduced


def _gather(tensors: Sequence[tf.Tensor], towers: TowerState) -> list[tf.Tensor]:
    """Concatenate the towers' rows, once for all towers of one device."""
    gathered: dict[str, tf.Tensor] = {}
    for device in towers.devices:
        if device not in gathered:
            with tf.device(f"/{device}"):
                gathered[device] = tf.concat(tensors, axis=0)
    return [gathered[device] for device in towers.devices]


def _results(program: Program, values: list[dict[str, tf.Tensor]], shards: Shards) -> Any:
    outputs = iter(program.outputs)
    rows: list[list[Any]] = []  # [results][N]
    combined: list[Any] = []
    for leaf in tf.nest.flatten(program.structure):
        parts = [next(outputs) for _ in tf.nest.flatten(leaf, expand_composites=True) if leaf is not None]
        if not parts:
            rows.append([None] * len(values))
            combined.append(None)
            continue
        pieces = [
            tf.nest.pack_sequence_as(leaf, [tower[name] for name, _ in parts], expand_composites=True)
            for tower in values
        ]
        rows.append(tf.nest.map_structure(tf.identity, pieces, expand_composites=True))
        concatenated = parts[0][1] == "concat" and len(pieces) > 1
        combined.append(concat_rows(pieces, shards.sizes) if concatenated else rows[-1][0])
    if program.results is Results.EACH:
        towers = range(len(values))
        return [tf.nest.pack_sequence_as(program.structure, [row[i] for row in rows]) for i in towers]
    return tf.nest.pack_sequence_as(program.structure, combined)


def concat_rows(pieces: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Concatenate the towers' results of one row per sample, without those of a stand-in row.

    Args:
        pieces: [N] tensors, dense, sparse or ragged.
        sizes: [N] samples of each tower; where it is 0, the piece is left out.
    """
    kept = []
    for piece, size in zip(pieces, sizes, strict=True):
        if isinstance(piece, tf.SparseTensor):
            rows = tf.where(size > 0, piece.dense_shape[0], 0)
            shape = tf.concat([[rows], piece.dense_shape[1:]], 0)
            kept.append(tf.sparse.slice(piece, tf.zeros_like(shape), shape))
        else:
            rows = piece.nrows() if isinstance(piece, tf.RaggedTensor) else tf.shape(piece)[0]
            kept.append(piece[: tf.where(size > 0, rows, tf.zeros_like(rows))])
    return tf.sparse.concat(0, kept) if isinstance(kept[0], tf.SparseTensor) else tf.concat(kept, 0)
