"""Shuffle arrays in an order for each pass that depends on the seed alone: `Shuffled`.

It knows its position, to the sample; `backup.py` stores and restores it.
"""

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ncclsync.sharding.shards import digest_of_rows
from ncclsync.towers.feeding import CountingDataset
from ncclsync.towers.layout import Layout
from ncclsync.training.arguments import check_whole, count_samples


class Position(NamedTuple):
    """Name a position in the data: `samples` of pass `epoch` were handed out, but not all."""

    epoch: int
    samples: int


class Shuffled(CountingDataset):
    """Batch arrays, in a new random order in each pass; a `tf.data.Dataset` for `fit`.

    ```python
    data = ncclsync.Shuffled(x, y, batch_size=256, seed=1)
    model.fit(data, epochs=5)
    ```

    Keras may warn that its own `shuffle=True`, the default, has no effect on a dataset; `fit(data, shuffle=False)` is
    the same without the warning.

    The order of a pass depends on the seed and the number of the pass alone: not on towers, batch size,
    machine, or versions of TensorFlow and NumPy. Towers divide each batch in this order. A last, smaller
    batch is kept. A new iteration begins the next pass if the previous pass has ended, and otherwise repeats that pass
    from where it began. So `fit` trains a pass per epoch, and a second `fit` goes on with the next pass; `seek` goes to
    another pass. One consumer at a time may iterate.

    Arrays are held in memory, as TensorFlow's tensors. For data that do not fit into memory, let `x` be indices or file
    names, and `load` read a sample:

    ```python
    def load(name, label):
        return tf.image.decode_jpeg(tf.io.read_file(name)), label

    data = ncclsync.Shuffled(names, labels, batch_size=256, seed=1, load=load)
    ```

    If several processes train together, each then loads only its own towers' rows. Put other changes to the batches
    into the model. `data.map(...)` keeps the order, too, but each process makes the whole batch, and a run cannot be
    resumed in the middle of a pass; nor can a run with `class_weight`: give `sample_weight` here instead.

    Attributes:
        batch_size, seed: as given.
        rows: the number of samples.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int,
        seed: int,
        load: Callable[..., Any] | None = None,
    ) -> None:
        """Take the arrays.

        Args:
            x, y, sample_weight: arrays or dense tensors of any dtype, or nested structures of them, which
                share their first dimension, the samples; None within one stays None, for an optional input.
                A batch is `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
            batch_size: samples of a batch; the global batch, if there are towers.
            seed: a whole number from 0.
            load: a function of a sample's `x`, `y` and `sample_weight`, as far as given, without the first dimension.
                It returns the sample to batch instead, `x` or a tuple such as `(x, y)`, of equal shapes for all
                samples. It is called in a graph, for several samples in parallel.

        Raises:
            TypeError: `batch_size` or `seed` is no whole number, or `load` no function.
            ValueError: `batch_size` or `seed` is too small; arrays have no samples, or different numbers of samples.
        """
        check_whole("batch_size", batch_size, 1)
        check_whole("seed", seed, 0)
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        if load is not None and not callable(load):
            raise TypeError(f"Expected load to be a function of a sample. Received: {load!r}")
        if y is None and sample_weight is not None:
            raise ValueError("Expected y where sample_weight is given. Received: y=None")
        given = tuple(part for part in (x, y, sample_weight) if part is not None)
        with tf.device("/CPU:0"):
            arrays = _map_arrays(tf.convert_to_tensor, keras.tree.lists_to_tuples(given))
            self.rows = count_samples(arrays)
            self._epoch, self._first = 0, 0  # of the current or next pass: its number, and the sample it begins at
            self._seen = tf.Variable(0, dtype=tf.int64, trainable=False)  # samples of the pass that were handed out
            self._pass = tf.Variable(0, dtype=tf.int64, trainable=False)  # the number of the iteration that counts
            # If a feeder fetches ahead: the place that steps have reached; the feeder; the feeder that is fetching now.
            self._taken: tuple[int, int, int] | None = None
            self._feeder: object = None
            self._fetching: object = None
            self._lock = threading.Lock()
            self._arrays, self._load = arrays, load
            super().__init__(self._pipeline(Layout()), self.counted)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy the arrays and the place in them; the tf.data pipeline is made anew."""
        arrays = _map_arrays(lambda array: array.numpy(), self._arrays)
        made = functools.partial(type(self), batch_size=self.batch_size, seed=self.seed, load=self._load)
        return made, arrays, self._place()

    def __setstate__(self, place: tuple[int, int, int]) -> None:
        """Unpickle the place."""
        self._epoch, self._first, seen = place
        self._seen.assign(seen)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of pass `epoch`: int64 indices of the samples, [rows].

        It sorts 64 random bits per sample: NumPy promises to keep the streams of its bit generators, but neither NumPy
        nor TensorFlow promises to keep its shuffles. Source: NEP 19, numpy.org/neps/nep-0019-rng-policy.html.
        """
        bits = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
        return np.argsort(bits.random_raw(self.rows), kind="stable")

    @property
    def position(self) -> Position:
        """Return the position after the last batch that was handed out."""
        epoch, _, seen = self._place()
        return Position(epoch + 1, 0) if seen == self.rows else Position(epoch, seen)

    @property
    def upcoming(self) -> Position:
        """Return where the next iteration begins."""
        return self._upcoming(self._place())

    def seek(self, epoch: int, samples: int = 0) -> None:
        """Let the next iteration begin in pass `epoch`, after its first `samples` samples.

        Raises:
            ValueError: there is no such place.
        """
        if epoch < 0 or not 0 <= samples <= self.rows:
            raise ValueError(f"Expected an epoch from 0 and 0 to {self.rows} samples. Received: {epoch} and {samples}")
        self._go(epoch, samples, samples)
        self._taken = None

    def cardinality(self) -> tf.Tensor:
        """Return the number of batches in a whole pass, an int64 scalar."""
        return tf.constant(math.ceil(self.rows / self.batch_size), tf.int64)

    @contextlib.contextmanager
    def fetching(self, feeder: object) -> Iterator[None]:
        """Let one feeder at a time fetch a batch; see `CountingDataset`."""
        with self._lock:
            self._fetching = feeder
            try:
                yield
            finally:
                self._fetching = None

    def fetched(self) -> tuple[int, int, int]:
        """Return the place after the last fetched batch."""
        return self._epoch, self._first, int(self._seen.numpy())

    def hand_out(self, place: tuple[int, int, int]) -> None:
        """Let `place` be the position, until another iterator begins."""
        self._taken = place

    def _place(self) -> tuple[int, int, int]:
        return self._taken or self.fetched()

    def _go(self, epoch: int, first: int, seen: int) -> np.int64:
        """Begin an iteration; return its number."""
        self._epoch, self._first = epoch, first
        number = self._pass.assign_add(1)
        self._seen.assign(seen)
        return np.int64(number.numpy())

    def _upcoming(self, place: tuple[int, int, int]) -> Position:
        epoch, first, seen = place
        return Position(epoch + 1, 0) if seen == self.rows else Position(epoch, first)

    def of_process(self, layout: Layout) -> CountingDataset:
        """Return the same batches, of which only one process' rows are read; they move this object's position."""
        with tf.device("/CPU:0"):
            own = CountingDataset(self._pipeline(layout), self.counted)
        counting = {name: getattr(self, name) for name in ("fetching", "fetched", "hand_out", "cardinality")}
        own.__dict__.update(counting, digest=self.digest_of_place)
        return own

    def digest_of_place(self) -> bytes:
        """Return a digest of some rows, the seed and the begin of the pass, equal in processes that run the same pass.

        The position in the pass is left out: a dataset made of this one, as for `class_weight`, may fetch ahead.
        """
        epoch, first, _ = self._place()
        place = repr((self.batch_size, self.seed, epoch, first)).encode()
        return hashlib.blake2b(digest_of_rows(self._arrays) + place, digest_size=16).digest()

    def _pipeline(self, layout: Layout) -> tf.data.Dataset:
        """Return the numbered batches of an iteration, with copies in the places of other processes' rows."""

        def rest_of_pass(_):
            order, begun = tf.numpy_function(self._begin, [], [tf.int64, tf.int64])
            order, begun = tf.ensure_shape(order, [None]), tf.ensure_shape(begun, [])
            total = tf.size(order, tf.int64)

            def rows_read(begin):
                """Return where the rows begin and end that are read of a batch, and its number of rows."""
                rows = tf.minimum(total - begin, self.batch_size)
                own, end = layout.own_rows(rows)
                has_none = own == end  # towers without rows compute on the batch's first row
                return tf.where(has_none, tf.zeros_like(own), own), tf.where(has_none, tf.ones_like(end), end), rows

            def stand_ins(begin):
                """Return, for each row of a batch, the nearest row that is read."""
                own, end, rows = rows_read(begin)
                return tf.clip_by_value(tf.range(rows), own, end - 1)

            def taken(indices):
                return _map_arrays(lambda array: tf.gather(array, indices), self._arrays)

            begins, load = tf.data.Dataset.range(0, total, self.batch_size), self._load
            if load is None:

                def batch_of(begin):
                    return begun, taken(tf.gather(order, begin + stand_ins(begin)))

                return begins.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE)

            def samples_of(begin):
                own, end, _ = rows_read(begin)
                return tf.data.Dataset.from_tensor_slices(order[begin + own : begin + end])

            def loaded(index):
                batch = keras.tree.lists_to_tuples(load(*taken(index)))
                return batch if isinstance(batch, tuple) else (batch,)

            def completed(begin, batch):
                places = stand_ins(begin) - rows_read(begin)[0]
                return begun, _map_arrays(lambda array: tf.gather(array, places), batch)

            # The number of rows read of each batch but the last, of which no more are read.
            sizes = layout.sizes_of(self.batch_size)
            rows = sum(sizes[shard] for shard in layout.own_shards)
            samples = begins.flat_map(samples_of).map(loaded, num_parallel_calls=tf.data.AUTOTUNE)
            return tf.data.Dataset.zip(begins, samples.batch(max(1, rows))).map(completed)

        return tf.data.Dataset.from_tensors(0).flat_map(rest_of_pass)

    def counted(self, begun: tf.Tensor, batch: Any) -> Any:
        """Count a batch that is handed out by the iteration of this number."""
        first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
        rows = tf.shape(first, tf.int64)[0]
        rows = tf.where(begun == self._pass, rows, 0)  # an abandoned iterator may still fetch
        with tf.control_dependencies([self._seen.assign_add(rows)]):
            return _map_arrays(tf.identity, batch)

    def _begin(self) -> tuple[np.ndarray, np.int64]:
        """Begin an iteration, for its first batch; return the order of the pass' remaining samples, and its number."""
        if self._fetching is not self._feeder:  # another iterator: batches fetched for the earlier one are dropped
            if self._taken is not None:
                self._go(*self._taken)
            self._feeder, self._taken = self._fetching, None
        epoch, samples = self._upcoming(self.fetched())
        number = self._go(epoch, samples, samples)
        if self._feeder is not None and self._taken is None:
            self._taken = self.fetched()
        return self.order(epoch)[samples:], number


def _map_arrays(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Call `function` on each array of a nested structure; None stays None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), arrays)
