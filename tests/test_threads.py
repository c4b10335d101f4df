"""No op waits for another thread: eight towers train on a thread pool of one."""

import os
import subprocess
import sys

CODE = """
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
from parity import assert_close, assert_towers_agree, data, mlp, on_towers
from test_step_errors import two_parts

x, y = data()
for factory in (two_parts, lambda: mlp(steps_per_execution=2)):
    results = []
    for model in (on_towers(factory, 8), factory()):
        history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0).history
        results.append([history, model.get_weights()])
        if hasattr(model, "towers"):
            assert_towers_agree(model)
    if factory is two_parts:  # whose losses are a batch's, not an epoch's
        results = [result[1] for result in results]
    assert_close(*results)
assert tf.config.threading.get_inter_op_parallelism_threads() == 1
print("trained")
"""


def test_eight_towers_on_one_thread():
    """With one inter-op and one intra-op thread eight towers give one device's numbers; they do not hang."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=os.path.dirname(__file__),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stderr
