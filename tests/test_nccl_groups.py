"""Collectives in groups: of any dtypes, sizes and operations at once, with one launch and one wait."""

import ml_dtypes
import numpy as np
import pytest
from test_nccl_failures import opened

from ncclsync.communicator import AllReduce, Broadcast, CpuCommunicator
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
    with pytest.raises(
        NcclTimeoutError, match=r"\(bucket 5 of 9\)[^;]*; 3 more; all-reduce 12 \(bucket 9 of 9"
    ):
        comm.run_group(group(*given(3, rows), rows, on_device))


FAILURES = {
    "ncclAllReduce:5=5": "all-reduce 2 (bucket 2 of 6)",
    "ncclBroadcast:2": "broadcast 3 (bucket 3 of 6)",
}


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
                message = rf"Expected {buffer} to be apart from {buffer} of collective [12] of the gro"
                for sent, received in ((good[0].recvs, good[5].recvs), (good[5].sends, good[0].sends)):
                    with pytest.raises(ValueError, match=message + r"up; .*, in all-reduce [12] of 20 bytes"):
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
