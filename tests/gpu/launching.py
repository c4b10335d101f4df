"""Plain CUDA streams, and the calls of csrc/nccl/launcher.c as the ops of TensorFlow make them, without TensorFlow."""

import collections
import concurrent.futures
import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator

from device_memory import check, is_standin, open_runtime

from ncclsync.communicator import NcclCommunicator, native
from ncclsync.communicator.native import ffi, lib

NOT_READY, CAPTURE_INVALIDATED = 600, 901  # of cudaError
THREAD_LOCAL, RELAXED = 1, 2  # of cudaStreamCaptureMode
_NON_BLOCKING, _DISABLE_TIMING, _TO_WHERE_THE_POINTERS_TELL = 1, 2, 4


def run_as_a_gpu_does() -> None:
    """Let the stand-in's streams have threads, each with random delays; before there is a stream.

    Its ranks are all of this process then: no other one is told what they send, of which there is much.
    """
    if is_standin():
        os.environ.pop("STANDIN_FOLDER", None)
        check(open_runtime(), "standin_use_threads", 100, 7)


class Stream:
    """A stream of GPU 0 that waits for no other."""

    def __init__(self) -> None:
        self._runtime = open_runtime()
        self._semaphores: list = []  # which the stream may still wait for
        self.handle = ctypes.c_void_p()
        check(self._runtime, "cudaSetDevice", 0)
        check(self._runtime, "cudaStreamCreateWithFlags", ctypes.byref(self.handle), _NON_BLOCKING)

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        """Enqueue a copy."""
        to, source, size = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size_bytes)
        check(self._runtime, "cudaMemcpyAsync", to, source, size, _TO_WHERE_THE_POINTERS_TELL, self.handle)

    def fill(self, to: int, byte: int, size_bytes: int) -> None:
        """Enqueue the setting of all bytes."""
        check(self._runtime, "cudaMemsetAsync", ctypes.c_void_p(to), byte, ctypes.c_size_t(size_bytes), self.handle)

    def mark(self) -> "Mark":
        """Enqueue a mark."""
        return Mark(self._runtime, self.handle)

    @contextlib.contextmanager
    def held_up(self) -> Iterator["Mark"]:
        """Let what is enqueued from here on wait for the end of this; yield a mark behind the wait."""
        libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        self._semaphores.append(semaphore)
        libc.sem_init(semaphore, 0, 0)
        check(self._runtime, "cudaLaunchHostFunc", self.handle, libc.sem_wait, semaphore)
        try:
            yield self.mark()
        finally:
            libc.sem_post(semaphore)

    @contextlib.contextmanager
    def captured(self, mode: int) -> Iterator[list]:
        """Capture into a graph, in a thread of its own, what is enqueued, but not done, meanwhile.

        Args:
            mode: THREAD_LOCAL or RELAXED.

        Yields:
            An empty list; when the capture has ended, it is [error, nodes of the graph].
        """
        graph, n_nodes, found = ctypes.c_void_p(), ctypes.c_size_t(), []
        with concurrent.futures.ThreadPoolExecutor(1) as thread:

            def begin():
                check(self._runtime, "cudaSetDevice", 0)
                check(self._runtime, "cudaStreamBeginCapture", self.handle, mode)

            def end():
                error = self._runtime.cudaStreamEndCapture(self.handle, ctypes.byref(graph))
                if graph:
                    check(self._runtime, "cudaGraphGetNodes", graph, None, ctypes.byref(n_nodes))
                    check(self._runtime, "cudaGraphDestroy", graph)
                found.extend([error, n_nodes.value])

            thread.submit(begin).result()
            try:
                yield found
            finally:
                thread.submit(end).result()

    def synchronize(self) -> None:
        """Wait for all that was enqueued."""
        check(self._runtime, "cudaStreamSynchronize", self.handle)

    def close(self) -> None:
        """Wait, and end it."""
        self.synchronize()
        check(self._runtime, "cudaStreamDestroy", self.handle)


class Mark:
    """An event: whether a stream has come to it."""

    def __init__(self, runtime: ctypes.CDLL, stream: ctypes.c_void_p) -> None:
        self._runtime, self._handle = runtime, ctypes.c_void_p()
        check(runtime, "cudaEventCreateWithFlags", ctypes.byref(self._handle), _DISABLE_TIMING)
        check(runtime, "cudaEventRecord", self._handle, stream)

    def is_reached(self) -> bool:
        """Return whether all before it has ended."""
        error = self._runtime.cudaEventQuery(self._handle)
        if error != NOT_READY:
            check(self._runtime, "cudaEventQuery", self._handle)
        return error != NOT_READY

    def close(self) -> None:
        """End it."""
        check(self._runtime, "cudaEventDestroy", self._handle)


@contextlib.contextmanager
def pinned(size_bytes: int) -> Iterator[int]:
    """The address of host memory that copies need not wait for."""
    runtime, pointer = open_runtime(), ctypes.c_void_p()
    check(runtime, "cudaMallocHost", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
    try:
        yield pointer.value
    finally:
        check(runtime, "cudaFreeHost", pointer)


class Driver:
    """A communicator's launcher, and whose buffers it has let go.

    Attributes:
        launcher: Python's view of it.
        let_go: how often each arrival's buffers were let go, by its number.
        n_arrived: how many arrivals there were; they are numbered from 1.
    """

    def __init__(self, comm: NcclCommunicator) -> None:
        self.launcher = comm.launcher()
        self.let_go: collections.Counter[int] = collections.Counter()
        self.n_arrived = 0
        self._handle = ffi.cast("ncs_launcher*", self.launcher.address)
        self._reactions: dict[int, Callable[[], None]] = {}
        self._hear = ffi.callback("void(void*)", self._count_let_go)

    def _count_let_go(self, kept) -> None:
        number = int(ffi.cast("intptr_t", kept))
        self.let_go[number] += 1
        self._reactions.pop(number, lambda: None)()

    def arrive(
        self, rank: int, stream: Stream | None, buffers: list[tuple], react: Callable[[], None] = lambda: None
    ) -> object:
        """Arrive with buffers, (kind, op, root, send, recv, count, dtype) each; `react` when they are let go."""
        number = self.n_arrived + 1
        self._reactions[number] = react
        sides = [
            (*what, _pointer(send), _pointer(recv), count, native.DTYPES[dtype])
            for *what, send, recv, count, dtype in buffers
        ]
        rows, kept = ffi.new("ncs_buffer[]", sides), _pointer(number)
        failure, arrival = ffi.new("ncs_failure*"), ffi.new("ncs_arrival**")
        all_rows = ffi.new("ncs_buffers*", (rows, len(rows), kept, self._hear))
        status = lib.ncs_arrive(self._handle, rank, _stream(stream), all_rows, failure, arrival)
        native.check_failure(status, failure)
        self.n_arrived = number  # else nobody has the buffers but the caller
        return arrival[0]

    def launch(self, arrivals: list) -> object:
        """Launch a group; gives the arrivals up."""
        failure, launched = ffi.new("ncs_failure*"), ffi.new("ncs_launched**")
        try:
            native.check_failure(lib.ncs_launch(self._handle, 0, arrivals, failure, launched), failure)
        finally:
            for arrival in arrivals:
                lib.ncs_arrival_release(arrival)
        return launched[0]

    def deliver(self, launched: object, rank: int, stream: Stream | None, waits: bool = False) -> None:
        """Deliver a group to a rank."""
        failure = ffi.new("ncs_failure*")
        native.check_failure(lib.ncs_deliver(launched, rank, _stream(stream), waits, failure), failure)

    def release(self, launched: object) -> None:
        """Give a group up."""
        lib.ncs_launched_release(launched)

    def wait(self, launched: object) -> None:
        """Wait for a group's end. Raises NcclError if it has failed."""
        native.check(lib.ncs_launched_wait(launched), "ncs_launched_wait")

    def check_nothing_is_left(self) -> None:
        """Check that each arrival's buffers were let go once, within some seconds."""
        until = time.monotonic() + 10
        while len(self.let_go) < self.n_arrived and time.monotonic() < until:
            time.sleep(0.001)  # a group that has ended is forgotten by the thread that watches
        assert self.let_go == dict.fromkeys(range(1, self.n_arrived + 1), 1), self.let_go


def _pointer(address: int):
    return ffi.cast("void*", address)


def _stream(stream: Stream | None):
    return ffi.NULL if stream is None else ffi.cast("void*", stream.handle.value)
