"""Estimate the gradient noise scale: how much the towers' gradients differ, beside their sum.

`gradient_moments` estimates it in the graph of a step, `NoiseAverages` holds running averages of that, and
`NoiseScale` puts them into the logs.
Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.1.
"""

import functools
import logging
from typing import Any

import tensorflow as tf

from ncclsync import ops
from ncclsync.gradients.observer import Observer

logger = logging.getLogger("ncclsync")


def gradient_moments(observer: Observer) -> tf.Tensor | None:
    """Estimate, in the graph of a step, the samples' covariance and the true gradient, from one batch.

    A batch has B samples, each of M towers n_i of them, with the mean gradient g_i. With G = sum n_i/B g_i,
    E |g_i|^2 = |true|^2 + tr / n_i, and E |G|^2 = |true|^2 + tr / B. With each tower weighted by its samples,
    sum n_i/B |g_i|^2 - |G|^2 has the expectation (M - 1) tr / B, for shards of any sizes, and is never
    negative. All gradients of the step form one vector.

    Returns:
        float32, [2], the same on all towers: tr, the trace of the covariance of a sample's gradient, and |true|^2, both
        without bias. Not finite if one tower has all samples. None without gradients.
    """
    context = ops.current_context()
    if not observer.gradients or context is None:
        return None
    share = context.share
    # Sums that the hooks exchange are not exchanged again; `NoiseScale` says when there are no such sums.
    sums = ops.whole(observer.gradients)
    part, whole = (
        tf.add_n([_squared_norm(g, scale) for g, scale in zip(gradients, observer.scales, strict=True)])
        for gradients in (ops.parts(observer.gradients), sums)  # n_i/B g_i, and their sum
    )
    weighted = tf.math.divide_no_nan(part, tf.cast(share.fraction, part.dtype))  # n_i/B |g_i|^2
    terms = tf.stack([weighted, 1.0, tf.cast(share.rows, part.dtype)])
    weighted, towers, samples = tf.unstack(ops.all_reduce(terms, op="sum"))
    trace = (weighted - whole) * samples / (towers - 1.0)
    return tf.stack([trace, whole - trace / samples])


def _squared_norm(gradient: Any, scale: tf.Tensor | None) -> tf.Tensor:
    """Return the sum of squares as a float32 scalar; slices of one row are added up first."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, places = tf.unique(gradient.indices)
        gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    if gradient.dtype.size < 4:
        gradient = tf.cast(gradient, tf.float32)
    square = tf.cast(2.0 * tf.nn.l2_loss(gradient), tf.float32)
    return square if scale is None else square / tf.square(tf.cast(scale, tf.float32))


class NoiseAverages:
    """Keep running averages of `gradient_moments` over steps."""

    def __init__(self) -> None:
        """Begin inactive, without variables: most runs never start."""
        self.active = False  # whether steps update the averages

    @functools.cached_property
    def _averages(self) -> tf.Variable:  # of tr and |true|^2; and the number of steps
        with tf.device("/CPU:0"):
            return tf.Variable(tf.zeros([3]), trainable=False)

    @functools.cached_property
    def _decay(self) -> tf.Variable:
        with tf.device("/CPU:0"):
            return tf.Variable(0.0, trainable=False)

    def start(self, decay: float) -> None:
        """Begin anew; each step multiplies the averages by `decay`."""
        self._averages.assign(tf.zeros([3]))
        self._decay.assign(decay)
        self.active = True

    def stop(self) -> None:
        """Let steps leave the averages alone."""
        self.active = False

    def update(self, moments: tf.Tensor) -> tf.Operation:
        """Add a step's moments to the averages, if they are finite, by an op of its graph that the step must run."""
        decay, before = self._decay.read_value(), self._averages.read_value()
        after = tf.concat([decay * before[:2] + (1.0 - decay) * moments, before[2:] + 1.0], 0)
        kept = tf.where(tf.reduce_all(tf.math.is_finite(moments)), after, before)
        return self._averages.assign(kept, read_value=False)

    def ratio(self) -> float | None:
        """Return tr / |true|^2, in samples; NaN if the average of |true|^2 is not above 0; None before any step."""
        # Both averages start from 0, and are too small by the same factor.
        trace, square, steps = self._averages.numpy().tolist()
        if not steps:
            return None
        return trace / square if square > 0 else float("nan")
