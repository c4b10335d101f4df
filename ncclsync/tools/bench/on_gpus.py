"""Run `bench exchange` and `overlap` on this process' GPUs, or on those of several processes.

exchange: a graph has several all-reduces of one small bucket in a row. The clock stops when its call returns, before
the GPUs have done their work. overlap: a step is timed as it is and without its exchanges, and the same buckets are
exchanged without a step. The compared graphs take turns.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ncclsync.communicator import AllReduce
from ncclsync.communicator.processes import find_process
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.costs.links import Cluster, Link
from ncclsync.ops import group_ops, host_ops
from ncclsync.parallel import nccl_parallel
from ncclsync.tools.bench.fit import StepParts
from ncclsync.tools.bench.results import Result, Row, compare
from ncclsync.tools.bench.turns import BenchError, Spread, about, device_seconds, joined, progress, take_turns
from ncclsync.tools.plan.commands import LAUNCH_US
from ncclsync.tools.plan.measurement import traced_traffic
from ncclsync.tools.plan.prediction import Compute, Workload, step_seconds
from ncclsync.training.loop import Towers

OPS, EMPTY = "ops", "empty graph"  # sides of exchange

_IN_A_ROW = 20  # exchanges in one graph
_ELEMENTS = 1024
_CALLS = 5  # of a turn

# As in convolutional networks, layers near the input have few weights. With equal layers and 5 buckets, at most 4/5 of
# an exchange as long as back-propagation could be hidden: the last bucket leaves when back-propagation ends.
_WIDTHS = (*[128] * 4, *[256] * 12)
_LAYERS_OF_BUCKET = 3  # wide layers
_OVERLAP_ROWS = 256  # of a tower: enough for the products to outweigh the update
_OVERLAP_STEPS = 3  # of a turn


def check_gpus(towers: int) -> int:
    """Check for a GPU for each tower, and for ncclsync's ops in TensorFlow; return this process' number of towers.

    Raises:
        BenchError: TensorFlow sees too few GPUs, or the towers cannot be divided among the processes.
        NcclSyncError: TensorFlow does not take the ops.
    """
    process = find_process()
    size = 1 if process is None else process.size
    here, rest = divmod(towers, size)
    if rest:
        raise BenchError(f"Expected as many towers in each of {size} processes. Received: {towers} in all")
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus < here:
        words = "tests/virtual_gpus/run.py runs a command as on a host with several"
        raise BenchError(f"Expected {here} GPUs that TensorFlow sees. Received: {gpus}. {words}")
    host_ops.register()
    return here


def on(device: str, tensor: Any) -> Any:
    """Return a tensor's copy on a device, such as "GPU:0"."""
    with tf.device(f"/{device}"):
        return tf.identity(tensor)


def bench_exchange(given: argparse.Namespace) -> Result:
    """Time an exchange for every number of towers: the host's time, per tower."""
    counts = [check_gpus(towers) for towers in given.towers]
    rows: list[Row] = []
    for towers, here in zip(given.towers, counts, strict=True):
        show = about(f"{towers} towers")
        show("joining GPUs")
        with Towers(here) as own:
            rows += _time_exchanges(towers, own, given.rounds, show)
    return Result("exchange", "s", tuple(rows))


def _time_exchanges(towers: int, own: Towers, rounds: int, show: Callable[[str], None]) -> list[Row]:
    communicator, devices = own.communicator, own.devices

    def passed(*tensors: Any) -> list[Any]:
        return [on(device, tensor) for device, tensor in zip(devices, tensors, strict=True)]

    sent = passed(*(tf.fill([_ELEMENTS], float(rank)) for rank in communicator.ranks))
    specs = [tf.TensorSpec([_ELEMENTS], tf.float32)] * len(devices)

    def in_a_row(*tensors: Any) -> Sequence[Any]:
        column, turns = passed(*tensors), group_ops.Turns([], str)
        for _ in range(_IN_A_ROW):
            (column,) = group_ops.group_exchange([column], communicator, [AllReduce((), (), "max")], turns)
        return column

    # As a step's graph is built.
    graphs = {name: tf.compat.v1.wrap_function(body, specs) for name, body in ((OPS, in_a_row), (EMPTY, passed))}

    def host_seconds(graph: Callable) -> float:
        seconds = 0.0
        for _ in range(_CALLS):
            tf_compat.sync_devices()
            began = time.perf_counter()
            results = graph(*sent)
            seconds += time.perf_counter() - began
            del results
        tf_compat.sync_devices()
        return seconds / (_CALLS * _IN_A_ROW * towers)

    show("first calls")
    wrong: dict[str, dict[str, Any]] = {}
    for name, graph in graphs.items():
        expected = [towers - 1 if name != EMPTY else rank for rank in communicator.ranks]
        results = [result.numpy() for result in graph(*sent)]
        wrong[name] = {"wrong": sum(int(np.sum(a != b)) for a, b in zip(results, expected, strict=True))}
        if communicator.peers is not None:
            wrong[name] = joined(communicator.peers, wrong[name])
    timers = {name: functools.partial(host_seconds, graph) for name, graph in graphs.items()}
    case = {"towers": towers, "in_a_row": _IN_A_ROW, "size_bytes": 4 * _ELEMENTS}
    return compare(case, take_turns(timers, rounds, show), wrong)


def bench_overlap(given: argparse.Namespace) -> Result:
    """Time a step with and without its exchanges, and the exchanges alone."""
    here = check_gpus(given.towers)
    bucket_bytes = 4 * _LAYERS_OF_BUCKET * _WIDTHS[-1] ** 2 + 1024  # with the bytes that the loss sends
    model = nccl_parallel(towers=here, bucket_bytes=bucket_bytes)(_layers)(given.xla)
    batch = tuple(tf.zeros([given.towers * _OVERLAP_ROWS, width]) for width in (_WIDTHS[0], _WIDTHS[-1]))
    with model.towers as towers:
        parts = StepParts(model, batch)
        progress("first steps")
        for variant in ("whole", "local"):
            parts.seconds(variant, 2)
        sizes = [sum(spec.shape.num_elements() * spec.dtype.size for spec in one.specs) for one in parts.buckets]
        timers: dict[str, Callable[[], float]] = {
            "step": functools.partial(parts.seconds, "whole", _OVERLAP_STEPS),
            "without": functools.partial(parts.seconds, "local", _OVERLAP_STEPS),
            "exchange": _exchange_timer(towers, sizes),
        }
        seconds = take_turns(timers, given.rounds, progress)
        leads = [parts.lead() for _ in range(given.rounds)]
    turns = zip(seconds["without"], seconds["exchange"], seconds["step"], strict=True)
    figures: dict[str, Any] = {
        "without_s": Spread.of(seconds["without"]),
        "exchange_s": Spread.of(seconds["exchange"]),
        "hidden": Spread.of([(without + exchange - step) / exchange for without, exchange, step in turns]),
        "called_s": Spread.of([called for called, _ in leads]),
        "ended_s": Spread.of([ended for _, ended in leads]),
        "bucket_bytes": sizes,
    }
    if given.link is not None:
        predicted_s = _predicted_s(given.link, given.towers, figures["without_s"].median, bucket_bytes)
        ratios = Spread.of([predicted_s / measured_s for measured_s in seconds["step"]])
        figures |= {"predicted_s": predicted_s, "predicted_ratio": ratios}
    case = {"model": f"dense, {len(_WIDTHS)} layers", "towers": given.towers}
    case |= {"batch_size": given.towers * _OVERLAP_ROWS, "xla": given.xla}
    return Result("overlap", "s", (Row(case, "ncclsync", Spread.of(seconds["step"]), {}, figures),))


def _predicted_s(link: Any, towers: int, without_s: float, bucket_bytes: int) -> float:
    """Return the seconds of a step that `plan` predicts, given those of a step without exchanges.

    The latency of `link` is that of a whole collective, as in `run.py --link`; `plan` takes the latency of a hop.
    """
    batch = tuple(np.zeros([_OVERLAP_ROWS, width], "float32") for width in (_WIDTHS[0], _WIDTHS[-1]))
    options = {"bucket_bytes": bucket_bytes, "processes": False}
    stages, _ = traced_traffic(lambda: _layers(False), options, batch, _OVERLAP_ROWS)
    hop = Link(link.bandwidth, link.latency_s / (2 * (towers - 1)))
    cluster = Cluster(hop, hop, towers, LAUNCH_US / 1e6)
    return step_seconds(Workload(Compute(without_s, 0.0), stages), towers, _OVERLAP_ROWS, cluster)


def _layers(jit_compile: bool) -> Any:
    layers = [keras.layers.Dense(width, use_bias=False) for width in _WIDTHS]
    model = keras.Sequential([keras.Input(_WIDTHS[:1]), *layers])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    return model


def _exchange_timer(towers: Any, sizes: list[int]) -> Callable[[], float]:
    """Return a timer of so many all-reduces, one launch after another."""
    sends = [[on(device, tf.zeros([size // 4])) for device in towers.devices] for size in sizes]  # [B][N]

    def exchange() -> list[Any]:
        turns = group_ops.Turns([], str)
        received: list[Any] = []
        for column in sends:
            placed = [on(device, tensor) for device, tensor in zip(towers.devices, column, strict=True)]
            collectives = [AllReduce((), (), "sum")]
            received += group_ops.group_exchange([placed], towers.communicator, collectives, turns)[0]
        return [tensor[:1] for tensor in received]

    timer = functools.partial(device_seconds, tf.compat.v1.wrap_function(exchange, []))
    timer()
    return timer
