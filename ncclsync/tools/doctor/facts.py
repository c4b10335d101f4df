"""Hold doctor's findings as plain data; the screen and `--json` show nothing else."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

Facts = TypeVar("Facts")

ERROR, WARNING = "error", "warning"


def from_json(kind: type[Facts], given: Mapping[str, Any]) -> Facts:
    """Return a dataclass below, given the JSON of its `dataclasses.asdict`; unknown keys are left out."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value) for name, value in given.items() if name in hints})


def _typed(hint: Any, value: Any) -> Any:
    item = next(iter(typing.get_args(hint)), hint)
    if isinstance(value, list):
        return tuple(_typed(item, one) for one in value)
    is_nested = isinstance(item, type) and dataclasses.is_dataclass(item) and isinstance(value, Mapping)
    return from_json(item, value) if is_nested else value


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Describe a GPU as the driver does, whether or not this process may use it. None: the driver does not tell.

    Attributes:
        index: the driver's, as in nvidia-smi.
        name, uuid, pci_bus_id: such as "NVIDIA H100 80GB HBM3", "GPU-5f0c…", "00000000:3B:00.0".
        memory_bytes, used_bytes: total, and used by all processes.
        compute_capability: such as "9.0".
        mig: whether it is divided into instances.
        prohibited: whether its compute mode forbids its use.
        error: why it cannot be queried, such as "GpuIsLost".
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    compute_capability: str | None = None
    mig: bool | None = None
    prohibited: bool | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Link:
    """Describe the link between two GPUs.

    Attributes:
        gpus: their indices, the lower first.
        path: as in nvidia-smi: "NV4" (four NVLinks, direct or by a switch); over PCIe the last part that it crosses:
            "PIX" one switch, "PXB" several, "PHB" the CPU's bridge, "NODE" several bridges of a NUMA node, "SYS" the
            link between CPU sockets. None: the driver does not tell.
        nvlinks: active NVLinks between the two.
        p2p: whether each may access the other's memory: "ok", or why not; None: unknown.
    """

    gpus: tuple[int, int]
    path: str | None
    nvlinks: int
    p2p: str | None


@dataclasses.dataclass(frozen=True)
class Driver:
    """Hold NVML's report.

    Attributes:
        version: of the driver, such as "550.54.15".
        cuda: the newest CUDA that it serves, such as "12.4".
        error: why NVML does not answer: "NotInstalled" for nvidia-ml-py, otherwise NVML's name of the error, such as
            "LibraryNotFound" or "DriverNotLoaded"; None if it answers.
        detail: the error in words.
    """

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    error: str | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Library:
    """Describe a shared library as the loader finds it for this process.

    Attributes:
        version: as the library tells; None if it cannot be loaded or does not tell.
        path: the file; None if there is none.
        cuda: the CUDA that it was built with, if it tells.
        error: why it cannot be used.
    """

    version: str | None = None
    path: str | None = None
    cuda: str | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Describe NCCL, CUDA and cuDNN.

    Attributes:
        nccl: the library that ncclsync would use.
        nccl_copies: every libnccl found, including that one.
        nccl_packages: installed Python packages with a libnccl, such as "nvidia-nccl-cu12 2.32.3".
        cuda_runtime, cudnn: as TensorFlow would find them.
        missing: libraries that TensorFlow loads before it uses a GPU, and that are missing.
        driver_cuda: the newest CUDA that the driver serves, by libcuda; None if there is no driver.
    """

    nccl: Library = Library(error="not looked for")
    nccl_copies: tuple[Library, ...] = ()
    nccl_packages: tuple[str, ...] = ()
    cuda_runtime: Library = Library()
    cudnn: Library = Library()
    missing: tuple[str, ...] = ()
    driver_cuda: str | None = None

    @property
    def is_other_nccl(self) -> bool:
        """Return whether another library stands for NCCL, whose own builds name their CUDA."""
        return self.nccl.version is not None and self.nccl.cuda is None


@dataclasses.dataclass(frozen=True)
class Frameworks:
    """Describe TensorFlow and Keras, as `nccl_parallel` sees them.

    Attributes:
        tensorflow, keras: version; None if not installed or not importable.
        tensorflow_path, keras_path: their folders.
        tensorflow_error, keras_error: why the import failed; "" if it did not.
        ncclsync_error: why ncclsync itself cannot be imported with them.
        refused: why training would not begin in this process of several; "" if it would.
        keras_backend: "tensorflow" or another.
        cuda_build: whether TensorFlow was built for CUDA.
        build_cuda, build_cudnn: the versions that it was built for.
        build_capabilities: compute capabilities that it has code for, such as "8.0".
        build_nccl: the oldest NCCL that its package requires.
        gpus: names of the GPUs that TensorFlow sees.
        nvls: whether NCCL may use NVLS, sums within the NVSwitch, and why; "" if ncclsync cannot be imported.
        nvls_variable: the variable that asks for NVLS although op determinism is on, as "NAME=value"; or None.
        log: TensorFlow's own warnings and errors about GPUs.
    """

    tensorflow: str | None = None
    tensorflow_path: str | None = None
    tensorflow_error: str = ""
    keras: str | None = None
    keras_path: str | None = None
    keras_error: str = ""
    keras_backend: str | None = None
    ncclsync_error: str = ""
    refused: str = ""
    cuda_build: bool | None = None
    build_cuda: str | None = None
    build_cudnn: str | None = None
    build_capabilities: tuple[str, ...] = ()
    build_nccl: str | None = None
    gpus: tuple[str, ...] = ()
    nvls: str = ""
    nvls_variable: str | None = None
    log: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold the choice of `@nccl_parallel` without arguments.

    Attributes:
        backend: "nccl", "cpu", or None if it would raise.
        devices: one per tower.
        reason: why.
    """

    backend: str | None = None
    devices: tuple[str, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Hold the outcome of an all-reduce with a known result.

    Attributes:
        backend: "nccl" or "cpu".
        ranks: how many took part.
        count: elements of each.
        ok: every rank has every sum, exactly.
        seconds: of the all-reduce, and of joining the ranks; None if it did not end.
        error: the failure in words; "" if there is none.
        kind: of failure: "wrong" numbers, "hang", "crash", "raised", or "".
        log: NCCL's last warnings.
    """

    backend: str
    ranks: int
    count: int
    ok: bool = False
    seconds: float | None = None
    error: str = ""
    kind: str = ""
    log: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Variable:
    """Describe a set environment variable that matters, or the same setting in a file of NCCL's.

    Attributes:
        source: "environment", or the file.
        effect: in a few words.
    """

    name: str
    value: str
    source: str
    effect: str


@dataclasses.dataclass(frozen=True)
class Version:
    """Hold a row of the table of versions; `version` None: there is none, and `source` tells why."""

    component: str
    version: str | None
    source: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describe a problem and its remedy.

    Attributes:
        code: a stable name, such as "nccl-missing".
        text: one or two sentences.
        remedy: how to mend it.
        severity: "error": training would fail; "warning": it would run, but slowly or at risk.
    """

    code: str = ""
    text: str = ""
    remedy: str = ""
    severity: str = WARNING


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Describe a question whose process did not end well.

    Attributes:
        question: "driver", "libraries" or "frameworks".
        stage: the work it was doing, such as "importing TensorFlow".
        how: "no answer within 60 s", "killed by SIGSEGV", ….
        words: the last line that it printed.
    """

    question: str
    stage: str
    how: str
    words: str


@dataclasses.dataclass(frozen=True)
class Host:
    """Hold all facts, before they are judged.

    Attributes:
        python, python_path: version and interpreter.
        present: the number of NVIDIA GPUs that the kernel knows of, even without NVML.
        kernel_driver: version of the loaded NVIDIA kernel module; None without it.
        shm_bytes, shm_free_bytes: of /dev/shm; None if there is none.
        cores: that this process may use.
        interfaces: names of the network interfaces.
        troubles: questions that were not answered.
    """

    python: str
    python_path: str
    ncclsync: str
    ncclsync_path: str
    driver: Driver = Driver()
    present: int = 0
    kernel_driver: str | None = None
    libraries: Libraries = Libraries()
    frameworks: Frameworks = Frameworks()
    choice: Choice = Choice()
    all_reduce: AllReduce | None = None
    variables: tuple[Variable, ...] = ()
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    cores: int = 1
    interfaces: tuple[str, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    def variable(self, name: str) -> str | None:
        """Return a variable's value; None if it is not set. The environment precedes a file."""
        return next((one.value for one in self.variables if one.name == name), None)

    @property
    def severity(self) -> str:
        """Return how bad it is if GPUs, or what joins them, cannot be used: an error if training would use them."""
        return ERROR if self.choice.backend == "nccl" else WARNING

    @property
    def may_use_gpus(self) -> bool:
        """Return whether training would use GPUs, or there are GPUs."""
        return self.choice.backend == "nccl" or self.gpu_count > 0

    @property
    def gpu_count(self) -> int:
        """Return the number of the host's GPUs, from the source that knows most."""
        return max(len(self.driver.gpus), self.present, len(self.frameworks.gpus))


@dataclasses.dataclass(frozen=True)
class ProcessFacts:
    """Hold the findings of one of the processes that a launcher has started.

    Attributes:
        rank: its number.
        host: name of its machine.
        backend, devices: that `@nccl_parallel` would choose there; see `Choice`.
        versions: by component; None without the component.
        settings: values of variables that must be equal in all processes, by name.
        problems: of that process alone.
    """

    rank: int
    host: str
    backend: str | None = None
    devices: tuple[str, ...] = ()
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """Hold doctor's findings and verdict.

    Attributes:
        host: this host.
        versions: of this process.
        problems: of all processes.
        summary: the verdict in words.
        processes: all that a launcher has started, if they are joined; else ().
        joint: an all-reduce over all of them.
    """

    host: Host
    versions: tuple[Version, ...]
    problems: tuple[Problem, ...]
    summary: str
    processes: tuple[ProcessFacts, ...] = ()
    joint: AllReduce | None = None

    @property
    def healthy(self) -> bool:
        """Return whether training would run."""
        return not any(one.severity == ERROR for one in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        host = dataclasses.asdict(self.host)
        driver, frameworks = host.pop("driver"), host.pop("frameworks")
        return {
            "healthy": self.healthy,
            "summary": self.summary,
            "versions": [dataclasses.asdict(one) for one in self.versions],
            "gpus": driver.pop("gpus"),
            "links": driver.pop("links"),
            "backend": host.pop("choice"),
            "all_reduce": host.pop("all_reduce"),
            "processes": [dataclasses.asdict(one) for one in self.processes],
            "joint_all_reduce": None if self.joint is None else dataclasses.asdict(self.joint),
            "variables": host.pop("variables"),
            "problems": [dataclasses.asdict(one) for one in self.problems],
            "driver": driver,
            "frameworks": frameworks,
            **host,
        }
