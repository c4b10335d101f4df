"""Ask questions that may crash, hang or fill a GPU's memory, each in a separate process: a probe.

`ask` starts `python -m ncclsync.tools.doctor.probes NAME FILE ARGUMENTS`, which writes facts as it finds them, in lines
of JSON. So the facts of a process that dies are kept.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ncclsync.errors import NcclPreflightError, NcclSyncError, NcclTimeoutError

COUNT = 1 << 20  # float32 elements of each rank in the known-answer all-reduce
_BUCKET_COUNT = 25 * 2**18  # float32 elements of a bucket by default
PATTERN = 251  # a prime, so that a shift by a block gives wrong elements
_LINES = 40  # of a probe's output, the last ones

Tell = Callable[..., None]  # takes facts of a probe by name, and keeps them


@dataclasses.dataclass(frozen=True)
class Answer:
    """Hold the answer of a probe."""

    facts: dict[str, Any]  # its findings
    stage: str  # its work when it ended
    ended: str  # "well", "hang" (it was killed at the time limit) or "crash"
    how: str  # the same in words, such as "killed by SIGSEGV"; "" if it ended well
    output: tuple[str, ...]  # the last lines of its stdout and stderr

    @property
    def failure(self) -> str:
        """Return the `error` among its facts, or how it ended; "" if all went well."""
        return self.facts.get("error", "") or ("" if self.ended == "well" else f"{self.how}, while {self.stage}")


def ask(name: str, timeout_s: float, environ: Mapping[str, str], arguments: Any = None) -> Answer:
    """Run a probe of `PROBES`; return soon after the time limit, even if the probe cannot be killed."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    with tempfile.TemporaryDirectory(prefix="ncclsync-doctor-", ignore_cleanup_errors=True) as folder:
        file, log = pathlib.Path(folder, "facts.json"), pathlib.Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ncclsync.tools.doctor.probes", name, str(file), json.dumps(arguments or {})],
                env={**environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
                ended, how = "crash" if code else "well", f"ended with exit status {code}" if code else ""
                if code < 0:
                    how = f"killed by {signal.Signals(-code).name}"
            except subprocess.TimeoutExpired:
                ended, how = "hang", f"no answer within {timeout_s:g} s"
            except BaseException:
                _kill(process)
                raise
        if ended == "hang":
            _kill(process)
        # Without an incomplete last line, of a process that was killed while it wrote.
        told = file.read_text().split("\n")[:-1] if file.exists() else []
        lines = log.read_text(errors="replace").splitlines()
    facts: dict[str, Any] = {"stage": "start"}
    for line in told:
        facts |= json.loads(line)
    return Answer(facts, facts.pop("stage"), ended, how, tuple(lines[-_LINES:]))


def ask_all_reduce(backend: str, devices: Sequence[int], timeout_s: float, environ: Mapping[str, str]) -> Answer:
    """Ask for an all-reduce of known numbers; its own limit is shorter, for the sake of its error's words."""
    arguments = {"backend": backend, "devices": [*devices], "timeout_s": 0.7 * timeout_s}
    return ask("all_reduce", timeout_s, environ, arguments)


def _kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    # A process that hangs in the kernel cannot be ended; do not wait for it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _driver(tell: Tell) -> None:
    from ncclsync.tools.doctor.nvml import read_driver

    tell(stage="asking the driver by NVML")
    tell(**dataclasses.asdict(read_driver()))


def _libraries(tell: Tell) -> None:
    from ncclsync.tools.doctor.libraries import read_libraries

    tell(stage="loading NCCL, CUDA and cuDNN")
    tell(**dataclasses.asdict(read_libraries()))


def _frameworks(tell: Tell) -> None:
    """Ask for TensorFlow, Keras, and the choice of `nccl_parallel`."""

    def imported(name: str) -> Any:
        try:
            package = importlib.import_module(name)
            tell(**{name: str(package.__version__), f"{name}_path": os.path.dirname(package.__file__ or "")})
            return package
        except Exception as error:  # a broken package may raise anything
            tell(**{f"{name}_error": f"{type(error).__name__}: {error}"})
            return None

    tell(stage="importing TensorFlow")
    tf = imported("tensorflow")
    tell(stage="importing Keras", keras_backend=_configured_backend())
    keras = imported("keras")
    if keras is not None:
        tell(keras_backend=keras.backend.backend())
    if tf is None:
        return
    tell(stage="listing TensorFlow's devices")
    build = tf.sysconfig.get_build_info()
    # "sm_89", "compute_89" and variants such as "sm_89a" become "8.9".
    capabilities = build.get("cuda_compute_capabilities", ())
    tell(
        cuda_build=bool(build.get("is_cuda_build")),
        build_cuda=build.get("cuda_version"),
        build_cudnn=build.get("cudnn_version"),
        build_capabilities=[re.sub(r".*_(\d+)(\d)[af]?$", r"\1.\2", one) for one in capabilities],
        build_nccl=_required_nccl(),
        gpus=[one.name.removeprefix("/physical_device:") for one in tf.config.list_physical_devices("GPU")],
    )
    tell(stage="importing ncclsync")
    try:
        _choose(tell)
    except Exception as error:  # a broken package may raise anything
        tell(ncclsync_error=f"{type(error).__name__}: {error}")
    if os.environ.get("XLA_FLAGS"):  # a flag that XLA does not know ends the process
        tell(stage="compiling by XLA")
        tf.function(lambda x: x + 1, jit_compile=True)(tf.zeros(()))


def _choose(tell: Tell) -> None:
    """Choose devices as `nccl_parallel` does, and say whether NCCL may use NVLS."""
    from ncclsync.communicator import nvls
    from ncclsync.compat import tensorflow as tf_compat
    from ncclsync.towers.placement import choose_devices, own_process

    found = nvls.in_force(os.environ.get, tf_compat.is_op_determinism_enabled())
    words = f"{'allowed' if found.allowed else 'kept out'}, since {found.reason}"
    tell(stage="choosing devices", nvls=words, nvls_variable=found.variable)
    try:
        chosen = choose_devices(None, None, None, own_process(None))
    except (NcclSyncError, ValueError) as error:  # a ValueError: this host has too few GPUs for its processes
        tell(refused=str(error))
        return
    tell(devices=chosen.devices, backend=chosen.backend, reason=chosen.reason)


def reduce_known(tell: Tell, backend: str, devices: Sequence[int], timeout_s: float, peers: Any = None) -> None:
    """All-reduce known numbers over these devices, and those of `peers`; tell facts of `facts.AllReduce`.

    GPUs do so by their preflight, CPUs in host memory.
    """
    kind, by_nccl = "wrong", backend == "nccl"
    tell(stage=f"joining {len(devices)} ranks")
    try:
        from ncclsync import communicator as made_by  # raises if the C extension is missing
        from ncclsync.communicator import preflight

        tell(count=preflight.COUNT if by_nccl else COUNT)
        began = time.perf_counter()
        joined: Any
        if by_nccl:
            joined = made_by.NcclCommunicator(devices, peers=peers, timeout_s=timeout_s)
        elif peers is not None:
            joined = made_by.TcpCommunicator(peers, len(devices), timeout_s=timeout_s)
        else:
            joined = made_by.CpuCommunicator(len(devices))
        with joined as communicator:
            tell(stage="reducing", ranks=communicator.world_size)
            error = "" if by_nccl else known_answer(communicator)
            tell(stage="reducing a bucket", seconds=time.perf_counter() - began)
            if by_nccl:  # which takes memory of NCCL's that fewer numbers do not
                sums = made_by.AllReduce((), (), "sum")
                communicator.connect([sums], [made_by.native.DTYPES["float32"]], [_BUCKET_COUNT])
            tell(stage="ending the communicator", taken_bytes=communicator.taken_bytes)
    except NcclPreflightError as found:
        error = str(found)
    except (NcclSyncError, OSError) as found:
        error, kind = str(found), "hang" if isinstance(found, NcclTimeoutError) else "raised"
    if error:
        tell(error=error, kind=kind)


def _gpus(tell: Tell) -> None:
    """Ask CUDA for the UUIDs of the GPUs that it shows, in its order."""
    from ncclsync.communicator.native import cuda_paths
    from ncclsync.compat import host_gpus

    tell(stage="asking CUDA for its GPUs", gpus=[])
    tell(gpus=host_gpus.shown_by_cuda(cuda_paths()[1]))


def known_answer(communicator: Any) -> str:
    """All-reduce known numbers in host memory; describe the first wrong element, or return "". Collective.

    Rank r of n has (r + 1)·(i mod 251), every sum is n(n+1)/2·(i mod 251), exactly.
    """
    import numpy as np

    pattern = (np.arange(COUNT) % PATTERN).astype(np.float32)
    recvs = [np.full(COUNT, -1, np.float32) for _ in communicator.ranks]
    communicator.all_reduce([(rank + 1) * pattern for rank in communicator.ranks], recvs)
    expected = communicator.world_size * (communicator.world_size + 1) / 2 * pattern
    for rank, recv in enumerate(recvs):
        wrong = (recv != expected).nonzero()[0]
        if len(wrong):
            i = int(wrong[0])
            return (
                f"Expected {expected[i]:g} as element {i} of rank {rank}. Received: {recv[i]:g}; "
                f"{len(wrong)} of {COUNT} elements of this rank are wrong"
            )
    return ""


def _configured_backend() -> str:
    """Return the backend that Keras is set to, read as Keras does, even if it cannot be imported."""
    home, configured = pathlib.Path(os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"), "tensorflow"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        configured = json.loads((home / "keras.json").read_text()).get("backend", "tensorflow")
    return os.environ.get("KERAS_BACKEND") or configured


def _required_nccl() -> str | None:
    """Return the oldest NCCL that TensorFlow's package asks for."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # built or packaged otherwise
        found = re.search(r"nvidia-nccl\S*>=([0-9.]+)", " ".join(importlib.metadata.requires("tensorflow") or ()))
        return found[1] if found else None
    return None


PROBES: dict[str, Callable[..., None]] = {
    "driver": _driver,
    "libraries": _libraries,
    "frameworks": _frameworks,
    "all_reduce": reduce_known,
    "gpus": _gpus,
}

if __name__ == "__main__":
    with open(sys.argv[2], "w", buffering=1) as stages:

        def tell(**facts: Any) -> None:
            print(json.dumps(facts), file=stages)

        PROBES[sys.argv[1]](tell, **json.loads(sys.argv[3]))
        tell(stage="ending")
