"""Print what rich lays out: on a terminal in colour; elsewhere as plain text, whose tables are as wide as they need."""

import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import rich.box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.protocol import rich_cast
from rich.table import Table
from rich.text import Text

_WIDTH = 110  # columns of sentences in plain text
_WIDEST = 10_000  # columns that a table may take there, which nobody would see cut
_CELL = 60  # columns after which a cell's text goes on in another line, at a space


class Printed:
    """Print as `__rich__` lays out; also in a notebook, and by a failed `assert`."""

    def __str__(self) -> str:
        return plain_text(self)

    __repr__ = __str__


def plain_text(shown: Any) -> str:
    """Return what rich lays out as plain text, without spaces at the ends of lines."""
    lines = []
    for part in _parts(shown):
        console = Console(width=_width(part), color_system=None, force_jupyter=False, force_terminal=False)
        with console.capture() as captured:
            console.print(part)
        lines += captured.get().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def show(shown: Any) -> None:
    """Print what rich lays out; numbers are not cut, even where a terminal is too narrow for them."""
    if not Console().is_terminal:
        return print(plain_text(shown))
    for part in _parts(shown):  # a terminal, or colours are forced
        Console(width=None if sys.stdout.isatty() else _width(part)).print(part, crop=False)


def _parts(shown: Any) -> Sequence[Any]:
    shown = rich_cast(shown)
    return shown.renderables if isinstance(shown, Group) else [shown]


def _width(part: Any) -> int:
    return _WIDEST if isinstance(part, Table) else _WIDTH


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Collection[int] = (), **about: Any) -> Table:
    """Return a table of texts, whose first column is not broken, nor those of numbers, by place; `about` is rich's."""
    made = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, **about)
    cells = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    for place, head in enumerate(heads):
        whole, justify = place == 0 or place in numbers, "right" if place in numbers else "left"
        for row in () if whole else cells:
            row[place].plain = textwrap.fill(row[place].plain, _CELL, break_long_words=False, break_on_hyphens=False)
        texts = [head, *(row[place].plain for row in cells if whole)]
        least = max(cell_len(line) for text in texts for line in text.split("\n"))
        made.add_column(head, justify=justify, overflow="fold", no_wrap=whole, min_width=least)  # type: ignore[arg-type]
    for row in cells:
        made.add_row(*row)
    return made
