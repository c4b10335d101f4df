"""Keras on one device: what all others are measured by.

System: Keras 3, https://keras.io. Idea: one model, one device, `fit`.
What it got wrong: nothing here; it leaves the other devices idle.
"""

from typing import ClassVar

from strategies.strategy import TrainingStrategy
from strategies.task import compiled


class Strategy(TrainingStrategy):
    """`compile` and `fit`."""

    SYSTEM = "Keras, one device"
    THROUGH = "nothing"
    FORMULA = "0"
    WHY: ClassVar = {}

    def __init__(self, build, towers):
        """Build the model; `towers` has no meaning here."""
        self.model = compiled(build())

    @staticmethod
    def bytes_moved(sizes, towers):
        """Nothing moves."""
        return 0

    def train(self, x, y, batch_size):
        """As `TrainingStrategy.train`."""
        self.model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
