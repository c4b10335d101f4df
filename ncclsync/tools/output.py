"""Print what rich lays out: on a terminal to its width, in colour; elsewhere as plain text."""

import io
from typing import Any

from rich.console import Console

_WIDTH = 110  # columns of plain text


def plain_text(shown: Any) -> str:
    """Return what rich lays out as plain text, without spaces at the ends of lines."""
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(shown: Any) -> None:
    """Print what rich lays out."""
    console = Console()
    if console.is_terminal:
        console.print(shown)
    else:
        print(plain_text(shown))
