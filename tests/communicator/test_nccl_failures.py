"""No hang: whatever goes wrong in a collective of NcclCommunicator ends in an error that says what.

Against the stand-in NCCL, in this process; the `standin` fixture checks that nothing is left behind.
"""

import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ncclsync.communicator import AllGather, AllReduce, NcclCommunicator, ReduceScatter, native, nccl, timeouts
from ncclsync.communicator.native import ffi, lib
from ncclsync.errors import NcclError, NcclSyncError, NcclTimeoutError

pytestmark = pytest.mark.timeout(60)

DEVICES = (4, 0, 2)


def buffers(value, size=3, count=5):
    """One array per rank, and as the device memory that the stand-in takes: (pointer, count, dtype)."""
    arrays = [np.full(count, value, np.float32) for _ in range(size)]
    return arrays, [(a.ctypes.data, a.size, a.dtype) for a in arrays]


def reduce_ones(comm, **options):
    """All-reduce ones; the result must be the number of ranks everywhere."""
    _sends, sent = buffers(1.0, comm.size)
    recvs, received = buffers(0.0, comm.size)
    comm.all_reduce(sent, received, **options)
    np.testing.assert_array_equal(recvs, np.full((comm.size, 5), comm.world_size))


def reduce_in_parts(comm):
    """Reduce-scatter ones, and gather twos, in one group; check what every rank receives."""
    _ones, sent = buffers(1.0, comm.size, 5 * comm.size)
    parts, received = buffers(0.0, comm.size)
    _twos, to_gather = buffers(2.0, comm.size)
    wholes, gathered = buffers(0.0, comm.size, 5 * comm.size)
    comm.run_group([ReduceScatter(sent, received), AllGather(to_gather, gathered)])
    np.testing.assert_array_equal(parts, np.full((comm.size, 5), comm.size))
    np.testing.assert_array_equal(wholes, np.full((comm.size, 5 * comm.size), 2.0))


def opened(**options):
    return NcclCommunicator(DEVICES, **{"timeout_s": 5.0, "preflight": False, **options})


def test_rank_that_never_arrives(standin):
    """The error names the collective, its number, its bytes, who has arrived and who has not."""
    comm = opened(timeout_s=0.2)
    reduce_ones(comm)
    standin.fail("stuck:1")
    began = time.monotonic()
    with pytest.raises(NcclTimeoutError) as caught:
        reduce_ones(comm, label="bucket 2 of 3")
    assert 0.2 <= time.monotonic() - began < 20
    assert str(caught.value) == (
        "Expected all-reduce 2 (bucket 2 of 3) of 20 bytes (5 × float32) to end. Received: it has not within "
        "0.2 s: rank 0 (GPU 4), rank 2 (GPU 2) arrived, waiting for the others; rank 1 (GPU 0) not arrived. "
        "The communicator is aborted"
    )
    assert (caught.value.call, caught.value.status_name) == ("ncclAllReduce", "ncclTimeout")
    assert caught.value.status == native.TIMEOUT
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (NcclTimeoutError, str(caught.value))
    assert comm.closed and comm.failure is caught.value
    with pytest.raises(NcclSyncError, match="Expected an open NcclCommunicator"):
        reduce_ones(comm)
    comm.close()


def test_rank_that_never_runs(standin):
    """All are launched, and one's stream does not get there: they all wait."""
    comm = opened(timeout_s=0.1)
    standin.fail("slow:2=5000")
    with pytest.raises(NcclTimeoutError, match=r"rank 0 \(GPU 4\), rank 1 .*, rank 2 \(GPU 2\) arrived"):
        comm.broadcast(buffers(1.0)[1])


def test_error_after_the_launch(standin):
    """A dead peer, say: raised long before the time-out, with what was under way."""
    comm = opened(timeout_s=None)
    standin.fail("async:1=6")
    with pytest.raises(NcclError) as caught:
        comm.broadcast(buffers(1.0)[1])
    assert not isinstance(caught.value, NcclTimeoutError)
    assert str(caught.value) == (
        "ncclCommGetAsyncError returned ncclRemoteError (6): told to fail asynchronously, "
        "during broadcast 1 of 20 bytes (5 × float32)"
    )
    assert comm.closed


def test_error_with_the_end(standin):
    """Between asking NCCL and asking the streams: what ended by an error has not happened."""
    comm = opened()
    standin.fail("late:2=6")
    with pytest.raises(NcclError, match=r"ncclRemoteError \(6\)"):
        reduce_ones(comm)
    assert comm.closed


def test_slow_rank_is_waited_for(standin):
    """Longer than a slice; the result is right."""
    comm = opened(timeout_s=None)
    standin.fail("slow:2=250")
    began = time.monotonic()
    reduce_ones(comm)
    assert time.monotonic() - began >= 0.25
    comm.close()


def test_what_computes_before_is_not_counted(standin):
    """A collective first waits for its GPUs' own work: what comes behind has a limit of its own."""
    comm = opened(timeout_s=0.5)
    standin.fail("working:4=350,slow:2=350")
    began = time.monotonic()
    reduce_ones(comm)
    assert time.monotonic() - began >= 0.7
    comm.close()


def test_warning_before_the_time_out(standin, monkeypatch, caplog):
    """Once, naming what is pending and who is missing."""
    monkeypatch.setattr(timeouts, "WARN_AFTER_S", 0.1)
    comm = opened(timeout_s=0.5)
    standin.fail("stuck:0")
    with caplog.at_level(logging.WARNING, "ncclsync"), pytest.raises(NcclTimeoutError):
        reduce_ones(comm)
    (record,) = caplog.records
    assert "all-reduce 1 of 20 bytes (5 × float32) has been pending for 0 s" in record.getMessage()
    assert "rank 0 (GPU 4) not arrived; it is given up after 0.5 s" in record.getMessage()


@pytest.mark.parametrize(
    "fail, call", [("stuck_init:2", "ncclCommInitRankConfig"), ("stuck:1", "ncclSend"), ("stuck:1:2", "ncclAllReduce")]
)
def test_creation_that_never_ends(standin, fail, call):
    """In joining, or in the preflight, where a hang has the causes that corruption has."""
    standin.fail(fail)
    with pytest.raises(NcclTimeoutError) as caught:
        NcclCommunicator(DEVICES, timeout_s=0.2)
    assert caught.value.call == call and "rank 1 (GPU 0)" in str(caught.value)
    assert ("NCCL_P2P_DISABLE=1" in str(caught.value)) == (fail != "stuck_init:2")


@pytest.mark.parametrize(
    "timeout_s, error",
    [
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
def test_bad_timeouts_are_refused(standin, timeout_s, error):
    """A positive number of seconds, or None."""
    with pytest.raises(error, match="Expected timeout_s to be"):
        opened(timeout_s=timeout_s)


def test_reopened_after_a_failure(standin):
    """The same object, joined anew; closed for good only by close()."""
    comm = opened(timeout_s=0.1)
    comm.reopen()  # nothing to do
    standin.fail("stuck:1")
    with pytest.raises(NcclTimeoutError):
        reduce_ones(comm)
    standin.fail("ncclGetUniqueId")
    with pytest.raises(NcclError, match="ncclGetUniqueId"):
        comm.reopen()
    assert comm.closed
    comm.reopen()
    assert comm.failure is None
    reduce_ones(comm)
    comm.close()
    with pytest.raises(NcclSyncError, match="Expected an open NcclCommunicator"):
        comm.reopen()


@pytest.fixture
def enqueued():
    """A function that launches an all-reduce as ops do, and returns the group; NULL if the launch fails."""
    kept, groups = [], []

    def enqueue(comm):
        launcher, label = comm.launcher()._handle, comm.label([AllReduce([], [], "sum", "enqueued")])
        failure, arrivals, launched = ffi.new("ncs_failure*"), [], ffi.new("ncs_launched**")
        arrays, given = buffers(1.0, comm.size)
        kept.append(arrays)
        for rank, (pointer, count, dtype) in enumerate(given):
            memory, arrival = ffi.cast("void*", pointer), ffi.new("ncs_arrival**")
            rows = ffi.new("ncs_buffer[]", [(0, 0, 0, memory, memory, count, native.DTYPES[str(dtype)])])
            sent = ffi.new("ncs_buffers*", (rows, 1))
            assert lib.ncs_arrive(launcher, rank, ffi.NULL, sent, failure, arrival) == 0
            arrivals.append(arrival[0])
        lib.ncs_launch(launcher, label, arrivals, failure, launched)
        for arrival in arrivals:
            lib.ncs_arrival_release(arrival)
        groups.append(launched[0])
        return launched[0]

    yield enqueue
    for group in groups:
        lib.ncs_launched_release(group)


def test_a_failed_launch_fails_the_groups_under_way(standin, enqueued):
    """The first of them is the one that has failed, since NCCL aborts it, too."""
    comm = opened()
    standin.fail("slow:1:1=3000,ncclAllReduce:4")
    first = enqueued(comm)
    assert enqueued(comm) == ffi.NULL
    assert isinstance(comm.find_failure(), NcclError) and "all-reduce" in str(comm.failure)
    assert comm.failed_group == 1
    assert lib.ncs_launched_wait(first) != 0
    comm.close()


def test_groups_that_nobody_can_look_at_fail(standin, enqueued):
    """A context that CUDA does not make current, as after cudaDeviceReset, is a failure, not a wait without an end."""
    comm = opened(timeout_s=None)
    standin.fail("slow:1:1=300")
    group = enqueued(comm)
    standin.fail("cuCtxSetCurrent:1=201")
    assert lib.ncs_launched_wait(group) != 0
    assert isinstance(comm.find_failure(), NcclError) and comm.failure.call == "cuCtxSetCurrent"
    standin.fail("")
    comm.close()


def test_closed_in_a_signal_handler(standin):
    """A call within a call of the same thread would wait for itself: it is refused, and the first goes on."""
    comm, refused = opened(), []

    def close(*_):
        with pytest.raises(NcclSyncError) as caught:
            comm.close()
        refused.append(str(caught.value))

    handle = signal.signal(signal.SIGUSR1, close)
    standin.fail("slow:1:1=400")
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        reduce_ones(comm)
    finally:
        signal.signal(signal.SIGUSR1, handle)
    assert len(refused) == 1 and "during another call of the same thread" in refused[0]
    comm.close()


def test_closed_while_a_thread_waits(standin, enqueued):
    """Who waits for groups hears that they were given up."""
    comm = opened()
    standin.fail("slow:1:1=600")
    enqueued(comm)
    closing = threading.Timer(0.1, comm.close)
    closing.start()
    with pytest.raises(NcclSyncError, match="Expected an open NcclCommunicator"):
        comm.wait()
    closing.join()


def test_waiting_is_cheap(standin):
    """A long wait sleeps: the processor is busy for a small part of it."""
    comm = opened()
    standin.fail("slow:1=600")
    began, busy = time.monotonic(), time.process_time()
    reduce_ones(comm)
    assert time.process_time() - busy < 0.4 * (time.monotonic() - began)
    comm.close()


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
from test_nccl_failures import opened, reduce_ones
from ncclsync.communicator import NcclCommunicator
comm = opened(timeout_s=None)
print("begun", flush=True)
try:
    reduce_ones(comm)
finally:
    print("closed" if comm.closed else "open", flush=True)
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("fail", ["stuck:1", "working:0"])
def test_ctrl_c_ends_a_collective(standin, fail):
    """In the main thread: a KeyboardInterrupt at once, the communicator aborted, no native mess; also while
    the GPUs' own work is waited for, which may never let the communicator's memory go."""
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=os.path.dirname(__file__),
        env={**os.environ, **standin.environment, "STANDIN_FAIL": fail},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "begun\n"
    time.sleep(0.3)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert out == "closed\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert program.returncode == -signal.SIGINT


CALLS = (
    *("ncclGetUniqueId", "ncclGroupStart", "ncclGroupEnd", "ncclCommInitRankConfig", "ncclCommGetAsyncError"),
    *("ncclAllReduce", "ncclBroadcast", "ncclReduceScatter", "ncclAllGather", "ncclSend", "ncclRecv"),
    *("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"),
    *("cudaSetDevice", "cudaMalloc", "cudaMemcpy", "cudaFree"),
    *("cudaStreamCreateWithPriority", "cudaStreamQuery", "cudaStreamDestroy"),
    *("cudaEventCreateWithFlags", "cuCtxRecordEvent", "cudaEventQuery", "cudaEventDestroy"),
)


def random_faults(rng, size):
    """One or two instructions to the stand-in."""
    faults = []
    for _ in range(rng.choice((1, 1, 2))):
        rank, nth = rng.randrange(size), rng.randint(1, 6)
        faults.append(
            rng.choice(
                (
                    f"{rng.choice(CALLS)}:{rng.randint(1, 12)}",
                    f"{rng.choice(CALLS)}:{rng.randint(1, 12)}={rng.randint(1, 6)}",
                    f"stuck:{rank}:{nth}",
                    f"slow:{rank}:{nth}={rng.choice((1, 5, 500))}",
                    f"async:{rank}:{nth}={rng.randint(1, 6)}",
                    f"working:{rng.randrange(8)}{rng.choice(('', '=5', '=500'))}",
                    f"stuck_init:{rank}",
                    f"async_init:{rank}={rng.randint(1, 6)}",
                    f"corrupt:{rank}:{(rank + 1) % size}",
                )
            )
        )
    return ",".join(faults)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 200, 20)], ids=str)
def test_random_faults(standin, monkeypatch, seeds):
    """Each collective has happened or raises; what failed can be joined again; nothing hangs or is left."""
    monkeypatch.setattr(nccl, "ABORT_WAIT_S", 0.05)
    before = standin.alive()
    outcomes = set()
    for seed in seeds:
        rng = random.Random(seed)
        size = rng.randint(2, 4)
        fail, late = random_faults(rng, size), rng.random() < 0.5
        comm = None
        try:
            standin.fail("" if late else fail)
            comm = NcclCommunicator(rng.sample(range(8), size), timeout_s=0.05)
            if late:
                standin.fail(fail.replace("corrupt", "slow"))  # found out at creation only
            for _ in range(3):
                reduce_ones(comm)
                comm.broadcast(buffers(2.0, size)[1])
                reduce_in_parts(comm)
            outcomes.add("unharmed")
        except NcclSyncError as error:
            outcomes.add(type(error).__name__)
            assert comm is None or (comm.closed and comm.failure is not None), (seed, fail)
        standin.fail("")
        if comm is None:
            assert standin.settled(before) == before, (seed, fail)
            comm = NcclCommunicator(range(size), timeout_s=5.0)
        comm.timeout_s = 5.0
        comm.reopen()
        reduce_ones(comm)
        comm.close()
        assert standin.settled(before) == before, (seed, fail)
    assert {"unharmed", "NcclError", "NcclTimeoutError"} <= outcomes


def test_a_ctrl_c_that_two_threads_look_for_is_not_lost(monkeypatch):
    """One reads another signal from the pipe, and keeps it only after the other has kept the Ctrl-C."""
    interrupts, real_read = timeouts._Interrupts(), os.read
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read(descriptor, size):
        if threading.current_thread() is slow:
            is_reading.set()
            assert may_go_on.wait(10)
        return real_read(descriptor, size) if threading.current_thread() is not slow else bytes([signal.SIGWINCH])

    monkeypatch.setattr(timeouts.os, "read", read)
    slow = threading.Thread(target=interrupts.has_come)
    slow.start()
    assert is_reading.wait(10)
    os.write(interrupts.write_end, bytes([signal.SIGINT]))
    until = time.monotonic() + 10
    while not interrupts.has_come() and time.monotonic() < until:  # or its own thread has come first
        time.sleep(0.001)
    may_go_on.set()
    slow.join()
    assert interrupts.has_come()
