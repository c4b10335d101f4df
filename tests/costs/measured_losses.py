"""Measure what 4 CPU towers lose of their CPU time, beside one device, for rows of the table with 512 rows each.

    cd tests; export PYTHONPATH=support:parity:programs TF_NUM_INTRAOP_THREADS=1
    ../.venv/bin/python costs/measured_losses.py [NAME ...]

Prints the milliseconds of cores of a step on towers and on one device, by turns, the share that is lost, and the
estimate of it. Not a test: its shares are those of `test_losses.py`.
"""

import statistics
import sys
import time

import costs
import numpy as np
import tensorflow as tf
import test_cost_table  # which enters the rows

import ncclsync

ROUNDS = 9


def tiled(array):
    """Repeat rows."""
    array = tf.convert_to_tensor(array)
    return tf.tile(array, [-(-costs.CORE_ROWS // len(array)), *[1] * (array.shape.rank - 1)])[: costs.CORE_ROWS]


def seconds(step, times):
    began = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - began) / times


def steps_of(run):
    """A row's step on towers, and on one device."""
    make, batch = run.args
    batch = tf.nest.map_structure(tiled, batch)
    if run.func is costs.own_step:
        towers, step, alone = ncclsync.Towers(costs.CORE_TOWERS), make(), tf.function(make())
        return (lambda: towers.run(step, batch)), (lambda: alone(batch))
    models = ncclsync.nccl_parallel(towers=costs.CORE_TOWERS)(make)(), make()
    return [lambda model=model: model.train_on_batch(*batch) for model in models]


def main(*names):
    for name in test_cost_table.OWN:
        if names and not any(one in name for one in names):
            continue
        try:
            steps = steps_of(costs.ROWS_OF_TABLE[name].run)
            for step in steps * 3:
                step()
            times = max(1, min(20, int(0.03 / seconds(steps[1], 1))))
            found = np.array([[seconds(step, times) for step in steps] for _ in range(ROUNDS)])
            four, one = map(statistics.median, found.T)
            estimate = costs.cost_of_row(name).on_cores.share
            print(
                f"{name}: {1e3 * four:.2f} and {1e3 * one:.2f} ms, lost {1 - one / four:.2f}, estimated {estimate:.2f}"
            )
        except Exception as error:  # a row of literal shapes, and whatever a further row brings
            print(f"{name}: not measured, {type(error).__name__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
