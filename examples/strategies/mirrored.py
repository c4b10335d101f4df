"""tf.distribute.MirroredStrategy: replicas on threads, mirrored variables.

System: TensorFlow's own (https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy), by
Keras 3's `fit`.
Idea: variables made in `strategy.scope()` are mirrored on all devices; the step runs once per replica, each
on a thread, which meet where values are merged. All-reduce is NCCL's on GPUs, and TensorFlow's own ring on
CPUs.

What it got wrong, with Keras 3.15 and TensorFlow 2.21:
- The batch is cut by `tf.data`. Where the first batch has an odd row, `fit` raises: to learn the shapes it
  adds up the replicas' parts (keras#19246). A later batch that is odd is taken, and each replica's mean loss
  counts the same: a mean of means (tensorflow#36224).
- `BatchNormalization` normalises by replica unless it is told `synchronized=True`; then it is exact. If not
  told, its moving averages have no aggregation: each replica goes its own way, `predict` gives a row the
  result of whichever replica it falls to, and the first one's are saved.
- Optimizers clip and accumulate before the replicas' gradients are added up (tensorflow#33929, keras#17429).
- The step is traced once per replica: the first step takes N times as long.
- A second strategy in the same process fails: its collectives get the first one's keys (tensorflow#61314).
"""

from typing import ClassVar

import tensorflow as tf

from strategies.strategy import TrainingStrategy, tower_devices
from strategies.task import compiled


class Strategy(TrainingStrategy):
    """`fit` in the strategy's scope."""

    SYSTEM = "tf.distribute.MirroredStrategy"
    THROUGH = "peer to peer: a ring, NCCL's on GPUs"
    FORMULA = "2·(N − 1)·P: each replica sends, and receives, 2·(N − 1)/N·P"
    WHY: ClassVar = {
        "batch norm": "each replica normalises by its own part; the moving averages are the first replica's",
        "last batch": "a mean of means: replicas count the same, whatever their numbers of samples",
    }

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self._strategy = tf.distribute.MirroredStrategy(tower_devices(towers))
        with self._strategy.scope():
            self.model = compiled(build())

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * (towers - 1) * sizes.parameters

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`."""
        with self._strategy.scope():
            self.model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
