"""Groups that are only enqueued, on plain CUDA streams: order, nobody's waits, what is let go, captures."""

import contextlib
import ctypes
import functools

import isolated
import numpy as np
import pytest
from device_memory import RuntimeMemory, is_standin
from launching import CAPTURE_INVALIDATED, RELAXED, THREAD_LOCAL, Driver, Stream, pinned, run_as_a_gpu_does

from ncclsync.communicator import NcclCommunicator, native
from ncclsync.communicator.native import lib
from ncclsync.errors import NcclError

ROUNDS, PERIOD, MOST_PENDING = 300, 25, 3
MOST_COUNT, TABLE_COUNT = 4096, 2**16
BUCKETS = (
    (lib.NCS_ALL_REDUCE, "sum", np.float32),
    (lib.NCS_ALL_REDUCE, "max", np.int32),
    (lib.NCS_BROADCAST, "sum", np.int64),
    (lib.NCS_REDUCE_SCATTER, "sum", np.float32),
    (lib.NCS_ALL_GATHER, "sum", np.int32),
)


class Round:
    """What is sent and received in one round; every round has other sizes and other numbers.

    Attributes:
        counts: of each bucket's collective.
        root: of the broadcast.
    """

    def __init__(self, number, ranks, tables):
        draw = np.random.default_rng([number, ranks])
        self._number, self._ranks, self._tables = number, ranks, tables
        self.counts = [int(count) for count in np.exp(draw.uniform(0, np.log(MOST_COUNT + 1), len(BUCKETS)))]
        self.root = int(draw.integers(ranks))
        self.busy = [int(piece) for piece in draw.integers(1, 9, draw.integers(2, 6))]  # eighths of the scratch memory

    def sent(self, bucket, rank):
        """Where in the table begins what a rank sends, and how much that is."""
        blocks = self._ranks if BUCKETS[bucket][0] == lib.NCS_REDUCE_SCATTER else 1
        begin = (self._number * 977 + rank * 4801 + bucket * 53) % (TABLE_COUNT - self._ranks * MOST_COUNT)
        return begin, blocks * self.counts[bucket]

    def received(self, bucket, rank):
        """What a rank must receive, by NumPy."""
        kind, op, dtype = BUCKETS[bucket]
        parts = [self.sent(bucket, r) for r in range(self._ranks)]
        arrays = [self._tables[np.dtype(dtype)][begin : begin + count] for begin, count in parts]
        if kind == lib.NCS_BROADCAST:
            return arrays[self.root]
        if kind == lib.NCS_ALL_GATHER:
            return np.concatenate(arrays)
        reduced = np.max(arrays, axis=0) if op == "max" else np.sum(arrays, axis=0, dtype=dtype)
        return np.split(reduced, self._ranks)[rank] if kind == lib.NCS_REDUCE_SCATTER else reduced


def allocate(memory, size_bytes):
    """Return the address of so much memory of GPU 0."""
    return memory.put(np.zeros(size_bytes, np.uint8)).pointer


class Tower:
    """A rank: its streams, and the pieces of memory that its buffers lie in, used again as soon as they are let go.

    What is sent is written on one stream, what is received is read on another, unless the launcher is told the stream.
    """

    def __init__(self, rank, ranks, memory, tables, every_stream):
        self.rank, self.ranks = rank, ranks
        self.writer = Stream()
        self.reader = Stream() if every_stream else self.writer
        self.told = None if every_stream else self.writer
        self.busy_bytes = 2**16 if is_standin() else 2**30
        self._scratch = allocate(memory, self.busy_bytes)
        self._tables = tables  # on the GPU
        self.side_bytes = ranks * MOST_COUNT * 8
        self.free = [allocate(memory, 2 * len(BUCKETS) * self.side_bytes) for _ in range(MOST_PENDING + 1)]

    def sides(self, piece, bucket):
        """Where a bucket's two sides are in a piece of memory."""
        begin = piece + 2 * bucket * self.side_bytes
        return begin, begin + self.side_bytes

    def arrive(self, driver, this):
        """Enqueue work that at last writes what is sent, and arrive; return the arrival, the piece and a mark."""
        piece, buffers = self.free.pop(), []
        for bucket in range(len(BUCKETS)):
            send, recv = self.sides(piece, bucket)
            self.writer.fill(send, 0xFF, self.side_bytes)
            self.reader.fill(recv, 0xFF, self.side_bytes)
        for eighths in this.busy:
            self.writer.fill(self._scratch, eighths, eighths * self.busy_bytes // 8)
        for bucket, (kind, op, dtype) in enumerate(BUCKETS):
            (send, recv), (begin, count) = self.sides(piece, bucket), this.sent(bucket, self.rank)
            size = np.dtype(dtype).itemsize
            self.writer.copy(send, self._tables[np.dtype(dtype)] + begin * size, count * size)
            recv = send if kind == lib.NCS_BROADCAST and self.rank == this.root else recv
            buffers.append((kind, native.OPS[op], this.root, send, recv, this.counts[bucket], np.dtype(dtype).name))
        mark = self.writer.mark()
        arrival = driver.arrive(self.rank, self.told, buffers, functools.partial(self.free.append, piece))
        return arrival, piece, mark

    def read(self, piece, this, host):
        """Enqueue the copying of what was received; return where each bucket's lies on the host, and the next place."""
        places = []
        for bucket, (kind, _op, dtype) in enumerate(BUCKETS):
            in_place = kind == lib.NCS_BROADCAST and self.rank == this.root
            send, recv = self.sides(piece, bucket)
            blocks = self.ranks if kind == lib.NCS_ALL_GATHER else 1
            size = blocks * this.counts[bucket] * np.dtype(dtype).itemsize
            stream = self.writer if in_place else self.reader  # which writes there in the next round
            stream.copy(host, send if in_place else recv, size)
            places.append((host, size))
            host += size
        return places, host

    def close(self):
        """End the streams."""
        for stream in {self.writer, self.reader}:
            stream.close()


def check_received(this, rank, places):
    """Compare with NumPy what has come to the host."""
    for bucket, (address, size) in enumerate(places):
        expected = this.received(bucket, rank)
        got = np.frombuffer((ctypes.c_char * size).from_address(address), expected.dtype)
        np.testing.assert_array_equal(got, expected, err_msg=f"round {this._number}, rank {rank}, {BUCKETS[bucket]}")


def busy_streams(ranks, every_stream):
    """Rounds of groups, some of them delivered late; the host looks at results now and then."""
    run_as_a_gpu_does()
    draw = np.random.default_rng(1)
    tables = {np.dtype(dtype): draw.integers(0, 1000, TABLE_COUNT).astype(dtype) for _, _, dtype in BUCKETS}
    n_ahead = 0
    with NcclCommunicator([0] * ranks, timeout_s=60.0) as comm, RuntimeMemory() as memory:
        driver, placed = Driver(comm), {dtype: memory.put(table).pointer for dtype, table in tables.items()}
        towers = [Tower(rank, ranks, memory, placed, every_stream) for rank in range(ranks)]
        pieces = [sorted(tower.free) for tower in towers]
        with pinned(PERIOD * ranks * len(BUCKETS) * towers[0].side_bytes) as host:
            pending, read, place = [], [], host

            def deliver_first():
                nonlocal place, n_ahead
                this, launched, lying, marks = pending.pop(0)
                for tower, piece in zip(towers, lying, strict=True):
                    driver.deliver(launched, tower.rank, tower.told)
                    places, place = tower.read(piece, this, place)
                    read.append((this, tower.rank, places))
                driver.release(launched)
                n_ahead += not all(mark.is_reached() for mark in marks)
                for mark in marks:
                    mark.close()

            for number in range(ROUNDS):
                this = Round(number, ranks, tables)
                arrivals, lying, marks = zip(*(tower.arrive(driver, this) for tower in towers), strict=True)
                pending.append((this, driver.launch(arrivals), lying, marks))
                while len(pending) > number % (MOST_PENDING + 1):
                    deliver_first()
                if (number + 1) % PERIOD == 0:
                    while pending:
                        deliver_first()
                    for tower in towers:
                        tower.reader.synchronize()
                        tower.writer.synchronize()
                    for one in read:
                        check_received(*one)
                    read, place = [], host
        assert driver.launcher.wait(60.0) and driver.launcher.groups() == (ROUNDS, ROUNDS), driver.launcher.groups()
        driver.check_nothing_is_left()
        assert [sorted(tower.free) for tower in towers] == pieces
        for tower in towers:
            tower.close()
        print(f"{n_ahead} of {ROUNDS} rounds were delivered before the streams' own work had ended")
        assert n_ahead > ROUNDS / 10, n_ahead


class Sums:
    """All-reduces of small numbers on a stream for each rank, each of other numbers than the last.

    Attributes:
        driver: of the communicator's launcher.
        streams: of the ranks.
    """

    COUNT = 1000

    def __init__(self, comm, memory):
        self.driver, self.streams = Driver(comm), [Stream() for _ in range(comm.size)]
        self._n = 0
        arrays = [np.arange(self.COUNT + 100, dtype=np.int32) * (rank + 1) for rank in range(comm.size)]
        self._expected = sum(arrays)
        self._tables = [memory.put(array).pointer for array in arrays]
        self._sends = [allocate(memory, 4 * self.COUNT) for _ in arrays]
        self._recvs = [memory.put(np.full(self.COUNT, -1, np.int32)) for _ in arrays]

    def arrive(self, every_stream=False):
        """Enqueue the writing of what is sent, and arrive."""
        self._n += 1
        arrivals = []
        for rank, (stream, table, send, recv) in enumerate(
            zip(self.streams, self._tables, self._sends, self._recvs, strict=True)
        ):
            stream.copy(send, table + 4 * self._n, 4 * self.COUNT)
            told = None if every_stream else stream
            buffer = (lib.NCS_ALL_REDUCE, native.OPS["sum"], 0, send, recv.pointer, self.COUNT, "int32")
            arrivals.append(self.driver.arrive(rank, told, [buffer]))
        return arrivals

    def launch(self, arrivals):
        """Launch the group."""
        return self.driver.launch(arrivals)

    def deliver(self, launched, every_stream=False):
        """Deliver it to all ranks."""
        for rank, stream in enumerate(self.streams):
            self.driver.deliver(launched, rank, None if every_stream else stream)

    def check(self, launched):
        """Wait for the group's end, check what was received, and release it."""
        self.driver.wait(launched)
        self.driver.release(launched)
        for stream in self.streams:
            stream.synchronize()
        for recv in self._recvs:
            np.testing.assert_array_equal(recv.get(), self._expected[self._n : self._n + self.COUNT])

    def run(self):
        """Do all of it; NCCL has then connected the ranks and loaded its kernels."""
        launched = self.launch(self.arrive())
        self.deliver(launched)
        self.check(launched)

    def close(self):
        """Check that nothing is left, and end the streams."""
        self.driver.check_nothing_is_left()
        for stream in self.streams:
            stream.close()


@contextlib.contextmanager
def sums(ranks):
    """A communicator, and sums on it, of which one was made."""
    run_as_a_gpu_does()
    with NcclCommunicator([0] * ranks, timeout_s=10.0) as comm, RuntimeMemory() as memory:
        made = Sums(comm, memory)
        made.run()
        yield comm, made
        made.close()


def own_work_holds_nobody_up(ranks, every_stream):
    """All is enqueued while the ranks' streams wait for the host; the numbers are written after that."""
    with sums(ranks) as (_comm, made):
        with contextlib.ExitStack() as held:
            marks = [held.enter_context(stream.held_up()) for stream in made.streams]
            launched = made.launch(made.arrive(every_stream))
            made.deliver(launched, every_stream)
            assert not any(mark.is_reached() for mark in marks)
            assert made.driver.launcher.groups() == (2, 1)
        made.check(launched)
        for mark in marks:
            mark.close()


def only_the_told_stream(ranks, every_stream):
    """Another stream of the GPU waits for the host: a group that was told its streams ends before."""
    with sums(ranks) as (_comm, made):
        other = Stream()
        with other.held_up() as mark:
            launched = made.launch(made.arrive(every_stream))
            made.driver.launcher.wait(0.5 if every_stream else 5.0)
            assert not mark.is_reached()
            assert made.driver.launcher.groups() == (2, 1 if every_stream else 2)
        made.deliver(launched, every_stream)
        made.check(launched)
        mark.close()
        other.close()


def told_streams_and_a_capture(ranks, mode):
    """Another stream is captured from before the arrival until after the end: two nodes, and the right sums."""
    with sums(ranks) as (comm, made), RuntimeMemory() as memory:
        captured, place = Stream(), allocate(memory, 100)
        with captured.captured(mode) as found:
            captured.fill(place, 1, 100)
            launched = made.launch(made.arrive())
            made.deliver(launched)
            made.check(launched)
            captured.fill(place, 2, 100)
        assert found == [0, 2], found
        assert comm.find_failure() is None
        captured.close()


def every_stream_and_a_capture(ranks, mode, began):
    """CUDA refuses, by an error that names its call, and invalidates the capture."""
    with sums(ranks) as (comm, made), RuntimeMemory() as memory:
        captured, place, launched = Stream(), allocate(memory, 100), None
        if began == "before deliver":
            launched = made.launch(made.arrive())
        with captured.captured(mode) as found:
            captured.fill(place, 1, 100)
            try:
                if launched is None:
                    made.arrive(every_stream=True)
                else:
                    made.deliver(launched, every_stream=True)
            except NcclError as error:
                refused = error
            else:
                raise AssertionError("CUDA has taken a stream that is captured for one of its context's")
        print(f"{refused}; cudaStreamEndCapture returned {found[0]}")
        assert refused.call == ("cuCtxRecordEvent" if launched is None else "cuCtxWaitEvent"), refused
        assert found == [CAPTURE_INVALIDATED, 0], found
        if launched is None:
            assert comm.closed and comm.failure.call == "cuCtxRecordEvent", comm.failure
            comm.reopen()
        else:
            assert not comm.closed, comm.failure
            for rank in range(1, ranks):
                made.driver.deliver(launched, rank, None)
            made.check(launched)
        made.run()
        captured.close()


@pytest.mark.parametrize("every_stream", [False, True], ids=["told streams", "every stream"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_busy_streams(ranks, every_stream):
    """300 groups of five collectives give NumPy's results, over memory that is used again as soon as it is let go."""
    print(isolated.run(busy_streams, ranks=ranks, every_stream=every_stream))


@pytest.mark.parametrize("every_stream", [False, True], ids=["told streams", "every stream"])
def test_nobody_waits(every_stream):
    """A group is launched and delivered while the work before it has not ended."""
    isolated.run(own_work_holds_nobody_up, ranks=2, every_stream=every_stream)


@pytest.mark.parametrize("every_stream", [False, True], ids=["told streams", "every stream"])
def test_another_stream(every_stream):
    """A group waits for another stream's work only where it was not told its own."""
    isolated.run(only_the_told_stream, ranks=2, every_stream=every_stream)


@pytest.mark.parametrize("mode", [THREAD_LOCAL, RELAXED], ids=["thread-local", "relaxed"])
def test_capture_beside_told_streams(mode):
    """Neither the capture nor the group notices."""
    isolated.run(told_streams_and_a_capture, ranks=2, mode=mode)


@pytest.mark.parametrize("began", ["before arrive", "before deliver"])
@pytest.mark.parametrize("mode", [THREAD_LOCAL, RELAXED], ids=["thread-local", "relaxed"])
def test_capture_among_every_stream(mode, began):
    """Where the stream is not told, the error names CUDA's call; a communicator that it ends can be joined anew."""
    print(isolated.run(every_stream_and_a_capture, ranks=2, mode=mode, began=began))
