"""What becomes of collectives that cannot end on a real GPU, where only an abort stops the kernel."""

import _thread
import contextlib
import ctypes
import os
import signal
import threading
import time

import isolated
import numpy as np
import pytest
from device_memory import check, is_standin, open_memory, open_runtime

from ncclsync.communicator import NcclCommunicator
from ncclsync.errors import NcclSyncError, NcclTimeoutError

FULL_COUNT = 4 * 2**20  # float32: what takes long enough to be caught at it


def reduce_ones(comm, count=1000):
    """All-reduce ones, in place; every rank must receive their number."""
    with open_memory() as memory:
        placed = [memory.put(np.ones(count, np.float32)) for _ in range(comm.size)]
        began = time.perf_counter()
        comm.all_reduce([p.buffer for p in placed], [p.buffer for p in placed])
        took_s = time.perf_counter() - began
        for one in placed:
            np.testing.assert_array_equal(one.get(), np.full(count, comm.world_size, np.float32))
    return took_s


@contextlib.contextmanager
def two_that_share_a_gpu(timeout_s):
    """Rank 0 and rank 1, each with a communicator of its own: so that one can be left alone.

    Without the preflight: it waits for all of the GPU's work first, and so for the other rank's.
    """
    unique_id = NcclCommunicator.unique_id()
    comms, errors = [None, None], []

    def join(rank):
        try:
            options = {"timeout_s": timeout_s, "preflight": False}
            comms[rank] = NcclCommunicator.from_unique_id(unique_id, 2, [rank], [0], **options)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    yield comms
    for comm in comms:  # the other's end is an error or not: it must come within the limit
        comm.timeout_s = 5.0
        with contextlib.suppress(NcclSyncError):
            comm.close()
        assert comm.closed


def works_again():
    """The GPU is as good as before."""
    with NcclCommunicator([0, 0], timeout_s=60.0) as comm:
        reduce_ones(comm)


def connect_at(moment):
    """Choose when NCCL connects the ranks: what hangs later is a kernel, or has not come to that."""
    os.environ["NCCL_RUNTIME_CONNECT"] = {"joining": "0", "first collective": "1"}[moment]


def lone_rank_times_out(connected):
    """Rank 1 never comes."""
    connect_at(connected)
    with two_that_share_a_gpu(timeout_s=60.0) as (comm, _other):
        comm.timeout_s = 1.0
        began = time.monotonic()
        try:
            reduce_ones(comm)
        except NcclTimeoutError as error:
            words = str(error)
        else:
            raise AssertionError("a collective of one rank of two has ended")
        took_s = time.monotonic() - began
        assert "all-reduce 1 of 4000 bytes (1000 × float32)" in words, words
        assert "; rank 1 of other processes: not known here" in words, words
        if connected == "joining":
            assert "rank 0 (GPU 0) arrived, waiting for the others" in words, words
        assert 1.0 <= took_s < 20.0, took_s
        assert comm.closed
    works_again()


def lone_rank_is_interrupted(connected):
    """Ctrl-C, half a second into a collective without a limit."""
    connect_at(connected)
    with two_that_share_a_gpu(timeout_s=60.0) as (comm, _other):
        comm.timeout_s = None
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            reduce_ones(comm)
        except KeyboardInterrupt:
            took_s = time.monotonic() - began
        else:
            raise AssertionError("a collective of one rank of two has ended")
        assert 0.4 <= took_s < 20.0, took_s
        assert comm.closed and isinstance(comm.failure, KeyboardInterrupt)
    works_again()


def aborted_in_full_flight(ranks):
    """All ranks are there, and data move, when the limit is over; the same GPU is then joined anew."""
    comm = NcclCommunicator([0] * ranks, timeout_s=60.0)
    reduce_ones(comm, FULL_COUNT)
    comm.timeout_s = min(reduce_ones(comm, FULL_COUNT) for _ in range(2)) / 8
    if is_standin():  # it does a collective all at once, where a GPU takes its time
        open_runtime().standin_fail(b"slow:1=5000")
    try:
        reduce_ones(comm, FULL_COUNT)
    except NcclTimeoutError:
        assert comm.closed
    else:
        raise AssertionError(f"a collective has ended within {comm.timeout_s} s, an eighth of what it takes")
    comm.timeout_s = 60.0
    comm.reopen()
    reduce_ones(comm, FULL_COUNT)
    comm.close()


@contextlib.contextmanager
def busy_gpu():
    """GPU 0 has work that does not end while this is open: a stream that waits for the host."""
    runtime, libc = open_runtime(), ctypes.CDLL(None)
    if is_standin():
        runtime.standin_fail(b"working:0")
        yield
        runtime.standin_fail(b"")
        return
    semaphore, stream = ctypes.create_string_buffer(64), ctypes.c_void_p()
    libc.sem_init(semaphore, 0, 0)
    check(runtime, "cudaSetDevice", 0)
    check(runtime, "cudaStreamCreateWithFlags", ctypes.byref(stream), 1)
    check(runtime, "cudaLaunchHostFunc", stream, libc.sem_wait, semaphore)
    yield
    libc.sem_post(semaphore)
    check(runtime, "cudaStreamSynchronize", stream)
    check(runtime, "cudaStreamDestroy", stream)


def own_work_never_ends(ranks):
    """The wait for it has the limit; what the communicator had comes back with its end."""
    comm = NcclCommunicator([0] * ranks, timeout_s=60.0)
    with open_memory() as memory:
        buffers = [memory.put(np.ones(1000, np.float32)).buffer for _ in range(ranks)]
        comm.timeout_s = 1.0
        with busy_gpu():
            began = time.monotonic()
            try:
                comm.all_reduce(buffers, buffers)
            except NcclTimeoutError as error:
                words = str(error)
            else:
                raise AssertionError("a collective did not wait for its GPU's own work")
            took_s = time.monotonic() - began
        assert "the GPUs' own work before all-reduce 1 of 4000 bytes (1000 × float32)" in words, words
        assert "rank 0 (GPU 0)" in words and "still busy" in words, words
        assert 1.0 <= took_s < 20.0, took_s
        assert comm.closed
        comm.timeout_s = 60.0
        comm.reopen()
        comm.all_reduce(buffers, buffers)
    comm.close()


def sleep(seconds):
    """What hangs, for the test of the limit itself."""
    time.sleep(seconds)


def be_interrupted():
    """What ends with an error, for the test of the limit itself."""
    _thread.interrupt_main()
    time.sleep(10)


@pytest.mark.parametrize("connected", ["joining", "first collective"])
def test_time_out(connected):
    """A rank whose peer never comes raises within its limit; its kernel is gone, and the GPU works on."""
    isolated.run(lone_rank_times_out, connected=connected)


@pytest.mark.parametrize("connected", ["joining", "first collective"])
def test_interrupt(connected):
    """Ctrl-C ends a collective in mid-flight, and nothing hangs behind it."""
    isolated.run(lone_rank_is_interrupted, connected=connected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_abort_in_full_flight(ranks):
    """Ended while all ranks move data; joined anew, they give right results."""
    isolated.run(aborted_in_full_flight, ranks=ranks)


def test_own_work_that_never_ends():
    """A GPU that is busy for ever is an error within the limit, and no collective runs before its work."""
    isolated.run(own_work_never_ends, ranks=2)


def test_a_hang_is_a_failure():
    """With the stacks of what hangs, at its limit; and an error is not taken for success."""
    began = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        isolated.run(sleep, limit_s=1.0, seconds=60)
    assert time.monotonic() - began < 10
    assert "Expected sleep(seconds=60) to end with 0 within 1 s. Received: it ended with 1" in str(caught.value)
    assert "Timeout (0:00:01)!" in str(caught.value) and "in sleep" in str(caught.value)
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        isolated.run(be_interrupted)
