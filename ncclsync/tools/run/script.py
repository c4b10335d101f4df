"""Run a script as Python itself would, and report to the supervisor by which error it ended.

`python -m ncclsync.tools.run.script ENDING PARENT script|module NAME ARGUMENTS...`: ENDING is the file to write, PARENT
the supervisor's process; this process ends when PARENT does.
"""

import ctypes
import json
import os
import pathlib
import re
import runpy
import signal
import sys
import types
import zipfile

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the supervisor passes them on

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# NCCL's names of errors of the program, not of a device.
_CALLED_WRONGLY = ("ncclInvalidArgument", "ncclInvalidUsage")

# TensorFlow's errors that are a GPU's if the message is CUDA's. Too little memory is an error of the script.
_UNEXPECTED = {"InternalError", "UnknownError", "AbortedError", "UnavailableError"}
_CUDA = re.compile(r"CUDA|\bcuda[A-Z]|\bcu(DNN|BLAS|FFT|SOLVER|SPARSE)|CU(DNN|BLAS)_|\bNCCL|GPU sync failed")
_MEMORY = re.compile(r"out[ _]of[ _]memory|OUT_OF_MEMORY", re.IGNORECASE)


def is_of_device(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, is a GPU's error or a hang's time limit.

    Such are a `NcclError`, of which `NcclTimeoutError` is one, unless NCCL was called wrongly; and a TensorFlow error
    with CUDA's message.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if _is_of_device(one):
            return True
        seen.add(id(one))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)  # as a traceback shows them
    return False


def _is_of_device(error: BaseException) -> bool:
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if "ncclsync.NcclError" in names:
        return getattr(error, "status_name", "") not in _CALLED_WRONGLY
    if names.isdisjoint(f"tensorflow.{name}" for name in _UNEXPECTED):
        return False
    return bool(_CUDA.search(str(error))) and not _MEMORY.search(str(error))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)


def _tell(ending: str, error: BaseException) -> None:
    found = {"error": f"{type(error).__name__}: {error}".rstrip(": "), "device": is_of_device(error)}
    draft = pathlib.Path(f"{ending}.draft")
    draft.write_text(json.dumps(found))
    draft.replace(ending)  # never half a file


def _run_file(name: str) -> None:
    """Run a script's file; a folder or an archive by its `__main__.py`."""
    path = os.path.abspath(name)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(name, run_name="__main__")
        return
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), module.__dict__)


def _trimmed(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of this module."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def main() -> None:
    """Run the script that the arguments name; end as it ends."""
    ending, parent, kind, *sys.argv = sys.argv[1:]
    _end_with(int(parent))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*FORWARDED, signal.SIGCHLD])
    try:
        if kind == "module":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
            _run_file(sys.argv[0])
    except SystemExit:
        raise
    except BaseException as error:
        hook, trace = sys.excepthook, _trimmed(error.__traceback__)
        # Python calls it after this function has raised, and then ends as usual.
        sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(trace), trace)
        _tell(ending, error)
        raise


if __name__ == "__main__":
    main()
