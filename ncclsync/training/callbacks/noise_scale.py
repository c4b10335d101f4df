"""Put the gradient noise scale into the logs.

`gradients.noise_scale` estimates it.
"""

import logging
import math
from typing import Any

import keras
import numpy as np

from ncclsync.errors import NcclSyncError
from ncclsync.gradients.noise_scale import NoiseAverages
from ncclsync.training.loop import towers_of

logger = logging.getLogger("ncclsync")


class NoiseScale(keras.callbacks.Callback):
    """Put the gradient noise scale into progress bar and logs, while `fit` trains on towers.

    `noise_scale`, in samples, is the variance of a sample's gradient over the squared length of the true gradient,
    tr(covariance) / |gradient|^2. While batches are much smaller, doubling the batch halves the steps; once they are
    much larger, it saves few steps. With batches of this size training takes about twice the fewest possible steps, and
    twice the fewest possible samples. `suggested_batch_size` is the nearest multiple of the number of towers. Both
    usually grow during training.

    Both are NaN while the average of |gradient|^2 is not above 0, as in the first steps or in pure noise. Without an
    estimate the keys are absent, and a warning is logged once: with one tower, if one tower has all samples of every
    batch, or if no tape at the top level of a step differentiates with respect to variables. Steps whose gradient is
    not finite are left out.

    All gradients of the step's tapes form one vector; for a GAN, those of both models. They are the loss's gradients,
    with regularisation, before clipping, and without the factor of a `LossScaleOptimizer`. Each tower's gradient and
    the batch's are read once more per step. With gradient accumulation, `compression`, `shard_optimizer` and sparse
    gradients for `SGD`, the batch's gradient is all-reduced once more for the estimate.

    Source: McCandlish et al., 2018, arXiv:1812.06162, appendix A.1; here towers count by their samples.
    """

    def __init__(self, decay: float = 0.99) -> None:
        """Prepare.

        Args:
            decay: by which each step multiplies the averages of tr and |gradient|^2, from 0 to below 1: 0.99 averages
                over about the last hundred steps. Each `fit` begins new averages.

        Raises:
            ValueError: `decay` is no such number.
        """
        super().__init__()
        if isinstance(decay, bool) or not isinstance(decay, (int, float, np.number)) or not 0 <= decay < 1:
            raise ValueError(f"Expected decay to be a number from 0 to below 1. Received: {decay!r}")
        self._decay = decay
        self._warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Let the steps report their moments.

        Raises:
            NcclSyncError: the model runs eagerly.
        """
        if self.model.run_eagerly:
            raise NcclSyncError("Expected a step that is traced, where NoiseScale is used. Received: run_eagerly=True")
        if (averages := self._averages()) is not None:
            averages.start(self._decay)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Put the estimate into the logs of a batch."""
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the estimate into the logs of an epoch."""
        if not self._log(logs) and not self._warned:
            self._warned = True
            logger.warning(
                "NoiseScale has no estimate. Expected two towers or more that have samples, and gradients "
                "that a tape takes at the top level of the step. Received: %s",
                towers_of(self.model) or "a model without towers",
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Let steps leave the estimate out."""
        if (averages := self._averages()) is not None:
            averages.stop()

    def _averages(self) -> NoiseAverages | None:
        towers = towers_of(self.model)
        return None if towers is None or towers.layout.shards == 1 else towers.watch.noise

    def _log(self, logs: Any) -> bool:
        averages, towers = self._averages(), towers_of(self.model)
        ratio = None if averages is None else averages.ratio()
        if ratio is not None and towers is not None and logs is not None:
            logs["noise_scale"] = logs["suggested_batch_size"] = ratio
            if not math.isnan(ratio):
                logs["suggested_batch_size"] = max(1, round(ratio / len(towers))) * len(towers)
        return ratio is not None
