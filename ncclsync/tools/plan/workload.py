"""Describe the compute and the messages of a training step, however they were found."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Message:
    """Describe a bucket that all GPUs exchange."""

    kind: str  # of `ops.Collective`, such as "all_reduce"
    ready: float  # the share of its stage's compute after which it can be sent, 0 to 1
    size_bytes: float  # of a GPU's part
    bytes_per_sample: float = 0.0  # additional bytes for each sample of a GPU's batch, if rows are gathered

    def bytes_of(self, batch: float) -> float:
        """Return one GPU's bytes with `batch` samples per GPU."""
        return self.size_bytes + batch * self.bytes_per_sample


@dataclasses.dataclass(frozen=True)
class Stage:
    """Describe a part of the step after which all messages must have arrived."""

    share: float  # of the step's compute; those of all stages add up to 1
    messages: tuple[Message, ...] = ()  # in the order in which they are exchanged


@dataclasses.dataclass(frozen=True)
class Compute:
    """Hold the seconds of a step on one GPU by its batch: fixed_s + batch · per_sample_s."""

    fixed_s: float
    per_sample_s: float

    def of(self, batch: float) -> float:
        """Return the seconds of a step on `batch` samples."""
        return self.fixed_s + batch * self.per_sample_s


def fit_compute(seconds: Mapping[int, float]) -> Compute:
    """Return the line through the seconds of steps by batch that is nearest, without negative parts.

    Args:
        seconds: at least one; of a single batch size, all time counts as proportional to it.

    Raises:
        ValueError: there are none, or a time or a batch is not positive.
    """
    if not seconds or not all(b > 0 and 0 < s < math.inf for b, s in seconds.items()):
        raise ValueError(f"Expected positive seconds of positive batches. Received: {dict(seconds)}")
    if len(seconds) == 1:
        ((batch, one),) = seconds.items()
        return Compute(0.0, one / batch)
    # Relative to each time, so that a small batch counts as much as a large batch. The least squares are at the free
    # optimum if that is not negative, otherwise on one of the axes.
    points = [(1 / s, b / s) for b, s in seconds.items()]
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(p[i] for p in points) for i in (0, 1))
    determinant = aa * bb - ab * ab
    free = Compute((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant)
    lines = [free, Compute(0.0, b / bb), Compute(a / aa, 0.0)]

    def error(line: Compute) -> float:
        return sum((line.of(batch) / s - 1) ** 2 for batch, s in seconds.items())

    return min((one for one in lines if min(one.fixed_s, one.per_sample_s) >= 0), key=error)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Describe a step of training."""

    compute: Compute  # of the whole step on one GPU
    stages: tuple[Stage, ...]  # in order

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages of all stages."""
        return tuple(message for stage in self.stages for message in stage.messages)
