"""Find out whether an optimizer updates each element of a weight independently of the other elements."""

import keras
import numpy as np
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import keras_optimizers
from ncclsync.semantics.rules import ELEMENTWISE

# Ops that write a variable, and `IdentityN`, which passes its inputs on.
_APART = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "IdentityN"})

# Different lengths, so that no axis can be taken for another.
_LENGTHS = (6, 5, 4, 3, 2, 2, 2)


def find_coupling(optimizer: keras.Optimizer, ranks: set[int]) -> str | None:
    """Return what couples the elements of a weight in an optimizer's update, in words; None if nothing does.

    A twin of it is traced on one small weight of each rank, since an optimizer may treat ranks differently. Every op
    that computes with an array is checked.

    Args:
        optimizer: of any class; it is not changed.
        ranks: of the weights that it will update.
    """
    twin = keras_optimizers.twin_of(optimizer)
    twin.ema_overwrite_frequency = None  # a branch that copies averages to weights
    shapes = [_LENGTHS[:rank] for rank in sorted(ranks)]
    weights = [keras.Variable(np.zeros(shape, "float32"), name=f"weight_{len(shape)}") for shape in shapes]
    twin.build(weights)
    for name, slots in sorted(keras_optimizers.slots_of(twin).items()):
        for weight, state in zip(weights, slots, strict=True):
            if state is None or state.shape != weight.shape:
                kept = "nothing" if state is None else f"{tuple(state.shape)}"
                return f"it keeps {kept} in {name!r} for a weight of shape {tuple(weight.shape)}"
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]

    @tf.function(input_signature=specs, autograph=False)
    def update(*gradients):
        keras_optimizers.apply_gradients(twin, gradients, weights)

    with ops.running_in(None):
        graph = update.get_concrete_function().graph
    for op in graph.get_operations():
        if (found := _coupling_of(op)) is not None:
            return found
    return None


def _coupling_of(op: tf.Operation) -> str | None:
    arrays = {tuple(t.shape) for t in op.inputs if t.dtype != tf.resource and t.shape.rank}
    if not arrays or op.type in _APART:
        return None
    results = {tuple(t.shape) for t in op.outputs}
    if op.type in ELEMENTWISE | {"ReadVariableOp"} and len(arrays) == 1 and results == arrays:
        return None
    return f"its update computes {op.type} ({op.name}) of {' and '.join(map(str, sorted(arrays)))}"
