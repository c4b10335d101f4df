"""`Throughput`: samples per second and shares of the step's time, in progress bar and logs."""

import itertools
import time
import types

import keras
import pytest
import tensorflow as tf
from parity import data, mlp, on_towers, watch_exchanges

from ncclsync import Throughput

X, Y = data()  # 61 rows: batches of 20, 20, 20 and 1
SHARES = ("computing", "communicating", "waiting_for_data")


def test_logs(capsys, monkeypatch):
    """Every row counts once, in the last, smaller batch too; the shares add up; all is shown and logged."""
    model, throughput, seen = on_towers(lambda: mlp(steps_per_execution=3), 3), Throughput(), []
    shown = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    clock = types.SimpleNamespace(monotonic_ns=itertools.count(0, 10**9).__next__)  # a second for each call
    monkeypatch.setattr("ncclsync.training.callbacks.throughput.time", clock)
    history = model.fit(X, Y, batch_size=20, epochs=2, verbose=2, callbacks=[throughput, shown]).history
    # In two calls of the second epoch, when nothing is traced any more.
    assert history["samples_per_second"][1] == pytest.approx(61 / 2)
    for logs in [{name: values[1] for name, values in history.items()}, *seen[-2:]]:
        assert sum(logs[share] for share in SHARES) == pytest.approx(1)
        assert all(0 < logs[share] < 1 for share in SHARES)
    assert "waiting_for_data:" in capsys.readouterr().out


class Unequal(keras.Model):
    """A step on two tensors, of which an iterator does not tell that they have different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 3))

    def train_step(self, given):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(self.dense(one) ** 2) for one in given])
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("towers", [1, 2])
def test_batches_that_run_again(towers):
    """A batch whose tensors turn out to have different numbers of rows is measured once, and has not failed."""

    def build():
        model = Unequal()
        model.compile("sgd")
        return model

    class Seen(Throughput):
        def measure(self, measured):
            seen.append((measured.failed, measured.completed))
            super().measure(measured)

    seen, of = [], tf.TensorSpec([None, 3])
    made = tf.data.Dataset.from_generator(
        lambda: ((X[:8, :3], X[: 4 if i else 8, :3]) for i in range(4)), output_signature=(of, of)
    )
    model = on_towers(build, towers)
    model.fit(made, steps_per_epoch=4, verbose=0, callbacks=[Seen()])
    assert seen == [(False, 1)] * 4
    assert not model.towers.watch._watchers


@pytest.mark.slow
def test_slow_data_and_slow_exchanges(monkeypatch, as_on_gpus):
    """Data that comes late makes the share of waiting high, an all-reduce that takes long its own."""

    def late(x):
        time.sleep(0.1)
        return x

    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    slow_rows = rows.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(late, [x], tf.float32), [None, 12]), y))
    pause_s, shares = 0.0, []
    watch_exchanges(monkeypatch, lambda *_: time.sleep(pause_s))
    model = on_towers(mlp, 2)
    for data_set, late_s in ((rows, 0.0), (slow_rows, 0.0), (rows, 0.1)):
        pause_s = late_s
        shares.append(model.fit(data_set, epochs=3, verbose=0, callbacks=[Throughput()]).history)
    fast, slow_data, slow_exchange = shares
    # Of several epochs the one that other load has disturbed least; the first one of all is traced.
    for share, slow, other in (
        ("waiting_for_data", slow_data, slow_exchange),
        ("communicating", slow_exchange, slow_data),
    ):
        assert max(slow[share]) > max(min(fast[share][1:]), min(other[share]))
        assert max(slow[share]) > min(slow["computing"])
    assert max(fast["computing"][1:]) > max(min(slow_data["computing"]), min(slow_exchange["computing"]))
