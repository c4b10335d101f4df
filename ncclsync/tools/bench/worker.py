"""Serve a benchmark's driver: `python -m ncclsync.tools.bench.worker KIND ARGUMENTS`; see `turns.Side`."""

import importlib
import json
import sys

from ncclsync.tools.bench.turns import Requests

if __name__ == "__main__":
    requests = Requests()
    try:
        module, _, name = sys.argv[1].partition(".")
        serve = getattr(importlib.import_module(f"ncclsync.tools.bench.{module}"), name)
        serve(requests, **json.loads(sys.argv[2]))
        requests.end()
    except Exception as error:  # of any kind: the driver receives it, and raises it
        requests.fail(error)
