"""Watch the training of some towers: count steps, compare variables that must be identical, register watchers."""

import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.errors import DivergenceError
from ncclsync.gradients.noise_scale import NoiseAverages
from ncclsync.gradients.nonfinite import OnNonFinite
from ncclsync.ops.comparing import checksum, distance
from ncclsync.ops.spans import Measured
from ncclsync.towers.replicas import Replicas
from ncclsync.towers.session import Session

logger = logging.getLogger("ncclsync")

Watcher = Callable[[Measured], None]


class Watch:
    """Do what `Health` asks for after a step, and hold what callbacks ask for in the next steps."""

    def __init__(self, session: Session, replicas: Replicas) -> None:
        self._session, self._replicas, self._health = session, replicas, session.options.health
        self.on_nonfinite = OnNonFinite(self._health.on_nonfinite)
        self.noise = NoiseAverages()  # inactive until a callback asks for the gradient noise scale
        self.traces: list[Any] | None = None  # of training steps, in order; None: they are not kept
        self.steps = 0  # of training
        self._audited = 0  # steps up to the last audit
        self._watchers: list[Watcher] = []

    def keep_traces(self) -> None:
        """Keep the traces of training steps from now on."""
        self.traces = []

    def add_trace(self, trace: Any) -> None:
        """Keep the trace of a training step, if that is asked for."""
        if self.traces is not None:
            self.traces.append(trace)

    def watch_next(self, watcher: Watcher) -> None:
        """Give `watcher` the timestamps of the next training step, or of all steps that the next call makes.

        The step after it is not watched, even if the watched step fails.
        """
        self._watchers.append(watcher)

    def take_watchers(self) -> list[Watcher]:
        """Return the watchers of the training step about to run: of `watch_next`, and the measuring of shares."""
        watchers, self._watchers = self._watchers, []
        shares = self._session.shares
        return watchers if shares is None or shares.settled else [*watchers, shares.measure]

    def is_audit_due(self, steps: int) -> bool:
        """Return whether the next call, of so many steps, is to be an audit."""
        every = self._health.audit_every
        return every is not None and (self.steps + steps) // every > self._audited // every

    def audited(self, steps: int) -> int:
        """Record that a call of so many steps, to be counted next, was an audit; return the count with them."""
        self._audited = self.steps + steps
        return self._audited

    def count(self, steps: int) -> None:
        """Count training steps that have run; compare the towers if that is due.

        Raises:
            DivergenceError: towers differ, and shall not be repaired, or tower 0 is wrong itself.
        """
        before, every = self.steps, self._health.check_every
        self.steps += steps
        if every is None or self.steps // every == before // every:
            return
        self._replicas.sync()
        self._session.failures.settle()
        kept = self._replicas.identical
        # Start all, each on its own device, before waiting for the first.
        checksums = [[_on_device_of(copy, checksum, copy.value()) for copy in copies] for copies in kept]
        each = self._session.communicator.exchange([[int(one) for one in row] for row in checksums], "checksums")
        found = [outliers(list(itertools.chain(*rows))) for rows in zip(*each, strict=True)]
        differing = [(copies[0], odd) for copies, odd in zip(kept, found, strict=True) if odd]
        if not differing:
            return
        names = self._session.names_of([variable for variable, _ in differing])
        error = DivergenceError(self.steps, dict(zip(names, (odd for _, odd in differing), strict=True)))
        if self._health.on_divergence != "repair" or any(0 in odd for _, odd in differing):
            raise error
        logger.warning("%s. Repaired: tower 0's values were sent to all", error)
        self._replicas.send([id(variable) for variable, _ in differing])

    def divergence(self) -> float:
        """See `TowerState.divergence`."""
        session = self._session
        self._replicas.sync()
        session.failures.settle()
        session.communicator.exchange(None, "divergence")
        largest = 0.0
        for copies in self._replicas.identical:
            variable = copies[0]
            values = [copy.value() for copy in copies]
            numbers = variable.dtype.is_floating or variable.dtype.is_integer
            if session.communicator.enqueues and numbers and self._replicas.lies_where_joined(variable):
                firsts = session.broadcast(values, "divergence")
            else:
                firsts = [session.of_tower_0(variable, "divergence")] * len(values)
            # As in `count`.
            found = [_on_device_of(copy, distance, *pair) for copy, *pair in zip(copies, firsts, values, strict=True)]
            largest = max(largest, *map(float, found))
        return max(session.communicator.exchange(largest, "divergence"))


def outliers(checksums: Sequence[int]) -> tuple[int, ...]:
    """Return the towers that differ from the majority, or, without a majority, from tower 0; given [N] checksums."""
    common, count = collections.Counter(checksums).most_common(1)[0]
    expected = common if 2 * count > len(checksums) else checksums[0]
    return tuple(tower for tower, one in enumerate(checksums) if one != expected)


def _on_device_of(variable: tf.Variable, function: Callable[..., tf.Tensor], *values: tf.Tensor) -> tf.Tensor:
    with tf.device(variable.device):
        return function(*values)
