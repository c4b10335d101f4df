"""Begin residual blocks as the identity: `zero_last_gamma`."""

from collections.abc import Sequence
from typing import Any

import keras

from ncclsync.compat import keras as keras_compat


def zero_last_gamma(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Let each residual block begin as the identity: set gamma of its last `BatchNormalization` to zeros.

    Blocks are found by structure: an `Add` (a layer, or `+`) joins a shortcut and a longer branch that ends with a
    `BatchNormalization`, perhaps followed by dropout. The longer branch has more layers since the fork; a normalisation
    of the shortcut, as after a projection, stays. Branches of equal length are no residual block, and a branch that
    ends with an activation is not changed: after a ReLU a gamma of zero would never move. Models within the model are
    searched, too. Call it on a new model, before training.

    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 5.1.

    Args:
        model: functional, or a model that holds functional models.

    Returns:
        The layers whose gamma it has set to zero, in the order of the model.

    Raises:
        TypeError: no Keras model.
        ValueError: the model has no such block.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a keras.Model. Received: {model!r}")
    found = []
    for inner in [model, *keras_compat.layers_of(model)]:
        for call in _history(keras_compat.calls_at_end(inner)):
            last = _last_normalisation(call) if keras_compat.adds(call) else None
            if last is not None and last not in found:
                found.append(last)
    if not found:
        raise ValueError(
            "Expected a functional model with residual blocks: an Add of a shortcut and a longer branch that "
            f"ends with a BatchNormalization that has a gamma. Received: {model.name!r}, which has none"
        )
    for layer in found:
        layer.gamma.assign(keras.ops.zeros_like(layer.gamma))
    return found


def _last_normalisation(addition: Any) -> keras.layers.BatchNormalization | None:
    """Return the normalisation that ends the longer branch of an addition; None if there is none."""
    branches = addition.parent_nodes
    if len(branches) < 2:
        return None
    histories = [set(_history([branch])) for branch in branches]
    shared = set.intersection(*histories)
    lengths = [len(history - shared) for history in histories]
    longest = lengths.index(max(lengths))
    if lengths.count(lengths[longest]) > 1:
        return None
    end = branches[longest]
    while isinstance(end.operation, keras.layers.Dropout):  # SpatialDropout too, which derives from it
        (end,) = end.parent_nodes
    layer = end.operation
    return layer if isinstance(layer, keras.layers.BatchNormalization) and layer.gamma is not None else None


def _history(ends: Sequence[Any]) -> list[Any]:
    """Return calls and the calls that they depend on, dependencies first."""
    found: dict[Any, None] = {}
    queue = [*ends]
    while queue:
        call = queue.pop()
        missing = [one for one in call.parent_nodes if one not in found]
        if missing:
            queue += [call, *missing]
        else:
            found[call] = None  # at its first place, if it is there already
    return list(found)
