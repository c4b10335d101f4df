"""Log samples per second, and how a step spends its time: `Throughput`."""

import time
from typing import Any

from ncclsync.ops.spans import Measured
from ncclsync.training.callbacks.base import StepWatcher


class Throughput(StepWatcher):
    """Add throughput and shares of the step's time to the logs of `fit`: to progress bar and history.

    ```python
    model.fit(x, y, callbacks=[ncclsync.Throughput()])
    ```

    Each figure is of the epoch so far, without calls that traced the step, unless there are only such calls. Put it
    before callbacks that write logs, such as `CSVLogger`. Keys of the logs:

    - `samples_per_second`: rows of the batches, over the time that `fit` takes for them, without validation.
    - `waiting_for_data`: the share of the steps' time spent waiting for the next batch.
    - `communicating`: the share in which towers exchanged tensors; on GPUs, from when the last tower has computed its
      tensors.
    - `computing`: the rest: splitting the batch, forward, backward and update of all towers.

    The three shares add up to 1. They cover the steps alone: Keras' work between two steps, with callbacks, counts only
    in the first figure.

    Attributes:
        samples: the rows that `samples_per_second` counts, in this epoch.
        seconds: the time that it counts.
    """

    async_safe = True  # for Keras: `on_train_batch_end` may be called from another thread

    def __init__(self) -> None:
        """Begin with an empty epoch."""
        super().__init__()
        self._figures: dict[str, float] = {}
        self._start()

    def _start(self) -> None:
        self._usual, self._traced = _Tally(), _Tally()
        self._last_ns = time.monotonic_ns()

    @property
    def samples(self) -> int:
        """See the class."""
        return self._tally.samples

    @property
    def seconds(self) -> float:
        """See the class."""
        return self._tally.elapsed_ns / 1e9

    @property
    def _tally(self) -> "_Tally":
        return self._usual if self._usual.samples else self._traced

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self._start()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Watch the step."""
        self.watch_next()

    def measure(self, measured: Measured) -> None:
        """Count the call's steps."""
        now = time.monotonic_ns()
        tally = self._traced if measured.traced else self._usual
        tally.add(now - self._last_ns, measured)
        self._last_ns = now
        self._figures = self._tally.figures()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Show the figures."""
        if logs is not None:
            logs.update(self._figures)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the epoch's figures."""
        if logs is not None:
            logs.update(self._figures)


class _Tally:
    """Add up some calls of the step's graph; times in ns."""

    def __init__(self) -> None:
        self.samples = self.elapsed_ns = 0
        self._step_ns = self._communicating_ns = self._waiting_ns = 0

    def add(self, elapsed_ns: int, measured: Measured) -> None:
        self.elapsed_ns += elapsed_ns
        self.samples += measured.samples
        self._step_ns += measured.step_ns
        self._communicating_ns += measured.communicating_ns
        self._waiting_ns += measured.waiting_ns

    def figures(self) -> dict[str, float]:
        whole = self._step_ns + self._waiting_ns
        if not self.samples or not whole:
            return {}
        return {
            "samples_per_second": self.samples / (self.elapsed_ns / 1e9),
            "computing": (self._step_ns - self._communicating_ns) / whole,
            "communicating": self._communicating_ns / whole,
            "waiting_for_data": self._waiting_ns / whole,
        }
