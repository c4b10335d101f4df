"""Programs whose rows pass ops that hide them train like one device, in float64."""

import numpy as np
import pytest
import tensorflow as tf
from row_programs import PROGRAMS
from thorough import some

import ncclsync


def trained(call, step, batch):
    losses = [float(call(step, batch)) for _ in range(2)]
    return [losses, *(variable.numpy() for part in step.parts for variable in part.trainable_variables)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Exact, but")
def test_rows(name):
    """Losses and weights are one device's, with as many rows on each tower and with more on some."""
    program = PROGRAMS[name]
    step = program.make()
    alone = tf.function(step)
    expected = trained(lambda _, batch: alone(batch), step, program.batch)
    for count in some((2, 3 + len(name) % 2 * 2), (2, 3, 5)):
        with ncclsync.Towers(count) as towers:
            found = trained(towers.run, program.make(), program.batch)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12, err_msg=f"{count} towers")
