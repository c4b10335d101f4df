"""The draws of a traced step: those that the hooks of `randomness.py` have not seen, or not understood."""

import logging
from typing import Any

import tensorflow as tf

from ncclsync.errors import NcclSyncError
from ncclsync.program import user_line
from ncclsync.randomness import INSTEAD, SCOPE, SHAPE, misplaced_error, stateful_error

_STATELESS = tuple(
    f"Stateless{kind}"
    for kind in ("RandomU", "RandomN", "RandomGamma", "RandomB", "RandomP", "T", "M", "P", "Sh")
)

# Rows and other open lengths that a trace is probed with. Many models fold axes by a small factor, which
# must divide them; `_MARKER` is a prime that divides nothing else.
_MARKER = 1009
_OTHER = 48

_logger = logging.getLogger("ncclsync")


def check_draws(function: Any, batch_invariant: bool) -> None:
    """Look at the draws of a traced step for what the hooks cannot see.

    Args:
        function: the ConcreteFunction.
        batch_invariant: whether it was traced under `draws_of_whole_batch`. If not, a draw from hidden state
            is a warning, once per trace: CPU towers draw from one state in any order, GPUs draw the same.

    Raises:
        NcclSyncError: for a draw that the hooks have not seen, such as one in a loaded function or a raw op;
            for one in which the samples do not run along the first dimension.
    """
    definition = function.graph.as_graph_def()
    lines = {op.name: op.traceback for op in function.graph.get_operations()}
    nodes = [(node, None) for node in definition.node]
    nodes += [(node, f.signature.name) for f in definition.library.function for node in f.node_def]
    for node, within in nodes:
        stateful, stateless = "seed2" in node.attr, node.op.startswith(_STATELESS)
        if not stateful and not (stateless and batch_invariant and SCOPE not in node.name):
            continue
        place = f"in the function {within}" if within else f"at {user_line(lines[node.name])}"
        if not batch_invariant:
            _logger.warning(
                "%s, %s, draws from a state that TensorFlow hides: towers that share a device draw from it "
                "in any order, and those on devices of their own draw the same. %s.",
                *(node.op, place, INSTEAD),
            )
            return
        if stateful:
            raise stateful_error(node.op, place)
        raise NcclSyncError(
            "Expected all random numbers of a step to be drawn while it is traced, with "
            f"batch_invariant_random=True. Received: {node.op}, {place}, of a function traced before, "
            f"or by an op that cannot be asked for the whole batch. {INSTEAD}, in the step itself."
        )
    if batch_invariant:
        _check_dimensions(function, definition)


def _check_dimensions(function: Any, definition: tf.compat.v1.GraphDef) -> None:
    """Refuse draws whose open dimensions, other than the first, may run over the samples.

    What a dimension depends on is found by shape inference over the same graph, with a marker for the number
    of rows. There is nothing to find where the samples are all that is open.
    """
    shapes = {op.name: op.outputs[0].shape for op in function.graph.get_operations() if _is_shape(op)}
    count = len(function.inputs) - len(function.captured_inputs)
    names = [tensor.op.name for tensor in function.inputs]
    open_lengths = any(None in t.shape.as_list()[1:] for t in function.inputs[:count] if t.shape.rank)
    if not open_lengths and all(None not in shape.as_list()[1:] for shape in shapes.values()):
        return

    def probe():
        inputs = [_probe(tensor) for tensor in function.inputs[:count]]
        inputs += [tf.identity(tensor) for tensor in function.captured_inputs]  # as inputs of this graph
        given = {f"{name}:0": tensor for name, tensor in zip(names, inputs, strict=True)}
        found = tf.graph_util.import_graph_def(
            definition, given, [f"{name}:0" for name in shapes], name="probe"
        )
        inferred.extend(tensor.shape for tensor in found)

    inferred: list[tf.TensorShape] = []
    try:
        tf.function(probe, autograph=False).get_concrete_function()
    except ValueError:  # the probe's lengths do not suit the model: nothing is known
        inferred = [tf.TensorShape([None] * shape.rank) for shape in shapes.values()]
    for (name, shape), lengths in zip(shapes.items(), inferred, strict=True):
        rowed = [
            asked is None and (length is None or length % _MARKER == 0)
            for asked, length in zip(shape.as_list(), lengths.as_list(), strict=True)
        ]
        if any(rowed[1:]) or (shape[0] is None and not rowed[0]):
            raise misplaced_error(shape, user_line(function.graph.get_operation_by_name(name).traceback))


def _is_shape(op: tf.Operation) -> bool:
    return op.name.split("/")[-1].startswith(SHAPE) and SCOPE in op.name


def _probe(tensor: tf.Tensor) -> tf.Tensor:
    lengths = [
        _OTHER if length is None else length
        for length in (tensor.shape.as_list() if tensor.shape.rank else [])
    ]
    if lengths and tensor.shape[0] is None:
        lengths[0] = _OTHER * _MARKER
    return tf.compat.v1.placeholder(tensor.dtype, lengths)
