"""Collectives in groups: of any dtypes, sizes and operations at once, with one launch and one wait."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from test_communicator import DTYPES, blocks_of, closed_form, unique_inputs
from test_nccl_failures import opened

from ncclsync.communicator import (
    AllGather,
    AllReduce,
    Broadcast,
    CpuCommunicator,
    NcclCommunicator,
    ReduceScatter,
    native,
)
from ncclsync.errors import NcclError, NcclTimeoutError

pytestmark = pytest.mark.timeout(60)

# (operation, elements, dtype); None: a broadcast from rank 1.
MIXED = (
    ("sum", 5, np.dtype(np.float32)),
    ("max", 1, np.dtype(np.int64)),
    (None, 7, np.dtype(np.float16)),
    ("sum", 0, np.dtype(np.float32)),
    ("min", 3, np.dtype(ml_dtypes.bfloat16)),
    ("sum", 5, np.dtype(np.float32)),
)


def given(size, rows=MIXED):
    """Of each row every rank's numbers, and room for what it receives: [B][N], [B][N]."""
    sends = [[(np.arange(n) + 3 * r + b).astype(d) for r in range(size)] for b, (_, n, d) in enumerate(rows)]
    return sends, [[np.zeros_like(send) for send in row] for row in sends]


def expected(op, sends):
    """What every rank must receive."""
    if op is None:
        return sends[1]
    reduce = {"sum": np.add.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}[op]
    return reduce(sends)


def group(sends, recvs, rows=MIXED, place=lambda array: array):
    """The collectives of the rows; a broadcast is of the root's numbers and the others' room."""
    made = []
    for i, ((op, *_), sent, received) in enumerate(zip(rows, sends, recvs, strict=True)):
        label = f"bucket {i + 1} of {len(rows)}"
        if op is None:
            received[1][:] = sent[1]
            made.append(Broadcast([place(a) for a in received], 1, label))
        else:
            made.append(AllReduce([place(a) for a in sent], [place(a) for a in received], op, label))
    return made


def on_device(array):
    """As the stand-in's device memory."""
    return (array.ctypes.data or 0, array.size, array.dtype)


def test_mixed_group(standin):
    """Both communicators give what NumPy gives; NCCL is called once, in one group, inputs are left alone."""
    for comm, place in ((opened(), on_device), (CpuCommunicator(3), lambda array: array)):
        with comm:
            sends, recvs = given(3)
            standin.count("ncclGroupEnd", "ncclAllReduce", "ncclBroadcast")
            comm.run_group(group(sends, recvs, place=place))
            for (op, *_), sent, received in zip(MIXED, sends, recvs, strict=True):
                np.testing.assert_array_equal(received, [expected(op, sent)] * 3)
            np.testing.assert_array_equal(sends[0], given(3)[0][0])
            if place is on_device:
                assert standin.counted() == [1, 15, 3]
            comm.run_group([])
            assert standin.counted()[0] == (place is on_device)


def test_numbers_go_on_over_groups(standin):
    """Each collective of a group counts, whatever it is."""
    comm = opened(timeout_s=0.1)
    comm.run_group(group(*given(3), place=on_device))
    standin.fail("stuck:1")
    with pytest.raises(NcclTimeoutError, match=r"Expected all-reduce 7 of 20 bytes"):
        comm.all_reduce(*([on_device(a) for a in side[0]] for side in given(3)))


def test_group_that_does_not_end(standin):
    """All of its collectives are named, of many the first ones and the last; and who is missing."""
    comm = opened(timeout_s=0.1)
    sends, recvs = given(3, MIXED[:3])
    standin.fail("stuck:1:2")
    with pytest.raises(NcclTimeoutError) as caught:
        comm.run_group(group(sends, recvs, MIXED[:3], on_device))
    assert str(caught.value) == (
        "Expected a group of 3 collectives (all-reduce 1 (bucket 1 of 3) of 20 bytes (5 × float32); "
        "all-reduce 2 (bucket 2 of 3) of 8 bytes (1 × int64); broadcast 3 (bucket 3 of 3) of 14 bytes "
        "(7 × float16)) to end. Received: it has not within 0.1 s: rank 0 (GPU 4), rank 2 (GPU 2) arrived, "
        "waiting for the others; rank 1 (GPU 0) not arrived. The communicator is aborted"
    )
    comm.reopen()
    rows = (MIXED[0],) * 9
    standin.fail("stuck:1:2")
    with pytest.raises(NcclTimeoutError, match=r"\(bucket 5 of 9\)[^;]*; 3 more; all-reduce 12 \(bucket 9 of 9"):
        comm.run_group(group(*given(3, rows), rows, on_device))


FAILURES = {"ncclAllReduce:5=5": "all-reduce 2 (bucket 2 of 6)", "ncclBroadcast:2": "broadcast 3 (bucket 3 of 6)"}


@pytest.mark.parametrize("fail", FAILURES)
def test_failure_within_a_group(standin, fail):
    """The collective that it is in is named, alone; nothing was launched, and nothing is left."""
    comm = opened()
    sends, recvs = given(3)
    standin.fail(fail)
    with pytest.raises(NcclError) as caught:
        comm.run_group(group(sends, recvs, place=on_device))
    assert caught.value.call == fail.partition(":")[0]
    assert caught.value.during.startswith(FAILURES[fail])
    assert comm.closed and not recvs[0][0].any()


def test_bad_group_is_refused(standin):
    """Before anything is called, by NCCL's communicator and ours: bad operations, buffers, overlaps."""
    for comm, place in ((opened(), on_device), (CpuCommunicator(3), lambda array: array)):
        with comm:
            sends, recvs = given(3)
            good = group(sends, recvs, place=place)
            standin.count("ncclGroupStart", "cuCtxRecordEvent")
            for bad, message in (
                (AllReduce(good[1].sends, good[1].recvs, "median"), "Expected op to be one of"),
                (Broadcast(good[2].buffers, 3), "Expected root to be a rank, 0 to 2"),
                (AllReduce(good[1].sends[:2], good[1].recvs), "to hold 3 buffers"),
                (AllReduce(good[1].sends, good[0].recvs), r"Expected recvs\[0\] to be like sends\[0\]"),
            ):
                with pytest.raises(ValueError, match=message):
                    comm.run_group([good[0], bad])
            assert not recvs[0][0].any() and not comm.closed
            if place is on_device:
                buffer = r"(recvs|sends)\[\d\]"
                message = (
                    rf"Expected {buffer} to be apart from {buffer} of collective [12] of the group. Received: .*, "
                )
                message += r"in all-reduce [12] (\(bucket 1 of 6\) )?of 20 bytes"
                for sent, received in ((good[0].recvs, good[5].recvs), (good[5].sends, good[0].sends)):
                    with pytest.raises(ValueError, match=message):
                        comm.run_group([good[0], AllReduce(sent, received)])
                comm.run_group([good[0], AllReduce(good[0].sends, good[5].recvs)])  # both only read it
                assert standin.counted() == [1, 3]


def test_bad_memory_in_a_group_of_ours():
    """What C would find in the second collective is found before the first one has written."""
    sends, recvs = given(2, MIXED[:1] * 2)
    odd = np.zeros(24, np.uint8)[2:22].view(np.float32)
    group = [AllReduce(sends[0], recvs[0]), AllReduce(sends[1], [recvs[1][0], odd])]
    message = r"Expected recvs\[1\] to begin at a multiple of 4 bytes"
    with CpuCommunicator(2) as comm, pytest.raises(ValueError, match=message):
        comm.run_group(group)
    assert not recvs[0][0].any()


@pytest.mark.parametrize("size", range(1, 9))
def test_blocks(standin, size):
    """Reduce-scatters and all-gathers of every dtype, operation and length, in place or not, in one group:
    NumPy's result on every rank, one call of NCCL's for each, and nothing else is written.
    """
    rows = [*itertools.product(DTYPES, native.OPS, (0, 1, 7), (False, True))]
    sends = [unique_inputs(size, size * count, dtype) for dtype, _, count, _ in rows]
    totals = [closed_form(op, sent) for (_, op, _, _), sent in zip(rows, sends, strict=True)]
    recvs = [
        blocks_of(sent) if in_place else [np.zeros(count, dtype) for _ in sent]
        for (dtype, _, count, in_place), sent in zip(rows, sends, strict=True)
    ]
    wholes = [[np.zeros_like(one) for one in sent] for sent in sends]
    before = [[one.copy() for one in sent] for sent in sends]

    def place(arrays):
        return [on_device(array) for array in arrays]

    with NcclCommunicator(range(size), timeout_s=30.0, preflight=False) as comm:
        for begin in range(0, len(rows), 100):
            chosen = [ReduceScatter(place(sends[b]), place(recvs[b]), rows[b][1]) for b in range(len(rows))]
            standin.count("ncclGroupEnd", "ncclReduceScatter", "ncclAllGather")
            comm.run_group(chosen[begin : begin + 100])
            assert standin.counted() == [1, 100 * size, 0]
            gathers = []
            for b in range(begin, begin + 100):
                if rows[b][3]:  # in place
                    for block, part in zip(blocks_of(wholes[b]), recvs[b], strict=True):
                        block[:] = part
                parts = blocks_of(wholes[b]) if rows[b][3] else recvs[b]
                gathers.append(AllGather(place(parts), place(wholes[b])))
            comm.run_group(gathers)
            assert standin.counted() == [2, 100 * size, 100 * size]
    for row, sent, was, whole, total in zip(rows, sends, before, wholes, totals, strict=True):
        np.testing.assert_array_equal(whole, [total] * size, str(row))
        if row[3]:
            for block, part in zip(blocks_of(was), blocks_of(whole), strict=True):
                block[:] = part
        np.testing.assert_array_equal(sent, was, str(row))


def block_group(count=5):
    """A reduce-scatter, an all-reduce and an all-gather of three ranks; what they receive."""
    sends = [np.full(3 * count, r + 1, np.float32) for r in range(3)]
    recvs = [[np.zeros(n, np.float32) for _ in range(3)] for n in (count, count, 3 * count)]
    whole, first = [on_device(a) for a in sends], [on_device(a[:count]) for a in sends]
    part, total, gathered = ([on_device(a) for a in side] for side in recvs)
    kinds = (
        ReduceScatter(whole, part, "max", "gradients"),
        AllReduce(first, total),
        AllGather(first, gathered, "weights"),
    )
    return kinds, sends, recvs


BLOCK_FAILURES = {
    "ncclReduceScatter:2=5": "reduce-scatter 1 (gradients) of 60 bytes (15 × float32)",
    "ncclAllGather:3": "all-gather 3 (weights) of 60 bytes (15 × float32)",
}


@pytest.mark.parametrize("fail", BLOCK_FAILURES)
def test_failure_of_blocks(standin, fail):
    """As of any collective: it is named, nothing was launched; joined anew, the same group is right."""
    comm = opened()
    group, _, recvs = block_group()
    standin.fail(fail)
    with pytest.raises(NcclError) as caught:
        comm.run_group(group)
    assert (caught.value.call, caught.value.during) == (fail.partition(":")[0], BLOCK_FAILURES[fail])
    assert comm.closed and not any(recv.any() for side in recvs for recv in side)
    standin.fail("")
    comm.reopen()
    comm.run_group(group)
    np.testing.assert_array_equal(recvs[2][1], np.repeat([1.0, 2.0, 3.0], 5))
    assert [(side[1] == value).all() for side, value in zip(recvs, (3, 6), strict=False)] == [True, True]
    comm.close()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_blocks_that_never_arrive(standin, kind):
    """A rank that is missing is named, in a message with the size of all ranks' blocks."""
    comm = opened(timeout_s=0.1)
    group, _, _ = block_group()
    chosen = group[0] if kind == "reduce_scatter" else group[2]
    standin.fail("stuck:2")
    with pytest.raises(NcclTimeoutError) as caught:
        getattr(comm, kind)(*chosen[:-1], label=chosen.label)
    words = f"{kind.replace('_', '-')} 1 ({chosen.label}) of 60 bytes (15 × float32)"
    assert str(caught.value).startswith(f"Expected {words} to end. Received: it has not within 0.1 s: rank 0")
    assert "rank 2 (GPU 2) not arrived" in str(caught.value)
    assert caught.value.call == {"reduce_scatter": "ncclReduceScatter", "all_gather": "ncclAllGather"}[kind]


def test_bad_blocks_are_refused(standin):
    """Counts, operations and overlaps other than in place, before anything is called."""
    with opened() as comm:
        group, sends, recvs = block_group()
        (whole, part, *_), (first, gathered, _) = group[0], group[2]
        second = [on_device(a[5:10]) for a in sends]
        standin.count("ncclGroupStart", "cuCtxRecordEvent")
        for bad, message in (
            (ReduceScatter(whole, part, "median"), "Expected op to be one of"),
            (ReduceScatter(whole[:2], part), "to hold 3 buffers"),
            (AllGather(first, gathered[:1]), "to hold 3 buffers"),
            (ReduceScatter(whole, gathered), r"sends\[0\] to be 3 blocks like recvs\[0\], 45 × float32"),
            (AllGather(first, part), r"recvs\[0\] to be 3 blocks like sends\[0\], 15 × float32"),
            # The second block is rank 1's own, and no other's; another rank's is nobody's.
            (ReduceScatter(whole, second), r"recvs\[([02])\] to be apart from sends\[\1\], or in place"),
            (ReduceScatter(whole, [part[0], second[2], part[2]]), r"recvs\[1\] to be apart from sends\[2\]"),
            (AllGather(second, whole), r"recvs\[([02])\] to be apart from sends\[\1\], or in place"),
            (AllGather(first, [gathered[0]] * 3), r"recvs\[\d\] to be apart from recvs\[\d\]"),
        ):
            with pytest.raises(ValueError, match=message):
                comm.run_group([bad])
        with pytest.raises(ValueError, match=r"of collective [12] of the group. .*, in (all-g|reduce-s)"):
            comm.run_group([group[0], AllGather(part, gathered)])  # what the one writes, the other reads
        assert standin.counted() == [0, 0] and not comm.closed
        assert not any(recv.any() for side in recvs for recv in side)
