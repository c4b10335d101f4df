"""Describe links between GPUs by latency α and bandwidth β, and the clusters that are made of them."""

import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Link:
    """Describe a full-duplex link: a message of S bytes arrives α + S/β after it was sent.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19(1), 2005, section 3: the cost model.

    Attributes:
        bandwidth: β, in bytes per second and direction.
        latency_s: α.
    """

    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Describe hosts of GPUs: a link of each GPU's within its host, and one of each host's between them.

    Attributes:
        between: of a host, all its network cards together; of a GPU, if a host has one.
        within: of each GPU to the others of its host; None if a host has one GPU.
        gpus_per_host: the last host may have fewer.
        launch_s: what a host needs to launch an exchange, for each of its GPUs.
    """

    between: Link
    within: Link | None = None
    gpus_per_host: int = 1
    launch_s: float = 0.0

    @property
    def inner(self) -> Link:
        """Return the link within a host; nothing passes it where a host has one GPU."""
        return self.within or self.between

    def launching_s(self, exchanges: int, gpus: int) -> float:
        """Return what a host needs to launch so many exchanges, one after another."""
        return exchanges * min(gpus, self.gpus_per_host) * self.launch_s

    def hosts(self, gpus: int) -> int:
        """Return how many hosts have so many GPUs."""
        return -(-gpus // self.gpus_per_host)

    def narrowest(self, gpus: int) -> float:
        """Return the bandwidth that limits a ring or tree through so many GPUs, in bytes per second."""
        within = self.inner.bandwidth
        return within if gpus <= self.gpus_per_host else min(within, self.between.bandwidth)


# α: NCCL's own estimate of a hop with its LL128 protocol in a ring, `hwLat` in src/graph/tuning.cc: NVLink
# 1.9 µs, PCIe 2.5, network 4.0. β: bus bandwidths of large all-reduces, measured by nccl-tests.
_NVLINK = Link(370e9, 1.9e-6)  # 8 × H100 SXM, in a ring: NVIDIA/nccl-tests issue 212
_PCIE = Link(28e9, 2.5e-6)  # 8 × RTX 5090: NVIDIA/nccl issue 1639
_IB = Link(24e9, 4.0e-6)  # one card of 200 Gbit/s: NVIDIA/nccl issue 412

CLUSTERS = {
    "nvlink": Cluster(Link(8 * _IB.bandwidth, _IB.latency_s), _NVLINK, 8),  # a card for each GPU
    "pcie": Cluster(_IB, _PCIE, 8),  # a card for each host
    "ib": Cluster(_IB),
}


def parse_link(text: str, names: Iterable[str] = ()) -> Link:
    """Return the link that "GB/s,µs" says, such as "370,1.9"; 1 GB is 10⁹ bytes.

    Raises:
        ValueError: it is not two numbers, above 0 and from 0; it names what else may be written, `names`.
    """
    try:
        bandwidth, latency = (float(part) for part in text.split(","))
    except ValueError:
        bandwidth = latency = math.nan
    link = Link(bandwidth * 1e9, latency * 1e-6)
    if not (0 < link.bandwidth < math.inf and 0 <= link.latency_s < math.inf):
        others = "".join(f"{name}, " for name in names)
        raise ValueError(f"Expected {others}GB/s,µs, such as 370,1.9, above 0 and from 0. Received: {text}")
    return link


def cluster_of(link: str, between: Link | None = None, gpus_per_host: int | None = None, gpus: int = 1) -> Cluster:
    """Return the cluster that `--link`, `--between` and `--gpus-per-host` describe.

    Args:
        link: one of `CLUSTERS`, or "GB/s,µs" of each GPU's link: of all, or within hosts if these are given.
        between: of a host, instead of the named cluster's.
        gpus_per_host: instead of the named cluster's.
        gpus: how many it is asked for, at most.

    Raises:
        ValueError: `link` is neither; for a link in numbers `between` is given without `gpus_per_host`, or is not given
            though there are several hosts of several GPUs; or they are given for "ib", which has one GPU per host.
    """
    if link in CLUSTERS:
        named = CLUSTERS[link]
        if named.within is None and (between is not None or gpus_per_host is not None):
            raise ValueError(
                "Expected --between and --gpus-per-host with hosts of several GPUs. "
                f"Received: --link {link}, one GPU per host"
            )
        within, between, count = named.within, between or named.between, gpus_per_host or named.gpus_per_host
    else:
        within = parse_link(link, CLUSTERS)
        if between is not None and gpus_per_host is None:
            raise ValueError("Expected --gpus-per-host, for a --link in numbers with --between. Received: none")
        if between is None and gpus_per_host is not None and 1 < gpus_per_host < gpus:
            raise ValueError(
                f"Expected --between, the link between hosts: {gpus} GPUs are several hosts of {gpus_per_host}. "
                "Received: none"
            )
        between, count = between or within, gpus_per_host or 1
    return Cluster(between, within if count > 1 else None, count)
