"""The stand-in for libnccl and libcudart over host memory: how it is built, and how a test speaks to it.

What it does and can be told to do is in `csrc/standin.h`. Processes whose STANDIN_FOLDER is one
find each other.
"""

import ctypes
import os
import pathlib
import shutil
import subprocess
import time

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "support" / "csrc"
COMPILER = shutil.which("cc") or shutil.which("gcc")
FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"]


class Standin:
    """The two libraries, loaded into this process.

    Attributes:
        nccl, cudart: their paths.
        environment: the variables that make ncclsync use them.
    """

    def __init__(self, folder: pathlib.Path, *flags: str) -> None:
        """Compile them into `folder`."""
        self.nccl, self.cudart = str(folder / "libnccl.so"), str(folder / "libcudart.so")
        build = [COMPILER, *FLAGS, *flags, "-shared", f"-I{ROOT / 'csrc'}"]
        cudart = [SOURCES / f"standin_{part}.c" for part in ("cudart", "streams", "memory", "faults")]
        subprocess.run([*build, *cudart, "-o", self.cudart, "-lpthread"], check=True)
        nccl = [SOURCES / f"standin_{part}.c" for part in ("nccl", "comm", "meeting", "processes")]
        kernels = [ROOT / "csrc" / name for name in ("ncclsync.c", "cpu/pool.c", "cpu/collectives.c")]
        command = [*build, *nccl, *kernels, "-o", self.nccl, self.cudart, "-lpthread", "-lm"]
        subprocess.run(command, check=True)
        self.environment = {
            "NCCLSYNC_NCCL_LIBRARY": self.nccl,
            "NCCLSYNC_CUDART_LIBRARY": self.cudart,
            "NCCLSYNC_CUDA_DRIVER_LIBRARY": self.cudart,
        }

    def fail(self, instructions: str) -> None:
        """Give instructions to fail, in this process; they replace all earlier ones."""
        ctypes.CDLL(self.cudart).standin_fail(instructions.encode())

    def count(self, *calls: str) -> None:
        """Begin to count calls; this replaces all instructions."""
        self._n_counted = len(calls)
        self.fail(",".join(f"{call}:1000000000" for call in calls))

    def counted(self, *kinds: str) -> list[int]:
        """Return how often each of the calls was made that are being counted; or how many there are of these kinds."""
        if kinds:
            return [ctypes.CDLL(self.cudart).standin_alive(kind.encode()) for kind in kinds]
        return [ctypes.CDLL(self.cudart).standin_seen(i) for i in range(self._n_counted)]

    def alive(self) -> dict[str, int]:
        """Return how many streams, events, pieces of memory and communicators there are, in this process."""
        library = ctypes.CDLL(self.cudart)
        return {kind: library.standin_alive(kind.encode()) for kind in ("stream", "event", "memory", "comm", "thread")}

    def settled(self, expected: dict[str, int]) -> dict[str, int]:
        """Return what is alive, as soon as it is as expected, or after some seconds: an abort may go on."""
        until = time.monotonic() + 10
        while self.alive() != expected and time.monotonic() < until:
            time.sleep(0.001)
        return self.alive()


class Loaded(Standin):
    """The libraries of this process on virtual GPUs, where TensorFlow has streams, events and memory of its own."""

    def __init__(self) -> None:
        self.nccl, self.cudart = os.environ["NCCLSYNC_NCCL_LIBRARY"], os.environ["NCCLSYNC_CUDART_LIBRARY"]
        self.environment = {}

    def alive(self) -> dict[str, int]:
        """Return how many communicators there are, in this process."""
        return {"comm": ctypes.CDLL(self.cudart).standin_alive(b"comm")}
