"""The wait for the GPUs' own work before a collective: long enough, and it ends; by events or by a thread."""

import time

import pytest
from test_nccl_failures import opened, reduce_ones

from ncclsync import nccl_communicator
from ncclsync.communicator import NcclCommunicator
from ncclsync.errors import NcclError, NcclTimeoutError

pytestmark = pytest.mark.timeout(60)


def test_own_work_is_waited_for(any_standin):
    """On every device, longer than a slice; a second wait begins anew."""
    comm = opened()
    for device in (4, 2):
        any_standin.fail(f"working:{device}=150")
        began = time.monotonic()
        reduce_ones(comm)
        assert time.monotonic() - began >= 0.15
    any_standin.count("cuCtxRecordEvent", "cudaDeviceSynchronize", "ncclGroupEnd")
    reduce_ones(comm)
    assert any_standin.counted() in ([3, 0, 1], [0, 3, 1])
    comm.close()


def test_own_work_that_never_ends(any_standin, monkeypatch):
    """The error tells on which GPU, within the limit, though nothing can be freed yet; it is joined anew only
    when it has been."""
    monkeypatch.setattr(nccl_communicator, "ABORT_WAIT_S", 0.1)
    before, comm = any_standin.alive(), opened(timeout_s=0.2)
    any_standin.fail("working:0")
    began = time.monotonic()
    with pytest.raises(NcclTimeoutError) as caught:
        reduce_ones(comm, label="bucket 1 of 1")
    assert 0.2 <= time.monotonic() - began < 3
    assert str(caught.value) == (
        "Expected the GPUs' own work before all-reduce 1 (bucket 1 of 1) of 20 bytes (5 × float32) to end. "
        "Received: it has not within 0.2 s: rank 1 (GPU 0) still busy. The communicator is aborted"
    )
    assert comm.closed and comm.failure is caught.value
    assert any_standin.alive() != before
    with pytest.raises(
        NcclTimeoutError, match=r"abort of the earlier communicator on GPUs \[4, 0, 2\] to end"
    ):
        comm.reopen()
    any_standin.fail("")
    comm.timeout_s = 5.0
    comm.reopen()
    assert comm.failure is None
    reduce_ones(comm)
    comm.close()
    assert any_standin.settled(before) == before


def test_own_work_before_the_preflight(any_standin, monkeypatch):
    """Is no sign of a bad path: its causes are not named; the joining itself does not wait for it."""
    monkeypatch.setattr(nccl_communicator, "ABORT_WAIT_S", 0.1)
    any_standin.fail("working:3")
    with pytest.raises(NcclTimeoutError) as caught:
        NcclCommunicator([2, 3], timeout_s=0.2)
    assert "Expected the GPUs' own work before the preflight to end" in str(caught.value)
    assert "rank 1 (GPU 3) still busy" in str(caught.value) and "P2P" not in str(caught.value)


def test_own_work_that_fails(any_standin):
    """A kernel's error shows when its end is waited for; it is told with the collective that waited."""
    comm = opened()
    any_standin.fail("cudaDeviceSynchronize:2=700,cudaEventQuery:2=700")
    with pytest.raises(NcclError) as caught:
        reduce_ones(comm)
    assert caught.value.call in ("cudaDeviceSynchronize", "cudaEventQuery")
    assert caught.value.during.startswith("the GPUs' own work before all-reduce 1 of 20 bytes")
    assert comm.closed
