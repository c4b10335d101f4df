"""Report to a supervisor how far training has come; see `python -m ncclsync run`.

`NCCLSYNC_PROGRESS` names a file. Whoever has stored a state to go on from appends a line: a position, which is numbers
of which the first that differ count, and the name of what has come so far.
"""

import logging
import os
import pathlib

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_PROGRESS"


def report(name: str, *position: int) -> None:
    """Append a position. Do nothing where no supervisor asks.

    Args:
        name: of what has come so far, such as a backup's folder.
        position: how far: such as epoch and samples.
    """
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
    """Return the furthest position of each name; nothing if nobody has reported any.

    Lines of another form are passed over, and so is a last line without an end: its writer was killed.
    """
    furthest: dict[str, tuple[int, ...]] = {}
    if not path.exists():
        return furthest
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        words = line.rstrip("\n").split(" ")
        count = next((i for i, word in enumerate(words) if not word.isdecimal()), len(words))
        name = " ".join(words[count:])
        if count and line.endswith("\n"):
            furthest[name] = max(furthest.get(name, ()), tuple(map(int, words[:count])))
    return furthest
