"""Split one global batch into shards, for any number of rows: one for each tower, or as many as `shards=` says.

Owns the arithmetic (`shard_sizes`) and the slicing of a nested batch inside a graph (`shard_batch`): evenly, or by
weights. A tower for which no row is left gets a copy of the first row and a sample count of zero: it computes on
something, since an empty tensor has no mean, and the collectives leave its results out. A batch without rows
is tower 0's, whose results are then one device's.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat.tensorflow import OWN_WORDS
from ncclsync.errors import shown
from ncclsync.ops import Share

_DIGESTED = 1 << 8  # numbers of a batch's component, up to twice as many
_SAME_ROWS = "Expected every tensor of a batch to have the same number of rows. Received:"
_LISTS = ". Of a list np.asarray makes such a tensor"
_FIRST_AXIS = (
    "Towers divide a batch along the first axis of each of its tensors, which has to run over the samples. "
    "An axis of roles, as in metric learning, goes after it: (samples, 2, ...) for (2, samples, ...); or "
    "make each role an input of its own."
)
_SETS = (
    "Dense tensors of different batch sizes go together in one process, sparse and ragged ones do not. Give a value "
    "for the whole batch to each row, as tf.repeat does, and take the first one's in the step."
)
_MERGED = (
    "Of graphs that are merged into one, give a row per graph, as tf.RaggedTensor, and merge them in the "
    "model, by merge_dims(0, 1)."
)


def shard_sizes(batch_size: int, towers: int, weights: Sequence[int] | None = None) -> tuple[int, ...]:
    """Split `batch_size` rows as evenly as it goes, 10 over 4 is (3, 3, 2, 2); or by weights.

    By weights (3, 1), 10 is (8, 2): each shard ends where the weights so far say, rounded up. So the first shard has
    a row if there is one, and any other may have none.

    Args:
        batch_size: rows.
        towers: how many shards.
        weights: [towers] at least 1. None: evenly.
    """
    if weights is not None:
        total = sum(weights)
        ends = [-(-batch_size * weight // total) for weight in itertools.accumulate(weights, initial=0)]
        return tuple(end - begin for begin, end in itertools.pairwise(ends))
    share, rest = divmod(batch_size, towers)
    return tuple(share + (index < rest) for index in range(towers))


@dataclasses.dataclass(frozen=True)
class Shards:
    """Hold one batch, split.

    Attributes:
        batches: [n] the batch's structure, with the rows of a shard of this process.
        sizes: [shards] int32 scalars, the samples of each shard, 0 where it has none.
        shares: [shards] what part of the batch that is; the fractions add up to 1. That of shard 0 is 1 in a
            batch without rows.
        whole: the components of the whole batch, for processes to compare.
    """

    batches: list[Any]
    sizes: list[tf.Tensor]
    shares: list[Share]
    whole: Sequence[tf.Tensor] = ()


def shard_batch(
    batch: Any,
    towers: int,
    local: Sequence[int] | None = None,
    weights: tf.Tensor | None = None,
    held: tf.Tensor | None = None,
) -> Shards:
    """Split every tensor of a batch along its first axis.

    Args:
        batch: nested structure of tensors (dense, sparse or ragged) that share their first dimension, except in an
            `Apart`; scalars go to every tower as they are, and so does None.
        towers: how many shards.
        local: the numbers of this process' towers, whose shards are made; None: of all.
        weights: see `shard_sizes`, [towers] int32.
        held: [towers] int32, the rows of each shard, where the batch has those of `local` alone, or, for none of them,
            a row to compute on.

    Raises:
        ValueError: while the graph is built, if static shapes show that the rows differ in number, or that
            there is no tensor with rows.
        InvalidArgumentError: when the graph runs, if the rows differ in number.
    """
    leaves = tf.nest.flatten(batch)
    rowed = rowed_leaves(batch)
    static = {rows for leaf in rowed if (rows := leaf.shape[0]) is not None}
    rows = count_rows(rowed[0])
    checks = []
    if not static or any(leaf.shape[0] is None for leaf in rowed):
        counts = [count_rows(leaf) for leaf in rowed]
        same = tf.reduce_all(tf.equal(tf.stack(counts), rows))
        names = ", ".join(_names_of_rowed(batch))
        told = [OWN_WORDS + _SAME_ROWS, counts, f"rows, of {names}. {_FIRST_AXIS} {_SETS} {_MERGED}"]
        checks.append(tf.debugging.Assert(same, told, summarize=len(counts)))
    with tf.control_dependencies([check for check in checks if check is not None]):
        rows = tf.identity(rows)
    made = range(towers) if local is None else local
    if held is not None:
        sizes, rows = held, tf.reduce_sum(held)
    else:
        sizes = sizes_in_graph(rows, towers, weights)
    unstacked, shares = divide_rows(rows, sizes)
    each, rest = divmod(next(iter(static), 0), towers)
    begins: Any
    if each and not rest and weights is None and held is None:  # then the shards' shapes are known
        begins = np.arange(towers, dtype=np.int32) * each
        ends = begins + each
    else:
        begins = tf.stack([share.begin for share in shares])
        if held is not None:  # the batch begins with the rows of the first of `made`
            begins = tf.maximum(begins - tf.reduce_sum(held[: made[0]]), 0)
        ends = begins + tf.stack([share.rows for share in shares])
    units = units_of(batch)
    parts = {0: list(zip(tf.split(begins, towers), tf.split(ends, towers), strict=True))}
    for leaf, unit in zip(leaves, units, strict=True):
        if unit not in parts:
            # Where a shard's samples end, so do its rows of another number: one without samples has none of these.
            samples = tf.cast(tf.cumsum(sizes), tf.int64) * tf.cast(count_rows(leaf), tf.int64)
            stops = tf.cast(-(-samples // tf.maximum(tf.cast(rows, tf.int64), 1)), tf.int32)
            starts = tf.concat([[0], stops[:-1]], 0)
            parts[unit] = list(zip(tf.split(starts, towers), tf.split(stops, towers), strict=True))
    own = [parts[unit] if _has_rows(leaf) else None for leaf, unit in zip(leaves, units, strict=True)]
    both = [*zip(leaves, own, strict=True)]
    taken = [[leaf if of is None else _take_rows(leaf, *of[tower]) for leaf, of in both] for tower in made]
    batches = [tf.nest.pack_sequence_as(batch, one) for one in taken]
    return Shards(batches, unstacked, shares)


def divide_rows(rows: tf.Tensor, sizes: tf.Tensor) -> tuple[list[tf.Tensor], list[Share]]:
    """Return the `sizes` and `shares` of `Shards`, of the rows of a batch, int32, and of shards, [towers] int32."""
    towers = int(sizes.shape[0])
    empty = tf.cast(rows == 0, tf.int32)
    held = sizes + empty * tf.one_hot(0, towers, dtype=tf.int32)
    fractions = tf.unstack(tf.cast(held, tf.float64) / tf.cast(rows + empty, tf.float64), towers)
    begins = tf.unstack(tf.where(sizes > 0, tf.cumsum(sizes, exclusive=True), 0), towers)
    counts = tf.unstack(tf.maximum(sizes, 1), towers)
    shares = [Share(fractions[n], tf.constant(n), counts[n], begins[n], rows) for n in range(towers)]
    return tf.unstack(sizes, towers), shares


def sizes_in_graph(rows: tf.Tensor, towers: int, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Return what `shard_sizes` does, in a graph: [towers], of the dtype of `rows`; by weights int32."""
    if weights is not None:
        cumulated = tf.cumsum(tf.cast(weights, tf.int64))  # times rows, beyond int32
        ends = tf.cast(-(-tf.cast(rows, tf.int64) * cumulated // cumulated[-1]), tf.int32)
        return ends - tf.concat([[0], ends[:-1]], 0)
    share, rest = rows // towers, rows % towers
    return share + tf.cast(tf.range(towers, dtype=rows.dtype) < rest, rows.dtype)


def rowed_leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch, or their specs, that have a row, or several, for each sample.

    Raises:
        ValueError: none has; or static shapes show that the rows differ in number.
    """
    rowed = _leaves_of_samples(batch)
    if not rowed:
        raise ValueError(
            "Expected a batch with at least one tensor whose first axis runs over the samples. "
            f"Received: {shown(batch)}{_LISTS * isinstance(batch, (list, tuple))}"
        )
    if len({leaf.shape[0] for leaf in rowed} - {None}) > 1:
        shapes = [f"{tuple(leaf.shape)} of {name}" for leaf, name in zip(rowed, _names_of_rowed(batch), strict=True)]
        raise ValueError(f"{_SAME_ROWS} {', '.join(shapes)}. {_FIRST_AXIS} {_SETS} {_MERGED}")
    return rowed


def says_unequal(error: Exception) -> bool:
    """Return whether an error of a step is that `shard_batch` has found different numbers of rows."""
    return str(error).startswith(_SAME_ROWS)


def _names_of_rowed(batch: Any) -> list[str]:
    """Return where in a batch its leaves are that have rows, such as "[0]['left']"."""
    found = keras.tree.flatten_with_path(batch)
    names = {id(leaf): "".join(f"[{part!r}]" for part in path) or "the batch" for path, leaf in found}
    return [names.get(id(leaf), "?") for leaf in _leaves_of_samples(batch)]


def _leaves_of_samples(batch: Any) -> list[Any]:
    pairs = zip(tf.nest.flatten(batch), units_of(batch), strict=True)
    return [leaf for leaf, unit in pairs if not unit and _has_rows(leaf)]


class Grouped(NamedTuple):
    """Mark, in the structure of a batch, a leaf that has several rows for each sample.

    Attributes:
        rows: [n, k, ...] of a leaf [k n, ...], or their spec: sample i has the rows from k i on.
    """

    rows: Any


class Apart(NamedTuple):
    """Mark, in the structure of a batch, a leaf whose rows are no samples: a unit of their own.

    Of each number of rows there is a subclass, in `_APART`; equal numbers are one unit.
    """

    rows: Any


# A batch of more different numbers of rows is refused.
_APART = tuple(type(f"Apart{i}", (Apart,), {}) for i in range(8))


def units_of(batch: Any) -> list[int]:
    """Return, for each flattened leaf of a batch or of its specs, 0 if it has samples; else the number of its unit."""
    if not is_marked(batch):
        return [0] * len(tf.nest.flatten(batch))

    def numbered(node: Any) -> Any:
        if isinstance(node, Apart):
            return type(node)(_APART.index(type(node)) + 1)
        return None if node is None or keras.tree.is_nested(node) else 0

    return [unit or 0 for unit in tf.nest.flatten(keras.tree.traverse(numbered, batch))]


def grouped(batch: Any, by_samples: bool = True) -> Any:
    """Return a batch, or its specs, with marks where it holds dense data sets of different, known batch sizes.

    If each size is a multiple of the fewest rows, and `by_samples`, these are the samples, and every other leaf,
    `Grouped`, has k rows for each of them. Else the most rows are the samples, and all others are `Apart`. The batch
    stays as it is if a leaf is not dense, or has an unknown number of rows. The step is to be given what `ungrouped`
    returns.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if _has_rows(leaf)]
    if len({leaf.shape[0] for leaf in leaves}) < 2 or is_marked(batch):
        return batch
    counts = [leaf.shape[0] for leaf in leaves]
    others = sorted({*counts} - {None})[:-1]
    dense = all(isinstance(leaf, (tf.Tensor, tf.TensorSpec)) for leaf in leaves)
    if not dense or None in counts or len(others) > len(_APART):
        return batch
    samples = min(counts)
    if not by_samples or samples < 1 or any(one % samples for one in counts):
        kinds = dict(zip(others, _APART, strict=False))
        return tf.nest.map_structure(
            lambda leaf: kinds[leaf.shape[0]](leaf) if _has_rows(leaf) and leaf.shape[0] in kinds else leaf, batch
        )

    def group(leaf: Any) -> Any:
        if not _has_rows(leaf) or leaf.shape[0] == samples:
            return leaf
        shape = [samples, leaf.shape[0] // samples, *leaf.shape[1:]]
        if isinstance(leaf, tf.TypeSpec):
            return Grouped(tf.TensorSpec(shape, leaf.dtype))
        if None in shape:
            shape = tf.concat([shape[:2], tf.shape(leaf)[1:]], 0)
        return Grouped(tf.reshape(leaf, shape))

    return tf.nest.map_structure(group, batch)


def ratios_of(batch: Any) -> tuple[int, ...]:
    """Return how many rows for each sample the `Grouped` leaves of a batch have, in turn."""

    def ratio(node: Any) -> int | None:
        return int(node.rows.shape[1]) if isinstance(node, Grouped) else None

    return tuple(one for one in tf.nest.flatten(keras.tree.traverse(ratio, batch)) if isinstance(one, int))


def ungrouped(batch: Any) -> Any:
    """Return what `grouped` was given; of specs, with open rows if these are open."""

    def ungroup(node: Any) -> Any:
        if isinstance(node, Apart):
            return node.rows
        if not isinstance(node, Grouped):
            return None
        leaf = node.rows
        samples, each, *lengths = leaf.shape
        if isinstance(leaf, tf.TypeSpec):
            return tf.TensorSpec([None if samples is None else samples * each, *lengths], leaf.dtype)
        return tf.reshape(leaf, [-1, *lengths] if None not in lengths else tf.concat([[-1], tf.shape(leaf)[2:]], 0))

    return keras.tree.traverse(ungroup, batch) if is_marked(batch) else batch


def is_marked(batch: Any, kinds: Any = (Grouped, Apart)) -> bool:
    """Return whether a batch, or its specs, has leaves that are marked so."""
    found: list[Any] = []
    keras.tree.traverse(lambda node: found.append(node) if isinstance(node, kinds) else None, batch)
    return bool(found)


def rows_of(batch: Any) -> int | None:
    """Return the number of samples of a batch, the same for all its tensors but scalars; None if all are scalars.

    Raises:
        ValueError: the tensors differ in it.
    """
    leaves = _leaves_of_samples(batch)
    counts = list(dict.fromkeys(int(leaf.shape[0]) for leaf in leaves))
    if len(counts) > 1:
        raise ValueError(f"{_SAME_ROWS} {counts}")
    return counts[0] if counts else None


def digest_of_rows(batch: Any) -> bytes:
    """Return a digest of a batch's shapes, and of some of its numbers, evenly spread."""
    digest = 0  # each step of several processes makes one: a cryptographic digest takes longer
    for component in components_of(batch):
        array = component if isinstance(component, np.ndarray) else np.asarray(component)
        some = array.reshape(-1)[:: array.size // _DIGESTED | 1]  # odd, so as not to see one column alone
        text = some.tobytes() if array.dtype != object else repr(some.tolist()).encode()
        digest = zlib.crc32(text, zlib.crc32(repr(array.shape).encode(), digest))
    return digest.to_bytes(4, "little")


def fixed_specs(batch: Any) -> Any:
    """Return the `tf.TypeSpec`s of a batch, of tensors or specs, with its number of rows."""

    def spec_of(leaf: Any) -> Any:
        return leaf if leaf is None or isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)

    return tf.nest.map_structure(spec_of, batch)


def open_specs(batch: Any) -> Any:
    """Return the `tf.TypeSpec`s of a batch, of tensors or specs, with the number of rows left open."""

    def opened(spec: Any) -> Any:
        if not _has_rows(spec):
            return spec
        shape = [None, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype, spec.flat_values_spec
            )
        kind = tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec
        return kind(shape, spec.dtype)

    return tf.nest.map_structure(opened, fixed_specs(batch))


def relaxed_like(specs: Any, others: Any) -> Any:
    """Return open specs with the lengths that others, of the same batch without marks, leave open."""

    def relaxed(spec: Any, other: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            return other
        lengths = other.shape[1:]
        return tf.TensorSpec([*spec.shape[: spec.shape.rank - len(lengths)], *lengths], spec.dtype)

    leaves = zip(tf.nest.flatten(specs), tf.nest.flatten(open_specs(others)), strict=True)
    return tf.nest.pack_sequence_as(specs, [relaxed(*both) for both in leaves])


def without_optionals(batch: Any) -> Any:
    """Return a batch, or its specs, with None in place of each `tf.experimental.Optional` or spec of None.

    Keras yields an Optional for a generator's None; a `tf.data.Dataset` has a spec for the None of arrays.
    """
    of_none = type(tf.type_spec_from_value(None))  # tf.NoneTensorSpec in TensorFlow 2.21
    missing = (tf.experimental.Optional, tf.OptionalSpec, of_none)
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, batch)


def components_of(batch: Any) -> list[Any]:
    """Return the tensors that a batch consists of, or their specs; without its Nones."""
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def packed(specs: Any, components: Sequence[Any]) -> Any:
    """Return a batch of these `tf.TypeSpec`s, made of what `components_of` gives."""
    left = iter(components)
    leaves = [None if leaf is None else next(left) for leaf in tf.nest.flatten(specs, expand_composites=True)]
    return tf.nest.pack_sequence_as(specs, leaves, expand_composites=True)


def _has_rows(leaf: Any) -> bool:
    if leaf is None:
        return False
    rank = leaf.shape.rank
    if rank is None:
        raise ValueError(f"Expected the tensors of a batch to have a known rank. Received: {leaf}")
    return rank > 0


def count_rows(leaf: Any) -> tf.Tensor:
    """Return the length of the first axis of a dense, sparse or ragged tensor, an int32 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _take_rows(leaf: Any, begin: tf.Tensor, end: tf.Tensor) -> Any:
    """Return the rows of a leaf from `begin` to before `end`, both [1] int32."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[begin[0] : end[0]]
    if isinstance(leaf, tf.Tensor):
        return tf.strided_slice(leaf, begin, end, [1])  # made in a quarter of the time of leaf[begin:end]
    rest = leaf.dense_shape[1:]
    start = tf.concat([tf.cast(begin, tf.int64), tf.zeros_like(rest)], 0)
    # Its dense shape is that of the slice, except for a last slice that would reach beyond the end.
    return tf.sparse.slice(leaf, start, tf.concat([tf.cast(end - begin, tf.int64), rest], 0))
