"""Ranks and their GPUs: whose memory a buffer is, and the wait for the GPUs' own work before a collective.

The wait is long enough, and it ends.
"""

import contextlib
import ctypes
import time

import numpy as np
import pytest
from test_nccl_failures import opened, reduce_ones

from ncclsync.communicator import NcclCommunicator, nccl, nccl_calls
from ncclsync.errors import NcclError, NcclTimeoutError

pytestmark = pytest.mark.timeout(60)


def test_own_work_is_waited_for(standin):
    """On every device, longer than a slice; a second wait begins anew."""
    comm = opened()
    for device in (4, 2):
        standin.fail(f"working:{device}=150")
        began = time.monotonic()
        reduce_ones(comm)
        assert time.monotonic() - began >= 0.15
    standin.count("cuCtxRecordEvent", "cudaDeviceSynchronize", "ncclGroupEnd")
    reduce_ones(comm)
    assert standin.counted() == [3, 0, 1]
    comm.close()


def test_own_work_that_never_ends(standin, monkeypatch):
    """The error tells on which GPU, within the limit, though nothing can be freed yet; it is joined anew only
    when it has been."""
    monkeypatch.setattr(nccl, "ABORT_WAIT_S", 0.1)
    before, comm = standin.alive(), opened(timeout_s=0.2)
    standin.fail("working:0")
    began = time.monotonic()
    with pytest.raises(NcclTimeoutError) as caught:
        reduce_ones(comm, label="bucket 1 of 1")
    assert 0.2 <= time.monotonic() - began < 20
    assert str(caught.value) == (
        "Expected the GPUs' own work before all-reduce 1 (bucket 1 of 1) of 20 bytes (5 × float32) to end. "
        "Received: it has not within 0.2 s: rank 1 (GPU 0) still busy. The communicator is aborted"
    )
    assert comm.closed and comm.failure is caught.value
    assert standin.alive() != before
    with pytest.raises(NcclTimeoutError, match=r"abort of the earlier communicator on GPUs \[4, 0, 2\] to end"):
        comm.reopen()
    standin.fail("")
    comm.timeout_s = 5.0
    comm.reopen()
    assert comm.failure is None
    reduce_ones(comm)
    comm.close()
    assert standin.settled(before) == before


def test_own_work_before_the_end(standin, monkeypatch):
    """To close a communicator is to free memory, which waits for that work: not for ever either."""
    monkeypatch.setattr(nccl, "ABORT_WAIT_S", 0.1)
    comm = opened(timeout_s=0.2)
    standin.fail("working:2")
    with pytest.raises(NcclTimeoutError, match=r"GPUs' own work before the end of a communicator to end"):
        comm.close()
    assert comm.closed


def test_late_failure_of_an_abort(standin, monkeypatch):
    """Of one that nobody waited for: told by who joins the ranks anew, once."""
    monkeypatch.setattr(nccl, "ABORT_WAIT_S", 0.05)
    comm = opened(timeout_s=0.05)
    standin.fail("working:0,cudaEventDestroy:2")
    with pytest.raises(NcclTimeoutError):
        reduce_ones(comm)
    standin.fail("cudaEventDestroy:2")
    comm.timeout_s = 5.0
    with pytest.raises(NcclError, match="cudaEventDestroy"):
        comm.reopen()
    comm.reopen()
    reduce_ones(comm)
    comm.close()


@pytest.mark.parametrize("when", ["before the preflight", "within it"])
def test_own_work_before_the_preflight(standin, monkeypatch, when):
    """Is no sign of a bad path: its causes are not named. The joining itself does not wait for it."""
    monkeypatch.setattr(nccl, "ABORT_WAIT_S", 0.1)
    copy = nccl_calls.copy

    def copy_and_work(*arguments):
        copy(*arguments)
        standin.fail("working:3")

    if when == "within it":
        monkeypatch.setattr(nccl_calls, "copy", copy_and_work)
    else:
        standin.fail("working:3")
    with pytest.raises(NcclTimeoutError) as caught:
        NcclCommunicator([2, 3], timeout_s=0.2)
    assert "Expected the GPUs' own work before the preflight" in str(caught.value)
    assert "rank 1 (GPU 3) still busy" in str(caught.value) and "P2P" not in str(caught.value)


def test_own_work_that_fails(standin):
    """A kernel's error shows when its end is waited for; it is told with the collective that waited."""
    comm = opened()
    standin.fail("cudaEventQuery:2=700")
    with pytest.raises(NcclError) as caught:
        reduce_ones(comm)
    assert caught.value.call == "cudaEventQuery"
    assert caught.value.during.startswith("the GPUs' own work before all-reduce 1 of 20 bytes")
    assert comm.closed


@contextlib.contextmanager
def allocated(standin, device, count=5):
    """Device memory of float32 ones, as (pointer, count, dtype); -1: the host's that CUDA knows."""
    cuda, pointer = ctypes.CDLL(standin.cudart), ctypes.c_void_p()
    assert cuda.cudaSetDevice(max(device, 0)) == 0
    kind = "Host" if device < 0 else ""
    assert getattr(cuda, f"cudaMalloc{kind}")(ctypes.byref(pointer), ctypes.c_size_t(4 * count)) == 0
    array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer.value))
    array[:] = 1
    yield (pointer.value, count, "float32"), array
    assert getattr(cuda, f"cudaFree{kind}")(pointer) == 0


def test_buffers_must_be_on_their_ranks_gpus(standin):
    """Whose memory it is tells CUDA; what cannot work is refused before it is tried, of every collective."""
    with contextlib.ExitStack() as stack, opened() as comm:
        own = [stack.enter_context(allocated(standin, device)) for device in (4, 0, 2, 4, -1)]
        good, moved, pinned = [b for b, _ in own[:3]], own[3][0], own[4][0]
        unknown = (64, 5, "float32")
        comm.all_reduce(good, good)
        assert [array.tolist() for _, array in own[:3]] == [[3.0] * 5] * 3
        standin.count("ncclGroupStart")
        for bad, words in (
            ([good[0], moved, good[2]], "[1] on GPU 0. Received: memory of GPU 4"),
            ([good[1], good[0], good[2]], "[0] on GPU 4. Received: memory of GPU 0"),
            ([good[0], good[1], pinned], "[2] on GPU 2. Received: host memory"),
            ([good[0], unknown, good[2]], "[1] on GPU 0. Received: memory that CUDA does not know"),
        ):
            for what, call in (
                ("sends", lambda bad=bad: comm.all_reduce(bad, good)),
                ("recvs", lambda bad=bad: comm.all_reduce(good, bad)),
                ("buffers", lambda bad=bad: comm.broadcast(bad)),
            ):
                with pytest.raises(ValueError) as caught:
                    call()
                assert str(caught.value) == f"Expected {what}{words}"
        comm.all_reduce([(64, 0, "float32")] * 3, [(64, 0, "float32")] * 3)  # nothing lies nowhere
        assert standin.counted() == [1] and not comm.closed


def test_part_of_a_piece_of_memory(standin):
    """A buffer may begin anywhere in it."""
    with contextlib.ExitStack() as stack, opened() as comm:
        whole = [stack.enter_context(allocated(standin, device)) for device in (4, 0, 2)]
        parts = [(b[0] + 8, 2, "float32") for b, _ in whole]
        comm.all_reduce(parts, parts)
        assert [array.tolist() for _, array in whole] == [[1.0, 1.0, 3.0, 3.0, 1.0]] * 3


def test_driver_that_fails_to_tell(standin):
    """Its error is raised; the communicator, which nothing was asked of, stays."""
    with opened() as comm:
        standin.fail("cuPointerGetAttributes:2=201")
        with pytest.raises(NcclError, match="cuPointerGetAttributes returned ncclUnhandledCudaError"):
            reduce_ones(comm)
        reduce_ones(comm)
