"""Report progress while a user waits."""

import sys


class Progress:
    """Write over one line on standard error; write new lines if that is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Report progress."""
        if self._terminal:
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
