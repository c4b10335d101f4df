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
from ncclsync.kinds import AFFINE, COUNT
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
        def reducing_gradient(self, target, sources, output_gradients=None, **kwargs):
            context = ops.current_context()
            flat_sources = tf.nest.flatten(sources)
            shared = [isinstance(source, (tf.Variable, keras.Variable)) for source in flat_sources]
            # In a branch or a loop nothing can be reduced; a sum of such gradients is, by the optimizer.
            if context is None or not context.can_exchange() or not any(shared):
                return gradient(self, target, sources, output_gradients, **kwargs)
            if all(shared) and output_gradients is None:
                target, output_gradients = _as_means(tf.nest.flatten(target), context)
            gradients = gradient(self, target, sources, output_gradients, **kwargs)
            leaves = tf.nest.flatten(gradients)
            local = [leaf if own else None for leaf, own in zip(leaves, shared, strict=True)]
            for i, reduced in enumerate(ops.reduce_gradients(local)):
                if reduced is not None:
                    context.of_shard[id(reduced)] = reduced, leaves[i]
                    leaves[i] = reduced
            return tf.nest.pack_sequence_as(gradients, leaves)

        return reducing_gradient

    return private.methods_wrapped([tf.GradientTape], "gradient", reducing)


def _as_means(targets: Sequence[Any], context: Context) -> tuple[list[Any], list[Any]]:
    """Return what to differentiate, and with which gradients, for shards' gradients to combine as means.

    A sum over the samples is divided by the shard's share of them; a tape takes a loss per sample as a sum.
    """
    addends = [addend for target in targets if target is not None for addend in _addends(target, context)]
    gradients = []
    for addend in addends:
        kind = context.note_loss(addend)
        one = tf.ones_like(addend)
        adds_up = kind.is_sum or (addend.shape.rank != 0 and not kind.is_mean)
        gradients.append(one / tf.cast(context.share.fraction, one.dtype) if adds_up else one)
    return addends, gradients


def _addends(target: tf.Tensor, context: Context) -> list[tf.Tensor]:
    """Take apart a sum over the samples and what else was added to it, such as a regularisation."""
    if context.kind_of(target).form != AFFINE or target.op.type not in ("Add", "AddV2", "AddN"):
        return [target]
    return [addend for part in target.op.inputs for addend in _addends(part, context)]


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


def scalars_weighed() -> contextlib.AbstractContextManager[None]:
    """Let a scalar that a mean is updated with count once per step, not once per tower.

    A scalar, such as the loss of a batch, stands for the tower's whole shard: its weight is multiplied by the
    shard's share of the batch, unless it counts samples already, so that the towers' scalars add up to the
    batch's mean. A sum over the samples is divided by that share.
    """

    def weighing(update: Callable) -> Callable:
        @functools.wraps(update)
        def weighed_update(self, values, sample_weight=None, **kwargs):
            context = ops.current_context()
            if context is not None and tf.is_tensor(values):
                values, sample_weight = _weighed(self, values, sample_weight, context)
            return update(self, values, sample_weight, **kwargs)

        return weighed_update

    return private.methods_wrapped([keras.metrics.Mean, keras.metrics.Sum], "update_state", weighing)


def _weighed(metric: keras.Metric, values: tf.Tensor, weight: Any, context: Context) -> tuple[tf.Tensor, Any]:
    if weight is None and values.shape.rank != 0:
        return values, weight  # one value per sample
    weight = tf.ones([], values.dtype) if weight is None else tf.convert_to_tensor(weight)
    # With a scalar as weight, Keras reduces the values of the shard to a scalar too.
    if weight.shape.rank != 0 or (values.shape.rank != 0 and isinstance(metric, keras.metrics.Sum)):
        return values, weight
    fraction = context.share.fraction
    if context.kind_of(values).is_sum:
        values = values / tf.cast(fraction, values.dtype)
    if context.kind_of(weight).form != COUNT:
        weight = tf.cast(weight, fraction.dtype) * fraction
    return values, weight


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
