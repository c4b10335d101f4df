"""Describe and parse the command-line arguments of several commands."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from ncclsync.costs.links import Link, parse_link

Option = tuple[str, dict[str, Any]]  # of argparse's


def option(name: str, meaning: str = "", **about: Any) -> Option:
    """Return an option for `add_options`; its help ends with its default, if it has one."""
    default = "default %(default)s" if "default" in about else ""
    return name, {"help": "; ".join(filter(None, (meaning, default))), **about}


def number(name: str, least: int, default: int | None, meaning: str = "") -> Option:
    """Return an option that is a whole number of at least `least`; see `option`."""
    given = {} if default is None else {"default": default}
    return option(name, meaning, type=at_least(least), metavar="N", **given)


def switch(name: str, meaning: str) -> Option:
    """Return an option without a value, False by default."""
    return name, {"action": "store_true", "help": meaning}


def file(name: str, meaning: str, metavar: str = "FILE") -> Option:
    """Return an option that is a file's path, None by default."""
    return name, {"type": pathlib.Path, "metavar": metavar, "help": meaning}


def add_options(parser: Any, *options: Option) -> None:
    """Add options to a parser."""
    for name, about in options:
        parser.add_argument(name, **about)


def at_least(least: int) -> Callable[[str], int]:
    """Return argparse's type of a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, received {text!r}")
        return int(text)

    return parse


def listed(parse: Callable[[str], Any], *, or_none: bool = False) -> Callable[[str], list]:
    """Return argparse's type of a list of distinct values by `parse`; if `or_none`, "none" is an empty list."""
    return lambda text: [] if or_none and text == "none" else list(dict.fromkeys(map(parse, text.split(","))))


def link(text: str) -> Link:
    """Parse a link, as argparse's type; see `parse_link`."""
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
