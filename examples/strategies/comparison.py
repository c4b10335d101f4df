"""What the strategies' processes have found, compared: distances to one device, and what becomes of a last
batch.

Known without TensorFlow: weights come as files of NumPy's.
"""

import dataclasses

import numpy as np

from strategies.conditions import EQUAL


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy's line of the table.

    Attributes:
        name: of its file.
        system: what it is called in the table.
        accuracy: on the test data.
        distances: by condition; `None` where it raised.
        raised: by condition, where it raised.
        drops: whether the rows of an indivisible last batch that are left over were not trained on.
        step_s: median seconds of a step; of all rounds' mean steps.
        first_step_s: from building the model to the end of the first step, imports of further processes
            included.
        memory_bytes: peak resident memory, of all its processes together.
        moved_bytes, through, formula: what a step moves, on which way, by which formula.
        saves_plain: whether what a user saves is the plain model.
        why: causes by condition.
    """

    name: str
    system: str
    accuracy: float
    distances: dict
    raised: dict
    drops: bool
    step_s: float
    first_step_s: float
    memory_bytes: int
    moved_bytes: int
    through: str
    formula: str
    saves_plain: bool
    why: dict

    def last_batch(self):
        """What happens with an indivisible batch, in a few words."""
        distance = self.distances["last batch"]
        if distance is None:
            return "raises " + self.raised["last batch"].partition(":")[0]
        if distance <= EQUAL:
            return "exact"
        return "drops the rest" if self.drops else "other weights"


def read_weights(file):
    """Return the arrays of a file, in their order."""
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays.files]


def distance(weights, reference, start):
    """Return ‖weights − reference‖ / ‖reference − start‖ over all arrays: 1 is as far as training has
    come."""

    def norm(one, other):
        gaps = [a.astype("float64") - b for a, b in zip(one, other, strict=True)]
        return float(np.sqrt(sum(np.sum(gap * gap) for gap in gaps)))

    return norm(weights, reference) / norm(reference, start)


def compare(name, figures, found, reference, dropped):
    """Return a strategy's row.

    Args:
        name: of the strategy.
        figures: what its `Session.start`, `round` and `finish` have answered, in one dictionary.
        found: by condition, what its `Session.condition` has answered; any of the conditions.
        reference: the same of one device.
        dropped: one device's weights' file for a last batch without the rows that do not divide.

    Raises:
        ValueError: it did not start with the same weights as one device.
    """
    distances, raised = {}, {}
    for condition in found:
        if "raised" in found[condition]:
            distances[condition], raised[condition] = None, found[condition]["raised"]
            continue
        start, own_start = (read_weights(each[condition]["start"]) for each in (reference, found))
        if not all(np.array_equal(one, other) for one, other in zip(start, own_start, strict=True)):
            raise ValueError(f"Expected the same start. Received: other weights from {name}, {condition}")
        weights, target = (read_weights(each[condition]["weights"]) for each in (found, reference))
        distances[condition] = distance(weights, target, start)
    drops = False
    if distances.get("last batch") is not None:
        start = read_weights(reference["last batch"]["start"])
        weights = read_weights(found["last batch"]["weights"])
        drops = distance(weights, read_weights(dropped), start) <= EQUAL
    return Row(name=name, distances=distances, raised=raised, drops=drops, **figures)
