"""Find the first tensor of a step in which towers and one device differ: the net below the rules, for `verify`.

The partitioned step is run op by op, outside any graph, on copies of the variables: alone on the whole batch, and by
several towers on their shards, where an exchange is plain arithmetic. So no real tower takes part, and no state is
changed. Only the partition is checked; `cut`, `segment` and `laying_out`, which run it, are checked by training beside
one device.

Each tensor is compared as soon as it is made. If it agrees, the towers go on with one device's value: rounding does not
add up, and an optimizer cannot amplify last bits.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import TensorName, op_name
from ncclsync.compat.source_lines import own_place, user_line
from ncclsync.ops import Collective, CollectiveKind, Purpose, Share
from ncclsync.ops.comparing import distance
from ncclsync.program.cut import place
from ncclsync.program.partition import Fault, PlacedStep
from ncclsync.program.program import Results
from ncclsync.program.trace import Site, Trace
from ncclsync.semantics.placements import Partial, Placement, Shard
from ncclsync.semantics.placing import PRINTS, is_unrepeatable
from ncclsync.semantics.rules import names
from ncclsync.sharding.roles import Role
from ncclsync.sharding.shards import Shards, components_of, rows_of, shard_batch
from ncclsync.tools.verify.batches import rows_at

# Relative to the largest magnitude of a tensor and of what it is computed from, by the least precise dtype of the step.
_TOLERANCES = {tf.bfloat16: 0.1, tf.float16: 0.05, tf.float32: 1e-3, tf.float64: 1e-6}
# Ops whose results are as precise, relative to themselves, as their inputs.
_MULTIPLYING = names("Mul MulNoNan RealDiv Div DivNoNan Square")
_ERRORS = (tf.errors.InvalidArgumentError, ValueError)
# Two towers are enough: the program is the same for any number.
_TOWERS = 2


class Unchecked(Exception):
    """Say why a step cannot be checked."""


def first_difference(trace: Trace, home_device: str, batch: Any, towers: int) -> str:
    """Run a step on some rows of a batch, as one device and as towers, from the variables' present values.

    All is computed on `home_device`.

    Returns:
        The first op, and its line, whose result differs on towers; "" if none does.

    Raises:
        Unchecked: the step has an op that must not run twice, or cannot be run op by op.
    """
    # As if no exactness was given up for speed.
    try:
        placing = place(trace, home_device, Results.COMBINED, same_seeds=True, exact=True)
    except Fault as fault:
        raise Unchecked(f"{fault}") from fault
    graph, traced = placing.graph, placing.graph.traced
    for op in traced.ops:
        if op.name not in traced.placeholders and op.type not in PRINTS and is_unrepeatable(op, graph.functions):
            raise Unchecked(f"{op.type}, at {user_line(op.traceback)}, must not run twice")
    roots = [exchange.collective.root for exchange in graph.exchanges.values()]
    count = towers if any(root >= _TOWERS for root in roots) else min(towers, _TOWERS)
    few, most = 2 * count + 1, rows_of(batch) or 0
    state = {
        name: tf.raw_ops.ReadVariableOp(resource=tf_compat.handle_of(v), dtype=v.dtype)
        for name, v in traced.variable_of.items()
    }
    with _precise(), tf.device(f"/{home_device}"):
        for rows in [few, most] if most >= count else [few]:
            with tf.device("/CPU:0"):
                some = rows_at(batch, [row % most for row in range(rows)])
                whole, parts = shard_batch(some, 1), shard_batch(some, count)
            try:
                return _Check(placing, whole, parts, state).run()
            except _ERRORS as error:
                failed = error  # the step may declare its batch size
    raise Unchecked(f"it could not be run op by op on {rows} rows: {failed}") from failed


@contextlib.contextmanager
def _precise() -> Iterator[None]:
    """Turn off the rounding of float32 to TF32 on GPUs."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


class _Check:
    """Run a partitioned step op by op, alone on the whole batch and on towers, and compare the results.

    A value is a list: one device's tensor, and each tower's; for a variable, the handles of copies. None: not followed,
    as the parts of an optimizer's state that is divided among towers.
    """

    def __init__(self, placing: PlacedStep, whole: Shards, parts: Shards, state: Mapping[TensorName, Any]) -> None:
        """Begin with the variables' values, by the names of their handles."""
        self._graph, traced = placing.graph, placing.graph.traced
        self._start = state
        self._shares = [*whole.shares, *parts.shares]
        sites = map(_site, [0, *range(len(parts.shares))])
        given = zip([*whole.batches, *parts.batches], self._shares, sites, strict=True)
        arguments = zip(*([*components_of(batch), *share, *site] for batch, share, site in given), strict=True)
        self._values: dict[TensorName, list[Any] | None] = dict(
            zip(traced.arguments, map(list, arguments), strict=True)
        )
        self._values.update((name, [tensor] * len(self._shares)) for name, tensor in traced.captures)
        self._copies: dict[TensorName, list[tf.Variable]] = {}
        for handle, value in state.items():
            others = tf.zeros_like(value) if traced.role[handle] in (Role.SUM, Role.PARTIAL) else value
            held = [value, value, *[others] * (len(parts.shares) - 1)]
            copies = [tf.Variable(one, trainable=False, shape=tf.TensorShape(None)) for one in held]
            self._copies[handle] = copies
            self._values[handle] = (
                None if traced.role[handle] is Role.PARTITION else [tf_compat.handle_of(copy) for copy in copies]
            )
        self._writers: dict[TensorName, tf.Operation] = {}  # the last op that writes each variable
        # By an op's name and its inputs' ids: the inputs, so that their ids stay theirs, and the results.
        self._made: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        floats = [t.dtype for op in self._graph.ops for t in op.outputs if t.dtype in _TOLERANCES]
        self._dtype = min(floats or [tf.float32], key=[*_TOLERANCES].index)
        self._scales: dict[TensorName, float] = {}  # of PARTIAL tensors: the largest magnitude of their addends
        self._counts_towers: set[TensorName] = set()  # tensors with a row for each tower, and numbers of such rows
        # By the names of the towers' tensors: the placement, the trace's op that makes it, and this op's inputs.
        self._traced: dict[TensorName, tuple[Placement, tf.Operation, list[TensorName]]] = {}
        for name, (tensor, placed) in placing.conversions.placed.items():
            op, mark = self._graph.traced.tensor(name).op, traced.trace.marks.get(op_name(name))
            # A sparse gradient's slices may come in another order: only what they write is compared. A Bitcast's bits
            # cannot be compared by a tolerance.
            is_sparse = mark is not None and mark.purpose in (Purpose.SLICES, Purpose.SLICES_PART)
            if not is_sparse and op.type != "Bitcast" and tensor.dtype not in (tf.variant, tf.resource):
                inputs = [placing.conversions.placed[one][0].name for one in traced.inputs[op.name]]
                self._traced.setdefault(tensor.name, (placed, op, inputs))

    def run(self) -> str:
        """Return the first op, and its line, whose result differs; "" if none does."""
        for op in self._graph.ops:
            if op.name not in self._graph.traced.placeholders and (found := self._step(op)):
                return found
        sent = [name for name, exchange in self._graph.exchanges.items() if exchange.source in self._values]
        return self._difference(sent) or self._first_variable()

    def _step(self, op: tf.Operation) -> str:
        """Run an op, after the exchanges among its inputs; return it, and its line, if one of these or it differs."""
        names, writes = self._graph.inputs[op.name], self._graph.writes[op.name]
        self._writers.update(dict.fromkeys(writes, op))
        try:
            given = [self._value(name) for name in names]
        except _ERRORS:  # of an exchange
            return _named(op)
        if found := self._difference(name for name in names if name in self._graph.exchanges):
            return found
        given = [self._values[name] for name in names]
        if None in given:
            self._values.update(dict.fromkeys([*(tensor.name for tensor in op.outputs), *writes]))
            return ""
        alone, *each = [[one[i] for one in given if one] for i in range(len(self._shares))]
        made = [self._results(op, alone)]
        try:
            made += [self._results(op, one) for one in each]
        except _ERRORS:
            return _named(op)
        self._values.update((tensor.name, [one[i] for one in made]) for i, tensor in enumerate(op.outputs))
        return self._difference(tensor.name for tensor in op.outputs)

    def _results(self, op: tf.Operation, given: list[Any]) -> list[Any]:
        key = op.name, *map(id, given)
        if key not in self._made:
            if op.type == "Const":
                results = [tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)]
            else:
                results = tf_compat.run_op(op, given)
            self._made[key] = given, results
        return self._made[key][1]

    def _value(self, name: TensorName) -> list[Any] | None:
        """Return a value; exchange it, or make a constant, if that has not happened yet."""
        if name not in self._values:
            exchange = self._graph.exchanges.get(name)
            if exchange is None:
                constant = self._graph.traced.tensor(name).op
                self._values[name] = self._results(constant, []) * len(self._shares)
            else:
                made = self._value(exchange.source)
                if made is not None and self._is_due(name):
                    made = None if exchange.collective.divides else self._joined(made, exchange.collective)
                self._values[name] = made
        return self._values[name]

    def _is_due(self, name: TensorName) -> bool:
        """Return whether an exchange happens: if its condition is False, each tower's part stays."""
        exchange = self._graph.exchanges.get(name)
        when = None if exchange is None or exchange.when is None else self._value(exchange.when)
        return when is None or bool(when[0])

    def _joined(self, values: list[Any], collective: Collective) -> list[Any]:
        """Return a collective's result alone, and on each tower."""
        alone, *each = values
        share, *shares = self._shares
        return [_join([alone], collective, [share]), *[_join(each, collective, shares)] * len(each)]

    def _difference(self, made: Iterable[TensorName]) -> str:
        """Return the op of the first tensor that differs, and its line; tensors that agree become one device's."""
        known = (name for name in made if name in self._traced)
        return next((_named(self._traced[name][1]) for name in known if self._differs(name)), "")

    def _differs(self, name: TensorName) -> bool:
        values, (placed, op, traced) = self._value(name), self._traced[name]
        if values is None or not self._is_due(name):
            return False
        expected, *each = values
        if placed.whole and not any(_differ(each[0], one, 0.0) for one in each[1:]):
            counts = expected.dtype.is_integer and not self._counts_towers.isdisjoint(traced)
            if counts or each[0].shape != expected.shape:
                self._counts_towers.add(name)
                return False
        scale = self._scale_of(op, values, traced)
        if isinstance(placed, Partial):
            self._scales[name] = scale
        allowed = _TOLERANCES[self._dtype] * scale
        wholes = self._wholes(each, placed)
        if any(_differ(expected, whole, allowed) for whole in wholes):
            return True
        if placed.whole:
            self._values[name] = [expected] * len(values)
        elif isinstance(placed, Shard) and wholes:
            self._values[name] = [expected, *_parts_like(each, expected, placed)]
        return False

    def _wholes(self, each: list[Any], placed: Placement) -> list[Any]:
        """Return the batch's value, by each tower that has it; [] if it cannot be compared."""
        if placed.whole:
            return each
        if isinstance(placed, Partial) and each[0].dtype != tf.bool:
            return [_join(each, Collective(CollectiveKind.ALL_REDUCE, placed.op), self._shares[1:])]
        if isinstance(placed, Shard):
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                columns = zip(*[tf.split(value, placed.blocks, placed.axis) for value in each], strict=True)
                return [tf.concat([one for column in columns for one in column], placed.axis)]
        return []

    def _scale_of(self, op: tf.Operation, made: Sequence[Any], traced: Sequence[TensorName]) -> float:
        """Return the magnitude that a result's rounding is relative to: its addends', which may cancel."""
        own = max(map(_magnitude, made))
        sizes = {name: _magnitude((self._values.get(name) or [None])[0]) for name in traced}
        scales = {name: self._scales.get(name, size) for name, size in sizes.items()}
        if op.type in _MULTIPLYING and all(sizes[name] or not scales[name] for name in sizes):
            return own * max([1.0, *(scales[name] / size for name, size in sizes.items() if size)])
        there = [one for name in self._graph.inputs.get(op.name, ()) for one in self._values.get(name) or ()]
        return max([own, *map(_magnitude, there), *scales.values()])

    def _first_variable(self) -> str:
        """Return the first write, and its line, that changes a variable differently on towers; "" if none does."""
        tolerance = _TOLERANCES[self._dtype]
        rounding = tolerance / 500 if self._dtype in (tf.float32, tf.float64) else 0.1
        changes = []
        for handle, op in self._writers.items():
            if self._values[handle] is None:
                continue
            start, held = self._start[handle], [copy.read_value() for copy in self._copies[handle]]
            if self._graph.traced.role[handle] in (Role.SUM, Role.PARTIAL):
                held = self._joined(held, Collective(CollectiveKind.ALL_REDUCE, "sum"))
            if start.shape == held[0].shape and start.dtype.is_floating:  # compare the changes, which are far smaller
                held = [one - start for one in held]
            changes.append((op, held, _magnitude(start)))
        largest = max((_magnitude(expected) for _, (expected, *_), _ in changes), default=0.0)
        for op, (expected, *each), start in changes:
            allowed = tolerance * max(_magnitude(expected), largest / 100) + rounding * start
            if any(_differ(expected, one, allowed) for one in each):
                return _named(op)
        return ""


def _parts_like(each: Sequence[Any], whole: Any, placed: Shard) -> list[Any]:
    """Return the rows of one device's tensor that each tower has: the inverse of `_Check._wholes`."""
    sizes = [value.shape[placed.axis] // placed.blocks for value in each]
    blocks = [tf.split(block, sizes, placed.axis) for block in tf.split(whole, placed.blocks, placed.axis)]
    return [tf.concat(rows, placed.axis) for rows in zip(*blocks, strict=True)]


def _site(number: int) -> Site:
    return Site(tf.constant(1), tf.constant(number == 0), tf.constant(number))


def _named(op: tf.Operation) -> str:
    return f"{op.type} {op.name}, at {own_place(op)[0]}"


def _join(values: Sequence[Any], collective: Collective, shares: Sequence[Share]) -> Any:
    if collective.concatenates:
        return tf.concat(values, 0)
    if collective.kind == CollectiveKind.BROADCAST:
        return values[collective.root]
    if collective.op == "mean":
        values = [one * tf.cast(share.fraction, one.dtype) for one, share in zip(values, shares, strict=True)]
    reduce = {"prod": tf.reduce_prod, "max": tf.reduce_max, "min": tf.reduce_min}.get(collective.op, tf.reduce_sum)
    return reduce(tf.stack(values), 0)


def _magnitude(value: Any) -> float:
    if not isinstance(value, tf.Tensor) or not (value.dtype.is_floating or value.dtype.is_complex):
        return 0.0
    numbers = np.abs(tf.cast(value, tf.complex128 if value.dtype.is_complex else tf.float64))
    return float(np.max(numbers[np.isfinite(numbers)], initial=0.0))


def _differ(expected: Any, actual: Any, allowed: float) -> bool:
    rounded = expected.dtype.is_floating or expected.dtype.is_complex
    return expected.shape != actual.shape or float(distance(expected, actual)) > (allowed if rounded else 0.0)
