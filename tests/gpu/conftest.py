"""Skips these tests, with the reason, where there is no GPU; needs neither TensorFlow nor Keras."""

import os

import device_memory
import pytest


def _chosen_memory() -> str:
    name, reason = device_memory.choose()
    os.environ[device_memory.CHOICE] = name  # for the processes of this run
    return f"GPU tests: memory by {name}: {reason}"


def pytest_report_header():
    """Say where the memory comes from and why, or why nothing is run."""
    why_not = device_memory.missing()
    return f"GPU tests: skipped: {why_not}" if why_not else _chosen_memory()


@pytest.fixture(scope="session", autouse=True)
def _gpu():
    """A GPU, or the tests are skipped."""
    why_not = device_memory.missing()
    if why_not:
        pytest.skip(f"needs a GPU. Received: {why_not}")
    if device_memory.CHOICE not in os.environ:  # in a larger run, which has no header of these tests
        _chosen_memory()
