"""Examine a host: gather the facts, each by a separate question, and judge them."""

import dataclasses
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import sys
from collections.abc import Mapping

from ncclsync.compat import host_gpus
from ncclsync.tools.doctor import environment, probes
from ncclsync.tools.doctor.facts import (
    AllReduce,
    Choice,
    Driver,
    Frameworks,
    Host,
    Libraries,
    Library,
    Report,
    Trouble,
    Version,
    from_json,
)
from ncclsync.tools.doctor.hardware import visible_gpus
from ncclsync.tools.doctor.problems import find_problems, summarize

CPU_RANKS = 4  # of the known-answer all-reduce where there is no GPU
_CHATTER = re.compile(r"^[IW]\d{4} |^WARNING: All log messages before")
_WARNINGS = re.compile(r"^[WEF]\d{4} ")  # TensorFlow's log: a warning, an error, a fatal one


def examine(timeout_s: float = 60.0, environ: Mapping[str, str] | None = None) -> Report:
    """Find out whether training would run on this host, and what prevents it.

    TensorFlow and the GPUs are asked in separate processes, which end afterwards.

    Args:
        timeout_s: seconds that each of the four questions may take.
        environ: of the processes; None: `os.environ`.
    """
    environ = dict(os.environ if environ is None else environ)
    shm_bytes, shm_free_bytes = environment.shared_memory()
    host = Host(
        python=platform.python_version(),
        python_path=sys.executable,
        ncclsync=importlib.import_module("ncclsync").__version__,
        ncclsync_path=str(pathlib.Path(__file__).parents[2]),
        variables=environment.read_variables(environ, environment.nccl_files(environ)),
        present=host_gpus.count_gpus(),
        kernel_driver=host_gpus.kernel_driver(),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        cores=len(os.sched_getaffinity(0)),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )
    troubles: list[Trouble] = []

    def ask(question: str, **more: str) -> probes.Answer:
        answer = probes.ask(question, timeout_s, {**environ, **more})
        if answer.ended != "well":
            lines = (line.strip() for line in reversed(answer.output) if not _CHATTER.match(line))
            troubles.append(Trouble(question, answer.stage, answer.how, next(filter(None, lines), "")))
        return answer

    driver = _driver(ask("driver"))
    libraries = _libraries(ask("libraries"))
    # The whole log, even if the user hides a part; and no more GPU memory than the question needs.
    answer = ask("frameworks", TF_CPP_MIN_LOG_LEVEL="0", TF_FORCE_GPU_ALLOW_GROWTH="true")
    frameworks, choice = _frameworks(answer)
    host = dataclasses.replace(
        host, driver=driver, libraries=libraries, frameworks=frameworks, choice=choice, troubles=tuple(troubles)
    )
    host = dataclasses.replace(host, all_reduce=_all_reduce(host, timeout_s, environ))
    problems = tuple(find_problems(host))
    return Report(host, tuple(_versions(host)), problems, summarize(host, problems))


def _driver(answer: probes.Answer) -> Driver:
    return from_json(Driver, answer.facts) if answer.facts else Driver(error="NoAnswer", detail=answer.how)


def _libraries(answer: probes.Answer) -> Libraries:
    if not answer.facts:
        return Libraries(nccl=Library(error="the process that loaded the libraries did not end well"))
    return from_json(Libraries, answer.facts)


def _frameworks(answer: probes.Answer) -> tuple[Frameworks, Choice]:
    log = tuple(line for line in answer.output if _WARNINGS.match(line))
    found = dataclasses.replace(from_json(Frameworks, answer.facts), log=log)
    if "reason" not in answer.facts:
        why = found.tensorflow_error or found.keras_error or found.ncclsync_error or answer.how
        return found, Choice(reason=f"none: {why}")
    # Without Keras there is no model to decorate.
    if found.keras_error or found.keras_backend != "tensorflow":
        return found, Choice(reason=f"none: {found.keras_error or f'Keras runs on {found.keras_backend}'}")
    return found, from_json(Choice, answer.facts)


def _all_reduce(host: Host, timeout_s: float, environ: dict[str, str]) -> AllReduce:
    """Reduce where training would; on the GPUs too if only TensorFlow or Keras stand in the way."""
    backend, devices = "cpu", list(range(CPU_RANKS))
    if host.choice.backend == "nccl":
        backend, devices = "nccl", [int(name.split(":")[1]) for name in host.choice.devices]
    elif host.choice.backend is None and visible_gpus(host) and host.libraries.nccl.version:
        backend, devices = "nccl", list(range(len(visible_gpus(host))))
    # NCCL's limit is shorter, since its error names the missing ranks.
    arguments = {"backend": backend, "devices": devices, "timeout_s": 0.7 * timeout_s}
    answer = probes.ask("all_reduce", timeout_s, {"NCCL_DEBUG": "WARN", **environ}, arguments)
    log = tuple(line for line in answer.output if "NCCL WARN" in line)[-3:]
    facts = answer.facts
    count = answer.facts.get("count", probes.COUNT)
    found = AllReduce(backend, len(devices), count, seconds=facts.get("seconds"), log=log)
    for name, kind in (("wrong", "wrong"), ("hang", "hang"), ("error", "raised")):
        if facts.get(name):
            return dataclasses.replace(found, kind=kind, error=facts[name])
    if answer.ended != "well":
        words = "" if answer.ended == "hang" else f": {answer.output[-1] if answer.output else ''}"
        error = f"{answer.how}, while {answer.stage}{words}"
        return dataclasses.replace(found, kind=answer.ended, error=error)
    return dataclasses.replace(found, ok=True)


def _versions(host: Host) -> list[Version]:
    """Return the table of versions, with their origins."""
    driver, libraries, found, nccl = host.driver, host.libraries, host.frameworks, host.libraries.nccl
    tensorflow = _and(found.tensorflow_path, "CPU build" if found.cuda_build is False else "")
    keras = _and(found.keras_path, f"backend {found.keras_backend}") if found.keras_path else found.keras_error
    cuda = _place(libraries.cuda_runtime, found.build_cuda and f"TensorFlow was built for {found.build_cuda}")
    cudnn = _place(libraries.cudnn, found.build_cudnn and f"TensorFlow was built for {found.build_cudnn}")
    origin = "NVML" if driver.version else "kernel module" if host.kernel_driver else "none found"
    serves = driver.cuda or libraries.driver_cuda
    by_nccl = _place(nccl, nccl.cuda and f"built with CUDA {nccl.cuda}")
    other = libraries.is_other_nccl
    return [
        Version("ncclsync", host.ncclsync, host.ncclsync_path),
        Version("Python", host.python, host.python_path),
        Version(
            "TensorFlow",
            found.tensorflow or _installed("tensorflow"),
            tensorflow or found.tensorflow_error or "no answer",
        ),
        Version("Keras", found.keras or _installed("keras"), keras or "no answer"),
        Version("CUDA", libraries.cuda_runtime.version, cuda),
        Version("cuDNN", libraries.cudnn.version, cudnn),
        Version("driver", driver.version or host.kernel_driver, _and(origin, serves and f"serves CUDA up to {serves}")),
        Version("NCCL", None, _place(nccl, f"another library with its calls, version {nccl.version}"))
        if other
        else Version("NCCL", nccl.version, by_nccl),
    ]


def _place(library: Library, more: str | None) -> str:
    return _and(library.path or "none found", more)


def _and(text: str | None, more: str | None) -> str:
    return ", ".join(filter(None, (text, more)))


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
