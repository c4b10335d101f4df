"""Collect what a step differentiates, on each tower before the towers' gradients are added up.

`nonfinite.py` and `noise_scale.py` say what is read of it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import tensorflow as tf_compat


class Observer:
    """Collect the gradients of one step with respect to variables, while it is traced.

    Attributes:
        names: of the variables; their Keras paths where known.
        gradients: tensors and `tf.IndexedSlices` of a floating dtype, in the same order: the batch's, of
            which `ops.parts` gives what a tower adds.
        scales: what the losses they are of were multiplied by, scalars; None: nothing.
        scale: the last one.
    """

    def __init__(self) -> None:
        """Observe nothing yet: see `hooks` and `around`."""
        self._nested = False
        self._clear()

    def _clear(self) -> None:
        self.names: list[str] = []
        self.gradients: list[Any] = []
        self.scales: list[tf.Tensor | None] = []
        self.scale: tf.Tensor | None = None

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Observe tapes and loss scales."""

        def observing(gradient: Callable) -> Callable:
            @functools.wraps(gradient)
            def observed(tape, target, sources, output_gradients=None, **kwargs):
                nested, self._nested = self._nested, True
                try:
                    gradients = gradient(tape, target, sources, output_gradients, **kwargs)
                finally:
                    self._nested = nested
                context = ops.current_context()
                # In a branch or a loop there is nothing that could be taken out of it. And a tape within a
                # gradient, which computes something again to differentiate it, is a part of that gradient.
                if context is not None and context.can_exchange() and not nested:
                    self._record(sources, gradients)
                return gradients

            return observed

        def recording(scale_loss: Callable) -> Callable:
            @functools.wraps(scale_loss)
            def recorded(optimizer, loss):
                scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
                self.scale = tf.convert_to_tensor(scale)
                return scale_loss(optimizer, loss)

            return recorded

        with (
            tf_compat.methods_wrapped([tf.GradientTape], "gradient", observing),
            tf_compat.methods_wrapped([keras.optimizers.LossScaleOptimizer], "scale_loss", recording),
        ):
            yield

    def around(
        self, step: Callable[[Any], Any], readers: Mapping[str, Callable[["Observer"], tf.Tensor | None]]
    ) -> Callable[[Any], Any]:
        """Return a step that returns what `step` does, and a dictionary of what `readers` report of it."""

        def observed(batch):
            # tf.function traces again when a step created variables; the last trace is the one that counts.
            self._clear()
            results = step(batch)
            readings = {name: reader(self) for name, reader in readers.items()}
            self.gradients, self.scales = [], []  # they would keep the trace alive
            return results, readings

        return observed

    def _record(self, sources: Any, gradients: Any) -> None:
        for source, gradient in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            if not isinstance(source, (tf.Variable, keras.Variable)) or gradient is None:
                continue
            if gradient.dtype.is_floating:
                self.names.append(source.path if isinstance(source, keras.Variable) else source.name)
                self.gradients.append(gradient)
                self.scales.append(self.scale)
