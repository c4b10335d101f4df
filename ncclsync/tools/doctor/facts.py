"""Hold doctor's findings as plain data; the screen and `--json` show nothing else."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ncclsync.compat.host_gpus import VISIBLE, left_by

Facts = TypeVar("Facts")

ERROR, WARNING = "error", "warning"


def from_json(kind: type[Facts], given: Mapping[str, Any]) -> Facts:
    """Return a dataclass of this module, given the JSON of its `dataclasses.asdict`; unknown keys are left out."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value) for name, value in given.items() if name in hints})


def _typed(hint: Any, value: Any) -> Any:
    item = next(iter(typing.get_args(hint)), hint)
    if isinstance(value, (list, tuple)):
        return tuple(_typed(item, one) for one in value)
    is_nested = isinstance(item, type) and dataclasses.is_dataclass(item) and isinstance(value, Mapping)
    return from_json(item, value) if is_nested else value


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Describe a GPU as the driver does, even if this process may not use it. None: the driver does not tell."""

    index: int  # the driver's, as in nvidia-smi
    name: str | None = None  # such as "NVIDIA H100 80GB HBM3"
    uuid: str | None = None  # such as "GPU-5f0c…"
    pci_bus_id: str | None = None  # such as "00000000:3b:00.0"
    memory_bytes: int | None = None
    used_bytes: int | None = None  # by all processes
    compute_capability: str | None = None  # such as "9.0"
    mig: bool | None = None  # whether it is divided into instances
    prohibited: bool | None = None  # whether its compute mode forbids its use
    error: str | None = None  # why it cannot be queried, such as "GpuIsLost"


@dataclasses.dataclass(frozen=True)
class Link:
    """Describe the link between two GPUs."""

    gpus: tuple[int, int]  # their indices, the lower first
    # As in nvidia-smi: "NV4" (four NVLinks, direct or by a switch), or the farthest part of a way by PCIe: "PIX" one
    # switch, "PXB" several, "PHB" the CPU's bridge, "NODE" several bridges of a NUMA node, "SYS" the link between CPU
    # sockets. None: the driver does not tell.
    path: str | None
    nvlinks: int  # active NVLinks between the two
    p2p: str | None  # whether each may access the other's memory: "ok", or why not; None: unknown


@dataclasses.dataclass(frozen=True)
class Driver:
    """Hold NVML's report."""

    version: str | None = None  # of the driver, such as "550.54.15"
    cuda: str | None = None  # the newest CUDA that it serves, such as "12.4"
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    # Why NVML does not answer: "NotInstalled" without nvidia-ml-py, otherwise NVML's name of the error, such as
    # "LibraryNotFound" or "DriverNotLoaded"; None if it answers
    error: str | None = None
    detail: str = ""  # the error in words


@dataclasses.dataclass(frozen=True)
class Library:
    """Describe a shared library as the loader finds it for this process."""

    version: str | None = None  # as the library tells; None if it cannot be loaded or does not tell
    path: str | None = None  # the file; None if there is none
    cuda: str | None = None  # the CUDA that it was built with, if it tells
    error: str | None = None  # why it cannot be used


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Describe NCCL, CUDA and cuDNN."""

    nccl: Library = Library(error="not looked for")  # the library that ncclsync would use
    nccl_copies: tuple[Library, ...] = ()  # every libnccl found, including that one
    nccl_packages: tuple[str, ...] = ()  # installed Python packages with a libnccl, such as "nvidia-nccl-cu12 2.32.3"
    cuda_runtime: Library = Library()  # as TensorFlow would find it
    cudnn: Library = Library()  # likewise
    missing: tuple[str, ...] = ()  # missing libraries, of those that TensorFlow loads before it uses a GPU
    driver_cuda: str | None = None  # the newest CUDA that the driver serves, by libcuda; None if there is no driver

    @property
    def is_other_nccl(self) -> bool:
        """Return whether another library takes NCCL's place: NCCL's own builds name their CUDA."""
        return self.nccl.version is not None and self.nccl.cuda is None


@dataclasses.dataclass(frozen=True)
class Frameworks:
    """Describe TensorFlow and Keras, as `nccl_parallel` sees them."""

    tensorflow: str | None = None  # version; None if not installed or not importable
    tensorflow_path: str | None = None  # its folder
    tensorflow_error: str = ""  # why the import failed; "" if it did not
    keras: str | None = None  # likewise
    keras_path: str | None = None
    keras_error: str = ""
    keras_backend: str | None = None  # "tensorflow" or another
    ncclsync_error: str = ""  # why ncclsync itself cannot be imported with them
    refused: str = ""  # why training would not begin in this process of several; "" if it would
    cuda_build: bool | None = None  # whether TensorFlow was built for CUDA
    build_cuda: str | None = None  # the CUDA version of that build
    build_cudnn: str | None = None  # likewise
    build_capabilities: tuple[str, ...] = ()  # compute capabilities that it has code for, such as "8.0"
    build_nccl: str | None = None  # the oldest NCCL that TensorFlow's package requires
    gpus: tuple[str, ...] = ()  # names of the GPUs that TensorFlow sees
    nvls: str = ""  # whether NCCL may use NVLS, sums within the NVSwitch, and why; "" if ncclsync cannot be imported
    nvls_variable: str | None = None  # the setting, "NAME=value", that asks for NVLS although op determinism is on
    log: tuple[str, ...] = ()  # TensorFlow's own warnings and errors about GPUs


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold the choice of `@nccl_parallel` without arguments."""

    backend: str | None = None  # "nccl", "cpu", or None if it would raise
    devices: tuple[str, ...] = ()  # one per tower
    reason: str = ""  # why


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Hold the outcome of an all-reduce with a known result."""

    backend: str  # "nccl" or "cpu"
    ranks: int  # how many took part
    count: int  # elements of each
    ok: bool = False  # every rank has every sum, exactly
    seconds: float | None = None  # of the all-reduce, and of joining the ranks; None if it did not end
    taken_bytes: int = 0  # the most memory of a GPU that NCCL has taken for it
    error: str = ""  # the failure in words
    kind: str = ""  # of failure: "wrong" numbers, "hang", "crash", "raised", or ""
    log: tuple[str, ...] = ()  # NCCL's last warnings

    @property
    def failure(self) -> str:
        """Return the kind of failure as a verb."""
        verbs = {"wrong": "gives wrong numbers", "hang": "hangs", "crash": "ends its process", "raised": "fails"}
        return verbs.get(self.kind, "")


@dataclasses.dataclass(frozen=True)
class Variable:
    """Describe a set environment variable that matters, or a setting in a file of NCCL's."""

    name: str
    value: str
    source: str  # "environment", or the file
    effect: str  # in a few words


@dataclasses.dataclass(frozen=True)
class Version:
    """Hold a row of the table of versions; if `version` is None, `source` tells why."""

    component: str
    version: str | None
    source: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describe a problem and its remedy."""

    code: str = ""  # a stable name, such as "nccl-missing"
    text: str = ""  # one or two sentences
    remedy: str = ""  # how to mend it
    severity: str = WARNING  # "error": training would fail; "warning": it would run, but slowly or at risk


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Describe a question whose process did not end well."""

    question: str  # "driver", "libraries" or "frameworks"
    stage: str  # the work it was doing, such as "importing TensorFlow"
    how: str  # "no answer within 60 s", "killed by SIGSEGV", …
    words: str  # the last line that it printed


@dataclasses.dataclass(frozen=True)
class Host:
    """Hold all facts, before they are judged."""

    python: str  # version
    python_path: str  # of the interpreter
    ncclsync: str
    ncclsync_path: str
    driver: Driver = Driver()
    present: int = 0  # the number of NVIDIA GPUs that the kernel knows of, even without NVML
    kernel_driver: str | None = None  # version of the loaded NVIDIA kernel module; None without it
    libraries: Libraries = Libraries()
    frameworks: Frameworks = Frameworks()
    choice: Choice = Choice()
    all_reduce: AllReduce | None = None
    variables: tuple[Variable, ...] = ()
    shm_bytes: int | None = None  # of /dev/shm; None if there is none
    shm_free_bytes: int | None = None
    cores: int = 1  # that this process may use
    interfaces: tuple[str, ...] = ()  # names of the network interfaces
    troubles: tuple[Trouble, ...] = ()  # questions that were not answered

    def variable(self, name: str) -> str | None:
        """Return a variable's value; None if it is not set. The environment precedes a file."""
        return next((one.value for one in self.variables if one.name == name), None)

    @property
    def uses_gpus(self) -> bool:
        """Return whether training uses GPUs, or would if it could begin."""
        return self.choice.backend == "nccl" or (self.choice.backend is None and bool(self.frameworks.gpus))

    @property
    def severity(self) -> str:
        """Return the severity of a problem with GPUs, or NCCL: an error if training would use them."""
        return ERROR if self.uses_gpus else WARNING

    @property
    def may_use_gpus(self) -> bool:
        """Return whether training would use GPUs, or there are GPUs."""
        return self.uses_gpus or self.gpu_count > 0

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """Return the driver's GPUs that CUDA_VISIBLE_DEVICES leaves."""
        gpus = self.driver.gpus
        divided = [i for i, gpu in enumerate(gpus) if gpu.mig]
        return tuple(gpus[i] for i in left_by(self.variable(VISIBLE), [gpu.uuid for gpu in gpus], divided))

    @property
    def served_cuda(self) -> str | None:
        """Return the newest CUDA that the driver serves: by its libcuda, which programs use, or by NVML."""
        return self.libraries.driver_cuda or self.driver.cuda

    @property
    def gpu_count(self) -> int:
        """Return the number of the host's GPUs, by the source that knows most."""
        return max(len(self.driver.gpus), self.present, len(self.frameworks.gpus))


@dataclasses.dataclass(frozen=True)
class ProcessFacts:
    """Hold the findings of one of the processes that a launcher has started."""

    rank: int
    host: str  # name of its machine
    backend: str | None = None  # that `@nccl_parallel` would choose there; see `Choice`
    devices: tuple[str, ...] = ()  # likewise
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)  # by component; None without it
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # variables that must be equal in all processes
    problems: tuple[Problem, ...] = ()  # of that process alone


@dataclasses.dataclass(frozen=True)
class Report:
    """Hold doctor's findings and verdict."""

    host: Host
    versions: tuple[Version, ...]  # of this process
    problems: tuple[Problem, ...]  # of all processes, errors first
    processes: tuple[ProcessFacts, ...] = ()  # all that a launcher has started, if they are joined; else ()
    joint: AllReduce | None = None  # an all-reduce over all of them

    @property
    def healthy(self) -> bool:
        """Return whether training would run."""
        return not any(one.severity == ERROR for one in self.problems)

    @property
    def summary(self) -> str:
        """Return the verdict in a sentence or two."""
        host, count, hosts = self.host, self.host.gpu_count, len({one.host for one in self.processes})
        severities = [one.severity for one in self.problems]
        counts = {name: severities.count(name) for name in (ERROR, WARNING)}
        counted = ", ".join(f"{many} {name}{'s' * (many != 1)}" for name, many in counts.items() if many)
        verdict = f"Training would run, with {counted}" if counted else "Healthy"
        gpus = f"{count} GPU{'s' * (count != 1)} on this machine" if count else "No GPU on this machine"
        if not self.healthy:
            verdict = f"Training would fail: {counted}"
        elif host.choice.backend == "nccl":
            library = f"{host.libraries.nccl.path}, which is not NCCL" if host.libraries.is_other_nccl else "NCCL"
            gpus += f": towers stand on {len(host.choice.devices)} of them, joined by {library}"
        else:
            gpus += f"{', unused' * (count > 0)}: towers stand on the CPU, joined by ncclsync"
        of_all = f" {len(self.processes)} processes on {hosts} host{'s' * (hosts != 1)}." if self.processes else ""
        return f"{verdict}. {gpus}.{of_all}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        found = dataclasses.asdict(self)
        host, joint = found.pop("host"), found.pop("joint")
        gpus, links = (host["driver"].pop(name) for name in ("gpus", "links"))
        about = {"gpus": gpus, "links": links, "backend": host.pop("choice"), **host, "joint_all_reduce": joint}
        return {"healthy": self.healthy, "summary": self.summary, **found, **about}
