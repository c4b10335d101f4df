"""Name the parts of a step that is cut: exchanges, buckets, segments, and the program they make.

`cut.py` makes a program, `towers/laying_out.py` runs it on every tower. This module knows no device.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from ncclsync.compat.names import TensorName
from ncclsync.costs.cost import StepWork
from ncclsync.costs.losses import Losses, losses_of
from ncclsync.costs.roofline import Machine
from ncclsync.ops import Collective, CollectiveKind


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Name one tensor of the program that meets its counterparts between two segments.

    Attributes:
        source: name of the tensor before; a name is unique within the program.
        result: name of the tensor after the exchange.
        collective: what happens to it.
        shape: static shape, perhaps with unknown dimensions.
        dtype: its dtype.
        when: name of a bool scalar that is equal on all towers; if it is False, source and result are the
            same. None: always.
        line: the user's that asks for it, as `user_line` names it.
        place: the same; where no line of the user's asks for it, the layer, loss or metric, as `own_place` names it.
    """

    source: TensorName
    result: TensorName
    collective: Collective
    shape: tf.TensorShape
    dtype: tf.DType
    when: TensorName | None = None
    line: str = ""
    place: str = ""

    def size_bytes(self, towers: int, rows: int | None = None) -> int | None:
        """Return the size of the whole tensor on so many towers, of so many rows, if they are known; else None."""
        shape = tf.TensorShape([towers, *self.shape[1:]]) if self.collective.divides else self.shape
        if self.collective.kind == CollectiveKind.ALL_GATHER and shape.rank:
            shape = tf.TensorShape([rows, *shape[1:]])
        return int(shape.num_elements()) * self.dtype.size if shape.is_fully_defined() else None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Hold exchanges that travel together: of one dtype, condition and operation on the wire.

    Attributes:
        wire: what the communicator does.
        exchanges: the tensors that travel: several if the bucket is packed, else one.
        packed: whether the tensors are flattened and concatenated into one. Else each tensor travels in its shape.
        join: `join(buckets, tensors, fractions)` joins the towers' tensors, [N][B][E], as they are. The buckets have
            one wire, dtype and condition. fractions: [N], each tower's share of the samples, 0 for a tower without
            samples. None: the communicator joins what the segment has weighted and packed.
    """

    wire: Collective
    exchanges: tuple[Exchange, ...]
    packed: bool
    join: Callable[..., list[list[list[tf.Tensor]]]] | None = None

    @property
    def when(self) -> TensorName | None:
        """Return the condition of its exchanges."""
        return self.exchanges[0].when

    @property
    def leaves_out_empty(self) -> bool:
        """Return whether a tower without samples sends what changes nothing, in place of what it has computed."""
        return not (self.wire.concatenates or self.wire.kind == CollectiveKind.BROADCAST or self.wire.empty_too)

    @property
    def owns_memory(self) -> bool:
        """Return whether what a tower sends is a tensor of its own, which shares memory with no other tensor."""
        return self.packed and (self.leaves_out_empty or len(self.exchanges) > 1)

    @property
    def result(self) -> TensorName:
        """Return the name of its first exchange's result, which no other bucket of the program has."""
        return self.exchanges[0].result

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Describe the tensors that travel: one if they are packed, else one for each exchange."""
        if not self.packed:
            return [tf.TensorSpec(exchange.shape, exchange.dtype) for exchange in self.exchanges]
        elements = sum(exchange.shape.num_elements() for exchange in self.exchanges)
        return [tf.TensorSpec([elements], self.exchanges[0].dtype)]


# What is sent or received: [B] the tensors of each bucket, as many as `Bucket.specs`.
Sent = list[list[tf.Tensor]]


class Outcome(NamedTuple):
    """Hold what a segment gives.

    Attributes:
        fetched: tensors for later segments and for results, by name.
        sent: of the outgoing buckets.
        token: depends on every side effect of the segment.
    """

    fetched: dict[TensorName, tf.Tensor]
    sent: Sent
    token: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Segment:
    """Hold the part of a program between two collectives: one function, the same for every tower.

    Attributes:
        sources: names of the tensors and handles that the function is given first.
        incoming: whose tensors it is given next.
        fetches: names of the tensors in its `Outcome`.
        outgoing: whose tensors are sent.
        function: returns an `Outcome`.
        once: whether it runs once for each tower where a tower has several shards; else it runs for each shard.
        unrepeatable: an op of it that must run once, as Python and prints, and its line; "" if there is none.
        written: names of the handles that its function may write to, sorted.
        sliced: the variables of which it may write or read slices, without the rest.
        hold: where XLA compiles, returns the values of the written variables (`segment.holding`). The function takes
            them last, and does not use them: if a program of XLA's fails, TensorFlow frees the memory of each variable
            that it was to write, though the variable still points to it, unless something else holds that memory.
            Source: tensorflow/compiler/jit/xla_launch_util.cc, PopulateExecutionInputBuffer.
    """

    sources: tuple[TensorName, ...]
    incoming: tuple[Bucket, ...]
    fetches: tuple[TensorName, ...]
    outgoing: tuple[Bucket, ...]
    function: Any
    once: bool = False
    unrepeatable: str = ""
    written: tuple[TensorName, ...] = ()
    sliced: frozenset[TensorName] = frozenset()
    hold: Any = None

    def run(self, values: Mapping[TensorName, tf.Tensor], incoming: Sent) -> Outcome:
        """Call its function with tensors and handles by name, and with what has been received."""
        sources = [values[name] for name in self.sources]
        held = [] if self.hold is None else self.hold(*(values[name] for name in self.written))
        return self.function(*sources, *itertools.chain(*incoming), *held)

    @property
    def takes_rows(self) -> bool:
        """Return whether its function takes tensors whose shapes follow the batch's rows."""
        tensors = (tensor for tensor in self.function.inputs if tensor.dtype != tf.resource)
        return not all(tensor.shape.is_fully_defined() for tensor in tensors)


@dataclasses.dataclass(frozen=True)
class Target:
    """Describe where a program is to run, as far as the program depends on it.

    Attributes:
        home_device: tower 0's, where the trace placed what must run on each tower's device.
        bucket_bytes: see `buckets.fill_buckets`.
        same_seeds: whether random state is equal on all towers.
        many_shards: whether a tower may compute several shards, and the number of shards is the program's alone.
        shares_memory: whether a tensor of one tower may be another's without a copy.
        passes: each makes a step's list of `segment.SegmentPlan` cheaper, before these become functions.
    """

    home_device: str
    bucket_bytes: int
    same_seeds: bool = False
    many_shards: bool = False
    shares_memory: bool = False
    passes: tuple[Callable[[Any], Any], ...] = ()


class Results(enum.Enum):
    """Say how the towers' results become those of a step."""

    COMBINED = "combined"  # one device's
    EACH = "each"  # a list of each tower's


@dataclasses.dataclass(frozen=True)
class Program:
    """Hold a traced step that is cut.

    Attributes:
        segments: in order; what one sends is reduced before the one that receives it, mostly the next.
        arguments: names of the tensors of the batch, in the order of its flattened structure, of the tower's
            `ops.Share` of it, and of its `trace.Site`.
        captures: (name, tensor) of what the step closes over, other than variables.
        variables: (name of the handle, variable of tower 0).
        outputs: names of the flattened results, and whether the towers' rows make one device's result; else each
            tower has it, perhaps by an exchange.
        structure: the results' structure, with None in place of tensors that are None.
        results: how the towers' results are combined.
        warnings: what a user should know of the step on towers, in words.
        draws: lines that draw random numbers for rows, different ones on each tower.
        normalized: lines that normalise by a tower's rows alone.
        declared: numbers of rows that a state or a constant of the step fixes, and which: a batch has as many, or one.
        fixed: see `PlacedStep.variables_of_rows`.
        work: of the step's ops, and the rows that every tower gets of all.
        rollback: the variables that are restored if a step fails on the way: those that are written before the last
            segment; all, if the last segment may fail, or the step may be undone. Of each the name of its handle,
            and whether it is restored after a gradient that is not finite, too. Metrics are not: they count the batch.
        finite: name of a bool tensor [towers with samples, gradients], equal on all towers: which
            gradients are finite; None if `on_nonfinite` is not set. If one is not, the step is to be undone.
        gradients: names of the variables of these gradients.
        noise: name of the result of `gradient_moments`, equal on all towers; None if `NoiseScale` does not ask.
        last_meeting: the number of a segment after the last exchange: before any tower runs it, all have run the
            earlier ones. So an error in one of these leaves the weights of all towers alone.
        updates: (name of a variable's handle, the exchange's result that its new value rests on).
        jit_compile: whether XLA compiles the segments.
        is_bounded: whether XLA knows bounds alone of some of their lengths: cut as they are, it may refuse a batch.
        graph: that of the trace: it knows the lines of an op that fails.
    """

    segments: tuple[Segment, ...]
    arguments: tuple[TensorName, ...]
    captures: tuple[tuple[TensorName, tf.Tensor], ...]
    variables: tuple[tuple[TensorName, tf.Variable], ...]
    outputs: tuple[tuple[TensorName, bool], ...]
    structure: Any
    results: Results
    warnings: tuple[str, ...]
    draws: tuple[str, ...]
    normalized: tuple[str, ...]
    declared: tuple[tuple[int, str], ...]
    fixed: tuple[tuple[tf.Variable, int], ...]
    work: StepWork
    rollback: tuple[tuple[TensorName, bool], ...]
    updates: tuple[tuple[TensorName, TensorName], ...]
    last_meeting: int
    finite: TensorName | None = None
    gradients: tuple[str, ...] = ()
    noise: TensorName | None = None
    jit_compile: bool = False
    is_bounded: bool = False
    graph: tf.Graph | None = None

    @property
    def packs(self) -> bool:
        """Return whether anything is packed to be sent."""
        return any(bucket.packed for segment in self.segments for bucket in segment.outgoing)

    @property
    def python(self) -> str:
        """Return an op by which the step runs Python, or prints, and its line; "" if there is none."""
        return next((one.unrepeatable for one in self.segments if one.unrepeatable), "")

    def losses(self, towers: int, rows: int, machine: Machine) -> Losses:
        """Estimate what a step loses on so many towers."""
        return losses_of(self.work, self.gradient_bytes(towers, rows), rows, towers, len(self.segments), machine)

    def gradient_bytes(self, towers: int, rows: int) -> int:
        """Return the bytes of what the new values of trained variables rest on, as far as they are known."""
        by_handle = dict(self.variables)
        trained = {result for name, result in self.updates if by_handle[name].trainable}
        exchanges = (e for segment in self.segments for bucket in segment.outgoing for e in bucket.exchanges)
        return sum(e.size_bytes(towers, rows) or 0 for e in exchanges if e.result in trained)
