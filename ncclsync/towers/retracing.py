"""Ask TensorFlow when a step is to be traced anew, and for which shapes: when Keras, or `tf.function`, would do so."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ncclsync.sharding.shards import fixed_specs, without_optionals


class Version(NamedTuple):
    """Name one trace of a step: programs that are made for it serve the batches for which TensorFlow takes it.

    Attributes:
        number: of the trace, from 1; a number of its own for each kind of batches' origin.
        specs: of its batches, with shapes as TensorFlow has relaxed them.
        step: of a trace that takes an iterator: that of the step in it.
        steps: of a trace that takes an iterator: how many steps it runs.
    """

    number: int
    specs: Any
    step: "Version | None" = None
    steps: int = 1


class Retracing:
    """Stand for the functions that Keras makes of a step: a step that does nothing, in functions such as Keras'.

    `tf.function` traces them when it would trace Keras': for other dtypes, structures or ranks, and for shapes that it
    then relaxes (`reduce_retracing`). So Python's state is read when one device would read it, whatever it consists of.
    Tensors of other ranks have functions of their own: TensorFlow would relax them to tensors of no known rank.
    """

    def __init__(self, steps_per_execution: Callable[[], int] = lambda: 1, *, keeps_each: bool = True) -> None:
        """Prepare; `keeps_each`: whether the step in a function of several batches has traces of its own."""
        self._made: list[Version] = []
        self._steps = steps_per_execution
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._keeps_each = keeps_each

    def __len__(self) -> int:
        """Return how many traces there are."""
        return len(self._made)

    def __getitem__(self, number: int) -> Version:
        """Return the trace of this number."""
        return self._made[number - 1]

    def of_batch(self, batch: Any) -> Version:
        """Return the trace that TensorFlow takes for a batch, of tensors or specs."""
        return self._versions(self._trace_batch, batch, batch)[0]

    def of_batches(self, batches: Sequence[Any]) -> list[Version]:
        """Return the traces of the step for several batches of one call of Keras' `predict_function`."""
        return self._versions(self._trace_batches, list(batches), batches)

    def of_iterator(self, element_spec: Any) -> Version:
        """Return the trace that TensorFlow takes for an iterator over batches of these specs."""
        return self._versions(self._trace_iterator, tf.data.IteratorSpec(element_spec), element_spec)[0]

    def _versions(self, trace: Callable[[Any], Any], given: Any, batch: Any) -> list[Version]:
        key = (trace, *(leaf.shape.rank for leaf in tf.nest.flatten(fixed_specs(batch)) if hasattr(leaf, "shape")))
        if (function := self._functions.get(key)) is None:
            function = self._functions[key] = tf.function(trace, autograph=False, reduce_retracing=True)
        return [self[tf.get_static_value(one)] for one in function.get_concrete_function(given).outputs]

    def _note(self, batch: Any, *of_iterator: Any) -> Version:
        """Note a trace, while it is made."""
        self._made.append(Version(len(self._made) + 1, fixed_specs(batch), *of_iterator))
        return self._made[-1]

    def _trace_batch(self, batch: Any) -> tf.Tensor:
        return tf.constant(self._note(batch).number)

    def _trace_batches(self, batches: Sequence[Any]) -> list[tf.Tensor]:
        own: dict[str, Version] = {}  # alike batches of a trace share the step's
        for batch in () if self._keeps_each else batches:
            if repr(specs := fixed_specs(batch)) not in own:
                own[repr(specs)] = self._note(specs)
        found = [own.get(repr(fixed_specs(batch))) or self.of_batch(batch) for batch in batches]
        return [tf.constant(version.number) for version in found]

    def _trace_iterator(self, iterator: Any) -> tf.Tensor:
        step = self.of_batch(without_optionals(iterator.get_next()))
        return tf.constant(self._note(iterator.element_spec, step, self._steps()).number)
