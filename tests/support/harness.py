"""Published programs, in small: how one is declared, run on one device and on towers, and compared.

A module of programs holds functions decorated by `program`. Each is written as a user would write it, without
a word of ncclsync, and returns `(build, run)`: what makes the model, and what trains it and returns all that
must be equal. `test_public_programs.py` runs every one of them.

Programs compute in float64, so that a wrong factor stands a thousand times above rounding.
"""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from parity import as_environment_says, assert_fails_by_xla, compiles_by_xla

import ncclsync

PROGRAMS: dict[str, "Program"] = {}

# What may be logged of a program that is equal to one device: that it is exact and slow, and what is not
# about numbers. Any other warning is a false alarm.
HARMLESS = re.compile(
    r"^Exact\b|\bexact, but\b|run an op on one thread|divides each op among all cores|Python ops for their collectives"
)

# By how many tolerances every trained variable moves: a factor on its gradient cannot pass for rounding.
SEEN = 1000


@dataclasses.dataclass(frozen=True)
class Program:
    """One program, and what is to become of it on towers.

    Attributes:
        name: of the function that makes it.
        make: returns `(build, run)`: `build()` makes the model or, of a loop, the `Loop`; `run(model)` trains
            it and returns all that must be equal, nested.
        source: where the program was published.
        outcome: "equal"; "warned": `pattern` must be found in a warning, then numbers may differ; "refused":
            in the error.
        pattern: a regular expression; empty if equal.
        towers: how many, one test for each.
        options: arguments of `nccl_parallel` or `Towers` beside `towers`.
        floatx: what Keras computes in.
        tolerance: of a difference, relative to the largest magnitude in an array.
        coupled: whether the loss compares samples with each other: the mean of the shards' losses is another.
        still: a regular expression for trained variables whose gradient is 0 by construction.
        extra: the library that the program needs beside the tests' own.
    """

    name: str
    make: Callable[[], tuple[Callable[[], Any], Callable[[Any], Any]]]
    source: str
    outcome: str = "equal"
    pattern: str = ""
    towers: tuple[int, ...] = (4,)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    floatx: str = "float64"
    tolerance: float = 1e-9
    coupled: bool = False
    still: str = ""
    extra: str = ""


def program(source: str, *, warned: str = "", refused: str = "", name: str = "", **fields: Any) -> Callable:
    """Declare a program; see `Program`.

    Args:
        source: its address.
        warned: a regular expression for the warning that must appear; the program's outcome is then "warned".
        refused: the same for the error.
        name: the default is the function's.
        fields: further fields of `Program`.
    """
    if not source.startswith("https://"):
        raise ValueError(f"Expected the address of the program's source. Received: {source!r}")

    def declare(make: Callable) -> Callable:
        outcome = "warned" if warned else "refused" if refused else "equal"
        made = Program(name or make.__name__, make, source, outcome, warned or refused, **fields)
        if made.name in PROGRAMS:
            raise ValueError(f"Expected programs of different names. Received: {made.name!r} twice")
        PROGRAMS[made.name] = made
        return make

    return declare


@dataclasses.dataclass
class Loop:
    """A step function for `Towers.run`, and what it trains.

    Attributes:
        step: takes a batch, returns what must be equal.
        models: whose variables must be equal, and those of their optimizers.
        optimizers: further ones.
        call: runs the step on a batch.
        run_eagerly: whether, on one device, it is not traced.
    """

    step: Callable[[Any], Any]
    models: tuple[keras.Model, ...] = ()
    optimizers: tuple[keras.optimizers.Optimizer, ...] = ()
    call: Callable[[Any], Any] | None = None
    run_eagerly: bool = False

    def __post_init__(self) -> None:
        traced = tf.function(self.step)
        self.call = lambda batch: (self.step if self.run_eagerly else traced)(batch)


def loop(batches: list) -> Callable[[Loop], Any]:
    """A `run` of a `Loop`: a step for each batch."""

    def run(made: Loop) -> Any:
        logs = [keras.tree.map_structure(np.asarray, made.call(batch)) for batch in batches]
        state = [model_state(model) for model in made.models]
        return {"logs": logs, "state": state, "optimizers": [state_of(each) for each in made.optimizers]}

    return run


def fit(x: Any, y: Any = None, *, predict: Any = None, evaluate: bool = False, **options: Any) -> Callable:
    """A `run`: `fit` in batches of 10 rows (3, 3, 2 and 2 on four towers), and what it leaves.

    Args:
        x, y: arrays, or a dataset that is batched.
        predict: rows to be predicted afterwards; None: nothing is predicted.
        evaluate: whether `x` and `y` are evaluated, too.
        options: further arguments of `fit`.
    """

    def run(model: keras.Model) -> Any:
        batched = {} if isinstance(x, tf.data.Dataset) else {"batch_size": 10}
        arguments = {**batched, "shuffle": False, "verbose": 0, **options}
        found = {"history": model.fit(x, y, **arguments).history, "state": model_state(model)}
        if evaluate:
            found["evaluated"] = model.evaluate(x, y, **batched, verbose=0, return_dict=True)
        if predict is not None:
            found["predicted"] = model.predict(predict, **batched, verbose=0)
        return found

    run.data = x, y
    return run


def first_losses(made: Program, shards: tuple[int, ...]) -> list[list[float]]:
    """Return what the history tells of the first batch, and of each shard of it, by the untrained model."""
    build, run = made.make()
    rows = sum(shards)
    ends = np.cumsum(shards)
    parts = [slice(0, rows), *(slice(end - count, end) for end, count in zip(ends, shards, strict=True))]
    losses = []
    for part in parts:
        keras.utils.set_random_seed(1)
        model = build()
        model.run_eagerly = True
        x, y = (
            None if one is None else keras.tree.map_structure(lambda array, part=part: array[part], one)
            for one in run.data
        )
        history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=0).history
        losses.append([history[name][0] for name in sorted(history)])
    return losses


def model_state(model: keras.Model) -> dict[str, Any]:
    """What a model holds: its weights, variables of TensorFlow's, and all of its optimizers."""
    found = {f"weight {i} {weight.path}": np.asarray(weight) for i, weight in enumerate(model.weights)}
    for name, value in sorted(vars(model).items()):
        if isinstance(value, tf.Variable):
            found[f"variable {name}"] = value.numpy()
        if isinstance(value, keras.optimizers.Optimizer):
            found[f"optimizer {name}"] = state_of(value)
    return found


def state_of(optimizer: keras.optimizers.Optimizer) -> list[np.ndarray]:
    """Return what an optimizer holds."""
    return [np.asarray(variable) for variable in optimizer.variables]


@contextlib.contextmanager
def computing_in(floatx: str) -> Iterator[None]:
    """Let Keras compute in a dtype, as long as the context lasts."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Yield the list of what ncclsync warns of, as long as the context lasts."""
    messages: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("ncclsync"), Collecting(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@functools.cache
def on_one_device(name: str) -> Any:
    """Run a program plainly; return what it gives.

    Raises:
        AssertionError: it would hide a wrong factor: a trained variable hardly moves, or a loss is 0 or NaN.
    """
    return run_plainly(PROGRAMS[name], eagerly=True)


def run_plainly(made: Program, *, eagerly: bool) -> Any:
    """The same, without keeping the result; eagerly, since a trace takes longer than three steps."""
    with computing_in(made.floatx):
        build, run = made.make()
        keras.utils.set_random_seed(1)
        model = build()
        model.run_eagerly = eagerly
        trained = _trained(model)
        before = [np.asarray(weight) for weight in trained]
        found = run(model)
        # A model that is built by its first step has had no weights before: what it starts from is not known.
        for weight, old in zip(trained, before, strict=True):
            moved = np.max(np.abs(np.asarray(weight) - old), initial=0.0)
            # What XLA compiles draws other numbers than the run for which a program's size was chosen.
            least = (SEEN if eagerly else SEEN / 10) * made.tolerance * np.max(np.abs(old), initial=1e-3)
            if not (moved >= least or (made.still and re.search(made.still, weight.path))):
                raise AssertionError(f"{weight.path} has moved by {moved}, less than {least}")
    for path, value in keras.tree.flatten_with_path(found.get("history", {})):
        if not ((np.isfinite(value) and value != 0.0) or "acc" in str(path)):
            raise AssertionError(f"{path} is {value}")
    return found


def _trained(model: Any) -> list:
    models = model.models if isinstance(model, Loop) else (model,)
    return [weight for each in models for weight in each.trainable_weights]


def run_on_towers(made: Program, towers: int) -> tuple[Any, list[str]]:
    """Run a program on CPU towers; return what it gives, and what ncclsync has warned of."""
    with warnings_logged() as messages, computing_in(made.floatx):
        build, run = made.make()
        keras.utils.set_random_seed(1)
        options = as_environment_says(towers, made.options)
        model = _looped(build, towers, options) or ncclsync.nccl_parallel(towers=towers, **options)(build)()
        try:
            found = run(model)
            apart = model.towers.divergence()
        finally:
            model.towers.close()
        assert apart == 0.0, f"towers hold other weights than each other, by {apart}"
    return found, messages


def _looped(build: Callable, towers: int, options: Mapping[str, Any]) -> Any:
    """Build a `Loop` on towers; None if the program has a model to be fitted."""
    if not getattr(build, "is_loop", False):
        return None
    joined = ncclsync.Towers(towers, **options)
    made = build()
    made.call = functools.partial(joined.run, made.step)
    made.towers = joined
    return made


def a_loop(build: Callable) -> Callable:
    """Mark a `build` that makes a `Loop`."""
    build.is_loop = True
    return build


def check(made: Program, towers: int) -> None:
    """A program is on towers what was declared of it.

    Raises:
        AssertionError: it is not; the message tells what differs, or what was warned of for nothing.
    """
    if made.outcome == "refused":
        _check_refused(made, towers)
        return
    expected = on_one_device(made.name)
    try:
        actual, messages = run_on_towers(made, towers)
    except tf.errors.OpError as error:
        assert_fails_by_xla(error, lambda: run_plainly(made, eagerly=False))
        return
    if made.outcome == "warned":
        assert any(re.search(made.pattern, message) for message in messages), (
            f"Expected a warning of {made.pattern!r}. Received: {messages}"
        )
        return
    differing = [*differences(actual, expected, made.tolerance)]
    if differing:
        traced = run_plainly(made, eagerly=False)
        if compiles_by_xla():  # which draws other random numbers
            differing = [*differences(actual, traced, made.tolerance)]
    if differing:
        told = "; warned: " + " | ".join(messages) if messages else "; not a word"
        again = [*differences(traced, expected, made.tolerance / 10)]
        told += f"; traced, one device differs, too: {', '.join(again[:4])}" if again else "; one device repeats itself"
        raise AssertionError(f"{len(differing)} differ, first: {', '.join(differing[:4])}{told}")
    alarms = [message for message in messages if not HARMLESS.search(message)]
    assert not alarms, f"equal, but warned of (a false alarm): {alarms}"


def _check_refused(made: Program, towers: int) -> None:
    try:
        run_on_towers(made, towers)
    except Exception as error:  # of any type; its words are what counts
        assert re.search(made.pattern, str(error)), f"Expected an error like {made.pattern!r}. Received: {error}"
    else:
        raise AssertionError(f"Expected an error like {made.pattern!r}. Received: a program that runs")


def differences(actual: Any, expected: Any, tolerance: float) -> Iterator[str]:
    """Yield a line for each array that differs by more than `tolerance` of its largest magnitude."""
    paths = [" ".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(expected)]
    leaves, others = keras.tree.flatten(actual), keras.tree.flatten(expected)
    if len(leaves) != len(others):
        yield f"{len(leaves)} arrays for {len(others)}"
        return
    for path, one, other in zip(paths, leaves, others, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape:
            yield f"{path}: shape {one.shape} for {other.shape}"
        elif other.dtype.kind in "OSU":
            if not np.array_equal(one, other):
                yield f"{path}: {one} for {other}"
        else:
            one, other = one.astype(np.float64), other.astype(np.float64)
            largest = np.max(np.abs(other), initial=0.0)
            off = np.abs(one - other)
            worst = np.max(off, initial=0.0) if np.all(np.isfinite(off)) else np.nan
            if not worst <= tolerance * max(largest, 1e-3):
                yield f"{path}: off by {worst:.2g} of {largest:.2g}"
