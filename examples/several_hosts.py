"""Train on all GPUs of several hosts, or on CPU towers of several processes: the program of one process, unchanged.

    python several_hosts.py                    # one process
    mpirun -np 2 python several_hosts.py       # two, on this host
    mpirun -H a,b python several_hosts.py      # one on each of two hosts

The page is several_hosts.md. Needs scikit-learn; for CPU towers also: pip install -e '.[hosts]'
"""

import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import ncclsync

TOWERS = None if len(sys.argv) < 2 else int(sys.argv[1])  # of this process; None: its GPUs, or one on the CPU


@ncclsync.nccl_parallel(towers=TOWERS)
def build_model() -> keras.Model:
    """Build a small classifier of digits."""
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu")])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


keras.utils.set_random_seed(1)  # all processes shuffle alike
digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
model = build_model()
model.fit(images[:1500], labels[:1500], batch_size=128, epochs=5, verbose=2)
loss, accuracy = model.evaluate(images[1500:], labels[1500:], batch_size=128, verbose=0)
total = sum(float(np.abs(weight).sum(dtype="float64")) for weight in model.get_weights())
if model.towers.is_chief:  # model.save and the callbacks look at this by themselves
    print(f"{len(model.towers)} towers: accuracy {accuracy:.4f}, sum of weights {total!r}")
