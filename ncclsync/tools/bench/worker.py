"""Serve a benchmark's driver: `python -m ncclsync.tools.bench.worker KIND ARGUMENTS`; see `turns`."""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from ncclsync.tools.bench.turns import Requests

# Each kind of process runs a function of its requests, or a class whose `serve` answers each.
FUNCTIONS = {"fit": "fit.fit_in_turns", "start": "fit.first_step", "memory": "fit.peak_memory"}
REDUCERS = {
    "host": "reducers.HostReducer",
    "nccl": "reducers.NcclReducer",
    "tensorflow": "reducers.TensorFlowReducer",
    "mpi": "ranks.MpiReducer",
    "grpc": "ranks.GrpcReducer",
}


def main(kind: str, arguments: dict[str, Any]) -> None:
    """Serve until the driver closes standard input, or until an error, which it receives."""
    requests = Requests()
    try:
        if kind in FUNCTIONS:
            _find(FUNCTIONS[kind])(requests, **arguments)
            requests.end()
        reducer = _find(REDUCERS[kind])(**arguments)
        asked = _find("ranks.RankRequests")(requests) if kind == "mpi" else requests
        while True:
            asked.answer(**reducer.serve(asked.next()))
    except Exception as error:  # of any kind: the driver receives it, and raises it
        requests.fail(error)


def _find(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"ncclsync.tools.bench.{module}"), attribute)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
