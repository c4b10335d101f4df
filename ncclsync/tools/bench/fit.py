"""Train in a process of a benchmark: by `fit` in turns, up to the first step, for its memory, or parts of a step."""

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops.spans import Meter
from ncclsync.parallel import nccl_parallel
from ncclsync.program.program import Bucket, Outcome, Program, Segment
from ncclsync.tools.bench.models import MODELS, rows_of
from ncclsync.tools.bench.turns import Ranks, Requests, device_seconds
from ncclsync.towers.programs import BESIDE, Programs
from ncclsync.towers.retracing import Version
from ncclsync.towers.step_function import to_tensor
from ncclsync.training.callbacks.throughput import Throughput
from ncclsync.training.callbacks.timeline import Timeline
from ncclsync.training.keras_model import ModelStep

_MEMORY_STEPS = 5

_BATCHES = {"resnet50": 8}  # of an epoch
_BATCHES_ELSE = 240  # as MNIST with 250 rows a batch: an epoch's begin takes a small part of it


def build(library: str, model: str, towers: int, shards: int | None = None, *, xla: bool = False) -> keras.Model:
    """Build a model of `MODELS` on towers, under MirroredStrategy or on a single device; once per process.

    `library` is "ncclsync", or one of `training.PEERS`; see the help of `bench step`. With `xla` Keras chooses as on a
    GPU whether XLA compiles it.
    """

    def factory() -> keras.Model:
        made = MODELS[model].build()
        if xla and library != "mirrored":
            made.jit_compile = True  # False, and a warning, where a layer forbids it
        return made

    if library in ("ncclsync", "sharded", "processes"):
        return nccl_parallel(towers=towers, shards=shards, shard_optimizer=library == "sharded")(factory)()
    scope: Any = contextlib.nullcontext()
    if library == "mirrored":
        kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
        if kind == "CPU":
            replicas = [tf.config.LogicalDeviceConfiguration()] * towers
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], replicas)
        scope = tf.distribute.MirroredStrategy([f"{kind}:{i}" for i in range(towers)]).scope()
    with scope:
        return factory()


def fit_in_turns(
    requests: Requests, library: str, model: str, feed: str, batch_size: int, *, watched: bool = False, **how: Any
) -> None:
    """Train by `fit` as long as there are requests; `build` takes `how`: towers, shards, xla.

    `feed` is of `training.FEEDS`, or "constant". The request "fit" runs steps inside `fit`, with its callbacks, and
    with `Timeline` and `Throughput` if `watched`; the name of a variant of `StepParts` runs that while `fit` waits.
    Answers give the mean seconds of a step; answers to "fit" also the seconds of the host's cores, and whether XLA
    compiles the step.
    """
    keras.utils.set_random_seed(0)
    trained = build(library, model, **how)
    batches = 1 if feed == "constant" else _BATCHES.get(model, _BATCHES_ELSE)
    x, y = MODELS[model].data(batches * batch_size)
    batch_size //= how["towers"] if library == "shard" else 1
    batch = tf.nest.map_structure(to_tensor, (rows_of(x, 0, batch_size), y[:batch_size]))
    turns = _Turns(Ranks(requests) if library == "processes" else requests, trained, batch)
    # The trace is never written: there is no last step, and this process is killed.
    watchers = [Timeline("timeline.json", steps=(1, 10**9)), Throughput()] if watched else []
    arguments = {"callbacks": [*watchers, turns], "epochs": 10**9, "verbose": 0}
    if feed == "numpy":
        trained.fit(x, y, batch_size=batch_size, **arguments)
        return
    data: Any = _generate(x, y, batch_size)
    if feed == "tf.data":
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size, drop_remainder=True)
        data = rows.repeat().prefetch(tf.data.AUTOTUNE)
    elif feed == "constant":
        data = tf.data.Dataset.from_tensors(batch).repeat()
    # One endless epoch: at its end TensorFlow's autotuner may sleep for as long as the epoch took.
    trained.fit(data, steps_per_epoch=10**9, **arguments)


def _clocks() -> np.ndarray:
    """Return the time, and the time that the host's cores have worked for this process, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


class _Turns(keras.callbacks.Callback):
    """Hold `fit` between two steps until it is asked for more. Time between epochs does not count."""

    def __init__(self, requests: Requests | Ranks, model: keras.Model, batch: Any) -> None:
        super().__init__()
        self._requests, self._xla = requests, bool(model.jit_compile)
        self._parts = StepParts(model, batch) if getattr(model, "towers", None) else None
        self._steps = self._left = 0
        self._began = np.zeros(2)
        self._epoch_ended: np.ndarray | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._wait()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch_ended = _clocks()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch_ended is not None:
            self._began += _clocks() - self._epoch_ended
            self._epoch_ended = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            tf_compat.sync_devices()  # a GPU may still be at work
            seconds, cpu_seconds = ((_clocks() - self._began) / self._steps).tolist()
            self._requests.answer(seconds=seconds, cpu_seconds=cpu_seconds, xla=self._xla)
            self._wait()

    def _wait(self) -> None:
        while (request := self._requests.next())["do"] != "fit":
            assert self._parts is not None
            self._requests.answer(seconds=self._parts.seconds(request["do"], request["steps"]))
        self._steps = self._left = request["steps"]
        self._began = _clocks()


def _generate(x: Any, y: np.ndarray, batch_size: int) -> Any:
    while True:
        for begin in range(0, len(y), batch_size):
            yield rows_of(x, begin, begin + batch_size), y[begin : begin + batch_size]


def first_step(requests: Requests, library: str, model: str, towers: int, rows: int, *, xla: bool) -> None:
    """Answer a request with the seconds from the factory's call to the end of the first step; then end the process.

    `fit` itself may end later: it waits for TensorFlow's thread that tunes datasets, which may sleep.
    """
    x, y = MODELS[model].data(rows)
    keras.utils.set_random_seed(0)
    requests.next()
    began = _clocks()
    trained = build(library, model, towers, xla=xla)
    build_seconds, _ = (_clocks() - began).tolist()

    def answer(batch: int, logs: Any) -> None:
        tf_compat.sync_devices()
        seconds, cpu_seconds = (_clocks() - began).tolist()
        xla = bool(trained.jit_compile)
        requests.answer(seconds=seconds, cpu_seconds=cpu_seconds, build_seconds=build_seconds, xla=xla)
        requests.end()

    answering = keras.callbacks.LambdaCallback(on_train_batch_end=answer)
    trained.fit(x, y, batch_size=len(y), verbose=0, callbacks=[answering])


def peak_memory(
    requests: Requests, library: str, model: str, towers: int, rows: int, shards: int | None = None
) -> None:
    """Answer a request with bytes: the process' memory at its peak and without the model, and the model's state."""
    x, y = MODELS[model].data(rows)
    requests.next()
    imported = status_bytes("VmRSS")
    trained = build(library, model, towers, shards)
    trained.fit(tf.data.Dataset.from_tensors((x, y)).repeat(_MEMORY_STEPS), verbose=0)
    variables = [*trained.weights, *trained.optimizer.variables]
    state = sum(int(np.prod(v.shape)) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables)
    held = {"bytes": status_bytes("VmHWM"), "imported_bytes": imported, "state_bytes": state}
    requests.answer(**held, xla=bool(trained.jit_compile))


def status_bytes(name: str, process: int | str = "self") -> int:
    """Read a size of a process from Linux: VmRSS, held now, or VmHWM, the peak."""
    with open(f"/proc/{process}/status", encoding="utf-8") as file:
        found = re.search(rf"^{name}:\s+(\d+) kB", file.read(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class StepParts:
    """Time a step on towers, whole and with parts left out.

    whole       on a batch that is in memory already
    local       without the exchanges: each tower goes on with its own gradients
    compute     forward and backward: without the exchanges, and without the update after the last exchange

    The step is traced once for all three; towers drift apart in the last two, which changes no time.
    """

    def __init__(self, model: keras.Model, batch: Any) -> None:
        """Prepare a model on towers, and a global batch of tensors; each variant is traced when it is first run."""
        shared: dict[str, Program] = {}

        def changing(change: Callable[[Program], Program]) -> ModelStep:
            return ModelStep(model, model.towers, "train_step", functools.partial(_Changed, shared, change))

        self._iterator = iter(tf.data.Dataset.from_tensors(batch).repeat())
        self._variants = {
            "whole": changing(lambda program: program),
            "local": changing(without_exchanges),
            "compute": changing(until_last_exchange),
        }

    @property
    def buckets(self) -> list[Bucket]:
        """Return the buckets of the step, which must have run."""
        ran = self._variants["whole"].step.last()
        assert ran is not None
        program, _ = ran
        return [bucket for segment in program.segments for bucket in segment.outgoing]

    def seconds(self, variant: str, steps: int) -> float:
        """Run so many steps of a variant; return the mean time of a step."""
        run = self._variants[variant].run
        return device_seconds(lambda: run(self._iterator), steps)

    def lead(self) -> tuple[float, float]:
        """Run a whole step; return when its call has returned, and when the devices were through, in seconds."""
        began = time.perf_counter()
        self._variants["whole"].run(self._iterator)
        called = time.perf_counter()
        tf_compat.sync_devices()
        return called - began, time.perf_counter() - began


class _Changed(Programs):
    """Change a step's programs after they were cut."""

    def __init__(
        self, shared: dict[str, Program], change: Callable[[Program], Program], *given: Any, **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self._shared, self._change = shared, change
        self._changed: dict[str, Program] = {}

    def of(self, specs: Any, meter: Meter | None = None, version: Version = BESIDE) -> Program:
        key = repr(specs)
        if key not in self._shared:
            self._shared[key] = super().of(specs, meter, version)
        if key not in self._changed:
            self._changed[key] = self._change(self._shared[key])
        return self._changed[key]


def without_exchanges(program: Program) -> Program:
    """Return a program whose towers keep their own tensors instead of joining them."""

    def silent(segment: Segment) -> Segment:
        kept = (dataclasses.replace(one, join=lambda buckets, sent, fractions: sent) for one in segment.outgoing)
        return dataclasses.replace(segment, outgoing=tuple(kept))

    return dataclasses.replace(program, segments=tuple(map(silent, program.segments)))


def until_last_exchange(program: Program) -> Program:
    """Return a program without exchanges that ends at its last one; it has no results."""
    program = without_exchanges(program)
    drain = tf.Variable(0.0, trainable=False)

    def use(*inputs: tf.Tensor) -> Outcome:
        # An element of each bucket is used, since TensorFlow does not compute unused tensors.
        parts = [tf.reduce_sum(tf.cast(tf.reshape(t, [-1])[:1], tf.float32)) for t in inputs]
        return Outcome({}, [], tf.identity(drain.assign(tf.add_n([*parts, 0.0]))))

    sending = [number for number, segment in enumerate(program.segments, start=1) if segment.outgoing]
    kept, left = program.segments[: sending[-1]], program.segments[sending[-1] :]
    received = tuple(bucket for segment in left for bucket in segment.incoming)
    last = Segment((), received, (), (), use)
    segments = (*kept, last)
    return dataclasses.replace(
        program, segments=segments, last_meeting=len(kept), outputs=(), structure=None, rollback=()
    )
