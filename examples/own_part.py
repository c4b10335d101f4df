"""Let each process read its own files: `ncclsync.Local`, on several hosts or in several processes.

    python own_part.py                    # one process reads all files
    mpirun -np 2 python own_part.py       # each of two reads half of them

The page is own_part.md. For CPU towers of several processes: pip install -e '.[hosts]'
"""

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import ncclsync

FILES, SAMPLES = 8, 96  # of each file


@ncclsync.nccl_parallel
def build_model() -> keras.Model:
    """Build a small regression."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def write(folder: pathlib.Path) -> list[str]:
    """Write files of records, 8 numbers and a target each; return their names."""
    rng = np.random.default_rng(1)
    names = [str(folder / f"{number}.tfrecord") for number in range(FILES)]
    for name in names:
        with tf.io.TFRecordWriter(name) as file:
            for x in rng.normal(size=(SAMPLES, 8)).astype("float32"):
                file.write(np.append(x, x.sum()).astype("float32").tobytes())
    return names


def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a sample: its numbers, and their sum."""
    numbers = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [9])
    return numbers[:8], numbers[8:]


keras.utils.set_random_seed(1)
model = build_model()
process, processes = model.towers.process, model.towers.processes
with tempfile.TemporaryDirectory() as folder:
    own = tf.data.Dataset.from_tensor_slices(write(pathlib.Path(folder))).shard(processes, process)
    count = int(own.cardinality()) * SAMPLES
    samples = own.interleave(tf.data.TFRecordDataset, deterministic=True).map(parsed).shuffle(256, seed=1)
    samples = samples.apply(tf.data.experimental.assert_cardinality(count))
    history = model.fit(ncclsync.Local(samples, batch_size=64), epochs=5, verbose=0)
print(f"process {process} of {processes} read {count} samples: loss {history.history['loss'][-1]!r}")
