"""Record when the parts of a step begin and end, by ops that are in its graph only while it is watched.

`laying_out.py` names the parts, `step_function.py` makes a graph with timestamps for watched steps, `timeline.py` and
`throughput.py` watch. A timestamp waits only for the ops that it is put after, so that towers stay independent.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import host_ops

STEPS, COMMUNICATION = "steps", "communication"  # rows; every tower has a row, too
STEP, WAIT = "step", "wait_for_data"  # spans of the row `STEPS`
SHARD, COPY = "shard", "copy_to_device"  # spans of a tower; perhaps for a later batch, if towers are fed ahead


class NoBatchLeft(tf.errors.OutOfRangeError):
    """Report that the iterator of batches ended before a step began: the end of an epoch."""

    def __init__(self, error: tf.errors.OutOfRangeError) -> None:
        super().__init__(error.node_def, error.op, error.message)


@dataclasses.dataclass(frozen=True)
class Span:
    """Name a part of a step."""

    row: int | str  # the number of the tower at work, or `STEPS` or `COMMUNICATION`
    name: str  # one word
    details: Mapping[str, Any]  # facts known when the graph is built

    @property
    def full_name(self) -> str:
        """Return the tower and the name, as a timeline and TensorFlow's profiler show it."""
        return self.name if isinstance(self.row, str) else f"tower_{self.row}/{self.name}"


class TimedSpan(NamedTuple):
    """Hold an ended span; times are in ns, of `time.monotonic_ns()`."""

    span: Span
    begin_ns: int
    end_ns: int


@dataclasses.dataclass
class MeasuredStep:
    """Hold the recorded spans of one step."""

    complete: bool = False  # whether it ended; False if it failed, or if there was no batch for it
    samples: int = 0  # the rows of its batch; 0 if it is not complete
    spans: list[TimedSpan] = dataclasses.field(default_factory=list)  # that ended, in the order of their ends


@dataclasses.dataclass(frozen=True)
class Measured:
    """Hold the recording of one call of a step's graph."""

    traced: bool  # whether the graph was made for this call, which takes most of such a call
    failed: bool  # whether the call raised
    steps: tuple[MeasuredStep, ...]

    @property
    def completed(self) -> int:
        """Return how many steps ended."""
        return sum(step.complete for step in self.steps)

    @property
    def samples(self) -> int:
        """Return the rows of their batches."""
        return sum(step.samples for step in self.steps)

    @property
    def step_ns(self) -> int:
        """Return how long these steps took, without waiting for data."""
        return sum(one.end_ns - one.begin_ns for one in self._spans(STEPS) if one.span.name == STEP)

    @property
    def waiting_ns(self) -> int:
        """Return how long the call waited for batches."""
        return sum(one.end_ns - one.begin_ns for one in self._spans(STEPS) if one.span.name == WAIT)

    @property
    def communicating_ns(self) -> int:
        """Return how long at least one collective was under way."""
        total = until = 0
        for one in sorted(self._spans(COMMUNICATION), key=lambda one: one.begin_ns):
            total += max(0, one.end_ns - max(one.begin_ns, until))
            until = max(one.end_ns, until)
        return total

    def _spans(self, row: str) -> list[TimedSpan]:
        return [one for step in self.steps for one in step.spans if one.span.row == row]


@dataclasses.dataclass(frozen=True)
class Begun:
    """Hold a span that has begun, in a graph.

    Attributes:
        ops: the work within the span must depend on these.
        end: `end(after=(), tokens=(), samples=None)` lets it end, `after` and `tokens` as of `begin`; `samples` are the
            step's. Returns ops that later work must depend on; else a thread may run it before recording the end.
    """

    ops: list[tf.Operation]
    end: Callable[..., list[tf.Operation]]


def delay(structure: Any, ops: Sequence[tf.Operation]) -> Any:
    """Return nested tensors whose consumers wait for `ops`; the same tensors if there are no ops."""
    if not ops:
        return structure
    made: dict[int, tf.Tensor] = {}  # towers may share a tensor

    def delayed(leaf: Any) -> Any:
        if leaf is None:
            return None
        if id(leaf) not in made:
            made[id(leaf)] = tf.identity(leaf)
        return made[id(leaf)]

    with tf.control_dependencies(ops):
        return tf.nest.map_structure(delayed, structure, expand_composites=True)


class Meter:
    """Hold the spans of a step's graphs, and their timestamps. It must live as long as the graphs."""

    def __init__(self) -> None:
        """Begin with none."""
        self._timestamps = native.Timestamps()
        self._spans: list[Span] = []
        self._of_any_tower: set[int] = set()  # spans whose timestamps have the tower as their value
        self._by_python: dict[tuple[Any, str], int] = {}  # numbers of the spans that Python records
        # Of `SHARD`s and `COPY`s, by their numbers: when those under way began.
        self._feeding: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        self._profiled: dict[Any, collections.deque] = collections.defaultdict(collections.deque)

    def _add(self, span: Span) -> int:
        self._spans.append(span)
        return len(self._spans) - 1

    def _record(
        self, span: int, ends: bool, after: Sequence[Any], tokens: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tf.Operation:
        graph = tf.compat.v1.get_default_graph()
        # Within a branch an identity stands for a tensor from outside; for an op from outside the whole branch waits.
        here = [tf.identity(one) if tf.is_tensor(one) and one.graph is not graph else one for one in after]
        about = {"meter": self._timestamps.address, "span": span, "ends": int(ends)}
        about |= {"n_tokens": len(tokens), "n_values": len(values)}
        with tf.control_dependencies(here):
            return host_ops.create("NcclsyncTimestamp", [*tokens, *values], [], about)

    def take(self, traced: bool, failed: bool) -> Measured:
        """Return the recording since the last call."""
        steps: list[MeasuredStep] = []
        early: list[TimedSpan] = []  # that ended before the first step began
        pending: dict[Any, collections.deque[tuple[MeasuredStep, int]]] = collections.defaultdict(collections.deque)
        began = False  # whether the last step's `STEP` has begun
        for time_ns, value, number, ends in self._timestamps.take():
            span = self._span(number, value)
            under_way = pending[number, span.row]
            if span.name in (SHARD, COPY):  # perhaps for a later step: it counts for the step in which it ends
                begins = self._feeding[number]
                if not ends:
                    begins.append(time_ns)
                elif begins:
                    (steps[-1].spans if steps else early).append(TimedSpan(span, begins.popleft(), time_ns))
            elif not ends:
                # A step begins with waiting for a batch, if it waits at all; the other spans are within `STEP`.
                if not steps or span.name == WAIT or (span.name == STEP and began):
                    steps.append(MeasuredStep())
                    began = False
                began |= span.name == STEP
                under_way.append((steps[-1], time_ns))
            elif under_way:
                step, begin_ns = under_way.popleft()
                step.spans.append(TimedSpan(span, begin_ns, time_ns))
                if span.name == STEP:
                    step.complete, step.samples = True, value
        if steps:
            steps[0].spans[:0] = early
        return Measured(traced, failed, tuple(steps))

    def forget(self) -> None:
        """Drop timestamps that were not taken."""
        self._timestamps.take()
        self._feeding.clear()

    @contextlib.contextmanager
    def reported_to(
        self, watchers: Sequence[Callable[[Measured], None]], traced: bool, repeats: Callable[[Exception], bool]
    ) -> Iterator[None]:
        """Report the recording of the body to watchers, also if it fails.

        But not if there was no batch left for it, nor after an error for which it `repeats(error)`. `traced` is
        `Measured`'s. While TensorFlow's profiler is recording, the spans are shown to it too.
        """
        self._profiled.clear()  # of a call that failed
        self._timestamps.listen(self._show if tf_compat.is_profiling() else None)
        failed = True
        try:
            yield
            failed = False
        except Exception as error:
            if isinstance(error, NoBatchLeft) or repeats(error):
                self.forget()
                watchers = ()
            raise
        finally:
            recording = self.take(traced, failed)
            for watcher in watchers:
                watcher(recording)

    def _span(self, number: int, value: int) -> Span:
        span = self._spans[number]
        return dataclasses.replace(span, row=value) if number in self._of_any_tower else span

    def _show(self, number: int, ends: bool, value: int) -> None:
        """Show a span to the profiler, on the row of the thread that ends it; C calls this."""
        span = self._span(number, value)
        shown = self._profiled[number, span.row]
        if not ends:
            shown.append(tf.profiler.experimental.Trace(span.full_name))
        elif shown:
            shown.popleft().__exit__(None, None, None)


def begin(
    meter: Meter | None,
    row: Any,
    name: str,
    after: Sequence[Any] = (),
    tokens: Sequence[tf.Tensor] = (),
    **details: Any,
) -> Begun:
    """Let a span begin here, in the graph that is being built; do nothing without a meter.

    Args:
        meter: of that graph, or None.
        row, name, details: see `Span`; in a function that runs on any tower, the row is an integer tensor.
        after: tensors and ops that it begins after.
        tokens: float32 scalars; it begins when they have arrived in the host's memory. For tokens on a GPU, the kernels
            that compute them have then ended, and are not only queued.
    """
    if meter is None:
        return Begun([], lambda *_, **__: [])
    of_any = tf.is_tensor(row)
    number = meter._add(Span(0 if of_any else row, name, details))
    if of_any:
        meter._of_any_tower.add(number)
    about = [tf.cast(row, tf.int64)] if of_any else []

    def end(
        after: Sequence[Any] = (), tokens: Sequence[tf.Tensor] = (), samples: tf.Tensor | None = None
    ) -> list[tf.Operation]:
        values = about if samples is None else [tf.cast(samples, tf.int64)]
        return [meter._record(number, True, after, tokens, values)]

    return Begun([meter._record(number, False, after, tokens, about)], end)


@contextlib.contextmanager
def measured(meter: Meter | None, row: Any, name: str) -> Iterator[None]:
    """Record the body, outside any graph, as a span unless it raises. Do nothing without a meter."""
    if meter is None:
        yield
        return
    key = row, name
    if key not in meter._by_python:
        meter._by_python[key] = meter._add(Span(row, name, {}))
    meter._timestamps.record(meter._by_python[key], False)
    yield
    meter._timestamps.record(meter._by_python[key], True)
