"""Runs Keras' own tests with every compiled model on towers, beside the plain run.

    python tests/support/keras_suite.py [FOLDER ...] [--towers 2] [--jobs 1] [-k WORDS] [--json FILE]

FOLDER is one of those in the installed Keras that hold tests, such as `trainers` or `layers/rnn`. Without
any, all of `FOLDERS` are run. Each file of tests runs on towers, with this file as a plugin of pytest's, and
then plainly, without ncclsync, each time in a process of its own. The exit code is 1 if a test fails on
towers that passes plainly, unless `KNOWN` has it, or if all that a line of `KNOWN` names pass.

The plain run takes only the tests that did not pass on towers: of the others it can tell nothing. Files whose
text compiles no model, nor calls what does, are left out, and counted.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import fnmatch
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDERS = ("trainers", "callbacks", "models", "layers", "optimizers", "losses", "metrics")
START_LIMIT_S, TEST_LIMIT_S = 300.0, 300.0  # without news from a process: until its first test, and then

# What a file has that compiles models: `run_layer_test` of Keras' TestCase does for a layer.
COMPILES = re.compile(r"compile\(|run_layer_test\(|compile_from_config\(|load_model\(")

# Tests that pass plainly and fail on towers, by a pattern of their names, and why that is right.
KNOWN: dict[str, str] = {
    "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": (
        "compiles its model under a MirroredStrategy, which has replicas of its own; towers refuse that"
    ),
    "layers/preprocessing/mel_spectrogram_test.py::MelSpectrogramTest::test_mel_spectrogram_basics": (
        "trains on one waveform as a batch, of 16000 rows, with targets of 80; towers refuse other row counts"
    ),
}

PASSED, FAILED, SKIPPED, ENDED = "passed", "failed", "skipped", "ended"  # ENDED: with its process, or never


@dataclasses.dataclass
class Test:
    """One test in one run.

    Attributes:
        outcome: PASSED, FAILED, SKIPPED or ENDED.
        message: the last line of what it raised, or the reason why it was skipped.
        compiled: how many times a model was compiled; of runs on towers only, as are the others.
        attached: how many models were put on towers.
        trained: how many calls of a training step ran on towers.
    """

    outcome: str
    message: str = ""
    compiled: int = 0
    attached: int = 0
    trained: int = 0


@dataclasses.dataclass
class File:
    """A file of tests in both runs.

    Attributes:
        name: its path below the folder with all tests; a test is `name::Class::function`.
        error: why its tests could not be collected on towers, if so.
        plain_error: the same without towers.
        towers: its tests on towers.
        plain: those that did not pass there, without towers.
        seconds: how long it took.
    """

    name: str
    error: str = ""
    plain_error: str = ""
    towers: dict[str, Test] = dataclasses.field(default_factory=dict)
    plain: dict[str, Test] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def differing(self) -> dict[str, str]:
        """Return what each test raises that passes plainly and not on towers."""
        found = {
            name: f"{self.towers[name].outcome}: {self.towers[name].message}"
            for name, test in self.plain.items()
            if test.outcome == PASSED
        }
        if self.error and not self.plain_error:
            found[self.name] = self.error
        return found


# The plugin: what runs within pytest. What it is to do is in the file that $KERAS_SUITE_REQUEST names.


class Plugin:
    """Notes what becomes of each test; puts compiled models on towers, if there are to be any."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Prepare.

        Args:
            request: "told", where to write to, a line for each event; "file", the name of what is run;
                "only", the tests to run, None: all; "done", those not to run; "towers", how many, None: a
                plain run.
        """
        self._request = request
        self._test = Test(PASSED)
        self._name = ""

    def tell(self, **line: Any) -> None:
        """Write a line for the script."""
        with open(self._request["told"], "a", encoding="utf-8") as told:
            print(json.dumps(line), file=told, flush=True)

    def name_of(self, nodeid: str) -> str:
        """Return what the script calls a test."""
        return f"{self._request['file']}::{nodeid.partition('::')[2]}"

    def pytest_collectreport(self, report):
        """Tell of a file that cannot be imported, or is skipped as a whole."""
        if report.outcome != PASSED:
            self.tell(error=_last_line(report.longrepr), outcome=report.outcome)

    def pytest_collection_modifyitems(self, items):
        """Leave out what is not asked for."""
        only, done = self._request["only"], set(self._request["done"])
        names = [(item, self.name_of(item.nodeid)) for item in items]
        items[:] = [item for item, name in names if (only is None or name in only) and name not in done]

    def pytest_runtest_logstart(self, nodeid):
        """Tell which test runs, so that the script knows whose end it was if the process ends."""
        self._name, self._test = self.name_of(nodeid), Test(PASSED)
        self.tell(begun=self._name)

    def pytest_runtest_logreport(self, report):
        """Keep the first thing that is not a pass."""
        if report.outcome != PASSED and self._test.outcome == PASSED:
            self._test.outcome, self._test.message = report.outcome, _last_line(report.longrepr)

    def pytest_runtest_logfinish(self):
        """Tell what became of the test."""
        self.tell(test=self._name, **dataclasses.asdict(self._test))

    def put_models_on_towers(self) -> None:
        """Let `compile` attach the model as `nccl_parallel(lambda: model)()` does, unless it is already."""
        import keras

        from ncclsync import Towers, nccl_parallel
        from ncclsync.training import keras_model

        # Where it is defined: Keras asks whether a class has a `compile` of its own.
        owner = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
        compile_plainly, run, towers = owner.compile, keras_model.ModelStep.run, self._request["towers"]

        def compile_on_towers(model, *args, **kwargs):
            compile_plainly(model, *args, **kwargs)
            self._test.compiled += 1
            if getattr(model, "towers", None) is not None:
                return
            if isinstance(model, keras.Model):
                nccl_parallel(lambda: model, towers=towers)()
            else:  # of Keras' own making: a layer that is a Trainer too, which the decorator does not take
                keras_model.attach(model, Towers(towers))
            self._test.attached += 1

        def run_counted(step, iterator):
            results = run(step, iterator)
            self._test.trained += step.step.trains
            return results

        def find_inexact(model, *args):
            return find(model, *args) if isinstance(model, keras.Model) else ()

        find, keras_model.find_inexact = keras_model.find_inexact, find_inexact
        owner.compile, keras_model.ModelStep.run = compile_on_towers, run_counted


def _last_line(longrepr: Any) -> str:
    """Return what an exception said, or why a test was skipped, in a line."""
    if isinstance(longrepr, tuple):
        return str(longrepr[-1])
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if crash is None:  # of a file that cannot be imported: its traceback
        return next((line for line in reversed(lines)), "")[:400]
    return " ".join(lines)[:400]


def _stand_in_for_conftest() -> None:
    """Give what some of Keras' tests import from a `conftest` that does not ship with them."""
    import pytest

    conftest: Any = types.ModuleType("conftest")
    backend = os.environ["KERAS_BACKEND"]
    conftest.skip_if_backend = lambda name, reason: pytest.mark.skipif(name == backend, reason=reason)
    sys.modules["conftest"] = conftest


def pytest_configure(config):
    """Called by pytest, whose plugin this file is in the script's processes, and there alone."""
    if "KERAS_SUITE_REQUEST" in os.environ:
        _stand_in_for_conftest()
        request = json.loads(pathlib.Path(os.environ["KERAS_SUITE_REQUEST"]).read_text(encoding="utf-8"))
        plugin = Plugin(request)
        if request["towers"] is not None:
            plugin.put_models_on_towers()
        config.pluginmanager.register(plugin)


# The script.


def run_file(
    path: pathlib.Path, name: str, towers: int | None, only: Sequence[str] | None, options: argparse.Namespace
) -> tuple[dict[str, Test], str]:
    """Run a file's tests in processes of their own; one more for what is left where a process ends too soon.

    Args:
        path: the file.
        name: what it is called.
        towers: how many; None: plainly.
        only: the tests to run; None: all.
        options: of the script.

    Returns:
        The tests, and why they could not be collected, if so.
    """
    tests: dict[str, Test] = {}
    while True:
        before = len(tests)
        with tempfile.TemporaryDirectory() as folder:
            told, log = pathlib.Path(folder, "told"), pathlib.Path(folder, "log")
            told.touch()
            request = {"told": str(told), "file": name, "only": only, "done": [*tests], "towers": towers}
            asked = pathlib.Path(folder, "request")
            asked.write_text(json.dumps(request), encoding="utf-8")
            code = _run_pytest(path, asked, told, log, options)
            lines = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
            printed = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        begun, error = None, ""
        for line in lines:
            if "error" in line:
                error = f"{line['outcome']}: {line['error']}"
            elif "begun" in line:
                begun = line["begun"]
            else:
                name_of_test = line.pop("test")
                tests[name_of_test] = Test(**line)
                begun = None
        if begun is not None:  # its process ended with it
            how = f"nothing for {options.limit:g} s" if code is None else f"exit code {code}"
            tests[begun] = Test(ENDED, f"{how}: {printed[-1] if printed else ''}")
            continue
        if code in (0, 1, 2, 5) and not (code == 2 and not error):
            return tests, error
        if len(tests) == before:
            return (tests, f"pytest: {'no end' if code is None else f'exit code {code}'}: {' '.join(printed[-3:])}")


def _run_pytest(
    path: pathlib.Path, request: pathlib.Path, told: pathlib.Path, log: pathlib.Path, options: argparse.Namespace
) -> int | None:
    """Run pytest; return its exit code, or None if it was killed since it had no news for too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(path.parent)]
    for plugin in ("keras_suite", "no:cacheprovider", "no:warnings", "no:timeout"):
        command += ["-p", plugin]
    if options.words:
        command += ["-k", options.words]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "KERAS_SUITE_REQUEST": str(request),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # As towers on a CPU want it, and alike in both runs.
        "TF_NUM_INTRAOP_THREADS": os.environ.get("TF_NUM_INTRAOP_THREADS", "1"),
    }
    with open(log, "w") as printed:
        process = subprocess.Popen(
            [*command, str(path)], cwd=log.parent, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            heard, size = time.monotonic(), 0
            while True:
                try:
                    return process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    if told.stat().st_size > size:
                        heard, size = time.monotonic(), told.stat().st_size
                    elif time.monotonic() - heard > (options.limit if size else START_LIMIT_S):
                        return None
        finally:
            process.kill()
            process.wait()


def compare(path: pathlib.Path, name: str, options: argparse.Namespace) -> File:
    """Run a file on towers, and plainly what has not passed there."""
    start = time.monotonic()
    file = File(name)
    file.towers, file.error = run_file(path, name, options.towers, None, options)
    # Skipped before a model was compiled: for the same reason as without towers.
    left = [n for n, t in file.towers.items() if t.outcome != PASSED and (t.outcome != SKIPPED or t.compiled)]
    if left or file.error:
        file.plain, file.plain_error = run_file(path, name, None, None if file.error else left, options)
        for test in file.plain:
            file.towers.setdefault(test, Test(ENDED, file.error))
    file.seconds = time.monotonic() - start
    return file


def read(told: dict[str, Any]) -> File:
    """Return a file as `--json` has written it."""
    runs = {run: {name: Test(**test) for name, test in told[run].items()} for run in ("towers", "plain")}
    return File(**{**told, **runs})


def find_files(folders: Sequence[str]) -> list[tuple[pathlib.Path, str]]:
    """Return the files of tests, each with its name. A folder of Keras', or a path that exists.

    Raises:
        SystemExit: there is no such folder.
    """
    keras = importlib.util.find_spec("keras")  # not imported: TensorFlow takes seconds
    if keras is None or keras.origin is None:
        sys.exit("Expected an environment with Keras. Received: none here")
    source = pathlib.Path(keras.origin).parent / "src"
    found = []
    for given in folders:
        folder = source / given if (source / given).exists() else pathlib.Path(given).resolve()
        base = source if source in folder.parents else folder.parent
        if not folder.exists():
            sys.exit(f"Expected a folder of Keras' tests, such as {', '.join(FOLDERS)}. Received: {given}")
        files = sorted(folder.rglob("*_test.py")) if folder.is_dir() else [folder]
        found += [(file, file.relative_to(base).as_posix()) for file in files]
    return [*dict(found).items()]


def reason_for(name: str, known: Mapping[str, str]) -> str | None:
    """Return the pattern of `known` that a test's name matches."""
    return next((pattern for pattern in known if fnmatch.fnmatch(name, pattern)), None)


def summarize(files: Sequence[File], left_out: int, known: Mapping[str, str]) -> tuple[str, bool]:
    """Return what was found, as text, and whether it is as it should be.

    Args:
        files: what was run.
        left_out: how many files compile no model.
        known: see `KNOWN`.
    """
    tests = {name: test for file in files for name, test in file.towers.items()}
    counts = collections.Counter(test.outcome for test in tests.values())
    failed, attached = counts[FAILED] + counts[ENDED], sum(test.attached > 0 for test in tests.values())
    calls = [test.trained for test in tests.values() if test.trained]
    lines = [
        f"{len(files)} files ran, {left_out} compile no model and did not",
        f"{len(tests)} tests on towers: {counts[PASSED]} passed, {counts[SKIPPED]} skipped, {failed} failed",
        f"{attached} put a model on towers, {len(calls)} trained one there, by {sum(calls)} calls of a step",
    ]
    differing = {name: message for file in files for name, message in file.differing().items()}
    new = {name: message for name, message in differing.items() if reason_for(name, known) is None}
    good = not new
    expected = collections.Counter(filter(None, (reason_for(name, known) for name in differing)))
    n_known = len(differing) - len(new)
    lines.append(f"pass plainly and fail on towers: {len(differing)}, of these known: {n_known}")
    lines += [f"  known ({n}) {pattern}: {known[pattern]}" for pattern, n in expected.items()]
    lines += [f"  {name}: {message}" for name, message in new.items()]
    for pattern in known:
        outcomes = {test.outcome for name, test in tests.items() if fnmatch.fnmatch(name, pattern)}
        if outcomes == {PASSED}:
            lines.append(f"known, but passes on towers as well: {pattern}")
            good = False
    unusable = [(file.name, file.plain_error) for file in files if file.plain_error]
    for file in files:
        plain = [(name, test) for name, test in file.plain.items() if test.outcome != PASSED]
        unusable += [(name, f"{test.outcome}: {test.message}") for name, test in plain]
    if unusable:
        lines.append(f"do not pass plainly here either: {len(unusable)}")
    lines += [f"  {name}: {message}" for name, message in unusable]
    return "\n".join(lines), good


def main(arguments: Sequence[str] | None = None, known: Mapping[str, str] = KNOWN) -> int:
    """Run the script; return its exit code.

    Args:
        arguments: of the command line; None: this process' own.
        known: see `KNOWN`.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"of {', '.join(FOLDERS)}; or a path")
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="how many files at a time")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all outcomes")
    parser.add_argument("--limit", type=float, default=TEST_LIMIT_S, help="seconds that a test may take")
    parser.add_argument("-k", dest="words", help="as pytest's")
    options = parser.parse_args(arguments)
    found = find_files(options.folders or FOLDERS)
    chosen = [(path, name) for path, name in found if COMPILES.search(path.read_text(encoding="utf-8"))]
    files = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        started = [pool.submit(compare, path, name, options) for path, name in chosen]
        for done in concurrent.futures.as_completed(started):
            file = done.result()
            files.append(file)
            n_tests, n_differ = len(file.towers), len(file.differing())
            n_trained = sum(test.trained > 0 for test in file.towers.values())
            print(
                f"[{len(files)}/{len(chosen)}] {file.name}: {n_tests} tests, {n_trained} train on towers, "
                f"{n_differ} differ, {file.seconds:.0f} s",
                flush=True,
            )
            if options.json:
                told = sorted(map(dataclasses.asdict, files), key=lambda one: one["name"])
                options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    files.sort(key=lambda file: file.name)
    text, good = summarize(files, len(found) - len(chosen), known)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
