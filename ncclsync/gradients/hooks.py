"""Change what optimizers, functions and tapes do while a step is traced for towers.

Each function returns a context manager that wraps a method of a class. Numbers are right without the hooks, by
`semantics`. `gradients_reduced` marks where gradients travel, so that they travel once and in buckets, compressed or
scattered if the user asked for it; `functions_inlined` lets the ops of a `tf.function` be placed one by one.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import keras_optimizers, other_libraries
from ncclsync.compat import tensorflow as tf_compat
from ncclsync.compat.functions import FUNCTION, inlined, traces_noted
from ncclsync.gradients.compression import ErrorFeedback
from ncclsync.gradients.sharded_optimizer import OptimizerSharding
from ncclsync.ops import Context
from ncclsync.sharding.roles import Role, declare_role

_nested = threading.local()


@contextlib.contextmanager
def step_hooks(compression: ErrorFeedback | None = None, sharding: OptimizerSharding | None = None) -> Iterator[None]:
    """Apply all hooks of this module while a step is traced."""
    with gradients_reduced(compression, sharding), functions_inlined(), tapes_checked():
        yield


def tapes_checked() -> contextlib.AbstractContextManager[None]:
    """Refuse a tape that Horovod wraps."""

    def checking(gradient, self, *args, **kwargs):
        if ops.current_context() is not None:
            other_libraries.check_not_horovods(self)
        return gradient(self, *args, **kwargs)

    return tf_compat.methods_wrapped([tf.GradientTape], "gradient", checking)


def gradients_reduced(
    compression: ErrorFeedback | None = None, sharding: OptimizerSharding | None = None
) -> contextlib.AbstractContextManager[None]:
    """Let every optimizer all-reduce its gradients before `apply`.

    All gradients then meet at once, in buckets. Without this hook each would travel where an op first needs it.

    Args:
        compression: adds up gradients in bfloat16; None: they are added up in their own dtype.
        sharding: adds up gradients where the optimizer's state is updated, if nothing uses them before.
    """

    def reducing(apply, self, grads, trainable_variables=None, **kwargs):
        context = ops.current_context()
        if context is not None:
            other_libraries.check_not_horovods(self)
        # One optimizer may wrap another, and a subclass calls its base: the outermost call reduces. A branch or a loop
        # gets whole inputs.
        if context is None or not context.can_exchange() or getattr(_nested, "apply", False):
            return apply(self, grads, trainable_variables, **kwargs)
        _nested.apply = True
        try:
            grads = list(grads)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            for gradient, variable in zip(grads, trainable_variables or (), strict=False):
                if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices):
                    gradient.set_shape(variable.shape)  # a trace may have lost it, and packing needs it
            if keras_optimizers.accumulates(self):
                return _apply_accumulated(apply, self, grads, trainable_variables, context)
            # Each treats some of the gradients that are left, and returns None for the others.
            treatments: list[Callable[[list[Any]], list[Any]]] = []
            treatments.append(functools.partial(_whole_values, self, trainable_variables))
            if compression is not None:
                variables = keras_optimizers.built_for(self, trainable_variables)
                treatments.append(functools.partial(compression.add_up, variables=variables, context=context))
            if sharding is not None:
                treatments.append(functools.partial(sharding.leave_addends, self))
            treatments.append(functools.partial(ops.whole, rows_add_up=_adds_rows_up(self)))
            treated: list[Any] = [None] * len(grads)
            for treat in treatments:
                left = [g if t is None else None for g, t in zip(grads, treated, strict=True)]
                treated = [t if n is None else n for t, n in zip(treated, treat(left), strict=True)]
            return apply(self, treated, trainable_variables, **kwargs)
        finally:
            _nested.apply = False

    return tf_compat.methods_wrapped(tf_compat.loaded_classes(keras.Optimizer), "apply", reducing)


def _whole_values(optimizer: keras.Optimizer, variables: Any, gradients: Sequence[Any]) -> list[Any]:
    """Return the whole batch's gradients of variables that these are the new values of; None for all others."""
    overwritten = keras_optimizers.overwritten(optimizer, variables)
    return ops.whole([gradient if i in overwritten else None for i, gradient in enumerate(gradients)])


def _adds_rows_up(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer takes a repeated row of a sparse gradient as the sum of its slices.

    Optimizers that clip or square do not: Keras clips and squares each slice.
    """
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    return type(optimizer) is keras.optimizers.SGD and not any(clips)


def _apply_accumulated(
    apply: Callable, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any, context: Context
) -> None:
    """Accumulate on each tower, and add up the towers' sums once, when the optimizer updates.

    The optimizer's accumulators become partial: their sum over the towers is one device's accumulator.
    """
    variables = keras_optimizers.built_for(optimizer, variables)
    accumulators = keras_optimizers.accumulators(optimizer, variables)
    values, running = _whole_values(optimizer, variables, gradients), {}
    for i, part in enumerate(ops.parts([g if v is None else None for g, v in zip(gradients, values, strict=True)])):
        if part is not None:
            part = context.share.of_samples(tf.convert_to_tensor(part))
            running[i] = accumulators[i] + tf.cast(part, accumulators[i].dtype)
    updates = keras_optimizers.update_is_due(optimizer)
    totals = context.exchange(list(running.values()), ops.KEPT_SUM, when=updates)
    reduced = dict(zip(running, totals, strict=True))
    with keras_optimizers.accumulators_emptied(optimizer):
        apply(optimizer, [reduced.get(i, value) for i, value in enumerate(values)], variables)
    left = {id(accumulators[i]): total for i, total in running.items()}
    of_values = keras_optimizers.overwritten(optimizer, None)  # these hold the batch's, and `apply` has written them
    for i, accumulator in enumerate(keras_optimizers.accumulators(optimizer)):
        if i not in of_values:
            declare_role(accumulator, Role.PARTIAL)
            kept = left.get(id(accumulator), accumulator)  # an update empties that of a frozen weight, too
            accumulator.assign(tf.where(updates, tf.zeros_like(kept), kept))


def functions_inlined() -> contextlib.AbstractContextManager[None]:
    """Trace a `tf.function` that a step calls as a part of the step, not as a separate function."""

    def inlining(call, self, *args, **kwargs):
        context = ops.current_context()
        # XLA may compile an op that TensorFlow's own kernels lack, such as a grouped Conv3D.
        if context is None or not context.can_exchange() or tf_compat.is_jit_compiled(self):
            with traces_noted(self):
                return call(self, *args, **kwargs)
        return inlined(self)(*args, **kwargs)

    return tf_compat.methods_wrapped([FUNCTION], "__call__", inlining)
