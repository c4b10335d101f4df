"""Estimate how long a collective takes, in closed form: rings, and double binary trees between hosts.

Checked against a simulation of every chunk on every link (`tests/support/plan_simulator.py`).
"""

import dataclasses
import math

from ncclsync.costs.links import Cluster

# Bytes that travel through a tree at a time. NCCL takes up to 256 KiB, and less with its
# protocols for smaller messages.
TREE_CHUNK_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Hold the time of a collective, and the algorithm that takes it.

    Attributes:
        seconds: latency and transfer.
        latency_s: what an empty message would take by the same algorithm.
        algorithm: "ring" or "tree".
        crossing_bytes: what leaves a host meanwhile, and as much enters it; of a GPU, where a host has one. 0: all
            GPUs are on one host.
    """

    seconds: float
    latency_s: float
    algorithm: str
    crossing_bytes: float


def ring_all_reduce(size_bytes: float, gpus: int, cluster: Cluster) -> Estimate:
    """Estimate a ring all-reduce of `size_bytes` per GPU: 2(n-1)·α + 2(n-1)/n · S/β.

    A chunk makes 2(n-1) hops, nearly twice around. This adds up what it waits for on its way and what the
    narrowest link carries: exact where all links are alike; with two kinds of links both overlap in part,
    and this is an upper bound.

    Source: Thakur, Rabenseifner and Gropp, 2005, section 4.5 (reduce-scatter and all-gather by rings);
    that hops count by kind of link is from NCCL, `ncclTopoTuneModel` in src/graph/tuning.cc.
    """
    return _ring(2, 2 * (gpus - 1) / gpus * size_bytes, gpus, cluster)


def tree_all_reduce(size_bytes: float, gpus: int, cluster: Cluster) -> Estimate:
    """Estimate a double binary tree's all-reduce: 2·log₂(n)·α + 2·S/β, and the filling of the pipeline.

    The GPUs of a host are a chain, at whose end the host joins the trees between hosts. Each tree carries
    half of the message up and down, so that a link carries up to 2·S; less in trees of two or three. Each
    level of the way adds the transfer of a chunk, which is passed on when it is complete.

    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", Parallel Computing 35(12), 2009; in NCCL since 2.4: Jeaugey, "Massively Scale Your Deep Learning
    Training with NCCL 2.4", NVIDIA, 2019.
    """
    hosts, chain = cluster.hosts(gpus), min(gpus, cluster.gpus_per_host) - 1
    levels = math.ceil(math.log2(hosts))
    latency_s = 2 * _tree_latency(gpus, cluster)
    chunk_bytes = min(TREE_CHUNK_BYTES, size_bytes / 2)
    sent = min(2, hosts / 2) * size_bytes if hosts > 1 else 0.0
    carry_s = max(min(2, chain) * size_bytes / cluster.inner.bandwidth, sent / cluster.between.bandwidth)
    fill_s = 2 * chunk_bytes * (chain / cluster.inner.bandwidth + levels / cluster.between.bandwidth)
    return Estimate(latency_s + carry_s + fill_s, latency_s, "tree", sent)


def collective(kind: str, size_bytes: float, gpus: int, cluster: Cluster) -> Estimate:
    """Estimate a collective, by the faster algorithm where there are two.

    Args:
        kind: of `ops.Collective`: "all_reduce"; "all_gather" or "stack", once around a ring; "broadcast" or
            "reduce", one way through a tree.
        size_bytes: of one GPU's part.
        gpus: n, at least 2.
        cluster: where they are.

    Raises:
        ValueError: there are fewer than 2 GPUs.
    """
    if gpus < 2:
        raise ValueError(f"Expected at least 2 GPUs. Received: {gpus}")
    if kind == "all_reduce":
        both = [estimate(size_bytes, gpus, cluster) for estimate in (ring_all_reduce, tree_all_reduce)]
        return min(both, key=lambda estimate: estimate.seconds)
    if kind in ("all_gather", "stack"):
        return _ring(1, (gpus - 1) * size_bytes, gpus, cluster)
    return _sent("tree", size_bytes, _tree_latency(gpus, cluster), gpus, cluster)


def _sent(algorithm: str, size_bytes: float, latency_s: float, gpus: int, cluster: Cluster) -> Estimate:
    """Estimate a collective in which each GPU sends on so many bytes; what a host's last GPU sends leaves the host."""
    crossing = size_bytes if cluster.hosts(gpus) > 1 else 0.0
    return Estimate(latency_s + size_bytes / cluster.narrowest(gpus), latency_s, algorithm, crossing)


def _ring(rounds: int, size_bytes: float, gpus: int, cluster: Cluster) -> Estimate:
    """Estimate `rounds` times n-1 hops, from where in the ring most lead between hosts, of so many bytes in all."""
    hops, hosts = rounds * (gpus - 1), cluster.hosts(gpus)
    between = min(rounds * hosts, hops) if hosts > 1 else 0
    latency_s = between * cluster.between.latency_s + (hops - between) * cluster.inner.latency_s
    return _sent("ring", size_bytes, latency_s, gpus, cluster)


def _tree_latency(gpus: int, cluster: Cluster) -> float:
    """Return the latency of one way: through the chain of a host and the levels of a tree."""
    levels, chain = math.ceil(math.log2(cluster.hosts(gpus))), min(gpus, cluster.gpus_per_host) - 1
    return levels * cluster.between.latency_s + chain * cluster.inner.latency_s
