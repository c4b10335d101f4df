"""Two and three ranks on one GPU: every dtype, operation and size, in place or not, in buckets."""

import ctypes
import itertools

import isolated
import numpy as np
import pytest
from device_memory import check, count_gpus, open_memory, open_runtime

from ncclsync.communicator import AllGather, AllReduce, Broadcast, NcclCommunicator, ReduceScatter, native

RANKS = (2, 3)
COUNTS = (0, 1, 7, 1000, 30_011)
# Sums and products are of small whole numbers, which every dtype holds exactly; a mean of floats is rounded.
ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}


def numpy_dtype(name):
    """Return a dtype by NCCL's name; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def numbers(rank, count, dtype):
    """1 to 5, different for each rank."""
    return ((np.arange(count) * 3 + rank * 7) % 5 + 1).astype(numpy_dtype(dtype))


def reduced(arrays, op, dtype):
    """What every rank must receive, in float64 or int64."""
    exact = np.stack(arrays).astype(np.float64 if dtype in ROUNDING else np.int64)
    if op == "avg":
        return exact.mean(axis=0) if dtype in ROUNDING else exact.sum(axis=0) // len(arrays)
    return {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[op](exact, axis=0)


def all_reduce_grid(ranks):
    """Every dtype, operation and size, in place and out of place."""
    with NcclCommunicator([0] * ranks, timeout_s=60.0, preflight=False) as comm:
        for dtype, op, count, in_place in itertools.product(native.DTYPES, native.OPS, COUNTS, (False, True)):
            row = f"{op} of {count} × {dtype}, {'in' if in_place else 'out of'} place"
            print(row, flush=True)  # the last one is where it hangs, if it does
            arrays = [numbers(rank, count, dtype) for rank in range(ranks)]
            with open_memory() as memory:
                sends = [memory.put(array) for array in arrays]
                recvs = sends if in_place else [memory.put(np.zeros_like(array)) for array in arrays]
                comm.all_reduce([s.buffer for s in sends], [r.buffer for r in recvs], op)
                expected = reduced(arrays, op, dtype)
                rounding = ROUNDING.get(dtype, 0) if op == "avg" else 0
                for recv in recvs:
                    got = recv.get().astype(expected.dtype)
                    np.testing.assert_allclose(got, expected, rtol=rounding, atol=0, err_msg=row)
                for send, array in zip([] if in_place else sends, arrays, strict=False):
                    np.testing.assert_array_equal(send.get(), array, err_msg=f"{row}: the input was written")


def broadcast_grid(ranks):
    """Every dtype, size and root."""
    with NcclCommunicator([0] * ranks, timeout_s=60.0, preflight=False) as comm:
        for dtype, count, root in itertools.product(native.DTYPES, COUNTS, range(ranks)):
            row = f"{count} × {dtype} from rank {root}"
            print(row, flush=True)
            with open_memory() as memory:
                placed = [memory.put(numbers(rank, count, dtype)) for rank in range(ranks)]
                comm.broadcast([p.buffer for p in placed], root)
                for one in placed:
                    np.testing.assert_array_equal(one.get(), numbers(root, count, dtype), err_msg=row)


def part(placed, begin, count, dtype):
    """Elements of what is placed, as an address."""
    return (placed.pointer + begin * numpy_dtype(dtype).itemsize, count, dtype)


def block_grid(ranks):
    """Every dtype, operation and size, in place and out of place: a reduce-scatter, its parts gathered."""
    with NcclCommunicator([0] * ranks, timeout_s=60.0, preflight=False) as comm:
        for dtype, op, count, in_place in itertools.product(native.DTYPES, native.OPS, COUNTS, (False, True)):
            row = f"{op} of {ranks} × {count} × {dtype}, {'in' if in_place else 'out of'} place"
            print(row, flush=True)
            arrays = [numbers(rank, ranks * count, dtype) for rank in range(ranks)]
            with open_memory() as memory:
                sends = [memory.put(array) for array in arrays]
                wholes = sends if in_place else [memory.put(np.zeros_like(array)) for array in arrays]
                parts = [part(whole, rank * count, count, dtype) for rank, whole in enumerate(wholes)]
                comm.reduce_scatter([s.buffer for s in sends], parts, op)
                expected = reduced(arrays, op, dtype)
                rounding = ROUNDING.get(dtype, 0) if op == "avg" else 0
                for rank, (whole, array) in enumerate(zip(wholes, arrays, strict=True)):
                    own = slice(rank * count, (rank + 1) * count)
                    others = array.astype(expected.dtype) if in_place else np.zeros_like(expected)
                    others[own] = expected[own]
                    got = whole.get().astype(expected.dtype)
                    np.testing.assert_allclose(got, others, rtol=rounding, atol=0, err_msg=row)
                comm.all_gather(parts, [w.buffer for w in wholes])
                for whole in wholes:
                    got = whole.get().astype(expected.dtype)
                    np.testing.assert_allclose(got, expected, rtol=rounding, atol=0, err_msg=row)
                    np.testing.assert_array_equal(whole.get(), wholes[0].get(), err_msg=row)
                for send, array in zip([] if in_place else sends, arrays, strict=False):
                    np.testing.assert_array_equal(send.get(), array, err_msg=f"{row}: the input was written")


def buckets_of_one_buffer(ranks):
    """One buffer per rank, reduced piece by piece: pieces that begin anywhere, one after the other."""
    cuts = [0, 1, 3, 1027, 1028, 65_536, 100_003]
    arrays = [numbers(rank, cuts[-1], "float32") for rank in range(ranks)]
    with NcclCommunicator([0] * ranks, timeout_s=60.0, preflight=False) as comm, open_memory() as memory:
        sends = [memory.put(array) for array in arrays]
        recvs = [memory.put(np.zeros_like(array)) for array in arrays]
        for step in range(3):
            for begin, end in itertools.pairwise(cuts):
                pieces = [
                    [(placed.pointer + 4 * begin, end - begin, "float32") for placed in side] for side in (sends, recvs)
                ]
                comm.all_reduce(*pieces, "sum" if step < 2 else "max", label=f"elements {begin} to {end}")
            for recv in recvs:
                expected = reduced(arrays, "sum" if step < 2 else "max", "float32")
                np.testing.assert_array_equal(recv.get(), expected)


def of_each_rank(op, ranks, count, dtype):
    """What each rank receives of a collective of that operation, or kind, among those at once."""
    arrays = [numbers(rank, count, dtype) for rank in range(ranks)]
    if op == "reduce_scatter":
        blocks = [numbers(rank, ranks * count, dtype) for rank in range(ranks)]
        return np.split(reduced(blocks, "sum", dtype), ranks)
    if op in ("broadcast", "all_gather"):
        return [arrays[-1] if op == "broadcast" else np.concatenate(arrays)] * ranks
    return [reduced(arrays, op, dtype)] * ranks


def one_group_of_all(ranks):
    """Every dtype and operation, and of each dtype one of all other collectives, at once."""
    kinds = (*native.OPS, "broadcast", "reduce_scatter", "all_gather")
    rows = [(dtype, op) for dtype in native.DTYPES for op in kinds]
    with NcclCommunicator([0] * ranks, timeout_s=60.0, preflight=False) as comm, open_memory() as memory:
        for count in (1000, 30_011):
            group, received, kept = [], [], []  # memory of the sends goes where nothing holds it
            for dtype, op in rows:
                sent = ranks * count if op == "reduce_scatter" else count
                got = ranks * count if op == "all_gather" else count
                placed = [memory.put(numbers(rank, sent, dtype)) for rank in range(ranks)]
                recvs = [memory.put(np.zeros(got, numpy_dtype(dtype))) for _ in range(ranks)]
                kept += placed
                buffers = [[one.buffer for one in side] for side in (placed, recvs)]
                if op == "broadcast":
                    group.append(Broadcast(buffers[0], ranks - 1))
                elif op == "reduce_scatter":
                    group.append(ReduceScatter(*buffers))
                else:
                    group.append(AllGather(*buffers) if op == "all_gather" else AllReduce(*buffers, op))
                received.append(placed if op == "broadcast" else recvs)
            comm.run_group(group)
            for (dtype, op), placed in zip(rows, received, strict=True):
                expected = of_each_rank(op, ranks, count, dtype)
                rounding = ROUNDING.get(dtype, 0) if op == "avg" else 0
                for one, wanted in zip(placed, expected, strict=True):
                    got = one.get().astype(wanted.dtype)
                    np.testing.assert_allclose(got, wanted, rtol=rounding, err_msg=f"{op} of {dtype}")


def preflight(ranks):
    """Known numbers over every pair's path, and then a communicator that works."""
    with NcclCommunicator([0] * ranks, timeout_s=60.0) as comm, open_memory() as memory:
        placed = [memory.put(numbers(rank, 1000, "int32")) for rank in range(ranks)]
        comm.all_reduce([p.buffer for p in placed], [p.buffer for p in placed])
        expected = sum(numbers(rank, 1000, "int32") for rank in range(ranks))
        for one in placed:
            np.testing.assert_array_equal(one.get(), expected)


def refused_memory():
    """The host's, which a GPU could reach, and another GPU's where there is one."""
    runtime, cases = open_runtime(), []
    with NcclCommunicator([0, 0], timeout_s=60.0) as comm, open_memory() as memory:
        good = [memory.put(np.ones(5, np.float32)).buffer for _ in range(2)]
        for device, call, words in ((0, "cudaMallocHost", "host memory"), (1, "cudaMalloc", "memory of GPU 1")):
            if device >= count_gpus():
                continue
            pointer = ctypes.c_void_p()
            check(runtime, "cudaSetDevice", device)
            check(runtime, call, ctypes.byref(pointer), ctypes.c_size_t(20))
            cases.append((call.replace("Malloc", "Free"), pointer))
            try:
                comm.all_reduce([good[0], (pointer.value, 5, "float32")], good)
            except ValueError as error:
                assert str(error) == f"Expected sends[1] on GPU 0. Received: {words}", error
            else:
                raise AssertionError(f"{words} was taken")
        comm.all_reduce(good, good)
    for call, pointer in cases:
        check(runtime, call, pointer)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce(ranks):
    """Every dtype, operation and size, in place or not: NumPy's result on every rank, inputs as before."""
    isolated.run(all_reduce_grid, ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast(ranks):
    """Every dtype, size and root."""
    isolated.run(broadcast_grid, ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_blocks(ranks):
    """Reduce-scatter and all-gather of every dtype, operation and size, in place or not: NumPy's result."""
    isolated.run(block_grid, ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_buckets(ranks):
    """Collectives follow each other over parts of one buffer."""
    isolated.run(buckets_of_one_buffer, ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_group(ranks):
    """One launch of eighty collectives: every dtype and operation gives what it gives alone."""
    isolated.run(one_group_of_all, ranks=ranks)


def test_refused_memory():
    """What is not on a rank's GPU is refused, and the communicator stays."""
    isolated.run(refused_memory)


@pytest.mark.parametrize("ranks", RANKS)
def test_preflight(ranks):
    """The check of all paths passes where they are sound."""
    isolated.run(preflight, ranks=ranks)
