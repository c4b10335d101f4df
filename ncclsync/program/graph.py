"""Describe a traced step by names: its ops, their inputs, and the exchanges that are put in between.

A view for the passes that cut a step (`partition.py`, `cut.py`, `segment.py`); it decides nothing itself.
"""

import copy
import dataclasses
import types
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name
from ncclsync.program.program import Exchange
from ncclsync.program.trace import Trace
from ncclsync.semantics.axes import Kernels
from ncclsync.semantics.functions import Functions, in_order
from ncclsync.semantics.placements import LOCAL, PIECE, REPLICATE, Kind, Placement, rows, shard
from ncclsync.semantics.roles import Role, role_of


class StepGraph:
    """Describe the traced graph by names: ops, inputs, and the exchanges that are put between them.

    The partition adds to it, and then freezes it: all passes after that read one description, which none changes. A
    tensor has the name that TensorFlow gave it, as all layers' dictionaries have it for a key: a `TensorName`, which a
    type checker takes neither for an `OpName` nor for another string.
    """

    _frozen = False

    def __init__(self, trace: Trace, home_device: str, same_seeds: bool = False):
        function = trace.function
        self.share, self.site = trace.share, trace.site
        self.home_device, self.jit_compile = home_device, trace.jit_compile
        definition = function.graph.as_graph_def()
        self.versions = definition.versions
        self.nodes: dict[OpName, Any] = {node.name: node for node in definition.node}
        self.functions = {f.signature.name: f for f in definition.library.function}
        self.calls = Functions(self.functions, function.graph)
        self.kernels = Kernels()  # shared by all who ask for shapes of its ops
        self.gradients = list(definition.library.gradient)
        self.tf_graph = function.graph
        flat_inputs: list[TensorName] = [tensor.name for tensor in function.inputs]
        captured = function.captured_inputs
        count = len(flat_inputs) - len(captured)
        self.arguments = tuple(flat_inputs[:count])
        self.row_splits: set[TensorName] = set()  # of ragged leaves whose values lie in rows, not in rows of rows
        self.argument_placements = self._place_arguments(trace)
        by_handle = {id(variable.handle): variable for variable in function.variables}
        pairs = list(zip(flat_inputs[count:], captured, strict=True))
        self.captures = tuple((name, tensor) for name, tensor in pairs if id(tensor) not in by_handle)
        self.variables = [(name, by_handle[id(tensor)]) for name, tensor in pairs if id(tensor) in by_handle]
        self.variable_of: dict[TensorName, tf.Variable] = dict(self.variables)
        each = {id(variable): rows for variable, rows in trace.opened}
        self.opened = [(name, v, each[id(v)]) for name, v in self.variables if id(v) in each]  # see `trace.trace`
        self.role = {name: role_of(variable, same_seeds) for name, variable in self.variables}
        # A failed step must leave these as they were. (Metric state starts anew with the next epoch.)
        self.kept = {
            name
            for name, variable in self.variables
            if self.role[name] in (Role.SAME, Role.PARTIAL, Role.PARTITION) and not tf_compat.is_seed(variable)
        }
        self.placeholders = {op_name(name) for name in flat_inputs}
        # tf.function returns identities that wait for every side effect; what they wait for says the layout.
        self.results = [tensor.op.inputs[0] if tensor.op.type == "Identity" else tensor for tensor in function.outputs]
        self.must_run: set[OpName] = {op.name for op in self.tf_graph.control_outputs}
        # Creation order is not topological: automatic control dependencies are added later. Walking what outputs and
        # side effects need in creation order keeps as much of it as there can be.
        created = {op.name: i for i, op in enumerate(self.tf_graph.get_operations())}
        roots = [*self.tf_graph.control_outputs, *(tensor.op for tensor in self.results)]
        self.ops = in_order(sorted(roots, key=lambda op: created[op.name]))
        self.inputs: dict[OpName, list[TensorName]] = {op.name: [t.name for t in op.inputs] for op in self.ops}
        self.controls: dict[OpName, list[OpName]] = {op.name: [c.name for c in op.control_inputs] for op in self.ops}
        self._merge_duplicates()
        self.writes: dict[OpName, set[TensorName]]
        self.writes = {op.name: tf_compat.written_handles(op) & set(self.role) for op in self.ops}
        self.marks = trace.marks
        self.traced_inputs = {name: list(inputs) for name, inputs in self.inputs.items()}
        # No segment computes these ops: their consumers take their inputs instead.
        self.passing: set[OpName] = {op.name for op in self.ops if op.name in trace.marks or op.type == "IdentityN"}
        self.constant: Callable[[tf.Tensor], Any] = tf.get_static_value  # of integers that no batch changes
        self.lengths: Callable[[tf.Tensor], Any] = lambda tensor: None  # what `Axes` knows of a tensor's axes
        self.open_axes: dict[TensorName, int] = {}  # of tensors that have a tower's rows, where the trace has a length
        self.local: set[OpName] = set()  # ops that compute on what differs between towers
        self.differing: set[TensorName] = set()  # tensors that may differ
        self.exchanges: dict[TensorName, Exchange] = {}  # by name of the result
        self.folds: set[OpName] = set()  # ops that write the sums of all towers' metric state, at the end of the step
        self.structure = function.graph.structured_outputs
        self.outputs: list[tuple[TensorName, str]] = []
        self.by_name: dict[OpName, tf.Operation] = {op.name: op for op in self.ops}

    def freeze(self) -> None:
        """Let nothing change it from now on: attributes cannot be set, nor collections be added to."""
        self.free_prefix = "ncclsync"  # of names that a segment may give to nodes
        while any(name.startswith(self.free_prefix) for name in self.nodes):
            self.free_prefix += "_"
        views: dict[type, Any] = {dict: types.MappingProxyType, list: tuple, set: frozenset}
        for name, value in vars(self).items():
            if type(value) in views and name != "structure":  # which is the user's
                vars(self)[name] = views[type(value)](value)
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._frozen:
            raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r}: the step is partitioned")
        super().__setattr__(name, value)

    def rewired(self, inputs: dict[OpName, list[TensorName]], controls: dict[OpName, list[OpName]]) -> "StepGraph":
        """Return the same step in which these ops have other inputs and control dependencies."""
        view = copy.copy(self)
        vars(view).update(inputs={**self.inputs, **inputs}, controls={**self.controls, **controls})
        return view

    def _place_arguments(self, trace: Trace) -> dict[TensorName, Placement]:
        """Place what a tower is given: its rows of the batch, and what it knows of them."""
        placed: dict[TensorName, Placement] = {tensor.name: LOCAL for tensor in (*trace.share, *trace.site)}
        placed[trace.share.total.name] = REPLICATE
        for leaf in tf.nest.flatten(trace.batch):
            if isinstance(leaf, tf.Tensor):
                placed[leaf.name] = shard() if leaf.shape.rank else REPLICATE
            elif leaf is not None:
                first, *others = tf.nest.flatten(leaf, expand_composites=True)
                if isinstance(leaf, tf.SparseTensor):
                    values, shape = others
                    placed[first.name] = Placement(Kind.INDICES, op="own", counts=(1, 1), unit=values.name)
                    placed[values.name] = shard(unit=values.name)
                    placed[shape.name] = rows((1, *[0] * (leaf.shape.rank - 1)))
                else:  # values, and the splits of their rows, from the outermost
                    placed[first.name] = shard(unit=others[-1].name)
                    placed.update((splits.name, PIECE) for splits in others)
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
            inputs = self.inputs[op.name] = [renamed.get(name, name) for name in self.inputs[op.name]]
            controls = [replaced.get(name, name) for name in self.controls[op.name]]
            self.controls[op.name] = list(dict.fromkeys(controls))
            reads = op.type == "ReadVariableOp" and self.role.get(inputs[0]) is Role.SAME
            if op.name in self.placeholders or (tf_compat.is_stateful(op) and not reads):
                ops.append(op)
                continue
            attributes = self.nodes[op.name].attr
            described = tuple((name, attributes[name].SerializeToString()) for name in sorted(attributes))
            same = kept.setdefault((op.type, op.device, described, tuple(inputs), tuple(sorted(controls))), op)
            if same is op or op.type == "IdentityN":
                ops.append(op)
                continue
            replaced[op.name] = same.name
            renamed.update((one.name, other.name) for one, other in zip(op.outputs, same.outputs, strict=True))
        self.ops = ops
        self.results = [self.tf_graph.get_tensor_by_name(renamed.get(t.name, t.name)) for t in self.results]

    def spec(self, name: TensorName) -> tf.TensorSpec:
        """Return shape and dtype of a tensor of the trace, or of an exchange's result."""
        tensor = self.tf_graph.get_tensor_by_name(name)
        shape = tf.TensorShape([]) if tensor.dtype == tf.resource else tensor.shape
        if name in self.open_axes:
            lengths = shape.as_list()
            lengths[self.open_axes[name]] = None
            shape = tf.TensorShape(lengths)
        return tf.TensorSpec(shape, tensor.dtype)

    def producer(self, name: TensorName) -> tf.Operation | None:
        """Return the op that a tensor comes from; None for the result of an exchange."""
        return self.by_name.get(op_name(name))

    def producer_type(self, name: TensorName) -> str | None:
        """Return the type of that op; None for the result of an exchange."""
        op = self.producer(name)
        return None if op is None else op.type

    def take_in(self, op: tf.Operation) -> None:
        """Make an op that was added to the traced graph a part of the step."""
        self.nodes[op.name] = op.node_def
        self.inputs[op.name] = [tensor.name for tensor in op.inputs]
        self.controls[op.name] = [control.name for control in op.control_inputs]
        self.writes[op.name] = set()
        self.by_name[op.name] = op

    def stands_for(self, op: OpName, other: OpName, but_not_to: Collection[OpName] = ()) -> None:
        """Redirect control dependencies from an op to its replacement, except those of `but_not_to`."""
        for name, controls in self.controls.items():
            if op in controls and name not in but_not_to:
                self.controls[name] = [other if control == op else control for control in controls]

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
