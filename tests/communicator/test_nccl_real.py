"""The real libnccl of the nvidia-nccl-cu12 wheel, as far as it goes on a machine without a GPU.

Its calls in processes of their own: NCCL starts threads, and keeps what it has read from the environment.
"""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from ncclsync.communicator import native

PATHS = native._candidates(*native._NCCL)
pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(len(PATHS) < 2, reason="nvidia-nccl-cu12 is not installed")]
without_gpu = pytest.mark.skipif(
    bool(shutil.which("nvidia-smi")) or pathlib.Path("/dev/nvidia0").exists(), reason="this machine has a GPU"
)


def run_python(code, **environment):
    """Run code with the wheel's NCCL; return what it printed."""
    variables = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def nccl():
    """The library, in this process: only what starts nothing."""
    library = ctypes.CDLL(PATHS[0])
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def test_version_is_the_headers(nccl):
    """As `nccl_version()` tells it, and as the header beside the library declares it."""
    header = pathlib.Path(PATHS[0]).parent.parent / "include" / "nccl.h"
    code = next(line.split()[2] for line in header.read_text().splitlines() if "define NCCL_VERSION_CODE" in line)
    major, minor, patch = native.NcclLibrary().version()
    assert major * 10000 + minor * 100 + patch == int(code)


def test_every_status_has_words(nccl):
    """Of its own; the one behind the last that we know has none."""
    words = {nccl.ncclGetErrorString(status) for status in native.STATUS_NAMES}
    assert len(words) == len(native.STATUS_NAMES) and b"unknown result code" not in words
    assert nccl.ncclGetErrorString(len(native.STATUS_NAMES)) == b"unknown result code"
    assert nccl.ncclGetErrorString(native.TIMEOUT) == b"timeout"
    assert b"in progress" in nccl.ncclGetErrorString(native.IN_PROGRESS)


def test_groups(nccl):
    """They nest, may be empty, and cannot be ended more often than begun."""
    assert [nccl.ncclGroupStart(), nccl.ncclGroupStart(), nccl.ncclGroupEnd(), nccl.ncclGroupEnd()] == [0] * 4
    assert nccl.ncclGroupEnd() == native.INVALID_USAGE
    assert b"not in a group call" in nccl.ncclGetLastError(None)


NOTHING, ONE = ctypes.c_void_p(), ctypes.c_size_t(1)


@pytest.mark.parametrize(
    "call, arguments",
    [
        ("ncclAllReduce", (NOTHING, NOTHING, ONE, 7, 0, NOTHING, NOTHING)),
        ("ncclBroadcast", (NOTHING, NOTHING, ONE, 7, 0, NOTHING, NOTHING)),
        ("ncclReduceScatter", (NOTHING, NOTHING, ONE, 7, 0, NOTHING, NOTHING)),
        ("ncclAllGather", (NOTHING, NOTHING, ONE, 7, NOTHING, NOTHING)),
        ("ncclSend", (NOTHING, ONE, 7, 0, NOTHING, NOTHING)),
        ("ncclRecv", (NOTHING, ONE, 7, 0, NOTHING, NOTHING)),
        ("ncclCommGetAsyncError", (NOTHING, ctypes.byref(ctypes.c_int()))),
    ],
)
def test_no_communicator(nccl, call, arguments):
    """An argument error, in NCCL's own words."""
    assert nccl.ncclGroupStart() == 0
    assert getattr(nccl, call)(*arguments) == 4
    assert b"comm argument is NULL" in nccl.ncclGetLastError(None)
    nccl.ncclGroupEnd()


def test_ending_no_communicator(nccl):
    """Is nothing, so that what a failed creation has left can be ended as it is."""
    for call in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
        assert getattr(nccl, call)(NOTHING) == 0


def test_unique_ids():
    """Need no GPU; no two are equal."""
    code = """
from ncclsync.communicator import NcclCommunicator
one, other = NcclCommunicator.unique_id(), NcclCommunicator.unique_id()
print(len(one), len(other), one != other)
"""
    assert run_python(code) == "128 128 True"


CREATE = """
from ncclsync.communicator import NcclCommunicator
from ncclsync.errors import NcclUnavailableError
for devices in ([0], [0, 1]):
    try:
        NcclCommunicator(devices)
    except NcclUnavailableError as error:
        print(error)
"""


@without_gpu
def test_creation_fails_without_a_driver():
    """Whether or not there is CUDA's runtime: what is missing is the driver."""
    lines = run_python(CREATE).splitlines()
    assert lines == [lines[0]] * 2
    assert lines[0].startswith(
        "Expected the NVIDIA driver's libcuda. Received: libcuda.so.1: cannot open shared object"
    )
    assert "Install the driver, " in lines[0] and lines[0].endswith('by devices=["CPU:0", "CPU:0"].')


@without_gpu
def test_creation_fails_within_the_group(built_standin):
    """With CUDA's runtime in place it is the call of the first rank that fails; the group is closed, since
    the second attempt gets as far, and nothing is left behind."""
    environment = {k: v for k, v in built_standin.environment.items() if k != "NCCLSYNC_NCCL_LIBRARY"}
    code = CREATE + (
        "import ctypes, os\n"
        "standin = ctypes.CDLL(os.environ['NCCLSYNC_CUDART_LIBRARY'])\n"
        "print(standin.standin_alive(b'stream'))"
    )
    *lines, streams = run_python(code, **environment).splitlines()
    for line in lines:
        assert "ncclCommInitRankConfig returned ncclUnhandledCudaError (1): Cuda failure" in line
    assert (len(lines), streams) == (2, "0")
