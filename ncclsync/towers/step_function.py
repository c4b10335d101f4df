"""Make the one graph of a step, and run it: on batches that are given, of an iterator, or fed ahead.

`step.py` chooses the function for a batch and undoes failures; `laying_out.py` says what the graph consists of.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ncclsync.compat import other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import TensorName
from ncclsync.ops import held
from ncclsync.ops.spans import STEPS, WAIT, Meter, NoBatchLeft, begin, delay, measured
from ncclsync.program.program import Program
from ncclsync.sharding.shards import Shards, components_of, grouped, packed, without_optionals
from ncclsync.towers.audit import Audit
from ncclsync.towers.feeding import Feeder, Staging, split_batch
from ncclsync.towers.laying_out import lay_out
from ncclsync.towers.layout import Layout
from ncclsync.towers.programs import Key
from ncclsync.towers.recovery import KeptBatch, Rollback
from ncclsync.towers.state import TowerState

_ATTEMPTS = 3  # to begin a step with values that all towers have


class FunctionKey(NamedTuple):
    """Say what a function was made for: batches of one kind, of a program."""

    program: Key  # with the specs of the function's batches
    kind: "type[StepFunction]"
    own_rows: int | None  # the id of `Layout.sizes`, if each process reads its own rows
    audits: bool  # whether towers compute each other's shards again


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepFunction(abc.ABC):
    """Hold the graph of a step on batches of one kind, and what is needed if it fails."""

    key: FunctionKey
    towers: TowerState
    layout: Layout  # of its batches
    batch_specs: Any  # of the batches as the user gives them
    specs: Any  # of the batches that a step gets
    program: Program
    rollback: Rollback  # shared, as `kept` is, with the function of this kind that is watched, or is not
    kept: KeptBatch  # the batch of the current step
    meter: Meter | None  # records timestamps, if the step is watched
    audit: Audit | None  # of an audited step

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Return the ids of tower 0's variables that the program may write."""
        written = frozenset[TensorName]().union(*(segment.written for segment in self.program.segments))
        return frozenset(id(variable) for name, variable in self.program.variables if name in written)

    @functools.cached_property
    def graph(self) -> Callable:
        """Return the function of the graph, which is traced when this is first read."""
        with tf_compat.unobserved():
            if self.towers.session.launches:
                # tf.function would add control dependencies: between ops that use the same variable, and from all side
                # effects to the results. Between devices these go through a GPU's memory, and TensorFlow waits for the
                # GPU. `lay_out` itself gives all ops the order that they need.
                return tf.compat.v1.wrap_function(self._body, self._signature)
            # tf.function itself looks at every variable in each call, to choose a trace.
            function = tf.function(self._body, input_signature=self._signature, autograph=False)
            return function.get_concrete_function()

    @abc.abstractmethod
    def run(self, batches: Any) -> Any:
        """Run a step on the next batch; return its results.

        Raises:
            NoBatchLeft: an iterator has no batch left.
        """

    def _begun(self, begin: Callable[[], Any], again: Callable[[], Any] | None = None) -> Any:
        """Run the graph by `begin()`. If it finds that others wrote tower 0's variables, send these, and run it again.

        `again()` runs the same batch, if `begin()` would take another one.
        """
        for _ in range(_ATTEMPTS):
            try:
                return begin()
            except tf.errors.AbortedError as error:
                if not held.is_refusal(error):
                    raise
            self.towers.replicas.send_changed()
            begin = again or begin
        with self.towers.replicas.left.tolerating():  # somebody writes all the time
            return begin()

    @functools.cached_property
    def _given(self) -> "StepFunction":
        """Return the function that runs the same steps on batches that are given."""
        return OnGiven(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @property
    @abc.abstractmethod
    def _signature(self) -> Sequence[tf.TensorSpec]:
        """Return the specs of the tensors that the graph is given."""

    @abc.abstractmethod
    def _batch(self, *given: tf.Tensor) -> Any:
        """Return the batch, or its `Shards`, in the graph."""

    def _body(self, *given: tf.Tensor) -> Any:
        """Run a step, in the graph; return its results."""
        batch = self._batch(*given)
        if not isinstance(batch, Shards):
            batch = self.kept.keep(batch)
            if self.key.own_rows is not None:  # there is no whole batch for processes to compare
                batch = split_batch(batch, self.layout, self.meter)
        return lay_out(self.program, self.towers, batch, self.rollback, self.meter, self.audit)


class OnGiven(StepFunction):
    """Run one step on a batch that is given."""

    def run(self, batches: Any) -> Any:
        """See `StepFunction.run`; `batches` is one batch."""
        return self._begun(functools.partial(self.graph, *components_of(batches)))

    @property
    def _signature(self) -> Sequence[tf.TensorSpec]:
        return components_of(self.specs)

    def _batch(self, *given: tf.Tensor) -> Any:
        return packed(self.specs, given)


class OnIterator(StepFunction):
    """Run steps on batches that the graph takes from an iterator."""

    def run(self, batches: tf.data.Iterator) -> Any:
        """See `StepFunction.run`."""
        # The handle alone: tf.function examines an iterator in Python at each call.
        (handle,) = tf.nest.flatten(batches, expand_composites=True)
        try:
            return self._begun(lambda: self.graph(handle), lambda: self._given.run(self.kept.batch()))
        except tf.errors.OutOfRangeError as error:
            if self.rollback.under_way:  # an iterator of the step's own
                raise
            raise NoBatchLeft(error) from None

    @property
    def _signature(self) -> Sequence[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.resource)]

    def _batch(self, *given: tf.Tensor) -> Any:
        span = begin(self.meter, STEPS, WAIT)
        with tf.control_dependencies(span.ops):
            batch = _next_batch(self.batch_specs, *given)
        return delay(batch, span.end(components_of(batch)))


class OnFed(StepFunction):
    """Run steps on an iterator's batches that a feeder brings to the towers, ahead of the steps."""

    @functools.cached_property
    def _staging(self) -> Staging:
        fetch = functools.partial(_next_batch, self.batch_specs)
        return Staging(fetch, self.specs, self.layout, self.meter)

    def run(self, batches: tf.data.Iterator) -> Any:
        """See `StepFunction.run`."""
        feeder = self.towers.session.feeders.get(batches)
        if feeder is None:
            feeder = self.towers.session.feeders[batches] = Feeder(batches)
        try:
            with measured(self.meter, STEPS, WAIT):
                components, parts = feeder.take(self._staging)
        except tf.errors.OutOfRangeError as error:
            raise NoBatchLeft(error) from None
        self.kept.keep_components(components)
        brought = self._staging.bring(components) if parts is None else parts
        return self._begun(functools.partial(self.graph, *brought))

    @property
    def _signature(self) -> Sequence[tf.TensorSpec]:
        return self._staging.signature

    def _batch(self, *given: tf.Tensor) -> Any:
        return self._staging.shards(given)


def _next_batch(batch_specs: Any, handle: tf.Tensor) -> Any:
    """Return the next batch, as a step gets it, of the iterator of that handle, in a graph."""
    iterator = tf.nest.pack_sequence_as(tf.data.IteratorSpec(batch_specs), [handle], expand_composites=True)
    return grouped(without_optionals(iterator.get_next()))


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
    with tf.device("/CPU:0"):  # where it is split; otherwise TensorFlow copies it to a GPU and back
        return tf.convert_to_tensor(leaf)
