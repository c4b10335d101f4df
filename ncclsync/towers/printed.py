"""Print what rich lays out: on a terminal to its width, in colour; elsewhere as plain text."""

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 110  # columns of plain text


class Printed:
    """Print as `__rich__` lays out, in `columns`; also in a notebook, and by a failed `assert`."""

    columns = _WIDTH

    def __str__(self) -> str:
        return plain_text(self, self.columns)

    __repr__ = __str__


def plain_text(shown: Any, width: int = _WIDTH) -> str:
    """Return what rich lays out as plain text, without spaces at the ends of lines."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(shown: Any, width: int = _WIDTH) -> None:
    """Print what rich lays out; where standard output is no terminal, in `width` columns."""
    console = Console(width=None if sys.stdout.isatty() else width)
    if console.is_terminal:  # or colours are forced
        console.print(shown)
    else:
        print(plain_text(shown, width))


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: int | None = None, **about: Any) -> Table:
    """Return a table of texts, whose first column is not broken; `numbers` is the place of one, `about` is rich's."""
    made = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, **about)
    for place, head in enumerate(heads):
        made.add_column(head, justify="right" if place == numbers else "left", overflow="fold", no_wrap=place == 0)
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made
