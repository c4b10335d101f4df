"""CpuCommunicator: results against closed forms, aliasing, determinism, and refusals."""

import ctypes
import itertools
import platform
import shutil
import subprocess
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from pools import instruction_sets, pool

from ncclsync.communicator import AllGather, AllReduce, CpuCommunicator, ReduceScatter, empty_aligned, native
from ncclsync.errors import NcclSyncError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in native.DTYPES if name != "bfloat16"] + [BFLOAT16]
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
HALVES = [np.dtype(np.float16), BFLOAT16]
# Nothing, one element, odd, and enough for every worker to get several chunks.
COUNTS = [0, 1, 1023, 400_003]


INSTRUCTION_SETS = instruction_sets()


def unique_inputs(size: int, count: int, dtype: np.dtype) -> list[np.ndarray]:
    """Small whole numbers, different on every rank, whose sums and products are exact."""
    index = np.arange(count)
    return [((index + 2 * rank) % 5 % 3 + (rank == 0)).astype(dtype) for rank in range(size)]


def closed_form(op: str, sends: list[np.ndarray]) -> np.ndarray:
    """The expected result in int64, exact, wrapped into the dtype of integers."""
    dtype = sends[0].dtype
    wide = np.stack([send.astype(np.int64) for send in sends])
    if op == "avg":
        if dtype.kind in "iu":
            return (wide.sum(0) // len(sends)).astype(dtype)
        # Float sums are exact here, so avg is one rounded division in float32 or float64.
        inner = np.float64 if dtype == np.float64 else np.float32
        return (wide.sum(0).astype(inner) / inner(len(sends))).astype(dtype)
    reduce = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[op]
    return reduce(wide, axis=0).astype(dtype)


def bits(array: np.ndarray) -> np.ndarray:
    """The array's bits, in which NaN equals itself and -0 differs from 0."""
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", range(1, 9))
def test_all_reduce_gives_the_closed_form(size, dtype):
    """Every operation and length; the inputs are left alone."""
    with CpuCommunicator(size) as comm:
        for count, op in itertools.product(COUNTS[:3], native.OPS):
            sends = unique_inputs(size, count, dtype)
            before = [send.copy() for send in sends]
            recvs = [np.full(count, 77, dtype) for _ in range(size)]
            comm.all_reduce(sends, recvs, op)
            expected = closed_form(op, sends)
            for rank in range(size):
                np.testing.assert_array_equal(bits(recvs[rank]), bits(expected), f"{op} {rank}")
                np.testing.assert_array_equal(bits(sends[rank]), bits(before[rank]))


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 5])
def test_all_reduce_of_many_chunks_gives_the_closed_form(size, dtype):
    """Work that the pool shares has neither holes nor repetitions."""
    sends = unique_inputs(size, COUNTS[-1], dtype)
    recvs = [np.empty_like(send) for send in sends]
    for op in native.OPS:
        CpuCommunicator(size).all_reduce(sends, recvs, op)
        for recv in recvs:
            np.testing.assert_array_equal(bits(recv), bits(closed_form(op, sends)), op)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_recvs_may_be_sends_and_each_other(size, count):
    """In place, one shared recv, a shared recv that is also a send, and exchanged buffers."""
    comm = CpuCommunicator(size)
    expected = closed_form("sum", unique_inputs(size, count, np.dtype(np.float32)))

    def check(choose):
        sends = unique_inputs(size, count, np.dtype(np.float32))
        recvs = choose(sends)
        comm.all_reduce(sends, recvs)
        for recv in recvs:
            np.testing.assert_array_equal(recv, expected)

    check(lambda sends: sends)
    check(lambda sends: [np.empty_like(sends[0])] * size)
    check(lambda sends: [sends[-1]] * size)
    check(lambda sends: sends[::-1])


def blocks_of(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Of each array of N blocks, N arrays in all, the block of its own index; views."""
    return [np.split(array, len(arrays))[rank] for rank, array in enumerate(arrays)]


@pytest.mark.parametrize("size", range(1, 9))
def test_reduce_scatter_gives_each_rank_its_block(size):
    """Of every operation, dtype and length, in place or not; nothing else of what is sent is written."""
    with CpuCommunicator(size) as comm:
        for dtype, op, count in itertools.product(DTYPES, native.OPS, COUNTS[:3]):
            sends = unique_inputs(size, size * count, dtype)
            before = [send.copy() for send in sends]
            expected = np.split(closed_form(op, sends), size)
            recvs = [np.full(count, 77, dtype) for _ in range(size)]
            comm.reduce_scatter(sends, recvs, op)
            for rank in range(size):
                np.testing.assert_array_equal(bits(recvs[rank]), bits(expected[rank]), f"{op} {rank}")
                np.testing.assert_array_equal(bits(sends[rank]), bits(before[rank]))
            comm.reduce_scatter(sends, blocks_of(sends), op)
            for block, array in zip(blocks_of(before), expected, strict=True):
                block[:] = array
            np.testing.assert_array_equal(sends, before, f"{op} in place")


@pytest.mark.parametrize("size", range(1, 9))
def test_all_gather_gives_all_ranks_blocks(size):
    """In the order of the ranks, of every dtype and length: into arrays of their own, in place, into one."""
    with CpuCommunicator(size) as comm:
        for dtype, count in [*itertools.product(DTYPES, COUNTS[:3]), (DTYPES[0], COUNTS[-1])]:
            sends = [send + np.array(rank, dtype) for rank, send in enumerate(unique_inputs(size, count, dtype))]
            expected = np.concatenate(sends)
            recvs = [np.full(size * count, 77, dtype) for _ in range(size)]
            comm.all_gather(sends, recvs)
            np.testing.assert_array_equal(recvs, [expected] * size)
            for recv in recvs:
                recv[:] = 77
            for block, send in zip(blocks_of(recvs), sends, strict=True):
                block[:] = send
            comm.all_gather(blocks_of(recvs), recvs)
            np.testing.assert_array_equal(recvs, [expected] * size)
            recvs[0][:] = 77
            comm.all_gather(sends, [recvs[0]] * size)
            np.testing.assert_array_equal(recvs[0], expected)


@pytest.mark.parametrize("dtype", FLOATS + HALVES, ids=str)
def test_reduce_scatter_is_a_part_of_an_all_reduce(dtype):
    """Bitwise, where sums are rounded, and blocks begin within a vector."""
    rng = np.random.default_rng(2)
    sends = [rng.standard_normal(5 * 80_003).astype(dtype) for _ in range(5)]
    whole, recvs = np.empty_like(sends[0]), [np.empty(80_003, dtype) for _ in range(5)]
    with CpuCommunicator(5) as comm:
        for op in ("sum", "avg", "prod"):
            comm.all_reduce(sends, [whole] * 5, op)
            comm.reduce_scatter(sends, recvs, op)
            np.testing.assert_array_equal(bits(np.concatenate(recvs)), bits(whole))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", range(1, 9))
def test_broadcast_copies_the_roots_buffer(size, count):
    """From every root; buffers equal to the root's are allowed."""
    comm = CpuCommunicator(size)
    for root in range(size):
        buffers = [send + 10 * rank for rank, send in enumerate(unique_inputs(size, count, DTYPES[2]))]
        expected = buffers[root].copy()
        comm.broadcast(buffers, root)
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, expected)
        comm.broadcast([buffers[root]] * size, root)
        np.testing.assert_array_equal(buffers[root], expected)


def test_signed_integers_wrap():
    """127 + 1 is -128, as in NCCL; avg divides the wrapped sum, truncating toward zero."""
    for name in ("int8", "int32", "int64"):
        most = np.iinfo(name).max
        sends = [np.array([most, -3], name), np.array([1, 0], name)]
        recv = np.empty(2, name)
        CpuCommunicator(2).all_reduce(sends, [recv] * 2)
        assert recv.tolist() == [np.iinfo(name).min, -3]
        CpuCommunicator(2).all_reduce(sends, [recv] * 2, "avg")
        assert recv.tolist() == [np.iinfo(name).min // 2, -1]


@pytest.mark.parametrize("dtype", FLOATS + HALVES, ids=str)
def test_max_and_min_propagate_nan(dtype):
    """A NaN on any rank gives NaN: a diverged tower must not be hidden by the others."""
    for where in range(3):
        sends = [np.full(40, rank, dtype) for rank in range(3)]
        sends[where][7] = np.nan
        for op, expected in (("max", 2), ("min", 0)):
            recv = np.empty(40, dtype)
            CpuCommunicator(3).all_reduce(sends, [recv] * 3, op)
            assert np.isnan(recv[7].astype(np.float32))
            assert (np.delete(recv, 7).astype(np.float32) == expected).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_converted_exactly(dtype, instruction_set):
    """All 65536 bit patterns survive the way to float32 and back: subnormals, infinities, -0."""
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    identity = np.full(65536, -0.0, dtype)  # x + -0 is x, for x = 0 too
    recv = np.empty(65536, dtype)
    with pool(1, instruction_set):
        CpuCommunicator(2).all_reduce([patterns, identity], [recv] * 2)
    nan = np.isnan(patterns.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(recv.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(recv)[~nan], bits(patterns)[~nan])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_rounded_once_to_nearest_even(dtype, instruction_set):
    """The sum of three is that of float32, rounded as NumPy and ml_dtypes round."""
    rng = np.random.default_rng(0)
    count = 200_000
    sends = [rng.integers(0, 65536, count, np.uint16).view(dtype) for _ in range(3)]
    recv = np.empty(count, dtype)
    with pool(1, instruction_set):
        CpuCommunicator(3).all_reduce(sends, [recv] * 3)
    with np.errstate(all="ignore"):
        wide = [send.astype(np.float32) for send in sends]
        expected = ((wide[0] + wide[1]) + wide[2]).astype(dtype)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(recv.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(recv)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("dtype", FLOATS + HALVES, ids=str)
def test_result_depends_on_neither_threads_nor_instructions(dtype):
    """Bitwise: 1, 2 or 4 threads, every instruction set, ten times each."""
    rng = np.random.default_rng(1)
    sends = [rng.standard_normal(COUNTS[-1]).astype(dtype) for _ in range(5)]
    for op in ("sum", "avg", "prod"):
        expected = None
        for instruction_set, threads in itertools.product(INSTRUCTION_SETS, (1, 2, 4)):
            with pool(threads, instruction_set):
                for _ in range(3):
                    recv = np.empty_like(sends[0])
                    CpuCommunicator(5).all_reduce(sends, [recv] * 5, op)
                    expected = recv if expected is None else expected
                    np.testing.assert_array_equal(bits(recv), bits(expected))


@pytest.mark.parametrize("starts", [(0, 0, 0), (4, 4, 4), (0, 4, 8)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_written_around_the_cache_is_the_same(dtype, starts):
    """Bitwise what small all-reduces give part by part: results too large for a cache take their own
    way, wherever the arrays begin and whatever they hold.
    """
    rng = np.random.default_rng(2)
    count, part = 1_300_007, 100_000
    sends = [rng.standard_normal(count + 8).astype(dtype)[rank : rank + count] for rank in range(3)]
    special = [-0.0, np.nan, 1e-45, np.inf], [-0.0, 1, 0, -np.inf], [-0.0, 2, 0, 1]
    for send, values in zip(sends, special, strict=True):
        send[1000:1004] = send[-4:] = send[:4] = values
    for instruction_set, op in itertools.product(INSTRUCTION_SETS, ("sum", "avg")):
        with pool(2, instruction_set):
            communicator = CpuCommunicator(3)
            whole, parts = ([empty_aligned(count + 16, dtype)[start : start + count] for start in starts] for _ in "12")
            communicator.all_reduce(sends, whole, op)
            for begin in range(0, count, part):
                cut = slice(begin, begin + part)
                communicator.all_reduce([send[cut] for send in sends], [recv[cut] for recv in parts], op)
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))


def test_ranks_are_combined_in_order():
    """((r0 + r1) + r2) + r3: 1 is lost in 1e8 first, so any other order differs."""
    sends = [np.full(50, value, np.float32) for value in (1.0, 1e8, -1e8, 1.0)]
    recv = np.empty(50, np.float32)
    CpuCommunicator(4).all_reduce(sends, [recv] * 4)
    assert (recv == 1).all()
    CpuCommunicator(4).all_reduce([sends[i] for i in (1, 2, 0, 3)], [recv] * 4)
    assert (recv == 2).all()


def build_mxcsr(folder):
    """Return a function that sets this thread's MXCSR (not for -1) and returns it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if platform.machine() != "x86_64" or compiler is None:
        pytest.skip("needs an x86-64 machine and a C compiler")
    source, library = folder / "mxcsr.c", folder / "mxcsr.so"
    source.write_text(
        "#include <xmmintrin.h>\n"
        "int mxcsr(int value) {\n"
        "  if (value >= 0) _mm_setcsr((unsigned)value);\n"
        "  return (int)_mm_getcsr();\n"
        "}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(library).mxcsr


def test_denormals_survive_a_caller_that_flushes_them(tmp_path):
    """TensorFlow's threads flush denormals to zero; the result must not depend on the thread."""
    mxcsr = build_mxcsr(tmp_path)
    tiny = np.full(COUNTS[-1], 2**-149, np.float32)
    recv = np.empty_like(tiny)
    results = []

    def call():
        before = mxcsr(-1)
        mxcsr(before | 0x8040)
        CpuCommunicator(2).all_reduce([tiny, tiny], [recv] * 2)
        results.append((mxcsr(-1) & 0x8040, mxcsr(before)))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert results[0][0] == 0x8040  # the caller has its own state back
    assert (bits(recv) == 2).all()


@pytest.mark.timeout(60)
def test_threads_may_share_communicator_and_pool():
    """Six threads, large and small jobs at the same time, all results right."""
    wrong = []
    with pool(3):
        comm = CpuCommunicator(3)

        def call(seed):
            for round_ in range(12):
                count = (400_003, 17)[round_ % 2]
                sends = [np.full(count, seed * 10 + rank, np.float32) for rank in range(3)]
                recvs = [np.empty(count, np.float32) for _ in range(3)]
                comm.all_reduce(sends, recvs)
                if any((recv != seed * 30 + 3).any() for recv in recvs):
                    wrong.append(seed)

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


class Dlpack:
    """An array that is known by DLPack only."""

    def __init__(self, array, device=None):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


def test_kinds_of_buffers_may_be_mixed():
    """A NumPy array, a DLPack object and a tuple take part in one collective."""
    arrays = [np.full((2, 3), rank + 1, np.float32) for rank in range(3)]
    recvs = [np.zeros(8, np.float32)[1:7], np.zeros((3, 2), np.float32), np.zeros(6, np.float32)]

    def mixed(a, b, c):
        return [a, Dlpack(b), (c.ctypes.data, c.size, "float32")]

    CpuCommunicator(3).all_reduce(mixed(*arrays), mixed(*recvs))
    assert all((recv == 6).all() for recv in recvs)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != BFLOAT16], ids=str)
def test_dlpack_dtypes_are_known(dtype):
    """Every dtype arrives as itself: the sum would be another one otherwise."""
    send = np.arange(5).astype(dtype)
    recv = np.empty(5, dtype)
    CpuCommunicator(2).all_reduce([Dlpack(send)] * 2, [Dlpack(recv), recv])
    np.testing.assert_array_equal(recv, 2 * send)


def test_dlpack_views_begin_where_they_begin():
    """Offsets count; a view with steps is refused, one whose steps do not matter is not."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    recv = np.empty(4, np.float32)
    comm = CpuCommunicator(1)
    comm.all_reduce([Dlpack(base[1])], [recv])
    assert recv.tolist() == [4, 5, 6, 7]
    comm.all_reduce([Dlpack(base[1:2, :, None])], [recv])
    assert recv.tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"Expected sends\[0\] to be contiguous"):
        comm.all_reduce([Dlpack(base[:, 1])], [recv[:3]])


def misaligned(count):
    """A float32 array that begins one byte late."""
    return np.zeros(count * 4 + 1, np.uint8)[1:].view(np.float32)


def read_only(count):
    """An array that must not be written."""
    array = np.zeros(count, np.float32)
    array.flags.writeable = False
    return array


class Untold:
    """Has a capsule, and no device."""

    def __dlpack__(self):
        return None


class Texts(Untold):
    """TensorFlow's tensor of strings, which ends the process when it is asked for a capsule."""

    dtype = types.SimpleNamespace(name="string")

    def __dlpack_device__(self):
        return (1, 0)


ZEROS = np.zeros(4, np.float32)
PAIR = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
BASE = np.zeros(8, np.float32)
REFUSALS = {
    "count of buffers": (PAIR[:1], PAIR, ValueError, "hold 2 buffers.* Received: 1 and 2"),
    "no buffer": ([ZEROS, 5], PAIR, TypeError, r"sends\[1\].* Received: int"),
    "list": ([ZEROS, [1.0]], PAIR, TypeError, r"sends\[1\].* Received: list"),
    "bad tuple": ([ZEROS, (1, 2)], PAIR, TypeError, r"sends\[1\].*tuple"),
    "null pointer": ([ZEROS, (0, 4, "float32")], PAIR, ValueError, r"sends\[1\].*pointer"),
    "pointer of 2^80": ([ZEROS, (2**80, 4, "float32")], PAIR, ValueError, r"sends\[1\].*below address 2\^64"),
    "count of 2^80": ([ZEROS, (64, 2**80, "float32")], PAIR, ValueError, r"sends\[1\].*below address 2\^64"),
    "beyond the end": ([ZEROS, (2**64 - 15, 4, "float32")], PAIR, ValueError, r"sends\[1\] to begin and to"),
    "float pointer": ([ZEROS, (64.0, 4, "float32")], PAIR, TypeError, r"sends\[1\] to be a tuple \(pointer"),
    "text as count": ([ZEROS, (64, "4", "float32")], PAIR, TypeError, r"sends\[1\] to be a tuple \(pointer"),
    "bool pointer": ([ZEROS, (True, 4, "float32")], PAIR, TypeError, r"sends\[1\] to be a tuple \(pointer"),
    "no dtype": ([ZEROS, (64, 4, None)], PAIR, TypeError, r"sends\[1\] of a dtype that .* Received: None"),
    "dict": (dict(enumerate(PAIR)), PAIR, TypeError, "sends to be a list of buffers, .* Received: dict"),
    "text": (PAIR, "ab", TypeError, "recvs to be a list of buffers, one per rank. Received: str"),
    "number": (3, PAIR, TypeError, "sends to be a list of buffers, one per rank. Received: int"),
    "iterator": (iter(PAIR), PAIR, TypeError, "sends to be a list of buffers, .* Received: list_iterator"),
    "no DLPack": ([ZEROS, Untold()], PAIR, TypeError, r"sends\[1\] to give its memory by __dlpack_device__"),
    "no capsule": ([ZEROS, Dlpack(None)], PAIR, TypeError, r"sends\[1\] to give its memory by .*Dlpack \("),
    "refused DLPack": ([ZEROS, Dlpack(read_only(4))], PAIR, TypeError, r"sends\[1\] to give its memory"),
    "text within": ([ZEROS, Texts()], PAIR, TypeError, r"sends\[1\] of a dtype that NCCL.* Received: string"),
    "length": ([ZEROS, ZEROS[:3]], PAIR, ValueError, r"sends\[1\] to be like sends\[0\].* 3 × "),
    "dtype": (PAIR, [ZEROS, np.zeros(4)], ValueError, r"recvs\[1\].* Received: 4 × float64"),
    "sends unlike recvs": (PAIR, [np.zeros(4)] * 2, ValueError, r"recvs\[0\].* like sends\[0\]"),
    "unknown dtype": ([np.zeros(4, bool)] * 2, PAIR, TypeError, r"sends\[0\].* Received: bool"),
    "int16": ([np.zeros(4, np.int16)] * 2, PAIR, TypeError, r"sends\[0\].* Received: int16"),
    "byte order": ([np.zeros(4, ">f4")] * 2, PAIR, TypeError, r"sends\[0\].* Received: >f4"),
    "dlpack dtype": ([Dlpack(np.zeros(4, bool))] * 2, PAIR, TypeError, r"sends\[0\].*DLPack"),
    "not contiguous": (PAIR, [ZEROS, BASE[::2]], ValueError, r"recvs\[1\].*contiguous"),
    "read-only": (PAIR, [ZEROS, read_only(4)], ValueError, r"recvs\[1\].*read-only"),
    "misaligned": ([ZEROS, misaligned(4)], PAIR, ValueError, r"sends\[1\].*multiple of 4"),
    "recv on send": ([BASE[:4], ZEROS], [PAIR[0], BASE[1:5]], ValueError, r"recvs\[1\].*sends\[0\]"),
    "recv on recv": (PAIR, [BASE[:4], BASE[3:7]], ValueError, r"recvs\[0\].*recvs\[1\].* 12 bytes"),
    "device memory": ([ZEROS, Dlpack(ZEROS, (2, 0))], PAIR, ValueError, r"sends\[1\].*type 2"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_buffers_are_refused_by_rank_before_anything_is_written(case):
    """The message says what was expected and what was received; recvs stay as they were."""
    sends, recvs, error, message = REFUSALS[case]
    arrays = [recv for recv in recvs if isinstance(recv, np.ndarray)]
    for recv in arrays:
        if recv.flags.writeable:
            recv[:] = 5
    with pytest.raises(error, match=f"Expected .*{message}"):
        CpuCommunicator(2).all_reduce(sends, recvs)
    for recv in arrays:
        assert (recv == (5 if recv.flags.writeable else 0)).all()


def test_bad_broadcasts_are_refused():
    """Read-only or overlapping buffers, and a root that is no rank."""
    comm = CpuCommunicator(2)
    with pytest.raises(ValueError, match=r"Expected buffers\[1\].*read-only"):
        comm.broadcast([ZEROS, read_only(4)])
    with pytest.raises(ValueError, match=r"Expected buffers\[0\] to be apart from buffers\[1\]"):
        comm.broadcast([BASE[:4], BASE[2:6]])
    for root in (-1, 2):
        with pytest.raises(ValueError, match=f"Expected root to be a rank, 0 to 1. Received: {root}"):
            comm.broadcast(PAIR, root)
    for root in ("0", 1.0, None, True, {}):
        with pytest.raises(TypeError, match=f"Expected root to be the number of a rank. Received: {root!r}"):
            comm.broadcast(PAIR, root)
    with pytest.raises(TypeError, match=r"Expected label to be a str. Received: 3"):
        comm.broadcast(PAIR, label=3)
    comm.broadcast(PAIR, np.int64(1))


def test_groups_are_of_collectives():
    """Anything else is told, before anything is written; any iterable of them is run, once."""
    sends, recvs = [np.ones(4, np.float32)] * 2, [np.zeros(4, np.float32)] * 2
    made = AllReduce(sends, recvs)
    comm = CpuCommunicator(2)
    kinds = "AllReduce, Broadcast, ReduceScatter or AllGather"
    for group in ([made, 3], [3], [(sends, recvs)], ["all_reduce"], [None]):
        with pytest.raises(TypeError, match=rf"Expected each collective to be {kinds}. Received: "):
            comm.run_group(group)
    for group, received in ((3, "int"), (None, "NoneType"), (made, "AllReduce")):
        with pytest.raises(TypeError, match=f"Expected collectives to be a list of {kinds}. Received: {received}"):
            comm.run_group(group)
    assert not recvs[0].any()
    comm.run_group(iter([made]))
    assert recvs[0].tolist() == [2, 2, 2, 2]


EIGHT = [np.zeros(8, np.float32), np.zeros(8, np.float32)]
BLOCKS = {
    "reduce_scatter": {
        "all of it": (PAIR, PAIR, r"sends\[0\] to be 2 blocks like recvs\[0\], 8 × float32. Received: 4 ×"),
        "dtype": (EIGHT, [np.zeros(4)] * 2, r"sends\[0\] to be 2 blocks .*, 8 × float64. Received: 8 × fl"),
        "one recv": (EIGHT, PAIR[:1] * 2, r"recvs\[0\] to be apart from recvs\[1\]. Received: 16 and 16"),
        "own block": (
            EIGHT,
            [EIGHT[0][:4], EIGHT[1][:4]],
            r"recvs\[1\] to be apart from sends\[1\], or in place. Received: 16 and 32 bytes, 0 bytes apa",
        ),
        "another's block": (EIGHT, [EIGHT[1][4:], PAIR[0]], r"recvs\[0\] to be apart from sends\[1\]"),
        "partly": (EIGHT, [EIGHT[0][1:5], PAIR[0]], r"recvs\[0\] to be apart from sends\[0\]"),
    },
    "all_gather": {
        "as long": (PAIR, PAIR, r"recvs\[0\] to be 2 blocks like sends\[0\], 8 × float32. Received: 4 × fl"),
        "own block": (
            [PAIR[0], EIGHT[1][:4]],
            EIGHT,
            r"recvs\[1\] to be apart from sends\[1\], or in place. Received: 32 and 16 bytes, 0 bytes apa",
        ),
        "partly": ([EIGHT[0][1:5], PAIR[0]], EIGHT, r"recvs\[0\] to be apart from sends\[0\]"),
        "recvs": (
            [PAIR[0][:3], PAIR[1][:3]],
            [BASE[:6], BASE[2:]],
            r"recvs\[0\] to be apart from recvs\[1\], or the same",
        ),
        "read-only": (PAIR, [EIGHT[0], read_only(8)], r"recvs\[1\].*read-only"),
        "misaligned": (PAIR, [EIGHT[0], misaligned(8)], r"recvs\[1\].*multiple of 4"),
    },
}


@pytest.mark.parametrize("name, case", [(name, case) for name, cases in BLOCKS.items() for case in cases])
def test_bad_blocks_are_refused(name, case):
    """Counts that do not fit, and overlaps other than in place; alone and in a group, nothing is written."""
    sends, recvs, message = BLOCKS[name][case]
    arrays = [array for array in (*sends, *recvs) if array.flags.writeable]
    for array in arrays:
        array[:] = 5
    made = {"reduce_scatter": ReduceScatter, "all_gather": AllGather}[name](sends, recvs)
    other = AllReduce([np.ones(1)] * 2, [np.zeros(1)] * 2)
    with CpuCommunicator(2) as comm:
        for call in (lambda: getattr(comm, name)(sends, recvs), lambda: comm.run_group([other, made])):
            with pytest.raises(ValueError, match=f"Expected {message}"):
                call()
    assert all((array == 5).all() for array in arrays) and not other.recvs[0].any()


def test_bad_sizes_and_operations_are_refused():
    """Only whole numbers of ranks, only NCCL's five operations."""
    for size in (0, -1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match="Expected size"):
            CpuCommunicator(size)
    for op in ("mean", "SUM", None, 3, {}, ["sum"]):
        with pytest.raises(ValueError, match="Expected op to be one of sum, prod, max, min, avg"):
            CpuCommunicator(2).all_reduce(PAIR, PAIR, op)
        with pytest.raises(ValueError, match="Expected op to be one of sum, prod, max, min, avg"):
            CpuCommunicator(2).reduce_scatter(EIGHT, PAIR, op)
    for collective in (CpuCommunicator(2).reduce_scatter, CpuCommunicator(2).all_gather):
        with pytest.raises(ValueError, match=r"sends and recvs to hold 2 buffers, one per .* 2 and 1"):
            collective(PAIR, PAIR[:1])


def test_closed_communicator_refuses_every_collective():
    """Closing is idempotent; nothing returns quietly afterwards."""
    with CpuCommunicator(2) as comm:
        assert not comm.closed
    comm.close()
    assert comm.closed
    with pytest.raises(NcclSyncError, match="Expected an open CpuCommunicator"):
        comm.all_reduce(PAIR, PAIR)
    with pytest.raises(NcclSyncError, match="Expected an open CpuCommunicator"):
        comm.broadcast(PAIR)
    for collective in (comm.reduce_scatter, comm.all_gather):
        with pytest.raises(NcclSyncError, match="Expected an open CpuCommunicator"):
            collective(PAIR, PAIR)


@pytest.mark.parametrize("shape", [0, 1, 1000, (3, 5), (2, 0)])
def test_empty_aligned_begins_at_64_bytes(shape):
    """Writable, contiguous, of the shape and dtype asked for."""
    for dtype in DTYPES:
        array = empty_aligned(shape, dtype)
        assert array.shape == np.empty(shape).shape and array.dtype == dtype
        assert array.size == 0 or array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous and array.flags.writeable
