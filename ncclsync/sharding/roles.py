"""Name the role of a variable on several towers, and compute what a tower's copy of it starts from."""

import enum

import tensorflow as tf

# 2**31 / golden ratio: consecutive towers' seeds differ in many bits, and stay valid int32 seeds.
SEED_STRIDE = 1327217885

# Attributes of a variable of tower 0, which a copy of it does not have: its role; whether a generator draws from it.
DECLARED, _DRAWN_FROM = "_ncclsync_role", "_ncclsync_drawn_from"


class Role(enum.Enum):
    """Name how the copies of one variable relate."""

    SAME = "same"  # equal on all towers between steps: weights, optimizer slots, moving statistics
    SUM = "sum"  # tower 0 holds the sum, the others zero: metric state
    PARTIAL = "partial"  # each tower holds a part, and tower 0 the sum when it is read: accumulated gradients
    PARTITION = "partition"  # each tower holds other elements: a sharded optimizer's state
    SEED = "seed"  # different by design, unless all towers are to draw from the same: random state


def declare_role(variable: tf.Variable, role: Role) -> None:
    """Give a variable of tower 0 a role that it does not show itself; `SAME`, if a step needs that, stays."""
    if getattr(variable, DECLARED, None) is not Role.SAME:
        setattr(variable, DECLARED, role)


def mark_random_state(variable: tf.Variable) -> None:
    """Record that a generator draws from a variable of tower 0: a `SeedGenerator`, or a `tf.random.Generator`.

    Only who draws from it shows what it is. A variable that is not known to be random state is the same on all towers,
    and what is drawn from it is exact; so a step that has taken it so may go on.
    """
    setattr(variable, _DRAWN_FROM, True)


def is_random_state(variable: tf.Variable) -> bool:
    """Return whether a generator was seen to draw from a variable."""
    return getattr(variable, _DRAWN_FROM, False)


def role_of(variable: tf.Variable, same_seeds: bool = False) -> Role:
    """Return the role of a variable.

    Args:
        variable: of tower 0.
        same_seeds: whether random state is equal on all towers (`exact`).

    Keras declares `sum` on the state of its metrics. What it declares on other variables, mostly "none", tells nothing.
    """
    if (declared := getattr(variable, DECLARED, None)) is not None:
        return declared
    if variable.aggregation == tf.VariableAggregation.SUM:
        return Role.SUM
    if is_random_state(variable) and not same_seeds:
        return Role.SEED
    return Role.SAME


def start_value(value: tf.Tensor, role: Role, tower: int) -> tf.Tensor:
    """Return what tower `tower` (not 0) starts from when tower 0 holds `value`; same shape and dtype."""
    if role in (Role.SUM, Role.PARTIAL):
        return tf.zeros_like(value)
    if role is Role.SEED:
        # Only the seed moves, not the counter: Keras' state is [seed, counter], that of tf.random.Generator
        # [counter, counter, key]. (ThreeFry's [counter, key] starts at another place of the same sequence.)
        place = 0 if value.shape[0] == 2 else -1
        moved = (value[place] + (tower * SEED_STRIDE) % 2**31) % 2**31
        return tf.tensor_scatter_nd_update(value, [[place % value.shape[0]]], [moved])
    return tf.constant(value.numpy(), value.dtype)  # between CPU devices a copy of TensorFlow's is an alias
