"""Run `bench overlap`: the share of the exchange that back-propagation hides, and the host's lead.

A step is timed as it is and without its exchanges, and the same buckets are exchanged without a step: in this process,
or in each of several.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from ncclsync.communicator.processes import find_process
from ncclsync.tools.bench.exchange import check_gpus, is_first, on
from ncclsync.tools.bench.results import STEP, TOWERS, Column, Result, Row, median_text, more, ratio_text, time_text
from ncclsync.tools.bench.turns import BenchError, Spread, device_timer, take_turns

BUCKETS = 5

# As in convolutional networks, layers near the input have few weights. With equal layers, an exchange as long as
# back-propagation could hide at most 1 - 1/BUCKETS of itself: the last bucket leaves when back-propagation ends.
_WIDTHS = (*[128] * 4, *[256] * 12)
_LAYERS_OF_BUCKET = 3  # wide layers
_ROWS = 256  # of a tower: enough for the products to outweigh the update
_STEPS = 3  # of a turn


def bench_overlap(given: argparse.Namespace, show: Callable[[str], None]) -> Result | None:
    """Time a step with and without its exchanges, and these alone; None but in the first of several processes."""
    show("importing TensorFlow")
    here = check_gpus(given.towers)
    import tensorflow as tf

    from ncclsync.parallel import nccl_parallel
    from ncclsync.tools.bench.split import StepParts

    bucket_bytes = 4 * _LAYERS_OF_BUCKET * _WIDTHS[-1] ** 2 + 1024  # with the bytes that the loss sends
    model = nccl_parallel(towers=here, bucket_bytes=bucket_bytes)(_dense)(given.xla)
    batch = tuple(tf.zeros([given.towers * _ROWS, width]) for width in (_WIDTHS[0], _WIDTHS[-1]))
    with model.towers as towers:
        parts = StepParts(model, batch)
        show("first steps")
        for variant in ("whole", "local"):
            parts.seconds(variant, 2)
        sizes = [_bytes_of(bucket) for bucket in parts.buckets]
        if len(sizes) != BUCKETS:
            raise BenchError(f"Expected {BUCKETS} buckets. Received: {len(sizes)}")
        timers: dict[str, Callable[[], float]] = {
            "step": functools.partial(parts.seconds, "whole", _STEPS),
            "without": functools.partial(parts.seconds, "local", _STEPS),
            "exchange": _exchange_timer(towers, sizes),
        }
        seconds = take_turns(timers, given.rounds, show)
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
    if not is_first(find_process()):
        return None
    if given.link is not None:
        predicted_s = _predicted_s(given.link, given.towers, figures["without_s"].median, bucket_bytes)
        figures |= {
            "predicted_s": predicted_s,
            "predicted_ratio": Spread.of([predicted_s / s for s in seconds["step"]]),
        }
    case = {"model": f"dense, {len(_WIDTHS)} layers", "towers": given.towers, "batch_size": given.towers * _ROWS}
    case["xla"] = given.xla
    return Result("overlap", "s", (Row(case, "ncclsync", Spread.of(seconds["step"]), {}, figures),))


def _predicted_s(link: Any, towers: int, without_s: float, bucket_bytes: int) -> float:
    """Return the seconds of a step that `plan` predicts, given a step without exchanges.

    Args:
        link: of `run.py`, whose latency is that of a whole collective; `plan` takes the latency of a hop.
        towers: N.
        without_s: measured seconds of a step without exchanges.
        bucket_bytes: of the model.
    """
    import numpy as np

    from ncclsync.parallel import nccl_parallel
    from ncclsync.program.links import Cluster, Link
    from ncclsync.tools.plan.commands import LAUNCH_US
    from ncclsync.tools.plan.measurement import traced_traffic
    from ncclsync.tools.plan.prediction import step_seconds
    from ncclsync.tools.plan.workload import Compute, Workload

    batch = tuple(np.zeros([_ROWS, width], "float32") for width in (_WIDTHS[0], _WIDTHS[-1]))
    model = nccl_parallel(towers=1, backend="cpu", bucket_bytes=bucket_bytes, processes=False)(_dense)(False)
    with model.towers:
        stages = traced_traffic(model, batch, _ROWS).stages
    hop = Link(link.bandwidth, link.latency_s / (2 * (towers - 1)))
    cluster = Cluster(hop, hop, towers, LAUNCH_US / 1e6)
    return step_seconds(Workload(Compute(without_s, 0.0), stages), towers, _ROWS, cluster)


def _dense(jit_compile: bool) -> Any:
    import keras

    layers = [keras.layers.Dense(width, use_bias=False) for width in _WIDTHS]
    model = keras.Sequential([keras.Input(_WIDTHS[:1]), *layers])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    return model


def _bytes_of(bucket: Any) -> int:
    return sum(spec.shape.num_elements() * spec.dtype.size for spec in bucket.specs)


def _exchange_timer(towers: Any, sizes: list[int]) -> Callable[[], float]:
    """Return a timer of so many all-reduces, one launch after another."""
    import tensorflow as tf

    from ncclsync.communicator import AllReduce
    from ncclsync.compat import tensorflow as tf_compat
    from ncclsync.ops import device_ops

    sends = [[on(device, tf.zeros([size // 4])) for device in towers.devices] for size in sizes]  # [B][N]

    def exchange() -> list[Any]:
        launched: list[Any] = []
        for column in sends:
            placed = [on(device, tensor) for device, tensor in zip(towers.devices, column, strict=True)]
            before = [one.token for one in launched[-1:]]
            collectives = [AllReduce((), (), "sum")]
            launched.append(
                device_ops.launch([placed], towers.communicator, collectives, towers.devices, launched_after=before)
            )
        return [one.deliver(tower)[0][:1] for tower in range(len(towers.devices)) for one in launched]

    timer = device_timer(tf_compat.unordered_function(exchange, []))
    timer()
    return timer


TABLES = [
    [
        TOWERS,
        STEP,
        Column("without\nexchanges", more("without_s", time_text)),
        Column("exchanges\nalone", more("exchange_s", time_text)),
        Column("hidden", more("hidden", lambda share: f"{share.median:.0%}")),
        Column("step\nby plan", more("predicted_s", median_text)),
        Column("÷\nmeasured", more("predicted_ratio", ratio_text)),
    ],
    [
        Column("the call of a step\nreturns after", more("called_s", time_text)),
        Column("the step has ended\nafter", more("ended_s", time_text)),
    ],
]
