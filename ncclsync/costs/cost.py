"""Count a step's costs: the work of a tower on its own rows, the work repeated on every tower, and the bytes moved."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import tensorflow as tf

from ncclsync.compat.names import OpName, TensorName
from ncclsync.compat.source_lines import own_place
from ncclsync.costs.roofline import COUNTS, POWERS, Roofline, Size, seconds
from ncclsync.ops import CollectiveKind
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placements import Counts, Kept, ListOf, Placement, Shard, has

_ROWS = 4096  # of a batch that is large enough for its rows to count
_NAMED = 8  # ops whose places are found out


@dataclasses.dataclass(frozen=True)
class Whole:
    """Name rows that every tower receives of all, for an op that needs the batch's.

    Attributes:
        op: its type.
        place, made: where it comes from, and the type of the op there, by `own_place`.
        size: bytes of them, by the rows of the batch.
        kind: of the collective: an all-gather, or the all-reduce of parts of all rows.
    """

    op: str
    place: str
    made: str
    size: Size
    kind: CollectiveKind = CollectiveKind.ALL_GATHER


@dataclasses.dataclass(frozen=True)
class Alike:
    """Name an op that every tower does for all rows.

    Attributes:
        place, made: where it comes from, and the type of the op there, by `own_place`; "" if it is none of those that
            take longest.
        work: by `Roofline.work`.
    """

    place: str
    made: str
    work: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class StepWork:
    """Hold the work of a step's ops.

    Attributes:
        own: [ops, COUNTS, POWERS] of what a tower does for its rows alone.
        same: [ops, COUNTS, POWERS] of what every tower does on whatever has no rows, such as the update of weights,
            also by the slices of sparse gradients.
        alike: what every tower does for all rows.
        wholes: rows that all towers receive, except the slices of sparse gradients.
    """

    own: np.ndarray
    same: np.ndarray
    alike: tuple[Alike, ...]
    wholes: tuple[Whole, ...]


class Costs:
    """Sort a step's ops by what they cost.

    Attributes:
        roofline: of the step's graph.
        wholes: rows that all towers receive, except the slices of sparse gradients.
        alike, by_rows: ops that every tower does for all rows, and for its own.
    """

    def __init__(
        self, functions: Functions, axes: Axes, joins: Collection[OpName], untold: Collection[OpName], *, told: bool
    ) -> None:
        """Count nothing yet; nothing at all is `told` of a step that is not divided for a fault.

        `joins` are ops that put the slices of a weight that is used several times one after the other; of what towers
        receive for these, and for `untold` ops, nothing is told.
        """
        self.roofline = Roofline(functions, axes)
        self._joins, self._untold, self._told = joins, {*joins, *untold}, told
        self._rows: set[TensorName] = set()  # tensors that rest on rows that all towers have
        self._slices: set[TensorName] = set()  # on the slices of sparse gradients alone
        self.by_rows: list[tf.Operation] = []
        self._others: list[tf.Operation] = []
        self.wholes: list[Whole] = []
        self.alike: list[tf.Operation] = []

    def have_rows(self, op: tf.Operation) -> None:
        """Record that all towers have all rows of these results."""
        self._rows.update(one.name for one in op.outputs if one.dtype != tf.resource and one.shape.rank != 0)

    def leave_out(self, op: tf.Operation) -> None:
        """Count ops that take these results, slices of sparse gradients, as the weights' update."""
        self._slices.update(tensor.name for tensor in op.outputs)

    def tells_of(self, op: tf.Operation) -> bool:
        """Return whether it is told what towers receive for an op."""
        return self._told and op.name not in self._untold

    def receive(self, op: tf.Operation, size: Size, kind: CollectiveKind) -> None:
        """Count bytes that all towers receive for an op."""
        self.wholes.append(Whole(op.type, *own_place(op), size, kind))

    def add(
        self, op: tf.Operation, given: Sequence[Placement], taken: Sequence[Placement], made: Sequence[Placement]
    ) -> None:
        """Count an op as it was traced, by a tower's rows, or whole.

        Its inputs are placed as `given`, and where it takes them as `taken`; its results as `made`.
        """
        if op.name in self._joins and all(one.whole for one in made):
            self.leave_out(op)
            return
        if not self._told:
            return
        if not all(one.whole for one in (*taken, *made)):
            self.by_rows.append(op)
            return
        others = [tensor for tensor in op.inputs if tensor.name not in self._slices]
        if len(others) < len(op.inputs) and all(one.shape.is_fully_defined() for one in others):
            self.leave_out(op)
            self._others.append(op)
            return
        takes_rows = has(given, Shard, ListOf, Kept) or any(tensor.name in self._rows for tensor in op.inputs)
        open_shapes = not all(one.shape.is_fully_defined() for one in op.outputs)
        if takes_rows or (open_shapes and has(given, Counts)):
            self.have_rows(op)
            self.alike.append(op)
        else:
            self._others.append(op)

    def step_work(self) -> StepWork:
        """Return the work of the step."""
        works = self.works(self.alike)
        longest = {*np.argsort(-seconds(works, _ROWS).sum(0))[:_NAMED].tolist()}
        alike = tuple(
            Alike(*(own_place(op) if i in longest else ("", "")), work)
            for i, (op, work) in enumerate(zip(self.alike, works, strict=True))
        )
        return StepWork(self.works(self.by_rows), self.works(self._others), alike, tuple(self.wholes))

    def works(self, ops: Iterable[tf.Operation]) -> np.ndarray:
        """Return [ops, COUNTS, POWERS], by `Roofline.work`."""
        return np.reshape([self.roofline.work(op) for op in ops], [-1, COUNTS, POWERS])
