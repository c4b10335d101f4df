"""Log samples per second, and how a step spends its time: `Throughput`."""

import collections
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
    - `communicating`: the share in which towers exchanged tensors; on GPUs an exchange begins when the last tower has
      computed its tensors.
    - `computing`: the rest: splitting the batch, forward, backward and update of all towers.

    The three shares add up to 1. They cover the steps alone: Keras' work between two steps, and callbacks, count only
    in the first figure.
    """

    async_safe = True  # for Keras: `on_train_batch_end` may be called from another thread

    def __init__(self) -> None:
        super().__init__()
        self._figures: dict[str, float] = {}
        self._start()

    def _start(self) -> None:
        # By whether a call traced: sums of `Measured`'s attributes, and the time from call to call.
        self._sums = {traced: collections.Counter[str]() for traced in (True, False)}
        self._last_ns = time.monotonic_ns()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self._start()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Watch the step."""
        self.watch_next()

    def measure(self, measured: Measured) -> None:
        """Count the call's steps."""
        now = time.monotonic_ns()
        sums = self._sums[measured.traced]
        sums["elapsed_ns"] += now - self._last_ns
        for name in ("samples", "step_ns", "communicating_ns", "waiting_ns"):
            sums[name] += getattr(measured, name)
        self._last_ns = now
        others = self._sums[False]
        self._figures = _figures_of(others if others["samples"] else self._sums[True])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log the figures."""
        if logs is not None:
            logs.update(self._figures)

    on_epoch_end = on_train_batch_end


def _figures_of(sums: collections.Counter[str]) -> dict[str, float]:
    whole = sums["step_ns"] + sums["waiting_ns"]
    if not sums["samples"] or not whole:
        return {}
    return {
        "samples_per_second": sums["samples"] / (sums["elapsed_ns"] / 1e9),
        "computing": (sums["step_ns"] - sums["communicating_ns"]) / whole,
        "communicating": sums["communicating_ns"] / whole,
        "waiting_for_data": sums["waiting_ns"] / whole,
    }
