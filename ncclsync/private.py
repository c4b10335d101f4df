"""Every use of an interface that TensorFlow and Keras do not promise to keep.

Nothing else in the package touches such an interface. `tests/test_private.py` has one test for each
function here, so that an upgrade that breaks an assumption is told by that assumption's name.
"""

from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils


def written_handles(op: tf.Operation) -> set[str]:
    """Return the names of the resource inputs that `op` may write to, by TensorFlow's own bookkeeping."""
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return {tensor.name for tensor in writes}


def is_stateful(op: tf.Operation) -> bool:
    """Return whether TensorFlow declares `op` stateful: a variable's op, a random draw, an assertion."""
    return op.op_def.is_stateful


def is_seed(variable: tf.Variable) -> bool:
    """Return whether `variable` is the state of a `keras.random.SeedGenerator`, which names it so."""
    return variable.name.split("/")[-1].startswith("seed_generator_state")


def backend_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a `keras.Variable`, whatever autocast scope is open."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def all_optimizer_classes() -> list[type]:
    """Return every class derived from `keras.optimizers.Optimizer` that is loaded, it included."""
    found: list[type] = []
    queue: list[type] = [keras.optimizers.Optimizer, *keras.optimizers.Optimizer.__mro__[1:]]
    while queue:
        cls = queue.pop()
        if cls not in found and cls is not object:
            found.append(cls)
            if issubclass(cls, keras.optimizers.Optimizer):
                queue.extend(cls.__subclasses__())
    return found


def strategy_of(owner: Any) -> tf.distribute.Strategy | None:
    """Return the `tf.distribute` strategy that a Keras model or optimizer was created under, if any."""
    for name in ("_distribute_strategy", "_distribution_strategy"):
        strategy = getattr(owner, name, None)
        # Keras records TensorFlow's default strategy, which stands for "none", on each optimizer.
        if strategy is not None and type(strategy).__name__ != "_DefaultDistributionStrategy":
            return strategy
    return None


def build_symbolically(model: keras.Model, batch: Any) -> None:
    """Create a model's, its metrics' and its optimizer's variables from a batch's shapes alone."""
    model._symbolic_build(data_batch=batch)
