"""Report to a supervisor how far training has come; see `python -m ncclsync run`.

`NCCLSYNC_PROGRESS` names a file. After storing a state to resume from, a program appends a line: a position, which is a
list of numbers compared from the first on, and a name.
"""

import logging
import os
import pathlib
import re

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_PROGRESS"

_LINE = re.compile(r"^(\d+(?: \d+)*)(?: (.*))?\n", re.MULTILINE)


def report(name: str, *position: int) -> None:
    """Append a position, such as epoch and samples, of a state stored under that name, if there is a supervisor."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{' '.join(map(str, position))} {name}\n")
    except OSError as error:  # a supervisor that is gone is no reason to stop
        logger.warning(
            "%s was not reported to the supervisor, which may take the run for one without progress: %s", name, error
        )


def read(path: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Return the furthest position of each name.

    Lines of another form are skipped, and so is an incomplete last line, whose writer was killed.
    """
    furthest: dict[str, tuple[int, ...]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for numbers, name in _LINE.findall(text):
        furthest[name] = max(furthest.get(name, ()), tuple(map(int, numbers.split(" "))))
    return furthest
