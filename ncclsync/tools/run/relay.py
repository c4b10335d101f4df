"""Pass on what a script prints, as it is, and keep the last of it."""

import contextlib
import fcntl
import os
import re
import select
import termios
import threading
import tty

LINES = 20  # the last ones, which are kept
_KEPT_BYTES = 1 << 14
_SLICE_S = 0.2
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x08")  # and what moves a terminal's cursor


class Relay:
    """Pass what a process writes to stdout and stderr on to those of this process.

    Where one is a terminal the process has a terminal too, so that a progress bar stays one; where both are the same
    file they are one for the process too, so that lines stay in their order.

    Attributes:
        streams: what the process is to be given as stdout and stderr; None: closed here too.
    """

    def __init__(self) -> None:
        """Open what the process writes to."""
        self._begun: dict[tuple[int, int], int] = {}  # the end that the process gets, by the file
        self._copies: list[_Copy] = []
        self.streams = [self._open(descriptor) for descriptor in (1, 2)]

    def _open(self, descriptor: int) -> int | None:
        try:
            status = os.fstat(descriptor)
        except OSError:
            return None
        file = status.st_dev, status.st_ino
        if file not in self._begun:
            source, self._begun[file] = _terminal(descriptor) if os.isatty(descriptor) else os.pipe()
            self._copies.append(_Copy(source, descriptor))
        return self._begun[file]

    def started(self) -> None:
        """Begin, when the process has been given its streams."""
        for end in self._begun.values():
            os.close(end)
        for copy in self._copies:
            copy.start()

    def ended(self) -> list[str]:
        """Pass on the rest, when the process has ended; return the last lines."""
        for copy in self._copies:
            copy.end()
        lines = [
            line for copy in self._copies for line in _COLOURS.sub("", copy.tail.decode(errors="replace")).splitlines()
        ]
        return [line.rstrip() for line in lines if line.strip()][-LINES:]


class _Copy(threading.Thread):
    """Copy what can be read here to there."""

    def __init__(self, source: int, to: int) -> None:
        super().__init__(name="ncclsync run: output", daemon=True)
        self._source, self._to = source, to
        self._is_over = threading.Event()
        self.tail = b""

    def run(self) -> None:
        while True:
            if not select.select([self._source], [], [], _SLICE_S)[0]:
                if self._is_over.is_set():  # though a process that it has started may write more
                    break
                continue
            try:
                found = os.read(self._source, 1 << 16)
                if not found:
                    break
                self.tail = (self.tail + found)[-_KEPT_BYTES:]
                _write(self._to, found)
            except OSError:  # a terminal's end; or nobody reads any more, as the script now finds, too
                break
        os.close(self._source)

    def end(self) -> None:
        self._is_over.set()
        self.join()


def _write(to: int, found: bytes) -> None:
    while found:
        try:
            found = found[os.write(to, found) :]
        except BlockingIOError:
            select.select([], [to], [])


def _terminal(like: int) -> tuple[int, int]:
    """Return both ends of a terminal of the same size, which changes nothing that is written to it."""
    source, end = os.openpty()
    tty.setraw(end)
    with contextlib.suppress(OSError):
        fcntl.ioctl(end, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return source, end
