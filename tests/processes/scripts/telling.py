"""Let a program of several processes print what each of them comes to know."""

import time

from ncclsync.communicator.processes import find_process


def told(call):
    """Print what a call raises, and how long that took; return it."""
    process, began, error = find_process(), time.monotonic(), None
    try:
        call()
    except Exception as raised:  # printed and returned
        error = raised
    words = "nothing" if error is None else f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}"
    print(f"[{0 if process is None else process.rank}] {words}", flush=True)
    return error
