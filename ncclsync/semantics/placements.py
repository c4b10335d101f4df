"""Define placements: how the batch's tensor follows from the towers'. A placement is what its class says.

The algebra of PyTorch's DTensor and of GSPMD (Xu et al., 2021, arXiv:2105.04663), for one axis of towers and
shards of any number of rows.
"""

import dataclasses
import enum
from collections.abc import Iterable
from typing import ClassVar, TypeGuard

from ncclsync.compat.names import TensorName
from ncclsync.ops.collectives import ReduceOp

SAMPLES = TensorName("")  # a unit of rows that no tensor names


@dataclasses.dataclass(frozen=True)
class Placement:
    """Describe how the batch's tensor follows from those of the towers; `whole`: every tower has the batch's value."""

    whole: ClassVar[bool] = False

    def __str__(self) -> str:
        return type(self).__name__


class Replicate(Placement):
    """It is the batch's."""

    whole = True


@dataclasses.dataclass(frozen=True)
class Partial(Placement):
    """The batch's value is the towers' values reduced by `op`; "mean" weighs each by its samples."""

    op: ReduceOp

    def __str__(self) -> str:
        return f"Partial({self.op})"


@dataclasses.dataclass(frozen=True)
class Rowed(Placement):
    """It has rows, or counts them.

    Attributes:
        unit: what rows are counted by: `SAMPLES`; else the rows of the tensor of that name, or the values between
            these row splits. How many of them a tower has depends on its data.
    """

    unit: TensorName = dataclasses.field(default=SAMPLES, kw_only=True)


class Recomputed(Placement):
    """It cannot be exchanged: it is computed again, of whole inputs."""


@dataclasses.dataclass(frozen=True)
class Shard(Rowed):
    """It has the tower's rows of `axis`. Rows of another unit than samples lie in the order of these units.

    Attributes:
        blocks: of which that axis consists, one after the other, each with the same number of rows per sample.
        each: how many rows per sample a block has; None: not known. Placements are compared without it: tensors that
            one op takes together have equally many.
        alike: whether all rows are: then their order does not matter, and they are one block.
    """

    axis: int = 0
    blocks: int = 1
    each: int | None = dataclasses.field(default=1, compare=False)
    alike: bool = False

    def __str__(self) -> str:
        return f"Shard({self.axis})" if self.blocks < 2 else f"Shard({self.axis}, blocks={self.blocks})"

    def at(self, axis: int) -> "Shard":
        """Return the placement of the same rows along another axis."""
        return dataclasses.replace(self, axis=axis)

    @property
    def rows(self) -> int | None:
        """Return how many rows per sample there are; None: not known."""
        return self.each and self.each * self.blocks


@dataclasses.dataclass(frozen=True)
class Counts(Rowed):
    """Integers, a scalar or a vector, that count rows: the batch's are the sums of the towers'.

    Attributes:
        counts: for each element, how many for each sample; None where that is not known, and 0 for an element that
            counts no rows and is the same on all towers.
    """

    counts: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class SummedAxes(Rowed, Recomputed):
    """The axes over which the gradient, with rows along `axis`, of a broadcast operand, placed as `of`, is summed."""

    of: Placement
    axis: int


class Local(Placement):
    """Each tower's own; the batch has no such value. By agreement its mean by samples stands for it."""

    def __str__(self) -> str:
        return "Local"


class Seeded(Local):
    """By agreement what tower 0 has stands for the batch's value."""


@dataclasses.dataclass(frozen=True)
class EachRow(Local):
    """What one row has, in a loop over a tower's rows, as of `tf.map_fn`; `each`: how many a sample has, if known."""

    each: int | None = dataclasses.field(default=1, compare=False)


class Counter(Local):
    """Which row it is, in a loop over a tower's rows."""


class Kept(Recomputed):
    """What a kernel keeps for its gradient, in an order of its own."""


@dataclasses.dataclass(frozen=True)
class ListOf(Placement):
    """A list of tensors that are placed as `of`, or, if that is None, an empty one.

    Attributes:
        shape: of the tensors that an empty list takes, in which None is any length.
        by_row: whether a loop has put in one tensor for each of a tower's rows.
    """

    of: Placement | None
    shape: tuple[int | None, ...] = ()
    by_row: bool = False


@dataclasses.dataclass(frozen=True)
class OneOf(Placement):
    """What a branch keeps for its own gradient: it is placed as that branch has it; `ways`: for each branch."""

    ways: tuple[Placement, ...]


class Piece(Recomputed):
    """What divides a ragged tensor, or pieces of texts, into a tower's rows, or leads to that."""

    def __str__(self) -> str:
        return "Piece"


class Part(enum.Enum):
    """Name what there is of row splits."""

    ALL = "all"
    ENDS = "ends"  # where each row ends
    BEGINS = "begins"  # where each row begins
    LENGTH = "length"  # how many there are


@dataclasses.dataclass(frozen=True)
class Splits(Piece):
    """Row splits, or a part of them; `unit`: of the values, if only the ends of rows are known as yet."""

    part: Part = Part.ALL
    unit: TensorName = SAMPLES


@dataclasses.dataclass(frozen=True)
class PiecesShape(Piece):
    """The shape of the sparse tensor of the pieces that texts are split into, with `each` rows for each sample."""

    each: int


class Which(enum.Enum):
    """Say which elements of a tower's rows integers number."""

    FIRST = "first"  # the first of each row: 0, w, 2 w, …
    ROW = "row"  # of each row one: its first plus a number below w
    OWN = "own"  # any
    LOOSE = "loose"  # any, as far as is known: the step looks whether they leave the tower's rows
    EVERY = "every"  # each, in ascending order
    MAP = "map"  # the places that the values of a sparse tensor get when empty rows are filled


@dataclasses.dataclass(frozen=True)
class Numbers(Recomputed):
    """Integers that number the elements of a tower's rows, w of each.

    Attributes:
        height, width: how many rows there are for each sample, None if that is open; w.
        axis, each, unit: of the rows that these integers have themselves; see `Shard`.
    """

    height: int | None
    width: int
    which: Which = Which.OWN
    axis: int = 0
    each: int | None = dataclasses.field(default=1, compare=False)
    unit: TensorName = SAMPLES

    @property
    def count(self) -> int | None:
        """Return how many elements there are per sample; None if that is open."""
        return self.height and self.height * self.width

    @property
    def by(self) -> Shard:
        """Return how these integers are placed once they number the batch's elements."""
        return Shard(self.axis, each=self.each, unit=self.unit)

    def moved(self, by: Shard, which: Which = Which.OWN, kind: "type[Numbers] | None" = None) -> "Numbers":
        """Return the placement of numbers of the same elements, one for each of the rows that are placed `by`."""
        return (kind or type(self))(self.height, self.width, which, by.axis, by.each, by.unit)


class Places(Numbers):
    """One integer for each element."""


class Indices(Numbers):
    """Vectors of integers, such as a sparse tensor's indices, whose first ones number the elements.

    They lie along the last axis; along the first one of a matrix with rows along the second.
    """


REPLICATE, LOCAL, SEEDED, EACH, COUNTER = Replicate(), Local(), Seeded(), EachRow(), Counter()
SUM, MEAN, KEPT, SPLITS = Partial("sum"), Partial("mean"), Kept(), Splits()


def rows(counts: tuple[int | None, ...]) -> Counts | Replicate:
    """Return the placement of counts of rows; REPLICATE if no element counts any."""
    return Counts(counts) if any(one != 0 for one in counts) else REPLICATE


def has_samples(placed: Placement) -> TypeGuard[Shard]:
    """Return whether a tensor has the tower's samples along its first axis, in one block."""
    return placed == Shard()


def only(placed: Iterable[Placement], *classes: type[Placement]) -> bool:
    """Return whether all placements are of these classes."""
    return all(isinstance(one, classes) for one in placed)


def has(placed: Iterable[Placement], *classes: type[Placement]) -> bool:
    """Return whether any of the placements is of these classes."""
    return any(isinstance(one, classes) for one in placed)
