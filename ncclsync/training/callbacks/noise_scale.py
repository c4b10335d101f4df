"""Put the gradient noise scale into the logs.

`gradients.noise_scale` estimates it.
"""

import logging
import math
from typing import Any

import keras

from ncclsync.errors import NcclSyncError
from ncclsync.gradients.noise_scale import NoiseAverages
from ncclsync.training.loop import towers_of

logger = logging.getLogger("ncclsync")


class NoiseScale(keras.callbacks.Callback):
    """Put the gradient noise scale into progress bar and logs, while `fit` trains on towers.

    `noise_scale`, in samples: the variance of one sample's gradient over the squared length of the true one,
    tr(covariance) / |gradient|^2. While batches are much smaller, twice the batch makes half the steps; once
    they are much larger, it makes hardly fewer. At that size training takes about twice the fewest steps, and
    twice the fewest samples. `suggested_batch_size` is that size, as a multiple of the number of towers. As a
    rule both grow in the course of training.

    Both are NaN while the average of |gradient|^2 is not above 0, as it may be in the first steps, or where
    noise is all there is. The keys are absent, and a warning is logged once, where there is no estimate: with
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
        """Let the steps be without it."""
        if (averages := self._averages()) is not None:
            averages.stop()

    def _averages(self) -> NoiseAverages | None:
        towers = towers_of(self.model)
        return None if towers is None or towers.shards.total == 1 else towers.noise

    def _log(self, logs: Any) -> bool:
        averages, towers = self._averages(), towers_of(self.model)
        ratio = None if averages is None else averages.ratio()
        if ratio is not None and towers is not None and logs is not None:
            logs["noise_scale"] = logs["suggested_batch_size"] = ratio
            if not math.isnan(ratio):
                logs["suggested_batch_size"] = max(1, round(ratio / len(towers))) * len(towers)
        return ratio is not None
