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


class Relay(threading.Thread):
    """Pass a process' stdout and stderr on to those of this process.

    For a terminal the process gets a terminal, so that a progress bar works; if both streams are one file, the process
    gets one file, too, so that lines keep their order.
    """

    def __init__(self) -> None:
        super().__init__(name="ncclsync run: output", daemon=True)
        self._begun: dict[tuple[int, int], int] = {}  # by file: the end that the process writes to
        self._to: dict[int, int] = {}  # by the end that is read: this process' stream
        self._tails: dict[int, bytes] = {}  # likewise: the last output
        self._is_over = False
        # The process' stdout and stderr; None: this process' stream is closed.
        self.streams = [self._open(descriptor) for descriptor in (1, 2)]

    def _open(self, descriptor: int) -> int | None:
        try:
            status = os.fstat(descriptor)
        except OSError:
            return None
        file = status.st_dev, status.st_ino
        if file not in self._begun:
            source, self._begun[file] = _terminal(descriptor) if os.isatty(descriptor) else os.pipe()
            self._to[source], self._tails[source] = descriptor, b""
        return self._begun[file]

    def started(self) -> None:
        """Begin, after the process has been given its streams."""
        for end in self._begun.values():
            os.close(end)
        self.start()

    def ended(self) -> list[str]:
        """Pass on the rest, after the process has ended; return the last lines."""
        self._is_over = True
        self.join()
        texts = (_COLOURS.sub("", tail.decode(errors="replace")) for tail in self._tails.values())
        lines = (line.rstrip() for text in texts for line in text.splitlines())
        return [*filter(None, lines)][-LINES:]

    def run(self) -> None:
        """Pass on until the streams end, or the process has ended: its children may still hold the streams."""
        left = set(self._to)
        while left:
            ready = select.select([*left], [], [], _SLICE_S)[0]
            ended = {source for source in ready if not self._pass_on(source)}
            if not ready and self._is_over:
                ended = left
            for source in ended:
                os.close(source)
            left = left - ended

    def _pass_on(self, source: int) -> bool:
        """Pass on the available output; return whether there may be more."""
        try:
            found = os.read(source, 1 << 16)
            self._tails[source] = (self._tails[source] + found)[-_KEPT_BYTES:]
            more = bool(found)
            while found:
                try:
                    found = found[os.write(self._to[source], found) :]
                except BlockingIOError:
                    select.select([], [self._to[source]], [])
        except OSError:  # the terminal's end; or the reader is gone, which the script finds out, too
            return False
        return more


def _terminal(like: int) -> tuple[int, int]:
    """Return both ends of a terminal of the same size, which passes output unchanged."""
    source, end = os.openpty()
    tty.setraw(end)
    with contextlib.suppress(OSError):
        fcntl.ioctl(end, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return source, end
