"""Explain what towers do with a step: how variables are exchanged, where it is cut, how a batch is split.

Reads it off a `Program`, as rows and as tables; decides nothing.
"""

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence

import rich.box
import tensorflow as tf
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ncclsync.ops import CollectiveKind
from ncclsync.ops.xla_programs import share
from ncclsync.program.cost import Whole
from ncclsync.program.program import Exchange, Program, Segment
from ncclsync.semantics.roles import Role, role_of
from ncclsync.towers.state import TowerState

_WIDTH = 130  # columns, where it is printed as plain text

_RULES = {
    Role.SAME: "same on all towers, nothing is exchanged for it",
    Role.SUM: "sum: {one} 0 holds it, the others start from zero",
    Role.PARTIAL: "partial: each {one} accumulates its samples'",
    Role.PARTITION: "each {one} has its part",
    Role.SEED: "seed: each {one} has its own",
}


@dataclasses.dataclass(frozen=True)
class VariableRow:
    """Describe a variable that the step uses.

    Attributes:
        name: its Keras path where known.
        size_bytes: of one tower's copy.
        role: how the towers' copies relate: "same", "sum", "partial" or "seed".
        rule: how the towers' parts of its new value become one, in words.
        bucket: the segment after which these are exchanged, and which bucket it is there, both from 1. None
            where nothing is exchanged for this variable.
    """

    name: str
    size_bytes: int
    role: str
    rule: str
    bucket: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class CutRow:
    """Say what is exchanged after a segment on account of one line.

    Attributes:
        segment: from 1.
        what: what it is and how it is exchanged, in words.
        tensors: how many.
        size_bytes: of one tower's tensors, as far as their shapes are known.
        line: file, number and text of the user's line that asks for it, or calls what does.
    """

    segment: int
    what: str
    tensors: int
    size_bytes: int
    line: str


@dataclasses.dataclass(frozen=True)
class WholeRow:
    """Describe rows that are gathered on every tower, since an op needs those of the whole batch.

    Attributes:
        op: the first such op's type.
        ops: how many such ops that line has.
        size_bytes: of the rows that are gathered for them; of one row where no batch is known.
        line: file, number and text of the user's line in the step; if there is none, the layer.
    """

    op: str
    ops: int
    size_bytes: int
    line: str


@dataclasses.dataclass(frozen=True)
class ShardRow:
    """Name a shard of the batch, rows `begin` to `end` - 1, and the tower that computes it."""

    tower: int
    device: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Describe what towers do with a step. `print` shows it as tables, and so does a notebook.

    Attributes:
        segments: how many parts the step has; the towers meet after each but the last.
        variables: those that the step uses.
        cuts: why it is cut.
        shards: of the batch, one for each tower, or as many as `shards=` says; none if no batch is known.
        wholes: the rows that are gathered; none for most models.
        order: how a tower computes its shards, in words, or by what shares towers divide a batch; empty where each has
            one, of even size.
        compiled: how many programs XLA compiles, in words; empty where it compiles none.
    """

    segments: int
    variables: tuple[VariableRow, ...]
    cuts: tuple[CutRow, ...]
    shards: tuple[ShardRow, ...]
    wholes: tuple[WholeRow, ...] = ()
    order: str = ""
    compiled: str = ""

    def __rich__(self) -> Group:
        variables = _table("variable", "bytes", "role", "bucket", "how")
        for row in self.variables:
            bucket = "" if row.bucket is None else ".".join(map(str, row.bucket))
            variables.add_row(Text(row.name), str(row.size_bytes), row.role, bucket, row.rule)
        cuts = _table("after", "bytes", "tensors", "exchanged", "asked for at")
        for cut in self.cuts:
            numbers = map(str, (cut.segment, cut.size_bytes, cut.tensors))
            cuts.add_row(*numbers, cut.what, Text(cut.line))
        shards = _table("tower", "rows", "of the batch", "device")
        for one in self.shards:
            size = str(one.end - one.begin)
            shards.add_row(str(one.tower), size, f"{one.begin} to {one.end - 1}" if size != "0" else "", one.device)
        wholes = _table("gathered for", "bytes", "ops", "at")
        for whole in self.wholes:
            wholes.add_row(whole.op, str(whole.size_bytes), str(whole.ops), Text(whole.line))
        parts = f"{self.segments} segments" if self.segments > 1 else "1 segment"
        last = [table for table, filled in ((wholes, self.wholes), (shards, self.shards)) if filled]
        text = " ".join(filter(None, (f"The step has {parts}.", self.order, self.compiled)))
        return Group(variables, Text(text), cuts, *last)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__


def explain_program(program: Program, towers: TowerState, rows: int | None) -> Explanation:
    """Explain a program.

    Args:
        program: of a step on towers.
        towers: where it runs.
        rows: of a batch; None if not known.
    """
    calls: dict[str, tuple[int, int]] = {}
    exchanges: dict[str, Exchange] = {}
    for number, segment in enumerate(program.segments, start=1):
        for bucket, one in enumerate(segment.outgoing, start=1):
            calls.update((exchange.result, (number, bucket)) for exchange in one.exchanges)
            exchanges.update((exchange.result, exchange) for exchange in one.exchanges)
    updates = {name: result for name, result in program.updates if result in calls}
    subjects = {updates[name]: _subject(v) for name, v in program.variables if name in updates}
    for key, exchange in exchanges.items():
        if exchange.collective.divides:
            subjects[key] = "gradients" if exchange.collective.differs else "weights"
    names = towers.session.names_of([variable for _, variable in program.variables])
    variables, count = [], towers.layout.shards
    for name, (handle, variable) in zip(names, program.variables, strict=True):
        role = towers.replicas.role_of(variable)
        result = updates.get(handle)
        whose = "shard" if towers.layout.divided else "tower"
        rule = _RULES[role].format(one=whose) if result is None else _words(exchanges[result])
        if count == 1:
            rule, result = "one tower: nothing is exchanged", None
        size = int(variable.shape.num_elements() or 0) * variable.dtype.size
        variables.append(VariableRow(name, size, role.value, rule, calls[result] if result else None))
    cuts = tuple(_cuts(program.segments, subjects, count, rows))
    wholes = _wholes(program, rows) if count > 1 else ()
    shards = _shards(towers, rows)
    parts = len(program.segments), tuple(variables), cuts, shards, wholes
    return Explanation(*parts, _order(program, towers), _compiled(program, shards, towers))


def _order(program: Program, towers: TowerState) -> str:
    """Say what a tower with several shards keeps of each, while it computes the others; or how towers share a batch."""
    shares, count, most = towers.layout.shares, towers.layout.shards, max(map(len, towers.layout.places))
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
    what = f"It has {count} shards: a tower computes {most} of them, one after another"
    if not kept:
        return f"{what}, and keeps of each what it adds to the sums alone."
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
    shared = share(towers.layout.devices)
    if not shared:
        total = ": each device compiles what it runs"
    elif sizes:
        total = f": {count + by_rows * (len(sizes) - 1)} compilations on any number of devices"
    else:
        total = ", on any number of devices"
    # Parts of even size have one number of rows, or two that differ by one; by shares each tower may have its own.
    most = towers.layout.shards if towers.layout.shares or not shared else min(2, towers.layout.shards)
    return (
        f"XLA compiles it as {count} programs, {by_rows} of these anew for each number of rows that a tower "
        f"gets{of_these}{total}. A smaller last batch of a fit takes up to {by_rows * most} more."
    )


def _wholes(program: Program, rows: int | None) -> tuple[WholeRow, ...]:
    found: dict[str, list[Whole]] = {}
    for whole in program.work.wholes:
        if whole.kind == CollectiveKind.ALL_GATHER:
            found.setdefault(whole.place, []).append(whole)
    return tuple(
        WholeRow(group[0].op, len(group), int(sum(one.size.at(rows or 1) for one in group)), line)
        for line, group in found.items()
    )


def _subject(variable: tf.Variable) -> str:
    if variable.trainable:
        return "gradients"
    return "metrics" if role_of(variable) is Role.SUM else "variables"


def _cuts(segments: Sequence[Segment], subjects: Mapping[str, str], towers: int, rows: int | None) -> Iterable[CutRow]:
    for number, segment in enumerate(segments, start=1):
        found: dict[tuple[str, str], list[Exchange]] = {}
        for exchange in (e for bucket in segment.outgoing for e in bucket.exchanges):
            what = f"{subjects.get(exchange.result, 'other')}; {_words(exchange)}"
            found.setdefault((what, exchange.line), []).append(exchange)
        for (what, line), group in found.items():
            yield CutRow(number, what, len(group), sum(e.size_bytes(towers, rows) or 0 for e in group), line)


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
    if collective.kind == CollectiveKind.ALL_GATHER:
        return "all-gather: the rows of all towers"
    if collective.kind == CollectiveKind.STACK and collective.divides:
        return "all-gather: what each tower has updated"
    if collective.kind == CollectiveKind.STACK:
        return "all-gather: one row of each tower"
    if collective.kind == CollectiveKind.REDUCE_SCATTER:
        return "reduce-scatter: each tower its part of the sum"
    how = {"sum": "sum of the towers' parts", "mean": "mean over the samples"}
    when = ", when an update is due" if exchange.when else ""
    return f"all-reduce: {how.get(collective.op, collective.op)}{when}"


def _table(name: str, number: str, *others: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, overflow="fold")
    table.add_column(number, justify="right")
    for head in others:
        table.add_column(head, overflow="fold")
    return table
