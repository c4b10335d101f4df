"""`TcpCommunicator` gives the bits of `CpuCommunicator`."""

import pytest


@pytest.mark.parametrize("ranks", ["2,1", pytest.param("1,1,1,1", marks=pytest.mark.slow)])
def test_as_in_one_process(mpirun, ranks):
    """All collectives, operations and dtypes, small and large, in place and not."""
    count = len(ranks.split(","))
    done = mpirun(count, "collectives.py", ranks)
    assert done.stdout.count("equal on") == count, done.stdout + done.stderr


@pytest.mark.slow
def test_message_of_more_than_two_gibibytes(mpirun):
    """As of an embedding of 8.5 million rows: Linux takes no more at once."""
    done = mpirun(2, "large.py")
    assert done.stdout.count(f"has {(1 << 31) + 12_345} bytes") == 2, done.stdout + done.stderr
