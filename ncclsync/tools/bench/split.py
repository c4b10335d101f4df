"""Split the time of a step: the same step on towers with parts left out, timed beside the whole.

    whole       on a batch that is in memory already
    local       without the exchanges: each tower goes on with its own gradients
    compute     forward and backward: without the exchanges, and without the update after the last one

The difference is the time of the part left out. The step is traced once for all three; towers drift apart in
the last two, which changes no time.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops.spans import Meter
from ncclsync.program.program import Bucket, Program, Segment
from ncclsync.tools.bench.turns import device_timer
from ncclsync.training.keras_model import ModelStep


class StepParts:
    """Time the variants of a model's step."""

    def __init__(self, model: keras.Model, batch: Any) -> None:
        """Prepare a model on towers, and a global batch of tensors; each variant is traced when it is first run."""
        programs: dict[str, Program] = {}
        self._iterator = iter(tf.data.Dataset.from_tensors(batch).repeat())
        self._variants = {
            "whole": _Variant(model, programs, lambda program: program),
            "local": _Variant(model, programs, without_exchanges),
            "compute": _Variant(model, programs, until_last_exchange),
        }

    @property
    def buckets(self) -> list[Bucket]:
        """Return the buckets that the step exchanges; it must have run."""
        ran = self._variants["whole"].last()
        assert ran is not None
        program, _ = ran
        return [bucket for segment in program.segments for bucket in segment.outgoing]

    def seconds(self, variant: str, steps: int) -> float:
        """Run so many steps of a variant; return the mean time of one."""
        run = self._variants[variant].run
        return device_timer(lambda: run(self._iterator), steps, steps)()

    def lead(self) -> tuple[float, float]:
        """Run a whole step; return when its call has returned, and when the devices were through, in seconds."""
        began = time.perf_counter()
        self._variants["whole"].run(self._iterator)
        called = time.perf_counter()
        tf_compat.sync_devices()
        return called - began, time.perf_counter() - began


class _Variant(ModelStep):
    """Change a model's train step after it was cut."""

    def __init__(self, model: keras.Model, programs: dict[str, Program], change: Callable[[Program], Program]) -> None:
        super().__init__(model, model.towers, "train_step")
        self._shared = programs
        self._change = change

    def make_program(self, specs: Any, meter: Meter | None) -> Program:
        key = repr(specs)
        if key not in self._shared:
            self._shared[key] = super().make_program(specs, meter)
        return self._change(self._shared[key])


def without_exchanges(program: Program) -> Program:
    """Return a program whose towers keep their own tensors instead of joining them."""

    def silent(bucket: Bucket) -> Bucket:
        return dataclasses.replace(bucket, join=lambda buckets, sent, fractions: sent)

    segments = (
        dataclasses.replace(segment, outgoing=tuple(map(silent, segment.outgoing))) for segment in program.segments
    )
    return dataclasses.replace(program, segments=tuple(segments))


def until_last_exchange(program: Program) -> Program:
    """Return a program without exchanges that ends at its last one; it has no results."""
    program = without_exchanges(program)
    drain = tf.Variable(0.0, trainable=False)

    def use(*inputs: tf.Tensor) -> list[tf.Tensor]:
        # A part of each bucket is written, since TensorFlow does not compute unused tensors.
        parts = [tf.reduce_sum(tf.cast(tf.reshape(t, [-1])[:1], tf.float32)) for t in inputs[:-2]]
        return [tf.identity(drain.assign(tf.add_n([*parts, 0.0])))]

    sending = [number for number, segment in enumerate(program.segments, start=1) if segment.outgoing]
    kept, left = program.segments[: sending[-1]], program.segments[sending[-1] :]
    received = tuple(bucket for segment in left for bucket in segment.incoming)
    last = Segment((), received, (), (), plan=None, function=use)
    return dataclasses.replace(program, segments=(*kept, last), outputs=(), structure=None, rollback=())
