"""Run a step on all towers: trace it once per shape of shard, lay it out as one graph, mend it if it fails.

A subclass gives the step: a method of a Keras model (`keras_model.py`), or a function (`loop.py`).
"""

import abc
import contextlib
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.communicator.peers import SAME_ROWS
from ncclsync.compat import other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import innermost
from ncclsync.errors import NcclSyncError, ProcessError
from ncclsync.gradients.hooks import step_hooks
from ncclsync.gradients.noise_scale import gradient_moments
from ncclsync.gradients.nonfinite import finite_flags
from ncclsync.gradients.observer import Observer
from ncclsync.ops.spans import STEPS, WAIT, Meter, NoBatchLeft, begin, hold, measured
from ncclsync.program.check import StepCheck, Unchecked
from ncclsync.program.cut import cut
from ncclsync.program.losses import MOST_LOST, losses_of
from ncclsync.program.program import Program, Results
from ncclsync.program.trace import Trace, trace
from ncclsync.semantics.draws import check_draws
from ncclsync.semantics.exactness import DRAWS, NORMALISES, Inexact
from ncclsync.semantics.normalization import moments_of_layers
from ncclsync.semantics.shards import (
    components_of,
    digest_of_rows,
    fixed_specs,
    grouped,
    has_groups,
    open_specs,
    rowed_leaves,
    rows_of,
    ungrouped,
)
from ncclsync.towers.audit import Audit
from ncclsync.towers.feeding import CountingDataset, Feeder, Places, Staging, feeds, split_batch
from ncclsync.towers.layout import lay_out
from ncclsync.towers.placement import check_xla_captures_nothing
from ncclsync.towers.recovery import KeptBatch, Rollback
from ncclsync.towers.state import TowerState

logger = logging.getLogger("ncclsync")

# Where a graph function's batches come from: it is given them, takes them from an iterator, or is fed.
_GIVEN, _ITERATED, _FED = "given", "iterated", "fed"

# Where no call within a step does, processes compare the first batches of an iterator, or of none, and then every 50th:
# it takes about a millisecond.
_COMPARED, _EVERY = 2, 50


@dataclasses.dataclass(frozen=True)
class _Setup:
    """Hold what one graph function runs, and what it needs if that fails."""

    program: Program
    rollback: Rollback
    kept: KeptBatch
    meter: Meter | None
    staging: Staging | None = None
    audit: Audit | None = None

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Return the ids of tower 0's variables that the program may write."""
        written = frozenset[str]().union(*(segment.written for segment in self.program.segments))
        return frozenset(id(variable) for name, variable in self.program.variables if name in written)


@dataclasses.dataclass(frozen=True)
class Source:
    """Say what a step is before it is traced.

    Attributes:
        function: of a batch.
        results: how the towers' results are combined.
        jit_compile: whether XLA compiles it.
        autograph: whether Python's conditions and loops over tensors are converted, where it has such.
    """

    function: Callable[[Any], Any]
    results: Results = Results.COMBINED
    jit_compile: bool = False
    autograph: bool = False


class TowerStep(abc.ABC):
    """Run a step on towers.

    Attributes:
        towers: where it runs.
        steps_per_execution: how many steps one call of the graph makes on batches of an iterator.
    """

    steps_per_execution = 1

    def __init__(self, towers: TowerState, trains: bool) -> None:
        """Prepare; nothing is traced before the first batch.

        Args:
            towers: where it runs.
            trains: whether it counts as a training step.
        """
        self.towers = towers
        self._trains = trains
        self._meter: Meter | None = None  # of all graphs that are watched
        self._unchecked: dict[int, Trace] = {}  # by the id of a program that has not run yet
        self._compared: Any = None  # the iterator, or None, whose batches are compared among processes
        self._number = 0  # of the last of these
        self._digest: Callable[[], bytes | None] | None = None  # stands for its batches, if each process reads its own
        # By the specs of a shard, the readers of its gradients, and whether watched.
        self._programs: dict[tuple[str, bool], Program] = {}
        # By the specs of a batch, the readers, what feeds it, and whether watched.
        self._graphs: dict[tuple[str, bool], tuple[Callable, _Setup]] = {}
        self._sizes: tf.Variable | None = None  # of `CountingDataset`, for the batches that come
        self._version = 0  # of what the trace for the last batch has seen; see `version_for`
        self._traced = False  # whether the user's Python has given the trace that is being placed
        self._fixed_rows: set[str] = set()  # specs of shards that cannot be traced with an open number of rows
        self._shards = towers.shards.total  # for which these are
        self._ran: _Setup | None = None  # what was run last
        self._audited: Audit | None = None  # by the steps that have run and are not counted

    @abc.abstractmethod
    def source(self, specs: Any) -> Source:
        """Return the function to trace for batches of these specs; make what it needs first."""

    def version_for(self, batch: Any) -> int:
        """Return the number of a version of the step: batches, or specs, of one number run what was traced for it."""
        return 0

    def find_inexact(self) -> Sequence[Inexact]:
        """Return why the step, once traced, is not one device's, as far as the model shows."""
        return ()

    def make_program(self, specs: Any, meter: Meter | None) -> Program:
        """Trace the step for shards of these specs, and cut it; see `segment.compile_segment` for `meter`."""
        self.towers.check_repeatable()
        source = self.source(ungrouped(specs))
        try:
            program = self._trace_and_cut(source, specs, meter)
        except TypeError as error:  # Python's `if`, `for` or `len` of a tensor
            if not source.autograph or self._traced:
                raise
            logger.info("%s is traced through autograph, as tf.function does", source.function)
            converted = tf_compat.autograph_converted(source.function)
            try:
                program = self._trace_and_cut(dataclasses.replace(source, function=converted), specs, meter)
            except TypeError as other:
                if not self._traced and str(error) in str(other):  # autograph changes nothing about it
                    raise error from None
                raise
        lines = dict.fromkeys(one.unrepeatable for one in program.segments if one.unrepeatable)
        if self.towers.options.on_oom is not None and lines:
            self.towers.warn_once(
                f"on_oom cannot undo {' and '.join([*lines][:3])}: it happens again where a step that does not fit "
                "the memory runs again. Move it out of the step"
            )
        if self._trains:
            found = self.find_inexact()
            for part in found:
                self.warn_of(part)
            self.warn_of_choices(program, {part.reason for part in found})
        return program

    def _trace_and_cut(self, source: Source, specs: Any, meter: Meter | None) -> Program:
        if source.jit_compile and self.towers.in_flight.active:
            check_xla_captures_nothing()
        readers = self._readers()
        observer = Observer() if readers else None
        step: Callable[[Any], Any] = functools.partial(_on_given, python_step(source.function))
        with contextlib.ExitStack() as stack:
            if observer is not None:
                step = observer.around(step, readers)
                stack.enter_context(observer.hooks())
            stack.enter_context(self.hooks())
            stack.enter_context(tf.device(f"/{self.towers.devices[0]}"))
            traced = trace(step, specs, jit_compile=source.jit_compile)
        self._traced = True
        divides = self.towers.has_shards or self.towers.options.on_oom is not None
        repeats = self.towers.options.exact_random or self.towers.audits or divides
        check_draws(traced.function, refuses=repeats)
        with tf_compat.unobserved():
            program = cut(
                traced,
                self.towers.target,
                source.results,
                undone="finite" in readers,
                traceless=self.towers.options.on_oom is not None,
                meter=meter,
            )
        if observer is None:
            return self._to_be_checked(program, traced)
        if "finite" in readers and observer.scale is not None:
            self.towers.warn_once(
                "on_nonfinite has no effect on this step: its LossScaleOptimizer skips the updates whose "
                "gradients are not finite, and lowers its scale by them."
            )
        structure, read = program.structure
        known = sorted(name for name, leaf in read.items() if leaf is not None)  # the last of the outputs
        split = len(program.outputs) - len(known)
        outputs = {name: output for name, (output, _) in zip(known, program.outputs[split:], strict=True)}
        program = dataclasses.replace(
            program,
            structure=structure,
            outputs=program.outputs[:split],
            gradients=tuple(observer.names),
            finite=outputs.get("finite"),
            noise=outputs.get("noise"),
        )
        return self._to_be_checked(program, traced)

    def _to_be_checked(self, program: Program, traced: Trace) -> Program:
        """Keep what a program was made of until it has run, if it is to be checked then."""
        if self._trains and self.towers.checks_first_step and self.towers.shards.total > 1:
            self._unchecked[id(program)] = traced
        return program

    def warn_of(self, part: Inexact) -> None:
        """Warn of a reason why the step is not one device's."""
        count = self.towers.shards.total
        what = f"{count} shards" if self.towers.has_shards else f"{count} towers"
        self.towers.warn_once(f"{what} do not train as one device: {part}")

    def warn_of_choices(self, program: Program, known: set[str]) -> None:
        """Warn of the lines that a choice makes inexact, unless it is among the `known` reasons."""
        if self.towers.shards.total == 1 or not self._trains:
            return
        for lines, cause in ((program.draws, DRAWS), (program.normalized, NORMALISES)):
            if lines and cause[0] not in known:
                self.warn_of(Inexact(" and ".join(lines[:3]), *cause))

    def _warn_of_costs(self, setup: "_Setup") -> None:
        """Warn if towers lose much of a step, since each needs the rows of all; exact it is."""
        rows, towers, program = rows_of(setup.kept.batch()) or 0, len(self.towers), setup.program
        losses = losses_of(program.work, program.gradient_bytes(towers, rows), rows, towers)
        if rows < towers and has_groups(setup.kept.batch()):
            self.towers.warn_once(
                f"Exact, but {towers - rows} of {towers} towers have nothing to do: a batch has as many samples as its "
                f"tensor with the fewest rows, {rows}. Give a value for the whole batch to each row, as tf.repeat "
                "does, and take the first one's in the step"
            )
        elif losses.share > MOST_LOST:
            # Once for all sizes of batches, and for whoever calls the step.
            self.towers.warn_once(str(losses), about=str(sorted(one.place for one in losses.places)))

    def _readers(self) -> dict[str, Callable[[Observer], tf.Tensor | None]]:
        """Return the readers of this step's gradients, by the names that `Program` has for their results."""
        readers: dict[str, Callable[[Observer], tf.Tensor | None]] = {}
        if self._trains and self.towers.on_nonfinite.mode:
            readers["finite"] = finite_flags
        if self._trains and self.towers.noise.active:
            readers["noise"] = gradient_moments
        return readers

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Change what the Python of a step does on towers, while it is traced."""
        sharding = self.towers.sharding
        shards = contextlib.nullcontext() if sharding is None else sharding.hooks(self.towers.copies)
        with (
            step_hooks(self.towers.compression, sharding),
            moments_of_layers(self.towers.options.exact_batch_norm),
            shards,
        ):
            yield

    def run_on_iterator(self, iterator: tf.data.Iterator) -> Any:
        """Run `steps_per_execution` steps, or as many as there are batches for; return the last results.

        Raises:
            NoBatchLeft: an OutOfRangeError of the iterator.
            NcclSyncError: the towers are closed.
            Exception: whatever a step raises on any tower. All towers' weights are then equal, and are
                those from before that step or from after it.
            DivergenceError: towers hold different values; see `TowerState`.
            NonFiniteError: a gradient is not finite; see `TowerState`.
        """
        if self.towers.meets_processes:
            if self._compared is None or self._compared() is not iterator:
                self._compared, self._number = weakref.ref(iterator), 0
                counting = [one for one in tf_compat.datasets_of(iterator) if isinstance(one, CountingDataset)]
                self._digest = next((one.digest for one in counting if one.digest() is not None), None)
                self._sizes = next((one.sizes for one in counting if one.sizes is not None), None)
            self.towers.communicator.reads_same_rows = self._digest is None
        if feeds(self.towers.devices):
            feeder = self.towers.feeders.get(iterator)
            if feeder is None:
                feeder = self.towers.feeders[iterator] = Feeder(iterator)
            source, run = _FED, functools.partial(self._run_fed, feeder)
        else:
            # Its handle, since tf.function looks at whatever else it is called with, in Python.
            (handle,) = tf.nest.flatten(iterator, expand_composites=True)
            source, run = _ITERATED, functools.partial(_run_iterated, handle)
        watchers = self.towers.watchers
        done = 0
        while done < self.steps_per_execution:
            for watcher in watchers if done else ():
                self.towers.watch_next(watcher)
            try:
                made, results = self._run(iterator.element_spec, source, run)
            except NoBatchLeft:
                if done == 0:
                    raise
                break
            self.count(made)
            done += self._steps_per_call
        return results

    @property
    def _steps_per_call(self) -> int:
        """Return how many steps one call of the graph makes: where a step may have to run again, one."""
        return self.steps_per_execution if self.towers.options.on_oom is None else 1

    def run_on_batch(self, batch: Any) -> Any:
        """Run one step on a batch of tensors, within `TowerState.telling`; return its results.

        Raises:
            ValueError: the batch has no rows, or not as many in each tensor.
            Exception: what `run_on_iterator` raises.
        """
        batch = grouped(batch)
        rowed_leaves(batch)
        leaves = leaves_of(batch)
        self._compared, self._sizes = None, self.towers.sizes_of_given
        self._digest = None if self._sizes is None else bytes
        self.towers.communicator.reads_same_rows = self._sizes is None
        results = self._run(batch, _GIVEN, lambda graph, _: graph(*leaves))
        self.count(None)
        return results

    def count(self, steps: tf.Tensor | None) -> None:
        """Report `steps` that have run, None for one, to the towers, if they count them; see what an audit has found.

        Raises:
            AuditError, DivergenceError: towers have computed, or hold, different numbers.
        """
        if not self._trains or not self.towers.counts_steps:
            return
        audit, self._audited = self._audited, None
        made = 1 if steps is None else int(steps)
        if audit is not None:
            self.towers.remember_audit(made)
            audit.check(self.towers.steps + made)
        self.towers.count_steps(made)

    def _run(self, batch_specs: Any, source: str, run: "Callable[[Callable, _Setup], Any]") -> Any:
        """Run the graph function for batches of these specs; divided further if it does not fit the memory."""
        if self.towers.options.on_oom is None:
            return self._run_watched(batch_specs, source, run)
        self._forget_programs_of_other_shards()
        try:
            return self._run_watched(batch_specs, source, run)
        except tf.errors.ResourceExhaustedError:
            began = self._ran is not None and self._ran.rollback.undone
            batch = self._ran.kept.batch() if self._ran is not None and began else None
            rows = None if batch is None else rows_of(batch)
            if rows is None or not self.towers.split_further(rows):
                raise
        leaves = leaves_of(batch)
        results = self._run(batch, _GIVEN, lambda graph, _: graph(*leaves))
        return results if source == _GIVEN else (None, results)

    def _forget_programs_of_other_shards(self) -> None:
        if self.towers.shards.total != self._shards:
            self._shards = self.towers.shards.total
            self._programs.clear()
            self._graphs.clear()
            self._ran = None
            gc.collect()  # what the programs before kept on the towers, such as old weights, is in cycles

    def _run_watched(self, batch_specs: Any, source: str, run: "Callable[[Callable, _Setup], Any]") -> Any:
        """Run the graph function for batches of these specs; another one if somebody watches the step.

        Args:
            batch_specs: of the batches; the batch itself, if it is given.
            source: where they come from: one of the words above.
            run: calls the graph function.
        """
        # Before anything is kept: the variables of another function's graph would be found by later steps.
        self.towers.require_eager("fit, evaluate, predict and the _on_batch methods of a model on towers")
        watchers = self.towers.next_watchers() if self._trains else []
        audits = self._trains and self.towers.is_audit_due(self._steps_per_call)
        if audits:  # what is computed again is no part of a step's time
            watchers = []
        setup: _Setup | None = None
        known = len(self._graphs)
        if not watchers:
            if self._meter is not None:
                self._meter.forget()
            graph, setup = self._graph_of(batch_specs, source, None, audits=audits)
            results = self._run_checked(functools.partial(run, graph, setup), setup)
            self._audited = setup.audit
            self._compare_batches(setup)
            if len(self._graphs) > known and self._trains and len(self.towers) > 1:
                self._warn_of_costs(setup)
            return results
        self._meter = self._meter or Meter()
        graph, setup = self._graph_of(batch_specs, source, self._meter)
        with self._meter.reported_to(watchers, traced=len(self._graphs) > known):
            results = self.guarded(functools.partial(run, graph, setup), setup)
        self._compare_batches(setup)  # other processes may have nobody who watches
        return results

    def _compare_batches(self, setup: _Setup) -> None:
        """See that all processes have run a step on the same batch, where the step itself does not.

        Raises:
            ProcessError: they have not.
        """
        communicator = self.towers.communicator
        if not self.towers.meets_processes or (communicator.compares_batches and communicator.reads_same_rows):
            return
        self._number += 1
        if self._number > _COMPARED and (self._number % _EVERY or not communicator.reads_same_rows):
            return
        digest = digest_of_rows(setup.kept.batch()) if self._digest is None else self._digest()
        digests = communicator.exchange(digest, "the comparison of batches")
        other = next((i for i, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise ProcessError(
                f"Expected all processes to read the same batches. Received: other rows in process {other} than in "
                f"process 0, in batch {self._number}{' or before' * (self._number > _COMPARED)}. {SAME_ROWS}"
            )

    def _run_fed(self, feeder: Feeder, graph: Callable, setup: "_Setup") -> Any:
        """Run what `_steps_on_iterator` does in a graph, on batches that a feeder has brought to the towers."""
        assert setup.staging is not None
        done, results = 0, None
        while done < self._steps_per_call:
            try:
                with measured(setup.meter, STEPS, WAIT):
                    components, parts = feeder.take(setup.staging)
            except tf.errors.OutOfRangeError as error:
                if done == 0:
                    raise NoBatchLeft(error) from None
                break
            setup.kept.hold(components)
            results = graph(*parts)
            done += 1
        return done, results

    def _run_checked(self, run: Callable[[], Any], setup: _Setup) -> Any:
        """Run a step; if it is the program's first, check it on rows of its batch, from what it started from.

        After it has run, since only then the batch is there: a graph takes it from the iterator.
        """
        program = setup.program
        traced = self._unchecked.get(id(program))
        if traced is None or not tf.executing_eagerly():
            return self.guarded(run, setup)
        variables = [variable for _, variable in program.variables]
        check = StepCheck(traced, self.towers.devices[0], program.results, variables, len(program.outputs))
        results = self.guarded(run, setup)
        del self._unchecked[id(program)]
        try:
            found = check.run(setup.kept.batch(), self.towers.names_of, self.towers.shards.total)
        except Unchecked as reason:
            self.towers.warn_once(f"The first step on towers was not checked: {reason}")
        except Exception as error:  # whatever it is: training goes on
            logger.warning("The first step on towers was not checked: %s", error, exc_info=True)
        else:
            if found is not None:
                self.towers.found_by_check.append(found)
                self.towers.warn_once(str(found))
        return results

    def _graph_of(
        self, batch_specs: Any, source: str, meter: Meter | None, *, audits: bool = False
    ) -> "tuple[Callable, _Setup]":
        """Return the graph function for batches of these specs; make its program first.

        First, since a step that is traced while another function is being traced records no gradients.
        """
        other_libraries.check_outside_strategy()
        self._version = self.version_for(batch_specs)
        specs = batch_specs if source != _GIVEN else self._specs_of(batch_specs)
        plain = f"{specs!r} {source} {[*self._readers()]} {self._version}"
        if self._sizes is not None:  # the graph reads it
            plain += " sizes"
        key = f"{plain} audited" if audits else plain, meter is not None
        if key not in self._graphs:
            with _collecting_no_garbage():
                if source == _GIVEN:
                    self.program_of(fixed_specs(batch_specs), meter)
                    if self._specs_of(batch_specs) != specs:  # known by now
                        return self._graph_of(batch_specs, source, meter, audits=audits)
                self._graphs[key] = self._make_graph(specs, source, meter, plain, audits=audits)
        return self._graphs[key]

    def _specs_of(self, batch: Any) -> Any:
        """Return the specs of a batch: a last, smaller one is no reason to trace again, unless the step must know."""
        opened = open_specs(batch)
        return fixed_specs(batch) if repr(opened) in self._fixed_rows else opened

    def _make_graph(
        self, batch_specs: Any, source: str, meter: Meter | None, plain: str, *, audits: bool
    ) -> "tuple[Callable, _Setup]":
        """Make what `_graph_of` returns; `plain` names the graph that is not audited, watched or not."""
        specs = grouped(without_optionals(batch_specs))
        program = self.program_of(specs, meter)
        for _, variable in program.variables:
            self.towers.copies(variable)
        for warning in program.warnings:
            self.towers.warn_once(warning)
        known = [self._graphs[plain, watched][1] for watched in (True, False) if (plain, watched) in self._graphs]
        other = next((one for one in known if one.program is program), None)
        if other is not None:
            setup = dataclasses.replace(other, meter=meter)
        else:
            kept = KeptBatch(specs)
            # TensorFlow keeps every py op's function for good, and what that refers to.
            borrowed = weakref.ref(self.towers), weakref.ref(kept)
            report = functools.partial(_report_nonfinite, *borrowed, program.gradients)
            setup = _Setup(program, Rollback(program, self.towers, report), kept, meter)
        if audits:
            setup = dataclasses.replace(setup, audit=Audit(program, self.towers))
        if source == _FED:
            fetch = functools.partial(_next_batch, batch_specs)
            staging = Staging(fetch, specs, self._places, meter)
            setup = dataclasses.replace(setup, staging=staging)
            on_parts = functools.partial(self._on_parts, setup)
            graph = self._graph_function(on_parts, staging.signature)
        elif source == _ITERATED:
            spec = tf.data.IteratorSpec(batch_specs)
            on_handle = functools.partial(self._steps_on_iterator, setup, spec)
            graph = self._graph_function(on_handle, [tf.TensorSpec([], tf.resource)])
        else:
            on_leaves = functools.partial(_spread, functools.partial(self._on_towers, setup), specs)
            graph = self._graph_function(on_leaves, leaves_of(specs))
        return graph, setup

    def _graph_function(self, body: Callable, signature: Sequence[Any]) -> Callable:
        """Return a function of a graph."""
        with tf_compat.unobserved():
            if self.towers.enqueues:  # the layout gives all ops their order
                return tf_compat.unordered_function(body, signature)
            # tf.function itself looks at every variable in each call, to choose a trace.
            return tf.function(body, input_signature=signature, autograph=False).get_concrete_function()

    def program_of(self, specs: Any, meter: Meter | None = None) -> Program:
        """Return the program for batches of these specs, with timestamps in its segments if a meter is given.

        The number of rows is left open while it is traced, so that it is known what depends on it. Only where
        a step cannot be traced so, the shard's is given.
        """
        shard = open_specs(specs)
        if repr(shard) in self._fixed_rows:
            shard = specs
        name = f"{shard!r} {[*self._readers()]} {self._version}"
        key = name, meter is not None
        if key in self._programs:
            return self._programs[key]
        other = self._programs.get((name, meter is None))
        if other is not None and not other.packs:  # its segments have no timestamps, watched or not
            return other
        self._traced = False
        try:
            program = self.make_program(shard, meter)
        except (TypeError, ValueError, RuntimeError) as error:
            line, cause = innermost(error)
            misses_rows = isinstance(error, (TypeError, ValueError)) or isinstance(cause, (TypeError, ValueError))
            # Keras wraps what a model raises in a RuntimeError.
            if self._traced or repr(specs) == repr(shard) or not misses_rows:
                raise
            self._fixed_rows.add(repr(shard))
            try:
                program = self.program_of(specs, meter)
            except Exception:
                self._fixed_rows.discard(repr(shard))
                raise
            self.towers.warn_once(
                "The step can be traced for batches of a fixed number of rows alone, and cannot be divided: "
                f"every tower computes the whole batch. {line} needs that number while it is traced: "
                "tf.shape(x)[0] in place of x.shape[0] or len(x), and tensors in place of Python's loops, do not. "
                f"Without it: {cause}"
            )
            return program
        return self._programs.setdefault(key, program)

    def last(self) -> tuple[Program, Any] | None:
        """Return the program that was made last and ran, and the last batch that it got; None if none ran."""
        if not self._graphs:
            return None
        _, setup = list(self._graphs.values())[-1]
        return setup.program, setup.kept.batch()

    def guarded(self, run: Callable[[], Any], setup: "_Setup | None") -> Any:
        """Send tower 0's state to all towers, run a step, and mend the towers if it fails.

        TensorFlow wraps what a collective raises, or reports what that cancelled; here it is raised itself. So is what
        an op of ncclsync's says.
        """
        try:
            return self._run_or_mend(run, setup)
        except tf.errors.OpError as error:
            sentence = tf_compat.own_sentence(error)
            if sentence is None:
                raise
            raise NcclSyncError(f"{sentence}\n\nTensorFlow: {error.message}") from error

    def _run_or_mend(self, run: Callable[[], Any], setup: "_Setup | None") -> Any:
        if setup is not None:
            self._ran, setup.rollback.undone = setup, False
        try:
            self.towers.sync()
            with self.towers.interruptible():
                results = run()
            if setup is not None and self.towers.in_flight.active:
                self.towers.in_flight.add(setup.written, results)
            return results
        except NoBatchLeft:
            self.towers.in_flight.settle()
            raise
        except BaseException as error:
            self._mend(setup)
            nonfinite, self.towers.on_nonfinite.raised = self.towers.on_nonfinite.raised, None
            if nonfinite is not None:
                raise nonfinite from None
            others = self.towers.communicator.take_error()
            if others is not None:  # TensorFlow wraps what a collective raises
                self.towers.failed_collective()
                raise others from error
            written = frozenset() if setup is None or not self.towers.in_flight.active else setup.written
            failure = self.towers.failed_collective(written) if isinstance(error, Exception) else None
            if failure is not None and not isinstance(error, NcclSyncError):
                raise failure from error
            if self.towers.meets_processes:
                self.towers.communicator.report_failure(error)
            elif setup is not None and isinstance(error, tf.errors.CancelledError):
                self._raise_what_cancelled(setup)
            raise
        finally:
            if setup is not None and self.towers.shared:
                self.towers.report_writes(setup.written)

    def _mend(self, setup: "_Setup | None") -> None:
        """Undo what a failed step wrote on its way, and let all towers start anew from tower 0."""
        if setup is not None:
            setup.rollback.restore()
        self.towers.mark_stale()

    def _raise_what_cancelled(self, setup: "_Setup") -> None:
        """Run the batch of a cancelled step again, outside a graph: one tower after another."""
        self.towers.sync()
        try:
            lay_out(setup.program, self.towers, setup.kept.batch(), setup.rollback)
        except BaseException:
            self._mend(setup)
            raise

    def _steps_on_iterator(self, setup: "_Setup", spec: tf.data.IteratorSpec, handle: tf.Tensor) -> Any:
        """Run, in a graph, `steps_per_execution` steps, or as many as there are batches for.

        Returns how many have run, None where it can only be one, and the results of the last.
        """
        iterator = tf.nest.pack_sequence_as(spec, [handle], expand_composites=True)
        logs = self._on_towers(setup, _waited_for(setup.meter, iterator.get_next))
        steps = self._steps_per_call
        if steps == 1:
            return None, logs
        flat = tf.nest.flatten(logs)

        def fetch_if_needed(done):
            return tf.cond(
                done < steps,
                functools.partial(_waited_for, setup.meter, iterator.get_next_as_optional),
                lambda: tf.experimental.Optional.empty(iterator.element_spec),
            )

        def body(done, batch, _):
            logs = self._on_towers(setup, batch.get_value())
            with tf.control_dependencies(leaves_of(logs)):
                done = done + 1
            # A batch that no step of this call will use stays in the iterator.
            return done, fetch_if_needed(done), tf.nest.flatten(logs)

        with tf.control_dependencies(leaves_of(logs)):
            done = tf.constant(1)
        done, _, flat = tf.while_loop(
            lambda done, batch, _: batch.has_value(), body, (done, fetch_if_needed(done), flat)
        )
        return done, tf.nest.pack_sequence_as(logs, flat)

    @property
    def _places(self) -> Places:
        """Return where the shards of the batches that come are computed."""
        places = self.towers.shards
        return places if self._sizes is None else places._replace(held=self._sizes)

    def _on_parts(self, setup: "_Setup", *parts: tf.Tensor) -> Any:
        """Run one step, in a graph, on a batch that a `Staging` has brought to the towers."""
        assert setup.staging is not None
        shards = setup.staging.shards(parts)
        return lay_out(setup.program, self.towers, shards, setup.rollback, setup.meter, setup.audit)

    def _on_towers(self, setup: "_Setup", batch: Any) -> Any:
        """Run one step on all towers, in a graph."""
        batch = setup.kept.keep(grouped(without_optionals(batch)))
        if self._sizes is not None:
            batch = split_batch(batch, self._places, setup.meter)
        return lay_out(setup.program, self.towers, batch, setup.rollback, setup.meter, setup.audit)


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Let Python search for no garbage within: a graph that is built keeps nearly all, and searches take 12 % of it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _run_iterated(handle: tf.Tensor, graph: Callable, setup: _Setup) -> Any:
    """Run a graph that takes batches from the iterator of that handle; see whose end it is that it meets."""
    try:
        return graph(handle)
    except tf.errors.OutOfRangeError as error:
        if setup.rollback.under_way:
            raise
        raise NoBatchLeft(error) from None


def _next_batch(batch_specs: Any, handle: tf.Tensor) -> Any:
    """Return the next batch of the iterator of that handle, in a graph."""
    iterator = tf.nest.pack_sequence_as(tf.data.IteratorSpec(batch_specs), [handle], expand_composites=True)
    return grouped(without_optionals(iterator.get_next()))


def _waited_for(meter: Meter | None, get_next: Callable[[], Any]) -> Any:
    """Return the next batch, perhaps as an optional, in a graph."""
    span = begin(meter, STEPS, WAIT)
    with tf.control_dependencies(span.ops):
        batch = get_next()
    return hold(batch, span.end(components_of(batch)))


def _report_nonfinite(
    towers: "weakref.ref[TowerState]",
    kept: "weakref.ref[KeptBatch]",
    names: tuple[str, ...],
    finite: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """Report gradients that are not finite; called by the graph of a step, whose batch is kept."""
    state, batch = towers(), kept()
    assert state is not None and batch is not None  # the step that calls it is theirs
    given, total = batch.batch(), int(sizes.sum())
    if rows_of(given) != total:  # it has this process' rows alone: copies stand in the others' places
        rows = tf.range(total) - int(sizes[: state.shards.ranks[0]].sum())
        rows = tf.clip_by_value(rows, 0, (rows_of(given) or 1) - 1)
        given = tf.nest.map_structure(lambda one: tf.gather(one, rows), given)
    state.on_nonfinite.report(finite, sizes, names, given, state.owners)


def python_step(step: Callable) -> Callable:
    """Return the Python function of a step that its author decorated with `tf.function`."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return tf_compat.autograph_converted(step.python_function)
    return step


def _on_given(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call a step on a batch as its author gave it."""
    return function(ungrouped(batch))


def without_optionals(batch: Any) -> Any:
    """Return a batch, or its specs, with None where it holds a `tf.experimental.Optional`, as Keras does.

    Keras puts one in place of a None that a generator yields. A None of arrays stays None in a
    `tf.data.Dataset`, whose spec of it is another.
    """
    of_none = type(tf.type_spec_from_value(None))  # tf.NoneTensorSpec, as TensorFlow 2.21 calls it
    missing = (tf.experimental.Optional, tf.OptionalSpec, of_none)
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, batch)


def to_tensor(leaf: Any) -> Any:
    """Return a leaf of a batch as a tensor; None stays None.

    Raises:
        TypeError: it is a value of `tf.distribute`, a dataset, or an iterator.
    """
    other_libraries.check_undistributed(leaf)
    if isinstance(leaf, (tf.data.Dataset, keras.utils.PyDataset, Iterator)):
        raise TypeError(
            f"Expected tensors or arrays, of one batch. Received: {leaf!r}, which gives many. Write "
            "`for batch in dataset: towers.run(step, batch)`, or model.fit(dataset)"
        )
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional):
        return leaf
    with tf.device("/CPU:0"):  # where it is split; else TensorFlow takes it to a GPU, and back
        return tf.convert_to_tensor(leaf)


def leaves_of(structure: Any) -> list[Any]:
    """Return the leaves of a nested structure that are not None."""
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _spread(function: Callable, like: Any, *leaves: Any) -> Any:
    """Call `function` on a structure such as `like` with these leaves in place of those that are not None."""
    given = iter(leaves)
    return function(tf.nest.map_structure(lambda leaf: None if leaf is None else next(given), like))
