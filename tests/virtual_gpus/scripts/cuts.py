"""What XLA loses where a step is cut: a transformer and ResNet-50, cut as by default, once, and not at all.

    export PYTHONPATH=tests/support
    python tests/virtual_gpus/run.py --gpus 2 --xla tests/virtual_gpus/scripts/cuts.py transformer,resnet50 32
    python tests/virtual_gpus/scripts/cuts.py transformer,resnet50 32  # on CPU towers

For each model: how many programs XLA runs for a tower's step, the bytes that cross from an earlier program to a later
one beside buckets, and the user time of a step of two towers, so many rows each, beside steps of two plain models at
once, each on a device of its own, since two threads of a core slow each other: medians of turns; and the same without
the exchange, which models show that have as many weights and do nothing but update them. What the system takes does not
count: while GPUs work, TensorFlow's thread asks for their events each 10 us. The user's part of that remains, so that
times of CPU towers are cleaner. By default a bucket holds a quarter of the gradients, as 25 MiB are of ResNet-50's.
"""

import resource
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

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


class Apart:
    """Train as many models as there are towers at once, each on its device and by its rows."""

    def __init__(self, build, name):
        gpus = tf.config.list_logical_devices("GPU")
        self.devices = gpus[:TOWERS] or tf.config.list_logical_devices("CPU") * TOWERS
        self.models, self.pool = [], ThreadPoolExecutor(TOWERS)
        for device in self.devices:
            with tf.device(device.name):
                self.models.append(build(name))

    def train_on_batch(self, x, y):
        rows = [slice(i * ROWS, (i + 1) * ROWS) for i in range(TOWERS)]
        list(self.pool.map(self.train, self.models, self.devices, [x[own] for own in rows], [y[own] for own in rows]))

    def train(self, model, device, x, y):
        with tf.device(device.name):
            model.train_on_batch(x, y)


def plain(name):
    model = MODELS[name].build()
    model.compile(model.optimizer, model.loss, jit_compile=True)
    assert model.jit_compile, "XLA compiles no model here: virtual GPUs need --xla"
    return model


class Weights(keras.layers.Layer):
    """Add up weights, so that each has a gradient."""

    def __init__(self, count):
        super().__init__()
        self.weights_alone = self.add_weight(shape=[count])

    def call(self, x):
        rows = keras.ops.cast(keras.ops.reshape(x, [keras.ops.shape(x)[0], -1])[:, :1], "float32")
        return rows * keras.ops.sum(self.weights_alone)


def weights_alone(name):
    model = MODELS[name].build()
    alone = keras.Sequential([Weights(model.count_params())])
    alone.compile(type(model.optimizer).from_config(model.optimizer.get_config()), lambda _, made: made)
    alone.jit_compile = True
    return alone


def on_towers(build, name, buckets):
    parameters = MODELS[name].build().count_params()
    options = {"towers": TOWERS, "bucket_bytes": 10**12 if buckets == 1 else max(1, 4 * parameters // buckets)}
    return ncclsync.nccl_parallel(**options)(build)(name)


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
    sides = {"not at all": Apart(plain, name), "once": on_towers(plain, name, 1), "default": on_towers(plain, name, 4)}
    sides |= {"weights": Apart(weights_alone, name), "weights once": on_towers(weights_alone, name, 1)}
    sides["weights default"] = on_towers(weights_alone, name, 4)
    for model in sides.values():
        model.train_on_batch(x, y)
        model.train_on_batch(x, y)
    taken = {side: [] for side in sides}
    for _ in range(TURNS):
        for side, model in sides.items():
            begun = user_s()
            for _ in range(2):
                model.train_on_batch(x, y)
            taken[side].append((user_s() - begun) / 2)
    middle = {side: statistics.median(times) for side, times in taken.items()}
    print(f"{name}, cut not at all: 1 programs, 0.0 MB cross, {1e3 * middle['not at all']:.0f} ms", flush=True)
    for side in ("once", "default"):
        count, crossed = crossing(sides[side])
        exchange = middle[f"weights {side}"] - middle["weights"]
        ratio = statistics.median(one / other for one, other in zip(taken[side], taken["not at all"], strict=True))
        alone = f"{ratio - exchange / middle['not at all']:.3f} without the exchange's {1e3 * exchange:.0f} ms"
        told = f"{name}, cut {side}: {count} programs, {crossed / 1e6:.1f} MB cross, {1e3 * middle[side]:.0f} ms"
        print(f"{told}, {ratio:.3f} of not at all, {alone}", flush=True)
