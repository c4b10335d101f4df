"""Ops that only enqueue, on CPU towers with the stand-in NCCL: they block there, and do all else as on GPUs."""

import concurrent.futures
import ctypes
import itertools
import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from ncclsync import NcclError, NcclTimeoutError
from ncclsync.communicator import AllGather, AllReduce, Broadcast, NcclCommunicator, ReduceScatter, native, timeouts
from ncclsync.ops import device_ops

pytestmark = pytest.mark.timeout(120)

CPUS = ["CPU:0"] * 3
KINDS = {
    "sum": AllReduce((), (), "sum", "a sum"),
    "max": AllReduce((), (), "max"),
    "scattered": ReduceScatter((), (), "sum"),
    "gathered": AllGather((), ()),
    "sent": Broadcast((), 2),
}


@pytest.fixture
def joined(standin):
    """Three ranks; arrivals and groups that a test leaves behind are an error: their events are."""
    with NcclCommunicator([4, 0, 2], timeout_s=2.0, preflight=False) as communicator:
        communicator.launcher(on_host=True)
        yield communicator


def unique(dtype, tower, shape=(3, 2)):
    """Small numbers that differ from tower to tower."""
    numbers = np.arange(np.prod(shape)).reshape(shape) % 5 + 2 * tower + 1
    return tf.cast(tf.constant(numbers, tf.int32), dtype)


def all_reduce(communicator):
    """A graph function of a tensor per tower: the sum, for each."""

    @tf.function(autograph=False)
    def step(*tensors):
        launched = device_ops.launch([tensors], communicator, [KINDS["sum"]], CPUS[: len(tensors)])
        return [launched.deliver(tower)[0] for tower in range(len(tensors))]

    return step


def expected(name, sent):
    """[N] what each tower receives, as NumPy says it."""
    if name == "gathered":
        return [np.concatenate(sent)] * len(sent)
    if name == "sent":
        return [sent[2]] * len(sent)
    whole = np.max(sent, axis=0) if name == "max" else sum(sent[1:], start=sent[0])
    return np.split(whole, len(sent)) if name == "scattered" else [whole] * len(sent)


@pytest.mark.parametrize("dtype", sorted(native.DTYPES))
def test_every_kind_in_one_group(joined, dtype):
    """All kinds in a group; a result has the shape and dtype that it must have, and inputs stay."""
    sent = [unique(dtype, tower) for tower in range(3)]

    @tf.function(autograph=False)
    def step(*tensors):
        launched = device_ops.launch([tensors] * len(KINDS), joined, list(KINDS.values()), CPUS)
        towers = [launched.deliver(tower) for tower in range(3)]
        assert [t.shape.as_list() for t in towers[0]] == [[3, 2], [3, 2], [1, 2], [9, 2], [3, 2]]
        return towers

    towers = step(*sent)
    for row, name in enumerate(KINDS):
        for tower, result in enumerate(expected(name, [t.numpy().astype("float64") for t in sent])):
            assert towers[tower][row].dtype == dtype
            np.testing.assert_array_equal(np.asarray(towers[tower][row], "float64"), result, err_msg=name)
    np.testing.assert_array_equal(sent[1], unique(dtype, 1))


def test_in_loops_in_branches_and_again(joined):
    """The same ops run many times; the ends of their tokens are the ends of what these own."""

    @tf.function(autograph=False)
    def step(times, *tensors):
        def body(left, *values):
            launched = device_ops.launch([values], joined, [KINDS["sum"]], CPUS)
            return (left - 1, *(launched.deliver(tower)[0] for tower in range(3)))

        def loop():
            return tf.while_loop(lambda left, *_: left > 0, body, (times, *tensors), parallel_iterations=1)[1:]

        return tf.cond(times > 0, loop, lambda: tensors)

    sent = [unique("float32", tower) for tower in range(3)]
    for times in (0, 1, 4):
        results = step(tf.constant(times), *sent)
        whole = sum(sent) * 3.0 ** (times - 1)
        for tower in range(3):
            np.testing.assert_array_equal(results[tower], whole if times else sent[tower])


def test_barrier_of_no_tensors(joined, standin):
    """All towers arrive before anyone goes on, and NCCL is not called."""
    order = []

    def noted(name):
        return tf.numpy_function(lambda: order.append(name) or np.int32(0), [], tf.int32)

    @tf.function(autograph=False)
    def step():
        before = [noted(f"before {tower}").op for tower in range(3)]
        launched = device_ops.launch([], joined, [], CPUS, [[op] for op in before])
        results = []
        for tower in range(3):
            with tf.control_dependencies([launched.passed(tower)]):
                results.append(noted(f"after {tower}"))
        return results

    standin.count("ncclGroupStart")
    step()
    assert [name.split()[0] for name in order] == ["before"] * 3 + ["after"] * 3
    assert standin.counted() == [0]


def test_a_step_that_fails_on_its_way_leaves_nothing(standin, joined):
    """200 seeded faults: an error on a tower before it arrives, before it delivers, or after. All is let go."""
    sent = [unique("float32", tower) for tower in range(3)]
    before = standin.alive()

    @tf.function(autograph=False)
    def step(fault, *tensors):
        def failing(tensor, place):
            with tf.control_dependencies([tf.debugging.assert_none_equal(fault, place, message="told to fail")]):
                return tf.identity(tensor)

        given = [failing(tensor, tower) for tower, tensor in enumerate(tensors)]
        launched = device_ops.launch([given], joined, [KINDS["sum"]], CPUS)
        results = []
        for tower in range(3):
            check = tf.debugging.assert_none_equal(fault, 3 + tower, message="told to fail")
            received = launched.deliver(tower, [check])
            results.append(failing(received[0], 6 + tower))
        return results

    for fault in np.random.default_rng(0).integers(0, 9, 200):
        with pytest.raises(tf.errors.InvalidArgumentError, match="told to fail"):
            step(tf.constant(int(fault)), *sent)
    assert standin.settled(before) == before
    np.testing.assert_array_equal(step(tf.constant(-1), *sent)[0], sum(sent))


@pytest.mark.parametrize(
    ("instructions", "raised", "words"),
    [
        ("stuck:1", NcclTimeoutError, r"all-reduce 1 \(a sum\) of 24 bytes .*rank 1 \(GPU 0\) not arrived"),
        ("ncclAllReduce=5", NcclError, r"ncclAllReduce returned ncclInvalidUsage"),
        ("async:1=6", NcclError, r"ncclRemoteError .*during all-reduce 1 \(a sum\)"),
        ("cuCtxRecordEvent", NcclError, r"cuCtxRecordEvent returned ncclUnhandledCudaError"),
        ("cuCtxSetCurrent:5", NcclError, r"cuCtxSetCurrent returned"),
        ("cudaStreamWaitEvent", NcclError, r"cudaStreamWaitEvent returned ncclUnhandledCudaError"),
    ],
)
def test_failures_name_the_collective(standin, instructions, raised, words):
    """What fails is the communicator's failure, in the words of a collective that was waited for."""
    with NcclCommunicator([4, 0], timeout_s=0.3, preflight=False) as communicator:
        communicator.launcher(on_host=True)

        step = all_reduce(communicator)
        sent = [unique("float32", tower) for tower in range(2)]
        standin.fail(instructions)
        with pytest.raises(tf.errors.OpError):
            step(*sent)
        failure = communicator.find_failure()
        assert isinstance(failure, raised)
        with pytest.raises(raised, match=words):
            raise failure
        with pytest.raises(tf.errors.OpError, match="closed, or that a failed collective has aborted"):
            step(*sent)
        standin.fail("")
        communicator.reopen()
        np.testing.assert_array_equal(step(*sent)[0], sum(sent))
        np.testing.assert_array_equal(step(*sent)[1], sum(sent))


def test_no_memory_for_a_launched_group(standin):
    """Where NCCL takes memory in a step, and finds none: its error, with the advice of one while joining."""
    memory, left, whole = ctypes.CDLL(standin.cudart), ctypes.c_size_t(), ctypes.c_size_t()
    with NcclCommunicator([4, 0], timeout_s=2.0, preflight=False) as communicator:
        communicator.launcher(on_host=True)
        step, sent = all_reduce(communicator), [unique("float32", tower) for tower in range(2)]
        assert (memory.cudaSetDevice(0), memory.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(whole))) == (0, 0)
        taken = ctypes.c_longlong(left.value - 2**20)
        memory.standin_take(0, taken)
        try:
            with pytest.raises(tf.errors.OpError):
                step(*sent)
        finally:
            memory.standin_take(0, ctypes.c_longlong(-taken.value))
        words = r"out of memory.*NCCL needs some hundred MB on each GPU: .*, during all-reduce 1 \(a sum\)"
        with pytest.raises(NcclError, match=words):
            raise communicator.find_failure()
        communicator.reopen()
        np.testing.assert_array_equal(step(*sent)[0], sum(sent))


def test_a_group_that_takes_long_is_warned_of(standin, monkeypatch, caplog):
    """Once, and who has arrived: nobody may be waiting for it in Python."""
    monkeypatch.setattr(timeouts, "WARN_AFTER_S", 0.2)
    sent = [unique("float32", tower) for tower in range(2)]
    with NcclCommunicator([4, 0], timeout_s=5.0, preflight=False) as communicator:
        communicator.launcher(on_host=True)
        step = all_reduce(communicator)
        step(*sent)
        standin.fail("slow:1=900")
        with caplog.at_level("WARNING", "ncclsync"):
            step(*sent)
    (record,) = caplog.records
    words = record.getMessage()
    assert words.startswith("all-reduce 2 (a sum) of 24 bytes (6 × float32) has been pending for 0 s: "), words
    assert "rank 1 (GPU 0) arrived, waiting" in words and words.endswith("it is given up after 5 s"), words


def test_a_launch_that_takes_long_is_warned_of(standin, monkeypatch, caplog):
    """While it goes on, although it keeps the launcher to itself."""
    monkeypatch.setattr(timeouts, "WARN_AFTER_S", 0.2)
    sent = [unique("float32", tower) for tower in range(2)]
    with NcclCommunicator([4, 0], timeout_s=30.0, preflight=False) as communicator:
        communicator.launcher(on_host=True)
        step = all_reduce(communicator)
        step(*sent)
        standin.fail("launching:1:0")
        with caplog.at_level("WARNING", "ncclsync"), concurrent.futures.ThreadPoolExecutor(1) as pool:
            results = pool.submit(step, *sent)
            until = time.monotonic() + 10
            while not caplog.records and time.monotonic() < until:
                time.sleep(0.01)
            standin.fail("")
            np.testing.assert_array_equal(results.result()[0], sum(sent))
    (record,) = caplog.records
    words = record.getMessage()
    assert words.startswith("all-reduce 2 (a sum) of 24 bytes (6 × float32) has been pending for 0 s: "), words
    assert "rank 0 (GPU 4), rank 1 (GPU 0) not arrived" in words, words


def test_towers_go_on_while_a_launch_takes_long(standin):
    """Once all have arrived: what follows on their devices does not wait for NCCL to launch the group."""
    gone_on = threading.Event()

    def note():
        gone_on.set()
        return np.int32(0)

    @tf.function(autograph=False)
    def step(*tensors):
        launched = device_ops.launch([tensors], communicator, [KINDS["sum"]], CPUS[:2])
        with tf.control_dependencies([launched.arrived(tower) for tower in range(2)]):
            noted = tf.numpy_function(note, [], tf.int32)
        return [noted, *(launched.deliver(tower)[0] for tower in range(2))]

    sent = [unique("float32", tower) for tower in range(2)]
    with NcclCommunicator([4, 0], timeout_s=30.0, preflight=False) as communicator:
        communicator.launcher(on_host=True)
        step(*sent)
        gone_on.clear()
        standin.fail("launching:1:0")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            results = pool.submit(step, *sent)
            assert gone_on.wait(20) and not results.done()
            standin.fail("")
            np.testing.assert_array_equal(results.result()[1], sum(sent))


def test_towers_that_send_other_sizes_are_told(joined):
    """A mistake of the caller's ends nothing: the communicator stays."""

    step = all_reduce(joined)
    sent = [unique("float32", tower, (3 + (tower == 1), 2)) for tower in range(3)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Received: 6 elements on tower 0, 8 on tower 1"):
        step(*sent)
    assert joined.find_failure() is None


def test_towers_that_receive_into_one_piece_of_memory_are_told(joined):
    """Towers that share a device may be given it, as where TensorFlow merges two ops; a mistake, as above."""

    @tf.function(autograph=False)
    def step(*tensors):
        return device_ops.launch([tensors], joined, [KINDS["sum"]], CPUS, in_place=[True]).deliver(0)

    one, other = (unique("float32", tower) for tower in range(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"into memory of its own. Received: that of tower 0"):
        step(one, other, one)
    assert joined.find_failure() is None


def test_an_interrupt_when_nothing_is_under_way_is_forgotten(joined, standin):
    """It is not a later group's, even one that takes a while."""

    step = all_reduce(joined)
    sent = [unique("float32", tower) for tower in range(3)]
    step(*sent)
    joined.interrupt()
    time.sleep(1.1)  # as long as a group may go on without an end
    standin.fail("slow:1:1=50")
    np.testing.assert_array_equal(step(*sent)[0], sum(sent))
    assert joined.find_failure() is None


def test_groups_are_counted_with_collectives_that_are_waited_for(joined, standin):
    """Numbers in messages go on over both, and both may be in use."""

    step = all_reduce(joined)
    sent = [unique("float32", tower) for tower in range(3)]
    buffers = [np.ones(4, np.float32) for _ in range(3)]
    pointers = [(one.ctypes.data, one.size, one.dtype) for one in buffers]
    for number, again in itertools.product((1, 4), (0, 1)):
        if again == 0:
            step(*sent)
            joined.all_reduce(pointers, pointers)
            assert joined.launcher().count(0) == number + 2
            step(*sent)
    assert joined.launcher().groups() == (4, 4)


def test_the_thread_that_watches_ends_with_the_communicator(standin):
    """However many communicators a process makes, one after another."""

    def threads():
        return len(os.listdir("/proc/self/task"))

    sent = [unique("float32", tower) for tower in range(2)]
    counts = []
    for _ in range(4):
        with NcclCommunicator([4, 0], timeout_s=2.0, preflight=False) as communicator:
            communicator.launcher(on_host=True)
            all_reduce(communicator)(*sent)
        until = time.monotonic() + 5
        while counts and threads() > counts[0] and time.monotonic() < until:
            time.sleep(0.01)
        counts.append(threads())
    assert counts[-1] <= counts[0], counts
