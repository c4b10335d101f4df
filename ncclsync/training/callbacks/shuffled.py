"""Shuffle arrays in one order per pass, which depends on the seed and on nothing else: `Shuffled`.

It knows where it stands, to the sample; `backup.py` stores that and brings it back.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ncclsync.towers.feeding import CountingDataset


class Position(NamedTuple):
    """Name a place in the data: `samples` of pass `epoch` have been handed out, and not all of them."""

    epoch: int
    samples: int


class Shuffled(CountingDataset):
    """Batch arrays, each pass over them in a random order of its own; a `tf.data.Dataset` for `fit`.

    ```python
    data = ncclsync.Shuffled(x, y, batch_size=256, seed=1)
    model.fit(data, epochs=5)
    ```

    The order of a pass depends on the seed and the number of the pass alone: not on towers, batch size,
    machine, or versions of TensorFlow and NumPy. Towers divide each batch in this order. A last, smaller
    batch is kept. A new iteration begins the next pass if the one before has come to its end; else it begins
    that pass again, where that had begun. So `fit` trains a pass per epoch, and a second `fit` goes on with
    the next pass; `seek` goes to any other. It can be iterated by one consumer at a time.

    Arrays are held in memory, as TensorFlow's tensors. Changes to the batches belong into the
    model, or into `data.map(...)`, which keeps the order, but cannot be resumed in the middle of a pass; nor
    can `fit(class_weight=...)`, in whose place `sample_weight` can be given here. Data that do not fit into
    memory: let `x` be indices or file names, and read what they mean in `map`.

    Attributes:
        batch_size, seed: as given.
        rows: how many samples there are.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int, seed: int) -> None:
        """Take the arrays.

        Args:
            x, y, sample_weight: arrays or dense tensors of any dtype, or nested structures of them, which
                share their first dimension, the samples; None within one stays None, for an optional input.
                A batch is `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
            batch_size: samples of a batch; the global batch, if there are towers.
            seed: a whole number from 0.

        Raises:
            TypeError: `batch_size` or `seed` is no whole number.
            ValueError: one of them is too small; arrays without samples, or of different numbers of them.
        """
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"Expected {name} to be a whole number. Received: {value!r}")
            if value < least:
                raise ValueError(f"Expected {name} to be at least {least}. Received: {value}")
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        if y is None and sample_weight is not None:
            raise ValueError("Expected y where sample_weight is given. Received: y=None")
        given = tuple(part for part in (x, y, sample_weight) if part is not None)
        with tf.device("/CPU:0"):
            arrays = _map_arrays(tf.convert_to_tensor, keras.tree.lists_to_tuples(given))
            self.rows = _rows_of(arrays)
            self._epoch, self._first = 0, 0  # of the pass that runs, or will: its number, where it begins
            self._seen = tf.Variable(0, dtype=tf.int64, trainable=False)  # samples of it, with those before
            self._pass = tf.Variable(0, dtype=tf.int64, trainable=False)  # its number among all: only the last counts
            # Where a feeder fetches ahead: the same three of what a step has taken; who does, and does just now.
            self._taken: tuple[int, int, int] | None = None
            self._feeder: object = None
            self._fetching: object = None
            self._lock = threading.Lock()
            super().__init__(self._pipeline(arrays))
        self._arrays = arrays

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, and copy, the arrays and the place in them; the tf.data pipeline is made anew."""
        arrays = tf.nest.map_structure(lambda array: array.numpy(), self._arrays)
        return _restored, (type(self), arrays, self.batch_size, self.seed, self._place())

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of pass `epoch`: int64 indices of the samples, [rows].

        64 random bits are drawn per sample, and sorted. NumPy promises that its bit generators keep their
        streams; of its shuffles it does not, nor does TensorFlow of its own.
        Source: NEP 19, numpy.org/neps/nep-0019-rng-policy.html.
        """
        bits = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
        return np.argsort(bits.random_raw(self.rows), kind="stable")

    @property
    def position(self) -> Position:
        """Return where the data stand: what the last batch that was handed out has left."""
        epoch, _, seen = self._place()
        return self._normalised(epoch, seen)

    @property
    def upcoming(self) -> Position:
        """Return where the next iteration begins."""
        return self._upcoming(self._place())

    def seek(self, epoch: int, samples: int = 0) -> None:
        """Let the next iteration begin in pass `epoch`, after `samples` of its samples.

        Raises:
            ValueError: there is no such place.
        """
        if epoch < 0 or not 0 <= samples <= self.rows:
            raise ValueError(f"Expected an epoch from 0 and 0 to {self.rows} samples. Received: {epoch} and {samples}")
        self._go(epoch, samples, samples)
        self._taken = None

    def cardinality(self) -> tf.Tensor:
        """Return how many batches a whole pass has, an int64 scalar."""
        return tf.constant(math.ceil(self.rows / self.batch_size), tf.int64)

    @contextlib.contextmanager
    def fetching(self, feeder: object) -> Iterator[None]:
        """Let `feeder` fetch a batch within, alone; see `CountingDataset`."""
        with self._lock:
            self._fetching = feeder
            try:
                yield
            finally:
                self._fetching = None

    def fetched(self) -> tuple[int, int, int]:
        """Return the place after what was fetched last."""
        return self._epoch, self._first, int(self._seen.numpy())

    def take(self, place: tuple[int, int, int]) -> None:
        """Let a place be what counts, until another iterator begins."""
        self._taken = place

    def _place(self) -> tuple[int, int, int]:
        return self._taken or self.fetched()

    def _go(self, epoch: int, first: int, seen: int) -> np.int64:
        """Let a pass be the one that counts; return its number among all."""
        self._epoch, self._first = epoch, first
        number = self._pass.assign_add(1)
        self._seen.assign(seen)
        return np.int64(number.numpy())

    def _upcoming(self, place: tuple[int, int, int]) -> Position:
        epoch, first, seen = place
        return self._normalised(epoch, seen if seen == self.rows else first)

    def _normalised(self, epoch: int, seen: int) -> Position:
        return Position(epoch + 1, 0) if seen == self.rows else Position(epoch, seen)

    def _pipeline(self, arrays: Any) -> tf.data.Dataset:
        def rest_of_pass(_):
            order, begun = tf.numpy_function(self._begin, [], [tf.int64, tf.int64])
            order, begun = tf.ensure_shape(order, [None]), tf.ensure_shape(begun, [])

            def batch_of(begin):
                indices = order[begin : begin + self.batch_size]
                return begun, _map_arrays(lambda array: tf.gather(array, indices), arrays)

            begins = tf.data.Dataset.range(0, tf.size(order, tf.int64), self.batch_size)
            return begins.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE)

        def counted(begun, batch):
            rows = tf.shape(_arrays_of(batch)[0], tf.int64)[0]
            rows = tf.where(begun == self._pass, rows, 0)  # an iterator that was left may still fetch
            with tf.control_dependencies([self._seen.assign_add(rows)]):
                return _map_arrays(tf.identity, batch)

        passes = tf.data.Dataset.from_tensors(0).flat_map(rest_of_pass)
        # Counted after the prefetch: what that holds has not been handed out. TensorFlow is to add no other.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return passes.prefetch(tf.data.AUTOTUNE).map(counted).with_options(options)

    def _begin(self) -> tuple[np.ndarray, np.int64]:
        """Begin a pass; return the order of what is left of it, and its number among all.

        An iterator calls it for its first batch.
        """
        if self._fetching is not self._feeder:  # another iterator: what was fetched for an earlier one is not taken
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


def _arrays_of(structure: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _restored(
    cls: type[Shuffled], arrays: tuple[Any, ...], batch_size: int, seed: int, place: tuple[int, int, int]
) -> Shuffled:
    """Return what was pickled, where it stood."""
    data = cls(*arrays, batch_size=batch_size, seed=seed)
    data._epoch, data._first, seen = place
    data._seen.assign(seen)
    return data


def _rows_of(arrays: Any) -> int:
    shapes = [tuple(leaf.shape) for leaf in _arrays_of(arrays)]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) != 1 or not shapes[0][0]:
        raise ValueError(f"Expected arrays of the same number of samples, at least one. Received: shapes {shapes}")
    return int(shapes[0][0])
