"""Write a trace of the towers' work that Perfetto and Chrome show: `Timeline`."""

import json
import logging
import os
import pathlib
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ncclsync.ops.spans import COMMUNICATION, STEPS, Measured, TimedSpan
from ncclsync.training.callbacks.base import StepWatcher
from ncclsync.training.files import replacing

logger = logging.getLogger("ncclsync")


class Timeline(StepWatcher):
    """Write a trace of training steps: a row for each tower, one for communication, one for the steps.

    ```python
    model.fit(x, y, callbacks=[ncclsync.Timeline("trace.json")])  # then open it at ui.perfetto.dev
    ```

    TensorFlow's profiler and `keras.callbacks.TensorBoard` record the same spans, on the rows of threads:

    - `step`, and before it `wait_for_data`, for the next batch;
    - `tower_0/shard`: the tower's rows are cut off the batch; `tower_0/copy_to_device`, if the tower is not on CPU:0;
    - `tower_0/segment_1`, ...: the parts of the step between collectives; the last part, which updates weights, is
      `tower_0/apply`. Within them `tower_0/pack` before sending and `tower_0/unpack` after receiving; `host_passes`
      saves CPU towers both, and XLA compiles both with the segment;
    - `all-reduce/1.2`, and `reduce-scatter`, `gather`, `broadcast`, `reduce`: the call that joins bucket 2
      after segment 1, as `towers.explain()` counts them. Its arguments: the bytes of one tower's tensors, if shapes
      give them; for an all-reduce also algbw in GB/s, bytes over time as in nccl-tests.

    On GPUs work is queued. There a span ends, and a collective begins, when the tower's stream has done the earlier
    work and a scalar computed after it has arrived in the host's memory; a segment begins when its inputs are there,
    perhaps before it is launched.

    Recorded steps run a graph of their own, with ops that record the time. All other steps run the graph that they run
    without this callback.

    The file is written in one piece when all steps are recorded, when `fit` ends or a step fails, and at the latest
    when this object or the process ends. Several `fit`s count on, into the same file. A file that cannot be written
    then is logged, and training goes on.
    """

    def __init__(self, path: str | os.PathLike, steps: tuple[int, int] = (1, 100)) -> None:
        """Prepare; nothing is written before training.

        Args:
            path: of the file, such as "trace.json"; an older file is replaced.
            steps: the first and the last training step to record, from 1 on. A span takes about 150 bytes in
                the file; a step of 4 towers has about 16 spans.

        Raises:
            TypeError, ValueError: bad arguments.
        """
        super().__init__()
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Expected path to be a path. Received: {path!r}")
        given: list[Any] = [*steps] if isinstance(steps, (tuple, list)) else []
        numbers = [one.item() if isinstance(one, np.integer) else one for one in given]
        if [type(one) for one in numbers] != [int, int] or not 1 <= numbers[0] <= numbers[1]:
            raise ValueError(f"Expected steps to be (first, last), from 1 on. Received: {steps!r}")
        self._first, self._last = numbers
        self._done = 0  # steps so far
        self._trace = _Trace(pathlib.Path(path).absolute(), self._first, self._last)
        weakref.finalize(self, self._trace.save)

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare, and check that the file can be written, before anything is trained.

        Raises:
            ValueError: it cannot; or the model cannot be watched, see `StepWatcher`.
        """
        super().on_train_begin()
        self._trace.check()
        self._trace.devices = self.towers.devices

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record the next call, if it makes a step to record."""
        steps = self.model.steps_per_execution
        if self._done < self._last and self._done + steps >= self._first:
            self.watch_next()
        else:
            self._done += steps

    def measure(self, measured: Measured) -> None:
        """Keep the recording."""
        self._trace.calls.append((self._done + 1, measured))
        self._done += measured.completed
        if measured.failed or self._done >= self._last:
            self._trace.save()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the file."""
        super().on_train_end()
        self._trace.save()
        if self._done < self._first:
            logger.warning(
                "Timeline: nothing was recorded. Expected %d steps or more. Received: %d", self._first, self._done
            )


class _Trace:
    """Hold the spans, and write them to the file."""

    def __init__(self, path: pathlib.Path, first: int, last: int) -> None:
        self.devices: Sequence[str] = ()
        self._path = path
        self._first, self._last = first, last
        self.calls: list[tuple[int, Measured]] = []  # with the number of the first step
        self._saved = 0

    def check(self) -> None:
        """Raise ValueError if the file cannot be written."""
        try:
            if self._path.is_dir():
                raise IsADirectoryError(f"{self._path} is a folder")
            with tempfile.TemporaryFile(dir=self._path.parent):
                pass
        except OSError as error:
            raise ValueError(
                f"Expected a file that can be written for Timeline. Received: {self._path} ({error})"
            ) from error

    def save(self) -> None:
        """Write the file, unless it is complete; an older file stays until then.

        A failure, such as a full disk, is logged and does not end training. The next call tries again.
        """
        if self._saved == len(self.calls):
            return
        events = [*self._rows(), *(_event(step, one) for step, one in self._spans())]
        content = {"traceEvents": events, "displayTimeUnit": "ms"}
        try:
            with replacing(self._path) as part:
                part.write_text(json.dumps(content), encoding="utf-8")
        except OSError:
            logger.exception("Timeline: the trace could not be written to %s. Training goes on", self._path)
            return
        self._saved = len(self.calls)

    def _spans(self) -> Iterator[tuple[int, TimedSpan]]:
        """Yield the spans, with the numbers of their steps."""
        for number, measured in self.calls:
            for step in measured.steps:
                # Waiting for a batch that does not come is no step.
                if (step.complete or measured.failed) and self._first <= number <= self._last:
                    yield from ((number, one) for one in step.spans)
                number += step.complete

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows' names and order."""
        towers: dict[Any, str] = {i: f"tower {i} ({device})" for i, device in enumerate(self.devices)}
        names = {STEPS: "steps", **towers, COMMUNICATION: "communication"}
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "ncclsync"}}
        for place, (row, name) in enumerate(names.items()):
            about = {"ph": "M", "pid": 1, "tid": _row_number(row)}
            yield {**about, "name": "thread_name", "args": {"name": name}}
            yield {**about, "name": "thread_sort_index", "args": {"sort_index": place}}


def _row_number(row: int | str) -> int:
    """Return the row's number in the file: a tower's number + 1."""
    return row + 1 if isinstance(row, int) else {STEPS: 1001, COMMUNICATION: 1002}[row]


def _event(step: int, one: TimedSpan) -> dict[str, Any]:
    details = {"step": step, **one.span.details}
    if one.span.name.startswith("all-reduce") and "bytes" in details:
        details["algbw GB/s"] = details["bytes"] / max(1, one.end_ns - one.begin_ns)
    return {
        "ph": "X",
        "pid": 1,
        "tid": _row_number(one.span.row),
        "name": one.span.full_name,
        "ts": one.begin_ns / 1e3,
        "dur": (one.end_ns - one.begin_ns) / 1e3,
        "args": details,
    }
