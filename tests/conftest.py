"""What every test needs before TensorFlow is first imported, and the stand-in for NCCL."""

import collections
import fcntl
import gc
import math
import os
import random
import re
import secrets
import signal
import time

import pytest
from standin import COMPILER, Loaded, Standin
from virtual_host import PATH, run

# For the processes that tests start: the modules of `support`, and quicker imports.
SUPPORT = os.path.join(os.path.dirname(__file__), "support")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [SUPPORT, os.path.join(SUPPORT, "children"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Only errors: TensorFlow says on import that it found no GPU. Subprocesses inherit it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# What ncclsync by a fault of its own cannot divide is raised, not computed whole.
os.environ.setdefault("NCCLSYNC_FAULTS", "raise")

# Tests set these themselves, where they are about them. On a host with GPUs they choose which, and how they are joined.
OUTSIDE = ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "XLA_FLAGS")
ON_GPUS = () if os.path.exists("/dev/nvidiactl") else ("CUDA_VISIBLE_DEVICES", "NCCL_")
for variable in [*os.environ]:
    if variable.startswith((*OUTSIDE, *ON_GPUS)):
        del os.environ[variable]

LEFT_OUT, LOT, ENDS = pytest.StashKey[int](), pytest.StashKey[int](), pytest.StashKey[float]()
OUT_OF_TIME = "no time was left (--minutes)"


def pytest_addoption(parser, pluginmanager):
    """Add --all. Know pytest-timeout's option where it is not installed: tests/gpu asks for pytest alone."""
    parser.addoption("--all", action="store_true", help="run the slow tests, too; in full: NCCLSYNC_THOROUGH=1 as well")
    parser.addoption("--minutes", type=float, help="start no test after this time; run in an order drawn by lot")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "pytest-timeout's; without it there is no limit")


def pytest_report_header(config):
    """Say which tests are run."""
    return "tests: all" if config.option.all else "tests: those not marked slow; pytest --all runs all"


TOGETHER = 20  # tests of a file that run one after another, since they share what is made once for a file
LONG = 300  # seconds; a test with a limit above it comes before the others


def by_lot(items, seed):
    """Return the tests in an order drawn by lot, up to `TOGETHER` of a file at a time, those of a long limit first.

    At the end of a run a long test would keep one worker busy, while the others have nothing left.
    """
    groups = collections.defaultdict(list)
    for i, item in enumerate(items):
        marker = item.get_closest_marker("timeout")
        limit = marker.args[0] if marker and marker.args else 0
        groups[limit if limit > LONG else 0, item.path, i // TOGETHER].append(item)
    drawn = list(groups.items())
    random.Random(seed).shuffle(drawn)
    drawn.sort(key=lambda one: -one[0][0])
    return [item for _, group in drawn for item in group]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out the slow tests, unless all are asked for; with `--minutes`, let chance say which run first."""
    slow = set() if config.option.all else set(slow_tests(items))
    if slow:
        config.hook.pytest_deselected(items=[item for item in items if item in slow])
        items[:] = [item for item in items if item not in slow]
    config.stash[LEFT_OUT] = len(slow)
    if config.option.minutes is not None:
        items[:] = by_lot(items, config.stash[LOT])
        config.stash[ENDS] = time.monotonic() + 60 * config.option.minutes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Start no test after the time that `--minutes` gives; each of them counts as skipped."""
    if time.monotonic() > item.config.stash.get(ENDS, math.inf):
        pytest.skip(OUT_OF_TIME)


def slow_tests(items):
    """Yield the tests marked slow. With `slow(but=N)`, N of a test's parameters, evenly spread, are not."""
    marked = collections.defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("slow"):
            but = marker.kwargs.get("but", 0)
            marked[item.nodeid.partition("[")[0], but].append(item)
    for (_, but), group in marked.items():
        kept = {i * len(group) // but for i in range(but)}
        yield from (item for i, item in enumerate(group) if i not in kept)


class FailedAtOnce:
    """Names a failed test when it fails: a run that is cut off prints no summary."""

    def __init__(self, config):
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when}): {message.partition(chr(10))[0][:200]}")


def pytest_configure(config):
    """Tell of failures as they come; pytest-xdist's workers have nobody to tell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's `pytest &`, though tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    of_worker = getattr(config, "workerinput", None)
    config.stash[LOT] = secrets.randbits(32) if of_worker is None else of_worker["lot"]
    if of_worker is None:
        config.pluginmanager.register(FailedAtOnce(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let all of pytest-xdist's workers draw the same order, as it asks of them."""
    node.workerinput["lot"] = node.config.stash[LOT]


def pytest_sessionfinish(session):
    """Let one of pytest-xdist's workers tell the main process, which collects nothing, what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take that from a worker: all leave out the same."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter, config):
    """Tell how many tests were left out, and which op types the tests of `semantics` are about."""
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
    late = collections.Counter(
        report.nodeid.partition("::")[0]
        for report in terminalreporter.stats.get("skipped", ())
        if OUT_OF_TIME in str(report.longrepr)
    )
    if late:
        terminalreporter.section(f"no time was left for {late.total()} tests")
        for file, count in sorted(late.items()):
            terminalreporter.write_line(f"{count:5d} {file}")
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.section("left out")
        terminalreporter.write_line(f"{left_out} tests marked slow were left out; pytest --all runs them too")


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage():
    """Let the collector pass over what TensorFlow and Keras made when they were imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def the_choice_of_gpus():
    """With NCCLSYNC_JIT=1, let Keras choose as on a GPU whether XLA compiles a model."""
    with pytest.MonkeyPatch.context() as patch:
        if "NCCLSYNC_JIT" in os.environ:
            from parity import choose_as_on_gpus

            choose_as_on_gpus(patch)
        yield


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
def virtual_gpus():
    """The path of `virtual_gpus/run.py`, compiled by now: no limit of time counts that minute."""
    if run.CXX is None or run.COMPILER is None:
        pytest.skip(run.MISSING)
    run.build()
    return PATH


@pytest.fixture(scope="session")
def built_standin(tmp_path_factory):
    """The stand-in libraries, compiled once; on virtual GPUs those that these are made of."""
    if "VIRTUAL_GPUS" in os.environ:
        return Loaded()
    if COMPILER is None:
        pytest.skip("no C compiler on the PATH to build the stand-in NCCL")
    return Standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def standin(built_standin, monkeypatch):
    """The stand-in as the NCCL of this process. Whatever a test makes must be gone behind it."""
    for name, value in built_standin.environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(built_standin, Loaded):
        gc.collect()  # the towers of other tests are on it, too
    built_standin.fail("")
    before = built_standin.alive()
    yield built_standin
    built_standin.fail("")
    assert built_standin.settled(before) == before, "streams, memory or communicators were left behind"


@pytest.fixture
def disk_events(monkeypatch, tmp_path):
    """What is flushed to the disk and renamed within the test's own folder, in order: (function, name).

    Of the part of a file, the name without what nobody can foretell: "part-NAME".
    """
    events, opened = [], {}
    functions = {name: getattr(os, name) for name in ("open", "fsync", "replace")}

    def noted(name):
        def call(first, *others, **options):
            path = str(opened.get(first, first))
            result = functions[name](first, *others, **options)
            if name == "open":
                opened[result] = path
            elif path.startswith(str(tmp_path)):
                events.append((name, re.sub("^part-[0-9a-f]{16}-", "part-", os.path.basename(path))))
            return result

        return call

    for name in functions:
        monkeypatch.setattr(os, name, noted(name))
    return events


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Towers on the CPU run the program that GPUs run, with packed buckets: no host pass changes it."""
    from ncclsync.towers import placement

    monkeypatch.setattr(placement, "host_passes", lambda *_, **__: ())
