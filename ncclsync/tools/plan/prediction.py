"""Describe a training step; predict steps, efficiency and break-even batches on N GPUs, and when one GPU is better.

Every GPU computes as if alone, and one channel exchanges the messages in order. With overlap a message leaves as
soon as back-propagation has made it, as in PyTorch's DistributedDataParallel and Horovod; without overlap, when its
stage has ended. Measured systems lie between the two: the tests hold these predictions to

- Horovod's 512 GPUs: Sergeev and Del Balso, arXiv:1802.05799, and docs/benchmarks.rst of horovod/horovod;
- ImageNet in an hour, 8 to 256 GPUs: Goyal et al., arXiv:1706.02677;
- TensorFlow on 8 GPUs: tensorflow/docs_src/performance/benchmarks.md, 2017;
- ResNet-50 from 8 to 32 GPUs: Oneflow-Inc/DLPerf, 2020: two of six frameworks, the others lose up to 9 points more;
- bus bandwidths over several hosts: NVIDIA/nccl issue 412, NVIDIA/nccl-tests issue 29.

The host launches ahead of its GPUs, so that launching costs nothing until it takes longer than all else. Not counted:
GPUs that wait for a slower one, feeding, and compute slowed by communication; on 8 GPUs by NVLink that is 3 to 8 points
of the efficiency: NVIDIA/DeepLearningExamples, ResNet-50.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from ncclsync.costs.collective_time import Estimate, collective
from ncclsync.costs.links import Cluster

GOOD_EFFICIENCY, POOR_EFFICIENCY = 0.9, 0.5
_LARGEST_BATCH = 1 << 24  # of a GPU; a larger batch cannot help


@dataclasses.dataclass(frozen=True)
class Message:
    """Describe a bucket that all GPUs exchange."""

    kind: str  # of `ops.Collective`, such as "all_reduce"
    ready: float  # the share of its stage's compute after which it can be sent, 0 to 1
    size_bytes: float  # of a GPU's part
    bytes_per_sample: float = 0.0  # additional bytes for each sample of a GPU's batch, if rows are gathered

    def bytes_of(self, batch: float) -> float:
        """Return one GPU's bytes with `batch` samples per GPU."""
        return self.size_bytes + batch * self.bytes_per_sample


@dataclasses.dataclass(frozen=True)
class Stage:
    """Describe a part of the step after which all messages must have arrived."""

    share: float  # of the step's compute; those of all stages add up to 1
    messages: tuple[Message, ...] = ()  # in the order in which they are exchanged


@dataclasses.dataclass(frozen=True)
class Compute:
    """Hold the seconds of a step on one GPU by its batch: fixed_s + batch · per_sample_s."""

    fixed_s: float
    per_sample_s: float

    def of(self, batch: float) -> float:
        """Return the seconds of a step on `batch` samples."""
        return self.fixed_s + batch * self.per_sample_s


def fit_compute(seconds: Mapping[int, float]) -> Compute:
    """Fit a line without negative parts to the seconds of steps by batch size.

    Args:
        seconds: by batch size; if there is one size, all time counts as proportional to it.

    Raises:
        ValueError: there are none, or a time or a batch is not positive.
    """
    if not seconds or not all(b > 0 and 0 < s < math.inf for b, s in seconds.items()):
        raise ValueError(f"Expected positive seconds of positive batches. Received: {dict(seconds)}")
    if len(seconds) == 1:
        ((batch, one),) = seconds.items()
        return Compute(0.0, one / batch)
    # Relative to each time, so that a small batch counts as much as a large batch.
    parts = np.array([(1 / s, batch / s) for batch, s in seconds.items()])
    fixed_s, per_sample_s = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)[0].tolist()
    # The best non-negative line is the free optimum if that is not negative, otherwise it is on one of the axes.
    fixed_only_s, per_sample_only_s = (parts.sum(axis=0) / (parts**2).sum(axis=0)).tolist()
    if per_sample_s < 0:
        return Compute(fixed_only_s, 0.0)
    return Compute(0.0, per_sample_only_s) if fixed_s < 0 else Compute(fixed_s, per_sample_s)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Describe a step of training."""

    compute: Compute  # of the whole step on one GPU
    stages: tuple[Stage, ...]  # in order

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages of all stages."""
        return tuple(message for stage in self.stages for message in stage.messages)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Describe a step on N GPUs, each with the batch of a single GPU."""

    gpus: int  # N
    step_s: float  # seconds of a step, with overlap
    sequential_s: float  # without overlap
    communication_s: float  # of all messages together
    launching_s: float  # the host's time to launch them; no step is shorter
    overlapped: float  # the share of `communication_s` during compute, with overlap
    algorithms: tuple[str, ...]  # of the messages, the longest message's first
    crossing_bytes: float  # the bytes that leave each host in a step; as many enter it; 0 on one host
    efficiency: float  # one GPU's step over `step_s`: 1 is linear scaling
    sequential_efficiency: float  # without overlap
    # The smallest batch per GPU whose efficiency is `GOOD_EFFICIENCY`; None without such a batch
    good_batch: int | None
    winning_batch: int | None  # the smallest global batch that N GPUs finish before one GPU; None without such a batch
    one_gpu_because: str = ""  # why one GPU is the better choice; "" if it is not

    @property
    def speedup(self) -> float:
        """Return samples per second over those of one GPU."""
        return self.gpus * self.efficiency


def predict(workload: Workload, gpus: int, batch: int, cluster: Cluster) -> Prediction:
    """Predict a step on at least 2 GPUs, given the workload and the batch of each.

    Raises:
        ValueError: there are fewer GPUs, or the batch has no sample.
    """
    if batch < 1:
        raise ValueError(f"Expected a batch of at least 1 sample per GPU. Received: {batch}")
    compute = workload.compute

    def efficiency(size: int) -> float:
        return compute.of(size) / step_seconds(workload, gpus, size, cluster)

    def wins(size: int) -> bool:
        """Return whether N GPUs finish their batches before one GPU has finished all of them, beyond rounding."""
        return step_seconds(workload, gpus, size, cluster) < compute.of(gpus * size) * (1 - 1e-9)

    estimates = sorted(_estimates(workload, gpus, batch, cluster), key=lambda e: -e.seconds)
    communication_s = sum(estimate.seconds for estimate in estimates)
    step_s, sequential_s = (step_seconds(workload, gpus, batch, cluster, overlap=one) for one in (True, False))
    exposed_s = step_s - compute.of(batch)
    winning = _smallest(wins)
    found = Prediction(
        gpus,
        step_s,
        sequential_s,
        communication_s,
        cluster.launching_s(len(estimates), gpus),
        max(0.0, 1 - exposed_s / communication_s) if communication_s else 1.0,
        tuple(dict.fromkeys(estimate.algorithm for estimate in estimates)),
        sum(estimate.crossing_bytes for estimate in estimates),
        efficiency(batch),
        compute.of(batch) / sequential_s,
        _smallest(lambda size: efficiency(size) >= GOOD_EFFICIENCY),
        None if winning is None else gpus * winning,
    )
    latency_s = sum(estimate.latency_s for estimate in estimates)
    return dataclasses.replace(found, one_gpu_because=_because(found, workload, batch, latency_s, wins(batch)))


def step_seconds(workload: Workload, gpus: int, batch: int, cluster: Cluster, *, overlap: bool = True) -> float:
    """Return the seconds of a step, at least the host's time to launch its messages.

    Stage by stage, one channel serves the messages in order. Source of the overlap: Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
    """
    now = channel_s = 0.0
    estimates = iter(_estimates(workload, gpus, batch, cluster))
    for stage in workload.stages:
        compute_s = stage.share * workload.compute.of(batch)
        for message in stage.messages:
            ready_s = now + (message.ready if overlap else 1.0) * compute_s
            channel_s = max(channel_s, ready_s) + next(estimates).seconds
        now = max(now + compute_s, channel_s)
    return max(now, cluster.launching_s(len(workload.messages), gpus))


def _estimates(workload: Workload, gpus: int, batch: int, cluster: Cluster) -> list[Estimate]:
    return [collective(one.kind, one.bytes_of(batch), gpus, cluster) for one in workload.messages]


def _smallest(holds: Callable[[int], bool]) -> int | None:
    """Return the smallest batch from which on a condition holds; None if there is none."""
    if not holds(_LARGEST_BATCH):
        return None
    return 1 + bisect.bisect_left(range(1, _LARGEST_BATCH + 1), True, key=holds)


def _because(found: Prediction, workload: Workload, batch: int, latency_s: float, wins: bool) -> str:
    """Return why one GPU is the better choice; "" if it is not. `latency_s` is that of all messages."""
    compute, gpus = workload.compute, found.gpus
    compute_s, total_s = compute.of(batch), found.communication_s
    reasons = []
    if not wins:
        alone = f"for the same {gpus * batch} samples it takes {compute.of(gpus * batch) * 1e3:.4g} ms"
        reasons.append(f"{alone}, and {gpus} GPUs {found.step_s * 1e3:.4g} ms")
    if found.efficiency < POOR_EFFICIENCY:
        times = f"{gpus} GPUs would be {found.speedup:.3g} times as fast"
        reasons.append(f"{times}, an efficiency of {found.efficiency:.2g}")
    if not reasons:
        return ""
    beside = f"beside {compute_s * 1e3:.3g} ms of compute"
    if compute.fixed_s > compute_s / 2 and not wins:
        cause = "Too little compute per sample: a step takes one GPU hardly longer for a larger batch "
        cause += f"({compute.fixed_s * 1e3:.3g} of {compute_s * 1e3:.3g} ms do not depend on it)"
    elif found.step_s <= found.launching_s:
        needs = f"{found.step_s * 1e3:.3g} ms to launch {len(workload.messages)} exchanges"
        cause = f"Launch-bound: the host needs {needs}, {beside}"
    elif latency_s > total_s / 2:
        cause = f"Latency-bound: {latency_s * 1e3:.3g} ms of {total_s * 1e3:.3g} ms of communication would be "
        cause += f"spent on empty messages too, {beside}"
    else:
        sent = sum(message.bytes_of(batch) for message in workload.messages)
        cause = f"Bandwidth-bound: {sent / 1e6:.3g} MB of each GPU take {total_s * 1e3:.3g} ms, {beside}"
    return f"{' and '.join(reasons)}. {cause}"
