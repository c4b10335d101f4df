"""The gradient noise scale: how much the towers' own gradients differ, beside the one they add up to.

`gradient_moments` estimates it in the graph of a step, `NoiseAverages` holds running averages of that, and
`NoiseScale` puts them into the logs.
Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.1.
"""

import logging
import math
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops
from ncclsync.errors import NcclSyncError
from ncclsync.watch import Watch

logger = logging.getLogger("ncclsync")


def gradient_moments(watch: Watch) -> tf.Tensor | None:
    """Estimate, in the graph of a step, the samples' covariance and the true gradient, from one batch.

    Of a batch of B samples, of which each of M towers has n_i, with mean gradient g_i, and G = sum n_i/B g_i:
    E |g_i|^2 = |true|^2 + tr / n_i, and E |G|^2 = |true|^2 + tr / B. With each tower weighted by its samples,
    sum n_i/B |g_i|^2 - |G|^2 has the expectation (M - 1) tr / B, for shards of any sizes, and is never
    negative. All gradients of the step are taken as one vector.

    Returns:
        float32, [2], the same on all towers: tr, the trace of the covariance of one sample's gradient, and
        |true|^2, both without bias. Not finite if one tower has all samples. None if there is no gradient.
    """
    context = ops.current_context()
    if not watch.gradients or context is None:
        return None
    share = context.share
    # What the hooks have asked for already is exchanged once; `NoiseScale` says when they have not.
    sums = ops.whole(watch.gradients)
    part, whole = (
        tf.add_n([_squared_norm(g, scale) for g, scale in zip(gradients, watch.scales, strict=True)])
        for gradients in (ops.parts(watch.gradients), sums)  # n_i/B g_i, and their sum
    )
    weighted = tf.math.divide_no_nan(part, tf.cast(share.fraction, part.dtype))  # n_i/B |g_i|^2
    own = tf.stack([weighted, 1.0, tf.cast(share.rows, part.dtype)])
    weighted, towers, samples = tf.unstack(ops.all_reduce(own, op="sum"))
    trace = (weighted - whole) * samples / (towers - 1.0)
    return tf.stack([trace, whole - trace / samples])


def _squared_norm(gradient: Any, scale: tf.Tensor | None) -> tf.Tensor:
    """Return the sum of squares as a float32 scalar; slices of one row are added up before."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, places = tf.unique(gradient.indices)
        gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    if gradient.dtype.size < 4:
        gradient = tf.cast(gradient, tf.float32)
    square = tf.cast(2.0 * tf.nn.l2_loss(gradient), tf.float32)
    return square if scale is None else square / tf.square(tf.cast(scale, tf.float32))


class NoiseAverages:
    """Running averages of `gradient_moments` over steps.

    Attributes:
        active: whether steps are to tell them.
    """

    def __init__(self) -> None:
        """Be inactive."""
        self.active = False
        with tf.device("/CPU:0"):
            self._averages = tf.Variable(tf.zeros([3]), trainable=False)  # both; how many steps they are of
            self._decay = tf.Variable(0.0, trainable=False)

    def start(self, decay: float) -> None:
        """Begin anew, with the weight that the averages keep in each step."""
        self._averages.assign(tf.zeros([3]))
        self._decay.assign(decay)
        self.active = True

    def stop(self) -> None:
        """Let steps be without it."""
        self.active = False

    def update(self, moments: tf.Tensor) -> None:
        """Take in a step's moments, in its graph; nothing if they are not finite."""
        decay, before = self._decay.read_value(), self._averages.read_value()
        after = tf.concat([decay * before[:2] + (1.0 - decay) * moments, before[2:] + 1.0], 0)
        self._averages.assign(tf.where(tf.reduce_all(tf.math.is_finite(moments)), after, before))

    def ratio(self) -> float | None:
        """Return tr / |true|^2, in samples; NaN if the average of |true|^2 is not above 0; None if none."""
        # Both start from 0, so that both are too small by the same factor.
        trace, square, steps = self._averages.numpy().tolist()
        if not steps:
            return None
        return trace / square if square > 0 else float("nan")


class NoiseScale(keras.callbacks.Callback):
    """A callback that puts the gradient noise scale into progress bar and logs, while `fit` trains on towers.

    `noise_scale`, in samples: the variance of one sample's gradient over the squared length of the true one,
    tr(covariance) / |gradient|^2. While batches are much smaller, twice the batch makes half the steps; once
    they are much larger, it makes hardly fewer. At that size training takes about twice the fewest steps, and
    twice the fewest samples. `suggested_batch_size` is that size, as a multiple of the number of towers. As a
    rule both grow in the course of training.

    Both are NaN while the average of |gradient|^2 is not above 0, as it may be in the first steps, or where
    noise is all there is. The keys are absent, and a warning is logged once, where nothing can be told: with
    one tower, where one tower has all samples of every batch, or where no tape at the top level of a step
    differentiates with respect to variables. Steps whose gradient is not finite are left out.

    All gradients that the step's tapes take are seen as one vector; for a GAN, those of both models. They are
    those of the loss, with regularisation, before clipping; what a `LossScaleOptimizer` multiplies by is
    taken out. Each tower's gradient and the batch's are read once more per step. With gradient accumulation,
    `compression`, `shard_optimizer` and sparse gradients for `SGD`, the batch's gradient has to be
    all-reduced for it besides.

    Source: McCandlish et al., 2018, arXiv:1812.06162, appendix A.1; here towers count by their samples.
    """

    def __init__(self, decay: float = 0.99) -> None:
        """Prepare.

        Args:
            decay: the weight that the averages of tr and |gradient|^2 keep in each step, from 0 to below 1:
                0.99 averages over about the last hundred steps. Both start anew with each `fit`.

        Raises:
            ValueError: another `decay`.
        """
        super().__init__()
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(f"Expected decay to be a number from 0 to below 1. Received: {decay!r}")
        self._decay = decay
        self._warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Let the steps tell their moments.

        Raises:
            NcclSyncError: the model runs eagerly.
        """
        if self.model.run_eagerly:
            raise NcclSyncError(
                "Expected a step that is traced, where NoiseScale is used. Received: run_eagerly=True"
            )
        if (averages := self._averages()) is not None:
            averages.start(self._decay)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Put the estimate into the logs of a batch."""
        self._tell(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the estimate into the logs of an epoch."""
        if not self._tell(logs) and not self._warned:
            self._warned = True
            logger.warning(
                "NoiseScale can tell nothing. Expected two towers or more that have samples, and gradients "
                "that a tape takes at the top level of the step. Received: %s",
                getattr(self.model, "towers", "a model without towers"),
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Let the steps be without it."""
        if (averages := self._averages()) is not None:
            averages.stop()

    def _averages(self) -> NoiseAverages | None:
        towers = getattr(self.model, "towers", None)
        return None if towers is None or len(towers) == 1 else towers.noise

    def _tell(self, logs: Any) -> bool:
        averages = self._averages()
        ratio = None if averages is None else averages.ratio()
        if ratio is not None and logs is not None:
            towers = len(self.model.towers)
            logs["noise_scale"] = logs["suggested_batch_size"] = ratio
            if not math.isnan(ratio):
                logs["suggested_batch_size"] = max(1, round(ratio / towers)) * towers
        return ratio is not None
