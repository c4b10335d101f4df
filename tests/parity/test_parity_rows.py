"""Programs whose rows pass ops that hide them train like one device, in float64."""

import numpy as np
import pytest
import tensorflow as tf
from row_programs import PROGRAMS

import ncclsync


def trained(call, step, batch):
    losses = [float(call(step, batch)) for _ in range(2)]
    return [losses, *(variable.numpy() for part in step.parts for variable in part.trainable_variables)]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("towers", [2, 3, 5])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Exact, but")
def test_rows(name, towers):
    """Losses and weights are one device's."""
    program = PROGRAMS[name]
    step = program.make()
    alone = tf.function(step)
    expected = trained(lambda _, batch: alone(batch), step, program.batch)
    with ncclsync.Towers(towers) as those:
        found = trained(those.run, program.make(), program.batch)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
