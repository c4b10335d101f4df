"""Compile a few lines of C++ against the headers of the installed TensorFlow, when first needed, and keep them.

TensorFlow tells some things only in C++, by interfaces that may change. `gpu_streams.py` and `xla_programs.py` ask for
them so; each can do without.
"""

import ctypes
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ncclsync.errors import NcclSyncError

logger = logging.getLogger("ncclsync")

_FLAGS = ("-O1", "-w", "-shared", "-fPIC")
_LONGEST_S = 300

# What `load` may raise. RuntimeError: the user has no home; ValueError: it is not a path.
ERRORS = (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError)


def load(name: str, source: str, function: str) -> Any:
    """Return a function of the compiled source, the file `name` in the user's cache, as ctypes has it.

    If it does not load, as another machine's library, it is compiled again, once. Raises what is in `ERRORS` if it
    cannot be compiled, kept or loaded.
    """
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ncclsync"
    kept = {*folder.glob("*.so")}
    library = compiled(name, source, folder)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        library.unlink(missing_ok=True)
        if library not in kept:
            raise
        loaded = ctypes.CDLL(str(compiled(name, source, folder)))
    return getattr(loaded, function)


def compiled(name: str, source: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the library, for the installed TensorFlow; compile it unless the folder has it. Raises as `load`."""
    flags = [*_FLAGS, *tf.sysconfig.get_compile_flags()]
    built = [tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, platform.machine()]
    key = hashlib.sha256("\n".join([*built, source, *flags]).encode()).hexdigest()[:16]
    made = folder / f"{name}-{key}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in filter(pathlib.Path.exists, (folder, made)):
        if path.stat().st_uid not in (os.getuid(), 0):
            raise PermissionError(f"{path} is another user's")
    if made.exists():
        return made
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (c++ or g++) on the PATH")
    logger.info("Compiling %s, a function of TensorFlow's, once for this TensorFlow, into %s", name, folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path, library = pathlib.Path(scratch, f"{name}.cc"), pathlib.Path(scratch, f"{name}.so")
        path.write_text(source, encoding="utf-8")
        command = [compiler, *flags, str(path), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S)
        library.replace(made)  # atomic: another process may do the same
    return made


def reason_not(variable: str, default: str, other: str, attempt: Callable[[], str | None]) -> str:
    """Make an attempt that `load`s, unless a variable of the environment says `other`; return why it did not succeed.

    `attempt` returns the reason, or raises what `load` or TensorFlow raises. Raises NcclSyncError if the variable holds
    a word that is neither `default` nor `other`.
    """
    wanted = os.environ.get(variable, default)
    if wanted not in (default, other):
        raise NcclSyncError(f"Expected {variable} to be {default} or {other}. Received: {wanted}")
    if wanted == other:
        return f"{variable}={other}"
    try:
        return attempt() or ""
    except subprocess.CalledProcessError as error:
        words = [line for line in error.stderr.split("\n") if "error" in line]
        return f"{pathlib.Path(error.cmd[0]).name} says {words[0] if words else f'exit code {error.returncode}'}"
    except (*ERRORS, tf.errors.OpError) as error:
        return str(error)
