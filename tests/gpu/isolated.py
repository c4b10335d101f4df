"""Runs a test's body in a process of its own, with a hard limit: NCCL can hang out of Python's reach.

Of a process that hangs, the stacks of all threads are in the failure; a process that cannot even be killed is
left alone.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping

LIMIT_S = 120.0
GRACE_S = 10.0

# What lets ranks share one GPU. Few channels each: where those of one rank leave no room for another's,
# all hang. No NVLS: such ranks do not have it, and NCCL 2.30 does not turn it off for each of their layouts.
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel that is loaded when first called waits for what runs in its context: for a rank that waits for another.
    "CUDA_MODULE_LOADING": "EAGER",
    "NCCL_DEBUG": "WARN",
}


def environment() -> dict[str, str]:
    """Return the variables of a process with several ranks on one GPU; those that are set already stay."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**SHARED_GPU, **os.environ, "PYTHONPATH": paths}


def run(function: Callable[..., None], *, limit_s: float = LIMIT_S, **arguments: object) -> str:
    """Call a function of a test module in a new process; return what it printed.

    Args:
        function: a function of a module's top level.
        limit_s: after so many seconds it has failed.
        arguments: of the function; JSON's types.

    Raises:
        AssertionError: it failed or did not end; with all that it printed, and its stacks.
    """
    __tracebackhide__ = True
    words = [function.__module__, function.__name__, json.dumps(arguments), str(limit_s)]
    call = f"{function.__name__}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
    return run_command(call, [sys.executable, __file__, *words], limit_s)


def run_command(
    what: str,
    command: list[object],
    limit_s: float,
    *,
    variables: Mapping[str, str] | None = None,
    folder: object = None,
    log: object = None,
) -> str:
    """Run a command, that ends by itself if it can; return what it printed.

    Args:
        what, command: for messages, and what to do.
        limit_s: it is killed some time after so many seconds.
        variables: the environment; by default that of ranks on one GPU.
        folder: where it runs, if not here.
        log: a file for what it prints, which is there from the beginning on.

    Raises:
        AssertionError: it failed, or has not ended soon after its limit. All its processes are then killed.
    """
    __tracebackhide__ = True
    # Not a pipe, which would be waited for while any child holds it.
    with tempfile.TemporaryFile("w+") if log is None else open(log, "w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=environment() if variables is None else variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            outcome = f"ended with {process.wait(limit_s + GRACE_S)}"
        except subprocess.TimeoutExpired:
            outcome = "did not end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        printed = output.read()
    if outcome != "ended with 0":
        raise AssertionError(f"Expected {what} to end with 0 within {limit_s:g} s. Received: it {outcome}\n{printed}")
    return printed


def limit(limit_s: float) -> None:
    """End this process after so many seconds, with the stacks of all threads."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)


def main(module: str, function: str, arguments: str, limit_s: str) -> None:
    """Be the process."""
    limit(float(limit_s))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    getattr(importlib.import_module(module), function)(**json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
