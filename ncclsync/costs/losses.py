"""Estimate the share of its time that a step loses because towers need all rows, name the lines, and suggest a remedy.

The estimate is a roofline's, for GPUs of one kind and links of one speed, so that it is the same wherever a program is
tried. Of an exchange only the bytes are counted, not that towers meet.
"""

import collections
import dataclasses

from ncclsync.costs.collective_time import collective
from ncclsync.costs.cost import StepWork
from ncclsync.costs.links import CLUSTERS
from ncclsync.costs.roofline import CUBIC, SORTS, seconds
from ncclsync.semantics import rules

LINK = "nvlink"  # of GPUs such as `roofline` knows
MOST_LOST = 0.05  # of a step's time; a smaller loss is not warned of
_NAMED = 3  # places

_INSTEAD = {
    rules.DRAWS: "draw fewer numbers for each row",
    rules.PRODUCTS: "compare each row with fewer others, or by fewer numbers for each row",
    CUBIC: "factorise a matrix of features by features, such as a product x^T x, which is summed over the rows",
    SORTS | {"Cumsum", "Unique", "UniqueV2"}: "sort, rank or add up along another axis than the batch's",
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
        share: of its time.
        places: those that lose most, first.
        towers: for so many.
    """

    share: float
    places: tuple[Loss, ...]
    towers: int

    def __str__(self) -> str:
        named = [one for one in self.places if one.share > self.share / 10][:_NAMED]
        ways = dict.fromkeys(
            next((instead for ops, instead in _INSTEAD.items() if one.op in ops), _OTHERWISE) for one in named
        )
        return (
            f"Exact, but an estimated {self.share:.0%} of a step's time on {self.towers} towers is lost, since each "
            f"needs the rows of all, at {'; at '.join(map(str, named))}. Instead, {'; '.join(ways)}. explain() lists "
            "all rows that reach every tower"
        )


def losses_of(work: StepWork, gradient_bytes: int, rows: int, towers: int) -> Losses:
    """Estimate what a step loses beside one in which each tower works on its own rows alone.

    Args:
        work: the step's.
        gradient_bytes: of what travels anyhow.
        rows: of the batch.
        towers: how many; at least 2.
    """
    if not work.wholes and not work.alike:
        return Losses(0.0, (), towers)
    cluster = CLUSTERS[LINK]

    def moved_s(kind: str, size: float) -> float:
        estimate = collective(kind, size / towers if kind == "all_gather" else size, towers, cluster)
        return estimate.seconds - estimate.latency_s

    ops: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    sizes, received, alike = (collections.defaultdict[str, float](float) for _ in range(3))
    for whole in work.wholes:
        took = moved_s(whole.kind, whole.size.at(rows))
        sizes[whole.place] += whole.size.at(rows)
        received[whole.place] += took
        ops[whole.place][whole.made] += took
    alike_s = 0.0
    for one in work.alike:
        whole_s, own_s = (float(seconds(one.work[None], rows, parts)[0]) for parts in (1, towers))
        alike[one.place] += whole_s - own_s
        ops[one.place][one.made] += whole_s - own_s
        alike_s += whole_s
    # Gradients travel while the towers compute.
    computed_s = float(seconds(work.own, rows, towers).sum()) + alike_s
    received_s = sum(received.values())
    step_s = max(computed_s, moved_s("all_reduce", gradient_bytes)) + received_s
    places = [
        Loss(
            place,
            max(found, key=lambda op: found[op]),
            int(sizes[place]),
            received[place] / step_s,
            alike[place] / step_s,
        )
        for place, found in ops.items()
        if place and sum(found.values())
    ]
    lost_s = received_s + sum(alike.values())
    return Losses(lost_s / step_s, tuple(sorted(places, key=lambda one: -one.share)), towers)
