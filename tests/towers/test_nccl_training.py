"""Training by NcclCommunicator: `fit` as on one device, and what becomes of it when a collective fails.

The towers stand on CPU devices and are joined by the stand-in NCCL, whose GPUs' memory is the host's.
On virtual GPUs these are the towers. `emergency_checkpoint` has their steps wait: a failure then leaves weights there.
"""

import functools
import json
import logging
import os
import random
import signal
import subprocess
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import assert_close, assert_towers_agree, data, mlp, on_towers
from virtual_host import command

from ncclsync import (
    BackupAndRestore,
    Health,
    NcclError,
    NcclSyncError,
    NcclTimeoutError,
    Timeline,
    Towers,
    nccl_parallel,
)
from ncclsync.communicator import NcclCommunicator, nvls
from ncclsync.communicator.buffers import CUDA, HOST
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.ops import gpu_streams, host_ops

X, Y = data(61)


@pytest.fixture
def nccl(standin, monkeypatch):
    """The stand-in, to whose communicators TensorFlow's tensors in host memory may be given."""
    if not tf.config.list_logical_devices("GPU"):
        monkeypatch.setattr(NcclCommunicator, "memory", {**CUDA, **HOST})
    return standin


def fit(model, epochs=2, x=X, **options):
    return model.fit(x, Y, batch_size=20, epochs=epochs, shuffle=False, verbose=0, **options).history


def arrays(model):
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def cnn():
    """Convolution, synchronised normalisation, dropout, gradient clipping: all kinds of exchange."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Reshape((4, 3)),
            keras.layers.Conv1D(8, 2, use_bias=False),  # normalised away: its gradient is rounding
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=0.5), loss, metrics=["accuracy"])
    return model


def embedding():
    """Sparse gradients, which are gathered."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,), dtype="int32"), keras.layers.Embedding(5, 4), keras.layers.Flatten()])
    model.add(keras.layers.Dense(5))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "factory, towers, options",
    [(mlp, 4, {}), (cnn, 2, {"bucket_bytes": 64}), (cnn, 3, {}), (embedding, 3, {})],
    ids=["mlp", "small buckets", "cnn", "embedding"],
)
def test_fit_as_on_one_device(nccl, factory, towers, options):
    """Losses, metrics, weights and optimizer state; evaluate and predict too; all towers alike."""
    x = np.abs(X).astype("int32") if factory is embedding else X
    results = []
    for model in (on_towers(factory, towers, backend="nccl", **options), factory()):
        history = model.fit(x, Y, batch_size=20, epochs=3, shuffle=False, verbose=0).history
        results.append([history, arrays(model), model.evaluate(x, Y, verbose=0), model.predict(x, verbose=0)])
        if hasattr(model, "towers"):
            assert isinstance(model.towers.communicator, NcclCommunicator)
            assert_towers_agree(model)
            model.towers.close()
    assert_close(*results)


class TellToFail(keras.callbacks.Callback):
    """Gives an instruction before a batch; keeps tower 0's state from there."""

    def __init__(self, standin, fail, batch=2):
        super().__init__()
        self._standin, self._fail, self._batch = standin, fail, batch
        self.before = None

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self._batch and self.before is None:
            self.before = arrays(self.model)
            self._standin.fail(self._fail)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "fail, error, words, suffix",
    [
        ("stuck:1", NcclTimeoutError, "rank 1 (GPU 1) not arrived", ".weights.h5"),
        ("async:2=6", NcclError, "ncclRemoteError", ".keras"),
        ("cudaStreamWaitEvent:2", NcclError, "told to fail", ".weights.h5"),
    ],
)
def test_failure_within_fit(nccl, tmp_path, caplog, fail, error, words, suffix, jit_compile):
    """`fit` raises the collective's own error; tower 0 is as before the step, and saved; the next `fit` goes
    on as if nothing had happened."""
    path = tmp_path / f"emergency{suffix}"
    health = Health(timeout_s=0.3, emergency_checkpoint=str(path))
    build = functools.partial(mlp, jit_compile=jit_compile)
    model = nccl_parallel(towers=3, backend="nccl", health=health)(build)()
    told = TellToFail(nccl, fail)
    with caplog.at_level(logging.WARNING, "ncclsync"), pytest.raises(error) as caught:
        fit(model, callbacks=[told])
    assert words in str(caught.value) and "(bucket 1 of 1) of " in str(caught.value)
    assert model.towers.communicator.closed
    assert [r.getMessage() for r in caplog.records].count(
        f"Saved tower 0 to {path}, since a collective has failed"
    ) == 1
    assert_same(arrays(model), told.before)
    saved = build() if suffix == ".weights.h5" else keras.models.load_model(path)
    if suffix == ".weights.h5":
        saved.load_weights(path)
    assert_same(saved.get_weights(), model.get_weights())
    assert os.listdir(tmp_path) == [path.name]

    nccl.fail("")
    assert model.towers.divergence() == 0.0  # joined anew, and told tower 0's state
    untouched = build()
    untouched.set_weights(model.get_weights())
    untouched.optimizer.build(untouched.trainable_variables)
    for variable, value in zip(untouched.optimizer.variables, arrays(model)[len(model.weights) :], strict=True):
        variable.assign(value)
    assert_close([fit(model), arrays(model)], [fit(untouched), arrays(untouched)])
    assert_towers_agree(model)
    model.towers.close()


def test_buckets_travel_in_one_group(nccl, tmp_path):
    """All that meets after one part of a step is one NCCL group; an error names the bucket it was in."""
    emergency = {"health": Health(emergency_checkpoint=tmp_path / "emergency.weights.h5")}
    model = on_towers(mlp, 2, backend="nccl", shard_optimizer=True, **emergency)
    model.train_on_batch(X, Y)
    nccl.count("ncclGroupEnd", "ncclReduceScatter", "cuCtxRecordEvent")
    model.train_on_batch(X, Y)
    by_streams = tf.config.list_logical_devices("GPU") and not gpu_streams.missing()
    assert nccl.counted() == [2, 2 * 4, 0 if by_streams else 2 * 2]  # the other group is what they gather
    before = arrays(model)
    nccl.fail("ncclReduceScatter:4=5")
    with pytest.raises(NcclError, match=r"ncclInvalidUsage \(5\).*\(bucket 3 of 5\) of \d+ bytes"):
        model.train_on_batch(X, Y)
    assert_same(arrays(model), before)
    model.towers.close()


@pytest.fixture
def arrivals(nccl, monkeypatch):
    """The ops by which two towers arrive with tensors, in a step of three buckets or more."""
    made, create = [], host_ops.create
    monkeypatch.setattr(host_ops, "create", lambda *given: made.append(create(*given)) or made[-1])
    model = on_towers(mlp, 2, backend="nccl", bucket_bytes=400)
    model.train_on_batch(X[:20], Y[:20])
    found = [op for op in filter(None, made) if op.type == "NcclsyncArrive" and op.inputs]
    assert len(found) >= 2 * 3
    yield found
    model.towers.close()


def test_packed_buckets_are_reduced_in_place(arrivals):
    """A bucket's memory is its own: a GPU needs no second one for the sum."""
    for arrival in arrivals:
        told = arrival.get_attr("what")  # of each collective kind, operation, root, dtype, and whether in place
        assert len(told) == 5 * len(arrival.inputs) and set(told[4::5]) == {1}, arrival.name


def test_segments_wait_for_arrivals_not_for_launches(arrivals):
    """A tower goes on when all have arrived; only the update follows NCCL's launches, of which each takes host time."""
    for arrival in arrivals:
        queue, met = [arrival], set()
        while queue:
            op = queue.pop()
            if op.name not in met:
                met.add(op.name)
                assert op.type != "NcclsyncLaunch" or not op.inputs[0].op.inputs, arrival.name
                queue += [*(tensor.op for tensor in op.inputs), *op.control_inputs]


@pytest.mark.slow
def test_buckets_travel_while_towers_compute(nccl, tmp_path):
    """Each is sent when it is complete, the last layer's first; meanwhile towers go on, up to the update."""
    plain = mlp()
    model = on_towers(mlp, 2, backend="nccl", bucket_bytes=400)
    for one in (plain, model):
        one.fit(X, Y, batch_size=61, epochs=1, verbose=0)
    nccl.fail("slow:1:0=1000")  # ms, each of rank 1's
    timeline = Timeline(tmp_path / "trace.json", steps=(1, 1))
    plain.fit(X, Y, batch_size=61, epochs=1, verbose=0)
    model.fit(X, Y, batch_size=61, epochs=1, verbose=0, callbacks=[timeline])
    assert_close(arrays(model), arrays(plain))
    assert_towers_agree(model)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events}
    sizes = [spans[f"all-reduce/{i}.1"]["args"]["bytes"] for i in (1, 2, 3)]
    assert 4 * (5 + 16 * 5) <= sizes[0] < 400  # with scalars of the loss
    assert sizes[1] + sizes[2] >= 4 * (16 + 12 * 16)
    for i in (1, 2):
        exchanged = spans[f"all-reduce/{i}.1"]
        assert exchanged["dur"] > 9e5  # microseconds
        for tower in (0, 1):
            following = spans[f"tower_{tower}/segment_{i + 1}"]
            assert following["ts"] < exchanged["ts"] + exchanged["dur"]
            # On a loaded machine the end of an exchange is seen some milliseconds after it.
            assert spans[f"tower_{tower}/apply"]["ts"] > exchanged["ts"] + exchanged["dur"] - 2e5
    before = arrays(model)
    nccl.fail("ncclAllReduce:3=5")
    with pytest.raises(NcclError, match=r"ncclInvalidUsage \(5\)"):
        model.train_on_batch(X, Y)
    assert_same(arrays(model), before)
    model.towers.close()


def clipped_embedding():
    """Sparse gradients, which are gathered as they are; the norm of all gradients bounds the dense ones."""
    model = embedding()
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), model.loss, metrics=["accuracy"])
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory, towers, fails",
    [
        (mlp, 3, ["ncclReduceScatter:2", "ncclAllGather:2=5", "stuck:1:2"]),
        (clipped_embedding, 4, ["ncclAllGather:2=5"]),  # sums that are to be clipped must be known whole
    ],
    ids=["mlp", "embedding"],
)
def test_divided_optimizer(nccl, tmp_path, factory, towers, fails):
    """As on one device; by NCCL's own collectives each tower gets its part of the gradients, and all parts of
    the weights, with two launches. A step in which one of them fails leaves no trace.
    """
    x = np.abs(X).astype("int32") if factory is clipped_embedding else X
    options = {"health": Health(timeout_s=0.5, emergency_checkpoint=tmp_path / "emergency.weights.h5")}
    model = on_towers(factory, towers, backend="nccl", shard_optimizer=True, **options)
    alone = factory()
    assert_close(*([fit(one, x=x), arrays(one)] for one in (model, alone)))
    assert_towers_agree(model)
    calls = ("ncclReduceScatter", "ncclAllGather", "ncclGroupEnd")
    nccl.count(*calls)
    for one in (model, alone):
        one.train_on_batch(x, Y)
    dense = sum("embeddings" not in weight.name for weight in model.trainable_weights)
    scatters, gathers, groups = nccl.counted()
    assert (scatters, gathers) == (dense * towers * (calls[0] in fails[0]), dense * towers)
    assert groups == 2
    before = arrays(model)
    for fail in fails:
        nccl.fail(fail)
        with pytest.raises(NcclError, match=r"\(bucket \d+ of \d+\) of \d+ bytes"):
            model.train_on_batch(x, Y)
        assert_same(arrays(model), before)
        nccl.fail("")
        assert model.towers.divergence() == 0.0  # joined anew
    assert_close(*([fit(one, x=x), arrays(one)] for one in (model, alone)))
    assert_towers_agree(model)
    model.towers.close()


def test_traced_once(nccl):
    """A failure costs a new communicator, not a new trace."""
    traces = []

    class Counted(keras.Sequential):
        def train_step(self, batch):
            traces.append(1)
            return super().train_step(batch)

    def counted():
        model = Counted([keras.Input((12,)), keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = on_towers(counted, 3, backend="nccl", health=Health(timeout_s=0.2))
    fit(model)
    before = len(traces)
    nccl.fail("stuck:1")
    with pytest.raises(NcclTimeoutError):
        fit(model)
    nccl.fail("")
    fit(model)
    assert len(traces) == before
    model.towers.close()


def test_failure_while_weights_are_sent(nccl, tmp_path):
    """What was not sent is sent as soon as it can be; tower 0 is saved there too."""
    path = tmp_path / "emergency.weights.h5"
    model = nccl_parallel(towers=3, backend="nccl", health=Health(timeout_s=0.2, emergency_checkpoint=path))(mlp)()
    fit(model)
    model.set_weights([w + 1 for w in model.get_weights()])
    before = arrays(model)
    nccl.fail("stuck:2")
    with pytest.raises(NcclTimeoutError, match="Expected broadcast"):
        fit(model)
    assert path.exists()
    assert_same(arrays(model), before)
    nccl.fail("ncclCommInitRankConfig")  # nor can they be joined at once
    with pytest.raises(NcclError, match="ncclCommInitRankConfig"):
        fit(model)
    assert_same(arrays(model), before)
    assert model.towers.divergence() == 0.0
    assert_towers_agree(model)
    model.towers.close()


def test_checkpoint_that_cannot_be_saved(nccl, tmp_path, caplog):
    """Is logged; what is raised is why it was to be saved."""
    path = tmp_path / "missing" / "emergency.keras"
    model = nccl_parallel(towers=2, backend="nccl", health=Health(timeout_s=0.2, emergency_checkpoint=path))(mlp)()
    told = TellToFail(nccl, "async:1=3")
    with caplog.at_level(logging.ERROR, "ncclsync"), pytest.raises(NcclError, match="ncclInternalError"):
        fit(model, callbacks=[told])
    assert "Tower 0 could not be saved after a failed collective" in caplog.text
    model.towers.close()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"emergency_checkpoint": "model.h5"}, ValueError, "to end in .weights.h5"),
        ({"emergency_checkpoint": 3}, TypeError, "to be a path"),
        ({"timeout_s": 0}, ValueError, "Expected timeout_s to be positive"),
        ({"preflight": 1}, TypeError, "Expected preflight to be a bool"),
    ],
)
def test_bad_options(options, error, message):
    """Refused when the factory is decorated."""
    with pytest.raises(error, match=message):
        nccl_parallel(towers=2, health=Health(**options))(mlp)
    with pytest.raises(ValueError, match="Expected no emergency_checkpoint: Towers know of no model"):
        Towers(2, health=Health(emergency_checkpoint="it.keras"))


def test_own_loop(nccl):
    """`Towers.run` raises the same, and goes on."""

    def step(batch):
        return {"mean": tf.reduce_mean(batch), "sum": ops.all_reduce(tf.reduce_sum(batch), op="sum")}

    from ncclsync import ops

    with Towers(3, backend="nccl", health=Health(timeout_s=0.2)) as towers:
        batch = tf.reshape(tf.range(30.0), (10, 3))
        assert towers.run(step, batch)["sum"].numpy() == 435.0
        nccl.fail("stuck:0")
        with pytest.raises(NcclTimeoutError, match="all-reduce"):
            towers.run(step, batch)
        nccl.fail("")
        assert towers.run(step, batch)["sum"].numpy() == 435.0


INTERRUPTED = """
import ctypes, os, keras, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
from parity import data, mlp
from ncclsync import Health, nccl_parallel
from ncclsync.communicator.buffers import CUDA, HOST
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.communicator import NcclCommunicator, nvls
NcclCommunicator.memory = {**CUDA, **HOST}
standin = ctypes.CDLL(os.environ["NCCLSYNC_CUDART_LIBRARY"])
model = nccl_parallel(towers=3, backend="nccl", health=Health(timeout_s=None))(mlp)()
x, y = data(61)

def hang(epoch, logs):
    if epoch == 2:
        standin.standin_fail(b"stuck:1")
        print("hangs", flush=True)

try:
    model.fit(x, y, 20, 10, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=hang)])
finally:
    print("closed" if model.towers.communicator.closed else "open", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_ctrl_c_within_fit(built_standin, tmp_path, jit_compile):
    """TensorFlow's main thread waits in native code; still Ctrl-C ends a collective that hangs."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.replace("mlp)()", f"mlp)(jit_compile={jit_compile})"))
    program = subprocess.Popen(
        command(script),
        cwd=os.path.dirname(__file__),
        env={**os.environ, **built_standin.environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "hangs\n"
    time.sleep(1)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=280)
    assert out == "closed\n" and err.rstrip().endswith("KeyboardInterrupt"), err
    assert program.returncode == -signal.SIGINT
    assert "terminate called" not in err and "core dumped" not in err


@pytest.mark.slow
def test_random_faults_within_fit(nccl, tmp_path):
    """20 of them: `fit` ends or raises, tower 0's weights are never lost, and the next `fit` goes on."""
    options = {"health": Health(timeout_s=0.1, emergency_checkpoint=tmp_path / "emergency.weights.h5")}
    model = on_towers(mlp, 3, backend="nccl", **options)
    fit(model, epochs=1)
    calls = ("ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError", "cudaStreamQuery")
    failed = 0
    for seed in range(20):
        rng = random.Random(seed)
        rank, nth = rng.randrange(3), rng.randint(1, 2)
        kinds = [f"stuck:{rank}:{nth}", f"async:{rank}:{nth}=6", f"slow:{rank}:{nth}={rng.choice((5, 300))}"]
        fail = rng.choice([*kinds, f"{rng.choice(calls)}:{nth}={rng.randint(1, 6)}"])
        told = TellToFail(nccl, fail, batch=rng.randrange(2))
        try:
            fit(model, epochs=1, callbacks=[told])
        except NcclSyncError:
            failed += 1
            moved = [np.max(np.abs(a - b)) for a, b in zip(arrays(model), told.before, strict=True)]
            assert max(moved) <= 1.0, (fail, moved)  # at most one step of Adam, and a count
        nccl.fail("")
        assert all(np.isfinite(w).all() for w in arrays(model)), fail
        assert model.towers.divergence() == 0.0, fail
    assert 15 <= failed < 20
    model.towers.close()


@pytest.mark.slow
def test_op_determinism_that_comes_too_late(nccl, monkeypatch, caplog):
    """A warning, once, as soon as a step is traced; before the towers are joined, none."""
    model = on_towers(mlp, 2, backend="nccl")
    assert not model.towers.communicator.repeatable
    monkeypatch.setattr(tf_compat, "is_op_determinism_enabled", lambda: True)
    fit(model)
    model.evaluate(X, Y, verbose=0)
    (warned,) = [r.message for r in caplog.records if "enable_op_determinism() was called after" in r.message]
    assert "Call it before the first model on towers is made" in warned
    model.towers.close()
    caplog.clear()
    monkeypatch.setattr(nvls, "_read", ["0"])
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    model = on_towers(mlp, 2, backend="nccl")
    assert model.towers.communicator.repeatable
    fit(model)
    assert not caplog.records
    model.towers.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_resuming_tells_what_equal_bits_take(nccl, monkeypatch, caplog, tmp_path, deterministic):
    """On GPUs; where it is not given."""
    monkeypatch.setattr(tf_compat, "is_op_determinism_enabled", lambda: deterministic)
    monkeypatch.setattr(nvls, "_read", ["0"])
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    caplog.set_level(logging.INFO, "ncclsync")
    model = on_towers(mlp, 2, backend="nccl")
    fit(model, callbacks=[BackupAndRestore(tmp_path)])
    told = [r.message for r in caplog.records if "the very weights" in r.message]
    assert len(told) == (not deterministic)
    model.towers.close()
