"""Parse command-line arguments that several commands have."""

import argparse
from collections.abc import Callable
from typing import Any

from ncclsync.program.links import Link, parse_link


def at_least(least: int) -> Callable[[str], int]:
    """Return argparse's type of a whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, received {text!r}")
        return int(text)

    return number


def listed(parse: Callable[[str], Any]) -> Callable[[str], list]:
    """Return argparse's type of a list of distinct values, each parsed by `parse`; "none": an empty list."""

    def values(text: str) -> list:
        return [] if text == "none" else list(dict.fromkeys(parse(part) for part in text.split(",")))

    return values


def link(text: str) -> Link:
    """Parse a link, as argparse's type; see `parse_link`."""
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
