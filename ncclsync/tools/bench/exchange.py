"""Run `bench exchange`: the host time of an all-reduce between towers on GPUs, in this process.

A graph has several all-reduces of one small bucket in a row. The clock stops when its call returns, before the GPUs
have done their work. Graphs take turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from ncclsync.errors import NcclSyncError
from ncclsync.tools.bench.results import TOWERS, Column, Result, Row, more, time_text
from ncclsync.tools.bench.turns import BenchError, Spread, about, ratio, take_turns

OPS, EMPTY = "ops", "empty graph"

_IN_A_ROW = 20  # exchanges in one graph
_ELEMENTS = 1024
_CALLS = 5  # of a turn


def bench_exchange(given: argparse.Namespace, show: Callable[[str], None]) -> Result:
    """Time an exchange for every number of towers: host time of each tower."""
    show("importing TensorFlow")
    check_gpus(max(given.towers))
    from ncclsync.communicator import NcclCommunicator

    rows = []
    for towers in given.towers:
        tell = about(f"{towers} towers", show)
        tell("joining GPUs")
        with NcclCommunicator(range(towers)) as communicator:
            rows += _time_case(towers, communicator, given.rounds, tell)
    return Result("exchange", "s", tuple(rows))


def check_gpus(towers: int) -> None:
    """Check that each tower can have its own GPU, and that TensorFlow takes ncclsync's ops.

    Raises:
        BenchError: it is not so.
    """
    import tensorflow as tf

    from ncclsync.ops import host_ops

    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus < towers:
        raise BenchError(
            f"Expected {towers} GPUs that TensorFlow sees. Received: {gpus}. tests/virtual_gpus/run.py runs a "
            "command as on a host with several"
        )
    try:
        host_ops.register()
    except NcclSyncError as error:
        raise BenchError(str(error)) from error


def on(device: str, tensor: Any) -> Any:
    """Return a tensor's copy on a device, such as "GPU:0"."""
    import tensorflow as tf

    with tf.device(f"/{device}"):
        return tf.identity(tensor)


def _time_case(towers: int, communicator: Any, rounds: int, show: Callable[[str], None]) -> list[Row]:
    import numpy as np
    import tensorflow as tf

    from ncclsync.compat import tensorflow as tf_compat
    from ncclsync.ops import group_ops

    def passed(*tensors: Any) -> list[Any]:
        return [on(f"GPU:{tower}", tensor) for tower, tensor in enumerate(tensors)]

    sent = passed(*(tf.fill([_ELEMENTS], float(tower)) for tower in range(towers)))
    specs = [tf.TensorSpec([_ELEMENTS], tf.float32)] * towers

    def in_a_row(*tensors: Any) -> Sequence[Any]:
        column = passed(*tensors)
        for _ in range(_IN_A_ROW):
            column = group_ops.group_all_reduce(column, communicator, "max")
        return column

    # As a step's graph is built.
    graphs = {name: tf_compat.unordered_function(body, specs) for name, body in ((OPS, in_a_row), (EMPTY, passed))}

    def timer(graph: Callable) -> Callable[[], float]:
        def turn() -> float:
            seconds = 0.0
            for _ in range(_CALLS):
                tf_compat.sync_devices()
                began = time.perf_counter()
                results = graph(*sent)
                seconds += time.perf_counter() - began
                del results
            tf_compat.sync_devices()
            return seconds / (_CALLS * _IN_A_ROW * towers)

        return turn

    show("first calls")
    wrong = {}
    for name, graph in graphs.items():
        expected = [towers - 1 if name != EMPTY else tower for tower in range(towers)]
        results = [result.numpy() for result in graph(*sent)]
        wrong[name] = sum(int(np.sum(one != right)) for one, right in zip(results, expected, strict=True))
    timers = {name: timer(graph) for name, graph in graphs.items()}
    seconds = take_turns(timers, rounds, show)
    rows = []
    for name, samples in seconds.items():
        ratios = {other: ratio(samples, seconds[other]) for other in seconds if other != name}
        case = {"towers": towers, "in_a_row": _IN_A_ROW, "size_bytes": 4 * _ELEMENTS}
        rows.append(Row(case, name, Spread.of(samples), ratios, {"wrong": wrong[name]}))
    return rows


TABLES = [
    [
        TOWERS,
        Column("by", lambda row: row.side, "left"),
        Column("host time of an exchange,\nper tower", lambda row: time_text(row.value)),
        Column("#wrong", more("wrong")),
    ]
]
