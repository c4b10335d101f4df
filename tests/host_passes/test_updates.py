"""Updates of variables, whose arithmetic runs as chains: to the last bit."""

import functools
import operator

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from models import program_of
from parity import data, mlp, on_towers

from ncclsync.host_passes import chains, passes
from ncclsync.host_passes.arithmetic import COMPUTED, FUSED

X, Y = data(rows=24)


def listed(monkeypatch, found):
    """Let `found` list the chains that become one op."""

    def listing(*arguments):
        each = chains.find_chains(*arguments)
        found.extend(each)
        return each

    monkeypatch.setattr(passes, "find_chains", listing)


def state_of(model):
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True, clipnorm=1.0),
    "AdamW": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.01, 10)),
    "EMA": lambda: optimizers.Adamax(0.01, use_ema=True, ema_overwrite_frequency=3),
    "Lion": lambda: optimizers.Lion(0.001),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_bitwise_those_of_tensorflow(monkeypatch, name):
    """The same weights and optimizer state, to the last bit, whichever way a variable is updated."""
    states, found = [], []
    for fused in (False, True):
        if fused:
            listed(monkeypatch, found)
        else:
            monkeypatch.setattr(passes, "find_chains", lambda *_: [])
        model = on_towers(lambda: mlp(OPTIMIZERS[name]()), 3)
        model.fit(X, Y, batch_size=5, verbose=0, shuffle=False)
        assert model.towers.divergence() == 0.0
        states.append(state_of(model))
    assert found
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


class Scales(layers.Layer):
    """Multiplies by 30 weights of one number each."""

    def build(self, shape):
        self.scales = [self.add_weight(shape=(), initializer="ones") for _ in range(30)]

    def call(self, x):
        return functools.reduce(operator.mul, self.scales, x)


def test_many_weights_of_one_number_are_updated_together(monkeypatch):
    """Several of them by one op, to the last bit; of an update's arithmetic hardly an op is left."""
    states, found = [], []
    monkeypatch.setattr(chains, "_SUMMING", set())  # their order is another
    for fused in (False, True):
        if fused:
            listed(monkeypatch, found)
        else:
            monkeypatch.setattr(passes, "find_chains", lambda *_: [])

        def factory():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((12,)), Scales(), layers.Dense(5, activation="softmax")])
            model.compile(optimizers.Adam(0.01), "sparse_categorical_crossentropy", jit_compile=False)
            return model

        model = on_towers(factory, 3)
        model.fit(X, Y, batch_size=5, verbose=0, shuffle=False)
        states.append(state_of(model))
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)
    left = [op.type for op in program_of(model).segments[-1].function.graph.get_operations()]
    assert sum(left.count(kind) for kind in COMPUTED) < 5 and left.count(FUSED) < 30, left
    assert max(len(chain.outputs) for chain in found) > 10
