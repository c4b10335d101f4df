"""Find what starts tests' programs as several processes: launchers, or variables alone."""

import collections
import contextlib
import json
import os
import pathlib
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "processes" / "scripts"


_folders: list[tempfile.TemporaryDirectory] = []  # until this Python ends


def mpirun_path() -> str | None:
    """The one beside this Python, or the machine's."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def mpirun(count: int, *options: str) -> list[str]:
    """A command that starts so many processes of what follows it; skips the test where there is none."""
    pytest.importorskip("mpi4py", reason="pip install -e '.[hosts]'")
    path = mpirun_path() or pytest.skip("no mpirun: pip install -e '.[hosts]'")
    # What an mpirun that was killed has left in the usual folder fails the next mpirun with its number.
    _folders.append(tempfile.TemporaryDirectory(prefix="mpirun-"))
    command = ["env", f"PRTE_MCA_prte_tmpdir_base={_folders[-1].name}", path, "-np", str(count)]
    return [*command, "--allow-run-as-root", "--oversubscribe", *options]


def torchrun(count: int, *options: str) -> list[str]:
    """The same by PyTorch's torchrun, whose program it is that follows."""
    pytest.importorskip("torch", reason="no torchrun: pip install torch")
    where = ["--standalone"] if not options else list(options)
    return [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={count}", "--no-python"]


def srun(count: int, *options: str) -> list[str]:
    """The same by Slurm's srun."""
    if not shutil.which("srun"):
        pytest.skip("no srun: needs a Slurm cluster")
    try:
        subprocess.run(["srun", "-n", str(count), "true"], capture_output=True, timeout=30, check=True)
    except subprocess.SubprocessError:
        pytest.skip("srun reaches no Slurm cluster")
    return ["srun", f"--ntasks={count}", "--cpus-per-task=1", *options]


LAUNCHERS = {"mpirun": mpirun, "torchrun": torchrun, "srun": srun}


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def variables_of(name: str, rank: int, port: int, host: str = "localhost") -> dict[str, str]:
    """What a process of two is told, each alone on its host: by RANK and its like, or by TF_CONFIG."""
    if name == "TF_CONFIG":
        cluster = {"worker": [f"{host}:{port}", "other:1"]}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})}
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**own, "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def environment(**more: str) -> dict[str, str]:
    """Variables for a process that finds this source tree, on a machine that may have fewer cores than processes."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **more}


class Exploit:
    """Makes a folder where somebody unpickles it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def bothered(port: int, rng: random.Random, folder: pathlib.Path) -> Iterator[socket.socket]:
    """Strangers' connections at a port: silent, garbage, a pickle, a greeting of ZeroMQ's, of sizes that are not."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    said = [b"", rng.randbytes(300), pickle.dumps(Exploit(folder)), b"GET / HTTP/1.0\r\n\r\n", greeting]
    said += [greeting + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\x7f" * 8 + rng.randbytes(99)]
    said += [greeting + b"NULL".ljust(20, b"\0") + bytes(32) + rng.randbytes(50), b"\x01\x00", b"\xff" * 64]
    for words in said:
        raw = socket.create_connection(("127.0.0.1", port), timeout=5)
        raw.sendall(words)
        yield raw


@contextlib.contextmanager
def strangers(port: int, folder: pathlib.Path) -> Iterator[collections.deque]:
    """Bother whoever listens at a port for as long as the context lasts; yield all connections.

    By scans, by garbage, of which 50 connections stay, and by 400 slow clients, which say a byte at times.
    """
    ending, rng, made, slow = threading.Event(), random.Random(0), collections.deque(), collections.deque()

    def call():
        while not ending.wait(0.02):
            with contextlib.suppress(OSError):  # nobody listens, yet or any more, or has closed this connection
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                slow.extend(socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(20))
                while len(slow) > 400:
                    slow.popleft().close()
                for raw in bothered(port, rng, folder):
                    made.append(raw)
                    if len(made) > 50:
                        made[-50].close()
                slow[0].sendall(b"\xff")
                slow.rotate()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield made
        assert len(slow) >= 400
    finally:
        ending.set()
        thread.join()
        for raw in (*made, *slow):
            raw.close()
