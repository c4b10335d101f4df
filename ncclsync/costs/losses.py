"""Estimate the share of its time that a step loses because towers need all rows, name the lines, and suggest a remedy.

The estimate is a roofline's, for GPUs of one kind and links of one speed, or for cores of one kind that all towers
share, so that it is the same wherever a program is tried. Of an exchange only the bytes are counted, not that towers
meet.
"""

import collections
import dataclasses

import numpy as np

from ncclsync.costs.collective_time import collective
from ncclsync.costs.cost import StepWork
from ncclsync.costs.links import CLUSTERS
from ncclsync.costs.roofline import CUBIC, GPU, SORTS, START_S, Machine, seconds
from ncclsync.semantics import rules

LINK = "nvlink"  # of GPUs such as `roofline` knows
MOST_LOST = 0.05  # of a step's time; a smaller loss is not warned of
_NAMED = 3  # places
# Of a core, beside a step's ops: what calls a step takes, and what calls a segment on each tower, as starts of ops.
_STEP_STARTS, _SEGMENT_STARTS = 300, 24

_INSTEAD = {
    rules.DRAWS: "draw fewer numbers for each row",
    rules.PRODUCTS: "compare each row with fewer others, or by fewer numbers for each row",
    CUBIC: "factorise a matrix of features by features, such as a product x^T x, which is summed over the rows",
    SORTS | {"Cumsum"}: "sort, rank or add up along another axis than the batch's",
}
_OTHERWISE = "compute there what each row needs by itself, or of fewer numbers"


@dataclasses.dataclass(frozen=True)
class Loss:
    """Describe what one place of a step loses.

    Attributes:
        place: the user's line, or the layer.
        op: the type of its op that loses most.
        size_bytes: of rows that each tower receives for it.
        received: the share of the step's time that they take.
        alike: the share of the step's time by which every tower computes more than its own rows there.
    """

    place: str
    op: str
    size_bytes: int
    received: float
    alike: float

    @property
    def share(self) -> float:
        """Return the share of the step's time that is lost."""
        return self.received + self.alike

    def __str__(self) -> str:
        parts = [f"{self.size_bytes:,} bytes of rows reach every tower ({self.received:.1%})"] * (self.size_bytes > 0)
        if self.alike > self.share / 10:
            parts.append(f"every tower computes it for all rows ({self.alike:.1%})")
        return f"{self.place}: {self.op}, {', '.join(parts)}"


@dataclasses.dataclass(frozen=True)
class Losses:
    """Describe what a step loses.

    Attributes:
        places: those that lose most, first.
        towers: for so many.
        shared: whether they have one device's cores.
        starts: the share of its time by which towers start more ops than one device; 0 if they do not share cores.
        same: the share of its time by which they do more of what has no rows; 0 if they do not share cores.
    """

    places: tuple[Loss, ...]
    towers: int
    shared: bool = False
    starts: float = 0.0
    same: float = 0.0

    @property
    def needed(self) -> float:
        """Return the share of the step's time that is lost since towers need the rows of all."""
        return sum(one.share for one in self.places)

    @property
    def share(self) -> float:
        """Return the share of the step's time that is lost."""
        return self.needed + self.starts + self.same

    @property
    def by_cores(self) -> str:
        """Say what towers lose because they share one device's cores; "" if they do not."""
        starts, same = self.starts, self.same
        parts = {
            f"{starts:.0%} by starting ops on each tower (larger batches or fewer towers lose less)": starts,
            f"{same:.0%} by updating all weights on each tower (so do fewer towers, or shard_optimizer=True)": same,
        }
        return " and ".join(part for part, share in parts.items() if share >= 0.01)

    def __str__(self) -> str:
        named = [one for one in self.places if one.place and one.share > self.needed / 10][:_NAMED]
        ways = dict.fromkeys(
            next((instead for ops, instead in _INSTEAD.items() if one.op in ops), _OTHERWISE) for one in named
        )
        since = f": {self.by_cores}, and {self.needed:.0%}" if self.by_cores else ","
        return (
            f"Exact, but an estimated {self.share:.0%} of a step's time on {self.towers} "
            f"{'CPU towers' if self.shared else 'GPUs'} is lost{since} since each needs the rows of all, at "
            f"{'; at '.join(map(str, named))}. Instead, {'; '.join(ways)}. explain() lists "
            "all rows that reach every tower"
        )


def losses_of(
    work: StepWork, gradient_bytes: int, rows: int, towers: int, segments: int = 1, machine: Machine = GPU
) -> Losses:
    """Estimate what a step loses beside one in which each tower works on its own rows alone.

    Args:
        work: the step's.
        gradient_bytes: of what travels anyhow.
        rows: of the batch.
        towers: how many; at least 2.
        segments: into which the step is cut.
        machine: `GPU`, one for each tower, or `CORE`, which all share.
    """
    cluster = CLUSTERS[LINK]

    def moved_s(kind: str, size: float) -> float:
        if machine.shared:
            return size / machine.bytes_per_s
        estimate = collective(kind, size / towers if kind == "all_gather" else size, towers, cluster)
        return estimate.seconds - estimate.latency_s

    ops: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    sizes, received, alike = (collections.defaultdict[str, float](float) for _ in range(3))
    for whole in work.wholes:
        took = moved_s(whole.kind, whole.size.at(rows))
        sizes[whole.place] += whole.size.at(rows)
        received[whole.place] += took
        ops[whole.place][whole.made] += took
    works = np.concatenate([work.own, work.same, *(one.work[None] for one in work.alike)])
    once_s, own_s = (seconds(works, rows, parts, machine) for parts in (1, towers))  # [2, ops]
    begin, first = len(work.own), len(works) - len(work.alike)
    own_s[:, begin:first] = once_s[:, begin:first]  # slices of sparse gradients have rows
    for one, more in zip(work.alike, (once_s - own_s)[:, first:].sum(axis=0).tolist(), strict=True):
        alike[one.place] += more
        ops[one.place][one.made] += more
    computed_s, received_s = own_s.sum() + sum(alike.values()), sum(received.values())
    sent_s = moved_s("all_reduce", gradient_bytes)
    starts_s = same_s = 0.0
    if machine.shared:
        calls_s, step_s = segments * _SEGMENT_STARTS * START_S, _STEP_STARTS / towers * START_S
        starts_s, same_s = (own_s - once_s / towers).sum(axis=1) + np.array([calls_s, sent_s])
        step_s += computed_s + sent_s + calls_s
    else:  # gradients travel while the towers compute
        step_s = max(computed_s, sent_s)
    step_s = step_s + received_s or 1.0  # of a step without work nothing is lost
    places = [
        Loss(
            place,
            max(found, key=lambda op: found[op]),
            int(sizes[place]),
            received[place] / step_s,
            alike[place] / step_s,
        )
        for place, found in ops.items()
        if sum(found.values())
    ]
    places.sort(key=lambda one: -one.share)
    return Losses(tuple(places), towers, machine.shared, starts_s / step_s, same_s / step_s)
