"""Know whose rows a process reads, and check that all processes read the same batches."""

import weakref

import tensorflow as tf

from ncclsync.communicator.peers import SAME_ROWS
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import ProcessError
from ncclsync.sharding.shards import digest_of_rows
from ncclsync.towers.feeding import CountingDataset
from ncclsync.towers.recovery import KeptBatch
from ncclsync.towers.state import TowerState

# Batches of an iterator, or of single calls, that processes compare if their step itself does not: the first two, and
# every 50th. A comparison takes about a millisecond.
_COMPARED, _EVERY = 2, 50


class Reading:
    """Follow where a step's batches come from."""

    def __init__(self, towers: TowerState) -> None:
        """Begin without batches."""
        self._towers = towers
        self._compared: weakref.ref[tf.data.Iterator] | None = None  # whose batches processes compare; None: calls'
        self._number = 0  # of the last of these batches
        self._read: weakref.ref[CountingDataset] | None = None  # see `own_rows`

    @property
    def own_rows(self) -> CountingDataset | None:
        """Return the dataset of the batches, if each process reads its own rows; its reader keeps it alive."""
        return None if self._read is None else self._read()

    def from_iterator(self, iterator: tf.data.Iterator) -> None:
        """The next batch is an iterator's."""
        if self._towers.layout.meets_processes and (self._compared is None or self._compared() is not iterator):
            self._compared, self._number = weakref.ref(iterator), 0
            counting = [one for one in tf_compat.datasets_of(iterator) if isinstance(one, CountingDataset)]
            self._read = next((weakref.ref(one) for one in counting if one.digest() is not None), None)

    def from_call(self) -> None:
        """The next batch is given by a call."""
        given = self._towers.own_rows
        self._compared, self._read = None, None if given is None else weakref.ref(given)

    def compare(self, kept: KeptBatch) -> None:
        """Check that all processes have run a step on the same batch, which is kept, unless the step itself checks it.

        Raises:
            ProcessError: they have not.
        """
        communicator, own = self._towers.communicator, self.own_rows
        if not self._towers.layout.meets_processes or (communicator.compares_batches and own is None):
            return
        self._number += 1
        if self._number > _COMPARED and (self._number % _EVERY or own is not None):
            return
        digest = digest_of_rows(kept.batch()) if own is None else own.digest()
        digests = communicator.exchange(digest, "the comparison of batches")
        other = next((i for i, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise ProcessError(
                f"Expected all processes to read the same batches. Received: other rows in process {other} than in "
                f"process 0, in batch {self._number}{' or before' * (self._number > _COMPARED)}. {SAME_ROWS}"
            )
