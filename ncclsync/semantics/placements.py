"""Define placements: how the batch's tensor follows from the towers'.

The algebra of PyTorch's DTensor and of GSPMD (Xu et al., 2021, arXiv:2105.04663), for one axis of towers and
shards of any number of rows.
"""

import dataclasses
import enum

from ncclsync.compat.names import TensorName
from ncclsync.ops.collectives import ReduceOp

SAMPLES = TensorName("")  # a unit of rows that no tensor names


class Detail(enum.Enum):
    """Say more of a placement of some kinds."""

    TOWER_0 = "tower 0"  # LOCAL: by agreement what tower 0 has stands for the batch's value
    ROW = "row"  # LOCAL, in a loop over a tower's rows, as of `tf.map_fn`: what one row has; see ITEMS and PLACES
    COUNTER = "counter"  # LOCAL, in such a loop: which row it is
    ENDS = "ends"  # PIECE: where each row ends
    BEGINS = "begins"  # PIECE: where each row begins
    LENGTH = "length"  # PIECE: how many splits there are
    SHAPE = "shape"  # PIECE: the shape of the sparse tensor of the pieces that texts are split into
    OWN = "own"  # PLACES: each numbers any one of the tower's rows · w elements
    LOOSE = "loose"  # PLACES, INDICES: as OWN, as far as is known: the step looks whether they leave the tower's rows
    EVERY = "every"  # PLACES: as OWN, and each element occurs, in ascending order
    MAP = "map"  # PLACES: where each value of a sparse tensor goes when empty rows are filled


class Kind(enum.Enum):
    """Name the ways in which the batch's value follows from the towers'; see `Placement`."""

    REPLICATE = "replicate"
    SHARD = "shard"
    PARTIAL = "partial"
    COUNTS = "counts"
    LOCAL = "local"
    AXES = "axes"
    KEPT = "kept"
    ITEMS = "items"
    PIECE = "piece"
    PLACES = "places"
    INDICES = "indices"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Describe how the batch's tensor follows from those of the towers.

    Attributes:
        kind:
            REPLICATE: it is the batch's.
            SHARD: it has the tower's rows of `axis`. That axis consists of `blocks` blocks, one after the
                other, each with the same number of rows per sample. If all rows are alike, `blocks` is 0: their order
                does not matter. Rows of another `unit` than samples lie in the order of these units.
            PARTIAL: the batch's value is the towers' values reduced by `op`; "mean" weighs each by its samples.
            COUNTS: integers, a scalar or a vector, that count rows: the batch's are the sums of the towers'.
                `counts` has an entry per element: how many for each sample, -1 where that is not known, and
                0 for an element that counts no rows and is the same on all towers.
            LOCAL: each tower's own; the batch has no such value. By agreement its mean by samples stands for it.
            AXES: the axes over which the gradient of a broadcast operand is summed; `of` is the operand's placement,
                `axis` the gradient's axis of rows.
            KEPT: what a kernel keeps for its gradient, in an order of its own.
            ITEMS: a list of tensors that are placed as `of`. If `of` is None, the list is still empty, and takes
                tensors of the shape `counts`, in which -1 is any length. With detail ROW, a loop has put in one
                tensor for each of a tower's rows.
            PIECE: row splits of a ragged tensor that holds the tower's rows, or what leads to them.
            PLACES: integers that number the tower's elements: 0, w, 2 w, … for its rows along `axis`; with detail
                ROW, each plus a number below w. `counts` is (rows for each sample, w).
            INDICES: vectors of integers, such as a sparse tensor's indices, whose first ones are placed as PLACES. They
                lie along the last axis; along the first one of a matrix with rows along the second.
        axis, blocks: see SHARD; `axis` also AXES and PLACES.
        unit: what rows are counted by: `SAMPLES`; else the rows of the tensor of that name, or the values between
            these row splits. How many of them a tower has depends on its data.
        each: of a SHARD, how many rows per sample a block has; 0: not known. Placements are compared without it:
            tensors that one op takes together have equally many.
        op, detail: see PARTIAL; what else there is to say.
        counts: see COUNTS, ITEMS and PLACES.
        of: see AXES and ITEMS.
    """

    kind: Kind
    axis: int = 0
    blocks: int = 1
    each: int = dataclasses.field(default=1, compare=False)
    op: ReduceOp = "sum"
    detail: Detail | None = None
    counts: tuple[int, ...] = ()
    of: "Placement | None" = None
    unit: TensorName = SAMPLES

    def __str__(self) -> str:
        if self.kind is Kind.SHARD:
            return f"Shard({self.axis})" if self.blocks < 2 else f"Shard({self.axis}, blocks={self.blocks})"
        if self.kind is Kind.PARTIAL:
            return f"Partial({self.op})"
        return self.kind.value.capitalize()

    def at(self, axis: int) -> "Placement":
        """Return the placement of the same rows along another axis."""
        return dataclasses.replace(self, axis=axis)

    def of_unit(self, unit: TensorName) -> "Placement":
        """Return the placement of as many rows of another unit."""
        rowed = self.kind in (Kind.SHARD, Kind.COUNTS, Kind.AXES)
        return dataclasses.replace(self, unit=unit) if rowed and self.unit != unit else self

    @property
    def whole(self) -> bool:
        """Return whether every tower has the batch's value."""
        return self.kind is Kind.REPLICATE


REPLICATE = Placement(Kind.REPLICATE)
LOCAL = Placement(Kind.LOCAL)
SEEDED = Placement(Kind.LOCAL, detail=Detail.TOWER_0)
EACH = Placement(Kind.LOCAL, detail=Detail.ROW)
COUNTER = Placement(Kind.LOCAL, detail=Detail.COUNTER)
SUM = Placement(Kind.PARTIAL, op="sum")
MEAN = Placement(Kind.PARTIAL, op="mean")
PIECE = Placement(Kind.PIECE)
KEPT = Placement(Kind.KEPT)


def shard(axis: int = 0, blocks: int = 1, each: int = 1, unit: TensorName = SAMPLES) -> Placement:
    """Return the placement of rows along `axis`; see `Placement`."""
    return Placement(Kind.SHARD, axis=axis, blocks=blocks, each=each, unit=unit)


def partial(op: ReduceOp) -> Placement:
    """Return the placement of parts that `op` reduces."""
    return Placement(Kind.PARTIAL, op=op)


def rows(counts: tuple[int, ...]) -> Placement:
    """Return the placement of counts of rows; REPLICATE if no element counts any."""
    return Placement(Kind.COUNTS, counts=counts) if any(counts) else REPLICATE


def axes(of: Placement, axis: int) -> Placement:
    """Return the axes that an operand of this placement was broadcast along, to rows along `axis`."""
    return Placement(Kind.AXES, of=of, axis=axis)


def items(of: Placement | None, shape: tuple[int, ...] = ()) -> Placement:
    """Return the placement of a list of such tensors, or of an empty one for tensors of a shape."""
    return Placement(Kind.ITEMS, of=of, counts=shape)
