"""What a borrowed GPU tells in a quarter of an hour: parts in order of value, each in a process of its own.

`run.py --minutes` runs them. Each prints its findings as they come, so that a part that is cut off has told some. All
ranks share GPU 0.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import statistics
import threading
import time
import types

import device_memory
import numpy as np
from device_memory import check, open_runtime

from ncclsync.communicator import AllGather, AllReduce, NcclCommunicator, native, shared
from ncclsync.errors import NcclSyncError

MIB, BUCKET_BYTES, RANKS = 2**20, 25 * 2**20, 2
GROUPS = 1000


def say(what: str, value: object) -> None:
    """Print a finding at once."""
    print(f"{what}: {value}", flush=True)


def left_mib() -> int:
    """Return the GPU's free memory."""
    runtime, left, total = open_runtime(), ctypes.c_size_t(), ctypes.c_size_t()
    check(runtime, "cudaSetDevice", 0)
    check(runtime, "cudaMemGetInfo", ctypes.byref(left), ctypes.byref(total))
    return left.value // MIB


def join(**options) -> NcclCommunicator:
    return NcclCommunicator([0] * RANKS, timeout_s=60.0, **options)


def connect(comm: NcclCommunicator, size_bytes: int, *kinds) -> None:
    comm.connect(list(kinds), [native.DTYPES["float32"]] * len(kinds), [size_bytes // 4] * len(kinds))


@contextlib.contextmanager
def buffers(size_bytes: int):
    """Yield what ranks send and receive, as `all_reduce` takes them."""
    with device_memory.open_memory() as memory:
        numbers = np.ones(size_bytes // 4, np.float32)
        yield [[memory.put(numbers) for _ in range(RANKS)] for _ in range(2)]


def all_reduce(comm: NcclCommunicator, placed) -> None:
    comm.all_reduce(*([one.buffer for one in side] for side in placed))


def memory() -> None:
    """What NCCL takes, step by step, and whether it gives it back."""
    left_mib()  # the context's own
    begin = left_mib()

    def tell(what):
        say(f"{what}, MiB taken", begin - left_mib())

    with join(preflight=False) as comm:
        tell("joined without preflight")
        for size_bytes in (16 * 2**10, BUCKET_BYTES):
            with buffers(size_bytes) as placed:
                all_reduce(comm, placed)
            tell(f"after an all-reduce of {size_bytes} bytes")
        connect(comm, BUCKET_BYTES, AllGather((), ()))
        tell("after an all-gather of a bucket")
    tell("closed")
    with join() as comm:
        tell("joined with preflight")
        say("of that NCCL's, by ncclsync, MiB", comm.taken_bytes // MIB)
    tell("closed")
    options = {"timeout_s": 60.0, "preflight": True, "repeatable": False}
    for i in range(5):
        user = types.new_class("Model")()
        connect(shared.share(user, [0] * RANKS, peers=None, on_host=False, **options), BUCKET_BYTES, AllReduce((), ()))
        del user
        gc.collect()
        tell(f"after {i + 1} dropped models")
    shared.close_unused()
    tell("all closed")


def little_memory() -> None:
    """An all-reduce of a bucket where 60 MiB are left: it works, or the error says what to do."""
    runtime, pointer = open_runtime(), ctypes.c_void_p()
    with buffers(BUCKET_BYTES) as placed:
        comm = join()
        taken = max(left_mib() - 60, 1) * MIB
        check(runtime, "cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(taken))
        say("MiB left", left_mib())
        try:
            all_reduce(comm, placed)
            say("all-reduce", "done")
        except NcclSyncError as error:
            say("all-reduce", error)
        check(runtime, "cudaFree", pointer)
        comm.reopen()
        all_reduce(comm, placed)
        say("all-reduce after it", "done")
        comm.close()


def matmuls() -> None:
    """How much a matmul loses beside all-reduces, for this process' NCCL_MAX_CTAS."""
    multiply = _matmul()
    if multiply is None:
        say("skipped", "needs PyTorch or CuPy with a GPU")
        return

    def took_ms(count=20):
        times = []
        for _ in range(count):
            began = time.perf_counter()
            multiply()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    took_ms()
    with buffers(BUCKET_BYTES) as placed, join() as comm:
        alone, ending = took_ms(), threading.Event()

        def reduce_on():
            while not ending.is_set():
                all_reduce(comm, placed)

        thread = threading.Thread(target=reduce_on)
        thread.start()
        beside = took_ms()
        ending.set()
        thread.join()
    say(f"NCCL_MAX_CTAS={os.environ.get('NCCL_MAX_CTAS')}: ms alone, beside all-reduces", f"{alone:.3f} {beside:.3f}")


def _matmul():
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            a = torch.ones([8192, 8192], dtype=torch.bfloat16, device="cuda:0")
            return lambda: (a @ a, torch.cuda.synchronize())
    if importlib.util.find_spec("cupy") is not None:
        import cupy

        a = cupy.ones([8192, 8192], "float16")
        return lambda: (a @ a, cupy.cuda.Device(0).synchronize())
    return None


def second_thread() -> None:
    """Groups while another thread frees memory, and runs kernels for the first time: both may wait for the GPU."""
    runtime, ending, freed = open_runtime(), threading.Event(), [0]

    def free_on():
        pointer = ctypes.c_void_p()
        check(runtime, "cudaSetDevice", 0)
        while not ending.is_set():
            check(runtime, "cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(MIB))
            check(runtime, "cudaFree", pointer)
            freed[0] += 1
            if freed[0] % 50 == 0 and importlib.util.find_spec("cupy") is not None:
                import cupy

                new = cupy.ElementwiseKernel("float32 x", "float32 y", f"y = x + {freed[0]}", f"first_{freed[0]}")
                new(cupy.ones(8, "float32"))

    with buffers(64 * 2**10) as placed, join() as comm:
        thread, slowest = threading.Thread(target=free_on), 0.0
        thread.start()
        for i in range(GROUPS):
            began = time.perf_counter()
            all_reduce(comm, placed)
            slowest = max(slowest, time.perf_counter() - began)
            if i % 250 == 249:
                say("groups, frees, ms of the slowest group", f"{i + 1} {freed[0]} {1e3 * slowest:.1f}")
        ending.set()
        thread.join()


def pool_memory() -> None:
    """Buffers of cudaMallocAsync are a GPU's, and are summed."""
    runtime, pointers, count = open_runtime(), [ctypes.c_void_p() for _ in range(2 * RANKS)], 2**20
    if not hasattr(runtime, "cudaMallocAsync"):
        say("skipped", "this CUDA runtime has no cudaMallocAsync")
        return
    check(runtime, "cudaSetDevice", 0)
    for pointer in pointers:
        check(runtime, "cudaMallocAsync", ctypes.byref(pointer), ctypes.c_size_t(4 * count), None)
    numbers, found = np.ones(count, np.float32), np.zeros(count, np.float32)
    to_where_the_pointers_tell, size = 4, ctypes.c_size_t(4 * count)
    for pointer in pointers:
        check(runtime, "cudaMemcpy", pointer, ctypes.c_void_p(numbers.ctypes.data), size, to_where_the_pointers_tell)
    placed = [(pointer.value, count, "float32") for pointer in pointers]
    with join() as comm:
        comm.all_reduce(placed[:RANKS], placed[RANKS:])
    check(runtime, "cudaMemcpy", ctypes.c_void_p(found.ctypes.data), pointers[-1], size, to_where_the_pointers_tell)
    say("sums", "right" if (found == RANKS).all() else "wrong")
