"""Tell exchanges which stream TensorFlow computes on, on each GPU.

A collective then waits for that stream alone, and the stream for the collective; copies of the next batch run beside
both on another stream. Without it an exchange waits for all of the GPU's streams, by CUDA's driver alone.

TensorFlow tells its stream only in C++, by an interface that may change. So a function of a few lines is compiled when
first needed, against the headers of the installed TensorFlow, and kept in the user's cache.
"""

import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import tensorflow as tf

from ncclsync.communicator import native
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.errors import NcclError, NcclSyncError

logger = logging.getLogger("ncclsync")

VARIABLE = "NCCLSYNC_GPU_EVENTS"

# Lazy binding: other symbols of the headers are never called, and need not be found.
_FLAGS = ("-O1", "-w", "-shared", "-fPIC", "-Wl,-z,lazy")
_LONGEST_S = 300


@functools.cache
def find() -> bool:
    """Return whether exchanges know TensorFlow's streams in this process; decided once, and logged.

    NCCLSYNC_GPU_EVENTS=context in the environment says that they need not.

    Raises:
        NcclSyncError: NCCLSYNC_GPU_EVENTS is neither "stream" nor "context".
    """
    wanted = os.environ.get(VARIABLE, "stream")
    if wanted not in ("stream", "context"):
        raise NcclSyncError(f"Expected {VARIABLE} to be stream or context. Received: {wanted}")
    reason = f"{VARIABLE}=context"
    if wanted == "stream":
        try:
            _load(_cache())
            logger.info("Exchanges wait for the stream that TensorFlow computes on, on each GPU")
            return True
        # RuntimeError: the user has no home; ValueError: it is not a path.
        except (NcclError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            reason = _reason(error)
    logger.info("Exchanges wait for all streams of their GPUs, including those of copies: %s", reason)
    return False


def _load(folder: pathlib.Path) -> None:
    """Let C find the function; compile it again if the kept library does not load, such as another machine's."""
    kept = {*folder.glob("*.so")}
    library = compiled(folder)
    try:
        native.find_gpu_streams(str(library))
    except NcclError:
        library.unlink(missing_ok=True)
        if library not in kept:
            raise
        native.find_gpu_streams(str(compiled(folder)))


def compiled(folder: pathlib.Path) -> pathlib.Path:
    """Return the compiled function, for the installed TensorFlow; compile it unless the folder has it.

    Raises:
        OSError: there is no C++ compiler, or the folder cannot be written to, or belongs to another user.
        subprocess.SubprocessError: it does not compile.
    """
    flags = [*_FLAGS, *tf.sysconfig.get_compile_flags()]
    built = [tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, platform.machine()]
    key = hashlib.sha256("\n".join([*built, tf_compat.GPU_STREAM_SOURCE, *flags]).encode()).hexdigest()[:16]
    made = folder / f"gpu_stream-{key}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in filter(pathlib.Path.exists, (folder, made)):
        if path.stat().st_uid not in (os.getuid(), 0):
            raise PermissionError(f"{path} is another user's")
    if made.exists():
        return made
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (c++ or g++) on the PATH")
    logger.info("Compiling a function that tells TensorFlow's stream, once for this TensorFlow, into %s", folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, library = pathlib.Path(scratch, "gpu_stream.cc"), pathlib.Path(scratch, "gpu_stream.so")
        source.write_text(tf_compat.GPU_STREAM_SOURCE, encoding="utf-8")
        command = [compiler, *flags, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S)
        library.replace(made)  # atomic: another process may do the same
    return made


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ncclsync"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        words = [line for line in error.stderr.split("\n") if "error" in line]
        return f"{pathlib.Path(error.cmd[0]).name} says {words[0] if words else f'exit code {error.returncode}'}"
    return str(error)
