"""Keep numbers that the host knows in the host's memory where towers are GPUs.

Counts of rows, and what follows from shapes, lie in the host's memory. Some of TensorFlow's ops take or return them in
a GPU's memory: then a few bytes are copied behind all else that is copied to the GPU, such as the next batch, and for
the bytes that come back the host waits for all of the GPU's earlier work. Here such ops run on the host, and a number
that an op of the GPU needs gets there as a kernel's parameter: TensorFlow's kernel of `Range` takes its ends from the
host's memory. So the host can be a whole step ahead.
"""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.names import OpName, TensorName, op_name, result_name
from ncclsync.program.graph import StepGraph

_CPU = "/device:CPU:0"
_SMALL = 64  # elements

# The integers that have the bits of a float.
_BITS = {tf.float16: tf.int16, tf.bfloat16: tf.int16, tf.float32: tf.int32, tf.float64: tf.int64}
# The dtypes that `enter` takes. For int32 many of a GPU's kernels use the host's memory: it would be copied back.
ENTERING = (*_BITS, tf.bool, tf.int8, tf.int16, tf.int64, tf.uint8, tf.uint16, tf.uint32)
# Inputs that the CPU's kernels check, and a GPU's do not: these have to be known.
_CHECKED = {"GatherV2": (1, 2), "GatherNd": (1,)}
_CHECKED |= dict.fromkeys(("Div", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod"), (1,))


class HostValues:
    """Keep the numbers of one segment on the host."""

    def __init__(self, definition: tf.compat.v1.GraphDef, graph: StepGraph, outside: Collection[TensorName]) -> None:
        """Take its nodes, inputs before consumers, and the names of the tensors that it is given from outside."""
        self._definition, self._graph = definition, graph
        self._nodes = {node.name: node for node in definition.node}
        # Tensors in the host's memory. TensorFlow passes int32 to functions there.
        self._host = {name for name in outside if graph.spec(name).dtype == tf.int32}
        self._on_host: dict[TensorName, TensorName] = {}  # an op of the host takes this tensor in place of that
        self._entered: dict[TensorName, TensorName] = {}  # an op of the GPU takes this tensor in place of the host's

    def run(self, needed: Collection[OpName]) -> None:
        """Change the nodes in place; others take the results of the `needed` ops from the GPU."""
        for node in list(self._definition.node):
            op = self._graph.by_name[node.name]
            if node.device or not (self._host.intersection(node.input) or tf_compat.has_host_results(op.type)):
                continue
            memory = tf_compat.gpu_memory(op)
            if memory is None:
                continue
            sources = [source for source in node.input if not source.startswith("^")]
            taken = {i: source for i, source in enumerate(sources) if source in self._host}
            copied = taken.keys() - memory.inputs
            moves = bool(copied) and self._can_move(node, op, sources)
            if moves:
                self._move(node, sources)
            for i, source in taken.items():
                if moves or i not in copied:
                    node.input[i] = self._on_host.get(source, source)
                elif self._is_number(source) and source not in self._on_host:
                    node.input[i] = self._enter(source, self._graph.spec(source))
            made = [output for i, output in enumerate(op.outputs) if moves or i in memory.outputs]
            self._host.update(output.name for output in made)
            if node.name in needed and len(op.outputs) == len(made) == 1 and self._is_number(made[0].name):
                self._divide(node, made[0])

    def _is_number(self, source: TensorName) -> bool:
        spec = self._graph.spec(source)
        return spec.shape.is_fully_defined() and spec.shape.num_elements() == 1 and spec.dtype in ENTERING

    def _can_move(self, node: Any, op: tf.Operation, sources: list[TensorName]) -> bool:
        small = all(
            output.shape.is_fully_defined()
            and output.shape.num_elements() <= _SMALL
            and output.dtype in (*ENTERING, tf.int32)
            for output in op.outputs
        )
        return (
            small
            and len(sources) == len(node.input)
            and all(source in self._host or self._graph.is_constant(source) for source in sources)
            and not tf_compat.is_stateful(op)
            and not tf_compat.calls_functions(op)
            and tf_compat.runs_on_cpu(op)
            and all(self._graph.axes.constant(op.inputs[i]) is not None for i in _CHECKED.get(op.type, ()))
        )

    def _move(self, node: Any, sources: list[TensorName]) -> None:
        node.device = _CPU
        for i, source in enumerate(sources):
            if source in self._host:
                continue
            if source not in self._on_host:
                constant = self._definition.node.add()
                constant.CopyFrom(self._nodes[op_name(source)])
                constant.name, constant.device = f"{self._graph.traced.free_prefix}/on_host_{len(self._on_host)}", _CPU
                self._on_host[source] = result_name(constant.name)
            node.input[i] = self._on_host[source]

    def _divide(self, node: Any, output: tf.Tensor) -> None:
        """Turn a node into the GPU's copy of its result, and add one that computes the result on the host."""
        twin = self._definition.node.add()
        twin.CopyFrom(node)
        twin.name = f"{self._graph.traced.free_prefix}/on_host_{len(self._on_host)}"
        self._on_host[output.name] = result_name(twin.name)
        node.Clear()
        node.name, node.op = op_name(output.name), "Identity"
        node.input.append(self._enter(result_name(twin.name), output))
        node.attr["T"].type = output.dtype.as_datatype_enum

    def _enter(self, source: TensorName, spec: Any) -> TensorName:
        """Return the name of the tensor on the GPU that has a number of the host's."""
        if source not in self._entered:
            prefix = f"{self._graph.traced.free_prefix}/entered_{len(self._entered)}"
            self._entered[source] = enter(self._definition, prefix, source, spec.dtype, spec.shape)
        return self._entered[source]


def enter(
    definition: tf.compat.v1.GraphDef, prefix: str, source: TensorName, dtype: tf.DType, shape: Sequence[int] = ()
) -> TensorName:
    """Bring a number, in a shape of one element, from the host's memory to the GPU's: as a kernel's parameter.

    Return the name of the tensor there, which has every bit of it; nodes of names that begin with `prefix` make it.
    """
    with tf.Graph().as_default() as graph, tf.device(_CPU):
        given = number = tf.compat.v1.placeholder(dtype, shape, "given")
        bits = _BITS.get(dtype, dtype)
        with tf.name_scope(prefix):
            if len(shape) > 0:
                number = tf.reshape(number, [])
            if bits != dtype:
                number = tf.bitcast(number, bits)
            number = tf.cast(number, tf.int64)
            step = tf.where(number < 0, tf.constant(1, tf.int64), tf.constant(-1, tf.int64))
            end = number + step  # towards zero, where no number overflows
            with tf.device(None):
                number = tf.cast(tf.range(number, end, step), bits)
                if bits != dtype:
                    number = tf.bitcast(number, dtype)
                # The last: a GPU's kernel of Reshape has int32 in the host's memory.
                number = tf.reshape(number, tf.constant(list(shape), tf.int32))
    for node in graph.as_graph_def().node:
        if node.name != given.op.name:
            node.input[:] = [source if name == given.op.name else name for name in node.input]
            definition.node.append(node)
    return number.name
