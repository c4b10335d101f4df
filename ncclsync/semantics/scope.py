"""Say where an op stands that is being placed, in the step or in a function that it runs, and what is known there."""

import dataclasses
from typing import Protocol

import tensorflow as tf

from ncclsync.compat.names import TensorName
from ncclsync.semantics.axes import Axes
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placements import REPLICATE, Placement


class Conversion(Protocol):
    """Bring an op's inputs to other placements."""

    def convert(self, tensor: tf.Tensor, before: Placement, after: Placement, op: tf.Operation) -> tf.Tensor:
        """Return a tensor as it must be placed for `op`."""

    def spares(self, tensor: tf.Tensor, placed: Placement) -> bool:
        """Return whether every tower can compute all of a tensor itself, so that nothing is exchanged for it."""
        return placed.whole

    def reduced(self, tensor: tf.Tensor) -> Placement:
        """Return how a PARTIAL tensor is placed where it is added up: by rows if it is known to have them."""
        return REPLICATE


@dataclasses.dataclass
class Units:
    """Know the units of rows that are not samples', by names of tensors.

    Attributes:
        row_splits: of the row splits of ragged tensors whose values lie in rows, not in rows of rows: the values' unit.
        row_lengths: of the lengths of ragged rows that were counted: the unit of the values.
        masks: of a mask, or of the lengths that it shows: the unit of its true elements.
        limits: of lengths: up to which limit a mask shows them.
    """

    row_splits: dict[TensorName, TensorName] = dataclasses.field(default_factory=dict)
    row_lengths: dict[TensorName, TensorName] = dataclasses.field(default_factory=dict)
    masks: dict[TensorName, TensorName] = dataclasses.field(default_factory=dict)
    limits: dict[TensorName, TensorName | int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Lengths:
    """Know which lengths of the trace are numbers of rows.

    Attributes:
        fixed: rows per sample, by the length that the trace has of an axis that is divided.
        declared: lengths that are fixed, of so many rows for each sample, and what fixes them, in words.
        batch: how many rows each batch has for which the step is traced; None: any.
        stretched: whether a batch of one row may have more rows of a tensor than `each` says, since it was broadcast.
    """

    fixed: dict[int, int] = dataclasses.field(default_factory=dict)
    declared: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    batch: int | None = None
    stretched: bool = False


@dataclasses.dataclass(frozen=True)
class Scope:
    """Describe the step, or a function that it runs, to the rules.

    Attributes:
        functions: of the step.
        axes: of the graph whose ops are placed.
        conversion: brings inputs to what a rule requires.
        lengths, units: what is known of these.
        looks: whether the step can look whether numbers leave a tower's rows.
        within: whether this is a function, in which no exchange can be put before an op.
        lenient: whether whole tensors may be taken for rows, while a loop's body is tried, to see how it begins.
        row_by_row: whether the ops are in a loop over a tower's rows.
    """

    functions: Functions
    axes: Axes
    conversion: Conversion
    lengths: Lengths
    units: Units = dataclasses.field(default_factory=Units)
    looks: bool = False
    within: bool = False
    lenient: bool = False
    row_by_row: bool = False
