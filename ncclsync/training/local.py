"""Let each process read its own part of the data: `Local`.

The batch stays the global batch. Each of several processes has the rows of its own towers alone, and the number of rows
of every tower.
"""

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import ProcessError, shown
from ncclsync.sharding.shards import shard_sizes, sizes_in_graph
from ncclsync.towers.feeding import CountingDataset
from ncclsync.training.arguments import check_whole

_ENDLESS = 1 << 62  # samples
_COUNTED = (
    "Tell how many there are, by dataset.apply(tf.data.experimental.assert_cardinality(samples)), or let them have no "
    "end, by dataset.repeat() and steps_per_epoch="
)


class Local(tf_compat.SameDataset):
    """Batch the samples that this process reads, as its part of the data; a `tf.data.Dataset` for Keras.

    ```python
    files = tf.data.Dataset.from_tensor_slices(names).shard(model.towers.processes, model.towers.process)
    samples = files.interleave(tf.data.TFRecordDataset).map(parsed)
    samples = samples.apply(tf.data.experimental.assert_cardinality(count))
    model.fit(ncclsync.Local(samples, batch_size=256), epochs=5)
    ```

    A batch has the rows of all processes, in the order of the processes, each of which gives its towers' share of
    `batch_size`. So `fit`, `evaluate` and `predict` do what one device does with the batches of all processes
    concatenated. A process whose part ends earlier has no rows in the last batches. In one process this is
    `dataset.batch(batch_size)`.

    Attributes:
        batch_size: as given.
    """

    def __init__(self, dataset: tf.data.Dataset, *, batch_size: int) -> None:
        """Take the samples.

        Args:
            dataset: of this process' samples, not batched: dense tensors, in any structure that Keras takes. With
                several processes it must know their number, or have no end.
            batch_size: rows of the global batch.

        Raises:
            TypeError: `dataset` is no dataset of dense tensors, or `batch_size` no whole number.
            ValueError: `batch_size` is below 1.
        """
        given = dataset if isinstance(dataset, tf.data.Dataset) else type(dataset)
        specs = tf.nest.flatten(dataset.element_spec) if given is dataset else [None]
        if not all(isinstance(one, tf.TensorSpec) for one in specs):
            raise TypeError(
                "Expected a tf.data.Dataset of dense tensors, a sample each, as tf.data.Dataset.from_tensor_slices "
                f"makes it of arrays. Received: {given!r}"
            )
        check_whole("batch_size", batch_size, 1)
        super().__init__(dataset.batch(batch_size))
        self.batch_size, self._samples = int(batch_size), dataset
        self._made: dict[Any, LocalRows] = {}  # by the parts of all processes; kept, since steps read their variables

    @property
    def samples(self) -> int:
        """Return the number of this process' samples in a pass; `_ENDLESS` if they have no end.

        Raises:
            ValueError: the dataset does not know.
        """
        count = int(self._samples.cardinality())
        if count == tf.data.UNKNOWN_CARDINALITY:
            raise ValueError(
                f"Expected Local to have a known number of samples. Received: {self._samples!r}. {_COUNTED}"
            )
        return _ENDLESS if count == tf.data.INFINITE_CARDINALITY else count

    def of_process(self, process: int, parts: Sequence[tuple[int, int, int]], *, is_given: bool = False) -> "LocalRows":
        """Return the batches of all processes, of which this one reads its rows.

        Args:
            process: its number.
            parts: for each process, its number of samples in a pass, its number of towers, and its batch size.
            is_given: whether steps are given the batches, in place of an iterator.

        Raises:
            ProcessError: these parts do not make batches.
        """
        given, towers, batch_sizes = (list(column) for column in zip(*parts, strict=True))
        begins = list(itertools.accumulate(towers, initial=0))
        sizes = shard_sizes(self.batch_size, begins[-1])
        rows = [sum(sizes[begin:end]) for begin, end in itertools.pairwise(begins)]
        batches = [_batches(*pair) if pair[1] else 0 for pair in zip(given, rows, strict=True)]
        remedy = None
        if len(set(batch_sizes)) > 1:
            remedy = "the same batch_size in all processes, the global one"
        elif not all(batches):
            remedy = f"samples, and rows of each batch, for each of {len(parts)} processes"
        elif max(batches) > batches[0] or len({one == _ENDLESS for one in batches}) > 1:
            remedy = "as many batches in process 0 as in any other: give it the largest part, and let all end, or none"
        if remedy is not None:
            said = [
                f"process {i}: {'samples without an end' if samples == _ENDLESS else f'{samples} samples'} for {count} "
                f"towers, batch_size={size}"
                for i, (samples, count, size) in enumerate(parts)
            ]
            raise ProcessError(f"Expected {remedy}. Received: {'; '.join(said)}")
        key = process, is_given, tuple(zip(given, rows, towers, strict=True))
        if key not in self._made:
            with tf.device("/CPU:0"):
                self._made[key] = LocalRows(self._samples, *key)
        return self._made[key]


def check_alone(data: Any) -> None:
    """Raise ValueError if data for Keras is a dataset made of a `Local`, and not the `Local` itself."""
    made_of = tf_compat.datasets_of(data)[1:] if isinstance(data, tf.data.Dataset) else []
    if any(isinstance(one, Local) for one in made_of):
        raise ValueError(
            "Expected, in several processes, the Local itself, and no dataset that prefetch(), map() or batch() makes "
            f"of it. Received: {shown(data)}. Give the Local itself to fit, and map, shuffle or prefetch the samples "
            "before: ncclsync.Local(samples.map(parsed), batch_size=...)"
        )


def _batches(samples: int, rows: int) -> int:
    """Return the number of batches of a process' samples; `_ENDLESS` if these have no end."""
    return _ENDLESS if samples == _ENDLESS else math.ceil(samples / rows)


class LocalRows(CountingDataset):
    """Give this process' rows of each batch, and in `sizes` each tower's number of rows.

    A process without rows in a batch gets one row to compute on.
    """

    def __init__(
        self, samples: tf.data.Dataset, process: int, is_given: bool, parts: tuple[tuple[int, int, int], ...]
    ) -> None:
        """Make the batches.

        Args:
            samples: of this process.
            process: its number.
            is_given: see `Local.of_process`.
            parts: [processes] numbers of samples in a pass, rows in a full batch, and towers.
        """
        given, rows, towers = zip(*parts, strict=True)
        self._parts, self._batches = parts, _batches(given[0], rows[0])
        held, self._lock = _held_sizes(sum(towers), is_given)
        self.sizes = held

        def rows_of(number: tf.Tensor) -> tf.Tensor:
            """Return [processes] the rows of each in a batch."""
            left = tf.constant(given, tf.int64) - number * tf.constant(rows, tf.int64)
            return tf.cast(tf.clip_by_value(left, 0, tf.constant(rows, tf.int64)), tf.int32)

        def with_rows(kept: Any, numbered: Any) -> Any:
            """Return the last row that was read, and the batch; if the samples have ended, that row in its place."""
            number, batch = numbered
            has_rows = rows_of(number)[process] > 0
            batch = tf.nest.map_structure(lambda one, row: tf.cond(has_rows, lambda: one, lambda: row), batch, kept)
            return tf.nest.map_structure(lambda one: one[-1:], batch), (number, batch)

        def handed_out(number: tf.Tensor, batch: Any) -> Any:
            each = zip(tf.unstack(rows_of(number)), towers, strict=True)
            sizes = tf.concat([sizes_in_graph(own_rows, among) for own_rows, among in each], 0)
            with tf.control_dependencies([held.assign(sizes)]):
                return tf.nest.map_structure(tf.identity, batch)

        own = samples.batch(rows[process])
        missing = self._batches - _batches(given[process], rows[process])
        if missing:
            nothing = tf.nest.map_structure(_nothing, own.element_spec)
            none = tf.data.Dataset.from_tensors(nothing).repeat(missing)
            numbered = own.concatenate(none).enumerate().scan(nothing, with_rows)
        else:
            numbered = own.enumerate()
        super().__init__(numbered, handed_out)

    def cardinality(self) -> tf.Tensor:
        """Return the number of batches of a pass."""
        return tf.constant(tf.data.INFINITE_CARDINALITY if self._batches == _ENDLESS else self._batches, tf.int64)

    def digest(self) -> bytes:
        """Return a digest of all processes' parts; see `CountingDataset`."""
        return repr(self._parts).encode()

    def fetching(self, feeder: object) -> contextlib.AbstractContextManager[Any]:
        """Let one feeder at a time fetch a batch, and read its `sizes`; see `CountingDataset`."""
        return self._lock


@functools.cache
def _held_sizes(towers: int, is_given: bool) -> tuple[tf.Variable, threading.Lock]:
    """Return the `sizes` of all `LocalRows` of equally many towers, which graphs read, and its lock.

    A feeder holds the lock while it fetches a batch and reads the variable. Steps that are given batches, as those of
    `predict`, have another variable, which no feeder writes.
    """
    return tf.Variable(tf.zeros([towers], tf.int32), trainable=False), threading.Lock()


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    """Return one row of zeros, of a shape that fits."""
    return tf.zeros([1, *(size or 1 for size in spec.shape[1:])], spec.dtype)
