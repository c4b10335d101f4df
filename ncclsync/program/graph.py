"""Describe a traced step by names: its ops, their inputs, and the exchanges that are put in between.

A view for the passes that cut a step (`partition.py`, `cut.py`, `segment.py`); it decides nothing itself.
"""

import dataclasses
import types
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.program.program import Exchange
from ncclsync.program.trace import Trace
from ncclsync.semantics.axes import MEASURES, Axes, Rows
from ncclsync.semantics.functions import Functions, in_order, parents_of
from ncclsync.semantics.placements import LOCAL, REPLICATE, SAMPLES, SPLITS, Counts, Indices, Placement, Shard, rows
from ncclsync.sharding.roles import Role, is_random_state, mark_random_state, role_of
from ncclsync.sharding.shards import units_of


def read_only(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with read-only views of dictionaries, lists and sets."""
    views: dict[type, Any] = {dict: types.MappingProxyType, list: tuple, set: frozenset}
    return {name: views[type(v)](v) if type(v) in views else v for name, v in members.items()}


class TracedGraph:
    """Describe a step as it was traced, by names; frozen when it is made."""

    is_made = False

    def __init__(self, trace: Trace, home_device: str, same_seeds: bool = False, shared: Collection[int] = ()) -> None:
        """Describe a trace; variables with the ids `shared` are the same on all towers, whatever they show."""
        function = trace.function
        self.trace, self.home_device, self.tf_graph = trace, home_device, function.graph
        self.definition = trace.definition
        self.nodes: dict[OpName, Any] = {node.name: node for node in self.definition.node}
        self.free_prefix = "ncclsync_segment"  # of names that a segment may give to nodes
        while any(name.startswith(self.free_prefix) for name in self.nodes):
            self.free_prefix += "_"
        given: list[TensorName] = [tensor.name for tensor in function.inputs]
        count = len(given) - len(function.captured_inputs)
        self.arguments = tuple(given[:count])
        self.row_splits: set[TensorName] = set()  # of ragged leaves whose values lie in rows, not in rows of rows
        self.argument_placements = self._place_arguments(trace)
        by_handle = {id(tf_compat.handle_of(variable)): variable for variable in function.variables}
        others = [one for one in function.captured_inputs if id(one) not in by_handle]
        by_handle |= {id(tf_compat.handle_of(variable)): variable for variable in tf_compat.variables_behind(others)}
        pairs = list(zip(given[count:], function.captured_inputs, strict=True))
        self.captures = tuple((name, tensor) for name, tensor in pairs if id(tensor) not in by_handle)
        variables = self.variable_of = {name: by_handle[id(one)] for name, one in pairs if id(one) in by_handle}
        each = {id(variable): rows for variable, rows in trace.opened}
        self.opened = tuple((name, v, each[id(v)]) for name, v in variables.items() if id(v) in each)
        for op in self.tf_graph.get_operations():
            if op.type == "RngReadAndSkip" and op.inputs[0].name in variables:  # a `tf.random.Generator`'s
                mark_random_state(variables[op.inputs[0].name])
        self.role = {n: Role.SAME if id(v) in shared else role_of(v, same_seeds) for n, v in variables.items()}
        # A failed step must leave these as they were. (Metric state starts anew with the next epoch.)
        kept = (Role.SAME, Role.PARTIAL, Role.PARTITION)
        self.kept = {n for n, v in variables.items() if self.role[n] in kept and not is_random_state(v)}
        self.placeholders = {op_name(name) for name in given}
        # tf.function returns identities that wait for every side effect; the layout says what results wait for.
        self.results = [tensor.op.inputs[0] if tensor.op.type == "Identity" else tensor for tensor in function.outputs]
        self.must_run: set[OpName] = {op.name for op in self.tf_graph.control_outputs}
        # Creation order is not topological: automatic control dependencies are added later. Walking what outputs and
        # side effects need in creation order keeps as much of it as there can be.
        created = {op.name: i for i, op in enumerate(self.tf_graph.get_operations())}
        roots = [*self.tf_graph.control_outputs, *(tensor.op for tensor in self.results)]
        self.ops = in_order(sorted(roots, key=lambda op: created[op.name]), _needed)
        self.inputs: dict[OpName, tuple[TensorName, ...]] = {}
        self.controls: dict[OpName, tuple[OpName, ...]] = {}
        self._merge_duplicates()
        self.writes = {op.name: tf_compat.written_handles(op) & self.role.keys() for op in self.ops}
        # No segment computes these ops: their consumers take their inputs instead.
        self.passing = {
            op.name for op in self.ops if op.name in trace.marks or op.type == "IdentityN" or _is_its_first(op)
        }
        vars(self).update(read_only(vars(self)), is_made=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_made:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def tensor(self, name: TensorName) -> tf.Tensor:
        """Return a tensor of the trace, or one that was put in."""
        return self.tf_graph.get_tensor_by_name(name)

    def _place_arguments(self, trace: Trace) -> dict[TensorName, Placement]:
        """Place a tower's arguments: its rows of the batch, and numbers of them."""
        placed: dict[TensorName, Placement] = {tensor.name: LOCAL for tensor in (*trace.share, *trace.site)}
        placed[trace.share.total.name] = REPLICATE
        named: dict[int, TensorName] = {0: SAMPLES}
        for leaf, number in zip(tf.nest.flatten(trace.batch), units_of(trace.batch), strict=True):
            if isinstance(leaf, tf.Tensor):
                unit = named.setdefault(number, leaf.name)
                placed[leaf.name] = Shard(unit=unit) if leaf.shape.rank else REPLICATE
            elif leaf is not None:
                first, *others = tf.nest.flatten(leaf, expand_composites=True)
                if isinstance(leaf, tf.SparseTensor):
                    values, shape = others
                    placed[first.name] = Indices(1, 1, unit=values.name)
                    placed[values.name] = Shard(unit=values.name)
                    placed[shape.name] = rows((1, *[0] * (leaf.shape.rank - 1)))
                else:  # values, and the splits of their rows, from the outermost
                    placed[first.name] = Shard(unit=others[-1].name)
                    placed.update((splits.name, SPLITS) for splits in others)
                    self.row_splits |= {others[0].name} if len(others) == 1 else set()
        return placed

    def _merge_duplicates(self) -> None:
        """Merge ops that compute the same, such as the learning rate for each variable.

        TensorFlow does so too, but not after reads of variables.
        """
        kept: dict[Any, tf.Operation] = {}
        replaced: dict[OpName, OpName] = {}
        renamed: dict[TensorName, TensorName] = {}
        ops = []
        for op in self.ops:
            inputs = tuple(renamed.get(t.name, t.name) for t in op.inputs)
            inputs = self.inputs[op.name] = inputs[:1] if _is_its_first(op) else inputs
            controls = [replaced.get(c.name, c.name) for c in op.control_inputs]
            self.controls[op.name] = tuple(dict.fromkeys(controls))
            reads = op.type == "ReadVariableOp" and self.role.get(inputs[0]) is Role.SAME
            if op.name in self.placeholders or (tf_compat.is_stateful(op) and not reads):
                ops.append(op)
                continue
            attributes = self.nodes[op.name].attr
            described = tuple((name, attributes[name].SerializeToString()) for name in sorted(attributes))
            same = kept.setdefault((op.type, op.device, described, inputs, tuple(sorted(controls))), op)
            if same is op or op.type == "IdentityN":
                ops.append(op)
                continue
            replaced[op.name] = same.name
            renamed.update((one.name, other.name) for one, other in zip(op.outputs, same.outputs, strict=True))
        self.ops = ops
        self.results = [self.tensor(renamed.get(t.name, t.name)) for t in self.results]


def _is_its_first(op: tf.Operation) -> bool:
    """Return whether an op gives its first input: min(n, max(n, m)), as `tf.math.bincount` has for n segments."""
    if op.type != "Minimum" or op.outputs[0].shape.rank != 0 or not op.outputs[0].dtype.is_integer:
        return False
    other = op.inputs[1].op
    return other.type == "Maximum" and other.inputs[0] is op.inputs[0]


def _needed(op: tf.Operation) -> list[tf.Operation]:
    return [op.inputs[0].op, *op.control_inputs] if _is_its_first(op) else parents_of(op)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepGraph:
    """Describe a step with what its partition has put in.

    A tensor has the name that TensorFlow gave it, as all layers' dictionaries have it for a key: a `TensorName`, which
    a type checker takes neither for an `OpName` nor for another string.
    """

    traced: TracedGraph
    functions: Functions
    axes: Axes
    nodes: Mapping[OpName, Any]
    inputs: Mapping[OpName, Sequence[TensorName]]
    controls: Mapping[OpName, Sequence[OpName]]
    writes: Mapping[OpName, Set[TensorName]]
    must_run: Set[OpName]
    ops: Sequence[tf.Operation]  # that are computed, inputs before consumers
    by_name: Mapping[OpName, tf.Operation]  # of these, and of those that tower 0 alone runs
    stood_for: Mapping[OpName, tf.Operation]  # by the branch that runs it on tower 0 alone
    open_axes: Mapping[TensorName, int]  # of tensors that have a tower's rows, where the trace has a length
    by_rows: Mapping[TensorName, Shard]  # of tensors that have a tower's rows of the batch
    counting: Mapping[TensorName, Counts]  # of tensors that count them
    stretched: bool  # whether a batch of one row may have more rows of some of these, since it was broadcast
    local: Set[OpName]  # ops that take tensors that may differ between towers
    differing: Set[TensorName]  # these tensors
    exchanges: Mapping[TensorName, Exchange]  # by name of the result
    folds: Set[OpName]  # ops that write the sums of all towers' metric state, at the end of the step
    outputs: Sequence[tuple[TensorName, bool]]  # see `Program`

    def rewired(self, inputs: Mapping[OpName, Any], controls: Mapping[OpName, Any]) -> "StepGraph":
        """Return the same step in which these ops have other inputs and control dependencies."""
        return dataclasses.replace(self, inputs={**self.inputs, **inputs}, controls={**self.controls, **controls})

    def measured_once(self, ops: Iterable[OpName]) -> "StepGraph":
        """Return the same step, in which some ops, inputs before consumers, ask the first of tensors of equal shapes.

        So TensorFlow merges what they compute of a shape, which is the same in each layer.
        """
        first: dict[Any, TensorName] = {}
        asking = (name for name in ops if self.by_name[name].type in MEASURES)
        return self.rewired(
            {name: [first.setdefault(self._measure(one), one) for one in self.inputs[name]] for name in asking}, {}
        )

    def _measure(self, name: TensorName) -> Any:
        """Return what a tensor's shape on a tower follows from, and its dtype; its name if that is not known."""
        placed, tensor = self.by_rows.get(name), self.traced.tensor(name)
        lengths = None if placed is None else self.axes.lengths(tensor)
        if placed is None or lengths is None or None in lengths or self.stretched:
            return name
        return placed.axis, placed.blocks, lengths, tensor.dtype

    def spec(self, name: TensorName) -> tf.TensorSpec:
        """Return shape and dtype of a tensor of the trace, or of an exchange's result."""
        tensor = self.traced.tensor(name)
        shape = tf.TensorShape([]) if tensor.dtype == tf.resource else tensor.shape
        axis = self.open_axes.get(name)
        return tf.TensorSpec(shape if axis is None else opened(shape, axis), tensor.dtype)

    def numbers(self, name: TensorName) -> list[tuple[int, tf.Tensor | None]] | None:
        """Return what each number of a few traced integers is on a tower: a constant, or so many times a count of rows.

        None: that is not known.
        """
        tensor = self.traced.tensor(name)
        if not tensor.dtype.is_integer or self.stretched or op_name(name) not in self.traced.nodes:
            return None
        share, found = self.traced.trace.share, self.axes.elements(tensor)
        counts = self.counting[name].counts if name in self.counting else (0,) * len(found)
        if not (name in self.counting or self._is_whole(name)) or len(found) != tensor.shape.num_elements():
            return None
        numbers: list[tuple[int, tf.Tensor | None]] = []
        for one, count in zip(found, counts, strict=True):
            if isinstance(one, Rows) and one.each and count is not None:
                numbers.append((one.each, share.rows if count else share.total))
            elif isinstance(one, int) and count == 0:
                numbers.append((one, None))
            else:
                return None
        return numbers

    def _is_whole(self, name: TensorName) -> bool:
        """Return whether all towers have the same integers: no integer that they rest on is of what differs."""
        queue, seen = [name], {name}
        while queue:
            one = queue.pop()
            if one in self.differing:
                return False
            if self.traced.tensor(one).dtype.is_integer and (op := self.producer(one)) is not None:
                new = set(self.inputs[op.name]) - seen
                seen |= new
                queue += new
        return True

    def producer(self, name: TensorName) -> tf.Operation | None:
        """Return the op that a tensor comes from; None for the result of an exchange."""
        return self.by_name.get(op_name(name))

    def is_constant(self, name: TensorName) -> bool:
        """Return whether a tensor is a constant; each segment that uses it gets a copy."""
        op = self.producer(name)
        return op is not None and op.type == "Const" and not op.control_inputs

    def origin(self, name: TensorName) -> tuple[OpName, int]:
        """Return the op that a tensor comes from, and how many exchanges lie between."""
        hops = 0
        while name in self.exchanges:
            name, hops = self.exchanges[name].source, hops + 1
        return op_name(name), hops


def opened(shape: tf.TensorShape, axis: int) -> tf.TensorShape:
    """Return a shape with one of its lengths left open."""
    return shape[:axis].concatenate([None]).concatenate(shape[axis + 1 :])
