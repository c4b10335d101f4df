"""What every test needs before TensorFlow is first imported, and the stand-in for NCCL."""

import contextlib
import fcntl
import gc
import os
import sys

import pytest
from standin import COMPILER, Standin

# For the processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [os.path.join(os.path.dirname(__file__), "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Only errors: TensorFlow says on import that it found no GPU. Subprocesses inherit it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Models are small, and another process tests beside: threads within an op would only wait for each other. A
# quarter of the time. Ops, and so towers, still run on several threads.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")


def pytest_addoption(parser, pluginmanager):
    """Know pytest-timeout's option where it is not installed: tests/gpu asks for pytest alone."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "pytest-timeout's; without it there is no limit")


def pytest_report_header():
    """Say which rows of the parity tables are not run, and how they are."""
    if os.environ.get("NCCLSYNC_ALL_ROWS") != "1":
        some = "every twelfth row of the large ones, some pairs of model and towers"
        return f"parity tables: {some}, for time; NCCLSYNC_ALL_ROWS=1 runs all"
    return "parity tables: all rows"


def pytest_terminal_summary(terminalreporter):
    """Tell which op types the tests of `semantics` are about, and which of them gather; of all workers."""
    found = {}
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        for name, ops in getattr(report, "user_properties", ()):
            if name.startswith("ops: "):
                found.setdefault(name.removeprefix("ops: "), set()).update(ops)
    if found:
        terminalreporter.section("op types")
    for name, ops in sorted(found.items()):
        listed = f": {' '.join(sorted(ops))}" if "gather" in name or len(ops) < 10 else ""
        terminalreporter.write_line(f"{len(ops)} {name}{listed}")


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage():
    """Let the collector pass over what TensorFlow and Keras made when they were imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_autotuning_of_datasets():
    """Let datasets be as they are: nothing here is about how fast they are read.

    TensorFlow's autotuner looks after an iterator in ever longer intervals, up to a minute, and often misses,
    until the next one, that the iterator is to be deleted. Python waits for it: a fifth of the time that
    these tests took.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None:  # no module of tests has imported it; tests/gpu asks for pytest alone
        yield
        return
    options, make_iterator = tf.data.Options(), tf.data.Dataset.__iter__
    options.autotune.enabled = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.data.Dataset, "__iter__", lambda self: make_iterator(self.with_options(options)))
        yield


@pytest.fixture(scope="session", autouse=True)
def tiny_graphs_as_they_are():
    """Let Grappler pass over graphs of fewer than 20 nodes: those of datasets' functions.

    Each epoch's iterator has them optimised anew, which takes longer than the epoch. Steps on towers have
    more nodes, and are optimised as everywhere.
    """
    tf = sys.modules.get("tensorflow")
    if tf is not None:
        tf.config.optimizer.set_experimental_options({"min_graph_nodes": 20})


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """A function that returns the folder that `make(folder)` fills, once for all of pytest-xdist's workers.

    For what takes long: by itself, a fixture of a module whose tests meet several workers is made by each.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name, make):
        folder = base / name
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            if not folder.exists():
                part = tmp_path_factory.mktemp(name)
                make(part)
                part.rename(folder)  # only now, so that a worker that comes after a failure tries itself
        return folder

    return folder_of


@pytest.fixture(scope="session")
def built_standin(tmp_path_factory):
    """The stand-in libraries, compiled once."""
    if COMPILER is None:
        pytest.skip("no C compiler on the PATH to build the stand-in NCCL")
    return Standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def built_old_standin(built_standin, tmp_path_factory):
    """The same with a driver before 12.5."""
    return Standin(tmp_path_factory.mktemp("old_standin"), "-DSTANDIN_OLD_DRIVER")


@pytest.fixture
def standin(built_standin, monkeypatch):
    """The stand-in as the NCCL of this process. Whatever a test makes must be gone behind it."""
    with in_use(built_standin, monkeypatch):
        yield built_standin


@pytest.fixture(params=["built_standin", "built_old_standin"])
def any_standin(request, monkeypatch):
    """The same with each way to wait for the GPUs' own work."""
    standin = request.getfixturevalue(request.param)
    with in_use(standin, monkeypatch):
        yield standin


@contextlib.contextmanager
def in_use(standin, monkeypatch):
    """Make a stand-in this process' NCCL."""
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    standin.fail("")
    before = standin.alive()
    yield
    standin.fail("")
    assert standin.settled(before) == before, "streams, memory or communicators were left behind"


@pytest.fixture
def disk_events(monkeypatch, tmp_path):
    """What is flushed to the disk and renamed within the test's own folder, in order: (function, name)."""
    events, opened = [], {}
    functions = {name: getattr(os, name) for name in ("open", "fsync", "replace")}

    def noted(name):
        def call(first, *others, **options):
            path = str(opened.get(first, first))
            result = functions[name](first, *others, **options)
            if name == "open":
                opened[result] = path
            elif path.startswith(str(tmp_path)):
                events.append((name, os.path.basename(path)))
            return result

        return call

    for name in functions:
        monkeypatch.setattr(os, name, noted(name))
    return events


@pytest.fixture
def py_ops(monkeypatch):
    """Towers on the CPU whose collectives are py ops, as where TensorFlow does not take ops of our own."""
    from ncclsync.ops import host_ops

    monkeypatch.setattr(host_ops, "available", lambda: False)
