"""Run a step on all towers: choose the function of its graph for a batch, run it, and mend what fails.

`programs.py` makes the program, `step_function.py` the graph.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.communicator.timeouts import held_back, interruptible
from ncclsync.compat import other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import calls_of
from ncclsync.costs.losses import MOST_LOST
from ncclsync.costs.roofline import CORE, GPU
from ncclsync.errors import NcclSyncError, NonFiniteError
from ncclsync.ops.spans import Meter, NoBatchLeft
from ncclsync.program.program import Program
from ncclsync.sharding.shards import (
    Grouped,
    fixed_specs,
    grouped,
    is_marked,
    open_specs,
    ratios_of,
    rowed_leaves,
    rows_of,
    says_unequal,
    ungrouped,
    without_optionals,
)
from ncclsync.towers.audit import Audit
from ncclsync.towers.laying_out import lay_out
from ncclsync.towers.programs import MOST_KEPT, Key, Programs
from ncclsync.towers.reading import Reading
from ncclsync.towers.recovery import KeptBatch, Rollback
from ncclsync.towers.retracing import Retracing, Version
from ncclsync.towers.state import TowerState
from ncclsync.towers.step_function import FunctionKey, OnFed, OnGiven, OnIterator, StepFunction
from ncclsync.towers.watch import Watcher

logger = logging.getLogger("ncclsync")

_MOST_RATIOS = 2  # of rows of a batch's tensors, each of which takes a program: as many shapes as TensorFlow traces


class TowerStep:
    """Run a step on towers."""

    def __init__(self, programs: Programs, retracing: Retracing) -> None:
        """Prepare; nothing is traced yet."""
        self.towers, self.trains = programs.towers, programs.trains
        self.programs = programs
        self.retracing = retracing
        # What `_version_for` returns, by kinds of batches, and how many traces there were when that was found.
        self._known: dict[tuple[bool, str, int], tuple[Version, Any, str]] = {}
        self._known_of = 0
        self._meter: Meter | None = None  # of all watched graphs
        self._reading = Reading(self.towers)
        self._functions: dict[FunctionKey, StepFunction] = {}  # the one used last at the end
        self._ratios: set[tuple[int, ...]] = set()

    def run_on_iterator(self, iterator: tf.data.Iterator) -> Any:
        """Run as many steps as a call has, or fewer if the batches end; return the last results.

        Raises:
            NoBatchLeft: an OutOfRangeError of the iterator.
            NcclSyncError: the towers are closed.
            Exception: whatever a step raises on any tower. All towers' weights are then equal, and are
                those from before that step or from after it.
            DivergenceError: towers hold different values; see `Watch`.
            NonFiniteError: a gradient is not finite; see `Health`.
        """
        towers = self.towers
        self._reading.from_iterator(iterator)
        kind = OnFed if towers.layout.on_gpus else OnIterator
        watchers = towers.watch.take_watchers() if self.trains else ()
        steps = self._version_for(OnIterator, iterator.element_spec)[0].steps
        at_once = steps if towers.options.on_oom is None else 1  # a step that may run again is a call of its own
        done = 0
        while done < steps:
            try:
                results = self._run(kind, iterator, watchers, at_once)
            except NoBatchLeft:
                if done == 0:
                    raise
                break
            done += at_once
        return results

    def run_on_batch(self, batch: Any, version: Version | None = None) -> Any:
        """Run one step on a batch of tensors, within `TowerState.telling`; return its results.

        `version`: the batch's, if it depends on other batches of the call.

        Raises:
            ValueError: the batch has no rows, or its tensors have different numbers of rows.
            Exception: what `run_on_iterator` raises.
        """
        self._reading.from_call()
        if self.towers.own_rows is None:  # else towers' rows are counted by samples alone
            batch = self.marked(batch)
        rowed_leaves(batch)
        watchers = self.towers.watch.take_watchers() if self.trains else ()
        return self._run(OnGiven, batch, watchers, version=version)

    def _run(
        self,
        kind: type[StepFunction],
        batches: Any,
        watchers: Sequence[Watcher],
        steps: int = 1,
        version: Version | None = None,
    ) -> Any:
        """Run the function for an iterator or a batch, and count its steps; return the last step's results.

        With watchers, a separate function records timestamps, which the watchers get.
        """
        towers = self.towers
        # First: variables that are made in another function's graph would be of no use to later steps.
        towers.session.require_eager("fit, evaluate, predict and the _on_batch methods of a model on towers")
        self._forget_other_layouts()
        audits = self.trains and towers.watch.is_audit_due(steps)
        if audits and towers.session.shares is not None:  # whose times must not include what is computed again
            watchers = [one for one in watchers if one != towers.session.shares.measure]
        function = self._function_for(kind, batches, version, watched=bool(watchers), audits=audits)
        is_new = function.key not in self._functions
        if is_new:
            with _collecting_no_garbage(), interruptible():
                assert function.graph is not None  # traced now
            if len(self._functions) >= MOST_KEPT:
                del self._functions[next(iter(self._functions))]
            self._functions[function.key] = function
        program = function.program

        def repeats(error: Exception) -> bool:  # on another program, for whose call this one's figures do not stand
            if isinstance(error, tf.errors.ResourceExhaustedError):
                return towers.options.on_oom is not None
            if tf_compat.refused_by_xla(error):
                return program.is_bounded and not towers.layout.meets_processes
            return kind is not OnGiven and not towers.layout.meets_processes and says_unequal(error)

        reporting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if function.meter is not None:
            reporting = function.meter.reported_to(watchers, is_new, repeats)
        elif self._meter is not None:
            self._meter.forget()
        batch, done, results = None, 0, None
        try:
            with reporting, self.guarded(function):
                while done < steps:
                    try:
                        results = function.run(batches)
                    except NoBatchLeft:
                        if done == 0:
                            raise
                        break
                    done += 1
                if towers.session.communicator.enqueues:
                    towers.session.failures.add(function.written, results)
        except (NcclSyncError, tf.errors.InvalidArgumentError) as error:
            if not repeats(error):
                raise
            # Nothing of the step has run, or it was undone. What a batch of tensors shows by itself, an iterator's
            # graph cannot know.
            batch = function.kept.batch()
            self.count(done, function.audit)
            if why := tf_compat.refused_by_xla(error):
                self._compile_no_more(why)
            results = self._run(OnGiven, self.marked(batch), watchers)
            with contextlib.suppress(NoBatchLeft):  # then that batch was the last one
                results = self._run(kind, batches, watchers, steps - done - 1) if done + 1 < steps else results
            return results
        except tf.errors.ResourceExhaustedError:
            batch = function.kept.batch() if function.rollback.undone else None
            rows = None if batch is None or towers.options.on_oom is None else rows_of(batch)
            if rows is None or not towers.split_further(rows):
                raise
        else:
            self._reading.compare(function.kept)
            if is_new and not watchers and self.trains and len(towers) > 1:
                self._warn_of_costs(function)
            self.count(done, function.audit)
            return results
        version = self.retracing[function.key.program.version]
        del function  # frees its variables on the towers
        return self._run(OnGiven, batch, (), version=version)

    def _compile_no_more(self, why: str) -> None:
        """Run steps without XLA from now on, as it has refused a part of a step: of the whole it knows more."""
        self.towers.session.warn_once(
            "XLA does not compile a part of this step, which is cut where towers meet: the step runs without it from "
            f"now on. Write compile(jit_compile=False) to say so yourself, without this warning. XLA: {why}"
        )
        self.programs.compile_no_more()
        self._functions.clear()

    def marked(self, batch: Any) -> Any:
        """Return a batch of tensors with marks, by samples while there are few ratios of rows: each takes a program."""
        made = grouped(batch)
        ratios = ratios_of(made)
        if not ratios or ratios in self._ratios:
            return made
        if len(self._ratios) < _MOST_RATIOS:
            self._ratios.add(ratios)
            return made
        if len(self._ratios) == _MOST_RATIOS:
            self._ratios.add(())  # no batch has it: told once
            logger.info(
                "Tensors of a batch have %d, and more, different ratios of rows: each is divided by its own rows from "
                "now on, by one program for all",
                _MOST_RATIOS,
            )
        return grouped(batch, by_samples=False)

    def _forget_other_layouts(self) -> None:
        old = [key for key in self._functions if key.program.layout is not self.towers.layout]
        for key in old:
            del self._functions[key]
        if self.programs.forget_other_layouts() or old:
            gc.collect()  # frees the old programs' variables on the towers, which are in cycles

    def _version_for(
        self, kind: type[StepFunction], given: Any, version: Version | None = None
    ) -> tuple[Version, Any, str]:
        """Return the version for batches of these specs, the specs of the function that it takes, and a text.

        Functions of one version differ by the text: these specs, and what Python is told of each batch.
        """
        traces = len(self.retracing) + self.programs.traced_otherwise
        if traces != self._known_of:
            self._known, self._known_of = {}, traces
        key = kind is OnGiven, repr(given), 0 if version is None else version.number
        if key in self._known:
            return self._known[key]
        specs = grouped(without_optionals(given))
        found = version
        if found is None:
            # Processes that read their own rows all trace at the same time: they have different numbers of rows.
            asked = open_specs(given) if self.programs.any_rows or self._reading.own_rows is not None else given
            found = self.retracing.of_batch(ungrouped(asked)) if kind is OnGiven else self.retracing.of_iterator(asked)
        step = found.step or found
        told = ""
        if kind is OnGiven:
            told = self.programs.told_for(specs, step)
            specs = self.programs.shard_specs(specs, step)
        else:
            counted = ungrouped(specs) is not specs  # by the numbers of rows, which the version may leave open
            specs = found.specs if self.programs.takes_relaxed(specs, step) and not counted else given
        self._known_of = len(self.retracing) + self.programs.traced_otherwise
        return self._known.setdefault(key, (found, specs, repr(specs) + told))

    def _function_for(
        self, kind: type[StepFunction], batches: Any, version: Version | None, *, watched: bool, audits: bool
    ) -> StepFunction:
        """Return the function for the next batch; of a new function the program is made, and no graph traced yet.

        The program comes before the graph: a step that is traced within another trace records no gradients.
        """
        other_libraries.check_outside_strategy()
        given = fixed_specs(batches) if kind is OnGiven else batches.element_spec
        found, specs, text = self._version_for(kind, given, version)
        step = found.step or found
        own = self._reading.own_rows
        sizes = None if own is None else id(own.sizes)  # unique, since a function keeps its variable
        made_for = Key(text, tuple(self.programs.readers()), step.number, watched, self.towers.layout)
        key = FunctionKey(made_for, kind, sizes, audits)
        if key in self._functions:
            self._functions[key] = self._functions.pop(key)  # to the end; see `last`
            return self._functions[key]
        if watched:
            self._meter = self._meter or Meter()
        meter = self._meter if watched else None
        with _collecting_no_garbage(), interruptible():
            program = self.programs.of(grouped(without_optionals(given)), meter, step)
            _, specs, text = self._version_for(kind, given, version)  # known by now
            key = key._replace(program=made_for._replace(specs=text))
            return self._functions.get(key) or self._make_function(key, specs, program, meter)

    def _make_function(self, key: FunctionKey, batch_specs: Any, program: Program, meter: Meter | None) -> StepFunction:
        specs = grouped(without_optionals(batch_specs))
        for _, variable in program.variables:
            self.towers.replicas.of(variable)
        for warning in program.warnings:
            self.towers.session.warn_once(warning)
        made_for = [key.program._replace(watched=watched) for watched in (True, False)]
        known = (self._functions.get(key._replace(program=one, audits=False)) for one in made_for)
        other = next((one for one in known if one is not None and one.program is program), None)
        if other is not None:
            kept, rollback = other.kept, other.rollback
        else:
            kept = KeptBatch(specs)
            # TensorFlow never frees the function of a py op, nor what it refers to.
            borrowed = weakref.ref(self.towers), weakref.ref(kept)
            rollback = Rollback(
                program, self.towers, functools.partial(_report_nonfinite, *borrowed, program.gradients)
            )
        layout, own = self.towers.layout, self._reading.own_rows
        return key.kind(
            key=key,
            towers=self.towers,
            layout=layout if own is None else dataclasses.replace(layout, sizes=own.sizes),
            batch_specs=batch_specs,
            specs=specs,
            program=program,
            rollback=rollback,
            kept=kept,
            meter=meter,
            audit=Audit(program, self.towers) if key.audits else None,
        )

    @contextlib.contextmanager
    def guarded(self, function: StepFunction | None) -> Iterator[None]:
        """Send tower 0's state to all towers; then undo a failure of the step that runs in the body.

        Args:
            function: of the step; None: Python runs it.

        Raises:
            Exception: the cause of the step's error, by `Failures.cause_of`.
        """
        session, replicas = self.towers.session, self.towers.replicas
        if function is not None:
            function.rollback.forget()
        session.failures.forget()
        begun = None
        try:
            about = (frozenset[int](), "") if function is None else (function.written, function.program.python)
            with replicas.under_way(*about):
                replicas.sync(compares=False)
                begun = function
                with interruptible(session.communicator.interrupt):
                    yield
        except NoBatchLeft:
            session.failures.settle()
            raise
        except BaseException as error:
            self._mend(begun)
            cause = session.failures.cause_of(error)
            if isinstance(cause, tf.errors.CancelledError) and function and not session.layout.meets_processes:
                cause = self._find_what_cancelled(function) or cause
            if isinstance(cause, tf.errors.OpError) and function is not None:
                tf_compat.name_lines(cause, functools.partial(calls_of, function.program.graph))
            if cause is error:
                raise
            raise cause from (None if isinstance(cause, NonFiniteError) else cause.__cause__ or error)
        finally:
            if replicas.shared and function is not None:
                replicas.report_writes(function.written)

    def _mend(self, function: StepFunction | None) -> None:
        """Undo the writes of a failed step, and let all towers start anew from tower 0."""
        with held_back():
            try:
                if function is not None:
                    function.rollback.restore()
            finally:
                self.towers.replicas.mark_stale()
                if function is not None and self.towers.communicator.enqueues:
                    self.towers.session.failures.add(function.written)

    def _find_what_cancelled(self, function: StepFunction) -> BaseException | None:
        """Run the batch of a cancelled step again, outside a graph, one tower after another; return its error."""
        self.towers.replicas.sync()
        try:
            lay_out(function.program, self.towers, function.kept.batch(), function.rollback)
        except BaseException as error:
            self._mend(function)
            return self.towers.session.failures.cause_of(error)
        return None

    def count(self, steps: int, audit: Audit | None = None) -> None:
        """Count training steps that have run, after a look at the findings of their `audit`.

        Raises:
            AuditError, DivergenceError: towers have computed, or hold, different numbers.
        """
        if not self.trains:
            return
        if audit is not None:
            audit.check(self.towers.watch.audited(steps))
        self.towers.watch.count(steps)

    def _warn_of_costs(self, function: StepFunction) -> None:
        """Warn if towers, though exact, lose much of a step, since each needs the rows of all."""
        rows, towers, program = rows_of(function.kept.batch()) or 0, len(self.towers), function.program
        if rows < towers and is_marked(function.kept.batch(), Grouped):
            self.towers.session.warn_once(
                f"Exact, but {towers - rows} of {towers} towers have nothing to do: a batch has as many samples as its "
                f"tensor with the fewest rows, {rows}. Give a value for the whole batch to each row, as tf.repeat "
                "does, and take the first one's in the step"
            )
            return
        # CPU towers stand in for GPUs, too.
        for machine in (CORE, GPU) if self.towers.layout.shares_cores else (GPU,):
            losses = program.losses(towers, rows, machine)
            if losses.needed > MOST_LOST:
                # Once for all sizes of batches, and for all callers of the step.
                self.towers.session.warn_once(str(losses), about=str(sorted(one.place for one in losses.places)))
                return

    def last(self) -> tuple[Program, Any] | None:
        """Return the program that ran last, and its last batch; None if none ran.

        If steps have been split further since, return the program that will run next.
        """
        if not self._functions:
            return None
        key, function = list(self._functions.items())[-1]
        batch = function.kept.batch()
        if key.program.layout is not self.towers.layout:
            return self.programs.of(fixed_specs(batch), version=self.retracing[key.program.version]), batch
        return function.program, batch


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Turn Python's garbage collector off in the body: of a graph that is built nearly all is kept; it saves 12 %."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _report_nonfinite(
    towers: "weakref.ref[TowerState]",
    kept: "weakref.ref[KeptBatch]",
    names: tuple[str, ...],
    finite: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """Report gradients that are not finite; the graph of a step, whose batch is kept, calls this."""
    state, batch = towers(), kept()
    assert state is not None and batch is not None  # the step that calls it is theirs
    given, ends = batch.batch(), np.cumsum(sizes)
    own = range(int(ends[-1]))
    if rows_of(given) != len(own):  # each process reads its own rows alone
        shards = list(state.layout.own_shards)
        own = range(int(ends[shards[0]] - sizes[shards[0]]), int(ends[shards[-1]]))
    try:
        state.watch.on_nonfinite.report(finite, sizes, names, given, state.layout.owners, own)
    except NonFiniteError as error:  # TensorFlow wraps it
        state.session.failures.put(error)
        raise
