"""Find what a step draws from: generators, whose state is a variable, and states that TensorFlow hides."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.source_lines import user_line
from ncclsync.errors import NcclSyncError
from ncclsync.ops import current_context
from ncclsync.semantics.functions import drops_nothing
from ncclsync.sharding.exactness import Inexact
from ncclsync.sharding.roles import mark_random_state

_INSTEAD = "draw with keras.random or tf.random.stateless_*"


def draws_seen() -> contextlib.AbstractContextManager[None]:
    """Mark the state of each `SeedGenerator` that is drawn from while a step is traced."""

    def drawing(draw: Callable, generator: keras.random.SeedGenerator, *args: Any, **kwargs: Any) -> Any:
        if current_context() is not None:
            mark_random_state(tf_compat.backend_variable(generator.state))
        return draw(generator, *args, **kwargs)

    return tf_compat.methods_wrapped(tf_compat.loaded_classes(keras.random.SeedGenerator), "next", drawing)


def check_draws(graph: tf.Graph, definition: tf.compat.v1.GraphDef, refuses: bool) -> Inexact | None:
    """Refuse, or warn of, random draws in a traced step that no seed repeats.

    Args:
        graph: of the step.
        definition: its GraphDef.
        refuses: whether what is drawn must not depend on the towers, as with `exact`, `shards`,
            `on_oom` and `audit_every`. If not, a draw from hidden state is to be warned of: CPU towers draw from one
            state in any order.

    Returns:
        What is to be warned of; None: nothing draws from hidden state.

    Raises:
        NcclSyncError: for a draw from hidden state, if it `refuses` them.
    """
    nodes: list[tuple[Any, str | None]] = [(node, None) for node in definition.node]
    nodes += [(node, f.signature.name) for f in definition.library.function for node in f.node_def]
    for node, within in nodes:
        attributes = dict(node.attr)
        # The hits that a sampled softmax looks for have seeds that their kernel does not read.
        draws = "seed2" in attributes and node.op != "ComputeAccidentalHits" and not drops_nothing(node)
        repeats = "deterministic" in attributes and any(attributes[name].i for name in ("seed", "seed2"))
        noisy = "noise" in attributes and attributes["noise"].s in (b"uniform", b"gaussian")
        if not (draws and not repeats) and not noisy:
            continue
        if within is None:
            place = f"at {user_line(graph.get_operation_by_name(node.name).traceback)}"
        else:
            place = f"in the function {within}"
        if refuses:
            raise NcclSyncError(
                "Expected random numbers drawn from a seed or a generator, with exact=True, "
                f"shards=, on_oom= or audit_every=. Received: {node.op}, whose state TensorFlow hides, {place}: "
                f"{_INSTEAD}"
            )
        reason = "draws from a state that TensorFlow hides: towers that share a device draw from it in any order, and "
        reason += "those on devices of their own draw the same"
        return Inexact(f"{node.op}, {place}", reason, _INSTEAD)
    return None
