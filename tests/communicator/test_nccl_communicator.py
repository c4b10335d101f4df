"""NcclCommunicator against a stand-in libnccl over host memory, and against NCCL without a GPU.

The stand-in has the real ABI of the calls in use, logs them, and can be told to fail one. Each case
runs in a process of its own, since NCCL's library is chosen once per communicator by environment.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

# Device memory that is host memory, as the stand-in takes it: addresses in tuples.
PREAMBLE = """
import ctypes, os
import numpy as np
from ncclsync.communicator import NcclCommunicator
from ncclsync.errors import NcclError, NcclSyncError, NcclUnavailableError

def on_device(arrays):
    return [(a.ctypes.data, a.size, a.dtype) for a in arrays]

def current_device():
    device = ctypes.c_int()
    cuda = ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"])
    assert cuda.cudaGetDevice(ctypes.byref(device)) == 0
    return device.value

sends = [np.arange(5, dtype=np.float32) + rank for rank in range(3)]
recvs = [np.zeros(5, np.float32) for _ in range(3)]
"""


@pytest.fixture
def run(built_standin, tmp_path):
    """Return a function that runs code with the stand-in and returns the calls it received."""

    def run_code(code: str, fail: str = "", expect: str = "done", **environment: str) -> list[str]:
        log = tmp_path / "calls"
        log.unlink(missing_ok=True)
        variables = {**built_standin.environment, "STANDIN_LOG": str(log), "STANDIN_FAIL": fail, **environment}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PREAMBLE + code],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert (done.returncode, done.stdout.strip()) == (0, expect), done.stdout + done.stderr
        return log.read_text().splitlines() if log.exists() else []

    return run_code


DEVICES = (4, 0, 2)
STREAMS_MADE = [
    line
    for device in DEVICES
    for line in (f"cudaSetDevice {device}", "cudaStreamCreateWithPriority -5", "cudaEventCreateWithFlags 2")
]
CREATED = [
    *STREAMS_MADE,
    "ncclGetUniqueId 0",
    "ncclGroupStart 0",
    *(line for r, d in enumerate(DEVICES) for line in (f"cudaSetDevice {d}", f"ncclCommInitRankConfig {r}")),
    "ncclGroupEnd 0",
]
ABORTED = [f"ncclCommAbort {rank}" for rank in (2, 1, 0)]
STREAMS_GONE = [f"cuda{kind}Destroy {device}" for device in (2, 0, 4) for kind in ("Event", "Stream")]
WAITED = [f"cuCtxRecordEvent {device}" for device in DEVICES]
FINALIZED = ["ncclGroupStart 0", *(f"ncclCommFinalize {rank}" for rank in range(3)), "ncclGroupEnd 0"]
DESTROYED = [*WAITED, *FINALIZED, *(f"ncclCommDestroy {rank}" for rank in (2, 1, 0)), *STREAMS_GONE]


def test_life_of_a_communicator(run):
    """Create, reduce, broadcast, close: every call, in order; the current device is restored."""
    calls = run("""
with NcclCommunicator([4, 0, 2], preflight=False) as comm:
    assert (comm.size, comm.devices, comm.closed) == (3, (4, 0, 2), False)
    assert current_device() == 5
    comm.all_reduce(on_device(sends), on_device(recvs), "avg")
    for recv in recvs:
        assert recv.tolist() == [1, 2, 3, 4, 5]
    assert current_device() == 5
    comm.broadcast(on_device(sends), root=2)
    for send in sends:
        assert send.tolist() == [2, 3, 4, 5, 6]
    assert current_device() == 5
assert comm.closed
comm.close()
for collective in (lambda: comm.all_reduce(sends, recvs), lambda: comm.broadcast(sends)):
    try:
        collective()
    except NcclSyncError as error:
        assert "Expected an open NcclCommunicator" in str(error)
    else:
        raise AssertionError("a closed communicator did not refuse")
print("done")
""")
    group = [
        ["ncclGroupStart 0", *(f"{name} {rank} on stream" for rank in range(3)), "ncclGroupEnd 3"]
        for name in ("ncclAllReduce", "ncclBroadcast")
    ]
    assert calls == [*CREATED, *WAITED, *group[0], *WAITED, *group[1], *DESTROYED]


@pytest.mark.parametrize("op, expected", [("sum", 12), ("prod", 60), ("max", 5), ("min", 3)])
def test_operations_and_in_place(run, op, expected):
    """Each operation reaches NCCL as itself; recvs may be the sends."""
    run(f"""
sends = [np.full(4, rank + 3, np.float32) for rank in range(3)]
with NcclCommunicator([0, 1, 2]) as comm:
    comm.all_reduce(on_device(sends), on_device(sends), "{op}")
assert all((send == {expected}).all() for send in sends), sends
print("done")
""")


@pytest.mark.parametrize(
    "fail, raised, calls_before_abort",
    [
        ("ncclGroupStart:2", "ncclGroupStart", ["ncclGroupStart 0"]),
        (
            "ncclAllReduce:2",
            "ncclAllReduce",
            ["ncclGroupStart 0", *(f"ncclAllReduce {r} on stream" for r in (0, 1)), "ncclGroupEnd 1"],
        ),
        ("ncclGroupEnd:2", "ncclGroupEnd", None),
        ("cudaStreamQuery:5", "cudaStreamQuery", None),
        ("ncclCommGetAsyncError:12", "ncclCommGetAsyncError", None),
        ("cuCtxRecordEvent", "cuCtxRecordEvent", None),
        ("cudaEventQuery", "cudaEventQuery", None),
    ],
)
def test_failed_collective_closes_the_group_and_aborts(run, fail, raised, calls_before_abort):
    """The failed call is named; the group is closed; device restored; aborted, not destroyed."""
    calls = run(
        f"""
comm = NcclCommunicator([4, 0, 2], preflight=False)
try:
    comm.all_reduce(on_device(sends), on_device(recvs))
except NcclError as error:
    assert error.call == "{raised}", error
    assert "told to fail" in error.last_error, error
else:
    raise AssertionError("the failure was not noticed")
assert comm.closed
assert current_device() == 5
comm.close()
try:
    comm.all_reduce(on_device(sends), on_device(recvs))
except NcclSyncError:
    print("done")
""",
        fail,
    )
    groups = 1 if fail in ("ncclGroupStart:2", "cuCtxRecordEvent", "cudaEventQuery") else 2
    assert len([c for c in calls if c.startswith("ncclGroupEnd")]) == groups
    assert calls[-len(ABORTED + STREAMS_GONE) :] == ABORTED + STREAMS_GONE
    if calls_before_abort is not None:
        assert calls == [*CREATED, *WAITED, *calls_before_abort, *ABORTED, *STREAMS_GONE]


def test_failed_abort_is_raised_with_its_cause(run):
    """Whoever reads the traceback sees both failures."""
    run(
        """
comm = NcclCommunicator([0, 1, 2], preflight=False)
try:
    comm.all_reduce(on_device(sends), [(r.ctypes.data, 5, "float64") for r in recvs])
except ValueError:
    pass
assert not comm.closed  # a bad argument is no failed collective
try:
    comm.all_reduce(on_device(sends), on_device(recvs))
except NcclError as error:
    assert error.call == "cudaStreamDestroy"
    assert error.__cause__.call == "ncclAllReduce" and error.__cause__.status == 2
    assert comm.closed
    print("done")
""",
        "ncclAllReduce,cudaStreamDestroy",
    )


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    "fail, streams, ranks",
    [
        ("cudaStreamCreateWithPriority:3", 2, 0),
        ("cudaSetDevice:2", 1, 0),
        ("ncclGetUniqueId", 3, 0),
        ("ncclGroupStart", 3, 0),
        ("ncclCommInitRankConfig:2", 3, 1),
        ("cudaSetDevice:6", 3, 2),
        ("ncclGroupEnd", 3, 3),
        ("ncclCommGetAsyncError:2", 3, 3),
        ("async_init:1=2", 3, 3),
    ],
)
def test_failed_creation_releases_everything(run, fail, streams, ranks):
    """In reverse: communicators by abort, then the streams made so far; the context is restored."""
    calls = run(
        f"""
try:
    NcclCommunicator([4, 0, 2], preflight=False)
except NcclError as error:
    named = "{fail.split(":")[0]}"
    assert error.call == ("ncclCommGetAsyncError" if named == "async_init" else named), error
    assert "told to fail" in error.last_error
    assert current_device() == 5
    print("done")
""",
        fail,
    )
    gone = [*ABORTED[3 - ranks :], *STREAMS_GONE[6 - 2 * streams :]]
    assert calls[-len(gone) :] == gone
    assert len([c for c in calls if c.startswith("ncclCommAbort") or "Destroy" in c]) == len(gone)
    assert [c for c in calls if c.startswith("ncclGroupEnd")] == ["ncclGroupEnd 0"] * (ranks > 0)


def test_failed_close_leaves_it_closed(run):
    """close() raises what NCCL says, and goes on releasing the rest; a second one does nothing."""
    calls = run(
        """
comm = NcclCommunicator([4, 0, 2], preflight=False)
try:
    comm.close()
except NcclError as error:
    assert error.call == "ncclCommDestroy"
assert comm.closed
comm.close()
print("done")
""",
        "ncclCommDestroy",
    )
    assert calls[len(CREATED) :] == DESTROYED


def test_failed_finalization_aborts(run):
    """Ranks that do not end together are ended one by one."""
    calls = run(
        """
comm = NcclCommunicator([4, 0, 2], preflight=False)
try:
    comm.close()
except NcclError as error:
    assert error.call == "ncclCommFinalize" and "the end of a communicator" in str(error), error
assert comm.closed
comm.close()
print("done")
""",
        "ncclCommFinalize:2",
    )
    assert calls[-9:] == [*ABORTED, *STREAMS_GONE]


def test_unclosed_communicator_warns_and_is_not_destroyed(run):
    """The collector must not run a call that may block."""
    calls = run("""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    comm = NcclCommunicator([4, 0, 2], preflight=False)
    del comm
assert [w.category for w in caught] == [ResourceWarning], caught
assert "on devices (4, 0, 2) was not closed" in str(caught[0].message)
print("done")
""")
    assert calls == CREATED


def test_bad_buffers_are_refused_before_nccl_is_called(run):
    """Host memory, buffers shared among ranks, partial overlaps; the communicator stays open."""
    calls = run("""
comm = NcclCommunicator([4, 0, 2], preflight=False)
s, r = on_device(sends), on_device(recvs)
at = r[0][0]
cases = {
    "sends[0] in memory of type kDLCUDA": (sends, r),
    "recvs[0] in memory of type kDLCUDA": (s, recvs),
    "recvs[0] to be apart from recvs[1]": (s, [r[0]] * 3),
    "recvs[0] to be apart from recvs[2]": (s, [r[0], r[1], (at + 4, 5, "float32")]),
    "recvs[0] to be apart from sends[1]": (s, [s[1], r[1], r[2]]),
    "sends[0] to begin at a multiple of 4": ([(at + 1, 5, "float32"), s[1], s[2]], r),
}
for message, (a, b) in cases.items():
    try:
        comm.all_reduce(a, b)
    except ValueError as error:
        assert f"Expected {message}" in str(error), error
    else:
        raise AssertionError(message)
comm.close()
print("done")
""")
    assert calls == [*CREATED, *DESTROYED]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (["CUDART"], "NCCLSYNC_CUDART_LIBRARY, which is set: /nowhere/lib.so"),
        (["CUDA_DRIVER"], "Expected the NVIDIA driver's libcuda. Received: /nowhere/lib.so: cannot open"),
        (["CUDA_DRIVER", "CUDART"], "Install the driver, in a container start it with --gpus all, or train on the CPU"),
    ],
)
def test_missing_library_is_said(run, missing, words):
    """Of both the driver's, without which the other is of no use; before any call."""
    calls = run(
        f"""
try:
    NcclCommunicator([4, 0, 2], preflight=False)
except NcclUnavailableError as error:
    assert {words!r} in str(error), error
    print("done")
""",
        **{f"NCCLSYNC_{name}_LIBRARY": "/nowhere/lib.so" for name in missing},
    )
    assert calls == []


@pytest.mark.parametrize("devices", ["[]", "[-1]", "['0']", "[0.0]"])
def test_bad_devices_are_refused(run, devices):
    """Before any library is loaded."""
    assert (
        run(f"""
try:
    NcclCommunicator({devices})
except ValueError as error:
    assert "Expected devices to be CUDA ordinals" in str(error)
    print("done")
""")
        == []
    )


@pytest.mark.slow
def test_more_elements_than_32_bits_count(run):
    """All 2^32 + 5 of them arrive: by count, in memory that is one piece many times."""
    code = """
from tests.support.large import aliased
count = (1 << 32) + 5
buffers = [aliased(count) for _ in range(2)]
buffers[1][: 1 << 24] = 2
with NcclCommunicator([0, 1]) as comm:
    comm.broadcast(on_device(buffers), root=1)
assert (buffers[0][: 1 << 24] == 2).all()  # not the 5 that an int would count
print("done")
"""
    root = str(pathlib.Path(__file__).parents[2])
    run(code, PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
