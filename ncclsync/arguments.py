"""Types of command-line arguments that several commands have."""

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return argparse's type of a whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, received {text!r}")
        return int(text)

    return number
