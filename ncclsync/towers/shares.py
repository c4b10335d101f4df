"""Share a batch among towers that differ in speed: by weights that are given, or measured over the first steps.

The weights lie in a variable, which the graphs that split batches read: new weights need no new trace.
"""

import logging
import statistics
from collections.abc import Sequence

import tensorflow as tf

from ncclsync.ops.spans import Measured, MeasuredStep, TimedSpan
from ncclsync.sharding.shards import shard_sizes
from ncclsync.towers.feeding import AHEAD
from ncclsync.towers.options import AUTO

logger = logging.getLogger("ncclsync")

MOST_CALLS = 20  # of a step, to be watched
_ROUNDS, _STEPS = 4, 3  # rounds of measuring, steps of a round
_GAIN = 1.05  # times of a smaller ratio count as equal
_SUM = 1000  # of measured weights


class Shares:
    """Hold the weights by which the towers share each batch; measure them, if asked.

    A round of measuring is a few steps of equally many rows. Each tower's rows per second are its weight in the next
    round: costs that do not depend on the rows, such as launches, distort the weights less each time. When all towers
    take equally long, or after `_ROUNDS`, the weights with which the slowest tower was fastest stay.
    """

    def __init__(self, given: Sequence[int] | str, devices: Sequence[str]) -> None:
        """Begin with the given weights of the towers on these devices, or with equal weights for "auto".

        Raises:
            ValueError: the number of weights is not that of the towers.
        """
        if given != AUTO and len(given) != len(devices):
            raise ValueError(
                f"Expected shares for each of {len(devices)} towers, in the order of the devices, {list(devices)}. "
                f"Received: shares={list(given)}. Write shares={[*given, *[1] * len(devices)][: len(devices)]}, or "
                f"towers={len(given)}"
            )
        self._devices = devices
        self._left = MOST_CALLS if given == AUTO else 0
        self._skipped = self._rows = 0
        self._times: list[list[int]] = []  # [steps][towers] ns, of this round
        self._rounds: list[tuple[float, tuple[int, ...]]] = []  # the slowest tower's time, in ns, and the weights
        weights = (1,) * len(devices) if isinstance(given, str) else tuple(given)
        with tf.device("/CPU:0"):
            self.variable = tf.Variable(weights, dtype=tf.int32, trainable=False)  # [towers]

    @property
    def weights(self) -> tuple[int, ...]:
        """Return [towers] the weights."""
        return tuple(self.variable.numpy().tolist())

    @property
    def settled(self) -> bool:
        """Return whether the weights stay as they are."""
        return self._left == 0

    def measure(self, measured: Measured) -> None:
        """Take in the timestamps of a call of a training step; change the weights when a round is complete."""
        self._left -= 1
        for step in measured.steps[1:] if measured.traced else measured.steps:
            if self._skipped:
                self._skipped -= 1
            elif step.complete and step.samples >= self._rows:
                self._add(step)
        if len(self._times) >= _STEPS:
            self._end_round()
        if self._left == 0:
            self._settle()

    def _add(self, step: MeasuredStep) -> None:
        """Take in a step of as many rows as before; a step of more rows begins anew."""
        if not all(shard_sizes(step.samples, len(self.weights), self.weights)):
            return
        if step.samples > self._rows:
            self._rows, self._times, self._rounds = step.samples, [], []
        self._times.append(tower_times(step, len(self.weights)))

    def _end_round(self) -> None:
        times = [max(1.0, statistics.median(column)) for column in zip(*self._times, strict=True)]
        self._times = []
        self._rounds.append((max(times), self.weights))
        if max(times) < _GAIN * min(times) or len(self._rounds) == _ROUNDS:
            self._left = 0
            return
        sizes = shard_sizes(self._rows, len(times), self.weights)
        rates = [rows / time for rows, time in zip(sizes, times, strict=True)]
        self.variable.assign([max(1, round(_SUM * rate / sum(rates))) for rate in rates])
        self._skipped = AHEAD  # batches that are split by the old weights already

    def _settle(self) -> None:
        if self._rounds:
            first, (fastest, weights) = self._rounds[0], min(self._rounds)
            self.variable.assign(weights if _GAIN * fastest < first[0] else first[1])
        devices = ", ".join(self._devices)
        logger.info("shares='auto': from now on as shares=%s, by the times of %s", list(self.weights), devices)


def tower_times(step: MeasuredStep, towers: int) -> list[int]:
    """Return how long each tower has computed in a step, in ns, without the update, whose time no rows change.

    On GPUs a segment's begin is recorded when it is enqueued. It runs after the tower's previous segment; if it takes
    an exchange, after the previous segment of all towers.
    """
    by_tower: list[list[TimedSpan]] = [[] for _ in range(towers)]
    for one in step.spans:
        if isinstance(one.span.row, int) and "meets" in one.span.details:
            by_tower[one.span.row].append(one)
    segments = list(zip(*by_tower, strict=True))
    times, ends = [0] * towers, [0] * towers
    for segment in segments[:-1] or segments:
        met = max(ends) if segment[0].span.details["meets"] else 0
        for i, one in enumerate(segment):
            times[i] += one.end_ns - max(one.begin_ns, ends[i], met)
        ends = [one.end_ns for one in segment]
    return times
