"""No op waits for another thread: eight towers train on a thread pool of one. And who chooses its size."""

import json
import os
import subprocess
import sys

import pytest
from virtual_host import command

CODE = """
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
from parity import assert_close, assert_towers_agree, data, mlp, on_towers
from models import two_parts

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


@pytest.mark.slow
def test_eight_towers_on_one_thread(tmp_path):
    """With one inter-op and one intra-op thread eight towers give one device's numbers; they do not hang."""
    script = tmp_path / "training.py"
    script.write_text(CODE)
    done = subprocess.run(
        command(script),
        cwd=os.path.dirname(__file__),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and done.stdout.endswith("trained\n"), done.stderr


CASES = """
import json, logging, os
import tensorflow as tf
from ncclsync import Towers
from ncclsync.towers import placement
from ncclsync.communicator import native
from parity import mlp, on_towers

out = {}
for name in ("crowded", "named", "few", "one", "chosen", "environment", "strategy", "started"):
    read, write = os.pipe()
    if os.fork():  # TensorFlow has not started yet, and never does in this process
        os.close(write)
        with open(read) as pipe:
            out[name] = json.load(pipe)
        os.wait()
        continue
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("ncclsync").addHandler(handler)
    native.usable_cores = lambda: {"few": 5, "one": 1}.get(name, 4)
    if name == "chosen":
        tf.config.threading.set_intra_op_parallelism_threads(3)
    if name == "environment":
        os.environ["TF_NUM_INTRAOP_THREADS"] = "3"
    if name in ("strategy", "started"):
        tf.constant(1.0)
    for _ in range(2):
        if name == "named":
            Towers(["CPU:0"] * 3 + ["/device:cpu:0"]).close()
        elif name == "strategy":
            placement.choose_devices(None, ["CPU:0"] * 4, None)
        else:
            on_towers(mlp, 1 if name == "one" else 4)
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    os.write(write, json.dumps([threads, warnings]).encode())
    os._exit(0)
print(json.dumps(out))
"""


@pytest.mark.slow
def test_an_op_runs_on_one_thread_where_towers_fill_the_cores():
    """Unless the user has chosen otherwise, or TensorFlow runs already, which is told once."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("TF_NUM_INTRAOP_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", CASES],
        cwd=os.path.dirname(__file__),
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [warning] = found.pop("started")[1]
    assert "TF_NUM_INTRAOP_THREADS=1" in warning
    threads = {"crowded": 1, "named": 1, "few": 0, "one": 0, "chosen": 3, "environment": 0, "strategy": 0}
    assert found == {name: [count, []] for name, count in threads.items()}
