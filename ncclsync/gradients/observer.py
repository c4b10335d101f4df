"""Collect the gradients of a step, on each tower before the towers' gradients are added up.

`nonfinite.py` and `noise_scale.py` read them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ncclsync import ops
from ncclsync.compat import tensorflow as tf_compat


class Observer:
    """Collect the gradients of one step with respect to variables, while it is traced."""

    def __init__(self) -> None:
        self._nested = False
        self._clear()

    def _clear(self) -> None:
        self.names: list[str] = []  # of the variables: their Keras paths if known
        # The batch's, tensors and `tf.IndexedSlices` of a floating dtype; `ops.parts` gives a tower's addends.
        self.gradients: list[Any] = []
        self.scales: list[tf.Tensor | None] = []  # the scalar that each gradient's loss was multiplied by, if any
        self.scale: tf.Tensor | None = None  # the last of them

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Observe tapes and loss scales."""

        def observing(gradient, tape, target, sources, output_gradients=None, **kwargs):
            nested, self._nested = self._nested, True
            try:
                gradients = gradient(tape, target, sources, output_gradients, **kwargs)
            finally:
                self._nested = nested
            context = ops.current_context()
            # Nothing can be taken out of a branch or a loop. A tape within a gradient, which recomputes something
            # to differentiate it, is a part of that gradient.
            if context is not None and context.can_exchange() and not nested:
                self._record(sources, gradients)
            return gradients

        def recording(scale_loss, optimizer, loss):
            scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
            self.scale = tf.convert_to_tensor(scale)
            return scale_loss(optimizer, loss)

        with (
            tf_compat.methods_wrapped([tf.GradientTape], "gradient", observing),
            tf_compat.methods_wrapped([keras.optimizers.LossScaleOptimizer], "scale_loss", recording),
        ):
            yield

    def around(
        self, step: Callable[[Any], Any], readers: Mapping[str, Callable[["Observer"], tf.Tensor | None]]
    ) -> Callable[[Any], Any]:
        """Return a function that returns the results of `step`, and a dictionary of the readers' results."""

        def observed(batch):
            # tf.function traces again when a step created variables; the last trace counts.
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
