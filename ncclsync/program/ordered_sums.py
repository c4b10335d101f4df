"""Let a segment add up three and more tensors in the order in which they are written.

TensorFlow's op for such a sum begins with whichever tensor's memory it may reuse, and that depends on which other
readers of the tensors have run by then: what towers compute alike would differ in the last bit, and so would a run that
is repeated. Of two tensors the order does not matter.
Source: tensorflow/core/kernels/aggregate_ops.cc, AddNOp.
"""

from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.semantics.functions import CALLS, change_functions, is_compiled

_SUFFIX = "_ordered_sums"
_ADDING = ("AddN", "AccumulateNV2")


def order_sums(definition: tf.compat.v1.GraphDef) -> list[Any]:
    """Replace each such sum, in place, by sums of two, in functions too, except XLA's; return new functions."""
    _order(definition.node, output="")
    return change_functions(
        definition,
        _SUFFIX,
        lambda function: any(node.op in CALLS or _is_open(node) for node in function.node_def),
        lambda function: _order(function.node_def, output=":sum:0"),
        but=is_compiled,
    )


def _is_open(node: Any) -> bool:
    """Return whether a node adds up in an order that is open, and matters."""
    if node.op not in _ADDING or node.attr["N"].i < 3:
        return False
    dtype = tf.as_dtype(node.attr["T"].type)
    return dtype.is_floating or dtype.is_complex


def _order(nodes: Any, output: str) -> None:
    """Order the sums among a graph's or a function's nodes; `output` follows a node's name where it is an input."""
    for call in (node for node in nodes if node.op in CALLS):
        call.attr["config_proto"].s = tf_compat.config_without_new_sums(call.attr["config_proto"].s)
    for last in [node for node in nodes if _is_open(node)]:
        addends = [name for name in last.input if not name.startswith("^")]
        controls = [name for name in last.input if name.startswith("^")]
        total = addends[0]
        for i, addend in enumerate(addends[1:-1]):
            added = nodes.add(name=f"{last.name}{_SUFFIX}_{i}", op="AddN", device=last.device, input=[total, addend])
            added.attr["T"].CopyFrom(last.attr["T"])
            added.attr["N"].i = 2
            total = f"{added.name}{output}"
        last.op = "AddN"
        last.attr["N"].i = 2
        last.attr.pop("shape", None)  # of AccumulateNV2
        del last.input[:]
        last.input.extend([total, addends[-1], *controls])
