"""ncclsync: towers from one trace, all-reduced by NCCL or, as here, by a CPU all-reduce of its own.

System: this repository.
Idea: the step is traced once, cut where gradients must meet, and laid out on every tower; what the towers
send is weighted by their numbers of samples. The decorator is all that changes.
Here: `exact=True`, an option of the decorator, makes every `BatchNormalization` of the unchanged
model normalise by the whole batch. Without it each tower normalises by its own shard, with a warning.

What it got wrong: what is listed under "Limits" in ncclsync/README.md. One host and one process.
"""

from typing import ClassVar

from ncclsync import nccl_parallel
from strategies.strategy import TrainingStrategy
from strategies.task import compiled


class Strategy(TrainingStrategy):
    """The decorator, and `fit`."""

    SYSTEM = "ncclsync, exact=True"
    THROUGH = "host memory, peer to peer; NCCL on GPUs"
    FORMULA = "2·(N − 1)·(P + 3·S), as a ring: a normalisation's sums are three times as large as its averages"
    WHY: ClassVar = {}

    def __init__(self, build, towers):
        """As `TrainingStrategy`."""
        self.model = nccl_parallel(towers=towers, exact=True)(lambda: compiled(build()))()

    @staticmethod
    def bytes_moved(sizes, towers):
        """As `FORMULA`."""
        return 2 * (towers - 1) * (sizes.parameters + 3 * sizes.statistics)

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`."""
        self.model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    def close(self):
        """Free the other towers."""
        self.model.towers.close()
