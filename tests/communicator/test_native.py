"""Library search, versions, statuses, and the process-wide pool."""

import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import pytest
from pools import pool

from ncclsync.communicator import native
from ncclsync.errors import NcclError, NcclSyncError, NcclUnavailableError

ROOT = pathlib.Path(__file__).parents[2]

needs_wheel = pytest.mark.skipif(len(native._candidates(*native._NCCL)) < 2, reason="nvidia-nccl-cu12 is not installed")


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_wheel
def test_version_needs_no_gpu():
    """NCCL's version comes as three numbers, and NCCL is version 2."""
    major, minor, patch = native.nccl_version()
    assert major == 2 and 0 <= minor < 100 and 0 <= patch < 100


def test_success_passes_and_every_other_status_raises():
    """check() raises for each status but the first, by its name in nccl.h."""
    native.check(0, "ncclAllReduce")
    assert native.STATUS_NAMES[0] == "ncclSuccess"
    for status, name in native.STATUS_NAMES.items():
        if status:
            with pytest.raises(NcclError, match=rf"ncclAllReduce returned {name} \({status}\): why"):
                native.check(status, "ncclAllReduce", "why")
    with pytest.raises(NcclError, match=r"unknown status \(1234\)"):
        native.check(1234, "ncclAllReduce")


def test_error_keeps_its_attributes_when_pickled():
    """Test runners and multiprocessing send exceptions between processes."""
    with pytest.raises(NcclError) as caught:
        native.check(1, "ncclCommInitAll", "no driver")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.status, copy.status_name, copy.call, copy.last_error) == (
        1,
        "ncclUnhandledCudaError",
        "ncclCommInitAll",
        "no driver",
    )
    assert str(copy) == str(caught.value)


def test_wheel_is_preferred_to_loader_path(tmp_path, monkeypatch):
    """The wheel's file comes first, then the bare name, which the loader searches."""
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    code = "from ncclsync.communicator import native; print(*native._candidates(*native._NCCL), sep='\\n')"
    monkeypatch.delenv("NCCLSYNC_NCCL_LIBRARY", raising=False)
    found = run_python(code, PYTHONPATH=str(tmp_path)).splitlines()
    assert found[0] == str(library)
    assert found[-1] == "libnccl.so.2"


def test_variable_decides_alone(monkeypatch):
    """A library named by the variable is used or is an error; there is no second choice."""
    monkeypatch.setenv("NCCLSYNC_NCCL_LIBRARY", "/nowhere/libnccl.so")
    with pytest.raises(NcclUnavailableError) as caught:
        native.nccl_version()
    message = str(caught.value)
    assert "Tried only NCCLSYNC_NCCL_LIBRARY, which is set: /nowhere/libnccl.so" in message
    assert "pip install nvidia-nccl-cu12" in message


def test_missing_library_names_every_place(tmp_path, monkeypatch):
    """Without the variable the message tells of the wheel, the loader's path and the variable."""
    broken = tmp_path / "libnccl.so.2"
    broken.write_text("not a library")
    monkeypatch.delenv("NCCLSYNC_NCCL_LIBRARY", raising=False)
    monkeypatch.setattr(native, "_candidates", lambda *_: [str(broken), "libnccl-none.so"])
    with pytest.raises(NcclUnavailableError) as caught:
        native.NcclLibrary()
    for part in (
        "nvidia/nccl/lib/libnccl.so.2",
        "loader's path",
        "NCCLSYNC_NCCL_LIBRARY is not set",
        str(broken),
        "libnccl-none.so",
    ):
        assert part in str(caught.value)


def test_library_without_nccls_functions_is_refused(monkeypatch):
    """Some other shared library does not pass for NCCL."""
    monkeypatch.setenv("NCCLSYNC_NCCL_LIBRARY", "libm.so.6")
    with pytest.raises(NcclUnavailableError, match="ncclGetVersion"):
        native.nccl_version()


def test_pool_refuses_what_it_cannot_do():
    """No threads, or instructions that the machine lacks, are errors."""
    for arguments in ((0,), (1, 99)):
        with pytest.raises(NcclError, match="ncs_pool_create returned ncclInvalidArgument"), pool(*arguments):
            pass


def test_process_pool_is_one():
    """Everybody in the process gets the same pool, of one thread per usable core."""
    code = """
import os
from ncclsync.communicator import native
before = len(os.listdir("/proc/self/task"))
assert native.process_pool() is native.process_pool()
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run_python(code) == str(len(os.sched_getaffinity(0)) - 1)


@pytest.mark.timeout(60)
def test_forked_child_makes_its_own_pool():
    """Workers do not survive fork, and the parent's pool may have been copied while locked."""
    code = """
import os, warnings
import numpy as np
from ncclsync.communicator import native
from ncclsync.communicator import CpuCommunicator
warnings.simplefilter("ignore")  # Python warns of any fork of a process with threads
sends = [np.ones(1_000_000, np.float32)] * 2
recv = np.zeros(1_000_000, np.float32)
comm = CpuCommunicator(2)
comm.all_reduce(sends, [recv] * 2)
pool = native.process_pool()
child = os.fork()
recv[:] = 0
comm.all_reduce(sends, [recv] * 2)
assert (recv == 2).all()
assert (native.process_pool() is pool) == bool(child)
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both")
else:
    os._exit(0)
"""
    assert run_python(code) == "both"


def test_missing_extension_says_how_to_install():
    """Without the compiled part the import fails with one clear sentence."""
    code = """
import sys
sys.modules["ncclsync._native"] = None
from ncclsync.errors import NcclSyncError
try:
    import ncclsync.communicator.native
except NcclSyncError as error:
    print(error)
"""
    printed = run_python(code)
    assert "Expected the compiled extension ncclsync._native" in printed
    assert "pip install" in printed


def test_extension_of_other_sources(tmp_path):
    """A clone that is newer than what was compiled of it, in any C file, is told what to run."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    native._check_sources(tmp_path / "csrc")
    with (tmp_path / "csrc" / "cpu" / "pool.c").open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(NcclSyncError, match="as after a `git pull`"):
        native._check_sources(tmp_path / "csrc")


def test_nothing_here_imports_tensorflow():
    """The communicators work, and load fast, without TensorFlow."""
    code = "import sys, ncclsync.communicator; print('tensorflow' in sys.modules)"
    assert run_python(code) == "False"


def test_errors_have_one_root():
    """One except clause catches all that is ncclsync's own."""
    assert issubclass(NcclError, NcclSyncError)
    assert issubclass(NcclUnavailableError, NcclSyncError)


@pytest.mark.parametrize(
    "of_each, share",
    [([{0, 1}], 2), ([{0, 1}, {0, 1}], 1), ([{0, 1}] * 5, 1), ([{0, 1, 2, 3, 4, 5}] * 3, 2), ([{0, 1}, {2, 3}], 2)],
)
def test_share_of_cores(monkeypatch, of_each, share):
    """Processes that may use the same cores share them; those that are bound to others do not; at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: of_each[0])
    monkeypatch.setattr(native, "_share", 0)
    assert native.usable_cores() == len(of_each[0])
    native.share_cores(of_each)
    assert native.usable_cores() == share
