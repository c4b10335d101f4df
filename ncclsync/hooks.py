"""What Keras' optimizers and metrics do differently inside a step on towers.

Each function returns a context manager that wraps a method of Keras' classes while a step is traced or runs
eagerly. Outside a step on towers the wrapped methods do what they always do.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ncclsync import ops, private

_nested = threading.local()


@contextlib.contextmanager
def step_hooks() -> Iterator[None]:
    """What every step on towers needs: reduced gradients, scalars that count once, losses that are sums."""
    with gradients_reduced(), scalars_weighed(), sums_kept():
        yield


def gradients_reduced() -> contextlib.AbstractContextManager[None]:
    """Let every optimizer all-reduce its gradients before `apply`.

    Before, not within: clipping, accumulation, loss scaling and weight decay then see the global gradient.
    """

    def reducing(apply: Callable) -> Callable:
        @functools.wraps(apply)
        def reducing_apply(self, grads, *args, **kwargs):
            # One optimizer may wrap another, and a subclass calls its base: the outermost call reduces.
            if ops.current_context() is None or _is_nested("apply"):
                return apply(self, grads, *args, **kwargs)
            with _nesting("apply"):
                return apply(self, ops.reduce_gradients(list(grads)), *args, **kwargs)

        return reducing_apply

    return private.methods_wrapped(private.loaded_classes(keras.Optimizer), "apply", reducing)


def scalars_weighed() -> contextlib.AbstractContextManager[None]:
    """Let a scalar that a mean is updated with count once per step, not once per tower.

    A scalar without a weight, such as the loss of a batch, stands for the tower's whole shard: its weight
    becomes the shard's share of the batch, so that the towers' scalars add up to the batch's mean.
    """

    def weighing(update: Callable) -> Callable:
        @functools.wraps(update)
        def weighed_update(self, values, sample_weight=None, **kwargs):
            context = ops.current_context()
            if context is not None and sample_weight is None:
                values = keras.ops.convert_to_tensor(values)
                if len(values.shape) == 0:
                    sample_weight = context.share.fraction
            return update(self, values, sample_weight, **kwargs)

        return weighed_update

    return private.methods_wrapped([keras.metrics.Mean, keras.metrics.Sum], "update_state", weighing)


def sums_kept() -> contextlib.AbstractContextManager[None]:
    """Let a loss that is a sum over the samples stay one.

    Gradients and losses of shards are combined as means are, weighted by each shard's share of the samples:
    so a sum is divided by that share. (A tower without samples divides by zero, and is left out.)
    """

    def keeping(call: Callable) -> Callable:
        @functools.wraps(call)
        def kept_call(self, *args, **kwargs):
            loss = call(self, *args, **kwargs)
            context = ops.current_context()
            if context is None or self.reduction != "sum":
                return loss
            return loss / keras.ops.cast(context.share.fraction, loss.dtype)

        return kept_call

    return private.methods_wrapped([keras.Loss], "__call__", keeping)


def results_reduced() -> contextlib.AbstractContextManager[None]:
    """Let every metric compute its result from the sum of the towers' states (where no graph does that)."""

    def reducing(result: Callable) -> Callable:
        @functools.wraps(result)
        def reduced_result(self):
            if ops.current_context() is None or _is_nested("result") or not self.variables:
                return result(self)
            with _nesting("result"):
                states = ops.all_reduce([variable.value for variable in self.variables], op="sum")
                return self.stateless_result(states)

        return reduced_result

    return private.methods_wrapped(private.loaded_classes(keras.Metric), "result", reducing)


def _is_nested(what: str) -> bool:
    return getattr(_nested, what, False)


@contextlib.contextmanager
def _nesting(what: str) -> Iterator[Any]:
    setattr(_nested, what, True)
    try:
        yield
    finally:
        setattr(_nested, what, False)
