"""Start a script, start it again when its process has died without its own fault, and report its starts.

This module imports no TensorFlow. Of the script it knows the exit code, the output, and two files: of its progress
(`training/progress.py`) and of the exception that ended it (`script.py`).
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ncclsync.tools.doctor.health import check_gpus, find_gpus
from ncclsync.tools.run.relay import Relay
from ncclsync.tools.run.script import FORWARDED
from ncclsync.training import progress

NAME = "ncclsync run"

_T = TypeVar("_T")

_TIMEOUT_S = 60.0  # of a question about GPUs, as in doctor
_END_S = 5.0  # to wait for a killed process, which may hang in the kernel
_SLICE_S = 0.5
_ONE_REQUEST_S = 0.5  # within this time a second signal is the first: to a process group, and passed on
_GRACE_S = 30.0  # for a process to end after a GPU's error: it may wait for that GPU
_SI_KERNEL = 128  # si_code of a signal by the terminal's keys, which the script gets, too
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Signals that request an end. A process that is ended by another signal has died.
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)
_SHOWN = 5  # lines of a log in the text


@dataclasses.dataclass(frozen=True)
class Start:
    """Describe a start of the script, how it ended, and the supervisor's decision after it."""

    start: int  # its number, from 1
    began: datetime.datetime  # when
    seconds: float  # how long it ran
    gpus: tuple[str, ...]  # the UUIDs of the GPUs that it was given; () if CUDA has none
    code: int  # its exit code, or -N if signal N ended it
    error: str | None  # the exception that ended it; None if none did, or if it is not known
    device_error: bool  # whether the exception is a GPU's error, or a hang's time limit
    # Its reported positions, by name; of a `BackupAndRestore` epoch and samples, by its folder
    progress: dict[str, tuple[int, ...]]
    moved_on: bool  # whether a position is further than in all starts before
    log: tuple[str, ...]  # its last lines of output
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # by GPU, why the next start does not get it
    then: str = ""  # the decision, in words

    @property
    def shell_code(self) -> int:
        """Return a shell's exit code: of a signal, 128 and its number."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def died(self) -> bool:
        """Return whether a GPU's error, or a signal that is no request to end, has ended it."""
        return self.device_error or (self.code < 0 and -self.code not in _REQUESTS)

    @property
    def signal(self) -> str | None:
        """Return the name of the signal that ended it; None if none did."""
        known = {one.value: one.name for one in signal.Signals}
        return None if self.code >= 0 else known.get(-self.code, f"signal {-self.code}")  # not all have names

    @property
    def words(self) -> str:
        """Return how it ended."""
        if self.signal:
            return f"killed by {self.signal}"
        why = "a GPU's error or a hang's time limit: " if self.device_error else ""
        return f"ended with exit code {self.code}" + (f" ({why}{self.error})" if self.error else "")


def as_line(start: Start) -> str:
    """Return it as a line of JSON."""
    fields = dataclasses.asdict(start) | {"signal": start.signal, "seconds": round(start.seconds, 1)}
    code = fields.pop("code")
    fields["exit_code"] = None if start.signal else code
    fields |= {"began": start.began.isoformat(timespec="seconds")}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def as_text(name: str, starts: Sequence[Start]) -> str:
    """Return all starts as text, with the last lines of each log."""
    lines = [f"{name}: {len(starts)} start{'s' * (len(starts) != 1)}"]
    for one in starts:
        gpus = f", {len(one.gpus)} GPU{'s' * (len(one.gpus) != 1)}" if one.gpus else ""
        began = one.began.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        lines.append(f"  start {one.start}, {began}, {one.seconds:.1f} s{gpus}: {one.words}")
        if one.died:
            lines += (f"    | {line}" for line in one.log[-_SHOWN:])
        for what, position in one.progress.items():
            lines.append(f"    {what}: at {' '.join(map(str, position))}")
        if one.died and not one.moved_on:
            lines.append("    no progress")
        lines += (f"    {gpu} is left out: {why}" for gpu, why in one.left_out.items())
        lines.append(f"    {one.then}")
    return "\n".join(lines)


def supervise(given: argparse.Namespace, signals: "Signals") -> int:
    """Run the command line's script until it ends, or dies and is not started again; return its exit code.

    After a signal that is 128 and its number. All starts are reported, unless the first one ends well. `signals` must
    be entered before the import of libraries that start threads.
    """
    # Become the parent of processes that the script leaves behind, such as workers that read data.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="ncclsync-run-") as folder:
        supervisor = _Supervisor(given, pathlib.Path(folder), signals)
        code = supervisor.run()
    if code or len(supervisor.starts) > 1:
        _say(as_text(given.script, supervisor.starts))
    return code


class _Supervisor:
    """Hold the state of a call of `supervise`."""

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path, signals: "Signals") -> None:
        self.starts: list[Start] = []
        self._given, self._signals = given, signals
        self._positions, self._ending = folder / "progress", folder / "ending"
        self._environ = {**os.environ, progress.VARIABLE: str(self._positions)}
        self._asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._vain = 0  # the last restarts, without progress

    def run(self) -> int:
        """Start the script until it is not to be started again; return its exit code."""
        gpus = self._unless_asked(lambda: find_gpus(_TIMEOUT_S, self._environ)) or ()
        while self._asked is None:
            start = self._start(gpus)
            left_out, then, again = self._judge(start)
            self._add(dataclasses.replace(start, left_out=left_out, then=then))
            if not again:
                return start.shell_code
            _say(f"start {start.start} {start.words}; {then}")
            gpus = tuple(gpu for gpu in gpus if gpu not in left_out)
            if gpus:  # by UUID: when a GPU is lost, another gets its number
                self._environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # A request to end came while nothing ran.
        return self.starts[-1].shell_code if self.starts else 128 + self._asked

    def _add(self, start: Start) -> None:
        """Enter a start into the report."""
        self.starts.append(start)
        if self._given.report is not None:
            try:
                with self._given.report.open("a", encoding="utf-8") as file:
                    file.write(as_line(start))
            except OSError as error:  # such as a full disk; go on
                _say(f"the report is not written: {error}")

    def _judge(self, start: Start) -> tuple[dict[str, str], str, bool]:
        """Return the GPUs to leave out and why, the decision in words, and whether to start the script again."""
        if self._asked is not None:
            return {}, f"not started again: {self._asked.name} was received", False
        if start.shell_code == 0:
            return {}, "done", False
        if not start.died:
            own = "this signal is a request to end" if start.signal else "this is the script's own error or exit code"
            return {}, f"not started again: {own}", False
        self._vain = 0 if start.moved_on or not self.starts else self._vain + 1
        if self._vain >= self._given.restarts:
            return {}, f"given up: {self._vain} restarts in a row without progress", False
        _end_left_behind(self._children)
        left_out = self._unless_asked(
            lambda: check_gpus(start.gpus, _TIMEOUT_S, self._environ, lambda: self._asked is None)
        )
        if left_out is None:
            return {}, "not started again: a signal was received meanwhile", False
        count = len(start.gpus) - len(left_out)
        if start.gpus and not count:
            return left_out, "given up: no GPU is healthy", False
        where = f" on {count} of {len(start.gpus)} GPUs" if left_out else ""
        vain = f"; restarts without progress so far: {self._vain} of {self._given.restarts}" if self._vain else ""
        return left_out, f"started again{where}{vain}", True

    def _start(self, gpus: tuple[str, ...]) -> Start:
        """Run the script once."""
        self._ending.unlink(missing_ok=True)
        before = progress.read(self._positions)
        self._children = _children()
        began, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
        relay = Relay()
        kind = "module" if self._given.module else "script"
        arguments = [str(self._ending), str(os.getpid()), kind, self._given.script, *self._given.arguments]
        process = subprocess.Popen(
            [sys.executable, *_interpreter_options(), "-m", "ncclsync.tools.run.script", *arguments],
            env=self._environ,
            stdout=relay.streams[0],
            stderr=relay.streams[1],
        )
        relay.started()
        self._wait(process)
        log = relay.ended()
        after, ending = progress.read(self._positions), self._told()
        return Start(
            start=len(self.starts) + 1,
            began=began,
            seconds=time.monotonic() - clock,
            gpus=gpus,
            code=process.returncode,
            error=ending["error"],
            device_error=ending["device"],
            progress=after,
            moved_on=after != before,
            log=tuple(log),
        )

    def _told(self) -> dict[str, Any]:
        """Return what the script has told of the exception that ends it."""
        return json.loads(self._ending.read_text()) if self._ending.exists() else {"error": None, "device": False}

    def _wait(self, process: subprocess.Popen) -> None:
        """Wait for the script, and pass the first signal on to it; the second signal kills it."""
        is_killed, until = False, 0.0
        while process.poll() is None:
            received, by_keys = self._signals.wait(_SLICE_S)
            if received == signal.SIGCHLD:
                _reap(_children() - self._children - {process.pid})
            elif received is not None:
                if self._asked is None:
                    self._asked, self._asked_at = received, time.monotonic()
                    if not by_keys:
                        process.send_signal(received)
                elif time.monotonic() > self._asked_at + _ONE_REQUEST_S:
                    process.kill()
            if not until and self._told()["device"]:
                until = time.monotonic() + _GRACE_S
            if until and time.monotonic() > until and not is_killed:
                is_killed = True
                _say(f"the script has raised a GPU's error, and not ended within {_GRACE_S:g} s: it is killed")
                process.kill()

    def _unless_asked(self, question: Callable[[], _T]) -> _T | None:
        """Return the answer to a slow question; None if a signal asks to end before."""
        before = _children()
        answer = concurrent.futures.ThreadPoolExecutor(1, NAME).submit(question)
        while not answer.done():
            received, _ = self._signals.wait(0.05)
            if received not in (None, signal.SIGCHLD):
                self._asked = received
                until = time.monotonic() + _END_S
                while not answer.done() and time.monotonic() < until:
                    _end_left_behind(before)
                return None
        return answer.result()


def _interpreter_options() -> list[str]:
    """Return the options of Python itself before `-m ncclsync run`, such as -u."""
    count = len(sys.argv) - 1
    begin = sys.orig_argv[: len(sys.orig_argv) - count]
    return begin[1:-2] if begin[-2:] == ["-m", "ncclsync"] else []


class Signals:
    """Wait for signals, and so learn who sent them; ignored signals stay ignored.

    They are blocked. They have handlers, too, since a thread that began before may still get them.
    """

    def __enter__(self) -> "Signals":
        """Begin, in the main thread."""
        self._taken: list[signal.Signals] = []
        heeded = [one for one in FORWARDED if signal.getsignal(one) != signal.SIG_IGN]
        self._awaited = [*heeded, signal.SIGCHLD]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._awaited)
        self._handlers = {one: signal.signal(one, self._take) for one in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers and mask."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for one, handler in self._handlers.items():
            signal.signal(one, handler)

    def _take(self, number: int, _: object) -> None:
        self._taken.append(signal.Signals(number))

    def wait(self, seconds: float) -> tuple[signal.Signals | None, bool]:
        """Return the next signal, or None if none comes in `seconds`, and whether a terminal's keys have sent it."""
        received = signal.sigtimedwait(self._awaited, 0 if self._taken else seconds)
        if self._taken and (received is None or received.si_signo == signal.SIGCHLD):
            return self._taken.pop(0), False
        if received is None:
            return None, False
        return signal.Signals(received.si_signo), received.si_code == _SI_KERNEL


def _children() -> set[int]:
    """Return the child processes of this process."""
    found = set()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def _end_left_behind(before: set[int]) -> None:
    """Kill all children but these, and their children, which then become ours: they may hold GPU memory."""
    until = time.monotonic() + _END_S
    while (left := _children() - before) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(left)
        time.sleep(0.01)


def _reap(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        print(f"{NAME}: {words}", file=sys.stderr, flush=True)
