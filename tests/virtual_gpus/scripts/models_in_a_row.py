"""Train and delete as many models as the argument says; print whether GPUs hold more memory than after five."""

import gc
import sys

import keras
import numpy as np
import tensorflow as tf

import ncclsync

X, Y = np.ones([4, 64], "float32"), np.ones([4, 1], "float32")


@ncclsync.nccl_parallel
def build():
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def held():
    """Return the bytes in use on each GPU."""
    gc.collect()
    return [tf.config.experimental.get_memory_info(f"GPU:{i}")["current"] for i in range(2)]


seen = []
for _ in range(int(sys.argv[1])):
    build().train_on_batch(X, Y)
    seen.append(held())
# A model has 130 KB on each.
more = [after - before for before, after in zip(seen[4], seen[-1], strict=True)]
print(f"after {len(seen)}:", "as after 5" if max(more) < 20_000 else f"{more} bytes more than after 5")
