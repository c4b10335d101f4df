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

from ncclsync import ops, peers, private, private_optimizer
from ncclsync.compression import ErrorFeedback
from ncclsync.kinds import AFFINE, ROWS, SAME, Kind
from ncclsync.ops import Collective, Context
from ncclsync.optimizer_sharding import OptimizerSharding

# The towers' running sums of gradients; a tower may have got nothing from this batch, and much from others.
ACCUMULATED = Collective("all_reduce", "sum", empty_too=True)

_nested = threading.local()


@contextlib.contextmanager
def step_hooks(
    compression: ErrorFeedback | None = None, sharding: OptimizerSharding | None = None
) -> Iterator[None]:
    """What every step on towers needs: gradients of the whole batch, and scalars that count once."""
    with gradients_taped(), gradients_reduced(compression, sharding), scalars_weighed():
        yield


def gradients_taped() -> contextlib.AbstractContextManager[None]:
    """Let a tape differentiate the tower's part of the batch's loss, and add up the towers' parts.

    The part of a mean is the shard's mean times its share of the samples: so what flows back through the
    layers has the size that it has on one device, which matters in float16. Gradients with respect to
    variables are then added up, so that a step that clips, scales or logs them sees the batch's. An optimizer
    that gets them untouched takes the parts instead, and adds those up when it needs them: `of_shard`
    remembers.
    """

    def adding(gradient: Callable) -> Callable:
        @functools.wraps(gradient)
        def adding_gradient(self, target, sources, output_gradients=None, **kwargs):
            context = ops.current_context()
            if context is not None:
                peers.check_not_horovods(self)
            # In a branch or a loop nothing can be added up; the optimizer does it later. And a tape within a
            # gradient, which computes something again to differentiate it, is a part of that gradient.
            if context is None or not context.can_exchange() or _is_nested("gradient"):
                return gradient(self, target, sources, output_gradients, **kwargs)
            target, output_gradients = _parts(target, output_gradients, context)
            with context.differentiating(), _nesting("gradient"):
                gradients = gradient(self, target, sources, output_gradients, **kwargs)
            leaves, flat_sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
            shared = [isinstance(source, (tf.Variable, keras.Variable)) for source in flat_sources]
            for source, leaf, own in zip(flat_sources, leaves, shared, strict=True):
                if not own and tf.is_tensor(leaf) and context.kind_of(source) == Kind(ROWS):
                    context.note_kind([leaf], Kind(ROWS))
            rest = context.share.split_fraction()[1]
            leaves = [None if leaf is None else ops.scaled(leaf, rest) for leaf in leaves]
            parts = [leaf if own else None for leaf, own in zip(leaves, shared, strict=True)]
            with context.implied():
                totals = ops.add_gradients(parts)
            for i, total in enumerate(totals):
                if total is not None:
                    context.of_shard[id(total)] = total, leaves[i]
                    leaves[i] = total
            return tf.nest.pack_sequence_as(gradients, leaves)

        return adding_gradient

    return private.methods_wrapped([tf.GradientTape], "gradient", adding)


def _parts(target: Any, output_gradients: Any, context: Context) -> tuple[list[Any], list[Any]]:
    """Return what to differentiate, and with which gradients, for the tower's part of the batch's loss.

    A sum over the samples is such a part already, and so is a loss per sample, whose sum a tape takes.
    """
    targets = [leaf for leaf in tf.nest.flatten(target) if leaf is not None]
    if output_gradients is None:
        targets = [addend for leaf in targets for addend in _addends(leaf, context)]
        given = [tf.ones_like(leaf) for leaf in targets]
    else:
        given = [leaf for leaf in tf.nest.flatten(output_gradients) if leaf is not None]
    parts = []
    power, rest = context.share.split_fraction()
    for leaf, upstream in zip(targets, given, strict=True):
        kind = context.note_loss(leaf)
        adds_up = kind.is_sum or (leaf.shape.rank != 0 and not kind.is_mean)
        factor = 1.0 / rest if adds_up else power  # times `rest`, at the end
        parts.append(upstream * tf.cast(factor, upstream.dtype))
    return targets, parts


def _addends(target: tf.Tensor, context: Context) -> list[tf.Tensor]:
    """Take apart a sum over the samples and what else was added to it, such as a regularisation."""
    if context.kind_of(target).form != AFFINE or target.op.type not in ("Add", "AddV2", "AddN"):
        return [target]
    return [addend for part in target.op.inputs for addend in _addends(part, context)]


def gradients_reduced(
    compression: ErrorFeedback | None = None, sharding: OptimizerSharding | None = None
) -> contextlib.AbstractContextManager[None]:
    """Let every optimizer all-reduce its gradients before `apply`.

    Before, not within: clipping, loss scaling and weight decay then see the global gradient.

    Args:
        compression: what adds up gradients that come as a tape gave them; None: as they are.
        sharding: what adds up those that nobody looks at before the optimizer's state is updated.
    """

    def reducing(apply: Callable) -> Callable:
        @functools.wraps(apply)
        def reducing_apply(self, grads, trainable_variables=None, **kwargs):
            context = ops.current_context()
            if context is not None:
                peers.check_not_horovods(self)
            # One optimizer may wrap another, and a subclass calls its base: the outermost call reduces.
            if context is None or _is_nested("apply"):
                return apply(self, grads, trainable_variables, **kwargs)
            parts = [context.of_shard.get(id(gradient), (None, None))[1] for gradient in grads]
            with _nesting("apply"):
                if private_optimizer.accumulates(self):
                    return _apply_accumulated(apply, self, grads, parts, trainable_variables, context)
                # What no tape gave, or what the step has changed, counts by the samples.
                others = [g if part is None else None for g, part in zip(grads, parts, strict=True)]
                add_up = _adds_rows_up(self)
                with context.implied():
                    added = [None] * len(parts)
                    if compression is not None:
                        variables = private_optimizer.built_for(self, trainable_variables)
                        added = compression.add_up(parts, variables, context)
                        parts = [p if a is None else None for p, a in zip(parts, added, strict=True)]
                    left = [None] * len(parts)
                    if sharding is not None and not tf.executing_eagerly():
                        chosen = sharding.leave_addends(self, parts)
                        left = [p if one else None for p, one in zip(parts, chosen, strict=True)]
                        parts = [None if one else p for p, one in zip(parts, chosen, strict=True)]
                    rest = ops.add_gradients(parts, rows_add_up=add_up)
                    means = _means(others, context, add_up)
                sums = zip(added, left, rest, means, strict=True)
                reduced = [next((one for one in given if one is not None), None) for given in sums]
                return apply(self, reduced, trainable_variables, **kwargs)

        return reducing_apply

    return private.methods_wrapped(private.loaded_classes(keras.Optimizer), "apply", reducing)


def _adds_rows_up(optimizer: keras.Optimizer) -> bool:
    """Whether a repeated row of a sparse gradient is to an optimizer what the sum of its slices is.

    Not to one that clips or squares: Keras' do so with each slice by itself.
    """
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    return type(optimizer) is keras.optimizers.SGD and not any(clips)


def _means(gradients: Sequence[Any], context: Context, rows_add_up: bool) -> list[Any]:
    sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    dense = [None if is_sparse else g for g, is_sparse in zip(gradients, sparse, strict=True)]
    gathered = [
        _weighted(g, context) if is_sparse else None for g, is_sparse in zip(gradients, sparse, strict=True)
    ]
    means = ops.all_reduce(dense, op="mean")
    added = ops.add_gradients(gathered, rows_add_up=rows_add_up)
    return [m if g is None else g for m, g in zip(means, added, strict=True)]


def _weighted(gradient: Any, context: Context) -> Any:
    """Return the tower's part of a gradient that counts by the samples."""
    return ops.scaled(gradient, context.share.fraction)


def _apply_accumulated(
    apply: Callable,
    optimizer: keras.Optimizer,
    gradients: Sequence[Any],
    parts: Sequence[Any],
    variables: Any,
    context: Context,
) -> None:
    """Accumulate on each tower by itself, and add up once, when the optimizer is to update.

    The optimizer's accumulators become partial: what one device would have accumulated is their sum over
    the towers.
    """
    variables = private_optimizer.built_for(optimizer, variables)
    accumulators = private_optimizer.accumulators(optimizer, variables)
    running = {}
    for i, (gradient, part) in enumerate(zip(gradients, parts, strict=True)):
        if gradient is not None:
            private.set_partial(accumulators[i])
            part = tf.convert_to_tensor(_weighted(gradient, context) if part is None else part)
            part = context.share.of_samples(part)
            running[i] = accumulators[i] + tf.cast(part, accumulators[i].dtype)
    updates = private_optimizer.update_is_due(optimizer)
    totals = context.exchange(list(running.values()), ACCUMULATED, when=updates)
    reduced = dict(zip(running, totals, strict=True))
    with private_optimizer.accumulators_emptied(optimizer):
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
    of_whole = weight is None  # the shard counts as one
    weight = tf.ones([], values.dtype) if weight is None else tf.convert_to_tensor(weight)
    # With a scalar as weight, Keras reduces the values of the shard to a scalar too.
    if weight.shape.rank != 0 or (values.shape.rank != 0 and isinstance(metric, keras.metrics.Sum)):
        return values, weight
    fraction = context.share.fraction
    if context.kind_of(values).is_sum:
        values = values / tf.cast(fraction, values.dtype)
    if of_whole or context.kind_of(weight).form == SAME:
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
