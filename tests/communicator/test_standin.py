"""The stand-in NCCL keeps NCCL's rules: what NCCL punishes by a hang, it answers by an error.

Spoken to by `ctypes`, as nothing in ncclsync would break these rules.
"""

import ctypes
import itertools
import threading
import time

import numpy as np
import pytest
from standin import Standin

SUM, FLOAT32, FLOAT64 = 0, 7, 8
SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 2, 4, 5, 6, 7
NOT_READY, OPEN_GROUP = 600, 998


class UniqueId(ctypes.Structure):
    """By value in NCCL's calls."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    """The oldest form of ncclConfig_t."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


class Ranks:
    """N ranks on devices 0 to N - 1, each with a stream; ended by `end`."""

    def __init__(self, standin, n, blocking=True):
        self.n = n
        self.nccl, self.cuda = ctypes.CDLL(standin.nccl), ctypes.CDLL(standin.cudart)
        self.comms = (ctypes.c_void_p * n)()
        self.streams = [ctypes.c_void_p() for _ in range(n)]
        unique_id, self.config = UniqueId(), Config(24, 0xCAFEBEEF, 21400, int(blocking))
        assert self.nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
        self.nccl.ncclGroupStart()
        for r in range(n):
            assert self.cuda.cudaSetDevice(r) == 0
            assert self.cuda.cudaStreamCreateWithPriority(ctypes.byref(self.streams[r]), 1, 0) == 0
            comm = ctypes.byref(self.comms, r * ctypes.sizeof(ctypes.c_void_p))
            assert self.nccl.ncclCommInitRankConfig(comm, n, unique_id, r, ctypes.byref(self.config)) == 0
        assert self.nccl.ncclGroupEnd() == 0
        self.poll()

    def comm(self, r):
        return ctypes.c_void_p(self.comms[r])

    def states(self):
        states = [ctypes.c_int() for _ in range(self.n)]
        for r, state in enumerate(states):
            assert self.nccl.ncclCommGetAsyncError(self.comm(r), ctypes.byref(state)) == 0
        return [state.value for state in states]

    def poll(self):
        while IN_PROGRESS in (states := self.states()):
            pass
        return states

    def group(self, call, ranks=None):
        """Make `call(rank)` on each rank within a group; return what ended it."""
        assert self.nccl.ncclGroupStart() == 0
        statuses = [call(r) for r in (range(self.n) if ranks is None else ranks)]
        ended = self.nccl.ncclGroupEnd()
        return next((status for status in statuses if status), ended)

    def synchronized(self):
        return [self.cuda.cudaStreamSynchronize(stream) for stream in self.streams]

    def last_error(self):
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        return self.nccl.ncclGetLastError(None).decode()

    def end(self, call="ncclCommAbort"):
        statuses = [getattr(self.nccl, call)(self.comm(r)) for r in range(self.n)]
        return statuses + [self.cuda.cudaStreamDestroy(stream) for stream in self.streams]


@pytest.fixture
def ranks(standin):
    """Three ranks of blocking communicators."""
    three = Ranks(standin, 3)
    yield three
    three.end()


def at(array):
    return ctypes.c_void_p(array.ctypes.data)


def size(count):
    return ctypes.c_size_t(count)


def numbers(n=3, count=6):
    return [np.arange(count, dtype=np.float32) + 10 * r for r in range(n)]


def test_versions(ranks, monkeypatch):
    """Of both libraries; NCCL's is as told."""
    version = ctypes.c_int()
    assert (ranks.cuda.cudaRuntimeGetVersion(ctypes.byref(version)), version.value) == (0, 12090)
    for told, expected in ((None, 23203), ("2408", 2408)):
        if told:
            monkeypatch.setenv("STANDIN_VERSION", told)
        assert (ranks.nccl.ncclGetVersion(ctypes.byref(version)), version.value) == (0, expected)


def test_every_collective(ranks):
    """What each of them gives each rank, by NumPy."""
    sends = numbers()
    total, whole = sum(sends), np.concatenate(sends)
    comm, stream, nccl = ranks.comm, ranks.streams, ranks.nccl
    count, part = size(6), size(2)
    calls = {
        "all_reduce": (6, lambda s, d, r: nccl.ncclAllReduce(s, d, count, FLOAT32, SUM, comm(r), stream[r])),
        "broadcast": (6, lambda s, d, r: nccl.ncclBroadcast(s, d, count, FLOAT32, 1, comm(r), stream[r])),
        "reduce": (6, lambda s, d, r: nccl.ncclReduce(s, d, count, FLOAT32, SUM, 2, comm(r), stream[r])),
        "all_gather": (18, lambda s, d, r: nccl.ncclAllGather(s, d, count, FLOAT32, comm(r), stream[r])),
        "reduce_scatter": (2, lambda s, d, r: nccl.ncclReduceScatter(s, d, part, FLOAT32, SUM, comm(r), stream[r])),
    }
    expected = {
        "all_reduce": [total] * 3,
        "broadcast": [sends[1]] * 3,
        "reduce": [np.zeros(6), np.zeros(6), total],
        "all_gather": [whole] * 3,
        "reduce_scatter": np.split(total, 3),
    }
    for name, (length, call) in calls.items():
        recvs = [np.zeros(length, np.float32) for _ in range(3)]
        assert ranks.group(lambda r, call=call, recvs=recvs: call(at(sends[r]), at(recvs[r]), r)) == 0
        assert ranks.synchronized() == [0, 0, 0]
        np.testing.assert_array_equal(recvs, expected[name], err_msg=name)


def test_sends_and_receives(ranks):
    """Each rank to each other: rank r gets from s what s meant for r."""
    sends = numbers(count=3)
    recvs = [np.zeros(3, np.float32) for _ in range(3)]

    def all_to_all(r):
        for peer in range(3):
            rest = (size(1), FLOAT32, peer, ranks.comm(r), ranks.streams[r])
            assert ranks.nccl.ncclSend(at(sends[r][peer:]), *rest) == 0
            assert ranks.nccl.ncclRecv(at(recvs[r][peer:]), *rest) == 0
        return 0

    assert ranks.group(all_to_all) == 0
    assert ranks.synchronized() == [0, 0, 0]
    np.testing.assert_array_equal(recvs, np.transpose(sends))


def reduce_on(ranks, count=6, op=SUM, dtype=FLOAT32, stream=None):
    """A call that all-reduces on a rank, with any of these different on rank 1."""
    sends = numbers()

    def call(r):
        n, o, d = (count, op, dtype) if r == 1 else (6, SUM, FLOAT32)
        s = ranks.streams[stream] if stream is not None and r == 1 else ranks.streams[r]
        return ranks.nccl.ncclAllReduce(at(sends[r]), at(sends[r]), size(n), d, o, ranks.comm(r), s)

    return call


def test_overlaps(ranks):
    """What is sent and received is apart, or in place: of several blocks the rank's own, and no other."""
    n, comm, stream, nccl = size(2), ranks.comm, ranks.streams, ranks.nccl

    def scatter(r, shift):
        block = at(wholes[r][2 * ((r + shift) % 3) :])
        return nccl.ncclReduceScatter(at(wholes[r]), block, n, FLOAT32, SUM, comm(r), stream[r])

    def gather(r, shift):
        block = at(wholes[r][2 * ((r + shift) % 3) :])
        return nccl.ncclAllGather(block, at(wholes[r]), n, FLOAT32, comm(r), stream[r])

    def reduce(r, shift):
        recv = at(wholes[r][shift:])
        return nccl.ncclAllReduce(at(wholes[r]), recv, n, FLOAT32, SUM, comm(r), stream[r])

    for call in (scatter, gather, reduce):
        wholes = numbers()
        assert ranks.group(lambda r, call=call: call(r, 1)) == INVALID_ARGUMENT
        assert "overlap, and not in place" in ranks.last_error()
        assert ranks.group(lambda r, call=call: call(r, 0)) == 0
        assert ranks.synchronized() == [0, 0, 0]
        total, own = sum(numbers()), [np.s_[2 * r : 2 * r + 2] for r in range(3)]
        expected = numbers()
        for r in range(3):
            if call is scatter:
                expected[r][own[r]] = total[own[r]]
            elif call is gather:
                expected[r] = np.concatenate([array[slot] for array, slot in zip(numbers(), own, strict=True)])
            else:
                expected[r][:2] = total[:2]
        np.testing.assert_array_equal(wholes, expected)


@pytest.mark.parametrize("different", [{"count": 5}, {"op": 2}, {"dtype": 2}])
@pytest.mark.parametrize("blocking", [True, False])
def test_collectives_must_match(standin, different, blocking):
    """Another count, operation or dtype on one rank: NCCL would hang or mix up numbers."""
    three = Ranks(standin, 3, blocking)
    assert three.group(reduce_on(three, **different)) == INVALID_USAGE
    assert "ranks 0 and 1 do not match" in three.last_error()
    three.end()


def test_stream_must_be_on_the_ranks_device(ranks):
    """And then nothing of the group is launched."""
    assert ranks.group(reduce_on(ranks, stream=2)) == INVALID_USAGE
    assert "rank 1 is on device 1, its stream on 2" in ranks.last_error()
    assert ranks.synchronized() == [0, 0, 0]
    assert ranks.group(reduce_on(ranks)) == 0


def test_event_of_a_context(ranks, standin):
    """It captures what was queued on its own device by then, on any stream, and nothing else."""
    cuda, event = ranks.cuda, ctypes.c_void_p()
    context = [ctypes.c_void_p(1 + device) for device in range(3)]
    cuda.cudaSetDevice(1)
    assert cuda.cudaEventCreateWithFlags(ctypes.byref(event), 2) == 0
    assert cuda.cuCtxRecordEvent(context[0], event) == 400
    for fail, was, ended in (("slow:1=40", NOT_READY, 0), ("slow:0=40", NOT_READY, 0), ("", 0, 0)):
        standin.fail(fail)
        assert cuda.cuCtxRecordEvent(context[1], event) == 0
        assert ranks.group(reduce_on(ranks)) == 0
        assert cuda.cudaEventQuery(event) == 0  # what came later is not captured
        assert cuda.cuCtxRecordEvent(context[1], event) == 0
        assert (cuda.cudaEventQuery(event), *ranks.synchronized()) == (was, 0, 0, 0)
        assert cuda.cudaEventQuery(event) == ended
    standin.fail("working:1=40,working:2")
    assert cuda.cudaEventQuery(event) == 0
    assert cuda.cuCtxRecordEvent(context[1], event) == 0 and cuda.cudaEventQuery(event) == NOT_READY
    assert cuda.cudaDeviceSynchronize() == 0 and cuda.cudaEventQuery(event) == 0
    assert cuda.cudaEventDestroy(event) == 0
    standin.fail("")


@pytest.fixture(scope="module")
def threaded_standin(built_standin, tmp_path_factory):
    """Libraries of their own, whose streams have threads."""
    threaded = Standin(tmp_path_factory.mktemp("threaded"))
    assert ctypes.CDLL(threaded.cudart).standin_use_threads(300, 1) == 0
    return threaded


@pytest.fixture(params=["when asked", "by threads"])
def either(request):
    """The stand-in in each of the ways in which work goes on. Whatever a test makes must be gone after it."""
    standin = request.getfixturevalue("built_standin" if request.param == "when asked" else "threaded_standin")
    standin.has_threads = request.param == "by threads"
    standin.fail("")
    before = standin.alive()
    yield standin
    standin.fail("")
    assert standin.settled(before) == before


class Device:
    """A device with streams, memory and events; calls raise unless they return 0."""

    def __init__(self, standin, device, n_streams=2):
        self.library, self.device, self.made = ctypes.CDLL(standin.cudart), device, []
        self.context = ctypes.c_void_p(1 + device)
        self("cudaSetDevice", device)
        self.streams = [self.make("cudaStreamCreateWithPriority", "cudaStreamDestroy", 1, 0) for _ in range(n_streams)]

    def __call__(self, name, *arguments):
        error = getattr(self.library, name)(*arguments)
        assert error == 0, (name, error)

    def make(self, call, end, *arguments):
        made = ctypes.c_void_p()
        self(call, ctypes.byref(made), *arguments)
        self.made.append((end, made))
        return made

    def event(self):
        self("cudaSetDevice", self.device)
        return self.make("cudaEventCreateWithFlags", "cudaEventDestroy", 2)

    def memory(self, size):
        self("cudaSetDevice", self.device)
        return self.make("cudaMalloc", "cudaFree", ctypes.c_size_t(size))

    def end(self):
        for end, made in reversed(self.made):
            self(end, made)


HOST_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_order_by_events(either):
    """What a stream or a context waits for, it waits for; what came later, and what is elsewhere, it does not."""
    one, two, order = Device(either, 1), Device(either, 2), []
    (a, b), (c, d), event = one.streams, two.streams, one.event()
    gate = threading.Event()
    works = [HOST_WORK(lambda _, name=name: order.append(name)) for name in "abcdef"]
    block = HOST_WORK(lambda _: gate.wait(10))

    def launch(device, stream, work):
        device("cudaLaunchHostFunc", stream, work, None)

    two("cudaStreamWaitEvent", c, event, 0)  # never recorded: no wait
    if either.has_threads:
        launch(one, a, block)
    launch(one, a, works[0])
    one("cudaEventRecord", event, a)
    two("cudaStreamWaitEvent", c, event, 0)
    launch(one, a, works[1])
    one("cudaEventRecord", event, a)  # anew: c waits for what it was
    launch(two, c, works[2])
    launch(one, b, works[3])
    one("cuCtxRecordEvent", one.context, event)
    two("cuCtxWaitEvent", two.context, event)
    idle = Device(either, 3)
    waited = idle.event()
    idle("cuCtxWaitEvent", idle.context, event)
    idle("cuCtxRecordEvent", idle.context, waited)  # of a context that has nothing to do but to wait
    one.library.cudaEventDestroy(event)  # which does not end the waits
    one.made = [made for made in one.made if made[1] is not event]
    launch(two, d, works[4])
    launch(two, c, works[5])
    if either.has_threads:
        time.sleep(0.02)
        assert idle.library.cudaEventQuery(waited) == NOT_READY
        assert set(order) <= {"d"} and one.library.cudaStreamQuery(a) == NOT_READY == two.library.cudaStreamQuery(d)
    gate.set()
    for device, stream in itertools.product((one, two), range(2)):
        device("cudaStreamSynchronize", device.streams[stream])
    at = {name: order.index(name) for name in "abcdef"}
    assert at["a"] < at["c"] < at["f"] and at["a"] < at["b"]
    assert max(at[name] for name in "abd") < min(at["e"], at["f"])
    one.end(), two.end(), idle.end()


@pytest.mark.parametrize("call", ["cudaEventRecord", "cuCtxRecordEvent"])
def test_events_of_another_device(either, call):
    """It is for its own device that an event records. Any stream may wait for it."""
    one, two, event = Device(either, 1), Device(either, 2), None
    event = one.event()
    foreign = (event, two.streams[0]) if call == "cudaEventRecord" else (two.context, event)
    assert getattr(one.library, call)(*foreign) == 400
    two("cuCtxWaitEvent", two.context, event)
    two("cudaEventSynchronize", event)
    one.end(), two.end()


def test_copies(either):
    """Fresh memory is NaN; copies lie in the order of their stream, and are counted by their direction."""
    device = Device(either, 3)
    stream, memory = device.streams[0], device.memory(4000)
    counts = ("to_device", "bytes_to_device", "to_host", "bytes_to_host", "wait")
    total = device.library.standin_total
    total.restype = ctypes.c_longlong
    before = [total(kind.encode()) for kind in counts]
    first, last, sent = np.zeros(1000, np.float32), np.zeros(1000, np.float32), np.arange(1000, dtype=np.float32)
    for to, source in ((at(first), memory), (memory, at(sent)), (at(last), memory)):
        device("cudaMemcpyAsync", to, source, size(4000), 4, stream)
    device("cudaMemsetAsync", memory, 0, size(2000), stream)
    device("cudaStreamSynchronize", stream)
    assert np.isnan(first).all() and np.array_equal(last, sent)
    device("cudaMemcpy", at(last), memory, size(4000), 4)
    assert not last[:500].any() and np.array_equal(last[500:], sent[500:])
    assert [total(kind.encode()) - b for kind, b in zip(counts, before, strict=True)] == [1, 4000, 3, 12000, 1]
    device.end()


def test_every_collective_under_delays(threaded_standin):
    """200 in a row on streams that come late, each rank at another time; and what is asked for in the middle."""
    three = Ranks(threaded_standin, 3)
    reduce, sends, recvs = three.nccl.ncclAllReduce, numbers(), numbers()
    threaded_standin.fail("slow:1:30=20")
    for _ in range(200):
        sends, recvs = recvs, sends
        calls = [(at(sends[r]), at(recvs[r]), size(6), FLOAT32, 2, three.comm(r), three.streams[r]) for r in range(3)]
        assert three.group(lambda r, calls=calls: reduce(*calls[r])) == 0
    assert three.synchronized() == [0, 0, 0]
    np.testing.assert_array_equal(recvs, [numbers()[2]] * 3)  # the maximum
    assert three.end("ncclCommDestroy") == [0] * 6


def test_link(either):
    """A collective ends a latency and its bytes / bandwidth after the last rank has come, and so does a copy."""
    three, device = Ranks(either, 3), Device(either, 4)
    sends, recvs = numbers(count=30000), numbers(count=30000)

    def timed(run):
        run(), (begin := time.monotonic())
        run()
        return time.monotonic() - begin

    def reduce():
        calls = [(at(sends[r]), at(recvs[r]), size(30000), 7, 0, three.comm(r), three.streams[r]) for r in range(3)]
        assert three.group(lambda r: three.nccl.ncclAllReduce(*calls[r])) == 0
        assert three.synchronized() == [0, 0, 0]

    def copy():
        device("cudaMemcpyAsync", memory, at(sends[0]), size(120000), 4, device.streams[0])
        device("cudaStreamSynchronize", device.streams[0])

    memory = device.memory(120000)
    link, copy_link = three.nccl.standin_link, three.cuda.standin_copy_link
    for call, run, expected_s in ((link, reduce, 0.01 + 4 / 3 * 0.04), (copy_link, copy, 0.01 + 0.04)):
        call(ctypes.c_double(0.003), ctypes.c_double(10000))
        assert 0.95 * expected_s < timed(run) < 2 * expected_s
        call(ctypes.c_double(0), ctypes.c_double(0))
    device.end()
    assert three.end("ncclCommDestroy") == [0] * 6


def test_abort_under_delays(threaded_standin):
    """One of the ranks does not come; the streams go on once the others are aborted."""
    three = Ranks(threaded_standin, 3, blocking=False)
    threaded_standin.fail("async:1=6")
    assert three.group(reduce_on(three)) == IN_PROGRESS and three.poll() == [0, REMOTE_ERROR, 0]
    assert three.cuda.cudaStreamQuery(three.streams[0]) == NOT_READY
    assert [three.nccl.ncclCommAbort(three.comm(r)) for r in range(3)] == [0, 0, 0]
    assert three.synchronized() == [0, 0, 0]
    assert [three.cuda.cudaStreamDestroy(stream) for stream in three.streams] == [0, 0, 0]
    threaded_standin.fail("")


def test_use_after_the_end(standin):
    """Of a communicator, and of a stream."""
    three = Ranks(standin, 3)
    assert three.end("ncclCommDestroy") == [0] * 6
    assert three.group(reduce_on(three)) == INVALID_ARGUMENT
    assert "was destroyed" in three.last_error()
    assert three.nccl.ncclCommAbort(three.comm(0)) == INVALID_ARGUMENT
    assert three.synchronized() == [400] * 3


def test_destroy_with_work_under_way(standin):
    """NCCL would wait for ever for the rank that does not come."""
    two = Ranks(standin, 2)
    assert two.group(reduce_on(two), ranks=[0]) == 0
    assert two.cuda.cudaStreamQuery(two.streams[0]) == NOT_READY
    assert two.nccl.ncclCommDestroy(two.comm(0)) == INVALID_USAGE
    assert "under way" in two.last_error()
    two.nccl.ncclCommAbort(two.comm(1))
    for stream in two.streams:
        two.cuda.cudaStreamDestroy(stream)


def test_open_group(ranks):
    """Whoever waits in an open group waits for what is not launched."""
    assert ranks.nccl.ncclGroupStart() == 0
    assert reduce_on(ranks)(0) == 0
    assert ranks.cuda.cudaStreamQuery(ranks.streams[0]) == OPEN_GROUP
    assert ranks.nccl.ncclCommDestroy(ranks.comm(1)) == INVALID_USAGE
    assert ranks.nccl.ncclGroupEnd() == INVALID_USAGE  # what failed inside
    assert ranks.nccl.ncclGroupEnd() == INVALID_USAGE
    assert "no group is open" in ranks.last_error()


def test_two_threads_in_one_communicator(ranks):
    """One has it in its open group; the other is refused, and may use it afterwards."""
    seen = []
    ranks.nccl.ncclGroupStart()
    for r in range(3):
        assert reduce_on(ranks)(r) == 0
    other = threading.Thread(target=lambda: seen.append(ranks.group(reduce_on(ranks))))
    other.start()
    other.join(10)
    assert seen == [INVALID_USAGE] and "two threads" in ranks.last_error()
    assert ranks.nccl.ncclGroupEnd() == 0
    assert ranks.group(reduce_on(ranks)) == 0


def test_non_blocking_ends_when_it_is_polled(standin):
    """In progress until it was asked; only then is the work on the streams."""
    three = Ranks(standin, 3, blocking=False)
    call = reduce_on(three)
    assert three.group(call) == IN_PROGRESS
    assert call(0) == INVALID_ARGUMENT and "before its previous operation" in three.last_error()
    assert three.states() == [IN_PROGRESS] * 3
    assert three.poll() == [0, 0, 0]
    assert three.synchronized() == [0, 0, 0]
    assert three.group(lambda r: three.nccl.ncclCommFinalize(three.comm(r))) == 0
    assert three.states() == [IN_PROGRESS] * 3 and three.poll() == [0, 0, 0]
    assert three.end("ncclCommDestroy") == [0] * 6


def test_duplicate_device(standin):
    """Two ranks on the device that is current: the mistake of not setting it."""
    nccl, comms = ctypes.CDLL(standin.nccl), (ctypes.c_void_p * 2)()
    assert nccl.ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(3, 3)) == INVALID_USAGE
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    assert b"Duplicate GPU detected : rank 1 and rank 0" in nccl.ncclGetLastError(None)
    for comm in comms:
        nccl.ncclCommAbort(ctypes.c_void_p(comm))


def test_split(ranks):
    """Ranks of one color, in the order of their keys."""
    new = [ctypes.c_void_p() for _ in range(3)]
    assert ranks.group(lambda r: ranks.nccl.ncclCommSplit(ranks.comm(r), r % 2, -r, ctypes.byref(new[r]), None)) == 0
    sends = numbers(count=1)
    recvs = [np.zeros(2, np.float32) for _ in range(3)]
    assert (
        ranks.group(
            lambda r: ranks.nccl.ncclAllGather(at(sends[r]), at(recvs[r]), size(1), 7, new[r], ranks.streams[r])
        )
        == 0
    )
    assert ranks.synchronized() == [0, 0, 0]
    np.testing.assert_array_equal(recvs, [[20, 0], [10, 0], [20, 0]])
    assert [ranks.nccl.ncclCommDestroy(comm) for comm in new] == [0, 0, 0]


def test_scaled_sum(ranks):
    """An operation of a rank's own: each rank's numbers times its scalar."""
    ops, sends = [ctypes.c_int() for _ in range(3)], numbers()
    recvs = [np.zeros(6, np.float32) for _ in range(3)]
    for r, op in enumerate(ops):
        scalar, comm = ctypes.c_float(r + 0.5), ranks.comm(r)
        create = ranks.nccl.ncclRedOpCreatePreMulSum
        assert create(ctypes.byref(op), ctypes.byref(scalar), FLOAT32, 1, comm) == 0
    assert (
        ranks.group(
            lambda r: ranks.nccl.ncclAllReduce(
                at(sends[r]), at(recvs[r]), size(6), FLOAT32, ops[r], ranks.comm(r), ranks.streams[r]
            )
        )
        == 0
    )
    assert ranks.synchronized() == [0, 0, 0]
    np.testing.assert_array_equal(recvs, [0.5 * sends[0] + 1.5 * sends[1] + 2.5 * sends[2]] * 3)
    assert [ranks.nccl.ncclRedOpDestroy(op, ranks.comm(r)) for r, op in enumerate(ops)] == [0, 0, 0]


def test_told_to_fail(standin):
    """A call by its number, a launch that never ends, an error after the launch, a late rank."""
    three = Ranks(standin, 3, blocking=False)
    call = reduce_on(three)
    standin.fail("ncclAllReduce:2=6")
    assert three.group(call) == REMOTE_ERROR
    standin.fail("stuck:1:2")
    assert three.group(call) == IN_PROGRESS and three.poll() == [0, 0, 0]
    assert three.synchronized() == [0, 0, 0]
    assert three.group(call) == IN_PROGRESS
    assert [three.states() for _ in range(5)][-1] == [0, IN_PROGRESS, 0]
    assert three.cuda.cudaStreamQuery(three.streams[0]) == NOT_READY
    assert three.end() == [0] * 6

    three = Ranks(standin, 3, blocking=False)
    standin.fail("slow:2=30")
    assert three.group(reduce_on(three)) == IN_PROGRESS and three.poll() == [0, 0, 0]
    assert three.cuda.cudaStreamQuery(three.streams[0]) == NOT_READY
    assert three.synchronized() == [0, 0, 0]
    standin.fail("async:1=6")
    assert three.group(reduce_on(three)) == IN_PROGRESS and three.poll() == [0, REMOTE_ERROR, 0]
    assert three.end() == [0] * 6


def test_told_to_corrupt(ranks, standin):
    """What goes from one rank to another is changed, there and nowhere else."""
    standin.fail("corrupt:2:0")
    sends, recvs = numbers(), numbers()
    reduce = ranks.nccl.ncclAllReduce
    group = ranks.group(
        lambda r: reduce(at(sends[r]), at(recvs[r]), size(6), FLOAT32, SUM, ranks.comm(r), ranks.streams[r])
    )
    assert (group, ranks.synchronized()) == (0, [0, 0, 0])
    assert [np.array_equal(recv, sum(sends)) for recv in recvs] == [False, True, True]
