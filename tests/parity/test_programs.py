"""Towers in the places that programs run in: `python -c`, a script, a cell of a notebook."""

import asyncio
import subprocess
import sys

import pytest

# Complete by itself. No source file tells what its `train_step` is, which the user decorated.
PROGRAM = """
import numpy as np
import tensorflow as tf
print(tf.function(tf.square)(tf.constant(2.0)).numpy())  # TensorFlow has started before any tower
import keras
from ncclsync import nccl_parallel

class Model(keras.Sequential):
    @tf.function
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}

def build_model():
    keras.utils.set_random_seed(1)
    model = Model([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    return model

x = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")
results = []
for factory in (nccl_parallel(towers=3)(build_model), build_model):
    model = factory()
    model.fit(x, x[:, :3], batch_size=5, shuffle=False, verbose=0)
    results.append(model.get_weights())
for one, other in zip(*results):
    np.testing.assert_allclose(one, other, atol=1e-6)
outcome = "trained"
print(outcome)
"""


@pytest.mark.slow
def test_program_in_a_process_of_its_own(tmp_path):
    """`python -c` and a plain script, without a main guard, after TensorFlow operations of the user's."""
    (tmp_path / "script.py").write_text(PROGRAM)
    processes = [
        subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for arguments in (["-c", PROGRAM], [tmp_path / "script.py"])
    ]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.split() == ["4.0", "trained"]


def test_program_in_a_cell():
    """Text that has no file, run while an event loop runs, as a notebook does."""

    async def run_cell(namespace):
        exec(compile(PROGRAM, "<cell>", "exec"), namespace)

    namespace = {"__name__": "__main__"}
    asyncio.run(run_cell(namespace))
    assert namespace["outcome"] == "trained"


def test_program_in_ipython():
    """The same by IPython's own shell, where it is installed."""
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    result = shells.InteractiveShell.instance().run_cell(PROGRAM)
    result.raise_error()
