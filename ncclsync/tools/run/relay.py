"""Pass a script's output on, unchanged, and keep the last lines."""

import contextlib
import fcntl
import os
import re
import select
import termios
import threading
import tty

LINES = 20  # kept
_KEPT_BYTES = 1 << 14
_SLICE_S = 0.2
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x08")  # and movements of the cursor


class Relay:
    """Pass a process' stdout and stderr on to those of this process.

    If a stream is a terminal, the process gets a terminal, too, so that a progress bar works; if both are the same
    file, the process gets one file, too, so that lines keep their order.

    Attributes:
        streams: the process' stdout and stderr; None: closed here too.
    """

    def __init__(self) -> None:
        """Open the process' streams."""
        self._begun: dict[tuple[int, int], int] = {}  # the process' end, by the file
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
        """Begin, after the process has been given its streams."""
        for end in self._begun.values():
            os.close(end)
        for copy in self._copies:
            copy.start()

    def ended(self) -> list[str]:
        """Pass on the rest, after the process has ended; return the last lines."""
        for copy in self._copies:
            copy.end()
        lines = [
            line for copy in self._copies for line in _COLOURS.sub("", copy.tail.decode(errors="replace")).splitlines()
        ]
        return [line.rstrip() for line in lines if line.strip()][-LINES:]


class _Copy(threading.Thread):
    """Copy from one descriptor to another."""

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
            except OSError:  # the terminal's end; or the reader is gone, which the script finds, too
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
    """Return both ends of a terminal of the same size, which passes output unchanged."""
    source, end = os.openpty()
    tty.setraw(end)
    with contextlib.suppress(OSError):
        fcntl.ioctl(end, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return source, end
