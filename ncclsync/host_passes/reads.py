"""Read the small variables of a segment by one op: of a thousand of them a step's time is that of its ops."""

from collections.abc import Iterator, Sequence

import tensorflow as tf

from ncclsync.ops.host_ops import set_attribute
from ncclsync.program.graph import StepGraph
from ncclsync.program.segment import Rewrite, same_device, sparse_reads

_SMALL = 4096  # elements


def reads_together(graph: StepGraph, ops: Sequence[str]) -> list[Rewrite]:
    """Return how a segment of these ops reads small variables at its beginning.

    The reads wait for no op of the segment, so that together they are in no circle.
    """
    inside, apart = set(ops), sparse_reads(graph, ops)

    def is_early(name: str) -> bool:
        if graph.by_name[name].type != "ReadVariableOp" or name in apart or inside.intersection(graph.controls[name]):
            return False
        variable = graph.variable_of.get(graph.inputs[name][0])
        if variable is None or not same_device(variable.device, graph.home_device):
            return False
        return variable.shape.is_fully_defined() and variable.shape.num_elements() <= _SMALL

    reads = [name for name in ops if is_early(name)]
    handles = tuple(graph.inputs[name][0] for name in reads)

    def nodes(prefix: str) -> Iterator[tf.compat.v1.NodeDef]:
        every = tf.compat.v1.NodeDef(name=prefix, op="_ReadVariablesOp", input=handles)
        set_attribute(every, "N", len(reads))
        set_attribute(every, "dtypes", [graph.spec(f"{name}:0").dtype for name in reads])
        yield every
        for i, name in enumerate(reads):  # TensorFlow runs no identity
            one = tf.compat.v1.NodeDef(name=name, op="Identity", input=[f"{prefix}:{i}"])
            set_attribute(one, "T", graph.spec(f"{name}:0").dtype)
            one.attr["_output_shapes"].list.shape.add().CopyFrom(graph.spec(f"{name}:0").shape.as_proto())
            yield one

    return [Rewrite(frozenset(reads), handles, nodes)] if reads[1:] else []
