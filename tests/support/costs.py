"""What a step costs on towers, by placing it: nothing is trained.

A module of `tests/costs` holds functions decorated by `row`: each makes a step, and gives it a batch. What the step
gathers and computes alike is counted until there is a program, which is not even made.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import keras
import numpy as np
import parity

import ncclsync
from ncclsync.costs.losses import MOST_LOST, Losses, losses_of
from ncclsync.costs.roofline import CORE
from ncclsync.program.cut import place
from ncclsync.program.schedule import schedule
from ncclsync.semantics import rules
from ncclsync.towers import programs as steps

TOWERS = 3
ROWS = 256  # of the batch that gathered bytes are counted for; tables have fewer
CORE_TOWERS, CORE_ROWS = 4, 512  # of `measured_losses.py`
LEAST_BYTES = 2048
# Of any row: random numbers are one device's, all rows' of one stream. What is done with them is not.
DRAWN = dict.fromkeys(rules.DRAWS, "they are one device's: all rows' of one stream")
MOST_OF_WEIGHTS, MOST_ALIKE = 0.01, 0.02

ROWS_OF_TABLE: dict[str, "Row"] = {}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        run: trains a first step on towers.
        inherent: why ops of these types need all rows.
        extra: the library that it needs beside the tests' own.
    """

    run: Callable[[], Any]
    inherent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: str = ""


def row(name: str, run: Callable[[], Any], inherent: Mapping[str, str] | None = None, extra: str = "") -> None:
    """Add a row; see `Row`."""
    if name in ROWS_OF_TABLE:
        raise ValueError(f"Expected rows of different names. Received: {name!r} twice")
    ROWS_OF_TABLE[name] = Row(run, inherent or {}, extra)


def fits(build: Callable[[], keras.Model], *batch: Any) -> Callable[[], Any]:
    """A `run`: the train step of a factory's model, for a batch (x, y, perhaps sample weights)."""
    return functools.partial(explained, build, batch)


def explained(build: Callable[[], keras.Model], batch: Any) -> None:
    """Explain a factory's train step."""
    parity.on_towers(build, TOWERS).towers.explain(batch)


def runs(make: Callable[[], Callable[[Any], Any]], batch: Any) -> Callable[[], Any]:
    """A `run`: a step of one's own, made by `make`, for a batch."""
    return functools.partial(own_step, make, batch)


def own_step(make: Callable[[], Callable[[Any], Any]], batch: Any) -> None:
    """Run a step of one's own."""
    with ncclsync.Towers(TOWERS) as towers:
        towers.run(make(), batch)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step costs on towers.

    Attributes:
        gathered: (op type, the user's line, bytes for `ROWS` rows) of rows that every tower receives, also by a sum.
        alike: (op type, its name, share of all arithmetic) that every tower does for all rows.
        weights: bytes of what is trained.
        exchanges: how many tensors meet.
        lost: of a step's time, as users are warned of it on GPUs.
        on_cores: of its CPU time, on CPU towers, with many rows.
        why: what the placer says of the ops that it makes whole.
        ops: the types of all its ops, also within loops, branches and calls.
    """

    gathered: tuple[tuple[str, str, int], ...]
    alike: tuple[tuple[str, str, float], ...]
    weights: int
    exchanges: int
    lost: Losses
    on_cores: Losses
    why: tuple[str, ...] = ()
    ops: frozenset[str] = frozenset()

    def bytes_gathered(self, but: Mapping[str, str] = {}) -> int:
        """Of ops of other types than `but`."""
        return sum(size for op, _, size in self.gathered if op not in but)

    def share_alike(self, but: Mapping[str, str] = {}) -> float:
        """Of ops of other types than `but`."""
        return sum(share for op, _, share in self.alike if op not in but)

    @property
    def most_bytes(self) -> int:
        """How many bytes of rows may be gathered, beyond what is inherent."""
        return max(LEAST_BYTES, int(MOST_OF_WEIGHTS * self.weights))

    def __str__(self) -> str:
        lines = [
            f"{self.bytes_gathered()} bytes of rows reach every tower for {ROWS} rows (weights: {self.weights} bytes), "
            f"{self.share_alike():.1%} computed alike, {self.exchanges} exchanges"
        ]
        lines += [f"  gathered for {op}, {line}: {size} bytes" for op, line, size in self.gathered]
        lines += [f"  alike: {op}, {line}: {share:.1%}" for op, line, share in self.alike[:5]]
        lines += [f"  {message}" for message in self.why]
        return "\n".join(lines)


class _Placed(BaseException):
    """Ends what trains, once its step is placed."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost


class _First:
    """Stands for the program of a first trace: whoever goes on with it is done."""

    def __init__(self, fixed: Any, cost: Cost) -> None:
        self.fixed, self._cost = fixed, cost

    def __getattr__(self, name: str) -> Any:
        raise _Placed(self._cost)


def cost_of(run: Callable[[], Any]) -> Cost:
    """Let `run` train until its first step is placed; return what that costs.

    Raises:
        AssertionError: it has not come to that.
    """
    keras.utils.set_random_seed(1)
    with mock.patch.object(steps, "cut", _place), _debugged() as messages:
        try:
            run()
        except _Placed as placed:
            whole = dict.fromkeys(message for message in messages if "is made whole" in message)
            return dataclasses.replace(placed.cost, why=tuple(whole))
    raise AssertionError("Expected a step on towers. Received: none")


@contextlib.contextmanager
def _debugged() -> Iterator[list[str]]:
    """Yield the list of what ncclsync's logger is told meanwhile, and keep it from all others."""
    messages: list[str] = []
    logger, handler = logging.getLogger("ncclsync"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    with mock.patch.multiple(logger, level=logging.DEBUG, handlers=[handler], propagate=False):
        logger.manager._clear_cache()
        yield messages
    logger.manager._clear_cache()


def _place(trace: Any, target: Any, results: Any, *, undivided: str = "", **_: Any) -> Any:
    assert not undivided, undivided
    placed = place(trace, target.home_device, results, target.same_seeds, many_shards=target.many_shards)
    graph, costs = placed.graph, placed.conversions.costs
    # Multiplications, and numbers of four bytes that are moved; of one row, beside what is done for one row.
    counts = costs.works([*costs.alike, *costs.by_rows]).sum(axis=2) @ (1, 1 / 4, 0)
    shares = counts[: len(costs.alike)] / (counts.sum() or 1.0)
    pairs = sorted(zip(costs.alike, shares.tolist(), strict=True), key=lambda one: -one[1])
    alike = tuple((op.type, op.name, share) for op, share in pairs)
    weights = sum(
        int(np.prod(v.shape)) * v.dtype.size
        for v in graph.traced.variable_of.values()
        if v.trainable and v.shape.is_fully_defined()
    )
    # The gradient of rows that a line gathers is added up for that line's op.
    of_line = {one.place: one.op for one in costs.wholes if one.kind == "all_gather"}
    named = ((one, one.op if one.kind == "all_gather" else of_line.get(one.place, one.op)) for one in costs.wholes)
    gathered = tuple((op, one.place, int(one.size.at(ROWS))) for one, op in named)
    work, segments = costs.step_work(), schedule(graph, None).count
    lost = losses_of(work, weights, ROWS, TOWERS)
    on_cores = losses_of(work, weights, CORE_ROWS, CORE_TOWERS, segments, CORE)
    ops = frozenset(kind for op in graph.ops for kind in (op.type, *graph.functions.op_types(op)))
    cost = Cost(gathered, alike, weights, len(graph.exchanges), lost, on_cores, ops=ops)
    if fixed := placed.variables_of_rows():  # it is traced once more, if that can be
        return _First(fixed, cost)
    raise _Placed(cost)


@functools.cache
def cost_of_row(name: str) -> Cost:
    """Place a row's step, once."""
    return cost_of(ROWS_OF_TABLE[name].run)


def check(name: str) -> None:
    """A row costs no more than what is inherent, and the limits.

    Raises:
        AssertionError: it does; or what is called inherent is not found.
    """
    made = ROWS_OF_TABLE[name]
    cost = cost_of_row(name)
    inherent = {**DRAWN, **made.inherent}
    gathered, alike = cost.bytes_gathered(inherent), cost.share_alike(inherent)
    assert gathered <= cost.most_bytes and alike <= MOST_ALIKE, f"{gathered} bytes and {alike:.1%} too much: {cost}"
    assert made.inherent or cost.lost.share <= MOST_LOST, f"{cost.lost}: {cost}"
    found = {op for op, *_ in (*cost.gathered, *cost.alike)}
    assert found & {*made.inherent} or not made.inherent, f"Expected {[*made.inherent]} to need all rows: {cost}"
