"""One row of the parity tests' tables in a process of its own; used by compare_parity.py.

What it owns: where the rows stand, the three ways to run one, the time limit, what makes batches even. No run
meets what an earlier one has left behind. (A failed fit under MirroredStrategy disturbs later ones.)
"""

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import inspect
import multiprocessing
import os
import pathlib
import re
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "parity"
PRELOADED = ["tensorflow", "keras", "pytest", "ncclsync.parallel"]
STARTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a case stands: `test_parity_<subject>.<table>[name]`."""

    subject: str
    table: str
    name: str

    @property
    def title(self):
        """Its name; with its table's, where a module has several."""
        return self.name if self.table == "CASES" else f"{self.table.lower()}/{self.name}"

    def case(self):
        """Load the test module; return the `Case`."""
        return getattr(load(f"test_parity_{self.subject}"), self.table)[self.name]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        kind: one of `KINDS`, or "result" while it has not been compared.
        detail: where the largest difference is, or the first line of the error.
        difference: the largest one, relative to the largest magnitude of its array.
        value: what the run returned, as NumPy arrays.
        calls_ops: whether the row called `ncclsync.ops` itself.
        uneven: whether the row had batches that the replicas cannot share evenly, and `even` would change.
    """

    kind: str
    detail: str = ""
    difference: float | None = None
    value: object = None
    calls_ops: bool = False
    uneven: bool = False


def load(name):
    """Import a module from the checkout's tests."""
    for folder in (str(ROOT / "tests" / "support"), str(TESTS)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(name)


def find_rows(only, patterns, everything=False):
    """Return the rows of the subjects in `only` (None: of all) with a title of these patterns, each once.

    Without patterns, every third of a table of more than 16, or `everything`.
    """
    subjects = sorted(file.stem.removeprefix("test_parity_") for file in TESTS.glob("test_parity_*.py"))
    if not subjects:
        raise SystemExit(f"Expected the tables in {TESTS}. Run this from a clone: its tests are not installed.")
    if unknown := set(only or ()) - set(subjects):
        raise SystemExit(f"Expected --only to name some of {subjects}. Received: {sorted(unknown)}")
    rows, seen = [], set()
    for subject in only or subjects:
        module = load(f"test_parity_{subject}")
        for table, cases in sorted(vars(module).items()):
            if not isinstance(cases, dict) or any(type(case).__name__ != "Case" for case in cases.values()):
                continue
            few = patterns is not None or everything or len(cases) <= 16
            names = list(cases)[:: 1 if few else 3]
            rows += [Row(subject, table, name) for name in names if id(cases[name]) not in seen]
            seen |= {id(case) for case in cases.values()}
    if patterns is None:
        return rows
    return [row for row in rows if any(fnmatch.fnmatch(row.title, pattern) for pattern in patterns)]


def work(connection, row, library, towers, **options):
    """Run a row with one library; send its `Outcome`."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    try:
        outcome = train(row, library, towers, **options)
    except BaseException as error:  # a test that pytest skips raises one
        kind = "not run" if type(error).__name__ == "Skipped" else "exception"
        outcome = Outcome(kind, f"{type(error).__name__}: {first_line(str(error))}".removesuffix(": "))
    connection.send(outcome)
    connection.close()
    os._exit(0)  # threads that a failed fit has left behind may never end


def train(row, library, towers, with_options=True, even=False):
    """Build and run the row's model; return its result."""
    import keras
    import numpy as np
    import tensorflow as tf

    from ncclsync import nccl_parallel

    if library == "MirroredStrategy":
        replicas = [tf.config.LogicalDeviceConfiguration()] * towers
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], replicas)
    calls = count_calls_of_ops()
    case = row.case()
    calls.clear()
    if library == "ncclsync":
        options = case.options if with_options else {}
        result = case.run(nccl_parallel(towers=towers, **options)(case.build)())
        return Outcome("result", value=keras.tree.map_structure(np.asarray, result))
    uneven = watch_batches(towers, even)
    scope = contextlib.nullcontext()
    if library == "MirroredStrategy":
        scope = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(towers)]).scope()
    with scope:
        result = keras.tree.map_structure(np.asarray, case.run(case.build()))
    return Outcome("result", value=result, calls_ops=bool(calls), uneven=bool(uneven))


def watch_batches(towers, even):
    """Note, in the list returned, each call of Keras with arrays whose batches towers cannot share evenly.

    With `even`, make them even: `batch_size` is rounded up to a multiple of the towers, and the last rows
    that fill no batch are left out.
    """
    import keras

    found = []

    def watched(method):
        signature = inspect.signature(method)

        @functools.wraps(method)
        def called(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            if changed := evened(towers, bound.arguments):
                found.append(method.__name__)
                bound.arguments.update(changed if even else {})
            return method(*bound.args, **bound.kwargs)

        return called

    for name in ("fit", "evaluate", "predict"):
        setattr(keras.Model, name, watched(getattr(keras.Model, name)))
    return found


def evened(towers, given):
    """Return which of Keras' arguments must change, and to what, for even batches; of arrays only."""
    if not are_arrays(given.get("x")):
        return {}
    size = given.get("batch_size") or 32
    even = -(-size // towers) * towers
    changed = {"batch_size": even} if even != size else {}
    names = [name for name in ("x", "y", "sample_weight") if given.get(name) is not None]
    changed |= dict(zip(names, first_rows([given[name] for name in names], even, towers), strict=False))
    validation = given.get("validation_data")
    if isinstance(validation, tuple) and are_arrays(validation[0]):
        cut = first_rows(validation, even, towers)
        changed |= {"validation_data": cut} if cut else {}
    return changed


def are_arrays(x):
    """Tell arrays, alone or nested, from a dataset or a generator."""
    import keras

    return all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in keras.tree.flatten(x))


def first_rows(arrays, size, towers):
    """Cut arrays to a whole number of batches of this size, or of shares where they fill no batch.

    Returns () where nothing is to be cut.
    """
    import keras

    rows = keras.tree.flatten(arrays[0])[0].shape[0]
    kept = rows // size * size or rows // towers * towers or rows
    if kept == rows:
        return ()
    return tuple(keras.tree.map_structure(lambda a: None if a is None else a[:kept], one) for one in arrays)


def count_calls_of_ops():
    """Let the functions of `ncclsync.ops` note their calls by test modules imported from now on."""
    from ncclsync import ops

    calls = []

    def noting(function):
        @functools.wraps(function)
        def noted(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return noted

    for name in ("all_reduce", "broadcast", "all_gather"):
        setattr(ops, name, noting(getattr(ops, name)))
    return calls


def first_line(message):
    """Return the line that says what happened, not where TensorFlow was."""
    message = re.sub(r"\x1b\[\d+m|\{\{.*?\}\}\s*", "", message)
    if inner := re.search(r"\(0\) \w+:\s+(.*)", message):
        return inner[1][:300]
    where = r"\s*$|\s|\[\[|Graph execution error|Detected at|File |<stack|\d+ root error|Exception encountered"
    return next((line[:300] for line in message.splitlines() if not re.match(where, line)), "")


def isolated(row, library, options, **how):
    """Run a row in a process of its own; return its `Outcome`, whatever becomes of the process."""
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(writer, row, library, options.towers), kwargs=how)
    with STARTING:
        process.start()
    writer.close()
    try:
        if not reader.poll(options.limit):
            return Outcome("exception", f"no end within {options.limit} s")
        return reader.recv()
    except EOFError:
        process.join()
        return Outcome("exception", f"the process died, exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
