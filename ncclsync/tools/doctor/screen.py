"""Lay doctor's report, a `facts.Report`, out on one screen, by rich."""

import functools
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.text import Text

from ncclsync.tools.doctor.facts import ERROR, AllReduce, Gpu, Report, Variable
from ncclsync.towers.printed import table

_LONGEST = 60  # characters of a variable's value
_LEGEND = (
    "NVn: n NVLinks. By PCIe: PIX one switch, PXB several, PHB the CPU, NODE within a NUMA node, SYS between "
    "sockets. ✗: no peer-to-peer access; ?: not known."
)
_table = functools.partial(table, show_edge=False)


def render(report: Report) -> Group:
    """Return the report for rich: the verdict, the facts, and the problems with their remedies."""
    style = "bold green" if report.healthy and not report.problems else "bold yellow"
    versions = ((one.component, one.version or "-", one.source) for one in report.versions)
    parts: list[Any] = [Text(report.summary, style=style if report.healthy else "bold red"), ""]
    parts += [_table(("", "version", "from"), versions), "", *_processes(report), *_gpus(report), *_links(report)]
    variables: Any = "No environment variable is set that matters."
    if report.host.variables:
        variables = _table(("variable", "value", "effect"), map(_variable, report.host.variables))
    parts += ["", *_checks(report), "", variables, "", *_problems(report)]
    return Group(*parts)


def _processes(report: Report) -> Iterator[Any]:
    """Yield a table of all processes that a launcher has started."""
    rows = []
    for one in report.processes:
        known = ((name, version) for name, version in one.versions.items() if version)
        versions = (version if name in version else f"{name} {version}" for name, version in known)
        rows.append((str(one.rank), one.host, ", ".join(one.devices) or "none", ", ".join(versions)))
    if rows:
        yield from (_table(("process", "host", "devices", "versions"), rows), "")


def _gpus(report: Report) -> Iterator[Any]:
    driver, count = report.host.driver, report.host.gpu_count
    if driver.gpus:
        heads = ("GPU", "name", "memory", "in use", "compute capability", "PCI bus", "")
        yield _table(heads, map(_gpu, driver.gpus))
    else:
        why = f" (NVML: {driver.error}, {driver.detail})" if driver.error else ""
        yield Text(f"{count} GPU(s), of which NVML says nothing{why}" if count else f"No GPU on this machine{why}")


def _gpu(gpu: Gpu) -> tuple[str, ...]:
    memory = _gibibytes(gpu.memory_bytes), _gibibytes(gpu.used_bytes)
    remarks = (gpu.error, "MIG" if gpu.mig else None, "prohibited" if gpu.prohibited else None)
    names = (gpu.compute_capability or "-", gpu.pci_bus_id or "-", ", ".join(filter(None, remarks)))
    return (str(gpu.index), gpu.name or "-", *memory, *names)


def _links(report: Report) -> Iterator[Any]:
    numbers = [gpu.index for gpu in report.host.driver.gpus]
    between = {link.gpus: link for link in report.host.driver.links}

    def cell(one: int, other: int) -> str:
        link = between.get((min(one, other), max(one, other)))
        if one == other or link is None:
            return "·" if one == other else "?"
        access = {"ok": "", None: " ?"}.get(link.p2p, " ✗")
        return f"{link.path or '?'}{access}"

    if len(numbers) > 1:
        rows = ([str(one), *(cell(one, other) for other in numbers)] for one in numbers)
        yield from ("", _table(["link", *map(str, numbers)], rows), Text(_LEGEND, style="dim"))


def _checks(report: Report) -> Iterator[Text]:
    host, joint = report.host, report.joint
    yield Text(f"@nccl_parallel: {host.choice.reason}")
    if host.all_reduce is not None:
        yield _outcome(f"Known-answer all-reduce, {host.all_reduce.backend} backend", host.all_reduce)
    if joint is not None:
        way = "NCCL" if joint.backend == "nccl" else "TCP"
        yield _outcome(f"Known-answer all-reduce over all {len(report.processes)} processes, by {way}", joint)
    if host.frameworks.nvls and host.may_use_gpus:
        yield Text(f"NVLS, sums within the NVSwitch that differ from call to call: {host.frameworks.nvls}")
    size, free = map(_gibibytes, (host.shm_bytes, host.shm_free_bytes))
    yield Text(f"/dev/shm: {size}, {free} of it free. Cores: {host.cores}")


def _outcome(what: str, found: AllReduce) -> Text:
    what += f", {found.ranks} rank{'s' * (found.ranks != 1)} × {found.count} numbers: "
    if found.ok:
        taken = f"; NCCL has taken {found.taken_bytes / 2**20:.0f} MiB of each GPU" if found.taken_bytes else ""
        return Text(f"{what}right, in {(found.seconds or 0) * 1e3:.1f} ms{taken}")
    return Text(f"{what}{found.failure.removeprefix('gives ')}; see below", style="red")


def _variable(one: Variable) -> tuple[str, ...]:
    value = one.value if len(one.value) <= _LONGEST else f"{one.value[: _LONGEST - 1]}…"
    source = "" if one.source == "environment" else f" ({one.source})"
    return one.name, value or "(empty)", f"{one.effect}{source}"


def _problems(report: Report) -> Iterator[Text]:
    if not report.problems:
        yield Text("No problems found.", style="green")
    for one in report.problems:
        yield Text(f"{one.severity}: {one.text}", style="red" if one.severity == ERROR else "yellow")
        yield Text(f"  Remedy: {one.remedy}")


def _gibibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
