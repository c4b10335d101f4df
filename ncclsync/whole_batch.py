"""What is of the whole batch, not of the shard: what losses and normalisation divide by, states, summaries.

Each function returns a context manager, as in `hooks.py`. A mean over samples needs none of this, since the
means of shards are combined by the shards' samples. What is normalised by anything else does: by masks or
weights, by the batch's mean and variance, or by a comparison of the samples with each other.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops, private, private_keras
from ncclsync.kinds import ROWS, SAME, Kind


@contextlib.contextmanager
def whole_batch_hooks() -> Iterator[None]:
    """Let losses, synchronised normalisation, stateful RNNs and summaries see the whole batch."""
    with (
        masks_counted(),
        losses_divided(),
        losses_gathered(),
        moments_synchronized(),
        states_divided(),
        summaries_written_once(),
    ):
        yield


def masks_counted() -> contextlib.AbstractContextManager[None]:
    """Let a mean over masked values divide by the number of valid ones in the whole batch.

    Keras weighs what a mask leaves by total / valid; both become sums over the towers.
    """

    def counting(apply_mask: Callable) -> Callable:
        @functools.wraps(apply_mask)
        def counted_mask(sample_weight, mask, dtype, reduction):
            averages = reduction in ("mean", "sum_over_batch_size")
            context = ops.current_context()
            if context is None or mask is None or not averages:
                return apply_mask(sample_weight, mask, dtype, reduction)
            counts = [keras.ops.size(mask), keras.ops.sum(keras.ops.cast(mask, "int32"))]
            with context.implied():
                total, valid = ops.all_reduce([keras.ops.cast(count, dtype) for count in counts], op="sum")
            return apply_mask(sample_weight, mask, dtype, "sum") * keras.ops.divide_no_nan(total, valid)

        return counted_mask

    return private.methods_wrapped([private_keras.loss_functions()], "apply_mask", counting)


def losses_divided() -> contextlib.AbstractContextManager[None]:
    """Let a loss that is a sum, or a mean by weights, be that of the whole batch.

    Gradients and losses of shards are combined as means are, weighted by each shard's share of the samples.
    So what is to be added up is divided by that share. (A tower without samples divides by zero, and is left
    out.)
    """

    def dividing(reduce_values: Callable) -> Callable:
        @functools.wraps(reduce_values)
        def divided_values(values, sample_weight=None, reduction="sum_over_batch_size"):
            context = ops.current_context()
            by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
            by_weight = by_weight and len(values.shape) > 0
            if context is None or not (by_weight or reduction == "sum"):
                return reduce_values(values, sample_weight, reduction)
            loss = reduce_values(values, sample_weight, "sum")
            if by_weight:
                weight = keras.ops.cast(keras.ops.sum(sample_weight), loss.dtype)
                with context.implied():
                    weight = ops.all_reduce(weight, op="sum")
                loss = keras.ops.divide_no_nan(loss, weight)
            return loss / keras.ops.cast(context.share.fraction, loss.dtype)

        return divided_values

    return private.methods_wrapped([private_keras.loss_functions()], "reduce_values", dividing)


def losses_gathered() -> contextlib.AbstractContextManager[None]:
    """Let a loss that mixes the samples of a batch be computed from those of all towers, on each tower."""

    def gathering(call: Callable) -> Callable:
        @functools.wraps(call)
        def gathered_call(self, y_true, y_pred, sample_weight=None):
            context = ops.current_context()
            if context is None or not _mixes_samples(self):
                return call(self, y_true, y_pred, sample_weight)
            mask = private_keras.mask_of(y_pred)
            if mask is not None:
                raise ValueError(
                    f"Expected no mask on the outputs of {type(self).__name__}. Received: {mask}"
                )
            with context.implied():
                gathered = ops.all_gather([y_true, y_pred, sample_weight])
            with ops.running_in(None):  # from here on this is the whole batch
                return call(self, *gathered)

        return gathered_call

    return private.methods_wrapped([keras.losses.Loss], "__call__", gathering)


def _mixes_samples(loss: keras.losses.Loss) -> bool:
    """Whether it is one of Keras' that do, given to `compile` as an object, by name or as a function."""
    function, arguments = private_keras.wrapped_function(loss)
    if function in (keras.losses.dice, keras.losses.tversky):
        axis = arguments.get("axis")
        return axis is None or 0 in tf.nest.flatten(axis)
    return function is keras.losses.circle


@contextlib.contextmanager
def moments_synchronized() -> Iterator[None]:
    """Let `BatchNormalization(synchronized=True)` normalise by the mean and variance of the whole batch."""

    def synchronizing(moments: Callable) -> Callable:
        @functools.wraps(moments)
        def synchronized_moments(self, inputs, mask):
            context = ops.current_context()
            if context is None:
                return moments(self, inputs, mask)
            if not self.synchronized:
                with context.taken_as(Kind(SAME)):
                    return moments(self, inputs, mask)
            return batch_moments(inputs, private_keras.reduction_axes(self), mask)

        return synchronized_moments

    def synchronizing_op(moments: Callable) -> Callable:
        @functools.wraps(moments)
        def synchronized_moments(x, axes, keepdims):
            if ops.current_context() is None:
                return moments(x, axes, keepdims)
            mean, variance = batch_moments(x, tf.nest.flatten(axes), None)
            return (_expanded(mean, x, axes), _expanded(variance, x, axes)) if keepdims else (mean, variance)

        return synchronized_moments

    classes = private.loaded_classes(keras.layers.BatchNormalization)
    with (
        private.methods_wrapped(classes, "_moments", synchronizing),
        private.methods_wrapped([private_keras.nn_functions()], "_compute_moments_sync", synchronizing_op),
    ):
        yield


def states_divided() -> contextlib.AbstractContextManager[None]:
    """Let a stateful RNN keep the states of the whole batch; a tower works on its samples' rows of them."""

    def dividing(call: Callable) -> Callable:
        @functools.wraps(call)
        def divided_call(self, sequences, initial_state=None, **kwargs):
            context = ops.current_context()
            if context is None or not self.stateful:
                return call(self, sequences, initial_state, **kwargs)
            share = context.share
            if initial_state is None:
                begin = _begin_within(keras.tree.flatten(self.states)[0].shape[0], share)
                rows = slice(begin, begin + share.rows)
                initial_state = keras.tree.map_structure(lambda state: state.value[rows], self.states)
            with private_keras.states_replaced(self, functools.partial(_GatheredState, context)):
                return call(self, sequences, initial_state, **kwargs)

        return divided_call

    return private.methods_wrapped([keras.layers.RNN], "call", dividing)


def _begin_within(rows: int, share: ops.Share) -> tf.Tensor:
    """Return where the tower's samples begin in a state, which has a row for each sample of the batch."""
    same = tf.debugging.assert_equal(
        share.total,
        rows,
        f"Expected the global batch size that the inputs of a model with a stateful RNN declare, {rows}, as "
        "batch_size= counts for MirroredStrategy's fit (for Horovod, each process has its own).",
    )
    with tf.control_dependencies([same]):
        return tf.identity(share.begin)


class _GatheredState:
    """Takes what a layer assigns to a state for the tower's rows, and assigns the whole batch's."""

    def __init__(self, context: ops.Context, state: keras.Variable) -> None:
        self._context = context
        self._state = state

    def assign(self, rows: tf.Tensor) -> None:
        with self._context.implied():
            gathered = ops.all_gather(rows)
        self._state.assign(tf.ensure_shape(gathered, self._state.shape))


def summaries_written_once() -> contextlib.AbstractContextManager[None]:
    """Let a summary within a step be written by tower 0 alone, with the batch's value."""

    def writing(write: Callable) -> Callable:
        @functools.wraps(write)
        def written_once(tag, tensor, *args, **kwargs):
            context = ops.current_context()
            if context is None or not context.can_exchange():
                return write(tag, tensor, *args, **kwargs)
            value = _of_batch(tf.convert_to_tensor(tensor() if callable(tensor) else tensor), context)
            return tf.cond(
                tf.equal(context.share.tower, 0),
                lambda: write(tag, value, *args, **kwargs),
                lambda: tf.constant(False),
            )

        return written_once

    return private.methods_wrapped([tf.summary], "write", writing)


def _of_batch(value: tf.Tensor, context: ops.Context) -> tf.Tensor:
    kind = context.kind_of(value)
    if kind.form == ROWS:
        return ops.all_gather(value)
    if kind.collective is not None:
        return ops.all_reduce(value, kind.collective.op)
    return ops.all_reduce(value) if value.dtype.is_floating else value


def synchronize_batch_norm(model: keras.Model) -> None:
    """Set `synchronized=True` on every `BatchNormalization` of a model."""
    for layer in private_keras.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True


def batch_moments(inputs: tf.Tensor, axes: Sequence[int], mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over the batch of which every tower has a shard; differentiable to any order.

    Each tower computes those of its shard, in two passes; one exchange brings them together. No difference
    of large squares is formed, as sums of squares over the towers would.
    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    1979, section 2.

    Args:
        inputs: the shard, of a floating dtype.
        axes: what the moments are taken over; among them 0, the samples.
        mask: bools, of one dimension less than `inputs`: which entries count. None: all.

    Returns:
        mean, variance: without `axes`; the same on all towers.
    """
    context = ops.current_context()
    with contextlib.nullcontext() if context is None else context.taken_as(Kind(SAME)):
        shard = _shard_moments(inputs, axes, mask)
    with contextlib.nullcontext() if context is None else context.implied():
        moments = ops.stack(tf.stack(shard))  # [N, 3, C]
    counts, means, squares = tf.unstack(moments, axis=1)  # [N, C] each
    # As Keras does: a batch of which nothing counts has a mean of zero.
    epsilon = 0.0 if mask is None else keras.backend.epsilon()
    whole = tf.reduce_sum(counts, 0) + epsilon  # [C], of the batch
    mean = tf.reduce_sum(counts * means, 0) / whole
    variance = tf.reduce_sum(squares + counts * tf.square(means - mean), 0) / whole
    return mean, variance


def _shard_moments(inputs: tf.Tensor, axes: Sequence[int], mask: Any) -> list[tf.Tensor]:
    """Count, mean and sum of squared differences from that mean, [C] each."""
    weights = tf.ones_like(inputs)
    if mask is not None:
        weights *= tf.cast(tf.cast(mask, tf.bool), inputs.dtype)[..., tf.newaxis]
        inputs = tf.where(weights > 0, inputs, tf.zeros_like(inputs))
    count = tf.reduce_sum(weights, axes)  # [C], of this shard
    mean = tf.math.divide_no_nan(tf.reduce_sum(inputs, axes), count)
    square = tf.square(inputs - _expanded(mean, inputs, axes)) * weights
    return [count, mean, tf.reduce_sum(square, axes)]


def _expanded(moments: tf.Tensor, inputs: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Put back, of length 1, the `axes` of `inputs` that were reduced away."""
    for axis in sorted(axis % len(inputs.shape) for axis in axes):
        moments = tf.expand_dims(moments, axis)
    return moments
