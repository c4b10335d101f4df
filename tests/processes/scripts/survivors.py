"""Let one process end; the others save what they have, by themselves and by the emergency checkpoint.

    survivors.py OUT WHO WAY

Process WHO ends, or is stopped for good, as WAY says: "ends" or "stops".
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np

from ncclsync import Health, nccl_parallel
from ncclsync.errors import ProcessError

OUT, WHO, WAY = pathlib.Path(sys.argv[1]).absolute(), int(sys.argv[2]), sys.argv[3]
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 64)


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class End(keras.callbacks.Callback):
    """Ends process WHO behind the third batch."""

    def on_train_batch_end(self, batch, logs=None):
        if RANK == WHO and batch == 2 and WAY == "ends":
            sys.exit(0)
        if RANK == WHO and batch == 2:
            os.system(f"(sleep 25; kill -9 {os.getpid()}) > /dev/null 2>&1 &")  # the test leaves nothing behind
            os.kill(os.getpid(), signal.SIGSTOP)


os.makedirs(OUT / str(RANK))
os.chdir(OUT / str(RANK))
model = nccl_parallel(towers=1, health=Health(emergency_checkpoint=OUT / "emergency.weights.h5"))(build)()
try:
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[End()])
except ProcessError as error:
    print(f"[{RANK}] {error}", flush=True)
    model.save("own.keras")
    np.savez(OUT / f"{RANK}.npz", **{str(i): value for i, value in enumerate(model.get_weights())})
