"""What doctor reads from NVML: against a fake pynvml with several hosts, and against the real one."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from ncclsync.tools.doctor import nvml
from ncclsync.tools.doctor.facts import Link

FAKE = pathlib.Path(__file__).parents[1] / "support" / "fakes" / "pynvml.py"
GIB = 1 << 30


@pytest.fixture
def read(monkeypatch):
    """Return a function that reads one of the fake's hosts."""

    def read_host(name):
        spec = importlib.util.spec_from_file_location("pynvml", FAKE)
        fake = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fake)
        fake.HOST = name
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return nvml.read_driver()

    return read_host


def test_no_gpu(read):
    """A driver without GPUs is an answer, not an error."""
    found = read("none")
    assert (found.version, found.cuda, found.gpus, found.links, found.error) == ("550.54.15", "12.9", (), (), None)


def test_one_gpu(read):
    """Everything that is shown of a GPU; MIG that it does not know is None, not False."""
    (gpu,) = read("one").gpus
    assert (gpu.index, gpu.name, gpu.compute_capability) == (0, "NVIDIA A100-SXM4-80GB", "8.0")
    assert (gpu.memory_bytes, gpu.used_bytes) == (80 * GIB, GIB // 2)
    assert (gpu.uuid, gpu.pci_bus_id) == ("GPU-00aa-bb", "00000000:0a:00.0")
    assert (gpu.mig, gpu.prohibited, gpu.error) == (None, False, None)


def test_nvlink_pairs(read):
    """Direct links are counted once, however the other end's address is written; the rest is PCIe's way."""
    found = read("pairs")
    assert found.version == "550.54.15"  # bytes of an older pynvml
    paths = {link.gpus: (link.path, link.nvlinks, link.p2p) for link in found.links}
    assert paths.pop((0, 1)) == paths.pop((2, 3)) == ("NV4", 4, "ok")
    assert len(paths) == 4 and set(paths.values()) == {("SYS", 0, "ok")}


def test_nvswitch(read):
    """Links to NVSwitches join every pair."""
    assert {(link.path, link.nvlinks) for link in read("switch").links} == {("NV12", 12)}


@pytest.mark.parametrize(
    ("host", "pairs", "path", "p2p"),
    [
        ("no p2p", 6, "PHB", "not supported"),
        ("regkey", 1, "NODE", "disabled in the driver's settings"),
        ("unsupported", 1, None, None),
    ],
)
def test_peer_to_peer_access(read, host, pairs, path, p2p):
    """Its reason is told where there is none, and None where the driver does not say."""
    links = read(host).links
    assert len(links) == pairs
    assert set(links) == {Link(link.gpus, path, 0, p2p) for link in links}


def test_unsupported_queries(read):
    """What cannot be asked is None; the rest is there."""
    for gpu in read("unsupported").gpus:
        assert gpu.name == "NVIDIA A100-SXM4-80GB"
        assert {gpu.memory_bytes, gpu.compute_capability, gpu.mig, gpu.prohibited} == {None}


def test_older_pynvml(read, monkeypatch):
    """Queries that it has not are as unsupported ones."""
    read("pairs")
    for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetComputeMode"):
        monkeypatch.delattr(sys.modules["pynvml"], name)
    found = nvml.read_driver()
    assert {gpu.mig for gpu in found.gpus} == {None}
    assert {link.path for link in found.links} == {"SYS"}


def test_mig_and_lost(read):
    """A divided GPU is marked; one that does not answer keeps its place."""
    assert [gpu.mig for gpu in read("mig").gpus] == [True, True]
    assert [(gpu.index, gpu.error) for gpu in read("lost").gpus] == [(0, None), (1, "GpuIsLost")]


@pytest.mark.parametrize(
    ("host", "error"),
    [("no library", "LibraryNotFound"), ("not loaded", "DriverNotLoaded"), ("mismatch", "LibRmVersionMismatch")],
)
def test_no_driver(read, host, error):
    """NVML's own name of what is wrong."""
    found = read(host)
    assert (found.error, found.detail, found.gpus) == (error, "told to fail", ())


def test_not_installed(monkeypatch):
    """nvidia-ml-py is optional."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.read_driver().error == "NotInstalled"


def real_pynvml():
    """Import the real one, or skip."""
    return pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


def test_real_pynvml_has_what_is_used():
    """Every query and every number, by name; and why one constant is not used."""
    pynvml = real_pynvml()
    text = pathlib.Path(nvml.__file__).read_text()
    queries = set(re.findall(r'"(nvml[A-Z]\w+)"', text)) | set(re.findall(r"pynvml\.(nvml\w+)", text))
    assert len(queries) > 12
    assert {name for name in queries if not hasattr(pynvml, name)} == set()
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert list(nvml._PATHS) == [getattr(pynvml, f"NVML_TOPOLOGY_{name}") for name in levels]
    assert nvml._MOST_NVLINKS <= pynvml.NVML_NVLINK_MAX_LINKS
    assert pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH == nvml._SWITCH
    assert pynvml.NVML_COMPUTEMODE_PROHIBITED == nvml._COMPUTE_PROHIBITED
    read = pynvml.NVML_P2P_CAPS_INDEX_READ
    assert (read[0] if isinstance(read, tuple) else read) == nvml._P2P_READ
    assert pynvml.NVML_P2P_CAPS_INDEX_WRITE == nvml._P2P_WRITE
    assert pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY == 4 and "settings" in nvml._P2P_STATUS[4]
    for number, name in ((4, "NoPermission"), (9, "DriverNotLoaded"), (12, "LibraryNotFound"), (999, "Unknown")):
        assert nvml._name(pynvml.NVMLError(number)) == name


def test_real_pynvml_answers():
    """On any machine: an error by name, or GPUs with a name and a memory each."""
    real_pynvml()
    code = "from ncclsync.tools.doctor.nvml import read_driver; print(repr(read_driver()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    if pathlib.Path("/proc/driver/nvidia/version").exists():
        assert "error=None" in done.stdout and "memory_bytes=" in done.stdout
    else:
        assert re.search("error='(LibraryNotFound|DriverNotLoaded)'", done.stdout)
