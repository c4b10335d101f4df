"""Hold the starts of a supervised script, as lines of JSON and as text."""

import dataclasses
import datetime
import json
import signal
from collections.abc import Sequence

# Signals that request an end. A process that another signal ends has died.
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
    # Its reported positions, by name; for `BackupAndRestore` epoch and samples, by its folder
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
        """Return whether to start it again: a signal or a GPU has ended it, without a request to end."""
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
