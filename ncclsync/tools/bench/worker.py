"""Serve a benchmark's driver: `python -m ncclsync.tools.bench.worker KIND ARGUMENTS`; see `turns.Side`."""

import importlib
import json
import sys
from typing import Any

from ncclsync.tools.bench.turns import Ranks, Requests


def main(kind: str, arguments: dict[str, Any]) -> None:
    """Serve until the driver closes standard input, or until an error, which it receives."""
    requests = Requests()
    try:
        module, _, name = kind.partition(".")
        work = getattr(importlib.import_module(f"ncclsync.tools.bench.{module}"), name)
        if not isinstance(work, type):
            work(requests, **arguments)
            requests.end()
        reducer = work(**arguments)
        asked = Ranks(requests) if name == "MpiReducer" else requests
        while True:
            asked.answer(**reducer.serve(asked.next()))
    except Exception as error:  # of any kind: the driver receives it, and raises it
        requests.fail(error)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
