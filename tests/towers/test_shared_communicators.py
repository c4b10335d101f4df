"""Models on the same GPUs share a communicator of NCCL's, which is closed when nobody uses it any more."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from ncclsync import Health, NcclError, NcclSyncError, Towers
from ncclsync.communicator import NcclCommunicator, shared
from ncclsync.communicator.buffers import CUDA, HOST


@pytest.fixture
def nccl(standin, monkeypatch):
    """The stand-in, to whose communicators TensorFlow's tensors in host memory may be given."""
    monkeypatch.setattr(NcclCommunicator, "memory", {**CUDA, **HOST})
    yield standin
    gc.collect()
    shared.close_unused()


def towers(devices=2, timeout_s=20.0, **options):
    return Towers(devices, backend="nccl", health=Health(timeout_s=timeout_s), **options)


def train(on, v, steps=1):
    def step(x):
        v.assign_add(tf.reduce_sum(x))
        return v.read_value()

    return [float(on.run(step, tf.ones([4, 1]))) for _ in range(steps)][-1]


def kept(found):
    return {name: count for name, count in found.alive().items() if name != "memory"}


@pytest.mark.slow
def test_models_in_a_row_have_one_communicator(nccl):
    """Dropped, replaced or kept beside each other: NCCL starts once, and what there is is as after the first."""
    before = kept(nccl)
    nccl.count("ncclCommInitRankConfig")
    v = tf.Variable(0.0)
    first = towers()
    train(first, v)
    threads, alive = threading.active_count(), kept(nccl)
    assert alive != before
    also = towers()
    assert also.communicator is first.communicator
    for _ in range(10):
        first = also = None
        gc.collect()
        first = towers()
        train(first, tf.Variable(0.0))
    starts = [4]  # two ranks, by the preflight and for good
    assert (nccl.counted(), kept(nccl), threading.active_count()) == (starts, alive, threads)
    del first
    gc.collect()
    other = towers(3)
    assert nccl.counted() == [10] and len(other) == 3  # nobody used the first one, which is closed
    other.close()
    assert kept(nccl) == before


def test_it_is_closed_when_nobody_takes_it_over(nccl, monkeypatch):
    """A while after its last user is gone; the garbage collector waits for nothing meanwhile."""
    over = threading.Event()
    monkeypatch.setattr(shared, "time", types.SimpleNamespace(sleep=lambda _: over.wait(60)))
    monkeypatch.setattr(shared, "_waiting", [])  # another test's thread may wait, too
    before = kept(nccl)
    one = towers()
    communicator = one.communicator
    for _ in range(2):
        train(one, tf.Variable(0.0))
        with shared._lock:  # as if another thread joined GPUs
            one = None
            gc.collect()
        one = towers()
        assert one.communicator is communicator
    over.set()  # for who has been gone since: somebody uses it
    until = time.monotonic() + 20
    while shared._waiting and time.monotonic() < until:
        time.sleep(0.05)
    assert train(one, tf.Variable(0.0)) == 4.0 and kept(nccl) != before
    one = communicator = None
    gc.collect()
    while kept(nccl) != before and time.monotonic() < until + 20:
        time.sleep(0.05)
    assert kept(nccl) == before


def test_it_is_closed_by_the_last_user(nccl):
    """Not by `close()` of another one, which is idempotent; what depends on an option has one of its own."""
    one, other, patient = towers(), towers(), towers(timeout_s=30.0)
    assert patient.communicator is not one.communicator is other.communicator
    one.close()
    one.close()
    assert not other.communicator.closed and train(other, tf.Variable(0.0)) == 4.0
    other.close()
    one.close()
    assert other.communicator.closed and not patient.communicator.closed
    patient.close()


def test_a_failure_is_told_to_each_user_once(nccl):
    """The GPUs are joined anew, for all; who comes later hears nothing of it, and is never given what has failed."""
    one, other, idle = towers(), towers(), towers()
    a, b = tf.Variable(0.0), tf.Variable(0.0)
    train(one, a), train(other, b)
    nccl.fail("async:1:1=6")
    with pytest.raises(NcclError, match="told to fail asynchronously"):
        train(one, a)
    late = towers()
    assert train(late, tf.Variable(0.0)) == 4.0
    value = float(a)
    assert train(one, a) == value + 4.0
    for told, v in ((other, b), (idle, tf.Variable(0.0))):
        with pytest.raises(NcclError):
            train(told, v)
        assert train(told, v) == 4.0 + (4.0 if told is other else 0.0)
    assert one.communicator is late.communicator is idle.communicator
    for each in (one, other, idle, late):
        each.close()


def test_two_threads_are_ordered_by_it(nccl):
    """Both train on the same devices at once."""
    found, both = {}, [towers(), towers()]

    def run(on, name):
        found[name] = train(on, tf.Variable(0.0), steps=30)

    threads = [threading.Thread(target=run, args=(on, i)) for i, on in enumerate(both)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: 120.0, 1: 120.0}
    for on in both:
        on.close()


@pytest.mark.slow
def test_it_ends_with_the_process(nccl, tmp_path):
    """In order, and not in a child that was forked."""
    log = tmp_path / "log"
    script = """if 1:
        import os
        from test_shared_communicators import towers, train, tf
        from ncclsync.communicator import NcclCommunicator
        from ncclsync.communicator.buffers import CUDA, HOST
        NcclCommunicator.memory = {**CUDA, **HOST}
        on = towers()
        train(on, tf.Variable(0.0))

        def note(words):
            with open(os.environ["STANDIN_LOG"], "a") as log:
                print(words, file=log)

        note("trained")  # the preflight's communicator has ended
        if os.fork() == 0:
            raise SystemExit
        os.wait()
        note("child gone")
    """
    environment = {**os.environ, "STANDIN_LOG": str(log), "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    in_child, _, after = log.read_text().partition("trained\n")[2].partition("child gone")
    assert "ncclCommFinalize" not in in_child
    assert after.count("ncclCommFinalize") == after.count("ncclCommDestroy") == 2


def test_what_does_not_end_is_no_error_of_the_next(nccl, caplog):
    """Who asks for other devices has not caused it."""
    towers()
    gc.collect()
    nccl.fail("ncclCommFinalize")
    with caplog.at_level(logging.ERROR):
        other = towers(3)
    assert "has not ended well" in caplog.text
    other.close()
    with pytest.raises(NcclSyncError, match="closed"):
        train(other, tf.Variable(np.float32(0)))
