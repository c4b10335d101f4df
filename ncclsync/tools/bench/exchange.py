"""Run `bench exchange`: the host time of an all-reduce between towers on GPUs, of this process or of several.

A graph has several all-reduces of one small bucket in a row. The clock stops when its call returns, before the GPUs
have done their work. Graphs take turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from ncclsync.communicator.processes import Process, find_process
from ncclsync.errors import NcclSyncError
from ncclsync.tools.bench.results import TOWERS, Column, Result, Row, more, time_text
from ncclsync.tools.bench.turns import BenchError, Spread, about, ratio, take_turns

OPS, EMPTY = "ops", "empty graph"

_IN_A_ROW = 20  # exchanges in one graph
_ELEMENTS = 1024
_CALLS = 5  # of a turn


def bench_exchange(given: argparse.Namespace, show: Callable[[str], None]) -> Result | None:
    """Time an exchange for every number of towers: host time of each tower of a process; None but in the first one."""
    show("importing TensorFlow")
    process, own = find_process(), [check_gpus(towers) for towers in given.towers]
    from ncclsync.training.loop import Towers

    rows = []
    for towers, here in zip(given.towers, own, strict=True):
        tell = about(f"{towers} towers", show)
        tell("joining GPUs")
        with Towers(here) as joined:
            rows += _time_case(towers, joined, given.rounds, tell)
    return Result("exchange", "s", tuple(rows)) if is_first(process) else None


def is_first(process: Process | None) -> bool:
    """Return whether this process shows the result."""
    return process is None or process.rank == 0


def check_gpus(towers: int) -> int:
    """Check that each tower can have its own GPU, and that TensorFlow takes ncclsync's ops; return this process' part.

    Raises:
        BenchError: it is not so, or the towers cannot be divided among the processes.
    """
    process = find_process()
    whole, size = towers, 1 if process is None else process.size
    if whole % size:
        raise BenchError(f"Expected as many towers in each of {size} processes. Received: {whole} in all")
    towers = whole // size
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
    return towers


def on(device: str, tensor: Any) -> Any:
    """Return a tensor's copy on a device, such as "GPU:0"."""
    import tensorflow as tf

    with tf.device(f"/{device}"):
        return tf.identity(tensor)


def _time_case(towers: int, joined: Any, rounds: int, show: Callable[[str], None]) -> list[Row]:
    import numpy as np
    import tensorflow as tf

    from ncclsync.compat import tensorflow as tf_compat
    from ncclsync.ops import group_ops

    communicator, devices = joined.communicator, joined.devices

    def passed(*tensors: Any) -> list[Any]:
        return [on(device, tensor) for device, tensor in zip(devices, tensors, strict=True)]

    sent = passed(*(tf.fill([_ELEMENTS], float(rank)) for rank in communicator.ranks))
    specs = [tf.TensorSpec([_ELEMENTS], tf.float32)] * len(devices)

    def in_a_row(*tensors: Any) -> Sequence[Any]:
        column, turns = passed(*tensors), group_ops.Turns([], str)
        for _ in range(_IN_A_ROW):
            column = group_ops.group_all_reduce(column, communicator, "max", turns=turns)
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
        expected = [towers - 1 if name != EMPTY else rank for rank in communicator.ranks]
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
