"""Programs that others have published give on towers what they give on one device, or say that they do not.

`pytest tests/programs --all -k NAME` runs one.
"""

import importlib
import pathlib

import harness
import numpy as np
import pytest
from thorough import some

for file in sorted(pathlib.Path(__file__).parent.glob("*.py")):
    if file.stem not in ("harness", pathlib.Path(__file__).stem):
        importlib.import_module(file.stem)

ONE_BY_ONE = [
    pytest.param(name, count, id=f"{name}-{count}", marks=[pytest.mark.programs_extra] * bool(made.extra))
    for name, made in harness.PROGRAMS.items()
    for count in some(made.towers[:1], made.towers)
]
COUPLED = [name for name, made in harness.PROGRAMS.items() if made.coupled]


@pytest.mark.programs
@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "towers"), ONE_BY_ONE)
def test_program(name, towers):
    """All that a program leaves is one device's, or the program is warned of."""
    made = harness.PROGRAMS[name]
    if made.extra:
        pytest.importorskip(made.extra, reason=f"{made.extra} is not installed: pip install {made.extra}")
    harness.check(made, towers)


@pytest.mark.programs
@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
def test_program_compares_samples(name):
    """A loss that compares samples is not the mean of its shards' losses: a wrong shard is seen."""
    made = harness.PROGRAMS[name]
    if made.extra:
        pytest.importorskip(made.extra, reason=f"{made.extra} is not installed: pip install {made.extra}")
    with harness.computing_in(made.floatx):
        whole, *parts = map(np.asarray, harness.first_losses(made, (3, 3, 2, 2)))
    mean = np.average(parts, axis=0, weights=(3, 3, 2, 2))
    for other in (mean, sum(parts)):
        assert np.any(np.abs(other - whole) > harness.SEEN * made.tolerance * np.abs(whole))


def test_programs_are_many():
    """The collection is not emptied by accident, and each program tells its source in its docstring."""
    assert len({made.make.__code__ for made in harness.PROGRAMS.values()}) >= 36
    assert all(made.make.__doc__ for made in harness.PROGRAMS.values())
