"""Examine all processes that a launcher has started: each alone, and all together."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ncclsync.communicator.joining import peers_of
from ncclsync.communicator.peers import Peers
from ncclsync.communicator.processes import Process
from ncclsync.errors import NcclSyncError, install
from ncclsync.tools.doctor import probes
from ncclsync.tools.doctor.examination import examine
from ncclsync.tools.doctor.facts import ERROR, WARNING, AllReduce, Problem, ProcessFacts, Report, from_json
from ncclsync.tools.doctor.problems import apart, by_severity
from ncclsync.tools.processes import tell_of

_NAMED = 3  # processes that a message names
_QUESTIONS = 10  # that another process may ask itself meanwhile, each within its limit

# Settings that must be equal: NCCL's, and settings that change numbers, except the names of a host's own resources.
_ALIKE = re.compile(
    "NCCL_|NCCLSYNC_|(KERAS_BACKEND|NVIDIA_TF32_OVERRIDE|TF_DETERMINISTIC_OPS|TF_ENABLE_ONEDNN_OPTS|(TF_)?XLA_FLAGS)$"
)
_OF_A_HOST = re.compile(
    "NCCLSYNC_(CUDART|CUDA_DRIVER|NCCL)_LIBRARY|NCCL_(CONF|GRAPH|TOPO)_FILE|NCCL_DEBUG(_FILE|_SUBSYS)?"
    "|NCCL_(HOSTID|IB_HCA|SOCKET_IFNAME)|NCCLSYNC_(JOINED|PROGRESS)"
)

# Each process traces the program by these packages: its exchanges and bits must be equal.
_DECISIVE = ("ncclsync", "TensorFlow", "Keras")
_PIP = "Install the same on all hosts: pip install '%s=={}'"
_REMEDIES = {
    **{name: _PIP % name.lower() for name in _DECISIVE},
    "ncclsync": f"Install ncclsync {{}} on all hosts, from the same clone: {install()}",
    "Python": "Start all processes with Python {}.",
    "NCCL": "Install the same on all hosts, pip install 'nvidia-nccl-cu12=={}', or name one by NCCLSYNC_NCCL_LIBRARY.",
    "driver": "Install the NVIDIA driver {} on all hosts.",
}


def examine_all(process: Process, timeout_s: float) -> Report | None:
    """Examine this process, and in process 0 judge the findings of all. Collective.

    Each question may take `timeout_s`, and so may the all-reduce over all processes.

    Returns:
        The report, in process 0; None in the others.
    """
    try:
        joined = peers_of(process, timeout_s)
    except NcclSyncError as error:
        if process.rank > 0:
            tell_of(error, process, "python -m ncclsync doctor")
            return None
        # Process 0 examines itself alone.
        report = examine(timeout_s)
        return judged(report, [*report.problems, apart(str(error))])
    report = examine(timeout_s)
    problems = [*report.problems]
    everyone: Sequence[ProcessFacts] = ()
    joint = None
    try:
        told = joined.exchange(
            dataclasses.asdict(_facts(joined, report)), "what doctor has found", _QUESTIONS * timeout_s
        )
        everyone = [from_json(ProcessFacts, facts) for facts in told]  # perhaps of another version of ncclsync
        problems = [*merged(everyone), *differences(everyone)]
        backends = {one.backend for one in everyone}
        if len(backends) == 1:
            joint = _reduce(joined, report, backends == {"nccl"}, timeout_s)
            outcomes = joined.exchange((joint.error, joint.kind), "the all-reduce over all processes", 2 * timeout_s)
            words, kind = next((one for one in outcomes if one[1]), ("", ""))
            joint = dataclasses.replace(joint, ok=not kind, error=words, kind=kind)
    except NcclSyncError as error:
        remedy = "Look at what that process has printed; run doctor there by itself."
        problems = [*problems, Problem("processes-lost", str(error), remedy, ERROR)]
    if process.rank > 0:
        return None
    return judged(report, problems, everyone, joint)


def judged(
    report: Report, problems: Sequence[Problem], everyone: Sequence[ProcessFacts] = (), joint: AllReduce | None = None
) -> Report:
    """Return the report of process 0 with the findings and problems of all, and the all-reduce over all."""
    if joint is not None and not joint.ok:
        by_tcp = "process 0's name means: MASTER_ADDR"
        way = "NCCL takes: NCCL_SOCKET_IFNAME" if joint.backend == "nccl" else by_tcp
        remedy = f"Look whether the hosts reach each other by the network that {way}."
        text = f"The all-reduce over all {len(everyone)} processes fails: {joint.error.rstrip('.')}."
        problems = [*problems, Problem(f"joint-all-reduce-{joint.kind}", text, remedy, ERROR)]
    ordered = tuple(by_severity(problems))
    return dataclasses.replace(report, problems=ordered, processes=tuple(everyone), joint=joint)


def _facts(joined: Peers, report: Report) -> ProcessFacts:
    versions = {one.component: one.version for one in report.versions}
    choice = report.host.choice
    values = {one.name: one.value for one in reversed(report.host.variables)}  # the environment precedes a file
    return ProcessFacts(
        joined.rank,
        joined.hosts[joined.rank],
        choice.backend,
        choice.devices,
        versions,
        {name: value for name, value in sorted(values.items()) if must_be_alike(name)},
        report.problems,
    )


def must_be_alike(name: str) -> bool:
    """Return whether a variable must have the same value in all processes."""
    return bool(_ALIKE.match(name)) and not _OF_A_HOST.fullmatch(name)


def _reduce(joined: Peers, report: Report, by_nccl: bool, timeout_s: float) -> AllReduce:
    """All-reduce known numbers over the towers of all processes, by NCCL or by TCP in host memory. Collective."""
    devices = [int(name.split(":")[1]) for name in report.host.choice.devices] or [0]
    found: dict[str, Any] = {"backend": "nccl" if by_nccl else "cpu", "ranks": len(devices)}
    probes.reduce_known(lambda **facts: found.update(facts), found["backend"], devices, timeout_s, joined)
    if found.get("kind") == "wrong":
        found["error"] = f"{joined.name(joined.rank)}: {found['error']}"
    return from_json(AllReduce, {**found, "ok": "kind" not in found})


def merged(everyone: Sequence[ProcessFacts]) -> Iterator[Problem]:
    """Yield the problems of all processes, each once; a problem of only some processes names them."""
    having: dict[Problem, list[ProcessFacts]] = collections.defaultdict(list)
    for one in everyone:
        for problem in dict.fromkeys(one.problems):
            having[problem].append(one)
    for problem, who in having.items():
        if len(who) < len(everyone):
            problem = dataclasses.replace(problem, text=f"{_names(who)}: {problem.text}")
        yield problem


def differences(everyone: Sequence[ProcessFacts]) -> Iterator[Problem]:
    """Yield a problem for each version and each setting that differs between processes, and for the backend."""
    by_nccl = any(one.backend == "nccl" for one in everyone)
    remedy = "Let all processes see GPUs, or none: CUDA_VISIBLE_DEVICES=''."
    # Rows of: name, value in each process, what None means ("": the process is left out, such as one without a backend,
    # which has an error of its own), effect, remedy, whether it is an error.
    rows = [("backend", [one.backend for one in everyone], "", "", remedy, True)]
    for component in dict.fromkeys(name for one in everyone for name in one.versions):
        versions = [one.versions.get(component) for one in everyone]
        remedy = _REMEDIES.get(component, f"Install {component} {{}} on all hosts.")
        decisive = component in _DECISIVE or (component == "NCCL" and by_nccl)
        rows.append((component, versions, "none", "", remedy, decisive))
    for name in sorted({name for one in everyone for name in one.settings}):
        values = [one.settings.get(name) for one in everyone]
        of_nccl = name.startswith(("NCCL_", "NCCLSYNC_"))
        effect = ", NCCL's ranks may then wait for each other" if of_nccl else ", their numbers may then differ"
        remedy = f"Set {name} alike for all, by mpirun -x {name}, or unset it on all hosts."
        rows.append((name, values, "not set", effect, remedy, of_nccl and by_nccl))
    for name, values, nothing, effect, remedy, is_error in rows:
        groups: dict[str, list[ProcessFacts]] = collections.defaultdict(list)
        for one, value in zip(everyone, values, strict=True):
            if value is not None or nothing:
                groups[nothing if value is None else value].append(one)
        if len(groups) > 1:
            said = "; ".join(f"{value} in {_names(who)}" for value, who in groups.items())
            known = next(value for value in values if value is not None)
            what = "The backend" if name == "backend" else name
            text = f"{what} differs between processes{effect}: {said}."
            yield Problem(f"processes-{name}", text, remedy.format(known), ERROR if is_error else WARNING)


def _names(who: Sequence[ProcessFacts]) -> str:
    named = [f"process {one.rank} on {one.host}" for one in who[:_NAMED]]
    more = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
    return f"{', '.join(named)}{more}"
