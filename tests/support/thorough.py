"""How far a test goes that could go on for long: some of its combinations, or all with NCCLSYNC_THOROUGH=1."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("NCCLSYNC_THOROUGH") == "1"


def some(sample: T, everything: T) -> T:
    """Return what a test takes: a sample, or everything where it is to be thorough."""
    return everything if THOROUGH else sample


def paired(first: Sequence, second: Sequence) -> list[tuple]:
    """Parameters of two kinds: each of `first` with one of `second` in turn; all combinations where thorough."""
    return some(
        [(one, second[i % len(second)]) for i, one in enumerate(first)], [(a, b) for b in second for a in first]
    )
