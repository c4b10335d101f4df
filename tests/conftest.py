"""What every test needs before TensorFlow is first imported."""

import os

# Only errors: TensorFlow says on import that it found no GPU. Subprocesses inherit it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_report_header():
    """Say which rows of the parity tables are not run, and how they are."""
    if os.environ.get("NCCLSYNC_ALL_ROWS") != "1":
        return "parity tables: every third row of the large ones, for time; NCCLSYNC_ALL_ROWS=1 runs all"
    return "parity tables: all rows"
