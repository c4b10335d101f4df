"""Show doctor's report on one screen: the facts and problems of `facts.Report`, laid out by rich."""

from collections.abc import Iterator
from typing import Any

import rich.box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ncclsync.tools.doctor.facts import ERROR, AllReduce, Gpu, Report

_FAILURES = {"wrong": "wrong numbers", "hang": "hangs", "crash": "ends its process", "raised": "fails"}
_LONGEST = 60  # characters of a variable's value
_LEGEND = (
    "NVn: n NVLinks. By PCIe: PIX one switch, PXB several, PHB the CPU, NODE within a NUMA node, SYS between "
    "sockets. ✗: no peer-to-peer access; ?: not known."
)


def render(report: Report) -> Group:
    """Return the report for rich: the verdict, the facts, and the problems with their remedies."""
    style = "bold green" if report.healthy and not report.problems else "bold yellow"
    parts: list[Any] = [Text(report.summary, style=style if report.healthy else "bold red")]
    parts += [Text(""), _versions(report), *_processes(report), *_gpus(report), *_links(report)]
    parts += [Text(""), *_checks(report), *_variables(report), *_problems(report)]
    return Group(*parts)


def _table(*heads: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _versions(report: Report) -> Table:
    table = _table("", "version", "from")
    for one in report.versions:
        table.add_row(one.component, Text(one.version or "-"), Text(one.source))
    return table


def _processes(report: Report) -> Iterator[Any]:
    """Yield a table of all processes that a launcher has started."""
    if not report.processes:
        return
    table = _table("process", "host", "devices", "versions")
    for one in report.processes:
        versions = (
            version if name in version else f"{name} {version}" for name, version in one.versions.items() if version
        )
        table.add_row(str(one.rank), Text(one.host), Text(", ".join(one.devices) or "none"), Text(", ".join(versions)))
    yield Text("")
    yield table


def _gpus(report: Report) -> Iterator[Any]:
    driver = report.host.driver
    yield Text("")
    if not driver.gpus:
        why = f" (NVML: {driver.error}, {driver.detail})" if driver.error else ""
        count = report.host.gpu_count
        yield Text(f"{count} GPU(s), of which NVML says nothing{why}" if count else f"No GPU on this machine{why}")
        return
    table = _table("GPU", "name", "memory", "in use", "compute capability", "PCI bus", "")
    for gpu in driver.gpus:
        table.add_row(
            str(gpu.index),
            Text(gpu.name or "-"),
            _gibibytes(gpu.memory_bytes),
            _gibibytes(gpu.used_bytes),
            gpu.compute_capability or "-",
            gpu.pci_bus_id or "-",
            _remark(gpu),
        )
    yield table


def _links(report: Report) -> Iterator[Any]:
    driver = report.host.driver
    if len(driver.gpus) < 2:
        return
    between = {link.gpus: link for link in driver.links}
    table = _table("link", *(str(gpu.index) for gpu in driver.gpus))
    for one in driver.gpus:
        row = []
        for other in driver.gpus:
            a, b = sorted((one.index, other.index))
            link = between.get((a, b))
            if a == b:
                row.append("·")
            elif link is None:
                row.append("?")
            else:
                access = {"ok": "", None: " ?"}.get(link.p2p, " ✗")
                row.append(f"{link.path or '?'}{access}")
        table.add_row(str(one.index), *row)
    yield Text("")
    yield table
    yield Text(_LEGEND, style="dim")


def _checks(report: Report) -> Iterator[Text]:
    choice, found = report.host.choice, report.host.all_reduce
    yield Text(f"@nccl_parallel: {choice.reason}")
    if found is not None:
        yield _outcome(f"Known-answer all-reduce, {found.backend} backend", found)
    if report.joint is not None:
        way = "NCCL" if report.joint.backend == "nccl" else "MPI"
        yield _outcome(f"Known-answer all-reduce over all {len(report.processes)} processes, by {way}", report.joint)
    if report.host.frameworks.nvls and (choice.backend == "nccl" or report.host.gpu_count):
        yield Text(f"NVLS, sums within the NVSwitch that differ from call to call: {report.host.frameworks.nvls}")
    size, free = map(_gibibytes, (report.host.shm_bytes, report.host.shm_free_bytes))
    yield Text(f"/dev/shm: {size}, {free} of it free. Cores: {report.host.cores}")


def _outcome(what: str, found: AllReduce) -> Text:
    what += f", {found.ranks} rank{'s' * (found.ranks != 1)} × {found.count} numbers: "
    if found.ok:
        return Text(f"{what}right, in {(found.seconds or 0) * 1e3:.1f} ms")
    return Text(f"{what}{_FAILURES[found.kind]}; see below", style="red")


def _variables(report: Report) -> Iterator[Any]:
    yield Text("")
    if not report.host.variables:
        yield Text("No environment variable is set that matters.")
        return
    table = _table("variable", "value", "effect")
    for one in report.host.variables:
        value = one.value if len(one.value) <= _LONGEST else f"{one.value[: _LONGEST - 1]}…"
        source = "" if one.source == "environment" else f" ({one.source})"
        table.add_row(Text(one.name), Text(value or "(empty)"), Text(f"{one.effect}{source}"))
    yield table


def _problems(report: Report) -> Iterator[Text]:
    yield Text("")
    if not report.problems:
        yield Text("No problems found.", style="green")
    for one in report.problems:
        yield Text(f"{one.severity}: {one.text}", style="red" if one.severity == ERROR else "yellow")
        yield Text(f"  Remedy: {one.remedy}")


def _remark(gpu: Gpu) -> str:
    remarks = (gpu.error, "MIG" if gpu.mig else None, "prohibited" if gpu.prohibited else None)
    return ", ".join(filter(None, remarks))


def _gibibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"
