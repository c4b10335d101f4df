"""Trace a step once, as the program of one device, with marks where it calls a collective."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.ops import Collective, CollectiveKind, Purpose, Share, running_in

Opened = Sequence[tuple[tf.Variable, int]]


@dataclasses.dataclass(frozen=True)
class Mark:
    """Describe an `IdentityN` of the trace that says how tensors are to be placed from there on.

    Attributes:
        name: the op's.
        purpose: how they are placed.
        collective: how they meet their counterparts, if that is the purpose.
        conditional: whether its last tensor says if the collective happens.
        line: the user's that asks for it, or calls what does.
        height: the rows of the table that slices are of, where `ops.whole` may add slices of one row up; else 0.
        of: the name of the mark that `Purpose.ROWS` are taken back to.
        by_choice: whether it gives other numbers than one device's, for speed.
    """

    name: str
    purpose: Purpose
    collective: Collective = dataclasses.field(default_factory=lambda: Collective(CollectiveKind.ALL_REDUCE))
    conditional: bool = False
    line: str = ""
    height: int = 0
    of: str = ""
    by_choice: bool = False


class Site(NamedTuple):
    """Hold what a shard's segments are told of where they run; scalars.

    Attributes:
        has_samples: 1 or 0, int32, in the host's memory: whether the shard has any.
        is_first: whether the shard is the first of its process, which keeps sums of metrics.
        rank: the tower's number, int32.
    """

    has_samples: Any
    is_first: Any
    rank: Any


@dataclasses.dataclass(frozen=True)
class Trace:
    """Hold a step as `tf.function` traced it: the program of one device on the whole batch.

    Attributes:
        function: the ConcreteFunction, of the batch, a tower's `Share` of it, and a `Site`.
        batch, share, site: these, of the graph's tensors.
        marks: by name of the marking op.
        jit_compile: whether XLA compiles it.
        opened: see `trace`.
    """

    function: Any
    batch: Any
    share: Share
    site: Site
    marks: dict[str, Mark]
    jit_compile: bool
    opened: Opened = ()


class _Marking:
    """Leave marks in a step that is being traced, as its context."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.share: Any = None
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
        details = {"collective": collective, "conditional": when is not None}
        results = self.mark([*tensors, *conditions], Purpose.COLLECTIVE, **details)
        results = results[: len(tensors)]
        if collective.changes_rows:
            # On towers there will be other rows, which what is traced from here on must not know.
            results = [tf.compat.v1.placeholder_with_default(t, [None, *t.shape[1:]]) for t in results]
        return results

    def mark(self, tensors: Sequence[tf.Tensor], purpose: Purpose, **details: Any) -> list[tf.Tensor]:
        if not self.can_exchange():  # in a loop, or a branch: what has no rule there is made whole before it
            return list(tensors)
        outputs = tf.identity_n(list(tensors), name="ncclsync_mark")
        line = user_line(outputs[0].op.traceback)
        self.marks.append((self.graph, Mark(outputs[0].op.name, purpose, line=line, **details)))
        return list(outputs)


def _made_by_itself(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    """Create a variable whose start value waits for nothing of the step: TensorFlow computes it before that runs."""
    with tf.control_dependencies(None):
        return next_creator(**kwargs)


def trace(step: Callable[[Any], Any], batch_specs: Any, *, jit_compile: bool = False, opened: Opened = ()) -> Trace:
    """Trace `step(batch)` for one tower.

    Args:
        step: any function of a batch; its collectives become marks.
        batch_specs: the batch's structure with a `tf.TypeSpec` (or None) in place of each tensor.
        jit_compile: whether XLA compiles it. TensorFlow then writes other gradients of loops and branches.
        opened: variables with so many rows for each sample of the batch: the trace does not know how many there are.

    Returns:
        The trace: a valid program of one tower, in which a mark changes nothing.

    Raises:
        NcclSyncError: for a collective where the step cannot be cut; the message names the line.
        Exception: whatever the step raises while it is traced.
    """
    marking = _Marking()
    given: Any = None  # to the last trace
    failures: list[Exception] = []
    graphs: list[tf.Graph] = []

    def traced(batch, share, site):
        nonlocal given
        if failures:
            return None
        # tf.function traces again when a step created variables; the last trace is the one that counts.
        given = batch, share, site
        marking.graph, marking.share = tf.compat.v1.get_default_graph(), share
        graphs.append(marking.graph)
        with running_in(marking), tf.variable_creator_scope(_made_by_itself):
            try:
                return step(batch)
            except Exception as error:  # of any kind: it is the step's own
                # Raised when tf.function has initialised the variables that were created, such as an optimizer's:
                # their owners do not create them again, if the step is traced otherwise, or by a later call.
                failures.append(error)
                return None

    number = tf.TensorSpec([], tf.int32)
    share, site = Share(tf.TensorSpec([], tf.float64), *[number] * 4), Site(number, tf.TensorSpec([], tf.bool), number)
    made = tf.function(traced, autograph=False, jit_compile=jit_compile or None)
    try:
        with tf_compat.open_branches(), tf_compat.open_rows(variable for variable, _ in opened):
            function = made.get_concrete_function(batch_specs, share, site)
    finally:
        for graph in graphs:
            tf_compat.forget_custom_gradients(graph)
        if failures:
            raise failures.pop()
    marks = {mark.name: mark for graph, mark in marking.marks if graph is function.graph}
    # TensorFlow keeps the functions of custom gradients for good, and they keep their context.
    vars(marking).clear()
    batch, share, site = given
    return Trace(function, batch, share, site, marks, jit_compile, opened)
