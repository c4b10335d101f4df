"""`MpiCommunicator` gives the bits of `CpuCommunicator`."""

import pytest


@pytest.mark.parametrize("ranks", ["2,1", pytest.param("1,1,1,1", marks=pytest.mark.slow)])
def test_as_in_one_process(mpirun, ranks):
    """All collectives, operations and dtypes, small and large, in place and not."""
    count = len(ranks.split(","))
    done = mpirun(count, "collectives.py", ranks)
    assert done.stdout.count("equal on") == count, done.stdout + done.stderr
