"""Copies to GPUs lie beside the computation of earlier batches, on virtual GPUs with a slow copy link."""

import pathlib
import subprocess
import sys

import pytest
from standin import COMPILER

RUN = pathlib.Path(__file__).with_name("run.py")

# Five products of matrices take 10 ms each, and a tower's rows, 128 KiB, 50 ms on the link.
SCRIPT = """
import sys, time
import keras, numpy as np, tensorflow as tf
import ncclsync
from ncclsync.towers import step

if sys.argv[1] == "not":
    step.feeds = lambda devices: False
x, y = np.ones([64, 1024], np.float32), np.zeros([64, 1], np.float32)

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

@ncclsync.nccl_parallel
def build():
    model = Model()
    model.build((None, 1024))
    # One call for all: a log that is read waits for all streams of these GPUs, also for those that copy.
    model.compile(keras.optimizers.SGD(1e-9), steps_per_execution=40)
    return model

model, data = build(), tf.data.Dataset.from_tensors((x, y)).repeat()
model.fit(data, steps_per_epoch=40, verbose=0)
began = time.perf_counter()
model.fit(data, steps_per_epoch=40, verbose=0)
print((time.perf_counter() - began) / 40)
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler on the PATH to build the virtual GPUs")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_copies_lie_beside_computation(tmp_path):
    """A step takes about as long as the longer of the two; where towers are not fed, at least as both."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--gpus", "2", "--ahead", "--kernel-ms", "10", "--copy-link", "0.0026,0"]

    def step_s(fed):
        command = [sys.executable, RUN, *options, script, fed]
        run = subprocess.run(command, capture_output=True, text=True, timeout=140)
        assert run.returncode == 0, run.stderr[-2000:]
        return float(run.stdout)

    assert step_s("fed") < 0.8 * step_s("not")
