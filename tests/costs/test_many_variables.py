"""Many small variables take few ops each: an op costs as much whatever it computes. `many_variables.py` has times."""

import collections

import keras
import numpy as np
import pytest
from many_variables import Scales
from models import program_of
from parity import on_towers

# A tower's, of each weight of one number and its two moments: forward and backward, and Adam's update.
MOST_OPS = [7, 14]


def counted(weights):
    """Count a tower's ops by types, for each segment of a step, without what TensorFlow does not run."""

    def factory():
        model = keras.Sequential([keras.Input((8,)), Scales(weights), keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
        return model

    model = on_towers(factory, 2)
    model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    graphs = [segment.function.graph for segment in program_of(model).segments]
    types = [[op.type for op in graph.get_operations()] for graph in graphs]
    return [collections.Counter(one for one in each if one not in ("Const", "Identity")) for each in types]


@pytest.mark.slow
def test_ops_of_each_weight():
    """The ops of a segment grow by few with each weight: it is read once forward, and updated with its moments."""
    fewer, more = counted(10), counted(30)
    grown = [new - old for old, new in zip(fewer, more, strict=True)]
    assert all(sum(each.values()) <= 20 * most for each, most in zip(grown, MOST_OPS, strict=True)), grown
    assert [each["ReadVariableOp"] for each in grown] == [20, 4 * 20]
