"""Combine what the towers' steps return into one device's results."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.errors import NcclSyncError
from ncclsync.ops.group_ops import Turns, gather_rows
from ncclsync.program.program import Program, Results
from ncclsync.semantics.shards import Shards, components_of
from ncclsync.towers.state import TowerState


def combine(
    program: Program, values: Sequence[dict[str, tf.Tensor]], shards: Shards, towers: TowerState, turns: Turns
) -> Any:
    """Return the results of a step on these shards of a batch, as `Program.outputs` and `Program.results` say.

    `values` are [s] tensors of each shard of this process' towers, by name; by `turns` processes join their rows.
    """
    layout = towers.layout
    sizes = [shards.sizes[shard] for shard in layout.own_shards]
    outputs = iter(program.outputs)
    each: list[list[Any]] = []  # [results][s]
    combined: list[Any] = []  # [results]

    def joined(column: Sequence[Any], how: str) -> Any:
        if how != "concat" or layout.shards == 1:
            return column[0]
        if len(column) == layout.shards:
            return concat_rows(column, sizes)
        return _gather_rows(column, sizes, towers, turns)[0]

    for leaf in tf.nest.flatten(program.structure):
        parts = [next(outputs) for _ in components_of(leaf)]
        if not parts:
            each.append([None] * len(values))
            combined.append(None)
            continue
        columns = [[tf.identity(tower[name]) for tower in values] for name, _ in parts]
        hows = [how for _, how in parts]
        each.append([tf.nest.pack_sequence_as(leaf, one, expand_composites=True) for one in zip(*columns, strict=True)])
        if isinstance(leaf, tf.IndexedSlices):  # values and places, each as it is placed
            both = [joined(column, how) for column, how in zip(columns, hows, strict=True)]
            combined.append(tf.nest.pack_sequence_as(leaf, both, expand_composites=True))
        else:
            combined.append(joined(each[-1], hows[0]))
    if program.results is Results.EACH:
        return [tf.nest.pack_sequence_as(program.structure, [one[i] for one in each]) for i in range(len(values))]
    return tf.nest.pack_sequence_as(program.structure, combined)


def _gather_rows(pieces: Sequence[Any], sizes: Sequence[Any], towers: TowerState, turns: Turns) -> list[tf.Tensor]:
    """Concatenate the rows of the towers of all processes; as `concat_rows`, [n] the same."""
    if not all(isinstance(piece, tf.Tensor) for piece in pieces):
        raise NcclSyncError(
            "Expected a step on towers of several processes to return dense tensors. "
            f"Received: {type(pieces[0]).__name__}. Return it dense, by to_tensor() or tf.sparse.to_dense"
        )
    kept = []
    for device, piece, size in zip(towers.layout.devices, pieces, sizes, strict=True):
        with tf.device(f"/{device}"):
            kept.append(concat_rows([piece], [size]))
    return gather_rows(kept, towers.communicator, "results", turns)


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
