"""Lay a program out on every tower: the body of the one graph that is a step.

Reads as the data flow: shard, segment, all-reduce, segment, …, results. Called while a graph is built, or
outside one to run the same parts one after another. `program.py` says what is laid out, `towers.py` on what.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.communicator import AllGather, AllReduce, ReduceScatter, native
from ncclsync.ops import Collective, host_ops
from ncclsync.ops.group_ops import Joining, group_all_reduce, group_broadcast, group_exchange
from ncclsync.ops.spans import COMMUNICATION, STEP, STEPS, Begun, Meter, begin, hold
from ncclsync.program.program import Bucket, Program, Results, Segment
from ncclsync.semantics.shards import Shards, components_of, shard_batch
from ncclsync.towers.recovery import Rollback
from ncclsync.towers.state import TowerState


def lay_out(
    program: Program, towers: TowerState, batch: Any, rollback: Rollback, meter: Meter | None = None
) -> Any:
    """Run `program` on all towers, in the graph that is being built if there is one.

    Args:
        program: a traced step, cut.
        towers: N towers; copies of the program's variables are made as needed.
        batch: is split into N.
        rollback: made for the same program.
        meter: notes when the parts of the step begin and end; None: nothing is added to the graph.

    Returns:
        The step's results as one tower's would be: its structure, tensors combined as the program says.
        They depend on every side effect of every tower.
    """
    count = len(towers)
    step = begin(meter, STEPS, STEP, components_of(batch))
    shards = _shard(batch, towers, meter, step.ops)
    values = [_inputs(program, towers, shards, i) for i in range(count)]  # [N] {name: tensor}
    received: list[dict[str, tf.Tensor]] = [{} for _ in range(count)]  # [N] buckets by their results' names
    before: list[Any] = [*_checked_rows(program, shards), *rollback.begin()]
    for number, segment in enumerate(program.segments, start=1):
        sent, tokens, ends = [], [], []
        for i, device in enumerate(towers.devices[:1] if segment.for_all else towers.devices):
            incoming = [received[i].pop(bucket.result) for bucket in segment.incoming]
            given = incoming if number > 1 else components_of(shards.batches[i])
            span = begin(meter, i, segment_name(program, number), [*before, *given])
            with tf.device(f"/{device}"), tf.control_dependencies([*before, *span.ops]):
                outcome = _run_segment(segment, values[i], incoming, shards.shares[i].fraction, i)
            values[i].update(zip(segment.fetches, outcome, strict=False))
            sent.append(outcome[len(segment.fetches) : -1])
            tokens.append(outcome[-1])
            ends += span.end(tokens=outcome[-1:])
        # Every tower's next segment waits for all of this one: an error anywhere stops all of them.
        before = [tf.group(*tokens, *ends)]
        if segment.for_all:
            before = [_pass_on(segment, dict(program.variables), towers, values, before)]
        begin_call = functools.partial(_begin_call, meter, count, number, segment.outgoing, [*tokens, *ends])
        # Behind what still travels: the communicator joins bucket after bucket.
        with tf.control_dependencies([tensor for row in received for tensor in row.values()]):
            joined = _exchange(segment.outgoing, sent, values, shards, towers, begin_call)
        for row, tensors in zip(received, joined, strict=True):
            row.update(zip([bucket.result for bucket in segment.outgoing], tensors, strict=True))
    if program.noise is not None:
        towers.noise.update(values[0][program.noise])
    finite = None if program.finite is None else values[0][program.finite]
    done = rollback.end(before[0], finite)
    with tf.control_dependencies([done, *step.end([done], samples=shards.shares[0].total)]):
        return _results(program, values, shards)


def _checked_rows(program: Program, shards: Shards) -> list[Any]:
    """Check that the batch has as many rows as a state or a constant of the step that is divided like it."""
    total = shards.shares[0].total
    if len(shards.shares) == 1:
        return []
    checks = [
        tf.debugging.assert_equal(
            total,
            rows,
            f"Expected the global batch size that the step declares, {rows}, by a stateful RNN or by "
            "a tensor of so many rows: as batch_size= counts for MirroredStrategy's fit (for Horovod, each "
            "process has its own).",
        )
        for rows in program.declared
    ]
    return [check for check in checks if check is not None]


def segment_name(program: Program, number: int) -> str:
    """Return what a segment is called in a timeline; the last one, which writes the weights, "apply"."""
    return "apply" if 1 < number == len(program.segments) else f"segment_{number}"


def _shard(batch: Any, towers: TowerState, meter: Meter | None, after: Sequence[tf.Operation]) -> Shards:
    """Split a batch; with a meter, copy each part to its tower's device, as TensorFlow else does unseen."""
    spans = [begin(meter, i, "shard", after) for i in range(len(towers))]
    shards = shard_batch(hold(batch, [op for span in spans for op in span.ops]), len(towers))
    batches = []
    for i, (span, shard) in enumerate(zip(spans, shards.batches, strict=True)):
        shard = hold(shard, span.end(components_of(shard)))
        if meter is not None and towers.devices[i] != "CPU:0":
            copying = begin(meter, i, "copy_to_device", components_of(shard))
            with tf.device(f"/{towers.devices[i]}"):
                shard = hold(shard, copying.ops)
            shard = hold(shard, copying.end(components_of(shard)))
        batches.append(shard)
    return dataclasses.replace(shards, batches=batches)


def _inputs(program: Program, towers: TowerState, shards: Shards, tower: int) -> dict[str, tf.Tensor]:
    arguments = [*components_of(shards.batches[tower]), *shards.shares[tower]]
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
    about = [tf.constant(tower == 0), *([tf.constant(tower)] if segment.metered else [])]
    return segment.function(*sources, *received, fraction, *about)


def _pass_on(
    segment: Segment,
    variables: dict[str, tf.Variable],
    towers: TowerState,
    values: list[dict[str, tf.Tensor]],
    after: Sequence[Any],
) -> tf.Operation:
    """Give the other towers what tower 0 has computed and written for all; they share its memory."""
    for row in values[1:]:
        row.update((name, values[0][name]) for name in segment.fetches)
    assigned = []
    for name in segment.for_all:
        first, *others = towers.copies(variables[name])
        with tf.control_dependencies(after):
            value = tf.raw_ops.ReadVariableOp(resource=first.handle, dtype=first.dtype)
        for copy in others:
            with tf.device(copy.device):
                assigned.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
    return tf.group(*assigned)


def _exchange(
    buckets: tuple[Bucket, ...],
    sent: list[list[tf.Tensor]],
    values: list[dict[str, tf.Tensor]],
    shards: Shards,
    towers: TowerState,
    begin_call: Callable[[list[int]], Begun],
) -> list[list[tf.Tensor]]:
    """Join the towers' buckets; [N][B] in, [N][B] out. `values` are by tower, for conditions and weights.

    `begin_call` lets the span of a call begin, by the indices of the buckets that it joins.
    """
    count = len(towers)
    if count == 1:
        return sent
    received: list[list[Any]] = [[None] * len(buckets) for _ in range(count)]
    labels = [f"bucket {i + 1} of {len(buckets)}" for i in range(len(buckets))]
    for indices in together(buckets):
        chosen = [buckets[i] for i in indices]
        given = [[row[i] for i in indices] for row in sent]
        if chosen[0].on_host:
            weights = _weights(chosen[0], shards)
            call = functools.partial(_join_on_host, given, weights, chosen[0].wire)
        else:
            call = functools.partial(_join, chosen, given, towers, [labels[i] for i in indices])
        join = functools.partial(_timed, call, functools.partial(begin_call, indices))
        when = chosen[0].when
        joined = tf.cond(values[0][when], join, lambda g=given: g) if when else join()
        for row, tensors in zip(received, joined, strict=True):
            for i, tensor in zip(indices, tensors, strict=True):
                row[i] = tensor
    return received


def _timed(
    call: Callable[[Begun], list[list[tf.Tensor]]], begin_call: Callable[[], Begun]
) -> list[list[tf.Tensor]]:
    span = begin_call()
    joined = call(span)
    return hold(joined, span.end([tensor for row in joined for tensor in row]))


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
            key = (bucket.wire, first.collective, first.dtype, first.when)
        elif _is_grouped(bucket) and bucket.when is None:
            key = "one group"
        joined.setdefault(key, []).append(i)
    return list(joined.values())


def numbered(buckets: tuple[Bucket, ...]) -> list[int]:
    """Return what each bucket is called, from 1, in the order of the calls that join them.

    On the host, where nothing is packed, all buckets of one call are one.
    """
    numbers, last = [0] * len(buckets), 0
    for indices in together(buckets):
        for place, i in enumerate(indices):
            last += place == 0 or not buckets[i].on_host
            numbers[i] = last
    return numbers


def _begin_call(
    meter: Meter | None,
    towers: int,
    number: int,
    buckets: tuple[Bucket, ...],
    after: Sequence[Any],
    indices: Sequence[int],
) -> Begun:
    """Begin the span of the call that joins some of the buckets behind segment `number`."""
    numbers = numbered(buckets)
    called = list(dict.fromkeys(f"{number}.{numbers[i]}" for i in indices))
    exchanges = [exchange for i in indices for exchange in buckets[i].exchanges]
    sizes = [exchange.size_bytes(towers) for exchange in exchanges]
    wire = buckets[indices[0]].wire
    details: dict[str, Any] = {"bucket": ", ".join(called), "tensors": len(exchanges)}
    if None not in sizes:  # else it is known only when it runs
        details["bytes"] = sum(sizes)
    kind = "gather" if wire.concatenates else wire.kind.replace("_", "-")
    name = called[0] if len(called) == 1 else f"{called[0]}-{called[-1]}"
    return begin(meter, COMMUNICATION, f"{kind}/{name}", after, **details)


def _is_grouped(bucket: Bucket) -> bool:
    """Whether a collective of the communicator's does what the bucket's wire says."""
    if bucket.wire.kind in ("all_reduce", "reduce_scatter"):
        return True
    # Rows are gathered so where all towers are known to send as many: one of each, and of one size.
    exchange = bucket.exchanges[0]
    same = bucket.wire.kind == "stack" and bucket.wire.empty_too and exchange.shape[1:].is_fully_defined()
    return same and exchange.dtype.name in native.DTYPES


def _weights(bucket: Bucket, shards: Shards) -> list[tf.Tensor]:
    """What each tower's tensors are multiplied by, [N] float64 scalars."""
    if bucket.exchanges[0].collective.op == "mean":
        return [share.fraction for share in shards.shares]
    if bucket.wire.empty_too:
        return [tf.ones([], tf.float64)] * len(shards.shares)
    return [tf.sign(share.fraction) for share in shards.shares]


def _join_on_host(
    tensors: list[list[tf.Tensor]], weights: Sequence[tf.Tensor], wire: Collective, span: Begun
) -> list[list[tf.Tensor]]:
    if wire.concatenates:
        return [host_ops.all_gather(hold(tensors, span.ops))] * len(tensors)
    reduced = host_ops.all_reduce(tensors, hold(weights, span.ops), wire.op)
    return [_own(wire, reduced, tower) for tower in range(len(tensors))]


def _own(wire: Collective, reduced: list[tf.Tensor], tower: int) -> list[tf.Tensor]:
    """What a tower gets of tensors that are reduced."""
    scattered = wire.kind == "reduce_scatter"
    return [tensor[tower : tower + 1] for tensor in reduced] if scattered else reduced


def _join(
    buckets: Sequence[Bucket],
    sent: list[list[tf.Tensor]],
    towers: TowerState,
    labels: Sequence[str],
    span: Begun,
) -> list[list[tf.Tensor]]:
    """Join buckets that are all grouped, or one of any kind; [N][B] in, [N][B] out."""
    columns = [list(column) for column in zip(*sent, strict=True)]  # [B][N]
    with tf.control_dependencies(span.ops):
        if _is_grouped(buckets[0]):
            pairs = zip(buckets, labels, strict=True)
            collectives = [_collective(bucket.wire, label) for bucket, label in pairs]
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
    return group_all_reduce(tensors, towers.communicator, wire.op, label)


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
        joins = [how == "concat" and len(pieces) > 1 for _, how in parts]
        if isinstance(leaf, tf.IndexedSlices):  # values and places, each as it is placed
            columns = [[tower[name] for tower in values] for name, _ in parts]
            joined = [
                concat_rows(column, shards.sizes) if joins_rows else column[0]
                for column, joins_rows in zip(columns, joins, strict=True)
            ]
            combined.append(tf.nest.pack_sequence_as(leaf, joined, expand_composites=True))
        else:
            combined.append(concat_rows(pieces, shards.sizes) if joins[0] else rows[-1][0])
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
