"""Show the predictions of `plan`: a row for each number of GPUs, their basis in words, and when one GPU is better."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ncclsync.costs.links import Cluster, Link
from ncclsync.tools.bench.results import Result, Row, significant, size_text, time_text
from ncclsync.tools.bench.turns import Spread
from ncclsync.tools.plan.prediction import (
    POOR_EFFICIENCY,
    Message,
    Prediction,
    Stage,
    Workload,
    fit_compute,
    predict,
    step_seconds,
)


@dataclasses.dataclass(frozen=True)
class Found:
    """Hold the measured, or given, step on one GPU."""

    batch_size: int  # of each GPU
    seconds: Mapping[int, Spread]  # of steps, by batch size
    origin: str  # of the seconds, in words
    stages: tuple[Stage, ...]  # of the step, with their messages
    conditional: bool  # whether some messages are sent only in certain steps

    def workload(self, quartile: str) -> Workload:
        """Return the workload at a quartile of the seconds: "q1", "median" or "q3"."""
        seconds = {batch: getattr(spread, quartile) for batch, spread in self.seconds.items()}
        return Workload(fit_compute(seconds), self.stages)

    def spread(self, value: Callable[[Workload], float]) -> Spread:
        """Return the spread of a workload's value over the quartiles of the measured steps."""
        median, q1, q3 = (value(self.workload(quartile)) for quartile in ("median", "q1", "q3"))
        return Spread(median, q1, q3, min(spread.samples for spread in self.seconds.values()))


def result_of(model: str, link: str, gpus: Sequence[int], cluster: Cluster, found: Found) -> Result:
    """Predict steps on so many GPUs, with notes on the basis of the prediction; `link` names the cluster."""
    workload, batch = found.workload("median"), found.batch_size
    case = {"model": model, "batch_size": batch, "link": link}
    compute = workload.compute
    measured: dict[str, Any] = {
        "gpus": 1,
        "samples_per_s": batch / compute.of(batch),
        "measured_s": {str(size): spread for size, spread in found.seconds.items()},
        "fixed_s": compute.fixed_s,
        "per_sample_s": compute.per_sample_s,
        "compute_from": found.origin,
        "cluster": cluster,
        "stages": workload.stages,
    }
    rows = [Row(case, "1", found.spread(lambda one: one.compute.of(batch)), {}, measured)]
    predictions = [predict(workload, count, batch, cluster) for count in gpus]
    for one in predictions:
        step = functools.partial(step_seconds, gpus=one.gpus, batch=batch, cluster=cluster)
        figures = dataclasses.asdict(one)
        del figures["step_s"]
        figures |= {
            "speedup": one.speedup,
            "samples_per_s": one.gpus * batch / one.step_s,
            "exchanged_bytes": sum(message.bytes_of(batch) for message in workload.messages),
            "buckets": len(workload.messages),
            "better": "one GPU" if one.one_gpu_because else f"{one.gpus} GPUs",
        }
        rows.append(Row(case, str(one.gpus), found.spread(step), {}, figures))
    notes = _notes(cluster, found, workload, predictions)
    return Result("plan", "s", tuple(rows), tuple(notes))


def _notes(cluster: Cluster, found: Found, workload: Workload, predictions: list[Prediction]) -> Iterator[str]:
    compute, several = workload.compute, [one for one in predictions if cluster.hosts(one.gpus) > 1]
    for one in predictions:
        if one.one_gpu_because:
            yield f"{one.gpus} GPUs: one GPU is the better choice: {one.one_gpu_because}."
    for one in predictions:
        if not one.one_gpu_because and one.sequential_efficiency < POOR_EFFICIENCY:
            yield (
                f"{one.gpus} GPUs: only with overlap; without it they would be "
                f"{significant(one.gpus * one.sequential_efficiency)} times as fast as one, an efficiency below "
                f"{POOR_EFFICIENCY:.0%}."
            )
    parts = f"{time_text(compute.fixed_s)} and {time_text(compute.per_sample_s)} per sample"
    if len(found.seconds) == 1:
        parts = f"{time_text(compute.per_sample_s)} per sample (known of one batch size: taken as proportional)"
    yield f"Compute: {found.origin}. A step on one GPU takes {parts}."
    yield f"Links: {cluster_text(cluster)}."
    if crossing := [one for one in several if one.crossing_bytes]:
        yield from _crossings(cluster, found.batch_size, workload.messages, crossing)
    yield (
        "Overlap: a bucket leaves as soon as back-propagation has made it. Without: when its part of the "
        f"step has ended. Launching takes the host {cluster.launch_s * 1e6:g} µs for each bucket and GPU of it, ahead "
        "of the GPUs. Not counted: feeding, waiting for slower GPUs."
    )
    if any(message.bytes_per_sample for message in workload.messages):
        yield "Some buckets gather rows, as of embeddings: they grow with the batch, and with N."
    if found.conditional:
        yield "Some buckets travel in certain steps only (as with accumulation); here in every one."
    for one in several:
        rows = one.gpus * found.batch_size
        yield (
            f"{one.gpus} GPUs: a process on each host reads all {rows} rows of a batch; of a Shuffled or a Local the "
            f"{-(-rows // cluster.hosts(one.gpus))} of its own GPUs."
        )
    if several:
        yield "Between hosts ncclsync waits for its GPUs at each exchange: this is what the links would allow."


def _crossings(
    cluster: Cluster, batch_size: int, messages: Sequence[Message], crossing: Sequence[Prediction]
) -> Iterator[str]:
    """Yield notes on the bytes that cross hosts, and on how NCCL arranges that."""
    exchanged = size_text(sum(message.bytes_of(batch_size) for message in messages))
    kinds = collections.Counter(message.kind.replace("_", "-") for message in messages)
    what = " and ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in kinds.items())
    yield f"Between hosts, in a step: {what} of {exchanged} in all."
    for one in crossing:
        crossing_s = one.crossing_bytes / cluster.between.bandwidth
        yield (
            f"{one.gpus} GPUs are {cluster.hosts(one.gpus)} hosts: {size_text(one.crossing_bytes)} leave each, and as "
            f"many enter it, at {cluster.between.bandwidth / 1e9:g} GB/s in {time_text(crossing_s)}; "
            f"by {' and '.join(one.algorithms)}."
        )
    ring, tree, how = "a ring through all hosts", "two binary trees, whose nodes are the hosts", ""
    if cluster.within is not None:
        ring = "a ring passes through all GPUs of a host before it goes on to the next host"
        tree = "the GPUs of a host are a chain, at whose end it is a node of two binary trees of hosts"
        how = ", hierarchically"
    ways = {"ring": ring, "tree": tree}
    named = [way for name, way in ways.items() if any(name in one.algorithms for one in crossing)]
    yield f"How, by NCCL{how}: {'; '.join(named)}."


def cluster_text(cluster: Cluster) -> str:
    """Return a cluster in words, such as "hosts of 8 GPUs by 28 GB/s, 2.5 µs; each host by 24 GB/s, 4 µs"."""
    if cluster.within is None:
        return f"each GPU by {_link_text(cluster.between)}"
    return (
        f"hosts of {cluster.gpus_per_host} GPUs by {_link_text(cluster.within)}, each host by "
        f"{_link_text(cluster.between)}"
    )


def _link_text(link: Link) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency_s * 1e6:g} µs"
