"""Find problems of the variables that are set, with remedies."""

import json
import os
from collections.abc import Callable, Iterator

from ncclsync.tools.doctor.facts import WARNING, Host, Problem

_TRUE = ("1", "true", "yes", "on")

# name, values that are a problem (None: any), their effect. The remedy is to unset them.
_SLOW = (
    ("NCCL_P2P_DISABLE", _TRUE, "turns off direct transfers between GPUs: all-reduce is far slower"),
    ("NCCL_P2P_LEVEL", ("loc", "0"), "turns off direct transfers between GPUs: all-reduce is slower"),
    ("NCCL_SHM_DISABLE", _TRUE, "sends through the network what cannot go from GPU to GPU"),
    ("NCCL_ALGO", None, "takes NCCL's choice of algorithm from it; one that does not fit is an error"),
    ("NCCL_PROTO", None, "takes NCCL's choice of protocol from it; the wrong one may corrupt data"),
    ("NCCL_MAX_NCHANNELS", ("1", "2"), "leaves all-reduce a part of its speed"),
    ("NCCL_MAX_CTAS", ("1", "2"), "leaves all-reduce a part of its speed"),
    ("NCCL_DEBUG", ("info", "trace", "abort"), "prints much on stdout, and TRACE is slow"),
    ("CUDA_LAUNCH_BLOCKING", _TRUE, "makes the host wait for every kernel"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", ("1",), "queues collectives behind other kernels"),
)
_FILES = ("NCCL_TOPO_FILE", "NCCL_CONF_FILE", "NCCL_GRAPH_FILE")


def _slow(host: Host) -> Iterator[Problem]:
    if not host.may_use_gpus:
        return
    for name, values, effect in _SLOW:
        value = host.variable(name)
        if value and (values is None or value.lower() in values):
            yield _problem(name, f"{name}={value} {effect}.", f"{_unset(host, name)}.")


def _nvls(host: Host) -> Iterator[Problem]:
    asked = host.frameworks.nvls_variable
    if asked is None or not host.may_use_gpus:
        return
    name = asked.partition("=")[0]
    text = f"{asked} asks for NVLS, whose sums differ from call to call, although op determinism is on."
    yield _problem(f"{name}-nvls", text, f"{_unset(host, name)}: NVLS is then kept out.")


def _interfaces(host: Host) -> Iterator[Problem]:
    """Find a setting that leaves no interface: ranks meet by one even within a host."""
    value = host.variable("NCCL_SOCKET_IFNAME")
    if not value or not host.may_use_gpus:
        return
    without, names = value.startswith("^"), value.lstrip("^=").split(",")
    exact = value.lstrip("^").startswith("=")
    named = {
        found for found in host.interfaces for name in names if (found == name if exact else found.startswith(name))
    }
    if not (set(host.interfaces) - named if without else named):
        text = f"NCCL_SOCKET_IFNAME={value} leaves no network interface of {', '.join(host.interfaces)}."
        yield _problem("NCCL_SOCKET_IFNAME", text, f"{_unset(host, 'NCCL_SOCKET_IFNAME')}, or name one.", host.severity)


def _files(host: Host) -> Iterator[Problem]:
    for name in _FILES:
        value = host.variable(name)
        if value and not os.path.isfile(value):
            text = f"{name} names a file that is not there: {value}."
            yield _problem(name, text, f"{_unset(host, name)}, or correct it.")


def _threads(host: Host) -> Iterator[Problem]:
    value = host.variable("OMP_NUM_THREADS")
    if value is None:
        return
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        text = f"Expected OMP_NUM_THREADS to be a number of threads. Received: {value!r}"
    elif int(first) > host.cores:
        text = f"OMP_NUM_THREADS={value} is more than the {host.cores} cores that this process may use."
    elif int(first) == 1 and host.cores > 1:
        text = f"OMP_NUM_THREADS=1 leaves OpenMP libraries one of {host.cores} cores."
    else:
        return
    yield _problem("OMP_NUM_THREADS", text, f"Unset it, or set OMP_NUM_THREADS={host.cores}.")


def _tensorflow(host: Host) -> Iterator[Problem]:
    if (host.variable("TF_USE_LEGACY_KERAS") or "").lower() in _TRUE:
        yield _problem(
            "TF_USE_LEGACY_KERAS",
            "TF_USE_LEGACY_KERAS makes tf.keras Keras 2, whose models nccl_parallel refuses.",
            "Unset it, or build models with keras instead of tf.keras.",
        )
    config = host.variable("TF_CONFIG")
    if config:
        try:
            cluster = json.loads(config).get("cluster", {})
            workers = sum(len(addresses) for addresses in cluster.values())
        except (ValueError, AttributeError, TypeError):
            workers = 0
        if workers > 1:
            yield _problem(
                "TF_CONFIG",
                f"TF_CONFIG describes {workers} tasks; towers wait for all of them.",
                "Start all tasks. To train in this process alone: Unset TF_CONFIG, or write processes=False.",
            )
    value = host.variable("TF_XLA_FLAGS") or ""
    if "tf_xla_auto_jit" in value and not value.rstrip().endswith(("=0", "=-1")):
        yield _problem(
            "TF_XLA_FLAGS",
            f"TF_XLA_FLAGS={value} lets XLA compile parts of any graph, with roundings of its own.",
            "Unset it; compile(jit_compile=True) decides for a model.",
        )


def _problem(name: str, text: str, remedy: str, severity: str = WARNING) -> Problem:
    return Problem(f"variable-{name}", text, remedy, severity)


def _unset(host: Host, name: str) -> str:
    source = next((one.source for one in host.variables if one.name == name), "environment")
    return f"Unset {name}" if source == "environment" else f"Remove {name} from {source}"


RULES: tuple[Callable[[Host], Iterator[Problem]], ...] = (_slow, _nvls, _interfaces, _files, _threads, _tensorflow)
