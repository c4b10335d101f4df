"""Trace a step once, as a program of one tower, with marks where it calls a collective.

Owns the trace and the vocabulary of what it is cut into (`Exchange`, `Bucket`, `Segment`, `Program`).
`cut.py` does the cutting, `layout.py` runs the result on every tower; this module knows no device.
"""

import dataclasses
import enum
import linecache
import os
import traceback as stack
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, Share, running_in


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One tensor of the program that meets its counterparts between two segments.

    Attributes:
        source: name of the tensor before; a name is unique within the program.
        result: name of the tensor behind the exchange.
        collective: what happens to it.
        shape: static shape, perhaps with unknown dimensions.
        dtype: its dtype.
        when: name of a bool scalar that is equal on all towers; if it is False, source and result are the
            same. None: always.
        line: the user's that asks for it, as `user_line` names it.
    """

    source: str
    result: str
    collective: Collective
    shape: tf.TensorShape
    dtype: tf.DType
    when: str | None = None
    line: str = ""

    def size_bytes(self, towers: int, rows: int | None = None) -> int | None:
        """Return the size of the whole tensor; None where it is known only when it runs.

        Args:
            towers: how many.
            rows: of the batch; None if they are not known.
        """
        shape = tf.TensorShape([towers, *self.shape[1:]]) if self.collective.divides else self.shape
        if self.collective.kind == "all_gather" and shape.rank:
            shape = tf.TensorShape([rows, *shape[1:]])
        return int(shape.num_elements()) * self.dtype.size if shape.is_fully_defined() else None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Exchanges that travel together as one tensor: of one dtype, condition and operation on the wire.

    Attributes:
        wire: what the communicator does.
        exchanges: what travels; one only if it is not packed.
        packed: whether they are flattened and concatenated. Else the one tensor travels in its own shape.
        on_host: whether `host_ops` takes the tensor as it is, and multiplies it by the tower's weight, which
            is 0 for a tower without samples. Else the segment has seen to both.
    """

    wire: Collective
    exchanges: tuple[Exchange, ...]
    packed: bool
    on_host: bool = False

    @property
    def when(self) -> str | None:
        """The condition of its exchanges."""
        return self.exchanges[0].when

    @property
    def result(self) -> str:
        """The name of its first exchange's result, which no other bucket of the program has."""
        return self.exchanges[0].result


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the program between collectives: one function, the same for every tower.

    `function(*sources, *incoming, fraction, is_root)` returns `[*fetches, *outgoing, token]`; `fraction` is
    the tower's share of the samples (float64, 0 for a tower without), `is_root` tells tower 0, and the
    token depends on every side effect of the segment. If it is `metered`, the last argument is the tower's
    number (int32). If there are variables that it writes `for_all` (names of their handles), tower 0 alone
    runs it, and the others take its results and these variables' values.
    """

    function: Any
    sources: tuple[str, ...]
    incoming: tuple[Bucket, ...]
    fetches: tuple[str, ...]
    outgoing: tuple[Bucket, ...]
    metered: bool = False
    for_all: tuple[str, ...] = ()


class Results(enum.Enum):
    """What becomes of the towers' results: `COMBINED` into one device's, concatenated as one row per sample
    (`ROWS`), or those of `EACH` tower, in a list.
    """

    COMBINED = "combined"
    ROWS = "rows"
    EACH = "each"


@dataclasses.dataclass(frozen=True)
class Whole:
    """Rows that were gathered for an op that needs the batch's.

    Attributes:
        op: its type.
        line: the user's that it comes from.
        row_bytes: of a row of what was gathered.
    """

    op: str
    line: str
    row_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced step, cut.

    Attributes:
        segments: in order; what one sends is reduced before the one that receives it, mostly the next.
        arguments: names of the tensors of the batch, in the order of its flattened structure, and of the
            tower's `ops.Share` of it.
        captures: (name, tensor) of what the step closes over, other than variables.
        variables: (name of the handle, variable of tower 0).
        outputs: names of the flattened results, and what stands for all towers': the "first", since they are
            equal (perhaps by an exchange), or the "concat" of their rows.
        structure: the results' structure, with None in place of tensors that are None.
        results: what becomes of the towers' results.
        warnings: what a user should know of the step on towers, in words.
        gathered: rows that every tower gets of all, but for the slices of sparse gradients.
        draws: lines that draw random numbers for rows, each tower its own.
        normalized: lines that normalise by a tower's own rows.
        declared: numbers of rows, of which the batch must have one that the step was traced for.
        alike: the share of the step's arithmetic that every tower does for all rows, as far as it can be
            told.
        rollback: names of the handles of variables to restore if a step fails on the way: those that are
            written before the last segment, or all, if that one may fail or the step may be undone.
        finite: name of a bool tensor [towers with samples, gradients], equal on all towers, that tells
            which gradients are finite; None if nobody asks. If one is not, the step is to be undone.
        gradients: names of the variables of these gradients.
        noise: name of what `noise.gradient_moments` tells, equal on all towers; None if nobody asks.
        updates: (name of a variable's handle, the exchange's result that its new value rests on).
    """

    segments: tuple[Segment, ...]
    arguments: tuple[str, ...]
    captures: tuple[tuple[str, tf.Tensor], ...]
    variables: tuple[tuple[str, tf.Variable], ...]
    outputs: tuple[tuple[str, str], ...]
    structure: Any
    results: Results
    warnings: tuple[str, ...]
    gathered: tuple[Whole, ...]
    draws: tuple[str, ...]
    normalized: tuple[str, ...]
    declared: tuple[int, ...]
    alike: float
    rollback: tuple[str, ...]
    updates: tuple[tuple[str, str], ...]
    finite: str | None = None
    gradients: tuple[str, ...] = ()
    noise: str | None = None

    @property
    def packs(self) -> bool:
        """Whether anything is packed to be sent."""
        return any(bucket.packed for segment in self.segments for bucket in segment.outgoing)


@dataclasses.dataclass(frozen=True)
class Mark:
    """An `IdentityN` of the trace that says how tensors are to be placed from there on.

    Attributes:
        name: the op's.
        purpose: "collective": they meet their counterparts, as `collective` says. "whole": they are the
            batch's. "slices": values and indices of a sparse gradient are. "parts": what each tower adds to
            them. "slices part": the same of values and indices. "local": each tower's own. "addends": a
            gradient, of which each tower takes its own addend. "rows": each tower's own are its rows of the
            batch. "own row": of one row for each tower, its own.
        collective: see "collective".
        conditional: whether its last tensor tells if the collective happens.
        line: the user's that asks for it, or calls what does.
        rows_add_up: see `ops.whole`.
        height: the rows of the table that slices are of, where `rows_add_up`.
        of: the name of the mark that "rows" are taken back to.
        by_choice: whether it gives other numbers than one device's, for speed.
    """

    name: str
    purpose: str
    collective: Collective = dataclasses.field(default_factory=lambda: Collective("all_reduce"))
    conditional: bool = False
    line: str = ""
    rows_add_up: bool = False
    height: int = 0
    of: str = ""
    by_choice: bool = False


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step as `tf.function` traced it: the program of one device on the whole batch.

    Attributes:
        function: the ConcreteFunction, of the batch and a tower's `Share` of it.
        share: the second argument's tensors within the graph.
        marks: by name of the marking op.
        batch: the batch's structure, with the graph's tensors.
    """

    function: Any
    share: Share
    marks: dict[str, Mark]
    batch: Any


class _Marking:
    """The context of a step that is being traced: leaves marks."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.share: Any = None
        self.batch: Any = None
        self.marks: list[tuple[Any, Mark]] = []

    def can_exchange(self) -> bool:
        return tf.compat.v1.get_default_graph() is self.graph

    def exchange(
        self, tensors: Sequence[tf.Tensor], collective: Collective, when: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        if not self.can_exchange():
            raise NcclSyncError(
                "Expected a collective at the top level of a step, where the step can be cut. Received: one "
                f"inside tf.while_loop, tf.cond or a nested tf.function, called at {user_line()}. Move the "
                "collective out of it, or leave it away: steps on towers compute what one device computes."
            )
        conditions = [] if when is None else [when]
        results = self.mark(
            [*tensors, *conditions], "collective", collective=collective, conditional=when is not None
        )
        results = results[: len(tensors)]
        if collective.changes_rows:
            # On towers there will be other rows, which what is traced from here on must not know.
            results = [tf.compat.v1.placeholder_with_default(t, [None, *t.shape[1:]]) for t in results]
        return results

    def mark(self, tensors: Sequence[tf.Tensor], purpose: str, **details: Any) -> list[tf.Tensor]:
        if not self.can_exchange():  # in a loop, or a branch: what has no rule there is made whole before it
            return list(tensors)
        outputs = tf.identity_n(list(tensors), name="ncclsync_mark")
        line = user_line(outputs[0].op.traceback)
        self.marks.append((self.graph, Mark(outputs[0].op.name, purpose, line=line, **details)))
        return list(outputs)


def trace(step: Callable[[Any], Any], batch_specs: Any) -> Trace:
    """Trace `step(batch)` for one tower.

    Args:
        step: any function of a batch; its collectives become marks.
        batch_specs: the batch's structure with a `tf.TypeSpec` (or None) in place of each tensor.

    Returns:
        The trace: a valid program of one tower, in which a mark changes nothing.

    Raises:
        NcclSyncError: for a collective where the step cannot be cut; the message names the line.
        Exception: whatever the step raises while it is traced.
    """
    marking = _Marking()

    def traced(batch, share):
        # tf.function traces again when a step created variables; the last trace is the one that counts.
        marking.graph, marking.share = tf.compat.v1.get_default_graph(), share
        marking.batch = batch
        with running_in(marking):
            return step(batch)

    function = tf.function(traced, autograph=False).get_concrete_function(
        batch_specs, Share(tf.TensorSpec([], tf.float64), *[tf.TensorSpec([], tf.int32)] * 4)
    )
    marks = {mark.name: mark for graph, mark in marking.marks if graph is function.graph}
    traced_step = Trace(function, marking.share, marks, marking.batch)
    # TensorFlow keeps the functions of custom gradients for good, and they keep their context.
    vars(marking).clear()
    return traced_step


def user_line(traceback: Any = None) -> str:
    """Name the innermost line of a stack that belongs to none of the libraries.

    Args:
        traceback: of an op; None: of the caller.
    """
    libraries = tuple(os.path.dirname(file) for file in (tf.__file__, keras.__file__, __file__))
    if traceback is None:
        # An op's own, in a graph: there TensorFlow maps what autograph has generated back to its source.
        traceback = stack.extract_stack() if tf.executing_eagerly() else tf.no_op().traceback
    for frame in reversed(traceback):
        if not frame.filename.startswith(libraries) and os.path.exists(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno).strip()
            return f"{frame.filename}:{frame.lineno} ({line})"
    return "a line that could not be found"
