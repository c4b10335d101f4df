"""Trace a step, place it and cut it: a program for each kind of batch.

What the step is, a `Traceable` says: a method of a Keras model (`keras_model.py`), or a function (`loop.py`).
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.functions import digests_aside, inlined, stale_functions
from ncclsync.compat.source_lines import innermost, is_library, line_text
from ncclsync.errors import NcclSyncError
from ncclsync.gradients.hooks import step_hooks
from ncclsync.gradients.noise_scale import gradient_moments
from ncclsync.gradients.nonfinite import finite_flags
from ncclsync.gradients.observer import Observer
from ncclsync.ops.spans import Meter
from ncclsync.ops.xla_programs import share_programs
from ncclsync.program.cut import Traceless, cut
from ncclsync.program.partition import Undividable
from ncclsync.program.program import Program, Results
from ncclsync.program.trace import Opened, Refusals, Trace, trace
from ncclsync.semantics.draws import check_draws, draws_seen
from ncclsync.sharding.exactness import DRAWS, NORMALISES, Inexact, say_inexact
from ncclsync.sharding.normalization import moments_of_layers
from ncclsync.sharding.shards import open_specs, relaxed_like, ungrouped
from ncclsync.towers.layout import Layout
from ncclsync.towers.python_state import PythonState
from ncclsync.towers.retracing import Version
from ncclsync.towers.state import TowerState

logger = logging.getLogger("ncclsync")

# Programs, and functions of their graphs, that a step keeps: those used last. TensorFlow relaxes shapes that change, so
# that only steps of which each length needs a trace of its own have more.
MOST_KEPT = 32
# So many traces of a step that is told each batch's shapes mean that most batches have shapes of their own.
_TOLD_BEFORE_WARNING = 8
BESIDE = Version(0, None)  # of a program that is made beside the steps, as to explain it


@dataclasses.dataclass(frozen=True)
class Source:
    """Say what a step is before it is traced."""

    function: Callable[[Any], Any]  # of a batch
    results: Results = Results.COMBINED
    jit_compile: bool = False  # whether XLA compiles it
    autograph: bool = False  # whether to convert Python's conditions and loops over tensors, if the trace meets any
    twice: bool = False  # whether one device would trace it twice, since its first trace would create variables
    returning: str = ""  # the name of a method that must return something


class Traceable(Protocol):
    """What traces are made of."""

    model: Any  # whose Python state a trace may change; None: no model is known

    def source(self, specs: Any) -> Source:
        """Return the function to trace for batches of these specs; make what it needs first."""

    def find_inexact(self) -> Sequence[Inexact]:
        """Return why the traced step is not exact, as far as the model shows."""

    def forget_failed(self) -> None:
        """Clean up after a trace that has failed."""


class Key(NamedTuple):
    """Say what a program was made for."""

    specs: str  # of a shard
    readers: tuple[str, ...]  # the names of the gradients' readers
    version: int  # the number of TensorFlow's trace that it stands for; 0 if it was made beside the steps
    watched: bool  # whether there are timestamps, if it packs
    layout: Layout  # a split for lack of memory makes a new layout, and for it new programs
    told: str = ""  # specs of the batch whose lengths Python was told, as one device has them; "" if it asked for none


class _Asked(ValueError):
    """Python goes by a length that is open, and that one device knows."""

    def __init__(self, line: tf_compat.Line | str, hears: str = "x.shape[0] is None") -> None:
        """Name the line, and what it hears without that length."""
        super().__init__(f"{hears}, and something else is computed")
        known = line if isinstance(line, str) else line[0] and line_text(*line)
        self.line = known or "a line that autograph has converted"


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A step that was traced, to be cut."""

    source: Source
    specs: Any  # of a shard
    trace: Trace
    observer: Observer | None  # of its gradients, if something reads them
    before: PythonState
    told: "_Told | None" = None  # what Python was told
    refusals: Refusals | None = None  # if one device knows lengths that are open in the trace


class _Told(NamedTuple):
    """Hold what Python is told in a trace, as one device's trace shows it."""

    shapes: tf_compat.ReadShapes
    rows: int | None  # of every batch for which the trace is; None: its tensors have different numbers


class Programs:
    """Trace a step, cut it into programs, and keep them."""

    def __init__(self, towers: TowerState, step: Traceable, *, trains: bool, any_rows: bool = False) -> None:
        """Prepare; nothing is traced before the first batch.

        Args:
            towers: on which it runs.
            step: to trace.
            trains: whether it counts as a training step.
            any_rows: whether another number of rows is no reason to trace anew, unless Python asks for that number.
        """
        self.towers = towers
        self.trains = trains
        self.any_rows = any_rows
        self.kept: dict[Key, Program] = {}  # the one used last at the end
        self._compiles = True
        # Versions, and specs of shards, with the line of Python that cannot be traced for them, or asks for lengths.
        self._too_open: dict[tuple[int, str], str] = {}
        self._asking: dict[tuple[int, str], str] = {}
        self._refusals: dict[tuple[int, str], Refusals] = {}  # of steps for any number of rows, one trace for all
        self._step = step

    def of(self, specs: Any, meter: Meter | None = None, version: Version = BESIDE) -> Program:
        """Return the program for batches of these specs, with timestamps in its segments if a meter is given.

        The number of rows is left open, which shows what depends on it. If Python asks for it, and one device knows
        it, Python is told what one device would tell. If the step cannot be traced so either, every tower computes the
        whole batch.
        """
        shard, alone = self.shard_specs(specs, version), self._specs_alone(specs, version)
        kind = version.number, repr(shard)
        told = self.told_for(specs, version)
        key = Key(kind[1], tuple(self.readers()), version.number, meter is not None, self.towers.layout, told)
        if key in self.kept:
            self.kept[key] = self.kept.pop(key)
            return self.kept[key]
        other = self.kept.get(key._replace(watched=not key.watched))
        if other is not None and not other.packs:  # its segments have no timestamps, watched or not
            return other
        failed = None
        try:
            traced = self._traced(shard, alone, is_told=bool(told))
        except Exception as error:  # of any kind, as where a length is None: raised if one device raises it, too
            self._step.forget_failed()
            if isinstance(error, NcclSyncError):
                raise
            failed = error
        if failed is not None:
            return self._otherwise(failed, kind, bool(told), specs, meter, version)
        if self.any_rows and told and len({one.told for one in self.kept} - {"", told}) + 1 == _TOLD_BEFORE_WARNING:
            self.towers.session.warn_once(
                f"The step has been traced for {_TOLD_BEFORE_WARNING} shapes of batches, and will be for each further "
                f"shape: {self._asking[kind]} asks for x.shape while it is traced. Use tf.shape(x) instead"
            )
        if self.any_rows and traced.refusals is not None and not told:
            self._refusals[kind] = traced.refusals
        program = self._cut(traced, meter)
        lines = dict.fromkeys(one.unrepeatable for one in program.segments if one.unrepeatable)
        if self.towers.options.on_oom is not None and lines:
            self.towers.session.warn_once(
                f"on_oom cannot undo {' and '.join([*lines][:3])}: it happens again where a step that does not fit "
                "the memory runs again. Move it out of the step"
            )
        self._warn_of_inexact(program)
        if len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        return self.kept.setdefault(key, program)

    def _otherwise(
        self, error: Exception, kind: tuple[int, str], is_told: bool, specs: Any, meter: Meter | None, version: Version
    ) -> Program:
        """Return the program of a step whose trace has failed: of one that Python is told, or of the whole batch.

        Raises:
            Exception: this error, or the other trace's: one device raises it, too.
        """
        opened, alone = repr(open_specs(specs)), self._specs_alone(specs, version)
        # Lengths that TensorFlow would relax are fixed before the rows are: one device, asked for one, knows all.
        is_relaxed = self.any_rows and kind[1] != opened
        asks = not is_told and _is_known(alone) and not _is_known(self.shard_specs(specs, version)) and not is_relaxed
        if not asks and kind[1] == repr(specs):
            raise error
        line, cause = (error.line, error) if isinstance(error, _Asked) else innermost(error)
        kinds = self._asking if asks else self._too_open
        kinds[kind] = line
        try:
            program = self.of(specs, meter, version)
        except Exception:  # raised again: another batch may be traced as usual
            kinds.pop(kind, None)
            raise
        if not asks and kind[1] == opened:
            self.towers.session.warn_once(
                "The step can be traced for batches of a fixed number of rows alone, and cannot be divided: every "
                f"tower computes the whole batch. {line} needs that number while it is traced. Use tf.shape(x)[0] "
                "instead of x.shape[0] or len(x), and tensors instead of Python's loops. Without that number: "
                f"{cause}"
            )
        return program

    def compile_no_more(self) -> None:
        """Let XLA compile no step from now on; forget the programs that it has compiled."""
        self._compiles = False
        self.kept.clear()

    def forget_other_layouts(self) -> bool:
        """Forget the programs of other layouts than the towers'; return whether there were any."""
        old = [key for key in self.kept if key.layout is not self.towers.layout]
        for key in old:
            del self.kept[key]
        return bool(old)

    @property
    def traced_otherwise(self) -> int:
        """Return how many kinds of batches have not the first trace: one that Python is told, or of fixed lengths."""
        return len(self._too_open) + len(self._asking)

    def told_for(self, specs: Any, version: Version) -> str:
        """Return what `Key.told` is for batches of these specs, of a version."""
        kind, alone = (version.number, repr(self.shard_specs(specs, version))), self._specs_alone(specs, version)
        if kind in self._refusals and _is_known(alone) and (line := self._refusals[kind].line(ungrouped(alone))):
            del self._refusals[kind]
            self._asking[kind] = line
        return repr(alone) if kind in self._asking else ""

    def _specs_alone(self, specs: Any, version: Version) -> Any:
        """Return the specs for which one device traces the step, for batches of these specs."""
        return specs if self.any_rows or version.specs is None else version.specs

    def shard_specs(self, specs: Any, version: Version = BESIDE) -> Any:
        """Return the specs to trace the step with, for batches of these specs, of a version.

        They leave the number of rows open, which shows what depends on it, and other lengths where the version has
        them open. If the step cannot be traced so, these lengths are fixed, and if need be the rows, too.
        """
        opened = open_specs(specs)
        if self.takes_relaxed(specs, version):
            return relaxed_like(opened, version.specs)
        return specs if (version.number, repr(opened)) in self._too_open else opened

    def takes_relaxed(self, specs: Any, version: Version) -> bool:
        """Return whether the step is traced with the version's own specs, for batches of these specs."""
        if version is BESIDE:
            return False
        return (version.number, repr(relaxed_like(open_specs(specs), version.specs))) not in self._too_open

    def readers(self) -> dict[str, Callable[[Observer], tf.Tensor | None]]:
        """Return the readers of this step's gradients, by the attribute of `Program` that holds their result."""
        wanted = {
            "finite": (self.towers.options.health.on_nonfinite, finite_flags),
            "noise": (self.towers.watch.noise.active, gradient_moments),
        }
        return {name: reader for name, (active, reader) in wanted.items() if self.trains and active}

    def _traced(self, specs: Any, alone: Any, *, is_told: bool) -> _Traced:
        """Trace the step for shards of these specs; `is_told`: Python is told what it hears for `alone`, one device's.

        Raises:
            _Asked: Python goes by what one device knows.
            Exception: of the user's step.
        """
        self.towers.session.check_repeatable()
        before = PythonState(self._step.model)
        source = self._step.source(ungrouped(specs))
        if source.jit_compile and not (self._compiles and self.towers.session.lets_xla_compile()):
            source = dataclasses.replace(source, jit_compile=False)
        built, rows = PythonState(self._step.model), _numbers_of_rows(alone)
        with stale_functions(rows.pop() if len(rows) == 1 else None) as stale:
            try:
                traced = self._converted(source, specs, alone, is_told)
            except Exception:  # of any kind; raised again
                before.restore(since=built)  # the step may be traced for other specs, and that trace counts
                raise
            if source.twice and traced.before.is_changed:
                before.restore(since=traced.before)
                self._trace(source, alone if is_told else specs)
                traced = self._converted(source, specs, alone, is_told)
        for name, why in stale.items():
            self.towers.session.warn_once(f"One device keeps a trace of the tf.function {name}, {why}")
        return traced

    def _converted(self, source: Source, specs: Any, alone: Any, is_told: bool) -> _Traced:
        """Trace the step, through autograph if it must be."""
        trace_once = self._told if is_told else self._asked
        if not source.autograph:
            return trace_once(source, specs, alone)
        before, failed = PythonState(self._step.model), None
        with tf_compat.values_asked(is_library) as asked:
            try:
                traced = trace_once(source, specs, alone)
            except (TypeError, tf_compat.ValueAsked) as error:  # Python's `if`, `for` or `len` of a tensor
                failed = error
        if failed is None and not asked:
            return traced
        logger.info("%s is traced through autograph, as tf.function does", source.function)
        before.restore()
        converted = tf_compat.autograph_converted(source.function)
        try:
            return trace_once(dataclasses.replace(source, function=converted), specs, alone)
        except TypeError as other:
            if isinstance(failed, TypeError) and str(failed) in str(other):  # autograph changes nothing about it
                raise failed from None
            raise

    def _asked(self, source: Source, specs: Any, alone: Any, *, builds: bool = True) -> _Traced:
        """Trace the step, unless Python goes by a length that is open here, and not on one device.

        With `builds`, layers are built as one device builds them.
        """
        if _is_known(specs) or not _is_known(alone):
            return self._trace(source, specs)
        # At once: what follows may be far more than what one device traces, as a loop of as many steps as there can be.
        passes_on = not self.any_rows
        with tf_compat.open_lengths_asked(is_library, ends=True, builds=builds, passes_on=passes_on) as asked:
            try:
                traced = self._trace(source, specs)
            except (Exception, tf_compat.OpenLengthAsked):  # raised again, unless it may come of the question
                if not asked:
                    raise
        if not asked:
            return self._accepted(traced, specs, alone)
        if not asked.builds:
            raise _Asked(asked[0])
        self._trace_alone(source, alone)  # all layers are built, of the shapes that one device gives them
        return self._asked(source, specs, alone, builds=False)

    def _accepted(self, traced: _Traced, specs: Any, alone: Any) -> _Traced:
        """Return a trace; raise _Asked if TensorFlow refuses a batch of one device's specs where open lengths pass."""
        if self.any_rows and repr(specs) != repr(open_specs(alone)):  # TensorFlow would have relaxed one device's, too
            return traced
        refusals = Refusals(traced.trace)
        if line := refusals.line(ungrouped(alone)):
            raise _Asked(line, "TensorFlow raises no error")
        return dataclasses.replace(traced, refusals=refusals)

    def _trace_alone(self, source: Source, alone: Any, begin: Callable[[], None] = lambda: None) -> None:
        """Trace the step as one device does; put Python's state back to where its last run has begun.

        Where it creates variables, its Python runs twice, as on one device; the trace that follows is the second.
        """
        before = PythonState(self._step.model)

        def begins() -> None:
            nonlocal before
            before = PythonState(self._step.model)
            begin()

        self._trace(source, alone, observed=False, begin=begins)
        before.restore()

    def _told(self, source: Source, specs: Any, alone: Any) -> _Traced:
        """Trace the step so that Python reads what one device's trace shows of each tensor's shape."""
        with tf_compat.shapes_read(is_library) as shapes:
            self._trace_alone(source, alone, shapes.begin)
        lengths = _numbers_of_rows(alone)
        told = self._trace_told(_Told(shapes, lengths.pop() if len(lengths) == 1 else None), source, specs)
        return self._accepted(told, specs, alone)

    def _trace_told(self, told: _Told | None, *given: Any) -> _Traced:
        """Trace the step, and tell Python these shapes, if any.

        Raises:
            _Asked: Python goes by a length that it was not told.
        """
        if told is None:
            return self._trace(*given)
        with tf_compat.shapes_read(is_library, told.shapes) as read, digests_aside():
            traced = self._trace(*given, begin=read.begin)  # with numbers of this batch's shapes
        if line := read.untold(told.shapes):
            raise _Asked(line)
        return dataclasses.replace(traced, trace=dataclasses.replace(traced.trace, rows=told.rows), told=told)

    def _trace(
        self,
        source: Source,
        specs: Any,
        opened: Opened = (),
        *,
        observed: bool = True,
        begin: Callable[[], None] = lambda: None,
    ) -> _Traced:
        """Trace the step; `begin` is called before its Python runs, which is twice where it creates variables."""
        step: Callable[[Any], Any] = functools.partial(_on_given, begin, source)
        readers = self.readers() if observed else {}
        observer, before = Observer() if readers else None, PythonState(self._step.model)
        with contextlib.ExitStack() as stack:
            if observer is not None:
                step = observer.around(step, readers)
                stack.enter_context(observer.hooks())
            sharding = self.towers.replicas.sharding
            stack.enter_context(step_hooks(self.towers.compression, sharding))
            stack.enter_context(draws_seen())
            stack.enter_context(moments_of_layers(self.towers.options.exact_batch_norm))
            if sharding is not None:
                stack.enter_context(sharding.hooks(self.towers.replicas.of))
            stack.enter_context(tf.device(f"/{self.towers.layout.devices[0]}"))
            made = trace(step, specs, jit_compile=source.jit_compile, opened=opened)
        return _Traced(source, specs, made, observer, before)

    def _cut(self, traced: _Traced, meter: Meter | None, *, again: bool = True, undivided: str = "") -> Program:
        """Cut a traced step into a program; see `segment.compile_segment` for `meter`, and `cut` for `undivided`.

        If it cannot be divided, every tower computes the whole batch, and a warning says so.
        """
        options, session, observer = self.towers.options, self.towers.session, traced.observer
        finite = observer is not None and "finite" in self.readers()
        divides = self.towers.layout.divided is not None or options.on_oom is not None
        repeats = options.exact_random or options.health.audit_every is not None or divides
        if told := check_draws(traced.trace.function.graph, traced.trace.definition, refuses=repeats):
            session.inexact[told] = None
            session.warn_once(f"{told.where}, {told.reason}: {told.remedy}")
        traceless = Traceless.WEIGHTS
        if self.towers.layout.meets_processes:  # another may fail at any moment; between GPUs they agree on weights
            traceless = Traceless.BESIDE_WEIGHTS if self.towers.communicator.enqueues else Traceless.IN_ALL
        if options.on_oom is not None:
            traceless = Traceless.IN_ALL
        try:
            with tf_compat.unobserved():
                program = cut(
                    traced.trace,
                    session.target,
                    traced.source.results,
                    undone=finite,
                    traceless=traceless,
                    meter=meter,
                    undivided=undivided,
                )
        except Undividable as fault:
            traced.before.restore()
            other = self._trace_told(traced.told, traced.source, traced.specs)
            words = f"Exact, but every tower computes the whole batch: {fault}"
            return self._cut(other, meter, again=again, undivided=words)
        if program.fixed and again:
            # A part with a fixed number of rows would be computed for the whole batch: trace again, with it left open.
            traced.before.restore()
            try:
                other = self._trace_told(traced.told, traced.source, traced.specs, program.fixed)
                return self._cut(other, meter, again=False, undivided=undivided)
            except (TypeError, ValueError) as error:
                logger.debug("The step needs the number of rows of its variables: %s", error)
        if observer is not None:
            if finite and observer.scale is not None:
                session.warn_once(
                    "on_nonfinite has no effect on this step: its LossScaleOptimizer skips the updates whose "
                    "gradients are not finite, and lowers its scale by them."
                )
            program = _with_gradients(program, tuple(observer.names))
        if self.trains:
            self.towers.watch.add_trace(traced.trace)
        if program.jit_compile:
            share_programs(self.towers.layout.devices)
        return dataclasses.replace(program, graph=traced.trace.function.graph)

    def _warn_of_inexact(self, program: Program) -> None:
        """Warn of why the step is not exact: by the model, or by lines that draw or normalise."""
        layout = self.towers.layout
        if layout.shards == 1:
            return  # it has the whole batch
        named, found = [*self._step.find_inexact()] if self.trains else [], list[Inexact]()
        for lines, cause in ((program.draws, DRAWS), (program.normalized, NORMALISES)):
            if lines:  # else its layers have all rows on every tower, or draw what has no rows
                layers = [part for part in named if part.reason == cause[0]]
                found += layers or [Inexact(" and ".join(lines[:3]), *cause)]
        self.towers.session.inexact.update(dict.fromkeys(found))
        what = "Training" if self.trains else "Evaluation or prediction"
        if text := say_inexact(found, "shard" if layout.divided else "tower", what):
            self.towers.session.warn_once(text)


def _numbers_of_rows(specs: Any) -> set[int | None]:
    """Return how many rows the tensors of a batch have, by their specs; None is an open number."""
    shapes = [spec.shape for spec in tf.nest.flatten(specs) if hasattr(spec, "shape")]
    return {shape[0] for shape in shapes if shape.rank}


def _is_known(specs: Any) -> bool:
    """Return whether the specs of a batch say how many rows it has."""
    return bool(_numbers_of_rows(specs) - {None})


def _with_gradients(program: Program, names: tuple[str, ...]) -> Program:
    """Take the readings of the gradients, whose names are given, out of a program's results."""
    structure, read = program.structure
    known = sorted(name for name, leaf in read.items() if leaf is not None)
    split = len(program.outputs) - len(known)
    found: dict[str, Any] = {name: output for name, (output, _) in zip(known, program.outputs[split:], strict=True)}
    outputs = program.outputs[:split]
    return dataclasses.replace(program, structure=structure, outputs=outputs, gradients=names, **found)


def python_step(step: Callable) -> Callable:
    """Return the Python function of a step that its author decorated with `tf.function`."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return inlined(step)
    return step


def _on_given(begin: Callable[[], None], source: Source, batch: Any) -> Any:
    """Call a step on a batch as its author gave it, after `begin`."""
    begin()
    results = python_step(source.function)(ungrouped(batch))
    if source.returning and results is None:
        raise TypeError(
            f"Expected {source.returning} to return its results, such as a dictionary of logs, {{'loss': loss}}. "
            "Received: None. Does its last line lack a return?"
        )
    return results
