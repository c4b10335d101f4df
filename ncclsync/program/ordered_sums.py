"""Let a segment add up in one order, wherever and whenever it runs.

TensorFlow's op for a sum of three and more tensors begins with whichever tensor's memory it may reuse, and that depends
on which other readers of the tensors have run by then: what towers compute alike would differ in the last bit, and so
would a run that is repeated. Of two tensors the order does not matter. `ordered_threads.py` has what threads add up.
Source: tensorflow/core/kernels/aggregate_ops.cc, AddNOp.
"""

from typing import Any

import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.program.ordered_threads import adds_by_threads, call_ordered, rounds
from ncclsync.semantics.functions import CALLS, change_functions, is_compiled

_SUFFIX = "_ordered_sums"


def order_sums(definition: tf.compat.v1.GraphDef, on_cpu: bool) -> list[Any]:
    """Order the sums of a segment, in place, in functions too, except XLA's; return new functions."""
    new: dict[str, Any] = {}

    def order(nodes: Any, output: str) -> None:
        for node in filter(adds_by_threads, nodes if on_cpu else ()):
            function = call_ordered(node)
            new[function.signature.name] = function
        for call in (node for node in nodes if node.op in CALLS):
            call.attr["config_proto"].s = tf_compat.config_of_segments(call.attr["config_proto"].s)
        _add_two_at_a_time(nodes, output)

    order(definition.node, "")
    changed = change_functions(
        definition,
        _SUFFIX,
        lambda function: any(node.op in CALLS or _is_open(node) or adds_by_threads(node) for node in function.node_def),
        lambda function: order(function.node_def, ":sum:0"),
        but=is_compiled,
    )
    definition.library.function.extend(new.values())
    return [*changed, *new.values()]


def _is_open(node: Any) -> bool:
    """Return whether a node adds up tensors in an order that is open, and matters."""
    return node.op in ("AddN", "AccumulateNV2") and node.attr["N"].i > 2 and rounds(node.attr["T"])


def _add_two_at_a_time(nodes: Any, output: str) -> None:
    """Replace such nodes of a graph or a function; `output` follows a node's name where it is an input."""
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
