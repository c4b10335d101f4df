"""Run BatchNormalization by each tower's own rows, as a choice; or by the batch's, in one exchange each way.

Of an input that every tower has whole, the moments are the batch's in any case. Without this hook they would be the
batch's of any input, in two exchanges each way.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import keras as keras_compat
from ncclsync.compat import tensorflow as tf_compat


@contextlib.contextmanager
def moments_of_layers(by_batch: bool = False) -> Iterator[None]:
    """Let `BatchNormalization` normalise by a tower's own rows; `by_batch`, or if `synchronized`, by the batch's."""

    forward: list[Any] = []  # accumulators of the step that are open

    def entering(enter, self):
        if ops.current_context() is not None:
            forward.append(self)
        return enter(self)

    def leaving(leave, self, *error):
        forward[:] = [one for one in forward if one is not self]
        return leave(self, *error)

    def meets() -> bool:
        """Return whether moments can be exchanged: at the top of a step, unless forward derivatives are asked for.

        TensorFlow computes the derivative of a function with a gradient of its own in another graph, without any mark.
        """
        context = ops.current_context()
        return context is not None and context.can_exchange() and not forward

    def choosing(moments, self, inputs, mask):
        if not meets():
            return moments(self, inputs, mask)
        if by_batch or self.synchronized:
            if not keras_compat.is_keras_own(moments):  # a user's: by ops of its own, or by Keras' own in turn
                return moments(self, inputs, mask)
            return batch_moments(inputs, keras_compat.reduction_axes(self), mask)
        inputs, mask = ops.to_local(inputs, mask, by_choice=True)
        return tuple(ops.from_local(list(moments(self, inputs, mask)), by_choice=True))

    def choosing_op(moments, x, axes, keepdims):
        if not meets():
            return moments(x, axes, keepdims)
        mean, variance = batch_moments(x, tf.nest.flatten(axes), None)
        return (_expanded(mean, x, axes), _expanded(variance, x, axes)) if keepdims else (mean, variance)

    classes = tf_compat.loaded_classes(keras.layers.BatchNormalization)
    with (
        tf_compat.methods_wrapped(classes, "_moments", choosing),
        tf_compat.methods_wrapped([keras_compat.nn_functions()], "_compute_moments_sync", choosing_op),
        tf_compat.methods_wrapped([tf.autodiff.ForwardAccumulator], "__enter__", entering),
        tf_compat.methods_wrapped([tf.autodiff.ForwardAccumulator], "__exit__", leaving),
    ):
        yield


def batch_moments(inputs: tf.Tensor, axes: Sequence[int], mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over the batch of which every tower has a shard; differentiable to any order.

    Each tower computes those of its shard, in two passes; one exchange brings them together. No difference
    of large squares is formed, as sums of squares over the towers would.
    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    1979, section 2.

    Args:
        inputs: of a floating dtype.
        axes: what the moments are taken over; among them 0, the samples.
        mask: bools, of one dimension less than `inputs`: which entries count. None: all.

    Returns:
        mean, variance: without `axes`; the same on all towers.
    """
    inputs, mask = ops.to_local(inputs, mask)
    moments = ops.stack(tf.stack(_shard_moments(inputs, axes, mask)))  # [N, 3, C]
    counts, means, squares = tf.unstack(moments, axis=1)  # [N, C] each
    # As Keras does: a batch of which nothing counts has a mean of zero.
    epsilon = 0.0 if mask is None else keras.backend.epsilon()
    whole = tf.reduce_sum(counts, 0) + epsilon  # [C], of the batch
    mean = tf.reduce_sum(counts * means, 0) / whole
    variance = tf.reduce_sum(squares + counts * tf.square(means - mean), 0) / whole
    # So that their gradients meet here, in one exchange, and not where each is first needed.
    mean, variance = ops.to_replicate([mean, variance])
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
