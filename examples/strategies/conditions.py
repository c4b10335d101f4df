"""Under which conditions the weights are compared with one device's. Known without TensorFlow."""

import dataclasses

LAST_ROWS = 5  # of the last batch, where it is not to divide by the towers


@dataclasses.dataclass(frozen=True)
class Condition:
    """How the model normalises (one of `task.NORMALISATIONS`), and the rows of a last, smaller batch."""

    normalisation: str
    last_rows: int = 0


CONDITIONS = {
    "plain": Condition("none"),
    "batch norm": Condition("batch"),
    "synchronized": Condition("synchronized"),
    "last batch": Condition("none", LAST_ROWS),
}
EQUAL = 1e-4  # a distance up to here is rounding: that of sums in another order is a hundredth of it
