"""Find towers that hold other values: by a checksum of each variable, and by the distance of two values.

It knows nothing of towers: `TowerState` gives it each variable's copies, and acts on what it finds.
"""

import collections
from collections.abc import Sequence


class Sentinel:
    """Count training steps, and say when the towers are to be compared, or audited.

    Attributes:
        repairs: whether what differs is to be repaired; else it is an error.
        steps: counted so far.
    """

    def __init__(self, check_every: int | None, on_divergence: str, audit_every: int | None = None) -> None:
        """Start before the first step.

        Args:
            check_every, on_divergence, audit_every: see `Health`.
        """
        self._check_every, self._audit_every = check_every, audit_every
        self.repairs = on_divergence == "repair"
        self.steps = 0
        self._audited = 0  # steps, up to the last audit

    @property
    def active(self) -> bool:
        """Return whether steps are to be counted."""
        return self._check_every is not None or self._audit_every is not None

    def is_audit_due(self, steps: int) -> bool:
        """Return whether the next call, of so many steps, is to be an audit."""
        every = self._audit_every
        return every is not None and (self.steps + steps) // every > self._audited // every

    def remember_audit(self, steps: int) -> None:
        """Remember that a call has been one, of so many steps that are not counted yet."""
        self._audited = self.steps + steps

    def is_due(self, steps: int) -> bool:
        """Count `steps` more; return whether they include one after which to compare."""
        before, self.steps = self.steps, self.steps + steps
        return self._check_every is not None and self.steps // self._check_every > before // self._check_every


def outliers(checksums: Sequence[int]) -> tuple[int, ...]:
    """Return the towers that differ from most others; from tower 0, where no value is that of most.

    Args:
        checksums: [N] of one variable, as each tower holds it.
    """
    common, count = collections.Counter(checksums).most_common(1)[0]
    expected = common if 2 * count > len(checksums) else checksums[0]
    return tuple(tower for tower, one in enumerate(checksums) if one != expected)
