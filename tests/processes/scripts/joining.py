"""Join two processes, or fail to, in the way that the argument names; print what each process comes to know."""

import os
import sys
import time

import ncclsync

WAY = sys.argv[1]
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
LAST = int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1 == RANK


def told(call):
    """Print what a call raises, and how long that took."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        print(f"[{RANK}] {type(error).__name__} after {time.monotonic() - began:.0f} s: {error}", flush=True)
        return
    print(f"[{RANK}] nothing", flush=True)


if WAY == "secrets":
    os.environ["NCCLSYNC_SECRET"] = f"the secret of process {RANK}"
    told(lambda: ncclsync.Towers(1, timeout_s=20))
