"""What a variable means on several towers, and how a tower's copy of it starts.

A variable is *same* (weights, optimizer slots, moving statistics: equal on all towers between steps),
*sum* (metric state: tower 0 holds the sum, the others zero), *partial* (accumulated gradients: every tower
holds a part, and the sum when somebody looks) or *seed* (random state: different by design).
"""

import enum

import tensorflow as tf

from ncclsync import private

# 2**31 / golden ratio: consecutive towers' seeds differ in many bits, and stay valid int32 seeds.
SEED_STRIDE = 1327217885


class Role(enum.Enum):
    """How the copies of one variable relate; see the module's docstring."""

    SAME = "same"
    SUM = "sum"
    PARTIAL = "partial"
    SEED = "seed"


def role_of(variable: tf.Variable) -> Role:
    """Return the role that a variable's declared aggregation gives it.

    Keras declares `sum` on the state of its metrics; what it declares on other variables (mostly "none")
    does not tell them apart: whether a step computes their new value from data decides what is averaged.
    """
    if variable.aggregation == tf.VariableAggregation.SUM:
        return Role.SUM
    if private.is_partial(variable):
        return Role.PARTIAL
    if private.is_seed(variable):
        return Role.SEED
    return Role.SAME


def start_value(value: tf.Tensor, role: Role, tower: int) -> tf.Tensor:
    """Return what tower `tower` (not 0) starts from when tower 0 holds `value`; same shape and dtype."""
    if role in (Role.SUM, Role.PARTIAL):
        return tf.zeros_like(value)
    if role is Role.SEED:
        # Only the seed moves (element 0), not the counter behind it.
        stride = tf.constant([(tower * SEED_STRIDE) % 2**31, 0], value.dtype)
        return (value + stride) % tf.constant(2**31, value.dtype)
    return value
