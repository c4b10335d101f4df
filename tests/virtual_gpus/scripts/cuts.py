"""What XLA loses where a step is cut: a transformer and ResNet-50, cut as by default, once, and not at all.

    export PYTHONPATH=tests/support
    python tests/virtual_gpus/run.py --gpus 2 --xla tests/virtual_gpus/scripts/cuts.py transformer,resnet50 32
    python tests/virtual_gpus/scripts/cuts.py transformer,resnet50 32  # on CPU towers

For each model: how many programs XLA runs for a tower's step, the bytes that cross from an earlier program to a later
one beside buckets, and the user time of a step of two towers, so many rows each, beside two steps of plain Keras:
medians of turns. What the system takes does not count: while GPUs work, TensorFlow's thread asks for their events each
10 us. By default a bucket holds a quarter of the gradients, as 25 MiB are of ResNet-50's.
"""

import resource
import statistics
import sys

import keras
import numpy as np
import tensorflow as tf
from models import program_of

import ncclsync
from ncclsync.tools.bench.models import MODELS

TOWERS, ROWS, TURNS = 2, int(sys.argv[2]), 7
names = sys.argv[1].split(",")


def user_s():
    """Return the user time of this process, when the GPUs are through."""
    tf.test.experimental.sync_devices()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def plain(name):
    model = MODELS[name].build()
    model.compile(model.optimizer, model.loss, jit_compile=True)
    assert model.jit_compile, "XLA compiles no model here: virtual GPUs need --xla"
    return model


def on_towers(name, buckets):
    parameters = MODELS[name].build().count_params()
    options = {"towers": TOWERS, "bucket_bytes": 10**12 if buckets == 1 else max(1, 4 * parameters // buckets)}
    return ncclsync.nccl_parallel(**options)(plain)(name)


def crossing(model):
    """Return the number of segments, and the bytes that one needs of those before it."""
    program = program_of(model)
    made = {}
    crossed = 0
    for segment in program.segments:
        for source, tensor in zip(segment.sources, segment.function.inputs, strict=False):
            if source in made:
                shape = [ROWS if one is None else one for one in tensor.shape.as_list()]
                crossed += int(np.prod(shape)) * tensor.dtype.size
        made.update(dict.fromkeys(segment.fetches))
    return len(program.segments), crossed


for name in names:
    keras.utils.set_random_seed(0)
    x, y = MODELS[name].data(TOWERS * ROWS)
    sides = {"not at all": plain(name), "once": on_towers(name, 1), "default": on_towers(name, 4)}
    batches = {side: (x[:ROWS], y[:ROWS]) if side == "not at all" else (x, y) for side in sides}
    for side, model in sides.items():
        model.train_on_batch(*batches[side])
        model.train_on_batch(*batches[side])
    taken = {side: [] for side in sides}
    for _ in range(TURNS):
        for side, model in sides.items():
            begun = user_s()
            for _ in range(2):
                for _ in range(TOWERS if side == "not at all" else 1):
                    model.train_on_batch(*batches[side])
            taken[side].append((user_s() - begun) / 2)
    for side, model in sides.items():
        count, crossed = (1, 0) if side == "not at all" else crossing(model)
        pairs = [one / other for one, other in zip(taken[side], taken["not at all"], strict=True)]
        told = f"{name}, cut {side}: {count} programs, {crossed / 1e6:.1f} MB cross"
        milliseconds = 1e3 * statistics.median(taken[side])
        print(f"{told}, {milliseconds:.0f} ms, {statistics.median(pairs):.3f} of not at all", flush=True)
