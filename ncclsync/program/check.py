"""Check a step on a few rows: run one device's program and the towers', and compare them.

This is a net below the rules. Both are run op by op, outside any graph, by `_Run`: variables are values in a
dictionary, and an exchange is some arithmetic. So nothing of the towers' takes part, and no state can be left
changed. The check covers what `Partition` made of the trace; `cut`, `segment` and `laying_out`, which run it, are
for `verify`.

Numbers are computed in float64, whatever the step's dtypes: rounding is then far below a wrong factor or a
missing term. Where gradients agree, the towers' are replaced by one device's before an optimizer gets them:
what it does with their last bits does not count. Ops with the same inputs, to the object, are run once.
"""

import collections
import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.ops import Collective, Share
from ncclsync.program.graph import StepGraph
from ncclsync.program.partition import Partition, Unshared, partition
from ncclsync.program.program import Results
from ncclsync.program.trace import Mark, Trace
from ncclsync.semantics.functions import Functions
from ncclsync.semantics.placements import Kind, Placement
from ncclsync.semantics.placing import PRINTS, is_unrepeatable
from ncclsync.semantics.roles import Role
from ncclsync.semantics.shards import shard_sizes

logger = logging.getLogger("ncclsync")

# Relative to the largest magnitude of the tensor, and to that of all gradients: a gradient that is zero but
# for rounding is as large as the rounding of others. By the dtype that numbers were computed in.
_TOLERANCES = {"float64": (1e-6, 1e-10), "float32": (1e-3, 1e-5), "bfloat16": (0.1, 1e-2), "float16": (0.05, 1e-3)}
_FLOATS = (tf.bfloat16, tf.float16, tf.float32, tf.float64)  # from the least precise
# Two towers show what more would: the program is the same for any number.
_TOWERS = 2
# A step that declares its batch size is run on that.
_MOST_ROWS = 256
# Up to so many elements a check runs in float64, in which the kernels of convolutions are slow.
_MOST_ELEMENTS = 2e6

Values = list[Any]  # [towers] what each holds of one tensor; None: not known


class Unchecked(Exception):
    """Say why a step cannot be checked."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Name the results in which towers and one device differ.

    Attributes:
        differences: (name, largest difference relative to the largest magnitude) of variables and results.
        line: the user's, from which the first tensor comes that differs; with its op.
        rows, towers: how many were run.
    """

    differences: tuple[tuple[str, float], ...]
    line: str
    rows: int
    towers: int

    def __str__(self) -> str:
        named = ", ".join(f"{name} ({relative:.1g})" for name, relative in self.differences[:6])
        more = f" and {len(self.differences) - 6} more" if len(self.differences) > 6 else ""
        return (
            f"A step on towers was checked on {self.rows} rows, and does not give what one device gives. "
            "Expected equal numbers. Received differences, relative to the largest magnitude, of "
            f"{named}{more}. The first tensor that differs comes from {self.line}. "
            "Please report this line with what Towers.explain() prints; ncclsync.verify shows how far "
            "training differs"
        )


class StepCheck:
    """Hold a traced step that is to be checked, with its variables' values before it first runs."""

    def __init__(
        self, trace: Trace, home_device: str, results: Results, variables: Sequence[tf.Variable], outputs: int
    ) -> None:
        """Keep what is needed.

        Args:
            trace: the step.
            home_device: where to compute.
            results: what becomes of the towers' results.
            variables: of the step.
            outputs: how many of the results count, from the first.
        """
        self._trace = trace
        self._home_device = home_device
        self._results = results
        self._outputs = outputs
        # By the handle, past whoever tracks reads; in the host's memory, shared there until a step writes.
        with tf.device("/CPU:0"):
            self._state = {
                id(variable): tf.identity(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))
                for variable in variables
            }

    def run(self, batch: Any, names_of: Callable[[Sequence[tf.Variable]], list[str]], towers: int) -> Found | None:
        """Run the step on some rows of `batch`; return what differs, None if nothing does.

        Args:
            batch: nested structure of tensors.
            names_of: names variables for messages.
            towers: how many there are.

        Raises:
            Unchecked: the step depends on what is not in the trace, or cannot be run so.
        """
        variables = self._trace.function.variables
        shared = {id(variable) for variable in variables if tf_compat.has_flag(variable, "shared")}
        try:
            return self._run(batch, names_of, towers)
        finally:
            for variable in self._trace.function.variables:
                if id(variable) not in shared:
                    tf_compat.set_flag(variable, "shared", False)

    def _run(self, batch: Any, names_of: Callable, towers: int) -> Found | None:
        alone, placing = self._place()
        count = (
            towers
            if any(e.collective.root >= _TOWERS for e in placing.graph.exchanges.values())
            else min(towers, _TOWERS)
        )
        given = tf.nest.flatten(batch, expand_composites=True)
        fixed = [t.shape[0] for t in self._trace.function.inputs[: len(alone.arguments)] if t.shape.rank and t.shape[0]]
        all_rows = next(leaf.shape[0] for leaf in given if leaf is not None and leaf.shape.rank)
        sizes = [all_rows] if fixed and not _is_composite(batch) else [2 * count + 1, all_rows]
        with _precise(), tf.device(f"/{self._home_device}"):
            for number, rows in enumerate(sizes):
                try:
                    return self._compare(alone, placing, first_rows(batch, rows), rows, count, names_of)
                except (tf.errors.InvalidArgumentError, ValueError) as error:
                    # A step may declare its batch size.
                    if number + 1 == len(sizes) or not rows < all_rows <= _MOST_ROWS:
                        raise Unchecked(f"it could not be run op by op on {rows} rows: {error}") from error
        raise AssertionError

    def _place(self) -> tuple[StepGraph, Partition]:
        """Partition the step so that it gives one device's numbers, whatever was chosen for speed.

        Returns:
            The step as one device runs it, and as towers do.
        """
        while True:
            graph = StepGraph(self._trace, self._home_device, same_seeds=True)
            alone = copy.copy(graph)
            alone.ops, alone.by_name, alone.writes = list(graph.ops), dict(graph.by_name), dict(graph.writes)
            alone.inputs, alone.exchanges = graph.traced_inputs, {}
            _refuse_hidden(alone)
            try:
                return alone, partition(graph, self._trace.share, self._results, exact=True)
            except Unshared as found:
                for handle in found.handles:
                    tf_compat.set_flag(graph.variable_of[handle], "shared")

    def _compare(
        self, alone: StepGraph, placing: Partition, batch: Any, rows: int, count: int, names_of: Callable
    ) -> Found | None:
        dtypes = [tf.float32, tf.float64] if _is_costly(alone, rows) else [tf.float64]
        sizes = shard_sizes(rows, count)
        for dtype in dtypes:
            both = _Both(alone, placing, batch, sizes, dtype, self._state)
            differences = both.differences(names_of, self._outputs if self._results is not Results.EACH else 0)
            if not differences:
                return None
        line = _Both(alone, placing, batch, sizes, dtypes[-1], self._state, keep=True).first_difference()
        return Found(tuple(differences), line, rows, count)


def _is_composite(batch: Any) -> bool:
    return any(not isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch) if leaf is not None)


def _is_costly(graph: StepGraph, rows: int) -> bool:
    """Return whether a step takes long in float64, by its convolutions, or much memory."""
    elements = sum(int(np.prod(variable.shape.as_list())) for _, variable in graph.variables) // 100
    for op in graph.ops:
        if op.type.startswith("Conv") and "Backprop" not in op.type and op.outputs[0].shape.rank:
            elements += rows * int(np.prod([length or 1 for length in op.outputs[0].shape.as_list()]))
    return elements > _MOST_ELEMENTS


@contextlib.contextmanager
def _precise() -> Iterator[None]:
    """Multiply float32 as such on GPUs that else round it first."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _refuse_hidden(graph: StepGraph) -> None:
    functions = Functions(graph.functions, graph.tf_graph)
    for op in graph.ops:
        if op.name in graph.placeholders or op.type in PRINTS:
            continue
        if is_unrepeatable(op, functions):
            raise Unchecked(f"{op.type}, at {user_line(op.traceback)}, cannot be run twice without a trace")


def first_rows(batch: Any, rows: int) -> Any:
    """Return the first rows of a batch, which begins again where it has fewer."""

    def taken(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            there = int(leaf.dense_shape[0])
            repeated = tf.sparse.concat(0, [leaf] * -(-rows // there))
            return tf.sparse.slice(repeated, tf.zeros_like(leaf.dense_shape), [rows, *leaf.dense_shape[1:]])
        there = int(leaf.nrows()) if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0]
        return tf.gather(leaf, np.arange(rows) % there)

    with tf.device("/CPU:0"):
        return tf.nest.map_structure(taken, batch)


class _Machine:
    """Run ops one by one, floats in a given dtype where their kernels have it."""

    def __init__(self, dtype: tf.DType) -> None:
        self.dtype = dtype
        self.rounded: tf.DType = dtype  # the least precise that was computed in
        self._attributes: dict[str, tuple[dict[str, Any], bool]] = {}
        self._narrow = {"Bitcast"}  # types of ops that have no kernel for `dtype`
        self._constants: dict[str, Any] = {}

    def wide(self, dtype: tf.DType) -> tf.DType:
        """Return the dtype that stands for one of the trace."""
        if dtype in _FLOATS:
            return max(dtype, self.dtype, key=_FLOATS.index)
        return tf.complex128 if dtype == tf.complex64 and self.dtype == tf.float64 else dtype

    def cast(self, value: Any, dtype: tf.DType) -> Any:
        """Cast a number; anything else stays."""
        if value.dtype == dtype or value.dtype in (tf.resource, tf.variant):
            return value
        return tf.cast(value, dtype)

    def run(self, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of an op that has no resources among its inputs, or only such as are given."""
        if op.type == "Const":
            if op.name not in self._constants:
                value = tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)
                self._constants[op.name] = self.cast(value, self.wide(value.dtype))
            return [self._constants[op.name]]
        if op.type in ("Identity", "IdentityN", "PlaceholderWithDefault", "StopGradient", "PreventGradient", "Print"):
            return list(inputs[: len(op.outputs)])
        if op.type in ("NoOp", "PrintV2"):
            return [None] * len(op.outputs)
        if op.type == "Cast":
            return [tf.cast(inputs[0], self.wide(op.outputs[0].dtype))]
        attributes, widens = self._attributes_of(op)
        if widens and op.type not in self._narrow:
            widened = {name: self._widened(value) for name, value in attributes.items()}
            try:
                return self._settled(op, tf_compat.run_op(op.type, inputs, widened, len(op.outputs)))
            except (tf.errors.OpError, TypeError, ValueError):  # no kernel, or not for these dtypes
                self._narrow.add(op.type)
        narrow = [self.cast(one, tensor.dtype) for one, tensor in zip(inputs, op.inputs, strict=True)]
        if any(tensor.dtype in (*_FLOATS, tf.variant) for tensor in op.outputs):
            for tensor in (*op.inputs, *op.outputs):
                if tensor.dtype in _FLOATS:
                    self.rounded = min(self.rounded, tensor.dtype, key=_FLOATS.index)
        return self._settled(op, tf_compat.run_op(op.type, narrow, attributes, len(op.outputs)))

    def _settled(self, op: tf.Operation, results: list[Any]) -> list[Any]:
        for i, (tensor, result) in enumerate(zip(op.outputs, results, strict=True)):
            results[i] = self.cast(result, self.wide(tensor.dtype))
            if result.dtype in _FLOATS and result.dtype != results[i].dtype:
                self.rounded = min(self.rounded, result.dtype, key=_FLOATS.index)
        return results

    def _widened(self, attribute: Any) -> Any:
        if isinstance(attribute, list):
            return [self._widened(one) for one in attribute]
        return self.wide(attribute) if isinstance(attribute, tf.DType) else attribute

    def _attributes_of(self, op: tf.Operation) -> tuple[dict[str, Any], bool]:
        """Return the attributes that an op is run with, and whether it can be widened."""
        if op.name not in self._attributes:
            attributes = tf_compat.attributes_of(op)
            called = any(value.func.name or value.list.func for value in op.node_def.attr.values())
            variant = any(tensor.dtype == tf.variant for tensor in (*op.inputs, *op.outputs))
            self._attributes[op.name] = attributes, not called and not variant
        return self._attributes[op.name]


class _Run:
    """Run a step's graph on so many towers, op by op; a graph without exchanges, as one device."""

    def __init__(
        self,
        graph: StepGraph,
        machine: _Machine,
        shares: Sequence[Share],
        batches: Sequence[Any],
        state: Mapping[int, Any],
        needed: set[str] | None,
        before: "_Run | None" = None,
    ) -> None:
        """Prepare.

        Args:
            graph: of the step.
            machine: what computes.
            shares: [towers].
            batches: [towers] their rows.
            state: what variables hold, by id, in the machine's dtypes.
            needed: names of tensors to keep; None: all.
            before: a run of the same ops, whose results are taken where it has got the very same inputs.
        """
        self._before = before
        self.last: dict[str, tuple[list[Any], list[Any], list[Any], list[Any]]] = {}  # see `_run_op`
        self.graph = graph
        self._machine = machine
        self._shares = shares
        self._count = len(shares)
        self.values: dict[str, Values] = {}
        self._needed = needed
        self.state: dict[str, Values] = {}
        for handle, variable in graph.variables:
            value = state[id(variable)]
            parts = graph.role[handle] in (Role.SUM, Role.PARTIAL) and self._count > 1
            others = [tf.zeros_like(value)] * (self._count - 1) if parts else [value] * (self._count - 1)
            # A tower's part of what is divided among them is not followed.
            divided = graph.role[handle] is Role.PARTITION
            self.state[handle] = [None] * self._count if divided else [value, *others]
        self.written: set[str] = set()
        self.values.update((name, [tensor] * self._count) for name, tensor in graph.captures)
        arguments = [
            [*(leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None), *share]
            for batch, share in zip(batches, shares, strict=True)
        ]
        for i, name in enumerate(graph.arguments):
            column = [row[i] for row in arguments]
            tensor = graph.tf_graph.get_tensor_by_name(name)
            of_share = i >= len(graph.arguments) - len(shares[0])
            self.values[name] = (
                column if of_share else [machine.cast(one, machine.wide(tensor.dtype)) for one in column]
            )
        self._left: collections.Counter[str] = collections.Counter()
        for op in graph.ops:
            self._left.update(graph.inputs[op.name])
        for exchange in graph.exchanges.values():
            self._left.update(name for name in (exchange.source, exchange.when) if name)
        self._left.update(self._left.keys() & (needed or set()))

    def run(self, op: tf.Operation) -> None:
        """Run one op, after all that it waits for."""
        if op.name in self.graph.placeholders:
            return
        names = self.graph.inputs[op.name]
        self._run_op(op, names, [self.value(name) for name in names])
        for name in names:
            self._used(name)

    def _used(self, name: str) -> None:
        self._left[name] -= 1
        if self._needed is not None and self._left[name] <= 0 and name not in self._needed:
            self.values.pop(name, None)

    def value(self, name: str) -> Values:
        """Return what the towers hold of a tensor; a variable's handle is its name."""
        if name in self.state:
            return [name] * self._count
        if name not in self.values:
            if name in self.graph.exchanges:
                self.values[name] = self._exchanged(name)
            else:
                op = self.graph.tf_graph.get_tensor_by_name(name).op
                self.values[name] = self._machine.run(op, ())[:1] * self._count  # a constant
        return self.values[name]

    def _run_op(self, op: tf.Operation, names: Sequence[str], columns: Sequence[Values]) -> None:
        graph = self.graph
        handles = [name for name in names if name in self.state]
        alike = all(one is column[0] for column in columns for one in column)
        alike = alike and all(one is self.state[h][0] for h in handles for one in self.state[h])
        results = []
        known = self._before.last.get(op.name) if self._before is not None else None
        self.last = {}
        for tower in range(1 if alike else self._count):
            given = [column[tower] for column in columns]
            held = {handle: self.state[handle][tower] for handle in handles}
            after = dict(held)
            if known and _are(given, known[0]) and _are(list(held.values()), known[1]):
                results.append(known[2])
                after = dict(zip(held, known[3], strict=True))
                self._keep(after, held, tower, alike)
                continue
            mark = graph.marks.get(op.name)
            divides = mark is not None and mark.purpose == "collective" and mark.collective.divides
            if divides or any(one is None for one in (*given, *held.values())):
                results.append([None] * len(op.outputs))
                after.update((handle, None) for handle in graph.writes[op.name])
            elif handles:
                results.append(self._run_on_variables(op, given, after))
            else:
                results.append(self._machine.run(op, given))
            self._keep(after, held, tower, alike)
            self.last = {op.name: (given, list(held.values()), results[-1], list(after.values()))}
        if alike:
            results = results * self._count
        for i, output in enumerate(op.outputs):
            self.values[output.name] = [one[i] for one in results]

    def _keep(self, after: dict[str, Any], before: dict[str, Any], tower: int, alike: bool) -> None:
        """Keep what an op has written on a tower, or on all."""
        for handle, value in after.items():
            if value is not before[handle]:
                self.written.add(handle)
                values = [value] * self._count if alike else [*self.state[handle]]
                values[tower] = value
                self.state[handle] = values

    def _run_on_variables(self, op: tf.Operation, given: list[Any], state: dict[str, Any]) -> list[Any]:
        """Run an op on variables' values, of which `state` gets the new ones."""
        machine, first = self._machine, given[0]
        if op.type == "ReadVariableOp":
            return [state[first]]
        if op.type == "AssignVariableOp":
            state[first] = given[1]
            return []
        if op.type in ("AssignAddVariableOp", "AssignSubVariableOp"):
            state[first] = state[first] + given[1] if op.type == "AssignAddVariableOp" else state[first] - given[1]
            return []
        if op.type == "VariableShape":
            return [tf.shape(state[first], op.outputs[0].dtype)]
        if op.type == "VarIsInitializedOp":
            return [tf.constant(True)]
        narrow = any(value.func.name or value.list.func for value in op.node_def.attr.values())
        variables = {}
        for name, value in state.items():
            dtype = self.graph.variable_of[name].dtype if narrow else value.dtype
            variables[name] = tf.Variable(machine.cast(value, dtype), trainable=False, shape=tf.TensorShape(None))
        inputs = [variables[one].handle if isinstance(one, str) else one for one in given]
        results = machine.run(op, inputs)
        for name in self.graph.writes[op.name]:
            state[name] = machine.cast(variables[name].read_value(), state[name].dtype)
        return results

    def _exchanged(self, name: str) -> Values:
        exchange = self.graph.exchanges[name]
        values = self.value(exchange.source)
        if exchange.when is not None and not bool(self.value(exchange.when)[0]):
            return values
        collective = exchange.collective
        if collective.divides or any(one is None for one in values):
            return [None] * self._count  # each tower's part of what is divided among them is not followed
        made = joined(values, collective, self._shares)
        for source in (exchange.source, exchange.when):
            if source:
                self._used(source)
        return [made] * self._count


def joined(values: Sequence[Any], collective: Collective, shares: Sequence[Share]) -> Any:
    """Return what a collective gives."""
    if collective.concatenates:
        return tf.concat(values, 0)
    if collective.kind == "broadcast":
        return values[collective.root]
    if collective.op == "mean":
        return tf.add_n([one * tf.cast(share.fraction, one.dtype) for one, share in zip(values, shares, strict=True)])
    result, others = values[0], values[1:]
    binary = {"sum": tf.add, "prod": tf.multiply, "max": tf.maximum, "min": tf.minimum}[collective.op]
    for other in others:
        result = binary(result, other)
    return result


class _Both:
    """Run one device's step, then the towers', with one device's gradients where they agree."""

    def __init__(
        self,
        alone: StepGraph,
        placing: Partition,
        batch: Any,
        sizes: Sequence[int],
        dtype: tf.DType,
        state: Mapping[int, Any],
        keep: bool = False,
    ) -> None:
        self._alone, self._graph, self._placing = alone, placing.graph, placing
        self._machine = machine = _Machine(dtype)
        self._state = state
        self._marks = [
            mark for mark in placing.graph.marks.values() if mark.name in alone.by_name and _is_compared(mark)
        ]
        marked = {name for mark in self._marks for name in self._outputs_of(mark)}
        results = {tensor.name for tensor in alone.results}
        state = {key: machine.cast(value, machine.wide(value.dtype)) for key, value in state.items()}
        self._one = _Run(alone, machine, _shares([sum(sizes)]), [batch], state, None if keep else marked | results)
        ends = np.cumsum(sizes)
        batches = [_rows_between(batch, int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]
        needed = {self._name_on_towers(name) for name in marked} | {name for name, _ in placing.graph.outputs}
        self._shares = _shares(sizes)
        self._many = _Run(
            placing.graph, machine, self._shares, batches, state, None if keep else needed, before=self._one
        )
        self._bad: dict[str, float] = {}  # marks by name
        # By the names of towers' tensors: the marks that they stand for.
        self._waiting: dict[str, list[Mark]] = {}
        if not keep:
            for mark in self._marks:
                for name in self._outputs_of(mark):
                    self._waiting.setdefault(self._name_on_towers(name), []).append(mark)
        self._scale = 0.0  # of all gradients that have met
        self._done: set[str] = set()
        self._run_both()
        for mark in self._marks:
            self._meet_mark(mark)

    def _run_both(self) -> None:
        """Run both op by op, one device first: the towers' order is the same, with some ops in between."""
        ops = iter(self._alone.ops)
        for op in self._graph.ops:
            if op.name in self._alone.by_name:
                for one in ops:
                    self._one.run(one)
                    if one is op:
                        break
            for name in self._graph.inputs[op.name]:
                self._meet(name)
            self._many.run(op)
        for one in ops:
            self._one.run(one)

    def _name_on_towers(self, name: str) -> str:
        """Return the name of a traced tensor in the towers' program."""
        return self._placing.name_of(name)

    def _outputs_of(self, mark: Mark) -> list[str]:
        op = self._alone.tf_graph.get_operation_by_name(mark.name)
        return [output.name for output in op.outputs[: len(op.outputs) - mark.conditional]]

    def _tolerance(self) -> tuple[float, float]:
        return _TOLERANCES[self._machine.rounded.name]

    def _meet(self, name: str) -> None:
        for mark in self._waiting.pop(name, ()):
            self._meet_mark(mark)

    def _meet_mark(self, mark: Mark) -> None:
        """Compare gradients before an optimizer gets them."""
        if mark.name in self._done:
            return
        self._done.add(mark.name)
        outputs = self._outputs_of(mark)
        made = [self._name_on_towers(name) for name in outputs]
        found = [self._one.values.get(name, [None])[0] for name in outputs]
        self._scale = max([self._scale, *(_magnitude(one) for one in found if one is not None)])
        if "slices" in mark.purpose:
            self._meet_slices(mark, outputs, made)
            return
        for name, one in zip(outputs, made, strict=True):
            if name not in self._one.values or not self._is_known(one):
                continue
            expected, values = self._one.values[name][0], self._many.value(one)
            if expected is None or any(value is None for value in values):
                continue
            parts = mark.purpose == "parts" or not self._is_due(one)
            if parts:
                values = [joined(values, Collective("all_reduce", "sum"), self._shares)]
            error = max(self._error(expected, value, self._scale) for value in values)
            if error:
                self._bad[name] = error
            elif not parts and one != name:
                self._many.values[one] = [expected] * len(self._shares)

    def _is_due(self, name: str) -> bool:
        """Return whether an exchange has happened: if its condition is False, each tower's part stays."""
        exchange = self._graph.exchanges.get(name)
        return exchange is None or exchange.when is None or bool(self._many.value(exchange.when)[0])

    def _is_known(self, name: str) -> bool:
        if name in self._many.values:
            return True
        exchange = self._graph.exchanges.get(name)
        return exchange is not None and all(
            self._is_known(source) for source in (exchange.source, exchange.when) if source
        )

    def _meet_slices(self, mark: Mark, outputs: list[str], made: list[str]) -> None:
        expected = [self._one.values.get(name, [None])[0] for name in outputs]
        if any(one is None for one in expected) or not all(self._is_known(name) for name in made):
            self._done.discard(mark.name)
            return
        columns = [self._many.value(name) for name in made]
        if any(one is None for column in columns for one in column):
            return
        values, indices = columns
        if mark.purpose == "slices part":
            values, indices = [tf.concat(values, 0)], [tf.concat(indices, 0)]
        right = _dense(*expected)
        errors = []
        for one, places in zip(values, indices, strict=True):
            wrong = _dense(one, places)
            height = max(right.shape[0], wrong.shape[0])
            errors.append(self._error(_padded(right, height), _padded(wrong, height), self._scale))
        if max(errors):
            self._bad[outputs[0]] = max(errors)
        elif mark.purpose == "slices" and np.array_equal(indices[0], expected[1]):
            self._many.values[made[0]] = [expected[0]] * len(self._shares)

    def _error(self, expected: Any, actual: Any, scale: float = 0.0) -> float:
        """Return how much a value differs, relative to its largest magnitude; 0 if only by rounding."""
        return _error(np.asarray(expected), np.asarray(actual), *self._tolerance(), scale)

    def differences(self, names_of: Callable, outputs: int) -> list[tuple[str, float]]:
        """Return (name, error) of what differs."""
        found: list[tuple[str, float]] = []
        variables = dict(self._alone.variables)
        written = []
        order = {handle: i for i, handle in enumerate(variables)}
        for handle in sorted(self._one.written | self._many.written, key=order.__getitem__):
            expected, values = self._one.state[handle][0], self._many.state[handle]
            if expected is None or any(one is None for one in values):
                continue
            if self._graph.role[handle] in (Role.SAME, Role.SEED) and all(one is expected for one in values):
                continue
            if self._graph.role[handle] in (Role.SUM, Role.PARTIAL):
                values = [joined(values, Collective("all_reduce", "sum"), self._shares)]
            before = np.asarray(self._state[id(variables[handle])])
            # The difference that was written, where values can be subtracted.
            alike = np.asarray(expected).dtype.kind in "fc" and all(
                one.shape == before.shape for one in (expected, *values)
            )
            start = before.astype(np.asarray(expected).dtype) if alike else None
            with np.errstate(invalid="ignore", over="ignore"):
                pairs = [(_less(expected, start), _less(value, start)) for value in values]
            written.append((handle, _magnitude(before), pairs))
        largest = max((_magnitude(pair[0]) for *_, pairs in written for pair in pairs), default=0.0)
        rounding = 16 * float(np.finfo(self._machine.rounded.as_numpy_dtype).eps) if self._is_wide else 0.1
        relative, absolute = self._tolerance()
        for handle, there, pairs in written:
            floor = rounding * there + absolute * largest
            if error := max(_error(*pair, relative, 1.0, floor) for pair in pairs):
                found.append((names_of([variables[handle]])[0], error))
        for number, (result, (name, how)) in enumerate(zip(self._alone.results, self._graph.outputs, strict=False)):
            if number >= outputs:
                break
            expected = self._one.value(result.name)[0]
            values = self._many.value(name)
            if expected is None or isinstance(expected, str) or any(one is None for one in values):
                continue
            values = [tf.concat(values, 0)] if how == "concat" else values[:1]
            if error := self._error(expected, values[0], _magnitude(expected)):
                found.append((f"result {number + 1}", error))
        if not found:  # an optimizer may not show it yet
            found = [(f"the gradient {name}", error) for name, error in self._bad.items()]
        return found

    @property
    def _is_wide(self) -> bool:
        return self._machine.rounded in (tf.float32, tf.float64)

    def first_difference(self) -> str:
        """Return where the first tensor comes from that differs, and its op."""
        relative, absolute = self._tolerance()
        for op in self._alone.ops:
            for output in op.outputs:
                name = output.name
                expected = self._one.values.get(name, [None])[0]
                if name not in self._placing.placed or expected is None or isinstance(expected, str):
                    continue
                if output.dtype in (tf.variant, tf.resource):
                    continue
                placed = self._placing.placed[name][1]
                made = self._name_on_towers(name)
                values = self._many.values.get(made)
                if values is None or any(one is None for one in values) or not self._is_due(made):
                    continue
                for value in self._wholes(values, placed):
                    scale = _magnitude(expected) if output.dtype in _FLOATS else 0.0
                    if _error(np.asarray(expected), np.asarray(value), relative, absolute, scale):
                        return f"{op.type} {op.name}, at {user_line(op.traceback)}"
        return "a line that could not be found"

    def _wholes(self, values: Values, placed: Placement) -> list[Any]:
        """Return the batch's value, from each tower that has it; [] where none can be compared."""
        if placed.kind is Kind.REPLICATE:
            return values
        if placed.kind is Kind.PARTIAL and values[0].dtype != tf.bool:
            return [joined(values, Collective("all_reduce", placed.op), self._shares)]
        if placed.kind is Kind.SHARD:
            try:
                columns = zip(*[tf.split(value, placed.blocks, placed.axis) for value in values], strict=True)
                return [tf.concat([one for column in columns for one in column], placed.axis)]
            except tf.errors.InvalidArgumentError:
                return []
        return []


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def _is_compared(mark: Mark) -> bool:
    """Return whether gradients meet at a mark."""
    summed = mark.collective.kind == "all_reduce" and mark.collective.op == "sum" and mark.collective.empty_too
    return mark.purpose in ("whole", "parts", "slices", "slices part") or (mark.purpose == "collective" and summed)


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


def _rows_between(batch: Any, begin: int, end: int) -> Any:
    def taken(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(rest)], 0)
            return tf.sparse.slice(leaf, start, tf.concat([[tf.cast(end - begin, tf.int64)], rest], 0))
        return leaf[begin:end]

    return tf.nest.map_structure(taken, batch)


def _magnitude(value: Any) -> float:
    value = np.asarray(value)
    if value.dtype.kind not in "fc":
        return 0.0
    value = np.abs(value[np.isfinite(value)])
    return float(np.max(value, initial=0.0))


def _error(expected: np.ndarray, actual: np.ndarray, relative: float, absolute: float, scale: float) -> float:
    """Return the largest difference by the largest magnitude; 0 if `relative` or `absolute` allow it."""
    if expected.shape != actual.shape:
        return float("inf")
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(expected, actual) else float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return float("inf")
    largest = float(np.max(np.abs(expected[finite]), initial=0.0))
    error = float(np.max(np.abs(expected[finite] - actual[finite]), initial=0.0))
    if error <= relative * largest or error <= absolute * scale:
        return 0.0
    return error / largest if largest else float("inf")


def _less(value: Any, start: np.ndarray | None) -> np.ndarray:
    return np.asarray(value) if start is None else np.asarray(value) - start


def _dense(values: Any, indices: Any) -> np.ndarray:
    values, indices = np.asarray(values), np.asarray(indices)
    made = np.zeros((int(np.max(indices, initial=-1)) + 1, *values.shape[1:]), values.dtype)
    np.add.at(made, indices, values)
    return made


def _padded(rows: np.ndarray, height: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((height - len(rows), *rows.shape[1:]), rows.dtype)])
