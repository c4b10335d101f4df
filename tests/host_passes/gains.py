"""Measure what each host pass gives: a step of bench's models on four CPU towers without it, over one with all passes.

All variants are of one process, and take turns, so that other load meets all alike. "nothing again" shows the noise.
"""

import argparse
import os
import resource
import time

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import keras
import numpy as np
import tensorflow as tf

from ncclsync import nccl_parallel
from ncclsync.host_passes import passes
from ncclsync.tools.bench.models import MODELS
from ncclsync.tools.bench.training import BATCH_SIZES

# By the name of a variant: what of `passes` it leaves out, and what stands there instead.
WITHOUT = {
    "nothing": {},
    "nothing again": {},
    "unpacked buckets": {"unpacked": lambda bucket: bucket},
    "chains": {"find_chains": lambda *_: []},
    "untying ops": {"untie": lambda graph, ops: graph},
}
TURN_S = 0.3


def train_function(model, replaced):
    """Return a function that runs a step of a model of bench's on a constant batch; its program misses passes."""
    own = {name: getattr(passes, name) for name in replaced}
    vars(passes).update(replaced)
    try:
        keras.utils.set_random_seed(0)
        made = nccl_parallel(towers=4)(MODELS[model].build)()
        batches = iter(tf.data.Dataset.from_tensors(MODELS[model].data(BATCH_SIZES[model])).repeat())
        made.make_train_function()
        for _ in range(2):
            made.train_function(batches)
    finally:
        vars(passes).update(own)
    return lambda: made.train_function(batches)


def seconds(step, steps):
    """Return the time and the CPU time of a step."""
    used, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(steps):
        step()
    ended, now = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return (ended - begun) / steps, cpu / steps


def main():
    """Print, by model, the medians and quartiles of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mlp,cnn,transformer,embedding,resnet50")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    for model in given.model.split(","):
        steps = {name: train_function(model, replaced) for name, replaced in WITHOUT.items()}
        count = max(1, round(TURN_S / seconds(steps["nothing"], 1)[0]))
        found = np.array([[seconds(step, count) for step in steps.values()] for _ in range(given.rounds)])
        for name, ratios in zip(WITHOUT, np.moveaxis(found / found[:, :1], 1, 0), strict=True):
            low, middle, high = np.quantile(ratios[:, 0], [0.25, 0.5, 0.75])
            words = f"time {middle:.2f} ({low:.2f} to {high:.2f}), CPU time {np.median(ratios[:, 1]):.2f}"
            print(f"{model}: without {name}: {words}", flush=True)


if __name__ == "__main__":
    main()
