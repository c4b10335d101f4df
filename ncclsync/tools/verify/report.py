"""Hold the results of `verify`, as data and as a table. This module knows neither models nor towers."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ncclsync.ops.comparing import distance
from ncclsync.sharding.exactness import Inexact
from ncclsync.towers.printed import Printed, table

ROUNDING = "rounding"  # a reason's place
_ROWS = 20  # of the table; the variables that differ most

# A difference is relative to the largest magnitude of its array, and at least to this: of an array that holds nothing
# but rounding (the gradient of a bias without effect) no digit is meaningful.
_LEAST_MAGNITUDE, _LEAST_MAGNITUDE_OF_LOGS = 0.01, 1.0


@dataclasses.dataclass(frozen=True)
class Difference:
    """Measure the difference of an array on N towers from the same array on one device, after a step.

    Attributes:
        step: from 1.
        kind: "weight", "optimizer", "state" (variables that are neither), "log", "evaluate" or "predict".
        name: of the variable, log or output.
        absolute: the largest difference of two elements; infinite for a NaN beside a number, for different strings, and
            for different shapes.
        relative: `absolute` over the largest magnitude in one device's array, or over 0.01 (of a log, over 1) if that
            is larger.
        ok: whether `relative` is within the tolerance, or is rounding's alone (`Report.ok`); values that are neither
            floating-point nor complex must be equal.
        nan: whether either array holds a NaN. Equal NaNs do not differ.
    """

    step: int
    kind: str
    name: str
    absolute: float
    relative: float
    ok: bool
    nan: bool


def measure(step: int, kind: str, name: str, actual: Any, expected: Any, tolerance: float) -> Difference:
    """Compare an array of the towers (`actual`) with that of one device (`expected`); see `Difference`."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    numbers = _is_number(actual) and _is_number(expected)
    if actual.shape != expected.shape or not numbers:
        same = actual.shape == expected.shape and bool(np.all(actual == expected))
        apart = 0.0 if same else float("inf")
        return Difference(step, kind, name, apart, apart, same, nan=False)
    exact = expected.dtype.kind in "iub"
    wide = np.complex128 if "c" in (actual.dtype.kind, expected.dtype.kind) else np.float64
    one, other = actual.astype(wide), expected.astype(wide)
    nan = bool(np.isnan(one).any() or np.isnan(other).any())
    absolute = float(distance(tf.constant(one), tf.constant(other)))
    magnitude = float(np.max(np.abs(other[np.isfinite(other)]), initial=0.0))
    least = _LEAST_MAGNITUDE_OF_LOGS if kind in ("log", "evaluate") else _LEAST_MAGNITUDE
    relative = absolute / max(magnitude, least)
    return Difference(step, kind, name, absolute, relative, relative <= (0.0 if exact else tolerance), nan)


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Printed):
    """Report whether N towers trained as one device. `print` shows it as a table, and so does a notebook.

    Attributes:
        ok: no difference left the tolerance, or none that one device has not from itself, by rounding alone.
        tolerance: of a relative difference.
        devices: [N] of the towers.
        batch_sizes: [steps] samples in the batch of each step.
        differences: of every variable and log after every step, in this order: an optimizer's scalars (its learning
            rate), weights, the optimizer's slots, other state, logs.
        reasons: why they may differ; a NaN is named even if both arrays have it.
    """

    ok: bool
    tolerance: float
    devices: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    differences: tuple[Difference, ...]
    reasons: tuple[Inexact, ...]

    @property
    def towers(self) -> int:
        """Return how many towers were compared with one device."""
        return len(self.devices)

    @property
    def steps(self) -> int:
        """Return how many steps were trained."""
        return len(self.batch_sizes)

    @property
    def first(self) -> Difference | None:
        """Return the first difference that is out of tolerance: where to look."""
        return next((one for one in self.differences if not one.ok), None)

    @property
    def largest(self) -> tuple[Difference, ...]:
        """Return the largest relative difference of each variable, log and output over all steps."""
        worst: dict[tuple[str, str], Difference] = {}
        for one in self.differences:
            key = (one.kind, one.name)
            if key not in worst or one.relative > worst[key].relative:
                worst[key] = one
        return tuple(worst.values())

    def __rich__(self) -> Group:
        parts: list[Any] = [self._verdict(), self._table()]
        hidden = set(self.largest) - self._shown
        if hidden:
            out = len({(one.kind, one.name) for one in hidden} & self._left.keys())
            parts.append(Text(f"{len(hidden)} more differ less, {out} of these out of the tolerance.", style="dim"))
        if self.reasons:
            parts.append(Text("Likely reasons:" if not self.ok else "Worth knowing:", style="bold"))
        by_remedy: dict[str, list[Text]] = {}
        for reason in self.reasons:
            by_remedy.setdefault(reason.remedy, []).append(Text(f"  {reason.where}: {reason.reason}."))
        for remedy, group in by_remedy.items():
            parts += [*group, Text(f"    Remedy: {remedy}", style="dim")]
        return Group(*parts)

    @property
    def _left(self) -> dict[tuple[str, str], Difference]:
        """Return where each variable, log and output first left the tolerance."""
        return {(one.kind, one.name): one for one in reversed(self.differences) if not one.ok}

    @property
    def _shown(self) -> set[Difference]:
        """Return the rows of the table: what left the tolerance first, and what differs most."""
        first = self.first and (self.first.kind, self.first.name)
        by_size = sorted(self.largest, key=lambda one: ((one.kind, one.name) == first, one.relative), reverse=True)
        return set(by_size[:_ROWS])

    def _verdict(self) -> Text:
        sizes = ", ".join(map(str, self.batch_sizes))
        among = f"{self.towers} towers and one device, {self.steps} step{'s' * (self.steps > 1)} on "
        among += f"batches of {sizes} samples" if self.steps > 1 else f"a batch of {sizes} samples"
        if self.first is None:
            rounds = any(one.where == ROUNDING for one in self.reasons)
            how = "but for rounding, which one device amplifies, too" if rounds else f"to {self.tolerance:g}"
            return Text(f"Equal {how}: {among}", style="bold green")
        return Text(
            f"Different: {among}. First out of the tolerance of {self.tolerance:g}: "
            f"{self.first.kind} {self.first.name}, {_when(self.first)}, by {self.first.relative:.2g}",
            style="bold red",
        )

    def _table(self) -> Table:
        rows = []
        for one in filter(self._shown.__contains__, self.largest):
            since = self._left.get((one.kind, one.name))
            figures = f"{one.absolute:.2g}", f"{one.relative:.2g}", _when(one), f"from {_when(since)}" if since else ""
            rows.append([Text(cell, style="red" if since else "") for cell in (one.kind, one.name, *figures)])
        least = f"at least {_LEAST_MAGNITUDE:g}; of a log {_LEAST_MAGNITUDE_OF_LOGS:g}"
        caption = f"relative: by the largest magnitude of the array ({least})"
        heads = "", "variable", "largest\nabsolute", "largest\nrelative", "at", "out of\ntolerance"
        return table(heads, rows, numbers=range(2, 6), caption=caption)


def _when(one: Difference) -> str:
    return "the end" if one.kind in ("evaluate", "predict") else f"step {one.step}"


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "fciub" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
