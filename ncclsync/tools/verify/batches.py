"""Take the first batches of the user's data: arrays, a `tf.data.Dataset`, a PyDataset, a generator."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync.errors import shown
from ncclsync.towers.step_function import to_tensor
from ncclsync.training.arguments import count_samples

Batch = tuple[Any, Any, Any]  # x, y and sample weights as Keras takes them; y and weights may be None


def take_batches(data: Any, steps: int, *, batch_size: int, towers: int, one_size: bool) -> list[Batch]:
    """Return `steps` batches of tensors. Data that ends sooner begins again.

    Args:
        data: `x`, `(x, y)` or `(x, y, sample_weight)` of arrays (x a dictionary if there are several), which are cut
            into batches here; or an iterable over batches, which stay as they are.
        steps: the number of batches.
        batch_size: of arrays. If `towers` divides all batches evenly, the last one loses a sample, so that shards of
            different sizes are tried, too.
        one_size: whether all batches must have the same number of samples, since the model's input declares it.

    Raises:
        TypeError: `data` is of another type.
        ValueError: there is no batch, or arrays differ in their number of samples.
    """
    if isinstance(data, tuple) and len(data) > 3:
        raise ValueError(f"Expected x, (x, y) or (x, y, sample_weight). Received: a tuple of {len(data)} elements")
    if isinstance(data, (tuple, dict)) or hasattr(data, "shape"):
        arrays = keras.tree.map_structure(_as_array, data)
        batches = [
            keras.tree.map_structure(lambda a, at=at: None if a is None else a[at], arrays)
            for at in _slices(count_samples(arrays), steps, batch_size, towers, one_size)
        ]
    else:
        batches = list(itertools.islice(_iterated(data), steps))
    if not batches:
        raise ValueError(f"Expected data with at least one batch. Received: none from {shown(data)}")
    made = [keras.tree.map_structure(to_tensor, keras.utils.unpack_x_y_sample_weight(batch)) for batch in batches]
    return list(itertools.islice(itertools.cycle(made), steps))


def rows_at(batch: Any, places: Sequence[int]) -> Any:
    """Return these rows of a batch of dense, ragged or sparse tensors."""

    def taken(leaf: Any) -> Any:
        if leaf is None or len(leaf.shape) == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            rest, sizes = [0] * (len(leaf.shape) - 1), leaf.shape[1:]
            return tf.sparse.concat(0, [tf.sparse.slice(leaf, [i, *rest], [1, *sizes]) for i in places])
        return tf.gather(leaf, places)

    return tf.nest.map_structure(taken, batch)


def _iterated(data: Any) -> Iterable:
    if isinstance(data, keras.utils.PyDataset):
        return map(data.__getitem__, itertools.count() if data.num_batches is None else range(data.num_batches))
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise TypeError(
            "Expected arrays x, (x, y) or (x, y, sample_weight), a tf.data.Dataset, or an iterable over batches. "
            f"Received: {shown(data)} of type {type(data).__name__}"
        )
    return data


def _slices(rows: int, steps: int, batch_size: int, towers: int, one_size: bool) -> list[slice]:
    end = rows - rows % batch_size if one_size and rows > batch_size else rows
    batches = [slice(begin, min(begin + batch_size, end)) for begin in range(0, end, batch_size)]
    *others, last = itertools.islice(itertools.cycle(batches), steps)
    if others and not one_size and all((one.stop - one.start) % towers == 0 for one in (*others, last)):
        last = slice(last.start, last.stop - 1)
    return [*others, last]


def _as_array(leaf: Any) -> Any:
    if hasattr(leaf, "to_numpy"):
        leaf = leaf.to_numpy()
    if leaf is not None and not len(getattr(leaf, "shape", ())):
        raise TypeError(
            "Expected arrays with one row per sample, as x, (x, y) or (x, y, sample_weight). "
            f"Received: {shown(leaf)} of type {type(leaf).__name__}"
        )
    return leaf
