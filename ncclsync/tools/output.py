"""Print what rich lays out: on a terminal to its width, in colour; elsewhere as plain text."""

import io
import sys
from typing import Any

from rich.console import Console

_WIDTH = 110  # columns of plain text


def plain_text(shown: Any, width: int = _WIDTH) -> str:
    """Return what rich lays out as plain text, without spaces at the ends of lines."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(shown: Any, width: int = _WIDTH) -> None:
    """Print what rich lays out, in so many columns where it is no terminal."""
    console = Console(width=None if sys.stdout.isatty() else width)
    if console.is_terminal:  # or colours are forced
        console.print(shown)
    else:
        print(plain_text(shown, width))
