"""Find the first tensor of a step in which towers and one device differ: the net below the rules, for `verify`.

Both programs are run op by op, outside any graph, on copies of the variables; an exchange is some arithmetic. So
nothing of the towers takes part, and no state can be left changed. The partitioned trace is checked; `cut`, `segment`
and `laying_out`, which run it, are not: training beside one device checks these.

What the towers hold of a tensor is compared as soon as it is made. If it agrees, the towers go on with one device's
value: rounding does not add up, and what an optimizer makes of last bits does not count.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.ops import Collective, CollectiveKind, Purpose, Share
from ncclsync.ops.comparing import distance
from ncclsync.program.cut import SUM, place
from ncclsync.program.graph import StepGraph, op_name
from ncclsync.program.partition import Partition
from ncclsync.program.program import Results
from ncclsync.program.trace import Trace
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placements import Kind, Placement
from ncclsync.semantics.placing import PRINTS, is_unrepeatable
from ncclsync.semantics.roles import Role
from ncclsync.semantics.rules import names
from ncclsync.semantics.shards import Shards, components_of, rows_of, shard_batch
from ncclsync.tools.verify.batches import rows_at

# Relative to the largest magnitude of a tensor and of what it is computed from, by the least precise dtype of the step.
_TOLERANCES = {tf.bfloat16: 0.1, tf.float16: 0.05, tf.float32: 1e-3, tf.float64: 1e-6}
# Their results are as precise, relative to themselves, as what they multiply.
_MULTIPLYING = names("Mul MulNoNan RealDiv Div DivNoNan Square")
# Two towers show what more would: the program is the same for any number.
_TOWERS = 2

Values = list[Any] | None  # [towers] what each holds of one tensor; None: not followed, as parts that towers divide


class Unchecked(Exception):
    """Say why a step cannot be checked."""


def first_difference(trace: Trace, home_device: str, batch: Any, towers: int) -> str:
    """Run a step on some rows of a batch, as one device and as towers; variables hold what they do now.

    Args:
        trace: the step.
        home_device: where to compute.
        batch: nested structure of tensors.
        towers: how many there are.

    Returns:
        The first op, and its line, whose result differs on towers; "" if none does.

    Raises:
        Unchecked: the step has an op that must not run twice, or cannot be run op by op.
    """
    variables = trace.function.variables
    roles = [tf_compat.note_of(variable, "role") for variable in variables]
    try:
        alone = StepGraph(trace, home_device, same_seeds=True)
        functions = Functions(alone.functions, alone.tf_graph)
        for op in alone.ops:
            if op.name not in alone.placeholders and op.type not in PRINTS and is_unrepeatable(op, functions):
                raise Unchecked(f"{op.type}, at {user_line(op.traceback)}, must not run twice")
        # As towers do where nothing else was chosen for speed.
        graph, placing = place(trace, home_device, Results.COMBINED, same_seeds=True, exact=True)
        roots = [exchange.collective.root for exchange in graph.exchanges.values()]
        count = towers if any(root >= _TOWERS for root in roots) else min(towers, _TOWERS)
        few, most = 2 * count + 1, rows_of(batch) or 0
        state = {id(one): tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=one.dtype) for one in variables}
        with _precise(), tf.device(f"/{home_device}"):
            for rows in [few, most] if most >= count else [few]:
                with tf.device("/CPU:0"):
                    some = rows_at(batch, [row % most for row in range(rows)])
                try:
                    return _Check(alone, placing, some, count, state).run()
                except (tf.errors.InvalidArgumentError, ValueError) as error:
                    failed = error  # the step may declare its batch size
            raise Unchecked(f"it could not be run op by op on {rows} rows: {failed}") from failed
    finally:
        for variable, role in zip(variables, roles, strict=True):
            tf_compat.set_note(variable, "role", role)


@contextlib.contextmanager
def _precise() -> Iterator[None]:
    """Multiply float32 as such on GPUs that else round it first."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


class _Run:
    """Run a step's graph on so many towers, op by op; a graph without exchanges, as one device."""

    def __init__(self, graph: StepGraph, shards: Shards, state: Mapping[int, Any]):
        """Prepare.

        Args:
            graph: of the step.
            shards: of the batch, one for each tower.
            state: what variables hold, by id.
        """
        self.graph, self.shares, self.count = graph, shards.shares, len(shards.shares)
        parts = zip(shards.batches, shards.shares, strict=True)
        arguments = zip(*([*components_of(batch), *share] for batch, share in parts), strict=True)
        self.values: dict[str, Values] = dict(zip(graph.arguments, map(list, arguments), strict=True))
        self.values.update((name, [tensor] * self.count) for name, tensor in graph.captures)
        self._copies: dict[str, list[tf.Variable]] = {}
        for handle, variable in graph.variables:
            value, role = state[id(variable)], graph.role[handle]
            others = tf.zeros_like(value) if role in (Role.SUM, Role.PARTIAL) and self.count > 1 else value
            held = [value, *[others] * (self.count - 1)]
            copies = [tf.Variable(one, trainable=False, shape=tf.TensorShape(None)) for one in held]
            self._copies[handle] = copies
            self.values[handle] = None if role is Role.PARTITION else [copy.handle for copy in copies]
        self.writers: dict[str, tf.Operation] = {}  # the last one of each variable
        self.made: dict[tuple[Any, ...], Any] = {}  # by an op and its inputs' ids: these, which so live on, and results

    def step(self, op: tf.Operation) -> None:
        """Run an op, after all that it waits for."""
        if op.name in self.graph.placeholders:
            return
        given = [self.value(name) for name in self.graph.inputs[op.name]]
        mark = self.graph.marks.get(op.name)
        divides = mark is not None and mark.purpose == Purpose.COLLECTIVE and mark.collective.divides
        followed = not divides and None not in given
        self.writers.update(dict.fromkeys(self.graph.writes[op.name], op))
        if not followed:
            self.values.update(dict.fromkeys(self.graph.writes[op.name]))
        made = [self._made(op, [one[i] for one in given]) for i in range(self.count)] if followed else []
        for i, output in enumerate(op.outputs):
            self.put(output.name, [results[i] for results in made] or None)

    def put(self, name: str, values: Values) -> None:
        """Keep what the towers hold of a tensor."""
        self.values[name] = values

    def value(self, name: str) -> Values:
        """Return what the towers hold of a tensor, or their handles of a variable."""
        if name in self.graph.exchanges and name not in self.values:
            self.put(name, self._exchanged(name))
        elif name not in self.values:
            self.put(name, self._made(self.graph.tf_graph.get_tensor_by_name(name).op, []) * self.count)  # a constant
        return self.values[name]

    def held(self, handle: str) -> Values:
        """Return what a variable holds on the towers."""
        return None if self.values[handle] is None else [copy.read_value() for copy in self._copies[handle]]

    def _made(self, op: tf.Operation, given: list[Any]) -> list[Any]:
        """Return an op's results on a tower."""
        key = op.name, *map(id, given)
        if key not in self.made:
            if op.type == "Const":
                results = [tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)]
            elif op.type in PRINTS:
                results = given[: len(op.outputs)]
            else:
                results = tf_compat.run_op(op.type, given, tf_compat.attributes_of(op), len(op.outputs))
            self.made[key] = given, results
        return self.made[key][1]

    def is_due(self, name: str) -> bool:
        """Return whether an exchange has happened: if its condition is False, each tower's part stays."""
        exchange = self.graph.exchanges.get(name)
        when = None if exchange is None or exchange.when is None else self.value(exchange.when)
        return when is None or bool(when[0])

    def _exchanged(self, name: str) -> Values:
        exchange = self.graph.exchanges[name]
        values = self.value(exchange.source)
        if not self.is_due(name):
            return values
        if exchange.collective.divides or values is None:
            return None
        return [joined(values, exchange.collective, self.shares)] * self.count


class _Check(_Run):
    """Run the towers' step beside one device's, and compare what both make."""

    def __init__(self, alone: StepGraph, placing: Partition, batch: Any, count: int, state: Mapping[int, Any]) -> None:
        with tf.device("/CPU:0"):
            whole, parts = shard_batch(batch, 1), shard_batch(batch, count)
        super().__init__(placing.graph, parts, state)
        self._one = _Run(alone, whole, state)
        self._one.made = self.made  # one device has run an op on what the towers hold, where they hold the same
        self._start = {handle: self._one.held(handle) for handle, _ in alone.variables}
        self._placed = placing.placed
        floats = [t.dtype for op in alone.ops for t in op.outputs if t.dtype in _TOLERANCES]
        self._dtype = min(floats or [tf.float32], key=[*_TOLERANCES].index)
        self._found = ""
        self._scales: dict[str, float] = {}  # of parts: the largest magnitude of their addends
        self._counts_towers: set[str] = set()  # traced tensors with a row for each tower, and numbers of such rows
        # By the names of the towers' tensors: the traced ones that they stand for.
        self._traced: dict[str, list[str]] = {}
        for op in alone.ops:
            # A sparse gradient's slices may come in another order: what they write is compared. Bits are not rounded.
            is_sparse = op.name in alone.marks and alone.marks[op.name].purpose in (Purpose.SLICES, Purpose.SLICES_PART)
            if not is_sparse and op.type != "Bitcast":
                for output in op.outputs:
                    if output.name in placing.placed and output.dtype not in (tf.variant, tf.resource):
                        self._traced.setdefault(placing.name_of(output.name), []).append(output.name)

    def run(self) -> str:
        """Return the first op, and its line, whose result differs; "" if none does."""
        ops = iter(self._one.graph.ops)
        for op in self.graph.ops:  # one device's are in the same order, and these have some in between
            if op.name in self._one.graph.by_name:
                for one in ops:
                    self._one.step(one)
                    if one is op:
                        break
            try:
                self.step(op)
            except (tf.errors.InvalidArgumentError, ValueError):  # one device has run it
                self._found = self._found or _named(op)
            if self._found:
                return self._found
        for one in ops:
            self._one.step(one)
        for name in self._traced:
            if name in self.graph.exchanges and self.graph.exchanges[name].source in self.values:
                self.value(name)
        return self._found or self._first_variable()

    def put(self, name: str, values: Values) -> None:
        """Keep what the towers hold of a tensor, or what one device does if that agrees."""
        super().put(name, values)
        for traced in self._traced.get(name, ()):
            held, placed = self._one.values.get(traced), self._placed[traced][1]
            if held is None or values is None or not self.is_due(name):
                continue
            expected, op = held[0], self._one.graph.by_name[op_name(traced)]
            inputs = {one: (self._one.values.get(one) or [None])[0] for one in self._one.graph.inputs[op.name]}
            if placed.kind is Kind.REPLICATE and not any(_differ(values[0], one, 0.0) for one in values[1:]):
                counts = expected.dtype.is_integer and not self._counts_towers.isdisjoint(inputs)
                if counts or values[0].shape != expected.shape:
                    self._counts_towers.add(traced)
                    continue
            scale = self._scale_of(op, [expected, *values], inputs)
            if placed.kind is Kind.PARTIAL:
                self._scales[traced] = scale
            allowed = _TOLERANCES[self._dtype] * scale
            if any(_differ(expected, whole, allowed) for whole in _wholes(values, placed, self.shares)):
                self._found = self._found or _named(op)
            elif placed.kind is Kind.REPLICATE:
                super().put(name, held * self.count)

    def _scale_of(self, op: tf.Operation, made: Sequence[Any], inputs: Mapping[str, Any]) -> float:
        """Return the magnitude whose rounding a result has: of what was added up, perhaps to nearly 0."""
        own = max(map(_magnitude, made))
        sizes = {name: _magnitude(value) for name, value in inputs.items()}
        scales = {name: self._scales.get(name, size) for name, size in sizes.items()}
        if op.type in _MULTIPLYING and all(sizes[name] or not scales[name] for name in sizes):
            return own * max([1.0, *(scales[name] / size for name, size in sizes.items() if size)])
        there = [one for each in self.graph.inputs.get(op.name, ()) for one in self.values.get(each) or ()]
        return max([own, *map(_magnitude, there), *scales.values()])

    def _first_variable(self) -> str:
        """Return the first write, and its line, that changes a variable otherwise on towers; "" if none does."""
        tolerance = _TOLERANCES[self._dtype]
        rounding = tolerance / 500 if self._dtype in (tf.float32, tf.float64) else 0.1
        changes = []
        for handle, op in {**self.writers, **self._one.writers}.items():
            alone, begun, values = self._one.held(handle), self._start[handle], self.held(handle)
            if alone is None or begun is None or values is None:
                continue
            if self.graph.role[handle] in (Role.SUM, Role.PARTIAL):
                values = [joined(values, SUM, self.shares)]
            (expected,), (start,) = alone, begun
            if start.shape == expected.shape and start.dtype.is_floating:  # what was added is far smaller
                expected, values = expected - start, [one - start for one in values]
            changes.append((op, expected, values, _magnitude(start)))
        largest = max((_magnitude(expected) for _, expected, *_ in changes), default=0.0)
        for op, expected, values, start in changes:
            allowed = tolerance * max(_magnitude(expected), largest / 100) + rounding * start
            if any(_differ(expected, one, allowed) for one in values):
                return _named(op)
        return ""


def _named(op: tf.Operation) -> str:
    return f"{op.type} {op.name}, at {user_line(op.traceback)}"


def _wholes(values: list[Any], placed: Placement, shares: Sequence[Share]) -> list[Any]:
    """Return the batch's value, from each tower that has it; [] where it cannot be compared."""
    if placed.kind is Kind.REPLICATE:
        return values
    if placed.kind is Kind.PARTIAL and values[0].dtype != tf.bool:
        return [joined(values, Collective(CollectiveKind.ALL_REDUCE, placed.op), shares)]
    if placed.kind is Kind.SHARD:
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            columns = zip(*[tf.split(value, placed.blocks, placed.axis) for value in values], strict=True)
            return [tf.concat([one for column in columns for one in column], placed.axis)]
    return []


def joined(values: Sequence[Any], collective: Collective, shares: Sequence[Share]) -> Any:
    """Return what a collective gives."""
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
