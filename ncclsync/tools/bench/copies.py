"""Run `bench copies`: whether a batch is copied to GPUs during the step on the batch before, in this process.

`fit` is timed beside the same steps on a batch that stays on the GPUs, and beside the copies alone.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from ncclsync.tools.bench.exchange import check_gpus
from ncclsync.tools.bench.results import TOWERS, Column, Result, Row, more, ratio_to, time_text
from ncclsync.tools.bench.turns import Spread, device_timer, take_turns

_WIDTH, _ROWS = 4096, 256  # of a tower's inputs: 4 MiB
_STEPS = 100  # of a turn


def bench_copies(given: argparse.Namespace, show: Callable[[str], None]) -> Result:
    """Time steps in fit, steps without copies, and copies."""
    show("importing TensorFlow")
    check_gpus(given.towers)
    import tensorflow as tf

    from ncclsync.parallel import nccl_parallel
    from ncclsync.training.keras_model import ModelStep

    model = nccl_parallel(towers=given.towers)(_dense)()
    batch = (tf.zeros([given.towers * _ROWS, _WIDTH]), tf.zeros([given.towers * _ROWS, 1]))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    with model.towers as towers:
        kept = _Kept(towers, iterator := iter(data))
        step = ModelStep(model, towers, "train_step")

        def compute() -> None:
            for _ in range(_STEPS):
                step.run_on_iterator(iterator)

        def copy() -> None:
            for _ in range(_STEPS):
                kept.copy()

        show("first steps")
        model.fit(data, steps_per_epoch=2, verbose=0)
        step.run_on_iterator(iterator)
        timers = {
            "fit": device_timer(lambda: model.fit(data, steps_per_epoch=_STEPS, verbose=0), _STEPS),
            "compute": device_timer(compute, _STEPS),
            "copy": device_timer(copy, _STEPS),
        }
        seconds = take_turns(timers, given.rounds, show)
    ratios = {"the longer": Spread.of([fit / max(*parts) for fit, *parts in zip(*seconds.values(), strict=True)])}
    figures = {f"{name}_s": Spread.of(seconds[name]) for name in ("compute", "copy")}
    case = {"towers": given.towers, "batch_size": given.towers * _ROWS, "steps": _STEPS}
    return Result("copies", "s", (Row(case, "ncclsync", Spread.of(seconds["fit"]), ratios, figures),))


class _Kept:
    """Give steps one batch, which the GPUs hold, again and again, in place of a feeder."""

    def __init__(self, towers: Any, iterator: Any) -> None:
        from ncclsync.towers.feeding import Feeder

        self._feeder, self._staging, self._given = Feeder(iterator), None, None  # type: Any, Any, Any
        towers.session.feeders[iterator] = self

    def take(self, staging: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        if self._given is None:
            self._staging, self._given = staging, self._feeder.take(staging)
        return self._given

    def copy(self) -> None:
        self._staging.bring(self._given[0])


def _dense() -> Any:
    import keras

    model = keras.Sequential([keras.Input([_WIDTH]), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


TABLES = [
    [
        TOWERS,
        Column("step\nin fit", lambda row: time_text(row.value)),
        Column("without\ncopies", more("compute_s", time_text)),
        Column("copies\nalone", more("copy_s", time_text)),
        Column("step ÷\nthe longer", ratio_to("the longer")),
    ]
]
