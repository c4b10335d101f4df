"""Put towers together: a session, the replicas of one model's state, and the watch over them."""

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclsync.communicator import shared
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclSyncError, ProcessError, remedied
from ncclsync.gradients.compression import ErrorFeedback
from ncclsync.towers.feeding import CountingDataset
from ncclsync.towers.layout import Layout
from ncclsync.towers.options import MOST_TOWERS, TowerOptions
from ncclsync.towers.placement import device_models
from ncclsync.towers.printed import plain_text, table
from ncclsync.towers.replicas import Replicas
from ncclsync.towers.session import Session
from ncclsync.towers.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("ncclsync")


ENTERED: list["weakref.ref[TowerState]"] = []  # those whose `with` is under way, the innermost last


class TowerState:
    """Hold N replicas of one model's state, one per device: `Towers` without the steps that they run."""

    def __init__(self, options: TowerOptions) -> None:
        """Choose devices and backend, and join them; see `Session`."""
        self.options = options
        self.session = Session(options)
        self.communicator = self.session.communicator
        self.replicas = Replicas(self.session)
        self.watch = Watch(self.session, self.replicas)
        self.compression = None if options.compression is None else ErrorFeedback()
        self.own_rows: CountingDataset | None = None  # see `given_rows_of`

    def __len__(self) -> int:
        """Return the number of towers in all processes."""
        return self.layout.towers

    @property
    def layout(self) -> Layout:
        """Return the layout of the next step's batch."""
        return self.session.layout

    def split_further(self, rows: int) -> bool:
        """Split steps into twice as many shards from now on, since a batch of `rows` did not fit the memory.

        Return False, after a warning that says why, if they cannot be split further.
        """
        count, why = self.layout.shards, ""
        if count >= rows:
            why = "each shard has one row"
        elif self.options.shards is not None:
            why = f"the bits belong to shards={count}. Choose more shards, or a smaller batch"
        elif 2 * count > MOST_TOWERS:
            why = f"{count} shards are the most"
        begin = f"A batch of {rows} rows does not fit the memory"
        if why:
            logger.warning('%s, and on_oom="split" divides it no further: %s', begin, why)
            return False
        self.replicas.forget_shards()
        self.session.split()
        most = max(map(len, self.layout.places))
        logger.warning(
            "%s: from now on it is computed in %d shards, up to %d of them on each tower, one after another. A smaller "
            "batch, or shards=%d from the start, saves the attempt",
            *(begin, 2 * count, most, 2 * count),
        )
        return True

    def given_rows_of(self, data: CountingDataset) -> contextlib.AbstractContextManager[None]:
        """Return a context whose steps are given batches of `data`, of which each process reads its own rows."""
        return tf_compat.members_replaced(self, own_rows=data)

    def __repr__(self) -> str:
        state = ", closed" if self.session.closed else ""
        return f"<Towers {len(self)} on {', '.join(self.layout.devices)}, backend {self.session.backend}{state}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show a table where a cell of a notebook ends in these towers, as IPython asks."""
        devices = self.layout.devices
        rows = zip(self.layout.ranks, devices, device_models(devices), strict=True)
        printer.text(f"{self!r}\n{plain_text(table(('tower', 'device', 'model'), rows))}")

    def __enter__(self) -> "Self":
        """Return these towers; the end of the `with` closes them.

        Raises:
            NcclSyncError: an earlier `with` has closed them.
        """
        self.session.require_open()
        ENTERED.append(weakref.ref(self))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled and copied, by a TypeError."""
        raise TypeError(
            "Expected towers to stay in the process that made them: they hold devices, a communicator and "
            f"copies of variables. Received: {self!r}, to be pickled or copied. Pickle the model, which is "
            "then a plain one, or its factory, and call the decorated factory or Towers(...) anew."
        )

    def close(self) -> None:
        """See `Towers.close`."""
        ENTERED[:] = [one for one in ENTERED if one() not in (None, self)]
        session, replicas, failure = self.session, self.replicas, None
        try:
            session.failures.settle()
        except NcclSyncError as error:  # raised when all is closed
            failure = error
        session.close()
        if replicas.sharding is not None:
            replicas.sharding.release()
        with contextlib.ExitStack() as ends:  # each, whatever fails before
            ends.callback(session.speak_again)
            ends.callback(shared.leave, session.failures, session.communicator)
            ends.callback(replicas.close)
            # Other processes may have ended, or may not close their towers now.
            with contextlib.suppress(ProcessError) if self.layout.meets_processes else contextlib.nullcontext():
                replicas.add_up_parts()
        if failure is not None:
            raise failure

    def get_weights(self, tower: int) -> list[np.ndarray]:
        """Return a tower's weights as arrays, in the order of `model.get_weights()`.

        Raises:
            ValueError: this process has no such tower.
        """
        ranks, model = self.layout.ranks, self.session.model
        if isinstance(tower, bool) or not isinstance(tower, (int, np.integer)) or tower not in ranks:
            raise ValueError(f"Expected a tower from {ranks[0]} to {ranks[-1]}. Received: {tower!r}")
        with self.telling():
            self.replicas.sync()
            self.session.failures.settle()
            first = self.layout.places[ranks.index(tower)][0]
            weights = self.replicas.variables if model.weights is None else model.weights()
            return [self.replicas.of_shards(tf_compat.backend_variable(v))[first].numpy() for v in weights]

    @remedied("Write towers.broadcast(): it sends tower 0's variables, or write ops.broadcast(x, root=0) in a step")
    def broadcast(self) -> None:
        """Send tower 0's variables to all towers, now. Collective."""
        self.session.require_open()
        self.session.require_eager("Towers.broadcast")
        with self.telling():
            self.replicas.send()

    @remedied("Write towers.divergence()")
    def divergence(self) -> float:
        """Return the largest absolute difference between any tower and tower 0; 0.0 in health.

        All variables that must be identical are compared: weights, optimizer state, moving statistics; not metric state
        and random seeds, which differ by design. Values that Python wrote into tower 0 since the last step are sent
        first. Equal NaNs do not differ; a NaN is infinitely far from a number.
        """
        with self.telling():
            return self.watch.divergence()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Report errors of the body to the other processes; all can go on from tower 0's state."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if self.layout.meets_processes:
                self.replicas.mark_stale()
                self.session.failures.tell(error)
            raise
