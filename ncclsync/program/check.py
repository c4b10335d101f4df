"""Find the first tensor of a step in which towers and one device differ: the net below the rules, for `verify`.

Both programs are run op by op, outside any graph: variables are values in a dictionary, and an exchange is some
arithmetic. So nothing of the towers takes part, and no state can be left changed. The partitioned trace is checked;
`cut`, `segment` and `laying_out`, which run it, are not: training beside one device checks these.

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
from ncclsync.program.graph import StepGraph, op_name
from ncclsync.program.partition import Partition, Unshared
from ncclsync.program.program import Results
from ncclsync.program.trace import Site, Trace
from ncclsync.semantics.placements import Kind, Placement
from ncclsync.semantics.placing import PRINTS, is_unrepeatable
from ncclsync.semantics.roles import Role, declare_role
from ncclsync.semantics.rules import names
from ncclsync.semantics.shards import shard_sizes

# Relative to the largest magnitude of a tensor and of what it is computed from, by the least precise dtype of the step.
_TOLERANCES = {tf.bfloat16: 0.1, tf.float16: 0.05, tf.float32: 1e-3, tf.float64: 1e-6}
# Their results are as precise, relative to themselves, as what they multiply.
_MULTIPLYING = names("Mul MulNoNan RealDiv Div DivNoNan Square")
# Two towers show what more would: the program is the same for any number.
_TOWERS = 2

Values = list[Any]  # [towers] what each holds of one tensor; None: not followed


class Unchecked(Exception):
    """Say why a step cannot be checked."""


def first_difference(trace: Trace, home_device: str, results: Results, batch: Any, towers: int) -> str:
    """Run a step on some rows of a batch, as one device and as towers; variables hold what they do now.

    Args:
        trace: the step.
        home_device: where to compute.
        results: what becomes of the towers' results.
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
        alone, placing = _place(trace, home_device, results)
        roots = [exchange.collective.root for exchange in placing.graph.exchanges.values()]
        count = towers if any(root >= _TOWERS for root in roots) else min(towers, _TOWERS)
        leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None and leaf.shape.rank]
        state = {id(one): tf.raw_ops.ReadVariableOp(resource=one.handle, dtype=one.dtype) for one in variables}
        *some, most = sorted({2 * count + 1, leaves[0].shape[0]})
        with _precise(), tf.device(f"/{home_device}"):
            for rows in (*some, most):
                try:
                    return _Check(alone, placing, _rows_between(batch, 0, rows), shard_sizes(rows, count), state).run()
                except (tf.errors.InvalidArgumentError, ValueError) as error:
                    if rows == most:  # else the step may declare its batch size
                        raise Unchecked(f"it could not be run op by op on {rows} rows: {error}") from error
    finally:
        for variable, role in zip(variables, roles, strict=True):
            tf_compat.set_note(variable, "role", role)
    raise AssertionError


def _place(trace: Trace, home_device: str, results: Results) -> tuple[StepGraph, Partition]:
    """Return the step as one device runs it, and as towers do where nothing else was chosen for speed."""
    while True:
        alone, graph = (StepGraph(trace, home_device, same_seeds=True) for _ in range(2))
        for op in alone.ops:
            if op.name not in alone.placeholders and op.type not in PRINTS and is_unrepeatable(op, alone.calls):
                raise Unchecked(f"{op.type}, at {user_line(op.traceback)}, must not run twice")
        try:
            return alone, Partition(graph, results, exact=True).run()
        except Unshared as found:
            for handle in found.handles:
                declare_role(graph.variable_of[handle], Role.SAME)


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

    def __init__(self, graph: StepGraph, batches: Sequence[Any], sizes: Sequence[int], state: Mapping[int, Any]):
        """Prepare.

        Args:
            graph: of the step.
            batches: [towers] their rows.
            sizes: [towers] how many these are.
            state: what variables hold, by id.
        """
        self.graph = graph
        self.shares = _shares(sizes)
        self.count = len(sizes)
        self.values: dict[str, Values] = {name: [tensor] * self.count for name, tensor in graph.captures}
        arguments = [
            [*(leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None), *share, *site]
            for batch, share, site in zip(batches, self.shares, map(_site, range(len(sizes))), strict=True)
        ]
        self.values.update(zip(graph.arguments, map(list, zip(*arguments, strict=True)), strict=True))
        self.state: dict[str, Values] = {}
        for handle, variable in graph.variables:
            value, role = state[id(variable)], graph.role[handle]
            other = tf.zeros_like(value) if role in (Role.SUM, Role.PARTIAL) and self.count > 1 else value
            # A tower's part of what is divided among them is not followed.
            self.state[handle] = [
                None if role is Role.PARTITION else one for one in [value, *[other] * (self.count - 1)]
            ]
        self.writers: dict[str, tf.Operation] = {}  # the last one of each variable

    def run(self, op: tf.Operation, known: "_Run | None" = None) -> None:
        """Run an op, after all that it waits for; or take the results of `known`, which has just run it on the same."""
        if op.name in self.graph.placeholders:
            return
        inputs = [self.value(name) for name in self.graph.inputs[op.name]]
        handles = [name for name in self.graph.inputs[op.name] if name in self.state]
        given = [[*row] for row in zip(*inputs, *(self.state[one] for one in handles), strict=True)]
        given = given or [[]] * self.count
        made: list[tuple[list[Any], list[Any]]] = []
        self.last = op.name, given[0], made
        for row in given:
            if known is not None and known.last[0] == op.name and _are(row, known.last[1]):
                made.append(known.last[2][0])
            elif made and _are(row, given[0]):
                made.append(made[0])
            else:
                made.append(self._made(op, row[: len(inputs)], dict(zip(handles, row[len(inputs) :], strict=True))))
        for i, handle in enumerate(handles):
            if handle in self.graph.writes[op.name]:
                self.writers[handle] = op
            self.state[handle] = [after[i] for _, after in made]
        for i, output in enumerate(op.outputs):
            self.put(output.name, [results[i] for results, _ in made])

    def put(self, name: str, values: Values) -> None:
        """Keep what the towers hold of a tensor."""
        self.values[name] = values

    def value(self, name: str) -> Values:
        """Return what the towers hold of a tensor; a variable's handle is its name."""
        if name in self.state:
            return [name] * self.count
        if name not in self.values:
            if name in self.graph.exchanges:
                self.put(name, self._exchanged(name))
            else:
                op = self.graph.tf_graph.get_tensor_by_name(name).op
                self.put(name, self._made(op, [], {})[0][:1] * self.count)  # a constant
        return self.values[name]

    def _made(self, op: tf.Operation, given: list[Any], state: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return an op's results on a tower, and what it leaves in the variables that it is given."""
        mark = self.graph.marks.get(op.name)
        divides = mark is not None and mark.purpose == Purpose.COLLECTIVE and mark.collective.divides
        if divides or any(one is None for one in (*given, *state.values())):
            state.update(dict.fromkeys(self.graph.writes[op.name]))
            return [None] * len(op.outputs), list(state.values())
        if op.type == "ReadVariableOp":
            return [state[given[0]]], list(state.values())
        if op.type == "Const":
            return [tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)], []
        if op.type in ("NoOp", *PRINTS):
            return list(given[: len(op.outputs)]), []
        variables = {
            name: tf.Variable(value, trainable=False, shape=tf.TensorShape(None)) for name, value in state.items()
        }
        inputs = [variables[one].handle if isinstance(one, str) else one for one in given]
        results = tf_compat.run_op(op, inputs)
        written = self.graph.writes[op.name] if state else ()
        return results, [variables[name].read_value() if name in written else value for name, value in state.items()]

    def is_due(self, name: str) -> bool:
        """Return whether an exchange has happened: if its condition is False, each tower's part stays."""
        exchange = self.graph.exchanges.get(name)
        return exchange is None or exchange.when is None or bool(self.value(exchange.when)[0])

    def _exchanged(self, name: str) -> Values:
        exchange = self.graph.exchanges[name]
        values = self.value(exchange.source)
        if not self.is_due(name):
            return values
        if exchange.collective.divides or any(one is None for one in values):
            return [None] * self.count  # each tower's part of what is divided among them is not followed
        return [joined(values, exchange.collective, self.shares)] * self.count


class _Check(_Run):
    """Run the towers' step beside one device's, and compare what both make."""

    def __init__(
        self, alone: StepGraph, placing: Partition, batch: Any, sizes: Sequence[int], state: Mapping[int, Any]
    ) -> None:
        ends = np.cumsum(sizes)
        batches = [_rows_between(batch, int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]
        super().__init__(placing.graph, batches, sizes, state)
        self._one = _Run(alone, [batch], [sum(sizes)], state)
        self._start = dict(self._one.state)
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
                        self._traced.setdefault(placing.placed[output.name][0].name, []).append(output.name)

    def run(self) -> str:  # type: ignore[override]
        """Return the first op, and its line, whose result differs; "" if none does."""
        ops = iter(self._one.graph.ops)
        for op in self.graph.ops:  # one device's are in the same order, and these have some in between
            if op.name in self._one.graph.by_name:
                for one in ops:
                    self._one.run(one)
                    if one is op:
                        break
            try:
                super().run(op, self._one)
            except (tf.errors.InvalidArgumentError, ValueError):  # one device has run it
                self._found = self._found or _named(op)
            if self._found:
                return self._found
        for one in ops:
            self._one.run(one)
        for name in self._traced:
            if name in self.graph.exchanges and self.graph.exchanges[name].source in self.values:
                self.value(name)
        return self._found or self._first_variable()

    def put(self, name: str, values: Values) -> None:
        """Keep what the towers hold of a tensor, or what one device does if that agrees."""
        super().put(name, values)
        for traced in self._traced.get(name, ()):
            expected, placed = self._one.values.get(traced, [None])[0], self._placed[traced][1]
            if expected is None or any(one is None for one in values) or not self.is_due(name):
                continue
            op = self._one.graph.by_name[op_name(traced)]
            inputs = [(one, self._one.values.get(one, [None])[0]) for one in self._one.graph.inputs[op.name]]
            if placed.kind is Kind.REPLICATE and not any(_differ(values[0], one, 0.0) for one in values[1:]):
                counts = expected.dtype.is_integer and any(one in self._counts_towers for one, _ in inputs)
                if counts or values[0].shape != expected.shape:
                    self._counts_towers.add(traced)
                    continue
            scale = self._scale_of(op, [expected, *values], dict(inputs))
            if placed.kind is Kind.PARTIAL:
                self._scales[traced] = scale
            allowed = _TOLERANCES[self._dtype] * scale
            if any(_differ(expected, whole, allowed) for whole in _wholes(values, placed, self.shares)):
                self._found = self._found or _named(op)
            elif placed.kind is Kind.REPLICATE:
                super().put(name, [expected] * self.count)

    def _scale_of(self, op: tf.Operation, made: Values, inputs: Mapping[str, Any]) -> float:
        """Return the magnitude whose rounding a result has: of what was added up, perhaps to nearly 0."""
        own = max(map(_magnitude, made))
        sizes = {name: _magnitude(value) for name, value in inputs.items()}
        scales = {name: self._scales.get(name, size) for name, size in sizes.items()}
        if op.type in _MULTIPLYING and all(sizes[name] or not scales[name] for name in sizes):
            return own * max([1.0, *(scales[name] / size for name, size in sizes.items() if size)])
        there = [one for each in self.graph.inputs.get(op.name, ()) for one in self.values.get(each, ())]
        return max([own, *map(_magnitude, there), *scales.values()])

    def _first_variable(self) -> str:
        """Return the first write, and its line, that changes a variable otherwise on towers; "" if none does."""
        tolerance = _TOLERANCES[self._dtype]
        rounding = tolerance / 500 if self._dtype in (tf.float32, tf.float64) else 0.1
        changes = []
        for handle, op in {**self.writers, **self._one.writers}.items():
            expected, start, values = self._one.state[handle][0], self._start[handle][0], self.state[handle]
            if any(one is None for one in (expected, start, *values)):
                continue
            if self.graph.role[handle] in (Role.SUM, Role.PARTIAL):
                values = [joined(values, Collective(CollectiveKind.ALL_REDUCE, "sum"), self.shares)]
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


def _wholes(values: Values, placed: Placement, shares: Sequence[Share]) -> list[Any]:
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
        return tf.add_n([one * tf.cast(share.fraction, one.dtype) for one, share in zip(values, shares, strict=True)])
    result, others = values[0], values[1:]
    binary = {"sum": tf.add, "prod": tf.multiply, "max": tf.maximum, "min": tf.minimum}[collective.op]
    for other in others:
        result = binary(result, other)
    return result


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _shares(sizes: Sequence[int]) -> list[Share]:
    total = int(sum(sizes))
    return [
        Share(
            tf.constant(size / total, tf.float64),
            tf.constant(number),
            tf.constant(size),
            tf.constant(int(sum(sizes[:number]))),
            tf.constant(total),
        )
        for number, size in enumerate(map(int, sizes))
    ]


def _site(number: int) -> Site:
    return Site(tf.constant(1), tf.constant(number == 0), tf.constant(number))


def _rows_between(batch: Any, begin: int, end: int) -> Any:
    """Return some rows of a batch, which begins again where it has fewer."""

    def taken(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            repeated = tf.sparse.concat(0, [leaf] * -(-end // leaf.shape[0]))
            starts = [begin, *[0] * (leaf.shape.rank - 1)]
            return tf.sparse.slice(repeated, starts, [end - begin, *leaf.shape[1:]])
        there = int(leaf.nrows()) if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0]
        return tf.gather(leaf, np.arange(begin, end) % there)

    with tf.device("/CPU:0"):
        return tf.nest.map_structure(taken, batch)


def _magnitude(value: Any) -> float:
    if not isinstance(value, tf.Tensor) or not (value.dtype.is_floating or value.dtype.is_complex):
        return 0.0
    numbers = np.abs(tf.cast(value, tf.complex128 if value.dtype.is_complex else tf.float64))
    return float(np.max(numbers[np.isfinite(numbers)], initial=0.0))


def _differ(expected: Any, actual: Any, allowed: float) -> bool:
    rounded = expected.dtype.is_floating or expected.dtype.is_complex
    return expected.shape != actual.shape or float(distance(expected, actual)) > (allowed if rounded else 0.0)
