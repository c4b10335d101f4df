"""Hold the starts of a supervised script, as lines of JSON and as text."""

import dataclasses
import datetime
import json
import signal
from collections.abc import Sequence
from typing import Any

# Signals that request an end. A process that another signal ends has died.
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)
_SHOWN = 5  # lines of a log in the text


@dataclasses.dataclass(frozen=True)
class Start:
    """Describe a start of the script, and how it ended.

    Attributes:
        number: from 1.
        began: when.
        seconds: how long it ran.
        gpus: the UUIDs of the GPUs that it was given; () if CUDA has none.
        code: its exit code; None if a signal ended it.
        signal: that signal, or None.
        error: the exception that ended it; "" if none did, or if it is not known.
        device: whether the exception is a GPU's error, or a hang's time limit.
        progress: its reported positions, by name; for `BackupAndRestore` epoch and samples, by its folder.
        moved_on: whether a position is further than in all starts before.
        log: its last lines of output.
    """

    number: int
    began: datetime.datetime
    seconds: float
    gpus: tuple[str, ...]
    code: int | None
    signal: int | None
    error: str
    device: bool
    progress: dict[str, tuple[int, ...]]
    moved_on: bool
    log: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Return a shell's exit code: of a signal, 128 and its number."""
        return 128 + self.signal if self.signal is not None else self.code or 0

    @property
    def died(self) -> bool:
        """Return whether to start it again: a signal or a GPU has ended it, without a request to end."""
        return self.device or (self.signal is not None and self.signal not in _REQUESTS)

    @property
    def signal_name(self) -> str:
        """Return the signal's name; "" if none has ended it."""
        if self.signal is None:
            return ""
        known = {one.value: one.name for one in signal.Signals}
        return known.get(self.signal, f"signal {self.signal}")  # real-time signals have no names

    @property
    def words(self) -> str:
        """Return how it ended."""
        if self.signal is not None:
            return f"killed by {self.signal_name}"
        why = "a GPU's error or a hang's time limit: " if self.device else ""
        return f"ended with exit code {self.code}" + (f" ({why}{self.error})" if self.error else "")


@dataclasses.dataclass(frozen=True)
class Step:
    """Hold a start, and the supervisor's decision after it.

    Attributes:
        start: of the script.
        left_out: by GPU, why the next start does not get it.
        then: the decision, in words.
    """

    start: Start
    left_out: dict[str, str]
    then: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        start = self.start
        return {
            "start": start.number,
            "began": start.began.isoformat(timespec="seconds"),
            "seconds": round(start.seconds, 1),
            "gpus": list(start.gpus),
            "exit_code": start.code,
            "signal": start.signal_name or None,
            "error": start.error or None,
            "device_error": start.device,
            "progress": {name: list(position) for name, position in start.progress.items()},
            "moved_on": start.moved_on,
            "log": list(start.log),
            "left_out": self.left_out,
            "then": self.then,
        }


def as_line(step: Step) -> str:
    """Return it as a line of JSON."""
    return json.dumps(step.as_dict(), ensure_ascii=False) + "\n"


def as_text(name: str, steps: Sequence[Step]) -> str:
    """Return all starts as text, with the last lines of each log."""
    lines = [f"{name}: {len(steps)} start{'s' * (len(steps) != 1)}"]
    for step in steps:
        start = step.start
        gpus = f", {len(start.gpus)} GPU{'s' * (len(start.gpus) != 1)}" if start.gpus else ""
        began = start.began.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        lines.append(f"  start {start.number}, {began}, {start.seconds:.1f} s{gpus}: {start.words}")
        if start.died:
            lines += (f"    | {line}" for line in start.log[-_SHOWN:])
        for what, position in start.progress.items():
            lines.append(f"    {what}: at {' '.join(map(str, position))}")
        if start.died and not start.moved_on:
            lines.append("    no progress")
        lines += (f"    {gpu} is left out: {why}" for gpu, why in step.left_out.items())
        lines.append(f"    {step.then}")
    return "\n".join(lines)
