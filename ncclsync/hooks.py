"""What tapes, optimizers and metrics do differently inside a step on towers.

Each function returns a context manager that wraps a method of a class while a step is traced or runs
eagerly. Outside a step on towers the wrapped methods do what they always do. Losses and normalisation, which
divide by what a batch holds, are in `whole_batch.py`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops, private
from ncclsync.ops import Collective, Context

# The towers' running sums of gradients; a tower may have got nothing from this batch, and much from others.
ACCUMULATED = Collective("all_reduce", "sum", empty_too=True)

_nested = threading.local()


@contextlib.contextmanager
def step_hooks() -> Iterator[None]:
    """What every step on towers needs: gradients of the whole batch, and scalars that count once."""
    with gradients_taped(), gradients_reduced(), scalars_weighed():
        yield


def gradients_taped() -> contextlib.AbstractContextManager[None]:
    """Let a tape return the gradients of the whole batch with respect to variables.

    So a step that clips, scales or logs gradients by itself sees the global ones. An optimizer that gets
    them untouched takes the shard's instead, and reduces those when it needs them: `of_shard` remembers.
    """

    def reducing(gradient: Callable) -> Callable:
        @functools.wraps(gradient)
        def reducing_gradient(self, target, sources, *args, **kwargs):
            gradients = gradient(self, target, sources, *args, **kwargs)
            context = ops.current_context()
            # In a branch or a loop nothing can be reduced; a sum of such gradients is, by the optimizer.
            if context is None or not context.can_exchange():
                return gradients
            leaves = [
                leaf if isinstance(source, (tf.Variable, keras.Variable)) else None
                for source, leaf in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True)
            ]
            if any(leaf is not None for leaf in leaves):
                local = _of_mean(target, leaves, context)
                for i, (own, reduced) in enumerate(zip(local, ops.reduce_gradients(local), strict=True)):
                    context.of_shard[id(reduced)] = reduced, own
                    leaves[i] = reduced
            flat = tf.nest.flatten(gradients)
            chosen = [old if new is None else new for old, new in zip(flat, leaves, strict=True)]
            return tf.nest.pack_sequence_as(gradients, chosen)

        return reducing_gradient

    return private.methods_wrapped([tf.GradientTape], "gradient", reducing)


def _of_mean(target: Any, gradients: Sequence[Any], context: Context) -> list[Any]:
    """Return gradients as those of a mean over the shard: of a loss per sample, a tape takes the sum."""
    targets = [leaf for leaf in tf.nest.flatten(target) if leaf is not None]
    if all(leaf.shape.rank == 0 for leaf in targets):
        return list(gradients)
    fraction = context.share.fraction
    return [None if g is None else _scaled(g, 1.0 / tf.cast(fraction, g.dtype)) for g in gradients]


def gradients_reduced() -> contextlib.AbstractContextManager[None]:
    """Let every optimizer all-reduce its gradients before `apply`.

    Before, not within: clipping, loss scaling and weight decay then see the global gradient.
    """

    def reducing(apply: Callable) -> Callable:
        @functools.wraps(apply)
        def reducing_apply(self, grads, trainable_variables=None, **kwargs):
            context = ops.current_context()
            # One optimizer may wrap another, and a subclass calls its base: the outermost call reduces.
            if context is None or _is_nested("apply"):
                return apply(self, grads, trainable_variables, **kwargs)
            local = [context.of_shard.get(id(gradient), (None, gradient))[1] for gradient in grads]
            with _nesting("apply"):
                if private.accumulates(self):
                    return _apply_accumulated(apply, self, local, trainable_variables, context)
                return apply(self, ops.reduce_gradients(local), trainable_variables, **kwargs)

        return reducing_apply

    return private.methods_wrapped(private.loaded_classes(keras.Optimizer), "apply", reducing)


def _apply_accumulated(
    apply: Callable, optimizer: keras.Optimizer, gradients: list[Any], variables: Any, context: Context
) -> None:
    """Accumulate on each tower by itself, and reduce once, when the optimizer is to update.

    The optimizer's accumulators become partial: what one device would have accumulated is their sum over
    the towers.
    """
    variables = private.built_for(optimizer, variables)
    accumulators = private.accumulators(optimizer, variables)
    fraction = context.share.fraction
    running = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            private.set_partial(accumulators[i])
            weighted = tf.convert_to_tensor(gradient) * tf.cast(fraction, gradient.dtype)
            # A select: what a tower computed on a stand-in row may be NaN.
            weighted = tf.where(fraction > 0, weighted, tf.zeros_like(weighted))
            running[i] = accumulators[i] + tf.cast(weighted, accumulators[i].dtype)
    updates = private.update_is_due(optimizer)
    reduced = dict(
        zip(running, context.exchange(list(running.values()), ACCUMULATED, when=updates), strict=True)
    )
    with private.accumulators_emptied(optimizer):
        apply(optimizer, [reduced.get(i) for i in range(len(gradients))], variables)
    for i, total in running.items():
        accumulators[i].assign(tf.where(updates, tf.zeros_like(total), total))


def _scaled(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def scalars_weighed() -> contextlib.AbstractContextManager[None]:
    """Let a scalar that a mean is updated with count once per step, not once per tower.

    A scalar without a weight, such as the loss of a batch, stands for the tower's whole shard: its weight
    becomes the shard's share of the batch, so that the towers' scalars add up to the batch's mean.
    """

    def weighing(update: Callable) -> Callable:
        @functools.wraps(update)
        def weighed_update(self, values, sample_weight=None, **kwargs):
            context = ops.current_context()
            if context is not None and sample_weight is None:
                values = keras.ops.convert_to_tensor(values)
                if len(values.shape) == 0:
                    sample_weight = context.share.fraction
            return update(self, values, sample_weight, **kwargs)

        return weighed_update

    return private.methods_wrapped([keras.metrics.Mean, keras.metrics.Sum], "update_state", weighing)


def results_reduced() -> contextlib.AbstractContextManager[None]:
    """Let every metric compute its result from the sum of the towers' states (where no graph does that)."""

    def reducing(result: Callable) -> Callable:
        @functools.wraps(result)
        def reduced_result(self):
            if ops.current_context() is None or _is_nested("result") or not self.variables:
                return result(self)
            with _nesting("result"):
                states = ops.all_reduce([variable.value for variable in self.variables], op="sum")
                return self.stateless_result(states)

        return reduced_result

    return private.methods_wrapped(private.loaded_classes(keras.Metric), "result", reducing)


def _is_nested(what: str) -> bool:
    return getattr(_nested, what, False)


@contextlib.contextmanager
def _nesting(what: str) -> Iterator[Any]:
    setattr(_nested, what, True)
    try:
        yield
    finally:
        setattr(_nested, what, False)
