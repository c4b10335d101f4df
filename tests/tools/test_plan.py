"""`plan`'s predictions: against a simulation of every chunk, and against what was measured and published."""

import itertools
import random

import plan_simulator as simulator
import pytest

from ncclsync.costs.collective_time import TREE_CHUNK_BYTES, collective, ring_all_reduce, tree_all_reduce
from ncclsync.costs.links import CLUSTERS, Cluster, Link, cluster_of, parse_link
from ncclsync.tools.bench.turns import Spread
from ncclsync.tools.plan.prediction import Compute, Message, Stage, Workload, fit_compute, predict, step_seconds
from ncclsync.tools.plan.results import Found, result_of

ONE_LEVEL = Cluster(Link(24e9, 4e-6))
HOSTS = Cluster(Link(48e9, 4e-6), Link(130e9, 2e-6), 4)
SIZES = (64, 1e6, 20e6)


@pytest.mark.parametrize("gpus", [2, 3, 8, 13, 32])
def test_ring_is_what_a_simulation_takes(gpus):
    """Exactly on one level, within a host too; between hosts an upper bound, tight for a small message."""
    for size in SIZES:
        simulated = simulator.ring_all_reduce(size, gpus, ONE_LEVEL)
        assert ring_all_reduce(size, gpus, ONE_LEVEL).seconds == pytest.approx(simulated, rel=1e-9)
        ratio = ring_all_reduce(size, gpus, HOSTS).seconds / simulator.ring_all_reduce(size, gpus, HOSTS)
        assert 1 - 1e-9 <= ratio <= (1.01 if size == 64 or gpus <= 4 else 1.35)


@pytest.mark.parametrize("cluster", [ONE_LEVEL, HOSTS], ids=["one level", "hosts"])
@pytest.mark.parametrize("gpus", [2, 3, 4, 8, 16, 32])
def test_tree_is_what_a_simulation_takes(gpus, cluster):
    """Latency and bandwidth to 2%, whole hosts; in between, where chunks of both trees meet, to 30%."""
    for size, tolerance in zip(SIZES, (0.01, 0.3, 0.02), strict=True):
        chunk = min(TREE_CHUNK_BYTES, size / 2)
        simulated = simulator.tree_all_reduce(size, gpus, cluster, chunk)
        assert tree_all_reduce(size, gpus, cluster).seconds == pytest.approx(simulated, rel=tolerance)


def test_faster_algorithm_is_taken():
    """Trees for small messages on many GPUs, rings for large ones on few; neither is slower than it says."""
    assert collective("all_reduce", 1e3, 64, ONE_LEVEL).algorithm == "tree"
    assert collective("all_reduce", 100e6, 8, ONE_LEVEL).algorithm == "ring"
    for size, gpus in itertools.product(SIZES, (2, 8, 1024)):
        chosen = collective("all_reduce", size, gpus, HOSTS).seconds
        both = ring_all_reduce(size, gpus, HOSTS).seconds, tree_all_reduce(size, gpus, HOSTS).seconds
        assert chosen == min(both)


def test_other_collectives():
    """An all-gather sends each part to n-1 others; a broadcast goes down a tree; one GPU has no partner."""
    assert collective("all_gather", 24e6, 5, ONE_LEVEL).seconds == pytest.approx(4 * (4e-6 + 1e-3))
    assert collective("broadcast", 24e6, 8, ONE_LEVEL).seconds == pytest.approx(3 * 4e-6 + 1e-3)
    with pytest.raises(ValueError, match=r"Expected at least 2 GPUs. Received: 1"):
        collective("all_reduce", 1, 1, ONE_LEVEL)


@pytest.mark.parametrize("seed", range(20))
def test_overlap_is_what_a_simulation_takes(seed):
    """Random stages and buckets: one channel in order, behind a device that computes layer by layer."""
    rng = random.Random(seed)
    shares = [rng.random() for _ in range(rng.randint(1, 3))]
    stages = tuple(
        Stage(
            share / sum(shares),
            tuple(
                Message("all_reduce", rng.randrange(0, 1001) / 1000, 10 ** rng.uniform(2, 8))
                for _ in range(rng.randint(0, 6))
            ),
        )
        for share in shares
    )
    workload = Workload(Compute(1e-3, 1e-4), stages)
    compute_s = workload.compute.of(32)
    for overlap in (True, False):
        simulated = simulator.step(
            [
                (
                    stage.share * compute_s,
                    [
                        (one.ready if overlap else 1, collective(one.kind, one.size_bytes, 8, HOSTS).seconds)
                        for one in stage.messages
                    ],
                )
                for stage in stages
            ]
        )
        assert step_seconds(workload, 8, 32, HOSTS, overlap=overlap) == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(
    ("cluster", "gpus", "measured_gb_s"),
    [
        (CLUSTERS["nvlink"], 8, 370),  # NVIDIA/nccl-tests issue 212: 8 × H100, ring
        (CLUSTERS["pcie"], 8, 28),  # NVIDIA/nccl issue 1639: 8 × RTX 5090
        # NVIDIA/nccl issue 412: 12 hosts of 8 × A800, one HDR card each: 160 within, 24 between
        (Cluster(Link(24e9, 4e-6), Link(160e9, 1.9e-6), 8), 8, 160),
        (Cluster(Link(24e9, 4e-6), Link(160e9, 1.9e-6), 8), 96, 24),
        # NVIDIA/nccl-tests issue 29: 12.2 GB/s for each of the 4 EDR cards of a DGX-1, which "can get 48"
        (Cluster(Link(4 * 12.2e9, 4e-6), Link(130e9, 1.9e-6), 8), 32, 48),
    ],
)
def test_published_bus_bandwidth(cluster, gpus, measured_gb_s):
    """At 8 GiB, as nccl-tests counts it, to 5%."""
    size = 8 << 30
    busbw = size / collective("all_reduce", size, gpus, cluster).seconds * 2 * (gpus - 1) / gpus
    assert busbw / 1e9 == pytest.approx(measured_gb_s, rel=0.05)


@pytest.mark.parametrize(
    ("name", "gpus", "measured_us"),
    [
        ("pcie", 8, 42.1),  # NVIDIA/nccl issue 1530: 8 × RTX 4090
        ("nvlink", 16, 47.6),  # NVIDIA/nccl issue 1244: 2 hosts of 8 × H20, a card each
    ],
)
def test_published_latency(name, gpus, measured_us):
    """Of 8 bytes, to 30%: launching the kernel is not counted."""
    assert collective("all_reduce", 8, gpus, CLUSTERS[name]).seconds * 1e6 == pytest.approx(measured_us, rel=0.3)


# Samples per second of one P100 with batches of 64, and millions of parameters.
# Source: tensorflow/docs_src/performance/benchmarks.md and keras.io/api/applications; the speed of ResNet-101
# is between those of ResNet-50 and -152 as its operations are (3.8, 7.6 and 11.3 · 10⁹: He et al.,
# arXiv:1512.03385, table 1).
P100 = {
    "Inception V3": (142, 23.9),
    "ResNet-101": (128.7, 44.7),
    "VGG-16": (154, 138.4),
    "ResNet-50": (219, 25.6),
    "ResNet-152": (91.8, 60.4),
}


def of_p100(name, batch, rate=None):
    """See `of_gpu`; `rate` instead of that of the table."""
    known, parameters = P100[name]
    return of_gpu(parameters, batch, rate or known)


def of_gpu(parameters, batch, rate):
    """Float32 gradients of so many millions in buckets of 25 MB, made evenly by the last two thirds of a step."""
    count = max(1, round(4 * parameters / 25))
    messages = tuple(
        Message("all_reduce", 1 / 3 + 2 / 3 * (i + 1) / count, 4e6 * parameters / count) for i in range(count)
    )
    return Workload(fit_compute({batch: batch / rate}), (Stage(1.0, messages),))


@pytest.mark.parametrize(
    ("name", "gpus", "published"),
    [
        ("Inception V3", 512, 0.90),
        ("ResNet-101", 512, 0.90),
        ("VGG-16", 512, 0.68),
        ("Inception V3", 128, 0.90),
        ("ResNet-101", 128, 0.90),
        ("VGG-16", 128, 0.79),
    ],
)
def test_published_horovod(name, gpus, published):
    """Hosts of 4 P100 with 25 Gbit/s: between no overlap and all of it; at 512 in the middle, to 5 points.

    Source: Sergeev and Del Balso, arXiv:1802.05799; docs/benchmarks.rst and README of horovod/horovod.
    """
    cluster = Cluster(Link(25e9 / 8, 5e-6), Link(10e9, 2.5e-6), 4)
    found = predict(of_p100(name, 64), gpus, 64, cluster)
    print(f"{name}, {gpus}: {published}; model {found.sequential_efficiency:.3f}, {found.efficiency:.3f}")
    assert found.sequential_efficiency < published < found.efficiency
    if gpus == 512:
        assert (found.sequential_efficiency + found.efficiency) / 2 == pytest.approx(published, abs=0.05)


def test_published_imagenet_in_an_hour():
    """ResNet-50 from 8 to 256 P100, 50 Gbit/s, 32 samples each (195 per second alone): about 90%.

    Source: Goyal et al., arXiv:1706.02677, section 5.5; see `P100` for one GPU's speed.
    """
    cluster = Cluster(Link(50e9 / 8, 5e-6), Link(20e9, 2e-6), 8)
    few, many = (predict(of_p100("ResNet-50", 32, rate=195), gpus, 32, cluster) for gpus in (8, 256))
    low, high = many.sequential_efficiency / few.sequential_efficiency, many.efficiency / few.efficiency
    print(f"0.9; model {low:.3f}, {high:.3f}")
    assert low < 0.9 < high


@pytest.mark.parametrize(("name", "samples_per_s"), [("Inception V3", 1131), ("ResNet-50", 1734), ("ResNet-152", 716)])
def test_published_tensorflow(name, samples_per_s):
    """8 P100 of a DGX-1 by PCIe, 64 samples each: to 2%; see `P100` for the source."""
    found = predict(of_p100(name, 64), 8, 64, Cluster(Link(10e9, 2.5e-6)))
    assert 8 * 64 / found.step_s == pytest.approx(samples_per_s, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "batch", "rate", "published"),
    [
        ("V100 FP32", 128, 412, 7.69),
        ("V100 mixed precision", 256, 1270, 7.48),
        ("A100 TF32", 256, 909, 7.70),
        ("A100 mixed precision", 256, 2375, 7.32),
    ],
)
def test_published_one_host(gpu, batch, rate, published):
    """ResNet-50 on 8 GPUs by NVLink: what is not counted (feeding, waiting) takes 3 to 8 points of the efficiency.

    Source: NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, TensorFlow 1.15
    with XLA and Horovod, images per second on a DGX-1 and a DGX A100.
    """
    within = 130e9 if gpu.startswith("V100") else 160e9  # of an A800, whose NVLinks are fewer
    found = predict(of_gpu(25.6, batch, rate), 8, batch, Cluster(Link(48e9, 4e-6), Link(within, 1.9e-6), 8))
    print(f"{gpu}: {published / 8:.3f}; model {found.sequential_efficiency:.3f}, {found.efficiency:.3f}")
    assert 0.03 < found.sequential_efficiency - published / 8 < 0.08


@pytest.mark.parametrize(
    ("framework", "rates", "below"),
    [
        ("OneFlow", (384.85, 2969.45, 11711.18), 0),
        ("PyTorch", (354.40, 2719.07, 10632.33), 0),
        ("TensorFlow 2.3", (321.80, 2458.74, 9418.44), 0.01),
        ("PaddlePaddle", (352.72, 2625.38, 9348.17), 0.08),
        ("MXNet, Horovod", (389.71, 2947.72, 10419.21), 0.06),
        ("TensorFlow 1.15, Horovod", (362.44, 2721.98, 9514.64), 0.09),
    ],
)
def test_published_hosts(framework, rates, below):
    """ResNet-50 from 8 to 32 V100, hosts of 8 with one card of 100 Gbit/s: two frameworks between no overlap and all.

    One is a point below that, three are up to 9. Source: Oneflow-Inc/DLPerf, dlperf_benchmark_test_report_v1.md: FP32,
    batches of 128 (MXNet: 96), images per second on 1, 8 and 32 GPUs. The links: see `test_published_bus_bandwidth`.
    """
    cluster = Cluster(Link(12.2e9, 4e-6), Link(130e9, 1.9e-6), 8)
    batch = 96 if framework.startswith("MXNet") else 128
    few, many = (predict(of_gpu(25.6, batch, rates[0]), gpus, batch, cluster) for gpus in (8, 32))
    low, high = many.sequential_efficiency / few.sequential_efficiency, many.efficiency / few.efficiency
    published = rates[2] / rates[1] / 4
    print(f"{framework}: {published:.3f}; model {low:.3f}, {high:.3f}")
    assert low - below < published < high
    assert below == 0 or published < low - below + 0.02


def test_what_crosses_hosts():
    """Of a ring what a GPU sends on, of a tree up and down once each; within a host nothing, and one GPU is a host."""
    for size, gpus in itertools.product(SIZES, (2, 4)):
        assert ring_all_reduce(size, gpus, HOSTS).crossing_bytes == 0
        assert tree_all_reduce(size, gpus, HOSTS).crossing_bytes == 0
        assert collective("broadcast", size, gpus, HOSTS).crossing_bytes == 0
    assert ring_all_reduce(8e6, 8, HOSTS).crossing_bytes == pytest.approx(14e6)
    assert ring_all_reduce(8e6, 8, ONE_LEVEL).crossing_bytes == pytest.approx(14e6)
    assert tree_all_reduce(8e6, 8, HOSTS).crossing_bytes == 8e6  # two hosts: half of each tree in each direction
    assert tree_all_reduce(8e6, 64, HOSTS).crossing_bytes == 16e6
    assert collective("all_gather", 1e6, 8, HOSTS).crossing_bytes == 7e6
    for gpus in (8, 64, 1024):
        estimate = collective("all_reduce", 1e8, gpus, HOSTS)
        assert estimate.seconds >= estimate.crossing_bytes / HOSTS.between.bandwidth


MB = Workload(Compute(1e-3, 2e-5), (Stage(0.8, (Message("all_reduce", 0.7, 25e6),)), Stage(0.2)))


def test_prediction_adds_up():
    """By hand: 25 MB on 8 GPUs by 28 GB/s and 2.5 µs, behind 0.7 of 0.8 of 1.64 ms."""
    found = predict(MB, 8, 32, CLUSTERS["pcie"])
    exchange_s, compute_s = 14 * 2.5e-6 + 14 / 8 * 25e6 / 28e9, 1.64e-3
    assert found.communication_s == pytest.approx(exchange_s)
    assert found.step_s == pytest.approx(0.56 * compute_s + exchange_s + 0.2 * compute_s)
    assert found.sequential_s == pytest.approx(compute_s + exchange_s)
    assert found.overlapped == pytest.approx(0.24 * compute_s / exchange_s)
    assert found.efficiency == pytest.approx(compute_s / found.step_s)
    assert found.speedup == pytest.approx(8 * found.efficiency)
    assert found.algorithms == ("ring",)


def test_what_a_process_reads():
    """All rows, or those of its host; of GPUs of one host there is one process."""
    found = Found(32, {32: Spread.of([8e-3])}, "as said", MB.stages, False)
    notes = result_of("model", "nvlink", [8, 24], CLUSTERS["nvlink"], found).notes
    words = "24 GPUs: a process on each host reads all 768 rows of a batch; of a Shuffled or a Local the 256 of its own"
    assert [words in note for note in notes if "a process" in note] == [True]


def test_break_even_batches_are_the_smallest():
    """One sample fewer per GPU, and the efficiency is missed, or one GPU is as fast."""
    for gpus, name in itertools.product((2, 8, 64), CLUSTERS):
        found = predict(MB, gpus, 32, CLUSTERS[name])
        at = predict(MB, gpus, found.good_batch, CLUSTERS[name])
        assert at.efficiency >= 0.9
        assert found.good_batch == 1 or predict(MB, gpus, found.good_batch - 1, CLUSTERS[name]).efficiency < 0.9
        each = found.winning_batch // gpus
        assert step_seconds(MB, gpus, each, CLUSTERS[name]) < MB.compute.of(gpus * each)
        if each > 1:
            assert step_seconds(MB, gpus, each - 1, CLUSTERS[name]) >= MB.compute.of(gpus * (each - 1))


def test_what_grows_with_the_batch_may_never_pay():
    """Rows that are gathered are sent for each sample, to each GPU: no batch is large enough."""
    rows = Workload(Compute(0, 1e-6), (Stage(1.0, (Message("all_gather", 1.0, 0, 1e6),)),))
    found = predict(rows, 8, 32, CLUSTERS["pcie"])
    assert (found.good_batch, found.winning_batch) == (None, None)
    assert found.communication_s == pytest.approx(7 * (2.5e-6 + 32e6 / 28e9))


def test_what_does_not_depend_on_the_batch_is_not_won():
    """All is overlapped, but one GPU takes all samples as fast; what is rounded off decides nothing."""
    for percent in range(1, 100):
        stages = (Stage(percent / 100, (Message("all_reduce", 0.0, 8),)), Stage(1 - percent / 100))
        found = predict(Workload(Compute(3e-3, 0), stages), 8, 32, CLUSTERS["nvlink"])
        assert found.efficiency == pytest.approx(1) and found.winning_batch is None
        assert "Too little compute per sample" in found.one_gpu_because


@pytest.mark.parametrize(
    ("compute", "size_bytes", "gpus", "reason"),
    [
        (Compute(0, 1e-6), 1e3, 64, "Latency-bound"),
        (Compute(0, 1e-5), 100e6, 8, "Bandwidth-bound: 100 MB of each GPU take 6.29 ms"),
        (Compute(5e-3, 1e-6), 5e6, 8, "Too little compute per sample"),
        (Compute(5e-3, 0), 0, 8, "for the same 256 samples it takes 5 ms, and 8 GPUs 5.035 ms"),
    ],
)
def test_one_gpu_is_the_better_choice(compute, size_bytes, gpus, reason):
    """With the reason; one that computes a thousand times as long is worth its links."""
    stages = (Stage(1.0, (Message("all_reduce", 1.0, size_bytes),)),)
    assert reason in predict(Workload(compute, stages), gpus, 32, CLUSTERS["pcie"]).one_gpu_because
    slower = Workload(Compute(0, 1000 * compute.of(32) / 32), stages)
    assert predict(slower, gpus, 32, CLUSTERS["pcie"]).one_gpu_because == ""


def test_fit_of_compute():
    """A line is found again; noise makes neither part negative; one size is taken as proportional."""
    line = Compute(2e-3, 1e-4)
    found = fit_compute({b: line.of(b) for b in (8, 16, 32)})
    assert (found.fixed_s, found.per_sample_s) == pytest.approx((2e-3, 1e-4))
    assert fit_compute({8: 1e-3, 32: 0.5e-3}).per_sample_s == 0
    assert fit_compute({8: 1e-3, 32: 8e-3}).fixed_s == 0
    for batch in range(1, 40):
        assert fit_compute({batch: 6.4e-3}) == Compute(0.0, pytest.approx(6.4e-3 / batch))
    with pytest.raises(ValueError, match="Expected positive seconds"):
        fit_compute({})


def test_links():
    """Names and numbers, and what is between hosts; the hosts of so many GPUs."""
    assert parse_link("370,2") == Link(370e9, 2e-6)
    assert cluster_of("24,4") == Cluster(Link(24e9, 4e-6))
    assert cluster_of("24,4", Link(3e9, 0), 4) == Cluster(Link(3e9, 0), Link(24e9, 4e-6), 4)
    assert cluster_of("pcie", gpus_per_host=4).gpus_per_host == 4
    assert cluster_of("nvlink", Link(3e9, 0)).between == Link(3e9, 0)
    assert [CLUSTERS["nvlink"].hosts(n) for n in (2, 8, 9, 64)] == [1, 1, 2, 8]
    for text in ("9,-1", "0,1", "inf,1", "9,nan", "9", "9,1,1", "fast,1"):
        with pytest.raises(ValueError, match=rf"Expected GB/s,µs, .* above 0 and from 0. Received: {text}"):
            parse_link(text)


def test_launching_bounds_a_step():
    """It costs nothing while the GPUs take longer; else a step takes as long as a host launches for all of its GPUs."""
    workload = Workload(
        Compute(0.0, 1e-3), (Stage(1.0, (Message("all_reduce", 0.5, 64), Message("all_reduce", 1, 64))),)
    )
    free, cheap, dear = (Cluster(Link(48e9, 4e-6), Link(130e9, 2e-6), 4, launch_s) for launch_s in (0, 1e-4, 1e-3))
    assert step_seconds(workload, 8, 1, cheap) == step_seconds(workload, 8, 1, free) < 2e-3
    assert step_seconds(workload, 8, 1, dear) == 2 * 4 * 1e-3
    assert step_seconds(workload, 3, 1, dear) == 2 * 3 * 1e-3
    predicted = predict(workload, 8, 1, dear)
    assert predicted.launching_s == predicted.step_s == predicted.sequential_s == 2 * 4 * 1e-3
    assert "aunch-bound: the host needs 8 ms to launch 2 exchanges" in predicted.one_gpu_because
