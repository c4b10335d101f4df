"""How GPUs are joined: in several processes, by which NCCL, on which GPUs, and over sound paths."""

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_nccl_failures import buffers, opened, reduce_ones

from ncclsync.communicator import AllGather, AllReduce, NcclCommunicator, native, nccl, nccl_calls, preflight
from ncclsync.errors import NcclError, NcclPreflightError, NcclSyncError, NcclTimeoutError, NcclUnavailableError

pytestmark = pytest.mark.timeout(60)


def at_once(*tasks):
    """Run each task in a thread of its own, as processes would; return what they return or raise."""
    results = [None] * len(tasks)

    def run(i):
        try:
            results[i] = tasks[i]()
        except Exception as error:  # returned to the test, which looks at it
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a task hangs"
    return results


# Two processes with two ranks each, not in order, each on devices of its own.
SHARES = (([3, 0], [1, 4]), ([2, 1], [0, 6]))


def joined(world_size=4, shares=SHARES, **options):
    """Join two "processes"; return their communicators, or what they raised."""
    unique_id = NcclCommunicator.unique_id()
    assert len(unique_id) == 128 and unique_id != NcclCommunicator.unique_id()
    options = {"timeout_s": 5.0, **options}
    return at_once(
        *(
            lambda ranks=ranks, devices=devices: NcclCommunicator.from_unique_id(
                unique_id, world_size, ranks, devices, **options
            )
            for ranks, devices in shares
        )
    )


def test_two_processes(standin):
    """Collectives over all ranks; the preflight too; the root may be another process'."""
    one, other = joined()
    assert (one.size, one.world_size, one.ranks, one.devices) == (2, 4, (3, 0), (1, 4))
    assert at_once(lambda: reduce_ones(one), lambda: reduce_ones(other)) == [None, None]
    arrays = {comm: buffers(0.0, 2) for comm in (one, other)}
    arrays[other][0][0][:] = 7.0  # of rank 2
    at_once(*(lambda comm=comm: comm.broadcast(arrays[comm][1], root=2) for comm in (one, other)))
    for comm in (one, other):
        np.testing.assert_array_equal(arrays[comm][0], np.full((2, 5), 7.0))
    with pytest.raises(ValueError, match=r"Expected root to be a rank, 0 to 3. Received: 4"):
        one.broadcast(arrays[one][1], root=4)
    assert at_once(one.close, other.close) == [None, None]


def test_process_that_does_not_come(standin):
    """To the joining, to a collective, to the end; what is not known here is not guessed."""
    unique_id = NcclCommunicator.unique_id()
    with pytest.raises(NcclTimeoutError) as caught:
        NcclCommunicator.from_unique_id(unique_id, 4, [3, 0], [1, 4], timeout_s=0.2)
    assert "the joining of 4 ranks, here rank 3 (GPU 1), rank 0 (GPU 4)" in str(caught.value)
    one, other = joined(timeout_s=0.2)
    with pytest.raises(NcclTimeoutError) as caught:
        reduce_ones(one)
    assert "rank 3 (GPU 1), rank 0 (GPU 4) arrived, waiting for the others" in str(caught.value)
    assert "rank 1, 2 of other processes: not known here" in str(caught.value)
    with pytest.raises(NcclSyncError, match="Join all processes anew, by a new unique id"):
        one.reopen()
    other.close()
    one, other = joined(timeout_s=0.2)
    with pytest.raises(NcclTimeoutError, match="Expected the end of a communicator to end"):
        one.close()
    assert one.closed
    other.close()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((b"short", 2, [0], [0]), "Expected unique_id to be the 128 bytes"),
        ((bytes(128), 2, [2], [0]), "Expected ranks below world_size"),
        ((bytes(128), "2", [1], [0]), "Expected ranks below world_size"),
        ((bytes(128), 2, [0, 1], [0]), "Expected different ranks, each with a device"),
        ((bytes(128), 2, [1, 1], [0, 1]), "Expected different ranks, each with a device"),
        ((bytes(128), 2, [-1], [0]), "Expected ranks to be ranks of this process"),
        ((bytes(128), 2, [0], []), "Expected devices to be CUDA ordinals"),
        ((bytes(128), 2, [0], [2**31]), "Expected devices to be CUDA ordinals"),
        ((bytes(128), 2, [2**40], [0]), "Expected ranks to be ranks of this process"),
        ((bytes(128), 2**31, [0], [0]), "Expected ranks below world_size"),
        ((bytes(128), 2, 0, [0]), "Expected ranks to be a list of ranks of this process. Received: 0"),
        ((bytes(128), 2, [0], 0), "Expected devices to be a list of CUDA ordinals. Received: 0"),
        ((bytes(128), 2, [0], "0"), "Expected devices to be a list of CUDA ordinals. Received: '0'"),
    ],
)
def test_bad_shares_are_refused(standin, arguments, message):
    """Before NCCL is asked."""
    with pytest.raises((TypeError, ValueError), match=message):
        NcclCommunicator.from_unique_id(*arguments)


@pytest.mark.parametrize("version, words", [("21302", "2.13.2"), ("2804", "2.8.4"), ("20903", "2.9.3")])
def test_too_old_an_nccl_is_refused(standin, monkeypatch, version, words):
    """With both versions."""
    monkeypatch.setenv("STANDIN_VERSION", version)
    with pytest.raises(NcclUnavailableError) as caught:
        NcclCommunicator([0, 1])
    assert f"Expected NCCL 2.14 or newer. Received: NCCL {words}" in str(caught.value)
    monkeypatch.setenv("STANDIN_VERSION", "21403")
    assert native.nccl_version() == (2, 14, 3)


def test_a_runtime_of_cuda_13_serves(standin, tmp_path, monkeypatch):
    """Of its wheel's folder, where there is none of CUDA 12."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").symlink_to(standin.cudart)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NCCLSYNC_CUDART_LIBRARY")
    monkeypatch.setattr(native, "_CUDART", (*native._CUDART[:2], "libcudart.so.none"))
    with NcclCommunicator([0, 1]) as comm:
        reduce_ones(comm)


@pytest.mark.parametrize("version", ["12020", "12050"])
def test_any_driver_serves(standin, monkeypatch, version):
    """Before R555 the host waits for each GPU in a thread of its own, which the limit does not wait for."""
    monkeypatch.setenv("STANDIN_DRIVER", version)
    monkeypatch.setattr(nccl, "ABORT_WAIT_S", 0.1)
    standin.count("cuCtxRecordEvent", "cudaDeviceSynchronize")
    with NcclCommunicator([0, 1], timeout_s=0.5) as comm:
        reduce_ones(comm)
        used = [count > 0 for count in standin.counted()]
        assert used == ([False, True] if version == "12020" else [True, False])
        standin.fail("working:1=1500")
        with pytest.raises(NcclTimeoutError, match="Expected the GPUs' own work before all-reduce 2 of"):
            reduce_ones(comm)
        comm.timeout_s = 5.0
        comm.reopen()
        reduce_ones(comm)


def test_preflight_has_a_small_communicator(standin, tmp_path, monkeypatch):
    """Of one channel where NCCL has that choice; it connects each pair, and ends before the other one begins."""
    log = tmp_path / "log"
    script = "from ncclsync.communicator import NcclCommunicator; NcclCommunicator([0, 1, 2]).close()"
    for version in (None, "21602"):
        log.unlink(missing_ok=True)
        environment = {**os.environ, "STANDIN_LOG": str(log)} | ({"STANDIN_VERSION": version} if version else {})
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=100)
        calls = [line.split() for line in log.read_text().splitlines()]
        made = [
            call for call in calls if call[0] in ("ncclCommInitRankConfig", "maxCTAs", "ncclSend", "ncclCommDestroy")
        ]
        small = [["maxCTAs", "1"]] if version is None else []
        begin = [one for rank in "012" for one in (["ncclCommInitRankConfig", rank], *small)]
        assert made[: len(begin)] == begin
        rest = made[len(begin) :]
        assert [name for name, *_ in rest] == [
            *["ncclSend"] * 9,
            *["ncclCommDestroy"] * 3,
            *["ncclCommInitRankConfig"] * 3,
            *["ncclCommDestroy"] * 3,
        ]


def test_memory_that_nccl_takes(standin):
    """By its formula: of the small all-reduce's tree, then of a ring; never of each pair. All is freed."""
    channels, connection = 16, 12 << 20
    comm = NcclCommunicator(range(8))
    assert comm.taken_bytes == 2 * channels * connection
    sums, gathers = AllReduce((), (), "sum"), AllGather((), ())
    for collectives in ([sums, gathers], [sums], [gathers]):
        standin.count("ncclAllReduce", "ncclAllGather", "cudaMalloc")
        comm.connect(collectives, [native.DTYPES["float32"]] * len(collectives), [2**20] * len(collectives))
        assert standin.counted() == ([8, 8, 16] if len(collectives) > 1 else [0, 0, 0])
    assert comm.taken_bytes == 3 * channels * connection
    standin.fail("ncclCommGetAsyncError:2=1")
    with pytest.raises(NcclError):
        reduce_ones(comm)
    comm.reopen()
    assert comm.taken_bytes == 3 * channels * connection  # it is taken again before the next step
    comm.close()
    with NcclCommunicator([0], preflight=False) as alone:
        assert alone.taken_bytes == 0


def test_no_memory_to_connect_with(standin, caplog):
    """Then a step's own tensors do it: no error, none left to CUDA's next caller, one line, and no second try."""
    with NcclCommunicator(range(4)) as comm, caplog.at_level(logging.INFO, logger="ncclsync"):
        standin.fail("cudaMalloc:3=2")
        for _ in range(2):
            comm.connect([AllReduce((), (), "sum")], [native.DTYPES["float32"]], [2**20])
        assert ctypes.CDLL(standin.cudart).cudaGetLastError() == 0
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "NCCL takes its memory in the first step"
        ]
        reduce_ones(comm)


def test_two_processes_connect_as_they_join(standin):
    """By a bucket's sum: later none knows when the others would. One without memory for it says so; nobody hangs."""
    channels, connection = 16, 12 << 20
    one, other = joined()
    assert one.taken_bytes == other.taken_bytes == (2 + 1) * channels * connection  # a small sum's tree, its ring
    _, sent = buffers(1.0, 2, 2**20)
    assert at_once(*(lambda comm=comm: comm.all_reduce(sent, sent) for comm in (one, other))) == [None, None]
    assert one.taken_bytes == max(nccl_calls.taken(one._handle, 2))
    at_once(one.close, other.close)
    standin.fail("cudaMalloc:3=2")
    failed = joined(preflight=False)
    assert all(isinstance(one, NcclSyncError) for one in failed)
    assert any("tf.config.experimental.set_memory_growth" in str(one) for one in failed)


def test_same_gpu_twice(standin, monkeypatch):
    """Refused here; where the user asks NCCL for it, NCCL decides: an older one's refusal is explained."""
    with pytest.raises(ValueError, match=r"Expected every GPU once. Received: devices=\[3, 3\]"):
        NcclCommunicator([3, 3])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with NcclCommunicator([3, 3, 0]) as comm:
        reduce_ones(comm)
    monkeypatch.setenv("STANDIN_VERSION", "22907")
    with pytest.raises(NcclError, match=r"Duplicate GPU detected.*Each rank needs a GPU of its own"):
        NcclCommunicator([3, 3])


@pytest.mark.parametrize(
    "fail, error, advice",
    [
        ("cudaSetDevice=35", NcclUnavailableError, "install a newer driver, or an older nvidia-nccl-cu12"),
        ("cudaSetDevice=101", NcclUnavailableError, "CUDA counts from 0 the GPUs that CUDA_VISIBLE_DEVICES"),
        ("cudaMalloc=2", NcclError, "tf.config.experimental.set_memory_growth"),
        ("cudaSetDevice=217", NcclError, "set NCCL_P2P_DISABLE=1"),
    ],
)
def test_errors_say_what_to_do(standin, fail, error, advice):
    """A driver too old, no such GPU, too little memory, no path between GPUs."""
    standin.fail(fail)
    with pytest.raises(error) as caught:
        NcclCommunicator([0, 1])
    assert advice in str(caught.value)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_preflight_finds_a_corrupt_path(standin, size):
    """It names the pair and the way the numbers went, the causes and the remedy."""
    standin.fail(f"corrupt:{size - 1}:0")
    with pytest.raises(NcclPreflightError) as caught:
        NcclCommunicator(range(size))
    assert f"Received: other numbers from rank {size - 1} to rank 0. Usual causes:" in str(caught.value)
    for word in ("ACS", "IOMMU", "NCCL_P2P_DISABLE=1"):
        assert word in str(caught.value)
    comm = NcclCommunicator(range(size), preflight=False)
    comm.close()


@pytest.mark.slow
def test_preflight_of_two_processes(standin):
    """The process whose rank receives something else knows it; the other one cannot, and waits for it in vain."""
    standin.fail("corrupt:1:3")
    one, other = joined()
    assert isinstance(one, NcclPreflightError) and "from rank 1 to rank 3" in str(one)
    assert isinstance(other, NcclTimeoutError)


def test_preflight_of_a_sum(standin, monkeypatch):
    """A sum may be wrong where no pair is: the ranks are named."""
    monkeypatch.setattr(preflight, "_numbers", different_at_each_call())
    with pytest.raises(NcclPreflightError, match="Received: a wrong sum on rank 0, a wrong sum on rank 1"):
        NcclCommunicator([0, 1])


def different_at_each_call():
    """Known numbers that are not those that were sent, but between pairs."""
    calls, numbers = iter(range(100)), preflight._numbers

    def called(sender, receiver):
        return numbers(sender, receiver) + (1 if 8 <= next(calls) < 10 else 0)

    return called


def test_preflight_is_quick(standin):
    """Of eight ranks: what it takes beside the messages themselves, within 100 ms where nothing disturbs."""
    best = [10.0, 10.0]
    for _ in range(20):
        for on in (False, True):
            began = time.perf_counter()
            NcclCommunicator(range(8), preflight=on).close()
            best[on] = min(best[on], time.perf_counter() - began)
        if best[True] - best[False] < 0.1:
            break
    assert best[True] - best[False] < 0.1
    with pytest.raises(TypeError, match="Expected preflight to be a bool"):
        opened(preflight=1)


def test_context_of_a_thread_without_one(standin):
    """A thread that uses no GPU is not given one: its context would take memory there."""
    import ctypes

    cuda, current, seen = ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"]), ctypes.c_void_p(), []

    def use():
        cuda.cuCtxSetCurrent(None)
        with NcclCommunicator([4, 0, 2]) as comm:
            reduce_ones(comm)
            comm.timeout_s = 0.05
            for fail, words in (("working:0=300", "GPU 0) still busy"), ("slow:2=900", "arrived, waiting")):
                standin.fail(fail)
                with pytest.raises(NcclTimeoutError) as caught:
                    reduce_ones(comm)
                assert words in str(caught.value)
                comm.timeout_s = 5.0
                comm.reopen()
                comm.timeout_s = 0.05
            comm.timeout_s = 5.0
        cuda.cuCtxGetCurrent(ctypes.byref(current))
        seen.append(current.value)
        return "done"

    assert (at_once(use), seen) == (["done"], [None])
