"""Examine a host: gather the facts, by questions to separate processes, and judge them."""

import dataclasses
import importlib
import os
import pathlib
import platform
import re
import shutil
import socket
import sys

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
from ncclsync.tools.doctor.libraries import installed
from ncclsync.tools.doctor.problems import find_problems

CPU_RANKS = 4  # of the known-answer all-reduce where there is no GPU
_CHATTER = re.compile(r"^[IW]\d{4} |^WARNING: All log messages before")
_WARNINGS = re.compile(r"^[WEF]\d{4} ")  # TensorFlow's log: a warning, an error, a fatal one


def examine(timeout_s: float) -> Report:
    """Find out whether training would run on this host, and what prevents it; each question may take `timeout_s`."""
    environ = dict(os.environ)
    troubles: list[Trouble] = []

    def ask(question: str, **more: str) -> probes.Answer:
        answer = probes.ask(question, timeout_s, {**environ, **more})
        if answer.ended != "well":
            lines = (line.strip() for line in reversed(answer.output) if not _CHATTER.match(line))
            troubles.append(Trouble(question, answer.stage, answer.how, next(filter(None, lines), "")))
        return answer

    driver, libraries = ask("driver"), ask("libraries")
    # With the whole log, even if the user hides a part, and with no more GPU memory than the question needs.
    frameworks, choice = _frameworks(ask("frameworks", TF_CPP_MIN_LOG_LEVEL="0", TF_FORCE_GPU_ALLOW_GROWTH="true"))
    no_libraries = Libraries(nccl=Library(error="the process that loaded the libraries did not end well"))
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    host = Host(
        python=platform.python_version(),
        python_path=sys.executable,
        ncclsync=importlib.import_module("ncclsync").__version__,
        ncclsync_path=str(pathlib.Path(__file__).parents[2]),
        driver=from_json(Driver, driver.facts) if driver.facts else Driver(error="NoAnswer", detail=driver.how),
        present=host_gpus.count_gpus(),
        kernel_driver=host_gpus.kernel_driver(),
        libraries=from_json(Libraries, libraries.facts) if libraries.facts else no_libraries,
        frameworks=frameworks,
        choice=choice,
        variables=environment.read_variables(environ),
        shm_bytes=shm and shm.total,
        shm_free_bytes=shm and shm.free,
        cores=len(os.sched_getaffinity(0)),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        troubles=tuple(troubles),
    )
    host = dataclasses.replace(host, all_reduce=_all_reduce(host, timeout_s, environ))
    return Report(host, tuple(_versions(host)), tuple(find_problems(host)))


def _frameworks(answer: probes.Answer) -> tuple[Frameworks, Choice]:
    log = tuple(line for line in answer.output if _WARNINGS.match(line))
    found = dataclasses.replace(from_json(Frameworks, answer.facts), log=log)
    if "reason" not in answer.facts:
        why = found.tensorflow_error or found.keras_error or found.ncclsync_error or found.refused or answer.how
        return found, Choice(reason=f"none: {why}")
    # Without Keras there is no model to decorate.
    if found.keras_error or found.keras_backend != "tensorflow":
        return found, Choice(reason=f"none: {found.keras_error or f'Keras runs on {found.keras_backend}'}")
    return found, from_json(Choice, answer.facts)


def _all_reduce(host: Host, timeout_s: float, environ: dict[str, str]) -> AllReduce:
    """Reduce where training would, or on the GPUs that only TensorFlow's or Keras' problems keep from training."""
    backend, devices = "cpu", [*range(CPU_RANKS)]
    if host.choice.backend == "nccl":
        backend, devices = "nccl", [int(name.split(":")[1]) for name in host.choice.devices]
    elif host.choice.backend is None and host.visible_gpus and host.libraries.nccl.version:
        backend, devices = "nccl", list(range(len(host.visible_gpus)))
    answer = probes.ask_all_reduce(backend, devices, timeout_s, {"NCCL_DEBUG": "WARN", **environ})
    log = tuple(line for line in answer.output if "NCCL WARN" in line)[-3:]
    error, kind = answer.failure, answer.facts.get("kind") or answer.ended.removeprefix("well")
    if kind == "crash":
        error += f": {answer.output[-1] if answer.output else ''}"
    found = {"backend": backend, "ranks": len(devices), "count": probes.COUNT, **answer.facts}
    return from_json(AllReduce, {**found, "ok": not error, "error": error, "kind": kind, "log": log})


def _versions(host: Host) -> list[Version]:
    """Return the rows of the table of versions."""
    driver, libraries, found, nccl = host.driver, host.libraries, host.frameworks, host.libraries.nccl
    serves = host.served_cuda
    origin = "NVML" if driver.version else "kernel module" if host.kernel_driver else "none found"
    nccl_version, nccl_more = nccl.version, nccl.cuda and f"built with CUDA {nccl.cuda}"
    if libraries.is_other_nccl:
        nccl_version, nccl_more = None, f"another library with its calls, version {nccl.version}"
    tensorflow = found.tensorflow_path or found.tensorflow_error or "no answer"
    keras = found.keras_path or found.keras_error or "no answer", found.keras_path and f"backend {found.keras_backend}"
    is_cpu = "CPU build" if found.cuda_build is False else ""
    rows = [
        ("ncclsync", host.ncclsync, host.ncclsync_path, ""),
        ("Python", host.python, host.python_path, ""),
        ("TensorFlow", found.tensorflow or installed("tensorflow"), tensorflow, is_cpu),
        ("Keras", found.keras or installed("keras"), *keras),
        ("CUDA", libraries.cuda_runtime.version, *_origin(libraries.cuda_runtime, found.build_cuda)),
        ("cuDNN", libraries.cudnn.version, *_origin(libraries.cudnn, found.build_cudnn)),
        ("driver", driver.version or host.kernel_driver, origin, serves and f"serves CUDA up to {serves}"),
        ("NCCL", nccl_version, nccl.path or "none found", nccl_more),
    ]
    return [Version(name, version, ", ".join(filter(None, source))) for name, version, *source in rows]


def _origin(library: Library, built_for: str | None) -> tuple[str, str]:
    return library.path or "none found", f"TensorFlow was built for {built_for}" if built_for else ""
