"""Updates of variables, whose arithmetic runs as chains: to the last bit."""

import numpy as np
import pytest
from keras import optimizers
from parity import data, mlp, on_towers

from ncclsync.host_passes import chains, passes

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
