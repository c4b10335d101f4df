"""Explain what towers do with a step: how variables are exchanged, where it is cut, how a batch is split.

Reads it off a `Program`, as rows and as tables; decides nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from rich.console import Group
from rich.text import Text

from ncclsync.costs.cost import Whole
from ncclsync.costs.losses import MOST_LOST
from ncclsync.costs.roofline import CORE
from ncclsync.ops import CollectiveKind
from ncclsync.ops.xla_programs import share_programs
from ncclsync.program.program import Exchange, Program
from ncclsync.sharding.roles import Role, role_of
from ncclsync.towers.printed import Printed, table
from ncclsync.towers.state import TowerState

_RULES = {
    Role.SAME: "same on all towers; no exchange of its own",
    Role.SUM: "sum: {one} 0 holds it, the others start from zero",
    Role.PARTIAL: "partial: each {one} accumulates its samples'",
    Role.PARTITION: "each {one} has its part",
    Role.SEED: "seed: each {one} has its own",
}
_WORDS = {
    CollectiveKind.ALL_GATHER: "all-gather: the rows of all towers",
    CollectiveKind.STACK: "all-gather: one row of each tower",
    CollectiveKind.REDUCE_SCATTER: "reduce-scatter: each tower its part of the sum",
}


@dataclasses.dataclass(frozen=True)
class VariableRow:
    """Describe a variable that the step uses."""

    name: str  # its Keras path where known
    size_bytes: int  # of one tower's copy
    role: str  # how the towers' copies relate: a value of `Role`
    rule: str  # how the towers' parts of its new value become one, in words
    bucket: tuple[int, int] | None  # the segment that sends these, and its bucket, from 1; None: nothing is exchanged


@dataclasses.dataclass(frozen=True)
class CutRow:
    """Describe the exchanges after a segment that one line causes."""

    segment: int  # from 1
    what: str  # what it is and how it is exchanged, in words
    tensors: int  # how many
    size_bytes: int | None  # of one tower's tensors, as far as their shapes are known; None: none is
    line: str  # file, number and text of the user's line that asks for it, or calls what does; or Keras' layer


@dataclasses.dataclass(frozen=True)
class WholeRow:
    """Describe rows that reach every tower, gathered or added up, since an op needs those of the whole batch."""

    op: str  # the first such op's type
    ops: int  # how many such ops that line has
    size_bytes: int  # of the rows that reach every tower for them; of one row where no batch is known
    line: str  # file, number and text of the user's line in the step; if there is none, the layer


@dataclasses.dataclass(frozen=True)
class ShardRow:
    """Name a shard of the batch, rows `begin` to `end` - 1, and the tower that computes it."""

    tower: int
    device: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """Describe what towers do with a step. `print` shows it as tables, and so does a notebook."""

    segments: int  # how many parts the step has; the towers meet after each but the last
    variables: tuple[VariableRow, ...]  # those that the step uses
    cuts: tuple[CutRow, ...]  # why it is cut
    shards: tuple[ShardRow, ...]  # of the batch, in order; none if no batch is known
    wholes: tuple[WholeRow, ...] = ()  # the rows that reach every tower; none for most models
    order: str = ""  # how a tower computes its shards, or by what shares towers divide a batch, in words
    compiled: str = ""  # how many programs XLA compiles, in words; empty where it compiles none
    price: str = ""  # what CPU towers lose since they share one device's cores, in words
    nccl_bytes: int = 0  # the most memory of a GPU that NCCL takes beside TensorFlow; 0 without NCCL

    def __rich__(self) -> Group:
        of_variables = [
            (one.name, one.size_bytes, one.role, ".".join(map(str, one.bucket or ())), one.rule)
            for one in self.variables
        ]
        others: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
            ("after", "bytes", "tensors", "exchanged", "asked for at"): [
                (one.segment, "?" if one.size_bytes is None else one.size_bytes, one.tensors, one.what, one.line)
                for one in self.cuts
            ],
            ("rows of all for", "bytes", "ops", "at"): [(w.op, w.size_bytes, w.ops, w.line) for w in self.wholes],
            ("tower", "rows", "of the batch", "device"): [
                (one.tower, one.end - one.begin, f"{one.begin} to {one.end - 1}" * (one.end > one.begin), one.device)
                for one in self.shards
            ],
        }
        taken = f"NCCL takes {self.nccl_bytes / 2**20:.0f} MiB of each GPU." if self.nccl_bytes else ""
        parts = f"{self.segments} segments" if self.segments > 1 else "1 segment"
        return Group(
            table(("variable", "bytes", "role", "bucket", "how"), of_variables, numbers=[1]),
            Text(" ".join(filter(None, (f"The step has {parts}.", self.order, self.compiled, self.price, taken)))),
            *(table(names, rows, numbers=[1]) for names, rows in others.items() if rows),
        )


def explain_program(
    program: Program, towers: TowerState, rows: int | None, *, plain: bool = False, of_last: bool = False
) -> Explanation:
    """Explain the program of a step on `towers`, for a batch of this number of rows, if it is known.

    `plain`: Keras' own function runs in its place, on one tower. `of_last`: that batch was the last one.
    """
    if plain:  # one part, that is what meets rows
        program = dataclasses.replace(program, segments=(max(program.segments, key=lambda one: one.takes_rows),))
    sent = {
        exchange.result: (exchange, (number, place))
        for number, segment in enumerate(program.segments, start=1)
        for place, bucket in enumerate(segment.outgoing, start=1)
        for exchange in bucket.exchanges
        if towers.layout.shards > 1
    }
    updates = {name: result for name, result in program.updates if result in sent}
    subjects = {updates[name]: _subject(v) for name, v in program.variables if name in updates}
    count, groups = towers.layout.shards, dict[tuple[int, str, str], list[Exchange]]()
    for result, (exchange, (number, _)) in sent.items():
        subject = subjects.get(result, "other")
        if exchange.collective.divides:
            subject = "gradients" if exchange.collective.differs else "weights"
        line = exchange.place if subject == "other" else exchange.line
        groups.setdefault((number, f"{subject}; {_words(exchange)}", line), []).append(exchange)
    cuts = []
    for (number, what, line), group in groups.items():
        sizes = [size for one in group if (size := one.size_bytes(count, rows)) is not None]
        cuts.append(CutRow(number, what, len(group), sum(sizes) if sizes else None, line))
    names = towers.session.names_of([variable for _, variable in program.variables])
    variables, whose = [], "shard" if towers.layout.divided else "tower"
    for name, (handle, variable) in zip(names, program.variables, strict=True):
        role, bucket = towers.replicas.role_of(variable), None
        rule = _RULES[role].format(one=whose)
        if count == 1:
            rule = "one tower: nothing is exchanged"
        elif handle in updates:
            exchange, bucket = sent[updates[handle]]
            rule = _words(exchange)
        size = int(variable.shape.num_elements() or 0) * variable.dtype.size
        variables.append(VariableRow(name, size, role.value, rule, bucket))
    wholes = _wholes(program, rows) if count > 1 else ()
    shards = _shards(towers, rows)
    parts = len(program.segments), tuple(variables), tuple(cuts), shards, wholes
    order = "One tower runs Keras' own step." if plain else _order(program, towers)
    order += f" The last batch, of {rows} rows, is shown." * (of_last and rows is not None)
    words = order.strip(), _compiled(program, shards, towers)
    price = _price(program, len(towers), rows) if rows and count > 1 and towers.layout.shares_cores else ""
    return Explanation(*parts, *words, price, towers.communicator.taken_bytes)


def _order(program: Program, towers: TowerState) -> str:
    """Say how towers share a batch, or what a tower with several shards keeps of each while it computes the others."""
    shares, most = towers.layout.shares, max(map(len, towers.layout.places))
    if shares is not None:
        return f"Towers share each batch {' : '.join(map(str, shares))}."
    if most == 1:
        return ""
    of_shards = [segment for segment in program.segments if not segment.once]
    kept = {
        name
        for i, segment in enumerate(of_shards)
        for name in segment.fetches
        if any(name in later.sources for later in of_shards[i + 1 :])
    }
    what = f"It has {towers.layout.shards} shards: a tower computes {most} of them, one after another"
    if not kept:
        return f"{what}, and keeps of each only its addends of the sums."
    return (
        f"{what}, {len(of_shards)} times, since they meet in between; {len(kept)} tensors of each shard are kept "
        "meanwhile, so that several shards take more memory than one."
    )


def _compiled(program: Program, shards: Sequence[ShardRow], towers: TowerState) -> str:
    if not program.jit_compile:
        return ""
    count, by_rows = len(program.segments), sum(segment.takes_rows for segment in program.segments)
    sizes = sorted({max(1, one.end - one.begin) for one in shards}, reverse=True)  # at least a copy of a row
    of_these = f", of this batch {' and '.join(map(str, sizes))}" if sizes else ""
    # Parts of even size have one number of rows, or two that differ by one; by shares each tower may have its own.
    most = towers.layout.shards
    if not share_programs(towers.layout.devices):
        total = ": each device compiles what it runs"
    else:
        compilations = f": {count + by_rows * (len(sizes) - 1)} compilations" if sizes else ","
        total = f"{compilations} on any number of devices"
        most = most if towers.layout.shares else min(2, most)
    return (
        f"XLA compiles it as {count} programs, {by_rows} of these anew for each number of rows that a tower "
        f"gets{of_these}{total}. A smaller last batch of a fit takes up to {by_rows * most} more."
    )


def _price(program: Program, towers: int, rows: int) -> str:
    """Say what CPU towers lose since they share one device's cores."""
    losses = program.losses(towers, rows, CORE)
    if losses.share < MOST_LOST:
        return ""
    needed = f"{losses.needed:.0%} for rows that reach every tower" if losses.needed >= 0.01 else ""
    return (
        f"These towers share one device's cores, and take an estimated {1 / (1 - losses.share):.1f} times its CPU "
        f"time: they lose {', '.join(filter(None, (losses.by_cores, needed)))}."
    )


def _wholes(program: Program, rows: int | None) -> tuple[WholeRow, ...]:
    found: dict[str, list[Whole]] = {}
    for whole in program.work.wholes:
        found.setdefault(whole.place, []).append(whole)
    return tuple(
        WholeRow(group[0].op, len(group), int(sum(one.size.at(rows or 1) for one in group)), line)
        for line, group in found.items()
    )


def _subject(variable: tf.Variable) -> str:
    if variable.trainable:
        return "gradients"
    return "metrics" if role_of(variable) is Role.SUM else "variables"


def _shards(towers: TowerState, rows: int | None) -> tuple[ShardRow, ...]:
    layout = towers.layout
    devices = dict(zip(layout.ranks, layout.devices, strict=True))
    found, begin = [], 0
    for tower, size in zip(layout.owners, layout.sizes_of(rows) if rows else (), strict=False):
        found.append(ShardRow(tower, devices.get(tower, "of another process"), begin, begin + size))
        begin += size
    return tuple(found)


def _words(exchange: Exchange) -> str:
    collective = exchange.collective
    if collective.kind == CollectiveKind.BROADCAST:
        return f"broadcast: tower {collective.root}'s"
    if collective.kind == CollectiveKind.STACK and collective.divides:
        return "all-gather: what each tower has updated"
    if collective.kind in _WORDS:
        return _WORDS[collective.kind]
    how = {"sum": "sum of the towers' parts", "mean": "mean over the samples"}
    when = ", when an update is due" if exchange.when else ""
    return f"all-reduce: {how.get(collective.op, collective.op)}{when}"
